//! The slot against a model of its world: a root that grants permits late, twice or after they were withdrawn, servers
//! that do everything a server can do, people who change their minds, callers, and a supervisor that panics. Whatever
//! comes in whatever order, the promises below hold after every step, and in the end the dust settles.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod samples;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::exit::{ExitCause, WorkerExit};
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::{InstanceSpec, Keep, OnUpdate, Target};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::idle::Activity;
use mcp_satellite_actors::rules::slot::{Beside, Effect, Input, Memo, Phase, Slot, Then, Told, Want, Why};
use proptest::prelude::*;
use samples::{catalogue, exited, incomplete, introduced, remote, rolling, spec, stopped};

/// One thing that happens in the world. What makes no sense at the moment does not happen.
#[derive(Debug, Clone, Copy)]
enum Step {
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
    /// A tick that nobody asked for.
    SpuriousTick,
    /// All that is under way goes one step on, as it should.
    AllGoesWell,
    SupervisorPanics,
}

#[derive(Debug, Clone, Copy)]
enum Person {
    Start,
    Stop,
    Restart,
    Update(Shape),
    Uninstall,
    Shutdown,
}

/// What a configuration is changed to.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Listed,
    AlwaysOn,
    Lazy,
    Incomplete,
    Remote,
    /// In one of several versions, each rolled out.
    Rolling(u8),
}

#[derive(Debug, Clone, Copy)]
enum Server {
    Appears,
    FirstByte,
    Initializes,
    Lists,
    CannotList,
    Ends(End),
}

#[derive(Debug, Clone, Copy)]
enum End {
    Code(i32),
    Signal,
    Wire,
    Unresponsive,
    Panicked,
}

fn shape(shape: Shape) -> Arc<InstanceSpec> {
    match shape {
        Shape::Listed => spec(|_| {}),
        Shape::AlwaysOn => spec(|config| config.keep = Keep::AlwaysOn),
        Shape::Lazy => spec(|config| config.keep = Keep::Lazy),
        Shape::Incomplete => spec(incomplete),
        Shape::Remote => spec(remote),
        Shape::Rolling(version) => spec(rolling(version)),
    }
}

/// A worker as the team started it.
#[derive(Debug)]
struct Worker {
    run: Run,
    discovers: bool,
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

struct World {
    now: Instant,
    slot: Slot,
    memo: Memo,
    // Root.
    to_root: VecDeque<Effect>,
    waits: bool,
    held: BTreeSet<Run>,
    grants: VecDeque<Run>,
    runs: u64,
    // The workers that are there, two at most, and those that were.
    workers: Vec<Worker>,
    over: Vec<Run>,
    // What people were promised.
    want: Want,
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
    removed: bool,
    exits: Vec<Instant>,
    quick: usize,
    not_before: Option<Instant>,
}

impl World {
    /// `known` says that its tools are known from another day.
    fn new(first: Shape, known: bool) -> Self {
        let (slot, effects) = if known {
            Slot::revive(shape(first), &Memo::recalled(catalogue("read"), Instant::now()))
        } else {
            Slot::new(shape(first))
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
            want: Want::Running,
            caller_waits: false,
            desired: slot.spec.clone(),
            not_taken: false,
            recalled: known && matches!(first, Shape::Lazy),
            last_activity: Instant::now(),
            ready_since: None,
            slips_in: false,
            ending: false,
            removed: false,
            exits: Vec::new(),
            quick: 0,
            not_before: None,
            slot,
        };
        world.perform(effects);
        world.check();
        world
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::RootReads => self.root_reads(),
            Step::RootGrants => self.root_grants(),
            Step::GrantArrives => self.grant_arrives(),
            Step::Person(person) => self.person(person),
            Step::Call => {
                if !self.removed {
                    self.caller_waits = true;
                    self.handle(Input::Call);
                }
            }
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
            Step::SpuriousTick => drop(self.handle(Input::Tick(self.activity()))),
            Step::AllGoesWell => self.all_goes_well(),
            Step::SupervisorPanics => self.supervisor_panics(),
        }
    }

    fn root_reads(&mut self) {
        match self.to_root.pop_front() {
            Some(Effect::RequestPermit { .. }) => self.waits = true,
            Some(Effect::WithdrawPermit) => self.waits = false,
            Some(Effect::ReleasePermit(run)) => assert!(self.held.remove(&run), "{run:?} is given back twice"),
            _ => {}
        }
    }

    fn root_grants(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.runs += 1;
            self.held.insert(Run(self.runs));
            self.grants.push_back(Run(self.runs));
        }
    }

    fn grant_arrives(&mut self) {
        let Some(run) = self.grants.pop_front() else { return };
        if self.removed {
            // The team gives it back: there is no slot to ask.
            self.held.remove(&run);
        } else {
            self.handle(Input::Granted(run));
        }
    }

    fn person(&mut self, person: Person) {
        if self.removed {
            return;
        }
        match person {
            Person::Start => {
                // What is removed is not brought back.
                if !self.ending && self.want == Want::Stopped {
                    self.want = Want::Running;
                    self.forget_exits();
                }
                self.handle(Input::Start);
            }
            Person::Stop => {
                if !self.ending {
                    self.want = Want::Stopped;
                }
                self.handle(Input::Stop);
            }
            Person::Restart => {
                let before = (self.slot.phase.clone(), self.slot.status);
                let denied = self.handle(Input::Restart).iter().any(|effect| matches!(effect, Effect::Denied(_)));
                if denied {
                    assert_eq!(before, (self.slot.phase.clone(), self.slot.status), "a denied restart does nothing");
                } else {
                    self.forget_exits();
                }
                assert!(denied || self.want == Want::Running, "a stopped instance is not restarted");
            }
            Person::Update(to) => {
                let (to, before) = (shape(to), self.slot.spec.clone());
                // Root knows that nothing has changed, and what may be tried again.
                let again = to == self.desired;
                if self.ending || (again && !self.memo.can_try_again(&to)) {
                    return;
                }
                self.desired = to.clone();
                let rolls = to.on_update == OnUpdate::Rolling && matches!(self.slot.phase, Phase::Ready { .. });
                let sleeps = self.slot.is_dormant() || matches!(self.slot.phase, Phase::FallingAsleep { .. });
                let back = self.not_taken && to == before && sleeps;
                let stays = again && !rolls;
                self.not_taken &= stays;
                let phase = self.slot.phase.clone();
                self.handle(Input::Update(to.clone()));
                if rolls {
                    assert!(matches!(self.slot.phase, Phase::Ready { .. }), "nothing happens to what takes calls");
                    assert!(Arc::ptr_eq(&before, &self.slot.spec));
                } else if back || stays {
                    assert_eq!(phase, self.slot.phase, "nothing happens to what stays as it is");
                    assert!(Arc::ptr_eq(&before, &self.slot.spec));
                } else {
                    assert!(self.slot.catalogue.is_none(), "a new configuration has no catalogue yet");
                    assert_eq!(self.slot.spec, to);
                }
            }
            Person::Uninstall => {
                self.ending = true;
                self.handle(Input::Uninstall);
            }
            Person::Shutdown => {
                self.ending = true;
                self.handle(Input::Shutdown);
            }
        }
    }

    /// A person's request or a new configuration is a clean slate.
    fn forget_exits(&mut self) {
        self.exits.clear();
        self.quick = 0;
        self.not_before = None;
    }

    fn activity(&self) -> Option<Activity> {
        let worker = self.workers.iter().find(|worker| Some(worker.run) == self.slot.open_run())?;
        Some(Activity { calls_in_flight: worker.inside, last: self.last_activity })
    }

    fn worker(&mut self, run: Run) -> Option<&mut Worker> {
        self.workers.iter_mut().find(|worker| worker.run == run)
    }

    fn server(&mut self, run: Run, server: Server) {
        let now = self.now;
        self.last_activity = now;
        let Some(worker) = self.worker(run) else { return };
        let input = match server {
            Server::Appears if !worker.appeared => {
                worker.appeared = true;
                Input::Spawned(run, Some(100))
            }
            Server::FirstByte if worker.appeared => Input::FirstByte(run),
            Server::Initializes if worker.appeared && worker.initialized.is_none() => {
                worker.initialized = Some(now);
                Input::Initialized(run, introduced())
            }
            Server::Lists if worker.initialized.is_some() && (worker.discovers || worker.listed) => {
                worker.listed = true;
                Input::Discovered(run, catalogue("read"))
            }
            // What does not discover by itself is ready, and may announce a change at any time.
            Server::Lists if worker.initialized.is_some() => Input::Discovered(run, catalogue("write")),
            Server::CannotList if worker.initialized.is_some() => {
                // It is not asked again by itself.
                worker.discovers = false;
                Input::DiscoveryFailed(run, "tools/list timed out".to_owned())
            }
            Server::Ends(end) => {
                let exit = self.exit(run, end);
                self.ends(run, exit);
                return;
            }
            Server::Appears | Server::FirstByte | Server::Initializes | Server::Lists | Server::CannotList => return,
        };
        self.handle(input);
    }

    fn exit(&self, run: Run, end: End) -> WorkerExit {
        let worker = self.workers.iter().find(|worker| worker.run == run);
        let ran = worker.and_then(|worker| worker.initialized).map(|since| self.now.duration_since(since));
        let because = |cause| WorkerExit { ran, ..WorkerExit::because(cause) };
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

    fn ends(&mut self, run: Run, exit: WorkerExit) {
        let Some(at) = self.workers.iter().position(|worker| worker.run == run) else { return };
        let worker = self.workers.remove(at);
        self.over.push(run);
        if self.slot.run() != Some(run) {
            // It took no calls yet, or none any more: what becomes of it is its own affair.
            let exits = self.exits.len();
            self.handle(Input::Ended(run, exit));
            assert_eq!(self.exits.len(), exits, "it is charged to another");
            return;
        }
        // One that ends by itself in the moment in which it is to sleep has ended by itself.
        let falls_asleep = matches!(self.slot.phase, Phase::FallingAsleep { .. });
        let charged = !worker.told_to_stop || (falls_asleep && exit.cause != ExitCause::Asked);
        if charged {
            let policy = &self.slot.spec.policy.restart;
            self.exits.push(self.now);
            self.quick = if exit.ran.unwrap_or_default() > policy.quick { 0 } else { self.quick + 1 };
            let delay = match self.quick {
                0 => Duration::ZERO,
                nth => policy.delays[(nth - 1).min(policy.delays.len() - 1)],
            };
            self.not_before = Some(self.now + delay);
        }
        let before = self.slot.spec.clone();
        let sleeps = (self.slot.open_run().is_some() || falls_asleep)
            && self.slot.status == Status::Online
            && self.slot.spec.keep != Keep::AlwaysOn
            && !exit.is_crash();
        let caller_waits = std::mem::take(&mut self.caller_waits);
        self.handle(Input::Ended(run, exit));
        self.caller_waits |= caller_waits;
        if !Arc::ptr_eq(&before, &self.slot.spec) {
            let starts = matches!(self.slot.phase, Phase::Queued { .. } | Phase::Starting { .. });
            assert!(charged && starts, "the new configuration is what is started now: {:?}", self.slot.phase);
        } else if charged {
            let policy = &self.slot.spec.policy.restart;
            let spent = self.exits_that_count() >= policy.max_crashes;
            assert_eq!(spent, matches!(self.slot.phase, Phase::Failed), "{:?}", self.slot.phase);
            assert_eq!(sleeps && !spent, matches!(self.slot.phase, Phase::Dormant { .. }), "{:?}", self.slot.phase);
        } else {
            assert_eq!(falls_asleep, matches!(self.slot.phase, Phase::Dormant { .. }), "{:?}", self.slot.phase);
        }
        // The team's supervisor calls again for those who still wait.
        if self.caller_waits {
            self.handle(Input::Call);
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
            Server::Appears => Input::Spawned(run, Some(7)),
            Server::FirstByte => Input::FirstByte(run),
            Server::Initializes => Input::Initialized(run, introduced()),
            Server::Lists => Input::Discovered(run, catalogue("old")),
            Server::CannotList => Input::DiscoveryFailed(run, "old".to_owned()),
            Server::Ends(_) => Input::Ended(run, exited(1, None)),
        };
        let before = format!("{:?}", self.slot);
        let effects = self.handle(input);
        assert!(effects.is_empty(), "old news has effects: {effects:?}");
        assert_eq!(before, format!("{:?}", self.slot), "old news changes something");
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        if self.slot.deadline().is_some_and(|at| at <= self.now) {
            self.handle(Input::Tick(self.activity()));
            assert!(self.slot.deadline().is_none_or(|at| at > self.now), "what was due is not done");
        }
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
                Some(worker) if worker.told_to_stop => Server::Ends(End::Code(0)),
                Some(worker) if worker.drains && worker.inside == 0 => Server::Ends(End::Code(0)),
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
        let (slot, effects) = Slot::revive(self.slot.spec.clone(), &self.memo);
        self.slot = slot;
        self.perform(effects);
        self.check();
        // An update of which it had not told the memo died with it.
        if self.desired != self.slot.spec {
            self.handle(Input::Update(self.desired.clone()));
        }
    }

    fn handle(&mut self, input: Input) -> Vec<Effect> {
        if self.removed {
            return Vec::new();
        }
        let shows = matches!(input, Input::Spawned(..) | Input::Update(_) | Input::DiscoveryFailed(..));
        let was_ready = matches!(self.slot.phase, Phase::Ready { .. });
        let person = matches!(input, Input::Start | Input::Stop | Input::Restart);
        let before = self.slot.spec.clone();
        let effects = self.slot.handle(self.now, input);
        if !Arc::ptr_eq(&before, &self.slot.spec) {
            // A new configuration is a clean slate, from when it is taken on.
            self.forget_exits();
            (self.not_taken, self.recalled) = (false, false);
        }
        self.recalled &= !effects.iter().any(|effect| matches!(effect, Effect::Tell(Told::Discovered { .. })));
        if self.recalled && !was_ready && matches!(self.slot.phase, Phase::Ready { .. }) {
            let reads = effects.iter().any(|effect| matches!(effect, Effect::Discover(_)));
            assert!(reads, "its tools are never read");
        }
        if shows || person || effects.iter().any(Effect::shows) {
            self.memo = self.slot.memo();
        }
        self.perform(effects.clone());
        self.check();
        effects
    }

    fn perform(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::RequestPermit { urgent: false } if self.caller_waits => {
                    panic!("nobody knows that a caller waits")
                }
                Effect::RequestPermit { .. } | Effect::WithdrawPermit | Effect::ReleasePermit(_) => {
                    self.to_root.push_back(effect);
                }
                Effect::Spawn { run, spec, discover } => self.spawn(run, &spec, discover),
                Effect::Drain(run) => {
                    assert_ne!(self.slot.open_run(), Some(run), "calls have nowhere to go");
                    assert!(!std::mem::replace(&mut self.worker(run).unwrap().drains, true));
                }
                Effect::Stop(run) => {
                    let worker = self.worker(run).unwrap();
                    assert!(!std::mem::replace(&mut worker.told_to_stop, true), "it is stopped twice");
                }
                Effect::Hurry(run) => {
                    assert!(self.caller_waits, "nobody waits for its end");
                    let worker = self.worker(run).unwrap();
                    assert!(worker.told_to_stop && !std::mem::replace(&mut worker.hurried, true));
                }
                Effect::Discover(run) => {
                    let worker = self.worker(run).unwrap();
                    (worker.discovers, worker.listed) = (true, false);
                }
                Effect::Tell(Told::NotTaken { .. }) => self.not_taken = true,
                Effect::Refused { status, cause } => panic!("a transition is refused: {cause:?} in {status}"),
                Effect::Admit(run) => {
                    assert_eq!(self.slot.open_run(), Some(run));
                    let comes_in = usize::from(std::mem::take(&mut self.caller_waits));
                    let worker = self.worker(run).unwrap();
                    assert!(!worker.drains, "it takes no calls any more");
                    worker.inside += comes_in;
                    self.last_activity = self.now;
                }
                Effect::TrySleep { run, idle } => self.try_sleep(run, idle),
                Effect::Refuse(_) => self.caller_waits = false,
                Effect::Remove => {
                    assert!(self.ending && !self.removed);
                    assert!(self.workers.is_empty(), "something is left: {:?}", self.workers);
                    self.removed = true;
                }
                Effect::Unreachable { .. } => self.caller_waits = false,
                Effect::Check(_) | Effect::Credentials { .. } => {}
                Effect::Status { .. } | Effect::ChargeTeam | Effect::Tell(_) | Effect::Denied(_) => {}
            }
        }
    }

    fn try_sleep(&mut self, run: Run, idle: Duration) {
        let policy = self.slot.spec.policy.idle.clone();
        assert_ne!(self.slot.spec.keep, Keep::AlwaysOn, "it must never sleep");
        // A call may have been tried on it before its tools could be read: then its door stays open.
        let used = self.worker(run).unwrap().inside > 0;
        assert!(!used || idle.is_zero(), "it has a call in flight");
        if idle.is_zero() {
            assert_eq!(self.slot.spec.keep, Keep::Lazy, "only a lazy one sleeps at once");
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
            self.handle(Input::Sleep { run, idle });
        }
    }

    fn spawn(&mut self, run: Run, spec: &InstanceSpec, discover: bool) {
        let beside = self.slot.beside.as_ref().and_then(Beside::run);
        let others: Vec<Run> = self.workers.iter().map(|worker| worker.run).collect();
        match (&others[..], &self.slot.phase) {
            ([], Phase::Starting { run: current, .. }) => assert_eq!(*current, run),
            // It starts beside the one that takes calls, or beside one that goes.
            ([other], Phase::Ready { run: current, .. }) => assert_eq!((*other, run), (*current, beside.unwrap())),
            ([other], Phase::Starting { run: current, .. }) => {
                assert_eq!((*other, run), (beside.unwrap(), *current));
                assert!(matches!(self.slot.beside, Some(Beside::Leaving { .. })));
            }
            (others, phase) => panic!("{run:?} is one too many: {others:?}, {phase:?}"),
        }
        assert!(self.held.contains(&run), "{run:?} has no permit");
        assert_eq!(self.want, Want::Running, "it was stopped and nobody has started it");
        assert!(!self.ending, "it starts on its way out");
        assert!(spec.missing.is_empty(), "it starts without what its user must give");
        assert!(matches!(spec.target, Target::Stdio { .. }), "no worker serves it");
        assert!(discover || self.slot.catalogue.is_some(), "nothing is known of its tools");
        assert!(self.exits_that_count() < self.slot.spec.policy.restart.max_crashes, "a restart beyond the budget");
        let succeeds = *spec != *self.slot.spec;
        assert!(succeeds || self.not_before.is_none_or(|at| self.now >= at), "a restart's delay is cut short");
        self.workers.push(Worker {
            run,
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
        let is_ready = matches!(self.slot.phase, Phase::Ready { .. });
        self.ready_since = is_ready.then(|| self.ready_since.unwrap_or(self.now));
        let Slot { phase, status, want, .. } = &self.slot;
        assert_eq!(*want, self.want, "{phase:?}");
        if self.want == Want::Stopped && !self.ending {
            assert!(matches!(phase, Phase::Stopped | Phase::Stopping { then: Then::Stop, .. }), "{phase:?}");
        }
        let beside = self.slot.beside.as_ref();
        let known: BTreeSet<Run> = self.slot.run().into_iter().chain(beside.and_then(Beside::run)).collect();
        let there: BTreeSet<Run> = self.workers.iter().map(|worker| worker.run).collect();
        assert_eq!(known, there, "{phase:?} with {beside:?}");
        let comes = matches!(beside, Some(Beside::Queued { .. } | Beside::Starting { .. }));
        assert!(!comes || is_ready, "{beside:?} beside {phase:?}");
        assert!(!matches!(phase, Phase::Stopped | Phase::Over) || there.is_empty(), "{there:?} in {phase:?}");
        let open = self.slot.open_run();
        assert!(self.workers.iter().all(|worker| !worker.drains || Some(worker.run) != open), "calls go to {open:?}");
        assert!(*phase != Phase::Over || self.removed);
        if self.caller_waits && !self.removed {
            let waits_for_something = matches!(
                phase,
                Phase::Queued { .. }
                    | Phase::Starting { .. }
                    | Phase::Backoff { .. }
                    | Phase::FallingAsleep { .. }
                    | Phase::Stopping { then: Then::Again(_), .. }
            );
            assert!(waits_for_something, "a caller is forgotten in {phase:?}");
        }
        let expected: &[Status] = match phase {
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } => &[Status::AwaitingUserConfig],
            Phase::Undiscovered { .. } => &[Status::Error],
            Phase::Reconnecting { .. } | Phase::Exhausted { .. } => &[Status::Offline, Status::Error],
            Phase::Reauth => &[Status::RequiresReauth],
            Phase::Queued { why: Why::Wake { .. }, .. }
            | Phase::Starting { why: Why::Wake { .. }, .. }
            | Phase::Backoff { why: Why::Wake { .. }, .. }
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Dormant { .. } => &[Status::Online],
            Phase::Queued { .. } => &[Status::CommandReceived, Status::Connecting, Status::Restarting],
            Phase::Starting { .. } => &[Status::Connecting, Status::DiscoveringTools],
            Phase::Backoff { .. } => &[Status::Connecting],
            Phase::Stopping { then: Then::Again(_), .. } => {
                &[Status::Provisioning, Status::Connecting, Status::Restarting]
            }
            Phase::Stopped | Phase::Stopping { then: Then::Stop, .. } => &[Status::Offline],
            Phase::Failed => &[Status::PermanentlyFailed],
            Phase::Stopping { then: Then::Over, .. } | Phase::Over => &Status::ALL,
        };
        assert!(expected.contains(status), "{status} in {phase:?}");
        if *status == Status::Online {
            let says_so = self.slot.message.as_ref().is_some_and(|message| message.contains("the old one stays"));
            assert_eq!(says_so, self.not_taken, "{:?} in {phase:?}", self.slot.message);
        }
        let must_wake = match phase {
            Phase::Backoff { until, .. } => Some(*until),
            Phase::Undiscovered { retry_at, .. } => *retry_at,
            Phase::Ready { look_at, .. } => *look_at,
            _ => None,
        };
        if let Phase::Ready { look_at, .. } = phase {
            assert_eq!(look_at.is_some(), self.slot.spec.keep != Keep::AlwaysOn, "who looks whether it is needed?");
        }
        assert!(must_wake.is_none_or(|at| self.slot.deadline().is_some_and(|deadline| deadline <= at)), "{phase:?}");
    }

    /// Nobody does anything any more and all goes well: it comes to rest, with nothing held and nobody waiting.
    fn settle(&mut self) {
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
            Phase::Ready { look_at: None, .. }
                | Phase::Dormant { .. }
                | Phase::Unconfigured
                | Phase::Reauth
                | Phase::Stopped
                | Phase::Failed
                | Phase::Over
        );
        assert!(rests, "{:?}", self.slot.phase);
        assert_eq!(self.slot.beside, None);
        assert!(self.ending || self.not_taken || self.slot.spec == self.desired, "an update was forgotten");
        assert!(!self.caller_waits);
        assert!(self.held.is_empty(), "permits are still held: {:?}", self.held);
        assert!(!self.waits, "a permit is still asked for");
        assert_eq!(self.removed, self.ending);
    }
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        3 => Just(End::Code(0)),
        2 => Just(End::Code(1)),
        1 => Just(End::Signal),
        1 => Just(End::Wire),
        1 => Just(End::Unresponsive),
        1 => Just(End::Panicked),
    ]
}

fn server() -> impl Strategy<Value = Server> {
    prop_oneof![
        2 => Just(Server::Appears),
        2 => Just(Server::FirstByte),
        2 => Just(Server::Initializes),
        2 => Just(Server::Lists),
        1 => Just(Server::CannotList),
        3 => end().prop_map(Server::Ends),
    ]
}

fn any_shape() -> impl Strategy<Value = Shape> {
    prop_oneof![
        4 => Just(Shape::Listed),
        2 => Just(Shape::AlwaysOn),
        2 => Just(Shape::Incomplete),
        2 => Just(Shape::Lazy),
        1 => Just(Shape::Remote),
        6 => (0..4_u8).prop_map(Shape::Rolling),
    ]
}

fn person() -> impl Strategy<Value = Person> {
    prop_oneof![
        6 => Just(Person::Start),
        4 => Just(Person::Stop),
        4 => Just(Person::Restart),
        6 => any_shape().prop_map(Person::Update),
        1 => prop_oneof![Just(Person::Uninstall), Just(Person::Shutdown)],
    ]
}

/// `people` is how often a person acts: 3 is now and then, 20 is before anything comes of what they said.
fn any_step(people: u32) -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => Just(Step::AllGoesWell),
        8 => (any::<bool>(), server()).prop_map(|(last, server)| Step::Server(last, server)),
        people => person().prop_map(Step::Person),
        3 => Just(Step::Call),
        3 => Just(Step::CallEnds),
        1 => Just(Step::SlipsIn),
        2 => Just(Step::RootReads),
        2 => Just(Step::RootGrants),
        2 => Just(Step::GrantArrives),
        2 => (any::<usize>(), server()).prop_map(|(nth, server)| Step::OldNews(nth, server)),
        4 => prop_oneof![0..2_000_u64, 0..90_000_u64, 0..400_000_u64].prop_map(|ms| Step::Wait(Duration::from_millis(ms))),
        1 => Just(Step::SpuriousTick),
        1 => Just(Step::SupervisorPanics),
    ]
}

/// Lives through these steps, then comes to rest, then ends.
fn live(first: Shape, known: bool, steps: Vec<Step>) {
    let mut world = World::new(first, known);
    for step in steps {
        world.step(step);
    }
    world.settle();
    world.step(Step::Person(Person::Shutdown));
    world.settle();
    assert!(world.removed);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_comes_in_whatever_order_the_promises_hold(
        first in any_shape(),
        known in any::<bool>(),
        steps in prop::collection::vec(any_step(3), 1..120),
    ) {
        live(first, known, steps);
    }

    #[test]
    fn the_promises_hold_for_what_is_known_from_another_day(steps in prop::collection::vec(any_step(1), 1..120)) {
        live(Shape::Lazy, true, steps);
    }

    #[test]
    fn the_promises_hold_when_people_change_their_minds_before_anything_comes_of_it(
        first in any_shape(),
        known in any::<bool>(),
        steps in prop::collection::vec(any_step(20), 1..80),
    ) {
        live(first, known, steps);
    }
}
