//! The complete behavior of a slot as a snapshot: every phase with every input. A change of behavior is a difference in
//! `snapshots/slot__every_input_in_every_phase_acts_as_in_the_snapshot.snap`, to be compared with the specification.
//! Inputs that a session never sends, such as a catalogue before the handshake, appear as REFUSED. The tests in
//! `slot_properties` check that no possible input is refused.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod samples;

use std::fmt::Write as _;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::catalogue::{Catalogue, CatalogueAspect, CatalogueEntry, ListKind};
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::event::{RestartReason, StopKind};
use mcp_satellite_actors::model::exit::{ExitCause, WorkerExit};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::memo::{StoredExit, StoredMemo, StoredSleep};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth, ServerInfo};
use mcp_satellite_actors::model::spec::{InstanceConfig, InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::idle::RunActivity;
use mcp_satellite_actors::rules::jitter::JitterRng;
use mcp_satellite_actors::rules::slot::SlotPhase::{self, Down, Up};
use mcp_satellite_actors::rules::slot::{
    AfterStop, DownState, HealthChange, RequestedState, RunState, SecondRun, Slot, SlotEffect, SlotEvent, SlotInput,
    SlotMemo, StartReason,
};
use samples::{bounded, catalogue, exited, incomplete, lost, remote, rolling, server_info, stopped, with_token};
use serde_json::value::RawValue;

const QUICK: Option<Duration> = Some(Duration::from_secs(1));
const LONG: Option<Duration> = Some(Duration::from_secs(61));

/// Returns a spec without jitter, so that the times in the snapshot are exact.
fn spec(change: impl FnOnce(&mut InstanceConfig)) -> Arc<InstanceSpec> {
    samples::spec(|config| {
        change(config);
        Arc::make_mut(&mut config.policy).reconnect.jitter_percent = 0;
    })
}

/// Changes an argument of the process.
fn with_another_argument(config: &mut InstanceConfig) {
    config.server_tier.args = vec!["another".into()];
}

fn jitter_rng() -> JitterRng {
    JitterRng::new(0, "")
}

/// A slot with its own clock.
struct TestSlot {
    slot: Slot,
    start: Instant,
    now: Instant,
    runs: u64,
    /// True if the last run is a connection.
    dialled: bool,
    /// True if the first run took over the server of an earlier satellite.
    adopts: bool,
}

/// The state of a slot before an input.
struct Before {
    phase: SlotPhase,
    second_run: Option<SecondRun>,
    requested: RequestedState,
    status: Status,
    connection: Option<ConnectionState>,
    health: ServerHealth,
}

impl TestSlot {
    fn new(spec: Arc<InstanceSpec>) -> Self {
        // All slots have the same start, so that times of one are valid inputs of another.
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        let (start, (slot, _)) = (*START, Slot::new(spec, jitter_rng()));
        Self { slot, start, now: start, runs: 0, dialled: false, adopts: false }
    }

    fn listed() -> Self {
        Self::new(spec(|_| {}))
    }

    fn always_on() -> Self {
        Self::new(spec(|config| config.lifetime = ProcessLifetime::AlwaysOn))
    }

    fn lazy() -> Self {
        Self::new(spec(|config| config.lifetime = ProcessLifetime::Lazy))
    }

    fn remote() -> Self {
        Self::new(spec(remote))
    }

    fn bounded() -> Self {
        Self::new(spec(bounded))
    }

    /// Returns a slot whose tools are known from an earlier run.
    fn with_known_tools(spec: Arc<InstanceSpec>) -> Self {
        let test = Self::new(spec.clone());
        let (stored, known) = (StoredMemo::default(), Some(catalogue("read")));
        let memo = SlotMemo::from_stored(&spec, &stored, known, test.start, Timestamp::UNIX_EPOCH);
        let (slot, _) = Slot::from_memo(spec, jitter_rng(), &memo);
        Self { slot, ..test }
    }

    /// Returns a slot that takes over the server of an earlier satellite in run 1.
    fn adopting(spec: Arc<InstanceSpec>) -> Self {
        let test = Self::new(spec.clone());
        let memo = SlotMemo::from_stored(&spec, &StoredMemo::default(), None, test.start, Timestamp::UNIX_EPOCH);
        let (slot, _) = Slot::from_memo(spec, jitter_rng(), &memo.with_adoption(Some(RunNumber(1))));
        Self { slot, runs: 1, adopts: true, ..test }.and(SlotInput::Spawned)
    }

    /// The adopted server has answered, 100 seconds after its handshake.
    fn adopted(mut self) -> Self {
        let initialized_at = self.now;
        self.now += Duration::from_secs(100);
        self.and(|run, _| SlotInput::Adopted(run, server_info(), initialized_at))
    }

    /// Returns the current run, or the last one.
    fn run(&self) -> RunNumber {
        RunNumber(self.runs)
    }

    fn then(mut self, input: SlotInput) -> Self {
        self.handle(input);
        self
    }

    fn handle(&mut self, input: SlotInput) -> Vec<SlotEffect> {
        self.slot.handle(self.now, input)
    }

    fn after(mut self, seconds: u64) -> Self {
        self.now += Duration::from_secs(seconds);
        self
    }

    fn granted(mut self) -> Self {
        self.runs += 1;
        self.dialled = self.slot.is_remote();
        let run = self.run();
        self.then(SlotInput::Granted(run)).and(SlotInput::Spawned).and(|run, _| SlotInput::FirstByte(run))
    }

    fn and(self, input: impl FnOnce(RunNumber, Option<u32>) -> SlotInput) -> Self {
        let pid = if self.dialled { None } else { u32::try_from(100 + self.runs).ok() };
        let run = self.run();
        self.then(input(run, pid))
    }

    /// Ends a connection or an attempt to connect with this failure.
    fn lost(self, kind: FailureKind) -> Self {
        let exit = lost(kind, self.connected_for());
        self.ended(exit)
    }

    fn connected_for(&self) -> Option<Duration> {
        self.slot.initialized_at.map(|at| self.now.duration_since(at))
    }

    /// Advances the clock to the deadline of the slot.
    fn due(mut self) -> Self {
        self.now = self.slot.deadline().unwrap();
        self.then(SlotInput::Tick(None))
    }

    /// Makes the next attempt, which is refused.
    fn failed_attempt(self) -> Self {
        self.due().granted().lost(FailureKind::Refused)
    }

    fn before(&self) -> Before {
        let Slot { phase, second_run, requested_state: requested, status, health, .. } = &self.slot;
        let connection = self.slot.connection();
        let (phase, second_run) = (phase.clone(), second_run.clone());
        Before { phase, second_run, requested: *requested, status: *status, connection, health: *health }
    }

    fn initialized(self) -> Self {
        self.granted().and(|run, _| SlotInput::Initialized(run, server_info()))
    }

    fn ready(self) -> Self {
        self.initialized().and(|run, _| SlotInput::Discovered(run, catalogue("read")))
    }

    fn ended(self, exit: WorkerExit) -> Self {
        self.and(|run, pid| SlotInput::Ended(run, WorkerExit { pid, ..exit }))
    }

    /// Returns the changes since `before` and the effects as a line of the snapshot.
    fn describe_change(&self, before: &Before, effects: &[SlotEffect]) -> String {
        let mut words = Vec::new();
        if self.slot.phase != before.phase {
            words.push(format!("→ {}", phase(&self.slot.phase, self.start)));
        }
        if self.slot.requested_state != before.requested {
            words.push(format!("want {:?}", self.slot.requested_state).to_lowercase());
        }
        let connection = self.slot.connection();
        if connection != before.connection {
            words.push(connection.map_or("no connection".to_owned(), |connection| connection.to_string()));
        }
        if connection.is_some() && self.slot.health != before.health {
            words.push(self.slot.health.to_string());
        }
        if self.slot.second_run != before.second_run {
            words.push(
                self.slot
                    .second_run
                    .as_ref()
                    .map_or("alone".to_owned(), |second_run| second_run_text(second_run, self.start)),
            );
        }
        words.extend(effects.iter().map(effect));
        let is_reported = effects.iter().any(|effect| matches!(effect, SlotEffect::Status { .. }));
        assert!(is_reported || self.slot.status == before.status, "the status changed without an effect");
        words.join("; ")
    }
}

fn phase(phase: &SlotPhase, start: Instant) -> String {
    let at = |time: &Instant| format!("{:?}", time.duration_since(start));
    match phase {
        Down(DownState::Unconfigured) => "unconfigured".to_owned(),
        Down(DownState::Reconnecting { until, attempt }) => {
            format!("reconnecting (attempt {attempt} at {})", at(until))
        }
        Down(DownState::Reauth) => "reauth".to_owned(),
        Down(DownState::Exhausted { attempts }) => format!("exhausted after {attempts}"),
        Down(DownState::Queued { why: what_for, urgent }) => {
            format!("queued ({}{})", why(what_for), if *urgent { ", urgent" } else { "" })
        }
        Up { run, state: RunState::Starting { why: what_for, .. } } => format!("starting {run:?} ({})", why(what_for)),
        Up { run, state: RunState::Ready { idle_check_at: None, .. } } => format!("ready {run:?}"),
        Up { run, state: RunState::Ready { idle_check_at: Some(look_at), .. } } => {
            format!("ready {run:?} (looked at {})", at(look_at))
        }
        Up { run, state: RunState::FallingAsleep { .. } } => format!("falling asleep {run:?}"),
        Up { run, state: RunState::Undiscovered { attempt, retry_at, .. } } => {
            let retry = retry_at.as_ref().map_or("under way".to_owned(), |time| format!("at {}", at(time)));
            format!("undiscovered {run:?} (attempt {attempt}, next {retry})")
        }
        Down(DownState::Backoff { until, why: what_for }) => format!("backoff until {} ({})", at(until), why(what_for)),
        Down(DownState::Dormant { not_before, .. }) => format!("dormant (not before {})", at(not_before)),
        Up { run, state: RunState::Stopping { kind, then } } => {
            format!("stopping {run:?} ({}, then {})", stop(*kind), after(then))
        }
        Down(DownState::Stopped) => "stopped".to_owned(),
        Down(DownState::Failed) => "failed".to_owned(),
        Down(DownState::Ended) => "over".to_owned(),
    }
}

fn second_run_text(second_run: &SecondRun, start: Instant) -> String {
    match second_run {
        SecondRun::Queued { spec } => format!("beside it {} waits for a permit", version(spec)),
        SecondRun::Postponed { spec, until } => {
            format!("beside it {} waits for the machine until {:?}", version(spec), until.duration_since(start))
        }
        SecondRun::Starting { run, spec, initialized_at, .. } => {
            let state = if initialized_at.is_some() { "is initialized" } else { "starts" };
            format!("beside it {run:?} with {} {state}", version(spec))
        }
        SecondRun::Ending { run, kind, drain_until, next } => {
            let state = match drain_until {
                Some(until) => format!("drains until {:?}", until.duration_since(start)),
                None => "ends".to_owned(),
            };
            let next = next.as_ref().map_or(String::new(), |next| format!(", then {}", version(next)));
            format!("beside it {run:?} {state} ({}{next})", stop(*kind))
        }
    }
}

/// Returns the version of a configuration with rolling updates.
fn version(spec: &InstanceSpec) -> String {
    spec.env.get("VERSION").map_or("no version".to_owned(), |version| format!("version {}", version.expose()))
}

fn after(then: &AfterStop) -> String {
    match then {
        AfterStop::Stop => "stay down".to_owned(),
        AfterStop::StartAgain(what_for) => format!("again: {}", why(what_for)),
        AfterStop::AwaitConfig => "await its config".to_owned(),
        AfterStop::End => "over".to_owned(),
    }
}

fn why(why: &StartReason) -> String {
    match why {
        StartReason::First => "first".to_owned(),
        StartReason::Restart { reason, old_pid: _, attempt } => match reason {
            RestartReason::Crash => format!("crash {attempt}"),
            RestartReason::Exit => format!("exit {attempt}"),
            RestartReason::Unresponsive => format!("unresponsive {attempt}"),
            RestartReason::Manual => "manual".to_owned(),
            RestartReason::Config => "config".to_owned(),
            RestartReason::Adoption => "adoption".to_owned(),
        },
        StartReason::Adopt => "adopt".to_owned(),
        StartReason::Wake { .. } => "wake".to_owned(),
        StartReason::Reconnect { attempt, resume: None } => format!("reconnect {attempt}"),
        StartReason::Reconnect { attempt, resume: Some(_) } => format!("reconnect {attempt}, before its time"),
    }
}

fn stop(kind: StopKind) -> &'static str {
    match kind {
        StopKind::Manual => "manual",
        StopKind::Uninstall => "uninstall",
        StopKind::Config => "config",
        StopKind::Shutdown => "shutdown",
    }
}

fn effect(effect: &SlotEffect) -> String {
    match effect {
        SlotEffect::RequestPermit { urgent: false } => "ask for a permit".to_owned(),
        SlotEffect::RequestPermit { urgent: true } => "ask for a permit urgently".to_owned(),
        SlotEffect::WithdrawPermit => "withdraw".to_owned(),
        SlotEffect::ReleasePermit(run) => format!("release {run:?}"),
        SlotEffect::Spawn { run, adopts: true, .. } => format!("ADOPT in {run:?}"),
        SlotEffect::Spawn { run, discover, .. } => {
            format!("SPAWN {run:?}{}", if *discover { " to discover" } else { "" })
        }
        SlotEffect::Drain(run) => format!("DRAIN {run:?}"),
        SlotEffect::Stop(run) => format!("STOP {run:?}"),
        SlotEffect::ShortenGrace(run) => format!("hurry {run:?}"),
        SlotEffect::TrySleep { run, idle } => format!("try to put {run:?} to sleep, idle for {idle:?}"),
        SlotEffect::Discover(run) => format!("discover {run:?}"),
        SlotEffect::Check(run) => format!("check {run:?}"),
        SlotEffect::ApplySpec { run, .. } => format!("apply the specification to {run:?}"),
        SlotEffect::FailCallers { last_error, retry_at } => {
            format!("unreachable \"{last_error}\"{}", if retry_at.is_some() { ", tried again" } else { "" })
        }
        SlotEffect::Status { status, message, remedy } => {
            let message = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
            format!("[{status}{message}{}]", next_step(*remedy))
        }
        SlotEffect::LogInvalidTransition { status, cause } => format!("REFUSED {cause:?} in {status}"),
        SlotEffect::ChargeTeam => "charge team".to_owned(),
        SlotEffect::Emit(event) => format!("tell {}", event_text(event)),
        SlotEffect::Admit(run) => format!("admit to {run:?}"),
        SlotEffect::RefuseCallers { message, remedy } => format!("refuse \"{message}\"{}", next_step(*remedy)),
        SlotEffect::RejectCommand { message, remedy } => format!("deny \"{message}\"{}", next_step(*remedy)),
        SlotEffect::Remove => "REMOVE".to_owned(),
    }
}

fn next_step(remedy: Option<Remedy>) -> String {
    remedy.map(|remedy| format!(" ({remedy:?})")).unwrap_or_default()
}

fn event_text(event: &SlotEvent) -> String {
    let restart = |will: &bool| if *will { "will restart" } else { "no restart" };
    match event {
        SlotEvent::Started { .. } => "started".to_owned(),
        SlotEvent::Disconnected { intentional } => {
            format!("disconnected{}", if *intentional { " on request" } else { "" })
        }
        SlotEvent::Reconnecting { attempt, after } => format!("reconnecting (attempt {attempt} in {after:?})"),
        SlotEvent::Reconnected { attempts, changed } => format!("reconnected ({attempts}, changed {changed:?})"),
        SlotEvent::Health(news) => format!("{news:?}"),
        SlotEvent::Restarted { reason, attempt, .. } => format!("restarted ({reason:?} {attempt})").to_lowercase(),
        SlotEvent::Adopted { after, age, tool_count } => {
            format!("adopted with {tool_count} tools in {after:?}, initialized {age:?} ago")
        }
        SlotEvent::NotAdopted { exit } => format!("not adopted ({})", exit.reason()),
        SlotEvent::Dormant { idle, .. } => format!("dormant (idle for {idle:?})"),
        SlotEvent::Respawned { dormant, took } => format!("respawned after {dormant:?} in {took:?}"),
        SlotEvent::Discovered { before, .. } => {
            if before.is_some() {
                "discovered anew".to_owned()
            } else {
                "discovered".to_owned()
            }
        }
        SlotEvent::UpdateRejected { .. } => "not taken".to_owned(),
        SlotEvent::Stopped { kind, .. } => format!("stopped ({})", stop(*kind)),
        SlotEvent::Removed { active, dormant, exit } => {
            let exit = exit.as_ref().map(|exit| format!(", {}", exit.cause_text())).unwrap_or_default();
            format!("removed (active {active}, dormant {dormant}{exit})")
        }
        SlotEvent::Exited { will_restart, .. } => format!("exited ({})", restart(will_restart)),
        SlotEvent::Crashed { count, will_restart, .. } => format!("crashed ({count}, {})", restart(will_restart)),
        SlotEvent::PermanentlyFailed { exits, .. } => format!("permanently failed ({exits})"),
    }
}

/// A state of a slot: its name in the snapshot, and a function that reaches it.
type Place = (&'static str, fn() -> TestSlot);

/// Returns every state of a slot with a process, reached by the inputs that lead to it in production.
fn places() -> Vec<Place> {
    fn crashed_once() -> TestSlot {
        TestSlot::listed().ready().ended(exited(1, QUICK))
    }
    fn crashed_twice() -> TestSlot {
        crashed_once().after(1).then(SlotInput::Tick(None)).ready().ended(exited(1, QUICK))
    }
    fn asleep() -> TestSlot {
        TestSlot::listed().ready().ended(exited(0, QUICK))
    }
    fn falling_asleep() -> TestSlot {
        let idle = Duration::from_secs(180);
        TestSlot::listed().ready().after(180).and(|run, _| SlotInput::Sleep { run, idle })
    }
    fn rolled_out() -> TestSlot {
        TestSlot::new(spec(rolling(1))).ready().then(SlotInput::Update(spec(rolling(2))))
    }
    fn draining() -> TestSlot {
        rolled_out().initialized().and(|run, _| SlotInput::Discovered(run, catalogue("write")))
    }
    fn update_rejected() -> TestSlot {
        rolled_out().granted().ended(exited(1, None))
    }
    fn undiscovered() -> TestSlot {
        TestSlot::listed()
            .initialized()
            .and(|run, _| SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO))
    }
    vec![
        ("a value of its user is missing", || TestSlot::new(spec(incomplete))),
        ("new, waits for its first permit", TestSlot::listed),
        ("new, waits for its first permit, and a caller with it", || TestSlot::listed().then(SlotInput::Call)),
        ("waits for a permit after a delay", || crashed_once().after(1).then(SlotInput::Tick(None))),
        ("waits for a permit to wake", || asleep().after(2).then(SlotInput::Call)),
        ("starts for the first time, permit held", || {
            let mut test = TestSlot::listed();
            test.runs += 1;
            let run = test.run();
            test.then(SlotInput::Granted(run))
        }),
        ("starts for the first time, first byte seen", || TestSlot::listed().granted()),
        ("starts for the first time, initialized", || TestSlot::listed().initialized()),
        ("starts after a crash", || crashed_once().after(1).then(SlotInput::Tick(None)).granted()),
        ("wakes", || asleep().after(2).then(SlotInput::Call).granted()),
        ("ready", || TestSlot::listed().ready()),
        ("ready, always_on", || TestSlot::always_on().ready()),
        ("ready after one crash", || crashed_once().after(1).then(SlotInput::Tick(None)).ready()),
        ("ready after two crashes: its last chance", || crashed_twice().after(5).then(SlotInput::Tick(None)).ready()),
        ("cannot be discovered, waits for the next attempt", undiscovered),
        ("cannot be discovered, attempt under way", || undiscovered().after(1).then(SlotInput::Tick(None))),
        ("a restart's delay", crashed_once),
        ("the delay of an exit, woken too early", || asleep().then(SlotInput::Call)),
        ("asleep", asleep),
        ("lazy and discovered", || TestSlot::lazy().ready()),
        ("lazy, and a caller waited", || TestSlot::lazy().then(SlotInput::Call).initialized()),
        ("lazy, its tools known", || {
            TestSlot::with_known_tools(spec(|config| config.lifetime = ProcessLifetime::Lazy))
        }),
        ("lazy, its tools known, woken", || {
            TestSlot::with_known_tools(spec(|config| config.lifetime = ProcessLifetime::Lazy))
                .after(5)
                .then(SlotInput::Call)
                .granted()
        }),
        ("lazy, its tools known, a value of its user missing", || {
            TestSlot::with_known_tools(spec(|config| {
                config.lifetime = ProcessLifetime::Lazy;
                incomplete(config);
            }))
        }),
        ("not lazy, its tools known all the same", || TestSlot::with_known_tools(spec(|_| {}))),
        ("adopts the server of an earlier satellite", || TestSlot::adopting(spec(|_| {}))),
        ("adopts the server of an earlier satellite, and a caller waits", || {
            TestSlot::adopting(spec(|_| {})).then(SlotInput::Call)
        }),
        ("has adopted a server, its lists are being read", || TestSlot::adopting(spec(|_| {})).adopted()),
        ("falling asleep", falling_asleep),
        ("asleep because nobody needed it", || falling_asleep().after(1).ended(stopped())),
        ("rolled out, the new one waits for a permit", rolled_out),
        ("rolled out, the new one starts", || rolled_out().granted()),
        ("rolled out, the new one is initialized", || rolled_out().initialized()),
        ("rolled out, the old one drains", draining),
        ("rolled out, the old one drained for too long", || draining().after(5 * 60).then(SlotInput::Tick(None))),
        ("rolled out again, the new one of before goes", || {
            rolled_out().granted().then(SlotInput::Update(spec(rolling(3))))
        }),
        ("rolled out again, the old one of before drains", || draining().then(SlotInput::Update(spec(rolling(3))))),
        ("the new configuration did not come up", update_rejected),
        ("a restart's delay, and the old one drains", || draining().ended(exited(1, QUICK))),
        ("asleep, and the old one drains", || draining().ended(exited(0, QUICK))),
        ("stopping, and the new one of an update with it", || rolled_out().granted().then(SlotInput::Stop)),
        ("stopping", || TestSlot::listed().ready().then(SlotInput::Stop)),
        ("stopping, configured anew without a value of its user", || {
            TestSlot::listed().ready().then(SlotInput::Stop).then(SlotInput::Update(spec(incomplete)))
        }),
        ("restarting on request", || TestSlot::listed().ready().then(SlotInput::Restart)),
        ("restarting with a new configuration", || {
            TestSlot::listed().ready().then(SlotInput::Update(spec(with_another_argument)))
        }),
        ("stopping, will miss a value of its user", || {
            TestSlot::listed().ready().then(SlotInput::Update(spec(incomplete)))
        }),
        ("stopping, missed a value of its user for a while", || {
            TestSlot::listed()
                .ready()
                .then(SlotInput::Update(spec(incomplete)))
                .then(SlotInput::Update(spec(with_another_argument)))
        }),
        ("being uninstalled", || TestSlot::listed().ready().then(SlotInput::Uninstall)),
        ("stopped", || TestSlot::listed().ready().then(SlotInput::Stop).ended(stopped())),
        ("stopped, configured anew without a value of its user", || {
            TestSlot::listed().then(SlotInput::Stop).then(SlotInput::Update(spec(incomplete)))
        }),
        ("permanently failed", || crashed_twice().after(5).then(SlotInput::Tick(None)).ready().ended(exited(1, QUICK))),
        ("over", || TestSlot::listed().ready().then(SlotInput::Uninstall).ended(stopped())),
    ]
}

/// Returns the states of a remote server.
fn remote_places() -> Vec<Place> {
    fn away() -> TestSlot {
        TestSlot::remote().ready().after(100).lost(FailureKind::Refused)
    }
    fn third() -> TestSlot {
        away().failed_attempt().failed_attempt()
    }
    fn called() -> TestSlot {
        third().after(1).then(SlotInput::Call)
    }
    fn back() -> TestSlot {
        third().due().initialized()
    }
    fn undiscovered() -> TestSlot {
        back().and(|run, _| SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO))
    }
    fn reauth() -> TestSlot {
        TestSlot::remote().ready().after(100).lost(FailureKind::Unauthorized { challenge: None })
    }
    fn last_attempt() -> TestSlot {
        (1..5).fold(TestSlot::bounded().ready().lost(FailureKind::Cut), |test, _| test.failed_attempt())
    }
    fn exhausted() -> TestSlot {
        last_attempt().failed_attempt()
    }
    fn forced() -> TestSlot {
        TestSlot::remote().ready().then(SlotInput::Reconnect)
    }
    vec![
        ("remote, a value of its user is missing", || TestSlot::new(remote_and_incomplete())),
        ("remote, waits for its first permit", TestSlot::remote),
        ("remote, connects for the first time", || TestSlot::remote().granted()),
        ("remote, connects for the first time, and a caller waits", || {
            TestSlot::remote().then(SlotInput::Call).granted()
        }),
        ("remote, initialized for the first time", || TestSlot::remote().initialized()),
        ("remote, ready", || TestSlot::remote().ready()),
        ("remote, ready and degraded", || TestSlot::remote().ready().and(|run, _| SlotInput::Health(run, degraded()))),
        ("remote, initialized for the first time, and degraded", || {
            TestSlot::remote().initialized().and(|run, _| SlotInput::Health(run, degraded()))
        }),
        ("remote, degraded and then lost, connects", || {
            TestSlot::remote()
                .ready()
                .and(|run, _| SlotInput::Health(run, degraded()))
                .lost(FailureKind::Cut)
                .due()
                .granted()
        }),
        ("remote, ready, its credentials have changed since", || {
            TestSlot::remote().ready().then(SlotInput::Update(other_credentials(&spec(remote))))
        }),
        ("remote, not reached at first", || TestSlot::remote().granted().lost(FailureKind::Dns)),
        ("remote, lost, waits for the first attempt", away),
        ("remote, waits for the third attempt", third),
        ("remote, asked to be left alone for a minute", || {
            away().due().granted().lost(FailureKind::Throttled { retry_after: Some(Duration::from_secs(60)) })
        }),
        ("remote, the third attempt waits for a permit", || third().due()),
        ("remote, the third attempt is under way", || third().due().granted()),
        ("remote, the third attempt is under way, and a caller waits", || {
            third().due().granted().then(SlotInput::Call)
        }),
        ("remote, an attempt for a caller waits for a permit", called),
        ("remote, an attempt for a caller is under way", || called().granted()),
        ("remote, an attempt for a caller is under way, the time of the next has come", || called().granted().after(3)),
        ("remote, an attempt on request waits for a permit", || third().then(SlotInput::Reconnect)),
        ("remote, an attempt on request is under way", || third().then(SlotInput::Reconnect).granted()),
        ("remote, back and read again", back),
        ("remote, back for a caller and read again", || called().initialized()),
        ("remote, back and cannot be read", undiscovered),
        ("remote, back and cannot be read, and a call succeeds", || {
            undiscovered().and(|run, _| SlotInput::Recovered(run))
        }),
        ("remote, needs other credentials", reauth),
        ("remote, has other credentials", || reauth().then(SlotInput::Update(other_credentials(&spec(remote))))),
        ("remote, bounded, waits for its last attempt", last_attempt),
        ("remote, bounded, its last attempt is under way", || last_attempt().due().granted()),
        ("remote, bounded, given up", exhausted),
        ("remote, bounded, given up, an attempt for a caller is under way", || {
            exhausted().then(SlotInput::Call).granted()
        }),
        ("remote, is closed to be connected anew", forced),
        ("remote, waits for a permit to be connected anew", || forced().ended(closed())),
        ("remote, is connected anew", || forced().ended(closed()).granted()),
        ("remote, stopping", || TestSlot::remote().ready().then(SlotInput::Stop)),
        ("remote, connecting and stopping", || TestSlot::remote().granted().then(SlotInput::Stop)),
        ("remote, stopped", || TestSlot::remote().ready().then(SlotInput::Stop).ended(closed())),
        ("remote, is closed for a new address", || {
            TestSlot::remote().ready().then(SlotInput::Update(another_address(&spec(remote))))
        }),
        ("remote, waits for a permit for a new address", || {
            third().then(SlotInput::Update(another_address(&spec(remote))))
        }),
        ("remote, connects to a new address", || {
            third().then(SlotInput::Update(another_address(&spec(remote)))).granted()
        }),
        ("remote, being uninstalled", || TestSlot::remote().ready().then(SlotInput::Uninstall)),
        ("a process, stopping, will be remote", || TestSlot::listed().ready().then(SlotInput::Update(spec(remote)))),
        ("a process was crashing, and is remote now", || {
            TestSlot::listed()
                .ready()
                .ended(exited(1, QUICK))
                .after(1)
                .then(SlotInput::Tick(None))
                .then(SlotInput::Update(spec(remote)))
        }),
        ("remote, closing, will be a process", || {
            TestSlot::remote().ready().then(SlotInput::Update(spec(with_another_argument)))
        }),
    ]
}

fn remote_and_incomplete() -> Arc<InstanceSpec> {
    spec(|config| {
        remote(config);
        incomplete(config);
    })
}

fn other_credentials(of: &InstanceSpec) -> Arc<InstanceSpec> {
    let InstanceSpec { headers, mask, .. } = spec(|config| with_token(config, "new")).as_ref().clone();
    Arc::new(InstanceSpec { headers, mask, ..of.clone() })
}

fn another_address(of: &InstanceSpec) -> Arc<InstanceSpec> {
    let (transport, url) = (RemoteTransport::Http, "http://127.0.0.1/other".to_owned());
    Arc::new(InstanceSpec { target: ServerTarget::Remote { transport, url, health_url: None }, ..of.clone() })
}

fn degraded() -> HealthChange {
    HealthChange::Degraded { failures: 3, last_error: "no answer".to_owned() }
}

/// Returns the exit of a connection that was closed on request.
fn closed() -> WorkerExit {
    WorkerExit { uptime: QUICK, ..WorkerExit::from_cause(ExitCause::Requested) }
}

/// Returns the activity of a run without calls or messages.
fn quiet(test: &TestSlot) -> RunActivity {
    RunActivity { user_count: 0, last: test.start }
}

/// Returns every input for this slot with its name in the snapshot.
fn inputs(test: &TestSlot) -> Vec<(&'static str, SlotInput)> {
    let (run, next) = (test.slot.run().unwrap_or(test.run()), RunNumber(test.runs + 1));
    let because = |cause| WorkerExit::from_cause(cause);
    let mut inputs = vec![
        ("start", SlotInput::Start),
        ("stop", SlotInput::Stop),
        ("restart", SlotInput::Restart),
        ("reconnect", SlotInput::Reconnect),
        ("uninstall", SlotInput::Uninstall),
        ("shutdown", SlotInput::Shutdown),
        ("call", SlotInput::Call),
        ("granted", SlotInput::Granted(next)),
        ("woke after 10 minutes", SlotInput::ResumedAfterSuspend(Duration::from_secs(600))),
        ("tick", SlotInput::Tick(None)),
    ];
    if test.slot.is_remote() {
        inputs.extend([
            ("update (a process)", SlotInput::Update(spec(with_another_argument))),
            ("update (incomplete)", SlotInput::Update(remote_and_incomplete())),
            ("other credentials", SlotInput::Update(other_credentials(&test.slot.spec))),
            ("another address", SlotInput::Update(another_address(&test.slot.spec))),
        ]);
    } else {
        inputs.extend([
            ("update", SlotInput::Update(spec(with_another_argument))),
            ("update (incomplete)", SlotInput::Update(spec(incomplete))),
            ("update (remote)", SlotInput::Update(spec(remote))),
            ("roll out 1", SlotInput::Update(spec(rolling(1)))),
            ("roll out 2", SlotInput::Update(spec(rolling(2)))),
            ("roll out 4", SlotInput::Update(spec(rolling(4)))),
            ("tick, idle", SlotInput::Tick(Some(quiet(test)))),
            ("tick, a call in flight", SlotInput::Tick(Some(RunActivity { user_count: 1, ..quiet(test) }))),
        ]);
    }
    if test.runs > 0 {
        inputs.extend([
            ("first byte", SlotInput::FirstByte(run)),
            ("printed", SlotInput::StdoutLine(run, "Listening on port 3000".to_owned())),
            ("initialized", SlotInput::Initialized(run, server_info())),
            ("discovered", SlotInput::Discovered(run, catalogue("read"))),
            ("discovery failed", SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO)),
            ("recovered", SlotInput::Recovered(run)),
        ]);
    }
    if test.runs > 0 && test.dialled {
        let ran = test.connected_for();
        let retry_after = Some(Duration::from_secs(60));
        let restored = HealthChange::Restored { failures: 3, last_error: Some("no answer".to_owned()) };
        inputs.extend([
            ("degraded", SlotInput::Health(run, degraded())),
            ("restored", SlotInput::Health(run, restored)),
            ("spawned", SlotInput::Spawned(run, None)),
            ("ended as asked", SlotInput::Ended(run, WorkerExit { uptime: ran, ..because(ExitCause::Requested) })),
            ("lost: refused", SlotInput::Ended(run, lost(FailureKind::Refused, ran))),
            ("lost: expired", SlotInput::Ended(run, lost(FailureKind::session_expired(404), ran))),
            ("lost: 401", SlotInput::Ended(run, lost(FailureKind::Unauthorized { challenge: None }, ran))),
            ("lost: 429, again in a minute", SlotInput::Ended(run, lost(FailureKind::Throttled { retry_after }, ran))),
            ("lost: 404", SlotInput::Ended(run, lost(FailureKind::from_status(404), ran))),
            ("panicked", SlotInput::Ended(run, because(ExitCause::Panicked("a fault of ours".to_owned())))),
        ]);
    }
    if test.runs > 0 && !test.dialled {
        inputs.extend([
            ("spawned", SlotInput::Spawned(run, Some(7))),
            ("sleep", SlotInput::Sleep { run, idle: Duration::from_secs(180) }),
            ("ended as asked", SlotInput::Ended(run, stopped())),
            ("exit 0", SlotInput::Ended(run, exited(0, QUICK))),
            ("exit 1", SlotInput::Ended(run, exited(1, QUICK))),
            ("exit 1 after 61 s", SlotInput::Ended(run, exited(1, LONG))),
            (
                "killed",
                SlotInput::Ended(run, WorkerExit { signal: Some(9), uptime: QUICK, ..because(ExitCause::Exited) }),
            ),
            (
                "cannot be started",
                SlotInput::Ended(run, because(ExitCause::Spawn("cannot start `files`: not found".into()))),
            ),
            ("unresponsive", SlotInput::Ended(run, WorkerExit { uptime: LONG, ..because(ExitCause::Unresponsive) })),
        ]);
    }
    if test.adopts {
        let no_answer = ExitCause::NotAdopted("no answer to ping within 5 s".to_owned());
        inputs.extend([
            ("adopted", SlotInput::Adopted(run, server_info(), test.start)),
            ("not adopted", SlotInput::Ended(run, because(no_answer))),
        ]);
    }
    if let Some(run) = test.slot.second_run.as_ref().and_then(SecondRun::run) {
        inputs.extend([
            ("beside: initialized", SlotInput::Initialized(run, server_info())),
            ("beside: discovered", SlotInput::Discovered(run, catalogue("other"))),
            (
                "beside: discovery failed",
                SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO),
            ),
            ("beside: ended as asked", SlotInput::Ended(run, stopped())),
            ("beside: exit 0", SlotInput::Ended(run, exited(0, QUICK))),
            ("beside: exit 1", SlotInput::Ended(run, exited(1, QUICK))),
        ]);
    }
    inputs
}

#[test]
fn every_input_in_every_phase_acts_as_in_the_snapshot() {
    let mut text = String::new();
    for (place, reach) in places().into_iter().chain(remote_places()) {
        let here = reach();
        let Slot { phase: before, requested_state: requested, status, message, health, .. } = &here.slot;
        let connection = here.slot.connection().map(|connection| format!("{connection}, {health}, "));
        let connection = connection.unwrap_or_default();
        let attempt = here.slot.attempt().map(|attempt| format!("attempt {attempt}, ")).unwrap_or_default();
        let message = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
        let asked = format!("{requested:?}").to_lowercase();
        let second_run = here
            .slot
            .second_run
            .as_ref()
            .map_or(String::new(), |second_run| second_run_text(second_run, here.start) + ", ");
        let _ = writeln!(
            text,
            "{place}\n  = {}, {second_run}{connection}{attempt}want {asked} [{status}{message}]",
            phase(before, here.start)
        );
        // Four minutes later every deadline has passed.
        let (idle, now) = (Some(quiet(&here)), here.now);
        let called = idle.map(|quiet| RunActivity { last: now + Duration::from_secs(230), ..quiet });
        let late = [
            ("tick (4 minutes later, idle)", SlotInput::Tick(idle)),
            ("tick (4 minutes later, called 10 s ago)", SlotInput::Tick(called)),
        ];
        let on_time = inputs(&here).into_iter().map(|pair| (pair, 0));
        let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
        for ((name, input), wait) in on_time.chain(late.into_iter().map(|pair| (pair, 240))) {
            let mut there = reach().after(wait);
            let before = there.before();
            let effects = there.handle(input);
            let line = there.describe_change(&before, &effects);
            match lines.iter_mut().find(|(known, _)| *known == line) {
                Some((_, names)) => names.push(name),
                None => lines.push((line, vec![name])),
            }
        }
        lines.sort_by_key(|(line, _)| line.is_empty());
        for (line, names) in lines {
            let line = if line.is_empty() { "nothing" } else { &line };
            let _ = writeln!(text, "    {:<24} {line}", format!("{}:", names.join(" | ")));
        }
        text.push('\n');
    }
    // The name occurs in every message and would only lengthen the lines.
    let text = text.replace("files-acme-alice-abc123", "NAME");
    insta::assert_snapshot!(text);
}

#[test]
fn a_removal_emits_one_event_in_every_phase() {
    for (place, reach) in places().into_iter().chain(remote_places()) {
        let mut test = reach();
        if test.slot.phase == Down(DownState::Ended) {
            continue;
        }
        let runs = [test.slot.run(), test.slot.second_run.as_ref().and_then(SecondRun::run)];
        let (active, asleep) = (runs.iter().any(Option::is_some), test.slot.is_dormant());
        let mut effects = test.handle(SlotInput::Uninstall);
        for run in runs.into_iter().flatten() {
            let exit = if test.dialled { closed() } else { stopped() };
            effects.extend(test.handle(SlotInput::Ended(run, exit)));
        }
        assert_eq!(test.slot.phase, Down(DownState::Ended), "{place}");
        let events: Vec<String> = effects
            .iter()
            .filter_map(|effect| match effect {
                SlotEffect::Emit(event @ (SlotEvent::Removed { .. } | SlotEvent::Stopped { .. })) => {
                    Some(event_text(event))
                }
                _ => None,
            })
            .collect();
        let exit = if active { ", stopped" } else { "" };
        assert_eq!(events, [format!("removed (active {active}, dormant {asleep}{exit})")], "{place}");
    }
}

#[test]
fn replaced_credentials_stay_masked_on_the_open_connection() {
    let token = |token: &'static str| {
        spec(move |config| {
            remote(config);
            with_token(config, token);
        })
    };
    let mut test = TestSlot::new(token("first-token")).ready();
    for next in ["second-token", "third-token"] {
        let effects = test.handle(SlotInput::Update(token(next)));
        let [SlotEffect::ApplySpec { spec, .. }] = &effects[..] else { panic!("{effects:?}") };
        assert_eq!(*spec, token(next), "masks of replaced values are not part of the configuration");
        for mask in [&spec.mask, &test.slot.spec.mask] {
            assert_eq!(mask.apply(&format!("first-token {next}")), "[secret] [secret]");
        }
    }
}

fn with_policy(change: impl FnOnce(&mut Policy)) -> Arc<InstanceSpec> {
    spec(|config| change(Arc::make_mut(&mut config.policy)))
}

#[test]
fn a_new_policy_is_applied_in_place_and_keeps_the_exit_history() {
    let test = TestSlot::listed().ready().ended(exited(1, QUICK)).after(1).then(SlotInput::Tick(None)).ready();
    let (run, exits) = (test.run(), test.slot.record.history.clone());
    let mut test = test;
    let patient = with_policy(|policy| policy.restart.max_crashes = 9);
    let effects = test.handle(SlotInput::Update(patient.clone()));
    let [SlotEffect::ApplySpec { run: continuing, spec }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!((*continuing, spec, &test.slot.spec), (run, &patient, &patient));
    assert_eq!((test.slot.open_run(), &test.slot.record.history), (Some(run), &exits));
    assert!(test.slot.record.catalogue.is_some());
}

#[test]
fn a_new_policy_does_not_clear_a_permanent_failure() {
    let mut test = TestSlot::listed().ready();
    for _ in 0..3 {
        test = test.ended(exited(1, QUICK)).after(20).then(SlotInput::Tick(None));
        if !matches!(test.slot.phase, Down(DownState::Failed)) {
            test = test.ready();
        }
    }
    let effects = test.handle(SlotInput::Update(with_policy(|policy| policy.logs.line_max = 99)));
    assert!(effects.is_empty(), "{effects:?}");
    assert_eq!((&test.slot.phase, test.slot.status), (&Down(DownState::Failed), Status::PermanentlyFailed));
}

#[test]
fn a_shorter_idle_time_takes_effect_at_once() {
    let test = TestSlot::listed().ready();
    let at = |test: &TestSlot| test.slot.deadline().map(|at| (at - test.start).as_secs());
    assert_eq!(at(&test), Some(180));
    let test = test.then(SlotInput::Update(with_policy(|policy| policy.idle.idle = Duration::from_secs(90))));
    assert_eq!(at(&test), Some(90));
    let awake = spec(|config| config.lifetime = ProcessLifetime::AlwaysOn);
    assert_eq!(at(&test.then(SlotInput::Update(awake))), None);
}

#[test]
fn a_dormant_instance_is_started_when_it_becomes_always_on() {
    let mut test = TestSlot::listed().ready();
    test.slot.phase = Down(DownState::Dormant { since: test.now, not_before: test.now });
    let test = test.then(SlotInput::Update(spec(|config| config.lifetime = ProcessLifetime::AlwaysOn)));
    assert!(matches!(test.slot.phase, Down(DownState::Queued { .. })), "{:?}", test.slot.phase);
}

#[test]
fn a_new_policy_during_a_rolling_update_starts_no_other_run() {
    let version = |number: u8, max_crashes: usize| {
        spec(move |config| {
            rolling(number)(config);
            Arc::make_mut(&mut config.policy).restart.max_crashes = max_crashes;
        })
    };
    let mut test = TestSlot::new(version(1, 3)).ready().then(SlotInput::Update(version(2, 3)));
    assert!(test.handle(SlotInput::Update(version(2, 4))).is_empty(), "the new run still waits for its permit");
    test = test.granted();
    let run = test.run();
    let effects = test.handle(SlotInput::Update(version(2, 5)));
    let [SlotEffect::ApplySpec { run: continuing, spec }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!((*continuing, spec), (run, &version(2, 5)));
    // Back to the running configuration with another policy: the new run ends and the old one continues.
    let effects = test.handle(SlotInput::Update(version(1, 6)));
    assert!(effects.iter().any(|effect| matches!(effect, SlotEffect::Stop(stopped) if *stopped == run)), "{effects:?}");
    assert_eq!((test.slot.open_run(), &test.slot.spec), (Some(RunNumber(1)), &version(1, 6)));
}

#[test]
fn a_stop_while_a_value_is_missing_lasts_after_the_value_is_given() {
    let mut test = TestSlot::new(spec(incomplete));
    test.handle(SlotInput::Stop);
    assert_eq!((test.slot.requested_state, test.slot.status), (RequestedState::Stopped, Status::AwaitingUserConfig));
    assert!(test.slot.message.as_deref().unwrap().starts_with("stopped, and waiting"));
    let memo = test.slot.memo();
    let (revived, _) = Slot::from_memo(spec(incomplete), jitter_rng(), &memo);
    assert_eq!((revived.requested_state, revived.status), (RequestedState::Stopped, Status::AwaitingUserConfig));
    test.handle(SlotInput::Update(spec(with_another_argument)));
    assert_eq!((&test.slot.phase, test.slot.status), (&Down(DownState::Stopped), Status::Offline));
    let mut test = TestSlot::new(spec(incomplete)).then(SlotInput::Stop);
    test.handle(SlotInput::Start);
    assert_eq!((test.slot.requested_state, test.slot.status), (RequestedState::Running, Status::AwaitingUserConfig));
    test.handle(SlotInput::Update(spec(with_another_argument)));
    assert!(matches!(test.slot.phase, Down(DownState::Queued { .. })));
}

#[test]
fn an_unreadable_list_keeps_its_previous_content() {
    let entry = |uri: &str| {
        let raw = RawValue::from_string(format!(r#"{{"uri":"{uri}","name":"{uri}"}}"#)).unwrap();
        CatalogueEntry::parse(raw, "uri").unwrap()
    };
    let listed = |tool: &str, resources: &[&str], unread: &[ListKind]| {
        let resources = resources.iter().map(|uri| entry(uri)).collect();
        Arc::new(Catalogue { resources, unreadable: unread.to_vec(), ..(*catalogue(tool)).clone() })
    };
    let known = |test: &TestSlot| {
        let Catalogue { tools, resources, unreadable: unread, .. } = &**test.slot.record.catalogue.as_ref().unwrap();
        (tools[0].name.to_string(), resources.iter().map(|one| one.key.to_string()).collect::<Vec<_>>(), unread.len())
    };
    let unread = [ListKind::Resources];
    let test = TestSlot::remote().initialized().and(|run, _| SlotInput::Discovered(run, listed("a", &["x"], &unread)));
    assert_eq!(
        known(&test),
        ("a".to_owned(), vec!["x".to_owned()], 1),
        "a partly read list is used if there is no other"
    );
    let test = test.and(|run, _| SlotInput::Discovered(run, listed("a", &["x", "y"], &[])));
    let test = test.lost(FailureKind::Refused).due().initialized();
    let test = test.and(|run, _| SlotInput::Discovered(run, listed("b", &["z"], &unread)));
    assert_eq!(
        known(&test),
        ("b".to_owned(), vec!["x".to_owned(), "y".to_owned()], 1),
        "the tools were read, the resources kept"
    );
    let test = test.and(|run, _| SlotInput::Discovered(run, listed("b", &[], &[])));
    assert_eq!(known(&test), ("b".to_owned(), Vec::new(), 0), "an empty list replaces the previous one");
}

#[test]
fn changes_after_a_reconnect_appear_in_the_event_and_in_the_revisions() {
    let prompt =
        |name: &str| CatalogueEntry::parse(RawValue::from_string(format!(r#"{{"name":"{name}"}}"#)).unwrap(), "name");
    let listed = |tool: &str, name: &str| {
        Arc::new(Catalogue { prompts: vec![prompt(name).unwrap()], ..(*catalogue(tool)).clone() })
    };
    let server_info_with = |capabilities: &str| {
        let capabilities = RawValue::from_string(capabilities.to_owned()).unwrap();
        let ServerInfo { name, version, protocol, .. } = Arc::into_inner(server_info()).unwrap();
        Arc::new(ServerInfo {
            era: Era::Sessions,
            name,
            version,
            protocol,
            capabilities,
            instructions: None,
            handshake_result: RawValue::from_string("{}".to_owned()).unwrap(),
        })
    };
    let mut test = TestSlot::remote().granted();
    let mut seen = test.slot.record.revisions;
    let (one, same, more) = (r#"{"tools":{},"x":1}"#, r#"{"x":1, "tools":{}}"#, r#"{"tools":{},"prompts":{}}"#);
    for (capabilities, tool, name, expected) in [
        (
            one,
            "a",
            "p",
            vec![
                CatalogueAspect::Capabilities,
                CatalogueAspect::Tools,
                CatalogueAspect::Resources,
                CatalogueAspect::Prompts,
            ],
        ),
        (same, "a", "p", vec![]),
        (more, "a", "q", vec![CatalogueAspect::Capabilities, CatalogueAspect::Prompts]),
        (more, "b", "q", vec![CatalogueAspect::Tools]),
    ] {
        let run = test.run();
        let _ = test.handle(SlotInput::Initialized(run, server_info_with(capabilities)));
        let effects = test.handle(SlotInput::Discovered(run, listed(tool, name)));
        let reported = effects.iter().find_map(|effect| match effect {
            SlotEffect::Emit(SlotEvent::Reconnected { changed, .. }) => Some(changed.clone()),
            _ => None,
        });
        let numbers = test.slot.record.revisions;
        assert_eq!(numbers.changes_since(&seen), expected);
        assert_eq!(reported, (run != RunNumber(1)).then_some(expected));
        seen = numbers;
        // Changes while connected do not count as changes of the next reconnect.
        let _ = test.handle(SlotInput::Discovered(run, listed("new", name)));
        assert_eq!(test.slot.record.revisions.changes_since(&seen), [CatalogueAspect::Tools]);
        let _ = test.handle(SlotInput::Discovered(run, listed(tool, name)));
        seen = test.slot.record.revisions;
        test = test.lost(FailureKind::Refused).due().granted();
    }
}

#[test]
fn an_adopted_server_takes_calls_while_its_lists_are_read_and_is_not_charged() {
    for lifetime in [ProcessLifetime::Listed, ProcessLifetime::Lazy, ProcessLifetime::AlwaysOn] {
        let mut test = TestSlot::adopting(spec(|config| config.lifetime = lifetime));
        let (run, earlier) = (test.run(), test.now);
        assert_eq!((test.slot.status, test.slot.open_run()), (Status::Connecting, None));
        test = test.after(100);
        let effects = test.handle(SlotInput::Adopted(run, server_info(), earlier));
        assert!(effects.iter().any(|effect| matches!(effect, SlotEffect::Admit(admitted) if *admitted == run)));
        assert_eq!((test.slot.status, test.slot.open_run()), (Status::DiscoveringTools, Some(run)));
        let effects = test.handle(SlotInput::Discovered(run, catalogue("read")));
        let adopted = effects.iter().find_map(|effect| match effect {
            SlotEffect::Emit(SlotEvent::Adopted { age, tool_count, .. }) => Some((*age, *tool_count)),
            _ => None,
        });
        assert_eq!(adopted, Some((Duration::from_secs(100), 1)), "the age of the server, not of its adoption");
        assert!(!effects.iter().any(|effect| matches!(effect, SlotEffect::TrySleep { .. })), "{lifetime:?}");
        assert_eq!((test.slot.status, test.slot.record.restarts), (Status::Online, 0));
        assert_eq!(test.slot.record.history.exits().count(), 0);
    }
}

#[test]
fn a_server_that_cannot_be_adopted_is_restarted_at_once_without_charge() {
    let ends = [
        WorkerExit::from_cause(ExitCause::NotAdopted("no answer to ping within 5 s".to_owned())),
        WorkerExit::from_cause(ExitCause::Wire("the server closed its stdout".to_owned())),
        WorkerExit::from_cause(ExitCause::Panicked("a fault of ours".to_owned())),
        exited(1, None),
        exited(0, None),
    ];
    for end in ends {
        let mut test = TestSlot::adopting(spec(|_| {}));
        let (run, pid) = (test.run(), end.pid.or(Some(101)));
        let effects = test.handle(SlotInput::Ended(run, end));
        assert!(!effects.iter().any(|effect| matches!(effect, SlotEffect::ChargeTeam)), "{effects:?}");
        let Down(DownState::Queued { why: StartReason::Restart { reason, old_pid, attempt }, .. }) = test.slot.phase
        else {
            panic!("{:?}", test.slot.phase)
        };
        assert_eq!((reason, old_pid, attempt), (RestartReason::Adoption, pid, 0));
        assert_eq!(test.slot.record.history.exits().count(), 0);
        let test = test.ready();
        assert_eq!(
            (test.slot.status, test.slot.record.restarts, &test.slot.record.last_error),
            (Status::Online, 1, &None)
        );
    }
    // After it has answered, its end is an exit like any other.
    let test = TestSlot::adopting(spec(|_| {})).adopted().ended(exited(1, QUICK));
    assert_eq!(test.slot.record.history.exits().count(), 1);
    assert!(matches!(test.slot.phase, Down(DownState::Backoff { .. })), "{:?}", test.slot.phase);
}

#[test]
fn only_an_instance_that_was_running_may_adopt_its_server() {
    let may = |change: fn(&mut StoredMemo)| {
        let mut stored = StoredMemo::default();
        change(&mut stored);
        SlotMemo::may_adopt(&spec(|_| {}), Some(&stored))
    };
    assert!(SlotMemo::may_adopt(&spec(|_| {}), None) && may(|_| {}));
    assert!(may(|stored| stored.restarts = 3), "its earlier exits do not matter");
    assert!(!may(|stored| stored.stopped = true));
    assert!(!may(|stored| stored.failed = Some("too often".to_owned())));
    assert!(!may(|stored| stored.dormant = Some(StoredSleep { since: Timestamp::UNIX_EPOCH })));
    assert!(!SlotMemo::may_adopt(&spec(remote), None) && !SlotMemo::may_adopt(&spec(incomplete), None));
}

#[test]
fn an_adoption_keeps_the_exit_history_and_ends_with_the_supervisor() {
    let spec = spec(|config| config.lifetime = ProcessLifetime::Lazy);
    let start = Instant::now();
    let exits = vec![StoredExit { at: Timestamp::UNIX_EPOCH, crash: true }];
    let stored = StoredMemo { exits, restarts: 1, ..StoredMemo::default() };
    let memo = SlotMemo::from_stored(&spec, &stored, Some(catalogue("read")), start, Timestamp::UNIX_EPOCH);
    let memo = memo.with_adoption(Some(RunNumber(7)));
    let (slot, effects) = Slot::from_memo(spec.clone(), jitter_rng(), &memo);
    let spawn = effects.iter().find_map(|effect| match effect {
        SlotEffect::Spawn { run, discover, adopts, .. } => Some((*run, *discover, *adopts)),
        _ => None,
    });
    assert_eq!(spawn, Some((RunNumber(7), true, true)), "a lazy instance that was awake is adopted, too");
    assert_eq!((slot.record.restarts, slot.record.history.exits().count()), (1, 1));
    assert!(slot.record.catalogue.is_none(), "its lists may have changed meanwhile");
    let (slot, _) = Slot::from_memo(spec, jitter_rng(), &slot.memo());
    assert!(matches!(slot.phase, Down(DownState::Queued { .. })), "the server ended with the supervisor");
}
