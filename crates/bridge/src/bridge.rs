//! The bridge itself: reads the client's messages, starts requests and ends with the client.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use mcp_satellite_model::exit::CallError;
use mcp_satellite_protocol::body::split_messages;
use mcp_satellite_protocol::era::{Era, STATELESS_VERSION};
use mcp_satellite_protocol::error_code::{INVALID_REQUEST, PARSE_ERROR};
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MalformedMessage, MessageKind, RpcMessage};
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::failure::{error_response, malformed_response};
use super::headers::{PROTOCOL_VERSION, ToolMarks, stateless_version};
use super::input::{InputLine, LINE_MAX, read_line};
use super::link::{Link, LinkControl, SatelliteLocator, read_own_answer};
use super::output::ClientOutput;
use super::request::{ClientRequest, OpenRequest};
use super::server_requests::ServerRequests;
use super::session_stream;

/// Maximum number of requests in flight.
const REQUESTS_MAX: usize = 1024;
/// Maximum size of all requests in flight, in units of [`UNIT`].
const REQUEST_UNITS_MAX: usize = 2 * LINE_MAX / UNIT;
const UNIT: usize = 1024;
const READ_AHEAD: usize = 16 << 10;
/// Timeout for the satellite to accept a notification or a response of the client.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for requests in flight after the end of the input.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// Pauses after which a cancellation is repeated: it may have overtaken its request.
const CANCEL_PAUSES: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];

/// Settings of a bridge.
pub struct BridgeSettings {
    /// Path and query of the endpoint, such as `/mcp`.
    pub path: String,
    /// Receives messages for people.
    pub report: Box<dyn Fn(&str) + Send + Sync>,
}

/// State that all tasks of a bridge share.
pub(crate) struct BridgeState {
    pub control: LinkControl,
    pub output: ClientOutput,
    pub marks: ToolMarks,
    server_requests: ServerRequests,
    report: Box<dyn Fn(&str) + Send + Sync>,
    /// Requests that the client can cancel, by id.
    open: Mutex<HashMap<String, Arc<OpenRequest>>>,
    budget: Arc<Semaphore>,
    /// Number of requests in flight, without subscriptions.
    in_flight: watch::Sender<usize>,
    tasks: TaskTracker,
    /// Cancelled when the bridge ends, which ends all tasks.
    ended: CancellationToken,
}

/// Counts a request until it has its answer.
struct RequestGuard {
    bridge: Arc<BridgeState>,
    id: Option<String>,
    is_counted: bool,
    _size: OwnedSemaphorePermit,
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            self.bridge.open().remove(id);
        }
        if self.is_counted {
            self.bridge.in_flight.send_modify(|count| *count -= 1);
        }
    }
}

/// Passes messages between a client and the satellite until the client ends, or `stop` does.
pub async fn run(
    settings: BridgeSettings,
    locator: Box<dyn SatelliteLocator>,
    input: impl AsyncRead + Unpin,
    output: impl AsyncWrite + Send + 'static,
    stop: impl Future<Output = ()>,
) {
    let ended = CancellationToken::new();
    let _end_tasks = ended.clone().drop_guard();
    let bridge = Arc::new(BridgeState {
        control: LinkControl::new(locator, settings.path),
        output: ClientOutput::new(output, ended.clone()),
        marks: ToolMarks::default(),
        server_requests: ServerRequests::default(),
        report: settings.report,
        open: Mutex::default(),
        budget: Arc::new(Semaphore::new(REQUEST_UNITS_MAX)),
        in_flight: watch::Sender::new(0),
        tasks: TaskTracker::new(),
        ended: ended.clone(),
    });
    let restored = |link: Arc<Link>| {
        let bridge = bridge.clone();
        async move {
            if link.session.is_some() {
                let withdrawn = bridge.server_requests.withdraw_others(link.session_number());
                bridge.listen(link);
                for notification in withdrawn.into_iter().chain(bridge.control.changed_notifications()) {
                    bridge.output.write(&notification).await;
                }
            }
        }
    };
    tokio::select! {
        () = bridge.read(BufReader::with_capacity(READ_AHEAD, input)) => {}
        () = stop => {}
        () = ended.cancelled() => {}
        () = bridge.control.run(restored, |why| bridge.report(why)) => {}
    }
    bridge.control.close().await;
}

impl BridgeState {
    pub(crate) fn report(&self, message: &str) {
        (self.report)(message);
    }

    /// Passes on the messages of the satellite that belong to no request.
    pub(crate) fn listen(self: &Arc<Self>, link: Arc<Link>) {
        let bridge = self.clone();
        self.spawn(async move { session_stream::listen(&bridge, &link).await });
    }

    /// Passes a message of a session to the client.
    pub(crate) async fn forward(&self, session: u64, message: &RpcMessage) {
        self.output.write(&self.server_requests.text_for_client(session, message)).await;
    }

    /// Handles the messages of the client up to the end of its input.
    async fn read(self: &Arc<Self>, mut input: BufReader<impl AsyncRead + Unpin>) {
        loop {
            match read_line(&mut input, LINE_MAX).await {
                Ok(Some(InputLine::Text(line))) => self.handle_line(line).await,
                Ok(Some(InputLine::TooLong)) => {
                    let why = format!("the message is larger than {LINE_MAX} bytes; send less at once");
                    self.output.write(&malformed_response(INVALID_REQUEST, &why)).await;
                }
                Ok(None) => break,
                Err(error) => {
                    self.report(&format!("cannot read the messages of the client: {error}"));
                    break;
                }
            }
        }
        // An error means that some requests have no answer in time.
        let _ = timeout(LAST_ANSWERS, self.in_flight.subscribe().wait_for(|count| *count == 0)).await;
    }

    async fn handle_line(self: &Arc<Self>, line: Bytes) {
        let trimmed = line.trim_ascii_start();
        if trimmed.is_empty() {
            return;
        }
        // The members of a batch are sent one by one: responses are found by their ids. An empty batch is invalid.
        let batch = (trimmed[0] == b'[').then(|| split_messages(&line)).flatten();
        let batch = batch.filter(|messages| !messages.is_empty());
        for message in batch.unwrap_or_else(|| vec![line]) {
            match RpcMessage::parse(message) {
                Ok(message) => self.handle_message(message).await,
                Err(error) => {
                    let is_json = !matches!(error, MalformedMessage::NotJson(_));
                    let code = if is_json { INVALID_REQUEST } else { PARSE_ERROR };
                    self.output.write(&malformed_response(code, &error.to_string())).await;
                }
            }
        }
    }

    async fn handle_message(self: &Arc<Self>, message: RpcMessage) {
        match (message.kind(), message.method()) {
            (MessageKind::Request, _) => self.start_request(message).await,
            (MessageKind::Notification, Some(method::CANCELLED)) => self.cancel(message).await,
            (MessageKind::Notification | MessageKind::Result | MessageKind::Error, _) => {
                self.control.record(&message);
                self.send_in_order(&message).await;
            }
        }
    }

    async fn start_request(self: &Arc<Self>, message: RpcMessage) {
        let units = u32::try_from(message.text().len().div_ceil(UNIT)).unwrap_or(u32::MAX);
        let size = self.budget.clone().try_acquire_many_owned(units);
        let request = ClientRequest::new(self.clone(), message);
        let Ok(size) =
            size.map_err(drop).and_then(|size| if self.tasks.len() < REQUESTS_MAX { Ok(size) } else { Err(()) })
        else {
            let busy = CallError::Busy { what: "requests in flight", limit: REQUESTS_MAX };
            return self.output.write(&error_response(request.id(), request.open().era, &busy)).await;
        };
        let id = request.id().to_owned();
        // The satellite rejects a second request with the id of an open one; only the first can be cancelled.
        let is_new = !self.open().contains_key(&id);
        if is_new {
            self.open().insert(id.clone(), request.open().clone());
        }
        let is_counted = !request.is_subscription();
        if is_counted {
            self.in_flight.send_modify(|count| *count += 1);
        }
        let guard = RequestGuard { bridge: self.clone(), id: is_new.then_some(id), is_counted, _size: size };
        if request.opens_session() {
            // Later messages belong to the session.
            request.run().await;
            return drop(guard);
        }
        self.spawn(async move {
            request.run().await;
            drop(guard);
        });
    }

    /// Cancels a request: in a session with the client's notification, otherwise by closing its connection.
    async fn cancel(self: &Arc<Self>, message: RpcMessage) {
        let id = message.cancelled_id().map(ToOwned::to_owned);
        let request = id.as_ref().and_then(|id| self.open().get(id).cloned());
        let Some((id, request)) = id.zip(request) else { return self.send_in_order(&message).await };
        request.is_cancelled.store(true, Ordering::Release);
        if request.era == Era::Stateless || !request.is_sent.load(Ordering::Acquire) {
            return request.withdrawn.cancel();
        }
        self.send_in_order(&message).await;
        let bridge = self.clone();
        self.spawn(async move {
            for pause in CANCEL_PAUSES {
                sleep(pause).await;
                if !bridge.open().get(&id).is_some_and(|open| Arc::ptr_eq(open, &request)) {
                    return;
                }
                bridge.send_in_order(&message).await;
            }
        });
    }

    /// Sends a notification or a response and waits until the satellite has accepted it. Without a connection it is
    /// dropped: it belongs to a session that does not exist any more.
    async fn send_in_order(&self, message: &RpcMessage) {
        let Some(link) = self.control.current() else { return };
        let Some(body) = self.server_requests.body_for_satellite(link.session_number(), message) else { return };
        let headers = match stateless_version(message) {
            Some(version) => self.marks.headers(message, &version),
            None if link.session.is_some() => link.headers(),
            None => [(PROTOCOL_VERSION, HeaderValue::from_static(STATELESS_VERSION))].into_iter().collect(),
        };
        let sent = async {
            let response = match link.http.post(self.control.path(), headers, body).await {
                Ok(response) => response,
                Err(error) => {
                    if !error.sent {
                        self.control.report_lost(link.generation, &error.why);
                    }
                    return;
                }
            };
            let status = response.status;
            // The body is read so that the connection can be used again.
            let _ = read_own_answer(response).await;
            if status == StatusCode::NOT_FOUND || status == StatusCode::UNAUTHORIZED {
                self.control.report_lost(link.generation, "the session has ended");
            } else if !status.is_success() {
                self.report(&format!("the satellite rejected a message of the client with HTTP status {status}"));
            }
        };
        if timeout(ACCEPT_TIMEOUT, sent).await.is_err() {
            self.report("the satellite did not accept a message of the client in time");
        }
    }

    /// Spawns a task that ends with the bridge.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let ended = self.ended.clone();
        self.tasks.spawn(async move {
            // Nobody reads the output any more.
            let _ = ended.run_until_cancelled(task).await;
        });
    }

    fn open(&self) -> MutexGuard<'_, HashMap<String, Arc<OpenRequest>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
