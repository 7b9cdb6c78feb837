//! The two eras of the protocol. Up to version 2025-11-25 a connection is a session that `initialize` opens, and later
//! messages depend on it. From 2026-07-28 on every request contains all that its server needs.

use serde::{Deserialize, Serialize};

use crate::method;

/// First protocol version without sessions, and the only one of them that is supported.
pub const STATELESS_VERSION: &str = "2026-07-28";
/// Newest protocol version with sessions.
pub const NEWEST_SESSION_VERSION: &str = "2025-11-25";
/// Supported protocol versions with sessions, oldest first.
pub const SESSION_VERSIONS: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", NEWEST_SESSION_VERSION];

/// Protocol era, serialized as its newest supported version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Era {
    /// Sessions opened by `initialize`.
    #[serde(rename = "2025-11-25")]
    Sessions,
    /// Independent requests; `server/discover` returns the self-description of the server.
    #[serde(rename = "2026-07-28")]
    Stateless,
}

impl Era {
    /// Returns the other era.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Sessions => Self::Stateless,
            Self::Stateless => Self::Sessions,
        }
    }

    /// Returns the method of the first request to a server.
    pub fn opening_method(self) -> &'static str {
        match self {
            Self::Sessions => method::INITIALIZE,
            Self::Stateless => method::DISCOVER,
        }
    }

    /// Returns the method that checks whether a server is reachable.
    pub fn check_method(self) -> &'static str {
        match self {
            Self::Sessions => method::PING,
            Self::Stateless => method::DISCOVER,
        }
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::ProtocolVersion;

    use super::*;

    #[test]
    fn the_versions_are_those_of_rmcp() {
        let (with, without): (Vec<_>, Vec<_>) =
            ProtocolVersion::KNOWN_VERSIONS.iter().partition(|version| version.has_initialize());
        let text =
            |versions: Vec<&'static ProtocolVersion>| versions.into_iter().map(ProtocolVersion::as_str).collect();
        let (with, without): (Vec<_>, Vec<_>) = (text(with), text(without));
        assert_eq!(with, SESSION_VERSIONS);
        assert_eq!(without, [STATELESS_VERSION]);
        assert_eq!(ProtocolVersion::LATEST_WITH_INITIALIZE.as_str(), NEWEST_SESSION_VERSION);
    }
}
