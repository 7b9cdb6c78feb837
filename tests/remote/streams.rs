//! The stream of server messages: its end shows that the server has gone, without a call.

use mcp_satellite_actors::model::status::Status;

use super::peer::{Action, Peer, When};
use super::support::{Fleet, Instance, Remote};

/// Installs an instance and waits until it is online with an open stream.
async fn online_with_stream(fleet: &Fleet, peer: &Peer, remote: Remote) -> Instance {
    let instance = fleet.online(remote).await;
    peer.until("the stream is open", |log| log.streams == 1).await;
    instance
}

#[tokio::test]
async fn the_end_of_a_server_is_noticed_without_a_call() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let instance = online_with_stream(&fleet, &peer, remote).await;
        peer.close().await;
        instance.status(Status::Offline).await;
        assert_eq!(peer.log(|log| log.rpc("tools/call")), 0);
        let timeline = instance.timeline().await;
        assert_eq!(timeline[timeline.len() - 3..], ["disconnected", "offline", "reconnecting (1 in 1800000 ms)"]);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_stream_that_the_server_ends_is_reopened_in_the_same_session() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = online_with_stream(&fleet, &peer, Remote::http(peer.url())).await;
    peer.end_streams();
    peer.until("the stream is open again", |log| log.http("GET") == 2 && log.streams == 1).await;
    instance.assert_callable().await;
    peer.log(|log| assert_eq!(log.rpc("initialize"), 1));
    assert_eq!(instance.timeline().await.last().unwrap(), "started (http, 3 tools)", "the new stream caused an event");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn the_open_stream_notices_an_expired_session() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = online_with_stream(&fleet, &peer, Remote::http(peer.url()).persistent()).await;
    peer.forget_sessions();
    peer.end_streams();
    instance.until("lost", |view| view.status == Status::Offline).await;
    instance.online().await;
    peer.until("the stream is open again", |log| log.streams == 1).await;
    assert_eq!((peer.sessions(), peer.log(|log| log.rpc("tools/call"))), (1, 0));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_stream_is_requested_once_from_a_server_without_streams() {
    for status in [405, 404, 400, 501] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        peer.on(When::http("GET"), Action::status(status));
        let instance = fleet.online(Remote::http(peer.url())).await;
        peer.until("a stream is requested", |log| log.http("GET") == 1).await;
        for _ in 0..10 {
            instance.assert_callable().await;
        }
        // A server that fails with 5xx may have a stream later; the satellite requests it again after a delay.
        peer.log(|log| assert_eq!((log.http("GET"), log.rpc("initialize")), (1, 1), "{status}"));
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_call_in_flight_when_its_server_dies_is_maybe_executed() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = online_with_stream(&fleet, &peer, Remote::http(peer.url())).await;
    let dies = async {
        peer.until("the call is in flight", |log| log.calls("sleep") == 1).await;
        peer.close().await;
    };
    let (answer, ()) = tokio::join!(instance.call("sleep"), dies);
    assert_eq!(answer.unwrap_err().fate(), Some(mcp_satellite_actors::model::exit::CallFate::MaybeExecuted));
    peer.heal().await;
    instance.assert_callable().await;
    peer.log(|log| assert_eq!(log.calls("sleep"), 1, "the call was sent twice"));
    fleet.finish(&[&peer]).await;
}
