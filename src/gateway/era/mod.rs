//! The two eras of the protocol: until 2025-11-25 a client opens a session by `initialize`; since 2026-07-28 every request
//! says by itself what it must be known of it, and there are no sessions. Both are served on the same paths. Pure.

pub(crate) mod change;
pub(crate) mod headers;
pub(crate) mod terms;

use axum::http::{HeaderMap, HeaderName, StatusCode};
use mcp_satellite_actors::model::era::STATELESS_VERSION;
use mcp_satellite_actors::rpc::{Message, member};

use super::face::RpcError;
use super::reply::SESSION_ID;

/// The newest version of those with sessions.
pub(crate) const NEWEST: &str = "2025-11-25";

/// Every version that is spoken here.
pub(crate) const SERVED: [&str; 5] = [STATELESS_VERSION, NEWEST, "2025-06-18", "2025-03-26", "2024-11-05"];

pub(crate) const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// What headers and body say of each other does not fit.
pub(crate) const HEADER_MISMATCH: i64 = -32020;
/// What a request needs its client does not offer.
pub(crate) const MISSING_CAPABILITY: i64 = -32021;
/// The version of a request is none that is spoken here.
pub(crate) const UNSUPPORTED_VERSION: i64 = -32022;

/// Whether a protocol version is one of those with sessions that are spoken here.
pub(crate) fn has_sessions(version: &str) -> bool {
    version != STATELESS_VERSION && SERVED.contains(&version)
}

/// What is spoken with a client: what both it and the server speak, as old as the older of them. A version that is not
/// known here is offered by nobody else: the server's is spoken.
pub(crate) fn agreed(client: &str, server: &str) -> String {
    if has_sessions(client) { client.min(server).to_owned() } else { server.to_owned() }
}

/// Why a request of the stateless era is not looked at any further.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) status: StatusCode,
    pub(crate) error: RpcError,
}

impl Wrong {
    fn bad(code: i64, message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, error: RpcError::new(code, message) }
    }
}

/// The version that a message gives itself, as JSON text.
fn own_version(message: &Message) -> Option<&str> {
    let params = message.params()?;
    // A name may be spelled with escapes, so a text with one is looked into as well.
    let may_have = |part: &str| memchr::memmem::find(params.as_bytes(), part.as_bytes()).is_some();
    if !may_have(terms::VERSION) && !may_have("\\u") {
        return None;
    }
    member(member(params, "_meta")?, terms::VERSION)
}

/// Whether a message is one of the era without sessions: it says so itself, or in its header, and is not in a session.
pub(crate) fn is_stateless(message: &Message, headers: &HeaderMap) -> bool {
    let (Some(method), own) = (message.method(), own_version(message)) else { return false };
    if let Some(own) = own {
        return serde_json::from_str::<String>(own).map_or(true, |own| !has_sessions(&own));
    }
    // A client of the other era may offer any version in it.
    if method == "initialize" || headers.contains_key(SESSION_ID) {
        return false;
    }
    method == "server/discover" || is_stateless_header(headers)
}

/// Whether the version in a request's header is none of those with sessions.
pub(crate) fn is_stateless_header(headers: &HeaderMap) -> bool {
    headers.get(PROTOCOL_VERSION).is_some_and(|version| !version.to_str().is_ok_and(has_sessions))
}

/// What the other era has and this one has not. A server of the other era would understand it all the same.
pub(crate) fn is_removed(method: &str) -> bool {
    matches!(method, "initialize" | "ping" | "logging/setLevel" | "resources/subscribe" | "resources/unsubscribe")
}

/// Methods that may be answered by asking for more.
pub(crate) fn may_ask_back(method: &str) -> bool {
    matches!(method, "tools/call" | "prompts/get" | "resources/read")
}

/// The status of an answer that is an error with this code.
pub(crate) fn status_of(code: i64) -> StatusCode {
    match code {
        HEADER_MISMATCH | MISSING_CAPABILITY | UNSUPPORTED_VERSION => StatusCode::BAD_REQUEST,
        super::reply::METHOD_NOT_FOUND => StatusCode::NOT_FOUND,
        _ => StatusCode::OK,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_request_is_of_the_era_that_it_says() {
        let of = |headers: &[(HeaderName, &'static str)], method: &str, params: &str| {
            let text = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#);
            let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
            is_stateless(&Message::read(text.into()).unwrap(), &headers)
        };
        let (version, session) = (|version| (PROTOCOL_VERSION, version), (SESSION_ID, "x"));
        let meta = |version| format!(r#"{{"_meta":{{"io.modelcontextprotocol/protocolVersion":{version}}}}}"#);
        assert!(of(&[], "tools/list", &meta(r#""2026-07-28""#)));
        assert!(of(std::slice::from_ref(&session), "tools/list", &meta(r#""2026-07-28""#)));
        assert!(of(&[], "initialize", &meta(r#""2026-07-28""#)));
        assert!(of(&[], "tools/list", &meta("1")));
        assert!(!of(std::slice::from_ref(&session), "tools/list", &meta(r#""2025-11-25""#)));
        assert!(of(&[version("2026-07-28")], "tools/list", "{}"));
        assert!(of(&[version("v999")], "tools/list", "{}"));
        assert!(!of(&[version("2025-11-25")], "tools/list", "{}"));
        assert!(!of(&[version("2026-07-28"), session.clone()], "tools/list", "{}"));
        assert!(!of(&[version("2026-07-28")], "initialize", r#"{"protocolVersion":"2026-07-28"}"#));
        assert!(!of(&[], "tools/list", "{}"));
        assert!(of(&[], "server/discover", "{}"));
        assert!(!of(&[session], "server/discover", "{}"));
    }

    #[test]
    fn the_older_of_two_versions_with_sessions_is_spoken() {
        assert_eq!(agreed("2025-03-26", "2025-11-25"), "2025-03-26");
        assert_eq!(agreed("2025-11-25", "2025-06-18"), "2025-06-18");
        assert_eq!(agreed("1999-01-01", "2025-06-18"), "2025-06-18");
        assert_eq!(agreed("2026-07-28", "2025-11-25"), "2025-11-25");
        assert!(has_sessions("2025-11-25") && !has_sessions("2026-07-28") && !has_sessions(""));
    }
}
