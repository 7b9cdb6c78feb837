//! The load harness as a command: the same seed is the same run, a broken promise is exit 1 and the command that repeats
//! it, and its reports are there.

use std::fs;

use super::support::Home;

/// Whom nothing befalls.
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
fn the_same_seed_is_the_same_order_of_events_for_every_instance() {
    let home = Home::new();
    // Memory is the machine's, and not what a seed decides.
    let mixed = home.bare(&["load", "--print-scenario", "mixed"]).exits(0).stdout;
    fs::write(home.path().join("mixed.toml"), format!("{mixed}\n[limits]\ngrowth = 100.0\n")).unwrap();
    let run = |seed: &str, trace: &str| {
        let fleet = ["--scenario", "mixed.toml", "--instances", "300", "--seconds", "30", "--virtual-time", "--json"];
        let outcome = home.bare(&[&["load"], &fleet[..], &["--seed", seed, "--trace", trace]].concat()).exits(0);
        let found = outcome.json();
        assert_eq!(found["seed"].to_string(), seed);
        assert_eq!(found["mode"], "virtual");
        (found["order"].clone(), fs::read_to_string(home.path().join(trace)).unwrap())
    };
    let (first, second, other) = (run("7", "first"), run("7", "second"), run("8", "other"));
    assert_eq!(first.0, second.0);
    assert!(first.1 == second.1, "the traces differ");
    assert!(first.1.lines().count() > 1000, "something has happened");
    assert_ne!(first.0, other.0);
}

#[test]
fn a_promise_that_is_broken_is_exit_1_and_ends_with_the_command_that_repeats_it() {
    let home = Home::new();
    // No fleet needs a hundredth of the memory that it needed before.
    let scenario = home.path().join("mean.toml");
    fs::write(&scenario, format!("{CALM}\n[limits]\ngrowth = 0.01\n")).unwrap();
    let outcome = home
        .bare(&[
            "load",
            "--scenario",
            "mean.toml",
            "--instances",
            "3000",
            "--seconds",
            "3",
            "--seed",
            "5",
            "--report",
            "page.html",
        ])
        .exits(1);
    let repeat = "satellite load --scenario mean.toml --instances 3000 --teams 2 --seconds 3 --seed 5";
    assert_eq!(outcome.stderr.lines().last().unwrap(), format!("repeat: {repeat}"), "{outcome:#?}");
    assert!(outcome.stdout.contains("BROKE") && outcome.stdout.contains("memory is back"), "{outcome:#?}");
    let page = fs::read_to_string(home.path().join("page.html")).unwrap();
    assert!(page.contains("class=\"verdict broke\"") && page.contains(repeat), "{page}");
}

#[test]
fn a_run_that_held_says_so_in_a_table_a_page_and_json() {
    let home = Home::new();
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
fn the_scenarios_that_are_built_in_are_listed_and_begin_ones_own() {
    let home = Home::new();
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
fn what_cannot_be_run_is_refused_before_anything_starts() {
    let home = Home::new();
    let refused = |args: &[&str], why: &str| {
        let outcome = home.bare(&[&["load"], args].concat()).exits(2);
        assert!(outcome.stderr.contains(why), "{outcome:#?}");
        assert_eq!(outcome.stdout, "");
    };
    refused(&["--scenario", "strom"], "storm");
    refused(&["--instances", "0"], "no fleet");
    refused(&["--instances", "3", "--teams", "4"], "4 teams are more than 3 instances");
    refused(&["--virtual-time", "--real"], "--real");
    refused(&["--virtual-time", "--gateway"], "--gateway");
    refused(&["--report", "no/such/directory.html"], "cannot write no/such/directory.html");
    fs::write(home.path().join("odd.toml"), CALM.replace("per_second", "per_minute")).unwrap();
    refused(&["--scenario", "odd.toml"], "per_minute");
}
