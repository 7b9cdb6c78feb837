//! What a server offers: read whole, read again when it changes, and kept while it cannot be read.

use std::time::Duration;

use mcp_satellite_actors::model::catalogue::{Catalogue, CatalogueEntry, ListKind};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;

use super::peer::{Deed, Peer, When};
use super::support::{Fleet, Instance, Remote};

fn catalogue(view: &InstanceView) -> &Catalogue {
    view.catalogue.as_ref().unwrap()
}

fn tools(view: &InstanceView) -> Vec<&str> {
    catalogue(view).tools.iter().map(|tool| &*tool.name).collect()
}

async fn until_tools(instance: &Instance, wanted: &[&str]) {
    let are_there = |view: &InstanceView| view.status == Status::Online && tools(view) == wanted;
    instance.until("offering other tools", are_there).await;
}

#[tokio::test]
async fn resources_templates_and_prompts_are_listed_beside_the_tools_over_both_transports() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let instance = fleet.online(remote).await;
        let view = instance.view();
        let keys = |entries: &[CatalogueEntry]| entries.iter().map(|entry| entry.key.to_string()).collect::<Vec<_>>();
        let Catalogue { resources, resource_templates, prompts, .. } = catalogue(&view);
        assert_eq!(tools(&view), ["echo", "read", "sleep"]);
        assert_eq!(keys(resources), ["peer://one"]);
        assert_eq!(keys(resource_templates), ["peer://{any}"]);
        assert_eq!(keys(prompts), ["greet"]);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn many_changes_at_once_are_read_once() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let debounced = |policy: &mut mcp_satellite_actors::model::policy::Policy| {
            policy.session.list_changed_debounce = Duration::from_millis(200);
        };
        let instance = fleet.online(remote.policy(debounced)).await;
        peer.until("it is listened to", |seen| seen.streams == 1).await;
        assert_eq!(peer.seen(|seen| seen.rpc("tools/list")), 1);

        for (name, readings) in [("second", 2), ("third", 3)] {
            for list in ["tools", "resources", "prompts"].repeat(10) {
                peer.list_changed(list);
            }
            peer.manners(|manners| manners.tools = vec![(name, json!({}))]);
            until_tools(&instance, &[name]).await;
            assert_eq!(peer.seen(|seen| seen.rpc("tools/list")), readings, "thirty changes are one");
        }
        let story = instance.story().await;
        let updates: Vec<_> = story.iter().filter(|line| line.starts_with("updated")).collect();
        assert_eq!(updates, ["updated (+second -echo -read -sleep)", "updated (+third -second)"]);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_list_without_an_end_is_read_so_far_and_no_further() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.manners(|manners| manners.endless_pages = true);
    let instance = fleet.online(Remote::http(peer.url()).policy(|policy| policy.session.list_pages_max = 5)).await;
    assert_eq!(peer.seen(|seen| seen.rpc("tools/list")), 5);
    assert_eq!(tools(&instance.view()).len(), 15);
    assert_eq!(tools(&instance.view())[14], "sleep-4");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn tools_that_cannot_be_read_again_are_kept_and_calls_go_on() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.on(When::rpc("tools/list"), Deed::RpcError { code: -32603, message: "the database is away" });
    peer.restart().await;
    instance.status(Status::Offline).await;
    instance.assert_callable().await;
    let view = instance.status(Status::Error).await;
    let message = view.message.as_deref().unwrap_or_default();
    assert!(
        message.starts_with("cannot read the server's tools: server error -32603: the database is away"),
        "{message}"
    );
    assert_eq!(tools(&view), ["echo", "read", "sleep"], "what was known is kept");
    assert!(view.offered_catalogue().is_none(), "and not offered");

    // A call that succeeds brings the next reading forward, which an hour of backoff does not.
    peer.heal().await;
    instance.assert_callable().await;
    instance.online().await;
    assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 2, "the link was kept");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_server_without_tools_is_a_server() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.on(When::rpc("tools/list"), Deed::RpcError { code: -32601, message: "Method not found" });
    peer.on(When::rpc("prompts/list"), Deed::RpcError { code: -32603, message: "no" });
    let instance = fleet.online(Remote::http(peer.url())).await;
    let view = instance.view();
    let Catalogue { tools, resources, prompts, .. } = catalogue(&view);
    assert_eq!((tools.len(), resources.len(), prompts.len()), (0, 1, 0));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn what_a_server_has_beside_its_tools_cannot_cost_it_its_connection() {
    // Some servers answer the way of a web server where they do not know a method; that is what they say of a session, too.
    for deed in [Deed::status(418), Deed::html(), Deed::status(302), Deed::status(404), Deed::status(400)] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        peer.on(When::rpc("resources/list"), deed.clone());
        peer.on(When::rpc("resources/templates/list"), deed);
        let instance = fleet.online(Remote::http(peer.url())).await;
        let view = instance.view();
        let Catalogue { tools, resources, prompts, .. } = catalogue(&view);
        assert_eq!((tools.len(), resources.len(), prompts.len()), (3, 0, 1));
        instance.assert_callable().await;
        assert_eq!(peer.seen(|seen| seen.rpc("initialize")), 1);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn a_list_beside_the_tools_that_cannot_be_read_is_read_again_until_it_can_and_told_when_it_is() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.on_next(3, When::rpc("resources/list"), Deed::RpcError { code: -32603, message: "the database is away" });
    let instance = fleet.online(Remote::http(peer.url()).persistent()).await;
    assert_eq!(catalogue(&instance.view()).unreadable, [ListKind::Resources]);
    let is_whole = |view: &InstanceView| view.catalogue.as_ref().is_some_and(|known| known.resources.len() == 1);
    let view = instance.until("offering its resources", is_whole).await;
    assert_eq!((view.status, catalogue(&view).unreadable.len()), (Status::Online, 0));
    assert_eq!(peer.seen(|seen| seen.rpc("resources/list")), 4);
    let story = instance.story().await;
    let told = story.iter().filter(|line| line.starts_with("discovered")).count();
    assert_eq!(told, 2, "that it still cannot be read is no news: {story:?}");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_list_that_a_server_does_not_know_is_empty_and_is_not_asked_for_again() {
    let unknown = Deed::RpcError { code: -32601, message: "Method not found" };
    for deed in [Deed::status(404), Deed::status(405), Deed::status(501), unknown] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        peer.on(When::rpc("resources/list"), deed);
        let instance = fleet.online(Remote::http(peer.url())).await;
        let view = instance.view();
        let Catalogue { resources, resource_templates, unreadable: unread, .. } = catalogue(&view);
        assert_eq!((resources.len(), resource_templates.len()), (0, 1));
        assert!(unread.is_empty(), "{unread:?}");
        fleet.finish(&[&peer]).await;
    }
}
