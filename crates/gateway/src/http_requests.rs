//! Handles every HTTP request in a fixed order: guard → path → access → method → body → access → drain → rate → era →
//! session (or the metadata of a stateless request) → handler. The first check that fails determines the response and
//! the later ones are skipped, so a client without a token learns nothing about existing servers.

mod stateless;

use mcp_satellite_protocol::error_code::{INVALID_REQUEST, PARSE_ERROR, SERVER_ERROR};
use mcp_satellite_protocol::method;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header, request};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use mcp_satellite_actors::byte_budget::{ByteBudget, ByteShare};
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_config::CONTROL_SERVER;
use mcp_satellite_http::server::IncomingRequest;
use mcp_satellite_protocol::rpc::{MalformedMessage, MessageKind, RpcMessage};
use serde::de::{Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;
use tokio::sync::Notify;
use tokio::time::{Duration, Instant, timeout};
use tokio_util::task::TaskTracker;

use super::access::{Access, AccessDenied, Permission, User};
use super::answer::{CallAnswer, RpcError};
use super::client_description::ClientDescription;
use super::connections::Connections;
use super::endpoint_id::{EndpointId, EndpointPath};
use super::era::PROTOCOL_VERSION;
use super::guard::first_value;
use super::handler::EndpointHandler;
use super::pages::{EndpointPages, ForwardedMessage, PageConnection};
use super::parked_calls::{ParkedCalls, ParkedLimits};
use super::reply::{self, SESSION_ID};
use super::request::OpeningRequest;
use super::session::{ClientLifetime, ClientSession, SessionEnd, SessionFacts};
use super::session_call::{self, ResponseFormat, ResponseSettings};
use super::sessions::{SessionLimitError, Sessions};
use super::settings::{ClientEventSink, GatewaySettings};
use super::stateless_call::StatelessCall;
use super::stream::{self, SESSION_STREAM};
use super::traffic::RouteKind;
use super::{era, metadata, pages};
use stateless::reject_stateless;

const BODY_TIMEOUT: Duration = Duration::from_secs(60);
// Bytes that are still read of the body of a rejected request.
const UNREAD_MAX: usize = 64 * 1024;
const UNREAD_TIMEOUT: Duration = Duration::from_secs(1);
// Maximum initial capacity for an announced body. A larger buffer is allocated only as the body arrives.
const RESERVED_MAX: usize = 64 * 1024;
const BATCH_MAX: usize = 100;
const CROWDED_PAUSE: Duration = Duration::from_secs(1);
// Tells a client that a rejected request was not executed; the satellite itself may be away for longer.
const STOPPING_PAUSE: Duration = Duration::from_secs(1);
const LAST_EVENT_ID: HeaderName = HeaderName::from_static(mcp_satellite_protocol::header::LAST_EVENT_ID);
const TEXT_MAX: usize = 256;

pub(crate) struct EndpointService {
    pub handler: Arc<dyn EndpointHandler>,
    pub sessions: Arc<Sessions>,
    pub event_sink: ClientEventSink,
    pub access: Arc<Access>,
    pub(super) connections: Arc<Connections>,
    settings: RwLock<Arc<GatewaySettings>>,
    settings_changed: Notify,
    // Budget for the messages of all clients that are being read or answered.
    bodies: Arc<ByteBudget>,
    draining: AtomicBool,
    // Tracks the open requests, streams included.
    work: TaskTracker,
    pub(super) parked: ParkedCalls<StatelessCall>,
    // Answers requests for other paths.
    pages: OnceLock<EndpointPages>,
}

type Checked<T> = Result<T, ErrorResponse>;

/// An HTTP error response, ready to be sent. Boxed, because most requests are not rejected.
struct ErrorResponse(Box<Response>);

impl ErrorResponse {
    fn new(response: Response) -> Self {
        Self(Box::new(response))
    }
}

fn error_response(status: StatusCode, id: Option<&str>, code: i64, message: &str) -> ErrorResponse {
    ErrorResponse::new(reply::error_response(status, id, code, message))
}

struct BodyMemory {
    all: ByteShare,
    own: ByteShare,
}

impl BodyMemory {
    fn try_take(&mut self, bytes: usize) -> bool {
        if !self.own.try_take(bytes) {
            return false;
        }
        let is_taken = self.all.try_take(bytes);
        if !is_taken {
            self.own.release(bytes);
        }
        is_taken
    }
}

#[derive(Clone, Copy)]
enum RequestPath<'a> {
    AllServers,
    Instance(&'a str),
    Metadata(&'a str),
}

fn parse_path(path: &str) -> Option<RequestPath<'_>> {
    if path == "/mcp" {
        return Some(RequestPath::AllServers);
    }
    if let Some(resource) = path.strip_prefix(metadata::PATH) {
        return (resource.is_empty() || resource.starts_with('/')).then_some(RequestPath::Metadata(resource));
    }
    let name = path.strip_prefix("/i/")?.strip_suffix("/mcp")?;
    (!name.is_empty() && !name.contains('/')).then_some(RequestPath::Instance(name))
}

/// An authenticated HTTP request. The body is read separately.
#[derive(Clone, Copy)]
struct HttpRequest<'a> {
    settings: &'a GatewaySettings,
    permission: &'a Permission,
    path: RequestPath<'a>,
    parts: &'a request::Parts,
    /// Address of the connection.
    peer: Option<SocketAddr>,
}

impl<'a> HttpRequest<'a> {
    fn user(self) -> &'a Arc<User> {
        &self.permission.user
    }

    fn user_agent(self) -> Option<String> {
        first_value(&self.parts.headers, &header::USER_AGENT).0.map(|text| sanitize(text, TEXT_MAX))
    }

    /// Determines the endpoint from path and query. The existence of an instance is checked only when a session is
    /// opened.
    fn endpoint_path(self, id: Option<&str>) -> Checked<EndpointPath<'a>> {
        if let RequestPath::Instance(name) = self.path {
            return Ok(EndpointPath::Instance(name));
        }
        let mode = self.parts.uri.query().into_iter().flat_map(|query| query.split('&'));
        match mode.filter_map(|part| part.strip_prefix("mode=")).next_back() {
            None if self.user().flat => Ok(EndpointPath::Flat),
            None | Some("tools") => Ok(EndpointPath::Tools),
            Some("flat") => Ok(EndpointPath::Flat),
            Some(_) => {
                Err(error_response(StatusCode::NOT_FOUND, id, SERVER_ERROR, "unknown mode; use `tools` or `flat`"))
            }
        }
    }
}

impl EndpointService {
    pub(crate) fn new(
        handler: Arc<dyn EndpointHandler>,
        sessions: Arc<Sessions>,
        event_sink: ClientEventSink,
        access: Arc<Access>,
        connections: Arc<Connections>,
        settings: GatewaySettings,
    ) -> Self {
        let bodies = sessions.memory().part(settings.limits.bodies_max);
        sessions.stream_budget().set_max(settings.limits.streams_max);
        let (settings, draining) = (RwLock::new(Arc::new(settings)), AtomicBool::new(false));
        Self {
            handler,
            sessions,
            event_sink,
            access,
            connections,
            settings,
            settings_changed: Notify::new(),
            bodies,
            draining,
            work: TaskTracker::new(),
            parked: ParkedCalls::default(),
            pages: OnceLock::new(),
        }
    }

    /// Only the first router is used.
    pub(crate) fn set_pages(&self, pages: EndpointPages) {
        let _ = self.pages.set(pages);
    }

    pub(crate) fn settings(&self) -> Arc<GatewaySettings> {
        self.settings.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_settings(&self, settings: Arc<GatewaySettings>) {
        self.bodies.set_max(settings.limits.bodies_max);
        self.sessions.stream_budget().set_max(settings.limits.streams_max);
        *self.settings.write().unwrap_or_else(PoisonError::into_inner) = settings;
        self.settings_changed.notify_one();
    }

    pub(crate) async fn wait_for_settings_change(&self) {
        self.settings_changed.notified().await;
    }

    /// Rejects new requests from now on; answers and notifications of open calls are still accepted.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub(crate) async fn wait_for_open_requests(&self) {
        self.work.close();
        self.work.wait().await;
    }

    pub(super) fn parked_limits(&self, user: &User) -> ParkedLimits {
        ParkedLimits::from_budgets(user.body_share().budget().max(), self.bodies.max())
    }

    pub(crate) fn handle_session_end(&self, session: &Arc<ClientSession>) {
        self.handler.handle_session_end(session);
        if session.lost_count() > 0 {
            tracing::info!(
                session_id = session.public_id(),
                lost = session.lost_count(),
                "session ended with undelivered messages"
            );
        }
        let user = session.user();
        (self.event_sink)(Event::ClientDisconnected {
            team_id: user.team.clone(),
            user_id: user.user.clone(),
            session_id: session.public_id(),
            duration: session.started_at().elapsed().as_secs(),
            tool_execution_count: session.tool_call_count(),
            reason: session.end_reason().map_or("closed", SessionEnd::as_str).to_owned(),
        });
    }

    async fn answer(
        self: &Arc<Self>,
        peer: SocketAddr,
        parts: &request::Parts,
        body: &mut BodyDataStream,
    ) -> Checked<Response> {
        let settings = self.settings();
        let forbidden = |why: &str| error_response(StatusCode::FORBIDDEN, None, SERVER_ERROR, why);
        let host = settings.guard.check(&parts.headers, &parts.uri).map_err(forbidden)?;
        let path = parts.uri.path();
        let Some(path) = parse_path(path) else {
            return Err(not_found());
        };
        if let RequestPath::Metadata(resource) = path {
            // A client that finds this document starts an authorization, which only an authorization server can
            // complete.
            if settings.authorization_servers.is_empty() {
                return Err(not_found());
            }
            if parts.method != Method::GET {
                return Err(method_not_allowed("GET"));
            }
            return Ok(metadata::document(
                &settings.base_url(host),
                resource,
                &settings.name,
                &settings.authorization_servers,
            ));
        }
        let permission = self.authenticate(&settings, peer, parts)?;
        let (settings, permission, peer) = (&*settings, &permission, Some(peer));
        self.answer_mcp(HttpRequest { settings, permission, path, parts, peer }, body).await
    }

    async fn answer_mcp(self: &Arc<Self>, request: HttpRequest<'_>, body: &mut BodyDataStream) -> Checked<Response> {
        match request.parts.method {
            Method::POST => self.post(request, body).await,
            Method::GET => self.get(request),
            Method::DELETE => self.delete(request),
            _ => Err(method_not_allowed("GET, POST, DELETE")),
        }
    }

    fn authenticate(
        &self,
        settings: &GatewaySettings,
        peer: SocketAddr,
        parts: &request::Parts,
    ) -> Checked<Permission> {
        if parts.uri.query().is_some_and(|query| query.split('&').any(|part| part.starts_with("access_token="))) {
            let why = "a token in a URL can be read by others; send it in the header Authorization";
            return Err(error_response(StatusCode::BAD_REQUEST, None, INVALID_REQUEST, why));
        }
        let admitted = self.access.admit(&parts.headers, peer.ip());
        if admitted.is_ok() {
            self.connections.mark_authenticated(peer);
        }
        admitted.map_err(|denied| match &denied {
            AccessDenied::NoToken | AccessDenied::WrongToken => unauthorized(settings, parts, &denied),
            AccessDenied::TooManyAttempts(pause) => ErrorResponse::new(reply::too_many_requests(
                None,
                RpcError::new(SERVER_ERROR, denied.to_string()),
                *pause,
            )),
            AccessDenied::NotLocal => error_response(StatusCode::FORBIDDEN, None, SERVER_ERROR, &denied.to_string()),
        })
    }

    /// Checks the token again.
    fn check_permission(&self, request: HttpRequest<'_>) -> Checked<()> {
        if self.access.is_valid(request.permission) {
            Ok(())
        } else {
            Err(unauthorized(request.settings, request.parts, &AccessDenied::WrongToken))
        }
    }

    async fn post(self: &Arc<Self>, request: HttpRequest<'_>, body: &mut BodyDataStream) -> Checked<Response> {
        let HttpRequest { settings, permission, parts, .. } = request;
        let headers = &parts.headers;
        check_content_type(headers)
            .map_err(|why| error_response(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, INVALID_REQUEST, why))?;
        let format = match accepted_formats(headers) {
            (true, true) => settings.response_format(),
            (true, false) => ResponseFormat::Json,
            (false, true) => ResponseFormat::Stream,
            (false, false) => {
                let why = "a response is application/json or text/event-stream; send an Accept header with one of them";
                return Err(error_response(StatusCode::NOT_ACCEPTABLE, None, INVALID_REQUEST, why));
            }
        };
        let mut memory = BodyMemory { all: self.bodies.share(), own: permission.user.body_share() };
        let body = read_body(body, headers, settings.limits.body_max, &mut memory).await?;
        // The token may have been revoked while the body was read.
        self.check_permission(request)?;
        if body.trim_ascii_start().starts_with(b"[") {
            let _memory = memory;
            let batch = MessageBatch::read(&body)?;
            if let Some(forwarded) = parts.extensions.get::<ForwardedMessage>() {
                forwarded.set(batch.requests.iter().chain(&batch.others));
            }
            return Box::pin(self.handle_batch(request, batch)).await;
        }
        let message = RpcMessage::parse(body).map_err(|error| malformed(&error))?;
        if let Some(forwarded) = parts.extensions.get::<ForwardedMessage>() {
            forwarded.set(std::iter::once(&message));
        }
        let response_settings = ResponseSettings {
            format,
            sse_after: settings.sse_after,
            keep_alive: settings.keep_alive,
            grace: settings.limits.resume_grace,
            timeout: settings.limits.request_timeout,
        };
        self.handle_message(request, (message, memory), response_settings).await
    }

    async fn handle_message(
        self: &Arc<Self>,
        request: HttpRequest<'_>,
        (message, memory): (RpcMessage, BodyMemory),
        response_settings: ResponseSettings,
    ) -> Checked<Response> {
        let (user, headers) = (request.user(), &request.parts.headers);
        let id = message.id().filter(|_| message.kind() == MessageKind::Request);
        if id.is_some() {
            self.check_not_draining(id)?;
        }
        let counted = user.count_request();
        if !is_rate_limit_exempt(&message) {
            counted.map_err(|limited| ErrorResponse::new(reply::limit_exceeded(id, &limited)))?;
        }
        let endpoint_path = request.endpoint_path(id)?;
        if era::is_stateless(&message, headers) {
            let answer = self.handle_stateless(request, endpoint_path, (message, memory), response_settings);
            // Boxed, as below: the future of the usual request contains those of all others.
            return Box::pin(answer).await;
        }
        if id.is_some() && message.method() == Some(method::INITIALIZE) {
            // A client that supports both eras may send the header of the stateless era with `initialize`.
            if !era::is_stateless_header(headers) {
                check_version(headers, id)?;
            }
            return Box::pin(self.initialize(request, endpoint_path, &message)).await;
        }
        check_version(headers, id)?;
        let session = self.find_session(user, endpoint_path, headers, id)?;
        if id.is_none() {
            self.handle_non_request(&session, message);
            return Ok(reply::empty(StatusCode::ACCEPTED));
        }
        let admission =
            user.acquire_call_permit().map_err(|limited| ErrorResponse::new(reply::limit_exceeded(id, &limited)))?;
        let resources = (admission, self.work.token(), memory);
        Ok(session_call::answer(&*self.handler, &session, (message, request.peer), response_settings, resources).await)
    }

    /// Resolves the endpoint for this user. The instance of another user is reported as missing, with `code` as error
    /// code.
    fn resolve_endpoint<'a>(
        &self,
        user: &User,
        path: EndpointPath<'a>,
        id: &str,
        code: i64,
    ) -> Checked<(EndpointId, &'a str)> {
        Ok(match path {
            EndpointPath::Tools => (EndpointId::Tools, ""),
            EndpointPath::Flat => (EndpointId::Flat, ""),
            EndpointPath::Instance(name) if name == CONTROL_SERVER && self.handler.admits_to_control(user) => {
                (EndpointId::Control, name)
            }
            EndpointPath::Instance(name) => {
                let unknown = || {
                    error_response(
                        StatusCode::NOT_FOUND,
                        Some(id),
                        code,
                        "there is no such server; /mcp lists your servers",
                    )
                };
                (EndpointId::Instance(self.handler.instance(user, name).ok_or_else(unknown)?), name)
            }
        })
    }

    fn open_session(&self, request: HttpRequest<'_>, facts: SessionFacts, id: &str) -> Checked<Arc<ClientSession>> {
        let code = era::translation::stateless_error_code(SERVER_ERROR, facts.lifetime != ClientLifetime::Session);
        let opened = self.sessions.open(facts, &request.settings.limits, Instant::now());
        let (session, evicted) = opened.map_err(|error| {
            let why = match error {
                SessionLimitError::User(limit) => format!("you have {limit} sessions, and none is idle; close one"),
                SessionLimitError::All(_) | SessionLimitError::NoRandomNumbers => {
                    "there is no room for another session; try again later".to_owned()
                }
            };
            error_response(StatusCode::SERVICE_UNAVAILABLE, Some(id), code, &why)
        })?;
        for session in &evicted {
            self.handle_session_end(session);
        }
        // The token may have been revoked between the check and the insertion into the table.
        if let Err(refused) = self.check_permission(request) {
            let _ = self.sessions.close(&session, SessionEnd::Revoked);
            return Err(refused);
        }
        let ClientDescription { name, client_version, .. } = &session.facts.client;
        let user = session.user();
        (self.event_sink)(Event::ClientConnected {
            team_id: user.team.clone(),
            user_id: user.user.clone(),
            session_id: session.public_id(),
            client_type: sanitize(&format!("{name}/{client_version}"), 64),
            user_agent: session.facts.user_agent.clone(),
            transport: "streamable_http".to_owned(),
        });
        Ok(session)
    }

    fn check_not_draining(&self, id: Option<&str>) -> Checked<()> {
        if self.draining.load(Ordering::Acquire) {
            let error = RpcError::new(SERVER_ERROR, "the satellite is stopping; try again later");
            return Err(ErrorResponse::new(reply::unavailable(id, error, STOPPING_PAUSE)));
        }
        Ok(())
    }

    fn handle_non_request(&self, session: &Arc<ClientSession>, message: RpcMessage) {
        match message.kind() {
            MessageKind::Result | MessageKind::Error => {
                if !session.accept_answer(message) {
                    tracing::debug!(
                        session_id = session.public_id(),
                        "response of a client without a pending request ignored"
                    );
                }
            }
            MessageKind::Notification | MessageKind::Request => {
                let is_cancellation = message.method() == Some(method::CANCELLED);
                if !(is_cancellation && session.cancel_call(message.clone())) {
                    self.handler.handle_notification(session, message);
                }
            }
        }
    }

    async fn handle_batch(&self, request: HttpRequest<'_>, batch: MessageBatch) -> Checked<Response> {
        let (user, headers) = (request.user(), &request.parts.headers);
        let MessageBatch { requests, others } = batch;
        let (exempt, others): (Vec<_>, Vec<_>) = others.into_iter().partition(is_rate_limit_exempt);
        // Each message counts against the rate limit; counting stops at the first one that exceeds it.
        let counted = (0..requests.len() + others.len()).try_for_each(|_| user.count_request());
        for _ in &exempt {
            // These messages are accepted in any case.
            let _ = user.count_request();
        }
        let endpoint_path = request.endpoint_path(None)?;
        check_version(headers, None)?;
        let session = self.find_session(user, endpoint_path, headers, None)?;
        if session.facts.version.as_str() > "2025-03-26" {
            let why = "this protocol version has no batches; send one message at a time";
            return Err(error_response(StatusCode::BAD_REQUEST, None, INVALID_REQUEST, why));
        }
        for message in exempt {
            self.handle_non_request(&session, message);
        }
        if !requests.is_empty() {
            self.check_not_draining(None)?;
        }
        counted.map_err(|limited| ErrorResponse::new(reply::limit_exceeded(None, &limited)))?;
        for message in others {
            self.handle_non_request(&session, message);
        }
        if requests.is_empty() {
            return Ok(reply::empty(StatusCode::ACCEPTED));
        }
        let acquire = |_: &RpcMessage| {
            user.acquire_call_permit().map_err(|limited| ErrorResponse::new(reply::limit_exceeded(None, &limited)))
        };
        let admissions = requests.iter().map(acquire).collect::<Checked<Vec<_>>>()?;
        let _work = self.work.token();
        let timeout = request.settings.limits.request_timeout;
        Ok(session_call::answer_batch(&*self.handler, &session, (requests, request.peer), timeout, admissions).await)
    }

    async fn initialize(
        &self,
        request: HttpRequest<'_>,
        path: EndpointPath<'_>,
        message: &RpcMessage,
    ) -> Checked<Response> {
        let user = request.user();
        let id = message.id().unwrap_or("null");
        let (endpoint, name) = self.resolve_endpoint(user, path, id, SERVER_ERROR)?;
        let client = ClientDescription::read(message.params());
        let _admission = user
            .acquire_call_permit()
            .map_err(|limited| ErrorResponse::new(reply::limit_exceeded(Some(id), &limited)))?;
        let _work = self.work.token();
        let opening = OpeningRequest {
            user: user.clone(),
            endpoint: endpoint.clone(),
            client: client.clone(),
            message: message.clone(),
            peer: request.peer,
        };
        let answer = match self.handler.initialize(opening).await {
            Ok(answer) => answer,
            Err(error) => return Ok(reply::answer(&CallAnswer::Error(error), id)),
        };
        let facts = SessionFacts {
            permission: request.permission.clone(),
            endpoint,
            name: name.into(),
            client,
            version: answer.version,
            user_agent: request.user_agent(),
            lifetime: ClientLifetime::Session,
        };
        let session = self.open_session(request, facts, id)?;
        self.handler.handle_session_start(&session);
        if session.end_reason().is_some() {
            let why = "the session ended while it was being opened; open another one";
            return Err(error_response(StatusCode::SERVICE_UNAVAILABLE, Some(id), SERVER_ERROR, why));
        }
        let mut response = reply::answer(&CallAnswer::Result(answer.result), id);
        if let Ok(id) = HeaderValue::try_from(session.id()) {
            response.headers_mut().insert(SESSION_ID, id);
        }
        Ok(response)
    }

    fn get(&self, request: HttpRequest<'_>) -> Checked<Response> {
        let (user, headers) = (request.user(), &request.parts.headers);
        if !accepted_formats(headers).1 {
            let why = "the response is text/event-stream; send an Accept header that includes it";
            return Err(error_response(StatusCode::NOT_ACCEPTABLE, None, INVALID_REQUEST, why));
        }
        self.check_not_draining(None)?;
        user.count_request().map_err(|limited| ErrorResponse::new(reply::limit_exceeded(None, &limited)))?;
        let endpoint_path = request.endpoint_path(None)?;
        reject_stateless(headers)?;
        check_version(headers, None)?;
        let session = self.find_session(user, endpoint_path, headers, None)?;
        let listen = |stream, after| session.listen(stream, after, request.settings.keep_alive);
        let events = match first_value(headers, &LAST_EVENT_ID) {
            (None, _) => listen(SESSION_STREAM, None),
            (Some(id), false) => stream::parse_id(id).and_then(|(stream, after)| listen(stream, Some(after))),
            (Some(_), true) => None,
        };
        // Clients stop at 405; after other errors they would request an ended stream again and again.
        events.map(reply::stream).ok_or_else(|| method_not_allowed("POST, DELETE"))
    }

    fn delete(&self, request: HttpRequest<'_>) -> Checked<Response> {
        let (user, headers) = (request.user(), &request.parts.headers);
        user.count_request().map_err(|limited| ErrorResponse::new(reply::limit_exceeded(None, &limited)))?;
        let endpoint_path = request.endpoint_path(None)?;
        reject_stateless(headers)?;
        let session = self.find_session(user, endpoint_path, headers, None)?;
        if let Some(session) = self.sessions.close(&session, SessionEnd::Closed) {
            self.handle_session_end(&session);
        }
        Ok(reply::empty(StatusCode::NO_CONTENT))
    }

    fn find_session(
        &self,
        user: &User,
        path: EndpointPath<'_>,
        headers: &HeaderMap,
        id: Option<&str>,
    ) -> Checked<Arc<ClientSession>> {
        let (Some(session_id), false) = first_value(headers, &SESSION_ID) else {
            let why = "a request needs exactly one Mcp-Session-Id header; `initialize` returns the id";
            return Err(error_response(StatusCode::BAD_REQUEST, id, INVALID_REQUEST, why));
        };
        self.sessions.find(session_id, user, path, Instant::now()).ok_or_else(|| {
            match self.sessions.loss_of(session_id) {
                Some(message) => ErrorResponse::new(reply::session_lost(id, message)),
                None => error_response(
                    StatusCode::NOT_FOUND,
                    id,
                    SERVER_ERROR,
                    "session not found; begin with `initialize`",
                ),
            }
        })
    }
}

/// Returns true for messages that a server waits for or that end work. They count against the rate limit, but are never
/// rejected by it.
fn is_rate_limit_exempt(message: &RpcMessage) -> bool {
    match message.kind() {
        MessageKind::Result | MessageKind::Error => true,
        MessageKind::Notification => message.method() == Some(method::CANCELLED),
        MessageKind::Request => false,
    }
}

struct MessageBatch {
    requests: Vec<RpcMessage>,
    others: Vec<RpcMessage>,
}

impl MessageBatch {
    fn read(body: &Bytes) -> Checked<Self> {
        let not_json = |error: serde_json::Error| malformed(&MalformedMessage::NotJson(error.to_string()));
        let invalid = |why: &str| error_response(StatusCode::BAD_REQUEST, None, INVALID_REQUEST, why);
        let BatchTexts(texts) = serde_json::from_slice(body).map_err(not_json)?;
        if texts.len() > BATCH_MAX {
            return Err(invalid(&format!("the batch has more than {BATCH_MAX} messages; send fewer at once")));
        }
        let mut batch = Self { requests: Vec::new(), others: Vec::new() };
        for text in texts {
            let message =
                RpcMessage::parse(body.slice_ref(text.get().as_bytes())).map_err(|error| malformed(&error))?;
            if let Some(method @ (method::INITIALIZE | method::DISCOVER)) = message.method() {
                return Err(invalid(&format!("`{method}` is not allowed in a batch; send it alone")));
            }
            let of_its_kind =
                if message.kind() == MessageKind::Request { &mut batch.requests } else { &mut batch.others };
            of_its_kind.push(message);
        }
        Ok(batch)
    }
}

/// The messages of a batch, or one more than allowed if there are too many. The remaining ones are skipped, because a
/// short body with many tiny messages would take more memory than was counted.
struct BatchTexts<'a>(Vec<&'a RawValue>);

impl<'de> Deserialize<'de> for BatchTexts<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct BatchVisitor;

        impl<'de> Visitor<'de> for BatchVisitor {
            type Value = BatchTexts<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a batch")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<BatchTexts<'de>, A::Error> {
                let mut texts = Vec::new();
                while texts.len() <= BATCH_MAX
                    && let Some(text) = from.next_element()?
                {
                    texts.push(text);
                }
                while from.next_element::<IgnoredAny>()?.is_some() {}
                Ok(BatchTexts(texts))
            }
        }

        from.deserialize_seq(BatchVisitor)
    }
}

/// Answers one HTTP request. There are few paths and one function distinguishes them, so no router is needed.
pub(crate) async fn handle(endpoint: Arc<EndpointService>, peer: SocketAddr, request: IncomingRequest) -> Response {
    let route = RouteKind::of_path(request.uri().path());
    let response = if let Some(pages) = endpoint.pages.get()
        && parse_path(request.uri().path()).is_none()
    {
        let (pages, settings) = (pages.clone(), endpoint.settings());
        let connection = PageConnection::of_endpoint(endpoint.connections.clone(), peer, &settings);
        pages::answer(&pages, &settings.guard, connection, request.map(Body::new)).await
    } else {
        let (parts, body) = request.into_parts();
        let mut body = Body::new(body).into_data_stream();
        let answered = endpoint.answer(peer, &parts, &mut body).await;
        finish(answered, &parts, &mut body).await
    };
    endpoint.sessions.traffic().count_request(route, response.status());
    response
}

/// Answers a request for an instance with this permission.
pub(crate) async fn handle_as(
    endpoint: &Arc<EndpointService>,
    permission: &Permission,
    instance: &str,
    request: Request<Body>,
) -> Response {
    let (parts, body) = request.into_parts();
    let (settings, mut body) = (endpoint.settings(), body.into_data_stream());
    let path = RequestPath::Instance(instance);
    let peer = parts.extensions.get::<PageConnection>().map(|connection| connection.peer);
    let request = HttpRequest { settings: &settings, permission, path, parts: &parts, peer };
    let answered = endpoint.answer_mcp(request, &mut body).await;
    finish(answered, &parts, &mut body).await
}

async fn finish(answered: Checked<Response>, parts: &request::Parts, body: &mut BodyDataStream) -> Response {
    match answered {
        Ok(response) => response,
        Err(ErrorResponse(response)) => {
            // A client that is still sending when the connection closes may never see the response.
            if !parts.headers.contains_key(header::EXPECT) {
                let _ = timeout(UNREAD_TIMEOUT, discard(body)).await;
            }
            *response
        }
    }
}

async fn discard(body: &mut BodyDataStream) {
    let mut left = UNREAD_MAX;
    while let Some(Ok(frame)) = body.next().await {
        let Some(remaining) = left.checked_sub(frame.len()) else { return };
        left = remaining;
    }
}

fn not_found() -> ErrorResponse {
    error_response(StatusCode::NOT_FOUND, None, SERVER_ERROR, "there is no endpoint at this path")
}

fn unauthorized(settings: &GatewaySettings, parts: &request::Parts, denied: &AccessDenied) -> ErrorResponse {
    let host = first_value(&parts.headers, &header::HOST).0.unwrap_or_default();
    let base = (!settings.authorization_servers.is_empty()).then(|| settings.base_url(host));
    let resource = base.as_deref().map(|base| (base, parts.uri.path()));
    ErrorResponse::new(metadata::challenge(resource, denied))
}

fn method_not_allowed(allowed: &'static str) -> ErrorResponse {
    let mut response = error_response(
        StatusCode::METHOD_NOT_ALLOWED,
        None,
        SERVER_ERROR,
        "this HTTP method is not allowed for this path",
    );
    response.0.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

fn malformed(error: &MalformedMessage) -> ErrorResponse {
    let code = if matches!(error, MalformedMessage::NotJson(_)) { PARSE_ERROR } else { INVALID_REQUEST };
    error_response(StatusCode::BAD_REQUEST, None, code, &error.to_string())
}

fn check_version(headers: &HeaderMap, id: Option<&str>) -> Checked<()> {
    match first_value(headers, &PROTOCOL_VERSION) {
        (None, _) => Ok(()),
        (Some(version), false) if era::has_sessions(version) => Ok(()),
        (Some(_), _) => {
            let why = "MCP-Protocol-Version is not a supported version with sessions; the newest one is 2025-11-25";
            Err(error_response(StatusCode::BAD_REQUEST, id, INVALID_REQUEST, why))
        }
    }
}

fn check_content_type(headers: &HeaderMap) -> Result<(), &'static str> {
    const NOT_JSON: &str = "the body of a request must be application/json";
    let (kind, several) = first_value(headers, &header::CONTENT_TYPE);
    let mut parts = kind.filter(|_| !several).ok_or(NOT_JSON)?.split(';').map(str::trim);
    if !parts.next().is_some_and(|kind| kind.eq_ignore_ascii_case("application/json")) {
        return Err(NOT_JSON);
    }
    for part in parts {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let is_utf8 = |charset: &str| ["utf-8", "utf8"].iter().any(|known| charset.eq_ignore_ascii_case(known));
        if name.trim().eq_ignore_ascii_case("charset") && !is_utf8(value.trim().trim_matches('"')) {
            return Err("the body of a request must be UTF-8; send it with charset=utf-8, or without a charset");
        }
    }
    let encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    let mut encodings = encodings.flat_map(|value| value.to_str().unwrap_or("unknown").split(','));
    if encodings.all(|encoding| matches!(encoding.trim(), "") || encoding.trim().eq_ignore_ascii_case("identity")) {
        Ok(())
    } else {
        Err("the body of a request must not be compressed; send it without Content-Encoding")
    }
}

/// Returns whether the client accepts JSON and whether it accepts event streams; both without an `Accept` header.
fn accepted_formats(headers: &HeaderMap) -> (bool, bool) {
    let (mut json, mut events, mut is_present) = (false, false, false);
    for value in headers.get_all(header::ACCEPT) {
        for range in value.to_str().unwrap_or_default().split(',') {
            is_present = true;
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let is = |kinds: [&str; 3]| kinds.iter().any(|known| kind.eq_ignore_ascii_case(known));
            let refused = parts.any(|part| matches!(part, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"));
            json |= !refused && is(["*/*", "application/*", "application/json"]);
            events |= !refused && is(["*/*", "text/*", "text/event-stream"]);
        }
    }
    if is_present { (json, events) } else { (true, true) }
}

/// Reads the whole body within its limits of size and time. Bytes are counted as they arrive: an announced length
/// reserves no memory.
async fn read_body(
    frames: &mut BodyDataStream,
    headers: &HeaderMap,
    limit: usize,
    memory: &mut BodyMemory,
) -> Checked<Bytes> {
    let too_large = || {
        let why = format!("the message is larger than {limit} bytes; send less at once");
        error_response(StatusCode::PAYLOAD_TOO_LARGE, None, INVALID_REQUEST, &why)
    };
    let announced = first_value(headers, &header::CONTENT_LENGTH).0.and_then(|length| length.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let read = async {
        let broken =
            |_| error_response(StatusCode::BAD_REQUEST, None, PARSE_ERROR, "the body of the request is incomplete");
        let mut count = |frame: &Bytes| {
            if memory.own.bytes() + frame.len() > limit {
                Err(too_large())
            } else if memory.try_take(frame.len()) {
                Ok(())
            } else {
                Err(ErrorResponse::new(reply::overloaded(CROWDED_PAUSE)))
            }
        };
        let Some(first) = frames.next().await.transpose().map_err(broken)? else { return Ok(Bytes::new()) };
        count(&first)?;
        let Some(second) = frames.next().await.transpose().map_err(broken)? else { return Ok(first) };
        let received = first.len() + second.len();
        let mut all = BytesMut::with_capacity(announced.unwrap_or(received).min(RESERVED_MAX).max(received));
        all.extend_from_slice(&first);
        let mut next = Some(second);
        while let Some(frame) = next {
            count(&frame)?;
            all.extend_from_slice(&frame);
            next = frames.next().await.transpose().map_err(broken)?;
        }
        Ok(all.freeze())
    };
    let timed_out = |_| {
        error_response(StatusCode::REQUEST_TIMEOUT, None, PARSE_ERROR, "the body of the request did not arrive in time")
    };
    timeout(BODY_TIMEOUT, read).await.map_err(timed_out)?
}

fn sanitize(text: &str, max: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(max).collect()
}
