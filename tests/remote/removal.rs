//! Removing an instance or ending the satellite, in any phase of the instance, leaves no connection, no session and no
//! attempt.

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{ControlError, UninstallOutcome};
use testkit::wait::with_limit;

use super::peer::{Action, Peer, When};
use super::support::{Fleet, Instance, Remote};

/// The phases of an instance.
#[derive(Debug, Clone, Copy)]
enum Phase {
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

const ALL: [Phase; 10] = [
    Phase::Connecting,
    Phase::Discovering,
    Phase::Online,
    Phase::InACall,
    Phase::Reconnecting,
    Phase::InAnAttempt,
    Phase::Rediscovering,
    Phase::Reauth,
    Phase::Error,
    Phase::Stopped,
];

async fn bring_to(fleet: &Fleet, peer: &Peer, legacy: bool, phase: Phase) -> Instance {
    let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
    let first = if legacy { When::path("/sse") } else { When::rpc("initialize") };
    let stream_open = peer.until("the stream is open", |log| log.streams == 1);
    match phase {
        Phase::Connecting => {
            peer.on(first, Action::Silence);
            let instance = fleet.install(remote).await;
            peer.until("the first request is received", |log| log.requests.len() == 1).await;
            instance
        }
        Phase::Discovering => {
            peer.on(When::rpc("tools/list"), Action::Silence);
            let instance = fleet.install(remote).await;
            peer.until("tools/list is received", |log| log.rpc("tools/list") == 1).await;
            instance.status(Status::DiscoveringTools).await;
            instance
        }
        Phase::Online => {
            let instance = fleet.online(remote).await;
            stream_open.await;
            instance
        }
        Phase::InACall => {
            let instance = fleet.online(remote).await;
            stream_open.await;
            let calling = instance.clone();
            tokio::spawn(async move { calling.call("sleep").await });
            peer.until("a call is in flight", |log| log.calls("sleep") == 1).await;
            instance
        }
        Phase::Reconnecting => {
            let instance = fleet.online(remote).await;
            stream_open.await;
            peer.close().await;
            instance.status(Status::Offline).await;
            peer.restart().await;
            instance
        }
        Phase::InAnAttempt | Phase::Rediscovering => {
            let instance = fleet.online(remote).await;
            stream_open.await;
            peer.close().await;
            instance.status(Status::Offline).await;
            peer.restart().await;
            let since = peer.log(|log| log.requests.len());
            if let Phase::InAnAttempt = phase {
                peer.on(first, Action::Silence);
            } else {
                peer.on(When::rpc("tools/list"), Action::Silence);
            }
            let calling = instance.clone();
            tokio::spawn(async move {
                // An attempt may use an old connection that is not known to be closed yet.
                while let Err(CallError::Reconnecting { .. }) = calling.call("echo").await {}
            });
            if let Phase::InAnAttempt = phase {
                peer.until("an attempt is received", |log| log.requests.len() > since).await;
            } else {
                peer.until("tools/list is received again", |log| log.rpc("tools/list") == 2).await;
            }
            instance
        }
        Phase::Reauth | Phase::Error => {
            let (action, status) = match phase {
                Phase::Reauth => (Action::status(401), Status::RequiresReauth),
                _ => (Action::html(), Status::Error),
            };
            peer.on(first, action);
            let instance = fleet.install(remote).await;
            instance.status(status).await;
            instance
        }
        Phase::Stopped => {
            let instance = fleet.online(remote).await;
            instance.runtime.stop(&instance.id).await.unwrap();
            instance
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removing_an_instance_in_any_phase_leaves_no_session() {
    for legacy in [false, true] {
        for phase in ALL {
            let (fleet, peer) = (Fleet::start().await, Peer::start().await);
            let instance = bring_to(&fleet, &peer, legacy, phase).await;
            let removed = with_limit("the removal", instance.runtime.uninstall(&instance.id)).await;
            let active = !matches!(phase, Phase::Reconnecting | Phase::Reauth | Phase::Error | Phase::Stopped);
            assert_eq!(removed, Ok(UninstallOutcome { active, dormant: false }), "{phase:?}");
            assert!(instance.runtime.status(&instance.id).is_none(), "{phase:?}");
            assert_nothing_is_left(&peer, phase).await;
            let timeline = instance.timeline().await;
            assert!(
                timeline.ends_with(&["disconnected as asked".into(), "mcp.server.stopped".into()]),
                "{phase:?}: {timeline:?}"
            );
            assert_eq!(instance.runtime.reconnect(&instance.id).await, Err(ControlError::NotFound));
            fleet.finish(&[&peer]).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_in_any_phase_leaves_no_session() {
    for legacy in [false, true] {
        for phase in ALL {
            let (fleet, peer) = (Fleet::start().await, Peer::start().await);
            let _instance = bring_to(&fleet, &peer, legacy, phase).await;
            fleet.finish(&[&peer]).await;
            assert_nothing_is_left(&peer, phase).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_satellite_leaves_no_connection() {
    for phase in [Phase::Connecting, Phase::Online, Phase::InACall, Phase::InAnAttempt] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let instance = bring_to(&fleet, &peer, false, phase).await;
        instance.runtime.kill();
        drop((instance, fleet));
        peer.until("all connections are closed", |log| log.connections == 0).await;
    }
}

/// Asserts that no stream, no handshake and no session is left.
async fn assert_nothing_is_left(peer: &Peer, phase: Phase) {
    peer.until("no stream and no handshake is open", |log| log.streams == 0 && log.initializing == 0).await;
    assert_eq!(peer.sessions(), 0, "{phase:?}: a session was not ended");
}
