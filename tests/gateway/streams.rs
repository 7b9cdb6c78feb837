//! What is said before an answer, beside it and without one; and what becomes of a call whose client goes away.

use serde_json::json;
use tokio::time::Duration;

use super::client::{Client, notification, request};
use super::fake::{Seen, Stage};

#[tokio::test]
async fn what_is_said_before_the_answer_makes_it_a_stream() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "chat", json!("x")).to_string()).await;
    let priming = client.event().await.unwrap();
    assert_eq!((priming.data.as_str(), priming.retry), ("", Some(1000)));
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
    let answer = client.event().await.unwrap();
    assert_eq!(answer.json(), json!({"jsonrpc": "2.0", "id": 5, "result": "x"}));
    assert_eq!(client.event().await, None);
    // The connection is good for another request.
    assert_eq!(client.post(&request(6, "echo", json!(1))).await.head.status, 200);
    // What is over is over.
    let mut late = client.again().await;
    assert_eq!(late.ask("GET", &[("last-event-id", &answer.id)], "").await.head.status, 405);
}

#[tokio::test]
async fn an_older_client_gets_no_event_without_data() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-06-18").await;
    client.open("POST", &[], &request(5, "chat", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
}

#[tokio::test]
async fn a_client_that_takes_only_json_hears_the_rest_on_its_get() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut get = client.again().await;
    get.open("GET", &[], "").await;
    assert_eq!(get.event().await.unwrap().id, "0-0");
    let chat = request(5, "chat", json!("x")).to_string();
    let answer = client.ask("POST", &[("accept", "application/json")], &chat).await;
    assert_eq!(answer.json()["result"], "x");
    let event = get.event().await.unwrap();
    assert_eq!((event.id.as_str(), event.json()["params"].as_str()), ("0-1", Some("first")));
}

#[tokio::test]
async fn a_client_that_takes_only_streams_gets_one() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let echo = request(5, "echo", json!("x")).to_string();
    client.open("POST", &[("accept", "text/event-stream")], &echo).await;
    client.event().await.unwrap();
    assert_eq!(client.event().await.unwrap().json()["result"], "x");
    assert_eq!(client.event().await, None);
}

#[tokio::test]
async fn what_nobody_hears_waits_and_the_newest_listener_gets_it() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.post(&notification("shout", json!([3]))).await;
    stage.saw(Seen::Told("shout".into())).await;
    let mut first = client.again().await;
    first.open("GET", &[], "").await;
    let ids: Vec<_> = [first.event().await, first.event().await, first.event().await, first.event().await]
        .map(|event| event.unwrap().id)
        .into();
    assert_eq!(ids, ["0-0", "0-1", "0-2", "0-3"]);
    let mut second = client.again().await;
    second.open("GET", &[("last-event-id", "0-1")], "").await;
    assert_eq!(first.event().await, None, "another has its place");
    assert_eq!(second.event().await.unwrap().id, "0-2");
    assert_eq!(second.event().await.unwrap().id, "0-3");
    client.post(&notification("shout", json!([1]))).await;
    assert_eq!(second.event().await.unwrap().id, "0-4");
}

#[tokio::test]
async fn a_client_that_goes_away_before_anything_was_said_cancels_its_call() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    drop(client);
    stage.saw(Seen::Cancelled("hold".into())).await;
}

#[tokio::test]
async fn a_client_that_could_come_back_and_does_not_cancels_its_call() {
    let mut stage = Stage::new(|settings| settings.resume_grace = Duration::from_millis(50));
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().id, "1-0");
    drop(client);
    stage.saw(Seen::Cancelled("talk".into())).await;
}

#[tokio::test]
async fn a_client_that_comes_back_gets_its_answer() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut back = client.again().await;
    client.open("POST", &[], &request(5, "talk", json!("x")).to_string()).await;
    client.event().await.unwrap();
    let first = client.event().await.unwrap();
    drop(client);
    back.open("GET", &[("last-event-id", &first.id)], "").await;
    stage.release.add_permits(1);
    let answer = back.event().await.unwrap();
    assert_eq!((answer.id.as_str(), answer.json()["id"].as_u64()), ("1-2", Some(5)));
    assert_eq!(back.event().await, None);
    assert!(std::iter::from_fn(|| stage.seen.try_recv().ok()).all(|seen| seen != Seen::Cancelled("talk".into())));
}

#[tokio::test]
async fn a_client_takes_its_request_back_and_its_stream_ends_without_an_answer() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut other = client.again().await;
    for (id, method) in [(5, "talk"), (6, "hold")] {
        client.send("POST", &[], &request(id, method, json!("x")).to_string()).await;
        stage.saw(Seen::Asked(method.into())).await;
        assert_eq!(
            other.post(&notification("notifications/cancelled", json!({"requestId": id}))).await.head.status,
            202
        );
        stage.saw(Seen::Withdrawn(id.to_string())).await;
        let head = client.head().await;
        assert!(head.status == 200 && head.is_stream(), "{head:?}");
        assert!(!client.body(&head).await.contains("result"));
    }
    // What nobody knows of goes the way of any notification.
    other.post(&notification("notifications/cancelled", json!({"requestId": 99}))).await;
    stage.saw(Seen::Told("notifications/cancelled".into())).await;
}

#[tokio::test]
async fn an_id_is_used_once_at_a_time() {
    let mut stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-11-25").await;
    let mut other = client.again().await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    assert_eq!(other.post(&request(5, "echo", json!(1))).await.head.status, 400);
    stage.release.add_permits(1);
    assert_eq!(client.head().await.status, 200);
    assert_eq!(other.post(&request(5, "echo", json!(1))).await.head.status, 200);
}

#[tokio::test]
async fn a_batch_is_answered_in_one_where_the_version_has_batches() {
    let stage = Stage::new(|_| {});
    let mut client = Client::initialized(stage.address, "2025-03-26").await;
    let batch = json!([request(1, "echo", json!("a")), notification("n", json!({})), request(2, "echo", json!("b"))]);
    let answer = client.post(&batch).await;
    let expected = json!([{"jsonrpc": "2.0", "id": 1, "result": "a"}, {"jsonrpc": "2.0", "id": 2, "result": "b"}]);
    assert_eq!((answer.head.status, answer.json()), (200, expected));
    assert_eq!(client.post(&json!([notification("n", json!({}))])).await.head.status, 202);
    let mut newer = Client::initialized(stage.address, "2025-06-18").await;
    assert_eq!(newer.post(&batch).await.head.status, 400);
}
