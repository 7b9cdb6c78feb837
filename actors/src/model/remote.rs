//! What is known of a session beside its tools: the state of a connection, health, and what the server said of itself.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::era::Era;

/// The connection of a remote instance, kept beside its status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Connection {
    /// The first attempt is under way, or waits for its permit.
    Connecting,
    /// There is a session.
    Connected,
    /// It is lost, or was never there, and is tried again.
    Reconnecting,
    /// It is not wanted, or not configured.
    Disconnected,
    /// It is not tried again by itself: new credentials, a call or a person must come first.
    Error,
}

impl Connection {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Reconnecting => "reconnecting",
            Self::Disconnected => "disconnected",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Whether a server that is there answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// It has not been asked yet.
    #[default]
    Unknown,
    /// It has answered, and what it left unanswered since may be chance.
    Healthy,
    /// It did not answer, too often in a row.
    Degraded,
}

impl Health {
    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
        }
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a server said of itself in the handshake.
#[derive(Debug)]
pub struct ServerInfo {
    /// Its name for itself; a server without sessions may not tell it.
    pub name: String,
    /// Its version, as its name.
    pub version: String,
    /// The era in which it said so.
    pub era: Era,
    /// The protocol version that was agreed on.
    pub protocol: String,
    /// What it can do, as sent.
    pub capabilities: Box<RawValue>,
    /// How it wants to be used, if it says so.
    pub instructions: Option<String>,
    /// All that it said, as sent: the result of `initialize` or of `server/discover`.
    pub greeting: Box<RawValue>,
}

impl ServerInfo {
    /// Whether both can do the same, in whatever order they say so.
    pub fn is_as_capable(&self, other: &Self) -> bool {
        let read = |info: &Self| serde_json::from_str::<serde_json::Value>(info.capabilities.get()).ok();
        self.capabilities.get() == other.capabilities.get() || read(self) == read(other)
    }
}
