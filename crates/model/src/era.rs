//! The two eras of the protocol. Up to version 2025-11-25 a connection is a session that `initialize` opens, and later
//! messages depend on it. From 2026-07-28 on every request contains all that its server needs.

use serde::{Deserialize, Serialize};

/// First protocol version without sessions, and the only one of them that is supported.
pub const STATELESS_VERSION: &str = "2026-07-28";

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
            Self::Sessions => "initialize",
            Self::Stateless => "server/discover",
        }
    }

    /// Returns the method that checks whether a server is reachable.
    pub fn check_method(self) -> &'static str {
        match self {
            Self::Sessions => "ping",
            Self::Stateless => "server/discover",
        }
    }
}
