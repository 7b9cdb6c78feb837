//! The connection to the running satellite: finds it, opens the session, and does both again after the satellite has
//! ended.
//!
//! ```text
//!   Waiting ──(satellite found, session opened)──► Up ──(a request finds the connection or the session lost)──► Waiting
//! ```

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, StatusCode};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, join_parts, member};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::headers::{PROTOCOL_VERSION, SESSION_ID};
use super::http::{EndpointClient, SatelliteAddress, SatelliteResponse};

const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(2);
/// Timeout for the requests with which the bridge opens a session again.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum size of the answers to requests of the bridge itself.
const OWN_ANSWER_MAX: usize = 16 << 20;
/// Maximum number of resource subscriptions that are renewed.
const SUBSCRIPTIONS_MAX: usize = 1000;

/// Reason why there is no address of a satellite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocateError(pub String);

/// Finds the running satellite.
pub trait SatelliteLocator: Send + Sync {
    fn locate(&self) -> BoxFuture<'_, Result<SatelliteAddress, LocateError>>;
}

/// One connection to one satellite, with at most one session.
pub(crate) struct Link {
    pub generation: u64,
    pub http: Arc<EndpointClient>,
    pub session: Option<LinkSession>,
}

struct SessionHeaders {
    id: HeaderValue,
    version: HeaderValue,
}

/// A session of the client at a satellite.
pub(crate) struct LinkSession {
    /// Number of earlier sessions of this bridge.
    number: u64,
    headers: SessionHeaders,
}

impl Link {
    /// Returns the number of the session; zero before the session is open.
    pub(crate) fn session_number(&self) -> u64 {
        self.session.as_ref().map_or(0, |session| session.number)
    }

    /// Returns the headers of a message in the session; none before the session is open.
    pub(crate) fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(LinkSession { headers: SessionHeaders { id, version }, .. }) = &self.session {
            headers.insert(SESSION_ID, id.clone());
            headers.insert(PROTOCOL_VERSION, version.clone());
        }
        headers
    }
}

#[derive(Clone)]
enum LinkState {
    /// Not connected, with the reason.
    Waiting(String),
    Up(Arc<Link>),
}

/// Messages of the client that a new session requires.
#[derive(Default)]
struct ReplayedMessages {
    initialize: Option<RpcMessage>,
    initialized: Option<RpcMessage>,
    log_level: Option<RpcMessage>,
    /// `resources/subscribe` requests by URI.
    subscriptions: BTreeMap<String, RpcMessage>,
    /// Capabilities of the server in the answer that the client has received.
    capabilities: String,
}

pub(crate) struct LinkControl {
    locator: Box<dyn SatelliteLocator>,
    path: String,
    state: watch::Sender<LinkState>,
    replayed: Mutex<ReplayedMessages>,
    generations: AtomicU64,
    sessions: AtomicU64,
}

impl LinkControl {
    pub(crate) fn new(locator: Box<dyn SatelliteLocator>, path: String) -> Self {
        let state = LinkState::Waiting("the satellite was not found yet".to_owned());
        Self {
            locator,
            path,
            state: watch::Sender::new(state),
            replayed: Mutex::default(),
            generations: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
        }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn current(&self) -> Option<Arc<Link>> {
        match &*self.state.borrow() {
            LinkState::Up(link) => Some(link.clone()),
            LinkState::Waiting(_) => None,
        }
    }

    /// Waits for a connection. The error is the reason why there is none.
    pub(crate) async fn wait_up(&self, until: Instant) -> Result<Arc<Link>, String> {
        let mut state = self.state.subscribe();
        let up = state.wait_for(|state| matches!(state, LinkState::Up(_)));
        if let Ok(Ok(state)) = timeout_at(until, up).await
            && let LinkState::Up(link) = &*state
        {
            return Ok(link.clone());
        }
        match &*self.state.borrow() {
            LinkState::Up(link) => Ok(link.clone()),
            LinkState::Waiting(why) => Err(why.clone()),
        }
    }

    /// Waits until the connection `generation` is not the current one any more.
    pub(crate) async fn wait_replaced(&self, generation: u64) {
        let is_other = |state: &LinkState| !matches!(state, LinkState::Up(link) if link.generation == generation);
        // The sender lives as long as `self`.
        let _ = self.state.subscribe().wait_for(is_other).await;
    }

    /// Records that a connection, or its session, does not work any more. Reports about earlier ones are ignored.
    pub(crate) fn report_lost(&self, generation: u64, why: &str) {
        self.state.send_if_modified(|state| {
            let is_current = matches!(state, LinkState::Up(link) if link.generation == generation);
            if is_current {
                *state = LinkState::Waiting(why.to_owned());
            }
            is_current
        });
    }

    /// Opens the session of the client with its own request, whose response is `answer` with `headers`. Returns the
    /// new connection; `None` if the answer opens no session.
    pub(crate) fn adopt_session(
        &self,
        link: &Link,
        initialize: &RpcMessage,
        headers: &HeaderMap,
        answer: &RpcMessage,
    ) -> Option<Arc<Link>> {
        let session = self.next_session(session_headers(headers, answer)?);
        let capabilities = answer.outcome().and_then(|result| member(result, "capabilities")).unwrap_or("{}");
        *self.replayed() = ReplayedMessages {
            initialize: Some(initialize.clone()),
            capabilities: capabilities.to_owned(),
            ..ReplayedMessages::default()
        };
        let link = Link { generation: self.next_generation(), http: link.http.clone(), session: Some(session) };
        let link = Arc::new(link);
        self.state.send_replace(LinkState::Up(link.clone()));
        Some(link)
    }

    /// Remembers a message that a new session requires, too.
    pub(crate) fn record(&self, message: &RpcMessage) {
        let mut replayed = self.replayed();
        let uri = || {
            let uri = message.params().and_then(|params| member(params, "uri"));
            uri.map(ToOwned::to_owned)
        };
        match message.method() {
            Some(method::INITIALIZED) => replayed.initialized = Some(message.clone()),
            Some(method::SET_LOG_LEVEL) => replayed.log_level = Some(message.clone()),
            Some(method::RESOURCES_SUBSCRIBE) if replayed.subscriptions.len() < SUBSCRIPTIONS_MAX => {
                replayed.subscriptions.extend(uri().map(|uri| (uri, message.clone())));
            }
            Some(method::RESOURCES_UNSUBSCRIBE) => {
                if let Some(uri) = uri() {
                    replayed.subscriptions.remove(&uri);
                }
            }
            _ => {}
        }
    }

    /// Keeps the connection: finds the satellite whenever there is none. `restored` is called with each connection
    /// after the first one; `report` with each new reason why there is none. Never returns.
    pub(crate) async fn run<F: Future<Output = ()>>(&self, restored: impl Fn(Arc<Link>) -> F, report: impl Fn(&str)) {
        let mut is_first = true;
        loop {
            let mut pause = RETRY_PAUSE_MIN;
            let mut reported = None;
            let link = loop {
                match self.connect().await {
                    Ok(link) => break Arc::new(link),
                    Err(why) => {
                        if reported.as_ref() != Some(&why) {
                            report(&why);
                            reported = Some(why.clone());
                        }
                        self.state.send_replace(LinkState::Waiting(why));
                        sleep(pause).await;
                        pause = (2 * pause).min(RETRY_PAUSE_MAX);
                    }
                }
            };
            self.state.send_replace(LinkState::Up(link.clone()));
            if !std::mem::take(&mut is_first) {
                report("connected again");
                restored(link).await;
            }
            let mut state = self.state.subscribe();
            // An error is impossible: the sender lives as long as `self`.
            let Ok(waiting) = state.wait_for(|state| matches!(state, LinkState::Waiting(_))).await else { return };
            if let LinkState::Waiting(why) = &*waiting {
                report(&format!("lost the connection to the satellite: {why}"));
            }
        }
    }

    async fn connect(&self) -> Result<Link, String> {
        let satellite = self.locator.locate().await.map_err(|LocateError(why)| why)?;
        let http = Arc::new(EndpointClient::new(&satellite).map_err(|error| error.to_string())?);
        let mut link = Link { generation: self.next_generation(), http, session: None };
        let Some(initialize) = self.replayed().initialize.clone() else { return Ok(link) };
        let opened = timeout(OPEN_TIMEOUT, self.open_session(&mut link, &initialize)).await;
        opened.map_err(|_| "the satellite does not answer `initialize`".to_owned())??;
        Ok(link)
    }

    async fn open_session(&self, link: &mut Link, initialize: &RpcMessage) -> Result<(), String> {
        let (headers, answer) = self.exchange(link, initialize).await?;
        let message = RpcMessage::parse(answer).map_err(|error| error.to_string())?;
        let refused = || {
            let why = message.outcome().and_then(|error| member(error, "message"));
            let why = why.and_then(|why| serde_json::from_str::<String>(why).ok()).unwrap_or_default();
            format!("the satellite opens no session: {why}")
        };
        link.session = Some(self.next_session(session_headers(&headers, &message).ok_or_else(refused)?));
        let requests = {
            let replayed = self.replayed();
            let Some(initialized) = replayed.initialized.clone() else { return Ok(()) };
            let requests = replayed.log_level.iter().chain(replayed.subscriptions.values());
            std::iter::once(initialized).chain(requests.cloned()).collect::<Vec<_>>()
        };
        for request in requests {
            // A server that does not support one of them any more says so in its answer.
            self.exchange(link, &request).await?;
        }
        Ok(())
    }

    /// Sends a message on behalf of the client and returns the answer, which the client does not see. A request gets an
    /// id that the client does not use.
    async fn exchange(&self, link: &Link, message: &RpcMessage) -> Result<(HeaderMap, Bytes), String> {
        const OWN_ID: &str = "\"mcp-satellite-stdio\"";
        let body = match message.kind() {
            MessageKind::Request => join_parts(&message.with_id(OWN_ID)),
            MessageKind::Notification | MessageKind::Result | MessageKind::Error => message.text().as_bytes().clone(),
        };
        let response = link.http.post(&self.path, link.headers(), body).await.map_err(|error| error.why)?;
        let headers = response.headers.clone();
        Ok((headers, read_own_answer(response).await?))
    }

    /// Returns the notifications that tell the client that lists may have changed: those that the server has
    /// announced.
    pub(crate) fn changed_notifications(&self) -> Vec<String> {
        let replayed = self.replayed();
        let lists = [
            ("tools", method::TOOLS_CHANGED),
            ("prompts", method::PROMPTS_CHANGED),
            ("resources", method::RESOURCES_CHANGED),
        ];
        let is_announced = |list: &str| {
            member(&replayed.capabilities, list).and_then(|list| member(list, "listChanged")) == Some("true")
        };
        let announced = lists.iter().filter(|(list, _)| is_announced(list));
        announced.map(|(_, method)| format!(r#"{{"jsonrpc":"2.0","method":"{method}"}}"#)).collect()
    }

    /// Ends the session at the satellite.
    pub(crate) async fn close(&self) {
        let Some(link) = self.current().filter(|link| link.session.is_some()) else { return };
        // The session is over on this side, whatever the result.
        let _ = timeout(CLOSE_TIMEOUT, link.http.delete(&self.path, link.headers())).await;
    }

    fn next_session(&self, headers: SessionHeaders) -> LinkSession {
        LinkSession { number: self.sessions.fetch_add(1, Ordering::Relaxed), headers }
    }

    fn next_generation(&self) -> u64 {
        self.generations.fetch_add(1, Ordering::Relaxed)
    }

    fn replayed(&self) -> MutexGuard<'_, ReplayedMessages> {
        self.replayed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn session_headers(headers: &HeaderMap, answer: &RpcMessage) -> Option<SessionHeaders> {
    let id = headers.get(SESSION_ID)?.clone();
    let version = member(answer.outcome()?, "protocolVersion")?;
    let version = serde_json::from_str::<String>(version).ok()?;
    Some(SessionHeaders { id, version: HeaderValue::try_from(version).ok()? })
}

/// Reads the answer to a request of the bridge itself: JSON, or the last event of a stream.
pub(crate) async fn read_own_answer(mut response: SatelliteResponse) -> Result<Bytes, String> {
    let (is_stream, status) = (response.is_stream(), response.status);
    let mut events = mcp_satellite_protocol::sse::SseDecoder::new(OWN_ANSWER_MAX);
    let (mut body, mut last) = (Vec::new(), Bytes::new());
    while let Some(chunk) = response.chunk().await.map_err(|error| error.why)? {
        let too_large = || "an answer of the satellite is too large".to_owned();
        if is_stream {
            events.push(chunk);
            while let Some(event) = events.next_event().map_err(|_| too_large())? {
                last = event.data;
            }
        } else if body.len() + chunk.len() > OWN_ANSWER_MAX {
            return Err(too_large());
        } else {
            body.extend_from_slice(&chunk);
        }
    }
    if is_stream {
        return Ok(last);
    }
    if body.is_empty() && status != StatusCode::ACCEPTED {
        return Err(format!("the satellite answered with HTTP status {status}"));
    }
    Ok(body.into())
}
