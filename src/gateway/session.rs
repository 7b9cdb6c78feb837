//! One client: what it said in `initialize`, what it has asked and is not answered yet, what it was asked, and its
//! streams. Whatever reaches it goes through here, so that nothing of it ever reaches another.
//!
//! ```text
//!            say ──► the call's stream ──► the POST that it came on, or a GET that resumes it
//! server ─►          or, unasked       ──► the GET
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
use mcp_satellite_actors::audience::{Question, Source};
use mcp_satellite_actors::byte_budget::{ByteBudget, ByteShare};
use mcp_satellite_actors::rpc::Message;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Duration, Instant, Sleep, sleep};
use tokio_util::sync::CancellationToken;

use super::access::{Pass, User};
use super::face::{Endpoint, Greeting};
use super::reply;
use super::stream::{ASSURED, Listener, Next, Slow, Stream, UNASKED, Way, way};
use guest::{Hearing, Presence};

/// What keeps a quiet connection open, and finds one that is gone.
const KEEP_ALIVE: Bytes = Bytes::from_static(b":\n\n");

/// What a request is told whose session ends before its answer.
pub(crate) const ENDED: &str = "the session has ended";

/// Why a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its client has said so.
    Closed,
    /// Nothing was heard of its client for too long.
    Idle,
    /// It is too old.
    Age,
    /// There were too many, and it was idle longest.
    Evicted,
    /// Its client reads too slowly.
    Slow,
    /// The token is not valid any more.
    Revoked,
    /// What it was connected to is not there any more.
    Removed,
    /// The endpoint stops.
    Drained,
}

impl End {
    /// As events tell it.
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

/// What a session is from its first moment.
#[derive(Debug)]
pub struct Opening {
    /// Whose it is, and by which token.
    pub pass: Pass,
    /// What it is connected to.
    pub endpoint: Endpoint,
    /// How its path names the instance; empty where it names none.
    pub name: Box<str>,
    /// What the client said of itself.
    pub greeting: Greeting,
    /// The protocol version that was agreed on.
    pub version: String,
    /// Of the request.
    pub user_agent: Option<String>,
    /// For how long it comes.
    pub(crate) presence: Presence,
}

/// What a path asks for, as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// An instance by a name.
    Instance(&'a str),
    /// The tools that find tools.
    Tools,
    /// The tools themselves.
    Flat,
}

impl Opening {
    /// Whether this is where it was opened.
    fn is_at(&self, place: Place<'_>) -> bool {
        match (place, &self.endpoint) {
            (Place::Instance(name), Endpoint::Instance(_)) => *self.name == *name,
            (Place::Tools, Endpoint::Tools) | (Place::Flat, Endpoint::Flat) => true,
            (Place::Instance(_) | Place::Tools | Place::Flat, _) => false,
        }
    }
}

/// A request of this client is open under the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InUse;

/// See the module.
#[derive(Debug)]
pub struct Session {
    number: u64,
    secret: [u8; 16],
    /// What it is.
    pub opening: Opening,
    began: Instant,
    tools_called: AtomicU64,
    over: CancellationToken,
    /// A listener came or went, or has read all.
    changed: Notify,
    /// Of all streams.
    budget: Arc<ByteBudget>,
    state: Mutex<State>,
}

/// What becomes of a call before it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    /// Something was said on its stream.
    Word,
    /// Its session has ended.
    Over,
}

#[derive(Debug)]
struct State {
    ended: Option<End>,
    active_at: Instant,
    unasked: Ear,
    calls: BTreeMap<u64, OpenCall>,
    calls_made: u64,
    questions: HashMap<u64, Asked>,
    questions_put: u64,
    /// Whether it is there for one request alone.
    is_guest: bool,
    /// The progress token of a guest's request, as JSON text, if it has one.
    token: Option<Box<str>>,
    /// What a guest listens for.
    hearing: Option<Hearing>,
}

/// A stream, and who waits for it.
#[derive(Debug)]
struct Ear {
    stream: Stream,
    waker: Option<Waker>,
    /// Since when nobody listens.
    gone_at: Option<Instant>,
}

#[derive(Debug)]
struct OpenCall {
    /// The client's own id, as JSON text.
    id: Arc<str>,
    withdraw: Option<oneshot::Sender<Message>>,
    /// Whether the client takes more than the answer.
    streams: bool,
    ear: Ear,
}

/// What the client was asked.
#[derive(Debug)]
struct Asked {
    of: Source,
    question: Question,
    /// The call that it belongs to, so that what is said of it goes the same way.
    call: Option<u64>,
    /// On which stream it was said, and as which of its events: one that is dropped there, it will never see.
    at: (u64, u64),
    /// The bytes of a question to a stateless client. Those of any other are on its stream.
    _kept: Option<ByteShare>,
}

impl Ear {
    fn new(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self { stream: Stream::new(number, budget), waker: None, gone_at: None }
    }

    fn nameless(number: u64, budget: &Arc<ByteBudget>) -> Self {
        Self { stream: Stream::nameless(number, budget), waker: None, gone_at: None }
    }

    fn say(&mut self, parts: &[&str]) -> Result<(), Slow> {
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

impl State {
    fn ear(&mut self, stream: u64) -> Option<&mut Ear> {
        if stream == UNASKED {
            return Some(&mut self.unasked);
        }
        self.calls.get_mut(&stream).filter(|call| call.streams).map(|call| &mut call.ear)
    }

    /// The stream on which something is said.
    fn way(&self, call: Option<u64>) -> u64 {
        if self.is_guest {
            // Of the rounds of its one request the last is the one that is open, if any is.
            let last = self.calls.iter().next_back();
            let open = last.filter(|(_, call)| call.streams && call.withdraw.is_some());
            return open.map_or(UNASKED, |(number, _)| *number);
        }
        // What is said after the answer is not read there any more.
        let can_stream = self.calls.iter().filter(|(_, call)| call.streams && call.withdraw.is_some());
        let (read, unread): (Vec<_>, Vec<_>) = can_stream.partition(|(_, call)| call.ear.stream.is_read());
        let numbers = |calls: Vec<(&u64, &OpenCall)>| calls.into_iter().map(|(number, _)| *number).collect::<Vec<_>>();
        match way(call, &numbers(read), &numbers(unread), self.unasked.stream.is_heard()) {
            Way::Call(call) => call,
            Way::Unasked => UNASKED,
        }
    }

    fn say(&mut self, call: Option<u64>, parts: &[&str]) -> Result<(), Slow> {
        self.say_on(self.way(call), parts)
    }

    fn say_on(&mut self, stream: u64, parts: &[&str]) -> Result<(), Slow> {
        // A guest has no other ear than its request.
        if self.ended.is_some() || self.is_guest && stream == UNASKED {
            return Ok(());
        }
        let said = self.ear(stream).map_or(Ok(()), |ear| ear.say(parts));
        self.decline_dropped(stream);
        said
    }

    /// Puts a question, or puts it again: under the same number, which is its token, too. The client's progress comes back
    /// with it.
    fn put(&mut self, number: u64, of: Source, call: Option<u64>, question: Question) -> Result<(), Slow> {
        let (stream, id, message) = (self.way(call), number.to_string(), question.message().clone());
        let event = self.ear(stream).map_or(0, |ear| ear.stream.next());
        self.questions.insert(number, Asked { of, question, call, at: (stream, event), _kept: None });
        self.say_on(stream, &message.asked_as(&id, &id))
    }

    /// Some events of a stream may have been dropped. A question that was among them is declined: dropped, it says so.
    fn decline_dropped(&mut self, stream: u64) {
        let dropped = self.ear(stream).map_or(0..0, |ear| ear.stream.take_dropped());
        if !dropped.is_empty() {
            self.questions.retain(|_, asked| asked.at.0 != stream || !dropped.contains(&asked.at.1));
        }
    }

    /// What was asked on the stream of a call, which is not there any more and was not read to its end, is asked where it is
    /// heard; if that is nowhere, it is declined.
    fn ask_again(&mut self, call: u64) -> Result<(), Slow> {
        let asked = self.questions.iter().filter(|(_, asked)| asked.at.0 == call);
        let mut numbers: Vec<u64> = asked.map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        let mut said = Ok(());
        for number in numbers {
            let Some(Asked { of, question, call, .. }) = self.questions.remove(&number) else { continue };
            let stream = self.way(call);
            if self.ear(stream).is_some_and(|ear| ear.stream.is_read()) {
                said = said.and(self.put(number, of, call, question));
            }
        }
        said
    }
}

impl Session {
    pub(crate) fn new(number: u64, secret: [u8; 16], opening: Opening, now: Instant, budget: Arc<ByteBudget>) -> Self {
        let state = State {
            ended: None,
            active_at: now,
            unasked: Ear::new(UNASKED, &budget),
            calls: BTreeMap::new(),
            calls_made: 0,
            questions: HashMap::new(),
            questions_put: 0,
            is_guest: opening.presence != Presence::Session,
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

    /// Its number: `client` of an [`Origin`](mcp_satellite_actors::audience::Origin).
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whose it is.
    pub fn user(&self) -> &Arc<User> {
        &self.opening.pass.user
    }

    /// What may be told of its id.
    pub fn public_id(&self) -> String {
        format!("{:016x}", self.number)
    }

    pub(crate) fn secret(&self) -> &[u8; 16] {
        &self.secret
    }

    /// The whole id: half of a credential.
    pub(crate) fn id(&self) -> String {
        format!("{:016x}{:032x}", self.number, u128::from_be_bytes(self.secret))
    }

    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    pub(crate) fn count_tool(&self) {
        self.tools_called.fetch_add(1, Ordering::Relaxed);
    }

    /// How many tools its client has called.
    pub fn tool_count(&self) -> u64 {
        self.tools_called.load(Ordering::Relaxed)
    }

    /// Returns the budget for answers and streams that clients have not read.
    pub(crate) fn budget(&self) -> &Arc<ByteBudget> {
        &self.budget
    }

    /// Cancelled at its end.
    pub(crate) fn over(&self) -> &CancellationToken {
        &self.over
    }

    /// Why it has ended, if it has.
    pub fn ended(&self) -> Option<End> {
        self.state().ended
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing is called in between that could leave it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says a message, given in parts, to its client: on the stream of `call` if that is open and streams, else where it is
    /// heard. It waits if nobody listens.
    pub fn say(&self, call: Option<u64>, parts: &[&str]) {
        let said = self.state().say(call, parts);
        self.unless_slow(said);
    }

    /// Asks its client what a server wants to know. The question is declined if the session ends first, or if it is dropped
    /// before the client has seen it.
    pub fn ask(&self, of: Source, call: Option<u64>, question: Question) {
        let mut state = self.state();
        if state.ended.is_some() {
            drop(state);
            return;
        }
        if state.is_guest {
            let kept = state.keep(of, question, self.budget.share());
            drop(state);
            self.changed.notify_waiters();
            // Declined where nothing is held.
            drop(kept);
            return;
        }
        state.questions_put += 1;
        let number = state.questions_put;
        let said = state.put(number, of, call, question);
        drop(state);
        self.unless_slow(said);
    }

    /// A server does not want to know any more. `words` is its own cancellation.
    pub fn withdraw(&self, of: &Source, question: u64, words: &Message) {
        let mut state = self.state();
        let is_it = |asked: &Asked| asked.of == *of && asked.question.number() == question;
        let Some(number) = state.questions.iter().find(|(_, asked)| is_it(asked)).map(|(number, _)| *number) else {
            return;
        };
        let asked = state.questions.remove(&number);
        let call = asked.as_ref().and_then(|asked| asked.call);
        // A guest hears of no question but with its answer.
        let said = if state.is_guest { Ok(()) } else { state.say(call, &words.cancelling(&number.to_string())) };
        drop(state);
        drop(asked);
        self.unless_slow(said);
    }

    /// A server has gone, and what it asked with it: its client is told.
    pub fn withdraw_all(&self, of: &Source) {
        let mut state = self.state();
        let gone = |asked: &Asked| asked.of == *of;
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

    /// The client's answer to a question of a server, which goes on to it. False if it was not asked that.
    pub(crate) fn answered(&self, message: Message) -> bool {
        let Some(number) = message.id().and_then(|id| id.parse().ok()) else { return false };
        let Some(asked) = self.state().questions.remove(&number) else { return false };
        asked.question.answer(message);
        true
    }

    /// The open question that a progress token of its client is about: who asked it, and the token that it knows.
    pub fn question(&self, token: &str) -> Option<(Source, String)> {
        let number: u64 = token.parse().ok()?;
        let state = self.state();
        let asked = state.questions.get(&number)?;
        Some((asked.of.clone(), asked.question.message().token()?.to_owned()))
    }

    /// Whether its client listens for what it did not ask for.
    pub fn is_listening(&self) -> bool {
        self.state().unasked.stream.is_heard()
    }

    /// Whether a request of its client is open.
    pub fn has_calls(&self) -> bool {
        !self.state().calls.is_empty()
    }

    /// Returns the number of open requests and streams.
    pub(crate) fn open_count(&self) -> usize {
        let state = self.state();
        state.calls.len() + usize::from(state.unasked.stream.is_heard())
    }

    /// Since when nothing was open, if nothing is.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let state = self.state();
        (state.calls.is_empty() && !state.unasked.stream.is_heard()).then_some(state.active_at)
    }

    /// Its client, which is this place's, has sent something. False if it is over, or another place's.
    pub(crate) fn active(&self, place: Place<'_>, now: Instant) -> bool {
        if !self.opening.is_at(place) {
            return false;
        }
        let mut state = self.state();
        state.active_at = now;
        state.ended.is_none()
    }

    /// What is forgotten first when there is too much: of clients that do not listen, of those that were active long ago.
    pub(crate) fn worth_keeping(&self) -> (bool, Instant) {
        let state = self.state();
        (state.unasked.stream.is_heard(), state.active_at)
    }

    /// Forgets what is kept for its client to come back to.
    pub(crate) fn forget(&self) {
        let mut state = self.state();
        state.unasked.stream.forget();
        state.decline_dropped(UNASKED);
    }

    /// How many messages were dropped because its client did not listen.
    pub(crate) fn lost(&self) -> u64 {
        self.state().unasked.stream.lost()
    }

    /// A request of its client begins: its number, and where its cancellation arrives.
    pub(crate) fn begin(&self, id: &Arc<str>, streams: bool) -> Result<(u64, oneshot::Receiver<Message>), InUse> {
        let (withdraw, withdrawn) = oneshot::channel();
        let mut state = self.state();
        // What is answered is not open any more, though its last words may not be read yet.
        if state.calls.values().any(|call| call.id == *id && call.withdraw.is_some()) {
            return Err(InUse);
        }
        state.calls_made += 1;
        let number = state.calls_made;
        let ear = if state.is_guest { Ear::nameless(number, &self.budget) } else { Ear::new(number, &self.budget) };
        state.calls.insert(number, OpenCall { id: id.clone(), withdraw: Some(withdraw), streams, ear });
        Ok((number, withdrawn))
    }

    /// The client's own cancellation of a request. False if none is open under that id.
    pub(crate) fn cancel(&self, words: Message) -> bool {
        let withdraw = {
            let mut state = self.state();
            let Some(id) = words.of() else { return false };
            let named = state.calls.values_mut().find(|call| *call.id == *id && call.withdraw.is_some());
            named.and_then(|call| call.withdraw.take())
        };
        withdraw.is_some_and(|withdraw| withdraw.send(words).is_ok())
    }

    /// Waits until something is said on the stream of a call, or the session ends.
    pub(crate) async fn news(&self, call: u64) -> News {
        poll_fn(|context| {
            let mut state = self.state();
            let over = state.ended.is_some();
            match state.calls.get_mut(&call) {
                Some(open) if !over => {
                    if open.ear.stream.has_news() {
                        return Poll::Ready(News::Word);
                    }
                    open.ear.listened_by(context);
                    Poll::Pending
                }
                Some(_) | None => Poll::Ready(News::Over),
            }
        })
        .await
    }

    /// A call is answered. Whether that is the first that is said of it: then nothing is said on its stream any more.
    pub(crate) fn is_answered_first(&self, call: u64) -> bool {
        let mut state = self.state();
        let Some(open) = state.calls.get_mut(&call) else { return true };
        let first = !open.ear.stream.has_news();
        if first {
            open.withdraw = None;
        }
        first
    }

    /// The last words on the stream of a call; none if it was withdrawn.
    pub(crate) fn finish(&self, call: u64, answer: Option<&[&str]>) {
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

    /// A call is over, and its stream with it.
    pub(crate) fn close(&self, call: u64) {
        let mut state = self.state();
        // What is said at the end of a session is still to be read; who is too slow is not waited for.
        if state.ended.is_some_and(|why| why != End::Slow) {
            return;
        }
        let Some(mut closed) = state.calls.remove(&call) else { return };
        state.active_at = Instant::now();
        let said = if closed.ear.stream.is_done() { Ok(()) } else { state.ask_again(call) };
        drop(state);
        closed.ear.end();
        self.unless_slow(said);
    }

    /// Waits until nobody wants to read the stream of a call any more: all is read, or its listener is gone and did not come
    /// back in time, or could not.
    pub(crate) async fn abandoned(&self, call: u64, grace: Duration) {
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

    /// A listener of a stream; `after` is the last event that it has, if it comes back. `None` if there is no such stream, or
    /// if what it has was never said.
    /// `keep_alive` is how long the connection may be silent.
    pub(crate) fn listen(self: &Arc<Self>, stream: u64, after: Option<u64>, keep_alive: Duration) -> Option<Listening> {
        let primed = self.primes() && after.is_none();
        let (listener, first) = {
            let mut state = self.state();
            if state.ended.is_some() {
                return None;
            }
            let ear = state.ear(stream)?;
            let listener = ear.stream.attach(after);
            ear.gone_at = None;
            // Who listened until now is told that it does not any more.
            ear.wake();
            (listener, primed.then(|| ear.stream.priming()))
        };
        self.changed.notify_waiters();
        let (silent_since, wakes) = (Instant::now(), Box::pin(sleep(keep_alive)));
        Some(Listening { session: self.clone(), stream, listener, first, keep_alive, silent_since, wakes })
    }

    /// Older clients fail at an event without data.
    fn primes(&self) -> bool {
        self.opening.version.as_str() >= "2025-11-25" && !self.is_guest()
    }

    /// Ends it. What it was asked is declined; what it has asked is cancelled, and answered with an error where it has a
    /// stream. False if it had ended already.
    pub(crate) fn end(&self, why: End) -> bool {
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
                    // An error says that it does not read what there is already.
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

    fn unless_slow(&self, said: Result<(), Slow>) {
        if said == Err(Slow) {
            tracing::warn!(session_id = self.public_id(), "a client reads too slowly; its session ends");
            self.end(End::Slow);
        }
    }
}

/// The body of an answer that is an event stream.
#[derive(Debug)]
pub(crate) struct Listening {
    session: Arc<Session>,
    stream: u64,
    listener: Listener,
    first: Option<Bytes>,
    keep_alive: Duration,
    silent_since: Instant,
    wakes: Pin<Box<Sleep>>,
}

impl futures::Stream for Listening {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let next = {
            let mut state = self.session.state();
            let Some(ear) = state.ear(self.stream) else { return Poll::Ready(None) };
            let next = ear.stream.take(self.listener);
            if next == Next::Nothing {
                ear.listened_by(context);
            }
            next
        };
        match next {
            Next::Event(event) => {
                self.silent_since = Instant::now();
                Poll::Ready(Some(Ok(until_written(&self.session.budget, event))))
            }
            Next::Over => {
                // It is read to its end.
                self.session.changed.notify_waiters();
                Poll::Ready(None)
            }
            Next::Replaced => Poll::Ready(None),
            Next::Nothing => loop {
                std::task::ready!(self.wakes.as_mut().poll(context));
                // The timer is left alone while there is something to say, and wakes too early then.
                let (now, due) = (Instant::now(), self.silent_since + self.keep_alive);
                if now >= due {
                    self.silent_since = now;
                }
                let next = self.silent_since + self.keep_alive;
                self.wakes.as_mut().reset(next);
                if now >= due {
                    // It is polled again at once, and then waits.
                    return Poll::Ready(Some(Ok(KEEP_ALIVE)));
                }
            },
        }
    }
}

/// Counts a large event until it is written: the connection has taken it from its stream.
fn until_written(budget: &Arc<ByteBudget>, event: Bytes) -> Bytes {
    if event.len() <= ASSURED {
        return event;
    }
    let mut share = budget.share();
    share.take(event.len());
    share.hold(event)
}

impl Drop for Listening {
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
