//! Reconnecting on request, in every state.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::ControlError;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use serde_json::json;
use testkit::fleet::{Fleet, Server, seconds, tenths};
use tokio::time::{Instant, sleep};

use crate::remote_support::{
    REFUSED, UNAUTHORIZED, lose_connection, until_attempting, until_attempts, until_reconnected, until_seen, waits,
    waits_for_next_attempt,
};

#[tokio::test(start_paused = true)]
async fn calls_in_flight_during_a_requested_reconnect_get_their_fate() {
    let fleet = Fleet::start().await;
    let id =
        fleet.online(Server::remote("a").script(SimScript { call_delay: seconds(5.0), ..SimScript::default() })).await;
    let (plain, read_only, outcome) = futures::join!(
        fleet.call(&id, "echo", json!({"text": 1})),
        fleet.call(&id, "add", json!({"a": 1, "b": 2})),
        async {
            sleep(seconds(1.0)).await;
            fleet.runtime.reconnect(&id).await.unwrap()
        }
    );
    assert!(outcome.success);
    assert!(matches!(plain, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{plain:?}");
    assert_eq!(read_only.unwrap()["structuredContent"]["result"], 3, "repeated on the new connection");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_requested_reconnect_tries_at_once_and_restarts_the_delays() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    lose_connection(&fleet, &id).await;
    until_attempts(&remote, 7).await;
    fleet.until_view(&id, |view| view.attempt == Some(7)).await;
    let outcome = fleet.runtime.reconnect(&id).await.unwrap();
    assert_eq!((outcome.success, outcome.status), (false, Status::Offline));
    assert_eq!(outcome.status_message.as_deref(), Some("Server unreachable: connection refused"));
    assert_eq!(fleet.view(&id).attempt, Some(1));
    until_attempts(&remote, 11).await;
    assert_eq!(waits(&remote)[7..], [1.0, 2.0, 4.0]);
    remote.bring_up();
    let outcome = fleet.runtime.reconnect(&id).await.unwrap();
    assert_eq!((outcome.success, outcome.status), (true, Status::Online));
    assert_eq!(remote.attempts().len(), 12);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_request_during_an_attempt_returns_the_outcome_of_that_attempt() {
    let fleet = Fleet::start().await;
    let (first, again) = (Server::remote("a"), fleet.online(Server::remote("b")).await);
    fleet.remote(&first.spec.id).change(|behavior| behavior.connect_delay = seconds(5.0));
    let first = fleet.add(first).await;
    lose_connection(&fleet, &again).await;
    fleet.remote(&again).change(|behavior| (behavior.down, behavior.connect_delay) = (None, seconds(5.0)));
    for (id, attempts) in [(&first, 1), (&again, 3)] {
        let remote = fleet.remote(id);
        until_attempting(&remote).await;
        let (one, other) = futures::join!(fleet.runtime.reconnect(id), fleet.runtime.reconnect(id));
        assert_eq!((one.unwrap().success, other.unwrap().success), (true, true));
        assert_eq!((remote.attempts().len(), remote.overlaps()), (attempts, 0), "{id}");
        until_reconnected(&fleet, id).await;
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_request_retries_exhausted_and_rejected_connections() {
    let fleet = Fleet::start().await;
    let bounded = ReconnectPolicy { jitter_percent: 0, ..ReconnectPolicy::bounded() };
    let given_up = fleet.online(Server::remote("a").policy(|policy| policy.reconnect = bounded)).await;
    let refused = fleet.online(Server::remote("b")).await;
    lose_connection(&fleet, &given_up).await;
    fleet.until(&given_up, Status::Error).await;
    let outcome = fleet.runtime.reconnect(&given_up).await.unwrap();
    assert_eq!((outcome.success, outcome.status), (false, Status::Offline), "it has five attempts again");
    fleet.until(&given_up, Status::Error).await;
    let remote = fleet.remote(&given_up);
    assert_eq!(waits(&remote)[6..], [1.0, 2.0, 4.0, 8.0, 16.0]);

    fleet.remote(&refused).take_down(UNAUTHORIZED);
    assert!(fleet.call(&refused, "echo", json!({})).await.is_err());
    fleet.until(&refused, Status::RequiresReauth).await;
    let outcome = fleet.runtime.reconnect(&refused).await.unwrap();
    assert_eq!(
        (outcome.success, outcome.status),
        (false, Status::RequiresReauth),
        "the credentials are still rejected"
    );
    for id in [&given_up, &refused] {
        fleet.remote(id).bring_up();
        assert!(fleet.runtime.reconnect(id).await.unwrap().success);
        until_reconnected(&fleet, id).await;
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_request_replaces_a_connection_without_readable_tools() {
    let fleet = Fleet::start().await;
    let server = Server::remote("a").script(SimScript { list_error: true, ..SimScript::default() });
    let id = fleet.add(server).await;
    fleet.until(&id, Status::Error).await;
    let outcome = fleet.runtime.reconnect(&id).await.unwrap();
    assert_eq!(
        (outcome.success, outcome.status),
        (false, Status::Error),
        "connected, but the tools are still unreadable"
    );
    let remote = fleet.remote(&id);
    assert_eq!((remote.sessions().opened, remote.sessions().closed), (2, 1));
    remote.change(|behavior| behavior.script = Some(SimScript::default().into()));
    assert!(fleet.runtime.reconnect(&id).await.unwrap().success);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_request_starts_a_stopped_server_and_restarts_a_process() {
    let fleet = Fleet::start().await;
    let stopped = fleet.online(Server::remote("a")).await;
    fleet.runtime.stop(&stopped).await.unwrap();
    let outcome = fleet.runtime.reconnect(&stopped).await.unwrap();
    assert_eq!((outcome.success, fleet.view(&stopped).requested_state), (true, RequestedState::Running));

    let unconfigured = fleet.add(Server::remote("b").missing("Authorization")).await;
    let refused = fleet.runtime.reconnect(&unconfigured).await;
    assert!(matches!(refused, Err(ControlError::Refused { .. })), "{refused:?}");
    let unknown = InstanceId::new("acme".into(), "alice".into(), "unknown".into());
    assert_eq!(fleet.runtime.reconnect(&unknown).await, Err(ControlError::NotFound));

    let process = fleet.online(Server::new("c")).await;
    let pid = fleet.pid(&process);
    let outcome = fleet.runtime.reconnect(&process).await.unwrap();
    assert_eq!((outcome.success, outcome.status), (true, Status::Online), "a process is restarted");
    assert_ne!(fleet.pid(&process), pid);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn two_reconnect_requests_during_a_close_open_one_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    let remote = fleet.remote(&id);
    remote.change(|behavior| behavior.silent_on = ["DELETE"].into());
    let began = Instant::now();
    let (one, other) = futures::join!(fleet.runtime.reconnect(&id), async {
        until_seen(&remote, |remote| !remote.received_at("DELETE").is_empty()).await;
        fleet.runtime.reconnect(&id).await
    });
    assert_eq!((one.unwrap().success, other.unwrap().success), (true, true));
    assert_eq!(tenths(began.elapsed()), 2.0, "longer or shorter than the close timeout");
    assert_eq!(remote.attempts().len(), 2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_request_ends_when_the_instance_is_removed_or_stopped() {
    let fleet = Fleet::start().await;
    for remove in [true, false] {
        let id = fleet.online(Server::remote(if remove { "a" } else { "b" })).await;
        let remote = fleet.remote(&id);
        remote.change(|behavior| behavior.silent_on = ["initialize"].into());
        let (outcome, ()) = futures::join!(fleet.runtime.reconnect(&id), async {
            until_attempting(&remote).await;
            if remove {
                fleet.runtime.uninstall(&id).await.unwrap();
            } else {
                fleet.runtime.stop(&id).await.unwrap();
            }
        });
        match outcome {
            Err(ControlError::Superseded) => assert!(remove),
            Ok(outcome) => assert_eq!((remove, outcome.success, outcome.status), (false, false, Status::Offline)),
            other => panic!("{other:?}"),
        }
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_a_remote_server_opens_a_new_connection() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::remote("a")).await;
    fleet.runtime.restart(&id).await.unwrap();
    let remote = fleet.remote(&id);
    until_attempts(&remote, 2).await;
    until_reconnected(&fleet, &id).await;
    assert_eq!(remote.sessions().closed, 1);
    remote.kill(REFUSED);
    remote.report_session_lost(REFUSED);
    fleet.until_view(&id, waits_for_next_attempt).await;
    fleet.finish().await;
}
