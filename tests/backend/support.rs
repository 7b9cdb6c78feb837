//! A backend with a clock that the test controls, and clients that validate every response against its schema.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, Once};

use jiff::{SignedDuration, Timestamp};
use mcp_satellite::backend::server::schema::MessageSchema;
use mcp_satellite::backend::server::{BackendClock, BackendServer, BackendSettings, RunningBackend};
use mcp_satellite::backend_console::{BackendConsoleTask, attach};
use mcp_satellite::data_dir::private_tempdir;
use reqwest::header::{AUTHORIZATION, HeaderMap};
use reqwest::{Client, Method, RequestBuilder};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::wait::GIVE_UP;

use super::validators::SchemaValidators;

/// The published schemas.
pub(crate) static SCHEMAS: LazyLock<SchemaValidators> = LazyLock::new(SchemaValidators::new);

pub(crate) fn client() -> Client {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| rustls::crypto::ring::default_provider().install_default().unwrap());
    Client::builder().no_proxy().timeout(GIVE_UP).build().unwrap()
}

/// A running backend with its data directory and a client.
pub(crate) struct TestBackend {
    dir: TempDir,
    now: Arc<Mutex<Timestamp>>,
    events_body_max: usize,
    pub(crate) events_max: usize,
    serving: Option<RunningBackend>,
    console: Option<BackendConsoleTask>,
    client: Client,
    url: String,
}

impl TestBackend {
    pub(crate) async fn new() -> Self {
        Self::with_events_of(BackendSettings::new("").events_body_max).await
    }

    /// Starts a backend with this size limit for a batch of events, in bytes.
    pub(crate) async fn with_events_of(events_body_max: usize) -> Self {
        let now = Arc::new(Mutex::new("2026-11-21T06:33:00Z".parse().unwrap()));
        let (dir, client, url) = (private_tempdir(), client(), String::new());
        let events_max = BackendSettings::new("").events_max;
        let mut backend = Self { dir, now, events_body_max, events_max, serving: None, console: None, client, url };
        backend.start().await;
        backend
    }

    pub(crate) async fn start(&mut self) {
        let backend = BackendServer::open(self.settings()).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hosts = vec!["fleet.example.com".to_owned()];
        self.console = Some(attach(&backend, listener.local_addr().unwrap(), hosts).unwrap());
        let serving = backend.serve(listener).unwrap();
        self.url = format!("http://{}", serving.address());
        self.serving = Some(serving);
    }

    pub(crate) fn settings(&self) -> BackendSettings {
        let now = self.now.clone();
        let clock = BackendClock::new(move || *now.lock().unwrap());
        let (events_body_max, events_max) = (self.events_body_max, self.events_max);
        BackendSettings { clock, events_body_max, events_max, ..BackendSettings::new(self.data_dir()) }
    }

    /// Shuts the backend down, as a signal does.
    pub(crate) async fn stop(&mut self) {
        self.serving.take().unwrap().shut_down().await;
    }

    /// Restarts the backend on the same data directory.
    pub(crate) async fn restart(&mut self) {
        self.stop().await;
        self.start().await;
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn now(&self) -> Timestamp {
        *self.now.lock().unwrap()
    }

    pub(crate) fn advance_clock(&self, time: SignedDuration) {
        *self.now.lock().unwrap() += time;
    }

    pub(crate) fn file(&self, name: &str) -> String {
        read(&self.data_dir().join(name))
    }

    pub(crate) fn request(&self, method: Method, path: &str, token: &str) -> PendingRequest {
        let request = self.client.request(method, format!("{}{path}", self.url));
        PendingRequest(request.header(AUTHORIZATION, format!("Bearer {token}")))
    }

    pub(crate) fn admin(&self, method: Method, path: &str) -> PendingRequest {
        self.request(method, &format!("/api/admin/{path}"), &self.file("admin-token"))
    }

    pub(crate) async fn token(&self) -> String {
        let made = self.admin(Method::POST, "registration-tokens").json(&json!({})).await;
        made.is(201, MessageSchema::IssuedToken)["token"].as_str().unwrap().to_owned()
    }

    /// Creates a registration token for a satellite of this name.
    pub(crate) async fn token_for(&self, name: &str) -> String {
        let made = self.admin(Method::POST, "registration-tokens").json(&json!({"name": name})).await;
        made.is(201, MessageSchema::IssuedToken)["token"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn register(&self, name: &str, token: &str) -> Answer {
        self.request(Method::POST, "/api/satellites/register", token).json(&registration(name)).await
    }

    /// Registers a satellite.
    pub(crate) async fn satellite(&self, name: &str) -> Satellite {
        let registered =
            self.register(name, &self.token_for(name).await).await.is(201, MessageSchema::RegistrationResponse);
        let text = |name: &str| registered[name].as_str().unwrap().to_owned();
        Satellite { id: text("satellite_id"), key: text("api_key") }
    }

    pub(crate) fn as_satellite(&self, satellite: &Satellite, method: Method, path: &str) -> PendingRequest {
        self.request(method, &format!("/api/satellites/{}/{path}", satellite.id), &satellite.key)
    }

    pub(crate) async fn poll(&self, satellite: &Satellite) -> Value {
        self.as_satellite(satellite, Method::GET, "commands").send().await.is(200, MessageSchema::Commands)
    }

    /// Polls and returns the ids of the commands.
    pub(crate) async fn pending_commands(&self, satellite: &Satellite) -> Vec<String> {
        let polled = self.poll(satellite).await;
        polled["commands"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
    }

    pub(crate) async fn queue(&self, satellite: &Satellite, command: &Value) -> Answer {
        self.admin(Method::POST, &format!("satellites/{}/commands", satellite.id)).json(command).await
    }

    pub(crate) async fn result(&self, satellite: &Satellite, command: &str, status: &str) -> Answer {
        let result = json!({"status": status, "result": {}, "duration_ms": 5});
        self.as_satellite(satellite, Method::POST, &format!("commands/{command}/result")).json(&result).await
    }

    /// Puts an empty configuration for all satellites.
    pub(crate) async fn put_empty_config(&self) {
        self.admin(Method::PUT, "config").json(&json!({})).await.is(200, MessageSchema::ConfigUpdateResult);
    }

    pub(crate) async fn config(&self, satellite: &Satellite) -> Value {
        self.as_satellite(satellite, Method::GET, "config").send().await.is(200, MessageSchema::Config)
    }

    pub(crate) async fn send(&self, satellite: &Satellite, key: &str, events: &[Value]) -> Answer {
        let request = self.as_satellite(satellite, Method::POST, "events");
        PendingRequest(request.0.header("Idempotency-Key", key)).json(&json!({"events": events})).await
    }

    /// The stored events from the administrator API.
    pub(crate) async fn events(&self, query: &str) -> Vec<Value> {
        let events =
            self.admin(Method::GET, &format!("events?{query}")).send().await.is(200, MessageSchema::StoredEvents);
        events["events"].as_array().unwrap().clone()
    }

    pub(crate) async fn seqs(&self, satellite: &Satellite) -> Vec<u64> {
        let events = self.events(&format!("satellite={}&since=0&limit=1000", satellite.id)).await;
        events.iter().map(|event| event["seq"].as_u64().unwrap()).collect()
    }

    pub(crate) async fn send_heartbeat(&self, satellite: &Satellite, heartbeat: &Value) -> Answer {
        self.as_satellite(satellite, Method::POST, "heartbeat").json(heartbeat).await
    }
}

/// A satellite's credentials.
#[derive(Clone)]
pub(crate) struct Satellite {
    pub(crate) id: String,
    pub(crate) key: String,
}

/// A request that is not sent yet.
pub(crate) struct PendingRequest(pub(crate) RequestBuilder);

impl PendingRequest {
    pub(crate) fn header(self, name: &str, value: &str) -> Self {
        Self(self.0.header(name, value))
    }

    pub(crate) async fn json(self, body: &Value) -> Answer {
        self.body(body.to_string()).await
    }

    pub(crate) async fn body(self, body: impl Into<reqwest::Body>) -> Answer {
        Self(self.0.body(body)).send().await
    }

    pub(crate) async fn send(self) -> Answer {
        let response = self.0.send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let text = response.text().await.unwrap();
        let body = if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() };
        let answer = Answer { status, headers, body };
        if status >= 400 {
            SCHEMAS.check(MessageSchema::Error, &answer.body).unwrap();
        }
        answer
    }
}

/// A response whose body is JSON or empty.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

impl Answer {
    /// Asserts the status and that the body matches its published schema; returns the body.
    #[track_caller]
    pub(crate) fn is(self, status: u16, form: MessageSchema) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        if let Err(invalid) = SCHEMAS.check(form, &self.body) {
            panic!("{invalid}: {self:?}");
        }
        self.body
    }

    /// Asserts an error with this status and text; returns the index of the event that it names.
    #[track_caller]
    pub(crate) fn refused(self, status: u16, text: &str) -> Option<u64> {
        assert_eq!(self.status, status, "{self:?}");
        assert!(self.body["error"].as_str().unwrap().contains(text), "`{text}` is not in {self:?}");
        self.body["index"].as_u64()
    }
}

pub(crate) fn registration(name: &str) -> Value {
    json!({
        "name": name,
        "version": "0.1.0",
        "capabilities": ["stdio", "http", "sse"],
        "system": {"os": "linux", "arch": "x86_64", "cpus": 2, "memory_bytes": 1 << 30},
    })
}

/// A `status_changed` event with the timestamp `seq` seconds after midnight.
pub(crate) fn status(seq: u64, instance: &str, status: &str) -> Value {
    let at = "2026-11-21T00:00:00Z".parse::<Timestamp>().unwrap() + SignedDuration::from_secs(seq.try_into().unwrap());
    json!({
        "seq": seq,
        "type": "mcp.server.status_changed",
        "timestamp": at.to_string(),
        "data": {
            "installation_id": "abc123",
            "team_id": "team_acme",
            "user_id": "user_alice",
            "process_id": instance,
            "server_slug": "files",
            "status": status,
            "status_message": null,
        },
    })
}

/// Events with these sequence numbers.
pub(crate) fn numbered(seqs: impl IntoIterator<Item = u64>) -> Vec<Value> {
    seqs.into_iter().map(|seq| status(seq, "files-acme-alice-abc123", "online")).collect()
}

pub(crate) fn heartbeat(at: Timestamp) -> Value {
    json!({
        "status": "active",
        "timestamp": at.to_string(),
        "version": "0.2.0",
        "uptime_seconds": 30,
        "system": {"cpu_percent": 12.5, "memory_used_bytes": 1, "memory_total_bytes": 2},
        "counts": {},
        "processes_by_team": {},
        "tools": {},
        "events": {"journalled_through": 10, "backlog": 3},
    })
}

pub(crate) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap().trim().to_owned()
}
