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

use super::{Effect, Phase, Slot, Then, Told, Want, Why};
use crate::model::event::StopKind;
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::failure::{Failure, FailureKind};
use crate::model::ids::Run;
use crate::model::remote::{Connection, Health};
use crate::model::status::{self, Cause, Status};
use crate::rules::restart;
use crate::rules::retry::{self, Class};

/// Change of the health of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthNews {
    /// Too many consecutive checks have failed.
    Degraded {
        /// Number of consecutive failures.
        failures: u32,
        /// Error of the last check.
        last_error: String,
    },
    /// The server answers again.
    Restored {
        /// Number of failures before.
        failures: u32,
        /// Error of the last failed check.
        last_error: Option<String>,
    },
}

// State of a remote instance without a connection, as far as a new supervisor needs it.
#[derive(Debug, Clone)]
pub(super) enum Away {
    Reconnecting {
        until: Instant,
        attempt: u32,
    },
    // An attempt was in progress.
    Attempting {
        attempt: u32,
    },
    Reauth,
    Exhausted {
        attempts: u32,
    },
}

impl Slot {
    /// Returns true if the server is remote.
    pub fn is_remote(&self) -> bool {
        self.spec.is_remote()
    }

    /// Returns the state of the connection; `None` for a process.
    pub fn connection(&self) -> Option<Connection> {
        let connection = match &self.phase {
            Phase::Starting { .. } if self.initialized_at.is_some() => Connection::Connected,
            Phase::Queued { .. } | Phase::Starting { .. } if self.is_known_to_be_away() => Connection::Reconnecting,
            Phase::Queued { .. } | Phase::Starting { .. } | Phase::Stopping { then: Then::Again(_), .. } => {
                Connection::Connecting
            }
            Phase::Unconfigured | Phase::Stopping { .. } | Phase::Stopped | Phase::Over => Connection::Disconnected,
            Phase::Ready { .. } | Phase::Undiscovered { .. } => Connection::Connected,
            Phase::Reconnecting { .. } => Connection::Reconnecting,
            Phase::Reauth | Phase::Exhausted { .. } => Connection::Error,
            // Phases of processes only.
            Phase::FallingAsleep { .. } | Phase::Dormant { .. } | Phase::Backoff { .. } | Phase::Failed => {
                Connection::Disconnected
            }
        };
        self.is_remote().then_some(connection)
    }

    pub(super) fn away(&self) -> Option<Away> {
        match &self.phase {
            Phase::Reconnecting { until, attempt } => Some(Away::Reconnecting { until: *until, attempt: *attempt }),
            // An interrupted attempt does not count: its schedule continues, or the attempt is repeated.
            Phase::Queued { why: Why::Reconnect { attempt, resume: Some(until) }, .. }
            | Phase::Starting { why: Why::Reconnect { attempt, resume: Some(until) }, .. } => {
                Some(Away::Reconnecting { until: *until, attempt: *attempt })
            }
            Phase::Queued { why: Why::Reconnect { attempt, resume: None }, .. }
            | Phase::Starting { why: Why::Reconnect { attempt, resume: None }, .. }
                if self.is_known_to_be_away() =>
            {
                Some(Away::Attempting { attempt: *attempt })
            }
            Phase::Reauth => Some(Away::Reauth),
            Phase::Exhausted { attempts } => Some(Away::Exhausted { attempts: *attempts }),
            _ => None,
        }
    }

    pub(super) fn is_away(&mut self, away: &Away, out: &mut Vec<Effect>) {
        match *away {
            Away::Reconnecting { until, attempt } => self.phase = Phase::Reconnecting { until, attempt },
            Away::Attempting { attempt } => self.attempt_now(attempt, None, out),
            Away::Reauth => self.phase = Phase::Reauth,
            Away::Exhausted { attempts } => self.phase = Phase::Exhausted { attempts },
        }
    }

    // The status shows a lost connection. An attempt in progress changes it only when it succeeds.
    fn is_known_to_be_away(&self) -> bool {
        matches!(self.status, Status::Offline | Status::Error)
    }

    // `resume` is the scheduled time that stays in effect if the attempt fails; `None` if the backoff begins anew.
    pub(super) fn attempt_now(&mut self, attempt: u32, resume: Option<Instant>, out: &mut Vec<Effect>) {
        self.queue(Why::Reconnect { attempt, resume }, out);
    }

    pub(super) fn on_reconnect(&mut self, out: &mut Vec<Effect>) {
        if !self.is_remote() {
            return self.on_restart(out);
        }
        // A person waits for this connection: it takes precedence over starts without a waiting caller.
        let waited_for = std::mem::replace(&mut self.called, true);
        match &mut self.phase {
            Phase::Ready { .. } | Phase::Undiscovered { .. } => {
                let again = Why::Reconnect { attempt: 0, resume: None };
                self.end_run(StopKind::Manual, Then::Again(again), out);
                self.moves(Cause::Asked, Some("reconnecting on request".to_owned()), out);
            }
            // The timer is cancelled and the backoff begins anew.
            Phase::Reconnecting { .. } => self.attempt_now(0, None, out),
            // A remote instance is in `Failed` only if it was set aside after panics of its supervisor.
            Phase::Reauth | Phase::Exhausted { .. } | Phase::Failed => {
                self.moves(Cause::Asked, Some("reconnecting on request".to_owned()), out);
                self.attempt_now(0, None, out);
            }
            // An attempt is already in progress. If it fails, the backoff begins anew.
            Phase::Queued { why, urgent } => {
                if let Why::Reconnect { attempt, resume } = why {
                    (*attempt, *resume) = (0, None);
                }
                if !std::mem::replace(urgent, true) {
                    out.push(Effect::RequestPermit { urgent: true });
                }
            }
            Phase::Starting { why, .. } => {
                if let Why::Reconnect { attempt, resume } = why {
                    (*attempt, *resume) = (0, None);
                }
            }
            Phase::Stopping { then: Then::Again(_), .. } => {}
            Phase::Stopped | Phase::Stopping { then: Then::Stop, .. } => self.on_start(out),
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } if self.want == Want::Stopped => {
                self.on_start(out);
            }
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } => {
                self.called = waited_for;
                out.push(self.denied_unconfigured("reconnect"));
            }
            Phase::Stopping { then: Then::Over, .. } | Phase::Over => {
                self.called = waited_for;
                out.push(self.denied_removed("reconnect"));
            }
            // Phases of processes only.
            Phase::FallingAsleep { .. } | Phase::Backoff { .. } | Phase::Dormant { .. } => {}
        }
    }

    // The run of a remote instance ended without a request.
    pub(super) fn lost(
        &mut self,
        now: Instant,
        ended: &Phase,
        connected: bool,
        exit: WorkerExit,
        out: &mut Vec<Effect>,
    ) {
        // Callers of an established connection were already admitted and no longer count. Otherwise a server that
        // disconnects right after the handshake would be retried for them without a pause.
        let is_attempt = matches!(ended, Phase::Starting { .. } | Phase::Undiscovered { attempt: 0, .. });
        self.called &= is_attempt;
        let failure = match exit.cause {
            ExitCause::Lost(failure) => failure,
            ExitCause::Panicked(how) => Failure::sent(FailureKind::Panicked(how)),
            // The session ended by itself.
            cause => Failure::sent(FailureKind::Broken(WorkerExit::because(cause).reason())),
        };
        let reason = failure.to_string();
        self.last_error = Some(reason.clone());
        self.tell_disconnected(false, out);
        let class = retry::class(&failure.kind);
        if class == Class::Unauthorized {
            // The credentials changed while the server rejected the old ones. A change longer ago does not count: every
            // request with the old credentials has been answered since.
            let patience = self.spec.policy.session.request_timeout_max;
            if self.newer_credentials.take().is_some_and(|since| now.saturating_duration_since(since) < patience) {
                self.moves(Cause::Lost, Some(format!("{reason}; its credentials have changed meanwhile")), out);
                self.attempt_now(0, None, out);
                return;
            }
            self.phase = Phase::Reauth;
            self.moves(Cause::AuthRefused, Some(reason), out);
            self.refuse(out);
            return;
        }
        // A failure of an established connection begins a new schedule; a failed attempt continues its own. An attempt
        // succeeds only when the lists are read: a server that disconnects after the handshake is not retried every
        // second.
        let (attempt, resume) = match ended {
            Phase::Starting { why: Why::Reconnect { attempt, resume }, .. }
            | Phase::Undiscovered { why: Why::Reconnect { attempt, resume }, .. } => {
                match resume.filter(|until| *until > now) {
                    Some(until) => (*attempt, Some(until)),
                    None => (attempt + 1, None),
                }
            }
            _ => (1, None),
        };
        let policy = &self.spec.policy.reconnect;
        let offline = matches!(class, Class::Unreachable) || (class == Class::Expired && connected);
        let retry_at = if policy.attempts_max.is_some_and(|most| attempt > most) {
            self.phase = Phase::Exhausted { attempts: attempt - 1 };
            self.moves_on(Cause::Failed, "Connection failed after max retries".to_owned(), out);
            None
        } else {
            let delay = restart::reconnect_delay(policy, attempt);
            let delay = self.dice.spread(delay, policy.jitter_percent);
            let asked = retry::asked_pause(&failure.kind);
            let until = resume.unwrap_or(now + delay).max(now + asked);
            self.phase = Phase::Reconnecting { until, attempt };
            let (cause, message) = match class {
                Class::Unreachable => (Cause::Lost, format!("Server unreachable: {reason}")),
                _ if offline => (Cause::Lost, format!("Server disconnected: {reason}")),
                _ => (Cause::Failed, reason.clone()),
            };
            self.moves_on(cause, message, out);
            if resume != Some(until) {
                out.push(Effect::Tell(Told::Reconnecting { attempt, after: until.saturating_duration_since(now) }));
            }
            Some(until)
        };
        // The callers of this attempt receive its error; later callers trigger another attempt.
        if is_attempt {
            self.called = false;
            out.push(Effect::Unreachable { last_error: reason, retry_at });
        }
    }

    // Does not repeat the same status and message: a server that is unreachable for a week is reported once.
    fn moves_on(&mut self, cause: Cause, message: String, out: &mut Vec<Effect>) {
        let same = status::next(self.status, cause) == Some(self.status) && self.message.as_ref() == Some(&message);
        if !same {
            self.moves(cause, Some(message), out);
        }
    }

    // Reports a closed connection once for each established one.
    pub(super) fn tell_disconnected(&mut self, intentional: bool, out: &mut Vec<Effect>) {
        if std::mem::take(&mut self.told_connected) {
            self.revisions_told = self.revisions;
            out.push(Effect::Tell(Told::Disconnected { intentional }));
        }
    }

    // Also accepted while the lists are being read.
    pub(super) fn on_health(&mut self, run: Run, news: HealthNews, out: &mut Vec<Effect>) {
        if self.run() != Some(run) || matches!(self.phase, Phase::Stopping { .. }) {
            return;
        }
        (self.health, self.degraded) = match &news {
            HealthNews::Degraded { failures, last_error } => (Health::Degraded, Some((*failures, last_error.clone()))),
            HealthNews::Restored { .. } => (Health::Healthy, None),
        };
        out.push(Effect::Tell(Told::Health(news)));
    }

    // A completed handshake ends a degradation of the connection before.
    pub(super) fn is_well(&mut self, out: &mut Vec<Effect>) {
        self.health = Health::Healthy;
        if let Some((failures, last_error)) = self.degraded.take() {
            let last_error = Some(last_error);
            out.push(Effect::Tell(Told::Health(HealthNews::Restored { failures, last_error })));
        }
    }

    // The monotonic clock did not run during the suspension, so deadlines are moved earlier.
    pub(super) fn on_woke(&mut self, now: Instant, asleep: Duration, out: &mut Vec<Effect>) {
        let earlier = |at: Instant| at.checked_sub(asleep).unwrap_or(now);
        match &mut self.phase {
            Phase::Reconnecting { until, .. }
            | Phase::Backoff { until, .. }
            | Phase::Dormant { not_before: until, .. }
            | Phase::Queued { why: Why::Reconnect { resume: Some(until), .. }, .. }
            | Phase::Starting { why: Why::Reconnect { resume: Some(until), .. }, .. }
            | Phase::Undiscovered { why: Why::Reconnect { resume: Some(until), .. }, attempt: 0, .. } => {
                *until = earlier(*until);
            }
            Phase::Undiscovered { retry_at: Some(at), .. } => *at = earlier(*at),
            // The connection may have been lost without notice.
            Phase::Ready { run, .. } if self.spec.is_remote() => out.push(Effect::Check(*run)),
            // No deadline to move.
            Phase::Unconfigured
            | Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
        self.on_tick(now, None, out);
    }

    /// Returns true if the instance is in transition to a state that a person waits for.
    pub fn is_under_way(&self) -> bool {
        match &self.phase {
            Phase::Queued { .. } | Phase::Starting { .. } | Phase::Stopping { .. } => self.want == Want::Running,
            // The connection is established, and the lists are being read.
            Phase::Undiscovered { retry_at: None, .. } => true,
            Phase::Unconfigured
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => false,
        }
    }
}
