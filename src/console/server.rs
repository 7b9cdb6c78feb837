//! Server side of the control socket. It makes no decisions: each request becomes a call of the runtime.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Json, Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::{ControlError, RuntimeHandle};
use tokio::net::UnixListener;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::SOCKET;
use super::api::{
    CallRequest, ConfigureRequest, ConfigureResult, ConsoleFilter, ControlResult, EndpointAccess, EndpointAccessQuery,
    EventQuery, InstanceSelector, InstanceStatus, MemoryReport, NOT_ALL_STORED, PruneResult, ReconnectResult,
    RejectedConfiguration, ReloadQuery, ReloadResult, RequestFailure, SatelliteStatus, ShutdownReply, StatusReply,
    ToolEntry,
};
use super::auth;
use super::find::{TeamMembers, find};
use crate::active_configuration::{AcceptedReload, ReloadRequest};
use crate::backend::link::BackendLink;
use crate::connect::stdio::StdioConnector;
use crate::data_dir::DataDir;
use crate::delivery::Delivery;
use crate::endpoint::SatelliteEndpoint;
use crate::erasures::DataEraser;
use crate::gateway::clients::ClientStatus;
use crate::journal::{self, Journal, JournalError, JournalState};
use crate::remedy::next_step;
use crate::values::{ConfigureError, ValueConfigurer};
use mcp_satellite_remote::oauth::Grants;
use mcp_satellite_store::values::{ValueChange, ValueError};

/// Maximum size of a request body: the arguments of a call may be as large as a message of a server.
const BODY_MAX: usize = 16 * 1024 * 1024;
/// Maximum number of lines buffered for a slow reader of events. Then the stream waits and reads the missed events
/// again from the journal.
const STREAM_BACKLOG: usize = 256;

pub(crate) struct ConsoleState {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) connector: StdioConnector,
    pub(crate) endpoint: Arc<SatelliteEndpoint>,
    pub(crate) link: Option<BackendLink>,
    pub(crate) journal: Journal,
    pub(crate) delivery: Option<Arc<Delivery>>,
    pub(crate) configurer: ValueConfigurer,
    pub(crate) grants: Grants,
    pub(crate) eraser: Arc<DataEraser>,
    pub(crate) reload: mpsc::Sender<ReloadRequest>,
    pub(crate) name: String,
    pub(crate) data_dir: PathBuf,
    pub(crate) started: Instant,
    pub(crate) members: Arc<TeamMembers>,
    pub(crate) rejected: Arc<Mutex<Option<RejectedConfiguration>>>,
    pub(crate) shutdown: CancellationToken,
    /// Cancelled after the runtime has ended: event streams send the remaining events and end.
    pub(crate) ending: CancellationToken,
}

pub(super) type ConsoleResult<T> = Result<Json<T>, ConsoleErrorResponse>;

pub(super) struct ConsoleErrorResponse(StatusCode, Box<RequestFailure>);

impl IntoResponse for ConsoleErrorResponse {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}

impl From<RequestFailure> for ConsoleErrorResponse {
    fn from(failure: RequestFailure) -> Self {
        let status = match failure.kind.as_str() {
            "not_found" => StatusCode::NOT_FOUND,
            "ambiguous" | "bad_input" => StatusCode::BAD_REQUEST,
            "refused" | "superseded" => StatusCode::CONFLICT,
            "busy" => StatusCode::TOO_MANY_REQUESTS,
            "timed_out" => StatusCode::GATEWAY_TIMEOUT,
            "reconnecting" => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::BAD_GATEWAY,
        };
        Self(status, Box::new(failure))
    }
}

impl From<ControlError> for ConsoleErrorResponse {
    fn from(error: ControlError) -> Self {
        let kind = match error {
            ControlError::NotFound => "not_found",
            ControlError::Refused { .. } => "refused",
            ControlError::Superseded => "superseded",
            ControlError::Closing => "closing",
        };
        let remedy = match error {
            ControlError::Refused { remedy, .. } => remedy,
            ControlError::NotFound | ControlError::Superseded | ControlError::Closing => None,
        };
        RequestFailure { remedy, ..RequestFailure::new(kind, error.to_string()) }.into()
    }
}

impl ConsoleErrorResponse {
    fn from_control_error(error: ControlError, view: &InstanceView) -> Self {
        let Self(status, failure) = error.into();
        Self(status, Box::new(failure.with_next_step(&view.spec)))
    }
}

pub(crate) fn bind(data_dir: &DataDir) -> io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let path = data_dir.descriptor_path(SOCKET);
    // The satellite holds the lock of the data directory, so an existing socket was left by a killed satellite.
    data_dir.remove(SOCKET)?;
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

pub(crate) async fn serve(listener: UnixListener, console: ConsoleState) {
    let ending = console.ending.clone().cancelled_owned();
    let router = axum::Router::new()
        .route("/v1/status", get(status))
        .route("/v1/tools", get(tools))
        .route("/v1/clients", get(clients))
        .route("/v1/endpoint", post(endpoint))
        .route("/v1/call", post(call))
        .route("/v1/start", post(start))
        .route("/v1/stop", post(stop))
        .route("/v1/restart", post(restart))
        .route("/v1/reconnect", post(reconnect))
        .route("/v1/configure", post(configure))
        .route("/v1/auth/begin", post(auth::begin))
        .route("/v1/auth/finish", post(auth::finish))
        .route("/v1/auth/revoke", post(auth::revoke))
        .route("/v1/resolve", post(resolve_name))
        .route("/v1/reload", post(reload))
        .route("/v1/prune", post(prune))
        .route("/v1/events", get(events))
        .route("/v1/down", post(shut_down))
        .route("/v1/flush", post(flush))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(Arc::new(console));
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(ending).await {
        tracing::error!(%error, "the control socket failed; `satellite status` and other commands no longer work");
    }
}

async fn status(
    State(console): State<Arc<ConsoleState>>,
    Query(filter): Query<ConsoleFilter>,
) -> ConsoleResult<StatusReply> {
    let snapshot = console.runtime.snapshot();
    console.members.check(&filter, &snapshot).map_err(|failure| ConsoleErrorResponse::from(*failure))?;
    let connector = console.connector.clone();
    // Reads a kernel file for each process, which would block an async thread.
    let rows = tokio::task::spawn_blocking(move || {
        let (now, usage, unrecorded) = (Instant::now(), connector.usage(), connector.unrecorded_pids());
        let row = |view: &Arc<InstanceView>| {
            let usage = view.pid.and_then(|pid| usage.get(&pid)).copied();
            let unrecorded = view.pid.is_some_and(|pid| unrecorded.contains(&pid));
            InstanceStatus { unrecorded, ..InstanceStatus::from_view(view, usage, now) }
        };
        let mut rows: Vec<_> = snapshot.iter().filter(|view| filter.matches(&view.spec)).map(row).collect();
        rows.sort_by(|one, other| {
            let key =
                |row: &InstanceStatus| [&row.team, &row.server, &row.user, &row.installation_id].map(Clone::clone);
            key(one).cmp(&key(other))
        });
        rows
    });
    let instances = rows.await.map_err(|error| RequestFailure::new("closing", error.to_string()))?;
    let satellite = SatelliteStatus {
        name: console.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_seconds: console.started.elapsed().as_secs(),
        data_dir: console.data_dir.display().to_string(),
        held_by: console.connector.describe_containment(),
        memory: MemoryReport::from_status(console.runtime.memory()),
        events: console.runtime.event_statistics().into(),
        endpoint_opening: console.endpoint.is_opening(),
        endpoint: console.endpoint.status(),
        backend: console
            .link
            .as_ref()
            .map(|link| link.status(console.delivery.as_ref().map_or(0, |delivery| delivery.status().backlog))),
        journal: Some(console.journal.status()),
        delivery: console.delivery.as_ref().map(|delivery| delivery.status()),
        rejected_configuration: console.rejected.lock().unwrap_or_else(PoisonError::into_inner).clone(),
    };
    Ok(Json(StatusReply { satellite, instances }))
}

async fn shut_down(State(console): State<Arc<ConsoleState>>) -> Json<ShutdownReply> {
    tracing::info!("`satellite down` was called");
    console.shutdown.cancel();
    Json(ShutdownReply { pid: std::process::id() })
}

async fn tools(
    State(console): State<Arc<ConsoleState>>,
    Query(filter): Query<ConsoleFilter>,
) -> ConsoleResult<Vec<ToolEntry>> {
    let snapshot = console.runtime.snapshot();
    console.members.check(&filter, &snapshot).map_err(|failure| ConsoleErrorResponse::from(*failure))?;
    let mut entries = Vec::new();
    for view in snapshot.iter().filter(|view| filter.matches(&view.spec)) {
        let spec = &view.spec;
        for tool in view.offered_catalogue().into_iter().flat_map(|catalogue| &catalogue.tools) {
            entries.push(ToolEntry {
                instance: spec.name.to_string(),
                server: spec.server.to_string(),
                team: spec.team_slug.to_string(),
                user: spec.user_slug.to_string(),
                tool_path: format!("{}:{}", spec.server, tool.name),
                tokens: tool.tokens,
                tool: tool.raw.clone(),
            });
        }
    }
    Ok(Json(entries))
}

async fn clients(State(console): State<Arc<ConsoleState>>) -> Json<Vec<ClientStatus>> {
    Json(console.endpoint.clients())
}

async fn endpoint(
    State(console): State<Arc<ConsoleState>>,
    Json(query): Json<EndpointAccessQuery>,
) -> ConsoleResult<EndpointAccess> {
    Ok(Json(console.endpoint.grant_access(query.user.as_deref()).map_err(|failure| *failure)?))
}

async fn call(
    State(console): State<Arc<ConsoleState>>,
    Json(request): Json<CallRequest>,
) -> Result<Response, ConsoleErrorResponse> {
    let view = resolve(&console, &request.selector)?;
    if let Some(arguments) = &request.arguments
        && !arguments.get().trim_start().starts_with('{')
    {
        return Err(RequestFailure::new("bad_input", "the arguments of a tool must be a JSON object").into());
    }
    let timeout = request.timeout_ms.map(Duration::from_millis);
    let result = console.runtime.call(&view.spec.id, &request.tool, request.arguments, timeout).await;
    let result = result.map_err(|error| RequestFailure::from(error).with_next_step(&view.spec))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], result.get().to_owned()).into_response())
}

async fn start(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<ControlResult> {
    let view = resolve(&console, &selector)?;
    let started = console.runtime.start(&view.spec.id).await;
    control_result(&console, &view, started).await
}

async fn stop(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<ControlResult> {
    let view = resolve(&console, &selector)?;
    let stopped = console.runtime.stop(&view.spec.id).await;
    control_result(&console, &view, stopped).await
}

async fn restart(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<ControlResult> {
    let view = resolve(&console, &selector)?;
    let restarted = console.runtime.restart(&view.spec.id).await;
    control_result(&console, &view, restarted).await
}

async fn control_result(
    console: &ConsoleState,
    view: &InstanceView,
    outcome: Result<(), ControlError>,
) -> ConsoleResult<ControlResult> {
    outcome.map_err(|error| ConsoleErrorResponse::from_control_error(error, view))?;
    let not_durable = durability_error(console).await;
    let Json(instance) = current_status(console, view)?;
    Ok(Json(ControlResult { instance, not_durable }))
}

/// Returns the reason why the runtime's state is not stored. The runtime passes its state to the journal before it
/// answers a command.
async fn durability_error(console: &ConsoleState) -> Option<String> {
    console.journal.flush_memos().await.err().map(|error| error.to_string())
}

async fn reconnect(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<ReconnectResult> {
    let view = resolve(&console, &selector)?;
    let outcome = console
        .runtime
        .reconnect(&view.spec.id)
        .await
        .map_err(|error| ConsoleErrorResponse::from_control_error(error, &view))?;
    let instance = view.spec.name.to_string();
    let mcp_satellite_actors::ReconnectOutcome { success, status, status_message } = outcome;
    let view = console.runtime.status(&view.spec.id);
    let next_step = view.and_then(|view| Some(next_step(view.remedy?, &view.spec)));
    let not_durable = durability_error(&console).await;
    Ok(Json(ReconnectResult { instance, success, status, status_message, next_step, not_durable }))
}

async fn configure(
    State(console): State<Arc<ConsoleState>>,
    Json(request): Json<ConfigureRequest>,
) -> ConsoleResult<ConfigureResult> {
    let view = resolve(&console, &request.selector)?;
    let set = request.set.into_iter().map(|(key, text)| (key, text.into())).collect();
    let change = ValueChange { set, unset: request.unset };
    let (required, not_durable) =
        console.configurer.configure(view.spec.id.clone(), change).await.map_err(|refused| match refused {
            ConfigureError::Value(ValueError::BadInput(why)) => {
                ConsoleErrorResponse::from(RequestFailure::new("bad_input", format!("`{}`: {why}", view.spec.name)))
            }
            ConfigureError::Value(ValueError::Storage(_)) => RequestFailure::new("storage", refused.to_string()).into(),
            ConfigureError::Control(error) => ConsoleErrorResponse::from_control_error(error, &view),
        })?;
    let Json(instance) = current_status(&console, &view)?;
    Ok(Json(ConfigureResult { instance, required, not_durable }))
}

async fn resolve_name(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<InstanceStatus> {
    let view = resolve(&console, &selector)?;
    current_status(&console, &view)
}

pub(super) fn current_status(console: &ConsoleState, view: &InstanceView) -> ConsoleResult<InstanceStatus> {
    let snapshot = console.runtime.snapshot();
    let Some(view) = snapshot.get(&view.spec.id) else { return Err(ControlError::NotFound.into()) };
    Ok(Json(InstanceStatus::from_view(view, None, Instant::now())))
}

pub(super) fn resolve(
    console: &ConsoleState,
    selector: &InstanceSelector,
) -> Result<Arc<InstanceView>, ConsoleErrorResponse> {
    let snapshot = console.runtime.snapshot();
    let views: Vec<&Arc<InstanceView>> = snapshot.iter().collect();
    let found = find(&views, |view| &view.spec, selector).map_err(|failure| ConsoleErrorResponse::from(*failure))?;
    Ok(Arc::clone(found))
}

async fn reload(
    State(console): State<Arc<ConsoleState>>,
    Json(request): Json<ReloadQuery>,
) -> ConsoleResult<ReloadResult> {
    let (reply, answer) = oneshot::channel();
    let closing = || ConsoleErrorResponse::from(ControlError::Closing);
    let request = ReloadRequest { accept: request.accept, reply };
    console.reload.send(request).await.map_err(|_| closing())?;
    let AcceptedReload { servers, teams } = answer.await.map_err(|_| closing())?.map_err(|rejected| {
        let kind = if rejected.error_type == "invalid" { "bad_input" } else { "refused" };
        RequestFailure::new(kind, rejected.message)
    })?;
    Ok(Json(ReloadResult { servers, teams }))
}

async fn prune(State(console): State<Arc<ConsoleState>>) -> Json<PruneResult> {
    let erased = console.eraser.erase_now(|_| true).await;
    Json(PruneResult { instances: erased.iter().map(ToString::to_string).collect() })
}

async fn flush(State(console): State<Arc<ConsoleState>>) -> Json<()> {
    // The error is logged; the stored events remain readable.
    let _ = flush_events(&console).await;
    Json(())
}

/// Waits until all earlier events are stored or cannot be stored. Does not wait for a disk that hangs.
async fn flush_events(console: &ConsoleState) -> Result<(), JournalError> {
    let flushed = console.journal.with_disk_timeout(console.runtime.flush()).await;
    flushed.inspect_err(|error| tracing::error!(%error, "cannot flush events; readers may miss the last ones"))
}

/// Streams events as JSON lines: stored events from the journal, new ones from the batcher. The subscription starts
/// before the flush, so that no event is lost between the two.
async fn events(State(console): State<Arc<ConsoleState>>, Query(query): Query<EventQuery>) -> Response {
    let (lines, stream) = mpsc::channel(STREAM_BACKLOG);
    // A header tells a reader without `follow` whether events are missing; a following reader gets them later.
    let is_whole =
        query.follow || flush_events(&console).await.is_ok() && console.journal.status().state == JournalState::Ok;
    tokio::spawn(async move {
        let result = stream_events(&console, query, &lines).await;
        if let Err(EventStreamEnd::Unreadable(error)) = result {
            // The reader must see a broken stream instead of a regular end.
            let _ = lines.send(Err(error)).await;
        }
    });
    let body = futures::stream::unfold(stream, |mut stream| async move { Some((stream.recv().await?, stream)) });
    let mut response = ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response();
    if !is_whole {
        response.headers_mut().insert(NOT_ALL_STORED, HeaderValue::from_static("true"));
    }
    response
}

enum EventStreamEnd {
    Disconnected,
    Unreadable(io::Error),
}

type Lines = mpsc::Sender<io::Result<Bytes>>;

async fn stream_events(console: &ConsoleState, query: EventQuery, lines: &Lines) -> Result<(), EventStreamEnd> {
    let snapshot = console.runtime.snapshot();
    let team = query.team.map(|team| console.members.team_id(&team, &snapshot).unwrap_or(team));
    let types = query.types.iter().flat_map(|types| types.split(',')).map(ToOwned::to_owned).collect();
    let mut filter =
        journal::StoredEventQuery { types, team, instance: query.instance, ..journal::StoredEventQuery::default() };
    let mut events = console.runtime.subscribe();
    let mut last = query.since.unwrap_or(0);
    // A reader that gives `since` expects every event after it. Other readers get new events even if the disk accepts
    // nothing.
    let whole = query.since.is_some();
    loop {
        if query.follow {
            // The error is logged; the stored events remain readable.
            let _ = flush_events(console).await;
        }
        filter.since = Some(last);
        last = tokio::select! {
            biased;
            passed = send_stored(&console.data_dir, filter.clone(), last, lines) => passed?,
            () = console.journal.wait_given_up() => {
                return Err(EventStreamEnd::Unreadable(io::Error::new(io::ErrorKind::TimedOut, "the disk does not answer")));
            }
        };
        if !query.follow {
            return Ok(());
        }
        loop {
            let envelope = tokio::select! {
                envelope = events.recv() => envelope,
                // Events that were emitted before the end are still in the channel.
                () = console.ending.cancelled() => match events.try_recv() {
                    Ok(envelope) => Ok(envelope),
                    Err(_) => return Ok(()),
                },
            };
            match envelope {
                Ok(envelope) if envelope.seq <= last => {}
                // The events in between wait for the disk or are lost. Once this event is stored, the journal has the
                // answer.
                Ok(envelope) if whole && envelope.seq > last + 1 => {
                    let mut appended = console.journal.watch_appended();
                    tokio::select! {
                        // An error means that the journal is closed.
                        _ = appended.wait_for(|through| *through >= envelope.seq) => {}
                        () = console.ending.cancelled() => {}
                        () = lines.closed() => return Err(EventStreamEnd::Disconnected),
                    }
                    break;
                }
                Ok(envelope) => {
                    last = envelope.seq;
                    if filter.matches(&envelope) {
                        // An event that a reader has received must keep its number after a restart.
                        console.journal.wait_stored(envelope.seq).await;
                        lines.send(json_line(&envelope)).await.map_err(|_| EventStreamEnd::Disconnected)?;
                    }
                }
                // The reader was too slow; the journal has the missed events.
                Err(broadcast::error::RecvError::Lagged(_)) => break,
                Err(broadcast::error::RecvError::Closed) => return Ok(()),
            }
        }
    }
}

/// Sends the stored events. Returns the number of the last one, or `last` if there was none.
async fn send_stored(
    data_dir: &Path,
    filter: journal::StoredEventQuery,
    last: u64,
    lines: &Lines,
) -> Result<u64, EventStreamEnd> {
    let (directory, lines) = (data_dir.to_owned(), lines.clone());
    let reading = tokio::task::spawn_blocking(move || {
        let mut events = journal::read(directory, filter).map_err(EventStreamEnd::Unreadable)?;
        for envelope in events.by_ref() {
            lines.blocking_send(json_line(&envelope)).map_err(|_| EventStreamEnd::Disconnected)?;
        }
        match events.take_error() {
            Some(error) => Err(EventStreamEnd::Unreadable(error)),
            None => Ok(events.last_read().unwrap_or(last)),
        }
    });
    reading.await.unwrap_or_else(|error| Err(EventStreamEnd::Unreadable(io::Error::other(error))))
}

fn json_line(envelope: &Envelope) -> io::Result<Bytes> {
    let mut line = serde_json::to_vec(envelope)?;
    line.push(b'\n');
    Ok(line.into())
}
