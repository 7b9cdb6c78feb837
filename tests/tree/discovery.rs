//! Discovery of tools, resources, resource templates and prompts.

use std::sync::Arc;

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::catalogue::{Catalogue, CatalogueEntry, ListKind};
use mcp_satellite_actors::model::status::Status;
use testkit::fleet::{Fleet, Server, seconds};
use tokio::time::Instant;

fn keys(entries: &[CatalogueEntry]) -> Vec<&str> {
    entries.iter().map(|entry| &*entry.key).collect()
}

async fn catalogue(fleet: &Fleet, script: SimScript) -> Arc<Catalogue> {
    let id = fleet.online(Server::new("a").script(script)).await;
    fleet.view(&id).catalogue.clone().unwrap()
}

#[tokio::test(start_paused = true)]
async fn resources_templates_and_prompts_are_read_over_all_pages_and_kept_as_sent() {
    let fleet = Fleet::start().await;
    let read = catalogue(
        &fleet,
        SimScript { resources: 3, resource_templates: 1, prompts: 5, page_size: 2, ..SimScript::default() },
    )
    .await;
    assert_eq!(read.tools.len(), 3);
    assert_eq!(keys(&read.resources), ["sim://resource/1", "sim://resource/2", "sim://resource/3"]);
    assert_eq!(keys(&read.resource_templates), ["sim://template/1/{name}"]);
    assert_eq!(keys(&read.prompts), ["prompt_1", "prompt_2", "prompt_3", "prompt_4", "prompt_5"]);
    let sent = r#"{"uriTemplate":"sim://template/1/{name}","name":"Template 1"}"#;
    assert_eq!(read.resource_templates[0].raw.get(), sent);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_with_only_tools_gets_no_other_list_requests() {
    let fleet = Fleet::start().await;
    let read = catalogue(&fleet, SimScript::default()).await;
    assert!(read.resources.is_empty() && read.resource_templates.is_empty() && read.prompts.is_empty());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_resource_list_leaves_tools_and_prompts_intact() {
    let fleet = Fleet::start().await;
    let read = catalogue(&fleet, SimScript { resources_error: true, prompts: 1, ..SimScript::default() }).await;
    assert_eq!((read.tools.len(), read.resources.len(), read.prompts.len()), (3, 0, 1));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_resource_list_is_marked_unreadable_instead_of_empty() {
    let fleet = Fleet::start().await;
    let script = SimScript { no_tools_capability: true, resources: 1, resources_error: true, ..SimScript::default() };
    let read = catalogue(&fleet, script).await;
    assert_eq!(read.unreadable, [ListKind::Resources]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn pages_beyond_the_limit_are_not_read() {
    let fleet = Fleet::start().await;
    let script = SimScript { tools: 20, resources: 20, page_size: 2, ..SimScript::default() };
    let server = Server::new("a").script(script).policy(|policy| policy.session.list_pages_max = 3);
    let id = fleet.online(server).await;
    let view = fleet.view(&id);
    let read = view.catalogue.as_ref().unwrap();
    assert_eq!((read.tools.len(), read.resources.len()), (6, 6));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_list_with_too_many_entries_is_rejected_and_named_in_the_status() {
    let fleet = Fleet::start().await;
    for (script, list) in [
        (SimScript { tools: 20, page_size: 8, ..SimScript::default() }, "tools/list"),
        (SimScript { prompts: 20, ..SimScript::default() }, "prompts/list"),
    ] {
        let server = Server::new(if list == "tools/list" { "a" } else { "b" }).script(script);
        let id = fleet.add(server.policy(|policy| policy.session.list_entries_max = 10)).await;
        let view = fleet.until(&id, Status::Error).await;
        let why = format!(
            "cannot read the server's tools: {list} has more than 10 entries (`list_entries_max`), so it is not used"
        );
        assert!(view.message.as_ref().is_some_and(|message| message.starts_with(&why)), "{:?}", view.message);
        assert!(view.catalogue.is_none());
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_list_that_grows_too_long_leaves_the_known_catalogue_in_place() {
    let fleet = Fleet::start().await;
    let script = SimScript { list_changed_after: Some(seconds(5.0)), ..SimScript::default() };
    let server = Server::new("a").script(script).policy(|policy| policy.session.list_entries_max = 3);
    let id = fleet.online(server).await;
    let view = fleet.until_view(&id, |view| view.last_error.is_some()).await;
    assert!(view.last_error.as_ref().is_some_and(|why| why.contains("tools/list has more than 3 entries")));
    assert_eq!((view.status, view.catalogue.as_ref().map(|read| read.tools.len())), (Status::Online, Some(3)));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_list_change_is_read_after_the_debounce() {
    let fleet = Fleet::start().await;
    let script = SimScript { list_changed_after: Some(seconds(5.0)), ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script)).await;
    let began = Instant::now();
    fleet.until_view(&id, |view| view.catalogue.as_ref().is_some_and(|read| read.tools.len() == 4)).await;
    assert_eq!(began.elapsed().as_millis(), 5250);
    assert_eq!(fleet.view(&id).status, Status::Online);
    assert_eq!(fleet.event_data(&id, "mcp.tools.updated").await.len(), 1);
    fleet.finish().await;
}
