//! The built satellite against the built backend: two programs that know each other by HTTP only.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{Home, Running, Satellite, pid, seq, wait_for};

/// `satellite backend`, which can be ended and started again where it was.
struct Backend<'a> {
    home: &'a Home,
    process: Option<Running>,
    data: PathBuf,
    url: String,
}

impl<'a> Backend<'a> {
    fn start(home: &'a Home) -> Self {
        // Free a moment ago; whoever takes it in between fails this test, and nobody does.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (data, url) = (home.path().join("backend"), format!("http://127.0.0.1:{port}"));
        let mut backend = Self { home, process: None, data, url };
        backend.again();
        backend
    }

    fn again(&mut self) {
        let listen = self.url.trim_start_matches("http://").to_owned();
        let data = self.data.display().to_string();
        let args = ["backend", "--listen", &listen, "--data-dir", &data, "--poll-interval", "0.05"];
        let process = self.home.start(self.home.command(&args));
        process.wait_stdout(|text| text.contains("backend is running"));
        self.process = Some(process);
    }

    fn end(&mut self) {
        // Dropping it kills it.
        self.process = None;
    }

    /// What it answers to its administrator.
    fn ask(&self, method: &Method, path: &str, body: Option<&Value>) -> Value {
        let token = fs::read_to_string(self.data.join("admin-token")).unwrap();
        let url = format!("{}/api/admin/{path}", self.url);
        // An error says that there is one already.
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
        self.ask(&Method::GET, path, None)
    }

    /// One team with alice and these servers, each the simulated one with these flags.
    fn configure(&self, servers: &[(&str, &[&str])]) -> String {
        let installation = |(id, flags): &(&str, &[&str])| {
            let mut args = vec!["sim-server", "--name", self.home.mark()];
            args.extend_from_slice(flags);
            json!({"id": id, "server": id, "command": self.home.binary, "args": args, "env": {"API_KEY": "hunter2-key"}})
        };
        let installations: Vec<_> = servers.iter().map(installation).collect();
        let users = [json!({"id": "user_alice", "slug": "alice"})];
        let team = json!({"id": "team_acme", "slug": "acme", "users": users, "installations": installations});
        let kept = self.ask(&Method::PUT, "config", Some(&json!({"teams": [team]})));
        kept["hash"].as_str().unwrap().to_owned()
    }

    /// Queues a command, and waits for its result.
    fn command(&self, satellite: &str, kind: &str, payload: &Value) -> Value {
        let wanted = json!({"command_type": kind, "priority": "immediate", "payload": payload});
        let queued = self.ask(&Method::POST, &format!("satellites/{satellite}/commands"), Some(&wanted));
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

    /// A registration token, in a file of the home.
    fn token(&self, file: &str) -> String {
        let made = self.ask(&Method::POST, "registration-tokens", Some(&json!({})));
        fs::write(self.home.path().join(file), made["token"].as_str().unwrap()).unwrap();
        format!("file:{file}")
    }
}

/// What a satellite is told: where its backend is, and to be quick.
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
fn a_backend_steers_a_satellite_from_its_registration_to_its_end() {
    let home = Home::new();
    let backend = Backend::start(&home);
    let hash = backend.configure(&[("notes", &[]), ("search", &["--tools", "3"])]);
    let token = backend.token("token");
    let satellite = run(&home, &config(&home, "satellite-0001", &backend, &token));
    home.wait_online("notes");
    home.wait_online("search");

    let there = |one: &Value| one["applied_config_hash"] == hash.as_str() && one["instances"]["online"] == 2;
    let known = backend.wait_satellite("satellite-0001", "what it runs", there);
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

    // Another configuration: one is new, one goes, and the third does not notice.
    let hash = backend.configure(&[("search", &["--tools", "3"]), ("mail", &[])]);
    home.wait_online("mail");
    wait_for("`notes` to be gone", || home.row("notes").is_none().then_some(()), || status(&home));
    assert_eq!(pid(&home.row("search").unwrap()), pid(&before), "it was not touched");
    let refreshed = home.wait_event(0, "config.refreshed", |event| event["data"]["config_hash"] == hash.as_str());
    assert_eq!(refreshed["data"]["change_detected"], true);

    // Every event arrives.
    let last = home.events().last().map(seq).unwrap();
    backend.wait_satellite("satellite-0001", "its events", |one| one["last_seq"].as_u64() >= Some(last));
    let told = backend.get("events?limit=1000");
    let mut seqs: Vec<_> = told["events"].as_array().unwrap().iter().map(seq).collect();
    seqs.sort_unstable();
    assert_eq!(seqs[..usize::try_from(last).unwrap()], (1..=last).collect::<Vec<_>>()[..], "each once");

    let said = satellite.terminate();
    assert_eq!(said.code, Some(0), "{said:#?}");
    let gone = backend.wait_satellite("satellite-0001", "its last word", |one| one["connected"] == false);
    assert_eq!(gone["heartbeat"]["status"], "stopping");
    // Neither the key nor the token nor what servers are given is in what it said.
    let kept = fs::read_to_string(home.data_dir().join("backend.json")).unwrap();
    let kept: Value = serde_json::from_str(&kept).unwrap();
    let token = fs::read_to_string(home.path().join("token")).unwrap();
    for secret in [kept["api_key"].as_str().unwrap(), token.trim(), "hunter2-key"] {
        assert!(!said.stderr.contains(secret) && !said.stdout.contains(secret), "{secret}");
        assert!(!told.to_string().contains(secret), "{secret}");
    }
}

#[test]
fn a_satellite_runs_on_without_its_backend_starts_without_it_and_tells_it_all_afterwards() {
    let home = Home::new();
    let mut backend = Backend::start(&home);
    backend.configure(&[("notes", &[])]);
    let token = backend.token("token");
    let config = config(&home, "satellite-0001", &backend, &token);
    let satellite = run(&home, &config);
    let before = home.wait_online("notes");
    backend.wait_satellite("satellite-0001", "a heartbeat", |one| one["instances"]["online"] == 1);
    backend.end();
    let told = || Some(status(&home)).filter(|text| text.contains("not connected"));
    let text = wait_for("the outage in the status", told, || status(&home));
    assert!(text.contains("cannot reach"), "{text}");
    home.satellite(&["restart", "notes"]).exits(0);
    assert_ne!(pid(&home.wait_online("notes")), pid(&before), "what a person asks is done all the same");

    // A start without it: what it gave last is run.
    satellite.terminate().exits(0);
    let satellite = run(&home, &config);
    home.wait_online("notes");
    let last = home.events().last().map(seq).unwrap();

    backend.again();
    backend.wait_satellite("satellite-0001", "all events", |one| one["last_seq"].as_u64() >= Some(last));
    // What the configuration's last question came to is told until it is asked for again.
    let told = || Some(status(&home)).filter(|text| !text.contains("not connected") && !text.contains("cannot reach"));
    wait_for("the contact", told, || status(&home));
    satellite.terminate().exits(0);
}

#[test]
fn a_satellite_whose_key_is_taken_away_says_what_to_do_and_comes_back_with_another_token() {
    let home = Home::new();
    let backend = Backend::start(&home);
    backend.configure(&[("notes", &[])]);
    let token = backend.token("token");
    let mut satellite = run(&home, &config(&home, "satellite-0001", &backend, &token));
    let before = home.wait_online("notes");
    backend.wait_satellite("satellite-0001", "a heartbeat", |one| one["instances"]["online"] == 1);
    backend.ask(&Method::DELETE, "satellites/satellite-0001", None);
    let told = || Some(status(&home)).filter(|text| text.contains("create a new one at the backend"));
    wait_for("what to do", told, || status(&home));
    // Its file is looked at, like every other with a credential in it.
    backend.token("token");
    backend.wait_satellite("satellite-0001", "it to come back", |one| one["heartbeat"]["counts"]["online"] == 1);
    assert_eq!(pid(&home.row("notes").unwrap()), pid(&before), "supervision has not noticed");
    satellite.signal(Signal::SIGTERM);
    satellite.ended().exits(0);
}

#[test]
fn two_satellites_have_one_backend() {
    let (mut one, mut other) = (Home::new(), Home::new());
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
        backend.ask(&Method::PUT, &format!("satellites/{satellite}/config"), Some(&servers(home, name)));
        home.wait_online(name);
    }
    let result = backend.command("satellite-0002", "restart", &json!({"installation_id": "search"}));
    assert_eq!(result["status"], "completed", "{result}");
    let result = backend.command("satellite-0001", "restart", &json!({"installation_id": "search"}));
    assert_eq!(result["status"], "failed", "it is the other's");
    assert_eq!((one.rows().len(), other.rows().len()), (1, 1));
    first.terminate().exits(0);
    satellite.terminate().exits(0);
}

/// Events of the configuration so far: the type, and what an error says.
fn of_config(home: &Home) -> Vec<(String, String)> {
    let told = |event: Value| {
        let kind = event["type"].as_str().unwrap().to_owned();
        let says = event["data"]["error_message"].as_str().unwrap_or_default().to_owned();
        kind.starts_with("config.").then_some((kind, says))
    };
    home.events().into_iter().filter_map(told).collect()
}

/// Waits until that many errors of the configuration say this.
fn refused(home: &Home, says: &str, times: usize) {
    let told = || of_config(home).iter().filter(|(kind, why)| kind == "config.error" && why.contains(says)).count();
    wait_for("a refusal", || (told() >= times).then_some(()), || format!("{:#?}", of_config(home)));
}

/// A configuration of one server, `other`, that is started by `env`.
fn by_env(home: &Home) -> Value {
    let args = json!([home.binary, "sim-server", "--name", home.mark()]);
    let installation = json!({"id": "other", "server": "other", "command": "/usr/bin/env", "args": args});
    let users = [json!({"id": "user_alice", "slug": "alice"})];
    json!({"teams": [{"id": "team_acme", "slug": "acme", "users": users, "installations": [installation]}]})
}

/// A file that permits exactly these commands.
fn permitting(text: &str, commands: &[&str]) -> String {
    let permitting = "[satellite]\nprofile = \"production\"\nisolation = \"none\"\nallowed_commands";
    text.replace("[satellite]\n", &format!("{permitting} = {commands:?}\n"))
}

#[test]
fn a_file_that_does_not_go_with_the_backends_configuration_is_taken_on_when_that_has_changed() {
    let home = Home::new();
    let backend = Backend::start(&home);
    let text = fs::read_to_string(config(&home, "satellite-0001", &backend, &backend.token("token-1"))).unwrap();
    let file = home.write("satellite-0001.toml", &permitting(&text, &[home.binary.to_str().unwrap()]));
    backend.configure(&[("notes", &[])]);
    let satellite = run(&home, &file);
    let before = pid(&home.wait_online("notes"));

    // Nothing that runs now may run by this, so it changes nothing.
    home.write("satellite-0001.toml", &permitting(&text, &["/usr/bin/env"]));
    refused(&home, "conflict with the backend's configuration", 1);
    assert_eq!(pid(&home.row("notes").unwrap()), before);
    let refusals = of_config(&home).len();

    // And by what ran before this may not run; by what waits it may.
    backend.ask(&Method::PUT, "config", Some(&by_env(&home)));
    home.wait_online("other");
    wait_for("its end", || home.row("notes").is_none().then_some(()), String::new);
    let told = of_config(&home);
    assert!(told[refusals..].iter().all(|(kind, _)| kind == "config.refreshed"), "{told:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn what_the_backend_gives_and_does_not_go_with_the_file_is_taken_on_when_that_has_changed() {
    let home = Home::new();
    let backend = Backend::start(&home);
    let text = fs::read_to_string(config(&home, "satellite-0001", &backend, &backend.token("token-1"))).unwrap();
    // Nothing but a command or a reason has it looked at.
    let text = text.replace("backoff_max = \"200ms\"", "config_interval = \"1h\"");
    let binary = home.binary.to_str().unwrap();
    // The second goes with what is new only, and with nothing that has run.
    for (times, permitted) in [(1, &["/usr/bin/env", binary][..]), (2, &[binary][..])] {
        backend.ask(&Method::PUT, "config", Some(&by_env(&home)));
        let file = home.write("satellite-0001.toml", &permitting(&text, &["/usr/bin/env"]));
        let satellite = run(&home, &file);
        home.wait_online("other");
        backend.configure(&[("notes", &[])]);
        refused(&home, "cannot be used and nothing was changed", times);
        home.write("satellite-0001.toml", &permitting(&text, permitted));
        home.wait_online("notes");
        satellite.terminate().exits(0);
    }
}

#[test]
fn a_configuration_of_the_backend_that_removes_most_servers_waits_for_a_person() {
    let home = Home::new();
    let backend = Backend::start(&home);
    let all: [(&str, &[&str]); 4] = [("one", &[]), ("two", &[]), ("three", &[]), ("four", &[])];
    backend.configure(&all);
    let satellite = run(&home, &config(&home, "satellite-0001", &backend, &backend.token("token")));
    for (server, _) in all {
        home.wait_online(server);
    }
    backend.configure(&all[..1]);
    refused(&home, "removes 3 of 4 servers", 1);
    assert_eq!(home.rows().len(), 4, "nothing was changed");
    home.satellite(&["reload", "--accept"]).exits(0);
    wait_for("what was accepted", || (home.rows().len() == 1).then_some(()), || status(&home));
    // Once: the next one that does so is rejected again.
    backend.configure(&all);
    wait_for("all to be back", || (home.rows().len() == 4).then_some(()), || status(&home));
    backend.configure(&all[1..2]);
    refused(&home, "removes 3 of 4 servers", 2);
    satellite.terminate().exits(0);
}

#[test]
fn with_a_backend_the_file_says_nothing_of_what_to_run() {
    let home = Home::new();
    let text = "[backend]\nurl = \"https://backend.example.com\"\n[servers.a]\ncommand = \"a\"\n[[teams]]\nid = \"t\"\nslug = \"t\"\n";
    let file = home.write("both.toml", text);
    let said = home.bare(&["check", "--config", file.to_str().unwrap()]).exits(2);
    assert!(said.stderr.contains("conflicts with [backend]"), "{}", said.stderr);
    let file = home.write("one.toml", "[backend]\nurl = \"https://backend.example.com\"\n");
    let json = home.write("mcp.json", "{\"mcpServers\": {\"a\": {\"command\": \"a\"}}}");
    let args = ["check", "--config", file.to_str().unwrap(), "--mcp-json", json.to_str().unwrap()];
    let said = home.bare(&args).exits(2);
    assert!(said.stderr.contains("leave out --mcp-json"), "{}", said.stderr);
}
