//! Requests for paths that are not of MCP: the API and the pages of the console, on the listener of the endpoint or on
//! one of their own.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::response::Response;
use mcp_satellite_protocol::error_code::SERVER_ERROR;
use tower_service::Service as _;

use super::connections::Connections;
use super::reply;
use super::settings::GatewaySettings;

/// The connection of a request, in its extensions.
#[derive(Debug, Clone)]
pub struct PageConnection {
    connections: Arc<Connections>,
    pub peer: SocketAddr,
    /// True if the connection is encrypted.
    pub is_tls: bool,
    /// True if the listener is for the console only.
    pub is_own: bool,
}

impl PageConnection {
    pub(crate) fn of_endpoint(connections: Arc<Connections>, peer: SocketAddr, settings: &GatewaySettings) -> Self {
        Self { connections, peer, is_tls: settings.tls.is_some(), is_own: false }
    }

    pub(crate) fn of_own_listener(connections: Arc<Connections>, peer: SocketAddr, settings: &GatewaySettings) -> Self {
        Self { connections, peer, is_tls: settings.tls.is_some(), is_own: true }
    }

    /// Exempts the connection from the limits for clients without a valid token.
    pub fn mark_authenticated(&self) {
        self.connections.mark_authenticated(self.peer);
    }
}

pub(crate) async fn answer(
    mut pages: Router,
    settings: &GatewaySettings,
    connection: PageConnection,
    mut request: Request<Body>,
) -> Response {
    if let Err(why) = settings.guard.check(request.headers(), request.uri()) {
        return reply::error_response(StatusCode::FORBIDDEN, None, SERVER_ERROR, why);
    }
    request.extensions_mut().insert(connection);
    match pages.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
