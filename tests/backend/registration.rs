//! Registration of satellites.

use futures::future::join_all;
use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::json;

use super::support::{TestBackend, registration};

#[tokio::test]
async fn the_registration_token_of_the_first_start_registers_a_satellite() {
    let backend = TestBackend::new().await;
    let token = backend.file("registration-token");
    let registered = backend.register("first-satellite", &token).await.is(201, MessageSchema::RegistrationResponse);
    let id = registered["satellite_id"].as_str().unwrap();
    let satellites = backend.admin(Method::GET, "satellites").send().await.is(200, MessageSchema::Satellites);
    assert_eq!(satellites["satellites"][0]["satellite_id"], id);
    assert_eq!(satellites["satellites"][0]["name"], "first-satellite");
    assert_eq!(satellites["satellites"][0]["connected"], true);
}

#[tokio::test]
async fn a_registration_token_is_valid_once() {
    let backend = TestBackend::new().await;
    let token = backend.token().await;
    backend.register("first-satellite", &token).await.is(201, MessageSchema::RegistrationResponse);
    backend.register("second-satellite", &token).await.refused(401, "request a new one");
    backend.register("first-satellite", &token).await.refused(401, "request a new one");
}

#[tokio::test]
async fn of_concurrent_registrations_with_one_token_only_one_succeeds() {
    let backend = TestBackend::new().await;
    let token = backend.token().await;
    let names: Vec<String> = (0..20).map(|number| format!("satellite-{number}")).collect();
    let answers = join_all(names.iter().map(|name| backend.register(name, &token))).await;
    let mut statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    statuses.sort_unstable();
    assert_eq!((statuses[0], &statuses[1..]), (201, &[401; 19][..]));
}

#[tokio::test]
async fn an_expired_registration_token_is_rejected() {
    let backend = TestBackend::new().await;
    let request = backend.admin(Method::POST, "registration-tokens");
    let made =
        request.json(&json!({"expires_in_seconds": 60, "note": "for Alice"})).await.is(201, MessageSchema::IssuedToken);
    assert_eq!(made["expires_at"], "2026-11-21T06:34:00Z");
    let token = made["token"].as_str().unwrap();
    backend.advance_clock(SignedDuration::from_secs(60));
    backend.register("first-satellite", token).await.refused(401, "has expired");
}

#[tokio::test]
async fn without_a_token_the_body_is_not_validated() {
    let backend = TestBackend::new().await;
    let answer = backend.request(Method::POST, "/api/satellites/register", "sbr_0000").body("{").await;
    assert_eq!(answer.headers["www-authenticate"], "Bearer");
    answer.refused(401, "registration token");
    let bare = reqwest::Client::post(&super::support::client(), format!("{}/api/satellites/register", backend.url()));
    super::support::PendingRequest(bare).send().await.refused(401, "a bearer token is required");
}

#[tokio::test]
async fn an_invalid_registration_is_rejected_and_the_token_stays_valid() {
    let backend = TestBackend::new().await;
    let token = backend.token().await;
    for name in
        ["", "short", "satellite", "Satellite-1", "satellite one", "satellite/one", &"s".repeat(33), "satellité-1"]
    {
        backend.register(name, &token).await.refused(400, "/name");
    }
    let mut other = registration("first-satellite");
    other["system"]["cpus"] = json!("two");
    let answer = backend.request(Method::POST, "/api/satellites/register", &token).json(&other).await;
    answer.refused(400, "/system/cpus");
    backend.register("first-satellite", &token).await.is(201, MessageSchema::RegistrationResponse);
}

#[tokio::test]
async fn a_token_cannot_take_over_a_connected_satellite() {
    let backend = TestBackend::new().await;
    let before = backend.satellite("first-satellite").await;
    backend.put_empty_config().await;
    let (token, goodbye) = (backend.token().await, backend.token().await);
    backend.advance_clock(SignedDuration::from_secs(89));
    backend.register("first-satellite", &token).await.refused(409, "is connected");
    backend.config(&before).await;
    backend.advance_clock(SignedDuration::from_secs(89));
    backend.register("first-satellite", &token).await.refused(409, "is connected");
    backend.advance_clock(SignedDuration::from_secs(1));
    // The rejected attempts have not used up the token.
    let registered = backend.register("first-satellite", &token).await.is(201, MessageSchema::RegistrationResponse);
    let key = registered["api_key"].as_str().unwrap().to_owned();
    let satellite = super::support::Satellite { id: before.id, key };
    let mut last = super::support::heartbeat(backend.now());
    last["status"] = json!("stopping");
    backend.send_heartbeat(&satellite, &last).await.is(200, MessageSchema::EmptyResponse);
    backend.register("first-satellite", &goodbye).await.is(201, MessageSchema::RegistrationResponse);
}

#[tokio::test]
async fn a_named_token_registers_only_that_name_even_while_it_is_connected() {
    let backend = TestBackend::new().await;
    let before = backend.satellite("first-satellite").await;
    let token = backend.token_for("first-satellite").await;
    backend.register("second-satellite", &token).await.refused(403, "another name");
    let registered = backend.register("first-satellite", &token).await.is(201, MessageSchema::RegistrationResponse);
    assert_eq!(registered["satellite_id"], before.id);
    backend.as_satellite(&before, Method::GET, "commands").send().await.refused(401, "register again");
    let wanted = backend.admin(Method::POST, "registration-tokens").json(&json!({"name": "short"})).await;
    wanted.refused(400, "/name");
}

#[tokio::test]
async fn a_new_registration_keeps_the_satellite_and_replaces_its_key() {
    let backend = TestBackend::new().await;
    let before = backend.satellite("first-satellite").await;
    backend.send(&before, "1", &super::support::numbered([1])).await.is(200, MessageSchema::EventBatchResult);
    let after = backend.satellite("first-satellite").await;
    assert_eq!(after.id, before.id);
    assert_ne!(after.key, before.key);
    backend.as_satellite(&before, Method::GET, "config").send().await.refused(401, "register again");
    backend.poll(&after).await;
    assert_eq!(backend.seqs(&after).await, [1]);
}

#[tokio::test]
async fn deleting_a_satellite_revokes_its_key_and_deletes_its_data() {
    let backend = TestBackend::new().await;
    let (gone, stays) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    for satellite in [&gone, &stays] {
        backend.send(satellite, "1", &super::support::numbered([1])).await.is(200, MessageSchema::EventBatchResult);
    }
    backend.admin(Method::DELETE, "satellites/first-satellite").send().await.is(200, MessageSchema::EmptyResponse);
    backend.as_satellite(&gone, Method::GET, "commands").send().await.refused(401, "register again");
    backend.admin(Method::GET, "satellites/first-satellite").send().await.refused(404, "no such satellite");
    assert_eq!(backend.events("").await.len(), 1);
    assert_eq!(backend.seqs(&stays).await, [1]);
    let again = backend.satellite("first-satellite").await;
    assert_ne!(again.id, gone.id);
    assert!(backend.seqs(&again).await.is_empty());
}
