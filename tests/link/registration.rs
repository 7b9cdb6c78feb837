//! Who the satellite is to its backend.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use mcp_satellite::backend::link::KEY_FILE;
use mcp_satellite::config::BackendPlan;

use super::peer::{Manner, Peer, wait_for};
use super::yard::Yard;

#[tokio::test]
async fn a_satellite_registers_once_and_keeps_its_key_for_later() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let mut yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    let status = linked.until("a contact", |status| status.connected && status.satellite_id.is_some()).await;
    assert_eq!((status.satellite_id.as_deref(), status.url), (Some("sat-1"), peer.url()));
    wait_for("a heartbeat", || peer.seen("heartbeat").pop()).await;
    let told = &peer.seen("register")[0];
    assert_eq!(told.bearer, "token-1");
    assert_eq!(told.body["name"], "satellite-0001");
    assert_eq!(told.body["capabilities"], serde_json::json!(["stdio", "http", "sse"]));
    assert!(told.body["system"]["memory_bytes"].as_u64() > Some(1 << 20), "{}", told.body);
    let key = yard.home.path().join(KEY_FILE);
    assert_eq!(key.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    drop(linked);

    yard.plan.token = None;
    let polls = peer.seen("commands").len();
    let linked = yard.link();
    linked.until("a contact", |status| status.connected).await;
    wait_for("polls with the key that was kept", || (peer.seen("commands").len() > polls + 2).then_some(())).await;
    assert_eq!(peer.seen("register").len(), 1);
    assert!(peer.seen("commands").iter().all(|seen| seen.bearer == "api-key-0123456789-1"));
}

#[tokio::test]
async fn a_key_that_is_not_taken_any_more_is_given_up_and_another_token_registers_again() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    linked.until("a contact", |status| status.connected).await;
    peer.revoke();
    let why = linked.complains("this token was used").await;
    assert!(why.starts_with("registration: ") && why.contains("create a new one at the backend"), "{why}");
    assert!(!why.contains("token-1") && !why.contains("api-key"), "{why}");
    let status = linked.status();
    assert_eq!((status.connected, status.satellite_id, status.mode.as_str()), (false, None, "registering"));
    let text = std::fs::read_to_string(yard.home.path().join(KEY_FILE)).unwrap();
    assert!(text.contains("api-key-0123456789-1"), "it stays until another one is there");

    peer.token("token-2");
    linked.link.set_registration_token(&BackendPlan { token: Some("token-2".into()), ..yard.plan.clone() });
    let status = linked.until("a contact", |status| status.connected && status.last_error.is_none()).await;
    assert_eq!(status.satellite_id.as_deref(), Some("sat-2"));
    let text = std::fs::read_to_string(yard.home.path().join(KEY_FILE)).unwrap();
    assert!(text.contains("api-key-0123456789-2"), "the new one is kept");
}

#[tokio::test]
async fn a_key_that_somebody_else_has_refused_is_used_again_when_the_backend_is_back() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    linked.until("a contact", |status| status.connected).await;
    // Whoever is at its port for a while knows nobody.
    let all = ["register", "commands", "result", "config", "events", "heartbeat"];
    for what in all {
        peer.behave(what, Some(Manner::Status(401, "{\"error\": \"who are you\"}".to_owned())));
    }
    linked.complains("registration").await;
    let attempts = peer.seen("register").len();
    wait_for("more attempts", || (peer.seen("register").len() > attempts + 1).then_some(())).await;
    for what in all {
        peer.behave(what, None);
    }
    let status = linked.until("all to be well", |status| status.connected && status.last_error.is_none()).await;
    assert_eq!(status.satellite_id.as_deref(), Some("sat-1"), "its token was used up long ago");
}

#[tokio::test]
async fn a_backend_that_refuses_the_key_it_has_just_given_is_not_asked_without_a_pause() {
    let peer = Peer::start().await;
    for token in 0..10 {
        peer.token(&format!("token-{token}"));
    }
    for what in ["commands", "config", "heartbeat"] {
        peer.behave(what, Some(Manner::Status(401, "{\"error\": \"no\"}".to_owned())));
    }
    let mut yard = Yard::new(&peer, Some("token-0")).await;
    yard.plan.backoff_max = Duration::from_secs(60);
    let linked = yard.link();
    wait_for("the first registration", || (!peer.seen("register").is_empty()).then_some(())).await;
    wait_for("the refusal", || linked.status().satellite_id.is_none().then_some(())).await;
    linked.link.set_registration_token(&BackendPlan { token: Some("token-1".into()), ..yard.plan.clone() });
    wait_for("the second registration", || (peer.seen("register").len() >= 2).then_some(())).await;
    linked.link.set_registration_token(&BackendPlan { token: Some("token-2".into()), ..yard.plan.clone() });
    // The same token again would be a loop.
    peer.token("token-2");
    wait_for("the third registration", || (peer.seen("register").len() >= 3).then_some(())).await;
    peer.token("token-2");
    wait_for("the fourth registration", || (peer.seen("register").len() >= 4).then_some(())).await;
    let at: Vec<_> = peer.seen("register").iter().map(|seen| seen.at).collect();
    let gap = at[3].duration_since(at[2]);
    assert!(gap >= Duration::from_millis(1_800), "{gap:?} between registrations that both came to nothing");
}

#[tokio::test]
async fn without_a_token_the_status_says_what_to_do() {
    let peer = Peer::start().await;
    let yard = Yard::new(&peer, None).await;
    let linked = yard.link();
    let why = linked.complains("registration token").await;
    assert!(why.contains("token = \"env:NAME\""), "{why}");
    assert!(peer.seen("register").is_empty());
}

#[tokio::test]
async fn a_token_is_not_used_up_as_long_as_the_key_could_not_be_kept() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let yard = Yard::new(&peer, Some("token-1")).await;
    let data_dir = yard.home.path().join("later");
    let in_the_way = data_dir.join(format!("{KEY_FILE}.rehearsal"));
    std::fs::create_dir_all(&in_the_way).unwrap();
    std::fs::set_permissions(&data_dir, std::fs::Permissions::from_mode(0o700)).unwrap();
    let linked = yard.link_in(&data_dir);
    linked.complains("cannot store a key in").await;
    assert!(peer.seen("register").is_empty());
    std::fs::remove_dir(in_the_way).unwrap();
    linked.until("a contact", |status| status.connected).await;
    assert!(data_dir.join(KEY_FILE).exists());
}

#[tokio::test]
async fn an_id_that_would_lead_elsewhere_is_not_used() {
    let peer = Peer::start().await;
    let bad = "{\"satellite_id\": \"../admin\", \"api_key\": \"0123456789abcdef0123\"}";
    peer.behave("register", Some(Manner::Status(201, bad.to_owned())));
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    let why = linked.complains("cannot be used").await;
    assert!(!why.contains("0123456789abcdef0123"), "{why}");
    assert!(peer.seen("commands").is_empty());
}

#[tokio::test]
async fn events_wait_for_the_registration_and_go_with_the_key_of_the_moment() {
    use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
    use std::sync::Arc;

    let peer = Peer::start().await;
    let yard = Yard::new(&peer, None).await;
    let linked = yard.link();
    let way = linked.link.event_sink();
    let batch = Arc::new(SinkBatch { id: 41, events: Vec::new() });
    let SinkAnswer::Unavailable(why) = way.send(batch.clone()).await else { panic!("nobody is registered") };
    assert!(why.contains("not registered"), "{why}");
    for (token, id, key) in [("token-1", "sat-1", "api-key-0123456789-1"), ("token-2", "sat-2", "api-key-0123456789-2")]
    {
        peer.revoke();
        peer.token(token);
        linked.link.set_registration_token(&BackendPlan { token: Some(token.into()), ..yard.plan.clone() });
        linked.until("another registration", |status| status.satellite_id.as_deref() == Some(id)).await;
        assert_eq!(way.send(batch.clone()).await, SinkAnswer::Accepted);
        let seen = peer.seen("events").pop().unwrap();
        assert_eq!((seen.path, seen.bearer.as_str()), (format!("/api/satellites/{id}/events"), key));
    }
}

#[tokio::test]
async fn a_key_is_not_given_up_because_events_are_refused() {
    use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
    use std::sync::Arc;

    let peer = Peer::start().await;
    peer.token("token-1");
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    linked.until("a contact", |status| status.connected).await;
    peer.behave("events", Some(Manner::Status(401, "{\"error\": \"no\"}".to_owned())));
    let answer = linked.link.event_sink().send(Arc::new(SinkBatch { id: 1, events: Vec::new() })).await;
    assert_eq!(answer, SinkAnswer::Unauthorized);
    linked.complains("events: the backend rejected the key of the satellite").await;
    let polls = peer.seen("commands").len();
    wait_for("more polls", || (peer.seen("commands").len() > polls + 2).then_some(())).await;
    assert_eq!(linked.status().satellite_id.as_deref(), Some("sat-1"));
    assert_eq!(peer.seen("register").len(), 1);
}
