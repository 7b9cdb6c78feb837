//! The catalogue of a server: complete after the connect, updated after changes, kept while the server cannot list it.

use std::time::Duration;

use mcp_satellite_actors::model::catalogue::{Catalogue, CatalogueEntry, ListKind};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;

use super::peer::{Action, Peer, When};
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
async fn tools_resources_templates_and_prompts_are_listed_over_both_transports() {
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
async fn many_list_changes_at_once_cause_one_read() {
    for legacy in [false, true] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        let remote = if legacy { Remote::sse(peer.sse_url()) } else { Remote::http(peer.url()) };
        let debounced = |policy: &mut mcp_satellite_actors::model::policy::Policy| {
            policy.session.list_changed_debounce = Duration::from_millis(200);
        };
        let instance = fleet.online(remote.policy(debounced)).await;
        peer.until("the stream is open", |log| log.streams == 1).await;
        assert_eq!(peer.log(|log| log.rpc("tools/list")), 1);

        for (name, readings) in [("second", 2), ("third", 3)] {
            for list in ["tools", "resources", "prompts"].repeat(10) {
                peer.list_changed(list);
            }
            peer.configure(|behavior| behavior.tools = vec![(name, json!({}))]);
            until_tools(&instance, &[name]).await;
            assert_eq!(peer.log(|log| log.rpc("tools/list")), readings, "more than one read for thirty changes");
        }
        let timeline = instance.timeline().await;
        let updates: Vec<_> = timeline.iter().filter(|line| line.starts_with("updated")).collect();
        assert_eq!(updates, ["updated (+second -echo -read -sleep)", "updated (+third -second)"]);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn an_endless_list_is_read_up_to_the_page_limit() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.configure(|behavior| behavior.endless_pages = true);
    let instance = fleet.online(Remote::http(peer.url()).policy(|policy| policy.session.list_pages_max = 5)).await;
    assert_eq!(peer.log(|log| log.rpc("tools/list")), 5);
    assert_eq!(tools(&instance.view()).len(), 15);
    assert_eq!(tools(&instance.view())[14], "sleep-4");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn unreadable_tools_are_kept_and_calls_still_work() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    let instance = fleet.online(Remote::http(peer.url())).await;
    peer.on(When::rpc("tools/list"), Action::RpcError { code: -32603, message: "the database is away" });
    peer.restart().await;
    instance.status(Status::Offline).await;
    instance.assert_callable().await;
    let view = instance.status(Status::Error).await;
    let message = view.message.as_deref().unwrap_or_default();
    assert!(
        message.starts_with("cannot read the server's tools: server error -32603: the database is away"),
        "{message}"
    );
    assert_eq!(tools(&view), ["echo", "read", "sleep"], "the known tools are not kept");
    assert!(view.offered_catalogue().is_none(), "the known tools are offered");

    // A successful call reads the lists at once; the backoff is longer than the test.
    peer.heal().await;
    instance.assert_callable().await;
    instance.online().await;
    assert_eq!(peer.log(|log| log.rpc("initialize")), 2, "the instance was connected again");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_server_without_tools_is_online() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.on(When::rpc("tools/list"), Action::RpcError { code: -32601, message: "Method not found" });
    peer.on(When::rpc("prompts/list"), Action::RpcError { code: -32603, message: "no" });
    let instance = fleet.online(Remote::http(peer.url())).await;
    let view = instance.view();
    let Catalogue { tools, resources, prompts, .. } = catalogue(&view);
    assert_eq!((tools.len(), resources.len(), prompts.len()), (0, 1, 0));
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn a_failing_resource_list_does_not_end_the_connection() {
    // Some servers respond to an unknown method as web servers do, with the same status as for an expired session.
    for action in [Action::status(418), Action::html(), Action::status(302), Action::status(404), Action::status(400)] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        peer.on(When::rpc("resources/list"), action.clone());
        peer.on(When::rpc("resources/templates/list"), action);
        let instance = fleet.online(Remote::http(peer.url())).await;
        let view = instance.view();
        let Catalogue { tools, resources, prompts, .. } = catalogue(&view);
        assert_eq!((tools.len(), resources.len(), prompts.len()), (3, 0, 1));
        instance.assert_callable().await;
        assert_eq!(peer.log(|log| log.rpc("initialize")), 1);
        fleet.finish(&[&peer]).await;
    }
}

#[tokio::test]
async fn an_unreadable_resource_list_is_read_again_and_then_reported() {
    let (fleet, peer) = (Fleet::start().await, Peer::start().await);
    peer.on_next(3, When::rpc("resources/list"), Action::RpcError { code: -32603, message: "the database is away" });
    let instance = fleet.online(Remote::http(peer.url()).persistent()).await;
    assert_eq!(catalogue(&instance.view()).unreadable, [ListKind::Resources]);
    let is_whole = |view: &InstanceView| view.catalogue.as_ref().is_some_and(|known| known.resources.len() == 1);
    let view = instance.until("offering its resources", is_whole).await;
    assert_eq!((view.status, catalogue(&view).unreadable.len()), (Status::Online, 0));
    assert_eq!(peer.log(|log| log.rpc("resources/list")), 4);
    let timeline = instance.timeline().await;
    let discovered = timeline.iter().filter(|line| line.starts_with("discovered")).count();
    assert_eq!(discovered, 2, "a failed read caused an event: {timeline:?}");
    fleet.finish(&[&peer]).await;
}

#[tokio::test]
async fn an_unsupported_list_is_empty_and_not_requested_again() {
    let unknown = Action::RpcError { code: -32601, message: "Method not found" };
    for action in [Action::status(404), Action::status(405), Action::status(501), unknown] {
        let (fleet, peer) = (Fleet::start().await, Peer::start().await);
        peer.on(When::rpc("resources/list"), action);
        let instance = fleet.online(Remote::http(peer.url())).await;
        let view = instance.view();
        let Catalogue { resources, resource_templates, unreadable: unread, .. } = catalogue(&view);
        assert_eq!((resources.len(), resource_templates.len()), (0, 1));
        assert!(unread.is_empty(), "{unread:?}");
        fleet.finish(&[&peer]).await;
    }
}
