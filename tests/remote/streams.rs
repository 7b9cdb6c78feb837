//! The stream on which a server speaks unasked is how its end is noticed when nobody calls.

use mcp_satellite_actors::model::status::Status;

use super::peer::{Deed, Peer, When};
use super::support::{Fleet, Instance, Remote};

/// Online, and listened to.
async fn listened_to(fleet: &Fleet, peer: &Peer, remote: Remote) -> Instance {
    let instance = fleet.online(remote).await;
    peer.until("it is listened to", |seen| seen.streams == 1).await;
    instance
}

#[tokio::test]
async fn a_server_that_goes_is_missed_without_any_call() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let instance = listened_to(&fleet, &peer, remote).await;
        peer.close().await;
        instance.status(Status::Offline).await;
        assert_eq!(peer.seen(|seen| seen.rpc("tools/call")), 0);
        let story = instance.story().await;
        assert_eq!(story[story.len() - 3..], ["disconnected", "offline", "reconnecting (1 in 1800000 ms)"]);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_stream_that_a_server_ends_is_opened_again_and_nothing_is_lost() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = listened_to(&fleet, &peer, Remote::http(peer.url())).await;
    peer.end_streams();
    peer.until("it is listened to again", |seen| seen.http("GET") == 2 && seen.streams == 1).await;
    instance.assert_callable().await;
    peer.seen(|seen| assert_eq!(seen.rpc("initialize"), 1));
    assert_eq!(instance.story().await.last().unwrap(), "started (http, 3 tools)", "nothing more is told");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_session_that_was_forgotten_is_missed_by_who_listens() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = listened_to(&fleet, &peer, Remote::http(peer.url()).persistent()).await;
    peer.forget_sessions();
    peer.end_streams();
    instance.until("lost", |view| view.status == Status::Offline).await;
    instance.online().await;
    peer.until("it is listened to again", |seen| seen.streams == 1).await;
    assert_eq!((peer.sessions(), peer.seen(|seen| seen.rpc("tools/call"))), (1, 0));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_server_without_a_stream_is_asked_for_one_once() {
    for status in [405, 404, 400, 501] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        peer.on(When::http("GET"), Deed::status(status));
        let instance = fleet.online(Remote::http(peer.url())).await;
        peer.until("it was asked", |seen| seen.http("GET") == 1).await;
        for _ in 0..10 {
            instance.assert_callable().await;
        }
        // A server that fails may have a stream later, and is asked again later.
        peer.seen(|seen| assert_eq!((seen.http("GET"), seen.rpc("initialize")), (1, 1), "{status}"));
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_call_in_flight_when_its_server_dies_learns_its_fate_and_one_that_only_reads_is_repeated() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = listened_to(&fleet, &peer, Remote::http(peer.url())).await;
    let dies = async {
        peer.until("it is in flight", |seen| seen.calls("sleep") == 1).await;
        peer.close().await;
    };
    let (answer, ()) = tokio::join!(instance.call("sleep"), dies);
    assert_eq!(answer.unwrap_err().fate(), Some(mcp_satellite_actors::model::exit::CallFate::MaybeExecuted));
    peer.heal().await;
    instance.assert_callable().await;
    peer.seen(|seen| assert_eq!(seen.calls("sleep"), 1, "nothing is sent twice"));
    fleet.finish(&[&peer]).await;
}
