//! The edge cases of a reconnect.

use futures::future::join_all;
use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds, tenths};
use tokio::time::{Instant, sleep};

use crate::remote_support::{
    DAY, REFUSED, event_lines_after_start, lose_connection, until_attempting, until_attempts, until_reconnected,
    until_seen, waits,
};

#[tokio::test(start_paused = true)]
async fn a_reconnect_reads_capabilities_and_lists_again_and_reports_changes() {
    let fleet = Fleet::start().await;
    let before = SimScript { tools: 4, resources: 1, ..SimScript::default() };
    let id = fleet.online(Server::remote("a").script(before)).await;
    let remote = fleet.remote(&id);
    let after = SimScript { tools: 2, resources: 3, prompts: 2, version: "2.0.0".to_owned(), ..SimScript::default() };
    lose_connection(&fleet, &id).await;
    remote.change(|behavior| behavior.script = Some(after.into()));
    remote.bring_up();
    until_reconnected(&fleet, &id).await;
    let view = fleet.view(&id);
    let catalogue = view.offered_catalogue().unwrap();
    let counts = (catalogue.tools.len(), catalogue.resources.len(), catalogue.prompts.len());
    assert_eq!(counts, (2, 3, 2));
    let server = view.server.as_ref().unwrap();
    assert_eq!((&*server.version, server.capabilities.get().contains("prompts")), ("2.0.0", true));
    let changes = json!({"listChanged": true});
    let reconnected = &fleet.event_data(&id, "mcp.server.reconnected").await[0];
    assert_eq!(reconnected["capabilities"], json!({"tools": changes, "resources": changes, "prompts": changes}));
    let updated = &fleet.event_data(&id, "mcp.tools.updated").await[0];
    assert_eq!((&updated["added_tools"], &updated["removed_tools"]), (&json!([]), &json!(["sleep", "tool_4"])));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_restarts_fifty_times_in_a_row_is_reconnected_each_time() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    for nth in 1..=50 {
        remote.kill(REFUSED);
        remote.bring_up();
        let answer = fleet.call(&id, "add", json!({"a": nth, "b": 0})).await;
        assert_eq!(answer.unwrap()["structuredContent"]["result"], nth);
    }
    until_reconnected(&fleet, &id).await;
    let sessions = remote.sessions();
    assert_eq!((sessions.opened, sessions.forgotten, sessions.open_count()), (51, 50, 1));
    assert_eq!((remote.attempts().len(), remote.overlaps()), (51, 0));
    assert_eq!(fleet.view(&id).restarts, 0, "a lost connection does not count as a crash");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn restarts_faster_than_discovery_leave_exactly_one_session() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").sse()).await;
    let remote = fleet.remote(&id);
    remote.change(|behavior| behavior.delay = seconds(0.2));
    for _ in 0..30 {
        sleep(seconds(0.3)).await;
        remote.kill(REFUSED);
        remote.bring_up();
    }
    sleep(seconds(600.0)).await;
    until_reconnected(&fleet, &id).await;
    assert_eq!((remote.overlaps(), remote.sessions().open_count()), (0, 1));
    assert!(fleet.call(&id, "echo", json!({})).await.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_server_is_retried_forever_with_its_reason_in_the_status() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    sleep(DAY).await;
    let view = fleet.view(&id);
    assert_eq!((view.status, view.connection), (Status::Offline, Some(ConnectionState::Reconnecting)));
    assert_eq!(view.message.as_deref(), Some("Server unreachable: connection refused"));
    assert_eq!(view.last_error.as_deref(), Some("connection refused"));
    assert!(view.next_retry_at.is_some() && view.catalogue.is_some());
    assert!(remote.attempts().len() > 470);
    assert_eq!(remote.attempts().iter().filter(|attempt| attempt.succeeded).count(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_ends_the_reconnect_schedule_and_a_start_connects_at_once() {
    let fleet = Fleet::start().await;
    let waiting = fleet.online(Server::remote("a")).await;
    let attempting = fleet.online(Server::remote("b")).await;
    for id in [&waiting, &attempting] {
        lose_connection(&fleet, id).await;
    }
    fleet.remote(&attempting).change(|behavior| (behavior.down, behavior.silent_on) = (None, ["initialize"].into()));
    until_attempting(&fleet.remote(&attempting)).await;
    for id in [&waiting, &attempting] {
        fleet.runtime.stop(id).await.unwrap();
        let remote = fleet.remote(id);
        let attempts = remote.attempts();
        assert!(attempts.iter().all(|attempt| attempt.ended.is_some()), "the attempt in progress ended");
        let view = fleet.view(id);
        assert_eq!((view.status, view.requested_state), (Status::Offline, RequestedState::Stopped));
        assert_eq!((view.connection, view.next_retry_at), (Some(ConnectionState::Disconnected), None));
        remote.change(|behavior| (behavior.down, behavior.silent_on) = (None, [].into()));
        sleep(DAY).await;
        assert_eq!(remote.attempts().len(), attempts.len(), "no attempt is scheduled after a stop");
        let refused = fleet.call(id, "echo", json!({})).await;
        assert!(matches!(refused, Err(CallError::Refused { status: Status::Offline, .. })), "{refused:?}");
        let began = Instant::now();
        fleet.runtime.start(id).await.unwrap();
        until_reconnected(&fleet, id).await;
        assert_eq!(tenths(began.elapsed()), 0.0);
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_removal_during_a_reconnect_leaves_no_attempt_and_no_session() {
    let fleet = Fleet::start().await;
    let waiting = fleet.online(Server::remote("a")).await;
    let attempting = fleet.online(Server::remote("b")).await;
    for id in [&waiting, &attempting] {
        lose_connection(&fleet, id).await;
    }
    fleet.remote(&attempting).change(|behavior| (behavior.down, behavior.silent_on) = (None, ["initialize"].into()));
    until_attempting(&fleet.remote(&attempting)).await;
    for id in [&waiting, &attempting] {
        let removed = fleet.runtime.uninstall(id).await.unwrap();
        assert!(!removed.dormant, "{id}");
        assert!(fleet.runtime.snapshot().get(id).is_none());
        let remote = fleet.remote(id);
        let attempts = remote.attempts().len();
        sleep(DAY).await;
        assert_eq!((remote.attempts().len(), remote.sessions().open_count()), (attempts, 0));
        let event_lines = event_lines_after_start(&fleet, id).await;
        assert!(
            event_lines.ends_with(&["disconnected as intended".to_owned(), "mcp.server.stopped".to_owned()]),
            "{event_lines:?}"
        );
        assert!(matches!(fleet.call(id, "echo", json!({})).await, Err(CallError::NotFound { .. })));
    }
    assert_eq!(fleet.world.sim.line_count(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn calls_during_a_reconnect_share_one_attempt_without_changing_the_schedule() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    until_attempts(&remote, 6).await;
    let next = fleet.until_view(&id, |view| view.attempt == Some(6)).await.next_retry_at.unwrap();
    remote.change(|behavior| behavior.connect_delay = seconds(2.0));
    sleep(seconds(10.0)).await;
    let began = Instant::now();
    let early = (0..10).map(|_| fleet.call(&id, "echo", json!({"text": 1})));
    let (early, late) = futures::join!(join_all(early), async {
        sleep(seconds(1.0)).await;
        fleet.call(&id, "echo", json!({"text": 1})).await
    });
    assert_eq!(remote.attempts().len(), 7, "one attempt for eleven callers");
    assert_eq!(tenths(began.elapsed()), 2.0);
    let left = next - Instant::now().into_std();
    for error in early.into_iter().chain([late]).map(Result::unwrap_err) {
        let CallError::Reconnecting { next_retry_ms, last_error, .. } = &error else { panic!("{error:?}") };
        assert_eq!((&**last_error, error.fate()), ("connection refused", Some(CallFate::NotSent)));
        let reported = seconds(next_retry_ms.unwrap() as f64 / 1000.0);
        assert!(left.abs_diff(reported) < seconds(0.01), "{reported:?} for {left:?}");
    }
    assert_eq!(fleet.view(&id).next_retry_at, Some(next), "the calls do not change the schedule");
    assert_eq!(fleet.view(&id).status, Status::Offline);
    until_attempts(&remote, 9).await;
    let rest = waits(&remote)[7..].to_vec();
    assert_eq!(
        (tenths(remote.attempts()[7].began - began) > 2.0, rest),
        (true, vec![64.0]),
        "the delays double as before"
    );

    remote.bring_up();
    let answers = join_all((0..10).map(|_| fleet.call(&id, "echo", json!({"text": 1})))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(remote.attempts().len(), 10, "one successful attempt for all calls");
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_during_a_scheduled_attempt_starts_no_other_attempt() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    remote.change(|behavior| (behavior.down, behavior.connect_delay) = (None, seconds(5.0)));
    until_attempting(&remote).await;
    let answers = join_all((0..5).map(|_| fleet.call(&id, "echo", json!({"text": 1})))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(remote.attempts().len(), 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn health_is_not_checked_without_a_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    let checks = remote.tried_at("ping").len();
    sleep(seconds(3600.0)).await;
    assert_eq!((remote.tried_at("ping").len(), fleet.view(&id).health), (checks, ServerHealth::Unknown));
    remote.bring_up();
    until_reconnected(&fleet, &id).await;
    let back = Instant::now();
    until_seen(&remote, |remote| remote.served_at("ping").len() > checks).await;
    let waited = back.elapsed().as_secs_f64();
    assert!((108.0..=132.0).contains(&waited), "the first check was not one interval after the connection: {waited}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_became_due_during_suspend_is_made_on_resume() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    until_attempts(&remote, 11).await;
    fleet.until_view(&id, |view| view.attempt == Some(11)).await;
    let before = remote.attempts().len();

    // A short suspend brings the attempt forward by its own length.
    let next = fleet.view(&id).next_retry_at.unwrap();
    fleet.runtime.resumed_after_suspend(seconds(30.0));
    let earlier = fleet.until_view(&id, |view| view.next_retry_at != Some(next)).await.next_retry_at;
    assert_eq!(earlier.map(|earlier| earlier + seconds(30.0)), Some(next));
    assert_eq!(remote.attempts().len(), before);
    remote.bring_up();
    let resumed_at = Instant::now();
    fleet.runtime.resumed_after_suspend(seconds(8.0 * 3600.0));
    until_reconnected(&fleet, &id).await;
    assert_eq!(tenths(resumed_at.elapsed()), 0.0);
    assert_eq!(remote.attempts().len(), before + 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_lost_during_suspend_is_detected_on_resume() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    fleet.runtime.resumed_after_suspend(seconds(3600.0));
    until_seen(&remote, |remote| remote.served_at("ping").len() == 1).await;
    assert_eq!(event_lines_after_start(&fleet, &id).await, Vec::<String>::new(), "nothing changed");
    remote.expire(404);
    fleet.runtime.resumed_after_suspend(seconds(3600.0));
    fleet.until(&id, Status::Offline).await;
    until_reconnected(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_requested_reconnect_closes_the_healthy_connection_first() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    sleep(seconds(60.0)).await;
    let outcome = fleet.runtime.reconnect(&id).await.unwrap();
    assert_eq!((outcome.success, outcome.status), (true, Status::Online));
    let sessions = remote.sessions();
    assert_eq!(
        (sessions.opened, sessions.closed, sessions.dropped),
        (2, 1, 0),
        "the old session is closed with a request"
    );
    let expected = [
        "connecting: reconnecting on request",
        "disconnected as intended",
        "discovering_tools",
        "syncing_tools",
        "discovered 3 tools",
        "online",
        "reconnected at attempt 1",
    ];
    assert_eq!(event_lines_after_start(&fleet, &id).await, expected);
    let back = Instant::now();
    until_seen(&remote, |remote| remote.served_at("ping").len() == 1).await;
    assert!(back.elapsed() >= seconds(108.0), "the next health check comes one interval later");
    fleet.finish().await;
}
