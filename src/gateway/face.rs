//! The seam between the HTTP front and what answers: the front knows sessions, streams and statuses, and no server; a
//! face knows servers and tools, and no HTTP.

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::audience::Origin;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::rpc::Message;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::oneshot;
use tokio::time::Duration;

use super::access::User;
use super::session::Session;

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

/// What a client says of itself in `initialize`. A member that is not what it should be counts as absent.
#[derive(Debug, Clone, Default)]
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
}

impl Greeting {
    /// Reads the params of `initialize`.
    pub fn read(params: Option<&str>) -> Self {
        #[derive(Deserialize, Default)]
        struct Params<'a> {
            #[serde(borrow, rename = "protocolVersion")]
            version: Option<&'a RawValue>,
            #[serde(borrow)]
            capabilities: Option<&'a RawValue>,
            #[serde(borrow, rename = "clientInfo")]
            info: Option<&'a RawValue>,
        }
        #[derive(Deserialize, Default)]
        struct Capabilities<'a> {
            #[serde(borrow)]
            sampling: Option<&'a RawValue>,
            #[serde(borrow)]
            elicitation: Option<&'a RawValue>,
            #[serde(borrow)]
            roots: Option<&'a RawValue>,
        }
        #[derive(Deserialize, Default)]
        struct Info<'a> {
            #[serde(borrow)]
            name: Option<&'a RawValue>,
            #[serde(borrow)]
            version: Option<&'a RawValue>,
        }
        fn part<'a, T: Deserialize<'a> + Default>(value: Option<&'a RawValue>) -> T {
            value.and_then(|value| serde_json::from_str(value.get()).ok()).unwrap_or_default()
        }
        let params: Params<'_> = params.and_then(|params| serde_json::from_str(params).ok()).unwrap_or_default();
        let (capabilities, info): (Capabilities<'_>, Info<'_>) = (part(params.capabilities), part(params.info));
        Self {
            version: part(params.version),
            name: part(info.name),
            client_version: part(info.version),
            sampling: capabilities.sampling.is_some(),
            elicitation: capabilities.elicitation.is_some(),
            roots: capabilities.roots.is_some(),
        }
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

    /// A session begins. Called before its client knows of it.
    fn began(&self, session: &Arc<Session>);

    /// Answers a request. Dropping the future cancels it.
    fn request(&self, session: Arc<Session>, call: Call) -> BoxFuture<'static, Answer>;

    /// Takes a notification: any but the cancellation of a request that is being answered.
    fn notification(&self, session: &Arc<Session>, message: Message);

    /// A session is over: nothing reaches its client any more, and what it was asked is declined.
    fn ended(&self, session: &Arc<Session>);
}
