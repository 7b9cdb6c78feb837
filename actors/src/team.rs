//! The supervisor of one team. It holds a slot for each instance, performs the effects that the slots return, and
//! starts and ends their workers. The end of a worker affects no other.

use std::collections::{BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use jiff::Timestamp;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent, cast};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::audience::Audience;
use crate::batcher::EventSender;
use crate::byte_budget::ServerMemory;
use crate::calls::{CallPort, InstanceCounters};
use crate::model::event::{Event, EventSubject, StopKind};
use crate::model::exit::{CallError, ExitCause, WorkerExit};
use crate::model::ids::{InstanceId, RunNumber, TeamId};
use crate::model::policy::TeamBudgetPolicy;
use crate::model::snapshot::{InstanceView, ProcessContainment};
use crate::model::spec::InstanceSpec;
use crate::model::status::Status;
use crate::probe::{ActorAnswer, ActorProbe, WorkerFacts};
use crate::remote_worker::RemoteWorker;
use crate::rules::jitter::JitterRng;
use crate::rules::permits::StartPriority;
use crate::rules::slot::{
    DownState, HealthChange, RequestedState, Slot, SlotEffect, SlotEvent, SlotInput, SlotMemo, SlotPhase,
};
use crate::rules::team_budget::{TeamBudget, ThrottleChange};
use crate::seam::{Connectors, ObservedRun, RunStart, RuntimeObserver};
use crate::session::SessionControl;
use crate::stdio_worker::StdioWorker;
use crate::tasks::{ActorTasks, panic_text};
use crate::team_messages::{
    ControlError, ControlReply, InstanceCommand, Msg, ReconnectOutcome, SpawnedRun, UninstallOutcome,
};
use crate::{registry, root, worker};

/// Death notice of a supervisor that panicked, with the instance that it was handling.
#[derive(Debug, thiserror::Error)]
#[error("{panic}")]
pub(crate) struct TeamDeath {
    pub(crate) instance: Option<InstanceId>,
    panic: String,
}

pub(crate) struct Args {
    pub(crate) team: TeamId,
    pub(crate) budget: TeamBudgetPolicy,
    // Budget as charged under the previous supervisor.
    pub(crate) charged_budget: TeamBudget,
    pub(crate) connectors: Connectors,
    pub(crate) audience: Arc<dyn Audience>,
    pub(crate) server_memory: ServerMemory,
    pub(crate) observer: Arc<dyn RuntimeObserver>,
    pub(crate) seed: u64,
    pub(crate) events: EventSender,
    pub(crate) root: ActorRef<root::Msg>,
    pub(crate) registry: ActorRef<registry::Msg>,
}

pub(crate) struct TeamSupervisor;

pub(crate) struct State {
    args: Args,
    instances: HashMap<InstanceId, TeamInstance>,
    workers: HashMap<ActorId, (InstanceId, RunNumber)>,
    deadlines: BTreeSet<(std::time::Instant, InstanceId)>,
    budget: TeamBudget,
    alarm: Option<(std::time::Instant, ActorTasks)>,
    closing: bool,
    // Instance being handled; the death notice names it after a panic.
    current_instance: Option<InstanceId>,
}

/// Slot of an instance with its workers and waiting callers.
///
/// `since` is the last reported status and when it was entered. There are at most two workers: a rolling update starts
/// the second one. `ended` is the subject of an ended run while its end is reported; during a rolling update it differs
/// from the current configuration.
struct TeamInstance {
    slot: Slot,
    subject: Arc<EventSubject>,
    counters: Arc<InstanceCounters>,
    reported_status: (Status, Timestamp),
    workers: Vec<RunningWorker>,
    ended_subject: Option<Arc<EventSubject>>,
    // Time of the first unwanted exit since a run took calls, for the observer.
    lost_at: Option<std::time::Instant>,
    deadline: Option<std::time::Instant>,
    callers: Vec<oneshot::Sender<Result<CallPort, CallError>>>,
    stop_replies: Vec<ControlReply<()>>,
    reconnect_replies: Vec<ControlReply<ReconnectOutcome>>,
    uninstall_replies: Vec<(UninstallOutcome, ControlReply<UninstallOutcome>)>,
}

struct RunningWorker {
    run: RunNumber,
    spec: Arc<InstanceSpec>,
    subject: Arc<EventSubject>,
    // `None` after the run has taken calls for the first time.
    starting_since: Option<std::time::Instant>,
    actor: ActorRef<worker::Msg>,
    port: Option<CallPort>,
    containment: Option<Arc<ProcessContainment>>,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for TeamSupervisor {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _myself: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        Ok(State {
            budget: args.charged_budget.clone(),
            args,
            instances: HashMap::new(),
            workers: HashMap::new(),
            deadlines: BTreeSet::new(),
            alarm: None,
            closing: false,
            current_instance: None,
        })
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Msg>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        // Names every variant: the default would stop this supervisor when any worker ends.
        let (worker, exit) = match event {
            SupervisionEvent::ActorTerminated(worker, worker_state, reason) => {
                let exit = worker_state.and_then(|state| state.msg).and_then(worker::exit_from_state);
                let killed =
                    || ExitCause::Panicked(reason.unwrap_or_else(|| "the worker ended without a reason".to_owned()));
                (worker, exit.unwrap_or_else(|| WorkerExit::from_cause(killed())))
            }
            SupervisionEvent::ActorFailed(worker, error) => {
                (worker, WorkerExit::from_cause(ExitCause::Panicked(error.to_string())))
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => return Ok(()),
            #[cfg(feature = "cluster")]
            SupervisionEvent::PidLifecycleEvent(_) => return Ok(()),
        };
        if let Some((id, run)) = state.workers.remove(&worker.get_id()) {
            // A death notice overtakes earlier messages of the worker; through the mailbox it arrives after them.
            let _ = cast!(myself, Msg::Ended(id, run, exit));
        }
        Ok(())
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        // The death notice names the instance being handled.
        state.current_instance = msg.instance().cloned();
        match AssertUnwindSafe(Self::on_message(myself, msg, state)).catch_unwind().await {
            Ok(()) => Ok(()),
            Err(panic) => {
                Err(Box::new(TeamDeath { instance: state.current_instance.take(), panic: panic_text(panic.as_ref()) }))
            }
        }
    }
}

impl TeamSupervisor {
    async fn on_message(myself: ActorRef<Msg>, msg: Msg, state: &mut State) {
        let now = Instant::now().into_std();
        match msg {
            Msg::Install(spec, memo) => state.install(spec, memo, now, &myself).await,
            Msg::Update(spec) => state.handle_input(&spec.id.clone(), SlotInput::Update(spec), now, &myself).await,
            Msg::Uninstall(id, reply) => state.uninstall(&id, reply, now, &myself).await,
            Msg::Control(id, command, reply) => state.control(&id, command, reply, now, &myself).await,
            Msg::Reconnect(id, reply) => state.reconnect(&id, reply, now, &myself).await,
            Msg::ResumedAfterSuspend(asleep) => state.on_resumed_after_suspend(asleep, now, &myself).await,
            Msg::Ensure(id, reply) => state.ensure(&id, reply, now, &myself).await,
            Msg::Granted(id, run) => state.on_granted(&id, run, now, &myself).await,
            Msg::Spawned(id, run, spawned) => state.on_spawned(&id, run, spawned, now, &myself).await,
            Msg::Input(id, input) => state.handle_input(&id, input, now, &myself).await,
            Msg::Ended(id, run, exit) => state.on_ended(&id, run, exit, now, &myself).await,
            Msg::Tick => state.on_tick(now, &myself).await,
            Msg::Registry(registry) => state.publish_all(registry),
            Msg::Shutdown => state.shut_down(now, &myself).await,
            Msg::Probe(probe) => state.answer_probe(&probe),
            Msg::Panic(None) | Msg::PanicFor(_) => std::panic::panic_any("asked to panic"),
            Msg::Panic(Some(id)) => {
                if let Some(instance) = state.instances.get(&id)
                    && let Some(run) = instance.slot.run()
                {
                    instance.send_to_worker(run, worker::Msg::Panic);
                }
            }
        }
        state.rearm(&myself);
    }
}

impl State {
    async fn install(
        &mut self,
        spec: Arc<InstanceSpec>,
        memo: Option<Box<SlotMemo>>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let id = spec.id.clone();
        let subject = Arc::new(EventSubject::from(&*spec));
        let rng = JitterRng::new(self.args.seed, &spec.name);
        let (slot, effects) = match memo {
            Some(memo) => Slot::from_memo(spec, rng, &memo),
            None => Slot::new(spec, rng),
        };
        let since = (slot.status, self.args.events.wall());
        let instance = TeamInstance {
            slot,
            subject,
            counters: Arc::default(),
            reported_status: since,
            workers: Vec::new(),
            ended_subject: None,
            lost_at: None,
            deadline: None,
            callers: Vec::new(),
            stop_replies: Vec::new(),
            reconnect_replies: Vec::new(),
            uninstall_replies: Vec::new(),
        };
        self.instances.insert(id.clone(), instance);
        self.perform_all(&id, effects, true, now, myself).await;
    }

    async fn handle_input(
        &mut self,
        id: &InstanceId,
        input: SlotInput,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else { return };
        self.current_instance = Some(id.clone());
        let is_visible = is_visible_input(&input);
        let effects = instance.handle(now, input);
        self.perform_all(id, effects, is_visible, now, myself).await;
    }

    async fn perform_all(
        &mut self,
        id: &InstanceId,
        effects: Vec<SlotEffect>,
        is_visible: bool,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let mut next = self.perform(id, effects, is_visible, now, myself).await;
        while let Some(input) = next.take()
            && let Some(instance) = self.instances.get_mut(id)
        {
            let is_visible = is_visible_input(&input);
            let effects = instance.handle(now, input);
            next = self.perform(id, effects, is_visible, now, myself).await;
        }
    }

    async fn control(
        &mut self,
        id: &InstanceId,
        command: InstanceCommand,
        reply: ControlReply<()>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else {
            let _ = reply.send(Err(ControlError::NotFound));
            return;
        };
        let effects = instance.handle(
            now,
            match command {
                InstanceCommand::Start => SlotInput::Start,
                InstanceCommand::Stop => SlotInput::Stop,
                InstanceCommand::Restart => SlotInput::Restart,
            },
        );
        // A stop is complete when the process is gone; the other commands when they are under way.
        let reply = match (command_rejection(&effects), command) {
            (None, InstanceCommand::Stop) => {
                instance.stop_replies.push(reply);
                None
            }
            (None, InstanceCommand::Start | InstanceCommand::Restart) => Some((reply, Ok(()))),
            (Some(refused), _) => Some((reply, Err(refused))),
        };
        self.perform_all(id, effects, true, now, myself).await;
        // Replies after the registry update, so that the caller sees the change in the snapshot.
        if let Some((reply, answer)) = reply {
            let _ = reply.send(answer);
        }
    }

    async fn reconnect(
        &mut self,
        id: &InstanceId,
        reply: ControlReply<ReconnectOutcome>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else {
            let _ = reply.send(Err(ControlError::NotFound));
            return;
        };
        let effects = instance.handle(now, SlotInput::Reconnect);
        // The reply follows when the attempt has an outcome.
        match command_rejection(&effects) {
            Some(refused) => drop(reply.send(Err(refused))),
            None => instance.reconnect_replies.push(reply),
        }
        self.perform_all(id, effects, true, now, myself).await;
    }

    async fn on_resumed_after_suspend(
        &mut self,
        asleep: std::time::Duration,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        for id in self.sorted_ids() {
            self.handle_input(&id, SlotInput::ResumedAfterSuspend(asleep), now, myself).await;
        }
    }

    async fn uninstall(
        &mut self,
        id: &InstanceId,
        reply: ControlReply<UninstallOutcome>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else {
            let _ = reply.send(Err(ControlError::NotFound));
            return;
        };
        let outcome = UninstallOutcome { active: !instance.workers.is_empty(), dormant: instance.slot.is_dormant() };
        instance.uninstall_replies.push((outcome, reply));
        self.handle_input(id, SlotInput::Uninstall, now, myself).await;
    }

    async fn ensure(
        &mut self,
        id: &InstanceId,
        reply: oneshot::Sender<Result<CallPort, CallError>>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else {
            let _ = reply.send(Err(CallError::NotFound { what: "server".to_owned() }));
            return;
        };
        // Callers that gave up free their places.
        let limit = instance.slot.spec.policy.session.callers_waiting_max;
        if instance.callers.len() >= limit {
            instance.callers.retain(|caller| !caller.is_closed());
        }
        if instance.callers.len() >= limit {
            let _ = reply.send(Err(CallError::Busy { what: "callers waiting for this server", limit }));
            return;
        }
        instance.callers.push(reply);
        self.handle_input(id, SlotInput::Call, now, myself).await;
    }

    async fn on_granted(&mut self, id: &InstanceId, run: RunNumber, now: std::time::Instant, myself: &ActorRef<Msg>) {
        if self.instances.contains_key(id) {
            self.handle_input(id, SlotInput::Granted(run), now, myself).await;
        } else {
            // Removed while the grant was on its way.
            self.send_to_root(root::Msg::ReleasePermit(run));
        }
    }

    async fn on_spawned(
        &mut self,
        id: &InstanceId,
        run: RunNumber,
        spawned: SpawnedRun,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let instance = self.instances.get_mut(id);
        if let Some(worker) = instance.and_then(|instance| instance.workers.iter_mut().find(|one| one.run == run)) {
            worker.port = Some(spawned.port);
            worker.containment = spawned.containment;
        }
        self.handle_input(id, SlotInput::Spawned(run, spawned.pid), now, myself).await;
    }

    async fn on_ended(
        &mut self,
        id: &InstanceId,
        run: RunNumber,
        exit: WorkerExit,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else { return };
        let worker = instance.workers.iter().position(|worker| worker.run == run);
        instance.ended_subject = worker.map(|at| {
            let RunningWorker { spec, subject, port, .. } = instance.workers.remove(at);
            let run = ObservedRun { spec: &spec, version: port.as_ref().and_then(CallPort::version) };
            self.args.observer.run_ended(&run, &exit.cause, exit.uptime);
            subject
        });
        if instance.workers.is_empty() {
            // A dormant instance keeps no memory for workers.
            instance.workers = Vec::new();
        }
        self.handle_input(id, SlotInput::Ended(run, exit), now, myself).await;
        // Callers that arrived during the end wait for the next run; a dormant instance is woken for them.
        if let Some(instance) = self.instances.get_mut(id) {
            instance.ended_subject = None;
            instance.callers.retain(|caller| !caller.is_closed());
            if !instance.callers.is_empty() {
                self.handle_input(id, SlotInput::Call, now, myself).await;
            }
        }
        if self.closing && self.instances.is_empty() {
            myself.stop(None);
        }
    }

    async fn on_tick(&mut self, now: std::time::Instant, myself: &ActorRef<Msg>) {
        self.alarm = None;
        let change = self.budget.review(&self.args.budget, now);
        self.report_throttle(change);
        while let Some((at, id)) = self.deadlines.first().cloned()
            && at <= now
        {
            self.deadlines.remove(&(at, id.clone()));
            let Some(instance) = self.instances.get_mut(&id) else { continue };
            instance.deadline = None;
            let activity = instance.port().map(CallPort::activity);
            self.handle_input(&id, SlotInput::Tick(activity), now, myself).await;
        }
    }

    fn publish_all(&mut self, registry: ActorRef<registry::Msg>) {
        self.args.registry = registry;
        for id in self.sorted_ids() {
            let Some(instance) = self.instances.get(&id) else { continue };
            self.send_to_registry(registry::Msg::Put(Arc::new(instance.view())));
        }
    }

    fn answer_probe(&self, probe: &ActorProbe) {
        if !probe.wants_reports() {
            return;
        }
        let mut workers = Vec::new();
        for instance in self.instances.values() {
            for worker in &instance.workers {
                let _ = cast!(worker.actor, worker::Msg::Probe(probe.passed_on(), worker.run));
                workers.push(WorkerFacts {
                    run: worker.run,
                    name: worker.subject.process_id.to_string(),
                    restarts: instance.slot.record.restarts,
                    permits: worker.port.as_ref().map(CallPort::load).into_iter().collect(),
                });
            }
        }
        let backlog = self.instances.values().map(|instance| instance.callers.len()).sum();
        probe.answer(|took| ActorAnswer::Team { took, team: self.args.team.clone(), backlog, workers });
    }

    fn sorted_ids(&self) -> Vec<InstanceId> {
        // Sorted, so that messages to all instances have the same order in every run of a simulation.
        let mut ids: Vec<InstanceId> = self.instances.keys().cloned().collect();
        ids.sort_unstable();
        ids
    }

    async fn shut_down(&mut self, now: std::time::Instant, myself: &ActorRef<Msg>) {
        self.closing = true;
        for id in self.sorted_ids() {
            self.handle_input(&id, SlotInput::Shutdown, now, myself).await;
        }
        if self.instances.is_empty() {
            myself.stop(None);
        }
    }

    /// Performs effects; only this function acts on workers and other actors. `is_visible` is true if the
    /// snapshot changes even without a visible effect. Returns an input for the slot that results at once.
    #[must_use = "pass the returned input to the slot"]
    async fn perform(
        &mut self,
        id: &InstanceId,
        effects: Vec<SlotEffect>,
        is_visible: bool,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) -> Option<SlotInput> {
        let is_visible = is_visible || effects.iter().any(SlotEffect::is_visible);
        let (mut remove, mut next) = (false, None);
        for effect in effects {
            let instance = self.instances.get_mut(id)?;
            match effect {
                SlotEffect::RequestPermit { urgent } => {
                    let priority = if urgent { StartPriority::Urgent } else { StartPriority::Normal };
                    self.send_to_root(root::Msg::RequestPermit(id.clone(), priority));
                }
                SlotEffect::WithdrawPermit => self.send_to_root(root::Msg::WithdrawPermit(id.clone())),
                SlotEffect::ReleasePermit(run) => self.send_to_root(root::Msg::ReleasePermit(run)),
                SlotEffect::Spawn { run, spec, discover, adopts } => {
                    self.spawn_worker(run, spec, discover, adopts, now, myself).await;
                }
                SlotEffect::Stop(run) => instance.send_to_session(run, SessionControl::Stop),
                SlotEffect::ShortenGrace(run) => instance.send_to_session(run, SessionControl::ShortenGrace),
                SlotEffect::Check(run) => instance.send_to_session(run, SessionControl::Check),
                SlotEffect::ApplySpec { run, spec } => instance.send_to_session(run, SessionControl::ApplySpec(spec)),
                SlotEffect::TrySleep { run, idle } => {
                    // From here on the port rejects new calls, and their callers ask the slot: no call is lost.
                    let port = instance.worker(run).and_then(|worker| worker.port.as_ref());
                    next = port.is_some_and(CallPort::close_if_unused).then_some(SlotInput::Sleep { run, idle });
                }
                SlotEffect::Drain(run) => {
                    // Late callers are rejected by the port, ask the slot, and get the other run.
                    if let Some(port) = instance.worker(run).and_then(|worker| worker.port.as_ref()) {
                        port.close();
                    }
                    instance.send_to_session(run, SessionControl::Drain);
                }
                SlotEffect::Discover(run) => instance.send_to_session(run, SessionControl::Discover),
                SlotEffect::Status { status, message, remedy } => {
                    if instance.reported_status.0 != status {
                        instance.reported_status = (status, self.args.events.wall());
                    }
                    log_status(&instance.slot.spec, status, message.as_deref());
                    let of = instance.subject.clone();
                    self.args.events.emit(Event::StatusChanged { of, status, status_message: message, remedy });
                }
                SlotEffect::LogInvalidTransition { status, cause } => {
                    tracing::warn!(instance = %instance.slot.spec.name, %status, ?cause, "invalid status transition");
                }
                SlotEffect::ChargeTeam => {
                    instance.lost_at.get_or_insert(now);
                    let change = self.budget.charge(&self.args.budget, now);
                    self.send_to_root(root::Msg::ChargeTeam(self.args.team.clone(), now));
                    self.report_throttle(change);
                }
                SlotEffect::Emit(event) => instance.report(event, &self.args.events, now),
                SlotEffect::Admit(run) => {
                    instance.observe_ready(run, &*self.args.observer, now);
                    instance.admit(run);
                }
                SlotEffect::RefuseCallers { message, remedy } => {
                    let refused = CallError::Refused { status: instance.slot.status, message, remedy };
                    for caller in std::mem::take(&mut instance.callers) {
                        let _ = caller.send(Err(refused.clone()));
                    }
                }
                SlotEffect::FailCallers { last_error, retry_at } => {
                    let next_retry_ms = retry_at.map(|at| milliseconds(at.saturating_duration_since(now)));
                    let last_attempt = self.args.events.wall();
                    for caller in std::mem::take(&mut instance.callers) {
                        let last_error = last_error.clone();
                        let _ = caller.send(Err(CallError::Reconnecting { last_attempt, next_retry_ms, last_error }));
                    }
                }
                // The caller has already received this answer.
                SlotEffect::RejectCommand { .. } => {}
                SlotEffect::Remove => remove = true,
            }
        }
        self.update_after_effects(id, remove, is_visible);
        next
    }

    fn update_after_effects(&mut self, id: &InstanceId, remove: bool, is_visible: bool) {
        let Some(instance) = self.instances.get_mut(id) else { return };
        let deadline = if remove { None } else { instance.slot.deadline() };
        if deadline != instance.deadline {
            if let Some(old) = instance.deadline.take() {
                self.deadlines.remove(&(old, id.clone()));
            }
            if let Some(at) = deadline {
                self.deadlines.insert((at, id.clone()));
            }
            instance.deadline = deadline;
        }
        let stopping = match (&instance.slot.phase, instance.slot.requested_state) {
            (SlotPhase::Down(DownState::Stopped), _)
            | (SlotPhase::Down(DownState::Unconfigured), RequestedState::Stopped) => Some(Ok(())),
            (_, RequestedState::Running) => Some(Err(ControlError::Superseded)),
            (_, RequestedState::Stopped) => None,
        };
        let answered = stopping.map(|answer| (std::mem::take(&mut instance.stop_replies), answer));
        let has_outcome = !remove && !instance.slot.is_under_way();
        let reconnected = (!instance.reconnect_replies.is_empty() && has_outcome).then(|| {
            let slot = &instance.slot;
            let outcome = ReconnectOutcome {
                success: slot.open_run().is_some() && slot.status == Status::Online,
                status: slot.status,
                status_message: slot.message.clone(),
            };
            (std::mem::take(&mut instance.reconnect_replies), outcome)
        });
        if remove {
            let removed = self.instances.remove(id);
            // During a shutdown the last snapshot stays readable; an uninstalled instance leaves it.
            if !self.closing {
                self.send_to_registry(registry::Msg::Remove(id.clone()));
                self.send_to_root(root::Msg::RemoveInstance(id.clone()));
            }
            let Some(removed) = removed else { return };
            for (outcome, reply) in removed.uninstall_replies {
                let _ = reply.send(Ok(outcome));
            }
            for reply in removed.stop_replies {
                let _ = reply.send(Err(ControlError::Superseded));
            }
            for reply in removed.reconnect_replies {
                let _ = reply.send(Err(ControlError::Superseded));
            }
        } else if is_visible {
            let (spec, memo, view) = (instance.slot.spec.clone(), instance.slot.memo(), Arc::new(instance.view()));
            self.send_to_root(root::Msg::SaveMemo(spec, Box::new(memo)));
            self.send_to_registry(registry::Msg::Put(view));
        }
        // Replies after the registry update, so that the caller sees the change in the snapshot.
        if let Some((replies, answer)) = answered {
            for reply in replies {
                let _ = reply.send(answer.clone());
            }
        }
        if let Some((replies, outcome)) = reconnected {
            for reply in replies {
                let _ = reply.send(Ok(outcome.clone()));
            }
        }
    }

    async fn spawn_worker(
        &mut self,
        run: RunNumber,
        spec: Arc<InstanceSpec>,
        discover: bool,
        adopts: bool,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let id = spec.id.clone();
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let subject = Arc::new(EventSubject::from(&*spec));
        let remote = spec.is_remote();
        let rng = JitterRng::new(self.args.seed ^ run.0, &spec.name);
        let args = worker::Args {
            run,
            subject: subject.clone(),
            spec: spec.clone(),
            rng,
            discover,
            adopts,
            era: instance.slot.record.era,
            connectors: self.args.connectors.clone(),
            audience: self.args.audience.clone(),
            server_memory: self.args.server_memory.clone(),
            observer: self.args.observer.clone(),
            counters: instance.counters.clone(),
            events: self.args.events.clone(),
            team: myself.clone(),
        };
        // `pre_start` returns at once: a connector runs in a task.
        let spawned = if remote {
            RemoteWorker::spawn_linked(None, RemoteWorker, args, myself.get_cell()).await
        } else {
            StdioWorker::spawn_linked(None, StdioWorker, args, myself.get_cell()).await
        };
        match spawned {
            Ok((actor, _)) => {
                self.workers.insert(actor.get_id(), (id, run));
                let starting_since = Some(now);
                let (port, containment) = (None, None);
                instance.workers.push(RunningWorker { run, spec, subject, starting_since, actor, port, containment });
            }
            Err(error) => {
                let exit = WorkerExit::from_cause(ExitCause::Panicked(error.to_string()));
                let _ = cast!(myself, Msg::Ended(id, run, exit));
            }
        }
    }

    fn report_throttle(&self, change: Option<ThrottleChange>) {
        let Some(change) = change else { return };
        let team_id = self.args.team.clone();
        let window_seconds = self.args.budget.window.as_secs();
        let throttled = matches!(change, ThrottleChange::Throttled { .. });
        let event = match change {
            ThrottleChange::Throttled { exits: exits_in_window } => {
                tracing::warn!(%team_id, exits_in_window, window_seconds, "too many unwanted exits: the team's servers start one at a time");
                Event::TeamThrottled { team_id: team_id.clone(), exits_in_window, window_seconds }
            }
            ThrottleChange::Unthrottled { exits: exits_in_window } => {
                tracing::info!(%team_id, exits_in_window, window_seconds, "the team's servers start as usual again");
                Event::TeamUnthrottled { team_id: team_id.clone(), exits_in_window, window_seconds }
            }
        };
        self.args.events.emit(event);
        self.send_to_root(root::Msg::Throttle(team_id, throttled, self.budget.clone()));
    }

    // The cast fails if Root has died, and this supervisor with it.
    fn send_to_root(&self, msg: root::Msg) {
        let _ = cast!(self.args.root, msg);
    }

    // The cast fails if the registry has died; the next one receives everything.
    fn send_to_registry(&self, msg: registry::Msg) {
        let _ = cast!(self.args.registry, msg);
    }

    fn rearm(&mut self, myself: &ActorRef<Msg>) {
        let first = self.deadlines.first().map(|(at, _)| *at);
        let due = first.into_iter().chain(self.budget.deadline(&self.args.budget)).min();
        if self.alarm.as_ref().map(|(at, _)| *at) == due {
            return;
        }
        self.alarm = due.map(|at| {
            let (mut alarm, me) = (ActorTasks::default(), myself.clone());
            alarm.spawn(async move {
                tokio::time::sleep_until(Instant::from_std(at)).await;
                let _ = cast!(me, Msg::Tick);
            });
            (at, alarm)
        });
    }
}

impl TeamInstance {
    fn handle(&mut self, now: std::time::Instant, input: SlotInput) -> Vec<SlotEffect> {
        // Events name the configuration that applies after the input.
        let before = self.slot.spec.clone();
        let effects = self.slot.handle(now, input);
        if !Arc::ptr_eq(&before, &self.slot.spec) {
            self.subject = Arc::new(EventSubject::from(&*self.slot.spec));
        }
        effects
    }

    fn worker(&self, run: RunNumber) -> Option<&RunningWorker> {
        self.workers.iter().find(|worker| worker.run == run)
    }

    fn port(&self) -> Option<&CallPort> {
        self.worker(self.slot.open_run()?)?.port.as_ref()
    }

    fn send_to_worker(&self, run: RunNumber, msg: worker::Msg) {
        if let Some(worker) = self.worker(run) {
            let _ = cast!(worker.actor, msg);
        }
    }

    fn send_to_session(&self, run: RunNumber, control: SessionControl) {
        self.send_to_worker(run, worker::Msg::Control(control));
    }

    fn observe_ready(&mut self, run: RunNumber, observer: &dyn RuntimeObserver, now: std::time::Instant) {
        let Some(worker) = self.workers.iter_mut().find(|worker| worker.run == run) else { return };
        let Some(since) = worker.starting_since.take() else { return };
        let start = RunStart {
            took: now.saturating_duration_since(since),
            recovered_after: self.lost_at.take().map(|lost_at| now.saturating_duration_since(lost_at)),
        };
        let version = worker.port.as_ref().and_then(CallPort::version);
        observer.run_ready(&ObservedRun { spec: &worker.spec, version }, start);
    }

    fn admit(&mut self, run: RunNumber) {
        // A run whose session is over takes no calls; callers wait for the news of its end.
        let port = self.worker(run).and_then(|worker| worker.port.clone());
        let Some(port) = port.filter(CallPort::is_open) else { return };
        // Taken instead of drained: a dormant instance keeps no memory for a burst of callers.
        for caller in std::mem::take(&mut self.callers) {
            let _ = caller.send(Ok(port.clone()));
        }
    }

    // Logs an event of the slot, unless its status is logged, and emits it with the names and the wall-clock times.
    fn report(&self, event: SlotEvent, events: &EventSender, now: std::time::Instant) {
        let (spec, pid, instance) = (&*self.slot.spec, self.slot.pid, &self.slot.spec.name);
        let of = self.subject.clone();
        // Subject of events about a run that has ended.
        let of_run = self.ended_subject.as_ref().unwrap_or(&self.subject).clone();
        let seconds = |exit: &WorkerExit| exit.uptime.unwrap_or_default().as_secs();
        let warn_of_exit = |exit: &WorkerExit, will_restart: bool| {
            tracing::warn!(
                %instance, pid = exit.pid,
                reason = exit.reason(), uptime_seconds = seconds(exit), will_restart, "the server ended unexpectedly"
            );
        };
        let event = match event {
            SlotEvent::Started { after, tool_count } => {
                let spawn_duration_ms = milliseconds(after);
                Event::Started { of, pid, transport: spec.transport().to_owned(), tool_count, spawn_duration_ms }
            }
            SlotEvent::Restarted { reason, old_pid, attempt } => {
                Event::Restarted { of, old_pid, new_pid: pid, restart_reason: reason, attempt_number: attempt }
            }
            SlotEvent::Dormant { pid, idle, last_activity } => {
                let idle_seconds = idle.as_secs();
                tracing::info!(%instance, pid, idle_seconds, "the server fell asleep");
                let ago = now.saturating_duration_since(last_activity);
                // If the subtraction fails, the wall clock is wrong anyway.
                let last_activity_at = events.wall().checked_sub(ago).unwrap_or_default();
                Event::Dormant { of, pid, idle_duration_seconds: idle_seconds, last_activity_at }
            }
            SlotEvent::Respawned { dormant, took } => {
                let (dormant_seconds, took_ms) = (dormant.as_secs(), milliseconds(took));
                tracing::info!(%instance, dormant_seconds, took_ms, "the server has woken up");
                Event::Respawned { of, pid, dormant_duration_seconds: dormant_seconds, respawn_duration_ms: took_ms }
            }
            SlotEvent::Adopted { after, age, tool_count } => {
                let (uptime_seconds, adoption_duration_ms) = (age.as_secs(), milliseconds(after));
                tracing::info!(%instance, pid, uptime_seconds, "the server of the earlier satellite continues");
                Event::Adopted { of, pid, tool_count, uptime_seconds, adoption_duration_ms }
            }
            SlotEvent::NotAdopted { exit } => {
                let reason = exit.reason();
                tracing::warn!(%instance, pid = exit.pid, reason, "the server of the earlier satellite is restarted");
                // The accompanying status is the event.
                return;
            }
            SlotEvent::Discovered { before, now } => {
                let tools = now.tools.iter().map(|tool| tool.name.to_string()).collect();
                let (tool_count, total_tokens) = (now.tools.len(), now.total_tokens());
                events.emit(Event::ToolsDiscovered { of: of.clone(), tool_count, total_tokens, tools });
                let difference = before.map(|before| now.difference(&before));
                let Some(difference) = difference.filter(|difference| !difference.is_empty()) else { return };
                Event::ToolsUpdated {
                    of,
                    added_tools: difference.added,
                    removed_tools: difference.removed,
                    total_tools: tool_count,
                }
            }
            SlotEvent::UpdateRejected { reason } => {
                tracing::warn!(%instance, reason, "the new configuration did not come up; the old one stays");
                // The accompanying status is the event.
                return;
            }
            SlotEvent::Disconnected { intentional } => Event::Disconnected { of: of_run, was_intentional: intentional },
            SlotEvent::Reconnecting { attempt, after } => {
                let next_retry_ms = milliseconds(after);
                tracing::debug!(%instance, attempt, next_retry_ms, "not connected");
                Event::Reconnecting { of, attempt, next_retry_ms }
            }
            SlotEvent::Reconnected { attempts: attempts_taken, changed } => {
                let server = self.slot.record.server.as_ref();
                // Already validated in the handshake.
                let capabilities = server.and_then(|server| serde_json::from_str(server.capabilities.get()).ok());
                let capabilities = spec.mask.apply_json(capabilities.unwrap_or_default());
                Event::Reconnected { of, capabilities, attempts_taken, changed }
            }
            SlotEvent::Health(HealthChange::Degraded { failures: consecutive_failures, last_error }) => {
                tracing::warn!(%instance, consecutive_failures, last_error, "health checks fail");
                Event::HealthDegraded { of, consecutive_failures, last_error }
            }
            SlotEvent::Health(HealthChange::Restored { failures: consecutive_failures, last_error }) => {
                tracing::info!(%instance, "the server is healthy again");
                Event::HealthRestored { of, consecutive_failures, last_error }
            }
            SlotEvent::Stopped { kind, exit } => Event::Stopped {
                of: of_run,
                kind,
                exit_code: exit.code,
                signal: exit.signal,
                forced: exit.forced,
                active: None,
                dormant: None,
            },
            SlotEvent::Removed { active, dormant, exit } => Event::Stopped {
                of,
                kind: StopKind::Uninstall,
                exit_code: exit.as_ref().and_then(|exit| exit.code),
                signal: exit.as_ref().and_then(|exit| exit.signal),
                forced: exit.is_some_and(|exit| exit.forced),
                active: Some(active),
                dormant: Some(dormant),
            },
            SlotEvent::Exited { exit, will_restart } => {
                warn_of_exit(&exit, will_restart);
                Event::Exited {
                    of: of_run,
                    exit_code: exit.code,
                    signal: exit.signal,
                    forced: exit.forced,
                    uptime_seconds: seconds(&exit),
                    will_restart,
                }
            }
            SlotEvent::Crashed { exit, count, will_restart } => {
                warn_of_exit(&exit, will_restart);
                Event::Crashed {
                    of: of_run,
                    reason: exit.reason(),
                    exit_code: exit.code,
                    signal: exit.signal,
                    uptime_seconds: seconds(&exit),
                    crash_count: count,
                    will_restart,
                }
            }
            SlotEvent::PermanentlyFailed { exits, last_error, message, remedy } => Event::PermanentlyFailed {
                of,
                total_crashes: exits,
                last_error,
                message,
                remedy: Some(remedy),
                failed_at: events.wall(),
            },
        };
        events.emit(event);
    }

    fn view(&self) -> InstanceView {
        let slot = &self.slot;
        let current = slot.run().and_then(|run| self.worker(run));
        InstanceView {
            spec: slot.spec.clone(),
            subject: self.subject.clone(),
            status: slot.status,
            message: slot.message.clone(),
            remedy: slot.remedy(),
            since: self.reported_status.1,
            requested_state: slot.requested_state,
            dormant: slot.is_dormant(),
            connection: slot.connection(),
            health: slot.health,
            server: slot.record.server.clone(),
            pid: slot.pid,
            containment: current.and_then(|worker| worker.containment.clone()),
            restarts: slot.record.restarts,
            history: slot.record.history.clone(),
            next_retry_at: slot.next_retry_at(),
            attempt: slot.attempt(),
            initialized_at: slot.initialized_at,
            catalogue: slot.record.catalogue.clone(),
            revisions: slot.record.revisions,
            port: self.port().cloned(),
            draining: slot.ending_run().and_then(|run| self.worker(run)?.port.clone()),
            counters: self.counters.clone(),
            last_error: slot.record.last_error.clone(),
            last_exit: slot.record.last_exit.clone(),
        }
    }
}

fn command_rejection(effects: &[SlotEffect]) -> Option<ControlError> {
    effects.iter().find_map(|effect| match effect {
        SlotEffect::RejectCommand { message, remedy } => {
            Some(ControlError::Refused { message: message.clone(), remedy: *remedy })
        }
        _ => None,
    })
}

fn log_status(spec: &InstanceSpec, status: Status, message: Option<&str>) {
    // Thousands of instances may pass through transitional states.
    let instance = &spec.name;
    if status.is_transitional() {
        tracing::debug!(%instance, %status, reason = message, "status");
    } else {
        tracing::info!(%instance, %status, reason = message, "status");
    }
}

fn is_visible_input(input: &SlotInput) -> bool {
    // The snapshot changes after these inputs even without a visible effect.
    match input {
        SlotInput::Spawned(..)
        | SlotInput::Update(_)
        | SlotInput::DiscoveryFailed(..)
        | SlotInput::Initialized(..)
        | SlotInput::Adopted(..) => true,
        // An attempt begins, or is due earlier than before.
        SlotInput::Reconnect | SlotInput::ResumedAfterSuspend(_) | SlotInput::Granted(_) | SlotInput::Call => true,
        _ => false,
    }
}

fn milliseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
