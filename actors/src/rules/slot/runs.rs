//! Events of a run: permit, handshake, discovery, end, and deadlines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Effect, Phase, Slot, Then, Told, Why};
use crate::model::catalogue::Catalogue;
use crate::model::event::{RestartReason, StopKind};
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::ids::Run;
use crate::model::remedy::Remedy;
use crate::model::remote::{Health, ServerInfo};
use crate::model::spec::Keep;
use crate::model::status::{Cause, Status};
use crate::rules::idle::{self, Activity};
use crate::rules::restart::{self, Verdict};

impl Slot {
    pub(super) fn on_granted(&mut self, now: Instant, run: Run, out: &mut Vec<Effect>) {
        let Phase::Queued { why, .. } = &self.phase else {
            self.on_granted_beside(now, run, out);
            return;
        };
        let why = why.clone();
        let wake = matches!(why, Why::Wake { .. });
        self.restarts += u64::from(matches!(why, Why::Again { .. }));
        let discover = !wake || self.catalogue.is_none();
        self.phase = Phase::Starting { run, why: why.clone(), since: now };
        self.hold_permit(now, run, self.spec.policy.session.permit_hold_max, out);
        self.pid = None;
        self.initialized_at = None;
        self.newer_credentials = None;
        self.dialled = self.is_remote().then_some(run);
        self.attempts += u32::from(self.is_remote());
        match why {
            // The status does not change before the run is ready: `online` for a sleeping instance, `offline` for a
            // lost connection.
            Why::Wake { .. } => {}
            Why::Reconnect { .. } if matches!(self.status, Status::Offline | Status::Error | Status::Connecting) => {}
            Why::Reconnect { .. } => self.moves(Cause::Attempt, Some("connecting".to_owned()), out),
            Why::First | Why::Again { .. } if self.is_remote() => {
                self.moves(Cause::Attempt, Some("connecting".to_owned()), out);
            }
            Why::First | Why::Again { .. } => self.moves(Cause::Attempt, Some("starting".to_owned()), out),
        }
        out.push(Effect::Spawn { run, spec: self.spec.clone(), discover });
    }

    pub(super) fn on_initialized(&mut self, now: Instant, run: Run, server: Arc<ServerInfo>, out: &mut Vec<Effect>) {
        self.on_initialized_beside(now, run, &server);
        let Phase::Starting { run: current, why, since } = &self.phase else { return };
        if *current != run {
            return;
        }
        let (why, since) = (why.clone(), *since);
        self.initialized_at = Some(now);
        self.introduced(Some(server));
        self.is_well(out);
        match why {
            // The tools are known, so calls are answered after the handshake.
            Why::Wake { .. } if self.catalogue.is_some() => self.ready(now, run, &why, since, out),
            Why::Wake { .. } => {}
            Why::First | Why::Again { .. } => self.moves(Cause::Initialized, None, out),
            // Waiting callers are admitted at once, and changes of the catalogue are discovered meanwhile.
            Why::Reconnect { .. } => {
                if self.status != Status::Connecting {
                    self.moves(Cause::Attempt, Some("Server recovered, re-discovering tools".to_owned()), out);
                }
                self.moves(Cause::Initialized, None, out);
                self.phase = Phase::Undiscovered { run, why, since, attempt: 0, retry_at: None };
                out.push(Effect::Admit(run));
            }
        }
    }

    // Adds a line of stdout that is not JSON-RPC to the status of a starting instance: it may be the reason why the
    // server does not answer.
    pub(super) fn on_printed(&mut self, run: Run, line: &str, out: &mut Vec<Effect>) {
        if let Phase::Starting { run: current, why, .. } = &self.phase
            && *current == run
            && !matches!(why, Why::Wake { .. })
        {
            self.remark(Some(format!("starting; its stdout is not JSON-RPC: {line}")), out);
        }
    }

    // A call succeeded although the lists could not be read: they are read again before the scheduled time.
    pub(super) fn on_recovered(&mut self, run: Run, out: &mut Vec<Effect>) {
        if let Phase::Undiscovered { run: current, retry_at: retry_at @ Some(_), .. } = &mut self.phase
            && *current == run
        {
            *retry_at = None;
            self.moves(Cause::Attempt, Some("Server recovered, re-discovering tools".to_owned()), out);
            self.moves(Cause::Initialized, None, out);
            out.push(Effect::Discover(run));
        }
    }

    pub(super) fn on_discovered(&mut self, now: Instant, run: Run, catalogue: Arc<Catalogue>, out: &mut Vec<Effect>) {
        if self.run() != Some(run) {
            self.on_discovered_beside(now, run, catalogue, out);
            return;
        }
        match &self.phase {
            // The server announced a change and its lists were read again.
            Phase::Ready { .. } => self.learn(catalogue, out),
            Phase::Starting { why, since, .. } => {
                let (why, since) = (why.clone(), *since);
                if !matches!(why, Why::Wake { .. }) {
                    self.moves(Cause::Discovered, None, out);
                }
                self.learn(catalogue, out);
                self.ready(now, run, &why, since, out);
            }
            Phase::Undiscovered { why, since, .. } => {
                let (why, since) = (why.clone(), *since);
                if self.status == Status::Error {
                    self.moves(Cause::Initialized, None, out);
                }
                self.moves(Cause::Discovered, None, out);
                self.learn(catalogue, out);
                self.ready(now, run, &why, since, out);
            }
            // The run is ending, perhaps under another configuration: its lists are no longer reported.
            Phase::FallingAsleep { .. } | Phase::Stopping { .. } => {}
            Phase::Unconfigured
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Queued { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }

    pub(super) fn learn(&mut self, catalogue: Arc<Catalogue>, out: &mut Vec<Effect>) {
        self.recalled = false;
        self.clear_error();
        let catalogue = match &self.catalogue {
            Some(before) if !catalogue.unread.is_empty() => Arc::new(catalogue.kept_from(before)),
            Some(_) | None => catalogue,
        };
        let before = self.catalogue.replace(catalogue.clone());
        self.revisions.read(before.as_deref(), &catalogue);
        out.push(Effect::Tell(Told::Discovered { before, now: catalogue }));
    }

    // `pause` is the minimum delay that the server requests.
    pub(super) fn on_discovery_failed(
        &mut self,
        now: Instant,
        run: Run,
        reason: String,
        pause: Duration,
        out: &mut Vec<Effect>,
    ) {
        if self.run() != Some(run) {
            self.on_discovery_failed_beside(run, &reason, out);
            return;
        }
        let (why, since, attempt) = match &self.phase {
            Phase::Starting { why, since, .. } => (why.clone(), *since, 1),
            Phase::Undiscovered { why, since, attempt, .. } => (why.clone(), *since, attempt + 1),
            // The old catalogue stays; the next `list_changed` triggers another discovery.
            Phase::Ready { .. } => {
                self.last_error = Some(reason);
                return;
            }
            Phase::Unconfigured
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Queued { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => return,
        };
        let policy = &self.spec.policy.reconnect;
        let delay = self.dice.spread(restart::reconnect_delay(policy, attempt), policy.jitter_percent).max(pause);
        let message = format!("cannot read its tools: {reason}; again in {}", restart::in_seconds(delay));
        self.last_error = Some(reason);
        self.phase = Phase::Undiscovered { run, why, since, attempt, retry_at: Some(now + delay) };
        self.moves(Cause::Failed, Some(message), out);
        // Waiting callers are admitted, because a successful call shows that the server has recovered.
        out.push(Effect::Admit(run));
    }

    pub(super) fn on_ended(&mut self, now: Instant, run: Run, exit: WorkerExit, out: &mut Vec<Effect>) {
        self.release(run, out);
        if self.run() != Some(run) {
            self.on_ended_beside(now, run, exit, out);
            return;
        }
        let old_pid = exit.pid.or(self.pid);
        // After a panic the exit does not contain the duration of the run.
        let connected = exit.ran.is_some() || self.initialized_at.is_some();
        self.last_exit = Some(exit.reason());
        self.pid = None;
        self.initialized_at = None;
        self.health = Health::Unknown;
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Stopping { kind, then, .. } => {
                if self.dialled == Some(run) {
                    // The removal of a connection is reported in every state.
                    self.told_connected |= kind == StopKind::Uninstall;
                    self.tell_disconnected(true, out);
                } else if self.removal.is_none() {
                    out.push(Effect::Tell(Told::Stopped { kind, exit: exit.clone() }));
                }
                if self.lingers(kind, &then, out) {
                    return;
                }
                match then {
                    Then::Stop => {
                        self.stopped(out);
                        self.refuse(out);
                    }
                    Then::AwaitConfig => self.await_config(out),
                    Then::Over => self.over(Some(exit), out),
                    Then::Again(why) => self.again(why, out),
                }
            }
            ended @ (Phase::Starting { .. } | Phase::Ready { .. } | Phase::Undiscovered { .. }) if self.is_remote() => {
                self.lost(now, &ended, connected, exit, out);
            }
            Phase::FallingAsleep { since, idle, .. } if exit.cause == ExitCause::Asked => {
                let last_activity = since.checked_sub(idle).unwrap_or(since);
                out.push(Effect::Tell(Told::Dormant { pid: old_pid, idle, last_activity }));
                self.sleeps(now, now);
            }
            Phase::Ready { .. } if self.has_successor() => self.succeeds(now, &exit, old_pid, out),
            // `FallingAsleep`: the process exited by itself just before it was stopped.
            Phase::Ready { .. } | Phase::FallingAsleep { .. } => self.unwanted(now, &exit, old_pid, true, out),
            Phase::Starting { why, .. } if matches!(exit.cause, ExitCause::Machine(_)) => {
                self.postpone(now, why, &exit, out);
            }
            Phase::Starting { .. } | Phase::Undiscovered { .. } => self.unwanted(now, &exit, old_pid, false, out),
            // Phases without a run; excluded by the check above.
            Phase::Unconfigured
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Queued { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }

    // Repeats a start that the machine could not execute. It is not charged to any budget and does not count as a
    // restart.
    fn postpone(&mut self, now: Instant, why: Why, exit: &WorkerExit, out: &mut Vec<Effect>) {
        let (delay, message) = self.machine_fault(exit);
        match why {
            // The tools of a sleeping instance stay listed; only the message changes.
            Why::Wake { .. } => self.remark(Some(message), out),
            Why::First | Why::Again { .. } | Why::Reconnect { .. } => self.moves(Cause::Ended, Some(message), out),
        }
        self.restarts = self.restarts.saturating_sub(u64::from(matches!(why, Why::Again { .. })));
        self.phase = Phase::Backoff { until: now + delay, why };
    }

    // Counts a start that the machine could not execute. Returns the delay until the next one, and the status message.
    pub(super) fn machine_fault(&mut self, exit: &WorkerExit) -> (Duration, String) {
        self.machine_faults = self.machine_faults.saturating_add(1);
        let (delay, reason) = (restart::machine_fault_delay(self.machine_faults), exit.reason());
        let message = format!("the machine cannot start it, trying again in {}: {reason}", restart::in_seconds(delay));
        self.last_error = Some(reason);
        (delay, message)
    }

    // Charges every unwanted exit to the same budget, whatever its code.
    fn unwanted(&mut self, now: Instant, exit: &WorkerExit, old_pid: Option<u32>, ready: bool, out: &mut Vec<Effect>) {
        let crash = exit.is_crash();
        let policy = &self.spec.policy.restart;
        let verdict = self.history.charge(policy, now, crash, exit.ran.unwrap_or_default());
        out.push(Effect::ChargeTeam);
        let sleeps = ready && !crash && self.spec.keep != Keep::AlwaysOn;
        let reason = exit.reason();
        if crash {
            self.last_error = Some(reason.clone());
        }
        let tell = |count, will_restart| {
            let exit = exit.clone();
            Effect::Tell(if crash {
                Told::Crashed { exit, count, will_restart }
            } else {
                Told::Exited { exit, will_restart }
            })
        };
        match verdict {
            Verdict::GiveUp { exits, crashed } => {
                out.push(tell(exits, false));
                let message = restart::give_up_message(policy, exits, crashed, &reason);
                self.phase = Phase::Failed;
                self.moves(Cause::BudgetSpent, Some(message.clone()), out);
                let remedy = Remedy::Restart;
                out.push(Effect::Tell(Told::PermanentlyFailed { exits, last_error: reason, message, remedy }));
                self.refuse(out);
            }
            Verdict::Restart { delay, attempt } if sleeps => {
                out.push(tell(attempt, false));
                self.sleeps(now, now + delay);
            }
            Verdict::Restart { delay, attempt } => {
                out.push(tell(attempt, true));
                let again = match exit.cause {
                    ExitCause::Unresponsive => RestartReason::Unresponsive,
                    _ if crash => RestartReason::Crash,
                    _ => RestartReason::Exit,
                };
                let why = Why::Again { reason: again, old_pid, attempt };
                let when =
                    if delay.is_zero() { "now".to_owned() } else { format!("in {}", restart::in_seconds(delay)) };
                let message = format!("restarting {when} (attempt {attempt}): {reason}");
                self.moves(Cause::Ended, Some(message), out);
                if delay.is_zero() {
                    self.queue(why, out);
                } else {
                    self.phase = Phase::Backoff { until: now + delay, why };
                }
            }
        }
    }

    // Only instances that may sleep have a time for the next idle check.
    pub(super) fn on_make_room(&mut self, idle: Duration, out: &mut Vec<Effect>) {
        if let Phase::Ready { run, look_at: Some(_), .. } = self.phase
            && self.beside.is_none()
        {
            out.push(Effect::TrySleep { run, idle });
        }
    }

    pub(super) fn on_tick(&mut self, now: Instant, activity: Option<Activity>, out: &mut Vec<Effect>) {
        if let Some((run, until)) = self.permit
            && now >= until
        {
            self.release(run, out);
        }
        self.on_tick_beside(now, out);
        let alone = self.beside.is_none();
        match &mut self.phase {
            Phase::Backoff { until, why } if now >= *until => {
                let why = why.clone();
                let wake = matches!(why, Why::Wake { .. });
                if !wake {
                    self.moves(Cause::Attempt, Some("waiting for a start permit".to_owned()), out);
                }
                self.queue(why, out);
            }
            Phase::Reconnecting { until, attempt } if now >= *until => {
                let attempt = *attempt;
                self.attempt_now(attempt, None, out);
            }
            Phase::Undiscovered { run, retry_at, .. } if retry_at.is_some_and(|at| now >= at) => {
                *retry_at = None;
                out.push(Effect::Discover(*run));
            }
            Phase::Ready { run, since, look_at } if look_at.is_some_and(|at| now >= at) => {
                let policy = &self.spec.policy.idle;
                let verdict = activity.map(|activity| idle::look(policy, *since, activity, now));
                *look_at = match verdict {
                    Some(idle::Verdict::LookAgain(at)) => at,
                    // The sleep is refused if a call has arrived: then this is the time of the next check.
                    Some(idle::Verdict::Idle(idle)) if alone => {
                        out.push(Effect::TrySleep { run: *run, idle });
                        idle::next_look(policy, *since, now)
                    }
                    // A rolling update is in progress and takes precedence.
                    Some(idle::Verdict::Idle(_)) | None => idle::next_look(policy, *since, now),
                };
            }
            // No deadline has passed.
            Phase::Unconfigured
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }

    pub(super) fn on_sleep(&mut self, now: Instant, run: Run, idle: Duration, out: &mut Vec<Effect>) {
        match self.phase {
            Phase::Ready { run: current, .. } if current == run => {
                self.phase = Phase::FallingAsleep { run, since: now, idle };
                out.push(Effect::Stop(run));
            }
            // Unreachable: `Sleep` is sent in the same handler that tried the sleep, so no other input intervenes.
            Phase::Unconfigured
            | Phase::Reconnecting { .. }
            | Phase::Reauth
            | Phase::Exhausted { .. }
            | Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }
}
