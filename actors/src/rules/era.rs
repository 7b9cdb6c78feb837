//! Which era a server is spoken to in, and what says that it is the wrong one.
//!
//! ```text
//!  configured ──────────────────────────▶ that one, and no other
//!  remembered as stateless ─▶ discover ───refused, silent──▶ initialize
//!  all others ──────────────▶ initialize ─refused──────────▶ discover (DISCOVER_WAIT_MAX)
//! ```
//!
//! `initialize` comes first where nothing is known, so that a server that works is not sent one message more for the
//! sake of those that need another. A server may be exchanged for one of the other era at any time: of a session it then
//! says what it says of sessions that it does not know, and the next handshake finds out.
//!
//! Without sessions none is lost: a stateless server is lost if it cannot be reached, if its credentials are refused, if it
//! fails (5xx) or leaves checks unanswered too often, and if it does not know `server/discover` any more, which each server
//! of this era does. An answer that breaks off is the loss of that answer: whether the server is there is found out at once.

use std::time::Duration;

use crate::model::era::{Era, STATELESS_VERSION};
use crate::model::exit::CallError;
use crate::model::failure::FailureKind;
use crate::rpc::member;

/// A server that left a question about the other era unanswered, or failed at it, is asked again after so long.
pub const DISCOVER_PAUSE: Duration = Duration::from_secs(60);
/// A server that has refused `initialize` is up, and is asked no longer than this what it is instead.
pub const DISCOVER_WAIT_MAX: Duration = Duration::from_secs(2);
/// How often a call may be answered with a request for input.
pub const INPUT_ROUNDS_MAX: u32 = 10;

const INVALID_REQUEST: i64 = -32600;
const METHOD_NOT_FOUND: i64 = -32601;
const INVALID_PARAMS: i64 = -32602;
/// Headers that are not those of the message.
pub const HEADER_MISMATCH: i64 = -32020;
const MISSING_CLIENT_CAPABILITY: i64 = -32021;
const UNSUPPORTED_VERSION: i64 = -32022;

/// In which era a server is spoken to first.
pub fn first(configured: Option<Era>, remembered: Option<Era>) -> Era {
    configured.or(remembered).unwrap_or(Era::Sessions)
}

/// How long it may take to answer the opening of an era, of what is left of the handshake's time. A server that is known
/// to be stateless may be one that only just starts; if it is not stateless any more, time is left to find that out.
pub fn patience(configured: Option<Era>, opening: Era, is_second: bool, left: Duration) -> Duration {
    match (configured, opening, is_second) {
        (Some(_), _, _) | (None, Era::Sessions, _) => left,
        (None, Era::Stateless, true) => left.min(DISCOVER_WAIT_MAX),
        (None, Era::Stateless, false) => left / 2,
    }
}

/// Whether a server that answers the opening of this era with this error may be of the other one.
pub fn may_be_other(opened: Era, error: &CallError) -> bool {
    let CallError::Server { code, .. } = error else { return false };
    match opened {
        // What it says is up to it: it knows no `initialize`, which also lacks what each request must have.
        Era::Sessions => {
            matches!(*code, INVALID_REQUEST | METHOD_NOT_FOUND | INVALID_PARAMS | MISSING_CLIENT_CAPABILITY)
                || is_of_stateless(*code)
        }
        // Servers with sessions answer what comes before `initialize` as they like.
        Era::Stateless => true,
    }
}

/// The same of an answer that is an HTTP status: the server is there, and this is not what it takes.
pub fn is_refusal(kind: &FailureKind) -> bool {
    matches!(kind, FailureKind::Status { status: 400 | 404 | 405 | 406 | 415 | 422, .. })
}

/// Whether a status may be how a stateless server refuses `initialize`: it says why, as JSON-RPC.
pub fn may_be_stateless(kind: &FailureKind) -> bool {
    matches!(kind, FailureKind::Status { status: 400 | 404, said: Some(_) })
}

/// Whether a server without sessions says this to a request of a session. One with sessions may mean something else by it.
pub fn is_of_stateless(code: i64) -> bool {
    matches!(code, HEADER_MISMATCH | UNSUPPORTED_VERSION)
}

/// Whether an error names the stateless version as one that its server speaks.
pub fn names_stateless(code: i64, data: Option<&str>) -> bool {
    let supported = || {
        let supported = member(data?, "supported")?;
        serde_json::from_str::<Vec<String>>(supported).ok()
    };
    code == UNSUPPORTED_VERSION
        && supported().is_some_and(|versions| versions.iter().any(|version| version == STATELESS_VERSION))
}

/// Whether a server that refuses a check like this is none of this era any more: it is asked what each server of its era
/// answers, and what has not been carried out whatever it says.
pub fn refuses_check(era: Era, error: &CallError) -> bool {
    let CallError::Server { code, .. } = error else { return false };
    match era {
        Era::Sessions => is_of_stateless(*code),
        Era::Stateless => {
            matches!(*code, INVALID_REQUEST | METHOD_NOT_FOUND | INVALID_PARAMS | UNSUPPORTED_VERSION)
        }
    }
}

/// The same of an answer that is an HTTP status: an address without `server/discover`, or a server that wants a session.
pub fn refuses_check_by_status(kind: &FailureKind) -> bool {
    matches!(kind, FailureKind::Status { status: 400 | 404 | 405, .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: i64) -> CallError {
        CallError::Server { code, message: String::new(), data: None }
    }

    #[test]
    fn initialize_comes_first_unless_something_else_is_known() {
        assert_eq!(first(None, None), Era::Sessions);
        assert_eq!(first(None, Some(Era::Stateless)), Era::Stateless);
        assert_eq!(first(Some(Era::Sessions), Some(Era::Stateless)), Era::Sessions);
        assert_eq!(first(Some(Era::Stateless), Some(Era::Sessions)), Era::Stateless);
    }

    #[test]
    fn a_discover_that_may_hang_leaves_time_for_the_other_opening() {
        let (left, half) = (Duration::from_secs(30), Duration::from_secs(15));
        assert_eq!(patience(None, Era::Sessions, false, left), left);
        assert_eq!(patience(None, Era::Sessions, true, half), half);
        assert_eq!(patience(None, Era::Stateless, false, left), half);
        assert_eq!(patience(None, Era::Stateless, true, left), DISCOVER_WAIT_MAX);
        assert_eq!(patience(None, Era::Stateless, true, Duration::from_secs(1)), Duration::from_secs(1));
        assert_eq!(patience(Some(Era::Stateless), Era::Stateless, false, left), left);
    }

    #[test]
    fn what_says_that_initialize_is_not_known_is_known_and_a_fault_is_not_taken_for_it() {
        for code in [-32600, -32601, -32602, -32020, -32021, -32022] {
            assert!(may_be_other(Era::Sessions, &error(code)), "{code}");
        }
        for code in [-32603, -32700, -32000, -32001, 1] {
            assert!(!may_be_other(Era::Sessions, &error(code)), "{code}");
            assert!(may_be_other(Era::Stateless, &error(code)), "{code}");
        }
        let said = Some("no".to_owned());
        for (kind, stateless, refusal) in [
            (FailureKind::Status { status: 400, said: said.clone() }, true, true),
            (FailureKind::Status { status: 404, said: said.clone() }, true, true),
            (FailureKind::status(404), false, true),
            (FailureKind::Status { status: 418, said }, false, false),
            (FailureKind::ServerError { status: 500, retry_after: None }, false, false),
            (FailureKind::Refused, false, false),
            (FailureKind::Unauthorized { challenge: None }, false, false),
        ] {
            assert_eq!((may_be_stateless(&kind), is_refusal(&kind)), (stateless, refusal), "{kind}");
        }
        let late = CallError::TimedOut { after: Duration::ZERO, fate: crate::model::exit::Fate::TimedOut };
        assert!(!may_be_other(Era::Stateless, &late));
    }

    #[test]
    fn an_error_of_a_tool_is_believed_only_if_it_names_the_version() {
        let data = |supported: &str| Some(format!(r#"{{"supported":{supported},"requested":"2025-11-25"}}"#));
        assert!(names_stateless(-32022, data(r#"["2026-07-28"]"#).as_deref()));
        for (code, data) in [
            (-32022, None),
            (-32022, data(r#"["2025-11-25"]"#)),
            (-32022, data("7")),
            (-32020, data(r#"["2026-07-28"]"#)),
        ] {
            assert!(!names_stateless(code, data.as_deref()), "{code} {data:?}");
        }
    }

    #[test]
    fn a_check_that_fails_is_not_one_that_is_not_known() {
        for (code, sessions, stateless) in [
            (-32601, false, true),
            (-32602, false, true),
            (-32600, false, true),
            (-32022, true, true),
            (-32020, true, false),
            (-32603, false, false),
            (-32000, false, false),
        ] {
            let refused = |era| refuses_check(era, &error(code));
            assert_eq!((refused(Era::Sessions), refused(Era::Stateless)), (sessions, stateless), "{code}");
        }
    }
}
