//! Drivers of sessions: `stdio` over the pipes of a process, `remote` over a line to a remote server. They do the waiting
//! and read the clock; `mcp_satellite_session` decides.

pub(crate) mod remote;
pub(crate) mod stdio;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::rpc::RpcMessage;
use mcp_satellite_session::{
    CallGate, CallOrigin, MessageCause, Outlet, OwnRequest, RequestSpan, ResumedSession, SessionCommand, SessionCore,
    SessionEvent, SessionHost, SessionOptions, masked_excerpt,
};
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::Sleep;

use crate::audience::{AudienceHandle, ClientQuestion};
use crate::batcher::WallClock;
use crate::byte_budget::ServerMemory;
use crate::calls::{CallPortReceiver, InstanceCounters};
use crate::model::exit::{CallError, CallFate};
use crate::model::policy::ReconnectPolicy;
use crate::model::spec::InstanceSpec;
use crate::rules::jitter::JitterRng;
use crate::rules::output::excerpt;
use crate::seam::{CallEnd, CallSpan, ObservedCall, ObservedSide, RuntimeObserver, TraceOrigin, TraceParent};

/// Number of malformed messages logged one by one; after that the session logs each doubling.
const MALFORMED_LOGGED: u64 = 5;
// Bytes logged of a stdout line that is not JSON-RPC.
const PRINTED_BYTES_MAX: usize = 4 * 1024;

/// Messages from a worker to its session.
///
/// `Drain` ends the session after the calls in flight; the port is already closed. `ShortenGrace` shortens the grace
/// period of an end, because a caller waits for it. `Check` asks for a check at once: the machine was suspended, and no
/// monotonic clock measured that time.
#[derive(Debug, Clone)]
pub(crate) enum SessionControl {
    Stop,
    ShortenGrace,
    Drain,
    Discover,
    ApplySpec(Arc<InstanceSpec>),
    Check,
}

/// Transport-independent arguments of a session.
///
/// `since` is the start of the run; the handshake timeout counts from there. `discover` is true if the session reads
/// the lists by itself after the handshake. `era` is tried first. `resumed` is the session of an earlier satellite that
/// this one continues. `stdout_lines` receives stdout lines that are not JSON-RPC; it is `None` for a remote server.
pub(crate) struct SessionArgs {
    pub(crate) spec: Arc<InstanceSpec>,
    pub(crate) port: CallPortReceiver,
    pub(crate) control: mpsc::UnboundedReceiver<SessionControl>,
    pub(crate) counters: Arc<InstanceCounters>,
    pub(crate) wall: WallClock,
    pub(crate) since: tokio::time::Instant,
    pub(crate) discover: bool,
    pub(crate) era: Option<Era>,
    pub(crate) resumed: Option<ResumedSession>,
    pub(crate) rng: JitterRng,
    pub(crate) report_event: Box<dyn Fn(SessionEvent) + Send>,
    pub(crate) stdout_lines: Option<mpsc::Sender<String>>,
    pub(crate) memory: ServerMemory,
    pub(crate) audience: AudienceHandle,
    pub(crate) observer: Arc<dyn RuntimeObserver>,
}

impl SessionArgs {
    fn open<O: Outlet>(self, outlet: O) -> (SessionCore<O, WorkerHost>, SessionPorts) {
        let Self {
            spec,
            port: CallPortReceiver { commands, answers, gate },
            control,
            counters,
            wall,
            since,
            discover: reads_lists,
            era,
            resumed,
            rng,
            report_event,
            stdout_lines,
            memory: ServerMemory { lists: lists_memory, .. },
            audience,
            observer,
        } = self;
        let transport = spec.transport();
        let host =
            WorkerHost { counters, wall, rng, report_event, stdout_lines, audience, answers, observer, transport };
        let ports = SessionPorts { commands, control, gate: gate.clone(), draining: false };
        let since = since.into_std();
        let options = SessionOptions { spec, gate, since, reads_lists, era, lists_memory };
        let core = match resumed {
            Some(resumed) => SessionCore::resume(options, resumed, outlet, host, now()),
            None => SessionCore::new(options, outlet, host, now()),
        };
        (core, ports)
    }
}

/// Channels into a session. A driver drops them before the session, so that no call enters while the session ends.
struct SessionPorts {
    commands: mpsc::UnboundedReceiver<Box<SessionCommand>>,
    control: mpsc::UnboundedReceiver<SessionControl>,
    gate: Arc<CallGate>,
    draining: bool,
}

impl SessionPorts {
    fn has_drained(&self) -> bool {
        self.draining && self.gate.in_flight() == 0
    }

    fn close<O: Outlet>(&mut self, core: &mut SessionCore<O, WorkerHost>, reason: &str) {
        self.commands.close();
        core.close(reason);
        while let Ok(command) = self.commands.try_recv() {
            if let SessionCommand::Request(request) = *command {
                let error = CallError::Terminated { fate: CallFate::NotSent, reason: reason.to_owned() };
                request.ticket.fail(error);
            }
        }
    }
}

/// Receiver of the reports of a session.
struct WorkerHost {
    counters: Arc<InstanceCounters>,
    wall: WallClock,
    rng: JitterRng,
    report_event: Box<dyn Fn(SessionEvent) + Send>,
    stdout_lines: Option<mpsc::Sender<String>>,
    audience: AudienceHandle,
    answers: mpsc::UnboundedSender<Box<SessionCommand>>,
    observer: Arc<dyn RuntimeObserver>,
    transport: &'static str,
}

/// Span of a request of the satellite.
struct ObservedRequest {
    span: Box<dyn CallSpan>,
    began: tokio::time::Instant,
}

impl RequestSpan for ObservedRequest {
    fn trace(&self) -> Option<TraceParent> {
        self.span.trace()
    }

    fn end(self: Box<Self>, answer: Result<&RawValue, &CallError>) {
        self.span.end(answer.map_or_else(CallEnd::Failed, |result| CallEnd::Result(result.get())));
    }

    fn time_out(self: Box<Self>, fate: CallFate) {
        let after = self.began.elapsed();
        self.span.end(CallEnd::Failed(&CallError::TimedOut { after, fate }));
    }
}

impl WorkerHost {
    /// Counts bytes of messages from the server.
    fn count_received(&self, bytes: usize) {
        self.observer.bytes_received(self.transport, bytes);
    }

    /// Counts bytes of messages to the server.
    fn count_sent(&self, bytes: usize) {
        self.observer.bytes_sent(self.transport, bytes);
    }

    fn on_dropped(&self, spec: &InstanceSpec, bytes: usize) {
        // A request that waits for the dropped message times out.
        let before = self.counters.record_malformed();
        if before < MALFORMED_LOGGED || before.is_power_of_two() {
            tracing::warn!(
                instance = %spec.name,
                bytes,
                count = before + 1,
                "dropped a message of the server: the memory budget for messages is exhausted"
            );
        }
    }
}

impl SessionHost for WorkerHost {
    fn report(&self, event: SessionEvent) {
        (self.report_event)(event);
    }

    fn on_message(&self) {
        self.counters.record_message((self.wall)());
    }

    fn on_server_proved(&self) {
        self.counters.record_check((self.wall)());
    }

    fn on_malformed(&self, spec: &InstanceSpec, message: &[u8], why: &str, is_initialized: bool) {
        let before = self.counters.record_malformed();
        if before < MALFORMED_LOGGED || before.is_power_of_two() {
            let text = masked_excerpt(&spec.mask, &String::from_utf8_lossy(&message[..message.len().min(64 * 1024)]));
            let why = masked_excerpt(&spec.mask, why);
            tracing::warn!(
                instance = %spec.name, why, line = text, count = before + 1,
                "skipped a message of the server"
            );
            if !is_initialized
                && self.stdout_lines.is_some()
                && let Some(line) = excerpt(&text, &spec.mask)
            {
                self.report(SessionEvent::StdoutLine(line));
            }
        }
        // If the channel is full, the line is dropped. It is counted, and the first ones appear in the satellite's log.
        if let Some(Ok(place)) = self.stdout_lines.as_ref().map(mpsc::Sender::try_reserve) {
            let line = String::from_utf8_lossy(&message[..message.len().min(PRINTED_BYTES_MAX)]);
            place.send(masked_excerpt(&spec.mask, line.trim_end()));
        }
    }

    fn reconnect_delay(&mut self, policy: &ReconnectPolicy, failures: u32) -> Duration {
        self.rng.jitter(policy.backoff().delay(failures), policy.jitter_percent)
    }

    fn on_notification(&self, cause: MessageCause, message: RpcMessage) {
        self.audience.on_notification(cause, message);
    }

    fn on_progress(&self, origin: CallOrigin, message: RpcMessage) {
        self.audience.on_progress(origin, message);
    }

    fn on_request(&self, cause: MessageCause, question: u64, message: RpcMessage) {
        self.audience.on_request(cause, ClientQuestion::new(question, message, self.answers.clone()));
    }

    fn on_request_withdrawn(&self, question: u64, message: RpcMessage) {
        self.audience.on_request_withdrawn(question, message);
    }

    fn observe(&self, request: OwnRequest<'_>) -> Option<Box<dyn RequestSpan>> {
        if !self.observer.observes_calls() {
            return None;
        }
        let OwnRequest { id, method, spec, version } = request;
        let span = self.observer.begin_call(&ObservedCall {
            side: ObservedSide::Client { attempt: 1 },
            // No call of a client causes the request, so it begins a trace.
            trace: TraceOrigin::Entry(None),
            method,
            target: None,
            params: None,
            request_id: &id,
            version,
            spec: Some(spec),
        })?;
        Some(Box::new(ObservedRequest { span, began: tokio::time::Instant::now() }))
    }

    fn on_session_started(&self) {
        self.audience.on_session_started();
    }

    fn on_session_ended(&mut self) {
        self.audience.end_session();
    }
}

/// Returns the present time of tokio's clock, which tests can pause.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
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

/// Timer of a session that is set again and again, mostly to a later time. It is moved only to an earlier time and
/// otherwise fires too early, because moving a timer for each message costs more than an early look.
#[derive(Default)]
struct SessionTimer {
    sleep: Option<Pin<Box<Sleep>>>,
}

impl SessionTimer {
    fn arm(&mut self, at: Option<Instant>) {
        let Some(at) = at.map(tokio::time::Instant::from_std) else { return };
        match &mut self.sleep {
            Some(sleep) if sleep.deadline() <= at => {}
            Some(sleep) => sleep.as_mut().reset(at),
            None => self.sleep = Some(Box::pin(tokio::time::sleep_until(at))),
        }
    }

    async fn wait(&mut self) {
        match &mut self.sleep {
            Some(sleep) => sleep.as_mut().await,
            None => std::future::pending().await,
        }
        self.sleep = None;
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
