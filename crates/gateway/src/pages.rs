//! Requests for paths that are not of MCP: the API and the pages of the console, on the listener of the endpoint or on
//! one of their own.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Uri};
use axum::response::Response;
use tower_service::Service as _;

use super::connections::Connections;
use super::guard::{GuardError, OriginGuard};
use super::settings::GatewaySettings;
pub use mcp_satellite_protocol::header;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::RpcMessage;

/// The API and the pages of the console.
#[derive(Clone)]
pub struct EndpointPages {
    pub router: Router,
    /// Returns the response to a request whose host or origin is not allowed. The argument is the reason.
    pub reject: fn(GuardError, &Uri) -> Response,
}

impl fmt::Debug for EndpointPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointPages").finish_non_exhaustive()
    }
}

/// The connection of a request, in its extensions.
#[derive(Debug, Clone)]
pub struct PageConnection {
    /// `None` if the listener does not limit clients without a token.
    connections: Option<Arc<Connections>>,
    pub peer: SocketAddr,
    /// True if the connection is encrypted.
    pub is_tls: bool,
    /// True if the listener is for the console only.
    pub is_own: bool,
}

impl PageConnection {
    pub(crate) fn of_endpoint(connections: Arc<Connections>, peer: SocketAddr, settings: &GatewaySettings) -> Self {
        Self { connections: Some(connections), peer, is_tls: settings.tls.is_some(), is_own: false }
    }

    pub(crate) fn of_own_listener(connections: Arc<Connections>, peer: SocketAddr, settings: &GatewaySettings) -> Self {
        Self { connections: Some(connections), peer, is_tls: settings.tls.is_some(), is_own: true }
    }

    /// Creates the connection of a listener without TLS that does not limit clients without a token.
    pub fn unlimited(peer: SocketAddr) -> Self {
        Self { connections: None, peer, is_tls: false, is_own: false }
    }

    /// Exempts the connection from the limits for clients without a valid token.
    pub fn mark_authenticated(&self) {
        if let Some(connections) = &self.connections {
            connections.mark_authenticated(self.peer);
        }
    }
}

/// Effect of an MCP message that the console passes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ForwardedKind {
    Other,
    /// Opens a session.
    SessionStart,
    /// Calls a tool, or reads a resource or a prompt.
    Call,
}

/// Kind of the MCP message of a request, in its extensions. The endpoint sets it when it has read the message.
#[derive(Debug, Clone, Default)]
pub struct ForwardedMessage(Arc<OnceLock<ForwardedKind>>);

impl ForwardedMessage {
    /// Returns the kind; `None` if no valid message was read.
    pub fn get(&self) -> Option<ForwardedKind> {
        self.0.get().copied()
    }

    /// Sets the kind of the message, or of the most important one of a batch.
    pub(crate) fn set<'a>(&self, messages: impl Iterator<Item = &'a RpcMessage>) {
        let kinds = messages.map(|message| match message.method() {
            Some(method::TOOLS_CALL | method::RESOURCES_READ | method::PROMPTS_GET) => ForwardedKind::Call,
            Some(method::INITIALIZE) => ForwardedKind::SessionStart,
            Some(_) | None => ForwardedKind::Other,
        });
        // A request has one body.
        let _ = self.0.set(kinds.max().unwrap_or(ForwardedKind::Other));
    }
}

/// Answers a request if its host and origin are allowed.
pub async fn answer(
    pages: &EndpointPages,
    guard: &OriginGuard,
    connection: PageConnection,
    mut request: Request<Body>,
) -> Response {
    if let Err(why) = guard.check(request.headers(), request.uri()) {
        return (pages.reject)(why, request.uri());
    }
    request.extensions_mut().insert(connection);
    match pages.router.clone().call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
