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

/// Serves a request whose host and origin were checked.
pub async fn serve(mut pages: Router, connection: PageConnection, mut request: Request<Body>) -> Response {
    request.extensions_mut().insert(connection);
    match pages.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

pub(crate) async fn answer(
    pages: Router,
    settings: &GatewaySettings,
    connection: PageConnection,
    request: Request<Body>,
) -> Response {
    if let Err(why) = settings.guard.check(request.headers(), request.uri()) {
        return reply::error_response(StatusCode::FORBIDDEN, None, SERVER_ERROR, why);
    }
    serve(pages, connection, request).await
}
