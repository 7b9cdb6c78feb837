//! The simulated server over streamable HTTP, in its own process: thousands of sessions at one address, which all end
//! when the process is killed.
//!
//! A session consists of a `SimResponder` and the requests that wait for its answers. It has no task: the waiting requests
//! (a POST for its answer, a GET for other messages) perform the due actions, so an idle session takes a few hundred
//! bytes.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Json, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use futures::stream;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::seam::ProcessEnd;
use mcp_satellite_protocol::era::SESSION_VERSIONS;
use mcp_satellite_protocol::error_code::{INVALID_REQUEST, PARSE_ERROR};
use mcp_satellite_protocol::header::{PROTOCOL_VERSION, SESSION_ID};
use mcp_satellite_protocol::method;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use super::process::exit_by_signal;
use super::script::SimScript;
use super::server::{EnvSource, SimPhase, SimResponder};
use super::wire::{CallParams, WireMessage, parse};

// Header that names the client's instance, if a client sends it. Separates the instances in the statistics.
const INSTANCE: &str = "x-instance";

// Maximum number of messages kept while no GET stream is open.
const UNSOLICITED_MAX: usize = 64;

// Maximum size of a message in bytes; a longer one gets status 413.
const BODY_MAX: usize = 64 * 1024 * 1024;

#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// Port 0 takes a free port.
    pub address: SocketAddr,
    pub path: String,
    /// Form of the answer to a POST.
    pub answers: AnswerFormat,
    /// True if a GET opens a stream; otherwise it gets status 405.
    pub get_stream: bool,
}

/// Form of answers, see [`HttpOptions::answers`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum AnswerFormat {
    /// A JSON object. Messages on the way, such as progress, go to the GET stream.
    #[default]
    Json,
    /// A stream of events that ends with the answer.
    Sse,
}

/// Statistics since the start of the server, returned by a GET of `/stats`.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct HttpStats {
    pub sessions: usize,
    /// Number of open GET streams.
    pub streams: u64,
    /// Number of POSTs without a complete answer.
    pub posts_open: u64,
    pub initializes: usize,
    /// Arrival time of each `initialize`, in milliseconds since the server listens.
    pub initialized_at_ms: Vec<u64>,
    /// Number of different values of the header `x-instance` in `initialize` requests.
    pub instances: usize,
    /// Number of `initialize` requests that arrived while another one of the same `x-instance` was unanswered.
    pub overlaps: u64,
    /// Number of requests that named an unknown session.
    pub strangers: u64,
}

/// Serves the script over streamable HTTP, with a separate server for each session. Returns the exit code once one of
/// the servers has ended; if the script ends it by a signal, the process ends instead. Calls `listening` with the
/// address.
///
/// Settings of the script for stdin, stdout, stderr, SIGTERM and grandchildren have no effect.
///
/// # Errors
///
/// Fails if the server cannot listen on the address.
pub async fn serve_http(
    script: SimScript,
    options: HttpOptions,
    listening: impl FnOnce(SocketAddr),
) -> io::Result<i32> {
    let (script, start_delay) = adapt_script_for_http(script);
    if script.exit_before_handshake {
        return Ok(reproduce_exit(script.end()));
    }
    tokio::time::sleep(start_delay).await;
    let listener = TcpListener::bind(options.address).await?;
    let address = listener.local_addr()?;
    // Without this, an answer in two packets would wait for the acknowledgement of the first.
    let listener = listener.tap_io(|connection| drop(connection.set_nodelay(true)));

    let (end, mut ended) = watch::channel(None);
    let endpoint = Arc::new(HttpEndpoint {
        script: Arc::new(script),
        answers: options.answers,
        get_stream: options.get_stream,
        began: Instant::now(),
        session_id_prefix: RandomState::new().hash_one(()),
        opened: AtomicU64::new(0),
        state: Mutex::default(),
        end,
    });
    let routes = Router::new()
        .route(&options.path, post(handle_post).get(handle_get).delete(handle_delete))
        .route("/stats", get(async |State(endpoint): State<Arc<HttpEndpoint>>| Json(endpoint.stats())))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(endpoint);
    listening(address);
    tokio::select! {
        served = axum::serve(listener, routes).into_future() => served.map(|()| 0),
        end = ended.wait_for(Option::is_some) => Ok(end.ok().and_then(|end| *end).map_or(0, reproduce_exit)),
    }
}

fn adapt_script_for_http(script: SimScript) -> (SimScript, Duration) {
    let start_delay = script.start_delay;
    let script = SimScript {
        start_delay: Duration::ZERO,
        stderr_lines_per_second: 0,
        stderr_bytes_per_second: 0,
        stderr_burst_bytes: 0,
        stderr_text: None,
        garbage_lines: 0,
        stdout_garbage_at_start: 0,
        grandchild: None,
        ..script
    };
    (script, start_delay)
}

fn reproduce_exit(end: ProcessEnd) -> i32 {
    match (end.signal, end.code) {
        (Some(signal), _) => exit_by_signal(signal),
        (None, code) => code.unwrap_or_default(),
    }
}

struct HttpEndpoint {
    script: Arc<SimScript>,
    answers: AnswerFormat,
    get_stream: bool,
    began: Instant,
    // Random for each process, so that session ids of an ended process are not valid.
    session_id_prefix: u64,
    opened: AtomicU64,
    state: Mutex<HttpState>,
    end: watch::Sender<Option<ProcessEnd>>,
}

#[derive(Default)]
struct HttpState {
    sessions: HashMap<String, Arc<HttpSession>>,
    // By `x-instance`: number of unanswered `initialize` requests.
    pending_initializes: HashMap<Box<str>, u64>,
    stats: HttpStats,
}

impl HttpEndpoint {
    fn state(&self) -> MutexGuard<'_, HttpState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self) -> HttpStats {
        let state = self.state();
        HttpStats { sessions: state.sessions.len(), instances: state.pending_initializes.len(), ..state.stats.clone() }
    }

    fn open_session(self: &Arc<Self>) -> Arc<HttpSession> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let server = SimResponder::new(Arc::clone(&self.script), EnvSource::Process, RunNumber(number), Instant::now());
        let session = Arc::new(HttpSession {
            id: format!("{:016x}{number:016x}", self.session_id_prefix),
            endpoint: Arc::clone(self),
            state: Mutex::new(SessionExchange {
                server,
                waiting: Vec::new(),
                request_count: 0,
                unsolicited: VecDeque::new(),
                has_get_stream: false,
                closed: false,
            }),
            changed: Notify::new(),
        });
        self.state().sessions.insert(session.id.clone(), Arc::clone(&session));
        if self.script.exit_after.is_some() {
            let session = Arc::clone(&session);
            tokio::spawn(async move { session.wait_for(|exchange| exchange.closed.then_some(())).await });
        }
        session
    }

    fn session(&self, headers: &HeaderMap) -> Result<Arc<HttpSession>, HttpRefusal> {
        let Some(id) = headers.get(SESSION_ID).and_then(|id| id.to_str().ok()) else {
            return Err(HttpRefusal(StatusCode::BAD_REQUEST, "no session id"));
        };
        let mut state = self.state();
        if let Some(session) = state.sessions.get(id) {
            return Ok(Arc::clone(session));
        }
        state.stats.strangers += 1;
        Err(HttpRefusal(StatusCode::NOT_FOUND, "no such session"))
    }
}

struct HttpSession {
    id: String,
    endpoint: Arc<HttpEndpoint>,
    state: Mutex<SessionExchange>,
    changed: Notify,
}

struct SessionExchange {
    server: SimResponder,
    waiting: Vec<WaitingRequest>,
    request_count: u64,
    unsolicited: VecDeque<Bytes>,
    has_get_stream: bool,
    closed: bool,
}

struct WaitingRequest {
    number: u64,
    id: Box<str>,
    token: Option<Box<str>>,
    messages: VecDeque<Bytes>,
    answered: bool,
}

#[derive(Deserialize)]
struct RoutedMessage<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    params: Option<ProgressParams<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ProgressParams<'a> {
    #[serde(borrow)]
    progress_token: Option<&'a RawValue>,
}

impl HttpSession {
    fn exchange(&self) -> MutexGuard<'_, SessionExchange> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wait_for<T>(&self, mut wanted: impl FnMut(&mut SessionExchange) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            let next = {
                let mut exchange = self.exchange();
                let next = self.advance(&mut exchange);
                if let Some(found) = wanted(&mut exchange) {
                    return found;
                }
                next
            };
            match next {
                Some(at) => tokio::select! { () = changed => {} () = sleep_until(at) => {} },
                None => changed.await,
            }
        }
    }

    fn advance(&self, exchange: &mut SessionExchange) -> Option<Instant> {
        exchange.server.run_due_timers(Instant::now());
        if !exchange.server.out.is_empty() {
            exchange.route_output(self.endpoint.answers);
            self.changed.notify_waiters();
        }
        match exchange.server.phase {
            SimPhase::Starting | SimPhase::Serving => exchange.server.next_timer(),
            SimPhase::Hung => None,
            SimPhase::Ended(end) => {
                self.endpoint.end.send_replace(Some(end));
                None
            }
        }
    }

    fn deliver(&self, body: &[u8]) {
        let mut exchange = self.exchange();
        if exchange.server.phase == SimPhase::Serving {
            exchange.server.handle_line(Instant::now(), body);
            self.advance(&mut exchange);
            // The server may have set a timer that the waiting requests do not include yet.
            self.changed.notify_waiters();
        }
    }

    fn deliver_request(self: Arc<Self>, message: &WireMessage<'_>, id: &RawValue, body: &[u8]) -> PendingAnswer {
        let token =
            parse::<CallParams<'_>>(message.params).ok().and_then(|call| Some(call.meta?.progress_token?.get().into()));
        let number = {
            let mut exchange = self.exchange();
            exchange.request_count += 1;
            let number = exchange.request_count;
            let (id, messages) = (id.get().into(), VecDeque::new());
            exchange.waiting.push(WaitingRequest { number, id, token, messages, answered: false });
            if exchange.server.phase == SimPhase::Serving {
                exchange.server.handle_line(Instant::now(), body);
                self.advance(&mut exchange);
            }
            number
        };
        self.endpoint.state().stats.posts_open += 1;
        PendingAnswer { session: self, number, initializing_instance: None }
    }

    fn close(&self) {
        self.endpoint.state().sessions.remove(&self.id);
        self.exchange().closed = true;
        self.changed.notify_waiters();
    }
}

impl SessionExchange {
    fn route_output(&mut self, answers: AnswerFormat) {
        let output = self.server.out.split().freeze();
        for line in output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let message = output.slice_ref(line);
            let Ok(RoutedMessage { id, params }) = serde_json::from_slice(line) else { continue };
            let token = params.and_then(|about| about.progress_token);
            let place = self.waiting.iter_mut().find(|waiting| match (id, token) {
                (Some(id), _) => *waiting.id == *id.get(),
                (None, Some(token)) => answers == AnswerFormat::Sse && waiting.token.as_deref() == Some(token.get()),
                (None, None) => false,
            });
            match place {
                Some(waiting) => {
                    waiting.answered |= id.is_some();
                    waiting.messages.push_back(message);
                }
                // An answer to a request that was given up.
                None if id.is_some() => {}
                None => {
                    self.unsolicited.truncate(UNSOLICITED_MAX - 1);
                    self.unsolicited.push_back(message);
                }
            }
        }
    }
}

/// A request that waits for its answer. Dropping it removes it from the session.
struct PendingAnswer {
    session: Arc<HttpSession>,
    number: u64,
    initializing_instance: Option<Box<str>>,
}

impl PendingAnswer {
    /// Returns the next message and whether it is the answer; `None` if the session was closed.
    async fn next(&self) -> Option<(Bytes, bool)> {
        let wanted = |exchange: &mut SessionExchange| {
            let waiting = exchange.waiting.iter_mut().find(|waiting| waiting.number == self.number)?;
            match waiting.messages.pop_front() {
                Some(message) => Some(Some((message, waiting.answered && waiting.messages.is_empty()))),
                None => exchange.closed.then_some(None),
            }
        };
        self.session.wait_for(wanted).await
    }
}

impl Drop for PendingAnswer {
    fn drop(&mut self) {
        self.session.exchange().waiting.retain(|waiting| waiting.number != self.number);
        let mut state = self.session.endpoint.state();
        state.stats.posts_open -= 1;
        if let Some(open) =
            self.initializing_instance.take().and_then(|instance| state.pending_initializes.get_mut(&instance))
        {
            *open -= 1;
        }
    }
}

struct GetStream(Arc<HttpSession>);

impl Drop for GetStream {
    fn drop(&mut self) {
        self.0.exchange().has_get_stream = false;
        self.0.endpoint.state().stats.streams -= 1;
    }
}

async fn handle_post(State(endpoint): State<Arc<HttpEndpoint>>, headers: HeaderMap, body: Bytes) -> Response {
    if let Err(refusal) = check_headers(&headers, &["application/json", "text/event-stream"]) {
        return refusal.into_response();
    }
    let Ok(message) = serde_json::from_slice::<WireMessage<'_>>(&body) else {
        return refuse_as(StatusCode::BAD_REQUEST, PARSE_ERROR, "not JSON-RPC");
    };
    let method = message.method.as_ref().map(|method| &*method.0);
    let begins = method == Some(method::INITIALIZE) && !headers.contains_key(SESSION_ID);
    let session = if begins {
        endpoint.open_session()
    } else {
        match endpoint.session(&headers) {
            Ok(session) => session,
            Err(refusal) => return refusal.into_response(),
        }
    };
    let (Some(_), Some(id)) = (method, message.id) else {
        session.deliver(&body);
        return StatusCode::ACCEPTED.into_response();
    };
    let named = begins.then(|| session.id.clone());
    let mut ask = session.deliver_request(&message, id, &body);
    if begins {
        ask.initializing_instance = endpoint.record_initialize(&headers);
    }
    let mut response = match endpoint.answers {
        AnswerFormat::Json => respond_json(ask).await,
        AnswerFormat::Sse => respond_events(ask),
    };
    if let Some(id) = named.and_then(|id| id.try_into().ok()) {
        response.headers_mut().insert(SESSION_ID, id);
    }
    response
}

impl HttpEndpoint {
    fn record_initialize(&self, headers: &HeaderMap) -> Option<Box<str>> {
        let after = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let instance = headers.get(INSTANCE).and_then(|instance| instance.to_str().ok());
        let instance: Option<Box<str>> = instance.map(Into::into);
        let mut state = self.state();
        state.stats.initializes += 1;
        state.stats.initialized_at_ms.push(after);
        if let Some(instance) = instance.clone() {
            let open = state.pending_initializes.entry(instance).or_default();
            *open += 1;
            let overlaps = *open > 1;
            state.stats.overlaps += u64::from(overlaps);
        }
        instance
    }
}

async fn respond_json(ask: PendingAnswer) -> Response {
    while let Some((message, last)) = ask.next().await {
        if last {
            return ([(header::CONTENT_TYPE, "application/json")], message).into_response();
        }
    }
    refuse(StatusCode::NOT_FOUND, "the session was closed")
}

fn respond_events(ask: PendingAnswer) -> Response {
    let events = stream::unfold(Some(ask), async |ask| {
        let ask = ask?;
        let (message, last) = ask.next().await?;
        Some((Ok::<_, Infallible>(sse_event(&message)), (!last).then_some(ask)))
    });
    event_stream(Body::from_stream(events))
}

async fn handle_get(State(endpoint): State<Arc<HttpEndpoint>>, headers: HeaderMap) -> Response {
    if !endpoint.get_stream {
        return (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, "POST, DELETE")]).into_response();
    }
    if let Err(refusal) = check_headers(&headers, &["text/event-stream"]) {
        return refusal.into_response();
    }
    let session = match endpoint.session(&headers) {
        Ok(session) => session,
        Err(refusal) => return refusal.into_response(),
    };
    if std::mem::replace(&mut session.exchange().has_get_stream, true) {
        return refuse(StatusCode::CONFLICT, "the session already has a GET stream");
    }
    endpoint.state().stats.streams += 1;
    let events = stream::unfold(GetStream(session), async |listening| {
        let wanted = |exchange: &mut SessionExchange| match exchange.unsolicited.pop_front() {
            Some(message) => Some(Some(message)),
            None => exchange.closed.then_some(None),
        };
        let message = listening.0.wait_for(wanted).await?;
        Some((Ok::<_, Infallible>(sse_event(&message)), listening))
    });
    event_stream(Body::from_stream(events))
}

async fn handle_delete(State(endpoint): State<Arc<HttpEndpoint>>, headers: HeaderMap) -> Response {
    match endpoint.session(&headers) {
        Ok(session) => {
            session.close();
            StatusCode::OK.into_response()
        }
        Err(refusal) => refusal.into_response(),
    }
}

fn check_headers(headers: &HeaderMap, accepted: &[&str]) -> Result<(), HttpRefusal> {
    let value = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let accept = value("accept");
    if !accepted.iter().all(|wanted| accept.contains(wanted) || accept == "*/*") {
        return Err(HttpRefusal(StatusCode::NOT_ACCEPTABLE, "the header Accept lacks a media type of the response"));
    }
    match value(PROTOCOL_VERSION) {
        "" => Ok(()),
        version if SESSION_VERSIONS.contains(&version) => Ok(()),
        _ => Err(HttpRefusal(StatusCode::BAD_REQUEST, "unsupported protocol version")),
    }
}

struct HttpRefusal(StatusCode, &'static str);

impl IntoResponse for HttpRefusal {
    fn into_response(self) -> Response {
        refuse(self.0, self.1)
    }
}

fn refuse(status: StatusCode, message: &str) -> Response {
    refuse_as(status, INVALID_REQUEST, message)
}

fn refuse_as(status: StatusCode, code: i64, message: &str) -> Response {
    (status, Json(json!({"jsonrpc": "2.0", "id": null, "error": {"code": code, "message": message}}))).into_response()
}

fn sse_event(message: &Bytes) -> Bytes {
    [b"event: message\ndata: ", &**message, b"\n\n"].concat().into()
}

fn event_stream(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")], body).into_response()
}
