//! The listeners of the HTTP API: that of the MCP endpoint, or one of its own.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_console::access::{AccessSettings, ConsoleAccess, OWNER_TOKEN_FILE};
use mcp_satellite_files::disk::run_with_timeout;
use mcp_satellite_process::keeper::{DescriptorName, KeeperClient};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::config::{ConsolePlan, EndpointAuth, GatewayPlan};
use crate::data_dir::DataDir;
use crate::endpoint::SatelliteEndpoint;
use crate::gateway::access::load_or_create_token;
use crate::gateway::page_listener::PageListener;
use crate::gateway::pages::EndpointPages;
use crate::gateway::traffic::HttpTraffic;
use crate::gateway::{GatewaySettings, bind};

/// Time for responses on a listener that closes. Streams end then.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for responses after the console has moved: the reload that has moved it may be one of them.
const MOVE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause before an address that could not be used is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) struct ConsoleListener {
    pub(crate) access: ConsoleAccess,
    /// Cancelled when the satellite begins to end: streams to browsers end.
    pub(crate) ending: CancellationToken,
    data_dir: DataDir,
    keeper: KeeperClient,
    open: Mutex<OpenConsole>,
}

#[derive(Default)]
struct OpenConsole {
    pages: Option<EndpointPages>,
    /// Socket that was bound before the first configuration is applied.
    reserved: Option<TcpListener>,
    own: Option<PageListener>,
    /// Task that tries to open the own listener, after its address could not be used.
    retry: Option<AbortOnDropHandle<()>>,
    /// URL without a path; `None` if the console is off.
    url: Option<String>,
    /// Part of the last configuration that is not in effect, with the reason.
    problem: Option<String>,
}

impl ConsoleListener {
    pub(crate) fn new(data_dir: DataDir, keeper: KeeperClient) -> io::Result<Self> {
        let (access, ending, open) = (ConsoleAccess::new()?, CancellationToken::new(), Mutex::default());
        Ok(Self { access, ending, data_dir, keeper, open })
    }

    /// Sets what every listener serves, before the first one is opened.
    pub(crate) fn set_pages(&self, pages: EndpointPages) {
        self.open().pages = Some(pages);
    }

    /// Returns the URL of the console, without a path; `None` if it is off.
    pub(crate) fn url(&self) -> Option<String> {
        self.open().url.clone()
    }

    /// Returns the part of the last configuration that is not in effect, with the reason.
    pub(crate) fn problem(&self) -> Option<String> {
        self.open().problem.clone()
    }

    /// Binds the own address of a plan, if it has one, and checks its certificate: a start reports every error before
    /// anything else starts. Connections wait in the backlog until the plan is applied. Blocks on the disk.
    ///
    /// # Errors
    /// The address or the certificate cannot be used.
    pub(crate) fn reserve(&self, name: &str, console: &ConsolePlan, gateway: &GatewayPlan) -> io::Result<()> {
        let Some(address) = console.listen.filter(|_| console.is_on(gateway)) else { return Ok(()) };
        let failed = |hint: &'static str| {
            move |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}; {hint}"))
        };
        let settings = GatewaySettings::new(name, gateway, address);
        settings.check_certificate().map_err(failed("check the files in [gateway] tls"))?;
        let hint = "stop the process that uses the address, or set another one with [console] listen";
        let left = self.keeper.take_listener_at(DescriptorName::Console, address);
        self.open().reserved = Some(left.map_or_else(|| bind(address), Ok).map_err(failed(hint))?);
        Ok(())
    }

    /// Applies tokens and address of a configuration, after the endpoint has applied it.
    pub(crate) async fn apply(
        self: &Arc<Self>,
        name: &str,
        console: &ConsolePlan,
        gateway: &GatewayPlan,
        endpoint: &SatelliteEndpoint,
    ) {
        let is_on = console.is_on(gateway);
        let owner_token = if is_on { self.owner_token().await } else { None };
        let users = endpoint.users().unwrap_or_else(|| gateway.users.clone());
        let moved = self.move_to(console.listen.filter(|_| is_on), name, gateway, endpoint.traffic());
        self.access.apply(&AccessSettings {
            is_on,
            has_own_listener: console.listen.is_some(),
            allows_anonymous: gateway.auth != EndpointAuth::Bearer,
            has_mcp_server: console.mcp,
            owner_token: owner_token.as_ref(),
            tokens: &console.tokens,
            users: &users,
        });
        let of_endpoint = endpoint.base_url().filter(|_| is_on && console.listen.is_none());
        self.set_url(of_endpoint);
        if let Some(mut closing) = moved {
            closing.stop_accepting().await;
            // The request that has moved the listener may still wait for its response there.
            tokio::spawn(closing.close(MOVE_TIMEOUT));
        }
    }

    /// Opens a listener at `address`, or applies the settings to the one that is open there. Returns the previous
    /// listener if it must be closed. An address that cannot be used leaves the previous listener open, and is tried
    /// again.
    fn move_to(
        self: &Arc<Self>,
        address: Option<SocketAddr>,
        name: &str,
        gateway: &GatewayPlan,
        traffic: &Arc<HttpTraffic>,
    ) -> Option<PageListener> {
        let mut open = self.open();
        (open.retry, open.problem) = (None, None);
        let reserved = open.reserved.take();
        let Some((address, pages)) = address.zip(open.pages.clone()) else {
            self.keeper.forget(DescriptorName::Console);
            return open.own.take();
        };
        let settings = GatewaySettings::new(name, gateway, address);
        if let Some(own) = open.own.as_mut().filter(|own| own.address() == address) {
            return own.apply(settings).unwrap_or_else(|error| {
                tracing::error!(%address, %error, "cannot change the console's listener; its certificate stays in use");
                open.problem = Some(format!("cannot change the console: {error}; its certificate stays in use"));
                None
            });
        }
        let bound = reserved.map_or_else(|| bind(address), Ok);
        match bound.and_then(|socket| PageListener::start(socket, settings.clone(), pages.clone(), traffic)) {
            Ok(listener) => self.set_own(&mut open, listener),
            Err(error) => {
                if open.own.is_none() {
                    // The socket of the last satellite would keep the address in use.
                    self.keeper.forget(DescriptorName::Console);
                }
                let retry_seconds = RETRY_INTERVAL.as_secs();
                tracing::error!(
                    %address,
                    %error,
                    retry_seconds,
                    "cannot open the console, trying again; set another address with [console] listen"
                );
                let stays = open.own.as_ref().map(|own| format!("it stays at {} and ", own.address()));
                open.problem = Some(format!(
                    "cannot open the console at {address}: {error}; {}the satellite tries again every {retry_seconds} s; \
                     set another address with [console] listen",
                    stays.unwrap_or_default()
                ));
                let start = {
                    let traffic = traffic.clone();
                    move || {
                        let socket = bind(address)?;
                        PageListener::start(socket, settings.clone(), pages.clone(), &traffic)
                    }
                };
                open.retry = Some(AbortOnDropHandle::new(tokio::spawn(self.clone().open_later(start))));
                None
            }
        }
    }

    /// Tries to open the own listener until it succeeds.
    async fn open_later(self: Arc<Self>, start: impl Fn() -> io::Result<PageListener>) {
        let listener = loop {
            tokio::time::sleep(RETRY_INTERVAL).await;
            match start() {
                Ok(listener) => break listener,
                Err(error) => tracing::debug!(%error, "cannot open the console yet"),
            }
        };
        let previous = self.set_own(&mut self.open(), listener);
        self.set_url(None);
        if let Some(previous) = previous {
            previous.close(CLOSE_TIMEOUT).await;
        }
    }

    /// Returns the previous listener, which must be closed.
    fn set_own(&self, open: &mut OpenConsole, listener: PageListener) -> Option<PageListener> {
        tracing::info!(url = url(&listener), "the console is open");
        if let Some(socket) = listener.duplicate_socket() {
            self.keeper.keep(DescriptorName::Console, &socket);
        }
        open.problem = None;
        open.own.replace(listener)
    }

    /// Sets the URL of the own listener, or without one that of the endpoint.
    fn set_url(&self, of_endpoint: Option<String>) {
        let mut open = self.open();
        open.url = open.own.as_ref().map(url).or(of_endpoint);
    }

    /// Ends all streams and closes the own listener.
    pub(crate) async fn close(&self) {
        self.ending.cancel();
        let own = {
            let mut open = self.open();
            open.retry = None;
            open.own.take()
        };
        if let Some(own) = own {
            self.keeper.forget(DescriptorName::Console);
            own.close(CLOSE_TIMEOUT).await;
        }
    }

    /// Returns the owner's token. Without it the owner logs in with a link of `satellite console`.
    async fn owner_token(&self) -> Option<Secret> {
        let data_dir = self.data_dir.clone();
        match run_with_timeout(move || load_or_create_token(&data_dir, OWNER_TOKEN_FILE)).await {
            Some(Ok(token)) => Some(token),
            Some(Err(error)) => {
                tracing::error!(%error, file = OWNER_TOKEN_FILE, "cannot read the owner's token of the console; requests with it are rejected");
                None
            }
            None => {
                tracing::error!("the disk does not answer; the owner's token of the console is not accepted");
                None
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, OpenConsole> {
        // No lock holder calls code that could panic halfway through a change.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn url(listener: &PageListener) -> String {
    let scheme = if listener.has_tls() { "https" } else { "http" };
    format!("{scheme}://{}", listener.address())
}
