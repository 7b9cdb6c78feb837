//! What is special about an instance whose server is somewhere else: it has a connection instead of a process, which is
//! tried again for ever where the policy says so, and credentials that can change while it runs.
//!
//! ```text
//!             lost, or not reached                 its time, a call, a person
//!  Ready ──────────────────────────▶ Reconnecting ────────────────────────────▶ Queued ─▶ Starting
//!    ▲  │  │                          ▲        │                                            │   │
//!    │  │  └─ refused ─▶ Reauth       │        └ once too often ─▶ Exhausted                │   │
//!    │  │                             └──────────────────────────────── not reached ────────┘   │
//!    │  └──────────────── forced: Stopping ─▶ Queued                                            │
//!    └───────────────────────── lists are read ◀── Undiscovered (takes calls) ◀── initialized ──┘
//! ```

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

/// What a health check has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthNews {
    /// So many checks in a row have failed.
    Degraded {
        /// How many.
        failures: u32,
        /// The last one's reason.
        last_error: String,
    },
    /// It answers again.
    Restored {
        /// After so many.
        failures: u32,
        /// The last one's reason.
        last_error: Option<String>,
    },
}

/// Where a remote instance is that is not connected, as far as a new supervisor must know.
#[derive(Debug, Clone)]
pub(super) enum Away {
    Reconnecting {
        until: Instant,
        attempt: u32,
    },
    /// An attempt was under way.
    Attempting {
        attempt: u32,
    },
    Reauth,
    Exhausted {
        attempts: u32,
    },
}

impl Slot {
    /// Whether its server is somewhere else.
    pub fn is_remote(&self) -> bool {
        self.spec.is_remote()
    }

    /// The connection of a remote instance.
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
            // A process's.
            Phase::FallingAsleep { .. } | Phase::Dormant { .. } | Phase::Backoff { .. } | Phase::Failed => {
                Connection::Disconnected
            }
        };
        self.is_remote().then_some(connection)
    }

    pub(super) fn away(&self) -> Option<Away> {
        match &self.phase {
            Phase::Reconnecting { until, attempt } => Some(Away::Reconnecting { until: *until, attempt: *attempt }),
            // An attempt that was interrupted has not happened: its schedule goes on, or it is made again.
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

    /// Its status says that it was lost or not reached; an attempt that is under way changes that only when it succeeds.
    fn is_known_to_be_away(&self) -> bool {
        matches!(self.status, Status::Offline | Status::Error)
    }

    /// An attempt at once. What was scheduled goes on if it fails and nobody but a caller had wanted it.
    pub(super) fn attempt_now(&mut self, attempt: u32, resume: Option<Instant>, out: &mut Vec<Effect>) {
        self.queue(Why::Reconnect { attempt, resume }, out);
    }

    /// A person: give up the connection, if there is one, and make another.
    pub(super) fn on_reconnect(&mut self, out: &mut Vec<Effect>) {
        if !self.is_remote() {
            return self.on_restart(out);
        }
        // A person waits for it: in front of those that nobody waits for.
        let waited_for = std::mem::replace(&mut self.called, true);
        match &mut self.phase {
            Phase::Ready { .. } | Phase::Undiscovered { .. } => {
                let again = Why::Reconnect { attempt: 0, resume: None };
                self.end_run(StopKind::Manual, Then::Again(again), out);
                self.moves(Cause::Asked, Some("reconnecting on request".to_owned()), out);
            }
            // The timer is cancelled and the backoff begins anew.
            Phase::Reconnecting { .. } => self.attempt_now(0, None, out),
            // A remote instance fails for good only where it was set aside for a fault of ours.
            Phase::Reauth | Phase::Exhausted { .. } | Phase::Failed => {
                self.moves(Cause::Asked, Some("reconnecting on request".to_owned()), out);
                self.attempt_now(0, None, out);
            }
            // It is under way already; if it fails the backoff begins anew.
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
            // A process's.
            Phase::FallingAsleep { .. } | Phase::Backoff { .. } | Phase::Dormant { .. } => {}
        }
    }

    /// The run of a remote instance ended unasked.
    pub(super) fn lost(
        &mut self,
        now: Instant,
        ended: &Phase,
        connected: bool,
        exit: WorkerExit,
        out: &mut Vec<Effect>,
    ) {
        // Who waited was let in when it was there, or waits for this attempt, which has failed: one that greets and goes
        // before anybody is in would else be tried for them without a pause.
        let is_attempt = matches!(ended, Phase::Starting { .. } | Phase::Undiscovered { attempt: 0, .. });
        self.called &= is_attempt;
        let failure = match exit.cause {
            ExitCause::Lost(failure) => failure,
            ExitCause::Panicked(how) => Failure::sent(FailureKind::Panicked(how)),
            // A session that ended by itself although it was not asked to.
            cause => Failure::sent(FailureKind::Broken(WorkerExit::because(cause).reason())),
        };
        let reason = failure.to_string();
        self.last_error = Some(reason.clone());
        self.tell_disconnected(false, out);
        let class = retry::class(&failure.kind);
        if class == Class::Unauthorized {
            // They have changed while it was found out that the old ones are not accepted. What was sent with those has been
            // answered by now if that is long ago.
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
        // What fails while connected begins a schedule; a failed attempt goes on with its own. It has succeeded when the
        // lists are read: a server that greets and goes is not tried every second.
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
        // Whoever waited for this attempt has waited for it; whoever comes later makes another.
        if is_attempt {
            self.called = false;
            out.push(Effect::Unreachable { last_error: reason, retry_at });
        }
    }

    /// The same as before is no news: a server that is away for a week is told once.
    fn moves_on(&mut self, cause: Cause, message: String, out: &mut Vec<Effect>) {
        let same = status::next(self.status, cause) == Some(self.status) && self.message.as_ref() == Some(&message);
        if !same {
            self.moves(cause, Some(message), out);
        }
    }

    /// Once for each time that it was told to be there.
    pub(super) fn tell_disconnected(&mut self, intentional: bool, out: &mut Vec<Effect>) {
        if std::mem::take(&mut self.told_connected) {
            self.revisions_told = self.revisions;
            out.push(Effect::Tell(Told::Disconnected { intentional }));
        }
    }

    /// What checks have found, also of one whose lists are still being read.
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

    /// It has shaken hands, and so it is well: what checks had found of a connection before this one is over.
    pub(super) fn is_well(&mut self, out: &mut Vec<Effect>) {
        self.health = Health::Healthy;
        if let Some((failures, last_error)) = self.degraded.take() {
            let last_error = Some(last_error);
            out.push(Effect::Tell(Told::Health(HealthNews::Restored { failures, last_error })));
        }
    }

    /// The machine was suspended for so long, and no clock of ours has seen it.
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
            // Its connections may be dead, and nobody has told.
            Phase::Ready { run, .. } if self.spec.is_remote() => out.push(Effect::Check(*run)),
            // Nothing of theirs is overdue.
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

    /// Whether it is on its way to an outcome that a person waits for.
    pub fn is_under_way(&self) -> bool {
        match &self.phase {
            Phase::Queued { .. } | Phase::Starting { .. } | Phase::Stopping { .. } => self.want == Want::Running,
            // Connected, and its lists are being read.
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
