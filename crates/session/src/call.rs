//! Requests of callers, their response channels, and the commands that carry them to a session.
//!
//! Every caller gets exactly one answer: a [`CallTicket`] answers when it is dropped, with the fate that the session last
//! recorded.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytestring::ByteString;
use mcp_satellite_model::exit::{CallError, CallFate};
use mcp_satellite_model::remote::ServerInfo;
use mcp_satellite_model::secret::SecretMask;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::INTERNAL_ERROR;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageKind, MessageView, RpcMessage, member, normalize_escapes};
use mcp_satellite_protocol::trace::TraceParent;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::oneshot;

use crate::gate::CallPermit;
use crate::origin::CallOrigin;

/// Timeout that stands for "no timeout": a clock must be able to represent the deadline.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);
// Maximum characters of a client's name.
const CLIENT_NAME_MAX: usize = 64;

/// Request of a caller to a server.
#[derive(Debug)]
pub enum CallerRequest {
    /// A `tools/call` request. It carries one of our progress tokens, so that progress can extend its deadline.
    Tool {
        /// Name of the tool on its server.
        name: String,
        /// Arguments: a JSON object, or `None`.
        arguments: Option<Box<RawValue>>,
        /// True if the tool is annotated as read-only or idempotent.
        repeatable: bool,
        /// Span of the call, if it is recorded.
        trace: Option<TraceParent>,
    },
    /// Any other method; its params are passed on unchanged.
    Method {
        /// Name of the method.
        method: String,
        /// Params: a JSON object, or `None`.
        params: Option<Box<RawValue>>,
    },
}

/// Request of a client, forwarded unchanged except for its id and its progress token.
#[derive(Debug, Clone)]
pub struct ClientRelay {
    /// The client's request.
    pub message: RpcMessage,
    /// Client and call that made the request.
    pub origin: CallOrigin,
    /// True if the request may be sent again although the server may have executed it.
    pub repeatable: bool,
    /// Name of the called tool, if any.
    pub tool: Option<Arc<str>>,
    /// Era in which the request is written. A request of the stateless era reaches its server in that form, and a
    /// result that asks for input goes back to the client like any other. A request of a session's client is translated
    /// if the server has no sessions.
    pub era: Era,
    /// Identity and capabilities of a session's client, passed to a stateless server. `None`: the satellite's own are
    /// used.
    pub client: Option<Arc<ClientFacts>>,
    /// Span of the call, if it is recorded: that of the client's request, and from the call port on that of this attempt.
    pub trace: Option<TraceParent>,
}

/// Identity and capabilities from the `initialize` request of a session's client, as JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFacts {
    /// Value of `capabilities`, a JSON object.
    pub capabilities: String,
    /// Value of `clientInfo`, a JSON object.
    pub info: String,
}

impl ClientFacts {
    /// Returns the name that the client gave itself, without control characters and cut at 64 characters.
    pub fn name(&self) -> Option<String> {
        let name: String = serde_json::from_str(member(&self.info, "name")?).ok()?;
        Some(name.chars().filter(|letter| !letter.is_control()).take(CLIENT_NAME_MAX).collect())
    }
}

/// Request of either kind.
#[derive(Debug)]
pub enum OutboundRequest {
    /// A request that the session words.
    Request(CallerRequest),
    /// A request that a client worded.
    Relay(ClientRelay),
}

impl OutboundRequest {
    /// Returns true if the request may be sent again although the server may have executed it.
    pub fn is_repeatable(&self) -> bool {
        match self {
            Self::Request(CallerRequest::Tool { repeatable, .. }) | Self::Relay(ClientRelay { repeatable, .. }) => {
                *repeatable
            }
            Self::Request(CallerRequest::Method { method, .. }) => is_repeatable(method),
        }
    }

    /// Sets the span that the server receives as the parent of its own. Requests of other methods carry none.
    pub fn set_trace(&mut self, span: TraceParent) {
        match self {
            Self::Request(CallerRequest::Tool { trace, .. }) | Self::Relay(ClientRelay { trace, .. }) => {
                *trace = Some(span);
            }
            Self::Request(CallerRequest::Method { .. }) => {}
        }
    }

    /// Returns the method.
    pub fn method(&self) -> &str {
        match self {
            Self::Request(CallerRequest::Tool { .. }) => method::TOOLS_CALL,
            Self::Request(CallerRequest::Method { method, .. }) => method,
            Self::Relay(ClientRelay { message, .. }) => message.method().unwrap_or_default(),
        }
    }

    /// Returns the name of the called tool, if any.
    pub fn tool(&self) -> Option<&str> {
        match self {
            Self::Request(CallerRequest::Tool { name, .. }) => Some(name),
            Self::Request(CallerRequest::Method { .. }) => None,
            Self::Relay(ClientRelay { tool, .. }) => tool.as_deref(),
        }
    }

    /// Returns the client that made the request; `None` if the satellite's API made it.
    pub(crate) fn client(&self) -> Option<&ClientFacts> {
        match self {
            Self::Request(_) => None,
            Self::Relay(ClientRelay { client, .. }) => client.as_deref(),
        }
    }

    /// Drops the content, as far as the caller does not hold it anyway: the text of a client's request is shared.
    pub(crate) fn without_content(mut self) -> Self {
        match &mut self {
            Self::Request(
                CallerRequest::Tool { arguments: content, .. } | CallerRequest::Method { params: content, .. },
            ) => {
                *content = None;
            }
            Self::Relay(_) => {}
        }
        self
    }
}

/// Returns true if a request of this method has no side effects and may safely be sent twice. Always false for
/// `tools/call`: the tool's annotations decide.
pub fn is_repeatable(method: &str) -> bool {
    matches!(
        method,
        method::PING
            | method::TOOLS_LIST
            | method::RESOURCES_LIST
            | method::RESOURCE_TEMPLATES_LIST
            | method::RESOURCES_READ
            | method::PROMPTS_LIST
            | method::PROMPTS_GET
            | method::COMPLETE
    )
}

/// Response channel of a caller: for the result only, or for the whole message, including an error response.
pub enum ReplyChannel {
    /// Channel for the result.
    Result(oneshot::Sender<Result<Box<RawValue>, CallError>>),
    /// Channel for the message.
    Message(oneshot::Sender<Result<RpcMessage, CallError>>),
}

impl ReplyChannel {
    fn fail(self, error: CallError) {
        // The send fails if the caller has gone; its cancellation is then on its way.
        match self {
            Self::Result(reply) => drop(reply.send(Err(error))),
            Self::Message(reply) => drop(reply.send(Err(error))),
        }
    }
}

/// Permit and response channel of an admitted call. Dropped without an answer, it fails the call with `fate`.
pub struct CallTicket {
    reply: Option<ReplyChannel>,
    /// Fate of the call if the ticket is dropped.
    pub fate: CallFate,
    permit: Option<CallPermit>,
}

impl CallTicket {
    /// Creates the ticket of a call that has not been sent.
    pub fn new(reply: ReplyChannel, permit: CallPermit) -> Self {
        Self { reply: Some(reply), fate: CallFate::NotSent, permit: Some(permit) }
    }

    pub(crate) fn answer(mut self, answer: &MessageView<'_>, text: &ByteString, mask: &SecretMask) {
        // Releases the permit before the caller sees the answer.
        self.permit = None;
        match (self.reply.take(), answer.kind, answer.outcome) {
            (Some(ReplyChannel::Message(reply)), MessageKind::Result, _) => {
                drop(reply.send(Ok(answer.to_message(text))));
            }
            (Some(ReplyChannel::Message(reply)), _, _) => drop(reply.send(Ok(mask_error(answer, text, mask)))),
            (Some(ReplyChannel::Result(reply)), MessageKind::Result, Some(result)) => {
                drop(reply.send(Ok(result.to_owned())));
            }
            (Some(waiter), _, error) => waiter.fail(server_error(error, mask)),
            (None, _, _) => {}
        }
    }

    /// Fails the call.
    pub fn fail(mut self, error: CallError) {
        self.permit = None;
        if let Some(waiter) = self.reply.take() {
            waiter.fail(error);
        }
    }
}

impl Drop for CallTicket {
    fn drop(&mut self) {
        if let Some(waiter) = self.reply.take() {
            waiter.fail(CallError::Terminated { fate: self.fate, reason: "the run ended".to_owned() });
        }
    }
}

fn mask_error(answer: &MessageView<'_>, text: &ByteString, mask: &SecretMask) -> RpcMessage {
    // The error is rewritten only if it contains a secret.
    let unchanged = answer.to_message(text);
    // Compares the decoded text: PHP escapes slashes, Python everything outside ASCII.
    let (Some(error), true) = (answer.outcome, mask.has_match_in(&normalize_escapes(text))) else { return unchanged };
    let error = serde_json::from_str(error.get()).map_or_else(
        // The error contains numbers or strings that this parser does not support.
        |_| json!({"code": INTERNAL_ERROR, "message": mask.apply(&normalize_escapes(error.get()))}),
        |error| mask.apply_json(error),
    );
    let id = answer.id.map_or("null", RawValue::get);
    let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
    RpcMessage::parse(text.into()).unwrap_or(unchanged)
}

pub(crate) fn server_error(error: Option<&RawValue>, mask: &SecretMask) -> CallError {
    #[derive(Deserialize)]
    struct ServerError {
        code: i64,
        #[serde(default)]
        message: String,
        #[serde(default)]
        data: Option<serde_json::Value>,
    }
    match error.map(|error| serde_json::from_str::<ServerError>(error.get())) {
        Some(Ok(error)) => CallError::Server {
            code: error.code,
            message: mask.apply(&error.message),
            data: error.data.map(|data| mask.apply_json(data).to_string()),
        },
        Some(Err(_)) | None => CallError::Server {
            code: INTERNAL_ERROR,
            message: "the server answered with neither a result nor an error".to_owned(),
            data: None,
        },
    }
}

/// Commands to a session. Sent boxed: a channel allocates 32 slots per instance.
pub enum SessionCommand {
    /// Sends a request.
    Request(AdmittedRequest),
    /// Cancels a call.
    Cancel {
        /// Id of the call on admission.
        id: u64,
        /// The client's own notification, if it sent one.
        notification: Option<RpcMessage>,
    },
    /// Sends a client's notification, or drops it if the server does not read.
    Notify {
        /// The notification.
        message: RpcMessage,
        /// Permit, held until the notification is queued.
        permit: CallPermit,
    },
    /// Answers a question.
    Answer {
        /// Number of the question.
        question: u64,
        /// Result or error.
        message: RpcMessage,
    },
    /// Answers a question with an error.
    Decline {
        /// Number of the question.
        question: u64,
        /// Code of the error.
        code: i64,
        /// Message of the error.
        why: String,
    },
    /// Answers a question for roots with an empty list: the caller has no client.
    NoRoots {
        /// Number of the question.
        question: u64,
    },
    /// Determines whether the server supports the stateless era.
    Discover(DiscoverRequest),
    /// Lists the unanswered calls.
    ListCalls {
        /// Maximum number of calls in the list.
        max: usize,
        /// Channel for the list.
        reply: oneshot::Sender<UnansweredCalls>,
    },
}

/// Unanswered calls of a session.
#[derive(Debug, Clone, Default)]
pub struct UnansweredCalls {
    /// Number of all unanswered calls.
    pub total: usize,
    /// The last calls, newest first.
    pub newest: Vec<UnansweredCall>,
}

/// Unanswered call, without its content.
#[derive(Debug, Clone)]
pub struct UnansweredCall {
    /// JSON-RPC id of the request at the server.
    pub id: u64,
    /// Method, as the caller wrote it.
    pub method: String,
    /// Name of the called tool, as the caller wrote it.
    pub tool: Option<String>,
    /// Name that the client gave itself; `None` if the satellite's API made the call.
    pub client: Option<String>,
    /// Time of the admission.
    pub since: Instant,
}

/// Request for the description of a server in the stateless era; the answer is `None` if the server does not support it.
pub struct DiscoverRequest {
    /// Permit, held until the answer.
    pub permit: CallPermit,
    /// Channel for the answer.
    pub reply: oneshot::Sender<Result<Option<Arc<ServerInfo>>, CallError>>,
}

impl DiscoverRequest {
    pub(crate) fn answer(self, answer: Result<Option<Arc<ServerInfo>>, CallError>) {
        drop(self.permit);
        // The send fails if the caller no longer waits.
        let _ = self.reply.send(answer);
    }
}

/// Admitted request of a caller.
pub struct AdmittedRequest {
    /// Id on the wire of the first attempt.
    pub id: u64,
    /// The request.
    pub request: OutboundRequest,
    /// Time of the admission.
    pub started: Instant,
    /// Time for the response, counted from the admission; progress extends it.
    pub timeout: Duration,
    /// True if the request may be sent again although the server may have executed it.
    pub repeatable: bool,
    /// Permit and response channel.
    pub ticket: CallTicket,
}
