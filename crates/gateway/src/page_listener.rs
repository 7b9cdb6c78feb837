//! A listener that serves other paths than those of MCP only.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use axum::body::Body;
use mcp_satellite_http::server::IncomingRequest;
use tokio::time::Duration;

use super::connections::Connections;
use super::listen::{EndpointListener, ListenerTerms};
use super::pages::{EndpointPages, PageConnection, answer as answer_page};
use super::settings::GatewaySettings;

/// A listener for the console only. Dropping it ends it at once.
#[derive(Debug)]
pub struct PageListener {
    listener: EndpointListener,
    address: SocketAddr,
}

impl PageListener {
    /// # Errors
    /// The certificate or the listener cannot be used.
    pub fn start(listener: TcpListener, settings: GatewaySettings, pages: EndpointPages) -> io::Result<Self> {
        let connections = Connections::new(settings.connection_limits());
        let terms = Arc::new(ListenerTerms::new(settings.load_identity()?, connections.clone()));
        let (address, settings) = (listener.local_addr()?, Arc::new(settings));
        let answer = move |peer, request: IncomingRequest| {
            let (pages, connections, settings) = (pages.clone(), connections.clone(), settings.clone());
            let connection = PageConnection::of_own_listener(connections, peer, &settings);
            async move { answer_page(&pages, &settings, connection, request.map(Body::new)).await }
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
