//! The built binary: `satellite backend`.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use mcp_satellite::backend::server::schema::MessageSchema;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::Method;
use serde_json::json;
use tempfile::TempDir;
use testkit::wait::GIVE_UP;

use super::support::{PendingRequest, client, heartbeat, numbered, read, registration};

/// A running `satellite backend`, killed when dropped.
struct Process {
    child: Child,
    stdout: String,
    url: String,
}

impl Process {
    fn start(dir: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_satellite"));
        command.args(["backend", "--listen", "127.0.0.1:0", "--data-dir"]).arg(dir.join("data")).args(args);
        command.env("RUST_LOG", "trace").env_remove("SATELLITE_BACKEND_DATA_DIR").stdout(Stdio::piped());
        command.stderr(std::fs::File::create(dir.join("log")).unwrap()).stdin(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut stdout = String::new();
        while !stdout.contains("/instances/stream") {
            assert!(lines.read_line(&mut stdout).unwrap() > 0, "the backend ended: {stdout}{}", read(&dir.join("log")));
        }
        let url = stdout.split_once("url = \"").unwrap().1.split_once('"').unwrap().0.to_owned();
        Self { child, stdout, url }
    }

    fn request(&self, method: Method, path: &str, token: &str) -> PendingRequest {
        let request = client().request(method, format!("{}{path}", self.url));
        PendingRequest(request.header("Authorization", format!("Bearer {token}")))
    }

    fn end(&mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < GIVE_UP, "the backend did not end");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn credentials_are_not_in_database_log_or_output_and_files_are_private() {
    let dir = TempDir::with_prefix("backend-").unwrap();
    let mut process = Process::start(dir.path(), &[]);
    let data = dir.path().join("data");
    let admin = read(&data.join("admin-token"));
    let made = process.request(Method::POST, "/api/admin/registration-tokens", &admin).json(&json!({})).await;
    let token = made.is(201, MessageSchema::IssuedToken)["token"].as_str().unwrap().to_owned();
    let request = process.request(Method::POST, "/api/satellites/register", &token);
    let registered = request.json(&registration("first-satellite")).await.is(201, MessageSchema::RegistrationResponse);
    let (id, key) = (registered["satellite_id"].as_str().unwrap(), registered["api_key"].as_str().unwrap());
    let config = json!({"teams": [{"id": "acme", "env": {"KEY": "hunter2-of-the-config"}}]});
    process
        .request(Method::PUT, "/api/admin/config", &admin)
        .json(&config)
        .await
        .is(200, MessageSchema::ConfigUpdateResult);
    let wrong = json!({"teams": ["hunter2-of-the-config"]});
    process.request(Method::PUT, "/api/admin/config", &admin).json(&wrong).await.refused(400, "/teams/0");
    let own = |method, path: &str| process.request(method, &format!("/api/satellites/{id}/{path}"), key);
    own(Method::GET, "config").send().await.is(200, MessageSchema::Config);
    own(Method::POST, "events").json(&json!({"events": numbered([1])})).await.is(200, MessageSchema::EventBatchResult);
    own(Method::POST, "heartbeat").json(&heartbeat(jiff::Timestamp::now())).await.is(200, MessageSchema::EmptyResponse);
    let stranger = "sbk_stranger-with-a-key-of-no-one";
    process.request(Method::GET, &format!("/api/satellites/{id}/config"), stranger).send().await.refused(401, "");

    // While the backend runs, the last changes are in the WAL.
    let mut database = Vec::new();
    let mut files = BTreeSet::new();
    for entry in std::fs::read_dir(&data).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        if name.starts_with("backend.db") {
            database.extend(std::fs::read(entry.path()).unwrap());
        }
        files.insert(name);
    }
    let expected = [
        ".gitignore",
        "admin-token",
        "admin.curl",
        "backend.db",
        "backend.db-shm",
        "backend.db-wal",
        "lock",
        "registration-token",
    ];
    assert_eq!(files, expected.map(str::to_owned).into());
    assert_eq!(std::fs::metadata(&data).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(process.end(Signal::SIGTERM).success());
    database.extend(std::fs::read(data.join("backend.db")).unwrap());

    let log = read(&dir.path().join("log"));
    let offered = read(&data.join("registration-token"));
    assert!(log.contains("a satellite has registered") && log.contains("\"answered\""), "{log}");
    let has = |text: &[u8], word: &str| text.windows(word.len()).any(|part| part == word.as_bytes());
    assert!(has(&database, "first-satellite"), "the database contains the name");
    for secret in [&admin, &token, key, &offered, stranger] {
        let secret = secret.split_once('_').unwrap().1;
        assert!(!has(&database, secret), "a credential is in the database");
        assert!(!log.contains(secret), "a credential is in the log");
        assert!(!process.stdout.contains(secret), "a credential is in the output");
    }
    assert!(!log.contains("hunter2"), "a value of the configuration is in the log");
}

#[tokio::test]
async fn the_printed_commands_and_configuration_work() {
    let dir = TempDir::with_prefix("backend-").unwrap();
    let mut process = Process::start(dir.path(), &["--poll-interval", "0.5"]);
    let curl = process.stdout.lines().find(|line| line.contains("/api/admin/registration-tokens")).unwrap();
    let made = Command::new("bash").args(["-c", curl]).output().unwrap();
    // The token must not be an argument: all users of the machine can see the arguments of processes.
    let tools = dir.path().join("tools");
    std::fs::create_dir(&tools).unwrap();
    std::fs::write(tools.join("curl"), "#!/bin/sh\necho \"$@\"\n").unwrap();
    std::fs::set_permissions(tools.join("curl"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    let lines = process.stdout.lines().filter(|line| line.trim_start().starts_with("curl ")).collect::<Vec<_>>();
    assert_eq!(lines.len(), 6);
    assert!(process.stdout.contains(&format!("{}/console/", process.url)));
    // In this mode it is as strict as zsh: a pattern that fits no file is an error.
    let seen =
        Command::new("bash").args(["-O", "failglob", "-c", &lines.join("\n")]).env("PATH", path).output().unwrap();
    let seen = String::from_utf8(seen.stdout).unwrap();
    assert_eq!(seen.lines().count(), 6);
    assert!(!seen.contains(&read(&dir.path().join("data/admin-token"))), "{seen}");
    let token: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap_or_else(|_| panic!("{made:?}"));
    let request = process.request(Method::POST, "/api/satellites/register", token["token"].as_str().unwrap());
    let registered = request.json(&registration("first-satellite")).await.is(201, MessageSchema::RegistrationResponse);
    let path = format!("/api/satellites/{}/commands", registered["satellite_id"].as_str().unwrap());
    let polled = process.request(Method::GET, &path, registered["api_key"].as_str().unwrap()).send().await;
    assert_eq!(polled.is(200, MessageSchema::Commands)["next_poll_interval"], 0.5);
    let file = process.stdout.split_once("token = \"file:").unwrap().1.split_once('"').unwrap().0;
    let request = process.request(Method::POST, "/api/satellites/register", &read(Path::new(file)));
    request.json(&registration("second-satellite")).await.is(201, MessageSchema::RegistrationResponse);
    assert!(process.end(Signal::SIGINT).success());
}

#[tokio::test]
async fn acknowledged_events_survive_a_kill() {
    let dir = TempDir::with_prefix("backend-").unwrap();
    let mut process = Process::start(dir.path(), &[]);
    let token = read(&dir.path().join("data/registration-token"));
    let request = process.request(Method::POST, "/api/satellites/register", &token);
    let registered = request.json(&registration("first-satellite")).await.is(201, MessageSchema::RegistrationResponse);
    let (id, key) = (registered["satellite_id"].as_str().unwrap(), registered["api_key"].as_str().unwrap());
    for batch in 0..20 {
        let events = json!({"events": numbered(batch * 100 + 1..=batch * 100 + 100)});
        let sent = process.request(Method::POST, &format!("/api/satellites/{id}/events"), key).json(&events).await;
        sent.is(200, MessageSchema::EventBatchResult);
    }
    assert!(!process.end(Signal::SIGKILL).success());
    let process = Process::start(dir.path(), &[]);
    let admin = read(&dir.path().join("data/admin-token"));
    let shown = process.request(Method::GET, &format!("/api/admin/satellites/{id}"), &admin).send().await;
    let shown = shown.is(200, MessageSchema::Satellite);
    assert_eq!((&shown["events"], &shown["last_seq"]), (&json!(2000), &json!(2000)));
}

#[tokio::test]
async fn an_occupied_port_or_directory_is_reported_with_a_next_step() {
    let dir = TempDir::with_prefix("backend-").unwrap();
    let process = Process::start(dir.path(), &[]);
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_satellite")).arg("backend").args(args).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (data, elsewhere) = (dir.path().join("data"), dir.path().join("elsewhere"));
    let taken = process.url.strip_prefix("http://").unwrap();
    let (code, stderr) = run(&["--listen", taken, "--data-dir", elsewhere.to_str().unwrap()]);
    assert!(code == Some(2) && stderr.contains("another --listen"), "{code:?} {stderr}");
    let (code, stderr) = run(&["--listen", "127.0.0.1:0", "--data-dir", data.to_str().unwrap()]);
    assert!(code == Some(2) && stderr.contains("already running"), "{code:?} {stderr}");
    let (code, stderr) = run(&["--poll-interval", "0"]);
    assert!(code == Some(2) && stderr.contains("0.05 to 3600"), "{code:?} {stderr}");
}

#[tokio::test]
async fn an_unencrypted_public_address_prints_a_warning() {
    let dir = TempDir::with_prefix("backend-").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_satellite"));
    command.args(["backend", "--listen", "0.0.0.0:0", "--data-dir"]).arg(dir.path().join("data"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = String::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    while !stdout.contains("/instances/stream") {
        assert!(lines.read_line(&mut stdout).unwrap() > 0, "{stdout}");
    }
    kill(Pid::from_raw(child.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(stderr.contains("WARNING") && stderr.contains("not encrypted"), "{stderr}");
    assert!(stdout.contains("http://THIS-MACHINE:"), "{stdout}");
}
