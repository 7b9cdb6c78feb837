//! The table of routes. Each request is authenticated, its role is checked, and its input is read before the handler
//! runs. Changes are recorded, refused ones too.

use std::sync::Arc;

use axum::extract::{FromRequestParts as _, RawPathParams, Request};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header, request};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use axum::{Json, Router};
use maud::Markup;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::event::{ActionActor, ActionOutcome, Event, EventSubject};
use mcp_satellite_config::Role;
use mcp_satellite_gateway::pages::header::LAST_EVENT_ID;
use mcp_satellite_gateway::pages::{EndpointPages, PageConnection};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::access::ConsoleAccess;
use crate::changes::{ApiChange, run_change, run_forward};
use crate::openapi::{ApiDescription, ApiOperation, text_content};
use crate::pages::{html_response, problem_response};
use crate::principal::Principal;
use crate::problem::{Problem, shorten};
use crate::query_text::{read_form_query, read_query};
use crate::sse;

/// Characters of the reason in an event.
const REASON_MAX: usize = 500;

/// A server of the API.
pub trait ApiServer: Send + Sync + 'static {
    fn access(&self) -> &ConsoleAccess;

    fn record(&self, event: Event);

    /// Budget for the large bodies of requests that are being read.
    fn body_budget(&self) -> &Arc<ByteBudget>;

    /// Emits the event about a requested change. `keys` are the names of the values that it sets; `problem` is the
    /// reason why it was not carried out.
    fn record_change(
        &self,
        action: &str,
        actor: ActionActor,
        target: Option<Arc<EventSubject>>,
        keys: Vec<String>,
        problem: Option<&Problem>,
    ) {
        let outcome = match problem {
            None => ActionOutcome::Succeeded,
            Some(problem) if problem.is_refusal() => ActionOutcome::Refused,
            Some(_) => ActionOutcome::Failed,
        };
        let reason = problem.map(|problem| shorten(problem.event_reason().to_owned(), REASON_MAX));
        // A rejected key may be a value in the wrong place.
        let keys = if problem.is_none() { keys } else { Vec::new() };
        self.record(Event::ControlAction {
            action: action.to_owned(),
            outcome,
            actor,
            target,
            reason,
            keys,
            repeated: 0,
        });
    }

    /// Returns the instance that a path names; `None` if there is none, or the principal does not see it.
    fn target(&self, principal: &Principal, name: &str) -> Option<Arc<EventSubject>>;
}

/// Input of an operation without parameters or body.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoInput {}

/// A request whose role was checked.
#[derive(Debug, Clone)]
pub struct RequestContext {
    pub principal: Principal,
    /// Connection of the client; `None` for a request that came over MCP.
    pub connection: Option<PageConnection>,
    pub uri: Uri,
    pub headers: HeaderMap,
    params: Vec<(String, String)>,
}

impl RequestContext {
    /// Returns the context of a request for an instance that did not come over HTTP.
    pub fn of_instance(principal: Principal, instance: &str) -> Self {
        let params = vec![("instance".to_owned(), instance.to_owned())];
        Self { principal, connection: None, uri: Uri::default(), headers: HeaderMap::new(), params }
    }

    /// Returns a parameter of the path, or an empty string.
    pub fn param(&self, name: &str) -> &str {
        self.params.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }
}

/// Turns a problem into the response to a request for a URI.
type RenderProblem = fn(&Problem, &Uri) -> Response;

/// Reads the query of a request.
type ReadQuery<Q> = fn(&str) -> Result<Q, serde_urlencoded::de::Error>;

fn problem_document(problem: &Problem, uri: &Uri) -> Response {
    problem.clone().at(uri.path()).into_response()
}

/// Collects the routes of a server and their description.
pub struct Routes<S> {
    server: Arc<S>,
    router: Router,
    description: ApiDescription,
}

impl<S: ApiServer> Routes<S> {
    pub fn new(server: Arc<S>) -> Self {
        Self { server, router: Router::new(), description: ApiDescription::default() }
    }

    /// Adds a GET request with a JSON response.
    pub fn read<Q, R, H, F>(&mut self, path: &'static str, role: Role, summary: &'static str, handler: H)
    where
        Q: DeserializeOwned + JsonSchema + Send + 'static,
        R: Serialize + JsonSchema + 'static,
        H: Fn(Arc<S>, RequestContext, Q) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<R, Problem>> + Send + 'static,
    {
        let content = self.description.response::<R>();
        self.describe_read::<Q>(path, role, summary, &content);
        self.add_read(path, role, read_query, problem_document, move |server, context, query| {
            let answer = handler(server, context, query);
            async move { Ok(Json(answer.await?).into_response()) }
        });
    }

    /// Adds a GET request whose handler builds the response: a stream or another media type.
    pub fn respond<Q, H, F>(
        &mut self,
        path: &'static str,
        role: Role,
        summary: &'static str,
        media_types: &[&str],
        handler: H,
    ) where
        Q: DeserializeOwned + JsonSchema + Send + 'static,
        H: Fn(Arc<S>, RequestContext, Q) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response, Problem>> + Send + 'static,
    {
        self.describe_read::<Q>(path, role, summary, &text_content(media_types));
        if media_types.contains(&sse::MEDIA_TYPE) {
            let operation = ApiOperation { method: &Method::GET, path, role: Some(role), summary };
            self.description.add_headers(&operation, &[LAST_EVENT_ID]);
        }
        self.add_read(path, role, read_query, problem_document, handler);
    }

    /// Adds a change with a JSON response.
    pub fn change<B, R, H, F>(&mut self, change: ApiChange, handler: H)
    where
        B: DeserializeOwned + JsonSchema + Send + 'static,
        R: Serialize + JsonSchema + 'static,
        H: Fn(Arc<S>, RequestContext, B) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<R, Problem>> + Send + 'static,
    {
        let ApiChange { method, path, role, summary, .. } = change;
        let method = Method::from_bytes(method.as_bytes()).unwrap_or(Method::POST);
        let content = self.description.response::<R>();
        let body = self.description.input::<B>();
        let operation = ApiOperation { method: &method, path, role: Some(role), summary };
        self.description.add(&operation, &Value::Null, Some(body), &content);
        let filter = MethodFilter::try_from(method).unwrap_or(MethodFilter::POST);
        self.add_handler(path, filter, problem_document, move |server, request| {
            run_change(server, request, change, handler.clone())
        });
    }

    /// Adds a page: HTML, also for problems. A browser without a login is sent to the login page.
    pub fn page<Q, H, F>(&mut self, path: &'static str, role: Role, handler: H)
    where
        Q: DeserializeOwned + Send + 'static,
        H: Fn(Arc<S>, RequestContext, Q) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Markup, Problem>> + Send + 'static,
    {
        self.add_read(path, role, read_form_query, problem_response, move |server, context, query| {
            let page = handler(server, context, query);
            async move { Ok(html_response(StatusCode::OK, page.await?)) }
        });
    }

    /// Adds a path that passes MCP requests on. `change` describes the opening of a session. The handler gets the whole
    /// request.
    pub fn forward<H, F>(&mut self, change: ApiChange, handler: H)
    where
        H: Fn(Arc<S>, RequestContext, Request) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response, Problem>> + Send + 'static,
    {
        self.description.add_mcp(change.path, change.role, change.summary);
        let methods = MethodFilter::GET.or(MethodFilter::POST).or(MethodFilter::DELETE);
        self.add_handler(change.path, methods, problem_document, move |server, request| {
            run_forward(server, request, change, handler.clone())
        });
    }

    /// Adds a GET request that needs no token: its response is a line of text with the status 200 or 503.
    pub fn probe(&mut self, path: &'static str, summary: &'static str, route: MethodRouter) {
        let (operation, text) =
            (ApiOperation { method: &Method::GET, path, role: None, summary }, text_content(&["text/plain"]));
        self.description.add(&operation, &Value::Null, None, &text);
        self.description.set_response(&operation, "503", "The condition does not hold", text);
        self.add(path, route);
    }

    /// Adds a path that needs no token and is not part of the description.
    pub fn open(&mut self, path: &'static str, route: MethodRouter) {
        self.add(path, route);
    }

    /// Returns the pages, with the description at `/openapi.json`.
    pub fn finish(mut self) -> EndpointPages {
        let summary = "This description";
        let operation = ApiOperation { method: &Method::GET, path: "/openapi.json", role: Some(Role::Viewer), summary };
        let content = self.description.response::<Value>();
        self.description.add(&operation, &Value::Null, None, &content);
        let document: Arc<Value> = Arc::new(std::mem::take(&mut self.description).into_document());
        self.add_read("/openapi.json", Role::Viewer, read_query, problem_document, move |_, _, NoInput {}| {
            let response = Json(&*document).into_response();
            async move { Ok(response) }
        });
        let missing = |uri: Uri| async move { answer_problem(&Problem::not_found("path", uri.path()), &uri) };
        let wrong_method = |method: Method, uri: Uri| async move {
            Problem::new("method_not_allowed", format!("this path does not accept {method}")).at(uri.path())
        };
        EndpointPages {
            router: self.router.fallback(missing).method_not_allowed_fallback(wrong_method),
            reject: |why, uri| answer_problem(&Problem::new("host_not_allowed", why), uri),
        }
    }

    fn describe_read<Q: JsonSchema>(&mut self, path: &str, role: Role, summary: &str, content: &Value) {
        let query = self.description.input::<Q>();
        let operation = ApiOperation { method: &Method::GET, path, role: Some(role), summary };
        self.description.add(&operation, &query, None, content);
    }

    fn add_read<Q, H, F>(
        &mut self,
        path: &'static str,
        role: Role,
        read: ReadQuery<Q>,
        render: RenderProblem,
        handler: H,
    ) where
        Q: DeserializeOwned + Send + 'static,
        H: Fn(Arc<S>, RequestContext, Q) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response, Problem>> + Send + 'static,
    {
        self.add_handler(path, MethodFilter::GET, render, move |server, request| {
            let handler = handler.clone();
            async move { run_read(server, request, role, read, &handler).await }
        });
    }

    /// Adds a handler of whole requests.
    fn add_handler<H, F>(&mut self, path: &'static str, methods: MethodFilter, render: RenderProblem, handler: H)
    where
        H: Fn(Arc<S>, Request) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<Response, Problem>> + Send + 'static,
    {
        let server = self.server.clone();
        let answer = move |request: Request| {
            let uri = request.uri().clone();
            let answered = handler(server.clone(), request);
            async move { answered.await.unwrap_or_else(|problem| render(&problem, &uri)) }
        };
        self.add(path, on(methods, answer));
    }

    fn add(&mut self, path: &'static str, route: MethodRouter) {
        self.router = std::mem::take(&mut self.router).route(path, route);
    }
}

/// Returns the response about a problem: a page below `/console/`, else a problem document.
fn answer_problem(problem: &Problem, uri: &Uri) -> Response {
    if uri.path().starts_with("/console/") { problem_response(problem, uri) } else { problem_document(problem, uri) }
}

async fn run_read<S, Q, H, F>(
    server: Arc<S>,
    request: Request,
    role: Role,
    read: ReadQuery<Q>,
    handler: &H,
) -> Result<Response, Problem>
where
    S: ApiServer,
    Q: DeserializeOwned,
    H: Fn(Arc<S>, RequestContext, Q) -> F,
    F: Future<Output = Result<Response, Problem>>,
{
    let (mut parts, _) = request.into_parts();
    let principal = authenticate(&*server, &parts, false)?;
    check_role(&principal, role)?;
    let query = read(parts.uri.query().unwrap_or_default())
        .map_err(|error| Problem::new("bad_input", format!("the query is not valid: {error}")))?;
    let context = context(&mut parts, principal).await?;
    let mut response = handler(server, context, query).await?;
    // What one principal may read must not be shown to another one.
    response.headers_mut().entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    Ok(response)
}

pub(crate) fn authenticate<S: ApiServer>(
    server: &S,
    parts: &request::Parts,
    is_change: bool,
) -> Result<Principal, Problem> {
    let connection = parts.extensions.get::<PageConnection>();
    let connection = connection.ok_or_else(|| Problem::new("closing", "the request has no connection"))?;
    let access = server.access();
    if !access.is_served(connection) {
        return Err(Problem::not_found("path", parts.uri.path()));
    }
    access.authenticate(parts, connection, is_change)
}

/// # Errors
/// The role of the principal is lower.
pub fn check_role(principal: &Principal, needed: Role) -> Result<(), Problem> {
    let role = principal.access.role;
    let why = || Problem::new("forbidden", format!("this needs the role {needed}; this client has the role {role}"));
    (role >= needed).then_some(()).ok_or_else(why)
}

pub(crate) async fn context(parts: &mut request::Parts, principal: Principal) -> Result<RequestContext, Problem> {
    let bad_path = |error| Problem::new("bad_input", format!("the path is not valid: {error}"));
    let params = RawPathParams::from_request_parts(parts, &()).await.map_err(bad_path)?;
    let params = params.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let connection = parts.extensions.get::<PageConnection>().cloned();
    Ok(RequestContext { principal, connection, uri: parts.uri.clone(), headers: parts.headers.clone(), params })
}
