//! The three health checks of connected servers: ping, tools/list, and a GET of a page.

use std::time::{Duration, Instant};

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::policy::{DegradedAction, HealthCheck};
use mcp_satellite_actors::model::remote::ServerHealth;
use mcp_satellite_actors::model::status::Status;
use testkit::wait::GIVE_UP;

use super::peer::{Action, Expiry, Peer, When};
use super::support::{Fleet, Instance, Remote};

/// Adds a check with a short interval and a long timeout.
fn with_health_check(remote: Remote, check: HealthCheck) -> Remote {
    remote.policy(|policy| {
        policy.health.check = check;
        policy.health.interval = Duration::from_millis(20);
        policy.health.timeout = GIVE_UP;
    })
}

async fn health(instance: &Instance, health: ServerHealth) {
    instance.until(health.as_str(), |view| view.health == health).await;
}

async fn health_events(instance: &Instance) -> Vec<String> {
    let timeline = instance.timeline().await;
    timeline.into_iter().filter(|line| line.starts_with("degraded") || line.starts_with("restored")).collect()
}

#[tokio::test]
async fn health_checks_ping_the_server_over_both_transports() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let instance = fleet.online(with_health_check(remote, HealthCheck::Ping)).await;
        let (before, pinged) = (instance.view().counters.last_check(), peer.log(|log| log.rpc("ping")));
        peer.until("pings are received", |log| log.rpc("ping") >= pinged + 3).await;
        assert_eq!(instance.view().health, ServerHealth::Healthy);
        assert!(instance.view().counters.last_check() > before);
        assert_eq!(peer.log(|log| log.rpc("tools/list")), 1);
        assert_eq!(health_events(&instance).await, [""; 0]);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn health_checks_list_the_tools_of_a_server_without_ping() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.on(When::rpc("ping"), Action::RpcError { code: -32601, message: "Method not found" });
    let instance = fleet.online(with_health_check(Remote::http(peer.url()), HealthCheck::Ping)).await;
    peer.until("tools/list is received", |log| log.rpc("tools/list") >= 5).await;
    assert_eq!(peer.log(|log| log.rpc("ping")), 1);
    assert_eq!((instance.view().health, health_events(&instance).await.len()), (ServerHealth::Healthy, 0));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_server_without_ping_and_tools_stays_healthy_and_is_checked_at_intervals() {
    for check in [HealthCheck::Ping, HealthCheck::ToolsList] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        for method in ["ping", "tools/list"] {
            peer.on(When::rpc(method), Action::RpcError { code: -32601, message: "Method not found" });
        }
        // The interval is long enough to count the checks.
        let remote = with_health_check(Remote::http(peer.url()), check);
        let instance = fleet.online(remote.policy(|policy| policy.health.interval = Duration::from_millis(500))).await;
        let (before, listed) = (instance.view().counters.last_check(), peer.log(|log| log.rpc("tools/list")));
        peer.until("tools/list is received", |log| log.rpc("tools/list") >= listed + 2).await;
        let (since, listed) = (Instant::now(), peer.log(|log| log.rpc("tools/list")));
        for _ in 0..20 {
            instance.assert_callable().await;
        }
        let due = usize::try_from(since.elapsed().as_millis() / 450).unwrap() + 2;
        assert!(peer.log(|log| log.rpc("tools/list")) <= listed + due, "checks without a pause");
        assert!(instance.view().counters.last_check() > before);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn the_configured_check_tools_list_sends_no_ping() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let _instance = fleet.online(with_health_check(Remote::http(peer.url()), HealthCheck::ToolsList)).await;
    peer.until("tools/list is received", |log| log.rpc("tools/list") >= 4).await;
    assert_eq!(peer.log(|log| log.rpc("ping")), 0);
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn failing_checks_degrade_an_instance_and_a_failing_call_does_not_restore_it() {
    for check in [HealthCheck::ToolsList, HealthCheck::Ping] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let instance = fleet.online(with_health_check(Remote::http(peer.url()), check)).await;
        for method in ["ping", "tools/list"] {
            peer.on(When::rpc(method), Action::RpcError { code: -32603, message: "the database is away" });
        }
        health(&instance, ServerHealth::Degraded).await;
        assert_eq!(health_events(&instance).await, ["degraded (3: server error -32603: the database is away)"]);
        peer.on_next(1, When::tool("echo"), Action::RpcError { code: -32603, message: "no" });
        assert!(matches!(instance.call("echo").await, Err(CallError::Server { .. })));
        assert_eq!(instance.view().health, ServerHealth::Degraded);
        assert_eq!(health_events(&instance).await.len(), 1);
        instance.assert_callable().await;
        health(&instance, ServerHealth::Healthy).await;
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn the_health_page_is_requested_with_credentials_and_its_failure_degrades() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = Remote::http(peer.url()).health_url(peer.health_url()).header("authorization", "Bearer t");
    let instance = fleet.online(with_health_check(remote, HealthCheck::Get)).await;
    peer.until("the page is requested", |log| log.count(|record| record.path == "/health") >= 2).await;
    peer.log(|log| {
        let record = log.requests.iter().find(|record| record.path == "/health").unwrap();
        assert_eq!(record.header("authorization"), Some("Bearer t"));
        assert_eq!(record.session, None, "the check has a session");
    });
    peer.on(When::path("/health"), Action::status(503));
    health(&instance, ServerHealth::Degraded).await;
    assert_eq!(instance.view().status, Status::Online, "the status changed");
    peer.heal().await;
    health(&instance, ServerHealth::Healthy).await;
    let events = health_events(&instance).await;
    assert_eq!(events.len(), 2);
    assert_eq!(events[0], "degraded (3: the server failed (HTTP 503))");
    assert!(events[1].starts_with("restored ("), "{events:?}");
    assert_eq!(peer.log(|log| (log.rpc("initialize"), log.rpc("ping"))), (1, 0));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_successful_call_restores_a_degraded_instance() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(with_health_check(Remote::http(peer.url()), HealthCheck::Ping)).await;
    peer.on(When::rpc("ping"), Action::status(500));
    health(&instance, ServerHealth::Degraded).await;
    assert!(instance.runtime.tools(&instance.id).is_some(), "the tools are not offered");
    // The next checks fail as well. Three of them in a row cause the next event.
    instance.assert_callable().await;
    health(&instance, ServerHealth::Healthy).await;
    let events = health_events(&instance).await;
    assert_eq!(events[0], "degraded (3: the server failed (HTTP 500))");
    assert!(events[1].starts_with("restored ("), "{events:?}");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_check_without_a_response_in_time_fails() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = with_health_check(Remote::http(peer.url()), HealthCheck::Ping);
    let instance = fleet.online(remote.policy(|policy| policy.health.timeout = Duration::from_millis(50))).await;
    peer.on(When::rpc("ping"), Action::Silence);
    health(&instance, ServerHealth::Degraded).await;
    assert_eq!(health_events(&instance).await, ["degraded (3: no answer within 0.05 s)"]);
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_check_with_status_401_requires_new_credentials() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(with_health_check(Remote::http(peer.url()), HealthCheck::Ping)).await;
    peer.on(When::rpc("ping"), Action::status(401));
    instance.status(Status::RequiresReauth).await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_400_to_a_call_triggers_a_check_that_detects_an_expired_session() {
    for (check, method) in
        [(HealthCheck::Ping, "tools/list"), (HealthCheck::ToolsList, "tools/list"), (HealthCheck::Get, "ping")]
    {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = Remote::http(peer.url()).health_url(peer.health_url());
        let instance = fleet.online(remote.policy(|policy| policy.health.check = check)).await;
        if check == HealthCheck::Ping {
            peer.on(When::rpc("ping"), Action::status(400));
        }
        let before = peer.log(|log| log.rpc(method));
        peer.on_next(1, When::tool("echo"), Action::status(400));
        let refused = instance.call("echo").await;
        assert!(matches!(refused, Err(CallError::Remote { .. })), "{refused:?}");
        peer.until("a check of the session is received", |log| log.rpc(method) > before).await;
        instance.assert_callable().await;
        assert_eq!(peer.log(|log| log.rpc("initialize")), 1);

        peer.configure(|behavior| behavior.expiry = Expiry::EmptyBadRequest);
        peer.forget_sessions();
        let refused = instance.call("read").await;
        assert!(matches!(refused, Err(CallError::Remote { .. })), "{refused:?}");
        let view = instance.status(Status::Offline).await;
        assert_eq!(view.message.as_deref(), Some("Server disconnected: the session has expired (HTTP 400)"));
        assert_eq!(peer.log(|log| log.count(|record| record.tool.as_deref() == Some("read"))), 1);
        instance.assert_callable().await;
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn checks_detect_a_half_open_connection_and_reconnect_if_configured() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = with_health_check(Remote::http(peer.url()), HealthCheck::Ping).persistent().policy(|policy| {
        policy.health.on_degraded = DegradedAction::Reconnect;
        policy.health.timeout = Duration::from_millis(100);
        policy.remote.header_timeout = Duration::from_millis(500);
    });
    let instance = fleet.online(remote).await;
    peer.freeze();
    let view = instance.status(Status::Offline).await;
    assert_eq!(view.message.as_deref(), Some("Server unreachable: 3 health checks in a row have failed"));
    instance.until("tried again", |view| view.attempt.is_some_and(|attempt| attempt >= 2)).await;
    peer.thaw();
    instance.online().await;
    instance.assert_callable().await;
    let timeline = instance.timeline().await;
    let lost = timeline.iter().position(|line| line.starts_with("degraded")).unwrap();
    let expected = ["degraded (3: no answer within 0.1 s)", "disconnected", "offline", "reconnecting (1 in 50 ms)"];
    assert_eq!(timeline[lost..lost + 4], expected);
    fleet.finish_with_overlaps(&[&peer]).await;
}

#[tokio::test]
async fn no_check_is_sent_while_the_instance_is_not_connected() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(with_health_check(Remote::http(peer.url()), HealthCheck::Ping).persistent()).await;
    peer.until("pings are received", |log| log.rpc("ping") >= 1).await;
    peer.close().await;
    instance.status(Status::Offline).await;
    assert_eq!(instance.view().health, ServerHealth::Unknown);
    let since = peer.log(|log| log.requests.len());
    peer.on(When::rpc("initialize"), Action::status(503));
    peer.open().await;
    peer.until("three attempts are received", |log| log.requests.len() >= since + 3).await;
    peer.log(|log| assert!(log.requests[since..].iter().all(|record| record.rpc.as_deref() == Some("initialize"))));
    let pings = peer.log(|log| log.rpc("ping"));
    peer.heal().await;
    instance.online().await;
    peer.until("pings are received again", |log| log.rpc("ping") > pings).await;
    fleet.finish(&[&peer]).await;
}
