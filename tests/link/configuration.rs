//! The configuration of the backend.

use mcp_satellite::backend::link::{BackendLink, CONFIG_FILE};
use mcp_satellite::config::PlanRestrictions;
use mcp_satellite::data_dir::DataDir;
use mcp_satellite_actors::model::event::Event;
use serde_json::json;

use super::peer::{Manner, Peer, wait_for};
use super::yard::{Yard, command, config};

#[tokio::test]
async fn it_is_taken_on_once_and_what_is_unchanged_is_not_even_sent_again() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    yard.fleet.online("a").await;
    wait_for("more looks", || (peer.seen("config").len() > 5).then_some(())).await;
    assert_eq!(*yard.fleet.taken.lock().unwrap(), ["h1"]);
    let known: Vec<_> = peer.seen("config").into_iter().map(|seen| seen.known).collect();
    assert_eq!((known[0].as_deref(), known[1].as_deref()), (None, Some("\"h1\"")));
    peer.configure(config("h2", &["alice"], &["a", "b"]));
    yard.fleet.online("b").await;
    linked.until("the hash in the status", |status| status.config_hash.as_deref() == Some("h2")).await;
    assert_eq!(yard.fleet.view("a").unwrap().restarts, 0);
    wait_for("the hash in a heartbeat", || {
        peer.seen("heartbeat").pop().filter(|seen| seen.body["config_hash"] == "h2")
    })
    .await;
}

#[tokio::test]
async fn one_that_cannot_be_used_changes_nothing_and_is_told_once() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    yard.fleet.online("a").await;
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
        let mut whole = json!({"hash": hash, "servers": {}, "teams": []});
        whole.as_object_mut().unwrap().extend(bad.as_object().unwrap().clone());
        peer.configure(whole);
        let why = linked.complains(word).await;
        assert!(why.contains("nothing was changed") && !why.contains("hunter2"), "{why}");
        let looks = peer.seen("config").len();
        wait_for("more looks", || (peer.seen("config").len() > looks + 2).then_some(())).await;
    }
    let a = yard.fleet.view("a").unwrap();
    assert_eq!((a.restarts, yard.fleet.runtime.snapshot().len()), (0, 1));
    assert!(linked.status().connected, "it is there, and talks nonsense");
    let told = yard.fleet.told().await;
    let errors: Vec<_> = told
        .iter()
        .filter_map(|event| match event {
            Event::ConfigError { error_type, retry_in, .. } => Some((error_type.as_str(), retry_in.is_some())),
            _ => None,
        })
        .collect();
    assert_eq!(errors, [("invalid", true); 5], "each once");
    peer.configure(config("h2", &["alice"], &["a"]));
    linked.until("all to be well", |status| status.last_error.is_none()).await;
}

#[tokio::test]
async fn an_outage_is_told_once_with_the_status_and_when_it_is_tried_again() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let yard = Yard::new(&peer, Some("token-1")).await;
    peer.behave("config", Some(Manner::Status(503, "{\"error\": \"later\"}".to_owned())));
    let _linked = yard.link();
    wait_for("some attempts", || (peer.seen("config").len() > 4).then_some(())).await;
    let told = yard.fleet.told().await;
    let [Event::ConfigError { error_type, status_code, retry_in, error_message }] = &told[..] else {
        panic!("{told:?}")
    };
    assert_eq!((error_type.as_str(), *status_code, retry_in.is_some()), ("refused", Some(503), true));
    assert!(error_message.contains("later"), "{error_message}");
}

#[tokio::test]
async fn a_backend_that_has_none_yet_changes_nothing_and_is_no_error_of_a_configuration() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    yard.fleet.online("a").await;
    peer.behave("config", Some(Manner::Status(404, "{\"error\": \"none was put\"}".to_owned())));
    let why = linked.complains("no configuration yet").await;
    assert!(why.contains("none was put"), "{why}");
    let looks = peer.seen("config").len();
    wait_for("more looks", || (peer.seen("config").len() > looks + 3).then_some(())).await;
    let told = yard.fleet.told().await;
    assert!(!told.iter().any(|event| matches!(event, Event::ConfigError { .. })), "{told:?}");
    assert_eq!((yard.fleet.online("a").await.restarts, yard.fleet.sim.opened_count()), (0, 1));
    peer.behave("config", None);
    linked.until("all to be well", |status| status.last_error.is_none()).await;
}

#[tokio::test]
async fn one_that_a_command_brings_and_that_cannot_be_used_is_told() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let mut yard = Yard::new(&peer, Some("token-1")).await;
    // Nothing but a command has it looked at again.
    yard.plan.config_interval = std::time::Duration::from_secs(3600);
    let linked = yard.link();
    yard.fleet.online("a").await;
    linked.until("the configuration", |status| status.config_hash.as_deref() == Some("h1")).await;
    let mut bad = config("b1", &["alice"], &["a"]);
    bad["teams"][0]["colour"] = "red".into();
    peer.configure(bad);
    let payload = json!({"event": "mcp_installation_updated", "installation_id": "a", "team_id": "team_acme"});
    peer.command(command("c1", "configure", &payload));
    assert_eq!(peer.result("c1").await["status"], "failed");
    let told = yard.fleet.told().await;
    let [Event::ConfigError { error_type, retry_in: None, .. }] = &told[..] else { panic!("{told:?}") };
    assert_eq!(error_type, "invalid");
}

#[tokio::test]
async fn a_hash_that_cannot_be_sent_back_is_not_taken() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    linked.until("the empty one", |status| status.config_hash.as_deref() == Some("empty")).await;
    for hash in ["", "two words", "a\nb", "h\u{e9}", &"x".repeat(129)] {
        let body = config(hash, &["alice"], &["a"]).to_string();
        peer.behave("config", Some(Manner::Status(200, body)));
        linked.complains("has an invalid value").await;
        peer.behave("config", None);
        linked.until("all to be well", |status| status.last_error.is_none()).await;
    }
    assert_eq!(*yard.fleet.taken.lock().unwrap(), ["empty"]);
}

#[tokio::test]
async fn the_last_good_one_is_there_for_a_start_without_the_backend() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    yard.fleet.online("a").await;
    wait_for("the file", || yard.home.path().join(CONFIG_FILE).exists().then_some(())).await;
    linked.until("the hash", |status| status.config_hash.is_some()).await;
    let data_dir = DataDir::open(yard.home.path()).unwrap();
    let document = BackendLink::load_stored_config(&data_dir, &peer.url()).unwrap();
    assert_eq!(document.hash, "h1");
    assert_eq!(document.plan(&PlanRestrictions::default()).unwrap().instances.len(), 1);
    assert!(!format!("{document:?}").contains("hunter2"));
    assert!(BackendLink::load_stored_config(&data_dir, "https://another.example.com").is_none());

    drop(linked);
    let taken = yard.fleet.taken.lock().unwrap().len();
    let looks = peer.seen("config").len();
    let again = yard.link();
    again.link.set_applied_config("h1".to_owned()).await;
    wait_for("looks", || (peer.seen("config").len() > looks + 3).then_some(())).await;
    assert!(yard.fleet.taken.lock().unwrap().len() <= taken + 1);
}
