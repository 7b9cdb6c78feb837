//! Everybody who is connected to an instance, and what of what its server says each of them hears.
//!
//! ```text
//!              said on behalf of a call ──► its client alone
//! server ──►   of a resource            ──► who has subscribed to it        wishes   levels and subscriptions of all,
//!              logged                   ──► each from its own level on               towards the one session
//!              that a list, a task or an
//!              elicitation has changed,
//!              anything else            ──► all of them
//!              asked                    ──► whom it can only mean, or nobody
//! ```
//!
//! A client of `/mcp` is in no room: it hears what belongs to its own calls, and is asked for its roots on behalf of no call
//! where nobody is connected to the server directly. What is said while such a call is the only one
//! in flight the room hears as well.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use mcp_satellite_actors::audience::{Audience, Cause, Origin, Question, Source};
use mcp_satellite_actors::model::catalogue::{Aspect, Catalogue, Revisions};
use mcp_satellite_actors::model::exit::Fate;
use mcp_satellite_actors::model::ids::{InstanceId, Run};
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::Message;
use mcp_satellite_actors::{CallPort, Held, Request, RuntimeHandle};
use serde_json::value::RawValue;
use tokio::runtime::Handle;
use tokio::time::{Duration, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::face::Endpoint;
use super::reply::METHOD_NOT_FOUND;
use super::session::Session;
use super::session::guest::words;
use super::sessions::Sessions;
use super::wishes::{Asked, Level, Made, Outcome, TooMuch, Wish, Wishes, uri_of};

const INTERNAL_ERROR: i64 = -32603;

/// See the module. Made before the runtime, whose audience it is.
#[derive(Debug)]
pub struct Rooms {
    sessions: Arc<Sessions>,
    house: Arc<House>,
}

/// The rooms themselves: what works for them in the background holds on to this.
struct House {
    /// There is none before it has begun.
    runtime: OnceLock<RuntimeHandle>,
    rooms: Mutex<Table>,
}

impl fmt::Debug for House {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("House").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Table {
    of: HashMap<InstanceId, Room>,
    /// The runs that have asked for roots and were told that there are none, because nobody was there who has any.
    rootless: HashMap<InstanceId, Run>,
}

/// The clients of one instance. It is there while there are any, or while the server is still to be told that they have
/// gone.
#[derive(Default)]
struct Room {
    clients: BTreeMap<u64, Arc<Session>>,
    wishes: Wishes,
    /// Whether the server could not be told of them the last time, and is to be at the next chance.
    is_behind: bool,
    /// Keeps the server awake while somebody waits for news of a resource.
    held: Option<(Run, Held)>,
    begun: HashMap<Run, Begun>,
    /// The lists as clients could last know them.
    known: Option<Arc<Catalogue>>,
}

/// A run that began while clients were there.
struct Begun {
    /// The lists that its server has said have changed.
    said: Vec<Aspect>,
    /// Tells it what the last one knew, and the clients what is new.
    _work: AbortOnDropHandle<()>,
}

fn list_of(method: &str) -> Option<Aspect> {
    match method {
        "notifications/tools/list_changed" => Some(Aspect::Tools),
        "notifications/resources/list_changed" => Some(Aspect::Resources),
        "notifications/prompts/list_changed" => Some(Aspect::Prompts),
        _ => None,
    }
}

/// What a server says of what all of its clients may know of: whose it is only they can tell.
const EVERYBODYS: [&str; 2] = ["notifications/tasks/status", "notifications/elicitation/complete"];

/// What says that a list has changed; none for what clients cannot be told.
fn change_of(aspect: Aspect) -> Option<&'static str> {
    match aspect {
        Aspect::Tools => Some(r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#),
        Aspect::Resources => Some(r#"{"jsonrpc":"2.0","method":"notifications/resources/list_changed"}"#),
        Aspect::Prompts => Some(r#"{"jsonrpc":"2.0","method":"notifications/prompts/list_changed"}"#),
        Aspect::Capabilities => None,
    }
}

/// The client that a server speaks for, and its call.
fn meant(cause: Cause) -> Option<(u64, Option<u64>)> {
    match cause {
        Cause::Call(origin) => Some((origin.client, Some(origin.call))),
        Cause::Client(client) => Some((client, None)),
        Cause::Nobody | Cause::Stranger | Cause::Several(_) => None,
    }
}

fn run_of(view: Option<&InstanceView>) -> Option<Run> {
    view?.port.as_ref().map(CallPort::run)
}

impl Room {
    /// Who hears what its server says, apart from a client that it says it for and that is not in here: of that one's call
    /// all hear, because nobody knows whether it is said for the call at all.
    fn hearers(&self, message: &Message, meant: Option<u64>) -> Vec<Arc<Session>> {
        let method = message.method().unwrap_or_default();
        let (clients, wishes) = (&self.clients, &self.wishes);
        let meant = meant.filter(|client| clients.contains_key(client));
        let all = || clients.values().cloned().collect();
        let those = |hears: &dyn Fn(u64) -> bool| {
            clients.iter().filter(|(client, _)| hears(**client)).map(|(_, session)| session.clone()).collect()
        };
        if list_of(method).is_some() || EVERYBODYS.contains(&method) {
            return all();
        }
        if method == "notifications/resources/updated" {
            let subscribers = uri_of(message).map(|uri| wishes.subscribers(&uri)).unwrap_or_default();
            if subscribers.is_empty() && meant.is_none() {
                // Nobody has asked for it; a server that says it all the same says it to all.
                return all();
            }
            return those(&|client| subscribers.contains(&client) || meant == Some(client));
        }
        let level = (method == "notifications/message").then(|| Level::of(message));
        those(&|client| {
            meant.is_none_or(|meant| meant == client) && level.is_none_or(|level| wishes.hears(client, level))
        })
    }

    /// The clients that can be asked this. A guest is asked only what belongs to its request.
    fn able<'a>(&'a self, method: &'a str) -> impl Iterator<Item = &'a Arc<Session>> {
        let sessions = self.clients.values().filter(|session| !session.is_guest() && session.ended().is_none());
        sessions.filter(move |session| session.opening.greeting.answers(method))
    }

    /// The server is kept awake, or need not be any more.
    fn hold(&mut self, port: Option<&CallPort>) {
        if !self.wishes.are_waiting() {
            self.held = None;
        } else if let Some(port) = port
            && self.held.as_ref().is_none_or(|(run, _)| *run != port.run())
        {
            self.held = Some((port.run(), port.hold()));
        }
    }
}

impl House {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing is called in between that could leave it half changed.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn catalogue(&self, id: &InstanceId) -> Option<Arc<Catalogue>> {
        self.runtime.get()?.status(id)?.catalogue.clone()
    }

    /// Tells the server of an instance, if it runs, what it does not know yet of what its clients want.
    async fn settle(&self, id: &InstanceId) {
        let Some(runtime) = self.runtime.get() else { return };
        loop {
            let Some(view) = runtime.status(id) else { return };
            let port = view.port.clone();
            let owed = {
                let mut table = self.table();
                let Some(room) = table.of.get_mut(id) else { return };
                room.wishes.reaches(port.as_ref().map(CallPort::run));
                room.hold(port.as_ref());
                room.is_behind = false;
                port.is_some().then(|| room.wishes.owed()).flatten()
            };
            let (Some(port), Some(owed)) = (port, owed) else { return };
            let params = RawValue::from_string(owed.params().to_string()).ok();
            let request = Request::Method { method: owed.method().to_owned(), params };
            let answer = port.request(request, view.spec.policy.session.request_timeout).await;
            let was_not_sent = answer.as_ref().is_err_and(|error| error.fate() == Some(Fate::NotSent));
            if let Err(error) = answer {
                let (name, error) = (&view.spec.name, view.spec.mask.apply(&error.to_string()));
                tracing::debug!(instance = %name, method = owed.method(), error, "the server refused a request");
            }
            let mut table = self.table();
            let Some(room) = table.of.get_mut(id) else { return };
            if was_not_sent {
                // At once it would not be sent either.
                room.wishes.was_not_told(&owed, port.run());
                room.is_behind = true;
                return;
            }
            if let Wish::Unsubscribe(uri) = &owed {
                room.wishes.took_back(uri);
            }
        }
    }

    fn settle_soon(self: &Arc<Self>, id: &InstanceId) {
        // Without a runtime of tokio the process ends, and the servers with it.
        let Ok(handle) = Handle::try_current() else { return };
        let (house, id) = (self.clone(), id.clone());
        handle.spawn(async move { house.settle(&id).await });
    }

    /// A run begins: it is told what clients want, and they are told what is new with it.
    async fn follow(&self, runtime: RuntimeHandle, of: Source) {
        let mut watch = runtime.watch();
        let run_of = |snapshot: &Snapshot| run_of(snapshot.get(&of.id).map(|view| &**view));
        let serves = |snapshot: &Arc<Snapshot>| run_of(snapshot).is_some_and(|run| run >= of.run);
        // An error says that the runtime has ended.
        if watch.wait_for(serves).await.is_err() {
            return;
        }
        let news = async {
            let is_read = |snapshot: &Arc<Snapshot>| {
                run_of(snapshot).is_some_and(|run| run > of.run)
                    || snapshot.get(&of.id).is_some_and(|view| view.status == Status::Online)
            };
            let Ok(snapshot) = watch.wait_for(is_read).await.map(|snapshot| snapshot.clone()) else { return };
            let view = snapshot.get(&of.id).filter(|_| run_of(&snapshot) == Some(of.run));
            if let Some(catalogue) = view.and_then(|view| view.catalogue.as_ref()) {
                self.tell_of(&of, catalogue);
            }
        };
        tokio::join!(self.settle(&of.id), news);
    }

    /// Tells clients which lists are not as they were, unless the server has said so itself.
    fn tell_of(&self, of: &Source, catalogue: &Arc<Catalogue>) {
        let (clients, changed): (Vec<_>, Vec<_>) = {
            let mut table = self.table();
            let Some(room) = table.of.get_mut(&of.id) else { return };
            let mut changed = Vec::new();
            if let Some(known) = room.known.replace(catalogue.clone()) {
                let mut revisions = Revisions::default();
                revisions.read(Some(&known), catalogue);
                changed = revisions.since(&Revisions::default());
            }
            let said = room.begun.get(&of.run).map_or(&[][..], |begun| &begun.said);
            changed.retain(|aspect| !said.contains(aspect));
            (room.clients.values().cloned().collect(), changed)
        };
        for words in changed.into_iter().filter_map(change_of).filter_map(words) {
            for session in &clients {
                session.hear(None, &words);
            }
        }
    }
}

impl Rooms {
    /// Empty ones. Clients are found in `sessions`.
    pub fn new(sessions: Arc<Sessions>) -> Self {
        Self { sessions, house: Arc::new(House { runtime: OnceLock::new(), rooms: Mutex::default() }) }
    }

    /// The runtime whose audience this is has begun.
    pub(super) fn open(&self, runtime: RuntimeHandle) {
        // There is one.
        let _ = self.house.runtime.set(runtime);
    }

    /// A client is connected to an instance.
    pub(super) fn enter(&self, session: &Arc<Session>, id: &InstanceId) {
        let catalogue = self.house.catalogue(id);
        let mut table = self.house.table();
        let room = table.of.entry(id.clone()).or_default();
        room.known = room.known.take().or(catalogue);
        room.clients.insert(session.number(), session.clone());
    }

    /// A guest is connected for as long as its request takes, and is to hear what is logged from this level on: the server is
    /// told before it is asked anything else, unless it takes longer than that.
    pub(super) async fn hears_from(&self, session: &Arc<Session>, id: &InstanceId, level: Level, patience: Duration) {
        self.enter(session, id);
        if let Some(room) = self.house.table().of.get_mut(id) {
            room.wishes.hear_from(session.number(), level);
        }
        // What others want is told with it, and must not be given up half way because this one hangs up.
        let (house, id) = (self.house.clone(), id.clone());
        let settled = tokio::spawn(async move { house.settle(&id).await });
        let _ = timeout(patience, settled).await;
    }

    /// It has said that it is ready to be asked. Whether the server has asked for roots before anybody was there who has any:
    /// then it is to be told that there are some now.
    pub(super) fn brings_roots(&self, session: &Session, id: &InstanceId) -> bool {
        session.opening.greeting.roots && self.house.table().rootless.remove(id).is_some()
    }

    /// Returns the servers of a client's user that requested roots before any client had some; empty if this client has
    /// no roots. Called when a client of several servers has initialized its session.
    pub(super) fn rootless_before(&self, session: &Session) -> Vec<InstanceId> {
        if !session.opening.greeting.roots {
            return Vec::new();
        }
        let (user, mut table) = (session.user(), self.house.table());
        let of_user = table.rootless.extract_if(|id, _| id.team == user.team && id.user == user.user);
        of_user.map(|(id, _)| id).collect()
    }

    /// Returns the clients of an instance's user that are connected to all of that user's servers and have roots. A
    /// server's request outside of any call goes to them only if no client is connected to the server directly.
    fn have_roots(&self, id: &InstanceId) -> impl Iterator<Item = Arc<Session>> {
        let sessions = self.sessions.of(&id.team, &id.user).into_iter();
        sessions.filter(|session| {
            !matches!(session.opening.endpoint, Endpoint::Instance(_))
                && !session.is_guest()
                && session.ended().is_none()
                && session.opening.greeting.roots
        })
    }

    /// It is not connected any more: what it alone wanted the server does no longer.
    pub(super) fn leave(&self, session: &Arc<Session>, id: &InstanceId) {
        let mut table = self.house.table();
        let Some(room) = table.of.get_mut(id) else { return };
        // A guest whose request is an ordinary one was never in here.
        if room.clients.remove(&session.number()).is_none() {
            return;
        }
        room.wishes.forget(session.number());
        drop(table);
        let house = self.house.clone();
        let Ok(handle) = Handle::try_current() else { return };
        let id = id.clone();
        handle.spawn(async move {
            house.settle(&id).await;
            let mut table = house.table();
            if table.of.get(&id).is_some_and(|room| room.clients.is_empty() && !room.is_behind) {
                table.of.remove(&id);
            }
        });
    }

    /// A client wishes something of the session that it shares.
    pub(super) fn wish(&self, session: &Session, id: &InstanceId, wish: &Wish) -> Result<Wished, TooMuch> {
        let run = self.run_of(id);
        let made = match self.house.table().of.get_mut(id) {
            Some(room) => room.wishes.make(session.number(), wish, run),
            // It has left meanwhile, and nobody waits for the answer.
            None => Made::Granted,
        };
        let asked = match made {
            Made::Granted => None,
            Made::Asked(asked) => Some(asked),
            Made::Refused(too_much) => return Err(too_much),
        };
        let wished = Wished { house: self.house.clone(), id: id.clone(), asked };
        if wished.is_granted() {
            self.house.settle_soon(id);
        }
        Ok(wished)
    }

    /// A request of a client is over: there may be room for what the server could not be told.
    pub(super) fn catch_up(&self, id: &InstanceId) {
        if self.house.table().of.get(id).is_some_and(|room| room.is_behind) {
            self.house.settle_soon(id);
        }
    }

    fn run_of(&self, id: &InstanceId) -> Option<Run> {
        run_of(self.house.runtime.get()?.status(id).as_deref())
    }

    /// Whether nobody is there who has roots: then whoever brings some is news to this run.
    fn is_rootless(&self, of: &Source) -> bool {
        let mut table = self.house.table();
        let is_rootless = table.of.get(&of.id).is_none_or(|room| room.able("roots/list").next().is_none())
            && self.have_roots(&of.id).next().is_none();
        if is_rootless {
            table.rootless.insert(of.id.clone(), of.run);
        }
        is_rootless
    }

    /// Whom a question is for, or why it is for nobody.
    fn asks(&self, id: &InstanceId, cause: Cause, question: &Message) -> Result<(Arc<Session>, Option<u64>), String> {
        if let Some((client, call)) = meant(cause) {
            let Some(session) = self.sessions.get(client) else {
                return Err("the client that it is asked of has gone".to_owned());
            };
            return session.answers(question).map(|()| (session, call));
        }
        match cause {
            Cause::Stranger => return Err("the call in flight was not made by a client that could answer".to_owned()),
            Cause::Several(count) => {
                return Err(format!(
                    "calls of {count} clients are in flight, and it is not said which of them is asked"
                ));
            }
            Cause::Call(_) | Cause::Client(_) | Cause::Nobody => {}
        }
        let (table, method) = (self.house.table(), question.method().unwrap_or_default());
        let mut able: Vec<_> = table.of.get(id).into_iter().flat_map(|room| room.able(method)).cloned().collect();
        drop(table);
        if method == "roots/list" && able.is_empty() {
            able.extend(self.have_roots(id));
        }
        let mut able = able.into_iter();
        match (able.next(), able.count()) {
            (Some(session), 0) => Ok((session, None)),
            (None, _) => Err("no client is attached that could answer".to_owned()),
            (Some(_), others) => {
                Err(format!("{} clients are attached that could answer, and it is not said which of them", others + 1))
            }
        }
    }
}

/// What has become of a wish. Dropped unanswered, nobody knows.
#[derive(Debug)]
pub(super) struct Wished {
    house: Arc<House>,
    id: InstanceId,
    /// None if the server does so already.
    asked: Option<Asked>,
}

impl Wished {
    /// Whether it is done without the server.
    pub(super) fn is_granted(&self) -> bool {
        self.asked.is_none()
    }

    /// The server has answered.
    pub(super) fn answered(mut self, is_done: bool) {
        let run = self.house.runtime.get().and_then(|runtime| run_of(runtime.status(&self.id).as_deref()));
        self.came(if is_done { Outcome::Done(run) } else { Outcome::Refused });
    }

    fn came(&mut self, outcome: Outcome) {
        let Some(asked) = self.asked.take() else { return };
        if let Some(room) = self.house.table().of.get_mut(&self.id) {
            room.wishes.came(asked, outcome);
        }
        self.house.settle_soon(&self.id);
    }
}

impl Drop for Wished {
    fn drop(&mut self) {
        self.came(Outcome::Unknown);
    }
}

impl Audience for Rooms {
    fn heard(&self, of: &Source, cause: Cause, message: Message) {
        let meant = meant(cause);
        let list = list_of(message.method().unwrap_or_default());
        let (hearers, is_there) = {
            let mut table = self.house.table();
            match table.of.get_mut(&of.id) {
                Some(room) => {
                    if let (Some(list), Some(begun)) = (list, room.begun.get_mut(&of.run)) {
                        begun.said.push(list);
                    }
                    let is_there = meant.is_some_and(|(client, _)| room.clients.contains_key(&client));
                    (room.hearers(&message, meant.map(|(client, _)| client)), is_there)
                }
                None => (Vec::new(), false),
            }
        };
        for session in hearers {
            let call = meant.filter(|(client, _)| *client == session.number()).and_then(|(_, call)| call);
            session.hear(call, &message);
        }
        // Whoever calls through `/mcp` hears of its call, and not of what it was never shown.
        let is_of_the_room = list.is_some() || message.method() == Some("notifications/resources/updated");
        if let Some((client, call)) = meant.filter(|_| !is_there && !is_of_the_room)
            && let Some(session) = self.sessions.get(client)
        {
            session.hear(call, &message);
        }
    }

    fn progress(&self, origin: Origin, message: Message) {
        if let Some(session) = self.sessions.get(origin.client) {
            session.progress(origin.call, &message);
        }
    }

    fn asked(&self, of: &Source, cause: Cause, question: Question) {
        let method = question.message().method().unwrap_or_default().to_owned();
        match (self.asks(&of.id, cause, question.message()), method.as_str()) {
            (Ok((session, call)), _) => session.ask(of.clone(), call, question),
            // To say that there are none is only true where nobody has any.
            (Err(_), "roots/list") if self.is_rootless(of) => question.nobody(),
            (Err(why), "sampling/createMessage" | "elicitation/create" | "roots/list") => {
                question.decline(INTERNAL_ERROR, &why);
            }
            (Err(why), _) => question.decline(METHOD_NOT_FOUND, &why),
        }
    }

    fn withdrawn(&self, of: &Source, question: u64, message: Message) {
        for session in self.sessions.of(&of.id.team, &of.id.user) {
            session.withdraw(of, question, &message);
        }
    }

    fn began(&self, of: &Source) {
        let Some(runtime) = self.house.runtime.get() else { return };
        let mut table = self.house.table();
        let Some(room) = table.of.get_mut(&of.id) else { return };
        let (house, runtime, source) = (self.house.clone(), runtime.clone(), of.clone());
        let work = tokio::spawn(async move { house.follow(runtime, source).await });
        room.begun.insert(of.run, Begun { said: Vec::new(), _work: AbortOnDropHandle::new(work) });
    }

    fn ended(&self, of: &Source) {
        {
            let catalogue = self.house.catalogue(&of.id);
            let mut table = self.house.table();
            if table.rootless.get(&of.id) == Some(&of.run) {
                table.rootless.remove(&of.id);
            }
            if let Some(room) = table.of.get_mut(&of.id) {
                room.begun.remove(&of.run);
                room.known = catalogue.or(room.known.take());
                room.wishes.ended(of.run);
                if room.held.as_ref().is_some_and(|(run, _)| *run == of.run) {
                    room.held = None;
                }
                // The next run owes nothing of what this one was not told.
                room.is_behind = false;
                if room.clients.is_empty() {
                    table.of.remove(&of.id);
                }
            }
        }
        for session in self.sessions.of(&of.id.team, &of.id.user) {
            session.withdraw_all(of);
        }
    }
}
