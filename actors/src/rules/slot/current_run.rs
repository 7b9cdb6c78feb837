//! Events of the current run: permit, handshake, discovery, end, and deadlines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{AfterStop, Down, DownState, RunState, Slot, SlotEffect, SlotEvent, StartReason, Up};
use crate::model::catalogue::Catalogue;
use crate::model::event::{RestartReason, StopKind};
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::ids::RunNumber;
use crate::model::remedy::Remedy;
use crate::model::remote::{ServerHealth, ServerInfo};
use crate::model::spec::ProcessLifetime;
use crate::model::status::{Status, StatusCause};
use crate::rules::idle::{self, RunActivity};
use crate::rules::restart::{self, RestartVerdict};

impl Slot {
    pub(super) fn on_granted(&mut self, now: Instant, run: RunNumber, out: &mut Vec<SlotEffect>) {
        let Down(DownState::Queued { why, .. }) = &self.phase else {
            self.on_second_run_granted(now, run, out);
            return;
        };
        let why = why.clone();
        let wake = matches!(why, StartReason::Wake { .. });
        self.record.restarts += u64::from(matches!(why, StartReason::Restart { .. }));
        let discover = !wake || self.record.catalogue.is_none();
        self.phase = Up { run, state: RunState::Starting { why: why.clone(), since: now } };
        self.hold_permit(now, run, self.spec.policy.session.permit_hold_max, out);
        self.pid = None;
        self.initialized_at = None;
        self.credentials_changed_at = None;
        self.connection_run = self.is_remote().then_some(run);
        self.record.attempts += u32::from(self.is_remote());
        match why {
            // The status does not change before the run is ready: `online` for a sleeping instance, `offline` for a
            // lost connection.
            StartReason::Wake { .. } => {}
            StartReason::Reconnect { .. }
                if matches!(self.status, Status::Offline | Status::Error | Status::Connecting) => {}
            StartReason::Reconnect { .. } => self.transition(StatusCause::Attempt, Some("connecting".to_owned()), out),
            StartReason::First | StartReason::Restart { .. } if self.is_remote() => {
                self.transition(StatusCause::Attempt, Some("connecting".to_owned()), out);
            }
            // An adoption is not queued.
            StartReason::First | StartReason::Restart { .. } | StartReason::Adopt => {
                self.transition(StatusCause::Attempt, Some("starting".to_owned()), out);
            }
        }
        out.push(SlotEffect::Spawn { run, spec: self.spec.clone(), discover, adopts: false });
    }

    // Takes over the server of an earlier satellite. It runs already, so it needs no permit.
    pub(super) fn adopt(&mut self, now: Instant, run: RunNumber, out: &mut Vec<SlotEffect>) {
        self.transition(StatusCause::Accepted, Some("the server runs already".to_owned()), out);
        self.transition(StatusCause::Attempt, Some("continuing the session of the running server".to_owned()), out);
        self.phase = Up { run, state: RunState::Starting { why: StartReason::Adopt, since: now } };
        out.push(SlotEffect::Spawn { run, spec: self.spec.clone(), discover: true, adopts: true });
    }

    // `now` is the time of the handshake, which is earlier for an adopted server.
    pub(super) fn on_initialized(
        &mut self,
        now: Instant,
        run: RunNumber,
        server: Arc<ServerInfo>,
        out: &mut Vec<SlotEffect>,
    ) {
        let Up { state: RunState::Starting { why, since }, .. } = &self.phase else { return };
        let (why, since) = (why.clone(), *since);
        self.initialized_at = Some(now);
        self.set_server(Some(server));
        self.restore_health(out);
        match why {
            // The tools are known, so calls are answered after the handshake.
            StartReason::Wake { .. } if self.record.catalogue.is_some() => {
                self.become_ready(now, run, &why, since, out);
            }
            StartReason::Wake { .. } => {}
            StartReason::First | StartReason::Restart { .. } => self.transition(StatusCause::Initialized, None, out),
            // Waiting callers are admitted at once, and changes of the catalogue are discovered meanwhile.
            StartReason::Reconnect { .. } | StartReason::Adopt => {
                if self.status != Status::Connecting {
                    self.transition(
                        StatusCause::Attempt,
                        Some("Server recovered, re-discovering tools".to_owned()),
                        out,
                    );
                }
                self.transition(StatusCause::Initialized, None, out);
                self.set_run_state(RunState::Undiscovered { why, since, attempt: 0, retry_at: None });
                out.push(SlotEffect::Admit(run));
            }
        }
    }

    // Adds a line of stdout that is not JSON-RPC to the status of a starting instance: it may be the reason why the
    // server does not answer.
    pub(super) fn on_stdout_line(&mut self, line: &str, out: &mut Vec<SlotEffect>) {
        if let Up { state: RunState::Starting { why, .. }, .. } = &self.phase
            && !matches!(why, StartReason::Wake { .. } | StartReason::Adopt)
        {
            self.set_message(Some(format!("starting; the server's stdout is not JSON-RPC: {line}")), out);
        }
    }

    // A call succeeded although the lists could not be read: they are read again before the scheduled time.
    pub(super) fn on_recovered(&mut self, run: RunNumber, out: &mut Vec<SlotEffect>) {
        if let Up { state: RunState::Undiscovered { retry_at: retry_at @ Some(_), .. }, .. } = &mut self.phase {
            *retry_at = None;
            self.transition(StatusCause::Attempt, Some("Server recovered, re-discovering tools".to_owned()), out);
            self.transition(StatusCause::Initialized, None, out);
            out.push(SlotEffect::Discover(run));
        }
    }

    pub(super) fn on_discovered(
        &mut self,
        now: Instant,
        run: RunNumber,
        catalogue: Arc<Catalogue>,
        out: &mut Vec<SlotEffect>,
    ) {
        let Up { state, .. } = &self.phase else { return };
        match state {
            // The server announced a change and its lists were read again.
            RunState::Ready { .. } => self.set_catalogue(catalogue, out),
            RunState::Starting { why, since } => {
                let (why, since) = (why.clone(), *since);
                if !matches!(why, StartReason::Wake { .. }) {
                    self.transition(StatusCause::Discovered, None, out);
                }
                self.set_catalogue(catalogue, out);
                self.become_ready(now, run, &why, since, out);
            }
            RunState::Undiscovered { why, since, .. } => {
                let (why, since) = (why.clone(), *since);
                if self.status == Status::Error {
                    self.transition(StatusCause::Initialized, None, out);
                }
                self.transition(StatusCause::Discovered, None, out);
                self.set_catalogue(catalogue, out);
                self.become_ready(now, run, &why, since, out);
            }
            // The run is ending, perhaps under another configuration: its lists are no longer reported.
            RunState::FallingAsleep { .. } | RunState::Stopping { .. } => {}
        }
    }

    pub(super) fn set_catalogue(&mut self, catalogue: Arc<Catalogue>, out: &mut Vec<SlotEffect>) {
        self.record.catalogue_restored = false;
        self.clear_error();
        let catalogue = match &self.record.catalogue {
            Some(before) if !catalogue.unreadable.is_empty() => Arc::new(catalogue.with_unreadable_from(before)),
            Some(_) | None => catalogue,
        };
        let before = self.record.catalogue.replace(catalogue.clone());
        self.record.revisions.count_changes(before.as_deref(), &catalogue);
        out.push(SlotEffect::Emit(SlotEvent::Discovered { before, now: catalogue }));
    }

    // `pause` is the minimum delay that the server requests.
    pub(super) fn on_discovery_failed(
        &mut self,
        now: Instant,
        run: RunNumber,
        reason: String,
        pause: Duration,
        out: &mut Vec<SlotEffect>,
    ) {
        let Up { state, .. } = &self.phase else { return };
        let (why, since, attempt) = match state {
            RunState::Starting { why, since } => (why.clone(), *since, 1),
            RunState::Undiscovered { why, since, attempt, .. } => (why.clone(), *since, attempt + 1),
            // The old catalogue stays; the next `list_changed` triggers another discovery.
            RunState::Ready { .. } => {
                self.record.last_error = Some(reason);
                return;
            }
            RunState::FallingAsleep { .. } | RunState::Stopping { .. } => return,
        };
        let policy = &self.spec.policy.reconnect;
        let delay = self.rng.jitter(policy.backoff().delay(attempt), policy.jitter_percent).max(pause);
        let message =
            format!("cannot read the server's tools: {reason}; next attempt in {}", restart::format_seconds(delay));
        self.record.last_error = Some(reason);
        self.set_run_state(RunState::Undiscovered { why, since, attempt, retry_at: Some(now + delay) });
        self.transition(StatusCause::Failed, Some(message), out);
        // Waiting callers are admitted, because a successful call shows that the server has recovered.
        out.push(SlotEffect::Admit(run));
    }

    pub(super) fn on_ended(&mut self, now: Instant, run: RunNumber, exit: WorkerExit, out: &mut Vec<SlotEffect>) {
        let old_pid = exit.pid.or(self.pid);
        // After a panic the exit does not contain the duration of the run.
        let connected = exit.uptime.is_some() || self.initialized_at.is_some();
        self.record.last_exit = Some(exit.reason());
        self.pid = None;
        self.initialized_at = None;
        self.health = ServerHealth::Unknown;
        let Up { state, .. } = std::mem::replace(&mut self.phase, Down(DownState::Ended)) else { return };
        match state {
            RunState::Stopping { kind, then } => {
                if self.connection_run == Some(run) {
                    // The removal of a connection is reported in every state.
                    self.record.reported_connected |= kind == StopKind::Uninstall;
                    self.report_disconnected(true, out);
                } else if self.removal.is_none() {
                    out.push(SlotEffect::Emit(SlotEvent::Stopped { kind, exit: exit.clone() }));
                }
                if self.wait_for_second_run(kind, &then, out) {
                    return;
                }
                match then {
                    AfterStop::Stop => {
                        self.enter_stopped(out);
                        self.refuse_callers(out);
                    }
                    AfterStop::AwaitConfig => self.await_config(out),
                    AfterStop::End => self.finish(Some(exit), out),
                    AfterStop::StartAgain(why) => self.queue_restart(why, out),
                }
            }
            RunState::Starting { why: StartReason::Adopt, .. } => self.on_not_adopted(exit, old_pid, out),
            RunState::Starting { .. } | RunState::Ready { .. } | RunState::Undiscovered { .. } if self.is_remote() => {
                self.on_connection_lost(now, &state, connected, exit, out);
            }
            RunState::FallingAsleep { since, idle } if exit.cause == ExitCause::Requested => {
                let last_activity = since.checked_sub(idle).unwrap_or(since);
                out.push(SlotEffect::Emit(SlotEvent::Dormant { pid: old_pid, idle, last_activity }));
                self.enter_dormant(now, now);
            }
            RunState::Ready { .. } if self.has_successor() => self.replace_with_successor(now, &exit, old_pid, out),
            // `FallingAsleep`: the process exited by itself just before it was stopped.
            RunState::Ready { .. } | RunState::FallingAsleep { .. } => {
                self.on_unwanted_exit(now, &exit, old_pid, true, out);
            }
            RunState::Starting { why, .. } if matches!(exit.cause, ExitCause::Machine(_)) => {
                self.postpone(now, why, &exit, out);
            }
            RunState::Starting { .. } | RunState::Undiscovered { .. } => {
                self.on_unwanted_exit(now, &exit, old_pid, false, out);
            }
        }
    }

    // Repeats a start that the machine could not execute. It is not charged to any budget and does not count as a
    // restart.
    fn postpone(&mut self, now: Instant, why: StartReason, exit: &WorkerExit, out: &mut Vec<SlotEffect>) {
        let (delay, message) = self.record_machine_fault(exit);
        match why {
            // The tools of a sleeping instance stay listed; only the message changes.
            StartReason::Wake { .. } => self.set_message(Some(message), out),
            StartReason::First | StartReason::Restart { .. } | StartReason::Reconnect { .. } | StartReason::Adopt => {
                self.transition(StatusCause::Ended, Some(message), out);
            }
        }
        self.record.restarts =
            self.record.restarts.saturating_sub(u64::from(matches!(why, StartReason::Restart { .. })));
        self.phase = Down(DownState::Backoff { until: now + delay, why });
    }

    // The session with the server of an earlier satellite could not be continued, for whatever reason: the loss of its
    // satellite is not the fault of the server. It is started again, without charge and without delay.
    fn on_not_adopted(&mut self, exit: WorkerExit, old_pid: Option<u32>, out: &mut Vec<SlotEffect>) {
        let reason = exit.reason();
        self.record.last_error = Some(reason.clone());
        out.push(SlotEffect::Emit(SlotEvent::NotAdopted { exit }));
        self.transition(StatusCause::Ended, Some(format!("restarting now: {reason}")), out);
        self.queue_start(StartReason::Restart { reason: RestartReason::Adoption, old_pid, attempt: 0 }, out);
    }

    // Counts a start that the machine could not execute. Returns the delay until the next one, and the status message.
    pub(super) fn record_machine_fault(&mut self, exit: &WorkerExit) -> (Duration, String) {
        self.machine_faults = self.machine_faults.saturating_add(1);
        let (delay, reason) = (restart::MACHINE_FAULT_BACKOFF.delay(self.machine_faults), exit.reason());
        let message = format!(
            "the machine cannot start the server; next attempt in {}: {reason}",
            restart::format_seconds(delay)
        );
        self.record.last_error = Some(reason);
        (delay, message)
    }

    // Charges every unwanted exit to the same budget, whatever its code.
    fn on_unwanted_exit(
        &mut self,
        now: Instant,
        exit: &WorkerExit,
        old_pid: Option<u32>,
        ready: bool,
        out: &mut Vec<SlotEffect>,
    ) {
        let crash = exit.is_crash();
        let policy = &self.spec.policy.restart;
        let verdict = self.record.history.charge(policy, now, crash, exit.uptime.unwrap_or_default());
        out.push(SlotEffect::ChargeTeam);
        let sleeps = ready && !crash && self.spec.lifetime != ProcessLifetime::AlwaysOn;
        let reason = exit.reason();
        if crash {
            self.record.last_error = Some(reason.clone());
        }
        let event = |count, will_restart| {
            let exit = exit.clone();
            SlotEffect::Emit(if crash {
                SlotEvent::Crashed { exit, count, will_restart }
            } else {
                SlotEvent::Exited { exit, will_restart }
            })
        };
        match verdict {
            RestartVerdict::GiveUp { exits, crashed } => {
                out.push(event(exits, false));
                let message = restart::give_up_message(policy, exits, crashed, &reason);
                self.phase = Down(DownState::Failed);
                self.transition(StatusCause::BudgetSpent, Some(message.clone()), out);
                let remedy = Remedy::Restart;
                out.push(SlotEffect::Emit(SlotEvent::PermanentlyFailed { exits, last_error: reason, message, remedy }));
                self.refuse_callers(out);
            }
            RestartVerdict::Restart { delay, attempt } if sleeps => {
                out.push(event(attempt, false));
                self.enter_dormant(now, now + delay);
            }
            RestartVerdict::Restart { delay, attempt } => {
                out.push(event(attempt, true));
                let again = match exit.cause {
                    ExitCause::Unresponsive => RestartReason::Unresponsive,
                    _ if crash => RestartReason::Crash,
                    _ => RestartReason::Exit,
                };
                let why = StartReason::Restart { reason: again, old_pid, attempt };
                let when =
                    if delay.is_zero() { "now".to_owned() } else { format!("in {}", restart::format_seconds(delay)) };
                let message = format!("restarting {when} (attempt {attempt}): {reason}");
                self.transition(StatusCause::Ended, Some(message), out);
                if delay.is_zero() {
                    self.queue_start(why, out);
                } else {
                    self.phase = Down(DownState::Backoff { until: now + delay, why });
                }
            }
        }
    }

    // Only instances that may sleep have a time for the next idle check.
    pub(super) fn on_free_memory(&mut self, idle: Duration, out: &mut Vec<SlotEffect>) {
        if let Up { run, state: RunState::Ready { idle_check_at: Some(_), .. } } = self.phase
            && self.second_run.is_none()
        {
            out.push(SlotEffect::TrySleep { run, idle });
        }
    }

    pub(super) fn on_tick(&mut self, now: Instant, activity: Option<RunActivity>, out: &mut Vec<SlotEffect>) {
        if let Some((run, until)) = self.permit
            && now >= until
        {
            self.release_permit(run, out);
        }
        self.on_second_run_tick(now, out);
        let may_sleep = self.second_run.is_none();
        match &mut self.phase {
            Down(DownState::Backoff { until, why }) if now >= *until => {
                let why = why.clone();
                let wake = matches!(why, StartReason::Wake { .. });
                if !wake {
                    self.transition(StatusCause::Attempt, Some("waiting for a start permit".to_owned()), out);
                }
                self.queue_start(why, out);
            }
            Down(DownState::Reconnecting { until, attempt }) if now >= *until => {
                let attempt = *attempt;
                self.queue_attempt(attempt, None, out);
            }
            Up { run, state: RunState::Undiscovered { retry_at, .. } } if retry_at.is_some_and(|at| now >= at) => {
                *retry_at = None;
                out.push(SlotEffect::Discover(*run));
            }
            Up { run, state: RunState::Ready { since, idle_check_at } }
                if idle_check_at.is_some_and(|at| now >= at) =>
            {
                let policy = &self.spec.policy.idle;
                let verdict = activity.map(|activity| idle::check(policy, *since, activity, now));
                *idle_check_at = match verdict {
                    Some(idle::IdleVerdict::CheckAgain(at)) => at,
                    // The sleep is refused if a call has arrived: then this is the time of the next check.
                    Some(idle::IdleVerdict::Idle(idle)) if may_sleep => {
                        out.push(SlotEffect::TrySleep { run: *run, idle });
                        idle::next_check(policy, *since, now)
                    }
                    // A rolling update is in progress and takes precedence.
                    Some(idle::IdleVerdict::Idle(_)) | None => idle::next_check(policy, *since, now),
                };
            }
            // No deadline has passed.
            Up { .. } | Down(_) => {}
        }
    }

    // The state is always `Ready`: `Sleep` is sent in the same handler that tried the sleep.
    pub(super) fn on_sleep(&mut self, now: Instant, run: RunNumber, idle: Duration, out: &mut Vec<SlotEffect>) {
        if self.is_ready() {
            self.set_run_state(RunState::FallingAsleep { since: now, idle });
            out.push(SlotEffect::Stop(run));
        }
    }

    pub(super) fn set_run_state(&mut self, new: RunState) {
        if let Up { state, .. } = &mut self.phase {
            *state = new;
        }
    }
}
