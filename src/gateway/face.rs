//! The seam between the HTTP front and what answers: the front knows sessions, streams and statuses, and no server; a
//! face knows servers and tools, and no HTTP.

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::ClientFacts;
use mcp_satellite_actors::audience::Origin;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::rpc::{Message, member};
use tokio::sync::oneshot;
use tokio::time::Duration;

use super::access::User;
use super::session::Session;
use super::subscription::Filter;

/// Bytes of what a client says it is, or can do.
const FACTS_MAX: usize = 16 * 1024;
/// What a client says of itself that says nothing.
const NOBODY: &str = r#"{"name":"","version":""}"#;

/// What a client is connected to. A session is bound to one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/i/{instance}/mcp`: one instance, as if directly.
    Instance(InstanceId),
    /// `/mcp`: everything of the user behind a few tools.
    Tools,
    /// `/mcp?mode=flat`: the tools themselves.
    Flat,
}

/// What a client says of itself, in `initialize` or in each of its requests. A member that is not what it should be counts
/// as absent.
#[derive(Debug, Clone)]
pub struct Greeting {
    /// The protocol version that it offers.
    pub version: String,
    /// Its name.
    pub name: String,
    /// Its version.
    pub client_version: String,
    /// It answers `sampling/createMessage`.
    pub sampling: bool,
    /// It answers `elicitation/create`.
    pub elicitation: bool,
    /// It answers `roots/list`.
    pub roots: bool,
    /// What it is and can do, as it says it.
    pub facts: Arc<ClientFacts>,
}

impl Default for Greeting {
    fn default() -> Self {
        Self::of(String::new(), None, None)
    }
}

impl Greeting {
    /// Reads the params of `initialize`.
    pub fn read(params: Option<&str>) -> Self {
        let part = |name| params.and_then(|params| member(params, name));
        let object = |name| part(name).filter(|part| part.starts_with('{'));
        let version = part("protocolVersion").and_then(|version| serde_json::from_str(version).ok());
        Self::of(version.unwrap_or_default(), object("capabilities"), object("clientInfo"))
    }

    /// Of a client with these capabilities that says this of itself, as JSON text.
    pub(crate) fn of(version: String, capabilities: Option<&str>, info: Option<&str>) -> Self {
        let capabilities = capabilities.unwrap_or("{}");
        let info = info.unwrap_or(NOBODY);
        let text = |name| member(info, name).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let has = |name| member(capabilities, name).is_some_and(|value| value != "null");
        let (sampling, elicitation, roots) = (has("sampling"), has("elicitation"), has("roots"));
        // What is longer says nothing that a server needs, and would be kept with every session.
        let kept = |text: &str, short: &str| if text.len() <= FACTS_MAX { text } else { short }.to_owned();
        let facts = ClientFacts { capabilities: kept(capabilities, "{}"), info: kept(info, NOBODY) };
        let (name, client_version) = (text("name"), text("version"));
        Self { version, name, client_version, sampling, elicitation, roots, facts: Arc::new(facts) }
    }

    /// Whether it can be asked this; what this satellite does not know it is asked all the same.
    pub fn answers(&self, method: &str) -> bool {
        match method {
            "sampling/createMessage" => self.sampling,
            "elicitation/create" => self.elicitation,
            "roots/list" => self.roots,
            _ => true,
        }
    }
}

/// A JSON-RPC error of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcError {
    /// Its code.
    pub code: i64,
    /// What went wrong and what to do about it.
    pub message: String,
    /// JSON text.
    pub data: Option<String>,
}

impl RpcError {
    /// Without data.
    pub fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), data: None }
    }
}

/// The answer to a request. It goes out under the id that the client gave.
#[derive(Debug, Clone)]
pub enum Answer {
    /// A server's own message, a result or an error, under whatever id.
    Message(Message),
    /// A result of ours, as JSON text.
    Result(String),
    /// An error of ours.
    Error(RpcError),
    /// The client has withdrawn its request, and waits for no answer.
    Withdrawn,
}

/// The answer to `initialize`.
#[derive(Debug, Clone)]
pub struct Welcome {
    /// The result, as JSON text.
    pub result: String,
    /// The protocol version that is in it.
    pub version: String,
}

/// A request of a client that is being answered.
#[derive(Debug)]
pub struct Call {
    /// The request, as it came.
    pub message: Message,
    /// Numbers of ours for the client and for the call.
    pub origin: Origin,
    /// The client's own `notifications/cancelled`, if it sends one.
    pub withdrawn: oneshot::Receiver<Message>,
    /// How long it may take, if that is not left to the instance.
    pub timeout: Option<Duration>,
    /// The era that it is written in.
    pub era: Era,
    /// What its client says of itself.
    pub client: Arc<ClientFacts>,
}

/// What is behind the endpoint.
pub trait Faces: Send + Sync + 'static {
    /// The instance of this user that a path names; `None` as well if it is somebody else's.
    fn instance(&self, user: &User, name: &str) -> Option<InstanceId>;

    /// Answers `initialize`. There is no session before it has.
    fn initialize(
        &self,
        user: Arc<User>,
        endpoint: Endpoint,
        greeting: Greeting,
    ) -> BoxFuture<'static, Result<Welcome, RpcError>>;

    /// What a client without a session is told by `server/discover`: the result, as JSON text.
    fn discover(&self, user: Arc<User>, endpoint: Endpoint) -> BoxFuture<'static, Result<String, RpcError>>;

    /// The definition of a tool, as it is listed for this user.
    fn definition(&self, user: Arc<User>, endpoint: &Endpoint, tool: &str) -> BoxFuture<'static, Option<Box<str>>>;

    /// A client without a session wants to be told of this, from now on until its session is [over](Self::ended): what it
    /// will be told of.
    fn listen(&self, session: &Arc<Session>, wanted: Filter) -> BoxFuture<'static, Result<Filter, RpcError>>;

    /// A session begins. Called before its client knows of it; not of one that is there for one request, which is only
    /// [ended](Self::ended).
    fn began(&self, session: &Arc<Session>);

    /// Answers a request. Dropping the future cancels it.
    fn request(&self, session: Arc<Session>, call: Call) -> BoxFuture<'static, Answer>;

    /// Takes a notification: any but the cancellation of a request that is being answered.
    fn notification(&self, session: &Arc<Session>, message: Message);

    /// A session is over: nothing reaches its client any more, and what it was asked is declined.
    fn ended(&self, session: &Arc<Session>);
}
