//! What a backend has acknowledged it knows after its end.

use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use mcp_satellite::backend::server::{BackendOpenError, BackendServer};
use reqwest::Method;
use serde_json::json;

use super::support::{World, heartbeat, numbered, status};

#[tokio::test]
async fn a_restart_keeps_everything() {
    let mut world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let (token, offered) = (world.token().await, world.file("registration-token"));
    world
        .admin(Method::PUT, "config")
        .json(&json!({"teams": [{"id": "acme"}]}))
        .await
        .is(200, MessageSchema::ConfigKept);
    world.queue(&satellite, &json!({"id": "open", "command_type": "dance"})).await.is(201, MessageSchema::CommandState);
    world.queue(&satellite, &json!({"id": "done", "command_type": "dance"})).await.is(201, MessageSchema::CommandState);
    world.result(&satellite, "done", "completed").await.is(200, MessageSchema::Received);
    let first = world.send(&satellite, "1", &numbered(1..=5)).await.is(200, MessageSchema::EventsTaken);
    world.send(&satellite, "2", &[status(6, "a", "online")]).await.is(200, MessageSchema::EventsTaken);
    world.beat(&satellite, &heartbeat(world.now())).await.is(200, MessageSchema::Received);

    let paths = [
        "satellites".to_owned(),
        format!("satellites/{}", satellite.id),
        "config".to_owned(),
        "events".to_owned(),
        "instances".to_owned(),
        format!("satellites/{}/commands", satellite.id),
    ];
    let picture = async |world: &World| {
        let mut picture = Vec::new();
        for path in &paths {
            picture.push(world.admin(Method::GET, path).send().await.body);
        }
        picture
    };
    let before = (picture(&world).await, world.config(&satellite).await);
    world.restart().await;
    assert_eq!((picture(&world).await, world.config(&satellite).await), before);

    assert_eq!(world.to_do(&satellite).await[1..], ["open"]);
    assert_eq!(world.send(&satellite, "1", &numbered(1..=5)).await.is(200, MessageSchema::EventsTaken), first);
    world.send(&satellite, "3", &numbered(4..=7)).await.is(200, MessageSchema::EventsTaken);
    assert_eq!(world.seqs(&satellite).await, [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(world.file("registration-token"), offered);
    world.register("second-satellite", &token).await.is(201, MessageSchema::Registered);
    world.register("third-satellite", &offered).await.is(201, MessageSchema::Registered);
    world.restart().await;
    assert_ne!(world.file("registration-token"), offered, "a used one is replaced");
    world.register("fourth-satellite", &offered).await.refused(401, "request a new one");
}

#[tokio::test]
async fn another_admin_token_is_made_when_its_file_is_gone() {
    let mut world = World::new().await;
    let before = world.file("admin-token");
    world.restart().await;
    assert_eq!(world.file("admin-token"), before);
    std::fs::remove_file(world.data_dir().join("admin-token")).unwrap();
    world.restart().await;
    assert_ne!(world.file("admin-token"), before);
    world.ask(Method::GET, "/api/admin/satellites", &before).send().await.refused(401, "admin token");
    world.admin(Method::GET, "satellites").send().await.is(200, MessageSchema::Satellites);
}

#[tokio::test]
async fn a_second_backend_on_the_same_directory_does_not_start() {
    let world = World::new().await;
    let refused = BackendServer::open(world.settings()).await.map(|_| ()).unwrap_err();
    assert!(matches!(refused, BackendOpenError::InUse(_)), "{refused}");
    assert!(refused.to_string().contains("already running"), "{refused}");
}

#[tokio::test]
async fn what_is_older_than_thirty_days_goes_and_nothing_else() {
    let mut world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.queue(&satellite, &json!({"id": "open", "command_type": "dance"})).await.is(201, MessageSchema::CommandState);
    world.send(&satellite, "1", &[status(1, "a", "online")]).await.is(200, MessageSchema::EventsTaken);
    world.pass(SignedDuration::from_hours(30 * 24));
    world.send(&satellite, "2", &[status(2, "b", "online")]).await.is(200, MessageSchema::EventsTaken);
    world.pass(SignedDuration::from_secs(1));
    world.restart().await;
    while world.seqs(&satellite).await.len() > 1 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.seqs(&satellite).await, [2]);
    assert_eq!(world.to_do(&satellite).await, ["open"]);
    let instances = world.admin(Method::GET, "instances").send().await.is(200, MessageSchema::Instances);
    assert_eq!(instances["instances"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn of_too_many_events_the_oldest_go() {
    let mut world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.send(&satellite, "1", &numbered(1..=20)).await.is(200, MessageSchema::EventsTaken);
    world.events_max = 7;
    world.restart().await;
    while world.seqs(&satellite).await.len() > 7 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.seqs(&satellite).await, [14, 15, 16, 17, 18, 19, 20]);
    let shown = world.admin(Method::GET, "satellites/first-satellite").send().await.is(200, MessageSchema::Satellite);
    assert_eq!((&shown["events"], &shown["last_seq"]), (&json!(7), &json!(20)));
}
