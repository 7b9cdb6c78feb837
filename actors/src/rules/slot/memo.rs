//! State of an instance that outlives the supervisor of its team, and the part of it that outlives the satellite.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::{Down, DownState, RequestedState, RunState, Slot, SlotEffect, StartReason, Up};
use crate::model::catalogue::{Catalogue, Revisions};
use crate::model::era::Era;
use crate::model::event::RestartReason;
use crate::model::memo::{StoredDelay, StoredExit, StoredMemo, StoredSleep};
use crate::model::remote::ServerInfo;
use crate::model::spec::{InstanceSpec, ProcessLifetime};
use crate::model::status::{Status, StatusCause};
use crate::rules::jitter::JitterRng;
use crate::rules::restart::{self, ExitHistory};

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
    record: SlotRecord,
    stopped: bool,
    failed: Option<String>,
    dormant: Option<(Instant, Instant)>,
    not_before: Option<Instant>,
    // A remote instance without a connection, with its status and message.
    disconnected: Option<(DownState, Status, Option<String>)>,
    // Time of the restoration, until a supervisor has used this memo.
    restored_at: Option<Instant>,
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
        let may_sleep = !spec.is_remote() && spec.missing.is_empty() && catalogue.is_some();
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

impl Slot {
    /// Recreates an instance whose supervisor panicked, or one of an earlier satellite. Its state is kept, and a run
    /// that existed is started again. The state of an earlier satellite is reported anew.
    pub fn from_memo(spec: Arc<InstanceSpec>, rng: JitterRng, memo: &SlotMemo) -> (Self, Vec<SlotEffect>) {
        let mut slot = Self::blank(spec, rng);
        slot.record = memo.record.clone();
        let mut out = Vec::new();
        if memo.restored_at.is_some() && slot.spec.missing.is_empty() {
            out.push(SlotEffect::Status { status: Status::Provisioning, message: None, remedy: None });
        }
        slot.report_disconnected(memo.stopped, &mut out);
        if memo.stopped {
            slot.requested_state = RequestedState::Stopped;
            if slot.spec.missing.is_empty() {
                slot.enter_stopped(&mut out);
            } else {
                slot.await_config(&mut out);
            }
        } else if !slot.spec.missing.is_empty() {
            slot.await_config(&mut out);
        } else if let Some(message) = memo.failed.as_ref().filter(|_| !slot.is_remote() || memo.restored_at.is_none()) {
            slot.phase = Down(DownState::Failed);
            slot.set_status(Status::PermanentlyFailed, Some(message.clone()), &mut out);
        } else if let Some((since, not_before)) = memo.dormant {
            slot.phase = Down(DownState::Dormant { since, not_before });
            if memo.restored_at.is_some() {
                slot.transition(StatusCause::Restored, None, &mut out);
            } else {
                slot.set_status(Status::Online, slot.update_rejection_message(), &mut out);
            }
        } else if let Some(restored_at) = memo.restored_at {
            slot.start_restored(memo, restored_at, &mut out);
        } else if let Some((state, status, message)) = memo.disconnected.as_ref().filter(|_| slot.is_remote()) {
            slot.set_status(*status, message.clone(), &mut out);
            slot.restore_disconnected(state.clone(), &mut out);
        } else {
            slot.set_status(Status::Connecting, Some("the team supervisor was restarted".to_owned()), &mut out);
            match memo.not_before {
                // The delay that was running stays in effect.
                Some(until) if !slot.is_remote() => {
                    let why = StartReason::Restart { reason: RestartReason::Crash, old_pid: None, attempt: 0 };
                    slot.phase = Down(DownState::Backoff { until, why });
                }
                _ => slot.start_again(RestartReason::Crash, None, &mut out),
            }
        }
        (slot, out)
    }

    // Starts an instance of an earlier satellite, after the rest of its delay.
    fn start_restored(&mut self, memo: &SlotMemo, restored_at: Instant, out: &mut Vec<SlotEffect>) {
        let Some(until) = memo.not_before.filter(|_| !self.is_remote()) else {
            self.accept(out);
            return;
        };
        let attempt = self.record.history.exits().count();
        let left = restart::format_seconds(until.saturating_duration_since(restored_at));
        let message =
            format!("restarting in {left} (attempt {attempt}); the delay began before the satellite was restarted");
        self.transition(StatusCause::Accepted, Some(message), out);
        let why = StartReason::Restart { reason: RestartReason::Crash, old_pid: None, attempt };
        self.phase = Down(DownState::Backoff { until, why });
    }

    /// Returns the state that outlives the supervisor.
    pub fn memo(&self) -> SlotMemo {
        SlotMemo {
            record: self.record.clone(),
            stopped: self.requested_state == RequestedState::Stopped,
            failed: matches!(self.phase, Down(DownState::Failed)).then(|| self.message.clone().unwrap_or_default()),
            // An interrupted wake does not count: its caller calls again.
            dormant: match (&self.phase, self.phase.start_reason()) {
                (Down(DownState::Dormant { since, not_before }), _) => Some((*since, *not_before)),
                (Down(DownState::Backoff { until, .. }), Some(StartReason::Wake { since, .. })) => {
                    Some((*since, *until))
                }
                (Up { state: RunState::FallingAsleep { since, .. }, .. }, _)
                | (_, Some(StartReason::Wake { since, .. })) => Some((*since, *since)),
                _ => None,
            },
            not_before: match self.phase {
                // A start that the machine could not execute is repeated from the beginning.
                Down(DownState::Backoff { why: StartReason::First, .. }) => None,
                Down(DownState::Backoff { until, .. }) => Some(until),
                Up { .. } | Down(_) => None,
            },
            disconnected: self.disconnected_state().map(|state| (state, self.status, self.message.clone())),
            restored_at: None,
        }
    }
}
