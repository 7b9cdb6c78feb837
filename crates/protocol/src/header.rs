//! HTTP headers of the protocol. Those of a request without a session repeat parts of its body, so that proxies can route
//! it without reading the body. A value that is not plain ASCII is encoded in Base64 between markers.

use std::borrow::Cow;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use crate::method;

/// Id of the session.
pub const SESSION_ID: &str = "mcp-session-id";
/// Protocol version.
pub const PROTOCOL_VERSION: &str = "mcp-protocol-version";
/// Id of the last event that the client received, from which a stream resumes.
pub const LAST_EVENT_ID: &str = "last-event-id";
/// Method of a request without a session.
pub const METHOD: &str = "mcp-method";
/// Tool, prompt, resource or task that a request without a session names.
pub const NAME: &str = "mcp-name";
/// Prefix of the headers that repeat marked arguments of a tool call.
pub const PARAM_PREFIX: &str = "mcp-param-";

const MARKERS: (&str, &str) = ("=?base64?", "?=");

/// Values of a request that HTTP headers repeat, unencoded: the line encodes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestHeaders {
    /// Value of `MCP-Protocol-Version`.
    pub version: &'static str,
    /// Value of `Mcp-Method`.
    pub method: String,
    /// Value of `Mcp-Name`: the tool, prompt, resource or task that the request refers to.
    pub name: Option<String>,
    /// Values of `Mcp-Param-…`, by the rest of the header's name. The tool's schema marks these parameters.
    pub params: Vec<(Box<str>, String)>,
}

/// Returns the member of the params whose value the header [`NAME`] repeats.
pub fn name_member(method: &str) -> Option<&'static str> {
    match method {
        method::TOOLS_CALL | method::PROMPTS_GET => Some("name"),
        method::RESOURCES_READ => Some("uri"),
        method::TASKS_GET | method::TASKS_UPDATE | method::TASKS_CANCEL => Some("taskId"),
        _ => None,
    }
}

/// Encodes a value for a header.
pub fn encode_value(value: &str) -> Cow<'_, str> {
    let is_blank = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    let bytes = value.as_bytes();
    let is_text = bytes.iter().all(|byte| (b' '..=b'~').contains(byte));
    let is_marked = value.starts_with(MARKERS.0) && value.ends_with(MARKERS.1);
    if !is_text || is_marked || is_blank(bytes.first()) || is_blank(bytes.last()) {
        return format!("{}{}{}", MARKERS.0, BASE64_STANDARD.encode(value), MARKERS.1).into();
    }
    value.into()
}

/// Decodes the value of a header; `None` if the text between the markers is not Base64 of UTF-8.
pub fn decode_value(value: &str) -> Option<Cow<'_, str>> {
    match value.strip_prefix(MARKERS.0).and_then(|rest| rest.strip_suffix(MARKERS.1)) {
        Some(coded) => String::from_utf8(BASE64_STANDARD.decode(coded).ok()?).ok().map(Cow::Owned),
        None => Some(value.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_not_plain_ascii_is_encoded_in_base64() {
        for (value, encoded) in [
            ("us-west1", "us-west1"),
            ("", ""),
            ("two words", "two words"),
            ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
            (" padded ", "=?base64?IHBhZGRlZCA=?="),
            ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
            ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
        ] {
            assert_eq!(encode_value(value), encoded, "{value}");
            assert_eq!(decode_value(encoded).as_deref(), Some(value));
        }
        assert_eq!(decode_value("=?base64?SGVsbG8?="), None);
    }
}
