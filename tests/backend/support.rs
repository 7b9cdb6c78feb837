//! A backend of one test, on a clock that the test turns, and clients that hold every answer against its schema.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, Once};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use mcp_satellite::backend::server::schema::{MessageSchema, SchemaValidators};
use mcp_satellite::backend::server::{BackendClock, BackendServer, BackendSettings, RunningBackend};
use reqwest::header::{AUTHORIZATION, HeaderMap};
use reqwest::{Client, Method, RequestBuilder};
use serde_json::{Value, json};
use tempfile::TempDir;

/// When a state that was waited for is given up. Far beyond what a loaded machine needs.
pub(crate) const GIVE_UP: Duration = Duration::from_secs(60);

/// The published schemas.
pub(crate) static SCHEMAS: LazyLock<SchemaValidators> = LazyLock::new(|| SchemaValidators::new().unwrap());

pub(crate) fn client() -> Client {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| rustls::crypto::ring::default_provider().install_default().unwrap());
    Client::builder().no_proxy().timeout(GIVE_UP).build().unwrap()
}

/// A backend, and what is needed to ask it.
pub(crate) struct World {
    dir: TempDir,
    now: Arc<Mutex<Timestamp>>,
    events_body_max: usize,
    pub(crate) events_max: usize,
    serving: Option<RunningBackend>,
    client: Client,
    url: String,
}

/// A temporary directory as the backend would make it.
pub(crate) fn private_tempdir() -> TempDir {
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    tempfile::Builder::new().prefix("backend-").permissions(permissions).tempdir().unwrap()
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with_events_of(BackendSettings::new("").events_body_max).await
    }

    /// With another limit for a batch of events.
    pub(crate) async fn with_events_of(events_body_max: usize) -> Self {
        let now = Arc::new(Mutex::new("2026-11-21T06:33:00Z".parse().unwrap()));
        let (dir, client, url) = (private_tempdir(), client(), String::new());
        let events_max = BackendSettings::new("").events_max;
        let mut world = Self { dir, now, events_body_max, events_max, serving: None, client, url };
        world.start().await;
        world
    }

    pub(crate) async fn start(&mut self) {
        let backend = BackendServer::open(self.settings()).await.unwrap();
        let serving = backend.serve(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        self.url = format!("http://{}", serving.address());
        self.serving = Some(serving);
    }

    pub(crate) fn settings(&self) -> BackendSettings {
        let now = self.now.clone();
        let clock = BackendClock::new(move || *now.lock().unwrap());
        let (events_body_max, events_max) = (self.events_body_max, self.events_max);
        BackendSettings { clock, events_body_max, events_max, ..BackendSettings::new(self.data_dir()) }
    }

    /// Ends it as a signal does.
    pub(crate) async fn stop(&mut self) {
        self.serving.take().unwrap().shut_down().await;
    }

    /// Ends it and starts another one on what it has kept.
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

    pub(crate) fn pass(&self, time: SignedDuration) {
        *self.now.lock().unwrap() += time;
    }

    pub(crate) fn file(&self, name: &str) -> String {
        read(&self.data_dir().join(name))
    }

    pub(crate) fn ask(&self, method: Method, path: &str, token: &str) -> Asking {
        let request = self.client.request(method, format!("{}{path}", self.url));
        Asking(request.header(AUTHORIZATION, format!("Bearer {token}")))
    }

    pub(crate) fn admin(&self, method: Method, path: &str) -> Asking {
        self.ask(method, &format!("/api/admin/{path}"), &self.file("admin-token"))
    }

    pub(crate) async fn token(&self) -> String {
        let made = self.admin(Method::POST, "registration-tokens").json(&json!({})).await;
        made.is(201, MessageSchema::TokenMade)["token"].as_str().unwrap().to_owned()
    }

    /// One that was made for a satellite of this name.
    pub(crate) async fn token_for(&self, name: &str) -> String {
        let made = self.admin(Method::POST, "registration-tokens").json(&json!({"name": name})).await;
        made.is(201, MessageSchema::TokenMade)["token"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn register(&self, name: &str, token: &str) -> Answer {
        self.ask(Method::POST, "/api/satellites/register", token).json(&registration(name)).await
    }

    /// A satellite that has come in.
    pub(crate) async fn satellite(&self, name: &str) -> Satellite {
        let registered = self.register(name, &self.token_for(name).await).await.is(201, MessageSchema::Registered);
        let text = |name: &str| registered[name].as_str().unwrap().to_owned();
        Satellite { id: text("satellite_id"), key: text("api_key") }
    }

    pub(crate) fn of(&self, satellite: &Satellite, method: Method, path: &str) -> Asking {
        self.ask(method, &format!("/api/satellites/{}/{path}", satellite.id), &satellite.key)
    }

    pub(crate) async fn poll(&self, satellite: &Satellite) -> Value {
        self.of(satellite, Method::GET, "commands").send().await.is(200, MessageSchema::Commands)
    }

    /// The ids of what there is to do.
    pub(crate) async fn to_do(&self, satellite: &Satellite) -> Vec<String> {
        let polled = self.poll(satellite).await;
        polled["commands"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
    }

    pub(crate) async fn queue(&self, satellite: &Satellite, command: &Value) -> Answer {
        self.admin(Method::POST, &format!("satellites/{}/commands", satellite.id)).json(command).await
    }

    pub(crate) async fn result(&self, satellite: &Satellite, command: &str, status: &str) -> Answer {
        let result = json!({"status": status, "result": {}, "duration_ms": 5});
        self.of(satellite, Method::POST, &format!("commands/{command}/result")).json(&result).await
    }

    /// Puts an empty configuration for all.
    pub(crate) async fn configured(&self) {
        self.admin(Method::PUT, "config").json(&json!({})).await.is(200, MessageSchema::ConfigKept);
    }

    pub(crate) async fn config(&self, satellite: &Satellite) -> Value {
        self.of(satellite, Method::GET, "config").send().await.is(200, MessageSchema::Config)
    }

    pub(crate) async fn send(&self, satellite: &Satellite, key: &str, events: &[Value]) -> Answer {
        let asking = self.of(satellite, Method::POST, "events");
        Asking(asking.0.header("Idempotency-Key", key)).json(&json!({"events": events})).await
    }

    /// All events, as an administrator sees them.
    pub(crate) async fn events(&self, query: &str) -> Vec<Value> {
        let events =
            self.admin(Method::GET, &format!("events?{query}")).send().await.is(200, MessageSchema::StoredEvents);
        events["events"].as_array().unwrap().clone()
    }

    pub(crate) async fn seqs(&self, satellite: &Satellite) -> Vec<u64> {
        let events = self.events(&format!("satellite={}&since=0&limit=1000", satellite.id)).await;
        events.iter().map(|event| event["seq"].as_u64().unwrap()).collect()
    }

    pub(crate) async fn beat(&self, satellite: &Satellite, heartbeat: &Value) -> Answer {
        self.of(satellite, Method::POST, "heartbeat").json(heartbeat).await
    }
}

/// A satellite's credentials.
#[derive(Clone)]
pub(crate) struct Satellite {
    pub(crate) id: String,
    pub(crate) key: String,
}

/// A request on its way.
pub(crate) struct Asking(pub(crate) RequestBuilder);

impl Asking {
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

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

impl Answer {
    /// Asserts what it is, and that it has the form that was published.
    #[track_caller]
    pub(crate) fn is(self, status: u16, form: MessageSchema) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        if let Err(invalid) = SCHEMAS.check(form, &self.body) {
            panic!("{invalid}: {self:?}");
        }
        self.body
    }

    /// Asserts that it is a refusal that says this, and gives the place of the event that it names.
    #[track_caller]
    pub(crate) fn refused(self, status: u16, says: &str) -> Option<u64> {
        assert_eq!(self.status, status, "{self:?}");
        assert!(self.body["error"].as_str().unwrap().contains(says), "`{says}` is not in {self:?}");
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

/// An instance's status has changed, in the second `seq` of a day.
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

/// Events with these numbers.
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
