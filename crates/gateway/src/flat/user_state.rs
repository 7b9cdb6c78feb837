//! The shared state of one user's clients in flat mode: the current lists, the lists that each client has read, and one
//! watcher that notifies them of changes. It exists as long as the user has such clients.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::catalogue::ListKind;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant, sleep_until};

use super::client_list::ClientList;
use super::list_cursor::ListPosition;
use super::merged_lists::MergedLists;
use super::server_section::LISTS;
use crate::access::User;
use crate::session::ClientSession;
use crate::session::stateless::own_message;
use crate::tools::{CallerCache, CallerSnapshot};

// Only changes that last this long are announced, so a quick restart of a server is not.
const SETTLED_AFTER: Duration = Duration::from_millis(250);
// Time for which the state is kept after the last stateless request.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct FlatUserState {
    team: TeamId,
    user: UserId,
    // Locked while new lists are merged, so that concurrent requests merge them once.
    merged_lists: tokio::sync::Mutex<Option<Arc<MergedLists>>>,
    clients: Mutex<HashMap<u64, FlatClient>>,
    // Wakes the watcher for a client that has read pages of several versions of a list.
    mixed_pages: Notify,
    // Time of the last stateless request, while a task waits to remove the state.
    last_request_at: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct FlatClient {
    session: Arc<ClientSession>,
    // Per `ListKind`.
    lists: [ClientList; 4],
}

impl FlatUserState {
    fn new(team: TeamId, user: UserId) -> Self {
        let (merged_lists, clients, mixed_pages) = (tokio::sync::Mutex::default(), Mutex::default(), Notify::new());
        Self { team, user, merged_lists, clients, mixed_pages, last_request_at: Mutex::default() }
    }

    fn last_request_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.last_request_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<u64, FlatClient>> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lists for this caller; merges them again if its servers have changed. `None` if the runtime is
    /// shutting down.
    pub(super) async fn merged_lists(&self, caller: CallerSnapshot) -> Option<Arc<MergedLists>> {
        let mut cached = self.merged_lists.lock().await;
        if let Some(lists) = cached.as_ref().filter(|lists| lists.is_current_for(&caller)) {
            return Some(lists.clone());
        }
        let (offered, before) = (caller.offered_catalogues(), cached.clone());
        // The runtime is shutting down.
        let merged = tokio::task::spawn_blocking(move || MergedLists::new(offered, before.as_deref())).await.ok()?;
        *cached = Some(Arc::new(merged));
        cached.clone()
    }

    /// Records that a client has read the entries of a list after `after` up to `end`.
    pub(super) fn record_read(
        &self,
        session: &ClientSession,
        (list, lists): (ListKind, &MergedLists),
        after: Option<ListPosition>,
        end: Option<ListPosition>,
    ) {
        if let Some(client) = self.clients().get_mut(&session.number())
            && client.lists[list as usize].record_page(lists.names(list), after, end)
        {
            self.mixed_pages.notify_one();
        }
    }

    /// Finds something in the pages of a list that a client has read.
    pub(super) fn find_read<R>(
        &self,
        session: &ClientSession,
        list: ListKind,
        find: impl FnOnce(&ClientList) -> Option<R>,
    ) -> Option<R> {
        find(&self.clients().get(&session.number())?.lists[list as usize])
    }

    /// Notifies clients of lists that differ from what they know. Returns false, without notifying, if the lists are
    /// outdated.
    fn notify_clients(&self, lists: &MergedLists, is_now: impl FnOnce() -> bool) -> bool {
        let mut changed = Vec::new();
        let mut clients = self.clients();
        // Checked under the lock: a client that reads a newer list meanwhile must not be notified of this one.
        if !is_now() {
            return false;
        }
        for client in clients.values_mut() {
            let mut notifications: Vec<&str> = LISTS
                .into_iter()
                .filter(|list| client.lists[*list as usize].announce(lists.names(*list)))
                .map(list_changed_notification)
                .collect();
            // Resources and resource templates share a notification.
            notifications.dedup();
            changed.extend(notifications.into_iter().map(|notification| (client.session.clone(), notification)));
        }
        drop(clients);
        for (session, notification) in changed {
            if let Some(message) = own_message(notification) {
                session.deliver(None, &message);
            }
        }
        true
    }

    async fn watch(self: Arc<Self>, runtime: RuntimeHandle, callers: Arc<CallerCache>) {
        let mut snapshots = runtime.watch();
        let mut announced_lists: Option<Arc<MergedLists>> = None;
        let mut settled_at: Option<Instant> = None;
        loop {
            let caller = callers.caller(snapshots.borrow_and_update().clone(), &self.team, &self.user);
            settled_at = match &announced_lists {
                Some(announced_lists) if announced_lists.is_current_for(&caller) => None,
                Some(_) | None => settled_at.or_else(|| Some(Instant::now() + SETTLED_AFTER)),
            };
            tokio::select! {
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = self.mixed_pages.notified() => announced_lists = None,
                () = sleep_until(settled_at.unwrap_or_else(Instant::now)), if settled_at.is_some() => {
                    let Some(lists) = self.merged_lists(caller).await else { return };
                    let is_now = || lists.is_current_for(&callers.caller(runtime.snapshot(), &self.team, &self.user));
                    // Outdated lists are merged again at once, because `settled_at` is still set.
                    if self.notify_clients(&lists, is_now) {
                        (announced_lists, settled_at) = (Some(lists), None);
                    }
                }
            }
        }
    }
}

fn list_changed_notification(list: ListKind) -> &'static str {
    match list {
        ListKind::Tools => r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#,
        ListKind::Resources | ListKind::ResourceTemplates => {
            r#"{"jsonrpc":"2.0","method":"notifications/resources/list_changed"}"#
        }
        ListKind::Prompts => r#"{"jsonrpc":"2.0","method":"notifications/prompts/list_changed"}"#,
    }
}

#[derive(Debug)]
struct WatcherTask(JoinHandle<()>);

impl Drop for WatcherTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

type FlatClientsByUser = HashMap<(TeamId, UserId), (Arc<FlatUserState>, WatcherTask)>;

#[derive(Debug, Default)]
pub(super) struct FlatUserStates(Mutex<FlatClientsByUser>);

impl FlatUserStates {
    fn states(&self) -> MutexGuard<'_, FlatClientsByUser> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_client(
        &self,
        session: &Arc<ClientSession>,
        runtime: &RuntimeHandle,
        callers: &Arc<CallerCache>,
    ) -> Arc<FlatUserState> {
        let state = Self::get_or_create(&mut self.states(), session.user(), runtime, callers);
        let client = FlatClient { session: session.clone(), lists: Default::default() };
        state.clients().insert(session.number(), client);
        state
    }

    pub(super) fn keep_for_request(
        self: &Arc<Self>,
        user: &User,
        runtime: &RuntimeHandle,
        callers: &Arc<CallerCache>,
    ) -> Arc<FlatUserState> {
        let state = Self::get_or_create(&mut self.states(), user, runtime, callers);
        let is_first = state.last_request_at().replace(Instant::now()).is_none();
        if is_first {
            tokio::spawn(Self::remove_when_unused(Arc::downgrade(self), state.clone()));
        }
        state
    }

    fn get_or_create(
        states: &mut FlatClientsByUser,
        user: &User,
        runtime: &RuntimeHandle,
        callers: &Arc<CallerCache>,
    ) -> Arc<FlatUserState> {
        let key = (user.team.clone(), user.user.clone());
        let (state, _) = states.entry(key).or_insert_with(|| {
            let state = Arc::new(FlatUserState::new(user.team.clone(), user.user.clone()));
            let watcher = WatcherTask(tokio::spawn(state.clone().watch(runtime.clone(), callers.clone())));
            (state, watcher)
        });
        state.clone()
    }

    /// Waits until no stateless request has come for [`UNUSED_TIMEOUT`], and removes the state if it has no clients.
    async fn remove_when_unused(states: Weak<Self>, state: Arc<FlatUserState>) {
        loop {
            let Some(until) = state.last_request_at().map(|at| at + UNUSED_TIMEOUT) else { return };
            sleep_until(until).await;
            let Some(states) = states.upgrade() else { return };
            let mut states = states.states();
            let mut last_request_at = state.last_request_at();
            if last_request_at.is_none_or(|at| at + UNUSED_TIMEOUT > Instant::now()) {
                continue;
            }
            *last_request_at = None;
            let is_empty = state.clients().is_empty();
            let key = (state.team.clone(), state.user.clone());
            if is_empty && states.get(&key).is_some_and(|(other, _)| Arc::ptr_eq(other, &state)) {
                states.remove(&key);
            }
            return;
        }
    }

    pub(super) fn find(&self, user: &User) -> Option<Arc<FlatUserState>> {
        let key = (user.team.clone(), user.user.clone());
        self.states().get(&key).map(|(state, _)| state.clone())
    }

    pub(super) fn remove_client(&self, session: &ClientSession) {
        let key = (session.user().team.clone(), session.user().user.clone());
        let mut states = self.states();
        let Some((state, _)) = states.get(&key) else { return };
        let is_empty = {
            let mut clients = state.clients();
            clients.remove(&session.number());
            clients.is_empty() && state.last_request_at().is_none()
        };
        if is_empty {
            states.remove(&key);
        }
    }

    pub(super) fn find_for_session(&self, session: &ClientSession) -> Option<Arc<FlatUserState>> {
        self.find(session.user())
    }
}
