//! The first connection to a remote server, and each way in which it fails.

use std::time::Duration;

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds, tenths};
use tokio::time::{Instant, sleep};

use crate::remote_support::{FORBIDDEN, REFUSED, UNAUTHORIZED, event_lines, until_reconnected, waits};

#[tokio::test(start_paused = true)]
async fn a_remote_server_goes_online_without_a_process() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a").script(SimScript { resources: 2, prompts: 1, ..SimScript::default() });
    let remote = fleet.remote(&server.spec.id);
    remote.change(|behavior| behavior.connect_delay = seconds(2.0));
    let id = fleet.add(server).await;
    let view = fleet.until(&id, Status::Connecting).await;
    assert_eq!((view.connection, view.health), (Some(ConnectionState::Connecting), ServerHealth::Unknown));
    until_reconnected(&fleet, &id).await;
    let expected = [
        "provisioning",
        "command_received: waiting for a start permit",
        "connecting: connecting",
        "discovering_tools",
        "syncing_tools",
        "discovered 3 tools",
        "online",
        "started with 3 tools",
    ];
    assert_eq!(event_lines(&fleet, &id).await, expected);
    let started = &fleet.event_data(&id, "mcp.server.started").await[0];
    let reported = (&started["pid"], &started["transport"], &started["spawn_duration_ms"]);
    assert_eq!(reported, (&json!(null), &json!("http"), &json!(2000)));
    let view = fleet.view(&id);
    assert_eq!((view.health, view.pid), (ServerHealth::Healthy, None));
    assert_eq!(
        view.server.as_ref().map(|server| (&*server.name, &*server.protocol)),
        Some(("sim-server", "2025-11-25"))
    );
    let catalogue = view.offered_catalogue().unwrap();
    assert_eq!((catalogue.tools.len(), catalogue.resources.len(), catalogue.prompts.len()), (3, 2, 1));
    assert_eq!(remote.attempts().len(), 1);
    fleet.finish().await;
    assert_eq!(
        (remote.sessions().closed, remote.sessions().open_count()),
        (1, 0),
        "the session is closed with a request"
    );
}

#[tokio::test(start_paused = true)]
async fn each_failure_of_the_first_connection_sets_status_message_and_retry() {
    let timeout = seconds(3.0);
    let error = |status| FailureKind::ServerError { status, retry_after: None };
    let to = Some("https://elsewhere.example".to_owned());
    let redirects = "the server redirects to https://elsewhere.example (HTTP 302), which is not followed: configure that \
                     address";
    let offline = |why: &str| (Status::Offline, format!("Server unreachable: {why}"));
    let broken = |why: &str| (Status::Error, why.to_owned());
    let table = [
        (FailureKind::Dns, offline("the host name cannot be resolved")),
        (REFUSED, offline("connection refused")),
        (FailureKind::ConnectTimeout(timeout), offline("no connection within 3 s")),
        (FailureKind::Tls("unknown issuer".to_owned()), offline("no secure connection: unknown issuer")),
        (FailureKind::Broken("reset".to_owned()), offline("connection broken: reset")),
        (FailureKind::HeaderTimeout(timeout), offline("the server did not begin to respond within 3 s")),
        (FailureKind::Cut, offline("the response ended before it was complete")),
        (FailureKind::Throttled { retry_after: None }, broken("too many requests (HTTP 429)")),
        (error(500), broken("the server failed (HTTP 500)")),
        (error(502), broken("the server failed (HTTP 502)")),
        (FailureKind::Redirected { status: 302, to }, broken(redirects)),
        (FailureKind::from_status(404), broken("there is no MCP server at this address (HTTP 404)")),
        (FailureKind::from_status(418), broken("the server refused the request (HTTP 418)")),
        (
            FailureKind::NotMcp { content_type: Some("text/html".to_owned()) },
            broken("the response is text/html, not MCP; check the address"),
        ),
        (FailureKind::TooLong(100), broken("a message from the server is longer than 100 bytes")),
        (
            FailureKind::ForeignEndpoint { origin: "https://evil.example".to_owned() },
            broken(
                "the server names an endpoint on another origin, https://evil.example; credentials are not sent there",
            ),
        ),
        (FailureKind::BadAddress("no host".to_owned()), broken("the address cannot be used: no host")),
        (FailureKind::UnsupportedTransport, broken("this host has no connector for the transport of the server")),
        (UNAUTHORIZED, (Status::RequiresReauth, "Authentication failed (HTTP 401)".to_owned())),
        (FORBIDDEN, (Status::RequiresReauth, "Access forbidden (HTTP 403)".to_owned())),
    ];
    let fleet = Fleet::start().await;
    for (nth, (kind, (status, message))) in table.into_iter().enumerate() {
        let server = Server::remote(&format!("s{nth}"));
        let remote = fleet.remote(&server.spec.id);
        remote.take_down(kind.clone());
        let id = fleet.add(server).await;
        let view = fleet.until(&id, status).await;
        let shown = view.message.as_deref().unwrap_or_default();
        assert!(shown.starts_with(&message), "{kind:?}: {shown}");
        assert_eq!(view.last_error.as_deref(), Some(&*kind.to_string()));
        if status == Status::RequiresReauth {
            assert_eq!((view.connection, view.next_retry_at), (Some(ConnectionState::Error), None), "{kind:?}");
            sleep(seconds(600.0)).await;
            assert_eq!(remote.attempts().len(), 1, "{kind:?}");
            continue;
        }
        assert_eq!(view.connection, Some(ConnectionState::Reconnecting), "{kind:?}");
        assert_eq!(view.attempt, Some(1), "{kind:?}");
        remote.bring_up();
        until_reconnected(&fleet, &id).await;
        assert_eq!(waits(&remote), [1.0], "{kind:?}");
        assert_eq!(
            fleet.event_data(&id, "mcp.server.started").await.len(),
            1,
            "the first connection is a start: {kind:?}"
        );
        assert!(fleet.event_data(&id, "mcp.server.reconnected").await.is_empty(), "{kind:?}");
        assert!(fleet.event_data(&id, "mcp.server.disconnected").await.is_empty(), "nothing was connected: {kind:?}");
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_handshake_is_an_error_and_a_silent_server_is_offline() {
    let fleet = Fleet::start().await;
    let refusing = SimScript { handshake_error: Some("not today".to_owned()), ..SimScript::default() };
    let foreign = SimScript { protocol_version: Some("1999-01-01".to_owned()), ..SimScript::default() };
    let mute = SimScript { handshake_never: true, ..SimScript::default() };
    let (refused, unknown, silent) = futures::join!(
        fleet.add(Server::remote("a").script(refusing)),
        fleet.add(Server::remote("b").script(foreign)),
        fleet.add(Server::remote("c").script(mute)),
    );
    let view = fleet.until(&refused, Status::Error).await;
    assert_eq!(view.message.as_deref(), Some("handshake failed: server error -32603: not today"));
    let view = fleet.until(&unknown, Status::Error).await;
    let message = "handshake failed: the server speaks protocol version 1999-01-01, which is not supported";
    assert_eq!(view.message.as_deref(), Some(message));
    let began = Instant::now();
    let view = fleet.until(&silent, Status::Offline).await;
    assert_eq!(view.message.as_deref(), Some("Server unreachable: the server did not begin to respond within 30 s"));
    assert_eq!(tenths(began.elapsed()), 30.0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_waits_for_the_first_connection_gets_its_outcome() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a");
    let (id, remote) = (server.spec.id.clone(), fleet.remote(&server.spec.id));
    remote.take_down(FailureKind::ConnectTimeout(seconds(10.0)));
    fleet.add(server).await;
    fleet.until(&id, Status::Connecting).await;
    let began = Instant::now();
    let Err(error) = fleet.call(&id, "echo", json!({"text": 1})).await else {
        panic!("the call succeeded although the server is down")
    };
    let CallError::Reconnecting { next_retry_ms, last_error, .. } = &error else { panic!("{error:?}") };
    assert_eq!((*next_retry_ms, &**last_error), (Some(1000), "no connection within 10 s"));
    assert_eq!(tenths(began.elapsed()), 10.0);

    remote.change(|behavior| (behavior.down, behavior.connect_delay) = (None, Duration::from_secs(5)));
    let answer = fleet.call(&id, "echo", json!({"text": "waited"})).await;
    assert_eq!(answer.unwrap()["structuredContent"]["text"], "waited");
    assert_eq!(tenths(began.elapsed()), 15.0, "the call did not wait for the schedule");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_user_value_prevents_every_connection_attempt() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a").missing("Authorization");
    let remote = fleet.remote(&server.spec.id);
    let id = fleet.add(server.clone()).await;
    let view = fleet.until(&id, Status::AwaitingUserConfig).await;
    assert_eq!(view.connection, Some(ConnectionState::Disconnected));
    sleep(seconds(3600.0)).await;
    assert!(remote.attempts().is_empty());
    let mut given = server.header("Authorization", "Bearer key");
    given.spec.missing.clear();
    fleet.runtime.install(given.spec).await.unwrap();
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}
