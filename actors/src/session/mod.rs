//! An MCP session with one server: handshake, requests and their deadlines, lists, and requests of the server. The
//! transports are in `stdio.rs` (pipes to a process) and `remote.rs` (connections to a remote server).
//!
//! The session reads and writes messages itself instead of using rmcp's engine: a supervisor must determine which call
//! reached the server, why a connection ended and which messages were malformed; it must keep unknown fields and
//! prevent caching. rmcp provides only the types of the handshake.

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
use mcp_satellite_protocol::error_code::{HEADER_MISMATCH, INTERNAL_ERROR, METHOD_NOT_FOUND};
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::{Duration, Instant};

use self::envelope::{RequestIdentity, RequestMeta};
use self::handshake::{HandshakeProgress, HandshakeRefusal};
use self::lists::{Kind, ListRead, PageError, PageStep, ServerLists};
use self::pending::{PendingPurpose, PendingRequest, PendingRequests, RelayedCallOrigin};
use self::relay::OpenQuestions;
use self::rounds::ResultType;
use self::stateless::StatelessState;
use crate::audience::AudienceHandle;
use crate::batcher::WallClock;
use crate::byte_budget::ServerMemory;
use crate::calls::{
    AdmittedRequest, CallPortReceiver, CallerRequest, ClientRelay, InstanceCounters, OutboundRequest, SessionCommand,
    server_error,
};
use crate::model::catalogue::Catalogue;
use crate::model::exit::{CallError, CallFate};
use crate::model::remote::ServerInfo;
use crate::model::secret::SecretMask;
use crate::model::spec::InstanceSpec;
use crate::rules::jitter::JitterRng;
use crate::rules::output::excerpt;
use crate::rules::{era, retry};
use crate::seam::RequestHeaders;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::rpc::{MessageKind as Sort, MessageView, utf8_text};

/// Number of malformed messages logged one by one; after that the session logs each doubling.
const MALFORMED_LOGGED: u64 = 5;
/// Maximum length in bytes of server text quoted in a log or an error.
const QUOTED_MAX: usize = 200;
// Bytes logged of a stdout line that is not JSON-RPC.
const PRINTED_BYTES_MAX: usize = 4 * 1024;

/// Session events, reported to the team as they happen.
///
/// `Printed` contains a non-JSON-RPC stdout line from before the end of the handshake. `DiscoveryFailed` contains the
/// reason and the pause that the server requested. `Recovered` means that a call succeeded after the lists could not be
/// read. `Leans` means that the server rejected the opening request of the other era and this one is tried next.
/// `Degraded` and `Restored` contain the number of failed checks in a row and the last error.
#[derive(Debug)]
pub(crate) enum SessionEvent {
    FirstByte,
    StdoutLine(String),
    Initialized(Arc<ServerInfo>),
    Discovered(Arc<Catalogue>),
    DiscoveryFailed(String, Duration),
    Recovered,
    EraChanged(Era),
    Degraded(u32, String),
    Restored(u32, Option<String>),
}

/// Messages from a worker to its session.
///
/// `Drain` ends the session after the calls in flight; the port is already closed. `Hurry` shortens the grace period of
/// an end, because a caller waits for it. `Check` asks for a check at once: the machine was suspended, and no monotonic
/// clock measured that time.
#[derive(Debug, Clone)]
pub(crate) enum SessionControl {
    Stop,
    ShortenGrace,
    Drain,
    Discover,
    Adopt(Arc<InstanceSpec>),
    Check,
}

/// Transport-independent arguments of a session.
///
/// `since` is the start of the run; the handshake timeout counts from there. `discover` is true if the session reads
/// the lists by itself after the handshake. `era` is tried first. `printed` receives stdout lines that are not
/// JSON-RPC; it is `None` for a remote server.
pub(crate) struct SessionArgs {
    pub(crate) spec: Arc<InstanceSpec>,
    pub(crate) port: CallPortReceiver,
    pub(crate) control: mpsc::UnboundedReceiver<SessionControl>,
    pub(crate) counters: Arc<InstanceCounters>,
    pub(crate) wall: WallClock,
    pub(crate) since: Instant,
    pub(crate) discover: bool,
    pub(crate) era: Option<Era>,
    pub(crate) rng: JitterRng,
    pub(crate) report_event: Box<dyn Fn(SessionEvent) + Send>,
    pub(crate) stdout_lines: Option<mpsc::Sender<String>>,
    pub(crate) memory: ServerMemory,
    pub(crate) audience: AudienceHandle,
}

/// Outgoing side of a transport. It accepts messages without blocking.
trait Outlet {
    /// True if each request has its own exchange (HTTP). Such a request may be sent more than once and may belong to
    /// another era than the session; closing the exchange tells the server that the response is no longer awaited.
    const REPEATS: bool;
    fn request(&mut self, id: u64, purpose: RequestPhase, routing: Option<Box<RequestHeaders>>, parts: &[&str]);
    fn notify(&mut self, parts: &[&str]);
    fn respond(&mut self, parts: &[&str]);
    fn send_initialized(&mut self, version: &str, parts: &[&str]);
    /// Ends the exchange of a request whose response is no longer awaited.
    fn abandon(&mut self, id: u64);
    fn has_room(&self) -> bool;
    /// Returns true if the server sends requests without reading the responses.
    fn is_flooded(&self) -> bool;
    /// Returns the offset in bytes of the next message, counted over all messages ever queued.
    fn position(&self) -> u64;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestPhase {
    Handshake,
    InSession,
}

/// Outcome of a message from the server.
///
/// `Answer` is a result, `Refusal` an error response, which only proves that the server is reachable. `Doubted` is an
/// error response that may mean that the server no longer has sessions; `OtherEra` means that the server said so.
/// `CheckRefused` is an error response to a check; `unknown` means that the server does not know the method. `Flooded`
/// means that the server sends requests without reading the responses.
#[derive(Debug)]
enum MessageOutcome {
    Nothing,
    ResultResponse,
    ErrorResponse,
    SessionDoubted,
    Checked,
    CheckRefused { unknown: bool, other_era: bool, why: String },
    Initialized,
    HandshakeRefused(HandshakeRefusal),
    OtherEra(String),
    Flooded,
}

/// Kind of a deadline that passed. `Refused` is a handshake timeout that the refusal of the other era explains better.
#[derive(Debug)]
enum PassedDeadline {
    Call,
    List,
    Check,
    Handshake,
    HandshakeRefused(HandshakeRefusal),
}

struct SessionCore<O> {
    spec: Arc<InstanceSpec>,
    outlet: O,
    port: CallPortReceiver,
    counters: Arc<InstanceCounters>,
    wall: WallClock,
    rng: JitterRng,
    report_event: Box<dyn Fn(SessionEvent) + Send>,
    stdout_lines: Option<mpsc::Sender<String>>,
    discover: bool,
    // Requests waiting for room, in order; some may already be cancelled.
    unsent: VecDeque<(u64, OutboundRequest)>,
    calls: PendingRequests,
    initialized_at: Option<Instant>,
    lists: ServerLists,
    draining: bool,
    audience: AudienceHandle,
    questions: OpenQuestions,
    era: Era,
    handshake: HandshakeProgress,
    stateless: Option<Box<StatelessState>>,
}

impl<O: Outlet> SessionCore<O> {
    fn new(common: SessionArgs, outlet: O) -> (Self, mpsc::UnboundedReceiver<SessionControl>) {
        let SessionArgs {
            spec,
            port,
            control,
            counters,
            wall,
            since,
            discover,
            era,
            rng: dice,
            report_event: news,
            stdout_lines: printed,
            memory,
            audience: stage,
        } = common;
        let mut this = Self {
            spec,
            outlet,
            port,
            counters,
            wall,
            rng: dice,
            report_event: news,
            stdout_lines: printed,
            discover,
            unsent: VecDeque::new(),
            calls: PendingRequests::default(),
            initialized_at: None,
            lists: ServerLists::new(!discover, memory.lists),
            draining: false,
            audience: stage,
            questions: OpenQuestions::default(),
            era: Era::Sessions,
            handshake: HandshakeProgress::default(),
            stateless: None,
        };
        this.begin_handshake(since, era);
        (this, control)
    }

    fn adopt(&mut self, spec: Arc<InstanceSpec>) {
        self.port.gate.calls_max.store(spec.policy.session.calls_in_flight_max, Ordering::Relaxed);
        self.spec = spec;
    }

    fn wake_at(&self) -> Option<Instant> {
        let first = self.calls.deadlines.first().map(|(at, _)| *at);
        first.into_iter().chain(self.lists.next_read_at).chain(self.next_listen_at()).min()
    }

    fn on_due(&mut self, now: Instant) {
        if self.lists.next_read_at.is_some_and(|at| now >= at) {
            self.read_lists();
        }
        if self.next_listen_at().is_some_and(|at| now >= at) {
            self.listen();
        }
    }

    fn has_drained(&self) -> bool {
        self.draining && self.port.gate.in_flight() == 0
    }

    // ---- the lists ----

    fn read_lists(&mut self) {
        self.lists.next_read_at = None;
        if self.lists.reading.is_some() {
            // Only one read runs at a time; changes during a read trigger another one.
            self.lists.next_read_at = Some(Instant::now() + self.spec.policy.session.list_changed_debounce);
            return;
        }
        // A strict read leaves out tools whose marked parameters cannot be sent in headers.
        let strict = O::REPEATS && self.era == Era::Stateless;
        self.lists.reading = Some(Box::new(ListRead::new(strict, &self.lists.memory, Instant::now())));
        self.request_list_page(Kind::Tools, None);
    }

    fn schedule_list_retry(&mut self, pause: Duration) {
        // The known lists stay in use. Before the first successful read the slot schedules retries, because the
        // instance waits for its lists.
        if self.lists.known {
            self.lists.failures += 1;
            let policy = &self.spec.policy.reconnect;
            let delay = policy.backoff().delay(self.lists.failures);
            let delay = self.rng.jitter(delay, policy.jitter_percent).max(pause);
            self.lists.schedule_read(Instant::now() + delay);
        }
    }

    fn request_list_page(&mut self, kind: Kind, cursor: Option<&str>) {
        let params = cursor.map(|cursor| format!(r#"{{"cursor":{cursor}}}"#));
        let (now, policy) = (Instant::now(), &self.spec.policy.session);
        let began = self.lists.reading.as_ref().map_or(now, |reading| reading.began_at);
        let deadline = (now + policy.request_timeout).min(began + policy.list_timeout);
        self.send_own_request(kind.method(), params.as_deref(), PendingPurpose::List, deadline);
    }

    fn on_list(&mut self, answer: Result<&RawValue, CallError>) {
        let Some(mut reading) = self.lists.reading.take() else { return };
        let (spec, kind, now) = (self.spec.clone(), reading.kind, Instant::now());
        let policy = &spec.policy.session;
        let left_out = |why: &str, what: &str| {
            let (why, list) = (masked_excerpt(&spec.mask, why), kind.method());
            tracing::warn!(instance = %spec.name, list, why, "{what}");
        };
        let skipped = |why: String| left_out(&why, "an entry without a usable definition is left out");
        let page = match answer {
            Ok(result) => reading.add_page(result, policy, now, skipped).map_err(|error| (error, Duration::ZERO)),
            // A server that does not offer tools may reject `tools/list` with any error; its list is empty.
            Err(CallError::Server { code, .. })
                if code == METHOD_NOT_FOUND || (kind == Kind::Tools && !self.lists.offers.tools) =>
            {
                Ok(PageStep::End)
            }
            Err(error) => {
                let pause = match &error {
                    CallError::Remote { failure, .. } => retry::requested_pause(&failure.kind),
                    _ => Duration::ZERO,
                };
                let error =
                    reading.timeout_error(policy, now).unwrap_or_else(|| PageError::Unreadable(error.to_string()));
                Err((error, pause))
            }
        };
        match page {
            Ok(PageStep::NextPage(cursor)) => {
                self.lists.reading = Some(reading);
                return self.request_list_page(kind, Some(&cursor));
            }
            Ok(PageStep::PageLimit(pages)) => {
                left_out(&format!("more than {pages} pages"), "the rest of a list is left out");
            }
            Ok(PageStep::End) => {}
            Err((PageError::OutOfBounds(why), pause)) => return self.fail_list_read(&why, pause),
            Err((PageError::Unreadable(why), pause)) if kind == Kind::Tools => return self.fail_list_read(&why, pause),
            // Only an unreadable list of tools fails the whole read.
            Err((PageError::Unreadable(why), pause)) => {
                reading.mark_unreadable(masked_excerpt(&spec.mask, &why), pause);
            }
        }
        match reading.next_list(self.lists.offers, now) {
            Ok(next) => {
                let kind = next.kind;
                self.lists.reading = Some(next);
                self.request_list_page(kind, None);
            }
            Err(all) => {
                let (catalogue, unread) = *all;
                self.update_marked_params(&catalogue);
                (self.lists.failed, self.lists.known) = (false, true);
                if catalogue.unreadable.is_empty() {
                    self.lists.failures = 0;
                } else {
                    self.schedule_list_retry(unread.pause);
                }
                // Logged only if something changed since the last report.
                if let Some(news) = self.lists.record_if_changed(catalogue) {
                    for (list, why) in news.unreadable.iter().map(|list| list.method()).zip(unread.reasons) {
                        let what = "cannot read a list; the last known list stays in use";
                        tracing::warn!(instance = %spec.name, list, why, "{what}");
                    }
                    (self.report_event)(SessionEvent::Discovered(news));
                }
            }
        }
    }

    fn fail_list_read(&mut self, why: &str, pause: Duration) {
        // The lists that were known before stay in use.
        self.lists.failed = true;
        self.schedule_list_retry(pause);
        (self.report_event)(SessionEvent::DiscoveryFailed(masked_excerpt(&self.spec.mask, why), pause));
    }

    // ---- what the server sends ----

    fn on_dropped(&self, bytes: usize) {
        // A request that waits for the dropped message times out.
        let before = self.counters.record_malformed();
        if before < MALFORMED_LOGGED || before.is_power_of_two() {
            let why = "dropped a message of the server: the memory budget for messages is exhausted";
            tracing::warn!(instance = %self.spec.name, bytes, count = before + 1, "{why}");
        }
    }

    /// Handles one complete message. `of` is the satellite's request on whose stream it arrived, if known.
    fn on_message(&mut self, message: &Bytes, of: Option<u64>, now: Instant) -> MessageOutcome {
        if message.trim_ascii().is_empty() {
            return MessageOutcome::Nothing;
        }
        let text = match utf8_text(message.clone()) {
            Ok(text) => text,
            Err(why) => return self.on_malformed(message, &why.to_string()),
        };
        match MessageView::parse(&text) {
            Ok(view) => {
                self.counters.record_message((self.wall)());
                self.on_view(&view, &text, of, now)
            }
            Err(why) => self.on_malformed(message, &why.to_string()),
        }
    }

    fn on_final_message(&mut self, message: &Bytes, now: Instant) {
        // The session ends, so only responses matter.
        if let Ok(text) = utf8_text(message.clone())
            && let Ok(view @ MessageView { kind: Sort::Result | Sort::Error, .. }) = MessageView::parse(&text)
        {
            self.on_response(&view, &text, now);
        }
    }

    fn on_view(&mut self, view: &MessageView<'_>, text: &ByteString, of: Option<u64>, now: Instant) -> MessageOutcome {
        match view.kind {
            // The stateless era has no way to answer a request of the server.
            Sort::Request if self.era == Era::Stateless => {
                self.on_malformed(text.as_bytes(), "requests of a server are permitted in sessions only")
            }
            Sort::Request => {
                self.port.gate.record_activity(now);
                self.on_server_request(view, text, of)
            }
            Sort::Notification => {
                self.port.gate.record_activity(now);
                self.on_notification(view, text, of, now);
                MessageOutcome::Nothing
            }
            Sort::Result | Sort::Error if view.id.is_some() => self.on_response(view, text, now),
            Sort::Result | Sort::Error => {
                let error = view.outcome.map_or("", RawValue::get);
                self.on_malformed(error.as_bytes(), "an error response without an id")
            }
        }
    }

    fn on_response(&mut self, view: &MessageView<'_>, text: &ByteString, now: Instant) -> MessageOutcome {
        // Ignores unknown ids and late responses to requests that timed out.
        let Some(id) = view.id.and_then(|id| id.get().parse().ok()) else { return MessageOutcome::Nothing };
        let Some(pending) = self.calls.remove(id) else { return MessageOutcome::Nothing };
        // Responses to the satellite's own requests are no activity, so they do not keep an idle server awake.
        if matches!(pending.purpose, PendingPurpose::Caller { .. } | PendingPurpose::Handshake) {
            self.port.gate.record_activity(now);
        }
        let is_result = view.kind == Sort::Result;
        let heard = if is_result { MessageOutcome::ResultResponse } else { MessageOutcome::ErrorResponse };
        let spec = self.spec.clone();
        let answer = || match view.outcome {
            Some(result) if is_result => Ok(result),
            error => Err(server_error(error, &spec.mask)),
        };
        match pending.purpose {
            PendingPurpose::Caller { .. } => self.on_caller_response(id, pending, view, text, now),
            PendingPurpose::Handshake => self.on_handshake(id, answer()),
            PendingPurpose::List => {
                self.on_list(answer());
                heard
            }
            PendingPurpose::Check => match answer() {
                Ok(_) => MessageOutcome::Checked,
                Err(error) => MessageOutcome::CheckRefused {
                    unknown: matches!(error, CallError::Server { code: METHOD_NOT_FOUND, .. }),
                    other_era: era::is_era_refused(self.era, &error),
                    why: masked_excerpt(&self.spec.mask, &error.to_string()),
                },
            },
            PendingPurpose::Listen => {
                let is_unknown = matches!(answer(), Err(CallError::Server { code: METHOD_NOT_FOUND, .. }));
                self.on_stream_ended(id, is_unknown);
                heard
            }
            PendingPurpose::Discover => {
                self.on_discovered(answer());
                heard
            }
        }
    }

    fn on_caller_response(
        &mut self,
        id: u64,
        pending: PendingRequest,
        view: &MessageView<'_>,
        text: &ByteString,
        now: Instant,
    ) -> MessageOutcome {
        // If the client wrote the call in the stateless era (`through`), it interprets the result itself.
        let is_result = view.kind == Sort::Result;
        let through = pending.is_passthrough();
        let mut is_doubted = false;
        match view.outcome {
            Some(result) if is_result && self.era == Era::Stateless && !through => match rounds::result_type(result) {
                ResultType::Complete => {}
                ResultType::InputRequired => {
                    self.on_input_required(id, pending, result);
                    return MessageOutcome::ResultResponse;
                }
                ResultType::Unknown => {
                    let message = "the server returned a result of an unknown type".to_owned();
                    pending.fail(CallError::Server { code: INTERNAL_ERROR, message, data: None });
                    return MessageOutcome::ResultResponse;
                }
            },
            error if !is_result && O::REPEATS && !through => {
                if let CallError::Server { code, message, data } = server_error(error, &self.spec.mask) {
                    if self.era == Era::Sessions && era::has_stateless_support(code, data.as_deref()) {
                        // Closes the port before the caller learns of it, so that no call enters in between. The server
                        // rejected the form of this request and did not execute it.
                        self.port.commands.close();
                        let (fate, reason) = (CallFate::NotSent, message.clone());
                        pending.fail(CallError::Terminated { fate, reason });
                        return MessageOutcome::OtherEra(masked_excerpt(&self.spec.mask, &message));
                    }
                    // A server with sessions may use this code for something else; a health check finds out.
                    is_doubted = self.era == Era::Sessions && era::is_stateless_error(code);
                    if self.era == Era::Stateless && code == HEADER_MISMATCH {
                        // The tool may now expect other parameters in headers.
                        self.lists.schedule_read(now);
                    }
                }
            }
            error if !is_result && through => self.on_stateless_refused(&server_error(error, &self.spec.mask)),
            _ => {}
        }
        if is_result {
            self.counters.record_check((self.wall)());
            // The lists could not be read, but the server answers now: retry them before their time.
            if self.lists.reading.is_none() && std::mem::take(&mut self.lists.failed) {
                (self.report_event)(SessionEvent::Recovered);
            }
        }
        if let PendingPurpose::Caller { ticket, .. } = pending.purpose {
            ticket.answer(view, text, &self.spec.mask);
        }
        match (is_result, is_doubted) {
            (true, _) => MessageOutcome::ResultResponse,
            (false, false) => MessageOutcome::ErrorResponse,
            (false, true) => MessageOutcome::SessionDoubted,
        }
    }

    fn on_notification(&mut self, view: &MessageView<'_>, text: &ByteString, of: Option<u64>, now: Instant) {
        match view.method.as_deref() {
            Some("notifications/progress") => self.on_progress(view, text, now),
            Some("notifications/cancelled") => self.on_cancelled(view, text),
            _ if self.on_stream_notification(view, text, of, now) => {}
            method => {
                if self.is_list_changed(method) {
                    self.lists.schedule_read(now + self.spec.policy.session.list_changed_debounce);
                }
                // The method is arbitrary server text; skip the masking if nothing logs it.
                if tracing::enabled!(tracing::Level::TRACE) {
                    let method = masked_excerpt(&self.spec.mask, method.unwrap_or_default());
                    tracing::trace!(instance = %self.spec.name, method, "notification");
                }
                self.forward_notification(view, text, of);
            }
        }
    }

    fn is_list_changed(&self, method: Option<&str>) -> bool {
        // Before the end of the handshake no list can have changed.
        let is_of_a_list = matches!(
            method,
            Some(
                "notifications/tools/list_changed"
                    | "notifications/resources/list_changed"
                    | "notifications/prompts/list_changed"
            )
        );
        is_of_a_list && self.initialized_at.is_some()
    }

    fn on_malformed(&self, message: &[u8], why: &str) -> MessageOutcome {
        let before = self.counters.record_malformed();
        if before < MALFORMED_LOGGED || before.is_power_of_two() {
            let text =
                masked_excerpt(&self.spec.mask, &String::from_utf8_lossy(&message[..message.len().min(64 * 1024)]));
            let why = masked_excerpt(&self.spec.mask, why);
            tracing::warn!(
                instance = %self.spec.name, why, line = text, count = before + 1,
                "skipped a message of the server"
            );
            if self.initialized_at.is_none()
                && self.stdout_lines.is_some()
                && let Some(line) = excerpt(&text, &self.spec.mask)
            {
                (self.report_event)(SessionEvent::StdoutLine(line));
            }
        }
        // If the channel is full, the line is dropped. It is counted, and the first ones appear in the satellite's log.
        if let Some(Ok(place)) = self.stdout_lines.as_ref().map(mpsc::Sender::try_reserve) {
            let line = String::from_utf8_lossy(&message[..message.len().min(PRINTED_BYTES_MAX)]);
            place.send(masked_excerpt(&self.spec.mask, line.trim_end()));
        }
        MessageOutcome::Nothing
    }

    // ---- calls ----

    fn on_command(&mut self, command: SessionCommand) {
        match command {
            SessionCommand::Request(asked) => {
                let AdmittedRequest { id, request: wanted, started, timeout, repeatable, ticket } = asked;
                self.port.gate.record_activity(started);
                let Some(ticket) = self.answer_locally(id, &wanted, ticket) else { return };
                let behalf = match &wanted {
                    OutboundRequest::Relay(ClientRelay { message, origin, .. }) => {
                        Some(Box::new(RelayedCallOrigin { origin: *origin, token: message.token().map(Into::into) }))
                    }
                    OutboundRequest::Request(_) => None,
                };
                let through = matches!(wanted, OutboundRequest::Relay(ClientRelay { era: Era::Stateless, .. }));
                let purpose = PendingPurpose::Caller {
                    ticket,
                    admitted_id: id,
                    started,
                    timeout,
                    repeatable,
                    passthrough: through,
                    client_call: behalf,
                };
                self.calls.insert(id, PendingRequest::new(purpose, started + timeout));
                self.unsent.push_back((id, wanted));
                self.send_queued();
            }
            SessionCommand::Cancel { id, notification: words } => {
                if let Some((id, pending)) = self.calls.remove_caller(id) {
                    self.port.gate.record_activity(Instant::now());
                    self.withdraw_inputs(id);
                    match words {
                        Some(words) => self.cancel_with(id, &pending, &words.with_cancelled_id(&id.to_string())),
                        None => self.cancel(id, &pending, "the caller went away"),
                    }
                }
            }
            SessionCommand::Notify { .. }
            | SessionCommand::Answer { .. }
            | SessionCommand::Decline { .. }
            | SessionCommand::NoRoots { .. } => {
                self.on_client_command(command);
            }
            SessionCommand::Discover(discover) => self.on_discover(discover),
        }
    }

    fn send_queued(&mut self) {
        // A queued request's deadline keeps running: a server that does not read must not block its callers.
        while self.outlet.has_room()
            && let Some((id, wanted)) = self.unsent.pop_front()
        {
            let position = self.outlet.position();
            let Some(pending) = self.calls.pending.get_mut(&id) else { continue };
            pending.output_offset = Some(position);
            pending.attempts += 1;
            let number = id.to_string();
            let is_of_it = matches!(wanted, OutboundRequest::Relay(ClientRelay { era: Era::Stateless, .. }));
            match &wanted {
                _ if self.era == Era::Stateless || is_of_it => {
                    let rounds = pending.rounds.as_ref().map(|rounds| rounds.input_members());
                    self.send_stateless(id, &wanted, &rounds.unwrap_or_default());
                }
                OutboundRequest::Relay(ClientRelay { message, .. }) => {
                    self.outlet.request(
                        id,
                        RequestPhase::InSession,
                        None,
                        &message.with_id_and_token(&number, &number),
                    );
                }
                OutboundRequest::Request(CallerRequest::Tool { name, arguments, repeatable: _ }) => {
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
                    self.outlet.request(id, RequestPhase::InSession, None, &parts);
                }
                OutboundRequest::Request(CallerRequest::Method { method, params }) => {
                    let params = params.as_deref().map(RawValue::get);
                    put_request(&mut self.outlet, id, RequestPhase::InSession, None, method, params);
                }
            }
            // Keeps the request where it may be sent again: remote calls for a retry, stateless calls with the
            // requested input.
            let is_kept = O::REPEATS || self.era == Era::Stateless;
            if let Some(pending) = self.calls.pending.get_mut(&id).filter(|_| is_kept) {
                pending.request = Some(wanted);
            }
        }
    }

    fn send_stateless(&mut self, id: u64, wanted: &OutboundRequest, input: &[(&'static str, String)]) {
        // The request contains all context. `input` contains the answers to the server's requests for input.
        let number = id.to_string();
        let input: Vec<(&str, &str)> = input.iter().map(|(name, value)| (*name, &**value)).collect();
        match wanted {
            OutboundRequest::Relay(ClientRelay { message, era: Era::Stateless, .. }) => {
                let routing = self.routing_headers(message.method().unwrap_or_default(), message.params());
                self.outlet.request(id, RequestPhase::InSession, routing, &message.with_id_and_token(&number, &number));
            }
            OutboundRequest::Relay(ClientRelay { message, client, .. }) => {
                let token = message.token().map(|_| &*number);
                let who = RequestIdentity::Client(client.as_deref());
                let params = RequestMeta { identity: who, token, level: self.log_level(), input: &input }
                    .wrap_params(message.params());
                let routing = self.routing_headers(message.method().unwrap_or_default(), Some(&params));
                self.outlet.request(
                    id,
                    RequestPhase::InSession,
                    routing,
                    &[&message.with_id_and_params(&number, &params)],
                );
            }
            OutboundRequest::Request(request) => {
                let (method, params) = envelope::method_and_params(request);
                let token = matches!(request, CallerRequest::Tool { .. }).then_some(&*number);
                let envelope = RequestMeta { identity: RequestIdentity::Caller, token, level: None, input: &input };
                let params = envelope.wrap_params(params.as_deref());
                let routing = self.routing_headers(method, Some(&params));
                put_request(&mut self.outlet, id, RequestPhase::InSession, routing, method, Some(&params));
            }
        }
    }

    fn routing_headers(&self, method: &str, params: Option<&str>) -> Option<Box<RequestHeaders>> {
        O::REPEATS.then(|| Box::new(envelope::routing_headers(method, params, |tool| self.marked_params(tool))))
    }

    fn resend(&mut self, id: u64) {
        // The call may have been cancelled meanwhile. The request gets a new id, so that a late response or late
        // progress is not taken for one of this attempt.
        let Some(request) = self.calls.pending.get_mut(&id).and_then(|pending| pending.request.take()) else { return };
        let Some(pending) = self.calls.remove(id) else { return };
        let id = self.port.gate.next_id.fetch_add(1, Ordering::Relaxed);
        self.calls.insert(id, pending);
        self.unsent.push_back((id, request));
        self.send_queued();
    }

    fn send_own_request(
        &mut self,
        method: &str,
        params: Option<&str>,
        purpose: PendingPurpose,
        deadline: Instant,
    ) -> u64 {
        let id = self.port.gate.next_id.fetch_add(1, Ordering::Relaxed);
        let starts_at = Some(self.outlet.position());
        let pending =
            PendingRequest { output_offset: starts_at, attempts: 1, ..PendingRequest::new(purpose, deadline) };
        let of = if matches!(pending.purpose, PendingPurpose::Handshake) {
            RequestPhase::Handshake
        } else {
            RequestPhase::InSession
        };
        if self.era == Era::Stateless || pending.is_sessionless() {
            let params = RequestMeta::new(RequestIdentity::Satellite).wrap_params(params);
            let routing = self.routing_headers(method, Some(&params));
            put_request(&mut self.outlet, id, of, routing, method, Some(&params));
        } else {
            put_request(&mut self.outlet, id, of, None, method, params);
        }
        self.calls.insert(id, pending);
        id
    }

    fn cancel(&mut self, id: u64, pending: &PendingRequest, reason: &str) {
        let number = id.to_string();
        let words = [
            r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"#,
            &number,
            r#","reason":""#,
            reason,
            r#""}}"#,
        ];
        self.cancel_with(id, pending, &words);
    }

    fn cancel_with(&mut self, id: u64, pending: &PendingRequest, words: &[&str]) {
        if !pending.was_sent() {
            return self.unsent.retain(|(waiting, _)| *waiting != id);
        }
        self.outlet.abandon(id);
        // Over HTTP the end of the exchange cancels a stateless request; no notification is needed.
        if !(O::REPEATS && (self.era == Era::Stateless || pending.is_sessionless())) {
            self.outlet.notify(words);
        }
    }

    // ---- deadlines ----

    fn expire_next(&mut self, now: Instant) -> Option<PassedDeadline> {
        // A loop instead of recursion: thousands of calls may have the same deadline.
        loop {
            let (at, id) = self.calls.deadlines.first().copied()?;
            if now < at {
                return None;
            }
            if self.extend_for_open_question(id, now) {
                continue;
            }
            let pending = self.calls.remove(id)?;
            if let PendingPurpose::Caller { .. } | PendingPurpose::List = pending.purpose {
                self.withdraw_inputs(id);
                self.cancel(id, &pending, "timed out");
            }
            let fate =
                if self.calls.may_have_reached_server(&pending) { CallFate::TimedOut } else { CallFate::NotSent };
            match pending.purpose {
                PendingPurpose::Caller { ticket, started, .. } => {
                    self.port.gate.record_activity(now);
                    ticket.fail(CallError::TimedOut { after: at - started, fate });
                    return Some(PassedDeadline::Call);
                }
                PendingPurpose::List => {
                    self.on_list(Err(CallError::TimedOut { after: self.spec.policy.session.request_timeout, fate }));
                    return Some(PassedDeadline::List);
                }
                PendingPurpose::Check => {
                    self.outlet.abandon(id);
                    return Some(PassedDeadline::Check);
                }
                PendingPurpose::Handshake => {
                    // Over a pipe the response may still arrive.
                    self.outlet.abandon(id);
                    if let Some(late) = self.on_handshake_timeout(id, pending) {
                        return Some(late);
                    }
                }
                PendingPurpose::Listen => {
                    self.outlet.abandon(id);
                    self.on_stream_ended(id, false);
                }
                PendingPurpose::Discover => {
                    self.outlet.abandon(id);
                    self.on_discovered(Err(CallError::TimedOut { after: era::DISCOVER_WAIT_MAX, fate }));
                }
            }
        }
    }

    // ---- the end ----

    fn close(&mut self, reason: &str) {
        self.port.commands.close();
        self.calls.fail_all(reason);
        self.end_audience();
        while let Ok(command) = self.port.commands.try_recv() {
            if let SessionCommand::Request(asked) = *command {
                let error = CallError::Terminated { fate: CallFate::NotSent, reason: reason.to_owned() };
                asked.ticket.fail(error);
            }
        }
    }
}

fn put_request(
    outlet: &mut impl Outlet,
    id: u64,
    of: RequestPhase,
    routing: Option<Box<RequestHeaders>>,
    method: &str,
    params: Option<&str>,
) {
    let method = serde_json::Value::from(method).to_string();
    let id_text = id.to_string();
    let (before, params) = params.map_or(("", ""), |params| (r#","params":"#, params));
    let parts = [r#"{"jsonrpc":"2.0","id":"#, &id_text, r#","method":"#, &method, before, params, "}"];
    outlet.request(id, of, routing, &parts);
}

enum SessionWork<R> {
    Command(Box<SessionCommand>),
    Read(R),
}

/// Receives a command or reads from the server, whichever is ready first. If both are ready, `reads_first` decides; the
/// session alternates it so that a flood from one side does not starve the other. Cancel-safe if `read` is.
async fn next_work<R>(
    commands: &mut mpsc::UnboundedReceiver<Box<SessionCommand>>,
    read: impl Future<Output = R>,
    reads_first: bool,
) -> SessionWork<R> {
    let mut read = pin!(read);
    poll_fn(|cx| {
        let mut command = |cx: &mut Context<'_>| match commands.poll_recv(cx) {
            Poll::Ready(Some(command)) => Poll::Ready(SessionWork::Command(command)),
            // After the command channel is closed, messages of the server are still read.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        };
        if !reads_first && let ready @ Poll::Ready(_) = command(cx) {
            return ready;
        }
        match read.as_mut().poll(cx) {
            Poll::Ready(read) => Poll::Ready(SessionWork::Read(read)),
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

/// Returns server text for a log or an error, masked and then cut to `QUOTED_MAX`. Masking first leaves no part of a
/// secret at the cut.
fn masked_excerpt(mask: &SecretMask, text: &str) -> String {
    let mut text = mask.apply(text);
    if text.len() > QUOTED_MAX {
        text.truncate(text.floor_char_boundary(QUOTED_MAX));
        text.push('…');
    }
    text
}
