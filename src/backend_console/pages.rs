//! The pages of a backend.

use std::sync::Arc;

use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_backend::server::api::CommandRecordView;
use mcp_satellite_backend::server::{EventRange, StoredEventPage};
use mcp_satellite_backend::wire::CommandTarget;
use mcp_satellite_console::api::EventQuery;
use mcp_satellite_console::feed::{FeedRows, FeedScope, STOPPED};
use mcp_satellite_console::pages::{
    CallsShape, ConsoleSite, EventEntry, EventsShape, FleetPageShape, InstanceListing, InstanceTableRow, LiveQuery,
    Markup, OverviewShape, PageFrame, ReportedInstanceShape, SatellitePageShape, calls_page, events_page, fleet_page,
    instances_page, overview_page, reported_instance_page, satellite_page,
};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{NoInput, RequestContext, Routes};
use mcp_satellite_console::v1::{FleetCallQuery, InstanceOrder, InstanceQuery};
use serde::Deserialize;
use serde_json::Value;

use super::rows::ReportedRow;
use super::state::{Api, BackendConsole, problem};
use super::streams::{entry, filter};
use super::target;
use crate::config::Role;
use crate::console::page_frame::page_frame;
use crate::console::requests::{Place, SortedPage, sorted_page};

/// Events with which a page begins.
const EVENTS: usize = 200;
/// Commands of a satellite that are searched for those of an instance, and shown on its page.
const COMMANDS_SEARCHED: usize = 500;
const COMMANDS_SHOWN: usize = 20;
/// Satellites that the overview names as not connected.
const WARNINGS_MAX: usize = 10;

/// Adds the pages.
pub(super) fn add(routes: &mut Routes<BackendConsole>) {
    routes.page("/console/", Role::Viewer, overview);
    routes.page("/console/instances", Role::Viewer, instances);
    routes.page("/console/instances/{instance}", Role::Viewer, instance);
    routes.page("/console/events", Role::Viewer, events);
    routes.page("/console/calls", Role::Viewer, calls);
    routes.page("/console/fleet", Role::Viewer, fleet);
    routes.page("/console/fleet/{satellite}", Role::Viewer, satellite);
}

fn frame(console: &BackendConsole, context: &RequestContext, revision: u64) -> PageFrame {
    page_frame(console, context, (ConsoleSite::Backend, "satellite backend"), (console.feeds.boot(), revision))
}

async fn overview(console: Api, context: RequestContext, query: LiveQuery) -> Result<Markup, Problem> {
    console.rows.check()?;
    let connections = console.backend.connections().await.map_err(|error| problem(&error))?;
    let lost: Vec<&str> = connections.iter().filter(|one| !one.connected).map(|one| &*one.name).collect();
    let mut warnings: Vec<String> = lost
        .iter()
        .take(WARNINGS_MAX)
        .map(|name| format!("The satellite {name} is not connected, so its instances are shown as offline"))
        .collect();
    if lost.len() > WARNINGS_MAX {
        warnings.push(format!(
            "{} more satellites are not connected; the page Fleet lists them",
            lost.len() - WARNINGS_MAX
        ));
    }
    let rows = if query.live { FeedRows::default() } else { console.feeds.rows(&FeedScope::default()).await? };
    let frame = frame(&console, &context, rows.position.revision);
    Ok(overview_page(&OverviewShape { rows, warnings }, &frame))
}

async fn instances(console: Api, context: RequestContext, query: InstanceQuery) -> Result<Markup, Problem> {
    console.rows.check()?;
    let frame = frame(&console, &context, console.rows.revision());
    let statuses: Option<Vec<&str>> = query.status.as_deref().map(|text| text.split(',').map(str::trim).collect());
    let is = |wanted: &Option<String>, value: &str| wanted.as_deref().is_none_or(|wanted| wanted == value);
    let matches = |one: &Arc<ReportedRow>| {
        is(&query.team, &one.state.team_id)
            && is(&query.user, &one.state.user_id)
            && is(&query.server, &one.state.server_slug)
            && query.q.as_ref().is_none_or(|text| one.row.name.contains(text))
            && statuses.as_ref().is_none_or(|statuses| statuses.contains(&one.row.status.as_str()))
    };
    let place = |one: &ReportedRow| -> Place {
        let key = match query.sort {
            InstanceOrder::Status => one.row.status.to_string(),
            InstanceOrder::Since => format!("{:020}", one.row.since.max(0)),
            InstanceOrder::Name | InstanceOrder::Restarts | InstanceOrder::Calls => String::new(),
        };
        (key, one.row.name.to_string())
    };
    let found = console.rows.all().into_iter().filter(matches).map(|one| (place(&one), one)).collect();
    let SortedPage { total, items, next } = sorted_page(found, query.descending, query.cursor.as_deref(), query.limit)?;
    let rows = items.iter().map(|one| table_row(one)).collect();
    Ok(instances_page(&InstanceListing { total, rows, next }, &query, &frame))
}

fn table_row(one: &ReportedRow) -> InstanceTableRow {
    InstanceTableRow {
        name: one.row.name.to_string(),
        status: one.row.status,
        is_dormant: false,
        is_stopped: one.row.flags & STOPPED != 0,
        since: rfc3339(one.since()),
        message: one.message(),
        counters: None,
    }
}

async fn instance(console: Api, context: RequestContext, query: LiveQuery) -> Result<Markup, Problem> {
    let satellite = console.find(&context)?.satellite.clone();
    let mut page = StoredEventPage { events: Vec::new(), has_more: false, through: 0 };
    if !query.live {
        let filter = filter(&console, None, None, Some(context.param("instance")))?;
        let read = console.backend.events(filter, EventRange::Before(i64::MAX), EVENTS).await;
        page = read.map_err(|error| problem(&error))?;
    }
    let commands = console.backend.commands(&satellite, COMMANDS_SEARCHED).await.map_err(|error| problem(&error))?;
    // Read last, so that nothing on the page is later than its status.
    let found = console.find(&context)?;
    let frame = frame(&console, &context, console.rows.revision());
    let wanted = target(&found);
    let commands = commands.into_iter().filter(|command| is_for(command, &wanted)).take(COMMANDS_SHOWN).collect();
    let shape = ReportedInstanceShape {
        satellite,
        is_connected: found.is_connected,
        state: found.state.clone(),
        row: found.row.clone(),
        commands,
        through: u64::try_from(page.through).unwrap_or(0),
        events: entries(page),
    };
    Ok(reported_instance_page(&shape, &frame))
}

/// Returns true if the command selects the instance.
fn is_for(command: &CommandRecordView, instance: &CommandTarget) -> bool {
    let payload = Value::Object(command.command.payload.clone());
    serde_json::from_value::<CommandTarget>(payload).is_ok_and(|selected| {
        let is = |selected: &Option<String>, own: &Option<String>| selected.is_none() || selected == own;
        selected.installation_id == instance.installation_id
            && is(&selected.team_id, &instance.team_id)
            && is(&selected.user_id, &instance.user_id)
    })
}

fn entries(page: StoredEventPage) -> Vec<EventEntry> {
    page.events.into_iter().filter_map(|(event, satellite)| entry(event, satellite)).collect()
}

/// Query of the page of events.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct FleetEventPageQuery {
    since: Option<u64>,
    before: Option<u64>,
    types: Option<String>,
    satellite: Option<String>,
    instance: Option<String>,
}

async fn events(console: Api, context: RequestContext, query: FleetEventPageQuery) -> Result<Markup, Problem> {
    let FleetEventPageQuery { since, before, types, satellite, instance } = query;
    let query = EventQuery { since, follow: true, types, team: None, instance };
    let filter = filter(&console, query.types.as_deref(), satellite.clone(), query.instance.as_deref())?;
    let id = |number: Option<u64>| number.and_then(|number| i64::try_from(number).ok());
    let range = id(since).map_or(EventRange::Before(id(before).unwrap_or(i64::MAX)), EventRange::After);
    let read = console.backend.events(filter, range, EVENTS).await;
    let mut page = read.map_err(|error| problem(&error))?;
    let later = since.filter(|_| page.has_more).and_then(|_| u64::try_from(page.through).ok());
    if since.is_some() {
        // The list begins with the newest event.
        page.events.reverse();
    }
    let connections = console.backend.connections().await.map_err(|error| problem(&error))?;
    let last =
        page.events.last().filter(|_| page.has_more && later.is_none()).and_then(|(event, _)| event.id.parse().ok());
    let shape = EventsShape {
        query,
        through: u64::try_from(page.through).unwrap_or(0),
        older: last,
        later,
        is_old: before.is_some() || later.is_some(),
        events: entries(page),
        satellites: connections.into_iter().map(|connection| connection.name).collect(),
        satellite,
    };
    Ok(events_page(&shape, &frame(&console, &context, console.rows.revision())))
}

async fn calls(console: Api, context: RequestContext, query: FleetCallQuery) -> Result<Markup, Problem> {
    // Read first: a call that arrives meanwhile is offered as a new one.
    let through = console.backend.last_event().await.map_err(|error| problem(&error))?;
    let connections = console.backend.connections().await.map_err(|error| problem(&error))?;
    let frame = frame(&console, &context, console.rows.revision());
    let found = super::calls::calls(console, context, query.clone()).await?;
    let satellites = connections.into_iter().map(|connection| connection.name).collect();
    Ok(calls_page(&CallsShape { found, query, through, satellites }, &frame))
}

async fn fleet(console: Api, context: RequestContext, _: NoInput) -> Result<Markup, Problem> {
    let frame = frame(&console, &context, console.rows.revision());
    let report = super::fleet(console, context, NoInput {}).await?;
    Ok(fleet_page(&FleetPageShape { report: Ok(report) }, &frame))
}

async fn satellite(console: Api, context: RequestContext, _: NoInput) -> Result<Markup, Problem> {
    let name = context.param("satellite");
    let satellite = console.backend.satellite(name).await.map_err(|error| problem(&error))?;
    let commands = console.backend.commands(name, COMMANDS_SHOWN).await.map_err(|error| problem(&error))?;
    let frame = frame(&console, &context, console.rows.revision());
    Ok(satellite_page(&SatellitePageShape { satellite, commands }, &frame))
}
