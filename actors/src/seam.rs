//! Boundary to the operating system and the network. Hosts implement these traits: a connector starts servers, and a
//! sink receives events. Code behind them may block, fail or misbehave; this crate itself contains only messages and
//! rules.

// An address is plain data; `std::net` would also offer sockets.
use core::net::SocketAddr;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::{BoxFuture, ready};
pub use mcp_satellite_protocol::header::RequestHeaders;
pub use mcp_satellite_protocol::trace::TraceParent;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::model::event::{Envelope, EventSubject};
use crate::model::exit::{CallError, CallFate, ExceededLimit, ExitCause};
use crate::model::failure::{ExchangeFailure, FailureKind};
use crate::model::ids::{InstanceId, RunNumber, TeamId, UserId};
use crate::model::memo::StoredMemo;
use crate::model::session_description::SessionDescription;
use crate::model::snapshot::ProcessContainment;
use crate::model::spec::InstanceSpec;

/// Starter of servers that are child processes, or behave like them. The runtime calls it from a task of the worker,
/// never from a handler, so it may take its time. It does not perform the MCP handshake.
pub trait ProcessConnector: Send + Sync + 'static {
    /// Starts the server process that `spec` describes. `run` tags the process. If a server of an earlier satellite
    /// still runs for this instance, it must have ended before.
    ///
    /// # Errors
    ///
    /// Returns the reason from the operating system with the name of the command, but never an argument or a value.
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>>;

    /// Returns true if [`adopt`](Self::adopt) would return a server: it runs since an earlier satellite with exactly this
    /// configuration, its session was described after the handshake, and it was not adopted yet. Must not block.
    fn can_adopt(&self, _spec: &InstanceSpec) -> bool {
        false
    }

    /// Takes over the running server of this instance instead of starting one; `run` tags it from now on. Returns each
    /// server at most once. The runtime calls this method for an instance before the instance appears in the snapshot;
    /// a connector that then ends the servers that nobody has adopted ends none that is still wanted. Must not block.
    fn adopt(&self, _spec: &Arc<InstanceSpec>, _run: RunNumber) -> Option<AdoptedProcess> {
        None
    }
}

/// Creator of lines to remote servers.
pub trait LineConnector: Send + Sync + 'static {
    /// Returns a line to the remote server that `spec` describes. It must not block: the line connects on the first
    /// message and reports failures then.
    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine>;
}

/// Client side of one session with a remote server, independent of the transport. Dropping it ends every exchange and
/// closes every stream at once. A line never sends a message twice: the session decides whether that is safe.
pub trait ServerLine: Send + 'static {
    /// Queues a message without blocking. Messages may be reordered, but none overtakes `Initialized`, and
    /// `Credentials` apply to every later message.
    fn send(&mut self, message: LineOutput);
    /// Returns the next incoming event. Only one task polls a line.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<LineEvent>;
}

/// Messages from a session to its line.
#[derive(Debug)]
pub enum LineOutput {
    /// A JSON-RPC request. The line returns a message with this id, or `Failed`, unless the request is abandoned.
    Request {
        /// JSON-RPC id of the request, assigned by the session.
        id: u64,
        /// The complete message.
        body: Bytes,
        /// Maximum time until the response begins; `None` if the caller's deadline suffices.
        header_timeout: Option<Duration>,
        /// Header values of a request without a session, on any transport. The request belongs to no session of the
        /// line, and its response begins none.
        routing: Option<Box<RequestHeaders>>,
    },
    /// A notification. If the server is unreachable or refuses the session or the credentials, the line reports `Lost`.
    /// If too many notifications are queued, the line drops the oldest.
    Notification {
        /// The complete message.
        body: Bytes,
    },
    /// A response to a request of the server. It is delivered like a notification, but too many queued responses also
    /// cause `Lost`.
    Response {
        /// The complete message.
        body: Bytes,
    },
    /// The notification `notifications/initialized`, which completes the handshake. The line adds the protocol version
    /// to every later message and opens the stream for messages that the server sends by itself.
    Initialized {
        /// Negotiated protocol version.
        version: String,
        /// The complete message.
        body: Bytes,
    },
    /// A GET request to the `health_url` with the instance's credentials. The line returns `Probed` or `Failed`.
    Probe {
        /// Number of the probe, from the same sequence as the ids of requests.
        id: u64,
    },
    /// The response to this request or probe is no longer awaited.
    Abandon {
        /// Number of the request or probe.
        id: u64,
    },
    /// Headers and query parameters for later messages. Open exchanges stay open.
    Credentials(Arc<InstanceSpec>),
    /// Closes the session gracefully. The line reports `Failed` for each request that was never sent, and then
    /// `Closed`.
    Close,
}

/// Events of a line, reported to its session.
#[derive(Debug)]
pub enum LineEvent {
    /// A complete JSON-RPC message.
    Message {
        /// The message.
        message: Bytes,
        /// Request on whose own stream the message arrived.
        request: Option<u64>,
    },
    /// A request or probe failed; no response will follow.
    Failed {
        /// Number of the request or probe.
        id: u64,
        /// The failure.
        failure: ExchangeFailure,
    },
    /// A probe succeeded.
    Probed {
        /// Number of the probe.
        id: u64,
    },
    /// The session is over. The line has reported `Failed` for each request that was never sent.
    Lost(ExchangeFailure),
    /// The session was closed as requested.
    Closed,
}

/// Line of a runtime without a connector for remote servers: every request fails.
#[derive(Default)]
struct UnsupportedLine {
    requests: VecDeque<u64>,
    closing: bool,
    waker: Option<Waker>,
}

impl ServerLine for UnsupportedLine {
    fn send(&mut self, message: LineOutput) {
        match message {
            LineOutput::Request { id, .. } | LineOutput::Probe { id } => self.requests.push_back(id),
            LineOutput::Close => self.closing = true,
            LineOutput::Notification { .. }
            | LineOutput::Response { .. }
            | LineOutput::Initialized { .. }
            | LineOutput::Abandon { .. }
            | LineOutput::Credentials(_) => {}
        }
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<LineEvent> {
        if let Some(id) = self.requests.pop_front() {
            return Poll::Ready(LineEvent::Failed {
                id,
                failure: ExchangeFailure::unsent(FailureKind::UnsupportedTransport),
            });
        }
        if self.closing {
            return Poll::Ready(LineEvent::Closed);
        }
        self.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// Reason why a server was not started: the error of the operating system and the name of the command, without secrets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The server cannot be started as configured. The failure counts against its restart budget.
    #[error("{0}")]
    Server(String),
    /// The machine lacks descriptors, memory, processes or disk space, or its disk fails. The start is repeated and
    /// counts against no restart budget.
    #[error("{0}")]
    Machine(String),
}

/// Process started by a connector: its pipes, its handle and a guard that kills it.
pub struct ProcessLink {
    /// Stdout of the server: newline-delimited JSON-RPC.
    pub reader: Box<dyn AsyncRead + Send + Unpin>,
    /// Stdin of the server. Dropping it closes the pipe.
    pub writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// Stderr of the server; the worker always drains it.
    pub stderr: Option<Box<dyn AsyncRead + Send + Unpin>>,
    /// The process.
    pub process: Box<dyn ServerProcess>,
    /// Guard that kills all remaining processes when it is dropped, at once and without blocking. The worker keeps it
    /// in its state, so it also works if an actor is killed.
    pub guard: Box<dyn Send>,
}

/// Running server of an earlier satellite, taken over by a connector.
pub struct AdoptedProcess {
    /// The process, with the pipes that its earlier satellite used.
    pub link: ProcessLink,
    /// Last description of its session.
    pub session: SessionDescription,
    /// Id of the first request. It is higher than all ids that earlier satellites have used for this process.
    pub first_id: u64,
}

/// Handle of a server's process for supervision. The methods that send a signal do nothing after all processes have
/// ended.
pub trait ServerProcess: Send + 'static {
    /// Returns the process id, if there is one.
    fn pid(&self) -> Option<u32>;
    /// Returns how the process is contained, if there is anything to report.
    fn containment(&self) -> Option<Arc<ProcessContainment>> {
        None
    }
    /// Returns a function that determines, after the process has ended and stderr was drained, whether a resource limit
    /// ended it.
    fn limit_probe(&self) -> Option<LimitProbe> {
        None
    }
    /// Stores the description of the session, with which a later satellite can adopt the process. Called after the
    /// handshake and after an adoption. Must not block.
    fn describe_session(&mut self, _session: SessionDescription) {}
    /// Resolves when the leader has ended. Cancel-safe; may be called again.
    fn wait(&mut self) -> BoxFuture<'_, ProcessEnd>;
    /// Resolves when the leader and all its descendants are gone. Cancel-safe; may be called again.
    fn wait_all(&mut self) -> BoxFuture<'_, ()>;
    /// Requests the leader and its descendants to end (SIGTERM).
    fn terminate(&mut self);
    /// Kills the leader and its descendants (SIGKILL).
    fn kill(&mut self);
}

/// Function that returns the resource limit that ended a process, if any. See [`ServerProcess::limit_probe`].
pub type LimitProbe = Box<dyn FnOnce() -> Option<ExceededLimit> + Send>;

/// Exit status of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessEnd {
    /// Exit code, if the process exited by itself.
    pub code: Option<i32>,
    /// Number of the signal that ended the process.
    pub signal: Option<i32>,
}

/// Destination of events. It receives one batch at a time. After a failure the same batch may arrive again with the
/// same id, so that the sink can discard duplicates.
pub trait EventSink: Send + Sync + 'static {
    /// Sends one batch, in order. Must not panic; every failure is an [`SinkAnswer`].
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer>;

    /// Returns true if the sink is local, such as a disk: the batcher then sends events within
    /// [`BatchPolicy::store_delay`](crate::model::policy::BatchPolicy::store_delay), and events that arrive during a batch
    /// form the next one. Otherwise it sends once per interval. Events that the sink did not accept wait for the interval
    /// in both cases. Called once by each batcher.
    fn is_prompt(&self) -> bool {
        false
    }

    /// Returns the store that reserves event numbers. Subscribers of events then receive an event only after the sink has
    /// accepted it, or the store has reserved its number. `None`: they receive it at once.
    fn number_store(&self) -> Option<Arc<dyn NumberStore>> {
        None
    }
}

/// Store of event numbers over restarts of the satellite.
pub trait NumberStore: Send + Sync + 'static {
    /// Reserves the numbers up to and including `through`, of events that the sink did not accept. After `Ok` no later
    /// satellite uses them for other events.
    ///
    /// # Errors
    ///
    /// Returns the reason why the numbers are not reserved; their events are then shown to nobody.
    fn reserve(&self, through: u64) -> BoxFuture<'static, Result<(), String>>;
}

/// Store of instance state over restarts of the satellite. Its methods must not block or panic.
pub trait StateStore: Send + Sync + 'static {
    /// Stores the latest state of an instance with this configuration.
    fn save(&self, spec: &Arc<InstanceSpec>, memo: StoredMemo);
    /// Deletes the state of an instance that was removed.
    fn delete(&self, id: &InstanceId);
}

/// Memory that stores nothing: instance state ends with the satellite.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullStateStore;

impl StateStore for NullStateStore {
    fn save(&self, _spec: &Arc<InstanceSpec>, _memo: StoredMemo) {}

    fn delete(&self, _id: &InstanceId) {}
}

/// Observer of calls, runs and sessions, for metrics and traces. Its methods are called in the path of a call and by
/// actors, so they must neither block nor panic. By default nothing is observed.
pub trait RuntimeObserver: Send + Sync + 'static {
    /// Returns false if calls are not observed, so that nothing is prepared for them.
    fn observes_calls(&self) -> bool {
        false
    }

    /// Observes the begin of a request. Returns `None` if its end is not observed.
    fn begin_call(&self, _call: &ObservedCall<'_>) -> Option<Box<dyn CallSpan>> {
        None
    }

    /// Observes the end of a tool call, after all attempts.
    fn tool_called(&self, _of: &EventSubject, _tool: &str, _fate: ToolCallFate) {}

    /// Observes that a run takes calls.
    fn run_ready(&self, _run: &ObservedRun<'_>, _start: RunStart) {}

    /// Observes the end of a run. `uptime` is the duration of its session; `None` if it had none.
    fn run_ended(&self, _run: &ObservedRun<'_>, _cause: &ExitCause, _uptime: Option<Duration>) {}

    /// Observes the use of the start permits.
    fn permits_changed(&self, _load: StartLoad) {}

    /// Observes the end of a client's session.
    fn client_session_ended(&self, _version: &str, _took: Duration) {}

    /// Observes bytes of messages from a server of this [transport](InstanceSpec::transport).
    fn bytes_received(&self, _transport: &'static str, _bytes: usize) {}

    /// Observes bytes of messages to a server.
    fn bytes_sent(&self, _transport: &'static str, _bytes: usize) {}
}

/// Observer that observes nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl RuntimeObserver for NoObserver {}

/// Request whose end is observed. Dropped without [`CallSpan::end`], it was abandoned by its caller.
pub trait CallSpan: Send {
    /// Returns the identity of the span, which the request passes on; `None` if the call is not recorded.
    fn trace(&self) -> Option<TraceParent>;
    /// Observes the end.
    fn end(self: Box<Self>, end: CallEnd<'_>);
}

/// Request that begins.
#[derive(Clone, Copy)]
pub struct ObservedCall<'a> {
    /// Side of the satellite in the request.
    pub side: ObservedSide<'a>,
    /// Trace of the request.
    pub trace: TraceOrigin,
    /// Method of the request.
    pub method: &'a str,
    /// Tool or prompt that the method names.
    pub target: Option<&'a str>,
    /// Params as JSON text, or the arguments of a tool that is called without a message.
    pub params: Option<&'a str>,
    /// Id of the request, as JSON text.
    pub request_id: &'a dyn fmt::Display,
    /// Negotiated version of the protocol.
    pub version: Option<&'a str>,
    /// Instance that the request is for; `None` if the satellite answers it or chooses the instance.
    pub spec: Option<&'a InstanceSpec>,
}

/// Side of the satellite in a request.
#[derive(Clone, Copy)]
pub enum ObservedSide<'a> {
    /// A client sent the request.
    Server {
        /// Team of the client's user.
        team: &'a TeamId,
        /// The user.
        user: &'a UserId,
        /// Id of the client's session, without its secret part; `None` for a request outside a session.
        session: Option<&'a str>,
        /// Address of the client's connection; `None` if the request did not come over one.
        peer: Option<SocketAddr>,
    },
    /// The satellite sends the request to a server.
    Client {
        /// Number of the attempt, from 1. A call is repeated on the next run at most once.
        attempt: u32,
    },
}

/// Trace that a request belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceOrigin {
    /// The request enters the satellite here, with the trace context of its sender. The observer decides whether to
    /// record it.
    Entry(Option<TraceParent>),
    /// The request belongs to a call that was observed before: its span, or `None` if that is not recorded.
    Within(Option<TraceParent>),
}

/// End of a request.
#[derive(Debug, Clone)]
pub enum CallEnd<'a> {
    /// A result, as JSON text.
    Result(&'a str),
    /// A JSON-RPC error.
    Error {
        /// Code of the error.
        code: i64,
        /// Message, with the secrets of the instance masked.
        message: Cow<'a, str>,
    },
    /// No answer.
    Failed(&'a CallError),
    /// The caller cancelled the request.
    Cancelled,
}

/// Result of a tool call, after all attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolCallFate {
    /// A result.
    Ok,
    /// A result that reports an error of the tool.
    ToolError,
    /// A JSON-RPC error of the server.
    ServerError,
    /// The caller cancelled the call, or is gone.
    Cancelled,
    /// The call did not reach the server.
    NotSent,
    /// The server may have executed the call.
    MaybeExecuted,
    /// The deadline passed.
    TimedOut,
}

impl ToolCallFate {
    /// All fates, in the order of their declaration.
    pub const ALL: [Self; 7] = [
        Self::Ok,
        Self::ToolError,
        Self::ServerError,
        Self::Cancelled,
        Self::NotSent,
        Self::MaybeExecuted,
        Self::TimedOut,
    ];

    /// Returns the name used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ToolError => "tool_error",
            Self::ServerError => "server_error",
            Self::Cancelled => "cancelled",
            Self::NotSent => "not_sent",
            Self::MaybeExecuted => "maybe_executed",
            Self::TimedOut => "timed_out",
        }
    }
}

impl From<Option<CallFate>> for ToolCallFate {
    /// Returns the fate of a call that failed; `None` means that the server answered with an error.
    fn from(fate: Option<CallFate>) -> Self {
        match fate {
            None => Self::ServerError,
            Some(CallFate::NotSent) => Self::NotSent,
            Some(CallFate::MaybeExecuted) => Self::MaybeExecuted,
            Some(CallFate::TimedOut) => Self::TimedOut,
        }
    }
}

/// Use of the start permits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StartLoad {
    /// Starts of processes.
    pub processes: PermitUse,
    /// Connection attempts to remote servers.
    pub connections: PermitUse,
    /// Teams whose servers start one at a time.
    pub throttled_teams: usize,
}

/// Use of a pool of start permits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PermitUse {
    /// Permits in use.
    pub held: usize,
    /// Instances that wait for one.
    pub waiting: usize,
}

/// Run of an instance.
#[derive(Clone, Copy)]
pub struct ObservedRun<'a> {
    /// The instance.
    pub spec: &'a InstanceSpec,
    /// Negotiated version of the protocol; `None` before the handshake.
    pub version: Option<&'a str>,
}

/// Duration of a start.
#[derive(Debug, Clone, Copy)]
pub struct RunStart {
    /// Time from the start of the process, or of the connection, until the run takes calls.
    pub took: Duration,
    /// Time since the unwanted exit that the run follows, if it follows one.
    pub recovered_after: Option<Duration>,
}

/// Batch of events for a sink; never empty.
#[derive(Debug, PartialEq)]
pub struct SinkBatch {
    /// Id of the batch, the same for every attempt to send it.
    pub id: u64,
    /// Events in order of `seq`.
    pub events: Vec<Envelope>,
}

/// Result of sending a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SinkAnswer {
    /// The sink accepted all events.
    Accepted,
    /// The sink accepted all events but these, given by index in the batch with the reason. The batcher logs and drops
    /// them.
    Partial(Vec<(usize, String)>),
    /// The sink rejected the batch because of an invalid event (400, 422): its index if known, and the reason.
    Invalid(Option<usize>, String),
    /// The sink rejected the batch because of its size (413).
    TooLarge,
    /// The sink rejected the batch because of our credentials (401, 403).
    Unauthorized,
    /// The sink rejected the batch (429) and may have requested a pause.
    Throttled(Option<Duration>),
    /// The sink is unavailable (5xx, timeout, connection refused or any other failure), with the reason. It accepted no
    /// event.
    Unavailable(String),
}

/// Connectors of a runtime, one for each transport. A server whose transport has no connector cannot be started.
///
/// Connectors of this workspace convert into it; a host adds its own with [`Connectors::with_process`] and
/// [`Connectors::with_line`].
#[derive(Clone, Default)]
pub struct Connectors {
    process: Option<Arc<dyn ProcessConnector>>,
    line: Option<Arc<dyn LineConnector>>,
}

impl Connectors {
    /// Sets the connector for child processes.
    #[must_use]
    pub fn with_process(self, connector: impl ProcessConnector) -> Self {
        Self { process: Some(Arc::new(connector)), ..self }
    }

    /// Sets the connector for remote servers.
    #[must_use]
    pub fn with_line(self, connector: impl LineConnector) -> Self {
        Self { line: Some(Arc::new(connector)), ..self }
    }
}

impl ProcessConnector for Connectors {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        match &self.process {
            Some(connector) => connector.open(spec, run),
            None => ready(Err(OpenError::Server("this runtime has no connector for processes".to_owned()))).boxed(),
        }
    }

    fn can_adopt(&self, spec: &InstanceSpec) -> bool {
        self.process.as_ref().is_some_and(|connector| connector.can_adopt(spec))
    }

    fn adopt(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Option<AdoptedProcess> {
        self.process.as_ref()?.adopt(spec, run)
    }
}

impl LineConnector for Connectors {
    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine> {
        match &self.line {
            Some(connector) => connector.dial(spec, run),
            None => Box::new(UnsupportedLine::default()),
        }
    }
}
