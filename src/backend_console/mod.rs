//! The console of `satellite backend`: the pages of the satellite's console with what satellites have reported.
//!
//! ```text
//! rows     instances of all satellites in memory, and their changes for the feed
//! streams  instances and events for pages; stored events as a download
//! calls    recorded calls, which satellites deliver as events
//! pages    one handler for each page
//! ```
//!
//! The only login is the admin token. An instance has the name `SATELLITE:INSTANCE`, because satellites with the same
//! configuration have instances of the same name.

mod calls;
mod pages;
mod rows;
mod state;
mod streams;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_backend::server::BackendServer;
use mcp_satellite_backend::server::api::{CommandRequest, SatelliteView};
use mcp_satellite_backend::wire::{CommandPriority, CommandTarget, FleetSatellite};
use mcp_satellite_console::access::{AccessSettings, ConsoleAccess};
use mcp_satellite_console::changes::ApiChange;
use mcp_satellite_console::feed::{InstanceFeeds, StreamLimits};
use mcp_satellite_console::pages::{ConsoleSite, config_is_current};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{NoInput, RequestContext, Routes};
use mcp_satellite_console::v1::{FleetMember, FleetMemberDetails, FleetReport, QueuedCommandReport};
use mcp_satellite_gateway::guard::{GuardError, OriginGuard};
use mcp_satellite_gateway::pages::{EndpointPages, PageConnection, answer};
use serde_json::Value;
use tokio_util::task::AbortOnDropHandle;

use self::rows::{PublishedRows, ReportedRow};
use self::state::{Api, BackendConsole, problem};
use crate::config::Role;
use crate::console::login;
use crate::console::refusals::RefusalCounts;

/// Seconds after which a satellite does not execute a command of the console any more: whoever has pressed a button
/// does not expect it to work hours later.
const COMMAND_LIFETIME: u64 = 600;

/// Serves the console of a backend that will listen at `address`. `hosts` are further host names under which browsers
/// may reach it, for example that of a proxy. Dropping the result stops the updates of the pages.
///
/// # Errors
/// The system provides no random numbers.
pub fn attach(backend: &BackendServer, address: SocketAddr, hosts: Vec<String>) -> io::Result<BackendConsoleTask> {
    let access = ConsoleAccess::new()?;
    access.apply(&AccessSettings {
        is_on: true,
        owner_token: Some(backend.admin_token()),
        ..AccessSettings::default()
    });
    let (rows, updates) = rows::follow(backend.handle());
    let boot = jiff::Timestamp::now().as_millisecond().to_string();
    let published = rows.clone();
    let feeds = InstanceFeeds::new(&boot, move |scope| PublishedRows::new(&published, scope));
    let (backend_handle, url) = (backend.handle(), format!("http://{address}"));
    let (streams, refusals) = (StreamLimits::default(), RefusalCounts::default());
    let bodies = ByteBudget::new(0);
    let console = BackendConsole { access, backend: backend_handle, url, rows, feeds, streams, refusals, bodies };
    let pages = EndpointPages { reject: reject_host, ..endpoint_pages(&Arc::new(console)) };
    let origins = hosts.iter().flat_map(|host| own_origins(host)).collect();
    let guard = Arc::new(OriginGuard { loopback: address.ip().is_loopback(), hosts, origins });
    backend.set_pages(Arc::new(move |peer, request| {
        let (pages, guard) = (pages.clone(), guard.clone());
        Box::pin(async move { answer(&pages, &guard, PageConnection::unlimited(peer), request).await })
    }));
    Ok(BackendConsoleTask { _updates: AbortOnDropHandle::new(tokio::spawn(updates)) })
}

/// Returns the origins of pages from a host, which has any port if none is given.
fn own_origins(host: &str) -> [String; 2] {
    let has_port = host
        .rsplit_once(':')
        .is_some_and(|(_, port)| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()));
    let port = if has_port { "" } else { ":*" };
    ["https", "http"].map(|scheme| format!("{scheme}://{host}{port}"))
}

/// Task that keeps the pages of a backend up to date.
pub struct BackendConsoleTask {
    _updates: AbortOnDropHandle<()>,
}

fn reject_host(_: GuardError, uri: &Uri) -> Response {
    let why = "this Host or Origin is not allowed; start the backend with `--console-host HOST`";
    Problem::new("host_not_allowed", why).at(uri.path()).into_response()
}

fn endpoint_pages(console: &Api) -> EndpointPages {
    let mut routes = Routes::new(Arc::clone(console));
    routes.read("/v1/fleet", Role::Viewer, "Satellites registered at this backend", fleet);
    routes.read("/v1/calls", Role::Viewer, "Calls of all satellites, newest first", calls::calls);
    let change = |path, action, summary| ApiChange::post(path, Role::Operator, action, summary);
    let summary = "Queues a command at the satellite: start the instance";
    routes.change(change("/v1/instances/{instance}/start", "start", summary), start);
    let summary = "Queues a command at the satellite: stop the instance";
    routes.change(change("/v1/instances/{instance}/stop", "stop", summary), stop);
    let summary = "Queues a command at the satellite: restart the instance";
    routes.change(change("/v1/instances/{instance}/restart", "restart", summary), restart);
    streams::add(&mut routes);
    pages::add(&mut routes);
    login::add(&mut routes, console, ConsoleSite::Backend);
    routes.finish()
}

async fn fleet(console: Api, _: RequestContext, _: NoInput) -> Result<FleetReport, Problem> {
    let satellites = console.backend.satellites().await.map_err(|error| problem(&error))?;
    Ok(FleetReport {
        backend: Some(console.url.clone()),
        name: None,
        at: Some(rfc3339(console.backend.now())),
        satellites: satellites.into_iter().map(member).collect(),
    })
}

fn member(view: SatelliteView) -> FleetMember {
    let details = FleetMemberDetails {
        config_is_current: config_is_current(&view),
        satellite_id: view.satellite_id,
        machine: view.system,
        commands_waiting: view.commands_waiting,
        events: view.events,
    };
    let SatelliteView { name, connected, last_contact, version, instances, .. } = view;
    FleetMember {
        satellite: FleetSatellite { name, connected, last_contact, version, instances },
        details: Some(details),
    }
}

async fn start(console: Api, context: RequestContext, _: NoInput) -> Result<QueuedCommandReport, Problem> {
    queue(&console, &context, "spawn").await
}

async fn stop(console: Api, context: RequestContext, _: NoInput) -> Result<QueuedCommandReport, Problem> {
    queue(&console, &context, "kill").await
}

async fn restart(console: Api, context: RequestContext, _: NoInput) -> Result<QueuedCommandReport, Problem> {
    queue(&console, &context, "restart").await
}

/// Queues a command for one instance.
async fn queue(console: &BackendConsole, context: &RequestContext, kind: &str) -> Result<QueuedCommandReport, Problem> {
    let found = console.find(context)?;
    let payload = match serde_json::to_value(target(&found)) {
        Ok(Value::Object(payload)) => payload,
        _ => serde_json::Map::new(),
    };
    let request = CommandRequest {
        id: None,
        command_type: kind.to_owned(),
        priority: CommandPriority::Immediate,
        payload,
        expires_in_seconds: Some(COMMAND_LIFETIME),
        expires_at: None,
    };
    let queued = console.backend.queue(&found.satellite, request).await.map_err(|error| problem(&error))?;
    Ok(QueuedCommandReport { id: queued.command.id, status: queued.state, satellite: found.satellite.clone() })
}

/// Returns the selection of exactly one instance.
fn target(found: &ReportedRow) -> CommandTarget {
    CommandTarget {
        installation_id: found.state.installation_id.clone(),
        team_id: Some(found.state.team_id.clone()),
        user_id: Some(found.state.user_id.clone()),
    }
}
