//! `satellite events` and `satellite logs`.

use std::fs;
use std::sync::mpsc;

use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use serde_json::Value;
use testkit::home::{Home, Satellite, json_lines, pid, seq};
use testkit::process::send;

use crate::SATELLITE;

fn with_servers<'a>(home: &'a Home, servers: &[(&str, &[&str])]) -> Satellite<'a> {
    let text = fs::read_to_string(home.servers("servers.toml", servers)).unwrap();
    let quick = "[policy.restart]\ndelays = [\"100ms\"]\n[policy.logs]\nbatch_delay = \"100ms\"\n";
    let config = home.write("satellite.toml", &format!("{quick}{text}"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();
    satellite
}

/// Asserts that the seqs are consecutive from `first`.
#[track_caller]
fn assert_consecutive(events: &[Value], first: u64) {
    let numbers: Vec<u64> = events.iter().map(seq).collect();
    let expected: Vec<u64> = (first..first + numbers.len() as u64).collect();
    assert_eq!(numbers, expected);
}

#[test]
fn events_are_json_lines_numbered_without_a_gap() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let events = home.events();
    assert_consecutive(&events, 1);
    for event in &events {
        let keys: Vec<&String> = event.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["data", "seq", "timestamp", "type"]);
        let timestamp = event["timestamp"].as_str().unwrap();
        assert!(timestamp.len() == "2026-11-21T06:33:00.000Z".len() && timestamp.ends_with('Z'), "{timestamp}");
    }
    let of_server = events.iter().filter(|event| event["type"].as_str().unwrap().starts_with("mcp.server."));
    for event in of_server {
        for (key, value) in [
            ("installation_id", "notes"),
            ("team_id", "team_acme"),
            ("user_id", "user_alice"),
            ("process_id", "notes-acme-alice-notes"),
            ("server_slug", "notes"),
        ] {
            assert_eq!(event["data"][key], value, "{event:#}");
        }
    }
    let statuses: Vec<_> = events.iter().filter_map(|event| event["data"]["status"].as_str()).collect();
    assert_eq!(
        statuses,
        ["provisioning", "command_received", "connecting", "discovering_tools", "syncing_tools", "online"]
    );
    satellite.terminate().exits(0);
}

#[test]
fn events_without_json_are_one_line_each() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let outcome = home.satellite(&["events"]).exits(0);
    let line = outcome.stdout.lines().find(|line| line.contains("mcp.server.started")).unwrap();
    assert!(line.contains("notes-acme-alice-notes") && line.contains("tool_count=3"), "{line}");
    assert_eq!(outcome.stdout.lines().count(), home.events().len());
    satellite.terminate().exits(0);
}

#[test]
fn events_are_filtered_by_since_type_and_team() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let all = home.events();
    let chosen = |args: &[&str]| home.satellite(&[&["events", "--json"], args].concat()).exits(0).json_lines();
    let later = chosen(&["--since", "3"]);
    assert_eq!(later, all[3..]);
    let last = seq(all.last().unwrap()).to_string();
    assert!(chosen(&["--since", &last]).is_empty());
    let kinds =
        |events: &[Value]| events.iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(kinds(&chosen(&["--type", "mcp.server.started"])), ["mcp.server.started"]);
    let two = chosen(&["--type", "mcp.server.started", "--type", "mcp.tools.discovered"]);
    assert_eq!(kinds(&two), ["mcp.tools.discovered", "mcp.server.started"]);
    assert_eq!(chosen(&["--team", "team_acme"]).len(), all.len() - 1, "the team's events are all but config.refreshed");
    assert_eq!(chosen(&["--team", "acme"]), chosen(&["--team", "team_acme"]));
    satellite.terminate().exits(0);
    assert_eq!(chosen(&["--team", "acme"]), chosen(&["--team", "team_acme"]), "team names without a running satellite");
}

#[test]
fn an_unknown_type_or_team_exits_with_2_and_a_suggestion() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let refused = |args: &[&str], said: &str| {
        let outcome = home.satellite(&[&["events"], args].concat()).exits(2);
        assert!(outcome.stderr.contains(said) && outcome.stdout.is_empty(), "{said}\n{outcome:#?}");
    };
    let check = || {
        refused(&["--type", "mcp.server.crash"], "did you mean `mcp.server.crashed`?");
        refused(&["--type", "crashed"], "unknown event type `crashed`; did you mean `mcp.server.crashed`?");
        refused(&["--type", "nonsense"], "unknown event type `nonsense`; use one of: mcp.server.status_changed");
        refused(&["--team", "team_acmy"], "did you mean `team_acme`?");
    };
    check();
    refused(&["--team", "globex"], "there is no team `globex`; use one of: acme");
    // A removed team still has stored events; a new team without servers has none.
    home.write("satellite.toml", "[[teams]]\nid = \"t\"\nslug = \"globex\"\nusers = [{ id = \"u\", slug = \"u\" }]\n");
    home.wait_event(0, "mcp.server.stopped", |event| event["data"]["kind"] == "uninstall");
    let chosen = |team: &str| home.satellite(&["events", "--json", "--team", team]).exits(0).json_lines();
    assert!(!chosen("acme").is_empty() && chosen("globex").is_empty());
    satellite.terminate().exits(0);
    check();
    assert!(!chosen("acme").is_empty());
    refused(&["--team", "globex"], "no stored event belongs to a team `globex`; use one of: team_acme");
}

#[test]
fn follow_shows_a_kill_when_it_happens() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let following = home.background(&["events", "--json", "--follow"]);
    let only_crashes = home.background(&["events", "--json", "--follow", "--type", "mcp.server.crashed"]);
    following.wait_stdout(|text| text.contains("mcp.server.started"));
    send(pid(&home.row("notes").unwrap()), Signal::SIGKILL);
    let text = following.wait_stdout(|text| text.contains("mcp.server.restarted"));
    let seen = json_lines(&text[..=text.rfind('\n').unwrap()]);
    assert_consecutive(&seen, 1);
    let crashed = seen.iter().find(|event| event["type"] == "mcp.server.crashed").unwrap();
    assert_eq!((&crashed["data"]["reason"], &crashed["data"]["signal"]), (&"killed by SIGKILL".into(), &9.into()));
    let text = only_crashes.wait_stdout(|text| text.contains('\n'));
    assert_eq!(text.matches("\"type\"").count(), 1, "{text}");
    satellite.terminate().exits(0);
}

#[test]
fn follow_shows_the_shutdown_and_continues_with_the_next_satellite() {
    let home = Home::new(SATELLITE);
    // There is only an empty data directory.
    home.make_data_dir();
    let following = home.background(&["events", "--json", "--follow"]);
    following.wait_stderr(|text| text.contains("no satellite is running on") && text.contains("waiting for one"));
    for (times, killed) in (1..).zip([false, true, false]) {
        let satellite = with_servers(&home, &[("notes", &[])]);
        following.wait_stdout(|text| text.matches("mcp.server.started").count() == times);
        if killed {
            satellite.kill();
        } else {
            satellite.terminate().exits(0);
        }
        following.wait_stderr(|text| text.matches("waiting for one").count() == times + 1);
    }
    let stored = home.events();
    let text = following.wait_stdout(|text| text.lines().count() == stored.len());
    assert_eq!(json_lines(&text), stored);
    assert_consecutive(&stored, 1);
    assert_eq!(stored.last().unwrap()["type"], "mcp.server.stopped");
}

#[test]
fn events_can_be_read_when_the_satellite_is_down() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let before = home.events();
    satellite.terminate().exits(0);
    let after = home.events();
    assert_eq!(after[..before.len()], before);
    let chosen = home.satellite(&["events", "--json", "--type", "mcp.server.stopped"]).exits(0).json_lines();
    assert_eq!(chosen.len(), 1);
}

#[test]
fn events_without_a_data_directory_exits_with_3() {
    let home = Home::new(SATELLITE);
    let outcome = home.satellite(&["events"]).exits(3);
    assert!(outcome.stderr.contains("there is no data directory"), "{outcome:#?}");
}

#[test]
fn event_numbers_continue_without_a_gap_after_a_restart_and_a_kill() {
    let home = Home::new(SATELLITE);
    with_servers(&home, &[("notes", &[])]).terminate().exits(0);
    let first = home.events().len();
    let satellite = with_servers(&home, &[("notes", &[])]);
    let second = home.events().len();
    assert!(second > first);
    // Events that `events` has shown are stored and survive a kill.
    satellite.kill();
    assert_eq!(home.events().len(), second);
    let satellite = with_servers(&home, &[("notes", &[])]);
    let events = home.events();
    assert!(events.len() > second);
    assert_consecutive(&events, 1);
    satellite.terminate().exits(0);
    assert_consecutive(&home.events(), 1);
}

#[test]
fn logs_shows_the_stderr_of_a_server_with_levels() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(
        &home,
        &[
            ("notes", &["--stderr-text", "listening on nothing"]),
            ("broken", &["--stderr-text", "Error: no database"]),
            ("quiet", &[]),
        ],
    );
    home.wait_event(0, "mcp.server.logs", |event| event["data"]["server_slug"] == "notes");
    home.wait_event(0, "mcp.server.logs", |event| event["data"]["server_slug"] == "broken");
    let logs = |server: &str| home.satellite(&["logs", server]).exits(0).stdout;
    let notes = logs("notes");
    assert!(notes.lines().count() == 1 && notes.ends_with("INFO  listening on nothing\n"), "{notes:?}");
    assert!(logs("broken").ends_with("ERROR Error: no database\n"));
    assert_eq!(logs("quiet"), "");
    home.satellite(&["logs", "nobody"]).exits(2);
    satellite.terminate().exits(0);
    assert_eq!(logs("notes"), notes, "logs without a running satellite");
}

#[test]
fn follow_shows_log_lines_as_they_arrive() {
    let home = Home::new(SATELLITE);
    let satellite = with_servers(&home, &[("chatty", &["--stderr-lines-per-second", "5", "--stderr-text", "tick"])]);
    let following = home.background(&["logs", "chatty", "--follow"]);
    let first = following.wait_stdout(|text| text.contains("tick"));
    following.wait_stdout(|text| text.lines().count() > first.lines().count());
    satellite.terminate().exits(0);
    following.wait_stderr(|text| text.contains("waiting for one"));
    let before = following.stdout().lines().count();
    let satellite = with_servers(
        &home,
        &[
            ("chatty", &["--stderr-lines-per-second", "5", "--stderr-text", "tick"]),
            ("mute", &["--stderr-text", "nobody asked"]),
        ],
    );
    let text = following.wait_stdout(|text| text.lines().count() > before);
    assert!(!text.contains("nobody asked"), "{text}");
    satellite.terminate().exits(0);
}

#[test]
fn logs_are_filtered_by_team_and_user_with_and_without_a_satellite() {
    let home = Home::new(SATELLITE);
    let text =
        include_str!("../fixtures/cli/two_teams.toml").replace("\nSIM\n", "\nSIM \"--stderr-text\", \"hello\"\n");
    let config = home.write("satellite.toml", &format!("[policy.logs]\nbatch_delay = \"100ms\"\n{text}"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    for instance in ["notes-acme-alice-n1", "notes-acme-bob-n1", "notes-globex-alice-g1"] {
        home.wait_event(0, "mcp.server.logs", |event| event["data"]["process_id"] == instance);
    }
    let lines = |args: &[&str]| home.satellite(&[&["logs"], args].concat()).exits(0).stdout.lines().count();
    let check = || {
        assert_eq!(lines(&["notes", "--user", "bob"]), 1);
        assert_eq!(lines(&["notes", "--team", "globex"]), 1);
        assert_eq!(lines(&["notes", "--team", "team_globex", "--user", "user_alice"]), 1);
        assert_eq!(lines(&["notes-acme-bob-n1"]), 1);
    };
    check();
    home.satellite(&["logs", "notes"]).exits(2);
    satellite.terminate().exits(0);
    check();
    assert_eq!(lines(&["notes"]), 3);
    assert_eq!(lines(&["notes", "--user", "alice"]), 2);
    home.satellite(&["logs", "notes", "--team", "nobody"]).exits(2);
}

#[test]
fn logs_of_a_removed_server_remain_and_unknown_servers_are_errors() {
    let home = Home::new(SATELLITE);
    let text = "[policy.logs]\nbatch_delay = \"100ms\"\n";
    let servers = fs::read_to_string(home.servers("servers.toml", &[("notes", &["--stderr-text", "hello"])])).unwrap();
    let config = home.write("satellite.toml", &format!("{text}{servers}"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_event(0, "mcp.server.logs", |_| true);
    let unknown = |home: &Home| {
        let outcome = home.satellite(&["logs", "nosuch"]).exits(2);
        assert!(outcome.stderr.contains("no server `nosuch`"), "{}", outcome.stderr);
    };
    unknown(&home);
    home.write("satellite.toml", text);
    home.wait_event(0, "mcp.server.stopped", |event| event["data"]["kind"] == "uninstall");
    assert!(!home.satellite(&["logs", "notes"]).exits(0).stdout.is_empty());
    satellite.terminate().exits(0);
    unknown(&home);
}

/// Stops the journal's thread with ptrace, which acts like a disk that never responds.
fn stop_the_journal(satellite: i32) {
    let tasks = fs::read_dir(format!("/proc/{satellite}/task")).unwrap().flatten();
    let mut journals = tasks.filter(|task| fs::read_to_string(task.path().join("comm")).unwrap().trim() == "journal");
    let thread = Pid::from_raw(journals.next().unwrap().file_name().to_str().unwrap().parse().unwrap());
    let (stopped, is_stopped) = mpsc::channel();
    std::thread::spawn(move || {
        ptrace::seize(thread, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(thread).unwrap();
        waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
        stopped.send(()).unwrap();
        // The tracer must reap the thread, or the process does not exit.
        let _ = waitpid(thread, Some(WaitPidFlag::__WALL));
    });
    is_stopped.recv().unwrap();
}

#[test]
fn a_hanging_journal_blocks_neither_readers_nor_the_shutdown() {
    let home = Home::new(SATELLITE);
    let mut satellite = with_servers(&home, &[("notes", &[])]);
    let before = home.events();
    stop_the_journal(satellite.pid());
    home.satellite(&["stop", "notes"]).exits(0);
    let outcome = home.satellite(&["events", "--json"]).exits(0);
    assert!(outcome.stderr.contains("the list is incomplete"), "{outcome:#?}");
    assert_eq!(outcome.json_lines()[..before.len()], before);
    home.wait_row("notes", "stopped", |row| row["want"] == "stopped");
    satellite.signal(Signal::SIGTERM);
    satellite.ended().exits(0);
}
