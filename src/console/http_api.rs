//! The HTTP API: `/v1`, its description, and the health of the satellite.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use mcp_satellite_actors::model::actor_tree::ActorReport;
use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_actors::model::ids::TeamId;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{UnansweredCall, UnansweredCalls};
use mcp_satellite_backend::link::BackendStatus;
use mcp_satellite_backend::wire::FleetSatellite;
use mcp_satellite_console::changes::ApiChange;
use mcp_satellite_console::principal::Principal;
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{NoInput, RequestContext, Routes};
use mcp_satellite_console::sse;
use mcp_satellite_console::v1::{
    BudgetReport, CallInput, CallOutput, ConfigurationCheck, ConfigurationError, ConfigurationInput,
    ConfigurationValue, ConfigureInput, FleetMember, FleetReport, InstanceDetails, InstanceOrder, InstancePage,
    InstanceQuery, MachineReport, ProcessEntry, ProcessReport, SandboxReport, SatelliteReport, TeamStatus,
    UnansweredCallEntry, UnansweredCallList, UsageReport, UsageSpan,
};
use mcp_satellite_gateway::pages::EndpointPages;
use mcp_satellite_process::process::TreeProcess;
use mcp_satellite_process::usage::{USAGE_POINT_SPAN, UsagePoint};
use mcp_satellite_store::values::ValueChange;
use mcp_satellite_telemetry::CONTENT_TYPE;

use super::actions::InstanceAction;
use super::api::{
    ConfigureResult, ConsoleFilter, ControlResult, InstanceStatus, MemoryReport, ReconnectResult, ReloadQuery,
    ReloadResult, RequestFailure, ToolEntry, timestamp_of,
};
use super::health::{ANSWER_TIMEOUT, ActorHealth, Probe};
use super::pages;
use super::records;
use super::requests::{Api, Place, SortedPage, find, problem, sorted_page};
use super::state::ConsoleState;
use crate::config::{self, ConfiguredValue, Role};
use crate::connect::isolation::SandboxFinding;
use crate::gateway::clients::ClientStatus;

/// Returns the API and the pages.
pub(crate) fn endpoint_pages(console: &Api) -> EndpointPages {
    let mut routes = Routes::new(Arc::clone(console));
    routes.read("/v1/satellite", Role::Viewer, "Status of the satellite", satellite);
    routes.read("/v1/teams", Role::Viewer, "Teams and their instances", teams);
    routes.read("/v1/instances", Role::Viewer, "Instances, by pages", instances);
    routes.read("/v1/instances/{instance}", Role::Viewer, "One instance", instance);
    routes.read("/v1/instances/{instance}/tools", Role::Viewer, "Tools of an instance", tools);
    routes.read("/v1/clients", Role::Viewer, "Connected MCP clients", clients);
    routes.read("/v1/backend", Role::Viewer, "Connection to the backend", backend);
    routes.read("/v1/fleet", Role::Viewer, "Satellites registered at the backend", fleet);
    routes.read("/v1/machine", Role::Viewer, "Load and memory of the machine", machine);
    routes.read("/v1/tree", Role::Viewer, "The live tree of actors", tree);
    routes.read("/v1/sandboxes", Role::Admin, "Sandbox programs of the machine", sandboxes);
    routes.read("/v1/configuration", Role::Admin, "The configuration as applied, without secrets", configuration);
    routes.read("/v1/instances/{instance}/usage", Role::Viewer, "Memory and CPU of the last hour", usage);
    routes.read("/v1/instances/{instance}/processes", Role::Viewer, "Processes of an instance", processes);
    routes.read("/v1/instances/{instance}/logs", Role::Viewer, "Lines of its log, newest first", records::logs);
    routes.read("/v1/instances/{instance}/calls", Role::Viewer, "Its calls, newest first", records::calls_of);
    routes.read("/v1/calls", Role::Viewer, "Calls of all instances, newest first", records::calls);
    routes.read("/v1/events", Role::Viewer, "Stored events, newest first", records::events);
    let streams = [sse::MEDIA_TYPE, "application/x-ndjson"];
    let summary = "Events as they are stored: server-sent events, or JSON lines";
    routes.respond("/v1/events/stream", Role::Viewer, summary, &streams, records::event_stream);
    let summary = "New lines of its log, as events";
    routes.respond("/v1/instances/{instance}/logs/stream", Role::Viewer, summary, &streams, records::log_stream);
    routes.respond("/metrics", Role::Viewer, "Metrics for Prometheus (OpenMetrics)", &[CONTENT_TYPE], metrics);
    let change = ApiChange::post;
    let of_instance = |path, action, summary| change(path, Role::Operator, action, summary);
    routes.change(of_instance("/v1/instances/{instance}/start", "start", "Starts an instance"), start);
    routes.change(of_instance("/v1/instances/{instance}/stop", "stop", "Stops an instance"), stop);
    routes.change(of_instance("/v1/instances/{instance}/restart", "restart", "Restarts an instance"), restart);
    routes.change(
        of_instance("/v1/instances/{instance}/reconnect", "reconnect", "Reconnects a remote instance"),
        reconnect,
    );
    let calling = of_instance("/v1/instances/{instance}/call", "call", "Calls a tool");
    routes.change(ApiChange { has_large_body: true, is_cancellable: true, ..calling }, call);
    let configuring =
        change("/v1/instances/{instance}/configure", Role::Admin, "configure", "Sets values of an instance");
    routes.change(ApiChange { has_large_body: true, ..configuring }, configure);
    let uninstall_summary = "Removes an instance until the configuration is applied again";
    let uninstalled = change("/v1/instances/{instance}", Role::Admin, "uninstall", uninstall_summary);
    routes.change(ApiChange { method: "DELETE", ..uninstalled }, uninstall);
    let checking = change("/v1/configuration/check", Role::Admin, "check", "Checks a configuration");
    routes.change(ApiChange { has_large_body: true, ..checking }, check);
    routes.change(change("/v1/reload", Role::Admin, "reload", "Reads the configuration files again"), reload);
    let health = Arc::new(ActorHealth::new(console.runtime.clone()));
    pages::add(&mut routes, console, &health);
    routes.probe("/healthz", "Health of the actors", Probe::Health.route(console, &health));
    routes.probe("/readyz", "Readiness for clients", Probe::Readiness.route(console, &health));
    routes.finish()
}

async fn satellite(console: Api, context: RequestContext, _: NoInput) -> Result<SatelliteReport, Problem> {
    let mut satellite = console.satellite_status();
    if context.principal.team.is_some() {
        // Errors of the whole configuration may name servers of other teams.
        satellite.rejected_configuration = None;
    }
    let counts = count_statuses(visible(&console, &context.principal).iter());
    Ok(SatelliteReport { satellite, instances: counts })
}

async fn teams(console: Api, context: RequestContext, _: NoInput) -> Result<Vec<TeamStatus>, Problem> {
    let views = visible(&console, &context.principal);
    let mut teams: BTreeMap<&str, Vec<&Arc<InstanceView>>> = BTreeMap::new();
    for view in &views {
        teams.entry(view.spec.id.team.as_str()).or_default().push(view);
    }
    let describe = |(team_id, views): (&str, Vec<&Arc<InstanceView>>)| {
        let mut users: Vec<String> = views.iter().map(|view| view.spec.user_slug.to_string()).collect();
        users.sort();
        users.dedup();
        TeamStatus {
            team_id: team_id.to_owned(),
            slug: views.first().map(|view| view.spec.team_slug.to_string()).unwrap_or_default(),
            users,
            instances: count_statuses(views.iter().copied()),
        }
    };
    Ok(teams.into_iter().map(describe).collect())
}

pub(super) async fn instances(
    console: Api,
    context: RequestContext,
    query: InstanceQuery,
) -> Result<InstancePage, Problem> {
    let snapshot = console.runtime.snapshot();
    // The own team of a principal that has one: an error names no others.
    let team = records::team_of(&console, &context.principal, query.team.clone())?;
    let filter = ConsoleFilter { team, user: query.user.clone() };
    console.members.check(&filter, &snapshot).map_err(problem)?;
    let statuses = query.status.as_deref().map(read_statuses).transpose()?;
    let matches = |view: &&Arc<InstanceView>| {
        let spec = &view.spec;
        context.principal.sees(spec)
            && filter.matches(spec)
            && query.server.as_ref().is_none_or(|server| spec.server.as_str() == server)
            && query.q.as_ref().is_none_or(|text| spec.name.contains(text))
            && statuses.as_ref().is_none_or(|statuses| statuses.contains(&view.status))
    };
    let place = |view: &Arc<InstanceView>| -> Place {
        let key = match query.sort {
            InstanceOrder::Name => String::new(),
            InstanceOrder::Status => view.status.to_string(),
            InstanceOrder::Since => format!("{:020}", view.since.as_millisecond().max(0)),
            InstanceOrder::Restarts => format!("{:020}", view.restarts),
            InstanceOrder::Calls => format!("{:020}", view.counters.calls()),
        };
        (key, view.spec.name.to_string())
    };
    let found = snapshot.iter().filter(matches).map(|view| (place(view), view)).collect();
    let SortedPage { total, items, next } = sorted_page(found, query.descending, query.cursor.as_deref(), query.limit)?;
    let now = Instant::now();
    let items = items.into_iter().map(|view| console.instance_status(view, now)).collect();
    Ok(InstancePage { total, items, next })
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Unanswered calls in a list.
const UNANSWERED_MAX: usize = 50;

pub(super) async fn instance(console: Api, context: RequestContext, _: NoInput) -> Result<InstanceDetails, Problem> {
    let view = find(&console, &context)?;
    let unanswered_calls = unanswered_calls(&console, &context.principal, &view).await;
    let (snapshot, now) = (console.runtime.snapshot(), Instant::now());
    let view = snapshot.get(&view.spec.id).cloned().unwrap_or(view);
    let budget = view.restart_budget(now);
    Ok(InstanceDetails {
        instance: console.instance_status(&view, now),
        revision: snapshot.revision(),
        budget: BudgetReport {
            exits_max: budget.exits_max,
            window_ms: milliseconds(budget.window),
            exits_ms_ago: budget.exit_ages.iter().copied().map(milliseconds).collect(),
            remaining: budget.remaining(),
        },
        unanswered_calls,
    })
}

/// Returns the unanswered calls of an instance; `None` if the principal may not read its calls. A read of other users'
/// calls is recorded.
async fn unanswered_calls(console: &ConsoleState, who: &Principal, view: &InstanceView) -> Option<UnansweredCallList> {
    if !who.reads_calls_of(&view.spec) {
        return None;
    }
    let UnansweredCalls { total, newest } = view.unanswered_calls(UNANSWERED_MAX, ANSWER_TIMEOUT).await;
    if !newest.is_empty() {
        records::record_read(console, who, "read_calls", Some(view));
    }
    let now = Instant::now();
    let entry = |UnansweredCall { id, method, tool, client, since }| UnansweredCallEntry {
        request_id: id,
        method,
        tool,
        user: view.spec.user_slug.to_string(),
        client,
        since: rfc3339(timestamp_of(since)),
        duration_ms: milliseconds(now.saturating_duration_since(since)),
    };
    Some(UnansweredCallList { total, newest: newest.into_iter().map(entry).collect() })
}

pub(super) async fn usage(console: Api, context: RequestContext, _: NoInput) -> Result<UsageReport, Problem> {
    let view = find(&console, &context)?;
    let span = |point: UsagePoint| UsageSpan { rss_bytes: point.rss_bytes, cpu_percent: point.cpu_percent };
    let points = console.usage.series(&view.spec.id).into_iter().map(|point| point.map(span)).collect();
    Ok(UsageReport { point_seconds: USAGE_POINT_SPAN.as_secs(), points })
}

pub(super) async fn processes(
    console: Api,
    context: RequestContext,
    _: NoInput,
) -> Result<Option<ProcessReport>, Problem> {
    let view = find(&console, &context)?;
    let Some(pid) = view.pid else { return Ok(None) };
    let connector = console.connector.clone();
    // Reads files of the kernel, which would block an async thread.
    let tree = tokio::task::spawn_blocking(move || connector.process_tree(pid)).await;
    let tree = tree.map_err(|error| Problem::new("closing", error.to_string()))?;
    Ok(tree.map(|tree| ProcessReport {
        contained_by: tree.mechanism.to_owned(),
        container: tree.cgroup,
        processes: tree.processes.into_iter().map(process_entry).collect(),
    }))
}

fn process_entry(process: TreeProcess) -> ProcessEntry {
    ProcessEntry {
        pid: process.pid,
        parent_pid: process.parent_pid,
        name: process.name,
        state: process.state.to_string(),
        rss_bytes: process.rss_bytes,
        cpu_seconds: process.cpu_seconds,
    }
}

async fn tools(console: Api, context: RequestContext, _: NoInput) -> Result<Vec<ToolEntry>, Problem> {
    Ok(ToolEntry::all_of(&*find(&console, &context)?))
}

pub(super) async fn clients(console: Api, context: RequestContext, _: NoInput) -> Result<Vec<ClientStatus>, Problem> {
    let team = context.principal.team.map(|team| {
        let snapshot = console.runtime.snapshot();
        let slug = snapshot.iter().find(|view| view.spec.id.team.as_str() == team);
        slug.map_or(team, |view| view.spec.team_slug.to_string())
    });
    let clients = console.endpoint.clients();
    Ok(clients.into_iter().filter(|client| team.as_ref().is_none_or(|team| client.team == *team)).collect())
}

async fn backend(console: Api, _: RequestContext, _: NoInput) -> Result<Option<BackendStatus>, Problem> {
    Ok(console.satellite_status().backend)
}

/// Kind of the problem that the backend causes.
pub(super) const BACKEND_PROBLEM: &str = "backend";

pub(super) async fn fleet(console: Api, context: RequestContext, _: NoInput) -> Result<FleetReport, Problem> {
    if context.principal.team.is_some() {
        return Err(Problem::new("forbidden", "the fleet contains all teams; this token has one team"));
    }
    let (mut at, mut satellites) = (None, Vec::new());
    if let Some(link) = &console.link {
        let list = link.fleet().await.map_err(|error| Problem::new(BACKEND_PROBLEM, error.to_string()))?;
        at = Some(rfc3339(list.server_time));
        let member = |satellite: &FleetSatellite| FleetMember { satellite: satellite.clone(), details: None };
        satellites = list.satellites.iter().map(member).collect();
    }
    let backend = console.link.as_ref().map(|link| link.url().to_owned());
    Ok(FleetReport { backend, name: Some(console.name.clone()), at, satellites })
}

async fn machine(console: Api, _: RequestContext, _: NoInput) -> Result<MachineReport, Problem> {
    let memory = MemoryReport::from_status(console.runtime.memory());
    let monitor = console.machine.clone();
    let load = tokio::task::spawn_blocking(move || monitor.measure()).await;
    Ok(MachineReport { memory, load: load.map_err(|error| Problem::new("closing", error.to_string()))? })
}

pub(super) async fn tree(console: Api, context: RequestContext, _: NoInput) -> Result<ActorReport, Problem> {
    let mut root = console.runtime.describe(ANSWER_TIMEOUT).await;
    if let Some(team) = &context.principal.team {
        let id = console.members.team_id(team, &console.runtime.snapshot());
        let is_own = |report: &ActorReport| {
            report.team_id.as_ref().map(TeamId::as_str) == id.as_deref() || report.team_id.is_none()
        };
        root.children.retain(is_own);
    }
    Ok(root)
}

async fn metrics(console: Api, context: RequestContext, _: NoInput) -> Result<Response, Problem> {
    check_all_teams(&context)?;
    let text = console.metrics.scrape().await.map_err(|error| Problem::new("closing", error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}

async fn sandboxes(console: Api, context: RequestContext, _: NoInput) -> Result<Vec<SandboxReport>, Problem> {
    check_all_teams(&context)?;
    let report = |SandboxFinding { sandbox, usable }| SandboxReport {
        name: sandbox.to_owned(),
        usable: usable.is_ok(),
        detail: usable.map_or_else(|why| why, |path| path.display().to_string()),
    };
    Ok(console.connector.sandboxes().await.into_iter().map(report).collect())
}

/// Checks that the principal may read and change what concerns all teams.
fn check_all_teams(context: &RequestContext) -> Result<(), Problem> {
    match &context.principal.team {
        None => Ok(()),
        Some(_) => Err(Problem::new("forbidden", "this concerns all teams; this token or user has one team")),
    }
}

/// Reads statuses with commas between them.
fn read_statuses(text: &str) -> Result<Vec<Status>, Problem> {
    let read = |name: &str| {
        Status::ALL.iter().copied().find(|status| status.as_str() == name.trim()).ok_or_else(|| {
            let known: Vec<&str> = Status::ALL.iter().map(|status| status.as_str()).collect();
            let why = format!("there is no status `{}`; use {}", name.trim().escape_debug(), known.join(", "));
            Problem::new("bad_input", why)
        })
    };
    text.split(',').map(read).collect()
}

async fn configuration(console: Api, context: RequestContext, _: NoInput) -> Result<Vec<ConfigurationValue>, Problem> {
    check_all_teams(&context)?;
    let applied = console.applied.lock().await;
    let values = applied.files.configured_values(&applied.origin);
    drop(applied);
    let value =
        |ConfiguredValue { path, value, source }| ConfigurationValue { path, value, source: source.to_string() };
    Ok(values.into_iter().map(value).collect())
}

async fn start(console: Api, context: RequestContext, _: NoInput) -> Result<ControlResult, Problem> {
    console.control(&*find(&console, &context)?, InstanceAction::Start).await.map_err(problem)
}

async fn stop(console: Api, context: RequestContext, _: NoInput) -> Result<ControlResult, Problem> {
    console.control(&*find(&console, &context)?, InstanceAction::Stop).await.map_err(problem)
}

pub(super) async fn restart(console: Api, context: RequestContext, _: NoInput) -> Result<ControlResult, Problem> {
    console.control(&*find(&console, &context)?, InstanceAction::Restart).await.map_err(problem)
}

async fn reconnect(console: Api, context: RequestContext, _: NoInput) -> Result<ReconnectResult, Problem> {
    console.reconnect(&*find(&console, &context)?).await.map_err(problem)
}

async fn call(console: Api, context: RequestContext, input: CallInput) -> Result<CallOutput, Problem> {
    let view = find(&console, &context)?;
    check_acting(&context, &view)?;
    let since = Instant::now();
    let timeout = input.timeout_ms.map(Duration::from_millis);
    let result = console.call(&view, &input.tool, input.arguments, timeout).await.map_err(problem)?;
    Ok(CallOutput { result, duration_ms: milliseconds(since.elapsed()) })
}

/// Checks that the principal may call tools in the name of the instance's user.
pub(super) fn check_acting(context: &RequestContext, view: &InstanceView) -> Result<(), Problem> {
    let why = || {
        format!(
            "`{}` is a server of {}/{}; a call in the name of another user needs the grant `act_as`",
            view.spec.name, view.spec.team_slug, view.spec.user_slug
        )
    };
    context.principal.acts_for(&view.spec).then_some(()).ok_or_else(|| Problem::new("forbidden", why()))
}

pub(super) async fn configure(
    console: Api,
    context: RequestContext,
    input: ConfigureInput,
) -> Result<ConfigureResult, Problem> {
    let view = find(&console, &context)?;
    let set = input.set.into_iter().map(|(key, text)| (key, text.into())).collect();
    console.configure(&view, ValueChange { set, unset: input.unset }).await.map_err(problem)
}

async fn uninstall(console: Api, context: RequestContext, _: NoInput) -> Result<InstanceStatus, Problem> {
    let view = find(&console, &context)?;
    let status = InstanceStatus::from_view(&view, None, Instant::now());
    console.runtime.uninstall(&view.spec.id).await.map_err(|error| Problem::from(RequestFailure::from(error)))?;
    console.endpoint.remove_instance(&view.spec.id);
    Ok(status)
}

async fn check(
    console: Api,
    context: RequestContext,
    input: ConfigurationInput,
) -> Result<ConfigurationCheck, Problem> {
    check_all_teams(&context)?;
    // Paths of the text are relative to the folder of the file in use.
    let name = console.applied.lock().await.files.origin.main_file().unwrap_or("satellite.toml").to_owned();
    let checked = tokio::task::spawn_blocking(move || {
        // References to variables and files are those of the satellite's own machine.
        config::parse(&name, &input.text, &|name| std::env::var(name).ok())
    });
    let checked = checked.await.map_err(|error| Problem::new("closing", error.to_string()))?;
    Ok(match checked {
        Ok(plan) => ConfigurationCheck { valid: true, errors: Vec::new(), warnings: plan.warnings },
        Err(errors) => {
            let errors = errors.items().into_iter().map(|item| ConfigurationError {
                line: item.line,
                column: item.column,
                message: item.message,
                hint: item.hint,
            });
            ConfigurationCheck { valid: false, errors: errors.collect(), warnings: Vec::new() }
        }
    })
}

async fn reload(console: Api, context: RequestContext, query: ReloadQuery) -> Result<ReloadResult, Problem> {
    check_all_teams(&context)?;
    console.reload(query.accept).await.map_err(problem)
}

fn visible(console: &ConsoleState, principal: &Principal) -> Vec<Arc<InstanceView>> {
    let sees = |spec: &InstanceSpec| principal.sees(spec);
    console.runtime.snapshot().iter().filter(|view| sees(&view.spec)).cloned().collect()
}

fn count_statuses<'a>(views: impl Iterator<Item = &'a Arc<InstanceView>>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for view in views {
        *counts.entry(view.status.to_string()).or_default() += 1;
    }
    counts
}
