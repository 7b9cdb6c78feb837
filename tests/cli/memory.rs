//! State of instances that the next satellite restores after a shutdown or a kill.

use std::fs;

use serde_json::{Value, json};
use testkit::home::{Home, Satellite, seq};
use testkit::wait::wait_for;

use crate::SATELLITE;

/// Four servers: `broken` starts only if a file exists, `stopped` is stopped by the test, `asleep` becomes dormant at
/// once, and `shaky` crashes on request.
fn config(home: &Home, more: &str) -> String {
    let text = format!(
        r#"
[policy.restart]
delays = ["1ms"]
[[teams]]
id = "team_acme"
slug = "acme"
users = [{{ id = "user_alice", slug = "alice" }}]
[[teams.installations]]
id = "broken"
server = "broken"
command = "sh"
args = ["-c", "test -e '{}' || exit 3; exec \"$@\"", "{}", "SATELLITE", "SIM"]
{more}
[[teams.installations]]
id = "stopped"
server = "stopped"
keep = "always_on"
SIM
{more}
[[teams.installations]]
id = "asleep"
server = "asleep"
SIM
{more}
[teams.installations.policy.idle]
idle = "300ms"
grace = "0s"
sweep = "50ms"
[[teams.installations]]
id = "shaky"
server = "shaky"
keep = "always_on"
SIM "--all-tools"
{more}
"#,
        home.path().join("database").display(),
        home.mark()
    );
    home.write("satellite.toml", &text).to_str().unwrap().to_owned()
}

fn is_asleep(row: &Value) -> bool {
    row["dormant"] == true && row["tools"] == 3
}

/// Starts a satellite and brings each server into its state.
fn prepared_satellite<'a>(home: &'a Home, config: &str) -> Satellite<'a> {
    let satellite = home.run(&["--config", config]);
    home.wait_status("broken", "permanently_failed");
    home.wait_online("stopped");
    home.satellite(&["stop", "stopped"]).exits(0);
    home.wait_online("shaky");
    home.satellite(&["call", "shaky", "crash"]).exits(1);
    home.wait_row("shaky", "online again", |row| row["restarts"] == 1 && row["status"] == "online");
    home.wait_row("asleep", "dormant", is_asleep);
    satellite
}

/// Waits until the tools of the dormant server are cached on disk.
fn wait_tools_kept(home: &Home) {
    let kept = || home.stored("catalogues").len();
    wait_for("the tools to be cached", || (kept() >= 1).then_some(()), || kept().to_string());
}

/// Waits until the latest events and the state of the instances are stored.
fn wait_stored(home: &Home) {
    home.satellite(&["events", "--json"]).exits(0);
}

fn restores_state_after(end: impl FnOnce(Satellite<'_>)) {
    let home = Home::new(SATELLITE);
    let config = config(&home, "");
    let first = prepared_satellite(&home, &config);
    wait_tools_kept(&home);
    wait_stored(&home);
    end(first);
    let before = home.events();

    let second = home.run(&["--config", &config]);
    let row = home.wait_status("broken", "permanently_failed");
    assert_eq!(
        row["status_message"],
        "Process crashed 3 times in 5 minutes; last: exited with code 3. Manual restart required."
    );
    assert_eq!((&row["exits_in_window"], &row["last_exit"]), (&json!(3), &json!("exited with code 3")));
    let row = home.wait_row("stopped", "stopped", |row| row["want"] == "stopped");
    assert_eq!(row["status"], "offline");
    let row = home.wait_row("asleep", "dormant", is_asleep);
    assert_eq!((&row["status"], &row["pid"]), (&json!("online"), &Value::Null));
    let row = home.wait_online("shaky");
    assert_eq!((&row["exits_in_window"], &row["restarts"]), (&json!(1), &json!(1)));

    let started = |server: &str| {
        let of = |event: &&Value| event["type"] == "mcp.server.started" && event["data"]["server_slug"] == server;
        home.events().iter().filter(of).count()
    };
    assert_eq!((started("broken"), started("stopped"), started("asleep"), started("shaky")), (0, 1, 1, 2));

    home.satellite(&["call", "asleep", "echo", r#"{"text": "good morning"}"#]).exits(0);
    home.wait_event(0, "mcp.server.respawned", |_| true);
    home.satellite(&["start", "stopped"]).exits(0);
    home.wait_online("stopped");
    fs::write(home.path().join("database"), "").unwrap();
    home.satellite(&["restart", "broken"]).exits(0);
    home.wait_online("broken");
    // The previous satellite saw the first of three crashes.
    home.satellite(&["call", "shaky", "crash"]).exits(1);
    home.wait_row("shaky", "online again", |row| row["restarts"] == 2 && row["status"] == "online");
    home.satellite(&["call", "shaky", "crash"]).exits(1);
    home.wait_status("shaky", "permanently_failed");

    let events = home.events();
    assert_eq!(events[..before.len()], before);
    let seqs: Vec<u64> = events.iter().map(seq).collect();
    assert!(seqs.iter().copied().eq(1..=seqs.len() as u64), "seqs are not consecutive");
    second.terminate().exits(0);
}

#[test]
fn state_is_restored_after_a_shutdown() {
    restores_state_after(|satellite| drop(satellite.terminate().exits(0)));
}

#[test]
fn state_is_restored_after_a_kill() {
    restores_state_after(|satellite| satellite.kill());
}

#[test]
fn a_changed_configuration_resets_all_state_except_a_manual_stop() {
    let home = Home::new(SATELLITE);
    prepared_satellite(&home, &config(&home, "")).terminate().exits(0);
    let second = home.run(&["--config", &config(&home, r#"env = { "NEW" = "1" }"#)]);
    home.wait_row("stopped", "stopped", |row| row["want"] == "stopped");
    let row = home.wait_online("shaky");
    assert_eq!((&row["exits_in_window"], &row["restarts"]), (&json!(0), &json!(0)));
    // The servers are started again and reach the same state.
    let failed = |event: &Value| event["data"]["server_slug"] == "broken";
    let since = home.events().iter().find(|event| event["type"] == "mcp.server.permanently_failed").map(seq).unwrap();
    home.wait_event(since, "mcp.server.permanently_failed", failed);
    let started = |event: &Value| event["type"] == "mcp.server.started" && event["data"]["server_slug"] == "asleep";
    wait_for(
        "a second start",
        || (home.events().iter().filter(|event| started(event)).count() == 2).then_some(()),
        || format!("{:#?}", home.row("asleep")),
    );
    second.terminate().exits(0);

    // With the first configuration again, its old state is not restored.
    let third = home.run(&["--config", &config(&home, "")]);
    let row = home.wait_online("shaky");
    assert_eq!(row["exits_in_window"], 0);
    third.terminate().exits(0);
}

#[test]
fn state_of_a_removed_server_is_deleted() {
    let home = Home::new(SATELLITE);
    let one = home.servers("one.toml", &[("notes", &[]), ("other", &[])]);
    let without = home.servers("without.toml", &[("other", &[])]);
    let run = |config: &std::path::Path| home.run(&["--config", config.to_str().unwrap()]);
    let first = run(&one);
    home.wait_all_online();
    home.satellite(&["stop", "notes"]).exits(0);
    first.terminate().exits(0);
    run(&without).terminate().exits(0);
    let third = run(&one);
    home.wait_all_online();
    third.terminate().exits(0);
}
