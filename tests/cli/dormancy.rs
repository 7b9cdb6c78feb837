//! Servers that sleep, that are lazy, and that are rolled out, as the operator sees them.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::support::{Home, Satellite, pid, wait_for};

/// A server of one user, with more about its installation.
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

fn told(home: &Home, kind: &str) -> Vec<Value> {
    home.events().into_iter().filter(|event| event["type"] == kind).collect()
}

fn reload(satellite: &mut Satellite<'_>) {
    satellite.signal(Signal::SIGHUP);
}

#[test]
fn a_server_that_nobody_calls_is_shown_as_dormant_and_a_call_wakes_it() {
    let home = Home::new();
    let satellite = home.run(&["--config", &config(&home, "", SLEEPY)]);
    let row = home.wait_row("notes", "dormant", |row| row["dormant"] == true);
    assert_eq!((&row["status"], &row["pid"], &row["tools"]), (&"online".into(), &Value::Null, &3.into()));
    assert!(home.processes().is_empty());
    let table = home.satellite(&["status"]).exits(0).stdout;
    assert!(table.contains("online (dormant)"), "{table}");
    home.satellite(&["call", "notes", "echo", r#"{"text": "good morning"}"#]).exits(0);
    wait_for("a respawn", || told(&home, "mcp.server.respawned").pop(), || format!("{:#?}", home.events()));
    let dormant = &told(&home, "mcp.server.dormant")[0]["data"];
    assert_eq!(dormant["idle_duration_seconds"], 0);
    assert!(dormant["last_activity_at"].as_str().unwrap().ends_with('Z'));
    satellite.terminate().exits(0);
}

#[test]
fn a_lazy_server_is_started_once_over_two_satellites_and_its_tools_are_listed_in_both() {
    let home = Home::new();
    let lazy = config(&home, "", "keep = \"lazy\"");
    let first = home.run(&["--config", &lazy]);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true && row["tools"] == 3);
    assert_eq!(told(&home, "mcp.server.started").len(), 1);
    first.terminate().exits(0);

    let mut second = home.run(&["--config", &lazy]);
    let row = home.wait_row("notes", "dormant", |row| row["dormant"] == true && row["tools"] == 3);
    assert_eq!((&row["pid"], &row["status"]), (&Value::Null, &"online".into()));
    assert!(home.processes().is_empty());
    assert_eq!(told(&home, "mcp.server.started").len(), 1, "it was not started again");
    home.satellite(&["call", "notes", "echo", r#"{"text": "good morning"}"#]).exits(0);
    assert_eq!(told(&home, "mcp.server.respawned").len(), 1);

    // Another configuration has other tools, perhaps, and what was kept of the old one goes.
    let kept = || fs::read_dir(home.data_dir().join("catalogues")).unwrap().count();
    assert_eq!(kept(), 1, "the tools of one server");
    config(&home, r#""--tools", "5""#, "keep = \"lazy\"");
    reload(&mut second);
    home.wait_row("notes", "discovered anew", |row| row["dormant"] == true && row["tools"] == 5);
    config(&home, r#""--tools", "4""#, "");
    reload(&mut second);
    home.wait_row("notes", "listed", |row| row["dormant"] == false && row["tools"] == 4);
    wait_for("the kept tools to go", || (kept() == 0).then_some(()), || kept().to_string());
    second.terminate().exits(0);
}

#[test]
fn what_is_kept_of_a_lazy_server_and_cannot_be_used_costs_a_start_and_nothing_else() {
    let home = Home::new();
    let lazy = config(&home, "", "keep = \"lazy\"");
    let first = home.run(&["--config", &lazy]);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true);
    first.terminate().exits(0);
    for entry in fs::read_dir(home.data_dir().join("catalogues")).unwrap().flatten() {
        fs::write(entry.path(), "nonsense").unwrap();
    }
    let second = home.run(&["--config", &lazy]);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true && row["tools"] == 3);
    assert_eq!(told(&home, "mcp.server.started").len(), 2);
    second.terminate().exits(0);
}

#[test]
fn a_satellite_that_cannot_keep_the_tools_of_lazy_servers_serves_them_all_the_same() {
    let home = Home::new();
    home.make_data_dir();
    // The key of the cache cannot be written.
    fs::create_dir(home.data_dir().join("catalogues.key.new")).unwrap();
    let satellite = home.run(&["--config", &config(&home, "", "keep = \"lazy\"")]);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true && row["tools"] == 3);
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_rolls_out_what_asks_for_it_and_shows_what_does_not_come_up() {
    let home = Home::new();
    let rolling = "update = \"rolling\"";
    let mut satellite = home.run(&["--config", &config(&home, "", rolling)]);
    let first = pid(&home.wait_online("notes"));
    config(&home, r#""--tools", "5""#, rolling);
    reload(&mut satellite);
    let row = home.wait_row("notes", "rolled out", |row| row["tools"] == 5);
    let second = pid(&row);
    assert!(second != first);
    let restarted = &told(&home, "mcp.server.restarted")[0]["data"];
    assert_eq!((&restarted["restart_reason"], &restarted["old_pid"]), (&"config".into(), &first.into()));
    wait_for("the old one to go", || (home.processes().len() == 1).then_some(()), || format!("{:?}", home.processes()));

    config(&home, r#""--exit-before-handshake", "--exit-code", "3""#, rolling);
    reload(&mut satellite);
    let refused = |row: &Value| row["status_message"].as_str().is_some_and(|why| why.contains("did not come up"));
    let row = home.wait_row("notes", "as it was", refused);
    assert_eq!((&row["status"], &row["tools"], &row["pid"]), (&"online".into(), &5.into(), &second.into()));
    assert_eq!(row["last_error"], "exited with code 3");
    let statuses = told(&home, "mcp.server.status_changed");
    let online = statuses.iter().position(|event| event["data"]["status"] == "online").unwrap();
    assert!(statuses[online..].iter().all(|event| event["data"]["status"] == "online"), "{statuses:#?}");
    satellite.terminate().exits(0);
}
