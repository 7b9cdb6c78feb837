//! Answers to requests of clients.

use mcp_satellite_protocol::rpc::RpcMessage;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcError {
    pub code: i64,
    pub message: String,
    /// JSON text.
    pub data: Option<String>,
}

impl RpcError {
    pub fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), data: None }
    }
}

/// Answer to a request. It is sent under the id of the client's request.
#[derive(Debug, Clone)]
pub enum CallAnswer {
    /// Result or error of a server, under any id.
    Message(RpcMessage),
    /// Result created by the satellite, as JSON text.
    Result(String),
    /// Result of a server with the members that every stateless result has, as JSON text.
    CompletedResult(String),
    Error(RpcError),
    /// No answer, because the client cancelled the request.
    Cancelled,
}

#[derive(Debug, Clone)]
pub struct InitializeAnswer {
    /// Result, as JSON text.
    pub result: String,
    pub version: String,
}

impl CallAnswer {
    /// Writes the answer as the parts of a message and passes them to `then`; `None` if the request was cancelled.
    pub(crate) fn with_parts<R>(&self, id: &str, then: impl FnOnce(Option<&[&str]>) -> R) -> R {
        const START: &str = r#"{"jsonrpc":"2.0","id":"#;
        match self {
            Self::Message(message) => then(Some(&message.with_id(id))),
            Self::Result(result) | Self::CompletedResult(result) => {
                then(Some(&[START, id, r#","result":"#, result, "}"]))
            }
            Self::Error(RpcError { code, message, data }) => {
                let (code, message) = (code.to_string(), serde_json::Value::from(message.as_str()).to_string());
                let (comma, data) = data.as_deref().map_or(("", ""), |data| (r#","data":"#, data));
                let error = [START, id, r#","error":{"code":"#, &code, r#","message":"#, &message, comma, data, "}}"];
                then(Some(&error))
            }
            Self::Cancelled => then(None),
        }
    }
}
