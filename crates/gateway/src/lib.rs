//! The MCP endpoint: streamable HTTP for every client. It owns no server and makes no decision about one.
//!
//! ```text
//! listen          TCP, TLS, limits of connections
//! http_requests   guard → path → access → method → body → access → drain → rate → era → session (or none)
//! session_call    one request in a session: JSON, or a stream
//!                                            session   one client: open requests, questions, streams
//! stateless_call  one stateless request                 or one stateless request
//! ──────────── handler: the interface, which passes an EndpointRequest to one of three views ────────────
//! one instance, passed through · the tools that find tools · all tools in one list
//! ```
//!
//! This code replaces the HTTP server of rmcp. That server parses every message into its own types, finds a session by
//! its id alone, cancels the call of a disconnected client only without sessions, and keeps two tasks and about 50 KB
//! for each idle session.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

pub mod access;
pub mod answer;
pub mod audience;
pub mod client_description;
pub mod clients;
mod connections;
pub mod control_server;
pub mod dispatch;
pub mod endpoint_id;
mod era;
pub mod flat;
mod forward;
pub mod guard;
pub mod handler;
mod http_requests;
mod instance;
mod instructions;
mod listen;
mod metadata;
pub mod names;
pub mod page_listener;
pub mod pages;
mod parked_calls;
pub mod refusal;
pub mod remedy;
mod reply;
pub mod request;
pub mod search;
pub mod session;
mod session_call;
pub mod sessions;
mod settings;
mod shared_session;
mod stateless_call;
pub mod stream;
pub mod subscription;
pub mod tools;
pub mod traffic;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Duration, Instant, timeout};

use access::Access;
use clients::ClientStatus;
use connections::Connections;
use endpoint_id::EndpointId;
use handler::EndpointHandler;
use http_requests::EndpointService;
use listen::{EndpointListener, ListenerTerms};
use mcp_satellite_config::{ListenSetting, TlsFiles};
use session::SessionEnd;
use sessions::Sessions;
pub use settings::{ClientEventSink, GatewaySettings};
use stateless_call::StatelessCall;

/// A running endpoint. Dropping it ends it at once.
pub struct Gateway {
    endpoint: Arc<EndpointService>,
    terms: Arc<ListenerTerms>,
    listeners: Mutex<EndpointListeners>,
    sweeper: JoinHandle<()>,
}

struct EndpointListeners {
    address: SocketAddr,
    open: Option<EndpointListener>,
    // Listeners of earlier settings, until their connections have ended.
    closing: JoinSet<()>,
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("address", &self.address()).finish_non_exhaustive()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.sweeper.abort();
        // Each parked call holds an `Arc` of the front that contains it; this breaks the cycle.
        self.endpoint.parked.clear();
    }
}

/// Binds the address, so that a conflict is known before anything else starts.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    listen::bind(address)
}

impl Gateway {
    pub fn start(
        listener: TcpListener,
        settings: GatewaySettings,
        access: Arc<Access>,
        handler: Arc<dyn EndpointHandler>,
        sessions: Arc<Sessions>,
        event_sink: ClientEventSink,
    ) -> io::Result<Self> {
        let connections = Connections::new(settings.connection_limits(), sessions.traffic().clone());
        let terms = Arc::new(ListenerTerms::new(settings.load_identity()?, connections.clone()));
        let address = listener.local_addr()?;
        let endpoint = Arc::new(EndpointService::new(handler, sessions, event_sink, access, connections, settings));
        let endpoint_listener = EndpointListener::open_endpoint(listener, endpoint.clone(), terms.clone())?;
        let listeners = EndpointListeners { address, open: Some(endpoint_listener), closing: JoinSet::new() };
        let sweeper = tokio::spawn(sweep(endpoint.clone()));
        Ok(Self { endpoint, terms, listeners: Mutex::new(listeners), sweeper })
    }

    /// Serves other paths than those of MCP by `pages`.
    pub fn set_pages(&self, pages: pages::EndpointPages) {
        self.endpoint.set_pages(pages);
    }

    /// Answers an MCP request for an instance with this permission, whatever token the request contains.
    pub async fn answer_as(
        &self,
        permission: &access::Permission,
        instance: &str,
        request: axum::http::Request<axum::body::Body>,
    ) -> axum::response::Response {
        http_requests::handle_as(&self.endpoint, permission, instance, request).await
    }

    pub fn address(&self) -> SocketAddr {
        self.listeners().address
    }

    /// Returns a duplicate of the listening socket; `None` while the endpoint drains.
    pub fn duplicate_socket(&self) -> Option<TcpListener> {
        self.listeners().open.as_ref()?.duplicate_socket()
    }

    pub fn tls(&self) -> Option<TlsFiles> {
        self.endpoint.settings().tls.clone()
    }

    pub fn session_count(&self) -> usize {
        self.endpoint.sessions.len()
    }

    /// Returns the number of connections with and without a valid token.
    pub fn connection_counts(&self) -> (usize, usize) {
        self.endpoint.connections.counts()
    }

    /// Returns the number of stateless calls that wait for a response of their client.
    pub fn parked_call_count(&self) -> usize {
        self.endpoint.parked.len()
    }

    pub fn clients(&self) -> Vec<ClientStatus> {
        self.endpoint.sessions.clients(Instant::now())
    }

    /// Binds a new listener if `listen` names another address; the caller passes it to [`apply`](Self::apply).
    ///
    /// # Errors
    /// The new address cannot be bound.
    pub fn bind_new_address(&self, listen: ListenSetting) -> io::Result<Option<TcpListener>> {
        let now = self.address();
        match listen {
            // The configuration accepts any port, so the current one stays.
            ListenSetting::Address(address) if address.port() == 0 && address.ip() == now.ip() => Ok(None),
            ListenSetting::Address(address) if address != now => bind(address).map(Some),
            ListenSetting::Address(_) | ListenSetting::DefaultAddress | ListenSetting::Off => Ok(None),
        }
    }

    /// Replaces the settings, and moves to another address if `new_listener` is given. Ends sessions whose token is no
    /// longer accepted. Connections that the new settings would create differently end after their open requests, at
    /// the latest after [`drain_timeout`](mcp_satellite_config::GatewayLimits::drain_timeout); sessions outlive them.
    ///
    /// # Errors
    /// The certificate or the address cannot be used. Both keep their old value, because a new certificate may
    /// belong to the new address; all other settings apply.
    pub fn apply(&self, mut settings: GatewaySettings, new_listener: Option<TcpListener>) -> io::Result<()> {
        let (old_settings, old_identity) = (self.endpoint.settings(), self.terms.load_identity());
        let applied = settings.load_identity().and_then(|identity| {
            let tls_switched = settings.tls.is_some() != old_settings.tls.is_some();
            self.terms.set(identity, settings.connection_limits());
            self.endpoint.set_settings(Arc::new(settings.clone()));
            self.move_to(new_listener, tls_switched, settings.limits.drain_timeout)
        });
        if applied.is_err() {
            settings.tls.clone_from(&old_settings.tls);
            settings.guard.loopback = old_settings.guard.loopback;
            self.terms.set(old_identity, settings.connection_limits());
            self.endpoint.set_settings(Arc::new(settings));
        }
        self.end_revoked_sessions();
        applied
    }

    fn move_to(&self, new_listener: Option<TcpListener>, tls_switched: bool, time_left: Duration) -> io::Result<()> {
        let mut listeners = self.listeners();
        while listeners.closing.try_join_next().is_some() {}
        let Some(open) = listeners.open.as_ref().filter(|_| tls_switched || new_listener.is_some()) else {
            return Ok(());
        };
        let (endpoint, terms) = (self.endpoint.clone(), self.terms.clone());
        let (address, endpoint_listener) = match new_listener {
            Some(listener) => (listener.local_addr()?, EndpointListener::open_endpoint(listener, endpoint, terms)?),
            None => (listeners.address, open.reopen_endpoint(endpoint, terms)?),
        };
        listeners.address = address;
        if let Some(old) = listeners.open.replace(endpoint_listener) {
            listeners.closing.spawn(old.close(time_left));
        }
        Ok(())
    }

    pub fn end_revoked_sessions(&self) {
        for session in self.endpoint.sessions.all() {
            if !self.endpoint.access.is_valid(&session.facts.permission) {
                self.end_session(&session, SessionEnd::Revoked);
            }
        }
        self.end_stateless_requests(SessionEnd::Revoked, |session| {
            !self.endpoint.access.is_valid(&session.facts.permission)
        });
    }

    fn end_stateless_requests(&self, reason: SessionEnd, ends: impl Fn(&session::ClientSession) -> bool) {
        for session in self.endpoint.sessions.stateless_requests() {
            if ends(&session) {
                session.end(reason);
            }
        }
        self.endpoint.parked.sweep(Instant::now(), StatelessCall::is_over);
    }

    pub fn end_endpoint_sessions(&self, endpoint: &EndpointId) {
        for session in self.endpoint.sessions.all() {
            if session.facts.endpoint == *endpoint {
                self.end_session(&session, SessionEnd::Removed);
            }
        }
        self.end_stateless_requests(SessionEnd::Removed, |session| session.facts.endpoint == *endpoint);
    }

    fn end_session(&self, session: &Arc<session::ClientSession>, reason: SessionEnd) {
        if let Some(session) = self.endpoint.sessions.close(session, reason) {
            self.endpoint.handle_session_end(&session);
        }
    }

    fn listeners(&self) -> MutexGuard<'_, EndpointListeners> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rejects new requests, waits up to the drain timeout for the open ones, and ends all sessions.
    pub async fn drain(&self) {
        let until = Instant::now() + self.endpoint.settings().limits.drain_timeout;
        self.endpoint.drain();
        // On a timeout, the unanswered requests are cancelled with their sessions.
        let _ = timeout(until.saturating_duration_since(Instant::now()), self.endpoint.wait_for_open_requests()).await;
        for session in self.endpoint.sessions.all() {
            self.end_session(&session, SessionEnd::Drained);
        }
        self.end_stateless_requests(SessionEnd::Drained, |_| true);
        let (open, mut closing) = {
            let mut listeners = self.listeners();
            (listeners.open.take(), std::mem::take(&mut listeners.closing))
        };
        let time_left = until.saturating_duration_since(Instant::now()).max(FINAL_WRITE_TIMEOUT);
        if let Some(listener) = open {
            closing.spawn(listener.close(time_left));
        }
        // Listeners of earlier settings may have had more time; now all share the same deadline.
        let _ = timeout(time_left + FINAL_WRITE_TIMEOUT, closing.join_all()).await;
    }
}

// Time to write the last answers.
const FINAL_WRITE_TIMEOUT: Duration = Duration::from_millis(100);

async fn sweep(endpoint: Arc<EndpointService>) {
    const AT_MOST: Duration = Duration::from_secs(5);
    loop {
        let limits = endpoint.settings().limits.clone();
        let shortest = limits.session_idle.min(limits.session_age_max) / 2;
        let pause = AT_MOST.min(shortest).max(Duration::from_millis(10));
        // The timeout is the normal pause; a change of the settings ends it early.
        let _ = timeout(pause, endpoint.wait_for_settings_change()).await;
        for session in endpoint.sessions.sweep(&endpoint.settings().limits, Instant::now()) {
            endpoint.handle_session_end(&session);
        }
        endpoint.parked.sweep(Instant::now(), StatelessCall::is_over);
        endpoint.sessions.free_stream_memory();
    }
}
