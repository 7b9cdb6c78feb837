//! One MCP session with one server: handshake, requests with their deadlines, lists, and what the server asks. What
//! carries it is beside: `stdio.rs` a pipe to a process, `remote.rs` a line to somewhere else.
//!
//! Messages are read and written here, not by rmcp's engine: a supervisor must know which call reached the server, why
//! a link ended and what was malformed, must keep every field it does not know, and must let nothing be cached. rmcp
//! gives the types of the handshake.

mod envelope;
mod handshake;
mod lists;
mod pending;
mod relay;
pub(crate) mod remote;
mod rounds;
mod stateless;
pub(crate) mod stdio;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::Bytes;
use bytestring::ByteString;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::{Duration, Instant};

use self::envelope::{Envelope, Who};
use self::handshake::{Opening, Refused};
use self::lists::{Kind, Lists, Next, PageError, Reading};
use self::pending::{Behalf, Calls, Pending, Purpose};
use self::relay::Questions;
use self::rounds::Outcome;
use self::stateless::Stateless;
use crate::audience::Stage;
use crate::batcher::WallClock;
use crate::byte_budget::ServerMemory;
use crate::calls::{Asked, Command, Counters, PortEnd, Relay, Request, Wanted, server_error};
use crate::model::catalogue::Catalogue;
use crate::model::era::Era;
use crate::model::exit::{CallError, Fate};
use crate::model::remote::ServerInfo;
use crate::model::secret::Mask;
use crate::model::spec::InstanceSpec;
use crate::rpc::{Kind as Sort, View, text_of};
use crate::rules::jitter::Dice;
use crate::rules::output::excerpt;
use crate::rules::{era, restart, retry};
use crate::seam::Routing;

const METHOD_NOT_FOUND: i64 = -32601;
const INTERNAL_ERROR: i64 = -32603;

/// Malformed messages logged one by one; then each doubling.
const MALFORMED_LOGGED: u64 = 5;
/// Of what a server sent, this much is quoted in a log or a message.
const QUOTED_MAX: usize = 200;
/// Maximum number of bytes logged of a stdout line that is not JSON-RPC.
const PRINTED_BYTES_MAX: usize = 4 * 1024;

/// News of a session, told to the team as they happen.
#[derive(Debug)]
pub(crate) enum News {
    FirstByte,
    /// A line on stdout before the handshake was done that is not JSON-RPC.
    Printed(String),
    /// What the server said of itself: the handshake is done.
    Initialized(Arc<ServerInfo>),
    Discovered(Arc<Catalogue>),
    /// Why the lists cannot be read, and how long the server asks to be left alone.
    DiscoveryFailed(String, Duration),
    /// A call has succeeded although the lists could not be read.
    Recovered,
    /// The server does not take the other era's opening, and is tried in this one.
    Leans(Era),
    /// So many checks in a row have failed, the last of them for this reason.
    Degraded(u32, String),
    /// It answers again, after so many failed checks.
    Restored(u32, Option<String>),
}

/// What the worker tells its session.
#[derive(Debug, Clone)]
pub(crate) enum Control {
    /// End with grace.
    Stop,
    /// Take no longer over the end than a caller who waits for it can bear.
    Hurry,
    /// End with grace when the calls inside are answered. The door is closed: none comes in any more.
    Drain,
    /// Read the lists again.
    Discover,
    /// Another configuration, under which this run goes on.
    Adopt(Arc<InstanceSpec>),
    /// Time has passed that no clock of ours has seen: find out whether the server is still there.
    Check,
}

/// What every session is made of, whatever carries it.
pub(crate) struct Basis {
    pub(crate) spec: Arc<InstanceSpec>,
    pub(crate) port: PortEnd,
    pub(crate) control: mpsc::UnboundedReceiver<Control>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) wall: WallClock,
    /// When the start began: the handshake's time counts from here.
    pub(crate) since: Instant,
    /// Whether the lists are read by itself after the handshake.
    pub(crate) discover: bool,
    /// The era that the server is spoken to in first, if that is known.
    pub(crate) era: Option<Era>,
    /// For what is not to happen to all at once.
    pub(crate) dice: Dice,
    pub(crate) news: Box<dyn Fn(News) + Send>,
    /// Takes lines of stdout that are not JSON-RPC, to be logged; none of a remote server.
    pub(crate) printed: Option<mpsc::Sender<String>>,
    pub(crate) memory: ServerMemory,
    /// Who hears what the server says by itself.
    pub(crate) stage: Stage,
}

/// The way out for messages of ours. It takes them and never waits.
trait Outlet {
    /// Each request has an exchange of its own: it may have to be sent more than once, it may be of another era than the
    /// session, and its end says that nobody waits for it any more.
    const REPEATS: bool;
    /// Queues a request. `routing` is there if it is of the stateless era.
    fn request(&mut self, id: u64, purpose: Use, routing: Option<Box<Routing>>, parts: &[&str]);
    /// Queues a notification.
    fn tell(&mut self, parts: &[&str]);
    /// Queues a response to the server.
    fn respond(&mut self, parts: &[&str]);
    /// Queues the end of the handshake.
    fn initialized(&mut self, version: &str, parts: &[&str]);
    /// Nobody waits for this request any more.
    fn abandon(&mut self, id: u64);
    /// Whether a further request can be queued.
    fn has_room(&self) -> bool;
    /// Whether the server asks and does not read the answers.
    fn is_flooded(&self) -> bool;
    /// Where in all that was ever queued the next message begins.
    fn position(&self) -> u64;
}

/// What a request is for, as far as its way out must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// The first of all: whether anybody answers here is not known.
    Handshake,
    /// Any other.
    InSession,
}

/// What a message from the server came to.
#[derive(Debug)]
enum Heard {
    /// Nothing that the session must know.
    Nothing,
    /// A result for a caller, or a list.
    Answer,
    /// An error in the place of one. Somebody is there, and that is all that it says.
    Refusal,
    /// The same, and it may say that the server has no sessions any more.
    Doubted,
    /// An answer to a check.
    Checked,
    /// An error in answer to a check: whether the server does not know the method, and what it said.
    CheckRefused { unknown: bool, other_era: bool, why: String },
    /// The handshake is done.
    Initialized,
    /// The handshake has failed, and how.
    Refused(Refused),
    /// The server has become one without sessions, and said so.
    OtherEra(String),
    /// The server asks and does not read the answers.
    Flooded,
}

/// What came of a deadline that has passed.
#[derive(Debug)]
enum Late {
    Call,
    List,
    Check,
    Handshake,
    /// The handshake's, too; what the server said of the other era before tells more.
    Refused(Refused),
}

/// The state of a session that has nothing to do with what carries it.
struct Conversation<O> {
    spec: Arc<InstanceSpec>,
    outlet: O,
    port: PortEnd,
    counters: Arc<Counters>,
    wall: WallClock,
    dice: Dice,
    news: Box<dyn Fn(News) + Send>,
    printed: Option<mpsc::Sender<String>>,
    discover: bool,
    /// Requests that wait for room, in order: some may have been given up meanwhile.
    unsent: VecDeque<(u64, Wanted)>,
    calls: Calls,
    initialized: Option<Instant>,
    lists: Lists,
    draining: bool,
    stage: Stage,
    questions: Questions,
    /// The era that the server is spoken to in.
    era: Era,
    opening: Opening,
    stateless: Option<Box<Stateless>>,
}

impl<O: Outlet> Conversation<O> {
    fn new(basis: Basis, outlet: O) -> (Self, mpsc::UnboundedReceiver<Control>) {
        let Basis { spec, port, control, counters, wall, since, discover, era, dice, news, printed, memory, stage } =
            basis;
        let mut this = Self {
            spec,
            outlet,
            port,
            counters,
            wall,
            dice,
            news,
            printed,
            discover,
            unsent: VecDeque::new(),
            calls: Calls::default(),
            initialized: None,
            lists: Lists::new(!discover, memory.lists),
            draining: false,
            stage,
            questions: Questions::default(),
            era: Era::Sessions,
            opening: Opening::default(),
            stateless: None,
        };
        this.greet(since, era);
        (this, control)
    }

    /// Goes on under another configuration.
    fn adopt(&mut self, spec: Arc<InstanceSpec>) {
        self.port.gate.calls_max.store(spec.policy.session.calls_in_flight_max, Ordering::Relaxed);
        self.spec = spec;
    }

    /// The first moment at which a deadline passes or the lists are to be read.
    fn wake_at(&self) -> Option<Instant> {
        let first = self.calls.deadlines.first().map(|(at, _)| *at);
        first.into_iter().chain(self.lists.again_at).chain(self.listens_again_at()).min()
    }

    /// Does what is due by itself.
    fn on_due(&mut self, now: Instant) {
        if self.lists.again_at.is_some_and(|at| now >= at) {
            self.list();
        }
        if self.listens_again_at().is_some_and(|at| now >= at) {
            self.listen();
        }
    }

    /// Whether it takes no calls any more and has answered the last one.
    fn has_drained(&self) -> bool {
        self.draining && self.port.gate.inside() == 0
    }

    // ---- the lists ----

    fn list(&mut self) {
        self.lists.again_at = None;
        if self.lists.reading.is_some() {
            // One reading at a time; what changed meanwhile is read after it.
            self.lists.again_at = Some(Instant::now() + self.spec.policy.session.list_changed_debounce);
            return;
        }
        // Of a tool whose calls must say in headers what cannot be said there, nothing is said at all.
        let strict = O::REPEATS && self.era == Era::Stateless;
        self.lists.reading = Some(Box::new(Reading::new(strict, &self.lists.memory, Instant::now())));
        self.list_page(Kind::Tools, None);
    }

    /// What cannot be read while the instance is online is read again by and by, and what was known is kept. Before that it
    /// is for the slot to say when: it waits for the lists.
    fn list_later(&mut self, pause: Duration) {
        if self.lists.known {
            self.lists.failures += 1;
            let policy = &self.spec.policy.reconnect;
            let delay = restart::reconnect_delay(policy, self.lists.failures);
            let delay = self.dice.spread(delay, policy.jitter_percent).max(pause);
            self.lists.again_by(Instant::now() + delay);
        }
    }

    fn list_page(&mut self, kind: Kind, cursor: Option<&str>) {
        let params = cursor.map(|cursor| format!(r#"{{"cursor":{cursor}}}"#));
        let (now, policy) = (Instant::now(), &self.spec.policy.session);
        let began = self.lists.reading.as_ref().map_or(now, |reading| reading.began);
        let deadline = (now + policy.request_timeout).min(began + policy.list_timeout);
        self.ask(kind.method(), params.as_deref(), Purpose::List, deadline);
    }

    fn on_list(&mut self, answer: Result<&RawValue, CallError>) {
        let Some(mut reading) = self.lists.reading.take() else { return };
        let (spec, kind, now) = (self.spec.clone(), reading.kind, Instant::now());
        let policy = &spec.policy.session;
        let left_out = |why: &str, what: &str| {
            let (why, list) = (quoted(&spec.mask, why), kind.method());
            tracing::warn!(instance = %spec.name, list, why, "{what}");
        };
        let skipped = |why: String| left_out(&why, "an entry without a usable definition is left out");
        let page = match answer {
            Ok(result) => reading.page(result, policy, now, skipped).map_err(|error| (error, Duration::ZERO)),
            // A server without tools is a server, in whatever words it says so.
            Err(CallError::Server { code, .. })
                if code == METHOD_NOT_FOUND || (kind == Kind::Tools && !self.lists.offers.tools) =>
            {
                Ok(Next::End)
            }
            Err(error) => {
                let pause = match &error {
                    CallError::Remote { failure, .. } => retry::asked_pause(&failure.kind),
                    _ => Duration::ZERO,
                };
                let error = reading.late(policy, now).unwrap_or_else(|| PageError::Unreadable(error.to_string()));
                Err((error, pause))
            }
        };
        match page {
            Ok(Next::Page(cursor)) => {
                self.lists.reading = Some(reading);
                return self.list_page(kind, Some(&cursor));
            }
            Ok(Next::Enough(pages)) => {
                left_out(&format!("it has more than {pages} pages"), "the rest of a list is left out");
            }
            Ok(Next::End) => {}
            Err((PageError::OutOfBounds(why), pause)) => return self.lists_failed(&why, pause),
            Err((PageError::Unreadable(why), pause)) if kind == Kind::Tools => return self.lists_failed(&why, pause),
            // What it has beside its tools is no reason to be without them.
            Err((PageError::Unreadable(why), pause)) => reading.unread(quoted(&spec.mask, &why), pause),
        }
        match reading.next(self.lists.offers, now) {
            Ok(next) => {
                let kind = next.kind;
                self.lists.reading = Some(next);
                self.list_page(kind, None);
            }
            Err(all) => {
                let (catalogue, unread) = *all;
                self.mark(&catalogue);
                (self.lists.failed, self.lists.known) = (false, true);
                if catalogue.unread.is_empty() {
                    self.lists.failures = 0;
                } else {
                    self.list_later(unread.pause);
                }
                // That it still cannot be read is not said each time.
                if let Some(news) = self.lists.news(catalogue) {
                    for (list, why) in news.unread.iter().map(|list| list.method()).zip(unread.whys) {
                        let what = "a list that cannot be read is left as it was known before";
                        tracing::warn!(instance = %spec.name, list, why, "{what}");
                    }
                    (self.news)(News::Discovered(news));
                }
            }
        }
    }

    /// None of the lists is used; what was known before is kept.
    fn lists_failed(&mut self, why: &str, pause: Duration) {
        self.lists.failed = true;
        self.list_later(pause);
        (self.news)(News::DiscoveryFailed(quoted(&self.spec.mask, why), pause));
    }

    // ---- what the server sends ----

    /// Logs a message that was dropped because memory is short. A request that waits for it runs into its deadline.
    fn on_dropped(&self, bytes: usize) {
        let before = self.counters.malformed_line();
        if before < MALFORMED_LOGGED || before.is_power_of_two() {
            let why = "dropped a message of the server: the memory budget for messages is exhausted";
            tracing::warn!(instance = %self.spec.name, bytes, count = before + 1, "{why}");
        }
    }

    /// One message, whole. `of` is our request on whose stream it came, where that is known.
    fn on_message(&mut self, message: &Bytes, of: Option<u64>, now: Instant) -> Heard {
        if message.trim_ascii().is_empty() {
            return Heard::Nothing;
        }
        let text = match text_of(message.clone()) {
            Ok(text) => text,
            Err(why) => return self.on_malformed(message, &why.to_string()),
        };
        match View::read(&text) {
            Ok(view) => {
                self.counters.message((self.wall)());
                self.on_view(&view, &text, of, now)
            }
            Err(why) => self.on_malformed(message, &why.to_string()),
        }
    }

    /// A message that has come before the end: only answers are of interest to anybody.
    fn on_last_word(&mut self, message: &Bytes, now: Instant) {
        if let Ok(text) = text_of(message.clone())
            && let Ok(view @ View { kind: Sort::Result | Sort::Error, .. }) = View::read(&text)
        {
            self.on_response(&view, &text, now);
        }
    }

    fn on_view(&mut self, view: &View<'_>, text: &ByteString, of: Option<u64>, now: Instant) -> Heard {
        match view.kind {
            // It would have to be answered, and this era has no way for that.
            Sort::Request if self.era == Era::Stateless => {
                self.on_malformed(text.as_bytes(), "a request of a server without sessions")
            }
            Sort::Request => {
                self.port.gate.active(now);
                self.on_server_request(view, text, of)
            }
            Sort::Notification => {
                self.port.gate.active(now);
                self.on_notification(view, text, of, now);
                Heard::Nothing
            }
            Sort::Result | Sort::Error if view.id.is_some() => self.on_response(view, text, now),
            Sort::Result | Sort::Error => {
                let error = view.outcome.map_or("", RawValue::get);
                self.on_malformed(error.as_bytes(), "an error for no request")
            }
        }
    }

    fn on_response(&mut self, view: &View<'_>, text: &ByteString, now: Instant) -> Heard {
        // An id that is not ours is dropped, and so is a late answer to one that timed out.
        let Some(id) = view.id.and_then(|id| id.get().parse().ok()) else { return Heard::Nothing };
        let Some(pending) = self.calls.remove(id) else { return Heard::Nothing };
        // What is asked by ourselves, again and again perhaps, keeps no server awake that nobody else needs.
        if matches!(pending.purpose, Purpose::Caller { .. } | Purpose::Handshake) {
            self.port.gate.active(now);
        }
        let is_result = view.kind == Sort::Result;
        let heard = if is_result { Heard::Answer } else { Heard::Refusal };
        let spec = self.spec.clone();
        let answer = || match view.outcome {
            Some(result) if is_result => Ok(result),
            error => Err(server_error(error, &spec.mask)),
        };
        match pending.purpose {
            Purpose::Caller { .. } => self.on_answer(id, pending, view, text, now),
            Purpose::Handshake => self.on_handshake(id, answer()),
            Purpose::List => {
                self.on_list(answer());
                heard
            }
            Purpose::Check => match answer() {
                Ok(_) => Heard::Checked,
                Err(error) => Heard::CheckRefused {
                    unknown: matches!(error, CallError::Server { code: METHOD_NOT_FOUND, .. }),
                    other_era: era::refuses_check(self.era, &error),
                    why: quoted(&self.spec.mask, &error.to_string()),
                },
            },
            Purpose::Listen => {
                let is_unknown = matches!(answer(), Err(CallError::Server { code: METHOD_NOT_FOUND, .. }));
                self.on_stream_over(id, is_unknown);
                heard
            }
            Purpose::Discover => {
                self.on_discovered(answer());
                heard
            }
        }
    }

    /// The answer to a call. What a client has asked in the stateless era it reads itself.
    fn on_answer(&mut self, id: u64, pending: Pending, view: &View<'_>, text: &ByteString, now: Instant) -> Heard {
        let is_result = view.kind == Sort::Result;
        let through = pending.goes_through();
        let mut is_doubted = false;
        match view.outcome {
            Some(result) if is_result && self.era == Era::Stateless && !through => match rounds::outcome_of(result) {
                Outcome::Complete => {}
                Outcome::InputRequired => {
                    self.on_input_required(id, pending, result);
                    return Heard::Answer;
                }
                Outcome::Unknown => {
                    let message = "the server answered with a kind of result that is not known".to_owned();
                    pending.fail(CallError::Server { code: INTERNAL_ERROR, message, data: None });
                    return Heard::Answer;
                }
            },
            error if !is_result && O::REPEATS && !through => {
                if let CallError::Server { code, message, data } = server_error(error, &self.spec.mask) {
                    if self.era == Era::Sessions && era::names_stateless(code, data.as_deref()) {
                        // Nobody comes in any more before the caller can know. It was refused for how it was asked.
                        self.port.commands.close();
                        let (fate, reason) = (Fate::NotSent, message.clone());
                        pending.fail(CallError::Terminated { fate, reason });
                        return Heard::OtherEra(quoted(&self.spec.mask, &message));
                    }
                    // A server with sessions may mean something of its own by it: that is found out.
                    is_doubted = self.era == Era::Sessions && era::is_of_stateless(code);
                    if self.era == Era::Stateless && code == era::HEADER_MISMATCH {
                        // Perhaps its tool wants to see other parameters in headers than it did.
                        self.lists.again_by(now);
                    }
                }
            }
            error if !is_result && through => self.on_refused_alone(&server_error(error, &self.spec.mask)),
            _ => {}
        }
        if is_result {
            self.counters.checked((self.wall)());
            // Its lists could not be read, and now it answers: they are tried again before their time.
            if self.lists.reading.is_none() && std::mem::take(&mut self.lists.failed) {
                (self.news)(News::Recovered);
            }
        }
        if let Purpose::Caller { ticket, .. } = pending.purpose {
            ticket.answer(view, text, &self.spec.mask);
        }
        match (is_result, is_doubted) {
            (true, _) => Heard::Answer,
            (false, false) => Heard::Refusal,
            (false, true) => Heard::Doubted,
        }
    }

    fn on_notification(&mut self, view: &View<'_>, text: &ByteString, of: Option<u64>, now: Instant) {
        match view.method.as_deref() {
            Some("notifications/progress") => self.on_progress(view, text, now),
            Some("notifications/cancelled") => self.on_cancelled(view, text),
            _ if self.on_stream(view, text, of, now) => {}
            method => {
                if self.is_of_a_list(method) {
                    self.lists.again_by(now + self.spec.policy.session.list_changed_debounce);
                }
                // It may be anything: it is not even masked where nobody looks.
                if tracing::enabled!(tracing::Level::TRACE) {
                    let method = quoted(&self.spec.mask, method.unwrap_or_default());
                    tracing::trace!(instance = %self.spec.name, method, "notification");
                }
                self.hear(view, text, of);
            }
        }
    }

    /// Before the handshake is done there is nothing that could have changed, and nobody to ask.
    fn is_of_a_list(&self, method: Option<&str>) -> bool {
        let is_of_a_list = matches!(
            method,
            Some(
                "notifications/tools/list_changed"
                    | "notifications/resources/list_changed"
                    | "notifications/prompts/list_changed"
            )
        );
        is_of_a_list && self.initialized.is_some()
    }

    fn on_malformed(&self, message: &[u8], why: &str) -> Heard {
        let before = self.counters.malformed_line();
        if before < MALFORMED_LOGGED || before.is_power_of_two() {
            let text = quoted(&self.spec.mask, &String::from_utf8_lossy(&message[..message.len().min(64 * 1024)]));
            let why = quoted(&self.spec.mask, why);
            tracing::warn!(instance = %self.spec.name, why, line = text, count = before + 1, "what the server sent is skipped");
            if self.initialized.is_none()
                && self.printed.is_some()
                && let Some(line) = excerpt(&text, &self.spec.mask)
            {
                (self.news)(News::Printed(line));
            }
        }
        // A line that there is no room for is counted, and in the log of the satellite if it is one of the first.
        if let Some(Ok(place)) = self.printed.as_ref().map(mpsc::Sender::try_reserve) {
            let line = String::from_utf8_lossy(&message[..message.len().min(PRINTED_BYTES_MAX)]);
            place.send(quoted(&self.spec.mask, line.trim_end()));
        }
        Heard::Nothing
    }

    // ---- what callers want ----

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Request(asked) => {
                let Asked { id, wanted, started, timeout, repeatable, ticket } = asked;
                self.port.gate.active(started);
                let Some(ticket) = self.answer_for_it(id, &wanted, ticket) else { return };
                let behalf = match &wanted {
                    Wanted::Relay(Relay { message, origin, .. }) => {
                        Some(Box::new(Behalf { origin: *origin, token: message.token().map(Into::into) }))
                    }
                    Wanted::Request(_) => None,
                };
                let through = matches!(wanted, Wanted::Relay(Relay { era: Era::Stateless, .. }));
                let purpose = Purpose::Caller { ticket, door: id, started, timeout, repeatable, through, behalf };
                self.calls.insert(id, Pending::new(purpose, started + timeout));
                self.unsent.push_back((id, wanted));
                self.send();
            }
            Command::Cancel { id, words } => {
                if let Some((id, pending)) = self.calls.remove_caller(id) {
                    self.port.gate.active(Instant::now());
                    self.withdraw_inputs(id);
                    match words {
                        Some(words) => self.cancel_in(id, &pending, &words.cancelling(&id.to_string())),
                        None => self.cancel(id, &pending, "the caller went away"),
                    }
                }
            }
            Command::Tell { .. } | Command::Answer { .. } | Command::Decline { .. } | Command::NoRoots { .. } => {
                self.on_client(command);
            }
            Command::Discover(discover) => self.on_discover(discover),
        }
    }

    /// Queues requests for writing while there is room. The deadline of one that waits runs all the same: a server that
    /// does not read must not hold its callers.
    fn send(&mut self) {
        while self.outlet.has_room()
            && let Some((id, wanted)) = self.unsent.pop_front()
        {
            let position = self.outlet.position();
            let Some(pending) = self.calls.pending.get_mut(&id) else { continue };
            pending.starts_at = Some(position);
            pending.attempts += 1;
            let number = id.to_string();
            let is_of_it = matches!(wanted, Wanted::Relay(Relay { era: Era::Stateless, .. }));
            match &wanted {
                _ if self.era == Era::Stateless || is_of_it => {
                    let rounds = pending.rounds.as_ref().map(|rounds| rounds.input());
                    self.send_alone(id, &wanted, &rounds.unwrap_or_default());
                }
                Wanted::Relay(Relay { message, .. }) => {
                    self.outlet.request(id, Use::InSession, None, &message.asked_as(&number, &number));
                }
                Wanted::Request(Request::Tool { name, arguments, repeatable: _ }) => {
                    let name = serde_json::Value::from(name.as_str()).to_string();
                    let arguments = arguments.as_deref().map_or("{}", RawValue::get);
                    let parts = [
                        r#"{"jsonrpc":"2.0","id":"#,
                        &number,
                        r#","method":"tools/call","params":{"name":"#,
                        &name,
                        r#","arguments":"#,
                        arguments,
                        r#","_meta":{"progressToken":"#,
                        &number,
                        "}}}",
                    ];
                    self.outlet.request(id, Use::InSession, None, &parts);
                }
                Wanted::Request(Request::Method { method, params }) => {
                    let params = params.as_deref().map(RawValue::get);
                    put_request(&mut self.outlet, id, Use::InSession, None, method, params);
                }
            }
            // Of a server without sessions any call may have to be asked again, with what it asks for.
            let is_kept = O::REPEATS || self.era == Era::Stateless;
            if let Some(pending) = self.calls.pending.get_mut(&id).filter(|_| is_kept) {
                pending.request = Some(wanted);
            }
        }
    }

    /// Queues a request that says all that its server must know. `input` is what its server has asked for.
    fn send_alone(&mut self, id: u64, wanted: &Wanted, input: &[(&'static str, String)]) {
        let number = id.to_string();
        let input: Vec<(&str, &str)> = input.iter().map(|(name, value)| (*name, &**value)).collect();
        match wanted {
            Wanted::Relay(Relay { message, era: Era::Stateless, .. }) => {
                let routing = self.routing(message.method().unwrap_or_default(), message.params());
                self.outlet.request(id, Use::InSession, routing, &message.asked_as(&number, &number));
            }
            Wanted::Relay(Relay { message, client, .. }) => {
                let token = message.token().map(|_| &*number);
                let who = Who::Client(client.as_deref());
                let params = Envelope { who, token, level: self.level(), input: &input }.around(message.params());
                let routing = self.routing(message.method().unwrap_or_default(), Some(&params));
                self.outlet.request(id, Use::InSession, routing, &[&message.asked_with(&number, &params)]);
            }
            Wanted::Request(request) => {
                let (method, params) = envelope::parts_of(request);
                let token = matches!(request, Request::Tool { .. }).then_some(&*number);
                let envelope = Envelope { who: Who::Caller, token, level: None, input: &input };
                let params = envelope.around(params.as_deref());
                let routing = self.routing(method, Some(&params));
                put_request(&mut self.outlet, id, Use::InSession, routing, method, Some(&params));
            }
        }
    }

    /// What headers say of a request, where there are headers.
    fn routing(&self, method: &str, params: Option<&str>) -> Option<Box<Routing>> {
        O::REPEATS.then(|| Box::new(envelope::routing(method, params, |tool| self.marked(tool))))
    }

    /// Queues a request once more, under a number of its own: an answer or a progress that is still on its way to the last
    /// attempt is not for this one.
    fn ask_again(&mut self, id: u64) {
        // It may have been given up meanwhile.
        let Some(request) = self.calls.pending.get_mut(&id).and_then(|pending| pending.request.take()) else { return };
        let Some(pending) = self.calls.remove(id) else { return };
        let id = self.port.gate.next_id.fetch_add(1, Ordering::Relaxed);
        self.calls.insert(id, pending);
        self.unsent.push_back((id, request));
        self.send();
    }

    /// Asks for ourselves; gives the number of the request.
    fn ask(&mut self, method: &str, params: Option<&str>, purpose: Purpose, deadline: Instant) -> u64 {
        let id = self.port.gate.next_id.fetch_add(1, Ordering::Relaxed);
        let starts_at = Some(self.outlet.position());
        let pending = Pending { starts_at, attempts: 1, ..Pending::new(purpose, deadline) };
        let of = if matches!(pending.purpose, Purpose::Handshake) { Use::Handshake } else { Use::InSession };
        if self.era == Era::Stateless || pending.is_alone() {
            let params = Envelope::of(Who::Satellite).around(params);
            let routing = self.routing(method, Some(&params));
            put_request(&mut self.outlet, id, of, routing, method, Some(&params));
        } else {
            put_request(&mut self.outlet, id, of, None, method, params);
        }
        self.calls.insert(id, pending);
        id
    }

    /// Tells the server that nobody waits any more, if it has been asked at all.
    fn cancel(&mut self, id: u64, pending: &Pending, reason: &str) {
        let number = id.to_string();
        let words = [
            r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"#,
            &number,
            r#","reason":""#,
            reason,
            r#""}}"#,
        ];
        self.cancel_in(id, pending, &words);
    }

    fn cancel_in(&mut self, id: u64, pending: &Pending, words: &[&str]) {
        if !pending.was_asked() {
            return self.unsent.retain(|(waiting, _)| *waiting != id);
        }
        self.outlet.abandon(id);
        // Where the end of its exchange says so, a server without sessions is told nothing else.
        if !(O::REPEATS && (self.era == Era::Stateless || pending.is_alone())) {
            self.outlet.tell(words);
        }
    }

    // ---- time ----

    /// Sees to one deadline that has passed, if there is one.
    fn late(&mut self, now: Instant) -> Option<Late> {
        // A loop, not a recursion: thousands of calls may have the same deadline.
        loop {
            let (at, id) = self.calls.deadlines.first().copied()?;
            if now < at {
                return None;
            }
            if self.waits_for_a_person(id, now) {
                continue;
            }
            let pending = self.calls.remove(id)?;
            if let Purpose::Caller { .. } | Purpose::List = pending.purpose {
                self.withdraw_inputs(id);
                self.cancel(id, &pending, "timed out");
            }
            let fate = if self.calls.may_have_got(&pending) { Fate::TimedOut } else { Fate::NotSent };
            match pending.purpose {
                Purpose::Caller { ticket, started, .. } => {
                    self.port.gate.active(now);
                    ticket.fail(CallError::TimedOut { after: at - started, fate });
                    return Some(Late::Call);
                }
                Purpose::List => {
                    self.on_list(Err(CallError::TimedOut { after: self.spec.policy.session.request_timeout, fate }));
                    return Some(Late::List);
                }
                Purpose::Check => {
                    self.outlet.abandon(id);
                    return Some(Late::Check);
                }
                Purpose::Handshake => {
                    // Over a pipe it is still answered, perhaps.
                    self.outlet.abandon(id);
                    if let Some(late) = self.on_handshake_late(id, pending) {
                        return Some(late);
                    }
                }
                Purpose::Listen => {
                    self.outlet.abandon(id);
                    self.on_stream_over(id, false);
                }
                Purpose::Discover => {
                    self.outlet.abandon(id);
                    self.on_discovered(Err(CallError::TimedOut { after: era::DISCOVER_WAIT_MAX, fate }));
                }
            }
        }
    }

    // ---- the end ----

    /// Nobody comes in any more, and each who is inside learns what became of his call.
    fn close(&mut self, reason: &str) {
        self.port.commands.close();
        self.calls.settle(reason);
        self.leaves_the_stage();
        while let Ok(command) = self.port.commands.try_recv() {
            if let Command::Request(asked) = *command {
                let error = CallError::Terminated { fate: Fate::NotSent, reason: reason.to_owned() };
                asked.ticket.fail(error);
            }
        }
    }
}

fn put_request(
    outlet: &mut impl Outlet,
    id: u64,
    of: Use,
    routing: Option<Box<Routing>>,
    method: &str,
    params: Option<&str>,
) {
    let method = serde_json::Value::from(method).to_string();
    let id_text = id.to_string();
    let (before, params) = params.map_or(("", ""), |params| (r#","params":"#, params));
    let parts = [r#"{"jsonrpc":"2.0","id":"#, &id_text, r#","method":"#, &method, before, params, "}"];
    outlet.request(id, of, routing, &parts);
}

/// Work from one of the two sides of a session.
enum Work<R> {
    Command(Box<Command>),
    Read(R),
}

/// Receives a command or reads from the server, whichever is ready. Where both are, `reads_first` decides; a session that
/// changes it each time keeps a flood from one side from starving the other. Cancel-safe if `read` is.
async fn next_work<R>(
    commands: &mut mpsc::UnboundedReceiver<Box<Command>>,
    read: impl Future<Output = R>,
    reads_first: bool,
) -> Work<R> {
    let mut read = pin!(read);
    poll_fn(|cx| {
        let mut command = |cx: &mut Context<'_>| match commands.poll_recv(cx) {
            Poll::Ready(Some(command)) => Poll::Ready(Work::Command(command)),
            // After the command channel is closed, messages of the server are still read.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        };
        if !reads_first && let ready @ Poll::Ready(_) = command(cx) {
            return ready;
        }
        match read.as_mut().poll(cx) {
            Poll::Ready(read) => Poll::Ready(Work::Read(read)),
            Poll::Pending if reads_first => command(cx),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// What a server said, as it may be quoted: it may say its secrets, and it may say much. Masked before it is cut, so that
/// no part of a secret is left at the cut.
fn quoted(mask: &Mask, text: &str) -> String {
    let mut text = mask.apply(text);
    if text.len() > QUOTED_MAX {
        text.truncate(text.floor_char_boundary(QUOTED_MAX));
        text.push('…');
    }
    text
}
