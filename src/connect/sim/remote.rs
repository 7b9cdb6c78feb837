//! A [`Line`] to a simulated endpoint, in place of the connector for remote servers and without a network. It has no
//! task and one timer, so that thousands run in paused time. Each session is served by its own [`Server`].
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
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport, Target};
use mcp_satellite_actors::seam::{Incoming, Line, Outgoing};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, Sleep, sleep_until};

use super::endpoint::{Endpoint, News, Reach, failure};
use super::script::{Dice, Script, Speaks};
use super::server::{Env, Phase, Server};
use super::wire::{Call, METHOD_NOT_FOUND, Message, parse, put_answer, put_error};

pub(super) struct RemoteLine {
    endpoint: Arc<Endpoint>,
    number: u64,
    spec: Arc<InstanceSpec>,
    run: Run,
    // Script of its sessions, unless the endpoint sets another.
    script: Arc<Script>,
    dice: Dice,
    connected: bool,
    session: Option<Session>,
    // Server of requests without a session, created by the first one.
    alone: Option<Server>,
    inbox: VecDeque<Incoming>,
    // Requests and probes that are neither answered nor abandoned.
    open: BTreeMap<u64, Exchange>,
    // Messages in transit, by arrival time and order of sending.
    travelling: BTreeMap<(Instant, u64), Letter>,
    sent: u64,
    // Earliest arrival of later messages: none overtakes `notifications/initialized`.
    not_before: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// A session. It has no number until its handshake was answered.
struct Session {
    number: Option<u64>,
    server: Server,
}

struct Exchange {
    // Time by which the response must begin, and the timeout that led to it.
    deadline: Option<(Instant, Duration)>,
    // Number of the handshake attempt, if it is one.
    attempt: Option<usize>,
    alone: bool,
}

struct Letter {
    what: What,
    body: Bytes,
    fails: Option<FailureKind>,
}

enum What {
    Request(u64),
    Alone(u64),
    Probe(u64),
    Initialized,
    Notification,
    Close,
    /// The endpoint has received the message, and its server has not started yet.
    Queued,
    Unconfirmed,
}

impl RemoteLine {
    pub(super) fn new(endpoint: Arc<Endpoint>, spec: Arc<InstanceSpec>, run: Run, script: Arc<Script>) -> Self {
        let seed = endpoint.manner(|manner| manner.seed);
        Self {
            number: endpoint.enter(),
            endpoint,
            spec,
            run,
            script,
            dice: Dice::new(seed, run),
            connected: false,
            session: None,
            alone: None,
            inbox: VecDeque::new(),
            open: BTreeMap::new(),
            travelling: BTreeMap::new(),
            sent: 0,
            not_before: None,
            timer: None,
        }
    }

    fn ask(&mut self, now: Instant, id: u64, header_timeout: Option<Duration>, attempt: Option<usize>, alone: bool) {
        let deadline = header_timeout.map(|after| (now + after, after));
        self.open.insert(id, Exchange { deadline, attempt, alone });
    }

    fn post(&mut self, now: Instant, what: What, body: Bytes) {
        self.note(now, Reach::Tried, &what, &body);
        let mut fails = self.endpoint.fails(matches!(what, What::Request(_) | What::Alone(_) | What::Probe(_)));
        let takes = match &fails {
            Some(FailureKind::ConnectTimeout(after) | FailureKind::HeaderTimeout(after)) => *after,
            _ => self.travel(&mut fails),
        };
        let takes = match what {
            What::Close => takes.min(self.spec.policy.remote.close_timeout),
            What::Request(_)
            | What::Alone(_)
            | What::Probe(_)
            | What::Initialized
            | What::Notification
            | What::Queued
            | What::Unconfirmed => takes,
        };
        let at = self.not_before.map_or(now + takes, |not_before| not_before.max(now + takes));
        if matches!(what, What::Initialized) {
            self.not_before = Some(at);
        }
        self.put(at, Letter { what, body, fails });
    }

    /// Returns the transit time, or the connect timeout if connecting takes longer.
    fn travel(&mut self, fails: &mut Option<FailureKind>) -> Duration {
        let (connect, delay, jitter) =
            self.endpoint.manner(|manner| (manner.connect_delay, manner.delay, manner.jitter));
        let takes = self.dice.vary(delay, jitter);
        if self.connected {
            return takes;
        }
        let connect = self.dice.vary(connect, jitter);
        let limit = self.spec.policy.remote.connect_timeout;
        if connect > limit {
            *fails = Some(FailureKind::ConnectTimeout(limit));
            return limit;
        }
        self.connected = fails.is_none();
        takes + connect
    }

    fn put(&mut self, at: Instant, letter: Letter) {
        self.sent += 1;
        self.travelling.insert((at, self.sent), letter);
    }

    fn note(&self, now: Instant, reach: Reach, what: &What, body: &[u8]) {
        let message = Parsed::of(body);
        let what = match what {
            What::Request(_) | What::Alone(_) | What::Initialized | What::Notification => message.name(),
            What::Probe(_) => "GET".into(),
            What::Close => "DELETE".into(),
            What::Queued | What::Unconfirmed => return,
        };
        self.endpoint.note(now, reach, &what);
    }

    fn advance(&mut self, now: Instant) {
        for news in self.endpoint.news(self.number) {
            match news {
                News::Cut => self.cut(now),
                News::Lost(kind) => self.inbox.push_back(Incoming::Lost(failure(kind))),
                News::Said(message) => self.inbox.push_back(Incoming::Message { message, of: None }),
            }
        }
        while let Some(first) = self.travelling.first_entry()
            && first.key().0 <= now
        {
            let letter = first.remove();
            self.arrived(now, letter);
        }
        self.serve(now);
        let is_late = |exchange: &Exchange| exchange.deadline.filter(|(deadline, _)| *deadline <= now);
        let late: Vec<_> = self.open.iter().filter_map(|(id, open)| Some((*id, is_late(open)?.1))).collect();
        for (id, after) in late {
            self.failed(now, id, FailureKind::HeaderTimeout(after));
        }
    }

    fn next(&self) -> Option<Instant> {
        let arrival = self.travelling.keys().next().map(|(at, _)| *at);
        let servers = self.session.as_ref().map(|session| &session.server).into_iter().chain(&self.alone);
        let answer = servers.filter_map(|server| match server.phase {
            Phase::Starting | Phase::Serving => server.next(),
            Phase::Hung | Phase::Ended(_) => None,
        });
        let late = self.open.values().filter_map(|exchange| exchange.deadline).map(|(deadline, _)| deadline);
        arrival.into_iter().chain(answer).chain(late).min()
    }

    fn arrived(&mut self, now: Instant, letter: Letter) {
        let Letter { what, body, fails } = letter;
        match what {
            What::Queued => return self.hand_over(now, &what, body),
            What::Unconfirmed => return self.inbox.push_back(Incoming::Closed),
            What::Request(_)
            | What::Alone(_)
            | What::Probe(_)
            | What::Initialized
            | What::Notification
            | What::Close => {}
        }
        let got_there = fails.as_ref().is_none_or(|kind| failure(kind.clone()).sent);
        if got_there {
            self.note(now, Reach::Received, &what, &body);
        }
        if let Some(kind) = fails.or_else(|| self.refused(&what, &body)) {
            return self.undelivered(now, &what, kind);
        }
        let message = Parsed::of(&body);
        let method = match what {
            What::Request(_)
            | What::Alone(_)
            | What::Initialized
            | What::Notification
            | What::Queued
            | What::Unconfirmed => &*message.method,
            What::Probe(_) => "GET",
            What::Close => "DELETE",
        };
        let (silent, unknown) =
            self.endpoint.manner(|manner| (manner.is_silent_on(method), manner.unknown.contains(method)));
        match what {
            // A client waits for the confirmation of the end of a session for a limited time only.
            What::Close if silent => {
                let at = now + self.spec.policy.remote.close_timeout;
                self.put(at, Letter { what: What::Unconfirmed, body, fails: None });
            }
            _ if silent => {}
            What::Close => {
                if let Some(number) = self.session.take().and_then(|session| session.number) {
                    self.endpoint.session_closed(number);
                }
                self.inbox.push_back(Incoming::Closed);
            }
            What::Probe(id) => {
                if self.settle(now, id, true) {
                    self.inbox.push_back(Incoming::Probed { id });
                }
            }
            What::Request(id) | What::Alone(id) if unknown => {
                let number = RawValue::from_string(id.to_string());
                let number = number.as_deref().unwrap_or(RawValue::NULL);
                let mut answer = BytesMut::new();
                put_answer(&mut answer, number, |line| {
                    put_error(line, METHOD_NOT_FOUND, &format!("method not found: {method}"));
                });
                self.said(now, answer.trim_ascii_end());
            }
            What::Request(_) if method == "initialize" => {
                let server = self.server(now);
                self.session = Some(Session { number: None, server });
                self.hand_over(now, &what, body);
            }
            What::Alone(_) => {
                // A refused handshake leaves no session.
                self.session.take_if(|session| session.number.is_none());
                // Another script is another server at the same address, without the state of the first one.
                let script = self.served_by();
                if self.alone.as_ref().is_none_or(|server| !Arc::ptr_eq(&server.script, &script)) {
                    self.alone = Some(self.server(now));
                }
                self.note(now, Reach::Served, &what, &body);
                if let Some(server) = self.alone.as_mut().filter(|server| server.phase == Phase::Serving) {
                    server.line(now, &body);
                }
                self.serve(now);
            }
            What::Request(_) | What::Initialized | What::Notification | What::Queued | What::Unconfirmed => {
                self.hand_over(now, &what, body);
            }
        }
    }

    fn served_by(&self) -> Arc<Script> {
        self.endpoint.manner(|manner| manner.script.clone()).unwrap_or_else(|| Arc::clone(&self.script))
    }

    fn server(&self, now: Instant) -> Server {
        Server::new(self.served_by(), Env::Spec(Arc::clone(&self.spec)), self.run, now)
    }

    fn refused(&self, what: &What, body: &[u8]) -> Option<FailureKind> {
        let session = self.session.as_ref().and_then(|session| session.number);
        let is_handshake = Parsed::of(body).method == "initialize";
        match what {
            What::Probe(_) => {
                let unhealthy = self.endpoint.manner(|manner| manner.unhealthy.clone());
                self.endpoint.refuses(&self.spec, None).or(unhealthy)
            }
            What::Request(_) if is_handshake => self.endpoint.refuses(&self.spec, None),
            // For a server with sessions, the request lacks a session id.
            What::Alone(_) => {
                let said = Some("no session id".to_owned());
                let knows_none = self.served_by().speaks == Speaks::Sessions;
                let refused = knows_none.then_some(FailureKind::Status { status: 400, said });
                self.endpoint.refuses(&self.spec, None).or(refused)
            }
            // Only a handshake creates a session, and all other messages need one.
            What::Request(_) | What::Initialized | What::Notification if session.is_none() => {
                self.endpoint.refuses(&self.spec, None).or(Some(FailureKind::status(400)))
            }
            What::Request(_) | What::Initialized | What::Notification | What::Close => {
                self.endpoint.refuses(&self.spec, session)
            }
            What::Queued | What::Unconfirmed => None,
        }
    }

    fn undelivered(&mut self, now: Instant, what: &What, kind: FailureKind) {
        let is_busy = matches!(
            kind,
            FailureKind::Throttled { .. } | FailureKind::ServerError { .. } | FailureKind::Status { .. }
        );
        match what {
            What::Request(id) | What::Alone(id) | What::Probe(id) => self.failed(now, *id, kind),
            // A busy server misses notifications, which has no effect on the session.
            What::Notification if is_busy => {}
            What::Notification | What::Initialized => self.inbox.push_back(Incoming::Lost(failure(kind))),
            What::Close => self.inbox.push_back(Incoming::Closed),
            What::Queued | What::Unconfirmed => {}
        }
    }

    fn hand_over(&mut self, now: Instant, what: &What, body: Bytes) {
        self.note(now, Reach::Served, what, &body);
        let Some(session) = &mut self.session else { return };
        match session.server.phase {
            Phase::Serving => session.server.line(now, &body),
            Phase::Starting => {
                let at = session.server.next().unwrap_or(now);
                self.put(at, Letter { what: What::Queued, body, fails: None });
            }
            Phase::Hung | Phase::Ended(_) => {}
        }
        self.serve(now);
    }

    fn serve(&mut self, now: Instant) {
        self.serve_alone(now);
        let Some(session) = &mut self.session else { return };
        session.server.due(now);
        // Output on stderr is dropped.
        session.server.err.clear();
        let said = mem::take(&mut session.server.out).freeze();
        let has_ended = matches!(session.server.phase, Phase::Ended(_));
        for line in said.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            self.said(now, line);
        }
        if let Some(session) = self.session.as_mut().filter(|_| has_ended) {
            // Its operator restarts the process, which then has no sessions.
            session.server.phase = Phase::Hung;
            let _ = session.number.inspect(|number| self.endpoint.session_forgotten(*number));
            self.cut(now);
        }
    }

    fn serve_alone(&mut self, now: Instant) {
        let Some(server) = &mut self.alone else { return };
        server.due(now);
        server.err.clear();
        let said = mem::take(&mut server.out).freeze();
        if matches!(server.phase, Phase::Ended(_)) {
            self.alone = None;
            self.cut(now);
        }
        for line in said.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match stream_of(line) {
                // A message on the way belongs to the stream of an open request; otherwise it is dropped.
                Some(id) if self.open.contains_key(&id) => {
                    let message = Bytes::copy_from_slice(line);
                    self.inbox.push_back(Incoming::Message { message, of: Some(id) });
                }
                Some(_) => {}
                None => self.said(now, line),
            }
        }
    }

    fn said(&mut self, now: Instant, line: &[u8]) {
        let message = Parsed::of(line);
        if !message.method.is_empty() {
            let message = Bytes::copy_from_slice(line);
            return self.inbox.push_back(Incoming::Message { message, of: None });
        }
        // Not JSON-RPC, or an answer to a request that was given up.
        let Some(id) = message.id.filter(|id| self.open.contains_key(id)) else { return };
        let limit = self.spec.policy.session.line_max;
        if line.len() > limit {
            return self.failed(now, id, FailureKind::TooLong(limit));
        }
        let is_attempt = self.open.get(&id).is_some_and(|exchange| exchange.attempt.is_some() && !exchange.alone);
        let succeeded = !message.is_error;
        if is_attempt
            && succeeded
            && let Some(session) = &mut self.session
        {
            session.number = Some(self.endpoint.session_opened());
        }
        self.settle(now, id, succeeded);
        self.inbox.push_back(Incoming::Message { message: Bytes::copy_from_slice(line), of: Some(id) });
    }

    /// Ends an exchange. Without a session this cancels the request.
    fn closed(&mut self, now: Instant, id: u64) {
        let is_alone = self.open.get(&id).is_some_and(|exchange| exchange.alone);
        if let Some(server) = self.alone.as_mut().filter(|_| is_alone) {
            let words =
                format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#);
            server.line(now, words.as_bytes());
        }
    }

    fn failed(&mut self, now: Instant, id: u64, kind: FailureKind) {
        self.closed(now, id);
        if self.settle(now, id, false) {
            self.inbox.push_back(Incoming::Failed { id, failure: failure(kind) });
        }
    }

    /// Removes an open exchange. Returns false if it was removed before.
    fn settle(&mut self, now: Instant, id: u64, succeeded: bool) -> bool {
        let Some(exchange) = self.open.remove(&id) else { return false };
        if let Some(attempt) = exchange.attempt {
            self.endpoint.attempt_ended(attempt, succeeded, now);
        }
        true
    }

    /// Breaks every connection. Messages that will fail to connect have none and are not affected.
    fn cut(&mut self, now: Instant) {
        self.connected = false;
        let whole = mem::take(&mut self.travelling);
        let (failing, cut): (BTreeMap<_, _>, BTreeMap<_, _>) =
            whole.into_iter().partition(|(_, letter)| letter.fails.is_some());
        self.travelling = failing;
        let failing = self.travelling.values().filter_map(|letter| match letter.what {
            What::Request(id) | What::Alone(id) | What::Probe(id) => Some(id),
            What::Initialized | What::Notification | What::Close | What::Queued | What::Unconfirmed => None,
        });
        let failing: Vec<u64> = failing.collect();
        let broken: Vec<u64> = self.open.keys().copied().filter(|id| !failing.contains(id)).collect();
        for id in broken {
            self.failed(now, id, FailureKind::Cut);
        }
        for letter in cut.into_values() {
            self.undelivered(now, &letter.what, FailureKind::Cut);
        }
        // The older transport has one stream for all messages, and the session ends with it.
        let is_sse = matches!(self.spec.target, Target::Remote { transport: RemoteTransport::Sse, .. });
        if is_sse && self.session.as_ref().is_some_and(|session| session.number.is_some()) {
            self.inbox.push_back(Incoming::Lost(failure(FailureKind::Cut)));
        }
    }
}

impl Line for RemoteLine {
    fn send(&mut self, message: Outgoing) {
        let now = Instant::now();
        // Events before the time of sending are processed first.
        self.advance(now);
        match message {
            Outgoing::Request { id, body, header_timeout, routing } => {
                let opening = Parsed::of(&body).method;
                let is_handshake =
                    opening == "initialize" || (opening == "server/discover" && header_timeout.is_some());
                drop(opening);
                let attempt = is_handshake.then(|| self.endpoint.attempt_began(self.run, now));
                self.ask(now, id, header_timeout, attempt, routing.is_some());
                self.post(now, if routing.is_some() { What::Alone(id) } else { What::Request(id) }, body);
            }
            Outgoing::Probe { id } => {
                self.ask(now, id, None, None, false);
                self.post(now, What::Probe(id), Bytes::new());
            }
            Outgoing::Notification { body } | Outgoing::Response { body } => self.post(now, What::Notification, body),
            Outgoing::Initialized { body, .. } => self.post(now, What::Initialized, body),
            Outgoing::Abandon { id } => {
                self.closed(now, id);
                self.settle(now, id, false);
            }
            Outgoing::Credentials(spec) => self.spec = spec,
            Outgoing::Close if self.session.is_none() => self.inbox.push_back(Incoming::Closed),
            Outgoing::Close => self.post(now, What::Close, Bytes::new()),
        }
        // Messages without transit time have arrived.
        self.advance(now);
        self.endpoint.wake(self.number);
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        self.endpoint.register(self.number, cx.waker());
        loop {
            self.advance(Instant::now());
            if let Some(incoming) = self.inbox.pop_front() {
                return Poll::Ready(incoming);
            }
            let Some(next) = self.next() else {
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

impl Drop for RemoteLine {
    fn drop(&mut self) {
        let now = Instant::now();
        let open: Vec<u64> = self.open.keys().copied().collect();
        for id in open {
            self.settle(now, id, false);
        }
        self.endpoint.leave(self.number, self.session.as_ref().and_then(|session| session.number));
    }
}

#[derive(Default)]
struct Parsed<'a> {
    id: Option<u64>,
    method: Cow<'a, str>,
    tool: Option<Cow<'a, str>>,
    is_error: bool,
}

/// Returns the request on whose stream a server without sessions sends a notification.
fn stream_of(line: &[u8]) -> Option<u64> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Said<'a> {
        #[serde(borrow)]
        params: Option<About<'a>>,
    }
    #[derive(Deserialize)]
    struct About<'a> {
        #[serde(borrow, rename = "progressToken")]
        token: Option<&'a RawValue>,
        #[serde(borrow, rename = "_meta")]
        meta: Option<Subscribed<'a>>,
    }
    #[derive(Deserialize)]
    struct Subscribed<'a> {
        #[serde(borrow, rename = "io.modelcontextprotocol/subscriptionId")]
        to: Option<&'a RawValue>,
    }
    let about = serde_json::from_slice::<Said<'_>>(line).ok()?.params?;
    about.token.or_else(|| about.meta?.to)?.get().parse().ok()
}

#[derive(Deserialize)]
struct Refusal<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

impl<'a> Parsed<'a> {
    fn of(body: &'a [u8]) -> Self {
        let Ok(message) = serde_json::from_slice::<Message<'_>>(body) else { return Self::default() };
        let method = message.method.map(|method| method.0).unwrap_or_default();
        let call = (method == "tools/call").then(|| parse::<Call<'_>>(message.params).ok()).flatten();
        let refusal = method.is_empty().then(|| serde_json::from_slice::<Refusal<'_>>(body).ok()).flatten();
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
