//! The interface between the HTTP front and the code that answers requests. The front handles sessions, streams and
//! status codes and does not depend on servers; an implementation of [`EndpointHandler`] handles servers and tools and does not
//! depend on HTTP.

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::ClientFacts;
use mcp_satellite_actors::audience::CallOrigin;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::rpc::{RpcMessage, member};
use tokio::sync::oneshot;
use tokio::time::Duration;

use super::access::User;
use super::session::ClientSession;
use super::subscription::SubscriptionFilter;

const FACTS_MAX: usize = 16 * 1024;
const NOBODY: &str = r#"{"name":"","version":""}"#;

/// Endpoint that a client is connected to. A session is bound to one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EndpointId {
    /// Path `/i/{instance}/mcp`: one instance, passed through.
    Instance(InstanceId),
    /// Path `/mcp`: all instances of the user behind a few tools.
    Tools,
    /// Path `/mcp?mode=flat`: the tools of all instances of the user.
    Flat,
}

/// Description that a client gives of itself, in `initialize` or in each stateless request. A malformed member counts
/// as absent.
#[derive(Debug, Clone)]
pub struct ClientDescription {
    /// Protocol version that the client offers.
    pub version: String,
    pub name: String,
    pub client_version: String,
    pub sampling: bool,
    pub elicitation: bool,
    pub roots: bool,
    /// Capabilities and client info as sent.
    pub facts: Arc<ClientFacts>,
}

impl Default for ClientDescription {
    fn default() -> Self {
        Self::new(String::new(), None, None)
    }
}

impl ClientDescription {
    /// Reads the params of `initialize`.
    pub fn read(params: Option<&str>) -> Self {
        let part = |name| params.and_then(|params| member(params, name));
        let object = |name| part(name).filter(|part| part.starts_with('{'));
        let version = part("protocolVersion").and_then(|version| serde_json::from_str(version).ok());
        Self::new(version.unwrap_or_default(), object("capabilities"), object("clientInfo"))
    }

    pub fn new(version: String, capabilities: Option<&str>, info: Option<&str>) -> Self {
        let capabilities = capabilities.unwrap_or("{}");
        let info = info.unwrap_or(NOBODY);
        let text = |name| member(info, name).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let has = |name| member(capabilities, name).is_some_and(|value| value != "null");
        let (sampling, elicitation, roots) = (has("sampling"), has("elicitation"), has("roots"));
        // Longer text contains no fact that a server needs, and would be kept with every session.
        let kept = |text: &str, short: &str| if text.len() <= FACTS_MAX { text } else { short }.to_owned();
        let facts = ClientFacts { capabilities: kept(capabilities, "{}"), info: kept(info, NOBODY) };
        let (name, client_version) = (text("name"), text("version"));
        Self { version, name, client_version, sampling, elicitation, roots, facts: Arc::new(facts) }
    }

    /// Returns true if the client can answer a request of this method. Unknown methods are assumed to be answered.
    pub fn can_answer(&self, method: &str) -> bool {
        match method {
            "sampling/createMessage" => self.sampling,
            "elicitation/create" => self.elicitation,
            "roots/list" => self.roots,
            _ => true,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcError {
    pub code: i64,
    pub message: String,
    /// JSON text.
    pub data: Option<String>,
}

impl RpcError {
    pub fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), data: None }
    }
}

/// Answer to a request. It is sent under the id of the client's request.
#[derive(Debug, Clone)]
pub enum CallAnswer {
    /// Result or error of a server, under any id.
    Message(RpcMessage),
    /// Result created by the satellite, as JSON text.
    Result(String),
    Error(RpcError),
    /// No answer, because the client cancelled the request.
    Cancelled,
}

#[derive(Debug, Clone)]
pub struct InitializeAnswer {
    /// Result, as JSON text.
    pub result: String,
    pub version: String,
}

#[derive(Debug)]
pub struct EndpointCall {
    pub message: RpcMessage,
    pub origin: CallOrigin,
    /// Receiver of the client's `notifications/cancelled`.
    pub cancellation: oneshot::Receiver<RpcMessage>,
    /// Time limit; `None` leaves it to the instance.
    pub timeout: Option<Duration>,
    pub era: Era,
    pub client: Arc<ClientFacts>,
}

pub trait EndpointHandler: Send + Sync + 'static {
    /// Returns the instance that a path names; `None` also if it belongs to another user.
    fn instance(&self, user: &User, name: &str) -> Option<InstanceId>;

    /// Answers `initialize`. The session is created afterwards.
    fn initialize(
        &self,
        user: Arc<User>,
        endpoint: EndpointId,
        greeting: ClientDescription,
    ) -> BoxFuture<'static, Result<InitializeAnswer, RpcError>>;

    /// Returns the result of `server/discover` for a stateless client, as JSON text.
    fn discover(&self, user: Arc<User>, endpoint: EndpointId) -> BoxFuture<'static, Result<String, RpcError>>;

    /// Returns the definition of a tool as `tools/list` returns it to this user.
    fn definition(&self, user: Arc<User>, endpoint: &EndpointId, tool: &str) -> BoxFuture<'static, Option<Box<str>>>;

    /// Subscribes a stateless client until its session [ends](Self::handle_session_end). Returns the part of the filter that is
    /// supported.
    fn listen(
        &self,
        session: &Arc<ClientSession>,
        wanted: SubscriptionFilter,
    ) -> BoxFuture<'static, Result<SubscriptionFilter, RpcError>>;

    /// Handles the begin of a session, before the client receives its id. Not called for the guest of a single request,
    /// for which only [`handle_session_end`](Self::handle_session_end) is called.
    fn handle_session_start(&self, session: &Arc<ClientSession>);

    /// Answers a request. Dropping the future cancels it.
    fn handle_request(&self, session: Arc<ClientSession>, call: EndpointCall) -> BoxFuture<'static, CallAnswer>;

    /// Handles a notification, except the cancellation of an open request.
    fn handle_notification(&self, session: &Arc<ClientSession>, message: RpcMessage);

    /// Handles the end of a session: the client receives no more messages, and its open questions are declined.
    fn handle_session_end(&self, session: &Arc<ClientSession>);
}
