//! The shared state of one user's clients in flat mode: the current lists, the lists that each client has read, and one
//! watcher that notifies them of changes. It exists as long as the user has such clients.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant, sleep_until};

use super::merged_lists::{ItemKind, MergedList, MergedLists};
use crate::access::User;
use crate::session::ClientSession;
use crate::session::stateless::own_message;
use crate::tools::{CallerCache, CallerSnapshot};

// Only changes that last this long are announced, so a quick restart of a server is not.
const SETTLED_AFTER: Duration = Duration::from_millis(250);
// Time for which the state is kept after the last stateless request.
const LINGERS: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct FlatUserState {
    team: TeamId,
    user: UserId,
    // Locked while a new picture is built, so that concurrent requests build it once.
    merged_lists: tokio::sync::Mutex<Option<Arc<MergedLists>>>,
    clients: Mutex<HashMap<u64, FlatClient>>,
    // Time of the last stateless request, while a task waits to remove the state.
    last_request_at: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct FlatClient {
    session: Arc<ClientSession>,
    // Per `Thing`, the list that the client has read or was notified of. A client that has never read a list gets no
    // notification about it.
    announced: [Option<Arc<MergedList>>; 3],
    // Per `Thing`, the list that the client has read. Its names stay valid for the client until it reads a newer
    // one.
    last_read: [Option<Arc<MergedList>>; 3],
}

impl FlatUserState {
    fn new(team: TeamId, user: UserId) -> Self {
        let (merged_lists, clients) = (tokio::sync::Mutex::default(), Mutex::default());
        Self { team, user, merged_lists, clients, last_request_at: Mutex::default() }
    }

    fn last_request_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.last_request_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<u64, FlatClient>> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the picture for this caller; builds a new one if its servers have changed. `None` if the runtime is
    /// shutting down.
    pub(super) async fn merged_lists(&self, caller: CallerSnapshot) -> Option<Arc<MergedLists>> {
        let mut held = self.merged_lists.lock().await;
        if let Some(picture) = held.as_ref().filter(|picture| picture.is_current_for(&caller)) {
            return Some(picture.clone());
        }
        let (offered, before) = (caller.offered_catalogues(), held.clone());
        // The runtime is shutting down.
        let made = tokio::task::spawn_blocking(move || MergedLists::new(offered, before.as_deref())).await.ok()?;
        *held = Some(Arc::new(made));
        held.clone()
    }

    pub(super) fn record_read(&self, session: &ClientSession, thing: ItemKind, part: &Arc<MergedList>) {
        if let Some(client) = self.clients().get_mut(&session.number()) {
            client.announced[thing as usize] = Some(part.clone());
            client.last_read[thing as usize] = Some(part.clone());
        }
    }

    pub(super) fn list_known_to(&self, session: &ClientSession, thing: ItemKind) -> Option<Arc<MergedList>> {
        self.clients().get(&session.number())?.last_read[thing as usize].clone()
    }

    /// Notifies clients of lists that differ from what they know. Returns false, without notifying, if the picture is
    /// outdated.
    fn notify_clients(&self, picture: &MergedLists, is_now: impl FnOnce() -> bool) -> bool {
        let mut news = Vec::new();
        let mut clients = self.clients();
        // Checked under the lock: a client that reads a newer list meanwhile must not be notified of this one.
        if !is_now() {
            return false;
        }
        for client in clients.values_mut() {
            for thing in ItemKind::ALL {
                let now = picture.list(thing);
                let Some(told) = &mut client.announced[thing as usize] else { continue };
                if told.is_different_from(now) {
                    news.push((client.session.clone(), thing));
                }
                *told = now.clone();
            }
        }
        drop(clients);
        for (session, thing) in news {
            if let Some(words) = own_message(list_changed_notification(thing)) {
                session.deliver(None, &words);
            }
        }
        true
    }

    async fn watch(self: Arc<Self>, runtime: RuntimeHandle, callers: Arc<CallerCache>) {
        let mut snapshots = runtime.watch();
        let mut seen: Option<Arc<MergedLists>> = None;
        let mut settled_at: Option<Instant> = None;
        loop {
            let caller = callers.caller(snapshots.borrow_and_update().clone(), &self.team, &self.user);
            settled_at = match &seen {
                Some(seen) if seen.is_current_for(&caller) => None,
                Some(_) | None => settled_at.or_else(|| Some(Instant::now() + SETTLED_AFTER)),
            };
            tokio::select! {
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = sleep_until(settled_at.unwrap_or_else(Instant::now)), if settled_at.is_some() => {
                    let Some(picture) = self.merged_lists(caller).await else { return };
                    let is_now = || picture.is_current_for(&callers.caller(runtime.snapshot(), &self.team, &self.user));
                    // An outdated picture is rebuilt at once, because `settled_at` is still set.
                    if self.notify_clients(&picture, is_now) {
                        (seen, settled_at) = (Some(picture), None);
                    }
                }
            }
        }
    }
}

fn list_changed_notification(thing: ItemKind) -> &'static str {
    match thing {
        ItemKind::Tools => r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#,
        ItemKind::Resources => r#"{"jsonrpc":"2.0","method":"notifications/resources/list_changed"}"#,
        ItemKind::Prompts => r#"{"jsonrpc":"2.0","method":"notifications/prompts/list_changed"}"#,
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
        let desk = Self::get_or_create(&mut self.states(), session.user(), runtime, callers);
        let client =
            FlatClient { session: session.clone(), announced: Default::default(), last_read: Default::default() };
        desk.clients().insert(session.number(), client);
        desk
    }

    pub(super) fn keep_for_request(
        self: &Arc<Self>,
        user: &User,
        runtime: &RuntimeHandle,
        callers: &Arc<CallerCache>,
    ) -> Arc<FlatUserState> {
        let desk = Self::get_or_create(&mut self.states(), user, runtime, callers);
        let is_first = desk.last_request_at().replace(Instant::now()).is_none();
        if is_first {
            tokio::spawn(Self::remove_when_unused(Arc::downgrade(self), desk.clone()));
        }
        desk
    }

    fn get_or_create(
        desks: &mut FlatClientsByUser,
        user: &User,
        runtime: &RuntimeHandle,
        callers: &Arc<CallerCache>,
    ) -> Arc<FlatUserState> {
        let key = (user.team.clone(), user.user.clone());
        let (desk, _) = desks.entry(key).or_insert_with(|| {
            let desk = Arc::new(FlatUserState::new(user.team.clone(), user.user.clone()));
            let watcher = WatcherTask(tokio::spawn(desk.clone().watch(runtime.clone(), callers.clone())));
            (desk, watcher)
        });
        desk.clone()
    }

    /// Waits until no stateless request has come for [`LINGERS`], and removes the state if it has no clients.
    async fn remove_when_unused(desks: Weak<Self>, desk: Arc<FlatUserState>) {
        loop {
            let Some(until) = desk.last_request_at().map(|at| at + LINGERS) else { return };
            sleep_until(until).await;
            let Some(desks) = desks.upgrade() else { return };
            let mut desks = desks.states();
            let mut visited_at = desk.last_request_at();
            if visited_at.is_none_or(|at| at + LINGERS > Instant::now()) {
                continue;
            }
            *visited_at = None;
            let is_empty = desk.clients().is_empty();
            let key = (desk.team.clone(), desk.user.clone());
            if is_empty && desks.get(&key).is_some_and(|(other, _)| Arc::ptr_eq(other, &desk)) {
                desks.remove(&key);
            }
            return;
        }
    }

    pub(super) fn find(&self, user: &User) -> Option<Arc<FlatUserState>> {
        let key = (user.team.clone(), user.user.clone());
        self.states().get(&key).map(|(desk, _)| desk.clone())
    }

    pub(super) fn remove_client(&self, session: &ClientSession) {
        let key = (session.user().team.clone(), session.user().user.clone());
        let mut desks = self.states();
        let Some((desk, _)) = desks.get(&key) else { return };
        let is_empty = {
            let mut clients = desk.clients();
            clients.remove(&session.number());
            clients.is_empty() && desk.last_request_at().is_none()
        };
        if is_empty {
            desks.remove(&key);
        }
    }

    pub(super) fn find_for_session(&self, session: &ClientSession) -> Option<Arc<FlatUserState>> {
        self.find(session.user())
    }
}
