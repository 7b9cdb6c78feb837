//! A listener that serves other paths than those of MCP only.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, PoisonError, RwLock};

use axum::body::Body;
use axum::response::Response;
use mcp_satellite_http::server::IncomingRequest;
use tokio::time::Duration;

use super::connections::Connections;
use super::listen::{EndpointListener, ListenerTerms};
use super::pages::{EndpointPages, PageConnection, answer as answer_page};
use super::settings::GatewaySettings;
use super::traffic::{HttpTraffic, RouteKind};

/// A listener for the console only. Dropping it ends it at once.
#[derive(Debug)]
pub struct PageListener {
    listener: EndpointListener,
    address: SocketAddr,
    terms: Arc<ListenerTerms>,
    service: Arc<PageService>,
}

#[derive(Debug)]
struct PageService {
    pages: EndpointPages,
    connections: Arc<Connections>,
    traffic: Arc<HttpTraffic>,
    settings: RwLock<Arc<GatewaySettings>>,
}

impl PageListener {
    /// # Errors
    /// The certificate or the listener cannot be used.
    pub fn start(
        listener: TcpListener,
        settings: GatewaySettings,
        pages: EndpointPages,
        traffic: &Arc<HttpTraffic>,
    ) -> io::Result<Self> {
        let (connections, traffic) = (Connections::new(settings.connection_limits(), traffic.clone()), traffic.clone());
        let terms = Arc::new(ListenerTerms::new(settings.load_identity()?, connections.clone()));
        let address = listener.local_addr()?;
        let service = Arc::new(PageService { pages, connections, traffic, settings: RwLock::new(Arc::new(settings)) });
        let listener = EndpointListener::open(listener, terms.clone(), service.clone().handler())?;
        Ok(Self { listener, address, terms, service })
    }

    /// Replaces the settings. If TLS is switched on or off, returns the previous listener, which must be closed: its
    /// connections are of the other kind.
    ///
    /// # Errors
    /// The certificate or the socket cannot be used. The previous certificate stays in use; all other settings apply.
    pub fn apply(&mut self, mut settings: GatewaySettings) -> io::Result<Option<Self>> {
        let old = self.service.settings();
        let applied = settings.load_identity().and_then(|identity| {
            let is_switched = settings.tls.is_some() != old.tls.is_some();
            let reopened = if is_switched {
                Some(self.listener.reopen(self.terms.clone(), self.service.clone().handler())?)
            } else {
                None
            };
            self.terms.set(identity, settings.connection_limits());
            Ok(reopened)
        });
        if applied.is_err() {
            settings.tls.clone_from(&old.tls);
            self.terms.set(self.terms.load_identity(), settings.connection_limits());
        }
        *self.service.settings.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(settings);
        Ok(applied?.map(|reopened| Self {
            listener: std::mem::replace(&mut self.listener, reopened),
            address: self.address,
            terms: self.terms.clone(),
            service: self.service.clone(),
        }))
    }

    pub fn has_tls(&self) -> bool {
        self.service.settings().tls.is_some()
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns a duplicate of the listening socket.
    pub fn duplicate_socket(&self) -> Option<TcpListener> {
        self.listener.duplicate_socket()
    }

    /// Stops accepting, so that the address is free; open connections continue.
    pub async fn stop_accepting(&mut self) {
        self.listener.stop_accepting().await;
    }

    /// Stops accepting; open connections end after their responses, at the latest after `time_left`.
    pub async fn close(self, time_left: Duration) {
        self.listener.close(time_left).await;
    }
}

impl PageService {
    fn settings(&self) -> Arc<GatewaySettings> {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the handler of requests for the server loop.
    fn handler(
        self: Arc<Self>,
    ) -> impl Fn(SocketAddr, IncomingRequest) -> futures::future::BoxFuture<'static, Response> + Clone + Send + Sync + 'static
    {
        move |peer, request| {
            let (pages, settings) = (self.pages.clone(), self.settings());
            let connection = PageConnection::of_own_listener(self.connections.clone(), peer, &settings);
            let (service, route) = (self.clone(), RouteKind::of_path(request.uri().path()));
            Box::pin(async move {
                let response = answer_page(&pages, &settings.guard, connection, request.map(Body::new)).await;
                service.traffic.count_request(route, response.status());
                response
            })
        }
    }
}
