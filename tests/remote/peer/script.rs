//! The script of the peer: actions that replace the regular response to a request.

use std::time::Duration;

use super::record::Record;

/// A filter for requests. A field that is `None` matches all requests.
#[derive(Debug, Clone, Default)]
pub(crate) struct When {
    http: Option<&'static str>,
    path: Option<&'static str>,
    rpc: Option<&'static str>,
    tool: Option<&'static str>,
}

impl When {
    /// Matches every request.
    pub(crate) fn any() -> Self {
        Self::default()
    }

    pub(crate) fn http(method: &'static str) -> Self {
        Self { http: Some(method), ..Self::default() }
    }

    /// Matches a path.
    pub(crate) fn path(path: &'static str) -> Self {
        Self { path: Some(path), ..Self::default() }
    }

    /// Matches the JSON-RPC method of the body.
    pub(crate) fn rpc(method: &'static str) -> Self {
        Self { rpc: Some(method), ..Self::default() }
    }

    /// Matches calls of a tool.
    pub(crate) fn tool(tool: &'static str) -> Self {
        Self { tool: Some(tool), ..Self::rpc("tools/call") }
    }

    fn matches(&self, record: &Record) -> bool {
        self.http.is_none_or(|http| record.http == http)
            && self.path.is_none_or(|path| record.path == path)
            && self.rpc.is_none_or(|rpc| record.rpc.as_deref() == Some(rpc))
            && self.tool.is_none_or(|tool| record.tool.as_deref() == Some(tool))
    }
}

/// An action on a request.
#[derive(Debug, Clone)]
pub(crate) enum Action {
    /// Sends this response.
    Respond {
        status: u16,
        headers: Vec<(&'static str, String)>,
        body: String,
    },
    /// Sends a JSON-RPC error with the id of the request.
    RpcError {
        code: i64,
        message: &'static str,
    },
    /// Reads the request and never responds; the connection stays open.
    Silence,
    /// Closes the connection without a response.
    HangUp,
    /// Closes all connections and stops listening.
    Die,
    /// Freezes the whole peer: nothing is read, answered or closed any more.
    Freeze,
    /// Executes the request and breaks off in the middle of the response: of a body with a length, or of an event
    /// stream.
    Cut(ResponseFormat),
    /// Sends an event stream of invalid events that ends regularly.
    GarbageSse,
    /// Sends the regular response, one byte at a time.
    Drip {
        pause: Duration,
    },
    /// Sends an event stream of comments without a response.
    DripForever {
        pause: Duration,
    },
    EndlessLine(ResponseFormat),
    /// Accepts the message and ends every stream regularly.
    EndStreams,
    /// Sends this address as the endpoint of HTTP+SSE.
    Endpoint(String),
}

/// The two formats of a response over streamable HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResponseFormat {
    Json,
    Sse,
}

impl Action {
    /// Responds without a body.
    pub(crate) fn status(status: u16) -> Self {
        Self::Respond { status, headers: Vec::new(), body: String::new() }
    }

    /// Responds with a header and without a body.
    pub(crate) fn status_with(status: u16, header: &'static str, value: &str) -> Self {
        Self::Respond { status, headers: vec![(header, value.to_owned())], body: String::new() }
    }

    /// Responds with 200 and a page, as proxies, captive portals and wrong addresses do.
    pub(crate) fn html() -> Self {
        Self::Respond {
            status: 200,
            headers: vec![("content-type", "text/html; charset=utf-8".to_owned())],
            body: "<!doctype html><title>Welcome</title>".to_owned(),
        }
    }

    /// Responds as the TypeScript SDK does to an unknown session: 400 and an error without an id.
    pub(crate) fn expired_400() -> Self {
        let body = serde_json::json!({
            "jsonrpc": "2.0",
            "error": {"code": -32000, "message": "Bad Request: No valid session ID provided"},
            "id": null,
        });
        let headers = vec![("content-type", "application/json".to_owned())];
        Self::Respond { status: 400, headers, body: body.to_string() }
    }
}

/// One rule of a script. The first rule that matches and is not used up applies.
#[derive(Debug, Clone)]
pub(super) struct Rule {
    when: When,
    left: Option<usize>,
    action: Action,
}

/// The rules that replace the regular behavior.
#[derive(Debug, Default)]
pub(super) struct Script(Vec<Rule>);

impl Script {
    pub(super) fn push(&mut self, when: When, times: Option<usize>, action: Action) {
        self.0.push(Rule { when, left: times, action });
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn decide(&mut self, record: &Record) -> Option<Action> {
        let rule = self.0.iter_mut().find(|rule| rule.left != Some(0) && rule.when.matches(record))?;
        rule.left = rule.left.map(|left| left - 1);
        Some(rule.action.clone())
    }
}
