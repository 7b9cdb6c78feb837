//! The regular behavior of the peer: a small MCP server, without sockets.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::record::Record;
use super::script::ResponseFormat;

/// An item for a stream that a GET has opened.
#[derive(Debug)]
pub(super) enum Push {
    Message(Value),
    /// The regular end of the stream.
    End,
}

/// The response to a request with an unknown session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expiry {
    /// 404, as in the specification and in Python servers.
    NotFound,
    /// 400 with an error without an id, as in TypeScript servers.
    BadRequest,
    /// 400 with an empty body, as from gateways that have lost the session.
    EmptyBadRequest,
}

/// The behavior for requests that no rule of the script matches.
#[derive(Debug, Clone)]
pub(crate) struct Behavior {
    /// The format of responses.
    pub(crate) format: ResponseFormat,
    /// Whether the peer creates sessions and requires them.
    pub(crate) sessions: bool,
    /// Whether a GET opens a stream; otherwise the response is 405.
    pub(crate) streams: bool,
    /// Whether a connection stays open after a response.
    pub(crate) keeps_alive: bool,
    /// Whether a DELETE ends a session; otherwise the response is 405.
    pub(crate) deletes: bool,
    pub(crate) expiry: Expiry,
    /// The required `Authorization`; otherwise the response is 401.
    pub(crate) required_authorization: Option<&'static str>,
    /// The tools by name, with their annotations.
    pub(crate) tools: Vec<(&'static str, Value)>,
    /// Whether each page of tools has a next page.
    pub(crate) endless_pages: bool,
}

impl Default for Behavior {
    fn default() -> Self {
        Self {
            format: ResponseFormat::Json,
            sessions: true,
            streams: true,
            keeps_alive: true,
            deletes: true,
            expiry: Expiry::NotFound,
            required_authorization: None,
            tools: vec![("echo", json!({})), ("read", json!({"readOnlyHint": true})), ("sleep", json!({}))],
            endless_pages: false,
        }
    }
}

/// The state of the MCP server.
#[derive(Debug, Default)]
pub(super) struct Server {
    pub(super) behavior: Behavior,
    sessions: BTreeMap<String, Option<mpsc::UnboundedSender<Push>>>,
    sessions_made: usize,
    /// Open streams of forgotten sessions.
    forgotten: Vec<mpsc::UnboundedSender<Push>>,
    /// The executed tools, in order.
    pub(super) executed: Vec<String>,
}

/// The reason why a request is rejected.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The `Authorization` of the request is missing or wrong.
    Unauthorized,
    /// The request names no session.
    NoSession,
    /// The request names an unknown session.
    Expired(Expiry),
}

impl Server {
    /// Checks authorization and session of a request.
    pub(super) fn admit(&self, record: &Record) -> Result<(), Refusal> {
        if self.behavior.required_authorization.is_some_and(|wanted| record.header("authorization") != Some(wanted)) {
            return Err(Refusal::Unauthorized);
        }
        let is_first = record.rpc.as_deref() == Some("initialize");
        let needs_none = !self.behavior.sessions || is_first || matches!(record.path.as_str(), "/sse" | "/health");
        match &record.session {
            _ if needs_none => Ok(()),
            None => Err(Refusal::NoSession),
            Some(session) if self.sessions.contains_key(session) => Ok(()),
            Some(_) => Err(Refusal::Expired(self.behavior.expiry)),
        }
    }

    pub(super) fn session(&mut self) -> String {
        self.sessions_made += 1;
        let name = format!("session-{}", self.sessions_made);
        self.sessions.insert(name.clone(), None);
        name
    }

    /// Opens the stream of a session. An earlier stream of the session ends.
    pub(super) fn stream(&mut self, session: &str) -> mpsc::UnboundedReceiver<Push> {
        let (pushes, stream) = mpsc::unbounded_channel();
        self.sessions.insert(session.to_owned(), Some(pushes));
        stream
    }

    pub(super) fn end(&mut self, session: &str) {
        self.sessions.remove(session);
    }

    pub(super) fn forget_sessions(&mut self) {
        self.forgotten.extend(std::mem::take(&mut self.sessions).into_values().flatten());
    }

    pub(super) fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Sends a message on all streams.
    pub(super) fn broadcast(&self, message: &Value) {
        for stream in self.sessions.values().flatten() {
            // An error means that the client has disconnected.
            let _ = stream.send(Push::Message(message.clone()));
        }
    }

    pub(super) fn send_to(&self, session: &str, message: Value) {
        if let Some(Some(stream)) = self.sessions.get(session) {
            let _ = stream.send(Push::Message(message));
        }
    }

    pub(super) fn end_streams(&self) {
        for stream in self.sessions.values().flatten().chain(&self.forgotten) {
            let _ = stream.send(Push::End);
        }
    }

    /// Returns the response to a JSON-RPC message; `None` for a notification or a response.
    pub(super) fn answer(&mut self, body: &Value) -> Option<Value> {
        let id = body.get("id").filter(|_| body["method"].is_string())?;
        let params = &body["params"];
        let result = match body["method"].as_str()? {
            "initialize" => json!({
                "protocolVersion": params["protocolVersion"],
                "capabilities": {
                    "tools": {"listChanged": true}, "resources": {"listChanged": true}, "prompts": {"listChanged": true},
                },
                "serverInfo": {"name": "peer", "version": "1.0.0"},
            }),
            "ping" => json!({}),
            "tools/list" => self.tools(params["cursor"].as_str()),
            "tools/call" => return Some(self.call(id, params)),
            "resources/list" => json!({"resources": [{"uri": "peer://one", "name": "one"}]}),
            "resources/templates/list" => {
                json!({"resourceTemplates": [{"uriTemplate": "peer://{any}", "name": "any"}]})
            }
            "resources/read" => json!({"contents": [{"uri": params["uri"], "text": "one"}]}),
            "prompts/list" => json!({"prompts": [{"name": "greet"}]}),
            "prompts/get" => {
                json!({"messages": [{"role": "user", "content": {"type": "text", "text": "Good morning"}}]})
            }
            _ => return Some(error(id, -32601, "Method not found")),
        };
        Some(json!({"jsonrpc": "2.0", "id": id, "result": result}))
    }

    fn tools(&self, cursor: Option<&str>) -> Value {
        let page: usize = cursor.and_then(|cursor| cursor.parse().ok()).unwrap_or_default();
        let tool = |(name, annotations): &(&str, Value)| {
            let name = if page == 0 { (*name).to_owned() } else { format!("{name}-{page}") };
            json!({"name": name, "inputSchema": {"type": "object"}, "annotations": annotations})
        };
        let tools: Vec<Value> = self.behavior.tools.iter().map(tool).collect();
        if self.behavior.endless_pages {
            json!({"tools": tools, "nextCursor": (page + 1).to_string()})
        } else {
            json!({"tools": tools})
        }
    }

    fn call(&mut self, id: &Value, params: &Value) -> Value {
        let name = params["name"].as_str().unwrap_or_default();
        if !self.behavior.tools.iter().any(|(known, _)| *known == name) {
            return error(id, -32602, "Unknown tool");
        }
        self.executed.push(name.to_owned());
        let text = params["arguments"]["text"].as_str().unwrap_or("done");
        json!({"jsonrpc": "2.0", "id": id, "result": {"content": [{"type": "text", "text": text}]}})
    }
}

pub(super) fn error(id: &Value, code: i64, message: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
}
