//! Sessions with a remote server: each request has its own exchange, which fails on its own. `rules::retry` classifies
//! failures; this module repeats calls where that is safe, checks the server's health, and ends the session when the
//! connection is lost.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::FutureExt;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::{INTERNAL_ERROR, METHOD_NOT_FOUND};
use mcp_satellite_protocol::header::RequestHeaders;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::join_parts;
use mcp_satellite_session::{
    HandshakeRefusal, MessageOutcome, Outlet, PassedDeadline, PendingPurpose, PendingRequest, RefusedCall,
    RequestPhase, SessionCore, SessionEvent, SessionHost, era,
};

use super::{SessionArgs, SessionControl, SessionPorts, SessionWork, WorkerHost, next_work, now, sleep_until};
use crate::model::exit::{CallError, CallFate, ExitCause, WorkerExit, refusal_message};
use crate::model::failure::{ExchangeFailure, FailureKind};
use crate::model::policy::HealthCheck;
use crate::model::remedy::Remedy;
use crate::model::spec::InstanceSpec;
use crate::model::status::Status;
use crate::rules::health::{HealthChecks, HealthVerdict};
use crate::rules::retry::{self, FailureClass};
use crate::seam::{LineEvent, LineOutput, ServerLine};

// Messages read at the end of a session; a server may send without end.
const FINAL_MESSAGES_MAX: usize = 4096;

// Time for the calls in flight after a session has expired.
const EXPIRED_SESSION_WAIT: Duration = Duration::from_millis(250);

pub(crate) struct Args {
    pub(crate) common: SessionArgs,
    pub(crate) line: Box<dyn ServerLine>,
}

enum RemoteSessionEnd {
    Requested,
    Lost(ExchangeFailure),
}

struct LineOutlet {
    line: Box<dyn ServerLine>,
    // Applies to the handshake only.
    header_timeout: Duration,
    // Bytes of messages that are not counted yet.
    sent: usize,
}

impl LineOutlet {
    fn body(&mut self, parts: &[&str]) -> Bytes {
        let body = join_parts(parts);
        self.sent += body.len();
        body
    }
}

impl Outlet for LineOutlet {
    const REPEATS: bool = true;

    fn request(&mut self, id: u64, of: RequestPhase, routing: Option<Box<RequestHeaders>>, parts: &[&str]) {
        // Requests in a session have their own deadlines.
        let header_timeout = (of == RequestPhase::Handshake).then_some(self.header_timeout);
        let body = self.body(parts);
        self.line.send(LineOutput::Request { id, body, header_timeout, routing });
    }

    fn notify(&mut self, parts: &[&str]) {
        let body = self.body(parts);
        self.line.send(LineOutput::Notification { body });
    }

    fn respond(&mut self, parts: &[&str]) {
        let body = self.body(parts);
        self.line.send(LineOutput::Response { body });
    }

    fn send_initialized(&mut self, version: &str, parts: &[&str]) {
        let body = self.body(parts);
        self.line.send(LineOutput::Initialized { version: version.to_owned(), body });
    }

    fn abandon(&mut self, id: u64) {
        self.line.send(LineOutput::Abandon { id });
    }

    fn has_room(&self) -> bool {
        // The port bounds the number of requests.
        true
    }

    fn is_flooded(&self) -> bool {
        // Undelivered responses have their own timeout.
        false
    }

    fn position(&self) -> u64 {
        // A message handed to the line counts as sent until the line reports otherwise.
        0
    }
}

struct RemoteSession {
    ports: SessionPorts,
    core: SessionCore<LineOutlet, WorkerHost>,
    checks: Option<HealthChecks>,
    // Calls to repeat, and when.
    retries: BTreeSet<(Instant, u64)>,
    // Calls answered with 5xx, with no other answer between.
    server_errors: u32,
    first_byte_seen: bool,
    reads_first: bool,
    // Requests with a lower id may have been sent with older credentials.
    credentials_from: u64,
}

pub(crate) fn run(args: Args) -> impl Future<Output = WorkerExit> + Send {
    let Args { common, line } = args;
    let header_timeout = common.spec.policy.remote.header_timeout;
    let (mut core, ports) = common.open(LineOutlet { line, header_timeout, sent: 0 });
    core.calls.written = 1;
    let mut this = Box::new(RemoteSession {
        ports,
        core,
        checks: None,
        retries: BTreeSet::new(),
        server_errors: 0,
        first_byte_seen: false,
        reads_first: false,
        credentials_from: 0,
    });
    async move {
        let end = this.serve().await;
        this.finish(end).await
    }
}

impl RemoteSession {
    async fn serve(&mut self) -> RemoteSessionEnd {
        loop {
            self.core.host.count_sent(std::mem::take(&mut self.core.outlet.sent));
            if self.ports.has_drained() {
                return RemoteSessionEnd::Requested;
            }
            let (wake_at, draining) = (self.wake_at(), self.ports.draining);
            tokio::select! {
                biased;
                control = self.ports.control.recv() => match control {
                    Some(SessionControl::Discover) => self.core.read_lists(now()),
                    Some(SessionControl::Drain) => self.ports.draining = true,
                    Some(SessionControl::ApplySpec(spec)) => self.apply_spec(spec),
                    Some(SessionControl::Check) => {
                        if let Some(checks) = &mut self.checks {
                            checks.schedule_now(now());
                        }
                    }
                    // Concerns the end of a process only.
                    Some(SessionControl::ShortenGrace) => {}
                    // A worker that is gone means the same as a stop.
                    Some(SessionControl::Stop) | None => return RemoteSessionEnd::Requested,
                },
                () = sleep_until(wake_at), if wake_at.is_some() => {
                    if let Some(end) = self.on_time() {
                        return end;
                    }
                }
                () = self.core.gate.emptied.notified(), if draining => {}
                work = next_work(
                    &mut self.ports.commands,
                    poll_fn(|cx| self.core.outlet.line.poll_next(cx)),
                    self.reads_first,
                ) => {
                    self.reads_first = matches!(work, SessionWork::Command(_));
                    match work {
                        SessionWork::Command(command) => self.core.on_command(*command, now()),
                        SessionWork::Read(incoming) => {
                            if let Some(end) = self.on_incoming(incoming) {
                                return end;
                            }
                        }
                    }
                }
            }
        }
    }

    fn apply_spec(&mut self, spec: Arc<InstanceSpec>) {
        // Later requests use the new credentials.
        if !spec.has_same_credentials(&self.core.spec) {
            self.credentials_from = self.core.gate.next_id();
        }
        let health = &spec.policy.health;
        if *health != self.core.spec.policy.health
            && let Some(checks) = &mut self.checks
        {
            checks.reschedule(health, now());
        }
        self.core.outlet.header_timeout = spec.policy.remote.header_timeout;
        self.core.apply_spec(spec.clone());
        self.core.outlet.line.send(LineOutput::Credentials(spec));
    }

    fn wake_at(&self) -> Option<Instant> {
        let again = self.retries.first().map(|(at, _)| *at);
        let check = self.checks.as_ref().and_then(HealthChecks::due_at);
        [self.core.next_deadline(), again, check].into_iter().flatten().min()
    }

    fn on_incoming(&mut self, incoming: LineEvent) -> Option<RemoteSessionEnd> {
        if !std::mem::replace(&mut self.first_byte_seen, true) {
            self.core.host.report(SessionEvent::FirstByte);
        }
        match incoming {
            LineEvent::Message { message, request: of } => {
                self.core.host.count_received(message.len());
                let outcome = self.core.on_message(&message, of, now());
                self.on_outcome(outcome)
            }
            LineEvent::Failed { id, failure } => self.on_failed(id, failure),
            LineEvent::Probed { id } => {
                if self.core.calls.remove(id).is_some() {
                    self.on_outcome(MessageOutcome::Checked)
                } else {
                    None
                }
            }
            LineEvent::Lost(failure) => Some(RemoteSessionEnd::Lost(failure)),
            // The satellite did not ask for it, but the connection is over.
            LineEvent::Closed => Some(RemoteSessionEnd::Lost(ExchangeFailure::sent(FailureKind::Cut))),
        }
    }

    fn on_outcome(&mut self, outcome: MessageOutcome) -> Option<RemoteSessionEnd> {
        let now = now();
        let policy = &self.core.spec.policy.health;
        match outcome {
            MessageOutcome::Nothing | MessageOutcome::Flooded => {}
            MessageOutcome::HandshakeRefused(how) => return Some(end_from_refusal(how)),
            MessageOutcome::OtherEra(why, call) => {
                self.refuse(*call);
                return Some(RemoteSessionEnd::Lost(ExchangeFailure::sent(FailureKind::OtherEra(why))));
            }
            MessageOutcome::Initialized => {
                self.checks = Some(HealthChecks::new(policy, self.core.host.rng.clone(), now));
            }
            MessageOutcome::ResultResponse => {
                self.server_errors = 0;
                self.core.host.counters.reset_failed_checks();
                let restored = self.checks.as_mut().and_then(HealthChecks::record_answer);
                self.report_restored(restored);
            }
            MessageOutcome::ErrorResponse => self.server_errors = 0,
            MessageOutcome::Checked => {
                self.core.host.on_server_proved();
                let restored = self.checks.as_mut().and_then(|checks| checks.record_success(policy, now));
                self.report_restored(restored);
            }
            MessageOutcome::SessionDoubted => {
                self.server_errors = 0;
                self.request_session_check();
            }
            MessageOutcome::CheckRefused { other_era: true, why, .. } => {
                return Some(RemoteSessionEnd::Lost(ExchangeFailure::sent(FailureKind::OtherEra(why))));
            }
            // The server knows the method: this is a failure of its own.
            MessageOutcome::CheckRefused { why, .. } if self.is_checked_by_discover() => {
                return self.on_check_failed(&why);
            }
            MessageOutcome::CheckRefused { unknown, why, .. } => {
                if self.checks.as_mut().is_some_and(|checks| checks.fall_back_from_ping(now)) {
                    return None;
                }
                // A server without this method has answered, which is all that the check requires.
                return if unknown { self.on_outcome(MessageOutcome::Checked) } else { self.on_check_failed(&why) };
            }
        }
        None
    }

    fn request_session_check(&mut self) {
        if let Some(checks) = &mut self.checks {
            checks.request_session_check(now());
        }
    }

    fn is_checked_by_discover(&self) -> bool {
        // Only a server of the other era refuses this check.
        let last_request = self.checks.as_ref().map(HealthChecks::last_request);
        self.core.era == Era::Stateless && last_request == Some(HealthCheck::Ping)
    }

    fn report_restored(&self, restored: Option<(u32, Option<String>)>) {
        if let Some((failures, last_error)) = restored {
            self.core.host.report(SessionEvent::Restored(failures, last_error));
        }
    }

    // ---- what fails ----

    fn on_failed(&mut self, id: u64, failure: ExchangeFailure) -> Option<RemoteSessionEnd> {
        let now = now();
        let class = retry::classify(&failure.kind);
        let stateless = self.core.era == Era::Stateless;
        let reads_optional_list = self.core.is_reading_optional_list();
        // The call may have been cancelled meanwhile.
        let pending = self.core.calls.pending.get_mut(&id)?;
        pending.fail_span(|| CallError::Remote { fate: CallFate::NotSent, failure: failure.clone() });
        match &pending.purpose {
            PendingPurpose::Caller { repeatable, .. } => {
                let repeatable = *repeatable;
                pending.record_failure(&failure);
                // The server refused the old credentials.
                if class == FailureClass::Unauthorized
                    && id < self.credentials_from
                    && (repeatable || !pending.may_have_reached)
                {
                    self.core.resend(id);
                    return None;
                }
                let left = pending.deadline.saturating_duration_since(now);
                let policy = &self.core.spec.policy.retry;
                if let Some(delay) = retry::retry_delay(policy, &failure, pending.attempts, repeatable, left) {
                    self.retries.insert((now + delay, id));
                    return None;
                }
                // Stateless requests belong to no session, and the failure of one means little for the others: a health
                // check determines whether the server is reachable.
                let is_aside = !stateless && pending.is_passthrough();
                let is_cut = failure.sent && matches!(failure.kind, FailureKind::Cut | FailureKind::Broken(_));
                let class = match class {
                    FailureClass::Expired | FailureClass::Other if is_aside => FailureClass::Busy,
                    _ if (stateless || is_aside) && is_cut => FailureClass::Busy,
                    _ if stateless && era::is_refusal(&failure.kind) => FailureClass::Busy,
                    class => class,
                };
                if is_aside && era::is_refusal(&failure.kind) {
                    self.core.forget_era_support();
                }
                self.on_call_failed(id, failure, class)
            }
            PendingPurpose::Handshake => {
                self.core.calls.remove(id);
                let outcome = self.core.on_handshake_failed(failure, now);
                self.on_outcome(outcome)
            }
            // A missing stream is no loss of the server; a check finds out.
            PendingPurpose::Listen => {
                self.core.calls.remove(id);
                let is_unknown = matches!(failure.kind, FailureKind::Status { status: 404 | 405, .. });
                if self.core.on_stream_ended(id, is_unknown, now)
                    && let Some(checks) = &mut self.checks
                {
                    checks.schedule_now(now);
                }
                (stateless && class == FailureClass::Unauthorized).then_some(RemoteSessionEnd::Lost(failure))
            }
            // The request is of another era than the session, so its failure means nothing for the session.
            PendingPurpose::Discover => {
                self.core.calls.remove(id);
                let answer = if let FailureKind::ServerError { .. } = failure.kind {
                    CallError::Server { code: INTERNAL_ERROR, message: failure.to_string(), data: None }
                } else if era::is_refusal(&failure.kind) {
                    CallError::Server { code: METHOD_NOT_FOUND, message: failure.to_string(), data: None }
                } else {
                    CallError::Remote { fate: CallFate::NotSent, failure }
                };
                self.core.on_discovered(Err(answer), now);
                None
            }
            // A web server's answer for an unsupported list. 404 may also mean an expired session, but the tools were
            // just read in it; if the session is gone, the next request finds out.
            PendingPurpose::List if retry::is_unsupported(&failure.kind) && reads_optional_list => {
                self.core.calls.remove(id);
                let message = failure.to_string();
                self.core.on_list(Err(CallError::Server { code: METHOD_NOT_FOUND, message, data: None }), now);
                None
            }
            // A temporary failure.
            PendingPurpose::List if class == FailureClass::Busy => self.on_list_failed(id, failure),
            // Only an unreadable list of tools ends the session.
            PendingPurpose::List
                if matches!(class, FailureClass::Other | FailureClass::Expired) && reads_optional_list =>
            {
                self.on_list_failed(id, failure)
            }
            // Only processes are adopted, so no session over a line is resumed.
            PendingPurpose::List | PendingPurpose::Resume => Some(RemoteSessionEnd::Lost(failure)),
            PendingPurpose::Check => {
                self.core.calls.remove(id);
                // No stream detects an unreachable stateless server, so the check does.
                if stateless && class == FailureClass::Unreachable && !failure.sent {
                    return Some(RemoteSessionEnd::Lost(failure));
                }
                if self.is_checked_by_discover() && era::is_era_refused_by_status(&failure.kind) {
                    return Some(RemoteSessionEnd::Lost(ExchangeFailure::sent(FailureKind::OtherEra(
                        failure.to_string(),
                    ))));
                }
                match class {
                    FailureClass::Expired | FailureClass::Unauthorized => Some(RemoteSessionEnd::Lost(failure)),
                    FailureClass::Busy if retry::is_session_doubtful(&failure.kind) => self.on_check_doubted(failure),
                    FailureClass::Unreachable | FailureClass::Busy | FailureClass::Other => {
                        self.on_check_failed(&failure.to_string())
                    }
                }
            }
        }
    }

    fn on_check_doubted(&mut self, failure: ExchangeFailure) -> Option<RemoteSessionEnd> {
        // The server refused the check as if the session were unknown. A probe without a session proves nothing about
        // it, and some servers refuse `ping` in this way.
        let checks = self.checks.as_mut()?;
        if checks.last_request() == HealthCheck::Get {
            return self.on_check_failed(&failure.to_string());
        }
        if checks.fall_back_from_ping(now()) {
            return None;
        }
        let FailureKind::Status { status, message } = failure.kind else {
            return Some(RemoteSessionEnd::Lost(failure));
        };
        Some(RemoteSessionEnd::Lost(ExchangeFailure::sent(FailureKind::SessionExpired { status, message })))
    }

    fn on_list_failed(&mut self, id: u64, failure: ExchangeFailure) -> Option<RemoteSessionEnd> {
        self.core.calls.remove(id);
        self.core.on_list(Err(CallError::Remote { fate: CallFate::NotSent, failure }), now());
        None
    }

    fn on_call_failed(&mut self, id: u64, failure: ExchangeFailure, class: FailureClass) -> Option<RemoteSessionEnd> {
        let pending = self.core.calls.remove(id)?;
        let fate = if pending.may_have_reached { CallFate::MaybeExecuted } else { CallFate::NotSent };
        let PendingPurpose::Caller { mut ticket, repeatable, passthrough: through, .. } = pending.purpose else {
            return None;
        };
        ticket.fate = fate;
        let is_aside = through && self.core.era == Era::Sessions;
        if matches!(failure.kind, FailureKind::ServerError { .. }) && !is_aside {
            self.server_errors += 1;
        }
        let is_given_up =
            class == FailureClass::Busy && self.server_errors >= self.core.spec.policy.remote.server_errors_max;
        let error = match class {
            // Another session would return the same answer.
            FailureClass::Busy | FailureClass::Other => CallError::Remote { fate, failure: failure.clone() },
            // Repeatable calls were repeated to the limit already; another session is no further chance.
            FailureClass::Unreachable if failure.sent && repeatable => {
                CallError::Remote { fate, failure: failure.clone() }
            }
            FailureClass::Unauthorized => CallError::Refused {
                status: Status::RequiresReauth,
                message: refusal_message(&self.core.spec.name, Status::RequiresReauth, &failure.to_string()),
                remedy: Some(Remedy::Authorize),
            },
            FailureClass::Unreachable | FailureClass::Expired => {
                CallError::Terminated { fate, reason: disconnect_message(&failure) }
            }
        };
        if class == FailureClass::Busy && !is_given_up {
            let stateless = self.core.era == Era::Stateless;
            let is_cut = matches!(failure.kind, FailureKind::Cut | FailureKind::Broken(_));
            if is_cut || retry::is_session_doubtful(&failure.kind) || (stateless && era::is_refusal(&failure.kind)) {
                self.request_session_check();
            }
            ticket.fail(error);
            return None;
        }
        // Closes the port before the caller learns of it, so that no call enters in between.
        self.ports.commands.close();
        ticket.fail(error);
        Some(RemoteSessionEnd::Lost(failure))
    }

    fn on_check_failed(&mut self, why: &str) -> Option<RemoteSessionEnd> {
        let policy = &self.core.spec.policy.health;
        let host = &self.core.host;
        host.counters.record_failed_check((host.wall)());
        match self.checks.as_mut()?.record_failure(policy, why.to_owned(), now()) {
            HealthVerdict::Wait => None,
            HealthVerdict::Degraded(failures) => {
                self.core.host.report(SessionEvent::Degraded(failures, why.to_owned()));
                None
            }
            HealthVerdict::GiveUp(failures) => {
                self.core.host.report(SessionEvent::Degraded(failures, why.to_owned()));
                Some(RemoteSessionEnd::Lost(ExchangeFailure::sent(FailureKind::Unhealthy(failures))))
            }
        }
    }

    // ---- time ----

    fn on_time(&mut self) -> Option<RemoteSessionEnd> {
        let now = now();
        while let Some(late) = self.core.expire_next(now) {
            match late {
                // Only processes are adopted.
                PassedDeadline::Call | PassedDeadline::List | PassedDeadline::Resume => {}
                PassedDeadline::Handshake => {
                    let limit = self.core.spec.policy.session.handshake_timeout;
                    return Some(RemoteSessionEnd::Lost(ExchangeFailure::sent(FailureKind::HeaderTimeout(limit))));
                }
                PassedDeadline::HandshakeRefused(how) => return Some(end_from_refusal(how)),
                PassedDeadline::Check => {
                    let limit = self.core.spec.policy.health.timeout;
                    if let Some(end) = self.on_check_failed(&format!("no answer within {} s", limit.as_secs_f64())) {
                        return Some(end);
                    }
                }
            }
        }
        while let Some((at, id)) = self.retries.first().copied()
            && now >= at
        {
            self.retries.remove(&(at, id));
            self.core.resend(id);
        }
        self.core.on_due(now);
        if self.checks.as_ref().and_then(HealthChecks::due_at).is_some_and(|at| now >= at) {
            self.start_check(now);
        }
        None
    }

    fn start_check(&mut self, now: Instant) {
        let policy = &self.core.spec.policy.health;
        let Some(checks) = &mut self.checks else { return };
        let (deadline, check) = (now + policy.timeout, checks.begin(policy));
        match check {
            HealthCheck::Ping => {
                self.core.send_own_request(self.core.era.check_method(), None, PendingPurpose::Check, deadline);
            }
            HealthCheck::ToolsList => {
                self.core.send_own_request(method::TOOLS_LIST, None, PendingPurpose::Check, deadline);
            }
            HealthCheck::Get => {
                let id = self.core.gate.draw_id();
                self.core.calls.insert(id, PendingRequest::new(PendingPurpose::Check, deadline));
                self.core.outlet.line.send(LineOutput::Probe { id });
            }
        }
    }

    // ---- the end ----

    fn drain(&mut self) -> bool {
        // Calls answered before the end get their results, and unsent calls their fate. Returns true if the connection
        // is over.
        let mut is_over = false;
        self.core.calls.retain_callers();
        for _ in 0..FINAL_MESSAGES_MAX {
            if self.core.calls.pending.is_empty() {
                break;
            }
            let next = tokio::task::unconstrained(poll_fn(|cx| self.core.outlet.line.poll_next(cx)));
            match next.now_or_never() {
                Some(LineEvent::Message { message, .. }) => self.on_final_message(&message),
                Some(LineEvent::Failed { id, failure }) => {
                    if let Some(pending) = self.core.calls.pending.get_mut(&id) {
                        pending.record_failure(&failure);
                    }
                }
                Some(LineEvent::Probed { .. }) => {}
                Some(LineEvent::Lost(_)) => is_over = true,
                Some(LineEvent::Closed) => return true,
                None => break,
            }
        }
        is_over
    }

    fn on_final_message(&mut self, message: &Bytes) {
        if let Some(call) = self.core.on_final_message(message, now()) {
            self.refuse(*call);
        }
    }

    fn refuse(&mut self, call: RefusedCall) {
        // Closes the port before the caller learns of it, so that no call enters in between.
        self.ports.commands.close();
        call.fail();
    }

    async fn await_refusals(&mut self) {
        // In an expired session a refused call was not executed, and the next session repeats it.
        let until = now() + EXPIRED_SESSION_WAIT;
        for _ in 0..FINAL_MESSAGES_MAX {
            if !self.core.calls.pending.values().any(|pending| pending.output_offset.is_some()) {
                return;
            }
            let next = poll_fn(|cx| self.core.outlet.line.poll_next(cx));
            match tokio::time::timeout_at(until.into(), next).await {
                Ok(LineEvent::Message { message, .. }) => self.on_final_message(&message),
                Ok(LineEvent::Failed { id, failure }) => {
                    if let Some(pending) = self.core.calls.pending.get_mut(&id) {
                        pending.record_failure(&failure);
                    }
                }
                Ok(LineEvent::Probed { .. } | LineEvent::Lost(_)) => {}
                Ok(LineEvent::Closed) | Err(_) => return,
            }
        }
    }

    async fn finish(&mut self, end: RemoteSessionEnd) -> WorkerExit {
        self.core.host.count_sent(std::mem::take(&mut self.core.outlet.sent));
        let ran = self.core.initialized_at.map(|at| now().saturating_duration_since(at));
        let exit = match end {
            RemoteSessionEnd::Requested => {
                self.drain();
                self.core.outlet.line.send(LineOutput::Close);
                let is_over = self.drain();
                self.ports.close(&mut self.core, "stopped");
                let closed = async {
                    // Later messages are ignored.
                    while !is_over
                        && !matches!(
                            poll_fn(|cx| self.core.outlet.line.poll_next(cx)).await,
                            LineEvent::Closed | LineEvent::Lost(_)
                        )
                    {}
                };
                // A server that does not confirm the close detects it by itself.
                let _ = tokio::time::timeout(self.core.spec.policy.remote.close_timeout, closed).await;
                WorkerExit::from_cause(ExitCause::Requested)
            }
            RemoteSessionEnd::Lost(failure) => {
                self.drain();
                if matches!(failure.kind, FailureKind::SessionExpired { .. }) {
                    self.await_refusals().await;
                }
                self.ports.close(&mut self.core, &disconnect_message(&failure));
                WorkerExit::from_cause(ExitCause::Lost(failure))
            }
        };
        WorkerExit { uptime: ran, ..exit }
    }
}

fn end_from_refusal(how: HandshakeRefusal) -> RemoteSessionEnd {
    RemoteSessionEnd::Lost(match how {
        HandshakeRefusal::Rejected(why) => ExchangeFailure::sent(FailureKind::Handshake(why)),
        HandshakeRefusal::Failed(failure) => failure,
    })
}

fn disconnect_message(failure: &ExchangeFailure) -> String {
    format!("Server disconnected: {failure}")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll};

    use mcp_satellite_session::{CallerRequest, FIRST_REQUEST_ID};
    use tokio::sync::mpsc;

    use super::*;
    use crate::audience::{AudienceHandle, NoAudience, SessionSource};
    use crate::calls::{CallPort, InstanceCounters};
    use crate::model::ids::{InstanceId, RunNumber};
    use crate::model::policy::Policy;
    use crate::model::secret::SecretMask;
    use crate::model::spec::{ProcessLifetime, RemoteTransport, ServerTarget, UpdateMethod};
    use crate::rules::jitter::JitterRng;
    use crate::seam::NoObserver;

    // Completes the handshake, delivers `answered` responses without waking the session, and fails `gated` requests as
    // unsent at the close.
    #[derive(Default)]
    struct ScriptedLine {
        inbox: VecDeque<LineEvent>,
        later: VecDeque<LineEvent>,
        gated: Vec<u64>,
        arrived: Arc<AtomicBool>,
    }

    impl ServerLine for ScriptedLine {
        fn send(&mut self, message: LineOutput) {
            match message {
                LineOutput::Request { id, body, .. } => {
                    let body = String::from_utf8_lossy(&body).into_owned();
                    let answer = |result: &str| {
                        let message = format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#).into();
                        LineEvent::Message { message, request: Some(id) }
                    };
                    if body.contains("initialize") {
                        let greeting = r#"{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"a","version":"1"}}"#;
                        self.inbox.push_back(answer(greeting));
                    } else if body.contains("answered") {
                        self.later.push_back(answer("{}"));
                    } else if body.contains("gated") {
                        self.gated.push(id);
                    }
                }
                LineOutput::Close => {
                    let unsent = |id| LineEvent::Failed { id, failure: ExchangeFailure::unsent(FailureKind::Cut) };
                    self.inbox.extend(self.gated.drain(..).map(unsent));
                    self.inbox.push_back(LineEvent::Closed);
                }
                _ => {}
            }
        }

        fn poll_next(&mut self, _cx: &mut Context<'_>) -> Poll<LineEvent> {
            if self.arrived.load(Ordering::Relaxed) {
                self.inbox.append(&mut self.later);
            }
            self.inbox.pop_front().map_or(Poll::Pending, Poll::Ready)
        }
    }

    pub(crate) fn spec() -> Arc<InstanceSpec> {
        Arc::new(InstanceSpec {
            id: InstanceId::new("acme".into(), "alice".into(), "a".into()),
            name: "files-acme-alice-a".into(),
            server: "files".into(),
            team_slug: "acme".into(),
            user_slug: "alice".into(),
            target: ServerTarget::Remote { transport: RemoteTransport::Http, url: String::new(), health_url: None },
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

    #[test]
    fn a_close_delivers_responses_and_reports_the_fate_of_other_requests() {
        let counters = Arc::new(InstanceCounters::default());
        let (port, end) = CallPort::new(RunNumber(1), FIRST_REQUEST_ID, spec(), counters.clone(), Arc::new(NoObserver));
        let (control, controlled) = mpsc::unbounded_channel();
        let line = ScriptedLine::default();
        let arrived = line.arrived.clone();
        let session = async {
            let common = SessionArgs {
                spec: spec(),
                port: end,
                control: controlled,
                counters,
                wall: Arc::new(|| jiff::Timestamp::UNIX_EPOCH),
                since: tokio::time::Instant::now(),
                discover: false,
                era: None,
                resumed: None,
                rng: JitterRng::new(1, "a"),
                report_event: Box::new(|_| {}),
                stdout_lines: None,
                observer: Arc::new(NoObserver),
                memory: crate::byte_budget::ServerMemory::default(),
                audience: AudienceHandle::new(
                    Arc::new(NoAudience),
                    SessionSource { id: spec().id.clone(), run: RunNumber(1) },
                ),
            };
            run(Args { common, line: Box::new(line) }).await
        };
        let ask = |method: &str| {
            let request = CallerRequest::Method { method: method.to_owned(), params: None };
            port.request(request, Duration::from_secs(5))
        };
        let stop = async {
            // By then the session has passed the three requests to its line and waits.
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            arrived.store(true, Ordering::Relaxed);
            control.send(SessionControl::Stop).unwrap();
        };
        let all = async { futures::join!(ask("answered"), ask("gated"), ask("lost"), session, stop) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (answered, gated, lost, exit, ()) = runtime.block_on(all);
        assert!(answered.is_ok(), "{answered:?}");
        assert_eq!(gated.unwrap_err().fate(), Some(CallFate::NotSent));
        assert_eq!(lost.unwrap_err().fate(), Some(CallFate::MaybeExecuted));
        assert_eq!(exit.cause, ExitCause::Requested);
    }
}
