//! The root supervisor. It holds the desired instances and the start permits, controls the shutdown, and restarts the
//! registry, the batcher and each team's supervisor, so that the death of one affects no other. The end of Root ends
//! the satellite.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};

use futures::FutureExt;
use jiff::Timestamp;
use ractor::{Actor, ActorCell, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent, cast};
use tokio::sync::{oneshot, watch};
use tokio::time::{Duration, Instant};

use crate::audience::Audience;
use crate::batcher::{self, EventBatcher, EventSender};
use crate::byte_budget::ServerMemory;
use crate::calls::CallPort;
use crate::model::catalogue::Catalogue;
use crate::model::event::{Event, EventSubject, StopKind};
use crate::model::exit::{CallError, RuntimeEnd};
use crate::model::ids::{InstanceId, RunNumber, TeamId};
use crate::model::memo::StoredMemo;
use crate::model::policy::{BatchPolicy, MemoryPolicy, RestartPolicy, TeamBudgetPolicy};
use crate::model::remedy::Remedy;
use crate::model::remote::ConnectionState;
use crate::model::snapshot::{InstanceView, Snapshot};
use crate::model::spec::{InstanceSpec, ProcessLifetime};
use crate::model::status::Status;
use crate::probe::{ActorAnswer, ActorProbe, PartRestarts, TeamFacts};
use crate::registry::{self, StatusRegistry};
use crate::rules::idle;
use crate::rules::memory::{self, MemoryChange, MemoryGate, MemoryReading, MemoryStatus};
use crate::rules::outbox::Outbox;
use crate::rules::permits::{PermitPools, StartPriority};
use crate::rules::restart::{ExitHistory, RestartVerdict};
use crate::rules::slot::{RequestedState, SlotInput, SlotMemo};
use crate::rules::team_budget::TeamBudget;
use crate::seam::{Connectors, EventSink, PermitUse, ProcessConnector, RuntimeObserver, StartLoad, StateStore};
use crate::tasks::{ActorTasks, catch_panic, panic_text};
use crate::team::{self, TeamSupervisor};
use crate::team_messages::{self, ControlError, ControlReply, InstanceCommand, ReconnectOutcome, UninstallOutcome};

/// Time beyond the longest grace after which a shutdown kills the remaining workers.
const SHUTDOWN_MARGIN: Duration = Duration::from_secs(2);
/// Maximum duration of a shutdown beyond the longest grace, including the last flush of events.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);
const RESPAWN_DELAY: Duration = Duration::from_secs(1);

/// Messages to Root.
///
/// `Install` installs a new instance with what is known of it, or changes the configuration of an existing one;
/// `Update` only the latter. `ResumedAfterSuspend` contains the duration of a suspend, which monotonic clocks did not count.
/// `Throttle` reports whether a team's starts run one at a time; `Throttle`, `ChargeTeam` and `SaveMemo` keep state of
/// a team for the case that its supervisor dies. `RespawnTeam` follows the delay of a supervisor that keeps dying. `Barrier`
/// replies once earlier updates of the teams are published, `Probe` shows whether all
/// actors but workers handle their messages, and `IsInstalled` covers instances that are not in the snapshot yet. Root sends `Died` to itself so that it arrives after all messages of the dead actor. `Flushed`
/// contains the number of unsent events. `Panic` panics on purpose, for the load harness and the tests.
pub(crate) enum Msg {
    Install(Arc<InstanceSpec>, EarlierState, ControlReply<InstallOutcome>),
    Update(Arc<InstanceSpec>, ControlReply<InstallOutcome>),
    Uninstall(InstanceId, ControlReply<UninstallOutcome>),
    Control(InstanceId, InstanceCommand, ControlReply<()>),
    Reconnect(InstanceId, ControlReply<ReconnectOutcome>),
    ResumedAfterSuspend(Duration),
    Memory(MemoryReading),
    Ensure(InstanceId, oneshot::Sender<Result<CallPort, CallError>>),
    RequestPermit(InstanceId, StartPriority),
    WithdrawPermit(InstanceId),
    ReleasePermit(RunNumber),
    Throttle(TeamId, bool, TeamBudget),
    ChargeTeam(TeamId, std::time::Instant),
    SaveMemo(Arc<InstanceSpec>, Box<SlotMemo>),
    RemoveInstance(InstanceId),
    RespawnTeam(TeamId),
    Barrier(oneshot::Sender<()>),
    Probe(ActorProbe),
    IsInstalled(InstanceId, oneshot::Sender<bool>),
    FlushEvents(oneshot::Sender<()>),
    Died(ActorId, String, ActorRemains),
    Shutdown(oneshot::Sender<ShutdownReport>),
    ShutdownOverdue,
    Flushed(usize),
    Panic(RuntimePart),
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

/// State that an ended actor leaves behind: the queue of the batcher, or the instance that a team's supervisor was
/// handling when it panicked.
pub(crate) enum ActorRemains {
    Nothing,
    Outbox(Box<Outbox>),
    Instance(InstanceId),
}

/// Part of the runtime that [`RuntimeHandle::panic`](crate::runtime::RuntimeHandle::panic) lets panic on purpose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuntimePart {
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

/// State of a new instance from an earlier satellite, under the same configuration.
#[derive(Debug, Clone, Default)]
pub struct EarlierState {
    /// Stored state of the instance.
    pub memo: Option<StoredMemo>,
    /// Last known tools. They apply only to an instance that was dormant or is `lazy`: it sleeps until the first call,
    /// and they are read again once it is awake.
    pub catalogue: Option<Arc<Catalogue>>,
}

/// Result of an install.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstallOutcome {
    /// The instance is new.
    New,
    /// The instance existed with another configuration, or still runs with an older one because this one did not start;
    /// the update is tried again.
    Updated,
    /// The instance existed with the same configuration.
    Unchanged,
}

/// Result of a shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Number of events that the sink did not receive.
    pub events_lost: usize,
    /// True if every worker ended within its grace.
    pub in_time: bool,
}

pub(crate) struct Args {
    pub(crate) connectors: Connectors,
    pub(crate) audience: Arc<dyn Audience>,
    pub(crate) server_memory: ServerMemory,
    pub(crate) observer: Arc<dyn RuntimeObserver>,
    pub(crate) sink: Arc<dyn EventSink>,
    pub(crate) events: EventSender,
    pub(crate) state_store: Arc<dyn StateStore>,
    pub(crate) next_seq: u64,
    pub(crate) batch: BatchPolicy,
    pub(crate) team_budget: TeamBudgetPolicy,
    pub(crate) start_permits: usize,
    pub(crate) connect_permits: usize,
    pub(crate) seed: u64,
    pub(crate) published: watch::Sender<Arc<Snapshot>>,
    pub(crate) memory_policy: MemoryPolicy,
    pub(crate) memory_status: watch::Sender<MemoryStatus>,
    // Set before Root ends by itself.
    pub(crate) end: Arc<OnceLock<RuntimeEnd>>,
}

impl Args {
    fn first_batch(&self) -> u64 {
        // Microseconds since 1970, which no earlier process can have reached by counting batches.
        u64::try_from(self.events.wall().as_microsecond()).unwrap_or(1)
    }
}

pub(crate) struct Root;

pub(crate) struct State {
    args: Args,
    // Ordered by team, so that the instances of a team are a range.
    instances: BTreeMap<InstanceId, DesiredInstance>,
    // Ordered, so that messages to all teams have a deterministic order.
    teams: BTreeMap<TeamId, TeamEntry>,
    supervisors: HashMap<ActorId, TeamId>,
    registry: ActorRef<registry::Msg>,
    batcher: Option<ActorRef<batcher::Msg>>,
    part_restarts: PartRestarts,
    permits: PermitPools,
    memory: MemoryGate,
    last_run: u64,
    closing: Option<ShutdownProgress>,
    tasks: ActorTasks,
}

/// Desired state of an instance, and what is known of it.
///
/// `memo` contains the configuration that it belongs to: if a supervisor dies during an update, the next one receives
/// the update too. `leaving` is set during a removal and contains what was installed with the same identity meanwhile.
/// `panics` are those of the team's supervisor while it handled this instance.
struct DesiredInstance {
    spec: Arc<InstanceSpec>,
    memo: Option<(Arc<InstanceSpec>, Box<SlotMemo>)>,
    removal: Option<PendingRemoval>,
    panics: ExitHistory,
}

struct PendingRemoval {
    next: Option<(Arc<InstanceSpec>, EarlierState)>,
}

impl DesiredInstance {
    fn new(spec: Arc<InstanceSpec>, known: EarlierState, adoption: Option<RunNumber>, wall: Timestamp) -> Self {
        let EarlierState { memo, catalogue } = known;
        let memo = (memo.is_some() || catalogue.is_some() || adoption.is_some()).then(|| {
            let now = Instant::now().into_std();
            let memo = SlotMemo::from_stored(&spec, &memo.unwrap_or_default(), catalogue, now, wall);
            Box::new(memo.with_adoption(adoption))
        });
        Self { memo: memo.map(|memo| (spec.clone(), memo)), spec, removal: None, panics: ExitHistory::default() }
    }

    fn charge_panic(&mut self, why: &str, now: std::time::Instant) {
        // After too many panics the instance fails permanently, so that the rest of the team continues.
        let RestartVerdict::GiveUp { exits, .. } =
            self.panics.charge(&RestartPolicy::default(), now, true, Duration::ZERO)
        else {
            return;
        };
        // A manual restart allows as many panics again.
        self.panics.clear();
        let message = format!("The satellite itself failed {exits} times while it handled this server; last: {why}.");
        tracing::error!(instance = %self.spec.name, message, "the server failed permanently: repeated panics");
        let mut memo = self.memo.take().map(|(_, memo)| memo).unwrap_or_default();
        memo.mark_failed(message);
        self.memo = Some((self.spec.clone(), memo));
    }

    fn can_retry(&self) -> bool {
        // A configuration that did not start in a rolling update can be tried again.
        self.memo.as_ref().is_some_and(|(_, memo)| memo.can_retry(&self.spec))
    }
}

#[derive(Default)]
struct TeamEntry {
    supervisor: Option<ActorRef<team_messages::Msg>>,
    deaths: ExitHistory,
    restarts: u64,
    budget: TeamBudget,
}

struct ShutdownProgress {
    replies: Vec<oneshot::Sender<ShutdownReport>>,
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
        let permits = PermitPools::new(args.start_permits, args.connect_permits);
        Ok(State {
            args,
            instances: BTreeMap::new(),
            teams: BTreeMap::new(),
            supervisors: HashMap::new(),
            registry,
            batcher,
            part_restarts: PartRestarts::default(),
            permits,
            memory: MemoryGate::default(),
            last_run: 0,
            closing: None,
            tasks: ActorTasks::default(),
        })
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Msg>,
        event: SupervisionEvent,
        _state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        // Names every variant: the default would stop the satellite when any of its parts ends.
        match event {
            SupervisionEvent::ActorTerminated(actor, _, _) => {
                drop(cast!(myself, Msg::Died(actor.get_id(), "ended".to_owned(), ActorRemains::Nothing)));
            }
            SupervisionEvent::ActorFailed(actor, error) => {
                let why = error.to_string();
                let remains = match error.downcast::<batcher::BatcherDeath>() {
                    Ok(died) => died.outbox.map(ActorRemains::Outbox),
                    Err(error) => error
                        .downcast::<team::TeamDeath>()
                        .ok()
                        .and_then(|died| died.instance.map(ActorRemains::Instance)),
                };
                drop(cast!(myself, Msg::Died(actor.get_id(), why, remains.unwrap_or(ActorRemains::Nothing))));
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => {}
            #[cfg(feature = "cluster")]
            SupervisionEvent::PidLifecycleEvent(_) => {}
        }
        Ok(())
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        // Records the reason of a failure: ractor reports it only to an actor of the host.
        let error = match AssertUnwindSafe(Self::on_message(myself, msg, state)).catch_unwind().await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(panic) => panic_text(panic.as_ref()).into(),
        };
        tracing::error!(%error, "the root supervisor failed; the runtime ends");
        // The set fails if the runtime already ends, with another reason.
        let _ = state.args.end.set(RuntimeEnd::Failed(error.to_string()));
        Err(error)
    }
}

impl Root {
    async fn on_message(myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match msg {
            Msg::Install(spec, known, reply) => state.install(spec, known, reply, &myself).await,
            Msg::Update(spec, reply) => {
                if state.instances.get(&spec.id).is_some_and(|desired| desired.removal.is_none()) {
                    state.install(spec, EarlierState::default(), reply, &myself).await;
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
                    state.send_to_team(&team, team_messages::Msg::Control(id, verb, reply));
                } else {
                    let _ = reply.send(Err(ControlError::NotFound));
                }
            }
            Msg::Reconnect(id, reply) => {
                let team = id.team.clone();
                if state.instances.contains_key(&id) {
                    state.send_to_team(&team, team_messages::Msg::Reconnect(id, reply));
                } else {
                    let _ = reply.send(Err(ControlError::NotFound));
                }
            }
            Msg::ResumedAfterSuspend(asleep) => {
                for team in state.teams.values().filter_map(|team| team.supervisor.as_ref()) {
                    let _ = cast!(team, team_messages::Msg::ResumedAfterSuspend(asleep));
                }
            }
            Msg::Memory(reading) => state.on_memory(reading),
            Msg::Ensure(id, reply) => {
                let team = id.team.clone();
                if state.instances.contains_key(&id) {
                    state.send_to_team(&team, team_messages::Msg::Ensure(id, reply));
                } else {
                    let _ = reply.send(Err(CallError::NotFound { what: "server".to_owned() }));
                }
            }
            Msg::RequestPermit(id, urgency) => {
                let remote = state.instances.get(&id).is_some_and(|desired| desired.spec.is_remote());
                state.permits.request(id, urgency, remote);
                state.grant_permits();
            }
            Msg::WithdrawPermit(id) => {
                state.permits.withdraw(&id);
                state.observe_permits();
            }
            Msg::ReleasePermit(run) => {
                state.permits.release(run);
                state.grant_permits();
            }
            Msg::Throttle(team, one_at_a_time, budget) => {
                if let Some(entry) = state.teams.get_mut(&team) {
                    entry.budget = budget;
                }
                state.permits.throttle(team, one_at_a_time);
                state.grant_permits();
            }
            Msg::ChargeTeam(team, at) => {
                if let Some(entry) = state.teams.get_mut(&team) {
                    // The team determines the consequences itself.
                    let _ = entry.budget.charge(&state.args.team_budget, at);
                }
            }
            Msg::SaveMemo(spec, memo) => state.save_memo(spec, memo),
            Msg::RemoveInstance(id) => state.remove_instance(&id, &myself).await,
            Msg::RespawnTeam(team) => state.respawn_team(&team, &myself).await,
            Msg::Died(actor, why, remains) => state.on_death(actor, why, remains, &myself).await?,
            Msg::Barrier(reply) => drop(cast!(state.registry, registry::Msg::Barrier(reply))),
            Msg::Probe(probe) => state.answer_probe(&probe),
            Msg::IsInstalled(id, reply) => drop(reply.send(state.instances.contains_key(&id))),
            Msg::FlushEvents(reply) => {
                if let Some(batcher) = &state.batcher {
                    let _ = cast!(batcher, batcher::Msg::FlushNow(reply));
                }
            }
            Msg::Shutdown(reply) => state.shut_down(reply, &myself),
            Msg::ShutdownOverdue => state.kill_remaining(&myself),
            Msg::Flushed(events_lost) => {
                let Some(closing) = state.closing.take() else { return Ok(()) };
                let _ = state.args.end.set(RuntimeEnd::ShutDown { events_lost, in_time: closing.in_time });
                for reply in closing.replies {
                    let _ = reply.send(ShutdownReport { events_lost, in_time: closing.in_time });
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
        known: EarlierState,
        reply: ControlReply<InstallOutcome>,
        myself: &ActorRef<Msg>,
    ) {
        if self.closing.is_some() {
            let _ = reply.send(Err(ControlError::Closing));
            return;
        }
        let (id, team) = (spec.id.clone(), spec.id.team.clone());
        let installed = match self.instances.get_mut(&id) {
            // The previous instance is still ending; this one is installed afterwards.
            Some(DesiredInstance { removal: Some(removal), .. }) => {
                removal.next = Some((spec, known));
                InstallOutcome::New
            }
            Some(desired) if desired.spec == spec && !desired.can_retry() => InstallOutcome::Unchanged,
            Some(desired) => {
                desired.spec = spec.clone();
                self.send_to_team(&team, team_messages::Msg::Update(spec));
                InstallOutcome::Updated
            }
            None => {
                self.install_new(spec, known, myself).await;
                InstallOutcome::New
            }
        };
        let _ = reply.send(Ok(installed));
    }

    fn uninstall(&mut self, id: InstanceId, reply: ControlReply<UninstallOutcome>) {
        let Some(desired) = self.instances.get_mut(&id) else {
            let _ = reply.send(Err(ControlError::NotFound));
            return;
        };
        // A repeated uninstall also cancels what was installed meanwhile.
        desired.removal = Some(PendingRemoval { next: None });
        let dormant = desired.memo.as_ref().is_some_and(|(_, memo)| memo.is_dormant());
        let team = id.team.clone();
        if self.supervisor(&team).is_some() {
            self.send_to_team(&team, team_messages::Msg::Uninstall(id, reply));
        } else {
            // The supervisor has died and its processes with it; nothing is left to end.
            self.remove_uninstalled(&team);
            let _ = reply.send(Ok(UninstallOutcome { active: false, dormant }));
        }
    }

    async fn install_new(&mut self, spec: Arc<InstanceSpec>, known: EarlierState, myself: &ActorRef<Msg>) {
        let team = spec.id.team.clone();
        let adoption = self.draw_adopted_run(&spec, known.memo.as_ref());
        let desired = DesiredInstance::new(spec.clone(), known, adoption, self.args.events.wall());
        let memo = desired.memo.as_ref().map(|(_, memo)| memo.clone());
        self.instances.insert(spec.id.clone(), desired);
        if self.teams.contains_key(&team) {
            self.send_to_team(&team, team_messages::Msg::Install(spec, memo));
        } else {
            self.spawn_team(&team, myself).await;
        }
    }

    /// Draws the number of a run that takes over the server of an earlier satellite, if there is one and the instance was
    /// running. The server runs already, so the run needs no start permit.
    fn draw_adopted_run(&mut self, spec: &InstanceSpec, stored: Option<&StoredMemo>) -> Option<RunNumber> {
        let connectors = &self.args.connectors;
        let adopts = SlotMemo::may_adopt(spec, stored)
            && catch_panic("ProcessConnector::can_adopt", || connectors.can_adopt(spec)).unwrap_or(false);
        adopts.then(|| {
            self.last_run += 1;
            RunNumber(self.last_run)
        })
    }

    fn save_memo(&mut self, spec: Arc<InstanceSpec>, memo: Box<SlotMemo>) {
        // Changes during a shutdown are not stored: an instance that slept at the end of the satellite sleeps on with
        // the next one.
        let Some(desired) = self.instances.get_mut(&spec.id) else { return };
        let is_stored = match &desired.memo {
            Some((of, before)) => (Arc::ptr_eq(of, &spec) || *of == spec) && memo.has_same_stored_state(before),
            None => memo.has_same_stored_state(&SlotMemo::default()),
        };
        if !is_stored && self.closing.is_none() && desired.removal.is_none() {
            let stored = memo.to_stored(Instant::now().into_std(), self.args.events.wall());
            catch_panic("StateStore::save", || self.args.state_store.save(&spec, stored));
        }
        desired.memo = Some((spec, memo));
    }

    async fn remove_instance(&mut self, id: &InstanceId, myself: &ActorRef<Msg>) {
        self.permits.withdraw(id);
        catch_panic("StateStore::delete", || self.args.state_store.delete(id));
        // A registry that was replaced meanwhile may have started from a snapshot that still contains the instance.
        drop(cast!(self.registry, registry::Msg::Remove(id.clone())));
        if let Some((spec, known)) = self.instances.remove(id).and_then(|desired| desired.removal?.next) {
            self.install_new(spec, known, myself).await;
        }
        if self.instances_of_team(&id.team).next().is_none()
            && let Some(supervisor) = self.teams.remove(&id.team).and_then(|team| team.supervisor)
        {
            self.supervisors.remove(&supervisor.get_id());
            supervisor.stop(None);
            self.permits.forget_team(&id.team);
            self.grant_permits();
        }
    }

    fn instances_of_team(&self, team: &TeamId) -> impl Iterator<Item = &DesiredInstance> {
        let of_team = |(id, _): &(&InstanceId, &DesiredInstance)| id.team == *team;
        self.instances.range(InstanceId::lower_bound(team)..).take_while(of_team).map(|(_, desired)| desired)
    }

    fn remove_uninstalled(&mut self, team: &TeamId) {
        // Instances that were being removed when their supervisor died ended with it.
        let removed = self.instances_of_team(team).filter(|desired| desired.removal.is_some());
        let removed: Vec<InstanceId> = removed.map(|desired| desired.spec.id.clone()).collect();
        for id in removed {
            catch_panic("StateStore::delete", || self.args.state_store.delete(&id));
            let Some(desired) = self.instances.remove(&id) else { continue };
            // The slot that would have emitted this event ended with the supervisor.
            let dormant = desired.memo.as_ref().is_some_and(|(_, memo)| memo.is_dormant());
            self.args.events.emit(Event::Stopped {
                of: Arc::new(EventSubject::from(&*desired.spec)),
                kind: StopKind::Uninstall,
                exit_code: None,
                signal: None,
                forced: false,
                active: Some(false),
                dormant: Some(dormant),
            });
            match desired.removal.and_then(|removal| removal.next) {
                Some((spec, known)) => {
                    // The server of the removed instance has ended, so there is nothing to adopt.
                    let desired = DesiredInstance::new(spec, known, None, self.args.events.wall());
                    self.instances.insert(id, desired);
                }
                None => drop(cast!(self.registry, registry::Msg::Remove(id))),
            }
        }
    }

    async fn spawn_team(&mut self, team: &TeamId, myself: &ActorRef<Msg>) {
        let args = team::Args {
            team: team.clone(),
            budget: self.args.team_budget.clone(),
            charged_budget: self.teams.get(team).map(|entry| entry.budget.clone()).unwrap_or_default(),
            connectors: self.args.connectors.clone(),
            audience: self.args.audience.clone(),
            server_memory: self.args.server_memory.clone(),
            observer: self.args.observer.clone(),
            seed: self.args.seed,
            events: self.args.events.clone(),
            root: myself.clone(),
            registry: self.registry.clone(),
        };
        let supervisor = match TeamSupervisor::spawn_linked(None, TeamSupervisor, args, myself.get_cell()).await {
            Ok((supervisor, _)) => supervisor,
            Err(error) => {
                tracing::error!(team_id = %team, %error, "cannot start a team's supervisor; trying again");
                self.respawn_team_later(team.clone(), RESPAWN_DELAY, myself);
                return;
            }
        };
        self.supervisors.insert(supervisor.get_id(), team.clone());
        for DesiredInstance { spec, memo, .. } in self.instances_of_team(team) {
            let (of, memo) = memo.as_ref().map_or((spec, None), |(of, memo)| (of, Some(memo.clone())));
            let _ = cast!(supervisor, team_messages::Msg::Install(of.clone(), memo));
            if of != spec {
                let _ = cast!(supervisor, team_messages::Msg::Update(spec.clone()));
            }
        }
        self.teams.entry(team.clone()).or_default().supervisor = Some(supervisor);
    }

    async fn on_death(
        &mut self,
        actor: ActorId,
        why: String,
        remains: ActorRemains,
        myself: &ActorRef<Msg>,
    ) -> Result<(), ActorProcessingErr> {
        if actor == self.registry.get_id() {
            tracing::error!(why, "the status registry died; starting another");
            let mut snapshot = (**self.args.published.borrow()).clone();
            snapshot.instances =
                snapshot.instances.into_iter().filter(|(id, _)| self.instances.contains_key(id)).collect();
            self.registry = spawn_registry(snapshot, &self.args, &myself.get_cell()).await?;
            self.part_restarts.registry += 1;
            for team in self.teams.values().filter_map(|team| team.supervisor.as_ref()) {
                let _ = cast!(team, team_messages::Msg::Registry(self.registry.clone()));
            }
        } else if self.batcher.as_ref().is_some_and(|batcher| batcher.get_id() == actor) {
            self.batcher = None;
            let outbox = if let ActorRemains::Outbox(outbox) = remains { Some(outbox) } else { None };
            let flushing = self.closing.as_ref().is_some_and(|closing| closing.flushing);
            if flushing && outbox.is_none() {
                // The batcher has ended normally: its last action was the reply to the flush.
                return Ok(());
            }
            tracing::error!(why, "the event batcher died; starting another with its queue");
            // A batcher killed from outside loses its queue; the next one continues after the last number.
            let outbox = outbox.map_or_else(
                || {
                    let next_seq = self.args.next_seq + self.args.events.statistics().emitted;
                    Outbox::new(self.args.batch.clone(), next_seq, self.args.first_batch())
                },
                |outbox| *outbox,
            );
            self.batcher = Some(spawn_batcher(outbox, &self.args, &myself.get_cell()).await?);
            self.part_restarts.batcher += 1;
            if flushing {
                self.flush(myself);
            }
        } else if let Some(team) = self.supervisors.remove(&actor) {
            if let ActorRemains::Instance(id) = remains
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
            // The death of a supervisor does not lift the throttle.
            self.permits.throttle(team.clone(), true);
        }
        self.grant_permits();
        if self.closing.is_some() {
            self.teams.remove(team);
            self.flush_when_empty(myself);
            return;
        }
        self.remove_uninstalled(team);
        let Some(entry) = self.teams.get_mut(team) else { return };
        entry.supervisor = None;
        entry.restarts += 1;
        tracing::error!(team_id = %team, why, "a team's supervisor died; starting another with its instances");
        // Same backoff as for a server, but without an end: a team is never abandoned.
        let policy = RestartPolicy { max_crashes: usize::MAX, ..Default::default() };
        let delay = match entry.deaths.charge(&policy, Instant::now().into_std(), true, Duration::ZERO) {
            RestartVerdict::Restart { attempt: 1, .. } | RestartVerdict::GiveUp { .. } => Duration::ZERO,
            RestartVerdict::Restart { delay, .. } => delay,
        };
        if delay.is_zero() {
            self.spawn_team(team, myself).await;
        } else {
            self.show_without_supervisor(team);
            self.respawn_team_later(team.clone(), delay, myself);
        }
    }

    fn show_without_supervisor(&self, team: &TeamId) {
        // The servers ended with their supervisor; readers must not see them online until it is back.
        let snapshot = self.args.published.borrow().clone();
        for view in snapshot.team(team).filter(|view| view.port.is_some() || view.pid.is_some()) {
            let memo = self.instances.get(&view.spec.id).and_then(|desired| desired.memo.as_ref());
            // A dormant instance loses nothing with its supervisor and stays `online`.
            let dormant = memo.is_some_and(|(_, memo)| memo.is_dormant());
            let (status, message) = match view.requested_state {
                RequestedState::Running if dormant => (Status::Online, view.message.clone()),
                RequestedState::Running => {
                    (Status::Connecting, Some("the team supervisor is being restarted".to_owned()))
                }
                RequestedState::Stopped => (Status::Offline, view.message.clone()),
            };
            let since = if status == view.status { view.since } else { self.args.events.wall() };
            let view = InstanceView {
                status,
                message,
                remedy: Remedy::for_status(
                    status,
                    view.requested_state == RequestedState::Stopped,
                    view.spec.is_remote(),
                ),
                since,
                dormant,
                connection: view.connection.map(|_| ConnectionState::Connecting),
                ..view.without_run()
            };
            drop(cast!(self.registry, registry::Msg::Put(Arc::new(view))));
        }
    }

    async fn respawn_team(&mut self, team: &TeamId, myself: &ActorRef<Msg>) {
        if self.closing.is_some() || self.supervisor(team).is_some() {
            return;
        }
        if self.instances_of_team(team).next().is_some() {
            self.spawn_team(team, myself).await;
        } else {
            self.teams.remove(team);
        }
    }

    fn respawn_team_later(&mut self, team: TeamId, delay: Duration, myself: &ActorRef<Msg>) {
        let me = myself.clone();
        self.tasks.spawn(async move {
            tokio::time::sleep(delay).await;
            let _ = cast!(me, Msg::RespawnTeam(team));
        });
    }

    fn grant_permits(&mut self) {
        while let Some((id, run)) = self.permits.grant(RunNumber(self.last_run + 1)) {
            self.last_run = run.0;
            let team = id.team.clone();
            self.send_to_team(&team, team_messages::Msg::Granted(id, run));
        }
        self.observe_permits();
    }

    fn observe_permits(&self) {
        let [processes, connections] = self.permits.load().map(|(held, waiting)| PermitUse { held, waiting });
        let throttled_teams = self.permits.throttled_teams();
        self.args.observer.permits_changed(StartLoad { processes, connections, throttled_teams });
    }

    fn on_memory(&mut self, reading: MemoryReading) {
        let now = Instant::now().into_std();
        let (pressure_percent, available_bytes) = (reading.pressure_percent, reading.available_bytes);
        match self.memory.observe(&self.args.memory_policy, &reading, now) {
            MemoryChange::Enough | MemoryChange::StillShort => {}
            MemoryChange::BecameShort => {
                tracing::warn!(
                    pressure_percent,
                    available_bytes,
                    "memory is short: starts are delayed, and the longest-idle servers are put to sleep"
                );
                self.permits.allow_processes(Some(0));
            }
            MemoryChange::OneStart => self.permits.allow_processes(Some(1)),
            MemoryChange::Relieved => {
                tracing::info!(pressure_percent, available_bytes, "memory is no longer short: servers start as usual");
                self.permits.allow_processes(None);
            }
        }
        self.grant_permits();
        if self.memory.is_short() && self.closing.is_none() {
            for (id, idle) in memory::longest_idle(self.idle_servers(now)) {
                let team = id.team.clone();
                self.send_to_team(&team, team_messages::Msg::Input(id, SlotInput::FreeMemory(idle)));
            }
        }
        self.args.memory_status.send_replace(MemoryStatus {
            is_short: self.memory.is_short(),
            starts_waiting: self.permits.processes_waiting(),
            reading: Some(reading),
        });
    }

    fn idle_servers(&self, now: std::time::Instant) -> Vec<(InstanceId, Duration)> {
        let snapshot = self.args.published.borrow().clone();
        let idle = snapshot.iter().filter_map(|view| {
            let spec = &view.spec;
            let may_sleep =
                spec.lifetime != ProcessLifetime::AlwaysOn && idle::first_check(&spec.policy.idle, now).is_some();
            let port = view.port.as_ref().filter(|_| may_sleep && !spec.is_remote())?;
            let activity = port.activity();
            (activity.user_count == 0).then(|| (spec.id.clone(), now.saturating_duration_since(activity.last)))
        });
        idle.collect()
    }

    fn send_to_team(&self, team: &TeamId, msg: team_messages::Msg) {
        // The message is dropped while there is no supervisor; callers then ask again.
        if let Some(supervisor) = self.supervisor(team) {
            let _ = cast!(supervisor, msg);
        }
    }

    fn answer_probe(&self, probe: &ActorProbe) {
        let _ = cast!(self.registry, registry::Msg::Probe(probe.passed_on()));
        if let Some(batcher) = &self.batcher {
            let _ = cast!(batcher, batcher::Msg::Probe(probe.passed_on()));
        }
        for team in self.teams.values().filter_map(|team| team.supervisor.as_ref()) {
            let _ = cast!(team, team_messages::Msg::Probe(probe.passed_on()));
        }
        probe.answer(|took| {
            let mut loads = self.permits.loads_by_team();
            let facts = |(team, entry): (&TeamId, &TeamEntry)| TeamFacts {
                team: team.clone(),
                name: self
                    .instances_of_team(team)
                    .next()
                    .map_or_else(|| team.to_string(), |desired| desired.spec.team_slug.to_string()),
                restarts: entry.restarts,
                permits: loads.remove(team).unwrap_or_default(),
            };
            let teams = self.teams.iter().map(facts).collect();
            ActorAnswer::Root { took, permits: self.permits.loads().to_vec(), restarts: self.part_restarts, teams }
        });
    }

    fn supervisor(&self, team: &TeamId) -> Option<&ActorRef<team_messages::Msg>> {
        self.teams.get(team)?.supervisor.as_ref()
    }

    fn shut_down(&mut self, reply: oneshot::Sender<ShutdownReport>, myself: &ActorRef<Msg>) {
        if let Some(closing) = &mut self.closing {
            closing.replies.push(reply);
            return;
        }
        let grace = self.instances.values().map(|desired| grace(&desired.spec)).max();
        let grace = grace.unwrap_or_default();
        let deadline = Instant::now() + grace + SHUTDOWN_MAX;
        self.closing = Some(ShutdownProgress { replies: vec![reply], deadline, in_time: true, flushing: false });
        let me = myself.clone();
        self.tasks.spawn(async move {
            tokio::time::sleep(grace + SHUTDOWN_MARGIN).await;
            let _ = cast!(me, Msg::ShutdownOverdue);
        });
        for team in self.teams.values().filter_map(|team| team.supervisor.as_ref()) {
            let _ = cast!(team, team_messages::Msg::Shutdown);
        }
        self.teams.retain(|_, team| team.supervisor.is_some());
        self.flush_when_empty(myself);
    }

    fn kill_remaining(&mut self, myself: &ActorRef<Msg>) {
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
                // The batcher died; the flush continues with the next one if its queue was recovered.
                Ok(Err(_)) => {
                    tokio::time::sleep_until(until).await;
                    drop(cast!(me, Msg::Flushed(events.statistics().unsent())));
                }
            }
        });
    }

    fn panic(&self, part: RuntimePart) {
        match part {
            RuntimePart::Root => std::panic::panic_any("asked to panic"),
            RuntimePart::Instance(id) => self.send_to_team(&id.team.clone(), team_messages::Msg::PanicFor(id)),
            RuntimePart::Registry => drop(cast!(self.registry, registry::Msg::Panic)),
            RuntimePart::Batcher => drop(self.batcher.as_ref().map(|batcher| cast!(batcher, batcher::Msg::Panic))),
            RuntimePart::Team(team) => self.send_to_team(&team, team_messages::Msg::Panic(None)),
            RuntimePart::Worker(id) => self.send_to_team(&id.team.clone(), team_messages::Msg::Panic(Some(id))),
        }
    }
}

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
    let (events, sink) = (args.events.clone(), args.sink.clone());
    let (interval, store_delay) = (args.batch.interval, args.batch.store_delay);
    let args = batcher::Args { events, sink, interval, store_delay, outbox };
    Ok(EventBatcher::spawn_linked(None, EventBatcher, args, root.clone()).await?.0)
}
