//! Configurations for satellites.

use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{Satellite, TestBackend};

fn config(team: &str) -> Value {
    json!({
        "servers": {"files": {"command": "npx", "args": ["-y", "files"]}},
        "teams": [{"id": team, "slug": team, "users": [{"id": "u1"}], "installations": [{"id": "i1", "server": "files"}]}],
    })
}

async fn put(backend: &TestBackend, path: &str, config: &Value) -> Value {
    backend.admin(Method::PUT, path).json(config).await.is(200, MessageSchema::ConfigUpdateResult)
}

async fn status_for(backend: &TestBackend, satellite: &Satellite, tag: &str) -> u16 {
    backend.as_satellite(satellite, Method::GET, "config").header("If-None-Match", tag).send().await.status
}

#[tokio::test]
async fn a_configuration_arrives_unchanged_with_a_hash_of_the_backend() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.put_empty_config().await;
    let nothing = backend.config(&satellite).await;
    assert_eq!((&nothing["servers"], &nothing["teams"]), (&json!({}), &json!([])));
    let mut wanted = config("acme");
    wanted["hash"] = json!("whatever");
    let stored = put(&backend, "config", &wanted).await;
    assert_eq!((&stored["changed"], &stored["told"]), (&json!(true), &json!([satellite.id])));
    let arrived = backend.config(&satellite).await;
    assert_eq!((&arrived["servers"], &arrived["teams"]), (&wanted["servers"], &wanted["teams"]));
    assert_eq!(arrived["hash"], stored["hash"]);
    assert_ne!(arrived["hash"], nothing["hash"]);
    let shown = backend.admin(Method::GET, "config").send().await.is(200, MessageSchema::Config);
    assert_eq!(shown, arrived);
}

#[tokio::test]
async fn without_a_configuration_the_backend_returns_404_instead_of_an_empty_one() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    let none = "there is no configuration for this satellite yet";
    for request in [
        backend.as_satellite(&one, Method::GET, "config"),
        backend.as_satellite(&one, Method::GET, "config").header("If-None-Match", "*"),
    ] {
        let answer = request.send().await;
        assert!(!answer.headers.contains_key("etag"));
        answer.refused(404, none);
    }
    backend.admin(Method::GET, "config").send().await.refused(404, "for all satellites yet");
    backend.admin(Method::GET, "satellites/first-satellite/config").send().await.refused(404, none);
    let shown = backend.admin(Method::GET, "satellites/first-satellite").send().await.is(200, MessageSchema::Satellite);
    assert_eq!(shown.get("config_hash"), None);
    // An empty configuration that was put is a configuration.
    let stored = put(&backend, "satellites/first-satellite/config", &json!({})).await;
    assert_eq!((&stored["changed"], &stored["told"]), (&json!(true), &json!([one.id])));
    assert_eq!(backend.config(&one).await["teams"], json!([]));
    backend.as_satellite(&other, Method::GET, "config").send().await.refused(404, none);
    let forget = async || backend.admin(Method::DELETE, "satellites/first-satellite/config").send().await;
    forget().await.refused(409, "put one first");
    backend.config(&one).await;
    put(&backend, "config", &config("acme")).await;
    forget().await.is(200, MessageSchema::ConfigUpdateResult);
    assert_eq!(backend.config(&one).await, backend.config(&other).await);
}

#[tokio::test]
async fn an_unchanged_configuration_gets_304() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.put_empty_config().await;
    let answer = backend.as_satellite(&satellite, Method::GET, "config").send().await;
    let tag = answer.headers["etag"].to_str().unwrap().to_owned();
    let hash = answer.is(200, MessageSchema::Config)["hash"].as_str().unwrap().to_owned();
    assert_eq!(tag, format!("\"{hash}\""));
    for known in [&tag, &hash, &format!("W/{tag}"), &format!("\"other\", {tag}"), "*"] {
        let answer =
            backend.as_satellite(&satellite, Method::GET, "config").header("If-None-Match", known).send().await;
        assert_eq!((answer.status, &answer.body), (304, &Value::Null), "{known}");
        assert_eq!(answer.headers["etag"].to_str().unwrap(), tag);
    }
    put(&backend, "config", &config("acme")).await;
    assert_eq!(status_for(&backend, &satellite, &tag).await, 200);
}

#[tokio::test]
async fn a_changed_configuration_queues_one_configure_command() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    put(&backend, "config", &config("acme")).await;
    put(&backend, "config", &config("bolt")).await;
    let polled = backend.poll(&satellite).await;
    assert_eq!(polled["commands"].as_array().unwrap().len(), 1, "the first change was not sent yet: {polled}");
    let command = &polled["commands"][0];
    assert_eq!((&command["command_type"], &command["priority"]), (&json!("configure"), &json!("immediate")));
    assert_eq!(command["payload"], json!({"event": "mcp_installation_updated"}));
    assert_eq!(polled["polling_mode"], "immediate");
    // A command that was sent is not reused: the satellite may be reading the former configuration.
    put(&backend, "config", &config("core")).await;
    let waiting = backend.pending_commands(&satellite).await;
    assert_eq!(waiting.len(), 2);
    for command in waiting {
        backend.result(&satellite, &command, "completed").await.is(200, MessageSchema::EmptyResponse);
    }
    let stored = put(&backend, "config", &config("core")).await;
    assert_eq!((&stored["changed"], &stored["told"]), (&json!(false), &json!([])));
    assert!(backend.pending_commands(&satellite).await.is_empty());
}

#[tokio::test]
async fn a_satellite_with_its_own_configuration_ignores_the_common_one() {
    let backend = TestBackend::new().await;
    let (own, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    put(&backend, "config", &config("acme")).await;
    let stored = put(&backend, "satellites/first-satellite/config", &config("bolt")).await;
    assert_eq!(stored["told"], json!([own.id]));
    assert_eq!(backend.config(&own).await["teams"][0]["id"], "bolt");
    assert_eq!(backend.config(&other).await["teams"][0]["id"], "acme");
    let stored = put(&backend, "config", &config("core")).await;
    assert_eq!(stored["told"], json!([other.id]));
    assert_eq!(backend.config(&own).await["teams"][0]["id"], "bolt");
    let forgotten = backend.admin(Method::DELETE, "satellites/first-satellite/config").send().await;
    let forgotten = forgotten.is(200, MessageSchema::ConfigUpdateResult);
    assert_eq!((&forgotten["changed"], &forgotten["told"]), (&json!(true), &json!([own.id])));
    assert_eq!(backend.config(&own).await, backend.config(&other).await);
}

#[tokio::test]
async fn an_invalid_configuration_is_rejected_and_changes_nothing() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    put(&backend, "config", &config("acme")).await;
    let before = backend.config(&satellite).await;
    for (invalid, place) in [
        (json!([]), "object"),
        (json!({"teams": {}}), "/teams"),
        (json!({"teams": [7]}), "/teams/0"),
        (json!({"servers": []}), "/servers"),
        (json!({"servers": {"files": "secret-value-9"}}), "/servers/files"),
    ] {
        let answer = backend.admin(Method::PUT, "config").json(&invalid).await;
        assert!(!answer.body.to_string().contains("secret-value"), "{answer:?}");
        answer.refused(400, place);
    }
    assert_eq!(backend.config(&satellite).await, before);
}

#[tokio::test]
async fn two_backends_return_different_hashes_for_one_configuration() {
    let (one, other) = (TestBackend::new().await, TestBackend::new().await);
    let hash = async |backend| put(backend, "config", &config("acme")).await["hash"].clone();
    assert_ne!(hash(&one).await, hash(&other).await);
}
