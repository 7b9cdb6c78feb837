//! Lazy servers: started by a call, and before that only to discover unknown tools.

use std::sync::Arc;

use mcp_satellite::connect::sim::{SimPlan, SimScript};
use mcp_satellite_actors::model::catalogue::{Catalogue, Tool};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{EarlierState, InstallOutcome};
use serde_json::json;
use serde_json::value::RawValue;
use testkit::fleet::{Fleet, Server, exits, seconds, tenths};
use tokio::time::{Instant, sleep};

/// Returns the state of an earlier run in which the server listed `echo` and `old`.
fn known_state() -> EarlierState {
    let tool = |name| Tool::parse(RawValue::from_string(format!(r#"{{"name":"{name}"}}"#)).unwrap()).unwrap();
    let catalogue = Catalogue { tools: vec![tool("echo"), tool("old")], ..Catalogue::default() };
    EarlierState { catalogue: Some(Arc::new(catalogue)), memo: None }
}

async fn add_known(fleet: &Fleet, server: Server) -> InstanceId {
    let id = server.spec.id.clone();
    fleet.world.plan(&server);
    assert_eq!(fleet.runtime.install_with_state(server.spec, known_state()).await, Ok(InstallOutcome::New));
    id
}

#[tokio::test(start_paused = true)]
async fn a_lazy_server_is_started_once_for_discovery_and_becomes_dormant() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("a").lazy()).await;
    let began = Instant::now();
    let view = fleet.until_view(&id, |view| view.dormant).await;
    assert_eq!(tenths(began.elapsed()), 0.0);
    assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 3));
    sleep(seconds(3600.0)).await;
    assert_eq!((fleet.world.openings(&id).len(), fleet.world.sim.alive_count()), (1, 0));
    let dormant = fleet.event_data(&id, "mcp.server.dormant").await;
    assert_eq!((dormant.len(), &dormant[0]["idle_duration_seconds"]), (1, &json!(0)));
    assert_eq!(fleet.event_data(&id, "mcp.server.started").await.len(), 1);

    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    assert_eq!(fleet.world.openings(&id).len(), 2);
    sleep(seconds(170.0)).await;
    assert!(!fleet.view(&id).dormant, "a woken lazy server stays awake for the usual idle time");
    fleet.until_view(&id, |view| view.dormant).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_during_discovery_keeps_a_lazy_server_awake() {
    let fleet = Fleet::start().await;
    let slow = SimScript { handshake_delay: seconds(2.0), ..SimScript::default() };
    let id = fleet.add(Server::new("a").lazy().script(slow)).await;
    let answer = fleet.call(&id, "echo", json!({"text": 1})).await;
    assert!(answer.is_ok());
    sleep(seconds(100.0)).await;
    assert!(!fleet.view(&id).dormant);
    assert_eq!(fleet.world.openings(&id).len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_lazy_server_with_known_tools_is_not_started_before_a_call() {
    let fleet = Fleet::start().await;
    let id = add_known(&fleet, Server::new("a").lazy()).await;
    let view = fleet.until_view(&id, |view| view.dormant).await;
    assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 2));
    sleep(seconds(100.0)).await;
    assert!(fleet.world.openings(&id).is_empty());
    let statuses: Vec<_> = fleet.statuses(&id).await.into_iter().map(|(status, _)| status).collect();
    assert_eq!(statuses, ["provisioning", "online"]);

    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    let respawned = fleet.event_data(&id, "mcp.server.respawned").await;
    assert_eq!(respawned[0]["dormant_duration_seconds"], 100);
    // A wake reads the tools again: they may have changed while the satellite was down.
    fleet.until_view(&id, |view| view.offered_catalogue().is_some_and(|catalogue| catalogue.tools.len() == 3)).await;
    let updated = fleet.event_data(&id, "mcp.tools.updated").await;
    assert_eq!(updated[0]["removed_tools"], json!(["echo", "old"]), "only their names were known");
    assert_eq!(fleet.statuses(&id).await.len(), 2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn known_tools_do_not_affect_listed_or_unconfigured_servers() {
    let fleet = Fleet::start().await;
    let listed = add_known(&fleet, Server::new("listed")).await;
    let missing = add_known(&fleet, Server::new("missing").lazy().missing("KEY")).await;
    fleet.until_view(&listed, |view| view.status == Status::Online && view.port.is_some()).await;
    fleet.until(&missing, Status::AwaitingUserConfig).await;
    fleet.world.plan(&Server::new("missing"));
    let complete = Server::new("missing").lazy().env("KEY", "1").spec;
    assert_eq!(fleet.runtime.install_with_state(complete, known_state()).await, Ok(InstallOutcome::Updated));
    fleet.until_view(&missing, |view| view.dormant).await;
    assert_eq!(fleet.world.openings(&missing).len(), 1, "an update starts discovery");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn failed_wakes_of_a_lazy_server_count_as_crashes() {
    let fleet = Fleet::start().await;
    let broken = SimScript { exit_before_handshake: true, exit_code: 1, ..SimScript::default() };
    let id = add_known(&fleet, Server::new("a").lazy().script(broken)).await;
    let refused = fleet.call(&id, "echo", json!({"text": 1})).await;
    assert!(matches!(refused, Err(CallError::Refused { status: Status::PermanentlyFailed, .. })), "{refused:?}");
    assert_eq!(fleet.world.openings(&id).len(), 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_lazy_server_that_crashes_is_restarted_and_becomes_dormant() {
    let fleet = Fleet::start().await;
    let plans = [SimScript::default(), exits(5.0, 1), SimScript::default()].map(SimPlan::from);
    let id = fleet.add(Server::new("a").lazy().plans(plans)).await;
    fleet.until_view(&id, |view| view.dormant).await;
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    fleet.until_view(&id, |view| view.restarts == 1 && view.dormant).await;
    assert_eq!(fleet.world.openings(&id).len(), 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_lazy_server_can_be_stopped_started_and_restarted() {
    let fleet = Fleet::start().await;
    let id = add_known(&fleet, Server::new("a").lazy()).await;
    fleet.runtime.stop(&id).await.unwrap();
    assert!(matches!(fleet.call(&id, "echo", json!({})).await, Err(CallError::Refused { .. })));
    let began = Instant::now();
    fleet.runtime.start(&id).await.unwrap();
    fleet.until_view(&id, |view| view.status == Status::Online && view.dormant).await;
    assert_eq!(tenths(began.elapsed()), 0.0, "the refused call does not keep the server awake");
    assert_eq!(fleet.world.openings(&id).len(), 1, "a start command starts the process");
    fleet.runtime.restart(&id).await.unwrap();
    fleet.world.until_openings(&id, 2).await;
    fleet.until_view(&id, |view| view.status == Status::Online && view.dormant).await;
    let found = fleet.runtime.uninstall(&id).await.unwrap();
    assert_eq!((found.active, found.dormant), (false, true));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn known_tools_survive_a_panic_of_the_team() {
    let fleet = Fleet::start().await;
    let id = add_known(&fleet, Server::new("a").lazy()).await;
    fleet.until_view(&id, |view| view.dormant).await;
    fleet.runtime.panic(mcp_satellite_actors::RuntimePart::Team("acme".into()));
    sleep(seconds(60.0)).await;
    let view = fleet.view(&id);
    assert_eq!((view.dormant, view.status, view.offered_catalogue().unwrap().tools.len()), (true, Status::Online, 2));
    assert!(fleet.world.openings(&id).is_empty());
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    fleet.until_view(&id, |view| view.offered_catalogue().is_some_and(|catalogue| catalogue.tools.len() == 3)).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn known_tools_are_read_at_the_next_wake_if_reading_failed() {
    let fleet = Fleet::start().await;
    let plans = [SimScript { list_error: true, ..SimScript::default() }, SimScript::default()].map(SimPlan::from);
    let id = add_known(&fleet, Server::new("a").lazy().plans(plans)).await;
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    let view = fleet.until_view(&id, |view| view.dormant).await;
    assert!(view.last_error.is_some());
    assert_eq!(view.offered_catalogue().unwrap().tools.len(), 2);
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    fleet.until_view(&id, |view| view.offered_catalogue().is_some_and(|catalogue| catalogue.tools.len() == 3)).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn known_tools_of_a_reinstalled_instance_survive_the_uninstall_of_the_old_one() {
    let fleet = Fleet::start().await;
    let slow_to_terminate = SimScript { sigterm_delay: Some(seconds(5.0)), ..SimScript::default() };
    let server = Server::new("a").lazy().script(slow_to_terminate);
    let id = fleet.add(server.clone()).await;
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    let openings = fleet.world.openings(&id).len();
    let install = async {
        sleep(seconds(1.0)).await;
        assert_eq!(fleet.runtime.install_with_state(server.spec.clone(), known_state()).await, Ok(InstallOutcome::New));
    };
    let (gone, ()) = futures::join!(fleet.runtime.uninstall(&id), install);
    assert!(gone.is_ok());
    fleet.until_view(&id, |view| view.dormant).await;
    sleep(seconds(60.0)).await;
    assert_eq!(fleet.view(&id).offered_catalogue().unwrap().tools.len(), 2);
    assert_eq!(fleet.world.openings(&id).len(), openings);
    fleet.finish().await;
}
