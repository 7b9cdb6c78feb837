//! Dormant servers, lazy servers and rolling updates on the command line.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::{Home, Satellite, make_private, pid};
use testkit::wait::wait_for;

use crate::SATELLITE;

/// Writes a configuration with one user and the server `notes`, with `more` settings of its installation.
fn config(home: &Home, flags: &str, more: &str) -> String {
    let text = format!(
        r#"
[[teams]]
id = "team_acme"
slug = "acme"

[[teams.users]]
id = "user_alice"
slug = "alice"

[[teams.installations]]
id = "notes"
server = "notes"
SIM {flags}
{more}
"#
    );
    home.write("satellite.toml", &text).to_str().unwrap().to_owned()
}

const SLEEPY: &str = r#"[teams.installations.policy.idle]
idle = "300ms"
grace = "0s"
sweep = "50ms""#;

fn events_of_type(home: &Home, kind: &str) -> Vec<Value> {
    home.events().into_iter().filter(|event| event["type"] == kind).collect()
}

fn reload(satellite: &mut Satellite<'_>) {
    satellite.signal(Signal::SIGHUP);
}

#[test]
fn an_idle_server_is_shown_as_dormant_and_a_call_starts_it() {
    let home = Home::new(SATELLITE);
    let satellite = home.run(&["--config", &config(&home, "", SLEEPY)]);
    let row = home.wait_row("notes", "dormant", |row| row["dormant"] == true);
    assert_eq!((&row["status"], &row["pid"], &row["tools"]), (&"online".into(), &Value::Null, &3.into()));
    assert!(home.processes().is_empty());
    let table = home.satellite(&["status"]).exits(0).stdout;
    assert!(table.contains("online (dormant)"), "{table}");
    home.satellite(&["call", "notes", "echo", r#"{"text": "good morning"}"#]).exits(0);
    wait_for("a respawn", || events_of_type(&home, "mcp.server.respawned").pop(), || format!("{:#?}", home.events()));
    let dormant = &events_of_type(&home, "mcp.server.dormant")[0]["data"];
    assert_eq!(dormant["idle_duration_seconds"], 0);
    assert!(dormant["last_activity_at"].as_str().unwrap().ends_with('Z'));
    satellite.terminate().exits(0);
}

#[test]
fn a_lazy_server_is_started_once_and_its_tools_survive_a_restart() {
    let home = Home::new(SATELLITE);
    let lazy = config(&home, "", "keep = \"lazy\"");
    let first = home.run(&["--config", &lazy]);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true && row["tools"] == 3);
    assert_eq!(events_of_type(&home, "mcp.server.started").len(), 1);
    first.terminate().exits(0);

    let mut second = home.run(&["--config", &lazy]);
    let row = home.wait_row("notes", "dormant", |row| row["dormant"] == true && row["tools"] == 3);
    assert_eq!((&row["pid"], &row["status"]), (&Value::Null, &"online".into()));
    assert!(home.processes().is_empty());
    assert_eq!(events_of_type(&home, "mcp.server.started").len(), 1, "the lazy server was started twice");
    home.satellite(&["call", "notes", "echo", r#"{"text": "good morning"}"#]).exits(0);
    assert_eq!(events_of_type(&home, "mcp.server.respawned").len(), 1);

    // A changed configuration invalidates the cached tools.
    let kept = || home.stored("catalogues").len();
    assert_eq!(kept(), 1, "number of cached catalogues");
    config(&home, r#""--tools", "5""#, "keep = \"lazy\"");
    reload(&mut second);
    home.wait_row("notes", "discovered again", |row| row["dormant"] == true && row["tools"] == 5);
    config(&home, r#""--tools", "4""#, "");
    reload(&mut second);
    home.wait_row("notes", "listed", |row| row["dormant"] == false && row["tools"] == 4);
    wait_for("the outdated cache to be removed", || (kept() == 0).then_some(()), || kept().to_string());
    second.terminate().exits(0);
}

#[test]
fn a_corrupt_catalogue_cache_costs_a_lazy_server_one_start() {
    let home = Home::new(SATELLITE);
    let lazy = config(&home, "", "keep = \"lazy\"");
    let first = home.run(&["--config", &lazy]);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true);
    first.terminate().exits(0);
    let database = rusqlite::Connection::open(home.state_database()).unwrap();
    assert_eq!(database.execute("UPDATE catalogues SET body = ?1", [&b"nonsense"[..]]).unwrap(), 1);
    drop(database);
    let second = home.run(&["--config", &lazy]);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true && row["tools"] == 3);
    assert_eq!(events_of_type(&home, "mcp.server.started").len(), 2);
    second.terminate().exits(0);
}

#[test]
fn lazy_servers_work_when_the_catalogue_cache_cannot_be_written() {
    let home = Home::new(SATELLITE);
    home.make_data_dir();
    let database = home.state_database();
    fs::write(&database, "not a database, but longer than the header of one would be, so that it is damaged").unwrap();
    make_private(&database);
    let satellite = home.run(&["--config", &config(&home, "", "keep = \"lazy\"")]);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true && row["tools"] == 3);
    satellite.terminate().exits(0);
}

#[test]
fn a_rolling_update_keeps_the_old_run_if_the_new_one_fails() {
    let home = Home::new(SATELLITE);
    let rolling = "update = \"rolling\"";
    let mut satellite = home.run(&["--config", &config(&home, "", rolling)]);
    let first = pid(&home.wait_online("notes"));
    config(&home, r#""--tools", "5""#, rolling);
    reload(&mut satellite);
    let row = home.wait_row("notes", "rolled out", |row| row["tools"] == 5);
    let second = pid(&row);
    assert!(second != first);
    let restarted = &events_of_type(&home, "mcp.server.restarted")[0]["data"];
    assert_eq!((&restarted["restart_reason"], &restarted["old_pid"]), (&"config".into(), &first.into()));
    wait_for(
        "the old process to exit",
        || (home.processes().len() == 1).then_some(()),
        || format!("{:?}", home.processes()),
    );

    config(&home, r#""--exit-before-handshake", "--exit-code", "3""#, rolling);
    reload(&mut satellite);
    let refused = |row: &Value| row["status_message"].as_str().is_some_and(|why| why.contains("did not come up"));
    let row = home.wait_row("notes", "online with the old process", refused);
    assert_eq!((&row["status"], &row["tools"], &row["pid"]), (&"online".into(), &5.into(), &second.into()));
    assert_eq!(row["last_error"], "exited with code 3");
    let statuses = events_of_type(&home, "mcp.server.status_changed");
    let online = statuses.iter().position(|event| event["data"]["status"] == "online").unwrap();
    assert!(statuses[online..].iter().all(|event| event["data"]["status"] == "online"), "{statuses:#?}");
    satellite.terminate().exits(0);
}
