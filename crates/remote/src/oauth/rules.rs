//! Decisions about renewals and errors, as pure functions of time and randomness.

use std::time::Duration;

use mcp_satellite_actors::model::backoff::Backoff;

// Longest time between a renewal and the expiry of the token.
const MARGIN_MAX: Duration = Duration::from_secs(5 * 60);
// Limits the rate of renewals for servers with very short lifetimes.
const LIFETIME_MIN: Duration = Duration::from_secs(1);

// Limits on the scopes that a server can request.
pub(super) const SCOPES_MAX: usize = 32;
const SCOPE_MAX: usize = 100;

// Backoff after failures of an authorization server.
pub(super) const BACKOFF: Backoff = Backoff::doubling(Duration::from_secs(1), Duration::from_secs(60));

/// Returns the age at which a token is renewed. The margin before its expiry is a fifth of the lifetime, at most
/// `MARGIN_MAX`. `chance` (0 to 1) shortens it by up to a half, so that grants of the same age are not renewed
/// together.
pub(super) fn renewal_age(lifetime: Duration, chance: f64) -> Duration {
    let lifetime = lifetime.max(LIFETIME_MIN);
    let margin = (lifetime / 5).min(MARGIN_MAX);
    lifetime.saturating_sub(margin) + margin.mul_f64(chance.clamp(0.0, 1.0) / 2.0)
}

/// Returns the remaining time until the renewal of a token of this age. If the clock was set back, the age is negative
/// and the token is renewed at once, which costs one request.
pub(super) fn time_until_renewal(renew_after: Duration, age: jiff::SignedDuration) -> Duration {
    Duration::try_from(age).map_or(Duration::ZERO, |age| renew_after.saturating_sub(age))
}

/// Returns true if a retry cannot succeed. Other OAuth errors are temporary.
pub(super) fn is_final(error: &str) -> bool {
    !matches!(
        error,
        "temporarily_unavailable"
            | "server_error"
            | "slow_down"
            | "authorization_pending"
            | "too_many_requests"
            | "rate_limit_exceeded"
    )
}

/// Parses scopes (RFC 6749, 3.3) and drops those that are too long, too many or rejected by `is_allowed`: they may be
/// arbitrary text of the server.
pub(super) fn parse_scopes(text: &str, is_allowed: impl Fn(&str) -> bool) -> Vec<String> {
    let is_scope = |scope: &&str| {
        scope.len() <= SCOPE_MAX
            && scope.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\'))
            && is_allowed(scope)
    };
    let scopes: Vec<_> = text.split_ascii_whitespace().filter(is_scope).take(SCOPES_MAX).map(str::to_owned).collect();
    union(&scopes)
}

/// Returns true if the scope can be part of a command line: a single word in every shell, and not an option.
pub fn is_safe_in_a_command(scope: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:/+-".contains(&byte);
    scope.bytes().all(is_plain) && scope.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
}

pub(super) fn union<'a>(scopes: impl IntoIterator<Item = &'a String>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for scope in scopes {
        if !all.contains(scope) {
            all.push(scope.clone());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_renewed_early_and_at_spread_times() {
        let after = |lifetime, chance| renewal_age(Duration::from_secs(lifetime), chance).as_millis();
        assert_eq!((after(3600, 0.0), after(3600, 1.0)), (3_300_000, 3_450_000));
        assert_eq!((after(10, 0.0), after(10, 1.0)), (8_000, 9_000));
        assert_eq!(after(0, 0.0), 800);
    }

    #[test]
    fn a_changed_clock_does_not_delay_the_renewal() {
        let after = Duration::from_secs(3300);
        let left = |age| time_until_renewal(after, jiff::SignedDuration::from_secs(age)).as_secs();
        assert_eq!([left(0), left(300), left(4000), left(-5)], [3300, 3000, 0, 0]);
    }

    #[test]
    fn the_backoff_doubles_up_to_a_minute() {
        let delays: Vec<_> = (1..=8).map(|failures| BACKOFF.delay(failures).as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(BACKOFF.delay(u32::MAX).as_secs(), 60);
    }

    #[test]
    fn only_temporary_errors_are_retried() {
        assert!(["invalid_grant", "invalid_client", "unauthorized_client"].into_iter().all(is_final));
        assert!(!["temporarily_unavailable", "server_error", "too_many_requests"].into_iter().any(is_final));
    }

    #[test]
    fn scopes_are_limited_and_only_safe_ones_are_used_in_commands() {
        let long = "x".repeat(101);
        let many: Vec<_> = (0..100).map(|number| format!("s{number}")).collect();
        assert_eq!(parse_scopes("a;b r:w \"q hush", |scope| scope != "hush"), ["a;b", "r:w"]);
        assert!(parse_scopes(&long, |_| true).is_empty());
        assert_eq!(parse_scopes(&many.join(" "), |_| true).len(), SCOPES_MAX);
        assert!(["read", "https://x.example.com/a-b_c.d", "user:email"].into_iter().all(is_safe_in_a_command));
        for unsafe_one in ["a;b", "x|y", "`id`", "$(id)", "a>b", "a*", "~", "-x", "", "a'b", "a&b", "{a,b}", "#a", "!a"]
        {
            assert!(!is_safe_in_a_command(unsafe_one), "{unsafe_one}");
        }
    }

    #[test]
    fn scopes_are_merged_in_order() {
        let scopes = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(union(scopes("b a").iter().chain(&scopes("a c"))), scopes("b a c"));
    }
}
