//! The session itself: what it does with messages, commands and time. Further parts of it are in the modules named for
//! their subject.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use bytestring::ByteString;
use mcp_satellite_model::byte_budget::ByteBudget;
use mcp_satellite_model::catalogue::Catalogue;
use mcp_satellite_model::exit::{CallError, CallFate};
use mcp_satellite_model::policy::ReconnectPolicy;
use mcp_satellite_model::remote::ServerInfo;
use mcp_satellite_model::secret::SecretMask;
use mcp_satellite_model::spec::InstanceSpec;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::{HEADER_MISMATCH, INTERNAL_ERROR, METHOD_NOT_FOUND};
use mcp_satellite_protocol::header::RequestHeaders;
use mcp_satellite_protocol::rpc::{MessageKind, MessageView, RpcMessage, utf8_text};
use serde_json::value::RawValue;

use crate::call::{AdmittedRequest, CallerRequest, ClientRelay, OutboundRequest, SessionCommand, server_error};
use crate::envelope::{self, RequestIdentity, RequestMeta};
use crate::era;
use crate::gate::CallGate;
use crate::handshake::{HandshakeProgress, HandshakeRefusal};
use crate::lists::{Kind, ListRead, PageError, PageStep, ServerLists};
use crate::origin::{CallOrigin, MessageCause};
use crate::pending::{PendingPurpose, PendingRequest, PendingRequests, RefusedCall, RelayedCallOrigin};
use crate::relay::OpenQuestions;
use crate::rounds::{self, ResultType};
use crate::stateless::StatelessState;

// Maximum length in bytes of server text quoted in a log or an error.
const QUOTED_MAX: usize = 200;

/// Session events, reported as they happen.
#[derive(Debug)]
pub enum SessionEvent {
    /// The server sent its first byte.
    FirstByte,
    /// The server printed a line that is no message, before the end of the handshake.
    StdoutLine(String),
    /// The handshake is complete.
    Initialized(Arc<ServerInfo>),
    /// The lists were read and differ from the last report.
    Discovered(Arc<Catalogue>),
    /// The lists could not be read: the reason, and the pause that the server requested.
    DiscoveryFailed(String, Duration),
    /// A call succeeded after the lists could not be read.
    Recovered,
    /// The server rejected the opening request of the other era; this one is tried next.
    EraChanged(Era),
    /// Health checks failed: the number of failures in a row, and the last error.
    Degraded(u32, String),
    /// A health check succeeded after failures: their number, and the last error.
    Restored(u32, Option<String>),
}

/// Arguments of a session.
pub struct SessionArgs {
    /// The instance.
    pub spec: Arc<InstanceSpec>,
    /// State shared with the port through which calls arrive.
    pub gate: Arc<CallGate>,
    /// Start of the run; the handshake timeout counts from there.
    pub since: Instant,
    /// True if the session reads the lists by itself after the handshake.
    pub reads_lists: bool,
    /// Era in which the server was opened last.
    pub era: Option<Era>,
    /// Budget for the lists of all servers.
    pub lists_memory: Arc<ByteBudget>,
}

/// Outgoing side of a transport. It accepts messages without blocking; each is the concatenation of its parts.
pub trait Outlet {
    /// True if each request has its own exchange (HTTP). Such a request may be sent more than once and may belong to
    /// another era than the session; closing the exchange tells the server that the response is no longer awaited.
    const REPEATS: bool;
    /// Sends a request.
    fn request(&mut self, id: u64, phase: RequestPhase, routing: Option<Box<RequestHeaders>>, parts: &[&str]);
    /// Sends a notification.
    fn notify(&mut self, parts: &[&str]);
    /// Sends a response.
    fn respond(&mut self, parts: &[&str]);
    /// Sends the notification that ends the handshake.
    fn send_initialized(&mut self, version: &str, parts: &[&str]);
    /// Ends the exchange of a request whose response is no longer awaited.
    fn abandon(&mut self, id: u64);
    /// Returns true if further requests may be sent.
    fn has_room(&self) -> bool;
    /// Returns true if the server sends requests without reading the responses.
    fn is_flooded(&self) -> bool;
    /// Returns the offset in bytes of the next message, counted over all messages ever queued.
    fn position(&self) -> u64;
}

/// Receiver of everything that a session reports, and source of the delays that it draws.
pub trait SessionHost {
    /// Reports an event.
    fn report(&self, event: SessionEvent);
    /// Counts a message of the server.
    fn on_message(&self);
    /// Counts a proof that the server works: the handshake, or the result of a call.
    fn on_server_proved(&self);
    /// Counts and logs text of the server that is not a message, or not one that the server may send.
    fn on_malformed(&self, spec: &InstanceSpec, text: &[u8], why: &str, is_initialized: bool);
    /// Returns the delay after this number of consecutive failures, with jitter.
    fn reconnect_delay(&mut self, policy: &ReconnectPolicy, failures: u32) -> Duration;
    /// Forwards a notification of the server.
    fn on_notification(&self, cause: MessageCause, message: RpcMessage);
    /// Forwards progress of a call; the message contains the client's own token.
    fn on_progress(&self, origin: CallOrigin, message: RpcMessage);
    /// Forwards a request of the server. A command with the number of the question answers it.
    fn on_request(&self, cause: MessageCause, question: u64, message: RpcMessage);
    /// Withdraws a question.
    fn on_request_withdrawn(&self, question: u64, message: RpcMessage);
    /// Reports the start of the session to the clients.
    fn on_session_started(&self);
    /// Reports the end of the session and of its questions to the clients.
    fn on_session_ended(&mut self);
}

/// Phase to which a request belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestPhase {
    /// The request opens the session.
    Handshake,
    /// Any other request.
    InSession,
}

/// Outcome of a message from the server.
#[derive(Debug)]
pub enum MessageOutcome {
    /// Nothing that concerns the transport.
    Nothing,
    /// A result.
    ResultResponse,
    /// An error response, which only proves that the server is reachable.
    ErrorResponse,
    /// An error response that may mean that the server no longer has sessions.
    SessionDoubted,
    /// The answer to a check.
    Checked,
    /// An error response to a check.
    CheckRefused {
        /// True if the server does not know the method.
        unknown: bool,
        /// True if the error means that the server belongs to the other era.
        other_era: bool,
        /// The error, masked.
        why: String,
    },
    /// The handshake is complete.
    Initialized,
    /// The handshake failed.
    HandshakeRefused(HandshakeRefusal),
    /// The server said that it no longer has sessions: the reason, and the call that it refused.
    OtherEra(String, Box<RefusedCall>),
    /// The server sends requests without reading the responses.
    Flooded,
}

/// Kind of a deadline that passed.
#[derive(Debug)]
pub enum PassedDeadline {
    /// Deadline of a call.
    Call,
    /// Deadline of a list.
    List,
    /// Deadline of a check.
    Check,
    /// Handshake timeout.
    Handshake,
    /// Handshake timeout that the refusal of the other era explains better.
    HandshakeRefused(HandshakeRefusal),
}

/// One session. The transport calls it with each message of the server and each command, and at the latest at
/// [`next_deadline`](Self::next_deadline); every call gets the present time.
pub struct SessionCore<O, H> {
    /// Current specification of the instance.
    pub spec: Arc<InstanceSpec>,
    /// Outgoing side of the transport.
    pub outlet: O,
    /// State shared with the port through which calls arrive.
    pub gate: Arc<CallGate>,
    /// Requests without a response.
    pub calls: PendingRequests,
    /// Receiver of reports. Dropped after the calls, which are failed first.
    pub host: H,
    /// Era of the session, or the one tried at present.
    pub era: Era,
    /// Time of the completed handshake.
    pub initialized_at: Option<Instant>,
    pub(crate) handshake: HandshakeProgress,
    pub(crate) lists: ServerLists,
    pub(crate) questions: OpenQuestions,
    pub(crate) stateless: Option<Box<StatelessState>>,
}

impl<O: Outlet, H: SessionHost> SessionCore<O, H> {
    /// Begins a session: sends the first request of the handshake.
    pub fn new(args: SessionArgs, outlet: O, host: H, now: Instant) -> Self {
        let SessionArgs { spec, gate, since, reads_lists, era, lists_memory } = args;
        let mut this = Self {
            spec,
            outlet,
            gate,
            calls: PendingRequests::default(),
            host,
            era: Era::Sessions,
            initialized_at: None,
            handshake: HandshakeProgress::default(),
            lists: ServerLists::new(reads_lists, lists_memory),
            questions: OpenQuestions::default(),
            stateless: None,
        };
        this.begin_handshake(since, era, now);
        this
    }

    /// Uses another specification of the instance from now on.
    pub fn adopt(&mut self, spec: Arc<InstanceSpec>) {
        self.gate.set_calls_max(spec.policy.session.calls_in_flight_max);
        self.spec = spec;
    }

    /// Returns the time at which [`expire_next`](Self::expire_next) and [`on_due`](Self::on_due) must be called again.
    pub fn next_deadline(&self) -> Option<Instant> {
        let first = self.calls.deadlines.first().map(|(at, _)| *at);
        first.into_iter().chain(self.lists.next_read_at).chain(self.next_listen_at()).min()
    }

    /// Does what is due at `now`, apart from requests whose deadline has passed.
    pub fn on_due(&mut self, now: Instant) {
        if self.lists.next_read_at.is_some_and(|at| now >= at) {
            self.read_lists(now);
        }
        if self.next_listen_at().is_some_and(|at| now >= at) {
            self.listen(now);
        }
    }

    // ---- the lists ----

    /// Reads the lists of the server, now or after the read in progress.
    pub fn read_lists(&mut self, now: Instant) {
        self.lists.next_read_at = None;
        if self.lists.reading.is_some() {
            // Only one read runs at a time; changes during a read trigger another one.
            self.lists.next_read_at = Some(now + self.spec.policy.session.list_changed_debounce);
            return;
        }
        // A strict read leaves out tools whose marked parameters cannot be sent in headers.
        let strict = O::REPEATS && self.era == Era::Stateless;
        self.lists.reading = Some(Box::new(ListRead::new(strict, &self.lists.memory, now)));
        self.request_list_page(Kind::Tools, None, now);
    }

    fn schedule_list_retry(&mut self, pause: Duration, now: Instant) {
        // The known lists stay in use. Before the first successful read the slot schedules retries, because the
        // instance waits for its lists.
        if self.lists.known {
            self.lists.failures += 1;
            let delay = self.host.reconnect_delay(&self.spec.policy.reconnect, self.lists.failures).max(pause);
            self.lists.schedule_read(now + delay);
        }
    }

    fn request_list_page(&mut self, kind: Kind, cursor: Option<&str>, now: Instant) {
        let params = cursor.map(|cursor| format!(r#"{{"cursor":{cursor}}}"#));
        let policy = &self.spec.policy.session;
        let began = self.lists.reading.as_ref().map_or(now, |reading| reading.began_at);
        let deadline = (now + policy.request_timeout).min(began + policy.list_timeout);
        self.send_own_request(kind.method(), params.as_deref(), PendingPurpose::List, deadline);
    }

    /// Returns true while the session reads a list other than that of the tools.
    pub fn is_reading_optional_list(&self) -> bool {
        self.lists.is_reading_optional_list()
    }

    /// Handles the answer to the request for a page of a list.
    pub fn on_list(&mut self, answer: Result<&RawValue, CallError>, now: Instant) {
        let Some(mut reading) = self.lists.reading.take() else { return };
        let (spec, kind) = (self.spec.clone(), reading.kind);
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
                    CallError::Remote { failure, .. } => failure.kind.requested_pause(),
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
                return self.request_list_page(kind, Some(&cursor), now);
            }
            Ok(PageStep::PageLimit(pages)) => {
                left_out(&format!("more than {pages} pages"), "the rest of a list is left out");
            }
            Ok(PageStep::End) => {}
            Err((PageError::OutOfBounds(why), pause)) => return self.fail_list_read(&why, pause, now),
            Err((PageError::Unreadable(why), pause)) if kind == Kind::Tools => {
                return self.fail_list_read(&why, pause, now);
            }
            // Only an unreadable list of tools fails the whole read.
            Err((PageError::Unreadable(why), pause)) => {
                reading.mark_unreadable(masked_excerpt(&spec.mask, &why), pause);
            }
        }
        match reading.next_list(self.lists.offers, now) {
            Ok(next) => {
                let kind = next.kind;
                self.lists.reading = Some(next);
                self.request_list_page(kind, None, now);
            }
            Err(all) => {
                let (catalogue, unread) = *all;
                self.update_marked_params(&catalogue);
                (self.lists.failed, self.lists.known) = (false, true);
                if catalogue.unreadable.is_empty() {
                    self.lists.failures = 0;
                } else {
                    self.schedule_list_retry(unread.pause, now);
                }
                // Logged only if something changed since the last report.
                if let Some(news) = self.lists.record_if_changed(catalogue) {
                    for (list, why) in news.unreadable.iter().map(|list| list.method()).zip(unread.reasons) {
                        let what = "cannot read a list; the last known list stays in use";
                        tracing::warn!(instance = %spec.name, list, why, "{what}");
                    }
                    self.host.report(SessionEvent::Discovered(news));
                }
            }
        }
    }

    fn fail_list_read(&mut self, why: &str, pause: Duration, now: Instant) {
        // The lists that were known before stay in use.
        self.lists.failed = true;
        self.schedule_list_retry(pause, now);
        self.host.report(SessionEvent::DiscoveryFailed(masked_excerpt(&self.spec.mask, why), pause));
    }

    // ---- what the server sends ----

    /// Handles one complete message. `of` is the satellite's request on whose stream it arrived, if known.
    pub fn on_message(&mut self, message: &Bytes, of: Option<u64>, now: Instant) -> MessageOutcome {
        if message.trim_ascii().is_empty() {
            return MessageOutcome::Nothing;
        }
        let text = match utf8_text(message.clone()) {
            Ok(text) => text,
            Err(why) => return self.on_malformed(message, &why.to_string()),
        };
        match MessageView::parse(&text) {
            Ok(view) => {
                self.host.on_message();
                self.on_view(&view, &text, of, now)
            }
            Err(why) => self.on_malformed(message, &why.to_string()),
        }
    }

    /// Handles a message at the end of the session: only responses matter.
    pub fn on_final_message(&mut self, message: &Bytes, now: Instant) {
        if let Ok(text) = utf8_text(message.clone())
            && let Ok(view @ MessageView { kind: MessageKind::Result | MessageKind::Error, .. }) =
                MessageView::parse(&text)
        {
            self.on_response(&view, &text, now);
        }
    }

    fn on_view(&mut self, view: &MessageView<'_>, text: &ByteString, of: Option<u64>, now: Instant) -> MessageOutcome {
        match view.kind {
            // The stateless era has no way to answer a request of the server.
            MessageKind::Request if self.era == Era::Stateless => {
                self.on_malformed(text.as_bytes(), "requests of a server are permitted in sessions only")
            }
            MessageKind::Request => {
                self.gate.record_activity(now);
                self.on_server_request(view, text, of)
            }
            MessageKind::Notification => {
                self.gate.record_activity(now);
                self.on_notification(view, text, of, now);
                MessageOutcome::Nothing
            }
            MessageKind::Result | MessageKind::Error if view.id.is_some() => self.on_response(view, text, now),
            MessageKind::Result | MessageKind::Error => {
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
            self.gate.record_activity(now);
        }
        let is_result = view.kind == MessageKind::Result;
        let heard = if is_result { MessageOutcome::ResultResponse } else { MessageOutcome::ErrorResponse };
        let spec = self.spec.clone();
        let answer = || match view.outcome {
            Some(result) if is_result => Ok(result),
            error => Err(server_error(error, &spec.mask)),
        };
        match pending.purpose {
            PendingPurpose::Caller { .. } => self.on_caller_response(id, pending, view, text, now),
            PendingPurpose::Handshake => self.on_handshake(id, answer(), now),
            PendingPurpose::List => {
                self.on_list(answer(), now);
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
                self.on_stream_ended(id, is_unknown, now);
                heard
            }
            PendingPurpose::Discover => {
                self.on_discovered(answer(), now);
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
        let is_result = view.kind == MessageKind::Result;
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
                        let why = masked_excerpt(&self.spec.mask, &message);
                        return MessageOutcome::OtherEra(why, Box::new(RefusedCall { pending, reason: message }));
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
            self.host.on_server_proved();
            // The lists could not be read, but the server answers now: retry them before their time.
            if self.lists.reading.is_none() && std::mem::take(&mut self.lists.failed) {
                self.host.report(SessionEvent::Recovered);
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
            Some("notifications/cancelled") => self.on_cancelled(view, text, now),
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

    pub(crate) fn is_list_changed(&self, method: Option<&str>) -> bool {
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
        self.host.on_malformed(&self.spec, message, why, self.initialized_at.is_some());
        MessageOutcome::Nothing
    }

    // ---- calls ----

    /// Carries out a command of the port.
    pub fn on_command(&mut self, command: SessionCommand, now: Instant) {
        match command {
            SessionCommand::Request(asked) => {
                let AdmittedRequest { id, request: wanted, started, timeout, repeatable, ticket } = asked;
                self.gate.record_activity(started);
                let Some(ticket) = self.answer_locally(id, &wanted, ticket, now) else { return };
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
                self.calls.unsent.push_back((id, wanted));
                self.send_queued();
            }
            SessionCommand::Cancel { id, notification: words } => {
                if let Some((id, pending)) = self.calls.remove_caller(id) {
                    self.gate.record_activity(now);
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
                self.on_client_command(command, now);
            }
            SessionCommand::Discover(discover) => self.on_discover(discover, now),
        }
    }

    /// Sends the waiting requests for which the outlet has room.
    pub fn send_queued(&mut self) {
        // A queued request's deadline keeps running: a server that does not read must not block its callers.
        while self.outlet.has_room()
            && let Some((id, wanted)) = self.calls.unsent.pop_front()
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

    pub(crate) fn send_stateless(&mut self, id: u64, wanted: &OutboundRequest, input: &[(&'static str, String)]) {
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

    pub(crate) fn routing_headers(&self, method: &str, params: Option<&str>) -> Option<Box<RequestHeaders>> {
        O::REPEATS.then(|| Box::new(envelope::routing_headers(method, params, |tool| self.marked_params(tool))))
    }

    /// Sends a call again, unless it was cancelled meanwhile. The request gets a new id, so that a late response or late
    /// progress is not taken for one of this attempt.
    pub fn resend(&mut self, id: u64) {
        let Some(request) = self.calls.pending.get_mut(&id).and_then(|pending| pending.request.take()) else { return };
        let Some(pending) = self.calls.remove(id) else { return };
        let id = self.gate.draw_id();
        self.calls.insert(id, pending);
        self.calls.unsent.push_back((id, request));
        self.send_queued();
    }

    /// Sends a request of the satellite and returns its id.
    pub fn send_own_request(
        &mut self,
        method: &str,
        params: Option<&str>,
        purpose: PendingPurpose,
        deadline: Instant,
    ) -> u64 {
        let id = self.gate.draw_id();
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

    pub(crate) fn cancel(&mut self, id: u64, pending: &PendingRequest, reason: &str) {
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

    pub(crate) fn cancel_with(&mut self, id: u64, pending: &PendingRequest, words: &[&str]) {
        if !pending.was_sent() {
            return self.calls.unsent.retain(|(waiting, _)| *waiting != id);
        }
        self.outlet.abandon(id);
        // Over HTTP the end of the exchange cancels a stateless request; no notification is needed.
        if !(O::REPEATS && (self.era == Era::Stateless || pending.is_sessionless())) {
            self.outlet.notify(words);
        }
    }

    // ---- deadlines ----

    /// Ends the first request whose deadline has passed; `None` if there is none.
    pub fn expire_next(&mut self, now: Instant) -> Option<PassedDeadline> {
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
                    self.gate.record_activity(now);
                    ticket.fail(CallError::TimedOut { after: at - started, fate });
                    return Some(PassedDeadline::Call);
                }
                PendingPurpose::List => {
                    let after = self.spec.policy.session.request_timeout;
                    self.on_list(Err(CallError::TimedOut { after, fate }), now);
                    return Some(PassedDeadline::List);
                }
                PendingPurpose::Check => {
                    self.outlet.abandon(id);
                    return Some(PassedDeadline::Check);
                }
                PendingPurpose::Handshake => {
                    // Over a pipe the response may still arrive.
                    self.outlet.abandon(id);
                    if let Some(late) = self.on_handshake_timeout(id, pending, now) {
                        return Some(late);
                    }
                }
                PendingPurpose::Listen => {
                    self.outlet.abandon(id);
                    self.on_stream_ended(id, false, now);
                }
                PendingPurpose::Discover => {
                    self.outlet.abandon(id);
                    self.on_discovered(Err(CallError::TimedOut { after: era::DISCOVER_WAIT_MAX, fate }), now);
                }
            }
        }
    }

    // ---- the end ----

    /// Ends the session: fails the calls in flight and withdraws the questions to clients.
    pub fn close(&mut self, reason: &str) {
        self.calls.fail_all(reason);
        self.end_audience();
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

/// Returns server text for a log or an error, masked and then cut to `QUOTED_MAX`. Masking first leaves no part of a
/// secret at the cut.
pub fn masked_excerpt(mask: &SecretMask, text: &str) -> String {
    let mut text = mask.apply(text);
    if text.len() > QUOTED_MAX {
        text.truncate(text.floor_char_boundary(QUOTED_MAX));
        text.push('…');
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::cell::RefCell;

    use mcp_satellite_model::ids::InstanceId;
    use mcp_satellite_model::policy::Policy;
    use mcp_satellite_model::spec::{ProcessLifetime, ServerTarget, UpdateMethod};
    use tokio::sync::oneshot;

    use super::*;
    use crate::call::{CallTicket, ReplyChannel};

    const SECOND: Duration = Duration::from_secs(1);

    /// Outlet like a pipe: all messages in one buffer.
    #[derive(Default)]
    struct Lines(Vec<String>);

    impl Lines {
        fn put(&mut self, parts: &[&str]) {
            self.0.push(parts.concat());
        }

        fn take(&mut self) -> Vec<serde_json::Value> {
            self.0.drain(..).map(|line| serde_json::from_str(&line).unwrap()).collect()
        }
    }

    impl Outlet for Lines {
        const REPEATS: bool = false;

        fn request(&mut self, _: u64, _: RequestPhase, _: Option<Box<RequestHeaders>>, parts: &[&str]) {
            self.put(parts);
        }

        fn notify(&mut self, parts: &[&str]) {
            self.put(parts);
        }

        fn respond(&mut self, parts: &[&str]) {
            self.put(parts);
        }

        fn send_initialized(&mut self, _: &str, parts: &[&str]) {
            self.put(parts);
        }

        fn abandon(&mut self, _: u64) {}

        fn has_room(&self) -> bool {
            true
        }

        fn is_flooded(&self) -> bool {
            false
        }

        fn position(&self) -> u64 {
            self.0.len() as u64
        }
    }

    #[derive(Default)]
    struct Reports(RefCell<Vec<String>>);

    impl Reports {
        fn add(&self, report: impl Into<String>) {
            self.0.borrow_mut().push(report.into());
        }
    }

    impl SessionHost for Reports {
        fn report(&self, event: SessionEvent) {
            match event {
                SessionEvent::Initialized(server) => self.add(format!("initialized {}", server.name)),
                SessionEvent::Discovered(catalogue) => self.add(format!("{} tools", catalogue.tools.len())),
                SessionEvent::DiscoveryFailed(why, _) => self.add(why),
                event => self.add(format!("{event:?}")),
            }
        }

        fn on_message(&self) {}

        fn on_server_proved(&self) {}

        fn on_malformed(&self, _: &InstanceSpec, _: &[u8], why: &str, _: bool) {
            self.add(why);
        }

        fn reconnect_delay(&mut self, _: &ReconnectPolicy, failures: u32) -> Duration {
            SECOND * failures
        }

        fn on_notification(&self, cause: MessageCause, message: RpcMessage) {
            self.add(format!("{cause:?} {}", message.method().unwrap_or_default()));
        }

        fn on_progress(&self, origin: CallOrigin, _: RpcMessage) {
            self.add(format!("progress of {origin:?}"));
        }

        fn on_request(&self, _: MessageCause, question: u64, message: RpcMessage) {
            self.add(format!("question {question}: {}", message.method().unwrap_or_default()));
        }

        fn on_request_withdrawn(&self, question: u64, _: RpcMessage) {
            self.add(format!("withdrawn {question}"));
        }

        fn on_session_started(&self) {}

        fn on_session_ended(&mut self) {
            self.add("ended");
        }
    }

    type TestSession = SessionCore<Lines, Reports>;
    type Answer = oneshot::Receiver<Result<Box<RawValue>, CallError>>;

    fn spec() -> Arc<InstanceSpec> {
        Arc::new(InstanceSpec {
            id: InstanceId::new("acme".into(), "alice".into(), "a".into()),
            name: "files-acme-alice-a".into(),
            server: "files".into(),
            team_slug: "acme".into(),
            user_slug: "alice".into(),
            target: ServerTarget::Stdio { command: "files".to_owned(), cwd: None },
            args: Vec::new(),
            env: [].into(),
            headers: [].into(),
            query: [].into(),
            missing: Vec::new(),
            lifetime: ProcessLifetime::Listed,
            update_method: UpdateMethod::default(),
            request_logging: false,
            mask: SecretMask::default(),
            policy: Arc::new(Policy::default()),
        })
    }

    fn session(now: Instant) -> TestSession {
        let (spec, lists_memory) = (spec(), ByteBudget::unlimited());
        let gate = Arc::new(CallGate::new(spec.policy.session.calls_in_flight_max, now));
        let args = SessionArgs { spec, gate, since: now, reads_lists: true, era: None, lists_memory };
        SessionCore::new(args, Lines::default(), Reports::default(), now)
    }

    fn hear(session: &mut TestSession, message: &str, now: Instant) -> MessageOutcome {
        session.on_message(&Bytes::copy_from_slice(message.as_bytes()), None, now)
    }

    fn initialized(now: Instant) -> TestSession {
        let mut session = session(now);
        let opening = session.outlet.take();
        assert_eq!(opening[0]["method"], "initialize");
        let result =
            r#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"s","version":"1"}}"#;
        let outcome = hear(&mut session, &format!(r#"{{"jsonrpc":"2.0","id":1,"result":{result}}}"#), now);
        assert!(matches!(outcome, MessageOutcome::Initialized));
        let sent = session.outlet.take();
        assert_eq!(
            (&sent[0]["method"], &sent[1]["method"]),
            (&"notifications/initialized".into(), &"tools/list".into())
        );
        hear(&mut session, r#"{"jsonrpc":"2.0","id":2,"result":{"tools":[{"name":"t"}]}}"#, now);
        assert_eq!(session.host.0.take(), ["initialized s", "1 tools"]);
        session
    }

    fn call(session: &mut TestSession, timeout: Duration, now: Instant) -> (u64, Answer) {
        let (reply, answer) = oneshot::channel();
        let ticket = CallTicket::new(ReplyChannel::Result(reply), session.gate.try_acquire().ok().unwrap());
        let id = session.gate.draw_id();
        let request = CallerRequest::Tool { name: "t".to_owned(), arguments: None, repeatable: false };
        let request = OutboundRequest::Request(request);
        let admitted = AdmittedRequest { id, request, started: now, timeout, repeatable: false, ticket };
        session.on_command(SessionCommand::Request(admitted), now);
        (id, answer)
    }

    #[test]
    fn a_session_works_without_a_runtime_and_without_a_clock() {
        let start = Instant::now();
        let mut session = initialized(start);
        assert_eq!(session.next_deadline(), None);
        let (id, mut answer) = call(&mut session, SECOND * 5, start);
        assert_eq!(session.outlet.take()[0]["params"]["_meta"]["progressToken"], id);
        assert_eq!(session.next_deadline(), Some(start + SECOND * 5));
        hear(&mut session, &format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"x":1e400}}}}"#), start + SECOND);
        assert_eq!(answer.try_recv().unwrap().unwrap().get(), r#"{"x":1e400}"#);
        assert_eq!((session.next_deadline(), session.gate.in_flight()), (None, 0));
        assert_eq!(session.gate.active_at(), start + SECOND);
    }

    #[test]
    fn progress_extends_the_deadline_and_its_passing_cancels_the_call() {
        let start = Instant::now();
        let mut session = initialized(start);
        let (id, mut answer) = call(&mut session, SECOND * 5, start);
        session.outlet.take();
        let progress = format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{id},"progress":1}}}}"#
        );
        hear(&mut session, &progress, start + SECOND * 4);
        assert!(session.expire_next(start + SECOND * 5).is_none());
        let late = start + SECOND * 9;
        assert_eq!(session.next_deadline(), Some(late));
        assert!(matches!(session.expire_next(late), Some(PassedDeadline::Call)));
        assert!(matches!(answer.try_recv().unwrap(), Err(CallError::TimedOut { after, .. }) if after == SECOND * 9));
        assert_eq!(session.outlet.take()[0]["params"]["requestId"], id);
        assert!(session.expire_next(late).is_none());
    }

    #[test]
    fn a_changed_list_is_read_after_the_debounce_and_a_failed_read_is_repeated() {
        let start = Instant::now();
        let mut session = initialized(start);
        hear(&mut session, r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#, start);
        let read_at = start + session.spec.policy.session.list_changed_debounce;
        assert_eq!(session.next_deadline(), Some(read_at));
        session.on_due(read_at);
        let id = session.outlet.take()[0]["id"].clone();
        hear(&mut session, &format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":1,"message":"no"}}}}"#), read_at);
        assert_eq!(session.next_deadline(), Some(read_at + SECOND));
        assert_eq!(session.host.0.take(), ["NoCall notifications/tools/list_changed", "server error 1: no"]);
    }

    #[test]
    fn the_end_fails_every_call_and_is_reported_once() {
        let start = Instant::now();
        let mut session = initialized(start);
        let (_, mut answer) = call(&mut session, SECOND, start);
        session.calls.written = u64::MAX;
        session.close("gone");
        let fate = answer.try_recv().unwrap().unwrap_err().fate();
        assert_eq!((fate, session.host.0.take()), (Some(CallFate::MaybeExecuted), vec!["ended".to_owned()]));
        assert_eq!(session.gate.in_flight(), 0);
    }
}
