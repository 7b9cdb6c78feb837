//! Headers of requests without a session. They repeat parts of the message; tools mark the arguments to repeat in their
//! definitions, which the bridge learns from the lists that pass through it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use http::{HeaderMap, HeaderName, HeaderValue};
use mcp_satellite_protocol::era::SESSION_VERSIONS;
use mcp_satellite_protocol::header::{self, encode_value, name_member};
use mcp_satellite_protocol::header_params::{HeaderParam, header_params, may_have_header_params};
use mcp_satellite_protocol::rpc::{RpcMessage, member};
use mcp_satellite_protocol::{meta, method};
use serde_json::value::RawValue;

/// Maximum number of tools with marked arguments that are remembered.
const TOOLS_MAX: usize = 10_000;

pub(crate) const SESSION_ID: HeaderName = HeaderName::from_static(header::SESSION_ID);
pub(crate) const PROTOCOL_VERSION: HeaderName = HeaderName::from_static(header::PROTOCOL_VERSION);
pub(crate) const LAST_EVENT_ID: HeaderName = HeaderName::from_static(header::LAST_EVENT_ID);
const METHOD: HeaderName = HeaderName::from_static(header::METHOD);
const NAME: HeaderName = HeaderName::from_static(header::NAME);

/// Returns the version that a message without a session declares; `None` if it belongs to a session.
pub(crate) fn stateless_version(message: &RpcMessage) -> Option<String> {
    let own = message.params().and_then(|params| member(member(params, "_meta")?, meta::VERSION));
    let own = own.and_then(|own| serde_json::from_str::<String>(own).ok());
    own.filter(|own| !SESSION_VERSIONS.contains(&&**own))
}

/// Marked arguments by the name of the tool.
#[derive(Default)]
pub(crate) struct ToolMarks(Mutex<HashMap<String, Vec<HeaderParam>>>);

impl ToolMarks {
    /// Remembers the marks in the result of `tools/list`, a JSON text.
    pub(crate) fn learn(&self, result: &str) {
        if !may_have_header_params(result) {
            return;
        }
        let tools = member(result, "tools").and_then(|tools| serde_json::from_str::<Vec<&RawValue>>(tools).ok());
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for tool in tools.into_iter().flatten() {
            let name = member(tool.get(), "name").and_then(|name| serde_json::from_str::<String>(name).ok());
            // A tool with an invalid mark must not be used; the satellite rejects the call.
            let (Some(name), Ok(marks)) = (name, header_params(tool.get())) else { continue };
            if marks.is_empty() {
                known.remove(&name);
            } else if known.len() < TOOLS_MAX || known.contains_key(&name) {
                known.insert(name, marks);
            }
        }
    }

    /// Returns the headers of a request without a session. A value that cannot be a header is left out, and the
    /// satellite reports it as missing.
    pub(crate) fn headers(&self, message: &RpcMessage, version: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let mut add = |name: HeaderName, value: &str| {
            if let Ok(value) = HeaderValue::from_str(&encode_value(value)) {
                headers.insert(name, value);
            }
        };
        let method = message.method().unwrap_or_default();
        add(PROTOCOL_VERSION, version);
        add(METHOD, method);
        let params = message.params().unwrap_or("{}");
        let name = name_member(method).and_then(|name| member(params, name));
        let Some(name) = name.and_then(|name| serde_json::from_str::<String>(name).ok()) else { return headers };
        add(NAME, &name);
        if method == method::TOOLS_CALL
            && let Some(marks) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&name)
        {
            let arguments = member(params, "arguments").unwrap_or("{}");
            for mark in marks {
                let header = HeaderName::try_from(format!("{}{}", header::PARAM_PREFIX, mark.header));
                if let (Ok(header), Some(value)) = (header, mark.value(arguments)) {
                    add(header, &value);
                }
            }
        }
        headers
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    fn message(text: &'static str) -> RpcMessage {
        RpcMessage::parse(text.into()).unwrap()
    }

    #[test]
    fn headers_repeat_method_name_and_marked_arguments() {
        let marks = ToolMarks::default();
        let call = message(
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"wé","arguments":{"r":"eu","q":1},"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}"#,
        );
        assert_eq!(stateless_version(&call).as_deref(), Some("2026-07-28"));
        let value =
            |name: &str| marks.headers(&call, "2026-07-28").get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(value("mcp-param-region"), None);
        marks.learn(
            r#"{"tools":[{"name":"w\u00e9","inputSchema":{"properties":{"r":{"type":"string","x-mcp-header":"Region"}}}}]}"#,
        );
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(value("mcp-param-region"), text("eu"));
        assert_eq!((value("mcp-method"), value("mcp-name")), (text("tools/call"), text("=?base64?d8Op?=")));
        marks.learn(r#"{"tools":[{"name":"wé","inputSchema":{"description":"no x-mcp-header"}}]}"#);
        assert_eq!(value("mcp-param-region"), None);
    }

    #[test]
    fn a_message_of_a_session_declares_no_stateless_version() {
        for text in [
            r#"{"jsonrpc":"2.0","id":1,"method":"x"}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"x","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2025-11-25"}}}"#,
        ] {
            assert_eq!(stateless_version(&message(text)), None, "{text}");
        }
    }
}
