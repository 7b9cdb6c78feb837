//! Configurations from the backend.

use mcp_satellite::backend::link::BackendLink;
use mcp_satellite::config::PlanRestrictions;
use mcp_satellite::data_dir::DataDir;
use mcp_satellite::state::StateDb;
use mcp_satellite_actors::model::event::Event;
use serde_json::json;

use super::fixture::{LinkFixture, command, config};
use super::peer::{Peer, PeerResponse, wait_for};

#[tokio::test]
async fn a_configuration_is_applied_once_and_not_downloaded_again_unchanged() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    fixture.fleet.online("a").await;
    wait_for("more requests", || (peer.requests("config").len() > 5).then_some(())).await;
    assert_eq!(*fixture.fleet.applied_hashes.lock().unwrap(), ["h1"]);
    let known: Vec<_> = peer.requests("config").into_iter().map(|seen| seen.if_none_match).collect();
    assert_eq!((known[0].as_deref(), known[1].as_deref()), (None, Some("\"h1\"")));
    peer.configure(config("h2", &["alice"], &["a", "b"]));
    fixture.fleet.online("b").await;
    linked.wait_until("the hash in the status", |status| status.config_hash.as_deref() == Some("h2")).await;
    assert_eq!(fixture.fleet.view("a").unwrap().restarts, 0);
    wait_for("the hash in a heartbeat", || {
        peer.requests("heartbeat").pop().filter(|seen| seen.body["config_hash"] == "h2")
    })
    .await;
}

#[tokio::test]
async fn an_invalid_configuration_changes_nothing_and_is_reported_once() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    fixture.fleet.online("a").await;
    for (hash, bad, word) in [
        (
            "b1",
            json!({"teams": [{"id": "t", "slug": "t", "users": [{"id": "u", "slug": "u"}], "installations": [{"id": "x", "server": "x"}]}]}),
            "no `command`",
        ),
        ("b2", json!({"teams": [{"id": "t", "slug": "t", "colour": "red"}]}), "unknown key `colour`"),
        ("b3", json!({"servers": {"x": {"command": "x", "env": {"A": "env:HOME"}}}}), "cannot refer to"),
        ("b4", json!({"servers": {"x": {"command": "x", "env": {"A": "file:/etc/passwd"}}}}), "cannot refer to"),
        (
            "b5",
            json!({"teams": [{"id": "t", "slug": "t", "users": [{"id": "u", "slug": "u", "token": "hunter2-token"}]}]}),
            "sha256",
        ),
    ] {
        let mut document = json!({"hash": hash, "servers": {}, "teams": []});
        document.as_object_mut().unwrap().extend(bad.as_object().unwrap().clone());
        peer.configure(document);
        let why = linked.wait_for_error(word).await;
        assert!(why.contains("nothing was changed") && !why.contains("hunter2"), "{why}");
        let requests = peer.requests("config").len();
        wait_for("more requests", || (peer.requests("config").len() > requests + 2).then_some(())).await;
    }
    let a = fixture.fleet.view("a").unwrap();
    assert_eq!((a.restarts, fixture.fleet.runtime.snapshot().len()), (0, 1));
    assert!(linked.status().connected, "the backend is reachable");
    let events = fixture.fleet.config_events().await;
    let errors: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::ConfigError { error_type, retry_in, .. } => Some((error_type.as_str(), retry_in.is_some())),
            _ => None,
        })
        .collect();
    assert_eq!(errors, [("invalid", true); 5], "each is reported once");
    peer.configure(config("h2", &["alice"], &["a"]));
    linked.wait_until("the recovery", |status| status.last_error.is_none()).await;
}

#[tokio::test]
async fn an_outage_is_reported_once_with_status_and_retry_time() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    peer.respond("config", Some(PeerResponse::Status(503, "{\"error\": \"later\"}".to_owned())));
    let _linked = fixture.link();
    wait_for("some attempts", || (peer.requests("config").len() > 4).then_some(())).await;
    let events = fixture.fleet.config_events().await;
    let [Event::ConfigError { error_type, status_code, retry_in, error_message }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((error_type.as_str(), *status_code, retry_in.is_some()), ("refused", Some(503), true));
    assert!(error_message.contains("later"), "{error_message}");
}

#[tokio::test]
async fn a_missing_configuration_changes_nothing_and_is_not_a_config_error() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    fixture.fleet.online("a").await;
    peer.respond("config", Some(PeerResponse::Status(404, "{\"error\": \"none was put\"}".to_owned())));
    let why = linked.wait_for_error("no configuration yet").await;
    assert!(why.contains("none was put"), "{why}");
    let requests = peer.requests("config").len();
    wait_for("more requests", || (peer.requests("config").len() > requests + 3).then_some(())).await;
    let events = fixture.fleet.config_events().await;
    assert!(!events.iter().any(|event| matches!(event, Event::ConfigError { .. })), "{events:?}");
    assert_eq!((fixture.fleet.online("a").await.restarts, fixture.fleet.sim.opened_count()), (0, 1));
    peer.respond("config", None);
    linked.wait_until("the recovery", |status| status.last_error.is_none()).await;
}

#[tokio::test]
async fn an_invalid_configuration_read_by_a_command_is_reported() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let mut fixture = LinkFixture::new(&peer, Some("token-1")).await;
    // Only commands make the link read the configuration again.
    fixture.plan.config_interval = std::time::Duration::from_secs(3600);
    let linked = fixture.link();
    fixture.fleet.online("a").await;
    linked.wait_until("the configuration", |status| status.config_hash.as_deref() == Some("h1")).await;
    let mut bad = config("b1", &["alice"], &["a"]);
    bad["teams"][0]["colour"] = "red".into();
    peer.configure(bad);
    let payload = json!({"event": "mcp_installation_updated", "installation_id": "a", "team_id": "team_acme"});
    peer.command(command("c1", "configure", &payload));
    assert_eq!(peer.result("c1").await["status"], "failed");
    let events = fixture.fleet.config_events().await;
    let [Event::ConfigError { error_type, retry_in: None, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(error_type, "invalid");
}

#[tokio::test]
async fn a_configuration_with_an_invalid_hash_is_rejected() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    linked.wait_until("the empty configuration", |status| status.config_hash.as_deref() == Some("empty")).await;
    for hash in ["", "two words", "a\nb", "h\u{e9}", &"x".repeat(129)] {
        let body = config(hash, &["alice"], &["a"]).to_string();
        peer.respond("config", Some(PeerResponse::Status(200, body)));
        linked.wait_for_error("has an invalid value").await;
        peer.respond("config", None);
        linked.wait_until("the recovery", |status| status.last_error.is_none()).await;
    }
    assert_eq!(*fixture.fleet.applied_hashes.lock().unwrap(), ["empty"]);
}

#[tokio::test]
async fn the_last_valid_configuration_is_stored_for_a_start_without_the_backend() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    fixture.fleet.online("a").await;
    linked.wait_until("the hash", |status| status.config_hash.is_some()).await;
    let database = StateDb::open(&DataDir::open(fixture.home.path()).unwrap()).unwrap();
    let stored = || BackendLink::load_stored_config(&database, &peer.url());
    let document = wait_for("the stored configuration", stored).await;
    assert_eq!(document.hash, "h1");
    assert_eq!(document.plan(&PlanRestrictions::default()).unwrap().instances.len(), 1);
    assert!(!format!("{document:?}").contains("hunter2"));
    assert!(BackendLink::load_stored_config(&database, "https://another.example.com").is_none());

    drop(linked);
    let applied = fixture.fleet.applied_hashes.lock().unwrap().len();
    let requests = peer.requests("config").len();
    let again = fixture.link();
    again.link.set_applied_config("h1".to_owned()).await;
    wait_for("looks", || (peer.requests("config").len() > requests + 3).then_some(())).await;
    assert!(fixture.fleet.applied_hashes.lock().unwrap().len() <= applied + 1);
}
