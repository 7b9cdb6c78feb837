//! The built satellite and the built backend, connected by HTTP only.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};
use testkit::home::{Home, Running, Satellite, pid, seq};
use testkit::wait::wait_for;

use crate::SATELLITE;

/// `satellite backend`, which can be stopped and restarted on the same port.
struct Backend<'a> {
    home: &'a Home,
    process: Option<Running>,
    data: PathBuf,
    url: String,
}

impl<'a> Backend<'a> {
    fn start(home: &'a Home) -> Self {
        // Another program could take the port before the backend binds it, but that is unlikely.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (data, url) = (home.path().join("backend"), format!("http://127.0.0.1:{port}"));
        let mut backend = Self { home, process: None, data, url };
        backend.restart();
        backend
    }

    fn restart(&mut self) {
        let listen = self.url.trim_start_matches("http://").to_owned();
        let data = self.data.display().to_string();
        let args = ["backend", "--listen", &listen, "--data-dir", &data, "--poll-interval", "0.05"];
        let process = self.home.start(self.home.command(&args));
        process.wait_stdout(|text| text.contains("backend is running"));
        self.process = Some(process);
    }

    fn stop(&mut self) {
        // Dropping the process kills it.
        self.process = None;
    }

    /// Sends a request to the administrator API.
    fn admin(&self, method: &Method, path: &str, body: Option<&Value>) -> Value {
        let token = fs::read_to_string(self.data.join("admin-token")).unwrap();
        let url = format!("{}/api/admin/{path}", self.url);
        // It fails if a provider is installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let asking = async {
            let client = reqwest::Client::builder().no_proxy().build().unwrap();
            let mut request = client.request(method.clone(), url).bearer_auth(token.trim());
            if let Some(body) = body {
                request = request.json(body);
            }
            let answer = request.send().await.unwrap();
            let status = answer.status();
            let text = answer.text().await.unwrap();
            assert!(status.is_success(), "{method} {path}: {status} {text}");
            serde_json::from_str(&text).unwrap()
        };
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(asking)
    }

    fn get(&self, path: &str) -> Value {
        self.admin(&Method::GET, path, None)
    }

    /// Configures one team with alice and these simulated servers: name and flags.
    fn configure(&self, servers: &[(&str, &[&str])]) -> String {
        let installation = |(id, flags): &(&str, &[&str])| {
            let mut args = vec!["sim-server", "--name", self.home.mark()];
            args.extend_from_slice(flags);
            json!({"id": id, "server": id, "command": self.home.binary, "args": args, "env": {"API_KEY": "hunter2-key"}})
        };
        let installations: Vec<_> = servers.iter().map(installation).collect();
        let users = [json!({"id": "user_alice", "slug": "alice"})];
        let team = json!({"id": "team_acme", "slug": "acme", "users": users, "installations": installations});
        let stored = self.admin(&Method::PUT, "config", Some(&json!({"teams": [team]})));
        stored["hash"].as_str().unwrap().to_owned()
    }

    /// Queues a command and waits for its result.
    fn command(&self, satellite: &str, kind: &str, payload: &Value) -> Value {
        let wanted = json!({"command_type": kind, "priority": "immediate", "payload": payload});
        let queued = self.admin(&Method::POST, &format!("satellites/{satellite}/commands"), Some(&wanted));
        let path = format!("satellites/{satellite}/commands/{}", queued["id"].as_str().unwrap());
        let look = || Some(self.get(&path)["result"].clone()).filter(|result| !result.is_null());
        wait_for("the result of a command", look, || self.get(&path).to_string())
    }

    fn wait_satellite(&self, satellite: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let path = format!("satellites/{satellite}");
        let known =
            || self.get("satellites")["satellites"].as_array().unwrap().iter().any(|one| one["name"] == satellite);
        let look = || if known() { Some(self.get(&path)).filter(|one| wanted(one)) } else { None };
        wait_for(what, look, || self.get("satellites").to_string())
    }

    /// Writes a new registration token to a file in the home directory.
    fn token(&self, file: &str) -> String {
        let made = self.admin(&Method::POST, "registration-tokens", Some(&json!({})));
        fs::write(self.home.path().join(file), made["token"].as_str().unwrap()).unwrap();
        format!("file:{file}")
    }
}

/// A satellite configuration with this backend and short intervals.
fn config(home: &Home, name: &str, backend: &Backend<'_>, token: &str) -> PathBuf {
    let text = format!(
        "[satellite]\nname = \"{name}\"\n[events]\ninterval = \"50ms\"\n[backend]\nurl = \"{}\"\ntoken = \"{token}\"\n\
         heartbeat_interval = \"100ms\"\nbackoff_max = \"200ms\"\n[backend.poll]\nimmediate = \"50ms\"\nhigh = \"50ms\"\n\
         normal = \"50ms\"\nidle = \"50ms\"\n",
        backend.url
    );
    home.write(&format!("{name}.toml"), &text)
}

fn run<'a>(home: &'a Home, config: &std::path::Path) -> Satellite<'a> {
    home.run(&["--config", config.to_str().unwrap(), "--log-format", "json"])
}

fn status(home: &Home) -> String {
    home.satellite(&["status"]).stdout
}

#[test]
fn a_backend_controls_a_satellite_from_registration_to_stop() {
    let home = Home::new(SATELLITE);
    let backend = Backend::start(&home);
    let hash = backend.configure(&[("notes", &[]), ("search", &["--tools", "3"])]);
    let token = backend.token("token");
    let satellite = run(&home, &config(&home, "satellite-0001", &backend, &token));
    home.wait_online("notes");
    home.wait_online("search");

    let there = |one: &Value| one["applied_config_hash"] == hash.as_str() && one["instances"]["online"] == 2;
    let known = backend.wait_satellite("satellite-0001", "two online instances", there);
    assert_eq!((&known["connected"], &known["config_hash"]), (&json!(true), &json!(hash)));
    assert!(known["heartbeat"]["system"]["memory_total_bytes"].as_u64() > Some(1 << 20), "{known}");
    let line = status(&home);
    let line = line.lines().find(|line| line.starts_with("backend: ")).unwrap_or_else(|| panic!("{line}"));
    assert!(line.contains(&backend.url) && line.contains("connected as"), "{line}");

    let before = home.row("search").unwrap();
    let result = backend.command("satellite-0001", "restart", &json!({"installation_id": "notes"}));
    assert_eq!(
        (&result["status"], &result["result"]["instances"][0]["status"]),
        (&json!("completed"), &json!("online"))
    );
    assert_eq!(home.row("notes").unwrap()["restarts"], 1);
    let result = backend.command("satellite-0001", "health_check", &json!({"installation_id": "notes"}));
    assert_eq!(result["result"]["instances"][0]["credentials"], "accepted", "{result}");
    let result = backend.command("satellite-0001", "kill", &json!({"installation_id": "notes"}));
    assert_eq!(result["status"], "completed", "{result}");
    assert_eq!(home.row("notes").unwrap()["want"], "stopped");
    let result = backend.command("satellite-0001", "spawn", &json!({"installation_id": "notes"}));
    assert_eq!(result["status"], "completed", "{result}");

    // Another configuration: `mail` is new, `notes` is removed, and `search` stays.
    let hash = backend.configure(&[("search", &["--tools", "3"]), ("mail", &[])]);
    home.wait_online("mail");
    wait_for("`notes` to be gone", || home.row("notes").is_none().then_some(()), || status(&home));
    assert_eq!(pid(&home.row("search").unwrap()), pid(&before), "`search` was not restarted");
    let refreshed = home.wait_event(0, "config.refreshed", |event| event["data"]["config_hash"] == hash.as_str());
    assert_eq!(refreshed["data"]["change_detected"], true);

    let last = home.events().last().map(seq).unwrap();
    backend.wait_satellite("satellite-0001", "its events", |one| one["last_seq"].as_u64() >= Some(last));
    let stored = backend.get("events?limit=1000");
    let mut seqs: Vec<_> = stored["events"].as_array().unwrap().iter().map(seq).collect();
    seqs.sort_unstable();
    assert_eq!(seqs[..usize::try_from(last).unwrap()], (1..=last).collect::<Vec<_>>()[..], "each event arrives once");

    let outcome = satellite.terminate();
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    let stopped = backend.wait_satellite("satellite-0001", "the last heartbeat", |one| one["connected"] == false);
    assert_eq!(stopped["heartbeat"]["status"], "stopping");
    // Neither the key nor the token nor the values of servers leak into output and events.
    let key_row = home.stored("keys").into_iter().find(|row| row[0] == "backend").unwrap();
    let key: Value = serde_json::from_str(&key_row[1]).unwrap();
    let token = fs::read_to_string(home.path().join("token")).unwrap();
    for secret in [key["api_key"].as_str().unwrap(), token.trim(), "hunter2-key"] {
        assert!(!outcome.stderr.contains(secret) && !outcome.stdout.contains(secret), "{secret}");
        assert!(!stored.to_string().contains(secret), "{secret}");
    }
}

#[test]
fn a_satellite_runs_and_starts_without_its_backend_and_delivers_events_later() {
    let home = Home::new(SATELLITE);
    let mut backend = Backend::start(&home);
    backend.configure(&[("notes", &[])]);
    let token = backend.token("token");
    let config = config(&home, "satellite-0001", &backend, &token);
    let satellite = run(&home, &config);
    let before = home.wait_online("notes");
    backend.wait_satellite("satellite-0001", "a heartbeat", |one| one["instances"]["online"] == 1);
    backend.stop();
    let look = || Some(status(&home)).filter(|text| text.contains("not connected"));
    let text = wait_for("the outage in the status", look, || status(&home));
    assert!(text.contains("cannot reach"), "{text}");
    home.satellite(&["restart", "notes"]).exits(0);
    assert_ne!(pid(&home.wait_online("notes")), pid(&before), "commands of a person work during the outage");

    // A start without the backend runs its last configuration.
    satellite.terminate().exits(0);
    let satellite = run(&home, &config);
    home.wait_online("notes");
    let last = home.events().last().map(seq).unwrap();

    backend.restart();
    backend.wait_satellite("satellite-0001", "all events", |one| one["last_seq"].as_u64() >= Some(last));
    // The last error of the configuration stays in the status until the next request.
    let look = || Some(status(&home)).filter(|text| !text.contains("not connected") && !text.contains("cannot reach"));
    wait_for("the contact", look, || status(&home));
    satellite.terminate().exits(0);
}

#[test]
fn a_satellite_with_a_revoked_key_names_the_next_step_and_registers_again() {
    let home = Home::new(SATELLITE);
    let backend = Backend::start(&home);
    backend.configure(&[("notes", &[])]);
    let token = backend.token("token");
    let mut satellite = run(&home, &config(&home, "satellite-0001", &backend, &token));
    let before = home.wait_online("notes");
    backend.wait_satellite("satellite-0001", "a heartbeat", |one| one["instances"]["online"] == 1);
    backend.admin(&Method::DELETE, "satellites/satellite-0001", None);
    let look = || Some(status(&home)).filter(|text| text.contains("create a new one at the backend"));
    wait_for("the next step in the status", look, || status(&home));
    // The satellite watches the token file, like every file with a credential.
    backend.token("token");
    backend.wait_satellite("satellite-0001", "the new registration", |one| one["heartbeat"]["counts"]["online"] == 1);
    assert_eq!(pid(&home.row("notes").unwrap()), pid(&before), "the server was not restarted");
    satellite.signal(Signal::SIGTERM);
    satellite.ended().exits(0);
}

#[test]
fn two_satellites_can_use_one_backend() {
    let (mut one, mut other) = (Home::new(SATELLITE), Home::new(SATELLITE));
    one.use_data_dir("one");
    other.use_data_dir("other");
    let backend = Backend::start(&one);
    let (token, second) = (backend.token("token-1"), backend.token("token-2"));
    fs::copy(one.path().join("token-2"), other.path().join("token-2")).unwrap();
    let first = run(&one, &config(&one, "satellite-0001", &backend, &token));
    let satellite = run(&other, &config(&other, "satellite-0002", &backend, &second));
    let servers = |home: &Home, name: &str| {
        let args = ["sim-server", "--name", home.mark()];
        let installation = json!({"id": name, "server": name, "command": home.binary, "args": args});
        let users = [json!({"id": "user_alice", "slug": "alice"})];
        json!({"teams": [{"id": "team_acme", "slug": "acme", "users": users, "installations": [installation]}]})
    };
    for (satellite, home, name) in [("satellite-0001", &one, "notes"), ("satellite-0002", &other, "search")] {
        backend.wait_satellite(satellite, "its registration", |_| true);
        backend.admin(&Method::PUT, &format!("satellites/{satellite}/config"), Some(&servers(home, name)));
        home.wait_online(name);
    }
    let result = backend.command("satellite-0002", "restart", &json!({"installation_id": "search"}));
    assert_eq!(result["status"], "completed", "{result}");
    let result = backend.command("satellite-0001", "restart", &json!({"installation_id": "search"}));
    assert_eq!(result["status"], "failed", "`search` belongs to the other satellite");
    assert_eq!((one.rows().len(), other.rows().len()), (1, 1));
    first.terminate().exits(0);
    satellite.terminate().exits(0);
}

/// The `config.*` events so far: type and error message.
fn config_events(home: &Home) -> Vec<(String, String)> {
    let config_event = |event: Value| {
        let kind = event["type"].as_str().unwrap().to_owned();
        let text = event["data"]["error_message"].as_str().unwrap_or_default().to_owned();
        kind.starts_with("config.").then_some((kind, text))
    };
    home.events().into_iter().filter_map(config_event).collect()
}

/// Waits for so many `config.error` events with this text.
fn wait_for_config_errors(home: &Home, text: &str, times: usize) {
    let count =
        || config_events(home).iter().filter(|(kind, why)| kind == "config.error" && why.contains(text)).count();
    wait_for("a config.error event", || (count() >= times).then_some(()), || format!("{:#?}", config_events(home)));
}

/// A configuration of one server, `other`, whose command is `/usr/bin/env`.
fn config_with_env_command(home: &Home) -> Value {
    let args = json!([home.binary, "sim-server", "--name", home.mark()]);
    let installation = json!({"id": "other", "server": "other", "command": "/usr/bin/env", "args": args});
    let users = [json!({"id": "user_alice", "slug": "alice"})];
    json!({"teams": [{"id": "team_acme", "slug": "acme", "users": users, "installations": [installation]}]})
}

/// Adds exactly these allowed commands to a configuration file.
fn with_allowed_commands(text: &str, commands: &[&str]) -> String {
    let settings = "[satellite]\nprofile = \"production\"\nisolation = \"none\"\nallowed_commands";
    text.replace("[satellite]\n", &format!("{settings} = {commands:?}\n"))
}

#[test]
fn a_file_that_conflicts_with_the_backend_is_applied_once_the_backend_changes() {
    let home = Home::new(SATELLITE);
    let backend = Backend::start(&home);
    let text = fs::read_to_string(config(&home, "satellite-0001", &backend, &backend.token("token-1"))).unwrap();
    let file = home.write("satellite-0001.toml", &with_allowed_commands(&text, &[home.binary.to_str().unwrap()]));
    backend.configure(&[("notes", &[])]);
    let satellite = run(&home, &file);
    let before = pid(&home.wait_online("notes"));

    // The new file forbids the running command, so it is not applied.
    home.write("satellite-0001.toml", &with_allowed_commands(&text, &["/usr/bin/env"]));
    wait_for_config_errors(&home, "conflict with the backend's configuration", 1);
    assert_eq!(pid(&home.row("notes").unwrap()), before);
    let refusals = config_events(&home).len();

    // The old file forbids the new command; the pending file allows it.
    backend.admin(&Method::PUT, "config", Some(&config_with_env_command(&home)));
    home.wait_online("other");
    wait_for("its end", || home.row("notes").is_none().then_some(()), String::new);
    let events = config_events(&home);
    assert!(events[refusals..].iter().all(|(kind, _)| kind == "config.refreshed"), "{events:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_backend_configuration_that_conflicts_is_applied_once_the_file_changes() {
    let home = Home::new(SATELLITE);
    let backend = Backend::start(&home);
    let text = fs::read_to_string(config(&home, "satellite-0001", &backend, &backend.token("token-1"))).unwrap();
    // With this interval the configuration is read only on a command or another trigger.
    let text = text.replace("backoff_max = \"200ms\"", "config_interval = \"1h\"");
    let binary = home.binary.to_str().unwrap();
    // The second file allows only the new command, not the one that ran before.
    for (times, permitted) in [(1, &["/usr/bin/env", binary][..]), (2, &[binary][..])] {
        backend.admin(&Method::PUT, "config", Some(&config_with_env_command(&home)));
        let file = home.write("satellite-0001.toml", &with_allowed_commands(&text, &["/usr/bin/env"]));
        let satellite = run(&home, &file);
        home.wait_online("other");
        backend.configure(&[("notes", &[])]);
        wait_for_config_errors(&home, "cannot be used and nothing was changed", times);
        home.write("satellite-0001.toml", &with_allowed_commands(&text, permitted));
        home.wait_online("notes");
        satellite.terminate().exits(0);
    }
}

#[test]
fn a_backend_configuration_that_removes_most_servers_needs_acceptance() {
    let home = Home::new(SATELLITE);
    let backend = Backend::start(&home);
    let all: [(&str, &[&str]); 4] = [("one", &[]), ("two", &[]), ("three", &[]), ("four", &[])];
    backend.configure(&all);
    let satellite = run(&home, &config(&home, "satellite-0001", &backend, &backend.token("token")));
    for (server, _) in all {
        home.wait_online(server);
    }
    backend.configure(&all[..1]);
    wait_for_config_errors(&home, "removes 3 of 4 servers", 1);
    assert_eq!(home.rows().len(), 4, "the configuration was not applied");
    home.satellite(&["reload", "--accept"]).exits(0);
    wait_for("the accepted configuration", || (home.rows().len() == 1).then_some(()), || status(&home));
    // Acceptance is valid once: the next such configuration is rejected again.
    backend.configure(&all);
    wait_for("all servers to be back", || (home.rows().len() == 4).then_some(()), || status(&home));
    backend.configure(&all[1..2]);
    wait_for_config_errors(&home, "removes 3 of 4 servers", 2);
    satellite.terminate().exits(0);
}

#[test]
fn a_file_with_a_backend_must_not_define_servers() {
    let home = Home::new(SATELLITE);
    let text = "[backend]\nurl = \"https://backend.example.com\"\n[servers.a]\ncommand = \"a\"\n[[teams]]\nid = \"t\"\nslug = \"t\"\n";
    let file = home.write("both.toml", text);
    let outcome = home.bare(&["check", "--config", file.to_str().unwrap()]).exits(2);
    assert!(outcome.stderr.contains("conflicts with [backend]"), "{}", outcome.stderr);
    let file = home.write("one.toml", "[backend]\nurl = \"https://backend.example.com\"\n");
    let json = home.write("mcp.json", "{\"mcpServers\": {\"a\": {\"command\": \"a\"}}}");
    let args = ["check", "--config", file.to_str().unwrap(), "--mcp-json", json.to_str().unwrap()];
    let outcome = home.bare(&args).exits(2);
    assert!(outcome.stderr.contains("leave out --mcp-json"), "{}", outcome.stderr);
}
