//! One exchange over HTTP, and what all of a line's exchanges share.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use futures::channel::mpsc;
use futures::future::{AbortHandle, Abortable, Aborted, BoxFuture};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, SinkExt, StreamExt};
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::failure::{Failure, FailureKind};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::Incoming;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Request, RequestBuilder, Response, StatusCode, Url};
use tokio::time::timeout;

use super::access::{Access, JSON, PROTOCOL_VERSION, SESSION_ID, TEXT};
use super::clients::Clients;
use super::events::{COUNTED_FROM, Event, EventError, Events};
use super::failures::{challenge, of_error, of_status, one_line};
use super::line::Telling;
use super::message;
use super::tokens::{Refusal, Tokens};

/// The name of a session that is shorter is in everything, and no secret: somebody has counted.
const SESSION_ID_MIN: usize = 5;

/// What an exchange has to tell its line.
#[derive(Debug)]
pub(super) enum News {
    /// This is for the session.
    Of(Incoming),
    /// A message for the session that nobody waited for on its stream: it may be the answer to another exchange.
    Aside(Bytes, Option<u64>),
    /// The request with this number was answered a while ago, not by the exchange that sent it.
    Answered(u64),
    /// The server has taken `notifications/initialized`.
    Initialized,
    /// The stream of an HTTP+SSE server has named where messages go.
    Endpoint,
    /// The stream of an HTTP+SSE server has come to nothing.
    Unopened(Failure),
    /// A notification or an answer of ours was taken, or will not be.
    Told(Telling),
    /// The exchange is over, and all of it was told.
    Done,
}

/// The way to the line, which takes one message at a time: a server that talks faster than it is listened to waits.
pub(super) struct Out {
    line: mpsc::Sender<News>,
    /// The request whose exchange it is.
    of: Option<u64>,
}

impl Out {
    pub(super) async fn send(&mut self, news: News) {
        // An error says that the line is gone, and with it, at the next await, this exchange.
        let _ = self.line.send(news).await;
    }

    /// A text of the server with the answer in it that was waited for.
    pub(super) async fn answer(&mut self, text: Bytes) {
        self.messages(text, |message, of| News::Of(Incoming::Message { message, of })).await;
    }

    /// Any other text of the server.
    pub(super) async fn aside(&mut self, text: Bytes) {
        self.messages(text, News::Aside).await;
    }

    /// One message, or a batch of them. What is no JSON is passed on for the session to count.
    async fn messages(&mut self, text: Bytes, news: fn(Bytes, Option<u64>) -> News) {
        let is_batch = text.trim_ascii_start().first() == Some(&b'[');
        match is_batch.then(|| message::messages(&text)).flatten() {
            None => self.send(news(text, self.of)).await,
            Some(batch) => {
                for message in batch {
                    self.send(news(message, self.of)).await;
                }
            }
        }
    }
}

/// One exchange, and which request it is for.
type Exchange = BoxFuture<'static, (Option<u64>, News)>;

/// What is under way on one line. It runs where the line is polled, so nothing of it outlives the line.
pub(super) struct Exchanges {
    running: FuturesUnordered<Abortable<Exchange>>,
    abandonable: Vec<(u64, AbortHandle)>,
    sender: mpsc::Sender<News>,
    receiver: mpsc::Receiver<News>,
    ended: VecDeque<News>,
    waker: Option<Waker>,
}

impl Exchanges {
    pub(super) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(0);
        Self {
            running: FuturesUnordered::new(),
            abandonable: Vec::new(),
            sender,
            receiver,
            ended: VecDeque::new(),
            waker: None,
        }
    }

    /// Begins an exchange; one with a number can be abandoned by it.
    pub(super) fn start<F>(&mut self, id: Option<u64>, exchange: impl FnOnce(Out) -> F)
    where
        F: Future<Output = News> + Send + 'static,
    {
        let (handle, registration) = AbortHandle::new_pair();
        let exchange = exchange(Out { line: self.sender.clone(), of: id }).map(move |news| (id, news)).boxed();
        self.running.push(Abortable::new(exchange, registration));
        if let Some(id) = id {
            self.abandonable.push((id, handle));
        }
        self.wake();
    }

    /// Whether there is an exchange that `message` answers in its place.
    pub(super) fn answered_by(&self, message: &[u8]) -> Option<u64> {
        let id = (!self.abandonable.is_empty()).then(|| message::answered(message)).flatten()?;
        self.abandonable.iter().any(|(its, _)| *its == id).then_some(id)
    }

    /// Drops an exchange, and with it its connection.
    pub(super) fn abandon(&mut self, id: u64) {
        if let Some(at) = self.abandonable.iter().position(|(its, _)| *its == id) {
            self.abandonable.swap_remove(at).1.abort();
        }
    }

    /// Drops all of them, and what they had still to tell.
    pub(super) fn abandon_all(&mut self) {
        *self = Self { waker: self.waker.take(), ..Self::new() };
    }

    /// The line has something to do.
    pub(super) fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<News> {
        loop {
            // What an exchange told while it ran comes before its end.
            let told = match self.receiver.poll_next_unpin(cx) {
                Poll::Ready(news) => news,
                Poll::Pending => self.ended.pop_front(),
            };
            if let Some(news) = told {
                return Poll::Ready(news);
            }
            match self.running.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok((id, news)))) => {
                    self.abandonable.retain(|(its, _)| Some(*its) != id);
                    self.ended.push_back(news);
                }
                Poll::Ready(Some(Err(Aborted))) => {}
                // One of them may have told something all the same.
                Poll::Ready(None) | Poll::Pending => match self.receiver.poll_next_unpin(cx) {
                    Poll::Ready(Some(news)) => return Poll::Ready(news),
                    Poll::Ready(None) | Poll::Pending => break,
                },
            }
        }
        self.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// What the exchanges of a line have in common, and change.
pub(super) struct Session {
    clients: Arc<Clients>,
    tokens: Arc<dyn Tokens>,
    memory: Arc<ByteBudget>,
    state: Mutex<State>,
}

struct State {
    access: Result<Arc<Access>, FailureKind>,
    /// The server's name for the session.
    id: Option<HeaderValue>,
    /// The protocol version, once it was agreed on.
    version: Option<HeaderValue>,
    /// Where an HTTP+SSE server wants its messages.
    endpoint: Option<Url>,
}

impl Session {
    pub(super) fn new(
        spec: &InstanceSpec,
        clients: Arc<Clients>,
        tokens: Arc<dyn Tokens>,
        memory: Arc<ByteBudget>,
    ) -> Arc<Self> {
        let access = Access::new(spec, &clients, &tokens).map(Arc::new);
        let state = Mutex::new(State { access, id: None, version: None, endpoint: None });
        Arc::new(Self { clients, tokens, memory, state })
    }

    /// What every exchange that begins now goes by.
    pub(super) fn terms(&self) -> Result<Terms, Failure> {
        let state = self.state();
        let access = state.access.clone().map_err(Failure::unsent)?;
        let (id, version, endpoint) = (state.id.clone(), state.version.clone(), state.endpoint.clone());
        let (greets, memory) = (version.is_none(), self.memory.clone());
        Ok(Terms { access, alone: false, greets, id, version, endpoint, memory })
    }

    pub(super) fn adopt(&self, spec: &InstanceSpec) {
        let access = Access::new(spec, &self.clients, &self.tokens).map(Arc::new);
        self.state().access = access;
    }

    /// The session begins with the answer to `initialize`, before a version was agreed on.
    pub(super) fn greeted(&self, headers: &HeaderMap) {
        let mut state = self.state();
        if let Some(id) = headers.get(SESSION_ID).filter(|_| state.version.is_none()) {
            // A copy: the one that was sent holds all of the answer's head in memory.
            let Ok(mut id) = HeaderValue::from_bytes(id.as_bytes()) else { return };
            // Who knows it can speak for us.
            id.set_sensitive(true);
            state.id = Some(id);
        }
    }

    pub(super) fn agreed(&self, version: &str) {
        self.state().version = HeaderValue::from_str(version).ok();
    }

    pub(super) fn directed(&self, endpoint: Url) {
        self.state().endpoint = Some(endpoint);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one exchange goes by, from its beginning to its end.
pub(super) struct Terms {
    pub(super) access: Arc<Access>,
    /// It belongs to no session.
    alone: bool,
    /// It begins what there is with the server: what is refused here is refused altogether.
    greets: bool,
    id: Option<HeaderValue>,
    version: Option<HeaderValue>,
    endpoint: Option<Url>,
    /// The memory budget for messages of all servers.
    memory: Arc<ByteBudget>,
}

impl Terms {
    /// The terms of a request that belongs to no session, whatever there is one for; `greets` if it is the first one.
    pub(super) fn alone(self, greets: bool) -> Self {
        Self { alone: true, greets, id: None, version: None, ..self }
    }

    pub(super) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Whether the server has given the session a name.
    pub(super) fn names_session(&self) -> bool {
        !self.alone && (self.id.is_some() || self.endpoint.is_some())
    }

    /// Whether a version was agreed on.
    pub(super) fn has_begun(&self) -> bool {
        self.version.is_some()
    }

    /// A message on its way to the server.
    pub(super) fn post(&self, body: Bytes) -> RequestBuilder {
        let url = match &self.endpoint {
            Some(endpoint) => self.access.endpoint(endpoint),
            None => self.access.url().clone(),
        };
        self.access.post(url, body)
    }

    /// Sends a request that belongs to the session, and waits for the beginning of its answer.
    pub(super) async fn ask(
        &self,
        mut request: RequestBuilder,
        header_timeout: Option<Duration>,
    ) -> Result<Response, Failure> {
        for (name, value) in [(SESSION_ID, &self.id), (PROTOCOL_VERSION, &self.version)] {
            if let Some(value) = value {
                request = request.header(name, value);
            }
        }
        self.ask_alone(request, header_timeout).await
    }

    /// Sends a request that belongs to no session. One that is refused for its token is sent once more with another one:
    /// a server that refuses like that has not looked at it.
    pub(super) async fn ask_alone(
        &self,
        request: RequestBuilder,
        header_timeout: Option<Duration>,
    ) -> Result<Response, Failure> {
        let (client, request) = request.build_split();
        let request = request.map_err(|error| of_error(&error, &self.access))?;
        let Some(purse) = self.access.purse(request.url()) else {
            return self.send(&client, request, header_timeout).await;
        };
        let (mut used, mut again) = (purse.token(), request.try_clone());
        let mut response = self.send(&client, bearing(request, used.as_ref()), header_timeout).await?;
        while matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let refusal = Refusal {
                status: response.status().as_u16(),
                used,
                challenge: challenge(response.headers()),
                first: self.greets,
                again: again.is_none(),
            };
            let another = purse.another(refusal).await.map_err(Failure::sent)?;
            let (Some(token), Some(request)) = (another, again.take()) else { break };
            response = self.send(&client, bearing(request, Some(&token)), header_timeout).await?;
            used = Some(token);
        }
        Ok(response)
    }

    async fn send(
        &self,
        client: &Client,
        request: Request,
        header_timeout: Option<Duration>,
    ) -> Result<Response, Failure> {
        let asked = client.execute(request);
        let answer = match header_timeout {
            Some(limit) => timeout(limit, asked).await.map_err(|_| Failure::sent(FailureKind::HeaderTimeout(limit)))?,
            None => asked.await,
        };
        answer.map_err(|error| of_error(&error, &self.access))
    }

    /// What an answer that is no success means: still the answer to request `id`, or a failure.
    pub(super) async fn refusal(&self, response: Response, id: Option<u64>) -> Result<Vec<Bytes>, FailureKind> {
        let status = response.status();
        let kind = of_status(&response, &self.access);
        if !matches!(kind, FailureKind::Status { .. }) {
            return Err(kind);
        }
        // What it says is only looked at where it makes a difference, and is not waited for without end.
        let speaks = match content_type(&response).as_deref() {
            Some(JSON) => status.is_client_error(),
            Some(TEXT) => status.is_client_error() && self.names_session(),
            _ => false,
        };
        let body = if speaks {
            timeout(self.access.policy.remote.header_timeout, self.body(response)).await
        } else {
            Ok(Ok(Bytes::new()))
        };
        let body = body.ok().and_then(Result::ok).unwrap_or_default();
        let messages = message::messages(&body).unwrap_or_default();
        let in_session = id.filter(|_| self.version.is_some() && self.names_session());
        // The server's own words for a session that it does not know, whatever request they are an answer to.
        let is_told = in_session.is_some()
            && if messages.is_empty() {
                message::says_session_not_found(&String::from_utf8_lossy(&body))
            } else {
                messages
                    .iter()
                    .filter_map(|message| message::complaint(message))
                    .any(|said| message::says_session_not_found(&said))
            };
        if !is_told && id.is_some_and(|id| messages.iter().any(|message| message::answers(message, id))) {
            return Ok(messages);
        }
        // A server that has no sessions any more does not know the method, and says so about no request in particular.
        if let Some(id) = in_session
            && let Some(answer) = messages.iter().find_map(|message| message::unknown_method(message, id))
        {
            return Ok(vec![answer]);
        }
        let expired = match status {
            _ if is_told => true,
            StatusCode::NOT_FOUND => true,
            // Who knows the session and takes the request for a bad one says so with its number. Who does not know the
            // session says it in JSON-RPC about nothing or about a number of its own. What is said in plain words, or not
            // at all, may be either.
            StatusCode::BAD_REQUEST => {
                let begun = id.is_some() && self.version.is_some();
                let speaks = if begun { message::is_error } else { message::is_error_about_nothing };
                messages.iter().any(|message| speaks(message))
            }
            _ => false,
        };
        let said = messages.iter().find_map(|message| message::complaint(message)).map(|said| self.told(&said));
        let status = status.as_u16();
        Err(if expired && self.names_session() {
            FailureKind::SessionExpired { status, said }
        } else {
            FailureKind::Status { status, said }
        })
    }

    /// What the server says of us: it may say the session's name, with which somebody else could speak for us.
    fn told(&self, said: &str) -> String {
        let masked = self.access.mask.apply(said);
        match self.id.as_ref().and_then(|id| id.to_str().ok()).filter(|id| id.len() >= SESSION_ID_MIN) {
            // After the mask: a secret with this in it would not be known for one any more.
            Some(id) => one_line(&masked.replace(id, "[session]")),
            None => one_line(&masked),
        }
    }

    /// All of an answer that is not a stream.
    pub(super) async fn body(&self, mut response: Response) -> Result<Bytes, Failure> {
        let limit = self.line_max();
        let too_long = || Failure::sent(FailureKind::TooLong(limit));
        if response.content_length().is_some_and(|length| usize::try_from(length).map_or(true, |length| length > limit))
        {
            return Err(too_long());
        }
        let mut parts = Vec::new();
        let (mut length, mut share) = (0, self.memory.share());
        while let Some(part) = response.chunk().await.map_err(|_| Failure::sent(FailureKind::Cut))? {
            length += part.len();
            if length > limit {
                return Err(too_long());
            }
            if length > COUNTED_FROM && !share.try_take(length - share.bytes()) {
                return Err(Failure::sent(FailureKind::NoMemory));
            }
            parts.push(part);
        }
        let whole = match <[Bytes; 1]>::try_from(parts) {
            Ok([whole]) => whole,
            Err(parts) => parts.concat().into(),
        };
        Ok(if share.bytes() == 0 { whole } else { share.hold(whole) })
    }

    /// Reads the events of a stream.
    pub(super) fn events(&self) -> Events {
        Events::new(self.line_max(), &self.memory)
    }

    fn line_max(&self) -> usize {
        self.access.policy.session.line_max
    }

    /// Returns the failure of a stream whose next event cannot be read.
    pub(super) fn unread(&self, error: &EventError) -> Failure {
        Failure::sent(match error {
            EventError::TooLong => FailureKind::TooLong(self.line_max()),
            EventError::NoMemory => FailureKind::NoMemory,
        })
    }

    pub(super) fn header_timeout(&self) -> Duration {
        self.access.policy.remote.header_timeout
    }
}

/// The request with this token. One that cannot be sent is as good as none: the server says so.
fn bearing(mut request: Request, token: Option<&Secret>) -> Request {
    let value = token.and_then(|token| HeaderValue::from_str(&format!("Bearer {}", token.expose())).ok());
    if let Some(mut value) = value {
        value.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    request
}

/// What a body is, without its parameters, in lower case.
pub(super) fn content_type(response: &Response) -> Option<String> {
    let value = response.headers().get(CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next()?.trim().to_ascii_lowercase())
}

/// The head of an answer is read in one piece, and each header of it holds all of that. A stream that may be open for days
/// does without.
pub(super) fn forget_head(response: &mut Response) {
    *response.headers_mut() = HeaderMap::new();
}

/// The next event of a stream; `None` at its end, however it ended. May be dropped and called again.
pub(super) async fn next_event(response: &mut Response, events: &mut Events) -> Result<Option<Event>, EventError> {
    loop {
        if let Some(event) = events.next()? {
            return Ok(Some(event));
        }
        // A server that sends comments without a pause must not keep a thread for itself.
        tokio::task::consume_budget().await;
        match response.chunk().await {
            Ok(Some(chunk)) => events.push(chunk),
            Ok(None) | Err(_) => return Ok(None),
        }
    }
}
