//! Who may come in: the digest of a token → a user, and what a user may do at once.

use std::collections::HashMap;
use std::sync::Arc;

use mcp_satellite_actors::model::ids::{Slug, TeamId, UserId};
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The SHA-256 of a token. The token itself is kept nowhere.
pub type Digest = [u8; SHA256_OUTPUT_LEN];

/// Calls of one user at once.
const CALLS_MAX: usize = 128;

/// One user of the endpoint.
#[derive(Debug)]
pub struct User {
    /// The team.
    pub team: TeamId,
    /// Its name for people.
    pub team_slug: Slug,
    /// The user.
    pub user: UserId,
    /// The name for people.
    pub slug: Slug,
    /// Whether `/mcp` offers the tools themselves, unless the request says otherwise.
    pub flat: bool,
    calls: Arc<Semaphore>,
}

/// One call's place among those that its user may have at once.
#[derive(Debug)]
pub struct Admission {
    _place: Option<OwnedSemaphorePermit>,
}

/// A limit of the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limited {
    /// `rate_limited` or `busy`.
    pub kind: &'static str,
    /// The limit.
    pub limit: usize,
    /// When it is worth trying again.
    pub retry_after_ms: u64,
}

impl User {
    /// A user, by ids and by names.
    pub fn new(team: TeamId, team_slug: Slug, user: UserId, slug: Slug, flat: bool) -> Self {
        Self { team, team_slug, user, slug, flat, calls: Arc::new(Semaphore::new(CALLS_MAX)) }
    }

    /// Whether it is the same user, perhaps read anew from the configuration.
    pub fn is(&self, other: &Self) -> bool {
        self.team == other.team && self.user == other.user
    }

    /// A message comes in.
    pub fn admit(&self) -> Result<(), Limited> {
        Ok(())
    }

    /// A call begins.
    pub fn begin(&self) -> Result<Admission, Limited> {
        match self.calls.clone().try_acquire_owned() {
            Ok(place) => Ok(Admission { _place: Some(place) }),
            Err(_) => Err(Limited { kind: "busy", limit: CALLS_MAX, retry_after_ms: 1000 }),
        }
    }
}

/// All users of the endpoint.
#[derive(Debug, Default)]
pub struct Access {
    users: HashMap<Digest, Arc<User>>,
}

/// The digest of a token.
pub fn digest_of(token: &str) -> Digest {
    let mut bytes = [0; SHA256_OUTPUT_LEN];
    bytes.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    bytes
}

impl Access {
    /// From digests of tokens. A user may have several.
    pub fn new(users: impl IntoIterator<Item = (Digest, Arc<User>)>) -> Self {
        Self { users: users.into_iter().collect() }
    }

    /// Whose token it is.
    pub fn who(&self, token: &str) -> Option<Arc<User>> {
        self.users.get(&digest_of(token)).cloned()
    }

    /// Whether a user still has a token.
    pub fn knows(&self, user: &User) -> bool {
        self.users.values().any(|known| known.is(user))
    }
}
