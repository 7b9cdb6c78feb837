//! What is to happen, as a file says it: a fleet, its load, its faults and what it is judged by. Five files are built in;
//! they and all others are read by the reader of the configuration, which tells all errors at once, each with its place.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::policy::{BatchPolicy, Policy, TeamBudgetPolicy};
use mcp_satellite_actors::model::spec::Keep;
use toml_span::ErrorKind;

use super::chance::Spread;
use super::types::{Befalls, FaultKind, Nth, TeamNo, Transport};
use crate::config::errors::{Findings, Source};
use crate::config::reader::nearest;
use crate::connect::sim::Script;

pub use crate::config::ConfigErrors as ScenarioErrors;

mod read;

/// The scenarios that are built in, each with its text.
pub const SHIPPED: [(&str, &str); 5] = [
    ("storm", include_str!("../../../scenarios/storm.toml")),
    ("flap", include_str!("../../../scenarios/flap.toml")),
    ("hang", include_str!("../../../scenarios/hang.toml")),
    ("mixed", include_str!("../../../scenarios/mixed.toml")),
    ("soak", include_str!("../../../scenarios/soak.toml")),
];

/// The share of a run, from its start, that is compared with what comes after.
pub const QUIET: f64 = 0.2;

/// A plan of more faults than this is a typing error.
const FAULTS_MAX: f64 = 1e6;
/// And so are more instances, callers or calls at once than this.
const MANY_MAX: u32 = 1_000_000;
/// And more calls a second: no machine makes them.
const RATE_MAX: f64 = 1e6;

/// What is to happen.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// What it shows, in a sentence.
    pub about: String,
    /// How long there is load, from the moment in which all are online.
    pub duration: Duration,
    /// How many of everything.
    pub fleet: FleetShape,
    /// The kinds of server, at least one.
    pub kinds: Vec<ServerKind>,
    /// The calls.
    pub load: Load,
    /// What each instance is held to.
    pub policy: Arc<Policy>,
    /// What each team is held to.
    pub team_budget: TeamBudgetPolicy,
    /// Starts at once; the runtime's own if none.
    pub start_permits: Option<usize>,
    /// Connections made at once; the runtime's own if none.
    pub connect_permits: Option<usize>,
    /// How events are sent.
    pub batch: BatchPolicy,
    /// What goes wrong, in the order of the file.
    pub faults: Vec<FaultRule>,
    /// What the run is judged by.
    pub limits: Limits,
}

/// How many of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetShape {
    /// Instances, over all teams.
    pub instances: usize,
    /// Teams.
    pub teams: usize,
    /// Users of each team.
    pub users: usize,
}

impl FleetShape {
    /// Whose team an instance is: they are dealt out in turn.
    pub fn team_of(&self, nth: Nth) -> TeamNo {
        let teams = u32::try_from(self.teams.max(1)).unwrap_or(u32::MAX);
        TeamNo(nth.0 % teams)
    }

    /// Which of its team's users an instance belongs to.
    pub fn user_of(&self, nth: Nth) -> usize {
        (nth.0 as usize / self.teams.max(1)) % self.users.max(1)
    }

    /// All instances of a team.
    pub fn members(&self, team: TeamNo) -> impl Iterator<Item = Nth> {
        let step = self.teams.max(1);
        (team.0 as usize..self.instances).step_by(step).filter_map(|nth| u32::try_from(nth).ok().map(Nth))
    }

    /// How many members a team has.
    pub fn size_of(&self, team: TeamNo) -> usize {
        self.instances.saturating_sub(team.0 as usize).div_ceil(self.teams.max(1))
    }

    /// All instances.
    pub fn all(&self) -> impl Iterator<Item = Nth> + use<> {
        (0..u32::try_from(self.instances).unwrap_or(u32::MAX)).map(Nth)
    }
}

/// A kind of server.
#[derive(Debug, Clone)]
pub struct ServerKind {
    /// Its name for people.
    pub name: String,
    /// How many there are, beside the weights of the others.
    pub weight: u32,
    /// What connects it.
    pub transport: Transport,
    /// What it does. Its handshake and its seed are drawn for each.
    pub script: Script,
    /// How late it answers `initialize`.
    pub handshake: Spread,
    /// How long it works at a call.
    pub call: Spread,
    /// When its process is there.
    pub keep: Keep,
    /// Whether its calls are logged.
    pub request_logging: bool,
}

/// Who calls, how often.
#[derive(Debug, Clone, PartialEq)]
pub enum Load {
    /// Callers that wait for an answer and think before the next call.
    Closed {
        /// How many.
        callers: usize,
        /// Before each call.
        think: Spread,
        /// How uneven the teams are: the exponent of Zipf's law.
        skew: f64,
        /// Of a call.
        timeout: Duration,
    },
    /// Calls that come whether or not others have been answered.
    Open {
        /// On average.
        per_second: f64,
        /// One more is not made, and counted.
        in_flight_max: usize,
        /// See `Closed`.
        skew: f64,
        /// See `Closed`.
        timeout: Duration,
    },
}

impl Load {
    /// How uneven the teams are.
    pub fn skew(&self) -> f64 {
        match self {
            Self::Closed { skew, .. } | Self::Open { skew, .. } => *skew,
        }
    }

    /// The deadline of a call.
    pub fn timeout(&self) -> Duration {
        match self {
            Self::Closed { timeout, .. } | Self::Open { timeout, .. } => *timeout,
        }
    }
}

/// A kind of fault, when and to whom.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultRule {
    /// What.
    pub kind: FaultKind,
    /// When.
    pub when: When,
    /// To whom.
    pub whom: Whom,
    /// Until it is healed; nothing where it heals by itself.
    pub lasts: Spread,
}

/// When a fault comes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum When {
    /// Once.
    At(Moment),
    /// Again and again, at random times.
    Every {
        /// The mean time between two.
        mean: Duration,
        /// From then on.
        from: Moment,
        /// Until then.
        until: Moment,
    },
}

/// A moment of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Moment {
    /// So long after its start.
    After(Duration),
    /// When this share of it is over, from 0 to 1.
    Share(f64),
}

impl Moment {
    /// In a run that takes so long.
    pub fn of(self, run: Duration) -> Duration {
        match self {
            Self::After(duration) => duration,
            Self::Share(share) => run.mul_f64(share),
        }
    }
}

/// Whom a fault befalls, of those that it can befall.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Whom {
    /// One of them.
    One,
    /// A share of them, from 0 to 1.
    Share(f64),
    /// All of a share of the teams, from 0 to 1.
    TeamsShare(f64),
}

/// What a run is judged by, beside what must always hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Memory of an instance after the faults, as a multiple of that before.
    pub growth: f64,
    /// How much longer than its policy's delay and its handshake a recovery may take.
    pub recovery_slack: Duration,
    /// The 99th percentile of calls to teams that no fault befell, as a multiple of the same before the faults.
    pub neighbours: Option<f64>,
    /// How far memory and descriptors may have grown at the end, as a share.
    pub flat: Option<f64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { growth: 1.2, recovery_slack: Duration::from_secs(1), neighbours: None, flat: None }
    }
}

/// What somebody wants otherwise than the file says it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overrides {
    /// How many instances.
    pub instances: Option<usize>,
    /// In how many teams.
    pub teams: Option<usize>,
    /// For how long.
    pub duration: Option<Duration>,
}

/// Every kind of fault by its name in a file.
const FAULTS: [(&str, FaultKind); 23] = [
    ("crash", FaultKind::Crash),
    ("exit_0", FaultKind::Exit0),
    ("crash_loop", FaultKind::CrashLoop),
    ("slow_handshake", FaultKind::SlowHandshake),
    ("no_handshake", FaultKind::NoHandshake),
    ("hang", FaultKind::Hang),
    ("slow_sigterm", FaultKind::SlowSigterm),
    ("ignore_sigterm", FaultKind::IgnoreSigterm),
    ("stderr_flood", FaultKind::StderrFlood),
    ("garbage", FaultKind::Garbage),
    ("huge", FaultKind::Huge),
    ("stray_answers", FaultKind::StrayAnswers),
    ("memory_growth", FaultKind::MemoryGrowth),
    ("unauthorized", FaultKind::Unauthorized),
    ("session_lost", FaultKind::SessionLost),
    ("refused", FaultKind::Refused),
    ("stream_cut", FaultKind::StreamCut),
    ("worker_panic", FaultKind::WorkerPanic),
    ("team_panic", FaultKind::TeamPanic),
    ("registry_panic", FaultKind::RegistryPanic),
    ("batcher_panic", FaultKind::BatcherPanic),
    ("sink_fails", FaultKind::SinkFails),
    ("sink_panics", FaultKind::SinkPanics),
];

/// Its name in a file.
pub fn fault_name(kind: FaultKind) -> &'static str {
    FAULTS.iter().find(|(_, known)| *known == kind).map_or("", |(name, _)| name)
}

/// Whether it goes on until it is healed. The others are over when they have been done.
pub fn is_healed(kind: FaultKind) -> bool {
    match kind {
        FaultKind::CrashLoop
        | FaultKind::SlowHandshake
        | FaultKind::NoHandshake
        | FaultKind::StderrFlood
        | FaultKind::Garbage
        | FaultKind::StrayAnswers
        | FaultKind::Unauthorized
        | FaultKind::Refused
        | FaultKind::SinkFails
        | FaultKind::SinkPanics => true,
        FaultKind::Crash
        | FaultKind::Exit0
        | FaultKind::Hang
        | FaultKind::SlowSigterm
        | FaultKind::IgnoreSigterm
        | FaultKind::Huge
        | FaultKind::MemoryGrowth
        | FaultKind::SessionLost
        | FaultKind::StreamCut
        | FaultKind::WorkerPanic
        | FaultKind::TeamPanic
        | FaultKind::RegistryPanic
        | FaultKind::BatcherPanic => false,
    }
}

/// The built-in scenario of this name, or the one in this file.
pub fn load(name_or_path: &str) -> Result<Scenario, ScenarioErrors> {
    if let Some((name, text)) = SHIPPED.iter().find(|(name, _)| *name == name_or_path) {
        return parse(&format!("{name}.toml"), text);
    }
    match std::fs::read_to_string(name_or_path) {
        Ok(text) => parse(name_or_path, &text),
        Err(error) => {
            let names = SHIPPED.map(|(name, _)| name);
            let hint = match nearest(name_or_path, &names) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("give a file, or one of those that are built in: {}", names.join(", ")),
            };
            let message = format!("cannot read the scenario: {error}");
            Err(ScenarioErrors::nowhere(name_or_path, vec![(message, hint)]))
        }
    }
}

/// Reads a scenario from `text`; `file` is its file's name, for errors.
pub fn parse(file: &str, text: &str) -> Result<Scenario, ScenarioErrors> {
    let mut findings = Findings::default();
    let source = Source { name: file, text, shown: text.to_owned() };
    let name = Path::new(file).file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    let scenario = match toml_span::parse(text) {
        Ok(tree) => read::scenario(name, tree, &mut findings),
        Err(error) => {
            let hint = match &error.kind {
                ErrorKind::UnquotedString => "put it in quotes",
                ErrorKind::DuplicateKey { .. } | ErrorKind::DuplicateTable { .. } => "remove one of the two",
                _ => "the file is read on once this is mended",
            };
            findings.error(error.span, error.to_string(), hint);
            None
        }
    };
    findings.settle(&source)?;
    scenario.ok_or_else(|| ScenarioErrors::fault(&"nothing was read, and nothing was wrong"))
}

/// Whether such a fault can befall such a server. What befalls a team or the satellite needs no server at all.
pub fn fits(kind: FaultKind, transport: Transport) -> bool {
    match kind.befalls() {
        Befalls::Stdio => transport == Transport::Stdio,
        Befalls::Remote => transport == Transport::Remote,
        Befalls::Any | Befalls::Team | Befalls::Us => true,
    }
}

/// What of a rule makes no sense in a run of this length.
fn beyond(rule: &FaultRule, run: Duration, fleet: Option<&FleetShape>) -> Vec<(String, String)> {
    let mut wrong = Vec::new();
    let shown = humantime::format_duration(run);
    let share = "write it as a share of the run, such as \"40 %\"".to_owned();
    let times = match rule.when {
        When::At(at) => {
            if at.of(run) >= run {
                wrong.push((format!("`at` is beyond the run, which takes {shown}"), share));
            }
            1.0
        }
        When::Every { mean, from, until } => {
            let (from, until) = (from.of(run), until.of(run));
            if from >= until {
                wrong.push(("`from` is not before `until`".to_owned(), share));
            } else if until > run {
                wrong.push((format!("`until` is beyond the run, which takes {shown}"), share));
            }
            until.saturating_sub(from).as_secs_f64() / mean.as_secs_f64()
        }
    };
    let victims = match (rule.whom, fleet) {
        (Whom::One, _) | (_, None) => 1.0,
        (Whom::Share(share) | Whom::TeamsShare(share), Some(fleet)) => (share * fleet.instances as f64).max(1.0),
    };
    if times * victims > FAULTS_MAX {
        let message = format!("this is about {:.0} faults, and a million is the most", times * victims);
        wrong.push((message, "make `every` longer, or the share smaller".to_owned()));
    }
    wrong
}

impl Scenario {
    /// With what somebody wants otherwise. Where there are to be fewer instances than there were teams, there are fewer
    /// teams.
    pub fn with(self, overrides: Overrides) -> Result<Self, ScenarioErrors> {
        let Overrides { instances, teams, duration } = overrides;
        let instances = instances.unwrap_or(self.fleet.instances);
        let mut wrong = Vec::new();
        if instances > MANY_MAX as usize {
            wrong.push((format!("{instances} instances are too many"), "a million is the most".to_owned()));
        }
        if instances == 0 {
            wrong.push(("no instances are no fleet".to_owned(), "give at least 1".to_owned()));
        }
        match teams {
            Some(0) => wrong.push(("no teams are no fleet".to_owned(), "give at least 1".to_owned())),
            Some(teams) if teams > instances => {
                let message = format!("{teams} teams are more than {instances} instances");
                wrong.push((message, "each team has at least one instance".to_owned()));
            }
            _ => {}
        }
        let teams = teams.unwrap_or(self.fleet.teams).min(instances);
        let fleet = FleetShape { instances, teams, ..self.fleet };
        let duration = duration.unwrap_or(self.duration);
        if duration.is_zero() {
            wrong.push(("a run takes some time".to_owned(), "give at least 1 second".to_owned()));
        } else {
            for rule in &self.faults {
                let named = |(message, hint)| (format!("of `{}`: {message}", fault_name(rule.kind)), hint);
                wrong.extend(beyond(rule, duration, Some(&fleet)).into_iter().map(named));
            }
        }
        if wrong.is_empty() {
            Ok(Self { duration, fleet, ..self })
        } else {
            Err(ScenarioErrors::nowhere(&self.name, wrong))
        }
    }

    /// What is in the way of paused time: callers that never wait, for whom time would never go on.
    pub fn paused(&self) -> Result<(), ScenarioErrors> {
        match &self.load {
            Load::Closed { think, .. } if think.is_zero() => {
                let message = "callers that do not think never let virtual time go on".to_owned();
                let hint = "give `think` in [load], such as \"exp 10ms\"".to_owned();
                Err(ScenarioErrors::nowhere(&self.name, vec![(message, hint)]))
            }
            Load::Closed { .. } | Load::Open { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
