//! `satellite restart`, `stop` and `start`, and killed servers: status, events and calls at each step.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::{Home, Satellite, pid, seq};
use testkit::process::send;

use crate::SATELLITE;

fn start_satellite<'a>(home: &'a Home, policy: &str, servers: &[(&str, &[&str])]) -> Satellite<'a> {
    let text = fs::read_to_string(home.servers("servers.toml", servers)).unwrap();
    let config = home.write("satellite.toml", &format!("{policy}\n{text}"));
    home.run(&["--config", config.to_str().unwrap()])
}

#[track_caller]
fn last_seq(home: &Home) -> u64 {
    seq(home.events().last().unwrap())
}

fn has_exited(pid: i32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn every_message_about_a_failure_states_its_cause_and_the_next_step() {
    let home = Home::new(SATELLITE);
    let config = home.write(
        "mcp.json",
        r#"{"mcpServers": {
            "typo": {"command": "npxx-no-such-command"},
            "python": {"command": "sh", "args": ["-c", "echo noise >&2; echo no such module >&2; exit 1"]},
            "chatty": {"command": "sh", "args": ["-c", "echo Listening on port 3000; exit 1"]}
        }}"#,
    );
    let satellite = home.run(&["--mcp-json", config.to_str().unwrap()]);
    for (server, cause) in [
        ("typo", "executable \"npxx-no-such-command\" not found in PATH"),
        ("python", "exited with code 1: no such module"),
        ("chatty", "exited with code 1: Listening on port 3000"),
    ] {
        let row = home.wait_status(server, "permanently_failed");
        let message = format!("Process crashed 3 times in 5 minutes; last: {cause}. Manual restart required.");
        let next = format!("`satellite restart {}`", row["instance"].as_str().unwrap());
        assert_eq!(row["status_message"], message);
        assert_eq!((&row["remedy"], &row["next_step"]), (&"restart".into(), &next.clone().into()));
        let table = home.satellite(&["status"]).exits(0).stdout;
        assert!(table.contains(cause) && table.contains(&next), "{table}");
        let refused = home.satellite(&["call", server, "echo"]).exits(1).stderr;
        assert!(refused.contains(&message) && refused.contains(&next), "{refused}");
        let failed = |event: &Value| event["data"]["server_slug"] == server;
        let event = home.wait_event(0, "mcp.server.permanently_failed", failed);
        assert_eq!((&event["data"]["message"], &event["data"]["remedy"]), (&message.into(), &"restart".into()));
        let logs = home.satellite(&["logs", server]).exits(0).stdout;
        assert!(logs.contains("the server did not start: "), "{logs}");
    }
    for (server, line) in [("typo", "npxx-no-such-command"), ("chatty", "Listening on port 3000")] {
        let logs = home.satellite(&["logs", server]).exits(0).stdout;
        assert!(logs.contains(line), "{logs}");
    }
    satellite.terminate().exits(0);
}

#[test]
fn a_killed_server_is_restarted_and_every_step_is_reported() {
    let home = Home::new(SATELLITE);
    let satellite = start_satellite(&home, "[policy.restart]\ndelays = [\"2s\"]", &[("notes", &[]), ("other", &[])]);
    let rows = home.wait_all_online();
    let (notes, other) = (pid(&rows[0]), pid(&rows[1]));
    let before = last_seq(&home);

    send(notes, Signal::SIGKILL);
    let row = home.wait_row("notes", "waiting for its restart", |row| row["next_retry_ms"].is_u64());
    assert_eq!(row["status"], "connecting");
    assert_eq!(row["status_message"], "restarting in 2 s (attempt 1): killed by SIGKILL");
    assert!(row["pid"].is_null() && row["uptime_seconds"].is_null() && row["rss_bytes"].is_null(), "{row:#}");
    assert!((1..=2000).contains(&row["next_retry_ms"].as_u64().unwrap()), "{row:#}");
    assert_eq!((&row["attempt"], &row["exits_in_window"], &row["tools"]), (&1.into(), &1.into(), &0.into()), "{row:#}");
    assert_eq!((&row["want"], &row["last_exit"]), (&"running".into(), &"killed by SIGKILL".into()), "{row:#}");
    assert!(has_exited(notes));
    let shown = home.satellite(&["status"]).exits(0).stdout;
    assert!(shown.contains("restarting in 2 s (attempt 1)") && shown.contains("1 of 2 online"), "{shown}");
    assert!(!home.satellite(&["tools"]).exits(0).stdout.contains("notes:"));

    let row = home.wait_online("notes");
    assert_ne!(pid(&row), notes);
    assert_eq!(
        (&row["restarts"], &row["exits_in_window"], &row["tools"]),
        (&1.into(), &1.into(), &3.into()),
        "{row:#}"
    );
    assert!(row["next_retry_ms"].is_null() && row["attempt"].is_null() && row["status_message"].is_null(), "{row:#}");
    home.satellite(&["call", "notes", "echo"]).exits(0);
    assert_eq!(pid(&home.row("other").unwrap()), other, "another server was restarted");

    let restarted = home.wait_event(before, "mcp.server.restarted", |_| true);
    assert_eq!(restarted["data"]["old_pid"], notes);
    assert_eq!(restarted["data"]["new_pid"], pid(&row));
    assert_eq!(
        (&restarted["data"]["restart_reason"], &restarted["data"]["attempt_number"]),
        (&"crash".into(), &1.into())
    );
    let changes: Vec<String> = home.events().iter().filter(|event| seq(event) > before).map(type_or_status).collect();
    assert_eq!(
        changes[..9],
        [
            "mcp.server.crashed",
            "connecting",
            "connecting",
            "connecting",
            "discovering_tools",
            "syncing_tools",
            "mcp.tools.discovered",
            "online",
            "mcp.server.restarted"
        ]
    );
    satellite.terminate().exits(0);
}

/// The new status of a status change, and the type of any other event.
fn type_or_status(event: &Value) -> String {
    let word = if event["type"] == "mcp.server.status_changed" { &event["data"]["status"] } else { &event["type"] };
    word.as_str().unwrap().to_owned()
}

#[test]
fn a_restart_clears_permanently_failed() {
    let home = Home::new(SATELLITE);
    // The server starts only if a file exists.
    let database = home.path().join("database");
    let config = home.write(
        "satellite.toml",
        &format!(
            r#"
[policy.restart]
delays = ["1ms"]
[[teams]]
id = "team_acme"
slug = "acme"
users = [{{ id = "user_alice", slug = "alice" }}]
[[teams.installations]]
id = "n1"
server = "notes"
command = "sh"
args = ["-c", "test -e '{}' || exit 3; exec \"$@\"", "{}", "SATELLITE", "SIM"]
"#,
            database.display(),
            home.mark()
        ),
    );
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let row = home.wait_status("notes", "permanently_failed");
    assert_eq!(
        row["status_message"],
        "Process crashed 3 times in 5 minutes; last: exited with code 3. Manual restart required."
    );
    assert_eq!((&row["exits_in_window"], &row["restarts"]), (&3.into(), &2.into()), "{row:#}");
    let event = home.wait_event(0, "mcp.server.permanently_failed", |_| true);
    assert_eq!(
        (&event["data"]["total_crashes"], &event["data"]["last_error"]),
        (&3.into(), &"exited with code 3".into())
    );
    let outcome = home.satellite(&["call", "notes", "echo"]).exits(1);
    assert!(
        outcome.stderr.contains("permanently_failed") && outcome.stderr.contains("satellite restart"),
        "{outcome:#?}"
    );

    let outcome = home.satellite(&["restart", "notes"]).exits(1);
    assert!(outcome.stderr.contains("notes-acme-alice-n1 is "), "the server was expected to fail again: {outcome:#?}");
    home.wait_status("notes", "permanently_failed");

    fs::write(&database, "").unwrap();
    let outcome = home.satellite(&["restart", "notes"]).exits(0);
    let row = home.row("notes").unwrap();
    assert_eq!(outcome.stdout, format!("notes-acme-alice-n1 is online (pid {})\n", pid(&row)));
    assert_eq!(
        (&row["status"], &row["exits_in_window"]),
        (&"online".into(), &0.into()),
        "the crash history was not cleared: {row:#}"
    );
    home.satellite(&["call", "notes", "echo"]).exits(0);
    satellite.terminate().exits(0);
}

#[test]
fn a_restart_of_a_healthy_server_does_not_count_as_a_crash() {
    let home = Home::new(SATELLITE);
    let satellite = start_satellite(&home, "", &[("notes", &[])]);
    let old = pid(&home.wait_online("notes"));
    let before = last_seq(&home);
    home.satellite(&["restart", "notes"]).exits(0);
    let row = home.row("notes").unwrap();
    assert!(pid(&row) != old && has_exited(old));
    assert_eq!((&row["exits_in_window"], &row["status"]), (&0.into(), &"online".into()), "{row:#}");
    let event = home.wait_event(before, "mcp.server.restarted", |_| true);
    assert_eq!((&event["data"]["restart_reason"], &event["data"]["old_pid"]), (&"manual".into(), &old.into()));
    assert_eq!(home.wait_event(before, "mcp.server.stopped", |_| true)["data"]["kind"], "manual");
    satellite.terminate().exits(0);
}

#[test]
fn a_stopped_server_exits_and_only_start_starts_it_again() {
    let home = Home::new(SATELLITE);
    let satellite = start_satellite(&home, "", &[("notes", &["--sigterm-delay", "200ms", "--exit-code", "5"])]);
    let old = pid(&home.wait_online("notes"));
    let before = last_seq(&home);
    let outcome = home.satellite(&["stop", "notes"]).exits(0);
    assert!(outcome.stdout.starts_with("notes-acme-alice-notes is offline"), "{outcome:#?}");
    assert!(has_exited(old), "stop returned before the process exited");
    let row = home.row("notes").unwrap();
    assert_eq!((&row["status"], &row["want"], row["pid"].is_null()), (&"offline".into(), &"stopped".into(), true));
    assert_eq!(row["exits_in_window"], 0, "a stop counted as a crash: {row:#}");
    let event = home.wait_event(before, "mcp.server.stopped", |_| true);
    assert_eq!((&event["data"]["kind"], &event["data"]["forced"]), (&"manual".into(), &false.into()), "{event:#}");
    assert_eq!(event["data"]["exit_code"], 5, "the server was killed within its grace: {event:#}");

    let outcome = home.satellite(&["call", "notes", "echo"]).exits(1);
    assert!(outcome.stderr.contains("satellite start notes-acme-alice-notes"), "{outcome:#?}");
    assert!(home.row("notes").unwrap()["pid"].is_null(), "the call started a stopped server");
    home.satellite(&["stop", "notes"]).exits(0);

    let outcome = home.satellite(&["start", "notes"]).exits(0);
    let row = home.row("notes").unwrap();
    assert_eq!(outcome.stdout, format!("notes-acme-alice-notes is online (pid {})\n", pid(&row)));
    assert_eq!((&row["status"], &row["want"]), (&"online".into(), &"running".into()), "{row:#}");
    home.satellite(&["start", "notes"]).exits(0);
    assert_eq!(pid(&home.row("notes").unwrap()), pid(&row), "start restarted a running server");
    satellite.terminate().exits(0);
}

#[test]
fn a_stop_kills_a_server_that_ignores_sigterm_after_the_grace() {
    let home = Home::new(SATELLITE);
    let grace = "[policy.session]\nterminate_grace = \"300ms\"";
    let satellite = start_satellite(&home, grace, &[("stubborn", &["--ignore-sigterm", "--ignore-eof"])]);
    let old = pid(&home.wait_online("stubborn"));
    home.satellite(&["stop", "stubborn"]).exits(0);
    assert!(has_exited(old));
    let event = home.wait_event(0, "mcp.server.stopped", |_| true);
    assert_eq!((&event["data"]["forced"], &event["data"]["signal"]), (&true.into(), &9.into()), "{event:#}");
    satellite.terminate().exits(0);
}

#[test]
fn start_with_no_wait_returns_before_the_server_is_online() {
    let home = Home::new(SATELLITE);
    let satellite = start_satellite(&home, "", &[("slow", &["--handshake-delay", "1s"])]);
    home.wait_online("slow");
    home.satellite(&["stop", "slow"]).exits(0);
    let outcome = home.satellite(&["start", "slow", "--no-wait"]).exits(0);
    assert!(!outcome.stdout.contains("online"), "{outcome:#?}");
    home.wait_online("slow");
    satellite.terminate().exits(0);
}

#[test]
fn commands_for_an_unknown_server_exit_with_2() {
    let home = Home::new(SATELLITE);
    let satellite = start_satellite(&home, "", &[("notes", &[])]);
    for verb in ["start", "stop", "restart", "logs"] {
        let outcome = home.satellite(&[verb, "nobody"]).exits(2);
        assert!(outcome.stderr.contains("no server `nobody`"), "{outcome:#?}");
    }
    satellite.terminate().exits(0);
}

#[test]
fn the_next_call_starts_a_server_that_exited_with_code_0() {
    let home = Home::new(SATELLITE);
    let satellite = start_satellite(&home, "", &[("notes", &[])]);
    let old = pid(&home.wait_online("notes"));
    home.satellite(&["call", "notes", "crash", r#"{"code": 0}"#]).exits(1);
    let row = home.wait_row("notes", "dormant", |row| row["dormant"] == true);
    assert_eq!((&row["status"], row["pid"].is_null(), &row["tools"]), (&"online".into(), true, &3.into()), "{row:#}");
    let shown = home.satellite(&["status"]).exits(0).stdout;
    assert!(shown.contains("online (dormant)"), "{shown}");
    assert!(home.satellite(&["tools"]).exits(0).stdout.contains("notes:echo"));
    home.satellite(&["call", "notes", "echo"]).exits(0);
    let row = home.row("notes").unwrap();
    assert!(pid(&row) != old && row["dormant"] == false, "{row:#}");
    satellite.terminate().exits(0);
}
