//! State of an instance that outlives the supervisor of its team, and the part of it that outlives the satellite.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::DownState;
use crate::model::catalogue::{Catalogue, Revisions};
use crate::model::era::Era;
use crate::model::ids::RunNumber;
use crate::model::memo::{StoredDelay, StoredExit, StoredMemo, StoredSleep};
use crate::model::remote::ServerInfo;
use crate::model::spec::{InstanceSpec, ProcessLifetime};
use crate::model::status::Status;
use crate::rules::restart::ExitHistory;

/// Part of the state of an instance that the next supervisor of its team takes over, whatever the phase.
#[derive(Debug, Clone, Default)]
pub struct SlotRecord {
    /// Catalogue as last read; kept over restarts and sleep.
    pub catalogue: Option<Arc<Catalogue>>,
    /// Total number of restarts, after an unwanted exit or on request.
    pub restarts: u64,
    /// Reason of the last exit.
    pub last_exit: Option<String>,
    /// The last failure; `None` once the instance is healthy again.
    pub last_error: Option<String>,
    /// Self-description of the server from its last handshake.
    pub server: Option<Arc<ServerInfo>>,
    /// Protocol era of the next first request, if it is not the default.
    pub era: Option<Era>,
    /// Counters of changes of the catalogue.
    pub revisions: Revisions,
    /// Unwanted exits.
    pub history: ExitHistory,
    // Value of `revisions` at the last report of a closed connection.
    pub(super) reported_revisions: Revisions,
    pub(super) was_ready: bool,
    pub(super) rejected_update: Option<RejectedUpdate>,
    // True if the catalogue is from an earlier satellite. It is read again as soon as a run is ready.
    pub(super) catalogue_restored: bool,
    // Number of failures and last error of a degradation that was reported, until the recovery is reported.
    pub(super) degraded: Option<(u32, String)>,
    // True if the connection was reported as established, and not yet as closed.
    pub(super) reported_connected: bool,
    // Connection attempts since the last established connection, the current one included.
    pub(super) attempts: u32,
}

// A new configuration that did not start beside the old one.
#[derive(Debug, Clone)]
pub(super) struct RejectedUpdate {
    pub(super) spec: Arc<InstanceSpec>,
    pub(super) reason: String,
}

/// State of an instance that outlives the supervisor of its team. The supervisor sends it to Root at each change,
/// because ractor returns no state after a panic.
#[derive(Debug, Clone, Default)]
pub struct SlotMemo {
    pub(super) record: SlotRecord,
    pub(super) stopped: bool,
    pub(super) failed: Option<String>,
    pub(super) dormant: Option<(Instant, Instant)>,
    pub(super) not_before: Option<Instant>,
    // A remote instance without a connection, with its status and message.
    pub(super) disconnected: Option<(DownState, Status, Option<String>)>,
    // Run that takes over the running server of an earlier satellite.
    pub(super) adoption: Option<RunNumber>,
    // Time of the restoration, until a supervisor has used this memo.
    pub(super) restored_at: Option<Instant>,
}

impl SlotMemo {
    /// Restores an instance that is new to this satellite from its stored state under the same configuration, and from
    /// its catalogue if known. With a catalogue it sleeps if it did before, or if it is `lazy`.
    pub fn from_stored(
        spec: &InstanceSpec,
        stored: &StoredMemo,
        catalogue: Option<Arc<Catalogue>>,
        now: Instant,
        wall: Timestamp,
    ) -> Self {
        let ago = |at: Timestamp| now.checked_sub(duration_between(at, wall)).unwrap_or(now);
        let left = stored.delayed.as_ref().map(|delay| duration_between(delay.from.max(wall), delay.until));
        let not_before = left.filter(|left| !left.is_zero()).map(|left| now + left);
        let since = stored.dormant.as_ref().map(|asleep| ago(asleep.since));
        let may_sleep = !spec.is_remote() && spec.is_complete() && catalogue.is_some();
        let since = match spec.lifetime {
            ProcessLifetime::Lazy => Some(since.unwrap_or(now)),
            ProcessLifetime::Listed => since,
            ProcessLifetime::AlwaysOn => None,
        };
        let dormant = since.filter(|_| may_sleep).map(|since| (since, not_before.unwrap_or(now)));
        Self {
            stopped: stored.stopped,
            failed: stored.failed.clone(),
            dormant,
            not_before,
            record: SlotRecord {
                history: ExitHistory::from_exits(
                    stored.exits.iter().map(|exit| (ago(exit.at), exit.crash)),
                    stored.quick,
                ),
                catalogue: catalogue.filter(|_| dormant.is_some()),
                restarts: stored.restarts,
                was_ready: dormant.is_some(),
                last_exit: stored.last_exit.clone(),
                last_error: stored.last_error.clone(),
                era: stored.era,
                catalogue_restored: dormant.is_some(),
                ..SlotRecord::default()
            },
            restored_at: Some(now),
            ..Self::default()
        }
    }

    /// Returns true if the instance was running under an earlier satellite, so that its server may be adopted.
    pub fn may_adopt(spec: &InstanceSpec, stored: Option<&StoredMemo>) -> bool {
        let is_at_rest = |stored: &StoredMemo| stored.stopped || stored.failed.is_some() || stored.dormant.is_some();
        !spec.is_remote() && spec.is_complete() && !stored.is_some_and(is_at_rest)
    }

    /// Makes a restored instance take over the server of an earlier satellite in this run. Its lists are read again,
    /// because it may have announced changes to nobody.
    #[must_use]
    pub fn with_adoption(mut self, run: Option<RunNumber>) -> Self {
        if run.is_some() {
            (self.adoption, self.dormant, self.not_before) = (run, None, None);
            self.record.catalogue = None;
            (self.record.was_ready, self.record.catalogue_restored) = (true, false);
        }
        self
    }

    /// Returns the part that outlives the satellite. `now` and `wall` must be the same moment.
    pub fn to_stored(&self, now: Instant, wall: Timestamp) -> StoredMemo {
        let ago = |at: Instant| wall.checked_sub(now.saturating_duration_since(at)).unwrap_or(wall);
        let until = |at: Instant| wall.checked_add(at.saturating_duration_since(now)).unwrap_or(wall);
        let not_before = self.dormant.map(|(_, not_before)| not_before).or(self.not_before);
        StoredMemo {
            config: None,
            stopped: self.stopped,
            failed: self.failed.clone(),
            dormant: self.dormant.map(|(since, _)| StoredSleep { since: ago(since) }),
            delayed: not_before.filter(|at| *at > now).map(|at| StoredDelay { from: wall, until: until(at) }),
            exits: self.record.history.exits().map(|(at, crash)| StoredExit { at: ago(at), crash }).collect(),
            quick: self.record.history.quick_exits(),
            restarts: self.record.restarts,
            last_exit: self.record.last_exit.clone(),
            last_error: self.record.last_error.clone(),
            era: self.record.era,
        }
    }

    /// Returns true if the stored part does not differ from that of `before`.
    pub fn has_same_stored_state(&self, before: &Self) -> bool {
        self.stopped == before.stopped
            && self.failed == before.failed
            && self.dormant == before.dormant
            && self.not_before == before.not_before
            && self.record.history == before.record.history
            && self.record.restarts == before.record.restarts
            && self.record.last_exit == before.record.last_exit
            && self.record.last_error == before.record.last_error
            && self.record.era == before.record.era
    }

    /// Marks the instance as permanently failed, because an input to it makes its supervisor panic.
    pub fn mark_failed(&mut self, message: String) {
        *self = Self {
            failed: Some(message),
            dormant: None,
            not_before: None,
            disconnected: None,
            adoption: None,
            restored_at: None,
            ..self.clone()
        };
    }

    /// Returns true if the instance sleeps, or will sleep when its supervisor is back.
    pub fn is_dormant(&self) -> bool {
        self.dormant.is_some()
    }

    /// Returns true if this configuration failed to start beside a run that accepts calls, so that it can be tried
    /// there again.
    pub fn can_retry(&self, spec: &InstanceSpec) -> bool {
        self.dormant.is_none() && self.record.rejected_update.as_ref().is_some_and(|refused| *refused.spec == *spec)
    }
}

// Zero if the wall clock was set back in between.
fn duration_between(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from)).unwrap_or_default()
}
