//! The life of one instance, as a pure state machine: want × phase × input → effects. Its team's supervisor carries it
//! out and decides nothing.
//!
//! ```text
//!                 ┌────────────── Update ──────────────┐
//!  Unconfigured ──┘                                    ▼
//!                       Granted            Initialized, Discovered
//!  Queued ───────────────────────▶ Starting ──────────────────────▶ Ready ─idle─▶ FallingAsleep ──▶ Dormant
//!    ▲  ▲                             │  │ └─▶ Undiscovered ──retry──▶ │ └────────── exit 0 ──────────▶ │
//!    │  └──── the delay is over ──────┼──┼──── Backoff ◀──crash, exit──┘                                │
//!    │                                │  └──── Failed  ◀──once too often                                │
//!    └───────────────── Call ─────────┼─────────────────────────────────────────────────────────────────┘
//!                                     ▼
//!                 Stopping, then: Stopped │ started again │ Over
//! ```
//!
//! There is one incarnation at most: a restart waits until the old run is gone. A later rolling update gets a
//! `successor` beside the run in `Ready`; the reconnect schedule of a remote instance is a phase between `Ready` and
//! `Starting`, as `Undiscovered` is for a link that is alive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::idle::{self, Activity};
use super::restart::{self, History, Verdict};
use crate::model::catalogue::Catalogue;
use crate::model::event::{RestartReason, StopKind};
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::ids::Run;
use crate::model::spec::{InstanceSpec, Keep, Target};
use crate::model::status::{self, Cause, Status};

/// What a person wants of an instance. A stop always wins, and only a start undoes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Want {
    /// To be there when called.
    Running,
    /// To stay down, whoever calls.
    Stopped,
}

/// Why a run is started: what it is announced as when it is ready.
#[derive(Debug, Clone, PartialEq)]
pub enum Why {
    /// For the first time.
    First,
    /// Again.
    Again {
        /// After what.
        reason: RestartReason,
        /// The process before.
        old_pid: Option<u32>,
        /// Unwanted exits in the window; 0 after a person's request.
        attempt: usize,
    },
    /// A call wakes it. The status stays `online`.
    Wake {
        /// Asleep since then.
        since: Instant,
        /// The call came then.
        asked: Instant,
    },
}

/// Where an instance is in its life.
#[derive(Debug, Clone, PartialEq)]
pub enum Phase {
    /// A required value is missing.
    Unconfigured,
    /// No worker of this version can serve its transport.
    Unserved,
    /// Waits for a start permit.
    Queued {
        /// What for.
        why: Why,
        /// Whether the permit was asked for with a caller waiting.
        urgent: bool,
    },
    /// A worker is there; handshake and discovery.
    Starting {
        /// The incarnation.
        run: Run,
        /// What for.
        why: Why,
        /// When its permit was granted.
        since: Instant,
    },
    /// Takes calls.
    Ready {
        /// The incarnation.
        run: Run,
        /// When it came to this.
        since: Instant,
        /// When it is looked at whether anybody needs it; none if it never sleeps.
        look_at: Option<Instant>,
    },
    /// Nobody needs it: it takes no calls any more, and is being ended.
    FallingAsleep {
        /// The incarnation.
        run: Run,
        /// Since when.
        since: Instant,
        /// How long nobody had needed it then.
        idle: Duration,
    },
    /// The link is alive and its lists cannot be read. Retried; a call is tried on the link.
    Undiscovered {
        /// The incarnation.
        run: Run,
        /// What it was started for.
        why: Why,
        /// When it was started.
        since: Instant,
        /// Failed discoveries.
        attempt: u32,
        /// The next one; none while one is under way.
        retry_at: Option<Instant>,
    },
    /// A restart's delay.
    Backoff {
        /// When it is over.
        until: Instant,
        /// What for.
        why: Why,
    },
    /// Asleep, its tools listed. The next call wakes it.
    Dormant {
        /// Since when.
        since: Instant,
        /// A call before this waits until then: it never shortens a restart's delay.
        not_before: Instant,
    },
    /// The run is being ended.
    Stopping {
        /// The incarnation.
        run: Run,
        /// Why, for the event.
        kind: StopKind,
        /// What comes after.
        then: Then,
    },
    /// Down until a person starts it.
    Stopped,
    /// Ended once too often.
    Failed,
    /// Removed, or the satellite is ending. Nothing comes after.
    Over,
}

/// What comes after a run was ended on request.
#[derive(Debug, Clone, PartialEq)]
pub enum Then {
    /// Stay down.
    Stop,
    /// Start again.
    Again(Why),
    /// Wait for the configuration to be completed.
    AwaitConfig,
    /// Nothing.
    Over,
}

/// What happens to a slot.
#[derive(Debug, Clone)]
pub enum Input {
    /// A person: be there when called.
    Start,
    /// A person: stay down.
    Stop,
    /// A person: start again now, with a clean slate.
    Restart,
    /// The configuration changed.
    Update(Arc<InstanceSpec>),
    /// The installation is gone.
    Uninstall,
    /// The satellite is ending.
    Shutdown,
    /// A caller wants a run that takes calls.
    Call,
    /// A start permit, and the number of the run it is for.
    Granted(Run),
    /// The first byte came from the server: the expensive part of its start is over.
    FirstByte(Run),
    /// The process is there.
    Spawned(Run, Option<u32>),
    /// The handshake is done.
    Initialized(Run),
    /// All lists were read.
    Discovered(Run, Arc<Catalogue>),
    /// The lists could not be read; the link is alive.
    DiscoveryFailed(Run, String),
    /// The run is over and nothing of it is left.
    Ended(Run, WorkerExit),
    /// A deadline of this slot may have passed; and what its open run has to do, if there is one.
    Tick(Option<Activity>),
    /// Its run takes no calls any more, as was tried by [`Effect::TrySleep`].
    Sleep {
        /// The incarnation.
        run: Run,
        /// How long nobody has needed it.
        idle: Duration,
    },
}

/// What the team's supervisor is to do.
#[derive(Debug, Clone)]
pub enum Effect {
    /// Ask for a start permit.
    RequestPermit {
        /// A caller waits.
        urgent: bool,
    },
    /// Ask no longer.
    WithdrawPermit,
    /// Give it back.
    ReleasePermit(Run),
    /// Start a worker; `discover` says whether it reads the lists by itself.
    Spawn {
        /// The incarnation.
        run: Run,
        /// Whether the catalogue must be read before it is ready.
        discover: bool,
    },
    /// End the worker with grace.
    Stop(Run),
    /// Let the run take no calls any more, unless one is inside; then say [`Input::Sleep`].
    TrySleep {
        /// The incarnation.
        run: Run,
        /// How long nobody has needed it.
        idle: Duration,
    },
    /// Read the lists again on the live link.
    Discover(Run),
    /// The status moved; tell the registry and the events.
    Status {
        /// The new one.
        status: Status,
        /// In a few words, for people.
        message: Option<String>,
    },
    /// A transition made no sense; to be logged.
    Refused {
        /// The status, which stays.
        status: Status,
        /// The cause that was refused.
        cause: Cause,
    },
    /// An unwanted exit: charge the team's budget.
    ChargeTeam,
    /// Something to tell.
    Tell(Told),
    /// The callers that wait may use this run.
    Admit(Run),
    /// The callers that wait are refused, with the status and what to do.
    Refuse(String),
    /// The person who asked is told why nothing happens, and what to do instead.
    Denied(String),
    /// The slot is over: drop it.
    Remove,
}

impl Effect {
    /// Whether readers of the snapshot may see a difference.
    pub fn shows(&self) -> bool {
        match self {
            Self::Spawn { .. }
            | Self::Stop(_)
            | Self::Discover(_)
            | Self::Status { .. }
            | Self::ChargeTeam
            | Self::Tell(_)
            | Self::Remove => true,
            Self::RequestPermit { .. }
            | Self::WithdrawPermit
            | Self::ReleasePermit(_)
            | Self::TrySleep { .. }
            | Self::Refused { .. }
            | Self::Admit(_)
            | Self::Refuse(_)
            | Self::Denied(_) => false,
        }
    }
}

/// What is told, still without names and wall-clock times.
#[derive(Debug, Clone)]
pub enum Told {
    /// Ready for the first time, `after` its permit was granted.
    Started {
        /// From permit to ready.
        after: Duration,
        /// Tools that it offers.
        tool_count: usize,
    },
    /// Ready again.
    Restarted {
        /// After what.
        reason: RestartReason,
        /// The process before.
        old_pid: Option<u32>,
        /// Unwanted exits in the window.
        attempt: usize,
    },
    /// Put to sleep.
    Dormant {
        /// The process that was ended.
        pid: Option<u32>,
        /// How long nobody had needed it.
        idle: Duration,
        /// When somebody last did.
        last_activity: Instant,
    },
    /// Awake again.
    Respawned {
        /// How long it slept.
        dormant: Duration,
        /// From the call to ready.
        took: Duration,
    },
    /// Its catalogue was read; what was known before, for the difference.
    Discovered {
        /// The catalogue before, if there was one.
        before: Option<Arc<Catalogue>>,
        /// The catalogue now.
        now: Arc<Catalogue>,
    },
    /// Ended on request.
    Stopped {
        /// Whose.
        kind: StopKind,
        /// How.
        exit: WorkerExit,
    },
    /// Ended unasked with code 0.
    Exited {
        /// How.
        exit: WorkerExit,
        /// Whether it is started again without a call.
        will_restart: bool,
    },
    /// Crashed.
    Crashed {
        /// How.
        exit: WorkerExit,
        /// Unwanted exits in the window.
        count: usize,
        /// Whether it is started again.
        will_restart: bool,
    },
    /// Once too often.
    PermanentlyFailed {
        /// Unwanted exits in the window.
        exits: usize,
        /// The last of them.
        last_error: String,
        /// What to do.
        message: String,
    },
}

/// What must outlive the team's supervisor: cast to Root at each change, because ractor hands no state back after a
/// panic.
#[derive(Debug, Clone, Default)]
pub struct Memo {
    stopped: bool,
    failed: Option<String>,
    dormant: Option<(Instant, Instant)>,
    not_before: Option<Instant>,
    history: History,
    catalogue: Option<Arc<Catalogue>>,
    restarts: u64,
    was_ready: bool,
    last_exit: Option<String>,
    last_error: Option<String>,
}

/// One instance under its team's supervisor.
#[derive(Debug)]
pub struct Slot {
    /// What it is to be.
    pub spec: Arc<InstanceSpec>,
    /// What a person wants of it.
    pub want: Want,
    /// Where it is.
    pub phase: Phase,
    /// What its user sees.
    pub status: Status,
    /// And why.
    pub message: Option<String>,
    /// Its tools as last read; kept over restarts and sleep.
    pub catalogue: Option<Arc<Catalogue>>,
    /// The process of the current run.
    pub pid: Option<u32>,
    /// Started again after an unwanted exit or on request, over all.
    pub restarts: u64,
    /// How the last run ended.
    pub last_exit: Option<String>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// When the current run was initialized.
    pub initialized_at: Option<Instant>,
    /// Its unwanted exits.
    pub history: History,
    permit: Option<(Run, Instant)>,
    was_ready: bool,
}

impl Slot {
    /// A new instance, and what to do first.
    pub fn new(spec: Arc<InstanceSpec>) -> (Self, Vec<Effect>) {
        let mut slot = Self::blank(spec);
        let mut out = Vec::new();
        if slot.spec.missing.is_empty() {
            out.push(Effect::Status { status: Status::Provisioning, message: None });
            slot.take(&mut out);
        } else {
            slot.await_config(&mut out);
        }
        (slot, out)
    }

    /// An instance whose supervisor died: what it had come to stays, what ran is started again.
    pub fn revive(spec: Arc<InstanceSpec>, memo: &Memo) -> (Self, Vec<Effect>) {
        let mut slot = Self::blank(spec);
        slot.history = memo.history.clone();
        slot.catalogue.clone_from(&memo.catalogue);
        slot.restarts = memo.restarts;
        slot.was_ready = memo.was_ready;
        slot.last_exit.clone_from(&memo.last_exit);
        slot.last_error.clone_from(&memo.last_error);
        let mut out = Vec::new();
        if memo.stopped {
            slot.want = Want::Stopped;
            slot.stopped(&mut out);
        } else if !slot.spec.missing.is_empty() {
            slot.await_config(&mut out);
        } else if let Some(message) = &memo.failed {
            slot.phase = Phase::Failed;
            slot.becomes(Status::PermanentlyFailed, Some(message.clone()), &mut out);
        } else if let Some((since, not_before)) = memo.dormant {
            slot.phase = Phase::Dormant { since, not_before };
            slot.becomes(Status::Online, None, &mut out);
        } else {
            slot.becomes(Status::Connecting, Some("its supervisor was restarted".to_owned()), &mut out);
            match memo.not_before {
                // A delay that was running still holds.
                Some(until) if slot.is_served() => {
                    let why = Why::Again { reason: RestartReason::Crash, old_pid: None, attempt: 0 };
                    slot.phase = Phase::Backoff { until, why };
                }
                _ => slot.begin_again(RestartReason::Crash, None, &mut out),
            }
        }
        (slot, out)
    }

    /// See [`Memo`].
    pub fn memo(&self) -> Memo {
        Memo {
            stopped: self.want == Want::Stopped,
            failed: matches!(self.phase, Phase::Failed).then(|| self.message.clone().unwrap_or_default()),
            dormant: match self.phase {
                Phase::Dormant { since, not_before } => Some((since, not_before)),
                Phase::FallingAsleep { since, .. } => Some((since, since)),
                _ => None,
            },
            not_before: match self.phase {
                Phase::Backoff { until, .. } => Some(until),
                _ => None,
            },
            history: self.history.clone(),
            catalogue: self.catalogue.clone(),
            restarts: self.restarts,
            was_ready: self.was_ready,
            last_exit: self.last_exit.clone(),
            last_error: self.last_error.clone(),
        }
    }

    /// The run that takes calls now.
    pub fn open_run(&self) -> Option<Run> {
        match self.phase {
            Phase::Ready { run, .. } | Phase::Undiscovered { run, .. } => Some(run),
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => None,
        }
    }

    /// Whether it sleeps or is being woken.
    pub fn is_dormant(&self) -> bool {
        match &self.phase {
            Phase::Dormant { .. } => true,
            Phase::Queued { why, .. } | Phase::Starting { why, .. } | Phase::Backoff { why, .. } => {
                matches!(why, Why::Wake { .. })
            }
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => false,
        }
    }

    /// When it is tried again and which attempt that is, while a delay runs.
    pub fn next_retry(&self) -> Option<(Instant, usize)> {
        match &self.phase {
            Phase::Backoff { until, why: Why::Again { attempt, .. } } => Some((*until, *attempt)),
            Phase::Undiscovered { retry_at: Some(at), attempt, .. } => Some((*at, *attempt as usize)),
            _ => None,
        }
    }

    /// When this slot wants a [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        let own = match self.phase {
            Phase::Backoff { until, .. } => Some(until),
            Phase::Undiscovered { retry_at, .. } => retry_at,
            Phase::Ready { look_at, .. } => look_at,
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => None,
        };
        let permit = self.permit.map(|(_, until)| until);
        own.into_iter().chain(permit).min()
    }

    /// The one way a slot changes.
    pub fn handle(&mut self, now: Instant, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        match input {
            Input::Start => self.on_start(&mut out),
            Input::Stop => self.on_stop(&mut out),
            Input::Restart => self.on_restart(&mut out),
            Input::Update(spec) => self.on_update(spec, &mut out),
            Input::Uninstall => self.on_end(StopKind::Uninstall, &mut out),
            Input::Shutdown => self.on_end(StopKind::Shutdown, &mut out),
            Input::Call => self.on_call(now, &mut out),
            Input::Granted(run) => self.on_granted(now, run, &mut out),
            Input::FirstByte(run) => self.release(run, &mut out),
            Input::Spawned(run, pid) => {
                if self.run() == Some(run) {
                    self.pid = pid;
                }
            }
            Input::Initialized(run) => self.on_initialized(now, run, &mut out),
            Input::Discovered(run, catalogue) => self.on_discovered(now, run, catalogue, &mut out),
            Input::DiscoveryFailed(run, why) => self.on_discovery_failed(now, run, why, &mut out),
            Input::Ended(run, exit) => self.on_ended(now, run, exit, &mut out),
            Input::Tick(activity) => self.on_tick(now, activity, &mut out),
            Input::Sleep { run, idle } => self.on_sleep(now, run, idle, &mut out),
        }
        out
    }

    fn on_start(&mut self, out: &mut Vec<Effect>) {
        match &mut self.phase {
            Phase::Stopped => {
                self.want = Want::Running;
                self.history.clear();
                if self.spec.missing.is_empty() {
                    self.moves(Cause::Asked, Some("starting on request".to_owned()), out);
                    self.begin_again(RestartReason::Manual, None, out);
                } else {
                    self.await_config(out);
                }
            }
            // The old run is still ending: it starts again when that is done.
            Phase::Stopping { then, .. } if *then == Then::Stop => {
                self.want = Want::Running;
                self.history.clear();
                if self.spec.missing.is_empty() {
                    let old_pid = self.pid;
                    *then = Then::Again(Why::Again { reason: RestartReason::Manual, old_pid, attempt: 0 });
                    self.moves(Cause::Asked, Some("starting again when the old run has ended".to_owned()), out);
                } else {
                    *then = Then::AwaitConfig;
                    self.moves(Cause::ConfigMissing, Some(self.missing_message()), out);
                }
            }
            // It takes a decision, not a wish, to leave these.
            Phase::Failed => out.push(self.denied("it is permanently_failed; `satellite restart` leaves that")),
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } => {
                out.push(self.denied("values of its user are missing"));
            }
            Phase::Unserved => out.push(self.denied("its transport is not served by this version")),
            Phase::Stopping { then: Then::Over, .. } => out.push(self.denied("it is being removed")),
            // Wanted already.
            Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Over => {}
        }
    }

    fn on_stop(&mut self, out: &mut Vec<Effect>) {
        match &mut self.phase {
            Phase::Queued { .. } => {
                out.push(Effect::WithdrawPermit);
                self.stop_now(out);
            }
            Phase::Unconfigured | Phase::Unserved | Phase::Backoff { .. } | Phase::Dormant { .. } | Phase::Failed => {
                self.stop_now(out);
            }
            Phase::Starting { .. } | Phase::Ready { .. } | Phase::FallingAsleep { .. } | Phase::Undiscovered { .. } => {
                self.want = Want::Stopped;
                self.end_run(StopKind::Manual, Then::Stop, out);
                self.moves(Cause::Stopped, Some("stopping".to_owned()), out);
                self.refuse(out);
            }
            // A stop wins over a restart, an update and a start that are still waiting for the old run to end.
            Phase::Stopping { then, .. } if *then != Then::Over => {
                *then = Then::Stop;
                self.want = Want::Stopped;
                self.moves(Cause::Stopped, Some("stopping".to_owned()), out);
                self.refuse(out);
            }
            // Stopped already, or ending for good.
            Phase::Stopping { .. } | Phase::Stopped | Phase::Over => {}
        }
    }

    fn stop_now(&mut self, out: &mut Vec<Effect>) {
        self.want = Want::Stopped;
        self.stopped(out);
        self.refuse(out);
    }

    fn on_restart(&mut self, out: &mut Vec<Effect>) {
        match self.phase {
            Phase::Starting { .. } | Phase::Ready { .. } | Phase::FallingAsleep { .. } | Phase::Undiscovered { .. } => {
                self.history.clear();
                let again = Why::Again { reason: RestartReason::Manual, old_pid: self.pid, attempt: 0 };
                self.end_run(StopKind::Manual, Then::Again(again), out);
                self.moves(Cause::Asked, Some("restarting on request".to_owned()), out);
            }
            Phase::Backoff { .. } | Phase::Dormant { .. } | Phase::Failed => {
                self.history.clear();
                self.moves(Cause::Asked, Some("restarting on request".to_owned()), out);
                self.begin_again(RestartReason::Manual, None, out);
            }
            // A start is on its way already; the clean slate is what is new.
            Phase::Queued { .. } | Phase::Stopping { then: Then::Again(_), .. } => self.history.clear(),
            Phase::Stopped | Phase::Stopping { then: Then::Stop, .. } => {
                out.push(self.denied("it is stopped; only `satellite start` undoes that"));
            }
            Phase::Unconfigured | Phase::Stopping { then: Then::AwaitConfig, .. } => {
                out.push(self.denied("values of its user are missing"));
            }
            Phase::Unserved => out.push(self.denied("its transport is not served by this version")),
            Phase::Stopping { then: Then::Over, .. } | Phase::Over => out.push(self.denied("it is being removed")),
        }
    }

    fn on_update(&mut self, spec: Arc<InstanceSpec>, out: &mut Vec<Effect>) {
        if matches!(self.phase, Phase::Over | Phase::Stopping { then: Then::Over, .. }) {
            return;
        }
        self.spec = spec;
        self.history.clear();
        self.catalogue = None;
        let (complete, served) = (self.spec.missing.is_empty(), self.is_served());
        match &mut self.phase {
            Phase::Starting { .. } | Phase::Ready { .. } | Phase::FallingAsleep { .. } | Phase::Undiscovered { .. } => {
                let again = Why::Again { reason: RestartReason::Config, old_pid: self.pid, attempt: 0 };
                self.end_run(StopKind::Config, if complete { Then::Again(again) } else { Then::AwaitConfig }, out);
                self.config_changed(out);
            }
            Phase::Stopping { then: then @ (Then::Again(_) | Then::AwaitConfig), .. } => {
                let again = Why::Again { reason: RestartReason::Config, old_pid: self.pid, attempt: 0 };
                *then = if complete { Then::Again(again) } else { Then::AwaitConfig };
                self.config_changed(out);
            }
            Phase::Unconfigured if complete => {
                self.moves(Cause::Configured, None, out);
                self.take(out);
            }
            Phase::Unconfigured => self.moves(Cause::ConfigMissing, Some(self.missing_message()), out),
            Phase::Queued { .. } if !complete => {
                out.push(Effect::WithdrawPermit);
                self.await_config(out);
            }
            Phase::Queued { .. } if !served => {
                out.push(Effect::WithdrawPermit);
                self.unserved(out);
            }
            // It has not started yet, and will with the new configuration.
            Phase::Queued { why: Why::First | Why::Again { .. }, .. } => {}
            Phase::Queued { why: Why::Wake { .. }, .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Failed
            | Phase::Unserved => {
                if complete {
                    self.config_changed(out);
                    self.begin_again(RestartReason::Config, None, out);
                } else {
                    self.await_config(out);
                }
            }
            // What is configured will be started when a person, or the rest of the configuration, allows it.
            Phase::Stopped | Phase::Stopping { .. } | Phase::Over => {}
        }
    }

    fn config_changed(&mut self, out: &mut Vec<Effect>) {
        if !self.spec.missing.is_empty() {
            self.moves(Cause::ConfigMissing, Some(self.missing_message()), out);
            self.refuse(out);
            return;
        }
        match self.status {
            // A value went missing under a run that is still ending, and is back: it is taken when that has ended.
            Status::AwaitingUserConfig => {
                self.moves(Cause::Configured, Some("starting again when the old run has ended".to_owned()), out);
            }
            Status::Provisioning => {}
            _ => self.moves(Cause::ConfigChanged, Some("its configuration changed".to_owned()), out),
        }
    }

    fn on_end(&mut self, kind: StopKind, out: &mut Vec<Effect>) {
        match &mut self.phase {
            Phase::Starting { .. } | Phase::Ready { .. } | Phase::FallingAsleep { .. } | Phase::Undiscovered { .. } => {
                self.end_run(kind, Then::Over, out);
                self.moves(Cause::Stopped, Some(ending(kind).to_owned()), out);
            }
            Phase::Stopping { then, kind: announced, .. } => {
                *then = Then::Over;
                *announced = kind;
                self.moves(Cause::Stopped, Some(ending(kind).to_owned()), out);
            }
            Phase::Queued { .. } => {
                out.push(Effect::WithdrawPermit);
                self.over(out);
            }
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopped
            | Phase::Failed => self.over(out),
            Phase::Over => {}
        }
        out.push(refuse_ending(kind));
    }

    fn on_call(&mut self, now: Instant, out: &mut Vec<Effect>) {
        match &mut self.phase {
            Phase::Ready { run, .. } | Phase::Undiscovered { run, .. } => out.push(Effect::Admit(*run)),
            Phase::Dormant { since, not_before } => {
                let (since, not_before) = (*since, *not_before);
                let why = Why::Wake { since, asked: now };
                if now < not_before {
                    self.phase = Phase::Backoff { until: not_before, why };
                } else {
                    self.queue(why, true, out);
                }
            }
            Phase::Queued { urgent, .. } => {
                if !*urgent {
                    *urgent = true;
                    out.push(Effect::RequestPermit { urgent: true });
                }
            }
            // The caller waits, up to its own deadline. It never shortens a restart's delay.
            Phase::Starting { .. } | Phase::Backoff { .. } | Phase::Stopping { then: Then::Again(_), .. } => {}
            // Too late for this run. Who still waits when it is gone calls again, and wakes the next.
            Phase::FallingAsleep { .. } => {}
            Phase::Stopping { then: Then::Over, kind, .. } => out.push(refuse_ending(*kind)),
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Stopping { then: Then::Stop | Then::AwaitConfig, .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => self.refuse(out),
        }
    }

    fn on_granted(&mut self, now: Instant, run: Run, out: &mut Vec<Effect>) {
        // A grant that crossed a withdrawal on its way is given back.
        let Phase::Queued { why, .. } = &self.phase else {
            out.push(Effect::ReleasePermit(run));
            return;
        };
        let why = why.clone();
        let wake = matches!(why, Why::Wake { .. });
        self.restarts += u64::from(matches!(why, Why::Again { .. }));
        let discover = !wake || self.catalogue.is_none();
        self.phase = Phase::Starting { run, why, since: now };
        self.permit = Some((run, now + self.spec.policy.session.permit_hold_max));
        self.pid = None;
        self.initialized_at = None;
        if !wake {
            self.moves(Cause::Attempt, Some("starting".to_owned()), out);
        }
        out.push(Effect::Spawn { run, discover });
    }

    fn on_initialized(&mut self, now: Instant, run: Run, out: &mut Vec<Effect>) {
        let Phase::Starting { run: current, why, since } = &self.phase else { return };
        if *current != run {
            return;
        }
        let (why, since) = (why.clone(), *since);
        self.initialized_at = Some(now);
        match why {
            // Its tools are known: it answers after the handshake.
            Why::Wake { .. } if self.catalogue.is_some() => self.ready(now, run, &why, since, out),
            Why::Wake { .. } => {}
            Why::First | Why::Again { .. } => self.moves(Cause::Initialized, None, out),
        }
    }

    fn on_discovered(&mut self, now: Instant, run: Run, catalogue: Arc<Catalogue>, out: &mut Vec<Effect>) {
        if self.run() != Some(run) {
            return;
        }
        match &self.phase {
            // The server announced a change: the lists were read again under an instance that is online.
            Phase::Ready { .. } => self.learn(catalogue, out),
            Phase::Starting { why, since, .. } => {
                let (why, since) = (why.clone(), *since);
                if !matches!(why, Why::Wake { .. }) {
                    self.moves(Cause::Discovered, None, out);
                }
                self.learn(catalogue, out);
                self.ready(now, run, &why, since, out);
            }
            Phase::Undiscovered { why, since, .. } => {
                let (why, since) = (why.clone(), *since);
                if self.status == Status::Error {
                    self.moves(Cause::Initialized, None, out);
                }
                self.moves(Cause::Discovered, None, out);
                self.learn(catalogue, out);
                self.ready(now, run, &why, since, out);
            }
            // It is ending, perhaps because it was configured anew: what it says now is no longer told.
            Phase::FallingAsleep { .. } | Phase::Stopping { .. } => {}
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Queued { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }

    fn learn(&mut self, catalogue: Arc<Catalogue>, out: &mut Vec<Effect>) {
        let before = self.catalogue.replace(catalogue.clone());
        out.push(Effect::Tell(Told::Discovered { before, now: catalogue }));
    }

    fn on_discovery_failed(&mut self, now: Instant, run: Run, reason: String, out: &mut Vec<Effect>) {
        if self.run() != Some(run) {
            return;
        }
        let (why, since, attempt) = match &self.phase {
            Phase::Starting { why, since, .. } => (why.clone(), *since, 1),
            Phase::Undiscovered { why, since, attempt, .. } => (why.clone(), *since, attempt + 1),
            // The old catalogue stays; the next `list_changed` reads again.
            Phase::Ready { .. } => {
                self.last_error = Some(reason);
                return;
            }
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Queued { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => return,
        };
        let delay = restart::reconnect_delay(&self.spec.policy.reconnect, attempt);
        let message = format!("cannot read its tools: {reason}; again in {}", restart::in_seconds(delay));
        self.last_error = Some(reason);
        self.phase = Phase::Undiscovered { run, why, since, attempt, retry_at: Some(now + delay) };
        self.moves(Cause::Failed, Some(message), out);
        // Who waits is tried on the live link: that is how recovery is noticed.
        out.push(Effect::Admit(run));
    }

    fn on_ended(&mut self, now: Instant, run: Run, exit: WorkerExit, out: &mut Vec<Effect>) {
        self.release(run, out);
        if self.run() != Some(run) {
            return;
        }
        let old_pid = exit.pid.or(self.pid);
        self.last_exit = Some(exit.reason());
        self.pid = None;
        self.initialized_at = None;
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Stopping { kind, then, .. } => {
                out.push(Effect::Tell(Told::Stopped { kind, exit }));
                match then {
                    Then::Stop => {
                        self.stopped(out);
                        self.refuse(out);
                    }
                    Then::AwaitConfig => self.await_config(out),
                    Then::Over => self.over(out),
                    Then::Again(why) => self.again(why, out),
                }
            }
            Phase::FallingAsleep { since, idle, .. } if exit.cause == ExitCause::Asked => {
                let last_activity = since.checked_sub(idle).unwrap_or(since);
                out.push(Effect::Tell(Told::Dormant { pid: old_pid, idle, last_activity }));
                self.phase = Phase::Dormant { since: now, not_before: now };
            }
            // Or it ended by itself in the moment in which it was to sleep.
            Phase::Ready { .. } | Phase::FallingAsleep { .. } => self.unwanted(now, &exit, old_pid, true, out),
            Phase::Starting { .. } | Phase::Undiscovered { .. } => self.unwanted(now, &exit, old_pid, false, out),
            // These have no run: the check above ended it.
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Queued { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }

    /// Every unwanted exit is charged to the one budget, whatever its code.
    fn unwanted(&mut self, now: Instant, exit: &WorkerExit, old_pid: Option<u32>, ready: bool, out: &mut Vec<Effect>) {
        let crash = exit.is_crash();
        let policy = &self.spec.policy.restart;
        let verdict = self.history.charge(policy, now, crash, exit.ran.unwrap_or_default());
        out.push(Effect::ChargeTeam);
        let sleeps = ready && !crash && self.spec.keep == Keep::Listed;
        let reason = exit.reason();
        if crash {
            self.last_error = Some(reason.clone());
        }
        let tell = |count, will_restart| {
            let exit = exit.clone();
            Effect::Tell(if crash {
                Told::Crashed { exit, count, will_restart }
            } else {
                Told::Exited { exit, will_restart }
            })
        };
        match verdict {
            Verdict::GiveUp { exits, crashed } => {
                out.push(tell(exits, false));
                let message = restart::give_up_message(policy, exits, crashed);
                self.phase = Phase::Failed;
                self.moves(Cause::BudgetSpent, Some(message.clone()), out);
                out.push(Effect::Tell(Told::PermanentlyFailed { exits, last_error: reason, message }));
                self.refuse(out);
            }
            Verdict::Restart { delay, attempt } if sleeps => {
                out.push(tell(attempt, false));
                self.phase = Phase::Dormant { since: now, not_before: now + delay };
            }
            Verdict::Restart { delay, attempt } => {
                out.push(tell(attempt, true));
                let again = match exit.cause {
                    ExitCause::Unresponsive => RestartReason::Unresponsive,
                    _ if crash => RestartReason::Crash,
                    _ => RestartReason::Exit,
                };
                let why = Why::Again { reason: again, old_pid, attempt };
                let when =
                    if delay.is_zero() { "now".to_owned() } else { format!("in {}", restart::in_seconds(delay)) };
                let message = format!("restarting {when} (attempt {attempt}): {reason}");
                self.moves(Cause::Ended, Some(message), out);
                if delay.is_zero() {
                    self.queue(why, false, out);
                } else {
                    self.phase = Phase::Backoff { until: now + delay, why };
                }
            }
        }
    }

    fn on_tick(&mut self, now: Instant, activity: Option<Activity>, out: &mut Vec<Effect>) {
        if let Some((run, until)) = self.permit
            && now >= until
        {
            self.release(run, out);
        }
        match &mut self.phase {
            Phase::Backoff { until, why } if now >= *until => {
                let why = why.clone();
                let wake = matches!(why, Why::Wake { .. });
                if !wake {
                    self.moves(Cause::Attempt, Some("waiting for a start permit".to_owned()), out);
                }
                self.queue(why, wake, out);
            }
            Phase::Undiscovered { run, retry_at, .. } if retry_at.is_some_and(|at| now >= at) => {
                *retry_at = None;
                out.push(Effect::Discover(*run));
            }
            Phase::Ready { run, since, look_at } if look_at.is_some_and(|at| now >= at) => {
                let policy = &self.spec.policy.idle;
                let verdict = activity.map(|activity| idle::look(policy, *since, activity, now));
                *look_at = match verdict {
                    Some(idle::Verdict::LookAgain(at)) => at,
                    // Looked at again if a call slips in.
                    Some(idle::Verdict::Idle(idle)) => {
                        out.push(Effect::TrySleep { run: *run, idle });
                        idle::next_look(policy, *since, now)
                    }
                    None => idle::next_look(policy, *since, now),
                };
            }
            // Nothing is due.
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }

    fn on_sleep(&mut self, now: Instant, run: Run, idle: Duration, out: &mut Vec<Effect>) {
        match self.phase {
            Phase::Ready { run: current, .. } if current == run => {
                self.phase = Phase::FallingAsleep { run, since: now, idle };
                out.push(Effect::Stop(run));
            }
            // It is said in the same breath in which it was tried: nothing can have come between.
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Queued { .. }
            | Phase::Starting { .. }
            | Phase::Ready { .. }
            | Phase::FallingAsleep { .. }
            | Phase::Undiscovered { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => {}
        }
    }

    /// The incarnation that is there, in whatever state.
    pub fn run(&self) -> Option<Run> {
        match self.phase {
            Phase::Starting { run, .. }
            | Phase::Ready { run, .. }
            | Phase::FallingAsleep { run, .. }
            | Phase::Undiscovered { run, .. }
            | Phase::Stopping { run, .. } => Some(run),
            Phase::Unconfigured
            | Phase::Unserved
            | Phase::Queued { .. }
            | Phase::Backoff { .. }
            | Phase::Dormant { .. }
            | Phase::Stopped
            | Phase::Failed
            | Phase::Over => None,
        }
    }

    fn blank(spec: Arc<InstanceSpec>) -> Self {
        Self {
            spec,
            want: Want::Running,
            phase: Phase::Unconfigured,
            status: Status::Provisioning,
            message: None,
            catalogue: None,
            pid: None,
            restarts: 0,
            last_exit: None,
            last_error: None,
            initialized_at: None,
            history: History::default(),
            permit: None,
            was_ready: false,
        }
    }

    /// The satellite takes a configured instance: `command_received`, and a permit is asked for.
    fn take(&mut self, out: &mut Vec<Effect>) {
        if self.is_served() {
            self.moves(Cause::Taken, Some("waiting for a start permit".to_owned()), out);
            self.queue(Why::First, false, out);
        } else {
            self.unserved(out);
        }
    }

    fn is_served(&self) -> bool {
        matches!(self.spec.target, Target::Stdio { .. })
    }

    fn unserved(&mut self, out: &mut Vec<Effect>) {
        self.phase = Phase::Unserved;
        let message = format!("transport `{}` is not served by this version", self.spec.transport());
        self.moves(Cause::Failed, Some(message), out);
        self.refuse(out);
    }

    fn begin_again(&mut self, reason: RestartReason, old_pid: Option<u32>, out: &mut Vec<Effect>) {
        let why = if self.was_ready { Why::Again { reason, old_pid, attempt: 0 } } else { Why::First };
        self.again(why, out);
    }

    fn again(&mut self, why: Why, out: &mut Vec<Effect>) {
        if !self.is_served() {
            self.unserved(out);
            return;
        }
        if self.status == Status::Provisioning {
            self.moves(Cause::Taken, Some("waiting for a start permit".to_owned()), out);
        }
        self.queue(why, false, out);
    }

    fn queue(&mut self, why: Why, urgent: bool, out: &mut Vec<Effect>) {
        self.phase = Phase::Queued { why, urgent };
        out.push(Effect::RequestPermit { urgent });
    }

    fn ready(&mut self, now: Instant, run: Run, why: &Why, since: Instant, out: &mut Vec<Effect>) {
        let policy = &self.spec.policy.idle;
        let look_at = match self.spec.keep {
            Keep::Listed => idle::first_look(policy, now),
            Keep::AlwaysOn => None,
        };
        self.phase = Phase::Ready { run, since: now, look_at };
        let first = !std::mem::replace(&mut self.was_ready, true);
        let told = match why {
            Why::Wake { since, asked } => Told::Respawned {
                dormant: asked.saturating_duration_since(*since),
                took: now.saturating_duration_since(*asked),
            },
            Why::Again { reason, old_pid, attempt } if !first => {
                Told::Restarted { reason: *reason, old_pid: *old_pid, attempt: *attempt }
            }
            // A restart of what never got to `online` is its first time there.
            Why::First | Why::Again { .. } => Told::Started {
                after: now.saturating_duration_since(since),
                tool_count: self.catalogue.as_ref().map_or(0, |catalogue| catalogue.tools.len()),
            },
        };
        // A wake never left it.
        if self.status != Status::Online {
            self.moves(Cause::Synced, None, out);
        }
        out.push(Effect::Tell(told));
        out.push(Effect::Admit(run));
    }

    /// Ends the run that is there. One that was to sleep is being ended already.
    fn end_run(&mut self, kind: StopKind, then: Then, out: &mut Vec<Effect>) {
        let Some(run) = self.run() else { return };
        if !matches!(self.phase, Phase::FallingAsleep { .. }) {
            out.push(Effect::Stop(run));
        }
        self.phase = Phase::Stopping { run, kind, then };
    }

    fn stopped(&mut self, out: &mut Vec<Effect>) {
        self.phase = Phase::Stopped;
        self.moves(Cause::Stopped, Some("stopped on request".to_owned()), out);
    }

    fn await_config(&mut self, out: &mut Vec<Effect>) {
        self.phase = Phase::Unconfigured;
        self.moves(Cause::ConfigMissing, Some(self.missing_message()), out);
        self.refuse(out);
    }

    fn missing_message(&self) -> String {
        format!("waiting for its user to give {}", self.spec.missing.join(", "))
    }

    fn over(&mut self, out: &mut Vec<Effect>) {
        self.phase = Phase::Over;
        out.push(Effect::Remove);
    }

    fn denied(&self, why: &str) -> Effect {
        Effect::Denied(format!("nothing was done with `{}`: {why}", self.spec.name))
    }

    fn release(&mut self, run: Run, out: &mut Vec<Effect>) {
        if self.permit.is_some_and(|(held, _)| held == run) {
            self.permit = None;
            out.push(Effect::ReleasePermit(run));
        }
    }

    /// The callers that wait are refused with what the status asks of them.
    fn refuse(&self, out: &mut Vec<Effect>) {
        let name = &self.spec.name;
        let message = self.message.as_deref().unwrap_or_default();
        out.push(Effect::Refuse(match self.status {
            Status::PermanentlyFailed => {
                format!("`{name}` is permanently_failed: {message} Run `satellite restart {name}` when it is mended.")
            }
            Status::AwaitingUserConfig => {
                format!("`{name}` is awaiting_user_config: {message}. Give the value in the configuration of the user.")
            }
            Status::Offline if self.want == Want::Stopped => {
                format!("`{name}` is stopped. Run `satellite start {name}` to have it back.")
            }
            status => format!("`{name}` is {status}: {message}"),
        }));
    }

    fn moves(&mut self, cause: Cause, message: Option<String>, out: &mut Vec<Effect>) {
        match status::next(self.status, cause) {
            Some(next) => self.becomes(next, message, out),
            None => out.push(Effect::Refused { status: self.status, cause }),
        }
    }

    fn becomes(&mut self, status: Status, message: Option<String>, out: &mut Vec<Effect>) {
        self.status = status;
        self.message.clone_from(&message);
        out.push(Effect::Status { status, message });
    }
}

fn refuse_ending(kind: StopKind) -> Effect {
    Effect::Refuse(ending(kind).to_owned())
}

fn ending(kind: StopKind) -> &'static str {
    match kind {
        StopKind::Uninstall => "it was uninstalled",
        StopKind::Shutdown => "the satellite is shutting down",
        StopKind::Manual | StopKind::Config => "it is ending",
    }
}
