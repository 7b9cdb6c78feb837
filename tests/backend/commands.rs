//! Commands for satellites.

use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::TestBackend;

fn restart(id: &str, priority: &str) -> Value {
    json!({"id": id, "command_type": "restart", "priority": priority, "payload": {"installation_id": "abc123"}})
}

#[tokio::test]
async fn commands_are_sent_by_priority_and_repeated_until_their_result_arrives() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    for (id, priority) in [("a", "low"), ("b", "normal"), ("c", "high"), ("d", "immediate"), ("e", "normal")] {
        backend.queue(&satellite, &restart(id, priority)).await.is(201, MessageSchema::CommandState);
    }
    for _ in 0..2 {
        assert_eq!(backend.pending_commands(&satellite).await, ["d", "c", "b", "e", "a"]);
    }
    backend.result(&satellite, "d", "completed").await.is(200, MessageSchema::EmptyResponse);
    backend.result(&satellite, "b", "failed").await.is(200, MessageSchema::EmptyResponse);
    assert_eq!(backend.pending_commands(&satellite).await, ["c", "e", "a"]);
}

#[tokio::test]
async fn a_poll_returns_at_most_the_requested_number_of_commands() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    for number in 0..12 {
        backend
            .queue(&satellite, &restart(&format!("c{number:02}"), "normal"))
            .await
            .is(201, MessageSchema::CommandState);
    }
    assert_eq!(backend.pending_commands(&satellite).await.len(), 10);
    let polled =
        backend.as_satellite(&satellite, Method::GET, "commands?limit=3&last_poll=2026-11-21T06:32:00Z").send().await;
    let polled = polled.is(200, MessageSchema::Commands);
    let ids: Vec<&Value> = polled["commands"].as_array().unwrap().iter().map(|command| &command["id"]).collect();
    assert_eq!(ids, ["c00", "c01", "c02"]);
    for nonsense in ["limit=0", "limit=101", "limit=many", "last_poll=yesterday"] {
        backend.as_satellite(&satellite, Method::GET, &format!("commands?{nonsense}")).send().await.refused(400, "");
    }
}

#[tokio::test]
async fn a_waiting_poll_is_answered_when_a_command_is_queued() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let held = backend.as_satellite(&satellite, Method::GET, "commands?wait=25").send();
    let queued = async {
        // The response contains the command whether the poll arrives before or after it.
        backend.queue(&satellite, &restart("c1", "immediate")).await.is(201, MessageSchema::CommandState);
    };
    let (polled, ()) = futures::join!(held, queued);
    assert_eq!(polled.is(200, MessageSchema::Commands)["commands"][0]["id"], "c1");
    backend.result(&satellite, "c1", "completed").await.is(200, MessageSchema::EmptyResponse);
    let nothing =
        backend.as_satellite(&satellite, Method::GET, "commands?wait=1").send().await.is(200, MessageSchema::Commands);
    assert_eq!(nothing["commands"], json!([]), "the wait is over and nothing was queued");
    backend.as_satellite(&satellite, Method::GET, "commands?wait=long").send().await.refused(400, "");
}

#[tokio::test]
async fn a_command_arrives_as_it_was_queued() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let command = json!({
        "command_type": "health_check",
        "priority": "high",
        "payload": {"installation_id": "abc123", "team_id": "team_acme", "check_type": "credential_validation", "new": [1]},
        "expires_in_seconds": 90,
    });
    let queued = backend.queue(&satellite, &command).await.is(201, MessageSchema::CommandState);
    let polled = backend.poll(&satellite).await;
    let arrived = &polled["commands"][0];
    for member in ["command_type", "priority", "payload"] {
        assert_eq!(arrived[member], command[member]);
    }
    assert_eq!((&arrived["id"], &arrived["expires_at"]), (&queued["id"], &json!("2026-11-21T06:34:30Z")));
    assert_eq!(polled["server_time"], "2026-11-21T06:33:00Z");
}

#[tokio::test]
async fn an_expired_command_is_not_sent() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let mut command = restart("late", "normal");
    command["expires_at"] = json!("2026-11-21T06:34:00Z");
    backend.queue(&satellite, &command).await.is(201, MessageSchema::CommandState);
    backend.advance_clock(SignedDuration::from_mins(1));
    assert!(backend.pending_commands(&satellite).await.is_empty());
    let path = format!("satellites/{}/commands/late", satellite.id);
    let state = backend.admin(Method::GET, &path).send().await.is(200, MessageSchema::CommandState);
    assert_eq!(state["state"], "expired");
}

#[tokio::test]
async fn a_sent_command_is_repeated_after_its_expiry_until_its_result_arrives() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    for id in ["done", "late", "lost"] {
        let mut command = restart(id, "normal");
        command["expires_at"] = json!("2026-11-21T06:34:00Z");
        backend.queue(&satellite, &command).await.is(201, MessageSchema::CommandState);
    }
    let state = async |id: &str| {
        let path = format!("satellites/{}/commands/{id}", satellite.id);
        let state = backend.admin(Method::GET, &path).send().await.is(200, MessageSchema::CommandState);
        state["state"].as_str().unwrap().to_owned()
    };
    let waiting = async || {
        let path = format!("satellites/{}", satellite.id);
        backend.admin(Method::GET, &path).send().await.is(200, MessageSchema::Satellite)["commands_waiting"].clone()
    };
    backend.advance_clock(SignedDuration::from_secs(59));
    assert_eq!(backend.pending_commands(&satellite).await, ["done", "late", "lost"]);
    backend.advance_clock(SignedDuration::from_secs(1));
    // The satellite may have executed it, and the result may be lost.
    assert_eq!(backend.pending_commands(&satellite).await, ["done", "late", "lost"]);
    assert_eq!((state("done").await, waiting().await), ("sent".to_owned(), json!(3)));
    backend.result(&satellite, "done", "completed").await.is(200, MessageSchema::EmptyResponse);
    backend.result(&satellite, "late", "expired").await.is(200, MessageSchema::EmptyResponse);
    assert_eq!((state("done").await, state("late").await), ("completed".to_owned(), "expired".to_owned()));
    backend.advance_clock(SignedDuration::from_hours(7 * 24) - SignedDuration::from_millis(1));
    assert_eq!(backend.pending_commands(&satellite).await, ["lost"]);
    backend.advance_clock(SignedDuration::from_millis(1));
    assert!(backend.pending_commands(&satellite).await.is_empty());
    assert_eq!((state("lost").await, waiting().await), ("sent".to_owned(), json!(0)));
}

#[tokio::test]
async fn only_the_first_result_counts_and_repeats_are_accepted() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.queue(&satellite, &restart("a", "normal")).await.is(201, MessageSchema::CommandState);
    backend.poll(&satellite).await;
    for status in ["failed", "failed", "completed"] {
        backend.result(&satellite, "a", status).await.is(200, MessageSchema::EmptyResponse);
    }
    let path = format!("satellites/{}/commands", satellite.id);
    let list = backend.admin(Method::GET, &path).send().await.is(200, MessageSchema::CommandStates);
    let command = &list["commands"][0];
    assert_eq!((&command["state"], &command["result"]["status"]), (&json!("failed"), &json!("failed")));
    assert_eq!((&command["times_sent"], &command["finished_at"]), (&json!(1), &json!("2026-11-21T06:33:00Z")));
    backend.result(&satellite, "b", "completed").await.refused(404, "no such command");
    backend.result(&satellite, "a", "done").await.refused(400, "/status");
}

#[tokio::test]
async fn the_poll_interval_follows_the_priority_of_recent_commands() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let mode = async || {
        let polled = backend.poll(&satellite).await;
        (polled["polling_mode"].as_str().unwrap().to_owned(), polled["next_poll_interval"].as_f64().unwrap())
    };
    assert_eq!(mode().await, ("normal".to_owned(), 30.0));
    backend.advance_clock(SignedDuration::from_hours(1));
    assert_eq!(mode().await, ("idle".to_owned(), 60.0));
    backend.queue(&satellite, &restart("low", "low")).await.is(201, MessageSchema::CommandState);
    assert_eq!(mode().await.0, "normal");
    backend.queue(&satellite, &restart("high", "high")).await.is(201, MessageSchema::CommandState);
    assert_eq!(mode().await, ("high".to_owned(), 10.0));
    backend.queue(&satellite, &restart("now", "immediate")).await.is(201, MessageSchema::CommandState);
    backend.advance_clock(SignedDuration::from_hours(1));
    assert_eq!(mode().await, ("immediate".to_owned(), 2.0));
    backend.result(&satellite, "now", "completed").await.is(200, MessageSchema::EmptyResponse);
    backend.result(&satellite, "high", "completed").await.is(200, MessageSchema::EmptyResponse);
    backend.result(&satellite, "low", "completed").await.is(200, MessageSchema::EmptyResponse);
    for (seconds, expected) in [(59, "immediate"), (1, "high"), (240, "normal"), (3299, "normal"), (1, "idle")] {
        backend.advance_clock(SignedDuration::from_secs(seconds));
        assert_eq!(mode().await.0, expected, "after {seconds} s more");
    }
}

#[tokio::test]
async fn a_command_with_an_invalid_payload_is_rejected_when_it_is_queued() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    for (command_type, payload, place) in [
        ("restart", json!({}), "installation_id"),
        ("spawn", json!({"installation_id": 7}), "/payload/installation_id"),
        ("kill", json!({"team_id": "team_acme"}), "installation_id"),
        ("configure", json!({"event": "mcp_installation_renamed"}), "/payload/event"),
        ("health_check", json!({"check_type": "credential_validation"}), "installation_id"),
    ] {
        let command = json!({"command_type": command_type, "payload": payload});
        backend.queue(&satellite, &command).await.refused(400, place);
    }
    let twice = json!({"command_type": "kill", "payload": {"installation_id": "a"}, "expires_in_seconds": 5, "expires_at": "2026-11-21T06:34:00Z"});
    backend.queue(&satellite, &twice).await.refused(400, "exclude each other");
    assert!(backend.pending_commands(&satellite).await.is_empty());
    // A newer satellite may know command types that this backend does not know.
    backend.queue(&satellite, &json!({"command_type": "dance"})).await.is(201, MessageSchema::CommandState);
}

#[tokio::test]
async fn queuing_an_id_twice_creates_one_command() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.queue(&satellite, &restart("a", "normal")).await.is(201, MessageSchema::CommandState);
    backend.queue(&satellite, &restart("a", "normal")).await.is(200, MessageSchema::CommandState);
    assert_eq!(backend.pending_commands(&satellite).await, ["a"]);
    backend.result(&satellite, "a", "completed").await.is(200, MessageSchema::EmptyResponse);
    let known = backend.queue(&satellite, &restart("a", "normal")).await.is(200, MessageSchema::CommandState);
    assert_eq!(known["state"], "completed");
    assert!(backend.pending_commands(&satellite).await.is_empty());
}
