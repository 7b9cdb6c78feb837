//! Nobody sees what is another's, and who shows nothing sees nothing.

use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{Answer, Satellite, World, heartbeat, numbered};

const OF_A_SATELLITE: [(Method, &str); 5] = [
    (Method::GET, "commands"),
    (Method::POST, "commands/c1/result"),
    (Method::GET, "config"),
    (Method::POST, "events"),
    (Method::POST, "heartbeat"),
];

const OF_THE_ADMINISTRATOR: [(Method, &str); 18] = [
    (Method::POST, "registration-tokens"),
    (Method::GET, "config"),
    (Method::PUT, "config"),
    (Method::GET, "satellites"),
    (Method::GET, "satellites/first-satellite"),
    (Method::DELETE, "satellites/first-satellite"),
    (Method::GET, "satellites/first-satellite/config"),
    (Method::PUT, "satellites/first-satellite/config"),
    (Method::DELETE, "satellites/first-satellite/config"),
    (Method::GET, "satellites/first-satellite/commands"),
    (Method::POST, "satellites/first-satellite/commands"),
    (Method::GET, "satellites/first-satellite/commands/c1"),
    (Method::GET, "satellites/first-satellite/instances/i1"),
    (Method::GET, "events"),
    (Method::GET, "instances"),
    (Method::GET, "instances/stream"),
    (Method::GET, "instances?satellite=nobody"),
    (Method::GET, "events?limit=nonsense"),
];

/// A body that each of them would take.
fn body(path: &str) -> Value {
    match path {
        "events" => json!({"events": numbered([1])}),
        "heartbeat" => heartbeat("2026-11-21T06:33:00Z".parse().unwrap()),
        _ => json!({"status": "completed", "duration_ms": 1}),
    }
}

#[tokio::test]
async fn a_satellite_on_the_path_of_another_hears_the_same_as_on_one_of_nobody() {
    let world = World::new().await;
    let (one, other) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    let command = json!({"id": "c1", "command_type": "kill", "payload": {"installation_id": "a"}});
    world.queue(&other, &command).await.is(201, MessageSchema::CommandState);
    for (method, path) in OF_A_SATELLITE {
        let ask = async |id: &str| {
            let on = Satellite { id: id.to_owned(), key: one.key.clone() };
            world.of(&on, method.clone(), path).json(&body(path)).await
        };
        let (others, nobodys) = (ask(&other.id).await, ask("sat-000000000000000000000000").await);
        assert_eq!(others.body, nobodys.body);
        assert_eq!((others.status, nobodys.status), (404, 404), "{path}");
        ask("second-satellite").await.refused(404, "");
    }
    assert_eq!(world.to_do(&other).await, ["c1"]);
    assert!(world.seqs(&other).await.is_empty());
    world.result(&one, "c1", "completed").await.refused(404, "no such command");
    assert!(world.to_do(&one).await.is_empty());
}

#[tokio::test]
async fn two_satellites_with_the_same_numbers_and_batch_ids_do_not_meet() {
    let world = World::new().await;
    let (one, other) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    let taken = |answer: Answer| answer.is(200, MessageSchema::EventsTaken)["event_ids"].clone();
    let first = taken(world.send(&one, "7", &numbered([1, 2])).await);
    let second = taken(world.send(&other, "7", &numbered([1, 2])).await);
    assert_eq!((first, second), (json!(["1", "2"]), json!(["3", "4"])));
    assert_eq!(world.seqs(&one).await, [1, 2]);
    assert_eq!(world.seqs(&other).await, [1, 2]);
}

#[tokio::test]
async fn keys_open_only_what_they_are_for() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    let (admin, token) = (world.file("admin-token"), world.token().await);
    for wrong in [&admin, &token, "", "sbk_0", &satellite.key[1..], &satellite.key.to_uppercase()] {
        for (method, path) in OF_A_SATELLITE {
            let ask = world.ask(method, &format!("/api/satellites/{}/{path}", satellite.id), wrong);
            let answer = ask.json(&body(path)).await;
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
            answer.refused(401, "");
        }
    }
    for wrong in [&satellite.key, &token, "", &admin[1..]] {
        for (method, path) in OF_THE_ADMINISTRATOR {
            let answer = world.ask(method, &format!("/api/admin/{path}"), wrong).json(&json!({})).await;
            answer.refused(401, "");
        }
        world.register("third-satellite", if wrong == token { "" } else { wrong }).await.refused(401, "");
    }
    // And the scheme is the one that is asked for.
    let basic = super::support::client().get(format!("{}/api/admin/satellites", world.url()));
    super::support::Asking(basic.header("Authorization", format!("Basic {admin}"))).send().await.refused(401, "Bearer");
    world.poll(&satellite).await;
}

#[tokio::test]
async fn what_is_not_there_is_told_as_everything_else_is() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    for path in ["/", "/api", "/api/satellites", "/api/admin/nothing", "/api/satellites/%ff/config"] {
        let answer = world.ask(Method::GET, path, &satellite.key).send().await;
        answer.refused(404, "there is no such");
    }
    world.of(&satellite, Method::DELETE, "config").send().await.refused(405, "method");
    world.admin(Method::GET, "satellites/nobody/commands").send().await.refused(404, "no such satellite");
    world.admin(Method::GET, "satellites/first-satellite/commands/c1").send().await.refused(404, "no such command");
    world.admin(Method::GET, "satellites/first-satellite/instances/i").send().await.refused(404, "no such instance");
    world.admin(Method::GET, "events?limit=many").send().await.refused(400, "limit");
    let health = super::support::client().get(format!("{}/health", world.url()));
    assert_eq!(super::support::Asking(health).send().await.body, json!({"status": "ok"}));
}
