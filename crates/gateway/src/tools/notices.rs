//! Sends `notifications/message` to clients of the six tools when one of their servers is lost or returns. The list of
//! the six tools does not change.
//!
//! There is one watcher for each user with such clients. A server is lost if it was online and has not been for
//! [`LOST_AFTER`]. At most [`NOTICES_MAX`] notices are sent in [`NOTICES_WINDOW`]; later ones are delayed and sent only
//! if they are still true.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::{InstanceId, TeamId, UserId};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_protocol::rpc::RpcMessage;
use serde::Serialize;
use tokio::time::{Duration, Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::caller::{CallerCache, CallerSnapshot};
use super::raw::to_json;
use crate::session::{ClientLifetime, ClientSession};
use crate::shared_session::McpLogLevel;

// Shorter interruptions are not reported.
const LOST_AFTER: Duration = Duration::from_secs(2);
const NOTICES_MAX: usize = 20;
const NOTICES_WINDOW: Duration = Duration::from_secs(60);
// Minimum time between two looks at the snapshots.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, PartialEq, Eq)]
struct ServerNotice {
    level: McpLogLevel,
    server: String,
    status: Status,
    message: String,
}

struct ServerObservation<'a> {
    id: &'a InstanceId,
    label: &'a str,
    status: Status,
    message: Option<&'a str>,
}

#[derive(Debug, Default)]
struct AnnouncedStates {
    servers: HashMap<InstanceId, AnnouncedState>,
    sent: VecDeque<Instant>,
}

#[derive(Debug)]
struct AnnouncedState {
    // True if the clients were told that it is online; `None` during its first start.
    online: Option<bool>,
    // Time since which the actual state differs from the announced one.
    differs_since: Option<Instant>,
}

impl AnnouncedStates {
    /// Returns the notices that are due, and when to look again. A server seen for the first time causes no notice.
    fn observe<'a>(
        &mut self,
        seen: impl Iterator<Item = ServerObservation<'a>>,
        now: Instant,
    ) -> (Vec<ServerNotice>, Option<Instant>) {
        let (mut notices, mut again_at) = (Vec::new(), None::<Instant>);
        let mut known = std::mem::take(&mut self.servers);
        while self.sent.front().is_some_and(|at| now.duration_since(*at) >= NOTICES_WINDOW) {
            self.sent.pop_front();
        }
        for ServerObservation { id, label, status, message } in seen {
            let online = status == Status::Online;
            let settled = (!status.is_transitional()).then_some(online);
            let mut state = known.remove(id).unwrap_or(AnnouncedState { online: settled, differs_since: None });
            if state.online.is_none_or(|known| known == online) {
                state = AnnouncedState { online: state.online.or(settled), differs_since: None };
            } else {
                let since = *state.differs_since.get_or_insert(now);
                let due = if online { since } else { since + LOST_AFTER };
                let free = if self.sent.len() < NOTICES_MAX { None } else { self.sent.front() };
                let due = free.map_or(due, |first| due.max(*first + NOTICES_WINDOW));
                if now >= due {
                    state = AnnouncedState { online: Some(online), differs_since: None };
                    self.sent.push_back(now);
                    let (level, default) =
                        if online { (McpLogLevel::Notice, "online") } else { (McpLogLevel::Warning, "not online") };
                    let message = message.filter(|_| !online).unwrap_or(default).to_owned();
                    notices.push(ServerNotice { level, server: label.to_owned(), status, message });
                } else {
                    again_at = Some(again_at.map_or(due, |at| at.min(due)));
                }
            }
            self.servers.insert(id.clone(), state);
        }
        (notices, again_at)
    }
}

fn observations(caller: &CallerSnapshot) -> impl Iterator<Item = ServerObservation<'_>> {
    caller.servers().map(|(label, view)| ServerObservation {
        id: &view.spec.id,
        label,
        status: view.status,
        message: view.message.as_deref(),
    })
}

impl ServerNotice {
    fn to_rpc_message(&self) -> Option<RpcMessage> {
        #[derive(Serialize)]
        struct NoticeData<'a> {
            server: &'a str,
            status: Status,
            message: &'a str,
        }
        let data = to_json(&NoticeData { server: &self.server, status: self.status, message: &self.message });
        let level = self.level.as_str();
        let text = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"{level}","logger":"mcp-satellite","data":{data}}}}}"#
        );
        RpcMessage::parse(text.into()).ok()
    }
}

#[derive(Debug, Default)]
struct NoticeClients(Mutex<NoticeSessions>);

type NoticeSessions = HashMap<u64, (Arc<ClientSession>, Option<McpLogLevel>)>;

impl NoticeClients {
    fn sessions(&self) -> MutexGuard<'_, NoticeSessions> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send_notice(&self, notice: &ServerNotice) {
        let Some(message) = notice.to_rpc_message() else { return };
        let receives = |from: &Option<McpLogLevel>| from.is_none_or(|from| from <= notice.level);
        let sessions: Vec<_> =
            self.sessions().values().filter(|(_, from)| receives(from)).map(|(one, _)| one.clone()).collect();
        for session in sessions {
            session.deliver(None, &message);
        }
    }
}

type NoticesByUser = HashMap<(TeamId, UserId), (Arc<NoticeClients>, AbortOnDropHandle<()>)>;

#[derive(Debug, Default)]
pub(super) struct ServerNotices(Mutex<NoticesByUser>);

impl ServerNotices {
    fn users(&self) -> MutexGuard<'_, NoticesByUser> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_client(&self, session: &Arc<ClientSession>, runtime: &RuntimeHandle, callers: &Arc<CallerCache>) {
        let level = match &session.facts.lifetime {
            ClientLifetime::Session => None,
            ClientLifetime::Listening { level: Some(level) } => Some(*level),
            ClientLifetime::Listening { level: None } | ClientLifetime::Request { .. } => return,
        };
        let key = (session.user().team.clone(), session.user().user.clone());
        let mut users = self.users();
        let (clients, _) = users.entry(key.clone()).or_insert_with(|| {
            let clients = Arc::<NoticeClients>::default();
            // Look now, so that a loss before the watcher first runs is reported.
            let mut known = AnnouncedStates::default();
            known.observe(observations(&callers.caller(runtime.snapshot(), &key.0, &key.1)), Instant::now());
            let watcher = watch(known, clients.clone(), runtime.clone(), callers.clone(), key);
            (clients, AbortOnDropHandle::new(tokio::spawn(watcher)))
        });
        clients.sessions().insert(session.number(), (session.clone(), level));
    }

    pub(super) fn set_level(&self, session: &ClientSession, level: McpLogLevel) {
        if let Some((clients, _)) = self.users().get(&key_of(session))
            && let Some((_, from)) = clients.sessions().get_mut(&session.number())
        {
            *from = Some(level);
        }
    }

    pub(super) fn remove_client(&self, session: &ClientSession) {
        let (key, mut users) = (key_of(session), self.users());
        let is_empty = users.get(&key).is_some_and(|(clients, _)| {
            let mut clients = clients.sessions();
            clients.remove(&session.number());
            clients.is_empty()
        });
        if is_empty {
            users.remove(&key);
        }
    }
}

fn key_of(session: &ClientSession) -> (TeamId, UserId) {
    (session.user().team.clone(), session.user().user.clone())
}

async fn watch(
    mut known: AnnouncedStates,
    clients: Arc<NoticeClients>,
    runtime: RuntimeHandle,
    callers: Arc<CallerCache>,
    (team, user): (TeamId, UserId),
) {
    let mut snapshots = runtime.watch();
    loop {
        let caller = callers.caller(snapshots.borrow_and_update().clone(), &team, &user);
        let (notices, again_at) = known.observe(observations(&caller), Instant::now());
        drop(caller);
        for notice in notices {
            clients.send_notice(&notice);
        }
        sleep_until(Instant::now() + LOOK_INTERVAL).await;
        tokio::select! {
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = sleep_until(again_at.unwrap_or_else(Instant::now)), if again_at.is_some() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observe(
        known: &mut AnnouncedStates,
        start: Instant,
        ms: u64,
        servers: &[(&str, Status)],
    ) -> (Vec<(String, Status)>, Option<u64>) {
        let ids: Vec<InstanceId> =
            servers.iter().map(|(name, _)| InstanceId::new("t".into(), "u".into(), (*name).into())).collect();
        let seen = servers.iter().zip(&ids).map(|((label, status), id)| ServerObservation {
            id,
            label,
            status: *status,
            message: None,
        });
        let (notices, again_at) = known.observe(seen, start + Duration::from_millis(ms));
        let again = again_at.and_then(|at| u64::try_from(at.duration_since(start).as_millis()).ok());
        (notices.into_iter().map(|notice| (notice.server, notice.status)).collect(), again)
    }

    #[test]
    fn a_loss_is_announced_after_two_seconds_and_a_return_at_once() {
        use Status::{Connecting, Offline, Online};
        let (mut known, start) = (AnnouncedStates::default(), Instant::now());
        let mut look = |ms, status| observe(&mut known, start, ms, &[("a", status)]);
        let lost = |status| vec![("a".to_owned(), status)];
        assert_eq!(look(0, Online), (vec![], None), "the first status is not announced");
        assert_eq!(look(1000, Connecting), (vec![], Some(3000)));
        assert_eq!(look(2500, Online), (vec![], None), "the outage was too short");
        assert_eq!(look(4000, Connecting), (vec![], Some(6000)));
        assert_eq!(look(5000, Offline), (vec![], Some(6000)));
        assert_eq!(look(6000, Offline), (lost(Offline), None));
        assert_eq!(look(7000, Connecting), (vec![], None), "the loss was announced already");
        assert_eq!(look(8000, Online), (lost(Online), None));
    }

    #[test]
    fn a_first_start_is_not_announced_but_a_later_return_is() {
        use Status::{Connecting, Offline, Online};
        let (mut known, start) = (AnnouncedStates::default(), Instant::now());
        for (ms, status) in [(0, Connecting), (60_000, Connecting), (61_000, Online)] {
            let servers = [("starts", status), ("away", Offline)];
            assert_eq!(observe(&mut known, start, ms, &servers), (vec![], None), "{ms}");
        }
        let servers = [("starts", Online), ("away", Online)];
        assert_eq!(observe(&mut known, start, 62_000, &servers), (vec![("away".to_owned(), Online)], None));
    }

    #[test]
    fn notices_are_limited_per_minute_and_the_rest_is_delayed() {
        let (mut known, start) = (AnnouncedStates::default(), Instant::now());
        let names: Vec<String> = (0..NOTICES_MAX + 5).map(|number| number.to_string()).collect();
        let all = |status| names.iter().map(|name| (name.as_str(), status)).collect::<Vec<_>>();
        observe(&mut known, start, 0, &all(Status::Online));
        observe(&mut known, start, 1000, &all(Status::Offline));
        let (notices, again) = observe(&mut known, start, 3000, &all(Status::Offline));
        assert_eq!((notices.len(), again), (NOTICES_MAX, Some(63_000)));
        assert_eq!(observe(&mut known, start, 50_000, &all(Status::Offline)).0.len(), 0);
        let (notices, again) = observe(&mut known, start, 63_000, &all(Status::Offline));
        assert_eq!((notices.len(), again), (5, None));
    }
}
