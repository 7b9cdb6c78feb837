//! Selection of the protocol era for a server, and detection of a wrong one.
//!
//! ```text
//!  configured ──────────────────────────▶ that one, and no other
//!  remembered as stateless ─▶ discover ───refused, silent──▶ initialize
//!  all others ──────────────▶ initialize ─refused──────────▶ discover (DISCOVER_WAIT_MAX)
//! ```
//!
//! `initialize` comes first if the era is unknown, so that servers with sessions receive no additional message. A
//! server may be replaced by one of the other era at any time: it then answers as for an unknown session, and the next
//! handshake detects the era.
//!
//! A stateless server cannot lose a session. It is lost if it is unreachable, if it rejects the credentials, if too
//! many requests fail (5xx) or checks remain unanswered, or if it no longer supports `server/discover`, which is
//! mandatory in its era. After an answer that breaks off, the server is checked at once.
//!
//! An error in a session counts as a sign of the other era only if it names the version or answers a check of ours: the
//! text of an error never decides.

use std::time::Duration;

use mcp_satellite_model::exit::CallError;
use mcp_satellite_model::failure::FailureKind;
use mcp_satellite_protocol::era::{Era, STATELESS_VERSION};
use mcp_satellite_protocol::error_code::{
    HEADER_MISMATCH, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, MISSING_CAPABILITY, UNSUPPORTED_VERSION,
};
use mcp_satellite_protocol::rpc::member;

/// Pause before another probe of the other era, after one that failed or remained unanswered.
pub const DISCOVER_PAUSE: Duration = Duration::from_secs(60);
/// Maximum time for the answer to `server/discover` after the server refused `initialize`: such a server is up and
/// answers quickly.
pub const DISCOVER_WAIT_MAX: Duration = Duration::from_secs(2);
/// Maximum number of input requests that a server may send in answer to one call.
pub const INPUT_ROUNDS_MAX: u32 = 10;

/// Returns the era of the first request to a server.
pub fn first_era(configured: Option<Era>, remembered: Option<Era>) -> Era {
    configured.or(remembered).unwrap_or(Era::Sessions)
}

/// Returns the maximum time for the answer to the first request of an era, out of `left`, the rest of the handshake
/// timeout. A server remembered as stateless may still be starting, so it gets half of that; the other half is left for
/// the other era.
pub fn opening_timeout(configured: Option<Era>, opening: Era, is_second: bool, left: Duration) -> Duration {
    match (configured, opening, is_second) {
        (Some(_), _, _) | (None, Era::Sessions, _) => left,
        (None, Era::Stateless, true) => left.min(DISCOVER_WAIT_MAX),
        (None, Era::Stateless, false) => left / 2,
    }
}

/// Returns true if a server that answers the first request of the era `opened` with this error may belong to the other
/// era.
pub fn may_be_other(opened: Era, error: &CallError) -> bool {
    let CallError::Server { code, .. } = error else { return false };
    match opened {
        // The code depends on the server: it does not support `initialize`, and the request also lacks mandatory fields
        // of its era.
        Era::Sessions => {
            matches!(*code, INVALID_REQUEST | METHOD_NOT_FOUND | INVALID_PARAMS | MISSING_CAPABILITY)
                || is_stateless_error(*code)
        }
        // Servers with sessions may answer a request before `initialize` with any error.
        Era::Stateless => true,
    }
}

/// Returns true if an HTTP status is a refusal of the first request of an era by a reachable server.
pub fn is_refusal(kind: &FailureKind) -> bool {
    matches!(kind, FailureKind::Status { status: 400 | 404 | 405 | 406 | 415 | 422, .. })
}

/// Returns true if an HTTP status may be the refusal of `initialize` by a stateless server, which gives a reason as
/// JSON-RPC.
pub fn may_be_stateless(kind: &FailureKind) -> bool {
    matches!(kind, FailureKind::Status { status: 400 | 404, message: Some(_) })
}

/// Returns true for error codes with which a stateless server rejects a request of a session. Servers with sessions may
/// use them with another meaning.
pub fn is_stateless_error(code: i64) -> bool {
    matches!(code, HEADER_MISMATCH | UNSUPPORTED_VERSION)
}

/// Returns true if an error lists the stateless version as supported.
pub fn has_stateless_support(code: i64, data: Option<&str>) -> bool {
    let supported = || {
        let supported = member(data?, "supported")?;
        serde_json::from_str::<Vec<String>>(supported).ok()
    };
    code == UNSUPPORTED_VERSION
        && supported().is_some_and(|versions| versions.iter().any(|version| version == STATELESS_VERSION))
}

/// Returns true if this answer to a check means that the server no longer belongs to the era: every server of the era
/// supports the request, and the request has no effect.
pub fn is_era_refused(era: Era, error: &CallError) -> bool {
    let CallError::Server { code, .. } = error else { return false };
    match era {
        Era::Sessions => is_stateless_error(*code),
        Era::Stateless => {
            matches!(*code, INVALID_REQUEST | METHOD_NOT_FOUND | INVALID_PARAMS | UNSUPPORTED_VERSION)
        }
    }
}

/// Returns true if an HTTP status means that the server no longer belongs to the era: an address without
/// `server/discover`, or a server that requires a session.
pub fn is_era_refused_by_status(kind: &FailureKind) -> bool {
    matches!(kind, FailureKind::Status { status: 400 | 404 | 405, .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: i64) -> CallError {
        CallError::Server { code, message: String::new(), data: None }
    }

    #[test]
    fn initialize_comes_first_unless_another_era_is_known() {
        assert_eq!(first_era(None, None), Era::Sessions);
        assert_eq!(first_era(None, Some(Era::Stateless)), Era::Stateless);
        assert_eq!(first_era(Some(Era::Sessions), Some(Era::Stateless)), Era::Sessions);
        assert_eq!(first_era(Some(Era::Stateless), Some(Era::Sessions)), Era::Stateless);
    }

    #[test]
    fn the_timeout_of_discover_leaves_time_for_initialize() {
        let (left, half) = (Duration::from_secs(30), Duration::from_secs(15));
        assert_eq!(opening_timeout(None, Era::Sessions, false, left), left);
        assert_eq!(opening_timeout(None, Era::Sessions, true, half), half);
        assert_eq!(opening_timeout(None, Era::Stateless, false, left), half);
        assert_eq!(opening_timeout(None, Era::Stateless, true, left), DISCOVER_WAIT_MAX);
        assert_eq!(opening_timeout(None, Era::Stateless, true, Duration::from_secs(1)), Duration::from_secs(1));
        assert_eq!(opening_timeout(Some(Era::Stateless), Era::Stateless, false, left), left);
    }

    #[test]
    fn only_errors_that_suggest_the_other_era_lead_to_its_opening() {
        for code in [-32600, -32601, -32602, -32020, -32021, -32022] {
            assert!(may_be_other(Era::Sessions, &error(code)), "{code}");
        }
        for code in [-32603, -32700, -32000, -32001, 1] {
            assert!(!may_be_other(Era::Sessions, &error(code)), "{code}");
            assert!(may_be_other(Era::Stateless, &error(code)), "{code}");
        }
        let message = Some("no".to_owned());
        for (kind, stateless, refusal) in [
            (FailureKind::Status { status: 400, message: message.clone() }, true, true),
            (FailureKind::Status { status: 404, message: message.clone() }, true, true),
            (FailureKind::from_status(404), false, true),
            (FailureKind::Status { status: 418, message }, false, false),
            (FailureKind::ServerError { status: 500, retry_after: None }, false, false),
            (FailureKind::Refused, false, false),
            (FailureKind::Unauthorized { challenge: None }, false, false),
        ] {
            assert_eq!((may_be_stateless(&kind), is_refusal(&kind)), (stateless, refusal), "{kind}");
        }
        let late = CallError::TimedOut { after: Duration::ZERO, fate: mcp_satellite_model::exit::CallFate::TimedOut };
        assert!(!may_be_other(Era::Stateless, &late));
    }

    #[test]
    fn an_error_of_a_call_proves_stateless_support_only_with_the_version() {
        let data = |supported: &str| Some(format!(r#"{{"supported":{supported},"requested":"2025-11-25"}}"#));
        assert!(has_stateless_support(-32022, data(r#"["2026-07-28"]"#).as_deref()));
        for (code, data) in [
            (-32022, None),
            (-32022, data(r#"["2025-11-25"]"#)),
            (-32022, data("7")),
            (-32020, data(r#"["2026-07-28"]"#)),
        ] {
            assert!(!has_stateless_support(code, data.as_deref()), "{code} {data:?}");
        }
    }

    #[test]
    fn only_errors_about_the_method_refute_the_era_of_a_check() {
        for (code, sessions, stateless) in [
            (-32601, false, true),
            (-32602, false, true),
            (-32600, false, true),
            (-32022, true, true),
            (-32020, true, false),
            (-32603, false, false),
            (-32000, false, false),
        ] {
            let refused = |era| is_era_refused(era, &error(code));
            assert_eq!((refused(Era::Sessions), refused(Era::Stateless)), (sessions, stateless), "{code}");
        }
    }
}
