//! The end of sessions and of the endpoint, and reloads.

use std::io;

use mcp_satellite::actors::model::event::Event;
use mcp_satellite::actors::model::ids::{InstallationId, InstanceId};
use mcp_satellite::config::ListenSetting;
use mcp_satellite::gateway::GatewaySettings;
use mcp_satellite::gateway::endpoint_id::EndpointId;
use serde_json::json;
use tokio::time::Duration;

use super::client::{Client, notification, request};
use super::fake::{FakeEndpoint, HandlerEvent, plan};

#[tokio::test]
async fn a_draining_endpoint_answers_the_request_in_progress() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.drain_timeout = Duration::from_secs(60));
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut other = client.second_connection().await;
    let mut get = client.second_connection().await;
    get.open("GET", &[], "").await;
    get.event().await.unwrap();
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let drained = async {
        endpoint.gateway.drain().await;
    };
    let seen_by_clients = async {
        // Wait until the drain has started and rejects new requests.
        while other.post(&request(6, "echo", json!(1))).await.head.status != 503 {
            tokio::task::yield_now().await;
        }
        endpoint.release.add_permits(1);
        let head = client.head().await;
        assert_eq!(head.status, 200);
        assert!(client.body(&head).await.contains("\"x\""));
        assert_eq!(get.event().await, None);
        assert!(other.try_head().await.is_none());
    };
    tokio::join!(drained, seen_by_clients);
    endpoint.wait_for(HandlerEvent::SessionEnded("drained")).await;
    assert!(tokio::net::TcpStream::connect(endpoint.address).await.is_err());
}

#[tokio::test]
async fn a_draining_endpoint_completes_an_open_stream() {
    let endpoint = FakeEndpoint::new(|settings| settings.limits.drain_timeout = Duration::from_secs(60));
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut other = client.second_connection().await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    let seen_by_clients = async {
        while other.post(&request(6, "echo", json!(1))).await.head.status != 503 {
            tokio::task::yield_now().await;
        }
        endpoint.release.add_permits(1);
        assert_eq!(client.event().await.unwrap().id, "1-0");
        assert_eq!(client.event().await.unwrap().json()["params"], "first");
        assert_eq!(client.event().await.unwrap().json()["result"], "x");
        assert_eq!(client.event().await, None);
    };
    tokio::join!(endpoint.gateway.drain(), seen_by_clients);
}

#[tokio::test]
async fn an_ended_session_sends_an_error_on_its_open_stream() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::connect(endpoint.address).await;
    client.path = "/i/alices/mcp".to_owned();
    client.open_session("2025-11-25").await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().id, "1-0");
    let alices = InstanceId::new("team".into(), "alice".into(), InstallationId::from("alices"));
    endpoint.gateway.end_endpoint_sessions(&EndpointId::Instance(alices));
    endpoint.wait_for(HandlerEvent::RequestDropped("talk".into())).await;
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
    let error = json!({"code": -32000, "message": "the session has ended"});
    assert_eq!(client.event().await.unwrap().json(), json!({"jsonrpc": "2.0", "id": 5, "error": error}));
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn the_drain_timeout_cancels_an_unanswered_call() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.drain_timeout = Duration::from_millis(50));
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    endpoint.gateway.drain().await;
    endpoint.wait_for(HandlerEvent::RequestDropped("hold".into())).await;
}

#[tokio::test]
async fn an_idle_session_ends_unless_a_stream_is_open() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.session_idle = Duration::from_millis(50));
    let client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut get = client.second_connection().await;
    get.open("GET", &[], "").await;
    let _idle = Client::initialized(endpoint.address, "2025-11-25").await;
    endpoint.wait_for(HandlerEvent::SessionEnded("idle")).await;
    assert_eq!(endpoint.gateway.session_count(), 1, "a session with an open stream is not idle");
    drop(get);
    endpoint.wait_for(HandlerEvent::SessionEnded("idle")).await;
    assert_eq!(endpoint.gateway.session_count(), 0);
}

#[tokio::test]
async fn revoking_a_token_ends_its_sessions() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut alice = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut bob = Client::connect(endpoint.address).await;
    bob.token = Some("bob-token".to_owned());
    bob.session =
        bob.post(&super::client::initialize("2025-11-25")).await.head.header("mcp-session-id").map(str::to_owned);
    let mut plan = plan();
    plan.users[0].tokens.remove(0);
    endpoint.access.apply(&plan);
    endpoint.gateway.apply(GatewaySettings::new("test", &plan, endpoint.address), None).unwrap();
    endpoint.wait_for(HandlerEvent::SessionEnded("revoked")).await;
    assert_eq!(alice.post(&request(1, "echo", json!(1))).await.head.status, 401);
    assert_eq!(bob.post(&request(1, "echo", json!(1))).await.head.status, 200);
    assert_eq!(endpoint.gateway.session_count(), 1);
}

#[tokio::test]
async fn an_address_change_keeps_sessions_and_answers_pending_requests() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.drain_timeout = Duration::from_secs(60));
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut idle = client.second_connection().await;
    assert_eq!(idle.echo().await, 200);
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let long = |settings: &mut GatewaySettings| settings.limits.drain_timeout = Duration::from_secs(60);
    endpoint.reload(long, Some(endpoint.bind_other_address())).unwrap();
    let there = endpoint.gateway.address();
    assert!(there.ip() != endpoint.address.ip());
    let mut moved = Client::connect(there).await;
    moved.session.clone_from(&client.session);
    assert_eq!(moved.echo().await, 200);
    // Idle connections are closed, and the old address accepts no new ones.
    assert!(idle.try_head().await.is_none());
    while Client::try_connect(endpoint.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    endpoint.release.add_permits(1);
    let head = client.head().await;
    assert_eq!(head.status, 200);
    assert!(client.body(&head).await.contains("\"x\""));
    assert!(client.try_head().await.is_none());
    endpoint.gateway.drain().await;
    assert!(Client::try_connect(there).await.is_err());
}

#[tokio::test]
async fn after_an_address_change_the_drain_timeout_cancels_pending_calls() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let short = |settings: &mut GatewaySettings| settings.limits.drain_timeout = Duration::from_millis(50);
    endpoint.reload(short, Some(endpoint.bind_other_address())).unwrap();
    endpoint.wait_for(HandlerEvent::RequestDropped("hold".into())).await;
    assert!(client.try_head().await.is_none());
}

#[tokio::test]
async fn binding_an_address_in_use_fails_and_the_endpoint_stays() {
    let endpoint = FakeEndpoint::new(|_| {});
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let error = endpoint.gateway.bind_new_address(ListenSetting::Address(taken.local_addr().unwrap())).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    for same in [
        ListenSetting::Address(endpoint.address),
        ListenSetting::Address(([127, 0, 0, 1], 0).into()),
        ListenSetting::DefaultAddress,
    ] {
        assert!(endpoint.gateway.bind_new_address(same).unwrap().is_none(), "{same:?}");
    }
    endpoint.reload(|_| {}, None).unwrap();
    assert_eq!(endpoint.gateway.address(), endpoint.address);
    assert_eq!(Client::initialized(endpoint.address, "2025-11-25").await.echo().await, 200);
}

#[tokio::test]
async fn a_reload_changes_the_connection_limit() {
    let endpoint = FakeEndpoint::new(|settings| settings.limits.connections_max = 1);
    let mut first = Client::initialized(endpoint.address, "2025-11-25").await;
    assert!(first.second_connection().await.try_head().await.is_none());
    endpoint.reload(|settings| settings.limits.connections_max = 2, None).unwrap();
    let mut second = first.second_connection().await;
    assert_eq!((first.echo().await, second.echo().await), (200, 200));
    assert!(first.second_connection().await.try_head().await.is_none());
    drop(second);
    // The place is free once the endpoint has noticed the closed connection.
    loop {
        let mut third = first.second_connection().await;
        third.send("POST", &[], &request(1, "echo", json!(1)).to_string()).await;
        if third.try_head().await.is_some() {
            break;
        }
    }
}

#[tokio::test]
async fn every_session_end_emits_an_event_with_its_reason() {
    let instance_endpoint =
        |name: &str| EndpointId::Instance(InstanceId::new("team".into(), "alice".into(), InstallationId::from(name)));
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.sessions_per_user_max = 2);
    let public = |client: &Client| client.session.as_deref().unwrap()[..16].to_owned();
    let mut client = Client::connect(endpoint.address).await;
    client.extra.push(("user-agent".to_owned(), "a".repeat(300)));
    client.open_session("2025-11-25").await;
    let Event::ClientConnected { team_id, user_id, session_id, client_type, user_agent, transport } =
        endpoint.events.recv().await.unwrap()
    else {
        panic!("no ClientConnected event")
    };
    assert_eq!((team_id.as_str(), user_id.as_str(), &session_id), ("team", "alice", &public(&client)));
    assert_eq!((client_type.as_str(), transport.as_str()), ("raw/1", "streamable_http"));
    assert_eq!(user_agent, Some("a".repeat(256)));
    for _ in 0..2 {
        client.post(&request(1, "tools/call", json!({}))).await;
    }
    client.ask("DELETE", &[], "").await;
    assert_eq!(endpoint.next_disconnect().await, (public(&client), 2, "closed".into()));

    let first = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut second = Client::connect(endpoint.address).await;
    second.path = "/i/alices/mcp".to_owned();
    second.open_session("2025-11-25").await;
    let third = Client::initialized(endpoint.address, "2025-11-25").await;
    assert_eq!(endpoint.next_disconnect().await, (public(&first), 0, "evicted".into()));
    endpoint.gateway.end_endpoint_sessions(&instance_endpoint("shared"));
    endpoint.gateway.end_endpoint_sessions(&instance_endpoint("alices"));
    assert_eq!(endpoint.next_disconnect().await, (public(&second), 0, "removed".into()));

    endpoint.reload(|settings| settings.limits.session_age_max = Duration::from_millis(1), None).unwrap();
    assert_eq!(endpoint.next_disconnect().await, (public(&third), 0, "age".into()));
    endpoint.reload(|_| {}, None).unwrap();
    let fourth = Client::initialized(endpoint.address, "2025-11-25").await;
    endpoint.reload(|settings| settings.limits.session_idle = Duration::from_millis(1), None).unwrap();
    assert_eq!(endpoint.next_disconnect().await, (public(&fourth), 0, "idle".into()));

    endpoint.reload(|_| {}, None).unwrap();
    let mut slow = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut deaf = slow.second_connection().await;
    deaf.open("GET", &[], "").await;
    slow.post(&notification("shout", json!([64, 1 << 20]))).await;
    assert_eq!(endpoint.next_disconnect().await, (public(&slow), 0, "slow".into()));

    let revoked = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut without = plan();
    without.users[0].tokens.remove(0);
    endpoint.access.apply(&without);
    endpoint.gateway.end_revoked_sessions();
    assert_eq!(endpoint.next_disconnect().await, (public(&revoked), 0, "revoked".into()));
    endpoint.access.apply(&plan());
    let last = Client::initialized(endpoint.address, "2025-11-25").await;
    endpoint.gateway.drain().await;
    assert_eq!(endpoint.next_disconnect().await, (public(&last), 0, "drained".into()));
}
