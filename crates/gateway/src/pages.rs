//! Requests for paths that are not of MCP: the API and the pages of the console, on the listener of the endpoint or on
//! one of their own.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::response::Response;
use mcp_satellite_http::server::IncomingRequest;
use tokio::time::Duration;
use tower_service::Service as _;

use super::connections::Connections;
use super::http_requests::EndpointService;
use super::listen::{EndpointListener, ListenerTerms};
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
    if let Err(refused) = EndpointService::check_guard(settings, &request) {
        return refused;
    }
    request.extensions_mut().insert(connection);
    match pages.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// A listener for the console only. Dropping it ends it at once.
#[derive(Debug)]
pub struct PageListener {
    listener: EndpointListener,
    address: SocketAddr,
}

impl PageListener {
    /// # Errors
    /// The certificate or the listener cannot be used.
    pub fn start(listener: TcpListener, settings: GatewaySettings, pages: Router) -> io::Result<Self> {
        let connections = Connections::new(settings.connection_limits());
        let terms = Arc::new(ListenerTerms::new(settings.load_identity()?, connections.clone()));
        let (address, settings) = (listener.local_addr()?, Arc::new(settings));
        let answer = move |peer, request: IncomingRequest| {
            let (pages, connections, settings) = (pages.clone(), connections.clone(), settings.clone());
            let connection = PageConnection { connections, peer, is_tls: settings.tls.is_some(), is_own: true };
            async move { answer(pages, &settings, connection, request.map(Body::new)).await }
        };
        Ok(Self { listener: EndpointListener::open(listener, terms, answer)?, address })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting; open connections end after their responses, at the latest after `time_left`.
    pub async fn close(self, time_left: Duration) {
        self.listener.close(time_left).await;
    }
}
