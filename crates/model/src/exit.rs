//! Reasons why runs, calls and the runtime ended.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::failure::ExchangeFailure;
use super::remedy::Remedy;
use super::status::Status;

/// Reason why a run ended, as reported by its worker to the supervisor of the team.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerExit {
    /// Decisive cause.
    pub cause: ExitCause,
    /// Exit code of the process, if it exited by itself.
    pub code: Option<i32>,
    /// Number of the signal that ended the process.
    pub signal: Option<i32>,
    /// True if the process was killed after its grace period.
    pub forced: bool,
    /// Time from `initialized` to the end; `None` if the handshake did not complete (such a run counts as 0 s).
    pub uptime: Option<Duration>,
    /// Process ID.
    pub pid: Option<u32>,
    /// Limit that ended the process, if any.
    pub limit: Option<ExceededLimit>,
    /// Last line of stderr, or of non-JSON output on stdout if stderr was empty. See
    /// `rules::output::excerpt`.
    pub last_line: Option<String>,
}

/// A resource limit that ended a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExceededLimit {
    /// Limited resource.
    pub resource: LimitedResource,
    /// True if the limit is only the likely cause, because the kernel does not report it.
    pub suspected: bool,
}

/// Resource to which a limit applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitedResource {
    /// Address space, or physical memory where a cgroup limits it.
    Memory,
    /// Processor time.
    Cpu,
    /// Size of one file.
    FileSize,
}

impl std::fmt::Display for ExceededLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.resource {
            LimitedResource::Memory => "limit: memory",
            LimitedResource::Cpu => "limit: cpu",
            LimitedResource::FileSize => "limit: file size",
        })?;
        if self.suspected { f.write_str(", suspected") } else { Ok(()) }
    }
}

/// Causes of the end of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitCause {
    /// The run was stopped on request.
    Requested,
    /// The process ended by itself; see its code and signal.
    Exited,
    /// The process could not be started: the error of the operating system and the name of the command.
    Spawn(String),
    /// The machine could not start the process: file descriptors, memory, processes or disk space are short, or a disk
    /// fails.
    Machine(String),
    /// The handshake failed, with the reason.
    Handshake(String),
    /// The connection to the process broke: a line over the limit, stdout closed, a read error.
    Wire(String),
    /// The process was alive and did not answer.
    Unresponsive,
    /// The remote server was lost or could not be reached.
    Lost(ExchangeFailure),
    /// The worker panicked, with the message.
    Panicked(String),
    /// The session of a server that an earlier satellite started could not be continued, with the reason.
    NotAdopted(String),
}

impl WorkerExit {
    /// Creates an exit whose cause is not an exit of the process itself.
    pub fn from_cause(cause: ExitCause) -> Self {
        Self { cause, code: None, signal: None, forced: false, uptime: None, pid: None, limit: None, last_line: None }
    }

    /// Returns true if this is a crash. An unrequested exit with code 0 is not a crash.
    pub fn is_crash(&self) -> bool {
        match self.cause {
            // Not a fault of the server: it was not started, or lost its satellite.
            ExitCause::Requested | ExitCause::Machine(_) | ExitCause::NotAdopted(_) => false,
            ExitCause::Exited => self.code != Some(0),
            ExitCause::Spawn(_)
            | ExitCause::Handshake(_)
            | ExitCause::Wire(_)
            | ExitCause::Unresponsive
            | ExitCause::Lost(_)
            | ExitCause::Panicked(_) => true,
        }
    }

    /// Returns the cause and the last line of output, for a status message: `exited with code 1: no such table`.
    pub fn reason(&self) -> String {
        match &self.last_line {
            Some(line) => format!("{}: {line}", self.cause_text()),
            None => self.cause_text(),
        }
    }

    /// Returns the cause without the output: `exited with code 1`, `killed by SIGKILL`.
    pub fn cause_text(&self) -> String {
        match &self.cause {
            ExitCause::Requested => "stopped".to_owned(),
            ExitCause::Exited => match self.limit {
                Some(limit) => format!("{} ({limit})", self.end_description()),
                None => self.end_description(),
            },
            ExitCause::Spawn(why) | ExitCause::Machine(why) => why.clone(),
            ExitCause::Handshake(why) => format!("handshake failed: {why}"),
            ExitCause::Wire(why) => format!("connection broken: {why}"),
            ExitCause::Unresponsive => "unresponsive".to_owned(),
            ExitCause::Lost(failure) => failure.to_string(),
            ExitCause::Panicked(how) => format!("worker panicked: {how}"),
            ExitCause::NotAdopted(why) => format!("session not continued: {why}"),
        }
    }

    /// Returns `exited with code 1`, `killed by SIGKILL`, or `ended` if neither is known.
    pub fn end_description(&self) -> String {
        match (self.code, self.signal) {
            (_, Some(signal)) => format!("killed by {}", signal_name(signal)),
            (Some(code), None) => format!("exited with code {code}"),
            (None, None) => "ended".to_owned(),
        }
    }
}

/// Returns the name of a signal, such as `SIGKILL`, or `signal 34` for one without a name.
pub fn signal_name(signal: i32) -> String {
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

/// Reasons why the runtime ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuntimeEnd {
    /// Shutdown on request.
    ShutDown {
        /// Number of events that could not be delivered to the sink.
        events_lost: usize,
        /// True if every worker ended within its grace period.
        in_time: bool,
    },
    /// End without a shutdown: the runtime was killed, or the host's actor above it ended.
    Killed,
    /// Internal failure, with the message of the panic or error.
    Failed(String),
}

impl std::fmt::Display for RuntimeEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ShutDown { .. } => f.write_str("shutdown requested"),
            Self::Killed => f.write_str("killed"),
            Self::Failed(why) => write!(f, "the root supervisor failed: {why}"),
        }
    }
}

/// Effect of a call that got no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CallFate {
    /// No byte of the call reached the server: repeating it is safe.
    NotSent,
    /// The server may have executed the call.
    MaybeExecuted,
    /// The deadline passed; a cancellation was sent to the server.
    TimedOut,
}

/// Reasons why a call has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum CallError {
    /// No such instance or tool for this caller.
    #[error("{what} not found")]
    NotFound {
        /// Kind and name that were looked up.
        what: String,
    },
    /// The instance accepts no calls now.
    #[error("{message}")]
    Refused {
        /// Status of the instance.
        status: Status,
        /// Status and its cause, for people.
        message: String,
        /// Next step for the caller.
        remedy: Option<Remedy>,
    },
    /// The run ended, or could not accept the call, before an answer arrived.
    #[error("terminated: {reason}")]
    Terminated {
        /// Effect of the call.
        fate: CallFate,
        /// Reason why the run ended.
        reason: String,
    },
    /// The deadline of the call passed.
    #[error("{}", timed_out(*after, *fate))]
    TimedOut {
        /// Deadline that passed, from the start of the call.
        after: Duration,
        /// Effect of the call: [`CallFate::NotSent`] if the server was not ready in time.
        fate: CallFate,
    },
    /// The server is not connected, the attempt made for this call failed, and the satellite will try again.
    #[error("the server is not connected: {last_error}")]
    Reconnecting {
        /// End of the attempt.
        last_attempt: Timestamp,
        /// Milliseconds until the next attempt; `None` if only a call or a person triggers one.
        next_retry_ms: Option<u64>,
        /// Error of the attempt.
        last_error: String,
    },
    /// The exchange with the remote server failed, after all permitted retries.
    #[error("{failure}")]
    Remote {
        /// Effect of the call.
        fate: CallFate,
        /// Last failure.
        failure: ExchangeFailure,
    },
    /// A limit of concurrent calls or callers is reached.
    #[error("too many {what}: at most {limit} at once; try again when one has been answered")]
    Busy {
        /// Name of the limited quantity.
        what: &'static str,
        /// Maximum number at once.
        limit: usize,
    },
    /// The server answered with a JSON-RPC error.
    #[error("server error {code}: {message}")]
    #[strum(serialize = "server_error")]
    Server {
        /// JSON-RPC error code.
        code: i64,
        /// Message of the server, with the secrets of this instance masked.
        message: String,
        /// Data of the server as JSON text, with the secrets of this instance masked.
        data: Option<String>,
    },
    /// The arguments are invalid for the method.
    #[error("{0}")]
    BadInput(String),
}

/// Returns the message of a refused call: the instance, its status and the cause.
pub fn refusal_message(name: &str, status: Status, why: &str) -> String {
    format!("`{name}` is {status}: {why}")
}

fn timed_out(after: Duration, fate: CallFate) -> String {
    let seconds = seconds(after);
    match fate {
        CallFate::NotSent => format!("server not ready within {seconds} s; the request was not sent"),
        CallFate::MaybeExecuted | CallFate::TimedOut => format!("no answer within {seconds} s"),
    }
}

// Rounded to milliseconds, so that the message shows the configured value.
fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

impl CallError {
    /// Returns the effect of the call; `None` if the server answered it.
    pub fn fate(&self) -> Option<CallFate> {
        match self {
            Self::Terminated { fate, .. } | Self::Remote { fate, .. } | Self::TimedOut { fate, .. } => Some(*fate),
            Self::NotFound { .. }
            | Self::Refused { .. }
            | Self::Reconnecting { .. }
            | Self::Busy { .. }
            | Self::BadInput(_) => Some(CallFate::NotSent),
            Self::Server { .. } => None,
        }
    }

    /// Returns a stable identifier for scripts.
    pub fn kind(&self) -> &'static str {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exited(code: Option<i32>, signal: Option<i32>) -> WorkerExit {
        WorkerExit { code, signal, ..WorkerExit::from_cause(ExitCause::Exited) }
    }

    #[test]
    fn every_unrequested_end_except_exit_code_0_is_a_crash() {
        assert!(!exited(Some(0), None).is_crash());
        assert!(exited(Some(1), None).is_crash());
        assert!(exited(None, Some(15)).is_crash());
        assert!(exited(None, None).is_crash(), "an end without exit code and signal is a crash");
        assert!(!WorkerExit::from_cause(ExitCause::Requested).is_crash());
        let why = String::new;
        assert!(!WorkerExit::from_cause(ExitCause::Machine(why())).is_crash());
        assert!(!WorkerExit::from_cause(ExitCause::NotAdopted(why())).is_crash());
        for cause in [
            ExitCause::Spawn(why()),
            ExitCause::Handshake(why()),
            ExitCause::Wire(why()),
            ExitCause::Unresponsive,
            ExitCause::Panicked(why()),
        ] {
            // The exit code does not matter for these causes.
            assert!(WorkerExit { code: Some(0), ..WorkerExit::from_cause(cause.clone()) }.is_crash(), "{cause:?}");
        }
    }

    #[test]
    fn the_reason_of_an_exit_is_a_short_text() {
        assert_eq!(exited(Some(1), None).reason(), "exited with code 1");
        assert_eq!(exited(None, Some(9)).reason(), "killed by SIGKILL");
        assert_eq!(exited(None, Some(34)).reason(), "killed by signal 34");
        assert_eq!(exited(None, None).reason(), "ended");
        let because = |cause| WorkerExit::from_cause(cause).reason();
        assert_eq!(because(ExitCause::Spawn("cannot start `npx`: not found".into())), "cannot start `npx`: not found");
        assert_eq!(because(ExitCause::Handshake("no answer".into())), "handshake failed: no answer");
        assert_eq!(because(ExitCause::Wire("stdout closed".into())), "connection broken: stdout closed");
        assert_eq!(because(ExitCause::Unresponsive), "unresponsive");
        let last_line = Some("ModuleNotFoundError: No module named 'x'".to_owned());
        let exit = WorkerExit { last_line, ..exited(Some(1), None) };
        assert_eq!(exit.reason(), "exited with code 1: ModuleNotFoundError: No module named 'x'");
        assert_eq!(exit.cause_text(), "exited with code 1");
    }

    #[test]
    fn a_timeout_is_displayed_in_rounded_seconds() {
        let displayed = |micros| {
            let (after, fate) = (Duration::from_micros(micros), CallFate::TimedOut);
            CallError::TimedOut { after, fate }.to_string()
        };
        assert_eq!(displayed(29_999_997), "no answer within 30 s");
        assert_eq!(displayed(300_000), "no answer within 0.3 s");
    }

    #[test]
    fn every_call_error_except_a_server_response_has_a_fate() {
        let refused = CallError::Refused { status: Status::PermanentlyFailed, message: String::new(), remedy: None };
        let terminated = CallError::Terminated { fate: CallFate::MaybeExecuted, reason: String::new() };
        let answered = CallError::Server { code: -32000, message: String::new(), data: None };
        assert_eq!(refused.fate(), Some(CallFate::NotSent));
        assert_eq!(terminated.fate(), Some(CallFate::MaybeExecuted));
        assert_eq!(answered.fate(), None);
    }
}
