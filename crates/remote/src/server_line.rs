//! A line to a remote server. It starts an exchange for each message of the session and returns the server's messages
//! to the session. Everything runs where the line is polled; there are no tasks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport, ServerTarget};
use mcp_satellite_actors::seam::{LineEvent, LineOutput, ServerLine};
use mcp_satellite_protocol::body;
use tokio::time::sleep;

use super::clients::HttpClients;
use super::exchange::{ExchangeMessage, ExchangeSender, LineExchanges, LineSession, OneWayKind};
use super::streamable::LINGER_TIME;
use super::tokens::TokenSource;
use super::{legacy, streamable};

// Maximum number of notifications in flight, each on its own connection. The same number applies to responses.
const ONE_WAY_IN_FLIGHT_MAX: usize = 4;
// Maximum number of queued responses, including responses and notifications that wait for the end of the handshake.
const QUEUED_MAX: usize = 4096;
// Maximum number of queued notifications, mostly cancellations. Beyond it the oldest is dropped: a server needs it
// least.
const NOTIFICATIONS_MAX: usize = 256;

pub(super) struct RemoteLine {
    transport: RemoteTransport,
    session: Arc<LineSession>,
    exchanges: LineExchanges,
    send_state: SendState,
    notifications: DeliveryQueue,
    responses: DeliveryQueue,
    ready: VecDeque<LineEvent>,
}

/// Queue of messages that get no answer. Each kind has its own, so that a server that does not accept one kind still
/// gets the other.
#[derive(Default)]
struct DeliveryQueue {
    queued: VecDeque<Bytes>,
    in_flight: usize,
}

enum SendState {
    /// The stream of an HTTP+SSE server is not opened yet.
    Unopened,
    /// The stream is being opened, or `notifications/initialized` is in flight and must not be overtaken. These
    /// messages wait.
    Blocked(VecDeque<LineOutput>),
    Open,
    Closed,
}

impl RemoteLine {
    pub(super) fn new(
        spec: &InstanceSpec,
        clients: Arc<HttpClients>,
        tokens: Arc<dyn TokenSource>,
        memory: Arc<ByteBudget>,
    ) -> Self {
        let (transport, send_state) = match spec.target {
            ServerTarget::Remote { transport: RemoteTransport::Sse, .. } => (RemoteTransport::Sse, SendState::Unopened),
            // A spec without a remote target has no `Access`, so its requests fail.
            ServerTarget::Remote { .. } | ServerTarget::Stdio { .. } => (RemoteTransport::Http, SendState::Open),
        };
        let session = LineSession::new(spec, clients, tokens, memory);
        Self {
            transport,
            session,
            exchanges: LineExchanges::new(),
            send_state,
            notifications: DeliveryQueue::default(),
            responses: DeliveryQueue::default(),
            ready: VecDeque::new(),
        }
    }

    fn start(&mut self, message: LineOutput) {
        let session = Arc::clone(&self.session);
        match message {
            LineOutput::Request { id, body, header_timeout, routing } => match self.transport {
                RemoteTransport::Http => {
                    let request = |out| streamable::request(session, id, body, header_timeout, routing, out);
                    self.exchanges.start(Some(id), request);
                }
                RemoteTransport::Sse => self.exchanges.start(Some(id), |_| async move {
                    match deliver(&session, body, Some(id), header_timeout).await {
                        // The response arrives on the stream.
                        Ok(None) => ExchangeMessage::Done,
                        Ok(Some(message)) => ExchangeMessage::Event(LineEvent::Message { message, request: Some(id) }),
                        Err(failure) => ExchangeMessage::Event(LineEvent::Failed { id, failure }),
                    }
                }),
            },
            LineOutput::Notification { body } => self.enqueue_one_way(OneWayKind::Notification, Some(body)),
            LineOutput::Response { body } => self.enqueue_one_way(OneWayKind::Response, Some(body)),
            LineOutput::Initialized { version, body } => {
                session.set_version(&version);
                self.send_state = SendState::Blocked(VecDeque::new());
                self.exchanges.start(None, |_| send_initialized(session, body));
            }
            LineOutput::Probe { id } => self.exchanges.start(Some(id), |_| probe(session, id)),
            LineOutput::Abandon { .. } | LineOutput::Credentials(_) | LineOutput::Close => {}
        }
    }

    /// Queues a message and sends a few at a time: a server that sends many requests must not get a connection for each
    /// response.
    fn enqueue_one_way(&mut self, kind: OneWayKind, body: Option<Bytes>) {
        let queue = self.delivery_queue(kind);
        queue.queued.extend(body);
        if matches!(kind, OneWayKind::Notification) && queue.queued.len() > NOTIFICATIONS_MAX {
            queue.queued.pop_front();
        }
        while self.delivery_queue(kind).in_flight < ONE_WAY_IN_FLIGHT_MAX
            && let Some(body) = self.delivery_queue(kind).queued.pop_front()
        {
            self.delivery_queue(kind).in_flight += 1;
            let session = Arc::clone(&self.session);
            self.exchanges.start(None, |_| send_one_way(session, kind, body));
        }
    }

    /// Returns the number of notifications and responses that wait for the gate, plus the queued responses. The number
    /// of requests is limited elsewhere.
    fn queued_count(&self) -> usize {
        let gate = if let SendState::Blocked(waiting) = &self.send_state {
            waiting.iter().filter(|message| is_one_way(message)).count()
        } else {
            0
        };
        gate + self.responses.queued.len()
    }

    fn delivery_queue(&mut self, kind: OneWayKind) -> &mut DeliveryQueue {
        match kind {
            OneWayKind::Notification => &mut self.notifications,
            OneWayKind::Response => &mut self.responses,
        }
    }

    /// Queues a message until the gate opens. The oldest notification is dropped beyond the limit, because cancelled
    /// requests can produce many.
    fn queue_until_open(waiting: &mut VecDeque<LineOutput>, message: LineOutput) {
        let is_notification = |message: &LineOutput| matches!(message, LineOutput::Notification { .. });
        if is_notification(&message)
            && waiting.iter().filter(|waiting| is_notification(waiting)).count() >= NOTIFICATIONS_MAX
            && let Some(oldest) = waiting.iter().position(is_notification)
        {
            waiting.remove(oldest);
        }
        waiting.push_back(message);
    }

    fn report_lost(&mut self, failure: ExchangeFailure) {
        self.fail_unsent(&failure.kind);
        self.ready.push_back(LineEvent::Lost(failure));
    }

    fn fail_unsent(&mut self, kind: &FailureKind) {
        let SendState::Blocked(waiting) = &mut self.send_state else { return };
        for message in waiting.drain(..) {
            if let LineOutput::Request { id, .. } = message {
                self.ready.push_back(LineEvent::Failed { id, failure: ExchangeFailure::unsent(kind.clone()) });
            }
        }
    }

    fn open(&mut self) {
        let SendState::Blocked(mut waiting) = std::mem::replace(&mut self.send_state, SendState::Open) else { return };
        while let Some(message) = waiting.pop_front() {
            self.start(message);
            if let SendState::Blocked(behind) = &mut self.send_state {
                behind.append(&mut waiting);
            }
        }
    }

    /// Fails the waiting messages as unsent, because the stream of an HTTP+SSE server could not be opened. The next
    /// message is another try.
    fn fail_unopened(&mut self, failure: &ExchangeFailure) {
        let SendState::Blocked(waiting) = std::mem::replace(&mut self.send_state, SendState::Unopened) else { return };
        for message in waiting {
            let failure = ExchangeFailure::unsent(failure.kind.clone());
            match message {
                LineOutput::Request { id, .. } => self.ready.push_back(LineEvent::Failed { id, failure }),
                LineOutput::Notification { .. } | LineOutput::Response { .. } | LineOutput::Initialized { .. } => {
                    self.ready.push_back(LineEvent::Lost(failure));
                }
                LineOutput::Probe { .. }
                | LineOutput::Abandon { .. }
                | LineOutput::Credentials(_)
                | LineOutput::Close => {}
            }
        }
    }

    fn close(&mut self) {
        self.ready.retain(|incoming| matches!(incoming, LineEvent::Failed { .. }));
        self.fail_unsent(&FailureKind::Cut);
        self.send_state = SendState::Closed;
        (self.notifications, self.responses) = (DeliveryQueue::default(), DeliveryQueue::default());
        self.exchanges.abandon_all();
        let session = Arc::clone(&self.session);
        match self.transport {
            RemoteTransport::Http => self.exchanges.start(None, |_| streamable::close(session)),
            RemoteTransport::Sse => self.exchanges.start(None, |_| async { ExchangeMessage::Event(LineEvent::Closed) }),
        }
    }
}

fn is_one_way(message: &LineOutput) -> bool {
    matches!(message, LineOutput::Notification { .. } | LineOutput::Response { .. })
}

impl ServerLine for RemoteLine {
    fn send(&mut self, message: LineOutput) {
        let counts = is_one_way(&message);
        match (message, &mut self.send_state) {
            (LineOutput::Credentials(spec), _) => self.session.update_access(&spec),
            (LineOutput::Close, _) => self.close(),
            (_, SendState::Closed) => {}
            (LineOutput::Abandon { id: abandoned }, gate) => {
                if let SendState::Blocked(waiting) = gate {
                    waiting.retain(|message| !matches!(message, LineOutput::Request { id, .. } if *id == abandoned));
                }
                self.exchanges.abandon(abandoned);
            }
            // A probe is not part of the session.
            (message @ LineOutput::Probe { .. }, _) | (message, SendState::Open) => self.start(message),
            (message, SendState::Blocked(waiting)) => Self::queue_until_open(waiting, message),
            (message, SendState::Unopened) => {
                self.send_state = SendState::Blocked(VecDeque::from([message]));
                let session = Arc::clone(&self.session);
                self.exchanges.start(None, |out: ExchangeSender| legacy::listen(session, out));
            }
        }
        if counts && self.queued_count() > QUEUED_MAX {
            self.report_lost(ExchangeFailure::sent(FailureKind::Flooded));
        }
        self.exchanges.wake();
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<LineEvent> {
        loop {
            if let Some(incoming) = self.ready.pop_front() {
                return Poll::Ready(incoming);
            }
            match ready!(self.exchanges.poll_next(cx)) {
                ExchangeMessage::Event(LineEvent::Lost(failure)) => self.report_lost(failure),
                ExchangeMessage::Event(incoming) => return Poll::Ready(incoming),
                ExchangeMessage::Unsolicited(message, of) => {
                    // A server may answer on this stream and never end the exchange of the request.
                    if let Some(id) = self.exchanges.answered_request(&message) {
                        self.exchanges.start(None, |_| async move {
                            sleep(LINGER_TIME).await;
                            ExchangeMessage::AnsweredElsewhere(id)
                        });
                    }
                    return Poll::Ready(LineEvent::Message { message, request: of });
                }
                ExchangeMessage::AnsweredElsewhere(id) => self.exchanges.abandon(id),
                ExchangeMessage::Initialized => {
                    if self.transport == RemoteTransport::Http {
                        let session = Arc::clone(&self.session);
                        self.exchanges.start(None, |out| streamable::listen(session, out));
                    }
                    self.open();
                }
                ExchangeMessage::Endpoint => self.open(),
                ExchangeMessage::OpenFailed(failure) => self.fail_unopened(&failure),
                ExchangeMessage::Delivered(kind) => {
                    self.delivery_queue(kind).in_flight -= 1;
                    self.enqueue_one_way(kind, None);
                }
                ExchangeMessage::Done => {}
            }
        }
    }
}

/// Posts a message. The answer, if there is one, does not come in this response; only an error response may contain it.
async fn deliver(
    session: &LineSession,
    body: Bytes,
    id: Option<u64>,
    header_timeout: Option<std::time::Duration>,
) -> Result<Option<Bytes>, ExchangeFailure> {
    let terms = session.context()?;
    let response = terms.send_in_session(terms.post(body), header_timeout).await?;
    if response.status().is_success() {
        return Ok(None);
    }
    let messages = terms.interpret_error(response, id).await.map_err(ExchangeFailure::sent)?;
    Ok(messages.into_iter().find(|message| id.is_some_and(|id| body::is_answer_to(message, id))))
}

async fn send_one_way(session: Arc<LineSession>, kind: OneWayKind, body: Bytes) -> ExchangeMessage {
    let Err(failure) = deliver_one_way(&session, body).await else { return ExchangeMessage::Delivered(kind) };
    if is_session_lost(&failure) {
        return ExchangeMessage::Event(LineEvent::Lost(failure));
    }
    tracing::debug!(%failure, ?kind, "the server did not accept a notification or response");
    ExchangeMessage::Delivered(kind)
}

/// Delivers `notifications/initialized` before the first request: some servers reject requests that arrive too early.
async fn send_initialized(session: Arc<LineSession>, body: Bytes) -> ExchangeMessage {
    match deliver_one_way(&session, body).await {
        Ok(()) => ExchangeMessage::Initialized,
        Err(failure) => ExchangeMessage::Event(LineEvent::Lost(failure)),
    }
}

async fn deliver_one_way(session: &LineSession, body: Bytes) -> Result<(), ExchangeFailure> {
    let header_timeout = session.context()?.header_timeout();
    deliver(session, body, None, Some(header_timeout)).await.map(drop)
}

/// Returns true if the failure of a notification means that the session is over. If the server received it and was slow
/// or broke off, the next request shows whether the session is lost.
fn is_session_lost(failure: &ExchangeFailure) -> bool {
    match failure.kind {
        FailureKind::Unauthorized { .. } | FailureKind::Forbidden { .. } | FailureKind::SessionExpired { .. } => true,
        _ => !failure.sent,
    }
}

async fn probe(session: Arc<LineSession>, id: u64) -> ExchangeMessage {
    let healthy = async {
        let terms = session.context()?.into_stateless(false);
        let unknown = || ExchangeFailure::unsent(FailureKind::BadAddress("no health_url is configured".to_owned()));
        let request = terms.access.probe().ok_or_else(unknown)?;
        let response = terms.send_authorized(request, Some(terms.header_timeout())).await?;
        if response.status().is_success() {
            Ok(())
        } else {
            // A probe has no session that could have expired.
            Err(ExchangeFailure::sent(super::failures::failure_from_status(&response, &terms.access)))
        }
    };
    ExchangeMessage::Event(match healthy.await {
        Ok(()) => LineEvent::Probed { id },
        Err(failure) => LineEvent::Failed { id, failure },
    })
}
