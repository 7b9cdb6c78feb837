//! What servers had come to when a satellite ended, and what the next one makes of it: told to end, or killed.

use std::fs;

use serde_json::{Value, json};

use super::support::{Home, Satellite, seq, wait_for};

/// Four servers: one starts only where there is a file, one is stopped by the tests, one falls asleep as soon as it can, and
/// one crashes when it is asked to.
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

/// Starts a satellite and brings its servers to where they are to be.
fn lived<'a>(home: &'a Home, config: &str) -> Satellite<'a> {
    let satellite = home.run(&["--config", config]);
    home.wait_status("broken", "permanently_failed");
    home.wait_online("stopped");
    home.satellite(&["stop", "stopped"]).exits(0);
    home.wait_online("shaky");
    home.satellite(&["call", "shaky", "crash"]).exits(1);
    home.wait_row("shaky", "back", |row| row["restarts"] == 1 && row["status"] == "online");
    home.wait_row("asleep", "asleep", is_asleep);
    satellite
}

/// What is asleep has its tools written down.
fn wait_tools_kept(home: &Home) {
    let kept = || fs::read_dir(home.data_dir().join("catalogues")).unwrap().count();
    wait_for("its tools to be kept", || (kept() >= 1).then_some(()), || kept().to_string());
}

/// Waits until what was told last is stored, and what servers have come to with it.
fn wait_stored(home: &Home) {
    home.satellite(&["events", "--json"]).exits(0);
}

fn goes_on(end: impl FnOnce(Satellite<'_>)) {
    let home = Home::new();
    let config = config(&home, "");
    let first = lived(&home, &config);
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
    let row = home.wait_row("asleep", "asleep", is_asleep);
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
    // The first of its three crashes was with the satellite before.
    home.satellite(&["call", "shaky", "crash"]).exits(1);
    home.wait_row("shaky", "back", |row| row["restarts"] == 2 && row["status"] == "online");
    home.satellite(&["call", "shaky", "crash"]).exits(1);
    home.wait_status("shaky", "permanently_failed");

    let events = home.events();
    assert_eq!(events[..before.len()], before);
    let seqs: Vec<u64> = events.iter().map(seq).collect();
    assert!(seqs.iter().copied().eq(1..=seqs.len() as u64), "no gap and no repeat");
    second.terminate().exits(0);
}

#[test]
fn a_satellite_that_was_told_to_end_is_gone_on_from() {
    goes_on(|satellite| drop(satellite.terminate().exits(0)));
}

#[test]
fn a_satellite_that_was_killed_is_gone_on_from() {
    goes_on(|satellite| satellite.kill());
}

#[test]
fn another_configuration_has_a_clean_slate_but_for_what_a_person_wants() {
    let home = Home::new();
    lived(&home, &config(&home, "")).terminate().exits(0);
    let second = home.run(&["--config", &config(&home, r#"env = { "NEW" = "1" }"#)]);
    home.wait_row("stopped", "stopped", |row| row["want"] == "stopped");
    let row = home.wait_online("shaky");
    assert_eq!((&row["exits_in_window"], &row["restarts"]), (&json!(0), &json!(0)));
    // It is started, and comes to the same once more.
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

    // And back: nothing of the first one is left.
    let third = home.run(&["--config", &config(&home, "")]);
    let row = home.wait_online("shaky");
    assert_eq!(row["exits_in_window"], 0);
    third.terminate().exits(0);
}

#[test]
fn what_is_not_configured_any_more_is_forgotten() {
    let home = Home::new();
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
