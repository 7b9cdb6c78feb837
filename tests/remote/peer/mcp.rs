//! The peer at its best: a small MCP server, without a socket.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::record::Record;
use super::script::Answers;

/// What goes out on a stream that a GET has opened.
#[derive(Debug)]
pub(super) enum Push {
    Message(Value),
    /// The stream ends tidily.
    End,
}

/// How it says that it does not know a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expiry {
    /// 404, as the specification says and Python servers do.
    NotFound,
    /// 400 with an error that answers nothing, as TypeScript servers do.
    BadRequest,
    /// 400 and nothing more, as gateways do that have forgotten where it is.
    Plainly,
}

/// How it behaves where nothing in the script says otherwise.
#[derive(Debug, Clone)]
pub(crate) struct Manners {
    /// How it answers requests.
    pub(crate) answers: Answers,
    /// Whether it gives sessions, and insists on them.
    pub(crate) sessions: bool,
    /// Whether a GET opens a stream; 405 otherwise.
    pub(crate) streams: bool,
    /// Whether a connection is kept after an answer.
    pub(crate) keeps_alive: bool,
    /// Whether a DELETE ends a session; 405 otherwise.
    pub(crate) deletes: bool,
    pub(crate) expiry: Expiry,
    /// The `Authorization` that everybody needs; 401 otherwise.
    pub(crate) lets_in: Option<&'static str>,
    /// Its tools, by name, with their annotations.
    pub(crate) tools: Vec<(&'static str, Value)>,
    /// Whether each page of tools names another one, for ever.
    pub(crate) endless_pages: bool,
}

impl Default for Manners {
    fn default() -> Self {
        Self {
            answers: Answers::Json,
            sessions: true,
            streams: true,
            keeps_alive: true,
            deletes: true,
            expiry: Expiry::NotFound,
            lets_in: None,
            tools: vec![("echo", json!({})), ("read", json!({"readOnlyHint": true})), ("sleep", json!({}))],
            endless_pages: false,
        }
    }
}

/// What it knows.
#[derive(Debug, Default)]
pub(super) struct Server {
    pub(super) manners: Manners,
    sessions: BTreeMap<String, Option<mpsc::UnboundedSender<Push>>>,
    sessions_made: usize,
    /// Those that are open and belong to no session that it knows.
    forgotten: Vec<mpsc::UnboundedSender<Push>>,
    /// Tools that were carried out, in order.
    pub(super) executed: Vec<String>,
}

/// Why a request goes no further.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Without the right `Authorization`.
    Unauthorized,
    /// Without the session that it needs.
    NoSession,
    /// With a session that nobody knows.
    Expired(Expiry),
}

impl Server {
    /// Lets a request in, or not.
    pub(super) fn admit(&self, record: &Record) -> Result<(), Refusal> {
        if self.manners.lets_in.is_some_and(|wanted| record.header("authorization") != Some(wanted)) {
            return Err(Refusal::Unauthorized);
        }
        let is_first = record.rpc.as_deref() == Some("initialize");
        let needs_none = !self.manners.sessions || is_first || matches!(record.path.as_str(), "/sse" | "/health");
        match &record.session {
            _ if needs_none => Ok(()),
            None => Err(Refusal::NoSession),
            Some(session) if self.sessions.contains_key(session) => Ok(()),
            Some(_) => Err(Refusal::Expired(self.manners.expiry)),
        }
    }

    /// A new session.
    pub(super) fn session(&mut self) -> String {
        self.sessions_made += 1;
        let name = format!("session-{}", self.sessions_made);
        self.sessions.insert(name.clone(), None);
        name
    }

    /// The stream of a session; the one that it had ends.
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

    /// Tells all who listen.
    pub(super) fn tell(&self, message: &Value) {
        for stream in self.sessions.values().flatten() {
            // Who has gone is told nothing.
            let _ = stream.send(Push::Message(message.clone()));
        }
    }

    /// Tells one session.
    pub(super) fn tell_one(&self, session: &str, message: Value) {
        if let Some(Some(stream)) = self.sessions.get(session) {
            let _ = stream.send(Push::Message(message));
        }
    }

    pub(super) fn end_streams(&self) {
        for stream in self.sessions.values().flatten().chain(&self.forgotten) {
            let _ = stream.send(Push::End);
        }
    }

    /// The answer to a JSON-RPC message; none to a notification or a response.
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
        let tools: Vec<Value> = self.manners.tools.iter().map(tool).collect();
        if self.manners.endless_pages {
            json!({"tools": tools, "nextCursor": (page + 1).to_string()})
        } else {
            json!({"tools": tools})
        }
    }

    fn call(&mut self, id: &Value, params: &Value) -> Value {
        let name = params["name"].as_str().unwrap_or_default();
        if !self.manners.tools.iter().any(|(known, _)| *known == name) {
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
