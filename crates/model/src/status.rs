//! The twelve statuses of an instance and their transitions.

use serde::{Deserialize, Serialize};
use strum::VariantArray;

/// Status of an instance, as shown to its user. Only `online` offers tools.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::IntoStaticStr,
    VariantArray,
)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Status {
    /// A value that the user must give is missing.
    AwaitingUserConfig,
    /// Installed, not yet taken by the satellite.
    Provisioning,
    /// Taken; waits for a start permit.
    CommandReceived,
    /// Handshake under way, or a restart's delay.
    Connecting,
    /// The lists of the server are being read.
    DiscoveringTools,
    /// The catalogue is being published.
    SyncingTools,
    /// Tools are offered. A call succeeds or changes the status.
    Online,
    /// The configuration changed; the old run is ending.
    Restarting,
    /// Unreachable and recovering by itself, or stopped on request.
    Offline,
    /// The connection works but the lists cannot be read, or the server answers incorrectly. Retried if the policy
    /// allows it.
    Error,
    /// New credentials are needed.
    RequiresReauth,
    /// Ended too often; waits for a manual restart or a config update.
    PermanentlyFailed,
}

impl Status {
    /// Statuses in the order of the specification.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns true if this status ends by itself within the time of a handshake or restart.
    pub fn is_transitional(self) -> bool {
        matches!(
            self,
            Self::Provisioning
                | Self::CommandReceived
                | Self::Connecting
                | Self::DiscoveringTools
                | Self::SyncingTools
                | Self::Restarting
        )
    }
}

/// Causes of a change of status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, VariantArray)]
pub enum StatusCause {
    /// A required value is missing in the configuration.
    ConfigMissing,
    /// The configuration is complete.
    Configured,
    /// The satellite accepts the instance and requests a start permit.
    Accepted,
    /// An attempt begins: a permit was granted, a delay ended, or a connection is retried.
    Attempt,
    /// `notifications/initialized` was sent.
    Initialized,
    /// Every list was read.
    Discovered,
    /// The catalogue was published.
    Synced,
    /// The catalogue is known from an earlier satellite, and the instance sleeps until it is called.
    Restored,
    /// The configuration of a running instance changed.
    ConfigChanged,
    /// The run ended without a request and will be restarted.
    Ended,
    /// The run ended without a request, and the restart budget is exhausted.
    BudgetSpent,
    /// The connection was lost, or the server cannot be reached.
    Lost,
    /// The lists could not be read, the server answers incorrectly, or the attempts of a bounded policy are exhausted.
    Failed,
    /// The server rejected the credentials.
    AuthRefused,
    /// The credentials were replaced.
    CredentialsChanged,
    /// A person requested a stop.
    Stopped,
    /// A person requested a start or a restart.
    Requested,
}

impl StatusCause {
    /// Causes, each of them once.
    pub const ALL: &[Self] = Self::VARIANTS;
}

/// Returns the next status, or `None` if the cause is not valid in this one. Every change of a status goes through this
/// function; an invalid transition is logged and changes nothing.
///
/// ```text
/// awaiting_user_config → provisioning → command_received → connecting → discovering_tools → syncing_tools → online
///                                                              ↑  restart's delay, attempt            │
///                        offline, error, requires_reauth, permanently_failed, restarting ←────────────┘
/// ```
pub fn next(status: Status, cause: StatusCause) -> Option<Status> {
    use Status::{
        AwaitingUserConfig, CommandReceived, Connecting, DiscoveringTools, Error, Offline, Online, PermanentlyFailed,
        Provisioning, RequiresReauth, Restarting, SyncingTools,
    };
    match cause {
        // A configuration update can remove a required value in every status, and a stop is possible in every status.
        StatusCause::ConfigMissing => Some(AwaitingUserConfig),
        StatusCause::Stopped => Some(Offline),

        StatusCause::Configured => match status {
            AwaitingUserConfig => Some(Provisioning),
            Provisioning | CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online | Restarting
            | Offline | Error | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::Accepted => match status {
            Provisioning => Some(CommandReceived),
            AwaitingUserConfig | CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online
            | Restarting | Offline | Error | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::Restored => match status {
            Provisioning => Some(Online),
            AwaitingUserConfig | CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online
            | Restarting | Offline | Error | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::Attempt => match status {
            CommandReceived | Connecting | Restarting | Offline | Error => Some(Connecting),
            // A wake is not an attempt: its status stays `online`. The other statuses wait for a person.
            AwaitingUserConfig | Provisioning | DiscoveringTools | SyncingTools | Online | RequiresReauth
            | PermanentlyFailed => None,
        },
        StatusCause::Initialized => match status {
            Connecting | Error => Some(DiscoveringTools),
            AwaitingUserConfig | Provisioning | CommandReceived | DiscoveringTools | SyncingTools | Online
            | Restarting | Offline | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::Discovered => match status {
            DiscoveringTools => Some(SyncingTools),
            AwaitingUserConfig | Provisioning | CommandReceived | Connecting | SyncingTools | Online | Restarting
            | Offline | Error | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::Synced => match status {
            DiscoveringTools | SyncingTools => Some(Online),
            AwaitingUserConfig | Provisioning | CommandReceived | Connecting | Online | Restarting | Offline
            | Error | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::ConfigChanged => match status {
            CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Error | Offline
            | RequiresReauth | PermanentlyFailed => Some(Restarting),
            // No run exists yet: the next start uses the new configuration.
            AwaitingUserConfig | Provisioning => None,
        },
        StatusCause::Ended => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Error => Some(Connecting),
            AwaitingUserConfig | Provisioning | CommandReceived | Offline | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::BudgetSpent => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Error => Some(PermanentlyFailed),
            AwaitingUserConfig | Provisioning | CommandReceived | Offline | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::Lost => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Offline | Error => Some(Offline),
            AwaitingUserConfig | Provisioning | CommandReceived | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::Failed => match status {
            Provisioning | CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online | Restarting
            | Offline | Error => Some(Error),
            AwaitingUserConfig | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::AuthRefused => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Offline | Error => {
                Some(RequiresReauth)
            }
            AwaitingUserConfig | Provisioning | CommandReceived | RequiresReauth | PermanentlyFailed => None,
        },
        StatusCause::CredentialsChanged => match status {
            RequiresReauth => Some(Connecting),
            AwaitingUserConfig | Provisioning | CommandReceived | Connecting | DiscoveringTools | SyncingTools
            | Online | Restarting | Offline | Error | PermanentlyFailed => None,
        },
        StatusCause::Requested => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Offline | Error | RequiresReauth
            | PermanentlyFailed => Some(Connecting),
            AwaitingUserConfig | Provisioning | CommandReceived => None,
        },
    }
}
