//! Server side of the control socket. It makes no decisions: each request becomes a call of the runtime.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{DefaultBodyLimit, Json, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_console::changes::run_to_end;
use mcp_satellite_console::principal::{Entrance, Principal};
use mcp_satellite_console::routes::ApiServer as _;
use mcp_satellite_process::keeper::{DescriptorName, KeeperClient};
use tokio::net::UnixListener;

use super::SOCKET;
use super::actions::InstanceAction;
use super::api::{
    CallRequest, ConfigureRequest, ConfigureResult, ConsoleFilter, ControlResult, EndpointAccess, EndpointAccessQuery,
    EventQuery, InstanceSelector, InstanceStatus, LoginLink, PruneResult, ReconnectResult, ReloadQuery, ReloadResult,
    RequestFailure, ShutdownReply, StatusReply, ToolEntry,
};
use super::auth;
use super::event_stream::{EventFormat, stream_response};
use super::state::ConsoleState;
use crate::data_dir::DataDir;
use crate::gateway::clients::ClientStatus;
use mcp_satellite_store::values::ValueChange;

/// Maximum size of a request body: the arguments of a call may be as large as a message of a server.
const BODY_MAX: usize = 16 * 1024 * 1024;
pub(super) type ConsoleResult<T> = Result<Json<T>, ConsoleErrorResponse>;

pub(super) struct ConsoleErrorResponse(Box<RequestFailure>);

impl IntoResponse for ConsoleErrorResponse {
    fn into_response(self) -> Response {
        let status = match self.0.kind.as_str() {
            "not_found" => StatusCode::NOT_FOUND,
            "ambiguous" | "bad_input" => StatusCode::BAD_REQUEST,
            "refused" | "superseded" => StatusCode::CONFLICT,
            "busy" => StatusCode::TOO_MANY_REQUESTS,
            "timed_out" => StatusCode::GATEWAY_TIMEOUT,
            "reconnecting" => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::BAD_GATEWAY,
        };
        (status, Json(self.0)).into_response()
    }
}

impl From<Box<RequestFailure>> for ConsoleErrorResponse {
    fn from(failure: Box<RequestFailure>) -> Self {
        Self(failure)
    }
}

impl From<RequestFailure> for ConsoleErrorResponse {
    fn from(failure: RequestFailure) -> Self {
        Self(Box::new(failure))
    }
}

/// Opens the control socket, or takes over that of the last satellite below the same keeper: commands that connect after
/// a crash wait for the next satellite.
pub(crate) fn bind(data_dir: &DataDir, keeper: &KeeperClient) -> io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let left = keeper.take(DescriptorName::Control).filter(|_| data_dir.stat(SOCKET).is_some());
    if let Some(left) = left {
        return UnixListener::from_std(left.into());
    }
    let path = data_dir.descriptor_path(SOCKET);
    // The satellite holds the lock of the data directory, so an existing socket was left by a killed satellite.
    data_dir.remove(SOCKET)?;
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    keeper.keep(DescriptorName::Control, &listener);
    Ok(listener)
}

pub(crate) async fn serve(listener: UnixListener, console: Arc<ConsoleState>) {
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
        .route("/v1/login-link", post(login_link))
        .route("/v1/flush", post(flush))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(console);
    if let Err(error) = axum::serve(listener, router).with_graceful_shutdown(ending).await {
        tracing::error!(%error, "the control socket failed; `satellite status` and other commands no longer work");
    }
}

async fn status(
    State(console): State<Arc<ConsoleState>>,
    Query(filter): Query<ConsoleFilter>,
) -> ConsoleResult<StatusReply> {
    // Before the snapshot: if the endpoint is open, all instances are installed.
    let satellite = console.satellite_status();
    let snapshot = console.runtime.snapshot();
    console.members.check(&filter, &snapshot).map_err(ConsoleErrorResponse::from)?;
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
    Ok(Json(StatusReply { satellite, instances }))
}

async fn shut_down(State(console): State<Arc<ConsoleState>>) -> Json<ShutdownReply> {
    tracing::info!("`satellite down` was called");
    let actor = Principal::owner(Entrance::Socket).as_actor();
    console.record_change("shut_down", actor, None, Vec::new(), None);
    console.shutdown.cancel();
    Json(ShutdownReply { pid: std::process::id() })
}

async fn tools(
    State(console): State<Arc<ConsoleState>>,
    Query(filter): Query<ConsoleFilter>,
) -> ConsoleResult<Vec<ToolEntry>> {
    let snapshot = console.runtime.snapshot();
    console.members.check(&filter, &snapshot).map_err(ConsoleErrorResponse::from)?;
    let entries = snapshot.iter().filter(|view| filter.matches(&view.spec)).flat_map(|view| ToolEntry::all_of(view));
    Ok(Json(entries.collect()))
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
    let resolved = console.resolve(&request.selector);
    let view = resolved.as_deref().ok();
    let timeout = request.timeout_ms.map(Duration::from_millis);
    let call = async { console.call(&*resolved.clone()?, &request.tool, request.arguments, timeout).await };
    let result = console.record_action("call", view, call).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], result.get().to_owned()).into_response())
}

async fn start(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<ControlResult> {
    control(console, &selector, "start", InstanceAction::Start).await
}

async fn stop(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<ControlResult> {
    control(console, &selector, "stop", InstanceAction::Stop).await
}

async fn restart(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<ControlResult> {
    control(console, &selector, "restart", InstanceAction::Restart).await
}

async fn control(
    console: Arc<ConsoleState>,
    selector: &InstanceSelector,
    action: &'static str,
    command: InstanceAction,
) -> ConsoleResult<ControlResult> {
    let control =
        move |console: Arc<ConsoleState>, view: Arc<InstanceView>| async move { console.control(&view, command).await };
    Ok(Json(console.run_action(action, selector, control).await?))
}

async fn reconnect(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<ReconnectResult> {
    let reconnect = |console: Arc<ConsoleState>, view: Arc<InstanceView>| async move { console.reconnect(&view).await };
    Ok(Json(console.run_action("reconnect", &selector, reconnect).await?))
}

async fn configure(
    State(console): State<Arc<ConsoleState>>,
    Json(request): Json<ConfigureRequest>,
) -> ConsoleResult<ConfigureResult> {
    let set = request.set.into_iter().map(|(key, text)| (key, text.into())).collect();
    let change = ValueChange { set, unset: request.unset };
    let configure =
        |console: Arc<ConsoleState>, view: Arc<InstanceView>| async move { console.configure(&view, change).await };
    Ok(Json(console.run_action("configure", &request.selector, configure).await?))
}

/// Returns the URL of a login to the console as its owner.
async fn login_link(State(console): State<Arc<ConsoleState>>) -> ConsoleResult<LoginLink> {
    let created = async {
        let Some(url) = console.http.url() else {
            let off = "the console is off; add a table [console] to the configuration and run `satellite reload`";
            let why = console.http.problem().unwrap_or_else(|| off.to_owned());
            return Err(RequestFailure::new("refused", why).into());
        };
        let code = console.http.access.create_login_code();
        let code = code.map_err(|error| RequestFailure::new("closing", error.to_string()))?;
        Ok(LoginLink { url: format!("{url}/console/login#{}", code.expose()) })
    };
    Ok(Json(console.record_action("create_login_link", None, created).await?))
}

async fn resolve_name(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<InstanceStatus> {
    let view = console.resolve(&selector)?;
    Ok(Json(console.current_status(&view)?))
}

async fn reload(
    State(console): State<Arc<ConsoleState>>,
    Json(request): Json<ReloadQuery>,
) -> ConsoleResult<ReloadResult> {
    let reload = async move { console.record_action("reload", None, console.reload(request.accept)).await };
    Ok(Json(run_to_end(reload).await?))
}

async fn prune(State(console): State<Arc<ConsoleState>>) -> ConsoleResult<PruneResult> {
    let erase = async move {
        let erased = async { Ok(console.eraser.erase_now(|_| true).await) };
        console.record_action("prune", None, erased).await
    };
    let erased = run_to_end(erase).await?;
    Ok(Json(PruneResult { instances: erased.iter().map(ToString::to_string).collect() }))
}

async fn flush(State(console): State<Arc<ConsoleState>>) -> Json<()> {
    // The error is logged; the stored events remain readable.
    let _ = console.flush_events().await;
    Json(())
}

async fn events(State(console): State<Arc<ConsoleState>>, Query(query): Query<EventQuery>) -> Response {
    let ending = console.ending.clone();
    stream_response(console, Principal::owner(Entrance::Socket), query, EventFormat::JsonLines, ending, None).await
}
