//! Second run beside the one that accepts calls, for a rolling update: the new run is ready before the old one ends.
//!
//! ```text
//!            Granted               Discovered: calls move over
//!  Queued ─────────────▶ Starting ─────────────────────────────▶ Ending (the old run, while its calls finish)
//!    ▲                      │
//!    └── the next update ── Ending (the new run: it failed to start, or is no longer needed)
//! ```
//!
//! `Queued` and `Starting` exist only beside a current run in the state `Ready`. `Ending` may exist beside any phase and
//! changes no decision, but a stop, a removal and a shutdown wait for its end. Only a rolling update drains a run; every
//! other request ends the second run at once.
//!
//! If the new run does not start, the old one stays. The failure is charged to the team, not to the instance, and the
//! slot keeps the refused specification and the reason for the next decision of a person.

use std::sync::Arc;
use std::time::Instant;

use super::{AfterStop, Down, DownState, RejectedUpdate, RunState, Slot, SlotEffect, SlotEvent, StartReason, Up};
use crate::model::catalogue::Catalogue;
use crate::model::event::{RestartReason, StopKind};
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::ids::RunNumber;
use crate::model::remote::{ServerHealth, ServerInfo};
use crate::model::spec::InstanceSpec;
use crate::model::status::StatusCause;

/// Second run of an instance during a rolling update.
#[derive(Debug, Clone, PartialEq)]
pub enum SecondRun {
    /// The new run waits for a start permit.
    Queued {
        /// New specification.
        spec: Arc<InstanceSpec>,
    },
    /// The machine could not start the new run; a permit is requested again after a delay.
    Postponed {
        /// New specification.
        spec: Arc<InstanceSpec>,
        /// End of the delay.
        until: Instant,
    },
    /// The new run is starting.
    Starting {
        /// Number of the run.
        run: RunNumber,
        /// New specification.
        spec: Arc<InstanceSpec>,
        /// Time at which the permit was granted.
        since: Instant,
        /// Process ID of the run.
        pid: Option<u32>,
        /// Time at which the run was initialized.
        initialized_at: Option<Instant>,
    },
    /// A run that accepts no more calls and is ending.
    Ending {
        /// Number of the run.
        run: RunNumber,
        /// Reason of the stop, for the event.
        kind: StopKind,
        /// Time until which its calls may finish; `None` if the run was already stopped.
        drain_until: Option<Instant>,
        /// Specification to start beside the current run after the end of this one.
        next: Option<Arc<InstanceSpec>>,
    },
}

impl SecondRun {
    /// Returns the number of the second run, if it exists.
    pub fn run(&self) -> Option<RunNumber> {
        match self {
            Self::Queued { .. } | Self::Postponed { .. } => None,
            Self::Starting { run, .. } | Self::Ending { run, .. } => Some(*run),
        }
    }

    fn next_spec(&self) -> Option<&Arc<InstanceSpec>> {
        match self {
            Self::Queued { spec } | Self::Postponed { spec, .. } | Self::Starting { spec, .. } => Some(spec),
            Self::Ending { next, .. } => next.as_ref(),
        }
    }
}

impl Slot {
    // Starts the new configuration beside the run that accepts calls. If the configuration is that of the current run,
    // a pending update is cancelled.
    pub(super) fn begin_rolling_update(&mut self, spec: Arc<InstanceSpec>, out: &mut Vec<SlotEffect>) {
        self.record.rejected_update = None;
        let next = (*spec != *self.spec).then_some(spec);
        let message = next.is_some().then(|| "starting the new configuration beside the old one".to_owned());
        self.second_run = match (self.second_run.take(), next) {
            (None, Some(spec)) => {
                out.push(SlotEffect::RequestPermit { urgent: false });
                Some(SecondRun::Queued { spec })
            }
            (Some(SecondRun::Queued { .. }), Some(spec)) => Some(SecondRun::Queued { spec }),
            (Some(SecondRun::Queued { .. }), None) => {
                out.push(SlotEffect::WithdrawPermit);
                None
            }
            (Some(SecondRun::Postponed { until, .. }), next) => next.map(|spec| SecondRun::Postponed { spec, until }),
            (Some(SecondRun::Starting { run, .. }), next) => Some(stop_second_run(run, next, out)),
            // The calls of the run before finish first: there are at most two runs.
            (Some(SecondRun::Ending { run, kind, drain_until, .. }), next) => {
                Some(SecondRun::Ending { run, kind, drain_until, next })
            }
            (None, None) => None,
        };
        self.set_message(message, out);
    }

    /// Applies a configuration that the run in preparation can continue under. Returns whether there is such a run.
    pub(super) fn apply_in_second_run(&mut self, new: &Arc<InstanceSpec>, out: &mut Vec<SlotEffect>) -> bool {
        let starting = match &self.second_run {
            Some(SecondRun::Starting { run, .. }) => Some(*run),
            _ => None,
        };
        let next = match &mut self.second_run {
            Some(
                SecondRun::Queued { spec }
                | SecondRun::Postponed { spec, .. }
                | SecondRun::Starting { spec, .. }
                | SecondRun::Ending { next: Some(spec), .. },
            ) => spec,
            Some(SecondRun::Ending { next: None, .. }) | None => return false,
        };
        if **next == **new || !next.can_continue_as(new) {
            return false;
        }
        *next = new.clone();
        if let Some(run) = starting {
            out.push(SlotEffect::ApplySpec { run, spec: new.clone() });
        }
        true
    }

    pub(super) fn on_second_run_granted(&mut self, now: Instant, run: RunNumber, out: &mut Vec<SlotEffect>) {
        let Some(SecondRun::Queued { spec }) = &self.second_run else {
            // A permit granted while its request was withdrawn is released.
            out.push(SlotEffect::ReleasePermit(run));
            return;
        };
        let spec = spec.clone();
        self.hold_permit(now, run, spec.policy.session.permit_hold_max, out);
        out.push(SlotEffect::Spawn { run, spec: spec.clone(), discover: true, adopts: false });
        self.second_run = Some(SecondRun::Starting { run, spec, since: now, pid: None, initialized_at: None });
    }

    pub(super) fn on_second_run_spawned(&mut self, new_pid: Option<u32>) {
        if let Some(SecondRun::Starting { pid, .. }) = &mut self.second_run {
            *pid = new_pid;
        }
    }

    pub(super) fn on_second_run_initialized(&mut self, now: Instant, server: Arc<ServerInfo>) {
        if let Some(SecondRun::Starting { initialized_at, .. }) = &mut self.second_run {
            *initialized_at = Some(now);
            self.second_server = Some(server);
        }
    }

    // The second run, which has completed its handshake, becomes the current one.
    fn promote_second_server(&mut self) {
        let server = self.second_server.take();
        self.set_server(server);
        self.health = ServerHealth::Healthy;
    }

    // The new run is ready: calls move over to it, and the old run drains.
    pub(super) fn on_second_run_discovered(
        &mut self,
        now: Instant,
        run: RunNumber,
        catalogue: Arc<Catalogue>,
        out: &mut Vec<SlotEffect>,
    ) {
        let (Some(old), Some(SecondRun::Starting { spec, pid, initialized_at, .. })) =
            (self.open_run(), &self.second_run)
        else {
            return;
        };
        let (spec, old_pid) = (spec.clone(), std::mem::replace(&mut self.pid, *pid));
        self.initialized_at = *initialized_at;
        // The calls of the old run keep the drain timeout of the old policy.
        let drain_until = Some(now + self.spec.policy.session.drain_timeout);
        self.second_run = Some(SecondRun::Ending { run: old, kind: StopKind::Config, drain_until, next: None });
        self.spec = spec;
        self.promote_second_server();
        self.record.history.clear();
        self.machine_faults = 0;
        self.record.restarts += 1;
        self.set_catalogue(catalogue, out);
        self.enter_ready(now, run);
        out.push(SlotEffect::Drain(old));
        self.set_message(None, out);
        out.push(SlotEffect::Emit(SlotEvent::Restarted { reason: RestartReason::Config, old_pid, attempt: 0 }));
        out.push(SlotEffect::Admit(run));
    }

    pub(super) fn on_second_run_discovery_failed(&mut self, run: RunNumber, reason: &str, out: &mut Vec<SlotEffect>) {
        if let Some(SecondRun::Starting { spec, .. }) = &self.second_run {
            let spec = spec.clone();
            self.second_run = Some(stop_second_run(run, None, out));
            self.reject_update(spec, format!("cannot read the server's tools: {reason}"), out);
        }
    }

    pub(super) fn on_second_run_ended(&mut self, now: Instant, exit: WorkerExit, out: &mut Vec<SlotEffect>) {
        match self.second_run.take() {
            Some(SecondRun::Starting { spec, .. }) if matches!(exit.cause, ExitCause::Machine(_)) => {
                let (delay, message) = self.record_machine_fault(&exit);
                self.second_run = Some(SecondRun::Postponed { spec, until: now + delay });
                self.set_message(Some(message), out);
            }
            Some(SecondRun::Starting { spec, .. }) => {
                let reason = exit.reason();
                // Charged to the team, but not to the instance, whose current run continues.
                out.push(SlotEffect::ChargeTeam);
                out.push(SlotEffect::Emit(if exit.is_crash() {
                    SlotEvent::Crashed { exit, count: 1, will_restart: false }
                } else {
                    SlotEvent::Exited { exit, will_restart: false }
                }));
                self.reject_update(spec, reason, out);
            }
            Some(SecondRun::Ending { kind, next, .. }) => {
                // A removal is reported once, after the end of its last run.
                if self.removal.is_none() {
                    out.push(SlotEffect::Emit(SlotEvent::Stopped { kind, exit }));
                }
                if let Some(spec) = next {
                    out.push(SlotEffect::RequestPermit { urgent: false });
                    self.second_run = Some(SecondRun::Queued { spec });
                }
            }
            Some(SecondRun::Queued { .. } | SecondRun::Postponed { .. }) | None => {}
        }
    }

    // The old run continues with the old configuration, and the new one is not retried automatically.
    fn reject_update(&mut self, spec: Arc<InstanceSpec>, reason: String, out: &mut Vec<SlotEffect>) {
        out.push(SlotEffect::Emit(SlotEvent::UpdateRejected { reason: reason.clone() }));
        self.record.last_error = Some(reason.clone());
        self.record.rejected_update = Some(RejectedUpdate { spec, reason });
        self.set_message(self.update_rejection_message(), out);
    }

    // The current run ended without a request during a rolling update: the new configuration is started instead.
    pub(super) fn replace_with_successor(
        &mut self,
        now: Instant,
        exit: &WorkerExit,
        old_pid: Option<u32>,
        out: &mut Vec<SlotEffect>,
    ) {
        let Some(second) = self.second_run.take() else { return };
        let Some(spec) = second.next_spec().cloned() else {
            self.second_run = Some(second);
            return;
        };
        let (crash, reason) = (exit.is_crash(), exit.reason());
        // The exit under the old configuration is charged to the team; the history of the instance is cleared.
        let policy = &self.spec.policy.restart;
        let _ = self.record.history.charge(policy, now, crash, exit.uptime.unwrap_or_default());
        let (count, exit) = (self.record.history.exits_in_window(policy, now), exit.clone());
        out.push(SlotEffect::ChargeTeam);
        out.push(SlotEffect::Emit(if crash {
            self.record.last_error = Some(reason.clone());
            SlotEvent::Crashed { exit, count, will_restart: true }
        } else {
            SlotEvent::Exited { exit, will_restart: true }
        }));
        self.replace_spec(spec);
        let message = format!("starting with the new configuration; the run with the old one ended: {reason}");
        self.transition(StatusCause::Ended, Some(message), out);
        let why = StartReason::Restart { reason: RestartReason::Config, old_pid, attempt: 0 };
        match second {
            // The permit is already requested.
            SecondRun::Queued { .. } => self.phase = Down(DownState::Queued { why, urgent: false }),
            SecondRun::Postponed { .. } => self.queue_start(why, out),
            SecondRun::Starting { run, since, pid, initialized_at, .. } => {
                self.record.restarts += 1;
                self.pid = pid;
                self.initialized_at = initialized_at;
                self.phase = Up { run, state: RunState::Starting { why, since } };
                if initialized_at.is_some() {
                    self.promote_second_server();
                    self.transition(StatusCause::Initialized, None, out);
                }
            }
            SecondRun::Ending { run, kind, drain_until, .. } => {
                self.second_run = Some(SecondRun::Ending { run, kind, drain_until, next: None });
                self.queue_start(why, out);
            }
        }
    }

    /// Returns the second run if it accepts no more calls.
    pub fn ending_run(&self) -> Option<RunNumber> {
        match self.second_run {
            Some(SecondRun::Ending { run, .. }) => Some(run),
            Some(SecondRun::Queued { .. } | SecondRun::Postponed { .. } | SecondRun::Starting { .. }) | None => None,
        }
    }

    // True if a new configuration is pending or starting beside the current run.
    pub(super) fn has_successor(&self) -> bool {
        self.second_run.as_ref().is_some_and(|second| second.next_spec().is_some())
    }

    // A request of a person applies to the configured specification, even if it did not start or is still pending.
    pub(super) fn adopt_pending_spec(&mut self) {
        let pending = self.second_run.as_ref().and_then(SecondRun::next_spec).cloned();
        if let Some(spec) = pending.or_else(|| Some(self.record.rejected_update.as_ref()?.spec.clone())) {
            self.replace_spec(spec);
        }
    }

    pub(super) fn replace_spec(&mut self, spec: Arc<InstanceSpec>) {
        // An instance that becomes remote, or stops being remote, starts for the first time again.
        self.record.was_ready &= !spec.is_remote() && !self.is_remote();
        self.spec = spec;
        self.record.server = None;
        self.record.era = None;
        self.record.rejected_update = None;
        self.record.catalogue = None;
        self.record.catalogue_restored = false;
        self.record.history.clear();
    }

    // Ends the second run at once.
    pub(super) fn end_second_run(&mut self, kind: StopKind, out: &mut Vec<SlotEffect>) {
        match self.second_run.take() {
            Some(SecondRun::Queued { .. }) => out.push(SlotEffect::WithdrawPermit),
            Some(SecondRun::Starting { run, .. }) => {
                out.push(SlotEffect::Stop(run));
                self.second_run = Some(SecondRun::Ending { run, kind, drain_until: None, next: None });
            }
            Some(SecondRun::Ending { run, drain_until, .. }) => {
                if drain_until.is_some() {
                    out.push(SlotEffect::Stop(run));
                }
                self.second_run = Some(SecondRun::Ending { run, kind, drain_until: None, next: None });
            }
            Some(SecondRun::Postponed { .. }) | None => {}
        }
    }

    // Without a current run: ends the second run and waits for it before `then`. Returns true if there is one.
    pub(super) fn wait_for_second_run(&mut self, kind: StopKind, then: &AfterStop, out: &mut Vec<SlotEffect>) -> bool {
        self.end_second_run(kind, out);
        let Some(run) = self.second_run.take().and_then(|second| second.run()) else { return false };
        self.phase = Up { run, state: RunState::Stopping { kind, then: then.clone() } };
        true
    }

    // The drain timeout of the old run, or the delay of a postponed start, may be over.
    pub(super) fn on_second_run_tick(&mut self, now: Instant, out: &mut Vec<SlotEffect>) {
        if let Some(SecondRun::Ending { run, drain_until, .. }) = &mut self.second_run
            && drain_until.is_some_and(|until| now >= until)
        {
            *drain_until = None;
            out.push(SlotEffect::Stop(*run));
        }
        if let Some(SecondRun::Postponed { spec, .. }) =
            self.second_run.take_if(|second| matches!(second, SecondRun::Postponed { until, .. } if now >= *until))
        {
            out.push(SlotEffect::RequestPermit { urgent: false });
            self.second_run = Some(SecondRun::Queued { spec });
        }
    }

    // Changes the message of an unchanged status.
    pub(super) fn set_message(&mut self, message: Option<String>, out: &mut Vec<SlotEffect>) {
        if self.message != message {
            self.set_status(self.status, message, out);
        }
    }
}

fn stop_second_run(run: RunNumber, next: Option<Arc<InstanceSpec>>, out: &mut Vec<SlotEffect>) -> SecondRun {
    out.push(SlotEffect::Stop(run));
    SecondRun::Ending { run, kind: StopKind::Config, drain_until: None, next }
}
