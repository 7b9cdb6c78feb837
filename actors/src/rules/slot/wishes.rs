//! Requests of people, configuration and callers: the effect of each in each phase.
//!
//! A stop wins over every other request, and only a person undoes it: by a start, or by a reconnect of a remote
//! instance. A call never shortens the delay of a restart; for a remote instance it makes an attempt at once.

use std::sync::Arc;
use std::time::Instant;

use super::{Beside, Effect, Phase, Slot, Then, Want, Why, ending, refuse_ending};
use crate::model::event::{RestartReason, StopKind};
use crate::model::remedy::Remedy;
use crate::model::spec::{InstanceSpec, Keep, OnUpdate};
use crate::model::status::{Cause, Status};

impl Slot {
    pub(super) fn on_start(&mut self, out: &mut Vec<Effect>) {
        match &self.phase {
            Phase::Stopped => {
                self.want = Want::Running;
                self.history.clear();
                if self.spec.missing.is_empty() {
                    self.moves(Cause::Asked, Some("starting on request".to_owned()), out);
                    self.begin_again(RestartReason::Manual, None, out);
                } else {
                    self.await_config(out);
                }
            }
            // The old run is still ending; the start follows.
            Phase::Stopping { then: Then::Stop, .. } => {
                self.want = Want::Running;
                self.history.clear();
                if self.spec.missing.is_empty() {
                    let again = self.anew(RestartReason::Manual, self.pid);
                    self.ends_in(Then::Again(again));
                    self.moves(Cause::Asked, Some("starting again when the old run has ended".to_owned()), out);
                } else {
                    self.ends_in(Then::AwaitConfig);
                    self.moves(Cause::ConfigMissing, Some(self.missing_message()), out);
                }
            }
            // The wanted state is running again; the start follows once the missing values are set.
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } if self.want == Want::Stopped => {
                self.want = Want::Running;
                self.called = false;
                self.history.clear();
                self.remark(Some(self.missing_message()), out);
            }
            // A start does not end these phases: each has its own remedy.
            Phase::Failed => out.push(self.denied("start", "it failed permanently", Some(Remedy::Restart))),
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } => {
                out.push(self.denied_unconfigured("start"));
            }
            Phase::Reauth => {
                out.push(self.denied("start", "its server refused the credentials", Some(Remedy::Authorize)));
            }
            Phase::Exhausted { .. } => self.on_reconnect(out),
            Phase::Stopping { then: Then::Over, .. } => out.push(self.denied_removed("start")),
            // Already requested.
            Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Reconnecting { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Over => {}
        }
    }

    pub(super) fn on_stop(&mut self, out: &mut Vec<Effect>) {
        self.takes_what_is_configured();
        match &mut self.phase {
            Phase::Queued { .. } => {
                out.push(Effect::WithdrawPermit);
                self.stop_now(out);
            }
            Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Failed => {
                self.stop_now(out);
            }
            // The status still names the missing values, but setting them does not start the server.
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } => {
                self.want = Want::Stopped;
                self.remark(Some(self.missing_message()), out);
            }
            Phase::Starting { .. } | Phase::Ready { .. } | Phase::FallingAsleep { .. } | Phase::Undiscovered { .. } => {
                self.want = Want::Stopped;
                self.end_run(StopKind::Manual, Then::Stop, out);
                self.moves(Cause::Stopped, Some("stopping".to_owned()), out);
                self.refuse(out);
            }
            // A stop wins over a restart, an update and a start that are still waiting for the old run to end.
            Phase::Stopping { then, .. } if *then != Then::Over => {
                *then = Then::Stop;
                self.want = Want::Stopped;
                self.moves(Cause::Stopped, Some("stopping".to_owned()), out);
                self.refuse(out);
            }
            // Already stopped, or ending permanently.
            Phase::Stopping { .. } | Phase::Stopped | Phase::Over => {}
        }
    }

    fn stop_now(&mut self, out: &mut Vec<Effect>) {
        self.want = Want::Stopped;
        if self.lingers(StopKind::Manual, &Then::Stop, out) {
            self.moves(Cause::Stopped, Some("stopping".to_owned()), out);
        } else {
            self.stopped(out);
        }
        self.refuse(out);
    }

    pub(super) fn on_restart(&mut self, out: &mut Vec<Effect>) {
        self.takes_what_is_configured();
        match self.phase {
            Phase::Starting { .. } | Phase::Ready { .. } | Phase::FallingAsleep { .. } | Phase::Undiscovered { .. } => {
                self.history.clear();
                let again = Why::Again { reason: RestartReason::Manual, old_pid: self.pid, attempt: 0 };
                self.end_run(StopKind::Manual, Then::Again(again), out);
                self.moves(Cause::Asked, Some("restarting on request".to_owned()), out);
            }
            // The requested permit of a wake is equally valid for a restart.
            Phase::Queued { why: Why::Wake { .. }, .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Failed => {
                self.dismiss(StopKind::Manual, out);
                self.history.clear();
                self.moves(Cause::Asked, Some("restarting on request".to_owned()), out);
                self.begin_again(RestartReason::Manual, None, out);
            }
            // Phases of a remote instance, for which `on_reconnect` is used.
            Phase::Reconnecting { .. } | Phase::Reauth | Phase::Exhausted { .. } => {}
            // A start is already requested; only the exit history changes.
            Phase::Queued { .. } | Phase::Stopping { then: Then::Again(_), .. } => self.history.clear(),
            Phase::Stopped | Phase::Stopping { then: Then::Stop, .. } => {
                out.push(self.denied("restart", "it was stopped on request", Some(Remedy::Start)));
            }
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } => {
                out.push(self.denied_unconfigured("restart"));
            }
            Phase::Stopping { then: Then::Over, .. } | Phase::Over => out.push(self.denied_removed("restart")),
        }
    }

    pub(super) fn denied_unconfigured(&self, verb: &str) -> Effect {
        let why = format!("values of its user are missing: {}", self.spec.missing.join(", "));
        self.denied(verb, &why, Some(Remedy::Configure))
    }

    pub(super) fn denied_removed(&self, verb: &str) -> Effect {
        self.denied(verb, "it is being removed", None)
    }

    pub(super) fn on_update(&mut self, now: Instant, spec: Arc<InstanceSpec>, out: &mut Vec<Effect>) {
        if matches!(self.phase, Phase::Over | Phase::Stopping { then: Then::Over, .. }) {
            return;
        }
        let takes_calls = matches!(self.phase, Phase::Ready { .. });
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
        let rolls = spec.on_update == OnUpdate::Rolling && complete && !spec.is_remote() && !self.is_remote();
        if rolls && takes_calls {
            self.roll(spec, out);
            return;
        }
        self.takes_on(spec);
        self.dismiss(StopKind::Config, out);
        // Processes and connections have separate permits.
        if other_kind && complete && matches!(self.phase, Phase::Queued { .. }) {
            out.push(Effect::WithdrawPermit);
        }
        let again = self.anew(RestartReason::Config, self.pid);
        let then = if complete { Then::Again(again) } else { Then::AwaitConfig };
        match &self.phase {
            Phase::Starting { .. } | Phase::Ready { .. } | Phase::FallingAsleep { .. } | Phase::Undiscovered { .. } => {
                self.end_run(StopKind::Config, then, out);
                self.config_changed(out);
            }
            Phase::Stopping { then: Then::AwaitConfig, .. } if complete && self.want == Want::Stopped => {
                self.ends_in(Then::Stop);
                self.moves(Cause::Stopped, Some("stopping".to_owned()), out);
            }
            Phase::Stopping { then: Then::Again(_) | Then::AwaitConfig, .. } => {
                self.ends_in(then);
                self.config_changed(out);
            }
            Phase::Unconfigured if complete && self.want == Want::Stopped => self.stopped(out),
            Phase::Unconfigured if complete => {
                self.moves(Cause::Configured, None, out);
                self.take(out);
            }
            Phase::Unconfigured => self.moves(Cause::ConfigMissing, Some(self.missing_message()), out),
            Phase::Queued { .. } if !complete => {
                out.push(Effect::WithdrawPermit);
                self.await_config(out);
            }
            // The start follows with the new configuration.
            Phase::Queued { why: Why::First, .. } if other_kind => self.queue(Why::First, out),
            Phase::Queued { why: Why::First, .. } => {}
            Phase::Queued { why: Why::Again { .. }, .. } if !other_kind => {}
            Phase::Queued { why: Why::Again { .. } | Why::Wake { .. } | Why::Reconnect { .. }, .. }
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Failed => {
                if complete {
                    self.config_changed(out);
                    self.begin_again(RestartReason::Config, None, out);
                } else {
                    self.await_config(out);
                }
            }
            // The start follows when a person requests it or the missing values are set.
            Phase::Stopped | Phase::Stopping { .. } | Phase::Over => {}
        }
    }

    // True if the current run, or the sleep, can continue under another configuration.
    fn goes_on_under(&self, spec: &InstanceSpec) -> bool {
        // A sleeping instance must start if the new configuration does not permit sleep.
        let wakes = spec.keep == Keep::AlwaysOn && self.spec.keep != Keep::AlwaysOn && self.sleeps_on();
        !wakes && self.spec.can_go_on_as(spec)
    }

    /// Applies a configuration without a restart. The history of the instance is kept.
    fn adopt(&mut self, now: Instant, spec: &InstanceSpec, out: &mut Vec<Effect>) {
        let masks_more = spec.mask != self.spec.mask;
        // Responses to earlier requests may still contain secrets of the old configuration.
        let mask = spec.mask.replacing(&self.spec.mask);
        let spec = Arc::new(InstanceSpec { mask, ..spec.clone() });
        let before = std::mem::replace(&mut self.spec, spec.clone());
        // A rolling update to an earlier configuration, running or failed, is obsolete.
        let was_refused = self.refused.take().is_some();
        if self.has_successor() {
            self.roll(spec.clone(), out);
        } else if was_refused && (self.sleeps_on() || matches!(self.phase, Phase::Ready { .. })) {
            self.remark(None, out);
        }
        // If only masked values changed, a run whose credentials were refused already had the new ones.
        let has_newer_credentials = self.is_remote() && !spec.has_credentials_of(&before);
        // A new OAuth token is not part of the specification, but of the mask.
        let has_newer_secrets = has_newer_credentials || (self.is_remote() && masks_more);
        match self.phase {
            Phase::Starting { run, .. } | Phase::Ready { run, .. } | Phase::Undiscovered { run, .. } => {
                if has_newer_credentials {
                    self.newer_credentials = Some(now);
                }
                if let Phase::Ready { run, since, .. } = self.phase
                    && (spec.keep != before.keep || spec.policy.idle != before.policy.idle)
                {
                    self.phase = Phase::Ready { run, since, look_at: self.first_look(since) };
                }
                out.push(Effect::Adopt { run, spec });
            }
            Phase::Reauth if has_newer_secrets => {
                self.moves(Cause::CredentialsChanged, Some("its credentials have changed".to_owned()), out);
                self.attempt_now(0, None, out);
            }
            Phase::Exhausted { .. } => {
                let what = if has_newer_credentials { "credentials have" } else { "configuration has" };
                self.moves(Cause::Attempt, Some(format!("its {what} changed")), out);
                self.attempt_now(0, None, out);
            }
            // The next run uses the new configuration.
            Phase::Unconfigured
            | Phase::Queued { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }

    fn ends_in(&mut self, next: Then) {
        if let Phase::Stopping { then, .. } = &mut self.phase {
            *then = next;
        }
    }

    // True if the instance sleeps, falls asleep or is being woken.
    fn sleeps_on(&self) -> bool {
        self.is_dormant() || matches!(self.phase, Phase::FallingAsleep { .. })
    }

    fn config_changed(&mut self, out: &mut Vec<Effect>) {
        if !self.spec.missing.is_empty() {
            self.moves(Cause::ConfigMissing, Some(self.missing_message()), out);
            self.refuse(out);
            return;
        }
        match self.status {
            // A required value was missing while the run ends, and is set again: the start follows the end.
            Status::AwaitingUserConfig => {
                self.moves(Cause::Configured, Some("starting again when the old run has ended".to_owned()), out);
            }
            Status::Provisioning => {}
            _ => self.moves(Cause::ConfigChanged, Some("its configuration changed".to_owned()), out),
        }
    }

    pub(super) fn on_end(&mut self, kind: StopKind, out: &mut Vec<Effect>) {
        if kind == StopKind::Uninstall && self.phase != Phase::Over && self.removal.is_none() {
            let beside = self.beside.as_ref().and_then(Beside::run);
            self.removal = Some((self.run().or(beside).is_some(), self.is_dormant()));
        }
        self.dismiss(kind, out);
        match &mut self.phase {
            Phase::Starting { .. } | Phase::Ready { .. } | Phase::FallingAsleep { .. } | Phase::Undiscovered { .. } => {
                self.end_run(kind, Then::Over, out);
                self.moves(Cause::Stopped, Some(ending(kind).to_owned()), out);
            }
            Phase::Stopping { then, kind: announced, .. } => {
                *then = Then::Over;
                *announced = kind;
                self.moves(Cause::Stopped, Some(ending(kind).to_owned()), out);
            }
            Phase::Queued { .. } => {
                out.push(Effect::WithdrawPermit);
                self.over_when_alone(kind, out);
            }
            Phase::Unconfigured
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopped
            | Phase::Failed => self.over_when_alone(kind, out),
            Phase::Over => {}
        }
        out.push(refuse_ending(kind));
    }

    fn over_when_alone(&mut self, kind: StopKind, out: &mut Vec<Effect>) {
        if self.is_remote() && kind == StopKind::Uninstall {
            self.told_connected = true;
            self.tell_disconnected(true, out);
        }
        if self.lingers(kind, &Then::Over, out) {
            self.moves(Cause::Stopped, Some(ending(kind).to_owned()), out);
        } else {
            self.over(None, out);
        }
    }

    pub(super) fn on_call(&mut self, now: Instant, out: &mut Vec<Effect>) {
        match &mut self.phase {
            // A call that is admitted at once does not set `called`, which would keep a lazy instance awake.
            Phase::Ready { run, .. } | Phase::Undiscovered { run, .. } => out.push(Effect::Admit(*run)),
            Phase::Dormant { since, not_before } => {
                self.called = true;
                let (since, not_before) = (*since, *not_before);
                let why = Why::Wake { since, asked: now };
                if now < not_before {
                    self.phase = Phase::Backoff { until: not_before, why };
                } else {
                    self.queue(why, out);
                }
            }
            Phase::Queued { urgent, .. } => {
                self.called = true;
                if !*urgent {
                    *urgent = true;
                    out.push(Effect::RequestPermit { urgent: true });
                }
            }
            // The caller waits up to its own deadline. A call does not shorten the delay of a restart.
            Phase::Starting { .. } | Phase::Backoff { .. } | Phase::Stopping { then: Then::Again(_), .. } => {
                self.called = true;
            }
            // The attempt is made at once, and all callers that arrive meanwhile share it.
            Phase::Reconnecting { until, attempt } => {
                self.called = true;
                let (until, attempt) = (*until, *attempt);
                self.attempt_now(attempt, Some(until), out);
            }
            Phase::Exhausted { attempts } => {
                self.called = true;
                let attempts = *attempts;
                self.attempt_now(attempts, None, out);
            }
            // Too late for this run. It is ended quickly, so that it does not use up the time of the callers: those
            // that still wait afterwards call again and wake the next run.
            Phase::FallingAsleep { run, .. } => {
                if !std::mem::replace(&mut self.called, true) {
                    out.push(Effect::Hurry(*run));
                }
            }
            Phase::Stopping { then: Then::Over, kind, .. } => out.push(refuse_ending(*kind)),
            Phase::Unconfigured
            | Phase::Reauth
            | Phase::Stopping { then: Then::Stop | Then::AwaitConfig, .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => self.refuse(out),
        }
    }
}
