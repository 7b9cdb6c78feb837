//! The edge cases of a reconnect.

use futures::future::join_all;
use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::remote_support::{
    DAY, REFUSED, lose, story_after_start, until_attempting, until_attempts, until_back, until_seen, waits,
};
use crate::support::{Fleet, Server, seconds, tenths};

#[tokio::test(start_paused = true)]
async fn what_a_server_can_do_is_read_anew_after_a_reconnect_and_the_difference_is_told() {
    let fleet = Fleet::start().await;
    let before = SimScript { tools: 4, resources: 1, ..SimScript::default() };
    let id = fleet.online(Server::remote("a").script(before)).await;
    let remote = fleet.remote(&id);
    let after = SimScript { tools: 2, resources: 3, prompts: 2, version: "2.0.0".to_owned(), ..SimScript::default() };
    lose(&fleet, &id).await;
    remote.change(|manner| manner.script = Some(after.into()));
    remote.bring_up();
    until_back(&fleet, &id).await;
    let view = fleet.view(&id);
    let catalogue = view.offered_catalogue().unwrap();
    let counts = (catalogue.tools.len(), catalogue.resources.len(), catalogue.prompts.len());
    assert_eq!(counts, (2, 3, 2));
    let server = view.server.as_ref().unwrap();
    assert_eq!((&*server.version, server.capabilities.get().contains("prompts")), ("2.0.0", true));
    let changes = json!({"listChanged": true});
    let reconnected = &fleet.told(&id, "mcp.server.reconnected").await[0];
    assert_eq!(reconnected["capabilities"], json!({"tools": changes, "resources": changes, "prompts": changes}));
    let updated = &fleet.told(&id, "mcp.tools.updated").await[0];
    assert_eq!((&updated["added_tools"], &updated["removed_tools"]), (&json!([]), &json!(["sleep", "tool_4"])));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_restarted_many_times_in_a_row_is_followed_each_time() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    for nth in 1..=50 {
        remote.kill(REFUSED);
        remote.bring_up();
        let answer = fleet.call(&id, "add", json!({"a": nth, "b": 0})).await;
        assert_eq!(answer.unwrap()["structuredContent"]["result"], nth);
    }
    until_back(&fleet, &id).await;
    let sessions = remote.sessions();
    assert_eq!((sessions.opened, sessions.forgotten, sessions.open_count()), (51, 50, 1));
    assert_eq!((remote.attempts().len(), remote.overlaps()), (51, 0));
    assert_eq!(fleet.view(&id).restarts, 0, "that is no crash of it");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn restarts_faster_than_it_can_be_discovered_leave_it_with_one_session() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a").sse()).await;
    let remote = fleet.remote(&id);
    remote.change(|manner| manner.delay = seconds(0.2));
    for _ in 0..30 {
        sleep(seconds(0.3)).await;
        remote.kill(REFUSED);
        remote.bring_up();
    }
    sleep(seconds(600.0)).await;
    until_back(&fleet, &id).await;
    assert_eq!((remote.overlaps(), remote.sessions().open_count()), (0, 1));
    assert!(fleet.call(&id, "echo", json!({})).await.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_gone_for_good_is_never_given_up_and_says_so() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
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
async fn a_stop_during_a_reconnect_ends_its_schedule_and_a_start_connects_at_once() {
    let fleet = Fleet::start().await;
    let waiting = fleet.online(Server::remote("a")).await;
    let attempting = fleet.online(Server::remote("b")).await;
    for id in [&waiting, &attempting] {
        lose(&fleet, id).await;
    }
    fleet.remote(&attempting).change(|manner| (manner.down, manner.silent_on) = (None, ["initialize"].into()));
    until_attempting(&fleet.remote(&attempting)).await;
    for id in [&waiting, &attempting] {
        fleet.runtime.stop(id).await.unwrap();
        let remote = fleet.remote(id);
        let attempts = remote.attempts();
        assert!(attempts.iter().all(|attempt| attempt.ended.is_some()), "what was under way is over");
        let view = fleet.view(id);
        assert_eq!((view.status, view.requested_state), (Status::Offline, RequestedState::Stopped));
        assert_eq!((view.connection, view.next_retry_at), (Some(ConnectionState::Disconnected), None));
        remote.change(|manner| (manner.down, manner.silent_on) = (None, [].into()));
        sleep(DAY).await;
        assert_eq!(remote.attempts().len(), attempts.len(), "no timer was left");
        let refused = fleet.call(id, "echo", json!({})).await;
        assert!(matches!(refused, Err(CallError::Refused { status: Status::Offline, .. })), "{refused:?}");
        let began = Instant::now();
        fleet.runtime.start(id).await.unwrap();
        until_back(&fleet, id).await;
        assert_eq!(tenths(began.elapsed()), 0.0);
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_removal_during_a_reconnect_leaves_nothing_of_it() {
    let fleet = Fleet::start().await;
    let waiting = fleet.online(Server::remote("a")).await;
    let attempting = fleet.online(Server::remote("b")).await;
    for id in [&waiting, &attempting] {
        lose(&fleet, id).await;
    }
    fleet.remote(&attempting).change(|manner| (manner.down, manner.silent_on) = (None, ["initialize"].into()));
    until_attempting(&fleet.remote(&attempting)).await;
    for id in [&waiting, &attempting] {
        let removed = fleet.runtime.uninstall(id).await.unwrap();
        assert!(!removed.dormant, "{id}");
        assert!(fleet.runtime.snapshot().get(id).is_none());
        let remote = fleet.remote(id);
        let attempts = remote.attempts().len();
        sleep(DAY).await;
        assert_eq!((remote.attempts().len(), remote.sessions().open_count()), (attempts, 0));
        let story = story_after_start(&fleet, id).await;
        assert!(
            story.ends_with(&["disconnected as intended".to_owned(), "mcp.server.stopped".to_owned()]),
            "{story:?}"
        );
        assert!(matches!(fleet.call(id, "echo", json!({})).await, Err(CallError::NotFound { .. })));
    }
    assert_eq!(fleet.world.sim.line_count(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn calls_during_a_reconnect_share_one_attempt_and_its_failure_and_the_schedule_goes_on() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    until_attempts(&remote, 6).await;
    let next = fleet.until_view(&id, |view| view.attempt == Some(6)).await.next_retry_at.unwrap();
    remote.change(|manner| manner.connect_delay = seconds(2.0));
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
        let told = seconds(next_retry_ms.unwrap() as f64 / 1000.0);
        assert!(left.abs_diff(told) < seconds(0.01), "{told:?} for {left:?}");
    }
    assert_eq!(fleet.view(&id).next_retry_at, Some(next), "as if nobody had called");
    assert_eq!(fleet.view(&id).status, Status::Offline);
    until_attempts(&remote, 9).await;
    let rest = waits(&remote)[7..].to_vec();
    assert_eq!((tenths(remote.attempts()[7].began - began) > 2.0, rest), (true, vec![64.0]), "it doubles as before");

    remote.bring_up();
    let answers = join_all((0..10).map(|_| fleet.call(&id, "echo", json!({"text": 1})))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(remote.attempts().len(), 10, "and one success for all");
    until_back(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_while_the_schedules_own_attempt_is_under_way_makes_no_other() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    remote.change(|manner| (manner.down, manner.connect_delay) = (None, seconds(5.0)));
    until_attempting(&remote).await;
    let answers = join_all((0..5).map(|_| fleet.call(&id, "echo", json!({"text": 1})))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(remote.attempts().len(), 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn health_is_not_checked_while_there_is_no_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    let checks = remote.tried_at("ping").len();
    sleep(seconds(3600.0)).await;
    assert_eq!((remote.tried_at("ping").len(), fleet.view(&id).health), (checks, ServerHealth::Unknown));
    remote.bring_up();
    until_back(&fleet, &id).await;
    let back = Instant::now();
    until_seen(&remote, |remote| remote.served_at("ping").len() > checks).await;
    let waited = back.elapsed().as_secs_f64();
    assert!((108.0..=132.0).contains(&waited), "an interval after it is connected, not at once: {waited}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_became_due_while_the_machine_slept_is_made_when_it_wakes() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    until_attempts(&remote, 11).await;
    fleet.until_view(&id, |view| view.attempt == Some(11)).await;
    let before = remote.attempts().len();

    // Not long enough: what is left of the delay is as much shorter.
    let next = fleet.view(&id).next_retry_at.unwrap();
    fleet.runtime.resumed_after_suspend(seconds(30.0));
    let nearer = fleet.until_view(&id, |view| view.next_retry_at != Some(next)).await.next_retry_at;
    assert_eq!(nearer.map(|nearer| nearer + seconds(30.0)), Some(next));
    assert_eq!(remote.attempts().len(), before);
    remote.bring_up();
    let woken = Instant::now();
    fleet.runtime.resumed_after_suspend(seconds(8.0 * 3600.0));
    until_back(&fleet, &id).await;
    assert_eq!(tenths(woken.elapsed()), 0.0);
    assert_eq!(remote.attempts().len(), before + 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_died_while_the_machine_slept_is_found_out_when_it_wakes() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    fleet.runtime.resumed_after_suspend(seconds(3600.0));
    until_seen(&remote, |remote| remote.served_at("ping").len() == 1).await;
    assert_eq!(story_after_start(&fleet, &id).await, Vec::<String>::new(), "it is as it was");
    remote.expire(404);
    fleet.runtime.resumed_after_suspend(seconds(3600.0));
    fleet.until(&id, Status::Offline).await;
    until_back(&fleet, &id).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_healthy_connection_that_is_made_anew_on_request_is_closed_first() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    sleep(seconds(60.0)).await;
    let outcome = fleet.runtime.reconnect(&id).await.unwrap();
    assert_eq!((outcome.success, outcome.status), (true, Status::Online));
    let sessions = remote.sessions();
    assert_eq!((sessions.opened, sessions.closed, sessions.dropped), (2, 1, 0), "its end is told to the server");
    let expected = [
        "connecting: reconnecting on request",
        "disconnected as intended",
        "discovering_tools",
        "syncing_tools",
        "discovered 3 tools",
        "online",
        "reconnected at attempt 1",
    ];
    assert_eq!(story_after_start(&fleet, &id).await, expected);
    let back = Instant::now();
    until_seen(&remote, |remote| remote.served_at("ping").len() == 1).await;
    assert!(back.elapsed() >= seconds(108.0), "health checks go on, an interval later");
    fleet.finish().await;
}
