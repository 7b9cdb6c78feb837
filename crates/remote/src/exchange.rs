//! HTTP exchanges, and the state that all exchanges of a line share.

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
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::LineEvent;
use mcp_satellite_protocol::body;
use mcp_satellite_protocol::sse::SseEvent;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Request, RequestBuilder, Response, StatusCode, Url};
use tokio::time::timeout;

use super::access::{JSON, PROTOCOL_VERSION, SESSION_ID, ServerAccess, TEXT};
use super::clients::HttpClients;
use super::events::{COUNTED_FROM, SseError, SseReader};
use super::failures::{challenge, failure_from_error, failure_from_status, one_line};
use super::tokens::{TokenRefusal, TokenSource};

// Minimum length of a session id that is masked in messages. A shorter one is a counter: it occurs in ordinary text and
// is no secret.
const SESSION_ID_MIN: usize = 5;

/// Kind of a message that gets no answer.
#[derive(Debug, Clone, Copy)]
pub(super) enum OneWayKind {
    Notification,
    Response,
}

#[derive(Debug)]
pub(super) enum ExchangeMessage {
    Event(LineEvent),
    /// A message of the server other than the awaited answer. It may answer the request of another exchange.
    Unsolicited(Bytes, Option<u64>),
    /// The request with this number was answered a while ago on the stream of another exchange.
    AnsweredElsewhere(u64),
    Initialized,
    Endpoint,
    OpenFailed(ExchangeFailure),
    Delivered(OneWayKind),
    Done,
}

/// Sender from an exchange to its line, with room for one message: a server that sends faster than the session reads
/// has to wait.
pub(super) struct ExchangeSender {
    line: mpsc::Sender<ExchangeMessage>,
    request_id: Option<u64>,
}

impl ExchangeSender {
    pub(super) async fn send(&mut self, message: ExchangeMessage) {
        // If the line is gone, this exchange is dropped at the next await.
        let _ = self.line.send(message).await;
    }

    pub(super) async fn send_answer(&mut self, text: Bytes) {
        self.send_messages(text, |message, of| ExchangeMessage::Event(LineEvent::Message { message, request: of }))
            .await;
    }

    pub(super) async fn send_unsolicited(&mut self, text: Bytes) {
        self.send_messages(text, ExchangeMessage::Unsolicited).await;
    }

    // Splits a batch into its messages. Text that is not JSON is passed on, because the session counts invalid
    // messages.
    async fn send_messages(&mut self, text: Bytes, to_message: fn(Bytes, Option<u64>) -> ExchangeMessage) {
        let is_batch = text.trim_ascii_start().first() == Some(&b'[');
        match is_batch.then(|| body::split_messages(&text)).flatten() {
            None => self.send(to_message(text, self.request_id)).await,
            Some(batch) => {
                for message in batch {
                    self.send(to_message(message, self.request_id)).await;
                }
            }
        }
    }
}

type Exchange = BoxFuture<'static, (Option<u64>, ExchangeMessage)>;

/// Exchanges in progress on one line. They run while the line is polled, so none outlives the line.
pub(super) struct LineExchanges {
    running: FuturesUnordered<Abortable<Exchange>>,
    cancellable: Vec<(u64, AbortHandle)>,
    sender: mpsc::Sender<ExchangeMessage>,
    receiver: mpsc::Receiver<ExchangeMessage>,
    ended: VecDeque<ExchangeMessage>,
    waker: Option<Waker>,
}

impl LineExchanges {
    pub(super) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(0);
        Self {
            running: FuturesUnordered::new(),
            cancellable: Vec::new(),
            sender,
            receiver,
            ended: VecDeque::new(),
            waker: None,
        }
    }

    pub(super) fn start<F>(&mut self, id: Option<u64>, exchange: impl FnOnce(ExchangeSender) -> F)
    where
        F: Future<Output = ExchangeMessage> + Send + 'static,
    {
        let (handle, registration) = AbortHandle::new_pair();
        let exchange = exchange(ExchangeSender { line: self.sender.clone(), request_id: id })
            .map(move |message| (id, message))
            .boxed();
        self.running.push(Abortable::new(exchange, registration));
        if let Some(id) = id {
            self.cancellable.push((id, handle));
        }
        self.wake();
    }

    pub(super) fn answered_request(&self, message: &[u8]) -> Option<u64> {
        let id = (!self.cancellable.is_empty()).then(|| body::answered_id(message)).flatten()?;
        self.cancellable.iter().any(|(its, _)| *its == id).then_some(id)
    }

    // Also drops the connection of the exchange.
    pub(super) fn abandon(&mut self, id: u64) {
        if let Some(at) = self.cancellable.iter().position(|(its, _)| *its == id) {
            self.cancellable.swap_remove(at).1.abort();
        }
    }

    pub(super) fn abandon_all(&mut self) {
        *self = Self { waker: self.waker.take(), ..Self::new() };
    }

    pub(super) fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<ExchangeMessage> {
        loop {
            // Messages that an exchange sent while it ran come before its result.
            let received = match self.receiver.poll_next_unpin(cx) {
                Poll::Ready(message) => message,
                Poll::Pending => self.ended.pop_front(),
            };
            if let Some(message) = received {
                return Poll::Ready(message);
            }
            match self.running.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok((id, message)))) => {
                    self.cancellable.retain(|(its, _)| Some(*its) != id);
                    self.ended.push_back(message);
                }
                Poll::Ready(Some(Err(Aborted))) => {}
                // An exchange may have sent a message during this poll.
                Poll::Ready(None) | Poll::Pending => match self.receiver.poll_next_unpin(cx) {
                    Poll::Ready(Some(message)) => return Poll::Ready(message),
                    Poll::Ready(None) | Poll::Pending => break,
                },
            }
        }
        self.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

pub(super) struct LineSession {
    clients: Arc<HttpClients>,
    tokens: Arc<dyn TokenSource>,
    memory: Arc<ByteBudget>,
    state: Mutex<ExchangeState>,
}

struct ExchangeState {
    access: Result<Arc<ServerAccess>, FailureKind>,
    id: Option<HeaderValue>,
    version: Option<HeaderValue>,
    // Endpoint for messages, named by an HTTP+SSE server.
    endpoint: Option<Url>,
}

impl LineSession {
    pub(super) fn new(
        spec: &InstanceSpec,
        clients: Arc<HttpClients>,
        tokens: Arc<dyn TokenSource>,
        memory: Arc<ByteBudget>,
    ) -> Arc<Self> {
        let access = ServerAccess::new(spec, &clients, &tokens).map(Arc::new);
        let state = Mutex::new(ExchangeState { access, id: None, version: None, endpoint: None });
        Arc::new(Self { clients, tokens, memory, state })
    }

    pub(super) fn context(&self) -> Result<ExchangeContext, ExchangeFailure> {
        let state = self.state();
        let access = state.access.clone().map_err(ExchangeFailure::unsent)?;
        let (id, version, endpoint) = (state.id.clone(), state.version.clone(), state.endpoint.clone());
        let (greets, memory) = (version.is_none(), self.memory.clone());
        Ok(ExchangeContext { access, stateless: false, is_first_request: greets, id, version, endpoint, memory })
    }

    pub(super) fn update_access(&self, spec: &InstanceSpec) {
        let access = ServerAccess::new(spec, &self.clients, &self.tokens).map(Arc::new);
        self.state().access = access;
    }

    /// Stores the session id from the response to `initialize`. Ignored once a version is negotiated.
    pub(super) fn store_session_id(&self, headers: &HeaderMap) {
        let mut state = self.state();
        if let Some(id) = headers.get(SESSION_ID).filter(|_| state.version.is_none()) {
            // A copy: the original keeps the whole head of the response in memory.
            let Ok(mut id) = HeaderValue::from_bytes(id.as_bytes()) else { return };
            // The id is a secret, because it gives access to the session.
            id.set_sensitive(true);
            state.id = Some(id);
        }
    }

    pub(super) fn set_version(&self, version: &str) {
        self.state().version = HeaderValue::from_str(version).ok();
    }

    pub(super) fn set_endpoint(&self, endpoint: Url) {
        self.state().endpoint = Some(endpoint);
    }

    fn state(&self) -> MutexGuard<'_, ExchangeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Snapshot of the session state for one exchange.
pub(super) struct ExchangeContext {
    pub(super) access: Arc<ServerAccess>,
    // True for a request outside any session.
    stateless: bool,
    // True before a version is negotiated: a refused token then concerns the server as a whole.
    is_first_request: bool,
    id: Option<HeaderValue>,
    version: Option<HeaderValue>,
    endpoint: Option<Url>,
    memory: Arc<ByteBudget>,
}

impl ExchangeContext {
    /// Returns the terms of a request outside any session. `greets` is true for the first request to the server.
    pub(super) fn into_stateless(self, greets: bool) -> Self {
        Self { stateless: true, is_first_request: greets, id: None, version: None, ..self }
    }

    pub(super) fn is_stateless(&self) -> bool {
        self.stateless
    }

    /// Returns true if the server has given the session an id or an endpoint.
    pub(super) fn has_session(&self) -> bool {
        !self.stateless && (self.id.is_some() || self.endpoint.is_some())
    }

    pub(super) fn is_negotiated(&self) -> bool {
        self.version.is_some()
    }

    pub(super) fn post(&self, body: Bytes) -> RequestBuilder {
        let url = match &self.endpoint {
            Some(endpoint) => self.access.with_query(endpoint),
            None => self.access.url().clone(),
        };
        self.access.post(url, body)
    }

    /// Sends a request of the session, and waits for the head of the response.
    pub(super) async fn send_in_session(
        &self,
        mut request: RequestBuilder,
        header_timeout: Option<Duration>,
    ) -> Result<Response, ExchangeFailure> {
        for (name, value) in [(SESSION_ID, &self.id), (PROTOCOL_VERSION, &self.version)] {
            if let Some(value) = value {
                request = request.header(name, value);
            }
        }
        self.send_authorized(request, header_timeout).await
    }

    /// Sends a request outside any session. A request refused because of its token is sent once more with another
    /// token: the server has not processed it.
    pub(super) async fn send_authorized(
        &self,
        request: RequestBuilder,
        header_timeout: Option<Duration>,
    ) -> Result<Response, ExchangeFailure> {
        let (client, request) = request.build_split();
        let request = request.map_err(|error| failure_from_error(&error, &self.access))?;
        let Some(tokens) = self.access.tokens_for(request.url()) else {
            return self.send(&client, request, header_timeout).await;
        };
        let (mut used, mut again) = (tokens.token(), request.try_clone());
        let mut response = self.send(&client, add_bearer_token(request, used.as_ref()), header_timeout).await?;
        while matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let refusal = TokenRefusal {
                status: response.status().as_u16(),
                token: used,
                challenge: challenge(response.headers()),
                is_first_request: self.is_first_request,
                is_retry: again.is_none(),
            };
            let another = tokens.replacement_token(refusal).await.map_err(ExchangeFailure::sent)?;
            let (Some(token), Some(request)) = (another, again.take()) else { break };
            response = self.send(&client, add_bearer_token(request, Some(&token)), header_timeout).await?;
            used = Some(token);
        }
        Ok(response)
    }

    async fn send(
        &self,
        client: &Client,
        request: Request,
        header_timeout: Option<Duration>,
    ) -> Result<Response, ExchangeFailure> {
        let response = client.execute(request);
        let answer = match header_timeout {
            Some(limit) => {
                timeout(limit, response).await.map_err(|_| ExchangeFailure::sent(FailureKind::HeaderTimeout(limit)))?
            }
            None => response.await,
        };
        answer.map_err(|error| failure_from_error(&error, &self.access))
    }

    /// Interprets an error response: returns its messages if they answer request `id`, otherwise the failure.
    pub(super) async fn interpret_error(&self, response: Response, id: Option<u64>) -> Result<Vec<Bytes>, FailureKind> {
        let status = response.status();
        let kind = failure_from_status(&response, &self.access);
        if !matches!(kind, FailureKind::Status { .. }) {
            return Err(kind);
        }
        // The body is read only where it makes a difference, and with a timeout.
        let speaks = match content_type(&response).as_deref() {
            Some(JSON) => status.is_client_error(),
            Some(TEXT) => status.is_client_error() && self.has_session(),
            _ => false,
        };
        let body = if speaks {
            timeout(self.access.policy.remote.header_timeout, self.read_body(response)).await
        } else {
            Ok(Ok(Bytes::new()))
        };
        let body = body.ok().and_then(Result::ok).unwrap_or_default();
        let messages = body::split_messages(&body).unwrap_or_default();
        let in_session = id.filter(|_| self.version.is_some() && self.has_session());
        // A message that the session is unknown counts for any request.
        let is_session_unknown = in_session.is_some()
            && if messages.is_empty() {
                body::is_session_not_found(&String::from_utf8_lossy(&body))
            } else {
                messages
                    .iter()
                    .filter_map(|message| body::error_message(message))
                    .any(|message| body::is_session_not_found(&message))
            };
        if !is_session_unknown && id.is_some_and(|id| messages.iter().any(|message| body::is_answer_to(message, id))) {
            return Ok(messages);
        }
        // A server that no longer has sessions does not know the method, and returns an error without a request id.
        if let Some(id) = in_session
            && let Some(answer) = messages.iter().find_map(|message| body::method_not_found_answer(message, id))
        {
            return Ok(vec![answer]);
        }
        let expired = match status {
            _ if is_session_unknown => true,
            StatusCode::NOT_FOUND => true,
            // A server that knows the session and rejects the request returns an error with the request's id. A server
            // that does not know the session returns a JSON-RPC error without id or with its own id. Plain text or an
            // empty body can mean either.
            StatusCode::BAD_REQUEST => {
                let is_in_session = id.is_some() && self.version.is_some();
                let speaks = if is_in_session { body::is_error } else { body::is_error_without_id };
                messages.iter().any(|message| speaks(message))
            }
            _ => false,
        };
        let message =
            messages.iter().find_map(|message| body::error_message(message)).map(|message| self.mask_line(&message));
        let status = status.as_u16();
        Err(if expired && self.has_session() {
            FailureKind::SessionExpired { status, message }
        } else {
            FailureKind::Status { status, message }
        })
    }

    /// Masks secrets and the session id in a message of the server. The id gives access to the session.
    fn mask_line(&self, message: &str) -> String {
        let masked = self.access.mask.apply(message);
        match self.id.as_ref().and_then(|id| id.to_str().ok()).filter(|id| id.len() >= SESSION_ID_MIN) {
            // After the mask: a secret that contains the id would no longer be recognized.
            Some(id) => one_line(&masked.replace(id, "[session]")),
            None => one_line(&masked),
        }
    }

    pub(super) async fn read_body(&self, mut response: Response) -> Result<Bytes, ExchangeFailure> {
        let limit = self.line_max();
        let too_long = || ExchangeFailure::sent(FailureKind::TooLong(limit));
        if response.content_length().is_some_and(|length| usize::try_from(length).map_or(true, |length| length > limit))
        {
            return Err(too_long());
        }
        let mut parts = Vec::new();
        let (mut length, mut share) = (0, self.memory.share());
        while let Some(part) = response.chunk().await.map_err(|_| ExchangeFailure::sent(FailureKind::Cut))? {
            length += part.len();
            if length > limit {
                return Err(too_long());
            }
            if length > COUNTED_FROM && !share.try_take(length - share.bytes()) {
                return Err(ExchangeFailure::sent(FailureKind::NoMemory));
            }
            parts.push(part);
        }
        let body = match <[Bytes; 1]>::try_from(parts) {
            Ok([body]) => body,
            Err(parts) => parts.concat().into(),
        };
        Ok(if share.bytes() == 0 { body } else { share.attach_to(body) })
    }

    pub(super) fn sse_reader(&self) -> SseReader {
        SseReader::new(self.line_max(), &self.memory)
    }

    fn line_max(&self) -> usize {
        self.access.policy.session.line_max
    }

    pub(super) fn sse_failure(&self, error: &SseError) -> ExchangeFailure {
        ExchangeFailure::sent(match error {
            SseError::TooLong => FailureKind::TooLong(self.line_max()),
            SseError::NoMemory => FailureKind::NoMemory,
        })
    }

    pub(super) fn header_timeout(&self) -> Duration {
        self.access.policy.remote.header_timeout
    }
}

/// Adds the token to a request. A token that is not a valid header value is left out, and the server rejects the
/// request.
fn add_bearer_token(mut request: Request, token: Option<&Secret>) -> Request {
    let value = token.and_then(|token| HeaderValue::from_str(&format!("Bearer {}", token.expose())).ok());
    if let Some(mut value) = value {
        value.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    request
}

/// Returns the media type of a response, without parameters, in lower case.
pub(super) fn content_type(response: &Response) -> Option<String> {
    let value = response.headers().get(CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next()?.trim().to_ascii_lowercase())
}

/// Drops the headers of a response: they share a buffer with the whole head, which a stream open for days would keep in
/// memory.
pub(super) fn drop_headers(response: &mut Response) {
    *response.headers_mut() = HeaderMap::new();
}

/// Returns the next event of a stream, or `None` at its end, regular or not. Cancel-safe.
pub(super) async fn next_event(response: &mut Response, events: &mut SseReader) -> Result<Option<SseEvent>, SseError> {
    loop {
        if let Some(event) = events.next()? {
            return Ok(Some(event));
        }
        // A server that sends comments without a pause must not occupy a thread.
        tokio::task::consume_budget().await;
        match response.chunk().await {
            Ok(Some(chunk)) => events.push(chunk),
            Ok(None) | Err(_) => return Ok(None),
        }
    }
}
