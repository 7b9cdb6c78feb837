//! The state of one client: its `initialize` data, its open calls, the questions that servers asked it, and its
//! streams. Every message to the client passes through here, so no message can reach another client.
//!
//! ```text
//!            say ──► the call's stream ──► the POST that it came on, or a GET that resumes it
//! server ─►          or the session's  ──► the GET
//!            ask ──► the same, under a number of ours ──► its answer ──► the server
//! ```

pub(super) mod guest;

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
use mcp_satellite_actors::rpc::RpcMessage;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Duration, Instant, Sleep, sleep};
use tokio_util::sync::CancellationToken;

use super::access::{Permission, User};
use super::face::{ClientDescription, EndpointId};
use super::reply;
use super::stream::{ASSURED, EventStream, ListenerId, SlowListener, StreamChoice, StreamItem, UNASKED, way};
use guest::{ClientLifetime, GuestSubscription};

// SSE comment that keeps a silent connection open and detects a dead one.
const KEEP_ALIVE: Bytes = Bytes::from_static(b":\n\n");

pub const ENDED: &str = "the session has ended";

/// Reason for the end of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionEnd {
    /// The client sent `DELETE`, or its stateless request ended.
    Closed,
    /// No request for longer than the idle timeout.
    Idle,
    /// The session reached its maximum age.
    Age,
    /// The limit of sessions was reached and this one was idle longest.
    Evicted,
    /// The client reads too slowly.
    Slow,
    /// The token is no longer valid.
    Revoked,
    /// The instance was removed.
    Removed,
    /// The endpoint stops.
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

/// The immutable facts of a session.
#[derive(Debug)]
pub struct SessionFacts {
    /// The user and the token that admitted it.
    pub pass: Permission,
    /// The endpoint that the session is bound to.
    pub endpoint: EndpointId,
    /// Name of the instance in the request path; empty for `/mcp`.
    pub name: Box<str>,
    /// The client's description of itself.
    pub greeting: ClientDescription,
    /// The negotiated protocol version.
    pub version: String,
    /// `User-Agent` of the request that opened the session.
    pub user_agent: Option<String>,
    pub presence: ClientLifetime,
}

/// The endpoint that a request path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointPath<'a> {
    /// Path `/i/{name}/mcp`.
    Instance(&'a str),
    /// Path `/mcp`: the tools that find tools.
    Tools,
    /// Path `/mcp?mode=flat`: all tools in one list.
    Flat,
}

impl SessionFacts {
    fn is_at(&self, place: EndpointPath<'_>) -> bool {
        match (place, &self.endpoint) {
            (EndpointPath::Instance(name), EndpointId::Instance(_)) => *self.name == *name,
            (EndpointPath::Tools, EndpointId::Tools) | (EndpointPath::Flat, EndpointId::Flat) => true,
            (EndpointPath::Instance(_) | EndpointPath::Tools | EndpointPath::Flat, _) => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestIdInUse;

/// The session of one client. A stateless request has one of its own, called a guest.
#[derive(Debug)]
pub struct ClientSession {
    number: u64,
    secret: [u8; 16],
    /// Facts that do not change.
    pub opening: SessionFacts,
    began: Instant,
    tools_called: AtomicU64,
    over: CancellationToken,
    // Notified when a listener attaches or detaches, when a stream was read completely, and when a guest gets a
    // question.
    changed: Notify,
    budget: Arc<ByteBudget>,
    state: Mutex<SessionState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallEvent {
    Word,
    Over,
}

#[derive(Debug)]
struct SessionState {
    ended: Option<SessionEnd>,
    active_at: Instant,
    unasked: StreamReader,
    calls: BTreeMap<u64, OpenCall>,
    calls_made: u64,
    questions: HashMap<u64, SentQuestion>,
    questions_put: u64,
    is_guest: bool,
    token: Option<Box<str>>,
    hearing: Option<GuestSubscription>,
}

#[derive(Debug)]
struct StreamReader {
    stream: EventStream,
    waker: Option<Waker>,
    gone_at: Option<Instant>,
}

#[derive(Debug)]
struct OpenCall {
    // The client's own id, as JSON text.
    id: Arc<str>,
    withdraw: Option<oneshot::Sender<RpcMessage>>,
    streams: bool,
    ear: StreamReader,
}

#[derive(Debug)]
struct SentQuestion {
    of: SessionSource,
    question: ClientQuestion,
    // The call that it belongs to: later messages about the question take the same stream.
    call: Option<u64>,
    // Stream and event number of the question. If that event is dropped, the client will never see the question.
    at: (u64, u64),
    // Bytes of a question to a stateless client. For other clients the stream counts them.
    _kept: Option<ByteShare>,
}

impl StreamReader {
    fn new(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self { stream: EventStream::new(number, budget), waker: None, gone_at: None }
    }

    fn nameless(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self { stream: EventStream::nameless(number, budget), waker: None, gone_at: None }
    }

    fn say(&mut self, parts: &[&str]) -> Result<(), SlowListener> {
        self.stream.say(parts)?;
        self.wake();
        Ok(())
    }

    fn end(&mut self) {
        self.stream.end();
        self.wake();
    }

    fn listened_by(&mut self, context: &Context<'_>) {
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
    fn ear(&mut self, stream: u64) -> Option<&mut StreamReader> {
        if stream == UNASKED {
            return Some(&mut self.unasked);
        }
        self.calls.get_mut(&stream).filter(|call| call.streams).map(|call| &mut call.ear)
    }

    fn way(&self, call: Option<u64>) -> u64 {
        if self.is_guest {
            // A stateless request may consist of several rounds; only the last one can be open.
            let last = self.calls.iter().next_back();
            let open = last.filter(|(_, call)| call.streams && call.withdraw.is_some());
            return open.map_or(UNASKED, |(number, _)| *number);
        }
        // The client no longer reads a call's stream after the answer.
        let can_stream = self.calls.iter().filter(|(_, call)| call.streams && call.withdraw.is_some());
        let (read, unread): (Vec<_>, Vec<_>) = can_stream.partition(|(_, call)| call.ear.stream.is_read());
        let numbers = |calls: Vec<(&u64, &OpenCall)>| calls.into_iter().map(|(number, _)| *number).collect::<Vec<_>>();
        match way(call, &numbers(read), &numbers(unread), self.unasked.stream.is_heard()) {
            StreamChoice::Call(call) => call,
            StreamChoice::Unasked => UNASKED,
        }
    }

    fn say(&mut self, call: Option<u64>, parts: &[&str]) -> Result<(), SlowListener> {
        self.say_on(self.way(call), parts)
    }

    fn say_on(&mut self, stream: u64, parts: &[&str]) -> Result<(), SlowListener> {
        // A guest has no stream apart from its calls.
        if self.ended.is_some() || self.is_guest && stream == UNASKED {
            return Ok(());
        }
        let said = self.ear(stream).map_or(Ok(()), |ear| ear.say(parts));
        self.decline_dropped(stream);
        said
    }

    /// Sends or resends a question under `number`, which is also its progress token, so that the client's progress
    /// notifications can be matched.
    fn put(
        &mut self,
        number: u64,
        of: SessionSource,
        call: Option<u64>,
        question: ClientQuestion,
    ) -> Result<(), SlowListener> {
        let (stream, id, message) = (self.way(call), number.to_string(), question.message().clone());
        let event = self.ear(stream).map_or(0, |ear| ear.stream.next());
        self.questions.insert(number, SentQuestion { of, question, call, at: (stream, event), _kept: None });
        self.say_on(stream, &message.asked_as(&id, &id))
    }

    /// Removes the questions whose events were dropped from a stream. Dropping a question declines it.
    fn decline_dropped(&mut self, stream: u64) {
        let dropped = self.ear(stream).map_or(0..0, |ear| ear.stream.take_dropped());
        if !dropped.is_empty() {
            self.questions.retain(|_, asked| asked.at.0 != stream || !dropped.contains(&asked.at.1));
        }
    }

    /// Resends the questions from the stream of a closed call that was not read completely on another stream. If no
    /// stream has a reader, drops them, which declines them.
    fn ask_again(&mut self, call: u64) -> Result<(), SlowListener> {
        let asked = self.questions.iter().filter(|(_, asked)| asked.at.0 == call);
        let mut numbers: Vec<u64> = asked.map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        let mut said = Ok(());
        for number in numbers {
            let Some(SentQuestion { of, question, call, .. }) = self.questions.remove(&number) else { continue };
            let stream = self.way(call);
            if self.ear(stream).is_some_and(|ear| ear.stream.is_read()) {
                said = said.and(self.put(number, of, call, question));
            }
        }
        said
    }
}

impl ClientSession {
    pub fn new(number: u64, secret: [u8; 16], opening: SessionFacts, now: Instant, budget: Arc<ByteBudget>) -> Self {
        let state = SessionState {
            ended: None,
            active_at: now,
            unasked: StreamReader::new(UNASKED, &budget),
            calls: BTreeMap::new(),
            calls_made: 0,
            questions: HashMap::new(),
            questions_put: 0,
            is_guest: opening.presence != ClientLifetime::Session,
            token: None,
            hearing: None,
        };
        Self {
            number,
            secret,
            opening,
            began: now,
            tools_called: AtomicU64::new(0),
            over: CancellationToken::new(),
            changed: Notify::new(),
            budget,
            state: Mutex::new(state),
        }
    }

    /// Returns the session's number: `client` of an [`ConfigOrigin`](mcp_satellite_actors::audience::CallOrigin).
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the user of the session.
    pub fn user(&self) -> &Arc<User> {
        &self.opening.pass.user
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

    pub fn began(&self) -> Instant {
        self.began
    }

    pub fn count_tool(&self) {
        self.tools_called.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of tool calls of this client.
    pub fn tool_count(&self) -> u64 {
        self.tools_called.load(Ordering::Relaxed)
    }

    pub fn budget(&self) -> &Arc<ByteBudget> {
        &self.budget
    }

    pub fn over(&self) -> &CancellationToken {
        &self.over
    }

    /// Returns the reason for the end; `None` while the session is open.
    pub fn ended(&self) -> Option<SessionEnd> {
        self.state().ended
    }

    fn state(&self) -> MutexGuard<'_, SessionState> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message, given in parts, to the client: on the stream of `call` if that is open and streams, else on a
    /// stream that has a reader. The message is buffered while there is no reader.
    pub fn say(&self, call: Option<u64>, parts: &[&str]) {
        let said = self.state().say(call, parts);
        self.unless_slow(said);
    }

    /// Sends a server's question to the client. The question is declined if the session ends first or if its event is
    /// dropped before the client reads it.
    pub fn ask(&self, of: SessionSource, call: Option<u64>, question: ClientQuestion) {
        let mut state = self.state();
        if state.ended.is_some() {
            drop(state);
            return;
        }
        if state.is_guest {
            let kept = state.keep(of, question, self.budget.share());
            drop(state);
            self.changed.notify_waiters();
            // Dropping the question declines it; the lock is free again.
            drop(kept);
            return;
        }
        state.questions_put += 1;
        let number = state.questions_put;
        let said = state.put(number, of, call, question);
        drop(state);
        self.unless_slow(said);
    }

    /// Withdraws a question that its server cancelled. `words` is the server's cancellation.
    pub fn withdraw(&self, of: &SessionSource, question: u64, words: &RpcMessage) {
        let mut state = self.state();
        let is_it = |asked: &SentQuestion| asked.of == *of && asked.question.number() == question;
        let Some(number) = state.questions.iter().find(|(_, asked)| is_it(asked)).map(|(number, _)| *number) else {
            return;
        };
        let asked = state.questions.remove(&number);
        let call = asked.as_ref().and_then(|asked| asked.call);
        // A guest receives its questions only with the answer, so it has not seen this one.
        let said = if state.is_guest { Ok(()) } else { state.say(call, &words.cancelling(&number.to_string())) };
        drop(state);
        drop(asked);
        self.unless_slow(said);
    }

    /// Withdraws all questions of a server whose run ended, and notifies the client.
    pub fn withdraw_all(&self, of: &SessionSource) {
        let mut state = self.state();
        let gone = |asked: &SentQuestion| asked.of == *of;
        let numbers: Vec<u64> =
            state.questions.iter().filter(|(_, asked)| gone(asked)).map(|(number, _)| *number).collect();
        let mut said = Ok(());
        let mut dropped = Vec::with_capacity(numbers.len());
        for number in numbers {
            let Some(asked) = state.questions.remove(&number) else { continue };
            if state.is_guest {
                dropped.push(asked);
                continue;
            }
            let number = number.to_string();
            let parts = [
                r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"#,
                &number,
                r#","reason":"the server ended"}}"#,
            ];
            said = said.and(state.say(asked.call, &parts));
            dropped.push(asked);
        }
        drop(state);
        drop(dropped);
        self.unless_slow(said);
    }

    pub fn answered(&self, message: RpcMessage) -> bool {
        let Some(number) = message.id().and_then(|id| id.parse().ok()) else { return false };
        let Some(asked) = self.state().questions.remove(&number) else { return false };
        asked.question.answer(message);
        true
    }

    /// Finds the open question for a progress token from the client. Returns the server that asked and that server's
    /// own token.
    pub fn question(&self, token: &str) -> Option<(SessionSource, String)> {
        let number: u64 = token.parse().ok()?;
        let state = self.state();
        let asked = state.questions.get(&number)?;
        Some((asked.of.clone(), asked.question.message().token()?.to_owned()))
    }

    /// Returns true if the client reads the session's GET stream.
    pub fn is_listening(&self) -> bool {
        self.state().unasked.stream.is_heard()
    }

    /// Returns true if a request of the client is open.
    pub fn has_calls(&self) -> bool {
        !self.state().calls.is_empty()
    }

    pub fn open_count(&self) -> usize {
        let state = self.state();
        state.calls.len() + usize::from(state.unasked.stream.is_heard())
    }

    pub fn idle_since(&self) -> Option<Instant> {
        let state = self.state();
        (state.calls.is_empty() && !state.unasked.stream.is_heard()).then_some(state.active_at)
    }

    /// Records activity of the client. Returns false if the session has ended or belongs to another endpoint.
    pub fn active(&self, place: EndpointPath<'_>, now: Instant) -> bool {
        if !self.opening.is_at(place) {
            return false;
        }
        let mut state = self.state();
        state.active_at = now;
        state.ended.is_none()
    }

    /// Returns the sort key for dropping buffers: clients without a reader first, then the longest inactive.
    pub fn worth_keeping(&self) -> (bool, Instant) {
        let state = self.state();
        (state.unasked.stream.is_heard(), state.active_at)
    }

    pub fn forget(&self) {
        let mut state = self.state();
        state.unasked.stream.forget();
        state.decline_dropped(UNASKED);
    }

    pub fn lost(&self) -> u64 {
        self.state().unasked.stream.lost()
    }

    pub fn begin(&self, id: &Arc<str>, streams: bool) -> Result<(u64, oneshot::Receiver<RpcMessage>), RequestIdInUse> {
        let (withdraw, withdrawn) = oneshot::channel();
        let mut state = self.state();
        // An answered call no longer occupies its id, even if its stream is not read completely.
        if state.calls.values().any(|call| call.id == *id && call.withdraw.is_some()) {
            return Err(RequestIdInUse);
        }
        state.calls_made += 1;
        let number = state.calls_made;
        let ear = if state.is_guest {
            StreamReader::nameless(number, &self.budget)
        } else {
            StreamReader::new(number, &self.budget)
        };
        state.calls.insert(number, OpenCall { id: id.clone(), withdraw: Some(withdraw), streams, ear });
        Ok((number, withdrawn))
    }

    pub fn cancel(&self, words: RpcMessage) -> bool {
        let withdraw = {
            let mut state = self.state();
            let Some(id) = words.of() else { return false };
            let named = state.calls.values_mut().find(|call| *call.id == *id && call.withdraw.is_some());
            named.and_then(|call| call.withdraw.take())
        };
        withdraw.is_some_and(|withdraw| withdraw.send(words).is_ok())
    }

    /// Waits until a message is sent on the stream of a call or the session ends.
    pub async fn news(&self, call: u64) -> CallEvent {
        poll_fn(|context| {
            let mut state = self.state();
            let over = state.ended.is_some();
            match state.calls.get_mut(&call) {
                Some(open) if !over => {
                    if open.ear.stream.has_news() {
                        return Poll::Ready(CallEvent::Word);
                    }
                    open.ear.listened_by(context);
                    Poll::Pending
                }
                Some(_) | None => Poll::Ready(CallEvent::Over),
            }
        })
        .await
    }

    /// Returns true if the answer is the first message of the call. From then on no message is sent on its stream.
    pub fn is_answered_first(&self, call: u64) -> bool {
        let mut state = self.state();
        let Some(open) = state.calls.get_mut(&call) else { return true };
        let first = !open.ear.stream.has_news();
        if first {
            open.withdraw = None;
        }
        first
    }

    /// Ends the stream of a call, after its answer if there is one (`None` if the client cancelled the call).
    pub fn finish(&self, call: u64, answer: Option<&[&str]>) {
        let said = {
            let mut state = self.state();
            let Some(open) = state.calls.get_mut(&call) else { return };
            open.withdraw = None;
            let said = answer.map_or(Ok(()), |parts| open.ear.say(parts));
            open.ear.end();
            said
        };
        self.unless_slow(said);
    }

    pub fn close(&self, call: u64) {
        let mut state = self.state();
        // The last messages of an ended session still have to be read, unless its client reads too slowly.
        if state.ended.is_some_and(|why| why != SessionEnd::Slow) {
            return;
        }
        let Some(mut closed) = state.calls.remove(&call) else { return };
        state.active_at = Instant::now();
        let said = if closed.ear.stream.is_done() { Ok(()) } else { state.ask_again(call) };
        drop(state);
        closed.ear.end();
        self.unless_slow(said);
    }

    /// Waits until the stream of a call has no reader left: it was read completely, or its reader left and did not
    /// return within `grace` or cannot return.
    pub async fn abandoned(&self, call: u64, grace: Duration) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let gone = {
                let mut state = self.state();
                let Some(ear) = state.ear(call) else { return };
                if ear.stream.is_done() {
                    return;
                }
                ear.gone_at.map(|at| if ear.stream.is_resumable() { at + grace } else { at })
            };
            match gone {
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
        let primed = self.primes() && after.is_none();
        let (listener, first) = {
            let mut state = self.state();
            if state.ended.is_some() {
                return None;
            }
            let ear = state.ear(stream)?;
            let listener = ear.stream.attach(after);
            ear.gone_at = None;
            // Wakes the previous listener, which finds out that it was replaced.
            ear.wake();
            (listener, primed.then(|| ear.stream.priming()))
        };
        self.changed.notify_waiters();
        let (silent_since, wakes) = (Instant::now(), Box::pin(sleep(keep_alive)));
        Some(EventStreamBody { session: self.clone(), stream, listener, first, keep_alive, silent_since, wakes })
    }

    /// Reports whether streams begin with a priming event. Clients of older versions fail at an event without data.
    fn primes(&self) -> bool {
        self.opening.version.as_str() >= "2025-11-25" && !self.is_guest()
    }

    /// Ends the session: declines the questions to its client and cancels its calls. Calls with a stream are answered
    /// with an error. Returns false if the session had ended already.
    pub fn end(&self, why: SessionEnd) -> bool {
        let questions = {
            let mut state = self.state();
            if state.ended.is_some() {
                return false;
            }
            state.ended = Some(why);
            state.unasked.end();
            let last = state.last_words();
            for call in state.calls.values_mut() {
                if call.streams && call.withdraw.is_some() {
                    // The error means that the client reads too slowly, and the stream ends anyway.
                    let _ = reply::parts(&last, &call.id, |parts| call.ear.say(parts.unwrap_or_default()));
                }
                call.ear.end();
            }
            std::mem::take(&mut state.questions)
        };
        drop(questions);
        self.over.cancel();
        self.changed.notify_waiters();
        true
    }

    fn unless_slow(&self, said: Result<(), SlowListener>) {
        if said == Err(SlowListener) {
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
    wakes: Pin<Box<Sleep>>,
}

impl futures::Stream for EventStreamBody {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let next = {
            let mut state = self.session.state();
            let Some(ear) = state.ear(self.stream) else { return Poll::Ready(None) };
            let next = ear.stream.take(self.listener);
            if next == StreamItem::Nothing {
                ear.listened_by(context);
            }
            next
        };
        match next {
            StreamItem::Event(event) => {
                self.silent_since = Instant::now();
                Poll::Ready(Some(Ok(until_written(&self.session.budget, event))))
            }
            StreamItem::Over => {
                self.session.changed.notify_waiters();
                Poll::Ready(None)
            }
            StreamItem::Replaced => Poll::Ready(None),
            StreamItem::Nothing => loop {
                std::task::ready!(self.wakes.as_mut().poll(context));
                // The timer is not reset for each event, so it may fire before the keep-alive is due.
                let (now, due) = (Instant::now(), self.silent_since + self.keep_alive);
                if now >= due {
                    self.silent_since = now;
                }
                let next = self.silent_since + self.keep_alive;
                self.wakes.as_mut().reset(next);
                if now >= due {
                    // hyper polls again at once and then registers the timer's waker.
                    return Poll::Ready(Some(Ok(KEEP_ALIVE)));
                }
            },
        }
    }
}

/// Counts a large event until the connection has written it: its stream no longer counts it.
fn until_written(budget: &Arc<ByteBudget>, event: Bytes) -> Bytes {
    if event.len() <= ASSURED {
        return event;
    }
    let mut share = budget.share();
    share.take(event.len());
    share.hold(event)
}

impl Drop for EventStreamBody {
    fn drop(&mut self) {
        let now = Instant::now();
        {
            let mut state = self.session.state();
            if self.stream == UNASKED {
                state.active_at = now;
            }
            if let Some(ear) = state.ear(self.stream)
                && ear.stream.detach(self.listener)
            {
                ear.gone_at = Some(now);
            }
            state.decline_dropped(self.stream);
        }
        self.session.changed.notify_waiters();
    }
}
