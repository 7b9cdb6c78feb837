//! A backend that answers slowly, wrongly, hugely or never: supervision is not touched, what is wrong can be seen, and when
//! it is well again all is well again.

use std::time::Duration;

use super::peer::{Manner, Peer, wait_for};
use super::yard::{Yard, command, config};

fn body(text: &str) -> Manner {
    Manner::Status(200, text.to_owned())
}

async fn is_survived(what: &'static str, manners: Vec<(Manner, &str)>) {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let mut yard = Yard::new(&peer, Some("token-1")).await;
    yard.plan.request_timeout = Duration::from_secs(1);
    let linked = yard.link();
    yard.fleet.online("a").await;
    for (number, (manner, wanted)) in manners.into_iter().enumerate() {
        peer.behave(what, Some(manner.clone()));
        let why = linked.complains(wanted).await;
        assert!(!why.contains("api-key") && !why.contains("hunter2"), "{why}");
        if what == "config" {
            // Commands go on.
            peer.command(command(&format!("c{number}"), "spawn", &serde_json::json!({"installation_id": "a"})));
            assert_eq!(peer.result(&format!("c{number}")).await["status"], "completed", "{manner:?}");
        }
        peer.behave(what, None);
        let well = linked.until("all to be well", |status| status.connected && status.last_error.is_none()).await;
        assert_eq!(well.satellite_id.as_deref(), Some("sat-1"), "{manner:?}");
    }
    let a = yard.fleet.view("a").unwrap();
    assert_eq!((a.restarts, yard.fleet.sim.opened_count()), (0, 1), "it has not noticed anything");
    assert_eq!(peer.seen("register").len(), 1);
}

#[tokio::test]
async fn commands_can_be_answered_in_any_way() {
    is_survived(
        "commands",
        vec![
            (body(""), "incomplete"),
            (body("<html>"), "not JSON"),
            (body("[]"), "wrong type"),
            (body("{\"commands\": 7, \"x\": \"hunter2\"}"), "wrong type"),
            (body("{\"commands\": [], \"server_time\": \"yesterday\"}"), "wrong type"),
            (Manner::Status(204, String::new()), "incomplete"),
            (Manner::Status(302, String::new()), "redirects are not followed"),
            (Manner::Status(304, String::new()), "304"),
            (Manner::Status(403, "{\"error\": \"not api-key-0123456789-1\"}".to_owned()), "not [secret]"),
            (Manner::Status(404, "gone".to_owned()), "404"),
            (Manner::Status(500, "{\"error\": \"a\\nb\"}".to_owned()), "a b"),
            (Manner::Huge(2 << 20), "larger than"),
            (Manner::Reset, "commands: cannot reach"),
            (Manner::Drip, "did not answer within"),
            (Manner::Never, "did not answer within"),
        ],
    )
    .await;
}

#[tokio::test]
async fn the_configuration_can_be_answered_in_any_way() {
    is_survived(
        "config",
        vec![
            (body("{"), "incomplete"),
            (body("{\"hash\": \"x\", \"teams\": 7}"), "wrong type"),
            (body("{\"teams\": []}"), "wrong type"),
            (body("{\"hash\": \"x\", \"servers\": {\"a\": \"hunter2\"}}"), "wrong type"),
            (Manner::Status(307, String::new()), "redirects are not followed"),
            (Manner::Status(418, String::new()), "418"),
            (Manner::Huge(17 << 20), "larger than"),
            (Manner::Huge(15 << 20), "wrong type"),
            (Manner::Reset, "configuration: cannot reach"),
            (Manner::Drip, "did not answer within"),
            (Manner::Never, "did not answer within"),
        ],
    )
    .await;
}

#[tokio::test]
async fn heartbeats_can_be_answered_in_any_way() {
    is_survived(
        "heartbeat",
        vec![
            (body("7"), "wrong type"),
            (body("{\"success\": false}"), "success"),
            (Manner::Status(400, "{\"error\": \"not like that\"}".to_owned()), "not like that"),
            (Manner::Huge(2 << 20), "larger than"),
            (Manner::Reset, "heartbeat: cannot reach"),
            (Manner::Never, "did not answer within"),
        ],
    )
    .await;
}

#[tokio::test]
async fn a_heartbeat_tells_how_the_satellite_is_and_the_last_one_that_it_ends() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let yard = Yard::new(&peer, Some("token-1")).await;
    let linked = yard.link();
    yard.fleet.online("a").await;
    let told = wait_for("a heartbeat", || {
        peer.seen("heartbeat").into_iter().map(|seen| seen.body).find(|body| body["counts"]["online"] == 1)
    })
    .await;
    assert_eq!(told["status"], "active");
    assert_eq!(told["events"], serde_json::json!({"journalled_through": 7, "backlog": 3}));
    assert_eq!(told["tools"]["files-acme-alice-a"][0], "echo");
    let process = &told["processes_by_team"]["team_acme"][0];
    assert_eq!((&process["installation_id"], &process["status"]), (&"a".into(), &"online".into()));
    assert!(
        told["system"]["memory_total_bytes"].as_u64() > Some(1 << 20) && told["system"]["disk_total_bytes"].is_u64()
    );
    let link = linked.link.clone();
    drop(linked);
    link.send_last_heartbeat(&*yard.fleet).await;
    assert_eq!(peer.seen("heartbeat").pop().unwrap().body["status"], "stopping");
    // And whoever does not listen holds nothing up.
    peer.behave("heartbeat", Some(Manner::Never));
    link.send_last_heartbeat(&*yard.fleet).await;
}

#[tokio::test]
async fn after_a_suspend_what_is_overdue_is_asked_at_once() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let mut yard = Yard::new(&peer, Some("token-1")).await;
    let hour = Duration::from_secs(3600);
    yard.plan.poll = mcp_satellite::config::PollIntervals { immediate: hour, high: hour, normal: hour, idle: hour };
    (yard.plan.heartbeat_interval, yard.plan.config_interval) = (hour, hour);
    let linked = yard.link();
    let counts = || ["commands", "config", "heartbeat"].map(|what| peer.seen(what).len());
    // The second poll asks the backend to hold it back. This backend does not, so the third is due in an hour.
    wait_for("two polls and one request of each other kind", || (counts() == [2, 1, 1]).then_some(())).await;
    linked.until("the next poll to be known", |status| status.next_poll_ms > Some(3_000_000)).await;
    // A task starts to wait only after its answer has arrived, so the first call of `woke` may come too early.
    wait_for("another request of each kind", || {
        linked.link.resumed_after_suspend();
        let [commands, config, heartbeat] = counts();
        (commands > 2 && config > 1 && heartbeat > 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn two_satellites_have_one_backend_and_each_its_own_commands() {
    let peer = Peer::start().await;
    peer.configure(config("h1", &["alice"], &["a"]));
    let mut linked = Vec::new();
    for token in ["token-1", "token-2"] {
        peer.token(token);
        let yard = Yard::new(&peer, Some(token)).await;
        let link = yard.link();
        yard.fleet.online("a").await;
        linked.push((yard, link));
    }
    let ids: Vec<_> = linked.iter().map(|(_, link)| link.status().satellite_id.unwrap()).collect();
    assert_ne!(ids[0], ids[1]);
    for seen in peer.seen("commands") {
        let number = seen.bearer.rsplit('-').next().unwrap().to_owned();
        assert_eq!(seen.path, format!("/api/satellites/sat-{number}/commands"));
        assert!(seen.query.contains("limit=10"), "{}", seen.query);
    }
}
