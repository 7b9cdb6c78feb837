//! Commands: carried out once, in order where it matters, confirmed by what can be seen.

use std::time::Duration;

use mcp_satellite::backend::link::CommandProgress;
use mcp_satellite::backend::link::rules::InstanceScope;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use serde_json::{Value, json};

use super::peer::{Manner, Peer, wait_for};
use super::yard::{Linked, Yard, command, config};

/// Linked, with these installations of alice online.
async fn linked(peer: &Peer, installations: &[&str]) -> (Yard, Linked) {
    peer.token("token-1");
    peer.configure(config("h1", &["alice"], installations));
    let yard = Yard::new(peer, Some("token-1")).await;
    let linked = yard.link();
    for installation in installations {
        yard.fleet.online(installation).await;
    }
    (yard, linked)
}

fn restart(id: &str, installation: &str) -> Value {
    command(id, "restart", &json!({"installation_id": installation}))
}

fn configure(id: &str, event: &str, installation: &str) -> Value {
    command(id, "configure", &json!({"event": event, "installation_id": installation, "team_id": "team_acme"}))
}

#[tokio::test]
async fn a_restart_is_confirmed_by_the_status_of_another_run() {
    let peer = Peer::start().await;
    let (yard, _linked) = linked(&peer, &["a"]).await;
    let before = yard.fleet.online("a").await;
    peer.command(restart("c1", "a"));
    let result = peer.result("c1").await;
    assert_eq!(result["status"], "completed", "{result}");
    let told = json!([{"instance": "files-acme-alice-a", "status": "online", "status_message": null}]);
    assert_eq!(result["result"]["instances"], told);
    let after = yard.fleet.view("a").unwrap();
    assert_eq!((after.status, yard.fleet.sim.opened_count()), (Status::Online, 2));
    assert_ne!(after.initialized_at, before.initialized_at);
}

#[tokio::test]
async fn kill_has_an_instance_stay_down_and_spawn_brings_it_back() {
    let peer = Peer::start().await;
    let (yard, _linked) = linked(&peer, &["a", "b"]).await;
    peer.command(command("c1", "kill", &json!({"installation_id": "a", "team_id": "team_acme", "user_id": "alice"})));
    let result = peer.result("c1").await;
    assert_eq!(
        (&result["status"], &result["result"]["instances"][0]["status"]),
        (&json!("completed"), &json!("offline"))
    );
    assert_eq!(yard.fleet.view("a").unwrap().requested_state, RequestedState::Stopped);
    peer.command(command("c2", "spawn", &json!({"installation_id": "a"})));
    let result = peer.result("c2").await;
    assert_eq!(
        (&result["status"], &result["result"]["instances"][0]["status"]),
        (&json!("completed"), &json!("online"))
    );
    assert_eq!(yard.fleet.view("b").unwrap().restarts, 0);
}

#[tokio::test]
async fn one_that_takes_long_holds_back_its_own_instance_and_no_other() {
    let peer = Peer::start().await;
    let (mut yard, linked_once) = linked(&peer, &["a", "b"]).await;
    drop(linked_once);
    yard.plan.command_timeout = Duration::from_secs(3);
    let linked = yard.link();
    yard.fleet.hanging.lock().unwrap().insert("a".to_owned());
    peer.command(restart("slow", "a"));
    wait_for("the slow one to begin", || (linked.status().commands == 1).then_some(())).await;
    peer.command(command("after", "kill", &json!({"installation_id": "a"})));
    for number in 0..20 {
        peer.command(restart(&format!("b{number}"), "b"));
    }
    peer.result("b19").await;
    assert!(peer.results("slow").is_empty() && peer.results("after").is_empty(), "they were waited for");
    let result = peer.result("slow").await;
    let error = result["error"].as_str().unwrap();
    assert_eq!(result["status"], "failed");
    assert!(error.contains("files-acme-alice-a") && error.contains("at the deadline"), "{error}");
    assert_eq!(peer.result("after").await["status"], "completed");
}

#[tokio::test]
async fn an_immediate_kill_does_not_wait_for_a_restart_that_hangs() {
    let peer = Peer::start().await;
    let (yard, linked) = linked(&peer, &["a"]).await;
    yard.fleet.hanging.lock().unwrap().insert("a".to_owned());
    peer.command(restart("slow", "a"));
    wait_for("the restart to begin", || {
        let view = yard.fleet.view("a")?;
        (linked.status().commands == 1 && view.status == Status::Connecting).then_some(())
    })
    .await;
    let mut kill = command("kill", "kill", &json!({"installation_id": "a"}));
    kill["priority"] = json!("immediate");
    peer.command(kill);
    assert_eq!(peer.result("kill").await["status"], "completed");
    assert_eq!(yard.fleet.view("a").unwrap().requested_state, RequestedState::Stopped);
    let result = peer.result("slow").await;
    assert_eq!(result["status"], "failed", "{result}");
    assert!(!result["error"].as_str().unwrap().contains("at the deadline"), "{result}");
}

#[tokio::test]
async fn a_command_is_carried_out_once_however_often_it_comes_and_its_result_is_told_until_it_is_taken() {
    let peer = Peer::start().await;
    let (yard, first) = linked(&peer, &["a"]).await;
    for manner in [Manner::Status(500, String::new()), Manner::Status(429, String::new()), Manner::Reset] {
        let before = peer.seen("result").len();
        peer.behave("result", Some(manner));
        if before == 0 {
            peer.command(restart("c1", "a"));
        }
        wait_for("two attempts", || (peer.seen("result").len() > before + 1).then_some(())).await;
    }
    first.complains("results of commands").await;
    assert_eq!(yard.fleet.sim.opened_count(), 2, "one restart");

    // And by a satellite that was started again.
    drop(first);
    peer.behave("result", None);
    let second = yard.link();
    assert_eq!(peer.result("c1").await["status"], "completed");
    second.until("all to be well", |status| status.connected && status.last_error.is_none()).await;
    assert_eq!(yard.fleet.sim.opened_count(), 2, "no other one");
}

#[tokio::test]
async fn one_that_was_begun_before_the_satellite_was_ended_is_only_confirmed() {
    let peer = Peer::start().await;
    let (yard, _linked) = linked(&peer, &["a"]).await;
    yard.done.record_start(&format!("{}/sat-1/c1", peer.url())).await.unwrap();
    peer.command(restart("c1", "a"));
    assert_eq!(peer.result("c1").await["status"], "completed");
    assert_eq!(yard.fleet.sim.opened_count(), 1);
}

#[tokio::test]
async fn a_command_that_has_expired_by_the_backends_clock_does_nothing_and_says_so() {
    let peer = Peer::start().await;
    let (yard, _linked) = linked(&peer, &["a"]).await;
    peer.clock("2020-01-01T00:00:00Z");
    let mut late = restart("late", "a");
    late["expires_at"] = "2019-12-31T23:59:59Z".into();
    peer.command(late);
    let result = peer.result("late").await;
    assert_eq!((&result["status"], yard.fleet.sim.opened_count()), (&json!("expired"), 1), "{result}");
    // Long past by our clock.
    let mut timely = restart("timely", "a");
    timely["expires_at"] = "2020-01-01T01:00:00Z".into();
    peer.command(timely);
    assert_eq!(peer.result("timely").await["status"], "completed");
}

#[tokio::test]
async fn a_command_that_expires_while_the_machine_sleeps_does_nothing_and_says_so() {
    let peer = Peer::start().await;
    let (mut yard, linked_once) = linked(&peer, &["a", "b"]).await;
    drop(linked_once);
    yard.plan.command_timeout = Duration::from_secs(3);
    let linked = yard.link();
    yard.fleet.hanging.lock().unwrap().insert("a".to_owned());
    peer.clock("2020-01-01T00:00:00Z");
    peer.command(restart("slow", "a"));
    wait_for("the slow one to begin", || (linked.status().commands == 1).then_some(())).await;
    let lasts = |id: &str, expires_at: &str| {
        let mut lasts = command(id, "kill", &json!({"installation_id": "a"}));
        lasts["expires_at"] = expires_at.into();
        lasts
    };
    peer.command(lasts("short", "2020-01-01T01:00:00Z"));
    peer.command(lasts("long", "2020-01-01T03:00:00Z"));
    wait_for("both to wait for their turn", || (linked.status().commands == 3).then_some(())).await;
    *yard.suspended.lock().unwrap() += Duration::from_secs(2 * 3600);
    let result = peer.result("short").await;
    assert_eq!(result["status"], "expired", "{result}");
    assert_eq!(peer.result("long").await["status"], "completed");
    assert_eq!(peer.result("slow").await["status"], "failed");

    // What comes now comes with the time of the backend as it is now.
    peer.command(lasts("next", "2020-01-01T00:10:00Z"));
    assert_eq!(peer.result("next").await["status"], "completed");
}

#[tokio::test]
async fn what_is_not_understood_is_answered_as_failed_and_the_rest_goes_on() {
    let peer = Peer::start().await;
    let (_yard, _linked) = linked(&peer, &["a"]).await;
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
async fn one_that_cannot_be_read_is_answered_and_holds_no_other_one_back() {
    let peer = Peer::start().await;
    let (yard, _linked) = linked(&peer, &["a"]).await;
    // Nobody can answer these, so they come every time, before all others.
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
    assert_eq!(yard.fleet.sim.opened_count(), 2, "the late one did nothing");
}

#[tokio::test]
async fn a_command_of_the_same_id_for_another_satellite_is_another_one() {
    let peer = Peer::start().await;
    let (yard, linked) = linked(&peer, &["a"]).await;
    peer.command(restart("c1", "a"));
    assert_eq!(peer.result("c1").await["status"], "completed");
    peer.revoke();
    peer.token("token-2");
    let plan = mcp_satellite::config::BackendPlan { token: Some("token-2".into()), ..yard.plan.clone() };
    linked.link.set_registration_token(&plan);
    linked.until("another registration", |status| status.satellite_id.as_deref() == Some("sat-2")).await;
    peer.command(restart("c1", "a"));
    wait_for("another result", || (peer.results("c1").len() == 2).then_some(())).await;
    assert_eq!(yard.fleet.sim.opened_count(), 3, "two restarts");
}

#[tokio::test]
async fn a_backend_that_takes_no_results_has_a_hundred_commands_carried_out_and_no_more() {
    let peer = Peer::start().await;
    let (yard, _linked) = linked(&peer, &[]).await;
    peer.behave("result", Some(Manner::Never));
    for number in 0..150 {
        peer.command(restart(&format!("c{number}"), "nobody"));
    }
    wait_for("the longest answer to be asked for", || {
        peer.seen("commands").pop().filter(|seen| seen.query.contains("limit=100"))
    })
    .await;
    // Also where others come first.
    peer.reverse();
    let polls = peer.seen("commands").len();
    wait_for("more polls", || (peer.seen("commands").len() > polls + 5).then_some(())).await;
    assert_eq!(peer.seen("result").len(), 8, "so many are told at once");
    let mut known = 0;
    for number in 0..150 {
        let progress = yard.done.progress(&format!("{}/sat-1/c{number}", peer.url())).await.unwrap();
        known += usize::from(progress != CommandProgress::Unknown);
    }
    assert_eq!(known, 100);
}

#[tokio::test]
async fn a_health_check_finds_out_whether_credentials_are_taken() {
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
    let yard = Yard::new(&peer, Some("token-1")).await;
    let _linked = yard.link();
    yard.fleet.online("n").await;
    let far = yard.fleet.online("f").await;
    for (id, installation) in [("c1", "n"), ("c2", "f")] {
        peer.command(command(id, "health_check", &json!({"installation_id": installation})));
        let result = peer.result(id).await;
        assert_eq!(
            (&result["status"], &result["result"]["instances"][0]["credentials"]),
            (&json!("completed"), &json!("accepted"))
        );
    }
    let server = yard.fleet.sim.remote(&far.spec.id);
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

    // Down is neither.
    server.change(|manner| manner.required_header = None);
    peer.command(configure("c4", "mcp_recovery", "f"));
    assert_eq!(peer.result("c4").await["status"], "completed", "a recovery connects again");
    server.take_down(FailureKind::Refused);
    peer.command(command("c5", "health_check", &json!({"installation_id": "f"})));
    let result = peer.result("c5").await;
    assert_eq!(
        (&result["status"], &result["result"]["instances"][0]["credentials"]),
        (&json!("failed"), &json!("unknown"))
    );
}

#[tokio::test]
async fn configure_has_the_fleet_be_what_the_configuration_says_now() {
    let peer = Peer::start().await;
    let (mut yard, first) = linked(&peer, &["a"]).await;
    drop(first);
    // Nothing but a command has it looked at.
    yard.plan.config_interval = Duration::from_secs(3600);
    let linked = yard.link();
    linked.until("the configuration", |status| status.config_hash.as_deref() == Some("h1")).await;

    peer.configure(config("h2", &["alice", "bob"], &["a", "b"]));
    peer.command(configure("created", "mcp_installation_created", "b"));
    let result = peer.result("created").await;
    assert_eq!((&result["status"], result["result"]["instances"].as_array().unwrap().len()), (&json!("completed"), 2));
    assert_eq!(yard.fleet.online("b").await.restarts, 0);
    assert_eq!(yard.fleet.view("a").unwrap().restarts, 0, "what is the same is not touched");

    let mut updated = config("h3", &["alice", "bob"], &["a", "b"]);
    updated["teams"][0]["installations"][1]["args"] = json!(["--fast"]);
    peer.configure(updated);
    peer.command(configure("updated", "mcp_installation_updated", "b"));
    assert_eq!(peer.result("updated").await["status"], "completed");
    let now = yard.fleet.view("b").unwrap();
    assert_eq!((now.status, now.spec.args.len()), (Status::Online, 1));

    let runs = yard.fleet.sim.opened_count();
    peer.command(configure("redeploy", "mcp_redeploy", "b"));
    assert_eq!(peer.result("redeploy").await["status"], "completed");
    assert_eq!(yard.fleet.sim.opened_count(), runs + 2, "alice's and bob's");

    peer.configure(config("h4", &["alice"], &["a", "b"]));
    let left = json!({"event": "team_member_removed", "team_id": "team_acme", "user_id": "bob"});
    peer.command(command("left", "configure", &left));
    assert_eq!(peer.result("left").await["status"], "completed");
    assert_eq!(yard.fleet.runtime.snapshot().len(), 2);

    peer.configure(config("h5", &["alice"], &["a"]));
    peer.command(configure("deleted", "mcp_installation_deleted", "b"));
    assert_eq!(peer.result("deleted").await["status"], "completed");
    assert!(yard.fleet.view("b").is_none());
    let scope = |installation: Option<&str>, user: Option<&str>| InstanceScope {
        installation: installation.map(str::to_owned),
        team: Some("team_acme".to_owned()),
        user: user.map(str::to_owned),
    };
    let removed = [scope(None, Some("bob")), scope(Some("b"), None)];
    assert_eq!(*yard.fleet.expected.lock().unwrap(), removed, "their removal is meant");
    assert_eq!(*yard.fleet.erased.lock().unwrap(), removed, "an explicit removal erases at once");
    assert_eq!(yard.fleet.view("a").unwrap().restarts, 0);

    // A backend that says so, and has not done so.
    peer.command(configure("not-deleted", "mcp_installation_deleted", "a"));
    peer.command(configure("not-created", "mcp_installation_created", "c"));
    assert_eq!(peer.result("not-created").await["status"], "failed");
    assert!(peer.results("not-deleted").is_empty());
    peer.configure(config("h6", &["alice"], &[]));
    peer.command(configure("other", "mcp_installation_updated", "x"));
    assert_eq!(peer.result("not-deleted").await["status"], "completed");
}

#[tokio::test]
async fn an_update_that_a_look_has_taken_on_already_is_confirmed_when_it_is_there() {
    let peer = Peer::start().await;
    let (yard, linked) = linked(&peer, &["a", "b"]).await;
    linked.until("the configuration", |status| status.config_hash.as_deref() == Some("h1")).await;
    let (open, late) = tokio::sync::oneshot::channel();
    *yard.fleet.late.lock().unwrap() = Some(late);
    let mut updated = config("h2", &["alice"], &["a", "b"]);
    updated["teams"][0]["installations"][0]["args"] = json!(["--fast"]);
    peer.configure(updated);
    linked.until("the update", |status| status.config_hash.as_deref() == Some("h2")).await;
    peer.command(configure("updated", "mcp_installation_updated", "a"));
    wait_for("it to begin", || (linked.status().commands > 0).then_some(())).await;
    // The other one looks at the configuration after it, and is confirmed.
    peer.command(configure("same", "mcp_installation_updated", "b"));
    assert_eq!(peer.result("same").await["status"], "completed");
    assert!(peer.results("updated").is_empty(), "it is what it was before");
    open.send(()).unwrap();
    assert_eq!(peer.result("updated").await["status"], "completed");
    assert_eq!(yard.fleet.view("a").unwrap().spec.args.len(), 1);
}

#[tokio::test]
async fn a_configure_command_whose_configuration_cannot_be_read_waits_for_it() {
    let peer = Peer::start().await;
    let (_yard, _linked) = linked(&peer, &["a"]).await;
    peer.behave("config", Some(Manner::Status(503, String::new())));
    peer.configure(config("h2", &["alice"], &["a", "b"]));
    let before = peer.seen("config").len();
    peer.command(configure("c1", "mcp_installation_created", "b"));
    wait_for("some attempts", || (peer.seen("config").len() > before + 4).then_some(())).await;
    assert!(peer.results("c1").is_empty());
    peer.behave("config", None);
    assert_eq!(peer.result("c1").await["status"], "completed");
}

#[tokio::test]
async fn a_member_who_has_given_no_value_keeps_no_command_from_being_done_for_the_others() {
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
    let yard = Yard::new(&peer, Some("token-1")).await;
    let _linked = yard.link();
    let view = |user: &str| {
        let snapshot = yard.fleet.runtime.snapshot();
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
    // Alone, it is the reason why nothing is done.
    peer.command(command("c3", "restart", &json!({"installation_id": "a", "user_id": "bob"})));
    assert_eq!(peer.result("c3").await["status"], "failed");

    peer.command(command("c4", "kill", &json!({"installation_id": "a"})));
    assert_eq!(peer.result("c4").await["status"], "completed");
    let bob = view("bob").unwrap();
    assert_eq!(
        (bob.status, bob.requested_state),
        (Status::AwaitingUserConfig, RequestedState::Stopped),
        "it still waits for its user"
    );
}
