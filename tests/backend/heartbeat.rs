//! Satellites say that they live.

use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{Satellite, World, heartbeat};

async fn shown(world: &World, satellite: &Satellite) -> Value {
    world.admin(Method::GET, &format!("satellites/{}", satellite.id)).send().await.is(200, MessageSchema::Satellite)
}

#[tokio::test]
async fn what_a_heartbeat_says_is_shown() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let mut beat = heartbeat(world.now());
    beat["config_hash"] = json!("abc");
    beat["tools"] = json!({"files-acme-alice-abc123": ["read", "write"]});
    beat["from_the_future"] = json!(true);
    world.beat(&satellite, &beat).await.is(200, MessageSchema::Received);
    let shown = shown(&world, &satellite).await;
    assert_eq!((&shown["version"], &shown["applied_config_hash"]), (&json!("0.2.0"), &json!("abc")));
    assert_eq!(shown["last_heartbeat"], "2026-11-21T06:33:00Z");
    assert_eq!(shown["heartbeat"]["tools"], beat["tools"]);
    assert_eq!(shown["heartbeat"]["system"], beat["system"]);
    let list = world.admin(Method::GET, "satellites").send().await.is(200, MessageSchema::Satellites);
    assert_eq!(list["satellites"][0]["heartbeat"], Value::Null);
}

#[tokio::test]
async fn a_satellite_that_is_silent_or_has_said_goodbye_is_not_connected() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.beat(&satellite, &heartbeat(world.now())).await.is(200, MessageSchema::Received);
    world.pass(SignedDuration::from_secs(89));
    assert_eq!(shown(&world, &satellite).await["connected"], true);
    world.pass(SignedDuration::from_secs(1));
    assert_eq!(shown(&world, &satellite).await["connected"], false);
    world.poll(&satellite).await;
    assert_eq!(shown(&world, &satellite).await["connected"], true);
    let mut last = heartbeat(world.now());
    last["status"] = json!("stopping");
    world.beat(&satellite, &last).await.is(200, MessageSchema::Received);
    assert_eq!(shown(&world, &satellite).await["connected"], false);
    world.pass(SignedDuration::from_secs(5));
    world.poll(&satellite).await;
    assert_eq!(shown(&world, &satellite).await["connected"], true);
}

#[tokio::test]
async fn a_heartbeat_that_is_none_is_refused_with_its_place() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    for (member, value, place) in [
        ("status", json!(7), "/status"),
        ("timestamp", json!("yesterday"), "/timestamp"),
        ("uptime_seconds", json!(-1), "/uptime_seconds"),
        ("system", json!({"cpu_percent": 101, "memory_used_bytes": 1, "memory_total_bytes": 2}), "/system/cpu_percent"),
        ("counts", json!({"online": 1e30}), "/counts/online"),
        ("processes_by_team", json!({"t": [{}]}), "/processes_by_team/t/0"),
        ("tools", json!({"i": [{"name": "read"}]}), "/tools/i/0"),
    ] {
        let mut beat = heartbeat(world.now());
        beat[member] = value;
        world.beat(&satellite, &beat).await.refused(400, place);
    }
    assert_eq!(shown(&world, &satellite).await["heartbeat"], Value::Null);
}
