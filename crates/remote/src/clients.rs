//! The HTTP clients that all lines share.
//!
//! reqwest fixes two settings for a whole client: the connect timeout, and the use of proxies from the environment. So
//! there is one client for each combination in use, which is one or two; they share the certificates, the TLS session
//! cache and the name lookups.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mcp_satellite_actors::model::policy::RemotePolicy;
use reqwest::{Client, Url, redirect, retry};
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, RootCertStore};

use super::names::DnsResolver;
use mcp_satellite_http::client::{USER_AGENT, is_loopback};

// Node closes a connection that was idle for 5 s. A request sent at that moment would look like a connection reset.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);

// Idle time after which a connection, for example of a GET stream, is checked with keepalive probes.
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
// Time without acknowledgement after which a connection is considered dead.
const UNANSWERED_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ClientSettings {
    connect_timeout: Duration,
    // True if no proxy is used.
    direct: bool,
}

pub struct HttpClients {
    tls: ClientConfig,
    resolver: DnsResolver,
    // False if no CA certificates were found: then no TLS server can be trusted.
    has_roots: bool,
    clients: Mutex<HashMap<ClientSettings, Client>>,
}

impl HttpClients {
    /// Reads the machine's certificates, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`.
    pub fn new() -> io::Result<Self> {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "cannot read some of the machine's certificates");
        }
        let mut roots = RootCertStore::empty();
        let (added, ignored) = roots.add_parsable_certificates(found.certs);
        tracing::debug!(added, ignored, "read the certificates of the machine");
        let provider = CryptoProvider::get_default()
            .map_or_else(|| Arc::new(rustls::crypto::ring::default_provider()), Arc::clone);
        let has_roots = !roots.is_empty();
        let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let tls = tls.map_err(io::Error::other)?.with_root_certificates(roots).with_no_client_auth();
        let clients = Self { tls, resolver: DnsResolver::new(), has_roots, clients: Mutex::default() };
        // If no client can be built, fail now instead of for every instance.
        clients
            .client(ClientSettings { connect_timeout: RemotePolicy::default().connect_timeout, direct: false })
            .map_err(io::Error::other)?;
        Ok(clients)
    }

    pub fn client_for_url(&self, url: &Url, policy: &RemotePolicy) -> Result<Client, reqwest::Error> {
        self.client(ClientSettings { connect_timeout: policy.connect_timeout, direct: is_loopback(url) })
    }

    pub fn has_roots(&self) -> bool {
        self.has_roots
    }

    fn client(&self, kind: ClientSettings) -> Result<Client, reqwest::Error> {
        let mut known = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = known.get(&kind) {
            return Ok(client.clone());
        }
        let mut builder = Client::builder()
            .tls_backend_preconfigured(self.tls.clone())
            .dns_resolver(self.resolver.clone())
            .user_agent(USER_AGENT)
            // A redirect could send credentials to an origin that was not configured.
            .redirect(redirect::Policy::none())
            // The session decides whether a message may be sent twice, not the client.
            .retry(retry::never())
            .http1_only()
            .connect_timeout(kind.connect_timeout)
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .tcp_nodelay(true)
            .tcp_keepalive(KEEPALIVE)
            .tcp_keepalive_interval(KEEPALIVE_INTERVAL)
            .tcp_user_timeout(UNANSWERED_MAX);
        if kind.direct {
            builder = builder.no_proxy();
        }
        let client = builder.build()?;
        known.insert(kind, client.clone());
        Ok(client)
    }
}
