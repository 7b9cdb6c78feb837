//! Rolling updates: calls move to the new process when it is ready. The old process stays if the new one fails.

use std::sync::Arc;

use futures::future::join_all;
use mcp_satellite::connect::sim::{SimPlan, SimScript};
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{InstallOutcome, RuntimePart, UninstallOutcome};
use serde_json::{Value, json};
use testkit::fleet::{Fleet, LONG, Server, call, exits, seconds, tenths};
use tokio::time::{Instant, sleep};

fn version(server: &Server, number: u32) -> Server {
    server.clone().env("VERSION", &number.to_string())
}

async fn roll_out(fleet: &Fleet, server: &Server, number: u32) {
    let installed = fleet.runtime.install(version(server, number).spec).await;
    assert_eq!(installed, Ok(InstallOutcome::Updated));
}

/// Returns the version of the configuration that answers a call.
async fn answering_version(fleet: &Fleet, id: &InstanceId) -> String {
    let answer = fleet.call(id, "env", json!({"name": "VERSION"})).await.unwrap();
    answer["content"][0]["text"].as_str().unwrap().to_owned()
}

/// Brings version 1 online. The plans are those of the further runs.
async fn first_version(fleet: &Fleet, plans: Vec<SimPlan>) -> (Server, InstanceId) {
    let server = Server::new("a").rolling().plans(std::iter::once(SimScript::default().into()).chain(plans));
    let id = fleet.online(version(&server, 1)).await;
    (server, id)
}

/// Waits until this version takes calls or its start has failed.
async fn until_settled(fleet: &Fleet, id: &InstanceId, number: u32) -> Arc<InstanceView> {
    let refused = |message: &String| message.starts_with("the new configuration did not come up");
    let takes_calls = |view: &InstanceView| view.spec.env["VERSION"].expose() == number.to_string();
    fleet.until_view(id, |view| takes_calls(view) || view.message.as_ref().is_some_and(refused)).await
}

fn slow(handshake: f64) -> SimScript {
    SimScript { handshake_delay: seconds(handshake), ..SimScript::default() }
}

#[tokio::test(start_paused = true)]
async fn a_rolling_update_moves_calls_to_the_new_process_without_interruption() {
    let fleet = Fleet::start().await;
    let (server, id) = first_version(&fleet, vec![SimScript { tools: 5, ..slow(3.0) }.into()]).await;
    let old = fleet.pid(&id);
    roll_out(&fleet, &server, 2).await;
    let began = Instant::now();
    let mut answered = Vec::new();
    while tenths(began.elapsed()) < 5.0 {
        let (view, tools) = (fleet.view(&id), fleet.runtime.tools(&id).unwrap().tools.len());
        assert_eq!(view.status, Status::Online);
        let before = Instant::now();
        let version = answering_version(&fleet, &id).await;
        assert_eq!(tenths(before.elapsed()), 0.0, "no call waits");
        assert_eq!(tools, if version == "1" { 3 } else { 5 }, "tools change with the switch");
        answered.push(version);
        sleep(seconds(0.4)).await;
    }
    let (old_ones, new_ones) = (["1"; 8].as_slice(), ["2"; 5].as_slice());
    assert_eq!(answered, [old_ones, new_ones].concat());
    fleet.until_view(&id, |view| view.pid != old).await;
    assert_eq!(fleet.world.sim.alive_count(), 1, "the old process is gone");

    let view = fleet.view(&id);
    assert_eq!((view.restarts, view.message.clone(), view.last_error.clone()), (1, None, None));
    let restarted = fleet.event_data(&id, "mcp.server.restarted").await;
    assert_eq!(restarted.len(), 1);
    assert_eq!((&restarted[0]["old_pid"], &restarted[0]["new_pid"]), (&json!(old), &json!(view.pid)));
    assert_eq!(restarted[0]["restart_reason"], "config");
    let stopped = fleet.event_data(&id, "mcp.server.stopped").await;
    assert_eq!((stopped.len(), &stopped[0]["kind"]), (1, &json!("config")));
    let updated = fleet.event_data(&id, "mcp.tools.updated").await;
    assert_eq!(updated.len(), 1);
    assert_eq!((&updated[0]["added_tools"], &updated[0]["total_tools"]), (&json!(["tool_4", "tool_5"]), &json!(5)));
    let statuses: Vec<String> = fleet.statuses(&id).await.into_iter().map(|(status, _)| status).collect();
    let online = statuses.iter().position(|status| status == "online").unwrap();
    assert!(statuses[online..].iter().all(|status| status == "online"), "{statuses:?}");
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_policy_is_applied_to_the_running_server() {
    let fleet = Fleet::start().await;
    for server in [Server::new("a"), Server::new("b").rolling(), Server::remote("c")] {
        let id = fleet.online(server.clone()).await;
        let before = fleet.view(&id);
        let strict = server.policy(|policy| {
            policy.session.calls_in_flight_max = 1;
            policy.restart.max_crashes = 9;
            policy.health.interval = seconds(7.0);
        });
        assert_eq!(fleet.runtime.install(strict.spec.clone()).await, Ok(InstallOutcome::Updated));
        let view = fleet.until_view(&id, |view| *view.spec == strict.spec).await;
        assert_eq!((view.status, view.pid, view.restarts), (Status::Online, before.pid, 0));
        assert_eq!(view.initialized_at, before.initialized_at, "the run did not change");
        let long = fleet.call_within(&id, "sleep", json!({"ms": 10_000}), Some(seconds(60.0)));
        let meanwhile = async {
            sleep(seconds(1.0)).await;
            fleet.call(&id, "echo", json!({})).await
        };
        let (long, second) = futures::join!(long, meanwhile);
        assert!(long.is_ok(), "{long:?}");
        assert!(matches!(second, Err(CallError::Busy { limit: 1, .. })), "{second:?}");
        assert!(fleet.event_data(&id, "mcp.server.stopped").await.is_empty());
        assert!(fleet.event_data(&id, "mcp.server.disconnected").await.is_empty());
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_is_counted_by_the_latest_policy() {
    let fleet = Fleet::start().await;
    let server = Server::new("a").script(exits(70.0, 1));
    let id = fleet.online(server.clone()).await;
    let once = server.policy(|policy| policy.restart.max_crashes = 1);
    assert_eq!(fleet.runtime.install(once.spec).await, Ok(InstallOutcome::Updated));
    let view = fleet.until(&id, Status::PermanentlyFailed).await;
    assert_eq!((view.restarts, fleet.event_data(&id, "mcp.server.crashed").await.len()), (0, 1));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_finish_on_the_old_process() {
    let fleet = Fleet::start().await;
    let (server, id) = first_version(&fleet, Vec::new()).await;
    let old_port = fleet.view(&id).port.clone().unwrap();
    let long = fleet.call_within(&id, "sleep", json!({"ms": 60_000}), Some(seconds(100.0)));
    let meanwhile = async {
        sleep(seconds(1.0)).await;
        roll_out(&fleet, &server, 2).await;
        until_settled(&fleet, &id, 2).await;
        assert_eq!(answering_version(&fleet, &id).await, "2");
        assert_eq!(fleet.world.sim.alive_count(), 2, "the old process drains");
        assert!(!old_port.is_open(), "the old port takes no calls");
        let view = fleet.view(&id);
        assert_eq!(view.calls_in_flight(), 1, "the call in flight is counted");
        let listed = view.unanswered_calls(10, seconds(1.0)).await;
        assert_eq!((listed.total, listed.newest[0].tool.as_deref()), (1, Some("sleep")));
    };
    let (answer, ()) = futures::join!(long, meanwhile);
    assert!(answer.is_ok(), "{answer:?}");
    sleep(seconds(1.0)).await;
    assert_eq!(fleet.world.sim.alive_count(), 1);
    assert_eq!(fleet.event_data(&id, "mcp.server.stopped").await[0]["kind"], "config");
    assert_eq!(fleet.view(&id).last_exit.as_deref(), None, "the current run has not ended");
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_caller_with_the_old_port_reaches_the_new_process() {
    let fleet = Fleet::start().await;
    for steps in 0..60 {
        let name = format!("s{steps}");
        let server = Server::new(&name).rolling().plans([SimScript::default().into(), slow(1.0).into()]);
        let id = fleet.online(version(&server, 1)).await;
        let (runtime, its) = (fleet.runtime.clone(), id.clone());
        roll_out(&fleet, &server, 2).await;
        let caller = tokio::spawn(async move {
            sleep(seconds(1.0)).await;
            for _ in 0..steps {
                crate::dormancy::one_step().await;
            }
            call(&runtime, &its, "env", json!({"name": "VERSION"}), None).await
        });
        let answer = caller.await.unwrap();
        assert!(answer.is_ok(), "after {steps} steps: {answer:?}");
        until_settled(&fleet, &id, 2).await;
    }
    fleet.world.expect_rolling_updates(60);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_keep_their_own_deadlines_while_the_old_process_drains() {
    let fleet = Fleet::start().await;
    let server = Server::new("a").rolling().policy(|policy| policy.session.drain_timeout = LONG);
    let id = fleet.online(version(&server, 1)).await;
    let began = Instant::now();
    let long = fleet.call_within(&id, "sleep", json!({"ms": 2_000_000}), Some(seconds(2500.0)));
    let endless = fleet.call_within(&id, "sleep", json!({"ms": 4_000_000}), Some(seconds(3000.0)));
    let update = async {
        roll_out(&fleet, &server, 2).await;
        until_settled(&fleet, &id, 2).await;
    };
    let (long, endless, ()) = futures::join!(long, endless, update);
    assert!(long.is_ok(), "longer than the policy's `request_timeout_max`: {long:?}");
    assert!(matches!(endless, Err(CallError::TimedOut { .. })), "{endless:?}");
    assert_eq!(tenths(began.elapsed()), 3000.0);
    sleep(seconds(1.0)).await;
    assert_eq!(fleet.world.sim.alive_count(), 1, "the old process ends after the last of its calls");
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_run_that_still_drains_after_the_drain_timeout_is_ended() {
    let fleet = Fleet::start().await;
    let (server, id) = first_version(&fleet, Vec::new()).await;
    let long = fleet.call_within(&id, "sleep", json!({"ms": 2_000_000}), Some(seconds(2500.0)));
    let update = async {
        sleep(seconds(1.0)).await;
        roll_out(&fleet, &server, 2).await;
        until_settled(&fleet, &id, 2).await;
        Instant::now()
    };
    let (long, moved) = futures::join!(long, update);
    assert!(matches!(long, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{long:?}");
    assert_eq!(tenths(moved.elapsed()), 300.0);
    sleep(seconds(1.0)).await;
    assert_eq!(fleet.world.sim.alive_count(), 1);
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_old_process_stays_if_the_new_configuration_fails_to_start() {
    let broken = |script: SimScript| SimPlan::from(script);
    let exit = SimScript { exit_before_handshake: true, exit_code: 3, ..SimScript::default() };
    let refuses = SimScript { handshake_error: Some("no licence".to_owned()), ..SimScript::default() };
    let mute = SimScript { handshake_never: true, ..SimScript::default() };
    let listless = SimScript { list_error: true, ..SimScript::default() };
    for (plan, why) in [
        (SimPlan::with_open_error("cannot start `files`: not found"), "cannot start `files`: not found"),
        (broken(exit), "exited with code 3"),
        (broken(refuses), "handshake failed: server error -32603: no licence"),
        (broken(mute), "handshake failed: no answer to initialize within 30 s"),
        (broken(listless), "cannot read the server's tools: server error -32603: cannot list the tools"),
    ] {
        let fleet = Fleet::start().await;
        let overlaps = u64::from(plan.open_error.is_none());
        let (server, id) = first_version(&fleet, vec![plan, SimScript::default().into()]).await;
        let old = fleet.pid(&id);
        roll_out(&fleet, &server, 2).await;
        let view = until_settled(&fleet, &id, 2).await;
        let message = format!("the new configuration did not come up: {why}; the old one stays until a restart");
        assert_eq!(view.message.as_deref(), Some(&*message));
        assert_eq!(view.last_error.as_deref(), Some(why));
        assert_eq!((view.status, view.pid), (Status::Online, old));
        assert_eq!(view.exits_in_window(Instant::now().into_std()), 0, "no exit of the old process is counted");
        let crashed = fleet.event_data(&id, "mcp.server.crashed").await;
        let ended = why != "cannot read the server's tools: server error -32603: cannot list the tools";
        assert_eq!(crashed.len(), usize::from(ended), "{crashed:?}");
        assert!(crashed.iter().all(|data| data["will_restart"] == false && data["reason"] == why), "{crashed:?}");
        assert_eq!(view.spec.env["VERSION"].expose(), "1");
        assert_eq!(answering_version(&fleet, &id).await, "1");
        sleep(seconds(170.0)).await;
        assert_eq!(fleet.world.openings(&id).len(), 2, "the new configuration is not retried");
        assert_eq!(fleet.world.sim.alive_count(), 1);

        fleet.runtime.restart(&id).await.unwrap();
        fleet.until_replaced(&id, old).await;
        assert_eq!(answering_version(&fleet, &id).await, "2", "a restart starts the new configuration");
        assert_eq!(fleet.view(&id).message, None);
        fleet.world.expect_rolling_updates(overlaps);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_update_after_a_failed_one_is_tried() {
    let fleet = Fleet::start().await;
    let broken = SimScript { exit_before_handshake: true, exit_code: 3, ..SimScript::default() };
    let (server, id) = first_version(&fleet, vec![broken.into(), SimScript::default().into()]).await;
    roll_out(&fleet, &server, 2).await;
    until_settled(&fleet, &id, 2).await;
    roll_out(&fleet, &server, 3).await;
    fleet.until_view(&id, |view| view.message.is_none()).await;
    assert_eq!(answering_version(&fleet, &id).await, "3");
    fleet.world.expect_rolling_updates(2);
    fleet.finish().await;
}

/// Brings version 1 online and lets version 2 fail to start. The plans are those of the further runs.
async fn second_version_refused(fleet: &Fleet, plans: Vec<SimPlan>) -> (Server, InstanceId) {
    let broken = SimScript { exit_before_handshake: true, exit_code: 3, ..SimScript::default() };
    let (server, id) = first_version(fleet, std::iter::once(broken.into()).chain(plans).collect()).await;
    roll_out(fleet, &server, 2).await;
    assert!(reports_old_configuration(&*until_settled(fleet, &id, 2).await));
    (server, id)
}

/// Returns true if the status says that the old configuration stays.
fn reports_old_configuration(view: &InstanceView) -> bool {
    view.message.as_ref().is_some_and(|message| message.contains("did not come up") && message.contains("stays"))
}

#[tokio::test(start_paused = true)]
async fn the_status_reports_the_old_configuration_until_a_restart() {
    let fleet = Fleet::start().await;
    let (_, id) = second_version_refused(&fleet, vec![SimScript::default().into()]).await;
    let old = fleet.pid(&id);
    fleet.call(&id, "crash", json!({})).await.unwrap_err();
    let view = fleet.until_replaced(&id, old).await;
    assert!(reports_old_configuration(&view), "after a crash: {:?}", view.message);
    fleet.runtime.panic(RuntimePart::Team("acme".into()));
    let view = fleet.until_replaced(&id, view.pid).await;
    assert!(reports_old_configuration(&view), "after a panic of its supervisor: {:?}", view.message);
    let view = fleet.until_view(&id, |view| view.dormant).await;
    assert!(reports_old_configuration(&view), "asleep: {:?}", view.message);
    fleet.runtime.panic(RuntimePart::Team("acme".into()));
    sleep(seconds(60.0)).await;
    assert!(reports_old_configuration(&fleet.view(&id)), "asleep, after a panic of its supervisor");
    assert_eq!(answering_version(&fleet, &id).await, "1");
    assert!(reports_old_configuration(&fleet.view(&id)), "awake again");
    fleet.runtime.restart(&id).await.unwrap();
    fleet.until_view(&id, |view| view.status == Status::Online && view.message.is_none()).await;
    assert_eq!(answering_version(&fleet, &id).await, "2");
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_restart_during_a_wake_starts_the_failed_configuration_again() {
    let fleet = Fleet::with(|options| options.start_permits = 1).await;
    let (_, id) = second_version_refused(&fleet, vec![SimScript::default().into()]).await;
    fleet.until_view(&id, |view| view.dormant).await;
    // This server holds the only permit for two seconds, so the wake waits.
    let mute = fleet.add(Server::of("other", "mute").script(slow(3000.0))).await;
    fleet.world.until_openings(&mute, 1).await;
    let restarts = async {
        sleep(seconds(0.5)).await;
        assert!(fleet.view(&id).dormant, "the wake waits for a permit");
        fleet.runtime.restart(&id).await.unwrap();
        let view = fleet.view(&id);
        assert_eq!((view.status, reports_old_configuration(&view), view.dormant), (Status::Connecting, false, false));
    };
    let (answer, ()) = futures::join!(fleet.call(&id, "env", json!({"name": "VERSION"})), restarts);
    assert_eq!(answer.unwrap()["content"][0]["text"], "2");
    let view = fleet.view(&id);
    assert_eq!((view.restarts, view.message.clone()), (1, None));
    assert_eq!(fleet.event_data(&id, "mcp.server.restarted").await[0]["restart_reason"], "manual");
    assert!(fleet.event_data(&id, "mcp.server.respawned").await.is_empty());
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn installing_the_failed_configuration_again_retries_it() {
    let fleet = Fleet::start().await;
    let (server, id) = second_version_refused(&fleet, vec![SimScript::default().into()]).await;
    roll_out(&fleet, &server, 2).await;
    fleet.until_view(&id, |view| view.message.is_none()).await;
    assert_eq!(answering_version(&fleet, &id).await, "2");
    assert_eq!(fleet.runtime.install(version(&server, 2).spec).await, Ok(InstallOutcome::Unchanged));
    fleet.world.expect_rolling_updates(2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn installing_the_failed_configuration_again_leaves_a_dormant_server_alone() {
    let fleet = Fleet::start().await;
    let (server, id) = second_version_refused(&fleet, Vec::new()).await;
    fleet.until_view(&id, |view| view.dormant).await;
    assert_eq!(fleet.runtime.install(version(&server, 2).spec).await, Ok(InstallOutcome::Unchanged));
    sleep(seconds(60.0)).await;
    let view = fleet.view(&id);
    assert_eq!((view.dormant, reports_old_configuration(&view), fleet.world.openings(&id).len()), (true, true, 2));
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn reverting_to_the_dormant_configuration_starts_nothing() {
    let fleet = Fleet::start().await;
    let (server, id) = second_version_refused(&fleet, Vec::new()).await;
    fleet.until_view(&id, |view| view.dormant).await;
    roll_out(&fleet, &server, 1).await;
    let view = fleet.until_view(&id, |view| view.message.is_none()).await;
    assert_eq!((view.dormant, view.offered_catalogue().unwrap().tools.len()), (true, 3));
    sleep(seconds(60.0)).await;
    assert_eq!(fleet.world.openings(&id).len(), 2);
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_stop_event_of_the_old_process_has_its_own_server_name() {
    let fleet = Fleet::start().await;
    let (server, id) = first_version(&fleet, Vec::new()).await;
    let mut renamed = version(&server, 2).spec;
    renamed.server = "papers".into();
    assert_eq!(fleet.runtime.install(renamed).await, Ok(InstallOutcome::Updated));
    until_settled(&fleet, &id, 2).await;
    sleep(seconds(1.0)).await;
    let stopped = fleet.event_data(&id, "mcp.server.stopped").await;
    let restarted = fleet.event_data(&id, "mcp.server.restarted").await;
    assert_eq!((&stopped[0]["server_slug"], &restarted[0]["server_slug"]), (&json!("files"), &json!("papers")));
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn reverting_to_the_running_configuration_ends_the_new_process() {
    let fleet = Fleet::start().await;
    let (server, id) = first_version(&fleet, vec![slow(10.0).into()]).await;
    let old = fleet.pid(&id);
    roll_out(&fleet, &server, 2).await;
    fleet.world.until_openings(&id, 2).await;
    sleep(seconds(1.0)).await;
    roll_out(&fleet, &server, 1).await;
    fleet.until_view(&id, |view| view.message.is_none()).await;
    sleep(seconds(60.0)).await;
    assert_eq!((fleet.pid(&id), fleet.world.openings(&id).len(), fleet.world.sim.alive_count()), (old, 2, 1));
    assert_eq!(answering_version(&fleet, &id).await, "1");
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_of_the_old_process_turns_the_update_into_a_start() {
    let fleet = Fleet::start().await;
    let (server, id) = first_version(&fleet, vec![slow(10.0).into()]).await;
    roll_out(&fleet, &server, 2).await;
    fleet.world.until_openings(&id, 2).await;
    sleep(seconds(1.0)).await;
    // The call reaches the old process, whose tool `crash` ends it.
    let began = Instant::now();
    let killed = fleet.call(&id, "crash", json!({})).await;
    assert!(killed.is_err());
    let view = fleet.until(&id, Status::Connecting).await;
    assert!(
        view.message
            .as_deref()
            .unwrap()
            .starts_with("starting with the new configuration; the run with the old one ended")
    );
    let answer = fleet.call_within(&id, "env", json!({"name": "VERSION"}), Some(seconds(60.0))).await.unwrap();
    assert_eq!(answer["content"][0]["text"], "2", "the caller waits for the new process");
    assert_eq!(tenths(began.elapsed()), 9.0, "the start continues without a delay");
    assert_eq!(fleet.world.openings(&id).len(), 2);
    assert_eq!(
        fleet.view(&id).exits_in_window(Instant::now().into_std()),
        0,
        "a new configuration clears the crash history"
    );
    assert_eq!(fleet.event_data(&id, "mcp.server.crashed").await[0]["will_restart"], true);
    assert_eq!(fleet.event_data(&id, "mcp.server.restarted").await[0]["restart_reason"], "config");
    fleet.world.expect_rolling_updates(1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_of_the_new_process_does_not_disturb_the_draining_one() {
    let fleet = Fleet::start().await;
    let (server, id) = first_version(&fleet, vec![exits(5.0, 1).into(), SimScript::default().into()]).await;
    let long = fleet.call_within(&id, "sleep", json!({"ms": 60_000}), Some(seconds(100.0)));
    let update = async {
        roll_out(&fleet, &server, 2).await;
        until_settled(&fleet, &id, 2).await;
        let new = fleet.pid(&id);
        fleet.until_replaced(&id, new).await;
        assert_eq!(fleet.view(&id).exits_in_window(Instant::now().into_std()), 1);
        assert_eq!(answering_version(&fleet, &id).await, "2");
    };
    let (answer, ()) = futures::join!(long, update);
    assert!(answer.is_ok(), "the call on the old process completes: {answer:?}");
    fleet.world.expect_rolling_updates(2);
    fleet.finish().await;
}

/// Runs `end` while the old and the new process are alive. `drains` selects whether the new one is ready.
async fn end_both_processes(end: impl AsyncFnOnce(&Fleet, &InstanceId, &Server), drains: bool) -> Fleet {
    let fleet = Fleet::start().await;
    let slow_to_terminate = |delay: f64| SimScript { sigterm_delay: Some(seconds(delay)), ..SimScript::default() };
    let new =
        if drains { slow_to_terminate(1.0) } else { SimScript { handshake_never: true, ..slow_to_terminate(5.0) } };
    let plans = [slow_to_terminate(3.0), new, SimScript::default()].map(SimPlan::from);
    let server = Server::new("a").rolling().plans(plans);
    let id = fleet.online(version(&server, 1)).await;
    let busy = fleet.call_within(&id, "sleep", json!({"ms": 3_000_000}), Some(seconds(3000.0)));
    let rolling_update = async {
        roll_out(&fleet, &server, 2).await;
        fleet.world.until_openings(&id, 2).await;
        sleep(seconds(1.0)).await;
        assert_eq!(fleet.world.sim.alive_count(), 2);
        end(&fleet, &id, &server).await;
    };
    let (answer, ()) = futures::join!(busy, rolling_update);
    assert!(answer.is_err(), "the caller gets an error");
    fleet.world.expect_rolling_updates(1);
    fleet
}

#[tokio::test(start_paused = true)]
async fn a_stop_completes_when_both_processes_are_gone() {
    for (drains, takes) in [(false, 5.0), (true, 3.0)] {
        let stop = async |fleet: &Fleet, id: &InstanceId, _: &Server| {
            let began = Instant::now();
            fleet.runtime.stop(id).await.unwrap();
            assert_eq!((tenths(began.elapsed()), fleet.world.sim.alive_count()), (takes, 0));
            sleep(seconds(600.0)).await;
            assert_eq!(fleet.view(id).status, Status::Offline);
            fleet.runtime.start(id).await.unwrap();
            fleet.until(id, Status::Online).await;
            assert_eq!(answering_version(fleet, id).await, "2", "a start uses the new configuration");
        };
        end_both_processes(stop, drains).await.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_uninstall_completes_when_both_processes_are_gone() {
    for drains in [false, true] {
        let uninstall = async |fleet: &Fleet, id: &InstanceId, _: &Server| {
            let found = fleet.runtime.uninstall(id).await;
            assert_eq!(found, Ok(UninstallOutcome { active: true, dormant: false }));
            assert_eq!((fleet.world.sim.alive_count(), fleet.runtime.status(id).is_none()), (0, true));
        };
        end_both_processes(uninstall, drains).await.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_restart_ends_both_processes_and_starts_the_new_configuration() {
    for drains in [false, true] {
        let restart = async |fleet: &Fleet, id: &InstanceId, _: &Server| {
            fleet.runtime.restart(id).await.unwrap();
            fleet.until(id, Status::Connecting).await;
            fleet.until(id, Status::Online).await;
            assert_eq!((answering_version(fleet, id).await, fleet.world.sim.alive_count()), ("2".to_owned(), 1));
            assert_eq!(fleet.world.openings(id).len(), 3);
        };
        end_both_processes(restart, drains).await.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_update_with_a_restart_ends_both_processes() {
    for drains in [false, true] {
        let update = async |fleet: &Fleet, id: &InstanceId, server: &Server| {
            let mut spec = version(server, 3).spec;
            spec.update_method = mcp_satellite_actors::model::spec::UpdateMethod::Restart;
            assert_eq!(fleet.runtime.install(spec).await, Ok(InstallOutcome::Updated));
            fleet.until(id, Status::Restarting).await;
            fleet.until(id, Status::Online).await;
            assert_eq!((answering_version(fleet, id).await, fleet.world.sim.alive_count()), ("3".to_owned(), 1));
        };
        end_both_processes(update, drains).await.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_both_processes() {
    for drains in [false, true] {
        let shut_down = async |fleet: &Fleet, _: &InstanceId, _: &Server| {
            assert!(fleet.runtime.shutdown().await.in_time);
            assert_eq!(fleet.world.sim.alive_count(), 0);
            let events = fleet.sink.accepted();
            let stopped = events.iter().filter(|event| event.event.kind() == "mcp.server.stopped").count();
            assert_eq!(stopped, 2, "one event per process");
        };
        end_both_processes(shut_down, drains).await.finish_after_shutdown().await;
    }
}

#[tokio::test(start_paused = true)]
async fn another_update_ends_an_unready_process_and_waits_for_a_draining_one() {
    let fleet = Fleet::start().await;
    let mute = SimScript { handshake_never: true, ..SimScript::default() };
    let (server, id) = first_version(&fleet, vec![mute.into(), SimScript::default().into()]).await;
    roll_out(&fleet, &server, 2).await;
    fleet.world.until_openings(&id, 2).await;
    let began = Instant::now();
    let long = fleet.call_within(&id, "sleep", json!({"ms": 20_000}), None);
    let updates = async {
        roll_out(&fleet, &server, 3).await;
        fleet.until_view(&id, |view| view.spec.env["VERSION"].expose() == "3").await;
        assert_eq!(tenths(began.elapsed()), 0.0, "version 3 does not wait for version 2");
        roll_out(&fleet, &server, 4).await;
        sleep(seconds(1.0)).await;
        assert_eq!((answering_version(&fleet, &id).await, fleet.world.sim.alive_count()), ("3".to_owned(), 2));
        fleet.until_view(&id, |view| view.spec.env["VERSION"].expose() == "4").await;
        assert_eq!(tenths(began.elapsed()), 20.0, "at most two processes: version 4 starts when version 1 is gone");
    };
    let (answer, ()) = futures::join!(long, updates);
    assert!(answer.is_ok());
    assert_eq!(answering_version(&fleet, &id).await, "4");
    fleet.world.expect_rolling_updates(3);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_takes_no_calls_is_restarted_without_rolling() {
    let fleet = Fleet::start().await;
    let server = Server::new("asleep").rolling();
    let id = fleet.online(version(&server, 1)).await;
    fleet.until_view(&id, |view| view.dormant).await;
    roll_out(&fleet, &server, 2).await;
    fleet.until_view(&id, |view| view.status == Status::Online && view.port.is_some()).await;
    assert_eq!(answering_version(&fleet, &id).await, "2");

    // Without a required value the update cannot be rolled out.
    let missing = version(&server, 3).missing("KEY").spec;
    assert_eq!(fleet.runtime.install(missing).await, Ok(InstallOutcome::Updated));
    fleet.until(&id, Status::AwaitingUserConfig).await;
    let refused = fleet.call(&id, "echo", json!({})).await;
    assert!(matches!(refused, Err(CallError::Refused { .. })));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_team_ends_both_processes_and_starts_the_new_configuration() {
    for (handshake, drains) in [(10.0, false), (0.0, true)] {
        let fleet = Fleet::start().await;
        let (server, id) = first_version(&fleet, vec![slow(handshake).into(), SimScript::default().into()]).await;
        let busy = fleet.call_within(&id, "sleep", json!({"ms": 60_000}), Some(seconds(100.0)));
        let panics = async {
            roll_out(&fleet, &server, 2).await;
            fleet.world.until_openings(&id, 2).await;
            sleep(seconds(1.0)).await;
            assert_eq!(fleet.world.sim.alive_count(), 2, "{drains}");
            fleet.runtime.panic(RuntimePart::Team("acme".into()));
            fleet.world.until_openings(&id, 3).await;
            fleet.until(&id, Status::Online).await;
            assert_eq!((answering_version(&fleet, &id).await, fleet.world.sim.alive_count()), ("2".to_owned(), 1));
        };
        let (busy, ()) = futures::join!(busy, panics);
        assert!(busy.is_err());
        fleet.world.expect_rolling_updates(1);
        fleet.finish().await;
    }
}

/// Uses several threads: callers call continuously during one rolling update after the other. Each caller sees versions
/// that never decrease.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_call_is_lost_during_rolling_updates() {
    let fleet = Fleet::start().await;
    let (server, id) = first_version(&fleet, Vec::new()).await;
    let callers = (0..8_u64).map(|caller| {
        let (runtime, id) = (fleet.runtime.clone(), id.clone());
        tokio::spawn(async move {
            let mut seen = 0;
            while seen < 20 {
                let answer: Value = call(&runtime, &id, "env", json!({"name": "VERSION"}), None).await.unwrap();
                let version = answer["content"][0]["text"].as_str().unwrap().parse::<u64>().unwrap();
                assert!(version >= seen, "version {version} after {seen}");
                seen = version;
                sleep(seconds((caller % 3) as f64 / 1000.0)).await;
            }
        })
    });
    let callers: Vec<_> = callers.collect();
    for number in 2..=20 {
        roll_out(&fleet, &server, number).await;
        fleet.until_view(&id, |view| view.spec.env["VERSION"].expose() == number.to_string()).await;
    }
    for caller in join_all(callers).await {
        caller.unwrap();
    }
    assert_eq!(fleet.world.openings(&id).len(), 20);
    fleet.world.expect_rolling_updates(19);
    fleet.finish().await;
}
