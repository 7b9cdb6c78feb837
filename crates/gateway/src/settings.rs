//! Settings of the endpoint: the configured ones and those that only tests change.

use std::io;
use std::net::{IpAddr, SocketAddr};

use mcp_satellite_actors::model::event::Event;
use mcp_satellite_config::{GatewayLimits, GatewayPlan, ResponseStyle, TlsFiles};
use mcp_satellite_http::tls::{TlsIdentity, identity};
use tokio::time::Duration;

use super::connections::ConnectionLimits;
use super::guard::OriginGuard;
use super::session_call::ResponseFormat;

pub type ClientEventSink = Box<dyn Fn(Event) + Send + Sync>;

const SSE_AFTER: Duration = Duration::from_secs(1);
const KEEP_ALIVE: Duration = Duration::from_secs(15);

#[derive(Debug, Clone)]
pub struct GatewaySettings {
    /// Name of the satellite, for metadata.
    pub name: String,
    pub public_url: Option<String>,
    pub guard: OriginGuard,
    pub authorization_servers: Vec<String>,
    pub trusted_proxies: Vec<IpAddr>,
    pub tls: Option<TlsFiles>,
    pub answers: ResponseStyle,
    pub limits: GatewayLimits,
    /// Time without an answer after which a response becomes an event stream: proxies close silent connections.
    pub sse_after: Duration,
    /// Interval of the keep-alive comments on a silent stream.
    pub keep_alive: Duration,
}

impl GatewaySettings {
    pub fn new(name: &str, plan: &GatewayPlan, address: SocketAddr) -> Self {
        Self {
            name: name.to_owned(),
            public_url: plan.public_url.clone(),
            guard: OriginGuard {
                loopback: address.ip().is_loopback(),
                hosts: plan.hosts.clone(),
                origins: plan.origins.clone(),
            },
            authorization_servers: plan.authorization_servers.clone(),
            trusted_proxies: plan.trusted_proxies.clone(),
            tls: plan.tls.clone(),
            answers: plan.response_style,
            limits: plan.limits.clone(),
            sse_after: SSE_AFTER,
            keep_alive: KEEP_ALIVE,
        }
    }

    pub(crate) fn base_url(&self, host: &str) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        match &self.public_url {
            Some(url) => url.trim_end_matches('/').to_owned(),
            None => format!("{scheme}://{host}"),
        }
    }

    pub(crate) fn response_format(&self) -> ResponseFormat {
        match self.answers {
            ResponseStyle::Json => ResponseFormat::Either,
            ResponseStyle::Sse => ResponseFormat::Stream,
        }
    }

    pub fn check_certificate(&self) -> io::Result<()> {
        self.load_identity().map(drop)
    }

    pub(crate) fn connection_limits(&self) -> ConnectionLimits {
        ConnectionLimits::new(&self.limits, &self.trusted_proxies)
    }

    pub(crate) fn load_identity(&self) -> io::Result<Option<TlsIdentity>> {
        self.tls.as_ref().map(|tls| identity(&tls.cert, &tls.key)).transpose()
    }
}
