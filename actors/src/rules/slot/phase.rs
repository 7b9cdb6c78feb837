//! Where an instance is in its life, and why it came there.

use std::time::{Duration, Instant};

use crate::model::event::{RestartReason, StopKind};
use crate::model::ids::Run;

/// What a person wants of an instance. A stop always wins, and only a start undoes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Want {
    /// To be there when called.
    Running,
    /// To stay down, whoever calls.
    Stopped,
}

/// Why a run is started: what it is announced as when it is ready.
#[derive(Debug, Clone, PartialEq)]
pub enum Why {
    /// For the first time.
    First,
    /// Again.
    Again {
        /// After what.
        reason: RestartReason,
        /// The process before.
        old_pid: Option<u32>,
        /// Unwanted exits in the window; 0 after a person's request.
        attempt: usize,
    },
    /// The connection to a remote server is made anew.
    Reconnect {
        /// Its number in the schedule; 0 for one that no failure has brought about.
        attempt: u32,
        /// A caller wanted it before its time, which was this: the schedule goes on if it fails.
        resume: Option<Instant>,
    },
    /// A call wakes it. The status stays `online`.
    Wake {
        /// Asleep since then.
        since: Instant,
        /// The call came then.
        asked: Instant,
    },
}

/// Where an instance is in its life.
#[derive(Debug, Clone, PartialEq)]
pub enum Phase {
    /// A required value is missing.
    Unconfigured,
    /// Waits for a start permit.
    Queued {
        /// What for.
        why: Why,
        /// Whether the permit was asked for with a caller waiting.
        urgent: bool,
    },
    /// A worker is there; handshake and discovery.
    Starting {
        /// The incarnation.
        run: Run,
        /// What for.
        why: Why,
        /// When its permit was granted.
        since: Instant,
    },
    /// Takes calls.
    Ready {
        /// The incarnation.
        run: Run,
        /// When it came to this.
        since: Instant,
        /// When it is looked at whether anybody needs it; none if it never sleeps.
        look_at: Option<Instant>,
    },
    /// Nobody needs it: it takes no calls any more, and is being ended.
    FallingAsleep {
        /// The incarnation.
        run: Run,
        /// Since when.
        since: Instant,
        /// How long nobody had needed it then.
        idle: Duration,
    },
    /// The link is alive and its lists cannot be read, or are being read anew. Calls are tried on the link.
    Undiscovered {
        /// The incarnation.
        run: Run,
        /// What it was started for.
        why: Why,
        /// When it was started.
        since: Instant,
        /// Failed discoveries; 0 while the first one after a reconnect is under way.
        attempt: u32,
        /// The next one; none while one is under way.
        retry_at: Option<Instant>,
    },
    /// The remote server is not connected; it is tried again.
    Reconnecting {
        /// When.
        until: Instant,
        /// Which attempt that is.
        attempt: u32,
    },
    /// The remote server does not accept the credentials: nothing is tried until they change.
    Reauth,
    /// The remote server was tried as often as the policy says.
    Exhausted {
        /// How often.
        attempts: u32,
    },
    /// A restart's delay.
    Backoff {
        /// When it is over.
        until: Instant,
        /// What for.
        why: Why,
    },
    /// Asleep, its tools listed. The next call wakes it.
    Dormant {
        /// Since when.
        since: Instant,
        /// A call before this waits until then: it never shortens a restart's delay.
        not_before: Instant,
    },
    /// The run is being ended.
    Stopping {
        /// The incarnation.
        run: Run,
        /// Why, for the event.
        kind: StopKind,
        /// What comes after.
        then: Then,
    },
    /// Down until a person starts it.
    Stopped,
    /// Ended once too often.
    Failed,
    /// Removed, or the satellite is ending. Nothing comes after.
    Over,
}

/// What comes after a run was ended on request.
#[derive(Debug, Clone, PartialEq)]
pub enum Then {
    /// Stay down.
    Stop,
    /// Start again.
    Again(Why),
    /// Wait for the configuration to be completed.
    AwaitConfig,
    /// Nothing.
    Over,
}
