//! A remote MCP server as small as it can be, in a thread of its own: it can be ended and started again on its port, want
//! credentials, and refuse.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::extract::{Json, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// A server that runs until it is dropped.
pub(crate) struct Peer {
    address: SocketAddr,
    wants: Arc<Wants>,
    runtime: Option<Runtime>,
}

/// What it is like, and what it has seen. It outlives the server.
#[derive(Default)]
struct Wants {
    /// The value of `Authorization` without which all is refused.
    authorization: Mutex<Option<String>>,
    /// The status of every answer to a call, and its `Retry-After`.
    failing: Mutex<Option<(u16, &'static str)>>,
    ill: Mutex<bool>,
    /// Whether it refuses to list its tools.
    secretive: Mutex<bool>,
    sessions: Mutex<BTreeSet<String>>,
    /// How many sessions were begun.
    begun: Mutex<u32>,
    /// `Authorization` of each call.
    calls: Mutex<Vec<String>>,
    /// The query and the headers of the last call.
    head: Mutex<(String, HeaderMap)>,
}

impl Peer {
    pub(crate) fn start() -> Self {
        let mut peer = Self { address: SocketAddr::from(([127, 0, 0, 1], 0)), wants: Arc::default(), runtime: None };
        peer.begin();
        peer
    }

    /// Starts it, on the port that it had before.
    pub(crate) fn begin(&mut self) {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        let router = axum::Router::new()
            .route("/mcp", any(mcp))
            .route("/health", get(health))
            .with_state(Arc::clone(&self.wants));
        runtime.spawn(async move { axum::serve(listener, router).await });
        self.runtime = Some(runtime);
    }

    /// Ends it with every connection, and forgets its sessions.
    pub(crate) fn end(&mut self) {
        self.runtime.take().unwrap().shutdown_timeout(std::time::Duration::from_secs(5));
        self.wants.sessions.lock().unwrap().clear();
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn want_authorization(&self, value: &str) {
        *self.wants.authorization.lock().unwrap() = Some(value.to_owned());
    }

    /// Has it answer calls with this status and this `Retry-After`.
    pub(crate) fn fail_calls(&self, status: u16, retry_after: &'static str) {
        *self.wants.failing.lock().unwrap() = Some((status, retry_after));
    }

    /// Whether its health checks fail.
    pub(crate) fn be_ill(&self, ill: bool) {
        *self.wants.ill.lock().unwrap() = ill;
    }

    /// Has it list no tools.
    pub(crate) fn be_secretive(&self) {
        *self.wants.secretive.lock().unwrap() = true;
    }

    pub(crate) fn begun(&self) -> u32 {
        *self.wants.begun.lock().unwrap()
    }

    /// `Authorization` of the last call.
    pub(crate) fn last_call(&self) -> String {
        self.wants.calls.lock().unwrap().last().cloned().unwrap_or_default()
    }

    /// The query of the last call, and one of its headers.
    pub(crate) fn last_head(&self, header: &str) -> (String, Option<String>) {
        let (query, headers) = &*self.wants.head.lock().unwrap();
        (query.clone(), headers.get(header).map(|value| value.to_str().unwrap().to_owned()))
    }
}

async fn health(State(wants): State<Arc<Wants>>) -> StatusCode {
    if *wants.ill.lock().unwrap() { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::NO_CONTENT }
}

/// JSON answers to POSTs, no stream of its own, and sessions that it can forget.
async fn mcp(State(wants): State<Arc<Wants>>, uri: Uri, headers: HeaderMap, body: Option<Json<Value>>) -> Response {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let authorization = header("authorization");
    if wants.authorization.lock().unwrap().as_ref().is_some_and(|wanted| *wanted != authorization) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let Some(Json(message)) = body else { return StatusCode::METHOD_NOT_ALLOWED.into_response() };
    let (id, method) = (&message["id"], message["method"].as_str().unwrap_or_default());
    if method != "initialize" && !wants.sessions.lock().unwrap().contains(&header("mcp-session-id")) {
        return StatusCode::NOT_FOUND.into_response();
    }
    let answer = |result: Value| Json(json!({"jsonrpc": "2.0", "id": id, "result": result}));
    match method {
        "initialize" => {
            let begun = {
                let mut begun = wants.begun.lock().unwrap();
                *begun += 1;
                *begun
            };
            let session = format!("session-{begun}");
            wants.sessions.lock().unwrap().insert(session.clone());
            let version = message["params"]["protocolVersion"].clone();
            let result = json!({"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "peer", "version": "1"}});
            ([("mcp-session-id", session)], answer(result)).into_response()
        }
        "ping" => answer(json!({})).into_response(),
        "tools/list" if *wants.secretive.lock().unwrap() => {
            let error = json!({"code": -32603, "message": "not now"});
            Json(json!({"jsonrpc": "2.0", "id": id, "error": error})).into_response()
        }
        "tools/list" => {
            let tool = json!({"name": "echo", "inputSchema": {"type": "object"}});
            answer(json!({"tools": [tool]})).into_response()
        }
        "tools/call" => {
            wants.calls.lock().unwrap().push(authorization);
            *wants.head.lock().unwrap() = (uri.query().unwrap_or_default().to_owned(), headers);
            if let Some((status, retry_after)) = *wants.failing.lock().unwrap() {
                let status = StatusCode::from_u16(status).unwrap();
                return (status, [("retry-after", retry_after)]).into_response();
            }
            let text = message["params"]["arguments"]["text"].as_str().unwrap_or_default().to_owned();
            answer(json!({"content": [{"type": "text", "text": text}]})).into_response()
        }
        _ => StatusCode::ACCEPTED.into_response(),
    }
}
