//! The satellites of a backend, as a satellite sees them.

use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::json;

use super::support::{TestBackend, heartbeat, status};

#[tokio::test]
async fn a_satellite_sees_the_others_without_keys_and_configurations() {
    let backend = TestBackend::new().await;
    let config = json!({"teams": [{"id": "acme", "env": {"KEY": "hunter2-of-the-config"}}]});
    backend.admin(Method::PUT, "config").json(&config).await.is(200, MessageSchema::ConfigUpdateResult);
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    backend
        .send(&other, "1", &[status(1, "files-acme-alice-abc123", "online")])
        .await
        .is(200, MessageSchema::EventBatchResult);
    backend.send_heartbeat(&other, &heartbeat(backend.now())).await.is(200, MessageSchema::EmptyResponse);
    let other_contact = backend.now();
    backend.advance_clock(SignedDuration::from_secs(91));
    let fleet = backend.as_satellite(&one, Method::GET, "fleet").send().await.is(200, MessageSchema::Fleet);
    assert_eq!(
        fleet,
        json!({
            "server_time": backend.now(),
            "satellites": [
                {
                    "name": "first-satellite",
                    "connected": true,
                    "last_contact": backend.now(),
                    "version": "0.1.0",
                    "instances": {},
                },
                {
                    "name": "second-satellite",
                    "connected": false,
                    "last_contact": other_contact,
                    // That of the heartbeat.
                    "version": "0.2.0",
                    "instances": {"online": 1},
                },
            ],
        })
    );
}

#[tokio::test]
async fn a_satellite_that_announces_its_end_is_not_connected() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    let mut last = heartbeat(backend.now());
    last["status"] = json!("stopping");
    backend.send_heartbeat(&other, &last).await.is(200, MessageSchema::EmptyResponse);
    let fleet = backend.as_satellite(&one, Method::GET, "fleet").send().await.is(200, MessageSchema::Fleet);
    let connected: Vec<_> = fleet["satellites"].as_array().unwrap().iter().map(|one| &one["connected"]).collect();
    assert_eq!(connected, [true, false]);
}
