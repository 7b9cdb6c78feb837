//! What a slot is told, and what it wants done.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::HealthNews;
use crate::model::catalogue::{Aspect, Catalogue};
use crate::model::era::Era;
use crate::model::event::{RestartReason, StopKind};
use crate::model::exit::WorkerExit;
use crate::model::ids::Run;
use crate::model::remedy::Remedy;
use crate::model::remote::ServerInfo;
use crate::model::spec::InstanceSpec;
use crate::model::status::{Cause, Status};
use crate::rules::idle::Activity;

/// What happens to a slot.
#[derive(Debug, Clone)]
pub enum Input {
    /// A person: be there when called.
    Start,
    /// A person: stay down.
    Stop,
    /// A person: start again now, with a clean slate.
    Restart,
    /// A person: make the connection anew; a process is restarted.
    Reconnect,
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
    /// The handshake is done, and what the server said of itself.
    Initialized(Run, Arc<ServerInfo>),
    /// Its process wrote a line to stdout that is not JSON-RPC.
    Printed(Run, String),
    /// All lists were read.
    Discovered(Run, Arc<Catalogue>),
    /// The lists could not be read; the link is alive.
    DiscoveryFailed(Run, String, Duration),
    /// The run is over and nothing of it is left.
    Ended(Run, WorkerExit),
    /// A call has succeeded although the lists could not be read.
    Recovered(Run),
    /// Its server does not take the other era's opening, and is tried in this one.
    Leans(Run, Era),
    /// What health checks found.
    Health(Run, HealthNews),
    /// The machine was suspended for so long.
    Woke(Duration),
    /// Memory is short, and it has been idle for so long: it is put to sleep if it may sleep.
    MakeRoom(Duration),
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
        /// What it is to be.
        spec: Arc<InstanceSpec>,
        /// Whether the catalogue must be read before it is ready.
        discover: bool,
    },
    /// End the worker with grace.
    Stop(Run),
    /// A caller waits for the end of a run that was told to end: little of its grace is left to it.
    Hurry(Run),
    /// Let the run take no calls any more, and end when those inside are answered.
    Drain(Run),
    /// Let the run take no calls any more, unless one is inside; then say [`Input::Sleep`].
    TrySleep {
        /// The incarnation.
        run: Run,
        /// How long nobody has needed it.
        idle: Duration,
    },
    /// Read the lists again on the live link.
    Discover(Run),
    /// Find out at once whether the server is still there.
    Check(Run),
    /// Another configuration for a run that goes on under it.
    Adopt {
        /// The incarnation.
        run: Run,
        /// The configuration.
        spec: Arc<InstanceSpec>,
    },
    /// The status moved; tell the registry and the events.
    Status {
        /// The new one.
        status: Status,
        /// In a few words, for people.
        message: Option<String>,
        /// The next step, where waiting does not help.
        remedy: Option<Remedy>,
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
    /// Refuse the callers that wait, with the status, its cause and the next step.
    Refuse {
        /// The status and its cause.
        message: String,
        /// The next step.
        remedy: Option<Remedy>,
    },
    /// The callers that wait are told that the attempt has failed, and when the next one is.
    Unreachable {
        /// Why it failed.
        last_error: String,
        /// The next one; none if none comes by itself.
        retry_at: Option<Instant>,
    },
    /// Reject the request, with the cause and the next step.
    Denied {
        /// The request that failed and its cause.
        message: String,
        /// The next step.
        remedy: Option<Remedy>,
    },
    /// The slot is over: drop it.
    Remove,
}

impl Effect {
    /// Whether readers of the snapshot may see a difference.
    pub fn shows(&self) -> bool {
        match self {
            Self::Spawn { .. }
            | Self::Stop(_)
            | Self::Drain(_)
            | Self::Discover(_)
            | Self::Status { .. }
            | Self::ChargeTeam
            | Self::Tell(_)
            | Self::Adopt { .. }
            | Self::Unreachable { .. }
            | Self::Remove => true,
            Self::RequestPermit { .. }
            | Self::WithdrawPermit
            | Self::ReleasePermit(_)
            | Self::TrySleep { .. }
            | Self::Check(_)
            | Self::Hurry(_)
            | Self::Refused { .. }
            | Self::Admit(_)
            | Self::Refuse { .. }
            | Self::Denied { .. } => false,
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
    /// A connection that was there is not any more.
    Disconnected {
        /// Whether somebody wanted that.
        intentional: bool,
    },
    /// It is tried again.
    Reconnecting {
        /// Which attempt that is.
        attempt: u32,
        /// When.
        after: Duration,
    },
    /// It is there again.
    Reconnected {
        /// Attempts since it was lost or closed, the one that succeeded among them.
        attempts: u32,
        /// What is not as it was.
        changed: Vec<Aspect>,
    },
    /// What health checks found.
    Health(HealthNews),
    /// Ended on request.
    Stopped {
        /// Whose.
        kind: StopKind,
        /// How.
        exit: WorkerExit,
    },
    /// Removed on request: the one event of a removal, whatever the instance was doing.
    Removed {
        /// Whether it had a process or a connection, or one was under way.
        active: bool,
        /// Whether it was asleep.
        dormant: bool,
        /// How its last process ended, if it had one.
        exit: Option<WorkerExit>,
    },
    /// A new configuration did not come up beside the old one, which stays.
    NotTaken {
        /// Why.
        reason: String,
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
        /// The status message.
        message: String,
        /// The next step.
        remedy: Remedy,
    },
}
