//! Limits and timings of the supervision, with their defaults. A policy is part of the specification of an instance.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use super::backoff::Backoff;
use mcp_satellite_protocol::era::Era;
use serde::Serialize;

/// Maximum duration in a policy, one year: the clock must be able to represent every deadline.
pub const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Maximum of [`BatchPolicy::queue_max`]: memory for the whole queue is allocated at the start.
pub const QUEUE_MAX: usize = 1_000_000;
/// Maximum limit of a line, in bytes.
pub const LINE_MAX: usize = 1 << 30;

/// An invalid value in a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` {problem}; {remedy}")]
pub struct PolicyError {
    /// Field with its section: `session.terminate_grace`.
    pub field: &'static str,
    /// Problem with the value.
    pub problem: &'static str,
    /// Values that are allowed.
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

// Zero intervals would make a loop run without a pause.
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

/// Limits and delays of restarts after a server ended by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RestartPolicy {
    /// Sliding window in which unwanted exits are counted.
    pub window: Duration,
    /// Number of unwanted exits in the window at which the instance fails permanently: 3 means two restarts, then
    /// `permanently_failed`.
    pub max_crashes: usize,
    /// Delays before a restart, by consecutive quick exit; the last one repeats.
    pub delays: Vec<Duration>,
    /// Longest run, counted from `initialized`, that counts as a quick exit. After a longer run the server is restarted
    /// at once.
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

/// Number of unwanted exits that a team may have before its processes start one at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TeamBudgetPolicy {
    /// Sliding window in which the unwanted exits of the team are counted.
    pub window: Duration,
    /// Maximum number of exits in the window; more throttle the team.
    pub max_exits: usize,
}

impl TeamBudgetPolicy {
    /// Validates every number.
    ///
    /// # Errors
    /// Names the first field with an invalid value.
    pub fn check(&self) -> Result<(), PolicyError> {
        check_durations(&[("team.window", self.window)])
    }
}

impl Default for TeamBudgetPolicy {
    fn default() -> Self {
        Self { window: Duration::from_secs(60), max_exits: 60 }
    }
}

/// Limits at which the memory of the machine counts as short, so that starts are delayed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPolicy {
    /// Memory is short while tasks waited for it in more than this share of the last ten seconds, in percent (PSI,
    /// `some avg10`). 100 disables this limit.
    pub pressure_max_percent: u8,
    /// Memory is short while less than this share of it is available, in percent. 0 disables this limit.
    pub available_min_percent: u8,
    /// Interval between two starts of processes while memory is short. Processes with waiting callers start first.
    pub start_interval: Duration,
}

impl MemoryPolicy {
    /// Validates every number.
    ///
    /// # Errors
    /// Names the first field with an invalid value.
    pub fn check(&self) -> Result<(), PolicyError> {
        check_durations(&[("memory.start_interval", self.start_interval)])
    }
}

impl Default for MemoryPolicy {
    fn default() -> Self {
        Self { pressure_max_percent: 40, available_min_percent: 5, start_interval: Duration::from_secs(10) }
    }
}

/// Backoff of attempts to connect to a remote server or to read the lists of a connected one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReconnectPolicy {
    /// Delay before the first attempt. Each further delay is twice the one before.
    pub backoff_min: Duration,
    /// Maximum delay.
    pub backoff_max: Duration,
    /// Maximum random change of a delay, in percent, so that thousands of servers do not reconnect at the same time.
    pub jitter_percent: u8,
    /// Number of attempts after which only a call or a person triggers another one; `None` for no limit.
    pub attempts_max: Option<u32>,
}

impl ReconnectPolicy {
    /// Returns a policy that retries without limit, with delays of up to three minutes.
    pub fn persistent() -> Self {
        let (backoff_min, backoff_max) = (Duration::from_secs(1), Duration::from_secs(180));
        Self { backoff_min, backoff_max, jitter_percent: 10, attempts_max: None }
    }

    /// Returns a policy that retries five times, with delays of up to 30 seconds.
    pub fn bounded() -> Self {
        Self { backoff_max: Duration::from_secs(30), attempts_max: Some(5), ..Self::persistent() }
    }

    /// Returns the delays without their random change.
    pub fn backoff(&self) -> Backoff {
        Backoff::doubling(self.backoff_min, self.backoff_max)
    }
}

impl Default for ReconnectPolicy {
    fn default() -> Self {
        Self::persistent()
    }
}

/// Health checks of a connected remote server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HealthPolicy {
    /// Request used for a check.
    pub check: HealthCheck,
    /// Time between two checks, varied by ten percent. The first check follows one interval after connecting.
    pub interval: Duration,
    /// Maximum duration of a check.
    pub timeout: Duration,
    /// Number of consecutive failures after which the server is degraded.
    pub threshold: u32,
    /// Action when the server becomes degraded.
    pub on_degraded: DegradedAction,
}

/// Request used for a health check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthCheck {
    /// Request `ping`, or `tools/list` if the server does not support `ping`.
    #[default]
    Ping,
    /// Request `tools/list`.
    ToolsList,
    /// GET of the configured `health_url` with the credentials of the instance; 2xx is healthy.
    Get,
}

/// Action when a server becomes degraded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DegradedAction {
    /// Only emit an event.
    #[default]
    Warn,
    /// Close the connection and establish a new one.
    Reconnect,
}

impl HealthPolicy {
    /// Returns the checks that fit [`ReconnectPolicy::persistent`]: a degraded server only causes an event.
    pub fn persistent() -> Self {
        Self {
            check: HealthCheck::Ping,
            interval: Duration::from_secs(120),
            timeout: Duration::from_secs(60),
            threshold: 3,
            on_degraded: DegradedAction::Warn,
        }
    }

    /// Returns the checks that fit [`ReconnectPolicy::bounded`]: frequent, and a degraded server is reconnected.
    pub fn bounded() -> Self {
        Self {
            interval: Duration::from_secs(30),
            timeout: Duration::from_secs(5),
            on_degraded: DegradedAction::Reconnect,
            ..Self::persistent()
        }
    }
}

impl Default for HealthPolicy {
    fn default() -> Self {
        Self::persistent()
    }
}

/// Retries of a call to a remote server. Only calls that are safe to repeat and may succeed later are retried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RetryPolicy {
    /// Maximum number of attempts, the first one included.
    pub attempts_max: u32,
    /// Delays between two attempts; the last one repeats.
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
    /// Maximum time to establish a connection, TLS included.
    pub connect_timeout: Duration,
    /// Maximum time from a handshake, a notification or the opening of a stream to the first bytes of the answer.
    /// Calls, lists and checks have their own deadlines.
    pub header_timeout: Duration,
    /// Maximum time for the server to confirm the end of a session.
    pub close_timeout: Duration,
    /// Number of consecutive answers 5xx, without a success between, after which the server counts as unreachable.
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

/// Detection of a process that is alive but does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WatchdogPolicy {
    /// Time without a byte after which a server is suspect, if a call timed out in that time.
    pub silence: Duration,
    /// Maximum time for a suspect server to answer a ping. After that it is unresponsive.
    pub ping_timeout: Duration,
}

impl Default for WatchdogPolicy {
    fn default() -> Self {
        Self { silence: Duration::from_secs(60), ping_timeout: Duration::from_secs(10) }
    }
}

/// Conditions under which an idle server is put to sleep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IdlePolicy {
    /// Time without a call or a message of the server; [`Self::OFF`] keeps the server running.
    pub idle: Duration,
    /// Minimum time since the server became ready.
    pub grace: Duration,
    /// Interval between two checks.
    pub sweep: Duration,
}

impl IdlePolicy {
    /// Value of `idle` with which a server never sleeps.
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
    /// Maximum time from the start of the process to `notifications/initialized`.
    pub handshake_timeout: Duration,
    /// Deadline of a call if the caller sets none.
    pub request_timeout: Duration,
    /// Maximum deadline, from the start of the call, to which progress notifications can extend it.
    pub request_timeout_max: Duration,
    /// Time between SIGTERM and SIGKILL.
    pub terminate_grace: Duration,
    /// Maximum length of a line from the server, in bytes. A longer line ends the worker.
    pub line_max: usize,
    /// Maximum number of calls in flight for one instance; further calls are refused.
    pub calls_in_flight_max: usize,
    /// Maximum number of callers that wait for one instance to start; further callers are refused.
    pub callers_waiting_max: usize,
    /// Time within which several `list_changed` notifications count as one.
    pub list_changed_debounce: Duration,
    /// Maximum number of pages of one list; further pages are not read.
    pub list_pages_max: usize,
    /// Maximum number of entries of one list. A longer list is not used.
    pub list_entries_max: usize,
    /// Maximum size of one list over all its pages, in bytes. A larger list is not used.
    pub list_bytes_max: usize,
    /// Maximum time to read one list over all its pages. A list that takes longer is not used.
    pub list_timeout: Duration,
    /// Maximum time to read the output after the exit of the process: a grandchild may keep the pipe open for ever.
    pub exit_drain: Duration,
    /// Maximum time for calls of the old run to finish after a rolling update.
    pub drain_timeout: Duration,
    /// Maximum time for which a start permit is held. It is released at the first byte on stdout.
    pub permit_hold_max: Duration,
    /// Protocol era of the server; detected if `None`.
    pub protocol: Option<Era>,
    /// Tools of the server that exist for clients.
    pub tools: ToolFilter,
}

/// Selection of the tools of a server. Clients neither see nor call others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ToolFilter {
    /// The selected tools; `None` selects all.
    pub allowed: Option<BTreeSet<String>>,
    /// Tools that are not selected, even if they are `allowed`.
    pub denied: BTreeSet<String>,
}

impl ToolFilter {
    /// Returns true if the tool is selected.
    pub fn permits(&self, tool: &str) -> bool {
        !self.denied.contains(tool) && self.allowed.as_ref().is_none_or(|allowed| allowed.contains(tool))
    }

    /// Returns true if every tool is selected.
    pub fn permits_all(&self) -> bool {
        self.allowed.is_none() && self.denied.is_empty()
    }
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
            tools: ToolFilter::default(),
        }
    }
}

/// Limits of the stderr lines that are kept, and their batching into `mcp.server.logs` events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LogPolicy {
    /// Maximum number of lines kept per second. Further lines are read and dropped, with one summary per minute.
    pub lines_per_second_max: u32,
    /// Maximum number of bytes kept of a line.
    pub line_max: usize,
    /// Delay of a batch after its first line.
    pub batch_delay: Duration,
    /// Number of lines at which a batch is sent at once.
    pub batch_lines_max: usize,
}

impl Default for LogPolicy {
    fn default() -> Self {
        Self { lines_per_second_max: 20, line_max: 1024, batch_delay: Duration::from_secs(3), batch_lines_max: 20 }
    }
}

/// Batching of events for their sink, and of logged calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BatchPolicy {
    /// Interval between two cycles; a cycle sends all queued events.
    pub interval: Duration,
    /// Maximum time that an event waits for others before a local sink, such as the journal, stores them.
    pub store_delay: Duration,
    /// Maximum number of events in one batch.
    pub batch_max: usize,
    /// Maximum number of queued events. Beyond it the oldest are dropped and counted.
    pub queue_max: usize,
    /// Maximum backoff after HTTP 429.
    pub backoff_max: Duration,
    /// Maximum time of the last flush during a shutdown.
    pub flush_timeout: Duration,
    /// Delay of a batch of logged calls of an instance, after the first call.
    pub request_delay: Duration,
    /// Number of logged calls at which a batch is sent at once.
    pub request_lines_max: usize,
    /// Maximum number of bytes logged of the arguments and of the result of a call.
    pub request_payload_max: usize,
}

impl BatchPolicy {
    /// Validates every number.
    ///
    /// # Errors
    /// Names the first field with an invalid value.
    pub fn check(&self) -> Result<(), PolicyError> {
        check_durations(&[
            ("events.interval", self.interval),
            ("events.store_delay", self.store_delay),
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
            store_delay: Duration::from_millis(100),
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

/// Resources that a sandboxed server may see and use. Without a sandbox only `allow_env` has an effect: then the server
/// has the permissions of the satellite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IsolationPolicy {
    /// True if the server shares the network of the machine. Otherwise it has no network, not even the loopback of
    /// another server.
    pub network: bool,
    /// Paths that are visible in addition to the read-only system directories.
    pub binds: Vec<SandboxBind>,
    /// Variables that make a program load or run other code and that a server gets from its configuration in the
    /// production profile, with or without a sandbox.
    pub allow_env: Vec<String>,
    /// Maximum address space of each process, in bytes. With a cgroup, maximum physical memory of all processes
    /// together.
    pub memory_max: Option<u64>,
    /// Maximum processor time of each process over its whole life.
    pub cpu_time_max: Option<Duration>,
    /// Maximum number of processes and threads.
    pub processes_max: Option<u64>,
    /// Maximum number of open file descriptors of each process.
    pub open_files_max: Option<u64>,
    /// Maximum size of one file, in bytes.
    pub file_size_max: Option<u64>,
    /// Size of the private `/tmp`, in bytes.
    pub tmp_size: u64,
}

/// A file or directory that is visible in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SandboxBind {
    /// Path outside the sandbox.
    pub source: PathBuf,
    /// Path inside the sandbox.
    pub target: PathBuf,
    /// True if the server may write to it.
    pub writable: bool,
}

const MIB: u64 = 1 << 20;

impl IsolationPolicy {
    /// Returns limits that are sufficient for servers in Node and Python.
    pub fn standard() -> Self {
        Self {
            network: true,
            binds: Vec::new(),
            allow_env: Vec::new(),
            memory_max: Some(2048 * MIB),
            // A limit for the whole life of a process would kill healthy servers.
            cpu_time_max: None,
            processes_max: Some(1000),
            open_files_max: Some(1024),
            file_size_max: Some(50 * MIB),
            tmp_size: 100 * MIB,
        }
    }

    /// Returns limits for a small native server. Node and Python do not run under them.
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

/// Limits and timings of one instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Policy {
    /// Restarts after an unwanted exit.
    pub restart: RestartPolicy,
    /// Attempts to reach a remote server, and retries of a failed discovery.
    pub reconnect: ReconnectPolicy,
    /// Health checks of a remote server.
    pub health: HealthPolicy,
    /// Retries of calls to a remote server.
    pub retry: RetryPolicy,
    /// Limits of the connections to a remote server.
    pub remote: RemotePolicy,
    /// Detection of unresponsive processes.
    pub watchdog: WatchdogPolicy,
    /// Sleep of idle servers.
    pub idle: IdlePolicy,
    /// Limits of handshake, calls and stop.
    pub session: SessionPolicy,
    /// Limits of the stderr log.
    pub logs: LogPolicy,
    /// Limits of the sandbox, if the instance runs in one.
    pub isolation: IsolationPolicy,
}

impl Policy {
    /// Validates every number that would break the runtime: durations beyond the range of the clock, sizes beyond the
    /// memory, and intervals of zero, which would cause a busy loop. `idle` and `isolation` contain no such number.
    ///
    /// # Errors
    /// Names the first field with an invalid value.
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
    fn reconnect_delays_double_up_to_the_maximum() {
        let backoff = ReconnectPolicy::default().backoff();
        let delays: Vec<u64> = (1..=10).map(|attempt| backoff.delay(attempt).as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 128, 180, 180]);
        assert_eq!(backoff.delay(u32::MAX), Duration::from_secs(180));
    }

    #[test]
    fn default_policies_are_valid_and_overflowing_values_are_not() {
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
        assert_eq!(never.check(), Ok(()), "`Duration::MAX` means never");
    }
}
