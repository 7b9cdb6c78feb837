//! Events come in, and each is stored once.

use futures::future::join_all;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{SCHEMAS, Satellite, World, numbered, status};

/// One of each type, as the actors' own test has printed them.
pub(crate) fn one_of_each() -> Vec<Value> {
    let printed = include_str!("../../actors/tests/snapshots/events__every_event_serializes_as_in_the_snapshot.snap");
    let (_, printed) = printed.split_once("expression: text\n---\n").unwrap();
    let events = serde_json::Deserializer::from_str(printed).into_iter().collect::<Result<Vec<Value>, _>>().unwrap();
    assert_eq!(events.len(), SCHEMAS.event_types().count(), "each type has its sample");
    events
}

fn ids(taken: &Value) -> Vec<&str> {
    taken["event_ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect()
}

#[tokio::test]
async fn events_of_every_type_are_taken_and_kept_as_they_were_sent() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let events = one_of_each();
    let taken = world.send(&satellite, "1", &events).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(
        (&taken["success"], &taken["processed"], &taken["failed"]),
        (&json!(true), &json!(events.len()), &json!(0))
    );
    let kept = world.events(&format!("satellite={}", satellite.id)).await;
    for (kept, sent) in kept.iter().zip(&events) {
        for member in ["seq", "type", "timestamp", "data"] {
            assert_eq!(kept[member], sent[member]);
        }
    }
    assert_eq!(kept.len(), events.len());
    assert_eq!(ids(&taken), kept.iter().map(|event| event["id"].as_str().unwrap()).collect::<Vec<_>>());
}

#[tokio::test]
async fn an_event_that_means_nothing_is_named_and_the_others_are_taken() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let mut unknown = status(2, "a", "online");
    unknown["type"] = json!("mcp.server.danced");
    let mut incomplete = status(3, "a", "online");
    incomplete["data"].as_object_mut().unwrap().remove("team_id");
    let elsewhere = status(5, "a", "asleep");
    let mut new = status(6, "a", "offline");
    new["data"]["from_the_future"] = json!([1, 2]);
    let batch = [status(1, "a", "connecting"), unknown, incomplete, status(4, "a", "online"), elsewhere, new];
    let taken = world.send(&satellite, "1", &batch).await.is(200, MessageSchema::EventsTaken);
    assert_eq!((&taken["success"], &taken["processed"], &taken["failed"]), (&json!(false), &json!(3), &json!(3)));
    let failures = taken["failures"].as_array().unwrap();
    let named: Vec<_> = failures.iter().map(|failure| (failure["index"].as_u64().unwrap(), &failure["type"])).collect();
    let changed = json!("mcp.server.status_changed");
    assert_eq!(named, [(1, &json!("mcp.server.danced")), (2, &changed), (4, &changed)]);
    for (failure, says) in failures.iter().zip(["unknown type", "team_id", "/data/status"]) {
        assert!(failure["error"].as_str().unwrap().contains(says), "{failure}");
    }
    assert_eq!(world.seqs(&satellite).await, [1, 4, 6]);
}

#[tokio::test]
async fn a_batch_with_something_that_is_no_event_is_refused_with_its_place_and_nothing_of_it_is_kept() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
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
            let answer = world.send(&satellite, "1", &batch).await;
            let index = answer.refused(400, &format!("/events/{at}/{member}"));
            assert_eq!(index, Some(at as u64));
        }
        let mut batch = numbered(1..=100);
        batch[at] = json!("no event");
        assert_eq!(world.send(&satellite, "1", &batch).await.refused(400, "/events"), Some(at as u64));
    }
    assert!(world.seqs(&satellite).await.is_empty());
}

#[tokio::test]
async fn a_batch_has_one_to_a_hundred_events() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.send(&satellite, "1", &[]).await.refused(400, "/events");
    world.send(&satellite, "2", &numbered(1..=101)).await.refused(400, "/events");
    let taken = world.send(&satellite, "3", &numbered(1..=100)).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(taken["processed"], 100);
    world.send(&satellite, "4", &numbered([101])).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(world.seqs(&satellite).await, (1..=101).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_batch_that_comes_again_is_answered_as_before_and_stored_once() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let mut batch = numbered(1..=3);
    batch[1]["type"] = json!("mcp.server.danced");
    let first = world.send(&satellite, "42", &batch).await.is(200, MessageSchema::EventsTaken);
    for _ in 0..3 {
        assert_eq!(world.send(&satellite, "42", &batch).await.is(200, MessageSchema::EventsTaken), first);
    }
    assert_eq!(world.seqs(&satellite).await, [1, 3]);
    // Also if it is not known to be the same.
    let asking = world.of(&satellite, Method::POST, "events");
    let unnamed = asking.json(&json!({"events": batch})).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(unnamed, first);
    assert_eq!(world.seqs(&satellite).await, [1, 3]);
}

#[tokio::test]
async fn events_that_were_cut_into_other_batches_are_stored_once_and_keep_their_ids() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let first = world.send(&satellite, "1", &numbered(1..=10)).await.is(200, MessageSchema::EventsTaken);
    let second = world.send(&satellite, "2", &numbered(6..=15)).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(second["processed"], 10);
    assert_eq!(ids(&first)[5..], ids(&second)[..5]);
    let twice = world.send(&satellite, "3", &numbered([16, 16])).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(ids(&twice)[0], ids(&twice)[1]);
    // The same id with other events, as of a satellite whose oldest events went meanwhile.
    let cut = world.send(&satellite, "2", &numbered(15..=20)).await.is(200, MessageSchema::EventsTaken);
    assert_eq!((&cut["processed"], &cut["success"]), (&json!(6), &json!(true)));
    assert_eq!(world.seqs(&satellite).await, (1..=20).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_satellite_that_counts_from_one_again_is_not_taken_for_a_repeat() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.send(&satellite, "1", &numbered(1..=3)).await.is(200, MessageSchema::EventsTaken);
    let mut again = numbered(1..=3);
    for event in &mut again {
        event["timestamp"] = json!("2026-11-22T00:00:00Z");
    }
    world.send(&satellite, "2", &again).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(world.seqs(&satellite).await, [1, 1, 2, 2, 3, 3]);
}

#[tokio::test]
async fn batches_that_come_at_once_are_all_stored_once() {
    let world = World::new().await;
    let satellites = [world.satellite("first-satellite").await, world.satellite("second-satellite").await];
    let batches: Vec<(u64, Vec<Value>)> =
        (0..10).map(|batch| (batch, numbered(batch * 20 + 1..=batch * 20 + 40))).collect();
    let sends = satellites.iter().flat_map(|satellite| {
        let twice = batches.iter().chain(&batches);
        twice.map(|(key, events)| async {
            let key = key.to_string();
            world.send(satellite, &key, events).await.is(200, MessageSchema::EventsTaken);
        })
    });
    join_all(sends).await;
    for satellite in &satellites {
        assert_eq!(world.seqs(satellite).await, (1..=220).collect::<Vec<_>>());
    }
    assert_eq!(world.events("limit=1000").await.len(), 440);
}

#[tokio::test]
async fn a_batch_id_that_is_none_is_refused() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.send(&satellite, "", &numbered([1])).await.refused(400, "Idempotency-Key");
    world.send(&satellite, &"7".repeat(129), &numbered([1])).await.refused(400, "Idempotency-Key");
    world.send(&satellite, &"7".repeat(128), &numbered([1])).await.is(200, MessageSchema::EventsTaken);
}

#[tokio::test]
async fn a_reader_that_comes_back_with_what_it_has_seen_misses_nothing() {
    let world = World::new().await;
    let (one, other) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    for batch in 0..3 {
        for satellite in [&one, &other] {
            world
                .send(satellite, &batch.to_string(), &numbered(batch * 5 + 1..=batch * 5 + 5))
                .await
                .is(200, MessageSchema::EventsTaken);
        }
    }
    let (mut after, mut seen) = ("0".to_owned(), Vec::new());
    loop {
        let page = world.events(&format!("after={after}&limit=7")).await;
        let Some(last) = page.last() else { break };
        after = last["id"].as_str().unwrap().to_owned();
        seen.extend(page.iter().map(|event| event["id"].as_str().unwrap().parse::<u64>().unwrap()));
    }
    assert_eq!(seen, (1..=30).collect::<Vec<_>>());
    let since = world.events("satellite=second-satellite&since=12").await;
    assert_eq!(since.iter().map(|event| event["seq"].as_u64().unwrap()).collect::<Vec<_>>(), [13, 14, 15]);
    world.admin(Method::GET, "events?since=3").send().await.refused(400, "give satellite");
}

#[tokio::test]
async fn events_are_found_by_type_and_satellite() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let empty: Satellite = world.satellite("second-satellite").await;
    world.send(&satellite, "1", &one_of_each()).await.is(200, MessageSchema::EventsTaken);
    let found = world.events("type=events.dropped").await;
    assert_eq!(found.iter().map(|event| &event["type"]).collect::<Vec<_>>(), ["events.dropped"]);
    assert!(world.events(&format!("satellite={}&type=events.dropped", empty.id)).await.is_empty());
    assert!(world.events("type=nothing.such").await.is_empty());
}
