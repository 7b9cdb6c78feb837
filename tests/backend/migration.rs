//! A database that an older backend has filled.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::support::{Satellite, World, status};

fn satellite(id: &str, key: &str) -> Satellite {
    Satellite { id: id.to_owned(), key: key.to_owned() }
}

async fn list(world: &World, path: &str, form: MessageSchema) -> Vec<Value> {
    let told = world.admin(Method::GET, path).send().await.is(200, form);
    told.as_object().unwrap().values().next().unwrap().as_array().unwrap().clone()
}

#[tokio::test]
async fn nothing_of_a_database_of_the_first_version_is_lost() {
    let mut world = World::new().await;
    world.stop().await;
    let file = world.data_dir().join("backend.db");
    fs::remove_file(&file).unwrap();
    let old = Connection::open(&file).unwrap();
    old.execute_batch(include_str!("../fixtures/backend_version_1.sql")).unwrap();
    drop(old);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    world.start().await;

    // Who was let in is let in, and who was not is not.
    let (first, second) =
        (satellite("sat_1", "sbk_of_the_first_satellite"), satellite("sat_2", "sbk_of_the_second_satellite"));
    world.register("fourth-satellite", "sbr_used_token").await.refused(401, "request a new one");
    world.register("third-satellite", "sbr_unused_token").await.is(201, MessageSchema::Registered);

    let shown = list(&world, "satellites", MessageSchema::Satellites).await;
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

    // The same configuration has the same name, so nobody has to take it on again.
    for (path, config) in [
        ("config", json!({"teams": [{"id": "acme"}]})),
        ("satellites/sat_2/config", json!({"servers": {"files": {"command": "files"}}})),
    ] {
        let before = world.admin(Method::GET, path).send().await.is(200, MessageSchema::Config);
        let kept = world.admin(Method::PUT, path).json(&config).await.is(200, MessageSchema::ConfigKept);
        assert_eq!((&kept["hash"], &kept["changed"]), (&before["hash"], &json!(false)), "{before}");
    }
    assert_eq!(world.config(&first).await["teams"], json!([{"id": "acme"}]));
    assert_eq!(world.config(&second).await["servers"], json!({"files": {"command": "files"}}));

    let commands = list(&world, "satellites/sat_1/commands", MessageSchema::CommandStates).await;
    let mut commands: Vec<_> =
        commands.iter().map(|one| (one["id"].as_str().unwrap(), one["state"].as_str().unwrap())).collect();
    commands.sort_unstable();
    assert_eq!(commands, [("done", "completed"), ("late", "expired"), ("open", "queued"), ("sent", "sent")]);
    assert_eq!(world.to_do(&first).await, ["open", "sent"]);
    assert_eq!(world.to_do(&second).await, ["configure-1"]);
    world.result(&first, "sent", "expired").await.is(200, MessageSchema::Received);

    assert_eq!((world.seqs(&first).await, world.seqs(&second).await), (vec![1, 2, 3, 4], vec![1, 2]));
    let ids: Vec<_> = world.events("after=0").await.iter().map(|event| event["id"].clone()).collect();
    assert_eq!(ids, ["1", "2", "3", "4", "5", "6"]);
    let instances = list(&world, "instances?team=team_acme", MessageSchema::Instances).await;
    let instances: Vec<_> =
        instances.iter().map(|one| json!([one["satellite_id"], one["instance"], one["status"]])).collect();
    assert_eq!(
        instances,
        [json!(["sat_1", "a", "online"]), json!(["sat_1", "b", "offline"]), json!(["sat_2", "a", "error"])]
    );

    // What comes again is known, by its batch and by its numbers; what is new goes on where the old left off.
    let statuses = [(1, "a", "connecting"), (2, "a", "online"), (3, "b", "online"), (4, "b", "offline")];
    let mut events: Vec<_> = statuses.into_iter().map(|(seq, of, is)| status(seq, of, is)).collect();
    let taken = world.send(&first, "1", &events).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(taken["event_ids"], json!(["1", "2", "3", "4"]));
    events.push(status(5, "b", "online"));
    let taken = world.send(&first, "2", &events).await.is(200, MessageSchema::EventsTaken);
    let ids: Vec<u64> =
        taken["event_ids"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().parse().unwrap()).collect();
    assert!(ids[..4] == [1, 2, 3, 4] && ids[4] > 6, "{ids:?}");
    let shown = world.admin(Method::GET, "satellites/sat_1").send().await.is(200, MessageSchema::Satellite);
    assert_eq!((&shown["events"], &shown["instances"]), (&json!(5), &json!({"online": 2})));
}
