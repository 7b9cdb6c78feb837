//! State machine for the life of one instance: requested state × phase × input → effects. The supervisor of the team
//! executes the effects and decides nothing itself.
//!
//! ```text
//!                 ┌────────────── Update ──────────────┐
//!  Unconfigured ──┘                                    ▼
//!                       Granted            Initialized, Discovered
//!  Queued ───────────────────────▶ Starting ──────────────────────▶ Ready ─idle─▶ FallingAsleep ──▶ Dormant
//!    ▲  ▲                             │  │ └─▶ Undiscovered ──retry──▶ │ └────────── exit 0 ──────────▶ │
//!    │  └──── the delay is over ──────┼──┼──── Backoff ◀──crash, exit──┘                                │
//!    │                                │  └──── Failed  ◀──budget reached                                │
//!    └───────────────── Call ─────────┼─────────────────────────────────────────────────────────────────┘
//!                                     ▼
//!                 Stopping, then: Stopped │ started again │ Ended
//! ```
//!
//! An instance whose server still runs since an earlier satellite begins in `Starting`, without a permit: it adopts the
//! server.
//!
//! One run accepts calls, and a restart waits until the old run has ended. During a rolling update a second run exists
//! beside it (`second_run.rs`). Remote instances have a connection instead of a process (`remote.rs`, with their diagram).
//!
//! This file defines the slot. `memo.rs` contains the state that outlives a supervisor, `requests.rs` the requests of
//! people, configuration and callers, `current_run.rs` and `second_run.rs` the events of runs.
//!
//! A phase is `Up` with a run or `Down` without one; the diagrams omit this level. A status transition that is not in
//! the table is refused: the supervisor logs it, and nothing changes. Events name their run, and only [`Slot::handle`]
//! compares it: an event of an old run changes no decision, but it settles what belongs to that run, such as its permit.

mod current_run;
mod effect;
mod memo;
mod phase;
mod remote;
mod requests;
mod second_run;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use effect::{HealthChange, SlotEffect, SlotEvent, SlotInput};
use memo::RejectedUpdate;
pub use memo::{SlotMemo, SlotRecord};
use phase::SlotPhase::{Down, Up};
pub use phase::{AfterStop, DownState, RequestedState, RunState, SlotPhase, StartReason};
pub use second_run::SecondRun;

use super::jitter::JitterRng;
use super::{idle, restart};
use crate::model::era::Era;
use crate::model::event::{RestartReason, StopKind};
use crate::model::exit::{WorkerExit, refusal_message};
use crate::model::ids::RunNumber;
use crate::model::remedy::Remedy;
use crate::model::remote::{ServerHealth, ServerInfo};
use crate::model::spec::{InstanceSpec, ProcessLifetime};
use crate::model::status::{self, Status, StatusCause};

/// State of one instance, owned by the supervisor of its team.
#[derive(Debug)]
pub struct Slot {
    /// Specification of the instance.
    pub spec: Arc<InstanceSpec>,
    /// State requested by a person.
    pub requested_state: RequestedState,
    /// Phase of the life of the instance.
    pub phase: SlotPhase,
    /// Status shown to the user.
    pub status: Status,
    /// Reason of the status.
    pub message: Option<String>,
    /// Process ID of the current run.
    pub pid: Option<u32>,
    /// Time at which the current run was initialized.
    pub initialized_at: Option<Instant>,
    /// Health of the server.
    pub health: ServerHealth,
    /// Part that the next supervisor takes over.
    pub record: SlotRecord,
    /// Second run, during a rolling update.
    pub second_run: Option<SecondRun>,
    second_server: Option<Arc<ServerInfo>>,
    rng: JitterRng,
    permit: Option<(RunNumber, Instant)>,
    // True if a caller waits, or has waited, for the start in progress.
    has_caller: bool,
    // Time of the last change of credentials since the current run was started.
    credentials_changed_at: Option<Instant>,
    // Consecutive starts that the machine could not execute.
    machine_faults: u32,
    // Run that is a connection and not a process. An update can change the kind of the instance while an old run ends.
    connection_run: Option<RunNumber>,
    // Set during a removal: whether the instance was active, and whether it was asleep.
    removal: Option<(bool, bool)>,
}

impl Slot {
    /// Creates a new instance. Returns it with the first effects. `rng` varies its delays.
    pub fn new(spec: Arc<InstanceSpec>, rng: JitterRng) -> (Self, Vec<SlotEffect>) {
        let mut slot = Self::blank(spec, rng);
        let mut out = Vec::new();
        if slot.spec.is_complete() {
            out.push(SlotEffect::Status { status: Status::Provisioning, message: None, remedy: None });
            slot.accept(&mut out);
        } else {
            slot.await_config(&mut out);
        }
        (slot, out)
    }

    /// Recreates an instance whose supervisor panicked, or one of an earlier satellite. Its state is kept, and a run
    /// that existed is started again. The state of an earlier satellite is reported anew.
    pub fn from_memo(spec: Arc<InstanceSpec>, rng: JitterRng, memo: &SlotMemo) -> (Self, Vec<SlotEffect>) {
        let mut slot = Self::blank(spec, rng);
        slot.record = memo.record.clone();
        let mut out = Vec::new();
        if memo.restored_at.is_some() && slot.spec.is_complete() {
            out.push(SlotEffect::Status { status: Status::Provisioning, message: None, remedy: None });
        }
        slot.report_disconnected(memo.stopped, &mut out);
        if memo.stopped {
            slot.requested_state = RequestedState::Stopped;
            if slot.spec.is_complete() {
                slot.enter_stopped(&mut out);
            } else {
                slot.await_config(&mut out);
            }
        } else if !slot.spec.is_complete() {
            slot.await_config(&mut out);
        } else if let Some(message) = memo.failed.as_ref().filter(|_| !slot.is_remote() || memo.restored_at.is_none()) {
            slot.phase = Down(DownState::Failed);
            slot.set_status(Status::PermanentlyFailed, Some(message.clone()), &mut out);
        } else if let Some((run, now)) = memo.adoption.zip(memo.restored_at) {
            slot.adopt(now, run, &mut out);
        } else if let Some((since, not_before)) = memo.dormant {
            slot.phase = Down(DownState::Dormant { since, not_before });
            if memo.restored_at.is_some() {
                slot.transition(StatusCause::Restored, None, &mut out);
            } else {
                slot.set_status(Status::Online, slot.update_rejection_message(), &mut out);
            }
        } else if let Some(restored_at) = memo.restored_at {
            slot.start_restored(memo, restored_at, &mut out);
        } else if let Some((state, status, message)) = memo.disconnected.as_ref().filter(|_| slot.is_remote()) {
            slot.set_status(*status, message.clone(), &mut out);
            slot.restore_disconnected(state.clone(), &mut out);
        } else {
            slot.set_status(Status::Connecting, Some("the team supervisor was restarted".to_owned()), &mut out);
            match memo.not_before {
                // The delay that was running stays in effect.
                Some(until) if !slot.is_remote() => {
                    let why = StartReason::Restart { reason: RestartReason::Crash, old_pid: None, attempt: 0 };
                    slot.phase = Down(DownState::Backoff { until, why });
                }
                _ => slot.start_again(RestartReason::Crash, None, &mut out),
            }
        }
        (slot, out)
    }

    /// Returns the run that accepts calls now.
    pub fn open_run(&self) -> Option<RunNumber> {
        match self.phase {
            Up { run, state: RunState::Ready { .. } | RunState::Undiscovered { .. } } => Some(run),
            Up { .. } | Down(_) => None,
        }
    }

    /// Returns true if the instance sleeps or is being woken.
    pub fn is_dormant(&self) -> bool {
        matches!(self.phase, Down(DownState::Dormant { .. }))
            || matches!(self.phase.start_reason(), Some(StartReason::Wake { .. }))
    }

    /// Returns the time of the next attempt, while a delay runs.
    pub fn next_retry_at(&self) -> Option<Instant> {
        match self.phase {
            Down(
                DownState::Backoff { until, why: StartReason::First | StartReason::Restart { .. } }
                | DownState::Reconnecting { until, .. },
            ) => Some(until),
            Up { state: RunState::Undiscovered { retry_at, .. }, .. } => retry_at,
            Up { .. } | Down(_) => None,
        }
    }

    /// Returns the number of the next or current attempt; `None` if it does not follow a failure.
    pub fn attempt(&self) -> Option<usize> {
        let attempt = match (&self.phase, self.phase.start_reason()) {
            (_, Some(StartReason::Restart { attempt, .. })) => *attempt,
            (_, Some(StartReason::Reconnect { attempt, .. }))
            | (
                Down(DownState::Reconnecting { attempt, .. })
                | Up { state: RunState::Undiscovered { attempt, .. }, .. },
                _,
            ) => *attempt as usize,
            _ => 0,
        };
        (attempt > 0).then_some(attempt)
    }

    /// Returns the time at which this slot needs an [`SlotInput::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        let own = match self.phase {
            Down(DownState::Backoff { until, .. } | DownState::Reconnecting { until, .. }) => Some(until),
            Up { state: RunState::Undiscovered { retry_at, .. }, .. } => retry_at,
            Up { state: RunState::Ready { idle_check_at, .. }, .. } => idle_check_at,
            Up { .. } | Down(_) => None,
        };
        let second = match self.second_run {
            Some(SecondRun::Ending { drain_until, .. }) => drain_until,
            Some(SecondRun::Postponed { until, .. }) => Some(until),
            Some(SecondRun::Queued { .. } | SecondRun::Starting { .. }) | None => None,
        };
        let permit = self.permit.map(|(_, until)| until);
        own.into_iter().chain(second).chain(permit).min()
    }

    /// Processes an input. Every change of a slot goes through this function.
    pub fn handle(&mut self, now: Instant, input: SlotInput) -> Vec<SlotEffect> {
        let mut out = Vec::new();
        if let SlotInput::Ended(run, _) = &input {
            self.release_permit(*run, &mut out);
        }
        let run = input.run();
        let is_current = run.is_some() && run == self.run();
        let is_second = run.is_some() && run == self.second_run.as_ref().and_then(SecondRun::run);
        if run.is_some() && !is_current && !is_second {
            return out;
        }
        match input {
            SlotInput::Start => self.on_start(&mut out),
            SlotInput::Stop => self.on_stop(&mut out),
            SlotInput::Restart if self.is_remote() && self.requested_state == RequestedState::Running => {
                self.on_reconnect(&mut out);
            }
            SlotInput::Restart => self.on_restart(&mut out),
            SlotInput::Reconnect => self.on_reconnect(&mut out),
            SlotInput::Update(spec) => self.on_update(now, spec, &mut out),
            SlotInput::Uninstall => self.on_end(StopKind::Uninstall, &mut out),
            SlotInput::Shutdown => self.on_end(StopKind::Shutdown, &mut out),
            SlotInput::Call => self.on_call(now, &mut out),
            SlotInput::Granted(run) => self.on_granted(now, run, &mut out),
            SlotInput::FirstByte(run) => self.release_permit(run, &mut out),
            SlotInput::Tick(activity) => self.on_tick(now, activity, &mut out),
            SlotInput::ResumedAfterSuspend(asleep) => self.on_resumed_after_suspend(now, asleep, &mut out),
            SlotInput::FreeMemory(idle) => self.on_free_memory(idle, &mut out),
            SlotInput::Spawned(_, pid) if is_current => self.pid = pid,
            SlotInput::Spawned(_, pid) => self.on_second_run_spawned(pid),
            SlotInput::Initialized(run, server) if is_current => self.on_initialized(now, run, server, &mut out),
            SlotInput::Adopted(run, server, initialized_at) if is_current => {
                self.on_initialized(initialized_at, run, server, &mut out);
            }
            SlotInput::Initialized(_, server) => self.on_second_run_initialized(now, server),
            SlotInput::Discovered(run, catalogue) if is_current => self.on_discovered(now, run, catalogue, &mut out),
            SlotInput::Discovered(run, catalogue) => self.on_second_run_discovered(now, run, catalogue, &mut out),
            SlotInput::DiscoveryFailed(run, reason, pause) if is_current => {
                self.on_discovery_failed(now, run, reason, pause, &mut out);
            }
            SlotInput::DiscoveryFailed(run, reason, _) => self.on_second_run_discovery_failed(run, &reason, &mut out),
            SlotInput::Ended(run, exit) if is_current => self.on_ended(now, run, exit, &mut out),
            SlotInput::Ended(_, exit) => self.on_second_run_ended(now, exit, &mut out),
            SlotInput::StdoutLine(_, line) if is_current => self.on_stdout_line(&line, &mut out),
            SlotInput::Recovered(run) if is_current => self.on_recovered(run, &mut out),
            // If the run ends before the server has answered, the next run begins with this era.
            SlotInput::EraChanged(_, era) if is_current => self.note_protocol_era(era),
            SlotInput::Health(_, change) if is_current => self.on_health(change, &mut out),
            SlotInput::Sleep { run, idle } if is_current => self.on_sleep(now, run, idle, &mut out),
            // These concern only the current run.
            SlotInput::Adopted(..)
            | SlotInput::StdoutLine(..)
            | SlotInput::Recovered(_)
            | SlotInput::EraChanged(..)
            | SlotInput::Health(..)
            | SlotInput::Sleep { .. } => {}
        }
        out
    }

    /// Returns the current run, in any state.
    pub fn run(&self) -> Option<RunNumber> {
        match self.phase {
            Up { run, .. } => Some(run),
            Down(_) => None,
        }
    }

    /// Returns the state that outlives the supervisor.
    pub fn memo(&self) -> SlotMemo {
        SlotMemo {
            record: self.record.clone(),
            stopped: self.requested_state == RequestedState::Stopped,
            failed: matches!(self.phase, Down(DownState::Failed)).then(|| self.message.clone().unwrap_or_default()),
            // An interrupted wake does not count: its caller calls again.
            dormant: match (&self.phase, self.phase.start_reason()) {
                (Down(DownState::Dormant { since, not_before }), _) => Some((*since, *not_before)),
                (Down(DownState::Backoff { until, .. }), Some(StartReason::Wake { since, .. })) => {
                    Some((*since, *until))
                }
                (Up { state: RunState::FallingAsleep { since, .. }, .. }, _)
                | (_, Some(StartReason::Wake { since, .. })) => Some((*since, *since)),
                _ => None,
            },
            not_before: match self.phase {
                // A start that the machine could not execute is repeated from the beginning.
                Down(DownState::Backoff { why: StartReason::First, .. }) => None,
                Down(DownState::Backoff { until, .. }) => Some(until),
                Up { .. } | Down(_) => None,
            },
            disconnected: self.disconnected_state().map(|state| (state, self.status, self.message.clone())),
            adoption: None,
            restored_at: None,
        }
    }

    fn blank(spec: Arc<InstanceSpec>, rng: JitterRng) -> Self {
        Self {
            spec,
            requested_state: RequestedState::Running,
            phase: Down(DownState::Unconfigured),
            status: Status::Provisioning,
            message: None,
            pid: None,
            initialized_at: None,
            health: ServerHealth::Unknown,
            record: SlotRecord::default(),
            second_run: None,
            second_server: None,
            rng,
            permit: None,
            has_caller: false,
            credentials_changed_at: None,
            machine_faults: 0,
            connection_run: None,
            removal: None,
        }
    }

    // Accepts a configured instance: sets the status `command_received` and requests a permit.
    fn accept(&mut self, out: &mut Vec<SlotEffect>) {
        self.transition(StatusCause::Accepted, Some("waiting for a start permit".to_owned()), out);
        self.queue_start(StartReason::First, out);
    }

    // Starts an instance of an earlier satellite, after the rest of its delay.
    fn start_restored(&mut self, memo: &SlotMemo, restored_at: Instant, out: &mut Vec<SlotEffect>) {
        let Some(until) = memo.not_before.filter(|_| !self.is_remote()) else {
            self.accept(out);
            return;
        };
        let attempt = self.record.history.exits().count();
        let left = restart::format_seconds(until.saturating_duration_since(restored_at));
        let message =
            format!("restarting in {left} (attempt {attempt}); the delay began before the satellite was restarted");
        self.transition(StatusCause::Accepted, Some(message), out);
        let why = StartReason::Restart { reason: RestartReason::Crash, old_pid: None, attempt };
        self.phase = Down(DownState::Backoff { until, why });
    }

    fn start_again(&mut self, reason: RestartReason, old_pid: Option<u32>, out: &mut Vec<SlotEffect>) {
        let why = if self.record.was_ready { self.fresh_start_reason(reason, old_pid) } else { StartReason::First };
        self.queue_restart(why, out);
    }

    // Reason of a start that does not follow a failure.
    fn fresh_start_reason(&self, reason: RestartReason, old_pid: Option<u32>) -> StartReason {
        match self.is_remote() {
            true if self.record.was_ready => StartReason::Reconnect { attempt: 0, resume: None },
            true => StartReason::First,
            false => StartReason::Restart { reason, old_pid, attempt: 0 },
        }
    }

    fn queue_restart(&mut self, why: StartReason, out: &mut Vec<SlotEffect>) {
        if self.status == Status::Provisioning {
            self.transition(StatusCause::Accepted, Some("waiting for a start permit".to_owned()), out);
        }
        self.queue_start(why, out);
    }

    fn queue_start(&mut self, why: StartReason, out: &mut Vec<SlotEffect>) {
        let urgent = self.has_caller || matches!(why, StartReason::Wake { .. });
        self.phase = Down(DownState::Queued { why, urgent });
        out.push(SlotEffect::RequestPermit { urgent });
    }

    fn become_ready(
        &mut self,
        now: Instant,
        run: RunNumber,
        why: &StartReason,
        since: Instant,
        out: &mut Vec<SlotEffect>,
    ) {
        self.enter_ready(now, run);
        self.clear_error();
        let first = !std::mem::replace(&mut self.record.was_ready, true);
        self.record.reported_connected = self.is_remote();
        let attempts = std::mem::take(&mut self.record.attempts);
        let event = match why {
            StartReason::Wake { since, called_at } => SlotEvent::Respawned {
                dormant: called_at.saturating_duration_since(*since),
                took: now.saturating_duration_since(*called_at),
            },
            StartReason::Adopt => SlotEvent::Adopted {
                after: now.saturating_duration_since(since),
                age: self.initialized_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at)),
                tool_count: self.tool_count(),
            },
            StartReason::Restart { reason, old_pid, attempt } if !first => {
                SlotEvent::Restarted { reason: *reason, old_pid: *old_pid, attempt: *attempt }
            }
            StartReason::Reconnect { .. } if !first => SlotEvent::Reconnected {
                attempts,
                changed: self.record.revisions.changes_since(&self.record.reported_revisions),
            },
            // The instance was never `online`: this is its first start.
            StartReason::First | StartReason::Restart { .. } | StartReason::Reconnect { .. } => {
                SlotEvent::Started { after: now.saturating_duration_since(since), tool_count: self.tool_count() }
            }
        };
        // A wake does not change the status `online`.
        let was_postponed = std::mem::take(&mut self.machine_faults) > 0;
        if self.status != Status::Online {
            self.transition(StatusCause::Synced, self.update_rejection_message(), out);
        } else if was_postponed {
            self.set_message(self.update_rejection_message(), out);
        }
        out.push(SlotEffect::Emit(event));
        out.push(SlotEffect::Admit(run));
        if self.record.catalogue_restored {
            out.push(SlotEffect::Discover(run));
        }
        let called = std::mem::take(&mut self.has_caller);
        // An adopted server was awake for a reason; it sleeps when it is idle.
        let may_sleep = !called && !self.is_remote() && *why != StartReason::Adopt;
        if self.spec.lifetime == ProcessLifetime::Lazy && may_sleep {
            out.push(SlotEffect::TrySleep { run, idle: Duration::ZERO });
        }
    }

    fn tool_count(&self) -> usize {
        self.record.catalogue.as_ref().map_or(0, |catalogue| catalogue.tools.len())
    }

    // Clears the last failure of an instance that is healthy again. The reason why a new configuration did not start
    // stays as long as the old configuration runs in its place.
    fn clear_error(&mut self) {
        if self.record.rejected_update.is_none() {
            self.record.last_error = None;
        }
    }

    // Stores the self-description of the server after a handshake.
    fn set_server(&mut self, server: Option<Arc<ServerInfo>>) {
        let known = self.record.server.as_ref().zip(server.as_ref());
        self.record.revisions.capabilities +=
            u64::from(!known.is_some_and(|(old, new)| old.has_same_capabilities(new)));
        if let Some(server) = &server {
            self.note_protocol_era(server.era);
        }
        self.record.server = server;
    }

    // Stores the detected protocol era.
    fn note_protocol_era(&mut self, era: Era) {
        self.record.era = (era != Era::Sessions).then_some(era);
    }

    fn enter_ready(&mut self, now: Instant, run: RunNumber) {
        self.phase = Up { run, state: RunState::Ready { since: now, idle_check_at: self.first_idle_check(now) } };
    }

    // Time of the first check whether a run is idle; `None` if it never sleeps.
    fn first_idle_check(&self, ready: Instant) -> Option<Instant> {
        match self.spec.lifetime {
            // A sleeping connection would save no resources.
            ProcessLifetime::Listed | ProcessLifetime::Lazy if self.is_remote() => None,
            ProcessLifetime::Listed | ProcessLifetime::Lazy => idle::first_check(&self.spec.policy.idle, ready),
            ProcessLifetime::AlwaysOn => None,
        }
    }

    // Ends the current run and the one beside it. A run that was falling asleep has already received its stop.
    fn end_run(&mut self, kind: StopKind, then: AfterStop, out: &mut Vec<SlotEffect>) {
        self.end_second_run(kind, out);
        let Some(run) = self.run() else { return };
        if !matches!(self.phase, Up { state: RunState::FallingAsleep { .. }, .. }) {
            out.push(SlotEffect::Stop(run));
        }
        self.phase = Up { run, state: RunState::Stopping { kind, then } };
    }

    // Status message while the configured specification is one that did not start.
    fn update_rejection_message(&self) -> Option<String> {
        let RejectedUpdate { reason, .. } = self.record.rejected_update.as_ref()?;
        Some(format!("the new configuration did not come up: {reason}; the old one stays until a restart"))
    }

    fn enter_dormant(&mut self, since: Instant, not_before: Instant) {
        self.has_caller = false;
        self.phase = Down(DownState::Dormant { since, not_before });
    }

    fn enter_stopped(&mut self, out: &mut Vec<SlotEffect>) {
        self.has_caller = false;
        self.phase = Down(DownState::Stopped);
        self.transition(StatusCause::Stopped, Some("stopped on request".to_owned()), out);
    }

    fn await_config(&mut self, out: &mut Vec<SlotEffect>) {
        self.phase = Down(DownState::Unconfigured);
        self.transition(StatusCause::ConfigMissing, Some(self.missing_message()), out);
        self.refuse_callers(out);
    }

    fn missing_message(&self) -> String {
        let stopped = if self.requested_state == RequestedState::Stopped { "stopped, and " } else { "" };
        let InstanceSpec { missing, problems, .. } = &*self.spec;
        let values = (!missing.is_empty()).then(|| format!("waiting for the user to configure {}", missing.join(", ")));
        let waits = values.iter().chain(problems).map(String::as_str).collect::<Vec<_>>().join("; ");
        self.spec.mask.apply(&format!("{stopped}{waits}"))
    }

    // Ends the life of the instance. A removal is reported here, once, after the end of its last process.
    fn finish(&mut self, exit: Option<WorkerExit>, out: &mut Vec<SlotEffect>) {
        self.phase = Down(DownState::Ended);
        if let Some((active, dormant)) = self.removal.take() {
            out.push(SlotEffect::Emit(SlotEvent::Removed { active, dormant, exit }));
        }
        out.push(SlotEffect::Remove);
    }

    fn reject_command(&self, verb: &str, why: &str, remedy: Option<Remedy>) -> SlotEffect {
        SlotEffect::RejectCommand { message: format!("cannot {verb} `{}`: {why}", self.spec.name), remedy }
    }

    /// Returns the next step for its user; `None` if there is nothing to do but wait.
    pub fn remedy(&self) -> Option<Remedy> {
        if self.is_ending() {
            return None;
        }
        // A restart replaces the old configuration with the new one.
        let refused = self.record.rejected_update.as_ref().map(|_| Remedy::Restart);
        Remedy::for_status(self.status, self.requested_state == RequestedState::Stopped, self.is_remote()).or(refused)
    }

    // True if the instance is being removed, the satellite is shutting down, or either is complete.
    fn is_ending(&self) -> bool {
        matches!(self.phase, Up { state: RunState::Stopping { then: AfterStop::End, .. }, .. } | Down(DownState::Ended))
    }

    fn is_ready(&self) -> bool {
        matches!(self.phase, Up { state: RunState::Ready { .. }, .. })
    }

    // A slot holds one permit at a time: the run of an earlier one is already ending.
    fn hold_permit(&mut self, now: Instant, run: RunNumber, at_most: Duration, out: &mut Vec<SlotEffect>) {
        if let Some((held, _)) = self.permit.replace((run, now + at_most)) {
            out.push(SlotEffect::ReleasePermit(held));
        }
    }

    fn release_permit(&mut self, run: RunNumber, out: &mut Vec<SlotEffect>) {
        if self.permit.is_some_and(|(held, _)| held == run) {
            self.permit = None;
            out.push(SlotEffect::ReleasePermit(run));
        }
    }

    // Refuses the waiting callers with the status, its cause and the next step.
    fn refuse_callers(&mut self, out: &mut Vec<SlotEffect>) {
        self.has_caller = false;
        let name = &self.spec.name;
        let message = match self.status {
            Status::Offline if self.requested_state == RequestedState::Stopped => format!("`{name}` is stopped"),
            status => refusal_message(name, status, self.message.as_deref().unwrap_or_default()),
        };
        out.push(SlotEffect::RefuseCallers { message, remedy: self.remedy() });
    }

    fn transition(&mut self, cause: StatusCause, message: Option<String>, out: &mut Vec<SlotEffect>) {
        match status::next(self.status, cause) {
            Some(next) => self.set_status(next, message, out),
            None => out.push(SlotEffect::LogInvalidTransition { status: self.status, cause }),
        }
    }

    fn set_status(&mut self, status: Status, message: Option<String>, out: &mut Vec<SlotEffect>) {
        self.status = status;
        self.message.clone_from(&message);
        out.push(SlotEffect::Status { status, message, remedy: self.remedy() });
    }
}

fn refuse_callers_while_ending(kind: StopKind) -> SlotEffect {
    SlotEffect::RefuseCallers { message: ending_message(kind).to_owned(), remedy: None }
}

fn ending_message(kind: StopKind) -> &'static str {
    match kind {
        StopKind::Uninstall => "the server was uninstalled",
        StopKind::Shutdown => "the satellite is shutting down",
        StopKind::Manual | StopKind::Config => "the server is stopping",
    }
}
