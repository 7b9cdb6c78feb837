//! Helpers of the tests of remote instances: failures, attempts, and their events as text lines.

use std::time::Duration;

use mcp_satellite::connect::sim::{SimHandshake, SimRemote};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use serde_json::Value;
use testkit::fleet::{Fleet, tenths};
use tokio::time::timeout;

pub(crate) const REFUSED: FailureKind = FailureKind::Refused;
pub(crate) const UNAUTHORIZED: FailureKind = FailureKind::Unauthorized { challenge: None };
pub(crate) const FORBIDDEN: FailureKind = FailureKind::Forbidden { challenge: None };
pub(crate) const INTERNAL_ERROR: FailureKind = FailureKind::ServerError { status: 500, retry_after: None };

/// Returns the seconds from the end of each attempt to the start of the next, rounded to tenths.
pub(crate) fn waits(remote: &SimRemote) -> Vec<f64> {
    let attempts = remote.attempts();
    attempts.windows(2).map(|pair| tenths(pair[1].began - pair[0].ended.unwrap())).collect()
}

/// A virtual day: longer than anything that these tests wait for.
pub(crate) const DAY: Duration = Duration::from_secs(24 * 3600);

/// Waits until the condition on the endpoint is true.
pub(crate) async fn until_seen(remote: &SimRemote, wanted: impl FnMut(&SimRemote) -> bool) {
    assert!(timeout(DAY, remote.wait_until(wanted)).await.is_ok(), "{:?}", remote.attempts());
}

/// Waits until this many attempts have begun and the last of them has ended.
pub(crate) async fn until_attempts(remote: &SimRemote, count: usize) {
    let is_over = |attempts: &[SimHandshake]| attempts.len() >= count && attempts[count - 1].ended.is_some();
    until_seen(remote, |remote| is_over(&remote.attempts())).await;
}

/// Waits until an attempt is in progress.
pub(crate) async fn until_attempting(remote: &SimRemote) {
    until_seen(remote, |remote| remote.attempts().last().is_some_and(|attempt| attempt.ended.is_none())).await;
}

pub(crate) fn waits_for_next_attempt(view: &InstanceView) -> bool {
    view.next_retry_at.is_some() && view.port.is_none()
}

/// Returns the events of an instance as text lines, without those of calls.
pub(crate) async fn event_lines(fleet: &Fleet, id: &InstanceId) -> Vec<String> {
    fleet.events_of(id).await.iter().filter_map(event_line).collect()
}

/// Returns the `event_lines` after the first start.
pub(crate) async fn event_lines_after_start(fleet: &Fleet, id: &InstanceId) -> Vec<String> {
    let event_lines = event_lines(fleet, id).await;
    let started = event_lines.iter().position(|event_line| event_line.starts_with("started")).unwrap();
    event_lines[started + 1..].to_vec()
}

fn event_line(event: &Value) -> Option<String> {
    let data = &event["data"];
    let text = |key: &str| match &data[key] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some(match event["type"].as_str().unwrap() {
        "mcp.server.status_changed" => match &data["status_message"] {
            Value::Null => text("status"),
            _ => format!("{}: {}", text("status"), text("status_message")),
        },
        "mcp.server.started" => format!("started with {} tools", text("tool_count")),
        "mcp.server.disconnected" if data["was_intentional"] == true => "disconnected as intended".to_owned(),
        "mcp.server.disconnected" => "disconnected".to_owned(),
        "mcp.server.reconnecting" => format!("attempt {} in {} ms", text("attempt"), text("next_retry_ms")),
        "mcp.server.reconnected" => format!("reconnected at attempt {}", text("attempts_taken")),
        "mcp.server.health_degraded" => {
            format!("degraded after {}: {}", text("consecutive_failures"), text("last_error"))
        }
        "mcp.server.health_restored" => {
            format!("restored after {}: {}", text("consecutive_failures"), text("last_error"))
        }
        "mcp.tools.discovered" => format!("discovered {} tools", text("tool_count")),
        "mcp.tools.updated" => format!("updated +{} -{}", text("added_tools"), text("removed_tools")),
        "mcp.tool.executed" | "mcp.request.logs" => return None,
        other => other.to_owned(),
    })
}

/// Waits until the instance is online and asserts that it is connected.
pub(crate) async fn until_reconnected(fleet: &Fleet, id: &InstanceId) {
    let view = fleet.until(id, Status::Online).await;
    assert_eq!(view.connection, Some(ConnectionState::Connected));
}

/// Kills the server, waits until the loss is detected, and until the first scheduled attempt has failed.
pub(crate) async fn lose_connection(fleet: &Fleet, id: &InstanceId) {
    let remote = fleet.remote(id);
    let attempts = remote.attempts().len();
    remote.kill(REFUSED);
    remote.report_session_lost(REFUSED);
    fleet.until(id, Status::Offline).await;
    until_attempts(&remote, attempts + 1).await;
    fleet.until_view(id, |view| view.attempt == Some(2)).await;
}
