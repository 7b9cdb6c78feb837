//! What a failed exchange with a remote server means, and whether a call may be repeated. Decided by the kind of the
//! failure alone.

use std::time::Duration;

use crate::model::failure::{Failure, FailureKind};
use crate::model::policy::RetryPolicy;

/// A server may ask to be left alone; for no longer than this.
const PAUSE_MAX: Duration = Duration::from_secs(60 * 60);

/// What a failure says about the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// It is not there, or the way to it is broken: `offline`.
    Unreachable,
    /// It is there and has forgotten the session, or has become a server of another era: `offline` until there is another.
    Expired,
    /// It does not accept our credentials: `requires_reauth`.
    Unauthorized,
    /// It is there and could not serve this one request.
    Busy,
    /// It is there and not what it should be: `error`.
    Other,
}

/// The class of a failure.
pub fn class(kind: &FailureKind) -> Class {
    match kind {
        FailureKind::Dns
        | FailureKind::Refused
        | FailureKind::ConnectTimeout(_)
        | FailureKind::Tls(_)
        | FailureKind::Broken(_)
        | FailureKind::HeaderTimeout(_)
        | FailureKind::Cut
        // Without a token it cannot be asked; the token can be had again without anybody's doing.
        | FailureKind::NotRenewed(_)
        | FailureKind::Unhealthy(_) => Class::Unreachable,
        FailureKind::SessionExpired { .. } | FailureKind::OtherEra(_) => Class::Expired,
        FailureKind::Unauthorized { .. } | FailureKind::Forbidden { .. } | FailureKind::Ungranted { .. } => {
            Class::Unauthorized
        }
        // Others may be within what was granted.
        FailureKind::Throttled { .. }
        | FailureKind::ServerError { .. }
        | FailureKind::InsufficientScope { .. }
        // The memory is ours: it says nothing of the server.
        | FailureKind::NoMemory => {
            Class::Busy
        }
        // It is bad, came too slowly, is too large, has too long an address, the wrong type or content, too large a head:
        // that is this request, and says nothing about the next one.
        FailureKind::Status { status: 400 | 408 | 413 | 414 | 415 | 422 | 431, .. } => Class::Busy,
        FailureKind::Redirected { .. }
        | FailureKind::Status { .. }
        | FailureKind::NotMcp { .. }
        | FailureKind::TooLong(_)
        | FailureKind::ForeignEndpoint { .. }
        | FailureKind::BadAddress(_)
        | FailureKind::Flooded
        | FailureKind::Unserved
        | FailureKind::Handshake(_)
        | FailureKind::Panicked(_) => Class::Other,
    }
}

/// Whether this may also be said of a request because its session is not known any more: somebody between us and the
/// server has only the status to say that.
pub fn doubts_session(kind: &FailureKind) -> bool {
    matches!(kind, FailureKind::Status { status: 400, .. })
}

/// Whether the same request may succeed a moment later.
fn may_heal(kind: &FailureKind) -> bool {
    match kind {
        FailureKind::Dns
        | FailureKind::Refused
        | FailureKind::ConnectTimeout(_)
        | FailureKind::Broken(_)
        | FailureKind::HeaderTimeout(_)
        | FailureKind::Cut => true,
        // A certificate is not mended in a second, nor are credentials; the others are answers.
        FailureKind::Tls(_)
        | FailureKind::Unauthorized { .. }
        | FailureKind::Forbidden { .. }
        | FailureKind::Ungranted { .. }
        | FailureKind::InsufficientScope { .. }
        // Whoever renews it has a pace of its own.
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
        | FailureKind::Unserved
        | FailureKind::Handshake(_)
        | FailureKind::Unhealthy(_)
        | FailureKind::Panicked(_) => false,
    }
}

/// The delay before attempt number `attempts + 1` of a call that has failed `attempts` times and has this much time
/// left; `None` if there is none. What may have reached the server is repeated only where the tool says that this does
/// no harm.
pub fn again_after(
    policy: &RetryPolicy,
    failure: &Failure,
    attempts: u32,
    repeatable: bool,
    left: Duration,
) -> Option<Duration> {
    let safe = !failure.sent || repeatable;
    if !safe || !may_heal(&failure.kind) || attempts >= policy.attempts_max {
        return None;
    }
    let at = usize::try_from(attempts.saturating_sub(1)).unwrap_or(usize::MAX);
    let delay = policy.delays.get(at).or(policy.delays.last()).copied().unwrap_or_default();
    (delay < left).then_some(delay)
}

/// Whether a server says in this way that it does not know what it was asked for.
pub fn is_unknown(kind: &FailureKind) -> bool {
    matches!(
        kind,
        FailureKind::SessionExpired { status: 404, .. }
            | FailureKind::Status { status: 404 | 405, .. }
            | FailureKind::ServerError { status: 501, .. }
    )
}

/// How long a server asks to be left alone, as far as that is heeded.
pub fn asked_pause(kind: &FailureKind) -> Duration {
    match kind {
        FailureKind::Throttled { retry_after } | FailureKind::ServerError { retry_after, .. } => {
            retry_after.unwrap_or_default().min(PAUSE_MAX)
        }
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLENTY: Duration = Duration::from_secs(30);

    #[test]
    fn a_call_that_was_not_sent_is_tried_three_times() {
        let policy = RetryPolicy::default();
        let refused = Failure::unsent(FailureKind::Refused);
        let delays: Vec<_> = (1..=3).map(|attempts| again_after(&policy, &refused, attempts, false, PLENTY)).collect();
        assert_eq!(delays, [Some(Duration::from_millis(500)), Some(Duration::from_secs(1)), None]);
        let more = RetryPolicy { attempts_max: 5, ..policy };
        let last = again_after(&more, &refused, 4, false, PLENTY);
        assert_eq!(last, Some(Duration::from_secs(2)), "the last delay repeats");
    }

    #[test]
    fn what_may_have_reached_the_server_is_repeated_only_where_the_tool_says_so() {
        let policy = RetryPolicy::default();
        let cut = Failure::sent(FailureKind::Cut);
        assert_eq!(again_after(&policy, &cut, 1, false, PLENTY), None);
        assert!(again_after(&policy, &cut, 1, true, PLENTY).is_some());
    }

    #[test]
    fn what_does_not_heal_is_never_repeated() {
        for kind in [
            FailureKind::Unauthorized { challenge: None },
            FailureKind::Forbidden { challenge: None },
            FailureKind::Ungranted { why: String::new() },
            FailureKind::InsufficientScope { scopes: String::new() },
            FailureKind::NotRenewed(String::new()),
            FailureKind::expired(404),
            FailureKind::Throttled { retry_after: None },
            FailureKind::ServerError { status: 500, retry_after: None },
            FailureKind::Tls("expired".to_owned()),
            FailureKind::status(404),
        ] {
            let failure = Failure::unsent(kind);
            assert_eq!(again_after(&RetryPolicy::default(), &failure, 1, true, PLENTY), None, "{failure}");
        }
    }

    #[test]
    fn a_request_that_is_refused_for_what_it_is_says_nothing_about_its_server() {
        for status in [400, 408, 413, 414, 415, 422, 431] {
            let refused = Failure::sent(FailureKind::status(status));
            assert_eq!(class(&refused.kind), Class::Busy, "{status}");
            assert_eq!(doubts_session(&refused.kind), status == 400, "{status}");
            assert_eq!(again_after(&RetryPolicy::default(), &refused, 1, true, PLENTY), None, "{status}");
        }
        assert_eq!(class(&FailureKind::status(418)), Class::Other);
    }

    #[test]
    fn nothing_is_repeated_beyond_the_deadline() {
        let refused = Failure::unsent(FailureKind::Refused);
        let short = Duration::from_millis(500);
        assert_eq!(again_after(&RetryPolicy::default(), &refused, 1, false, short), None);
    }
}
