//! What became of a call is told as it was, however its session came to its end.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::CallerRequest;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use serde_json::json;
use tokio::time::sleep;

use crate::remote_support::{REFUSED, lose, until_back, until_seen};
use crate::support::{Fleet, Server, seconds};

#[tokio::test(start_paused = true)]
async fn what_was_answered_before_a_loss_is_answered_and_what_was_never_sent_is_repeated() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let answered = fleet.call(&id, "echo", json!({"text": 3})).await;
    remote.fail_next([FailureKind::Cut]);
    let (lost, unsent) =
        futures::join!(fleet.call(&id, "echo", json!({"text": 1})), fleet.call(&id, "sleep", json!({"ms": 1})));
    assert!(matches!(lost, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{lost:?}");
    assert!(answered.is_ok(), "{answered:?}");
    assert_eq!(remote.served_at("tools/call echo").len(), 1, "its answer was there already");
    assert!(unsent.is_ok(), "it harms nobody to send it on the next connection: {unsent:?}");
    assert_eq!((remote.tried_at("tools/call sleep").len(), remote.attempts().len()), (1, 2));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_may_have_been_carried_out_once_is_never_said_not_to_have_been_sent() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    // Its first attempt breaks off, and from the second on nobody is there.
    remote.fail_next([FailureKind::Cut]);
    let add = || CallerRequest::Tool { name: "add".to_owned(), arguments: None, repeatable: true };
    let port = fleet.view(&id).port.clone().unwrap();
    let (answer, ()) = futures::join!(port.request(add(), seconds(30.0)), async {
        until_seen(&remote, |remote| remote.tried_at("tools/call").len() == 1).await;
        remote.take_down(REFUSED);
    });
    assert!(matches!(answer, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{answer:?}");
    assert_eq!(remote.tried_at("tools/call add").len(), 3);
    remote.bring_up();
    until_back(&fleet, &id).await;

    // The same where the deadline leaves no time for a third attempt, and where it is stopped before that.
    let port = fleet.view(&id).port.clone().unwrap();
    remote.fail_next([FailureKind::Cut, REFUSED]);
    let answer = port.request(add(), seconds(0.9)).await;
    assert_eq!(answer.unwrap_err().fate(), Some(CallFate::MaybeExecuted));
    until_back(&fleet, &id).await;
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
async fn a_call_that_cannot_be_repeated_after_it_may_have_been_carried_out_says_so() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let slow = SimScript { call_delay: seconds(5.0), ..SimScript::default() };
    remote.change(|manner| manner.script = Some(slow.into()));
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
    assert_eq!(reason, "Server disconnected: the session has expired (HTTP 404)", "not that of the second attempt");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_passes_before_a_call_could_be_sent_says_that_it_was_not() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose(&fleet, &id).await;
    remote.change(|manner| (manner.down, manner.silent_on) = (None, ["initialize"].into()));
    let late = fleet.call_within(&id, "echo", json!({}), Some(seconds(5.0))).await.unwrap_err();
    assert_eq!((late.fate(), late.kind()), (Some(CallFate::NotSent), "timed_out"));
    assert_eq!(late.to_string(), "server not ready within 5 s; the request was not sent");
    assert!(remote.tried_at("tools/call").is_empty());
    remote.change(|manner| manner.silent_on.clear());
    until_back(&fleet, &id).await;

    // Between two attempts of which none has reached anybody.
    remote.fail_next([REFUSED, REFUSED, REFUSED]);
    let port = fleet.view(&id).port.clone().unwrap();
    let ping = CallerRequest::Method { method: "ping".to_owned(), params: None };
    let (late, ()) = futures::join!(port.request(ping, seconds(0.7)), async {
        sleep(seconds(0.6)).await;
        // The next attempt is not made: it would come after the deadline.
        assert_eq!(remote.tried_at("ping").len(), 2);
    });
    assert_eq!(late.unwrap_err().fate(), Some(CallFate::NotSent));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_was_refused_for_what_it_is_was_not_carried_out() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    let refusals = [413, 414, 415, 422, 431].map(FailureKind::from_status);
    for refusal in refusals.into_iter().chain([FailureKind::Throttled { retry_after: None }]) {
        remote.fail_next([refusal.clone()]);
        let refused = fleet.call(&id, "echo", json!({})).await.unwrap_err();
        assert_eq!(refused, CallError::Remote { fate: CallFate::NotSent, failure: ExchangeFailure::sent(refusal) });
    }
    // It came too slowly: who knows how much of it was taken.
    remote.fail_next([FailureKind::from_status(408)]);
    let slow = fleet.call(&id, "echo", json!({})).await.unwrap_err();
    assert_eq!(slow.fate(), Some(CallFate::MaybeExecuted));
    fleet.finish().await;
}
