//! The command reconnect, in every state of the connection.

use std::time::Duration;

use mcp_satellite_actors::model::exit::CallFate;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{ControlError, ReconnectOutcome};
use testkit::wait::with_limit;

use super::peer::{Action, Peer, When};
use super::support::{Fleet, Instance, Remote};

async fn reconnect(instance: &Instance) -> ReconnectOutcome {
    with_limit("the reconnect", instance.runtime.reconnect(&instance.id)).await.unwrap()
}

fn success() -> ReconnectOutcome {
    ReconnectOutcome { success: true, status: Status::Online, status_message: None }
}

#[tokio::test]
async fn a_reconnect_closes_a_healthy_connection_cleanly_over_both_transports() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let instance = fleet.online(remote).await;
        peer.until("the stream is open", |log| log.streams == 1).await;
        let before = instance.timeline().await.len();

        assert_eq!(reconnect(&instance).await, success());
        instance.assert_callable().await;
        peer.until("the stream is open again", |log| log.streams == 1).await;
        assert_eq!(peer.sessions(), 1, "the old session was not ended");
        peer.log(|log| {
            assert_eq!(log.rpc("initialize"), 2);
            let deleted = log.requests.iter().filter(|record| record.http == "DELETE");
            let deleted: Vec<_> = deleted.map(|record| record.session.as_deref()).collect();
            assert_eq!(deleted, if legacy { vec![] } else { vec![Some("session-1")] });
        });
        let events = instance.timeline().await[before..].join(", ");
        assert!(events.contains("disconnected as asked"), "{events}");
        assert!(events.ends_with("online, reconnected (1)"), "{events}");
        assert!(!events.contains("reconnecting"), "it waited before it reconnected: {events}");
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn health_checks_continue_after_a_reconnect() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let often = |remote: Remote| remote.policy(|policy| policy.health.interval = Duration::from_millis(20));
    let instance = fleet.online(often(Remote::http(peer.url()))).await;
    assert_eq!(reconnect(&instance).await, success());
    let pings = peer.log(|log| log.rpc("ping"));
    peer.until("pings are received", |log| log.rpc("ping") > pings + 1).await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_reconnect_of_a_lost_instance_returns_its_outcome_at_once() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.close().await;
    instance.status(Status::Offline).await;

    let failed = reconnect(&instance).await;
    let message = Some("Server unreachable: connection refused".to_owned());
    assert_eq!(failed, ReconnectOutcome { success: false, status: Status::Offline, status_message: message });
    assert_eq!(instance.view().attempt, Some(1), "the backoff did not start again");

    peer.heal().await;
    assert_eq!(reconnect(&instance).await, success());
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_reconnect_of_a_rejected_instance_tries_its_credentials_again() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.configure(|behavior| behavior.required_authorization = Some("Bearer right"));
    let instance = fleet.install(Remote::http(peer.url()).header("authorization", "Bearer wrong")).await;
    instance.status(Status::RequiresReauth).await;
    let failed = reconnect(&instance).await;
    assert_eq!((failed.success, failed.status), (false, Status::RequiresReauth));
    assert_eq!(peer.log(|log| log.rpc("initialize")), 2);
    peer.configure(|behavior| behavior.required_authorization = Some("Bearer wrong"));
    assert_eq!(reconnect(&instance).await, success());
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn reconnects_of_a_connecting_instance_start_no_second_attempt() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.configure(|behavior| behavior.tools.truncate(1));
    peer.freeze();
    let instance = fleet.install(Remote::http(peer.url())).await;
    peer.until("a connection is made", |log| log.connections_made == 1).await;
    let thaw = async { peer.thaw() };
    let (first, second, ()) = tokio::join!(reconnect(&instance), reconnect(&instance), thaw);
    assert_eq!([first, second], [success(), success()]);
    assert_eq!(peer.log(|log| log.rpc("initialize")), 1);
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_reconnect_starts_a_stopped_instance_and_rejects_an_unknown_one() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    instance.runtime.stop(&instance.id).await.unwrap();
    assert_eq!(peer.sessions(), 0);
    assert_eq!(reconnect(&instance).await, success());
    instance.assert_callable().await;
    let unknown = InstanceId::new("team_acme".into(), "user_alice".into(), "nobody".into());
    assert_eq!(instance.runtime.reconnect(&unknown).await, Err(ControlError::NotFound));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_reconnect_fails_a_call_in_flight_as_maybe_executed() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    let forced = async {
        peer.until("the call is in flight", |log| log.calls("sleep") == 1).await;
        reconnect(&instance).await
    };
    let (answer, forced) = tokio::join!(instance.call("sleep"), forced);
    assert_eq!((answer.unwrap_err().fate(), forced), (Some(CallFate::MaybeExecuted), success()));
    assert_eq!(peer.log(|log| log.calls("sleep")), 1, "the call was sent twice");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_reconnect_succeeds_although_the_session_end_is_not_confirmed() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let quick = |remote: Remote| remote.policy(|policy| policy.remote.close_timeout = Duration::from_millis(50));
    let instance = fleet.online(quick(Remote::http(peer.url()))).await;
    for action in [Action::Silence, Action::status(500), Action::status(405), Action::HangUp] {
        peer.on_next(1, When::http("DELETE"), action);
        assert_eq!(reconnect(&instance).await, success());
        instance.assert_callable().await;
    }
    fleet.finish(&[&peer]).await;
}
