//! Registration of the satellite, and its key.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use mcp_satellite::config::BackendPlan;
use mcp_satellite::state::DATABASE;

use super::fixture::LinkFixture;
use super::peer::{Peer, PeerResponse, wait_for};

#[tokio::test]
async fn a_satellite_registers_once_and_reuses_its_stored_key() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let mut fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    let status = linked.wait_until("a contact", |status| status.connected && status.satellite_id.is_some()).await;
    assert_eq!((status.satellite_id.as_deref(), status.url), (Some("sat-1"), peer.url()));
    wait_for("a heartbeat", || peer.requests("heartbeat").pop()).await;
    let registration = &peer.requests("register")[0];
    assert_eq!(registration.bearer, "token-1");
    assert_eq!(registration.body["name"], "satellite-0001");
    assert_eq!(registration.body["capabilities"], serde_json::json!(["stdio", "http", "sse"]));
    assert!(registration.body["system"]["memory_bytes"].as_u64() > Some(1 << 20), "{}", registration.body);
    let key = fixture.home.path().join(DATABASE);
    assert_eq!(key.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    drop(linked);

    fixture.plan.token = None;
    let polls = peer.requests("commands").len();
    let linked = fixture.link();
    linked.wait_until("a contact", |status| status.connected).await;
    wait_for("polls with the stored key", || (peer.requests("commands").len() > polls + 2).then_some(())).await;
    assert_eq!(peer.requests("register").len(), 1);
    assert!(peer.requests("commands").iter().all(|seen| seen.bearer == "api-key-0123456789-1"));
}

#[tokio::test]
async fn a_revoked_key_is_replaced_with_a_new_token() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    linked.wait_until("a contact", |status| status.connected).await;
    peer.revoke();
    let why = linked.wait_for_error("this token was used").await;
    assert!(why.starts_with("registration: ") && why.contains("create a new one at the backend"), "{why}");
    assert!(!why.contains("token-1") && !why.contains("api-key"), "{why}");
    let status = linked.status();
    assert_eq!((status.connected, status.satellite_id, status.mode.as_str()), (false, None, "registering"));
    let text = LinkFixture::stored_key(fixture.home.path()).unwrap();
    assert!(text.contains("api-key-0123456789-1"), "the key stays until it is replaced");

    peer.token("token-2");
    linked.link.set_registration_token(&BackendPlan { token: Some("token-2".into()), ..fixture.plan.clone() });
    let status = linked.wait_until("a contact", |status| status.connected && status.last_error.is_none()).await;
    assert_eq!(status.satellite_id.as_deref(), Some("sat-2"));
    let text = LinkFixture::stored_key(fixture.home.path()).unwrap();
    assert!(text.contains("api-key-0123456789-2"), "the new key is stored");
}

#[tokio::test]
async fn a_key_rejected_by_an_impostor_works_again_with_the_real_backend() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    linked.wait_until("a contact", |status| status.connected).await;
    // For a while another program at the port rejects every key.
    let all = ["register", "commands", "result", "config", "events", "heartbeat"];
    for what in all {
        peer.respond(what, Some(PeerResponse::Status(401, "{\"error\": \"who are you\"}".to_owned())));
    }
    linked.wait_for_error("registration").await;
    let attempts = peer.requests("register").len();
    wait_for("more attempts", || (peer.requests("register").len() > attempts + 1).then_some(())).await;
    for what in all {
        peer.respond(what, None);
    }
    let status = linked.wait_until("the recovery", |status| status.connected && status.last_error.is_none()).await;
    assert_eq!(status.satellite_id.as_deref(), Some("sat-1"), "its token was already used");
}

#[tokio::test]
async fn repeated_registrations_back_off_if_every_new_key_is_rejected() {
    let peer = Peer::start().await;
    for token in 0..10 {
        peer.token(&format!("token-{token}"));
    }
    for what in ["commands", "config", "heartbeat"] {
        peer.respond(what, Some(PeerResponse::Status(401, "{\"error\": \"no\"}".to_owned())));
    }
    let mut fixture = LinkFixture::new(&peer, Some("token-0")).await;
    fixture.plan.backoff_max = Duration::from_secs(60);
    let linked = fixture.link();
    wait_for("the first registration", || (!peer.requests("register").is_empty()).then_some(())).await;
    wait_for("the refusal", || linked.status().satellite_id.is_none().then_some(())).await;
    linked.link.set_registration_token(&BackendPlan { token: Some("token-1".into()), ..fixture.plan.clone() });
    wait_for("the second registration", || (peer.requests("register").len() >= 2).then_some(())).await;
    linked.link.set_registration_token(&BackendPlan { token: Some("token-2".into()), ..fixture.plan.clone() });
    // The backend accepts the same token again, so retrying it at once would loop.
    peer.token("token-2");
    wait_for("the third registration", || (peer.requests("register").len() >= 3).then_some(())).await;
    peer.token("token-2");
    wait_for("the fourth registration", || (peer.requests("register").len() >= 4).then_some(())).await;
    let at: Vec<_> = peer.requests("register").iter().map(|seen| seen.at).collect();
    let gap = at[3].duration_since(at[2]);
    assert!(gap >= Duration::from_millis(1_800), "{gap:?} between two failed registrations");
}

#[tokio::test]
async fn without_a_token_the_status_names_the_next_step() {
    let peer = Peer::start().await;
    let fixture = LinkFixture::new(&peer, None).await;
    let linked = fixture.link();
    let why = linked.wait_for_error("registration token").await;
    assert!(why.contains("token = \"env:NAME\""), "{why}");
    assert!(peer.requests("register").is_empty());
}

#[tokio::test]
async fn a_token_is_not_used_while_the_key_cannot_be_stored() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let data_dir = fixture.home.path().join("later");
    // Where SQLite creates the log of the database.
    let obstacle = data_dir.join(format!("{DATABASE}-wal"));
    std::fs::create_dir_all(&obstacle).unwrap();
    std::fs::set_permissions(&data_dir, std::fs::Permissions::from_mode(0o700)).unwrap();
    let linked = fixture.link_in(&data_dir);
    linked.wait_for_error("cannot store a key in").await;
    assert!(peer.requests("register").is_empty());
    std::fs::remove_dir(obstacle).unwrap();
    linked.wait_until("a contact", |status| status.connected).await;
    assert!(LinkFixture::stored_key(&data_dir).is_some());
}

#[tokio::test]
async fn a_satellite_id_with_a_path_is_rejected() {
    let peer = Peer::start().await;
    let bad = "{\"satellite_id\": \"../admin\", \"api_key\": \"0123456789abcdef0123\"}";
    peer.respond("register", Some(PeerResponse::Status(201, bad.to_owned())));
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    let why = linked.wait_for_error("cannot be used").await;
    assert!(!why.contains("0123456789abcdef0123"), "{why}");
    assert!(peer.requests("commands").is_empty());
}

#[tokio::test]
async fn events_wait_for_the_registration_and_use_the_current_key() {
    use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
    use std::sync::Arc;

    let peer = Peer::start().await;
    let fixture = LinkFixture::new(&peer, None).await;
    let linked = fixture.link();
    let sink = linked.link.event_sink();
    let batch = Arc::new(SinkBatch { id: 41, events: Vec::new() });
    let SinkAnswer::Unavailable(why) = sink.send(batch.clone()).await else { panic!("not registered yet") };
    assert!(why.contains("not registered"), "{why}");
    for (token, id, key) in [("token-1", "sat-1", "api-key-0123456789-1"), ("token-2", "sat-2", "api-key-0123456789-2")]
    {
        peer.revoke();
        peer.token(token);
        linked.link.set_registration_token(&BackendPlan { token: Some(token.into()), ..fixture.plan.clone() });
        linked.wait_until("another registration", |status| status.satellite_id.as_deref() == Some(id)).await;
        assert_eq!(sink.send(batch.clone()).await, SinkAnswer::Accepted);
        let seen = peer.requests("events").pop().unwrap();
        assert_eq!((seen.path, seen.bearer.as_str()), (format!("/api/satellites/{id}/events"), key));
    }
}

#[tokio::test]
async fn a_key_is_kept_if_only_events_are_rejected() {
    use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
    use std::sync::Arc;

    let peer = Peer::start().await;
    peer.token("token-1");
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    linked.wait_until("a contact", |status| status.connected).await;
    peer.respond("events", Some(PeerResponse::Status(401, "{\"error\": \"no\"}".to_owned())));
    let answer = linked.link.event_sink().send(Arc::new(SinkBatch { id: 1, events: Vec::new() })).await;
    assert_eq!(answer, SinkAnswer::Unauthorized);
    linked.wait_for_error("events: the backend rejected the key of the satellite").await;
    let polls = peer.requests("commands").len();
    wait_for("more polls", || (peer.requests("commands").len() > polls + 2).then_some(())).await;
    assert_eq!(linked.status().satellite_id.as_deref(), Some("sat-1"));
    assert_eq!(peer.requests("register").len(), 1);
}
