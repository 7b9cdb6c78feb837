//! Calls: waiting, refusal, deadlines, and the outcome when the server dies.

use futures::future::join_all;
use mcp_satellite::connect::sim::{SimPlan, SimScript};
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use testkit::fleet::{Fleet, Server, call, exits, seconds, tenths};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

fn healthy() -> SimPlan {
    SimScript::default().into()
}

fn slow_start(delay: f64) -> SimScript {
    SimScript { handshake_delay: seconds(delay), ..SimScript::default() }
}

#[tokio::test(start_paused = true)]
async fn a_caller_of_a_starting_server_waits_for_it() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("a").script(slow_start(10.0))).await;
    fleet.until(&id, Status::Connecting).await;
    let began = Instant::now();
    let answer = fleet.call(&id, "add", json!({"a": 3, "b": 4})).await.unwrap();
    assert_eq!(answer["structuredContent"]["result"], 7);
    assert_eq!(tenths(began.elapsed()), 10.0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn errors_and_results_of_the_server_reach_the_caller_unchanged() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let failed = fleet.call(&id, "fail", json!({"message": "no"})).await.unwrap_err();
    assert!(matches!(&failed, CallError::Server { code: -32603, message, .. } if message == "failed as asked: no"));
    let result = fleet.call(&id, "tool_error", json!({"message": "no"})).await.unwrap();
    assert_eq!(result["isError"], true, "a tool's own error is a result");
    assert_eq!(fleet.view(&id).status, Status::Online, "neither changes the status");
    let executed = fleet.event_data(&id, "mcp.tool.executed").await;
    assert_eq!((&executed[0]["tool_name"], &executed[0]["success"]), (&json!("fail"), &json!(false)));
    assert_eq!((&executed[1]["tool_name"], &executed[1]["success"]), (&json!("tool_error"), &json!(false)));
    assert_eq!(executed[1]["error_message"], "failed as asked: no");
    fleet.finish().await;
}

/// Freezes a server and fills its stdin with a call, so that no byte of a second call is sent.
async fn fill_stdin(fleet: &Fleet, id: &InstanceId) -> JoinHandle<Result<Value, CallError>> {
    fleet.server(id).freeze();
    let first = spawn_call(fleet, id, json!({"text": "x".repeat(16 * 1024)}));
    sleep(seconds(0.1)).await;
    first
}

/// Calls from a separate task, which sees the end of the run before the supervisor of the team does.
fn spawn_call(fleet: &Fleet, id: &InstanceId, arguments: Value) -> JoinHandle<Result<Value, CallError>> {
    let (runtime, id) = (fleet.runtime.clone(), id.clone());
    tokio::spawn(async move { call(&runtime, &id, "echo", arguments, None).await })
}

#[tokio::test(start_paused = true)]
async fn a_call_that_was_not_sent_is_repeated_on_the_next_run() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let first = fill_stdin(&fleet, &id).await;
    let second = spawn_call(&fleet, &id, json!({"text": "second"}));
    sleep(seconds(0.1)).await;
    fleet.server(&id).signal(9);
    let first = first.await.unwrap().unwrap_err();
    assert_eq!(first.fate(), Some(CallFate::MaybeExecuted), "the first bytes of the call are in the pipe: {first:?}");
    let second = second.await.unwrap().unwrap();
    assert_eq!(second["structuredContent"]["text"], "second");
    assert_eq!(fleet.world.openings(&id).len(), 2);
    assert_eq!(fleet.received(&id).await["calls"], 1, "the call was executed once");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_unsent_call_wakes_a_server_that_exited_cleanly() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let first = fill_stdin(&fleet, &id).await;
    let second = spawn_call(&fleet, &id, json!({"text": "second"}));
    sleep(seconds(0.1)).await;
    fleet.server(&id).exit(0);
    assert_eq!(second.await.unwrap().unwrap()["structuredContent"]["text"], "second");
    assert!(first.await.unwrap().is_err());
    assert_eq!(fleet.event_data(&id, "mcp.server.respawned").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_may_have_been_executed_is_not_repeated() {
    let fleet = Fleet::start().await;
    let deadly = SimScript { exit_on_call: Some(1), exit_code: 1, ..SimScript::default() };
    let id = fleet.online(Server::new("a").plans([deadly.into(), healthy()])).await;
    let error = fleet.call(&id, "echo", json!({"text": 1})).await.unwrap_err();
    let expected = CallError::Terminated { fate: CallFate::MaybeExecuted, reason: "exited with code 1".to_owned() };
    assert_eq!(error, expected);
    fleet.until_view(&id, |view| view.status == Status::Online && view.restarts == 1).await;
    assert_eq!(fleet.received(&id).await["calls"], 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_read_only_call_is_repeated_after_the_restart() {
    let fleet = Fleet::start().await;
    let deadly = SimScript { exit_on_call: Some(1), exit_code: 1, ..SimScript::default() };
    let id = fleet.online(Server::new("a").plans([deadly.into(), healthy()])).await;
    let began = Instant::now();
    let answer = fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.unwrap();
    assert_eq!(answer["structuredContent"]["result"], 3);
    assert_eq!(tenths(began.elapsed()), 1.0, "after the restart delay");
    assert_eq!(fleet.received(&id).await["calls"], 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_read_only_call_is_repeated_after_a_clean_exit() {
    let fleet = Fleet::start().await;
    let exiting = SimScript { exit_on_call: Some(1), exit_code: 0, ..SimScript::default() };
    let id = fleet.online(Server::new("a").plans([exiting.into(), healthy()])).await;
    let answer = fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.unwrap();
    assert_eq!(answer["structuredContent"]["result"], 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_has_killed_two_runs_fails() {
    let fleet = Fleet::start().await;
    let deadly = SimScript { exit_on_call: Some(1), exit_code: 1, ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(deadly)).await;
    let error = fleet.call(&id, "add", json!({"a": 1, "b": 2})).await.unwrap_err();
    assert_eq!(error.fate(), Some(CallFate::MaybeExecuted));
    assert_eq!(fleet.world.openings(&id).len(), 2);
    fleet.until_view(&id, |view| view.status == Status::Online && view.restarts == 2).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn every_caller_gets_an_error_when_the_server_dies() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let calls = (0..100).map(|_| fleet.call(&id, "sleep", json!({"ms": 20_000})));
    let death = async {
        sleep(seconds(1.0)).await;
        fleet.server(&id).signal(11);
    };
    let (answers, ()) = futures::join!(join_all(calls), death);
    let expected = CallError::Terminated { fate: CallFate::MaybeExecuted, reason: "killed by SIGSEGV".to_owned() };
    assert!(answers.into_iter().all(|answer| answer == Err(expected.clone())));
    fleet.until(&id, Status::Online).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_timeout_cancels_the_call_on_the_server() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a").script(SimScript { hang_calls: true, ..SimScript::default() })).await;
    let began = Instant::now();
    let error = fleet.call_within(&id, "echo", json!({"text": 1}), Some(seconds(5.0))).await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { .. }), "{error:?}");
    assert_eq!(tenths(began.elapsed()), 5.0);
    assert_eq!(error.fate(), Some(CallFate::TimedOut));
    let began = Instant::now();
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_err());
    assert_eq!(tenths(began.elapsed()), 30.0, "the default timeout");
    assert_eq!(fleet.received(&id).await["cancelled"].as_array().unwrap().len(), 2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_late_response_is_dropped() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let late = json!({"ms": 10_000, "ignore_cancel": true});
    let error = fleet.call_within(&id, "sleep", late, Some(seconds(5.0))).await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { .. }));
    let before = fleet.view(&id).counters.messages();
    let next = fleet.call(&id, "sleep", json!({"ms": 20_000})).await.unwrap();
    assert_eq!(next["content"][0]["text"], "slept 20000 ms", "not the late response");
    assert_eq!(fleet.view(&id).counters.messages(), before + 2, "the late response arrived");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn progress_extends_a_deadline_up_to_the_cap() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let working = |ms: u64| json!({"ms": ms, "progress_every_ms": 10_000});
    let answer = fleet.call(&id, "sleep", working(100_000)).await.unwrap();
    assert_eq!(answer["content"][0]["text"], "slept 100000 ms");
    let began = Instant::now();
    let error = fleet.call(&id, "sleep", working(3_600_000)).await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { .. }));
    assert_eq!(tenths(began.elapsed()), 300.0, "the hard cap");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_disconnects_cancels_only_its_own_call() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let stays = fleet.call(&id, "sleep", json!({"ms": 10_000}));
    let goes = async {
        let call = fleet.call(&id, "sleep", json!({"ms": 10_000}));
        assert!(tokio::time::timeout(seconds(1.0), call).await.is_err());
        sleep(seconds(0.1)).await;
        assert_eq!(fleet.received(&id).await["cancelled"].as_array().unwrap().len(), 1);
        assert_eq!(
            fleet.view(&id).port.as_ref().unwrap().calls_in_flight(),
            1,
            "the cancelled call is no longer in flight"
        );
    };
    let (stayed, ()) = futures::join!(stays, goes);
    assert!(stayed.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn two_hundred_concurrent_calls_get_their_own_responses() {
    let fleet = Fleet::start().await;
    let script = SimScript { call_delay: seconds(1.0), jitter: 0.9, seed: 7, ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script)).await;
    let calls = (0..200).map(|nth| fleet.call(&id, "echo", json!({"text": format!("answer {nth}")})));
    for (nth, answer) in join_all(calls).await.into_iter().enumerate() {
        assert_eq!(answer.unwrap()["structuredContent"]["text"], format!("answer {nth}"));
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_beyond_the_in_flight_limit_is_refused_until_others_complete() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a").policy(|policy| policy.session.calls_in_flight_max = 5)).await;
    let calls = join_all((0..6).map(|_| fleet.call(&id, "sleep", json!({"ms": 1000})))).await;
    let refused: Vec<_> = calls.into_iter().filter_map(Result::err).collect();
    assert_eq!(refused, [CallError::Busy { what: "calls in flight for this server", limit: 5 }]);
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_caller_beyond_the_waiting_limit_is_refused_until_others_time_out() {
    let fleet = Fleet::start().await;
    let server = Server::new("a").script(slow_start(20.0));
    let id = fleet.add(server.policy(|policy| policy.session.callers_waiting_max = 3)).await;
    fleet.until(&id, Status::Connecting).await;
    let waiting = |limit: f64| fleet.call_within(&id, "echo", json!({"text": 1}), Some(seconds(limit)));
    let early = join_all((0..4).map(|_| waiting(5.0))).await;
    let busy = CallError::Busy { what: "callers waiting for this server", limit: 3 };
    assert_eq!(early.iter().filter(|answer| **answer == Err(busy.clone())).count(), 1);
    let late = join_all((0..4).map(|_| waiting(30.0))).await;
    assert_eq!(late.iter().filter(|answer| answer.is_ok()).count(), 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_of_an_unavailable_server_is_refused_at_once_with_a_remedy() {
    let fleet = Fleet::start().await;
    let failed = fleet.add(Server::new("failed").script(exits(1.0, 1))).await;
    let waiting = fleet.add(Server::new("waiting").missing("API_KEY")).await;
    let stopped = fleet.online(Server::new("stopped")).await;
    fleet.runtime.stop(&stopped).await.unwrap();
    fleet.until(&failed, Status::PermanentlyFailed).await;
    let began = Instant::now();
    for (id, status, next, words) in [
        (&failed, Status::PermanentlyFailed, Remedy::Restart, ["permanently_failed", "last: exited with code 1"]),
        (&waiting, Status::AwaitingUserConfig, Remedy::Configure, ["awaiting_user_config", "API_KEY"]),
        (&stopped, Status::Offline, Remedy::Start, ["files-acme-alice-stopped", "is stopped"]),
    ] {
        let error = fleet.call(id, "echo", json!({})).await.unwrap_err();
        let CallError::Refused { status: refused_with, message, remedy } = error else {
            panic!("{id} was not refused");
        };
        assert_eq!((refused_with, remedy, fleet.view(id).remedy), (status, Some(next), Some(next)));
        for word in words {
            assert!(message.contains(word), "{message}");
        }
    }
    assert_eq!(tenths(began.elapsed()), 0.0);
    let nobody = InstanceId::new("acme".into(), "bob".into(), "failed".into());
    let error = fleet.call(&nobody, "echo", json!({})).await.unwrap_err();
    assert_eq!(error, CallError::NotFound { what: "server".to_owned() });
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn waiting_callers_are_refused_when_the_server_fails_permanently_or_is_stopped() {
    let fleet = Fleet::start().await;
    let failing =
        SimScript { handshake_delay: seconds(4.0), handshake_error: Some("no".to_owned()), ..SimScript::default() };
    let failing = fleet.add(Server::new("failing").script(failing)).await;
    let slow = fleet.add(Server::new("slow").script(slow_start(20.0))).await;
    let stop = async {
        sleep(seconds(1.0)).await;
        fleet.runtime.stop(&slow).await.unwrap();
    };
    let (failed, stopped, ()) =
        futures::join!(fleet.call(&failing, "echo", json!({})), fleet.call(&slow, "echo", json!({})), stop);
    assert!(matches!(failed, Err(CallError::Refused { status: Status::PermanentlyFailed, .. })), "{failed:?}");
    assert!(matches!(stopped, Err(CallError::Refused { status: Status::Offline, .. })), "{stopped:?}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_deadline_includes_the_wait_for_the_server() {
    let fleet = Fleet::start().await;
    let script = SimScript { hang_calls: true, ..slow_start(20.0) };
    let id = fleet.add(Server::new("a").script(script)).await;
    let began = Instant::now();
    let error = fleet.call_within(&id, "echo", json!({}), Some(seconds(10.0))).await.unwrap_err();
    assert_eq!(error, CallError::TimedOut { after: seconds(10.0), fate: CallFate::NotSent });
    assert_eq!(tenths(began.elapsed()), 10.0);
    let error = fleet.call_within(&id, "echo", json!({}), Some(seconds(15.0))).await.unwrap_err();
    assert_eq!(error.fate(), Some(CallFate::TimedOut));
    assert_eq!(tenths(began.elapsed()), 25.0, "10 s of waiting and 5 s with the server");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_of_another_team_is_not_found() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::of("umbrella", "a")).await;
    let foreign_id = InstanceId::new("acme".into(), id.user.clone(), id.installation.clone());
    let error = fleet.call(&foreign_id, "echo", json!({})).await.unwrap_err();
    assert_eq!(error, CallError::NotFound { what: "server".to_owned() });
    let snapshot = fleet.runtime.snapshot();
    assert_eq!(snapshot.team(&"acme".into()).count(), 0);
    assert_eq!(snapshot.team(&"umbrella".into()).count(), 1);
    fleet.finish().await;
}
