//! Every number of the supervision, with its default. A policy is data: it travels in an instance's spec.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::era::Era;

/// The longest duration of a policy, a year: a deadline must be a time that a clock can show.
pub const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The largest [`BatchPolicy::queue_max`]: the queue's room is allocated at the start.
pub const QUEUE_MAX: usize = 1_000_000;
/// The largest limit of a line, in bytes.
pub const LINE_MAX: usize = 1 << 30;

/// A number of a policy that the runtime cannot work with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` {problem}; {remedy}")]
pub struct PolicyError {
    /// The field, with its section: `session.terminate_grace`.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: &'static str,
    /// The values that are allowed.
    pub remedy: &'static str,
}

fn check_durations(durations: &[(&'static str, Duration)]) -> Result<(), PolicyError> {
    match durations.iter().find(|(_, duration)| *duration > DURATION_MAX) {
        Some((field, _)) => {
            Err(PolicyError { field, problem: "is longer than a year", remedy: "give at most 365 days" })
        }
        None => Ok(()),
    }
}

/// Rejects zero for intervals, which would make a loop run without a pause.
fn check_positive(durations: &[(&'static str, Duration)]) -> Result<(), PolicyError> {
    match durations.iter().find(|(_, duration)| duration.is_zero()) {
        Some((field, _)) => Err(PolicyError { field, problem: "is zero", remedy: "give a time, such as 1 second" }),
        None => Ok(()),
    }
}

fn check_lines(lines: &[(&'static str, usize)]) -> Result<(), PolicyError> {
    match lines.iter().find(|(_, bytes)| *bytes > LINE_MAX) {
        Some((field, _)) => Err(PolicyError { field, problem: "is larger than 1 GiB", remedy: "give at most 1 GiB" }),
        None => Ok(()),
    }
}

/// When and how often a server that ended by itself is started again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RestartPolicy {
    /// The sliding window in which unwanted exits are counted.
    pub window: Duration,
    /// The unwanted exit that is one too many: 3 means two restarts, then `permanently_failed`.
    pub max_crashes: usize,
    /// The delay before a restart, by consecutive quick exit; the last one repeats.
    pub delays: Vec<Duration>,
    /// A run longer than this, counted from `initialized`, is restarted at once.
    pub quick: Duration,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(5 * 60),
            max_crashes: 3,
            delays: [1, 5, 15].map(Duration::from_secs).to_vec(),
            quick: Duration::from_secs(60),
        }
    }
}

/// How many unwanted exits a team may have before its spawns go one at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TeamBudgetPolicy {
    /// The sliding window in which the team's unwanted exits are counted.
    pub window: Duration,
    /// More than this many in the window throttles the team.
    pub max_exits: usize,
}

impl TeamBudgetPolicy {
    /// Validates every number.
    pub fn check(&self) -> Result<(), PolicyError> {
        check_durations(&[("team.window", self.window)])
    }
}

impl Default for TeamBudgetPolicy {
    fn default() -> Self {
        Self { window: Duration::from_secs(60), max_exits: 60 }
    }
}

/// When the memory of the machine is short, and starts are delayed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// Memory is short while some task waited for it in more than this share of the last ten seconds, in percent (PSI,
    /// `some avg10`). With 100 it is never short by this.
    pub pressure_max_percent: u8,
    /// Memory is short while less than this share of it is available, in percent. With 0 it is never short by this.
    pub available_min_percent: u8,
    /// While memory is short, one process is started in each such interval: first those that a caller waits for.
    pub start_interval: Duration,
}

impl MemoryPolicy {
    /// Validates every number.
    pub fn check(&self) -> Result<(), PolicyError> {
        check_durations(&[("memory.start_interval", self.start_interval)])
    }
}

impl Default for MemoryPolicy {
    fn default() -> Self {
        Self { pressure_max_percent: 40, available_min_percent: 5, start_interval: Duration::from_secs(10) }
    }
}

/// How attempts to reach something that will come back are spaced: a remote server, the lists of a live link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReconnectPolicy {
    /// The delay before the first attempt; each further one is twice the one before.
    pub backoff_min: Duration,
    /// The longest delay.
    pub backoff_max: Duration,
    /// Each delay is up to this many percent longer or shorter, so that thousands do not come back as one.
    pub jitter_percent: u8,
    /// Attempts after which it is given up until somebody calls or decides; none: never.
    pub attempts_max: Option<u32>,
}

impl ReconnectPolicy {
    /// For ever, at last every three minutes.
    pub fn persistent() -> Self {
        let (backoff_min, backoff_max) = (Duration::from_secs(1), Duration::from_secs(180));
        Self { backoff_min, backoff_max, jitter_percent: 10, attempts_max: None }
    }

    /// Five times, at most half a minute apart.
    pub fn bounded() -> Self {
        Self { backoff_max: Duration::from_secs(30), attempts_max: Some(5), ..Self::persistent() }
    }
}

impl Default for ReconnectPolicy {
    fn default() -> Self {
        Self::persistent()
    }
}

/// How the health of a connected remote server is looked after.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HealthPolicy {
    /// What is asked.
    pub check: HealthCheck,
    /// Between two checks, ten percent more or less; the first comes one interval after connecting.
    pub interval: Duration,
    /// A check that takes longer has failed.
    pub timeout: Duration,
    /// Failures in a row that make it degraded.
    pub threshold: u32,
    /// What is done then.
    pub on_degraded: OnDegraded,
}

/// See [`HealthPolicy::check`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthCheck {
    /// `ping`, or `tools/list` where the server does not know `ping`.
    #[default]
    Ping,
    /// `tools/list`.
    ToolsList,
    /// A GET of the configured `health_url` with the instance's credentials; 2xx is healthy.
    Get,
}

/// See [`HealthPolicy::on_degraded`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDegraded {
    /// It is told, and nothing else.
    #[default]
    Warn,
    /// The connection is given up and made anew.
    Reconnect,
}

impl HealthPolicy {
    /// What goes with [`ReconnectPolicy::persistent`]: it is told.
    pub fn persistent() -> Self {
        Self {
            check: HealthCheck::Ping,
            interval: Duration::from_secs(120),
            timeout: Duration::from_secs(60),
            threshold: 3,
            on_degraded: OnDegraded::Warn,
        }
    }

    /// What goes with [`ReconnectPolicy::bounded`]: looked after closely, and reconnected.
    pub fn bounded() -> Self {
        Self {
            interval: Duration::from_secs(30),
            timeout: Duration::from_secs(5),
            on_degraded: OnDegraded::Reconnect,
            ..Self::persistent()
        }
    }
}

impl Default for HealthPolicy {
    fn default() -> Self {
        Self::persistent()
    }
}

/// How a call to a remote server is repeated, where that is safe and may heal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RetryPolicy {
    /// Attempts, the first one included.
    pub attempts_max: u32,
    /// Between two attempts; the last one repeats.
    pub delays: Vec<Duration>,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { attempts_max: 3, delays: [500, 1000, 2000].map(Duration::from_millis).to_vec() }
    }
}

/// Limits of the connections to a remote server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RemotePolicy {
    /// From the first packet to a connection, TLS included.
    pub connect_timeout: Duration,
    /// From a handshake, a notification or a stream's opening to the first bytes of its answer. Calls, lists and checks have
    /// deadlines of their own.
    pub header_timeout: Duration,
    /// How long the server may take to confirm the end of a session.
    pub close_timeout: Duration,
    /// A single 5xx changes nothing; this many in a row, without a success between, are a server that is not there.
    pub server_errors_max: u32,
}

impl Default for RemotePolicy {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(10),
            header_timeout: Duration::from_secs(30),
            close_timeout: Duration::from_secs(2),
            server_errors_max: 3,
        }
    }
}

/// When a worker that is alive and answers nothing is as dead as one that exited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WatchdogPolicy {
    /// No byte received for this long, and a call timed out since, makes it suspect.
    pub silence: Duration,
    /// A suspect is pinged, and is unresponsive if it does not answer within this.
    pub ping_timeout: Duration,
}

impl Default for WatchdogPolicy {
    fn default() -> Self {
        Self { silence: Duration::from_secs(60), ping_timeout: Duration::from_secs(10) }
    }
}

/// When a server that nobody needs is put to sleep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IdlePolicy {
    /// No call and no message of the server for this long; [`Self::OFF`] keeps the server running.
    pub idle: Duration,
    /// Never before it has been ready for this long.
    pub grace: Duration,
    /// How often is looked.
    pub sweep: Duration,
}

impl IdlePolicy {
    /// The value of `idle` with which a server is never put to sleep.
    pub const OFF: Duration = Duration::MAX;
}

impl Default for IdlePolicy {
    fn default() -> Self {
        Self { idle: Duration::from_secs(180), grace: Duration::from_secs(60), sweep: Duration::from_secs(30) }
    }
}

/// Limits of one session with one server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SessionPolicy {
    /// From the process's start to `notifications/initialized`, all in.
    pub handshake_timeout: Duration,
    /// A call's deadline where the caller gives none.
    pub request_timeout: Duration,
    /// Progress extends a call's deadline, but never beyond this from its start.
    pub request_timeout_max: Duration,
    /// Between SIGTERM and SIGKILL.
    pub terminate_grace: Duration,
    /// A longer line from the server ends the worker, in bytes.
    pub line_max: usize,
    /// Calls in flight for one instance; one more is refused.
    pub calls_in_flight_max: usize,
    /// Callers that wait for one instance to come up; one more is refused.
    pub callers_waiting_max: usize,
    /// `list_changed` notifications within this time are one.
    pub list_changed_debounce: Duration,
    /// Pages of one list that are followed.
    pub list_pages_max: usize,
    /// Entries of one list. A list with more is not used.
    pub list_entries_max: usize,
    /// Bytes of one list, over all its pages. A list with more is not used.
    pub list_bytes_max: usize,
    /// Time to read one list, over all its pages. A list that takes longer is not used.
    pub list_timeout: Duration,
    /// After the leader's exit its output is read for this long at most: a grandchild may hold the pipe for ever.
    pub exit_drain: Duration,
    /// After a rolling update the calls of the old run may go on for this long at most; then the run is ended.
    pub drain_timeout: Duration,
    /// A start permit is held from fork to the first byte on stdout, and at most this long.
    pub permit_hold_max: Duration,
    /// The era in which the server is spoken to; what it speaks is found out if none is given.
    pub protocol: Option<Era>,
}

impl Default for SessionPolicy {
    fn default() -> Self {
        Self {
            handshake_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(30),
            request_timeout_max: Duration::from_secs(5 * 60),
            terminate_grace: Duration::from_secs(10),
            line_max: 16 * 1024 * 1024,
            calls_in_flight_max: 1024,
            callers_waiting_max: 1024,
            list_changed_debounce: Duration::from_millis(250),
            list_pages_max: 1000,
            list_entries_max: 10_000,
            list_bytes_max: 32 << 20,
            list_timeout: Duration::from_secs(60),
            exit_drain: Duration::from_millis(250),
            drain_timeout: Duration::from_secs(5 * 60),
            permit_hold_max: Duration::from_secs(2),
            protocol: None,
        }
    }
}

/// What of a server's stderr is kept, and how it is batched into `mcp.server.logs` events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LogPolicy {
    /// Lines kept in a second; what is over is dropped, with one summary a minute. Draining never stops.
    pub lines_per_second_max: u32,
    /// Bytes kept of a line.
    pub line_max: usize,
    /// A batch is sent this long after its first line.
    pub batch_delay: Duration,
    /// A batch of this many lines is sent at once.
    pub batch_lines_max: usize,
}

impl Default for LogPolicy {
    fn default() -> Self {
        Self { lines_per_second_max: 20, line_max: 1024, batch_delay: Duration::from_secs(3), batch_lines_max: 20 }
    }
}

/// How events are batched towards their sink.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BatchPolicy {
    /// A cycle: what is queued is sent once in this time.
    pub interval: Duration,
    /// Events in one batch at most.
    pub batch_max: usize,
    /// Events queued at most; over it the oldest are dropped and counted.
    pub queue_max: usize,
    /// The longest wait after a 429.
    pub backoff_max: Duration,
    /// How long a shutdown waits for the last flush.
    pub flush_timeout: Duration,
    /// Calls of an instance are logged together, this long after the first.
    pub request_delay: Duration,
    /// And no later than when there are so many.
    pub request_lines_max: usize,
    /// Of what a call carried, in each direction, so many bytes are logged.
    pub request_payload_max: usize,
}

impl BatchPolicy {
    /// Validates every number.
    pub fn check(&self) -> Result<(), PolicyError> {
        check_durations(&[
            ("events.interval", self.interval),
            ("events.backoff_max", self.backoff_max),
            ("events.flush_timeout", self.flush_timeout),
            ("events.request_delay", self.request_delay),
        ])?;
        check_positive(&[("events.interval", self.interval)])?;
        if self.queue_max > QUEUE_MAX {
            let (field, problem) = ("events.queue_max", "is larger than a million");
            return Err(PolicyError { field, problem, remedy: "give at most 1000000" });
        }
        if self.batch_max == 0 {
            return Err(PolicyError { field: "events.batch_max", problem: "is zero", remedy: "give at least 1" });
        }
        Ok(())
    }
}

impl Default for BatchPolicy {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(3),
            batch_max: 100,
            queue_max: 10_000,
            backoff_max: Duration::from_secs(48),
            flush_timeout: Duration::from_secs(5),
            request_delay: Duration::from_secs(3),
            request_lines_max: 20,
            request_payload_max: 4 << 10,
        }
    }
}

/// What a sandboxed server may see and use. Without a sandbox it says nothing: then the server may what the satellite may.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IsolationPolicy {
    /// Whether the network of the machine is shared; there is none otherwise, not even another server's loopback.
    pub network: bool,
    /// What is visible beside the system's own read-only directories.
    pub binds: Vec<Bind>,
    /// Address space of each process, in bytes; physical memory of all of them where a cgroup counts it.
    pub memory_max: Option<u64>,
    /// Processor time of each process over its whole life.
    pub cpu_time_max: Option<Duration>,
    /// Processes and threads.
    pub processes_max: Option<u64>,
    /// Descriptors of each process.
    pub open_files_max: Option<u64>,
    /// The size of one file, in bytes.
    pub file_size_max: Option<u64>,
    /// The size of the private `/tmp`, in bytes.
    pub tmp_size: u64,
}

/// A file or directory that is visible in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bind {
    /// Where it is.
    pub source: PathBuf,
    /// Where it is seen.
    pub target: PathBuf,
    /// Whether it can be written.
    pub writable: bool,
}

const MIB: u64 = 1 << 20;

impl IsolationPolicy {
    /// Enough for servers in Node and Python.
    pub fn standard() -> Self {
        Self {
            network: true,
            binds: Vec::new(),
            memory_max: Some(2048 * MIB),
            // For a process's whole life it would kill healthy servers.
            cpu_time_max: None,
            processes_max: Some(1000),
            open_files_max: Some(1024),
            file_size_max: Some(50 * MIB),
            tmp_size: 100 * MIB,
        }
    }

    /// For a small native server: Node and Python cannot run in it.
    pub fn strict() -> Self {
        Self {
            memory_max: Some(50 * MIB),
            cpu_time_max: Some(Duration::from_secs(60)),
            processes_max: Some(1),
            ..Self::standard()
        }
    }
}

impl Default for IsolationPolicy {
    fn default() -> Self {
        Self::standard()
    }
}

/// Everything that one instance is held to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Policy {
    /// Restarts after an unwanted exit.
    pub restart: RestartPolicy,
    /// Attempts to reach a remote server, and retries of a failed discovery.
    pub reconnect: ReconnectPolicy,
    /// Health checks of a remote server.
    pub health: HealthPolicy,
    /// Repeated calls of a remote server.
    pub retry: RetryPolicy,
    /// Connections to a remote server.
    pub remote: RemotePolicy,
    /// Liveness.
    pub watchdog: WatchdogPolicy,
    /// Sleep.
    pub idle: IdlePolicy,
    /// Handshake, calls, stopping.
    pub session: SessionPolicy,
    /// stderr.
    pub logs: LogPolicy,
    /// What it may see and use, where it runs in a sandbox.
    pub isolation: IsolationPolicy,
}

impl Policy {
    /// Validates every number with which the runtime could not work: durations beyond a clock, sizes beyond memory, and
    /// intervals of zero, which would be waited for without a pause. `idle` and `isolation` have no such number.
    pub fn check(&self) -> Result<(), PolicyError> {
        let Self { restart, reconnect, health, retry, remote, watchdog, idle: _, session, logs, isolation: _ } = self;
        check_durations(&[
            ("restart.window", restart.window),
            ("restart.delays", restart.delays.iter().max().copied().unwrap_or_default()),
            ("restart.quick", restart.quick),
            ("reconnect.backoff_min", reconnect.backoff_min),
            ("reconnect.backoff_max", reconnect.backoff_max),
            ("health.interval", health.interval),
            ("health.timeout", health.timeout),
            ("retry.delays", retry.delays.iter().max().copied().unwrap_or_default()),
            ("remote.connect_timeout", remote.connect_timeout),
            ("remote.header_timeout", remote.header_timeout),
            ("remote.close_timeout", remote.close_timeout),
            ("watchdog.silence", watchdog.silence),
            ("watchdog.ping_timeout", watchdog.ping_timeout),
            ("session.handshake_timeout", session.handshake_timeout),
            ("session.request_timeout", session.request_timeout),
            ("session.request_timeout_max", session.request_timeout_max),
            ("session.terminate_grace", session.terminate_grace),
            ("session.list_changed_debounce", session.list_changed_debounce),
            ("session.list_timeout", session.list_timeout),
            ("session.exit_drain", session.exit_drain),
            ("session.drain_timeout", session.drain_timeout),
            ("session.permit_hold_max", session.permit_hold_max),
            ("logs.batch_delay", logs.batch_delay),
        ])?;
        check_positive(&[
            ("reconnect.backoff_min", reconnect.backoff_min),
            ("health.interval", health.interval),
            ("session.list_timeout", session.list_timeout),
        ])?;
        check_lines(&[("session.line_max", session.line_max), ("logs.line_max", logs.line_max)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_what_no_clock_or_memory_can_hold_is_not() {
        assert_eq!(Policy::default().check(), Ok(()));
        assert_eq!((BatchPolicy::default().check(), TeamBudgetPolicy::default().check()), (Ok(()), Ok(())));
        let broken: [fn(&mut Policy); 8] = [
            |policy| policy.session.terminate_grace = Duration::MAX,
            |policy| policy.session.permit_hold_max = Duration::MAX,
            |policy| policy.session.drain_timeout = Duration::MAX,
            |policy| policy.watchdog.silence = Duration::MAX,
            |policy| policy.restart.delays.push(Duration::MAX),
            |policy| policy.logs.line_max = usize::MAX,
            |policy| policy.reconnect.backoff_min = Duration::ZERO,
            |policy| policy.health.interval = Duration::ZERO,
        ];
        for (nth, change) in broken.iter().enumerate() {
            let mut policy = Policy::default();
            change(&mut policy);
            assert!(policy.check().is_err(), "number {nth}");
        }
        assert!(BatchPolicy { queue_max: usize::MAX, ..BatchPolicy::default() }.check().is_err());
        assert!(TeamBudgetPolicy { window: Duration::MAX, ..TeamBudgetPolicy::default() }.check().is_err());
        let mut never = Policy::default();
        never.idle.idle = Duration::MAX;
        assert_eq!(never.check(), Ok(()), "it means never");
    }
}
