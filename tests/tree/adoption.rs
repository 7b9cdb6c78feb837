//! Servers outlive their satellite: it is killed, and the next one continues their sessions.

use std::sync::Arc;

use jiff::Timestamp;
use mcp_satellite::connect::sim::{SimPlan, SimScript, SpokenEras};
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::memo::{StoredMemo, StoredSleep};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{EarlierState, InstallOutcome, RuntimePart};
use serde_json::json;
use testkit::fleet::{Fleet, Server, call, exits, seconds, tenths};
use tokio::time::{Instant, sleep};

use crate::memory::SharedStore;

/// Starts a fleet with a keeper and one instance that is online.
async fn started(server: &Server) -> (Fleet, InstanceId, Option<u32>) {
    let fleet = Fleet::with_keeper(|_| ()).await;
    let id = fleet.online(server.clone()).await;
    let pid = fleet.pid(&id);
    (fleet, id, pid)
}

/// Installs an instance with what an earlier satellite has stored about it.
async fn install(fleet: &Fleet, server: &Server, memo: Option<StoredMemo>) {
    fleet.world.plan(server);
    let known = EarlierState { memo, catalogue: None };
    assert_eq!(fleet.runtime.install_with_state(server.spec.clone(), known).await, Ok(InstallOutcome::New));
}

fn counted_exits(view: &InstanceView) -> usize {
    view.exits_in_window(Instant::now().into_std())
}

#[tokio::test(start_paused = true)]
async fn adopted_servers_take_calls_at_once_and_are_not_restarted() {
    let slow = SimScript { start_delay: seconds(10.0), ..SimScript::default() };
    let first = Fleet::with_keeper(|options| options.start_permits = 100).await;
    let mut servers = Vec::new();
    for nth in 0..20 {
        let server = Server::new(&format!("s{nth}")).script(slow.clone());
        servers.push((first.add(server.clone()).await, server));
    }
    for (id, _) in &servers {
        first.until(id, Status::Online).await;
    }
    let pids: Vec<_> = servers.iter().map(|(id, _)| first.pid(id)).collect();
    sleep(seconds(100.0)).await;

    // A start would take ten seconds, and there is one permit for all of them.
    let second = first.replace_killed(|options| options.start_permits = 1).await;
    let began = Instant::now();
    for (_, server) in &servers {
        second.add(server.clone()).await;
    }
    for (id, _) in &servers {
        second.call(id, "echo", json!({"text": 1})).await.unwrap();
    }
    assert_eq!(tenths(began.elapsed()), 0.0);
    second.world.sim.drop_unclaimed();
    for ((id, _), pid) in servers.iter().zip(pids) {
        let view = second.until(id, Status::Online).await;
        assert_eq!((view.pid, view.restarts, counted_exits(&view)), (pid, 0, 0));
        assert_eq!((second.world.openings(id).len(), second.world.adoptions(id)), (1, 1));
        assert_eq!(tenths(Instant::now().into_std() - view.initialized_at.unwrap()), 100.0, "the age of the server");
        assert_eq!(second.received(id).await["initialized"], 1, "the handshake is not repeated");
        let adopted = second.event_data(id, "mcp.server.adopted").await;
        assert_eq!(adopted.len(), 1);
        assert_eq!((&adopted[0]["pid"], &adopted[0]["tool_count"]), (&json!(pid), &json!(3)));
        assert_eq!((&adopted[0]["uptime_seconds"], &adopted[0]["adoption_duration_ms"]), (&json!(100), &json!(0)));
        for kind in ["mcp.server.started", "mcp.server.restarted", "mcp.server.crashed"] {
            assert!(second.event_data(id, kind).await.is_empty(), "{kind}");
        }
    }
    second.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_adoption_changes_no_restart_budget() {
    let store = SharedStore::new();
    let first = Fleet::with_keeper(|options| options.state_store = Arc::new(store.clone())).await;
    let server = Server::new("a").plans([exits(1.0, 1).into(), SimScript::default().into()]);
    let id = first.add(server.clone()).await;
    first.world.until_openings(&id, 2).await;
    first.until(&id, Status::Online).await;
    let second = first.replace_killed(|options| options.state_store = Arc::new(store.clone())).await;
    install(&second, &server, store.memo(&id)).await;
    let view = second.until(&id, Status::Online).await;
    assert_eq!((view.restarts, counted_exits(&view)), (1, 1), "those under the first satellite");
    assert_eq!((second.world.openings(&id).len(), second.world.adoptions(&id)), (2, 1));
    // Its next crash is charged as ever.
    second.server(&id).exit(1);
    let view = second.until_replaced(&id, view.pid).await;
    assert_eq!((view.restarts, counted_exits(&view)), (2, 2));
    second.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_is_restarted_without_charge_and_its_callers_wait() {
    let server = Server::new("a");
    let (first, id, pid) = started(&server).await;
    first.server(&id).freeze();
    let second = first.replace_killed(|_| ()).await;
    let began = Instant::now();
    second.add(server).await;
    assert!(second.call(&id, "echo", json!({"text": 1})).await.is_ok());
    assert_eq!(tenths(began.elapsed()), 5.0);
    let view = second.until_replaced(&id, pid).await;
    assert_eq!((view.restarts, counted_exits(&view)), (1, 0));
    let restarted = second.event_data(&id, "mcp.server.restarted").await;
    assert_eq!(restarted.len(), 1);
    assert_eq!((&restarted[0]["restart_reason"], &restarted[0]["attempt_number"]), (&json!("adoption"), &json!(0)));
    assert_eq!((&restarted[0]["old_pid"], &restarted[0]["new_pid"]), (&json!(pid), &json!(view.pid)));
    let why = "restarting now: session not continued: no answer to ping within 5 s";
    assert!(second.statuses(&id).await.iter().any(|(_, message)| message.as_deref() == Some(why)));
    for kind in ["mcp.server.adopted", "mcp.server.crashed"] {
        assert!(second.event_data(&id, kind).await.is_empty(), "{kind}");
    }
    second.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_with_another_configuration_ends_before_the_new_one_starts() {
    let server = Server::new("a");
    let (first, id, pid) = started(&server).await;
    let second = first.replace_killed(|_| ()).await;
    second.add(server.env("KEY", "changed")).await;
    let view = second.until_replaced(&id, pid).await;
    assert_eq!((view.restarts, second.world.adoptions(&id)), (0, 0));
    assert_eq!((second.world.openings(&id).len(), second.world.sim.alive_count()), (2, 1));
    second.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_instance_at_rest_adopts_nothing_and_its_server_ends() {
    let asleep = StoredMemo { dormant: Some(StoredSleep { since: Timestamp::UNIX_EPOCH }), ..StoredMemo::default() };
    let stopped = StoredMemo { stopped: true, ..StoredMemo::default() };
    for (memo, openings) in [(asleep, 2), (stopped, 1)] {
        let server = Server::new("a");
        let (first, id, pid) = started(&server).await;
        let second = first.replace_killed(|_| ()).await;
        install(&second, &server, Some(memo)).await;
        second.runtime.wait_for(&id, |_| true).await.unwrap();
        second.world.sim.drop_unclaimed();
        sleep(seconds(10.0)).await;
        assert_eq!((second.world.adoptions(&id), second.world.openings(&id).len()), (0, openings));
        assert_ne!(second.pid(&id), pid);
        assert_eq!(second.world.sim.alive_count(), openings - 1);
        second.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_in_its_handshake_or_ended_meanwhile_is_started_anew() {
    let silent = SimScript { handshake_never: true, ..SimScript::default() };
    let server = Server::new("a").plans([silent.into(), SimScript::default().into()]);
    let first = Fleet::with_keeper(|_| ()).await;
    let id = first.add(server.clone()).await;
    first.world.until_openings(&id, 1).await;
    let second = first.replace_killed(|_| ()).await;
    second.add(server.clone()).await;
    let view = second.until(&id, Status::Online).await;

    let ended = second.server(&id);
    let third = second.replace_killed(|_| ()).await;
    ended.exit(1);
    third.add(server).await;
    let last = third.until_replaced(&id, view.pid).await;
    assert_eq!((third.world.adoptions(&id), third.world.openings(&id).len()), (0, 3));
    assert_eq!((last.restarts, counted_exits(&last)), (0, 0));
    assert_eq!(third.event_data(&id, "mcp.server.started").await.len(), 1);
    third.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_is_adopted_once_by_each_satellite() {
    let server = Server::new("a");
    let (first, id, pid) = started(&server).await;
    // The second satellite is killed while it adopts the server.
    let second = first.replace_killed(|_| ()).await;
    second.add(server.clone()).await;
    second.runtime.wait_for(&id, |_| true).await.unwrap();
    let third = second.replace_killed(|_| ()).await;
    third.add(server.clone()).await;
    assert_eq!(third.until(&id, Status::Online).await.pid, pid);
    assert_eq!((third.world.adoptions(&id), third.world.openings(&id).len()), (2, 1));
    // A supervisor ends with its servers; the next one of the same satellite starts them.
    third.runtime.panic(RuntimePart::Team(id.team.clone()));
    let view = third.until_replaced(&id, pid).await;
    assert_eq!((third.world.adoptions(&id), third.world.openings(&id).len()), (2, 2));
    let fourth = third.replace_killed(|_| ()).await;
    fourth.add(server).await;
    assert_eq!(fourth.until(&id, Status::Online).await.pid, view.pid);
    fourth.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_response_to_the_killed_satellite_reaches_no_caller_of_the_next_one() {
    let server = Server::new("a");
    let (first, id, _) = started(&server).await;
    let runtime = first.runtime.clone();
    let (caller, of) = (first.runtime.clone(), id.clone());
    let lost = tokio::spawn(async move { call(&caller, &of, "sleep", json!({"ms": 1000}), None).await });
    while runtime.status(&id).unwrap().port.as_ref().unwrap().calls_in_flight() == 0 {
        sleep(seconds(0.01)).await;
    }
    let second = first.replace_killed(|_| ()).await;
    assert!(lost.await.unwrap().is_err());
    second.add(server).await;
    let view = second.until(&id, Status::Online).await;
    let began = Instant::now();
    assert!(second.call(&id, "sleep", json!({"ms": 2000})).await.is_ok());
    assert_eq!(tenths(began.elapsed()), 2.0, "the response to the earlier call came after a second");
    assert_eq!((view.counters.malformed(), second.received(&id).await["calls"].clone()), (0, json!(2)));
    second.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_without_sessions_is_adopted_and_announces_its_changes() {
    let script =
        SimScript { speaks: SpokenEras::Stateless, list_changed_after: Some(seconds(60.0)), ..SimScript::default() };
    let server = Server::new("a").plans([SimPlan::from(script)]);
    let (first, id, pid) = started(&server).await;
    let second = first.replace_killed(|_| ()).await;
    second.add(server).await;
    let view = second.until(&id, Status::Online).await;
    assert_eq!((view.pid, view.server.as_ref().unwrap().era), (pid, Era::Stateless));
    assert!(second.call(&id, "echo", json!({"text": 1})).await.is_ok());
    second.until_view(&id, |view| view.catalogue.as_ref().is_some_and(|tools| tools.tools.len() == 4)).await;
    assert_eq!((second.world.adoptions(&id), second.world.openings(&id).len()), (1, 1));
    second.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_command_during_an_adoption_takes_effect() {
    for stops in [true, false] {
        let server = Server::new("a");
        let (first, id, pid) = started(&server).await;
        first.server(&id).freeze();
        let second = first.replace_killed(|_| ()).await;
        second.add(server.clone()).await;
        second.until(&id, Status::Connecting).await;
        if stops {
            second.runtime.stop(&id).await.unwrap();
            assert_eq!((second.view(&id).status, second.world.sim.alive_count()), (Status::Offline, 0));
        } else {
            second.runtime.install(server.env("KEY", "changed").spec).await.unwrap();
            let view = second.until_replaced(&id, pid).await;
            assert_eq!((second.world.openings(&id).len(), counted_exits(&view)), (2, 0));
        }
        second.finish().await;
    }
}
