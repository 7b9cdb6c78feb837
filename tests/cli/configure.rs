//! `satellite configure`: values of a user are stored, passed to that user's server and never shown.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::{Value, json};
use testkit::home::{Home, Outcome, make_private, pid};
use testkit::wait::wait_for;

use super::mcp::Client;
use super::peer::Peer;
use super::reload::reload;
use crate::SATELLITE;

/// Two users with a server `notes` that requires `API_KEY` and `PIN`, and a server that requires nothing.
fn two_users(home: &Home) -> PathBuf {
    home.write(
        "satellite.toml",
        r#"
[gateway]
listen = "127.0.0.1:0"
[[teams]]
id = "team_acme"
slug = "acme"
[[teams.users]]
id = "user_alice"
slug = "alice"
token = "file:token"
[[teams.users]]
id = "user_bob"
slug = "bob"
[teams.users.servers.n1]
env = { API_KEY = "of-bob-in-the-file", PIN = "1234" }
[[teams.installations]]
id = "n1"
server = "notes"
user_required = ["API_KEY", "PIN"]
SIM
[[teams.installations]]
id = "o1"
server = "other"
SIM
"#,
    )
}

/// A home with a token for its alice.
fn home() -> Home {
    let home = Home::new(SATELLITE);
    fs::write(home.path().join("token"), "sat_alice").unwrap();
    home
}

fn configure(home: &Home, args: &[&str]) -> Outcome {
    home.satellite(&[&["configure"], args].concat())
}

#[track_caller]
fn row_of(home: &Home, user: &str, server: &str) -> Value {
    let row = home.rows().into_iter().find(|row| row["user"] == user && row["server"] == server);
    row.unwrap_or_else(|| panic!("no row for server {server} of user {user}"))
}

/// The value of an environment variable in the server `notes` of `user`.
#[track_caller]
fn variable(home: &Home, user: &str, name: &str) -> Value {
    let arguments = json!({"name": name}).to_string();
    let outcome = home.satellite(&["call", "notes", "env", &arguments, "--user", user]);
    outcome.json()["content"][0]["text"].clone()
}

fn wait_others(home: &Home) {
    let online = || home.rows().iter().filter(|row| row["status"] == "online").count() == 3;
    wait_for("the other servers to be online", || online().then_some(()), || format!("{:#?}", home.rows()));
}

#[test]
fn configured_values_start_only_the_server_of_that_user() {
    let home = home();
    let config = two_users(&home);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_others(&home);
    let others: Vec<_> = ["alice", "bob"].map(|user| pid(&row_of(&home, user, "other"))).into();
    let bobs = pid(&row_of(&home, "bob", "notes"));

    // Status and errors contain the command to run.
    let row = row_of(&home, "alice", "notes");
    let command = "`satellite configure notes-acme-alice-n1 API_KEY PIN`";
    assert_eq!(row["status"], "awaiting_user_config");
    assert_eq!((&row["remedy"], &row["next_step"]), (&"configure".into(), &command.into()), "{row:#}");
    let outcome = home.satellite(&["call", "notes", "echo", "--user", "alice"]).exits(1);
    assert!(outcome.stderr.contains(command), "{outcome:#?}");
    let listed = configure(&home, &["notes", "--user", "alice"]).exits(0).stdout;
    assert!(listed.contains("  API_KEY: missing\n  PIN: missing\n"), "{listed}");

    // After one of two values, the output names the missing one.
    let output = configure(&home, &["notes", "--user", "alice", "API_KEY=first-key"]).exits(0).stdout;
    assert!(
        output.contains("awaiting_user_config")
            && output.contains("configure PIN (next: ")
            && !output.contains("API_KEY"),
        "{output}"
    );
    let output = configure(&home, &["notes-acme-alice-n1", "PIN=2468"]).exits(0).stdout;
    assert!(output.contains("notes-acme-alice-n1 is online (pid "), "{output}");
    assert_eq!(
        (variable(&home, "alice", "API_KEY"), variable(&home, "alice", "PIN")),
        (json!("first-key"), json!("2468"))
    );
    let statuses: Vec<_> = home
        .events()
        .into_iter()
        .filter(|event| {
            event["type"] == "mcp.server.status_changed"
                && event["data"]["user_id"] == "user_alice"
                && event["data"]["server_slug"] == "notes"
        })
        .map(|event| event["data"]["status"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(
        statuses,
        [
            "awaiting_user_config",
            "awaiting_user_config",
            "provisioning",
            "command_received",
            "connecting",
            "discovering_tools",
            "syncing_tools",
            "online"
        ]
    );

    // The same value changes nothing; another value restarts exactly this server.
    let alices = pid(&row_of(&home, "alice", "notes"));
    configure(&home, &["notes", "--user", "alice", "PIN=2468"]).exits(0);
    assert_eq!(pid(&row_of(&home, "alice", "notes")), alices);
    configure(&home, &["notes", "--user", "alice", "PIN=1357"]).exits(0);
    assert_ne!(pid(&row_of(&home, "alice", "notes")), alices);
    assert_eq!(variable(&home, "alice", "PIN"), "1357");
    let refreshed: Vec<_> = home.events().into_iter().filter(|event| event["type"] == "config.refreshed").collect();
    assert_eq!(refreshed.len(), 4, "{refreshed:#?}");
    assert!(refreshed[1..].iter().all(|event| event["data"]["change_detected"] == true));
    let hash = |at: usize| refreshed[at]["data"]["config_hash"].clone();
    assert!(
        hash(0) != hash(1) && hash(1) != hash(2) && hash(2) == hash(3),
        "the hash must not depend on values: {refreshed:#?}"
    );

    // `--unset` removes the value.
    let output = configure(&home, &["notes", "--user", "alice", "--unset", "PIN"]).exits(0).stdout;
    assert!(output.contains("awaiting_user_config"), "{output}");
    assert_eq!(["alice", "bob"].map(|user| pid(&row_of(&home, user, "other"))).to_vec(), others);
    assert_eq!(pid(&row_of(&home, "bob", "notes")), bobs);
    satellite.terminate().exits(0);
}

#[test]
fn configured_values_survive_a_restart_and_a_kill_in_a_private_file() {
    let home = home();
    let config = two_users(&home);
    let args = ["--config", config.to_str().unwrap()];
    let satellite = home.run(&args);
    wait_others(&home);
    configure(&home, &["notes", "--user", "alice", "API_KEY=kept-key", "PIN=kept-pin"]).exits(0);
    let file = home.state_database();
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    satellite.terminate().exits(0);
    // A file that others can read, for example after a restore from a backup, is refused.
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let refused = home.satellite(&[&["run"], &args[..]].concat()).exits(1).stderr;
    assert!(refused.contains(&format!("chmod 600 '{}'", file.display())), "{refused}");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let satellite = home.run(&args);
    assert_eq!(variable(&home, "alice", "API_KEY"), "kept-key");
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    configure(&home, &["notes", "--user", "alice", "API_KEY=new-key"]).exits(0);
    satellite.kill();
    let mut satellite = home.run(&args);
    assert_eq!(variable(&home, "alice", "API_KEY"), "new-key");
    let before = pid(&row_of(&home, "alice", "notes"));
    assert_eq!(reload(&home, &mut satellite)["data"]["change_detected"], false);
    assert_eq!(pid(&row_of(&home, "alice", "notes")), before);
    satellite.terminate().exits(0);
}

#[test]
fn a_configured_value_overrides_the_file_until_it_is_unset() {
    let home = home();
    let config = two_users(&home);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_others(&home);
    let listed = configure(&home, &["notes", "--user", "bob"]).exits(0).stdout;
    assert!(listed.contains("API_KEY: given in the configuration"), "{listed}");
    configure(&home, &["notes", "--user", "bob", "API_KEY=of-bob-himself"]).exits(0);
    assert_eq!(variable(&home, "bob", "API_KEY"), "of-bob-himself");
    let output = configure(&home, &["notes", "--user", "bob", "--json"]).exits(0).json();
    assert_eq!(
        output["required"],
        json!([{"key": "API_KEY", "given_by": "configure"}, {"key": "PIN", "given_by": "file"}])
    );
    assert_eq!(output["instance"]["status"], "online");
    configure(&home, &["notes", "--user", "bob", "--unset", "API_KEY"]).exits(0);
    assert_eq!(variable(&home, "bob", "API_KEY"), "of-bob-in-the-file");
    satellite.terminate().exits(0);
}

#[test]
fn a_value_can_come_from_stdin_a_variable_or_a_file() {
    let mut home = home();
    home.env.push(("MY_KEY".to_owned(), "from-the-environment".to_owned()));
    let config = two_users(&home);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_others(&home);
    fs::write(home.path().join("pin"), "from a file\nof two lines\r\n").unwrap();
    configure(&home, &["notes", "--user", "alice", "API_KEY=env:MY_KEY", "PIN=file:pin"]).exits(0);
    assert_eq!(variable(&home, "alice", "API_KEY"), "from-the-environment");
    assert_eq!(variable(&home, "alice", "PIN"), "from a file\nof two lines");

    let given_on_stdin = |args: &[&str], given: &str| {
        let path = home.path().join("given");
        fs::write(&path, given).unwrap();
        let mut command = home.command(&[&["configure", "notes", "--user", "alice"], args].concat());
        command.arg("--data-dir").arg(home.data_dir()).stdin(Stdio::from(fs::File::open(path).unwrap()));
        home.start(command).finish()
    };
    given_on_stdin(&["API_KEY"], "from-stdin\n").exits(0);
    assert_eq!(variable(&home, "alice", "API_KEY"), "from-stdin");
    let outcome = given_on_stdin(&["API_KEY"], "\n").exits(2);
    assert!(outcome.stderr.contains("stdin contains no value"), "{outcome:#?}");
    let outcome = given_on_stdin(&["API_KEY", "PIN"], "x\n").exits(2);
    assert!(outcome.stderr.contains("only one value can be read from stdin"), "{outcome:#?}");
    for (argument, message) in
        [("PIN=env:NOT_SET_ANYWHERE", "`NOT_SET_ANYWHERE`"), ("PIN=file:nowhere", "cannot read the file")]
    {
        let outcome = configure(&home, &["notes", "--user", "alice", argument]).exits(2);
        assert!(outcome.stderr.contains(message), "{outcome:#?}");
    }
    assert_eq!(variable(&home, "alice", "PIN"), "from a file\nof two lines");
    satellite.terminate().exits(0);
}

#[test]
fn a_configured_lazy_server_stays_dormant_after_a_restart() {
    let home = home();
    let config = home.write(
        "satellite.toml",
        r#"
[[teams]]
id = "team_acme"
slug = "acme"
users = [{ id = "user_alice", slug = "alice" }]
[[teams.installations]]
id = "n1"
server = "notes"
keep = "lazy"
user_required = ["API_KEY"]
SIM
"#,
    );
    let args = ["--config", config.to_str().unwrap()];
    let satellite = home.run(&args);
    home.wait_status("notes", "awaiting_user_config");
    configure(&home, &["notes", "API_KEY=given-key"]).exits(0);
    home.wait_row("notes", "dormant", |row| row["dormant"] == true);
    satellite.terminate().exits(0);
    let satellite = home.run(&args);
    let row = home.wait_row("notes", "dormant", |row| row["dormant"] == true);
    assert!(row["tools"].as_u64().unwrap() > 0 && row["restarts"] == 0 && row["messages"] == 0, "{row:#}");
    assert_eq!(home.processes(), Vec::<i32>::new());
    assert_eq!(variable(&home, "alice", "API_KEY"), "given-key");
    satellite.terminate().exits(0);
}

#[test]
fn a_value_that_is_not_required_is_rejected_and_nothing_changes() {
    let home = home();
    let outcome = configure(&home, &["notes", "API_KEY=x"]).exits(3);
    assert!(outcome.stderr.contains("no satellite is running"), "{outcome:#?}");
    let config = two_users(&home);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_others(&home);
    let long = format!("PIN={}", "x".repeat(70_000));
    for (args, message) in [
        (
            &["notes", "--user", "alice", "PIN=1", "sk-in-the-wrong-place=2"][..],
            "the configuration requires: API_KEY, PIN",
        ),
        (&["notes", "--user", "alice", "sk-in-the-wrong-place"], "the configuration requires: API_KEY, PIN"),
        (&["notes", "--user", "alice", "--unset", "sk-in-the-wrong-place"], "the configuration requires: API_KEY, PIN"),
        // Names of variables are case-sensitive.
        (&["notes", "--user", "alice", "pin=1"], "the configuration requires: API_KEY, PIN"),
        (&["notes", "--user", "alice", "PIN="], "the value of `PIN` is empty"),
        (&["notes", "--user", "alice", &long], "longer than 64 KiB"),
        (&["notes", "--user", "alice", "PIN=1", "PIN=2"], "`PIN` is named twice"),
        (&["notes", "--user", "alice", "=1"], "has no KEY"),
        (&["other", "--user", "alice", "PIN=1"], "requires no value of the user"),
        (&["notes", "PIN=1"], "names 2 servers"),
        (&["nobody", "PIN=1"], "no server `nobody`"),
        (&["notes", "--team", "other", "PIN=1"], "no server `notes`"),
    ] {
        let outcome = configure(&home, args).exits(2);
        assert!(outcome.stderr.contains(message), "{message}: {outcome:#?}");
        assert!(!outcome.stderr.contains("sk-in-the-wrong-place"), "a possible secret is shown: {outcome:#?}");
    }
    assert_eq!(home.stored("user_values").len(), 0);
    assert!(!satellite.process.stderr().contains("sk-in-the-wrong-place"));
    satellite.terminate().exits(0);
}

#[test]
fn users_cannot_set_a_variable_that_runs_other_code() {
    let home = home();
    let config = two_users(&home);
    let text = fs::read_to_string(&config).unwrap().replace(", \"PIN\"]", ", \"PIN\", \"PYTHONPATH\", \"LD_PRELOAD\"]");
    fs::write(&config, text).unwrap();
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_for("the satellite", || (home.rows().len() == 4).then_some(()), || format!("{:#?}", home.rows()));
    for name in ["PYTHONPATH", "LD_PRELOAD"] {
        let value = format!("{name}=/of/alice");
        let outcome = configure(&home, &["notes", "--user", "alice", "API_KEY=1", &value]).exits(2);
        let message =
            format!("`{name}` cannot be set by a user: it makes the server run other code; set it in the env of");
        assert!(outcome.stderr.contains(&message) && !outcome.stderr.contains("/of/alice"), "{outcome:#?}");
    }
    assert_eq!(home.stored("user_values").len(), 0);
    satellite.terminate().exits(0);
}

#[test]
fn values_are_erased_with_their_user_or_installation() {
    let home = home();
    let config = two_users(&home);
    let text = format!("[satellite]\nretention = \"0s\"\n{}", fs::read_to_string(&config).unwrap());
    fs::write(&config, &text).unwrap();
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_others(&home);
    for user in ["alice", "bob"] {
        configure(&home, &["notes", "--user", user, "API_KEY=given-key", "PIN=given-pin"]).exits(0);
    }
    let kept = || format!("{:?}", home.stored("user_values"));
    fs::write(&config, text.replace("slug = \"acme\"", "slug = \"ac me\"")).unwrap();
    assert_eq!(reload(&home, &mut satellite)["type"], "config.error");
    assert!(kept().contains("user_alice") && kept().contains("user_bob"));

    // A value that is no longer required is kept but not passed to the server.
    fs::write(&config, text.replace("[\"API_KEY\", \"PIN\"]", "[\"PIN\"]")).unwrap();
    reload(&home, &mut satellite);
    home.wait_all_online();
    assert_eq!(variable(&home, "alice", "API_KEY"), "not set");
    fs::write(&config, &text).unwrap();
    reload(&home, &mut satellite);
    home.wait_all_online();
    assert_eq!(variable(&home, "alice", "API_KEY"), "given-key");

    // Bob is removed and added again: his values were erased.
    let without_bob = text.split("[[teams.users]]\nid = \"user_bob\"").next().unwrap().to_owned()
        + &text[text.find("[[teams.installations]]").unwrap()..];
    fs::write(&config, &without_bob).unwrap();
    reload(&home, &mut satellite);
    assert!(kept().contains("user_alice") && !kept().contains("user_bob"), "{}", kept());
    fs::write(&config, &text).unwrap();
    reload(&home, &mut satellite);
    home.wait_all_online();
    assert_eq!(variable(&home, "bob", "API_KEY"), "of-bob-in-the-file");

    // The installation is removed while no satellite runs.
    satellite.terminate().exits(0);
    fs::write(&config, text.replace("id = \"n1\"", "id = \"n2\"").replace("servers.n1", "servers.n2")).unwrap();
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    assert!(!kept().contains("given"), "{}", kept());
    assert_eq!(row_of(&home, "alice", "notes")["status"], "awaiting_user_config");
    satellite.terminate().exits(0);
}

#[test]
fn values_of_a_removed_server_survive_a_restart_until_prune_erases_them() {
    let home = home();
    let config = two_users(&home);
    let text = fs::read_to_string(&config).unwrap();
    let args = ["--config", config.to_str().unwrap()];
    let mut satellite = home.run(&args);
    wait_others(&home);
    configure(&home, &["notes", "--user", "bob", "API_KEY=given-key"]).exits(0);
    let stored = |table: &str, text: &str| format!("{:?}", home.stored(table)).contains(text);
    // The file is truncated before Bob, like a file that is still being written.
    let without_bob = text.split("[[teams.users]]\nid = \"user_bob\"").next().unwrap().to_owned()
        + &text[text.find("[[teams.installations]]").unwrap()..];
    fs::write(&config, &without_bob).unwrap();
    reload(&home, &mut satellite);
    assert!(!home.rows().iter().any(|row| row["user"] == "bob"));
    assert!(stored("user_values", "given-key") && stored("erasures", "user_bob"));

    satellite.terminate().exits(0);
    let mut satellite = home.run(&args);
    assert!(stored("user_values", "given-key") && stored("erasures", "user_bob"));
    fs::write(&config, &text).unwrap();
    reload(&home, &mut satellite);
    let is_online = || Some(row_of(&home, "bob", "notes")).filter(|row| row["status"] == "online");
    wait_for("bob's server to be online", is_online, || format!("{:#?}", home.rows()));
    assert_eq!(variable(&home, "bob", "API_KEY"), "given-key", "the value was lost");
    assert!(!stored("erasures", "user_bob"));
    assert_eq!(home.satellite(&["prune"]).exits(0).stdout, "nothing to erase\n", "a value in use was pruned");

    fs::write(&config, &without_bob).unwrap();
    reload(&home, &mut satellite);
    let erased = home.satellite(&["prune", "--json"]).exits(0).json();
    assert_eq!(erased["instances"], serde_json::json!(["team_acme/user_bob/n1"]));
    assert!(!stored("user_values", "given-key") && !stored("erasures", "user_bob"));
    satellite.terminate().exits(0);
}

#[test]
fn values_are_kept_until_the_backend_has_sent_a_configuration() {
    let home = home();
    let text = "[backend]\nurl = \"http://127.0.0.1:9\"\n";
    let config = home.write("satellite.toml", text);
    home.make_data_dir();
    let file = home.data_dir().join("values.json");
    let kept = r#"{"version": 1, "teams": {"team_acme": {"user_alice": {"n1": {"PIN": "1"}}}}}"#;
    fs::write(&file, kept).unwrap();
    let gone =
        r#"{"team": "team_acme", "user": "user_alice", "installation": "n1", "removed_at": "2020-01-01T00:00:00Z"}"#;
    let to_erase = home.data_dir().join("to-erase.json");
    fs::write(&to_erase, format!("{{\"version\": 1, \"instances\": [{gone}]}}")).unwrap();
    make_private(&to_erase);
    make_private(&file);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    assert_eq!(home.satellite(&["prune"]).exits(0).stdout, "nothing to erase\n");
    home.write("satellite.toml", &format!("{text}# another\n"));
    assert_eq!(reload(&home, &mut satellite)["type"], "config.refreshed");
    assert_eq!(fs::read_to_string(&file).unwrap(), kept);
    satellite.terminate().exits(0);
}

#[test]
fn unreadable_values_are_reported_and_left_unchanged() {
    let home = home();
    let config = two_users(&home);
    let args = ["--config", config.to_str().unwrap()];
    home.make_data_dir();
    for (name, broken) in [
        // A file of the previous version, which is imported as soon as it can be read.
        ("values.json", r#"{"version": 1, "teams": {"team_acme": {"user_alice": {"n1": {"PIN": sekrit}}}}}"#),
        ("values.json", r#"{"version": 2}"#),
        ("state.db", "not a database, but longer than the header of one would be; it contains a sekrit, too, perhaps"),
    ] {
        let file = home.data_dir().join(name);
        fs::write(&file, broken).unwrap();
        make_private(&file);
        let satellite = home.run(&args);
        let log =
            satellite.process.wait_stderr(|log| log.contains("cannot read the values of users; servers wait for them"));
        assert!(!log.contains("sekrit"), "{log}");
        let outcome = configure(&home, &["notes", "--user", "alice", "PIN=1"]).exits(1);
        assert!(outcome.stderr.contains(&format!("{name}` cannot be used")), "{outcome:#?}");
        assert_eq!(fs::read_to_string(&file).unwrap(), broken);
        // After the file is removed, values can be stored again.
        fs::remove_file(&file).unwrap();
        configure(&home, &["notes", "--user", "alice", "PIN=1", "API_KEY=2"]).exits(0);
        assert_eq!(variable(&home, "alice", "PIN"), "1");
        satellite.terminate().exits(0);
        fs::remove_file(home.state_database()).unwrap();
    }
}

#[test]
fn values_of_the_previous_version_are_imported_once_and_leave_its_file_when_they_are_unset() {
    let home = home();
    let config = two_users(&home);
    let args = ["--config", config.to_str().unwrap()];
    home.make_data_dir();
    let file = home.data_dir().join("values.json");
    let kept = r#"{"version": 1, "teams": {"team_acme": {
        "user_alice": {"n1": {"API_KEY": "key-of-before", "PIN": "pin-of-before"}},
        "user_bob": {"n1": {"PIN": "pin-of-bob"}}}}}"#;
    fs::write(&file, kept).unwrap();
    make_private(&file);
    let satellite = home.run(&args);
    assert_eq!(variable(&home, "alice", "API_KEY"), "key-of-before");
    assert_eq!(fs::read_to_string(&file).unwrap(), kept, "a rollback finds its file");
    configure(&home, &["notes", "--user", "alice", "--unset", "API_KEY"]).exits(0);
    satellite.terminate().exits(0);

    let satellite = home.run(&args);
    assert_eq!(row_of(&home, "alice", "notes")["status"], "awaiting_user_config");
    assert_eq!(variable(&home, "bob", "PIN"), "pin-of-bob");
    satellite.terminate().exits(0);
    for file in [file, home.state_database()] {
        let bytes = fs::read(&file).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains("key-of-before") && text.contains("pin-of-bob"), "{}", file.display());
    }
}

#[test]
fn a_remote_server_receives_values_as_headers_or_query_parameters() {
    let (home, peer) = (Home::new(SATELLITE), Peer::start());
    let config = home.write(
        "satellite.toml",
        &format!(
            "[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\nusers = [{{ id = \"user_alice\", slug = \"alice\" }}]\n\
             [[teams.installations]]\nid = \"s1\"\nserver = \"search\"\ntransport = \"http\"\nurl = \"{}\"\n\
             user_required = [\"bearer_token\", \"X-Api-Key\", \"tenant\", \"region\"]\n",
            peer.url("/mcp?tenant=nobody")
        ),
    );
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let row = home.wait_status("search", "awaiting_user_config");
    assert!(row["next_step"].as_str().unwrap().contains("Authorization X-Api-Key tenant region`"), "{row:#}");
    for (argument, message) in [
        ("bearer_token=Bearer x", "begins with `Bearer`"),
        ("X-Api-Key=a\nb", "one line of printable characters"),
        ("body=1", "Authorization, X-Api-Key, region, tenant (or bearer_token)"),
    ] {
        let outcome = configure(&home, &["search", argument]).exits(2);
        assert!(outcome.stderr.contains(message), "{message}: {outcome:#?}");
    }
    let all = ["search", "bearer_token=first-token", "x-api-key=the-key", "tenant=acme", "query:region=north"];
    let output = configure(&home, &all).exits(0).stdout;
    assert!(output.contains("is online"), "{output}");
    home.satellite(&["call", "search", "echo"]).exits(0);
    let (mut query, key) = peer.last_head("x-api-key");
    query = query.replace("region=north&tenant=acme", "tenant=acme&region=north");
    assert_eq!((query.as_str(), key.as_deref()), ("tenant=acme&region=north", Some("the-key")));
    assert_eq!(peer.last_call(), "Bearer first-token");
    assert_eq!(peer.sessions_begun(), 1);

    // A changed credential does not start a new session, and a complete header value is sent unchanged.
    configure(&home, &["search", "Authorization=Basic c2Vjb25k"]).exits(0);
    home.satellite(&["call", "search", "echo"]).exits(0);
    assert_eq!((peer.last_call().as_str(), peer.sessions_begun()), ("Basic c2Vjb25k", 1));
    satellite.terminate().exits(0);
}

#[test]
fn a_call_without_required_values_returns_the_configure_command_to_the_model() {
    let home = home();
    let config = two_users(&home);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_others(&home);
    let url =
        satellite.wait_start_message().split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    let mut client = Client::new(&url, Some("sat_alice"));
    client.initialize();
    let answer = client.call("execute_mcp_tool", &json!({"tool_path": "notes:echo", "arguments": {}}));
    let text = answer["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("Ask the user to run `satellite configure notes-acme-alice-n1 API_KEY PIN`."), "{text}");

    // The suggested command is valid except for the missing values.
    let command = text.split('`').find(|part| part.starts_with("satellite configure")).unwrap().to_owned();
    let words: Vec<&str> = command.split(' ').skip(1).collect();
    let outcome = home.satellite(&words).exits(2);
    assert!(outcome.stderr.contains("only one value can be read from stdin"), "{outcome:#?}");
    configure(&home, &["notes", "--user", "alice", "API_KEY=a-key", "PIN=a-pin"]).exits(0);
    let answer = client.call("execute_mcp_tool", &json!({"tool_path": "notes:echo", "arguments": {"text": "now"}}));
    assert_eq!(answer["result"]["structuredContent"]["text"], "now", "{answer:#}");
    satellite.terminate().exits(0);
}

/// A pseudo-terminal: its master and the path of its slave.
fn terminal() -> (OwnedFd, PathBuf) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let path = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    (ours, path.into())
}

/// Whether the terminal echoes input.
fn echoes(terminal: &impl AsFd) -> bool {
    use rustix::termios::{LocalModes, tcgetattr};
    tcgetattr(terminal).unwrap().local_modes.contains(LocalModes::ECHO)
}

#[test]
fn a_value_typed_on_a_terminal_is_not_echoed() {
    let home = home();
    let config = two_users(&home);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    wait_others(&home);
    let prompt = |key: &str| format!("{key} of notes-acme-alice-n1 (not shown): ");
    let begin = |path: &Path| {
        let mut command = home.command(&["configure", "notes", "--user", "alice", "API_KEY", "PIN"]);
        let tty = fs::File::options().read(true).write(true).open(path).unwrap();
        command.arg("--data-dir").arg(home.data_dir()).stdin(Stdio::from(tty));
        home.start(command)
    };
    let (ours, path) = terminal();
    let kept_open = fs::File::options().read(true).open(&path).unwrap();
    let mut typing = fs::File::from(ours.try_clone().unwrap());

    // Ctrl-C at the prompt changes nothing.
    let mut asking = begin(&path);
    asking.wait_stderr(|text| text.contains(&prompt("API_KEY")));
    wait_for("echo to be off", || (!echoes(&kept_open)).then_some(()), String::new);
    asking.signal(nix::sys::signal::Signal::SIGINT);
    let outcome = asking.finish().exits(1);
    assert!(outcome.stderr.contains("nothing was changed"), "{outcome:#?}");
    assert!(echoes(&kept_open));

    let asking = begin(&path);
    asking.wait_stderr(|text| text.contains(&prompt("API_KEY")));
    typing.write_all(b"typed-key\n").unwrap();
    asking.wait_stderr(|text| text.contains(&prompt("PIN")));
    typing.write_all(b"typed-pin\n").unwrap();
    let outcome = asking.finish().exits(0);
    assert!(outcome.stdout.contains("is online"), "{outcome:#?}");
    assert!(echoes(&kept_open));
    assert_eq!(
        (variable(&home, "alice", "API_KEY"), variable(&home, "alice", "PIN")),
        (json!("typed-key"), json!("typed-pin"))
    );
    drop(kept_open);
    // The slave is closed, so this reads all output of the terminal.
    let mut shown = Vec::new();
    let _ = fs::File::from(ours).read_to_end(&mut shown);
    assert!(!String::from_utf8_lossy(&shown).contains("typed"), "{shown:?}");
    satellite.terminate().exits(0);
}
