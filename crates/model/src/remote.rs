//! Data of a session: state of the connection, health, and the self-description of the server.

use mcp_satellite_protocol::era::Era;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// State of the connection of a remote instance, in addition to its status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::Display, strum::IntoStaticStr)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ConnectionState {
    /// The first attempt is in progress or waits for a permit.
    Connecting,
    /// The session is established.
    Connected,
    /// The connection was lost or not established, and is retried.
    Reconnecting,
    /// The instance is stopped or not configured.
    Disconnected,
    /// The connection is not retried automatically: new credentials, a call or a person must come first.
    Error,
}

impl ConnectionState {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Health of a connected server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, strum::Display, strum::IntoStaticStr)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ServerHealth {
    /// No check has completed yet.
    #[default]
    Unknown,
    /// The last check succeeded, or too few have failed since.
    Healthy,
    /// Too many consecutive checks failed.
    Degraded,
}

impl ServerHealth {
    /// Returns the name used on the wire.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Self-description of a server from the handshake.
#[derive(Debug)]
pub struct ServerInfo {
    /// Name of the server; empty if a server without sessions does not report it.
    pub name: String,
    /// Version of the server; empty if a server without sessions does not report it.
    pub version: String,
    /// Protocol era of the handshake.
    pub era: Era,
    /// Negotiated protocol version.
    pub protocol: String,
    /// Capabilities, as sent.
    pub capabilities: Box<RawValue>,
    /// Usage instructions for models.
    pub instructions: Option<String>,
    /// Complete result of `initialize` or `server/discover`, as sent.
    pub handshake_result: Box<RawValue>,
}

impl ServerInfo {
    /// Returns true if both have the same capabilities, in any order of members.
    pub fn has_same_capabilities(&self, other: &Self) -> bool {
        let read = |info: &Self| serde_json::from_str::<serde_json::Value>(info.capabilities.get()).ok();
        self.capabilities.get() == other.capabilities.get() || read(self) == read(other)
    }
}
