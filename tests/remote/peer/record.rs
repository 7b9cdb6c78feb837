//! The log of the peer: requests and counters.

use serde_json::Value;

use super::http::Request;

/// A received request.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) connection: usize,
    pub(crate) http: String,
    pub(crate) path: String,
    pub(crate) query: Option<String>,
    pub(crate) headers: Vec<(String, String)>,
    /// The session of the request.
    pub(crate) session: Option<String>,
    /// The body if it is JSON, else null.
    pub(crate) body: Value,
    /// The JSON-RPC method.
    pub(crate) rpc: Option<String>,
    /// The called tool.
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

    /// Returns a short description: `tools/call echo`, `GET /mcp`.
    pub(crate) fn label(&self) -> String {
        match (&self.rpc, &self.tool) {
            (Some(rpc), Some(tool)) => format!("{rpc} {tool}"),
            (Some(rpc), None) => rpc.clone(),
            (None, _) if self.body.is_object() => "a response".to_owned(),
            (None, _) => format!("{} {}", self.http, self.path),
        }
    }
}

/// The requests and counters of the peer.
#[derive(Debug, Default)]
pub(crate) struct PeerLog {
    /// All requests, in their order.
    pub(crate) requests: Vec<Record>,
    /// The number of open connections.
    pub(crate) connections: usize,
    /// The number of connections so far.
    pub(crate) connections_made: usize,
    /// The number of connections without a valid request: no HTTP, or a failed TLS handshake.
    pub(crate) malformed: usize,
    /// The number of open streams.
    pub(crate) streams: usize,
    /// The number of `initialize` requests in progress.
    pub(crate) initializing: usize,
    /// The maximum of `initializing`.
    pub(crate) initializing_max: usize,
    /// The sent bytes of endless lines.
    pub(crate) endless: usize,
}

impl PeerLog {
    /// Returns the number of matching requests.
    pub(crate) fn count(&self, matches: impl Fn(&Record) -> bool) -> usize {
        self.requests.iter().filter(|record| matches(record)).count()
    }

    /// Returns the number of requests with a JSON-RPC method.
    pub(crate) fn rpc(&self, method: &str) -> usize {
        self.count(|record| record.rpc.as_deref() == Some(method))
    }

    pub(crate) fn calls(&self, tool: &str) -> usize {
        self.count(|record| record.tool.as_deref() == Some(tool))
    }

    pub(crate) fn http(&self, method: &str) -> usize {
        self.count(|record| record.http == method)
    }
}
