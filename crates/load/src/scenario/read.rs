//! Conversion of a TOML document to a scenario. All keys are checked, and all errors are reported at once with their
//! positions.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::policy::{BatchPolicy, Policy, TeamBudgetPolicy};
use mcp_satellite_actors::model::spec::ProcessLifetime;
use toml_span::Span;
use toml_span::value::{Value, ValueInner};

use super::{
    CallLoad, FAULT_FREE_SHARE, FAULTS, FaultRule, FaultTiming, FleetShape, MANY_MAX, RATE_MAX, RunMoment, Scenario,
    ScenarioLimits, ScenarioServer, VictimSelection, can_hit, fault_name, needs_healing, rule_errors,
};
use crate::random::{DurationDistribution, SPREADS};
use crate::types::{LoadTransport, VictimClass};
use mcp_satellite_config::errors::ConfigFindings;
use mcp_satellite_config::reader::{TableReader, nearest};
use mcp_satellite_sim::SimScript;

pub(super) fn scenario(name: String, tree: Value<'_>, findings: &mut ConfigFindings) -> Option<Scenario> {
    let mut file = TableReader::open(tree, Span::new(0, 0), "the scenario".to_owned(), findings)?;
    let missing = ["about", "seconds", "fleet", "servers", "load"].map(|key| !file.contains_key(key));
    let about = file.text("about").get().map(|about| about.value.clone());
    let seconds = file.count::<1, u64>("seconds");
    let fleet = file.section("fleet", fleet);
    let kinds = file.list("servers", server);
    let load = file.section("load", call_load);
    let policies = file.section("policy", |fields| Some(policies(fields)));
    let batch = file.section("events", |fields| Some(events(fields)));
    let faults: Vec<_> = file.list("faults", |fields| (fields.at, fault(fields)));
    let limits = file.section("limits", |fields| Some(limits(fields)));

    let at = Span::new(0, 0);
    let hints = [
        ("about", "describe the scenario in one sentence: about = \"…\""),
        ("seconds", "set the duration of the load: seconds = 60"),
        ("fleet", "set the size: [fleet] with instances and teams"),
        ("servers", "describe at least one kind of server under [[servers]]"),
        ("load", "describe the calls: [load] with loop = \"open\" or \"closed\""),
    ];
    for (key, hint) in hints.into_iter().zip(missing).filter_map(|(hint, missing)| missing.then_some(hint)) {
        file.findings.error(at, format!("`{key}` is missing"), hint);
    }
    if !missing[3] && kinds.is_empty() {
        file.findings.error(at, "`servers` is empty", "describe at least one under [[servers]]");
    }
    let mut names = BTreeSet::new();
    for (at, name) in kinds.iter().flatten().map(|(at, kind)| (at, &kind.name)) {
        if !names.insert(name.clone()) {
            file.findings.error(*at, format!("there are two kinds of server named `{name}`"), "rename one of them");
        }
    }
    let is_complete = kinds.iter().all(Option::is_some);
    let kinds: Vec<ScenarioServer> = kinds.into_iter().flatten().map(|(_, kind)| kind).collect();
    let duration = seconds.map(Duration::from_secs);
    for (at, rule) in faults.iter().filter_map(|(at, rule)| Some((at, rule.as_ref()?))) {
        if let Some(duration) = duration {
            for (message, hint) in rule_errors(rule, duration, fleet.as_ref()) {
                file.findings.error(*at, message, hint);
            }
        }
        if is_complete && !kinds.is_empty() && !kinds.iter().any(|kind| can_hit(rule.kind, kind.transport)) {
            let kind = fault_name(rule.kind);
            let message = format!("no kind of server in this scenario can have the fault `{kind}`");
            let transport = if rule.kind.victim_class() == VictimClass::Remote { "remote" } else { "stdio" };
            file.findings.error(*at, message, format!("add one with transport = \"{transport}\", or remove the fault"));
        }
    }
    file.close();
    let ScenarioPolicies { policy, team_budget, start_permits, connect_permits } = policies.unwrap_or_default();
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

fn fleet(fields: &mut TableReader<'_, '_>) -> Option<FleetShape> {
    let at = fields.at;
    if !fields.contains_key("instances") {
        fields.findings.error(at, "`instances` is missing", "set the number of servers: instances = 1000");
    }
    let [instances, teams, users] = ["instances", "teams", "users"].map(|key| read_bounded(fields, key));
    let (teams, users) = (teams.unwrap_or(1), users.unwrap_or(1));
    let instances = instances?;
    if teams > instances {
        let message = format!("{teams} teams are more than {instances} instances");
        fields.findings.error(at, message, "each team needs at least one instance");
    }
    Some(FleetShape { instances: instances as usize, teams: teams as usize, users: users as usize })
}

fn server(fields: &mut TableReader<'_, '_>) -> Option<(Span, ScenarioServer)> {
    let at = fields.at;
    if !fields.contains_key("name") {
        fields.findings.error(at, "a kind of server has no name", "add one: name = \"tools\"");
    }
    let name = fields.text("name").get().cloned();
    if let Some(name) = &name {
        let plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
        if name.value.is_empty() || !name.value.chars().all(plain) {
            let message = format!("`{}` cannot be part of a server's name", name.value);
            fields.findings.error(name.span, message, "use small letters, digits and hyphens");
        }
    }
    let transports = [("stdio", LoadTransport::Stdio), ("remote", LoadTransport::Remote)];
    let keeps = [
        ("listed", ProcessLifetime::Listed),
        ("always_on", ProcessLifetime::AlwaysOn),
        ("lazy", ProcessLifetime::Lazy),
    ];
    let kind = ScenarioServer {
        name: name.map(|name| name.value).unwrap_or_default(),
        weight: fields.count::<1, _>("weight").unwrap_or(1),
        transport: fields.read_choice("transport", &transports).unwrap_or(LoadTransport::Stdio),
        handshake: read_distribution(fields, "handshake").unwrap_or_default(),
        call: read_distribution(fields, "call").unwrap_or_default(),
        keep: fields.read_choice("keep", &keeps).unwrap_or(ProcessLifetime::AlwaysOn),
        request_logging: fields.flag("request_logging").get().is_none_or(|logging| logging.value),
        script: script(fields),
    };
    (!kind.name.is_empty()).then_some((at, kind))
}

// Keys of a script that a scenario must not set, each with a hint.
const FORBIDDEN_SCRIPT_KEYS: [(&str, &str); 7] = [
    ("handshake_delay", "set `handshake` of the server instead"),
    ("seed", "the seed of the run determines it"),
    ("exit_after", "exits are faults: describe them under [[faults]]"),
    ("exit_before_handshake", "exits are faults: describe them under [[faults]]"),
    ("exit_code", "exits are faults: describe them under [[faults]]"),
    ("exit_on_call", "exits are faults: describe them under [[faults]]"),
    ("exit_signal", "exits are faults: describe them under [[faults]]"),
];

// Each key is parsed separately, so that each error has its own position.
fn script(fields: &mut TableReader<'_, '_>) -> SimScript {
    let Some((name, mut value)) = fields.take("script") else { return SimScript::default() };
    let ValueInner::Table(table) = value.take() else {
        fields.findings.error(name.span, "`script` must be a table", "write it as a table: { key = value }");
        return SimScript::default();
    };
    let known = match serde_json::to_value(SimScript::default()) {
        Ok(serde_json::Value::Object(known)) => known,
        // Unreachable: a struct is serialized as an object.
        _ => serde_json::Map::new(),
    };
    let words: Vec<&str> = known.keys().map(String::as_str).collect();
    let mut values = serde_json::Map::new();
    for (key, mut value) in table {
        let (key, at, value_at) = (key.name.into_owned(), key.span, value.span);
        if let Some((_, hint)) = FORBIDDEN_SCRIPT_KEYS.iter().find(|(drawn, _)| *drawn == key) {
            fields.findings.error(at, format!("`{key}` is not permitted in the script of a scenario"), *hint);
            continue;
        }
        if !known.contains_key(&key) {
            let hint = match nearest(&key, &words) {
                Some(near) => format!("did you mean `{near}`?"),
                None => "the keys are the options of `satellite sim-server`, with underscores".to_owned(),
            };
            fields.findings.error(at, format!("unknown key `{key}` in `script`"), hint);
            continue;
        }
        let value = json(value.take());
        let alone = serde_json::Value::Object([(key.clone(), value.clone())].into_iter().collect());
        match serde_json::from_value::<SimScript>(alone) {
            Ok(_) => drop(values.insert(key, value)),
            Err(error) => {
                let hint = "see the option of this name in `satellite sim-server --help`";
                fields.findings.error(value_at, format!("`{key}` is invalid: {error}"), hint);
            }
        }
    }
    // The keys are independent, so they are valid together.
    serde_json::from_value(serde_json::Value::Object(values)).unwrap_or_default()
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

fn call_load(fields: &mut TableReader<'_, '_>) -> Option<CallLoad> {
    let at = fields.at;
    if !fields.contains_key("loop") {
        let hint = "set loop = \"open\" (a number of calls per second) or loop = \"closed\" (a number of callers)";
        fields.findings.error(at, "`loop` is missing", hint);
    }
    let open = fields.read_choice("loop", &[("open", true), ("closed", false)]);
    let [has_callers, has_think, has_rate, has_limit] =
        ["callers", "think", "per_second", "in_flight_max"].map(|key| fields.contains_key(key));
    let [callers, in_flight_max] =
        ["callers", "in_flight_max"].map(|key| read_bounded(fields, key).map(|count| count as usize));
    let think = read_distribution(fields, "think");
    let per_second = read_positive(fields, "per_second");
    if let Some(rate) = per_second.filter(|rate| *rate > RATE_MAX) {
        let message = format!("{rate:.0} calls per second are too many");
        fields.findings.error(at, message, "the maximum is one million: reduce `per_second`");
    }
    let skew = fields.number("skew").get().map_or(0.0, |skew| {
        if !(skew.value >= 0.0 && skew.value <= 10.0) {
            fields.findings.error(skew.span, "`skew` is out of range", "use 0 (even) to 10; 2 is very uneven");
        }
        skew.value
    });
    let timeout = fields.positive("timeout").unwrap_or(Duration::from_secs(30));
    let mut stray = |there: bool, key: &str, of: &str| {
        if there {
            let hint = format!("remove it, or set loop = \"{of}\"");
            fields.findings.error(at, format!("`{key}` requires loop = \"{of}\""), hint);
        }
    };
    if open? {
        stray(has_callers, "callers", "closed");
        stray(has_think, "think", "closed");
        if !has_rate {
            fields.findings.error(at, "`per_second` is missing", "set the number of calls: per_second = 100");
        }
        Some(CallLoad::Open { per_second: per_second?, in_flight_max: in_flight_max.unwrap_or(1000), skew, timeout })
    } else {
        stray(has_rate, "per_second", "open");
        stray(has_limit, "in_flight_max", "open");
        if !has_callers {
            fields.findings.error(at, "`callers` is missing", "set the number of callers: callers = 32");
        }
        Some(CallLoad::Closed { callers: callers?, think: think.unwrap_or_default(), skew, timeout })
    }
}

#[derive(Default)]
struct ScenarioPolicies {
    policy: Policy,
    team_budget: TeamBudgetPolicy,
    start_permits: Option<usize>,
    connect_permits: Option<usize>,
}

fn set_if_given<T>(typed: Option<T>, target: &mut T) {
    if let Some(typed) = typed {
        *target = typed;
    }
}

fn policies(fields: &mut TableReader<'_, '_>) -> ScenarioPolicies {
    let ScenarioPolicies { mut policy, mut team_budget, .. } = ScenarioPolicies::default();
    let Policy { restart, reconnect, health, remote, watchdog, idle, session, .. } = &mut policy;
    set_if_given(fields.count::<1, _>("max_crashes"), &mut restart.max_crashes);
    set_if_given(fields.positive("window"), &mut restart.window);
    set_if_given(fields.durations("delays"), &mut restart.delays);
    set_if_given(fields.duration("quick"), &mut restart.quick);
    set_if_given(fields.positive("handshake_timeout"), &mut session.handshake_timeout);
    set_if_given(fields.positive("request_timeout"), &mut session.request_timeout);
    set_if_given(fields.duration("terminate_grace"), &mut session.terminate_grace);
    let line_max = fields.bytes("line_max").get().and_then(|size| usize::try_from(size.value).ok());
    set_if_given(line_max, &mut session.line_max);
    set_if_given(fields.positive("silence"), &mut watchdog.silence);
    set_if_given(fields.positive("ping_timeout"), &mut watchdog.ping_timeout);
    set_if_given(fields.duration("idle"), &mut idle.idle);
    set_if_given(fields.positive("connect_timeout"), &mut remote.connect_timeout);
    set_if_given(fields.positive("reconnect_min"), &mut reconnect.backoff_min);
    set_if_given(fields.positive("reconnect_max"), &mut reconnect.backoff_max);
    set_if_given(fields.positive("health_interval"), &mut health.interval);
    set_if_given(fields.positive("health_timeout"), &mut health.timeout);
    set_if_given(fields.count::<1, _>("team_exits_max"), &mut team_budget.max_exits);
    let (start_permits, connect_permits) =
        (fields.count::<1, _>("start_permits"), fields.count::<1, _>("connect_permits"));
    // A short idle time requires a short grace and sweep interval.
    idle.grace = idle.grace.min(idle.idle);
    idle.sweep = idle.sweep.min(idle.idle.max(Duration::from_millis(100)));
    // These limits have no key; they must not be shorter than the times they include.
    session.request_timeout_max = session.request_timeout_max.max(session.request_timeout);
    remote.header_timeout = remote.header_timeout.max(remote.connect_timeout);
    if reconnect.backoff_min > reconnect.backoff_max {
        let message = "`reconnect_min` is longer than `reconnect_max`";
        fields.findings.error(fields.at, message, "give both; by default they are \"1s\" and \"3m\"");
    }
    if session.line_max < 1024 {
        fields.findings.error(fields.at, "`line_max` is too small for a message", "give at least \"1KiB\"");
    }
    ScenarioPolicies { policy, team_budget, start_permits, connect_permits }
}

// Same batch size as a satellite with a journal.
fn default_batch() -> BatchPolicy {
    BatchPolicy { batch_max: 2000, ..BatchPolicy::default() }
}

fn events(fields: &mut TableReader<'_, '_>) -> BatchPolicy {
    let mut batch = default_batch();
    set_if_given(fields.count::<1, _>("queue_max"), &mut batch.queue_max);
    let batch_max = fields.count::<1, _>("batch_max");
    if batch_max.is_some_and(|batch_max| batch_max > batch.queue_max) {
        let message = "`batch_max` is larger than `queue_max`, so a batch could never be full";
        fields.findings.error(fields.at, message, "make `queue_max` at least as large; its default is 10000");
    }
    batch.batch_max = batch_max.unwrap_or(batch.batch_max).min(batch.queue_max);
    batch
}

fn fault(fields: &mut TableReader<'_, '_>) -> Option<FaultRule> {
    let at = fields.at;
    if !fields.contains_key("kind") {
        fields.findings.error(at, "a fault has no kind", "add one: kind = \"crash\"");
    }
    let kind = fields.read_choice("kind", &FAULTS);
    let [has_at, has_every, has_from, has_until] = ["at", "every", "from", "until"].map(|key| fields.contains_key(key));
    let moment = read_moment(fields, "at");
    let every = fields.positive("every");
    let from = read_moment(fields, "from").unwrap_or(RunMoment::Share(FAULT_FREE_SHARE));
    let until = read_moment(fields, "until").unwrap_or(RunMoment::Share(0.75));
    let [has_share, has_teams] = ["share", "teams"].map(|key| fields.contains_key(key));
    let (share, teams) = (read_share(fields, "share"), read_share(fields, "teams"));
    let has_lasts = fields.contains_key("lasts");
    let lasts = read_distribution(fields, "lasts");
    let kind = kind?;
    let name = fault_name(kind);

    let mut report = |message: String, hint: &str| fields.findings.error(at, message, hint);
    let when = match (has_at, has_every) {
        (true, false) => {
            if has_from || has_until {
                report("`from` and `until` require `every`".to_owned(), "remove them");
            }
            moment.map(FaultTiming::At)
        }
        (false, true) => every.map(|mean| FaultTiming::Every { mean, from, until }),
        (true, true) => {
            report(
                format!("`{name}` has both `at` and `every`"),
                "`at` is for a single fault, `every` for repeated ones: remove one",
            );
            None
        }
        (false, false) => {
            report(format!("`{name}` has no time"), "set at = \"40 %\" (once) or every = \"2s\" (repeatedly)");
            None
        }
    };
    let victims = match (has_share, has_teams) {
        (false, false) => Some(VictimSelection::One),
        (true, true) => {
            report(
                format!("`{name}` has both `share` and `teams`"),
                "`share` selects instances, `teams` selects teams: remove one",
            );
            None
        }
        _ if kind.victim_class() == VictimClass::Satellite => {
            report(format!("`{name}` is a fault of the satellite itself"), "remove `share` and `teams`");
            None
        }
        (true, false) if kind.victim_class() == VictimClass::Team => {
            report(format!("`{name}` is a fault of teams"), "use `teams` instead of `share`");
            None
        }
        (true, false) => share.map(VictimSelection::Share),
        (false, true) => teams.map(VictimSelection::TeamsShare),
    };
    let healed = needs_healing(kind);
    if has_lasts && !healed {
        report(format!("the fault `{name}` has no duration"), "remove `lasts`");
    }
    let lasts = match lasts {
        Some(lasts) => lasts,
        None if healed => DurationDistribution::Fixed(Duration::from_secs(5)),
        None => DurationDistribution::default(),
    };
    Some(FaultRule { kind, timing: when?, victims: victims?, duration: lasts })
}

fn limits(fields: &mut TableReader<'_, '_>) -> ScenarioLimits {
    let mut limits = ScenarioLimits::default();
    set_if_given(read_positive(fields, "growth"), &mut limits.growth);
    set_if_given(fields.duration("recovery_slack"), &mut limits.recovery_slack);
    limits.neighbours = read_positive(fields, "neighbours");
    limits.flat = read_positive(fields, "flat");
    limits
}

// From 1 to `MANY_MAX`.
fn read_bounded(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<u32> {
    let at = fields.at;
    let count = fields.count::<1, u32>(key)?;
    if count > MANY_MAX {
        fields.findings.error(at, format!("`{key}` is too large"), "the maximum is one million");
        return None;
    }
    Some(count)
}

fn read_distribution(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<DurationDistribution> {
    let typed = fields.text(key);
    let text = typed.get()?;
    match text.value.parse() {
        Ok(spread) => Some(spread),
        Err(why) => {
            fields.findings.error(text.span, format!("`{key}` {why}"), SPREADS);
            None
        }
    }
}

fn read_positive(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<f64> {
    let typed = fields.number(key);
    let number = typed.get()?;
    if number.value.is_finite() && number.value > 0.0 {
        return Some(number.value);
    }
    fields.findings.error(number.span, format!("`{key}` is not a positive number"), "use a number above 0");
    None
}

// Greater than 0 and at most 1.
fn read_share(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<f64> {
    let typed = fields.number(key);
    let number = typed.get()?;
    if number.value > 0.0 && number.value <= 1.0 {
        return Some(number.value);
    }
    fields.findings.error(
        number.span,
        format!("`{key}` is not a share"),
        "use a number above 0 and at most 1: a third is 0.333",
    );
    None
}

fn read_moment(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<RunMoment> {
    let typed = fields.text(key);
    let text = typed.get()?;
    let share = text.value.strip_suffix('%').map(|number| number.trim().parse::<f64>());
    let hint = "write a share of the run, such as \"40 %\", or a time after its start, such as \"90s\"";
    match share {
        Some(Ok(share)) if (0.0..=100.0).contains(&share) => return Some(RunMoment::Share(share / 100.0)),
        Some(_) => {}
        None => {
            if let Ok(after) = humantime::parse_duration(&text.value) {
                return Some(RunMoment::After(after));
            }
        }
    }
    fields.findings.error(text.span, format!("`{key}` is not a moment of the run"), hint);
    None
}
