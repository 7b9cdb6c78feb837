//! How sessions and the endpoint end.

use mcp_satellite::gateway::Settings;
use serde_json::json;
use tokio::time::Duration;

use super::client::{Client, request};
use super::fake::{Seen, Stage, plan};

#[tokio::test]
async fn what_is_being_answered_when_the_endpoint_stops_is_answered() {
    let mut stage = Stage::new(|settings| settings.drain_timeout = Duration::from_secs(60));
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
async fn a_call_that_is_never_answered_does_not_keep_the_endpoint_from_stopping() {
    let mut stage = Stage::new(|settings| settings.drain_timeout = Duration::from_millis(50));
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    stage.gateway.drain().await;
    stage.saw(Seen::Cancelled("hold".into())).await;
}

#[tokio::test]
async fn a_session_that_nobody_uses_ends() {
    let mut stage = Stage::new(|settings| settings.limits.idle = Duration::from_millis(50));
    let client = Client::initialized(stage.address, "2025-11-25").await;
    let mut get = client.again().await;
    get.open("GET", &[], "").await;
    let _idle = Client::initialized(stage.address, "2025-11-25").await;
    stage.saw(Seen::Ended("idle")).await;
    assert_eq!(stage.gateway.sessions(), 1, "who listens is not idle");
    drop(get);
    stage.saw(Seen::Ended("idle")).await;
    assert_eq!(stage.gateway.sessions(), 0);
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
    stage.gateway.apply(Settings::new("test", &plan, stage.address), None).unwrap();
    stage.saw(Seen::Ended("revoked")).await;
    assert_eq!(alice.post(&request(1, "echo", json!(1))).await.head.status, 401);
    assert_eq!(bob.post(&request(1, "echo", json!(1))).await.head.status, 200);
    assert_eq!(stage.gateway.sessions(), 1);
}
