//! Commands: each runs once, in order where it matters, and is confirmed by its visible effect.

use std::time::Duration;

use mcp_satellite::backend::link::CommandProgress;
use mcp_satellite::backend::link::rules::InstanceScope;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use serde_json::{Value, json};

use super::fixture::{LinkFixture, RunningLink, command, config};
use super::peer::{Peer, PeerResponse, wait_for};

/// A running link, with these installations of alice online.
async fn start_linked(peer: &Peer, installations: &[&str]) -> (LinkFixture, RunningLink) {
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], installations));
    let fixture = LinkFixture::new(peer, Some("token-1")).await;
    let linked = fixture.link();
    for installation in installations {
        fixture.fleet.online(installation).await;
    }
    (fixture, linked)
}

fn restart(id: &str, installation: &str) -> Value {
    command(id, "restart", &json!({"installation_id": installation}))
}

fn configure(id: &str, event: &str, installation: &str) -> Value {
    command(id, "configure", &json!({"event": event, "installation_id": installation, "team_id": "team_acme"}))
}

#[tokio::test]
async fn a_restart_is_confirmed_by_the_status_of_a_new_run() {
    let peer = Peer::start().await;
    let (fixture, _linked) = start_linked(&peer, &["a"]).await;
    let before = fixture.fleet.online("a").await;
    peer.command(restart("c1", "a"));
    let result = peer.result("c1").await;
    assert_eq!(result["status"], "completed", "{result}");
    let instances = json!([{"instance": "files-acme-alice-a", "status": "online", "status_message": null}]);
    assert_eq!(result["result"]["instances"], instances);
    let after = fixture.fleet.view("a").unwrap();
    assert_eq!((after.status, fixture.fleet.sim.opened_count()), (Status::Online, 2));
    assert_ne!(after.initialized_at, before.initialized_at);
}

#[tokio::test]
async fn kill_stops_an_instance_and_spawn_starts_it_again() {
    let peer = Peer::start().await;
    let (fixture, _linked) = start_linked(&peer, &["a", "b"]).await;
    peer.command(command("c1", "kill", &json!({"installation_id": "a", "team_id": "team_acme", "user_id": "alice"})));
    let result = peer.result("c1").await;
    assert_eq!(
        (&result["status"], &result["result"]["instances"][0]["status"]),
        (&json!("completed"), &json!("offline"))
    );
    assert_eq!(fixture.fleet.view("a").unwrap().requested_state, RequestedState::Stopped);
    peer.command(command("c2", "spawn", &json!({"installation_id": "a"})));
    let result = peer.result("c2").await;
    assert_eq!(
        (&result["status"], &result["result"]["instances"][0]["status"]),
        (&json!("completed"), &json!("online"))
    );
    assert_eq!(fixture.fleet.view("b").unwrap().restarts, 0);
}

#[tokio::test]
async fn a_slow_command_delays_only_commands_of_its_instance() {
    let peer = Peer::start().await;
    let (mut fixture, first_link) = start_linked(&peer, &["a", "b"]).await;
    drop(first_link);
    fixture.plan.command_timeout = Duration::from_secs(3);
    let linked = fixture.link();
    fixture.fleet.hanging.lock().unwrap().insert("a".to_owned());
    peer.command(restart("slow", "a"));
    wait_for("the start of the slow command", || (linked.status().commands == 1).then_some(())).await;
    peer.command(command("after", "kill", &json!({"installation_id": "a"})));
    for number in 0..20 {
        peer.command(restart(&format!("b{number}"), "b"));
    }
    peer.result("b19").await;
    assert!(
        peer.results("slow").is_empty() && peer.results("after").is_empty(),
        "the commands for `b` did not overtake"
    );
    let result = peer.result("slow").await;
    let error = result["error"].as_str().unwrap();
    assert_eq!(result["status"], "failed");
    assert!(error.contains("files-acme-alice-a") && error.contains("at the deadline"), "{error}");
    assert_eq!(peer.result("after").await["status"], "completed");
}

#[tokio::test]
async fn an_immediate_kill_does_not_wait_for_a_hanging_restart() {
    let peer = Peer::start().await;
    let (fixture, linked) = start_linked(&peer, &["a"]).await;
    fixture.fleet.hanging.lock().unwrap().insert("a".to_owned());
    peer.command(restart("slow", "a"));
    wait_for("the restart to begin", || {
        let view = fixture.fleet.view("a")?;
        (linked.status().commands == 1 && view.status == Status::Connecting).then_some(())
    })
    .await;
    let mut kill = command("kill", "kill", &json!({"installation_id": "a"}));
    kill["priority"] = json!("immediate");
    peer.command(kill);
    assert_eq!(peer.result("kill").await["status"], "completed");
    assert_eq!(fixture.fleet.view("a").unwrap().requested_state, RequestedState::Stopped);
    let result = peer.result("slow").await;
    assert_eq!(result["status"], "failed", "{result}");
    assert!(!result["error"].as_str().unwrap().contains("at the deadline"), "{result}");
}

#[tokio::test]
async fn a_repeated_command_runs_once_and_its_result_is_resent_until_accepted() {
    let peer = Peer::start().await;
    let (fixture, first) = start_linked(&peer, &["a"]).await;
    for manner in
        [PeerResponse::Status(500, String::new()), PeerResponse::Status(429, String::new()), PeerResponse::Reset]
    {
        let before = peer.requests("result").len();
        peer.respond("result", Some(manner));
        if before == 0 {
            peer.command(restart("c1", "a"));
        }
        wait_for("two attempts", || (peer.requests("result").len() > before + 1).then_some(())).await;
    }
    first.wait_for_error("results of commands").await;
    assert_eq!(fixture.fleet.sim.opened_count(), 2, "exactly one restart");

    // A restarted satellite resends the result, too.
    drop(first);
    peer.respond("result", None);
    let second = fixture.link();
    assert_eq!(peer.result("c1").await["status"], "completed");
    second.wait_until("the recovery", |status| status.connected && status.last_error.is_none()).await;
    assert_eq!(fixture.fleet.sim.opened_count(), 2, "no second restart");
}

#[tokio::test]
async fn a_command_started_before_a_restart_is_only_confirmed() {
    let peer = Peer::start().await;
    let (fixture, _linked) = start_linked(&peer, &["a"]).await;
    fixture.command_log.record_start(&format!("{}/sat-1/c1", peer.url())).await.unwrap();
    peer.command(restart("c1", "a"));
    assert_eq!(peer.result("c1").await["status"], "completed");
    assert_eq!(fixture.fleet.sim.opened_count(), 1);
}

#[tokio::test]
async fn a_command_expired_by_the_backends_clock_does_nothing_and_is_reported() {
    let peer = Peer::start().await;
    let (fixture, _linked) = start_linked(&peer, &["a"]).await;
    peer.clock("2020-01-01T00:00:00Z");
    let mut late = restart("late", "a");
    late["expires_at"] = "2019-12-31T23:59:59Z".into();
    peer.command(late);
    let result = peer.result("late").await;
    assert_eq!((&result["status"], fixture.fleet.sim.opened_count()), (&json!("expired"), 1), "{result}");
    // Expired long ago by our clock, but not by the backend's.
    let mut timely = restart("timely", "a");
    timely["expires_at"] = "2020-01-01T01:00:00Z".into();
    peer.command(timely);
    assert_eq!(peer.result("timely").await["status"], "completed");
}

#[tokio::test]
async fn a_command_that_expires_during_a_suspend_does_nothing_and_is_reported() {
    let peer = Peer::start().await;
    let (mut fixture, first_link) = start_linked(&peer, &["a", "b"]).await;
    drop(first_link);
    fixture.plan.command_timeout = Duration::from_secs(3);
    let linked = fixture.link();
    fixture.fleet.hanging.lock().unwrap().insert("a".to_owned());
    peer.clock("2020-01-01T00:00:00Z");
    peer.command(restart("slow", "a"));
    wait_for("the start of the slow command", || (linked.status().commands == 1).then_some(())).await;
    let lasts = |id: &str, expires_at: &str| {
        let mut lasts = command(id, "kill", &json!({"installation_id": "a"}));
        lasts["expires_at"] = expires_at.into();
        lasts
    };
    peer.command(lasts("short", "2020-01-01T01:00:00Z"));
    peer.command(lasts("long", "2020-01-01T03:00:00Z"));
    wait_for("both to be queued", || (linked.status().commands == 3).then_some(())).await;
    *fixture.suspended.lock().unwrap() += Duration::from_secs(2 * 3600);
    let result = peer.result("short").await;
    assert_eq!(result["status"], "expired", "{result}");
    assert_eq!(peer.result("long").await["status"], "completed");
    assert_eq!(peer.result("slow").await["status"], "failed");

    // A new poll brings the current time of the backend.
    peer.command(lasts("next", "2020-01-01T00:10:00Z"));
    assert_eq!(peer.result("next").await["status"], "completed");
}

#[tokio::test]
async fn an_unsupported_command_fails_and_later_commands_run() {
    let peer = Peer::start().await;
    let (_yard, _linked) = start_linked(&peer, &["a"]).await;
    for (id, strange, word) in [
        ("c1", command("c1", "self_destruct", &json!({})), "does not support commands of this type"),
        ("c2", command("c2", "restart", &json!({"installation_id": 7})), "payload"),
        ("c3", command("c3", "configure", &json!({"event": "party"})), "payload"),
        ("c4", command("c4", "restart", &json!({"installation_id": "nobody"})), "no such instance"),
        ("c5", command("c5", "health_check", &json!({"installation_id": "a", "check_type": "x"})), "health check"),
    ] {
        peer.command(strange);
        let result = peer.result(id).await;
        assert_eq!(result["status"], "failed", "{id}");
        assert!(result["error"].as_str().unwrap().contains(word), "{result}");
    }
    peer.command(json!({"id": "../../admin", "command_type": "restart"}));
    peer.command(restart("c6", "a"));
    assert_eq!(peer.result("c6").await["status"], "completed");
}

#[tokio::test]
async fn a_malformed_command_fails_and_does_not_delay_others() {
    let peer = Peer::start().await;
    let (fixture, _linked) = start_linked(&peer, &["a"]).await;
    // Commands without a usable id cannot be answered, so the backend repeats them before all others.
    for number in 0..12 {
        peer.command(json!({"id": number, "command_type": "restart"}));
    }
    peer.command(json!("hunter2"));
    peer.command(json!({"id": "no-type"}));
    let mut late = restart("late", "a");
    late["expires_at"] = "soon".into();
    peer.command(late);
    let mut strange = restart("strange", "a");
    (strange["priority"], strange["expires_at"]) = ("whenever".into(), Value::Null);
    peer.command(strange);
    assert_eq!(peer.result("strange").await["status"], "completed");
    for (id, word) in [("no-type", "missing"), ("late", "expires_at")] {
        let result = peer.result(id).await;
        assert_eq!(result["status"], "failed", "{id}");
        assert!(result["error"].as_str().unwrap().contains(word), "{result}");
    }
    assert_eq!(fixture.fleet.sim.opened_count(), 2, "the command `late` did nothing");
}

#[tokio::test]
async fn the_same_command_id_for_another_satellite_is_a_new_command() {
    let peer = Peer::start().await;
    let (fixture, linked) = start_linked(&peer, &["a"]).await;
    peer.command(restart("c1", "a"));
    assert_eq!(peer.result("c1").await["status"], "completed");
    peer.revoke();
    peer.token("token-2");
    let plan = mcp_satellite::config::BackendPlan { token: Some("token-2".into()), ..fixture.plan.clone() };
    linked.link.set_registration_token(&plan);
    linked.wait_until("another registration", |status| status.satellite_id.as_deref() == Some("sat-2")).await;
    peer.command(restart("c1", "a"));
    wait_for("another result", || (peer.results("c1").len() == 2).then_some(())).await;
    assert_eq!(fixture.fleet.sim.opened_count(), 3, "one restart per satellite");
}

#[tokio::test]
async fn at_most_a_hundred_commands_run_while_the_backend_accepts_no_results() {
    let peer = Peer::start().await;
    let (fixture, _linked) = start_linked(&peer, &[]).await;
    peer.respond("result", Some(PeerResponse::Never));
    for number in 0..150 {
        peer.command(restart(&format!("c{number}"), "nobody"));
    }
    wait_for("a poll with the maximum limit", || {
        peer.requests("commands").pop().filter(|seen| seen.query.contains("limit=100"))
    })
    .await;
    // The order of the commands must not matter.
    peer.reverse();
    let polls = peer.requests("commands").len();
    wait_for("more polls", || (peer.requests("commands").len() > polls + 5).then_some(())).await;
    assert_eq!(peer.requests("result").len(), 8, "results are sent at most 8 at a time");
    let mut known = 0;
    for number in 0..150 {
        let progress = fixture.command_log.progress(&format!("{}/sat-1/c{number}", peer.url())).await.unwrap();
        known += usize::from(progress != CommandProgress::Unknown);
    }
    assert_eq!(known, 100);
}

#[tokio::test]
async fn a_health_check_reports_whether_credentials_are_accepted() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(json!({
        "hash": "h1",
        "servers": {
            "near": {"command": "near"},
            "far": {"transport": "http", "url": "https://far.example.com/mcp", "bearer_token": "hunter2-bearer"},
        },
        "teams": [{"id": "team_acme", "slug": "acme", "users": [{"id": "alice", "slug": "alice"}],
            "installations": [{"id": "n", "server": "near"}, {"id": "f", "server": "far"}]}],
    }));
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let _linked = fixture.link();
    fixture.fleet.online("n").await;
    let far = fixture.fleet.online("f").await;
    for (id, installation) in [("c1", "n"), ("c2", "f")] {
        peer.command(command(id, "health_check", &json!({"installation_id": installation})));
        let result = peer.result(id).await;
        assert_eq!(
            (&result["status"], &result["result"]["instances"][0]["credentials"]),
            (&json!("completed"), &json!("accepted"))
        );
    }
    let server = fixture.fleet.sim.remote(&far.spec.id);
    server.change(|manner| manner.required_header = Some(("Authorization".to_owned(), "another".into())));
    peer.command(command(
        "c3",
        "health_check",
        &json!({"installation_id": "f", "check_type": "credential_validation"}),
    ));
    let result = peer.result("c3").await;
    let instance = &result["result"]["instances"][0];
    assert_eq!((&result["status"], &instance["credentials"]), (&json!("completed"), &json!("refused")), "{result}");
    assert_eq!(instance["status"], "requires_reauth");

    // With a server that is down the result is unknown.
    server.change(|manner| manner.required_header = None);
    peer.command(configure("c4", "mcp_recovery", "f"));
    assert_eq!(peer.result("c4").await["status"], "completed", "a recovery reconnects");
    server.take_down(FailureKind::Refused);
    peer.command(command("c5", "health_check", &json!({"installation_id": "f"})));
    let result = peer.result("c5").await;
    assert_eq!(
        (&result["status"], &result["result"]["instances"][0]["credentials"]),
        (&json!("failed"), &json!("unknown"))
    );
}

#[tokio::test]
async fn configure_applies_the_current_configuration() {
    let peer = Peer::start().await;
    let (mut fixture, first) = start_linked(&peer, &["a"]).await;
    drop(first);
    // Only commands make the link read the configuration.
    fixture.plan.config_interval = Duration::from_secs(3600);
    let linked = fixture.link();
    linked.wait_until("the configuration", |status| status.config_hash.as_deref() == Some("h1")).await;

    peer.configure(config("h2", &["alice", "bob"], &["a", "b"]));
    peer.command(configure("created", "mcp_installation_created", "b"));
    let result = peer.result("created").await;
    assert_eq!((&result["status"], result["result"]["instances"].as_array().unwrap().len()), (&json!("completed"), 2));
    assert_eq!(fixture.fleet.online("b").await.restarts, 0);
    assert_eq!(fixture.fleet.view("a").unwrap().restarts, 0, "an unchanged instance keeps running");

    let mut updated = config("h3", &["alice", "bob"], &["a", "b"]);
    updated["teams"][0]["installations"][1]["args"] = json!(["--fast"]);
    peer.configure(updated);
    peer.command(configure("updated", "mcp_installation_updated", "b"));
    assert_eq!(peer.result("updated").await["status"], "completed");
    let now = fixture.fleet.view("b").unwrap();
    assert_eq!((now.status, now.spec.args.len()), (Status::Online, 1));

    let runs = fixture.fleet.sim.opened_count();
    peer.command(configure("redeploy", "mcp_redeploy", "b"));
    assert_eq!(peer.result("redeploy").await["status"], "completed");
    assert_eq!(fixture.fleet.sim.opened_count(), runs + 2, "one run each for alice and bob");

    peer.configure(config("h4", &["alice"], &["a", "b"]));
    let left = json!({"event": "team_member_removed", "team_id": "team_acme", "user_id": "bob"});
    peer.command(command("left", "configure", &left));
    assert_eq!(peer.result("left").await["status"], "completed");
    assert_eq!(fixture.fleet.runtime.snapshot().len(), 2);

    peer.configure(config("h5", &["alice"], &["a"]));
    peer.command(configure("deleted", "mcp_installation_deleted", "b"));
    assert_eq!(peer.result("deleted").await["status"], "completed");
    assert!(fixture.fleet.view("b").is_none());
    let scope = |installation: Option<&str>, user: Option<&str>| InstanceScope {
        installation: installation.map(str::to_owned),
        team: Some("team_acme".to_owned()),
        user: user.map(str::to_owned),
    };
    let removed = [scope(None, Some("bob")), scope(Some("b"), None)];
    assert_eq!(*fixture.fleet.expected.lock().unwrap(), removed, "the removals are announced");
    assert_eq!(*fixture.fleet.erased.lock().unwrap(), removed, "an explicit removal erases at once");
    assert_eq!(fixture.fleet.view("a").unwrap().restarts, 0);

    // Commands that contradict the configuration.
    peer.command(configure("not-deleted", "mcp_installation_deleted", "a"));
    peer.command(configure("not-created", "mcp_installation_created", "c"));
    assert_eq!(peer.result("not-created").await["status"], "failed");
    assert!(peer.results("not-deleted").is_empty());
    peer.configure(config("h6", &["alice"], &[]));
    peer.command(configure("other", "mcp_installation_updated", "x"));
    assert_eq!(peer.result("not-deleted").await["status"], "completed");
}

#[tokio::test]
async fn an_update_already_applied_by_polling_is_confirmed_once_installed() {
    let peer = Peer::start().await;
    let (fixture, linked) = start_linked(&peer, &["a", "b"]).await;
    linked.wait_until("the configuration", |status| status.config_hash.as_deref() == Some("h1")).await;
    let (open, late) = tokio::sync::oneshot::channel();
    *fixture.fleet.install_gate.lock().unwrap() = Some(late);
    let mut updated = config("h2", &["alice"], &["a", "b"]);
    updated["teams"][0]["installations"][0]["args"] = json!(["--fast"]);
    peer.configure(updated);
    linked.wait_until("the update", |status| status.config_hash.as_deref() == Some("h2")).await;
    peer.command(configure("updated", "mcp_installation_updated", "a"));
    wait_for("the start of the command", || (linked.status().commands > 0).then_some(())).await;
    // A later command reads the configuration too, and is confirmed.
    peer.command(configure("same", "mcp_installation_updated", "b"));
    assert_eq!(peer.result("same").await["status"], "completed");
    assert!(peer.results("updated").is_empty(), "the old configuration still runs");
    open.send(()).unwrap();
    assert_eq!(peer.result("updated").await["status"], "completed");
    assert_eq!(fixture.fleet.view("a").unwrap().spec.args.len(), 1);
}

#[tokio::test]
async fn a_configure_command_waits_for_a_readable_configuration() {
    let peer = Peer::start().await;
    let (_yard, _linked) = start_linked(&peer, &["a"]).await;
    peer.respond("config", Some(PeerResponse::Status(503, String::new())));
    peer.configure(config("h2", &["alice"], &["a", "b"]));
    let before = peer.requests("config").len();
    peer.command(configure("c1", "mcp_installation_created", "b"));
    wait_for("some attempts", || (peer.requests("config").len() > before + 4).then_some(())).await;
    assert!(peer.results("c1").is_empty());
    peer.respond("config", None);
    assert_eq!(peer.result("c1").await["status"], "completed");
}

#[tokio::test]
async fn an_unconfigured_member_does_not_block_commands_for_others() {
    let peer = Peer::start().await;
    peer.token("token-1");
    peer.configure(json!({
        "hash": "h1",
        "servers": {"files": {"command": "files", "user_required": ["API_KEY"]}},
        "teams": [{
            "id": "team_acme", "slug": "acme",
            "users": [
                {"id": "alice", "slug": "alice", "servers": {"a": {"env": {"API_KEY": "given"}}}},
                {"id": "bob", "slug": "bob"},
            ],
            "installations": [{"id": "a", "server": "files"}],
        }],
    }));
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let _linked = fixture.link();
    let view = |user: &str| {
        let snapshot = fixture.fleet.runtime.snapshot();
        snapshot.iter().find(|view| view.spec.id.user.as_str() == user).cloned()
    };
    let is = |user: &'static str, status: Status| {
        let view = &view;
        wait_for(user, move || view(user).filter(|view| view.status == status))
    };
    is("alice", Status::Online).await;
    is("bob", Status::AwaitingUserConfig).await;
    for (id, kind) in [("c1", "restart"), ("c2", "spawn")] {
        peer.command(command(id, kind, &json!({"installation_id": "a"})));
        let result = peer.result(id).await;
        assert_eq!(result["status"], "completed", "{kind}: {result}");
        assert_eq!(result["result"]["instances"].as_array().unwrap().len(), 2, "{kind}: {result}");
    }
    // A command for that member alone fails.
    peer.command(command("c3", "restart", &json!({"installation_id": "a", "user_id": "bob"})));
    assert_eq!(peer.result("c3").await["status"], "failed");

    peer.command(command("c4", "kill", &json!({"installation_id": "a"})));
    assert_eq!(peer.result("c4").await["status"], "completed");
    let bob = view("bob").unwrap();
    assert_eq!(
        (bob.status, bob.requested_state),
        (Status::AwaitingUserConfig, RequestedState::Stopped),
        "the instance still waits for its user"
    );
}
