//! Next steps for a person, as values: each interface has its own wording.

use serde::{Deserialize, Serialize};

use super::status::Status;

/// Next step for an instance that does not recover by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// Restart it, once the cause is fixed.
    Restart,
    /// Start it: it was stopped on request.
    Start,
    /// Give it the values that its user must give.
    Configure,
    /// Renew its credentials or its authorization.
    Authorize,
    /// Connect to the remote server again.
    Reconnect,
    /// Read its logs: the process runs and does not answer as it should.
    ReadLogs,
}

impl Remedy {
    /// Returns the next step for an instance with this status; `None` if there is nothing to do but wait.
    pub fn for_status(status: Status, is_stopped: bool, is_remote: bool) -> Option<Self> {
        match status {
            Status::AwaitingUserConfig => Some(Self::Configure),
            Status::RequiresReauth => Some(Self::Authorize),
            Status::PermanentlyFailed => Some(Self::Restart),
            Status::Offline if is_stopped => Some(Self::Start),
            Status::Error if is_remote => Some(Self::Reconnect),
            Status::Error => Some(Self::ReadLogs),
            Status::Offline
            | Status::Provisioning
            | Status::CommandReceived
            | Status::Connecting
            | Status::DiscoveringTools
            | Status::SyncingTools
            | Status::Online
            | Status::Restarting => None,
        }
    }
}
