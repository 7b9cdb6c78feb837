//! Where the world begins: a connector brings servers to life, a sink takes events away. Everything on the other side
//! of these traits may block, fail, lie or die; everything on this side is messages and rules.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::model::event::Envelope;
use crate::model::exit::Limit;
use crate::model::ids::Run;
use crate::model::snapshot::Custody;
use crate::model::spec::InstanceSpec;

/// Starts one run of a server. Called from a task of the worker, never from a handler, so it may take its time; the
/// handshake is not its business.
pub trait Connector: Send + Sync + 'static {
    /// Brings up the server that `spec` describes. `run` tags what is started. An error says what the OS said and
    /// names the command, never an argument or a value.
    fn open(&self, spec: Arc<InstanceSpec>, run: Run) -> BoxFuture<'static, Result<Link, OpenError>>;
}

/// Why nothing was started: the OS reason and the command's name, with no secret in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OpenError(pub String);

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
