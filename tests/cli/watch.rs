//! Watched configuration files: a change takes effect without a signal, however the file is written.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::home::{Home, Satellite, pid, seq};
use testkit::wait::wait_for;

use super::mcp::Client;
use crate::SATELLITE;

/// All `config.` events.
fn config_events(home: &Home) -> Vec<Value> {
    home.events().into_iter().filter(|event| event["type"].as_str().unwrap().starts_with("config.")).collect()
}

/// Waits for the `config.` event at index `before`.
#[track_caller]
fn next_config_event(home: &Home, before: usize) -> Value {
    let more = || config_events(home).into_iter().nth(before);
    wait_for("the configuration to be applied or rejected", more, || format!("{:#?}", config_events(home)))
}

/// Replaces a file atomically, as editors and deployments do.
fn replace(path: &Path, text: &str) {
    let fresh = path.with_extension("fresh");
    fs::write(&fresh, text).unwrap();
    fs::rename(fresh, path).unwrap();
}

fn text_of(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

/// The text that [`Home::servers`] writes.
fn servers(home: &Home, servers: &[(&str, &[&str])]) -> String {
    text_of(&home.servers("elsewhere.toml", servers))
}

fn config_arg(path: &Path) -> [&str; 2] {
    ["--config", path.to_str().unwrap()]
}

#[test]
fn a_changed_file_restarts_only_the_changed_server() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("same", &[]), ("changed", &[]), ("removed", &[])]);
    let satellite = home.run(&config_arg(&config));
    let before = home.wait_all_online();
    let [changed, removed, same] =
        ["changed", "removed", "same"].map(|server| pid(before.iter().find(|row| row["server"] == server).unwrap()));

    replace(&config, &servers(&home, &[("same", &[]), ("changed", &["--tools", "5"]), ("added", &["--tools", "1"])]));
    home.wait_row("changed", "restarted", |row| row["status"] == "online" && row["tools"] == 5 && pid(row) != changed);
    assert_eq!(home.wait_online("added")["tools"], 1);
    wait_for("the removed server to disappear", || home.row("removed").is_none().then_some(()), String::new);
    assert_eq!(pid(&home.row("same").unwrap()), same);
    assert!(!Path::new(&format!("/proc/{removed}")).exists());
    let event = next_config_event(&home, 1);
    assert_eq!((&event["type"], &event["data"]["change_detected"]), (&json!("config.refreshed"), &json!(true)));
    let hash = event["data"]["config_hash"].as_str().unwrap();
    let log = satellite.process.stderr();
    assert!(log.lines().any(|line| line.contains("configuration applied") && line.contains(hash)), "{log}");
    satellite.terminate().exits(0);
}

#[test]
fn a_change_during_the_start_is_applied() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("first", &[])]);
    let satellite = home.run_at_once(&config_arg(&config));
    // The satellite reads the file before it locks its directory, and its start takes longer.
    wait_for("the lock file", || home.data_dir().join("lock").exists().then_some(()), String::new);
    replace(&config, &servers(&home, &[("second", &[])]));
    home.wait_online("second");
    wait_for("the removed server to disappear", || home.row("first").is_none().then_some(()), String::new);
    satellite.terminate().exits(0);
}

#[test]
fn comments_order_and_modification_times_restart_nothing() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("one", &[]), ("two", &[])]);
    let satellite = home.run(&config_arg(&config));
    let before = home.wait_all_online();
    replace(&config, &text_of(&config));
    fs::File::options().append(true).open(&config).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    replace(&config, &format!("# moved\n{}\n\n", servers(&home, &[("two", &[]), ("one", &[])])));
    let event = next_config_event(&home, 1);
    assert_eq!((&event["type"], &event["data"]["change_detected"]), (&json!("config.refreshed"), &json!(false)));
    let pids = |rows: &[Value]| rows.iter().map(pid).collect::<Vec<_>>();
    assert_eq!(pids(&home.wait_all_online()), pids(&before));
    assert_eq!(config_events(&home).len(), 2);
    satellite.terminate().exits(0);
}

#[test]
fn an_invalid_file_is_reported_once_and_a_corrected_one_is_applied() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let good = text_of(&config);
    let satellite = home.run(&config_arg(&config));
    let before = pid(&home.wait_online("notes"));
    let hash = next_config_event(&home, 0)["data"]["config_hash"].as_str().unwrap().to_owned();

    replace(&config, &format!("[satellite]\nname = \"x\"\n{}", good.replace("acme\"", "ac me\"")));
    let event = next_config_event(&home, 1);
    assert_eq!((&event["type"], &event["data"]["error_type"]), (&json!("config.error"), &json!("invalid")));
    for said in ["satellite.toml:2:9", "10 to 32 characters", "is not valid as"] {
        assert!(event["data"]["error_message"].as_str().unwrap().contains(said), "{said}: {event:#}");
    }
    let refused =
        |line: &Value| line["message"].as_str().is_some_and(|message| message.contains("configuration rejected"));
    let lines: Vec<_> = satellite.log().into_iter().filter(refused).collect();
    assert_eq!((lines.len(), &lines[0]["config_hash"]), (1, &json!(hash)), "{lines:#?}");

    // A different error is reported again.
    replace(&config, "this is = = not toml\n");
    let event = next_config_event(&home, 2);
    assert!(event["data"]["error_message"].as_str().unwrap().contains("satellite.toml:1:"), "{event:#}");
    assert_eq!(pid(&home.row("notes").unwrap()), before);

    // The repeated attempts reported nothing more.
    replace(&config, &format!("{good}{}", "\n# mended\n"));
    assert_eq!(next_config_event(&home, 3)["type"], "config.refreshed");
    assert_eq!(config_events(&home).len(), 4);
    assert_eq!(pid(&home.wait_online("notes")), before);
    satellite.terminate().exits(0);
}

#[test]
fn a_partially_written_file_is_neither_applied_nor_reported() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&config_arg(&config));
    let before = pid(&home.wait_online("notes"));
    let whole = servers(&home, &[("notes", &[]), ("added", &[])]);
    // An editor that truncates the file and writes slower than the satellite polls: each poll sees another text, and a
    // partial text is not valid TOML.
    let mut file = fs::File::create(&config).unwrap();
    for part in whole.as_bytes().chunks(whole.len() / 20) {
        file.write_all(part).unwrap();
        file.flush().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    drop(file);
    home.wait_online("added");
    let types: Vec<_> = config_events(&home).iter().map(|event| event["type"].clone()).collect();
    assert_eq!(types, ["config.refreshed", "config.refreshed"]);
    assert_eq!(pid(&home.row("notes").unwrap()), before);
    satellite.terminate().exits(0);
}

#[test]
fn a_file_that_vanishes_is_reported_unless_it_reappears_soon() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&config_arg(&config));
    let before = pid(&home.wait_online("notes"));
    let away = home.path().join("away.toml");
    fs::rename(&config, &away).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    fs::rename(&away, &config).unwrap();

    replace(&config, &servers(&home, &[("notes", &[]), ("added", &[])]));
    home.wait_online("added");
    assert_eq!(config_events(&home).len(), 2, "{:#?}", config_events(&home));

    fs::rename(&config, &away).unwrap();
    let event = next_config_event(&home, 2);
    assert!(event["data"]["error_message"].as_str().unwrap().contains("cannot read the configuration"), "{event:#}");
    fs::write(&config, "").unwrap();
    let event = next_config_event(&home, 3);
    assert!(event["data"]["error_message"].as_str().unwrap().contains("is empty"), "{event:#}");
    assert_eq!(pid(&home.row("notes").unwrap()), before);
    fs::rename(&away, &config).unwrap();
    assert_eq!(next_config_event(&home, 4)["type"], "config.refreshed");
    assert_eq!((pid(&home.row("notes").unwrap()), home.rows().len()), (before, 2));
    satellite.terminate().exits(0);
}

/// A directory like a Kubernetes volume: `satellite.toml → ..data/satellite.toml`, `..data → ..2024`.
struct Mounted(PathBuf);

impl Mounted {
    fn new(home: &Home, text: &str) -> Self {
        let mounted = Self(home.path().join("mounted"));
        fs::create_dir(&mounted.0).unwrap();
        mounted.swap("..1", text);
        symlink("..data/satellite.toml", mounted.config()).unwrap();
        mounted
    }

    fn config(&self) -> PathBuf {
        self.0.join("satellite.toml")
    }

    fn swap(&self, version: &str, text: &str) {
        let folder = self.0.join(version);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("satellite.toml"), text).unwrap();
        let fresh = self.0.join("..data_tmp");
        symlink(version, &fresh).unwrap();
        fs::rename(fresh, self.0.join("..data")).unwrap();
    }
}

#[test]
fn a_file_behind_a_swapped_symbolic_link_is_applied() {
    let home = Home::new(SATELLITE);
    let mounted = Mounted::new(&home, &servers(&home, &[("notes", &[])]));
    let config = mounted.config();
    let satellite = home.run(&config_arg(&config));
    let before = pid(&home.wait_online("notes"));
    mounted.swap("..2", &servers(&home, &[("notes", &[]), ("added", &[])]));
    home.wait_online("added");
    assert_eq!(pid(&home.row("notes").unwrap()), before);
    satellite.terminate().exits(0);
}

#[test]
fn an_error_in_the_mcp_json_blocks_changes_of_the_other_file() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let mcp_json = |name: &str| {
        format!(
            r#"{{"mcpServers": {{"{name}": {{"command": "{}", "args": ["sim-server", "--name", "{}"]}}}}}}"#,
            SATELLITE,
            home.mark()
        )
    };
    let json = home.path().join("mcp.json");
    fs::write(&json, mcp_json("files")).unwrap();
    let satellite = home.run(&[&config_arg(&config)[..], &["--mcp-json", json.to_str().unwrap()]].concat());
    let before = home.wait_all_online();
    let notes = pid(before.iter().find(|row| row["server"] == "notes").unwrap());

    replace(&json, &mcp_json("search"));
    home.wait_online("search");
    wait_for("the removed server to disappear", || home.row("files").is_none().then_some(()), String::new);

    replace(&json, "{\"mcpServers\": {");
    let event = next_config_event(&home, 2);
    assert!(event["data"]["error_message"].as_str().unwrap().contains("mcp.json:1:"), "{event:#}");
    replace(&config, &servers(&home, &[("notes", &[]), ("added", &[])]));
    // The error is the same and the text is new: it is reported again, because it blocks a new change.
    next_config_event(&home, 3);
    assert_eq!(home.rows().len(), 2);
    replace(&json, &mcp_json("search"));
    home.wait_online("added");
    assert_eq!(pid(&home.row("notes").unwrap()), notes);
    satellite.terminate().exits(0);
}

#[test]
fn a_created_secret_file_makes_a_rejected_configuration_valid() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&config_arg(&config));
    home.wait_online("notes");
    let text = servers(&home, &[("notes", &[]), ("keyed", &[])]);
    replace(&config, &format!("{text}env = {{ API_KEY = \"file:later\" }}\n"));
    assert_eq!(next_config_event(&home, 1)["type"], "config.error");
    fs::write(home.path().join("later"), "given-later").unwrap();
    home.wait_online("keyed");
    assert_eq!(config_events(&home).len(), 3, "{:#?}", config_events(&home));
    satellite.terminate().exits(0);
}

#[test]
fn with_watching_off_a_change_is_applied_only_on_sighup() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let unwatched = |text: String| format!("[satellite]\nwatch = false\n{text}");
    fs::write(&config, unwatched(text_of(&config))).unwrap();
    let other = home.path().join("other");
    let mut satellite = home.run(&config_arg(&config));
    home.wait_online("notes");
    replace(&config, &unwatched(servers(&home, &[("notes", &[]), ("added", &[])])));
    // A second, watching satellite applies a change of its own file, so the first one had enough time to do so.
    let watched = home.servers("watched.toml", &[("quick", &[])]);
    let second = {
        let mut command = home.command(&["run", "--config", watched.to_str().unwrap()]);
        command.arg("--data-dir").arg(&other);
        home.start(command)
    };
    second.wait_stdout(|text| text.contains("satellite is running"));
    replace(&watched, &format!("{}\n# changed\n", text_of(&watched)));
    second.wait_stderr(|log| log.matches("configuration applied").count() == 2);
    assert_eq!(config_events(&home).len(), 1, "{:#?}", config_events(&home));
    let mut second = second;
    second.signal(Signal::SIGTERM);
    second.finish().exits(0);

    satellite.signal(Signal::SIGHUP);
    home.wait_online("added");
    // The applied file no longer disables watching.
    replace(&config, &servers(&home, &[("notes", &[])]));
    satellite.signal(Signal::SIGHUP);
    wait_for("the removed server to disappear", || home.row("added").is_none().then_some(()), String::new);
    replace(&config, &servers(&home, &[("notes", &[]), ("again", &[])]));
    home.wait_online("again");
    satellite.terminate().exits(0);
}

/// A home with an endpoint and the users of two teams, each with a token in the environment.
struct EndpointFixture {
    home: Home,
}

const TOKENS: [&str; 3] = ["sat_token_of_alice", "sat_token_of_bob", "sat_token_of_carol"];

impl EndpointFixture {
    fn new() -> Self {
        let mut home = Home::new(SATELLITE);
        for (name, token) in ["ALICE", "BOB", "CAROL"].into_iter().zip(TOKENS) {
            home.env.push((name.to_owned(), token.to_owned()));
        }
        Self { home }
    }

    /// A configuration with `teams` as `[("acme", ["alice:ALICE", …], ["installation", …]), …]`.
    fn text(&self, teams: &[(&str, &[&str], &[&str])]) -> String {
        use std::fmt::Write as _;
        let mut text = "[gateway]\nlisten = \"127.0.0.1:0\"\n".to_owned();
        for (team, users, installations) in teams {
            write!(text, "[[teams]]\nid = \"team_{team}\"\nslug = \"{team}\"\n").unwrap();
            for user in *users {
                let mut parts = user.split(':');
                let (id, variable) = (parts.next().unwrap(), parts.next().unwrap());
                let slug = parts.next().unwrap_or(id);
                write!(text, "[[teams.users]]\nid = \"user_{id}\"\nslug = \"{slug}\"\ntoken = \"env:{variable}\"\n")
                    .unwrap();
            }
            for installation in *installations {
                write!(text, "[[teams.installations]]\nid = \"{installation}\"\nserver = \"{installation}\"\nSIM\n")
                    .unwrap();
            }
        }
        text_of(&self.home.write("elsewhere.toml", &text))
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            self.home.rows().iter().map(|row| row["instance"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    #[track_caller]
    fn wait_names(&self, wanted: &[&str]) {
        wait_for(&format!("{wanted:?}"), || (self.names() == wanted).then_some(()), || format!("{:?}", self.names()));
        self.home.wait_all_online();
        // Each instance has exactly one process.
        assert_eq!(self.home.processes().len(), wanted.len());
    }
}

fn url(satellite: &Satellite<'_>) -> String {
    satellite.wait_start_message().split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
}

/// The servers that a session lists, or the HTTP status of the error.
fn listed_servers(client: &Client) -> Result<Vec<String>, u16> {
    let answered = client.call_anyway("list_servers", &json!({}));
    if answered.status != 200 {
        return Err(answered.status);
    }
    let servers = answered.json()["result"]["structuredContent"]["servers"].as_array().unwrap().clone();
    Ok(servers.iter().map(|server| server["name"].as_str().unwrap().to_owned()).collect())
}

#[test]
fn added_and_removed_users_and_teams_change_instances_and_sessions() {
    let fixture = EndpointFixture::new();
    let config = fixture.home.path().join("satellite.toml");
    fs::write(
        &config,
        fixture.text(&[("acme", &["alice:ALICE", "bob:BOB"], &["notes"]), ("late", &["carol:CAROL"], &["notes"])]),
    )
    .unwrap();
    let satellite = fixture.home.run(&config_arg(&config));
    fixture.wait_names(&["notes-acme-alice-notes", "notes-acme-bob-notes", "notes-late-carol-notes"]);
    let url = url(&satellite);
    let [alice, bob, carol] = TOKENS.map(|token| {
        let mut client = Client::new(&url, Some(token));
        assert_eq!(client.initialize().status, 200);
        client
    });
    let pid_of = |name: &str| pid(fixture.home.rows().iter().find(|row| row["instance"] == name).unwrap());
    let alices = pid_of("notes-acme-alice-notes");

    // One user and one team are removed; one installation is added.
    replace(&config, &fixture.text(&[("acme", &["alice:ALICE"], &["notes", "files"])]));
    fixture.wait_names(&["files-acme-alice-files", "notes-acme-alice-notes"]);
    assert_eq!(pid_of("notes-acme-alice-notes"), alices);
    assert_eq!((listed_servers(&bob), listed_servers(&carol)), (Err(401), Err(401)));
    assert_eq!(Client::new(&url, Some(TOKENS[1])).initialize().status, 401);
    assert_eq!(listed_servers(&alice).unwrap().len(), 2);

    // The user is added again, one installation is removed, one team is added.
    replace(
        &config,
        &fixture.text(&[("acme", &["alice:ALICE", "bob:BOB"], &["files"]), ("new", &["carol:CAROL"], &["files"])]),
    );
    fixture.wait_names(&["files-acme-alice-files", "files-acme-bob-files", "files-new-carol-files"]);
    assert_eq!(listed_servers(&alice).unwrap(), ["files"]);
    // An ended session stays ended; the user needs a new one.
    assert_eq!(listed_servers(&bob), Err(404));
    let mut carol = Client::new(&url, Some(TOKENS[2]));
    assert_eq!((carol.initialize().status, listed_servers(&carol)), (200, Ok(vec!["files".to_owned()])));

    // A user moves to another team with the same token.
    let files = pid_of("files-acme-alice-files");
    replace(
        &config,
        &fixture.text(&[("acme", &["bob:BOB"], &["files"]), ("new", &["carol:CAROL", "alice:ALICE"], &["files"])]),
    );
    fixture.wait_names(&["files-acme-bob-files", "files-new-alice-files", "files-new-carol-files"]);
    assert!(!Path::new(&format!("/proc/{files}")).exists());
    assert_eq!(listed_servers(&alice), Err(404), "the session of the old team is still valid");
    assert!(listed_servers(&carol).is_ok());
    satellite.terminate().exits(0);
}

#[test]
fn a_changed_token_ends_its_sessions_and_restarts_nothing() {
    let fixture = EndpointFixture::new();
    let config = fixture.home.path().join("satellite.toml");
    fs::write(&config, fixture.text(&[("acme", &["alice:ALICE", "bob:BOB"], &["notes"])])).unwrap();
    let satellite = fixture.home.run(&config_arg(&config));
    fixture.wait_names(&["notes-acme-alice-notes", "notes-acme-bob-notes"]);
    let before: Vec<_> = fixture.home.rows().iter().map(pid).collect();
    let url = url(&satellite);
    let mut clients = [0, 1].map(|user| Client::new(&url, Some(TOKENS[user])));
    assert!(clients.iter_mut().all(|client| client.initialize().status == 200));

    replace(&config, &fixture.text(&[("acme", &["alice:CAROL", "bob:BOB"], &["notes"])]));
    let event = next_config_event(&fixture.home, 1);
    assert_eq!((&event["type"], &event["data"]["change_detected"]), (&json!("config.refreshed"), &json!(false)));
    assert_eq!(
        (listed_servers(&clients[0]), listed_servers(&clients[1]).map(|servers| servers.len())),
        (Err(401), Ok(1))
    );
    assert_eq!(Client::new(&url, Some(TOKENS[2])).initialize().status, 200);
    assert_eq!(fixture.home.rows().iter().map(pid).collect::<Vec<_>>(), before);
    satellite.terminate().exits(0);
}

#[test]
fn a_renamed_user_keeps_the_session_and_gets_a_renamed_instance() {
    let fixture = EndpointFixture::new();
    let config = fixture.home.path().join("satellite.toml");
    fs::write(&config, fixture.text(&[("acme", &["alice:ALICE", "bob:BOB"], &["notes"])])).unwrap();
    let satellite = fixture.home.run(&config_arg(&config));
    fixture.wait_names(&["notes-acme-alice-notes", "notes-acme-bob-notes"]);
    let bobs = fixture.home.rows().iter().find(|row| row["user"] == "bob").map(pid);
    let mut client = Client::new(&url(&satellite), Some(TOKENS[0]));
    assert_eq!(client.initialize().status, 200);
    replace(&config, &fixture.text(&[("acme", &["alice:ALICE:alicia", "bob:BOB"], &["notes"])]));
    fixture.wait_names(&["notes-acme-alicia-notes", "notes-acme-bob-notes"]);
    assert_eq!(listed_servers(&client).unwrap(), ["notes"]);
    assert_eq!(fixture.home.rows().iter().find(|row| row["user"] == "bob").map(pid), bobs);
    let sent =
        fixture.home.events().into_iter().filter(|event| seq(event) > 0 && event["type"] == "mcp.server.stopped");
    let users: Vec<_> = sent.map(|event| event["data"]["user_id"].clone()).collect();
    assert_eq!(users, ["user_alice"]);
    satellite.terminate().exits(0);
}
