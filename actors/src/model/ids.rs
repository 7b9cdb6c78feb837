//! Identity. An instance is a typed triple and a map key; its name is for people and logs, is looked up, never parsed.

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
            /// The text as configured.
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

/// What an instance is: one installation for one user of one team. Ordered by team, then user, then installation, so
/// that one team's or one user's instances are a range of an ordered map. Cloning costs one reference count.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(Arc<InstanceKey>);

/// The three parts of an [`InstanceId`].
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceKey {
    /// The team that the user is a member of.
    pub team: TeamId,
    /// The user that owns the instance.
    pub user: UserId,
    /// What is installed.
    pub installation: InstallationId,
}

impl InstanceId {
    /// An identity from its three parts.
    pub fn new(team: TeamId, user: UserId, installation: InstallationId) -> Self {
        Self(Arc::new(InstanceKey { team, user, installation }))
    }

    /// Where a team's range begins: the empty text orders before every other.
    pub(crate) fn first_of(team: &TeamId) -> Self {
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

/// One incarnation of an instance: one process or connection. Drawn by Root from one counter for the whole satellite,
/// so a rebuilt team never reuses a number and news can always say which run it is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Run(pub u64);

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run {}", self.0)
    }
}
