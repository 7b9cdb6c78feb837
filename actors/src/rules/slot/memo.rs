//! State of an instance that outlives the supervisor of its team, and the part of it that outlives the satellite.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::remote::DisconnectedState;
use super::{Down, DownState, RejectedUpdate, RequestedState, RunState, Slot, SlotEffect, StartReason, Up};
use crate::model::catalogue::{Catalogue, Revisions};
use crate::model::era::Era;
use crate::model::event::RestartReason;
use crate::model::memo::{StoredDelay, StoredExit, StoredMemo, StoredSleep};
use crate::model::remote::ServerInfo;
use crate::model::spec::{InstanceSpec, ProcessLifetime};
use crate::model::status::{Status, StatusCause};
use crate::rules::jitter::JitterRng;
use crate::rules::restart::{self, ExitHistory};

/// State of an instance that outlives the supervisor of its team. The supervisor sends it to Root at each change,
/// because ractor returns no state after a panic.
#[derive(Debug, Clone, Default)]
pub struct SlotMemo {
    pub(super) stopped: bool,
    pub(super) failed: Option<String>,
    pub(super) dormant: Option<(Instant, Instant)>,
    pub(super) not_before: Option<Instant>,
    pub(super) history: ExitHistory,
    pub(super) catalogue: Option<Arc<Catalogue>>,
    pub(super) restarts: u64,
    pub(super) was_ready: bool,
    pub(super) last_exit: Option<String>,
    pub(super) last_error: Option<String>,
    pub(super) rejected_update: Option<RejectedUpdate>,
    pub(super) disconnected: Option<(DisconnectedState, Status, Option<String>)>,
    pub(super) server: Option<Arc<ServerInfo>>,
    pub(super) era: Option<Era>,
    pub(super) degraded: Option<(u32, String)>,
    pub(super) reported_connected: bool,
    pub(super) revisions: Revisions,
    pub(super) reported_revisions: Revisions,
    pub(super) attempts: u32,
    // True if the catalogue is from an earlier satellite and has not been read since.
    pub(super) catalogue_restored: bool,
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
            history: ExitHistory::from_exits(stored.exits.iter().map(|exit| (ago(exit.at), exit.crash)), stored.quick),
            catalogue: catalogue.filter(|_| dormant.is_some()),
            restarts: stored.restarts,
            was_ready: dormant.is_some(),
            last_exit: stored.last_exit.clone(),
            last_error: stored.last_error.clone(),
            era: stored.era,
            catalogue_restored: dormant.is_some(),
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
            exits: self.history.exits().map(|(at, crash)| StoredExit { at: ago(at), crash }).collect(),
            quick: self.history.quick_exits(),
            restarts: self.restarts,
            last_exit: self.last_exit.clone(),
            last_error: self.last_error.clone(),
            era: self.era,
        }
    }

    /// Returns true if the stored part does not differ from that of `before`.
    pub fn has_same_stored_state(&self, before: &Self) -> bool {
        self.stopped == before.stopped
            && self.failed == before.failed
            && self.dormant == before.dormant
            && self.not_before == before.not_before
            && self.history == before.history
            && self.restarts == before.restarts
            && self.last_exit == before.last_exit
            && self.last_error == before.last_error
            && self.era == before.era
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
        self.dormant.is_none() && self.rejected_update.as_ref().is_some_and(|refused| *refused.spec == *spec)
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
        slot.history = memo.history.clone();
        slot.catalogue.clone_from(&memo.catalogue);
        slot.restarts = memo.restarts;
        slot.was_ready = memo.was_ready;
        slot.last_exit.clone_from(&memo.last_exit);
        slot.last_error.clone_from(&memo.last_error);
        slot.rejected_update.clone_from(&memo.rejected_update);
        slot.catalogue_restored = memo.catalogue_restored;
        slot.server.clone_from(&memo.server);
        slot.era = memo.era;
        slot.degraded.clone_from(&memo.degraded);
        slot.reported_connected = memo.reported_connected;
        slot.attempts = memo.attempts;
        slot.revisions = memo.revisions;
        slot.reported_revisions = memo.reported_revisions;
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
            slot.restore_disconnected(state, &mut out);
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
        let attempt = self.history.exits().count();
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
            history: self.history.clone(),
            catalogue: self.catalogue.clone(),
            restarts: self.restarts,
            was_ready: self.was_ready,
            last_exit: self.last_exit.clone(),
            last_error: self.last_error.clone(),
            rejected_update: self.rejected_update.clone(),
            disconnected: self.disconnected_state().map(|state| (state, self.status, self.message.clone())),
            server: self.server.clone(),
            era: self.era,
            degraded: self.degraded.clone(),
            reported_connected: self.reported_connected,
            attempts: self.attempts,
            revisions: self.revisions,
            reported_revisions: self.reported_revisions,
            catalogue_restored: self.catalogue_restored,
            restored_at: None,
        }
    }
}
