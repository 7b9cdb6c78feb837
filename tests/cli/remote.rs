//! Remote servers on the command line: what status says of their connection, `reconnect`, and credentials that change.

use std::fs;

use serde_json::{Value, json};

use super::peer::Peer;
use super::support::{Home, Satellite, pid, seq, wait_for};

/// One user with the server `search` at the peer, and with what stands in `more`.
fn with<'a>(home: &'a Home, peer: &Peer, policy: &str, more: &str) -> Satellite<'a> {
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

/// A server that is a process, beside the remote one.
const NOTES: &str = "[[teams.installations]]\nid = \"n1\"\nserver = \"notes\"\nSIM";

/// The cell of a table that stands below `title` in the row of `server`.
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
    let (home, peer) = (Home::new(), Peer::start());
    let satellite = with(&home, &peer, "", NOTES);
    let rows = home.wait_all_online();
    let [notes, search] = &rows[..] else { panic!("{rows:#?}") };
    assert_eq!(
        (&search["transport"], &search["connection"], &search["tools"]),
        (&"http".into(), &"connected".into(), &1.into())
    );
    assert!(search["pid"].is_null() && search["next_retry_ms"].is_null() && search["attempt"].is_null(), "{search:#}");
    assert!(notes["connection"].is_null(), "a process has none: {notes:#}");
    let result = home.satellite(&["call", "search", "echo", r#"{"text": "far away"}"#]).exits(0).json();
    assert_eq!(result["content"][0]["text"], "far away");

    let table = home.satellite(&["status"]).exits(0).stdout;
    assert_eq!(cell(&table, "search", "CONNECTION"), "connected");
    assert_eq!(cell(&table, "notes", "CONNECTION"), "-");
    assert!(home.satellite(&["tools"]).exits(0).stdout.contains("search:echo"));
    satellite.terminate().exits(0);
}

#[test]
fn a_connected_server_whose_tools_cannot_be_read_is_said_to_be_asked_again() {
    let (home, peer) = (Home::new(), Peer::start());
    peer.be_secretive();
    let satellite = with(&home, &peer, "[policy.reconnect]\nbackoff_min = \"2m\"", "");
    let row = home.wait_row("search", "waiting to be asked again", |row| row["next_retry_ms"].is_u64());
    assert_eq!((&row["status"], &row["connection"]), (&"error".into(), &"connected".into()), "{row:#}");
    let table = home.satellite(&["status"]).exits(0).stdout;
    assert_eq!(cell(&table, "search", "CONNECTION"), "connected");
    assert!(table.contains("not now") && table.contains(" s left)"), "{table}");
    satellite.terminate().exits(0);
}

#[test]
fn who_has_no_remote_server_is_not_bothered_with_connections() {
    let home = Home::new();
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    assert!(!home.satellite(&["status"]).exits(0).stdout.contains("CONNECTION"));
    satellite.terminate().exits(0);
}

#[test]
fn a_remote_server_that_is_gone_is_said_to_be_so_and_its_caller_told_when_it_is_tried_again() {
    let (home, mut peer) = (Home::new(), Peer::start());
    let satellite =
        with(&home, &peer, "[policy.reconnect]\nbackoff_min = \"2m\"\n[policy.retry]\ndelays = [\"10ms\"]", "");
    home.wait_online("search");
    let watching = home.background(&["status", "--watch"]);
    peer.end();

    let outcome = home.satellite(&["call", "search", "echo", "--json"]).exits(1);
    let error = &outcome.json()["error"];
    assert!(["reconnecting", "terminated", "remote"].contains(&error["kind"].as_str().unwrap()), "{error:#}");
    let row = home.wait_row("search", "waiting for its attempt", |row| row["next_retry_ms"].is_u64());
    assert_eq!((&row["status"], &row["connection"]), (&"offline".into(), &"reconnecting".into()), "{row:#}");
    assert!(row["attempt"].is_u64() && row["next_retry_ms"].as_u64() <= Some(132_000), "{row:#}");
    assert!(row["status_message"].as_str().unwrap().starts_with("Server unreachable: "), "{row:#}");
    let shown = cell(&home.satellite(&["status"]).exits(0).stdout, "search", "CONNECTION");
    assert!(shown.starts_with("reconnecting, attempt ") && shown.ends_with(" s"), "{shown}");
    watching.wait_stdout(|text| text.contains("reconnecting, attempt"));

    // This one finds it offline, and makes an attempt of its own.
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
fn a_connection_is_made_anew_on_request_and_the_outcome_is_said() {
    let (home, mut peer) = (Home::new(), Peer::start());
    let satellite = with(&home, &peer, "[policy.reconnect]\nbackoff_min = \"2m\"", NOTES);
    let rows = home.wait_all_online();
    let (before, began) = (seq(home.events().last().unwrap()), peer.begun());
    let outcome = home.satellite(&["reconnect", "search"]).exits(0);
    assert_eq!(outcome.stdout, "search-acme-alice-s1 is online\n");
    assert_eq!(peer.begun(), began + 1);
    let event = home.wait_event(before, "mcp.server.disconnected", |_| true);
    assert_eq!(event["data"]["was_intentional"], true, "{event:#}");
    home.wait_event(seq(&event), "mcp.server.reconnected", |_| true);
    home.satellite(&["restart", "search"]).exits(0);
    assert_eq!(peer.begun(), began + 2, "a restart of a remote server is a connection made anew");

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

    // A process is started again.
    let outcome = home.satellite(&["reconnect", "notes"]).exits(0);
    assert!(outcome.stdout.starts_with("notes-acme-alice-n1 is online"), "{outcome:#?}");
    assert_ne!(pid(&home.row("notes").unwrap()), pid(&rows[0]));
    let outcome = home.satellite(&["reconnect", "nobody"]).exits(2);
    assert!(outcome.stderr.contains("no server `nobody`"), "{outcome:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn what_a_remote_server_answers_in_place_of_a_result_is_told() {
    let (home, peer) = (Home::new(), Peer::start());
    let satellite = with(&home, &peer, "[policy.retry]\nattempts_max = 1", "");
    home.wait_online("search");
    peer.fail_calls(429, "7");
    let error = home.satellite(&["call", "search", "echo", "--json"]).exits(1).json()["error"].clone();
    assert_eq!(
        (&error["kind"], &error["http_status"], &error["retry_after_ms"]),
        (&"remote".into(), &429.into(), &7000.into()),
        "{error:#}"
    );
    assert!(error["fate"].is_string() && error["message"].as_str().unwrap().contains("HTTP 429"), "{error:#}");
    assert_eq!(home.row("search").unwrap()["status"], "online", "it says nothing about the server as a whole");
    satellite.terminate().exits(0);
}

fn log_of(satellite: &Satellite<'_>, part: &str) -> Vec<Value> {
    satellite
        .log()
        .into_iter()
        .filter(|line| line["message"].as_str().is_some_and(|text| text.contains(part)))
        .collect()
}

#[test]
fn a_credential_that_changes_in_its_file_is_taken_on_by_itself_and_no_process_is_restarted_for_it() {
    let (home, peer) = (Home::new(), Peer::start());
    peer.want_authorization("Bearer right-token");
    let token = home.write("token", "wrong-token");
    let notes = format!("{NOTES}\nenv = {{ TOKEN = \"file:token\" }}");
    let satellite = with(&home, &peer, "", &format!("bearer_token = \"file:token\"\n{notes}"));
    let row = home.wait_status("search", "requires_reauth");
    assert_eq!(row["connection"], "error", "{row:#}");
    let outcome = home.satellite(&["call", "search", "echo"]).exits(1);
    assert!(outcome.stderr.contains("Authentication failed (HTTP 401)"), "{outcome:#?}");
    let process = pid(&home.wait_online("notes"));

    fs::write(&token, "right-token\n").unwrap();
    home.wait_online("search");
    home.satellite(&["call", "search", "echo"]).exits(0);
    assert_eq!(peer.last_call(), "Bearer right-token");

    // One that is connected stays so, and says the new one from then on.
    let (began, before) = (peer.begun(), seq(home.events().last().unwrap()));
    peer.want_authorization("Bearer later-token");
    fs::rename(home.write("token.new", "later-token"), &token).unwrap();
    home.wait_event(before, "config.refreshed", |event| event["data"]["change_detected"] == true);
    home.satellite(&["call", "search", "echo"]).exits(0);
    assert_eq!((peer.last_call().as_str(), peer.begun()), ("Bearer later-token", began));
    assert_eq!(pid(&home.row("notes").unwrap()), process, "that takes a reload");
    assert_eq!(log_of(&satellite, "credentials of remote servers renewed").len(), 2);
    let text = satellite.process.stderr();
    assert!(!["wrong", "right", "later"].iter().any(|word| text.contains(&format!("{word}-token"))), "{text}");
    satellite.terminate().exits(0);
}

#[test]
fn a_credential_whose_file_is_gone_is_used_on_and_missed_in_the_log() {
    let (home, peer) = (Home::new(), Peer::start());
    peer.want_authorization("Bearer right-token");
    let token = home.write("token", "right-token");
    let satellite = with(&home, &peer, "", "bearer_token = \"file:token\"");
    home.wait_online("search");
    fs::remove_file(&token).unwrap();
    let missed = || log_of(&satellite, "cannot read a credential again");
    wait_for("the warning", || (!missed().is_empty()).then_some(()), || satellite.process.stderr());
    home.satellite(&["call", "search", "echo"]).exits(0);
    peer.want_authorization("Bearer other-token");
    home.write("token", "other-token");
    wait_for(
        "the new one",
        || (home.satellite(&["call", "search", "echo"]).code == Some(0)).then_some(()),
        || satellite.process.stderr(),
    );
    satellite.terminate().exits(0);
}

#[test]
fn a_configuration_that_is_edited_is_not_taken_on_with_a_credential() {
    let (home, peer) = (Home::new(), Peer::start());
    let token = home.write("token", "first-token");
    let satellite = with(&home, &peer, "", "bearer_token = \"file:token\"");
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
fn a_server_that_fails_its_health_checks_is_degraded_and_says_so_until_it_is_well() {
    let (home, peer) = (Home::new(), Peer::start());
    let health = "[policy.health]\ncheck = \"get\"\ninterval = \"100ms\"\ntimeout = \"100ms\"\nthreshold = 2";
    let satellite = with(&home, &peer, health, &format!("health_url = \"{}\"", peer.url("/health")));
    let row = home.wait_row("search", "healthy", |row| row["health"] == "healthy");
    assert!(row["last_check_at"].as_str().unwrap().ends_with('Z') && row["status"] == "online", "{row:#}");
    peer.be_ill(true);
    let row = home.wait_row("search", "degraded", |row| row["health"] == "degraded");
    assert_eq!((&row["status"], &row["connection"]), (&"online".into(), &"connected".into()), "{row:#}");
    let table = home.satellite(&["status"]).exits(0).stdout;
    assert_eq!(cell(&table, "search", "STATUS"), "online (degraded)", "{table}");
    home.wait_event(0, "mcp.server.health_degraded", |_| true);
    peer.be_ill(false);
    home.wait_row("search", "healthy", |row| row["health"] == "healthy");
    satellite.terminate().exits(0);
}
