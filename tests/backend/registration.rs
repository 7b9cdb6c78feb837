//! Satellites come in.

use futures::future::join_all;
use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::json;

use super::support::{World, registration};

#[tokio::test]
async fn the_file_of_the_first_start_lets_one_satellite_in() {
    let world = World::new().await;
    let token = world.file("registration-token");
    let registered = world.register("first-satellite", &token).await.is(201, MessageSchema::Registered);
    let id = registered["satellite_id"].as_str().unwrap();
    let satellites = world.admin(Method::GET, "satellites").send().await.is(200, MessageSchema::Satellites);
    assert_eq!(satellites["satellites"][0]["satellite_id"], id);
    assert_eq!(satellites["satellites"][0]["name"], "first-satellite");
    assert_eq!(satellites["satellites"][0]["connected"], true);
}

#[tokio::test]
async fn a_token_opens_once() {
    let world = World::new().await;
    let token = world.token().await;
    world.register("first-satellite", &token).await.is(201, MessageSchema::Registered);
    world.register("second-satellite", &token).await.refused(401, "request a new one");
    world.register("first-satellite", &token).await.refused(401, "request a new one");
}

#[tokio::test]
async fn of_many_who_come_with_one_token_at_once_one_comes_in() {
    let world = World::new().await;
    let token = world.token().await;
    let names: Vec<String> = (0..20).map(|number| format!("satellite-{number}")).collect();
    let answers = join_all(names.iter().map(|name| world.register(name, &token))).await;
    let mut statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    statuses.sort_unstable();
    assert_eq!((statuses[0], &statuses[1..]), (201, &[401; 19][..]));
}

#[tokio::test]
async fn a_token_that_nobody_used_in_time_opens_nothing() {
    let world = World::new().await;
    let asking = world.admin(Method::POST, "registration-tokens");
    let made =
        asking.json(&json!({"expires_in_seconds": 60, "note": "for Alice"})).await.is(201, MessageSchema::TokenMade);
    assert_eq!(made["expires_at"], "2026-11-21T06:34:00Z");
    let token = made["token"].as_str().unwrap();
    world.pass(SignedDuration::from_secs(60));
    world.register("first-satellite", token).await.refused(401, "has expired");
}

#[tokio::test]
async fn who_has_no_token_learns_nothing_about_what_to_send() {
    let world = World::new().await;
    let answer = world.ask(Method::POST, "/api/satellites/register", "sbr_0000").body("{").await;
    assert_eq!(answer.headers["www-authenticate"], "Bearer");
    answer.refused(401, "registration token");
    let bare = reqwest::Client::post(&super::support::client(), format!("{}/api/satellites/register", world.url()));
    super::support::Asking(bare).send().await.refused(401, "a bearer token is required");
}

#[tokio::test]
async fn a_name_or_form_that_is_none_is_refused_and_the_token_stays_good() {
    let world = World::new().await;
    let token = world.token().await;
    for name in
        ["", "short", "satellite", "Satellite-1", "satellite one", "satellite/one", &"s".repeat(33), "satellité-1"]
    {
        world.register(name, &token).await.refused(400, "/name");
    }
    let mut other = registration("first-satellite");
    other["system"]["cpus"] = json!("two");
    let answer = world.ask(Method::POST, "/api/satellites/register", &token).json(&other).await;
    answer.refused(400, "/system/cpus");
    world.register("first-satellite", &token).await.is(201, MessageSchema::Registered);
}

#[tokio::test]
async fn a_token_takes_no_satellite_over_that_is_connected() {
    let world = World::new().await;
    let before = world.satellite("first-satellite").await;
    world.configured().await;
    let (token, goodbye) = (world.token().await, world.token().await);
    world.pass(SignedDuration::from_secs(89));
    world.register("first-satellite", &token).await.refused(409, "is connected");
    world.config(&before).await;
    world.pass(SignedDuration::from_secs(89));
    world.register("first-satellite", &token).await.refused(409, "is connected");
    world.pass(SignedDuration::from_secs(1));
    // The token is good yet.
    let registered = world.register("first-satellite", &token).await.is(201, MessageSchema::Registered);
    let key = registered["api_key"].as_str().unwrap().to_owned();
    let satellite = super::support::Satellite { id: before.id, key };
    let mut last = super::support::heartbeat(world.now());
    last["status"] = json!("stopping");
    world.beat(&satellite, &last).await.is(200, MessageSchema::Received);
    world.register("first-satellite", &goodbye).await.is(201, MessageSchema::Registered);
}

#[tokio::test]
async fn a_token_for_a_name_lets_in_that_one_alone_also_while_it_is_connected() {
    let world = World::new().await;
    let before = world.satellite("first-satellite").await;
    let token = world.token_for("first-satellite").await;
    world.register("second-satellite", &token).await.refused(403, "another name");
    let registered = world.register("first-satellite", &token).await.is(201, MessageSchema::Registered);
    assert_eq!(registered["satellite_id"], before.id);
    world.of(&before, Method::GET, "commands").send().await.refused(401, "register again");
    let wanted = world.admin(Method::POST, "registration-tokens").json(&json!({"name": "short"})).await;
    wanted.refused(400, "/name");
}

#[tokio::test]
async fn who_registers_again_is_the_same_satellite_with_another_key_and_the_old_one_ends() {
    let world = World::new().await;
    let before = world.satellite("first-satellite").await;
    world.send(&before, "1", &super::support::numbered([1])).await.is(200, MessageSchema::EventsTaken);
    let after = world.satellite("first-satellite").await;
    assert_eq!(after.id, before.id);
    assert_ne!(after.key, before.key);
    world.of(&before, Method::GET, "config").send().await.refused(401, "register again");
    world.poll(&after).await;
    assert_eq!(world.seqs(&after).await, [1]);
}

#[tokio::test]
async fn a_satellite_that_is_deleted_has_no_key_and_leaves_nothing() {
    let world = World::new().await;
    let (gone, stays) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    for satellite in [&gone, &stays] {
        world.send(satellite, "1", &super::support::numbered([1])).await.is(200, MessageSchema::EventsTaken);
    }
    world.admin(Method::DELETE, "satellites/first-satellite").send().await.is(200, MessageSchema::Received);
    world.of(&gone, Method::GET, "commands").send().await.refused(401, "register again");
    world.admin(Method::GET, "satellites/first-satellite").send().await.refused(404, "no such satellite");
    assert_eq!(world.events("").await.len(), 1);
    assert_eq!(world.seqs(&stays).await, [1]);
    let again = world.satellite("first-satellite").await;
    assert_ne!(again.id, gone.id);
    assert!(world.seqs(&again).await.is_empty());
}
