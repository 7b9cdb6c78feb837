//! Connected servers are asked whether they are well, in three ways.

use std::time::{Duration, Instant};

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::policy::{DegradedAction, HealthCheck};
use mcp_satellite_actors::model::remote::ServerHealth;
use mcp_satellite_actors::model::status::Status;

use super::GIVE_UP;
use super::peer::{Deed, Expiry, Peer, When};
use super::support::{Fleet, Instance, Remote};

/// Asked often, and given time.
fn watched(remote: Remote, check: HealthCheck) -> Remote {
    remote.policy(|policy| {
        policy.health.check = check;
        policy.health.interval = Duration::from_millis(20);
        policy.health.timeout = GIVE_UP;
    })
}

async fn health(instance: &Instance, health: ServerHealth) {
    instance.until(health.as_str(), |view| view.health == health).await;
}

/// Of its health, what was told.
async fn told(instance: &Instance) -> Vec<String> {
    let story = instance.story().await;
    story.into_iter().filter(|line| line.starts_with("degraded") || line.starts_with("restored")).collect()
}

#[tokio::test]
async fn a_server_is_pinged_over_both_transports() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let instance = fleet.online(watched(remote, HealthCheck::Ping)).await;
        let (before, pinged) = (instance.view().counters.last_check(), peer.seen(|seen| seen.rpc("ping")));
        peer.until("it was pinged", |seen| seen.rpc("ping") >= pinged + 3).await;
        assert_eq!(instance.view().health, ServerHealth::Healthy);
        assert!(instance.view().counters.last_check() > before);
        assert_eq!(peer.seen(|seen| seen.rpc("tools/list")), 1);
        assert_eq!(told(&instance).await, [""; 0]);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_server_that_knows_no_ping_is_asked_for_its_tools_and_pinged_no_more() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.on(When::rpc("ping"), Deed::RpcError { code: -32601, message: "Method not found" });
    let instance = fleet.online(watched(Remote::http(peer.url()), HealthCheck::Ping)).await;
    peer.until("it was asked for its tools", |seen| seen.rpc("tools/list") >= 5).await;
    assert_eq!(peer.seen(|seen| seen.rpc("ping")), 1);
    assert_eq!((instance.view().health, told(&instance).await.len()), (ServerHealth::Healthy, 0));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_server_that_knows_neither_ping_nor_tools_is_well_and_not_asked_without_a_pause() {
    for check in [HealthCheck::Ping, HealthCheck::ToolsList] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        for method in ["ping", "tools/list"] {
            peer.on(When::rpc(method), Deed::RpcError { code: -32601, message: "Method not found" });
        }
        // A check in a while, and a second one a while later.
        let remote = watched(Remote::http(peer.url()), check);
        let instance = fleet.online(remote.policy(|policy| policy.health.interval = Duration::from_millis(500))).await;
        let (before, asked) = (instance.view().counters.last_check(), peer.seen(|seen| seen.rpc("tools/list")));
        peer.until("it was asked for its tools", |seen| seen.rpc("tools/list") >= asked + 2).await;
        let (since, asked) = (Instant::now(), peer.seen(|seen| seen.rpc("tools/list")));
        for _ in 0..20 {
            instance.assert_callable().await;
        }
        let due = usize::try_from(since.elapsed().as_millis() / 450).unwrap() + 2;
        assert!(peer.seen(|seen| seen.rpc("tools/list")) <= asked + due, "asked without a pause");
        assert!(instance.view().counters.last_check() > before);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn the_tools_are_asked_for_where_that_is_configured() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let _instance = fleet.online(watched(Remote::http(peer.url()), HealthCheck::ToolsList)).await;
    peer.until("it was asked for its tools", |seen| seen.rpc("tools/list") >= 4).await;
    assert_eq!(peer.seen(|seen| seen.rpc("ping")), 0);
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_server_that_cannot_list_its_tools_is_not_well_and_an_error_for_a_call_does_not_make_it_so() {
    for check in [HealthCheck::ToolsList, HealthCheck::Ping] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let instance = fleet.online(watched(Remote::http(peer.url()), check)).await;
        for method in ["ping", "tools/list"] {
            peer.on(When::rpc(method), Deed::RpcError { code: -32603, message: "the database is away" });
        }
        health(&instance, ServerHealth::Degraded).await;
        assert_eq!(told(&instance).await, ["degraded (3: server error -32603: the database is away)"]);
        peer.on_next(1, When::tool("echo"), Deed::RpcError { code: -32603, message: "no" });
        assert!(matches!(instance.call("echo").await, Err(CallError::Server { .. })));
        assert_eq!(instance.view().health, ServerHealth::Degraded);
        assert_eq!(told(&instance).await.len(), 1);
        instance.assert_callable().await;
        health(&instance, ServerHealth::Healthy).await;
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_page_is_asked_for_with_the_credentials_and_a_bad_one_is_degraded_until_it_is_good() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = Remote::http(peer.url()).health_url(peer.health_url()).header("authorization", "Bearer t");
    let instance = fleet.online(watched(remote, HealthCheck::Get)).await;
    peer.until("it was asked for", |seen| seen.count(|record| record.path == "/health") >= 2).await;
    peer.seen(|seen| {
        let record = seen.requests.iter().find(|record| record.path == "/health").unwrap();
        assert_eq!(record.header("authorization"), Some("Bearer t"));
        assert_eq!(record.session, None, "it is no part of the session");
    });
    peer.on(When::path("/health"), Deed::status(503));
    health(&instance, ServerHealth::Degraded).await;
    assert_eq!(instance.view().status, Status::Online, "it is told, and nothing else");
    peer.heal().await;
    health(&instance, ServerHealth::Healthy).await;
    let told = told(&instance).await;
    assert_eq!(told.len(), 2);
    assert_eq!(told[0], "degraded (3: the server failed (HTTP 503))");
    assert!(told[1].starts_with("restored ("), "{told:?}");
    assert_eq!(peer.seen(|seen| (seen.rpc("initialize"), seen.rpc("ping"))), (1, 0));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_call_that_succeeds_restores_what_checks_had_found_degraded() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(watched(Remote::http(peer.url()), HealthCheck::Ping)).await;
    peer.on(When::rpc("ping"), Deed::status(500));
    health(&instance, ServerHealth::Degraded).await;
    assert!(instance.runtime.tools(&instance.id).is_some(), "it offers its tools all the same");
    // The next checks fail as well; that is told again after three of them, not before.
    instance.assert_callable().await;
    health(&instance, ServerHealth::Healthy).await;
    let told = told(&instance).await;
    assert_eq!(told[0], "degraded (3: the server failed (HTTP 500))");
    assert!(told[1].starts_with("restored ("), "{told:?}");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_check_that_is_not_answered_in_time_has_failed() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = watched(Remote::http(peer.url()), HealthCheck::Ping);
    let instance = fleet.online(remote.policy(|policy| policy.health.timeout = Duration::from_millis(50))).await;
    peer.on(When::rpc("ping"), Deed::Silence);
    health(&instance, ServerHealth::Degraded).await;
    assert_eq!(told(&instance).await, ["degraded (3: no answer within 0.05 s)"]);
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_server_that_refuses_the_credentials_of_a_check_requires_others() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(watched(Remote::http(peer.url()), HealthCheck::Ping)).await;
    peer.on(When::rpc("ping"), Deed::status(401));
    instance.status(Status::RequiresReauth).await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn what_is_wrong_with_one_callers_request_ends_nobodys_session_but_a_session_that_is_gone_is_found_out_by_it() {
    for (check, asked) in
        [(HealthCheck::Ping, "tools/list"), (HealthCheck::ToolsList, "tools/list"), (HealthCheck::Get, "ping")]
    {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = Remote::http(peer.url()).health_url(peer.health_url());
        let instance = fleet.online(remote.policy(|policy| policy.health.check = check)).await;
        if check == HealthCheck::Ping {
            peer.on(When::rpc("ping"), Deed::status(400));
        }
        let before = peer.seen(|seen| seen.rpc(asked));
        peer.on_next(1, When::tool("echo"), Deed::status(400));
        let refused = instance.call("echo").await;
        assert!(matches!(refused, Err(CallError::Remote { .. })), "{refused:?}");
        peer.until("it was asked whether it knows the session", |seen| seen.rpc(asked) > before).await;
        instance.assert_callable().await;
        assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 1);

        peer.manners(|manners| manners.expiry = Expiry::Plainly);
        peer.forget_sessions();
        let refused = instance.call("read").await;
        assert!(matches!(refused, Err(CallError::Remote { .. })), "{refused:?}");
        let view = instance.status(Status::Offline).await;
        assert_eq!(view.message.as_deref(), Some("Server disconnected: the session has expired (HTTP 400)"));
        assert_eq!(peer.seen(|seen| seen.count(|record| record.tool.as_deref() == Some("read"))), 1);
        instance.assert_callable().await;
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_half_open_connection_is_found_out_by_checks_and_made_anew_where_that_is_wanted() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = watched(Remote::http(peer.url()), HealthCheck::Ping).persistent().policy(|policy| {
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
    let story = instance.story().await;
    let lost = story.iter().position(|line| line.starts_with("degraded")).unwrap();
    let expected = ["degraded (3: no answer within 0.1 s)", "disconnected", "offline", "reconnecting (1 in 50 ms)"];
    assert_eq!(story[lost..lost + 4], expected);
    fleet.finish_untidily(&[&peer]).await;
}

#[tokio::test]
async fn nobody_asks_how_it_is_while_it_is_not_connected() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(watched(Remote::http(peer.url()), HealthCheck::Ping).persistent()).await;
    peer.until("it was pinged", |seen| seen.rpc("ping") >= 1).await;
    peer.close().await;
    instance.status(Status::Offline).await;
    assert_eq!(instance.view().health, ServerHealth::Unknown);
    let since = peer.seen(|seen| seen.requests.len());
    peer.on(When::rpc("initialize"), Deed::status(503));
    peer.open().await;
    peer.until("it was tried", |seen| seen.requests.len() >= since + 3).await;
    peer.seen(|seen| assert!(seen.requests[since..].iter().all(|record| record.rpc.as_deref() == Some("initialize"))));
    let pings = peer.seen(|seen| seen.rpc("ping"));
    peer.heal().await;
    instance.online().await;
    peer.until("it is pinged again", |seen| seen.rpc("ping") > pings).await;
    fleet.finish(&[&peer]).await;
}
