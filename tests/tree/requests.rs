//! Request logs: tool calls in events.

use mcp_satellite_actors::RuntimePart;
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::secret::SecretMask;
use serde_json::{Value, json};
use testkit::fleet::{Fleet, Server, seconds};
use tokio::time::sleep;

const KIND: &str = "mcp.request.logs";

/// Returns the names of the called tools for each event.
fn tools(events: &[Value]) -> Vec<Vec<&str>> {
    events
        .iter()
        .map(|data| data["requests"].as_array().unwrap().iter().map(|one| one["tool_name"].as_str().unwrap()).collect())
        .collect()
}

/// Returns the number of request log events that the sink has accepted.
fn accepted_count(fleet: &Fleet) -> usize {
    fleet.sink.accepted().iter().filter(|envelope: &&Envelope| envelope.event.kind() == KIND).count()
}

#[tokio::test(start_paused = true)]
async fn calls_are_logged_in_one_event_with_parameters_and_results() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    fleet.call(&id, "add", json!({"a": 3, "b": 4})).await.unwrap();
    sleep(seconds(2.0)).await;
    fleet.call(&id, "fail", json!({"message": "no"})).await.unwrap_err();
    fleet.call(&id, "tool_error", json!({"message": "no"})).await.unwrap();
    sleep(seconds(10.0)).await;
    assert_eq!(accepted_count(&fleet), 1, "sent without a flush");

    let events = fleet.event_data(&id, KIND).await;
    assert_eq!(tools(&events), [["add", "fail", "tool_error"]]);
    assert_eq!((&events[0]["installation_id"], &events[0]["user_id"]), (&json!("a"), &json!("alice")));
    let requests = &events[0]["requests"];
    assert_eq!(requests[0]["tool_params"], json!({"a": 3, "b": 4}));
    assert_eq!(requests[0]["tool_response"]["structuredContent"]["result"], 7);
    assert_eq!((&requests[0]["success"], &requests[0]["error_message"]), (&json!(true), &Value::Null));
    assert_eq!((&requests[1]["success"], &requests[1]["tool_response"]), (&json!(false), &Value::Null));
    assert!(requests[1]["error_message"].as_str().unwrap().contains("failed as asked: no"));
    assert_eq!((&requests[2]["success"], &requests[2]["tool_response"]["isError"]), (&json!(false), &json!(true)));
    let timestamp = |nth: usize| requests[nth]["timestamp"].as_str().unwrap();
    assert!(timestamp(0) < timestamp(1) && requests[0]["response_time_ms"].is_u64(), "{requests}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn twenty_calls_of_an_instance_are_logged_at_once() {
    let fleet = Fleet::start().await;
    let (a, b) = (fleet.online(Server::new("a")).await, fleet.online(Server::new("b")).await);
    let mut subscription = fleet.runtime.subscribe();
    for _ in 0..20 {
        fleet.call(&a, "echo", json!({"text": "x"})).await.unwrap();
        fleet.call(&b, "echo", json!({"text": "x"})).await.unwrap();
        fleet.call(&b, "echo", json!({"text": "x"})).await.unwrap();
    }
    sleep(seconds(0.5)).await;
    let mut sizes = Vec::new();
    while let Ok(envelope) = subscription.try_recv() {
        let json = serde_json::to_value(&*envelope).unwrap();
        if json["type"] == KIND {
            sizes.push((json["data"]["installation_id"].clone(), json["data"]["requests"].as_array().unwrap().len()));
        }
    }
    sizes.sort_by_key(|(installation, _)| installation.to_string());
    assert_eq!(sizes, [(json!("a"), 20), (json!("b"), 20), (json!("b"), 20)]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn calls_are_not_logged_if_request_logging_is_off() {
    let fleet = Fleet::start().await;
    let mut server = Server::new("a");
    server.spec.request_logging = false;
    let id = fleet.online(server).await;
    fleet.call(&id, "echo", json!({"text": "x"})).await.unwrap();
    assert_eq!(fleet.event_data(&id, KIND).await, [] as [Value; 0]);
    assert_eq!(fleet.event_data(&id, "mcp.tool.executed").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn logged_calls_are_masked_and_truncated() {
    let fleet = Fleet::with(|options| options.batch.request_payload_max = 100).await;
    let mut server = Server::new("a");
    server.spec.mask = SecretMask::new(["hush-hush"]);
    let id = fleet.online(server).await;
    fleet.call(&id, "echo", json!({"text": "hush-hush"})).await.unwrap();
    fleet.call(&id, "echo", json!({"text": format!("{}hush-hush", "x".repeat(85))})).await.unwrap();
    fleet.call(&id, "echo", json!({"text": "y".repeat(100_000)})).await.unwrap();
    let events = fleet.event_data(&id, KIND).await;
    let requests = events[0]["requests"].as_array().unwrap();
    assert_eq!(requests[0]["tool_params"], json!({"text": "[secret]"}));
    let cut = |nth: usize, side: &str| requests[nth][side].as_str().unwrap().to_owned();
    assert_eq!(cut(2, "tool_params"), format!("{{\"text\":\"{}…", "y".repeat(91)));
    assert!(cut(2, "tool_response").ends_with('…'));
    let all = events[0].to_string();
    assert!(!all.contains("hush") && all.len() < 2500, "{all}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn logged_calls_survive_the_death_of_the_batcher_and_a_shutdown() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    fleet.call(&id, "echo", json!({"text": "1"})).await.unwrap();
    sleep(seconds(0.1)).await;
    fleet.runtime.panic(RuntimePart::Batcher);
    sleep(seconds(10.0)).await;
    assert_eq!(accepted_count(&fleet), 1);
    fleet.call(&id, "echo", json!({"text": "2"})).await.unwrap();
    let sink = fleet.sink.clone();
    fleet.finish().await;
    let events: Vec<Value> = sink.accepted().iter().map(|envelope| serde_json::to_value(envelope).unwrap()).collect();
    let events: Vec<_> = events.iter().filter(|event| event["type"] == KIND).collect();
    let text = |nth: usize| events[nth]["data"]["requests"][0]["tool_params"]["text"].clone();
    assert_eq!((events.len(), text(0), text(1)), (2, json!("1"), json!("2")));
}
