//! Routes the messages of a server to the clients that are connected to its instance.
//!
//! ```text
//!              on behalf of a call       ──► the client of that call
//! server ──►   a resource has changed    ──► its subscribers                  shared_session   levels and
//!              log message               ──► each client from its level on    subscriptions of all clients
//!              change of a list, a task
//!              or an elicitation,
//!              anything else             ──► all clients
//!              request                   ──► the one client it can be for, or none
//! ```
//!
//! A client of `/mcp` is not connected to an instance: it receives the messages of its own calls, and gets a
//! `roots/list` request outside of a call only if no client is connected to the server directly. Messages sent while
//! such a call is the only one in flight go to the clients of the instance, too.

use mcp_satellite_protocol::error_code::{INTERNAL_ERROR, METHOD_NOT_FOUND};
use mcp_satellite_protocol::method;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use mcp_satellite_actors::audience::{Audience, CallOrigin, ClientQuestion, MessageCause, SessionSource};
use mcp_satellite_actors::model::catalogue::{Catalogue, CatalogueAspect, Revisions};
use mcp_satellite_actors::model::exit::CallFate;
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{CallPort, CallerRequest, KeepAwakeGuard, RuntimeHandle};
use mcp_satellite_protocol::rpc::RpcMessage;
use serde_json::value::RawValue;
use tokio::runtime::Handle;
use tokio::time::{Duration, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::endpoint_id::EndpointId;
use super::session::ClientSession;
use super::session::stateless::own_message;
use super::sessions::Sessions;
use super::shared_session::{
    McpLogLevel, PendingSessionRequest, RequestDisposition, SessionRequestOutcome, SharedSessionRequest,
    SharedSessionState, SubscriptionLimitError, uri_of,
};

/// The audience of the runtime: the clients of every instance. Created before the runtime.
#[derive(Debug)]
pub struct GatewayAudience {
    sessions: Arc<Sessions>,
    state: Arc<AudienceState>,
}

struct AudienceState {
    // Empty until the runtime has started.
    runtime: OnceLock<RuntimeHandle>,
    instances: Mutex<InstanceTable>,
}

impl fmt::Debug for AudienceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AudienceState").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct InstanceTable {
    by_instance: HashMap<InstanceId, InstanceClients>,
    // Runs that requested roots and received an empty list, because no client had any.
    rootless: HashMap<InstanceId, RunNumber>,
}

/// The clients of one instance. Removed when the last client has left and the server has been updated.
#[derive(Default)]
struct InstanceClients {
    clients: BTreeMap<u64, Arc<ClientSession>>,
    shared_state: SharedSessionState,
    // True if the last update of the server was not sent and has to be repeated.
    is_behind: bool,
    keep_awake: Option<(RunNumber, KeepAwakeGuard)>,
    followers: HashMap<RunNumber, RunFollower>,
    // The catalogue that clients have last seen.
    known_catalogue: Option<Arc<Catalogue>>,
}

struct RunFollower {
    // Lists for which the server has sent a change notification itself.
    announced: Vec<CatalogueAspect>,
    _work: AbortOnDropHandle<()>,
}

fn changed_aspect(method: &str) -> Option<CatalogueAspect> {
    match method {
        method::TOOLS_CHANGED => Some(CatalogueAspect::Tools),
        method::RESOURCES_CHANGED => Some(CatalogueAspect::Resources),
        method::PROMPTS_CHANGED => Some(CatalogueAspect::Prompts),
        _ => None,
    }
}

// Notifications that go to all clients, because only a client can tell if they concern it.
const BROADCAST_METHODS: [&str; 2] = [method::TASK_STATUS, method::ELICITATION_COMPLETE];

fn list_changed_notification(aspect: CatalogueAspect) -> Option<&'static str> {
    match aspect {
        CatalogueAspect::Tools => Some(r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#),
        CatalogueAspect::Resources => Some(r#"{"jsonrpc":"2.0","method":"notifications/resources/list_changed"}"#),
        CatalogueAspect::Prompts => Some(r#"{"jsonrpc":"2.0","method":"notifications/prompts/list_changed"}"#),
        CatalogueAspect::Capabilities => None,
    }
}

fn client_and_call(cause: MessageCause) -> Option<(u64, Option<u64>)> {
    match cause {
        MessageCause::Call(origin) => Some((origin.client, Some(origin.call))),
        MessageCause::Client(client) => Some((client, None)),
        MessageCause::NoCall | MessageCause::NoClient | MessageCause::SeveralClients(_) => None,
    }
}

fn run_of(view: Option<&InstanceView>) -> Option<RunNumber> {
    view?.port.as_ref().map(CallPort::run)
}

impl InstanceClients {
    /// Returns the clients that receive a message. `addressee` is the client it was sent for; if that client is not
    /// connected to this instance, all others receive the message, because the message may not belong to its call at
    /// all.
    fn recipients(&self, message: &RpcMessage, addressee: Option<u64>) -> Vec<Arc<ClientSession>> {
        let method = message.method().unwrap_or_default();
        let (clients, shared_state) = (&self.clients, &self.shared_state);
        let addressee = addressee.filter(|client| clients.contains_key(client));
        let all = || clients.values().cloned().collect();
        let those = |receives: &dyn Fn(u64) -> bool| {
            clients.iter().filter(|(client, _)| receives(**client)).map(|(_, session)| session.clone()).collect()
        };
        if changed_aspect(method).is_some() || BROADCAST_METHODS.contains(&method) {
            return all();
        }
        if method == method::RESOURCE_UPDATED {
            let subscribers = uri_of(message).map(|uri| shared_state.subscribers(&uri)).unwrap_or_default();
            if subscribers.is_empty() && addressee.is_none() {
                // A server that sends updates without any subscription sends them to all.
                return all();
            }
            return those(&|client| subscribers.contains(&client) || addressee == Some(client));
        }
        let level = (method == method::LOG_MESSAGE).then(|| McpLogLevel::from_message(message));
        those(&|client| {
            addressee.is_none_or(|addressee| addressee == client)
                && level.is_none_or(|level| shared_state.is_level_enabled(client, level))
        })
    }

    /// Returns the clients that can answer this request. A stateless session gets only the requests of its own call.
    fn clients_able_to_answer<'a>(&'a self, method: &'a str) -> impl Iterator<Item = &'a Arc<ClientSession>> {
        let sessions =
            self.clients.values().filter(|session| !session.is_stateless() && session.end_reason().is_none());
        sessions.filter(move |session| session.facts.client.can_answer(method))
    }

    fn update_keep_awake(&mut self, port: Option<&CallPort>) {
        if !self.shared_state.has_subscriptions() {
            self.keep_awake = None;
        } else if let Some(port) = port
            && self.keep_awake.as_ref().is_none_or(|(run, _)| *run != port.run())
        {
            self.keep_awake = Some((port.run(), port.keep_awake()));
        }
    }
}

impl AudienceState {
    fn table(&self) -> MutexGuard<'_, InstanceTable> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.instances.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn catalogue(&self, id: &InstanceId) -> Option<Arc<Catalogue>> {
        self.runtime.get()?.status(id)?.catalogue.clone()
    }

    /// Sends the server of an instance, if it runs, the changes in levels and subscriptions that it has not received.
    async fn sync_server(&self, id: &InstanceId) {
        let Some(runtime) = self.runtime.get() else { return };
        loop {
            let Some(view) = runtime.status(id) else { return };
            let port = view.port.clone();
            let pending_request = {
                let mut table = self.table();
                let Some(instance) = table.by_instance.get_mut(id) else { return };
                instance.shared_state.set_run(port.as_ref().map(CallPort::run));
                instance.update_keep_awake(port.as_ref());
                instance.is_behind = false;
                port.is_some().then(|| instance.shared_state.take_owed_request()).flatten()
            };
            let (Some(port), Some(pending_request)) = (port, pending_request) else { return };
            let params = RawValue::from_string(pending_request.params().to_string()).ok();
            let request = CallerRequest::Method { method: pending_request.method().to_owned(), params };
            let answer = port.request(request, view.spec.policy.session.request_timeout).await;
            let was_not_sent = answer.as_ref().is_err_and(|error| error.fate() == Some(CallFate::NotSent));
            if let Err(error) = answer {
                let (name, error) = (&view.spec.name, view.spec.mask.apply(&error.to_string()));
                tracing::debug!(instance = %name, method = pending_request.method(), error, "request to the server failed");
            }
            let mut table = self.table();
            let Some(instance) = table.by_instance.get_mut(id) else { return };
            if was_not_sent {
                // A retry at once would fail, too.
                instance.shared_state.record_not_sent(&pending_request, port.run());
                instance.is_behind = true;
                return;
            }
            if let SharedSessionRequest::Unsubscribe(uri) = &pending_request {
                instance.shared_state.record_unsubscribed(uri);
            }
        }
    }

    fn spawn_server_sync(self: &Arc<Self>, id: &InstanceId) {
        // Without a tokio runtime the process is ending, and the servers with it.
        let Ok(handle) = Handle::try_current() else { return };
        let (state, id) = (self.clone(), id.clone());
        handle.spawn(async move { state.sync_server(&id).await });
    }

    /// Handles the start of a run: sends it the clients' levels and subscriptions, and sends the clients the changes of
    /// its lists.
    async fn follow_run(&self, runtime: RuntimeHandle, source: SessionSource) {
        let mut watch = runtime.watch();
        let run_of = |snapshot: &Snapshot| run_of(snapshot.get(&source.id).map(|view| &**view));
        let serves = |snapshot: &Arc<Snapshot>| run_of(snapshot).is_some_and(|run| run >= source.run);
        // The runtime has ended.
        if watch.wait_for(serves).await.is_err() {
            return;
        }
        let announce = async {
            let is_read = |snapshot: &Arc<Snapshot>| {
                run_of(snapshot).is_some_and(|run| run > source.run)
                    || snapshot.get(&source.id).is_some_and(|view| view.status == Status::Online)
            };
            let Ok(snapshot) = watch.wait_for(is_read).await.map(|snapshot| snapshot.clone()) else { return };
            let view = snapshot.get(&source.id).filter(|_| run_of(&snapshot) == Some(source.run));
            if let Some(catalogue) = view.and_then(|view| view.catalogue.as_ref()) {
                self.announce_changes(&source, catalogue);
            }
        };
        tokio::join!(self.sync_server(&source.id), announce);
    }

    /// Sends change notifications for the lists that differ from the last run's, unless the server sent them itself.
    fn announce_changes(&self, source: &SessionSource, catalogue: &Arc<Catalogue>) {
        let (clients, changed): (Vec<_>, Vec<_>) = {
            let mut table = self.table();
            let Some(instance) = table.by_instance.get_mut(&source.id) else { return };
            let mut changed = Vec::new();
            if let Some(known) = instance.known_catalogue.replace(catalogue.clone()) {
                let mut revisions = Revisions::default();
                revisions.count_changes(Some(&known), catalogue);
                changed = revisions.changes_since(&Revisions::default());
            }
            let announced = instance.followers.get(&source.run).map_or(&[][..], |follower| &follower.announced);
            changed.retain(|aspect| !announced.contains(aspect));
            (instance.clients.values().cloned().collect(), changed)
        };
        for message in changed.into_iter().filter_map(list_changed_notification).filter_map(own_message) {
            for session in &clients {
                session.deliver(None, &message);
            }
        }
    }
}

impl GatewayAudience {
    pub fn new(sessions: Arc<Sessions>) -> Self {
        Self { sessions, state: Arc::new(AudienceState { runtime: OnceLock::new(), instances: Mutex::default() }) }
    }

    pub(super) fn set_runtime(&self, runtime: RuntimeHandle) {
        // Called once.
        let _ = self.state.runtime.set(runtime);
    }

    pub(super) fn add_client(&self, session: &Arc<ClientSession>, id: &InstanceId) {
        let catalogue = self.state.catalogue(id);
        let mut table = self.state.table();
        let instance = table.by_instance.entry(id.clone()).or_default();
        instance.known_catalogue = instance.known_catalogue.take().or(catalogue);
        instance.clients.insert(session.number(), session.clone());
    }

    /// Adds a stateless session for the duration of its request and sets its log level. Waits up to `limit` for
    /// the server to receive the level before the request is sent.
    pub(super) async fn add_stateless_with_level(
        &self,
        session: &Arc<ClientSession>,
        id: &InstanceId,
        level: McpLogLevel,
        limit: Duration,
    ) {
        self.add_client(session, id);
        if let Some(instance) = self.state.table().by_instance.get_mut(id) {
            instance.shared_state.set_level(session.number(), level);
        }
        // In its own task: the update includes other clients' settings and must finish even if this client disconnects.
        let (state, id) = (self.state.clone(), id.clone());
        let sync = tokio::spawn(async move { state.sync_server(&id).await });
        let _ = timeout(limit, sync).await;
    }

    /// Called when a client has initialized its session. Returns true if it is the first with roots after the server
    /// requested some in vain, so that the server has to be notified.
    pub(super) fn take_rootless(&self, session: &ClientSession, id: &InstanceId) -> bool {
        session.facts.client.roots && self.state.table().rootless.remove(id).is_some()
    }

    /// Returns the servers of the client's user that requested roots in vain; empty if this client has none. Called
    /// when a client of `/mcp` has initialized its session.
    pub(super) fn take_all_rootless(&self, session: &ClientSession) -> Vec<InstanceId> {
        if !session.facts.client.roots {
            return Vec::new();
        }
        let (user, mut table) = (session.user(), self.state.table());
        let of_user = table.rootless.extract_if(|id, _| id.team == user.team && id.user == user.user);
        of_user.map(|(id, _)| id).collect()
    }

    /// Returns the clients of `/mcp` of the instance's user that have roots. A server's request outside of any call
    /// goes to them only if no client is connected to the server directly.
    fn clients_with_roots(&self, id: &InstanceId) -> impl Iterator<Item = Arc<ClientSession>> {
        let sessions = self.sessions.user_sessions(&id.team, &id.user).into_iter();
        sessions.filter(|session| {
            matches!(session.facts.endpoint, EndpointId::Tools | EndpointId::Flat)
                && !session.is_stateless()
                && session.end_reason().is_none()
                && session.facts.client.roots
        })
    }

    pub(super) fn remove_client(&self, session: &Arc<ClientSession>, id: &InstanceId) {
        let mut table = self.state.table();
        let Some(instance) = table.by_instance.get_mut(id) else { return };
        // Most stateless sessions were never added.
        if instance.clients.remove(&session.number()).is_none() {
            return;
        }
        instance.shared_state.remove_client(session.number());
        drop(table);
        let state = self.state.clone();
        let Ok(handle) = Handle::try_current() else { return };
        let id = id.clone();
        handle.spawn(async move {
            state.sync_server(&id).await;
            let mut table = state.table();
            if table.by_instance.get(&id).is_some_and(|instance| instance.clients.is_empty() && !instance.is_behind) {
                table.by_instance.remove(&id);
            }
        });
    }

    pub(super) fn record_request(
        &self,
        session: &ClientSession,
        id: &InstanceId,
        request: &SharedSessionRequest,
    ) -> Result<SessionRequestHandle, SubscriptionLimitError> {
        let run = self.run_of(id);
        let disposition = match self.state.table().by_instance.get_mut(id) {
            Some(instance) => instance.shared_state.record_request(session.number(), request, run),
            // The client has left, so the answer does not matter.
            None => RequestDisposition::Granted,
        };
        let pending = match disposition {
            RequestDisposition::Granted => None,
            RequestDisposition::Pending(pending) => Some(pending),
            RequestDisposition::Refused(error) => return Err(error),
        };
        let handle = SessionRequestHandle { state: self.state.clone(), id: id.clone(), pending };
        if handle.is_granted() {
            self.state.spawn_server_sync(id);
        }
        Ok(handle)
    }

    /// Repeats a failed update of the server. Called when a request has ended, because the server may have capacity
    /// again.
    pub(super) fn retry_failed_sync(&self, id: &InstanceId) {
        if self.state.table().by_instance.get(id).is_some_and(|instance| instance.is_behind) {
            self.state.spawn_server_sync(id);
        }
    }

    fn run_of(&self, id: &InstanceId) -> Option<RunNumber> {
        run_of(self.state.runtime.get()?.status(id).as_deref())
    }

    fn record_if_rootless(&self, source: &SessionSource) -> bool {
        let mut table = self.state.table();
        let is_rootless = table
            .by_instance
            .get(&source.id)
            .is_none_or(|instance| instance.clients_able_to_answer(method::ROOTS_LIST).next().is_none())
            && self.clients_with_roots(&source.id).next().is_none();
        if is_rootless {
            // A client that brings roots later triggers a notification of this run.
            table.rootless.insert(source.id.clone(), source.run);
        }
        is_rootless
    }

    fn choose_client(
        &self,
        id: &InstanceId,
        cause: MessageCause,
        question: &RpcMessage,
    ) -> Result<(Arc<ClientSession>, Option<u64>), String> {
        if let Some((client, call)) = client_and_call(cause) {
            let Some(session) = self.sessions.get(client) else {
                return Err("the client that should answer has disconnected".to_owned());
            };
            return session.check_can_answer(question).map(|()| (session, call));
        }
        match cause {
            MessageCause::NoClient => {
                return Err("the call in progress does not come from a client that can answer".to_owned());
            }
            MessageCause::SeveralClients(count) => {
                return Err(format!(
                    "calls of {count} clients are in progress, and the request does not identify one of them"
                ));
            }
            MessageCause::Call(_) | MessageCause::Client(_) | MessageCause::NoCall => {}
        }
        let (table, method) = (self.state.table(), question.method().unwrap_or_default());
        let mut candidates: Vec<_> = table
            .by_instance
            .get(id)
            .into_iter()
            .flat_map(|instance| instance.clients_able_to_answer(method))
            .cloned()
            .collect();
        drop(table);
        if method == method::ROOTS_LIST && candidates.is_empty() {
            candidates.extend(self.clients_with_roots(id));
        }
        let mut candidates = candidates.into_iter();
        match (candidates.next(), candidates.count()) {
            (Some(session), 0) => Ok((session, None)),
            (None, _) => Err("no client is attached that could answer".to_owned()),
            (Some(_), others) => Err(format!(
                "{} clients are attached that could answer, and the request does not identify one of them",
                others + 1
            )),
        }
    }
}

/// A recorded request whose outcome must be reported. Dropping it reports an unknown outcome.
#[derive(Debug)]
pub(super) struct SessionRequestHandle {
    state: Arc<AudienceState>,
    id: InstanceId,
    pending: Option<PendingSessionRequest>,
}

impl SessionRequestHandle {
    pub(super) fn is_granted(&self) -> bool {
        self.pending.is_none()
    }

    pub(super) fn report_answer(mut self, is_done: bool) {
        let run = self.state.runtime.get().and_then(|runtime| run_of(runtime.status(&self.id).as_deref()));
        self.report_outcome(if is_done { SessionRequestOutcome::Done(run) } else { SessionRequestOutcome::Refused });
    }

    fn report_outcome(&mut self, outcome: SessionRequestOutcome) {
        let Some(pending) = self.pending.take() else { return };
        if let Some(instance) = self.state.table().by_instance.get_mut(&self.id) {
            instance.shared_state.record_outcome(pending, outcome);
        }
        self.state.spawn_server_sync(&self.id);
    }
}

impl Drop for SessionRequestHandle {
    fn drop(&mut self) {
        self.report_outcome(SessionRequestOutcome::Unknown);
    }
}

impl Audience for GatewayAudience {
    fn on_notification(&self, source: &SessionSource, cause: MessageCause, message: RpcMessage) {
        let addressee = client_and_call(cause);
        let list = changed_aspect(message.method().unwrap_or_default());
        let (recipients, is_member) = {
            let mut table = self.state.table();
            match table.by_instance.get_mut(&source.id) {
                Some(instance) => {
                    if let (Some(list), Some(follower)) = (list, instance.followers.get_mut(&source.run)) {
                        follower.announced.push(list);
                    }
                    let is_member = addressee.is_some_and(|(client, _)| instance.clients.contains_key(&client));
                    (instance.recipients(&message, addressee.map(|(client, _)| client)), is_member)
                }
                None => (Vec::new(), false),
            }
        };
        for session in recipients {
            let call = addressee.filter(|(client, _)| *client == session.number()).and_then(|(_, call)| call);
            session.deliver(call, &message);
        }
        // A client of `/mcp` receives the messages of its call, but not about lists and resources that it cannot see.
        let is_instance_wide = list.is_some() || message.method() == Some(method::RESOURCE_UPDATED);
        if let Some((client, call)) = addressee.filter(|_| !is_member && !is_instance_wide)
            && let Some(session) = self.sessions.get(client)
        {
            session.deliver(call, &message);
        }
    }

    fn on_progress(&self, origin: CallOrigin, message: RpcMessage) {
        if let Some(session) = self.sessions.get(origin.client) {
            session.deliver_progress(origin.call, &message);
        }
    }

    fn on_request(&self, source: &SessionSource, cause: MessageCause, question: ClientQuestion) {
        let method = question.message().method().unwrap_or_default().to_owned();
        match (self.choose_client(&source.id, cause, question.message()), method.as_str()) {
            (Ok((session, call)), _) => session.ask(source.clone(), call, question),
            // An empty list is correct only if no client has roots.
            (Err(_), method::ROOTS_LIST) if self.record_if_rootless(source) => question.answer_without_client(),
            (Err(why), method::CREATE_MESSAGE | method::ELICIT | method::ROOTS_LIST) => {
                question.decline(INTERNAL_ERROR, &why);
            }
            (Err(why), _) => question.decline(METHOD_NOT_FOUND, &why),
        }
    }

    fn on_request_withdrawn(&self, source: &SessionSource, question: u64, message: RpcMessage) {
        for session in self.sessions.user_sessions(&source.id.team, &source.id.user) {
            session.cancel_question(source, question, &message);
        }
    }

    fn on_session_started(&self, source: &SessionSource) {
        let Some(runtime) = self.state.runtime.get() else { return };
        let mut table = self.state.table();
        let Some(instance) = table.by_instance.get_mut(&source.id) else { return };
        let (state, runtime, followed) = (self.state.clone(), runtime.clone(), source.clone());
        let work = tokio::spawn(async move { state.follow_run(runtime, followed).await });
        instance
            .followers
            .insert(source.run, RunFollower { announced: Vec::new(), _work: AbortOnDropHandle::new(work) });
    }

    fn on_session_ended(&self, source: &SessionSource) {
        {
            let catalogue = self.state.catalogue(&source.id);
            let mut table = self.state.table();
            if table.rootless.get(&source.id) == Some(&source.run) {
                table.rootless.remove(&source.id);
            }
            if let Some(instance) = table.by_instance.get_mut(&source.id) {
                instance.followers.remove(&source.run);
                instance.known_catalogue = catalogue.or(instance.known_catalogue.take());
                instance.shared_state.end_run(source.run);
                if instance.keep_awake.as_ref().is_some_and(|(run, _)| *run == source.run) {
                    instance.keep_awake = None;
                }
                // A new run gets all settings anyway.
                instance.is_behind = false;
                if instance.clients.is_empty() {
                    table.by_instance.remove(&source.id);
                }
            }
        }
        for session in self.sessions.user_sessions(&source.id.team, &source.id.user) {
            session.cancel_questions(source);
        }
    }
}
