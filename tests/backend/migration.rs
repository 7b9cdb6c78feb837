//! Migration of a database of an older backend.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::support::{Satellite, TestBackend, status};

fn satellite(id: &str, key: &str) -> Satellite {
    Satellite { id: id.to_owned(), key: key.to_owned() }
}

async fn list(backend: &TestBackend, path: &str, form: MessageSchema) -> Vec<Value> {
    let listed = backend.admin(Method::GET, path).send().await.is(200, form);
    listed.as_object().unwrap().values().next().unwrap().as_array().unwrap().clone()
}

#[tokio::test]
async fn a_database_of_the_first_version_is_migrated_without_loss() {
    let mut backend = TestBackend::new().await;
    backend.stop().await;
    let file = backend.data_dir().join("backend.db");
    fs::remove_file(&file).unwrap();
    let old = Connection::open(&file).unwrap();
    old.execute_batch(include_str!("../fixtures/backend_version_1.sql")).unwrap();
    drop(old);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    backend.start().await;

    // Keys and unused tokens stay valid; used tokens stay invalid.
    let (first, second) =
        (satellite("sat_1", "sbk_of_the_first_satellite"), satellite("sat_2", "sbk_of_the_second_satellite"));
    backend.register("fourth-satellite", "sbr_used_token").await.refused(401, "request a new one");
    backend.register("third-satellite", "sbr_unused_token").await.is(201, MessageSchema::RegistrationResponse);

    let shown = list(&backend, "satellites", MessageSchema::Satellites).await;
    let shown: Vec<_> = shown
        .iter()
        .map(|one| json!([one["name"], one["events"], one["last_seq"], one["instances"], one["applied_config_hash"]]))
        .collect();
    let wanted = [
        json!(["first-satellite", 4, 4, {"offline": 1, "online": 1}, "before"]),
        json!(["second-satellite", 2, 2, {"error": 1}, null]),
        json!(["third-satellite", 0, null, {}, null]),
    ];
    assert_eq!(shown, wanted);

    // The same configuration keeps its hash, so no satellite applies it again.
    for (path, config) in [
        ("config", json!({"teams": [{"id": "acme"}]})),
        ("satellites/sat_2/config", json!({"servers": {"files": {"command": "files"}}})),
    ] {
        let before = backend.admin(Method::GET, path).send().await.is(200, MessageSchema::Config);
        let stored = backend.admin(Method::PUT, path).json(&config).await.is(200, MessageSchema::ConfigUpdateResult);
        assert_eq!((&stored["hash"], &stored["changed"]), (&before["hash"], &json!(false)), "{before}");
    }
    assert_eq!(backend.config(&first).await["teams"], json!([{"id": "acme"}]));
    assert_eq!(backend.config(&second).await["servers"], json!({"files": {"command": "files"}}));

    let commands = list(&backend, "satellites/sat_1/commands", MessageSchema::CommandStates).await;
    let mut commands: Vec<_> =
        commands.iter().map(|one| (one["id"].as_str().unwrap(), one["state"].as_str().unwrap())).collect();
    commands.sort_unstable();
    assert_eq!(commands, [("done", "completed"), ("late", "expired"), ("open", "queued"), ("sent", "sent")]);
    assert_eq!(backend.pending_commands(&first).await, ["open", "sent"]);
    assert_eq!(backend.pending_commands(&second).await, ["configure-1"]);
    backend.result(&first, "sent", "expired").await.is(200, MessageSchema::EmptyResponse);

    assert_eq!((backend.seqs(&first).await, backend.seqs(&second).await), (vec![1, 2, 3, 4], vec![1, 2]));
    let ids: Vec<_> = backend.events("after=0").await.iter().map(|event| event["id"].clone()).collect();
    assert_eq!(ids, ["1", "2", "3", "4", "5", "6"]);
    let instances = list(&backend, "instances?team=team_acme", MessageSchema::Instances).await;
    let instances: Vec<_> =
        instances.iter().map(|one| json!([one["satellite_id"], one["instance"], one["status"]])).collect();
    assert_eq!(
        instances,
        [json!(["sat_1", "a", "online"]), json!(["sat_1", "b", "offline"]), json!(["sat_2", "a", "error"])]
    );

    // Repeated events are recognised by their key and their sequence numbers; new events continue the ids.
    let statuses = [(1, "a", "connecting"), (2, "a", "online"), (3, "b", "online"), (4, "b", "offline")];
    let mut events: Vec<_> = statuses.into_iter().map(|(seq, of, is)| status(seq, of, is)).collect();
    let accepted = backend.send(&first, "1", &events).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(accepted["event_ids"], json!(["1", "2", "3", "4"]));
    events.push(status(5, "b", "online"));
    let accepted = backend.send(&first, "2", &events).await.is(200, MessageSchema::EventBatchResult);
    let ids: Vec<u64> =
        accepted["event_ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().parse().unwrap()).collect();
    assert!(ids[..4] == [1, 2, 3, 4] && ids[4] > 6, "{ids:?}");
    let shown = backend.admin(Method::GET, "satellites/sat_1").send().await.is(200, MessageSchema::Satellite);
    assert_eq!((&shown["events"], &shown["instances"]), (&json!(5), &json!({"online": 2})));
}
