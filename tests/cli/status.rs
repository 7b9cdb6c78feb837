//! `satellite status` and `satellite tools`.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::{Home, Satellite, pid};
use testkit::process::send;

use crate::SATELLITE;

/// The documented keys, on which scripts rely.
const KEYS: &str = "instance, installation_id, team, user, server, transport, status, status_message, since, want, dormant, \
                    connection, health, last_check_at, pid, wrapper_pid, isolation, held_by, identity, restarts, exits_in_window, attempt, \
                    next_retry_ms, uptime_seconds, started_at, tools, messages, calls, calls_in_flight, errors, last_activity_at, \
                    last_error, last_exit, rss_bytes, cpu_seconds, unrecorded, remedy, next_step";

fn two_teams(home: &Home) -> Satellite<'_> {
    let config = home.write("satellite.toml", include_str!("../fixtures/cli/two_teams.toml"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();
    satellite
}

#[test]
fn the_table_has_no_colour_if_stdout_is_not_a_terminal() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let outcome = home.satellite(&["status"]).exits(0);
    assert!(!outcome.stdout.contains('\x1b'), "{:?}", outcome.stdout);
    let mut lines = outcome.stdout.lines();
    let head: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!(head[..6], ["SERVER", "TEAM", "USER", "STATUS", "SINCE", "PID"]);
    let rows: Vec<Vec<&str>> = lines.by_ref().take(4).map(|line| line.split_whitespace().collect()).collect();
    let names: Vec<_> = rows.iter().map(|row| row[..4].join(" ")).collect();
    assert_eq!(
        names,
        ["files acme alice online", "notes acme alice online", "notes acme bob online", "notes globex alice online"]
    );
    let last = outcome.stdout.lines().rev().nth(1).unwrap();
    assert!(
        outcome.stdout.trim_end().lines().last().unwrap().starts_with("0 in a sandbox · process trees are held by ")
    );
    assert!(last.contains("4 of 4 online") && last.contains(&format!("pid {}", satellite.pid())), "{last}");
    satellite.terminate().exits(0);
}

#[test]
fn json_has_exactly_the_documented_keys() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let documented: BTreeSet<&str> = KEYS.split(", ").collect();
    for row in home.rows() {
        let keys: BTreeSet<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, documented);
        assert_eq!(
            (&row["transport"], &row["want"], &row["dormant"]),
            (&"stdio".into(), &"running".into(), &false.into())
        );
        assert!(row["pid"].is_u64() && row["rss_bytes"].as_u64() > Some(0) && row["cpu_seconds"].is_f64(), "{row:#}");
        assert!(
            row["uptime_seconds"].is_u64()
                && row["last_activity_at"].is_string()
                && row["messages"].as_u64() >= Some(2)
        );
    }
    // The time of the start is the same at every request.
    let started = || home.rows().iter().map(|row| row["started_at"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(started(), started());
    satellite.terminate().exits(0);
}

#[test]
fn status_is_filtered_by_team_and_user() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let shown = |args: &[&str]| {
        let outcome = home.satellite(&[&["status", "--json"], args].concat()).exits(0);
        let rows = outcome.json();
        let name = |row: &Value| row["instance"].as_str().unwrap().to_owned();
        rows.as_array().unwrap().iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(shown(&["--team", "globex"]), ["notes-globex-alice-g1"]);
    assert_eq!(shown(&["--team", "team_globex"]), ["notes-globex-alice-g1"]);
    assert_eq!(shown(&["--team", "acme", "--user", "bob"]), ["notes-acme-bob-n1"]);
    for (args, said) in [
        (&["--team", "acm"][..], "there is no team `acm`; did you mean `acme`?"),
        (&["--team", "nobody"][..], "there is no team `nobody`; use one of: acme, globex"),
        (&["--team", "globex", "--user", "bob"][..], "there is no user `bob`"),
    ] {
        for verb in ["status", "tools"] {
            let outcome = home.satellite(&[&[verb], args].concat()).exits(2);
            assert!(outcome.stderr.contains(said) && outcome.stdout.is_empty(), "{outcome:#?}");
        }
    }
    let outcome = home.satellite(&["status", "--team", "globex"]).exits(0);
    assert!(!outcome.stdout.contains("acme") && outcome.stdout.contains("1 of 1 online"), "{outcome:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn since_changes_with_the_status_and_a_recovery_clears_the_error() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let before = home.wait_online("notes");
    let since = |row: &Value| row["since"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    send(pid(&before), Signal::SIGKILL);
    let down = home.wait_row("notes", "down", |row| row["status"] != "online");
    assert!(down["last_error"].as_str().unwrap().contains("killed by SIGKILL"), "{down:#}");
    let after = home.wait_online("notes");
    assert!(since(&before) < since(&down) && since(&down) < since(&after), "{before:#}\n{down:#}\n{after:#}");
    assert_eq!((&after["last_error"], &after["last_exit"]), (&Value::Null, &"killed by SIGKILL".into()));
    satellite.terminate().exits(0);
}

#[test]
fn watch_repeats_the_table_until_the_satellite_ends() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let watching = home.background(&["status", "--watch"]);
    watching.wait_stdout(|text| text.matches("4 of 4 online").count() >= 2);
    home.satellite(&["stop", "files"]).exits(0);
    let shown = watching.wait_stdout(|text| text.contains("3 of 4 online"));
    assert!(!shown.contains('\x1b'), "{shown:?}");
    satellite.terminate().exits(0);
    let outcome = watching.finish().exits(3);
    assert!(outcome.stderr.contains("no satellite is running"), "{outcome:#?}");
}

#[test]
fn without_a_satellite_commands_exit_with_3_and_name_satellite_run() {
    let home = Home::new(SATELLITE);
    for verb in [&["status"][..], &["tools"], &["call", "notes", "echo"], &["stop", "notes"], &["restart", "notes"]] {
        let outcome = home.satellite(verb).exits(3);
        assert!(outcome.stderr.contains("satellite run") && outcome.stderr.contains("--data-dir"), "{outcome:#?}");
        assert_eq!(outcome.stdout, "");
    }
    assert!(!home.data_dir().exists(), "a query created the data directory");
}

#[test]
fn status_quiet_prints_nothing_and_exits_with_3_without_a_satellite() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let outcome = home.satellite(&["status", "--quiet"]).exits(0);
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("", ""));
    satellite.terminate().exits(0);
    let outcome = home.satellite(&["status", "--quiet"]).exits(3);
    assert_eq!((outcome.stdout, outcome.stderr), (String::new(), String::new()));
}

#[test]
fn tools_are_listed_as_a_table_and_as_json() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let outcome = home.satellite(&["tools"]).exits(0);
    assert!(!outcome.stdout.contains('\x1b'), "{:?}", outcome.stdout);
    assert!(outcome.stdout.lines().next().unwrap().contains("DESCRIPTION"));
    assert!(outcome.stdout.contains("files:tool_5") && outcome.stdout.contains("Adds two numbers"), "{outcome:#?}");
    assert!(outcome.stdout.contains("14 tools, about "), "{outcome:#?}");

    let outcome = home.satellite(&["tools", "--json", "--team", "acme", "--user", "alice"]).exits(0);
    let tools = outcome.json();
    let paths: Vec<_> = tools.as_array().unwrap().iter().map(|tool| tool["tool_path"].as_str().unwrap()).collect();
    assert_eq!(
        paths,
        [
            "files:echo",
            "files:add",
            "files:sleep",
            "files:tool_4",
            "files:tool_5",
            "notes:echo",
            "notes:add",
            "notes:sleep"
        ]
    );
    let add = &tools[6];
    assert_eq!(add["instance"], "notes-acme-alice-n1");
    assert_eq!(add["tool"]["inputSchema"]["required"], serde_json::json!(["a", "b"]));
    assert_eq!(add["tool"]["annotations"]["readOnlyHint"], true, "a field of the server's tool is missing: {add:#}");
    assert!(add["tokens"].as_u64() > Some(0));
    satellite.terminate().exits(0);
}

#[test]
fn tools_of_a_server_that_is_not_online_are_not_listed() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    home.satellite(&["stop", "files"]).exits(0);
    let outcome = home.satellite(&["tools"]).exits(0);
    assert!(!outcome.stdout.contains("files:") && outcome.stdout.contains("notes:echo"), "{outcome:#?}");
    home.satellite(&["stop", "notes", "--team", "globex"]).exits(0);
    let outcome = home.satellite(&["tools", "--team", "globex"]).exits(0);
    assert!(outcome.stdout.contains("no tools are offered"), "{outcome:#?}");
    assert_eq!(home.satellite(&["tools", "--team", "globex", "--json"]).exits(0).json(), serde_json::json!([]));
    satellite.terminate().exits(0);
}

#[test]
fn status_satellite_shows_the_journal_as_json_and_text() {
    let home = Home::new(SATELLITE);
    let satellite = two_teams(&home);
    let through = home.events().last().unwrap()["seq"].as_u64().unwrap();
    let about = home.satellite(&["status", "--satellite", "--json"]).exits(0).json();
    assert_eq!(
        (&about["journal"]["state"], &about["delivery"], &about["backend"]),
        (&"ok".into(), &Value::Null, &Value::Null)
    );
    assert!(about["journal"]["journalled_through"].as_u64().unwrap() >= through, "{about:#}");
    let words = home.satellite(&["status", "--satellite"]).exits(0).stdout;
    assert!(words.contains("process trees are held by") && !words.contains("SERVER"), "{words}");
    satellite.terminate().exits(0);
}
