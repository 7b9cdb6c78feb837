//! The state of one client: its `initialize` data, its open calls, the questions that servers asked it, and its
//! streams. Every message to the client passes through here, so no message can reach another client.
//!
//! ```text
//!            say ──► the call's stream ──► the POST that it came on, or a GET that resumes it
//! server ─►          or the session's  ──► the GET
//!            ask ──► the same, under a number of ours ──► its answer ──► the server
//! ```

pub(super) mod stateless;

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use mcp_satellite_actors::audience::{ClientQuestion, SessionSource};
use mcp_satellite_actors::byte_budget::{ByteBudget, ByteShare};
use mcp_satellite_protocol::rpc::RpcMessage;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Duration, Instant, Sleep, sleep};
use tokio_util::sync::CancellationToken;

use super::access::{Permission, User};
use super::client_description::ClientDescription;
use super::endpoint_id::{EndpointId, EndpointPath};
use super::shared_session::McpLogLevel;
use super::stream::{
    EventStream, GUARANTEED_BYTES, ListenerId, SESSION_STREAM, SlowListener, StreamChoice, StreamItem, choose_stream,
};
use stateless::StatelessSubscription;

// SSE comment that keeps a silent connection open and detects a dead one.
const KEEP_ALIVE: Bytes = Bytes::from_static(b":\n\n");

pub const SESSION_ENDED: &str = "the session has ended";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionEnd {
    /// The client sent `DELETE`, or its stateless request ended.
    Closed,
    Idle,
    Age,
    /// The limit of sessions was reached and this one was idle longest.
    Evicted,
    Slow,
    Revoked,
    Removed,
    Drained,
}

impl SessionEnd {
    /// Returns the name used in events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Idle => "idle",
            Self::Age => "age",
            Self::Evicted => "evicted",
            Self::Slow => "slow",
            Self::Revoked => "revoked",
            Self::Removed => "removed",
            Self::Drained => "drained",
        }
    }
}

/// Time for which a client is known to the endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientLifetime {
    Session,
    Request {
        method: Box<str>,
        // Minimum level of log messages; `None` for none.
        level: Option<McpLogLevel>,
    },
    Listening {
        // Minimum level of the endpoint's own log messages; `None` for none.
        level: Option<McpLogLevel>,
    },
}

#[derive(Debug)]
pub struct SessionFacts {
    pub permission: Permission,
    pub endpoint: EndpointId,
    /// Name of the instance in the request path; empty for `/mcp`.
    pub name: Box<str>,
    pub client: ClientDescription,
    /// The negotiated protocol version.
    pub version: String,
    pub user_agent: Option<String>,
    pub lifetime: ClientLifetime,
}

impl SessionFacts {
    fn is_at(&self, path: EndpointPath<'_>) -> bool {
        match (path, &self.endpoint) {
            (EndpointPath::Instance(name), EndpointId::Instance(_) | EndpointId::Control) => *self.name == *name,
            (EndpointPath::Tools, EndpointId::Tools) | (EndpointPath::Flat, EndpointId::Flat) => true,
            (EndpointPath::Instance(_) | EndpointPath::Tools | EndpointPath::Flat, _) => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestIdInUse;

/// The session of one client. A stateless request has one of its own.
#[derive(Debug)]
pub struct ClientSession {
    number: u64,
    secret: [u8; 16],
    pub facts: SessionFacts,
    started_at: Instant,
    tool_calls: AtomicU64,
    end_token: CancellationToken,
    // Notified when a listener attaches or detaches, when a stream was read completely, and when a stateless session
    // gets a question.
    changed: Notify,
    budget: Arc<ByteBudget>,
    state: Mutex<SessionState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallEvent {
    Message,
    Ended,
}

#[derive(Debug)]
struct SessionState {
    ended: Option<SessionEnd>,
    active_at: Instant,
    session_stream: StreamReader,
    calls: BTreeMap<u64, OpenCall>,
    calls_made: u64,
    questions: HashMap<u64, SentQuestion>,
    questions_sent: u64,
    is_stateless: bool,
    progress_token: Option<Box<str>>,
    subscription: Option<StatelessSubscription>,
}

#[derive(Debug)]
struct StreamReader {
    stream: EventStream,
    waker: Option<Waker>,
    detached_at: Option<Instant>,
}

#[derive(Debug)]
struct OpenCall {
    // The client's own id, as JSON text.
    id: Arc<str>,
    cancel: Option<oneshot::Sender<RpcMessage>>,
    can_stream: bool,
    reader: StreamReader,
}

#[derive(Debug)]
struct SentQuestion {
    source: SessionSource,
    question: ClientQuestion,
    // The call that it belongs to: later messages about the question take the same stream.
    call: Option<u64>,
    // Stream and event number of the question. If that event is dropped, the client will never see the question.
    position: (u64, u64),
    // Bytes of a question to a stateless client. For other clients the stream counts them.
    _share: Option<ByteShare>,
}

impl StreamReader {
    fn new(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self { stream: EventStream::new(number, budget), waker: None, detached_at: None }
    }

    fn without_ids(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self { stream: EventStream::without_ids(number, budget), waker: None, detached_at: None }
    }

    fn append(&mut self, parts: &[&str]) -> Result<(), SlowListener> {
        self.stream.append(parts)?;
        self.wake();
        Ok(())
    }

    fn end(&mut self) {
        self.stream.end();
        self.wake();
    }

    fn register_waker(&mut self, context: &Context<'_>) {
        match &mut self.waker {
            Some(waker) => waker.clone_from(context.waker()),
            None => self.waker = Some(context.waker().clone()),
        }
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl SessionState {
    fn reader(&mut self, stream: u64) -> Option<&mut StreamReader> {
        if stream == SESSION_STREAM {
            return Some(&mut self.session_stream);
        }
        self.calls.get_mut(&stream).filter(|call| call.can_stream).map(|call| &mut call.reader)
    }

    fn choose_stream(&self, call: Option<u64>) -> u64 {
        if self.is_stateless {
            // A stateless request may consist of several rounds; only the last one can be open.
            let last = self.calls.iter().next_back();
            let open = last.filter(|(_, call)| call.can_stream && call.cancel.is_some());
            return open.map_or(SESSION_STREAM, |(number, _)| *number);
        }
        // The client no longer reads a call's stream after the answer.
        let can_stream = self.calls.iter().filter(|(_, call)| call.can_stream && call.cancel.is_some());
        let (read, unread): (Vec<_>, Vec<_>) =
            can_stream.partition(|(_, call)| call.reader.stream.has_or_expects_listener());
        let numbers = |calls: Vec<(&u64, &OpenCall)>| calls.into_iter().map(|(number, _)| *number).collect::<Vec<_>>();
        match choose_stream(call, &numbers(read), &numbers(unread), self.session_stream.stream.has_listener()) {
            StreamChoice::Call(call) => call,
            StreamChoice::Session => SESSION_STREAM,
        }
    }

    fn send(&mut self, call: Option<u64>, parts: &[&str]) -> Result<(), SlowListener> {
        self.send_on(self.choose_stream(call), parts)
    }

    fn send_on(&mut self, stream: u64, parts: &[&str]) -> Result<(), SlowListener> {
        // A stateless session has no stream apart from its calls.
        if self.ended.is_some() || self.is_stateless && stream == SESSION_STREAM {
            return Ok(());
        }
        let outcome = self.reader(stream).map_or(Ok(()), |reader| reader.append(parts));
        self.decline_dropped(stream);
        outcome
    }

    /// Sends or resends a question under `number`, which is also its progress token, so that the client's progress
    /// notifications can be matched.
    fn send_question(
        &mut self,
        number: u64,
        source: SessionSource,
        call: Option<u64>,
        question: ClientQuestion,
    ) -> Result<(), SlowListener> {
        let (stream, id, message) = (self.choose_stream(call), number.to_string(), question.message().clone());
        let event = self.reader(stream).map_or(0, |reader| reader.stream.next_number());
        self.questions.insert(number, SentQuestion { source, question, call, position: (stream, event), _share: None });
        self.send_on(stream, &message.with_id_and_token(&id, &id))
    }

    /// Removes the questions whose events were dropped from a stream. Dropping a question declines it.
    fn decline_dropped(&mut self, stream: u64) {
        let dropped = self.reader(stream).map_or(0..0, |reader| reader.stream.take_dropped());
        if !dropped.is_empty() {
            self.questions.retain(|_, sent| sent.position.0 != stream || !dropped.contains(&sent.position.1));
        }
    }

    /// Resends the questions from the stream of a closed call that was not read completely on another stream. If no
    /// stream has a reader, drops them, which declines them.
    fn resend_questions(&mut self, call: u64) -> Result<(), SlowListener> {
        let sent = self.questions.iter().filter(|(_, sent)| sent.position.0 == call);
        let mut numbers: Vec<u64> = sent.map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        let mut outcome = Ok(());
        for number in numbers {
            let Some(SentQuestion { source, question, call, .. }) = self.questions.remove(&number) else {
                continue;
            };
            let stream = self.choose_stream(call);
            if self.reader(stream).is_some_and(|reader| reader.stream.has_or_expects_listener()) {
                outcome = outcome.and(self.send_question(number, source, call, question));
            }
        }
        outcome
    }
}

impl ClientSession {
    pub fn new(number: u64, secret: [u8; 16], facts: SessionFacts, now: Instant, budget: Arc<ByteBudget>) -> Self {
        let state = SessionState {
            ended: None,
            active_at: now,
            session_stream: StreamReader::new(SESSION_STREAM, &budget),
            calls: BTreeMap::new(),
            calls_made: 0,
            questions: HashMap::new(),
            questions_sent: 0,
            is_stateless: facts.lifetime != ClientLifetime::Session,
            progress_token: None,
            subscription: None,
        };
        Self {
            number,
            secret,
            facts,
            started_at: now,
            tool_calls: AtomicU64::new(0),
            end_token: CancellationToken::new(),
            changed: Notify::new(),
            budget,
            state: Mutex::new(state),
        }
    }

    /// Returns the session's number: `client` of a [`CallOrigin`](mcp_satellite_actors::audience::CallOrigin).
    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn user(&self) -> &Arc<User> {
        &self.facts.permission.user
    }

    /// Returns the part of the id that is not secret, as 16 hex digits.
    pub fn public_id(&self) -> String {
        format!("{:016x}", self.number)
    }

    pub fn secret(&self) -> &[u8; 16] {
        &self.secret
    }

    /// Returns the complete id. It is a credential, together with the user's token.
    pub fn id(&self) -> String {
        format!("{:016x}{:032x}", self.number, u128::from_be_bytes(self.secret))
    }

    pub fn started_at(&self) -> Instant {
        self.started_at
    }

    pub fn count_tool_call(&self) {
        self.tool_calls.fetch_add(1, Ordering::Relaxed);
    }

    pub fn tool_call_count(&self) -> u64 {
        self.tool_calls.load(Ordering::Relaxed)
    }

    pub fn budget(&self) -> &Arc<ByteBudget> {
        &self.budget
    }

    pub fn end_token(&self) -> &CancellationToken {
        &self.end_token
    }

    pub fn end_reason(&self) -> Option<SessionEnd> {
        self.state().ended
    }

    fn state(&self) -> MutexGuard<'_, SessionState> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message, given in parts, to the client: on the stream of `call` if that is open and streams, else on a
    /// stream that has a reader. The message is buffered while there is no reader.
    pub fn send(&self, call: Option<u64>, parts: &[&str]) {
        let outcome = self.state().send(call, parts);
        self.end_if_slow(outcome);
    }

    /// Sends a server's question to the client. The question is declined if the session ends first or if its event is
    /// dropped before the client reads it.
    pub fn ask(&self, source: SessionSource, call: Option<u64>, question: ClientQuestion) {
        let mut state = self.state();
        if state.ended.is_some() {
            drop(state);
            return;
        }
        if state.is_stateless {
            let declined = state.store_question(source, question, self.budget.share());
            drop(state);
            self.changed.notify_waiters();
            // Dropping the question declines it; the lock is free again.
            drop(declined);
            return;
        }
        state.questions_sent += 1;
        let number = state.questions_sent;
        let outcome = state.send_question(number, source, call, question);
        drop(state);
        self.end_if_slow(outcome);
    }

    /// Withdraws a question that its server cancelled. `message` is the server's cancellation.
    pub fn cancel_question(&self, source: &SessionSource, question: u64, message: &RpcMessage) {
        let mut state = self.state();
        let is_it = |sent: &SentQuestion| sent.source == *source && sent.question.number() == question;
        let Some(number) = state.questions.iter().find(|(_, sent)| is_it(sent)).map(|(number, _)| *number) else {
            return;
        };
        let sent = state.questions.remove(&number);
        let call = sent.as_ref().and_then(|sent| sent.call);
        // A stateless session receives its questions only with the answer, so it has not seen this one.
        let outcome =
            if state.is_stateless { Ok(()) } else { state.send(call, &message.with_cancelled_id(&number.to_string())) };
        drop(state);
        drop(sent);
        self.end_if_slow(outcome);
    }

    /// Withdraws all questions of a server whose run ended, and notifies the client.
    pub fn cancel_questions(&self, source: &SessionSource) {
        let mut state = self.state();
        let abandoned_at = |sent: &SentQuestion| sent.source == *source;
        let numbers: Vec<u64> =
            state.questions.iter().filter(|(_, sent)| abandoned_at(sent)).map(|(number, _)| *number).collect();
        let mut outcome = Ok(());
        let mut dropped = Vec::with_capacity(numbers.len());
        for number in numbers {
            let Some(sent) = state.questions.remove(&number) else { continue };
            if state.is_stateless {
                dropped.push(sent);
                continue;
            }
            let number = number.to_string();
            let parts = [
                r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"#,
                &number,
                r#","reason":"the server ended"}}"#,
            ];
            outcome = outcome.and(state.send(sent.call, &parts));
            dropped.push(sent);
        }
        drop(state);
        drop(dropped);
        self.end_if_slow(outcome);
    }

    pub fn accept_answer(&self, message: RpcMessage) -> bool {
        let Some(number) = message.id().and_then(|id| id.parse().ok()) else { return false };
        let Some(sent) = self.state().questions.remove(&number) else { return false };
        sent.question.answer(message);
        true
    }

    /// Finds the open question for a progress token from the client. Returns the server that asked and that server's
    /// own token.
    pub fn find_question(&self, token: &str) -> Option<(SessionSource, String)> {
        let number: u64 = token.parse().ok()?;
        let state = self.state();
        let sent = state.questions.get(&number)?;
        Some((sent.source.clone(), sent.question.message().token()?.to_owned()))
    }

    /// Returns the number of open calls, plus one if the client reads the session's GET stream.
    pub fn open_count(&self) -> usize {
        let state = self.state();
        state.calls.len() + usize::from(state.session_stream.stream.has_listener())
    }

    pub fn idle_since(&self) -> Option<Instant> {
        let state = self.state();
        (state.calls.is_empty() && !state.session_stream.stream.has_listener()).then_some(state.active_at)
    }

    /// Records activity of the client. Returns false if the session has ended or belongs to another endpoint.
    pub fn record_activity(&self, path: EndpointPath<'_>, now: Instant) -> bool {
        if !self.facts.is_at(path) {
            return false;
        }
        let mut state = self.state();
        state.active_at = now;
        state.ended.is_none()
    }

    /// Returns the sort key for dropping buffers: clients without a reader first, then the longest inactive.
    pub fn drop_priority(&self) -> (bool, Instant) {
        let state = self.state();
        (state.session_stream.stream.has_listener(), state.active_at)
    }

    pub fn drop_buffered_events(&self) {
        let mut state = self.state();
        state.session_stream.stream.drop_buffered_events();
        state.decline_dropped(SESSION_STREAM);
    }

    pub fn lost_count(&self) -> u64 {
        self.state().session_stream.stream.lost_count()
    }

    pub fn open_call(
        &self,
        id: &Arc<str>,
        streams: bool,
    ) -> Result<(u64, oneshot::Receiver<RpcMessage>), RequestIdInUse> {
        let (cancel, cancellation) = oneshot::channel();
        let mut state = self.state();
        // An answered call no longer occupies its id, even if its stream is not read completely.
        if state.calls.values().any(|call| call.id == *id && call.cancel.is_some()) {
            return Err(RequestIdInUse);
        }
        state.calls_made += 1;
        let number = state.calls_made;
        let reader = if state.is_stateless {
            StreamReader::without_ids(number, &self.budget)
        } else {
            StreamReader::new(number, &self.budget)
        };
        state.calls.insert(number, OpenCall { id: id.clone(), cancel: Some(cancel), can_stream: streams, reader });
        Ok((number, cancellation))
    }

    pub fn cancel_call(&self, message: RpcMessage) -> bool {
        let cancel = {
            let mut state = self.state();
            let Some(id) = message.cancelled_id() else { return false };
            let open_call = state.calls.values_mut().find(|call| *call.id == *id && call.cancel.is_some());
            open_call.and_then(|call| call.cancel.take())
        };
        cancel.is_some_and(|cancel| cancel.send(message).is_ok())
    }

    pub async fn wait_for_event(&self, call: u64) -> CallEvent {
        poll_fn(|context| {
            let mut state = self.state();
            let is_ended = state.ended.is_some();
            match state.calls.get_mut(&call) {
                Some(open) if !is_ended => {
                    if open.reader.stream.has_unread() {
                        return Poll::Ready(CallEvent::Message);
                    }
                    open.reader.register_waker(context);
                    Poll::Pending
                }
                Some(_) | None => Poll::Ready(CallEvent::Ended),
            }
        })
        .await
    }

    /// Returns true if the answer is the first message of the call. From then on no message is sent on its stream.
    pub fn try_finish_without_stream(&self, call: u64) -> bool {
        let mut state = self.state();
        let Some(open) = state.calls.get_mut(&call) else { return true };
        let first = !open.reader.stream.has_unread();
        if first {
            open.cancel = None;
        }
        first
    }

    /// Ends the stream of a call, after its answer if there is one (`None` if the client cancelled the call).
    pub fn finish_call(&self, call: u64, answer: Option<&[&str]>) {
        let outcome = {
            let mut state = self.state();
            let Some(open) = state.calls.get_mut(&call) else { return };
            open.cancel = None;
            let outcome = answer.map_or(Ok(()), |parts| open.reader.append(parts));
            open.reader.end();
            outcome
        };
        self.end_if_slow(outcome);
    }

    pub fn close_call(&self, call: u64) {
        let mut state = self.state();
        // The last messages of an ended session still have to be read, unless its client reads too slowly.
        if state.ended.is_some_and(|reason| reason != SessionEnd::Slow) {
            return;
        }
        let Some(mut closed) = state.calls.remove(&call) else { return };
        state.active_at = Instant::now();
        let outcome = if closed.reader.stream.is_done() { Ok(()) } else { state.resend_questions(call) };
        drop(state);
        closed.reader.end();
        self.end_if_slow(outcome);
    }

    /// Waits until the stream of a call has no reader left: it was read completely, or its reader left and did not
    /// return within `grace` or cannot return.
    pub async fn wait_until_abandoned(&self, call: u64, grace: Duration) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let abandoned_at = {
                let mut state = self.state();
                let Some(reader) = state.reader(call) else { return };
                if reader.stream.is_done() {
                    return;
                }
                reader.detached_at.map(|at| if reader.stream.is_resumable() { at + grace } else { at })
            };
            match abandoned_at {
                None => changed.await,
                Some(until) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(until) => return,
                        () = changed => {}
                    }
                }
            }
        }
    }

    /// Attaches a listener to a stream. `after` is the last event that a returning client has; `keep_alive` is the
    /// longest silence on the connection. Returns `None` if the session has ended or there is no such stream.
    pub fn listen(self: &Arc<Self>, stream: u64, after: Option<u64>, keep_alive: Duration) -> Option<EventStreamBody> {
        let is_primed = self.needs_priming() && after.is_none();
        let (listener, first) = {
            let mut state = self.state();
            if state.ended.is_some() {
                return None;
            }
            let reader = state.reader(stream)?;
            let listener = reader.stream.attach(after);
            reader.detached_at = None;
            // Wakes the previous listener, which finds out that it was replaced.
            reader.wake();
            (listener, is_primed.then(|| reader.stream.priming_event()))
        };
        self.changed.notify_waiters();
        let (silent_since, wakes) = (Instant::now(), Box::pin(sleep(keep_alive)));
        Some(EventStreamBody { session: self.clone(), stream, listener, first, keep_alive, silent_since, timer: wakes })
    }

    /// Reports whether streams begin with a priming event. Clients of older versions fail at an event without data.
    fn needs_priming(&self) -> bool {
        self.facts.version.as_str() >= "2025-11-25" && !self.is_stateless()
    }

    /// Ends the session: declines the questions to its client and cancels its calls. Calls with a stream are answered
    /// with an error. Returns false if the session had ended already.
    pub fn end(&self, reason: SessionEnd) -> bool {
        let questions = {
            let mut state = self.state();
            if state.ended.is_some() {
                return false;
            }
            state.ended = Some(reason);
            state.session_stream.end();
            let last = state.final_answer();
            for call in state.calls.values_mut() {
                if call.can_stream && call.cancel.is_some() {
                    // The error means that the client reads too slowly, and the stream ends anyway.
                    let _ = last.with_parts(&call.id, |parts| call.reader.append(parts.unwrap_or_default()));
                }
                call.reader.end();
            }
            std::mem::take(&mut state.questions)
        };
        drop(questions);
        self.end_token.cancel();
        self.changed.notify_waiters();
        true
    }

    fn end_if_slow(&self, outcome: Result<(), SlowListener>) {
        if outcome == Err(SlowListener) {
            tracing::warn!(session_id = self.public_id(), "a client reads too slowly; its session ends");
            self.end(SessionEnd::Slow);
        }
    }
}

#[derive(Debug)]
pub struct EventStreamBody {
    session: Arc<ClientSession>,
    stream: u64,
    listener: ListenerId,
    first: Option<Bytes>,
    keep_alive: Duration,
    silent_since: Instant,
    timer: Pin<Box<Sleep>>,
}

impl futures::Stream for EventStreamBody {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let next = {
            let mut state = self.session.state();
            let Some(reader) = state.reader(self.stream) else { return Poll::Ready(None) };
            let next = reader.stream.take(self.listener);
            if next == StreamItem::Pending {
                reader.register_waker(context);
            }
            next
        };
        match next {
            StreamItem::Event(event) => {
                self.silent_since = Instant::now();
                Poll::Ready(Some(Ok(hold_until_written(&self.session.budget, event))))
            }
            StreamItem::Ended => {
                self.session.changed.notify_waiters();
                Poll::Ready(None)
            }
            StreamItem::Replaced => Poll::Ready(None),
            StreamItem::Pending => loop {
                std::task::ready!(self.timer.as_mut().poll(context));
                // The timer is not reset for each event, so it may fire before the keep-alive is due.
                let (now, due) = (Instant::now(), self.silent_since + self.keep_alive);
                if now >= due {
                    self.silent_since = now;
                }
                let next = self.silent_since + self.keep_alive;
                self.timer.as_mut().reset(next);
                if now >= due {
                    // hyper polls again at once and then registers the timer's waker.
                    return Poll::Ready(Some(Ok(KEEP_ALIVE)));
                }
            },
        }
    }
}

/// Counts a large event until the connection has written it: its stream no longer counts it.
fn hold_until_written(budget: &Arc<ByteBudget>, event: Bytes) -> Bytes {
    if event.len() <= GUARANTEED_BYTES {
        return event;
    }
    let mut share = budget.share();
    share.take(event.len());
    share.attach_to(event)
}

impl Drop for EventStreamBody {
    fn drop(&mut self) {
        let now = Instant::now();
        {
            let mut state = self.session.state();
            if self.stream == SESSION_STREAM {
                state.active_at = now;
            }
            if let Some(reader) = state.reader(self.stream)
                && reader.stream.detach(self.listener)
            {
                reader.detached_at = Some(now);
            }
            state.decline_dropped(self.stream);
        }
        self.session.changed.notify_waiters();
    }
}
