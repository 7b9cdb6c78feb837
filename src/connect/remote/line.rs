//! A line to a remote server. It starts an exchange for each message of the session and returns the server's messages
//! to the session. Everything runs where the line is polled; there are no tasks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::failure::{Failure, FailureKind};
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport, Target};
use mcp_satellite_actors::seam::{Incoming, Line, Outgoing};
use tokio::time::sleep;

use super::clients::Clients;
use super::exchange::{Exchanges, News, Out, Session};
use super::streamable::LAST_WORDS;
use super::tokens::Tokens;
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
    session: Arc<Session>,
    exchanges: Exchanges,
    gate: Gate,
    notifications: Lane,
    responses: Lane,
    ready: VecDeque<Incoming>,
}

/// Queue of messages that get no answer. Each kind has its own, so that a server that does not accept one kind still
/// gets the other.
#[derive(Default)]
struct Lane {
    untold: VecDeque<Bytes>,
    telling: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Telling {
    Notification,
    Response,
}

enum Gate {
    /// The stream of an HTTP+SSE server is not opened yet.
    Untried,
    /// The stream is being opened, or `notifications/initialized` is in flight and must not be overtaken. These
    /// messages wait.
    Shut(VecDeque<Outgoing>),
    Open,
    Closed,
}

impl RemoteLine {
    pub(super) fn new(
        spec: &InstanceSpec,
        clients: Arc<Clients>,
        tokens: Arc<dyn Tokens>,
        memory: Arc<ByteBudget>,
    ) -> Self {
        let (transport, gate) = match spec.target {
            Target::Remote { transport: RemoteTransport::Sse, .. } => (RemoteTransport::Sse, Gate::Untried),
            // A spec without a remote target has no `Access`, so its requests fail.
            Target::Remote { .. } | Target::Stdio { .. } => (RemoteTransport::Http, Gate::Open),
        };
        let session = Session::new(spec, clients, tokens, memory);
        Self {
            transport,
            session,
            exchanges: Exchanges::new(),
            gate,
            notifications: Lane::default(),
            responses: Lane::default(),
            ready: VecDeque::new(),
        }
    }

    fn start(&mut self, message: Outgoing) {
        let session = Arc::clone(&self.session);
        match message {
            Outgoing::Request { id, body, header_timeout, routing } => match self.transport {
                RemoteTransport::Http => {
                    let request = |out| streamable::request(session, id, body, header_timeout, routing, out);
                    self.exchanges.start(Some(id), request);
                }
                RemoteTransport::Sse => self.exchanges.start(Some(id), |_| async move {
                    match deliver(&session, body, Some(id), header_timeout).await {
                        // The response arrives on the stream.
                        Ok(None) => News::Done,
                        Ok(Some(message)) => News::Of(Incoming::Message { message, of: Some(id) }),
                        Err(failure) => News::Of(Incoming::Failed { id, failure }),
                    }
                }),
            },
            Outgoing::Notification { body } => self.tell(Telling::Notification, Some(body)),
            Outgoing::Response { body } => self.tell(Telling::Response, Some(body)),
            Outgoing::Initialized { version, body } => {
                session.agreed(&version);
                self.gate = Gate::Shut(VecDeque::new());
                self.exchanges.start(None, |_| initialized(session, body));
            }
            Outgoing::Probe { id } => self.exchanges.start(Some(id), |_| probe(session, id)),
            Outgoing::Abandon { .. } | Outgoing::Credentials(_) | Outgoing::Close => {}
        }
    }

    /// Queues a message and sends a few at a time: a server that sends many requests must not get a connection for each
    /// response.
    fn tell(&mut self, telling: Telling, body: Option<Bytes>) {
        let lane = self.lane(telling);
        lane.untold.extend(body);
        if matches!(telling, Telling::Notification) && lane.untold.len() > NOTIFICATIONS_MAX {
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
        let gate = if let Gate::Shut(waiting) = &self.gate {
            waiting.iter().filter(|message| is_telling(message)).count()
        } else {
            0
        };
        gate + self.responses.untold.len()
    }

    fn lane(&mut self, telling: Telling) -> &mut Lane {
        match telling {
            Telling::Notification => &mut self.notifications,
            Telling::Response => &mut self.responses,
        }
    }

    /// Queues a message until the gate opens. The oldest notification is dropped beyond the limit, because cancelled
    /// requests can produce many.
    fn wait(waiting: &mut VecDeque<Outgoing>, message: Outgoing) {
        let is_notification = |message: &Outgoing| matches!(message, Outgoing::Notification { .. });
        if is_notification(&message)
            && waiting.iter().filter(|waiting| is_notification(waiting)).count() >= NOTIFICATIONS_MAX
            && let Some(oldest) = waiting.iter().position(is_notification)
        {
            waiting.remove(oldest);
        }
        waiting.push_back(message);
    }

    fn lost(&mut self, failure: Failure) {
        self.unsent(&failure.kind);
        self.ready.push_back(Incoming::Lost(failure));
    }

    fn unsent(&mut self, kind: &FailureKind) {
        let Gate::Shut(waiting) = &mut self.gate else { return };
        for message in waiting.drain(..) {
            if let Outgoing::Request { id, .. } = message {
                self.ready.push_back(Incoming::Failed { id, failure: Failure::unsent(kind.clone()) });
            }
        }
    }

    fn open(&mut self) {
        let Gate::Shut(mut waiting) = std::mem::replace(&mut self.gate, Gate::Open) else { return };
        while let Some(message) = waiting.pop_front() {
            self.start(message);
            if let Gate::Shut(behind) = &mut self.gate {
                behind.append(&mut waiting);
            }
        }
    }

    /// Fails the waiting messages as unsent, because the stream of an HTTP+SSE server could not be opened. The next
    /// message is another try.
    fn unopened(&mut self, failure: &Failure) {
        let Gate::Shut(waiting) = std::mem::replace(&mut self.gate, Gate::Untried) else { return };
        for message in waiting {
            let failure = Failure::unsent(failure.kind.clone());
            match message {
                Outgoing::Request { id, .. } => self.ready.push_back(Incoming::Failed { id, failure }),
                Outgoing::Notification { .. } | Outgoing::Response { .. } | Outgoing::Initialized { .. } => {
                    self.ready.push_back(Incoming::Lost(failure));
                }
                Outgoing::Probe { .. } | Outgoing::Abandon { .. } | Outgoing::Credentials(_) | Outgoing::Close => {}
            }
        }
    }

    fn close(&mut self) {
        self.ready.retain(|incoming| matches!(incoming, Incoming::Failed { .. }));
        self.unsent(&FailureKind::Cut);
        self.gate = Gate::Closed;
        (self.notifications, self.responses) = (Lane::default(), Lane::default());
        self.exchanges.abandon_all();
        let session = Arc::clone(&self.session);
        match self.transport {
            RemoteTransport::Http => self.exchanges.start(None, |_| streamable::close(session)),
            RemoteTransport::Sse => self.exchanges.start(None, |_| async { News::Of(Incoming::Closed) }),
        }
    }
}

fn is_telling(message: &Outgoing) -> bool {
    matches!(message, Outgoing::Notification { .. } | Outgoing::Response { .. })
}

impl Line for RemoteLine {
    fn send(&mut self, message: Outgoing) {
        let counts = is_telling(&message);
        match (message, &mut self.gate) {
            (Outgoing::Credentials(spec), _) => self.session.adopt(&spec),
            (Outgoing::Close, _) => self.close(),
            (_, Gate::Closed) => {}
            (Outgoing::Abandon { id: abandoned }, gate) => {
                if let Gate::Shut(waiting) = gate {
                    waiting.retain(|message| !matches!(message, Outgoing::Request { id, .. } if *id == abandoned));
                }
                self.exchanges.abandon(abandoned);
            }
            // A probe is not part of the session.
            (message @ Outgoing::Probe { .. }, _) | (message, Gate::Open) => self.start(message),
            (message, Gate::Shut(waiting)) => Self::wait(waiting, message),
            (message, Gate::Untried) => {
                self.gate = Gate::Shut(VecDeque::from([message]));
                let session = Arc::clone(&self.session);
                self.exchanges.start(None, |out: Out| legacy::listen(session, out));
            }
        }
        if counts && self.untold() > UNTOLD_MAX {
            self.lost(Failure::sent(FailureKind::Flooded));
        }
        self.exchanges.wake();
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Incoming> {
        loop {
            if let Some(incoming) = self.ready.pop_front() {
                return Poll::Ready(incoming);
            }
            match ready!(self.exchanges.poll_next(cx)) {
                News::Of(Incoming::Lost(failure)) => self.lost(failure),
                News::Of(incoming) => return Poll::Ready(incoming),
                News::Aside(message, of) => {
                    // A server may answer on this stream and never end the exchange of the request.
                    if let Some(id) = self.exchanges.answered_by(&message) {
                        self.exchanges.start(None, |_| async move {
                            sleep(LAST_WORDS).await;
                            News::Answered(id)
                        });
                    }
                    return Poll::Ready(Incoming::Message { message, of });
                }
                News::Answered(id) => self.exchanges.abandon(id),
                News::Initialized => {
                    if self.transport == RemoteTransport::Http {
                        let session = Arc::clone(&self.session);
                        self.exchanges.start(None, |out| streamable::listen(session, out));
                    }
                    self.open();
                }
                News::Endpoint => self.open(),
                News::Unopened(failure) => self.unopened(&failure),
                News::Told(telling) => {
                    self.lane(telling).telling -= 1;
                    self.tell(telling, None);
                }
                News::Done => {}
            }
        }
    }
}

/// Posts a message. The answer, if there is one, does not come in this response; only an error response may contain it.
async fn deliver(
    session: &Session,
    body: Bytes,
    id: Option<u64>,
    header_timeout: Option<std::time::Duration>,
) -> Result<Option<Bytes>, Failure> {
    let terms = session.terms()?;
    let response = terms.ask(terms.post(body), header_timeout).await?;
    if response.status().is_success() {
        return Ok(None);
    }
    let messages = terms.refusal(response, id).await.map_err(Failure::sent)?;
    Ok(messages.into_iter().find(|message| id.is_some_and(|id| message::answers(message, id))))
}

async fn notify(session: Arc<Session>, telling: Telling, body: Bytes) -> News {
    let Err(failure) = tell(&session, body).await else { return News::Told(telling) };
    if ends_session(&failure) {
        return News::Of(Incoming::Lost(failure));
    }
    tracing::debug!(%failure, ?telling, "what the server was told was not taken");
    News::Told(telling)
}

/// Delivers `notifications/initialized` before the first request: some servers reject requests that arrive too early.
async fn initialized(session: Arc<Session>, body: Bytes) -> News {
    match tell(&session, body).await {
        Ok(()) => News::Initialized,
        Err(failure) => News::Of(Incoming::Lost(failure)),
    }
}

async fn tell(session: &Session, body: Bytes) -> Result<(), Failure> {
    let header_timeout = session.terms()?.header_timeout();
    deliver(session, body, None, Some(header_timeout)).await.map(drop)
}

/// Returns true if the failure of a notification means that the session is over. If the server received it and was slow
/// or broke off, the next request shows whether the session is lost.
fn ends_session(failure: &Failure) -> bool {
    match failure.kind {
        FailureKind::Unauthorized { .. } | FailureKind::Forbidden { .. } | FailureKind::SessionExpired { .. } => true,
        _ => !failure.sent,
    }
}

async fn probe(session: Arc<Session>, id: u64) -> News {
    let healthy = async {
        let terms = session.terms()?.alone(false);
        let unknown = || Failure::unsent(FailureKind::BadAddress("no health_url is configured".to_owned()));
        let request = terms.access.probe().ok_or_else(unknown)?;
        let response = terms.ask_alone(request, Some(terms.header_timeout())).await?;
        if response.status().is_success() {
            Ok(())
        } else {
            // A probe has no session that could have expired.
            Err(Failure::sent(super::failures::of_status(&response, &terms.access)))
        }
    };
    News::Of(match healthy.await {
        Ok(()) => Incoming::Probed { id },
        Err(failure) => Incoming::Failed { id, failure },
    })
}
