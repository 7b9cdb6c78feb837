//! A minimal remote MCP server with its own runtime. It can be stopped and restarted on the same port, require
//! credentials and fail requests.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::extract::{Json, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

pub(crate) struct Peer {
    address: SocketAddr,
    state: Arc<PeerState>,
    runtime: Option<Runtime>,
}

/// Settings and observations, which survive a restart of the peer.
#[derive(Default)]
struct PeerState {
    /// The required value of `Authorization`.
    authorization: Mutex<Option<String>>,
    /// Status and `Retry-After` of the responses to calls, if calls fail.
    failing: Mutex<Option<(u16, &'static str)>>,
    unhealthy: Mutex<bool>,
    /// Whether `tools/list` returns an error.
    rejects_tools_list: Mutex<bool>,
    sessions: Mutex<BTreeSet<String>>,
    sessions_begun: Mutex<u32>,
    /// The `Authorization` header of each call.
    calls: Mutex<Vec<String>>,
    /// Query and headers of the last call.
    head: Mutex<(String, HeaderMap)>,
}

impl Peer {
    pub(crate) fn start() -> Self {
        let mut peer = Self { address: SocketAddr::from(([127, 0, 0, 1], 0)), state: Arc::default(), runtime: None };
        peer.begin();
        peer
    }

    /// Starts the server, after a stop on the same port.
    pub(crate) fn begin(&mut self) {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = axum::Router::new()
            .route("/mcp", any(mcp))
            .route("/health", get(health))
            .with_state(Arc::clone(&self.state));
        runtime.spawn(async move { axum::serve(listener, router).await });
        self.runtime = Some(runtime);
    }

    /// Stops the server, closes its connections and deletes its sessions.
    pub(crate) fn end(&mut self) {
        self.runtime.take().unwrap().shutdown_timeout(std::time::Duration::from_secs(5));
        self.state.sessions.lock().unwrap().clear();
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn require_authorization(&self, value: &str) {
        *self.state.authorization.lock().unwrap() = Some(value.to_owned());
    }

    /// Makes calls fail with `status` and `Retry-After`.
    pub(crate) fn fail_calls(&self, status: u16, retry_after: &'static str) {
        *self.state.failing.lock().unwrap() = Some((status, retry_after));
    }

    pub(crate) fn set_unhealthy(&self, unhealthy: bool) {
        *self.state.unhealthy.lock().unwrap() = unhealthy;
    }

    /// Makes `tools/list` return an error.
    pub(crate) fn reject_tools_list(&self) {
        *self.state.rejects_tools_list.lock().unwrap() = true;
    }

    pub(crate) fn sessions_begun(&self) -> u32 {
        *self.state.sessions_begun.lock().unwrap()
    }

    /// The `Authorization` header of the last call.
    pub(crate) fn last_call(&self) -> String {
        self.state.calls.lock().unwrap().last().cloned().unwrap_or_default()
    }

    /// The query and one header of the last call.
    pub(crate) fn last_head(&self, header: &str) -> (String, Option<String>) {
        let (query, headers) = &*self.state.head.lock().unwrap();
        (query.clone(), headers.get(header).map(|value| value.to_str().unwrap().to_owned()))
    }
}

async fn health(State(state): State<Arc<PeerState>>) -> StatusCode {
    if *state.unhealthy.lock().unwrap() { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::NO_CONTENT }
}

/// Answers POST requests with JSON; a GET stream is not supported.
async fn mcp(State(state): State<Arc<PeerState>>, uri: Uri, headers: HeaderMap, body: Option<Json<Value>>) -> Response {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let authorization = header("authorization");
    if state.authorization.lock().unwrap().as_ref().is_some_and(|wanted| *wanted != authorization) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let Some(Json(message)) = body else { return StatusCode::METHOD_NOT_ALLOWED.into_response() };
    let (id, method) = (&message["id"], message["method"].as_str().unwrap_or_default());
    if method != "initialize" && !state.sessions.lock().unwrap().contains(&header("mcp-session-id")) {
        return StatusCode::NOT_FOUND.into_response();
    }
    let answer = |result: Value| Json(json!({"jsonrpc": "2.0", "id": id, "result": result}));
    match method {
        "initialize" => {
            let sessions_begun = {
                let mut sessions_begun = state.sessions_begun.lock().unwrap();
                *sessions_begun += 1;
                *sessions_begun
            };
            let session = format!("session-{sessions_begun}");
            state.sessions.lock().unwrap().insert(session.clone());
            let version = message["params"]["protocolVersion"].clone();
            let result = json!({"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "peer", "version": "1"}});
            ([("mcp-session-id", session)], answer(result)).into_response()
        }
        "ping" => answer(json!({})).into_response(),
        "tools/list" if *state.rejects_tools_list.lock().unwrap() => {
            let error = json!({"code": -32603, "message": "not now"});
            Json(json!({"jsonrpc": "2.0", "id": id, "error": error})).into_response()
        }
        "tools/list" => {
            let tool = json!({"name": "echo", "inputSchema": {"type": "object"}});
            answer(json!({"tools": [tool]})).into_response()
        }
        "tools/call" => {
            state.calls.lock().unwrap().push(authorization);
            *state.head.lock().unwrap() = (uri.query().unwrap_or_default().to_owned(), headers);
            if let Some((status, retry_after)) = *state.failing.lock().unwrap() {
                let status = StatusCode::from_u16(status).unwrap();
                return (status, [("retry-after", retry_after)]).into_response();
            }
            let text = message["params"]["arguments"]["text"].as_str().unwrap_or_default().to_owned();
            answer(json!({"content": [{"type": "text", "text": text}]})).into_response()
        }
        _ => StatusCode::ACCEPTED.into_response(),
    }
}
