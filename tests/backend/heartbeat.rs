//! Heartbeats of satellites.

use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{Satellite, TestBackend, heartbeat};

async fn satellite_view(backend: &TestBackend, satellite: &Satellite) -> Value {
    backend.admin(Method::GET, &format!("satellites/{}", satellite.id)).send().await.is(200, MessageSchema::Satellite)
}

#[tokio::test]
async fn the_content_of_a_heartbeat_is_shown() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let mut beat = heartbeat(backend.now());
    beat["config_hash"] = json!("abc");
    beat["tools"] = json!({"files-acme-alice-abc123": ["read", "write"]});
    beat["from_the_future"] = json!(true);
    backend.send_heartbeat(&satellite, &beat).await.is(200, MessageSchema::EmptyResponse);
    let shown = satellite_view(&backend, &satellite).await;
    assert_eq!((&shown["version"], &shown["applied_config_hash"]), (&json!("0.2.0"), &json!("abc")));
    assert_eq!(shown["last_heartbeat"], "2026-11-21T06:33:00Z");
    assert_eq!(shown["heartbeat"]["tools"], beat["tools"]);
    assert_eq!(shown["heartbeat"]["system"], beat["system"]);
    let list = backend.admin(Method::GET, "satellites").send().await.is(200, MessageSchema::Satellites);
    assert_eq!(list["satellites"][0]["heartbeat"], Value::Null);
}

#[tokio::test]
async fn a_silent_or_stopping_satellite_is_not_connected() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.send_heartbeat(&satellite, &heartbeat(backend.now())).await.is(200, MessageSchema::EmptyResponse);
    backend.advance_clock(SignedDuration::from_secs(89));
    assert_eq!(satellite_view(&backend, &satellite).await["connected"], true);
    backend.advance_clock(SignedDuration::from_secs(1));
    assert_eq!(satellite_view(&backend, &satellite).await["connected"], false);
    backend.poll(&satellite).await;
    assert_eq!(satellite_view(&backend, &satellite).await["connected"], true);
    let mut last = heartbeat(backend.now());
    last["status"] = json!("stopping");
    backend.send_heartbeat(&satellite, &last).await.is(200, MessageSchema::EmptyResponse);
    assert_eq!(satellite_view(&backend, &satellite).await["connected"], false);
    backend.advance_clock(SignedDuration::from_secs(5));
    backend.poll(&satellite).await;
    assert_eq!(satellite_view(&backend, &satellite).await["connected"], true);
}

#[tokio::test]
async fn an_invalid_heartbeat_is_rejected_with_the_invalid_member() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    for (member, value, place) in [
        ("status", json!(7), "/status"),
        ("timestamp", json!("yesterday"), "/timestamp"),
        ("uptime_seconds", json!(-1), "/uptime_seconds"),
        ("system", json!({"cpu_percent": 101, "memory_used_bytes": 1, "memory_total_bytes": 2}), "/system/cpu_percent"),
        ("counts", json!({"online": 1e30}), "/counts/online"),
        ("processes_by_team", json!({"t": [{}]}), "/processes_by_team/t/0"),
        ("tools", json!({"i": [{"name": "read"}]}), "/tools/i/0"),
    ] {
        let mut beat = heartbeat(backend.now());
        beat[member] = value;
        backend.send_heartbeat(&satellite, &beat).await.refused(400, place);
    }
    assert_eq!(satellite_view(&backend, &satellite).await["heartbeat"], Value::Null);
}
