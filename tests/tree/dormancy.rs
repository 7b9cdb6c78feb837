//! Dormancy of idle servers, and how calls wake them.

use std::task::Poll;

use futures::future::join_all;
use mcp_satellite::connect::sim::{SimPlan, SimScript};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use mcp_satellite_actors::{InstallOutcome, UninstallOutcome};
use serde_json::json;
use testkit::fleet::{Fleet, LONG, Server, call, seconds, tenths};
use tokio::time::{Instant, sleep};

/// Handles SIGTERM after a delay.
fn slow_to_terminate(delay: f64) -> SimScript {
    SimScript { sigterm_delay: Some(seconds(delay)), ..SimScript::default() }
}

/// Waits until the instance is dormant. Returns the time that took, in seconds.
async fn until_dormant(fleet: &Fleet, id: &InstanceId) -> f64 {
    let began = Instant::now();
    fleet.until_view(id, |view| view.dormant).await;
    tenths(began.elapsed())
}

#[tokio::test(start_paused = true)]
async fn an_uncalled_server_becomes_dormant_at_the_sixth_sweep_with_its_tools_listed() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    let pid = fleet.pid(&id);
    assert_eq!(until_dormant(&fleet, &id).await, 180.0);
    let view = fleet.view(&id);
    assert_eq!((view.status, view.requested_state, view.pid), (Status::Online, RequestedState::Running, None));
    assert_eq!(view.offered_catalogue().unwrap().tools.len(), 3);
    assert_eq!(fleet.world.sim.alive_count(), 0, "the process is gone");
    let exits = view.exits_in_window(Instant::now().into_std());
    assert_eq!((view.restarts, exits), (0, 0), "dormancy counts no exit");

    let events = fleet.event_data(&id, "mcp.server.dormant").await;
    assert_eq!(events.len(), 1);
    assert_eq!((&events[0]["pid"], &events[0]["idle_duration_seconds"]), (&json!(pid), &json!(180)));
    assert_eq!(events[0]["last_activity_at"], "2026-11-21T06:33:00.000Z");
    for other in ["mcp.server.stopped", "mcp.server.exited", "mcp.server.crashed"] {
        assert!(fleet.event_data(&id, other).await.is_empty(), "{other}");
    }
    let statuses = fleet.statuses(&id).await;
    assert_eq!(statuses.last().unwrap().0, "online");
    sleep(seconds(3600.0)).await;
    assert_eq!(fleet.world.openings(&id).len(), 1, "only a call wakes it");
    assert_eq!(fleet.statuses(&id).await, statuses, "the tools stay listed");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_wakes_a_dormant_server_without_reading_its_lists() {
    let fleet = Fleet::start().await;
    let slow = SimScript { handshake_delay: seconds(2.0), ..SimScript::default() };
    // Its lists cannot be read any more: a wake that reads them would never complete.
    let awake = SimScript { list_error: true, ..slow };
    let id = fleet.online(Server::new("a").plans([SimScript::default().into(), awake.into()])).await;
    until_dormant(&fleet, &id).await;
    sleep(seconds(100.0)).await;
    let began = Instant::now();
    let answer = fleet.call(&id, "echo", json!({"text": "hello"})).await.unwrap();
    assert_eq!(answer["structuredContent"]["text"], "hello");
    assert_eq!(tenths(began.elapsed()), 2.0, "only the handshake takes time");
    let view = fleet.view(&id);
    assert_eq!((view.dormant, view.status), (false, Status::Online));
    let respawned = fleet.event_data(&id, "mcp.server.respawned").await;
    assert_eq!(respawned.len(), 1);
    assert_eq!(respawned[0]["pid"], json!(view.pid));
    assert_eq!(respawned[0]["dormant_duration_seconds"], 100);
    assert_eq!(respawned[0]["respawn_duration_ms"], 2000);
    assert_eq!(fleet.event_data(&id, "mcp.tools.discovered").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn calls_messages_and_ends_of_calls_postpone_dormancy() {
    let fleet = Fleet::start().await;
    let chatty = SimScript { list_changed_after: Some(seconds(100.0)), ..SimScript::default() };
    let (called, chatty) = (Server::new("called"), Server::new("chatty").script(chatty));
    let id = fleet.online(called.clone()).await;
    sleep(seconds(31.0)).await;
    fleet.call(&id, "echo", json!({"text": 1})).await.unwrap();
    assert_eq!(until_dormant(&fleet, &id).await, 209.0, "the sweep at 210 s came a second too early");

    let id = fleet.online(chatty).await;
    assert_eq!(until_dormant(&fleet, &id).await, 300.0, "its notification after 100 s counts as activity");

    // The call is in flight for 400 s; its end counts as activity, too.
    let long = Server::new("long").policy(|policy| policy.session.request_timeout_max = seconds(1000.0));
    let id = fleet.online(long).await;
    let call = fleet.call_within(&id, "sleep", json!({"ms": 400_000}), Some(seconds(1000.0)));
    let asleep = until_dormant(&fleet, &id);
    let (answer, after) = futures::join!(call, asleep);
    assert!(answer.is_ok(), "a call in flight keeps it awake: {answer:?}");
    assert_eq!(after, 600.0, "180 s after 400 s, at the next sweep");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_timed_out_call_counts_as_activity_until_its_deadline() {
    let fleet = Fleet::start().await;
    let mute = SimScript { hang_calls: true, ..SimScript::default() };
    // No ping of the watchdog: its response would count as activity.
    let server = Server::new("a").script(mute).policy(|policy| policy.watchdog.silence = LONG);
    let id = fleet.online(server).await;
    let call = fleet.call_within(&id, "echo", json!({}), Some(seconds(215.0)));
    let (answer, after) = futures::join!(call, until_dormant(&fleet, &id));
    assert!(matches!(answer, Err(CallError::TimedOut { .. })), "{answer:?}");
    assert_eq!(after, 420.0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn repeated_list_requests_do_not_keep_a_server_awake() {
    let fleet = Fleet::start().await;
    let unread = SimScript { resources_error: true, ..SimScript::default() };
    let server = Server::new("a").script(unread).policy(|policy| policy.reconnect.backoff_max = seconds(60.0));
    let id = fleet.online(server).await;
    assert_eq!(until_dormant(&fleet, &id).await, 180.0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_policy_sets_idle_time_grace_and_sweep_interval() {
    let fleet = Fleet::start().await;
    for (name, [idle, grace, sweep], after) in [
        ("idle", [20.0, 0.0, 1.0], 20.0),
        ("grace", [20.0, 45.0, 1.0], 46.0),
        ("sweep", [20.0, 45.0, 50.0], 50.0),
        ("all", [1.0, 1.0, 0.5], 1.5),
    ] {
        let server = Server::new(name).policy(|policy| {
            policy.idle.idle = seconds(idle);
            policy.idle.grace = seconds(grace);
            policy.idle.sweep = seconds(sweep);
        });
        let id = fleet.online(server).await;
        assert_eq!(until_dormant(&fleet, &id).await, after, "{name}");
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_always_on_server_never_sleeps() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a").always_on()).await;
    let pid = fleet.pid(&id);
    sleep(seconds(24.0 * 3600.0)).await;
    assert_eq!((fleet.pid(&id), fleet.view(&id).dormant), (pid, false));
    assert!(fleet.event_data(&id, "mcp.server.dormant").await.is_empty());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_during_falling_asleep_waits_for_the_exit_and_wakes_the_server() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a").script(slow_to_terminate(5.0))).await;
    let old = fleet.view(&id).port.clone().unwrap();
    sleep(seconds(181.0)).await;
    assert!(!old.is_open(), "the old port takes no calls");
    assert_eq!(fleet.world.sim.alive_count(), 1, "the process is still alive");
    let began = Instant::now();
    let answers = join_all((0..20).map(|nth| fleet.call(&id, "echo", json!({"text": nth})))).await;
    for (nth, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer.unwrap()["structuredContent"]["text"], nth);
    }
    assert_eq!(tenths(began.elapsed()), 1.0, "one second of its termination is left");
    assert_eq!(fleet.world.openings(&id).len(), 2);
    let kinds = |kind| fleet.event_data(&id, kind);
    assert_eq!((kinds("mcp.server.dormant").await.len(), kinds("mcp.server.respawned").await.len()), (1, 1));
    assert_eq!(fleet.view(&id).exits_in_window(Instant::now().into_std()), 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_with_a_short_deadline_succeeds_although_the_process_ignores_sigterm() {
    let fleet = Fleet::start().await;
    let stubborn = SimScript { ignore_sigterm: true, ignore_eof: true, ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(stubborn)).await;
    sleep(seconds(182.0)).await;
    assert_eq!((fleet.view(&id).dormant, fleet.world.sim.alive_count()), (false, 1), "it is still falling asleep");
    let answer = fleet.call_within(&id, "echo", json!({"text": 1}), Some(seconds(5.0))).await;
    assert!(answer.is_ok(), "{answer:?}");
    assert_eq!(fleet.view(&id).exits_in_window(Instant::now().into_std()), 0, "dormancy counts no exit");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_wake_interrupted_by_a_team_panic_is_repeated_for_its_caller() {
    for permits in [8, 1] {
        let fleet = Fleet::with(|options| options.start_permits = permits).await;
        let slow = SimScript { handshake_delay: seconds(20.0), ..SimScript::default() };
        let plans = [SimScript::default(), slow, SimScript::default()].map(SimPlan::from);
        let id = fleet.online(Server::new("a").plans(plans)).await;
        until_dormant(&fleet, &id).await;
        let before = fleet.statuses(&id).await.len();
        if permits == 1 {
            // The wake then waits for a permit, during which the view of the instance is published.
            let mute = SimScript { handshake_never: true, ..SimScript::default() };
            let other = fleet.add(Server::of("other", "mute").script(mute)).await;
            fleet.world.until_openings(&other, 1).await;
        }
        let panics = async {
            sleep(seconds(1.0)).await;
            assert_eq!(fleet.runtime.start(&id).await, Ok(()));
            fleet.runtime.panic(mcp_satellite_actors::RuntimePart::Team("acme".into()));
        };
        let (answer, ()) = futures::join!(fleet.call(&id, "echo", json!({"text": 1})), panics);
        assert!(answer.is_ok(), "{answer:?}");
        let statuses = fleet.statuses(&id).await;
        assert!(statuses[before..].iter().all(|(status, _)| status == "online"), "{statuses:?}");
        assert!(fleet.event_data(&id, "mcp.server.restarted").await.is_empty());
        assert_eq!(fleet.event_data(&id, "mcp.tools.discovered").await.len(), 1);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_supervisor_dormant_instances_are_still_shown_online_and_dormant() {
    let fleet = Fleet::start().await;
    let asleep = fleet.online(Server::new("asleep")).await;
    sleep(seconds(60.0)).await;
    let falling = fleet.online(Server::new("falling").script(slow_to_terminate(5.0))).await;
    sleep(seconds(181.0)).await;
    // After its second death in a row a supervisor is replaced only after five seconds.
    for _ in 0..2 {
        fleet.runtime.panic(mcp_satellite_actors::RuntimePart::Team("acme".into()));
        sleep(seconds(0.5)).await;
    }
    for id in [&asleep, &falling] {
        let view = fleet.view(id);
        assert_eq!((view.status, view.dormant, view.pid), (Status::Online, true, None));
        let found = fleet.runtime.uninstall(id).await;
        assert_eq!(found, Ok(UninstallOutcome { active: false, dormant: true }));
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn without_a_supervisor_an_instance_that_falls_asleep_stays_online() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("falling").script(slow_to_terminate(5.0))).await;
    fleet.until(&id, Status::Online).await;
    fleet.runtime.panic(mcp_satellite_actors::RuntimePart::Team("acme".into()));
    fleet.until_view(&id, |view| view.restarts == 1 && view.status == Status::Online).await;
    sleep(seconds(181.0)).await;
    assert_eq!((fleet.view(&id).dormant, fleet.world.sim.alive_count()), (false, 1));
    fleet.runtime.panic(mcp_satellite_actors::RuntimePart::Team("acme".into()));
    sleep(seconds(0.5)).await;
    let view = fleet.view(&id);
    assert_eq!((view.status, view.dormant, view.pid), (Status::Online, true, None));
    assert_eq!(view.offered_catalogue().unwrap().tools.len(), 3);
    fleet.finish().await;
}

/// Lets each ready task take one step. tokio's `yield_now` would let them run until they wait.
pub(crate) async fn one_step() {
    let mut stepped = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut stepped, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_call_at_any_step_of_falling_asleep_succeeds() {
    let fleet = Fleet::start().await;
    // Falling asleep takes less than a millisecond of paused time. The call comes before it, after it and at each step
    // in between, where the caller still sees the previous snapshot.
    for steps in 0..60 {
        let id = fleet.online(Server::new(&format!("s{steps}"))).await;
        let (runtime, its) = (fleet.runtime.clone(), id.clone());
        let caller = tokio::spawn(async move {
            sleep(seconds(180.0)).await;
            for _ in 0..steps {
                one_step().await;
            }
            call(&runtime, &its, "echo", json!({"text": 1}), None).await
        });
        let answer = caller.await.unwrap();
        assert!(answer.is_ok(), "after {steps} steps: {answer:?}");
        assert!(fleet.world.openings(&id).len() <= 2);
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn two_hundred_concurrent_calls_wake_one_process() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    until_dormant(&fleet, &id).await;
    let answers = join_all((0..200).map(|nth| fleet.call(&id, "echo", json!({"text": nth})))).await;
    for (nth, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer.unwrap()["structuredContent"]["text"], nth);
    }
    assert_eq!(fleet.world.openings(&id).len(), 2);
    assert_eq!(fleet.event_data(&id, "mcp.server.respawned").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn repeated_sleep_and_wake_cycles_count_no_crash() {
    let fleet = Fleet::start().await;
    let id = fleet.online(Server::new("a")).await;
    for _ in 0..10 {
        assert_eq!(until_dormant(&fleet, &id).await, 180.0);
        assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    }
    let view = fleet.view(&id);
    assert_eq!((view.restarts, view.exits_in_window(Instant::now().into_std())), (0, 0));
    assert_eq!(fleet.event_data(&id, "mcp.server.respawned").await.len(), 10);
    assert!(fleet.event_data(&id, "mcp.server.restarted").await.is_empty());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_wake_counts_as_a_crash_and_waits_for_the_restart_delay() {
    let fleet = Fleet::start().await;
    let broken = SimScript { exit_before_handshake: true, exit_code: 1, ..SimScript::default() };
    let plans = [SimScript::default(), broken.clone(), SimScript::default(), SimScript::default()].map(SimPlan::from);
    let id = fleet.online(Server::new("a").plans(plans)).await;
    until_dormant(&fleet, &id).await;
    let began = Instant::now();
    assert!(fleet.call(&id, "echo", json!({"text": 1})).await.is_ok());
    assert_eq!(tenths(began.elapsed()), 1.0);
    let view = fleet.view(&id);
    assert_eq!((view.dormant, view.exits_in_window(Instant::now().into_std())), (false, 1));
    let statuses = fleet.statuses(&id).await;
    assert!(statuses.iter().any(|(status, _)| status == "connecting"), "a failed wake ends dormancy");
    assert_eq!(fleet.event_data(&id, "mcp.server.restarted").await.len(), 1);

    let id = fleet.online(Server::new("b").plans([SimScript::default(), broken].map(SimPlan::from))).await;
    until_dormant(&fleet, &id).await;
    let refused = fleet.call(&id, "echo", json!({"text": 1})).await;
    assert!(matches!(refused, Err(CallError::Refused { status: Status::PermanentlyFailed, .. })), "{refused:?}");
    assert_eq!(fleet.world.openings(&id).len(), 4, "the first start and three that failed");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failing_or_forced_exit_into_dormancy_is_not_a_crash() {
    let fleet = Fleet::start().await;
    let rude = SimScript { exit_code: 3, ..slow_to_terminate(1.0) };
    let stubborn = SimScript { ignore_sigterm: true, ignore_eof: true, ..SimScript::default() };
    for (name, script, after) in [("rude", rude, 181.0), ("stubborn", stubborn, 190.0)] {
        let id = fleet.online(Server::new(name).script(script)).await;
        assert_eq!(until_dormant(&fleet, &id).await, after);
        assert!(fleet.event_data(&id, "mcp.server.crashed").await.is_empty());
        assert_eq!(fleet.view(&id).exits_in_window(Instant::now().into_std()), 0);
    }
    assert_eq!(fleet.world.sim.alive_count(), 0);
    fleet.finish().await;
}

/// Sends every command to instances that fall asleep or are dormant.
async fn assert_commands_succeed(script: SimScript, seconds_after: f64, active: bool) {
    let fleet = Fleet::start().await;
    let server = |name: &str| Server::new(name).script(script.clone());
    let mut ids = Vec::new();
    for name in ["stopped", "restarted", "updated", "uninstalled", "started"] {
        ids.push(fleet.add(server(name)).await);
    }
    for id in &ids {
        fleet.until(id, Status::Online).await;
    }
    let [stopped, restarted, updated, uninstalled, started] = &ids[..] else { unreachable!() };
    sleep(seconds(seconds_after)).await;
    assert_eq!(fleet.world.sim.alive_count(), if active { 5 } else { 0 });
    for id in &ids {
        assert_eq!(fleet.view(id).port.as_ref().map(|_| ()), None, "it takes no calls");
    }

    assert_eq!(fleet.runtime.start(started).await, Ok(()), "a dormant server is already started");
    assert_eq!(fleet.runtime.restart(restarted).await, Ok(()));
    let update = server("updated").env("NEW", "1").spec;
    assert_eq!(fleet.runtime.install(update).await, Ok(InstallOutcome::Updated));
    let found = fleet.runtime.uninstall(uninstalled).await;
    assert_eq!(found, Ok(UninstallOutcome { active, dormant: !active }));
    assert!(fleet.runtime.status(uninstalled).is_none());
    fleet.runtime.stop(stopped).await.unwrap();
    let view = fleet.view(stopped);
    assert_eq!((view.status, view.requested_state, view.dormant), (Status::Offline, RequestedState::Stopped, false));
    let refused = fleet.call(stopped, "echo", json!({})).await;
    assert!(matches!(refused, Err(CallError::Refused { .. })), "only a start wakes it: {refused:?}");

    fleet.until_view(restarted, |view| view.status == Status::Online && view.port.is_some()).await;
    fleet.until_view(updated, |view| view.status == Status::Online && view.port.is_some()).await;
    let answer = fleet.call(updated, "env", json!({"name": "NEW"})).await.unwrap();
    assert_eq!(answer["content"][0]["text"], "1");
    let openings = ids.iter().map(|id| fleet.world.openings(id).len()).collect::<Vec<_>>();
    assert_eq!(openings, [1, 2, 2, 1, 1]);
    fleet.until_view(started, |view| view.dormant).await;
    assert!(fleet.call(started, "echo", json!({"text": 1})).await.is_ok());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn commands_are_carried_out_on_a_dormant_server() {
    assert_commands_succeed(SimScript::default(), 200.0, false).await;
}

#[tokio::test(start_paused = true)]
async fn commands_are_carried_out_while_a_server_falls_asleep() {
    assert_commands_succeed(slow_to_terminate(5.0), 181.0, true).await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_dormant_servers_and_those_that_fall_asleep() {
    let fleet = Fleet::start().await;
    let asleep = fleet.online(Server::new("asleep")).await;
    sleep(seconds(60.0)).await;
    fleet.online(Server::new("falling").script(slow_to_terminate(5.0))).await;
    sleep(seconds(181.0)).await;
    assert!(fleet.view(&asleep).dormant);
    assert_eq!(fleet.world.sim.alive_count(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn dormant_instances_stay_dormant_after_the_death_of_their_supervisor() {
    let fleet = Fleet::start().await;
    let asleep = fleet.online(Server::new("asleep")).await;
    sleep(seconds(60.0)).await;
    let falling = fleet.online(Server::new("falling").script(slow_to_terminate(5.0))).await;
    sleep(seconds(181.0)).await;
    fleet.runtime.panic(mcp_satellite_actors::RuntimePart::Team("acme".into()));
    for id in [&asleep, &falling] {
        let view = fleet.until_view(id, |view| view.dormant).await;
        assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 3));
    }
    sleep(seconds(600.0)).await;
    assert_eq!(fleet.world.all_openings().len(), 2);
    for id in [&asleep, &falling] {
        assert!(fleet.call(id, "echo", json!({"text": 1})).await.is_ok());
    }
    fleet.finish().await;
}

/// Uses several threads and real time: the server falls asleep and is called continuously.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_call_is_lost_while_a_server_falls_asleep_and_wakes() {
    let fleet = Fleet::start().await;
    let server = Server::new("a").policy(|policy| {
        let millisecond = seconds(0.001);
        (policy.idle.idle, policy.idle.grace, policy.idle.sweep) = (millisecond, seconds(0.0), millisecond);
    });
    let id = fleet.online(server).await;
    let callers = (0..8_u64).map(|caller| {
        let (runtime, id) = (fleet.runtime.clone(), id.clone());
        tokio::spawn(async move {
            for nth in 0..150_u64 {
                let text = caller * 1000 + nth;
                let answer = call(&runtime, &id, "echo", json!({"text": text}), None).await.unwrap();
                assert_eq!(answer["structuredContent"]["text"], text);
                // Each caller has its own rhythm, so that calls meet every moment of falling asleep and waking.
                sleep(seconds(((nth * 7 + caller * 3) % 13) as f64 / 2000.0)).await;
            }
        })
    });
    for caller in join_all(callers).await {
        caller.unwrap();
    }
    fleet.until_view(&id, |view| view.dormant).await;
    let slept = fleet.event_data(&id, "mcp.server.dormant").await.len();
    assert!(slept > 1, "it was never woken");
    assert_eq!(fleet.event_data(&id, "mcp.server.respawned").await.len(), slept - 1);
    assert_eq!(fleet.world.openings(&id).len(), slept);
    fleet.finish().await;
}
