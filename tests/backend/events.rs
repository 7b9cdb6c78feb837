//! Events: each is stored once.

use futures::future::join_all;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{SCHEMAS, Satellite, TestBackend, numbered, status};

/// One event of each type, from a snapshot of the actors' tests.
pub(crate) fn one_of_each() -> Vec<Value> {
    let printed = include_str!("../../actors/tests/snapshots/events__every_event_serializes_as_in_the_snapshot.snap");
    let (_, printed) = printed.split_once("expression: text\n---\n").unwrap();
    let events = serde_json::Deserializer::from_str(printed).into_iter().collect::<Result<Vec<Value>, _>>().unwrap();
    assert_eq!(events.len(), SCHEMAS.event_types(), "one sample per type");
    events
}

fn ids(accepted: &Value) -> Vec<&str> {
    accepted["event_ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect()
}

#[tokio::test]
async fn events_of_every_type_are_stored_unchanged() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let events = one_of_each();
    let accepted = backend.send(&satellite, "1", &events).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(
        (&accepted["success"], &accepted["processed"], &accepted["failed"]),
        (&json!(true), &json!(events.len()), &json!(0))
    );
    let stored = backend.events(&format!("satellite={}", satellite.id)).await;
    for (stored, sent) in stored.iter().zip(&events) {
        for member in ["seq", "type", "timestamp", "data"] {
            assert_eq!(stored[member], sent[member]);
        }
    }
    assert_eq!(stored.len(), events.len());
    assert_eq!(ids(&accepted), stored.iter().map(|event| event["id"].as_str().unwrap()).collect::<Vec<_>>());
}

#[tokio::test]
async fn an_unknown_or_incomplete_event_is_reported_and_the_others_are_stored() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let mut unknown = status(2, "a", "online");
    unknown["type"] = json!("mcp.server.danced");
    let mut incomplete = status(3, "a", "online");
    incomplete["data"].as_object_mut().unwrap().remove("team_id");
    let elsewhere = status(5, "a", "asleep");
    let mut new = status(6, "a", "offline");
    new["data"]["from_the_future"] = json!([1, 2]);
    let batch = [status(1, "a", "connecting"), unknown, incomplete, status(4, "a", "online"), elsewhere, new];
    let accepted = backend.send(&satellite, "1", &batch).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(
        (&accepted["success"], &accepted["processed"], &accepted["failed"]),
        (&json!(false), &json!(3), &json!(3))
    );
    let failures = accepted["failures"].as_array().unwrap();
    let named: Vec<_> = failures.iter().map(|failure| (failure["index"].as_u64().unwrap(), &failure["type"])).collect();
    let changed = json!("mcp.server.status_changed");
    assert_eq!(named, [(1, &json!("mcp.server.danced")), (2, &changed), (4, &changed)]);
    for (failure, says) in failures.iter().zip(["unknown type", "team_id", "/data/status"]) {
        assert!(failure["error"].as_str().unwrap().contains(says), "{failure}");
    }
    assert_eq!(backend.seqs(&satellite).await, [1, 4, 6]);
}

#[tokio::test]
async fn a_batch_with_a_malformed_event_is_rejected_as_a_whole_with_its_index() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    for at in [0, 50, 99] {
        for (member, value) in [
            ("seq", json!(0)),
            ("type", json!("Not A Type")),
            ("timestamp", json!("2026-11-21 06:33")),
            ("timestamp", json!(1_763_706_780)),
            ("data", json!([])),
        ] {
            let mut batch = numbered(1..=100);
            batch[at][member] = value;
            let answer = backend.send(&satellite, "1", &batch).await;
            let index = answer.refused(400, &format!("/events/{at}/{member}"));
            assert_eq!(index, Some(at as u64));
        }
        let mut batch = numbered(1..=100);
        batch[at] = json!("no event");
        assert_eq!(backend.send(&satellite, "1", &batch).await.refused(400, "/events"), Some(at as u64));
    }
    assert!(backend.seqs(&satellite).await.is_empty());
}

#[tokio::test]
async fn a_batch_has_one_to_a_hundred_events() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.send(&satellite, "1", &[]).await.refused(400, "/events");
    backend.send(&satellite, "2", &numbered(1..=101)).await.refused(400, "/events");
    let accepted = backend.send(&satellite, "3", &numbered(1..=100)).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(accepted["processed"], 100);
    backend.send(&satellite, "4", &numbered([101])).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(backend.seqs(&satellite).await, (1..=101).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_repeated_batch_gets_the_same_response_and_is_stored_once() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let mut batch = numbered(1..=3);
    batch[1]["type"] = json!("mcp.server.danced");
    let first = backend.send(&satellite, "42", &batch).await.is(200, MessageSchema::EventBatchResult);
    for _ in 0..3 {
        assert_eq!(backend.send(&satellite, "42", &batch).await.is(200, MessageSchema::EventBatchResult), first);
    }
    assert_eq!(backend.seqs(&satellite).await, [1, 3]);
    // A repeat without an idempotency key is recognised by its events.
    let request = backend.as_satellite(&satellite, Method::POST, "events");
    let unnamed = request.json(&json!({"events": batch})).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(unnamed, first);
    assert_eq!(backend.seqs(&satellite).await, [1, 3]);
}

#[tokio::test]
async fn events_repeated_in_other_batches_are_stored_once_and_keep_their_ids() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let first = backend.send(&satellite, "1", &numbered(1..=10)).await.is(200, MessageSchema::EventBatchResult);
    let second = backend.send(&satellite, "2", &numbered(6..=15)).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(second["processed"], 10);
    assert_eq!(ids(&first)[5..], ids(&second)[..5]);
    let twice = backend.send(&satellite, "3", &numbered([16, 16])).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(ids(&twice)[0], ids(&twice)[1]);
    // The same key with other events: the satellite has dropped its oldest events in between.
    let cut = backend.send(&satellite, "2", &numbered(15..=20)).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!((&cut["processed"], &cut["success"]), (&json!(6), &json!(true)));
    assert_eq!(backend.seqs(&satellite).await, (1..=20).collect::<Vec<_>>());
}

#[tokio::test]
async fn restarted_sequence_numbers_are_not_treated_as_a_repeat() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.send(&satellite, "1", &numbered(1..=3)).await.is(200, MessageSchema::EventBatchResult);
    let mut again = numbered(1..=3);
    for event in &mut again {
        event["timestamp"] = json!("2026-11-22T00:00:00Z");
    }
    backend.send(&satellite, "2", &again).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(backend.seqs(&satellite).await, [1, 1, 2, 2, 3, 3]);
}

#[tokio::test]
async fn concurrent_batches_are_all_stored_once() {
    let backend = TestBackend::new().await;
    let satellites = [backend.satellite("first-satellite").await, backend.satellite("second-satellite").await];
    let batches: Vec<(u64, Vec<Value>)> =
        (0..10).map(|batch| (batch, numbered(batch * 20 + 1..=batch * 20 + 40))).collect();
    let sends = satellites.iter().flat_map(|satellite| {
        let twice = batches.iter().chain(&batches);
        twice.map(|(key, events)| async {
            let key = key.to_string();
            backend.send(satellite, &key, events).await.is(200, MessageSchema::EventBatchResult);
        })
    });
    join_all(sends).await;
    for satellite in &satellites {
        assert_eq!(backend.seqs(satellite).await, (1..=220).collect::<Vec<_>>());
    }
    assert_eq!(backend.events("limit=1000").await.len(), 440);
}

#[tokio::test]
async fn an_invalid_idempotency_key_is_rejected() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.send(&satellite, "", &numbered([1])).await.refused(400, "Idempotency-Key");
    backend.send(&satellite, &"7".repeat(129), &numbered([1])).await.refused(400, "Idempotency-Key");
    backend.send(&satellite, &"7".repeat(128), &numbered([1])).await.is(200, MessageSchema::EventBatchResult);
}

#[tokio::test]
async fn paging_with_the_last_id_returns_every_event_once() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    for batch in 0..3 {
        for satellite in [&one, &other] {
            backend
                .send(satellite, &batch.to_string(), &numbered(batch * 5 + 1..=batch * 5 + 5))
                .await
                .is(200, MessageSchema::EventBatchResult);
        }
    }
    let (mut after, mut seen) = ("0".to_owned(), Vec::new());
    loop {
        let page = backend.events(&format!("after={after}&limit=7")).await;
        let Some(last) = page.last() else { break };
        after = last["id"].as_str().unwrap().to_owned();
        seen.extend(page.iter().map(|event| event["id"].as_str().unwrap().parse::<u64>().unwrap()));
    }
    assert_eq!(seen, (1..=30).collect::<Vec<_>>());
    let since = backend.events("satellite=second-satellite&since=12").await;
    assert_eq!(since.iter().map(|event| event["seq"].as_u64().unwrap()).collect::<Vec<_>>(), [13, 14, 15]);
    backend.admin(Method::GET, "events?since=3").send().await.refused(400, "give satellite");
}

#[tokio::test]
async fn events_can_be_filtered_by_type_and_satellite() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let empty: Satellite = backend.satellite("second-satellite").await;
    backend.send(&satellite, "1", &one_of_each()).await.is(200, MessageSchema::EventBatchResult);
    let found = backend.events("type=events.dropped").await;
    assert_eq!(found.iter().map(|event| &event["type"]).collect::<Vec<_>>(), ["events.dropped"]);
    assert!(backend.events(&format!("satellite={}&type=events.dropped", empty.id)).await.is_empty());
    assert!(backend.events("type=nothing.such").await.is_empty());
}
