//! Connector for remote servers: streamable HTTP, and the older HTTP+SSE.
//!
//! The lines replace the HTTP client of rmcp. Its transport worker parses messages into its own types, so unknown
//! fields are lost; it does not report whether a request was sent, it replays requests after a 404, it never ends by
//! itself, and it needs five tasks per instance.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

mod access;
mod clients;
mod events;
mod exchange;
mod failures;
mod legacy;
mod message;
mod names;
#[cfg(feature = "oauth")]
pub mod oauth;
mod routing;
mod server_line;
mod streamable;
mod tokens;

use std::io;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{Connector, OpenError, ProcessLink, ServerLine};

pub use self::clients::HttpClients;
use self::server_line::RemoteLine;
pub use self::tokens::{NoTokens, TokenHolder, TokenRefusal, TokenSource};
pub use mcp_satellite_actors::model::spec::is_reserved_header as is_reserved;

/// Connector for servers over HTTP and HTTPS.
///
/// All lines of a connector and its clones share connections, provided that their `connect_timeout` is the same. TLS
/// trusts the certificates of the machine, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`. Proxies are those of
/// `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, but never for the loopback interface. Redirects are not
/// followed, and the HTTP client sends no request twice.
#[derive(Clone)]
pub struct RemoteConnector {
    clients: Arc<HttpClients>,
    tokens: Arc<dyn TokenSource>,
    memory: Arc<ByteBudget>,
}

impl RemoteConnector {
    /// A machine without certificates can still reach servers without TLS.
    ///
    /// # Errors
    ///
    /// Fails if no HTTP client can be built.
    pub fn new() -> io::Result<Self> {
        let clients = Arc::new(HttpClients::new()?);
        Ok(Self { clients, tokens: Arc::new(NoTokens), memory: ByteBudget::unlimited() })
    }

    #[must_use]
    pub fn with_tokens(self, tokens: Arc<dyn TokenSource>) -> Self {
        Self { tokens, ..self }
    }

    /// Sets the budget for the long answers of all servers. An answer that exceeds the budget is not read.
    #[must_use]
    pub fn with_memory(self, memory: Arc<ByteBudget>) -> Self {
        Self { memory, ..self }
    }

    pub fn clients(&self) -> Arc<HttpClients> {
        Arc::clone(&self.clients)
    }
}

impl Connector for RemoteConnector {
    fn open(&self, _spec: Arc<InstanceSpec>, _run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        ready(Err(OpenError::Server("stdio servers are not served by the remote connector".to_owned()))).boxed()
    }

    fn dial(&self, spec: &Arc<InstanceSpec>, _run: RunNumber) -> Box<dyn ServerLine> {
        let (clients, tokens) = (Arc::clone(&self.clients), Arc::clone(&self.tokens));
        Box::new(RemoteLine::new(spec, clients, tokens, Arc::clone(&self.memory)))
    }
}
