//! The life of an instance, printed: every phase that a slot can be in × every input. A change of behaviour is a
//! difference in `snapshots/slot__the_whole_table_is_as_printed.snap`, to be read against the specification. What a
//! session never says, such as a catalogue before the handshake, is in it too, and shows as REFUSED; that nothing which
//! can happen is refused is a property (`slot_properties`).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod samples;

use std::fmt::Write as _;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::event::{RestartReason, StopKind};
use mcp_satellite_actors::model::exit::{ExitCause, WorkerExit};
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::{InstanceSpec, Keep};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::idle::Activity;
use mcp_satellite_actors::rules::slot::{Beside, Effect, Input, Memo, Phase, Slot, Then, Told, Want, Why};
use samples::{catalogue, exited, incomplete, introduced, remote, rolling, spec, stopped};

const QUICK: Option<Duration> = Some(Duration::from_secs(1));
const LONG: Option<Duration> = Some(Duration::from_secs(61));

/// A slot on its way through a life, and the time it has.
struct Life {
    slot: Slot,
    start: Instant,
    now: Instant,
    runs: u64,
}

impl Life {
    fn of(spec: Arc<InstanceSpec>) -> Self {
        // All lives begin at once, so that what one has seen can be told to another.
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        let (start, (slot, _)) = (*START, Slot::new(spec));
        Self { slot, start, now: start, runs: 0 }
    }

    fn of_listed() -> Self {
        Self::of(spec(|_| {}))
    }

    fn of_always_on() -> Self {
        Self::of(spec(|config| config.keep = Keep::AlwaysOn))
    }

    fn of_lazy() -> Self {
        Self::of(spec(|config| config.keep = Keep::Lazy))
    }

    /// One whose tools are known from before.
    fn of_recalled(spec: Arc<InstanceSpec>) -> Self {
        let life = Self::of(spec.clone());
        let (slot, _) = Slot::revive(spec, &Memo::recalled(catalogue("read"), life.start));
        Self { slot, ..life }
    }

    /// The current run, or the last one.
    fn run(&self) -> Run {
        Run(self.runs)
    }

    fn then(mut self, input: Input) -> Self {
        self.tell(input);
        self
    }

    fn tell(&mut self, input: Input) -> Vec<Effect> {
        self.slot.handle(self.now, input)
    }

    fn after(mut self, seconds: u64) -> Self {
        self.now += Duration::from_secs(seconds);
        self
    }

    fn granted(mut self) -> Self {
        self.runs += 1;
        let run = self.run();
        self.then(Input::Granted(run)).and(Input::Spawned).and(|run, _| Input::FirstByte(run))
    }

    fn and(self, input: impl FnOnce(Run, Option<u32>) -> Input) -> Self {
        let (run, pid) = (self.run(), u32::try_from(100 + self.runs).ok());
        self.then(input(run, pid))
    }

    fn initialized(self) -> Self {
        self.granted().and(|run, _| Input::Initialized(run, introduced()))
    }

    fn ready(self) -> Self {
        self.initialized().and(|run, _| Input::Discovered(run, catalogue("read")))
    }

    fn ended(self, exit: WorkerExit) -> Self {
        self.and(|run, pid| Input::Ended(run, WorkerExit { pid, ..exit }))
    }

    /// As a line of the table: what the input made of it.
    fn told(&self, before: &Phase, beside: Option<&Beside>, want: Want, status: Status, effects: &[Effect]) -> String {
        let mut words = Vec::new();
        if self.slot.phase != *before {
            words.push(format!("→ {}", phase(&self.slot.phase, self.start)));
        }
        if self.slot.want != want {
            words.push(format!("want {:?}", self.slot.want).to_lowercase());
        }
        if self.slot.beside.as_ref() != beside {
            words.push(self.slot.beside.as_ref().map_or("alone".to_owned(), |beside| with(beside, self.start)));
        }
        words.extend(effects.iter().map(effect));
        let told = effects.iter().any(|effect| matches!(effect, Effect::Status { .. }));
        assert!(told || self.slot.status == status, "a status changed and nobody was told");
        words.join("; ")
    }
}

fn phase(phase: &Phase, start: Instant) -> String {
    let at = |time: &Instant| format!("{:?}", time.duration_since(start));
    match phase {
        Phase::Unconfigured => "unconfigured".to_owned(),
        Phase::Reconnecting { until, attempt } => format!("reconnecting (attempt {attempt} at {})", at(until)),
        Phase::Reauth => "reauth".to_owned(),
        Phase::Exhausted { attempts } => format!("exhausted after {attempts}"),
        Phase::Queued { why: what_for, urgent } => {
            format!("queued ({}{})", why(what_for), if *urgent { ", urgent" } else { "" })
        }
        Phase::Starting { run, why: what_for, .. } => format!("starting {run:?} ({})", why(what_for)),
        Phase::Ready { run, look_at: None, .. } => format!("ready {run:?}"),
        Phase::Ready { run, look_at: Some(look_at), .. } => format!("ready {run:?} (looked at {})", at(look_at)),
        Phase::FallingAsleep { run, .. } => format!("falling asleep {run:?}"),
        Phase::Undiscovered { run, attempt, retry_at, .. } => {
            let retry = retry_at.as_ref().map_or("under way".to_owned(), |time| format!("at {}", at(time)));
            format!("undiscovered {run:?} (attempt {attempt}, next {retry})")
        }
        Phase::Backoff { until, why: what_for } => format!("backoff until {} ({})", at(until), why(what_for)),
        Phase::Dormant { not_before, .. } => format!("dormant (not before {})", at(not_before)),
        Phase::Stopping { run, kind, then } => format!("stopping {run:?} ({}, then {})", stop(*kind), after(then)),
        Phase::Stopped => "stopped".to_owned(),
        Phase::Failed => "failed".to_owned(),
        Phase::Over => "over".to_owned(),
    }
}

fn with(beside: &Beside, start: Instant) -> String {
    match beside {
        Beside::Queued { spec } => format!("beside it {} waits for a permit", version(spec)),
        Beside::Starting { run, spec, initialized_at, .. } => {
            let state = if initialized_at.is_some() { "is initialized" } else { "starts" };
            format!("beside it {run:?} with {} {state}", version(spec))
        }
        Beside::Leaving { run, kind, drain_until, next } => {
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

fn after(then: &Then) -> String {
    match then {
        Then::Stop => "stay down".to_owned(),
        Then::Again(what_for) => format!("again: {}", why(what_for)),
        Then::AwaitConfig => "await its config".to_owned(),
        Then::Over => "over".to_owned(),
    }
}

fn why(why: &Why) -> String {
    match why {
        Why::First => "first".to_owned(),
        Why::Again { reason, old_pid: _, attempt } => match reason {
            RestartReason::Crash => format!("crash {attempt}"),
            RestartReason::Exit => format!("exit {attempt}"),
            RestartReason::Unresponsive => format!("unresponsive {attempt}"),
            RestartReason::Manual => "manual".to_owned(),
            RestartReason::Config => "config".to_owned(),
        },
        Why::Wake { .. } => "wake".to_owned(),
        Why::Reconnect { attempt, resume: None } => format!("reconnect {attempt}"),
        Why::Reconnect { attempt, resume: Some(_) } => format!("reconnect {attempt}, before its time"),
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

fn effect(effect: &Effect) -> String {
    match effect {
        Effect::RequestPermit { urgent: false } => "ask for a permit".to_owned(),
        Effect::RequestPermit { urgent: true } => "ask for a permit urgently".to_owned(),
        Effect::WithdrawPermit => "withdraw".to_owned(),
        Effect::ReleasePermit(run) => format!("release {run:?}"),
        Effect::Spawn { run, discover, .. } => format!("SPAWN {run:?}{}", if *discover { " to discover" } else { "" }),
        Effect::Drain(run) => format!("DRAIN {run:?}"),
        Effect::Stop(run) => format!("STOP {run:?}"),
        Effect::Hurry(run) => format!("hurry {run:?}"),
        Effect::TrySleep { run, idle } => format!("try to put {run:?} to sleep, idle for {idle:?}"),
        Effect::Discover(run) => format!("discover {run:?}"),
        Effect::Check(run) => format!("check {run:?}"),
        Effect::Credentials { run, .. } => format!("credentials for {run:?}"),
        Effect::Unreachable { last_error, retry_at } => {
            format!("unreachable \"{last_error}\"{}", if retry_at.is_some() { ", tried again" } else { "" })
        }
        Effect::Status { status, message } => match message {
            Some(message) => format!("[{status}: {message}]"),
            None => format!("[{status}]"),
        },
        Effect::Refused { status, cause } => format!("REFUSED {cause:?} in {status}"),
        Effect::ChargeTeam => "charge team".to_owned(),
        Effect::Tell(told) => format!("tell {}", tell(told)),
        Effect::Admit(run) => format!("admit to {run:?}"),
        Effect::Refuse(message) => format!("refuse \"{message}\""),
        Effect::Denied(message) => format!("deny \"{message}\""),
        Effect::Remove => "REMOVE".to_owned(),
    }
}

fn tell(told: &Told) -> String {
    let restart = |will: &bool| if *will { "will restart" } else { "no restart" };
    match told {
        Told::Started { .. } => "started".to_owned(),
        Told::Disconnected { intentional } => format!("disconnected{}", if *intentional { " on request" } else { "" }),
        Told::Reconnecting { attempt, after } => format!("reconnecting (attempt {attempt} in {after:?})"),
        Told::Reconnected { attempts } => format!("reconnected ({attempts})"),
        Told::Health(news) => format!("{news:?}"),
        Told::Restarted { reason, attempt, .. } => format!("restarted ({reason:?} {attempt})").to_lowercase(),
        Told::Dormant { idle, .. } => format!("dormant (idle for {idle:?})"),
        Told::Respawned { dormant, took } => format!("respawned after {dormant:?} in {took:?}"),
        Told::Discovered { before, .. } => {
            if before.is_some() {
                "discovered anew".to_owned()
            } else {
                "discovered".to_owned()
            }
        }
        Told::NotTaken { .. } => "not taken".to_owned(),
        Told::Stopped { kind, .. } => format!("stopped ({})", stop(*kind)),
        Told::Exited { will_restart, .. } => format!("exited ({})", restart(will_restart)),
        Told::Crashed { count, will_restart, .. } => format!("crashed ({count}, {})", restart(will_restart)),
        Told::PermanentlyFailed { exits, .. } => format!("permanently failed ({exits})"),
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
        crashed_once().after(1).then(Input::Tick(None)).ready().ended(exited(1, QUICK))
    }
    fn asleep() -> Life {
        Life::of_listed().ready().ended(exited(0, QUICK))
    }
    fn falling_asleep() -> Life {
        let idle = Duration::from_secs(180);
        Life::of_listed().ready().after(180).and(|run, _| Input::Sleep { run, idle })
    }
    fn rolled_out() -> Life {
        Life::of(spec(rolling(1))).ready().then(Input::Update(spec(rolling(2))))
    }
    fn drains() -> Life {
        rolled_out().initialized().and(|run, _| Input::Discovered(run, catalogue("write")))
    }
    fn not_taken() -> Life {
        rolled_out().granted().ended(exited(1, None))
    }
    fn undiscovered() -> Life {
        Life::of_listed().initialized().and(|run, _| Input::DiscoveryFailed(run, "tools/list timed out".to_owned()))
    }
    vec![
        ("a value of its user is missing", || Life::of(spec(incomplete))),
        ("remote, waits for its first permit", || Life::of(spec(remote))),
        ("new, waits for its first permit", Life::of_listed),
        ("new, waits for its first permit, and a caller with it", || Life::of_listed().then(Input::Call)),
        ("waits for a permit after a delay", || crashed_once().after(1).then(Input::Tick(None))),
        ("waits for a permit to wake", || asleep().after(2).then(Input::Call)),
        ("starts for the first time, permit held", || {
            let mut life = Life::of_listed();
            life.runs += 1;
            let run = life.run();
            life.then(Input::Granted(run))
        }),
        ("starts for the first time, first byte seen", || Life::of_listed().granted()),
        ("starts for the first time, initialized", || Life::of_listed().initialized()),
        ("starts after a crash", || crashed_once().after(1).then(Input::Tick(None)).granted()),
        ("wakes", || asleep().after(2).then(Input::Call).granted()),
        ("ready", || Life::of_listed().ready()),
        ("ready, always_on", || Life::of_always_on().ready()),
        ("ready after one crash", || crashed_once().after(1).then(Input::Tick(None)).ready()),
        ("ready after two crashes: its last chance", || crashed_twice().after(5).then(Input::Tick(None)).ready()),
        ("cannot be discovered, waits for the next attempt", undiscovered),
        ("cannot be discovered, attempt under way", || undiscovered().after(1).then(Input::Tick(None))),
        ("a restart's delay", crashed_once),
        ("the delay of an exit, woken too early", || asleep().then(Input::Call)),
        ("asleep", asleep),
        ("lazy and discovered", || Life::of_lazy().ready()),
        ("lazy, and a caller waited", || Life::of_lazy().then(Input::Call).initialized()),
        ("lazy, its tools known", || Life::of_recalled(spec(|config| config.keep = Keep::Lazy))),
        ("lazy, its tools known, woken", || {
            Life::of_recalled(spec(|config| config.keep = Keep::Lazy)).after(5).then(Input::Call).granted()
        }),
        ("lazy, its tools known, a value of its user missing", || {
            Life::of_recalled(spec(|config| {
                config.keep = Keep::Lazy;
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
        ("rolled out, the old one drained for too long", || drains().after(365 * 24 * 60 * 60).then(Input::Tick(None))),
        ("rolled out again, the new one of before goes", || {
            rolled_out().granted().then(Input::Update(spec(rolling(3))))
        }),
        ("rolled out again, the old one of before drains", || drains().then(Input::Update(spec(rolling(3))))),
        ("the new configuration did not come up", not_taken),
        ("a restart's delay, and the old one drains", || drains().ended(exited(1, QUICK))),
        ("asleep, and the old one drains", || drains().ended(exited(0, QUICK))),
        ("stopping, and the new one of an update with it", || rolled_out().granted().then(Input::Stop)),
        ("stopping", || Life::of_listed().ready().then(Input::Stop)),
        ("stopping, configured anew without a value of its user", || {
            Life::of_listed().ready().then(Input::Stop).then(Input::Update(spec(incomplete)))
        }),
        ("restarting on request", || Life::of_listed().ready().then(Input::Restart)),
        ("restarting with a new configuration", || Life::of_listed().ready().then(Input::Update(spec(|_| {})))),
        ("stopping, will miss a value of its user", || Life::of_listed().ready().then(Input::Update(spec(incomplete)))),
        ("stopping, missed a value of its user for a while", || {
            Life::of_listed().ready().then(Input::Update(spec(incomplete))).then(Input::Update(spec(|_| {})))
        }),
        ("being uninstalled", || Life::of_listed().ready().then(Input::Uninstall)),
        ("stopped", || Life::of_listed().ready().then(Input::Stop).ended(stopped())),
        ("stopped, configured anew without a value of its user", || {
            Life::of_listed().then(Input::Stop).then(Input::Update(spec(incomplete)))
        }),
        ("permanently failed", || crashed_twice().after(5).then(Input::Tick(None)).ready().ended(exited(1, QUICK))),
        ("over", || Life::of_listed().ready().then(Input::Uninstall).ended(stopped())),
    ]
}

/// Nothing has happened since the beginning.
fn quiet(life: &Life) -> Activity {
    Activity { calls_in_flight: 0, last: life.start }
}

/// Every input, by name, as it would come to this life.
fn inputs(life: &Life) -> Vec<(&'static str, Input)> {
    let (run, next) = (life.slot.run().unwrap_or(life.run()), Run(life.runs + 1));
    let because = |cause| WorkerExit::because(cause);
    let mut inputs = vec![
        ("start", Input::Start),
        ("stop", Input::Stop),
        ("restart", Input::Restart),
        ("update", Input::Update(spec(|_| {}))),
        ("update (incomplete)", Input::Update(spec(incomplete))),
        ("update (remote)", Input::Update(spec(remote))),
        ("roll out 1", Input::Update(spec(rolling(1)))),
        ("roll out 2", Input::Update(spec(rolling(2)))),
        ("roll out 4", Input::Update(spec(rolling(4)))),
        ("uninstall", Input::Uninstall),
        ("shutdown", Input::Shutdown),
        ("call", Input::Call),
        ("granted", Input::Granted(next)),
        ("tick", Input::Tick(None)),
        ("tick, idle", Input::Tick(Some(quiet(life)))),
        ("tick, a call in flight", Input::Tick(Some(Activity { calls_in_flight: 1, ..quiet(life) }))),
    ];
    if life.runs > 0 {
        inputs.extend([
            ("spawned", Input::Spawned(run, Some(7))),
            ("first byte", Input::FirstByte(run)),
            ("sleep", Input::Sleep { run, idle: Duration::from_secs(180) }),
            ("initialized", Input::Initialized(run, introduced())),
            ("discovered", Input::Discovered(run, catalogue("read"))),
            ("discovery failed", Input::DiscoveryFailed(run, "tools/list timed out".to_owned())),
            ("ended as asked", Input::Ended(run, stopped())),
            ("exit 0", Input::Ended(run, exited(0, QUICK))),
            ("exit 1", Input::Ended(run, exited(1, QUICK))),
            ("exit 1 after 61 s", Input::Ended(run, exited(1, LONG))),
            ("killed", Input::Ended(run, WorkerExit { signal: Some(9), ran: QUICK, ..because(ExitCause::Exited) })),
            (
                "cannot be started",
                Input::Ended(run, because(ExitCause::Spawn("cannot start `files`: not found".into()))),
            ),
            ("unresponsive", Input::Ended(run, WorkerExit { ran: LONG, ..because(ExitCause::Unresponsive) })),
        ]);
    }
    if let Some(run) = life.slot.beside.as_ref().and_then(Beside::run) {
        inputs.extend([
            ("beside: initialized", Input::Initialized(run, introduced())),
            ("beside: discovered", Input::Discovered(run, catalogue("other"))),
            ("beside: discovery failed", Input::DiscoveryFailed(run, "tools/list timed out".to_owned())),
            ("beside: ended as asked", Input::Ended(run, stopped())),
            ("beside: exit 0", Input::Ended(run, exited(0, QUICK))),
            ("beside: exit 1", Input::Ended(run, exited(1, QUICK))),
        ]);
    }
    inputs
}

#[test]
fn the_whole_table_is_as_printed() {
    let mut text = String::new();
    for (place, reach) in places() {
        let here = reach();
        let Slot { phase: before, want, status, message, .. } = &here.slot;
        let message = message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
        let asked = format!("{want:?}").to_lowercase();
        let beside = here.slot.beside.as_ref().map_or(String::new(), |beside| with(beside, here.start) + ", ");
        let _ = writeln!(text, "{place}\n  = {}, {beside}want {asked} [{status}{message}]", phase(before, here.start));
        // What comes late comes late: four minutes on, everything that waits for time is due.
        let (idle, now) = (Some(quiet(&here)), here.now);
        let called = idle.map(|quiet| Activity { last: now + Duration::from_secs(230), ..quiet });
        let late = [
            ("tick (4 minutes later, idle)", Input::Tick(idle)),
            ("tick (4 minutes later, called 10 s ago)", Input::Tick(called)),
        ];
        let on_time = inputs(&here).into_iter().map(|pair| (pair, 0));
        let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
        for ((name, input), wait) in on_time.chain(late.into_iter().map(|pair| (pair, 240))) {
            let mut there = reach().after(wait);
            let (before, beside) = (there.slot.phase.clone(), there.slot.beside.clone());
            let (want, status) = (there.slot.want, there.slot.status);
            let effects = there.tell(input);
            let line = there.told(&before, beside.as_ref(), want, status, &effects);
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
