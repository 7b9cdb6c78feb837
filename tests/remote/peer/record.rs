//! What the peer has seen, so that tests can count.

use serde_json::Value;

use super::http::Request;

/// A request that came.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    /// Which connection it came on, counted from 1.
    pub(crate) connection: usize,
    pub(crate) http: String,
    pub(crate) path: String,
    pub(crate) query: Option<String>,
    pub(crate) headers: Vec<(String, String)>,
    /// The session that it names.
    pub(crate) session: Option<String>,
    /// Its body where that is JSON, else null.
    pub(crate) body: Value,
    /// The JSON-RPC method.
    pub(crate) rpc: Option<String>,
    /// The tool that it calls.
    pub(crate) tool: Option<String>,
}

impl Record {
    pub(super) fn new(connection: usize, request: &Request) -> Self {
        let body = serde_json::from_slice(&request.body).unwrap_or(Value::Null);
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let header =
            |name: &str| request.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        let in_query = || {
            let query = request.query.as_deref()?;
            query.split('&').find_map(|pair| pair.strip_prefix("session=")).map(ToOwned::to_owned)
        };
        Self {
            connection,
            http: request.method.clone(),
            path: request.path.clone(),
            query: request.query.clone(),
            session: header("mcp-session-id").or_else(in_query),
            headers: request.headers.clone(),
            rpc: text(&body["method"]),
            tool: (body["method"] == "tools/call").then(|| text(&body["params"]["name"])).flatten(),
            body,
        }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// In a few words: `tools/call echo`, `GET /mcp`.
    pub(crate) fn what(&self) -> String {
        match (&self.rpc, &self.tool) {
            (Some(rpc), Some(tool)) => format!("{rpc} {tool}"),
            (Some(rpc), None) => rpc.clone(),
            (None, _) if self.body.is_object() => "a response".to_owned(),
            (None, _) => format!("{} {}", self.http, self.path),
        }
    }
}

/// All that the peer has seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Every request, in the order in which they came.
    pub(crate) requests: Vec<Record>,
    /// Connections that are there.
    pub(crate) connections: usize,
    /// Connections that ever were there.
    pub(crate) connections_made: usize,
    /// Connections that never came to a request: no HTTP, no TLS that both sides know.
    pub(crate) misunderstood: usize,
    /// Streams that a GET has opened.
    pub(crate) streams: usize,
    /// `initialize` requests that are not answered.
    pub(crate) initializing: usize,
    /// The most of them at once.
    pub(crate) initializing_max: usize,
    /// Bytes of an endless line that went out.
    pub(crate) endless: usize,
}

impl Seen {
    /// How many requests were such.
    pub(crate) fn count(&self, is_such: impl Fn(&Record) -> bool) -> usize {
        self.requests.iter().filter(|record| is_such(record)).count()
    }

    /// How often this JSON-RPC method came.
    pub(crate) fn rpc(&self, method: &str) -> usize {
        self.count(|record| record.rpc.as_deref() == Some(method))
    }

    /// How often this tool was called.
    pub(crate) fn calls(&self, tool: &str) -> usize {
        self.count(|record| record.tool.as_deref() == Some(tool))
    }

    /// How often this HTTP method came.
    pub(crate) fn http(&self, method: &str) -> usize {
        self.count(|record| record.http == method)
    }
}
