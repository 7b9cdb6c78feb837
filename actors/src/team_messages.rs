//! Messages to the supervisor of a team, and their replies. The workers import this file instead of the supervisor,
//! which imports the workers.

use std::sync::Arc;

use ractor::ActorRef;
use tokio::sync::oneshot;

use crate::calls::CallPort;
use crate::model::exit::{CallError, WorkerExit};
use crate::model::ids::{InstanceId, RunNumber};
use crate::model::remedy::Remedy;
use crate::model::snapshot::ProcessContainment;
use crate::model::spec::InstanceSpec;
use crate::model::status::Status;
use crate::probe::ActorProbe;
use crate::registry;
use crate::rules::slot::{SlotInput, SlotMemo};

/// Commands for an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstanceCommand {
    /// Run, and take calls.
    Start,
    /// Stop, and stay stopped.
    Stop,
    /// Restart now.
    Restart,
}

/// Reason why a command was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The instance does not exist, or not for this caller.
    #[error("no such server")]
    NotFound,
    /// The command is not possible in the current state.
    #[error("{message}")]
    Refused {
        /// Failed command and the reason.
        message: String,
        /// Suggested next step.
        remedy: Option<Remedy>,
    },
    /// Another command undid this one before it was complete.
    #[error("another command superseded this one")]
    Superseded,
    /// The satellite is shutting down.
    #[error("the satellite is shutting down")]
    Closing,
}

/// State of an instance before its uninstall.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct UninstallOutcome {
    /// True if it had a process or a connection, or one was being started.
    pub active: bool,
    /// True if it was dormant.
    pub dormant: bool,
}

/// Result of a reconnect.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ReconnectOutcome {
    /// True if the instance takes calls now.
    pub success: bool,
    /// Status after the attempt.
    pub status: Status,
    /// Reason for the status.
    pub status_message: Option<String>,
}

pub(crate) type ControlReply<T> = oneshot::Sender<Result<T, ControlError>>;

/// Messages to a team's supervisor.
///
/// `Install` contains the earlier state, if any: the supervisor was replaced, or the tools are known. `ResumedAfterSuspend` contains
/// the duration of a suspend. The supervisor sends `Ended` to itself so that it arrives after all messages of the
/// worker. `Registry` announces a new registry, which must receive every instance. `Panic` panics on purpose, for the
/// load harness and the tests; `PanicFor` attributes the panic to an instance.
pub(crate) enum Msg {
    Install(Arc<InstanceSpec>, Option<Box<SlotMemo>>),
    Update(Arc<InstanceSpec>),
    Uninstall(InstanceId, ControlReply<UninstallOutcome>),
    Control(InstanceId, InstanceCommand, ControlReply<()>),
    Reconnect(InstanceId, ControlReply<ReconnectOutcome>),
    ResumedAfterSuspend(std::time::Duration),
    Ensure(InstanceId, oneshot::Sender<Result<CallPort, CallError>>),
    Granted(InstanceId, RunNumber),
    Spawned(InstanceId, RunNumber, SpawnedRun),
    Input(InstanceId, SlotInput),
    Ended(InstanceId, RunNumber, WorkerExit),
    Tick,
    Registry(ActorRef<registry::Msg>),
    Shutdown,
    Probe(ActorProbe),
    Panic(Option<InstanceId>),
    PanicFor(InstanceId),
}

impl Msg {
    pub(crate) fn instance(&self) -> Option<&InstanceId> {
        match self {
            Self::Install(spec, _) | Self::Update(spec) => Some(&spec.id),
            Self::Uninstall(id, _)
            | Self::Control(id, ..)
            | Self::Reconnect(id, _)
            | Self::Ensure(id, _)
            | Self::Granted(id, _)
            | Self::Spawned(id, ..)
            | Self::Input(id, _)
            | Self::Ended(id, ..)
            | Self::PanicFor(id) => Some(id),
            Self::ResumedAfterSuspend(_)
            | Self::Tick
            | Self::Registry(_)
            | Self::Shutdown
            | Self::Probe(_)
            | Self::Panic(_) => None,
        }
    }
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

pub(crate) struct SpawnedRun {
    pub(crate) pid: Option<u32>,
    pub(crate) containment: Option<Arc<ProcessContainment>>,
    pub(crate) port: CallPort,
}
