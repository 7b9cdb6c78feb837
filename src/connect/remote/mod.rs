//! The connector for remote servers: streamable HTTP, and the older HTTP+SSE.

mod access;
mod clients;
mod events;
mod exchange;
mod failures;
mod legacy;
mod line;
mod message;
mod names;
mod routing;
mod streamable;
mod tokens;

use std::io;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{Connector, Line, Link, OpenError};

pub use self::access::is_reserved;
#[cfg(feature = "cli")]
pub(crate) use self::clients::Clients;
#[cfg(not(feature = "cli"))]
use self::clients::Clients;
use self::line::RemoteLine;
pub use self::tokens::{Holder, NoTokens, Refusal, Tokens};

/// Reaches servers over HTTP and HTTPS.
///
/// All lines of a connector and its clones share connections, as far as their `connect_timeout` is the same. TLS trusts
/// the certificates of the machine, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR` name. Proxies are those of
/// `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, but never for this machine's loopback. Redirects are not
/// followed, and nothing is sent twice.
#[derive(Clone)]
pub struct RemoteConnector {
    clients: Arc<Clients>,
    tokens: Arc<dyn Tokens>,
    memory: Arc<ByteBudget>,
}

impl RemoteConnector {
    /// Reads the machine's certificates. Fails where no HTTP client can be made; a machine without certificates can
    /// still reach servers that need none.
    pub fn new() -> io::Result<Self> {
        let clients = Arc::new(Clients::new()?);
        Ok(Self { clients, tokens: Arc::new(NoTokens), memory: ByteBudget::unlimited() })
    }

    /// The same, with tokens for servers whose instances bring none.
    #[must_use]
    pub fn with_tokens(self, tokens: Arc<dyn Tokens>) -> Self {
        Self { tokens, ..self }
    }

    /// Counts the long answers of all servers in `memory`. An answer for which there is no room is not read.
    #[must_use]
    pub fn with_memory(self, memory: Arc<ByteBudget>) -> Self {
        Self { memory, ..self }
    }

    /// For whoever else asks the network in their name.
    #[cfg(feature = "cli")]
    pub(crate) fn clients(&self) -> Arc<Clients> {
        Arc::clone(&self.clients)
    }
}

impl Connector for RemoteConnector {
    fn open(&self, _spec: Arc<InstanceSpec>, _run: Run) -> BoxFuture<'static, Result<Link, OpenError>> {
        ready(Err(OpenError::Server("stdio servers are not served by the remote connector".to_owned()))).boxed()
    }

    fn dial(&self, spec: &Arc<InstanceSpec>, _run: Run) -> Box<dyn Line> {
        let (clients, tokens) = (Arc::clone(&self.clients), Arc::clone(&self.tokens));
        Box::new(RemoteLine::new(spec, clients, tokens, Arc::clone(&self.memory)))
    }
}
