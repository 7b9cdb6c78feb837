//! A backend that responds slowly, wrongly, with huge bodies or never: supervision continues, the error is visible, and
//! the link recovers with the backend.

use std::time::Duration;

use super::fixture::{LinkFixture, command, config};
use super::peer::{Peer, PeerResponse, wait_for};

fn body(text: &str) -> PeerResponse {
    PeerResponse::Status(200, text.to_owned())
}

async fn assert_survived(what: &'static str, responses: Vec<(PeerResponse, &str)>) {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let mut fixture = LinkFixture::new(&peer, Some("token-1")).await;
    fixture.plan.request_timeout = Duration::from_secs(1);
    let linked = fixture.link();
    fixture.fleet.online("a").await;
    for (number, (response, wanted)) in responses.into_iter().enumerate() {
        peer.respond(what, Some(response.clone()));
        let why = linked.wait_for_error(wanted).await;
        assert!(!why.contains("api-key") && !why.contains("hunter2"), "{why}");
        if what == "config" {
            // Commands still run.
            peer.command(command(&format!("c{number}"), "spawn", &serde_json::json!({"installation_id": "a"})));
            assert_eq!(peer.result(&format!("c{number}")).await["status"], "completed", "{response:?}");
        }
        peer.respond(what, None);
        let recovered =
            linked.wait_until("the recovery", |status| status.connected && status.last_error.is_none()).await;
        assert_eq!(recovered.satellite_id.as_deref(), Some("sat-1"), "{response:?}");
    }
    let a = fixture.fleet.view("a").unwrap();
    assert_eq!((a.restarts, fixture.fleet.sim.opened_count()), (0, 1), "the instance was not affected");
    assert_eq!(peer.requests("register").len(), 1);
}

#[tokio::test]
async fn any_response_to_a_poll_for_commands_is_survived() {
    assert_survived(
        "commands",
        vec![
            (body(""), "incomplete"),
            (body("<html>"), "not JSON"),
            (body("[]"), "wrong type"),
            (body("{\"commands\": 7, \"x\": \"hunter2\"}"), "wrong type"),
            (body("{\"commands\": [], \"server_time\": \"yesterday\"}"), "wrong type"),
            (PeerResponse::Status(204, String::new()), "incomplete"),
            (PeerResponse::Status(302, String::new()), "redirects are not followed"),
            (PeerResponse::Status(304, String::new()), "304"),
            (PeerResponse::Status(403, "{\"error\": \"not api-key-0123456789-1\"}".to_owned()), "not [secret]"),
            (PeerResponse::Status(404, "gone".to_owned()), "404"),
            (PeerResponse::Status(500, "{\"error\": \"a\\nb\"}".to_owned()), "a b"),
            (PeerResponse::Huge(2 << 20), "larger than"),
            (PeerResponse::Reset, "commands: cannot reach"),
            (PeerResponse::Drip, "did not answer within"),
            (PeerResponse::Never, "did not answer within"),
        ],
    )
    .await;
}

#[tokio::test]
async fn any_response_to_a_configuration_request_is_survived() {
    assert_survived(
        "config",
        vec![
            (body("{"), "incomplete"),
            (body("{\"hash\": \"x\", \"teams\": 7}"), "wrong type"),
            (body("{\"teams\": []}"), "wrong type"),
            (body("{\"hash\": \"x\", \"servers\": {\"a\": \"hunter2\"}}"), "wrong type"),
            (PeerResponse::Status(307, String::new()), "redirects are not followed"),
            (PeerResponse::Status(418, String::new()), "418"),
            (PeerResponse::Huge(17 << 20), "larger than"),
            (PeerResponse::Huge(15 << 20), "wrong type"),
            (PeerResponse::Reset, "configuration: cannot reach"),
            (PeerResponse::Drip, "did not answer within"),
            (PeerResponse::Never, "did not answer within"),
        ],
    )
    .await;
}

#[tokio::test]
async fn any_response_to_a_heartbeat_is_survived() {
    assert_survived(
        "heartbeat",
        vec![
            (body("7"), "wrong type"),
            (body("{\"success\": false}"), "success"),
            (PeerResponse::Status(400, "{\"error\": \"not like that\"}".to_owned()), "not like that"),
            (PeerResponse::Huge(2 << 20), "larger than"),
            (PeerResponse::Reset, "heartbeat: cannot reach"),
            (PeerResponse::Never, "did not answer within"),
        ],
    )
    .await;
}

#[tokio::test]
async fn heartbeats_contain_the_state_and_the_last_one_announces_the_stop() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], &["a"]));
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    fixture.fleet.online("a").await;
    let heartbeat = wait_for("a heartbeat", || {
        peer.requests("heartbeat").into_iter().map(|seen| seen.body).find(|body| body["counts"]["online"] == 1)
    })
    .await;
    assert_eq!(heartbeat["status"], "active");
    assert_eq!(heartbeat["events"], serde_json::json!({"journalled_through": 7, "backlog": 3}));
    assert_eq!(heartbeat["tools"]["files-acme-alice-a"][0], "echo");
    let process = &heartbeat["processes_by_team"]["team_acme"][0];
    assert_eq!((&process["installation_id"], &process["status"]), (&"a".into(), &"online".into()));
    assert!(
        heartbeat["system"]["memory_total_bytes"].as_u64() > Some(1 << 20)
            && heartbeat["system"]["disk_total_bytes"].is_u64()
    );
    let link = linked.link.clone();
    drop(linked);
    link.send_last_heartbeat(&*fixture.fleet).await;
    assert_eq!(peer.requests("heartbeat").pop().unwrap().body["status"], "stopping");
    // A backend that does not respond does not delay the stop.
    peer.respond("heartbeat", Some(PeerResponse::Never));
    link.send_last_heartbeat(&*fixture.fleet).await;
}

#[tokio::test]
async fn overdue_requests_are_sent_at_once_after_a_suspend() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let mut fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let hour = Duration::from_secs(3600);
    fixture.plan.poll = mcp_satellite::config::PollIntervals { immediate: hour, high: hour, normal: hour, idle: hour };
    (fixture.plan.heartbeat_interval, fixture.plan.config_interval) = (hour, hour);
    let linked = fixture.link();
    let counts = || ["commands", "config", "heartbeat"].map(|what| peer.requests(what).len());
    // The second poll asks the backend to hold it back. This backend does not, so the third is due in an hour.
    wait_for("two polls and one request of each other kind", || (counts() == [2, 1, 1]).then_some(())).await;
    linked.wait_until("the time of the next poll", |status| status.next_poll_ms > Some(3_000_000)).await;
    // A task starts to wait only after its response has arrived, so the first call may come too early.
    wait_for("another request of each kind", || {
        linked.link.resumed_after_suspend();
        let [commands, config, heartbeat] = counts();
        (commands > 2 && config > 1 && heartbeat > 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn two_satellites_of_one_backend_poll_their_own_commands() {
    let peer = Peer::start().await;
    peer.configure(config("h1", &["alice"], &["a"]));
    let mut linked = Vec::new();
    for token in ["token-1", "token-2"] {
        peer.token(token);
        let fixture = LinkFixture::new(&peer, Some(token)).await;
        let link = fixture.link();
        fixture.fleet.online("a").await;
        linked.push((fixture, link));
    }
    let ids: Vec<_> = linked.iter().map(|(_, link)| link.status().satellite_id.unwrap()).collect();
    assert_ne!(ids[0], ids[1]);
    for seen in peer.requests("commands") {
        let number = seen.bearer.rsplit('-').next().unwrap().to_owned();
        assert_eq!(seen.path, format!("/api/satellites/sat-{number}/commands"));
        assert!(seen.query.contains("limit=10"), "{}", seen.query);
    }
}
