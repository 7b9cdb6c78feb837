//! What is to happen, as a file says it: a fleet, its load, its faults and what it is judged by. Five files are built in;
//! they and all others are read by the reader of the configuration, which tells all errors at once, each with its place.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::policy::{BatchPolicy, Policy, TeamBudgetPolicy};
use mcp_satellite_actors::model::spec::Keep;
use toml_span::value::{Value, ValueInner};
use toml_span::{ErrorKind, Span};

use super::chance::{SPREADS, Spread};
use super::types::{Befalls, FaultKind, Nth, TeamNo, Transport};
use crate::config::errors::{Findings, Source};
use crate::config::reader::{Fields, nearest};
use crate::connect::sim::Script;

pub use crate::config::ConfigErrors as ScenarioErrors;

/// The scenarios that are built in, each with its text.
pub const SHIPPED: [(&str, &str); 5] = [
    ("storm", include_str!("../../scenarios/storm.toml")),
    ("flap", include_str!("../../scenarios/flap.toml")),
    ("hang", include_str!("../../scenarios/hang.toml")),
    ("mixed", include_str!("../../scenarios/mixed.toml")),
    ("soak", include_str!("../../scenarios/soak.toml")),
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
        Ok(tree) => read(name, tree, &mut findings),
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

fn read(name: String, tree: Value<'_>, findings: &mut Findings) -> Option<Scenario> {
    let mut file = Fields::open(tree, Span::new(0, 0), "the scenario".to_owned(), findings)?;
    let missing = ["about", "seconds", "fleet", "servers", "load"].map(|key| !file.has(key));
    let about = file.text("about").given().map(|about| about.value.clone());
    let seconds = file.count::<1, u64>("seconds");
    let fleet = file.section("fleet", fleet);
    let kinds = file.list("servers", server);
    let load = file.section("load", load_of);
    let policies = file.section("policy", |fields| Some(policies(fields)));
    let batch = file.section("events", |fields| Some(events(fields)));
    let faults: Vec<_> = file.list("faults", |fields| (fields.at, fault(fields)));
    let limits = file.section("limits", |fields| Some(limits(fields)));

    let at = Span::new(0, 0);
    let hints = [
        ("about", "say in a sentence what it shows: about = \"…\""),
        ("seconds", "say how long there is load: seconds = 60"),
        ("fleet", "say how many there are: [fleet] with instances and teams"),
        ("servers", "describe at least one kind of server under [[servers]]"),
        ("load", "say who calls: [load] with loop = \"open\" or \"closed\""),
    ];
    for (key, hint) in hints.into_iter().zip(missing).filter_map(|(hint, missing)| missing.then_some(hint)) {
        file.findings.error(at, format!("`{key}` is missing"), hint);
    }
    if !missing[3] && kinds.is_empty() {
        file.findings.error(at, "there is no kind of server", "describe at least one under [[servers]]");
    }
    let mut names = BTreeSet::new();
    for (at, name) in kinds.iter().flatten().map(|(at, kind)| (at, &kind.name)) {
        if !names.insert(name.clone()) {
            file.findings.error(*at, format!("there are two kinds of server named `{name}`"), "rename one of them");
        }
    }
    let whole = kinds.iter().all(Option::is_some);
    let kinds: Vec<ServerKind> = kinds.into_iter().flatten().map(|(_, kind)| kind).collect();
    let duration = seconds.map(Duration::from_secs);
    for (at, rule) in faults.iter().filter_map(|(at, rule)| Some((at, rule.as_ref()?))) {
        if let Some(duration) = duration {
            for (message, hint) in beyond(rule, duration, fleet.as_ref()) {
                file.findings.error(*at, message, hint);
            }
        }
        if whole && !kinds.is_empty() && !kinds.iter().any(|kind| fits(rule.kind, kind.transport)) {
            let kind = fault_name(rule.kind);
            let message = format!("there is no kind of server here that `{kind}` could befall");
            let transport = if rule.kind.befalls() == Befalls::Remote { "remote" } else { "stdio" };
            file.findings.error(*at, message, format!("add one with transport = \"{transport}\", or leave it out"));
        }
    }
    file.close();
    let Policies { policy, team_budget, start_permits, connect_permits } = policies.unwrap_or_default();
    Some(Scenario {
        name,
        about: about?,
        duration: duration?,
        fleet: fleet?,
        kinds,
        load: load?,
        policy: Arc::new(policy),
        team_budget,
        start_permits,
        connect_permits,
        batch: batch.unwrap_or_else(default_batch),
        faults: faults.into_iter().filter_map(|(_, rule)| rule).collect(),
        limits: limits.unwrap_or_default(),
    })
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

fn fleet(fields: &mut Fields<'_, '_>) -> Option<FleetShape> {
    let at = fields.at;
    if !fields.has("instances") {
        fields.findings.error(at, "`instances` is missing", "say how many servers there are: instances = 1000");
    }
    let [instances, teams, users] = ["instances", "teams", "users"].map(|key| at_most(fields, key));
    let (teams, users) = (teams.unwrap_or(1), users.unwrap_or(1));
    let instances = instances?;
    if teams > instances {
        let message = format!("{teams} teams are more than {instances} instances");
        fields.findings.error(at, message, "each team has at least one instance");
    }
    Some(FleetShape { instances: instances as usize, teams: teams as usize, users: users as usize })
}

fn server(fields: &mut Fields<'_, '_>) -> Option<(Span, ServerKind)> {
    let at = fields.at;
    if !fields.has("name") {
        fields.findings.error(at, "a kind of server has no name", "give it one: name = \"tools\"");
    }
    let name = fields.text("name").given().cloned();
    if let Some(name) = &name {
        let plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
        if name.value.is_empty() || !name.value.chars().all(plain) {
            let message = format!("`{}` cannot be part of a server's name", name.value);
            fields.findings.error(name.span, message, "use small letters, digits and hyphens");
        }
    }
    let transports = [("stdio", Transport::Stdio), ("remote", Transport::Remote)];
    let keeps = [("listed", Keep::Listed), ("always_on", Keep::AlwaysOn), ("lazy", Keep::Lazy)];
    let kind = ServerKind {
        name: name.map(|name| name.value).unwrap_or_default(),
        weight: fields.count::<1, _>("weight").unwrap_or(1),
        transport: fields.one_of("transport", &transports).unwrap_or(Transport::Stdio),
        handshake: spread(fields, "handshake").unwrap_or_default(),
        call: spread(fields, "call").unwrap_or_default(),
        keep: fields.one_of("keep", &keeps).unwrap_or(Keep::AlwaysOn),
        request_logging: fields.flag("request_logging").given().is_none_or(|logging| logging.value),
        script: script(fields),
    };
    (!kind.name.is_empty()).then_some((at, kind))
}

/// What of a script a file cannot say, and who says it instead.
const DRAWN: [(&str, &str); 7] = [
    ("handshake_delay", "give it as `handshake` of the server"),
    ("seed", "it is drawn from the seed of the run"),
    ("exit_after", "ends are faults: give them under [[faults]]"),
    ("exit_before_handshake", "ends are faults: give them under [[faults]]"),
    ("exit_code", "ends are faults: give them under [[faults]]"),
    ("exit_on_call", "ends are faults: give them under [[faults]]"),
    ("exit_signal", "ends are faults: give them under [[faults]]"),
];

/// Each key by itself, so that each error has its own place.
fn script(fields: &mut Fields<'_, '_>) -> Script {
    let Some((name, mut value)) = fields.take("script") else { return Script::default() };
    let ValueInner::Table(table) = value.take() else {
        fields.findings.error(name.span, "`script` must be a table", "write it as a table: { key = value }");
        return Script::default();
    };
    let known = match serde_json::to_value(Script::default()) {
        Ok(serde_json::Value::Object(known)) => known,
        // It is a struct, so it is an object.
        _ => serde_json::Map::new(),
    };
    let words: Vec<&str> = known.keys().map(String::as_str).collect();
    let mut said = serde_json::Map::new();
    for (key, mut value) in table {
        let (key, at, value_at) = (key.name.into_owned(), key.span, value.span);
        if let Some((_, hint)) = DRAWN.iter().find(|(drawn, _)| *drawn == key) {
            fields.findings.error(at, format!("`{key}` is not for a script of a scenario"), *hint);
            continue;
        }
        if !known.contains_key(&key) {
            let hint = match nearest(&key, &words) {
                Some(near) => format!("did you mean `{near}`?"),
                None => "the keys are the flags of `satellite sim-server`, with underscores".to_owned(),
            };
            fields.findings.error(at, format!("unknown key `{key}` in `script`"), hint);
            continue;
        }
        let value = json(value.take());
        let alone = serde_json::Value::Object([(key.clone(), value.clone())].into_iter().collect());
        match serde_json::from_value::<Script>(alone) {
            Ok(_) => drop(said.insert(key, value)),
            Err(error) => {
                let hint = "the flag of this name tells more: `satellite sim-server --help`";
                fields.findings.error(value_at, format!("`{key}` cannot be read: {error}"), hint);
            }
        }
    }
    // What holds alone holds together.
    serde_json::from_value(serde_json::Value::Object(said)).unwrap_or_default()
}

fn json(value: ValueInner<'_>) -> serde_json::Value {
    match value {
        ValueInner::String(text) => text.into_owned().into(),
        ValueInner::Integer(number) => number.into(),
        ValueInner::Float(number) => number.into(),
        ValueInner::Boolean(flag) => flag.into(),
        ValueInner::Array(items) => items.into_iter().map(|mut item| json(item.take())).collect(),
        ValueInner::Table(table) => {
            let entry =
                |(key, mut value): (toml_span::value::Key<'_>, Value<'_>)| (key.name.into_owned(), json(value.take()));
            serde_json::Value::Object(table.into_iter().map(entry).collect())
        }
    }
}

fn load_of(fields: &mut Fields<'_, '_>) -> Option<Load> {
    let at = fields.at;
    if !fields.has("loop") {
        let hint = "write loop = \"open\" (so many calls a second) or loop = \"closed\" (so many callers)";
        fields.findings.error(at, "`loop` is missing", hint);
    }
    let open = fields.one_of("loop", &[("open", true), ("closed", false)]);
    let [callers_there, think_there, rate_there, limit_there] =
        ["callers", "think", "per_second", "in_flight_max"].map(|key| fields.has(key));
    let [callers, in_flight_max] =
        ["callers", "in_flight_max"].map(|key| at_most(fields, key).map(|count| count as usize));
    let think = spread(fields, "think");
    let per_second = above_zero(fields, "per_second");
    if let Some(rate) = per_second.filter(|rate| *rate > RATE_MAX) {
        let message = format!("{rate:.0} calls a second are too many");
        fields.findings.error(at, message, "a million is the most: make `per_second` smaller");
    }
    let skew = fields.number("skew").given().map_or(0.0, |skew| {
        if !(skew.value >= 0.0 && skew.value <= 10.0) {
            fields.findings.error(skew.span, "`skew` makes no sense here", "give 0 (even) to about 2 (very uneven)");
        }
        skew.value
    });
    let timeout = fields.positive("timeout").unwrap_or(Duration::from_secs(30));
    let mut stray = |there: bool, key: &str, of: &str| {
        if there {
            let hint = format!("leave it out, or write loop = \"{of}\"");
            fields.findings.error(at, format!("`{key}` is of a load whose loop is {of}"), hint);
        }
    };
    if open? {
        stray(callers_there, "callers", "closed");
        stray(think_there, "think", "closed");
        if !rate_there {
            fields.findings.error(at, "`per_second` is missing", "say how many calls there are: per_second = 100");
        }
        Some(Load::Open { per_second: per_second?, in_flight_max: in_flight_max.unwrap_or(1000), skew, timeout })
    } else {
        stray(rate_there, "per_second", "open");
        stray(limit_there, "in_flight_max", "open");
        if !callers_there {
            fields.findings.error(at, "`callers` is missing", "say how many there are: callers = 32");
        }
        Some(Load::Closed { callers: callers?, think: think.unwrap_or_default(), skew, timeout })
    }
}

#[derive(Default)]
struct Policies {
    policy: Policy,
    team_budget: TeamBudgetPolicy,
    start_permits: Option<usize>,
    connect_permits: Option<usize>,
}

fn put<T>(typed: Option<T>, meant: &mut T) {
    if let Some(typed) = typed {
        *meant = typed;
    }
}

fn policies(fields: &mut Fields<'_, '_>) -> Policies {
    let Policies { mut policy, mut team_budget, .. } = Policies::default();
    let Policy { restart, reconnect, health, remote, watchdog, idle, session, .. } = &mut policy;
    put(fields.count::<1, _>("max_crashes"), &mut restart.max_crashes);
    put(fields.positive("window"), &mut restart.window);
    put(fields.durations("delays"), &mut restart.delays);
    put(fields.duration("quick"), &mut restart.quick);
    put(fields.positive("handshake_timeout"), &mut session.handshake_timeout);
    put(fields.positive("request_timeout"), &mut session.request_timeout);
    put(fields.duration("terminate_grace"), &mut session.terminate_grace);
    let line_max = fields.bytes("line_max").given().and_then(|size| usize::try_from(size.value).ok());
    put(line_max, &mut session.line_max);
    put(fields.positive("silence"), &mut watchdog.silence);
    put(fields.positive("ping_timeout"), &mut watchdog.ping_timeout);
    put(fields.duration("idle"), &mut idle.idle);
    put(fields.positive("connect_timeout"), &mut remote.connect_timeout);
    put(fields.positive("reconnect_min"), &mut reconnect.backoff_min);
    put(fields.positive("reconnect_max"), &mut reconnect.backoff_max);
    put(fields.positive("health_interval"), &mut health.interval);
    put(fields.positive("health_timeout"), &mut health.timeout);
    put(fields.count::<1, _>("team_exits_max"), &mut team_budget.max_exits);
    let (start_permits, connect_permits) =
        (fields.count::<1, _>("start_permits"), fields.count::<1, _>("connect_permits"));
    // One that sleeps after a second of quiet must not be kept up for a minute.
    idle.grace = idle.grace.min(idle.idle);
    idle.sweep = idle.sweep.min(idle.idle.max(Duration::from_millis(100)));
    // Two limits that nobody can give here follow those that they include.
    session.request_timeout_max = session.request_timeout_max.max(session.request_timeout);
    remote.header_timeout = remote.header_timeout.max(remote.connect_timeout);
    if reconnect.backoff_min > reconnect.backoff_max {
        let message = "`reconnect_min` is longer than `reconnect_max`";
        fields.findings.error(fields.at, message, "give both; by default they are \"1s\" and \"3m\"");
    }
    if session.line_max < 1024 {
        fields.findings.error(fields.at, "`line_max` has no room for a message", "give at least \"1KiB\"");
    }
    Policies { policy, team_budget, start_permits, connect_permits }
}

/// A batch is as large as that of a satellite with a journal.
fn default_batch() -> BatchPolicy {
    BatchPolicy { batch_max: 2000, ..BatchPolicy::default() }
}

fn events(fields: &mut Fields<'_, '_>) -> BatchPolicy {
    let mut batch = default_batch();
    put(fields.count::<1, _>("queue_max"), &mut batch.queue_max);
    let batch_max = fields.count::<1, _>("batch_max");
    if batch_max.is_some_and(|batch_max| batch_max > batch.queue_max) {
        let message = "`batch_max` is larger than `queue_max`: a full batch could never be gathered";
        fields.findings.error(fields.at, message, "make `queue_max` at least as large; its default is 10000");
    }
    batch.batch_max = batch_max.unwrap_or(batch.batch_max).min(batch.queue_max);
    batch
}

fn fault(fields: &mut Fields<'_, '_>) -> Option<FaultRule> {
    let at = fields.at;
    if !fields.has("kind") {
        fields.findings.error(at, "a fault has no kind", "give it one: kind = \"crash\"");
    }
    let kind = fields.one_of("kind", &FAULTS);
    let [at_there, every_there, from_there, until_there] = ["at", "every", "from", "until"].map(|key| fields.has(key));
    let once = moment(fields, "at");
    let every = fields.positive("every");
    let from = moment(fields, "from").unwrap_or(Moment::Share(QUIET));
    let until = moment(fields, "until").unwrap_or(Moment::Share(0.75));
    let [share_there, teams_there] = ["share", "teams"].map(|key| fields.has(key));
    let (share, teams) = (portion(fields, "share"), portion(fields, "teams"));
    let lasts_there = fields.has("lasts");
    let lasts = spread(fields, "lasts");
    let kind = kind?;
    let name = fault_name(kind);

    let mut wrong = |message: String, hint: &str| fields.findings.error(at, message, hint);
    let when = match (at_there, every_there) {
        (true, false) => {
            if from_there || until_there {
                wrong("`from` and `until` are for a fault with `every`".to_owned(), "leave them out");
            }
            once.map(When::At)
        }
        (false, true) => every.map(|mean| When::Every { mean, from, until }),
        (true, true) => {
            wrong(
                format!("`{name}` has both `at` and `every`"),
                "`at` is for once, `every` for again and again: keep one",
            );
            None
        }
        (false, false) => {
            wrong(format!("`{name}` has no time"), "give at = \"40 %\" (once) or every = \"2s\" (again and again)");
            None
        }
    };
    let whom = match (share_there, teams_there) {
        (false, false) => Some(Whom::One),
        (true, true) => {
            wrong(
                format!("`{name}` has both `share` and `teams`"),
                "`share` is of instances, `teams` of teams: keep one",
            );
            None
        }
        _ if kind.befalls() == Befalls::Us => {
            wrong(format!("`{name}` befalls the satellite, of which there is one"), "leave `share` and `teams` out");
            None
        }
        (true, false) if kind.befalls() == Befalls::Team => {
            wrong(format!("`{name}` befalls teams"), "write `teams` instead of `share`");
            None
        }
        (true, false) => share.map(Whom::Share),
        (false, true) => teams.map(Whom::TeamsShare),
    };
    let healed = is_healed(kind);
    if lasts_there && !healed {
        wrong(format!("`{name}` is over as soon as it has been done"), "leave `lasts` out");
    }
    let lasts = match lasts {
        Some(lasts) => lasts,
        None if healed => Spread::Fixed(Duration::from_secs(5)),
        None => Spread::default(),
    };
    Some(FaultRule { kind, when: when?, whom: whom?, lasts })
}

fn limits(fields: &mut Fields<'_, '_>) -> Limits {
    let mut limits = Limits::default();
    put(above_zero(fields, "growth"), &mut limits.growth);
    put(fields.duration("recovery_slack"), &mut limits.recovery_slack);
    limits.neighbours = above_zero(fields, "neighbours");
    limits.flat = above_zero(fields, "flat");
    limits
}

/// A count from 1 to [`MANY_MAX`].
fn at_most(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<u32> {
    let at = fields.at;
    let count = fields.count::<1, u32>(key)?;
    if count > MANY_MAX {
        fields.findings.error(at, format!("`{key}` is too large"), "a million is the most");
        return None;
    }
    Some(count)
}

fn spread(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<Spread> {
    let typed = fields.text(key);
    let text = typed.given()?;
    match text.value.parse() {
        Ok(spread) => Some(spread),
        Err(why) => {
            fields.findings.error(text.span, format!("`{key}` {why}"), SPREADS);
            None
        }
    }
}

fn above_zero(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<f64> {
    let typed = fields.number(key);
    let number = typed.given()?;
    if number.value.is_finite() && number.value > 0.0 {
        return Some(number.value);
    }
    fields.findings.error(number.span, format!("`{key}` makes no sense here"), "give a number above 0");
    None
}

/// More than nothing, and all at most.
fn portion(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<f64> {
    let typed = fields.number(key);
    let number = typed.given()?;
    if number.value > 0.0 && number.value <= 1.0 {
        return Some(number.value);
    }
    fields.findings.error(
        number.span,
        format!("`{key}` is no share"),
        "give a number above 0, and 1 at most: a third is 0.333",
    );
    None
}

fn moment(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<Moment> {
    let typed = fields.text(key);
    let text = typed.given()?;
    let share = text.value.strip_suffix('%').map(|number| number.trim().parse::<f64>());
    let hint = "write a share of the run, such as \"40 %\", or a time after its start, such as \"90s\"";
    match share {
        Some(Ok(share)) if (0.0..=100.0).contains(&share) => return Some(Moment::Share(share / 100.0)),
        Some(_) => {}
        None => {
            if let Ok(after) = humantime::parse_duration(&text.value) {
                return Some(Moment::After(after));
            }
        }
    }
    fields.findings.error(text.span, format!("`{key}` is no moment of the run"), hint);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"
about = "A few."
seconds = 10
fleet = { instances = 10 }
servers = [{ name = "tools" }]
load = { loop = "open", per_second = 5 }
"#;

    /// Line, column, message and hint of each error.
    fn errors(text: &str) -> Vec<String> {
        let items = parse("test.toml", text).unwrap_err().items();
        items
            .into_iter()
            .map(|item| format!("{}:{}: {} ({})", item.line, item.column, item.message, item.hint))
            .collect()
    }

    #[test]
    fn those_that_are_built_in_can_be_read_and_are_found_by_name() {
        for (name, text) in SHIPPED {
            let scenario = load(name).unwrap_or_else(|errors| panic!("{name}: {:?}", errors.items()));
            assert_eq!(scenario.name, name);
            assert!(!scenario.faults.is_empty() && scenario.about.ends_with('.'), "{name}");
            assert!(text.contains("about"));
            scenario.paused().unwrap();
        }
    }

    #[test]
    fn every_kind_of_fault_has_a_name_and_one_scenario_has_them_all() {
        for kind in FaultKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), fault_name(kind));
        }
        let mixed: BTreeSet<_> = load("mixed").unwrap().faults.iter().map(|rule| rule.kind).collect();
        assert_eq!(mixed.len(), FaultKind::ALL.len());
    }

    #[test]
    fn what_a_file_does_not_say_has_a_default() {
        let scenario = parse("dir/small.toml", SMALL).unwrap();
        assert_eq!(scenario.name, "small");
        assert_eq!(scenario.fleet, FleetShape { instances: 10, teams: 1, users: 1 });
        let kind = &scenario.kinds[0];
        assert_eq!((kind.weight, kind.transport, kind.keep), (1, Transport::Stdio, Keep::AlwaysOn));
        assert!(kind.request_logging);
        assert_eq!(kind.script, Script::default());
        let timeout = Duration::from_secs(30);
        assert_eq!(scenario.load, Load::Open { per_second: 5.0, in_flight_max: 1000, skew: 0.0, timeout });
        assert_eq!(*scenario.policy, Policy::default());
        assert_eq!(scenario.batch.batch_max, 2000);
        assert_eq!(scenario.limits, Limits::default());
        assert!(scenario.faults.is_empty());
    }

    #[test]
    fn all_that_a_file_says_is_meant() {
        let text = r#"
about = "All."
seconds = 100
[fleet]
instances = 100
teams = 10
users = 2
[[servers]]
name = "a-1"
weight = 3
transport = "remote"
handshake = "exp 5ms"
call = "uniform 1ms 2ms"
keep = "listed"
request_logging = false
script = { tools = 7, call_delay = "3ms", jitter = 0.5, stderr_text = "x" }
[load]
loop = "closed"
callers = 3
think = "1s"
skew = 1
timeout = "4s"
[policy]
max_crashes = 9
window = "1m"
delays = ["1ms", "2ms"]
quick = "3s"
handshake_timeout = "4s"
request_timeout = "10m"
terminate_grace = "6s"
line_max = "1MiB"
silence = "7s"
ping_timeout = "8s"
idle = "9s"
connect_timeout = "1m"
reconnect_min = "2s"
reconnect_max = "3s"
health_interval = "4s"
health_timeout = "5s"
team_exits_max = 6
start_permits = 7
connect_permits = 8
[events]
queue_max = 500
[[faults]]
kind = "refused"
every = "2s"
from = "5s"
until = "50%"
share = 0.5
lasts = "exp 1s"
[[faults]]
kind = "team_panic"
at = "12.5 %"
teams = 0.1
[limits]
growth = 2
recovery_slack = "3s"
neighbours = 2.5
flat = 0.02
"#;
        let scenario = parse("all.toml", text).unwrap();
        let seconds = Duration::from_secs;
        assert_eq!(scenario.fleet, FleetShape { instances: 100, teams: 10, users: 2 });
        let kind = &scenario.kinds[0];
        assert_eq!(
            (kind.name.as_str(), kind.weight, kind.transport, kind.keep),
            ("a-1", 3, Transport::Remote, Keep::Listed)
        );
        assert_eq!((kind.handshake, kind.request_logging), (Spread::Exp(Duration::from_millis(5)), false));
        let script = Script {
            tools: 7,
            call_delay: Duration::from_millis(3),
            jitter: 0.5,
            stderr_text: Some("x".to_owned()),
            ..Script::default()
        };
        assert_eq!(kind.script, script);
        let load = Load::Closed { callers: 3, think: Spread::Fixed(seconds(1)), skew: 1.0, timeout: seconds(4) };
        assert_eq!(scenario.load, load);
        let Policy { restart, reconnect, health, remote, watchdog, idle, session, .. } = &*scenario.policy;
        assert_eq!((restart.max_crashes, restart.window, restart.quick), (9, seconds(60), seconds(3)));
        assert_eq!(restart.delays, [1, 2].map(Duration::from_millis));
        assert_eq!((session.handshake_timeout, session.request_timeout), (seconds(4), seconds(600)));
        assert_eq!(session.request_timeout_max, seconds(600), "what includes it follows");
        assert_eq!((session.terminate_grace, session.line_max), (seconds(6), 1 << 20));
        assert_eq!((watchdog.silence, watchdog.ping_timeout, idle.idle), (seconds(7), seconds(8), seconds(9)));
        assert_eq!((remote.connect_timeout, remote.header_timeout), (seconds(60), seconds(60)));
        assert_eq!((reconnect.backoff_min, reconnect.backoff_max), (seconds(2), seconds(3)));
        assert_eq!((health.interval, health.timeout), (seconds(4), seconds(5)));
        assert_eq!(scenario.team_budget.max_exits, 6);
        assert_eq!((scenario.start_permits, scenario.connect_permits), (Some(7), Some(8)));
        assert_eq!((scenario.batch.queue_max, scenario.batch.batch_max), (500, 500));
        let every = When::Every { mean: seconds(2), from: Moment::After(seconds(5)), until: Moment::Share(0.5) };
        let refused =
            FaultRule { kind: FaultKind::Refused, when: every, whom: Whom::Share(0.5), lasts: Spread::Exp(seconds(1)) };
        let panic = FaultRule {
            kind: FaultKind::TeamPanic,
            when: When::At(Moment::Share(0.125)),
            whom: Whom::TeamsShare(0.1),
            lasts: Spread::default(),
        };
        assert_eq!(scenario.faults, [refused, panic]);
        let limits = Limits { growth: 2.0, recovery_slack: seconds(3), neighbours: Some(2.5), flat: Some(0.02) };
        assert_eq!(scenario.limits, limits);
    }

    #[test]
    fn all_errors_are_told_at_once_each_with_its_place_and_what_to_do() {
        let text = r#"about = "Wrong."
seconds = 0
[fleet]
instances = 2
teams = 3
[[servers]]
name = "Tools!"
handshake = "sometimes"
transport = "pigeon"
script = { tool = 3, seed = 4, call_delay = 5 }
[load]
loop = "open"
callers = 4
per_second = -1
[policy]
max_crash = 3
[[faults]]
kind = "crush"
[[faults]]
kind = "crash"
at = "110 %"
lasts = "4s"
[[faults]]
kind = "sink_fails"
at = "10 %"
every = "1s"
share = 0.5
[limits]
growth = "much"
"#;
        insta::assert_snapshot!(errors(text).join("\n"), @r#"
        2:11: `seconds` is 0, which makes no sense here (give at least 1)
        3:2: 3 teams are more than 2 instances (each team has at least one instance)
        7:9: `Tools!` cannot be part of a server's name (use small letters, digits and hyphens)
        8:14: `handshake` is no distribution of durations (write "5ms", "uniform 1ms 10ms" (from, to), "exp 10ms" (mean) or "lognormal 10ms 2" (median, factor of one sigma))
        9:14: `pigeon` is no transport (one of "stdio", "remote")
        10:12: unknown key `tool` in `script` (did you mean `tools`?)
        10:22: `seed` is not for a script of a scenario (it is drawn from the seed of the run)
        10:45: `call_delay` cannot be read: invalid type: integer `5`, expected an unsigned duration string (the flag of this name tells more: `satellite sim-server --help`)
        11:2: `callers` is of a load whose loop is closed (leave it out, or write loop = "closed")
        14:14: `per_second` makes no sense here (give a number above 0)
        16:1: unknown key `max_crash` in `policy` (did you mean `max_crashes`?)
        18:9: `crush` is no kind (one of "crash", "exit_0", "crash_loop", "slow_handshake", "no_handshake", "hang", "slow_sigterm", "ignore_sigterm", "stderr_flood", "garbage", "huge", "stray_answers", "memory_growth", "unauthorized", "session_lost", "refused", "stream_cut", "worker_panic", "team_panic", "registry_panic", "batcher_panic", "sink_fails", "sink_panics")
        19:1: `crash` is over as soon as it has been done (leave `lasts` out)
        21:7: `at` is no moment of the run (write a share of the run, such as "40 %", or a time after its start, such as "90s")
        23:1: `sink_fails` has both `at` and `every` (`at` is for once, `every` for again and again: keep one)
        23:1: `sink_fails` befalls the satellite, of which there is one (leave `share` and `teams` out)
        29:11: `growth` must be a number, not a string (write it without quotes)
        "#);
    }

    #[test]
    fn what_is_missing_is_asked_for() {
        insta::assert_snapshot!(errors("").join("\n"), @r#"
        1:1: `about` is missing (say in a sentence what it shows: about = "…")
        1:1: `seconds` is missing (say how long there is load: seconds = 60)
        1:1: `fleet` is missing (say how many there are: [fleet] with instances and teams)
        1:1: `servers` is missing (describe at least one kind of server under [[servers]])
        1:1: `load` is missing (say who calls: [load] with loop = "open" or "closed")
        "#);
        let no_server = SMALL.replace(r#"[{ name = "tools" }]"#, "[]");
        insta::assert_snapshot!(errors(&no_server).join("\n"), @r#"
        1:1: there is no kind of server (describe at least one under [[servers]])
        "#);
    }

    #[test]
    fn a_fault_that_nobody_can_have_and_one_beyond_the_run_are_errors() {
        let text = format!(
            "{SMALL}
[[faults]]
kind = \"stream_cut\"
at = \"20 %\"
[[faults]]
kind = \"crash\"
at = \"10s\"
[[faults]]
kind = \"crash\"
every = \"1s\"
from = \"80 %\"
[[faults]]
kind = \"crash\"
every = \"1ns\"
"
        );
        insta::assert_snapshot!(errors(&text).join("\n"), @r#"
        8:1: there is no kind of server here that `stream_cut` could befall (add one with transport = "remote", or leave it out)
        11:1: `at` is beyond the run, which takes 10s (write it as a share of the run, such as "40 %")
        14:1: `from` is not before `until` (write it as a share of the run, such as "40 %")
        18:1: this is about 5500000000 faults, and a million is the most (make `every` longer, or the share smaller)
        "#);
    }

    #[test]
    fn more_than_a_machine_can_hold_is_an_error_and_not_tried() {
        let many = SMALL.replace("per_second = 5", "per_second = 1e12, in_flight_max = 2_000_000");
        assert_ne!(many, SMALL);
        insta::assert_snapshot!(errors(&many).join("\n"), @r"
        6:1: `in_flight_max` is too large (a million is the most)
        6:1: 1000000000000 calls a second are too many (a million is the most: make `per_second` smaller)
        ");
        let closed = SMALL.replace(r#"loop = "open", per_second = 5"#, r#"loop = "closed", callers = 4_000_000"#);
        assert_eq!(errors(&closed), ["6:1: `callers` is too large (a million is the most)"]);
        let text = "[fleet]\ninstances = 1_000_001\nteams = 1_000_001";
        assert!(errors(text).iter().any(|error| error.contains("`instances` is too large")), "{:?}", errors(text));
        let over =
            |instances| load("mixed").unwrap().with(Overrides { instances: Some(instances), ..Overrides::default() });
        let told = over(usize::MAX).unwrap_err().items().remove(0);
        assert_eq!(told.hint, "a million is the most");
        assert!(over(1_000_000).is_ok(), "{:?}", over(1_000_000).err());
    }

    #[test]
    fn a_file_that_is_not_there_and_one_that_is_no_toml_are_told() {
        let near = load("mixd").unwrap_err().items().remove(0);
        assert_eq!(near.hint, "did you mean `mixed`?");
        let far = load("/nowhere/at-all.toml").unwrap_err().items().remove(0);
        assert!(far.message.starts_with("cannot read the scenario: ") && far.hint.contains("storm, flap"), "{far:?}");
        assert_eq!(errors("about = \nseconds = 3").len(), 1);
    }

    #[test]
    fn the_command_line_overrides_the_file_and_is_checked_as_well() {
        let scenario = load("storm").unwrap();
        let few = Overrides { instances: Some(20), ..Overrides::default() };
        let fleet = scenario.clone().with(few).unwrap().fleet;
        assert_eq!((fleet.instances, fleet.teams), (20, 20), "no team is empty");
        let teams = Overrides { teams: Some(5), duration: Some(Duration::from_secs(7)), ..few };
        let with = scenario.clone().with(teams).unwrap();
        assert_eq!((with.fleet.teams, with.duration), (5, Duration::from_secs(7)));
        let told = |overrides| {
            let errors = scenario.clone().with(overrides).unwrap_err().items();
            errors.into_iter().map(|item| item.message).collect::<Vec<_>>()
        };
        assert_eq!(told(Overrides { teams: Some(30), ..few }), ["30 teams are more than 20 instances"]);
        assert_eq!(told(Overrides { instances: Some(0), ..few }), ["no instances are no fleet"]);
        assert_eq!(told(Overrides { duration: Some(Duration::ZERO), ..few }), ["a run takes some time"]);

        let late = parse("late.toml", &format!("{SMALL}\n[[faults]]\nkind = \"crash\"\nat = \"8s\"")).unwrap();
        let short = Overrides { duration: Some(Duration::from_secs(5)), ..Overrides::default() };
        let told = late.with(short).unwrap_err().items().remove(0);
        assert_eq!(told.message, "of `crash`: `at` is beyond the run, which takes 5s");
    }

    #[test]
    fn callers_that_never_wait_cannot_be_in_paused_time() {
        let closed = SMALL.replace(r#"loop = "open", per_second = 5"#, r#"loop = "closed", callers = 5"#);
        assert!(parse("closed.toml", &closed).unwrap().paused().is_err());
        let thinking = closed.replace("callers = 5", "callers = 5, think = \"1ms\"");
        parse("closed.toml", &thinking).unwrap().paused().unwrap();
    }

    #[test]
    fn instances_are_dealt_out_to_teams_and_users_in_turn() {
        let fleet = FleetShape { instances: 11, teams: 3, users: 2 };
        let mut all = BTreeSet::new();
        for team in (0..3).map(TeamNo) {
            let members: Vec<_> = fleet.members(team).collect();
            assert_eq!(members.len(), fleet.size_of(team));
            assert!(members.iter().all(|nth| fleet.team_of(*nth) == team));
            all.extend(members);
        }
        assert!(all.into_iter().eq(fleet.all()));
        let users: Vec<_> = fleet.members(TeamNo(0)).map(|nth| fleet.user_of(nth)).collect();
        assert_eq!(users, [0, 1, 0, 1]);
    }
}
