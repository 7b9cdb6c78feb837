//! Credentials: rejection, replacement, and the origins they are sent to.

use mcp_satellite_actors::InstallOutcome;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;

use super::peer::{Action, Peer, Record, When};
use super::support::{Fleet, Remote};

#[tokio::test]
async fn changed_credentials_are_used_at_once_without_a_reconnect() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = Remote::http(peer.url()).header("authorization", "Bearer first").query("key", "first");
    let instance = fleet.online(remote.clone()).await;
    peer.until("the stream is open", |log| log.streams == 1).await;
    let before = instance.timeline().await;

    peer.configure(|behavior| behavior.required_authorization = Some("Bearer second"));
    let changed = remote.header("authorization", "Bearer second").query("key", "second");
    assert_eq!(instance.update(&changed).await, InstallOutcome::Updated);
    instance.assert_callable().await;
    peer.log(|log| {
        let of = |record: &Record| (record.header("authorization").map(str::to_owned), record.query.clone());
        let first = (Some("Bearer first".to_owned()), Some("key=first".to_owned()));
        let second = (Some("Bearer second".to_owned()), Some("key=second".to_owned()));
        let (last, rest) = log.requests.split_last().unwrap();
        assert_eq!(of(last), second);
        assert!(rest.iter().all(|record| of(record) == first), "an earlier request has other credentials");
        assert_eq!((log.rpc("initialize"), log.streams), (1, 1));
    });
    assert_eq!(instance.timeline().await, before, "the update caused an event");
    fleet.finish(&[&peer]).await;
    peer.log(|log| {
        let delete = log.requests.iter().find(|record| record.http == "DELETE").unwrap();
        assert_eq!(delete.header("authorization"), Some("Bearer second"));
    });
    assert_eq!(peer.sessions(), 0);
}

#[tokio::test]
async fn a_rejected_instance_waits_for_other_credentials_and_then_connects() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        peer.configure(|behavior| behavior.required_authorization = Some("Bearer right"));
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) }.persistent();
        let instance = fleet.install(remote.clone().header("authorization", "Bearer wrong")).await;
        instance.status(Status::RequiresReauth).await;
        for _ in 0..5 {
            let refused = instance.call("echo").await;
            let Err(CallError::Refused { status: Status::RequiresReauth, message, remedy: Some(Remedy::Authorize) }) =
                refused
            else {
                panic!("{refused:?}")
            };
            assert!(message.contains("requires_reauth"), "{message}");
        }
        peer.log(|log| assert_eq!(log.requests.len(), 1, "more than one request before the credentials changed"));

        // Other credentials, wrong again.
        instance.update(&remote.clone().header("authorization", "Bearer wronger")).await;
        peer.until("the other credentials are sent", |log| log.requests.len() == 2).await;
        instance.status(Status::RequiresReauth).await;

        instance.update(&remote.header("authorization", "Bearer right")).await;
        instance.online().await;
        instance.assert_callable().await;
        let events = instance.timeline().await.join(", ");
        let events = events.strip_prefix("provisioning, command_received, connecting, requires_reauth, connecting, ");
        let expected = "requires_reauth, connecting, discovering_tools, syncing_tools, discovered 3 tools, \
                        online, started (TRANSPORT, 3 tools)";
        assert_eq!(events, Some(&*expected.replace("TRANSPORT", if legacy { "sse" } else { "http" })));
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn new_credentials_reconnect_an_instance_whose_credentials_expired() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.configure(|behavior| behavior.required_authorization = Some("Bearer first"));
    let remote = Remote::http(peer.url());
    let instance = fleet.online(remote.clone().header("authorization", "Bearer first")).await;
    peer.configure(|behavior| behavior.required_authorization = Some("Bearer second"));
    let refused = instance.call("read").await;
    assert!(matches!(refused, Err(CallError::Refused { status: Status::RequiresReauth, .. })), "{refused:?}");
    instance.status(Status::RequiresReauth).await;
    peer.log(|log| assert_eq!(log.calls("read"), 1, "the call was repeated with the same credentials"));
    instance.update(&remote.header("authorization", "Bearer second")).await;
    instance.online().await;
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn credentials_go_only_to_the_configured_origin() {
    let (fleet, peer, elsewhere) = (Fleet::start().await, Peer::start().await, Peer::start().await);
    let with = |remote: Remote| remote.header("authorization", "Bearer of the first").query("key", "of the first");

    peer.on(When::path("/sse"), Action::Endpoint(format!("{}/message?session=session-1", elsewhere.origin())));
    let foreign = fleet.install(with(Remote::sse(peer.sse_url()))).await;
    let view = foreign.status(Status::Error).await;
    assert!(view.message.as_ref().unwrap().contains("another origin"), "{:?}", view.message);

    peer.on(When::any(), Action::status_with(307, "location", &elsewhere.url()));
    let redirected = fleet.install(with(Remote::http(peer.url()))).await;
    let view = redirected.status(Status::Error).await;
    assert!(view.message.as_ref().unwrap().contains(&elsewhere.origin()), "{:?}", view.message);

    fleet.finish(&[&peer, &elsewhere]).await;
    elsewhere.log(|log| assert_eq!(log.connections_made, 0, "a connection to the other origin was made"));
}

#[tokio::test]
async fn an_instance_cannot_set_headers_of_the_protocol() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = Remote::http(peer.url()).header("Mcp-Session-Id", "mine").header("Host", "elsewhere").header("X", "y");
    let instance = fleet.online(remote).await;
    instance.assert_callable().await;
    peer.log(|log| {
        let call = log.requests.last().unwrap();
        assert_eq!((call.session.as_deref(), call.header("x")), (Some("session-1"), Some("y")));
        assert_eq!(call.header("host"), Some(peer.origin().strip_prefix("http://").unwrap()));
        assert_eq!(call.header("mcp-protocol-version"), Some("2025-11-25"));
    });
    fleet.finish(&[&peer]).await;
}
