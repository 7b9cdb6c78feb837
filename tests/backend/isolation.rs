//! Isolation of satellites, and authentication.

use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::Method;
use serde_json::{Value, json};

use super::support::{Answer, Satellite, TestBackend, heartbeat, numbered};

const SATELLITE_PATHS: [(Method, &str); 6] = [
    (Method::GET, "commands"),
    (Method::POST, "commands/c1/result"),
    (Method::GET, "config"),
    (Method::POST, "events"),
    (Method::POST, "heartbeat"),
    (Method::GET, "fleet"),
];

const ADMIN_PATHS: [(Method, &str); 18] = [
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

/// A valid body for each path.
fn body(path: &str) -> Value {
    match path {
        "events" => json!({"events": numbered([1])}),
        "heartbeat" => heartbeat("2026-11-21T06:33:00Z".parse().unwrap()),
        _ => json!({"status": "completed", "duration_ms": 1}),
    }
}

#[tokio::test]
async fn the_path_of_another_satellite_looks_nonexistent() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    let command = json!({"id": "c1", "command_type": "kill", "payload": {"installation_id": "a"}});
    backend.queue(&other, &command).await.is(201, MessageSchema::CommandState);
    for (method, path) in SATELLITE_PATHS {
        let ask = async |id: &str| {
            let attacker = Satellite { id: id.to_owned(), key: one.key.clone() };
            backend.as_satellite(&attacker, method.clone(), path).json(&body(path)).await
        };
        let (others, nobodys) = (ask(&other.id).await, ask("sat-000000000000000000000000").await);
        assert_eq!(others.body, nobodys.body);
        assert_eq!((others.status, nobodys.status), (404, 404), "{path}");
        ask("second-satellite").await.refused(404, "");
    }
    assert_eq!(backend.pending_commands(&other).await, ["c1"]);
    assert!(backend.seqs(&other).await.is_empty());
    backend.result(&one, "c1", "completed").await.refused(404, "no such command");
    assert!(backend.pending_commands(&one).await.is_empty());
}

#[tokio::test]
async fn equal_sequence_numbers_and_keys_of_two_satellites_do_not_collide() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    let event_ids = |answer: Answer| answer.is(200, MessageSchema::EventBatchResult)["event_ids"].clone();
    let first = event_ids(backend.send(&one, "7", &numbered([1, 2])).await);
    let second = event_ids(backend.send(&other, "7", &numbered([1, 2])).await);
    assert_eq!((first, second), (json!(["1", "2"]), json!(["3", "4"])));
    assert_eq!(backend.seqs(&one).await, [1, 2]);
    assert_eq!(backend.seqs(&other).await, [1, 2]);
}

#[tokio::test]
async fn each_credential_is_valid_only_for_its_own_api() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let (admin, token) = (backend.file("admin-token"), backend.token().await);
    for invalid in [&admin, &token, "", "sbk_0", &satellite.key[1..], &satellite.key.to_uppercase()] {
        for (method, path) in SATELLITE_PATHS {
            let ask = backend.request(method, &format!("/api/satellites/{}/{path}", satellite.id), invalid);
            let answer = ask.json(&body(path)).await;
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
            answer.refused(401, "");
        }
    }
    for invalid in [&satellite.key, &token, "", &admin[1..]] {
        for (method, path) in ADMIN_PATHS {
            let answer = backend.request(method, &format!("/api/admin/{path}"), invalid).json(&json!({})).await;
            answer.refused(401, "");
        }
        backend.register("third-satellite", if invalid == token { "" } else { invalid }).await.refused(401, "");
    }
    // Only the scheme `Bearer` is accepted.
    let basic = super::support::client().get(format!("{}/api/admin/satellites", backend.url()));
    super::support::PendingRequest(basic.header("Authorization", format!("Basic {admin}")))
        .send()
        .await
        .refused(401, "Bearer");
    backend.poll(&satellite).await;
}

#[tokio::test]
async fn unknown_paths_and_methods_get_json_errors() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    for path in ["/", "/api", "/api/satellites", "/api/admin/nothing", "/api/satellites/%ff/config"] {
        let answer = backend.request(Method::GET, path, &satellite.key).send().await;
        answer.refused(404, "there is no such");
    }
    backend.as_satellite(&satellite, Method::DELETE, "config").send().await.refused(405, "method");
    backend.admin(Method::GET, "satellites/nobody/commands").send().await.refused(404, "no such satellite");
    backend.admin(Method::GET, "satellites/first-satellite/commands/c1").send().await.refused(404, "no such command");
    backend.admin(Method::GET, "satellites/first-satellite/instances/i").send().await.refused(404, "no such instance");
    backend.admin(Method::GET, "events?limit=many").send().await.refused(400, "limit");
    let health = super::support::client().get(format!("{}/health", backend.url()));
    assert_eq!(super::support::PendingRequest(health).send().await.body, json!({"status": "ok"}));
}
