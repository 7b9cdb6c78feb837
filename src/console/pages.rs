//! The pages of browsers: each handler calls the function behind `/v1` and renders its response.

use std::future::ready;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{MethodRouter, get, post};
use mcp_satellite_actors::model::event::{ActionActor, Event, rfc3339};
use mcp_satellite_clients::Client;
use mcp_satellite_console::feed::FeedScope;
use mcp_satellite_console::pages::{
    ClientsShape, EventsShape, InstanceShape, Markup, OverviewShape, PageFrame, PlaygroundShape, answer_asset,
    calls_page, clients_page, describe_principal, events_page, html_response, instance_page, instances_page,
    login_page, overview_page, playground_page, problem_response, read_login_form, root_of, tree_page,
};
use mcp_satellite_console::principal::{Entrance, Principal};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{ApiChange, ApiServer as _, NoInput, RequestContext, Routes};
use mcp_satellite_console::sse;
use mcp_satellite_console::v1::{CallQuery, EventPage, EventPageQuery, InstanceQuery, LogQuery};
use mcp_satellite_gateway::pages::PageConnection;
use mcp_satellite_protocol::header::SESSION_ID;
use serde::Deserialize;
use strum::IntoEnumIterator as _;

use super::api::{EventQuery, InstanceStatus};
use super::health::ActorHealth;
use super::http_api;
use super::records;
use super::requests::{Api, find};
use super::rows::PageStreams;
use super::state::ConsoleState;
use crate::config::Role;
use crate::journal::JournalState;

/// Events with which the page of events begins.
const EVENTS: usize = 200;
/// Events with which the page of an instance begins.
const TIMELINE: usize = 200;
/// Bytes of a login form.
const FORM_MAX: usize = 4096;
const FORM_TIMEOUT: Duration = Duration::from_secs(10);

/// Adds the pages and their streams.
pub(super) fn add(routes: &mut Routes<ConsoleState>, console: &Api, health: &Arc<ActorHealth>) {
    let streams = Arc::new(PageStreams::new(&console.runtime, health, console.started));
    let add_page = |routes: &mut Routes<ConsoleState>| {
        let shared = streams.clone();
        routes.page("/console/", Role::Viewer, move |console, context, _: NoInput| {
            overview(console, context, shared.clone())
        });
        let shared = streams.clone();
        routes.page("/console/instances", Role::Viewer, move |console, context, query| {
            instances(console, context, query, shared.clone())
        });
        let shared = streams.clone();
        routes.page("/console/instances/{instance}", Role::Viewer, move |console, context, query| {
            instance(console, context, query, shared.clone())
        });
        let shared = streams.clone();
        routes.page("/console/events", Role::Viewer, move |console, context, query| {
            events(console, context, query, shared.clone())
        });
        let shared = streams.clone();
        routes.page("/console/calls", Role::Viewer, move |console, context, query| {
            calls(console, context, query, shared.clone())
        });
        let shared = streams.clone();
        routes.page("/console/tree", Role::Viewer, move |console, context, _: NoInput| {
            tree(console, context, shared.clone())
        });
        let shared = streams.clone();
        routes.page("/console/clients", Role::Viewer, move |console, context, _: NoInput| {
            clients(console, context, shared.clone())
        });
        let shared = streams.clone();
        routes.page("/console/playground/{instance}", Role::Operator, move |console, context, query| {
            ready(playground(&console, &context, query, &shared))
        });
    };
    add_page(routes);
    let shared = streams.clone();
    routes.respond(
        "/v1/instances/stream",
        Role::Viewer,
        "Instances as they change, and events: server-sent events",
        &[sse::MEDIA_TYPE],
        move |console, context, query| {
            let streams = shared.clone();
            async move { streams.answer(console, context, query).await }
        },
    );
    let session = ApiChange {
        method: "POST",
        path: "/v1/instances/{instance}/mcp",
        role: Role::Operator,
        action: "open_session",
        summary: "MCP session with an instance, in the name of its user",
    };
    routes.forward(session, SESSION_ID, forward_mcp);
    routes.open("/console", get(|uri: Uri| async move { Redirect::to(root_of(uri.path())) }));
    routes
        .open("/console/assets/{file}", served(console, |Path(file): Path<String>| async move { answer_asset(&file) }));
    routes.open("/console/login", login_routes(console));
    routes.open("/console/logout", logout_route(console));
}

/// Returns a route of a file that needs no login.
fn served<F>(console: &Api, answer: impl Fn(Path<String>) -> F + Clone + Send + Sync + 'static) -> MethodRouter
where
    F: Future<Output = Result<Response, Problem>> + Send + 'static,
{
    let console = console.clone();
    get(move |connection: Extension<PageConnection>, uri: Uri, path: Path<String>| {
        let (console, answer) = (console.clone(), answer.clone());
        async move {
            if !console.access().is_served(&connection) {
                return Problem::not_found("path", uri.path()).into_response();
            }
            answer(path).await.unwrap_or_else(|problem| problem_response(&problem, uri.path()))
        }
    })
}

fn login_routes(console: &Api) -> MethodRouter {
    let (shown, sent) = (console.clone(), console.clone());
    let form = get(move |connection: Extension<PageConnection>, uri: Uri| {
        let console = shown.clone();
        async move {
            if !console.access().is_served(&connection) {
                return Problem::not_found("path", uri.path()).into_response();
            }
            html_response(StatusCode::OK, login_page(root_of(uri.path()), None))
        }
    });
    form.post(move |connection: Extension<PageConnection>, request: Request| {
        let console = sent.clone();
        async move { log_in(&console, &connection, request).await }
    })
}

async fn log_in(console: &ConsoleState, connection: &PageConnection, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    if !console.access().is_served(connection) {
        return Problem::not_found("path", path).into_response();
    }
    let logged_in = async {
        let too_late = |_| Problem::new("bad_input", "the form did not arrive in time");
        let body = tokio::time::timeout(FORM_TIMEOUT, to_bytes(body, FORM_MAX)).await.map_err(too_late)?;
        let body = body.map_err(|error| Problem::new("bad_input", format!("cannot read the form: {error}")))?;
        let token = read_login_form(&body)?;
        console.access().log_in(&parts.headers, connection, token.expose())
    }
    .await;
    match logged_in {
        Ok(login) => {
            console.record_change("login", login.principal.as_actor(), None, Vec::new(), None);
            let mut response = Redirect::to("./").into_response();
            if let Ok(cookie) = HeaderValue::try_from(login.set_cookie) {
                response.headers_mut().insert(header::SET_COOKIE, cookie);
            }
            response
        }
        Err(problem) => {
            let via: &str = Entrance::Console.into();
            let actor = ActionActor {
                kind: "unknown".to_owned(),
                name: None,
                role: None,
                via: via.to_owned(),
                address: Some(connection.peer.ip().to_canonical().to_string()),
            };
            console.record_change("login", actor, None, Vec::new(), Some(&problem));
            let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::UNAUTHORIZED);
            html_response(status, login_page(root_of(path), Some(&problem.detail)))
        }
    }
}

fn logout_route(console: &Api) -> MethodRouter {
    let console = console.clone();
    post(move |connection: Extension<PageConnection>, request: Request| {
        let console = console.clone();
        async move {
            let (parts, _) = request.into_parts();
            if !console.access().is_served(&connection) {
                return Problem::not_found("path", parts.uri.path()).into_response();
            }
            let principal = match console.access().authenticate(&parts, &connection, true) {
                Ok(principal) => principal,
                Err(problem) => return problem.at(parts.uri.path()).into_response(),
            };
            let cookie = console.access().log_out(&parts.headers);
            console.record_change("logout", principal.as_actor(), None, Vec::new(), None);
            (StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie)]).into_response()
        }
    })
}

/// Returns the frame of a page that shows a revision.
fn frame(console: &ConsoleState, context: &RequestContext, streams: &PageStreams, revision: u64) -> PageFrame {
    let principal = &context.principal;
    PageFrame {
        root: root_of(context.uri.path()),
        satellite: console.name.clone(),
        principal: describe_principal(principal),
        role: principal.access.role,
        csrf_token: csrf_token(console, principal, &context.headers),
        boot: streams.feeds.boot().to_owned(),
        revision,
        at: rfc3339(jiff::Timestamp::now()),
    }
}

/// Returns the token for changes, which a page of somebody without a login does not get.
fn csrf_token(console: &ConsoleState, principal: &Principal, headers: &HeaderMap) -> Option<String> {
    (principal.entrance == Entrance::Console).then(|| console.access().csrf_token(headers))?
}

async fn overview(console: Api, context: RequestContext, streams: Arc<PageStreams>) -> Result<Markup, Problem> {
    let scope = FeedScope { team: context.principal.team.clone(), instance: None };
    let rows = streams.feeds.rows(&scope).await?;
    let frame = frame(&console, &context, &streams, rows.position.revision);
    let warnings = if context.principal.team.is_none() { warnings(&console) } else { Vec::new() };
    Ok(overview_page(&OverviewShape { rows, warnings }, &frame))
}

/// Returns the states of the satellite itself that need a person.
fn warnings(console: &ConsoleState) -> Vec<String> {
    let status = console.satellite_status();
    let mut warnings = Vec::new();
    if let Some(rejected) = status.rejected_configuration {
        warnings.push(format!("{rejected}; correct the file and run `satellite reload`"));
    }
    if status.journal.is_some_and(|journal| journal.state != JournalState::Ok) {
        warnings.push("The journal cannot be written, so events are kept in memory; make room on the disk".to_owned());
    }
    if let Some(memory) = status.memory.filter(|memory| memory.short) {
        warnings.push(memory.to_string());
    }
    warnings
}

async fn instances(
    console: Api,
    context: RequestContext,
    query: InstanceQuery,
    streams: Arc<PageStreams>,
) -> Result<Markup, Problem> {
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    // A form sends its empty fields too.
    let given = |text: Option<String>| text.and_then(given);
    let query = InstanceQuery {
        team: given(query.team),
        user: given(query.user),
        server: given(query.server),
        status: given(query.status),
        q: given(query.q),
        cursor: given(query.cursor),
        ..query
    };
    let found = http_api::instances(console, context, query.clone()).await?;
    Ok(instances_page(&found, &query, &frame))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct InstanceForm {
    /// True for those parts only that the script replaces: neither events nor output, which the stream brings.
    live: bool,
}

async fn instance(
    console: Api,
    context: RequestContext,
    form: InstanceForm,
    streams: Arc<PageStreams>,
) -> Result<Markup, Problem> {
    let view = find(&console, &context)?;
    let name = view.spec.name.to_string();
    let through = last_event(&console);
    let mut timeline = EventPage { events: Vec::new(), next: None, skipped: 0 };
    let mut output = None;
    if !form.live {
        let newest = EventPageQuery { instance: Some(name), limit: Some(TIMELINE), ..EventPageQuery::default() };
        timeline = records::events(console.clone(), context.clone(), newest).await?;
        if context.principal.reads_calls_of(&view.spec) {
            output = Some(records::logs(console.clone(), context.clone(), LogQuery::default()).await?);
        }
    }
    let processes = http_api::processes(console.clone(), context.clone(), NoInput {}).await?;
    let usage = http_api::usage(console.clone(), context.clone(), NoInput {}).await?;
    // Read last, so that nothing on the page is later than its status.
    let details = http_api::instance(console.clone(), context.clone(), NoInput {}).await?;
    let frame = frame(&console, &context, &streams, details.revision);
    let shape = InstanceShape {
        details,
        usage,
        processes,
        catalogue: view.catalogue.clone(),
        missing: view.spec.missing.clone(),
        output,
        calls_tools: context.principal.acts_for(&view.spec),
        through: timeline.events.first().map_or(through, |event| event.seq.max(through)),
        // The output has a list of its own.
        events: timeline.events.into_iter().filter(|event| !matches!(event.event, Event::ServerLogs { .. })).collect(),
    };
    Ok(instance_page(&shape, &frame))
}

fn last_event(console: &ConsoleState) -> u64 {
    *console.journal.watch_appended().borrow()
}

/// The fields of the form on the page of events, which are empty if they are not used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EventForm {
    since: String,
    before: String,
    types: String,
    instance: String,
}

async fn events(
    console: Api,
    context: RequestContext,
    form: EventForm,
    streams: Arc<PageStreams>,
) -> Result<Markup, Problem> {
    let through = last_event(&console);
    let number = |name: &str, text: &str| {
        let why = || Problem::new("bad_input", format!("`{name}` is not the number of an event"));
        (!text.is_empty()).then(|| text.parse().map_err(|_| why())).transpose()
    };
    let (since, before) = (number("since", &form.since)?, number("before", &form.before)?);
    let query =
        EventQuery { since, follow: true, types: given(form.types), team: None, instance: given(form.instance) };
    let mut page = EventPage { events: Vec::new(), next: None, skipped: 0 };
    // A list that begins after an event is read by the stream, from the oldest event.
    if since.is_none() {
        let (types, instance) = (query.types.clone(), query.instance.clone());
        let newest = EventPageQuery { before, types, instance, limit: Some(EVENTS), ..EventPageQuery::default() };
        page = records::events(console.clone(), context.clone(), newest).await?;
    }
    let through = since.unwrap_or_else(|| page.events.first().map_or(through, |event| event.seq.max(through)));
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    let is_old = before.is_some();
    Ok(events_page(&EventsShape { query, events: page.events, through, older: page.next, is_old }, &frame))
}

fn given(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// The fields of the form on the page of calls, which are empty if they are not used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct CallForm {
    instance: String,
    server: String,
    tool: String,
    user: String,
    client: String,
    fate: String,
    team: String,
    since: String,
    until: String,
    success: String,
    cursor: String,
}

async fn calls(
    console: Api,
    context: RequestContext,
    form: CallForm,
    streams: Arc<PageStreams>,
) -> Result<Markup, Problem> {
    let query = CallQuery {
        team: given(form.team),
        user: given(form.user),
        server: given(form.server),
        instance: given(form.instance),
        tool: given(form.tool),
        success: match form.success.as_str() {
            "true" => Some(true),
            "false" => Some(false),
            _ => None,
        },
        fate: given(form.fate),
        client: given(form.client),
        since: given(form.since),
        until: given(form.until),
        limit: None,
        cursor: given(form.cursor),
    };
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    let found = records::calls(console, context, query.clone()).await?;
    Ok(calls_page(&found, &query, &frame))
}

async fn tree(console: Api, context: RequestContext, streams: Arc<PageStreams>) -> Result<Markup, Problem> {
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    Ok(tree_page(&http_api::tree(console, context, NoInput {}).await?, &frame))
}

async fn clients(console: Api, context: RequestContext, streams: Arc<PageStreams>) -> Result<Markup, Problem> {
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    let is_admin = context.principal.access.role >= Role::Admin && context.principal.team.is_none();
    let shape = ClientsShape {
        tokens: is_admin.then(|| console.access().token_names()),
        url: console.endpoint.status().map(|endpoint| endpoint.url),
        connectable: Client::iter().map(|client| client.to_string()).collect(),
        clients: http_api::clients(console, context, NoInput {}).await?,
    };
    Ok(clients_page(&shape, &frame))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PlaygroundQuery {
    tool: Option<String>,
}

fn playground(
    console: &ConsoleState,
    context: &RequestContext,
    query: PlaygroundQuery,
    streams: &PageStreams,
) -> Result<Markup, Problem> {
    let revision = console.runtime.snapshot().revision();
    let view = find(console, context)?;
    http_api::check_acting(context, &view)?;
    let frame = frame(console, context, streams, revision);
    let tools = view.offered_catalogue().into_iter().flat_map(|catalogue| &catalogue.tools);
    let shape = PlaygroundShape {
        status: InstanceStatus::from_view(&view, None, Instant::now()),
        tools: tools.map(|tool| tool.raw.clone()).collect(),
        selected: query.tool,
    };
    Ok(playground_page(&shape, &frame))
}

/// Passes a request of MCP to the endpoint, as a request of the instance's user.
async fn forward_mcp(console: Api, context: RequestContext, mut request: Request) -> Result<Response, Problem> {
    let view = find(&console, &context)?;
    http_api::check_acting(&context, &view)?;
    // The login is not for the endpoint.
    request.headers_mut().remove(header::COOKIE);
    request.headers_mut().remove(header::AUTHORIZATION);
    let id = &view.spec.id;
    let request = request.map(Body::new);
    console.endpoint.answer_as(&id.team, &id.user, &view.spec.name, request).await.ok_or_else(|| {
        let why = "the MCP endpoint is off, or the instance's user is not in the configuration; add [gateway] and run \
                   `satellite reload`";
        Problem::new("refused", why)
    })
}
