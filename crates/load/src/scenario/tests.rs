use std::collections::BTreeSet;

use super::*;

const SMALL: &str = r#"
about = "A few."
seconds = 10
fleet = { instances = 10 }
servers = [{ name = "tools" }]
load = { loop = "open", per_second = 5 }
"#;

fn errors(text: &str) -> Vec<String> {
    let items = parse("test.toml", text).unwrap_err().items();
    items.into_iter().map(|item| format!("{}:{}: {} ({})", item.line, item.column, item.message, item.hint)).collect()
}

#[test]
fn built_in_scenarios_are_valid_and_found_by_name() {
    for (name, text) in SHIPPED {
        let scenario = load(name).unwrap_or_else(|errors| panic!("{name}: {:?}", errors.items()));
        assert_eq!(scenario.name, name);
        assert!(!scenario.faults.is_empty() && scenario.about.ends_with('.'), "{name}");
        assert!(text.contains("about"));
        scenario.check_virtual_time().unwrap();
    }
}

#[test]
fn every_kind_of_fault_has_a_name_and_occurs_in_one_scenario() {
    for &kind in FaultKind::ALL {
        assert_eq!(serde_json::to_value(kind).unwrap(), fault_name(kind));
    }
    let mixed: BTreeSet<_> = load("mixed").unwrap().faults.iter().map(|rule| rule.kind).collect();
    assert_eq!(mixed.len(), FaultKind::ALL.len());
}

#[test]
fn missing_keys_have_defaults() {
    let scenario = parse("dir/small.toml", SMALL).unwrap();
    assert_eq!(scenario.name, "small");
    assert_eq!(scenario.fleet, FleetShape { instances: 10, teams: 1, users: 1 });
    let kind = &scenario.kinds[0];
    assert_eq!((kind.weight, kind.transport, kind.keep), (1, LoadTransport::Stdio, ProcessLifetime::AlwaysOn));
    assert!(kind.request_logging);
    assert_eq!(kind.script, SimScript::default());
    let timeout = Duration::from_secs(30);
    assert_eq!(scenario.load, CallLoad::Open { per_second: 5.0, in_flight_max: 1000, skew: 0.0, timeout });
    assert_eq!(*scenario.policy, Policy::default());
    assert_eq!(scenario.batch.batch_max, 2000);
    assert_eq!(scenario.limits, ScenarioLimits::default());
    assert!(scenario.faults.is_empty());
}

#[test]
fn every_key_of_a_file_is_read() {
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
        ("a-1", 3, LoadTransport::Remote, ProcessLifetime::Listed)
    );
    assert_eq!((kind.handshake, kind.request_logging), (DurationDistribution::Exp(Duration::from_millis(5)), false));
    let script = SimScript {
        tools: 7,
        call_delay: Duration::from_millis(3),
        jitter: 0.5,
        stderr_text: Some("x".to_owned()),
        ..SimScript::default()
    };
    assert_eq!(kind.script, script);
    let load =
        CallLoad::Closed { callers: 3, think: DurationDistribution::Fixed(seconds(1)), skew: 1.0, timeout: seconds(4) };
    assert_eq!(scenario.load, load);
    let Policy { restart, reconnect, health, remote, watchdog, idle, session, .. } = &*scenario.policy;
    assert_eq!((restart.max_crashes, restart.window, restart.quick), (9, seconds(60), seconds(3)));
    assert_eq!(restart.delays, [1, 2].map(Duration::from_millis));
    assert_eq!((session.handshake_timeout, session.request_timeout), (seconds(4), seconds(600)));
    assert_eq!(session.request_timeout_max, seconds(600), "the maximum must follow `request_timeout`");
    assert_eq!((session.terminate_grace, session.line_max), (seconds(6), 1 << 20));
    assert_eq!((watchdog.silence, watchdog.ping_timeout, idle.idle), (seconds(7), seconds(8), seconds(9)));
    assert_eq!((remote.connect_timeout, remote.header_timeout), (seconds(60), seconds(60)));
    assert_eq!((reconnect.backoff_min, reconnect.backoff_max), (seconds(2), seconds(3)));
    assert_eq!((health.interval, health.timeout), (seconds(4), seconds(5)));
    assert_eq!(scenario.team_budget.max_exits, 6);
    assert_eq!((scenario.start_permits, scenario.connect_permits), (Some(7), Some(8)));
    assert_eq!((scenario.batch.queue_max, scenario.batch.batch_max), (500, 500));
    let every =
        FaultTiming::Every { mean: seconds(2), from: RunMoment::After(seconds(5)), until: RunMoment::Share(0.5) };
    let refused = FaultRule {
        kind: FaultKind::Refused,
        timing: every,
        victims: VictimSelection::Share(0.5),
        duration: DurationDistribution::Exp(seconds(1)),
    };
    let panic = FaultRule {
        kind: FaultKind::TeamPanic,
        timing: FaultTiming::At(RunMoment::Share(0.125)),
        victims: VictimSelection::TeamsShare(0.1),
        duration: DurationDistribution::default(),
    };
    assert_eq!(scenario.faults, [refused, panic]);
    let limits = ScenarioLimits { growth: 2.0, recovery_slack: seconds(3), neighbours: Some(2.5), flat: Some(0.02) };
    assert_eq!(scenario.limits, limits);
}

#[test]
fn all_errors_are_reported_with_position_and_hint() {
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
    2:11: `seconds` is 0, which is too small (give at least 1)
    3:2: 3 teams are more than 2 instances (each team needs at least one instance)
    7:9: `Tools!` cannot be part of a server's name (use small letters, digits and hyphens)
    8:14: `handshake` is not a distribution of durations (use "5ms", "uniform 1ms 10ms" (from, to), "exp 10ms" (mean) or "lognormal 10ms 2" (median, factor of one standard deviation))
    9:14: `pigeon` is not a valid value for `transport` (use one of "stdio", "remote")
    10:12: unknown key `tool` in `script` (did you mean `tools`?)
    10:22: `seed` is not permitted in the script of a scenario (the seed of the run determines it)
    10:45: `call_delay` is invalid: invalid type: integer `5`, expected an unsigned duration string (see the option of this name in `satellite sim-server --help`)
    11:2: `callers` requires loop = "closed" (remove it, or set loop = "closed")
    14:14: `per_second` is not a positive number (use a number above 0)
    16:1: unknown key `max_crash` in `policy` (did you mean `max_crashes`?)
    18:9: `crush` is not a valid value for `kind` (use one of "crash", "exit_0", "crash_loop", "slow_handshake", "no_handshake", "hang", "slow_sigterm", "ignore_sigterm", "stderr_flood", "garbage", "huge", "stray_answers", "memory_growth", "unauthorized", "session_lost", "refused", "stream_cut", "worker_panic", "team_panic", "registry_panic", "batcher_panic", "sink_fails", "sink_panics")
    19:1: the fault `crash` has no duration (remove `lasts`)
    21:7: `at` is not a moment of the run (write a share of the run, such as "40 %", or a time after its start, such as "90s")
    23:1: `sink_fails` has both `at` and `every` (`at` is for a single fault, `every` for repeated ones: remove one)
    23:1: `sink_fails` is a fault of the satellite itself (remove `share` and `teams`)
    29:11: `growth` must be a number, not a string (write it without quotes)
    "#);
}

#[test]
fn missing_required_keys_are_reported() {
    insta::assert_snapshot!(errors("").join("\n"), @r#"
    1:1: `about` is missing (describe the scenario in one sentence: about = "…")
    1:1: `seconds` is missing (set the duration of the load: seconds = 60)
    1:1: `fleet` is missing (set the size: [fleet] with instances and teams)
    1:1: `servers` is missing (describe at least one kind of server under [[servers]])
    1:1: `load` is missing (describe the calls: [load] with loop = "open" or "closed")
    "#);
    let no_server = SMALL.replace(r#"[{ name = "tools" }]"#, "[]");
    insta::assert_snapshot!(errors(&no_server).join("\n"), @r#"
    1:1: `servers` is empty (describe at least one under [[servers]])
    "#);
}

#[test]
fn faults_without_victims_or_beyond_the_run_are_errors() {
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
    8:1: no kind of server in this scenario can have the fault `stream_cut` (add one with transport = "remote", or remove the fault)
    11:1: `at` is beyond the run, which takes 10s (write it as a share of the run, such as "40 %")
    14:1: `from` is not before `until` (write it as a share of the run, such as "40 %")
    18:1: the rule results in about 5500000000 faults; the maximum is one million (increase `every`, or reduce the share)
    "#);
}

#[test]
fn values_beyond_the_maximum_are_errors() {
    let many = SMALL.replace("per_second = 5", "per_second = 1e12, in_flight_max = 2_000_000");
    assert_ne!(many, SMALL);
    insta::assert_snapshot!(errors(&many).join("\n"), @r"
    6:1: `in_flight_max` is too large (the maximum is one million)
    6:1: 1000000000000 calls per second are too many (the maximum is one million: reduce `per_second`)
    ");
    let closed = SMALL.replace(r#"loop = "open", per_second = 5"#, r#"loop = "closed", callers = 4_000_000"#);
    assert_eq!(errors(&closed), ["6:1: `callers` is too large (the maximum is one million)"]);
    let text = "[fleet]\ninstances = 1_000_001\nteams = 1_000_001";
    assert!(errors(text).iter().any(|error| error.contains("`instances` is too large")), "{:?}", errors(text));
    let over = |instances| {
        load("mixed")
            .unwrap()
            .with_overrides(ScenarioOverrides { instances: Some(instances), ..ScenarioOverrides::default() })
    };
    let told = over(usize::MAX).unwrap_err().items().remove(0);
    assert_eq!(told.hint, "the maximum is one million");
    assert!(over(1_000_000).is_ok(), "{:?}", over(1_000_000).err());
}

#[test]
fn a_missing_file_and_invalid_toml_are_errors() {
    let near = load("mixd").unwrap_err().items().remove(0);
    assert_eq!(near.hint, "did you mean `mixed`?");
    let far = load("/nowhere/at-all.toml").unwrap_err().items().remove(0);
    assert!(far.message.starts_with("cannot read the scenario: ") && far.hint.contains("storm, flap"), "{far:?}");
    assert_eq!(errors("about = \nseconds = 3").len(), 1);
}

#[test]
fn the_command_line_overrides_the_file_and_is_validated() {
    let scenario = load("storm").unwrap();
    let few = ScenarioOverrides { instances: Some(20), ..ScenarioOverrides::default() };
    let fleet = scenario.clone().with_overrides(few).unwrap().fleet;
    assert_eq!((fleet.instances, fleet.teams), (20, 20), "teams must not be empty");
    let teams = ScenarioOverrides { teams: Some(5), duration: Some(Duration::from_secs(7)), ..few };
    let with = scenario.clone().with_overrides(teams).unwrap();
    assert_eq!((with.fleet.teams, with.duration), (5, Duration::from_secs(7)));
    let told = |overrides| {
        let errors = scenario.clone().with_overrides(overrides).unwrap_err().items();
        errors.into_iter().map(|item| item.message).collect::<Vec<_>>()
    };
    assert_eq!(told(ScenarioOverrides { teams: Some(30), ..few }), ["30 teams are more than 20 instances"]);
    assert_eq!(told(ScenarioOverrides { instances: Some(0), ..few }), ["the fleet has no instances"]);
    assert_eq!(told(ScenarioOverrides { duration: Some(Duration::ZERO), ..few }), ["the duration of the run is 0"]);

    let late = parse("late.toml", &format!("{SMALL}\n[[faults]]\nkind = \"crash\"\nat = \"8s\"")).unwrap();
    let short = ScenarioOverrides { duration: Some(Duration::from_secs(5)), ..ScenarioOverrides::default() };
    let told = late.with_overrides(short).unwrap_err().items().remove(0);
    assert_eq!(told.message, "fault `crash`: `at` is beyond the run, which takes 5s");
}

#[test]
fn callers_without_think_time_are_rejected_in_virtual_time() {
    let closed = SMALL.replace(r#"loop = "open", per_second = 5"#, r#"loop = "closed", callers = 5"#);
    assert!(parse("closed.toml", &closed).unwrap().check_virtual_time().is_err());
    let thinking = closed.replace("callers = 5", "callers = 5, think = \"1ms\"");
    parse("closed.toml", &thinking).unwrap().check_virtual_time().unwrap();
}

#[test]
fn instances_are_distributed_to_teams_and_users_in_turn() {
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
