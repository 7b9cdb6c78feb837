//! Call port of a run: admission of requests, their limit, and their outcome.
//!
//! Every caller gets exactly one answer: a `CallTicket` answers when it is dropped, with the fate that the session last
//! recorded.
//!
//! Ids on the wire are assigned here and are never reused in a run. A port is closed for sleep only while no call is in
//! it; a caller that finds it closed has sent nothing and asks the slot, which counts as no attempt.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

use bytestring::ByteString;
use futures::FutureExt as _;
use futures::future::Fuse;
use jiff::Timestamp;
use mcp_satellite_protocol::error_code::INTERNAL_ERROR;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Duration, Instant};

use crate::audience::CallOrigin;
use crate::model::era::Era;
use crate::model::exit::{CallError, CallFate};
use crate::model::ids::RunNumber;
use crate::model::remote::ServerInfo;
use crate::model::secret::SecretMask;
use crate::model::spec::InstanceSpec;
use crate::rules::idle::RunActivity;
use crate::rules::request_log::normalize_escapes;
use mcp_satellite_protocol::rpc::{MessageKind, MessageView, RpcMessage};

/// Timeout that stands for "no timeout": a clock must be able to represent the deadline.
pub(crate) const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Request of a caller to a server.
#[derive(Debug)]
pub enum CallerRequest {
    /// A `tools/call` request. It carries one of our progress tokens, so that progress can extend its deadline.
    Tool {
        /// Name of the tool on its server.
        name: String,
        /// Arguments: a JSON object, or `None`.
        arguments: Option<Box<RawValue>>,
        /// True if the tool is annotated as read-only or idempotent.
        repeatable: bool,
    },
    /// Any other method; its params are passed on unchanged.
    Method {
        /// Name of the method.
        method: String,
        /// Params: a JSON object, or `None`.
        params: Option<Box<RawValue>>,
    },
}

/// Request of a client, forwarded unchanged except for its id and its progress token.
#[derive(Debug, Clone)]
pub struct ClientRelay {
    /// The client's request.
    pub message: RpcMessage,
    /// Client and call that made the request.
    pub origin: CallOrigin,
    /// True if the request may be sent again although the server may have executed it.
    pub repeatable: bool,
    /// Name of the called tool, if any.
    pub tool: Option<String>,
    /// Era in which the request is written. A request of the stateless era reaches its server in that form, and a
    /// result that asks for input goes back to the client like any other. A request of a session's client is translated
    /// if the server has no sessions.
    pub era: Era,
    /// Identity and capabilities of a session's client, passed to a stateless server. `None`: the satellite's own are
    /// used.
    pub client: Option<Arc<ClientFacts>>,
}

/// Identity and capabilities from the `initialize` request of a session's client, as JSON text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFacts {
    /// Value of `capabilities`, a JSON object.
    pub capabilities: String,
    /// Value of `clientInfo`, a JSON object.
    pub info: String,
}

#[derive(Debug)]
pub(crate) enum OutboundRequest {
    Request(CallerRequest),
    Relay(ClientRelay),
}

impl OutboundRequest {
    fn is_repeatable(&self) -> bool {
        match self {
            Self::Request(CallerRequest::Tool { repeatable, .. }) | Self::Relay(ClientRelay { repeatable, .. }) => {
                *repeatable
            }
            Self::Request(CallerRequest::Method { method, .. }) => is_repeatable(method),
        }
    }

    fn method(&self) -> &str {
        match self {
            Self::Request(CallerRequest::Tool { .. }) => "tools/call",
            Self::Request(CallerRequest::Method { method, .. }) => method,
            Self::Relay(ClientRelay { message, .. }) => message.method().unwrap_or_default(),
        }
    }
}

/// Returns true if a request of this method has no side effects and may safely be sent twice. Always false for
/// `tools/call`: the tool's annotations decide.
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

/// Response channel of a caller: for the result only, or for the whole message, including an error response.
enum ReplyChannel {
    Result(oneshot::Sender<Result<Box<RawValue>, CallError>>),
    Message(oneshot::Sender<Result<RpcMessage, CallError>>),
}

impl ReplyChannel {
    fn fail(self, error: CallError) {
        // The send fails if the caller has gone; its cancellation is then on its way.
        match self {
            Self::Result(reply) => drop(reply.send(Err(error))),
            Self::Message(reply) => drop(reply.send(Err(error))),
        }
    }
}

/// Permit and response channel of an admitted call. Dropped without an answer, it fails the call with `fate`.
pub(crate) struct CallTicket {
    reply: Option<ReplyChannel>,
    pub(crate) fate: CallFate,
    permit: Option<CallPermit>,
}

impl CallTicket {
    pub(crate) fn answer(mut self, answer: &MessageView<'_>, text: &ByteString, mask: &SecretMask) {
        // Releases the permit before the caller sees the answer.
        self.permit = None;
        match (self.reply.take(), answer.kind, answer.outcome) {
            (Some(ReplyChannel::Message(reply)), MessageKind::Result, _) => {
                drop(reply.send(Ok(answer.to_message(text))));
            }
            (Some(ReplyChannel::Message(reply)), _, _) => drop(reply.send(Ok(mask_error(answer, text, mask)))),
            (Some(ReplyChannel::Result(reply)), MessageKind::Result, Some(result)) => {
                drop(reply.send(Ok(result.to_owned())));
            }
            (Some(waiter), _, error) => waiter.fail(server_error(error, mask)),
            (None, _, _) => {}
        }
    }

    pub(crate) fn fail(mut self, error: CallError) {
        self.permit = None;
        if let Some(waiter) = self.reply.take() {
            waiter.fail(error);
        }
    }
}

impl Drop for CallTicket {
    fn drop(&mut self) {
        if let Some(waiter) = self.reply.take() {
            waiter.fail(CallError::Terminated { fate: self.fate, reason: "the run ended".to_owned() });
        }
    }
}

fn mask_error(answer: &MessageView<'_>, text: &ByteString, mask: &SecretMask) -> RpcMessage {
    // The error is rewritten only if it contains a secret.
    let kept = answer.to_message(text);
    // Compares the decoded text: PHP escapes slashes, Python everything outside ASCII.
    let (Some(error), true) = (answer.outcome, mask.has_match_in(&normalize_escapes(text))) else { return kept };
    let error = serde_json::from_str(error.get()).map_or_else(
        // The error contains numbers or strings that this parser does not support.
        |_| json!({"code": INTERNAL_ERROR, "message": mask.apply(&normalize_escapes(error.get()))}),
        |error| mask.apply_json(error),
    );
    let id = answer.id.map_or("null", RawValue::get);
    let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
    RpcMessage::parse(text.into()).unwrap_or(kept)
}

pub(crate) fn server_error(error: Option<&RawValue>, mask: &SecretMask) -> CallError {
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

/// Commands to a session. `Cancel` contains the client's own notification if it sent one, `Decline` an error code and
/// the reason. `Tell` holds its permit until the notification is queued, and is dropped if the server does not read;
/// `Discover` holds it until the answer. `NoRoots` answers for a caller without a client. Sent boxed: the channel
/// allocates 32 slots per instance.
pub(crate) enum SessionCommand {
    Request(AdmittedRequest),
    Cancel { id: u64, notification: Option<RpcMessage> },
    Notify { message: RpcMessage, permit: CallPermit },
    Answer { question: u64, message: RpcMessage },
    Decline { question: u64, code: i64, why: String },
    NoRoots { question: u64 },
    Discover(DiscoverRequest),
}

pub(crate) struct DiscoverRequest {
    pub(crate) permit: CallPermit,
    pub(crate) reply: oneshot::Sender<Result<Option<Arc<ServerInfo>>, CallError>>,
}

impl DiscoverRequest {
    pub(crate) fn answer(self, answer: Result<Option<Arc<ServerInfo>>, CallError>) {
        drop(self.permit);
        // The send fails if the caller no longer waits.
        let _ = self.reply.send(answer);
    }
}

pub(crate) struct AdmittedRequest {
    pub(crate) id: u64,
    pub(crate) request: OutboundRequest,
    pub(crate) started: Instant,
    pub(crate) timeout: Duration,
    pub(crate) repeatable: bool,
    pub(crate) ticket: CallTicket,
}

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

/// State shared by the port of a run and its session: permits, admission and the time of the last activity.
pub(crate) struct CallGate {
    /// Number of calls in flight, plus `CLOSED` if the port admits no more. One number, so that either a run falls
    /// asleep or a call enters, and never both.
    in_flight: AtomicUsize,
    keep_awake_count: AtomicUsize,
    pub(crate) calls_max: AtomicUsize,
    /// Notified when the last call leaves a closed port: its session may be waiting for that.
    pub(crate) emptied: Notify,
    pub(crate) next_id: AtomicU64,
    began_at: Instant,
    /// Nanoseconds since `began`.
    active_at: AtomicU64,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

impl CallGate {
    fn new(calls_max: usize) -> Self {
        let (in_flight, keep_awake_count) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (next_id, active_at) = (AtomicU64::new(1), AtomicU64::new(0));
        Self {
            in_flight,
            keep_awake_count,
            calls_max: AtomicUsize::new(calls_max),
            emptied: Notify::new(),
            next_id,
            began_at: Instant::now(),
            active_at,
        }
    }

    fn try_acquire(self: &Arc<Self>) -> Result<CallPermit, AdmissionError> {
        let limit = self.calls_max.load(Ordering::Relaxed).min(CLOSED - 1);
        let one_more = |inside: usize| (inside < limit).then_some(inside + 1);
        match self.in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more) {
            Ok(_) => Ok(CallPermit(self.clone())),
            Err(inside) if inside >= CLOSED => Err(AdmissionError::Closed),
            Err(_) => Err(AdmissionError::Full),
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire) & !CLOSED
    }

    fn is_closed(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) >= CLOSED
    }

    fn close(&self) {
        self.in_flight.fetch_or(CLOSED, Ordering::AcqRel);
    }

    fn close_if_empty(&self) -> bool {
        self.in_flight.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(crate) fn record_activity(&self, at: Instant) {
        let nanos = at.saturating_duration_since(self.began_at).as_nanos();
        self.active_at.fetch_max(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

pub(crate) struct CallPermit(Arc<CallGate>);

impl Drop for CallPermit {
    fn drop(&mut self) {
        // A caller may leave without notifying the session, which would then wait forever.
        if self.0.in_flight.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            self.0.emptied.notify_one();
        }
    }
}

/// Guard that keeps a run awake: a client waits for messages that the server sends by itself.
pub struct KeepAwakeGuard(Arc<CallGate>);

impl fmt::Debug for KeepAwakeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Held")
    }
}

impl Drop for KeepAwakeGuard {
    fn drop(&mut self) {
        self.0.record_activity(Instant::now());
        self.0.keep_awake_count.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdmissionError {
    Full,
    Closed,
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
}

impl fmt::Debug for CallPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallPort({:?})", self.0.run)
    }
}

impl CallPortInner {
    fn limit(&self) -> usize {
        self.gate.calls_max.load(Ordering::Relaxed)
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
}

impl CallInFlight<'_> {
    async fn wait_for_answer<T>(
        &mut self,
        answer: &mut oneshot::Receiver<Result<T, CallError>>,
        is_result: impl FnOnce(&T) -> bool,
    ) -> Result<T, CallError> {
        let answer = answer.await.unwrap_or_else(|_| {
            Err(CallError::Terminated { fate: CallFate::MaybeExecuted, reason: "the run ended".to_owned() })
        });
        self.answered = true;
        let ok = answer.as_ref().is_ok_and(is_result);
        if !ok {
            self.port.counters.record_error();
        }
        if let Some(method) = &self.method {
            // A u128 becomes a string in a JSON log.
            let duration_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            let spec = &self.port.spec;
            tracing::debug!(
                instance = %spec.name,                 request_id = self.id, method, duration_ms, ok, "request"
            );
        }
        answer
    }

    fn withdraw(mut self, words: RpcMessage) {
        self.answered = true;
        let _ = self.port.commands.send(Box::new(SessionCommand::Cancel { id: self.id, notification: Some(words) }));
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

impl CallPort {
    pub(crate) fn new(
        run: RunNumber,
        spec: Arc<InstanceSpec>,
        counters: Arc<InstanceCounters>,
    ) -> (Self, CallPortReceiver) {
        // The channel is unbounded, but every request in it holds a permit.
        let (commands, end) = mpsc::unbounded_channel();
        let gate = Arc::new(CallGate::new(spec.policy.session.calls_in_flight_max));
        let answers = commands.clone();
        let port = CallPortInner { run, commands, gate: gate.clone(), spec, counters };
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
        let last = gate.began_at + Duration::from_nanos(gate.active_at.load(Ordering::Relaxed));
        let held = gate.keep_awake_count.load(Ordering::Acquire);
        RunActivity { user_count: gate.in_flight() + held, last: last.into_std() }
    }

    /// Keeps the run awake while the returned guard exists. A run that falls asleep at the same moment ends anyway; the
    /// caller must then ask again.
    pub fn keep_awake(&self) -> KeepAwakeGuard {
        self.0.gate.keep_awake_count.fetch_add(1, Ordering::AcqRel);
        KeepAwakeGuard(self.0.gate.clone())
    }

    pub(crate) fn try_acquire(&self) -> Result<CallPermit, AdmissionError> {
        self.0.gate.try_acquire()
    }

    pub(crate) fn busy_error(&self) -> CallError {
        CallError::Busy { what: "calls in flight for this server", limit: self.0.limit() }
    }

    /// Sends a request and waits for the response for at most `timeout`; progress extends the deadline. Dropping the
    /// future cancels the call on the server.
    ///
    /// # Errors
    ///
    /// Returns the server's error, a timeout, or the reason why the request was not admitted or its run ended.
    pub async fn request(&self, request: CallerRequest, timeout: Duration) -> Result<Box<RawValue>, CallError> {
        match self.try_acquire() {
            Ok(place) => self.request_with_permit(place, request, timeout).await,
            Err(AdmissionError::Full) => Err(self.busy_error()),
            Err(AdmissionError::Closed) => {
                let reason = "the run accepts no more calls".to_owned();
                Err(CallError::Terminated { fate: CallFate::NotSent, reason })
            }
        }
    }

    pub(crate) async fn request_with_permit(
        &self,
        place: CallPermit,
        request: CallerRequest,
        timeout: Duration,
    ) -> Result<Box<RawValue>, CallError> {
        let (reply, mut answer) = oneshot::channel();
        self.send_request(place, OutboundRequest::Request(request), timeout, ReplyChannel::Result(reply))
            .wait_for_answer(&mut answer, |_| true)
            .await
    }

    /// Forwards a client's request. Returns `None` if the client withdraws it with a cancellation in `withdrawn`.
    pub(crate) async fn relay_with_permit(
        &self,
        place: CallPermit,
        relay: ClientRelay,
        timeout: Duration,
        withdrawn: &mut Fuse<oneshot::Receiver<RpcMessage>>,
    ) -> Result<Option<RpcMessage>, CallError> {
        // The client may have withdrawn the request while it waited for the server.
        if let Some(Ok(_)) = (&mut *withdrawn).now_or_never() {
            return Ok(None);
        }
        let (reply, mut answer) = oneshot::channel();
        let mut asking = self.send_request(place, OutboundRequest::Relay(relay), timeout, ReplyChannel::Message(reply));
        let is_result = |message: &RpcMessage| message.kind() == MessageKind::Result;
        let words = tokio::select! {
            biased;
            Ok(words) = withdrawn => words,
            answer = asking.wait_for_answer(&mut answer, is_result) => return answer.map(Some),
        };
        asking.withdraw(words);
        Ok(None)
    }

    fn send_request(
        &self,
        place: CallPermit,
        wanted: OutboundRequest,
        timeout: Duration,
        waiter: ReplyChannel,
    ) -> CallInFlight<'_> {
        let port = &*self.0;
        let id = port.gate.next_id.fetch_add(1, Ordering::Relaxed);
        let ticket = CallTicket { reply: Some(waiter), fate: CallFate::NotSent, permit: Some(place) };
        port.counters.record_call();
        let method = tracing::enabled!(tracing::Level::DEBUG).then(|| wanted.method().to_owned());
        let started = Instant::now();
        // If the run is over, the command is dropped and its ticket answers `not_sent`.
        let timeout = timeout.min(TIMEOUT_MAX);
        let repeatable = wanted.is_repeatable();
        let asked = AdmittedRequest { id, request: wanted, started, timeout, repeatable, ticket };
        let _ = port.commands.send(Box::new(SessionCommand::Request(asked)));
        CallInFlight { port, id, method, started, answered: false }
    }

    pub(crate) async fn discover(
        &self,
        place: CallPermit,
        timeout: Duration,
    ) -> Result<Option<Arc<ServerInfo>>, CallError> {
        let (reply, answer) = oneshot::channel();
        let timeout = timeout.min(TIMEOUT_MAX);
        let discover = DiscoverRequest { permit: place, reply };
        let _ = self.0.commands.send(Box::new(SessionCommand::Discover(discover)));
        // This request has no side effects, however often it is sent.
        let over = || CallError::Terminated { fate: CallFate::NotSent, reason: "the run ended".to_owned() };
        let late = CallError::TimedOut { after: timeout, fate: CallFate::NotSent };
        match tokio::time::timeout(timeout, answer).await {
            Ok(answer) => answer.unwrap_or_else(|_| Err(over())),
            Err(_elapsed) => Err(late),
        }
    }

    pub(crate) fn notify(&self, message: RpcMessage) -> Result<(), AdmissionError> {
        let place = self.try_acquire()?;
        // If the run is over, the notification is dropped.
        let _ = self.0.commands.send(Box::new(SessionCommand::Notify { message, permit: place }));
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_gate_closes_only_without_calls_in_flight_and_then_admits_none() {
        let gate = Arc::new(CallGate::new(2));
        let (first, second) = (gate.try_acquire().ok().unwrap(), gate.try_acquire().ok().unwrap());
        assert_eq!(gate.try_acquire().err(), Some(AdmissionError::Full));
        drop(first);
        assert!(!gate.close_if_empty());
        assert_eq!((gate.in_flight(), gate.is_closed()), (1, false));
        drop(second);
        assert!(gate.close_if_empty());
        assert_eq!(gate.try_acquire().err(), Some(AdmissionError::Closed));
        assert_eq!((gate.in_flight(), gate.is_closed()), (0, true));
    }

    #[test]
    fn a_call_is_admitted_or_the_gate_closes_but_never_both() {
        for _ in 0..2000 {
            let (gate, start) = (Arc::new(CallGate::new(1)), Barrier::new(2));
            let (place, closed) = std::thread::scope(|scope| {
                let entering = scope.spawn(|| {
                    start.wait();
                    gate.try_acquire().ok()
                });
                start.wait();
                let closed = gate.close_if_empty();
                (entering.join().unwrap(), closed)
            });
            assert_ne!(place.is_some(), closed);
        }
    }
}
