//! The root supervisor: it holds what is desired, the start permits and the way out, and restarts the registry, the
//! batcher and each team's supervisor, so that the death of one touches no other. When Root itself ends, the satellite
//! ends.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};

use futures::FutureExt;
use jiff::Timestamp;
use ractor::{Actor, ActorCell, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent, cast};
use tokio::sync::{oneshot, watch};
use tokio::time::{Duration, Instant};

use crate::audience::Audience;
use crate::batcher::{self, Emitter, EventBatcher};
use crate::byte_budget::ServerMemory;
use crate::calls::CallPort;
use crate::model::catalogue::Catalogue;
use crate::model::event::{Event, StopKind, Subject};
use crate::model::exit::{CallError, RuntimeEnd};
use crate::model::ids::{InstanceId, Run, TeamId};
use crate::model::memo::StoredMemo;
use crate::model::policy::{BatchPolicy, MemoryPolicy, RestartPolicy, TeamBudgetPolicy};
use crate::model::remedy::Remedy;
use crate::model::remote::Connection;
use crate::model::snapshot::{InstanceView, Snapshot};
use crate::model::spec::{InstanceSpec, Keep};
use crate::model::status::Status;
use crate::registry::{self, StatusRegistry};
use crate::rules::idle;
use crate::rules::memory::{self, MemoryGate, MemoryNews, MemoryReading, MemoryStatus};
use crate::rules::outbox::Outbox;
use crate::rules::permits::{Pools, Urgency};
use crate::rules::restart::{History, Verdict};
use crate::rules::slot::{Input, Memo, Want};
use crate::rules::team_budget::TeamBudget;
use crate::seam::{Connector, EventSink, Memory};
use crate::tasks::{Tasks, guarded, panic_text};
use crate::team::{self, ControlError, Reconnected, Reply, TeamSupervisor, Uninstalled, Verb};

/// Beyond the longest grace a shutdown waits this long for workers to be gone, then kills what is left.
const SHUTDOWN_MARGIN: Duration = Duration::from_secs(2);
/// Beyond the longest grace a shutdown takes no longer than this, the last flush of the events included.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);
/// A supervisor that could not be started is tried again after this.
const SPAWN_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What Root is told.
pub(crate) enum Msg {
    /// Install an instance, or change the configuration of one that is there; nothing if it is the same. What is known is
    /// of a new one.
    Install(Arc<InstanceSpec>, Known, Reply<Installed>),
    /// Change the configuration of an instance that is there, and only that.
    Update(Arc<InstanceSpec>, Reply<Installed>),
    /// Remove an instance.
    Uninstall(InstanceId, Reply<Uninstalled>),
    /// A person asks.
    Control(InstanceId, Verb, Reply<()>),
    /// A person wants a connection made anew, and to know what comes of it.
    Reconnect(InstanceId, Reply<Reconnected>),
    /// The machine was suspended for so long: no clock of ours has seen it.
    Woke(Duration),
    /// A reading of the memory of the machine.
    Memory(MemoryReading),
    /// A caller wants a run that takes calls.
    Ensure(InstanceId, oneshot::Sender<Result<CallPort, CallError>>),
    /// An instance wants to start.
    RequestPermit(InstanceId, Urgency),
    /// It does not any more.
    WithdrawPermit(InstanceId),
    /// A start is through its expensive part.
    ReleasePermit(Run),
    /// Whether a team's starts go one at a time, and the budget that says so.
    Throttle(TeamId, bool, TeamBudget),
    /// An unwanted exit was charged to a team, for the case that its supervisor dies.
    ChargeTeam(TeamId, std::time::Instant),
    /// What an instance has come to with this configuration, for the case that its supervisor dies.
    Remember(Arc<InstanceSpec>, Box<Memo>),
    /// An instance is gone.
    Forget(InstanceId),
    /// A supervisor that keeps dying has waited long enough.
    Revive(TeamId),
    /// Answer when what the teams told before this is published.
    Barrier(oneshot::Sender<()>),
    /// Whether there is such an instance: a new one is not in the snapshot at once.
    IsInstalled(InstanceId, oneshot::Sender<bool>),
    /// Send the queued events now.
    FlushEvents(oneshot::Sender<()>),
    /// A part of the tree is gone. Told by Root to itself, so that it comes after all that the dead had told.
    Died(ActorId, String, Remains),
    /// End everything with grace, and tell what was lost.
    Shutdown(oneshot::Sender<Farewell>),
    /// The grace of a shutdown is over.
    ShutdownOverdue,
    /// The last flush is over, or was cut short with this many events unsent.
    Flushed(usize),
    /// For the load harness and the tests: let one of the parts panic, as a fault of ours would.
    Panic(Part),
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

/// State that an ended part of the tree leaves behind.
pub(crate) enum Remains {
    Nothing,
    /// The queue of the batcher.
    Outbox(Box<Outbox>),
    /// The instance that a team's supervisor was handling when it panicked.
    Instance(InstanceId),
}

/// A part of the tree, for faults on purpose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The root supervisor, and with it the runtime.
    Root,
    /// The supervisor of this instance's team, while it handles this instance.
    Instance(InstanceId),
    /// The worker of this instance.
    Worker(InstanceId),
    /// The supervisor of this team.
    Team(TeamId),
    /// The status registry.
    Registry,
    /// The event batcher.
    Batcher,
}

/// What is known of a new instance from before the satellite was started, under the same configuration.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// What it had come to.
    pub memo: Option<StoredMemo>,
    /// Its tools. One that slept, or is `lazy`, sleeps until it is called, and they are read again when it is awake; of
    /// another they say nothing.
    pub catalogue: Option<Arc<Catalogue>>,
}

/// What an install did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Installed {
    /// The instance is new.
    New,
    /// It was there with another configuration, or goes on with an older one because this one did not come up: that is
    /// tried again.
    Updated,
    /// It was there, the same.
    Unchanged,
}

/// How a shutdown went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Farewell {
    /// Events that could not be handed to the sink.
    pub events_lost: usize,
    /// Whether every worker was gone within its grace.
    pub in_time: bool,
}

/// What a runtime is made of.
pub(crate) struct Args {
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) audience: Arc<dyn Audience>,
    pub(crate) server_memory: ServerMemory,
    pub(crate) sink: Arc<dyn EventSink>,
    pub(crate) events: Emitter,
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) next_seq: u64,
    pub(crate) batch: BatchPolicy,
    pub(crate) team_budget: TeamBudgetPolicy,
    pub(crate) start_permits: usize,
    pub(crate) connect_permits: usize,
    pub(crate) seed: u64,
    pub(crate) published: watch::Sender<Arc<Snapshot>>,
    pub(crate) memory_policy: MemoryPolicy,
    pub(crate) memory_status: watch::Sender<MemoryStatus>,
    /// Set before Root ends by itself.
    pub(crate) end: Arc<OnceLock<RuntimeEnd>>,
}

impl Args {
    /// Microseconds since 1970: no earlier process can have counted up to here, one batch at a time.
    fn first_batch(&self) -> u64 {
        u64::try_from(self.events.wall().as_microsecond()).unwrap_or(1)
    }
}

pub(crate) struct Root;

pub(crate) struct State {
    args: Args,
    /// Ordered by team, so that a team's are a range.
    instances: BTreeMap<InstanceId, Desired>,
    /// Ordered, as what all are told has the same order every time.
    teams: BTreeMap<TeamId, Team>,
    supervisors: HashMap<ActorId, TeamId>,
    registry: ActorRef<registry::Msg>,
    batcher: Option<ActorRef<batcher::Msg>>,
    permits: Pools,
    memory: MemoryGate,
    last_run: u64,
    closing: Option<Closing>,
    tasks: Tasks,
}

/// An instance as desired, and what it has come to.
struct Desired {
    spec: Arc<InstanceSpec>,
    /// With which configuration: an update that died with its supervisor is told to the next one.
    memo: Option<(Arc<InstanceSpec>, Box<Memo>)>,
    /// Set while it is being removed.
    leaving: Option<Leaving>,
    /// Panics of its team's supervisor while that was handling it.
    panics: History,
}

/// An instance that is being removed, and what was installed under its identity meanwhile.
struct Leaving {
    next: Option<(Arc<InstanceSpec>, Known)>,
}

impl Desired {
    /// A new one, with what is known of it.
    fn new(spec: Arc<InstanceSpec>, known: Known, wall: Timestamp) -> Self {
        let Known { memo, catalogue } = known;
        let memo = (memo.is_some() || catalogue.is_some()).then(|| {
            let now = Instant::now().into_std();
            Box::new(Memo::restored(&spec, &memo.unwrap_or_default(), catalogue, now, wall))
        });
        Self { memo: memo.map(|memo| (spec.clone(), memo)), spec, leaving: None, panics: History::default() }
    }

    /// Charges a panic of its team's supervisor. Once too often it is set aside, so that the rest of the team goes on.
    fn charge_panic(&mut self, why: &str, now: std::time::Instant) {
        let Verdict::GiveUp { exits, .. } = self.panics.charge(&RestartPolicy::default(), now, true, Duration::ZERO)
        else {
            return;
        };
        // A person who restarts it gives it as many tries again.
        self.panics.clear();
        let message = format!("The satellite itself failed {exits} times while it handled this server; last: {why}.");
        tracing::error!(instance = %self.spec.name, message, "the server failed permanently: repeated panics");
        let mut memo = self.memo.take().map(|(_, memo)| memo).unwrap_or_default();
        memo.set_aside(message);
        self.memo = Some((self.spec.clone(), memo));
    }

    /// Whether what is desired did not come up beside what there is, and might now.
    fn can_try_again(&self) -> bool {
        self.memo.as_ref().is_some_and(|(_, memo)| memo.can_try_again(&self.spec))
    }
}

/// A team's supervisor, and how often it has died.
#[derive(Default)]
struct Team {
    supervisor: Option<ActorRef<team::Msg>>,
    deaths: History,
    /// As its supervisor has it.
    budget: TeamBudget,
}

struct Closing {
    replies: Vec<oneshot::Sender<Farewell>>,
    deadline: Instant,
    in_time: bool,
    flushing: bool,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for Root {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, myself: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        let registry = spawn_registry(Snapshot::default(), &args, &myself.get_cell()).await?;
        let outbox = Outbox::new(args.batch.clone(), args.next_seq, args.first_batch());
        let batcher = Some(spawn_batcher(outbox, &args, &myself.get_cell()).await?);
        let permits = Pools::new(args.start_permits, args.connect_permits);
        Ok(State {
            args,
            instances: BTreeMap::new(),
            teams: BTreeMap::new(),
            supervisors: HashMap::new(),
            registry,
            batcher,
            permits,
            memory: MemoryGate::default(),
            last_run: 0,
            closing: None,
            tasks: Tasks::default(),
        })
    }

    /// Every variant by name: the default would stop the satellite when any of its parts ends.
    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Msg>,
        event: SupervisionEvent,
        _state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorTerminated(who, _, _) => {
                drop(cast!(myself, Msg::Died(who.get_id(), "ended".to_owned(), Remains::Nothing)));
            }
            SupervisionEvent::ActorFailed(who, error) => {
                let why = error.to_string();
                let remains = match error.downcast::<batcher::Died>() {
                    Ok(died) => died.outbox.map(Remains::Outbox),
                    Err(error) => {
                        error.downcast::<team::Died>().ok().and_then(|died| died.instance.map(Remains::Instance))
                    }
                };
                drop(cast!(myself, Msg::Died(who.get_id(), why, remains.unwrap_or(Remains::Nothing))));
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => {}
            #[cfg(feature = "cluster")]
            SupervisionEvent::PidLifecycleEvent(_) => {}
        }
        Ok(())
    }

    /// Runs the handler so that the reason for the end of the runtime is known: ractor tells it to an actor of the host only.
    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        let error = match AssertUnwindSafe(Self::on_message(myself, msg, state)).catch_unwind().await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(panic) => panic_text(panic.as_ref()).into(),
        };
        tracing::error!(%error, "the root supervisor failed; the runtime ends");
        // An error says that it is ending already, and why.
        let _ = state.args.end.set(RuntimeEnd::Failed(error.to_string()));
        Err(error)
    }
}

impl Root {
    async fn on_message(myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match msg {
            Msg::Install(spec, known, reply) => state.install(spec, known, reply, &myself).await,
            Msg::Update(spec, reply) => {
                if state.instances.get(&spec.id).is_some_and(|desired| desired.leaving.is_none()) {
                    state.install(spec, Known::default(), reply, &myself).await;
                } else {
                    let _ = reply.send(Err(ControlError::NotFound));
                }
            }
            Msg::Uninstall(id, reply) => {
                state.uninstall(id, reply);
            }
            Msg::Control(id, verb, reply) => {
                let team = id.team.clone();
                if state.instances.contains_key(&id) {
                    state.tell_team(&team, team::Msg::Control(id, verb, reply));
                } else {
                    let _ = reply.send(Err(ControlError::NotFound));
                }
            }
            Msg::Reconnect(id, reply) => {
                let team = id.team.clone();
                if state.instances.contains_key(&id) {
                    state.tell_team(&team, team::Msg::Reconnect(id, reply));
                } else {
                    let _ = reply.send(Err(ControlError::NotFound));
                }
            }
            Msg::Woke(asleep) => {
                for team in state.teams.values().filter_map(|team| team.supervisor.as_ref()) {
                    let _ = cast!(team, team::Msg::Woke(asleep));
                }
            }
            Msg::Memory(reading) => state.on_memory(reading),
            Msg::Ensure(id, reply) => {
                let team = id.team.clone();
                if state.instances.contains_key(&id) {
                    state.tell_team(&team, team::Msg::Ensure(id, reply));
                } else {
                    let _ = reply.send(Err(CallError::NotFound { what: "server".to_owned() }));
                }
            }
            Msg::RequestPermit(id, urgency) => {
                let remote = state.instances.get(&id).is_some_and(|desired| desired.spec.is_remote());
                state.permits.request(id, urgency, remote);
                state.grant();
            }
            Msg::WithdrawPermit(id) => state.permits.withdraw(&id),
            Msg::ReleasePermit(run) => {
                state.permits.release(run);
                state.grant();
            }
            Msg::Throttle(team, one_at_a_time, budget) => {
                if let Some(entry) = state.teams.get_mut(&team) {
                    entry.budget = budget;
                }
                state.permits.throttle(team, one_at_a_time);
                state.grant();
            }
            Msg::ChargeTeam(team, at) => {
                if let Some(entry) = state.teams.get_mut(&team) {
                    // What changes with it the team has found out itself.
                    let _ = entry.budget.charge(&state.args.team_budget, at);
                }
            }
            Msg::Remember(spec, memo) => state.remember(spec, memo),
            Msg::Forget(id) => state.forget(&id, &myself).await,
            Msg::Revive(team) => state.revive(&team, &myself).await,
            Msg::Died(who, why, remains) => state.on_death(who, why, remains, &myself).await?,
            Msg::Barrier(reply) => drop(cast!(state.registry, registry::Msg::Barrier(reply))),
            Msg::IsInstalled(id, reply) => drop(reply.send(state.instances.contains_key(&id))),
            Msg::FlushEvents(reply) => {
                if let Some(batcher) = &state.batcher {
                    let _ = cast!(batcher, batcher::Msg::FlushNow(reply));
                }
            }
            Msg::Shutdown(reply) => state.shut_down(reply, &myself),
            Msg::ShutdownOverdue => state.kill_what_is_left(&myself),
            Msg::Flushed(events_lost) => {
                let Some(closing) = state.closing.take() else { return Ok(()) };
                let _ = state.args.end.set(RuntimeEnd::ShutDown { events_lost, in_time: closing.in_time });
                for reply in closing.replies {
                    let _ = reply.send(Farewell { events_lost, in_time: closing.in_time });
                }
                myself.stop(None);
            }
            Msg::Panic(part) => state.panic(part),
        }
        Ok(())
    }
}

impl State {
    async fn install(
        &mut self,
        spec: Arc<InstanceSpec>,
        known: Known,
        reply: Reply<Installed>,
        myself: &ActorRef<Msg>,
    ) {
        if self.closing.is_some() {
            let _ = reply.send(Err(ControlError::Closing));
            return;
        }
        let (id, team) = (spec.id.clone(), spec.id.team.clone());
        let installed = match self.instances.get_mut(&id) {
            // What was there is still ending: this comes after it, as something new.
            Some(Desired { leaving: Some(leaving), .. }) => {
                leaving.next = Some((spec, known));
                Installed::New
            }
            Some(desired) if desired.spec == spec && !desired.can_try_again() => Installed::Unchanged,
            Some(desired) => {
                desired.spec = spec.clone();
                self.tell_team(&team, team::Msg::Update(spec));
                Installed::Updated
            }
            None => {
                self.install_new(spec, known, myself).await;
                Installed::New
            }
        };
        let _ = reply.send(Ok(installed));
    }

    fn uninstall(&mut self, id: InstanceId, reply: Reply<Uninstalled>) {
        let Some(desired) = self.instances.get_mut(&id) else {
            let _ = reply.send(Err(ControlError::NotFound));
            return;
        };
        // Asked again, it undoes what was installed meanwhile, too.
        desired.leaving = Some(Leaving { next: None });
        let dormant = desired.memo.as_ref().is_some_and(|(_, memo)| memo.is_dormant());
        let team = id.team.clone();
        if self.supervisor(&team).is_some() {
            self.tell_team(&team, team::Msg::Uninstall(id, reply));
        } else {
            // Its supervisor has died and its process with it: there is nothing to end.
            self.forget_leaving(&team);
            let _ = reply.send(Ok(Uninstalled { active: false, dormant }));
        }
    }

    async fn install_new(&mut self, spec: Arc<InstanceSpec>, known: Known, myself: &ActorRef<Msg>) {
        let team = spec.id.team.clone();
        let desired = Desired::new(spec.clone(), known, self.args.events.wall());
        let memo = desired.memo.as_ref().map(|(_, memo)| memo.clone());
        self.instances.insert(spec.id.clone(), desired);
        if self.teams.contains_key(&team) {
            self.tell_team(&team, team::Msg::Install(spec, memo));
        } else {
            self.spawn_team(&team, myself).await;
        }
    }

    /// What outlives the satellite is written down where it has changed. What an end brings is no part of that: an
    /// instance that slept when the satellite ended sleeps on with the next one.
    fn remember(&mut self, spec: Arc<InstanceSpec>, memo: Box<Memo>) {
        let Some(desired) = self.instances.get_mut(&spec.id) else { return };
        let is_stored = match &desired.memo {
            Some((of, before)) => (Arc::ptr_eq(of, &spec) || *of == spec) && memo.is_stored_as(before),
            None => memo.is_stored_as(&Memo::default()),
        };
        if !is_stored && self.closing.is_none() && desired.leaving.is_none() {
            let stored = memo.stored(Instant::now().into_std(), self.args.events.wall());
            guarded("Memory::remember", || self.args.memory.remember(&spec, stored));
        }
        desired.memo = Some((spec, memo));
    }

    async fn forget(&mut self, id: &InstanceId, myself: &ActorRef<Msg>) {
        self.permits.withdraw(id);
        guarded("Memory::forget", || self.args.memory.forget(id));
        // A registry that died meanwhile may have gone on from a picture that still shows it.
        drop(cast!(self.registry, registry::Msg::Remove(id.clone())));
        if let Some((spec, known)) = self.instances.remove(id).and_then(|desired| desired.leaving?.next) {
            self.install_new(spec, known, myself).await;
        }
        if self.of_team(&id.team).next().is_none()
            && let Some(supervisor) = self.teams.remove(&id.team).and_then(|team| team.supervisor)
        {
            self.supervisors.remove(&supervisor.get_id());
            supervisor.stop(None);
            self.permits.forget_team(&id.team);
            self.grant();
        }
    }

    fn of_team(&self, team: &TeamId) -> impl Iterator<Item = &Desired> {
        let of_team = |(id, _): &(&InstanceId, &Desired)| id.team == *team;
        self.instances.range(InstanceId::first_of(team)..).take_while(of_team).map(|(_, desired)| desired)
    }

    /// What was being removed when its supervisor died is gone with it.
    fn forget_leaving(&mut self, team: &TeamId) {
        let leaving = self.of_team(team).filter(|desired| desired.leaving.is_some());
        let leaving: Vec<InstanceId> = leaving.map(|desired| desired.spec.id.clone()).collect();
        for id in leaving {
            guarded("Memory::forget", || self.args.memory.forget(&id));
            let Some(desired) = self.instances.remove(&id) else { continue };
            // The slot that would have sent the event of the removal ended with the supervisor.
            let dormant = desired.memo.as_ref().is_some_and(|(_, memo)| memo.is_dormant());
            self.args.events.emit(Event::Stopped {
                of: Arc::new(Subject::from(&*desired.spec)),
                kind: StopKind::Uninstall,
                exit_code: None,
                signal: None,
                forced: false,
                active: Some(false),
                dormant: Some(dormant),
            });
            match desired.leaving.and_then(|leaving| leaving.next) {
                Some((spec, known)) => {
                    let desired = Desired::new(spec, known, self.args.events.wall());
                    self.instances.insert(id, desired);
                }
                None => drop(cast!(self.registry, registry::Msg::Remove(id))),
            }
        }
    }

    /// Starts a team's supervisor with all instances of the team, and what each had come to.
    async fn spawn_team(&mut self, team: &TeamId, myself: &ActorRef<Msg>) {
        let args = team::Args {
            team: team.clone(),
            budget: self.args.team_budget.clone(),
            charged: self.teams.get(team).map(|entry| entry.budget.clone()).unwrap_or_default(),
            connector: self.args.connector.clone(),
            audience: self.args.audience.clone(),
            server_memory: self.args.server_memory.clone(),
            seed: self.args.seed,
            events: self.args.events.clone(),
            root: myself.clone(),
            registry: self.registry.clone(),
        };
        let supervisor = match TeamSupervisor::spawn_linked(None, TeamSupervisor, args, myself.get_cell()).await {
            Ok((supervisor, _)) => supervisor,
            Err(error) => {
                tracing::error!(team_id = %team, %error, "cannot start a team's supervisor; trying again");
                self.revive_later(team.clone(), SPAWN_AGAIN_AFTER, myself);
                return;
            }
        };
        self.supervisors.insert(supervisor.get_id(), team.clone());
        for Desired { spec, memo, .. } in self.of_team(team) {
            let (of, memo) = memo.as_ref().map_or((spec, None), |(of, memo)| (of, Some(memo.clone())));
            let _ = cast!(supervisor, team::Msg::Install(of.clone(), memo));
            if of != spec {
                let _ = cast!(supervisor, team::Msg::Update(spec.clone()));
            }
        }
        self.teams.entry(team.clone()).or_default().supervisor = Some(supervisor);
    }

    async fn on_death(
        &mut self,
        who: ActorId,
        why: String,
        remains: Remains,
        myself: &ActorRef<Msg>,
    ) -> Result<(), ActorProcessingErr> {
        if who == self.registry.get_id() {
            tracing::error!(why, "the status registry died; starting another");
            let mut snapshot = (**self.args.published.borrow()).clone();
            snapshot.instances =
                snapshot.instances.into_iter().filter(|(id, _)| self.instances.contains_key(id)).collect();
            self.registry = spawn_registry(snapshot, &self.args, &myself.get_cell()).await?;
            for team in self.teams.values().filter_map(|team| team.supervisor.as_ref()) {
                let _ = cast!(team, team::Msg::Registry(self.registry.clone()));
            }
        } else if self.batcher.as_ref().is_some_and(|batcher| batcher.get_id() == who) {
            self.batcher = None;
            let outbox = if let Remains::Outbox(outbox) = remains { Some(outbox) } else { None };
            let flushing = self.closing.as_ref().is_some_and(|closing| closing.flushing);
            if flushing && outbox.is_none() {
                // It has ended: its last word was the answer to the flush.
                return Ok(());
            }
            tracing::error!(why, "the event batcher died; starting another with its queue");
            // Killed from outside its queue is lost: the next one goes on behind what was last numbered.
            let outbox = outbox.map_or_else(
                || {
                    let next_seq = self.args.next_seq + self.args.events.statistics().emitted;
                    Outbox::new(self.args.batch.clone(), next_seq, self.args.first_batch())
                },
                |outbox| *outbox,
            );
            self.batcher = Some(spawn_batcher(outbox, &self.args, &myself.get_cell()).await?);
            if flushing {
                self.flush(myself);
            }
        } else if let Some(team) = self.supervisors.remove(&who) {
            if let Remains::Instance(id) = remains
                && let Some(desired) = self.instances.get_mut(&id)
            {
                desired.charge_panic(&why, Instant::now().into_std());
            }
            self.on_team_death(&team, &why, myself).await;
        }
        Ok(())
    }

    async fn on_team_death(&mut self, team: &TeamId, why: &str, myself: &ActorRef<Msg>) {
        self.permits.forget_team(team);
        if self.teams.get(team).is_some_and(|entry| entry.budget.is_throttled()) {
            // Its death pays for nothing.
            self.permits.throttle(team.clone(), true);
        }
        self.grant();
        if self.closing.is_some() {
            self.teams.remove(team);
            self.flush_when_empty(myself);
            return;
        }
        self.forget_leaving(team);
        let Some(entry) = self.teams.get_mut(team) else { return };
        entry.supervisor = None;
        tracing::error!(team_id = %team, why, "a team's supervisor died; starting another with its instances");
        // The same backoff as for a server, but it never gives up: a team is not ours to abandon.
        let policy = RestartPolicy { max_crashes: usize::MAX, ..Default::default() };
        let delay = match entry.deaths.charge(&policy, Instant::now().into_std(), true, Duration::ZERO) {
            Verdict::Restart { attempt: 1, .. } | Verdict::GiveUp { .. } => Duration::ZERO,
            Verdict::Restart { delay, .. } => delay,
        };
        if delay.is_zero() {
            self.spawn_team(team, myself).await;
        } else {
            self.show_without_supervisor(team);
            self.revive_later(team.clone(), delay, myself);
        }
    }

    /// Its servers are gone with it, and readers must not see them online until it is back.
    fn show_without_supervisor(&self, team: &TeamId) {
        let snapshot = self.args.published.borrow().clone();
        for view in snapshot.team(team).filter(|view| view.port.is_some() || view.pid.is_some()) {
            let memo = self.instances.get(&view.spec.id).and_then(|desired| desired.memo.as_ref());
            // One that sleeps loses nothing with its supervisor, and does not leave `online`.
            let dormant = memo.is_some_and(|(_, memo)| memo.is_dormant());
            let (status, message) = match view.want {
                Want::Running if dormant => (Status::Online, view.message.clone()),
                Want::Running => (Status::Connecting, Some("its supervisor is being restarted".to_owned())),
                Want::Stopped => (Status::Offline, view.message.clone()),
            };
            let since = if status == view.status { view.since } else { self.args.events.wall() };
            let view = InstanceView {
                status,
                message,
                remedy: Remedy::of(status, view.want == Want::Stopped, view.spec.is_remote()),
                since,
                dormant,
                connection: view.connection.map(|_| Connection::Connecting),
                ..view.without_run()
            };
            drop(cast!(self.registry, registry::Msg::Put(Arc::new(view))));
        }
    }

    async fn revive(&mut self, team: &TeamId, myself: &ActorRef<Msg>) {
        if self.closing.is_some() || self.supervisor(team).is_some() {
            return;
        }
        if self.of_team(team).next().is_some() {
            self.spawn_team(team, myself).await;
        } else {
            self.teams.remove(team);
        }
    }

    fn revive_later(&mut self, team: TeamId, delay: Duration, myself: &ActorRef<Msg>) {
        let me = myself.clone();
        self.tasks.spawn(async move {
            tokio::time::sleep(delay).await;
            let _ = cast!(me, Msg::Revive(team));
        });
    }

    fn grant(&mut self) {
        while let Some((id, run)) = self.permits.grant(Run(self.last_run + 1)) {
            self.last_run = run.0;
            let team = id.team.clone();
            self.tell_team(&team, team::Msg::Granted(id, run));
        }
    }

    /// Delays starts while memory is short, and puts the longest-idle servers to sleep.
    fn on_memory(&mut self, reading: MemoryReading) {
        let now = Instant::now().into_std();
        let (pressure_percent, available_bytes) = (reading.pressure_percent, reading.available_bytes);
        match self.memory.observe(&self.args.memory_policy, &reading, now) {
            MemoryNews::Enough | MemoryNews::StillShort => {}
            MemoryNews::BecameShort => {
                tracing::warn!(
                    pressure_percent,
                    available_bytes,
                    "memory is short: starts are delayed, and the longest-idle servers are put to sleep"
                );
                self.permits.allow_processes(Some(0));
            }
            MemoryNews::OneStart => self.permits.allow_processes(Some(1)),
            MemoryNews::Relieved => {
                tracing::info!(pressure_percent, available_bytes, "memory is no longer short: servers start as usual");
                self.permits.allow_processes(None);
            }
        }
        self.grant();
        if self.memory.is_short() && self.closing.is_none() {
            for (id, idle) in memory::longest_idle(self.idle_servers(now)) {
                let team = id.team.clone();
                self.tell_team(&team, team::Msg::News(id, Input::MakeRoom(idle)));
            }
        }
        self.args.memory_status.send_replace(MemoryStatus {
            is_short: self.memory.is_short(),
            starts_waiting: self.permits.processes_waiting(),
            reading: Some(reading),
        });
    }

    /// The processes that may sleep and that nobody uses, each with how long it has been idle.
    fn idle_servers(&self, now: std::time::Instant) -> Vec<(InstanceId, Duration)> {
        let snapshot = self.args.published.borrow().clone();
        let idle = snapshot.iter().filter_map(|view| {
            let spec = &view.spec;
            let may_sleep = spec.keep != Keep::AlwaysOn && idle::first_look(&spec.policy.idle, now).is_some();
            let port = view.port.as_ref().filter(|_| may_sleep && !spec.is_remote())?;
            let activity = port.activity();
            (activity.needed_by == 0).then(|| (spec.id.clone(), now.saturating_duration_since(activity.last)))
        });
        idle.collect()
    }

    /// A team without a supervisor is between two: what is told to it is dropped, and whoever asked asks again.
    fn tell_team(&self, team: &TeamId, msg: team::Msg) {
        if let Some(supervisor) = self.supervisor(team) {
            let _ = cast!(supervisor, msg);
        }
    }

    fn supervisor(&self, team: &TeamId) -> Option<&ActorRef<team::Msg>> {
        self.teams.get(team)?.supervisor.as_ref()
    }

    fn shut_down(&mut self, reply: oneshot::Sender<Farewell>, myself: &ActorRef<Msg>) {
        if let Some(closing) = &mut self.closing {
            closing.replies.push(reply);
            return;
        }
        let grace = self.instances.values().map(|desired| grace(&desired.spec)).max();
        let grace = grace.unwrap_or_default();
        let deadline = Instant::now() + grace + SHUTDOWN_MAX;
        self.closing = Some(Closing { replies: vec![reply], deadline, in_time: true, flushing: false });
        let me = myself.clone();
        self.tasks.spawn(async move {
            tokio::time::sleep(grace + SHUTDOWN_MARGIN).await;
            let _ = cast!(me, Msg::ShutdownOverdue);
        });
        for team in self.teams.values().filter_map(|team| team.supervisor.as_ref()) {
            let _ = cast!(team, team::Msg::Shutdown);
        }
        self.teams.retain(|_, team| team.supervisor.is_some());
        self.flush_when_empty(myself);
    }

    fn kill_what_is_left(&mut self, myself: &ActorRef<Msg>) {
        let Some(closing) = &mut self.closing else { return };
        if closing.flushing {
            return;
        }
        closing.in_time = false;
        tracing::warn!(teams = self.teams.len(), "some servers did not end within their grace; killing them");
        for team in std::mem::take(&mut self.teams).into_values() {
            if let Some(supervisor) = team.supervisor {
                supervisor.kill();
            }
        }
        self.flush_when_empty(myself);
    }

    fn flush_when_empty(&mut self, myself: &ActorRef<Msg>) {
        let Some(closing) = self.closing.as_mut().filter(|closing| !closing.flushing) else { return };
        if !self.teams.is_empty() {
            return;
        }
        closing.flushing = true;
        self.args.events.close();
        self.flush(myself);
    }

    fn flush(&mut self, myself: &ActorRef<Msg>) {
        let Some(closing) = &self.closing else { return };
        let until = (Instant::now() + self.args.batch.flush_timeout).min(closing.deadline);
        let (reply, flushed) = oneshot::channel();
        if let Some(batcher) = &self.batcher {
            let _ = cast!(batcher, batcher::Msg::FlushAndEnd(reply));
        }
        let (events, me) = (self.args.events.clone(), myself.clone());
        self.tasks.spawn(async move {
            match tokio::time::timeout_at(until, flushed).await {
                Ok(Ok(lost)) => drop(cast!(me, Msg::Flushed(lost))),
                Err(_elapsed) => drop(cast!(me, Msg::Flushed(events.statistics().unsent()))),
                // The batcher died; the flush goes on with the next one, if its queue came back.
                Ok(Err(_)) => {
                    tokio::time::sleep_until(until).await;
                    drop(cast!(me, Msg::Flushed(events.statistics().unsent())));
                }
            }
        });
    }

    fn panic(&self, part: Part) {
        match part {
            Part::Root => std::panic::panic_any("asked to panic"),
            Part::Instance(id) => self.tell_team(&id.team.clone(), team::Msg::PanicFor(id)),
            Part::Registry => drop(cast!(self.registry, registry::Msg::Panic)),
            Part::Batcher => drop(self.batcher.as_ref().map(|batcher| cast!(batcher, batcher::Msg::Panic))),
            Part::Team(team) => self.tell_team(&team, team::Msg::Panic(None)),
            Part::Worker(id) => self.tell_team(&id.team.clone(), team::Msg::Panic(Some(id))),
        }
    }
}

/// How long its end may take.
fn grace(spec: &InstanceSpec) -> Duration {
    if spec.is_remote() { spec.policy.remote.close_timeout } else { spec.policy.session.terminate_grace }
}

async fn spawn_registry(
    snapshot: Snapshot,
    args: &Args,
    root: &ActorCell,
) -> Result<ActorRef<registry::Msg>, ActorProcessingErr> {
    let args = registry::Args { snapshot, published: args.published.clone() };
    Ok(StatusRegistry::spawn_linked(None, StatusRegistry, args, root.clone()).await?.0)
}

async fn spawn_batcher(
    outbox: Outbox,
    args: &Args,
    root: &ActorCell,
) -> Result<ActorRef<batcher::Msg>, ActorProcessingErr> {
    let (events, sink, interval) = (args.events.clone(), args.sink.clone(), args.batch.interval);
    let args = batcher::Args { events, sink, interval, outbox };
    Ok(EventBatcher::spawn_linked(None, EventBatcher, args, root.clone()).await?.0)
}
