//! Requested changes: their bodies, and the events about them. A client that disconnects hides no change: its event is
//! emitted in any case.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::http::{Method, StatusCode, header, request};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use mcp_satellite_actors::byte_budget::{ByteBudget, ByteShare};
use mcp_satellite_actors::model::event::ActionActor;
use mcp_satellite_config::Role;
use mcp_satellite_gateway::pages::header::SESSION_ID;
use mcp_satellite_gateway::pages::{ForwardedKind, ForwardedMessage, PageConnection};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::error::Category;
use tokio::time::timeout;

use crate::api::RequestFailure;
use crate::principal::Principal;
use crate::problem::Problem;
use crate::routes::{ApiServer, RequestContext, authenticate, check_role, context};

/// Maximum size of a body with names and flags. Larger ones count against the budget of the server.
const SMALL_BODY_MAX: usize = 64 * 1024;
/// Maximum size of a large body: the arguments of a call may be as large as a message of a server.
const LARGE_BODY_MAX: usize = 16 * 1024 * 1024;
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that are still read of the body of a rejected request.
const UNREAD_MAX: usize = 64 * 1024;
const UNREAD_TIMEOUT: Duration = Duration::from_secs(1);

/// A change, as its event names it.
#[derive(Debug, Clone, Copy)]
pub struct ApiChange {
    pub method: &'static str,
    pub path: &'static str,
    pub role: Role,
    /// Name of the action in the event `control.action`.
    pub action: &'static str,
    pub summary: &'static str,
    /// True for a body of up to 16 MiB instead of 64 KiB.
    pub has_large_body: bool,
    /// True if the handler ends when the client disconnects.
    pub is_cancellable: bool,
}

impl ApiChange {
    pub fn post(path: &'static str, role: Role, action: &'static str, summary: &'static str) -> Self {
        let (has_large_body, is_cancellable) = (false, false);
        Self { method: "POST", path, role, action, summary, has_large_body, is_cancellable }
    }
}

/// A change that is being carried out. Dropping it emits its event; `F` gets the names of the values that were set, and
/// the problem.
pub struct OpenChange<F: FnMut(Vec<String>, Option<&Problem>)> {
    record: F,
    keys: Vec<String>,
    problem: Option<Problem>,
}

impl<F: FnMut(Vec<String>, Option<&Problem>)> OpenChange<F> {
    /// Begins a change. It counts as failed until it is finished.
    pub fn new(record: F) -> Self {
        let why = "the client disconnected before the response; the change may have been carried out";
        Self { record, keys: Vec::new(), problem: Some(Problem::new("closing", why)) }
    }

    pub fn finish(mut self, keys: Vec<String>, problem: Option<Problem>) {
        (self.keys, self.problem) = (keys, problem);
    }
}

impl<F: FnMut(Vec<String>, Option<&Problem>)> Drop for OpenChange<F> {
    fn drop(&mut self) {
        (self.record)(std::mem::take(&mut self.keys), self.problem.as_ref());
    }
}

/// Runs a change in a task of its own, so that it is carried out whole even if its client disconnects.
///
/// # Errors
/// The change failed or panicked.
pub async fn run_to_end<T, E>(change: impl Future<Output = Result<T, E>> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<RequestFailure> + Send + 'static,
{
    let interrupted = |error| RequestFailure::new("closing", format!("the change was interrupted: {error}"));
    tokio::spawn(change).await.unwrap_or_else(|error| Err(interrupted(error).into()))
}

pub(crate) async fn run_change<S, B, R, H, F>(
    server: Arc<S>,
    request: Request,
    change: ApiChange,
    handler: H,
) -> Result<Response, Problem>
where
    S: ApiServer,
    B: DeserializeOwned + Send + 'static,
    R: Serialize + 'static,
    H: Fn(Arc<S>, RequestContext, B) -> F + Send + Sync + 'static,
    F: Future<Output = Result<R, Problem>> + Send + 'static,
{
    let run = async move {
        let begun = BegunRequest::new(server, request, Some(change)).await?;
        let open = OpenChange::new(begun.recorder(change.action));
        let BegunRequest { server, parts, body, context, .. } = begun;
        let mut keys = Vec::new();
        let answered = async {
            let context = permit(context, change.role)?;
            // The input takes as much memory as the body.
            let RequestBody { bytes, share: _share } = read_body(&parts, body, change, server.body_budget()).await?;
            keys = named_keys(&bytes);
            let input = read_input(&bytes)?;
            drop(bytes);
            handler(Arc::clone(&server), context, input).await
        }
        .await;
        open.finish(keys, answered.as_ref().err().cloned());
        answered.map(|answer| (StatusCode::OK, [(header::CACHE_CONTROL, "no-store")], Json(answer)).into_response())
    };
    if change.is_cancellable { run.await } else { run_to_end(run).await }
}

/// A request of an authenticated client whose role was not checked yet.
struct BegunRequest<S> {
    server: Arc<S>,
    parts: request::Parts,
    body: Body,
    principal: Principal,
    /// The problem of a path that is not valid.
    context: Result<RequestContext, Problem>,
}

impl<S: ApiServer> BegunRequest<S> {
    /// Authenticates a request. `change` is the change that it asks for, and is recorded if it is refused.
    async fn new(server: Arc<S>, request: Request, change: Option<ApiChange>) -> Result<Self, Problem> {
        let (mut parts, body) = request.into_parts();
        let principal = match change {
            Some(change) => authenticate_change(&server, &parts, change)?,
            None => authenticate(&*server, &parts, false)?,
        };
        let context = context(&mut parts, principal.clone()).await;
        Ok(Self { server, parts, body, principal, context })
    }

    /// Returns the function that emits the event about a change.
    fn recorder(&self, action: &'static str) -> impl FnMut(Vec<String>, Option<&Problem>) + Send + use<S> {
        let Self { server, principal, context, .. } = self;
        let target = context.as_ref().ok().and_then(|context| server.target(principal, context.param("instance")));
        let (server, actor) = (server.clone(), principal.as_actor());
        move |keys, problem| server.record_change(action, actor.clone(), target.clone(), keys, problem)
    }
}

/// Returns the context of a request if its client has the role.
fn permit(context: Result<RequestContext, Problem>, role: Role) -> Result<RequestContext, Problem> {
    let context = context?;
    check_role(&context.principal, role)?;
    Ok(context)
}

pub(crate) async fn run_forward<S, H, F>(
    server: Arc<S>,
    request: Request,
    change: ApiChange,
    handler: H,
) -> Result<Response, Problem>
where
    S: ApiServer,
    H: Fn(Arc<S>, RequestContext, Request) -> F,
    F: Future<Output = Result<Response, Problem>>,
{
    let method = request.method().clone();
    let action = if method == Method::DELETE { "close_session" } else { change.action };
    let requested = (method != Method::GET).then_some(ApiChange { action, ..change });
    let begun = BegunRequest::new(server, request, requested).await?;
    let (mut record, mut record_call) = (begun.recorder(action), begun.recorder("call"));
    let BegunRequest { server, mut parts, body, context, .. } = begun;
    // The endpoint reads the message and sets its kind.
    let message = ForwardedMessage::default();
    parts.extensions.insert(message.clone());
    let (kind, is_delete, is_post) = (message.clone(), method == Method::DELETE, method == Method::POST);
    let open = OpenChange::new(move |keys, problem| match kind.get() {
        Some(ForwardedKind::Call) => record_call(keys, problem),
        Some(ForwardedKind::SessionStart) => record(keys, problem),
        // Lists and notifications change nothing.
        Some(ForwardedKind::Other) => {}
        None if is_delete || (is_post && problem.is_some()) => record(keys, problem),
        None => {}
    });
    let answered = async {
        let context = permit(context, change.role)?;
        handler(server, context, Request::from_parts(parts, body)).await
    }
    .await;
    let problem = match &answered {
        Ok(response) if !response.status().is_success() => {
            let kind = if response.status().is_server_error() { "closing" } else { "bad_input" };
            Some(Problem::new(kind, format!("the MCP endpoint answered with the status {}", response.status())))
        }
        Ok(response) => {
            let is_open =
                message.get() != Some(ForwardedKind::SessionStart) || response.headers().contains_key(SESSION_ID);
            (!is_open).then(|| Problem::new("server_error", "the server did not open a session"))
        }
        Err(problem) => Some(problem.clone()),
    };
    open.finish(Vec::new(), problem);
    answered
}

/// Authenticates whoever requests a change, and records a refusal.
fn authenticate_change<S: ApiServer>(
    server: &Arc<S>,
    parts: &request::Parts,
    change: ApiChange,
) -> Result<Principal, Problem> {
    authenticate(&**server, parts, true).inspect_err(|problem| {
        if problem.kind != "not_found" {
            let actor = unknown_actor("http", parts.extensions.get());
            server.record_change(change.action, actor, None, Vec::new(), Some(problem));
        }
    })
}

/// Describes a client that is not authenticated.
pub fn unknown_actor(via: &str, connection: Option<&PageConnection>) -> ActionActor {
    let address = connection.map(|connection| connection.peer.ip().to_canonical().to_string());
    ActionActor { kind: "unknown".to_owned(), name: None, role: None, via: via.to_owned(), address }
}

/// Returns the body; an absent one is an empty object. A large one counts against the budget until it is dropped.
async fn read_body(
    parts: &request::Parts,
    body: Body,
    change: ApiChange,
    budget: &Arc<ByteBudget>,
) -> Result<RequestBody, Problem> {
    let max = if change.has_large_body { LARGE_BODY_MAX } else { SMALL_BODY_MAX };
    let (mut read, mut frames) = (RequestBody { bytes: Vec::new(), share: budget.share() }, body.into_data_stream());
    let reading = async {
        while let Some(frame) = frames.next().await {
            let broken = |error| Problem::new("bad_input", format!("cannot read the request body: {error}"));
            read.add(&frame.map_err(broken)?, max)?;
        }
        Ok::<_, Problem>(())
    };
    let too_late = |_| Problem::new("body_timed_out", "the request body did not arrive in time");
    if let Err(problem) = timeout(BODY_TIMEOUT, reading).await.map_err(too_late).flatten() {
        // A client that is still sending when the connection closes may never see the response.
        let _ = timeout(UNREAD_TIMEOUT, discard(&mut frames)).await;
        return Err(problem);
    }
    if read.bytes.trim_ascii().is_empty() {
        read.bytes = b"{}".to_vec();
        return Ok(read);
    }
    let is_json = parts.headers.get(header::CONTENT_TYPE).is_some_and(|content_type| {
        content_type
            .to_str()
            .is_ok_and(|text| text.split(';').next().is_some_and(|text| text.trim() == "application/json"))
    });
    // Another media type can be sent by a form of another site.
    let why = "the request body needs the header Content-Type: application/json";
    is_json.then_some(read).ok_or_else(|| Problem::new("unsupported_media_type", why))
}

async fn discard(frames: &mut BodyDataStream) {
    let mut left = UNREAD_MAX;
    while let Some(Ok(frame)) = frames.next().await {
        let Some(remaining) = left.checked_sub(frame.len()) else { return };
        left = remaining;
    }
}

struct RequestBody {
    bytes: Vec<u8>,
    share: ByteShare,
}

impl RequestBody {
    fn add(&mut self, frame: &[u8], max: usize) -> Result<(), Problem> {
        let len = self.bytes.len() + frame.len();
        if len > max {
            return Err(Problem::new("body_too_large", format!("the request body is larger than {max} bytes")));
        }
        // A small body needs no share, so that unfinished large ones do not prevent a `stop`.
        if len > SMALL_BODY_MAX && !self.share.try_take(len - self.share.bytes()) {
            let why = "the bodies of other requests use all memory for them; send the request again later";
            return Err(Problem::new("busy", why));
        }
        self.bytes.extend_from_slice(frame);
        Ok(())
    }
}

/// Reads the input of a change. Only the client gets the whole error: a value in the wrong place may be a secret, and
/// the event is shown to others.
fn read_input<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let mut reader = serde_json::Deserializer::from_slice(body);
    let read = serde_path_to_error::deserialize(&mut reader);
    read.map_err(|error| invalid_input(&error, error.inner()))
}

/// Returns the problem of an input that cannot be read.
pub fn invalid_input(described: &impl Display, error: &serde_json::Error) -> Problem {
    let kind = match error.classify() {
        Category::Syntax => "JSON that is not valid",
        Category::Eof => "JSON that is not complete",
        Category::Data | Category::Io => "an unknown field, or a value of the wrong type",
    };
    let (line, column) = (error.line(), error.column());
    let place = if line == 0 { String::new() } else { format!(" at line {line}, column {column}") };
    Problem::new("bad_input", format!("the request is not valid: {described}"))
        .recorded_as(format!("the request contains {kind}{place}"))
}

/// Returns the keys of `set` and `unset`: the event of a change names the values, never their content.
fn named_keys(body: &[u8]) -> Vec<String> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct NamedKeys {
        set: serde_json::Map<String, Value>,
        unset: Vec<String>,
    }
    let NamedKeys { set, unset } = serde_json::from_slice(body).unwrap_or_default();
    set.into_iter().map(|(key, _)| key).chain(unset).collect()
}
