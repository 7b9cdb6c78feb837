//! An MCP server that wants tokens of the authorization server: whoever has none is told where to get one, and whoever has
//! one that does not reach far enough is told which.

use std::sync::{Arc, Mutex};

use axum::extract::{Json, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use serde_json::{Value, json};

use super::authority::Knows;
use super::served::Served;

/// One that runs until it is dropped.
pub(crate) struct Protected {
    pub(crate) seen: Arc<Seen>,
    served: Served,
}

/// What it is like and what it has seen.
pub(crate) struct Seen {
    authority: Arc<Knows>,
    state: Mutex<Sight>,
}

#[derive(Default)]
struct Sight {
    url: String,
    /// What its metadata calls it, in the place of its address.
    called: Option<String>,
    /// How many requests were refused with 401.
    refused: usize,
    /// How many came with a token.
    tokens: usize,
}

impl Protected {
    pub(crate) fn start(authority: &Arc<Knows>) -> Self {
        let seen = Arc::new(Seen { authority: Arc::clone(authority), state: Mutex::default() });
        let router = axum::Router::new()
            .route("/mcp", any(mcp))
            .route("/.well-known/oauth-protected-resource/mcp", get(metadata))
            .with_state(Arc::clone(&seen));
        let served = Served::start(router);
        seen.state.lock().unwrap().url = served.url("/mcp");
        authority.state().resource = served.url("/mcp");
        Self { seen, served }
    }

    pub(crate) fn url(&self) -> String {
        self.served.url("/mcp")
    }

    /// What its metadata calls it from now on.
    pub(crate) fn call_itself(&self, resource: &str) {
        self.seen.state.lock().unwrap().called = Some(resource.to_owned());
    }

    /// How many requests came with a token.
    pub(crate) fn tokens(&self) -> usize {
        self.seen.state.lock().unwrap().tokens
    }

    /// How many requests it has refused for their token.
    pub(crate) fn refused(&self) -> usize {
        self.seen.state.lock().unwrap().refused
    }
}

async fn metadata(State(seen): State<Arc<Seen>>) -> Json<Value> {
    let state = seen.state.lock().unwrap();
    let resource = state.called.as_ref().unwrap_or(&state.url);
    let authority = seen.authority.state().url.clone();
    Json(json!({"resource": resource, "authorization_servers": [authority], "scopes_supported": ["read", "write"]}))
}

fn challenge(seen: &Seen, status: StatusCode, more: &str) -> Response {
    let url = seen.state.lock().unwrap().url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp");
    let challenge = format!("Bearer resource_metadata=\"{url}\"{more}");
    (status, [("www-authenticate", challenge)]).into_response()
}

async fn mcp(State(seen): State<Arc<Seen>>, method: Method, headers: HeaderMap, body: Option<Json<Value>>) -> Response {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let url = seen.state.lock().unwrap().url.clone();
    let authorization = header("authorization");
    let token = authorization.strip_prefix("Bearer ").unwrap_or_default();
    seen.state.lock().unwrap().tokens += usize::from(!token.is_empty());
    let Some(access) = seen.authority.access(token, &url) else {
        seen.state.lock().unwrap().refused += 1;
        let more = if token.is_empty() { ", scope=\"read\"" } else { ", error=\"invalid_token\"" };
        return challenge(&seen, StatusCode::UNAUTHORIZED, more);
    };
    let event = |id: &str, data: Value| format!("id: {id}\ndata: {data}\n\n");
    let stream = |text: String| ([("content-type", "text/event-stream")], text).into_response();
    let answer = |id: &Value, result: &Value| json!({"jsonrpc": "2.0", "id": id, "result": result});
    let said = |text: &str| json!({"content": [{"type": "text", "text": text}]});
    if method == Method::GET {
        let Ok(id) = header("last-event-id").parse::<u64>() else {
            return StatusCode::METHOD_NOT_ALLOWED.into_response();
        };
        return stream(event("done", answer(&id.into(), &said(&access.subject))));
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
            "whoami" => Json(answer(id, &said(&access.subject))).into_response(),
            "write" if !access.scopes.split(' ').any(|scope| scope == "write") => {
                challenge(&seen, StatusCode::FORBIDDEN, ", error=\"insufficient_scope\", scope=\"write\"")
            }
            "write" => Json(answer(id, &said("written"))).into_response(),
            "leak" => {
                let error = json!({"code": -32603, "message": format!("your header was {authorization}")});
                Json(json!({"jsonrpc": "2.0", "id": id, "error": error})).into_response()
            }
            // It breaks off, and the rest is there for who comes back with a token that is alive.
            _ => {
                let note = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "wait"}});
                let id = id.as_u64().unwrap_or_default().to_string();
                seen.authority.state().kill_access();
                stream(format!("retry: 10\n{}", event(&id, note)))
            }
        },
        _ => StatusCode::ACCEPTED.into_response(),
    }
}
