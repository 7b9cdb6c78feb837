//! A backend whose responses a test controls, and which records its requests.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// The response to one kind of request.
#[derive(Debug, Clone)]
pub(crate) enum PeerResponse {
    /// A status with a body.
    Status(u16, String),
    /// A JSON string of this length in bytes.
    Huge(usize),
    /// A byte every 20 ms, without end.
    Drip,
    /// No response.
    Never,
    /// The connection breaks in the middle of the response.
    Reset,
}

/// A backend that runs until it is dropped.
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) shared: Arc<PeerState>,
    server: JoinHandle<()>,
}

#[derive(Default)]
pub(crate) struct PeerState {
    state: Mutex<PeerRecords>,
}

#[derive(Default)]
struct PeerRecords {
    tokens: BTreeSet<String>,
    /// Satellite ids by key.
    keys: BTreeMap<String, String>,
    config: Value,
    commands: Vec<Value>,
    server_time: Option<String>,
    responses: BTreeMap<&'static str, PeerResponse>,
    seen: Vec<RecordedRequest>,
    registered: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct RecordedRequest {
    /// Kind of the request, such as `commands`.
    pub(crate) what: &'static str,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) bearer: String,
    /// The header `If-None-Match`.
    pub(crate) if_none_match: Option<String>,
    pub(crate) body: Value,
    pub(crate) at: Instant,
    /// Whether it got the normal response.
    pub(crate) is_normal: bool,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Peer {
    pub(crate) async fn start() -> Self {
        let shared = Arc::new(PeerState::default());
        shared.state.lock().unwrap().config = json!({"hash": "empty", "servers": {}, "teams": []});
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = axum::Router::new().fallback(answer).with_state(shared.clone());
        let server = tokio::spawn(async move {
            axum::serve(listener, router).await.unwrap();
        });
        Self { address, shared, server }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn token(&self, token: &str) {
        self.shared.state.lock().unwrap().tokens.insert(token.to_owned());
    }

    /// Revokes all keys.
    pub(crate) fn revoke(&self) {
        self.shared.state.lock().unwrap().keys.clear();
    }

    pub(crate) fn configure(&self, config: Value) {
        self.shared.state.lock().unwrap().config = config;
    }

    /// Sends this command until its result arrives.
    pub(crate) fn command(&self, command: Value) {
        self.shared.state.lock().unwrap().commands.push(command);
    }

    /// Reverses the order of the commands.
    pub(crate) fn reverse(&self) {
        self.shared.state.lock().unwrap().commands.reverse();
    }

    pub(crate) fn clock(&self, server_time: &str) {
        self.shared.state.lock().unwrap().server_time = Some(server_time.to_owned());
    }

    /// Has one kind of request answered like this: `register`, `commands`, `result`, `config`, `events`, `heartbeat` or
    /// `fleet`.
    pub(crate) fn respond(&self, what: &'static str, response: Option<PeerResponse>) {
        let mut state = self.shared.state.lock().unwrap();
        match response {
            Some(response) => state.responses.insert(what, response),
            None => state.responses.remove(what),
        };
    }

    pub(crate) fn requests(&self, what: &str) -> Vec<RecordedRequest> {
        self.shared.state.lock().unwrap().seen.iter().filter(|seen| seen.what == what).cloned().collect()
    }

    /// All results of a command that got the normal response.
    pub(crate) fn results(&self, id: &str) -> Vec<Value> {
        let path = format!("/commands/{id}/result");
        let seen = self.requests("result").into_iter().filter(|seen| seen.is_normal && seen.path.ends_with(&path));
        seen.map(|seen| seen.body).collect()
    }

    pub(crate) async fn result(&self, id: &str) -> Value {
        wait_for(&format!("the result of {id}"), || self.results(id).pop()).await
    }
}

/// Polls until there is a value, at most 60 s.
pub(crate) async fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "gave up waiting for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn answer(
    State(shared): State<Arc<PeerState>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = uri.path().to_owned();
    let parts: Vec<&str> = path.trim_start_matches("/api/satellites/").split('/').collect();
    let what = match (&method, &parts[..]) {
        (&Method::POST, ["register"]) => "register",
        (&Method::GET, [_, "commands"]) => "commands",
        (&Method::POST, [_, "commands", _, "result"]) => "result",
        (&Method::GET, [_, "config"]) => "config",
        (&Method::POST, [_, "events"]) => "events",
        (&Method::POST, [_, "heartbeat"]) => "heartbeat",
        (&Method::GET, [_, "fleet"]) => "fleet",
        _ => panic!("unexpected request: {method} {path}"),
    };
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let bearer = text(header::AUTHORIZATION).unwrap().strip_prefix("Bearer ").unwrap().to_owned();
    let if_none_match = text(header::IF_NONE_MATCH);
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let query = uri.query().unwrap_or_default().to_owned();
    let response = {
        let mut state = shared.state.lock().unwrap();
        let response = state.responses.get(what).cloned();
        let (path, body, is_normal) = (path.clone(), Value::clone(&body), response.is_none());
        let (bearer, if_none_match) = (bearer.clone(), if_none_match.clone());
        state.seen.push(RecordedRequest {
            what,
            path,
            query,
            bearer,
            if_none_match,
            body,
            at: Instant::now(),
            is_normal,
        });
        response
    };
    if let Some(response) = response {
        return special_response(response).await;
    }
    let mut state = shared.state.lock().unwrap();
    if what == "register" {
        if !state.tokens.remove(&bearer) {
            return error_response(StatusCode::UNAUTHORIZED, "this token was used");
        }
        state.registered += 1;
        let (id, key) = (format!("sat-{}", state.registered), format!("api-key-0123456789-{}", state.registered));
        state.keys.insert(key.clone(), id.clone());
        return (StatusCode::CREATED, axum::Json(json!({"satellite_id": id, "api_key": key}))).into_response();
    }
    match state.keys.get(&bearer) {
        None => return error_response(StatusCode::UNAUTHORIZED, "this key is worth nothing"),
        Some(id) if *id != parts[0] => return error_response(StatusCode::NOT_FOUND, "there is no such satellite"),
        Some(_) => {}
    }
    match what {
        "commands" => {
            let time = state.server_time.clone().unwrap_or_else(|| jiff::Timestamp::now().to_string());
            // `new` is an unknown member, which the satellite must ignore.
            let answer =
                json!({"commands": state.commands, "polling_mode": "immediate", "server_time": time, "new": 1});
            axum::Json(answer).into_response()
        }
        "result" => {
            state.commands.retain(|command| command["id"] != parts[2]);
            axum::Json(json!({"success": true})).into_response()
        }
        "config" => {
            let tag = format!("\"{}\"", state.config["hash"].as_str().unwrap_or_default());
            if if_none_match.as_ref() == Some(&tag) {
                return StatusCode::NOT_MODIFIED.into_response();
            }
            ([(header::ETAG, tag)], axum::Json(state.config.clone())).into_response()
        }
        "fleet" => {
            let satellite =
                json!({"name": "satellite-0001", "connected": true, "version": "0.1.0", "instances": {"online": 2}});
            axum::Json(json!({"server_time": "2026-11-21T06:33:00Z", "satellites": [satellite], "new": 1}))
                .into_response()
        }
        "events" => axum::Json(json!({"success": true, "processed": 1, "failed": 0})).into_response(),
        _ => axum::Json(json!({"success": true})).into_response(),
    }
}

fn error_response(status: StatusCode, why: &str) -> Response {
    (status, axum::Json(json!({"error": why}))).into_response()
}

async fn special_response(response: PeerResponse) -> Response {
    match response {
        PeerResponse::Status(status, body) => {
            let location = [(header::LOCATION, "https://elsewhere.example.com/")];
            (StatusCode::from_u16(status).unwrap(), location, body).into_response()
        }
        PeerResponse::Huge(bytes) => format!("\"{}\"", "x".repeat(bytes)).into_response(),
        PeerResponse::Drip => {
            let drops = futures::stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                Some((Ok::<_, Infallible>(" "), ()))
            });
            Body::from_stream(drops).into_response()
        }
        PeerResponse::Never => std::future::pending().await,
        PeerResponse::Reset => {
            let broken = || std::io::Error::other("reset");
            Body::from_stream(futures::stream::iter([Ok("{\"comm"), Err(broken())])).into_response()
        }
    }
}
