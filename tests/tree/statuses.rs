//! Statuses of an instance in order, and the events between them.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::InstallOutcome;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use testkit::fleet::{Fleet, Server};

async fn names(fleet: &Fleet, id: &InstanceId) -> Vec<String> {
    fleet.statuses(id).await.into_iter().map(|(status, _)| status).collect()
}

const HEALTHY: [&str; 6] =
    ["provisioning", "command_received", "connecting", "discovering_tools", "syncing_tools", "online"];

#[tokio::test(start_paused = true)]
async fn a_healthy_start_emits_every_status_and_the_discovered_tools() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    assert_eq!(names(&fleet, &id).await, HEALTHY);
    let events = fleet.events_of(&id).await;
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let expected = [
        vec!["mcp.server.status_changed"; 5],
        vec!["mcp.tools.discovered", "mcp.server.status_changed", "mcp.server.started"],
    ];
    assert_eq!(kinds, expected.concat());
    let subject = json!({
        "installation_id": "a", "team_id": "acme", "user_id": "alice", "process_id": "files-acme-alice-a",
        "server_slug": "files",
    });
    for event in &events {
        for (key, value) in subject.as_object().unwrap() {
            assert_eq!(&event["data"][key], value, "{event}");
        }
    }
    let started = fleet.event_data(&id, "mcp.server.started").await;
    assert_eq!(started[0]["pid"], json!(fleet.pid(&id)));
    assert_eq!((&started[0]["transport"], &started[0]["tool_count"]), (&json!("stdio"), &json!(3)));
    let discovered = fleet.event_data(&id, "mcp.tools.discovered").await;
    assert_eq!(discovered[0]["tools"], json!(["echo", "add", "sleep"]));
    assert!(discovered[0]["total_tokens"].as_u64().unwrap() > 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_leads_through_connecting_with_its_reason_to_online() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let old = fleet.pid(&id);
    fleet.server(&id).signal(9);
    fleet.until_replaced(&id, old).await;
    let statuses = fleet.statuses(&id).await;
    let after: Vec<_> = statuses[6..].iter().map(|(status, message)| (&**status, message.as_deref())).collect();
    assert_eq!(
        after,
        [
            ("connecting", Some("restarting in 1 s (attempt 1): killed by SIGKILL")),
            ("connecting", Some("waiting for a start permit")),
            ("connecting", Some("starting")),
            ("discovering_tools", None),
            ("syncing_tools", None),
            ("online", None),
        ]
    );
    let crashed = fleet.event_data(&id, "mcp.server.crashed").await;
    assert_eq!((&crashed[0]["signal"], &crashed[0]["exit_code"]), (&json!(9), &Value::Null));
    let restarted = fleet.event_data(&id, "mcp.server.restarted").await;
    assert_eq!(restarted[0]["restart_reason"], "crash");
    assert_eq!((&restarted[0]["old_pid"], &restarted[0]["new_pid"]), (&json!(old), &json!(fleet.pid(&id))));
    assert_eq!(fleet.event_data(&id, "mcp.server.started").await.len(), 1, "a restart emits no second started event");
    assert_eq!(fleet.view(&id).last_exit.as_deref(), Some("killed by SIGKILL"));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_stopped_server_is_offline_until_a_start() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    fleet.runtime.stop(&id).await.unwrap();
    let statuses = fleet.statuses(&id).await;
    let after: Vec<_> = statuses[6..].iter().map(|(status, message)| (&**status, message.as_deref())).collect();
    assert_eq!(after, [("offline", Some("stopping")), ("offline", Some("stopped on request"))]);
    let stopped = fleet.event_data(&id, "mcp.server.stopped").await;
    assert_eq!((&stopped[0]["kind"], &stopped[0]["forced"]), (&json!("manual"), &json!(false)));

    fleet.runtime.start(&id).await.unwrap();
    fleet.until(&id, Status::Online).await;
    let again = names(&fleet, &id).await;
    assert_eq!(again[8..], ["connecting", "connecting", "discovering_tools", "syncing_tools", "online"]);
    assert_eq!(fleet.event_data(&id, "mcp.server.restarted").await[0]["restart_reason"], "manual");
    assert!(fleet.event_data(&id, "mcp.server.crashed").await.is_empty(), "a stop is no crash");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_config_update_goes_through_restarting() {
    let fleet = Fleet::start().await;
    let server = Server::new("a");
    let id = fleet.online(server.clone()).await;
    let old = fleet.pid(&id);
    assert_eq!(fleet.runtime.install(server.env("MODE", "new").spec).await, Ok(InstallOutcome::Updated));
    fleet.until_replaced(&id, old).await;
    let statuses = names(&fleet, &id).await;
    assert_eq!(statuses[6..], ["restarting", "connecting", "discovering_tools", "syncing_tools", "online"]);
    assert_eq!(fleet.event_data(&id, "mcp.server.stopped").await[0]["kind"], "config");
    assert_eq!(fleet.event_data(&id, "mcp.server.restarted").await[0]["restart_reason"], "config");
    let answer = fleet.call(&id, "env", json!({"name": "MODE"})).await.unwrap();
    assert_eq!(answer["content"][0]["text"], "new", "the new process has the new configuration");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_user_value_prevents_a_start() {
    let fleet = Fleet::start().await;
    let server = Server::new("a").missing("API_KEY");
    let id = fleet.add(server.clone()).await;
    let view = fleet.until(&id, Status::AwaitingUserConfig).await;
    assert_eq!(view.message.as_deref(), Some("waiting for the user to configure API_KEY"));
    assert!(fleet.world.openings(&id).is_empty());
    assert_eq!(fleet.runtime.install(server.env("API_KEY", "given").spec).await, Ok(InstallOutcome::Updated));
    fleet.until(&id, Status::Online).await;
    let statuses = names(&fleet, &id).await;
    assert_eq!(statuses, [&["awaiting_user_config"], &HEALTHY[..]].concat());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn removing_a_required_value_ends_the_process() {
    let fleet = Fleet::start().await;
    let server = Server::new("a");
    let id = fleet.online(server.clone()).await;
    fleet.runtime.install(server.missing("API_KEY").spec).await.unwrap();
    fleet.until(&id, Status::AwaitingUserConfig).await;
    fleet.until_view(&id, |view| view.pid.is_none()).await;
    assert_eq!(fleet.world.sim.alive_count(), 0);
    assert_eq!(fleet.event_data(&id, "mcp.server.stopped").await[0]["kind"], "config");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn tools_are_offered_only_while_online() {
    let fleet = Fleet::start().await;
    let slow = SimScript { handshake_delay: testkit::fleet::seconds(5.0), ..SimScript::default() };
    let id = fleet.add(Server::new("a").plans([SimScript::default().into(), slow.into()])).await;
    assert!(fleet.until(&id, Status::Online).await.offered_catalogue().is_some());
    fleet.server(&id).exit(1);
    let view = fleet.until(&id, Status::Connecting).await;
    assert!(view.offered_catalogue().is_none());
    assert_eq!(view.catalogue.as_ref().unwrap().tools.len(), 3, "the tools are kept, but not offered");
    fleet.until(&id, Status::Online).await;
    fleet.finish().await;
}
