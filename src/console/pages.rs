//! The pages of browsers: each handler calls the function behind `/v1` and renders its response.

use std::future::ready;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use axum::response::Response;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_console::changes::ApiChange;
use mcp_satellite_console::feed::{FeedRows, FeedScope};
use mcp_satellite_console::page_stream::response_while_admitted;
use mcp_satellite_console::pages::{
    CallsShape, ClientsShape, ConsoleSite, EventEntry, EventsShape, FleetPageShape, InstanceShape, LiveQuery, Markup,
    OverviewShape, PageFrame, PlaygroundShape, calls_page, clients_page, events_page, fleet_page, instance_page,
    instances_page, overview_page, playground_page, tree_page,
};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{ApiServer as _, NoInput, RequestContext, Routes};
use mcp_satellite_console::sse;
use mcp_satellite_console::v1::{CallQuery, EventPage, EventPageQuery, FleetCallQuery, InstanceQuery, LogQuery};
use serde::Deserialize;

use super::api::{EventQuery, InstanceStatus};
use super::client_entries::BridgeCommand;
use super::health::ActorHealth;
use super::http_api;
use super::login;
use super::page_frame::page_frame;
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

/// Adds the pages and their streams.
pub(super) fn add(routes: &mut Routes<ConsoleState>, console: &Api, health: &Arc<ActorHealth>) {
    let streams = Arc::new(PageStreams::new(&console.runtime, health, console.started));
    let add_page = |routes: &mut Routes<ConsoleState>| {
        let shared = streams.clone();
        routes.page("/console/", Role::Viewer, move |console, context, query| {
            overview(console, context, query, shared.clone())
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
        routes.page("/console/fleet", Role::Viewer, move |console, context, _: NoInput| {
            fleet(console, context, shared.clone())
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
    let summary = "MCP session with an instance, in the name of its user";
    let session = ApiChange::post("/v1/instances/{instance}/mcp", Role::Operator, "open_session", summary);
    routes.forward(session, forward_mcp);
    login::add(routes, console, ConsoleSite::Satellite);
}

/// Returns the frame of a page that shows a revision.
fn frame(console: &ConsoleState, context: &RequestContext, streams: &PageStreams, revision: u64) -> PageFrame {
    page_frame(console, context, (ConsoleSite::Satellite, &console.name), (streams.feeds.boot(), revision))
}

async fn overview(
    console: Api,
    context: RequestContext,
    query: LiveQuery,
    streams: Arc<PageStreams>,
) -> Result<Markup, Problem> {
    let scope = FeedScope { team: context.principal.team.clone(), instance: None };
    let rows = if query.live { FeedRows::default() } else { streams.feeds.rows(&scope).await? };
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
    warnings.extend([status.endpoint_problem, status.console_problem].into_iter().flatten());
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
    let found = http_api::instances(console, context, query.clone()).await?;
    Ok(instances_page(&found.into(), &query, &frame))
}

async fn instance(
    console: Api,
    context: RequestContext,
    query: LiveQuery,
    streams: Arc<PageStreams>,
) -> Result<Markup, Problem> {
    let view = find(&console, &context)?;
    let name = view.spec.name.to_string();
    let through = last_event(&console);
    let mut timeline = EventPage { events: Vec::new(), next: None, skipped: 0, complete: true };
    let mut output = None;
    if !query.live {
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
        events: timeline
            .events
            .into_iter()
            .filter(|event| !matches!(event.event, Event::ServerLogs { .. }))
            .map(EventEntry::from)
            .collect(),
    };
    Ok(instance_page(&shape, &frame))
}

fn last_event(console: &ConsoleState) -> u64 {
    *console.journal.watch_appended().borrow()
}

async fn events(
    console: Api,
    context: RequestContext,
    query: EventPageQuery,
    streams: Arc<PageStreams>,
) -> Result<Markup, Problem> {
    let through = last_event(&console);
    let EventPageQuery { since, before, types, team, instance, .. } = query.clone();
    let query = EventPageQuery { limit: Some(EVENTS), ..query };
    let (mut page, mut later) = (EventPage { events: Vec::new(), next: None, skipped: 0, complete: true }, None);
    if since.is_some() {
        (page.events, later) = records::events_after(&console, &context, query).await?;
    } else {
        page = records::events(console.clone(), context.clone(), query).await?;
    }
    let through = later.unwrap_or_else(|| page.events.first().map_or(through, |event| event.seq.max(through)));
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    let is_old = before.is_some() || later.is_some();
    let shape = EventsShape {
        query: EventQuery { since, follow: true, types, team, instance },
        events: page.events.into_iter().map(EventEntry::from).collect(),
        through,
        older: page.next,
        later,
        is_old,
        satellites: Vec::new(),
        satellite: None,
    };
    Ok(events_page(&shape, &frame))
}

async fn calls(
    console: Api,
    context: RequestContext,
    query: CallQuery,
    streams: Arc<PageStreams>,
) -> Result<Markup, Problem> {
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    let through = last_event(&console);
    let found = records::calls(console, context, query.clone()).await?;
    let CallQuery { subject, conditions } = query;
    let query = FleetCallQuery { satellite: None, subject, conditions };
    Ok(calls_page(&CallsShape { found, query, through, satellites: Vec::new() }, &frame))
}

async fn tree(console: Api, context: RequestContext, streams: Arc<PageStreams>) -> Result<Markup, Problem> {
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    Ok(tree_page(&http_api::tree(console, context, NoInput {}).await?, &frame))
}

async fn fleet(console: Api, context: RequestContext, streams: Arc<PageStreams>) -> Result<Markup, Problem> {
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    let report = http_api::fleet(console, context, NoInput {}).await;
    // The page shows failures of the backend, but nothing to somebody who may not read it.
    let report = match report {
        Err(problem) if problem.kind != http_api::BACKEND_PROBLEM => return Err(problem),
        report => report,
    };
    Ok(fleet_page(&FleetPageShape { report }, &frame))
}

async fn clients(console: Api, context: RequestContext, streams: Arc<PageStreams>) -> Result<Markup, Problem> {
    let frame = frame(&console, &context, &streams, console.runtime.snapshot().revision());
    let is_admin = context.principal.access.role >= Role::Admin && context.principal.team.is_none();
    let bridge = BridgeCommand::new(console.data_dir.path());
    let shape = ClientsShape {
        tokens: is_admin.then(|| console.access().token_names()),
        url: console.endpoint.status().map(|endpoint| endpoint.url),
        connectable: bridge.clients(),
        bridge_entry: bridge.entry(),
        clients: http_api::clients(console, context, NoInput {}).await?,
    };
    Ok(clients_page(&shape, &frame))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PlaygroundQuery {
    tool: Option<String>,
    /// True for those parts only that the script replaces: not the tools.
    live: bool,
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
    let tools = view.offered_catalogue().filter(|_| !query.live).into_iter().flat_map(|catalogue| &catalogue.tools);
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
    let answered = console.endpoint.answer_as(&id.team, &id.user, &view.spec.name, request).await.ok_or_else(|| {
        let why = "the MCP endpoint is off, or the instance's user is not in the configuration; add [gateway] and run \
                   `satellite reload`";
        Problem::new("refused", why)
    })?;
    Ok(response_while_admitted(&console, context, answered))
}
