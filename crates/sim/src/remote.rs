//! A `ServerLine` to a simulated endpoint, in place of the connector for remote servers and without a network. It has no
//! task and one timer, so that thousands run in paused time. Each session is served by its own `SimResponder`.
//!
//! ```text
//! send ──connect_delay, delay──> arrives ──> refused, expired, silent, or Server ──> Message
//!   └── down, fails_next ──> Failed, Lost        └── cut, header timeout ──> Failed
//! ```

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport, ServerTarget};
use mcp_satellite_actors::seam::{LineEvent, LineOutput, ServerLine};
use mcp_satellite_protocol::error_code::METHOD_NOT_FOUND;
use mcp_satellite_protocol::method;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, Sleep, sleep_until};

use super::endpoint::{DeliveryProgress, EndpointEvent, SimEndpoint, failure};
use super::script::{RunRng, SimScript, SpokenEras};
use super::server::{EnvSource, SimPhase, SimResponder};
use super::wire::{CallParams, WireMessage, parse, put_answer, put_error};

pub(super) struct SimLine {
    endpoint: Arc<SimEndpoint>,
    number: u64,
    spec: Arc<InstanceSpec>,
    run: RunNumber,
    // Script of its sessions, unless the endpoint sets another.
    script: Arc<SimScript>,
    rng: RunRng,
    connected: bool,
    session: Option<SimSession>,
    // Server of requests without a session, created by the first one.
    stateless_server: Option<SimResponder>,
    inbox: VecDeque<LineEvent>,
    // Requests and probes that are neither answered nor abandoned.
    open_exchanges: BTreeMap<u64, OpenExchange>,
    // Messages in transit, by arrival time and order of sending.
    in_transit: BTreeMap<(Instant, u64), TransitMessage>,
    sent: u64,
    // Earliest arrival of later messages: none overtakes `notifications/initialized`.
    not_before: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// A session. It has no number until its handshake was answered.
struct SimSession {
    number: Option<u64>,
    server: SimResponder,
}

struct OpenExchange {
    // Time by which the response must begin, and the timeout that led to it.
    deadline: Option<(Instant, Duration)>,
    // Number of the handshake attempt, if it is one.
    attempt: Option<usize>,
    stateless: bool,
}

struct TransitMessage {
    kind: TransitKind,
    body: Bytes,
    failure: Option<FailureKind>,
}

enum TransitKind {
    Request(u64),
    Stateless(u64),
    Probe(u64),
    Initialized,
    Notification,
    Close,
    /// The endpoint has received the message, and its server has not started yet.
    Queued,
    Unconfirmed,
}

impl SimLine {
    pub(super) fn new(
        endpoint: Arc<SimEndpoint>,
        spec: Arc<InstanceSpec>,
        run: RunNumber,
        script: Arc<SimScript>,
    ) -> Self {
        let seed = endpoint.with_behavior(|behavior| behavior.seed);
        Self {
            number: endpoint.add_line(),
            endpoint,
            spec,
            run,
            script,
            rng: RunRng::new(seed, run),
            connected: false,
            session: None,
            stateless_server: None,
            inbox: VecDeque::new(),
            open_exchanges: BTreeMap::new(),
            in_transit: BTreeMap::new(),
            sent: 0,
            not_before: None,
            timer: None,
        }
    }

    fn open_exchange(
        &mut self,
        now: Instant,
        id: u64,
        header_timeout: Option<Duration>,
        attempt: Option<usize>,
        alone: bool,
    ) {
        let deadline = header_timeout.map(|after| (now + after, after));
        self.open_exchanges.insert(id, OpenExchange { deadline, attempt, stateless: alone });
    }

    fn post(&mut self, now: Instant, what: TransitKind, body: Bytes) {
        self.record_delivery(now, DeliveryProgress::Tried, &what, &body);
        let mut fails = self
            .endpoint
            .next_failure(matches!(what, TransitKind::Request(_) | TransitKind::Stateless(_) | TransitKind::Probe(_)));
        let takes = match &fails {
            Some(FailureKind::ConnectTimeout(after) | FailureKind::HeaderTimeout(after)) => *after,
            _ => self.transit_time(&mut fails),
        };
        let takes = match what {
            TransitKind::Close => takes.min(self.spec.policy.remote.close_timeout),
            TransitKind::Request(_)
            | TransitKind::Stateless(_)
            | TransitKind::Probe(_)
            | TransitKind::Initialized
            | TransitKind::Notification
            | TransitKind::Queued
            | TransitKind::Unconfirmed => takes,
        };
        let at = self.not_before.map_or(now + takes, |not_before| not_before.max(now + takes));
        if matches!(what, TransitKind::Initialized) {
            self.not_before = Some(at);
        }
        self.schedule(at, TransitMessage { kind: what, body, failure: fails });
    }

    /// Returns the transit time, or the connect timeout if connecting takes longer.
    fn transit_time(&mut self, fails: &mut Option<FailureKind>) -> Duration {
        let (connect, delay, jitter) =
            self.endpoint.with_behavior(|behavior| (behavior.connect_delay, behavior.delay, behavior.jitter));
        let takes = self.rng.apply_jitter(delay, jitter);
        if self.connected {
            return takes;
        }
        let connect = self.rng.apply_jitter(connect, jitter);
        let limit = self.spec.policy.remote.connect_timeout;
        if connect > limit {
            *fails = Some(FailureKind::ConnectTimeout(limit));
            return limit;
        }
        self.connected = fails.is_none();
        takes + connect
    }

    fn schedule(&mut self, at: Instant, letter: TransitMessage) {
        self.sent += 1;
        self.in_transit.insert((at, self.sent), letter);
    }

    fn record_delivery(&self, now: Instant, reach: DeliveryProgress, what: &TransitKind, body: &[u8]) {
        let message = ParsedMessage::parse(body);
        let what = match what {
            TransitKind::Request(_)
            | TransitKind::Stateless(_)
            | TransitKind::Initialized
            | TransitKind::Notification => message.name(),
            TransitKind::Probe(_) => "GET".into(),
            TransitKind::Close => "DELETE".into(),
            TransitKind::Queued | TransitKind::Unconfirmed => return,
        };
        self.endpoint.record_delivery(now, reach, &what);
    }

    fn advance(&mut self, now: Instant) {
        for event in self.endpoint.take_events(self.number) {
            match event {
                EndpointEvent::Cut => self.cut(now),
                EndpointEvent::Lost(kind) => self.inbox.push_back(LineEvent::Lost(failure(kind))),
                EndpointEvent::Message(message) => self.inbox.push_back(LineEvent::Message { message, request: None }),
            }
        }
        while let Some(first) = self.in_transit.first_entry()
            && first.key().0 <= now
        {
            let letter = first.remove();
            self.handle_arrival(now, letter);
        }
        self.serve(now);
        let is_late = |exchange: &OpenExchange| exchange.deadline.filter(|(deadline, _)| *deadline <= now);
        let late: Vec<_> = self.open_exchanges.iter().filter_map(|(id, open)| Some((*id, is_late(open)?.1))).collect();
        for (id, after) in late {
            self.fail_exchange(now, id, FailureKind::HeaderTimeout(after));
        }
    }

    fn next_wakeup(&self) -> Option<Instant> {
        let arrival = self.in_transit.keys().next().map(|(at, _)| *at);
        let servers = self.session.as_ref().map(|session| &session.server).into_iter().chain(&self.stateless_server);
        let answer = servers.filter_map(|server| match server.phase {
            SimPhase::Starting | SimPhase::Serving => server.next_timer(),
            SimPhase::Hung | SimPhase::Ended(_) => None,
        });
        let late = self.open_exchanges.values().filter_map(|exchange| exchange.deadline).map(|(deadline, _)| deadline);
        arrival.into_iter().chain(answer).chain(late).min()
    }

    fn handle_arrival(&mut self, now: Instant, letter: TransitMessage) {
        let TransitMessage { kind: what, body, failure: fails } = letter;
        match what {
            TransitKind::Queued => return self.deliver_to_session(now, &what, body),
            TransitKind::Unconfirmed => return self.inbox.push_back(LineEvent::Closed),
            TransitKind::Request(_)
            | TransitKind::Stateless(_)
            | TransitKind::Probe(_)
            | TransitKind::Initialized
            | TransitKind::Notification
            | TransitKind::Close => {}
        }
        let got_there = fails.as_ref().is_none_or(|kind| failure(kind.clone()).sent);
        if got_there {
            self.record_delivery(now, DeliveryProgress::Received, &what, &body);
        }
        if let Some(kind) = fails.or_else(|| self.refusal(&what, &body)) {
            return self.fail_delivery(now, &what, kind);
        }
        let message = ParsedMessage::parse(&body);
        let method = match what {
            TransitKind::Request(_)
            | TransitKind::Stateless(_)
            | TransitKind::Initialized
            | TransitKind::Notification
            | TransitKind::Queued
            | TransitKind::Unconfirmed => &*message.method,
            TransitKind::Probe(_) => "GET",
            TransitKind::Close => "DELETE",
        };
        let (silent, unknown) = self
            .endpoint
            .with_behavior(|behavior| (behavior.is_silent_on(method), behavior.unknown_methods.contains(method)));
        match what {
            // A client waits for the confirmation of the end of a session for a limited time only.
            TransitKind::Close if silent => {
                let at = now + self.spec.policy.remote.close_timeout;
                self.schedule(at, TransitMessage { kind: TransitKind::Unconfirmed, body, failure: None });
            }
            _ if silent => {}
            TransitKind::Close => {
                if let Some(number) = self.session.take().and_then(|session| session.number) {
                    self.endpoint.close_session(number);
                }
                self.inbox.push_back(LineEvent::Closed);
            }
            TransitKind::Probe(id) => {
                if self.remove_exchange(now, id, true) {
                    self.inbox.push_back(LineEvent::Probed { id });
                }
            }
            TransitKind::Request(id) | TransitKind::Stateless(id) if unknown => {
                let number = RawValue::from_string(id.to_string());
                let number = number.as_deref().unwrap_or(RawValue::NULL);
                let mut answer = BytesMut::new();
                put_answer(&mut answer, number, |line| {
                    put_error(line, METHOD_NOT_FOUND, &format!("method not found: {method}"));
                });
                self.handle_output(now, answer.trim_ascii_end());
            }
            TransitKind::Request(_) if method == method::INITIALIZE => {
                let server = self.new_server(now);
                self.session = Some(SimSession { number: None, server });
                self.deliver_to_session(now, &what, body);
            }
            TransitKind::Stateless(_) => {
                // A refused handshake leaves no session.
                self.session.take_if(|session| session.number.is_none());
                // Another script is another server at the same address, without the state of the first one.
                let script = self.current_script();
                if self.stateless_server.as_ref().is_none_or(|server| !Arc::ptr_eq(&server.script, &script)) {
                    self.stateless_server = Some(self.new_server(now));
                }
                self.record_delivery(now, DeliveryProgress::Served, &what, &body);
                if let Some(server) = self.stateless_server.as_mut().filter(|server| server.phase == SimPhase::Serving)
                {
                    server.handle_line(now, &body);
                }
                self.serve(now);
            }
            TransitKind::Request(_)
            | TransitKind::Initialized
            | TransitKind::Notification
            | TransitKind::Queued
            | TransitKind::Unconfirmed => {
                self.deliver_to_session(now, &what, body);
            }
        }
    }

    fn current_script(&self) -> Arc<SimScript> {
        self.endpoint.with_behavior(|behavior| behavior.script.clone()).unwrap_or_else(|| Arc::clone(&self.script))
    }

    fn new_server(&self, now: Instant) -> SimResponder {
        SimResponder::new(self.current_script(), EnvSource::Spec(Arc::clone(&self.spec)), self.run, now)
    }

    fn refusal(&self, what: &TransitKind, body: &[u8]) -> Option<FailureKind> {
        let session = self.session.as_ref().and_then(|session| session.number);
        let is_handshake = ParsedMessage::parse(body).method == method::INITIALIZE;
        match what {
            TransitKind::Probe(_) => {
                let unhealthy = self.endpoint.with_behavior(|behavior| behavior.health_failure.clone());
                self.endpoint.refusal_for(&self.spec, None).or(unhealthy)
            }
            TransitKind::Request(_) if is_handshake => self.endpoint.refusal_for(&self.spec, None),
            // For a server with sessions, the request lacks a session id.
            TransitKind::Stateless(_) => {
                let message = Some("no session id".to_owned());
                let is_without_sessions = self.current_script().speaks == SpokenEras::Sessions;
                let refused = is_without_sessions.then_some(FailureKind::Status { status: 400, message });
                self.endpoint.refusal_for(&self.spec, None).or(refused)
            }
            // Only a handshake creates a session, and all other messages need one.
            TransitKind::Request(_) | TransitKind::Initialized | TransitKind::Notification if session.is_none() => {
                self.endpoint.refusal_for(&self.spec, None).or(Some(FailureKind::from_status(400)))
            }
            TransitKind::Request(_) | TransitKind::Initialized | TransitKind::Notification | TransitKind::Close => {
                self.endpoint.refusal_for(&self.spec, session)
            }
            TransitKind::Queued | TransitKind::Unconfirmed => None,
        }
    }

    fn fail_delivery(&mut self, now: Instant, what: &TransitKind, kind: FailureKind) {
        let is_busy = matches!(
            kind,
            FailureKind::Throttled { .. } | FailureKind::ServerError { .. } | FailureKind::Status { .. }
        );
        match what {
            TransitKind::Request(id) | TransitKind::Stateless(id) | TransitKind::Probe(id) => {
                self.fail_exchange(now, *id, kind);
            }
            // A busy server misses notifications, which has no effect on the session.
            TransitKind::Notification if is_busy => {}
            TransitKind::Notification | TransitKind::Initialized => {
                self.inbox.push_back(LineEvent::Lost(failure(kind)));
            }
            TransitKind::Close => self.inbox.push_back(LineEvent::Closed),
            TransitKind::Queued | TransitKind::Unconfirmed => {}
        }
    }

    fn deliver_to_session(&mut self, now: Instant, what: &TransitKind, body: Bytes) {
        self.record_delivery(now, DeliveryProgress::Served, what, &body);
        let Some(session) = &mut self.session else { return };
        match session.server.phase {
            SimPhase::Serving => session.server.handle_line(now, &body),
            SimPhase::Starting => {
                let at = session.server.next_timer().unwrap_or(now);
                self.schedule(at, TransitMessage { kind: TransitKind::Queued, body, failure: None });
            }
            SimPhase::Hung | SimPhase::Ended(_) => {}
        }
        self.serve(now);
    }

    fn serve(&mut self, now: Instant) {
        self.serve_stateless(now);
        let Some(session) = &mut self.session else { return };
        session.server.run_due_timers(now);
        // Output on stderr is dropped.
        session.server.err.clear();
        let output = mem::take(&mut session.server.out).freeze();
        let has_ended = matches!(session.server.phase, SimPhase::Ended(_));
        for line in output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            self.handle_output(now, line);
        }
        if let Some(session) = self.session.as_mut().filter(|_| has_ended) {
            // Its operator restarts the process, which then has no sessions.
            session.server.phase = SimPhase::Hung;
            let _ = session.number.inspect(|number| self.endpoint.forget_session(*number));
            self.cut(now);
        }
    }

    fn serve_stateless(&mut self, now: Instant) {
        let Some(server) = &mut self.stateless_server else { return };
        server.run_due_timers(now);
        server.err.clear();
        let output = mem::take(&mut server.out).freeze();
        if matches!(server.phase, SimPhase::Ended(_)) {
            self.stateless_server = None;
            self.cut(now);
        }
        for line in output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match stream_of(line) {
                // A message on the way belongs to the stream of an open request; otherwise it is dropped.
                Some(id) if self.open_exchanges.contains_key(&id) => {
                    let message = Bytes::copy_from_slice(line);
                    self.inbox.push_back(LineEvent::Message { message, request: Some(id) });
                }
                Some(_) => {}
                None => self.handle_output(now, line),
            }
        }
    }

    fn handle_output(&mut self, now: Instant, line: &[u8]) {
        let message = ParsedMessage::parse(line);
        if !message.method.is_empty() {
            let message = Bytes::copy_from_slice(line);
            return self.inbox.push_back(LineEvent::Message { message, request: None });
        }
        // Not JSON-RPC, or an answer to a request that was given up.
        let Some(id) = message.id.filter(|id| self.open_exchanges.contains_key(id)) else { return };
        let limit = self.spec.policy.session.line_max;
        if line.len() > limit {
            return self.fail_exchange(now, id, FailureKind::TooLong(limit));
        }
        let is_attempt =
            self.open_exchanges.get(&id).is_some_and(|exchange| exchange.attempt.is_some() && !exchange.stateless);
        let succeeded = !message.is_error;
        if is_attempt
            && succeeded
            && let Some(session) = &mut self.session
        {
            session.number = Some(self.endpoint.open_session());
        }
        self.remove_exchange(now, id, succeeded);
        self.inbox.push_back(LineEvent::Message { message: Bytes::copy_from_slice(line), request: Some(id) });
    }

    /// Ends an exchange. Without a session this cancels the request.
    fn cancel_if_stateless(&mut self, now: Instant, id: u64) {
        let is_alone = self.open_exchanges.get(&id).is_some_and(|exchange| exchange.stateless);
        if let Some(server) = self.stateless_server.as_mut().filter(|_| is_alone) {
            let words =
                format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
            server.handle_line(now, words.as_bytes());
        }
    }

    fn fail_exchange(&mut self, now: Instant, id: u64, kind: FailureKind) {
        self.cancel_if_stateless(now, id);
        if self.remove_exchange(now, id, false) {
            self.inbox.push_back(LineEvent::Failed { id, failure: failure(kind) });
        }
    }

    /// Removes an open exchange. Returns false if it was removed before.
    fn remove_exchange(&mut self, now: Instant, id: u64, succeeded: bool) -> bool {
        let Some(exchange) = self.open_exchanges.remove(&id) else { return false };
        if let Some(attempt) = exchange.attempt {
            self.endpoint.end_attempt(attempt, succeeded, now);
        }
        true
    }

    /// Breaks every connection. Messages that will fail to connect have none and are not affected.
    fn cut(&mut self, now: Instant) {
        self.connected = false;
        let whole = mem::take(&mut self.in_transit);
        let (failing, cut): (BTreeMap<_, _>, BTreeMap<_, _>) =
            whole.into_iter().partition(|(_, letter)| letter.failure.is_some());
        self.in_transit = failing;
        let failing = self.in_transit.values().filter_map(|letter| match letter.kind {
            TransitKind::Request(id) | TransitKind::Stateless(id) | TransitKind::Probe(id) => Some(id),
            TransitKind::Initialized
            | TransitKind::Notification
            | TransitKind::Close
            | TransitKind::Queued
            | TransitKind::Unconfirmed => None,
        });
        let failing: Vec<u64> = failing.collect();
        let broken: Vec<u64> = self.open_exchanges.keys().copied().filter(|id| !failing.contains(id)).collect();
        for id in broken {
            self.fail_exchange(now, id, FailureKind::Cut);
        }
        for letter in cut.into_values() {
            self.fail_delivery(now, &letter.kind, FailureKind::Cut);
        }
        // The older transport has one stream for all messages, and the session ends with it.
        let is_sse = matches!(self.spec.target, ServerTarget::Remote { transport: RemoteTransport::Sse, .. });
        if is_sse && self.session.as_ref().is_some_and(|session| session.number.is_some()) {
            self.inbox.push_back(LineEvent::Lost(failure(FailureKind::Cut)));
        }
    }
}

impl ServerLine for SimLine {
    fn send(&mut self, message: LineOutput) {
        let now = Instant::now();
        // Events before the time of sending are processed first.
        self.advance(now);
        match message {
            LineOutput::Request { id, body, header_timeout, routing } => {
                let opening = ParsedMessage::parse(&body).method;
                let is_handshake =
                    opening == method::INITIALIZE || (opening == method::DISCOVER && header_timeout.is_some());
                drop(opening);
                let attempt = is_handshake.then(|| self.endpoint.begin_attempt(self.run, now));
                self.open_exchange(now, id, header_timeout, attempt, routing.is_some());
                self.post(
                    now,
                    if routing.is_some() { TransitKind::Stateless(id) } else { TransitKind::Request(id) },
                    body,
                );
            }
            LineOutput::Probe { id } => {
                self.open_exchange(now, id, None, None, false);
                self.post(now, TransitKind::Probe(id), Bytes::new());
            }
            LineOutput::Notification { body } | LineOutput::Response { body } => {
                self.post(now, TransitKind::Notification, body);
            }
            LineOutput::Initialized { body, .. } => self.post(now, TransitKind::Initialized, body),
            LineOutput::Abandon { id } => {
                self.cancel_if_stateless(now, id);
                self.remove_exchange(now, id, false);
            }
            LineOutput::Credentials(spec) => self.spec = spec,
            LineOutput::Close if self.session.is_none() => self.inbox.push_back(LineEvent::Closed),
            LineOutput::Close => self.post(now, TransitKind::Close, Bytes::new()),
        }
        // Messages without transit time have arrived.
        self.advance(now);
        self.endpoint.wake(self.number);
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<LineEvent> {
        self.endpoint.register(self.number, cx.waker());
        loop {
            self.advance(Instant::now());
            if let Some(incoming) = self.inbox.pop_front() {
                return Poll::Ready(incoming);
            }
            let Some(next) = self.next_wakeup() else {
                self.timer = None;
                return Poll::Pending;
            };
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(next)));
            if timer.deadline() != next {
                timer.as_mut().reset(next);
            }
            ready!(timer.as_mut().poll(cx));
        }
    }
}

impl Drop for SimLine {
    fn drop(&mut self) {
        let now = Instant::now();
        let open: Vec<u64> = self.open_exchanges.keys().copied().collect();
        for id in open {
            self.remove_exchange(now, id, false);
        }
        self.endpoint.remove_line(self.number, self.session.as_ref().and_then(|session| session.number));
    }
}

#[derive(Default)]
struct ParsedMessage<'a> {
    id: Option<u64>,
    method: Cow<'a, str>,
    tool: Option<Cow<'a, str>>,
    is_error: bool,
}

/// Returns the request on whose stream a server without sessions sends a notification.
fn stream_of(line: &[u8]) -> Option<u64> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct StreamedMessage<'a> {
        #[serde(borrow)]
        params: Option<StreamParams<'a>>,
    }
    #[derive(Deserialize)]
    struct StreamParams<'a> {
        #[serde(borrow, rename = "progressToken")]
        token: Option<&'a RawValue>,
        #[serde(borrow, rename = "_meta")]
        meta: Option<SubscriptionMeta<'a>>,
    }
    #[derive(Deserialize)]
    struct SubscriptionMeta<'a> {
        #[serde(borrow, rename = "io.modelcontextprotocol/subscriptionId")]
        to: Option<&'a RawValue>,
    }
    let about = serde_json::from_slice::<StreamedMessage<'_>>(line).ok()?.params?;
    about.token.or_else(|| about.meta?.to)?.get().parse().ok()
}

#[derive(Deserialize)]
struct ErrorField<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

impl<'a> ParsedMessage<'a> {
    fn parse(body: &'a [u8]) -> Self {
        let Ok(message) = serde_json::from_slice::<WireMessage<'_>>(body) else { return Self::default() };
        let method = message.method.map(|method| method.0).unwrap_or_default();
        let call = (method == method::TOOLS_CALL).then(|| parse::<CallParams<'_>>(message.params).ok()).flatten();
        let refusal = method.is_empty().then(|| serde_json::from_slice::<ErrorField<'_>>(body).ok()).flatten();
        Self {
            id: message.id.and_then(|id| id.get().parse().ok()),
            method,
            tool: call.map(|call| call.name),
            is_error: refusal.is_some_and(|refusal| refusal.error.is_some()),
        }
    }

    fn name(&self) -> Cow<'_, str> {
        match &self.tool {
            Some(tool) => format!("{} {tool}", self.method).into(),
            None => self.method.as_ref().into(),
        }
    }
}
