//! The table of sessions and its limits. A session id consists of 16 hex digits that are public and 32 that are secret;
//! it is valid only with the user's token and at the endpoint that created it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq as _;
use tokio::time::Instant;

use super::access::User;
use super::clients::{self, ClientStatus, StatelessClients};
use super::face::ClientDescription;
use super::session::guest::ClientLifetime;
use super::session::{ClientSession, EndpointPath, SessionEnd, SessionFacts};
use super::stream::is_crowded;
use mcp_satellite_config::GatewayLimits;

/// Reason for rejecting a new session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionLimitError {
    /// The user has the maximum number of sessions, and none is idle.
    User(usize),
    /// The endpoint has the maximum number of sessions, and none is idle.
    All(usize),
    /// The system provides no random numbers.
    NoNumbers,
}

type Owner = (TeamId, UserId);

#[derive(Debug, Default)]
struct SessionTable {
    all: HashMap<u64, Arc<ClientSession>>,
    of: HashMap<Owner, HashSet<u64>>,
    // Sessions of stateless requests. They count against the user's calls, not as sessions.
    guests: HashMap<u64, Arc<ClientSession>>,
    // Statistics of the clients of stateless requests.
    visitors: StatelessClients,
}

/// The table of sessions. Created before the runtime, whose messages find their clients here.
#[derive(Debug)]
pub struct Sessions {
    table: Mutex<SessionTable>,
    random: SystemRandom,
    // Memory budget of the whole satellite.
    memory: Arc<ByteBudget>,
    // Part of `memory` for buffered events and unread responses.
    streams: Arc<ByteBudget>,
}

impl Default for Sessions {
    fn default() -> Self {
        Self::new()
    }
}

fn owner(user: &User) -> Owner {
    (user.team.clone(), user.user.clone())
}

impl SessionTable {
    fn remove(&mut self, number: u64) -> Option<Arc<ClientSession>> {
        let session = self.all.remove(&number)?;
        if session.is_guest() {
            self.visitors.leave(&session.opening, Instant::now());
        }
        let owner = owner(session.user());
        if let Some(numbers) = self.of.get_mut(&owner) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.of.remove(&owner);
            }
        }
        Some(session)
    }

    fn idlest<'a>(&self, numbers: impl Iterator<Item = &'a u64>) -> Option<u64> {
        let idle = |number: &u64| Some((self.all.get(number)?.idle_since()?, *number));
        numbers.filter_map(idle).min().map(|(_, number)| number)
    }
}

impl Sessions {
    /// Creates an empty table without a memory limit.
    pub fn new() -> Self {
        Self::within(ByteBudget::unlimited())
    }

    /// Creates an empty table whose buffers count as part of `memory`.
    pub fn within(memory: Arc<ByteBudget>) -> Self {
        let streams = memory.part(usize::MAX);
        Self { table: Mutex::default(), random: SystemRandom::new(), memory, streams }
    }

    pub fn memory(&self) -> &Arc<ByteBudget> {
        &self.memory
    }

    /// Returns the budget of the streams of all clients.
    pub fn streams(&self) -> &ByteBudget {
        &self.streams
    }

    fn table(&self) -> MutexGuard<'_, SessionTable> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn open(
        &self,
        opening: SessionFacts,
        limits: &GatewayLimits,
        now: Instant,
    ) -> Result<(Arc<ClientSession>, Vec<Arc<ClientSession>>), SessionLimitError> {
        let mut table = self.table();
        let mut evicted = Vec::new();
        let owner = owner(&opening.pass.user);
        let own = table.of.get(&owner).map_or(0, HashSet::len);
        if own >= limits.sessions_per_user_max {
            let idlest = table.of.get(&owner).and_then(|numbers| table.idlest(numbers.iter()));
            evicted.extend(table.remove(idlest.ok_or(SessionLimitError::User(limits.sessions_per_user_max))?));
        } else if table.all.len() >= limits.sessions_max {
            let idlest = table.idlest(table.all.keys());
            evicted.extend(table.remove(idlest.ok_or(SessionLimitError::All(limits.sessions_max))?));
        }
        let session = self.made(&table, opening, now)?;
        let number = session.number();
        if session.is_guest() {
            table.visitors.enter(&session.opening, false, now);
        }
        table.all.insert(number, session.clone());
        table.of.entry(owner).or_default().insert(number);
        drop(table);
        for session in &evicted {
            session.end(SessionEnd::Evicted);
        }
        Ok((session, evicted))
    }

    pub fn guest(&self, opening: SessionFacts, now: Instant) -> Result<Arc<ClientSession>, SessionLimitError> {
        let mut table = self.table();
        let guest = self.made(&table, opening, now)?;
        let calls_tool =
            matches!(&guest.opening.presence, ClientLifetime::Request { method, .. } if &**method == "tools/call");
        table.visitors.enter(&guest.opening, calls_tool, now);
        table.guests.insert(guest.number(), guest.clone());
        Ok(guest)
    }

    pub fn goes(&self, guest: &ClientSession) {
        guest.end(SessionEnd::Closed);
        let mut table = self.table();
        if table.guests.remove(&guest.number()).is_some() {
            table.visitors.leave(&guest.opening, Instant::now());
        }
    }

    pub fn saw(&self, user: &User, client: &ClientDescription, now: Instant) {
        self.table().visitors.seen(user, client, now);
    }

    pub fn clients(&self, now: Instant) -> Vec<ClientStatus> {
        let table = self.table();
        let sessions = table.all.values().filter(|session| !session.is_guest());
        let mut clients: Vec<_> = sessions.filter_map(|session| clients::of_session(session, now)).collect();
        clients.extend(table.visitors.list(now));
        clients.sort_by(|one, other| one.order().cmp(&other.order()));
        clients
    }

    fn made(
        &self,
        table: &SessionTable,
        opening: SessionFacts,
        now: Instant,
    ) -> Result<Arc<ClientSession>, SessionLimitError> {
        let mut key = [0; 24];
        loop {
            self.random.fill(&mut key).map_err(|_| SessionLimitError::NoNumbers)?;
            let (number, secret) = split(&key);
            if !table.all.contains_key(&number) && !table.guests.contains_key(&number) {
                return Ok(Arc::new(ClientSession::new(number, secret, opening, now, self.streams.clone())));
            }
        }
    }

    /// Returns the session of an id if it belongs to this user and endpoint, and marks it as active.
    /// Returns the session of an id if it belongs to this user and endpoint, and marks it as active.
    pub fn find(&self, id: &str, user: &User, place: EndpointPath<'_>, now: Instant) -> Option<Arc<ClientSession>> {
        let (number, secret) = parse(id)?;
        let session = self.table().all.get(&number)?.clone();
        let is_it = bool::from(secret.ct_eq(session.secret()));
        let is_it = is_it && !session.is_guest() && session.user().is_same(user);
        (is_it && session.active(place, now)).then_some(session)
    }

    /// Returns the session of a number, including those of stateless requests. Messages from servers contain this
    /// number.
    pub fn get(&self, number: u64) -> Option<Arc<ClientSession>> {
        let table = self.table();
        table.all.get(&number).or_else(|| table.guests.get(&number)).cloned()
    }

    /// Returns the number of sessions, without those of stateless requests.
    pub fn len(&self) -> usize {
        self.table().all.len()
    }

    /// Returns true if there is no session.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the sessions, without those of stateless requests.
    pub fn all(&self) -> Vec<Arc<ClientSession>> {
        self.table().all.values().cloned().collect()
    }

    pub fn guests(&self) -> Vec<Arc<ClientSession>> {
        self.table().guests.values().cloned().collect()
    }

    pub fn of(&self, team: &TeamId, user: &UserId) -> Vec<Arc<ClientSession>> {
        let table = self.table();
        let numbers = table.of.get(&(team.clone(), user.clone())).into_iter().flatten();
        let sessions = numbers.filter_map(|number| table.all.get(number));
        let is_theirs = |guest: &&Arc<ClientSession>| guest.user().team == *team && guest.user().user == *user;
        sessions.chain(table.guests.values().filter(is_theirs)).cloned().collect()
    }

    pub fn close(&self, session: &Arc<ClientSession>, why: SessionEnd) -> Option<Arc<ClientSession>> {
        session.end(why);
        self.table().remove(session.number())
    }

    pub fn sweep(&self, limits: &GatewayLimits, now: Instant) -> Vec<Arc<ClientSession>> {
        let over = |session: &&Arc<ClientSession>| {
            let idle =
                session.idle_since().is_some_and(|since| now.saturating_duration_since(since) >= limits.session_idle);
            if now.saturating_duration_since(session.began()) >= limits.session_age_max {
                session.end(SessionEnd::Age);
            } else if idle {
                session.end(SessionEnd::Idle);
            }
            session.ended().is_some()
        };
        let mut table = self.table();
        table.visitors.forget(now);
        let numbers: Vec<u64> = table.all.values().filter(over).map(|session| session.number()).collect();
        numbers.into_iter().filter_map(|number| table.remove(number)).collect()
    }

    /// If more than half of the budget is used, drops events that are kept for absent clients, least useful first,
    /// until less than three eighths are used.
    pub fn relieve(&self) {
        if !is_crowded(&self.streams) {
            return;
        }
        let mut all = self.all();
        all.sort_by_cached_key(|session| session.worth_keeping());
        for session in all {
            session.forget();
            if !self.streams.is_overdrawn() && self.streams.used() <= self.streams.max() / 8 * 3 {
                return;
            }
        }
    }
}

pub(super) fn split(key: &[u8; 24]) -> (u64, [u8; 16]) {
    let (mut number, mut secret) = ([0; 8], [0; 16]);
    number.copy_from_slice(&key[..8]);
    secret.copy_from_slice(&key[8..]);
    (u64::from_be_bytes(number), secret)
}

pub(super) fn parse(id: &str) -> Option<(u64, [u8; 16])> {
    if id.len() != 48 || !id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
        return None;
    }
    let (number, secret) = id.split_at(16);
    let secret = u128::from_str_radix(secret, 16).ok()?;
    Some((u64::from_str_radix(number, 16).ok()?, secret.to_be_bytes()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
pub(super) mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use axum::http::HeaderValue;
    use axum::http::header::AUTHORIZATION;
    use futures::StreamExt as _;
    use mcp_satellite_actors::model::ids::{InstallationId, InstanceId};

    use super::super::access::{Access, Permission};
    use super::super::face::EndpointId;
    use super::super::stream::UNASKED;
    use super::*;
    use mcp_satellite_config::{GatewayPlan, GatewayUser, TokenHash};

    pub(in super::super) fn user(name: &str) -> Permission {
        let (team, slug, tokens) = ("team".into(), name.into(), vec![TokenHash::of("t")]);
        let user = GatewayUser {
            team,
            team_slug: "t".into(),
            user: name.into(),
            slug,
            tokens,
            token_kept: false,
            flat: false,
        };
        let access = Access::new(&GatewayPlan { users: vec![user], ..GatewayPlan::default() }).unwrap();
        let shown = [(AUTHORIZATION, HeaderValue::from_static("Bearer t"))].into_iter().collect();
        access.admit(&shown, IpAddr::from([127, 0, 0, 1])).unwrap()
    }

    pub(in super::super) fn opening(pass: &Permission, endpoint: EndpointId) -> SessionFacts {
        let (pass, greeting, version) = (pass.clone(), ClientDescription::default(), "2025-11-25".into());
        let name = if let EndpointId::Instance(id) = &endpoint { id.installation.as_str() } else { "" }.into();
        SessionFacts { pass, endpoint, name, greeting, version, user_agent: None, presence: ClientLifetime::Session }
    }

    fn instance(name: &str) -> EndpointId {
        EndpointId::Instance(InstanceId::new("team".into(), "alice".into(), InstallationId::from(name)))
    }

    #[test]
    fn a_session_is_found_by_its_user_at_its_endpoint_and_by_nobody_else() {
        let (sessions, alice, now) = (Sessions::new(), user("alice"), Instant::now());
        let (session, _) = sessions.open(opening(&alice, EndpointId::Tools), &GatewayLimits::default(), now).unwrap();
        let id = session.id();
        assert_eq!(id.len(), 48);
        let find = |id: &str, pass: &Permission, place| sessions.find(id, &pass.user, place, now).is_some();
        // A user read from a new configuration is the same user.
        assert!(find(&id, &user("alice"), EndpointPath::Tools));
        assert!(!find(&id, &user("bob"), EndpointPath::Tools));
        for elsewhere in [EndpointPath::Flat, EndpointPath::Instance("a"), EndpointPath::Instance("")] {
            assert!(!find(&id, &alice, elsewhere), "{elsewhere:?}");
        }
        let wrong = format!("{}{}", &id[..47], if id.ends_with('0') { '1' } else { '0' });
        for id in [wrong.as_str(), &id[..16], &id.to_uppercase().replace(char::is_numeric, "A"), "", "é"] {
            assert!(!find(id, &alice, EndpointPath::Tools), "{id}");
        }
        assert!(sessions.close(&session, SessionEnd::Closed).is_some());
        assert!(!find(&id, &alice, EndpointPath::Tools));
        assert!(sessions.close(&session, SessionEnd::Closed).is_none());
        assert!(sessions.is_empty() && sessions.table().of.is_empty());

        let (session, _) = sessions.open(opening(&alice, instance("a")), &GatewayLimits::default(), now).unwrap();
        assert!(find(&session.id(), &alice, EndpointPath::Instance("a")));
        for elsewhere in [EndpointPath::Instance("b"), EndpointPath::Instance(""), EndpointPath::Tools] {
            assert!(!find(&session.id(), &alice, elsewhere), "{elsewhere:?}");
        }
    }

    #[tokio::test]
    async fn what_is_kept_for_who_was_away_longest_is_forgotten_first() {
        let (sessions, alice, start) = (Sessions::new(), user("alice"), Instant::now());
        let open = |seconds| {
            let opened = sessions.open(
                opening(&alice, EndpointId::Tools),
                &GatewayLimits::default(),
                start + Duration::from_secs(seconds),
            );
            opened.unwrap().0
        };
        // The session that is inactive longest has a listener.
        let away = [open(0), open(2), open(1), open(3)];
        let _listening = away[0].listen(0, None, Duration::from_secs(60));
        for session in &away {
            session.say(None, &[&"x".repeat(1000)]);
        }
        let used = sessions.streams().used();
        let lost = || away.each_ref().map(|session| session.lost());
        sessions.streams().set(2 * used);
        sessions.relieve();
        assert_eq!(lost(), [0, 0, 0, 0], "there is room");
        sessions.streams().set(2 * used - 10);
        sessions.relieve();
        assert_eq!(lost(), [0, 1, 1, 0]);
        assert!(!is_crowded(sessions.streams()));
        sessions.streams().set(10);
        sessions.relieve();
        assert_eq!(lost(), [0, 1, 1, 1], "messages that a listener has not received are kept");
        drop(away);
    }

    #[test]
    fn over_the_limit_the_longest_idle_session_goes_and_one_at_work_stays() {
        let (sessions, alice, bob, start) = (Sessions::new(), user("alice"), user("bob"), Instant::now());
        let limits = GatewayLimits { sessions_max: 4, sessions_per_user_max: 3, ..GatewayLimits::default() };
        let open = |user: &Permission, seconds| {
            sessions.open(opening(user, EndpointId::Tools), &limits, start + Duration::from_secs(seconds))
        };
        let (first, _) = open(&alice, 0).unwrap();
        let (second, _) = open(&alice, 1).unwrap();
        let (third, _) = open(&alice, 2).unwrap();
        let (_others, _) = open(&bob, 0).unwrap();
        first.begin(&"1".into(), true).unwrap();
        let (fourth, evicted) = open(&alice, 3).unwrap();
        assert_eq!(evicted.iter().map(|session| session.number()).collect::<Vec<_>>(), [second.number()]);
        assert_eq!(second.ended(), Some(SessionEnd::Evicted));
        third.begin(&"1".into(), true).unwrap();
        fourth.begin(&"1".into(), true).unwrap();
        assert_eq!(open(&alice, 4).err(), Some(SessionLimitError::User(3)));
        // Bob is below his own limit, but the endpoint is full: his idle session is evicted.
        let (bobs, evicted) = open(&bob, 5).unwrap();
        assert_eq!(evicted.len(), 1);
        assert_eq!(sessions.len(), 4);
        bobs.begin(&"1".into(), true).unwrap();
        assert_eq!(open(&bob, 6).err(), Some(SessionLimitError::All(4)));
    }

    #[test]
    fn a_session_ends_when_it_is_idle_or_old_and_not_while_it_works() {
        let (sessions, alice, start) = (Sessions::new(), user("alice"), Instant::now());
        let second = Duration::from_secs(1);
        let limits =
            GatewayLimits { session_idle: 10 * second, session_age_max: 100 * second, ..GatewayLimits::default() };
        let (idle, _) = sessions.open(opening(&alice, EndpointId::Tools), &limits, start).unwrap();
        let (works, _) = sessions.open(opening(&alice, EndpointId::Tools), &limits, start).unwrap();
        let (call, _withdrawn) = works.begin(&"1".into(), true).unwrap();
        assert!(sessions.sweep(&limits, start + 9 * second).is_empty());
        assert_eq!(sessions.sweep(&limits, start + 10 * second).len(), 1);
        assert_eq!((idle.ended(), works.ended()), (Some(SessionEnd::Idle), None));
        works.close(call);
        assert!(works.active(EndpointPath::Tools, start + 95 * second));
        assert!(sessions.sweep(&limits, start + 99 * second).is_empty());
        assert_eq!(sessions.sweep(&limits, start + 100 * second).len(), 1);
        assert_eq!(works.ended(), Some(SessionEnd::Age));
    }

    #[tokio::test]
    async fn what_is_said_after_an_answer_is_not_lost() {
        let (sessions, alice, now) = (Sessions::new(), user("alice"), Instant::now());
        let (session, _) = sessions.open(opening(&alice, EndpointId::Tools), &GatewayLimits::default(), now).unwrap();
        let mut expected = Vec::new();
        for answered_by_json in [true, false] {
            let (call, _withdrawn) = session.begin(&"1".into(), true).unwrap();
            if answered_by_json {
                assert!(session.is_answered_first(call));
            } else {
                session.say(Some(call), &["before"]);
                assert!(!session.is_answered_first(call));
                session.finish(call, Some(&["answer"]));
            }
            for (of, text) in [(None, "unasked"), (Some(call), "of the call")] {
                session.say(of, &[text]);
                expected.push(format!("id: 0-{}\ndata: {text}\n\n", expected.len() + 1));
            }
            session.close(call);
        }
        let mut heard = session.listen(UNASKED, Some(0), Duration::from_secs(60)).unwrap();
        for expected in expected {
            let Some(Ok(event)) = heard.next().await else { panic!("{expected:?} is lost") };
            assert_eq!(event, expected);
        }
    }
}
