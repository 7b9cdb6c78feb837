//! The environment of one slot: its possible steps, and the invariants after each of them.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::catalogue::CatalogueAspect;
use mcp_satellite_actors::model::event::{RestartReason, StopKind};
use mcp_satellite_actors::model::exit::{ExitCause, WorkerExit};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::memo::StoredMemo;
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget, UpdateMethod};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::idle::RunActivity;
use mcp_satellite_actors::rules::jitter::JitterRng;
use mcp_satellite_actors::rules::slot::SlotPhase::{Down, Up};
use mcp_satellite_actors::rules::slot::{
    AfterStop, DownState, HealthChange, RequestedState, RunState, SecondRun, Slot, SlotEffect, SlotEvent, SlotInput,
    SlotMemo, StartReason,
};

use crate::away::{ExpectedReaction, Loss, ReconnectModel};
use crate::samples::{
    bounded, catalogue, exited, incomplete, lost, remote, rolling, server_info, spec, stopped, with_token,
};

/// A step of the environment. A step that is impossible in the current state has no effect.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    /// The root reads its next message.
    RootReads,
    /// The root grants a permit if the instance waits for one.
    RootGrants,
    /// The team reads the next grant.
    GrantArrives,
    Command(Command),
    Call,
    CallEnds,
    /// At the next attempt to put the run to sleep, a call is admitted first.
    CallBeforeSleep,
    /// An action of the first run, or of the last if `true`.
    ServerAction(bool, ServerAction),
    /// A message about a run that has ended.
    StaleMessage(usize, ServerAction),
    Wait(Duration),
    /// The machine is suspended for this time, which the monotonic clock does not count.
    Suspended(Duration),
    /// A tick without a deadline.
    SpuriousTick,
    /// Everything in progress takes its next regular step.
    Progress,
    SupervisorPanics,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Command {
    Start,
    Stop,
    Restart,
    Reconnect,
    Update(ConfigShape),
    Uninstall,
    Shutdown,
}

/// A kind of configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ConfigShape {
    Listed,
    AlwaysOn,
    Lazy,
    Incomplete,
    Remote(RemoteShape),
    /// One of several versions with rolling updates.
    Rolling(u8),
}

/// A configuration of a remote server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteShape {
    pub(crate) bounded: bool,
    pub(crate) lazy: bool,
    pub(crate) incomplete: bool,
    pub(crate) address: u8,
    pub(crate) token: u8,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum ServerAction {
    Spawns,
    FirstByte,
    Initializes,
    Lists,
    CannotList,
    CallSucceeds,
    /// Three health checks have failed.
    Degrades,
    Restores,
    /// The end of a process, or the loss of a connection.
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

fn shaped_spec(shape: ConfigShape) -> Arc<InstanceSpec> {
    match shape {
        ConfigShape::Listed => spec(|_| {}),
        ConfigShape::AlwaysOn => spec(|config| config.lifetime = ProcessLifetime::AlwaysOn),
        ConfigShape::Lazy => spec(|config| config.lifetime = ProcessLifetime::Lazy),
        ConfigShape::Incomplete => spec(incomplete),
        ConfigShape::Remote(of) => spec(|config| {
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
        ConfigShape::Rolling(version) => spec(rolling(version)),
    }
}

fn jitter_rng() -> JitterRng {
    JitterRng::new(0, "")
}

/// A worker that the team has started.
#[derive(Debug)]
struct Worker {
    run: RunNumber,
    /// True for a connection, false for a process.
    dialled: bool,
    /// True if it takes over the server of an earlier satellite.
    adopts: bool,
    discovers: bool,
    /// True if the last reading of its lists has failed.
    cannot_list: bool,
    /// Time of the last change of its credentials since its start.
    credentials_changed_at: Option<Instant>,
    spawned: bool,
    initialized: Option<Instant>,
    listed: bool,
    is_stopping: bool,
    grace_shortened: bool,
    /// True if the run takes no new calls.
    drains: bool,
    calls_in_flight: usize,
}

pub(crate) struct World {
    now: Instant,
    slot: Slot,
    memo: SlotMemo,
    // State of the root.
    to_root: VecDeque<SlotEffect>,
    /// True if the instance waits for a permit, at most once even after a change of its kind.
    waits_for_permit: bool,
    held: BTreeSet<RunNumber>,
    grants: VecDeque<RunNumber>,
    runs: u64,
    // At most two live workers, and the runs that have ended.
    workers: Vec<Worker>,
    ended_runs: Vec<RunNumber>,
    // Expectations of users.
    requested: RequestedState,
    caller_waits: bool,
    /// Time of the last start or end of a call, or of the last message of a server.
    last_activity: Instant,
    /// The latest configuration, and below, whether its start has failed.
    desired: Arc<InstanceSpec>,
    update_rejected: bool,
    /// True if the tools are from an earlier run and were not read since.
    tools_restored: bool,
    ready_since: Option<Instant>,
    call_before_sleep: bool,
    ending: bool,
    pub(crate) removed: bool,
    away: ReconnectModel,
    /// True after a reported degradation, until the report of its end.
    degraded: bool,
    /// True after a reported connection, until the report of its end.
    connected: bool,
    /// True after the first connection under this configuration.
    was_connected: bool,
    /// Attempts since the last connection.
    attempts: u32,
    exits: Vec<Instant>,
    quick: usize,
    not_before: Option<Instant>,
}

impl World {
    /// `known` means that the tools are known from an earlier run, and `adopts` that a server of an earlier satellite
    /// runs.
    pub(crate) fn new(first: ConfigShape, known: bool, adopts: bool) -> Self {
        let adopts = adopts && SlotMemo::may_adopt(&shaped_spec(first), None);
        let (slot, effects) = if known || adopts {
            let (spec, stored, tools) = (shaped_spec(first), StoredMemo::default(), known.then(|| catalogue("read")));
            let memo = SlotMemo::from_stored(&spec, &stored, tools, Instant::now(), Timestamp::UNIX_EPOCH);
            Slot::from_memo(spec, jitter_rng(), &memo.with_adoption(adopts.then_some(RunNumber(1))))
        } else {
            Slot::new(shaped_spec(first), jitter_rng())
        };
        let mut world = Self {
            now: Instant::now(),
            memo: slot.memo(),
            to_root: VecDeque::new(),
            waits_for_permit: false,
            held: BTreeSet::new(),
            grants: VecDeque::new(),
            runs: u64::from(adopts),
            workers: Vec::new(),
            ended_runs: Vec::new(),
            requested: RequestedState::Running,
            caller_waits: false,
            desired: slot.spec.clone(),
            update_rejected: false,
            tools_restored: known && !adopts && matches!(first, ConfigShape::Lazy),
            last_activity: Instant::now(),
            ready_since: None,
            call_before_sleep: false,
            ending: false,
            removed: false,
            away: ReconnectModel::default(),
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
            Step::Command(command) => self.command(command),
            Step::Call => self.call(),
            Step::CallEnds => {
                if let Some(worker) = self.workers.iter_mut().find(|worker| worker.calls_in_flight > 0) {
                    worker.calls_in_flight -= 1;
                    self.last_activity = self.now;
                }
            }
            Step::CallBeforeSleep => self.call_before_sleep = true,
            Step::ServerAction(last, server) => {
                let worker = if last { self.workers.last() } else { self.workers.first() };
                if let Some(run) = worker.map(|worker| worker.run) {
                    self.act(run, server);
                }
            }
            Step::StaleMessage(nth, server) => self.handle_stale_message(nth, server),
            Step::Wait(time) => self.wait(time),
            Step::Suspended(time) => self.suspend(time),
            Step::SpuriousTick => drop(self.handle(SlotInput::Tick(self.activity()))),
            Step::Progress => self.progress(),
            Step::SupervisorPanics => self.supervisor_panics(),
        }
        self.check_schedule();
    }

    fn call(&mut self) {
        if self.removed {
            return;
        }
        self.caller_waits = true;
        self.away.attempt_requested = true;
        self.handle(SlotInput::Call);
        let waits = matches!(self.slot.phase, Down(DownState::Reconnecting { .. } | DownState::Exhausted { .. }));
        assert!(!waits, "a call waits for the schedule");
    }

    fn root_reads(&mut self) {
        match self.to_root.pop_front() {
            Some(SlotEffect::RequestPermit { .. }) => self.waits_for_permit = true,
            Some(SlotEffect::WithdrawPermit) => self.waits_for_permit = false,
            Some(SlotEffect::ReleasePermit(run)) => assert!(self.held.remove(&run), "{run:?} is released twice"),
            _ => {}
        }
    }

    fn root_grants(&mut self) {
        if std::mem::take(&mut self.waits_for_permit) {
            self.runs += 1;
            self.held.insert(RunNumber(self.runs));
            self.grants.push_back(RunNumber(self.runs));
        }
    }

    fn grant_arrives(&mut self) {
        let Some(run) = self.grants.pop_front() else { return };
        if self.removed {
            // The team releases the permit: the slot is gone.
            self.held.remove(&run);
        } else {
            self.handle(SlotInput::Granted(run));
        }
    }

    fn command(&mut self, command: Command) {
        if self.removed {
            return;
        }
        match command {
            Command::Start => {
                // A start does not restore an instance during its removal.
                if !self.ending && self.requested == RequestedState::Stopped {
                    self.requested = RequestedState::Running;
                    self.forget_exits();
                }
                if matches!(self.slot.phase, Down(DownState::Exhausted { .. })) {
                    self.away.reset();
                }
                self.handle(SlotInput::Start);
            }
            Command::Stop => {
                if !self.ending {
                    self.requested = RequestedState::Stopped;
                    self.away.reset();
                }
                self.handle(SlotInput::Stop);
            }
            Command::Restart | Command::Reconnect => self.restart(matches!(command, Command::Reconnect)),
            Command::Update(to) => self.update(&shaped_spec(to)),
            Command::Uninstall => {
                self.ending = true;
                self.handle(SlotInput::Uninstall);
            }
            Command::Shutdown => {
                self.ending = true;
                self.handle(SlotInput::Shutdown);
            }
        }
    }

    fn restart(&mut self, reconnect: bool) {
        let before = (self.slot.phase.clone(), self.slot.status);
        let (remote, stopped) = (self.slot.spec.is_remote(), self.requested == RequestedState::Stopped);
        // A reconnect request starts a stopped remote server, too.
        if reconnect && remote && stopped && !self.ending {
            self.requested = RequestedState::Running;
        }
        let away = std::mem::take(&mut self.away);
        let denied = self.handle(if reconnect { SlotInput::Reconnect } else { SlotInput::Restart });
        if denied.iter().any(|effect| matches!(effect, SlotEffect::RejectCommand { .. })) {
            assert_eq!(before, (self.slot.phase.clone(), self.slot.status), "a rejected command changed the slot");
            self.away = away;
        } else {
            self.forget_exits();
            assert!(self.requested == RequestedState::Running, "a stopped instance was restarted");
            let waits = matches!(
                self.slot.phase,
                Down(DownState::Reconnecting { .. } | DownState::Exhausted { .. } | DownState::Reauth)
            );
            assert!(!waits, "a command waits for the schedule");
        }
    }

    fn update(&mut self, to: &Arc<InstanceSpec>) {
        let before = self.slot.spec.clone();
        // The root ignores an unchanged configuration unless a failed one may be retried.
        let again = *to == self.desired;
        if self.ending || (again && !self.memo.can_retry(to)) {
            return;
        }
        self.desired = Arc::clone(to);
        if self.can_continue_under(to) {
            self.update_in_place(to);
            return;
        }
        let (ready, process) =
            (matches!(self.slot.phase, Up { state: RunState::Ready { .. }, .. }), !before.is_remote());
        let rolls = to.update_method == UpdateMethod::Rolling && ready && process;
        let stays = again && !rolls;
        self.update_rejected &= stays;
        let phase = self.slot.phase.clone();
        if !rolls && !stays {
            self.away.reset();
        }
        self.handle(SlotInput::Update(Arc::clone(to)));
        if rolls {
            assert!(
                matches!(self.slot.phase, Up { state: RunState::Ready { .. }, .. }),
                "an update with a new run disturbed the run that takes calls"
            );
            assert!(Arc::ptr_eq(&before, &self.slot.spec));
        } else if stays {
            assert_eq!(phase, self.slot.phase, "a repeated configuration changed the phase");
            assert!(Arc::ptr_eq(&before, &self.slot.spec));
        } else {
            assert!(self.slot.record.catalogue.is_none(), "a new configuration has a catalogue already");
            assert_eq!(&self.slot.spec, to);
        }
    }

    /// Returns true if this configuration does not need a new run.
    fn can_continue_under(&self, to: &InstanceSpec) -> bool {
        let before = &*self.slot.spec;
        let sleeps =
            self.slot.is_dormant() || matches!(self.slot.phase, Up { state: RunState::FallingAsleep { .. }, .. });
        let wakes = sleeps && to.lifetime == ProcessLifetime::AlwaysOn && before.lifetime != ProcessLifetime::AlwaysOn;
        before.can_continue_as(to) && !wakes
    }

    /// Applies an update that does not change the arguments of the run.
    fn update_in_place(&mut self, to: &Arc<InstanceSpec>) {
        let (before, spec) = ((self.slot.phase.clone(), self.slot.record.catalogue.clone()), self.slot.spec.clone());
        let are_newer = to.is_remote() && !to.has_same_credentials(&spec);
        let waits = match before.0 {
            Down(DownState::Exhausted { .. }) => true,
            Down(DownState::Reauth) => are_newer,
            _ => false,
        };
        if waits {
            self.away.reset();
        }
        self.handle(SlotInput::Update(Arc::clone(to)));
        assert_eq!(&self.slot.spec, to);
        assert_eq!(
            before.1.is_some(),
            self.slot.record.catalogue.is_some(),
            "an update in place changed the catalogue"
        );
        let now = self.now;
        match (before.0, self.slot.phase.clone()) {
            (_, after) if waits => {
                assert!(
                    matches!(after, Down(DownState::Queued { .. })),
                    "no attempt follows the update for which the instance waited"
                );
            }
            (
                Up { run, state: RunState::Ready { since, .. } },
                Up { run: continues, state: RunState::Ready { since: still, .. } },
            ) => {
                assert_eq!((run, since), (continues, still), "an update in place changed the phase");
            }
            (before, after) => assert_eq!(before, after, "an update in place changed the phase"),
        }
        if are_newer && let Some(worker) = self.slot.run().and_then(|run| self.worker(run)) {
            worker.credentials_changed_at = (!worker.is_stopping).then_some(now).or(worker.credentials_changed_at);
        }
    }

    /// A command or a new configuration clears the exit history.
    fn forget_exits(&mut self) {
        self.exits.clear();
        self.quick = 0;
        self.not_before = None;
    }

    fn activity(&self) -> Option<RunActivity> {
        let worker = self.workers.iter().find(|worker| Some(worker.run) == self.slot.open_run())?;
        Some(RunActivity { user_count: worker.calls_in_flight, last: self.last_activity })
    }

    fn worker(&mut self, run: RunNumber) -> Option<&mut Worker> {
        self.workers.iter_mut().find(|worker| worker.run == run)
    }

    fn act(&mut self, run: RunNumber, server: ServerAction) {
        let now = self.now;
        self.last_activity = now;
        let Some(worker) = self.worker(run) else { return };
        let input = match server {
            ServerAction::Spawns if !worker.spawned => {
                worker.spawned = true;
                SlotInput::Spawned(run, (!worker.dialled).then_some(100))
            }
            ServerAction::FirstByte if worker.spawned => SlotInput::FirstByte(run),
            ServerAction::Initializes if worker.spawned && worker.initialized.is_none() => {
                worker.initialized = Some(now);
                if worker.adopts {
                    SlotInput::Adopted(run, server_info(), now)
                } else {
                    SlotInput::Initialized(run, server_info())
                }
            }
            ServerAction::Lists if worker.initialized.is_some() && (worker.discovers || worker.listed) => {
                (worker.listed, worker.cannot_list) = (true, false);
                SlotInput::Discovered(run, catalogue("read"))
            }
            // A run without discovery is ready and may announce a change at any time.
            ServerAction::Lists if worker.initialized.is_some() => SlotInput::Discovered(run, catalogue("write")),
            ServerAction::CannotList if worker.initialized.is_some() => {
                // Discovery is not repeated automatically.
                (worker.discovers, worker.cannot_list) = (false, true);
                SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO)
            }
            // The session reports this once, and not during a reading.
            ServerAction::CallSucceeds if worker.cannot_list && !worker.discovers => {
                worker.cannot_list = false;
                SlotInput::Recovered(run)
            }
            ServerAction::Degrades if worker.dialled && worker.initialized.is_some() => {
                SlotInput::Health(run, HealthChange::Degraded { failures: 3, last_error: "no answer".to_owned() })
            }
            ServerAction::Restores if worker.dialled && worker.initialized.is_some() => {
                SlotInput::Health(run, HealthChange::Restored { failures: 3, last_error: None })
            }
            ServerAction::Ends(_, loss) if worker.dialled => {
                self.lose_connection(run, loss);
                return;
            }
            ServerAction::Ends(end, _) => {
                let exit = self.exit(run, end);
                self.end_process(run, exit);
                return;
            }
            ServerAction::Spawns
            | ServerAction::FirstByte
            | ServerAction::Initializes
            | ServerAction::Lists
            | ServerAction::CannotList
            | ServerAction::CallSucceeds
            | ServerAction::Degrades
            | ServerAction::Restores => return,
        };
        let reconnects = matches!(self.slot.phase, Up { run: its, state: RunState::Starting { why: StartReason::Reconnect { .. } | StartReason::Adopt, .. } } if its == run);
        self.handle(input);
        let current = self.slot.run() == Some(run) && self.slot.spec.is_remote();
        match server {
            ServerAction::Initializes if reconnects => {
                assert_eq!(self.slot.open_run(), Some(run));
                assert!(!self.caller_waits, "a caller waits although the connection is back");
            }
            // A reconnect has succeeded when the lists are read.
            ServerAction::Lists if current => self.away.reset(),
            _ => {}
        }
    }

    fn exit(&self, run: RunNumber, end: End) -> WorkerExit {
        let worker = self.workers.iter().find(|worker| worker.run == run);
        let ran = worker.and_then(|worker| worker.initialized).map(|since| self.now.duration_since(since));
        let because = |cause| WorkerExit { uptime: ran, ..WorkerExit::from_cause(cause) };
        match end {
            // Other ends are possible during a stop, too.
            End::Code(0) if worker.is_some_and(|worker| worker.is_stopping || worker.drains) => stopped(),
            _ if worker.is_some_and(|worker| worker.adopts && !worker.spawned) => {
                because(ExitCause::NotAdopted("the server no longer runs".to_owned()))
            }
            _ if worker.is_some_and(|worker| !worker.spawned) => {
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
        self.ended_runs.push(run);
        Some(self.workers.remove(at))
    }

    /// Reports the end of a run. The supervisor repeats the call for callers that still wait.
    fn report_end(&mut self, run: RunNumber, exit: WorkerExit) -> Vec<SlotEffect> {
        let waits = std::mem::take(&mut self.caller_waits);
        let effects = self.handle(SlotInput::Ended(run, exit));
        let answered = effects.iter().any(|effect| {
            matches!(effect, SlotEffect::RefuseCallers { .. } | SlotEffect::FailCallers { .. } | SlotEffect::Admit(_))
        });
        self.caller_waits |= waits && !answered;
        effects
    }

    /// Ends a connection and checks the effects.
    fn lose_connection(&mut self, run: RunNumber, loss: Loss) {
        let Some(worker) = self.take_worker(run) else { return };
        let connected = worker.initialized.is_some();
        let ran = worker.initialized.map(|since| self.now.duration_since(since));
        let kind = loss.kind();
        let exit = match loss {
            _ if worker.is_stopping && matches!(loss, Loss::Refused) => {
                WorkerExit { uptime: ran, ..WorkerExit::from_cause(ExitCause::Requested) }
            }
            // A panic has no failure kind.
            Loss::Panicked if !worker.is_stopping => {
                WorkerExit::from_cause(ExitCause::Panicked("a fault of ours".to_owned()))
            }
            _ => lost(kind, ran),
        };
        assert_eq!(self.slot.run(), Some(run), "a second run is never a connection");
        let uninstalled =
            matches!(self.slot.phase, Up { state: RunState::Stopping { kind: StopKind::Uninstall, .. }, .. });
        let Slot { phase, status, message, .. } = &self.slot;
        let (before, known) = (phase.clone(), (*status, message.clone()));
        let was_reported = self.connected;
        let effects = self.report_end(run, exit);
        let reported = effects.iter().filter_map(|effect| match effect {
            SlotEffect::Emit(SlotEvent::Disconnected { intentional }) => Some(*intentional),
            SlotEffect::Emit(SlotEvent::Stopped { .. } | SlotEvent::Crashed { .. } | SlotEvent::Exited { .. }) => {
                panic!("an event of a process about a connection")
            }
            _ => None,
        });
        let disconnected = was_reported || (worker.is_stopping && uninstalled);
        let expected: Vec<bool> = disconnected.then_some(worker.is_stopping).into_iter().collect();
        assert_eq!(reported.collect::<Vec<_>>(), expected, "unexpected events about the end of a connection");
        let reconnecting =
            effects.iter().any(|effect| matches!(effect, SlotEffect::Emit(SlotEvent::Reconnecting { .. })));
        if worker.is_stopping {
            assert!(!reconnecting);
        } else if loss.is_about_credentials() {
            self.away.reset();
            let window = self.slot.spec.policy.session.request_timeout_max;
            if worker.credentials_changed_at.is_some_and(|since| self.now.duration_since(since) < window) {
                assert!(matches!(self.slot.phase, Down(DownState::Queued { .. })), "new credentials must be tried");
            } else {
                assert_eq!(self.slot.phase, Down(DownState::Reauth));
                self.away.needs_credentials = true;
            }
        } else {
            self.check_loss(loss, connected, reconnecting);
            let again = effects.iter().any(
                |effect| matches!(effect, SlotEffect::Status { status, message, .. } if (*status, message.clone()) == known),
            );
            assert!(!again, "the same status was reported twice");
        }
        // Callers of this attempt get its outcome, or share an attempt that follows at once.
        if self.caller_waits && !worker.is_stopping && matches!(before, Up { state: RunState::Starting { .. }, .. }) {
            assert!(matches!(self.slot.phase, Down(DownState::Queued { .. })), "a caller waits without an attempt");
        }
        if self.caller_waits {
            self.call();
        }
    }

    /// Checks whether and when the next attempt follows a loss.
    fn check_loss(&mut self, loss: Loss, connected: bool, reconnecting: bool) {
        let policy = &self.slot.spec.policy.reconnect;
        let early = self.away.next.filter(|(_, due)| *due > self.now);
        match self.away.expected_after(policy, loss, self.now) {
            ExpectedReaction::GivenUp => {
                assert_eq!(self.slot.phase, Down(DownState::Exhausted { attempts: policy.attempts_max.unwrap() }));
                assert_eq!(self.slot.status, Status::Error);
                assert!(!reconnecting);
            }
            ExpectedReaction::Attempt { number, earliest, latest } => {
                let Down(DownState::Reconnecting { until, attempt }) = self.slot.phase else {
                    panic!("no attempt is scheduled: {:?}", self.slot.phase)
                };
                assert_eq!(attempt, number);
                assert!((earliest..=latest).contains(&until), "attempt {number} comes {:?} from now", until - self.now);
                let expected = if loss.is_offline(connected) { Status::Offline } else { Status::Error };
                assert_eq!(self.slot.status, expected, "{loss:?}");
                assert_eq!(reconnecting, early != Some((attempt, until)), "an event for each newly scheduled attempt");
                self.away = ReconnectModel { next: Some((attempt, until)), ..ReconnectModel::default() };
            }
        }
    }

    fn end_process(&mut self, run: RunNumber, exit: WorkerExit) {
        let Some(worker) = self.take_worker(run) else { return };
        if self.slot.run() != Some(run) {
            // A second run takes no calls: its end is not counted as an exit.
            let exits = self.exits.len();
            self.handle(SlotInput::Ended(run, exit));
            assert_eq!(self.exits.len(), exits, "the exit of a second run was counted");
            return;
        }
        // A run that ends by itself while it falls asleep counts as an exit.
        let falls_asleep = matches!(self.slot.phase, Up { state: RunState::FallingAsleep { .. }, .. });
        let not_adopted = worker.adopts && worker.initialized.is_none() && !worker.is_stopping;
        let charged = !not_adopted && (!worker.is_stopping || (falls_asleep && exit.cause != ExitCause::Requested));
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
        let effects = self.report_end(run, exit);
        let connection = effects.iter().any(|effect| {
            matches!(effect, SlotEffect::Emit(SlotEvent::Disconnected { .. } | SlotEvent::Reconnecting { .. }))
        });
        assert!(!connection, "an event of a connection about a process");
        if not_adopted {
            let costs_team = effects.iter().any(|effect| matches!(effect, SlotEffect::ChargeTeam));
            assert!(!costs_team, "a server that was not adopted is charged");
            let why = match &self.slot.phase {
                Down(DownState::Queued { why, .. }) => Some(why),
                _ => None,
            };
            let reason = RestartReason::Adoption;
            assert!(
                matches!(why, Some(StartReason::Restart { reason: given, attempt: 0, .. }) if *given == reason),
                "{:?}",
                self.slot.phase
            );
        }
        if !Arc::ptr_eq(&before, &self.slot.spec) {
            let starts =
                matches!(self.slot.phase, Up { state: RunState::Starting { .. }, .. } | Down(DownState::Queued { .. }));
            assert!(charged && starts, "the new configuration is not started: {:?}", self.slot.phase);
        } else if charged {
            let policy = &self.slot.spec.policy.restart;
            let spent = self.exits_that_count() >= policy.max_crashes;
            assert_eq!(spent, matches!(self.slot.phase, Down(DownState::Failed)), "{:?}", self.slot.phase);
            assert_eq!(
                sleeps && !spent,
                matches!(self.slot.phase, Down(DownState::Dormant { .. })),
                "{:?}",
                self.slot.phase
            );
        } else {
            assert_eq!(
                falls_asleep,
                matches!(self.slot.phase, Down(DownState::Dormant { .. })),
                "{:?}",
                self.slot.phase
            );
        }
        if self.caller_waits {
            self.handle(SlotInput::Call);
        }
    }

    fn exits_that_count(&self) -> usize {
        let window = self.slot.spec.policy.restart.window;
        self.exits.iter().filter(|at| self.now.duration_since(**at) < window).count()
    }

    /// A message about an ended run has no effect.
    fn handle_stale_message(&mut self, nth: usize, server: ServerAction) {
        let Some(run) = (!self.ended_runs.is_empty()).then(|| self.ended_runs[nth % self.ended_runs.len()]) else {
            return;
        };
        let input = match server {
            ServerAction::Spawns => SlotInput::Spawned(run, Some(7)),
            ServerAction::FirstByte => SlotInput::FirstByte(run),
            ServerAction::Initializes => SlotInput::Initialized(run, server_info()),
            ServerAction::Lists => SlotInput::Discovered(run, catalogue("old")),
            ServerAction::CannotList => SlotInput::DiscoveryFailed(run, "old".to_owned(), Duration::ZERO),
            ServerAction::CallSucceeds => SlotInput::Recovered(run),
            ServerAction::Degrades => {
                SlotInput::Health(run, HealthChange::Degraded { failures: 3, last_error: "no answer".to_owned() })
            }
            ServerAction::Restores => SlotInput::Health(run, HealthChange::Restored { failures: 3, last_error: None }),
            ServerAction::Ends(_, loss) if self.slot.spec.is_remote() => SlotInput::Ended(run, lost(loss.kind(), None)),
            ServerAction::Ends(..) => SlotInput::Ended(run, exited(1, None)),
        };
        let before = format!("{:?}", self.slot);
        let effects = self.handle(input);
        assert!(effects.is_empty(), "a stale message has effects: {effects:?}");
        assert_eq!(before, format!("{:?}", self.slot), "a stale message changed the slot");
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        if self.slot.deadline().is_some_and(|at| at <= self.now) {
            self.handle(SlotInput::Tick(self.activity()));
            assert!(self.slot.deadline().is_none_or(|at| at > self.now), "a deadline that has passed remains");
        }
    }

    fn suspend(&mut self, time: Duration) {
        if self.removed {
            return;
        }
        let earlier = |at: Instant| at.checked_sub(time).unwrap_or(self.now);
        self.away.next = self.away.next.map(|(number, due)| (number, earlier(due)));
        self.not_before = self.not_before.map(earlier);
        let away = matches!(self.slot.phase, Down(DownState::Reconnecting { .. }));
        let overdue = self.away.next.is_some_and(|(_, due)| due <= self.now);
        self.handle(SlotInput::ResumedAfterSuspend(time));
        assert!(
            !(away && overdue) || matches!(self.slot.phase, Down(DownState::Queued { .. })),
            "an overdue attempt was not made"
        );
        assert!(self.slot.deadline().is_none_or(|at| at > self.now), "a deadline that has passed remains");
    }

    fn progress(&mut self) {
        while !self.to_root.is_empty() {
            self.root_reads();
        }
        self.root_grants();
        while !self.grants.is_empty() {
            self.grant_arrives();
        }
        for run in self.workers.iter().map(|worker| worker.run).collect::<Vec<_>>() {
            let next = match self.worker(run) {
                Some(worker) if worker.is_stopping => ServerAction::Ends(End::Code(0), Loss::Refused),
                Some(worker) if worker.drains && worker.calls_in_flight == 0 => {
                    ServerAction::Ends(End::Code(0), Loss::Refused)
                }
                Some(worker) if !worker.spawned => ServerAction::Spawns,
                Some(worker) if worker.initialized.is_none() => {
                    self.act(run, ServerAction::FirstByte);
                    ServerAction::Initializes
                }
                Some(worker) if worker.discovers && !worker.listed => ServerAction::Lists,
                Some(_) | None => continue,
            };
            self.act(run, next);
        }
    }

    /// The workers die, the root forgets the permits, and a new supervisor continues from the memo.
    fn supervisor_panics(&mut self) {
        if self.ending {
            return;
        }
        self.ended_runs.extend(self.workers.drain(..).map(|worker| worker.run));
        self.ended_runs.extend(self.grants.drain(..));
        self.to_root.clear();
        self.waits_for_permit = false;
        self.held.clear();
        self.caller_waits = false;
        let before = self.slot.phase.clone();
        let under_way = self.slot.connection() == Some(ConnectionState::Reconnecting);
        if !under_way && !matches!(before, Down(DownState::Reauth | DownState::Exhausted { .. })) {
            self.away.reset();
        }
        self.away.attempt_requested = false;
        let (slot, effects) = Slot::from_memo(self.slot.spec.clone(), jitter_rng(), &self.memo);
        self.slot = slot;
        self.memo = self.slot.memo();
        self.perform(effects);
        self.check();
        match (&before, &self.slot.phase) {
            (Down(DownState::Reauth), after) => assert_eq!(*after, Down(DownState::Reauth)),
            (Down(DownState::Exhausted { .. }), after) => assert_eq!(before, *after),
            (Down(DownState::Reconnecting { .. }), after) => assert_eq!(before, *after, "the retry schedule changed"),
            (_, after) if under_way => {
                let continues = matches!(after, Down(DownState::Reconnecting { .. } | DownState::Queued { .. }));
                assert!(continues, "{before:?} became {after:?}");
            }
            _ => {}
        }
        // An update that was not in the memo is lost with the supervisor; the team repeats it.
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
                | SlotInput::Adopted(..)
                | SlotInput::ResumedAfterSuspend(_)
                | SlotInput::Granted(_)
                | SlotInput::Call
        );
        let was_ready = matches!(self.slot.phase, Up { state: RunState::Ready { .. }, .. });
        let command = matches!(input, SlotInput::Start | SlotInput::Stop | SlotInput::Restart | SlotInput::Reconnect);
        let before = self.slot.spec.clone();
        let update_in_place = matches!(&input, SlotInput::Update(to) if self.can_continue_under(to));
        let effects = self.slot.handle(self.now, input);
        if !Arc::ptr_eq(&before, &self.slot.spec) {
            self.update_rejected = false;
            if !update_in_place {
                // A new run clears the exit history when its configuration is adopted.
                self.forget_exits();
                (self.tools_restored, self.was_connected) = (false, false);
            }
        }
        self.tools_restored &=
            !effects.iter().any(|effect| matches!(effect, SlotEffect::Emit(SlotEvent::Discovered { .. })));
        if self.tools_restored && !was_ready && matches!(self.slot.phase, Up { state: RunState::Ready { .. }, .. }) {
            let reads = effects.iter().any(|effect| matches!(effect, SlotEffect::Discover(_)));
            assert!(reads, "the restored tools are not read again");
        }
        if shows || command || effects.iter().any(SlotEffect::is_visible) {
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
                    panic!("a permit is requested without urgency although a caller waits")
                }
                SlotEffect::RequestPermit { .. } | SlotEffect::WithdrawPermit | SlotEffect::ReleasePermit(_) => {
                    self.to_root.push_back(effect);
                }
                SlotEffect::Spawn { run, spec, discover, adopts } => self.spawn(run, &spec, discover, adopts),
                SlotEffect::Drain(run) => {
                    assert_ne!(self.slot.open_run(), Some(run), "the run that takes calls must not drain");
                    assert!(!std::mem::replace(&mut self.worker(run).unwrap().drains, true));
                }
                SlotEffect::Stop(run) => {
                    let worker = self.worker(run).unwrap();
                    assert!(!std::mem::replace(&mut worker.is_stopping, true), "the run is stopped twice");
                }
                SlotEffect::ShortenGrace(run) => {
                    assert!(self.caller_waits, "no caller waits for the end of the run");
                    let worker = self.worker(run).unwrap();
                    assert!(worker.is_stopping && !std::mem::replace(&mut worker.grace_shortened, true));
                }
                SlotEffect::Discover(run) => {
                    let worker = self.worker(run).unwrap();
                    assert!(!worker.is_stopping && worker.initialized.is_some());
                    (worker.discovers, worker.listed, worker.cannot_list) = (true, false, false);
                }
                SlotEffect::Emit(SlotEvent::UpdateRejected { .. }) => self.update_rejected = true,
                SlotEffect::LogInvalidTransition { status, cause } => {
                    panic!("invalid transition: {cause:?} in {status}")
                }
                SlotEffect::Admit(run) => {
                    assert_eq!(self.slot.open_run(), Some(run));
                    let admitted = usize::from(std::mem::take(&mut self.caller_waits));
                    let worker = self.worker(run).unwrap();
                    assert!(!worker.drains, "a call was admitted to a draining run");
                    worker.calls_in_flight += admitted;
                    self.last_activity = self.now;
                }
                SlotEffect::TrySleep { run, idle } => self.try_sleep(run, idle),
                SlotEffect::RefuseCallers { .. } => self.caller_waits = false,
                SlotEffect::Remove => {
                    assert!(self.ending && !self.removed);
                    assert!(self.workers.is_empty(), "workers are left: {:?}", self.workers);
                    self.removed = true;
                }
                SlotEffect::FailCallers { retry_at, .. } => {
                    assert_eq!(retry_at, self.slot.next_retry_at());
                    self.caller_waits = false;
                }
                SlotEffect::Check(run) => {
                    assert_eq!(self.slot.open_run(), Some(run));
                    assert!(self.worker(run).unwrap().dialled, "health checks are only for connections");
                }
                SlotEffect::ApplySpec { run, spec } => {
                    assert_eq!(spec, self.desired);
                    assert!(!self.worker(run).unwrap().is_stopping);
                }
                SlotEffect::Emit(SlotEvent::Started { .. }) if self.slot.spec.is_remote() => {
                    assert!(!self.connected && !self.was_connected, "a second started event");
                    (self.connected, self.was_connected, self.attempts) = (true, true, 0);
                }
                SlotEffect::Emit(SlotEvent::Reconnected { attempts, changed }) => {
                    assert!(self.was_connected, "reconnected without an earlier connection");
                    assert!(!self.connected, "reconnected without a loss");
                    assert_eq!(attempts, std::mem::take(&mut self.attempts));
                    assert!(
                        !changed.contains(&CatalogueAspect::Capabilities),
                        "unchanged capabilities are reported as changed"
                    );
                    self.connected = true;
                }
                SlotEffect::Emit(SlotEvent::Disconnected { .. }) => {
                    let there = std::mem::take(&mut self.connected);
                    assert!(there || self.ending, "disconnected without a connection");
                }
                SlotEffect::Emit(SlotEvent::Health(news)) => {
                    self.degraded = matches!(news, HealthChange::Degraded { .. });
                }
                SlotEffect::Emit(SlotEvent::PermanentlyFailed { .. }) => {
                    assert!(!self.slot.spec.is_remote(), "a remote server never fails permanently");
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
        assert_ne!(self.slot.spec.lifetime, ProcessLifetime::AlwaysOn, "an always-on server must not sleep");
        assert!(!self.slot.spec.is_remote(), "a remote server does not sleep");
        // A call may have been sent before the tools were read: the run then stays awake.
        let used = self.worker(run).unwrap().calls_in_flight > 0;
        assert!(!used || idle.is_zero(), "a call is in flight");
        if idle.is_zero() {
            assert_eq!(self.slot.spec.lifetime, ProcessLifetime::Lazy, "only a lazy server sleeps at once");
            assert!(self.ready_since.is_none(), "a lazy server sleeps right after discovery or when it is idle");
        } else {
            assert_eq!(idle, self.now.duration_since(self.last_activity));
            assert!(idle >= policy.idle, "shorter than the idle time");
            assert!(
                self.ready_since.is_some_and(|since| self.now.duration_since(since) > policy.grace),
                "within the grace after the start"
            );
        }
        if used {
            return;
        }
        if std::mem::take(&mut self.call_before_sleep) {
            self.worker(run).unwrap().calls_in_flight += 1;
            self.last_activity = self.now;
        } else {
            self.handle(SlotInput::Sleep { run, idle });
        }
    }

    fn spawn(&mut self, run: RunNumber, spec: &InstanceSpec, discover: bool, adopts: bool) {
        let second_run = self.slot.second_run.as_ref().and_then(SecondRun::run);
        let others: Vec<RunNumber> = self.workers.iter().map(|worker| worker.run).collect();
        match (&others[..], &self.slot.phase) {
            ([], Up { run: current, state: RunState::Starting { .. } }) => assert_eq!(*current, run),
            // A run starts beside the one that takes calls, or beside one that ends.
            ([other], Up { run: current, state: RunState::Ready { .. } }) => {
                assert_eq!((*other, run), (*current, second_run.unwrap()));
            }
            ([other], Up { run: current, state: RunState::Starting { .. } }) => {
                assert_eq!((*other, run), (second_run.unwrap(), *current));
                assert!(matches!(self.slot.second_run, Some(SecondRun::Ending { .. })));
            }
            (others, phase) => panic!("unexpected start of {run:?} beside {others:?} in {phase:?}"),
        }
        let is_first = self.ended_runs.is_empty() && run == RunNumber(1);
        assert!(!adopts || is_first, "a server is adopted twice");
        assert!(adopts || self.held.contains(&run), "{run:?} has no permit");
        assert_eq!(self.requested, RequestedState::Running, "a stopped instance starts");
        assert!(!self.ending, "an instance starts during its removal");
        assert!(spec.missing.is_empty(), "an instance starts without a required value");
        if spec.is_remote() {
            assert!(!self.away.needs_credentials, "an attempt with rejected credentials");
            let due = self.away.next.is_none_or(|(_, due)| due <= self.now);
            assert!(due || self.away.attempt_requested, "an attempt before its time without a request");
            assert_eq!(*spec, *self.desired, "an attempt with an outdated configuration");
        }
        assert!(discover || self.slot.record.catalogue.is_some(), "a start without discovery and without known tools");
        assert!(
            self.exits_that_count() < self.slot.spec.policy.restart.max_crashes,
            "a restart beyond the crash limit"
        );
        let succeeds = *spec != *self.slot.spec;
        assert!(
            succeeds || self.not_before.is_none_or(|at| self.now >= at),
            "a start before the end of the restart delay"
        );
        self.attempts += u32::from(spec.is_remote());
        self.workers.push(Worker {
            run,
            dialled: spec.is_remote(),
            adopts,
            cannot_list: false,
            credentials_changed_at: None,
            discovers: discover,
            spawned: false,
            initialized: None,
            listed: false,
            is_stopping: false,
            grace_shortened: false,
            drains: false,
            calls_in_flight: 0,
        });
    }

    /// Checks the invariants after every step.
    fn check(&mut self) {
        let is_ready = matches!(self.slot.phase, Up { state: RunState::Ready { .. }, .. });
        self.ready_since = is_ready.then(|| self.ready_since.unwrap_or(self.now));
        let Slot { phase, status, requested_state: requested, .. } = &self.slot;
        assert_eq!(*requested, self.requested, "{phase:?}");
        if self.requested == RequestedState::Stopped && !self.ending {
            let rests = matches!(
                phase,
                Up { state: RunState::Stopping { then: AfterStop::Stop | AfterStop::AwaitConfig, .. }, .. }
                    | Down(DownState::Stopped | DownState::Unconfigured)
            );
            assert!(rests, "{phase:?}");
        }
        let second_run = self.slot.second_run.as_ref();
        let known: BTreeSet<RunNumber> =
            self.slot.run().into_iter().chain(second_run.and_then(SecondRun::run)).collect();
        let there: BTreeSet<RunNumber> = self.workers.iter().map(|worker| worker.run).collect();
        assert_eq!(known, there, "{phase:?} with {second_run:?}");
        let comes = matches!(second_run, Some(SecondRun::Queued { .. } | SecondRun::Starting { .. }));
        assert!(!comes || is_ready, "{second_run:?} beside {phase:?}");
        assert!(
            !matches!(phase, Down(DownState::Stopped | DownState::Ended)) || there.is_empty(),
            "{there:?} in {phase:?}"
        );
        let open = self.slot.open_run();
        assert!(self.workers.iter().all(|worker| !worker.drains || Some(worker.run) != open), "calls go to {open:?}");
        assert!(*phase != Down(DownState::Ended) || self.removed);
        if self.caller_waits && !self.removed {
            let waits_for_something = matches!(
                phase,
                Up {
                    state: RunState::Starting { .. }
                        | RunState::FallingAsleep { .. }
                        | RunState::Stopping { then: AfterStop::StartAgain(_), .. },
                    ..
                } | Down(DownState::Queued { .. } | DownState::Backoff { .. })
            );
            assert!(waits_for_something, "a caller waits without a start in {phase:?}");
        }
        let expected: &[Status] = match phase {
            Up { state: RunState::Stopping { then: AfterStop::AwaitConfig, .. }, .. }
            | Down(DownState::Unconfigured) => &[Status::AwaitingUserConfig],
            Up { state: RunState::Undiscovered { retry_at: Some(_), .. }, .. } => &[Status::Error],
            Up { state: RunState::Undiscovered { attempt: 0, .. }, .. } => &[Status::DiscoveringTools],
            Up { state: RunState::Undiscovered { .. }, .. } => &[Status::Error, Status::DiscoveringTools],
            Down(DownState::Reconnecting { .. }) => &[Status::Offline, Status::Error],
            Down(DownState::Exhausted { .. }) => &[Status::Error],
            Down(DownState::Queued { why: StartReason::Reconnect { .. }, .. }) => {
                &[Status::Offline, Status::Error, Status::CommandReceived, Status::Connecting, Status::Restarting]
            }
            Up { state: RunState::Starting { why: StartReason::Reconnect { .. }, .. }, .. } => {
                &[Status::Offline, Status::Error, Status::Connecting]
            }
            Down(DownState::Reauth) => &[Status::RequiresReauth],
            Up {
                state:
                    RunState::Starting { why: StartReason::Wake { .. }, .. }
                    | RunState::Ready { .. }
                    | RunState::FallingAsleep { .. },
                ..
            }
            | Down(
                DownState::Queued { why: StartReason::Wake { .. }, .. }
                | DownState::Backoff { why: StartReason::Wake { .. }, .. }
                | DownState::Dormant { .. },
            ) => &[Status::Online],
            Down(DownState::Queued { .. }) => &[Status::CommandReceived, Status::Connecting, Status::Restarting],
            Up { state: RunState::Starting { .. }, .. } => &[Status::Connecting, Status::DiscoveringTools],
            Down(DownState::Backoff { .. }) => &[Status::Connecting],
            Up { state: RunState::Stopping { then: AfterStop::StartAgain(_), .. }, .. } => {
                &[Status::Provisioning, Status::Connecting, Status::Restarting]
            }
            Up { state: RunState::Stopping { then: AfterStop::Stop, .. }, .. } | Down(DownState::Stopped) => {
                &[Status::Offline]
            }
            Down(DownState::Failed) => &[Status::PermanentlyFailed],
            Up { state: RunState::Stopping { then: AfterStop::End, .. }, .. } | Down(DownState::Ended) => Status::ALL,
        };
        assert!(expected.contains(status), "{status} in {phase:?}");
        if *status == Status::Online {
            let says_so = self.slot.message.as_ref().is_some_and(|message| message.contains("the old one stays"));
            assert_eq!(says_so, self.update_rejected, "{:?} in {phase:?}", self.slot.message);
        }
        let must_wake = match phase {
            Down(DownState::Backoff { until, .. } | DownState::Reconnecting { until, .. }) => Some(*until),
            Up { state: RunState::Undiscovered { retry_at, .. }, .. } => *retry_at,
            Up { state: RunState::Ready { idle_check_at: look_at, .. }, .. } => *look_at,
            _ => None,
        };
        if let Up { state: RunState::Ready { idle_check_at: look_at, .. }, .. } = phase {
            let sleeps = self.slot.spec.lifetime != ProcessLifetime::AlwaysOn && !self.slot.spec.is_remote();
            assert_eq!(look_at.is_some(), sleeps, "idle checks exist exactly for servers that may sleep");
        }
        self.check_connection();
        assert!(must_wake.is_none_or(|at| self.slot.deadline().is_some_and(|deadline| deadline <= at)), "{phase:?}");
    }

    fn check_connection(&self) {
        let Slot { phase, status, health, spec, .. } = &self.slot;
        if *health != ServerHealth::Unknown {
            assert_eq!(*health == ServerHealth::Degraded, self.degraded, "the reported health differs");
        }
        match phase {
            Up { state: RunState::Ready { .. } | RunState::Undiscovered { .. }, .. } => {
                assert_ne!(*health, ServerHealth::Unknown);
            }
            _ if self.slot.run().is_none() => assert_eq!(*health, ServerHealth::Unknown, "{phase:?}"),
            _ => {}
        }
        let connection = self.slot.connection();
        if !spec.is_remote() {
            let remote =
                matches!(phase, Down(DownState::Reconnecting { .. } | DownState::Reauth | DownState::Exhausted { .. }));
            assert!(!remote && connection.is_none(), "a process is in {phase:?}");
            return;
        }
        let process = matches!(
            phase,
            Up { state: RunState::FallingAsleep { .. }, .. }
                | Down(DownState::Failed | DownState::Dormant { .. } | DownState::Backoff { .. })
        );
        assert!(!process, "a connection is in {phase:?}");
        let expected = match (status, phase) {
            _ if self.ending => ConnectionState::Disconnected,
            (Status::AwaitingUserConfig, _) => ConnectionState::Disconnected,
            (Status::Provisioning | Status::CommandReceived | Status::Connecting | Status::Restarting, _) => {
                ConnectionState::Connecting
            }
            (Status::DiscoveringTools | Status::SyncingTools | Status::Online, _) => ConnectionState::Connected,
            (Status::Error, Up { state: RunState::Undiscovered { .. }, .. }) => ConnectionState::Connected,
            (Status::Error, Down(DownState::Exhausted { .. })) | (Status::RequiresReauth, _) => ConnectionState::Error,
            (Status::Offline, _) if self.requested == RequestedState::Stopped => ConnectionState::Disconnected,
            (Status::Offline | Status::Error, _) => ConnectionState::Reconnecting,
            (Status::PermanentlyFailed, _) => panic!("a remote server never fails permanently"),
        };
        assert_eq!(connection, Some(expected), "{status} in {phase:?}");
        // A connection is given up only by the policy, by a command, or after a rejection by the server.
        let continues = self.slot.deadline().is_some() || self.slot.run().is_some();
        let asks = matches!(phase, Down(DownState::Queued { .. }));
        let rests = matches!(
            phase,
            Down(
                DownState::Unconfigured
                    | DownState::Reauth
                    | DownState::Exhausted { .. }
                    | DownState::Stopped
                    | DownState::Ended
            )
        );
        assert!(continues || asks || rests, "no next step in {phase:?}");
    }

    /// Compares the schedule of attempts with the model.
    fn check_schedule(&self) {
        let Slot { phase, spec, .. } = &self.slot;
        match phase {
            Down(DownState::Reconnecting { until, attempt }) => assert_eq!(self.away.next, Some((*attempt, *until))),
            Down(DownState::Exhausted { attempts }) => assert_eq!(spec.policy.reconnect.attempts_max, Some(*attempts)),
            Up { state: RunState::Starting { why: StartReason::Reconnect { attempt, .. }, .. }, .. }
            | Down(DownState::Queued { why: StartReason::Reconnect { attempt, .. }, .. }) => {
                assert_eq!(*attempt, self.away.next.map_or(0, |(number, _)| number), "{phase:?}");
            }
            Down(DownState::Reauth) => assert!(self.away.needs_credentials),
            _ => {}
        }
    }

    /// Lets everything progress without new commands. Checks that the slot rests, without permits or waiting callers.
    pub(crate) fn settle(&mut self) {
        self.call_before_sleep = false;
        for _ in 0..50 {
            for _ in 0..20 {
                self.step(Step::CallEnds);
            }
            self.progress();
            if let Some(at) = self.slot.deadline() {
                self.wait(at.saturating_duration_since(self.now));
            }
        }
        let rests = matches!(
            self.slot.phase,
            Up { state: RunState::Ready { idle_check_at: None, .. }, .. }
                | Down(
                    DownState::Dormant { .. }
                        | DownState::Unconfigured
                        | DownState::Reauth
                        | DownState::Exhausted { .. }
                        | DownState::Stopped
                        | DownState::Failed
                        | DownState::Ended
                )
        );
        assert!(rests, "{:?}", self.slot.phase);
        assert_eq!(self.slot.second_run, None);
        assert!(self.ending || self.update_rejected || self.slot.spec == self.desired, "an update was lost");
        assert!(!self.caller_waits);
        assert!(self.held.is_empty(), "permits are still held: {:?}", self.held);
        assert!(!self.waits_for_permit, "a permit is still requested");
        assert_eq!(self.removed, self.ending);
    }
}
