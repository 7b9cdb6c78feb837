//! The life of an instance, printed: every phase that a slot can be in × every input. A change of behaviour is a
//! difference in `snapshots/slot__the_whole_table_is_as_printed.snap`, to be read against the specification. What a
//! session never says, such as a catalogue before the handshake, is in it too, and shows as REFUSED; that nothing which
//! can happen is refused is a property (`slot_properties`).
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
use mcp_satellite_actors::model::memo::StoredMemo;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth, ServerInfo};
use mcp_satellite_actors::model::spec::{InstanceConfig, InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::idle::RunActivity;
use mcp_satellite_actors::rules::jitter::JitterRng;
use mcp_satellite_actors::rules::slot::{
    AfterStop, HealthChange, RequestedState, SecondRun, Slot, SlotEffect, SlotEvent, SlotInput, SlotMemo, SlotPhase,
    StartReason,
};
use samples::{bounded, catalogue, exited, incomplete, introduced, lost, remote, rolling, stopped, with_token};
use serde_json::value::RawValue;

const QUICK: Option<Duration> = Some(Duration::from_secs(1));
const LONG: Option<Duration> = Some(Duration::from_secs(61));

/// Without jitter, so that the table says what is meant.
fn spec(change: impl FnOnce(&mut InstanceConfig)) -> Arc<InstanceSpec> {
    samples::spec(|config| {
        change(config);
        Arc::make_mut(&mut config.policy).reconnect.jitter_percent = 0;
    })
}

/// Its process is started with another argument.
fn with_another_argument(config: &mut InstanceConfig) {
    config.server_tier.args = vec!["another".into()];
}

fn dice() -> JitterRng {
    JitterRng::new(0, "")
}

/// A slot on its way through a life, and the time it has.
struct Life {
    slot: Slot,
    start: Instant,
    now: Instant,
    runs: u64,
    /// The last run is a connection.
    dialled: bool,
}

/// Where a slot is, before an input.
struct Before {
    phase: SlotPhase,
    beside: Option<SecondRun>,
    want: RequestedState,
    status: Status,
    connection: Option<ConnectionState>,
    health: ServerHealth,
}

impl Life {
    fn of(spec: Arc<InstanceSpec>) -> Self {
        // All lives begin at once, so that what one has seen can be told to another.
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        let (start, (slot, _)) = (*START, Slot::new(spec, dice()));
        Self { slot, start, now: start, runs: 0, dialled: false }
    }

    fn of_listed() -> Self {
        Self::of(spec(|_| {}))
    }

    fn of_always_on() -> Self {
        Self::of(spec(|config| config.lifetime = ProcessLifetime::AlwaysOn))
    }

    fn of_lazy() -> Self {
        Self::of(spec(|config| config.lifetime = ProcessLifetime::Lazy))
    }

    fn of_remote() -> Self {
        Self::of(spec(remote))
    }

    fn of_bounded() -> Self {
        Self::of(spec(bounded))
    }

    /// One whose tools are known from before.
    fn of_recalled(spec: Arc<InstanceSpec>) -> Self {
        let life = Self::of(spec.clone());
        let (stored, known) = (StoredMemo::default(), Some(catalogue("read")));
        let memo = SlotMemo::from_stored(&spec, &stored, known, life.start, Timestamp::UNIX_EPOCH);
        let (slot, _) = Slot::from_memo(spec, dice(), &memo);
        Self { slot, ..life }
    }

    /// The current run, or the last one.
    fn run(&self) -> RunNumber {
        RunNumber(self.runs)
    }

    fn then(mut self, input: SlotInput) -> Self {
        self.tell(input);
        self
    }

    fn tell(&mut self, input: SlotInput) -> Vec<SlotEffect> {
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

    /// Its connection is lost, or was not made.
    fn lost(self, kind: FailureKind) -> Self {
        let exit = lost(kind, self.connected_for());
        self.ended(exit)
    }

    fn connected_for(&self) -> Option<Duration> {
        self.slot.initialized_at.map(|at| self.now.duration_since(at))
    }

    /// The next attempt's time has come.
    fn due(mut self) -> Self {
        self.now = self.slot.deadline().unwrap();
        self.then(SlotInput::Tick(None))
    }

    /// An attempt is made, and nobody is there.
    fn tried_in_vain(self) -> Self {
        self.due().granted().lost(FailureKind::Refused)
    }

    fn before(&self) -> Before {
        let Slot { phase, second_run: beside, requested_state: want, status, health, .. } = &self.slot;
        let connection = self.slot.connection();
        let (phase, beside) = (phase.clone(), beside.clone());
        Before { phase, beside, want: *want, status: *status, connection, health: *health }
    }

    fn initialized(self) -> Self {
        self.granted().and(|run, _| SlotInput::Initialized(run, introduced()))
    }

    fn ready(self) -> Self {
        self.initialized().and(|run, _| SlotInput::Discovered(run, catalogue("read")))
    }

    fn ended(self, exit: WorkerExit) -> Self {
        self.and(|run, pid| SlotInput::Ended(run, WorkerExit { pid, ..exit }))
    }

    /// As a line of the table: what the input made of it.
    fn told(&self, before: &Before, effects: &[SlotEffect]) -> String {
        let mut words = Vec::new();
        if self.slot.phase != before.phase {
            words.push(format!("→ {}", phase(&self.slot.phase, self.start)));
        }
        if self.slot.requested_state != before.want {
            words.push(format!("want {:?}", self.slot.requested_state).to_lowercase());
        }
        let connection = self.slot.connection();
        if connection != before.connection {
            words.push(connection.map_or("no connection".to_owned(), |connection| connection.to_string()));
        }
        if connection.is_some() && self.slot.health != before.health {
            words.push(self.slot.health.to_string());
        }
        if self.slot.second_run != before.beside {
            words.push(self.slot.second_run.as_ref().map_or("alone".to_owned(), |beside| with(beside, self.start)));
        }
        words.extend(effects.iter().map(effect));
        let told = effects.iter().any(|effect| matches!(effect, SlotEffect::Status { .. }));
        assert!(told || self.slot.status == before.status, "a status changed and nobody was told");
        words.join("; ")
    }
}

fn phase(phase: &SlotPhase, start: Instant) -> String {
    let at = |time: &Instant| format!("{:?}", time.duration_since(start));
    match phase {
        SlotPhase::Unconfigured => "unconfigured".to_owned(),
        SlotPhase::Reconnecting { until, attempt } => format!("reconnecting (attempt {attempt} at {})", at(until)),
        SlotPhase::Reauth => "reauth".to_owned(),
        SlotPhase::Exhausted { attempts } => format!("exhausted after {attempts}"),
        SlotPhase::Queued { why: what_for, urgent } => {
            format!("queued ({}{})", why(what_for), if *urgent { ", urgent" } else { "" })
        }
        SlotPhase::Starting { run, why: what_for, .. } => format!("starting {run:?} ({})", why(what_for)),
        SlotPhase::Ready { run, idle_check_at: None, .. } => format!("ready {run:?}"),
        SlotPhase::Ready { run, idle_check_at: Some(look_at), .. } => {
            format!("ready {run:?} (looked at {})", at(look_at))
        }
        SlotPhase::FallingAsleep { run, .. } => format!("falling asleep {run:?}"),
        SlotPhase::Undiscovered { run, attempt, retry_at, .. } => {
            let retry = retry_at.as_ref().map_or("under way".to_owned(), |time| format!("at {}", at(time)));
            format!("undiscovered {run:?} (attempt {attempt}, next {retry})")
        }
        SlotPhase::Backoff { until, why: what_for } => format!("backoff until {} ({})", at(until), why(what_for)),
        SlotPhase::Dormant { not_before, .. } => format!("dormant (not before {})", at(not_before)),
        SlotPhase::Stopping { run, kind, then } => format!("stopping {run:?} ({}, then {})", stop(*kind), after(then)),
        SlotPhase::Stopped => "stopped".to_owned(),
        SlotPhase::Failed => "failed".to_owned(),
        SlotPhase::Ended => "over".to_owned(),
    }
}

fn with(beside: &SecondRun, start: Instant) -> String {
    match beside {
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

/// Which of the configurations that are rolled out this is.
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
        },
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
        SlotEffect::Spawn { run, discover, .. } => {
            format!("SPAWN {run:?}{}", if *discover { " to discover" } else { "" })
        }
        SlotEffect::Drain(run) => format!("DRAIN {run:?}"),
        SlotEffect::Stop(run) => format!("STOP {run:?}"),
        SlotEffect::ShortenGrace(run) => format!("hurry {run:?}"),
        SlotEffect::TrySleep { run, idle } => format!("try to put {run:?} to sleep, idle for {idle:?}"),
        SlotEffect::Discover(run) => format!("discover {run:?}"),
        SlotEffect::Check(run) => format!("check {run:?}"),
        SlotEffect::Adopt { run, .. } => format!("adopt for {run:?}"),
        SlotEffect::FailCallers { last_error, retry_at } => {
            format!("unreachable \"{last_error}\"{}", if retry_at.is_some() { ", tried again" } else { "" })
        }
        SlotEffect::Status { status, message, remedy } => {
            let message = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
            format!("[{status}{message}{}]", next_step(*remedy))
        }
        SlotEffect::LogInvalidTransition { status, cause } => format!("REFUSED {cause:?} in {status}"),
        SlotEffect::ChargeTeam => "charge team".to_owned(),
        SlotEffect::Emit(told) => format!("tell {}", tell(told)),
        SlotEffect::Admit(run) => format!("admit to {run:?}"),
        SlotEffect::RefuseCallers { message, remedy } => format!("refuse \"{message}\"{}", next_step(*remedy)),
        SlotEffect::RejectCommand { message, remedy } => format!("deny \"{message}\"{}", next_step(*remedy)),
        SlotEffect::Remove => "REMOVE".to_owned(),
    }
}

fn next_step(remedy: Option<Remedy>) -> String {
    remedy.map(|remedy| format!(" ({remedy:?})")).unwrap_or_default()
}

fn tell(told: &SlotEvent) -> String {
    let restart = |will: &bool| if *will { "will restart" } else { "no restart" };
    match told {
        SlotEvent::Started { .. } => "started".to_owned(),
        SlotEvent::Disconnected { intentional } => {
            format!("disconnected{}", if *intentional { " on request" } else { "" })
        }
        SlotEvent::Reconnecting { attempt, after } => format!("reconnecting (attempt {attempt} in {after:?})"),
        SlotEvent::Reconnected { attempts, changed } => format!("reconnected ({attempts}, changed {changed:?})"),
        SlotEvent::Health(news) => format!("{news:?}"),
        SlotEvent::Restarted { reason, attempt, .. } => format!("restarted ({reason:?} {attempt})").to_lowercase(),
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

/// What it is called, and how one gets there.
type Place = (&'static str, fn() -> Life);

/// Every place in a life, each reached as it is reached in the field.
fn places() -> Vec<Place> {
    fn crashed_once() -> Life {
        Life::of_listed().ready().ended(exited(1, QUICK))
    }
    fn crashed_twice() -> Life {
        crashed_once().after(1).then(SlotInput::Tick(None)).ready().ended(exited(1, QUICK))
    }
    fn asleep() -> Life {
        Life::of_listed().ready().ended(exited(0, QUICK))
    }
    fn falling_asleep() -> Life {
        let idle = Duration::from_secs(180);
        Life::of_listed().ready().after(180).and(|run, _| SlotInput::Sleep { run, idle })
    }
    fn rolled_out() -> Life {
        Life::of(spec(rolling(1))).ready().then(SlotInput::Update(spec(rolling(2))))
    }
    fn drains() -> Life {
        rolled_out().initialized().and(|run, _| SlotInput::Discovered(run, catalogue("write")))
    }
    fn not_taken() -> Life {
        rolled_out().granted().ended(exited(1, None))
    }
    fn undiscovered() -> Life {
        Life::of_listed()
            .initialized()
            .and(|run, _| SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO))
    }
    vec![
        ("a value of its user is missing", || Life::of(spec(incomplete))),
        ("new, waits for its first permit", Life::of_listed),
        ("new, waits for its first permit, and a caller with it", || Life::of_listed().then(SlotInput::Call)),
        ("waits for a permit after a delay", || crashed_once().after(1).then(SlotInput::Tick(None))),
        ("waits for a permit to wake", || asleep().after(2).then(SlotInput::Call)),
        ("starts for the first time, permit held", || {
            let mut life = Life::of_listed();
            life.runs += 1;
            let run = life.run();
            life.then(SlotInput::Granted(run))
        }),
        ("starts for the first time, first byte seen", || Life::of_listed().granted()),
        ("starts for the first time, initialized", || Life::of_listed().initialized()),
        ("starts after a crash", || crashed_once().after(1).then(SlotInput::Tick(None)).granted()),
        ("wakes", || asleep().after(2).then(SlotInput::Call).granted()),
        ("ready", || Life::of_listed().ready()),
        ("ready, always_on", || Life::of_always_on().ready()),
        ("ready after one crash", || crashed_once().after(1).then(SlotInput::Tick(None)).ready()),
        ("ready after two crashes: its last chance", || crashed_twice().after(5).then(SlotInput::Tick(None)).ready()),
        ("cannot be discovered, waits for the next attempt", undiscovered),
        ("cannot be discovered, attempt under way", || undiscovered().after(1).then(SlotInput::Tick(None))),
        ("a restart's delay", crashed_once),
        ("the delay of an exit, woken too early", || asleep().then(SlotInput::Call)),
        ("asleep", asleep),
        ("lazy and discovered", || Life::of_lazy().ready()),
        ("lazy, and a caller waited", || Life::of_lazy().then(SlotInput::Call).initialized()),
        ("lazy, its tools known", || Life::of_recalled(spec(|config| config.lifetime = ProcessLifetime::Lazy))),
        ("lazy, its tools known, woken", || {
            Life::of_recalled(spec(|config| config.lifetime = ProcessLifetime::Lazy))
                .after(5)
                .then(SlotInput::Call)
                .granted()
        }),
        ("lazy, its tools known, a value of its user missing", || {
            Life::of_recalled(spec(|config| {
                config.lifetime = ProcessLifetime::Lazy;
                incomplete(config);
            }))
        }),
        ("not lazy, its tools known all the same", || Life::of_recalled(spec(|_| {}))),
        ("falling asleep", falling_asleep),
        ("asleep because nobody needed it", || falling_asleep().after(1).ended(stopped())),
        ("rolled out, the new one waits for a permit", rolled_out),
        ("rolled out, the new one starts", || rolled_out().granted()),
        ("rolled out, the new one is initialized", || rolled_out().initialized()),
        ("rolled out, the old one drains", drains),
        ("rolled out, the old one drained for too long", || drains().after(5 * 60).then(SlotInput::Tick(None))),
        ("rolled out again, the new one of before goes", || {
            rolled_out().granted().then(SlotInput::Update(spec(rolling(3))))
        }),
        ("rolled out again, the old one of before drains", || drains().then(SlotInput::Update(spec(rolling(3))))),
        ("the new configuration did not come up", not_taken),
        ("a restart's delay, and the old one drains", || drains().ended(exited(1, QUICK))),
        ("asleep, and the old one drains", || drains().ended(exited(0, QUICK))),
        ("stopping, and the new one of an update with it", || rolled_out().granted().then(SlotInput::Stop)),
        ("stopping", || Life::of_listed().ready().then(SlotInput::Stop)),
        ("stopping, configured anew without a value of its user", || {
            Life::of_listed().ready().then(SlotInput::Stop).then(SlotInput::Update(spec(incomplete)))
        }),
        ("restarting on request", || Life::of_listed().ready().then(SlotInput::Restart)),
        ("restarting with a new configuration", || {
            Life::of_listed().ready().then(SlotInput::Update(spec(with_another_argument)))
        }),
        ("stopping, will miss a value of its user", || {
            Life::of_listed().ready().then(SlotInput::Update(spec(incomplete)))
        }),
        ("stopping, missed a value of its user for a while", || {
            Life::of_listed()
                .ready()
                .then(SlotInput::Update(spec(incomplete)))
                .then(SlotInput::Update(spec(with_another_argument)))
        }),
        ("being uninstalled", || Life::of_listed().ready().then(SlotInput::Uninstall)),
        ("stopped", || Life::of_listed().ready().then(SlotInput::Stop).ended(stopped())),
        ("stopped, configured anew without a value of its user", || {
            Life::of_listed().then(SlotInput::Stop).then(SlotInput::Update(spec(incomplete)))
        }),
        ("permanently failed", || crashed_twice().after(5).then(SlotInput::Tick(None)).ready().ended(exited(1, QUICK))),
        ("over", || Life::of_listed().ready().then(SlotInput::Uninstall).ended(stopped())),
    ]
}

/// Those of a remote server.
fn remote_places() -> Vec<Place> {
    fn away() -> Life {
        Life::of_remote().ready().after(100).lost(FailureKind::Refused)
    }
    fn third() -> Life {
        away().tried_in_vain().tried_in_vain()
    }
    fn called() -> Life {
        third().after(1).then(SlotInput::Call)
    }
    fn back() -> Life {
        third().due().initialized()
    }
    fn undiscovered() -> Life {
        back().and(|run, _| SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO))
    }
    fn reauth() -> Life {
        Life::of_remote().ready().after(100).lost(FailureKind::Unauthorized { challenge: None })
    }
    fn last_attempt() -> Life {
        (1..5).fold(Life::of_bounded().ready().lost(FailureKind::Cut), |life, _| life.tried_in_vain())
    }
    fn exhausted() -> Life {
        last_attempt().tried_in_vain()
    }
    fn forced() -> Life {
        Life::of_remote().ready().then(SlotInput::Reconnect)
    }
    vec![
        ("remote, a value of its user is missing", || Life::of(remote_and_incomplete())),
        ("remote, waits for its first permit", Life::of_remote),
        ("remote, connects for the first time", || Life::of_remote().granted()),
        ("remote, connects for the first time, and a caller waits", || {
            Life::of_remote().then(SlotInput::Call).granted()
        }),
        ("remote, initialized for the first time", || Life::of_remote().initialized()),
        ("remote, ready", || Life::of_remote().ready()),
        ("remote, ready and degraded", || Life::of_remote().ready().and(|run, _| SlotInput::Health(run, degraded()))),
        ("remote, initialized for the first time, and degraded", || {
            Life::of_remote().initialized().and(|run, _| SlotInput::Health(run, degraded()))
        }),
        ("remote, degraded and then lost, connects", || {
            Life::of_remote()
                .ready()
                .and(|run, _| SlotInput::Health(run, degraded()))
                .lost(FailureKind::Cut)
                .due()
                .granted()
        }),
        ("remote, ready, its credentials have changed since", || {
            Life::of_remote().ready().then(SlotInput::Update(other_credentials(&spec(remote))))
        }),
        ("remote, not reached at first", || Life::of_remote().granted().lost(FailureKind::Dns)),
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
        ("remote, stopping", || Life::of_remote().ready().then(SlotInput::Stop)),
        ("remote, connecting and stopping", || Life::of_remote().granted().then(SlotInput::Stop)),
        ("remote, stopped", || Life::of_remote().ready().then(SlotInput::Stop).ended(closed())),
        ("remote, is closed for a new address", || {
            Life::of_remote().ready().then(SlotInput::Update(another_address(&spec(remote))))
        }),
        ("remote, waits for a permit for a new address", || {
            third().then(SlotInput::Update(another_address(&spec(remote))))
        }),
        ("remote, connects to a new address", || {
            third().then(SlotInput::Update(another_address(&spec(remote)))).granted()
        }),
        ("remote, being uninstalled", || Life::of_remote().ready().then(SlotInput::Uninstall)),
        ("a process, stopping, will be remote", || Life::of_listed().ready().then(SlotInput::Update(spec(remote)))),
        ("a process was crashing, and is remote now", || {
            Life::of_listed()
                .ready()
                .ended(exited(1, QUICK))
                .after(1)
                .then(SlotInput::Tick(None))
                .then(SlotInput::Update(spec(remote)))
        }),
        ("remote, closing, will be a process", || {
            Life::of_remote().ready().then(SlotInput::Update(spec(with_another_argument)))
        }),
    ]
}

fn remote_and_incomplete() -> Arc<InstanceSpec> {
    spec(|config| {
        remote(config);
        incomplete(config);
    })
}

/// The same with other credentials.
fn other_credentials(of: &InstanceSpec) -> Arc<InstanceSpec> {
    let InstanceSpec { headers, mask, .. } = spec(|config| with_token(config, "new")).as_ref().clone();
    Arc::new(InstanceSpec { headers, mask, ..of.clone() })
}

/// The same somewhere else.
fn another_address(of: &InstanceSpec) -> Arc<InstanceSpec> {
    let (transport, url) = (RemoteTransport::Http, "http://127.0.0.1/other".to_owned());
    Arc::new(InstanceSpec { target: ServerTarget::Remote { transport, url, health_url: None }, ..of.clone() })
}

fn degraded() -> HealthChange {
    HealthChange::Degraded { failures: 3, last_error: "no answer".to_owned() }
}

/// A connection that was closed because that was asked for.
fn closed() -> WorkerExit {
    WorkerExit { uptime: QUICK, ..WorkerExit::from_cause(ExitCause::Requested) }
}

/// Nothing has happened since the beginning.
fn quiet(life: &Life) -> RunActivity {
    RunActivity { user_count: 0, last: life.start }
}

/// Every input, by name, as it would come to this life.
fn inputs(life: &Life) -> Vec<(&'static str, SlotInput)> {
    let (run, next) = (life.slot.run().unwrap_or(life.run()), RunNumber(life.runs + 1));
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
    if life.slot.is_remote() {
        inputs.extend([
            ("update (a process)", SlotInput::Update(spec(with_another_argument))),
            ("update (incomplete)", SlotInput::Update(remote_and_incomplete())),
            ("other credentials", SlotInput::Update(other_credentials(&life.slot.spec))),
            ("another address", SlotInput::Update(another_address(&life.slot.spec))),
        ]);
    } else {
        inputs.extend([
            ("update", SlotInput::Update(spec(with_another_argument))),
            ("update (incomplete)", SlotInput::Update(spec(incomplete))),
            ("update (remote)", SlotInput::Update(spec(remote))),
            ("roll out 1", SlotInput::Update(spec(rolling(1)))),
            ("roll out 2", SlotInput::Update(spec(rolling(2)))),
            ("roll out 4", SlotInput::Update(spec(rolling(4)))),
            ("tick, idle", SlotInput::Tick(Some(quiet(life)))),
            ("tick, a call in flight", SlotInput::Tick(Some(RunActivity { user_count: 1, ..quiet(life) }))),
        ]);
    }
    if life.runs > 0 {
        inputs.extend([
            ("first byte", SlotInput::FirstByte(run)),
            ("printed", SlotInput::StdoutLine(run, "Listening on port 3000".to_owned())),
            ("initialized", SlotInput::Initialized(run, introduced())),
            ("discovered", SlotInput::Discovered(run, catalogue("read"))),
            ("discovery failed", SlotInput::DiscoveryFailed(run, "tools/list timed out".to_owned(), Duration::ZERO)),
            ("recovered", SlotInput::Recovered(run)),
        ]);
    }
    if life.runs > 0 && life.dialled {
        let ran = life.connected_for();
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
    if life.runs > 0 && !life.dialled {
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
    if let Some(run) = life.slot.second_run.as_ref().and_then(SecondRun::run) {
        inputs.extend([
            ("beside: initialized", SlotInput::Initialized(run, introduced())),
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
fn the_whole_table_is_as_printed() {
    let mut text = String::new();
    for (place, reach) in places().into_iter().chain(remote_places()) {
        let here = reach();
        let Slot { phase: before, requested_state: want, status, message, health, .. } = &here.slot;
        let connection = here.slot.connection().map(|connection| format!("{connection}, {health}, "));
        let connection = connection.unwrap_or_default();
        let attempt = here.slot.attempt().map(|attempt| format!("attempt {attempt}, ")).unwrap_or_default();
        let message = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
        let asked = format!("{want:?}").to_lowercase();
        let beside = here.slot.second_run.as_ref().map_or(String::new(), |beside| with(beside, here.start) + ", ");
        let _ = writeln!(
            text,
            "{place}\n  = {}, {beside}{connection}{attempt}want {asked} [{status}{message}]",
            phase(before, here.start)
        );
        // What comes late comes late: four minutes on, everything that waits for time is due.
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
            let effects = there.tell(input);
            let line = there.told(&before, &effects);
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
    // The name is in every sentence for people, and says nothing here.
    let text = text.replace("files-acme-alice-abc123", "NAME");
    insta::assert_snapshot!(text);
}

#[test]
fn a_removal_is_told_once_whatever_the_instance_was_doing() {
    for (place, reach) in places().into_iter().chain(remote_places()) {
        let mut life = reach();
        if life.slot.phase == SlotPhase::Ended {
            continue;
        }
        let runs = [life.slot.run(), life.slot.second_run.as_ref().and_then(SecondRun::run)];
        let (active, asleep) = (runs.iter().any(Option::is_some), life.slot.is_dormant());
        let mut effects = life.tell(SlotInput::Uninstall);
        for run in runs.into_iter().flatten() {
            let exit = if life.dialled { closed() } else { stopped() };
            effects.extend(life.tell(SlotInput::Ended(run, exit)));
        }
        assert_eq!(life.slot.phase, SlotPhase::Ended, "{place}");
        let told: Vec<String> = effects
            .iter()
            .filter_map(|effect| match effect {
                SlotEffect::Emit(told @ (SlotEvent::Removed { .. } | SlotEvent::Stopped { .. })) => Some(tell(told)),
                _ => None,
            })
            .collect();
        let exit = if active { ", stopped" } else { "" };
        assert_eq!(told, [format!("removed (active {active}, dormant {asleep}{exit})")], "{place}");
    }
}

#[test]
fn credentials_that_were_replaced_stay_hidden_in_what_is_still_said_under_them() {
    let token = |token: &'static str| {
        spec(move |config| {
            remote(config);
            with_token(config, token);
        })
    };
    let mut life = Life::of(token("first-token")).ready();
    for next in ["second-token", "third-token"] {
        let effects = life.tell(SlotInput::Update(token(next)));
        let [SlotEffect::Adopt { spec, .. }] = &effects[..] else { panic!("{effects:?}") };
        assert_eq!(*spec, token(next), "what was hidden before is no part of the configuration");
        for mask in [&spec.mask, &life.slot.spec.mask] {
            assert_eq!(mask.apply(&format!("first-token {next}")), "[secret] [secret]");
        }
    }
}

fn with_policy(change: impl FnOnce(&mut Policy)) -> Arc<InstanceSpec> {
    spec(|config| change(Arc::make_mut(&mut config.policy)))
}

#[test]
fn another_policy_is_applied_in_place_and_forgets_no_exit() {
    let life = Life::of_listed().ready().ended(exited(1, QUICK)).after(1).then(SlotInput::Tick(None)).ready();
    let (run, exits) = (life.run(), life.slot.history.clone());
    let mut life = life;
    let patient = with_policy(|policy| policy.restart.max_crashes = 9);
    let effects = life.tell(SlotInput::Update(patient.clone()));
    let [SlotEffect::Adopt { run: told, spec }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!((*told, spec, &life.slot.spec), (run, &patient, &patient));
    assert_eq!((life.slot.open_run(), &life.slot.history), (Some(run), &exits));
    assert!(life.slot.catalogue.is_some());
}

#[test]
fn what_has_failed_for_good_does_not_come_back_for_another_policy() {
    let mut life = Life::of_listed().ready();
    for _ in 0..3 {
        life = life.ended(exited(1, QUICK)).after(20).then(SlotInput::Tick(None));
        if !matches!(life.slot.phase, SlotPhase::Failed) {
            life = life.ready();
        }
    }
    let effects = life.tell(SlotInput::Update(with_policy(|policy| policy.logs.line_max = 99)));
    assert!(effects.is_empty(), "{effects:?}");
    assert_eq!((&life.slot.phase, life.slot.status), (&SlotPhase::Failed, Status::PermanentlyFailed));
}

#[test]
fn an_idle_time_that_is_shorter_now_counts_from_now_on() {
    let life = Life::of_listed().ready();
    let at = |life: &Life| life.slot.deadline().map(|at| (at - life.start).as_secs());
    assert_eq!(at(&life), Some(180));
    let life = life.then(SlotInput::Update(with_policy(|policy| policy.idle.idle = Duration::from_secs(90))));
    assert_eq!(at(&life), Some(90));
    let awake = spec(|config| config.lifetime = ProcessLifetime::AlwaysOn);
    assert_eq!(at(&life.then(SlotInput::Update(awake))), None);
}

#[test]
fn one_that_sleeps_is_started_when_it_is_to_sleep_no_more() {
    let mut life = Life::of_listed().ready();
    life.slot.phase = SlotPhase::Dormant { since: life.now, not_before: life.now };
    let life = life.then(SlotInput::Update(spec(|config| config.lifetime = ProcessLifetime::AlwaysOn)));
    assert!(matches!(life.slot.phase, SlotPhase::Queued { .. }), "{:?}", life.slot.phase);
}

#[test]
fn another_policy_of_a_configuration_that_is_being_rolled_out_rolls_out_nothing_else() {
    let version = |number: u8, max_crashes: usize| {
        spec(move |config| {
            rolling(number)(config);
            Arc::make_mut(&mut config.policy).restart.max_crashes = max_crashes;
        })
    };
    let mut life = Life::of(version(1, 3)).ready().then(SlotInput::Update(version(2, 3)));
    assert!(life.tell(SlotInput::Update(version(2, 4))).is_empty(), "it waits for its permit still");
    life = life.granted();
    let run = life.run();
    let effects = life.tell(SlotInput::Update(version(2, 5)));
    let [SlotEffect::Adopt { run: told, spec }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!((*told, spec), (run, &version(2, 5)));
    // Back to what runs, with another number: the run beside it ends, and nothing else happens to the other.
    let effects = life.tell(SlotInput::Update(version(1, 6)));
    assert!(effects.iter().any(|effect| matches!(effect, SlotEffect::Stop(stopped) if *stopped == run)), "{effects:?}");
    assert_eq!((life.slot.open_run(), &life.slot.spec), (Some(RunNumber(1)), &version(1, 6)));
}

#[test]
fn a_stop_of_one_that_waits_for_its_user_keeps_its_status_and_holds_when_the_value_is_given() {
    let mut life = Life::of(spec(incomplete));
    life.tell(SlotInput::Stop);
    assert_eq!((life.slot.requested_state, life.slot.status), (RequestedState::Stopped, Status::AwaitingUserConfig));
    assert!(life.slot.message.as_deref().unwrap().starts_with("stopped, and waiting"));
    let memo = life.slot.memo();
    let (revived, _) = Slot::from_memo(spec(incomplete), dice(), &memo);
    assert_eq!((revived.requested_state, revived.status), (RequestedState::Stopped, Status::AwaitingUserConfig));
    life.tell(SlotInput::Update(spec(with_another_argument)));
    assert_eq!((&life.slot.phase, life.slot.status), (&SlotPhase::Stopped, Status::Offline));
    let mut life = Life::of(spec(incomplete)).then(SlotInput::Stop);
    life.tell(SlotInput::Start);
    assert_eq!((life.slot.requested_state, life.slot.status), (RequestedState::Running, Status::AwaitingUserConfig));
    life.tell(SlotInput::Update(spec(with_another_argument)));
    assert!(matches!(life.slot.phase, SlotPhase::Queued { .. }));
}

#[test]
fn a_list_that_could_not_be_read_again_is_kept_as_it_was() {
    let entry = |uri: &str| {
        let raw = RawValue::from_string(format!(r#"{{"uri":"{uri}","name":"{uri}"}}"#)).unwrap();
        CatalogueEntry::parse(raw, "uri").unwrap()
    };
    let listed = |tool: &str, resources: &[&str], unread: &[ListKind]| {
        let resources = resources.iter().map(|uri| entry(uri)).collect();
        Arc::new(Catalogue { resources, unreadable: unread.to_vec(), ..(*catalogue(tool)).clone() })
    };
    let known = |life: &Life| {
        let Catalogue { tools, resources, unreadable: unread, .. } = &**life.slot.catalogue.as_ref().unwrap();
        (tools[0].name.to_string(), resources.iter().map(|one| one.key.to_string()).collect::<Vec<_>>(), unread.len())
    };
    let unread = [ListKind::Resources];
    let life = Life::of_remote().initialized().and(|run, _| SlotInput::Discovered(run, listed("a", &["x"], &unread)));
    assert_eq!(known(&life), ("a".to_owned(), vec!["x".to_owned()], 1), "a part is better than nothing");
    let life = life.and(|run, _| SlotInput::Discovered(run, listed("a", &["x", "y"], &[])));
    let life = life.lost(FailureKind::Refused).due().initialized();
    let life = life.and(|run, _| SlotInput::Discovered(run, listed("b", &["z"], &unread)));
    assert_eq!(known(&life), ("b".to_owned(), vec!["x".to_owned(), "y".to_owned()], 1), "its tools were read");
    let life = life.and(|run, _| SlotInput::Discovered(run, listed("b", &[], &[])));
    assert_eq!(known(&life), ("b".to_owned(), Vec::new(), 0), "the server has taken it back");
}

#[test]
fn what_a_server_has_new_after_a_reconnect_is_told_and_can_be_seen_by_number() {
    let prompt =
        |name: &str| CatalogueEntry::parse(RawValue::from_string(format!(r#"{{"name":"{name}"}}"#)).unwrap(), "name");
    let listed = |tool: &str, name: &str| {
        Arc::new(Catalogue { prompts: vec![prompt(name).unwrap()], ..(*catalogue(tool)).clone() })
    };
    let said = |capabilities: &str| {
        let capabilities = RawValue::from_string(capabilities.to_owned()).unwrap();
        let ServerInfo { name, version, protocol, .. } = Arc::into_inner(introduced()).unwrap();
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
    let mut life = Life::of_remote().granted();
    let mut seen = life.slot.revisions;
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
        let run = life.run();
        let _ = life.tell(SlotInput::Initialized(run, said(capabilities)));
        let effects = life.tell(SlotInput::Discovered(run, listed(tool, name)));
        let told = effects.iter().find_map(|effect| match effect {
            SlotEffect::Emit(SlotEvent::Reconnected { changed, .. }) => Some(changed.clone()),
            _ => None,
        });
        let numbers = life.slot.revisions;
        assert_eq!(numbers.changes_since(&seen), expected);
        assert_eq!(told, (run != RunNumber(1)).then_some(expected));
        seen = numbers;
        // What changes while it is there is not the reconnect's.
        let _ = life.tell(SlotInput::Discovered(run, listed("new", name)));
        assert_eq!(life.slot.revisions.changes_since(&seen), [CatalogueAspect::Tools]);
        let _ = life.tell(SlotInput::Discovered(run, listed(tool, name)));
        seen = life.slot.revisions;
        life = life.lost(FailureKind::Refused).due().granted();
    }
}
