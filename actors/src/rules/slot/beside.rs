//! Second run beside the one that accepts calls, for a rolling update: the new run is ready before the old one ends.
//!
//! ```text
//!            Granted               Discovered: calls move over
//!  Queued ─────────────▶ Starting ─────────────────────────────▶ Leaving (the old run, while its calls finish)
//!    ▲                      │
//!    └── the next update ── Leaving (the new run: it failed to start, or is no longer needed)
//! ```
//!
//! `Queued` and `Starting` exist only beside the phase `Ready`. `Leaving` may exist beside any phase and changes no
//! decision, but a stop, a removal and a shutdown wait for its end. Only a rolling update drains a run; every other
//! request ends the second run at once.
//!
//! If the new run does not start, the old one stays. The failure is charged to the team, not to the instance, and the
//! slot keeps the refused specification and the reason for the next decision of a person.

use std::sync::Arc;
use std::time::Instant;

use super::{Effect, Phase, Refusal, Slot, Then, Told, Why};
use crate::model::catalogue::Catalogue;
use crate::model::event::{RestartReason, StopKind};
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::ids::Run;
use crate::model::remote::{Health, ServerInfo};
use crate::model::spec::InstanceSpec;
use crate::model::status::Cause;

/// Second run of an instance during a rolling update.
#[derive(Debug, Clone, PartialEq)]
pub enum Beside {
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
        run: Run,
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
    Leaving {
        /// Number of the run.
        run: Run,
        /// Reason of the stop, for the event.
        kind: StopKind,
        /// Time until which its calls may finish; `None` if the run was already stopped.
        drain_until: Option<Instant>,
        /// Specification to start beside the current run after the end of this one.
        next: Option<Arc<InstanceSpec>>,
    },
}

impl Beside {
    /// Returns the number of the second run, if it exists.
    pub fn run(&self) -> Option<Run> {
        match self {
            Self::Queued { .. } | Self::Postponed { .. } => None,
            Self::Starting { run, .. } | Self::Leaving { run, .. } => Some(*run),
        }
    }

    fn next(&self) -> Option<&Arc<InstanceSpec>> {
        match self {
            Self::Queued { spec } | Self::Postponed { spec, .. } | Self::Starting { spec, .. } => Some(spec),
            Self::Leaving { next, .. } => next.as_ref(),
        }
    }
}

impl Slot {
    // Starts the new configuration beside the run that accepts calls. If the configuration is that of the current run,
    // a pending update is cancelled.
    pub(super) fn roll(&mut self, spec: Arc<InstanceSpec>, out: &mut Vec<Effect>) {
        self.refused = None;
        let next = (*spec != *self.spec).then_some(spec);
        let message = next.is_some().then(|| "its new configuration is on its way beside the old one".to_owned());
        self.beside = match (self.beside.take(), next) {
            (None, Some(spec)) => {
                out.push(Effect::RequestPermit { urgent: false });
                Some(Beside::Queued { spec })
            }
            (Some(Beside::Queued { .. }), Some(spec)) => Some(Beside::Queued { spec }),
            (Some(Beside::Queued { .. }), None) => {
                out.push(Effect::WithdrawPermit);
                None
            }
            (Some(Beside::Postponed { until, .. }), next) => next.map(|spec| Beside::Postponed { spec, until }),
            (Some(Beside::Starting { run, .. }), next) => Some(leave(run, next, out)),
            // The calls of the run before finish first: there are at most two runs.
            (Some(Beside::Leaving { run, kind, drain_until, .. }), next) => {
                Some(Beside::Leaving { run, kind, drain_until, next })
            }
            (None, None) => None,
        };
        self.remark(message, out);
    }

    /// Applies a configuration that the run in preparation can adopt. Returns whether there is such a run.
    pub(super) fn adopt_beside(&mut self, new: &Arc<InstanceSpec>, out: &mut Vec<Effect>) -> bool {
        let starting = match &self.beside {
            Some(Beside::Starting { run, .. }) => Some(*run),
            _ => None,
        };
        let next = match &mut self.beside {
            Some(
                Beside::Queued { spec }
                | Beside::Postponed { spec, .. }
                | Beside::Starting { spec, .. }
                | Beside::Leaving { next: Some(spec), .. },
            ) => spec,
            Some(Beside::Leaving { next: None, .. }) | None => return false,
        };
        if **next == **new || !next.can_go_on_as(new) {
            return false;
        }
        *next = new.clone();
        if let Some(run) = starting {
            out.push(Effect::Adopt { run, spec: new.clone() });
        }
        true
    }

    pub(super) fn on_granted_beside(&mut self, now: Instant, run: Run, out: &mut Vec<Effect>) {
        let Some(Beside::Queued { spec }) = &self.beside else {
            // A permit granted while its request was withdrawn is released.
            out.push(Effect::ReleasePermit(run));
            return;
        };
        let spec = spec.clone();
        self.hold_permit(now, run, spec.policy.session.permit_hold_max, out);
        out.push(Effect::Spawn { run, spec: spec.clone(), discover: true });
        self.beside = Some(Beside::Starting { run, spec, since: now, pid: None, initialized_at: None });
    }

    pub(super) fn on_spawned_beside(&mut self, run: Run, its_pid: Option<u32>) {
        if let Some(Beside::Starting { run: its, pid, .. }) = &mut self.beside
            && *its == run
        {
            *pid = its_pid;
        }
    }

    pub(super) fn on_initialized_beside(&mut self, now: Instant, run: Run, server: &Arc<ServerInfo>) {
        if let Some(Beside::Starting { run: its, initialized_at, .. }) = &mut self.beside
            && *its == run
        {
            *initialized_at = Some(now);
            self.server_beside = Some(server.clone());
        }
    }

    // The second run, which has completed its handshake, becomes the current one.
    fn greeted_beside(&mut self) {
        let server = self.server_beside.take();
        self.introduced(server);
        self.health = Health::Healthy;
    }

    // The new run is ready: calls move over to it, and the old run drains.
    pub(super) fn on_discovered_beside(
        &mut self,
        now: Instant,
        run: Run,
        catalogue: Arc<Catalogue>,
        out: &mut Vec<Effect>,
    ) {
        let (old, Some(Beside::Starting { run: its, spec, pid, initialized_at, .. })) = (self.open_run(), &self.beside)
        else {
            return;
        };
        let (Some(old), true) = (old, *its == run) else { return };
        let (spec, old_pid) = (spec.clone(), std::mem::replace(&mut self.pid, *pid));
        self.initialized_at = *initialized_at;
        // The calls of the old run keep the drain timeout of the old policy.
        let drain_until = Some(now + self.spec.policy.session.drain_timeout);
        self.beside = Some(Beside::Leaving { run: old, kind: StopKind::Config, drain_until, next: None });
        self.spec = spec;
        self.greeted_beside();
        self.history.clear();
        self.machine_faults = 0;
        self.restarts += 1;
        self.learn(catalogue, out);
        self.opens(now, run);
        out.push(Effect::Drain(old));
        self.remark(None, out);
        out.push(Effect::Tell(Told::Restarted { reason: RestartReason::Config, old_pid, attempt: 0 }));
        out.push(Effect::Admit(run));
    }

    pub(super) fn on_discovery_failed_beside(&mut self, run: Run, reason: &str, out: &mut Vec<Effect>) {
        if let Some(Beside::Starting { run: its, spec, .. }) = &self.beside
            && *its == run
        {
            let spec = spec.clone();
            self.beside = Some(leave(run, None, out));
            self.refuses(spec, format!("cannot read its tools: {reason}"), out);
        }
    }

    pub(super) fn on_ended_beside(&mut self, now: Instant, run: Run, exit: WorkerExit, out: &mut Vec<Effect>) {
        match self.beside.take_if(|beside| beside.run() == Some(run)) {
            Some(Beside::Starting { spec, .. }) if matches!(exit.cause, ExitCause::Machine(_)) => {
                let (delay, message) = self.machine_fault(&exit);
                self.beside = Some(Beside::Postponed { spec, until: now + delay });
                self.remark(Some(message), out);
            }
            Some(Beside::Starting { spec, .. }) => {
                let reason = exit.reason();
                // Charged to the team, but not to the instance, whose current run continues.
                out.push(Effect::ChargeTeam);
                out.push(Effect::Tell(if exit.is_crash() {
                    Told::Crashed { exit, count: 1, will_restart: false }
                } else {
                    Told::Exited { exit, will_restart: false }
                }));
                self.refuses(spec, reason, out);
            }
            Some(Beside::Leaving { kind, next, .. }) => {
                // A removal is reported once, after the end of its last run.
                if self.removal.is_none() {
                    out.push(Effect::Tell(Told::Stopped { kind, exit }));
                }
                if let Some(spec) = next {
                    out.push(Effect::RequestPermit { urgent: false });
                    self.beside = Some(Beside::Queued { spec });
                }
            }
            Some(Beside::Queued { .. } | Beside::Postponed { .. }) | None => {}
        }
    }

    // The old run continues with the old configuration, and the new one is not retried automatically.
    fn refuses(&mut self, spec: Arc<InstanceSpec>, reason: String, out: &mut Vec<Effect>) {
        out.push(Effect::Tell(Told::NotTaken { reason: reason.clone() }));
        self.last_error = Some(reason.clone());
        self.refused = Some(Refusal { spec, reason });
        self.remark(self.refusal(), out);
    }

    // The current run ended without a request during a rolling update: the new configuration is started instead.
    pub(super) fn succeeds(&mut self, now: Instant, exit: &WorkerExit, old_pid: Option<u32>, out: &mut Vec<Effect>) {
        let Some(beside) = self.beside.take() else { return };
        let Some(spec) = beside.next().cloned() else {
            self.beside = Some(beside);
            return;
        };
        let (crash, reason) = (exit.is_crash(), exit.reason());
        // The exit under the old configuration is charged to the team; the history of the instance is cleared.
        let policy = &self.spec.policy.restart;
        let _ = self.history.charge(policy, now, crash, exit.ran.unwrap_or_default());
        let (count, exit) = (self.history.in_window(policy, now), exit.clone());
        out.push(Effect::ChargeTeam);
        out.push(Effect::Tell(if crash {
            self.last_error = Some(reason.clone());
            Told::Crashed { exit, count, will_restart: true }
        } else {
            Told::Exited { exit, will_restart: true }
        }));
        self.takes_on(spec);
        let message = format!("starting with its new configuration; under the old one it ended: {reason}");
        self.moves(Cause::Ended, Some(message), out);
        let why = Why::Again { reason: RestartReason::Config, old_pid, attempt: 0 };
        match beside {
            // The permit is already requested.
            Beside::Queued { .. } => self.phase = Phase::Queued { why, urgent: false },
            Beside::Postponed { .. } => self.queue(why, out),
            Beside::Starting { run, since, pid, initialized_at, .. } => {
                self.restarts += 1;
                self.pid = pid;
                self.initialized_at = initialized_at;
                self.phase = Phase::Starting { run, why, since };
                if initialized_at.is_some() {
                    self.greeted_beside();
                    self.moves(Cause::Initialized, None, out);
                }
            }
            Beside::Leaving { run, kind, drain_until, .. } => {
                self.beside = Some(Beside::Leaving { run, kind, drain_until, next: None });
                self.queue(why, out);
            }
        }
    }

    /// Returns the second run if it accepts no more calls.
    pub fn leaving(&self) -> Option<Run> {
        match self.beside {
            Some(Beside::Leaving { run, .. }) => Some(run),
            Some(Beside::Queued { .. } | Beside::Postponed { .. } | Beside::Starting { .. }) | None => None,
        }
    }

    // True if a new configuration is pending or starting beside the current run.
    pub(super) fn has_successor(&self) -> bool {
        self.beside.as_ref().is_some_and(|beside| beside.next().is_some())
    }

    // A request of a person applies to the configured specification, even if it did not start or is still pending.
    pub(super) fn takes_what_is_configured(&mut self) {
        let waiting = self.beside.as_ref().and_then(Beside::next).cloned();
        if let Some(spec) = waiting.or_else(|| Some(self.refused.as_ref()?.spec.clone())) {
            self.takes_on(spec);
        }
    }

    pub(super) fn takes_on(&mut self, spec: Arc<InstanceSpec>) {
        // An instance that becomes remote, or stops being remote, starts for the first time again.
        self.was_ready &= !spec.is_remote() && !self.is_remote();
        self.spec = spec;
        self.server = None;
        self.era = None;
        self.refused = None;
        self.catalogue = None;
        self.recalled = false;
        self.history.clear();
    }

    // Ends the second run at once.
    pub(super) fn dismiss(&mut self, kind: StopKind, out: &mut Vec<Effect>) {
        match self.beside.take() {
            Some(Beside::Queued { .. }) => out.push(Effect::WithdrawPermit),
            Some(Beside::Starting { run, .. }) => {
                out.push(Effect::Stop(run));
                self.beside = Some(Beside::Leaving { run, kind, drain_until: None, next: None });
            }
            Some(Beside::Leaving { run, drain_until, .. }) => {
                if drain_until.is_some() {
                    out.push(Effect::Stop(run));
                }
                self.beside = Some(Beside::Leaving { run, kind, drain_until: None, next: None });
            }
            Some(Beside::Postponed { .. }) | None => {}
        }
    }

    // Without a current run: ends the second run and waits for it before `then`. Returns true if there is one.
    pub(super) fn lingers(&mut self, kind: StopKind, then: &Then, out: &mut Vec<Effect>) -> bool {
        self.dismiss(kind, out);
        let Some(run) = self.beside.take().and_then(|beside| beside.run()) else { return false };
        self.phase = Phase::Stopping { run, kind, then: then.clone() };
        true
    }

    // The drain timeout of the old run, or the delay of a postponed start, may be over.
    pub(super) fn on_tick_beside(&mut self, now: Instant, out: &mut Vec<Effect>) {
        if let Some(Beside::Leaving { run, drain_until, .. }) = &mut self.beside
            && drain_until.is_some_and(|until| now >= until)
        {
            *drain_until = None;
            out.push(Effect::Stop(*run));
        }
        if let Some(Beside::Postponed { spec, .. }) =
            self.beside.take_if(|beside| matches!(beside, Beside::Postponed { until, .. } if now >= *until))
        {
            out.push(Effect::RequestPermit { urgent: false });
            self.beside = Some(Beside::Queued { spec });
        }
    }

    // Changes the message of an unchanged status.
    pub(super) fn remark(&mut self, message: Option<String>, out: &mut Vec<Effect>) {
        if self.message != message {
            self.becomes(self.status, message, out);
        }
    }
}

fn leave(run: Run, next: Option<Arc<InstanceSpec>>, out: &mut Vec<Effect>) -> Beside {
    out.push(Effect::Stop(run));
    Beside::Leaving { run, kind: StopKind::Config, drain_until: None, next }
}
