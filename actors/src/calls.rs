//! The door of one run: who wants something of its server, how many may at once, and what becomes of each.
//!
//! Every caller is answered exactly once, by construction: its [`Ticket`] answers when it is dropped, whoever drops
//! it, and the fate it then tells is the one that the session last knew.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

use bytestring::ByteString;
use futures::FutureExt as _;
use futures::future::Fuse;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Duration, Instant};

use crate::audience::Origin;
use crate::model::era::Era;
use crate::model::exit::{CallError, Fate};
use crate::model::ids::Run;
use crate::model::remote::ServerInfo;
use crate::model::secret::Mask;
use crate::model::spec::InstanceSpec;
use crate::rpc::{Kind, Message, View};
use crate::rules::idle::Activity;
use crate::rules::request_log::plain;

const INTERNAL_ERROR: i64 = -32603;
/// "No timeout" is a year: a deadline must be a time that a clock can show.
pub(crate) const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// What a caller wants of a server.
#[derive(Debug)]
pub enum Request {
    /// `tools/call`. Carries a progress token of ours, so that progress can extend its deadline.
    Tool {
        /// The name by which the server knows the tool.
        name: String,
        /// A JSON object, or nothing.
        arguments: Option<Box<RawValue>>,
        /// Whether it is annotated read-only or idempotent.
        repeatable: bool,
    },
    /// Any other method, its params untouched.
    Method {
        /// The method.
        method: String,
        /// A JSON object, or nothing.
        params: Option<Box<RawValue>>,
    },
}

/// A client's own request: it goes on as it came, but for its id and its progress token.
#[derive(Debug, Clone)]
pub struct Relay {
    /// The request.
    pub message: Message,
    /// Who has made it.
    pub origin: Origin,
    /// Whether it may be asked again although it may have been carried out.
    pub repeatable: bool,
    /// The tool that it calls, if it calls one.
    pub tool: Option<String>,
    /// The era that it is written in. One of the stateless era goes to its server as that, and a result that asks for input
    /// comes back as any other; one of a session's client is translated where its server has none.
    pub era: Era,
    /// What a server without sessions is told of the client of one; what we can do ourselves if it is not known.
    pub client: Option<Arc<ClientFacts>>,
}

/// What the client of a session has said of itself, as JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFacts {
    /// `capabilities`, an object.
    pub capabilities: String,
    /// `clientInfo`, an object.
    pub info: String,
}

/// What goes to a server for somebody who waits for the answer.
#[derive(Debug)]
pub(crate) enum Wanted {
    Request(Request),
    Relay(Relay),
}

impl Wanted {
    /// Whether it may be asked again although it may have been carried out.
    fn repeatable(&self) -> bool {
        match self {
            Self::Request(Request::Tool { repeatable, .. }) | Self::Relay(Relay { repeatable, .. }) => *repeatable,
            Self::Request(Request::Method { method, .. }) => is_repeatable(method),
        }
    }

    fn method(&self) -> &str {
        match self {
            Self::Request(Request::Tool { .. }) => "tools/call",
            Self::Request(Request::Method { method, .. }) => method,
            Self::Relay(Relay { message, .. }) => message.method().unwrap_or_default(),
        }
    }
}

/// Whether a request of this method changes nothing, so that asking twice does no harm. Of tools it is said one by one.
pub fn is_repeatable(method: &str) -> bool {
    matches!(
        method,
        "ping"
            | "tools/list"
            | "resources/list"
            | "resources/templates/list"
            | "resources/read"
            | "prompts/list"
            | "prompts/get"
            | "completion/complete"
    )
}

/// In which form somebody waits for an answer.
enum Waiter {
    /// The result; an error of the server is an error.
    Result(oneshot::Sender<Result<Box<RawValue>, CallError>>),
    /// The whole message, a result or an error.
    Whole(oneshot::Sender<Result<Message, CallError>>),
}

impl Waiter {
    fn fail(self, error: CallError) {
        // An error says that the caller has gone; its cancellation is on its way.
        match self {
            Self::Result(reply) => drop(reply.send(Err(error))),
            Self::Whole(reply) => drop(reply.send(Err(error))),
        }
    }
}

/// A caller's place in the session, from the door to the answer.
pub(crate) struct Ticket {
    waiter: Option<Waiter>,
    /// What is told if this is dropped unanswered.
    pub(crate) fate: Fate,
    place: Option<Place>,
}

impl Ticket {
    /// Hands the server's answer out: its result or error, or the whole of it.
    pub(crate) fn answer(mut self, answer: &View<'_>, text: &ByteString, mask: &Mask) {
        // Its place is free before the caller can look.
        self.place = None;
        match (self.waiter.take(), answer.kind, answer.outcome) {
            (Some(Waiter::Whole(reply)), Kind::Result, _) => drop(reply.send(Ok(answer.keep(text)))),
            (Some(Waiter::Whole(reply)), _, _) => drop(reply.send(Ok(masked(answer, text, mask)))),
            (Some(Waiter::Result(reply)), Kind::Result, Some(result)) => drop(reply.send(Ok(result.to_owned()))),
            (Some(waiter), _, error) => waiter.fail(server_error(error, mask)),
            (None, _, _) => {}
        }
    }

    /// There is no answer of the server.
    pub(crate) fn fail(mut self, error: CallError) {
        self.place = None;
        if let Some(waiter) = self.waiter.take() {
            waiter.fail(error);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(waiter) = self.waiter.take() {
            waiter.fail(CallError::Terminated { fate: self.fate, reason: "the run ended".to_owned() });
        }
    }
}

/// An error as its client may see it. It is only written anew if there is something to hide.
fn masked(answer: &View<'_>, text: &ByteString, mask: &Mask) -> Message {
    let kept = answer.keep(text);
    // However it is spelled: PHP escapes slashes, Python all that is not ASCII.
    let (Some(error), true) = (answer.outcome, mask.hides(&plain(text))) else { return kept };
    let error = serde_json::from_str(error.get()).map_or_else(
        // It has numbers or letters that only its reader may understand.
        |_| json!({"code": INTERNAL_ERROR, "message": mask.apply(&plain(error.get()))}),
        |error| mask.apply_json(error),
    );
    let id = answer.id.map_or("null", RawValue::get);
    let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
    Message::read(text.into()).unwrap_or(kept)
}

/// An error of the server, as it may be told.
pub(crate) fn server_error(error: Option<&RawValue>, mask: &Mask) -> CallError {
    #[derive(Deserialize)]
    struct ServerError {
        code: i64,
        #[serde(default)]
        message: String,
        #[serde(default)]
        data: Option<serde_json::Value>,
    }
    match error.map(|error| serde_json::from_str::<ServerError>(error.get())) {
        Some(Ok(error)) => CallError::Server {
            code: error.code,
            message: mask.apply(&error.message),
            data: error.data.map(|data| mask.apply_json(data).to_string()),
        },
        Some(Err(_)) | None => CallError::Server {
            code: INTERNAL_ERROR,
            message: "the server answered with neither a result nor an error".to_owned(),
            data: None,
        },
    }
}

/// What the session is told by the door. Sent in a box: the channel keeps room for 32, and each instance has one.
pub(crate) enum Command {
    /// A caller's.
    Request(Asked),
    /// The caller has gone, or has said so in words of its own.
    Cancel { id: u64, words: Option<Message> },
    /// A client's notification. It has a place until it is queued, and is dropped where the server reads nothing.
    Tell { message: Message, place: Place },
    /// A client's answer to what the server has asked.
    Answer { question: u64, message: Message },
    /// Nobody answers it, and why.
    Decline { question: u64, code: i64, why: String },
    /// The answer of who has no client: there are no roots.
    NoRoots { question: u64 },
    /// Somebody wants to know what the server says of itself in the stateless era.
    Discover(Discover),
}

/// See [`Command::Discover`]. It has a place until it is answered.
pub(crate) struct Discover {
    pub(crate) place: Place,
    pub(crate) reply: oneshot::Sender<Result<Option<Arc<ServerInfo>>, CallError>>,
}

impl Discover {
    pub(crate) fn answer(self, answer: Result<Option<Arc<ServerInfo>>, CallError>) {
        drop(self.place);
        // An error says that nobody waits any more.
        let _ = self.reply.send(answer);
    }
}

/// A request that has passed the door.
pub(crate) struct Asked {
    pub(crate) id: u64,
    pub(crate) wanted: Wanted,
    pub(crate) started: Instant,
    pub(crate) timeout: Duration,
    /// Whether it may be sent again although it may have been carried out.
    pub(crate) repeatable: bool,
    pub(crate) ticket: Ticket,
}

/// Live counters of one instance, over all its runs. Written by its sessions, read by whoever shows them.
#[derive(Debug, Default)]
pub struct Counters {
    messages: AtomicU64,
    calls: AtomicU64,
    errors: AtomicU64,
    malformed: AtomicU64,
    last_activity: AtomicI64,
    last_check: AtomicI64,
    failed_checks: AtomicU64,
}

impl Counters {
    pub(crate) fn message(&self, at: Timestamp) {
        self.messages.fetch_add(1, Ordering::Relaxed);
        self.last_activity.store(at.as_millisecond(), Ordering::Relaxed);
    }

    pub(crate) fn call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// How many there were before this one.
    pub(crate) fn malformed_line(&self) -> u64 {
        self.malformed.fetch_add(1, Ordering::Relaxed)
    }

    /// Messages received from the server.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Calls made.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Calls that were not answered with a result.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Lines from the server that were not JSON-RPC.
    pub fn malformed(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }

    pub(crate) fn checked(&self, at: Timestamp) {
        self.last_check.store(at.as_millisecond(), Ordering::Relaxed);
        self.is_well();
    }

    pub(crate) fn is_well(&self) {
        self.failed_checks.store(0, Ordering::Relaxed);
    }

    pub(crate) fn check_failed(&self, at: Timestamp) {
        self.last_check.store(at.as_millisecond(), Ordering::Relaxed);
        self.failed_checks.fetch_add(1, Ordering::Relaxed);
    }

    /// Checks of its health in a row that have failed.
    pub fn failed_checks(&self) -> u64 {
        self.failed_checks.load(Ordering::Relaxed)
    }

    /// When the server last said something.
    pub fn last_activity(&self) -> Option<Timestamp> {
        shown(&self.last_activity)
    }

    /// When its health was last found out, in whatever way.
    pub fn last_check(&self) -> Option<Timestamp> {
        shown(&self.last_check)
    }
}

fn shown(at: &AtomicI64) -> Option<Timestamp> {
    let at = at.load(Ordering::Relaxed);
    (at != 0).then(|| Timestamp::from_millisecond(at).ok()).flatten()
}

/// What the door of a run and its session share: who is inside, whether more may come in, and when something last
/// happened.
pub(crate) struct Gate {
    /// Calls inside; with `CLOSED` added no more come in. One number, so that a run falls asleep or a call comes in, and
    /// never both.
    inside: AtomicUsize,
    /// Who needs the run although nobody calls.
    held: AtomicUsize,
    /// See [`SessionPolicy::calls_in_flight_max`](crate::model::policy::SessionPolicy).
    pub(crate) calls_max: AtomicUsize,
    /// Woken when the last call leaves a closed gate: its session may wait for that to end.
    pub(crate) emptied: Notify,
    /// Ids on the wire.
    pub(crate) next_id: AtomicU64,
    began: Instant,
    /// Nanoseconds after `began`.
    active_at: AtomicU64,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

impl Gate {
    fn new(calls_max: usize) -> Self {
        let (inside, held) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (next_id, active_at) = (AtomicU64::new(1), AtomicU64::new(0));
        Self {
            inside,
            held,
            calls_max: AtomicUsize::new(calls_max),
            emptied: Notify::new(),
            next_id,
            began: Instant::now(),
            active_at,
        }
    }

    fn enter(self: &Arc<Self>) -> Result<Place, NoEntry> {
        let limit = self.calls_max.load(Ordering::Relaxed).min(CLOSED - 1);
        let one_more = |inside: usize| (inside < limit).then_some(inside + 1);
        match self.inside.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more) {
            Ok(_) => Ok(Place(self.clone())),
            Err(inside) if inside >= CLOSED => Err(NoEntry::Closed),
            Err(_) => Err(NoEntry::Full),
        }
    }

    pub(crate) fn inside(&self) -> usize {
        self.inside.load(Ordering::Acquire) & !CLOSED
    }

    fn is_closed(&self) -> bool {
        self.inside.load(Ordering::Acquire) >= CLOSED
    }

    fn close(&self) {
        self.inside.fetch_or(CLOSED, Ordering::AcqRel);
    }

    fn close_if_empty(&self) -> bool {
        self.inside.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// A call began or ended, or the server said something.
    pub(crate) fn active(&self, at: Instant) {
        let nanos = at.saturating_duration_since(self.began).as_nanos();
        self.active_at.fetch_max(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// One call inside.
pub(crate) struct Place(Arc<Gate>);

impl Drop for Place {
    fn drop(&mut self) {
        // A caller may leave without a word to the session, which would wait for ever.
        if self.0.inside.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            self.0.emptied.notify_one();
        }
    }
}

/// While it is there the run is not put to sleep: a client waits for what its server says by itself.
pub struct Held(Arc<Gate>);

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Held")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.active(Instant::now());
        self.0.held.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Why a door lets nobody in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoEntry {
    /// As many are inside as may be.
    Full,
    /// The run takes no more calls: it falls asleep, or another has taken its place.
    Closed,
}

/// The door of one run. Cloning it is cheap; it stays valid, and says so, after the run's end.
#[derive(Clone)]
pub struct CallPort(Arc<Port>);

struct Port {
    run: Run,
    commands: mpsc::UnboundedSender<Box<Command>>,
    gate: Arc<Gate>,
    spec: Arc<InstanceSpec>,
    counters: Arc<Counters>,
}

impl fmt::Debug for CallPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallPort({:?})", self.0.run)
    }
}

impl Port {
    fn limit(&self) -> usize {
        self.gate.calls_max.load(Ordering::Relaxed)
    }
}

/// The session's side of the door.
pub(crate) struct PortEnd {
    pub(crate) commands: mpsc::UnboundedReceiver<Box<Command>>,
    /// The way for answers to what the server asks.
    pub(crate) answers: mpsc::UnboundedSender<Box<Command>>,
    pub(crate) gate: Arc<Gate>,
}

/// A request that is on its way. Tells the session when the caller goes away before the answer.
struct Asking<'a> {
    port: &'a Port,
    id: u64,
    method: Option<String>,
    started: Instant,
    answered: bool,
}

impl Asking<'_> {
    async fn answered<T>(
        &mut self,
        answer: &mut oneshot::Receiver<Result<T, CallError>>,
        is_result: impl FnOnce(&T) -> bool,
    ) -> Result<T, CallError> {
        let answer = answer.await.unwrap_or_else(|_| {
            Err(CallError::Terminated { fate: Fate::MaybeExecuted, reason: "the run ended".to_owned() })
        });
        self.answered = true;
        let ok = answer.as_ref().is_ok_and(is_result);
        if !ok {
            self.port.counters.error();
        }
        if let Some(method) = &self.method {
            // A u128 is text in a JSON log.
            let duration_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            let spec = &self.port.spec;
            tracing::debug!(
                instance = %spec.name,                 request_id = self.id, method, duration_ms, ok, "request"
            );
        }
        answer
    }

    fn withdraw(mut self, words: Message) {
        self.answered = true;
        let _ = self.port.commands.send(Box::new(Command::Cancel { id: self.id, words: Some(words) }));
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if !self.answered {
            // An error says that the run is over, and the call with it.
            let _ = self.port.commands.send(Box::new(Command::Cancel { id: self.id, words: None }));
        }
    }
}

impl CallPort {
    /// A door with as many places as the spec allows. The channel behind it is unbounded, but every request in it holds a place.
    pub(crate) fn new(run: Run, spec: Arc<InstanceSpec>, counters: Arc<Counters>) -> (Self, PortEnd) {
        let (commands, end) = mpsc::unbounded_channel();
        let gate = Arc::new(Gate::new(spec.policy.session.calls_in_flight_max));
        let answers = commands.clone();
        let port = Port { run, commands, gate: gate.clone(), spec, counters };
        (Self(Arc::new(port)), PortEnd { commands: end, answers, gate })
    }

    /// The run that this is the door of.
    pub fn run(&self) -> Run {
        self.0.run
    }

    /// Calls that are not answered yet.
    pub fn calls_in_flight(&self) -> usize {
        self.0.gate.inside()
    }

    /// Whether the run still takes requests.
    pub fn is_open(&self) -> bool {
        !self.0.gate.is_closed() && !self.is_over()
    }

    /// Whether there is no session any more that could answer.
    pub(crate) fn is_over(&self) -> bool {
        self.0.commands.is_closed()
    }

    /// Takes no more calls from now on; those inside go on.
    pub(crate) fn close(&self) {
        self.0.gate.close();
    }

    /// Takes no more calls from now on, unless one is inside: then nothing changes.
    pub(crate) fn close_if_unused(&self) -> bool {
        self.0.gate.close_if_empty()
    }

    /// What the run has to do, and when it last had.
    pub(crate) fn activity(&self) -> Activity {
        let gate = &self.0.gate;
        let last = gate.began + Duration::from_nanos(gate.active_at.load(Ordering::Relaxed));
        let held = gate.held.load(Ordering::Acquire);
        Activity { needed_by: gate.inside() + held, last: last.into_std() }
    }

    /// Keeps the run awake. One that falls asleep in this very moment is gone all the same: who needs it asks again.
    pub fn hold(&self) -> Held {
        self.0.gate.held.fetch_add(1, Ordering::AcqRel);
        Held(self.0.gate.clone())
    }

    /// A place inside, without which nothing is asked.
    pub(crate) fn enter(&self) -> Result<Place, NoEntry> {
        self.0.gate.enter()
    }

    pub(crate) fn full(&self) -> CallError {
        CallError::Busy { what: "calls in flight for this server", limit: self.0.limit() }
    }

    /// Asks the server, and waits for its answer at most `timeout` (longer while it reports progress). Dropping the
    /// future cancels the call on the server.
    pub async fn request(&self, request: Request, timeout: Duration) -> Result<Box<RawValue>, CallError> {
        match self.enter() {
            Ok(place) => self.request_from(place, request, timeout).await,
            Err(NoEntry::Full) => Err(self.full()),
            Err(NoEntry::Closed) => {
                let reason = "the run takes no more calls".to_owned();
                Err(CallError::Terminated { fate: Fate::NotSent, reason })
            }
        }
    }

    pub(crate) async fn request_from(
        &self,
        place: Place,
        request: Request,
        timeout: Duration,
    ) -> Result<Box<RawValue>, CallError> {
        let (reply, mut answer) = oneshot::channel();
        self.ask(place, Wanted::Request(request), timeout, Waiter::Result(reply)).answered(&mut answer, |_| true).await
    }

    /// Passes a client's request on. `None` if the client has withdrawn it, in these words: it does not want an answer
    /// any more.
    pub(crate) async fn relay_from(
        &self,
        place: Place,
        relay: Relay,
        timeout: Duration,
        withdrawn: &mut Fuse<oneshot::Receiver<Message>>,
    ) -> Result<Option<Message>, CallError> {
        // It has waited for the server, and its client not for it.
        if let Some(Ok(_)) = (&mut *withdrawn).now_or_never() {
            return Ok(None);
        }
        let (reply, mut answer) = oneshot::channel();
        let mut asking = self.ask(place, Wanted::Relay(relay), timeout, Waiter::Whole(reply));
        let is_result = |message: &Message| message.kind() == Kind::Result;
        let words = tokio::select! {
            biased;
            Ok(words) = withdrawn => words,
            answer = asking.answered(&mut answer, is_result) => return answer.map(Some),
        };
        asking.withdraw(words);
        Ok(None)
    }

    fn ask(&self, place: Place, wanted: Wanted, timeout: Duration, waiter: Waiter) -> Asking<'_> {
        let port = &*self.0;
        let id = port.gate.next_id.fetch_add(1, Ordering::Relaxed);
        let ticket = Ticket { waiter: Some(waiter), fate: Fate::NotSent, place: Some(place) };
        port.counters.call();
        let method = tracing::enabled!(tracing::Level::DEBUG).then(|| wanted.method().to_owned());
        let started = Instant::now();
        // If the run is over the command comes back, is dropped, and its ticket answers `not_sent`.
        let timeout = timeout.min(TIMEOUT_MAX);
        let repeatable = wanted.repeatable();
        let asked = Asked { id, wanted, started, timeout, repeatable, ticket };
        let _ = port.commands.send(Box::new(Command::Request(asked)));
        Asking { port, id, method, started, answered: false }
    }

    /// What the server says of itself in the stateless era; `None` if it does not speak it.
    pub(crate) async fn discover(&self, place: Place, timeout: Duration) -> Result<Option<Arc<ServerInfo>>, CallError> {
        let (reply, answer) = oneshot::channel();
        let timeout = timeout.min(TIMEOUT_MAX);
        let discover = Discover { place, reply };
        let _ = self.0.commands.send(Box::new(Command::Discover(discover)));
        // Asking changes nothing, however often it is done.
        let over = || CallError::Terminated { fate: Fate::NotSent, reason: "the run ended".to_owned() };
        let late = CallError::TimedOut { after: timeout, fate: Fate::NotSent };
        match tokio::time::timeout(timeout, answer).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(over())),
            Err(_elapsed) => Err(late),
        }
    }

    /// Passes a client's notification on.
    pub(crate) fn tell(&self, message: Message) -> Result<(), NoEntry> {
        let place = self.enter()?;
        // If the run is over nobody is there to be told.
        let _ = self.0.commands.send(Box::new(Command::Tell { message, place }));
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_door_closes_only_while_nobody_is_inside_and_then_lets_nobody_in() {
        let gate = Arc::new(Gate::new(2));
        let (first, second) = (gate.enter().ok().unwrap(), gate.enter().ok().unwrap());
        assert_eq!(gate.enter().err(), Some(NoEntry::Full));
        drop(first);
        assert!(!gate.close_if_empty());
        assert_eq!((gate.inside(), gate.is_closed()), (1, false));
        drop(second);
        assert!(gate.close_if_empty());
        assert_eq!(gate.enter().err(), Some(NoEntry::Closed));
        assert_eq!((gate.inside(), gate.is_closed()), (0, true));
    }

    #[test]
    fn a_call_comes_in_or_the_door_closes_and_never_both() {
        for _ in 0..2000 {
            let (gate, start) = (Arc::new(Gate::new(1)), Barrier::new(2));
            let (place, closed) = std::thread::scope(|scope| {
                let entering = scope.spawn(|| {
                    start.wait();
                    gate.enter().ok()
                });
                start.wait();
                let closed = gate.close_if_empty();
                (entering.join().unwrap(), closed)
            });
            assert_ne!(place.is_some(), closed);
        }
    }
}
