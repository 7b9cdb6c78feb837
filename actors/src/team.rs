//! The supervisor of one team: it holds a slot for each instance, carries out what the slots decide, and starts and
//! ends their workers. A worker that ends, however it ends, changes nothing for any other.

use std::collections::{BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use jiff::Timestamp;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent, cast};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::audience::Audience;
use crate::batcher::Emitter;
use crate::byte_budget::ServerMemory;
use crate::calls::{CallPort, Counters};
use crate::model::event::{Event, StopKind, Subject};
use crate::model::exit::{CallError, ExitCause, WorkerExit};
use crate::model::ids::{InstanceId, Run, TeamId};
use crate::model::policy::TeamBudgetPolicy;
use crate::model::remedy::Remedy;
use crate::model::snapshot::{Custody, InstanceView};
use crate::model::spec::InstanceSpec;
use crate::model::status::Status;
use crate::remote_worker::RemoteWorker;
use crate::rules::jitter::Dice;
use crate::rules::permits::Urgency;
use crate::rules::slot::{Effect, HealthNews, Input, Memo, Phase, Slot, Told, Want};
use crate::rules::team_budget::{Change, TeamBudget};
use crate::seam::Connector;
use crate::session::Control;
use crate::stdio_worker::StdioWorker;
use crate::tasks::{Tasks, panic_text};
use crate::{registry, root, worker};

/// What a person may ask of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Be there when called.
    Start,
    /// Stay down.
    Stop,
    /// Start again now.
    Restart,
}

/// Why a request of a person was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// No such instance, for this caller.
    #[error("no such server")]
    NotFound,
    /// The request makes no sense now.
    #[error("{message}")]
    Refused {
        /// The request and the cause.
        message: String,
        /// The next step.
        remedy: Option<Remedy>,
    },
    /// Another request undid this one before it was done.
    #[error("another request came first")]
    Superseded,
    /// The satellite is ending.
    #[error("the satellite is shutting down")]
    Closing,
}

/// What an uninstall found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Uninstalled {
    /// It had a process or a connection, or one was under way.
    pub active: bool,
    /// It was asleep.
    pub dormant: bool,
}

/// What came of a connection that was made anew on request.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Reconnected {
    /// Whether it takes calls now.
    pub success: bool,
    /// What it has come to.
    pub status: Status,
    /// And why.
    pub status_message: Option<String>,
}

/// A person's answer.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, ControlError>>;

/// What a team's supervisor is told.
pub(crate) enum Msg {
    /// A new instance, or one whose supervisor died or whose tools are known, with what it had come to.
    Install(Arc<InstanceSpec>, Option<Box<Memo>>),
    /// Its configuration changed.
    Update(Arc<InstanceSpec>),
    /// It goes.
    Uninstall(InstanceId, Reply<Uninstalled>),
    /// A person asks.
    Control(InstanceId, Verb, Reply<()>),
    /// A person wants its connection made anew, and to know what comes of it.
    Reconnect(InstanceId, Reply<Reconnected>),
    /// The machine was suspended for so long.
    Woke(std::time::Duration),
    /// A caller wants a run that takes calls.
    Ensure(InstanceId, oneshot::Sender<Result<CallPort, CallError>>),
    /// A start permit.
    Granted(InstanceId, Run),
    /// A worker's process is there.
    Spawned(InstanceId, Run, Spawned),
    /// What a session learned.
    News(InstanceId, Input),
    /// A worker is gone. Told by this actor to itself, so that it comes after all that the worker had told.
    Ended(InstanceId, Run, WorkerExit),
    /// A deadline may have passed.
    Tick,
    /// There is a new registry: tell it everything.
    Registry(ActorRef<registry::Msg>),
    /// The satellite is ending: end every worker with grace, all at once, then this.
    Shutdown,
    /// For the load harness and the tests: panic, or let a worker panic, as a fault of ours would.
    Panic(Option<InstanceId>),
    /// The same, as a fault that this instance brings about.
    PanicFor(InstanceId),
}

impl Msg {
    /// The instance that it is about, where it is about one.
    fn instance(&self) -> Option<&InstanceId> {
        match self {
            Self::Install(spec, _) | Self::Update(spec) => Some(&spec.id),
            Self::Uninstall(id, _)
            | Self::Control(id, ..)
            | Self::Reconnect(id, _)
            | Self::Ensure(id, _)
            | Self::Granted(id, _)
            | Self::Spawned(id, ..)
            | Self::News(id, _)
            | Self::Ended(id, ..)
            | Self::PanicFor(id) => Some(id),
            Self::Woke(_) | Self::Tick | Self::Registry(_) | Self::Shutdown | Self::Panic(_) => None,
        }
    }
}

/// The death notice of a supervisor that panicked.
#[derive(Debug, thiserror::Error)]
#[error("{panic}")]
pub(crate) struct Died {
    /// The instance that it was handling.
    pub(crate) instance: Option<InstanceId>,
    panic: String,
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

/// What a worker tells of its process when that is there.
pub(crate) struct Spawned {
    pub(crate) pid: Option<u32>,
    pub(crate) custody: Option<Arc<Custody>>,
    pub(crate) port: CallPort,
}

/// What a team's supervisor is made of.
pub(crate) struct Args {
    pub(crate) team: TeamId,
    pub(crate) budget: TeamBudgetPolicy,
    /// What it was charged under the supervisor before.
    pub(crate) charged: TeamBudget,
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) audience: Arc<dyn Audience>,
    pub(crate) server_memory: ServerMemory,
    /// For delays that are not to be the same for all.
    pub(crate) seed: u64,
    pub(crate) events: Emitter,
    pub(crate) root: ActorRef<root::Msg>,
    pub(crate) registry: ActorRef<registry::Msg>,
}

pub(crate) struct TeamSupervisor;

pub(crate) struct State {
    args: Args,
    instances: HashMap<InstanceId, Instance>,
    workers: HashMap<ActorId, (InstanceId, Run)>,
    deadlines: BTreeSet<(std::time::Instant, InstanceId)>,
    budget: TeamBudget,
    alarm: Option<(std::time::Instant, Tasks)>,
    closing: bool,
    /// The instance that is being handled, to be named if that panics.
    at_work: Option<InstanceId>,
}

/// A slot, and what belongs to it in the world of actors.
struct Instance {
    slot: Slot,
    subject: Arc<Subject>,
    counters: Arc<Counters>,
    /// The status that was told last, and the time at which it was entered.
    since: (Status, Timestamp),
    /// Two at most: during a rolling update there is one beside the one that takes calls.
    workers: Vec<Worker>,
    /// While the end of a run is told: whose it was. During a rolling update that is not what is configured now.
    ended: Option<Arc<Subject>>,
    deadline: Option<std::time::Instant>,
    callers: Vec<oneshot::Sender<Result<CallPort, CallError>>>,
    stopping: Vec<Reply<()>>,
    reconnecting: Vec<Reply<Reconnected>>,
    removing: Vec<(Uninstalled, Reply<Uninstalled>)>,
}

/// One run, and what is known of it.
struct Worker {
    run: Run,
    subject: Arc<Subject>,
    actor: ActorRef<worker::Msg>,
    port: Option<CallPort>,
    custody: Option<Arc<Custody>>,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for TeamSupervisor {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _myself: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        Ok(State {
            budget: args.charged.clone(),
            args,
            instances: HashMap::new(),
            workers: HashMap::new(),
            deadlines: BTreeSet::new(),
            alarm: None,
            closing: false,
            at_work: None,
        })
    }

    /// Every variant by name: the default would stop this supervisor when any worker ends.
    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Msg>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let (worker, exit) = match event {
            SupervisionEvent::ActorTerminated(worker, worker_state, reason) => {
                let told = worker_state.and_then(|state| state.msg).and_then(worker::exit_of);
                let killed = || ExitCause::Panicked(reason.unwrap_or_else(|| "it ended without a reason".to_owned()));
                (worker, told.unwrap_or_else(|| WorkerExit::because(killed())))
            }
            SupervisionEvent::ActorFailed(worker, error) => {
                (worker, WorkerExit::because(ExitCause::Panicked(error.to_string())))
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => return Ok(()),
            #[cfg(feature = "cluster")]
            SupervisionEvent::PidLifecycleEvent(_) => return Ok(()),
        };
        if let Some((id, run)) = state.workers.remove(&worker.get_id()) {
            // A death notice overtakes what the worker had told before it; through the mailbox it comes after.
            let _ = cast!(myself, Msg::Ended(id, run, exit));
        }
        Ok(())
    }

    /// Runs the handler so that a panic names the instance that it was about.
    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        state.at_work = msg.instance().cloned();
        match AssertUnwindSafe(Self::on_message(myself, msg, state)).catch_unwind().await {
            Ok(()) => Ok(()),
            Err(panic) => Err(Box::new(Died { instance: state.at_work.take(), panic: panic_text(panic.as_ref()) })),
        }
    }
}

impl TeamSupervisor {
    async fn on_message(myself: ActorRef<Msg>, msg: Msg, state: &mut State) {
        let now = Instant::now().into_std();
        match msg {
            Msg::Install(spec, memo) => state.install(spec, memo, now, &myself).await,
            Msg::Update(spec) => state.input(&spec.id.clone(), Input::Update(spec), now, &myself).await,
            Msg::Uninstall(id, reply) => state.uninstall(&id, reply, now, &myself).await,
            Msg::Control(id, verb, reply) => state.control(&id, verb, reply, now, &myself).await,
            Msg::Reconnect(id, reply) => state.reconnect(&id, reply, now, &myself).await,
            Msg::Woke(asleep) => state.woke(asleep, now, &myself).await,
            Msg::Ensure(id, reply) => state.ensure(&id, reply, now, &myself).await,
            Msg::Granted(id, run) => state.granted(&id, run, now, &myself).await,
            Msg::Spawned(id, run, spawned) => state.spawned(&id, run, spawned, now, &myself).await,
            Msg::News(id, input) => state.input(&id, input, now, &myself).await,
            Msg::Ended(id, run, exit) => state.ended(&id, run, exit, now, &myself).await,
            Msg::Tick => state.tick(now, &myself).await,
            Msg::Registry(registry) => state.announce_all(registry),
            Msg::Shutdown => state.shut_down(now, &myself).await,
            Msg::Panic(None) | Msg::PanicFor(_) => std::panic::panic_any("asked to panic"),
            Msg::Panic(Some(id)) => {
                if let Some(instance) = state.instances.get(&id)
                    && let Some(run) = instance.slot.run()
                {
                    instance.tell_worker(run, worker::Msg::Panic);
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
        memo: Option<Box<Memo>>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let id = spec.id.clone();
        let subject = Arc::new(Subject::from(&*spec));
        let dice = Dice::new(self.args.seed, &spec.name);
        let (slot, effects) = match memo {
            Some(memo) => Slot::revive(spec, dice, &memo),
            None => Slot::new(spec, dice),
        };
        let since = (slot.status, self.args.events.wall());
        let instance = Instance {
            slot,
            subject,
            counters: Arc::default(),
            since,
            workers: Vec::new(),
            ended: None,
            deadline: None,
            callers: Vec::new(),
            stopping: Vec::new(),
            reconnecting: Vec::new(),
            removing: Vec::new(),
        };
        self.instances.insert(id.clone(), instance);
        self.carry_out(&id, effects, true, now, myself).await;
    }

    async fn input(&mut self, id: &InstanceId, input: Input, now: std::time::Instant, myself: &ActorRef<Msg>) {
        let Some(instance) = self.instances.get_mut(id) else { return };
        self.at_work = Some(id.clone());
        let shows = shows(&input);
        let effects = instance.handle(now, input);
        self.carry_out(id, effects, shows, now, myself).await;
    }

    /// Performs what a slot wants, and what it wants because of that.
    async fn carry_out(
        &mut self,
        id: &InstanceId,
        effects: Vec<Effect>,
        shows_itself: bool,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let mut next = self.perform(id, effects, shows_itself, now, myself).await;
        while let Some(input) = next.take()
            && let Some(instance) = self.instances.get_mut(id)
        {
            let shows = shows(&input);
            let effects = instance.handle(now, input);
            next = self.perform(id, effects, shows, now, myself).await;
        }
    }

    async fn control(
        &mut self,
        id: &InstanceId,
        verb: Verb,
        reply: Reply<()>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else {
            let _ = reply.send(Err(ControlError::NotFound));
            return;
        };
        let effects = instance.handle(
            now,
            match verb {
                Verb::Start => Input::Start,
                Verb::Stop => Input::Stop,
                Verb::Restart => Input::Restart,
            },
        );
        // A stop is done when the process is gone; the others when they are under way, and `status` has the rest.
        let reply = match (denied(&effects), verb) {
            (None, Verb::Stop) => {
                instance.stopping.push(reply);
                None
            }
            (None, Verb::Start | Verb::Restart) => Some((reply, Ok(()))),
            (Some(refused), _) => Some((reply, Err(refused))),
        };
        self.carry_out(id, effects, true, now, myself).await;
        // Answered after the registry was told, so that whoever asked can see what it did.
        if let Some((reply, answer)) = reply {
            let _ = reply.send(answer);
        }
    }

    async fn reconnect(
        &mut self,
        id: &InstanceId,
        reply: Reply<Reconnected>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else {
            let _ = reply.send(Err(ControlError::NotFound));
            return;
        };
        let effects = instance.handle(now, Input::Reconnect);
        // Answered when it has come to something.
        match denied(&effects) {
            Some(refused) => drop(reply.send(Err(refused))),
            None => instance.reconnecting.push(reply),
        }
        self.carry_out(id, effects, true, now, myself).await;
    }

    async fn woke(&mut self, asleep: std::time::Duration, now: std::time::Instant, myself: &ActorRef<Msg>) {
        for id in self.in_order() {
            self.input(&id, Input::Woke(asleep), now, myself).await;
        }
    }

    async fn uninstall(
        &mut self,
        id: &InstanceId,
        reply: Reply<Uninstalled>,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else {
            let _ = reply.send(Err(ControlError::NotFound));
            return;
        };
        let found = Uninstalled { active: !instance.workers.is_empty(), dormant: instance.slot.is_dormant() };
        instance.removing.push((found, reply));
        self.input(id, Input::Uninstall, now, myself).await;
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
        // Callers that gave up make room.
        let limit = instance.slot.spec.policy.session.callers_waiting_max;
        if instance.callers.len() >= limit {
            instance.callers.retain(|caller| !caller.is_closed());
        }
        if instance.callers.len() >= limit {
            let _ = reply.send(Err(CallError::Busy { what: "callers waiting for this server", limit }));
            return;
        }
        instance.callers.push(reply);
        self.input(id, Input::Call, now, myself).await;
    }

    async fn granted(&mut self, id: &InstanceId, run: Run, now: std::time::Instant, myself: &ActorRef<Msg>) {
        if self.instances.contains_key(id) {
            self.input(id, Input::Granted(run), now, myself).await;
        } else {
            // It was removed while the grant was on its way.
            self.tell_root(root::Msg::ReleasePermit(run));
        }
    }

    async fn spawned(
        &mut self,
        id: &InstanceId,
        run: Run,
        spawned: Spawned,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let instance = self.instances.get_mut(id);
        if let Some(worker) = instance.and_then(|instance| instance.workers.iter_mut().find(|one| one.run == run)) {
            worker.port = Some(spawned.port);
            worker.custody = spawned.custody;
        }
        self.input(id, Input::Spawned(run, spawned.pid), now, myself).await;
    }

    async fn ended(
        &mut self,
        id: &InstanceId,
        run: Run,
        exit: WorkerExit,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) {
        let Some(instance) = self.instances.get_mut(id) else { return };
        let worker = instance.workers.iter().position(|worker| worker.run == run);
        instance.ended = worker.map(|at| instance.workers.remove(at).subject);
        if instance.workers.is_empty() {
            // One that sleeps keeps no room for a process.
            instance.workers = Vec::new();
        }
        self.input(id, Input::Ended(run, exit), now, myself).await;
        // Who came while the run was ending waits for the next one; one that sleeps now is woken for them.
        if let Some(instance) = self.instances.get_mut(id) {
            instance.ended = None;
            instance.callers.retain(|caller| !caller.is_closed());
            if !instance.callers.is_empty() {
                self.input(id, Input::Call, now, myself).await;
            }
        }
        if self.closing && self.instances.is_empty() {
            myself.stop(None);
        }
    }

    async fn tick(&mut self, now: std::time::Instant, myself: &ActorRef<Msg>) {
        self.alarm = None;
        let change = self.budget.review(&self.args.budget, now);
        self.tell_budget(change);
        while let Some((at, id)) = self.deadlines.first().cloned()
            && at <= now
        {
            self.deadlines.remove(&(at, id.clone()));
            let Some(instance) = self.instances.get_mut(&id) else { continue };
            instance.deadline = None;
            let activity = instance.port().map(CallPort::activity);
            self.input(&id, Input::Tick(activity), now, myself).await;
        }
    }

    fn announce_all(&mut self, registry: ActorRef<registry::Msg>) {
        self.args.registry = registry;
        for id in self.in_order() {
            let Some(instance) = self.instances.get(&id) else { continue };
            self.tell_registry(registry::Msg::Put(Arc::new(instance.view())));
        }
    }

    /// Every instance. Where all are told something, the order is the same every time: in simulated time a run can be
    /// repeated.
    fn in_order(&self) -> Vec<InstanceId> {
        let mut ids: Vec<InstanceId> = self.instances.keys().cloned().collect();
        ids.sort_unstable();
        ids
    }

    async fn shut_down(&mut self, now: std::time::Instant, myself: &ActorRef<Msg>) {
        self.closing = true;
        for id in self.in_order() {
            self.input(&id, Input::Shutdown, now, myself).await;
        }
        if self.instances.is_empty() {
            myself.stop(None);
        }
    }

    /// The only lines of a team that touch the world. `shows` says that readers will see a difference even if no
    /// effect says so. What comes of it at once, if anything, is for the slot again.
    #[must_use = "the slot does not know yet what came of it"]
    async fn perform(
        &mut self,
        id: &InstanceId,
        effects: Vec<Effect>,
        shows: bool,
        now: std::time::Instant,
        myself: &ActorRef<Msg>,
    ) -> Option<Input> {
        let shows = shows || effects.iter().any(Effect::shows);
        let (mut remove, mut next) = (false, None);
        for effect in effects {
            let instance = self.instances.get_mut(id)?;
            match effect {
                Effect::RequestPermit { urgent } => {
                    let urgency = if urgent { Urgency::Urgent } else { Urgency::Normal };
                    self.tell_root(root::Msg::RequestPermit(id.clone(), urgency));
                }
                Effect::WithdrawPermit => self.tell_root(root::Msg::WithdrawPermit(id.clone())),
                Effect::ReleasePermit(run) => self.tell_root(root::Msg::ReleasePermit(run)),
                Effect::Spawn { run, spec, discover } => self.spawn(run, spec, discover, myself).await,
                Effect::Stop(run) => instance.tell_session(run, Control::Stop),
                Effect::Hurry(run) => instance.tell_session(run, Control::Hurry),
                Effect::Check(run) => instance.tell_session(run, Control::Check),
                Effect::Adopt { run, spec } => instance.tell_session(run, Control::Adopt(spec)),
                Effect::TrySleep { run, idle } => {
                    // From here on a caller finds the door closed and comes to this slot: none is lost.
                    let port = instance.worker(run).and_then(|worker| worker.port.as_ref());
                    next = port.is_some_and(CallPort::close_if_unused).then_some(Input::Sleep { run, idle });
                }
                Effect::Drain(run) => {
                    // The same here: who comes too late for this run comes to the slot, and is sent to the other.
                    if let Some(port) = instance.worker(run).and_then(|worker| worker.port.as_ref()) {
                        port.close();
                    }
                    instance.tell_session(run, Control::Drain);
                }
                Effect::Discover(run) => instance.tell_session(run, Control::Discover),
                Effect::Status { status, message, remedy } => {
                    if instance.since.0 != status {
                        instance.since = (status, self.args.events.wall());
                    }
                    log_status(&instance.slot.spec, status, message.as_deref());
                    let of = instance.subject.clone();
                    self.args.events.emit(Event::StatusChanged { of, status, status_message: message, remedy });
                }
                Effect::Refused { status, cause } => {
                    tracing::warn!(instance = %instance.slot.spec.name, %status, ?cause, "invalid status transition");
                }
                Effect::ChargeTeam => {
                    let change = self.budget.charge(&self.args.budget, now);
                    self.tell_root(root::Msg::ChargeTeam(self.args.team.clone(), now));
                    self.tell_budget(change);
                }
                Effect::Tell(told) => {
                    log_told(&instance.slot.spec, &told);
                    let ended = instance.ended.as_ref().filter(|_| is_an_end(&told));
                    let subject = ended.unwrap_or(&instance.subject).clone();
                    for event in events_of(told, &subject, &instance.slot, &self.args.events, now) {
                        self.args.events.emit(event);
                    }
                }
                Effect::Admit(run) => instance.admit(run),
                Effect::Refuse { message, remedy } => {
                    let refused = CallError::Refused { status: instance.slot.status, message, remedy };
                    for caller in std::mem::take(&mut instance.callers) {
                        let _ = caller.send(Err(refused.clone()));
                    }
                }
                Effect::Unreachable { last_error, retry_at } => {
                    let next_retry_ms = retry_at.map(|at| milliseconds(at.saturating_duration_since(now)));
                    let last_attempt = self.args.events.wall();
                    for caller in std::mem::take(&mut instance.callers) {
                        let last_error = last_error.clone();
                        let _ = caller.send(Err(CallError::Reconnecting { last_attempt, next_retry_ms, last_error }));
                    }
                }
                // Answered where the person asked.
                Effect::Denied { .. } => {}
                Effect::Remove => remove = true,
            }
        }
        self.settle(id, remove, shows);
        next
    }

    /// After every change: deadlines, the memo, the registry, and the people who wait for it.
    fn settle(&mut self, id: &InstanceId, remove: bool, shows: bool) {
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
        let stopping = match (&instance.slot.phase, instance.slot.want) {
            (Phase::Stopped, _) | (Phase::Unconfigured, Want::Stopped) => Some(Ok(())),
            (_, Want::Running) => Some(Err(ControlError::Superseded)),
            (_, Want::Stopped) => None,
        };
        let answered = stopping.map(|answer| (std::mem::take(&mut instance.stopping), answer));
        let has_outcome = !remove && !instance.slot.is_under_way();
        let reconnected = (!instance.reconnecting.is_empty() && has_outcome).then(|| {
            let slot = &instance.slot;
            let outcome = Reconnected {
                success: slot.open_run().is_some() && slot.status == Status::Online,
                status: slot.status,
                status_message: slot.message.clone(),
            };
            (std::mem::take(&mut instance.reconnecting), outcome)
        });
        if remove {
            let removed = self.instances.remove(id);
            // When the satellite is ending the last picture stays readable; uninstalled means gone from it.
            if !self.closing {
                self.tell_registry(registry::Msg::Remove(id.clone()));
                self.tell_root(root::Msg::Forget(id.clone()));
            }
            let Some(removed) = removed else { return };
            for (found, reply) in removed.removing {
                let _ = reply.send(Ok(found));
            }
            for reply in removed.stopping {
                let _ = reply.send(Err(ControlError::Superseded));
            }
            for reply in removed.reconnecting {
                let _ = reply.send(Err(ControlError::Superseded));
            }
        } else if shows {
            let (spec, memo, view) = (instance.slot.spec.clone(), instance.slot.memo(), Arc::new(instance.view()));
            self.tell_root(root::Msg::Remember(spec, Box::new(memo)));
            self.tell_registry(registry::Msg::Put(view));
        }
        // Answered after the registry was told, so that whoever asked can see what it did.
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

    async fn spawn(&mut self, run: Run, spec: Arc<InstanceSpec>, discover: bool, myself: &ActorRef<Msg>) {
        let id = spec.id.clone();
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let subject = Arc::new(Subject::from(&*spec));
        let remote = spec.is_remote();
        let dice = Dice::new(self.args.seed ^ run.0, &spec.name);
        let args = worker::Args {
            run,
            subject: subject.clone(),
            spec,
            dice,
            discover,
            era: instance.slot.era,
            connector: self.args.connector.clone(),
            audience: self.args.audience.clone(),
            server_memory: self.args.server_memory.clone(),
            counters: instance.counters.clone(),
            events: self.args.events.clone(),
            team: myself.clone(),
        };
        // `pre_start` is instant: a connector works in a task.
        let spawned = if remote {
            RemoteWorker::spawn_linked(None, RemoteWorker, args, myself.get_cell()).await
        } else {
            StdioWorker::spawn_linked(None, StdioWorker, args, myself.get_cell()).await
        };
        match spawned {
            Ok((actor, _)) => {
                self.workers.insert(actor.get_id(), (id, run));
                instance.workers.push(Worker { run, subject, actor, port: None, custody: None });
            }
            Err(error) => {
                let exit = WorkerExit::because(ExitCause::Panicked(error.to_string()));
                let _ = cast!(myself, Msg::Ended(id, run, exit));
            }
        }
    }

    fn tell_budget(&self, change: Option<Change>) {
        let Some(change) = change else { return };
        let team_id = self.args.team.clone();
        let window_seconds = self.args.budget.window.as_secs();
        let throttled = matches!(change, Change::Throttled { .. });
        let event = match change {
            Change::Throttled { exits: exits_in_window } => {
                tracing::warn!(%team_id, exits_in_window, window_seconds, "too many unwanted exits: the team's servers start one at a time");
                Event::TeamThrottled { team_id: team_id.clone(), exits_in_window, window_seconds }
            }
            Change::Unthrottled { exits: exits_in_window } => {
                tracing::info!(%team_id, exits_in_window, window_seconds, "the team's servers start as usual again");
                Event::TeamUnthrottled { team_id: team_id.clone(), exits_in_window, window_seconds }
            }
        };
        self.args.events.emit(event);
        self.tell_root(root::Msg::Throttle(team_id, throttled, self.budget.clone()));
    }

    /// An error says that Root has died, and this supervisor with it.
    fn tell_root(&self, msg: root::Msg) {
        let _ = cast!(self.args.root, msg);
    }

    /// An error says that the registry has died: the next one is told everything.
    fn tell_registry(&self, msg: registry::Msg) {
        let _ = cast!(self.args.registry, msg);
    }

    /// One timer for the team, at the first of all deadlines.
    fn rearm(&mut self, myself: &ActorRef<Msg>) {
        let first = self.deadlines.first().map(|(at, _)| *at);
        let due = first.into_iter().chain(self.budget.deadline(&self.args.budget)).min();
        if self.alarm.as_ref().map(|(at, _)| *at) == due {
            return;
        }
        self.alarm = due.map(|at| {
            let (mut alarm, me) = (Tasks::default(), myself.clone());
            alarm.spawn(async move {
                tokio::time::sleep_until(Instant::from_std(at)).await;
                let _ = cast!(me, Msg::Tick);
            });
            (at, alarm)
        });
    }
}

impl Instance {
    /// The slot's decision. What is told of an instance is told in the name of its configuration.
    fn handle(&mut self, now: std::time::Instant, input: Input) -> Vec<Effect> {
        let before = self.slot.spec.clone();
        let effects = self.slot.handle(now, input);
        if !Arc::ptr_eq(&before, &self.slot.spec) {
            self.subject = Arc::new(Subject::from(&*self.slot.spec));
        }
        effects
    }

    fn worker(&self, run: Run) -> Option<&Worker> {
        self.workers.iter().find(|worker| worker.run == run)
    }

    /// The door of the run that takes calls.
    fn port(&self) -> Option<&CallPort> {
        self.worker(self.slot.open_run()?)?.port.as_ref()
    }

    /// A worker that has died needs no telling.
    fn tell_worker(&self, run: Run, msg: worker::Msg) {
        if let Some(worker) = self.worker(run) {
            let _ = cast!(worker.actor, msg);
        }
    }

    fn tell_session(&self, run: Run, control: Control) {
        self.tell_worker(run, worker::Msg::Control(control));
    }

    fn admit(&mut self, run: Run) {
        // A run whose session is over takes no calls, though the news of its end is still on its way: they wait for it.
        let port = self.worker(run).and_then(|worker| worker.port.clone());
        let Some(port) = port.filter(CallPort::is_open) else { return };
        // Taken, not drained: one that sleeps keeps no room for the callers of a burst.
        for caller in std::mem::take(&mut self.callers) {
            let _ = caller.send(Ok(port.clone()));
        }
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
            since: self.since.1,
            want: slot.want,
            dormant: slot.is_dormant(),
            connection: slot.connection(),
            health: slot.health,
            server: slot.server.clone(),
            pid: slot.pid,
            custody: current.and_then(|worker| worker.custody.clone()),
            restarts: slot.restarts,
            history: slot.history.clone(),
            next_retry_at: slot.next_retry_at(),
            attempt: slot.attempt(),
            initialized_at: slot.initialized_at,
            catalogue: slot.catalogue.clone(),
            revisions: slot.revisions,
            port: self.port().cloned(),
            draining: slot.leaving().and_then(|run| self.worker(run)?.port.clone()),
            counters: self.counters.clone(),
            last_error: slot.last_error.clone(),
            last_exit: slot.last_exit.clone(),
        }
    }
}

fn denied(effects: &[Effect]) -> Option<ControlError> {
    effects.iter().find_map(|effect| match effect {
        Effect::Denied { message, remedy } => Some(ControlError::Refused { message: message.clone(), remedy: *remedy }),
        _ => None,
    })
}

/// Where an instance arrives is news; what it passes through on the way is not, with thousands of them.
fn log_status(spec: &InstanceSpec, status: Status, message: Option<&str>) {
    let instance = &spec.name;
    if status.is_transitional() {
        tracing::debug!(%instance, %status, reason = message, "status");
    } else {
        tracing::info!(%instance, %status, reason = message, "status");
    }
}

/// What is told and is no arrival at a status.
fn log_told(spec: &InstanceSpec, told: &Told) {
    let instance = &spec.name;
    match told {
        Told::NotTaken { reason } => tracing::warn!(
            %instance, reason,
            "the new configuration did not come up; the old one stays"
        ),
        Told::Crashed { exit, will_restart, .. } | Told::Exited { exit, will_restart } => {
            let uptime_seconds = exit.ran.unwrap_or_default().as_secs();
            tracing::warn!(
                %instance, pid = exit.pid,
                reason = exit.reason(), uptime_seconds, will_restart, "the server ended unasked"
            );
        }
        Told::Dormant { pid, idle, .. } => tracing::info!(
            %instance, pid,
            idle_seconds = idle.as_secs(), "asleep"
        ),
        Told::Respawned { dormant, took } => tracing::info!(
            %instance, dormant_seconds = dormant.as_secs(), took_ms = milliseconds(*took), "the server has woken up"
        ),
        Told::Health(HealthNews::Degraded { failures, last_error }) => tracing::warn!(
            %instance, consecutive_failures = failures,
            last_error, "its health checks fail"
        ),
        Told::Health(HealthNews::Restored { .. }) => tracing::info!(
            %instance, "the server is healthy again"
        ),
        Told::Reconnecting { attempt, after } => tracing::debug!(
            %instance, attempt,
            next_retry_ms = milliseconds(*after), "not connected"
        ),
        // Their status is logged.
        Told::Disconnected { .. }
        | Told::Reconnected { .. }
        | Told::Started { .. }
        | Told::Restarted { .. }
        | Told::Discovered { .. }
        | Told::Stopped { .. }
        | Told::Removed { .. }
        | Told::PermanentlyFailed { .. } => {}
    }
}

/// Whether it is about a run that is gone, not about what the instance is now.
fn is_an_end(told: &Told) -> bool {
    matches!(told, Told::Stopped { .. } | Told::Disconnected { .. } | Told::Exited { .. } | Told::Crashed { .. })
}

/// Whether readers see a difference after this, even if no effect says so.
fn shows(input: &Input) -> bool {
    match input {
        Input::Spawned(..) | Input::Update(_) | Input::DiscoveryFailed(..) | Input::Initialized(..) => true,
        // An attempt begins, or is nearer than it was.
        Input::Reconnect | Input::Woke(_) | Input::Granted(_) | Input::Call => true,
        _ => false,
    }
}

/// What a slot tells, with names and times.
fn events_of(told: Told, subject: &Arc<Subject>, slot: &Slot, events: &Emitter, now: std::time::Instant) -> Vec<Event> {
    let (of, pid, spec) = (subject.clone(), slot.pid, &*slot.spec);
    let seconds = |exit: &WorkerExit| exit.ran.unwrap_or_default().as_secs();
    let one = match told {
        Told::Started { after, tool_count } => {
            let spawn_duration_ms = milliseconds(after);
            Event::Started { of, pid, transport: spec.transport().to_owned(), tool_count, spawn_duration_ms }
        }
        Told::Restarted { reason, old_pid, attempt } => {
            Event::Restarted { of, old_pid, new_pid: pid, restart_reason: reason, attempt_number: attempt }
        }
        Told::Dormant { pid, idle, last_activity } => {
            let ago = now.saturating_duration_since(last_activity);
            // A clock that shows less than that is wrong anyway.
            let last_activity_at = events.wall().checked_sub(ago).unwrap_or_default();
            Event::Dormant { of, pid, idle_duration_seconds: idle.as_secs(), last_activity_at }
        }
        Told::Respawned { dormant, took } => Event::Respawned {
            of,
            pid,
            dormant_duration_seconds: dormant.as_secs(),
            respawn_duration_ms: milliseconds(took),
        },
        Told::Discovered { before, now } => {
            let tools = now.tools.iter().map(|tool| tool.name.to_string()).collect();
            let (tool_count, total_tokens) = (now.tools.len(), now.total_tokens());
            let discovered = Event::ToolsDiscovered { of: of.clone(), tool_count, total_tokens, tools };
            let difference = before.map(|before| now.difference(&before)).filter(|difference| !difference.is_empty());
            let updated = difference.map(|difference| Event::ToolsUpdated {
                of,
                added_tools: difference.added,
                removed_tools: difference.removed,
                total_tools: now.tools.len(),
            });
            return std::iter::once(discovered).chain(updated).collect();
        }
        // The status that goes with it says so.
        Told::NotTaken { .. } => return Vec::new(),
        Told::Disconnected { intentional: was_intentional } => Event::Disconnected { of, was_intentional },
        Told::Reconnecting { attempt, after } => {
            Event::Reconnecting { of, attempt, next_retry_ms: milliseconds(after) }
        }
        Told::Reconnected { attempts: attempts_taken, changed } => {
            let capabilities = slot.server.as_ref().map(|server| serde_json::from_str(server.capabilities.get()));
            // It was parsed in the handshake.
            let capabilities = capabilities.and_then(Result::ok).unwrap_or_default();
            Event::Reconnected { of, capabilities: spec.mask.apply_json(capabilities), attempts_taken, changed }
        }
        Told::Health(HealthNews::Degraded { failures: consecutive_failures, last_error }) => {
            Event::HealthDegraded { of, consecutive_failures, last_error }
        }
        Told::Health(HealthNews::Restored { failures: consecutive_failures, last_error }) => {
            Event::HealthRestored { of, consecutive_failures, last_error }
        }
        Told::Stopped { kind, exit } => Event::Stopped {
            of,
            kind,
            exit_code: exit.code,
            signal: exit.signal,
            forced: exit.forced,
            active: None,
            dormant: None,
        },
        Told::Removed { active, dormant, exit } => Event::Stopped {
            of,
            kind: StopKind::Uninstall,
            exit_code: exit.as_ref().and_then(|exit| exit.code),
            signal: exit.as_ref().and_then(|exit| exit.signal),
            forced: exit.is_some_and(|exit| exit.forced),
            active: Some(active),
            dormant: Some(dormant),
        },
        Told::Exited { exit, will_restart } => Event::Exited {
            of,
            exit_code: exit.code,
            signal: exit.signal,
            forced: exit.forced,
            uptime_seconds: seconds(&exit),
            will_restart,
        },
        Told::Crashed { exit, count, will_restart } => Event::Crashed {
            of,
            reason: exit.reason(),
            exit_code: exit.code,
            signal: exit.signal,
            uptime_seconds: seconds(&exit),
            crash_count: count,
            will_restart,
        },
        Told::PermanentlyFailed { exits, last_error, message, remedy } => Event::PermanentlyFailed {
            of,
            total_crashes: exits,
            last_error,
            message,
            remedy: Some(remedy),
            failed_at: events.wall(),
        },
    };
    vec![one]
}

fn milliseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
