//! Restarts of a backend, and the deletion of old data at the start.

use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use mcp_satellite::backend::server::{BackendOpenError, BackendServer};
use reqwest::Method;
use serde_json::json;

use super::support::{TestBackend, heartbeat, numbered, status};

#[tokio::test]
async fn a_restart_keeps_everything() {
    let mut backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let (token, first_token) = (backend.token().await, backend.file("registration-token"));
    backend
        .admin(Method::PUT, "config")
        .json(&json!({"teams": [{"id": "acme"}]}))
        .await
        .is(200, MessageSchema::ConfigUpdateResult);
    backend
        .queue(&satellite, &json!({"id": "open", "command_type": "dance"}))
        .await
        .is(201, MessageSchema::CommandState);
    backend
        .queue(&satellite, &json!({"id": "done", "command_type": "dance"}))
        .await
        .is(201, MessageSchema::CommandState);
    backend.result(&satellite, "done", "completed").await.is(200, MessageSchema::EmptyResponse);
    let first = backend.send(&satellite, "1", &numbered(1..=5)).await.is(200, MessageSchema::EventBatchResult);
    backend.send(&satellite, "2", &[status(6, "a", "online")]).await.is(200, MessageSchema::EventBatchResult);
    backend.send_heartbeat(&satellite, &heartbeat(backend.now())).await.is(200, MessageSchema::EmptyResponse);

    let paths = [
        "satellites".to_owned(),
        format!("satellites/{}", satellite.id),
        "config".to_owned(),
        "events".to_owned(),
        "instances".to_owned(),
        format!("satellites/{}/commands", satellite.id),
    ];
    let state = async |backend: &TestBackend| {
        let mut state = Vec::new();
        for path in &paths {
            state.push(backend.admin(Method::GET, path).send().await.body);
        }
        state
    };
    let before = (state(&backend).await, backend.config(&satellite).await);
    backend.restart().await;
    assert_eq!((state(&backend).await, backend.config(&satellite).await), before);

    assert_eq!(backend.pending_commands(&satellite).await[1..], ["open"]);
    assert_eq!(backend.send(&satellite, "1", &numbered(1..=5)).await.is(200, MessageSchema::EventBatchResult), first);
    backend.send(&satellite, "3", &numbered(4..=7)).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(backend.seqs(&satellite).await, [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(backend.file("registration-token"), first_token);
    backend.register("second-satellite", &token).await.is(201, MessageSchema::RegistrationResponse);
    backend.register("third-satellite", &first_token).await.is(201, MessageSchema::RegistrationResponse);
    backend.restart().await;
    assert_ne!(backend.file("registration-token"), first_token, "a used token is replaced");
    backend.register("fourth-satellite", &first_token).await.refused(401, "request a new one");
}

#[tokio::test]
async fn a_deleted_admin_token_is_replaced_by_a_new_one() {
    let mut backend = TestBackend::new().await;
    let before = backend.file("admin-token");
    backend.restart().await;
    assert_eq!(backend.file("admin-token"), before);
    std::fs::remove_file(backend.data_dir().join("admin-token")).unwrap();
    backend.restart().await;
    assert_ne!(backend.file("admin-token"), before);
    backend.request(Method::GET, "/api/admin/satellites", &before).send().await.refused(401, "admin token");
    backend.admin(Method::GET, "satellites").send().await.is(200, MessageSchema::Satellites);
}

#[tokio::test]
async fn a_second_backend_on_the_same_directory_does_not_start() {
    let backend = TestBackend::new().await;
    let refused = BackendServer::open(backend.settings()).await.map(|_| ()).unwrap_err();
    assert!(matches!(refused, BackendOpenError::InUse(_)), "{refused}");
    assert!(refused.to_string().contains("already running"), "{refused}");
}

#[tokio::test]
async fn only_events_older_than_thirty_days_are_deleted() {
    let mut backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend
        .queue(&satellite, &json!({"id": "open", "command_type": "dance"}))
        .await
        .is(201, MessageSchema::CommandState);
    backend.send(&satellite, "1", &[status(1, "a", "online")]).await.is(200, MessageSchema::EventBatchResult);
    backend.advance_clock(SignedDuration::from_hours(30 * 24));
    backend.send(&satellite, "2", &[status(2, "b", "online")]).await.is(200, MessageSchema::EventBatchResult);
    backend.advance_clock(SignedDuration::from_secs(1));
    backend.restart().await;
    while backend.seqs(&satellite).await.len() > 1 {
        tokio::task::yield_now().await;
    }
    assert_eq!(backend.seqs(&satellite).await, [2]);
    assert_eq!(backend.pending_commands(&satellite).await, ["open"]);
    let instances = backend.admin(Method::GET, "instances").send().await.is(200, MessageSchema::Instances);
    assert_eq!(instances["instances"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn events_over_the_maximum_are_deleted_oldest_first() {
    let mut backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    backend.send(&satellite, "1", &numbered(1..=20)).await.is(200, MessageSchema::EventBatchResult);
    backend.events_max = 7;
    backend.restart().await;
    while backend.seqs(&satellite).await.len() > 7 {
        tokio::task::yield_now().await;
    }
    assert_eq!(backend.seqs(&satellite).await, [14, 15, 16, 17, 18, 19, 20]);
    let shown = backend.admin(Method::GET, "satellites/first-satellite").send().await.is(200, MessageSchema::Satellite);
    assert_eq!((&shown["events"], &shown["last_seq"]), (&json!(7), &json!(20)));
}
