//! Connections that ask for nothing, or show no token, and clients that read nothing: what they take from others.

use std::net::Ipv4Addr;

use serde_json::json;
use tokio::time::{Duration, Instant, timeout};

use super::client::{Client, request};
use super::fake::Stage;

/// Long enough for what happens at once on any machine.
const GIVE_UP: Duration = Duration::from_secs(60);

async fn is_closed(client: &mut Client) -> bool {
    timeout(GIVE_UP, client.rest()).await.is_ok_and(|rest| rest.is_empty())
}

#[tokio::test]
async fn a_connection_without_a_token_is_closed_after_the_header_timeout_and_one_with_a_token_stays() {
    let stage = Stage::new(|settings| settings.limits.header_timeout = Duration::from_millis(300));
    let mut known = Client::initialized(stage.address, "2025-11-25").await;
    let began = Instant::now();
    let mut silent = Client::connect(stage.address).await;
    let mut slow = Client::connect(stage.address).await;
    slow.send_raw(b"POST /mcp HTTP/1.1\r\nhost: localhost\r\n").await;
    // A wrong token is as good as none, and an answer does not give more time.
    let mut stranger = Client::connect(stage.address).await;
    stranger.token = Some("wrong".to_owned());
    assert_eq!(stranger.echo().await, 401);
    for closed in [&mut silent, &mut slow, &mut stranger] {
        assert!(is_closed(closed).await);
    }
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert_eq!(known.echo().await, 200);
}

#[tokio::test]
async fn idle_connections_lock_no_client_out() {
    let stage = Stage::new(|settings| {
        settings.limits.connections_max = 16;
        settings.limits.unauthenticated_max = 8;
        settings.limits.header_timeout = GIVE_UP;
    });
    let mut known = Client::initialized(stage.address, "2025-11-25").await;
    let mut idle = Vec::new();
    for _ in 0..50 {
        idle.push(Client::connect(stage.address).await);
        assert_eq!(known.echo().await, 200);
    }
    let mut newcomer = Client::initialized(stage.address, "2025-11-25").await;
    assert_eq!(newcomer.echo().await, 200);
    // The oldest made room; the youngest are still there.
    for closed in &mut idle[..40] {
        assert!(is_closed(closed).await);
    }
    let youngest = &mut idle[49];
    youngest.begin("2025-11-25").await;
    assert_eq!((youngest.echo().await, known.echo().await), (200, 200));
}

#[tokio::test]
async fn the_limit_of_one_address_does_not_hold_on_loopback() {
    // Every address of 127.0.0.0/8 is loopback; other addresses are tested beside the code.
    let stage = Stage::new(|settings| {
        settings.limits.unauthenticated_per_peer_max = 1;
        settings.limits.header_timeout = GIVE_UP;
    });
    let mut both = Vec::new();
    for _ in 0..2 {
        let own = Ipv4Addr::new(127, 0, 0, 9);
        both.push(Client::try_connect_from(own, stage.address).await.unwrap());
    }
    for client in &mut both {
        client.begin("2025-11-25").await;
    }
}

#[tokio::test]
async fn an_answer_for_which_unread_answers_leave_no_room_is_told_to_be_lost_and_room_comes_back() {
    let stage = Stage::new(|settings| settings.limits.streams_max = 1 << 20);
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    // Each of them is most of what there is, and gone when it is read.
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
