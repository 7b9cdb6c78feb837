//! The far end of a simulated remote server: it outlives sessions, is hurt and healed from a test, and remembers when
//! what came. See [`RemoteLine`](super::remote) for the line in front of it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use mcp_satellite_actors::model::failure::{Failure, FailureKind};
use mcp_satellite_actors::model::ids::{InstanceId, Run};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::script::Script;

/// How an endpoint answers, as data: it may be changed at any time. The default serves its script at once and takes
/// every credential. All that it does not say is the script's business, of which each session is a server of its own.
#[derive(Debug, Clone, Default)]
pub struct Manner {
    /// What serves the sessions that are opened from now on; by default what the connector's plan says.
    pub script: Option<Arc<Script>>,
    /// Every exchange comes to this.
    pub down: Option<FailureKind>,
    /// The next requests and health checks come to these, one each, before `down` is asked.
    pub fails_next: VecDeque<FailureKind>,
    /// How long the first exchange of a line takes more than another: name, connection, TLS. Where that is more than the
    /// policy's `connect_timeout`, it fails at that.
    pub connect_delay: Duration,
    /// How long a message is on its way.
    pub delay: Duration,
    /// Varies both by up to this fraction either way, from 0 to 1.
    pub jitter: f64,
    /// The seed of that chance.
    pub seed: u64,
    /// A header that every exchange must bring, or it is refused.
    pub wants: Option<(String, Secret)>,
    /// How it is refused: by default with 401.
    pub refuses: Option<FailureKind>,
    /// Methods that it takes and never answers. `*` is every one, and the health check and the end of a session too.
    pub silent_on: BTreeSet<&'static str>,
    /// Methods that it does not know.
    pub unknown: BTreeSet<&'static str>,
    /// What a GET of the `health_url` comes to, where that is a failure.
    pub unhealthy: Option<FailureKind>,
}

impl Manner {
    pub(super) fn is_silent_on(&self, method: &str) -> bool {
        self.silent_on.contains(method) || self.silent_on.contains("*")
    }

    /// How these credentials are refused, if they are.
    fn refuses(&self, spec: &InstanceSpec) -> Option<FailureKind> {
        let (name, wanted) = self.wants.as_ref()?;
        let given = spec.headers.iter().find(|(header, _)| header.eq_ignore_ascii_case(name));
        let refused = given.is_none_or(|(_, given)| given != wanted);
        refused.then(|| self.refuses.clone().unwrap_or(FailureKind::Unauthorized { challenge: None }))
    }
}

/// Whether the server may have got a message that came to this.
pub(super) fn failure(kind: FailureKind) -> Failure {
    match kind {
        FailureKind::Dns
        | FailureKind::Refused
        | FailureKind::ConnectTimeout(_)
        | FailureKind::Tls(_)
        | FailureKind::ForeignEndpoint { .. }
        | FailureKind::BadAddress(_)
        | FailureKind::NotRenewed(_)
        | FailureKind::Unserved => Failure::unsent(kind),
        FailureKind::Broken(_)
        | FailureKind::HeaderTimeout(_)
        | FailureKind::Cut
        | FailureKind::Unauthorized { .. }
        | FailureKind::Forbidden { .. }
        | FailureKind::Ungranted { .. }
        | FailureKind::InsufficientScope { .. }
        | FailureKind::SessionExpired { .. }
        | FailureKind::OtherEra(_)
        | FailureKind::Throttled { .. }
        | FailureKind::ServerError { .. }
        | FailureKind::Redirected { .. }
        | FailureKind::Status { .. }
        | FailureKind::NotMcp { .. }
        | FailureKind::TooLong(_)
        | FailureKind::NoMemory
        | FailureKind::Flooded
        | FailureKind::Handshake(_)
        | FailureKind::Unhealthy(_)
        | FailureKind::Panicked(_) => Failure::sent(kind),
    }
}

/// One `initialize` of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The run that made it.
    pub run: Run,
    /// When it was sent.
    pub began: Instant,
    /// When it was over, if it is.
    pub ended: Option<Instant>,
    /// Whether it made a session.
    pub succeeded: bool,
}

/// What became of the sessions of an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sessions {
    /// Ever made.
    pub opened: u64,
    /// Ended by the client tidily (DELETE).
    pub closed: u64,
    /// Left behind by a client that is gone.
    pub dropped: u64,
    /// Forgotten by the server before that.
    pub forgotten: u64,
}

impl Sessions {
    /// Those that are there now, with their client.
    pub fn open(self) -> u64 {
        self.opened - self.closed - self.dropped - self.forgotten
    }
}

/// All endpoints of one connector.
#[derive(Default)]
pub(super) struct World {
    endpoints: Mutex<HashMap<InstanceId, Arc<Endpoint>>>,
    flights: Mutex<Flights>,
    forgetful: bool,
}

/// What is under way in all of them together.
#[derive(Debug, Clone, Copy, Default)]
struct Flights {
    lines: usize,
    /// How often a line was made to an endpoint that had one.
    overlaps: u64,
    attempts: usize,
    attempts_max: usize,
}

impl World {
    /// One whose endpoints remember nothing of what is over.
    pub(super) fn forgetful() -> Self {
        Self { forgetful: true, ..Self::default() }
    }

    /// The endpoint of an instance, which is there from the first time that anybody asks for it.
    pub(super) fn endpoint(self: &Arc<Self>, id: &InstanceId) -> Arc<Endpoint> {
        let mut endpoints = unpoisoned(&self.endpoints);
        let endpoint = endpoints.entry(id.clone()).or_insert_with(|| {
            // The world holds its endpoints; they need of it only what they count in.
            let (changed, world) = (Notify::new(), Arc::downgrade(self));
            Arc::new(Endpoint { state: Mutex::default(), changed, world, forgetful: self.forgetful })
        });
        Arc::clone(endpoint)
    }

    pub(super) fn lines(&self) -> usize {
        unpoisoned(&self.flights).lines
    }

    pub(super) fn overlaps(&self) -> u64 {
        unpoisoned(&self.flights).overlaps
    }

    pub(super) fn attempts_max(&self) -> usize {
        unpoisoned(&self.flights).attempts_max
    }
}

/// One endpoint.
pub(super) struct Endpoint {
    state: Mutex<State>,
    /// A message has come, or an attempt is over.
    changed: Notify,
    world: Weak<World>,
    forgetful: bool,
}

#[derive(Default)]
struct State {
    manner: Manner,
    /// Lines to it, by number.
    seats: BTreeMap<u64, Seat>,
    lines: u64,
    /// Sessions that it knows, by number.
    known: BTreeSet<u64>,
    /// With which HTTP status it refuses another; 404 unless a test says so.
    expired_status: Option<u16>,
    sessions: Sessions,
    attempts: Vec<Attempt>,
    overlaps: u64,
    log: Vec<(Instant, Reach, Box<str>)>,
}

/// How far a message got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reach {
    /// It was to be sent.
    Tried,
    /// It got to the endpoint, which may have refused it.
    Received,
    /// It was handed to the server of its session.
    Served,
}

/// Where a line hears of what is done to its endpoint.
#[derive(Default)]
struct Seat {
    waker: Option<Waker>,
    news: VecDeque<News>,
}

/// What is done to every line of an endpoint.
#[derive(Debug, Clone)]
pub(super) enum News {
    /// What is under way breaks off.
    Cut,
    /// The session is lost.
    Lost(FailureKind),
    /// The server says this unasked.
    Said(Bytes),
}

impl Endpoint {
    /// A new line, by its number.
    pub(super) fn enter(&self) -> u64 {
        let mut state = self.state();
        if let Some(world) = self.world.upgrade() {
            let mut flights = unpoisoned(&world.flights);
            flights.lines += 1;
            flights.overlaps += u64::from(!state.seats.is_empty());
        }
        state.lines += 1;
        let line = state.lines;
        state.seats.insert(line, Seat::default());
        line
    }

    /// That line is gone, and with it the client of this session.
    pub(super) fn leave(&self, line: u64, session: Option<u64>) {
        if let Some(world) = self.world.upgrade() {
            unpoisoned(&world.flights).lines -= 1;
        }
        let mut state = self.state();
        state.seats.remove(&line);
        if session.is_some_and(|session| state.known.remove(&session)) {
            state.sessions.dropped += 1;
        }
    }

    /// From now on wakes this line's task when something is done to the endpoint.
    pub(super) fn register(&self, line: u64, waker: &Waker) {
        if let Some(seat) = self.state().seats.get_mut(&line) {
            seat.waker = Some(waker.clone());
        }
    }

    pub(super) fn wake(&self, line: u64) {
        let waker = self.state().seats.get_mut(&line).and_then(|seat| seat.waker.take());
        waker.inspect(Waker::wake_by_ref);
    }

    /// What was done since this line asked last.
    pub(super) fn news(&self, line: u64) -> VecDeque<News> {
        self.state().seats.get_mut(&line).map(|seat| mem::take(&mut seat.news)).unwrap_or_default()
    }

    pub(super) fn manner<T>(&self, of: impl FnOnce(&mut Manner) -> T) -> T {
        of(&mut self.state().manner)
    }

    /// What the next exchange comes to, where it is not for the server of its session to say.
    pub(super) fn fails(&self, is_asked: bool) -> Option<FailureKind> {
        let manner = &mut self.state().manner;
        let next = if is_asked { manner.fails_next.pop_front() } else { None };
        next.or_else(|| manner.down.clone())
    }

    /// Why a message that has arrived is refused, if it is. `session` is what it names, if it names one.
    pub(super) fn refuses(&self, spec: &InstanceSpec, session: Option<u64>) -> Option<FailureKind> {
        let state = self.state();
        let unknown = session.is_some_and(|session| !state.known.contains(&session));
        let expired = unknown.then(|| FailureKind::expired(state.expired_status.unwrap_or(404)));
        state.manner.refuses(spec).or(expired)
    }

    pub(super) fn note(&self, now: Instant, reach: Reach, what: &str) {
        if !self.forgetful {
            self.state().log.push((now, reach, what.into()));
        }
        self.changed.notify_waiters();
    }

    /// A handshake was sent; gives its number.
    pub(super) fn attempt_began(&self, run: Run, now: Instant) -> usize {
        if let Some(world) = self.world.upgrade() {
            let mut flights = unpoisoned(&world.flights);
            flights.attempts += 1;
            flights.attempts_max = flights.attempts_max.max(flights.attempts);
        }
        let mut state = self.state();
        if state.attempts.iter().rev().take(8).any(|attempt| attempt.ended.is_none()) {
            state.overlaps += 1;
        } else if self.forgetful {
            state.attempts.clear();
        }
        state.attempts.push(Attempt { run, began: now, ended: None, succeeded: false });
        state.attempts.len() - 1
    }

    pub(super) fn attempt_ended(&self, number: usize, succeeded: bool, now: Instant) {
        if let Some(world) = self.world.upgrade() {
            unpoisoned(&world.flights).attempts -= 1;
        }
        if let Some(attempt) = self.state().attempts.get_mut(number) {
            *attempt = Attempt { ended: Some(now), succeeded, ..attempt.clone() };
        }
        self.changed.notify_waiters();
    }

    /// A session is made; gives its number.
    pub(super) fn session_opened(&self) -> u64 {
        let mut state = self.state();
        state.sessions.opened += 1;
        let number = state.sessions.opened;
        state.known.insert(number);
        number
    }

    /// Its client has ended it.
    pub(super) fn session_closed(&self, session: u64) {
        let mut state = self.state();
        if state.known.remove(&session) {
            state.sessions.closed += 1;
        }
    }

    /// The server behind it has ended by itself.
    pub(super) fn session_forgotten(&self, session: u64) {
        let mut state = self.state();
        if state.known.remove(&session) {
            state.sessions.forgotten += 1;
        }
    }

    fn forget_all(&self, status: u16) {
        let mut state = self.state();
        state.expired_status = Some(status);
        state.sessions.forgotten += mem::take(&mut state.known).len() as u64;
    }

    fn tell(&self, news: &News) {
        let mut wakers = Vec::new();
        for seat in self.state().seats.values_mut() {
            seat.news.push_back(news.clone());
            wakers.extend(seat.waker.take());
        }
        wakers.iter().for_each(Waker::wake_by_ref);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        unpoisoned(&self.state)
    }
}

fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A way to hurt and to heal one endpoint, and to see what it has seen.
#[derive(Clone)]
pub struct SimRemote(pub(super) Arc<Endpoint>);

impl SimRemote {
    /// Changes how it answers from now on.
    pub fn change(&self, change: impl FnOnce(&mut Manner)) {
        self.0.manner(change);
    }

    /// It cannot be reached from now on. Its sessions and what it works on are not touched.
    pub fn down(&self, kind: FailureKind) {
        self.change(|manner| manner.down = Some(kind));
    }

    /// It can be reached again.
    pub fn up(&self) {
        self.change(|manner| manner.down = None);
    }

    /// The server is killed: it cannot be reached from now on, what was under way breaks off, and its sessions are
    /// forgotten.
    pub fn kill(&self, kind: FailureKind) {
        self.down(kind);
        self.expire(404);
        self.cut();
    }

    /// It forgets its sessions, and answers what names one with this HTTP status (404 or 400).
    pub fn expire(&self, status: u16) {
        self.0.forget_all(status);
    }

    /// The answers to what is under way break off. What was asked may have been done.
    pub fn cut(&self) {
        self.0.tell(&News::Cut);
    }

    /// Every line to it finds its session lost, whatever was asked.
    pub fn lose(&self, kind: FailureKind) {
        self.0.tell(&News::Lost(kind));
    }

    /// Every client is told this unasked: one JSON-RPC message.
    pub fn say(&self, message: impl Into<Bytes>) {
        self.0.tell(&News::Said(message.into()));
    }

    /// The next exchanges come to these, one each.
    pub fn fail_next(&self, kinds: impl IntoIterator<Item = FailureKind>) {
        self.change(|manner| manner.fails_next = kinds.into_iter().collect());
    }

    /// Waits until what it has seen is as wanted.
    pub async fn until(&self, mut seen: impl FnMut(&Self) -> bool) {
        loop {
            // Hears of every change from here on, also of one between the look and the wait.
            let changed = self.0.changed.notified();
            if seen(self) {
                return;
            }
            changed.await;
        }
    }

    /// Every handshake so far.
    pub fn attempts(&self) -> Vec<Attempt> {
        self.0.state().attempts.clone()
    }

    /// How often a handshake was sent while another was under way.
    pub fn overlaps(&self) -> u64 {
        self.0.state().overlaps
    }

    /// What became of its sessions.
    pub fn sessions(&self) -> Sessions {
        self.0.state().sessions
    }

    /// When messages of this method were sent to it, also those that could not get there. `GET` is a health check by URL,
    /// `DELETE` the end of a session, and `tools/call echo` a call of that tool.
    pub fn tried(&self, method: &str) -> Vec<Instant> {
        self.seen(Reach::Tried, method)
    }

    /// When it received them, whatever it did with them.
    pub fn received(&self, method: &str) -> Vec<Instant> {
        self.seen(Reach::Received, method)
    }

    /// When the server of a session was given them: such a call may have been carried out, no other was.
    pub fn served(&self, method: &str) -> Vec<Instant> {
        self.seen(Reach::Served, method)
    }

    fn seen(&self, reach: Reach, method: &str) -> Vec<Instant> {
        // `tools/call` is every tool's.
        let is_it = |what: &str| what == method || what.split_once(' ').is_some_and(|(kind, _)| kind == method);
        let state = self.0.state();
        state.log.iter().filter(|(_, got, what)| *got == reach && is_it(what)).map(|(at, ..)| *at).collect()
    }
}
