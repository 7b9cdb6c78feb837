//! Remote servers on the command line: their connection in `status`, `reconnect`, and changed credentials.

use std::fs;

use serde_json::{Value, json};
use testkit::home::{Home, Satellite, pid, seq};
use testkit::wait::wait_for;

use super::peer::Peer;
use crate::SATELLITE;

/// Runs a satellite with the remote server `search` at the peer, followed by `more` in the configuration.
fn start_satellite<'a>(home: &'a Home, peer: &Peer, policy: &str, more: &str) -> Satellite<'a> {
    let text = format!(
        "{policy}\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\nusers = [{{ id = \"user_alice\", slug = \"alice\" }}]\n\
         [[teams.installations]]\nid = \"s1\"\nserver = \"search\"\ntransport = \"http\"\nurl = \"{}\"\n{more}\n",
        peer.url("/mcp")
    );
    let config = home.write("satellite.toml", &text);
    let checked = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0);
    assert_eq!(checked.stderr, "", "{checked:#?}");
    assert!(checked.stdout.contains("1 of them remote"), "{checked:#?}");
    home.run(&["--config", config.to_str().unwrap()])
}

/// A local server next to the remote one.
const NOTES: &str = "[[teams.installations]]\nid = \"n1\"\nserver = \"notes\"\nSIM";

/// The cell in column `title` and the row of `server`.
#[track_caller]
fn cell(table: &str, server: &str, title: &str) -> String {
    let head = table.lines().next().unwrap();
    let start = head.find(title).unwrap_or_else(|| panic!("no {title}: {table}"));
    let rest = &head[start + title.len()..];
    let end = start + title.len() + (rest.len() - rest.trim_start().len());
    let row = table.lines().find(|line| line.trim_start().starts_with(server)).unwrap();
    let letters: Vec<char> = row.chars().collect();
    letters[start.min(letters.len())..end.min(letters.len())].iter().collect::<String>().trim().to_owned()
}

#[test]
fn a_remote_server_is_served_and_its_connection_is_shown() {
    let (home, peer) = (Home::new(SATELLITE), Peer::start());
    let satellite = start_satellite(&home, &peer, "", NOTES);
    let rows = home.wait_all_online();
    let [notes, search] = &rows[..] else { panic!("{rows:#?}") };
    assert_eq!(
        (&search["transport"], &search["connection"], &search["tools"]),
        (&"http".into(), &"connected".into(), &1.into())
    );
    assert!(search["pid"].is_null() && search["next_retry_ms"].is_null() && search["attempt"].is_null(), "{search:#}");
    assert!(notes["connection"].is_null(), "a local server has no connection: {notes:#}");
    let result = home.satellite(&["call", "search", "echo", r#"{"text": "far away"}"#]).exits(0).json();
    assert_eq!(result["content"][0]["text"], "far away");

    let table = home.satellite(&["status"]).exits(0).stdout;
    assert_eq!(cell(&table, "search", "CONNECTION"), "connected");
    assert_eq!(cell(&table, "notes", "CONNECTION"), "-");
    assert!(home.satellite(&["tools"]).exits(0).stdout.contains("search:echo"));
    satellite.terminate().exits(0);
}

#[test]
fn a_server_that_cannot_list_tools_shows_the_next_attempt() {
    let (home, peer) = (Home::new(SATELLITE), Peer::start());
    peer.reject_tools_list();
    let satellite = start_satellite(&home, &peer, "[policy.reconnect]\nbackoff_min = \"2m\"", "");
    let row = home.wait_row("search", "waiting for the next attempt", |row| row["next_retry_ms"].is_u64());
    assert_eq!((&row["status"], &row["connection"]), (&"error".into(), &"connected".into()), "{row:#}");
    let table = home.satellite(&["status"]).exits(0).stdout;
    assert_eq!(cell(&table, "search", "CONNECTION"), "connected");
    assert!(table.contains("not now") && table.contains(" s left)"), "{table}");
    satellite.terminate().exits(0);
}

#[test]
fn status_without_remote_servers_has_no_connection_column() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    assert!(!home.satellite(&["status"]).exits(0).stdout.contains("CONNECTION"));
    satellite.terminate().exits(0);
}

#[test]
fn calls_to_an_unreachable_server_report_the_next_connection_attempt() {
    let (home, mut peer) = (Home::new(SATELLITE), Peer::start());
    let satellite = start_satellite(
        &home,
        &peer,
        "[policy.reconnect]\nbackoff_min = \"2m\"\n[policy.retry]\ndelays = [\"10ms\"]",
        "",
    );
    home.wait_online("search");
    let watching = home.background(&["status", "--watch"]);
    peer.end();

    let outcome = home.satellite(&["call", "search", "echo", "--json"]).exits(1);
    let error = &outcome.json()["error"];
    assert!(["reconnecting", "terminated", "remote"].contains(&error["kind"].as_str().unwrap()), "{error:#}");
    let row = home.wait_row("search", "waiting for its next attempt", |row| row["next_retry_ms"].is_u64());
    assert_eq!((&row["status"], &row["connection"]), (&"offline".into(), &"reconnecting".into()), "{row:#}");
    assert!(row["attempt"].is_u64() && row["next_retry_ms"].as_u64() <= Some(132_000), "{row:#}");
    assert!(row["status_message"].as_str().unwrap().starts_with("Server unreachable: "), "{row:#}");
    let shown = cell(&home.satellite(&["status"]).exits(0).stdout, "search", "CONNECTION");
    assert!(shown.starts_with("reconnecting, attempt ") && shown.ends_with(" s"), "{shown}");
    watching.wait_stdout(|text| text.contains("reconnecting, attempt"));

    // The server is offline: this call triggers a connection attempt.
    let outcome = home.satellite(&["call", "search", "echo", "--json"]).exits(1);
    let error = outcome.json()["error"].clone();
    let words =
        ["kind", "status", "fate", "last_error"].map(|field| error[field].as_str().unwrap_or_default().to_owned());
    assert_eq!(words, ["reconnecting", "reconnecting", "not_sent", "connection refused"], "{error:#}");
    assert!(error["next_retry_ms"].is_u64() && error["last_attempt"].as_str().unwrap().ends_with('Z'), "{error:#}");
    let outcome = home.satellite(&["call", "search", "echo"]).exits(1);
    assert!(outcome.stderr.contains("connection refused; next attempt in "), "{outcome:#?}");

    peer.begin();
    home.satellite(&["call", "search", "echo"]).exits(0);
    home.wait_online("search");
    satellite.terminate().exits(0);
}

#[test]
fn reconnect_opens_a_new_session_and_reports_the_outcome() {
    let (home, mut peer) = (Home::new(SATELLITE), Peer::start());
    let satellite = start_satellite(&home, &peer, "[policy.reconnect]\nbackoff_min = \"2m\"", NOTES);
    let rows = home.wait_all_online();
    let (before, began) = (seq(home.events().last().unwrap()), peer.sessions_begun());
    let outcome = home.satellite(&["reconnect", "search"]).exits(0);
    assert_eq!(outcome.stdout, "search-acme-alice-s1 is online\n");
    assert_eq!(peer.sessions_begun(), began + 1);
    let event = home.wait_event(before, "mcp.server.disconnected", |_| true);
    assert_eq!(event["data"]["was_intentional"], true, "{event:#}");
    home.wait_event(seq(&event), "mcp.server.reconnected", |_| true);
    home.satellite(&["restart", "search"]).exits(0);
    assert_eq!(peer.sessions_begun(), began + 2, "a restart of a remote server opens a new session");

    peer.end();
    let outcome = home.satellite(&["reconnect", "search"]).exits(1);
    assert!(outcome.stderr.contains("search-acme-alice-s1 is offline: Server unreachable"), "{outcome:#?}");
    let outcome = home.satellite(&["reconnect", "search", "--json"]).exits(1).json();
    assert_eq!(
        (&outcome["success"], &outcome["status"], &outcome["instance"]),
        (&false.into(), &"offline".into(), &"search-acme-alice-s1".into())
    );
    home.satellite(&["restart", "search"]).exits(1);
    peer.begin();
    home.satellite(&["restart", "search"]).exits(0);
    let outcome = home.satellite(&["reconnect", "search", "--json"]).exits(0).json();
    assert_eq!(
        outcome,
        json!({"instance": "search-acme-alice-s1", "success": true, "status": "online", "status_message": null, "not_durable": null})
    );

    // A local server is restarted.
    let outcome = home.satellite(&["reconnect", "notes"]).exits(0);
    assert!(outcome.stdout.starts_with("notes-acme-alice-n1 is online"), "{outcome:#?}");
    assert_ne!(pid(&home.row("notes").unwrap()), pid(&rows[0]));
    let outcome = home.satellite(&["reconnect", "nobody"]).exits(2);
    assert!(outcome.stderr.contains("no server `nobody`"), "{outcome:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_remote_http_error_is_reported_with_status_and_retry_after() {
    let (home, peer) = (Home::new(SATELLITE), Peer::start());
    let satellite = start_satellite(&home, &peer, "[policy.retry]\nattempts_max = 1", "");
    home.wait_online("search");
    peer.fail_calls(429, "7");
    let error = home.satellite(&["call", "search", "echo", "--json"]).exits(1).json()["error"].clone();
    assert_eq!(
        (&error["kind"], &error["http_status"], &error["retry_after_ms"]),
        (&"remote".into(), &429.into(), &7000.into()),
        "{error:#}"
    );
    assert!(error["fate"].is_string() && error["message"].as_str().unwrap().contains("HTTP 429"), "{error:#}");
    assert_eq!(home.row("search").unwrap()["status"], "online", "one failed call does not change the status");
    satellite.terminate().exits(0);
}

fn log_lines(satellite: &Satellite<'_>, part: &str) -> Vec<Value> {
    satellite
        .log()
        .into_iter()
        .filter(|line| line["message"].as_str().is_some_and(|text| text.contains(part)))
        .collect()
}

#[test]
fn a_changed_credential_file_takes_effect_without_restarting_processes() {
    let (home, peer) = (Home::new(SATELLITE), Peer::start());
    peer.require_authorization("Bearer right-token");
    let token = home.write("token", "wrong-token");
    let notes = format!("{NOTES}\nenv = {{ TOKEN = \"file:token\" }}");
    let satellite = start_satellite(&home, &peer, "", &format!("bearer_token = \"file:token\"\n{notes}"));
    let row = home.wait_status("search", "requires_reauth");
    assert_eq!(row["connection"], "error", "{row:#}");
    let outcome = home.satellite(&["call", "search", "echo"]).exits(1);
    assert!(outcome.stderr.contains("Authentication failed (HTTP 401)"), "{outcome:#?}");
    let process = pid(&home.wait_online("notes"));

    fs::write(&token, "right-token\n").unwrap();
    home.wait_online("search");
    home.satellite(&["call", "search", "echo"]).exits(0);
    assert_eq!(peer.last_call(), "Bearer right-token");

    // A connected server keeps its session and sends the new credential.
    let (began, before) = (peer.sessions_begun(), seq(home.events().last().unwrap()));
    peer.require_authorization("Bearer later-token");
    fs::rename(home.write("token.new", "later-token"), &token).unwrap();
    home.wait_event(before, "config.refreshed", |event| event["data"]["change_detected"] == true);
    home.satellite(&["call", "search", "echo"]).exits(0);
    assert_eq!((peer.last_call().as_str(), peer.sessions_begun()), ("Bearer later-token", began));
    assert_eq!(pid(&home.row("notes").unwrap()), process, "a process was restarted for a credential");
    assert_eq!(log_lines(&satellite, "credentials of remote servers renewed").len(), 2);
    let text = satellite.process.stderr();
    assert!(!["wrong", "right", "later"].iter().any(|word| text.contains(&format!("{word}-token"))), "{text}");
    satellite.terminate().exits(0);
}

#[test]
fn a_credential_stays_in_use_when_its_file_is_deleted() {
    let (home, peer) = (Home::new(SATELLITE), Peer::start());
    peer.require_authorization("Bearer right-token");
    let token = home.write("token", "right-token");
    let satellite = start_satellite(&home, &peer, "", "bearer_token = \"file:token\"");
    home.wait_online("search");
    fs::remove_file(&token).unwrap();
    let missed = || log_lines(&satellite, "cannot read a credential again");
    wait_for("the warning", || (!missed().is_empty()).then_some(()), || satellite.process.stderr());
    home.satellite(&["call", "search", "echo"]).exits(0);
    peer.require_authorization("Bearer other-token");
    home.write("token", "other-token");
    wait_for(
        "the new credential",
        || (home.satellite(&["call", "search", "echo"]).code == Some(0)).then_some(()),
        || satellite.process.stderr(),
    );
    satellite.terminate().exits(0);
}

#[test]
fn a_changed_credential_does_not_apply_an_unwatched_configuration_change() {
    let (home, peer) = (Home::new(SATELLITE), Peer::start());
    let token = home.write("token", "first-token");
    let satellite = start_satellite(&home, &peer, "", "bearer_token = \"file:token\"");
    home.wait_online("search");
    let config = home.path().join("satellite.toml");
    let edited = fs::read_to_string(&config).unwrap().replace("file:token", "file:other").replace("acme", "edited");
    fs::write(&config, edited).unwrap();
    let before = seq(home.events().last().unwrap());
    fs::write(&token, "second-token").unwrap();
    home.wait_event(before, "config.refreshed", |_| true);
    home.satellite(&["call", "search-acme-alice-s1", "echo"]).exits(0);
    assert_eq!(peer.last_call(), "Bearer second-token");
    satellite.terminate().exits(0);
}

#[test]
fn a_server_that_fails_health_checks_is_degraded_until_it_recovers() {
    let (home, peer) = (Home::new(SATELLITE), Peer::start());
    let health = "[policy.health]\ncheck = \"get\"\ninterval = \"100ms\"\ntimeout = \"100ms\"\nthreshold = 2";
    let satellite = start_satellite(&home, &peer, health, &format!("health_url = \"{}\"", peer.url("/health")));
    let row = home.wait_row("search", "healthy", |row| row["health"] == "healthy");
    assert!(row["last_check_at"].as_str().unwrap().ends_with('Z') && row["status"] == "online", "{row:#}");
    peer.set_unhealthy(true);
    let row = home.wait_row("search", "degraded", |row| row["health"] == "degraded");
    assert_eq!((&row["status"], &row["connection"]), (&"online".into(), &"connected".into()), "{row:#}");
    let table = home.satellite(&["status"]).exits(0).stdout;
    assert_eq!(cell(&table, "search", "STATUS"), "online (degraded)", "{table}");
    home.wait_event(0, "mcp.server.health_degraded", |_| true);
    peer.set_unhealthy(false);
    home.wait_row("search", "healthy", |row| row["health"] == "healthy");
    satellite.terminate().exits(0);
}
