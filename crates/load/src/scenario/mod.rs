//! Scenarios: the fleet, load, faults and limits of a run, read from a TOML file. Five scenarios are built in. The
//! reader of the configuration reports all errors of a file at once, each with its position.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::policy::{BatchPolicy, Policy, TeamBudgetPolicy};
use mcp_satellite_actors::model::spec::ProcessLifetime;
use toml_span::ErrorKind;

use super::random::DurationDistribution;
use super::types::{FaultKind, InstanceNo, LoadTransport, TeamNo, VictimClass};
use mcp_satellite_config::errors::{ConfigFindings, ConfigText};
use mcp_satellite_config::reader::nearest;
use mcp_satellite_sim::SimScript;

pub use mcp_satellite_config::ConfigErrors as ScenarioErrors;

mod read;

/// Names and texts of the built-in scenarios.
pub const SHIPPED: [(&str, &str); 5] = [
    ("storm", include_str!("../../scenarios/storm.toml")),
    ("flap", include_str!("../../scenarios/flap.toml")),
    ("hang", include_str!("../../scenarios/hang.toml")),
    ("mixed", include_str!("../../scenarios/mixed.toml")),
    ("soak", include_str!("../../scenarios/soak.toml")),
];

/// Share of the run, from its start, that is free of repeated faults by default, as a baseline for the calls.
pub const FAULT_FREE_SHARE: f64 = 0.2;

// A larger number of planned faults is considered a typing error.
const FAULTS_MAX: f64 = 1e6;
// Limit for instances, teams, users, callers and calls in flight.
const MANY_MAX: u32 = 1_000_000;
// Limit for calls per second; no machine reaches it.
const RATE_MAX: f64 = 1e6;

/// Settings of a run, as read from a scenario file.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Name of the scenario.
    pub name: String,
    /// Description in one sentence.
    pub about: String,
    /// Duration of the load, from the moment when all instances are online.
    pub duration: Duration,
    pub fleet: FleetShape,
    pub kinds: Vec<ScenarioServer>,
    pub load: CallLoad,
    /// Policy of each instance.
    pub policy: Arc<Policy>,
    /// Restart budget of each team.
    pub team_budget: TeamBudgetPolicy,
    /// Number of concurrent starts; by default that of the mode.
    pub start_permits: Option<usize>,
    /// Number of concurrent connection attempts; by default that of the mode.
    pub connect_permits: Option<usize>,
    pub batch: BatchPolicy,
    /// Faults in the order of the file.
    pub faults: Vec<FaultRule>,
    pub limits: ScenarioLimits,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetShape {
    /// Number of instances in all teams.
    pub instances: usize,
    pub teams: usize,
    /// Number of users of each team.
    pub users: usize,
}

impl FleetShape {
    /// Returns the team of an instance. Instances are assigned to the teams in turn.
    pub fn team_of(&self, nth: InstanceNo) -> TeamNo {
        let teams = u32::try_from(self.teams.max(1)).unwrap_or(u32::MAX);
        TeamNo(nth.0 % teams)
    }

    /// Returns the index of the user, within the team, to whom an instance belongs.
    pub fn user_of(&self, nth: InstanceNo) -> usize {
        (nth.0 as usize / self.teams.max(1)) % self.users.max(1)
    }

    /// Returns all instances of a team.
    pub fn members(&self, team: TeamNo) -> impl Iterator<Item = InstanceNo> {
        let step = self.teams.max(1);
        (team.0 as usize..self.instances).step_by(step).filter_map(|nth| u32::try_from(nth).ok().map(InstanceNo))
    }

    pub fn size_of(&self, team: TeamNo) -> usize {
        self.instances.saturating_sub(team.0 as usize).div_ceil(self.teams.max(1))
    }

    pub fn all(&self) -> impl Iterator<Item = InstanceNo> + use<> {
        (0..u32::try_from(self.instances).unwrap_or(u32::MAX)).map(InstanceNo)
    }
}

#[derive(Debug, Clone)]
pub struct ScenarioServer {
    /// First part of the servers' names.
    pub name: String,
    /// Relative frequency among all kinds.
    pub weight: u32,
    pub transport: LoadTransport,
    /// Behavior of the servers. Handshake and seed are drawn for each script.
    pub script: SimScript,
    /// Delay of the response to `initialize`.
    pub handshake: DurationDistribution,
    pub call: DurationDistribution,
    /// Policy for dormant instances.
    pub keep: ProcessLifetime,
    pub request_logging: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub enum CallLoad {
    /// Closed loop: each caller waits for the response, then for the think time, before its next call.
    Closed {
        callers: usize,
        /// Think time before each call.
        think: DurationDistribution,
        /// Exponent of Zipf's law for the choice of a team; 0 is uniform.
        skew: f64,
        timeout: Duration,
    },
    /// Open loop: calls arrive independently of earlier responses.
    Open {
        /// Average number of calls per second.
        per_second: f64,
        /// Limit for calls in flight; a further call is not made but counted as shed.
        in_flight_max: usize,
        /// Exponent of Zipf's law for the choice of a team; 0 is uniform.
        skew: f64,
        timeout: Duration,
    },
}

impl CallLoad {
    /// Returns the exponent of Zipf's law for the choice of a team.
    pub fn skew(&self) -> f64 {
        match self {
            Self::Closed { skew, .. } | Self::Open { skew, .. } => *skew,
        }
    }

    pub fn timeout(&self) -> Duration {
        match self {
            Self::Closed { timeout, .. } | Self::Open { timeout, .. } => *timeout,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct FaultRule {
    pub kind: FaultKind,
    pub timing: FaultTiming,
    pub victims: VictimSelection,
    /// Time until a fault is healed; zero if it heals by itself.
    pub duration: DurationDistribution,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FaultTiming {
    /// Single time.
    At(RunMoment),
    /// Random times, as a Poisson process.
    Every {
        /// Mean time between two faults.
        mean: Duration,
        /// Start of the period.
        from: RunMoment,
        /// End of the period.
        until: RunMoment,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RunMoment {
    /// Time since the start of the load.
    After(Duration),
    /// Share of the load's duration, from 0 to 1.
    Share(f64),
}

impl RunMoment {
    pub fn time_in(self, run: Duration) -> Duration {
        match self {
            Self::After(duration) => duration,
            Self::Share(share) => run.mul_f64(share),
        }
    }
}

/// Selection of victims from all possible ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum VictimSelection {
    /// Random single victim.
    One,
    /// Random share of the instances, from 0 to 1.
    Share(f64),
    /// Random share of the teams, from 0 to 1: the teams, or all their instances.
    TeamsShare(f64),
}

#[derive(Debug, Clone, PartialEq)]
pub struct ScenarioLimits {
    /// Maximum memory of an instance after the faults, as a multiple of that before the faults.
    pub growth: f64,
    /// Maximum duration of a recovery beyond the restart delay and the handshake.
    pub recovery_slack: Duration,
    /// Maximum 99th percentile of calls to teams without a fault, as a multiple of that before the faults. `None`
    /// disables the check.
    pub neighbours: Option<f64>,
    /// Maximum growth of memory and descriptors over the run, as a share. `None` disables the check.
    pub flat: Option<f64>,
}

impl Default for ScenarioLimits {
    fn default() -> Self {
        Self { growth: 1.2, recovery_slack: Duration::from_secs(1), neighbours: None, flat: None }
    }
}

/// Settings of the command line that replace those of a scenario.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScenarioOverrides {
    pub instances: Option<usize>,
    pub teams: Option<usize>,
    pub duration: Option<Duration>,
}

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

/// Returns the name of a kind of fault in scenario files.
pub fn fault_name(kind: FaultKind) -> &'static str {
    FAULTS.iter().find(|(_, known)| *known == kind).map_or("", |(name, _)| name)
}

/// Returns true if a fault of this kind lasts until it is healed. All others heal by themselves.
pub fn needs_healing(kind: FaultKind) -> bool {
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

/// Loads the built-in scenario with this name, or the file at this path.
///
/// # Errors
///
/// Fails if the file cannot be read or is not a valid scenario.
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
                None => format!("use a file or a built-in scenario: {}", names.join(", ")),
            };
            let message = format!("cannot read the scenario: {error}");
            Err(ScenarioErrors::without_place(name_or_path, vec![(message, hint)]))
        }
    }
}

/// Parses a scenario. `file` is the file name in error messages; its stem is the name of the scenario.
///
/// # Errors
///
/// Returns all errors of the text.
pub fn parse(file: &str, text: &str) -> Result<Scenario, ScenarioErrors> {
    let mut findings = ConfigFindings::default();
    let source = ConfigText { name: file, text, masked: text.to_owned() };
    let name = Path::new(file).file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    let scenario = match toml_span::parse(text) {
        Ok(tree) => read::scenario(name, tree, &mut findings),
        Err(error) => {
            let hint = match &error.kind {
                ErrorKind::UnquotedString => "put it in quotes",
                ErrorKind::DuplicateKey { .. } | ErrorKind::DuplicateTable { .. } => "remove one of the two",
                _ => "correct this first; the rest of the file was not checked",
            };
            findings.error(error.span, error.to_string(), hint);
            None
        }
    };
    findings.into_result(&source)?;
    scenario.ok_or_else(|| ScenarioErrors::internal_error(&"internal error: neither a scenario nor an error"))
}

/// Returns true if the fault can hit a server with this transport, or needs no server because it hits a team or the
/// satellite.
pub fn can_hit(kind: FaultKind, transport: LoadTransport) -> bool {
    match kind.victim_class() {
        VictimClass::Stdio => transport == LoadTransport::Stdio,
        VictimClass::Remote => transport == LoadTransport::Remote,
        VictimClass::Any | VictimClass::Team | VictimClass::Satellite => true,
    }
}

/// Returns a message and a hint for each part of a rule that is invalid in a run of this duration.
fn rule_errors(rule: &FaultRule, run: Duration, fleet: Option<&FleetShape>) -> Vec<(String, String)> {
    let mut errors = Vec::new();
    let shown = humantime::format_duration(run);
    let share = "write it as a share of the run, such as \"40 %\"".to_owned();
    let times = match rule.timing {
        FaultTiming::At(at) => {
            if at.time_in(run) >= run {
                errors.push((format!("`at` is beyond the run, which takes {shown}"), share));
            }
            1.0
        }
        FaultTiming::Every { mean, from, until } => {
            let (from, until) = (from.time_in(run), until.time_in(run));
            if from >= until {
                errors.push(("`from` is not before `until`".to_owned(), share));
            } else if until > run {
                errors.push((format!("`until` is beyond the run, which takes {shown}"), share));
            }
            until.saturating_sub(from).as_secs_f64() / mean.as_secs_f64()
        }
    };
    let victims = match (rule.victims, fleet) {
        (VictimSelection::One, _) | (_, None) => 1.0,
        (VictimSelection::Share(share) | VictimSelection::TeamsShare(share), Some(fleet)) => {
            (share * fleet.instances as f64).max(1.0)
        }
    };
    if times * victims > FAULTS_MAX {
        let message = format!("the rule results in about {:.0} faults; the maximum is one million", times * victims);
        errors.push((message, "increase `every`, or reduce the share".to_owned()));
    }
    errors
}

impl Scenario {
    /// Returns the scenario with these overrides. The number of teams is reduced to the number of instances if
    /// necessary.
    ///
    /// # Errors
    ///
    /// Fails if the result is not a valid scenario.
    pub fn with_overrides(self, overrides: ScenarioOverrides) -> Result<Self, ScenarioErrors> {
        let ScenarioOverrides { instances, teams, duration } = overrides;
        let instances = instances.unwrap_or(self.fleet.instances);
        let mut errors = Vec::new();
        if instances > MANY_MAX as usize {
            errors.push((format!("{instances} instances are too many"), "the maximum is one million".to_owned()));
        }
        if instances == 0 {
            errors.push(("the fleet has no instances".to_owned(), "give at least 1".to_owned()));
        }
        match teams {
            Some(0) => errors.push(("the fleet has no teams".to_owned(), "give at least 1".to_owned())),
            Some(teams) if teams > instances => {
                let message = format!("{teams} teams are more than {instances} instances");
                errors.push((message, "each team needs at least one instance".to_owned()));
            }
            _ => {}
        }
        let teams = teams.unwrap_or(self.fleet.teams).min(instances);
        let fleet = FleetShape { instances, teams, ..self.fleet };
        let duration = duration.unwrap_or(self.duration);
        if duration.is_zero() {
            errors.push(("the duration of the run is 0".to_owned(), "give at least 1 second".to_owned()));
        } else {
            for rule in &self.faults {
                let named = |(message, hint)| (format!("fault `{}`: {message}", fault_name(rule.kind)), hint);
                errors.extend(rule_errors(rule, duration, Some(&fleet)).into_iter().map(named));
            }
        }
        if errors.is_empty() {
            Ok(Self { duration, fleet, ..self })
        } else {
            Err(ScenarioErrors::without_place(&self.name, errors))
        }
    }

    /// Checks that the scenario can run in virtual time: closed-loop callers without a think time would stop the clock.
    ///
    /// # Errors
    ///
    /// Fails if callers have no think time.
    pub fn check_virtual_time(&self) -> Result<(), ScenarioErrors> {
        match &self.load {
            CallLoad::Closed { think, .. } if think.is_zero() => {
                let message = "callers without a think time stop the virtual clock".to_owned();
                let hint = "set `think` in [load], such as \"exp 10ms\"".to_owned();
                Err(ScenarioErrors::without_place(&self.name, vec![(message, hint)]))
            }
            CallLoad::Closed { .. } | CallLoad::Open { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
