//! SIGHUP reloads the configuration; only changed servers are restarted.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::{Home, Satellite, pid, seq};
use testkit::wait::wait_for;

use crate::SATELLITE;

/// Number of reloads so far, applied or rejected.
fn reloads(home: &Home) -> usize {
    let of_config = |event: &Value| matches!(event["type"].as_str(), Some("config.refreshed" | "config.error"));
    home.events().iter().filter(|event| of_config(event)).count()
}

/// Sends SIGHUP, waits until the satellite has reloaded and returns the `config.` event.
#[track_caller]
pub(crate) fn reload(home: &Home, satellite: &mut Satellite<'_>) -> Value {
    let before = reloads(home);
    satellite.signal(Signal::SIGHUP);
    wait_for("a reload", || (reloads(home) > before).then_some(()), || format!("{:#?}", home.events()));
    let of_config = |event: &Value| event["type"].as_str().unwrap().starts_with("config.");
    home.events().into_iter().rfind(of_config).unwrap()
}

#[test]
fn a_reload_restarts_only_changed_servers() {
    let home = Home::new(SATELLITE);
    let servers: [(&str, &[&str]); 3] = [("same", &[]), ("changed", &[]), ("removed", &[])];
    let config = home.servers("satellite.toml", &servers);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    let before = home.wait_all_online();
    let [changed, removed, same] =
        ["changed", "removed", "same"].map(|server| pid(before.iter().find(|row| row["server"] == server).unwrap()));

    home.servers("satellite.toml", &[("same", &[]), ("changed", &["--tools", "5"]), ("added", &["--tools", "1"])]);
    let event = reload(&home, &mut satellite);
    assert_eq!(event["type"], "config.refreshed");
    assert_eq!(event["data"]["change_detected"], true, "{event:#}");

    home.wait_row("changed", "restarted", |row| row["status"] == "online" && row["tools"] == 5 && pid(row) != changed);
    assert_eq!(home.wait_online("added")["tools"], 1);
    assert_eq!(pid(&home.row("same").unwrap()), same);
    assert!(home.row("removed").is_none());
    assert!(!Path::new(&format!("/proc/{removed}")).exists());
    home.satellite(&["call", "removed", "echo"]).exits(2);
    assert_eq!(home.processes().len(), 3);

    let events = home.events();
    let event_of = |server: &str, kind: &str| {
        events.iter().find(|event| event["data"]["server_slug"] == server && event["type"] == kind && seq(event) > 3)
    };
    assert_eq!(event_of("removed", "mcp.server.stopped").unwrap()["data"]["kind"], "uninstall");
    assert_eq!(event_of("changed", "mcp.server.stopped").unwrap()["data"]["kind"], "config");
    assert_eq!(event_of("changed", "mcp.server.restarted").unwrap()["data"]["restart_reason"], "config");
    assert!(event_of("same", "mcp.server.stopped").is_none());
    satellite.terminate().exits(0);
}

#[test]
fn a_configuration_that_removes_most_servers_requires_accept() {
    let home = Home::new(SATELLITE);
    let all: [(&str, &[&str]); 4] = [("one", &[]), ("two", &[]), ("three", &[]), ("four", &[])];
    let config = home.servers("satellite.toml", &all);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    let before: Vec<_> = home.wait_all_online().iter().map(pid).collect();

    home.servers("satellite.toml", &all[..1]);
    let event = reload(&home, &mut satellite);
    assert_eq!((&event["type"], &event["data"]["error_type"]), (&"config.error".into(), &"removes_most".into()));
    let refused = home.satellite(&["reload"]).exits(1);
    for text in ["removes 3 of 4 servers", "satellite reload --accept"] {
        assert!(event["data"]["error_message"].as_str().unwrap().contains(text), "{event:#}");
        assert!(refused.stderr.contains(text), "{refused:#?}");
    }
    assert_eq!(home.rows().iter().map(pid).collect::<Vec<_>>(), before, "a rejected configuration changed processes");
    // Removing half of the servers is accepted.
    home.servers("satellite.toml", &all[..2]);
    let applied = home.satellite(&["reload"]).exits(0);
    assert_eq!(applied.stdout, "configuration applied; servers: 2, teams: 1\n");
    home.servers("satellite.toml", &all);
    home.satellite(&["reload"]).exits(0);
    home.servers("satellite.toml", &all[..1]);
    home.satellite(&["reload", "--accept"]).exits(0);
    assert_eq!(home.rows().len(), 1);

    home.write("satellite.toml", "this is = = not toml\n");
    let refused = home.satellite(&["reload"]).exits(2);
    assert!(refused.stderr.contains("satellite.toml:1:"), "{refused:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_of_the_same_file_changes_nothing() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    let before = home.wait_online("notes");
    let event = reload(&home, &mut satellite);
    assert_eq!((&event["type"], &event["data"]["change_detected"]), (&"config.refreshed".into(), &false.into()));
    assert_eq!(pid(&home.row("notes").unwrap()), pid(&before));
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_rejects_an_invalid_file_and_applies_a_corrected_one() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    let before = home.wait_online("notes");

    home.write("satellite.toml", "[satellite]\nname = \"x\"\n[[teams]]\nid = \"t\"\n");
    let event = reload(&home, &mut satellite);
    assert_eq!((&event["type"], &event["data"]["error_type"]), (&"config.error".into(), &"invalid".into()));
    for text in ["satellite.toml:2:9", "satellite.toml:3:1", "10 to 32 characters"] {
        assert!(event["data"]["error_message"].as_str().unwrap().contains(text), "{text}: {event:#}");
    }
    satellite.process.wait_stderr(|log| log.contains("configuration rejected") && log.contains("satellite.toml:2:9"));
    let row = home.row("notes").unwrap();
    assert_eq!((&row["status"], pid(&row)), (&"online".into(), pid(&before)));
    let rejected = || home.satellite(&["status", "--satellite", "--json"]).json()["rejected_configuration"].clone();
    assert!(rejected()["errors"].as_str().unwrap().contains("satellite.toml:2:9"), "{:#}", rejected());
    assert!(rejected()["since"].as_str().unwrap().ends_with('Z'));
    let words = home.satellite(&["status"]).exits(0).stdout;
    assert!(words.contains("configuration rejected since") && words.contains("satellite.toml:3:1"), "{words}");

    fs::remove_file(&config).unwrap();
    assert_eq!(reload(&home, &mut satellite)["type"], "config.error");
    assert_eq!(pid(&home.row("notes").unwrap()), pid(&before));

    home.servers("satellite.toml", &[("notes", &[]), ("added", &[])]);
    assert_eq!(reload(&home, &mut satellite)["type"], "config.refreshed");
    assert_eq!(rejected(), Value::Null);
    home.wait_online("added");
    assert_eq!(pid(&home.row("notes").unwrap()), pid(&before));
    satellite.terminate().exits(0);
}

#[test]
fn a_stopped_server_stays_stopped_over_a_reload_that_changes_it() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    home.satellite(&["stop", "notes"]).exits(0);
    home.servers("satellite.toml", &[("notes", &["--tools", "5"]), ("added", &[])]);
    reload(&home, &mut satellite);
    home.wait_online("added");
    let row = home.row("notes").unwrap();
    assert_eq!((&row["status"], &row["want"]), (&"offline".into(), &"stopped".into()), "{row:#}");
    home.satellite(&["start", "notes"]).exits(0);
    assert_eq!(home.wait_online("notes")["tools"], 5);
    satellite.terminate().exits(0);
}

#[test]
fn a_changed_configuration_restarts_a_permanently_failed_server() {
    let home = Home::new(SATELLITE);
    let fails = ["--exit-before-handshake", "--exit-code", "3"];
    let config = home.servers("satellite.toml", &[("notes", &fails)]);
    let quick = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        fs::write(path, format!("[policy.restart]\ndelays = [\"1ms\"]\n{text}")).unwrap();
    };
    quick(&config);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_status("notes", "permanently_failed");
    home.servers("satellite.toml", &[("notes", &[])]);
    quick(&config);
    reload(&home, &mut satellite);
    let row = home.wait_online("notes");
    assert_eq!(row["exits_in_window"], 0, "{row:#}");
    satellite.terminate().exits(0);
}

#[test]
fn signals_are_handled_while_a_reload_waits_for_a_server_to_end() {
    let home = Home::new(SATELLITE);
    let with_grace = |servers: &[(&str, &[&str])]| {
        let text = fs::read_to_string(home.servers("satellite.toml", servers)).unwrap();
        home.write("satellite.toml", &format!("[policy.session]\nterminate_grace = \"1h\"\n{text}"))
    };
    let config = with_grace(&[("stubborn", &["--ignore-sigterm", "--ignore-eof"]), ("notes", &[])]);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();

    // The removed server has a grace of one hour, and the reload waits for it.
    with_grace(&[("notes", &[])]);
    satellite.signal(Signal::SIGHUP);
    let refused = || home.satellite(&["start", "stubborn", "--no-wait"]).stderr.contains("being removed");
    wait_for("the removal", || refused().then_some(()), String::new);

    satellite.signal(Signal::SIGTERM);
    satellite.process.wait_stderr(|log| log.contains("a second signal kills at once"));
    // Another signal is another request, however soon it arrives.
    satellite.signal(Signal::SIGINT);
    satellite.ended().exits(1);
}

#[test]
fn a_server_that_is_being_removed_is_not_shown_as_online() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &["--ignore-sigterm", "--ignore-eof"])]);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    home.servers("satellite.toml", &[("other", &[])]);
    satellite.signal(Signal::SIGHUP);
    let refused = || home.satellite(&["start", "notes", "--no-wait"]).stderr.contains("being removed");
    wait_for("the removal", || refused().then_some(()), String::new);
    let row = home.row("notes").unwrap();
    assert!(row["status"] != "online" && row["tools"] == 0, "{row:#}");
    let outcome = home.satellite(&["call", "notes", "echo"]).exits(1);
    assert!(!outcome.stderr.contains("is online"), "{outcome:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_secret_variable_added_by_a_reload_is_hidden_from_servers() {
    let mut home = Home::new(SATELLITE);
    home.env.push(("LATER_SECRET".into(), "told-to-nobody".into()));
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    let text =
        fs::read_to_string(home.servers("satellite.toml", &[("notes", &[]), ("other", &[]), ("keyed", &[])])).unwrap();
    fs::write(&config, format!("{text}env = {{ API_KEY = \"env:LATER_SECRET\" }}\n")).unwrap();
    reload(&home, &mut satellite);
    home.wait_all_online();
    let seen = |server: &str, name: &str| {
        home.satellite(&["call", server, "env", &format!(r#"{{"name": "{name}"}}"#)]).json()["content"][0]["text"]
            .clone()
    };
    assert_eq!(seen("keyed", "API_KEY"), "told-to-nobody");
    assert_eq!(seen("other", "LATER_SECRET"), "not set");
    satellite.terminate().exits(0);
}
