//! `satellite load`: reproducible runs, exit codes and reports.

use std::fs;
use std::os::unix::fs::symlink;

use nix::sys::signal::Signal;
use testkit::home::Home;
use testkit::wait::wait_for;

use crate::SATELLITE;

/// A scenario without faults.
const CALM: &str = r#"
about = "Twenty servers in <peace>."
seconds = 10

[fleet]
instances = 20
teams = 2

[[servers]]
name = "tools"
transport = "stdio"
handshake = "5ms"
call = "exp 5ms"

[load]
loop = "open"
per_second = 20
in_flight_max = 100
timeout = "5s"
"#;

#[test]
fn the_same_seed_gives_every_instance_the_same_order_of_events() {
    let home = Home::new(SATELLITE);
    // The limit for memory is disabled, because memory does not depend on the seed.
    let mixed = home.bare(&["load", "--print-scenario", "mixed"]).exits(0).stdout;
    fs::write(home.path().join("mixed.toml"), format!("{mixed}\n[limits]\ngrowth = 100.0\n")).unwrap();
    let run = |seed: &str, trace: &str| {
        let fleet = ["--scenario", "mixed.toml", "--instances", "100", "--seconds", "20", "--virtual-time", "--json"];
        let outcome = home.bare(&[&["load"], &fleet[..], &["--seed", seed, "--trace", trace]].concat()).exits(0);
        let found = outcome.json();
        assert_eq!(found["seed"].to_string(), seed);
        assert_eq!(found["mode"], "virtual");
        (found["order"].clone(), fs::read_to_string(home.path().join(trace)).unwrap())
    };
    let (first, second, other) = (run("7", "first"), run("7", "second"), run("8", "other"));
    assert_eq!(first.0, second.0);
    assert!(first.1 == second.1, "the traces differ");
    assert!(first.1.lines().count() > 1000, "the trace is too short");
    assert_ne!(first.0, other.0);
}

/// A scenario whose callers time out before most calls end. Virtual time makes it independent of the machine's load.
fn short_timeout_scenario() -> String {
    CALM.replace("timeout = \"5s\"", "timeout = \"1ms\"")
}

#[test]
fn a_violation_exits_with_1_and_prints_the_repeat_command() {
    let home = Home::new(SATELLITE);
    fs::write(home.path().join("impatient.toml"), short_timeout_scenario()).unwrap();
    let command = ["load", "--scenario", "impatient.toml", "--seconds", "3", "--seed", "5", "--virtual-time"];
    let outcome = home.bare(&[&command[..], &["--report", "page.html"]].concat()).exits(1);
    let repeat =
        "satellite load --scenario impatient.toml --instances 20 --teams 2 --seconds 3 --seed 5 --virtual-time";
    assert_eq!(outcome.stderr.lines().last().unwrap(), format!("repeat: {repeat}"), "{outcome:#?}");
    assert!(
        outcome.stdout.contains("VIOLATED") && outcome.stdout.contains("an online server can be called"),
        "{outcome:#?}"
    );
    let page = fs::read_to_string(home.path().join("page.html")).unwrap();
    assert!(page.contains("class=\"verdict violated\"") && page.contains(repeat), "{page}");
}

#[test]
fn a_run_without_violations_is_reported_as_table_page_and_json() {
    let home = Home::new(SATELLITE);
    fs::write(home.path().join("calm.toml"), CALM).unwrap();
    let command = ["load", "--scenario", "calm.toml", "--virtual-time"];
    let outcome = home.bare(&[&command[..], &["--report", "page.html"]].concat()).exits(0);
    assert!(outcome.stdout.contains("HELD") && outcome.stdout.contains("all online in"), "{outcome:#?}");
    assert!(outcome.stdout.contains("20 virtual servers in 2 teams"), "{outcome:#?}");
    let page = fs::read_to_string(home.path().join("page.html")).unwrap();
    assert!(page.contains("HELD") && page.contains("Twenty servers in &lt;peace&gt;.") && page.contains("<svg"));

    let found = home.bare(&[&command[..], &["--json"]].concat()).exits(0).json();
    assert_eq!(found["instances"], 20);
    assert_eq!(found["violations_in_all"], 0);
    assert!(found["calls"]["answered"].as_u64().unwrap() > 100, "{found:#}");
    let seed = found["seed"].to_string();
    assert!(found["repeat"].as_str().unwrap().ends_with(&format!("--seed {seed} --virtual-time")), "{found:#}");
}

#[test]
fn built_in_scenarios_are_listed_and_can_be_printed_as_a_template() {
    let home = Home::new(SATELLITE);
    let list = home.bare(&["load", "--list"]).exits(0).stdout;
    for name in ["storm", "flap", "hang", "mixed", "soak"] {
        assert!(list.lines().any(|line| line.trim_start().starts_with(name)), "{list}");
    }
    let text = home.bare(&["load", "--print-scenario", "flap"]).exits(0).stdout;
    fs::write(home.path().join("own.toml"), text).unwrap();
    let fleet = ["--instances", "20", "--teams", "2", "--seconds", "60", "--virtual-time", "--json"];
    let found = home.bare(&[&["load", "--scenario", "own.toml"], &fleet[..]].concat()).exits(0).json();
    assert_eq!(found["scenario"], "own");
    let outcome = home.bare(&["load", "--print-scenario", "nope"]).exits(2);
    assert!(outcome.stderr.contains("storm, flap, hang, mixed, soak"), "{outcome:#?}");
}

#[test]
fn invalid_arguments_are_refused_before_the_run() {
    let home = Home::new(SATELLITE);
    let refused = |args: &[&str], why: &str| {
        let outcome = home.bare(&[&["load"], args].concat()).exits(2);
        assert!(outcome.stderr.contains(why), "{outcome:#?}");
        assert_eq!(outcome.stdout, "");
    };
    refused(&["--scenario", "strom"], "storm");
    refused(&["--instances", "0"], "the fleet has no instances");
    refused(&["--instances", "3", "--teams", "4"], "4 teams are more than 3 instances");
    refused(&["--virtual-time", "--real"], "--real");
    refused(&["--virtual-time", "--gateway"], "--gateway");
    refused(&["--report", "no/such/directory.html"], "cannot write no/such/directory.html");
    fs::write(home.path().join("odd.toml"), CALM.replace("per_second", "per_minute")).unwrap();
    refused(&["--scenario", "odd.toml"], "per_minute");
}

/// Limits that tolerate a slow machine and the memory of the harness itself.
const TOLERANT_LIMITS: &str = "\n[limits]\ngrowth = 100.0\nrecovery_slack = \"30s\"\n";

#[test]
fn every_fault_works_on_real_processes_and_nothing_is_left() {
    every_fault_works(&[]);
}

#[test]
fn every_fault_works_through_the_gateway_and_nothing_is_left() {
    every_fault_works(&["--gateway"]);
}

/// Runs for half a minute.
fn every_fault_works(through: &[&str]) {
    let home = Home::new(SATELLITE);
    fs::write(home.path().join("faults.toml"), include_str!("every_fault.toml")).unwrap();
    let command = ["load", "--scenario", "faults.toml", "--seed", "1", "--real", "--json"];
    let found = home.bare(&[&command[..], through].concat()).exits(0).json();
    assert_eq!((&found["mode"], &found["gateway"]), (&"real".into(), &(!through.is_empty()).into()));
    assert_eq!(found["never_injected"], serde_json::json!([]), "{found:#}");
    assert!(found["calls"]["answered"].as_u64().unwrap() > 500, "{found:#}");
    assert!(found["children_cpu_ms"].as_f64().unwrap() > 0.0, "{found:#}");
    for kind in ["crash", "exit_0", "hang", "ignore_sigterm", "huge", "session_lost", "worker_panic"] {
        assert_eq!(found["outcomes"][kind]["recovered"], 1, "{kind}: {found:#}");
    }
    for what in ["servers", "tasks", "descriptors", "processes"] {
        assert_eq!(found["left"][what], 0, "{found:#}");
    }
    assert!(found["supervisors"]["n"].as_u64().unwrap() > 20, "{found:#}");
    assert!(found["registry"]["p99"].as_f64().unwrap() > 0.0, "{found:#}");
}

#[test]
fn a_signal_during_a_fault_heals_it() {
    let home = Home::new(SATELLITE);
    let ill = "\n[[faults]]\nkind = \"crash_loop\"\nat = \"1s\"\nshare = 0.5\nlasts = \"1h\"\n";
    let policy = "\n[policy]\nmax_crashes = 1000\ndelays = [\"100ms\"]\n";
    fs::write(home.path().join("ill.toml"), CALM.to_owned() + policy + TOLERANT_LIMITS + ill).unwrap();
    let command = ["load", "--scenario", "ill.toml", "--seconds", "40000", "--json", "--trace", "trace"];
    let mut running = home.start(home.command(&command));
    running.wait_stderr(|text| text.contains("load: calls and faults"));
    let trace = home.path().join("trace");
    // The trace is buffered; the crashing fleet fills the buffer.
    let has_begun = || fs::read_to_string(&trace).ok().filter(|text| text.contains("fault crash_loop"));
    wait_for("the fault to start", has_begun, || running.stderr());
    running.signal(Signal::SIGINT);
    let found = running.finish().exits(130).json();
    assert_eq!((&found["stopped"], &found["violations_in_all"]), (&true.into(), &0.into()), "{found:#}");
    assert!(fs::read_to_string(&trace).unwrap().contains("healing crash_loop"));
}

#[test]
fn one_signal_ends_a_run_early_with_a_report() {
    let home = Home::new(SATELLITE);
    fs::write(home.path().join("calm.toml"), CALM.to_owned() + TOLERANT_LIMITS).unwrap();
    fs::write(home.path().join("page.html"), "an older one").unwrap();
    let modes: [&[&str]; 3] = [&[], &["--real"], &["--virtual-time"]];
    for (mode, signal) in modes.into_iter().zip([Signal::SIGINT, Signal::SIGTERM, Signal::SIGINT]) {
        let command = ["load", "--scenario", "calm.toml", "--seconds", "40000000", "--json", "--report", "page.html"];
        let mut running = home.start(home.command(&[&command[..], mode].concat()));
        running.wait_stderr(|text| text.contains("load: calls and faults"));
        assert_eq!(fs::read_to_string(home.path().join("page.html")).unwrap(), "an older one");
        running.signal(signal);
        let found = running.finish().exits(130).json();
        assert_eq!((&found["stopped"], &found["violations_in_all"]), (&true.into(), &0.into()), "{found:#}");
        assert!(fs::read_to_string(home.path().join("page.html")).unwrap().contains("HELD so far"));
        assert!(!home.path().join("page.html.tmp").exists());
        fs::write(home.path().join("page.html"), "an older one").unwrap();
    }
}

#[test]
fn a_second_signal_ends_a_run_immediately_without_a_report() {
    let home = Home::new(SATELLITE);
    // A call takes an hour, longer than the test.
    let slow = CALM.replace("exp 5ms", "1h").replace("timeout = \"5s\"", "timeout = \"2h\"");
    fs::write(home.path().join("slow.toml"), slow + "\n[policy]\nrequest_timeout = \"2h\"\n").unwrap();
    let command = ["load", "--scenario", "slow.toml", "--seed", "3", "--seconds", "4000", "--report", "page.html"];
    let mut running = home.start(home.command(&command));
    running.wait_stderr(|text| text.contains("load: calls and faults"));
    running.signal(Signal::SIGINT);
    running.wait_stderr(|text| text.contains("A second signal ends the run at once"));
    running.signal(Signal::SIGINT);
    let outcome = running.finish().exits(130);
    assert!(outcome.stderr.ends_with("--teams 2 --seconds 4000 --seed 3\n"), "{outcome:#?}");
    assert_eq!(outcome.stdout, "");
    assert!(!home.path().join("page.html").exists() && !home.path().join("page.html.tmp").exists());
}

#[test]
fn a_closed_stdout_or_a_full_disk_does_not_hide_the_result() {
    let home = Home::new(SATELLITE);
    fs::write(home.path().join("impatient.toml"), short_timeout_scenario()).unwrap();
    fs::write(home.path().join("calm.toml"), CALM.to_owned() + TOLERANT_LIMITS).unwrap();
    let satellite = home.binary.display();
    let command = format!("{satellite} load --scenario impatient.toml --seconds 2 --seed 5 --virtual-time --json");
    let line = format!("{command} | true; exit ${{PIPESTATUS[0]}}");
    let outcome = home.shell(&format!("bash -c '{line}'")).finish().exits(1);
    assert!(outcome.stderr.contains("VIOLATED") && outcome.stderr.contains("repeat: satellite load"), "{outcome:#?}");

    for flag in ["--report", "--trace"] {
        let outcome = home.bare(&["load", "--scenario", "calm.toml", "--virtual-time", flag, "/dev/full"]).exits(4);
        assert!(
            outcome.stdout.contains("HELD")
                && outcome.stderr.contains("cannot write")
                && outcome.stderr.contains("/dev/full"),
            "{outcome:#?}"
        );
    }
    symlink("one", home.path().join("other")).unwrap();
    let both = ["load", "--scenario", "calm.toml", "--virtual-time", "--trace", "one", "--report", "other"];
    assert!(home.bare(&both).exits(2).stderr.contains("cannot both be written to"));
}

#[test]
fn a_fleet_that_cannot_come_online_fails_without_waiting() {
    let home = Home::new(SATELLITE);
    let never = CALM.replace("call = \"exp 5ms\"", "script = { handshake_never = true }");
    let policy = "\n[policy]\nmax_crashes = 1\nhandshake_timeout = \"50ms\"\ndelays = [\"0s\"]\n";
    fs::write(home.path().join("never.toml"), never + policy).unwrap();
    let outcome = home.bare(&["load", "--scenario", "never.toml", "--report", "page.html", "--seed", "2"]).exits(4);
    assert!(outcome.stderr.contains("0 of 20 servers were online after"), "{outcome:#?}");
    assert!(!outcome.stderr.contains("after 300"), "{outcome:#?}");
    assert!(outcome.stderr.contains("(permanently_failed)"), "{outcome:#?}");
    assert!(outcome.stderr.contains("repeat: satellite load --scenario never.toml"), "{outcome:#?}");
    assert!(!home.path().join("page.html").exists());
}

#[test]
fn injected_panics_are_not_printed_and_every_fault_is_in_the_trace() {
    let home = Home::new(SATELLITE);
    let faults = ["crash", "worker_panic", "team_panic", "registry_panic", "sink_panics"].map(|kind| {
        let share = if kind == "crash" { "share = 0.5\n" } else { "" };
        format!("\n[[faults]]\nkind = \"{kind}\"\nat = \"40 %\"\n{share}")
    });
    fs::write(home.path().join("panics.toml"), format!("{CALM}{}{TOLERANT_LIMITS}", faults.concat())).unwrap();
    let command = ["load", "--scenario", "panics.toml", "--virtual-time", "--seed", "4", "--trace", "trace", "--json"];
    let outcome = home.bare(&command).exits(0);
    assert!(!outcome.stderr.contains("asked to panic") && !outcome.stderr.contains("panicked"), "{outcome:#?}");
    let trace = fs::read_to_string(home.path().join("trace")).unwrap();
    let lines = |what: &str| trace.lines().filter(|line| line.ends_with(what)).count() as u64;
    assert_eq!(lines("fault crash"), outcome.json()["injected"]["crash"].as_u64().unwrap());
    assert_eq!((lines("fault team_panic"), lines("fault sink_panics"), lines("healing sink_panics")), (1, 1, 1));
}
