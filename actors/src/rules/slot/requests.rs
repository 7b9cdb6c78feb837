//! Requests of people, configuration and callers: the effect of each in each phase.
//!
//! A stop wins over every other request, and only a person undoes it: by a start, or by a reconnect of a remote
//! instance. A call never shortens the delay of a restart; for a remote instance it makes an attempt at once.

use std::sync::Arc;
use std::time::Instant;

use super::{
    AfterStop, Down, DownState, RequestedState, RunState, SecondRun, Slot, SlotEffect, StartReason, Up, ending_message,
    refuse_callers_while_ending,
};
use crate::model::event::{RestartReason, StopKind};
use crate::model::remedy::Remedy;
use crate::model::spec::{InstanceSpec, ProcessLifetime, UpdateMethod};
use crate::model::status::{Status, StatusCause};

impl Slot {
    pub(super) fn on_start(&mut self, out: &mut Vec<SlotEffect>) {
        match &self.phase {
            Down(DownState::Stopped) => {
                self.requested_state = RequestedState::Running;
                self.record.history.clear();
                if self.spec.is_complete() {
                    self.transition(StatusCause::Requested, Some("starting on request".to_owned()), out);
                    self.start_again(RestartReason::Manual, None, out);
                } else {
                    self.await_config(out);
                }
            }
            // The old run is still ending; the start follows.
            Up { state: RunState::Stopping { then: AfterStop::Stop, .. }, .. } => {
                self.requested_state = RequestedState::Running;
                self.record.history.clear();
                if self.spec.is_complete() {
                    let again = self.fresh_start_reason(RestartReason::Manual, self.pid);
                    self.set_after_stop(AfterStop::StartAgain(again));
                    self.transition(
                        StatusCause::Requested,
                        Some("starting again when the old run has ended".to_owned()),
                        out,
                    );
                } else {
                    self.set_after_stop(AfterStop::AwaitConfig);
                    self.transition(StatusCause::ConfigMissing, Some(self.missing_message()), out);
                }
            }
            // The wanted state is running again; the start follows once the missing values are set.
            Up { state: RunState::Stopping { then: AfterStop::AwaitConfig, .. }, .. }
            | Down(DownState::Unconfigured)
                if self.requested_state == RequestedState::Stopped =>
            {
                self.requested_state = RequestedState::Running;
                self.has_caller = false;
                self.record.history.clear();
                self.set_message(Some(self.missing_message()), out);
            }
            // A start does not end these phases: each has its own remedy.
            Down(DownState::Failed) => {
                out.push(self.reject_command("start", "it failed permanently", Some(Remedy::Restart)));
            }
            Up { state: RunState::Stopping { then: AfterStop::AwaitConfig, .. }, .. }
            | Down(DownState::Unconfigured) => {
                out.push(self.reject_unconfigured("start"));
            }
            Down(DownState::Reauth) => {
                out.push(self.reject_command("start", "the server rejected the credentials", Some(Remedy::Authorize)));
            }
            Down(DownState::Exhausted { .. }) => self.on_reconnect(out),
            Up { state: RunState::Stopping { then: AfterStop::End, .. }, .. } => out.push(self.reject_removed("start")),
            // Already requested.
            Up { .. }
            | Down(
                DownState::Queued { .. }
                | DownState::Reconnecting { .. }
                | DownState::Backoff { .. }
                | DownState::Dormant { .. }
                | DownState::Ended,
            ) => {}
        }
    }

    pub(super) fn on_stop(&mut self, out: &mut Vec<SlotEffect>) {
        self.adopt_pending_spec();
        match &mut self.phase {
            Down(DownState::Queued { .. }) => {
                out.push(SlotEffect::WithdrawPermit);
                self.stop_now(out);
            }
            Down(
                DownState::Reconnecting { .. }
                | DownState::Reauth
                | DownState::Exhausted { .. }
                | DownState::Backoff { .. }
                | DownState::Dormant { .. }
                | DownState::Failed,
            ) => {
                self.stop_now(out);
            }
            // The status still names the missing values, but setting them does not start the server.
            Up { state: RunState::Stopping { then: AfterStop::AwaitConfig, .. }, .. }
            | Down(DownState::Unconfigured) => {
                self.requested_state = RequestedState::Stopped;
                self.set_message(Some(self.missing_message()), out);
            }
            // Already stopped, or ending permanently.
            Up { state: RunState::Stopping { then: AfterStop::End, .. }, .. }
            | Down(DownState::Stopped | DownState::Ended) => {}
            // A stop wins over a restart, an update and a start that are still waiting for the old run to end.
            Up { state, .. } => {
                self.requested_state = RequestedState::Stopped;
                if let RunState::Stopping { then, .. } = state {
                    *then = AfterStop::Stop;
                } else {
                    self.end_run(StopKind::Manual, AfterStop::Stop, out);
                }
                self.transition(StatusCause::Stopped, Some("stopping".to_owned()), out);
                self.refuse_callers(out);
            }
        }
    }

    fn stop_now(&mut self, out: &mut Vec<SlotEffect>) {
        self.requested_state = RequestedState::Stopped;
        if self.wait_for_second_run(StopKind::Manual, &AfterStop::Stop, out) {
            self.transition(StatusCause::Stopped, Some("stopping".to_owned()), out);
        } else {
            self.enter_stopped(out);
        }
        self.refuse_callers(out);
    }

    pub(super) fn on_restart(&mut self, out: &mut Vec<SlotEffect>) {
        self.adopt_pending_spec();
        match self.phase {
            // The requested permit of a wake is equally valid for a restart.
            Down(
                DownState::Queued { why: StartReason::Wake { .. }, .. }
                | DownState::Backoff { .. }
                | DownState::Dormant { .. }
                | DownState::Failed,
            ) => {
                self.end_second_run(StopKind::Manual, out);
                self.record.history.clear();
                self.transition(StatusCause::Requested, Some("restarting on request".to_owned()), out);
                self.start_again(RestartReason::Manual, None, out);
            }
            // Phases of a remote instance, for which `on_reconnect` is used.
            Down(DownState::Reconnecting { .. } | DownState::Reauth | DownState::Exhausted { .. }) => {}
            // A start is already requested; only the exit history changes.
            Up { state: RunState::Stopping { then: AfterStop::StartAgain(_), .. }, .. }
            | Down(DownState::Queued { .. }) => {
                self.record.history.clear();
            }
            Up { state: RunState::Stopping { then: AfterStop::Stop, .. }, .. } | Down(DownState::Stopped) => {
                out.push(self.reject_command("restart", "it was stopped on request", Some(Remedy::Start)));
            }
            Up { state: RunState::Stopping { then: AfterStop::AwaitConfig, .. }, .. }
            | Down(DownState::Unconfigured) => {
                out.push(self.reject_unconfigured("restart"));
            }
            Up { state: RunState::Stopping { then: AfterStop::End, .. }, .. } | Down(DownState::Ended) => {
                out.push(self.reject_removed("restart"));
            }
            Up { .. } => {
                self.record.history.clear();
                let again = StartReason::Restart { reason: RestartReason::Manual, old_pid: self.pid, attempt: 0 };
                self.end_run(StopKind::Manual, AfterStop::StartAgain(again), out);
                self.transition(StatusCause::Requested, Some("restarting on request".to_owned()), out);
            }
        }
    }

    pub(super) fn reject_unconfigured(&self, verb: &str) -> SlotEffect {
        let why = if self.spec.missing.is_empty() {
            self.missing_message()
        } else {
            format!("values of the user are missing: {}", self.spec.missing.join(", "))
        };
        self.reject_command(verb, &why, Some(Remedy::Configure))
    }

    pub(super) fn reject_removed(&self, verb: &str) -> SlotEffect {
        self.reject_command(verb, "it is being removed", None)
    }

    pub(super) fn on_update(&mut self, now: Instant, spec: Arc<InstanceSpec>, out: &mut Vec<SlotEffect>) {
        if self.is_ending() {
            return;
        }
        let takes_calls = self.is_ready();
        // This configuration did not start before. It is retried only beside a run of the old one, which continues if
        // it fails again. A supervisor that was restarted after a panic receives the update before that run is ready.
        if !takes_calls && self.record.rejected_update.as_ref().is_some_and(|refused| *refused.spec == *spec) {
            return;
        }
        if self.can_continue_under(&spec) {
            self.apply_spec(now, &spec, out);
            return;
        }
        if takes_calls && self.apply_in_second_run(&spec, out) {
            return;
        }
        let complete = spec.is_complete();
        let other_kind = spec.is_remote() != self.is_remote();
        let rolls = spec.update_method == UpdateMethod::Rolling && complete && !spec.is_remote() && !self.is_remote();
        if rolls && takes_calls {
            self.begin_rolling_update(spec, out);
            return;
        }
        self.replace_spec(spec);
        self.end_second_run(StopKind::Config, out);
        // Processes and connections have separate permits.
        if other_kind && complete && matches!(self.phase, Down(DownState::Queued { .. })) {
            out.push(SlotEffect::WithdrawPermit);
        }
        let again = self.fresh_start_reason(RestartReason::Config, self.pid);
        let then = if complete { AfterStop::StartAgain(again) } else { AfterStop::AwaitConfig };
        match &self.phase {
            Up { state: RunState::Stopping { then: AfterStop::AwaitConfig, .. }, .. }
                if complete && self.requested_state == RequestedState::Stopped =>
            {
                self.set_after_stop(AfterStop::Stop);
                self.transition(StatusCause::Stopped, Some("stopping".to_owned()), out);
            }
            Up {
                state: RunState::Stopping { then: AfterStop::StartAgain(_) | AfterStop::AwaitConfig, .. }, ..
            } => {
                self.set_after_stop(then);
                self.report_config_change(out);
            }
            Down(DownState::Unconfigured) if complete && self.requested_state == RequestedState::Stopped => {
                self.enter_stopped(out);
            }
            Down(DownState::Unconfigured) if complete => {
                self.transition(StatusCause::Configured, None, out);
                self.accept(out);
            }
            Down(DownState::Unconfigured) => {
                self.transition(StatusCause::ConfigMissing, Some(self.missing_message()), out);
            }
            Down(DownState::Queued { .. }) if !complete => {
                out.push(SlotEffect::WithdrawPermit);
                self.await_config(out);
            }
            // The start follows with the new configuration.
            Down(DownState::Queued { why: StartReason::First, .. }) if other_kind => {
                self.queue_start(StartReason::First, out);
            }
            Down(DownState::Queued { why: StartReason::First, .. }) => {}
            Down(DownState::Queued { why: StartReason::Restart { .. }, .. }) if !other_kind => {}
            Down(
                DownState::Queued { .. }
                | DownState::Reconnecting { .. }
                | DownState::Reauth
                | DownState::Exhausted { .. }
                | DownState::Backoff { .. }
                | DownState::Dormant { .. }
                | DownState::Failed,
            ) => {
                if complete {
                    self.report_config_change(out);
                    self.start_again(RestartReason::Config, None, out);
                } else {
                    self.await_config(out);
                }
            }
            // The start follows when a person requests it or the missing values are set.
            Up { state: RunState::Stopping { .. }, .. } | Down(DownState::Stopped | DownState::Ended) => {}
            Up { .. } => {
                self.end_run(StopKind::Config, then, out);
                self.report_config_change(out);
            }
        }
    }

    // True if the current run, or the sleep, can continue under another configuration.
    fn can_continue_under(&self, spec: &InstanceSpec) -> bool {
        // A sleeping instance must start if the new configuration does not permit sleep.
        let wakes = spec.lifetime == ProcessLifetime::AlwaysOn
            && self.spec.lifetime != ProcessLifetime::AlwaysOn
            && self.is_asleep();
        !wakes && self.spec.can_continue_as(spec)
    }

    /// Applies a configuration without a restart. The history of the instance is kept.
    fn apply_spec(&mut self, now: Instant, spec: &InstanceSpec, out: &mut Vec<SlotEffect>) {
        let masks_more = spec.mask != self.spec.mask;
        // Responses to earlier requests may still contain secrets of the old configuration.
        let mask = spec.mask.with_secrets_of(&self.spec.mask);
        let spec = Arc::new(InstanceSpec { mask, ..spec.clone() });
        let before = std::mem::replace(&mut self.spec, spec.clone());
        // A rolling update to an earlier configuration, running or failed, is obsolete.
        let was_refused = self.record.rejected_update.take().is_some();
        if self.has_successor() {
            self.begin_rolling_update(spec.clone(), out);
        } else if was_refused && (self.is_asleep() || self.is_ready()) {
            self.set_message(None, out);
        }
        // If only masked values changed, a run whose credentials were refused already had the new ones.
        let has_newer_credentials = self.is_remote() && !spec.has_same_credentials(&before);
        // A new OAuth token is not part of the specification, but of the mask.
        let has_newer_secrets = has_newer_credentials || (self.is_remote() && masks_more);
        match self.phase {
            Up { run, state: RunState::Starting { .. } | RunState::Ready { .. } | RunState::Undiscovered { .. } } => {
                if has_newer_credentials {
                    self.credentials_changed_at = Some(now);
                }
                if let Up { state: RunState::Ready { since, .. }, .. } = self.phase
                    && (spec.lifetime != before.lifetime || spec.policy.idle != before.policy.idle)
                {
                    self.set_run_state(RunState::Ready { since, idle_check_at: self.first_idle_check(since) });
                }
                out.push(SlotEffect::ApplySpec { run, spec });
            }
            Down(DownState::Reauth) if has_newer_secrets => {
                self.transition(StatusCause::CredentialsChanged, Some("the credentials have changed".to_owned()), out);
                self.queue_attempt(0, None, out);
            }
            Down(DownState::Exhausted { .. }) => {
                let what = if has_newer_credentials { "credentials have" } else { "configuration has" };
                self.transition(StatusCause::Attempt, Some(format!("the {what} changed")), out);
                self.queue_attempt(0, None, out);
            }
            // The next run uses the new configuration.
            Up { .. } | Down(_) => {}
        }
    }

    fn set_after_stop(&mut self, next: AfterStop) {
        if let Up { state: RunState::Stopping { then, .. }, .. } = &mut self.phase {
            *then = next;
        }
    }

    // True if the instance sleeps, falls asleep or is being woken.
    fn is_asleep(&self) -> bool {
        self.is_dormant() || matches!(self.phase, Up { state: RunState::FallingAsleep { .. }, .. })
    }

    fn report_config_change(&mut self, out: &mut Vec<SlotEffect>) {
        if !self.spec.is_complete() {
            self.transition(StatusCause::ConfigMissing, Some(self.missing_message()), out);
            self.refuse_callers(out);
            return;
        }
        match self.status {
            // A required value was missing while the run ends, and is set again: the start follows the end.
            Status::AwaitingUserConfig => {
                self.transition(
                    StatusCause::Configured,
                    Some("starting again when the old run has ended".to_owned()),
                    out,
                );
            }
            Status::Provisioning => {}
            _ => self.transition(StatusCause::ConfigChanged, Some("the configuration changed".to_owned()), out),
        }
    }

    pub(super) fn on_end(&mut self, kind: StopKind, out: &mut Vec<SlotEffect>) {
        if kind == StopKind::Uninstall && self.phase != Down(DownState::Ended) && self.removal.is_none() {
            let second = self.second_run.as_ref().and_then(SecondRun::run);
            self.removal = Some((self.run().or(second).is_some(), self.is_dormant()));
        }
        self.end_second_run(kind, out);
        match &mut self.phase {
            Up { state, .. } => {
                if let RunState::Stopping { then, kind: announced } = state {
                    (*then, *announced) = (AfterStop::End, kind);
                } else {
                    self.end_run(kind, AfterStop::End, out);
                }
                self.transition(StatusCause::Stopped, Some(ending_message(kind).to_owned()), out);
            }
            Down(DownState::Queued { .. }) => {
                out.push(SlotEffect::WithdrawPermit);
                self.finish_without_run(kind, out);
            }
            Down(DownState::Ended) => {}
            Down(_) => self.finish_without_run(kind, out),
        }
        out.push(refuse_callers_while_ending(kind));
    }

    fn finish_without_run(&mut self, kind: StopKind, out: &mut Vec<SlotEffect>) {
        if self.is_remote() && kind == StopKind::Uninstall {
            self.record.reported_connected = true;
            self.report_disconnected(true, out);
        }
        if self.wait_for_second_run(kind, &AfterStop::End, out) {
            self.transition(StatusCause::Stopped, Some(ending_message(kind).to_owned()), out);
        } else {
            self.finish(None, out);
        }
    }

    pub(super) fn on_call(&mut self, now: Instant, out: &mut Vec<SlotEffect>) {
        match &mut self.phase {
            // A call that is admitted at once does not set `has_caller`, which would keep a lazy instance awake.
            Up { run, state: RunState::Ready { .. } | RunState::Undiscovered { .. } } => {
                out.push(SlotEffect::Admit(*run));
            }
            Down(DownState::Dormant { since, not_before }) => {
                self.has_caller = true;
                let (since, not_before) = (*since, *not_before);
                let why = StartReason::Wake { since, called_at: now };
                if now < not_before {
                    self.phase = Down(DownState::Backoff { until: not_before, why });
                } else {
                    self.queue_start(why, out);
                }
            }
            Down(DownState::Queued { urgent, .. }) => {
                self.has_caller = true;
                if !*urgent {
                    *urgent = true;
                    out.push(SlotEffect::RequestPermit { urgent: true });
                }
            }
            // The caller waits up to its own deadline. A call does not shorten the delay of a restart.
            Up {
                state: RunState::Starting { .. } | RunState::Stopping { then: AfterStop::StartAgain(_), .. }, ..
            }
            | Down(DownState::Backoff { .. }) => {
                self.has_caller = true;
            }
            // The attempt is made at once, and all callers that arrive meanwhile share it.
            Down(DownState::Reconnecting { until, attempt }) => {
                self.has_caller = true;
                let (until, attempt) = (*until, *attempt);
                self.queue_attempt(attempt, Some(until), out);
            }
            Down(DownState::Exhausted { attempts }) => {
                self.has_caller = true;
                let attempts = *attempts;
                self.queue_attempt(attempts, None, out);
            }
            // Too late for this run. It is ended quickly, so that it does not use up the time of the callers: those
            // that still wait afterwards call again and wake the next run.
            Up { run, state: RunState::FallingAsleep { .. } } => {
                if !std::mem::replace(&mut self.has_caller, true) {
                    out.push(SlotEffect::ShortenGrace(*run));
                }
            }
            Up { state: RunState::Stopping { then: AfterStop::End, kind, .. }, .. } => {
                out.push(refuse_callers_while_ending(*kind));
            }
            Up { state: RunState::Stopping { then: AfterStop::Stop | AfterStop::AwaitConfig, .. }, .. }
            | Down(
                DownState::Unconfigured | DownState::Reauth | DownState::Stopped | DownState::Failed | DownState::Ended,
            ) => self.refuse_callers(out),
        }
    }
}
