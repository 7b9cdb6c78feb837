//! Where the world begins: a connector brings servers to life, a sink takes events away. Everything on the other side
//! of these traits may block, fail, lie or die; everything on this side is messages and rules.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::model::event::Envelope;
use crate::model::exit::Limit;
use crate::model::failure::{Failure, FailureKind};
use crate::model::ids::{InstanceId, Run};
use crate::model::memo::StoredMemo;
use crate::model::snapshot::Custody;
use crate::model::spec::InstanceSpec;

/// Starts one run of a server. Called from a task of the worker, never from a handler, so it may take its time; the
/// handshake is not its business.
pub trait Connector: Send + Sync + 'static {
    /// Brings up the server that `spec` describes. `run` tags what is started. An error says what the OS said and
    /// names the command, never an argument or a value.
    fn open(&self, spec: Arc<InstanceSpec>, run: Run) -> BoxFuture<'static, Result<Link, OpenError>>;

    /// A line to the remote server that `spec` describes. Instant: nothing is connected before something is sent, and
    /// what goes wrong is told then.
    fn dial(&self, spec: &Arc<InstanceSpec>, run: Run) -> Box<dyn Line>;
}

/// The client's side of one session with a remote server, whatever carries it. Dropping it ends every exchange and
/// closes every stream at once. It never sends anything twice: whether that is safe is not its business.
pub trait Line: Send + 'static {
    /// Takes a message and never waits. Messages may overtake each other, but none overtakes `Initialized`, and
    /// `Credentials` are used by everything after them.
    fn send(&mut self, message: Outgoing);
    /// What comes next. Polled by one task.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Incoming>;
}

/// What a session wants of its line.
#[derive(Debug)]
pub enum Outgoing {
    /// A JSON-RPC request. It comes to a message with its id, or to `Failed`, unless it is abandoned.
    Request {
        /// Its JSON-RPC id, a number of ours.
        id: u64,
        /// The whole message.
        body: Bytes,
        /// How long the server may take to begin an answer; `None` where the deadline of its caller is enough.
        header_timeout: Option<Duration>,
        /// Of a request without a session, on whatever line: what headers say of it. It belongs to no session that the line
        /// may have, and its answer begins none.
        routing: Option<Box<Routing>>,
    },
    /// A notification. One that is not delivered because the server cannot be reached or refuses the session or the
    /// credentials comes to `Lost`. Where too many wait for a server to take them, the oldest are not sent.
    Notification {
        /// The whole message.
        body: Bytes,
    },
    /// The answer to a request of the server. As for a notification, but where too many wait that is `Lost`, too.
    Response {
        /// The whole message.
        body: Bytes,
    },
    /// `notifications/initialized`: the handshake is done. The line says the version with everything after it, and
    /// listens for what the server says unasked.
    Initialized {
        /// The protocol version that was agreed on.
        version: String,
        /// The whole message.
        body: Bytes,
    },
    /// A GET of the `health_url` with the instance's credentials: comes to `Probed` or `Failed`.
    Probe {
        /// A number of ours, from the same count as the ids of requests.
        id: u64,
    },
    /// Nobody waits for this request or probe any more.
    Abandon {
        /// Its number.
        id: u64,
    },
    /// Headers and query parameters from now on. What is open stays open.
    Credentials(Arc<InstanceSpec>),
    /// End the session tidily; comes to `Closed`. A request that was never sent comes to `Failed` before.
    Close,
}

/// What headers repeat of a request, as it is meant: how a header spells it is the line's business.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// `MCP-Protocol-Version`
    pub version: &'static str,
    /// `Mcp-Method`
    pub method: String,
    /// `Mcp-Name`: of the tool, prompt, resource or task that it is about.
    pub name: Option<String>,
    /// `Mcp-Param-…`: the parameters that their tool marks so, by the rest of the header's name.
    pub params: Vec<(Box<str>, String)>,
}

/// What a line brings.
#[derive(Debug)]
pub enum Incoming {
    /// One JSON-RPC message, whole.
    Message {
        /// It.
        message: Bytes,
        /// The request on whose own stream it came.
        of: Option<u64>,
    },
    /// No answer will come to this request or probe.
    Failed {
        /// Its number.
        id: u64,
        /// Why.
        failure: Failure,
    },
    /// The probe was answered with success.
    Probed {
        /// Its number.
        id: u64,
    },
    /// The session is over, whatever was asked. A request that it never sent has come to `Failed` before.
    Lost(Failure),
    /// The session was ended tidily, as was asked.
    Closed,
}

/// A line for a host that has no connector for a transport: whatever is asked fails, and says so.
#[derive(Debug, Default)]
pub struct Unserved {
    asked: VecDeque<u64>,
    closing: bool,
    waker: Option<Waker>,
}

impl Line for Unserved {
    fn send(&mut self, message: Outgoing) {
        match message {
            Outgoing::Request { id, .. } | Outgoing::Probe { id } => self.asked.push_back(id),
            Outgoing::Close => self.closing = true,
            Outgoing::Notification { .. }
            | Outgoing::Response { .. }
            | Outgoing::Initialized { .. }
            | Outgoing::Abandon { .. }
            | Outgoing::Credentials(_) => {}
        }
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        if let Some(id) = self.asked.pop_front() {
            return Poll::Ready(Incoming::Failed { id, failure: Failure::unsent(FailureKind::Unserved) });
        }
        if self.closing {
            return Poll::Ready(Incoming::Closed);
        }
        self.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// Why nothing was started: the OS reason and the command's name, with no secret in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The server cannot be started as it is configured. The failure is charged to its restart budget.
    #[error("{0}")]
    Server(String),
    /// The machine lacks descriptors, memory, processes or disk space, or its disk fails. The start is repeated and
    /// charged to nobody.
    #[error("{0}")]
    Machine(String),
}

/// What a connector hands over: the client's side of one MCP session, how it ends, and how to end it.
pub struct Link {
    /// The server's stdout: newline-delimited JSON-RPC.
    pub reader: Box<dyn AsyncRead + Send + Unpin>,
    /// The server's stdin. Dropping it is how the server sees end of file.
    pub writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// The server's stderr, which is always drained.
    pub stderr: Option<Box<dyn AsyncRead + Send + Unpin>>,
    /// The process.
    pub process: Box<dyn Process>,
    /// Dropping it kills whatever is still there, at once and without waiting. The worker keeps it in its state, so it
    /// works also where an actor is killed and nobody gets to say goodbye.
    pub guard: Box<dyn Send>,
}

/// A server's process, as far as supervision needs it. The methods that send a signal do nothing once all is gone.
pub trait Process: Send + 'static {
    /// Its process id, if it has one.
    fn pid(&self) -> Option<u32>;
    /// How it is kept, where there is something to tell.
    fn custody(&self) -> Option<Arc<Custody>> {
        None
    }
    /// What finds out, once all has ended and stderr was drained, whether a limit ended it.
    fn autopsy(&self) -> Option<Autopsy> {
        None
    }
    /// Resolves when the leader has ended. Cancel-safe; may be called again.
    fn ended(&mut self) -> BoxFuture<'_, ProcessEnd>;
    /// Resolves when the leader and everything it started is gone. Cancel-safe; may be called again.
    fn gone(&mut self) -> BoxFuture<'_, ()>;
    /// Asks the leader and everything it started to end (SIGTERM).
    fn terminate(&mut self);
    /// Ends the leader and everything it started (SIGKILL).
    fn kill(&mut self);
}

/// See [`Process::autopsy`].
pub type Autopsy = Box<dyn FnOnce() -> Option<Limit> + Send>;

/// How a process ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessEnd {
    /// Its exit code, where it ended by one.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
}

/// Takes batches of events away. One batch is in flight at a time; the same batch may come again under the same id
/// after a failure, so a sink that can drop repeats has what it needs.
pub trait EventSink: Send + Sync + 'static {
    /// Sends one batch, in order. Never panics; every failure is an answer.
    fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer>;

    /// Whether it is near by, such as a disk: then events go as soon as there are some, and what comes while a batch is
    /// under way is the next one. Otherwise they go once in an interval. What it did not take waits for the interval
    /// either way.
    fn is_prompt(&self) -> bool {
        false
    }

    /// Reserves numbers before events get them. `None`: events are numbered as they come.
    fn numbers(&self) -> Option<Arc<dyn Numbers>> {
        None
    }
}

/// Keeps account of the numbers of events over restarts of the satellite.
pub trait Numbers: Send + Sync + 'static {
    /// Reserves the numbers up to and including `through`: after `Ok` no later satellite uses them for other events. An
    /// error is the reason why they are not reserved; events then wait without numbers.
    fn reserve(&self, through: u64) -> BoxFuture<'static, Result<(), String>>;
}

/// Keeps what instances have come to, over restarts of the satellite. Neither waits nor panics.
pub trait Memory: Send + Sync + 'static {
    /// What an instance has come to with this configuration: the latest counts.
    fn remember(&self, spec: &Arc<InstanceSpec>, memo: StoredMemo);
    /// The instance is gone for good.
    fn forget(&self, id: &InstanceId);
}

/// A memory that keeps nothing: what an instance has come to ends with the satellite.
#[derive(Debug, Clone, Copy, Default)]
pub struct Forgetful;

impl Memory for Forgetful {
    fn remember(&self, _spec: &Arc<InstanceSpec>, _memo: StoredMemo) {}

    fn forget(&self, _id: &InstanceId) {}
}

/// Events on their way, at least one.
#[derive(Debug, PartialEq)]
pub struct Batch {
    /// The same for every attempt to send these events.
    pub id: u64,
    /// The events, in order of `seq`.
    pub events: Vec<Envelope>,
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// All taken.
    Accepted,
    /// Taken but for these, by index in the batch with the reason: they are logged and dropped.
    Partial(Vec<(usize, String)>),
    /// None taken because one is invalid (400, 422): its index if the sink names it.
    Invalid(Option<usize>, String),
    /// None taken because the batch is too large (413).
    TooLarge,
    /// None taken because of our credentials (401, 403).
    Unauthorized,
    /// None taken, and when to come back (429).
    Throttled(Option<Duration>),
    /// None taken, and why: 5xx, timeout, refused, anything else.
    Unavailable(String),
}
