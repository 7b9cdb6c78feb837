//! The request of a client.

use std::net::SocketAddr;
use std::sync::Arc;

use mcp_satellite_actors::ClientFacts;
use mcp_satellite_actors::audience::CallOrigin;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::rpc::RpcMessage;
use mcp_satellite_protocol::trace::TraceParent;
use tokio::sync::oneshot;
use tokio::time::Duration;

use super::access::User;
use super::client_description::ClientDescription;
use super::endpoint_id::EndpointId;
use super::session::ClientSession;

/// Request of a client with everything that its answer needs. Created once, when the request has a session, and passed
/// on by value up to [`RuntimeHandle::relay`](mcp_satellite_actors::RuntimeHandle::relay).
#[derive(Debug)]
pub struct EndpointRequest {
    pub message: RpcMessage,
    pub session: Arc<ClientSession>,
    /// Number of the call in its session; 0 for a request that the satellite sends for a subscription.
    pub call: u64,
    /// Receiver of the client's `notifications/cancelled`.
    pub cancellation: oneshot::Receiver<RpcMessage>,
    /// Time limit; `None` leaves it to the instance.
    pub timeout: Option<Duration>,
    /// Protocol era of `message`.
    pub era: Era,
    /// Span of the request, if it is recorded.
    pub trace: Option<TraceParent>,
    /// Address of the client's connection.
    pub peer: Option<SocketAddr>,
}

/// Request for the description of an endpoint: `initialize`, or `server/discover` without a session.
#[derive(Debug, Clone)]
pub struct OpeningRequest {
    pub user: Arc<User>,
    pub endpoint: EndpointId,
    pub client: ClientDescription,
    pub message: RpcMessage,
    /// Address of the client's connection.
    pub peer: Option<SocketAddr>,
}

impl EndpointRequest {
    pub fn method(&self) -> &str {
        self.message.method().unwrap_or_default()
    }

    pub(crate) fn origin(&self) -> CallOrigin {
        CallOrigin { client: self.session.number(), call: self.call }
    }

    pub(crate) fn client(&self) -> &Arc<ClientFacts> {
        &self.session.facts.client.facts
    }
}
