//! How a run ended, and what became of a call.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::failure::Failure;
use super::remedy::Remedy;
use super::status::Status;

/// Why a run ended, as its worker tells its team's supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerExit {
    /// The decisive cause.
    pub cause: ExitCause,
    /// The process's exit code, where it ended by one.
    pub code: Option<i32>,
    /// The signal that ended the process.
    pub signal: Option<i32>,
    /// Whether it had to be killed after its grace.
    pub forced: bool,
    /// From `initialized` to the end; `None` if the handshake was never done (such a run counts as 0 s).
    pub ran: Option<Duration>,
    /// Its process id.
    pub pid: Option<u32>,
    /// The limit that ended it, where one did.
    pub limit: Option<Limit>,
    /// The last line of its output: of stderr, or of what was not JSON on stdout if stderr had nothing. See
    /// [`output::excerpt`](crate::rules::output::excerpt).
    pub last_line: Option<String>,
}

/// A limit that ended a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// What there was too much of.
    pub of: Resource,
    /// Whether it is only likely: the kernel does not say.
    pub suspected: bool,
}

/// What a limit is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Address space, or physical memory where a cgroup holds it.
    Memory,
    /// Processor time.
    Cpu,
    /// The size of one file.
    FileSize,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.of {
            Resource::Memory => "limit: memory",
            Resource::Cpu => "limit: cpu",
            Resource::FileSize => "limit: file size",
        })?;
        if self.suspected { f.write_str(", suspected") } else { Ok(()) }
    }
}

/// See [`WorkerExit::cause`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitCause {
    /// It was asked to stop.
    Asked,
    /// The process ended by itself; code and signal say how.
    Exited,
    /// It could not be started: the OS reason and the command's name.
    Spawn(String),
    /// The machine could not start it: descriptors, memory, processes or disk space are short, or its disk fails.
    Machine(String),
    /// The handshake failed, and why.
    Handshake(String),
    /// The wire broke: a line over the limit, stdout closed, a read error.
    Wire(String),
    /// Alive, and answering nothing.
    Unresponsive,
    /// The remote server was lost, or could not be reached.
    Lost(Failure),
    /// The worker's own code panicked, and how.
    Panicked(String),
}

impl WorkerExit {
    /// An exit for a cause that is not the process's own.
    pub fn because(cause: ExitCause) -> Self {
        Self { cause, code: None, signal: None, forced: false, ran: None, pid: None, limit: None, last_line: None }
    }

    /// Whether this is a crash. An unasked exit with code 0 is an exit, not a crash.
    pub fn is_crash(&self) -> bool {
        match self.cause {
            // No fault of the server: nothing of it was started.
            ExitCause::Asked | ExitCause::Machine(_) => false,
            ExitCause::Exited => self.code != Some(0),
            ExitCause::Spawn(_)
            | ExitCause::Handshake(_)
            | ExitCause::Wire(_)
            | ExitCause::Unresponsive
            | ExitCause::Lost(_)
            | ExitCause::Panicked(_) => true,
        }
    }

    /// The cause and the last line of output, for a status message: `exited with code 1: no such table`.
    pub fn reason(&self) -> String {
        match &self.last_line {
            Some(line) => format!("{}: {line}", self.cause()),
            None => self.cause(),
        }
    }

    /// The cause alone: `exited with code 1`, `killed by SIGKILL`.
    pub fn cause(&self) -> String {
        match &self.cause {
            ExitCause::Asked => "stopped".to_owned(),
            ExitCause::Exited => match self.limit {
                Some(limit) => format!("{} ({limit})", self.how_it_ended()),
                None => self.how_it_ended(),
            },
            ExitCause::Spawn(why) | ExitCause::Machine(why) => why.clone(),
            ExitCause::Handshake(why) => format!("handshake failed: {why}"),
            ExitCause::Wire(why) => format!("connection broken: {why}"),
            ExitCause::Unresponsive => "unresponsive".to_owned(),
            ExitCause::Lost(failure) => failure.to_string(),
            ExitCause::Panicked(how) => format!("worker panicked: {how}"),
        }
    }

    /// `exited with code 1`, `killed by SIGKILL`, or `ended` where neither is known.
    pub fn how_it_ended(&self) -> String {
        match (self.code, self.signal) {
            (_, Some(signal)) => format!("killed by {}", signal_name(signal)),
            (Some(code), None) => format!("exited with code {code}"),
            (None, None) => "ended".to_owned(),
        }
    }
}

fn signal_name(signal: i32) -> String {
    match signal {
        1 => "SIGHUP".into(),
        2 => "SIGINT".into(),
        3 => "SIGQUIT".into(),
        4 => "SIGILL".into(),
        5 => "SIGTRAP".into(),
        6 => "SIGABRT".into(),
        7 => "SIGBUS".into(),
        8 => "SIGFPE".into(),
        9 => "SIGKILL".into(),
        11 => "SIGSEGV".into(),
        13 => "SIGPIPE".into(),
        14 => "SIGALRM".into(),
        15 => "SIGTERM".into(),
        24 => "SIGXCPU".into(),
        25 => "SIGXFSZ".into(),
        other => format!("signal {other}"),
    }
}

/// How a runtime ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuntimeEnd {
    /// By a shutdown.
    ShutDown {
        /// Events that could not be handed to the sink.
        events_lost: usize,
        /// Whether every worker was gone within its grace.
        in_time: bool,
    },
    /// Without a shutdown: it was killed, or the actor of the host above it ended.
    Killed,
    /// By a fault of its own: the message of the panic or error.
    Failed(String),
}

impl std::fmt::Display for RuntimeEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ShutDown { .. } => f.write_str("it was shut down"),
            Self::Killed => f.write_str("it was killed"),
            Self::Failed(why) => write!(f, "its root supervisor failed: {why}"),
        }
    }
}

/// What became of a call that got no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// No byte of it reached the server: safe to repeat.
    NotSent,
    /// It may have been carried out.
    MaybeExecuted,
    /// Its deadline passed; the server was told to cancel.
    TimedOut,
}

/// Why a call has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CallError {
    /// No such instance or tool, for this caller.
    #[error("{what} not found")]
    NotFound {
        /// What was looked up.
        what: String,
    },
    /// The instance takes no calls now, and what the caller can do.
    #[error("{message}")]
    Refused {
        /// Its status.
        status: Status,
        /// The status and its cause.
        message: String,
        /// The next step.
        remedy: Option<Remedy>,
    },
    /// The run ended, or could not take the call, before an answer came.
    #[error("terminated: {reason}")]
    Terminated {
        /// What became of the call.
        fate: Fate,
        /// Why the run ended.
        reason: String,
    },
    /// The call's deadline passed.
    #[error("{} within {} s", if *fate == Fate::NotSent { "not sent, because its server was not ready for it" } else { "no answer" }, seconds(*after))]
    TimedOut {
        /// The deadline that passed.
        after: Duration,
        /// Whether it was sent before that.
        fate: Fate,
    },
    /// It is not connected, an attempt that was made for this call failed, and it is tried again.
    #[error("the server is not connected: {last_error}")]
    Reconnecting {
        /// When the attempt was over.
        last_attempt: Timestamp,
        /// Until the next one; none if only a call or a person brings one.
        next_retry_ms: Option<u64>,
        /// Why it failed.
        last_error: String,
    },
    /// The exchange with the remote server has failed, as often as it could be tried.
    #[error("{failure}")]
    Remote {
        /// What became of the call.
        fate: Fate,
        /// Why.
        failure: Failure,
    },
    /// A limit at the door.
    #[error("{what}: at most {limit} at once; try again when one has been answered")]
    Busy {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The server answered with a JSON-RPC error.
    #[error("server error {code}: {message}")]
    Server {
        /// JSON-RPC error code.
        code: i64,
        /// The server's message, with this instance's secrets masked.
        message: String,
        /// The server's data as JSON text, with this instance's secrets masked.
        data: Option<String>,
    },
    /// The arguments are not what the method takes.
    #[error("{0}")]
    BadInput(String),
}

/// Returns the message of a refused call: the instance, its status and the cause.
pub fn refused_because(name: &str, status: Status, why: &str) -> String {
    format!("`{name}` is {status}: {why}")
}

/// As a person gave it: what was left of it after a few microseconds is the same.
fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

impl CallError {
    /// What became of the call, where it is not known to have been answered.
    pub fn fate(&self) -> Option<Fate> {
        match self {
            Self::Terminated { fate, .. } | Self::Remote { fate, .. } | Self::TimedOut { fate, .. } => Some(*fate),
            Self::NotFound { .. }
            | Self::Refused { .. }
            | Self::Reconnecting { .. }
            | Self::Busy { .. }
            | Self::BadInput(_) => Some(Fate::NotSent),
            Self::Server { .. } => None,
        }
    }

    /// A stable word for scripts.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not_found",
            Self::Refused { .. } => "refused",
            Self::Terminated { .. } => "terminated",
            Self::TimedOut { .. } => "timed_out",
            Self::Reconnecting { .. } => "reconnecting",
            Self::Remote { .. } => "remote",
            Self::Busy { .. } => "busy",
            Self::Server { .. } => "server_error",
            Self::BadInput(_) => "bad_input",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exited(code: Option<i32>, signal: Option<i32>) -> WorkerExit {
        WorkerExit { code, signal, ..WorkerExit::because(ExitCause::Exited) }
    }

    #[test]
    fn every_unasked_end_is_a_crash_but_an_exit_with_code_0() {
        assert!(!exited(Some(0), None).is_crash());
        assert!(exited(Some(1), None).is_crash());
        assert!(exited(None, Some(15)).is_crash());
        assert!(exited(None, None).is_crash(), "nobody knows how it ended");
        assert!(!WorkerExit::because(ExitCause::Asked).is_crash());
        let why = String::new;
        assert!(!WorkerExit::because(ExitCause::Machine(why())).is_crash());
        for cause in [
            ExitCause::Spawn(why()),
            ExitCause::Handshake(why()),
            ExitCause::Wire(why()),
            ExitCause::Unresponsive,
            ExitCause::Panicked(why()),
        ] {
            // Whatever code the process then ends with.
            assert!(WorkerExit { code: Some(0), ..WorkerExit::because(cause.clone()) }.is_crash(), "{cause:?}");
        }
    }

    #[test]
    fn a_reason_says_in_a_few_words_what_happened() {
        assert_eq!(exited(Some(1), None).reason(), "exited with code 1");
        assert_eq!(exited(None, Some(9)).reason(), "killed by SIGKILL");
        assert_eq!(exited(None, Some(34)).reason(), "killed by signal 34");
        assert_eq!(exited(None, None).reason(), "ended");
        let because = |cause| WorkerExit::because(cause).reason();
        assert_eq!(because(ExitCause::Spawn("cannot start `npx`: not found".into())), "cannot start `npx`: not found");
        assert_eq!(because(ExitCause::Handshake("no answer".into())), "handshake failed: no answer");
        assert_eq!(because(ExitCause::Wire("stdout closed".into())), "connection broken: stdout closed");
        assert_eq!(because(ExitCause::Unresponsive), "unresponsive");
        let last_line = Some("ModuleNotFoundError: No module named 'x'".to_owned());
        let exit = WorkerExit { last_line, ..exited(Some(1), None) };
        assert_eq!(exit.reason(), "exited with code 1: ModuleNotFoundError: No module named 'x'");
        assert_eq!(exit.cause(), "exited with code 1");
    }

    #[test]
    fn a_deadline_is_told_as_it_was_given() {
        let told = |micros| {
            let (after, fate) = (Duration::from_micros(micros), Fate::TimedOut);
            CallError::TimedOut { after, fate }.to_string()
        };
        assert_eq!(told(29_999_997), "no answer within 30 s");
        assert_eq!(told(300_000), "no answer within 0.3 s");
    }

    #[test]
    fn the_fate_of_a_call_is_known_unless_it_was_answered() {
        let refused = CallError::Refused { status: Status::PermanentlyFailed, message: String::new(), remedy: None };
        let terminated = CallError::Terminated { fate: Fate::MaybeExecuted, reason: String::new() };
        let answered = CallError::Server { code: -32000, message: String::new(), data: None };
        assert_eq!(refused.fate(), Some(Fate::NotSent));
        assert_eq!(terminated.fate(), Some(Fate::MaybeExecuted));
        assert_eq!(answered.fate(), None);
    }
}
