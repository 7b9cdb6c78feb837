//! The twelve statuses of an instance, and the one function by which they change.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What an instance is, for its user. Only `online` offers tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// A value that the user must give is missing.
    AwaitingUserConfig,
    /// Installed, not yet taken by the satellite.
    Provisioning,
    /// Taken; waits for a start permit.
    CommandReceived,
    /// Handshake under way, or a restart's delay.
    Connecting,
    /// Its lists are being read.
    DiscoveringTools,
    /// Its catalogue is being handed over.
    SyncingTools,
    /// A call succeeds, or it moves the status.
    Online,
    /// Its configuration changed; the old run is ending.
    Restarting,
    /// Unreachable and recovering by itself, or stopped on request.
    Offline,
    /// A link that lives and cannot be read, or a server that is there and does not answer as one should. It is tried again
    /// where the policy says so.
    Error,
    /// New credentials are needed.
    RequiresReauth,
    /// Ended too often; waits for a manual restart or a config update.
    PermanentlyFailed,
}

impl Status {
    /// All of them, in the order of the specification.
    pub const ALL: [Self; 12] = [
        Self::AwaitingUserConfig,
        Self::Provisioning,
        Self::CommandReceived,
        Self::Connecting,
        Self::DiscoveringTools,
        Self::SyncingTools,
        Self::Online,
        Self::Restarting,
        Self::Offline,
        Self::Error,
        Self::RequiresReauth,
        Self::PermanentlyFailed,
    ];

    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AwaitingUserConfig => "awaiting_user_config",
            Self::Provisioning => "provisioning",
            Self::CommandReceived => "command_received",
            Self::Connecting => "connecting",
            Self::DiscoveringTools => "discovering_tools",
            Self::SyncingTools => "syncing_tools",
            Self::Online => "online",
            Self::Restarting => "restarting",
            Self::Offline => "offline",
            Self::Error => "error",
            Self::RequiresReauth => "requires_reauth",
            Self::PermanentlyFailed => "permanently_failed",
        }
    }

    /// Whether this status passes by itself within a handshake's or a restart's time.
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

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Why a status changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A required value is missing from the configuration.
    ConfigMissing,
    /// The configuration is complete.
    Configured,
    /// The satellite takes the instance and asks for a start permit.
    Taken,
    /// An attempt begins: a permit was granted, a delay is over, a link is tried again.
    Attempt,
    /// `notifications/initialized` was sent.
    Initialized,
    /// Every list was read.
    Discovered,
    /// The catalogue is handed over.
    Synced,
    /// Its catalogue is known from before, and it sleeps until it is called.
    Recalled,
    /// The configuration changed under a running instance.
    ConfigChanged,
    /// The run ended unasked and will be restarted.
    Ended,
    /// The run ended unasked once too often.
    BudgetSpent,
    /// The link was lost, or the server cannot be reached.
    Lost,
    /// The lists could not be read on a live link, the server does not answer as one should, or a bounded policy ran out.
    Failed,
    /// The server refused the credentials.
    AuthRefused,
    /// Other credentials were given.
    CredentialsChanged,
    /// A person asked for it to stop.
    Stopped,
    /// A person asked for it to start or to restart.
    Asked,
}

impl Cause {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::ConfigMissing,
        Self::Configured,
        Self::Taken,
        Self::Attempt,
        Self::Initialized,
        Self::Discovered,
        Self::Synced,
        Self::Recalled,
        Self::ConfigChanged,
        Self::Ended,
        Self::BudgetSpent,
        Self::Lost,
        Self::Failed,
        Self::AuthRefused,
        Self::CredentialsChanged,
        Self::Stopped,
        Self::Asked,
    ];
}

/// The one way a status changes: the next status, or `None` where the cause makes no sense in this one. A refused
/// transition is logged and changes nothing.
///
/// ```text
/// awaiting_user_config → provisioning → command_received → connecting → discovering_tools → syncing_tools → online
///                                                              ↑  restart's delay, attempt            │
///                        offline, error, requires_reauth, permanently_failed, restarting ←────────────┘
/// ```
pub fn next(status: Status, cause: Cause) -> Option<Status> {
    use Status::{
        AwaitingUserConfig, CommandReceived, Connecting, DiscoveringTools, Error, Offline, Online, PermanentlyFailed,
        Provisioning, RequiresReauth, Restarting, SyncingTools,
    };
    match cause {
        // A config update can take a required value away in every status, a stop can come in every one.
        Cause::ConfigMissing => Some(AwaitingUserConfig),
        Cause::Stopped => Some(Offline),

        Cause::Configured => match status {
            AwaitingUserConfig => Some(Provisioning),
            Provisioning | CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online | Restarting
            | Offline | Error | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::Taken => match status {
            Provisioning => Some(CommandReceived),
            AwaitingUserConfig | CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online
            | Restarting | Offline | Error | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::Recalled => match status {
            Provisioning => Some(Online),
            AwaitingUserConfig | CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online
            | Restarting | Offline | Error | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::Attempt => match status {
            CommandReceived | Connecting | Restarting | Offline | Error => Some(Connecting),
            // A wake is no attempt: its status stays `online`. The others wait for a person.
            AwaitingUserConfig | Provisioning | DiscoveringTools | SyncingTools | Online | RequiresReauth
            | PermanentlyFailed => None,
        },
        Cause::Initialized => match status {
            Connecting | Error => Some(DiscoveringTools),
            AwaitingUserConfig | Provisioning | CommandReceived | DiscoveringTools | SyncingTools | Online
            | Restarting | Offline | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::Discovered => match status {
            DiscoveringTools => Some(SyncingTools),
            AwaitingUserConfig | Provisioning | CommandReceived | Connecting | SyncingTools | Online | Restarting
            | Offline | Error | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::Synced => match status {
            DiscoveringTools | SyncingTools => Some(Online),
            AwaitingUserConfig | Provisioning | CommandReceived | Connecting | Online | Restarting | Offline
            | Error | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::ConfigChanged => match status {
            CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Error | Offline
            | RequiresReauth | PermanentlyFailed => Some(Restarting),
            // Nothing runs yet: the new configuration is simply what will be started.
            AwaitingUserConfig | Provisioning => None,
        },
        Cause::Ended => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Error => Some(Connecting),
            AwaitingUserConfig | Provisioning | CommandReceived | Offline | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::BudgetSpent => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Error => Some(PermanentlyFailed),
            AwaitingUserConfig | Provisioning | CommandReceived | Offline | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::Lost => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Offline | Error => Some(Offline),
            AwaitingUserConfig | Provisioning | CommandReceived | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::Failed => match status {
            Provisioning | CommandReceived | Connecting | DiscoveringTools | SyncingTools | Online | Restarting
            | Offline | Error => Some(Error),
            AwaitingUserConfig | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::AuthRefused => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Offline | Error => {
                Some(RequiresReauth)
            }
            AwaitingUserConfig | Provisioning | CommandReceived | RequiresReauth | PermanentlyFailed => None,
        },
        Cause::CredentialsChanged => match status {
            RequiresReauth => Some(Connecting),
            AwaitingUserConfig | Provisioning | CommandReceived | Connecting | DiscoveringTools | SyncingTools
            | Online | Restarting | Offline | Error | PermanentlyFailed => None,
        },
        Cause::Asked => match status {
            Connecting | DiscoveringTools | SyncingTools | Online | Restarting | Offline | Error | RequiresReauth
            | PermanentlyFailed => Some(Connecting),
            AwaitingUserConfig | Provisioning | CommandReceived => None,
        },
    }
}
