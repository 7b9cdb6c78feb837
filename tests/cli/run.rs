//! `satellite run`: its servers, shutdown, log and data directory.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::{Home, pid};
use testkit::wait::wait_for;

use crate::SATELLITE;

/// Flags of a server that exits only by SIGKILL.
const STUBBORN: &[&str] = &["--ignore-sigterm", "--ignore-eof"];

fn servers(home: &Home) -> Vec<String> {
    home.wait_all_online().iter().map(|row| row["instance"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_servers_of_a_configuration_are_started() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[]), ("search", &["--tools", "5"])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    assert_eq!(servers(&home), ["notes-acme-alice-notes", "search-acme-alice-search"]);
    assert_eq!(home.processes().len(), 2);
    assert!(satellite.wait_start_message().contains("2 servers"), "{}", satellite.wait_start_message());
    satellite.terminate().exits(0);
}

const MCP_JSON: &str = r#"{"mcpServers": {
    // As VS Code allows it.
    "files": {"command": "SATELLITE", "args": ["SIM", "--tools", "1"], "env": {"ROOT": "/srv"}},
    "time": {"command": "SATELLITE", "args": ["SIM"]},
}}"#;

#[test]
fn the_servers_of_an_mcp_json_are_started() {
    let home = Home::new(SATELLITE);
    let mcp_json = home.write("mcp.json", MCP_JSON);
    let satellite = home.run(&["--mcp-json", mcp_json.to_str().unwrap()]);
    assert_eq!(servers(&home), ["files-local-me-files", "time-local-me-time"]);
    home.satellite(&["call", "files", "env", r#"{"name": "ROOT"}"#]).exits(0);
    satellite.terminate().exits(0);
}

#[test]
fn a_server_with_an_unset_variable_waits_for_its_user_and_others_run() {
    let home = Home::new(SATELLITE);
    let text = r#"{"inputs": [{"id": "pin", "type": "promptString", "description": "The PIN", "password": true}],
        "servers": {
            "good": {"command": "SATELLITE", "args": ["SIM"]},
            "wait": {"command": "SATELLITE", "args": ["SIM"], "env": {"K": "a-${NOT_SET}-${input:pin}"}},
            "file": {"command": "SATELLITE", "args": ["SIM"], "envFile": "later.env"},
            "bad": {"command": "SATELLITE", "args": ["${command:odd}"]}}}"#;
    let mcp_json = home.write("mcp.json", text);
    let satellite = home.run(&["--mcp-json", mcp_json.to_str().unwrap()]);
    home.wait_online("good");
    assert!(home.row("bad").is_none());
    let row = home.wait_status("wait", "awaiting_user_config");
    let command = "`satellite configure wait-local-me-wait NOT_SET pin`";
    assert_eq!((&row["remedy"], &row["next_step"]), (&"configure".into(), &command.into()), "{row:#}");
    let listed = home.satellite(&["configure", "wait"]).exits(0).stdout;
    assert!(listed.contains("  NOT_SET: missing\n  pin: missing (The PIN)\n"), "{listed}");
    home.satellite(&["configure", "wait", "NOT_SET=hush-value", "pin=hush-pin"]).exits(0);
    home.wait_online("wait");
    let outcome = home.satellite(&["call", "wait", "env", r#"{"name": "K"}"#]).exits(0);
    assert_eq!(outcome.json()["content"][0]["text"], "a-hush-value-hush-pin");

    let row = home.wait_status("file", "awaiting_user_config");
    assert!(row["status_message"].as_str().unwrap().contains("cannot read the env_file `later.env`"), "{row:#}");
    assert_eq!(row["next_step"], "`satellite reload`", "{row:#}");
    fs::write(home.path().join("later.env"), "LATER=given\n").unwrap();
    home.satellite(&["reload"]).exits(0);
    home.wait_online("file");
    let outcome = home.satellite(&["call", "file", "env", r#"{"name": "LATER"}"#]).exits(0);
    assert_eq!(outcome.json()["content"][0]["text"], "given");
    let log = satellite.terminate().exits(0);
    assert!(!format!("{log:?}").contains("hush-"), "{log:#?}");
}

#[test]
fn the_servers_of_both_files_are_started() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let mcp_json = home.write("mcp.json", MCP_JSON);
    let satellite = home.run(&["--config", config.to_str().unwrap(), "--mcp-json", mcp_json.to_str().unwrap()]);
    assert_eq!(servers(&home), ["notes-acme-alice-notes", "files-local-me-files", "time-local-me-time"]);
    satellite.terminate().exits(0);
}

#[test]
fn a_server_can_be_called_as_soon_as_the_greeting_is_printed() {
    for _ in 0..5 {
        let home = Home::new(SATELLITE);
        let config = home.servers("satellite.toml", &[("one", &[]), ("other", &[]), ("third", &[])]);
        let satellite = home.run(&["--config", config.to_str().unwrap()]);
        home.satellite(&["call", "third", "echo"]).exits(0);
        satellite.terminate().exits(0);
    }
}

#[test]
fn run_without_a_configuration_exits_with_2() {
    let home = Home::new(SATELLITE);
    let outcome = home.satellite(&["run"]).exits(2);
    assert!(outcome.stderr.contains("--config") && outcome.stderr.contains("--mcp-json"), "{outcome:#?}");
    assert!(!home.data_dir().exists());
}

#[test]
fn a_configuration_with_errors_exits_with_2() {
    let home = Home::new(SATELLITE);
    let config = home.write("satellite.toml", "[satellite]\nname = \"x\"\nprofil = 1\n");
    let outcome = home.satellite(&["run", "--config", config.to_str().unwrap()]).exits(2);
    assert!(
        outcome.stderr.contains("satellite.toml:2:9") && outcome.stderr.contains("satellite.toml:3:1"),
        "{outcome:#?}"
    );
    assert!(!home.data_dir().exists());
}

#[test]
fn a_second_satellite_on_the_same_data_directory_is_refused() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let before = home.wait_online("notes");

    let outcome = home.satellite(&["run", "--config", config.to_str().unwrap()]).exits(2);
    for said in [
        "already running",
        &format!("pid {}", satellite.pid()),
        "satellite down --data-dir",
        home.data_dir().to_str().unwrap(),
    ] {
        assert!(outcome.stderr.contains(said), "{said}: {outcome:#?}");
    }

    assert_eq!(pid(&home.wait_online("notes")), pid(&before));
    assert_eq!(home.processes(), [pid(&before)]);
    satellite.terminate().exits(0);
}

#[test]
fn down_ends_the_satellite_and_returns_when_its_data_directory_is_free() {
    let home = Home::new(SATELLITE);
    home.satellite(&["down"]).exits(3);
    let config = home.servers("satellite.toml", &[("notes", &["--sigterm-delay", "300ms", "--ignore-eof"])]);
    for _ in 0..2 {
        let satellite = home.run(&["--config", config.to_str().unwrap()]);
        home.wait_online("notes");
        home.satellite(&["down"]).exits(0);
        assert_eq!(home.processes(), Vec::<i32>::new());
        satellite.ended().exits(0);
    }
    let stopped = home.events().into_iter().rfind(|event| event["type"] == "mcp.server.stopped").unwrap();
    assert_eq!((&stopped["data"]["kind"], &stopped["data"]["forced"]), (&"shutdown".into(), &false.into()));
}

#[test]
fn sigterm_ends_every_server_and_the_satellite_with_code_0() {
    ends_cleanly(Signal::SIGTERM);
}

#[test]
fn sigint_ends_every_server_and_the_satellite_with_code_0() {
    ends_cleanly(Signal::SIGINT);
}

fn ends_cleanly(signal: Signal) {
    let home = Home::new(SATELLITE);
    let handles = ["--sigterm-delay", "100ms", "--ignore-eof"];
    let config = home.servers("satellite.toml", &[("notes", &[]), ("polite", &handles)]);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();
    satellite.signal(signal);
    let outcome = satellite.ended().exits(0);
    assert!(outcome.stderr.contains("shutting down"), "{outcome:#?}");

    assert!(!home.data_dir().join("control.sock").exists());
    home.satellite(&["status"]).exits(3);
    let stopped: Vec<_> = home.events().into_iter().filter(|event| event["type"] == "mcp.server.stopped").collect();
    assert_eq!(stopped.len(), 2, "{stopped:#?}");
    for event in stopped {
        assert_eq!(
            (&event["data"]["kind"], &event["data"]["forced"]),
            (&"shutdown".into(), &false.into()),
            "{event:#}"
        );
    }
}

#[test]
fn a_server_that_ignores_sigterm_is_killed_after_its_grace() {
    let home = Home::new(SATELLITE);
    home.servers("servers.toml", &[("stubborn", STUBBORN)]);
    let servers = fs::read_to_string(home.path().join("servers.toml")).unwrap();
    let config = home.write("satellite.toml", &format!("[policy.session]\nterminate_grace = \"200ms\"\n{servers}"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("stubborn");
    satellite.terminate().exits(0);
    let stopped = home.events().into_iter().find(|event| event["type"] == "mcp.server.stopped").unwrap();
    assert_eq!((&stopped["data"]["forced"], &stopped["data"]["signal"]), (&true.into(), &9.into()), "{stopped:#}");
}

#[test]
fn a_second_signal_kills_stubborn_servers_at_once() {
    let home = Home::new(SATELLITE);
    let servers = home.servers("servers.toml", &[("one", STUBBORN), ("other", STUBBORN)]);
    let servers = fs::read_to_string(servers).unwrap();
    // A grace longer than any test.
    let config = home.write("satellite.toml", &format!("[policy.session]\nterminate_grace = \"1h\"\n{servers}"));
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();
    satellite.signal(Signal::SIGTERM);
    satellite.process.wait_stderr(|log| log.contains("a second signal kills at once"));
    assert!(satellite.process.is_running());
    assert_eq!(home.processes().len(), 2);
    satellite.signal(Signal::SIGINT);
    let outcome = satellite.ended().exits(1);
    assert!(outcome.stderr.contains("killed by a second signal"), "{outcome:#?}");
}

#[test]
fn a_killed_satellite_leaves_no_process_and_usable_data() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("stubborn", STUBBORN)]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("stubborn");
    satellite.kill();
    assert!(home.data_dir().join("control.sock").exists(), "the killed satellite removed its socket");
    home.satellite(&["status"]).exits(3);

    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("stubborn");
    satellite.kill();
}

#[test]
fn the_log_is_json_if_stderr_is_not_a_terminal() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    let log = satellite.log();
    let online = log.iter().find(|line| line["status"] == "online").unwrap_or_else(|| panic!("{log:#?}"));
    assert_eq!(online["level"], "INFO");
    assert_eq!(online["instance"], "notes-acme-alice-notes");
    assert_eq!(
        (&online["installation_id"], &online["team_id"]),
        (&Value::Null, &Value::Null),
        "the log contains redundant ids"
    );
    satellite.terminate().exits(0);
}

#[test]
fn log_format_human_writes_plain_lines() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap(), "--log-format", "human"]);
    home.wait_online("notes");
    let log = satellite.process.stderr();
    assert!(log.lines().all(|line| !line.starts_with('{')), "{log}");
    assert!(log.contains(" INFO ") && log.contains("instance=notes-acme-alice-notes"), "{log}");
    assert!(!log.contains('\x1b'), "colour without a terminal: {log:?}");
    satellite.terminate().exits(0);
}

#[test]
fn rust_log_filters_the_log() {
    let mut home = Home::new(SATELLITE);
    home.env.push(("RUST_LOG".into(), "error,mcp_satellite_actors::calls=debug".into()));
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    home.satellite(&["call", "notes", "echo"]).exits(0);
    let log = satellite.log();
    let [call] = log.as_slice() else { panic!("{log:#?}") };
    assert_eq!(
        (&call["level"], &call["method"], &call["instance"]),
        (&"DEBUG".into(), &"tools/call".into(), &"notes-acme-alice-notes".into())
    );
    assert!(call["duration_ms"].is_u64() && call["request_id"].is_u64(), "{call:#}");
    satellite.terminate().exits(0);
}

#[test]
fn only_the_owner_can_access_the_data_directory() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    home.events();
    let mode = |path: &str| fs::metadata(home.data_dir().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(""), 0o700);
    for file in ["control.sock", "journal/journal.db", "journal/journal.db-wal", "journal/seq", "lock"] {
        assert_eq!(mode(file), 0o600, "{file}");
    }
    satellite.terminate().exits(0);
}

#[test]
fn a_data_directory_with_a_path_longer_than_a_socket_address_works() {
    let mut home = Home::new(SATELLITE);
    home.use_data_dir(&["a-directory-with-a-long-name"; 8].join("/"));
    assert!(home.data_dir().as_os_str().len() > 200);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    home.satellite(&["call", "notes", "echo"]).exits(0);
    satellite.terminate().exits(0);
    assert!(!home.data_dir().join("control.sock").exists());
}

#[test]
fn an_unusable_data_directory_is_reported_with_the_reason() {
    let mut home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    // A path that root cannot create either.
    home.use_data_dir("satellite.toml/data");
    let outcome = home.satellite(&["run", "--config", config.to_str().unwrap()]).exits(1);
    let said = format!("cannot use the data directory `{}`: Not a directory", home.data_dir().display());
    assert!(outcome.stderr.contains(&said), "{outcome:#?}");

    let outcome = home.bare(&["run", "--config", config.to_str().unwrap(), "--data-dir", "/proc/satellite"]).exits(1);
    assert!(outcome.stderr.contains("cannot use the data directory `/proc/satellite`"), "{outcome:#?}");
}

#[test]
fn the_data_directory_defaults_to_that_of_the_user_or_the_environment_variable() {
    let mut home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    home.use_data_dir("share/mcp-satellite");
    let satellite = home.run_bare(&["--config", config.to_str().unwrap()]);
    assert!(home.state_database().exists());
    home.shell(&format!("env -C / {SATELLITE} status")).finish().exits(0);
    home.bare(&["status"]).exits(0);
    let outcome = home.shell(&format!("env SATELLITE_DATA_DIR=elsewhere {SATELLITE} status")).finish().exits(3);
    assert!(outcome.stderr.contains("no satellite is running on `elsewhere`"), "{outcome:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn with_the_stdout_sink_stdout_contains_only_events() {
    let home = Home::new(SATELLITE);
    let servers = home.servers("servers.toml", &[("notes", &[])]);
    let servers = fs::read_to_string(servers).unwrap();
    let config = home.write("satellite.toml", &format!("[events]\nsink = \"stdout\"\n{servers}"));
    let satellite = home.run_at_once(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    let outcome = satellite.terminate().exits(0);
    let events = outcome.json_lines();
    assert!(events.iter().any(|event| event["type"] == "mcp.server.started"), "{outcome:#?}");
}

#[test]
fn an_instance_without_a_required_value_is_not_started() {
    let home = Home::new(SATELLITE);
    let config = home.write(
        "satellite.toml",
        r#"
[[teams]]
id = "team_acme"
slug = "acme"

[[teams.users]]
id = "user_alice"
slug = "alice"

[[teams.users]]
id = "user_bob"
slug = "bob"
[teams.users.servers.n1]
env = { API_KEY = "of-bob" }

[[teams.installations]]
id = "n1"
server = "notes"
user_required = ["API_KEY"]
SIM
"#,
    );
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_for(
        "bob's server to be online",
        || home.rows().into_iter().find(|row| row["user"] == "bob" && row["status"] == "online"),
        || format!("{:#?}", home.rows()),
    );
    let row = home.rows().into_iter().find(|row| row["user"] == "alice").unwrap();
    assert_eq!((&row["status"], row["pid"].is_null()), (&"awaiting_user_config".into(), true), "{row:#}");
    assert!(row["status_message"].as_str().unwrap().contains("API_KEY"), "{row:#}");
    assert_eq!(home.processes().len(), 1);

    let outcome = home.satellite(&["call", "notes", "echo", "--user", "alice"]).exits(1);
    assert!(outcome.stderr.contains("awaiting_user_config") && outcome.stderr.contains("API_KEY"), "{outcome:#?}");
    let outcome = home.satellite(&["call", "notes", "env", r#"{"name": "API_KEY"}"#, "--user", "bob"]).exits(0);
    assert_eq!(outcome.json()["content"][0]["text"], "of-bob");
    satellite.terminate().exits(0);
}

#[test]
fn a_missing_executable_is_reported_as_the_cause() {
    let home = Home::new(SATELLITE);
    let mcp_json = home.write("mcp.json", r#"{"mcpServers": {"ghost": {"command": "no-such-command-here"}}}"#);
    let satellite = home.run(&["--mcp-json", mcp_json.to_str().unwrap()]);
    let row = home.wait_row("ghost", "explained", |row| row["last_error"].is_string());
    assert_eq!(row["last_error"], "executable \"no-such-command-here\" not found in PATH", "{row:#}");
    satellite.terminate().exits(0);
}

#[test]
fn the_command_in_the_greeting_works() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let greeting = satellite.process.wait_stdout(|text| text.contains("--watch"));
    let line = greeting.lines().find(|line| line.contains("--watch")).unwrap().trim();
    let watching = home.shell(&line.replacen("satellite", SATELLITE, 1));
    watching.wait_stdout(|text| text.contains("1 of 1 online"));
    satellite.terminate().exits(0);
}
