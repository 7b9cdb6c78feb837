//! The two eras of the protocol: up to 2025-11-25 a client opens a session with `initialize`; since 2026-07-28 every
//! request is self-contained and there are no sessions ("stateless"). Both are served on the same paths. Pure.

pub(crate) mod headers;
pub(crate) mod request_meta;
pub(crate) mod translation;

use axum::http::{HeaderMap, HeaderName, StatusCode};
use mcp_satellite_protocol::era::{SESSION_VERSIONS, STATELESS_VERSION};
use mcp_satellite_protocol::error_code::{HEADER_MISMATCH, METHOD_NOT_FOUND, MISSING_CAPABILITY, UNSUPPORTED_VERSION};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{RpcMessage, member};
use mcp_satellite_protocol::{header, meta};

use super::answer::RpcError;
use super::reply::SESSION_ID;

// Supported versions, newest first.
pub(crate) const SERVED: [&str; 5] = {
    let [fourth, third, second, newest] = SESSION_VERSIONS;
    [STATELESS_VERSION, newest, second, third, fourth]
};

pub(crate) const PROTOCOL_VERSION: HeaderName = HeaderName::from_static(header::PROTOCOL_VERSION);

pub(crate) fn has_sessions(version: &str) -> bool {
    SESSION_VERSIONS.contains(&version)
}

/// Negotiates a version with sessions: the older one of the client's and the server's. For an unknown or stateless
/// version of the client it is the server's.
pub(crate) fn negotiate_version(client: &str, server: &str) -> String {
    if has_sessions(client) { client.min(server).to_owned() } else { server.to_owned() }
}

#[derive(Debug)]
pub(crate) struct StatelessErrorResponse {
    pub status: StatusCode,
    pub error: RpcError,
}

impl StatelessErrorResponse {
    fn bad_request(code: i64, message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, error: RpcError::new(code, message) }
    }
}

fn declared_version(message: &RpcMessage) -> Option<&str> {
    let params = message.params()?;
    // The name may be written with escapes, so a text with an escape is parsed, too.
    let may_have = |part: &str| memchr::memmem::find(params.as_bytes(), part.as_bytes()).is_some();
    if !may_have(meta::VERSION) && !may_have("\\u") {
        return None;
    }
    member(member(params, "_meta")?, meta::VERSION)
}

/// Returns true for a stateless request: `_meta` names such a version, or the header does and there is no session.
pub(crate) fn is_stateless(message: &RpcMessage, headers: &HeaderMap) -> bool {
    let (Some(method), own) = (message.method(), declared_version(message)) else { return false };
    if let Some(own) = own {
        return serde_json::from_str::<String>(own).map_or(true, |own| !has_sessions(&own));
    }
    // A client with sessions may offer any version in `initialize`.
    if method == method::INITIALIZE || headers.contains_key(SESSION_ID) {
        return false;
    }
    method == method::DISCOVER || is_stateless_header(headers)
}

pub(crate) fn is_stateless_header(headers: &HeaderMap) -> bool {
    headers.get(PROTOCOL_VERSION).is_some_and(|version| !version.to_str().is_ok_and(has_sessions))
}

/// Returns true for methods that the stateless era has removed. They must be rejected here, because a server with
/// sessions would accept them.
pub(crate) fn is_removed(method: &str) -> bool {
    matches!(
        method,
        method::INITIALIZE
            | method::PING
            | method::SET_LOG_LEVEL
            | method::RESOURCES_SUBSCRIBE
            | method::RESOURCES_UNSUBSCRIBE
    )
}

pub(crate) fn can_require_input(method: &str) -> bool {
    matches!(method, method::TOOLS_CALL | method::PROMPTS_GET | method::RESOURCES_READ)
}

pub(crate) fn status_of(code: i64) -> StatusCode {
    match code {
        HEADER_MISMATCH | MISSING_CAPABILITY | UNSUPPORTED_VERSION => StatusCode::BAD_REQUEST,
        METHOD_NOT_FOUND => StatusCode::NOT_FOUND,
        _ => StatusCode::OK,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn the_era_of_a_request_follows_its_metadata_and_headers() {
        let is_stateless_request = |headers: &[(HeaderName, &'static str)], method: &str, params: &str| {
            let text = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#);
            let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
            is_stateless(&RpcMessage::parse(text.into()).unwrap(), &headers)
        };
        let (version, session) = (|version| (PROTOCOL_VERSION, version), (SESSION_ID, "x"));
        let meta = |version| format!(r#"{{"_meta":{{"io.modelcontextprotocol/protocolVersion":{version}}}}}"#);
        assert!(is_stateless_request(&[], "tools/list", &meta(r#""2026-07-28""#)));
        assert!(is_stateless_request(std::slice::from_ref(&session), "tools/list", &meta(r#""2026-07-28""#)));
        assert!(is_stateless_request(&[], "initialize", &meta(r#""2026-07-28""#)));
        assert!(is_stateless_request(&[], "tools/list", &meta("1")));
        assert!(!is_stateless_request(std::slice::from_ref(&session), "tools/list", &meta(r#""2025-11-25""#)));
        assert!(is_stateless_request(&[version("2026-07-28")], "tools/list", "{}"));
        assert!(is_stateless_request(&[version("v999")], "tools/list", "{}"));
        assert!(!is_stateless_request(&[version("2025-11-25")], "tools/list", "{}"));
        assert!(!is_stateless_request(&[version("2026-07-28"), session.clone()], "tools/list", "{}"));
        assert!(!is_stateless_request(&[version("2026-07-28")], "initialize", r#"{"protocolVersion":"2026-07-28"}"#));
        assert!(!is_stateless_request(&[], "tools/list", "{}"));
        assert!(is_stateless_request(&[], "server/discover", "{}"));
        assert!(!is_stateless_request(&[session], "server/discover", "{}"));
    }

    #[test]
    fn the_older_of_two_session_versions_is_negotiated() {
        assert_eq!(negotiate_version("2025-03-26", "2025-11-25"), "2025-03-26");
        assert_eq!(negotiate_version("2025-11-25", "2025-06-18"), "2025-06-18");
        assert_eq!(negotiate_version("1999-01-01", "2025-06-18"), "2025-06-18");
        assert_eq!(negotiate_version("2026-07-28", "2025-11-25"), "2025-11-25");
        assert!(has_sessions("2025-11-25") && !has_sessions("2026-07-28") && !has_sessions(""));
    }
}
