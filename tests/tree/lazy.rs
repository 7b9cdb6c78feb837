//! Servers that are started when they are called, and before that only where their tools are not known.

use std::sync::Arc;

use mcp_satellite::connect::sim::{SimPlan, SimScript};
use mcp_satellite_actors::model::catalogue::{Catalogue, Tool};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{EarlierState, InstallOutcome};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep};

use crate::support::{Fleet, Server, exits, seconds, tenths};

/// The tools of the default script but the last, as they were known once.
fn known() -> EarlierState {
    let tool = |name| Tool::parse(RawValue::from_string(format!(r#"{{"name":"{name}"}}"#)).unwrap()).unwrap();
    let catalogue = Catalogue { tools: vec![tool("echo"), tool("old")], ..Catalogue::default() };
    EarlierState { catalogue: Some(Arc::new(catalogue)), memo: None }
}

async fn add_known(fleet: &Fleet, server: Server) -> InstanceId {
    let id = server.spec.id.clone();
    fleet.world.plan(&server);
    assert_eq!(fleet.runtime.install_with_state(server.spec, known()).await, Ok(InstallOutcome::New));
    id
}

#[tokio::test(start_paused = true)]
async fn a_lazy_server_is_started_once_to_be_discovered_and_sleeps_at_once() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("a").lazy()).await;
    let began = Instant::now();
    let view = fleet.until_view(&id, |view| view.dormant).await;
    assert_eq!(tenths(began.elapsed()), 0.0);
    assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 3));
    sleep(seconds(3600.0)).await;
    assert_eq!((fleet.world.openings(&id).len(), fleet.world.sim.alive_count()), (1, 0));
    let dormant = fleet.told(&id, "mcp.server.dormant").await;
    assert_eq!((dormant.len(), &dormant[0]["idle_duration_seconds"]), (1, &json!(0)));
    assert_eq!(fleet.told(&id, "mcp.server.started").await.len(), 1);

    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    assert_eq!(fleet.world.openings(&id).len(), 2);
    sleep(seconds(170.0)).await;
    assert!(!fleet.view(&id).dormant, "awake it is like any other");
    fleet.until_view(&id, |view| view.dormant).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_lazy_server_that_is_called_while_it_is_discovered_stays_awake() {
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
async fn a_lazy_server_whose_tools_are_known_is_not_started_until_it_is_called() {
    let fleet = Fleet::start().await;
    let id = add_known(&fleet, Server::new("a").lazy()).await;
    let view = fleet.until_view(&id, |view| view.dormant).await;
    assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 2));
    sleep(seconds(100.0)).await;
    assert!(fleet.world.openings(&id).is_empty());
    let statuses: Vec<_> = fleet.statuses(&id).await.into_iter().map(|(status, _)| status).collect();
    assert_eq!(statuses, ["provisioning", "online"]);

    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    let respawned = fleet.told(&id, "mcp.server.respawned").await;
    assert_eq!(respawned[0]["dormant_duration_seconds"], 100);
    // Awake its tools are read again: they may have changed while the satellite was down.
    fleet.until_view(&id, |view| view.offered_catalogue().is_some_and(|catalogue| catalogue.tools.len() == 3)).await;
    let updated = fleet.told(&id, "mcp.tools.updated").await;
    assert_eq!(updated[0]["removed_tools"], json!(["echo", "old"]), "they were known by their names only");
    assert_eq!(fleet.statuses(&id).await.len(), 2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn known_tools_say_nothing_to_a_server_that_is_not_lazy_or_not_configured() {
    let fleet = Fleet::start().await;
    let listed = add_known(&fleet, Server::new("listed")).await;
    let missing = add_known(&fleet, Server::new("missing").lazy().missing("KEY")).await;
    fleet.until_view(&listed, |view| view.status == Status::Online && view.port.is_some()).await;
    fleet.until(&missing, Status::AwaitingUserConfig).await;
    fleet.world.plan(&Server::new("missing"));
    let complete = Server::new("missing").lazy().env("KEY", "1").spec;
    assert_eq!(fleet.runtime.install_with_state(complete, known()).await, Ok(InstallOutcome::Updated));
    fleet.until_view(&missing, |view| view.dormant).await;
    assert_eq!(fleet.world.openings(&missing).len(), 1, "an update is discovered");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_lazy_server_that_cannot_be_woken_is_charged_like_any_other() {
    let fleet = Fleet::start().await;
    let broken = SimScript { exit_before_handshake: true, exit_code: 1, ..SimScript::default() };
    let id = add_known(&fleet, Server::new("a").lazy().script(broken)).await;
    let refused = fleet.call(&id, "echo", json!({"text": 1})).await;
    assert!(matches!(refused, Err(CallError::Refused { status: Status::PermanentlyFailed, .. })), "{refused:?}");
    assert_eq!(fleet.world.openings(&id).len(), 3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_lazy_server_that_crashes_is_started_again_and_sleeps() {
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
async fn people_can_stop_start_and_restart_a_lazy_server() {
    let fleet = Fleet::start().await;
    let id = add_known(&fleet, Server::new("a").lazy()).await;
    fleet.runtime.stop(&id).await.unwrap();
    assert!(matches!(fleet.call(&id, "echo", json!({})).await, Err(CallError::Refused { .. })));
    let began = Instant::now();
    fleet.runtime.start(&id).await.unwrap();
    fleet.until_view(&id, |view| view.status == Status::Online && view.dormant).await;
    assert_eq!(tenths(began.elapsed()), 0.0, "who was refused is nobody to stay awake for");
    assert_eq!(fleet.world.openings(&id).len(), 1, "a person is told whether it can be started");
    fleet.runtime.restart(&id).await.unwrap();
    fleet.world.until_openings(&id, 2).await;
    fleet.until_view(&id, |view| view.status == Status::Online && view.dormant).await;
    let found = fleet.runtime.uninstall(&id).await.unwrap();
    assert_eq!((found.active, found.dormant), (false, true));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_known_survives_a_panic_of_the_team() {
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
async fn known_tools_that_cannot_be_read_again_are_read_at_the_next_wake() {
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
async fn what_is_known_of_one_that_comes_after_one_that_is_leaving_is_not_forgotten() {
    let fleet = Fleet::start().await;
    let unhurried = SimScript { sigterm_delay: Some(seconds(5.0)), ..SimScript::default() };
    let server = Server::new("a").lazy().script(unhurried);
    let id = fleet.add(server.clone()).await;
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    let openings = fleet.world.openings(&id).len();
    let installs = async {
        sleep(seconds(1.0)).await;
        assert_eq!(fleet.runtime.install_with_state(server.spec.clone(), known()).await, Ok(InstallOutcome::New));
    };
    let (gone, ()) = futures::join!(fleet.runtime.uninstall(&id), installs);
    assert!(gone.is_ok());
    fleet.until_view(&id, |view| view.dormant).await;
    sleep(seconds(60.0)).await;
    assert_eq!(fleet.view(&id).offered_catalogue().unwrap().tools.len(), 2);
    assert_eq!(fleet.world.openings(&id).len(), openings);
    fleet.finish().await;
}
