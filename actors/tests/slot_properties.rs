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
use mcp_satellite_actors::model::spec::{InstanceSpec, Keep, Target};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::idle::Activity;
use mcp_satellite_actors::rules::slot::{Effect, Input, Memo, Phase, Slot, Then, Want, Why};
use proptest::prelude::*;
use samples::{catalogue, exited, incomplete, remote, spec, stopped};

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
    Server(Server),
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
    Incomplete,
    Remote,
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
        Shape::Incomplete => spec(incomplete),
        Shape::Remote => spec(remote),
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
    // The one worker there may be, and those that were.
    worker: Option<Worker>,
    over: Vec<Run>,
    // What people were promised.
    want: Want,
    caller_waits: bool,
    /// Calls in flight, and when one began or ended or the server said something.
    inside: usize,
    last_activity: Instant,
    ready_since: Option<Instant>,
    slips_in: bool,
    ending: bool,
    removed: bool,
    exits: Vec<Instant>,
    quick: usize,
    not_before: Option<Instant>,
}

impl World {
    fn new(first: Shape) -> Self {
        let (slot, effects) = Slot::new(shape(first));
        let mut world = Self {
            now: Instant::now(),
            memo: slot.memo(),
            slot,
            to_root: VecDeque::new(),
            waits: false,
            held: BTreeSet::new(),
            grants: VecDeque::new(),
            runs: 0,
            worker: None,
            over: Vec::new(),
            want: Want::Running,
            caller_waits: false,
            inside: 0,
            last_activity: Instant::now(),
            ready_since: None,
            slips_in: false,
            ending: false,
            removed: false,
            exits: Vec::new(),
            quick: 0,
            not_before: None,
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
                if self.inside > 0 {
                    self.inside -= 1;
                    self.last_activity = self.now;
                }
            }
            Step::SlipsIn => self.slips_in = true,
            Step::Server(server) => self.server(server),
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
                if !self.ending {
                    self.forget_exits();
                }
                self.handle(Input::Update(shape(to)));
                assert!(self.ending || self.slot.catalogue.is_none(), "a new configuration has no catalogue yet");
                assert!(self.ending || self.slot.spec == shape(to));
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
        let activity = Activity { calls_in_flight: self.inside, last: self.last_activity };
        self.slot.open_run().map(|_| activity)
    }

    fn server(&mut self, server: Server) {
        let now = self.now;
        self.last_activity = now;
        let Some(worker) = &mut self.worker else { return };
        let run = worker.run;
        let input = match server {
            Server::Appears if !worker.appeared => {
                worker.appeared = true;
                Input::Spawned(run, Some(100))
            }
            Server::FirstByte if worker.appeared => Input::FirstByte(run),
            Server::Initializes if worker.appeared && worker.initialized.is_none() => {
                worker.initialized = Some(now);
                Input::Initialized(run)
            }
            Server::Lists if worker.initialized.is_some() && (worker.discovers || worker.listed) => {
                worker.listed = true;
                Input::Discovered(run, catalogue("read"))
            }
            // What does not discover by itself is ready, and may announce a change at any time.
            Server::Lists if worker.initialized.is_some() => Input::Discovered(run, catalogue("write")),
            Server::CannotList if worker.initialized.is_some() => {
                Input::DiscoveryFailed(run, "tools/list timed out".to_owned())
            }
            Server::Ends(end) => {
                let exit = self.exit(end);
                self.ends(exit);
                return;
            }
            Server::Appears | Server::FirstByte | Server::Initializes | Server::Lists | Server::CannotList => return,
        };
        self.handle(input);
    }

    fn exit(&self, end: End) -> WorkerExit {
        let worker = self.worker.as_ref();
        let ran = worker.and_then(|worker| worker.initialized).map(|since| self.now.duration_since(since));
        let because = |cause| WorkerExit { ran, ..WorkerExit::because(cause) };
        match end {
            // It may as well crash while it is being stopped.
            End::Code(0) if worker.is_some_and(|worker| worker.told_to_stop) => stopped(),
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

    fn ends(&mut self, exit: WorkerExit) {
        let Some(worker) = self.worker.take() else { return };
        self.over.push(worker.run);
        self.inside = 0;
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
        let sleeps = (self.slot.open_run().is_some() || falls_asleep)
            && self.slot.status == Status::Online
            && self.slot.spec.keep == Keep::Listed
            && !exit.is_crash();
        let caller_waits = std::mem::take(&mut self.caller_waits);
        self.handle(Input::Ended(worker.run, exit));
        self.caller_waits |= caller_waits;
        if charged {
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
            Server::Initializes => Input::Initialized(run),
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
        let next = match &self.worker {
            None => return,
            Some(worker) if worker.told_to_stop => Server::Ends(End::Code(0)),
            Some(worker) if !worker.appeared => Server::Appears,
            Some(worker) if worker.initialized.is_none() => {
                self.server(Server::FirstByte);
                Server::Initializes
            }
            Some(worker) if worker.discovers && !worker.listed => Server::Lists,
            Some(_) => return,
        };
        self.server(next);
    }

    /// Its workers die with it, Root forgets its permits, and a new supervisor goes on from the memo.
    fn supervisor_panics(&mut self) {
        if self.ending {
            return;
        }
        self.inside = 0;
        self.over.extend(self.worker.take().map(|worker| worker.run));
        self.over.extend(self.grants.drain(..));
        self.to_root.clear();
        self.waits = false;
        self.held.clear();
        self.caller_waits = false;
        // A restart's delay is not remembered; the exits are.
        self.not_before = None;
        let (slot, effects) = Slot::revive(self.slot.spec.clone(), &self.memo);
        self.slot = slot;
        self.perform(effects);
        self.check();
    }

    fn handle(&mut self, input: Input) -> Vec<Effect> {
        if self.removed {
            return Vec::new();
        }
        let shows = matches!(input, Input::Spawned(..) | Input::Update(_));
        let person = matches!(input, Input::Start | Input::Stop | Input::Restart);
        let effects = self.slot.handle(self.now, input);
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
                Effect::RequestPermit { .. } | Effect::WithdrawPermit | Effect::ReleasePermit(_) => {
                    self.to_root.push_back(effect);
                }
                Effect::Spawn { run, discover } => self.spawn(run, discover),
                Effect::Stop(run) => {
                    let worker = self.worker.as_mut().unwrap();
                    assert_eq!(worker.run, run, "another run is stopped");
                    assert!(!std::mem::replace(&mut worker.told_to_stop, true), "it is stopped twice");
                }
                Effect::Discover(run) => assert_eq!(self.worker.as_ref().unwrap().run, run),
                Effect::Refused { status, cause } => panic!("a transition is refused: {cause:?} in {status}"),
                Effect::Admit(run) => {
                    assert_eq!(self.slot.open_run(), Some(run));
                    assert_eq!(self.worker.as_ref().unwrap().run, run);
                    self.inside += usize::from(std::mem::take(&mut self.caller_waits));
                    self.last_activity = self.now;
                }
                Effect::TrySleep { run, idle } => self.try_sleep(run, idle),
                Effect::Refuse(_) => self.caller_waits = false,
                Effect::Remove => {
                    assert!(self.ending && !self.removed);
                    self.removed = true;
                }
                Effect::Status { .. } | Effect::ChargeTeam | Effect::Tell(_) | Effect::Denied(_) => {}
            }
        }
    }

    fn try_sleep(&mut self, run: Run, idle: Duration) {
        let policy = &self.slot.spec.policy.idle;
        assert_eq!(self.slot.spec.keep, Keep::Listed, "it must never sleep");
        assert_eq!(self.inside, 0, "it has a call in flight");
        assert_eq!(idle, self.now.duration_since(self.last_activity));
        assert!(idle >= policy.idle, "somebody needed it just now");
        assert!(
            self.ready_since.is_some_and(|since| self.now.duration_since(since) >= policy.grace),
            "it is too young"
        );
        if std::mem::take(&mut self.slips_in) {
            self.inside += 1;
            self.last_activity = self.now;
        } else {
            self.handle(Input::Sleep { run, idle });
        }
    }

    fn spawn(&mut self, run: Run, discover: bool) {
        assert!(self.worker.is_none(), "{run:?} is a second incarnation");
        assert!(self.held.contains(&run), "{run:?} has no permit");
        assert_eq!(self.want, Want::Running, "it was stopped and nobody has started it");
        assert!(!self.ending, "it starts on its way out");
        assert!(self.slot.spec.missing.is_empty(), "it starts without what its user must give");
        assert!(matches!(self.slot.spec.target, Target::Stdio { .. }), "no worker serves it");
        assert!(discover || self.slot.catalogue.is_some(), "nothing is known of its tools");
        assert!(self.exits_that_count() < self.slot.spec.policy.restart.max_crashes, "a restart beyond the budget");
        assert!(self.not_before.is_none_or(|at| self.now >= at), "a restart's delay is cut short");
        let (appeared, initialized, listed, told_to_stop) = (false, None, false, false);
        self.worker = Some(Worker { run, discovers: discover, appeared, initialized, listed, told_to_stop });
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
        assert_eq!(self.slot.run(), self.worker.as_ref().map(|worker| worker.run), "{phase:?}");
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
            Phase::Unserved | Phase::Undiscovered { .. } => &[Status::Error],
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
        let must_wake = match phase {
            Phase::Backoff { until, .. } => Some(*until),
            Phase::Undiscovered { retry_at, .. } => *retry_at,
            Phase::Ready { look_at, .. } => *look_at,
            _ => None,
        };
        if let Phase::Ready { look_at, .. } = phase {
            assert_eq!(look_at.is_some(), self.slot.spec.keep == Keep::Listed, "who looks whether it is needed?");
        }
        assert!(must_wake.is_none_or(|at| self.slot.deadline().is_some_and(|deadline| deadline <= at)), "{phase:?}");
    }

    /// Nobody does anything any more and all goes well: it comes to rest, with nothing held and nobody waiting.
    fn settle(&mut self) {
        self.slips_in = false;
        for _ in 0..50 {
            self.step(Step::CallEnds);
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
                | Phase::Unserved
                | Phase::Stopped
                | Phase::Failed
                | Phase::Over
        );
        assert!(rests, "{:?}", self.slot.phase);
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
        1 => Just(Shape::Remote),
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
        6 => server().prop_map(Step::Server),
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
fn live(first: Shape, steps: Vec<Step>) {
    let mut world = World::new(first);
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
        steps in prop::collection::vec(any_step(3), 1..120),
    ) {
        live(first, steps);
    }

    #[test]
    fn the_promises_hold_when_people_change_their_minds_before_anything_comes_of_it(
        first in any_shape(),
        steps in prop::collection::vec(any_step(20), 1..80),
    ) {
        live(first, steps);
    }
}
