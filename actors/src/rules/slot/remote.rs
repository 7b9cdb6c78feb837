//! Behaviour of remote instances. A remote instance has a connection instead of a process. The connection is retried
//! without limit if the policy permits it, and the credentials can change during a run.
//!
//! ```text
//!             lost, or not reached                 its time, a call, a person
//!  Ready ──────────────────────────▶ Reconnecting ────────────────────────────▶ Queued ─▶ Starting
//!    ▲  │  │                          ▲        │                                            │   │
//!    │  │  └─ refused ─▶ Reauth       │        └ too many tries ─▶ Exhausted                │   │
//!    │  │                             └──────────────────────────────── not reached ────────┘   │
//!    │  └──────────────── forced: Stopping ─▶ Queued                                            │
//!    └───────────────────────── lists are read ◀── Undiscovered (takes calls) ◀── initialized ──┘
//! ```
//!
//! At most one attempt is in progress, whoever requested it. `Reauth` ends by new credentials, a new token, a request
//! of a person or a new configuration. New credentials or a new policy never end a connection. Connected and
//! disconnected are reported alternately, and every reported degradation is followed by a recovery, also over
//! reconnects and panics of the supervisor.

use std::time::{Duration, Instant};

use super::{
    AfterStop, Down, DownState, HealthChange, RequestedState, RunState, Slot, SlotEffect, SlotEvent, StartReason, Up,
};
use crate::model::event::StopKind;
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::failure::{ExchangeFailure, FailureKind};
use crate::model::remote::{ConnectionState, ServerHealth};
use crate::model::status::{self, Status, StatusCause};
use crate::rules::retry::{self, FailureClass};

impl Slot {
    /// Returns true if the server is remote.
    pub fn is_remote(&self) -> bool {
        self.spec.is_remote()
    }

    /// Returns the state of the connection; `None` for a process.
    pub fn connection(&self) -> Option<ConnectionState> {
        let connection = match &self.phase {
            Up { state: RunState::Starting { .. }, .. } if self.initialized_at.is_some() => ConnectionState::Connected,
            Up { state: RunState::Starting { .. }, .. } | Down(DownState::Queued { .. })
                if self.is_shown_disconnected() =>
            {
                ConnectionState::Reconnecting
            }
            Up {
                state: RunState::Starting { .. } | RunState::Stopping { then: AfterStop::StartAgain(_), .. }, ..
            }
            | Down(DownState::Queued { .. }) => ConnectionState::Connecting,
            Up { state: RunState::Ready { .. } | RunState::Undiscovered { .. }, .. } => ConnectionState::Connected,
            Down(DownState::Reconnecting { .. }) => ConnectionState::Reconnecting,
            Down(DownState::Reauth | DownState::Exhausted { .. }) => ConnectionState::Error,
            // At rest, or in a phase of processes only.
            Up { .. } | Down(_) => ConnectionState::Disconnected,
        };
        self.is_remote().then_some(connection)
    }

    // State of a remote instance without a connection, as far as a new supervisor needs it.
    pub(super) fn disconnected_state(&self) -> Option<DownState> {
        match (&self.phase, self.phase.start_reason()) {
            (Down(state @ (DownState::Reconnecting { .. } | DownState::Reauth | DownState::Exhausted { .. })), _) => {
                Some(state.clone())
            }
            // An interrupted attempt does not count: its schedule continues, or the attempt is repeated.
            (_, Some(StartReason::Reconnect { attempt, resume: Some(until) })) => {
                Some(DownState::Reconnecting { until: *until, attempt: *attempt })
            }
            (_, Some(why @ StartReason::Reconnect { resume: None, .. })) if self.is_shown_disconnected() => {
                Some(DownState::Queued { why: why.clone(), urgent: false })
            }
            _ => None,
        }
    }

    pub(super) fn restore_disconnected(&mut self, state: DownState, out: &mut Vec<SlotEffect>) {
        match state {
            DownState::Queued { why, .. } => self.queue_start(why, out),
            state => self.phase = Down(state),
        }
    }

    // The status shows a lost connection. An attempt in progress changes it only when it succeeds.
    fn is_shown_disconnected(&self) -> bool {
        matches!(self.status, Status::Offline | Status::Error)
    }

    // `resume` is the scheduled time that stays in effect if the attempt fails; `None` if the backoff begins anew.
    pub(super) fn queue_attempt(&mut self, attempt: u32, resume: Option<Instant>, out: &mut Vec<SlotEffect>) {
        self.queue_start(StartReason::Reconnect { attempt, resume }, out);
    }

    pub(super) fn on_reconnect(&mut self, out: &mut Vec<SlotEffect>) {
        if !self.is_remote() {
            return self.on_restart(out);
        }
        // A person waits for this connection: it takes precedence over starts without a waiting caller.
        let had_caller = std::mem::replace(&mut self.has_caller, true);
        match &mut self.phase {
            Up { state: RunState::Ready { .. } | RunState::Undiscovered { .. }, .. } => {
                let again = StartReason::Reconnect { attempt: 0, resume: None };
                self.end_run(StopKind::Manual, AfterStop::StartAgain(again), out);
                self.transition(StatusCause::Requested, Some("reconnecting on request".to_owned()), out);
            }
            // The timer is cancelled and the backoff begins anew.
            Down(DownState::Reconnecting { .. }) => self.queue_attempt(0, None, out),
            // A remote instance is in `Failed` only if it was set aside after panics of its supervisor.
            Down(DownState::Reauth | DownState::Exhausted { .. } | DownState::Failed) => {
                self.transition(StatusCause::Requested, Some("reconnecting on request".to_owned()), out);
                self.queue_attempt(0, None, out);
            }
            // An attempt is already in progress. If it fails, the backoff begins anew.
            Down(DownState::Queued { why, urgent }) => {
                if let StartReason::Reconnect { attempt, resume } = why {
                    (*attempt, *resume) = (0, None);
                }
                if !std::mem::replace(urgent, true) {
                    out.push(SlotEffect::RequestPermit { urgent: true });
                }
            }
            Up { state: RunState::Starting { why, .. }, .. } => {
                if let StartReason::Reconnect { attempt, resume } = why {
                    (*attempt, *resume) = (0, None);
                }
            }
            Up { state: RunState::Stopping { then: AfterStop::StartAgain(_), .. }, .. } => {}
            Up { state: RunState::Stopping { then: AfterStop::Stop, .. }, .. } | Down(DownState::Stopped) => {
                self.on_start(out);
            }
            Up { state: RunState::Stopping { then: AfterStop::AwaitConfig, .. }, .. }
            | Down(DownState::Unconfigured)
                if self.requested_state == RequestedState::Stopped =>
            {
                self.on_start(out);
            }
            Up { state: RunState::Stopping { then: AfterStop::AwaitConfig, .. }, .. }
            | Down(DownState::Unconfigured) => {
                self.has_caller = had_caller;
                out.push(self.reject_unconfigured("reconnect"));
            }
            Up { state: RunState::Stopping { then: AfterStop::End, .. }, .. } | Down(DownState::Ended) => {
                self.has_caller = had_caller;
                out.push(self.reject_removed("reconnect"));
            }
            // Phases of processes only.
            Up { state: RunState::FallingAsleep { .. }, .. }
            | Down(DownState::Backoff { .. } | DownState::Dormant { .. }) => {}
        }
    }

    // The run of a remote instance ended without a request.
    pub(super) fn on_connection_lost(
        &mut self,
        now: Instant,
        ended: &RunState,
        connected: bool,
        exit: WorkerExit,
        out: &mut Vec<SlotEffect>,
    ) {
        // Callers of an established connection were already admitted and no longer count. Otherwise a server that
        // disconnects right after the handshake would be retried for them without a pause.
        let is_attempt = matches!(ended, RunState::Starting { .. } | RunState::Undiscovered { attempt: 0, .. });
        self.has_caller &= is_attempt;
        let failure = match exit.cause {
            ExitCause::Lost(failure) => failure,
            ExitCause::Panicked(how) => ExchangeFailure::sent(FailureKind::Panicked(how)),
            // The session ended by itself.
            cause => ExchangeFailure::sent(FailureKind::Broken(WorkerExit::from_cause(cause).reason())),
        };
        let reason = failure.to_string();
        self.record.last_error = Some(reason.clone());
        self.report_disconnected(false, out);
        let class = retry::classify(&failure.kind);
        if class == FailureClass::Unauthorized {
            // The credentials changed while the server rejected the old ones. A change longer ago does not count: every
            // request with the old credentials has been answered since.
            let patience = self.spec.policy.session.request_timeout_max;
            if self.credentials_changed_at.take().is_some_and(|since| now.saturating_duration_since(since) < patience) {
                self.transition(
                    StatusCause::Lost,
                    Some(format!("{reason}; the credentials have changed meanwhile")),
                    out,
                );
                self.queue_attempt(0, None, out);
                return;
            }
            self.phase = Down(DownState::Reauth);
            self.transition(StatusCause::AuthRefused, Some(reason), out);
            self.refuse_callers(out);
            return;
        }
        // A failure of an established connection begins a new schedule; a failed attempt continues its own. An attempt
        // succeeds only when the lists are read: a server that disconnects after the handshake is not retried every
        // second.
        let (attempt, resume) = match ended {
            RunState::Starting { why: StartReason::Reconnect { attempt, resume }, .. }
            | RunState::Undiscovered { why: StartReason::Reconnect { attempt, resume }, .. } => {
                match resume.filter(|until| *until > now) {
                    Some(until) => (*attempt, Some(until)),
                    None => (attempt + 1, None),
                }
            }
            _ => (1, None),
        };
        let policy = &self.spec.policy.reconnect;
        let offline = matches!(class, FailureClass::Unreachable) || (class == FailureClass::Expired && connected);
        let retry_at = if policy.attempts_max.is_some_and(|most| attempt > most) {
            self.phase = Down(DownState::Exhausted { attempts: attempt - 1 });
            self.transition_if_changed(StatusCause::Failed, "Connection failed after max retries".to_owned(), out);
            None
        } else {
            let delay = policy.backoff().delay(attempt);
            let delay = self.rng.jitter(delay, policy.jitter_percent);
            let pause = failure.kind.requested_pause();
            let until = resume.unwrap_or(now + delay).max(now + pause);
            self.phase = Down(DownState::Reconnecting { until, attempt });
            let (cause, message) = match class {
                FailureClass::Unreachable => (StatusCause::Lost, format!("Server unreachable: {reason}")),
                _ if offline => (StatusCause::Lost, format!("Server disconnected: {reason}")),
                _ => (StatusCause::Failed, reason.clone()),
            };
            self.transition_if_changed(cause, message, out);
            if resume != Some(until) {
                out.push(SlotEffect::Emit(SlotEvent::Reconnecting {
                    attempt,
                    after: until.saturating_duration_since(now),
                }));
            }
            Some(until)
        };
        // The callers of this attempt receive its error; later callers trigger another attempt.
        if is_attempt {
            self.has_caller = false;
            out.push(SlotEffect::FailCallers { last_error: reason, retry_at });
        }
    }

    // Does not repeat the same status and message: a server that is unreachable for a week is reported once.
    fn transition_if_changed(&mut self, cause: StatusCause, message: String, out: &mut Vec<SlotEffect>) {
        let same = status::next(self.status, cause) == Some(self.status) && self.message.as_ref() == Some(&message);
        if !same {
            self.transition(cause, Some(message), out);
        }
    }

    // Reports a closed connection once for each established one.
    pub(super) fn report_disconnected(&mut self, intentional: bool, out: &mut Vec<SlotEffect>) {
        if std::mem::take(&mut self.record.reported_connected) {
            self.record.reported_revisions = self.record.revisions;
            out.push(SlotEffect::Emit(SlotEvent::Disconnected { intentional }));
        }
    }

    // Also accepted while the lists are being read.
    pub(super) fn on_health(&mut self, change: HealthChange, out: &mut Vec<SlotEffect>) {
        if matches!(self.phase, Up { state: RunState::Stopping { .. }, .. }) {
            return;
        }
        (self.health, self.record.degraded) = match &change {
            HealthChange::Degraded { failures, last_error } => {
                (ServerHealth::Degraded, Some((*failures, last_error.clone())))
            }
            HealthChange::Restored { .. } => (ServerHealth::Healthy, None),
        };
        out.push(SlotEffect::Emit(SlotEvent::Health(change)));
    }

    // A completed handshake ends a degradation of the connection before.
    pub(super) fn restore_health(&mut self, out: &mut Vec<SlotEffect>) {
        self.health = ServerHealth::Healthy;
        if let Some((failures, last_error)) = self.record.degraded.take() {
            let last_error = Some(last_error);
            out.push(SlotEffect::Emit(SlotEvent::Health(HealthChange::Restored { failures, last_error })));
        }
    }

    // The monotonic clock did not run during the suspension, so deadlines are moved earlier.
    pub(super) fn on_resumed_after_suspend(&mut self, now: Instant, asleep: Duration, out: &mut Vec<SlotEffect>) {
        let earlier = |at: Instant| at.checked_sub(asleep).unwrap_or(now);
        match &mut self.phase {
            Up {
                state:
                    RunState::Starting { why: StartReason::Reconnect { resume: Some(until), .. }, .. }
                    | RunState::Undiscovered { why: StartReason::Reconnect { resume: Some(until), .. }, attempt: 0, .. },
                ..
            }
            | Down(
                DownState::Reconnecting { until, .. }
                | DownState::Backoff { until, .. }
                | DownState::Dormant { not_before: until, .. }
                | DownState::Queued { why: StartReason::Reconnect { resume: Some(until), .. }, .. },
            ) => {
                *until = earlier(*until);
            }
            Up { state: RunState::Undiscovered { retry_at: Some(at), .. }, .. } => *at = earlier(*at),
            // The connection may have been lost without notice.
            Up { run, state: RunState::Ready { .. } } if self.spec.is_remote() => out.push(SlotEffect::Check(*run)),
            // No deadline to move.
            Up { .. } | Down(_) => {}
        }
        self.on_tick(now, None, out);
    }

    /// Returns true if the instance is in transition to a state that a person waits for.
    pub fn is_under_way(&self) -> bool {
        match &self.phase {
            Up { state: RunState::Starting { .. } | RunState::Stopping { .. }, .. }
            | Down(DownState::Queued { .. }) => self.requested_state == RequestedState::Running,
            // The connection is established, and the lists are being read.
            Up { state: RunState::Undiscovered { retry_at: None, .. }, .. } => true,
            Up { .. } | Down(_) => false,
        }
    }
}
