//! Who may come in: the digest of a token → a user, and what a user may do at once.
//!
//! A token is looked up by a keyed hash of its digest, so that nobody outside can choose or see where in the table it
//! leads, and is then compared in constant time; one that is not there costs the same.

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::num::NonZeroU32;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use governor::clock::Clock;
use governor::{DefaultDirectRateLimiter, Quota};
use mcp_satellite_actors::model::ids::{Slug, TeamId, UserId};
use mcp_satellite_actors::model::secret::Secret;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::{Auth, GatewayLimits, GatewayPlan, GatewayUser, TokenHash};

/// Requests with a wrong token, from all clients together, a second.
const FAILURES_PER_SECOND: NonZeroU32 = NonZeroU32::new(50).unwrap();

/// Who has too many calls under way is asked to come back after this.
const BUSY_PAUSE_MS: u64 = 1000;

/// What tokens of ours begin with, so that whoever finds one knows what it is.
const TOKEN_PREFIX: &str = "sat_";

/// The file in the data directory that keeps a token.
const TOKEN_FILE: &str = "token";

/// One user of the endpoint, and what of its limits is used up.
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
    allowance: Allowance,
}

/// What a user may ask for.
struct Allowance {
    requests_per_second: u32,
    burst: u32,
    calls_max: usize,
    /// `None` is without a limit.
    requests: Option<DefaultDirectRateLimiter>,
    calls: Option<Arc<Semaphore>>,
}

/// One call's place among those that its user may have at once.
#[derive(Debug)]
pub struct Admission {
    _place: Option<OwnedSemaphorePermit>,
}

/// A limit that was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limited {
    /// `rate_limited` or `busy`.
    pub kind: &'static str,
    /// The limit.
    pub limit: usize,
    /// When it is worth trying again.
    pub retry_after_ms: u64,
}

impl Limited {
    fn rate(limiter: &DefaultDirectRateLimiter, limit: u32) -> Result<(), Self> {
        limiter.check().map_err(|early| {
            let pause = early.wait_time_from(limiter.clock().now());
            // Not before: a client that comes on the millisecond is not too early again.
            let retry_after_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX).saturating_add(1);
            Self { kind: "rate_limited", limit: limit as usize, retry_after_ms }
        })
    }
}

impl User {
    /// A user with the default limits, by ids and by names.
    pub fn new(team: TeamId, team_slug: Slug, user: UserId, slug: Slug, flat: bool) -> Self {
        Self::with(team, team_slug, user, slug, flat, &GatewayLimits::default())
    }

    /// A user with these limits, by ids and by names.
    pub fn with(team: TeamId, team_slug: Slug, user: UserId, slug: Slug, flat: bool, limits: &GatewayLimits) -> Self {
        Self { team, team_slug, user, slug, flat, allowance: Allowance::new(limits) }
    }

    /// Whether it is the same user, perhaps read anew from the configuration.
    pub fn is(&self, other: &Self) -> bool {
        self.team == other.team && self.user == other.user
    }

    /// Whether it is what a configuration wants already.
    fn is_meant_by(&self, typed: &GatewayUser, limits: &GatewayLimits) -> bool {
        let same_names = self.team_slug == typed.team_slug && self.slug == typed.slug;
        same_names && self.flat == typed.flat && self.allowance.is(limits)
    }

    /// A message comes in.
    pub fn admit(&self) -> Result<(), Limited> {
        let limiter = self.allowance.requests.as_ref();
        limiter.map_or(Ok(()), |limiter| Limited::rate(limiter, self.allowance.requests_per_second))
    }

    /// A call begins, and has its place until what comes back is dropped.
    pub fn begin(&self) -> Result<Admission, Limited> {
        let Some(calls) = &self.allowance.calls else { return Ok(Admission { _place: None }) };
        // It is never closed, so an error says that there are too many.
        let place = Arc::clone(calls).try_acquire_owned();
        let busy = |_| Limited { kind: "busy", limit: self.allowance.calls_max, retry_after_ms: BUSY_PAUSE_MS };
        place.map(|place| Admission { _place: Some(place) }).map_err(busy)
    }
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "User({}/{})", self.team_slug, self.slug)
    }
}

impl Allowance {
    fn new(limits: &GatewayLimits) -> Self {
        let GatewayLimits { requests_per_second, burst, calls_per_user_max: calls_max, .. } = *limits;
        let quota = |rate| Quota::per_second(rate).allow_burst(NonZeroU32::new(burst).unwrap_or(rate));
        let requests = NonZeroU32::new(requests_per_second).map(|rate| DefaultDirectRateLimiter::direct(quota(rate)));
        let calls = (calls_max > 0).then(|| Arc::new(Semaphore::new(calls_max.min(Semaphore::MAX_PERMITS))));
        Self { requests_per_second, burst, calls_max, requests, calls }
    }

    fn is(&self, limits: &GatewayLimits) -> bool {
        let wanted = (limits.requests_per_second, limits.burst, limits.calls_per_user_max);
        (self.requests_per_second, self.burst, self.calls_max) == wanted
    }
}

/// All users of a plan, with or without a token.
#[derive(Debug, Default)]
pub struct Users(HashMap<(TeamId, UserId), Arc<User>>);

impl Users {
    /// The users of `plan`. Of these, who stays as before is the same, and what is used up stays used up.
    #[must_use]
    pub fn renewed(&self, plan: &GatewayPlan) -> Self {
        let one = |typed: &GatewayUser| {
            let id = (typed.team.clone(), typed.user.clone());
            let known = self.0.get(&id).filter(|user| user.is_meant_by(typed, &plan.limits));
            let fresh = || {
                let GatewayUser { team, team_slug, user, slug, flat, tokens: _, token_kept: _ } = typed.clone();
                Arc::new(User::with(team, team_slug, user, slug, flat, &plan.limits))
            };
            (id, known.cloned().unwrap_or_else(fresh))
        };
        Self(plan.users.iter().map(one).collect())
    }

    /// Whose token is whose, as `plan` says, whose users these are.
    pub fn access(&self, plan: &GatewayPlan) -> Access {
        let tokens = plan.users.iter().flat_map(|typed| {
            let user = self.get(typed);
            typed.tokens.iter().filter_map(move |token| Some((*token, user.clone()?)))
        });
        Access::new(tokens)
    }

    /// Whom everybody on this machine is, if `plan` says so.
    pub fn alone(&self, plan: &GatewayPlan) -> Option<Arc<User>> {
        if plan.auth == Auth::Bearer {
            return None;
        }
        // The configuration was checked: there is one.
        self.get(plan.alone().ok()?)
    }

    fn get(&self, typed: &GatewayUser) -> Option<Arc<User>> {
        self.0.get(&(typed.team.clone(), typed.user.clone())).cloned()
    }
}

/// All who have a token.
pub struct Access {
    /// Makes the place of a token in the table unguessable.
    key: hmac::Key,
    users: HashMap<[u8; 32], (TokenHash, Arc<User>)>,
    failures: DefaultDirectRateLimiter,
}

impl Default for Access {
    fn default() -> Self {
        Self::new([])
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Access({} tokens)", self.users.len())
    }
}

impl Access {
    /// From digests of tokens. A user may have several.
    pub fn new(users: impl IntoIterator<Item = (TokenHash, Arc<User>)>) -> Self {
        let mut bits = [0; 32];
        if SystemRandom::new().fill(&mut bits).is_err() {
            // The standard library has its randomness from elsewhere if need be, and a place in a table is no secret.
            bits[..8].copy_from_slice(&RandomState::new().hash_one(0).to_le_bytes());
        }
        let key = hmac::Key::new(hmac::HMAC_SHA256, &bits);
        let users = users.into_iter().map(|(token, user)| (place(&key, &token), (token, user))).collect();
        Self { key, users, failures: DefaultDirectRateLimiter::direct(Quota::per_second(FAILURES_PER_SECOND)) }
    }

    /// Whose token it is.
    pub fn who(&self, token: &str) -> Option<Arc<User>> {
        let shown = TokenHash::of(token);
        let found = self.users.get(&place(&self.key, &shown));
        let known = found.map_or(TokenHash([0; 32]), |(token, _)| *token);
        let same = bool::from(known.0.ct_eq(&shown.0));
        found.filter(|_| same).map(|(_, user)| Arc::clone(user))
    }

    /// Counts a request with a token that is nobody's. Over the limit it is not even told so.
    pub fn wrong(&self) -> Result<(), Limited> {
        Limited::rate(&self.failures, FAILURES_PER_SECOND.get())
    }

    /// Whether a user still has a token.
    pub fn knows(&self, user: &User) -> bool {
        self.users.values().any(|(_, known)| known.is(user))
    }

    /// Whether a token is still that user's.
    pub fn holds(&self, token: &TokenHash, user: &User) -> bool {
        self.users.get(&place(&self.key, token)).is_some_and(|(_, known)| known.is(user))
    }
}

fn place(key: &hmac::Key, token: &TokenHash) -> [u8; 32] {
    let mut place = [0; 32];
    place.copy_from_slice(hmac::sign(key, &token.0).as_ref());
    place
}

/// A new token: 256 random bits.
pub fn new_token() -> io::Result<Secret> {
    let mut bits = [0; 32];
    SystemRandom::new().fill(&mut bits).map_err(|_| io::Error::other("the machine has no random numbers"))?;
    let digits: String = bits.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{TOKEN_PREFIX}{digits}").into())
}

/// The token that the data directory keeps; it is made when it is first asked for.
pub fn kept_token(data_dir: &Path) -> io::Result<Secret> {
    let path = data_dir.join(TOKEN_FILE);
    match File::open(&path) {
        Ok(mut file) => {
            // Whoever has copied it there may have left it open to others.
            file.set_permissions(Permissions::from_mode(0o600))?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            match text.trim() {
                "" => Err(io::Error::new(io::ErrorKind::InvalidData, "it is empty; remove it, and another is made")),
                token => Ok(token.into()),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let token = new_token()?;
            // Written beside it, so that a token that is there is whole.
            let fresh = data_dir.join(format!("{TOKEN_FILE}.new"));
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
            file.set_permissions(Permissions::from_mode(0o600))?;
            writeln!(file, "{}", token.expose())?;
            file.sync_all()?;
            std::fs::rename(fresh, path)?;
            Ok(token)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    fn user(slug: &str, tokens: &[&str]) -> GatewayUser {
        GatewayUser {
            team: "team_acme".into(),
            team_slug: "acme".into(),
            user: format!("user_{slug}").into(),
            slug: slug.into(),
            tokens: tokens.iter().copied().map(TokenHash::of).collect(),
            token_kept: false,
            flat: false,
        }
    }

    fn plan() -> GatewayPlan {
        GatewayPlan {
            users: vec![user("alice", &["alice-1", "alice-2"]), user("bob", &["bob-1"]), user("carol", &[])],
            ..GatewayPlan::default()
        }
    }

    /// The users and the tokens of a plan.
    fn opened(plan: &GatewayPlan) -> (Users, Access) {
        let users = Users::default().renewed(plan);
        let access = users.access(plan);
        (users, access)
    }

    fn limited(limits: GatewayLimits) -> Access {
        opened(&GatewayPlan { limits, ..plan() }).1
    }

    #[test]
    fn a_token_says_who_its_bearer_is() {
        let (_, access) = opened(&plan());
        for (token, who) in [("alice-1", "alice"), ("alice-2", "alice"), ("bob-1", "bob")] {
            assert_eq!(access.who(token).unwrap().slug.as_str(), who);
        }
        let digest = TokenHash::of("bob-1").to_string();
        for wrong in ["alice-3", "alice", "", "ALICE-1", "alice-1 ", &digest, &digest[7..]] {
            assert!(access.who(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn of_two_digests_that_meet_in_the_table_only_the_right_one_opens() {
        let (_, mut access) = opened(&plan());
        let at = place(&access.key, &TokenHash::of("forged"));
        let bob = access.who("bob-1").unwrap();
        access.users.insert(at, (TokenHash::of("bob-1"), bob));
        assert!(access.who("forged").is_none() && access.who("bob-1").is_some());
    }

    #[test]
    fn who_tries_many_tokens_is_slowed_and_keeps_nobody_out() {
        let (_, access) = opened(&plan());
        let answers: Vec<_> = (0..1000).map(|_| access.wrong()).collect();
        assert!(answers[..50].iter().all(Result::is_ok));
        let refused = answers.iter().find_map(|answer| answer.err()).unwrap();
        assert!(refused.kind == "rate_limited" && (1..=21).contains(&refused.retry_after_ms), "{refused:?}");
        assert!(access.who("bob-1").is_some());
    }

    #[test]
    fn a_reload_lets_in_who_is_new_and_forgets_who_is_gone() {
        let (users, access) = opened(&plan());
        let (alice, bob) = (access.who("alice-2").unwrap(), access.who("bob-1").unwrap());
        let plan =
            GatewayPlan { users: vec![user("alice", &["alice-2", "alice-3"]), user("carol", &["bob-1"])], ..plan() };
        let users = users.renewed(&plan);
        let access = users.access(&plan);
        assert!(access.who("alice-1").is_none());
        assert!(Arc::ptr_eq(&access.who("alice-3").unwrap(), &alice), "what is used up stays used up");
        assert_eq!(access.who("bob-1").unwrap().slug.as_str(), "carol");
        assert!(access.knows(&alice) && !access.knows(&bob));
        let holds = |token: &str, user: &User| access.holds(&TokenHash::of(token), user);
        assert!(holds("alice-2", &alice) && !holds("alice-1", &alice) && !holds("bob-1", &bob));

        let other = GatewayPlan { limits: GatewayLimits { burst: 7, ..GatewayLimits::default() }, ..plan };
        let renewed = users.renewed(&other).access(&other).who("alice-2").unwrap();
        assert!(!Arc::ptr_eq(&renewed, &alice) && renewed.is(&alice), "another limit holds at once");
    }

    #[test]
    fn a_user_has_so_many_requests_a_second_and_another_has_his_own() {
        let access = limited(GatewayLimits { requests_per_second: 1, burst: 3, ..GatewayLimits::default() });
        let asked: Vec<_> = (0..4).map(|_| access.who("alice-1").unwrap().admit()).collect();
        assert_eq!(asked[..3], [Ok(()), Ok(()), Ok(())]);
        let refused = asked[3].unwrap_err();
        assert_eq!((refused.kind, refused.limit), ("rate_limited", 1));
        assert!((1..=1001).contains(&refused.retry_after_ms), "{refused:?}");
        assert!(access.who("alice-2").unwrap().admit().is_err(), "another token is no other user");
        assert_eq!(access.who("bob-1").unwrap().admit(), Ok(()));
    }

    #[test]
    fn a_user_has_so_many_calls_at_once() {
        let access = limited(GatewayLimits { calls_per_user_max: 2, ..GatewayLimits::default() });
        let user = access.who("bob-1").unwrap();
        let (first, _second) = (user.begin().unwrap(), user.begin().unwrap());
        assert_eq!(user.begin().unwrap_err(), Limited { kind: "busy", limit: 2, retry_after_ms: 1000 });
        drop(first);
        assert!(user.begin().is_ok());
    }

    #[test]
    fn a_limit_of_zero_is_none() {
        let access =
            limited(GatewayLimits { requests_per_second: 0, calls_per_user_max: 0, ..GatewayLimits::default() });
        let user = access.who("bob-1").unwrap();
        let begun: Vec<_> = (0..10_000).map(|_| user.admit().and_then(|()| user.begin())).collect();
        assert!(begun.iter().all(Result::is_ok));
    }

    #[test]
    fn without_authentication_everybody_is_the_user_that_was_named() {
        let plan = GatewayPlan { auth: Auth::None(Some("acme/bob".to_owned())), ..plan() };
        let (users, _) = opened(&plan);
        assert_eq!(users.alone(&plan).unwrap().slug.as_str(), "bob");
        assert!(users.alone(&GatewayPlan { auth: Auth::Bearer, ..plan }).is_none());
    }

    #[test]
    fn a_token_is_kept_in_the_data_directory_for_its_owner_only() {
        let home = tempfile::tempdir().unwrap();
        let token = kept_token(home.path()).unwrap();
        assert!(token.expose().len() == 68 && token != new_token().unwrap());
        let file = home.path().join("token");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{}\n", token.expose()));
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        assert_eq!(kept_token(home.path()).unwrap(), token, "the same again");
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1);
        std::fs::write(&file, "\n").unwrap();
        assert_eq!(kept_token(home.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_is_shown_of_those_who_come_in_is_no_token() {
        let (_, access) = opened(&plan());
        let shown = format!("{access:?} {:?} {:?}", access.who("alice-1").unwrap(), TokenHash::of("alice-1"));
        assert_eq!(shown, "Access(3 tokens) User(acme/alice) [token]");
    }
}
