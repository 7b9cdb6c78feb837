//! The world of one slot: what happens in it, and what must be true after each step.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::catalogue::CatalogueAspect;
use mcp_satellite_actors::model::event::StopKind;
use mcp_satellite_actors::model::exit::{ExitCause, WorkerExit};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::memo::StoredMemo;
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget, UpdateMethod};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::idle::RunActivity;
use mcp_satellite_actors::rules::jitter::JitterRng;
use mcp_satellite_actors::rules::slot::{
    AfterStop, HealthChange, RequestedState, SecondRun, Slot, SlotEffect, SlotEvent, SlotInput, SlotMemo, SlotPhase,
    StartReason,
};

use crate::away::{Away, Expected, Loss};
use crate::samples::{
    bounded, catalogue, exited, incomplete, introduced, lost, remote, rolling, spec, stopped, with_token,
};

/// One thing that happens in the world. What makes no sense at the moment does not happen.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    /// Root reads its next message.
    RootReads,
    /// Root grants a permit, if the instance waits for one.
    RootGrants,
    /// The team reads the next grant.
    GrantArrives,
    /// A person.
    Person(Person),
    Call,
    /// One of the callers that were let in has its answer.
    CallEnds,
    /// The next time it is to be put to sleep a call slips in.
    SlipsIn,
    /// The first server that is there, or the last.
    Server(bool, Server),
    /// The server says something of a run that is over.
    OldNews(usize, Server),
    Wait(Duration),
    /// The machine sleeps for so long, and no clock of ours sees it.
    Suspended(Duration),
    /// A tick that nobody asked for.
    SpuriousTick,
    /// All that is under way goes one step on, as it should.
    AllGoesWell,
    SupervisorPanics,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Person {
    Start,
    Stop,
    Restart,
    Reconnect,
    Update(Shape),
    Uninstall,
    Shutdown,
}

/// What a configuration is changed to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Shape {
    Listed,
    AlwaysOn,
    Lazy,
    Incomplete,
    Remote(Remote),
    /// In one of several versions, each rolled out.
    Rolling(u8),
}

/// One of several remote servers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remote {
    pub(crate) bounded: bool,
    pub(crate) lazy: bool,
    pub(crate) incomplete: bool,
    pub(crate) address: u8,
    pub(crate) token: u8,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Server {
    Appears,
    FirstByte,
    Initializes,
    Lists,
    CannotList,
    /// A call succeeds.
    Answers,
    /// What health checks find.
    Degrades,
    Restores,
    /// How it ends if it is a process, and how if it is a connection.
    Ends(End, Loss),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    Code(i32),
    Signal,
    Wire,
    Unresponsive,
    Panicked,
}

fn shape(shape: Shape) -> Arc<InstanceSpec> {
    match shape {
        Shape::Listed => spec(|_| {}),
        Shape::AlwaysOn => spec(|config| config.lifetime = ProcessLifetime::AlwaysOn),
        Shape::Lazy => spec(|config| config.lifetime = ProcessLifetime::Lazy),
        Shape::Incomplete => spec(incomplete),
        Shape::Remote(of) => spec(|config| {
            if of.bounded {
                bounded(config);
            } else {
                remote(config);
            }
            if of.lazy {
                config.lifetime = ProcessLifetime::Lazy;
            }
            if of.incomplete {
                incomplete(config);
            }
            let url = format!("http://127.0.0.1/{}", of.address);
            config.target = ServerTarget::Remote { transport: RemoteTransport::Http, url, health_url: None };
            with_token(config, &of.token.to_string());
        }),
        Shape::Rolling(version) => spec(rolling(version)),
    }
}

fn dice() -> JitterRng {
    JitterRng::new(0, "")
}

/// A worker as the team started it.
#[derive(Debug)]
struct Worker {
    run: RunNumber,
    /// It is a connection, not a process.
    dialled: bool,
    discovers: bool,
    /// The last attempt to read its lists has failed.
    cannot_list: bool,
    /// Its credentials have changed since it was started.
    newer_credentials: Option<Instant>,
    appeared: bool,
    initialized: Option<Instant>,
    listed: bool,
    told_to_stop: bool,
    hurried: bool,
    /// Takes no calls any more.
    drains: bool,
    /// Calls in flight.
    inside: usize,
}

pub(crate) struct World {
    now: Instant,
    slot: Slot,
    memo: SlotMemo,
    // Root.
    to_root: VecDeque<SlotEffect>,
    /// It waits for a permit, in one place, whatever it has become since it asked.
    waits: bool,
    held: BTreeSet<RunNumber>,
    grants: VecDeque<RunNumber>,
    runs: u64,
    // The workers that are there, two at most, and those that were.
    workers: Vec<Worker>,
    over: Vec<RunNumber>,
    // What people were promised.
    want: RequestedState,
    caller_waits: bool,
    /// When a call began or ended or a server said something.
    last_activity: Instant,
    /// The configuration, and whether it is known that it does not come up.
    desired: Arc<InstanceSpec>,
    not_taken: bool,
    /// Its tools are from another day, and were not read since.
    recalled: bool,
    ready_since: Option<Instant>,
    slips_in: bool,
    ending: bool,
    pub(crate) removed: bool,
    /// Of its connection.
    away: Away,
    /// It was told that it is degraded, and not that it is well again.
    degraded: bool,
    /// A connection was told to be there, and not to be gone.
    connected: bool,
    /// And was once, under this configuration.
    was_connected: bool,
    /// Since it was last there.
    attempts: u32,
    exits: Vec<Instant>,
    quick: usize,
    not_before: Option<Instant>,
}

impl World {
    /// `known` says that its tools are known from another day.
    pub(crate) fn new(first: Shape, known: bool) -> Self {
        let (slot, effects) = if known {
            let (spec, stored, tools) = (shape(first), StoredMemo::default(), Some(catalogue("read")));
            let memo = SlotMemo::from_stored(&spec, &stored, tools, Instant::now(), Timestamp::UNIX_EPOCH);
            Slot::from_memo(spec, dice(), &memo)
        } else {
            Slot::new(shape(first), dice())
        };
        let mut world = Self {
            now: Instant::now(),
            memo: slot.memo(),
            to_root: VecDeque::new(),
            waits: false,
            held: BTreeSet::new(),
            grants: VecDeque::new(),
            runs: 0,
            workers: Vec::new(),
            over: Vec::new(),
            want: RequestedState::Running,
            caller_waits: false,
            desired: slot.spec.clone(),
            not_taken: false,
            recalled: known && matches!(first, Shape::Lazy),
            last_activity: Instant::now(),
            ready_since: None,
            slips_in: false,
            ending: false,
            removed: false,
            away: Away::default(),
            degraded: false,
            connected: false,
            was_connected: false,
            attempts: 0,
            exits: Vec::new(),
            quick: 0,
            not_before: None,
            slot,
        };
        world.perform(effects);
        world.check();
        world
    }

    pub(crate) fn step(&mut self, step: Step) {
        match step {
            Step::RootReads => self.root_reads(),
            Step::RootGrants => self.root_grants(),
            Step::GrantArrives => self.grant_arrives(),
            Step::Person(person) => self.person(person),
            Step::Call => self.calls(),
            Step::CallEnds => {
                if let Some(worker) = self.workers.iter_mut().find(|worker| worker.inside > 0) {
                    worker.inside -= 1;
                    self.last_activity = self.now;
                }
            }
            Step::SlipsIn => self.slips_in = true,
            Step::Server(last, server) => {
                let worker = if last { self.workers.last() } else { self.workers.first() };
                if let Some(run) = worker.map(|worker| worker.run) {
                    self.server(run, server);
                }
            }
            Step::OldNews(nth, server) => self.old_news(nth, server),
            Step::Wait(time) => self.wait(time),
            Step::Suspended(time) => self.suspended(time),
            Step::SpuriousTick => drop(self.handle(SlotInput::Tick(self.activity()))),
            Step::AllGoesWell => self.all_goes_well(),
            Step::SupervisorPanics => self.supervisor_panics(),
        }
        self.check_schedule();
    }

    fn calls(&mut self) {
        if self.removed {
            return;
        }
        self.caller_waits = true;
        self.away.wanted = true;
        self.handle(SlotInput::Call);
        let waits = matches!(self.slot.phase, SlotPhase::Reconnecting { .. } | SlotPhase::Exhausted { .. });
        assert!(!waits, "a call does not wait for the schedule");
    }

    fn root_reads(&mut self) {
        match self.to_root.pop_front() {
            Some(SlotEffect::RequestPermit { .. }) => self.waits = true,
            Some(SlotEffect::WithdrawPermit) => self.waits = false,
            Some(SlotEffect::ReleasePermit(run)) => assert!(self.held.remove(&run), "{run:?} is given back twice"),
            _ => {}
        }
    }

    fn root_grants(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.runs += 1;
            self.held.insert(RunNumber(self.runs));
            self.grants.push_back(RunNumber(self.runs));
        }
    }

    fn grant_arrives(&mut self) {
        let Some(run) = self.grants.pop_front() else { return };
        if self.removed {
            // The team gives it back: there is no slot to ask.
            self.held.remove(&run);
        } else {
            self.handle(SlotInput::Granted(run));
        }
    }

    fn person(&mut self, person: Person) {
        if self.removed {
            return;
        }
        match person {
            Person::Start => {
                // What is removed is not brought back.
                if !self.ending && self.want == RequestedState::Stopped {
                    self.want = RequestedState::Running;
                    self.forget_exits();
                }
                if matches!(self.slot.phase, SlotPhase::Exhausted { .. }) {
                    self.away.begins_anew();
                }
                self.handle(SlotInput::Start);
            }
            Person::Stop => {
                if !self.ending {
                    self.want = RequestedState::Stopped;
                    self.away.begins_anew();
                }
                self.handle(SlotInput::Stop);
            }
            Person::Restart | Person::Reconnect => self.restart(matches!(person, Person::Reconnect)),
            Person::Update(to) => self.update(&shape(to)),
            Person::Uninstall => {
                self.ending = true;
                self.handle(SlotInput::Uninstall);
            }
            Person::Shutdown => {
                self.ending = true;
                self.handle(SlotInput::Shutdown);
            }
        }
    }

    fn restart(&mut self, reconnect: bool) {
        let before = (self.slot.phase.clone(), self.slot.status);
        let (remote, stopped) = (self.slot.spec.is_remote(), self.want == RequestedState::Stopped);
        // What is not connected is connected, also where it was to stay down.
        if reconnect && remote && stopped && !self.ending {
            self.want = RequestedState::Running;
        }
        let away = std::mem::take(&mut self.away);
        let denied = self.handle(if reconnect { SlotInput::Reconnect } else { SlotInput::Restart });
        if denied.iter().any(|effect| matches!(effect, SlotEffect::RejectCommand { .. })) {
            assert_eq!(before, (self.slot.phase.clone(), self.slot.status), "a denied request does nothing");
            self.away = away;
        } else {
            self.forget_exits();
            assert!(self.want == RequestedState::Running, "a stopped instance is not restarted");
            let waits = matches!(
                self.slot.phase,
                SlotPhase::Reconnecting { .. } | SlotPhase::Exhausted { .. } | SlotPhase::Reauth
            );
            assert!(!waits, "a person does not wait for the schedule");
        }
    }

    fn update(&mut self, to: &Arc<InstanceSpec>) {
        let before = self.slot.spec.clone();
        // Root knows that nothing has changed, and what may be tried again.
        let again = *to == self.desired;
        if self.ending || (again && !self.memo.can_retry(to)) {
            return;
        }
        self.desired = Arc::clone(to);
        if self.goes_on_under(to) {
            self.in_place(to);
            return;
        }
        let (ready, process) = (matches!(self.slot.phase, SlotPhase::Ready { .. }), !before.is_remote());
        let rolls = to.update_method == UpdateMethod::Rolling && ready && process;
        let stays = again && !rolls;
        self.not_taken &= stays;
        let phase = self.slot.phase.clone();
        if !rolls && !stays {
            self.away.begins_anew();
        }
        self.handle(SlotInput::Update(Arc::clone(to)));
        if rolls {
            assert!(matches!(self.slot.phase, SlotPhase::Ready { .. }), "nothing happens to what takes calls");
            assert!(Arc::ptr_eq(&before, &self.slot.spec));
        } else if stays {
            assert_eq!(phase, self.slot.phase, "nothing happens to what stays as it is");
            assert!(Arc::ptr_eq(&before, &self.slot.spec));
        } else {
            assert!(self.slot.catalogue.is_none(), "a new configuration has no catalogue yet");
            assert_eq!(&self.slot.spec, to);
        }
    }

    /// Whether this configuration needs no other run than there is.
    fn goes_on_under(&self, to: &InstanceSpec) -> bool {
        let before = &*self.slot.spec;
        let sleeps = self.slot.is_dormant() || matches!(self.slot.phase, SlotPhase::FallingAsleep { .. });
        let wakes = sleeps && to.lifetime == ProcessLifetime::AlwaysOn && before.lifetime != ProcessLifetime::AlwaysOn;
        before.can_continue_as(to) && !wakes
    }

    /// Nothing is another that its run was started with.
    fn in_place(&mut self, to: &Arc<InstanceSpec>) {
        let (before, spec) = ((self.slot.phase.clone(), self.slot.catalogue.clone()), self.slot.spec.clone());
        let are_newer = to.is_remote() && !to.has_same_credentials(&spec);
        let waits = match before.0 {
            SlotPhase::Exhausted { .. } => true,
            SlotPhase::Reauth => are_newer,
            _ => false,
        };
        if waits {
            self.away.begins_anew();
        }
        self.handle(SlotInput::Update(Arc::clone(to)));
        assert_eq!(&self.slot.spec, to);
        assert_eq!(before.1.is_some(), self.slot.catalogue.is_some(), "its tools are the same");
        let now = self.now;
        match (before.0, self.slot.phase.clone()) {
            (_, after) if waits => {
                assert!(matches!(after, SlotPhase::Queued { .. }), "what waited for it is not tried");
            }
            (SlotPhase::Ready { run, since, .. }, SlotPhase::Ready { run: goes_on, since: still, .. }) => {
                assert_eq!((run, since), (goes_on, still), "what is well is left alone");
            }
            (before, after) => assert_eq!(before, after, "what is well is left alone"),
        }
        if are_newer && let Some(worker) = self.slot.run().and_then(|run| self.worker(run)) {
            worker.newer_credentials = (!worker.told_to_stop).then_some(now).or(worker.newer_credentials);
        }
    }

    /// A person's request or a new configuration is a clean slate.
    fn forget_exits(&mut self) {
        self.exits.clear();
        self.quick = 0;
        self.not_before = None;
    }

    fn activity(&self) -> Option<RunActivity> {
        let worker = self.workers.iter().find(|worker| Some(worker.run) == self.slot.open_run())?;
        Some(RunActivity { user_count: worker.inside, last: self.last_activity })
    }

    fn worker(&mut self, run: RunNumber) -> Option<&mut Worker> {
        self.workers.iter_mut().find(|worker| worker.run == run)
    }

    fn server(&mut self, run: RunNumber, server: Server) {
        let now = self.now;
        self.last_activity = now;
        let Some(worker) = self.worker(run) else { return };
        let input = match server {
            Server::Appears if !worker.appeared => {
                worker.appeared = true;
                SlotInput::Spawned(run, (!worker.dialled).then_some(100))
            }
            Server::FirstByte if worker.appeared => SlotInput::FirstByte(run),
            Server::Initializes if worker.appeared && worker.initialized.is_none() => {
                worker.initialized = Some(now);
                SlotInput::Initialized(run, introduced())
            }
            Server::Lists if worker.initialized.is_some() && (worker.discovers || worker.listed) => {
                (worker.listed, worker.cannot_list) = (true, false);
                SlotInput::Discovered(run, catalogue("read"))
            }
            // What does not discover by itself is ready, and may announce a change at any time.
            Server::Lists if worker.initialized.is_some() => SlotInput::Discovered(run, catalogue("write")),
            Server::CannotList if worker.initialized.is_some() => {
                // It is not asked again by itself.
                (worker.discovers, worker.cannot_list) = (false, true);
                SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO)
            }
            // The session says so once, and not while it reads them.
            Server::Answers if worker.cannot_list && !worker.discovers => {
                worker.cannot_list = false;
                SlotInput::Recovered(run)
            }
            Server::Degrades if worker.dialled && worker.initialized.is_some() => {
                SlotInput::Health(run, HealthChange::Degraded { failures: 3, last_error: "no answer".to_owned() })
            }
            Server::Restores if worker.dialled && worker.initialized.is_some() => {
                SlotInput::Health(run, HealthChange::Restored { failures: 3, last_error: None })
            }
            Server::Ends(_, loss) if worker.dialled => {
                self.loses(run, loss);
                return;
            }
            Server::Ends(end, _) => {
                let exit = self.exit(run, end);
                self.ends(run, exit);
                return;
            }
            Server::Appears
            | Server::FirstByte
            | Server::Initializes
            | Server::Lists
            | Server::CannotList
            | Server::Answers
            | Server::Degrades
            | Server::Restores => return,
        };
        let reconnects = matches!(self.slot.phase, SlotPhase::Starting { run: its, why: StartReason::Reconnect { .. }, .. } if its == run);
        self.handle(input);
        let current = self.slot.run() == Some(run) && self.slot.spec.is_remote();
        match server {
            Server::Initializes if reconnects => {
                assert_eq!(self.slot.open_run(), Some(run));
                assert!(!self.caller_waits, "a caller waits although it is back");
            }
            // It has succeeded when its lists are read.
            Server::Lists if current => self.away.begins_anew(),
            _ => {}
        }
    }

    fn exit(&self, run: RunNumber, end: End) -> WorkerExit {
        let worker = self.workers.iter().find(|worker| worker.run == run);
        let ran = worker.and_then(|worker| worker.initialized).map(|since| self.now.duration_since(since));
        let because = |cause| WorkerExit { uptime: ran, ..WorkerExit::from_cause(cause) };
        match end {
            // It may as well crash while it is being stopped.
            End::Code(0) if worker.is_some_and(|worker| worker.told_to_stop || worker.drains) => stopped(),
            _ if worker.is_some_and(|worker| !worker.appeared) => {
                because(ExitCause::Spawn("cannot start `files`: not found".to_owned()))
            }
            End::Code(code) => exited(code, ran),
            End::Signal => WorkerExit { signal: Some(9), ..because(ExitCause::Exited) },
            End::Wire if ran.is_none() => because(ExitCause::Handshake("no answer".to_owned())),
            End::Wire => because(ExitCause::Wire("a line is too long".to_owned())),
            End::Unresponsive => because(ExitCause::Unresponsive),
            End::Panicked => because(ExitCause::Panicked("a fault of ours".to_owned())),
        }
    }

    fn take_worker(&mut self, run: RunNumber) -> Option<Worker> {
        let at = self.workers.iter().position(|worker| worker.run == run)?;
        self.over.push(run);
        Some(self.workers.remove(at))
    }

    /// A run is gone. The team's supervisor calls again for those who still wait.
    fn tell_end(&mut self, run: RunNumber, exit: WorkerExit) -> Vec<SlotEffect> {
        let waits = std::mem::take(&mut self.caller_waits);
        let effects = self.handle(SlotInput::Ended(run, exit));
        let answered = effects.iter().any(|effect| {
            matches!(effect, SlotEffect::RefuseCallers { .. } | SlotEffect::FailCallers { .. } | SlotEffect::Admit(_))
        });
        self.caller_waits |= waits && !answered;
        effects
    }

    /// A connection is over.
    fn loses(&mut self, run: RunNumber, loss: Loss) {
        let Some(worker) = self.take_worker(run) else { return };
        let connected = worker.initialized.is_some();
        let ran = worker.initialized.map(|since| self.now.duration_since(since));
        let kind = loss.kind();
        let exit = match loss {
            _ if worker.told_to_stop && matches!(loss, Loss::Refused) => {
                WorkerExit { uptime: ran, ..WorkerExit::from_cause(ExitCause::Requested) }
            }
            // A panic tells nothing but itself.
            Loss::Panicked if !worker.told_to_stop => {
                WorkerExit::from_cause(ExitCause::Panicked("a fault of ours".to_owned()))
            }
            _ => lost(kind, ran),
        };
        assert_eq!(self.slot.run(), Some(run), "a connection is never beside another");
        let uninstalled = matches!(self.slot.phase, SlotPhase::Stopping { kind: StopKind::Uninstall, .. });
        let Slot { phase, status, message, .. } = &self.slot;
        let (before, said) = (phase.clone(), (*status, message.clone()));
        let was_told = self.connected;
        let effects = self.tell_end(run, exit);
        let told = effects.iter().filter_map(|effect| match effect {
            SlotEffect::Emit(SlotEvent::Disconnected { intentional }) => Some(*intentional),
            SlotEffect::Emit(SlotEvent::Stopped { .. } | SlotEvent::Crashed { .. } | SlotEvent::Exited { .. }) => {
                panic!("a connection is no process")
            }
            _ => None,
        });
        let disconnected = was_told || (worker.told_to_stop && uninstalled);
        let expected: Vec<bool> = disconnected.then_some(worker.told_to_stop).into_iter().collect();
        assert_eq!(told.collect::<Vec<_>>(), expected, "what is told of the end of a connection that was there");
        let reconnecting =
            effects.iter().any(|effect| matches!(effect, SlotEffect::Emit(SlotEvent::Reconnecting { .. })));
        if worker.told_to_stop {
            assert!(!reconnecting);
        } else if loss.is_about_credentials() {
            self.away.begins_anew();
            let patience = self.slot.spec.policy.session.request_timeout_max;
            if worker.newer_credentials.is_some_and(|since| self.now.duration_since(since) < patience) {
                assert!(matches!(self.slot.phase, SlotPhase::Queued { .. }), "the new ones were never tried");
            } else {
                assert_eq!(self.slot.phase, SlotPhase::Reauth);
                self.away.needs_credentials = true;
            }
        } else {
            self.comes_to(loss, connected, reconnecting);
            let again = effects.iter().any(
                |effect| matches!(effect, SlotEffect::Status { status, message, .. } if (*status, message.clone()) == said),
            );
            assert!(!again, "the same is told twice");
        }
        // Whoever waited for this attempt knows what came of it, or shares the one that comes at once.
        if self.caller_waits && !worker.told_to_stop && matches!(before, SlotPhase::Starting { .. }) {
            assert!(matches!(self.slot.phase, SlotPhase::Queued { .. }), "a caller waits for nothing");
        }
        if self.caller_waits {
            self.calls();
        }
    }

    /// A connection was lost, or not made: whether and when it is tried again.
    fn comes_to(&mut self, loss: Loss, connected: bool, reconnecting: bool) {
        let policy = &self.slot.spec.policy.reconnect;
        let early = self.away.next.filter(|(_, due)| *due > self.now);
        match self.away.loses(policy, loss, self.now) {
            Expected::GivenUp => {
                assert_eq!(self.slot.phase, SlotPhase::Exhausted { attempts: policy.attempts_max.unwrap() });
                assert_eq!(self.slot.status, Status::Error);
                assert!(!reconnecting);
            }
            Expected::Attempt { number, earliest, latest } => {
                let SlotPhase::Reconnecting { until, attempt } = self.slot.phase else {
                    panic!("it is given up: {:?}", self.slot.phase)
                };
                assert_eq!(attempt, number);
                assert!((earliest..=latest).contains(&until), "attempt {number} comes {:?} from now", until - self.now);
                let expected = if loss.is_offline(connected) { Status::Offline } else { Status::Error };
                assert_eq!(self.slot.status, expected, "{loss:?}");
                assert_eq!(reconnecting, early != Some((attempt, until)), "each that is scheduled is told");
                self.away = Away { next: Some((attempt, until)), ..Away::default() };
            }
        }
    }

    fn ends(&mut self, run: RunNumber, exit: WorkerExit) {
        let Some(worker) = self.take_worker(run) else { return };
        if self.slot.run() != Some(run) {
            // It took no calls yet, or none any more: what becomes of it is its own affair.
            let exits = self.exits.len();
            self.handle(SlotInput::Ended(run, exit));
            assert_eq!(self.exits.len(), exits, "it is charged to another");
            return;
        }
        // One that ends by itself in the moment in which it is to sleep has ended by itself.
        let falls_asleep = matches!(self.slot.phase, SlotPhase::FallingAsleep { .. });
        let charged = !worker.told_to_stop || (falls_asleep && exit.cause != ExitCause::Requested);
        if charged {
            let policy = &self.slot.spec.policy.restart;
            self.exits.push(self.now);
            self.quick = if exit.uptime.unwrap_or_default() > policy.quick { 0 } else { self.quick + 1 };
            let delay = match self.quick {
                0 => Duration::ZERO,
                nth => policy.delays[(nth - 1).min(policy.delays.len() - 1)],
            };
            self.not_before = Some(self.now + delay);
        }
        let before = self.slot.spec.clone();
        let sleeps = (self.slot.open_run().is_some() || falls_asleep)
            && self.slot.status == Status::Online
            && self.slot.spec.lifetime != ProcessLifetime::AlwaysOn
            && !exit.is_crash();
        let effects = self.tell_end(run, exit);
        let connection = effects.iter().any(|effect| {
            matches!(effect, SlotEffect::Emit(SlotEvent::Disconnected { .. } | SlotEvent::Reconnecting { .. }))
        });
        assert!(!connection, "a process is no connection");
        if !Arc::ptr_eq(&before, &self.slot.spec) {
            let starts = matches!(self.slot.phase, SlotPhase::Queued { .. } | SlotPhase::Starting { .. });
            assert!(charged && starts, "the new configuration is what is started now: {:?}", self.slot.phase);
        } else if charged {
            let policy = &self.slot.spec.policy.restart;
            let spent = self.exits_that_count() >= policy.max_crashes;
            assert_eq!(spent, matches!(self.slot.phase, SlotPhase::Failed), "{:?}", self.slot.phase);
            assert_eq!(sleeps && !spent, matches!(self.slot.phase, SlotPhase::Dormant { .. }), "{:?}", self.slot.phase);
        } else {
            assert_eq!(falls_asleep, matches!(self.slot.phase, SlotPhase::Dormant { .. }), "{:?}", self.slot.phase);
        }
        if self.caller_waits {
            self.handle(SlotInput::Call);
        }
    }

    fn exits_that_count(&self) -> usize {
        let window = self.slot.spec.policy.restart.window;
        self.exits.iter().filter(|at| self.now.duration_since(**at) < window).count()
    }

    /// News about an old run changes no decision; and what was its own is settled already.
    fn old_news(&mut self, nth: usize, server: Server) {
        let Some(run) = (!self.over.is_empty()).then(|| self.over[nth % self.over.len()]) else { return };
        let input = match server {
            Server::Appears => SlotInput::Spawned(run, Some(7)),
            Server::FirstByte => SlotInput::FirstByte(run),
            Server::Initializes => SlotInput::Initialized(run, introduced()),
            Server::Lists => SlotInput::Discovered(run, catalogue("old")),
            Server::CannotList => SlotInput::DiscoveryFailed(run, "old".to_owned(), Duration::ZERO),
            Server::Answers => SlotInput::Recovered(run),
            Server::Degrades => {
                SlotInput::Health(run, HealthChange::Degraded { failures: 3, last_error: "no answer".to_owned() })
            }
            Server::Restores => SlotInput::Health(run, HealthChange::Restored { failures: 3, last_error: None }),
            Server::Ends(_, loss) if self.slot.spec.is_remote() => SlotInput::Ended(run, lost(loss.kind(), None)),
            Server::Ends(..) => SlotInput::Ended(run, exited(1, None)),
        };
        let before = format!("{:?}", self.slot);
        let effects = self.handle(input);
        assert!(effects.is_empty(), "old news has effects: {effects:?}");
        assert_eq!(before, format!("{:?}", self.slot), "old news changes something");
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        if self.slot.deadline().is_some_and(|at| at <= self.now) {
            self.handle(SlotInput::Tick(self.activity()));
            assert!(self.slot.deadline().is_none_or(|at| at > self.now), "what was due is not done");
        }
    }

    fn suspended(&mut self, time: Duration) {
        if self.removed {
            return;
        }
        let earlier = |at: Instant| at.checked_sub(time).unwrap_or(self.now);
        self.away.next = self.away.next.map(|(number, due)| (number, earlier(due)));
        self.not_before = self.not_before.map(earlier);
        let away = matches!(self.slot.phase, SlotPhase::Reconnecting { .. });
        let overdue = self.away.next.is_some_and(|(_, due)| due <= self.now);
        self.handle(SlotInput::ResumedAfterSuspend(time));
        assert!(!(away && overdue) || matches!(self.slot.phase, SlotPhase::Queued { .. }), "it is overdue");
        assert!(self.slot.deadline().is_none_or(|at| at > self.now), "what was due is not done");
    }

    fn all_goes_well(&mut self) {
        while !self.to_root.is_empty() {
            self.root_reads();
        }
        self.root_grants();
        while !self.grants.is_empty() {
            self.grant_arrives();
        }
        for run in self.workers.iter().map(|worker| worker.run).collect::<Vec<_>>() {
            let next = match self.worker(run) {
                Some(worker) if worker.told_to_stop => Server::Ends(End::Code(0), Loss::Refused),
                Some(worker) if worker.drains && worker.inside == 0 => Server::Ends(End::Code(0), Loss::Refused),
                Some(worker) if !worker.appeared => Server::Appears,
                Some(worker) if worker.initialized.is_none() => {
                    self.server(run, Server::FirstByte);
                    Server::Initializes
                }
                Some(worker) if worker.discovers && !worker.listed => Server::Lists,
                Some(_) | None => continue,
            };
            self.server(run, next);
        }
    }

    /// Its workers die with it, Root forgets its permits, and a new supervisor goes on from the memo.
    fn supervisor_panics(&mut self) {
        if self.ending {
            return;
        }
        self.over.extend(self.workers.drain(..).map(|worker| worker.run));
        self.over.extend(self.grants.drain(..));
        self.to_root.clear();
        self.waits = false;
        self.held.clear();
        self.caller_waits = false;
        let before = self.slot.phase.clone();
        let under_way = self.slot.connection() == Some(ConnectionState::Reconnecting);
        if !under_way && !matches!(before, SlotPhase::Reauth | SlotPhase::Exhausted { .. }) {
            self.away.begins_anew();
        }
        self.away.wanted = false;
        let (slot, effects) = Slot::from_memo(self.slot.spec.clone(), dice(), &self.memo);
        self.slot = slot;
        self.memo = self.slot.memo();
        self.perform(effects);
        self.check();
        match (&before, &self.slot.phase) {
            (SlotPhase::Reauth, after) => assert_eq!(*after, SlotPhase::Reauth),
            (SlotPhase::Exhausted { .. }, after) => assert_eq!(before, *after),
            (SlotPhase::Reconnecting { .. }, after) => assert_eq!(before, *after, "its schedule is another"),
            (_, after) if under_way => {
                let goes_on = matches!(after, SlotPhase::Reconnecting { .. } | SlotPhase::Queued { .. });
                assert!(goes_on, "{before:?} has come to {after:?}");
            }
            _ => {}
        }
        // An update of which it had not told the memo died with it.
        if self.desired != self.slot.spec {
            self.handle(SlotInput::Update(self.desired.clone()));
        }
    }

    fn handle(&mut self, input: SlotInput) -> Vec<SlotEffect> {
        if self.removed {
            return Vec::new();
        }
        let shows = matches!(
            input,
            SlotInput::Spawned(..)
                | SlotInput::Update(_)
                | SlotInput::DiscoveryFailed(..)
                | SlotInput::Initialized(..)
                | SlotInput::ResumedAfterSuspend(_)
                | SlotInput::Granted(_)
                | SlotInput::Call
        );
        let was_ready = matches!(self.slot.phase, SlotPhase::Ready { .. });
        let person = matches!(input, SlotInput::Start | SlotInput::Stop | SlotInput::Restart | SlotInput::Reconnect);
        let before = self.slot.spec.clone();
        let in_place = matches!(&input, SlotInput::Update(to) if self.goes_on_under(to));
        let effects = self.slot.handle(self.now, input);
        if !Arc::ptr_eq(&before, &self.slot.spec) {
            self.not_taken = false;
            if !in_place {
                // What is started anew is a clean slate, from when it is taken on.
                self.forget_exits();
                (self.recalled, self.was_connected) = (false, false);
            }
        }
        self.recalled &= !effects.iter().any(|effect| matches!(effect, SlotEffect::Emit(SlotEvent::Discovered { .. })));
        if self.recalled && !was_ready && matches!(self.slot.phase, SlotPhase::Ready { .. }) {
            let reads = effects.iter().any(|effect| matches!(effect, SlotEffect::Discover(_)));
            assert!(reads, "its tools are never read");
        }
        if shows || person || effects.iter().any(SlotEffect::is_visible) {
            self.memo = self.slot.memo();
        }
        self.perform(effects.clone());
        self.check();
        effects
    }

    fn perform(&mut self, effects: Vec<SlotEffect>) {
        for effect in effects {
            match effect {
                SlotEffect::RequestPermit { urgent: false } if self.caller_waits => {
                    panic!("nobody knows that a caller waits")
                }
                SlotEffect::RequestPermit { .. } | SlotEffect::WithdrawPermit | SlotEffect::ReleasePermit(_) => {
                    self.to_root.push_back(effect);
                }
                SlotEffect::Spawn { run, spec, discover } => self.spawn(run, &spec, discover),
                SlotEffect::Drain(run) => {
                    assert_ne!(self.slot.open_run(), Some(run), "calls have nowhere to go");
                    assert!(!std::mem::replace(&mut self.worker(run).unwrap().drains, true));
                }
                SlotEffect::Stop(run) => {
                    let worker = self.worker(run).unwrap();
                    assert!(!std::mem::replace(&mut worker.told_to_stop, true), "it is stopped twice");
                }
                SlotEffect::ShortenGrace(run) => {
                    assert!(self.caller_waits, "nobody waits for its end");
                    let worker = self.worker(run).unwrap();
                    assert!(worker.told_to_stop && !std::mem::replace(&mut worker.hurried, true));
                }
                SlotEffect::Discover(run) => {
                    let worker = self.worker(run).unwrap();
                    assert!(!worker.told_to_stop && worker.initialized.is_some());
                    (worker.discovers, worker.listed, worker.cannot_list) = (true, false, false);
                }
                SlotEffect::Emit(SlotEvent::UpdateRejected { .. }) => self.not_taken = true,
                SlotEffect::LogInvalidTransition { status, cause } => {
                    panic!("a transition is refused: {cause:?} in {status}")
                }
                SlotEffect::Admit(run) => {
                    assert_eq!(self.slot.open_run(), Some(run));
                    let comes_in = usize::from(std::mem::take(&mut self.caller_waits));
                    let worker = self.worker(run).unwrap();
                    assert!(!worker.drains, "it takes no calls any more");
                    worker.inside += comes_in;
                    self.last_activity = self.now;
                }
                SlotEffect::TrySleep { run, idle } => self.try_sleep(run, idle),
                SlotEffect::RefuseCallers { .. } => self.caller_waits = false,
                SlotEffect::Remove => {
                    assert!(self.ending && !self.removed);
                    assert!(self.workers.is_empty(), "something is left: {:?}", self.workers);
                    self.removed = true;
                }
                SlotEffect::FailCallers { retry_at, .. } => {
                    assert_eq!(retry_at, self.slot.next_retry_at());
                    self.caller_waits = false;
                }
                SlotEffect::Check(run) => {
                    assert_eq!(self.slot.open_run(), Some(run));
                    assert!(self.worker(run).unwrap().dialled, "a process is looked after by itself");
                }
                SlotEffect::Adopt { run, spec } => {
                    assert_eq!(spec, self.desired);
                    assert!(!self.worker(run).unwrap().told_to_stop);
                }
                SlotEffect::Emit(SlotEvent::Started { .. }) if self.slot.spec.is_remote() => {
                    assert!(!self.connected && !self.was_connected, "it is started a second time");
                    (self.connected, self.was_connected, self.attempts) = (true, true, 0);
                }
                SlotEffect::Emit(SlotEvent::Reconnected { attempts, changed }) => {
                    assert!(self.was_connected, "it is there again and never was before");
                    assert!(!self.connected, "it is there again and was never gone");
                    assert_eq!(attempts, std::mem::take(&mut self.attempts));
                    assert!(!changed.contains(&CatalogueAspect::Capabilities), "it can do what it always could");
                    self.connected = true;
                }
                SlotEffect::Emit(SlotEvent::Disconnected { .. }) => {
                    let there = std::mem::take(&mut self.connected);
                    assert!(there || self.ending, "it is gone and never was there");
                }
                SlotEffect::Emit(SlotEvent::Health(news)) => {
                    self.degraded = matches!(news, HealthChange::Degraded { .. });
                }
                SlotEffect::Emit(SlotEvent::PermanentlyFailed { .. }) => {
                    assert!(!self.slot.spec.is_remote(), "a remote one never fails for good");
                }
                SlotEffect::Status { .. }
                | SlotEffect::ChargeTeam
                | SlotEffect::Emit(_)
                | SlotEffect::RejectCommand { .. } => {}
            }
        }
    }

    fn try_sleep(&mut self, run: RunNumber, idle: Duration) {
        let policy = self.slot.spec.policy.idle.clone();
        assert_ne!(self.slot.spec.lifetime, ProcessLifetime::AlwaysOn, "it must never sleep");
        assert!(!self.slot.spec.is_remote(), "nothing is saved by a connection that sleeps");
        // A call may have been tried on it before its tools could be read: then its door stays open.
        let used = self.worker(run).unwrap().inside > 0;
        assert!(!used || idle.is_zero(), "it has a call in flight");
        if idle.is_zero() {
            assert_eq!(self.slot.spec.lifetime, ProcessLifetime::Lazy, "only a lazy one sleeps at once");
            assert!(self.ready_since.is_none(), "it is at once when it is ready, or by idleness");
        } else {
            assert_eq!(idle, self.now.duration_since(self.last_activity));
            assert!(idle >= policy.idle, "somebody needed it just now");
            assert!(
                self.ready_since.is_some_and(|since| self.now.duration_since(since) > policy.grace),
                "it is too young"
            );
        }
        if used {
            return;
        }
        if std::mem::take(&mut self.slips_in) {
            self.worker(run).unwrap().inside += 1;
            self.last_activity = self.now;
        } else {
            self.handle(SlotInput::Sleep { run, idle });
        }
    }

    fn spawn(&mut self, run: RunNumber, spec: &InstanceSpec, discover: bool) {
        let beside = self.slot.second_run.as_ref().and_then(SecondRun::run);
        let others: Vec<RunNumber> = self.workers.iter().map(|worker| worker.run).collect();
        match (&others[..], &self.slot.phase) {
            ([], SlotPhase::Starting { run: current, .. }) => assert_eq!(*current, run),
            // It starts beside the one that takes calls, or beside one that goes.
            ([other], SlotPhase::Ready { run: current, .. }) => assert_eq!((*other, run), (*current, beside.unwrap())),
            ([other], SlotPhase::Starting { run: current, .. }) => {
                assert_eq!((*other, run), (beside.unwrap(), *current));
                assert!(matches!(self.slot.second_run, Some(SecondRun::Ending { .. })));
            }
            (others, phase) => panic!("{run:?} is one too many: {others:?}, {phase:?}"),
        }
        assert!(self.held.contains(&run), "{run:?} has no permit");
        assert_eq!(self.want, RequestedState::Running, "it was stopped and nobody has started it");
        assert!(!self.ending, "it starts on its way out");
        assert!(spec.missing.is_empty(), "it starts without what its user must give");
        if spec.is_remote() {
            assert!(!self.away.needs_credentials, "it is tried with what was not accepted");
            let due = self.away.next.is_none_or(|(_, due)| due <= self.now);
            assert!(due || self.away.wanted, "an attempt before its time, and nobody wants it");
            assert_eq!(*spec, *self.desired, "it is tried with what it was, not what it is");
        }
        assert!(discover || self.slot.catalogue.is_some(), "nothing is known of its tools");
        assert!(self.exits_that_count() < self.slot.spec.policy.restart.max_crashes, "a restart beyond the budget");
        let succeeds = *spec != *self.slot.spec;
        assert!(succeeds || self.not_before.is_none_or(|at| self.now >= at), "a restart's delay is cut short");
        self.attempts += u32::from(spec.is_remote());
        self.workers.push(Worker {
            run,
            dialled: spec.is_remote(),
            cannot_list: false,
            newer_credentials: None,
            discovers: discover,
            appeared: false,
            initialized: None,
            listed: false,
            told_to_stop: false,
            hurried: false,
            drains: false,
            inside: 0,
        });
    }

    /// What holds after every step.
    fn check(&mut self) {
        let is_ready = matches!(self.slot.phase, SlotPhase::Ready { .. });
        self.ready_since = is_ready.then(|| self.ready_since.unwrap_or(self.now));
        let Slot { phase, status, requested_state: want, .. } = &self.slot;
        assert_eq!(*want, self.want, "{phase:?}");
        if self.want == RequestedState::Stopped && !self.ending {
            let rests = matches!(
                phase,
                SlotPhase::Stopped
                    | SlotPhase::Unconfigured
                    | SlotPhase::Stopping { then: AfterStop::Stop | AfterStop::AwaitConfig, .. }
            );
            assert!(rests, "{phase:?}");
        }
        let beside = self.slot.second_run.as_ref();
        let known: BTreeSet<RunNumber> = self.slot.run().into_iter().chain(beside.and_then(SecondRun::run)).collect();
        let there: BTreeSet<RunNumber> = self.workers.iter().map(|worker| worker.run).collect();
        assert_eq!(known, there, "{phase:?} with {beside:?}");
        let comes = matches!(beside, Some(SecondRun::Queued { .. } | SecondRun::Starting { .. }));
        assert!(!comes || is_ready, "{beside:?} beside {phase:?}");
        assert!(!matches!(phase, SlotPhase::Stopped | SlotPhase::Ended) || there.is_empty(), "{there:?} in {phase:?}");
        let open = self.slot.open_run();
        assert!(self.workers.iter().all(|worker| !worker.drains || Some(worker.run) != open), "calls go to {open:?}");
        assert!(*phase != SlotPhase::Ended || self.removed);
        if self.caller_waits && !self.removed {
            let waits_for_something = matches!(
                phase,
                SlotPhase::Queued { .. }
                    | SlotPhase::Starting { .. }
                    | SlotPhase::Backoff { .. }
                    | SlotPhase::FallingAsleep { .. }
                    | SlotPhase::Stopping { then: AfterStop::StartAgain(_), .. }
            );
            assert!(waits_for_something, "a caller is forgotten in {phase:?}");
        }
        let expected: &[Status] = match phase {
            SlotPhase::Unconfigured | SlotPhase::Stopping { then: AfterStop::AwaitConfig, .. } => {
                &[Status::AwaitingUserConfig]
            }
            SlotPhase::Undiscovered { retry_at: Some(_), .. } => &[Status::Error],
            SlotPhase::Undiscovered { attempt: 0, .. } => &[Status::DiscoveringTools],
            SlotPhase::Undiscovered { .. } => &[Status::Error, Status::DiscoveringTools],
            SlotPhase::Reconnecting { .. } => &[Status::Offline, Status::Error],
            SlotPhase::Exhausted { .. } => &[Status::Error],
            SlotPhase::Queued { why: StartReason::Reconnect { .. }, .. } => {
                &[Status::Offline, Status::Error, Status::CommandReceived, Status::Connecting, Status::Restarting]
            }
            SlotPhase::Starting { why: StartReason::Reconnect { .. }, .. } => {
                &[Status::Offline, Status::Error, Status::Connecting]
            }
            SlotPhase::Reauth => &[Status::RequiresReauth],
            SlotPhase::Queued { why: StartReason::Wake { .. }, .. }
            | SlotPhase::Starting { why: StartReason::Wake { .. }, .. }
            | SlotPhase::Backoff { why: StartReason::Wake { .. }, .. }
            | SlotPhase::Ready { .. }
            | SlotPhase::FallingAsleep { .. }
            | SlotPhase::Dormant { .. } => &[Status::Online],
            SlotPhase::Queued { .. } => &[Status::CommandReceived, Status::Connecting, Status::Restarting],
            SlotPhase::Starting { .. } => &[Status::Connecting, Status::DiscoveringTools],
            SlotPhase::Backoff { .. } => &[Status::Connecting],
            SlotPhase::Stopping { then: AfterStop::StartAgain(_), .. } => {
                &[Status::Provisioning, Status::Connecting, Status::Restarting]
            }
            SlotPhase::Stopped | SlotPhase::Stopping { then: AfterStop::Stop, .. } => &[Status::Offline],
            SlotPhase::Failed => &[Status::PermanentlyFailed],
            SlotPhase::Stopping { then: AfterStop::End, .. } | SlotPhase::Ended => &Status::ALL,
        };
        assert!(expected.contains(status), "{status} in {phase:?}");
        if *status == Status::Online {
            let says_so = self.slot.message.as_ref().is_some_and(|message| message.contains("the old one stays"));
            assert_eq!(says_so, self.not_taken, "{:?} in {phase:?}", self.slot.message);
        }
        let must_wake = match phase {
            SlotPhase::Backoff { until, .. } | SlotPhase::Reconnecting { until, .. } => Some(*until),
            SlotPhase::Undiscovered { retry_at, .. } => *retry_at,
            SlotPhase::Ready { idle_check_at: look_at, .. } => *look_at,
            _ => None,
        };
        if let SlotPhase::Ready { idle_check_at: look_at, .. } = phase {
            let sleeps = self.slot.spec.lifetime != ProcessLifetime::AlwaysOn && !self.slot.spec.is_remote();
            assert_eq!(look_at.is_some(), sleeps, "who looks whether it is needed?");
        }
        self.check_connection();
        assert!(must_wake.is_none_or(|at| self.slot.deadline().is_some_and(|deadline| deadline <= at)), "{phase:?}");
    }

    /// What holds of a connection after every step.
    fn check_connection(&self) {
        let Slot { phase, status, health, spec, .. } = &self.slot;
        if *health != ServerHealth::Unknown {
            assert_eq!(*health == ServerHealth::Degraded, self.degraded, "what was told of its health is not so");
        }
        match phase {
            SlotPhase::Ready { .. } | SlotPhase::Undiscovered { .. } => assert_ne!(*health, ServerHealth::Unknown),
            _ if self.slot.run().is_none() => assert_eq!(*health, ServerHealth::Unknown, "{phase:?}"),
            _ => {}
        }
        let connection = self.slot.connection();
        if !spec.is_remote() {
            let remote =
                matches!(phase, SlotPhase::Reconnecting { .. } | SlotPhase::Reauth | SlotPhase::Exhausted { .. });
            assert!(!remote && connection.is_none(), "a process in {phase:?}");
            return;
        }
        let process = matches!(
            phase,
            SlotPhase::Failed | SlotPhase::Dormant { .. } | SlotPhase::FallingAsleep { .. } | SlotPhase::Backoff { .. }
        );
        assert!(!process, "a connection in {phase:?}");
        let expected = match (status, phase) {
            _ if self.ending => ConnectionState::Disconnected,
            (Status::AwaitingUserConfig, _) => ConnectionState::Disconnected,
            (Status::Provisioning | Status::CommandReceived | Status::Connecting | Status::Restarting, _) => {
                ConnectionState::Connecting
            }
            (Status::DiscoveringTools | Status::SyncingTools | Status::Online, _) => ConnectionState::Connected,
            (Status::Error, SlotPhase::Undiscovered { .. }) => ConnectionState::Connected,
            (Status::Error, SlotPhase::Exhausted { .. }) | (Status::RequiresReauth, _) => ConnectionState::Error,
            (Status::Offline, _) if self.want == RequestedState::Stopped => ConnectionState::Disconnected,
            (Status::Offline | Status::Error, _) => ConnectionState::Reconnecting,
            (Status::PermanentlyFailed, _) => panic!("a remote one never fails for good"),
        };
        assert_eq!(connection, Some(expected), "{status} in {phase:?}");
        // Nothing is ever the end of it, but what the policy, a person or the server's refusal say.
        let goes_on = self.slot.deadline().is_some() || self.slot.run().is_some();
        let asks = matches!(phase, SlotPhase::Queued { .. });
        let rests = matches!(
            phase,
            SlotPhase::Unconfigured
                | SlotPhase::Reauth
                | SlotPhase::Exhausted { .. }
                | SlotPhase::Stopped
                | SlotPhase::Ended
        );
        assert!(goes_on || asks || rests, "nothing comes after {phase:?}");
    }

    /// Where it is in the schedule of its attempts, and what the world knows of that.
    fn check_schedule(&self) {
        let Slot { phase, spec, .. } = &self.slot;
        match phase {
            SlotPhase::Reconnecting { until, attempt } => assert_eq!(self.away.next, Some((*attempt, *until))),
            SlotPhase::Exhausted { attempts } => assert_eq!(spec.policy.reconnect.attempts_max, Some(*attempts)),
            SlotPhase::Queued { why: StartReason::Reconnect { attempt, .. }, .. }
            | SlotPhase::Starting { why: StartReason::Reconnect { attempt, .. }, .. } => {
                assert_eq!(*attempt, self.away.next.map_or(0, |(number, _)| number), "{phase:?}");
            }
            SlotPhase::Reauth => assert!(self.away.needs_credentials),
            _ => {}
        }
    }

    /// Nobody does anything any more and all goes well: it comes to rest, with nothing held and nobody waiting.
    pub(crate) fn settle(&mut self) {
        self.slips_in = false;
        for _ in 0..50 {
            for _ in 0..20 {
                self.step(Step::CallEnds);
            }
            self.all_goes_well();
            if let Some(at) = self.slot.deadline() {
                self.wait(at.saturating_duration_since(self.now));
            }
        }
        let rests = matches!(
            self.slot.phase,
            SlotPhase::Ready { idle_check_at: None, .. }
                | SlotPhase::Dormant { .. }
                | SlotPhase::Unconfigured
                | SlotPhase::Reauth
                | SlotPhase::Exhausted { .. }
                | SlotPhase::Stopped
                | SlotPhase::Failed
                | SlotPhase::Ended
        );
        assert!(rests, "{:?}", self.slot.phase);
        assert_eq!(self.slot.second_run, None);
        assert!(self.ending || self.not_taken || self.slot.spec == self.desired, "an update was forgotten");
        assert!(!self.caller_waits);
        assert!(self.held.is_empty(), "permits are still held: {:?}", self.held);
        assert!(!self.waits, "a permit is still asked for");
        assert_eq!(self.removed, self.ending);
    }
}
