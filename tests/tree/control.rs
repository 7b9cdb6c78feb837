//! Commands: stop, start, restart, update, uninstall and shutdown.

use std::time::Duration;

use futures::future::join_all;
use mcp_satellite::connect::sim::{Grandchild, SimPlan, SimScript};
use mcp_satellite_actors::model::exit::{CallError, CallFate, RuntimeEnd};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use mcp_satellite_actors::{ControlError, InstallOutcome, ShutdownReport, UninstallOutcome, start};
use serde_json::json;
use testkit::fleet::{Fleet, LONG, Server, exits, options, seconds, tenths};
use tokio::time::{Instant, sleep, timeout};

fn stubborn() -> SimScript {
    SimScript { ignore_sigterm: true, ignore_eof: true, ..SimScript::default() }
}

/// Handles SIGTERM after a delay.
fn slow_to_terminate(delay: f64) -> SimScript {
    SimScript { sigterm_delay: Some(seconds(delay)), ..SimScript::default() }
}

#[tokio::test(start_paused = true)]
async fn a_stop_wins_over_a_restart_under_way() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a").script(slow_to_terminate(5.0))).await;
    fleet.runtime.restart(&id).await.unwrap();
    sleep(seconds(1.0)).await;
    fleet.runtime.stop(&id).await.unwrap();
    assert_eq!(fleet.world.sim.alive_count(), 0, "a stop returns when the process is gone");
    sleep(seconds(3600.0)).await;
    assert_eq!(fleet.world.openings(&id).len(), 1);
    assert_eq!((fleet.view(&id).status, fleet.view(&id).requested_state), (Status::Offline, RequestedState::Stopped));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_cancels_a_restart_delay_a_queued_start_and_dormancy() {
    let fleet = Fleet::with(|options| options.start_permits = 1).await;
    let crashed = fleet.online(Server::new("crashed")).await;
    let asleep = fleet.online(Server::new("asleep")).await;
    fleet.server(&crashed).exit(1);
    fleet.server(&asleep).exit(0);
    fleet.until_view(&asleep, |view| view.dormant).await;
    fleet.until(&crashed, Status::Connecting).await;
    let mute = SimScript { handshake_never: true, ..SimScript::default() };
    let holding = fleet.add(Server::new("holding").script(mute)).await;
    let queued = fleet.add(Server::new("queued")).await;
    for id in [&crashed, &asleep, &queued, &holding] {
        fleet.runtime.stop(id).await.unwrap();
    }
    sleep(seconds(600.0)).await;
    for (id, openings) in [(&crashed, 1), (&asleep, 1), (&holding, 1), (&queued, 0)] {
        assert_eq!(fleet.world.openings(id).len(), openings, "{id}");
        let view = fleet.view(id);
        assert_eq!(
            (view.status, view.requested_state, view.dormant),
            (Status::Offline, RequestedState::Stopped, false)
        );
        assert!(matches!(fleet.call(id, "echo", json!({})).await, Err(CallError::Refused { .. })));
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_hangs_can_be_stopped_at_once() {
    let fleet = Fleet::start().await;
    let stuck = SimPlan { open_delay: seconds(3600.0), ..SimPlan::new(SimScript::default()) };
    let id = fleet.add(Server::new("a").plans([stuck])).await;
    fleet.world.until_openings(&id, 1).await;
    let began = Instant::now();
    fleet.runtime.stop(&id).await.unwrap();
    assert_eq!(tenths(began.elapsed()), 0.0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn only_a_start_undoes_a_stop() {
    let fleet = Fleet::start().await;
    let server = Server::new("a");
    let id = fleet.online(server.clone()).await;
    fleet.runtime.stop(&id).await.unwrap();
    fleet.runtime.stop(&id).await.unwrap();
    let message = "cannot restart `files-acme-alice-a`: it was stopped on request".to_owned();
    let remedy = Some(Remedy::Start);
    assert_eq!(fleet.runtime.restart(&id).await, Err(ControlError::Refused { message, remedy }));
    assert_eq!(fleet.runtime.install(server.env("NEW", "1").spec).await, Ok(InstallOutcome::Updated));
    sleep(seconds(60.0)).await;
    assert_eq!(fleet.world.openings(&id).len(), 1, "neither a restart nor an update nor a call starts it");
    fleet.runtime.start(&id).await.unwrap();
    fleet.until(&id, Status::Online).await;
    let answer = fleet.call(&id, "env", json!({"name": "NEW"})).await.unwrap();
    assert_eq!(answer["content"][0]["text"], "1", "started with the updated configuration");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_during_a_stop_supersedes_it() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a").script(slow_to_terminate(5.0))).await;
    let old = fleet.pid(&id);
    let start = async {
        sleep(seconds(1.0)).await;
        fleet.runtime.start(&id).await
    };
    let (stopped, started) = futures::join!(fleet.runtime.stop(&id), start);
    assert_eq!((stopped, started), (Err(ControlError::Superseded), Ok(())));
    fleet.until_replaced(&id, old).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_manual_restart_is_immediate_and_does_not_count_as_crash() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    for _ in 0..5 {
        let old = fleet.pid(&id);
        let began = Instant::now();
        fleet.runtime.restart(&id).await.unwrap();
        fleet.until_replaced(&id, old).await;
        assert_eq!(tenths(began.elapsed()), 0.0);
    }
    assert_eq!(fleet.view(&id).restarts, 5);
    assert!(fleet.event_data(&id, "mcp.server.crashed").await.is_empty());
    let restarted = fleet.event_data(&id, "mcp.server.restarted").await;
    assert_eq!(restarted.len(), 5);
    assert_eq!((&restarted[0]["restart_reason"], &restarted[0]["attempt_number"]), (&json!("manual"), &json!(0)));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_fail_before_the_grace_of_a_stop_begins() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a").script(stubborn())).await;
    let stop = async {
        sleep(seconds(1.0)).await;
        fleet.runtime.stop(&id).await
    };
    let began = Instant::now();
    let call = async {
        let answer = fleet.call(&id, "sleep", json!({"ms": 20_000})).await;
        (answer, tenths(began.elapsed()))
    };
    let ((answer, after), stopped) = futures::join!(call, stop);
    assert_eq!(stopped, Ok(()));
    assert_eq!(answer.unwrap_err().fate(), Some(CallFate::MaybeExecuted));
    assert_eq!(after, 1.0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ignores_sigterm_is_killed_after_exactly_the_grace() {
    let fleet = Fleet::start().await;
    for (name, grace) in [("short", 3.0), ("default", 10.0)] {
        let server = Server::new(name).script(stubborn());
        let id = fleet.online(server.policy(|policy| policy.session.terminate_grace = seconds(grace))).await;
        let began = Instant::now();
        fleet.runtime.stop(&id).await.unwrap();
        assert_eq!(tenths(began.elapsed()), grace);
        let stopped = fleet.event_data(&id, "mcp.server.stopped").await;
        assert_eq!((&stopped[0]["forced"], &stopped[0]["signal"]), (&json!(true), &json!(9)));
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_within_the_grace_is_not_forced() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a").script(SimScript { exit_code: 143, ..slow_to_terminate(9.0) })).await;
    let began = Instant::now();
    fleet.runtime.stop(&id).await.unwrap();
    assert_eq!(tenths(began.elapsed()), 9.0);
    let stopped = fleet.event_data(&id, "mcp.server.stopped").await;
    assert_eq!((&stopped[0]["forced"], &stopped[0]["exit_code"]), (&json!(false), &json!(143)));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_grandchild_that_ignores_sigterm_is_killed_after_the_grace() {
    let fleet = Fleet::start().await;
    let script = SimScript { grandchild: Some(Grandchild::IgnoreTerm), ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script)).await;
    let began = Instant::now();
    fleet.runtime.stop(&id).await.unwrap();
    assert_eq!(tenths(began.elapsed()), 10.0);
    assert_eq!(fleet.world.sim.alive_count(), 0);
    assert_eq!(fleet.event_data(&id, "mcp.server.stopped").await[0]["forced"], true);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn grandchildren_of_a_crashed_server_are_killed_before_the_restart() {
    let fleet = Fleet::start().await;
    let script = SimScript { grandchild: Some(Grandchild::IgnoreTerm), ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script)).await;
    let old = fleet.pid(&id);
    fleet.server(&id).exit(1);
    fleet.until_replaced(&id, old).await;
    assert_eq!(fleet.world.sim.alive_count(), 1, "only the new process, no grandchild of the old one");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn fifty_stubborn_servers_are_stopped_in_one_grace() {
    let fleet = Fleet::start().await;
    let servers = (0..50).map(|nth| fleet.online(Server::new(&format!("s{nth}")).script(stubborn())));
    let ids = join_all(servers).await;
    let began = Instant::now();
    for stopped in join_all(ids.iter().map(|id| fleet.runtime.stop(id))).await {
        stopped.unwrap();
    }
    assert_eq!(tenths(began.elapsed()), 10.0);
    assert_eq!(fleet.world.sim.alive_count(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_all_teams_in_parallel_and_reports_every_stop() {
    let fleet = Fleet::start().await;
    let mut ids = Vec::new();
    for nth in 0..40 {
        let (team, name) = (format!("team{}", nth % 4), format!("s{nth}"));
        ids.push(fleet.online(Server::of(&team, &name).script(stubborn())).await);
    }
    let slow = SimScript { handshake_never: true, ..stubborn() };
    fleet.add(Server::new("starting").script(slow)).await;
    fleet.until(&fleet.add(Server::new("failed").script(exits(0.1, 1))).await, Status::PermanentlyFailed).await;
    let (sink, began) = (fleet.sink.clone(), Instant::now());
    let calls = join_all(ids.iter().map(|id| fleet.call(id, "sleep", json!({"ms": 20_000}))));
    let shut_down = async {
        sleep(seconds(1.0)).await;
        fleet.runtime.shutdown().await
    };
    let (answers, report) = futures::join!(calls, shut_down);
    assert!(report.in_time);
    assert!(began.elapsed() <= seconds(1.0 + 10.0 + 5.0), "{:?}", began.elapsed());
    assert!(answers.iter().all(Result::is_err), "every caller got an error");
    assert_eq!(fleet.world.sim.alive_count(), 0);
    let refused = fleet.runtime.install(Server::new("late").spec).await;
    assert_eq!(refused, Err(ControlError::Closing));
    let events = sink.accepted();
    let stopped = events.iter().filter(|event| event.event.kind() == "mcp.server.stopped").count();
    assert_eq!(stopped, 41, "one event per stopped server");
    fleet.finish_after_shutdown().await;
}

/// Returns `(active, dormant)` of each event about the removal of an instance.
pub(crate) async fn removals(fleet: &Fleet, id: &InstanceId) -> Vec<(bool, bool)> {
    let stopped = fleet.event_data(id, "mcp.server.stopped").await;
    let removed = stopped.iter().filter(|event| event["kind"] == "uninstall");
    removed.map(|event| (event["active"].as_bool().unwrap(), event["dormant"].as_bool().unwrap())).collect()
}

#[tokio::test(start_paused = true)]
async fn a_removal_emits_one_event_whether_or_not_the_instance_is_active() {
    let fleet = Fleet::start().await;
    let remote = fleet.online(Server::remote("remote")).await;
    let away = fleet.online(Server::remote("away")).await;
    fleet.remote(&away).kill(FailureKind::Refused);
    fleet.remote(&away).report_session_lost(FailureKind::Cut);
    fleet.until(&away, Status::Offline).await;
    let stopped = fleet.online(Server::new("stopped")).await;
    fleet.runtime.stop(&stopped).await.unwrap();
    let incomplete = fleet.add(Server::new("incomplete").missing("KEY")).await;
    for (id, active) in [(&remote, true), (&away, false), (&stopped, false), (&incomplete, false)] {
        fleet.runtime.uninstall(id).await.unwrap();
        assert_eq!(removals(&fleet, id).await, [(active, false)], "{id}");
    }
    for id in [&remote, &away] {
        let gone = fleet.event_data(id, "mcp.server.disconnected").await;
        assert_eq!(gone.last().unwrap()["was_intentional"], true, "{id}");
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_uninstall_returns_the_previous_state_and_clears_the_history() {
    let fleet = Fleet::start().await;
    let running = fleet.online(Server::new("running")).await;
    let asleep = fleet.online(Server::new("asleep").script(exits(1.0, 0))).await;
    fleet.until_view(&asleep, |view| view.dormant).await;
    let failed = fleet.add(Server::new("failed").script(exits(0.1, 1))).await;
    fleet.until(&failed, Status::PermanentlyFailed).await;
    for (id, active, dormant) in [(&running, true, false), (&asleep, false, true), (&failed, false, false)] {
        assert_eq!(fleet.runtime.uninstall(id).await, Ok(UninstallOutcome { active, dormant }), "{id}");
        assert_eq!(fleet.runtime.uninstall(id).await, Err(ControlError::NotFound));
        assert_eq!(fleet.runtime.start(id).await, Err(ControlError::NotFound));
    }
    assert_eq!(fleet.world.sim.alive_count(), 0);
    assert!(fleet.runtime.snapshot().is_empty(), "the snapshot is up to date when the uninstall returns");
    for (id, active, dormant) in [(&running, true, false), (&asleep, false, true), (&failed, false, false)] {
        assert_eq!(removals(&fleet, id).await, [(active, dormant)], "{id}");
    }

    let again = fleet.online(Server::new("failed")).await;
    let view = fleet.view(&again);
    assert_eq!((view.exits_in_window(Instant::now().into_std()), view.restarts), (0, 0), "no history is left");
    assert_eq!(fleet.event_data(&again, "mcp.server.started").await.len(), 2, "started, not restarted");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_install_during_an_uninstall_creates_a_new_instance_afterwards() {
    let fleet = Fleet::start().await;
    let server = Server::new("a").script(stubborn());
    let id = fleet.online(server.clone()).await;
    let install = async {
        sleep(seconds(1.0)).await;
        fleet.runtime.install(server.clone().spec).await
    };
    let (uninstalled, installed) = futures::join!(fleet.runtime.uninstall(&id), install);
    assert_eq!(uninstalled, Ok(UninstallOutcome { active: true, dormant: false }));
    assert_eq!(installed, Ok(InstallOutcome::New));
    fleet.world.until_openings(&id, 2).await;
    fleet.until(&id, Status::Online).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_update_with_an_equal_configuration_changes_nothing() {
    let fleet = Fleet::start().await;
    let server = Server::new("a").env("KEY", "value");
    let id = fleet.online(server.clone()).await;
    let (pid, event_count) = (fleet.pid(&id), fleet.events_of(&id).await.len());
    assert_eq!(fleet.runtime.install(server.spec).await, Ok(InstallOutcome::Unchanged));
    sleep(seconds(60.0)).await;
    assert_eq!((fleet.pid(&id), fleet.events_of(&id).await.len()), (pid, event_count));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_update_succeeds_right_after_an_install_and_fails_during_an_uninstall() {
    let fleet = Fleet::start().await;
    let server = Server::new("a");
    let id = server.spec.id.clone();
    assert_eq!(fleet.runtime.update(server.spec.clone()).await, Err(ControlError::NotFound));
    fleet.add(server.clone()).await;
    let update = server.env("NEW", "1").spec;
    assert_eq!(fleet.runtime.update(update.clone()).await, Ok(InstallOutcome::Updated), "right after the install");
    fleet.until(&id, Status::Online).await;
    let (uninstalled, updated) = futures::join!(fleet.runtime.uninstall(&id), fleet.runtime.update(update));
    assert!(uninstalled.is_ok());
    assert_eq!(updated, Err(ControlError::NotFound), "an update does not restore an instance during its removal");
    sleep(seconds(60.0)).await;
    assert!(fleet.runtime.snapshot().is_empty());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_update_clears_the_catalogue_and_a_restart_keeps_it() {
    let fleet = Fleet::start().await;
    let slow = SimScript { tools: 5, handshake_delay: seconds(5.0), ..SimScript::default() };
    let server = Server::new("a").plans([SimScript::default().into(), slow.into()]);
    let id = fleet.online(server.clone()).await;
    let tools = |view: &mcp_satellite_actors::model::snapshot::InstanceView| {
        view.catalogue.as_ref().map(|catalogue| catalogue.tools.len())
    };
    fleet.runtime.restart(&id).await.unwrap();
    let view = fleet.until_view(&id, |view| view.message.as_deref() == Some("starting")).await;
    assert_eq!((tools(&view), view.offered_catalogue().is_none()), (Some(3), true));
    assert_eq!(tools(&*fleet.until(&id, Status::Online).await), Some(5));
    let updated = fleet.event_data(&id, "mcp.tools.updated").await;
    assert_eq!(updated.len(), 1);
    assert_eq!(updated[0]["added_tools"], json!(["tool_4", "tool_5"]));
    assert_eq!((&updated[0]["removed_tools"], &updated[0]["total_tools"]), (&json!([]), &json!(5)));

    fleet.runtime.install(server.env("NEW", "1").spec).await.unwrap();
    let view = fleet.until_view(&id, |view| view.message.as_deref() == Some("starting")).await;
    assert_eq!(tools(&view), None);
    fleet.until(&id, Status::Online).await;
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_announced_change_of_tools_is_read_after_the_debounce() {
    let fleet = Fleet::start().await;
    let script = SimScript { list_changed_after: Some(seconds(5.0)), ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script)).await;
    let began = Instant::now();
    fleet.until_view(&id, |view| view.offered_catalogue().is_some_and(|catalogue| catalogue.tools.len() == 4)).await;
    let after = began.elapsed();
    assert!((Duration::from_millis(5250)..Duration::from_millis(5300)).contains(&after), "{after:?}");
    let updated = fleet.event_data(&id, "mcp.tools.updated").await;
    assert_eq!((&updated[0]["added_tools"], &updated[0]["total_tools"]), (&json!(["tool_4"]), &json!(4)));
    assert_eq!(fleet.statuses(&id).await.last().unwrap().0, "online", "the status does not change");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn all_pages_of_the_tools_are_read_in_order_up_to_the_limit() {
    let fleet = Fleet::start().await;
    let script = SimScript { tools: 250, page_size: 20, ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script.clone())).await;
    let view = fleet.view(&id);
    let names: Vec<_> = view.offered_catalogue().unwrap().tools.iter().map(|tool| tool.name.to_string()).collect();
    assert_eq!(names.len(), 250);
    assert_eq!((&*names[2], &*names[3], &*names[249]), ("sleep", "tool_4", "tool_250"));
    let limited = Server::new("b").script(script).policy(|policy| policy.session.list_pages_max = 3);
    let id = fleet.online(limited).await;
    assert_eq!(fleet.view(&id).offered_catalogue().unwrap().tools.len(), 60);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_without_tools_goes_online() {
    let fleet = Fleet::start().await;
    let script = SimScript { no_tools_capability: true, ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script)).await;
    assert_eq!(fleet.view(&id).offered_catalogue().unwrap().tools.len(), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_second_shutdown_returns_the_report_of_the_first() {
    let fleet = Fleet::start().await;
    fleet.online(Server::new("a")).await;
    let first = fleet.runtime.shutdown().await;
    assert_eq!(first, ShutdownReport { events_lost: 0, in_time: true });
    assert_eq!(fleet.runtime.shutdown().await, first);
    assert_eq!(fleet.finish_after_shutdown().await, RuntimeEnd::ShutDown { events_lost: 0, in_time: true });
}

#[tokio::test(start_paused = true)]
async fn waiting_for_an_instance_that_is_not_installed_returns_none() {
    let fleet = Fleet::start().await;
    let unknown = Server::new("unknown").spec.id;
    assert!(timeout(LONG, fleet.runtime.wait_for(&unknown, |_| true)).await.unwrap().is_none());
    let id = fleet.add(Server::new("a")).await;
    assert!(fleet.runtime.wait_for(&id, |_| true).await.is_some(), "an instance that was just installed is found");
    fleet.until(&id, Status::Online).await;
    let waiting = timeout(LONG, fleet.runtime.wait_for(&id, |view| view.status == Status::Error));
    let (waited, removed) = futures::join!(waiting, fleet.runtime.uninstall(&id));
    assert!(waited.unwrap().is_none() && removed.is_ok(), "{removed:?}");
    fleet.finish().await;
}

type PolicyChange = fn(&mut Policy);

#[tokio::test(start_paused = true)]
async fn an_invalid_policy_is_refused_and_leaves_the_server_running() {
    let fleet = Fleet::start().await;
    let online = Server::new("online");
    let id = fleet.online(online.clone()).await;
    let broken: [(&str, PolicyChange); 4] = [
        ("session.terminate_grace", |policy| policy.session.terminate_grace = Duration::MAX),
        ("session.permit_hold_max", |policy| policy.session.permit_hold_max = Duration::MAX),
        ("watchdog.silence", |policy| policy.watchdog.silence = Duration::MAX),
        ("logs.line_max", |policy| policy.logs.line_max = usize::MAX),
    ];
    for (field, change) in broken {
        for server in [Server::new("new"), online.clone()] {
            let refused = fleet.runtime.install(server.policy(change).spec).await;
            assert!(
                matches!(&refused, Err(ControlError::Refused { message, .. }) if message.contains(field)),
                "{refused:?}"
            );
        }
        let refused = fleet.runtime.update(online.clone().policy(change).spec).await;
        assert!(matches!(refused, Err(ControlError::Refused { .. })), "{refused:?}");
    }
    assert_eq!((fleet.view(&id).status, fleet.view(&id).restarts), (Status::Online, 0));
    assert!(fleet.runtime.server_info(&id, Duration::MAX).await.is_ok());
    fleet.finish().await;

    let (mut options, _, _) = options();
    options.batch.queue_max = usize::MAX;
    let error = start(options).await.err().unwrap();
    assert!(error.to_string().contains("events.queue_max"), "{error}");
}
