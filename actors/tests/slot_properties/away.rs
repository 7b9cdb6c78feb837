//! A model of the reconnect rules, written from the specification: which attempt comes next and when, and whether new
//! credentials are required first.

use std::time::{Duration, Instant};

use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::policy::ReconnectPolicy;

/// The failure of a connection or of an attempt to connect.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Loss {
    Refused,
    Cut,
    Expired,
    Unauthorized,
    Forbidden,
    /// HTTP 429 with an optional `Retry-After` in seconds.
    Throttled(Option<u64>),
    Unavailable,
    NotFound,
    Unhealthy,
    Panicked,
}

impl Loss {
    pub(crate) fn kind(self) -> FailureKind {
        match self {
            Self::Refused => FailureKind::Refused,
            Self::Cut => FailureKind::Cut,
            Self::Expired => FailureKind::session_expired(404),
            Self::Unauthorized => FailureKind::Unauthorized { challenge: None },
            Self::Forbidden => FailureKind::Forbidden { challenge: None },
            Self::Throttled(seconds) => FailureKind::Throttled { retry_after: seconds.map(Duration::from_secs) },
            Self::Unavailable => FailureKind::ServerError { status: 503, retry_after: None },
            Self::NotFound => FailureKind::from_status(404),
            Self::Unhealthy => FailureKind::Unhealthy(3),
            Self::Panicked => FailureKind::Panicked("a fault of ours".to_owned()),
        }
    }

    pub(crate) fn is_about_credentials(self) -> bool {
        matches!(self, Self::Unauthorized | Self::Forbidden)
    }

    /// Returns true if the status after the failure is `offline`. Otherwise it is `error`.
    pub(crate) fn is_offline(self, connected: bool) -> bool {
        match self {
            Self::Refused | Self::Cut | Self::Unhealthy => true,
            Self::Expired => connected,
            Self::Unauthorized
            | Self::Forbidden
            | Self::Throttled(_)
            | Self::Unavailable
            | Self::NotFound
            | Self::Panicked => false,
        }
    }
}

/// The reconnect state of a remote server that is not connected.
#[derive(Debug, Default)]
pub(crate) struct ReconnectModel {
    /// The number and the time of the scheduled attempt that comes next or is in progress.
    pub(crate) next: Option<(u32, Instant)>,
    /// True if a call or a command has requested an attempt before its time.
    pub(crate) attempt_requested: bool,
    /// True if no attempt may be made before new credentials, a command or another configuration.
    pub(crate) needs_credentials: bool,
}

/// The required reaction to a loss.
#[derive(Debug, PartialEq)]
pub(crate) enum ExpectedReaction {
    /// Another attempt between these times.
    Attempt { number: u32, earliest: Instant, latest: Instant },
    /// No attempt before a call or a command.
    GivenUp,
}

impl ReconnectModel {
    /// Returns the required reaction to a loss. A failed attempt for a caller before its time leaves the schedule
    /// unchanged. Every other failure is followed by the next attempt, or by the first after a connection: 1 s, 2 s, 4 s …
    /// up to the maximum, with ten percent of jitter.
    pub(crate) fn expected_after(&self, policy: &ReconnectPolicy, loss: Loss, now: Instant) -> ExpectedReaction {
        let asked = match loss {
            Loss::Throttled(Some(seconds)) => now + Duration::from_secs(seconds),
            _ => now,
        };
        let number = match self.next {
            Some((number, due)) if due > now => {
                let at = due.max(asked);
                return ExpectedReaction::Attempt { number, earliest: at, latest: at };
            }
            Some((number, _)) => number + 1,
            None => 1,
        };
        if policy.attempts_max.is_some_and(|most| number > most) {
            return ExpectedReaction::GivenUp;
        }
        let delay = (1..number).fold(policy.backoff_min, |delay, _| (delay * 2).min(policy.backoff_max));
        let jitter = delay / 10;
        ExpectedReaction::Attempt {
            number,
            earliest: (now + delay.saturating_sub(jitter)).max(asked),
            latest: (now + delay + jitter).max(asked),
        }
    }

    /// Resets the schedule after a success, a command or another configuration: the next loss is the first.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }
}
