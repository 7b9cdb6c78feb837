//! The tools `list_servers` and `reconnect_server`: the states of the caller's servers, and the restart of one.

use std::time::Instant;

use jiff::Timestamp;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::ServerTarget;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use serde::Serialize;

use super::arguments::MetaToolArguments;
use super::caller::CallerSnapshot;
use super::result::structured_result;
use crate::refusal::{CallRefusal, CallTarget};

#[derive(Serialize)]
struct ServerList {
    servers: Vec<ServerEntry>,
}

#[derive(Serialize)]
struct ServerEntry {
    name: String,
    transport: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    status: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    status_message: Option<String>,
    connected: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    connected_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reconnect_attempt: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_retry_ms: Option<u64>,
    health: ServerHealth,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_check_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    consecutive_health_failures: Option<u64>,
    degraded: bool,
    dormant: bool,
    want: RequestedState,
    tool_count: usize,
}

/// Answers `list_servers`. `now` is the monotonic clock of the runtime, `today` the wall clock of the same moment.
pub(super) fn list(
    caller: &CallerSnapshot,
    arguments: Option<&str>,
    now: Instant,
    today: Timestamp,
) -> Result<String, CallRefusal> {
    MetaToolArguments::read(arguments, &[])?;
    let servers = caller.servers().map(|(name, view)| ServerEntry::new(name, view, now, today)).collect();
    Ok(structured_result(&ServerList { servers }))
}

impl ServerEntry {
    fn new(name: &str, view: &InstanceView, now: Instant, today: Timestamp) -> Self {
        let url = match &view.spec.target {
            ServerTarget::Stdio { .. } => None,
            ServerTarget::Remote { url, .. } => Some(view.spec.mask.apply(&redact_url(url))),
        };
        let connected = match view.connection {
            Some(connection) => connection == ConnectionState::Connected,
            None => view.port.is_some(),
        };
        let age = |at: Instant| now.saturating_duration_since(at);
        let connected_at = view.initialized_at.filter(|_| connected).and_then(|at| today.checked_sub(age(at)).ok());
        // The age is exact to the second only.
        let to_seconds = |at: Timestamp| Timestamp::from_second(at.as_second()).ok();
        Self {
            name: name.to_owned(),
            transport: view.spec.transport(),
            url,
            status: view.status,
            status_message: view.message.clone(),
            connected,
            connected_at: connected_at.and_then(to_seconds),
            last_error: view.last_error.clone(),
            reconnect_attempt: view.attempt.filter(|_| !connected),
            next_retry_ms: view.next_retry_at.map(|at| milliseconds(at.saturating_duration_since(now))),
            health: view.health,
            last_check_at: view.counters.last_check(),
            // Processes have no health checks.
            consecutive_health_failures: (connected && view.spec.is_remote()).then(|| view.counters.failed_checks()),
            degraded: view.health == ServerHealth::Degraded,
            dormant: view.dormant,
            want: view.requested_state,
            tool_count: view.offered_catalogue().map_or(0, |catalogue| catalogue.tools.len()),
        }
    }
}

/// Returns a URL without user info, query and fragment, which may contain secrets.
fn redact_url(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

fn milliseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Answers `reconnect_server`; a process is restarted. A server that a person has stopped stays stopped.
pub(super) async fn reconnect(
    runtime: &RuntimeHandle,
    caller: &CallerSnapshot,
    arguments: Option<&str>,
) -> Result<String, CallRefusal> {
    #[derive(Serialize)]
    struct Reconnected {
        success: bool,
        status: Status,
        #[serde(skip_serializing_if = "Option::is_none")]
        status_message: Option<String>,
    }
    let name = MetaToolArguments::read(arguments, &["name"])?.text("name")?;
    let view = caller.server(&name)?;
    if view.requested_state == RequestedState::Stopped {
        return Err(stopped_error(&view.spec.name));
    }
    let target = CallTarget { label: Some(&name), name: &view.spec.name, missing: &view.spec.missing };
    let outcome =
        runtime.reconnect(&view.spec.id).await.map_err(|error| CallRefusal::from_control_error(&error, &target))?;
    let mcp_satellite_actors::ReconnectOutcome { success, status, status_message } = outcome;
    Ok(structured_result(&Reconnected { success, status, status_message }))
}

fn stopped_error(name: &str) -> CallRefusal {
    let message = format!("`{name}` was stopped by a person; `satellite start {name}` starts it");
    let mut refusal = CallRefusal::new("refused", message).with_next_step("Ask the user whether it should run.");
    refusal.state.status = Some(Status::Offline.as_str());
    refusal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_its_secrets() {
        for (url, shown) in [
            ("https://mcp.example/v1/mcp?key=hush", "https://mcp.example/v1/mcp"),
            ("https://me:hush@mcp.example:8443/a@b", "https://mcp.example:8443/a@b"),
            ("http://127.0.0.1:80#hush", "http://127.0.0.1:80"),
            ("nothing", "nothing"),
        ] {
            assert_eq!(redact_url(url), shown);
        }
    }
}
