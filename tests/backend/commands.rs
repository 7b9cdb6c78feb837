//! What satellites are to do.

use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::World;

fn restart(id: &str, priority: &str) -> Value {
    json!({"id": id, "command_type": "restart", "priority": priority, "payload": {"installation_id": "abc123"}})
}

#[tokio::test]
async fn the_most_urgent_come_first_and_each_comes_again_until_its_result_has_arrived() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    for (id, priority) in [("a", "low"), ("b", "normal"), ("c", "high"), ("d", "immediate"), ("e", "normal")] {
        world.queue(&satellite, &restart(id, priority)).await.is(201, MessageSchema::CommandState);
    }
    for _ in 0..2 {
        assert_eq!(world.to_do(&satellite).await, ["d", "c", "b", "e", "a"]);
    }
    world.result(&satellite, "d", "completed").await.is(200, MessageSchema::Received);
    world.result(&satellite, "b", "failed").await.is(200, MessageSchema::Received);
    assert_eq!(world.to_do(&satellite).await, ["c", "e", "a"]);
}

#[tokio::test]
async fn no_more_come_than_are_asked_for() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    for number in 0..12 {
        world
            .queue(&satellite, &restart(&format!("c{number:02}"), "normal"))
            .await
            .is(201, MessageSchema::CommandState);
    }
    assert_eq!(world.to_do(&satellite).await.len(), 10);
    let polled = world.of(&satellite, Method::GET, "commands?limit=3&last_poll=2026-11-21T06:32:00Z").send().await;
    let polled = polled.is(200, MessageSchema::Commands);
    let ids: Vec<&Value> = polled["commands"].as_array().unwrap().iter().map(|command| &command["id"]).collect();
    assert_eq!(ids, ["c00", "c01", "c02"]);
    for nonsense in ["limit=0", "limit=101", "limit=many", "last_poll=yesterday"] {
        world.of(&satellite, Method::GET, &format!("commands?{nonsense}")).send().await.refused(400, "");
    }
}

#[tokio::test]
async fn a_poll_that_may_be_held_back_is_answered_when_a_command_is_queued() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let held = world.of(&satellite, Method::GET, "commands?wait=25").send();
    let queued = async {
        // The poll is answered with the command whether it arrives before or after it.
        world.queue(&satellite, &restart("c1", "immediate")).await.is(201, MessageSchema::CommandState);
    };
    let (polled, ()) = futures::join!(held, queued);
    assert_eq!(polled.is(200, MessageSchema::Commands)["commands"][0]["id"], "c1");
    world.result(&satellite, "c1", "completed").await.is(200, MessageSchema::Received);
    let nothing = world.of(&satellite, Method::GET, "commands?wait=1").send().await.is(200, MessageSchema::Commands);
    assert_eq!(nothing["commands"], json!([]), "the time is over and nothing was queued");
    world.of(&satellite, Method::GET, "commands?wait=long").send().await.refused(400, "");
}

#[tokio::test]
async fn a_command_arrives_as_it_was_queued() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let command = json!({
        "command_type": "health_check",
        "priority": "high",
        "payload": {"installation_id": "abc123", "team_id": "team_acme", "check_type": "credential_validation", "new": [1]},
        "expires_in_seconds": 90,
    });
    let queued = world.queue(&satellite, &command).await.is(201, MessageSchema::CommandState);
    let polled = world.poll(&satellite).await;
    let arrived = &polled["commands"][0];
    for member in ["command_type", "priority", "payload"] {
        assert_eq!(arrived[member], command[member]);
    }
    assert_eq!((&arrived["id"], &arrived["expires_at"]), (&queued["id"], &json!("2026-11-21T06:34:30Z")));
    assert_eq!(polled["server_time"], "2026-11-21T06:33:00Z");
}

#[tokio::test]
async fn what_has_expired_is_not_given_out() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let mut command = restart("late", "normal");
    command["expires_at"] = json!("2026-11-21T06:34:00Z");
    world.queue(&satellite, &command).await.is(201, MessageSchema::CommandState);
    world.pass(SignedDuration::from_mins(1));
    assert!(world.to_do(&satellite).await.is_empty());
    let path = format!("satellites/{}/commands/late", satellite.id);
    let state = world.admin(Method::GET, &path).send().await.is(200, MessageSchema::CommandState);
    assert_eq!(state["state"], "expired");
}

#[tokio::test]
async fn what_was_given_out_in_time_is_asked_for_until_its_result_has_come() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    for id in ["done", "late", "lost"] {
        let mut command = restart(id, "normal");
        command["expires_at"] = json!("2026-11-21T06:34:00Z");
        world.queue(&satellite, &command).await.is(201, MessageSchema::CommandState);
    }
    let state = async |id: &str| {
        let path = format!("satellites/{}/commands/{id}", satellite.id);
        let state = world.admin(Method::GET, &path).send().await.is(200, MessageSchema::CommandState);
        state["state"].as_str().unwrap().to_owned()
    };
    let waiting = async || {
        let path = format!("satellites/{}", satellite.id);
        world.admin(Method::GET, &path).send().await.is(200, MessageSchema::Satellite)["commands_waiting"].clone()
    };
    world.pass(SignedDuration::from_secs(59));
    assert_eq!(world.to_do(&satellite).await, ["done", "late", "lost"]);
    world.pass(SignedDuration::from_secs(1));
    // It may have been carried out, and its result lost.
    assert_eq!(world.to_do(&satellite).await, ["done", "late", "lost"]);
    assert_eq!((state("done").await, waiting().await), ("sent".to_owned(), json!(3)));
    world.result(&satellite, "done", "completed").await.is(200, MessageSchema::Received);
    world.result(&satellite, "late", "expired").await.is(200, MessageSchema::Received);
    assert_eq!((state("done").await, state("late").await), ("completed".to_owned(), "expired".to_owned()));
    world.pass(SignedDuration::from_hours(7 * 24) - SignedDuration::from_millis(1));
    assert_eq!(world.to_do(&satellite).await, ["lost"]);
    world.pass(SignedDuration::from_millis(1));
    assert!(world.to_do(&satellite).await.is_empty());
    assert_eq!((state("lost").await, waiting().await), ("sent".to_owned(), json!(0)));
}

#[tokio::test]
async fn a_result_counts_once_and_a_repeat_is_no_error() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.queue(&satellite, &restart("a", "normal")).await.is(201, MessageSchema::CommandState);
    world.poll(&satellite).await;
    for status in ["failed", "failed", "completed"] {
        world.result(&satellite, "a", status).await.is(200, MessageSchema::Received);
    }
    let path = format!("satellites/{}/commands", satellite.id);
    let list = world.admin(Method::GET, &path).send().await.is(200, MessageSchema::CommandStates);
    let command = &list["commands"][0];
    assert_eq!((&command["state"], &command["result"]["status"]), (&json!("failed"), &json!("failed")));
    assert_eq!((&command["times_sent"], &command["finished_at"]), (&json!(1), &json!("2026-11-21T06:33:00Z")));
    world.result(&satellite, "b", "completed").await.refused(404, "no such command");
    world.result(&satellite, "a", "done").await.refused(400, "/status");
}

#[tokio::test]
async fn a_satellite_is_asked_to_come_back_soon_while_there_is_something_urgent_and_seldom_when_nothing_happens() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let mode = async || {
        let polled = world.poll(&satellite).await;
        (polled["polling_mode"].as_str().unwrap().to_owned(), polled["next_poll_interval"].as_f64().unwrap())
    };
    assert_eq!(mode().await, ("normal".to_owned(), 30.0));
    world.pass(SignedDuration::from_hours(1));
    assert_eq!(mode().await, ("idle".to_owned(), 60.0));
    world.queue(&satellite, &restart("low", "low")).await.is(201, MessageSchema::CommandState);
    assert_eq!(mode().await.0, "normal");
    world.queue(&satellite, &restart("high", "high")).await.is(201, MessageSchema::CommandState);
    assert_eq!(mode().await, ("high".to_owned(), 10.0));
    world.queue(&satellite, &restart("now", "immediate")).await.is(201, MessageSchema::CommandState);
    world.pass(SignedDuration::from_hours(1));
    assert_eq!(mode().await, ("immediate".to_owned(), 2.0));
    world.result(&satellite, "now", "completed").await.is(200, MessageSchema::Received);
    world.result(&satellite, "high", "completed").await.is(200, MessageSchema::Received);
    world.result(&satellite, "low", "completed").await.is(200, MessageSchema::Received);
    for (seconds, expected) in [(59, "immediate"), (1, "high"), (240, "normal"), (3299, "normal"), (1, "idle")] {
        world.pass(SignedDuration::from_secs(seconds));
        assert_eq!(mode().await.0, expected, "after {seconds} s more");
    }
}

#[tokio::test]
async fn what_a_satellite_could_only_fail_at_is_refused_when_it_is_queued() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    for (command_type, payload, place) in [
        ("restart", json!({}), "installation_id"),
        ("spawn", json!({"installation_id": 7}), "/payload/installation_id"),
        ("kill", json!({"team_id": "team_acme"}), "installation_id"),
        ("configure", json!({"event": "mcp_installation_renamed"}), "/payload/event"),
        ("health_check", json!({"check_type": "credential_validation"}), "installation_id"),
    ] {
        let command = json!({"command_type": command_type, "payload": payload});
        world.queue(&satellite, &command).await.refused(400, place);
    }
    let twice = json!({"command_type": "kill", "payload": {"installation_id": "a"}, "expires_in_seconds": 5, "expires_at": "2026-11-21T06:34:00Z"});
    world.queue(&satellite, &twice).await.refused(400, "exclude each other");
    assert!(world.to_do(&satellite).await.is_empty());
    // What this backend does not know a newer satellite may.
    world.queue(&satellite, &json!({"command_type": "dance"})).await.is(201, MessageSchema::CommandState);
}

#[tokio::test]
async fn a_command_that_is_queued_twice_under_one_id_is_one_command() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.queue(&satellite, &restart("a", "normal")).await.is(201, MessageSchema::CommandState);
    world.queue(&satellite, &restart("a", "normal")).await.is(200, MessageSchema::CommandState);
    assert_eq!(world.to_do(&satellite).await, ["a"]);
    world.result(&satellite, "a", "completed").await.is(200, MessageSchema::Received);
    let known = world.queue(&satellite, &restart("a", "normal")).await.is(200, MessageSchema::CommandState);
    assert_eq!(known["state"], "completed");
    assert!(world.to_do(&satellite).await.is_empty());
}
