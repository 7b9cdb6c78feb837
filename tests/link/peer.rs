//! A backend that is as good or as bad as a test wants, and writes down what it is asked.

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

/// How one kind of request is answered.
#[derive(Debug, Clone)]
pub(crate) enum Manner {
    /// With this status, and this body.
    Status(u16, String),
    /// So much of a string.
    Huge(usize),
    /// A byte now and then, without end.
    Drip,
    /// Never.
    Never,
    /// The connection breaks in the middle of the answer.
    Reset,
}

/// One that runs until it is dropped.
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) books: Arc<Books>,
    server: JoinHandle<()>,
}

#[derive(Default)]
pub(crate) struct Books {
    state: Mutex<State_>,
}

#[derive(Default)]
struct State_ {
    tokens: BTreeSet<String>,
    /// The satellite's id by its key.
    keys: BTreeMap<String, String>,
    config: Value,
    commands: Vec<Value>,
    server_time: Option<String>,
    manners: BTreeMap<&'static str, Manner>,
    seen: Vec<Seen>,
    registered: usize,
}

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) what: &'static str,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) bearer: String,
    pub(crate) known: Option<String>,
    pub(crate) body: Value,
    pub(crate) at: Instant,
    /// Whether it was answered as it should be.
    pub(crate) well: bool,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Peer {
    pub(crate) async fn start() -> Self {
        let books = Arc::new(Books::default());
        books.state.lock().unwrap().config = json!({"hash": "empty", "servers": {}, "teams": []});
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = axum::Router::new().fallback(answer).with_state(books.clone());
        let server = tokio::spawn(async move {
            axum::serve(listener, router).await.unwrap();
        });
        Self { address, books, server }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn token(&self, token: &str) {
        self.books.state.lock().unwrap().tokens.insert(token.to_owned());
    }

    /// No key that was given is worth anything any more.
    pub(crate) fn revoke(&self) {
        self.books.state.lock().unwrap().keys.clear();
    }

    pub(crate) fn configure(&self, config: Value) {
        self.books.state.lock().unwrap().config = config;
    }

    /// Asks for this until its result is there.
    pub(crate) fn command(&self, command: Value) {
        self.books.state.lock().unwrap().commands.push(command);
    }

    /// What was asked for last comes first from now on.
    pub(crate) fn reverse(&self) {
        self.books.state.lock().unwrap().commands.reverse();
    }

    pub(crate) fn clock(&self, server_time: &str) {
        self.books.state.lock().unwrap().server_time = Some(server_time.to_owned());
    }

    /// Has one kind of request answered like this: `register`, `commands`, `result`, `config`, `events` or `heartbeat`.
    pub(crate) fn behave(&self, what: &'static str, manner: Option<Manner>) {
        let mut state = self.books.state.lock().unwrap();
        match manner {
            Some(manner) => state.manners.insert(what, manner),
            None => state.manners.remove(what),
        };
    }

    pub(crate) fn seen(&self, what: &str) -> Vec<Seen> {
        self.books.state.lock().unwrap().seen.iter().filter(|seen| seen.what == what).cloned().collect()
    }

    /// The results of a command, as often as they came.
    pub(crate) fn results(&self, id: &str) -> Vec<Value> {
        let path = format!("/commands/{id}/result");
        let seen = self.seen("result").into_iter().filter(|seen| seen.well && seen.path.ends_with(&path));
        seen.map(|seen| seen.body).collect()
    }

    pub(crate) async fn result(&self, id: &str) -> Value {
        wait_for(&format!("the result of {id}"), || self.results(id).pop()).await
    }
}

/// Waits until there is something.
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
    State(books): State<Arc<Books>>,
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
        _ => panic!("nobody asks for {method} {path}"),
    };
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let bearer = text(header::AUTHORIZATION).unwrap().strip_prefix("Bearer ").unwrap().to_owned();
    let known = text(header::IF_NONE_MATCH);
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let query = uri.query().unwrap_or_default().to_owned();
    let manner = {
        let mut state = books.state.lock().unwrap();
        let manner = state.manners.get(what).cloned();
        let (path, body, well) = (path.clone(), Value::clone(&body), manner.is_none());
        let (bearer, known) = (bearer.clone(), known.clone());
        state.seen.push(Seen { what, path, query, bearer, known, body, at: Instant::now(), well });
        manner
    };
    if let Some(manner) = manner {
        return behaved(manner).await;
    }
    let mut state = books.state.lock().unwrap();
    if what == "register" {
        if !state.tokens.remove(&bearer) {
            return refused(StatusCode::UNAUTHORIZED, "this token was used");
        }
        state.registered += 1;
        let (id, key) = (format!("sat-{}", state.registered), format!("api-key-0123456789-{}", state.registered));
        state.keys.insert(key.clone(), id.clone());
        return (StatusCode::CREATED, axum::Json(json!({"satellite_id": id, "api_key": key}))).into_response();
    }
    match state.keys.get(&bearer) {
        None => return refused(StatusCode::UNAUTHORIZED, "this key is worth nothing"),
        Some(id) if *id != parts[0] => return refused(StatusCode::NOT_FOUND, "there is no such satellite"),
        Some(_) => {}
    }
    match what {
        "commands" => {
            let time = state.server_time.clone().unwrap_or_else(|| jiff::Timestamp::now().to_string());
            // Members that nobody knows are passed over.
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
            if known.as_ref() == Some(&tag) {
                return StatusCode::NOT_MODIFIED.into_response();
            }
            ([(header::ETAG, tag)], axum::Json(state.config.clone())).into_response()
        }
        "events" => axum::Json(json!({"success": true, "processed": 1, "failed": 0})).into_response(),
        _ => axum::Json(json!({"success": true})).into_response(),
    }
}

fn refused(status: StatusCode, why: &str) -> Response {
    (status, axum::Json(json!({"error": why}))).into_response()
}

async fn behaved(manner: Manner) -> Response {
    match manner {
        Manner::Status(status, body) => {
            let location = [(header::LOCATION, "https://elsewhere.example.com/")];
            (StatusCode::from_u16(status).unwrap(), location, body).into_response()
        }
        Manner::Huge(bytes) => format!("\"{}\"", "x".repeat(bytes)).into_response(),
        Manner::Drip => {
            let drops = futures::stream::unfold((), |()| async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                Some((Ok::<_, Infallible>(" "), ()))
            });
            Body::from_stream(drops).into_response()
        }
        Manner::Never => std::future::pending().await,
        Manner::Reset => {
            let broken = || std::io::Error::other("reset");
            Body::from_stream(futures::stream::iter([Ok("{\"comm"), Err(broken())])).into_response()
        }
    }
}
