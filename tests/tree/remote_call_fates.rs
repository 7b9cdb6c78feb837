//! The fate of a call that is reported to the caller, for each end of its session.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::CallerRequest;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds};
use tokio::time::sleep;

use crate::remote_support::{REFUSED, lose_connection, until_reconnected, until_seen};

#[tokio::test(start_paused = true)]
async fn completed_calls_survive_a_loss_and_unsent_calls_are_repeated() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let answered = fleet.call(&id, "echo", json!({"text": 3})).await;
    remote.fail_next([FailureKind::Cut]);
    let (lost, unsent) =
        futures::join!(fleet.call(&id, "echo", json!({"text": 1})), fleet.call(&id, "sleep", json!({"ms": 1})));
    assert!(matches!(lost, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{lost:?}");
    assert!(answered.is_ok(), "{answered:?}");
    assert_eq!(remote.served_at("tools/call echo").len(), 1, "its response had already arrived");
    assert!(unsent.is_ok(), "an unsent call is sent on the next connection: {unsent:?}");
    assert_eq!((remote.tried_at("tools/call sleep").len(), remote.attempts().len()), (1, 2));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_may_have_been_executed_is_never_reported_as_unsent() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    // The first attempt breaks off; from the second on, the connection is refused.
    remote.fail_next([FailureKind::Cut]);
    let add = || CallerRequest::Tool { name: "add".to_owned(), arguments: None, repeatable: true, trace: None };
    let port = fleet.view(&id).port.clone().unwrap();
    let (answer, ()) = futures::join!(port.request(add(), seconds(30.0)), async {
        until_seen(&remote, |remote| remote.tried_at("tools/call").len() == 1).await;
        remote.take_down(REFUSED);
    });
    assert!(matches!(answer, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{answer:?}");
    assert_eq!(remote.tried_at("tools/call add").len(), 3);
    remote.bring_up();
    until_reconnected(&fleet, &id).await;

    // The same if the deadline leaves no time for a third attempt, and if the instance is stopped before it.
    let port = fleet.view(&id).port.clone().unwrap();
    remote.fail_next([FailureKind::Cut, REFUSED]);
    let answer = port.request(add(), seconds(0.9)).await;
    assert_eq!(answer.unwrap_err().fate(), Some(CallFate::MaybeExecuted));
    until_reconnected(&fleet, &id).await;
    let port = fleet.view(&id).port.clone().unwrap();
    remote.fail_next([FailureKind::Cut, REFUSED]);
    let (answer, ()) = futures::join!(port.request(add(), seconds(30.0)), async {
        sleep(seconds(1.0)).await;
        fleet.runtime.stop(&id).await.unwrap();
    });
    let stopped = CallError::Terminated { fate: CallFate::MaybeExecuted, reason: "stopped".to_owned() };
    assert_eq!(answer.unwrap_err(), stopped);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_repeat_reports_the_fate_and_reason_of_the_first_attempt() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let slow = SimScript { call_delay: seconds(5.0), ..SimScript::default() };
    remote.change(|behavior| behavior.script = Some(slow.into()));
    fleet.runtime.reconnect(&id).await.unwrap();
    let (read_only, ()) = futures::join!(fleet.call(&id, "add", json!({"a": 1, "b": 2})), async {
        until_seen(&remote, |remote| remote.served_at("tools/call").len() == 1).await;
        remote.expire(404);
        remote.report_session_lost(FailureKind::session_expired(404));
        remote.take_down(REFUSED);
    });
    let Err(CallError::Terminated { fate: CallFate::MaybeExecuted, reason }) = read_only else {
        panic!("{read_only:?}")
    };
    assert_eq!(
        reason, "Server disconnected: the session has expired (HTTP 404)",
        "not the reason of the second attempt"
    );
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_deadline_before_sending_reports_that_the_request_was_not_sent() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    remote.change(|behavior| (behavior.down, behavior.silent_on) = (None, ["initialize"].into()));
    let late = fleet.call_within(&id, "echo", json!({}), Some(seconds(5.0))).await.unwrap_err();
    assert_eq!((late.fate(), late.kind()), (Some(CallFate::NotSent), "timed_out"));
    assert_eq!(late.to_string(), "server not ready within 5 s; the request was not sent");
    assert!(remote.tried_at("tools/call").is_empty());
    remote.change(|behavior| behavior.silent_on.clear());
    until_reconnected(&fleet, &id).await;

    // Between two attempts that both failed to connect.
    remote.fail_next([REFUSED, REFUSED, REFUSED]);
    let port = fleet.view(&id).port.clone().unwrap();
    let ping = CallerRequest::Method { method: "ping".to_owned(), params: None };
    let (late, ()) = futures::join!(port.request(ping, seconds(0.7)), async {
        sleep(seconds(0.6)).await;
        // The third attempt would come after the deadline.
        assert_eq!(remote.tried_at("ping").len(), 2);
    });
    assert_eq!(late.unwrap_err().fate(), Some(CallFate::NotSent));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_rejected_for_its_content_was_not_executed() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let refusals = [413, 414, 415, 422, 431].map(FailureKind::from_status);
    for refusal in refusals.into_iter().chain([FailureKind::Throttled { retry_after: None }]) {
        remote.fail_next([refusal.clone()]);
        let refused = fleet.call(&id, "echo", json!({})).await.unwrap_err();
        assert_eq!(refused, CallError::Remote { fate: CallFate::NotSent, failure: ExchangeFailure::sent(refusal) });
    }
    // HTTP 408, request timeout: the server may have read and executed it.
    remote.fail_next([FailureKind::from_status(408)]);
    let slow = fleet.call(&id, "echo", json!({})).await.unwrap_err();
    assert_eq!(slow.fate(), Some(CallFate::MaybeExecuted));
    fleet.finish().await;
}
