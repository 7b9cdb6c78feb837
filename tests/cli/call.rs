//! `satellite call`: one tool call, and the exit codes that scripts rely on.

use serde_json::json;
use testkit::home::{Home, Satellite, seq};

use crate::SATELLITE;

fn with_servers<'a>(home: &'a Home, servers: &[(&str, &[&str])]) -> Satellite<'a> {
    let config = home.servers("satellite.toml", servers);
    home.run(&["--config", config.to_str().unwrap()])
}

fn two_teams(home: &Home) -> Satellite<'_> {
    let config = home.write("satellite.toml", include_str!("../fixtures/cli/two_teams.toml"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();
    satellite
}

#[test]
fn the_result_is_printed_unchanged() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let outcome = home.satellite(&["call", "notes", "add", r#"{"a": 19, "b": 23}"#]).exits(0);
    assert_eq!(
        outcome.json(),
        json!({"content": [{"type": "text", "text": "42"}], "structuredContent": {"result": 42}})
    );
    assert_eq!(outcome.stderr, "");
    let outcome = home.satellite(&["call", "notes-acme-alice-notes", "echo", r#"{"text": "naïve 🛰"}"#]).exits(0);
    assert_eq!(outcome.json()["structuredContent"]["text"], "naïve 🛰");
    home.satellite(&["call", "notes", "echo"]).exits(0);
    satellite.terminate().exits(0);
}

#[test]
fn a_large_result_is_printed_completely() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let outcome = home.satellite(&["call", "notes", "big", r#"{"bytes": 4000000}"#]).exits(0);
    assert_eq!(outcome.json()["content"][0]["text"].as_str().unwrap().len(), 4_000_000);
    satellite.terminate().exits(0);
}

#[test]
fn a_failed_tool_exits_with_1_and_its_result_is_printed() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let outcome = home.satellite(&["call", "notes", "tool_error", r#"{"message": "no such note"}"#]).exits(1);
    assert_eq!(outcome.json()["isError"], true);
    assert!(outcome.stdout.contains("no such note"), "{outcome:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_server_error_exits_with_1_and_is_printed_to_stderr() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let outcome = home.satellite(&["call", "notes", "fail", r#"{"message": "disk full"}"#]).exits(1);
    assert!(outcome.stderr.contains("-32603") && outcome.stderr.contains("disk full"), "{outcome:#?}");
    assert_eq!(outcome.stdout, "");
    let outcome = home.satellite(&["call", "notes", "no_such_tool"]).exits(1);
    assert!(outcome.stderr.contains("no_such_tool"), "{outcome:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_crash_during_a_call_exits_with_1_and_states_the_exit() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let outcome = home.satellite(&["call", "notes", "crash", r#"{"code": 7}"#]).exits(1);
    assert!(outcome.stderr.contains("terminated: exited with code 7"), "{outcome:#?}");
    home.wait_row("notes", "waiting for its restart", |row| row["exits_in_window"] == 1);
    // The next call waits for the restart.
    home.satellite(&["call", "notes", "echo"]).exits(0);
    satellite.terminate().exits(0);
}

#[test]
fn a_call_right_after_a_crash_waits_for_the_next_run() {
    let home = Home::new(SATELLITE);
    let servers = std::fs::read_to_string(home.servers("servers.toml", &[("notes", &[])])).unwrap();
    let policy = "[policy.restart]\nmax_crashes = 1000\ndelays = [\"1ms\"]\n[policy.team]\nmax_exits = 1000\n";
    let config = home.write("satellite.toml", &format!("{policy}{servers}"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    for _ in 0..40 {
        home.satellite(&["call", "notes", "crash"]).exits(1);
        home.satellite(&["call", "notes", "echo"]).exits(0);
    }
    satellite.terminate().exits(0);
}

#[test]
fn bad_input_exits_with_2_and_reaches_no_server() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    home.wait_online("notes");
    for (args, said) in [
        (&["call", "notes", "echo", "{not json"][..], "not JSON"),
        (&["call", "notes", "echo", "[1, 2]"], "JSON object"),
        (&["call", "notes", "echo", "42"], "JSON object"),
        (&["call", "nowhere", "echo"], "no server `nowhere`"),
        (&["call", "notes", "echo", "--timeout", "soon"], "--timeout"),
        (&["call", "notes"], "<TOOL>"),
    ] {
        let outcome = home.satellite(args).exits(2);
        assert!(outcome.stderr.contains(said), "{said:?}: {outcome:#?}");
        assert_eq!(outcome.stdout, "");
    }
    assert_eq!(home.row("notes").unwrap()["calls"], 0);
    satellite.terminate().exits(0);
}

#[test]
fn an_ambiguous_slug_is_rejected_until_team_and_user_select_one() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let outcome = home.satellite(&["call", "notes", "echo"]).exits(2);
    for name in ["notes-acme-alice-n1", "notes-acme-bob-n1", "notes-globex-alice-g1"] {
        assert!(outcome.stderr.contains(name), "{outcome:#?}");
    }
    home.satellite(&["call", "notes", "echo", "--user", "alice"]).exits(2);
    for (selector, called) in [
        (&["--user", "bob"][..], "notes-acme-bob-n1"),
        (&["--user", "user_bob"], "notes-acme-bob-n1"),
        (&["--team", "globex"], "notes-globex-alice-g1"),
        (&["--team", "team_acme", "--user", "alice"], "notes-acme-alice-n1"),
    ] {
        let before = seq(home.events().last().unwrap());
        home.satellite(&[&["call", "notes", "echo"], selector].concat()).exits(0);
        let event = home.wait_event(before, "mcp.tool.executed", |_| true);
        assert_eq!(event["data"]["process_id"], called);
    }
    home.satellite(&["call", "notes-acme-bob-n1", "echo"]).exits(0);
    satellite.terminate().exits(0);
}

#[test]
fn an_instance_of_another_user_is_reported_as_unknown_and_logged() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let of_nobody = home.satellite(&["call", "no-such-server", "echo", "--user", "bob"]).exits(2);
    for (name, selector) in [("files", ["--user", "bob"]), ("notes-acme-bob-n1", ["--team", "globex"])] {
        let outcome = home.satellite(&[&["call", name, "echo"], selector.as_slice()].concat()).exits(2);
        assert_eq!(outcome.stderr.replace(name, "NAME"), of_nobody.stderr.replace("no-such-server", "NAME"));
    }
    for verb in ["stop", "start", "restart"] {
        home.satellite(&[verb, "files", "--user", "bob"]).exits(2);
    }
    let log = satellite.log();
    let logged = |server: &str| log.iter().filter(|line| line["level"] == "WARN" && line["server"] == server).count();
    assert_eq!((logged("files"), logged("notes-acme-bob-n1"), logged("no-such-server")), (4, 1, 0), "{log:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_call_that_times_out_exits_with_1_and_is_cancelled() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let outcome = home.satellite(&["call", "notes", "sleep", r#"{"ms": 600000}"#, "--timeout", "300ms"]).exits(1);
    assert!(outcome.stderr.contains("no answer within 0."), "{outcome:#?}");
    let received = home.satellite(&["call", "notes", "received"]).exits(0).json();
    assert_eq!(received["structuredContent"]["cancelled"].as_array().unwrap().len(), 1, "{received:#}");
    let row = home.row("notes").unwrap();
    assert_eq!((&row["status"], &row["errors"], &row["calls_in_flight"]), (&"online".into(), &1.into(), &0.into()));
    satellite.terminate().exits(0);
}

#[test]
fn an_interrupted_caller_cancels_its_call() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    home.wait_online("notes");
    let mut calling = home.background(&["call", "notes", "sleep", r#"{"ms": 600000}"#, "--timeout", "10m"]);
    home.wait_row("notes", "busy", |row| row["calls_in_flight"] == 1);
    calling.signal(nix::sys::signal::Signal::SIGINT);
    home.wait_row("notes", "idle", |row| row["calls_in_flight"] == 0);
    let received = home.satellite(&["call", "notes", "received"]).exits(0).json();
    assert_eq!(received["structuredContent"]["cancelled"].as_array().unwrap().len(), 1, "{received:#}");
    satellite.terminate().exits(0);
}

#[test]
fn a_call_waits_for_a_server_that_is_starting() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("slow", &["--handshake-delay", "1500ms"])]);
    home.satellite(&["call", "slow", "echo", r#"{"text": "at last"}"#]).exits(0);
    let events = home.events();
    let at = |what: &dyn Fn(&serde_json::Value) -> bool| events.iter().position(what).unwrap();
    let online = at(&|event| event["data"]["status"] == "online");
    let executed = at(&|event| event["type"] == "mcp.tool.executed");
    assert!(online < executed);
    assert!(
        events[executed]["data"]["duration_ms"].as_u64() > Some(100),
        "the call did not wait for the server: {:#}",
        events[executed]
    );
    satellite.terminate().exits(0);
}

#[test]
fn a_call_to_a_starting_server_fails_at_its_timeout() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("never", &["--handshake-never"])]);
    let outcome = home.satellite(&["call", "never", "echo", "--timeout", "300ms"]).exits(1);
    assert!(outcome.stderr.contains("server not ready within 0.3 s; the request was not sent"), "{outcome:#?}");
    satellite.terminate().exits(0);
}
