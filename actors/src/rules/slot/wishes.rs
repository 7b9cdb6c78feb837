//! Requests of people, configuration and callers: the effect of each in each phase.
//!
//! A stop wins over every other request, and only a person undoes it: by a start, or by a reconnect of a remote
//! instance. A call never shortens the delay of a restart; for a remote instance it makes an attempt at once.

use std::sync::Arc;
use std::time::Instant;

use super::{AfterStop, RequestedState, SecondRun, Slot, SlotEffect, SlotPhase, StartReason, ending, refuse_ending};
use crate::model::event::{RestartReason, StopKind};
use crate::model::remedy::Remedy;
use crate::model::spec::{InstanceSpec, ProcessLifetime, UpdateMethod};
use crate::model::status::{Status, StatusCause};

impl Slot {
    pub(super) fn on_start(&mut self, out: &mut Vec<SlotEffect>) {
        match &self.phase {
            SlotPhase::Stopped => {
                self.want = RequestedState::Running;
                self.history.clear();
                if self.spec.missing.is_empty() {
                    self.moves(StatusCause::Asked, Some("starting on request".to_owned()), out);
                    self.begin_again(RestartReason::Manual, None, out);
                } else {
                    self.await_config(out);
                }
            }
            // The old run is still ending; the start follows.
            SlotPhase::Stopping { then: AfterStop::Stop, .. } => {
                self.want = RequestedState::Running;
                self.history.clear();
                if self.spec.missing.is_empty() {
                    let again = self.anew(RestartReason::Manual, self.pid);
                    self.ends_in(AfterStop::Again(again));
                    self.moves(StatusCause::Asked, Some("starting again when the old run has ended".to_owned()), out);
                } else {
                    self.ends_in(AfterStop::AwaitConfig);
                    self.moves(StatusCause::ConfigMissing, Some(self.missing_message()), out);
                }
            }
            // The wanted state is running again; the start follows once the missing values are set.
            SlotPhase::Unconfigured | SlotPhase::Stopping { then: AfterStop::AwaitConfig, .. }
                if self.want == RequestedState::Stopped =>
            {
                self.want = RequestedState::Running;
                self.called = false;
                self.history.clear();
                self.remark(Some(self.missing_message()), out);
            }
            // A start does not end these phases: each has its own remedy.
            SlotPhase::Failed => out.push(self.denied("start", "it failed permanently", Some(Remedy::Restart))),
            SlotPhase::Unconfigured | SlotPhase::Stopping { then: AfterStop::AwaitConfig, .. } => {
                out.push(self.denied_unconfigured("start"));
            }
            SlotPhase::Reauth => {
                out.push(self.denied("start", "the server rejected the credentials", Some(Remedy::Authorize)));
            }
            SlotPhase::Exhausted { .. } => self.on_reconnect(out),
            SlotPhase::Stopping { then: AfterStop::Over, .. } => out.push(self.denied_removed("start")),
            // Already requested.
            SlotPhase::Queued { .. }
            | SlotPhase::Starting { .. }
            | SlotPhase::Ready { .. }
            | SlotPhase::FallingAsleep { .. }
            | SlotPhase::Undiscovered { .. }
            | SlotPhase::Reconnecting { .. }
            | SlotPhase::Backoff { .. }
            | SlotPhase::Dormant { .. }
            | SlotPhase::Stopping { .. }
            | SlotPhase::Over => {}
        }
    }

    pub(super) fn on_stop(&mut self, out: &mut Vec<SlotEffect>) {
        self.takes_what_is_configured();
        match &mut self.phase {
            SlotPhase::Queued { .. } => {
                out.push(SlotEffect::WithdrawPermit);
                self.stop_now(out);
            }
            SlotPhase::Reconnecting { .. }
            | SlotPhase::Reauth
            | SlotPhase::Exhausted { .. }
            | SlotPhase::Backoff { .. }
            | SlotPhase::Dormant { .. }
            | SlotPhase::Failed => {
                self.stop_now(out);
            }
            // The status still names the missing values, but setting them does not start the server.
            SlotPhase::Unconfigured | SlotPhase::Stopping { then: AfterStop::AwaitConfig, .. } => {
                self.want = RequestedState::Stopped;
                self.remark(Some(self.missing_message()), out);
            }
            SlotPhase::Starting { .. }
            | SlotPhase::Ready { .. }
            | SlotPhase::FallingAsleep { .. }
            | SlotPhase::Undiscovered { .. } => {
                self.want = RequestedState::Stopped;
                self.end_run(StopKind::Manual, AfterStop::Stop, out);
                self.moves(StatusCause::Stopped, Some("stopping".to_owned()), out);
                self.refuse(out);
            }
            // A stop wins over a restart, an update and a start that are still waiting for the old run to end.
            SlotPhase::Stopping { then, .. } if *then != AfterStop::Over => {
                *then = AfterStop::Stop;
                self.want = RequestedState::Stopped;
                self.moves(StatusCause::Stopped, Some("stopping".to_owned()), out);
                self.refuse(out);
            }
            // Already stopped, or ending permanently.
            SlotPhase::Stopping { .. } | SlotPhase::Stopped | SlotPhase::Over => {}
        }
    }

    fn stop_now(&mut self, out: &mut Vec<SlotEffect>) {
        self.want = RequestedState::Stopped;
        if self.lingers(StopKind::Manual, &AfterStop::Stop, out) {
            self.moves(StatusCause::Stopped, Some("stopping".to_owned()), out);
        } else {
            self.stopped(out);
        }
        self.refuse(out);
    }

    pub(super) fn on_restart(&mut self, out: &mut Vec<SlotEffect>) {
        self.takes_what_is_configured();
        match self.phase {
            SlotPhase::Starting { .. }
            | SlotPhase::Ready { .. }
            | SlotPhase::FallingAsleep { .. }
            | SlotPhase::Undiscovered { .. } => {
                self.history.clear();
                let again = StartReason::Again { reason: RestartReason::Manual, old_pid: self.pid, attempt: 0 };
                self.end_run(StopKind::Manual, AfterStop::Again(again), out);
                self.moves(StatusCause::Asked, Some("restarting on request".to_owned()), out);
            }
            // The requested permit of a wake is equally valid for a restart.
            SlotPhase::Queued { why: StartReason::Wake { .. }, .. }
            | SlotPhase::Backoff { .. }
            | SlotPhase::Dormant { .. }
            | SlotPhase::Failed => {
                self.dismiss(StopKind::Manual, out);
                self.history.clear();
                self.moves(StatusCause::Asked, Some("restarting on request".to_owned()), out);
                self.begin_again(RestartReason::Manual, None, out);
            }
            // Phases of a remote instance, for which `on_reconnect` is used.
            SlotPhase::Reconnecting { .. } | SlotPhase::Reauth | SlotPhase::Exhausted { .. } => {}
            // A start is already requested; only the exit history changes.
            SlotPhase::Queued { .. } | SlotPhase::Stopping { then: AfterStop::Again(_), .. } => self.history.clear(),
            SlotPhase::Stopped | SlotPhase::Stopping { then: AfterStop::Stop, .. } => {
                out.push(self.denied("restart", "it was stopped on request", Some(Remedy::Start)));
            }
            SlotPhase::Unconfigured | SlotPhase::Stopping { then: AfterStop::AwaitConfig, .. } => {
                out.push(self.denied_unconfigured("restart"));
            }
            SlotPhase::Stopping { then: AfterStop::Over, .. } | SlotPhase::Over => {
                out.push(self.denied_removed("restart"))
            }
        }
    }

    pub(super) fn denied_unconfigured(&self, verb: &str) -> SlotEffect {
        let why = format!("values of the user are missing: {}", self.spec.missing.join(", "));
        self.denied(verb, &why, Some(Remedy::Configure))
    }

    pub(super) fn denied_removed(&self, verb: &str) -> SlotEffect {
        self.denied(verb, "it is being removed", None)
    }

    pub(super) fn on_update(&mut self, now: Instant, spec: Arc<InstanceSpec>, out: &mut Vec<SlotEffect>) {
        if matches!(self.phase, SlotPhase::Over | SlotPhase::Stopping { then: AfterStop::Over, .. }) {
            return;
        }
        let takes_calls = matches!(self.phase, SlotPhase::Ready { .. });
        // This configuration did not start before. It is retried only beside a run of the old one, which continues if
        // it fails again. A supervisor that was restarted after a panic receives the update before that run is ready.
        if !takes_calls && self.refused.as_ref().is_some_and(|refused| *refused.spec == *spec) {
            return;
        }
        if self.goes_on_under(&spec) {
            self.adopt(now, &spec, out);
            return;
        }
        if takes_calls && self.adopt_beside(&spec, out) {
            return;
        }
        let complete = spec.missing.is_empty();
        let other_kind = spec.is_remote() != self.is_remote();
        let rolls = spec.on_update == UpdateMethod::Rolling && complete && !spec.is_remote() && !self.is_remote();
        if rolls && takes_calls {
            self.roll(spec, out);
            return;
        }
        self.takes_on(spec);
        self.dismiss(StopKind::Config, out);
        // Processes and connections have separate permits.
        if other_kind && complete && matches!(self.phase, SlotPhase::Queued { .. }) {
            out.push(SlotEffect::WithdrawPermit);
        }
        let again = self.anew(RestartReason::Config, self.pid);
        let then = if complete { AfterStop::Again(again) } else { AfterStop::AwaitConfig };
        match &self.phase {
            SlotPhase::Starting { .. }
            | SlotPhase::Ready { .. }
            | SlotPhase::FallingAsleep { .. }
            | SlotPhase::Undiscovered { .. } => {
                self.end_run(StopKind::Config, then, out);
                self.config_changed(out);
            }
            SlotPhase::Stopping { then: AfterStop::AwaitConfig, .. }
                if complete && self.want == RequestedState::Stopped =>
            {
                self.ends_in(AfterStop::Stop);
                self.moves(StatusCause::Stopped, Some("stopping".to_owned()), out);
            }
            SlotPhase::Stopping { then: AfterStop::Again(_) | AfterStop::AwaitConfig, .. } => {
                self.ends_in(then);
                self.config_changed(out);
            }
            SlotPhase::Unconfigured if complete && self.want == RequestedState::Stopped => self.stopped(out),
            SlotPhase::Unconfigured if complete => {
                self.moves(StatusCause::Configured, None, out);
                self.take(out);
            }
            SlotPhase::Unconfigured => self.moves(StatusCause::ConfigMissing, Some(self.missing_message()), out),
            SlotPhase::Queued { .. } if !complete => {
                out.push(SlotEffect::WithdrawPermit);
                self.await_config(out);
            }
            // The start follows with the new configuration.
            SlotPhase::Queued { why: StartReason::First, .. } if other_kind => self.queue(StartReason::First, out),
            SlotPhase::Queued { why: StartReason::First, .. } => {}
            SlotPhase::Queued { why: StartReason::Again { .. }, .. } if !other_kind => {}
            SlotPhase::Queued {
                why: StartReason::Again { .. } | StartReason::Wake { .. } | StartReason::Reconnect { .. },
                ..
            }
            | SlotPhase::Reconnecting { .. }
            | SlotPhase::Reauth
            | SlotPhase::Exhausted { .. }
            | SlotPhase::Backoff { .. }
            | SlotPhase::Dormant { .. }
            | SlotPhase::Failed => {
                if complete {
                    self.config_changed(out);
                    self.begin_again(RestartReason::Config, None, out);
                } else {
                    self.await_config(out);
                }
            }
            // The start follows when a person requests it or the missing values are set.
            SlotPhase::Stopped | SlotPhase::Stopping { .. } | SlotPhase::Over => {}
        }
    }

    // True if the current run, or the sleep, can continue under another configuration.
    fn goes_on_under(&self, spec: &InstanceSpec) -> bool {
        // A sleeping instance must start if the new configuration does not permit sleep.
        let wakes =
            spec.keep == ProcessLifetime::AlwaysOn && self.spec.keep != ProcessLifetime::AlwaysOn && self.sleeps_on();
        !wakes && self.spec.can_go_on_as(spec)
    }

    /// Applies a configuration without a restart. The history of the instance is kept.
    fn adopt(&mut self, now: Instant, spec: &InstanceSpec, out: &mut Vec<SlotEffect>) {
        let masks_more = spec.mask != self.spec.mask;
        // Responses to earlier requests may still contain secrets of the old configuration.
        let mask = spec.mask.replacing(&self.spec.mask);
        let spec = Arc::new(InstanceSpec { mask, ..spec.clone() });
        let before = std::mem::replace(&mut self.spec, spec.clone());
        // A rolling update to an earlier configuration, running or failed, is obsolete.
        let was_refused = self.refused.take().is_some();
        if self.has_successor() {
            self.roll(spec.clone(), out);
        } else if was_refused && (self.sleeps_on() || matches!(self.phase, SlotPhase::Ready { .. })) {
            self.remark(None, out);
        }
        // If only masked values changed, a run whose credentials were refused already had the new ones.
        let has_newer_credentials = self.is_remote() && !spec.has_credentials_of(&before);
        // A new OAuth token is not part of the specification, but of the mask.
        let has_newer_secrets = has_newer_credentials || (self.is_remote() && masks_more);
        match self.phase {
            SlotPhase::Starting { run, .. } | SlotPhase::Ready { run, .. } | SlotPhase::Undiscovered { run, .. } => {
                if has_newer_credentials {
                    self.newer_credentials = Some(now);
                }
                if let SlotPhase::Ready { run, since, .. } = self.phase
                    && (spec.keep != before.keep || spec.policy.idle != before.policy.idle)
                {
                    self.phase = SlotPhase::Ready { run, since, look_at: self.first_look(since) };
                }
                out.push(SlotEffect::Adopt { run, spec });
            }
            SlotPhase::Reauth if has_newer_secrets => {
                self.moves(StatusCause::CredentialsChanged, Some("the credentials have changed".to_owned()), out);
                self.attempt_now(0, None, out);
            }
            SlotPhase::Exhausted { .. } => {
                let what = if has_newer_credentials { "credentials have" } else { "configuration has" };
                self.moves(StatusCause::Attempt, Some(format!("the {what} changed")), out);
                self.attempt_now(0, None, out);
            }
            // The next run uses the new configuration.
            SlotPhase::Unconfigured
            | SlotPhase::Queued { .. }
            | SlotPhase::FallingAsleep { .. }
            | SlotPhase::Reconnecting { .. }
            | SlotPhase::Reauth
            | SlotPhase::Backoff { .. }
            | SlotPhase::Dormant { .. }
            | SlotPhase::Stopping { .. }
            | SlotPhase::Stopped
            | SlotPhase::Failed
            | SlotPhase::Over => {}
        }
    }

    fn ends_in(&mut self, next: AfterStop) {
        if let SlotPhase::Stopping { then, .. } = &mut self.phase {
            *then = next;
        }
    }

    // True if the instance sleeps, falls asleep or is being woken.
    fn sleeps_on(&self) -> bool {
        self.is_dormant() || matches!(self.phase, SlotPhase::FallingAsleep { .. })
    }

    fn config_changed(&mut self, out: &mut Vec<SlotEffect>) {
        if !self.spec.missing.is_empty() {
            self.moves(StatusCause::ConfigMissing, Some(self.missing_message()), out);
            self.refuse(out);
            return;
        }
        match self.status {
            // A required value was missing while the run ends, and is set again: the start follows the end.
            Status::AwaitingUserConfig => {
                self.moves(StatusCause::Configured, Some("starting again when the old run has ended".to_owned()), out);
            }
            Status::Provisioning => {}
            _ => self.moves(StatusCause::ConfigChanged, Some("the configuration changed".to_owned()), out),
        }
    }

    pub(super) fn on_end(&mut self, kind: StopKind, out: &mut Vec<SlotEffect>) {
        if kind == StopKind::Uninstall && self.phase != SlotPhase::Over && self.removal.is_none() {
            let beside = self.beside.as_ref().and_then(SecondRun::run);
            self.removal = Some((self.run().or(beside).is_some(), self.is_dormant()));
        }
        self.dismiss(kind, out);
        match &mut self.phase {
            SlotPhase::Starting { .. }
            | SlotPhase::Ready { .. }
            | SlotPhase::FallingAsleep { .. }
            | SlotPhase::Undiscovered { .. } => {
                self.end_run(kind, AfterStop::Over, out);
                self.moves(StatusCause::Stopped, Some(ending(kind).to_owned()), out);
            }
            SlotPhase::Stopping { then, kind: announced, .. } => {
                *then = AfterStop::Over;
                *announced = kind;
                self.moves(StatusCause::Stopped, Some(ending(kind).to_owned()), out);
            }
            SlotPhase::Queued { .. } => {
                out.push(SlotEffect::WithdrawPermit);
                self.over_when_alone(kind, out);
            }
            SlotPhase::Unconfigured
            | SlotPhase::Reconnecting { .. }
            | SlotPhase::Reauth
            | SlotPhase::Exhausted { .. }
            | SlotPhase::Backoff { .. }
            | SlotPhase::Dormant { .. }
            | SlotPhase::Stopped
            | SlotPhase::Failed => self.over_when_alone(kind, out),
            SlotPhase::Over => {}
        }
        out.push(refuse_ending(kind));
    }

    fn over_when_alone(&mut self, kind: StopKind, out: &mut Vec<SlotEffect>) {
        if self.is_remote() && kind == StopKind::Uninstall {
            self.told_connected = true;
            self.tell_disconnected(true, out);
        }
        if self.lingers(kind, &AfterStop::Over, out) {
            self.moves(StatusCause::Stopped, Some(ending(kind).to_owned()), out);
        } else {
            self.over(None, out);
        }
    }

    pub(super) fn on_call(&mut self, now: Instant, out: &mut Vec<SlotEffect>) {
        match &mut self.phase {
            // A call that is admitted at once does not set `called`, which would keep a lazy instance awake.
            SlotPhase::Ready { run, .. } | SlotPhase::Undiscovered { run, .. } => out.push(SlotEffect::Admit(*run)),
            SlotPhase::Dormant { since, not_before } => {
                self.called = true;
                let (since, not_before) = (*since, *not_before);
                let why = StartReason::Wake { since, asked: now };
                if now < not_before {
                    self.phase = SlotPhase::Backoff { until: not_before, why };
                } else {
                    self.queue(why, out);
                }
            }
            SlotPhase::Queued { urgent, .. } => {
                self.called = true;
                if !*urgent {
                    *urgent = true;
                    out.push(SlotEffect::RequestPermit { urgent: true });
                }
            }
            // The caller waits up to its own deadline. A call does not shorten the delay of a restart.
            SlotPhase::Starting { .. }
            | SlotPhase::Backoff { .. }
            | SlotPhase::Stopping { then: AfterStop::Again(_), .. } => {
                self.called = true;
            }
            // The attempt is made at once, and all callers that arrive meanwhile share it.
            SlotPhase::Reconnecting { until, attempt } => {
                self.called = true;
                let (until, attempt) = (*until, *attempt);
                self.attempt_now(attempt, Some(until), out);
            }
            SlotPhase::Exhausted { attempts } => {
                self.called = true;
                let attempts = *attempts;
                self.attempt_now(attempts, None, out);
            }
            // Too late for this run. It is ended quickly, so that it does not use up the time of the callers: those
            // that still wait afterwards call again and wake the next run.
            SlotPhase::FallingAsleep { run, .. } => {
                if !std::mem::replace(&mut self.called, true) {
                    out.push(SlotEffect::Hurry(*run));
                }
            }
            SlotPhase::Stopping { then: AfterStop::Over, kind, .. } => out.push(refuse_ending(*kind)),
            SlotPhase::Unconfigured
            | SlotPhase::Reauth
            | SlotPhase::Stopping { then: AfterStop::Stop | AfterStop::AwaitConfig, .. }
            | SlotPhase::Stopped
            | SlotPhase::Failed
            | SlotPhase::Over => self.refuse(out),
        }
    }
}
