//! Identifiers of teams, users, installations and instances. The name of an instance is for people and logs; it is
//! looked up, never parsed.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Returns the text as configured.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id!(
    /// A team: the unit of isolation.
    TeamId
);
text_id!(
    /// A member of a team.
    UserId
);
text_id!(
    /// A server installed for a team.
    InstallationId
);
text_id!(
    /// A name for people: of a server, a team or a user. May contain hyphens, so names built of slugs are never parsed.
    Slug
);

/// Identity of an instance: one installation for one user of one team. Ordered by team, then user, then installation,
/// so that the instances of a team or user are a range of an ordered map. Cloning costs one reference count.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(Arc<InstanceKey>);

/// The three parts of an [`InstanceId`].
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceKey {
    /// The team that the user is a member of.
    pub team: TeamId,
    /// The user that owns the instance.
    pub user: UserId,
    /// Installed server.
    pub installation: InstallationId,
}

impl InstanceId {
    /// Creates an identity from its three parts.
    pub fn new(team: TeamId, user: UserId, installation: InstallationId) -> Self {
        Self(Arc::new(InstanceKey { team, user, installation }))
    }

    /// Returns the lower bound of a team's range: the empty text orders before every other.
    pub fn lower_bound(team: &TeamId) -> Self {
        Self::new(team.clone(), UserId::from(""), InstallationId::from(""))
    }
}

impl std::ops::Deref for InstanceId {
    type Target = InstanceKey;

    fn deref(&self) -> &InstanceKey {
        &self.0
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.team, self.user, self.installation)
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Number of a run: one process or connection of an instance. Root assigns the numbers from one counter for the whole
/// satellite, so that a rebuilt team never reuses a number and every message names its run unambiguously.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunNumber(pub u64);

impl fmt::Debug for RunNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run {}", self.0)
    }
}
