//! The table of sessions and its limits. A session id consists of 16 hex digits that are public and 32 that are secret;
//! it is valid only with the user's token and at the endpoint that created it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_protocol::method;
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq as _;
use tokio::time::Instant;

use super::access::User;
use super::client_description::ClientDescription;
use super::clients::{self, ClientStatus, StatelessClients};
use super::endpoint_id::EndpointPath;
use super::session::{ClientLifetime, ClientSession, SessionEnd, SessionFacts};
use super::stream::is_crowded;
use super::traffic::HttpTraffic;
use mcp_satellite_config::GatewayLimits;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionLimitError {
    /// The user has the maximum number of sessions, and none is idle.
    User(usize),
    /// The endpoint has the maximum number of sessions, and none is idle.
    All(usize),
    NoRandomNumbers,
}

type Owner = (TeamId, UserId);

#[derive(Debug, Default)]
struct SessionTable {
    sessions: HashMap<u64, Arc<ClientSession>>,
    by_owner: HashMap<Owner, HashSet<u64>>,
    // Sessions of stateless requests. They count against the user's calls, not as sessions.
    stateless_requests: HashMap<u64, Arc<ClientSession>>,
    // Number of the last session in `stateless_requests`.
    stateless_opened: u64,
    // Statistics of the clients of stateless requests.
    stateless_clients: StatelessClients,
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
    traffic: Arc<HttpTraffic>,
    // Absent in the first satellite below a keeper.
    crash: OnceLock<EarlierCrash>,
}

/// The crash of the satellite before this one, with which its sessions were lost.
#[derive(Debug)]
struct EarlierCrash {
    /// Tag of the sessions of this satellite.
    tag: u8,
    message: String,
}

/// Tag of the sessions of the first satellite below a keeper.
const FIRST_TAG: u8 = 1;

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
        let session = self.sessions.remove(&number)?;
        if session.is_stateless() {
            self.stateless_clients.close_request(&session.facts, Instant::now());
        }
        let owner = owner(session.user());
        if let Some(numbers) = self.by_owner.get_mut(&owner) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_owner.remove(&owner);
            }
        }
        Some(session)
    }

    fn longest_idle<'a>(&self, numbers: impl Iterator<Item = &'a u64>) -> Option<u64> {
        let idle = |number: &u64| Some((self.sessions.get(number)?.idle_since()?, *number));
        numbers.filter_map(idle).min().map(|(_, number)| number)
    }
}

impl Sessions {
    pub fn new() -> Self {
        Self::with_memory(ByteBudget::unlimited())
    }

    pub fn with_memory(memory: Arc<ByteBudget>) -> Self {
        let streams = memory.part(usize::MAX);
        let (table, random, traffic, crash) = (Mutex::default(), SystemRandom::new(), Arc::default(), OnceLock::new());
        Self { table, random, memory, streams, traffic, crash }
    }

    /// Notes that this satellite follows one that has crashed, before the first session is opened. `generation` is its number
    /// below the keeper, and `restarted_at` the time of its start for people.
    pub fn note_crash(&self, generation: u32, restarted_at: &str) {
        let tag = generation.to_le_bytes()[0];
        let message = format!(
            "the satellite was restarted at {restarted_at} after a crash; this session is lost, and a call that was open \
             then may have been executed; begin with `initialize`"
        );
        // It is noted once.
        let _ = self.crash.set(EarlierCrash { tag, message });
    }

    /// Returns the reason why a session with this id does not exist, if its satellite has crashed. It depends on the form of
    /// the id only and discloses nothing.
    pub fn loss_of(&self, id: &str) -> Option<&str> {
        let EarlierCrash { tag, message } = self.crash.get()?;
        let (number, _) = parse_key(id)?;
        (number.to_be_bytes()[0] != *tag).then_some(message)
    }

    pub fn memory(&self) -> &Arc<ByteBudget> {
        &self.memory
    }

    /// Returns the counters of HTTP requests and bytes, which outlive the listeners.
    pub fn traffic(&self) -> &Arc<HttpTraffic> {
        &self.traffic
    }

    pub fn stream_budget(&self) -> &ByteBudget {
        &self.streams
    }

    fn table(&self) -> MutexGuard<'_, SessionTable> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn open(
        &self,
        facts: SessionFacts,
        limits: &GatewayLimits,
        now: Instant,
    ) -> Result<(Arc<ClientSession>, Vec<Arc<ClientSession>>), SessionLimitError> {
        let mut table = self.table();
        let mut evicted = Vec::new();
        let owner = owner(&facts.permission.user);
        let own = table.by_owner.get(&owner).map_or(0, HashSet::len);
        if own >= limits.sessions_per_user_max {
            let idlest = table.by_owner.get(&owner).and_then(|numbers| table.longest_idle(numbers.iter()));
            evicted.extend(table.remove(idlest.ok_or(SessionLimitError::User(limits.sessions_per_user_max))?));
        } else if table.sessions.len() >= limits.sessions_max {
            let idlest = table.longest_idle(table.sessions.keys());
            evicted.extend(table.remove(idlest.ok_or(SessionLimitError::All(limits.sessions_max))?));
        }
        let session = self.create_session(&table, facts, now)?;
        let number = session.number();
        if session.is_stateless() {
            table.stateless_clients.open_request(&session.facts, false, now);
        }
        table.sessions.insert(number, session.clone());
        table.by_owner.entry(owner).or_default().insert(number);
        drop(table);
        for session in &evicted {
            session.end(SessionEnd::Evicted);
        }
        Ok((session, evicted))
    }

    /// Creates the session of one stateless request. Clients cannot refer to it, so it needs no secret and its number may
    /// be guessed.
    pub fn open_stateless(&self, facts: SessionFacts, now: Instant) -> Arc<ClientSession> {
        let mut table = self.table();
        loop {
            table.stateless_opened += 1;
            if !table.sessions.contains_key(&table.stateless_opened) {
                break;
            }
        }
        let number = table.stateless_opened;
        let session = Arc::new(ClientSession::new(number, [0; 16], facts, now, self.streams.clone()));
        let lifetime = &session.facts.lifetime;
        let calls_tool = matches!(lifetime, ClientLifetime::Request { method, .. } if &**method == method::TOOLS_CALL);
        table.stateless_clients.open_request(&session.facts, calls_tool, now);
        table.stateless_requests.insert(number, session.clone());
        session
    }

    pub fn close_stateless(&self, session: &ClientSession) {
        session.end(SessionEnd::Closed);
        let mut table = self.table();
        if table.stateless_requests.remove(&session.number()).is_some() {
            table.stateless_clients.close_request(&session.facts, Instant::now());
        }
    }

    pub fn record_request(&self, user: &User, client: &ClientDescription, now: Instant) {
        self.table().stateless_clients.record_request(user, client, now);
    }

    pub fn clients(&self, now: Instant) -> Vec<ClientStatus> {
        let table = self.table();
        let sessions = table.sessions.values().filter(|session| !session.is_stateless());
        let mut clients: Vec<_> = sessions.filter_map(|session| clients::session_status(session, now)).collect();
        clients.extend(table.stateless_clients.list(now));
        clients.sort_by(|one, other| one.sort_key().cmp(&other.sort_key()));
        clients
    }

    fn create_session(
        &self,
        table: &SessionTable,
        facts: SessionFacts,
        now: Instant,
    ) -> Result<Arc<ClientSession>, SessionLimitError> {
        let mut key = [0; 24];
        loop {
            self.random.fill(&mut key).map_err(|_| SessionLimitError::NoRandomNumbers)?;
            key[0] = self.crash.get().map_or(FIRST_TAG, |crash| crash.tag);
            let (number, secret) = split_key(&key);
            if !table.sessions.contains_key(&number) && !table.stateless_requests.contains_key(&number) {
                return Ok(Arc::new(ClientSession::new(number, secret, facts, now, self.streams.clone())));
            }
        }
    }

    /// Returns the session of an id if it belongs to this user and endpoint, and marks it as active.
    pub fn find(&self, id: &str, user: &User, path: EndpointPath<'_>, now: Instant) -> Option<Arc<ClientSession>> {
        let (number, secret) = parse_key(id)?;
        let session = self.table().sessions.get(&number)?.clone();
        let is_it = bool::from(secret.ct_eq(session.secret()));
        let is_it = is_it && !session.is_stateless() && session.user().is_same(user);
        (is_it && session.record_activity(path, now)).then_some(session)
    }

    /// Returns the session of a number, including those of stateless requests. Messages from servers contain this
    /// number.
    pub fn get(&self, number: u64) -> Option<Arc<ClientSession>> {
        let table = self.table();
        table.sessions.get(&number).or_else(|| table.stateless_requests.get(&number)).cloned()
    }

    pub fn len(&self) -> usize {
        self.table().sessions.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn all(&self) -> Vec<Arc<ClientSession>> {
        self.table().sessions.values().cloned().collect()
    }

    pub fn stateless_requests(&self) -> Vec<Arc<ClientSession>> {
        self.table().stateless_requests.values().cloned().collect()
    }

    pub fn user_sessions(&self, team: &TeamId, user: &UserId) -> Vec<Arc<ClientSession>> {
        let table = self.table();
        let numbers = table.by_owner.get(&(team.clone(), user.clone())).into_iter().flatten();
        let sessions = numbers.filter_map(|number| table.sessions.get(number));
        let is_of_user = |session: &&Arc<ClientSession>| session.user().team == *team && session.user().user == *user;
        sessions.chain(table.stateless_requests.values().filter(is_of_user)).cloned().collect()
    }

    pub fn close(&self, session: &Arc<ClientSession>, why: SessionEnd) -> Option<Arc<ClientSession>> {
        session.end(why);
        self.table().remove(session.number())
    }

    pub fn sweep(&self, limits: &GatewayLimits, now: Instant) -> Vec<Arc<ClientSession>> {
        let is_expired = |session: &&Arc<ClientSession>| {
            let idle =
                session.idle_since().is_some_and(|since| now.saturating_duration_since(since) >= limits.session_idle);
            if now.saturating_duration_since(session.started_at()) >= limits.session_age_max {
                session.end(SessionEnd::Age);
            } else if idle {
                session.end(SessionEnd::Idle);
            }
            session.end_reason().is_some()
        };
        let mut table = self.table();
        table.stateless_clients.remove_absent(now);
        let numbers: Vec<u64> = table.sessions.values().filter(is_expired).map(|session| session.number()).collect();
        numbers.into_iter().filter_map(|number| table.remove(number)).collect()
    }

    /// If more than half of the budget is used, drops events that are kept for absent clients, least useful first,
    /// until less than three eighths are used.
    pub fn free_stream_memory(&self) {
        if !is_crowded(&self.streams) {
            return;
        }
        let mut all = self.all();
        all.sort_by_cached_key(|session| session.drop_priority());
        for session in all {
            session.drop_buffered_events();
            if !self.streams.is_overdrawn() && self.streams.used() <= self.streams.max() / 8 * 3 {
                return;
            }
        }
    }
}

pub(super) fn split_key(key: &[u8; 24]) -> (u64, [u8; 16]) {
    let (mut number, mut secret) = ([0; 8], [0; 16]);
    number.copy_from_slice(&key[..8]);
    secret.copy_from_slice(&key[8..]);
    (u64::from_be_bytes(number), secret)
}

pub(super) fn parse_key(id: &str) -> Option<(u64, [u8; 16])> {
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
    use super::super::endpoint_id::EndpointId;
    use super::super::stream::SESSION_STREAM;
    use super::*;
    use mcp_satellite_config::{GatewayPlan, GatewayUser, TokenHash};

    pub(in super::super) fn user(name: &str) -> Permission {
        let (team, slug, tokens) = ("team".into(), name.into(), vec![TokenHash::from_token("t")]);
        let user = GatewayUser {
            team,
            team_slug: "t".into(),
            user: name.into(),
            slug,
            tokens,
            has_stored_token: false,
            access: None,
            flat: false,
        };
        let access = Access::new(&GatewayPlan { users: vec![user], ..GatewayPlan::default() }).unwrap();
        let headers = [(AUTHORIZATION, HeaderValue::from_static("Bearer t"))].into_iter().collect();
        access.admit(&headers, IpAddr::from([127, 0, 0, 1])).unwrap()
    }

    pub(in super::super) fn session_facts(pass: &Permission, endpoint: EndpointId) -> SessionFacts {
        let (pass, greeting, version) = (pass.clone(), ClientDescription::default(), "2025-11-25".into());
        let name = if let EndpointId::Instance(id) = &endpoint { id.installation.as_str() } else { "" }.into();
        SessionFacts {
            permission: pass,
            endpoint,
            name,
            client: greeting,
            version,
            user_agent: None,
            lifetime: ClientLifetime::Session,
        }
    }

    fn instance(name: &str) -> EndpointId {
        EndpointId::Instance(InstanceId::new("team".into(), "alice".into(), InstallationId::from(name)))
    }

    #[test]
    fn a_session_of_a_crashed_satellite_is_reported_as_lost() {
        let open = |sessions: &Sessions| {
            let facts = session_facts(&user("alice"), EndpointId::Tools);
            sessions.open(facts, &GatewayLimits::default(), Instant::now()).unwrap().0.id()
        };
        let first = Sessions::new();
        let lost = open(&first);
        assert_eq!(first.loss_of(&lost), None, "no satellite has crashed");
        let next = Sessions::new();
        next.note_crash(2, "2026-11-27T12:00:03Z");
        let message = next.loss_of(&lost).unwrap();
        assert!(message.starts_with("the satellite was restarted at 2026-11-27T12:00:03Z after a crash;"), "{message}");
        let own = open(&next);
        assert_eq!(next.loss_of(&own), None, "a session of this satellite that has ended");
        assert_eq!(next.loss_of("no id"), None);
        let third = Sessions::new();
        third.note_crash(3, "2026-11-27T12:00:09Z");
        assert!(third.loss_of(&own).is_some() && third.loss_of(&lost).is_some());
    }

    #[test]
    fn a_session_is_found_only_by_its_user_at_its_endpoint() {
        let (sessions, alice, now) = (Sessions::new(), user("alice"), Instant::now());
        let (session, _) =
            sessions.open(session_facts(&alice, EndpointId::Tools), &GatewayLimits::default(), now).unwrap();
        let id = session.id();
        assert_eq!(id.len(), 48);
        let find = |id: &str, permission: &Permission, path| sessions.find(id, &permission.user, path, now).is_some();
        // A user read from a new configuration is the same user.
        assert!(find(&id, &user("alice"), EndpointPath::Tools));
        assert!(!find(&id, &user("bob"), EndpointPath::Tools));
        for other_path in [EndpointPath::Flat, EndpointPath::Instance("a"), EndpointPath::Instance("")] {
            assert!(!find(&id, &alice, other_path), "{other_path:?}");
        }
        let wrong = format!("{}{}", &id[..47], if id.ends_with('0') { '1' } else { '0' });
        for id in [wrong.as_str(), &id[..16], &id.to_uppercase().replace(char::is_numeric, "A"), "", "é"] {
            assert!(!find(id, &alice, EndpointPath::Tools), "{id}");
        }
        assert!(sessions.close(&session, SessionEnd::Closed).is_some());
        assert!(!find(&id, &alice, EndpointPath::Tools));
        assert!(sessions.close(&session, SessionEnd::Closed).is_none());
        assert!(sessions.is_empty() && sessions.table().by_owner.is_empty());

        let (session, _) = sessions.open(session_facts(&alice, instance("a")), &GatewayLimits::default(), now).unwrap();
        assert!(find(&session.id(), &alice, EndpointPath::Instance("a")));
        for other_path in [EndpointPath::Instance("b"), EndpointPath::Instance(""), EndpointPath::Tools] {
            assert!(!find(&session.id(), &alice, other_path), "{other_path:?}");
        }
    }

    #[tokio::test]
    async fn the_buffer_of_the_longest_inactive_session_is_dropped_first() {
        let (sessions, alice, start) = (Sessions::new(), user("alice"), Instant::now());
        let open = |seconds| {
            let opened = sessions.open(
                session_facts(&alice, EndpointId::Tools),
                &GatewayLimits::default(),
                start + Duration::from_secs(seconds),
            );
            opened.unwrap().0
        };
        // The session that is inactive longest has a listener.
        let abandoned = [open(0), open(2), open(1), open(3)];
        let _listening = abandoned[0].listen(0, None, Duration::from_secs(60));
        for session in &abandoned {
            session.send(None, &[&"x".repeat(1000)]);
        }
        let used = sessions.stream_budget().used();
        let lost = || abandoned.each_ref().map(|session| session.lost_count());
        sessions.stream_budget().set_max(2 * used);
        sessions.free_stream_memory();
        assert_eq!(lost(), [0, 0, 0, 0], "the budget is not exceeded");
        sessions.stream_budget().set_max(2 * used - 10);
        sessions.free_stream_memory();
        assert_eq!(lost(), [0, 1, 1, 0]);
        assert!(!is_crowded(sessions.stream_budget()));
        sessions.stream_budget().set_max(10);
        sessions.free_stream_memory();
        assert_eq!(lost(), [0, 1, 1, 1], "messages that a listener has not received are kept");
        drop(abandoned);
    }

    #[test]
    fn the_limit_evicts_the_longest_idle_session_but_not_a_busy_one() {
        let (sessions, alice, bob, start) = (Sessions::new(), user("alice"), user("bob"), Instant::now());
        let limits = GatewayLimits { sessions_max: 4, sessions_per_user_max: 3, ..GatewayLimits::default() };
        let open = |user: &Permission, seconds| {
            sessions.open(session_facts(user, EndpointId::Tools), &limits, start + Duration::from_secs(seconds))
        };
        let (first, _) = open(&alice, 0).unwrap();
        let (second, _) = open(&alice, 1).unwrap();
        let (third, _) = open(&alice, 2).unwrap();
        let (_others, _) = open(&bob, 0).unwrap();
        first.open_call(&"1".into(), true).unwrap();
        let (fourth, evicted) = open(&alice, 3).unwrap();
        assert_eq!(evicted.iter().map(|session| session.number()).collect::<Vec<_>>(), [second.number()]);
        assert_eq!(second.end_reason(), Some(SessionEnd::Evicted));
        third.open_call(&"1".into(), true).unwrap();
        fourth.open_call(&"1".into(), true).unwrap();
        assert_eq!(open(&alice, 4).err(), Some(SessionLimitError::User(3)));
        // Bob is below his own limit, but the endpoint is full: his idle session is evicted.
        let (bobs, evicted) = open(&bob, 5).unwrap();
        assert_eq!(evicted.len(), 1);
        assert_eq!(sessions.len(), 4);
        bobs.open_call(&"1".into(), true).unwrap();
        assert_eq!(open(&bob, 6).err(), Some(SessionLimitError::All(4)));
    }

    #[test]
    fn an_idle_or_old_session_ends_but_not_a_busy_one() {
        let (sessions, alice, start) = (Sessions::new(), user("alice"), Instant::now());
        let second = Duration::from_secs(1);
        let limits =
            GatewayLimits { session_idle: 10 * second, session_age_max: 100 * second, ..GatewayLimits::default() };
        let (idle, _) = sessions.open(session_facts(&alice, EndpointId::Tools), &limits, start).unwrap();
        let (works, _) = sessions.open(session_facts(&alice, EndpointId::Tools), &limits, start).unwrap();
        let (call, _withdrawn) = works.open_call(&"1".into(), true).unwrap();
        assert!(sessions.sweep(&limits, start + 9 * second).is_empty());
        assert_eq!(sessions.sweep(&limits, start + 10 * second).len(), 1);
        assert_eq!((idle.end_reason(), works.end_reason()), (Some(SessionEnd::Idle), None));
        works.close_call(call);
        assert!(works.record_activity(EndpointPath::Tools, start + 95 * second));
        assert!(sessions.sweep(&limits, start + 99 * second).is_empty());
        assert_eq!(sessions.sweep(&limits, start + 100 * second).len(), 1);
        assert_eq!(works.end_reason(), Some(SessionEnd::Age));
    }

    #[tokio::test]
    async fn a_message_after_a_response_is_not_lost() {
        let (sessions, alice, now) = (Sessions::new(), user("alice"), Instant::now());
        let (session, _) =
            sessions.open(session_facts(&alice, EndpointId::Tools), &GatewayLimits::default(), now).unwrap();
        let mut expected = Vec::new();
        for answered_by_json in [true, false] {
            let (call, _withdrawn) = session.open_call(&"1".into(), true).unwrap();
            if answered_by_json {
                assert!(session.try_finish_without_stream(call));
            } else {
                session.send(Some(call), &["before"]);
                assert!(!session.try_finish_without_stream(call));
                session.finish_call(call, Some(&["answer"]));
            }
            for (of, text) in [(None, "unasked"), (Some(call), "of the call")] {
                session.send(of, &[text]);
                expected.push(format!("id: 0-{}\ndata: {text}\n\n", expected.len() + 1));
            }
            session.close_call(call);
        }
        let mut listener = session.listen(SESSION_STREAM, Some(0), Duration::from_secs(60)).unwrap();
        for expected in expected {
            let Some(Ok(event)) = listener.next().await else { panic!("{expected:?} is lost") };
            assert_eq!(event, expected);
        }
    }
}
