//! Life cycle of the satellite's MCP endpoint: opened, changed and closed as the configuration requires.
//! [`gateway`](crate::gateway) implements the endpoint itself.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use jiff::{Timestamp, Unit};
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::audience::Audience;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::ids::{InstanceId, TeamId, UserId};
use mcp_satellite_actors::model::secret::Secret;

use crate::config::{EndpointAuth, GatewayLimits, GatewayPlan, GatewayUser, LISTEN, ListenSetting, TokenHash};
use crate::console::api::{EndpointAccess, EndpointStatus, RequestFailure};
use crate::data_dir::DataDir;
use crate::gateway::access::{Access, TOKEN_FILE, body_budget_per_user, load_or_create_token, new_token};
use crate::gateway::audience::GatewayAudience;
use crate::gateway::clients::ClientStatus;
use crate::gateway::control_server::ControlTools;
use crate::gateway::dispatch::EndpointDispatcher;
use crate::gateway::endpoint_id::EndpointId;
use crate::gateway::pages::EndpointPages;
use crate::gateway::sessions::Sessions;
use crate::gateway::traffic::HttpTraffic;
use crate::gateway::{self, Gateway, GatewaySettings};
use mcp_satellite_files::disk::run_with_timeout;
use mcp_satellite_process::keeper::{DescriptorName, KeeperClient};
use mcp_satellite_telemetry::EndpointFacts;

#[derive(Debug, thiserror::Error)]
#[error("cannot serve the MCP endpoint at {address}: {why}; {hint}")]
pub(crate) struct EndpointError {
    address: SocketAddr,
    why: io::Error,
    hint: &'static str,
}

const ADDRESS_HINT: &str =
    "stop the process that uses the address, or set another one with [gateway] listen or --listen";
const TOKEN: &str = "check the file `token` in the data directory";
const LISTEN_FILE: &str = "listen";
const LISTEN_FILE_MAX: u64 = 100;
/// Ports for the endpoint if its default port is taken, below the range of ephemeral ports.
const FALLBACK_PORTS: std::ops::Range<u16> = 7301..7901;

/// Number of users that an error lists.
const NAMES_MAX: usize = 20;

const CERTIFICATE: &str = "check the files in [gateway] tls";

pub(crate) struct SatelliteEndpoint {
    name: String,
    data_dir: DataDir,
    sessions: Arc<Sessions>,
    audience: Arc<GatewayAudience>,
    open: Mutex<Option<OpenEndpoint>>,
    stored_token: Mutex<Option<Secret>>,
    /// Socket that the service manager has passed.
    passed_listener: Option<TcpListener>,
    keeper: KeeperClient,
    /// Tokens for clients that have asked over the control socket, by user. They end with the satellite.
    granted_tokens: Mutex<HashMap<(TeamId, UserId), Secret>>,
    /// Routes for other paths than those of MCP, and the tools of the control plane.
    pages: OnceLock<(EndpointPages, Arc<dyn ControlTools>)>,
    /// True if the configuration has an endpoint, which may not be open yet.
    is_expected: AtomicBool,
    /// Part of the last configuration that is not in effect, with the reason.
    problem: Mutex<Option<String>>,
    /// Budget for the large bodies of requests to the control API: as much as one user of the endpoint has.
    page_bodies: Arc<ByteBudget>,
}

#[derive(Clone)]
struct OpenEndpoint {
    gateway: Arc<Gateway>,
    access: Arc<Access>,
    plan: GatewayPlan,
}

/// Reserved address and checked settings of the endpoint. Reserving first reports every error before anything else
/// starts.
pub(crate) struct ReservedEndpoint {
    listener: TcpListener,
    settings: GatewaySettings,
    access: Arc<Access>,
    plan: GatewayPlan,
}

impl SatelliteEndpoint {
    /// Data that the satellite holds for clients counts against `memory`.
    pub(crate) fn new(
        name: &str,
        data_dir: DataDir,
        memory: Arc<ByteBudget>,
        passed_listener: Option<TcpListener>,
        keeper: KeeperClient,
    ) -> Self {
        let page_bodies = memory.part(body_budget_per_user(&GatewayLimits::default()));
        let sessions = Arc::new(Sessions::with_memory(memory));
        let audience = Arc::new(GatewayAudience::new(sessions.clone()));
        Self {
            name: name.to_owned(),
            data_dir,
            sessions,
            audience,
            open: Mutex::default(),
            stored_token: Mutex::default(),
            passed_listener,
            keeper,
            granted_tokens: Mutex::default(),
            pages: OnceLock::new(),
            is_expected: AtomicBool::new(false),
            problem: Mutex::default(),
            page_bodies,
        }
    }

    /// Returns the load of the endpoint for the metrics; `None` unless it is open.
    pub(crate) fn facts(&self) -> Option<EndpointFacts> {
        let gateway = self.state().as_ref()?.gateway.clone();
        let clients = gateway.clients();
        Some(EndpointFacts {
            sessions: gateway.session_count(),
            clients: clients.len(),
            open: clients.iter().map(|client| client.open).sum(),
            stream_bytes: self.sessions.stream_budget().used(),
            connections: gateway.connection_counts(),
            parked_calls: gateway.parked_call_count(),
        })
    }

    /// Returns the counters of HTTP requests and bytes of all listeners.
    pub(crate) fn traffic(&self) -> &Arc<HttpTraffic> {
        self.sessions.traffic()
    }

    /// Returns the budget for the large bodies of requests to the control API.
    pub(crate) fn page_bodies(&self) -> &Arc<ByteBudget> {
        &self.page_bodies
    }

    pub(crate) fn audience(&self) -> Arc<dyn Audience> {
        self.audience.clone()
    }

    /// Binds the address, if the plan has one. Connections wait in the backlog until the endpoint is opened.
    pub(crate) fn reserve(&self, mut plan: GatewayPlan) -> Result<Option<ReservedEndpoint>, EndpointError> {
        self.page_bodies.set_max(body_budget_per_user(&plan.limits));
        let address = plan.address();
        self.is_expected.store(address.is_some(), Ordering::Release);
        let Some(address) = address else { return Ok(None) };
        let failed = |hint| move |why| EndpointError { address, why, hint };
        self.add_stored_token(&mut plan).map_err(failed(TOKEN))?;
        let listener = if let Some(passed) = self.passed_listener(address) {
            passed.try_clone()
        } else if let Some(left) = self.take_listener(plan.listen, address) {
            Ok(left)
        } else if plan.listen == ListenSetting::DefaultAddress {
            self.bind_default()
        } else {
            gateway::bind(address)
        };
        let listener = listener.map_err(failed(ADDRESS_HINT))?;
        let address = listener.local_addr().map_err(failed(ADDRESS_HINT))?;
        let settings = GatewaySettings::new(&self.name, &plan, address);
        settings.check_certificate().map_err(failed(CERTIFICATE))?;
        let access = Arc::new(Access::new(&plan).map_err(failed(TOKEN))?);
        Ok(Some(ReservedEndpoint { listener, settings, access, plan }))
    }

    fn passed_listener(&self, address: SocketAddr) -> Option<&TcpListener> {
        let is_it = |passed: &&TcpListener| passed.local_addr().is_ok_and(|passed| passed == address);
        self.passed_listener.as_ref().filter(is_it)
    }

    /// Takes over the socket of the last satellite below the same keeper if its address is still the configured one.
    fn take_listener(&self, listen: ListenSetting, address: SocketAddr) -> Option<TcpListener> {
        if listen != ListenSetting::DefaultAddress {
            return self.keeper.take_listener_at(DescriptorName::Endpoint, address);
        }
        self.keeper
            .take_listener(DescriptorName::Endpoint, |bound| bound == LISTEN || self.stored_address() == Some(bound))
    }

    /// Lets the keeper hold the socket, so that clients which connect after a crash wait for the next satellite. The
    /// service manager holds one that it has passed.
    fn keep_listener(&self, gateway: &Gateway) {
        let own = gateway.duplicate_socket().filter(|_| self.passed_listener(gateway.address()).is_none());
        match own {
            Some(listener) => self.keeper.keep(DescriptorName::Endpoint, &listener),
            None => self.keeper.forget(DescriptorName::Endpoint),
        }
    }

    pub(crate) fn open(&self, reserved: ReservedEndpoint, runtime: &RuntimeHandle) -> Result<(), EndpointError> {
        let ReservedEndpoint { listener, settings, access, plan } = reserved;
        let address = listener.local_addr().unwrap_or(LISTEN);
        let tools = self.pages.get().map(|(_, tools)| tools.clone());
        let dispatcher = Arc::new(EndpointDispatcher::new(runtime, self.audience.clone()).with_control(tools));
        let emitter = runtime.emitter().clone();
        let tell = Box::new(move |event| emitter.emit(event));
        let gateway = Gateway::start(listener, settings, access.clone(), dispatcher, self.sessions.clone(), tell);
        let gateway = Arc::new(gateway.map_err(|why| EndpointError { address, why, hint: ADDRESS_HINT })?);
        if let Some((pages, _)) = self.pages.get() {
            gateway.set_pages(pages.clone());
        }
        self.keep_listener(&gateway);
        tracing::info!(url = plan.url(gateway.address()), "the MCP endpoint is open");
        *self.state() = Some(OpenEndpoint { gateway, access, plan });
        Ok(())
    }

    /// Returns the part of the last configuration that is not in effect, with the reason.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_problem(&self, problem: Option<String>) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = problem;
    }

    pub(crate) async fn apply(&self, mut plan: GatewayPlan, runtime: &RuntimeHandle) {
        self.set_problem(None);
        self.page_bodies.set_max(body_budget_per_user(&plan.limits));
        let Some(open) = self.state().clone() else {
            let opened = self
                .reserve(plan)
                .and_then(|reserved| reserved.map_or(Ok(()), |reserved| self.open(reserved, runtime)));
            if let Err(error) = opened {
                tracing::error!(%error, "the MCP endpoint stays closed");
                self.set_problem(Some(format!("the MCP endpoint stays closed: {error}")));
            }
            return;
        };
        if plan.address().is_none() {
            tracing::info!("the MCP endpoint is switched off");
            self.is_expected.store(false, Ordering::Release);
            return self.close().await;
        }
        self.reload_stored_token(&mut plan).await;
        self.add_granted_tokens(&mut plan);
        open.access.apply(&plan);
        let elsewhere = match open.gateway.bind_new_address(plan.listen) {
            Ok(elsewhere) => elsewhere,
            Err(error) => {
                let (wanted, stays) = (plan.address(), open.gateway.address());
                tracing::error!(?wanted, %stays, %error, "cannot move the MCP endpoint; its address stays in use");
                let wanted = wanted.map(|address| address.to_string()).unwrap_or_default();
                let problem = format!("cannot listen at {wanted}: {error}; the MCP endpoint stays at {stays}");
                self.set_problem(Some(problem));
                // The plan's choice of plain HTTP applied to the new address only.
                plan.tls = plan.tls.or_else(|| open.gateway.tls());
                None
            }
        };
        let address = elsewhere.as_ref().and_then(|listener| listener.local_addr().ok());
        let settings = GatewaySettings::new(&self.name, &plan, address.unwrap_or_else(|| open.gateway.address()));
        match open.gateway.apply(settings, elsewhere) {
            Ok(()) if address.is_some() => {
                self.keep_listener(&open.gateway);
                tracing::info!(url = plan.url(open.gateway.address()), "the MCP endpoint has moved");
            }
            Ok(()) => {}
            Err(error) => {
                let stays = open.gateway.address();
                tracing::error!(%stays, %error, "cannot change the MCP endpoint; address and certificate stay in use");
                let problem =
                    format!("cannot change the MCP endpoint: {error}; it stays at {stays} with its certificate");
                self.set_problem(Some(problem));
            }
        }
        // Record the settings in effect, which may differ from those requested.
        plan.tls = open.gateway.tls();
        self.store_plan(open, plan);
    }

    /// Records a plan that was applied. A token that was granted meanwhile was added to the plan before.
    fn store_plan(&self, open: OpenEndpoint, mut plan: GatewayPlan) {
        let mut state = self.state();
        self.add_granted_tokens(&mut plan);
        open.access.apply(&plan);
        *state = Some(OpenEndpoint { plan, ..open });
    }

    /// Notes that this satellite follows one that has crashed: clients of its sessions learn that they are lost.
    pub(crate) fn note_crash(&self, generation: u32) {
        let now = Timestamp::now().round(Unit::Second).unwrap_or_else(|_| Timestamp::now());
        self.sessions.note_crash(generation, &now.to_string());
    }

    /// Applies the users and tokens of `plan` only and ends the sessions of removed tokens. Returns true if they
    /// changed.
    pub(crate) async fn apply_users(&self, mut plan: GatewayPlan) -> bool {
        let Some(open) = self.state().clone() else { return false };
        self.reload_stored_token(&mut plan).await;
        self.add_granted_tokens(&mut plan);
        if plan.users == open.plan.users {
            return false;
        }
        let plan = GatewayPlan { users: plan.users, ..open.plan.clone() };
        open.access.apply(&plan);
        open.gateway.end_revoked_sessions();
        self.store_plan(open, plan);
        true
    }

    pub(crate) fn remove_instance(&self, id: &InstanceId) {
        if let Some(open) = &*self.state() {
            open.gateway.end_endpoint_sessions(&EndpointId::Instance(id.clone()));
        }
    }

    /// Stops accepting requests and closes the endpoint after the requests in progress are answered.
    pub(crate) async fn close(&self) {
        let open = self.state().take();
        if let Some(open) = open {
            self.keeper.forget(DescriptorName::Endpoint);
            open.gateway.drain().await;
        }
    }

    pub(crate) fn status(&self) -> Option<EndpointStatus> {
        let state = self.state();
        let open = state.as_ref()?;
        let bearer = open.plan.auth == EndpointAuth::Bearer;
        let has_stored_token = bearer && open.plan.users.iter().any(|user| user.has_stored_token);
        Some(EndpointStatus {
            url: open.plan.url(open.gateway.address()),
            auth: if bearer { "bearer" } else { "none" }.to_owned(),
            token_file: has_stored_token.then(|| self.data_dir.path().join(TOKEN_FILE).display().to_string()),
            sessions: open.gateway.session_count(),
            clients: open.gateway.clients().len(),
        })
    }

    /// Returns the users with all their tokens; `None` if the endpoint is closed.
    pub(crate) fn users(&self) -> Option<Vec<GatewayUser>> {
        self.state().as_ref().map(|open| open.plan.users.clone())
    }

    /// Returns the URL of the endpoint without a path; `None` if it is closed.
    pub(crate) fn base_url(&self) -> Option<String> {
        let url = self.state().as_ref().map(|open| open.plan.url(open.gateway.address()))?;
        Some(url.trim_end_matches("/mcp").to_owned())
    }

    /// Sets the routes for other paths than those of MCP, and the tools of the control plane.
    pub(crate) fn set_control(&self, pages: EndpointPages, tools: Arc<dyn ControlTools>) {
        // Set once, before the endpoint is opened.
        let _ = self.pages.set((pages, tools));
    }

    pub(crate) fn is_opening(&self) -> bool {
        self.is_expected.load(Ordering::Acquire) && self.state().is_none()
    }

    /// Returns the address of the endpoint and a token of `user`, as `TEAM/USER` or `USER`. Without a name it is the only
    /// user, or the one with the stored token. Whoever can use the control socket can act as any user.
    ///
    /// # Errors
    /// The endpoint is off or not open, or `user` does not name one user.
    pub(crate) fn grant_access(&self, user: Option<&str>) -> Result<EndpointAccess, Box<RequestFailure>> {
        let refused = |kind, message| Box::new(RequestFailure::new(kind, message));
        let mut state = self.state();
        let Some(open) = state.as_mut() else {
            return Err(if self.is_expected.load(Ordering::Acquire) {
                refused("closing", "the MCP endpoint is not open at the moment".to_owned())
            } else {
                let why = "the satellite has no MCP endpoint; add [gateway] to its configuration and run `satellite \
                           reload`";
                refused("refused", why.to_owned())
            });
        };
        let address = open.gateway.address();
        let host = match open.plan.hosts.first() {
            Some(host) if !address.ip().is_loopback() => host.clone(),
            Some(_) | None => address.to_string(),
        };
        let address = match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), address.port()),
            IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), address.port()),
            _ => address,
        };
        let certificate = open.plan.tls.as_ref().map(|tls| tls.cert.clone());
        let selected = select_user(&open.plan, user)?;
        if open.plan.auth != EndpointAuth::Bearer {
            return Ok(EndpointAccess { address, host, token: None, certificate });
        }
        let key = (selected.team.clone(), selected.user.clone());
        let token = match self.granted_tokens().entry(key) {
            std::collections::hash_map::Entry::Occupied(known) => known.get().clone(),
            std::collections::hash_map::Entry::Vacant(place) => {
                let token = new_token().map_err(|error| refused("closing", error.to_string()))?;
                place.insert(token).clone()
            }
        };
        if !selected.tokens.contains(&TokenHash::from_token(token.expose())) {
            self.add_granted_tokens(&mut open.plan);
            open.access.apply(&open.plan);
        }
        Ok(EndpointAccess { address, host, token: Some(token.expose().to_owned()), certificate })
    }

    fn add_granted_tokens(&self, plan: &mut GatewayPlan) {
        let granted = self.granted_tokens();
        for user in &mut plan.users {
            if let Some(token) = granted.get(&(user.team.clone(), user.user.clone())) {
                let hash = TokenHash::from_token(token.expose());
                if !user.tokens.contains(&hash) {
                    user.tokens.push(hash);
                }
            }
        }
    }

    fn granted_tokens(&self) -> MutexGuard<'_, HashMap<(TeamId, UserId), Secret>> {
        self.granted_tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers an MCP request for an instance as a request of its user. Returns `None` if the endpoint is closed or the
    /// user is unknown.
    pub(crate) async fn answer_as(
        &self,
        team: &TeamId,
        user: &UserId,
        instance: &str,
        request: axum::http::Request<axum::body::Body>,
    ) -> Option<axum::response::Response> {
        let open = self.state().clone()?;
        let permission = open.access.act_as(team, user)?;
        Some(open.gateway.answer_as(&permission, instance, request).await)
    }

    pub(crate) fn clients(&self) -> Vec<ClientStatus> {
        self.state().as_ref().map(|open| open.gateway.clients()).unwrap_or_default()
    }

    /// Binds the address that clients of this data directory know: the remembered one, else the default. If both are
    /// taken, binds the first free port of a range, starting at a port derived from the path of the data directory, and
    /// remembers that address.
    fn bind_default(&self) -> io::Result<TcpListener> {
        let remembered = self.stored_address();
        for address in remembered.into_iter().chain([LISTEN]) {
            match gateway::bind(address) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    tracing::warn!(%address, "the address of the MCP endpoint is taken; another port is used");
                }
                bound => return bound,
            }
        }
        let digest = ring::digest::digest(&ring::digest::SHA256, self.data_dir.path().as_os_str().as_encoded_bytes());
        let start = digest.as_ref().iter().fold(0, |sum, byte| (sum * 256 + usize::from(*byte)) % FALLBACK_PORTS.len());
        // Port 0 at the end of the range means any free port.
        for port in FALLBACK_PORTS.cycle().skip(start).take(FALLBACK_PORTS.len()).chain([0]) {
            match gateway::bind(SocketAddr::new(LISTEN.ip(), port)) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                bound => {
                    let address = bound.as_ref().ok().and_then(|listener| listener.local_addr().ok());
                    if let Some(address) = address {
                        self.store_address(address);
                    }
                    return bound;
                }
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    fn stored_address(&self) -> Option<SocketAddr> {
        let read = self.data_dir.read(LISTEN_FILE, LISTEN_FILE_MAX).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the remembered address of the MCP endpoint");
            None
        });
        let address: SocketAddr = std::str::from_utf8(&read?).ok()?.trim().parse().ok()?;
        // The file can choose the port only, not the IP address and thereby not who can reach the endpoint.
        (address.ip() == LISTEN.ip() && address.port() != 0).then_some(address)
    }

    fn store_address(&self, address: SocketAddr) {
        match self.data_dir.replace(LISTEN_FILE, format!("{address}\n").as_bytes()) {
            Ok(()) => {
                tracing::info!(%address, file = LISTEN_FILE, "remembered the address of the MCP endpoint in the data directory; remove the file to return to the usual address");
            }
            Err(error) => tracing::warn!(%address, %error, "cannot remember the address of the MCP endpoint"),
        }
    }

    fn add_stored_token(&self, plan: &mut GatewayPlan) -> io::Result<()> {
        if plan.auth == EndpointAuth::Bearer && plan.users.iter().any(|user| user.has_stored_token) {
            let token = load_or_create_token(&self.data_dir, TOKEN_FILE)?;
            plan.add_stored_token(&token);
            *self.stored_token() = Some(token);
        }
        Ok(())
    }

    /// Reads the token in the data directory again. If it cannot be read, requests with it are rejected; if the disk
    /// does not answer, the token that was read last stays valid. Other users of the plan are not affected.
    async fn reload_stored_token(&self, plan: &mut GatewayPlan) {
        if plan.auth != EndpointAuth::Bearer || !plan.users.iter().any(|user| user.has_stored_token) {
            return;
        }
        let data_dir = self.data_dir.clone();
        let read = run_with_timeout(move || load_or_create_token(&data_dir, TOKEN_FILE)).await;
        let mut stored = self.stored_token();
        match read {
            Some(Ok(token)) => *stored = Some(token),
            Some(Err(error)) => {
                tracing::error!(%error, "cannot read the token in the data directory; requests with it are rejected");
                *stored = None;
            }
            None => tracing::error!("the disk does not answer; the token that was read last stays valid"),
        }
        if let Some(token) = &*stored {
            plan.add_stored_token(token);
        }
    }

    fn stored_token(&self) -> MutexGuard<'_, Option<Secret>> {
        self.stored_token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, Option<OpenEndpoint>> {
        // No lock holder calls code that could panic halfway through a change.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn select_user<'a>(plan: &'a GatewayPlan, named: Option<&str>) -> Result<&'a GatewayUser, Box<RequestFailure>> {
    let failed = |kind, message: String| Err(Box::new(RequestFailure::new(kind, message)));
    let found: Vec<&GatewayUser> = match (named, &plan.auth) {
        (None, EndpointAuth::None(_)) => plan.single_user().into_iter().collect(),
        (None, EndpointAuth::Bearer) if plan.users.len() > 1 => {
            plan.users.iter().filter(|user| user.has_stored_token).collect()
        }
        (None, EndpointAuth::Bearer) => plan.users.iter().collect(),
        (Some(named), _) => {
            let (team, name) = named.split_once('/').map_or((None, named), |(team, name)| (Some(team), name));
            let is_named = |user: &&GatewayUser| {
                let is_in_team = team.is_none_or(|team| user.team_slug.as_str() == team || user.team.as_str() == team);
                is_in_team && (user.slug.as_str() == name || user.user.as_str() == name)
            };
            plan.users.iter().filter(is_named).collect()
        }
    };
    let all = || {
        let shown: Vec<String> =
            plan.users.iter().take(NAMES_MAX).map(|user| format!("{}/{}", user.team_slug, user.slug)).collect();
        let more = if plan.users.len() > NAMES_MAX { ", …" } else { "" };
        format!("{}{more}", shown.join(", "))
    };
    match (&found[..], named) {
        ([user], _) => match (&plan.auth, plan.single_user()) {
            (EndpointAuth::None(_), Ok(only)) if (&only.team, &only.user) != (&user.team, &user.user) => {
                let only = format!("{}/{}", only.team_slug, only.slug);
                failed("not_found", format!("without authentication every client is `{only}`; remove --user"))
            }
            _ => Ok(user),
        },
        (_, None) if plan.users.is_empty() => failed("not_found", "the configuration has no users".to_owned()),
        (_, None) => failed("ambiguous", format!("there are several users; name one with --user: {}", all())),
        ([], Some(named)) => failed("not_found", format!("there is no user `{named}`; the users are: {}", all())),
        (_, Some(named)) => {
            failed("ambiguous", format!("several teams have a user `{named}`; write --user TEAM/USER: {}", all()))
        }
    }
}
