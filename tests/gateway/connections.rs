//! Idle and unauthenticated connections, and responses that exceed the memory: other clients are not affected.

use std::net::Ipv4Addr;

use serde_json::json;
use testkit::wait::GIVE_UP;
use tokio::time::{Duration, Instant, timeout};

use super::client::{Client, request};
use super::fake::FakeEndpoint;

async fn is_closed(client: &mut Client) -> bool {
    timeout(GIVE_UP, client.read_until_closed()).await.is_ok_and(|rest| rest.is_empty())
}

#[tokio::test]
async fn the_header_timeout_closes_only_connections_without_a_valid_token() {
    let endpoint = FakeEndpoint::new(|settings| settings.limits.header_timeout = Duration::from_millis(300));
    let mut known = Client::initialized(endpoint.address, "2025-11-25").await;
    let began = Instant::now();
    let mut silent = Client::connect(endpoint.address).await;
    let mut slow = Client::connect(endpoint.address).await;
    slow.send_raw(b"POST /mcp HTTP/1.1\r\nhost: localhost\r\n").await;
    // A wrong token counts as none, and a response does not restart the timeout.
    let mut stranger = Client::connect(endpoint.address).await;
    stranger.token = Some("wrong".to_owned());
    assert_eq!(stranger.echo().await, 401);
    for closed in [&mut silent, &mut slow, &mut stranger] {
        assert!(is_closed(closed).await);
    }
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert_eq!(known.echo().await, 200);
}

#[tokio::test]
async fn idle_connections_do_not_lock_clients_out() {
    let endpoint = FakeEndpoint::new(|settings| {
        settings.limits.connections_max = 16;
        settings.limits.unauthenticated_max = 8;
        settings.limits.header_timeout = GIVE_UP;
    });
    let mut known = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut idle = Vec::new();
    for _ in 0..50 {
        idle.push(Client::connect(endpoint.address).await);
        assert_eq!(known.echo().await, 200);
    }
    let mut newcomer = Client::initialized(endpoint.address, "2025-11-25").await;
    assert_eq!(newcomer.echo().await, 200);
    // The oldest were closed; the youngest are still open.
    for closed in &mut idle[..40] {
        assert!(is_closed(closed).await);
    }
    let youngest = &mut idle[49];
    youngest.open_session("2025-11-25").await;
    assert_eq!((youngest.echo().await, known.echo().await), (200, 200));
}

#[tokio::test]
async fn the_per_address_limit_does_not_apply_to_loopback() {
    // Every address of 127.0.0.0/8 is loopback; unit tests cover other addresses.
    let endpoint = FakeEndpoint::new(|settings| {
        settings.limits.unauthenticated_per_peer_max = 1;
        settings.limits.header_timeout = GIVE_UP;
    });
    let mut both = Vec::new();
    for _ in 0..2 {
        let own = Ipv4Addr::new(127, 0, 0, 9);
        both.push(Client::try_connect_from(own, endpoint.address).await.unwrap());
    }
    for client in &mut both {
        client.open_session("2025-11-25").await;
    }
}

#[tokio::test]
async fn a_response_over_the_memory_limit_becomes_an_error_and_memory_is_freed() {
    let endpoint = FakeEndpoint::new(|settings| settings.limits.streams_max = 1 << 20);
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    // Each response needs most of the memory, and frees it when it is read.
    for _ in 0..4 {
        let answer = client.post(&request(1, "echo", json!("x".repeat(700 << 10)))).await;
        assert_eq!(answer.json()["result"].as_str().map(str::len), Some(700 << 10));
    }
    let answer = client.post(&request(7, "echo", json!("x".repeat(2 << 20)))).await;
    assert_eq!((answer.head.status, &answer.json()["id"]), (200, &json!(7)));
    let why = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(why.contains("the request was executed, but its response (") && why.ends_with(" bytes) is lost"), "{why}");
    assert_eq!(client.echo().await, 200);
}
