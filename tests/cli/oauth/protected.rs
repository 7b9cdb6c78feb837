//! An MCP server that requires tokens of the authorization server. Its challenges name the metadata and the missing
//! scopes.

use std::sync::{Arc, Mutex};

use axum::extract::{Json, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use serde_json::{Value, json};

use super::authority::AuthorityShared;
use super::served::TestServer;

/// A protected server that runs until it is dropped.
pub(crate) struct Protected {
    pub(crate) shared: Arc<ProtectedShared>,
    server: TestServer,
}

pub(crate) struct ProtectedShared {
    authority: Arc<AuthorityShared>,
    state: Mutex<ProtectedState>,
}

#[derive(Default)]
struct ProtectedState {
    url: String,
    /// The resource in its metadata, instead of its URL.
    metadata_resource: Option<String>,
    /// Number of requests rejected with 401.
    rejected: usize,
    /// Number of requests with a token.
    tokens: usize,
}

impl Protected {
    pub(crate) fn start(authority: &Arc<AuthorityShared>) -> Self {
        let shared = Arc::new(ProtectedShared { authority: Arc::clone(authority), state: Mutex::default() });
        let router = axum::Router::new()
            .route("/mcp", any(mcp))
            .route("/.well-known/oauth-protected-resource/mcp", get(metadata))
            .with_state(Arc::clone(&shared));
        let server = TestServer::start(router);
        shared.state.lock().unwrap().url = server.url("/mcp");
        authority.state().resource = server.url("/mcp");
        Self { shared, server }
    }

    pub(crate) fn url(&self) -> String {
        self.server.url("/mcp")
    }

    pub(crate) fn set_metadata_resource(&self, resource: &str) {
        self.shared.state.lock().unwrap().metadata_resource = Some(resource.to_owned());
    }

    /// Number of requests with a token.
    pub(crate) fn token_count(&self) -> usize {
        self.shared.state.lock().unwrap().tokens
    }

    /// Number of requests rejected with 401.
    pub(crate) fn rejected_count(&self) -> usize {
        self.shared.state.lock().unwrap().rejected
    }
}

async fn metadata(State(shared): State<Arc<ProtectedShared>>) -> Json<Value> {
    let state = shared.state.lock().unwrap();
    let resource = state.metadata_resource.as_ref().unwrap_or(&state.url);
    let authority = shared.authority.state().url.clone();
    Json(json!({"resource": resource, "authorization_servers": [authority], "scopes_supported": ["read", "write"]}))
}

fn challenge(shared: &ProtectedShared, status: StatusCode, more: &str) -> Response {
    let url = shared.state.lock().unwrap().url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp");
    let challenge = format!("Bearer resource_metadata=\"{url}\"{more}");
    (status, [("www-authenticate", challenge)]).into_response()
}

async fn mcp(
    State(shared): State<Arc<ProtectedShared>>,
    method: Method,
    headers: HeaderMap,
    body: Option<Json<Value>>,
) -> Response {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let url = shared.state.lock().unwrap().url.clone();
    let authorization = header("authorization");
    let token = authorization.strip_prefix("Bearer ").unwrap_or_default();
    shared.state.lock().unwrap().tokens += usize::from(!token.is_empty());
    let Some(access) = shared.authority.access(token, &url) else {
        shared.state.lock().unwrap().rejected += 1;
        let more = if token.is_empty() { ", scope=\"read\"" } else { ", error=\"invalid_token\"" };
        return challenge(&shared, StatusCode::UNAUTHORIZED, more);
    };
    let event = |id: &str, data: Value| format!("id: {id}\ndata: {data}\n\n");
    let stream = |text: String| ([("content-type", "text/event-stream")], text).into_response();
    let answer = |id: &Value, result: &Value| json!({"jsonrpc": "2.0", "id": id, "result": result});
    let text_result = |text: &str| json!({"content": [{"type": "text", "text": text}]});
    if method == Method::GET {
        let Ok(id) = header("last-event-id").parse::<u64>() else {
            return StatusCode::METHOD_NOT_ALLOWED.into_response();
        };
        return stream(event("done", answer(&id.into(), &text_result(&access.subject))));
    }
    let Some(Json(message)) = body else { return StatusCode::METHOD_NOT_ALLOWED.into_response() };
    let id = &message["id"];
    match message["method"].as_str().unwrap_or_default() {
        "initialize" => {
            let version = &message["params"]["protocolVersion"];
            let about = json!({"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "protected", "version": "1"}});
            Json(answer(id, &about)).into_response()
        }
        "ping" => Json(answer(id, &json!({}))).into_response(),
        "tools/list" => {
            let tools = ["whoami", "write", "leak", "stream"]
                .map(|name| json!({"name": name, "inputSchema": {"type": "object"}}));
            Json(answer(id, &json!({"tools": tools}))).into_response()
        }
        "tools/call" => match message["params"]["name"].as_str().unwrap_or_default() {
            "whoami" => Json(answer(id, &text_result(&access.subject))).into_response(),
            "write" if !access.scopes.split(' ').any(|scope| scope == "write") => {
                challenge(&shared, StatusCode::FORBIDDEN, ", error=\"insufficient_scope\", scope=\"write\"")
            }
            "write" => Json(answer(id, &text_result("written"))).into_response(),
            "leak" => {
                let error = json!({"code": -32603, "message": format!("your header was {authorization}")});
                Json(json!({"jsonrpc": "2.0", "id": id, "error": error})).into_response()
            }
            // The stream breaks off. A client that resumes it with a valid token gets the rest.
            _ => {
                let note = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "wait"}});
                let id = id.as_u64().unwrap_or_default().to_string();
                shared.authority.state().expire_access();
                stream(format!("retry: 10\n{}", event(&id, note)))
            }
        },
        _ => StatusCode::ACCEPTED.into_response(),
    }
}
