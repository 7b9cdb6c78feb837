//! Call port of a run: the way of requests into its session.
//!
//! A caller that finds the port closed has sent nothing and asks the slot, which counts as no attempt.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use futures::FutureExt as _;
use futures::future::Fuse;
use jiff::Timestamp;
use mcp_satellite_protocol::error_code::INTERNAL_ERROR;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, member};
use mcp_satellite_session::{
    AdmissionError, AdmittedRequest, CallGate, CallPermit, CallTicket, CallerRequest, ClientRelay, DiscoverRequest,
    OutboundRequest, ReplyChannel, SessionCommand, TIMEOUT_MAX, UnansweredCalls,
};
use serde_json::value::RawValue;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Duration, Instant};

use crate::model::actor_tree::{PermitKind, PermitLoad};
use crate::model::exit::{CallError, CallFate};
use crate::model::ids::RunNumber;
use crate::model::remote::ServerInfo;
use crate::model::spec::InstanceSpec;
use crate::rules::idle::RunActivity;
use crate::seam::{CallEnd, CallSpan, ObservedCall, ObservedSide, RuntimeObserver, TraceOrigin};

/// Live counters of one instance over all its runs, written by its sessions.
#[derive(Debug, Default)]
pub struct InstanceCounters {
    messages: AtomicU64,
    calls: AtomicU64,
    errors: AtomicU64,
    malformed: AtomicU64,
    last_activity: AtomicI64,
    last_check: AtomicI64,
    failed_checks: AtomicU64,
}

impl InstanceCounters {
    pub(crate) fn record_message(&self, at: Timestamp) {
        self.messages.fetch_add(1, Ordering::Relaxed);
        self.last_activity.store(at.as_millisecond(), Ordering::Relaxed);
    }

    pub(crate) fn record_call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn record_error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn record_malformed(&self) -> u64 {
        // The number of malformed lines before this one.
        self.malformed.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the number of messages received from the server.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// Returns the number of calls made.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns the number of calls that did not end with a result.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Returns the number of lines from the server that were not JSON-RPC.
    pub fn malformed(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }

    pub(crate) fn record_check(&self, at: Timestamp) {
        self.last_check.store(at.as_millisecond(), Ordering::Relaxed);
        self.reset_failed_checks();
    }

    pub(crate) fn reset_failed_checks(&self) {
        self.failed_checks.store(0, Ordering::Relaxed);
    }

    pub(crate) fn record_failed_check(&self, at: Timestamp) {
        self.last_check.store(at.as_millisecond(), Ordering::Relaxed);
        self.failed_checks.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of failed health checks in a row.
    pub fn failed_checks(&self) -> u64 {
        self.failed_checks.load(Ordering::Relaxed)
    }

    /// Returns the time of the last message from the server.
    pub fn last_activity(&self) -> Option<Timestamp> {
        load_timestamp(&self.last_activity)
    }

    /// Returns the time of the last health check; a successful call counts as one.
    pub fn last_check(&self) -> Option<Timestamp> {
        load_timestamp(&self.last_check)
    }
}

fn load_timestamp(at: &AtomicI64) -> Option<Timestamp> {
    let at = at.load(Ordering::Relaxed);
    (at != 0).then(|| Timestamp::from_millisecond(at).ok()).flatten()
}

/// Guard that keeps a run awake: a client waits for messages that the server sends by itself.
pub struct KeepAwakeGuard(Arc<CallGate>);

impl fmt::Debug for KeepAwakeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeepAwakeGuard")
    }
}

impl Drop for KeepAwakeGuard {
    fn drop(&mut self) {
        self.0.release_awake(Instant::now().into_std());
    }
}

/// Call port of one run. Cloning is cheap. A port outlives its run and then rejects every call.
#[derive(Clone)]
pub struct CallPort(Arc<CallPortInner>);

struct CallPortInner {
    run: RunNumber,
    commands: mpsc::UnboundedSender<Box<SessionCommand>>,
    gate: Arc<CallGate>,
    spec: Arc<InstanceSpec>,
    counters: Arc<InstanceCounters>,
    observer: Arc<dyn RuntimeObserver>,
}

impl fmt::Debug for CallPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallPort({:?})", self.0.run)
    }
}

pub(crate) struct CallPortReceiver {
    pub(crate) commands: mpsc::UnboundedReceiver<Box<SessionCommand>>,
    pub(crate) answers: mpsc::UnboundedSender<Box<SessionCommand>>,
    pub(crate) gate: Arc<CallGate>,
}

/// Call in flight. Dropping it before the answer cancels the call in the session.
struct CallInFlight<'a> {
    port: &'a CallPortInner,
    id: u64,
    method: Option<String>,
    started: Instant,
    answered: bool,
    // `None` if the call is not observed, or its end was reported.
    span: Option<Box<dyn CallSpan>>,
}

impl CallInFlight<'_> {
    async fn wait_for_answer<T>(
        &mut self,
        answer: &mut oneshot::Receiver<Result<T, CallError>>,
        to_end: impl FnOnce(&T) -> CallEnd<'_>,
    ) -> Result<T, CallError> {
        let answer = answer.await.unwrap_or_else(|_| {
            Err(CallError::Terminated { fate: CallFate::MaybeExecuted, reason: "the run ended".to_owned() })
        });
        self.answered = true;
        let end = answer.as_ref().map_or_else(CallEnd::Failed, to_end);
        let ok = matches!(end, CallEnd::Result(_));
        if !ok {
            self.port.counters.record_error();
        }
        if let Some(method) = &self.method {
            // A u128 becomes a string in a JSON log.
            let duration_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            let spec = &self.port.spec;
            tracing::debug!(
                instance = %spec.name, request_id = self.id, method, duration_ms, ok, "request"
            );
        }
        if let Some(span) = self.span.take() {
            span.end(end);
        }
        answer
    }

    fn withdraw(mut self, message: RpcMessage) {
        self.answered = true;
        let _ = self.port.commands.send(Box::new(SessionCommand::Cancel { id: self.id, notification: Some(message) }));
    }
}

impl Drop for CallInFlight<'_> {
    fn drop(&mut self) {
        if !self.answered {
            // The send fails if the run is over, and the call with it.
            let _ = self.port.commands.send(Box::new(SessionCommand::Cancel { id: self.id, notification: None }));
        }
    }
}

impl CallPortInner {
    fn begin_span(&self, id: u64, request: &OutboundRequest, attempt: u32) -> Option<Box<dyn CallSpan>> {
        if !self.observer.observes_calls() {
            return None;
        }
        let (trace, target, params) = match request {
            OutboundRequest::Relay(relay) => {
                let tool = relay.tool.as_deref();
                (TraceOrigin::Within(relay.trace), tool, relay.message.params())
            }
            OutboundRequest::Request(CallerRequest::Tool { name, arguments, trace, .. }) => {
                (TraceOrigin::Entry(*trace), Some(&**name), arguments.as_deref().map(RawValue::get))
            }
            // These requests of the gateway belong to no call.
            OutboundRequest::Request(CallerRequest::Method { .. }) => return None,
        };
        self.observer.begin_call(&ObservedCall {
            side: ObservedSide::Client { attempt },
            trace,
            method: request.method(),
            target,
            params,
            request_id: &id,
            version: self.gate.version(),
            spec: Some(&self.spec),
        })
    }
}

/// Returns the end of a request that got this response.
pub fn response_end(response: &RpcMessage) -> CallEnd<'_> {
    let outcome = response.outcome().unwrap_or_default();
    if response.kind() == MessageKind::Result {
        return CallEnd::Result(outcome);
    }
    let code = member(outcome, "code").and_then(|code| code.parse().ok()).unwrap_or(INTERNAL_ERROR);
    let message = member(outcome, "message").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    CallEnd::Error { code, message: Cow::Owned(message) }
}

impl CallPort {
    pub(crate) fn new(
        run: RunNumber,
        first_id: u64,
        spec: Arc<InstanceSpec>,
        counters: Arc<InstanceCounters>,
        observer: Arc<dyn RuntimeObserver>,
    ) -> (Self, CallPortReceiver) {
        // The channel is unbounded, but every request in it holds a permit.
        let (commands, end) = mpsc::unbounded_channel();
        let calls_max = spec.policy.session.calls_in_flight_max;
        let gate = Arc::new(CallGate::new(calls_max, first_id, Instant::now().into_std()));
        let answers = commands.clone();
        let port = CallPortInner { run, commands, gate: gate.clone(), spec, counters, observer };
        (Self(Arc::new(port)), CallPortReceiver { commands: end, answers, gate })
    }

    /// Returns the run that this port belongs to.
    pub fn run(&self) -> RunNumber {
        self.0.run
    }

    /// Returns the number of unanswered calls.
    pub fn calls_in_flight(&self) -> usize {
        self.0.gate.in_flight()
    }

    pub(crate) fn load(&self) -> PermitLoad {
        let (held, max) = (self.calls_in_flight(), Some(self.0.gate.calls_max()));
        PermitLoad { pool: PermitKind::Calls, held, waiting: 0, max }
    }

    /// Returns true while the run admits requests.
    pub fn is_open(&self) -> bool {
        !self.0.gate.is_closed() && !self.is_over()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0.commands.is_closed()
    }

    pub(crate) fn close(&self) {
        self.0.gate.close();
    }

    pub(crate) fn close_if_unused(&self) -> bool {
        self.0.gate.close_if_empty()
    }

    pub(crate) fn activity(&self) -> RunActivity {
        let gate = &self.0.gate;
        RunActivity { user_count: gate.in_flight() + gate.keep_awake_count(), last: gate.active_at() }
    }

    /// Keeps the run awake while the returned guard exists. A run that falls asleep at the same moment ends anyway; the
    /// caller must then ask again.
    pub fn keep_awake(&self) -> KeepAwakeGuard {
        self.0.gate.keep_awake();
        KeepAwakeGuard(self.0.gate.clone())
    }

    pub(crate) fn try_acquire(&self) -> Result<CallPermit, AdmissionError> {
        self.0.gate.try_acquire()
    }

    pub(crate) fn busy_error(&self) -> CallError {
        CallError::Busy { what: "calls in flight for this server", limit: self.0.gate.calls_max() }
    }

    /// Sends a request and waits for the response for at most `timeout`; progress extends the deadline. Dropping the
    /// future cancels the call on the server.
    ///
    /// # Errors
    ///
    /// Returns the server's error, a timeout, or the reason why the request was not admitted or its run ended.
    pub async fn request(&self, request: CallerRequest, timeout: Duration) -> Result<Box<RawValue>, CallError> {
        match self.try_acquire() {
            Ok(permit) => self.request_with_permit(permit, request, timeout, 1).await,
            Err(AdmissionError::Full) => Err(self.busy_error()),
            Err(AdmissionError::Closed) => {
                let reason = "the run accepts no more calls".to_owned();
                Err(CallError::Terminated { fate: CallFate::NotSent, reason })
            }
        }
    }

    pub(crate) async fn request_with_permit(
        &self,
        permit: CallPermit,
        request: CallerRequest,
        timeout: Duration,
        attempt: u32,
    ) -> Result<Box<RawValue>, CallError> {
        let (reply, mut answer) = oneshot::channel();
        self.send_request(permit, OutboundRequest::Request(request), timeout, ReplyChannel::Result(reply), attempt)
            .wait_for_answer(&mut answer, |result| CallEnd::Result(result.get()))
            .await
    }

    /// Forwards a client's request. Returns `None` if the client withdraws it with a cancellation in `withdrawn`.
    pub(crate) async fn relay_with_permit(
        &self,
        permit: CallPermit,
        relay: ClientRelay,
        timeout: Duration,
        attempt: u32,
        withdrawn: &mut Fuse<oneshot::Receiver<RpcMessage>>,
    ) -> Result<Option<RpcMessage>, CallError> {
        // The client may have withdrawn the request while it waited for the server.
        if let Some(Ok(_)) = (&mut *withdrawn).now_or_never() {
            return Ok(None);
        }
        let (reply, mut answer) = oneshot::channel();
        let mut asking =
            self.send_request(permit, OutboundRequest::Relay(relay), timeout, ReplyChannel::Message(reply), attempt);
        let message = tokio::select! {
            biased;
            Ok(message) = withdrawn => message,
            answer = asking.wait_for_answer(&mut answer, response_end) => return answer.map(Some),
        };
        asking.withdraw(message);
        Ok(None)
    }

    fn send_request(
        &self,
        permit: CallPermit,
        mut wanted: OutboundRequest,
        timeout: Duration,
        waiter: ReplyChannel,
        attempt: u32,
    ) -> CallInFlight<'_> {
        let port = &*self.0;
        let id = port.gate.draw_id();
        let span = port.begin_span(id, &wanted, attempt);
        if let Some(trace) = span.as_ref().and_then(|span| span.trace()) {
            wanted.set_trace(trace);
        }
        let ticket = CallTicket::new(waiter, permit);
        port.counters.record_call();
        let method = tracing::enabled!(tracing::Level::DEBUG).then(|| wanted.method().to_owned());
        let started = Instant::now();
        // If the run is over, the command is dropped and its ticket answers `not_sent`.
        let timeout = timeout.min(TIMEOUT_MAX);
        let repeatable = wanted.is_repeatable();
        let admitted =
            AdmittedRequest { id, request: wanted, started: started.into_std(), timeout, repeatable, ticket };
        let _ = port.commands.send(Box::new(SessionCommand::Request(admitted)));
        CallInFlight { port, id, method, started, answered: false, span }
    }

    pub(crate) async fn discover(
        &self,
        permit: CallPermit,
        timeout: Duration,
    ) -> Result<Option<Arc<ServerInfo>>, CallError> {
        if let Some(known) = self.0.gate.stateless_support() {
            return Ok(known);
        }
        let (reply, answer) = oneshot::channel();
        let timeout = timeout.min(TIMEOUT_MAX);
        let discover = DiscoverRequest { permit, reply };
        let _ = self.0.commands.send(Box::new(SessionCommand::Discover(discover)));
        // This request has no side effects, however often it is sent.
        let terminated = || CallError::Terminated { fate: CallFate::NotSent, reason: "the run ended".to_owned() };
        let late = CallError::TimedOut { after: timeout, fate: CallFate::NotSent };
        match tokio::time::timeout(timeout, answer).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(terminated())),
            Err(_elapsed) => Err(late),
        }
    }

    /// Returns the unanswered calls, at most `max`; none if the run is over.
    pub(crate) async fn unanswered_calls(&self, max: usize) -> UnansweredCalls {
        let (reply, list) = oneshot::channel();
        let _ = self.0.commands.send(Box::new(SessionCommand::ListCalls { max, reply }));
        list.await.unwrap_or_default()
    }

    /// Returns the protocol version that the run has negotiated.
    pub(crate) fn version(&self) -> Option<&str> {
        self.0.gate.version()
    }

    pub(crate) fn notify(&self, message: RpcMessage) -> Result<(), AdmissionError> {
        let permit = self.try_acquire()?;
        // If the run is over, the notification is dropped.
        let _ = self.0.commands.send(Box::new(SessionCommand::Notify { message, permit }));
        Ok(())
    }
}
