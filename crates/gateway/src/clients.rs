//! The connected clients that `satellite status` counts and `satellite clients` lists.
//!
//! A session is one client. Without sessions, all requests of one user with the same client name and version are one
//! client. A client counts while one of its requests or streams is open, and for [`PRESENT_FOR`] after the last one.

use std::collections::HashMap;

use mcp_satellite_actors::model::ids::{TeamId, UserId};
use serde::{Deserialize, Serialize};
use tokio::time::{Duration, Instant};

use super::access::User;
use super::client_description::ClientDescription;
use super::endpoint_id::EndpointId;
use super::session::{ClientSession, SessionFacts};

/// Time for which a client still counts after its last request or stream.
pub const PRESENT_FOR: Duration = Duration::from_secs(60);
// Maximum number of remembered clients without sessions. Clients choose their names freely, so there is a limit.
const VISITORS_MAX: usize = 1024;
// Maximum characters of a client's name and of its version.
const NAME_MAX: usize = 64;

/// Client entry of `satellite clients --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ClientStatus {
    pub team: String,
    pub user: String,
    pub client: String,
    pub client_version: String,
    pub protocol: String,
    /// Endpoint of the last request: `tools`, `flat`, or the instance of `/i/{instance}/mcp`.
    pub endpoint: String,
    /// Public half of the session id; none without a session.
    pub session_id: Option<String>,
    /// Number of open requests and streams.
    pub open: usize,
    pub tool_calls: u64,
    /// Seconds since the first request.
    pub connected_seconds: u64,
    /// Seconds since the last request or stream ended; 0 while one is open.
    pub idle_seconds: u64,
}

impl ClientStatus {
    pub(super) fn sort_key(&self) -> (&str, &str, &str, u64) {
        (&self.team, &self.user, &self.client, self.connected_seconds)
    }
}

type Key = (TeamId, UserId, String, String);

#[derive(Debug)]
struct StatelessClient {
    status: ClientStatus,
    connected_at: Instant,
    active_at: Instant,
}

#[derive(Debug, Default)]
pub(super) struct StatelessClients(HashMap<Key, StatelessClient>);

impl StatelessClients {
    pub(super) fn open_request(&mut self, opening: &SessionFacts, calls_tool: bool, now: Instant) {
        if let Some(status) = self.record_request(&opening.permission.user, &opening.client, now) {
            status.endpoint = endpoint_of(opening);
            status.open += 1;
            status.tool_calls += u64::from(calls_tool);
        }
    }

    /// Counts a request that is answered at once. Returns `None` if there are too many clients.
    pub(super) fn record_request(
        &mut self,
        user: &User,
        client: &ClientDescription,
        now: Instant,
    ) -> Option<&mut ClientStatus> {
        let key = key_of(user, client);
        if self.0.len() >= VISITORS_MAX && !self.0.contains_key(&key) {
            self.remove_absent(now);
            if self.0.len() >= VISITORS_MAX {
                return None;
            }
        }
        let (name, version) = (key.2.clone(), key.3.clone());
        let entry = self.0.entry(key).or_insert_with(|| StatelessClient {
            status: ClientStatus {
                team: user.team_slug.to_string(),
                user: user.slug.to_string(),
                client: name,
                client_version: version,
                protocol: client.version.clone(),
                endpoint: String::new(),
                session_id: None,
                open: 0,
                tool_calls: 0,
                connected_seconds: 0,
                idle_seconds: 0,
            },
            connected_at: now,
            active_at: now,
        });
        entry.active_at = now;
        Some(&mut entry.status)
    }

    pub(super) fn close_request(&mut self, opening: &SessionFacts, now: Instant) {
        if let Some(entry) = self.0.get_mut(&key_of(&opening.permission.user, &opening.client)) {
            entry.status.open = entry.status.open.saturating_sub(1);
            entry.active_at = now;
        }
    }

    pub(super) fn remove_absent(&mut self, now: Instant) {
        self.0.retain(|_, entry| entry.is_present(now));
    }

    pub(super) fn list(&self, now: Instant) -> impl Iterator<Item = ClientStatus> {
        self.0.values().filter(move |entry| entry.is_present(now)).map(move |entry| ClientStatus {
            connected_seconds: now.saturating_duration_since(entry.connected_at).as_secs(),
            idle_seconds: entry.idle_time(now).as_secs(),
            ..entry.status.clone()
        })
    }
}

impl StatelessClient {
    fn idle_time(&self, now: Instant) -> Duration {
        if self.status.open > 0 { Duration::ZERO } else { now.saturating_duration_since(self.active_at) }
    }

    fn is_present(&self, now: Instant) -> bool {
        self.idle_time(now) < PRESENT_FOR
    }
}

pub(super) fn session_status(session: &ClientSession, now: Instant) -> Option<ClientStatus> {
    let idle = session.idle_since().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    let opening = &session.facts;
    let (user, description) = (session.user(), &opening.client);
    (idle < PRESENT_FOR && session.end_reason().is_none()).then(|| ClientStatus {
        team: user.team_slug.to_string(),
        user: user.slug.to_string(),
        client: sanitize_name(&description.name),
        client_version: sanitize_name(&description.client_version),
        protocol: opening.version.clone(),
        endpoint: endpoint_of(opening),
        session_id: Some(session.public_id()),
        open: session.open_count(),
        tool_calls: session.tool_call_count(),
        connected_seconds: now.saturating_duration_since(session.started_at()).as_secs(),
        idle_seconds: idle.as_secs(),
    })
}

fn key_of(user: &User, client: &ClientDescription) -> Key {
    (user.team.clone(), user.user.clone(), sanitize_name(&client.name), sanitize_name(&client.client_version))
}

fn sanitize_name(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(NAME_MAX).collect()
}

fn endpoint_of(opening: &SessionFacts) -> String {
    match &opening.endpoint {
        EndpointId::Instance(_) | EndpointId::Control => opening.name.to_string(),
        EndpointId::Tools => "tools".to_owned(),
        EndpointId::Flat => "flat".to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::super::session::ClientLifetime;
    use super::super::session::SessionEnd;
    use super::super::sessions::Sessions;
    use super::super::sessions::tests::{session_facts, user};
    use super::*;
    use mcp_satellite_config::GatewayLimits;

    fn stateless_facts(name: &str, client: &str) -> SessionFacts {
        let info = format!(r#"{{"name":"{client}","version":"1"}}"#);
        let description = ClientDescription::new("2026-07-28".to_owned(), None, Some(&info));
        let presence = ClientLifetime::Request { method: "tools/call".into(), level: None };
        SessionFacts { client: description, lifetime: presence, ..session_facts(&user(name), EndpointId::Tools) }
    }

    #[tokio::test]
    async fn a_session_counts_as_connected_until_a_minute_after_its_last_activity() {
        let (sessions, alice, start) = (Sessions::new(), user("alice"), Instant::now());
        let limits = GatewayLimits::default();
        let (session, _) = sessions.open(session_facts(&alice, EndpointId::Flat), &limits, start).unwrap();
        let count = |seconds| sessions.clients(start + Duration::from_secs(seconds)).len();
        assert_eq!((count(0), count(59), count(61)), (1, 1, 0), "the client disappeared without ending its session");
        let events = session.listen(super::super::stream::SESSION_STREAM, None, PRESENT_FOR).unwrap();
        assert_eq!(count(3600), 1, "a listening client counts");
        drop(events);
        assert_eq!(count(3600), 0);
        let status = &sessions.clients(start)[0];
        assert_eq!((&*status.user, &*status.endpoint, status.session_id.is_some()), ("alice", "flat", true));
        sessions.close(&session, SessionEnd::Closed);
        assert_eq!(count(0), 0);
    }

    #[tokio::test]
    async fn stateless_clients_are_identified_by_user_and_client_name() {
        let (sessions, start) = (Sessions::new(), Instant::now());
        let open = |name: &str, client: &str| sessions.open_stateless(stateless_facts(name, client), start);
        let count = |seconds| sessions.clients(start + Duration::from_secs(seconds)).len();
        let (first, second) = (open("alice", "cursor"), open("alice", "cursor"));
        assert_eq!((count(0), count(3600)), (1, 1), "two requests of one client");
        assert_eq!((sessions.clients(start)[0].open, sessions.clients(start)[0].tool_calls), (2, 2));
        let (other, bobs) = (open("alice", "claude"), open("bob", "cursor"));
        assert_eq!(count(0), 3);
        for request in [first, second, other, bobs] {
            sessions.close_stateless(&request);
        }
        assert_eq!((count(50), count(120)), (3, 0));
    }

    #[test]
    fn the_number_and_length_of_stateless_client_names_are_limited() {
        let (mut clients, now) = (StatelessClients::default(), Instant::now());
        for number in 0..VISITORS_MAX + 10 {
            clients.open_request(&stateless_facts("alice", &number.to_string()), false, now);
        }
        assert_eq!(clients.list(now).count(), VISITORS_MAX);
        assert_eq!(sanitize_name(&"\u{1b}x".repeat(100)), "x".repeat(NAME_MAX));
    }
}
