//! What satellites are to run.

use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{Satellite, World};

fn config(team: &str) -> Value {
    json!({
        "servers": {"files": {"command": "npx", "args": ["-y", "files"]}},
        "teams": [{"id": team, "slug": team, "users": [{"id": "u1"}], "installations": [{"id": "i1", "server": "files"}]}],
    })
}

async fn put(world: &World, path: &str, config: &Value) -> Value {
    world.admin(Method::PUT, path).json(config).await.is(200, MessageSchema::ConfigKept)
}

async fn status_for(world: &World, satellite: &Satellite, tag: &str) -> u16 {
    world.of(satellite, Method::GET, "config").header("If-None-Match", tag).send().await.status
}

#[tokio::test]
async fn a_configuration_arrives_as_it_was_put_with_a_hash_of_the_backends() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.configured().await;
    let nothing = world.config(&satellite).await;
    assert_eq!((&nothing["servers"], &nothing["teams"]), (&json!({}), &json!([])));
    let mut wanted = config("acme");
    wanted["hash"] = json!("whatever");
    let kept = put(&world, "config", &wanted).await;
    assert_eq!((&kept["changed"], &kept["told"]), (&json!(true), &json!([satellite.id])));
    let arrived = world.config(&satellite).await;
    assert_eq!((&arrived["servers"], &arrived["teams"]), (&wanted["servers"], &wanted["teams"]));
    assert_eq!(arrived["hash"], kept["hash"]);
    assert_ne!(arrived["hash"], nothing["hash"]);
    let shown = world.admin(Method::GET, "config").send().await.is(200, MessageSchema::Config);
    assert_eq!(shown, arrived);
}

#[tokio::test]
async fn before_a_configuration_was_put_there_is_none_and_not_an_empty_one() {
    let world = World::new().await;
    let (one, other) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    let none = "there is no configuration for this satellite yet";
    for asking in
        [world.of(&one, Method::GET, "config"), world.of(&one, Method::GET, "config").header("If-None-Match", "*")]
    {
        let answer = asking.send().await;
        assert!(!answer.headers.contains_key("etag"));
        answer.refused(404, none);
    }
    world.admin(Method::GET, "config").send().await.refused(404, "for all satellites yet");
    world.admin(Method::GET, "satellites/first-satellite/config").send().await.refused(404, none);
    let shown = world.admin(Method::GET, "satellites/first-satellite").send().await.is(200, MessageSchema::Satellite);
    assert_eq!(shown.get("config_hash"), None);
    // Nothing to run, said by somebody, is a configuration.
    let kept = put(&world, "satellites/first-satellite/config", &json!({})).await;
    assert_eq!((&kept["changed"], &kept["told"]), (&json!(true), &json!([one.id])));
    assert_eq!(world.config(&one).await["teams"], json!([]));
    world.of(&other, Method::GET, "config").send().await.refused(404, none);
    let forget = async || world.admin(Method::DELETE, "satellites/first-satellite/config").send().await;
    forget().await.refused(409, "put one first");
    world.config(&one).await;
    put(&world, "config", &config("acme")).await;
    forget().await.is(200, MessageSchema::ConfigKept);
    assert_eq!(world.config(&one).await, world.config(&other).await);
}

#[tokio::test]
async fn what_is_known_already_is_not_sent_again() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    world.configured().await;
    let answer = world.of(&satellite, Method::GET, "config").send().await;
    let tag = answer.headers["etag"].to_str().unwrap().to_owned();
    let hash = answer.is(200, MessageSchema::Config)["hash"].as_str().unwrap().to_owned();
    assert_eq!(tag, format!("\"{hash}\""));
    for known in [&tag, &hash, &format!("W/{tag}"), &format!("\"other\", {tag}"), "*"] {
        let answer = world.of(&satellite, Method::GET, "config").header("If-None-Match", known).send().await;
        assert_eq!((answer.status, &answer.body), (304, &Value::Null), "{known}");
        assert_eq!(answer.headers["etag"].to_str().unwrap(), tag);
    }
    put(&world, "config", &config("acme")).await;
    assert_eq!(status_for(&world, &satellite, &tag).await, 200);
}

#[tokio::test]
async fn satellites_are_told_once_of_a_change_and_not_of_what_is_none() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    put(&world, "config", &config("acme")).await;
    put(&world, "config", &config("bolt")).await;
    let polled = world.poll(&satellite).await;
    assert_eq!(polled["commands"].as_array().unwrap().len(), 1, "nobody had heard of the first: {polled}");
    let command = &polled["commands"][0];
    assert_eq!((&command["command_type"], &command["priority"]), (&json!("configure"), &json!("immediate")));
    assert_eq!(command["payload"], json!({"event": "mcp_installation_updated"}));
    assert_eq!(polled["polling_mode"], "immediate");
    // It may be reading the second already.
    put(&world, "config", &config("core")).await;
    let waiting = world.to_do(&satellite).await;
    assert_eq!(waiting.len(), 2);
    for command in waiting {
        world.result(&satellite, &command, "completed").await.is(200, MessageSchema::Received);
    }
    let kept = put(&world, "config", &config("core")).await;
    assert_eq!((&kept["changed"], &kept["told"]), (&json!(false), &json!([])));
    assert!(world.to_do(&satellite).await.is_empty());
}

#[tokio::test]
async fn a_satellite_of_its_own_configuration_does_not_see_the_one_for_all() {
    let world = World::new().await;
    let (own, other) = (world.satellite("first-satellite").await, world.satellite("second-satellite").await);
    put(&world, "config", &config("acme")).await;
    let kept = put(&world, "satellites/first-satellite/config", &config("bolt")).await;
    assert_eq!(kept["told"], json!([own.id]));
    assert_eq!(world.config(&own).await["teams"][0]["id"], "bolt");
    assert_eq!(world.config(&other).await["teams"][0]["id"], "acme");
    let kept = put(&world, "config", &config("core")).await;
    assert_eq!(kept["told"], json!([other.id]));
    assert_eq!(world.config(&own).await["teams"][0]["id"], "bolt");
    let forgotten = world.admin(Method::DELETE, "satellites/first-satellite/config").send().await;
    let forgotten = forgotten.is(200, MessageSchema::ConfigKept);
    assert_eq!((&forgotten["changed"], &forgotten["told"]), (&json!(true), &json!([own.id])));
    assert_eq!(world.config(&own).await, world.config(&other).await);
}

#[tokio::test]
async fn what_is_no_configuration_is_refused_and_changes_nothing() {
    let world = World::new().await;
    let satellite = world.satellite("first-satellite").await;
    put(&world, "config", &config("acme")).await;
    let before = world.config(&satellite).await;
    for (wrong, place) in [
        (json!([]), "object"),
        (json!({"teams": {}}), "/teams"),
        (json!({"teams": [7]}), "/teams/0"),
        (json!({"servers": []}), "/servers"),
        (json!({"servers": {"files": "secret-value-9"}}), "/servers/files"),
    ] {
        let answer = world.admin(Method::PUT, "config").json(&wrong).await;
        assert!(!answer.body.to_string().contains("secret-value"), "{answer:?}");
        answer.refused(400, place);
    }
    assert_eq!(world.config(&satellite).await, before);
}

#[tokio::test]
async fn two_backends_say_different_hashes_of_one_configuration() {
    let (one, other) = (World::new().await, World::new().await);
    let hash = async |world| put(world, "config", &config("acme")).await["hash"].clone();
    assert_ne!(hash(&one).await, hash(&other).await);
}
