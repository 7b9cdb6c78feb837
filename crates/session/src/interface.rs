//! Interface between a session and its driver: arguments, events, outcomes, and the traits that the driver implements.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite_model::byte_budget::ByteBudget;
use mcp_satellite_model::catalogue::Catalogue;
use mcp_satellite_model::exit::{CallError, CallFate};
use mcp_satellite_model::policy::ReconnectPolicy;
use mcp_satellite_model::remote::ServerInfo;
use mcp_satellite_model::spec::InstanceSpec;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::header::RequestHeaders;
use mcp_satellite_protocol::rpc::RpcMessage;
use mcp_satellite_protocol::trace::TraceParent;
use serde_json::value::RawValue;

use crate::gate::CallGate;
use crate::origin::{CallOrigin, MessageCause};
use crate::pending::PendingRequest;
use crate::state::HandshakeRefusal;

/// Session events, reported as they happen.
#[derive(Debug)]
pub enum SessionEvent {
    /// The server sent its first byte.
    FirstByte,
    /// The server printed a line that is no message, before the end of the handshake.
    StdoutLine(String),
    /// The handshake is complete.
    Initialized(Arc<ServerInfo>),
    /// The server has answered to a session that continues one of an earlier satellite. Contains the time of its
    /// handshake.
    Resumed(Arc<ServerInfo>, Instant),
    /// The lists were read and differ from the last report.
    Discovered(Arc<Catalogue>),
    /// The lists could not be read: the reason, and the pause that the server requested.
    DiscoveryFailed(String, Duration),
    /// A call succeeded after the lists could not be read.
    Recovered,
    /// The server rejected the opening request of the other era; this one is tried next.
    EraChanged(Era),
    /// Health checks failed: the number of failures in a row, and the last error.
    Degraded(u32, String),
    /// A health check succeeded after failures: their number, and the last error.
    Restored(u32, Option<String>),
}

/// Options of a session.
pub struct SessionOptions {
    /// The instance.
    pub spec: Arc<InstanceSpec>,
    /// State shared with the port through which calls arrive.
    pub gate: Arc<CallGate>,
    /// Start of the run; the handshake timeout counts from there.
    pub since: Instant,
    /// True if the session reads the lists by itself after the handshake.
    pub reads_lists: bool,
    /// Era in which the server was opened last.
    pub era: Option<Era>,
    /// Budget for the lists of all servers.
    pub lists_memory: Arc<ByteBudget>,
}

/// Request of the satellite itself, such as `initialize` or `tools/list`.
#[derive(Clone, Copy)]
pub struct OwnRequest<'a> {
    /// Id of the request.
    pub id: u64,
    /// Method of the request.
    pub method: &'a str,
    /// The instance.
    pub spec: &'a InstanceSpec,
    /// Version of the protocol; `None` before the handshake.
    pub version: Option<&'a str>,
}

/// Observed request of the satellite. Dropped before its end, it was abandoned.
pub trait RequestSpan: Send {
    /// Returns the identity of the span, which the request passes on; `None` if the request is not recorded.
    fn trace(&self) -> Option<TraceParent>;
    /// Observes the answer or the failure.
    fn end(self: Box<Self>, answer: Result<&RawValue, &CallError>);
    /// Observes that the deadline passed.
    fn time_out(self: Box<Self>, fate: CallFate);
}

/// Outgoing side of a transport. It accepts messages without blocking; each is the concatenation of its parts.
pub trait Outlet {
    /// True if each request has its own exchange (HTTP). Such a request may be sent more than once and may belong to
    /// another era than the session; closing the exchange tells the server that the response is no longer awaited.
    const REPEATS: bool;
    /// Sends a request.
    fn request(&mut self, id: u64, phase: RequestPhase, routing: Option<Box<RequestHeaders>>, parts: &[&str]);
    /// Sends a notification.
    fn notify(&mut self, parts: &[&str]);
    /// Sends a response.
    fn respond(&mut self, parts: &[&str]);
    /// Sends the notification that ends the handshake.
    fn send_initialized(&mut self, version: &str, parts: &[&str]);
    /// Ends the exchange of a request whose response is no longer awaited.
    fn abandon(&mut self, id: u64);
    /// Returns true if further requests may be sent.
    fn has_room(&self) -> bool;
    /// Returns true if the server sends requests without reading the responses.
    fn is_flooded(&self) -> bool;
    /// Returns the offset in bytes of the next message, counted over all messages ever queued.
    fn position(&self) -> u64;
}

/// Receiver of everything that a session reports, and source of the delays that it draws.
pub trait SessionHost {
    /// Reports an event.
    fn report(&self, event: SessionEvent);
    /// Counts a message of the server.
    fn on_message(&self);
    /// Counts a proof that the server works: the handshake, or the result of a call.
    fn on_server_proved(&self);
    /// Counts and logs text of the server that is not a message, or not one that the server may send.
    fn on_malformed(&self, spec: &InstanceSpec, text: &[u8], why: &str, is_initialized: bool);
    /// Returns the delay after this number of consecutive failures, with jitter.
    fn reconnect_delay(&mut self, policy: &ReconnectPolicy, failures: u32) -> Duration;
    /// Forwards a notification of the server.
    fn on_notification(&self, cause: MessageCause, message: RpcMessage);
    /// Forwards progress of a call; the message contains the client's own token.
    fn on_progress(&self, origin: CallOrigin, message: RpcMessage);
    /// Forwards a request of the server. A command with the number of the question answers it.
    fn on_request(&self, cause: MessageCause, question: u64, message: RpcMessage);
    /// Withdraws a question.
    fn on_request_withdrawn(&self, question: u64, message: RpcMessage);
    /// Begins the observation of a request of the satellite; `None` if nothing observes it.
    fn observe(&self, request: OwnRequest<'_>) -> Option<Box<dyn RequestSpan>>;
    /// Reports the start of the session to the clients.
    fn on_session_started(&self);
    /// Reports the end of the session and of its questions to the clients.
    fn on_session_ended(&mut self);
}

/// Phase to which a request belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestPhase {
    /// The request opens the session.
    Handshake,
    /// Any other request.
    InSession,
}

/// Outcome of a message from the server.
#[derive(Debug)]
pub enum MessageOutcome {
    /// Nothing that concerns the transport.
    Nothing,
    /// A result.
    ResultResponse,
    /// An error response, which only proves that the server is reachable.
    ErrorResponse,
    /// An error response that may mean that the server no longer has sessions.
    SessionDoubted,
    /// The answer to a check.
    Checked,
    /// An error response to a check.
    CheckRefused {
        /// True if the server does not know the method.
        unknown: bool,
        /// True if the error means that the server belongs to the other era.
        other_era: bool,
        /// The error, masked.
        why: String,
    },
    /// The handshake is complete, or the session of an earlier satellite continues.
    Initialized,
    /// The handshake failed.
    HandshakeRefused(HandshakeRefusal),
    /// The server said that it no longer has sessions: the reason, and the call that it refused.
    OtherEra(String, Box<RefusedCall>),
    /// The server sends requests without reading the responses.
    Flooded,
}

/// Call that a server refused without executing it.
pub struct RefusedCall {
    pub(crate) pending: PendingRequest,
    pub(crate) reason: String,
}

impl RefusedCall {
    /// Fails the call. The driver closes the port first, so that no call enters in between.
    pub fn fail(self) {
        self.pending.fail(CallError::Terminated { fate: CallFate::NotSent, reason: self.reason });
    }
}

impl fmt::Debug for RefusedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RefusedCall")
    }
}

/// Kind of a deadline that passed.
#[derive(Debug)]
pub enum PassedDeadline {
    /// Deadline of a call.
    Call,
    /// Deadline of a list.
    List,
    /// Deadline of a check.
    Check,
    /// Deadline of the check of a session that continues.
    Resume,
    /// Handshake timeout.
    Handshake,
    /// Handshake timeout that the refusal of the other era explains better.
    HandshakeRefused(HandshakeRefusal),
}
