//! Inputs and effects of a slot, and the events that it reports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::model::catalogue::{Catalogue, CatalogueAspect};
use crate::model::era::Era;
use crate::model::event::{RestartReason, StopKind};
use crate::model::exit::WorkerExit;
use crate::model::ids::RunNumber;
use crate::model::remedy::Remedy;
use crate::model::remote::ServerInfo;
use crate::model::spec::InstanceSpec;
use crate::model::status::{Status, StatusCause};
use crate::rules::idle::RunActivity;

/// Change of the health of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthChange {
    /// Too many consecutive checks have failed.
    Degraded {
        /// Number of consecutive failures.
        failures: u32,
        /// Error of the last check.
        last_error: String,
    },
    /// The server answers again.
    Restored {
        /// Number of failures before.
        failures: u32,
        /// Error of the last failed check.
        last_error: Option<String>,
    },
}

/// Inputs of a slot.
#[derive(Debug, Clone)]
pub enum SlotInput {
    /// A person starts the instance.
    Start,
    /// A person stops the instance.
    Stop,
    /// A person restarts the instance, with an empty exit history.
    Restart,
    /// A person requests a new connection; a process is restarted.
    Reconnect,
    /// The configuration has changed.
    Update(Arc<InstanceSpec>),
    /// The installation has been removed.
    Uninstall,
    /// The satellite is shutting down.
    Shutdown,
    /// A caller needs a run that accepts calls.
    Call,
    /// A start permit for the run with this number was granted.
    Granted(RunNumber),
    /// The first byte of the server arrived: the expensive part of its start is over.
    FirstByte(RunNumber),
    /// The process with this ID was started.
    Spawned(RunNumber, Option<u32>),
    /// The handshake is complete. Contains the self-description of the server.
    Initialized(RunNumber, Arc<ServerInfo>),
    /// The server of an earlier satellite has answered: its session continues. Contains its self-description and the time
    /// of its handshake.
    Adopted(RunNumber, Arc<ServerInfo>, Instant),
    /// The process wrote a line to stdout that is not JSON-RPC.
    StdoutLine(RunNumber, String),
    /// The lists were read.
    Discovered(RunNumber, Arc<Catalogue>),
    /// The lists could not be read on a working connection: the reason, and the minimum delay before the next attempt.
    DiscoveryFailed(RunNumber, String, Duration),
    /// The run has ended completely.
    Ended(RunNumber, WorkerExit),
    /// A call succeeded although the lists could not be read.
    Recovered(RunNumber),
    /// The server refused the first request of the other era, and this era is tried.
    EraChanged(RunNumber, Era),
    /// The health of the server has changed.
    Health(RunNumber, HealthChange),
    /// The machine was suspended for this duration.
    ResumedAfterSuspend(Duration),
    /// Memory is short, and the instance has been idle for this duration: it sleeps if permitted.
    FreeMemory(Duration),
    /// A deadline of this slot may have passed. Contains the activity of its open run, if there is one.
    Tick(Option<RunActivity>),
    /// The run accepts no more calls, as requested by [`SlotEffect::TrySleep`].
    Sleep {
        /// Run that falls asleep.
        run: RunNumber,
        /// Idle time of the run.
        idle: Duration,
    },
}

impl SlotInput {
    /// Returns the run that the input is an event of. A grant is not: its run does not exist yet.
    pub(super) fn run(&self) -> Option<RunNumber> {
        match self {
            Self::Spawned(run, _)
            | Self::Initialized(run, _)
            | Self::Adopted(run, ..)
            | Self::StdoutLine(run, _)
            | Self::Discovered(run, _)
            | Self::DiscoveryFailed(run, ..)
            | Self::Ended(run, _)
            | Self::Recovered(run)
            | Self::EraChanged(run, _)
            | Self::Health(run, _)
            | Self::Sleep { run, .. } => Some(*run),
            // A permit may outlive the run in the slot.
            Self::FirstByte(_)
            | Self::Start
            | Self::Stop
            | Self::Restart
            | Self::Reconnect
            | Self::Update(_)
            | Self::Uninstall
            | Self::Shutdown
            | Self::Call
            | Self::Granted(_)
            | Self::ResumedAfterSuspend(_)
            | Self::FreeMemory(_)
            | Self::Tick(_) => None,
        }
    }
}

/// Effects that the supervisor of the team executes.
#[derive(Debug, Clone)]
pub enum SlotEffect {
    /// Request a start permit.
    RequestPermit {
        /// True if a caller waits.
        urgent: bool,
    },
    /// Withdraw the request for a permit.
    WithdrawPermit,
    /// Release the permit of a run.
    ReleasePermit(RunNumber),
    /// Start a worker.
    Spawn {
        /// Number of the run.
        run: RunNumber,
        /// Specification of the run.
        spec: Arc<InstanceSpec>,
        /// True if the worker must read the lists before the run is ready.
        discover: bool,
        /// True if the worker takes over the running server of an earlier satellite.
        adopts: bool,
    },
    /// Stop the worker gracefully.
    Stop(RunNumber),
    /// Shorten the grace period of a run that is being stopped, because a caller waits for its end.
    ShortenGrace(RunNumber),
    /// Make the run refuse new calls, and end when the current ones are answered.
    Drain(RunNumber),
    /// Make the run refuse new calls unless one is in progress, and then send [`SlotInput::Sleep`].
    TrySleep {
        /// Idle run.
        run: RunNumber,
        /// Idle time of the run.
        idle: Duration,
    },
    /// Read the lists again on the existing connection.
    Discover(RunNumber),
    /// Check at once whether the server is still reachable.
    Check(RunNumber),
    /// Apply another configuration to an existing run.
    ApplySpec {
        /// Run that continues.
        run: RunNumber,
        /// New specification.
        spec: Arc<InstanceSpec>,
    },
    /// Publish a new status to the registry and as an event.
    Status {
        /// New status.
        status: Status,
        /// Short reason for people.
        message: Option<String>,
        /// Next step, if waiting does not help.
        remedy: Option<Remedy>,
    },
    /// Log an invalid transition.
    LogInvalidTransition {
        /// Unchanged status.
        status: Status,
        /// Cause that is invalid in this status.
        cause: StatusCause,
    },
    /// Charge an unwanted exit to the budget of the team.
    ChargeTeam,
    /// Emit an event.
    Emit(SlotEvent),
    /// Give this run to the waiting callers.
    Admit(RunNumber),
    /// Refuse the waiting callers.
    RefuseCallers {
        /// Status and its cause.
        message: String,
        /// Next step for the callers.
        remedy: Option<Remedy>,
    },
    /// Inform the waiting callers that the attempt has failed.
    FailCallers {
        /// Error of the attempt.
        last_error: String,
        /// Time of the next attempt; `None` if none is scheduled.
        retry_at: Option<Instant>,
    },
    /// Reject a request of a person.
    RejectCommand {
        /// Failed request and its cause.
        message: String,
        /// Next step for the person.
        remedy: Option<Remedy>,
    },
    /// Remove the slot.
    Remove,
}

impl SlotEffect {
    /// Returns true if the effect may change the snapshot.
    pub fn is_visible(&self) -> bool {
        match self {
            Self::Spawn { .. }
            | Self::Stop(_)
            | Self::Drain(_)
            | Self::Discover(_)
            | Self::Status { .. }
            | Self::ChargeTeam
            | Self::Emit(_)
            | Self::ApplySpec { .. }
            | Self::FailCallers { .. }
            | Self::Remove => true,
            Self::RequestPermit { .. }
            | Self::WithdrawPermit
            | Self::ReleasePermit(_)
            | Self::TrySleep { .. }
            | Self::Check(_)
            | Self::ShortenGrace(_)
            | Self::LogInvalidTransition { .. }
            | Self::Admit(_)
            | Self::RefuseCallers { .. }
            | Self::RejectCommand { .. } => false,
        }
    }
}

/// Events of a slot, before the names and wall-clock times are added.
#[derive(Debug, Clone)]
pub enum SlotEvent {
    /// The instance is ready for the first time.
    Started {
        /// Time from the permit to the ready state.
        after: Duration,
        /// Number of tools.
        tool_count: usize,
    },
    /// The instance is ready after a restart.
    Restarted {
        /// Cause of the restart.
        reason: RestartReason,
        /// Process ID of the run before.
        old_pid: Option<u32>,
        /// Number of unwanted exits in the window.
        attempt: usize,
    },
    /// The instance was put to sleep.
    Dormant {
        /// Process ID of the ended run.
        pid: Option<u32>,
        /// Idle time before the sleep.
        idle: Duration,
        /// Time of the last activity.
        last_activity: Instant,
    },
    /// The instance is awake again.
    Respawned {
        /// Duration of the sleep.
        dormant: Duration,
        /// Time from the call to the ready state.
        took: Duration,
    },
    /// The server of an earlier satellite runs on, and its lists were read.
    Adopted {
        /// Time from the adoption to the ready state.
        after: Duration,
        /// Time since the handshake of the server.
        age: Duration,
        /// Number of tools.
        tool_count: usize,
    },
    /// The session with the server of an earlier satellite could not be continued, and the server is restarted.
    NotAdopted {
        /// Details of the exit.
        exit: WorkerExit,
    },
    /// The catalogue was read.
    Discovered {
        /// Catalogue before, if there was one.
        before: Option<Arc<Catalogue>>,
        /// Current catalogue.
        now: Arc<Catalogue>,
    },
    /// An established connection was closed or lost.
    Disconnected {
        /// True if it was closed on request.
        intentional: bool,
    },
    /// The connection will be retried.
    Reconnecting {
        /// Number of the next attempt.
        attempt: u32,
        /// Time until the next attempt.
        after: Duration,
    },
    /// The connection is established again.
    Reconnected {
        /// Number of attempts since the connection was lost or closed, the successful one included.
        attempts: u32,
        /// Parts of the catalogue that have changed.
        changed: Vec<CatalogueAspect>,
    },
    /// The health of the server has changed.
    Health(HealthChange),
    /// The run ended on request.
    Stopped {
        /// Reason of the stop.
        kind: StopKind,
        /// Details of the exit.
        exit: WorkerExit,
    },
    /// The instance was removed. The only event of a removal, in every phase.
    Removed {
        /// True if the instance had a process or a connection, or one was starting.
        active: bool,
        /// True if the instance was asleep.
        dormant: bool,
        /// Details of the exit of its last process, if there was one.
        exit: Option<WorkerExit>,
    },
    /// A new configuration did not start beside the old one, which stays in use.
    UpdateRejected {
        /// Reason of the failure.
        reason: String,
    },
    /// The process exited without a request, with code 0.
    Exited {
        /// Details of the exit.
        exit: WorkerExit,
        /// True if it is started again without a call.
        will_restart: bool,
    },
    /// The run crashed.
    Crashed {
        /// Details of the exit.
        exit: WorkerExit,
        /// Number of unwanted exits in the window.
        count: usize,
        /// True if it is started again.
        will_restart: bool,
    },
    /// The restart budget is exhausted.
    PermanentlyFailed {
        /// Number of unwanted exits in the window.
        exits: usize,
        /// Reason of the last exit.
        last_error: String,
        /// Status message.
        message: String,
        /// Next step for the user.
        remedy: Remedy,
    },
}
