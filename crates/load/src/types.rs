//! Data types of the load harness. Times without another note are durations since the start of the run.

use std::collections::BTreeMap;
use std::time::Duration;

use mcp_satellite_actors::model::status::Status;
use serde::{Deserialize, Serialize};

use super::measure::Latency;

/// Number of an instance. The id of its installation is `i` followed by this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceNo(pub u32);

impl InstanceNo {
    pub fn from_installation_id(installation: &str) -> Option<Self> {
        installation.strip_prefix('i')?.parse().ok().map(Self)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TeamNo(pub u32);

/// Transport between an instance and its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadTransport {
    /// Process with pipes.
    Stdio,
    /// HTTP connection.
    Remote,
}

/// Environment in which the servers of a run exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerEnvironment {
    /// Simulated servers in this process, in real time.
    Simulated,
    /// Simulated servers in this process, on one thread, in paused time.
    Virtual,
    /// Child processes.
    Real,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, strum::VariantArray)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The process is killed by SIGKILL.
    Crash,
    /// The server exits with code 0 after its handshake.
    #[serde(rename = "exit_0")]
    Exit0,
    /// The server exits shortly after each start.
    CrashLoop,
    /// The server answers `initialize` late.
    SlowHandshake,
    /// The server never answers `initialize`.
    NoHandshake,
    /// The process is alive but answers no request.
    Hang,
    /// The server exits late after SIGTERM.
    SlowSigterm,
    /// The server ignores SIGTERM.
    IgnoreSigterm,
    /// The server writes to stderr without pause.
    StderrFlood,
    /// The server writes lines to stdout that are not messages.
    Garbage,
    /// The server writes a line longer than the limit.
    Huge,
    /// The server sends responses with ids that were answered before or never used.
    StrayAnswers,
    /// The server keeps memory of each call until it dies at its memory limit.
    MemoryGrowth,
    /// The server rejects the credentials (401).
    Unauthorized,
    SessionLost,
    /// The server refuses connections.
    Refused,
    /// The server's response streams break off.
    StreamCut,
    WorkerPanic,
    /// A team's supervisor panics.
    TeamPanic,
    RegistryPanic,
    BatcherPanic,
    /// The event sink rejects every batch.
    SinkFails,
    SinkPanics,
}

/// Set of possible victims of a kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VictimClass {
    /// Instance with a process.
    Stdio,
    /// Instance with a remote server.
    Remote,
    Any,
    Team,
    /// Satellite itself, without a victim among the instances.
    Satellite,
}

impl FaultKind {
    /// List of all kinds of faults.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    pub fn victim_class(self) -> VictimClass {
        match self {
            Self::Crash
            | Self::Exit0
            | Self::CrashLoop
            | Self::SlowHandshake
            | Self::NoHandshake
            | Self::Hang
            | Self::SlowSigterm
            | Self::IgnoreSigterm
            | Self::StderrFlood
            | Self::Garbage
            | Self::Huge
            | Self::StrayAnswers
            | Self::MemoryGrowth => VictimClass::Stdio,
            Self::Unauthorized | Self::SessionLost | Self::Refused | Self::StreamCut => VictimClass::Remote,
            Self::WorkerPanic => VictimClass::Any,
            Self::TeamPanic => VictimClass::Team,
            Self::RegistryPanic | Self::BatcherPanic | Self::SinkFails | Self::SinkPanics => VictimClass::Satellite,
        }
    }

    /// Returns true if the fault can be injected into servers of this mode.
    pub fn is_possible(self, mode: ServerEnvironment) -> bool {
        !(mode == ServerEnvironment::Real && matches!(self, Self::Unauthorized | Self::StreamCut))
    }

    /// Returns true if the victim must come back online without a person once the fault is healed. The time until then
    /// is the recovery time.
    pub fn needs_recovery(self) -> bool {
        !matches!(
            self,
            Self::Garbage
                | Self::StrayAnswers
                | Self::StderrFlood
                | Self::SinkFails
                | Self::SinkPanics
                | Self::BatcherPanic
                | Self::RegistryPanic
                | Self::CrashLoop
        )
    }

    /// Returns true if a victim may stay online during the whole fault.
    pub fn is_withstood(self) -> bool {
        !matches!(
            self,
            Self::Crash | Self::SlowHandshake | Self::NoHandshake | Self::Hang | Self::WorkerPanic | Self::Unauthorized
        )
    }
}

/// Number of victims of a kind of fault by outcome. The sum is the number of all victims.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct FaultOutcomes {
    /// Victims that were online again.
    pub recovered: u64,
    /// Victims that stayed online and answered a call afterwards.
    pub unharmed: u64,
    /// Victims that spent their restart budget, so that a person had to restart them.
    pub failed_permanently: u64,
    /// Victims that never came back.
    pub not_recovered: u64,
}

impl FaultOutcomes {
    /// Returns the number of all victims.
    pub fn total(&self) -> u64 {
        self.recovered + self.unharmed + self.failed_permanently + self.not_recovered
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultVictim {
    Instance(InstanceNo),
    Team(TeamNo),
    Satellite,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFault {
    /// Position in the plan.
    pub serial: u32,
    /// Time since the load began.
    pub at: Duration,
    pub kind: FaultKind,
    pub victim: FaultVictim,
    /// Time until the fault is healed.
    pub duration: Duration,
}

/// Target of an instance in its configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadTarget {
    /// Program and its arguments.
    Process(String, Vec<String>),
    /// URL of a remote server.
    Remote(String),
}

/// Planned call. The response must contain its token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedCall {
    /// Closed loop: think time of the caller before the call. Open loop: time since the previous arrival.
    pub pause: Duration,
    pub nth: InstanceNo,
    /// Time that the server takes for the call.
    pub after: Duration,
    /// Text that is unique among all calls of a run.
    pub token: Box<str>,
    /// The caller's timeout.
    pub timeout: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallOutcome {
    /// Text of a successful result.
    Text(String),
    /// Error returned by the server.
    ServerError(String),
    /// Error returned by the satellite or its endpoint.
    Failed {
        /// `not_sent`, `maybe_executed` or `timed_out`; `None` if unknown.
        fate: Option<String>,
        /// Error message.
        why: String,
    },
}

/// Test call to an instance that the snapshot showed as online.
#[derive(Debug, Clone)]
pub struct ProbeResult {
    pub nth: InstanceNo,
    /// Start of the call.
    pub at: Duration,
    pub answer: CallOutcome,
    /// Expected text of the response.
    pub token: Box<str>,
    /// True if the status, process or connection of the instance changed during the call.
    pub changed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BudgetReset {
    /// A person restarted, updated or started the instance.
    Instance(InstanceNo),
    /// The supervisor of the team panicked.
    Team(TeamNo),
}

/// Invariants that a run checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Invariant {
    /// Each caller gets the response to its own call, exactly once.
    OwnAnswer,
    /// Instances shown as online can be called.
    OnlineIsCallable,
    /// No instance is restarted beyond its budget.
    RestartBudget,
    /// Statuses change by legal transitions, in order.
    LegalTransitions,
    /// Events are numbered without gaps, except for those that a drop event names.
    NoGap,
    /// No servers, tasks, descriptors or processes are left after the end.
    NothingLeft,
    /// Memory returns to its previous level after the faults.
    MemoryBack,
    /// Each victim recovers within the delay of its policy, its handshake and the limit of the scenario.
    Recovery,
    /// Faults of one team do not slow down calls to other teams.
    Neighbours,
    /// Memory and descriptors do not grow over time.
    Flat,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InvariantViolation {
    pub invariant: Invariant,
    /// Start of the violation, in milliseconds.
    #[serde(skip)]
    pub since_ms: u64,
    /// Time of detection, in milliseconds.
    pub at_ms: u64,
    /// Id of the instance's installation; `None` if the violation concerns no single instance.
    pub instance: Option<String>,
    /// Description for people.
    pub what: String,
}

/// Number of checks of an invariant. An invariant without a check was not violated, but is not proven either.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InvariantCoverage {
    pub invariant: Invariant,
    /// Number of checks.
    pub checks: u64,
    /// Unit of `checks`, such as `calls`, `starts` or `events`.
    pub unit: &'static str,
    /// Reason why the checks prove nothing; `None` if they do.
    pub not_checked: Option<String>,
}

/// Resources left after the end of a run, minus those that existed before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LeftoverResources {
    pub servers: usize,
    /// Tasks of the async runtime.
    pub tasks: usize,
    /// Open file descriptors.
    pub descriptors: usize,
    /// Descendants of this process.
    pub processes: usize,
}

/// State at the end of a run, the input of the final checks.
#[derive(Debug, Clone)]
pub struct RunEndState {
    /// Time of the end.
    pub at: Duration,
    pub left: LeftoverResources,
    /// Memory in bytes when all instances were online, before the faults.
    pub memory_before: u64,
    /// Memory in bytes when all instances were online again.
    pub memory_after: u64,
    pub instances: usize,
    /// Events that no sink had accepted when the runtime ended.
    pub events_lost: usize,
    /// Number of the last event; numbers start at 1.
    pub events_emitted: u64,
}

/// Sample of all curves of the report.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RunSample {
    /// Time in milliseconds.
    pub at_ms: u64,
    /// Number of instances by status, in the order of [`Status::ALL`].
    pub by_status: [u32; Status::ALL.len()],
    /// Number of dormant instances, whatever their status.
    pub dormant: u32,
    /// Anonymous memory of this process, in bytes.
    pub rss: u64,
    /// Number of open file descriptors.
    pub descriptors: u32,
    /// Number of events that wait for the sink.
    pub backlog: u64,
    /// Number of events dropped so far.
    pub dropped: u64,
    /// Number of calls that have ended so far.
    pub calls: u64,
    /// Number of those calls that failed.
    pub failed: u64,
    pub in_flight: u32,
    /// Longest response time of Root and the registry since the previous sample, in microseconds.
    pub lag_us: u64,
    /// CPU time used by other programs since the previous sample, in percent of all cores. 0 in virtual time.
    pub foreign_cpu_percent: u8,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct CallFindings {
    /// Number of calls made.
    pub planned: u64,
    /// Number of calls that returned a result.
    pub answered: u64,
    /// Number of calls that returned an error.
    pub failed: u64,
    /// Number of calls not made because too many were in flight.
    pub shed: u64,
    /// Number of failed calls before the first fault. `quiet` does not contain them.
    pub quiet_failed: u64,
    /// Number of failed calls since the first fault. `storm` does not contain them.
    pub storm_failed: u64,
    /// Number of failed and shed calls of the kind that `neighbours` contains.
    pub neighbours_failed: u64,
    /// Calls answered per second of load.
    pub per_second: f64,
    /// Latency of successful calls before the first fault.
    pub quiet: Latency,
    /// Latency of successful calls since the first fault.
    pub storm: Latency,
    /// Latency of the calls in `storm` that were made shortly after a large fault to teams that it did not hit.
    pub neighbours: Latency,
    /// Number of failed calls by fate.
    pub by_fate: BTreeMap<String, u64>,
}

/// Results of the event delivery.
#[derive(Debug, Clone, Default, Serialize)]
pub struct EventFindings {
    /// Events that were numbered.
    pub emitted: u64,
    /// Events that the sink accepted.
    pub sent: u64,
    /// Events that the sink rejected for good.
    pub failed: u64,
    /// Events dropped at the queue's limit and reported by a drop event.
    pub dropped: u64,
    /// Events that were neither delivered nor reported as dropped.
    pub lost: u64,
}

/// Complete results of a run, the input of all reports.
#[derive(Debug, Clone, Serialize)]
pub struct RunFindings {
    /// Command that repeats the run.
    pub repeat: String,
    pub scenario: String,
    /// Description of the scenario.
    pub about: String,
    /// Seed of all random decisions.
    pub seed: u64,
    /// Name of the mode: `simulated`, `virtual` or `real`.
    pub mode: String,
    /// True if calls went through the MCP endpoint.
    pub gateway: bool,
    /// True if the run was stopped early.
    pub stopped: bool,
    /// Reason why the trace is incomplete.
    pub trace_ends_early: Option<String>,
    /// CPU, memory and kernel of the machine.
    pub machine: BTreeMap<String, String>,
    pub instances: usize,
    pub teams: usize,
    /// Duration of the run in its own time, in seconds.
    pub seconds: f64,
    /// Duration of the run in real time, in seconds.
    pub took_seconds: f64,
    /// CPU time of this process, in seconds.
    pub cpu_seconds: f64,
    /// Time from the first installation until all instances were online, in milliseconds.
    pub all_online_ms: f64,
    /// CPU time of the servers' processes until all were online, in milliseconds. `None` for simulated servers.
    pub children_cpu_ms: Option<f64>,
    /// Time from the installation of an instance until it was online.
    pub online: Latency,
    /// Memory per instance in bytes, including servers in this process.
    pub bytes_each: u64,
    /// Memory per instance in bytes after the faults.
    pub bytes_each_after: u64,
    pub calls: CallFindings,
    /// Time from a fault, or from its healing if that came first, until the victim was online again.
    pub recoveries: BTreeMap<FaultKind, Latency>,
    /// Outcomes of the victims. A fault of a team has one victim for each instance of the team.
    pub outcomes: BTreeMap<FaultKind, FaultOutcomes>,
    pub injected: BTreeMap<FaultKind, u64>,
    /// Number of faults that could not be injected here or found no healthy victim.
    pub impossible: BTreeMap<FaultKind, u64>,
    /// Kinds of faults of the scenario that were never injected, for whatever reason.
    pub never_injected: Vec<FaultKind>,
    pub checked: Vec<InvariantCoverage>,
    /// Response time of the team supervisors, from the planned time of the request until the registry shows the effect.
    pub supervisors: Latency,
    /// Response time of the registry, from the planned time of the request until it shows all that Root knew.
    pub registry: Latency,
    /// Results of the event delivery.
    pub events: EventFindings,
    /// Number of times that an instance failed permanently.
    pub permanently_failed: u64,
    /// Number of instances restarted by the harness after they had failed permanently.
    pub manual_restarts: u64,
    pub left: LeftoverResources,
    /// Samples over time.
    pub samples: Vec<RunSample>,
    /// Times in milliseconds and labels of large faults, for the time axis.
    pub marks: Vec<(u64, String)>,
    /// Hash of the event order of every instance, in hexadecimal.
    pub order: String,
    /// First violations of each invariant.
    pub violations: Vec<InvariantViolation>,
    pub violations_in_all: u64,
}

/// Progress display of a run. Its methods must not block.
pub trait ProgressDisplay: Send + Sync {
    /// Announces the current phase.
    fn show_phase(&self, name: &'static str);
    /// Reports the number of instances that have been online.
    fn show_online(&self, online: usize, of: usize);
    fn show_sample(&self, sample: &RunSample, injected: u64, violations: u64);
    /// Returns true if the user asked for an early end. No more calls are made and no more faults injected then;
    /// recovery and checks run as usual.
    fn is_stopped(&self) -> bool {
        false
    }
}
