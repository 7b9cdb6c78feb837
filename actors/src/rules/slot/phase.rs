//! Phases of the life of an instance, and the reasons of its starts.

use std::time::{Duration, Instant};

use crate::model::event::{RestartReason, StopKind};
use crate::model::ids::RunNumber;

/// State of an instance requested by a person. A stop takes precedence over every other request; only a start ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RequestedState {
    /// Available for calls.
    Running,
    /// Stopped, regardless of calls.
    Stopped,
}

/// Reasons for the start of a run. They determine the event emitted when the run is ready.
#[derive(Debug, Clone, PartialEq)]
pub enum StartReason {
    /// First start.
    First,
    /// Restart of a process.
    Restart {
        /// Cause of the restart.
        reason: RestartReason,
        /// Process ID of the run before.
        old_pid: Option<u32>,
        /// Number of unwanted exits in the window; 0 after a request of a person.
        attempt: usize,
    },
    /// New connection to a remote server.
    Reconnect {
        /// Number of the attempt in its schedule; 0 if it does not follow a failure.
        attempt: u32,
        /// Scheduled time of an attempt that a caller triggered earlier. The schedule continues if the attempt fails.
        resume: Option<Instant>,
    },
    /// Continuation of the session with a server that an earlier satellite started. It is not queued: the server runs.
    Adopt,
    /// Wake by a call. The status stays `online`.
    Wake {
        /// Start of the sleep.
        since: Instant,
        /// Time of the call.
        called_at: Instant,
    },
}

/// Phase of the life of an instance.
#[derive(Debug, Clone, PartialEq)]
pub enum SlotPhase {
    /// The instance has a run.
    Up {
        /// Current run.
        run: RunNumber,
        /// State of the run.
        state: RunState,
    },
    /// The instance has no run.
    Down(DownState),
}

/// State of the current run of an instance.
#[derive(Debug, Clone, PartialEq)]
pub enum RunState {
    /// A worker runs; handshake and discovery are in progress.
    Starting {
        /// Reason of the start.
        why: StartReason,
        /// Time at which the permit was granted.
        since: Instant,
    },
    /// The run accepts calls.
    Ready {
        /// Time at which the run became ready.
        since: Instant,
        /// Time of the next check whether the server is idle; `None` if it never sleeps.
        idle_check_at: Option<Instant>,
    },
    /// The server is idle: the run accepts no more calls and is being ended.
    FallingAsleep {
        /// Start of this state.
        since: Instant,
        /// Idle time before this state.
        idle: Duration,
    },
    /// The connection works, but the lists cannot be read or are being read again. Calls are accepted.
    Undiscovered {
        /// Reason of the start.
        why: StartReason,
        /// Time at which the permit was granted.
        since: Instant,
        /// Number of failed discoveries; 0 during the first one after a reconnection.
        attempt: u32,
        /// Time of the next discovery; `None` while one is in progress.
        retry_at: Option<Instant>,
    },
    /// The run is being ended.
    Stopping {
        /// Reason of the stop, for the event.
        kind: StopKind,
        /// Action after the end.
        then: AfterStop,
    },
}

/// State of an instance without a run.
#[derive(Debug, Clone, PartialEq)]
pub enum DownState {
    /// A required value is missing.
    Unconfigured,
    /// The instance waits for a start permit.
    Queued {
        /// Reason of the start.
        why: StartReason,
        /// True if the permit was requested with a waiting caller.
        urgent: bool,
    },
    /// The remote server is not connected and will be retried.
    Reconnecting {
        /// Time of the next attempt.
        until: Instant,
        /// Number of the next attempt.
        attempt: u32,
    },
    /// The remote server rejects the credentials. The connection is not retried until they change.
    Reauth,
    /// The attempts of the policy to connect to the remote server are exhausted.
    Exhausted {
        /// Number of failed attempts.
        attempts: u32,
    },
    /// The delay of a restart is running.
    Backoff {
        /// End of the delay.
        until: Instant,
        /// Reason of the start.
        why: StartReason,
    },
    /// The instance sleeps, with its tools listed. The next call wakes it.
    Dormant {
        /// Start of the sleep.
        since: Instant,
        /// Earliest start after a call: a call does not shorten the delay of a restart.
        not_before: Instant,
    },
    /// The instance is stopped until a person starts it.
    Stopped,
    /// The restart budget is exhausted.
    Failed,
    /// The instance is removed, or the satellite is shutting down. No other state follows.
    Ended,
}

impl SlotPhase {
    /// Returns the reason of a start that is requested or in progress.
    pub(super) fn start_reason(&self) -> Option<&StartReason> {
        match self {
            Self::Up { state: RunState::Starting { why, .. }, .. }
            | Self::Down(DownState::Queued { why, .. } | DownState::Backoff { why, .. }) => Some(why),
            Self::Up { .. } | Self::Down(_) => None,
        }
    }
}

/// Action after the requested end of a run.
#[derive(Debug, Clone, PartialEq)]
pub enum AfterStop {
    /// Stay stopped.
    Stop,
    /// Start again.
    StartAgain(StartReason),
    /// Wait for the configuration to be completed.
    AwaitConfig,
    /// Remove the instance.
    End,
}
