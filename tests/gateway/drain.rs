//! How sessions and the endpoint end, and what a reload changes.

use std::io;

use mcp_satellite::actors::model::event::Event;
use mcp_satellite::actors::model::ids::{InstallationId, InstanceId};
use mcp_satellite::config::ListenSetting;
use mcp_satellite::gateway::GatewaySettings;
use mcp_satellite::gateway::face::EndpointId;
use serde_json::json;
use tokio::time::Duration;

use super::client::{Client, notification, request};
use super::fake::{Seen, Stage, plan};

#[tokio::test]
async fn what_is_being_answered_when_the_endpoint_stops_is_answered() {
    let mut stage = Stage::new(|settings| settings.limits.drain_timeout = Duration::from_secs(60));
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut other = client.again().await;
    let mut get = client.again().await;
    get.open("GET", &[], "").await;
    get.event().await.unwrap();
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    let drained = async {
        stage.gateway.drain().await;
    };
    let seen_by_clients = async {
        // From some moment on requests are refused.
        while other.post(&request(6, "echo", json!(1))).await.head.status != 503 {
            tokio::task::yield_now().await;
        }
        stage.release.add_permits(1);
        let head = client.head().await;
        assert_eq!(head.status, 200);
        assert!(client.body(&head).await.contains("\"x\""));
        assert_eq!(get.event().await, None);
        assert!(other.try_head().await.is_none());
    };
    tokio::join!(drained, seen_by_clients);
    stage.saw(Seen::Ended("drained")).await;
    assert!(tokio::net::TcpStream::connect(stage.address).await.is_err());
}

#[tokio::test]
async fn a_stream_that_has_begun_when_the_endpoint_stops_has_its_answer() {
    let stage = Stage::new(|settings| settings.limits.drain_timeout = Duration::from_secs(60));
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut other = client.again().await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    let seen_by_clients = async {
        while other.post(&request(6, "echo", json!(1))).await.head.status != 503 {
            tokio::task::yield_now().await;
        }
        stage.release.add_permits(1);
        assert_eq!(client.event().await.unwrap().id, "1-0");
        assert_eq!(client.event().await.unwrap().json()["params"], "first");
        assert_eq!(client.event().await.unwrap().json()["result"], "x");
        assert_eq!(client.event().await, None);
    };
    tokio::join!(stage.gateway.drain(), seen_by_clients);
}

#[tokio::test]
async fn who_waits_on_a_stream_is_told_that_its_session_has_ended() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::connect(stage.address).await;
    client.path = "/i/alices/mcp".to_owned();
    client.begin("2025-11-25").await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().id, "1-0");
    let alices = InstanceId::new("team".into(), "alice".into(), InstallationId::from("alices"));
    stage.gateway.end_endpoint_sessions(&EndpointId::Instance(alices));
    stage.saw(Seen::Cancelled("talk".into())).await;
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
    let error = json!({"code": -32000, "message": "the session has ended"});
    assert_eq!(client.event().await.unwrap().json(), json!({"jsonrpc": "2.0", "id": 5, "error": error}));
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn a_call_that_is_never_answered_does_not_keep_the_endpoint_from_stopping() {
    let mut stage = Stage::new(|settings| settings.limits.drain_timeout = Duration::from_millis(50));
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    stage.gateway.drain().await;
    stage.saw(Seen::Cancelled("hold".into())).await;
}

#[tokio::test]
async fn a_session_that_nobody_uses_ends() {
    let mut stage = Stage::new(|settings| settings.limits.session_idle = Duration::from_millis(50));
    let client = Client::initialized(stage.address, "2025-11-25").await;
    let mut get = client.again().await;
    get.open("GET", &[], "").await;
    let _idle = Client::initialized(stage.address, "2025-11-25").await;
    stage.saw(Seen::Ended("idle")).await;
    assert_eq!(stage.gateway.session_count(), 1, "who listens is not idle");
    drop(get);
    stage.saw(Seen::Ended("idle")).await;
    assert_eq!(stage.gateway.session_count(), 0);
}

#[tokio::test]
async fn a_token_that_is_taken_away_ends_the_sessions_that_it_opened() {
    let mut stage = Stage::new(|_| {});
    let mut alice = Client::initialized(stage.address, "2025-11-25").await;
    let mut bob = Client::connect(stage.address).await;
    bob.token = Some("bob-token".to_owned());
    bob.session =
        bob.post(&super::client::initialize("2025-11-25")).await.head.header("mcp-session-id").map(str::to_owned);
    let mut plan = plan();
    plan.users[0].tokens.remove(0);
    stage.access.apply(&plan);
    stage.gateway.apply(GatewaySettings::new("test", &plan, stage.address), None).unwrap();
    stage.saw(Seen::Ended("revoked")).await;
    assert_eq!(alice.post(&request(1, "echo", json!(1))).await.head.status, 401);
    assert_eq!(bob.post(&request(1, "echo", json!(1))).await.head.status, 200);
    assert_eq!(stage.gateway.session_count(), 1);
}

#[tokio::test]
async fn at_another_address_sessions_go_on_and_who_was_connected_is_answered() {
    let mut stage = Stage::new(|settings| settings.limits.drain_timeout = Duration::from_secs(60));
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut idle = client.again().await;
    assert_eq!(idle.echo().await, 200);
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    let long = |settings: &mut GatewaySettings| settings.limits.drain_timeout = Duration::from_secs(60);
    stage.reload(long, Some(stage.elsewhere())).unwrap();
    let there = stage.gateway.address();
    assert!(there.ip() != stage.address.ip());
    let mut moved = Client::connect(there).await;
    moved.session.clone_from(&client.session);
    assert_eq!(moved.echo().await, 200);
    // Who is connected and asks nothing is let go, and nobody is let in at the old place.
    assert!(idle.try_head().await.is_none());
    while Client::try_connect(stage.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    stage.release.add_permits(1);
    let head = client.head().await;
    assert_eq!(head.status, 200);
    assert!(client.body(&head).await.contains("\"x\""));
    assert!(client.try_head().await.is_none());
    stage.gateway.drain().await;
    assert!(Client::try_connect(there).await.is_err());
}

#[tokio::test]
async fn at_the_old_address_nothing_is_waited_for_longer_than_it_may_take() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    let short = |settings: &mut GatewaySettings| settings.limits.drain_timeout = Duration::from_millis(50);
    stage.reload(short, Some(stage.elsewhere())).unwrap();
    stage.saw(Seen::Cancelled("hold".into())).await;
    assert!(client.try_head().await.is_none());
}

#[tokio::test]
async fn an_address_that_is_taken_is_told_and_the_endpoint_stays_where_it_is() {
    let stage = Stage::new(|_| {});
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let error = stage.gateway.bind_new_address(ListenSetting::Address(taken.local_addr().unwrap())).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    for same in [
        ListenSetting::Address(stage.address),
        ListenSetting::Address(([127, 0, 0, 1], 0).into()),
        ListenSetting::DefaultAddress,
    ] {
        assert!(stage.gateway.bind_new_address(same).unwrap().is_none(), "{same:?}");
    }
    stage.reload(|_| {}, None).unwrap();
    assert_eq!(stage.gateway.address(), stage.address);
    assert_eq!(Client::initialized(stage.address, "2025-11-25").await.echo().await, 200);
}

#[tokio::test]
async fn there_are_so_many_connections_and_a_reload_says_how_many() {
    let stage = Stage::new(|settings| settings.limits.connections_max = 1);
    let mut first = Client::initialized(stage.address, "2025-11-25").await;
    assert!(first.again().await.try_head().await.is_none());
    stage.reload(|settings| settings.limits.connections_max = 2, None).unwrap();
    let mut second = first.again().await;
    assert_eq!((first.echo().await, second.echo().await), (200, 200));
    assert!(first.again().await.try_head().await.is_none());
    drop(second);
    // The place is free when the server has seen the end of it.
    loop {
        let mut third = first.again().await;
        third.send("POST", &[], &request(1, "echo", json!(1)).to_string()).await;
        if third.try_head().await.is_some() {
            break;
        }
    }
}

#[tokio::test]
async fn each_end_of_a_session_is_told_with_its_reason() {
    let endpoint =
        |name: &str| EndpointId::Instance(InstanceId::new("team".into(), "alice".into(), InstallationId::from(name)));
    let mut stage = Stage::new(|settings| settings.limits.sessions_per_user_max = 2);
    let public = |client: &Client| client.session.as_deref().unwrap()[..16].to_owned();
    let mut client = Client::connect(stage.address).await;
    client.extra.push(("user-agent".to_owned(), "a".repeat(300)));
    client.begin("2025-11-25").await;
    let Event::ClientConnected { team_id, user_id, session_id, client_type, user_agent, transport } =
        stage.events.recv().await.unwrap()
    else {
        panic!("it is told that a client has connected")
    };
    assert_eq!((team_id.as_str(), user_id.as_str(), &session_id), ("team", "alice", &public(&client)));
    assert_eq!((client_type.as_str(), transport.as_str()), ("raw/1", "streamable_http"));
    assert_eq!(user_agent, Some("a".repeat(256)));
    for _ in 0..2 {
        client.post(&request(1, "tools/call", json!({}))).await;
    }
    client.ask("DELETE", &[], "").await;
    assert_eq!(stage.disconnected().await, (public(&client), 2, "closed".into()));

    let first = Client::initialized(stage.address, "2025-11-25").await;
    let mut second = Client::connect(stage.address).await;
    second.path = "/i/alices/mcp".to_owned();
    second.begin("2025-11-25").await;
    let third = Client::initialized(stage.address, "2025-11-25").await;
    assert_eq!(stage.disconnected().await, (public(&first), 0, "evicted".into()));
    stage.gateway.end_endpoint_sessions(&endpoint("shared"));
    stage.gateway.end_endpoint_sessions(&endpoint("alices"));
    assert_eq!(stage.disconnected().await, (public(&second), 0, "removed".into()));

    stage.reload(|settings| settings.limits.session_age_max = Duration::from_millis(1), None).unwrap();
    assert_eq!(stage.disconnected().await, (public(&third), 0, "age".into()));
    stage.reload(|_| {}, None).unwrap();
    let fourth = Client::initialized(stage.address, "2025-11-25").await;
    stage.reload(|settings| settings.limits.session_idle = Duration::from_millis(1), None).unwrap();
    assert_eq!(stage.disconnected().await, (public(&fourth), 0, "idle".into()));

    stage.reload(|_| {}, None).unwrap();
    let mut slow = Client::initialized(stage.address, "2025-11-25").await;
    let mut deaf = slow.again().await;
    deaf.open("GET", &[], "").await;
    slow.post(&notification("shout", json!([64, 1 << 20]))).await;
    assert_eq!(stage.disconnected().await, (public(&slow), 0, "slow".into()));

    let revoked = Client::initialized(stage.address, "2025-11-25").await;
    let mut without = plan();
    without.users[0].tokens.remove(0);
    stage.access.apply(&without);
    stage.gateway.end_revoked_sessions();
    assert_eq!(stage.disconnected().await, (public(&revoked), 0, "revoked".into()));
    stage.access.apply(&plan());
    let last = Client::initialized(stage.address, "2025-11-25").await;
    stage.gateway.drain().await;
    assert_eq!(stage.disconnected().await, (public(&last), 0, "drained".into()));
}
