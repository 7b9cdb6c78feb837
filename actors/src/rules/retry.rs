//! Classification of failed exchanges with a remote server, and the decision whether a call may be repeated. Both
//! depend only on the kind of the failure.

use std::time::Duration;

use crate::model::backoff::listed_delay;
use crate::model::failure::{ExchangeFailure, FailureKind};
use crate::model::policy::RetryPolicy;

/// Class of a failure, which determines the status of the instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureClass {
    /// The server is unreachable: `offline`.
    Unreachable,
    /// The server has lost the session or changed to another protocol era: `offline` until a new session is
    /// established.
    Expired,
    /// The server rejects the credentials: `requires_reauth`.
    Unauthorized,
    /// The server could not process this one request.
    Busy,
    /// The server is reachable but answers incorrectly: `error`.
    Other,
}

/// Returns the class of a failure.
pub fn classify(kind: &FailureKind) -> FailureClass {
    match kind {
        FailureKind::Dns
        | FailureKind::Refused
        | FailureKind::ConnectTimeout(_)
        | FailureKind::Tls(_)
        | FailureKind::Broken(_)
        | FailureKind::HeaderTimeout(_)
        | FailureKind::Cut
        // Without a token no request can be sent. The token can be renewed later without a person.
        | FailureKind::NotRenewed(_)
        | FailureKind::Unhealthy(_) => FailureClass::Unreachable,
        FailureKind::SessionExpired { .. } | FailureKind::OtherEra(_) => FailureClass::Expired,
        FailureKind::Unauthorized { .. } | FailureKind::Forbidden { .. } | FailureKind::Ungranted { .. } => {
            FailureClass::Unauthorized
        }
        // Other requests may be within the granted scopes.
        FailureKind::Throttled { .. }
        | FailureKind::ServerError { .. }
        | FailureKind::InsufficientScope { .. }
        // The satellite is short of memory, not the server.
        | FailureKind::NoMemory => {
            FailureClass::Busy
        }
        // Errors of this request: malformed, too slow, too large, unsupported type or content. The next request may
        // succeed.
        FailureKind::Status { status: 400 | 408 | 413 | 414 | 415 | 422 | 431, .. } => FailureClass::Busy,
        FailureKind::Redirected { .. }
        | FailureKind::Status { .. }
        | FailureKind::NotMcp { .. }
        | FailureKind::TooLong(_)
        | FailureKind::ForeignEndpoint { .. }
        | FailureKind::BadAddress(_)
        | FailureKind::Flooded
        | FailureKind::UnsupportedTransport
        | FailureKind::Handshake(_)
        | FailureKind::Panicked(_) => FailureClass::Other,
    }
}

/// Returns true if the failure may also mean that the session has expired: a proxy can report that only by this status.
pub fn is_session_doubtful(kind: &FailureKind) -> bool {
    matches!(kind, FailureKind::Status { status: 400, .. })
}

// True if the same request may succeed a moment later.
fn is_transient(kind: &FailureKind) -> bool {
    match kind {
        FailureKind::Dns
        | FailureKind::Refused
        | FailureKind::ConnectTimeout(_)
        | FailureKind::Broken(_)
        | FailureKind::HeaderTimeout(_)
        | FailureKind::Cut => true,
        // Certificates and credentials do not change within seconds; the other kinds are answers of the server.
        FailureKind::Tls(_)
        | FailureKind::Unauthorized { .. }
        | FailureKind::Forbidden { .. }
        | FailureKind::Ungranted { .. }
        | FailureKind::InsufficientScope { .. }
        // The renewal of tokens has its own schedule.
        | FailureKind::NotRenewed(_)
        | FailureKind::SessionExpired { .. }
        | FailureKind::OtherEra(_)
        | FailureKind::Throttled { .. }
        | FailureKind::ServerError { .. }
        | FailureKind::Redirected { .. }
        | FailureKind::Status { .. }
        | FailureKind::NotMcp { .. }
        | FailureKind::TooLong(_)
        | FailureKind::NoMemory
        | FailureKind::ForeignEndpoint { .. }
        | FailureKind::BadAddress(_)
        | FailureKind::Flooded
        | FailureKind::UnsupportedTransport
        | FailureKind::Handshake(_)
        | FailureKind::Unhealthy(_)
        | FailureKind::Panicked(_) => false,
    }
}

/// Returns the delay before attempt number `attempts + 1` of a call that has failed `attempts` times and has the time
/// `left` until its deadline; `None` if it must not be repeated. A call that may have reached the server is repeated
/// only if it is `repeatable`.
pub fn retry_delay(
    policy: &RetryPolicy,
    failure: &ExchangeFailure,
    attempts: u32,
    repeatable: bool,
    left: Duration,
) -> Option<Duration> {
    let safe = !failure.sent || repeatable;
    if !safe || !is_transient(&failure.kind) || attempts >= policy.attempts_max {
        return None;
    }
    let delay = listed_delay(&policy.delays, attempts as usize);
    (delay < left).then_some(delay)
}

/// Returns true if the failure means that the server does not support the requested path or method.
pub fn is_unsupported(kind: &FailureKind) -> bool {
    matches!(
        kind,
        FailureKind::SessionExpired { status: 404, .. }
            | FailureKind::Status { status: 404 | 405, .. }
            | FailureKind::ServerError { status: 501, .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLENTY: Duration = Duration::from_secs(30);

    #[test]
    fn an_unsent_call_is_tried_three_times() {
        let policy = RetryPolicy::default();
        let refused = ExchangeFailure::unsent(FailureKind::Refused);
        let delays: Vec<_> = (1..=3).map(|attempts| retry_delay(&policy, &refused, attempts, false, PLENTY)).collect();
        assert_eq!(delays, [Some(Duration::from_millis(500)), Some(Duration::from_secs(1)), None]);
        let more = RetryPolicy { attempts_max: 5, ..policy };
        let last = retry_delay(&more, &refused, 4, false, PLENTY);
        assert_eq!(last, Some(Duration::from_secs(2)), "the last delay repeats");
    }

    #[test]
    fn a_call_that_may_have_been_executed_is_repeated_only_if_repeatable() {
        let policy = RetryPolicy::default();
        let cut = ExchangeFailure::sent(FailureKind::Cut);
        assert_eq!(retry_delay(&policy, &cut, 1, false, PLENTY), None);
        assert!(retry_delay(&policy, &cut, 1, true, PLENTY).is_some());
    }

    #[test]
    fn failures_that_a_retry_cannot_heal_are_not_repeated() {
        for kind in [
            FailureKind::Unauthorized { challenge: None },
            FailureKind::Forbidden { challenge: None },
            FailureKind::Ungranted { why: String::new() },
            FailureKind::InsufficientScope { scopes: String::new() },
            FailureKind::NotRenewed(String::new()),
            FailureKind::session_expired(404),
            FailureKind::Throttled { retry_after: None },
            FailureKind::ServerError { status: 500, retry_after: None },
            FailureKind::Tls("expired".to_owned()),
            FailureKind::from_status(404),
        ] {
            let failure = ExchangeFailure::unsent(kind);
            assert_eq!(retry_delay(&RetryPolicy::default(), &failure, 1, true, PLENTY), None, "{failure}");
        }
    }

    #[test]
    fn a_request_rejected_for_its_content_does_not_count_against_the_server() {
        for status in [400, 408, 413, 414, 415, 422, 431] {
            let refused = ExchangeFailure::sent(FailureKind::from_status(status));
            assert_eq!(classify(&refused.kind), FailureClass::Busy, "{status}");
            assert_eq!(is_session_doubtful(&refused.kind), status == 400, "{status}");
            assert_eq!(retry_delay(&RetryPolicy::default(), &refused, 1, true, PLENTY), None, "{status}");
        }
        assert_eq!(classify(&FailureKind::from_status(418)), FailureClass::Other);
    }

    #[test]
    fn no_call_is_repeated_after_its_deadline() {
        let refused = ExchangeFailure::unsent(FailureKind::Refused);
        let short = Duration::from_millis(500);
        assert_eq!(retry_delay(&RetryPolicy::default(), &refused, 1, false, short), None);
    }
}
