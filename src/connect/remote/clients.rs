//! The HTTP clients that all lines share.
//!
//! One client would do, but two things are settled for a whole client in reqwest: how long connecting may take, and
//! whether the proxies of the environment are asked. So there is one client for each combination that is in use, which is
//! one or two; they share the certificates, the memory of TLS sessions and the lookups of names.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mcp_satellite_actors::model::policy::RemotePolicy;
use reqwest::{Client, Url, redirect, retry};
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, RootCertStore};

use super::names::Names;
use crate::http::{USER_AGENT, is_loopback};

/// Node closes a connection that was idle for 5 s. A request that crosses that would look like a reset.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// An idle connection, such as one that only listens, is asked this often whether its other end is there.
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The other end has not answered for this long: it is gone.
const UNANSWERED_MAX: Duration = Duration::from_secs(60);

/// What is settled for a whole client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    connect_timeout: Duration,
    /// Whether proxies are left out.
    direct: bool,
}

/// Clients by what they are for.
pub(crate) struct Clients {
    tls: ClientConfig,
    names: Names,
    /// Without them no server that speaks TLS can be trusted.
    has_roots: bool,
    known: Mutex<HashMap<Kind, Client>>,
}

impl Clients {
    /// Reads the machine's certificates, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR` name.
    pub(crate) fn new() -> io::Result<Self> {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "cannot read some of the machine's certificates");
        }
        let mut roots = RootCertStore::empty();
        let (added, ignored) = roots.add_parsable_certificates(found.certs);
        tracing::debug!(added, ignored, "certificates of the machine");
        let provider = CryptoProvider::get_default()
            .map_or_else(|| Arc::new(rustls::crypto::ring::default_provider()), Arc::clone);
        let has_roots = !roots.is_empty();
        let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let tls = tls.map_err(io::Error::other)?.with_root_certificates(roots).with_no_client_auth();
        let clients = Self { tls, names: Names::new(), has_roots, known: Mutex::default() };
        // What cannot be made is told now, not by every instance.
        clients
            .client(Kind { connect_timeout: RemotePolicy::default().connect_timeout, direct: false })
            .map_err(io::Error::other)?;
        Ok(clients)
    }

    /// The client for exchanges with `url`.
    pub(crate) fn of(&self, url: &Url, policy: &RemotePolicy) -> Result<Client, reqwest::Error> {
        self.client(Kind { connect_timeout: policy.connect_timeout, direct: is_loopback(url) })
    }

    /// Whether a server that speaks TLS can be trusted at all.
    pub(crate) fn has_roots(&self) -> bool {
        self.has_roots
    }

    fn client(&self, kind: Kind) -> Result<Client, reqwest::Error> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = known.get(&kind) {
            return Ok(client.clone());
        }
        let mut builder = Client::builder()
            .tls_backend_preconfigured(self.tls.clone())
            .dns_resolver(self.names.clone())
            .user_agent(USER_AGENT)
            // Credentials would go where nobody has configured them to go.
            .redirect(redirect::Policy::none())
            // Whether something may be sent twice is not for a client to say.
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
