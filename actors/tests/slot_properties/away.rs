//! What the world knows of a remote server that is not connected, kept beside the slot and written down from the
//! specification: which attempt comes next and when, and whether other credentials must come first.

use std::time::{Duration, Instant};

use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::policy::ReconnectPolicy;

/// How a connection is lost, or not made.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Loss {
    Refused,
    Cut,
    Expired,
    Unauthorized,
    Forbidden,
    /// 429, and perhaps when to come back, in seconds.
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

    /// Whether its user is told `offline`; the others are `error`.
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

/// See above.
#[derive(Debug, Default)]
pub(crate) struct Away {
    /// The attempt of the schedule that comes next or is under way, and when it is due.
    pub(crate) next: Option<(u32, Instant)>,
    /// Somebody wants an attempt before its time.
    pub(crate) wanted: bool,
    /// Other credentials, a person or another configuration must come before anything is tried.
    pub(crate) needs_credentials: bool,
}

/// What a loss must come to.
#[derive(Debug, PartialEq)]
pub(crate) enum Expected {
    /// Another attempt, no earlier and no later than this.
    Attempt { number: u32, earliest: Instant, latest: Instant },
    /// None before somebody asks.
    GivenUp,
}

impl Away {
    /// An attempt for a caller that came before its time leaves the schedule as it is. Whatever else fails is followed by
    /// the next attempt, or the first if it was connected: 1 s, 2 s, 4 s … up to the cap, ten percent more or less.
    pub(crate) fn loses(&self, policy: &ReconnectPolicy, loss: Loss, now: Instant) -> Expected {
        let asked = match loss {
            Loss::Throttled(Some(seconds)) => now + Duration::from_secs(seconds),
            _ => now,
        };
        let number = match self.next {
            Some((number, due)) if due > now => {
                let at = due.max(asked);
                return Expected::Attempt { number, earliest: at, latest: at };
            }
            Some((number, _)) => number + 1,
            None => 1,
        };
        if policy.attempts_max.is_some_and(|most| number > most) {
            return Expected::GivenUp;
        }
        let delay = (1..number).fold(policy.backoff_min, |delay, _| (delay * 2).min(policy.backoff_max));
        let jitter = delay / 10;
        Expected::Attempt {
            number,
            earliest: (now + delay.saturating_sub(jitter)).max(asked),
            latest: (now + delay + jitter).max(asked),
        }
    }

    /// A success, a person or another configuration: the next loss is the first.
    pub(crate) fn begins_anew(&mut self) {
        *self = Self::default();
    }
}
