//! Who may come in: the digest of a token → a user, and what a user may do at once.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use mcp_satellite_actors::model::ids::{Slug, TeamId, UserId};
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The SHA-256 of a token. The token itself is kept nowhere.
type Digest = [u8; SHA256_OUTPUT_LEN];

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

/// A client that was let in.
#[derive(Debug, Clone)]
pub struct Pass {
    /// As whom.
    pub user: Arc<User>,
    token: Digest,
}

/// A client that was not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// It has shown no token.
    #[error("a bearer token is required")]
    NoToken,
    /// What it has shown is no token of anybody.
    #[error("the bearer token is not valid")]
    WrongToken,
    /// Too many clients have shown wrong tokens.
    #[error("too many requests with a wrong token; wait a moment")]
    TooMany(Duration),
    /// Without authentication only this machine may come in, and it has come from elsewhere.
    #[error("without authentication only clients on this machine are served")]
    FromElsewhere,
}

/// A user who has asked for too much.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limited {
    /// `rate_limited` or `busy`.
    pub kind: &'static str,
    /// What the limit is.
    pub limit: u64,
    /// When it is worth asking again.
    pub retry_after: Duration,
}

impl fmt::Display for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} calls of this user are under way, and no more may be", self.limit)
    }
}

impl User {
    /// A user, by ids and by names.
    pub fn new(team: TeamId, team_slug: Slug, user: UserId, slug: Slug, flat: bool) -> Self {
        Self { team, team_slug, user, slug, flat, calls: Arc::new(Semaphore::new(CALLS_MAX)) }
    }

    /// Whether both are the same user, perhaps before and after a reload.
    pub fn is_same(&self, other: &Self) -> bool {
        self.team == other.team && self.user == other.user
    }

    /// Counts a request.
    pub fn request(&self) -> Result<(), Limited> {
        Ok(())
    }

    /// Counts a call for as long as what comes back is kept.
    pub fn call(&self) -> Result<Option<OwnedSemaphorePermit>, Limited> {
        let busy = |_| Limited { kind: "busy", limit: CALLS_MAX as u64, retry_after: Duration::from_secs(1) };
        self.calls.clone().try_acquire_owned().map(Some).map_err(busy)
    }
}

/// Everybody who may come in.
#[derive(Debug, Default)]
pub struct Access {
    users: RwLock<HashMap<Digest, Arc<User>>>,
}

fn digest_of(token: &str) -> Digest {
    let mut bytes = [0; SHA256_OUTPUT_LEN];
    bytes.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    bytes
}

impl Access {
    /// These users may come in from now on, and nobody else. A user may have several tokens.
    pub fn set<'a>(&self, users: impl IntoIterator<Item = (&'a str, Arc<User>)>) {
        let users = users.into_iter().map(|(token, user)| (digest_of(token), user)).collect();
        *self.users.write().unwrap_or_else(PoisonError::into_inner) = users;
    }

    /// Lets a client in that sends these headers from that address.
    pub fn admit(&self, headers: &HeaderMap, _peer: IpAddr) -> Result<Pass, Denied> {
        let mut shown = headers.get_all(AUTHORIZATION).iter();
        let token = match (shown.next(), shown.next()) {
            (None, _) => return Err(Denied::NoToken),
            (Some(_), Some(_)) => return Err(Denied::WrongToken),
            (Some(header), None) => header.to_str().ok().and_then(|header| {
                let (scheme, token) = header.split_once(' ')?;
                scheme.eq_ignore_ascii_case("bearer").then_some(digest_of(token.trim()))
            }),
        };
        let token = token.ok_or(Denied::WrongToken)?;
        let user = self.users.read().unwrap_or_else(PoisonError::into_inner).get(&token).cloned();
        Ok(Pass { user: user.ok_or(Denied::WrongToken)?, token })
    }

    /// Whether who was let in then would be let in now.
    pub fn stands(&self, pass: &Pass) -> bool {
        let users = self.users.read().unwrap_or_else(PoisonError::into_inner);
        users.get(&pass.token).is_some_and(|user| user.is_same(&pass.user))
    }
}
