//! The nouns of the harness. Times are since the run began.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use mcp_satellite_actors::model::status::Status;
use serde::{Deserialize, Serialize};

use super::chance::Seed;
use super::measure::Latency;
use super::scenario::Scenario;
use super::seams::Seams;

/// An instance, by its number: its installation's id is `i` and the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nth(pub u32);

impl Nth {
    /// Whose installation this is.
    pub fn of(installation: &str) -> Option<Self> {
        installation.strip_prefix('i')?.parse().ok().map(Self)
    }
}

/// A team, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TeamNo(pub u32);

/// What connects an instance to its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// A process and its pipes.
    Stdio,
    /// HTTP.
    Remote,
}

/// Where the servers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// In this process.
    Simulated,
    /// In this process, on one thread, in paused time.
    Virtual,
    /// Processes of their own.
    Real,
}

/// What can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// Killed by SIGKILL.
    Crash,
    /// Ends with code 0 after its handshake.
    #[serde(rename = "exit_0")]
    Exit0,
    /// Ends a moment after each start.
    CrashLoop,
    /// Answers `initialize` late.
    SlowHandshake,
    /// Never answers `initialize`.
    NoHandshake,
    /// Lives and answers nothing.
    Hang,
    /// Takes its time after SIGTERM.
    SlowSigterm,
    /// Ignores SIGTERM.
    IgnoreSigterm,
    /// Writes to stderr without end.
    StderrFlood,
    /// Writes to stdout what is no message.
    Garbage,
    /// Writes a line that is longer than allowed.
    Huge,
    /// Answers with ids that were answered before or never asked.
    StrayAnswers,
    /// Keeps what it is told until it is killed for it.
    MemoryGrowth,
    /// Refuses the credentials: 401.
    Unauthorized,
    /// Knows the session no more: 404.
    SessionLost,
    /// Refuses connections.
    Refused,
    /// Its streams break off.
    StreamCut,
    /// A worker actor of ours panics.
    WorkerPanic,
    /// A team's supervisor panics.
    TeamPanic,
    /// The registry panics.
    RegistryPanic,
    /// The batcher panics.
    BatcherPanic,
    /// The sink takes nothing.
    SinkFails,
    /// The sink panics.
    SinkPanics,
}

/// Whom a fault can befall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Befalls {
    /// An instance with a process.
    Stdio,
    /// An instance with a remote server.
    Remote,
    /// Any instance.
    Any,
    /// A team.
    Team,
    /// The satellite.
    Us,
}

impl FaultKind {
    /// All of them.
    pub const ALL: [Self; 23] = [
        Self::Crash,
        Self::Exit0,
        Self::CrashLoop,
        Self::SlowHandshake,
        Self::NoHandshake,
        Self::Hang,
        Self::SlowSigterm,
        Self::IgnoreSigterm,
        Self::StderrFlood,
        Self::Garbage,
        Self::Huge,
        Self::StrayAnswers,
        Self::MemoryGrowth,
        Self::Unauthorized,
        Self::SessionLost,
        Self::Refused,
        Self::StreamCut,
        Self::WorkerPanic,
        Self::TeamPanic,
        Self::RegistryPanic,
        Self::BatcherPanic,
        Self::SinkFails,
        Self::SinkPanics,
    ];

    /// Whom it can befall.
    pub fn befalls(self) -> Befalls {
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
            | Self::MemoryGrowth => Befalls::Stdio,
            Self::Unauthorized | Self::SessionLost | Self::Refused | Self::StreamCut => Befalls::Remote,
            Self::WorkerPanic => Befalls::Any,
            Self::TeamPanic => Befalls::Team,
            Self::RegistryPanic | Self::BatcherPanic | Self::SinkFails | Self::SinkPanics => Befalls::Us,
        }
    }

    /// Whether it can be done to such servers.
    pub fn possible(self, mode: Mode) -> bool {
        !(mode == Mode::Real && matches!(self, Self::Unauthorized | Self::StreamCut))
    }

    /// Whether its victim must be online again by itself once it is healed, so that the time until then is a recovery.
    pub fn recovers(self) -> bool {
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

    /// Whether its victim may be online all the time.
    pub fn is_withstood(self) -> bool {
        !matches!(
            self,
            Self::Crash | Self::SlowHandshake | Self::NoHandshake | Self::Hang | Self::WorkerPanic | Self::Unauthorized
        )
    }
}

/// What became of those who were to recover from a fault. Together they are all whom it has befallen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// They were online again.
    pub back: u64,
    /// They have always been online and could be called.
    pub unharmed: u64,
    /// Their budget was spent: a person had to come.
    pub given_up: u64,
    /// They never came back.
    pub missing: u64,
}

impl Outcome {
    /// All of them.
    pub fn all(&self) -> u64 {
        self.back + self.unharmed + self.given_up + self.missing
    }
}

/// Whom a fault befalls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// An instance.
    Instance(Nth),
    /// A team.
    Team(TeamNo),
    /// The satellite.
    Us,
}

/// One fault of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    /// Its number.
    pub serial: u32,
    /// When.
    pub at: Duration,
    /// What.
    pub kind: FaultKind,
    /// To whom.
    pub victim: Victim,
    /// Until it is healed.
    pub lasts: Duration,
}

/// What the configuration of an instance says about its server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A program and its arguments.
    Process(String, Vec<String>),
    /// A URL.
    Remote(String),
}

/// One call of the plan. Its token is what must come back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedCall {
    /// In a closed loop what the caller waits before it, in an open loop the time since the arrival before.
    pub pause: Duration,
    /// Whom.
    pub nth: Nth,
    /// What the server takes for it.
    pub after: Duration,
    /// What it says, which no other call does.
    pub token: Box<str>,
    /// The caller's deadline.
    pub timeout: Duration,
}

/// What came of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answered {
    /// A result with this text.
    Text(String),
    /// The server's own error.
    ServerError(String),
    /// An error of the satellite.
    Failed {
        /// `not_sent`, `maybe_executed` or `timed_out`, where it is known.
        fate: Option<String>,
        /// In words.
        why: String,
    },
}

/// A look at an instance that the snapshot showed online.
#[derive(Debug, Clone)]
pub struct Probe {
    /// Which.
    pub nth: Nth,
    /// When the call began.
    pub at: Duration,
    /// What came of it.
    pub answer: Answered,
    /// What it was told to say.
    pub token: Box<str>,
    /// Whether its status, process or connection is another one since.
    pub moved: bool,
}

/// Who gets a new budget of restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pardon {
    /// A person has restarted, updated or started it.
    Instance(Nth),
    /// Its supervisor has panicked.
    Team(TeamNo),
}

/// What must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Invariant {
    /// Each caller gets its own answer, once.
    OwnAnswer,
    /// What is online can be called.
    OnlineIsCallable,
    /// No restart beyond a budget.
    RestartBudget,
    /// Statuses change by legal transitions, in order.
    LegalTransitions,
    /// Events are numbered without a gap, or a drop event explains it.
    NoGap,
    /// Nothing is left at the end.
    NothingLeft,
    /// Memory is back after the faults.
    MemoryBack,
    /// Everyone is back within its policy's delay and a limit.
    Recovery,
    /// Calls to other teams are not slowed by a team's faults.
    Neighbours,
    /// Memory and descriptors do not grow with time.
    Flat,
}

/// A promise that was broken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Which promise.
    pub invariant: Invariant,
    /// Start of the time in which it was broken.
    #[serde(skip)]
    pub since_ms: u64,
    /// When it was seen.
    pub at_ms: u64,
    /// By whom.
    pub instance: Option<String>,
    /// In words.
    pub what: String,
}

/// How much a promise was looked at: one that nobody looked at was not kept, only not broken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Which promise.
    pub invariant: Invariant,
    /// How often somebody looked.
    pub looks: u64,
    /// At what: `calls`, `starts`, `events`.
    pub at: &'static str,
    /// Why it says nothing whether the promise was kept, where that is so.
    pub not_checked: Option<String>,
}

/// What is there when all is over, beyond what was there before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Left {
    /// Servers, and lines to servers.
    pub servers: usize,
    /// Tasks of the runtime.
    pub tasks: usize,
    /// File descriptors.
    pub descriptors: usize,
    /// Processes below this one.
    pub processes: usize,
}

/// What the end of a run is judged by.
#[derive(Debug, Clone)]
pub struct End {
    /// When.
    pub at: Duration,
    /// What is left.
    pub left: Left,
    /// Bytes when all were online, before the faults.
    pub memory_before: u64,
    /// Bytes when all were online again.
    pub memory_after: u64,
    /// How many instances there are.
    pub instances: usize,
    /// Events that no sink took before the runtime's end.
    pub events_lost: usize,
    /// Events that were numbered, from 1 on.
    pub events_emitted: u64,
}

/// One point of every curve.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Sample {
    /// When.
    pub at_ms: u64,
    /// Instances by status, in the order of [`Status::ALL`].
    pub by_status: [u32; Status::ALL.len()],
    /// Those that sleep, whatever their status.
    pub dormant: u32,
    /// Memory in use that is not read from files, in bytes.
    pub rss: u64,
    /// Open file descriptors.
    pub descriptors: u32,
    /// Events that wait to be taken.
    pub backlog: u64,
    /// Events given up so far.
    pub dropped: u64,
    /// Calls that have ended so far.
    pub calls: u64,
    /// Those of them that failed.
    pub failed: u64,
    /// Calls under way.
    pub in_flight: u32,
    /// Until Root and the registry had done what was asked of them before, in microseconds.
    pub lag_us: u64,
    /// CPU time that other programs have used since the previous sample, in percent of all cores. 0 in virtual time.
    pub foreign_cpu_percent: u8,
}

/// What came of the calls.
#[derive(Debug, Clone, Default, Serialize)]
pub struct CallFindings {
    /// Made.
    pub asked: u64,
    /// With the right answer.
    pub answered: u64,
    /// With an error.
    pub failed: u64,
    /// Not made, as too many were under way.
    pub shed: u64,
    /// Those that failed of the calls before the first fault, which the times in `quiet` leave out.
    pub quiet_failed: u64,
    /// The same of `storm`.
    pub storm_failed: u64,
    /// The same of `neighbours`, with those that were not made.
    pub neighbours_failed: u64,
    /// Answers a second, while calls were made.
    pub per_second: f64,
    /// Those that were answered, before the first fault.
    pub quiet: Latency,
    /// Those that were answered, from the first fault to the end.
    pub storm: Latency,
    /// Those of them that came just after a fault of many, to teams that it did not befall.
    pub neighbours: Latency,
    /// Errors by fate.
    pub by_fate: BTreeMap<String, u64>,
}

/// What became of the events.
#[derive(Debug, Clone, Default, Serialize)]
pub struct EventFindings {
    /// Numbered.
    pub emitted: u64,
    /// Taken by the sink.
    pub sent: u64,
    /// Refused by the sink on purpose.
    pub failed: u64,
    /// Given up, and told by an event.
    pub dropped: u64,
    /// Gone without a word.
    pub lost: u64,
}

/// All that a report is made of.
#[derive(Debug, Clone, Serialize)]
pub struct Findings {
    /// The command that repeats it.
    pub repeat: String,
    /// Its name.
    pub scenario: String,
    /// What it is about.
    pub about: String,
    /// What everything was drawn from.
    pub seed: u64,
    /// `simulated`, `virtual` or `real`.
    pub mode: String,
    /// Whether calls went through the MCP endpoint.
    pub gateway: bool,
    /// Whether somebody ended it before its time.
    pub stopped: bool,
    /// Why the trace is not whole.
    pub trace_ends_early: Option<String>,
    /// CPU, kernel, memory.
    pub machine: BTreeMap<String, String>,
    /// How many servers.
    pub instances: usize,
    /// In how many teams.
    pub teams: usize,
    /// How long the fleet lived, in its own time.
    pub seconds: f64,
    /// How long that took.
    pub took_seconds: f64,
    /// CPU time of this process.
    pub cpu_seconds: f64,
    /// From the first installation until all were online.
    pub all_online_ms: f64,
    /// CPU time of the servers' processes until they were online.
    pub children_cpu_ms: Option<f64>,
    /// From its installation until it was online, for each instance.
    pub online: Latency,
    /// Memory that an instance takes, servers included where they are in this process.
    pub bytes_each: u64,
    /// The same after the faults.
    pub bytes_each_after: u64,
    /// The calls.
    pub calls: CallFindings,
    /// From a fault until its victim was online again, or from its healing where that came first.
    pub recoveries: BTreeMap<FaultKind, Latency>,
    /// What became of their victims. A fault of a team has as many as the team has instances.
    pub outcomes: BTreeMap<FaultKind, Outcome>,
    /// How many faults there were.
    pub injected: BTreeMap<FaultKind, u64>,
    /// Those that could not be done here, or found no victim that was well.
    pub impossible: BTreeMap<FaultKind, u64>,
    /// What the scenario asks for and what was never done, for whatever reason.
    pub never_injected: Vec<FaultKind>,
    /// How much of each promise was looked at.
    pub checked: Vec<Checked>,
    /// From when something was to be asked of a team's supervisor until what it did was seen in the registry.
    pub supervisors: Latency,
    /// From when it was to be asked until the registry showed all that Root knew.
    pub registry: Latency,
    /// The events.
    pub events: EventFindings,
    /// Instances that were given up for a time.
    pub permanently_failed: u64,
    /// How often somebody was restarted by hand.
    pub pardons: u64,
    /// What was left at the end.
    pub left: Left,
    /// The curves.
    pub samples: Vec<Sample>,
    /// What happened to many at once, for the time axis.
    pub marks: Vec<(u64, String)>,
    /// One number for the order of events of every instance.
    pub order: String,
    /// The first of each promise that was broken.
    pub violations: Vec<Violation>,
    /// How many there were in all.
    pub violations_in_all: u64,
}

/// What the command line asks for.
pub struct Setup {
    /// What is to happen.
    pub scenario: Scenario,
    /// What everything is drawn from.
    pub seed: Seed,
    /// Where the servers are.
    pub mode: Mode,
    /// Whether calls go through the MCP endpoint.
    pub gateway: bool,
    /// The `satellite` of real servers.
    pub program: PathBuf,
    /// The command that repeats it.
    pub repeat: String,
    /// Where each event is written.
    pub trace: Option<PathBuf>,
    pub(crate) seams: Seams,
}

/// Where progress goes while it runs. Never waits.
pub trait Show: Send + Sync {
    /// What is being done.
    fn phase(&self, name: &'static str);
    /// How far the start is.
    fn online(&self, online: usize, of: usize);
    /// How it is.
    fn sample(&self, sample: &Sample, injected: u64, violations: u64);
    /// Whether somebody wants it to end early: no more calls and faults are made then, and the rest is as ever.
    fn is_stopped(&self) -> bool {
        false
    }
}
