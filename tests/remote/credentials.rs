//! Who is let in, with what, and where credentials go.

use mcp_satellite_actors::InstallOutcome;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;

use super::peer::{Deed, Peer, Record, When};
use super::support::{Fleet, Remote};

#[tokio::test]
async fn other_credentials_are_used_at_once_and_nothing_is_connected_anew() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = Remote::http(peer.url()).header("authorization", "Bearer first").query("key", "first");
    let instance = fleet.online(remote.clone()).await;
    peer.until("it is listened to", |seen| seen.streams == 1).await;
    let before = instance.story().await;

    peer.manners(|manners| manners.lets_in = Some("Bearer second"));
    let changed = remote.header("authorization", "Bearer second").query("key", "second");
    assert_eq!(instance.update(&changed).await, InstallOutcome::Updated);
    instance.assert_callable().await;
    peer.seen(|seen| {
        let of = |record: &Record| (record.header("authorization").map(str::to_owned), record.query.clone());
        let first = (Some("Bearer first".to_owned()), Some("key=first".to_owned()));
        let second = (Some("Bearer second".to_owned()), Some("key=second".to_owned()));
        let (last, rest) = seen.requests.split_last().unwrap();
        assert_eq!(of(last), second);
        assert!(rest.iter().all(|record| of(record) == first), "each request says who asks");
        assert_eq!((seen.rpc("initialize"), seen.streams), (1, 1));
    });
    assert_eq!(instance.story().await, before, "nothing is told");
    fleet.finish(&[&peer]).await;
    peer.seen(|seen| {
        let delete = seen.requests.iter().find(|record| record.http == "DELETE").unwrap();
        assert_eq!(delete.header("authorization"), Some("Bearer second"));
    });
    assert_eq!(peer.sessions(), 0);
}

#[tokio::test]
async fn an_instance_that_is_not_let_in_waits_for_other_credentials_and_then_moves_on_by_itself() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        peer.manners(|manners| manners.lets_in = Some("Bearer right"));
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
        peer.seen(|seen| assert_eq!(seen.requests.len(), 1, "it asks once, and nobody else asks"));

        // Others, and wrong again.
        instance.update(&remote.clone().header("authorization", "Bearer wronger")).await;
        peer.until("they were tried", |seen| seen.requests.len() == 2).await;
        instance.status(Status::RequiresReauth).await;

        instance.update(&remote.header("authorization", "Bearer right")).await;
        instance.online().await;
        instance.assert_callable().await;
        let told = instance.story().await.join(", ");
        let told = told.strip_prefix("provisioning, command_received, connecting, requires_reauth, connecting, ");
        let expected = "requires_reauth, connecting, discovering_tools, syncing_tools, discovered 3 tools, \
                        online, started (TRANSPORT, 3 tools)";
        assert_eq!(told, Some(&*expected.replace("TRANSPORT", if legacy { "sse" } else { "http" })));
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn credentials_that_expire_under_a_connected_instance_are_replaced_without_a_person() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.manners(|manners| manners.lets_in = Some("Bearer first"));
    let remote = Remote::http(peer.url());
    let instance = fleet.online(remote.clone().header("authorization", "Bearer first")).await;
    peer.manners(|manners| manners.lets_in = Some("Bearer second"));
    let refused = instance.call("read").await;
    assert!(matches!(refused, Err(CallError::Refused { status: Status::RequiresReauth, .. })), "{refused:?}");
    instance.status(Status::RequiresReauth).await;
    peer.seen(|seen| assert_eq!(seen.calls("read"), 1, "it is not tried with the same again"));
    instance.update(&remote.header("authorization", "Bearer second")).await;
    instance.online().await;
    instance.assert_callable().await;
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn credentials_go_to_the_configured_origin_and_to_no_other() {
    let (fleet, peer, elsewhere) = (Fleet::start().await, Peer::start().await, Peer::start().await);
    let with = |remote: Remote| remote.header("authorization", "Bearer of the first").query("key", "of the first");

    peer.on(When::path("/sse"), Deed::Endpoint(format!("{}/message?session=session-1", elsewhere.origin())));
    let foreign = fleet.install(with(Remote::sse(peer.sse_url()))).await;
    let view = foreign.status(Status::Error).await;
    assert!(view.message.as_ref().unwrap().contains("another origin"), "{:?}", view.message);

    peer.on(When::any(), Deed::status_with(307, "location", &elsewhere.url()));
    let redirected = fleet.install(with(Remote::http(peer.url()))).await;
    let view = redirected.status(Status::Error).await;
    assert!(view.message.as_ref().unwrap().contains(&elsewhere.origin()), "{:?}", view.message);

    fleet.finish(&[&peer, &elsewhere]).await;
    elsewhere.seen(|seen| assert_eq!(seen.connections_made, 0, "nobody has even knocked"));
}

#[tokio::test]
async fn headers_that_are_the_protocols_own_are_not_for_an_instance_to_set() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let remote = Remote::http(peer.url()).header("Mcp-Session-Id", "mine").header("Host", "elsewhere").header("X", "y");
    let instance = fleet.online(remote).await;
    instance.assert_callable().await;
    peer.seen(|seen| {
        let call = seen.requests.last().unwrap();
        assert_eq!((call.session.as_deref(), call.header("x")), (Some("session-1"), Some("y")));
        assert_eq!(call.header("host"), Some(peer.origin().strip_prefix("http://").unwrap()));
        assert_eq!(call.header("mcp-protocol-version"), Some("2025-11-25"));
    });
    fleet.finish(&[&peer]).await;
}
