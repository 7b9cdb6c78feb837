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
use tokio::time::sleep;

use super::clients::HttpClients;
use super::exchange::{ExchangeMessage, ExchangeSender, LineExchanges, LineSession};
use super::streamable::LAST_WORDS;
use super::tokens::TokenSource;
use super::{legacy, message, streamable};

// Maximum number of notifications in flight, each on its own connection. The same number applies to responses.
const TELLING_MAX: usize = 4;
// Maximum number of queued responses, including responses and notifications that wait for the end of the handshake.
const UNTOLD_MAX: usize = 4096;
// Maximum number of queued notifications, mostly cancellations. Beyond it the oldest is dropped: a server needs it
// least.
const NOTIFICATIONS_MAX: usize = 256;

pub(super) struct RemoteLine {
    transport: RemoteTransport,
    session: Arc<LineSession>,
    exchanges: LineExchanges,
    gate: SendState,
    notifications: DeliveryQueue,
    responses: DeliveryQueue,
    ready: VecDeque<LineEvent>,
}

/// Queue of messages that get no answer. Each kind has its own, so that a server that does not accept one kind still
/// gets the other.
#[derive(Default)]
struct DeliveryQueue {
    untold: VecDeque<Bytes>,
    telling: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum OneWayKind {
    Notification,
    Response,
}

enum SendState {
    /// The stream of an HTTP+SSE server is not opened yet.
    Untried,
    /// The stream is being opened, or `notifications/initialized` is in flight and must not be overtaken. These
    /// messages wait.
    Shut(VecDeque<LineOutput>),
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
        let (transport, gate) = match spec.target {
            ServerTarget::Remote { transport: RemoteTransport::Sse, .. } => (RemoteTransport::Sse, SendState::Untried),
            // A spec without a remote target has no `Access`, so its requests fail.
            ServerTarget::Remote { .. } | ServerTarget::Stdio { .. } => (RemoteTransport::Http, SendState::Open),
        };
        let session = LineSession::new(spec, clients, tokens, memory);
        Self {
            transport,
            session,
            exchanges: LineExchanges::new(),
            gate,
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
                        Ok(Some(message)) => ExchangeMessage::Of(LineEvent::Message { message, of: Some(id) }),
                        Err(failure) => ExchangeMessage::Of(LineEvent::Failed { id, failure }),
                    }
                }),
            },
            LineOutput::Notification { body } => self.tell(OneWayKind::Notification, Some(body)),
            LineOutput::Response { body } => self.tell(OneWayKind::Response, Some(body)),
            LineOutput::Initialized { version, body } => {
                session.agreed(&version);
                self.gate = SendState::Shut(VecDeque::new());
                self.exchanges.start(None, |_| initialized(session, body));
            }
            LineOutput::Probe { id } => self.exchanges.start(Some(id), |_| probe(session, id)),
            LineOutput::Abandon { .. } | LineOutput::Credentials(_) | LineOutput::Close => {}
        }
    }

    /// Queues a message and sends a few at a time: a server that sends many requests must not get a connection for each
    /// response.
    fn tell(&mut self, telling: OneWayKind, body: Option<Bytes>) {
        let lane = self.lane(telling);
        lane.untold.extend(body);
        if matches!(telling, OneWayKind::Notification) && lane.untold.len() > NOTIFICATIONS_MAX {
            lane.untold.pop_front();
        }
        while self.lane(telling).telling < TELLING_MAX
            && let Some(body) = self.lane(telling).untold.pop_front()
        {
            self.lane(telling).telling += 1;
            let session = Arc::clone(&self.session);
            self.exchanges.start(None, |_| notify(session, telling, body));
        }
    }

    /// Returns the number of notifications and responses that wait for the gate, plus the queued responses. The number
    /// of requests is limited elsewhere.
    fn untold(&self) -> usize {
        let gate = if let SendState::Shut(waiting) = &self.gate {
            waiting.iter().filter(|message| is_telling(message)).count()
        } else {
            0
        };
        gate + self.responses.untold.len()
    }

    fn lane(&mut self, telling: OneWayKind) -> &mut DeliveryQueue {
        match telling {
            OneWayKind::Notification => &mut self.notifications,
            OneWayKind::Response => &mut self.responses,
        }
    }

    /// Queues a message until the gate opens. The oldest notification is dropped beyond the limit, because cancelled
    /// requests can produce many.
    fn wait(waiting: &mut VecDeque<LineOutput>, message: LineOutput) {
        let is_notification = |message: &LineOutput| matches!(message, LineOutput::Notification { .. });
        if is_notification(&message)
            && waiting.iter().filter(|waiting| is_notification(waiting)).count() >= NOTIFICATIONS_MAX
            && let Some(oldest) = waiting.iter().position(is_notification)
        {
            waiting.remove(oldest);
        }
        waiting.push_back(message);
    }

    fn lost(&mut self, failure: ExchangeFailure) {
        self.unsent(&failure.kind);
        self.ready.push_back(LineEvent::Lost(failure));
    }

    fn unsent(&mut self, kind: &FailureKind) {
        let SendState::Shut(waiting) = &mut self.gate else { return };
        for message in waiting.drain(..) {
            if let LineOutput::Request { id, .. } = message {
                self.ready.push_back(LineEvent::Failed { id, failure: ExchangeFailure::unsent(kind.clone()) });
            }
        }
    }

    fn open(&mut self) {
        let SendState::Shut(mut waiting) = std::mem::replace(&mut self.gate, SendState::Open) else { return };
        while let Some(message) = waiting.pop_front() {
            self.start(message);
            if let SendState::Shut(behind) = &mut self.gate {
                behind.append(&mut waiting);
            }
        }
    }

    /// Fails the waiting messages as unsent, because the stream of an HTTP+SSE server could not be opened. The next
    /// message is another try.
    fn unopened(&mut self, failure: &ExchangeFailure) {
        let SendState::Shut(waiting) = std::mem::replace(&mut self.gate, SendState::Untried) else { return };
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
        self.unsent(&FailureKind::Cut);
        self.gate = SendState::Closed;
        (self.notifications, self.responses) = (DeliveryQueue::default(), DeliveryQueue::default());
        self.exchanges.abandon_all();
        let session = Arc::clone(&self.session);
        match self.transport {
            RemoteTransport::Http => self.exchanges.start(None, |_| streamable::close(session)),
            RemoteTransport::Sse => self.exchanges.start(None, |_| async { ExchangeMessage::Of(LineEvent::Closed) }),
        }
    }
}

fn is_telling(message: &LineOutput) -> bool {
    matches!(message, LineOutput::Notification { .. } | LineOutput::Response { .. })
}

impl ServerLine for RemoteLine {
    fn send(&mut self, message: LineOutput) {
        let counts = is_telling(&message);
        match (message, &mut self.gate) {
            (LineOutput::Credentials(spec), _) => self.session.adopt(&spec),
            (LineOutput::Close, _) => self.close(),
            (_, SendState::Closed) => {}
            (LineOutput::Abandon { id: abandoned }, gate) => {
                if let SendState::Shut(waiting) = gate {
                    waiting.retain(|message| !matches!(message, LineOutput::Request { id, .. } if *id == abandoned));
                }
                self.exchanges.abandon(abandoned);
            }
            // A probe is not part of the session.
            (message @ LineOutput::Probe { .. }, _) | (message, SendState::Open) => self.start(message),
            (message, SendState::Shut(waiting)) => Self::wait(waiting, message),
            (message, SendState::Untried) => {
                self.gate = SendState::Shut(VecDeque::from([message]));
                let session = Arc::clone(&self.session);
                self.exchanges.start(None, |out: ExchangeSender| legacy::listen(session, out));
            }
        }
        if counts && self.untold() > UNTOLD_MAX {
            self.lost(ExchangeFailure::sent(FailureKind::Flooded));
        }
        self.exchanges.wake();
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<LineEvent> {
        loop {
            if let Some(incoming) = self.ready.pop_front() {
                return Poll::Ready(incoming);
            }
            match ready!(self.exchanges.poll_next(cx)) {
                ExchangeMessage::Of(LineEvent::Lost(failure)) => self.lost(failure),
                ExchangeMessage::Of(incoming) => return Poll::Ready(incoming),
                ExchangeMessage::Aside(message, of) => {
                    // A server may answer on this stream and never end the exchange of the request.
                    if let Some(id) = self.exchanges.answered_by(&message) {
                        self.exchanges.start(None, |_| async move {
                            sleep(LAST_WORDS).await;
                            ExchangeMessage::Answered(id)
                        });
                    }
                    return Poll::Ready(LineEvent::Message { message, of });
                }
                ExchangeMessage::Answered(id) => self.exchanges.abandon(id),
                ExchangeMessage::Initialized => {
                    if self.transport == RemoteTransport::Http {
                        let session = Arc::clone(&self.session);
                        self.exchanges.start(None, |out| streamable::listen(session, out));
                    }
                    self.open();
                }
                ExchangeMessage::Endpoint => self.open(),
                ExchangeMessage::Unopened(failure) => self.unopened(&failure),
                ExchangeMessage::Told(telling) => {
                    self.lane(telling).telling -= 1;
                    self.tell(telling, None);
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
    let terms = session.terms()?;
    let response = terms.ask(terms.post(body), header_timeout).await?;
    if response.status().is_success() {
        return Ok(None);
    }
    let messages = terms.refusal(response, id).await.map_err(ExchangeFailure::sent)?;
    Ok(messages.into_iter().find(|message| id.is_some_and(|id| message::answers(message, id))))
}

async fn notify(session: Arc<LineSession>, telling: OneWayKind, body: Bytes) -> ExchangeMessage {
    let Err(failure) = tell(&session, body).await else { return ExchangeMessage::Told(telling) };
    if ends_session(&failure) {
        return ExchangeMessage::Of(LineEvent::Lost(failure));
    }
    tracing::debug!(%failure, ?telling, "the server did not accept a notification or response");
    ExchangeMessage::Told(telling)
}

/// Delivers `notifications/initialized` before the first request: some servers reject requests that arrive too early.
async fn initialized(session: Arc<LineSession>, body: Bytes) -> ExchangeMessage {
    match tell(&session, body).await {
        Ok(()) => ExchangeMessage::Initialized,
        Err(failure) => ExchangeMessage::Of(LineEvent::Lost(failure)),
    }
}

async fn tell(session: &LineSession, body: Bytes) -> Result<(), ExchangeFailure> {
    let header_timeout = session.terms()?.header_timeout();
    deliver(session, body, None, Some(header_timeout)).await.map(drop)
}

/// Returns true if the failure of a notification means that the session is over. If the server received it and was slow
/// or broke off, the next request shows whether the session is lost.
fn ends_session(failure: &ExchangeFailure) -> bool {
    match failure.kind {
        FailureKind::Unauthorized { .. } | FailureKind::Forbidden { .. } | FailureKind::SessionExpired { .. } => true,
        _ => !failure.sent,
    }
}

async fn probe(session: Arc<LineSession>, id: u64) -> ExchangeMessage {
    let healthy = async {
        let terms = session.terms()?.alone(false);
        let unknown = || ExchangeFailure::unsent(FailureKind::BadAddress("no health_url is configured".to_owned()));
        let request = terms.access.probe().ok_or_else(unknown)?;
        let response = terms.ask_alone(request, Some(terms.header_timeout())).await?;
        if response.status().is_success() {
            Ok(())
        } else {
            // A probe has no session that could have expired.
            Err(ExchangeFailure::sent(super::failures::of_status(&response, &terms.access)))
        }
    };
    ExchangeMessage::Of(match healthy.await {
        Ok(()) => LineEvent::Probed { id },
        Err(failure) => LineEvent::Failed { id, failure },
    })
}
