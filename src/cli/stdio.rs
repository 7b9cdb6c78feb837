//! `satellite stdio`: a bridge for MCP clients that start a command. It runs beside the client for as long as the client
//! runs, so it is small: one thread, no keeper, no spawn helper.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use mcp_satellite_bridge::{BridgeSettings, LocateError, SatelliteAddress, SatelliteLocator};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};

use super::background::BackgroundStart;
use super::{BAD_INPUT, CommandFailure, DONE, DataDirArg, FAILED, NO_SATELLITE, log_writer};
use crate::console::api::{EndpointAccess, EndpointAccessQuery};
use crate::console::client::{ClientError, ConsoleClient};
use mcp_satellite_actors::model::printable;
use mcp_satellite_process::program_pages::ProgramPages;

/// Time for a satellite that is starting to open its endpoint.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
/// Time after the start at which the client has opened its session.
const REST: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub(super) struct StdioCommand {
    /// Connect to one server, by the name that `/mcp` lists
    #[arg(long, value_name = "NAME", conflicts_with_all = ["flat", "tools"])]
    server: Option<String>,
    /// Offer the tools of all servers under their own names
    #[arg(long, conflicts_with = "tools")]
    flat: bool,
    /// Offer tools that list, describe and call the tools of all servers [default, unless the user has `flat`]
    #[arg(long)]
    tools: bool,
    /// Act as this user (slugs or ids) [default: the only user, or the one whose token the satellite stores]
    #[arg(long, value_name = "TEAM/USER")]
    user: Option<String>,
    /// Do not start a satellite if none is running
    #[arg(long)]
    no_start: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl StdioCommand {
    pub(super) fn run(self) -> Result<u8, CommandFailure> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| CommandFailure::new(FAILED, format!("cannot start the async runtime: {error}")))?;
        let outcome = runtime.block_on(self.connect());
        // A thread that reads stdin may be blocked.
        runtime.shutdown_background();
        outcome
    }

    async fn connect(self) -> Result<u8, CommandFailure> {
        let path = self.path()?;
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        // If the thread cannot be started, the caller's thread writes each line.
        let _ = log_writer::start(write_to_stderr);
        let locator = tokio::select! {
            locator = self.find_satellite() => locator?,
            _ = terminate.recv() => return Ok(DONE),
            _ = interrupt.recv() => return Ok(DONE),
        };
        let stop = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        // The start reads many pages of the program that a bridge at work does not need.
        tokio::spawn(async {
            sleep(REST).await;
            // An error means that the pages stay resident until memory is short.
            let _ = ProgramPages::find().and_then(|pages| pages.release());
        });
        let settings = BridgeSettings { path, report: Box::new(report) };
        mcp_satellite_bridge::run(settings, Box::new(locator), tokio::io::stdin(), tokio::io::stdout(), stop).await;
        Ok(DONE)
    }

    fn path(&self) -> Result<String, CommandFailure> {
        let is_name = |name: &str| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
        };
        match &self.server {
            Some(name) if is_name(name) => Ok(format!("/i/{name}/mcp")),
            Some(name) => Err(CommandFailure::new(
                BAD_INPUT,
                format!("`{name}` is not the name of a server; `satellite status` lists them"),
            )),
            None if self.flat => Ok("/mcp?mode=flat".to_owned()),
            None if self.tools => Ok("/mcp?mode=tools".to_owned()),
            None => Ok("/mcp".to_owned()),
        }
    }

    /// Finds the running satellite, or starts one and waits for its endpoint.
    async fn find_satellite(&self) -> Result<ControlSocketLocator, CommandFailure> {
        let locator = ControlSocketLocator {
            data_dir: self.data_dir.clone(),
            user: self.user.clone(),
            directory: Mutex::default(),
            first: Mutex::default(),
        };
        let deadline = Instant::now() + OPEN_TIMEOUT;
        let mut started: Option<BackgroundStart> = None;
        loop {
            let refused = match locator.request_access().await {
                Ok(address) => {
                    *locator.first.lock().unwrap_or_else(PoisonError::into_inner) = Some(address);
                    return Ok(locator);
                }
                Err(refused) => refused,
            };
            match (&mut started, refused.is_starting) {
                // The satellite opens its endpoint after its servers are installed.
                (_, true) => {}
                (None, false) if refused.failure.code == NO_SATELLITE && !self.no_start => {
                    report("no satellite is running; starting one in the background");
                    started = Some(BackgroundStart::begin(&self.data_dir)?);
                }
                (Some(started), false) if refused.failure.code == NO_SATELLITE => started.check()?,
                (_, false) => return Err(refused.failure),
            }
            if Instant::now() >= deadline {
                return Err(refused.failure);
            }
            sleep(POLL).await;
        }
    }
}

/// Reason why the satellite gives no access.
struct AccessRefused {
    failure: CommandFailure,
    /// True if the endpoint of a running satellite is not open yet.
    is_starting: bool,
}

impl<E: Into<CommandFailure>> From<E> for AccessRefused {
    fn from(error: E) -> Self {
        Self { failure: error.into(), is_starting: false }
    }
}

/// Finds the satellite by the control socket in its data directory. The socket is private to the user, and so is the
/// token that the satellite grants for as long as it runs.
struct ControlSocketLocator {
    data_dir: DataDirArg,
    user: Option<String>,
    /// Data directory of the satellite that was found first.
    directory: Mutex<Option<PathBuf>>,
    /// Address that was found before the bridge started.
    first: Mutex<Option<SatelliteAddress>>,
}

impl ControlSocketLocator {
    async fn request_access(&self) -> Result<SatelliteAddress, AccessRefused> {
        let known = self.directory.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let directory = match known {
            Some(directory) => directory,
            None => self.data_dir.resolve()?,
        };
        let query = EndpointAccessQuery { user: self.user.clone() };
        let access = ConsoleClient::new(&directory)?.post::<EndpointAccess>("/v1/endpoint", &query).await;
        let EndpointAccess { address, host, token, certificate } = access.map_err(|error| {
            let is_starting = matches!(&error, ClientError::Refused(failure) if failure.kind == "closing");
            AccessRefused { failure: error.into(), is_starting }
        })?;
        *self.directory.lock().unwrap_or_else(PoisonError::into_inner) = Some(directory);
        Ok(SatelliteAddress { address, host, token: token.map(Into::into), certificate })
    }
}

impl SatelliteLocator for ControlSocketLocator {
    fn locate(&self) -> BoxFuture<'_, Result<SatelliteAddress, LocateError>> {
        async {
            let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
            match first {
                Some(first) => Ok(first),
                None => self.request_access().await.map_err(|refused| LocateError(refused.failure.message)),
            }
        }
        .boxed()
    }
}

/// Prints a message for people. stdout belongs to the client, and a client that does not read stderr must not delay the
/// bridge.
fn report(message: &str) {
    let line = format!("satellite: {}\n", printable::lines(message));
    if !log_writer::write(line.as_bytes()) {
        write_to_stderr(line.as_bytes());
    }
}

fn write_to_stderr(line: &[u8]) {
    use std::io::Write as _;
    // Nobody else could be told about an error.
    let _ = std::io::stderr().write_all(line);
}
