//! Endpoint of a simulated remote server. It outlives sessions, can be made to fail and to recover by a test, and
//! records which messages it received when. See [`RemoteLine`](super::remote) for the line to it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::script::SimScript;

/// Behaviour of an endpoint as data, which can be changed at any time. The default serves its script without delay and
/// accepts every credential. Everything else is the behaviour of the script; each session has its own server.
#[derive(Debug, Clone, Default)]
pub struct SimBehavior {
    /// Script of the sessions opened from now on; by default that of the connector's plan.
    pub script: Option<Arc<SimScript>>,
    /// Failure of every exchange, while it is set.
    pub down: Option<FailureKind>,
    /// Failures of the next requests and health checks, one each. They take precedence over `down`.
    pub next_failures: VecDeque<FailureKind>,
    /// Additional delay of the first exchange of a line: name lookup, connection, TLS. If it is longer than the
    /// policy's `connect_timeout`, the exchange fails after that timeout.
    pub connect_delay: Duration,
    /// Transit time of a message.
    pub delay: Duration,
    /// Random variation of both delays, as a fraction from 0 to 1 either way.
    pub jitter: f64,
    pub seed: u64,
    /// Header and value that every exchange must contain.
    pub required_header: Option<(String, Secret)>,
    /// Failure of an exchange without that header; by default status 401.
    pub refusal: Option<FailureKind>,
    /// Methods that are accepted and never answered. `*` means every method, the health check and the end of a session.
    pub silent_on: BTreeSet<&'static str>,
    pub unknown_methods: BTreeSet<&'static str>,
    pub health_failure: Option<FailureKind>,
}

impl SimBehavior {
    pub(super) fn is_silent_on(&self, method: &str) -> bool {
        self.silent_on.contains(method) || self.silent_on.contains("*")
    }

    fn refusal_for(&self, spec: &InstanceSpec) -> Option<FailureKind> {
        let (name, wanted) = self.required_header.as_ref()?;
        let value = spec.headers.iter().find(|(header, _)| header.eq_ignore_ascii_case(name));
        let refused = value.is_none_or(|(_, value)| value != wanted);
        refused.then(|| self.refusal.clone().unwrap_or(FailureKind::Unauthorized { challenge: None }))
    }
}

/// Creates a failure, marked as sent if the server may have received a message that failed in this way.
pub(super) fn failure(kind: FailureKind) -> ExchangeFailure {
    match kind {
        FailureKind::Dns
        | FailureKind::Refused
        | FailureKind::ConnectTimeout(_)
        | FailureKind::Tls(_)
        | FailureKind::ForeignEndpoint { .. }
        | FailureKind::BadAddress(_)
        | FailureKind::NotRenewed(_)
        | FailureKind::UnsupportedTransport => ExchangeFailure::unsent(kind),
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
        | FailureKind::Panicked(_) => ExchangeFailure::sent(kind),
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimHandshake {
    pub run: RunNumber,
    pub began: Instant,
    pub ended: Option<Instant>,
    pub succeeded: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimSessionCounts {
    pub opened: u64,
    /// Sessions ended by the client with DELETE.
    pub closed: u64,
    /// Sessions left behind by a client that is gone.
    pub dropped: u64,
    /// Sessions forgotten by the server before that.
    pub forgotten: u64,
}

impl SimSessionCounts {
    pub fn open_count(self) -> u64 {
        self.opened - self.closed - self.dropped - self.forgotten
    }
}

#[derive(Default)]
pub(super) struct SimEndpoints {
    endpoints: Mutex<HashMap<InstanceId, Arc<SimEndpoint>>>,
    counters: Mutex<SimCounters>,
    keeps_no_history: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct SimCounters {
    lines: usize,
    // Number of lines created to an endpoint that already had one.
    overlaps: u64,
    attempts: usize,
    attempts_max: usize,
}

impl SimEndpoints {
    pub(super) fn without_history() -> Self {
        Self { keeps_no_history: true, ..Self::default() }
    }

    pub(super) fn endpoint(self: &Arc<Self>, id: &InstanceId) -> Arc<SimEndpoint> {
        let mut endpoints = lock(&self.endpoints);
        let endpoint = endpoints.entry(id.clone()).or_insert_with(|| {
            // The world owns its endpoints; they need it only for its counters.
            let (changed, world) = (Notify::new(), Arc::downgrade(self));
            Arc::new(SimEndpoint {
                state: Mutex::default(),
                changed,
                endpoints: world,
                keeps_no_history: self.keeps_no_history,
            })
        });
        Arc::clone(endpoint)
    }

    pub(super) fn line_count(&self) -> usize {
        lock(&self.counters).lines
    }

    pub(super) fn overlaps(&self) -> u64 {
        lock(&self.counters).overlaps
    }

    pub(super) fn attempts_max(&self) -> usize {
        lock(&self.counters).attempts_max
    }
}

pub(super) struct SimEndpoint {
    state: Mutex<SimEndpointState>,
    // Notified when a message arrives or an attempt ends.
    changed: Notify,
    endpoints: Weak<SimEndpoints>,
    keeps_no_history: bool,
}

#[derive(Default)]
struct SimEndpointState {
    behavior: SimBehavior,
    inboxes: BTreeMap<u64, LineInbox>,
    lines: u64,
    open_sessions: BTreeSet<u64>,
    // HTTP status for an unknown session; by default 404.
    expired_status: Option<u16>,
    sessions: SimSessionCounts,
    attempts: Vec<SimHandshake>,
    overlaps: u64,
    log: Vec<(Instant, DeliveryProgress, Box<str>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DeliveryProgress {
    Tried,
    Received,
    Served,
}

#[derive(Default)]
struct LineInbox {
    waker: Option<Waker>,
    events: VecDeque<EndpointEvent>,
}

#[derive(Debug, Clone)]
pub(super) enum EndpointEvent {
    Cut,
    Lost(FailureKind),
    Message(Bytes),
}

impl SimEndpoint {
    pub(super) fn add_line(&self) -> u64 {
        let mut state = self.state();
        if let Some(world) = self.endpoints.upgrade() {
            let mut counters = lock(&world.counters);
            counters.lines += 1;
            counters.overlaps += u64::from(!state.inboxes.is_empty());
        }
        state.lines += 1;
        let line = state.lines;
        state.inboxes.insert(line, LineInbox::default());
        line
    }

    pub(super) fn remove_line(&self, line: u64, session: Option<u64>) {
        if let Some(world) = self.endpoints.upgrade() {
            lock(&world.counters).lines -= 1;
        }
        let mut state = self.state();
        state.inboxes.remove(&line);
        if session.is_some_and(|session| state.open_sessions.remove(&session)) {
            state.sessions.dropped += 1;
        }
    }

    pub(super) fn register(&self, line: u64, waker: &Waker) {
        if let Some(inbox) = self.state().inboxes.get_mut(&line) {
            inbox.waker = Some(waker.clone());
        }
    }

    pub(super) fn wake(&self, line: u64) {
        let waker = self.state().inboxes.get_mut(&line).and_then(|inbox| inbox.waker.take());
        waker.inspect(Waker::wake_by_ref);
    }

    pub(super) fn take_events(&self, line: u64) -> VecDeque<EndpointEvent> {
        self.state().inboxes.get_mut(&line).map(|inbox| mem::take(&mut inbox.events)).unwrap_or_default()
    }

    pub(super) fn with_behavior<T>(&self, of: impl FnOnce(&mut SimBehavior) -> T) -> T {
        of(&mut self.state().behavior)
    }

    pub(super) fn next_failure(&self, is_request: bool) -> Option<FailureKind> {
        let behavior = &mut self.state().behavior;
        let next = if is_request { behavior.next_failures.pop_front() } else { None };
        next.or_else(|| behavior.down.clone())
    }

    /// Returns the failure with which an arrived message is refused, if it is. `session` is the session that it names.
    pub(super) fn refusal_for(&self, spec: &InstanceSpec, session: Option<u64>) -> Option<FailureKind> {
        let state = self.state();
        let unknown = session.is_some_and(|session| !state.open_sessions.contains(&session));
        let expired = unknown.then(|| FailureKind::session_expired(state.expired_status.unwrap_or(404)));
        state.behavior.refusal_for(spec).or(expired)
    }

    pub(super) fn record_delivery(&self, now: Instant, reach: DeliveryProgress, what: &str) {
        if !self.keeps_no_history {
            self.state().log.push((now, reach, what.into()));
        }
        self.changed.notify_waiters();
    }

    pub(super) fn begin_attempt(&self, run: RunNumber, now: Instant) -> usize {
        if let Some(world) = self.endpoints.upgrade() {
            let mut counters = lock(&world.counters);
            counters.attempts += 1;
            counters.attempts_max = counters.attempts_max.max(counters.attempts);
        }
        let mut state = self.state();
        if state.attempts.iter().rev().take(8).any(|attempt| attempt.ended.is_none()) {
            state.overlaps += 1;
        } else if self.keeps_no_history {
            state.attempts.clear();
        }
        state.attempts.push(SimHandshake { run, began: now, ended: None, succeeded: false });
        state.attempts.len() - 1
    }

    pub(super) fn end_attempt(&self, number: usize, succeeded: bool, now: Instant) {
        if let Some(world) = self.endpoints.upgrade() {
            lock(&world.counters).attempts -= 1;
        }
        if let Some(attempt) = self.state().attempts.get_mut(number) {
            *attempt = SimHandshake { ended: Some(now), succeeded, ..attempt.clone() };
        }
        self.changed.notify_waiters();
    }

    pub(super) fn open_session(&self) -> u64 {
        let mut state = self.state();
        state.sessions.opened += 1;
        let number = state.sessions.opened;
        state.open_sessions.insert(number);
        number
    }

    pub(super) fn close_session(&self, session: u64) {
        let mut state = self.state();
        if state.open_sessions.remove(&session) {
            state.sessions.closed += 1;
        }
    }

    pub(super) fn forget_session(&self, session: u64) {
        let mut state = self.state();
        if state.open_sessions.remove(&session) {
            state.sessions.forgotten += 1;
        }
    }

    fn forget_sessions(&self, status: u16) {
        let mut state = self.state();
        state.expired_status = Some(status);
        state.sessions.forgotten += mem::take(&mut state.open_sessions).len() as u64;
    }

    fn broadcast(&self, event: &EndpointEvent) {
        let mut wakers = Vec::new();
        for inbox in self.state().inboxes.values_mut() {
            inbox.events.push_back(event.clone());
            wakers.extend(inbox.waker.take());
        }
        wakers.iter().for_each(Waker::wake_by_ref);
    }

    fn state(&self) -> MutexGuard<'_, SimEndpointState> {
        lock(&self.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Control of an endpoint for tests: makes it fail and recover, and returns what it has received.
#[derive(Clone)]
pub struct SimRemote(pub(super) Arc<SimEndpoint>);

impl SimRemote {
    pub fn change(&self, change: impl FnOnce(&mut SimBehavior)) {
        self.0.with_behavior(change);
    }

    /// Makes the endpoint unreachable from now on. Sessions and exchanges in progress are not affected.
    pub fn take_down(&self, kind: FailureKind) {
        self.change(|behavior| behavior.down = Some(kind));
    }

    pub fn bring_up(&self) {
        self.change(|behavior| behavior.down = None);
    }

    /// Kills the server: it is unreachable from now on, exchanges in progress break off, and its sessions are
    /// forgotten.
    pub fn kill(&self, kind: FailureKind) {
        self.take_down(kind);
        self.expire(404);
        self.cut();
    }

    /// Forgets all sessions. A message that names one gets this HTTP status (404 or 400).
    pub fn expire(&self, status: u16) {
        self.0.forget_sessions(status);
    }

    /// Breaks off the exchanges in progress. Their requests may have been executed.
    pub fn cut(&self) {
        self.0.broadcast(&EndpointEvent::Cut);
    }

    /// Reports to every line that its session is lost, without a request.
    pub fn report_session_lost(&self, kind: FailureKind) {
        self.0.broadcast(&EndpointEvent::Lost(kind));
    }

    /// Sends a JSON-RPC message to every client, without a request.
    pub fn say(&self, message: impl Into<Bytes>) {
        self.0.broadcast(&EndpointEvent::Message(message.into()));
    }

    pub fn fail_next(&self, kinds: impl IntoIterator<Item = FailureKind>) {
        self.change(|behavior| behavior.next_failures = kinds.into_iter().collect());
    }

    pub async fn wait_until(&self, mut seen: impl FnMut(&Self) -> bool) {
        loop {
            // Created before the check, so that a change in between is not missed.
            let changed = self.0.changed.notified();
            if seen(self) {
                return;
            }
            changed.await;
        }
    }

    pub fn attempts(&self) -> Vec<SimHandshake> {
        self.0.state().attempts.clone()
    }

    /// Returns how often a handshake was sent while another was in progress.
    pub fn overlaps(&self) -> u64 {
        self.0.state().overlaps
    }

    pub fn sessions(&self) -> SimSessionCounts {
        self.0.state().sessions
    }

    /// Returns the times at which messages of this method were sent, including those that could not be delivered. `GET`
    /// is a health check by URL, `DELETE` the end of a session, and `tools/call echo` a call of that tool.
    pub fn tried_at(&self, method: &str) -> Vec<Instant> {
        self.delivery_times(DeliveryProgress::Tried, method)
    }

    /// Returns the times at which the endpoint received such messages, whatever it did with them.
    pub fn received_at(&self, method: &str) -> Vec<Instant> {
        self.delivery_times(DeliveryProgress::Received, method)
    }

    /// Returns the times at which the server of a session got such messages. Only these may have been executed.
    pub fn served_at(&self, method: &str) -> Vec<Instant> {
        self.delivery_times(DeliveryProgress::Served, method)
    }

    fn delivery_times(&self, reach: DeliveryProgress, method: &str) -> Vec<Instant> {
        // `tools/call` matches the calls of all tools.
        let is_it = |what: &str| what == method || what.split_once(' ').is_some_and(|(kind, _)| kind == method);
        let state = self.0.state();
        state.log.iter().filter(|(_, got, what)| *got == reach && is_it(what)).map(|(at, ..)| *at).collect()
    }
}
