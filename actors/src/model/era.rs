//! The two eras of the protocol. Up to 2025-11-25 a connection is a session that `initialize` opens, and what was said in
//! it holds for what comes after; from 2026-07-28 on every request says all that its server must know.

use serde::{Deserialize, Serialize};

/// The first version without sessions, and the one of them that is spoken here.
pub const STATELESS_VERSION: &str = "2026-07-28";

/// An era, under the name of its newest version that is spoken here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Era {
    /// A session that `initialize` opens.
    #[serde(rename = "2025-11-25")]
    Sessions,
    /// Every request for itself; `server/discover` tells what the server is.
    #[serde(rename = "2026-07-28")]
    Stateless,
}

impl Era {
    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Sessions => Self::Stateless,
            Self::Stateless => Self::Sessions,
        }
    }

    /// What a server is asked first.
    pub fn opening(self) -> &'static str {
        match self {
            Self::Sessions => "initialize",
            Self::Stateless => "server/discover",
        }
    }

    /// What a server is asked to find out whether it is there.
    pub fn check(self) -> &'static str {
        match self {
            Self::Sessions => "ping",
            Self::Stateless => "server/discover",
        }
    }
}
