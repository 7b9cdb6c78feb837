//! The session: its reactions to messages, commands and time. Its other parts are in the modules named after
//! their subject.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use bytestring::ByteString;
use mcp_satellite_model::exit::{CallError, CallFate};
use mcp_satellite_model::remote::ServerInfo;
use mcp_satellite_model::secret::SecretMask;
use mcp_satellite_model::spec::InstanceSpec;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::{HEADER_MISMATCH, INTERNAL_ERROR, METHOD_NOT_FOUND};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageKind, MessageView, utf8_text};
use serde_json::value::RawValue;

use crate::call::{AdmittedRequest, ClientRelay, OutboundRequest, SessionCommand, server_error};
use crate::era;
use crate::gate::CallGate;
use crate::interface::{
    MessageOutcome, Outlet, PassedDeadline, RefusedCall, SessionEvent, SessionHost, SessionOptions,
};
use crate::lists::{Kind, ListRead, PageError, PageStep, ServerLists};
use crate::pending::{PendingPurpose, PendingRequest, PendingRequests, RelayedCallOrigin};
use crate::state::{HandshakeProgress, OpenQuestions, ResultType, ResumedSession, StatelessState, result_type};

// Maximum length in bytes of server text quoted in a log or an error.
const QUOTED_MAX: usize = 200;

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
    /// Self-description of the server from the handshake.
    pub server: Option<Arc<ServerInfo>>,
    pub(crate) handshake: HandshakeProgress,
    pub(crate) lists: ServerLists,
    pub(crate) questions: OpenQuestions,
    pub(crate) stateless: Option<Box<StatelessState>>,
    // Session to continue, until the server has answered.
    pub(crate) resuming: Option<Box<ResumedSession>>,
}

impl<O: Outlet, H: SessionHost> SessionCore<O, H> {
    /// Begins a session: sends the first request of the handshake.
    pub fn new(options: SessionOptions, outlet: O, host: H, now: Instant) -> Self {
        let (since, era) = (options.since, options.era);
        let mut this = Self::unopened(options, outlet, host);
        this.begin_handshake(since, era, now);
        this
    }

    pub(crate) fn unopened(options: SessionOptions, outlet: O, host: H) -> Self {
        let SessionOptions { spec, gate, reads_lists, lists_memory, .. } = options;
        Self {
            spec,
            outlet,
            gate,
            calls: PendingRequests::default(),
            host,
            era: Era::Sessions,
            initialized_at: None,
            server: None,
            handshake: HandshakeProgress::default(),
            lists: ServerLists::new(reads_lists, lists_memory),
            questions: OpenQuestions::default(),
            stateless: None,
            resuming: None,
        }
    }

    /// Uses another specification of the instance from now on.
    pub fn apply_spec(&mut self, spec: Arc<InstanceSpec>) {
        self.gate.set_calls_max(spec.policy.session.calls_in_flight_max);
        self.spec = spec;
    }

    /// Returns the time at which [`expire_next`](Self::expire_next) and [`on_due`](Self::on_due) must be called again.
    pub fn next_deadline(&self) -> Option<Instant> {
        let first = self.calls.deadlines.first().map(|(at, _)| *at);
        first.into_iter().chain(self.lists.next_read_at).chain(self.next_listen_at()).min()
    }

    /// Performs the work that is due at `now`, except for requests whose deadline has passed.
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
                if let Some(changed) = self.lists.record_if_changed(catalogue) {
                    for (list, why) in changed.unreadable.iter().map(|list| list.method()).zip(unread.reasons) {
                        tracing::warn!(
                            instance = %spec.name, list, why,
                            "cannot read a list; the last known list stays in use"
                        );
                    }
                    self.host.report(SessionEvent::Discovered(changed));
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

    // ---- messages from the server ----

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

    /// Handles a message at the end of the session: only responses matter. Returns a call that the server refused; the
    /// driver fails it.
    pub fn on_final_message(&mut self, message: &Bytes, now: Instant) -> Option<Box<RefusedCall>> {
        let text = utf8_text(message.clone()).ok()?;
        let view = MessageView::parse(&text).ok()?;
        if !matches!(view.kind, MessageKind::Result | MessageKind::Error) {
            return None;
        }
        match self.on_response(&view, &text, now) {
            MessageOutcome::OtherEra(_, call) => Some(call),
            _ => None,
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
        let Some(mut pending) = self.calls.remove(id) else { return MessageOutcome::Nothing };
        // Responses to the satellite's own requests are no activity, so they do not keep an idle server awake.
        if matches!(pending.purpose, PendingPurpose::Caller { .. } | PendingPurpose::Handshake) {
            self.gate.record_activity(now);
        }
        let is_result = view.kind == MessageKind::Result;
        let outcome = if is_result { MessageOutcome::ResultResponse } else { MessageOutcome::ErrorResponse };
        let spec = self.spec.clone();
        let answer = || match view.outcome {
            Some(result) if is_result => Ok(result),
            error => Err(server_error(error, &spec.mask)),
        };
        if let Some(span) = pending.span.take() {
            span.end(answer().as_ref().copied());
        }
        match pending.purpose {
            PendingPurpose::Caller { .. } => self.on_caller_response(id, pending, view, text, now),
            PendingPurpose::Handshake => self.on_handshake(id, answer(), now),
            PendingPurpose::List => {
                self.on_list(answer(), now);
                outcome
            }
            PendingPurpose::Check => match answer() {
                Ok(_) => MessageOutcome::Checked,
                Err(error) => MessageOutcome::CheckRefused {
                    unknown: matches!(error, CallError::Server { code: METHOD_NOT_FOUND, .. }),
                    other_era: era::is_era_refused(self.era, &error),
                    why: masked_excerpt(&self.spec.mask, &error.to_string()),
                },
            },
            // Any response proves that the server is there.
            PendingPurpose::Resume => {
                self.on_resumed(now);
                MessageOutcome::Initialized
            }
            PendingPurpose::Listen => {
                let is_unknown = matches!(answer(), Err(CallError::Server { code: METHOD_NOT_FOUND, .. }));
                self.on_stream_ended(id, is_unknown, now);
                outcome
            }
            PendingPurpose::Discover => {
                self.on_discovered(answer(), now);
                outcome
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
            Some(result) if is_result && self.era == Era::Stateless && !through => match result_type(result) {
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
            Some(method::PROGRESS) => self.on_progress(view, text, now),
            Some(method::CANCELLED) => self.on_cancelled(view, text, now),
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
        let is_of_a_list =
            matches!(method, Some(method::TOOLS_CHANGED | method::RESOURCES_CHANGED | method::PROMPTS_CHANGED));
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
            SessionCommand::Request(admitted) => {
                let AdmittedRequest { id, request, started, timeout, repeatable, ticket } = admitted;
                self.gate.record_activity(started);
                let Some(ticket) = self.answer_locally(id, &request, ticket, now) else { return };
                let client_call = match &request {
                    OutboundRequest::Relay(ClientRelay { message, origin, .. }) => {
                        Some(Box::new(RelayedCallOrigin { origin: *origin, token: message.token().map(Into::into) }))
                    }
                    OutboundRequest::Request(_) => None,
                };
                let through = matches!(request, OutboundRequest::Relay(ClientRelay { era: Era::Stateless, .. }));
                let purpose = PendingPurpose::Caller {
                    ticket,
                    admitted_id: id,
                    started,
                    timeout,
                    repeatable,
                    passthrough: through,
                    client_call,
                };
                self.calls.insert(id, PendingRequest::new(purpose, started + timeout));
                self.calls.unsent.push_back((id, request));
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
            // The send fails if nobody waits for the list any more.
            SessionCommand::ListCalls { max, reply } => drop(reply.send(self.calls.unanswered_calls(max))),
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
            let mut pending = self.calls.remove(id)?;
            if let PendingPurpose::Caller { .. } | PendingPurpose::List = pending.purpose {
                self.withdraw_inputs(id);
                self.cancel(id, &pending, "timed out");
            }
            let fate =
                if self.calls.may_have_reached_server(&pending) { CallFate::TimedOut } else { CallFate::NotSent };
            if let Some(span) = pending.span.take() {
                span.time_out(fate);
            }
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
                PendingPurpose::Resume => return Some(PassedDeadline::Resume),
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
pub(crate) mod tests {
    use std::cell::RefCell;
    use std::sync::Mutex;

    use mcp_satellite_model::byte_budget::ByteBudget;
    use mcp_satellite_model::ids::InstanceId;
    use mcp_satellite_model::policy::{Policy, ReconnectPolicy};
    use mcp_satellite_model::spec::{ProcessLifetime, ServerTarget, UpdateMethod};
    use mcp_satellite_protocol::header::RequestHeaders;
    use mcp_satellite_protocol::rpc::RpcMessage;
    use mcp_satellite_protocol::trace::TraceParent;
    use tokio::sync::oneshot;

    use super::*;
    use crate::call::{CallTicket, CallerRequest, ReplyChannel, UnansweredCalls};
    use crate::gate::FIRST_REQUEST_ID;
    use crate::interface::{OwnRequest, RequestPhase, RequestSpan};
    use crate::origin::{CallOrigin, MessageCause};
    use crate::pending::SentRequest;

    pub(crate) const SECOND: Duration = Duration::from_secs(1);

    /// Outlet like a pipe: all messages in one buffer.
    #[derive(Default)]
    pub(crate) struct Lines(Vec<String>);

    impl Lines {
        fn put(&mut self, parts: &[&str]) {
            self.0.push(parts.concat());
        }

        pub(crate) fn take(&mut self) -> Vec<serde_json::Value> {
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
    pub(crate) struct Reports {
        all: RefCell<Vec<String>>,
        /// Ends of the spans of the satellite's own requests.
        ends: Arc<Mutex<Vec<String>>>,
    }

    impl Reports {
        fn add(&self, report: impl Into<String>) {
            self.all.borrow_mut().push(report.into());
        }

        pub(crate) fn take(&self) -> Vec<String> {
            self.all.take()
        }

        fn take_ends(&self) -> Vec<String> {
            std::mem::take(&mut *self.ends.lock().unwrap())
        }
    }

    struct RecordedSpan {
        method: String,
        ends: Arc<Mutex<Vec<String>>>,
    }

    impl RecordedSpan {
        fn add(&self, how: impl std::fmt::Display) {
            self.ends.lock().unwrap().push(format!("{}: {how}", self.method));
        }
    }

    const TRACE: TraceParent = TraceParent { trace_id: [1; 16], span_id: [2; 8], flags: 1 };

    impl RequestSpan for RecordedSpan {
        fn trace(&self) -> Option<TraceParent> {
            Some(TRACE)
        }

        fn end(self: Box<Self>, answer: Result<&RawValue, &CallError>) {
            self.add(answer.map_or_else(ToString::to_string, |_| "answered".to_owned()));
        }

        fn time_out(self: Box<Self>, fate: CallFate) {
            self.add(format_args!("{fate:?}"));
        }
    }

    impl SessionHost for Reports {
        fn report(&self, event: SessionEvent) {
            match event {
                SessionEvent::Initialized(server) => self.add(format!("initialized {}", server.name)),
                SessionEvent::Resumed(server, _) => self.add(format!("resumed {}", server.name)),
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

        fn observe(&self, request: OwnRequest<'_>) -> Option<Box<dyn RequestSpan>> {
            Some(Box::new(RecordedSpan { method: request.method.to_owned(), ends: self.ends.clone() }))
        }

        fn on_session_started(&self) {}

        fn on_session_ended(&mut self) {
            self.add("ended");
        }
    }

    pub(crate) type TestSession = SessionCore<Lines, Reports>;
    pub(crate) type Answer = oneshot::Receiver<Result<Box<RawValue>, CallError>>;

    pub(crate) fn spec() -> Arc<InstanceSpec> {
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
            problems: Vec::new(),
            lifetime: ProcessLifetime::Listed,
            update_method: UpdateMethod::default(),
            request_logging: false,
            mask: SecretMask::default(),
            policy: Arc::new(Policy::default()),
        })
    }

    pub(crate) fn options(first_id: u64, now: Instant) -> SessionOptions {
        let (spec, lists_memory) = (spec(), ByteBudget::unlimited());
        let gate = Arc::new(CallGate::new(spec.policy.session.calls_in_flight_max, first_id, now));
        SessionOptions { spec, gate, since: now, reads_lists: true, era: None, lists_memory }
    }

    fn session(now: Instant) -> TestSession {
        SessionCore::new(options(FIRST_REQUEST_ID, now), Lines::default(), Reports::default(), now)
    }

    pub(crate) fn hear(session: &mut TestSession, message: &str, now: Instant) -> MessageOutcome {
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
        assert_eq!(session.host.take(), ["initialized s", "1 tools"]);
        session
    }

    pub(crate) fn call(session: &mut TestSession, timeout: Duration, now: Instant) -> (u64, Answer) {
        let (reply, answer) = oneshot::channel();
        let ticket = CallTicket::new(ReplyChannel::Result(reply), session.gate.try_acquire().ok().unwrap());
        let id = session.gate.draw_id();
        let request = CallerRequest::Tool { name: "t".to_owned(), arguments: None, repeatable: false, trace: None };
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
    fn unanswered_calls_are_listed_newest_first_until_their_answer() {
        let start = Instant::now();
        let mut session = initialized(start);
        let (first, _first) = call(&mut session, SECOND * 5, start);
        let (second, _second) = call(&mut session, SECOND * 5, start + SECOND);
        let listed = |session: &mut TestSession, max| {
            let (reply, mut list) = oneshot::channel();
            session.on_command(SessionCommand::ListCalls { max, reply }, start + SECOND);
            let UnansweredCalls { total, newest } = list.try_recv().unwrap();
            (total, newest.into_iter().map(|call| (call.id, call.tool.unwrap(), call.since)).collect::<Vec<_>>())
        };
        let (older, newer) = ((first, "t".to_owned(), start), (second, "t".to_owned(), start + SECOND));
        assert_eq!(listed(&mut session, 10), (2, vec![newer.clone(), older]));
        assert_eq!(listed(&mut session, 1), (2, vec![newer.clone()]));
        // A request that waits for its turn is listed, too.
        let sent = session.calls.pending.get_mut(&second).and_then(|pending| pending.sent.take());
        let Some(SentRequest::Final(request)) = sent else { panic!("the request is not sent again") };
        session.calls.unsent.push_back((second, request));
        hear(&mut session, &format!(r#"{{"jsonrpc":"2.0","id":{first},"result":{{}}}}"#), start + SECOND);
        assert_eq!(listed(&mut session, 10), (1, vec![newer]));
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
        assert_eq!(session.host.take(), ["NoCall notifications/tools/list_changed", "server error 1: no"]);
    }

    #[test]
    fn requests_of_the_satellite_carry_their_spans_and_report_how_they_ended() {
        let start = Instant::now();
        let mut session = session(start);
        let traced = format!(r#"{{"traceparent":"{TRACE}"}}"#);
        let opening = session.outlet.take();
        assert_eq!(opening[0]["params"]["_meta"].to_string(), traced);
        assert_eq!(opening[0]["params"]["protocolVersion"], "2025-11-25", "the other members remain");
        let result =
            r#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"s","version":"1"}}"#;
        hear(&mut session, &format!(r#"{{"jsonrpc":"2.0","id":1,"result":{result}}}"#), start);
        let sent = session.outlet.take();
        assert_eq!((&sent[1]["method"], sent[1]["params"]["_meta"].to_string()), (&"tools/list".into(), traced));
        hear(&mut session, r#"{"jsonrpc":"2.0","id":2,"error":{"code":1,"message":"no"}}"#, start);
        assert_eq!(session.host.take_ends(), ["initialize: answered", "tools/list: server error 1: no"]);
        session.read_lists(start);
        let late = session.next_deadline().unwrap();
        assert!(matches!(session.expire_next(late), Some(PassedDeadline::List)));
        session.read_lists(late);
        // A health check is not observed.
        session.send_own_request(method::PING, None, PendingPurpose::Check, late + SECOND);
        session.close("gone");
        let ends = session.host.take_ends();
        assert_eq!(ends, ["tools/list: NotSent", "tools/list: terminated: gone"]);
    }

    #[test]
    fn the_end_fails_every_call_and_is_reported_once() {
        let start = Instant::now();
        let mut session = initialized(start);
        let (_, mut answer) = call(&mut session, SECOND, start);
        session.calls.written = u64::MAX;
        session.close("gone");
        let fate = answer.try_recv().unwrap().unwrap_err().fate();
        assert_eq!((fate, session.host.take()), (Some(CallFate::MaybeExecuted), vec!["ended".to_owned()]));
        assert_eq!(session.gate.in_flight(), 0);
    }
}
