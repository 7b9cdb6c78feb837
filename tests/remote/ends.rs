//! Whatever an instance is at, when it is removed or its satellite ends nothing of it is left: no connection, no session,
//! no attempt.

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{ControlError, UninstallOutcome};

use super::peer::{Deed, Peer, When};
use super::support::{Fleet, Instance, Remote, soon};

/// What it is at.
#[derive(Debug, Clone, Copy)]
enum At {
    Connecting,
    Discovering,
    Online,
    InACall,
    Reconnecting,
    InAnAttempt,
    Rediscovering,
    Reauth,
    Error,
    Stopped,
}

const ALL: [At; 10] = [
    At::Connecting,
    At::Discovering,
    At::Online,
    At::InACall,
    At::Reconnecting,
    At::InAnAttempt,
    At::Rediscovering,
    At::Reauth,
    At::Error,
    At::Stopped,
];

/// Brings an instance there.
async fn bring(fleet: &Fleet, peer: &Peer, legacy: bool, at: At) -> Instance {
    let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
    let first = if legacy { When::path("/sse") } else { When::rpc("initialize") };
    let listened_to = peer.until("it is listened to", |seen| seen.streams == 1);
    match at {
        At::Connecting => {
            peer.on(first, Deed::Silence);
            let instance = fleet.install(remote).await;
            peer.until("it is being connected", |seen| seen.requests.len() == 1).await;
            instance
        }
        At::Discovering => {
            peer.on(When::rpc("tools/list"), Deed::Silence);
            let instance = fleet.install(remote).await;
            peer.until("its tools are asked for", |seen| seen.rpc("tools/list") == 1).await;
            instance.status(Status::DiscoveringTools).await;
            instance
        }
        At::Online => {
            let instance = fleet.online(remote).await;
            listened_to.await;
            instance
        }
        At::InACall => {
            let instance = fleet.online(remote).await;
            listened_to.await;
            let calling = instance.clone();
            tokio::spawn(async move { calling.call("sleep").await });
            peer.until("a call is in flight", |seen| seen.calls("sleep") == 1).await;
            instance
        }
        At::Reconnecting => {
            let instance = fleet.online(remote).await;
            listened_to.await;
            peer.close().await;
            instance.status(Status::Offline).await;
            peer.restart().await;
            instance
        }
        At::InAnAttempt | At::Rediscovering => {
            let instance = fleet.online(remote).await;
            listened_to.await;
            peer.close().await;
            instance.status(Status::Offline).await;
            peer.restart().await;
            let since = peer.seen(|seen| seen.requests.len());
            if let At::InAnAttempt = at {
                peer.on(first, Deed::Silence);
            } else {
                peer.on(When::rpc("tools/list"), Deed::Silence);
            }
            let calling = instance.clone();
            tokio::spawn(async move {
                // An attempt may go out on a connection of before that is not known to be closed yet.
                while let Err(CallError::Reconnecting { .. }) = calling.call("echo").await {}
            });
            if let At::InAnAttempt = at {
                peer.until("an attempt is made", |seen| seen.requests.len() > since).await;
            } else {
                peer.until("its tools are asked for again", |seen| seen.rpc("tools/list") == 2).await;
            }
            instance
        }
        At::Reauth | At::Error => {
            let (deed, status) = match at {
                At::Reauth => (Deed::status(401), Status::RequiresReauth),
                _ => (Deed::html(), Status::Error),
            };
            peer.on(first, deed);
            let instance = fleet.install(remote).await;
            instance.status(status).await;
            instance
        }
        At::Stopped => {
            let instance = fleet.online(remote).await;
            instance.runtime.stop(&instance.id).await.unwrap();
            instance
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_of_an_instance_that_is_removed_whatever_it_is_at() {
    for legacy in [false, true] {
        for at in ALL {
            let (fleet, peer) = (Fleet::start().await, Peer::start().await);
            let instance = bring(&fleet, &peer, legacy, at).await;
            let removed = soon("the removal", instance.runtime.uninstall(&instance.id)).await;
            let active = !matches!(at, At::Reconnecting | At::Reauth | At::Error | At::Stopped);
            assert_eq!(removed, Ok(UninstallOutcome { active, dormant: false }), "{at:?}");
            assert!(instance.runtime.status(&instance.id).is_none(), "{at:?}");
            nothing_is_left(&peer, at).await;
            let story = instance.story().await;
            assert!(
                story.ends_with(&["disconnected as asked".into(), "mcp.server.stopped".into()]),
                "{at:?}: {story:?}"
            );
            assert_eq!(instance.runtime.reconnect(&instance.id).await, Err(ControlError::NotFound));
            fleet.finish(&[&peer]).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_of_an_instance_whose_satellite_ends_whatever_it_is_at() {
    for legacy in [false, true] {
        for at in ALL {
            let (fleet, peer) = (Fleet::start().await, Peer::start().await);
            let _instance = bring(&fleet, &peer, legacy, at).await;
            fleet.finish(&[&peer]).await;
            nothing_is_left(&peer, at).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_satellite_that_is_killed_leaves_no_connection() {
    for at in [At::Connecting, At::Online, At::InACall, At::InAnAttempt] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let instance = bring(&fleet, &peer, false, at).await;
        instance.runtime.kill();
        drop((instance, fleet));
        peer.until("nobody is connected any more", |seen| seen.connections == 0).await;
    }
}

/// No stream, no request under way and no session that its instance has known.
async fn nothing_is_left(peer: &Peer, at: At) {
    peer.until("nobody waits or listens", |seen| seen.streams == 0 && seen.initializing == 0).await;
    assert_eq!(peer.sessions(), 0, "{at:?}: a session that nobody ended");
}
