//! Authentication: finds the user of a bearer token and enforces the user's limits.
//!
//! Only digests of tokens are kept. A token is looked up by a keyed hash of its digest, so that an attacker can neither
//! choose nor observe its position in the table, and is then compared in constant time; an unknown token takes the same
//! time.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::io;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use governor::clock::Clock;
use governor::{DefaultDirectRateLimiter, Quota};
use mcp_satellite_actors::byte_budget::{ByteBudget, ByteShare};
use mcp_satellite_actors::model::ids::{Slug, TeamId, UserId};
use mcp_satellite_actors::model::secret::Secret;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use mcp_satellite_config::{EndpointAuth, GatewayLimits, GatewayPlan, GatewayUser, TokenHash};
use mcp_satellite_files::data_dir::DataDir;

// Wrong tokens per second, from all clients together, after which the answer is "too many requests".
const FAILURES_PER_SECOND: NonZeroU32 = NonZeroU32::new(50).unwrap();

const BUSY_PAUSE: Duration = Duration::from_secs(1);

// Headers of proxies. Their presence means that the request came from another machine.
const FORWARDED: [&str; 5] = ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"];

// Prefix of generated tokens: identifies a leaked token.
const TOKEN_PREFIX: &str = "sat_";

pub const TOKEN_FILE: &str = "token";

// Bytes. The file contains one line.
const TOKEN_FILE_MAX: u64 = 4096;

// Characters. A shorter token could be guessed, or was planted in the data directory.
const TOKEN_LEN_MIN: usize = 32;

/// Checks bearer tokens and limits wrong attempts.
pub struct TokenCheck {
    // Random key of this process: makes the position of a token in a table unpredictable.
    key: hmac::Key,
    failures: DefaultDirectRateLimiter,
}

/// The holders of tokens. [`TokenCheck::table`] creates one.
pub struct TokenTable<T>(HashMap<[u8; 32], (TokenHash, T)>);

impl<T> Default for TokenTable<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> TokenTable<T> {
    /// Returns the holder of each token.
    pub fn holders(&self) -> impl Iterator<Item = &T> {
        self.0.values().map(|(_, holder)| holder)
    }
}

impl TokenCheck {
    /// # Errors
    /// The system provides no random numbers.
    pub fn new() -> io::Result<Self> {
        let no_chance = |_| io::Error::other("the system provides no random numbers");
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new()).map_err(no_chance)?;
        Ok(Self { key, failures: DefaultDirectRateLimiter::direct(Quota::per_second(FAILURES_PER_SECOND)) })
    }

    pub fn table<T>(&self, holders: impl IntoIterator<Item = (TokenHash, T)>) -> TokenTable<T> {
        TokenTable(holders.into_iter().map(|(token, holder)| (self.table_key(&token), (token, holder))).collect())
    }

    /// Finds the holder of the bearer token in `headers`.
    ///
    /// # Errors
    /// The token is missing or wrong, or there were too many wrong ones.
    pub fn admit<'t, T>(
        &self,
        table: &'t TokenTable<T>,
        headers: &HeaderMap,
    ) -> Result<(TokenHash, &'t T), AccessDenied> {
        if !headers.contains_key(AUTHORIZATION) {
            return Err(AccessDenied::NoToken);
        }
        self.admit_token(table, bearer_token(headers))
    }

    /// Finds the holder of the bearer token in `headers`. A wrong token does not count as an attempt.
    pub fn find<'t, T>(&self, table: &'t TokenTable<T>, headers: &HeaderMap) -> Option<&'t T> {
        self.find_token(table, bearer_token(headers)?).map(|(_, holder)| holder)
    }

    /// Finds the holder of a token.
    ///
    /// # Errors
    /// As [`admit`](Self::admit).
    pub fn admit_token<'t, T>(
        &self,
        table: &'t TokenTable<T>,
        token: Option<&str>,
    ) -> Result<(TokenHash, &'t T), AccessDenied> {
        token.and_then(|token| self.find_token(table, token)).ok_or_else(|| match self.failures.check() {
            Ok(()) => AccessDenied::WrongToken,
            Err(not_until) => AccessDenied::TooManyAttempts(not_until.wait_time_from(self.failures.clock().now())),
        })
    }

    fn find_token<'t, T>(&self, table: &'t TokenTable<T>, token: &str) -> Option<(TokenHash, &'t T)> {
        let presented = TokenHash::from_token(token);
        let found = table.0.get(&self.table_key(&presented));
        let known = found.map_or(TokenHash([0; 32]), |(token, _)| *token);
        let same = bool::from(known.0.ct_eq(&presented.0));
        found.filter(|_| same).map(|(token, holder)| (*token, holder))
    }

    pub fn holder<'t, T>(&self, table: &'t TokenTable<T>, token: &TokenHash) -> Option<&'t T> {
        table.0.get(&self.table_key(token)).map(|(_, holder)| holder)
    }

    fn table_key(&self, token: &TokenHash) -> [u8; 32] {
        let mut key = [0; 32];
        key.copy_from_slice(hmac::sign(&self.key, &token.0).as_ref());
        key
    }
}

/// Returns the only bearer token: two are ambiguous.
fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let mut presented = headers.get_all(AUTHORIZATION).iter();
    let (Some(header), None) = (presented.next(), presented.next()) else { return None };
    parse_bearer_token(header.to_str().ok()?)
}

/// Returns true if the client is on this machine and no proxy has passed its request on.
pub fn is_local(headers: &HeaderMap, peer: IpAddr) -> bool {
    peer.to_canonical().is_loopback() && !FORWARDED.iter().any(|name| headers.contains_key(*name))
}

/// The table of users and tokens.
pub struct Access {
    check: TokenCheck,
    table: RwLock<Arc<AccessTable>>,
}

#[derive(Default)]
struct AccessTable {
    // Increases with each reload.
    generation: u64,
    by_token: TokenTable<Arc<User>>,
    users: HashMap<(TeamId, UserId), Arc<User>>,
    single_user: Option<Arc<User>>,
}

/// A user and the used part of its limits. A reload keeps the value as long as the user's configuration is unchanged.
pub struct User {
    pub team: TeamId,
    pub team_slug: Slug,
    pub user: UserId,
    pub slug: Slug,
    pub flat: bool,
    allowance: UserLimits,
}

struct UserLimits {
    requests_per_second: u32,
    burst: u32,
    calls_max: usize,
    bodies_max: usize,
    bodies: Arc<ByteBudget>,
    requests: Option<DefaultDirectRateLimiter>,
    calls: Option<Arc<Semaphore>>,
}

/// An authenticated client.
#[derive(Clone)]
pub struct Permission {
    pub user: Arc<User>,
    // Token that admitted the client; `None` without authentication.
    token: Option<TokenHash>,
    // True if the console acts as the user.
    is_acting: bool,
    // Table that contained the token.
    generation: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AccessDenied {
    #[error("a bearer token is required")]
    NoToken,
    #[error("the bearer token is not valid")]
    WrongToken,
    #[error("too many requests with a wrong token; wait a moment")]
    TooManyAttempts(Duration),
    #[error("without authentication only clients on this machine are served")]
    NotLocal,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitExceeded {
    /// Either `rate_limited` or `busy`.
    pub kind: &'static str,
    pub limit: u64,
    pub retry_after: Duration,
}

impl fmt::Display for LimitExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, limit, retry_after } = self;
        let seconds = retry_after.as_secs_f64();
        if *kind == "busy" {
            write!(f, "this user has {limit} calls in progress, the maximum; retry when one has been answered")
        } else {
            write!(f, "this user sends more than {limit} requests per second; retry in {seconds:.3} s")
        }
    }
}

impl Access {
    pub fn new(plan: &GatewayPlan) -> io::Result<Self> {
        let access = Self { check: TokenCheck::new()?, table: RwLock::default() };
        access.apply(plan);
        Ok(access)
    }

    /// Replaces the users by those of `plan`. Unchanged users keep the used part of their limits.
    pub fn apply(&self, plan: &GatewayPlan) {
        let before = self.table();
        let mut table = AccessTable { generation: before.generation + 1, ..AccessTable::default() };
        let mut tokens = Vec::new();
        for typed in &plan.users {
            let id = (typed.team.clone(), typed.user.clone());
            let known = before.users.get(&id).filter(|user| user.is_unchanged(typed, &plan.limits));
            let user = known.cloned().unwrap_or_else(|| Arc::new(User::new(typed, &plan.limits)));
            if plan.auth == EndpointAuth::Bearer {
                tokens.extend(typed.tokens.iter().map(|token| (*token, Arc::clone(&user))));
            }
            table.users.insert(id, user);
        }
        table.by_token = self.check.table(tokens);
        if plan.auth != EndpointAuth::Bearer {
            // The configuration was validated: there is exactly one user.
            let single_user = plan.single_user().ok().map(|user| (user.team.clone(), user.user.clone()));
            table.single_user = single_user.and_then(|id| table.users.get(&id).cloned());
        }
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
    }

    /// Authenticates a client by its headers and address.
    ///
    /// # Errors
    /// The token is missing or wrong, or authentication is off and the client is not on this machine.
    pub fn admit(&self, headers: &HeaderMap, peer: IpAddr) -> Result<Permission, AccessDenied> {
        let table = self.table();
        if let Some(user) = &table.single_user {
            if !is_local(headers, peer) {
                return Err(AccessDenied::NotLocal);
            }
            return Ok(Permission {
                user: Arc::clone(user),
                token: None,
                is_acting: false,
                generation: table.generation,
            });
        }
        let (token, user) = self.check.admit(&table.by_token, headers)?;
        Ok(Permission { user: Arc::clone(user), token: Some(token), is_acting: false, generation: table.generation })
    }

    /// Returns true if the client would still be admitted with the same token as the same user.
    pub fn is_valid(&self, permission: &Permission) -> bool {
        let table = self.table();
        if permission.generation == table.generation {
            return true;
        }
        match &permission.token {
            Some(token) => self.check.holder(&table.by_token, token).is_some_and(|user| user.is_same(&permission.user)),
            None if permission.is_acting => {
                let User { team, user, .. } = &*permission.user;
                table.users.contains_key(&(team.clone(), user.clone()))
            }
            None => table.single_user.as_ref().is_some_and(|user| user.is_same(&permission.user)),
        }
    }

    /// Returns the permission to act as a user without its token; `None` if there is no such user.
    pub fn act_as(&self, team: &TeamId, user: &UserId) -> Option<Permission> {
        let table = self.table();
        let user = table.users.get(&(team.clone(), user.clone()))?;
        Some(Permission { user: Arc::clone(user), token: None, is_acting: true, generation: table.generation })
    }

    fn table(&self) -> Arc<AccessTable> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }
}

fn parse_bearer_token(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim()).filter(|token| !token.is_empty())
}

impl User {
    fn new(typed: &GatewayUser, limits: &GatewayLimits) -> Self {
        let GatewayUser { team, team_slug, user, slug, flat, tokens: _, has_stored_token: _, access: _ } =
            typed.clone();
        Self { team, team_slug, user, slug, flat, allowance: UserLimits::new(limits) }
    }

    fn is_unchanged(&self, typed: &GatewayUser, limits: &GatewayLimits) -> bool {
        let same_names = self.team_slug == typed.team_slug && self.slug == typed.slug;
        same_names && self.flat == typed.flat && self.allowance.is_unchanged(limits)
    }

    /// Returns true if both are the same user, possibly before and after a reload.
    pub fn is_same(&self, other: &Self) -> bool {
        self.team == other.team && self.user == other.user
    }

    pub fn count_request(&self) -> Result<(), LimitExceeded> {
        let Some(limiter) = &self.allowance.requests else { return Ok(()) };
        limiter.check().map_err(|not_until| LimitExceeded {
            kind: "rate_limited",
            limit: self.allowance.requests_per_second.into(),
            retry_after: not_until.wait_time_from(limiter.clock().now()),
        })
    }

    pub fn body_share(&self) -> ByteShare {
        self.allowance.bodies.share()
    }

    /// Counts a call until the permit is dropped; `None` means that calls are not limited.
    pub fn acquire_call_permit(&self) -> Result<Option<OwnedSemaphorePermit>, LimitExceeded> {
        let Some(calls) = &self.allowance.calls else { return Ok(None) };
        let limit = self.allowance.calls_max as u64;
        // The semaphore is never closed, so an error means that there are too many calls.
        let permit = Arc::clone(calls).try_acquire_owned();
        permit.map(Some).map_err(|_| LimitExceeded { kind: "busy", limit, retry_after: BUSY_PAUSE })
    }
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "User({}/{})", self.team_slug, self.slug)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Access({} tokens)", self.table().by_token.0.len())
    }
}

impl fmt::Debug for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pass({:?})", self.user)
    }
}

impl UserLimits {
    fn new(limits: &GatewayLimits) -> Self {
        let GatewayLimits { requests_per_second, burst, calls_per_user_max: calls_max, .. } = *limits;
        let quota = |rate| Quota::per_second(rate).allow_burst(NonZeroU32::new(burst).unwrap_or(rate));
        let requests = NonZeroU32::new(requests_per_second).map(|rate| DefaultDirectRateLimiter::direct(quota(rate)));
        let calls = (calls_max > 0).then(|| Arc::new(Semaphore::new(calls_max.min(Semaphore::MAX_PERMITS))));
        let bodies_max = body_budget_per_user(limits);
        let bodies = ByteBudget::new(bodies_max);
        Self { requests_per_second, burst, calls_max, bodies_max, bodies, requests, calls }
    }

    fn is_unchanged(&self, limits: &GatewayLimits) -> bool {
        let wanted =
            (limits.requests_per_second, limits.burst, limits.calls_per_user_max, body_budget_per_user(limits));
        (self.requests_per_second, self.burst, self.calls_max, self.bodies_max) == wanted
    }
}

/// Returns the bytes of request bodies for one user: a quarter, so that other users find capacity, and at least one
/// body.
pub fn body_budget_per_user(limits: &GatewayLimits) -> usize {
    (limits.bodies_max / 4).max(limits.body_max)
}

pub fn new_token() -> io::Result<Secret> {
    let mut bits = [0; 32];
    SystemRandom::new().fill(&mut bits).map_err(|_| io::Error::other("the system provides no random numbers"))?;
    let mut token = TOKEN_PREFIX.to_owned();
    for byte in bits {
        let _ = write!(token, "{byte:02x}");
    }
    Ok(token.into())
}

/// Returns the token in this file of the data directory; creates it on the first call.
///
/// # Errors
/// The file cannot be read or written, or contains no usable token.
pub fn load_or_create_token(data_dir: &DataDir, file: &'static str) -> io::Result<Secret> {
    let Some(bytes) = data_dir.read(file, TOKEN_FILE_MAX)? else {
        let token = new_token()?;
        data_dir.replace(file, format!("{}\n", token.expose()).as_bytes())?;
        return Ok(token);
    };
    let text = String::from_utf8(bytes).unwrap_or_default();
    let token = text.trim();
    let usual = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if token.len() < TOKEN_LEN_MIN || !token.bytes().all(usual) {
        let message = format!(
            "the file has no token of at least {TOKEN_LEN_MIN} letters and digits; remove the file to get a new one"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    Ok(token.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::fs::Permissions;
    use std::net::Ipv4Addr;
    use std::os::unix::fs::PermissionsExt;

    use axum::http::HeaderValue;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn user(slug: &str, tokens: &[&str]) -> GatewayUser {
        GatewayUser {
            team: "team_acme".into(),
            team_slug: "acme".into(),
            user: format!("user_{slug}").into(),
            slug: slug.into(),
            tokens: tokens.iter().copied().map(TokenHash::from_token).collect(),
            has_stored_token: false,
            access: None,
            flat: false,
        }
    }

    fn plan() -> GatewayPlan {
        GatewayPlan {
            users: vec![user("alice", &["alice-1", "alice-2"]), user("bob", &["bob-1"]), user("carol", &[])],
            ..GatewayPlan::default()
        }
    }

    fn authorization_headers(authorizations: &[&str]) -> HeaderMap {
        authorizations.iter().map(|value| (AUTHORIZATION, HeaderValue::from_str(value).unwrap())).collect()
    }

    fn admit_user(access: &Access, authorizations: &[&str]) -> Result<String, AccessDenied> {
        access.admit(&authorization_headers(authorizations), HERE).map(|permission| permission.user.slug.to_string())
    }

    #[test]
    fn a_token_identifies_its_user() {
        let access = Access::new(&plan()).unwrap();
        for (authorization, who) in
            [("Bearer alice-1", "alice"), ("bearer alice-2", "alice"), ("BEARER  bob-1 ", "bob")]
        {
            assert_eq!(admit_user(&access, &[authorization]).unwrap(), who);
        }
        let digest = format!("Bearer {}", TokenHash::from_token("bob-1"));
        for wrong in ["Bearer alice-3", "Bearer alice", "Bearer ", "Bearer", "Basic alice-1", "alice-1", "", &digest] {
            assert_eq!(admit_user(&access, &[wrong]), Err(AccessDenied::WrongToken), "{wrong}");
        }
        assert_eq!(admit_user(&access, &[]), Err(AccessDenied::NoToken));
        assert_eq!(admit_user(&access, &["Bearer alice-1", "Bearer bob-1"]), Err(AccessDenied::WrongToken));
    }

    #[test]
    fn a_table_key_collision_does_not_admit_a_wrong_token() {
        let access = Access::new(&plan()).unwrap();
        let bob = access.admit(&authorization_headers(&["Bearer bob-1"]), HERE).unwrap().user;
        let place = access.check.table_key(&TokenHash::from_token("forged"));
        let by_token = TokenTable([(place, (TokenHash::from_token("bob-1"), bob))].into());
        *access.table.write().unwrap() = Arc::new(AccessTable { by_token, ..AccessTable::default() });
        assert_eq!(admit_user(&access, &["Bearer forged"]), Err(AccessDenied::WrongToken));
    }

    #[test]
    fn many_wrong_tokens_are_throttled_and_a_valid_one_is_admitted() {
        let access = Access::new(&plan()).unwrap();
        let answers: Vec<_> = (0..1000).map(|nth| admit_user(&access, &[&format!("Bearer {nth}")])).collect();
        assert!(answers[..50].iter().all(|answer| *answer == Err(AccessDenied::WrongToken)));
        let Some(Err(AccessDenied::TooManyAttempts(pause))) = answers.last() else { panic!("{:?}", answers.last()) };
        assert!(!pause.is_zero());
        assert_eq!(admit_user(&access, &["Bearer bob-1"]).unwrap(), "bob");
    }

    #[test]
    fn a_reload_admits_new_tokens_and_revokes_removed_ones() {
        let access = Access::new(&plan()).unwrap();
        let permission = |token: &str| access.admit(&authorization_headers(&[&format!("Bearer {token}")]), HERE);
        let (first, second, bob) =
            (permission("alice-1").unwrap(), permission("alice-2").unwrap(), permission("bob-1").unwrap());
        let users = vec![user("alice", &["alice-2", "alice-3"]), user("carol", &["bob-1"])];
        access.apply(&GatewayPlan { users, ..plan() });
        assert!(!access.is_valid(&first) && access.is_valid(&second));
        assert!(!access.is_valid(&bob), "the token belongs to another user now");
        assert_eq!(permission("alice-1").unwrap_err(), AccessDenied::WrongToken);
        assert!(
            Arc::ptr_eq(&permission("alice-3").unwrap().user, &second.user),
            "a new configuration does not reset the limit"
        );
        assert_eq!(permission("bob-1").unwrap().user.slug.as_str(), "carol");
    }

    #[test]
    fn the_request_rate_is_limited_per_user() {
        let limits = GatewayLimits { requests_per_second: 1, burst: 3, ..GatewayLimits::default() };
        let access = Access::new(&GatewayPlan { limits, ..plan() }).unwrap();
        let permission = |token: &str| access.admit(&authorization_headers(&[token]), HERE).unwrap();
        let counted: Vec<_> = (0..4).map(|_| permission("Bearer alice-1").user.count_request()).collect();
        assert_eq!(counted[..3], [Ok(()), Ok(()), Ok(())]);
        let limited = counted[3].clone().unwrap_err();
        assert_eq!((limited.kind, limited.limit), ("rate_limited", 1));
        assert!(!limited.retry_after.is_zero() && limited.retry_after <= Duration::from_secs(1), "{limited:?}");
        assert!(permission("Bearer alice-2").user.count_request().is_err(), "all tokens of a user share the limit");
        assert_eq!(permission("Bearer bob-1").user.count_request(), Ok(()));
    }

    #[test]
    fn concurrent_calls_are_limited_per_user() {
        let limits = GatewayLimits { calls_per_user_max: 2, ..GatewayLimits::default() };
        let access = Access::new(&GatewayPlan { limits, ..plan() }).unwrap();
        let user = access.admit(&authorization_headers(&["Bearer bob-1"]), HERE).unwrap().user;
        let (first, _second) = (user.acquire_call_permit().unwrap(), user.acquire_call_permit().unwrap());
        let limited = user.acquire_call_permit().unwrap_err();
        assert_eq!((limited.kind, limited.limit, limited.retry_after), ("busy", 2, BUSY_PAUSE));
        drop(first);
        assert!(user.acquire_call_permit().is_ok());
    }

    #[test]
    fn a_limit_of_zero_means_unlimited() {
        let limits = GatewayLimits { requests_per_second: 0, calls_per_user_max: 0, ..GatewayLimits::default() };
        let access = Access::new(&GatewayPlan { limits, ..plan() }).unwrap();
        let user = access.admit(&authorization_headers(&["Bearer bob-1"]), HERE).unwrap().user;
        assert!(
            (0..10_000).all(
                |_| user.count_request().is_ok() && user.acquire_call_permit().is_ok_and(|permit| permit.is_none())
            )
        );
    }

    #[test]
    fn without_authentication_only_local_clients_are_admitted() {
        let auth = EndpointAuth::None(Some("acme/bob".to_owned()));
        let access = Access::new(&GatewayPlan { auth, ..plan() }).unwrap();
        for peer in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            let permission = access.admit(&HeaderMap::new(), peer.parse().unwrap()).unwrap();
            assert!(permission.user.slug.as_str() == "bob" && access.is_valid(&permission));
        }
        for peer in ["192.168.0.7", "::ffff:10.0.0.1", "fe80::1"] {
            assert_eq!(access.admit(&HeaderMap::new(), peer.parse().unwrap()).unwrap_err(), AccessDenied::NotLocal);
        }
        for header in FORWARDED {
            let headers = std::iter::once((header.parse().unwrap(), HeaderValue::from_static("x"))).collect();
            assert_eq!(access.admit(&headers, HERE).unwrap_err(), AccessDenied::NotLocal, "{header}");
        }
        let permission = access.admit(&HeaderMap::new(), HERE).unwrap();
        access.apply(&plan());
        assert!(!access.is_valid(&permission));
        assert_eq!(access.admit(&HeaderMap::new(), HERE).unwrap_err(), AccessDenied::NoToken);
    }

    #[test]
    fn the_token_file_is_private_and_reused() {
        let home = mcp_satellite_files::data_dir::private_tempdir();
        let data_dir = DataDir::open(home.path()).unwrap();
        let token = load_or_create_token(&data_dir, TOKEN_FILE).unwrap();
        assert!(token.expose().len() == 68 && token != new_token().unwrap());
        let file = home.path().join("token");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{}\n", token.expose()));
        assert_eq!(load_or_create_token(&data_dir, TOKEN_FILE).unwrap(), token, "the stored token is reused");
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        let refused = load_or_create_token(&data_dir, TOKEN_FILE).unwrap_err().to_string();
        assert!(refused.contains("chmod 600"), "{refused}");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_weak_token_file_is_rejected() {
        let home = mcp_satellite_files::data_dir::private_tempdir();
        let data_dir = DataDir::open(home.path()).unwrap();
        for weak in ["\n", "short\n", &"x".repeat(31), &"two words ".repeat(10), "\u{fc}".repeat(40).as_str()] {
            data_dir.replace(TOKEN_FILE, weak.as_bytes()).unwrap();
            let refused = load_or_create_token(&data_dir, TOKEN_FILE).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{weak:?}");
            assert!(refused.to_string().contains("remove the file"), "{refused}");
        }
        data_dir.remove(TOKEN_FILE).unwrap();
        assert_eq!(
            load_or_create_token(&data_dir, TOKEN_FILE).unwrap(),
            load_or_create_token(&data_dir, TOKEN_FILE).unwrap()
        );
    }

    #[test]
    fn debug_output_contains_no_token() {
        let access = Access::new(&plan()).unwrap();
        let permission = access.admit(&authorization_headers(&["Bearer alice-1"]), HERE).unwrap();
        let presented = format!("{access:?} {permission:?} {:?}", TokenHash::from_token("alice-1"));
        assert_eq!(presented, "Access(3 tokens) Pass(User(acme/alice)) [token]");
    }
}
