//! A person wants a connection made anew, whatever its state.

use std::time::Duration;

use mcp_satellite_actors::model::exit::CallFate;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{ControlError, ReconnectOutcome};

use super::peer::{Deed, Peer, When};
use super::support::{Fleet, Instance, Remote, soon};

async fn reconnect(instance: &Instance) -> ReconnectOutcome {
    soon("the reconnect", instance.runtime.reconnect(&instance.id)).await.unwrap()
}

fn success() -> ReconnectOutcome {
    ReconnectOutcome { success: true, status: Status::Online, status_message: None }
}

#[tokio::test]
async fn a_healthy_connection_is_closed_cleanly_and_made_anew_over_both_transports() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let instance = fleet.online(remote).await;
        peer.until("it is listened to", |seen| seen.streams == 1).await;
        let before = instance.story().await.len();

        assert_eq!(reconnect(&instance).await, success());
        instance.assert_callable().await;
        peer.until("it is listened to again", |seen| seen.streams == 1).await;
        assert_eq!(peer.sessions(), 1, "the old session was ended");
        peer.seen(|seen| {
            assert_eq!(seen.rpc("initialize"), 2);
            let deleted = seen.requests.iter().filter(|record| record.http == "DELETE");
            let deleted: Vec<_> = deleted.map(|record| record.session.as_deref()).collect();
            assert_eq!(deleted, if legacy { vec![] } else { vec![Some("session-1")] });
        });
        let told = instance.story().await[before..].join(", ");
        assert!(told.contains("disconnected as asked"), "{told}");
        assert!(told.ends_with("online, reconnected (1)"), "{told}");
        assert!(!told.contains("reconnecting"), "nothing is waited for: {told}");
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn health_checks_go_on_after_it() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let often = |remote: Remote| remote.policy(|policy| policy.health.interval = Duration::from_millis(20));
    let instance = fleet.online(often(Remote::http(peer.url()))).await;
    assert_eq!(reconnect(&instance).await, success());
    let pings = peer.seen(|seen| seen.rpc("ping"));
    peer.until("it is pinged", |seen| seen.rpc("ping") > pings + 1).await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_lost_instance_is_tried_at_once_and_says_what_came_of_it() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.close().await;
    instance.status(Status::Offline).await;

    let failed = reconnect(&instance).await;
    let message = Some("Server unreachable: connection refused".to_owned());
    assert_eq!(failed, ReconnectOutcome { success: false, status: Status::Offline, status_message: message });
    assert_eq!(instance.view().attempt, Some(1), "the backoff begins anew");

    peer.heal().await;
    assert_eq!(reconnect(&instance).await, success());
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn one_that_is_not_let_in_is_tried_once_more_with_what_it_has() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.manners(|manners| manners.lets_in = Some("Bearer right"));
    let instance = fleet.install(Remote::http(peer.url()).header("authorization", "Bearer wrong")).await;
    instance.status(Status::RequiresReauth).await;
    let failed = reconnect(&instance).await;
    assert_eq!((failed.success, failed.status), (false, Status::RequiresReauth));
    assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 2);
    peer.manners(|manners| manners.lets_in = Some("Bearer wrong"));
    assert_eq!(reconnect(&instance).await, success());
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn one_that_is_being_connected_is_not_connected_twice() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.manners(|manners| manners.tools.truncate(1));
    peer.freeze();
    let instance = fleet.install(Remote::http(peer.url())).await;
    peer.until("it is being connected", |seen| seen.connections_made == 1).await;
    let thaw = async { peer.thaw() };
    let (first, second, ()) = tokio::join!(reconnect(&instance), reconnect(&instance), thaw);
    assert_eq!([first, second], [success(), success()]);
    assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 1);
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn one_that_was_stopped_is_started_and_one_that_is_not_there_is_not_found() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    instance.runtime.stop(&instance.id).await.unwrap();
    assert_eq!(peer.sessions(), 0);
    assert_eq!(reconnect(&instance).await, success());
    instance.assert_callable().await;
    let nobody = InstanceId::new("team_acme".into(), "user_alice".into(), "nobody".into());
    assert_eq!(instance.runtime.reconnect(&nobody).await, Err(ControlError::NotFound));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_call_in_flight_learns_its_fate() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    let forced = async {
        peer.until("it is in flight", |seen| seen.calls("sleep") == 1).await;
        reconnect(&instance).await
    };
    let (answer, forced) = tokio::join!(instance.call("sleep"), forced);
    assert_eq!((answer.unwrap_err().fate(), forced), (Some(CallFate::MaybeExecuted), success()));
    assert_eq!(peer.seen(|seen| seen.calls("sleep")), 1, "nothing is sent twice");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_server_that_does_not_confirm_the_end_of_a_session_holds_nobody_up() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let quick = |remote: Remote| remote.policy(|policy| policy.remote.close_timeout = Duration::from_millis(50));
    let instance = fleet.online(quick(Remote::http(peer.url()))).await;
    for deed in [Deed::Silence, Deed::status(500), Deed::status(405), Deed::HangUp] {
        peer.on_next(1, When::http("DELETE"), deed);
        assert_eq!(reconnect(&instance).await, success());
        instance.assert_callable().await;
    }
    fleet.finish(&[&peer]).await;
}
