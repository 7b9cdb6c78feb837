//! Health checks of a connected remote server, and their consequences.

use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite::connect::sim::{SimRemote, SimScript};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::{DegradedAction, HealthCheck, HealthPolicy};
use mcp_satellite_actors::model::remote::ServerHealth;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds};
use tokio::time::{Instant, sleep};

use crate::remote_support::{INTERNAL_ERROR, event_lines_after_start, until_reconnected, until_seen};

fn checked_by(name: &str, check: HealthCheck) -> Server {
    Server::remote(name).policy(|policy| policy.health.check = check)
}

/// Returns the intervals before the first check and between two checks, in seconds.
fn intervals(since: Instant, checks: &[Instant]) -> Vec<f64> {
    let times = [&[since], checks].concat();
    times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()
}

async fn until_health(fleet: &Fleet, id: &InstanceId, health: ServerHealth) {
    fleet.until_view(id, |view| view.health == health).await;
}

fn last_check(fleet: &Fleet, id: &InstanceId) -> Timestamp {
    fleet.view(id).counters.last_check().unwrap()
}

async fn health_event_lines(fleet: &Fleet, id: &InstanceId) -> Vec<String> {
    let event_lines = event_lines_after_start(fleet, id).await;
    event_lines.into_iter().filter(|line| line.starts_with("degraded") || line.starts_with("restored")).collect()
}

#[tokio::test(start_paused = true)]
async fn a_connected_server_is_checked_about_every_two_minutes() {
    let fleet = Fleet::start().await;
    let methods = [(HealthCheck::Ping, "ping"), (HealthCheck::ToolsList, "tools/list"), (HealthCheck::Get, "GET")];
    for (check, method) in methods {
        let id = fleet.online(checked_by(method.trim_start_matches("tools/"), check)).await;
        let (remote, connected, first) = (fleet.remote(&id), Instant::now(), last_check(&fleet, &id));
        let before = remote.received_at(method).len();
        until_seen(&remote, |remote| remote.received_at(method).len() >= before + 20).await;
        let intervals = intervals(connected, &remote.received_at(method)[before..]);
        assert!(intervals.iter().all(|interval| (108.0..=132.1).contains(interval)), "{method}: {intervals:?}");
        assert!(intervals.iter().any(|interval| (interval - intervals[0]).abs() > 1.0), "spread: {intervals:?}");
        let view = fleet.view(&id);
        assert_eq!((view.status, view.health), (Status::Online, ServerHealth::Healthy), "{method}");
        assert!(last_check(&fleet, &id) > first, "the view shows the time of the last check");
        assert_eq!(
            event_lines_after_start(&fleet, &id).await,
            Vec::<String>::new(),
            "{method}: successful checks emit no event"
        );
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_without_ping_is_checked_by_listing_its_tools() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a");
    let remote = fleet.remote(&server.spec.id);
    remote.change(|behavior| behavior.unknown_methods = ["ping"].into());
    let id = fleet.online(server).await;
    let lists = remote.received_at("tools/list").len();
    sleep(seconds(1300.0)).await;
    assert_eq!(remote.received_at("ping").len(), 1, "ping is tried once");
    let more = remote.received_at("tools/list").len() - lists;
    assert!((9..=12).contains(&more), "{more}");
    assert_eq!((fleet.view(&id).health, fleet.view(&id).status), (ServerHealth::Healthy, Status::Online));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn three_failed_checks_degrade_the_health_and_one_success_restores_it() {
    let failures: [fn(&SimRemote); 3] = [
        |remote| remote.change(|behavior| behavior.silent_on = ["ping"].into()),
        |remote| remote.take_down(FailureKind::Refused),
        |remote| remote.take_down(INTERNAL_ERROR),
    ];
    let reasons = ["no answer within 60 s", "connection refused", "the server failed (HTTP 500)"];
    for (cause_failure, reason) in failures.into_iter().zip(reasons) {
        let fleet = Fleet::start().await;
        let id = fleet.online(Server::remote("a")).await;
        let remote = fleet.remote(&id);
        cause_failure(&remote);
        let checks = |count: usize| until_seen(&remote, move |remote| remote.tried_at("ping").len() >= count);
        checks(2).await;
        sleep(seconds(61.0)).await;
        assert_eq!(fleet.view(&id).health, ServerHealth::Healthy, "two failures are not enough: {reason}");
        until_health(&fleet, &id, ServerHealth::Degraded).await;
        checks(6).await;
        sleep(seconds(61.0)).await;
        let view = fleet.view(&id);
        assert_eq!(
            (view.status, view.health),
            (Status::Online, ServerHealth::Degraded),
            "degraded health changes no status"
        );
        assert!(view.offered_catalogue().is_some());
        assert_eq!(view.counters.failed_checks(), 6);
        assert_eq!(health_event_lines(&fleet, &id).await, [format!("degraded after 3: {reason}")]);
        remote.change(|behavior| (behavior.down, behavior.silent_on) = (None, [].into()));
        until_health(&fleet, &id, ServerHealth::Healthy).await;
        let lines = health_event_lines(&fleet, &id).await;
        assert_eq!(lines[1..], [format!("restored after 6: {reason}")]);
        assert_eq!(view.counters.failed_checks(), 0);
        assert_eq!(remote.attempts().len(), 1);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_success_resets_the_count_of_failed_checks() {
    let fleet = Fleet::start().await;
    let id = fleet.online(checked_by("a", HealthCheck::Get)).await;
    let remote = fleet.remote(&id);
    let failure = FailureKind::from_status(503);
    for _ in 0..5 {
        remote.fail_next([failure.clone(), failure.clone()]);
        let before = remote.received_at("GET").len();
        until_seen(&remote, |remote| remote.received_at("GET").len() == before + 3).await;
    }
    assert_eq!(fleet.view(&id).health, ServerHealth::Healthy);
    assert_eq!(health_event_lines(&fleet, &id).await, Vec::<String>::new());
    remote.change(|behavior| behavior.health_failure = Some(failure));
    until_health(&fleet, &id, ServerHealth::Degraded).await;
    remote.change(|behavior| behavior.health_failure = None);
    until_health(&fleet, &id, ServerHealth::Healthy).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_successful_call_restores_degraded_health() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    remote.change(|behavior| behavior.silent_on = ["ping"].into());
    until_health(&fleet, &id, ServerHealth::Degraded).await;
    let (checked, began) = (last_check(&fleet, &id), Instant::now());
    sleep(seconds(1.0)).await;
    assert!(fleet.call(&id, "echo", json!({})).await.is_ok());
    until_health(&fleet, &id, ServerHealth::Healthy).await;
    assert!(began.elapsed() < seconds(2.0), "restored before the next check");
    assert!(last_check(&fleet, &id) > checked);
    assert_eq!(health_event_lines(&fleet, &id).await[1..], ["restored after 3: no answer within 60 s"]);
    // The count starts again: three more checks must fail.
    let checks = remote.tried_at("ping").len();
    until_health(&fleet, &id, ServerHealth::Degraded).await;
    assert_eq!(remote.tried_at("ping").len(), checks + 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn degraded_health_causes_a_reconnect_if_configured() {
    let fleet = Fleet::start().await;
    let closely = HealthPolicy { on_degraded: DegradedAction::Reconnect, ..HealthPolicy::bounded() };
    let id = fleet.online(Server::remote("a").policy(|policy| policy.health = closely)).await;
    let (remote, connected) = (fleet.remote(&id), Instant::now());
    remote.change(|behavior| behavior.silent_on = ["ping"].into());
    let view = fleet.until(&id, Status::Offline).await;
    let took = connected.elapsed().as_secs_f64();
    assert!((3.0 * 32.0 - 15.0..=3.0 * 38.0).contains(&took), "three intervals of 30 s and timeouts of 5 s: {took}");
    let message = "Server unreachable: 3 health checks in a row have failed";
    assert_eq!(view.message.as_deref(), Some(message));
    remote.change(|behavior| behavior.silent_on.clear());
    until_reconnected(&fleet, &id).await;
    assert_eq!(fleet.view(&id).health, ServerHealth::Healthy);
    let expected = [
        "degraded after 3: no answer within 5 s",
        "disconnected",
        &format!("offline: {message}"),
        "attempt 1 in 1000 ms",
        "restored after 3: no answer within 5 s",
        "connecting: Server recovered, re-discovering tools",
    ];
    assert_eq!(event_lines_after_start(&fleet, &id).await[..6], expected);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_check_that_meets_an_expired_session_causes_a_reconnect() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    fleet.remote(&id).expire(404);
    let view = fleet.until(&id, Status::Offline).await;
    assert_eq!(view.message.as_deref(), Some("Server disconnected: the session has expired (HTTP 404)"));
    until_reconnected(&fleet, &id).await;
    assert_eq!(fleet.remote(&id).attempts().len(), 2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_busy_with_a_call_is_still_checked() {
    let fleet = Fleet::start().await;
    let closely = Server::remote("a").policy(|policy| {
        policy.health = HealthPolicy::bounded();
        policy.session.request_timeout = Duration::from_secs(300);
    });
    let id = fleet.online(closely.script(SimScript::default())).await;
    let answer = fleet.call(&id, "sleep", json!({"ms": 200_000})).await;
    assert!(answer.is_ok(), "{answer:?}");
    assert!(fleet.remote(&id).received_at("ping").len() >= 5);
    assert_eq!(event_lines_after_start(&fleet, &id).await, Vec::<String>::new());
    fleet.finish().await;
}
