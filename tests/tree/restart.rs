//! Restarts after runs that ended without a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite::connect::sim::{SimPlan, SimScript};
use mcp_satellite_actors::InstallOutcome;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{Connectors, OpenError, ProcessConnector, ProcessLink};
use serde_json::json;
use testkit::fleet::{Fleet, Opening, Server, exits, seconds, tenths};
use tokio::time::{Instant, sleep};

const GAVE_UP: &str = "Process crashed 3 times in 5 minutes; last: exited with code 3. Manual restart required.";

fn generous(server: Server) -> Server {
    server.policy(|policy| policy.restart.max_crashes = 100)
}

async fn add_until_failed(fleet: &Fleet, server: Server) -> InstanceId {
    let id = fleet.add(server).await;
    fleet.until(&id, Status::PermanentlyFailed).await;
    id
}

#[tokio::test(start_paused = true)]
async fn quick_crashes_are_restarted_after_one_five_and_then_fifteen_seconds() {
    let fleet = Fleet::start().await;
    let id = fleet.add(generous(Server::new("a").script(exits(1.0, 1)))).await;
    fleet.world.until_openings(&id, 6).await;
    assert_eq!(fleet.world.gaps(&id), [2.0, 6.0, 16.0, 16.0, 16.0]);
    let messages: Vec<_> = fleet.statuses(&id).await.into_iter().filter_map(|(_, message)| message).collect();
    for wanted in [
        "restarting in 1 s (attempt 1): exited with code 1",
        "restarting in 5 s (attempt 2): exited with code 1",
        "restarting in 15 s (attempt 3): exited with code 1",
    ] {
        assert!(messages.iter().any(|message| message == wanted), "{wanted}: {messages:?}");
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_run_longer_than_a_minute_is_restarted_at_once() {
    let fleet = Fleet::start().await;
    let (long, short) = (exits(61.0, 1), exits(59.0, 1));
    let plans = [short.clone(), long.clone(), long, short.clone(), short].map(SimPlan::from);
    let id = fleet.add(generous(Server::new("a").plans(plans))).await;
    fleet.world.until_openings(&id, 6).await;
    assert_eq!(fleet.world.gaps(&id), [60.0, 61.0, 61.0, 60.0, 64.0], "a long run resets the delays");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_time_before_initialized_does_not_count_as_uptime() {
    let fleet = Fleet::start().await;
    let script =
        SimScript { start_delay: seconds(65.0), exit_before_handshake: true, exit_code: 1, ..SimScript::default() };
    let patient = |policy: &mut mcp_satellite_actors::model::policy::Policy| {
        policy.session.handshake_timeout = seconds(300.0);
    };
    let id = fleet.add(generous(Server::new("a").script(script)).policy(patient)).await;
    fleet.world.until_openings(&id, 3).await;
    assert_eq!(fleet.world.gaps(&id), [66.0, 70.0]);
    assert_eq!(fleet.event_data(&id, "mcp.server.crashed").await[0]["uptime_seconds"], 0);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn the_third_crash_in_five_minutes_is_a_permanent_failure() {
    let fleet = Fleet::start().await;
    let id = add_until_failed(&fleet, Server::new("a").script(exits(1.0, 3))).await;
    assert_eq!(fleet.view(&id).message.as_deref(), Some(GAVE_UP));
    sleep(seconds(3600.0)).await;
    assert_eq!(fleet.world.openings(&id).len(), 3, "no automatic restart");
    assert_eq!(fleet.view(&id).status, Status::PermanentlyFailed);

    let failures = fleet.event_data(&id, "mcp.server.permanently_failed").await;
    assert_eq!(failures.len(), 1);
    assert_eq!(failures[0]["total_crashes"], 3);
    assert_eq!(failures[0]["last_error"], "exited with code 3");
    assert_eq!(failures[0]["message"], GAVE_UP);
    assert_eq!(failures[0]["failed_at"], "2026-11-21T06:33:09.000Z", "1 + 1 + 1 + 5 + 1 seconds");
    let crashes = fleet.event_data(&id, "mcp.server.crashed").await;
    let reported: Vec<_> = crashes.iter().map(|crash| (&crash["crash_count"], &crash["will_restart"])).collect();
    assert_eq!(reported, [(&json!(1), &json!(true)), (&json!(2), &json!(true)), (&json!(3), &json!(false))]);
    assert_eq!(crashes[0]["exit_code"], 3);
    assert_eq!(crashes[0]["reason"], "exited with code 3");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_manual_restart_clears_a_permanent_failure_and_the_crash_history() {
    let fleet = Fleet::start().await;
    let mut plans = vec![SimPlan::from(exits(1.0, 1)); 5];
    plans.push(SimScript::default().into());
    let id = add_until_failed(&fleet, Server::new("a").plans(plans)).await;
    fleet.runtime.restart(&id).await.unwrap();
    fleet.until_view(&id, |view| view.status == Status::Online && view.exits_in_window(now()) == 2).await;
    sleep(seconds(600.0)).await;
    assert_eq!(fleet.view(&id).status, Status::Online);
    assert_eq!(fleet.world.openings(&id).len(), 6, "two more crashes, then a healthy run");
    assert_eq!(fleet.world.gaps(&id)[3..], [2.0, 6.0], "the delays start again");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_config_update_clears_a_permanent_failure_and_the_crash_history() {
    let fleet = Fleet::start().await;
    let mut plans = vec![SimPlan::from(exits(1.0, 1)); 5];
    plans.push(SimScript::default().into());
    let server = Server::new("a").plans(plans);
    let id = add_until_failed(&fleet, server.clone()).await;
    assert_eq!(fleet.runtime.install(server.spec.clone()).await, Ok(InstallOutcome::Unchanged));
    sleep(seconds(60.0)).await;
    assert_eq!(
        fleet.view(&id).status,
        Status::PermanentlyFailed,
        "an unchanged configuration does not clear the failure"
    );
    assert_eq!(fleet.runtime.install(server.env("FIXED", "yes").spec).await, Ok(InstallOutcome::Updated));
    sleep(seconds(600.0)).await;
    assert_eq!(fleet.view(&id).status, Status::Online);
    assert_eq!(fleet.world.openings(&id).len(), 6);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn old_crashes_leave_the_window() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("a").script(exits(160.0, 1))).await;
    sleep(seconds(2.0 * 3600.0 + 30.0)).await;
    assert_ne!(fleet.view(&id).status, Status::PermanentlyFailed);
    assert_eq!(fleet.world.openings(&id).len(), 46, "one every 160 s: never three in 300 s");
    assert_eq!(fleet.view(&id).exits_in_window(now()), 2);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_listed_server_that_exits_cleanly_is_dormant_until_a_call() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("a").plans([exits(5.0, 0).into(), SimScript::default().into()])).await;
    let view = fleet.until_view(&id, |view| view.dormant).await;
    assert_eq!((view.status, view.pid), (Status::Online, None));
    assert_eq!(view.offered_catalogue().unwrap().tools.len(), 3, "its tools stay listed");
    sleep(seconds(3600.0)).await;
    assert_eq!(fleet.world.openings(&id).len(), 1, "no start without a call");

    let began = Instant::now();
    let answer = fleet.call(&id, "echo", json!({"text": "good morning"})).await.unwrap();
    assert_eq!(answer["structuredContent"]["text"], "good morning");
    assert_eq!(tenths(began.elapsed()), 0.0, "the restart delay is over");
    assert!(!fleet.view(&id).dormant);

    let exited = fleet.event_data(&id, "mcp.server.exited").await;
    assert_eq!(exited.len(), 1);
    assert_eq!((&exited[0]["exit_code"], &exited[0]["will_restart"]), (&json!(0), &json!(false)));
    assert_eq!(exited[0]["uptime_seconds"], 5);
    let respawned = fleet.event_data(&id, "mcp.server.respawned").await;
    assert_eq!(respawned.len(), 1);
    assert_eq!(respawned[0]["dormant_duration_seconds"], 3600);
    assert_eq!(respawned[0]["pid"], json!(fleet.pid(&id)));
    assert!(fleet.event_data(&id, "mcp.server.crashed").await.is_empty());
    let statuses = fleet.statuses(&id).await;
    assert_eq!(
        statuses.iter().filter(|(status, _)| status == "online").count(),
        1,
        "the tools stay listed: {statuses:?}"
    );
    assert_eq!(statuses.last().unwrap().0, "online");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn concurrent_calls_share_one_wake_after_the_restart_delay() {
    let fleet = Fleet::start().await;
    let id = fleet.add(Server::new("a").plans([exits(5.0, 0).into(), SimScript::default().into()])).await;
    fleet.until_view(&id, |view| view.dormant).await;
    let began = Instant::now();
    let calls = (0..20).map(|nth| fleet.call(&id, "echo", json!({"text": nth})));
    for (nth, answer) in futures::future::join_all(calls).await.into_iter().enumerate() {
        assert_eq!(answer.unwrap()["structuredContent"]["text"], nth);
    }
    assert_eq!(tenths(began.elapsed()), 1.0, "a call does not shorten the restart delay");
    assert_eq!(fleet.world.openings(&id).len(), 2);
    assert_eq!(fleet.event_data(&id, "mcp.server.respawned").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_wake_ends_dormancy_and_counts_as_a_crash() {
    let fleet = Fleet::start().await;
    let broken = SimScript { exit_before_handshake: true, exit_code: 1, ..SimScript::default() };
    let plans = [exits(5.0, 0), broken, SimScript::default()].map(SimPlan::from);
    let id = fleet.add(Server::new("a").plans(plans)).await;
    fleet.until_view(&id, |view| view.dormant).await;
    sleep(seconds(60.0)).await;
    let answer = fleet.call(&id, "echo", json!({"text": "up"})).await.unwrap();
    assert_eq!(answer["structuredContent"]["text"], "up", "the caller waits for the restart");
    let view = fleet.view(&id);
    assert_eq!((view.dormant, view.exits_in_window(now())), (false, 2));
    assert_eq!(fleet.event_data(&id, "mcp.server.crashed").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_always_on_server_is_respawned_after_a_clean_exit() {
    let fleet = Fleet::start().await;
    let plans = [exits(5.0, 0).into(), SimScript::default().into()];
    let id = fleet.online(Server::new("a").plans(plans).always_on()).await;
    let first = fleet.pid(&id);
    fleet.until_replaced(&id, first).await;
    assert_eq!(fleet.world.gaps(&id), [6.0]);
    let exited = fleet.event_data(&id, "mcp.server.exited").await;
    assert_eq!(exited[0]["will_restart"], true);
    let restarted = fleet.event_data(&id, "mcp.server.restarted").await;
    assert_eq!(restarted[0]["restart_reason"], "exit");
    assert_eq!((&restarted[0]["old_pid"], &restarted[0]["new_pid"]), (&json!(first), &json!(fleet.pid(&id))));
    assert_eq!(restarted[0]["attempt_number"], 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_clean_exit_before_online_is_restarted_and_counted() {
    let fleet = Fleet::start().await;
    let script = SimScript { exit_before_handshake: true, ..SimScript::default() };
    let id = add_until_failed(&fleet, Server::new("a").script(script)).await;
    let message = "Process exited 3 times in 5 minutes; last: exited with code 0. Manual restart required.";
    assert_eq!(fleet.view(&id).message.as_deref(), Some(message), "none of them was a crash");
    assert_eq!(fleet.world.gaps(&id), [1.0, 5.0]);
    assert_eq!(fleet.event_data(&id, "mcp.server.exited").await.len(), 3);
    assert!(fleet.event_data(&id, "mcp.server.crashed").await.is_empty());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_always_exits_cleanly_starts_at_most_three_times_per_window() {
    let fleet = Fleet::start().await;
    let ids = [
        fleet.add(Server::new("listed").script(exits(0.002, 0))).await,
        fleet.add(Server::new("on").script(exits(0.002, 0)).always_on()).await,
    ];
    // A client that calls without end.
    let until = Instant::now() + seconds(1800.0);
    while Instant::now() < until {
        for id in &ids {
            let _ = fleet.call_within(id, "echo", json!({"text": 1}), Some(seconds(10.0))).await;
        }
        sleep(seconds(0.5)).await;
    }
    for id in &ids {
        let openings = fleet.world.openings(id);
        for opening in &openings {
            let window = |other: &&_| within_five_minutes(opening.at, other);
            assert!(openings.iter().filter(window).count() <= 3, "{id}: {openings:?}");
        }
        assert_eq!(fleet.view(id).status, Status::PermanentlyFailed);
    }
    fleet.finish().await;
}

fn within_five_minutes(at: Instant, other: &Opening) -> bool {
    other.at >= at && other.at - at < seconds(300.0)
}

#[tokio::test(start_paused = true)]
async fn a_server_without_a_handshake_is_killed_after_thirty_seconds() {
    let fleet = Fleet::start().await;
    let script = SimScript { handshake_never: true, ignore_sigterm: true, ignore_eof: true, ..SimScript::default() };
    let id = add_until_failed(&fleet, Server::new("a").script(script)).await;
    assert_eq!(fleet.world.gaps(&id), [31.0, 35.0]);
    assert_eq!(fleet.world.sim.alive_count(), 0, "the process does not outlive its handshake");
    let crashes = fleet.event_data(&id, "mcp.server.crashed").await;
    assert_eq!(crashes[0]["reason"], "handshake failed: no answer to initialize within 30 s");
    assert_eq!((&crashes[0]["signal"], &crashes[0]["uptime_seconds"]), (&json!(9), &json!(0)));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_handshake_within_the_timeout_succeeds() {
    let fleet = Fleet::start().await;
    let script = SimScript { handshake_delay: seconds(29.0), ..SimScript::default() };
    let id = fleet.online(Server::new("a").script(script)).await;
    assert_eq!(fleet.world.openings(&id).len(), 1);
    assert_eq!(fleet.event_data(&id, "mcp.server.started").await[0]["spawn_duration_ms"], 29_000);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_handshake_and_an_unknown_version_are_crashes_with_a_reason() {
    let fleet = Fleet::start().await;
    let refused = SimScript { handshake_error: Some("no licence".to_owned()), ..SimScript::default() };
    let ancient = SimScript { protocol_version: Some("1999-01-01".to_owned()), ..SimScript::default() };
    for (name, script, why) in [
        ("refused", refused, "handshake failed: server error -32603: no licence"),
        ("ancient", ancient, "handshake failed: the server speaks protocol version 1999-01-01, which is not supported"),
    ] {
        let id = add_until_failed(&fleet, Server::new(name).script(script)).await;
        assert_eq!(fleet.view(&id).last_error.as_deref(), Some(why));
        assert_eq!(fleet.event_data(&id, "mcp.server.crashed").await.len(), 3);
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_spawn_reports_the_system_error_and_counts_as_a_crash() {
    let fleet = Fleet::start().await;
    let why = "cannot start `nope`: No such file or directory (os error 2)";
    let id = fleet.add(Server::new("a").plans([SimPlan::with_open_error(why)])).await;
    let view = fleet.until_view(&id, |view| view.attempt == Some(1)).await;
    assert_eq!(view.status, Status::Connecting);
    assert_eq!(view.message.as_deref(), Some(&*format!("restarting in 1 s (attempt 1): {why}")));
    let view = fleet.until(&id, Status::PermanentlyFailed).await;
    assert_eq!(view.last_error.as_deref(), Some(why));
    assert_eq!(fleet.event_data(&id, "mcp.server.permanently_failed").await[0]["last_error"], why);
    let refused = fleet.call(&id, "echo", json!({})).await.unwrap_err();
    assert!(matches!(refused, CallError::Refused { status: Status::PermanentlyFailed, .. }), "{refused:?}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_permanent_failure_reports_its_cause_and_the_last_line_of_stderr() {
    let fleet = Fleet::start().await;
    let says = "\u{1b}[31mModuleNotFoundError:\u{1b}[0m No module named \u{202e}'{env:KEY}'\n".to_owned();
    let script = SimScript {
        exit_before_handshake: true,
        exit_code: 1,
        stderr_text: Some(says.repeat(2)),
        ..SimScript::default()
    };
    let mut server = Server::new("a").env("KEY", "a-secret-value").script(script);
    server.spec.mask = SecretMask::new(["a-secret-value"]);
    let id = add_until_failed(&fleet, server).await;
    let cause = "exited with code 1: ModuleNotFoundError: No module named '[secret]'";
    let message = format!("Process crashed 3 times in 5 minutes; last: {cause}. Manual restart required.");
    let view = fleet.view(&id);
    assert_eq!((view.message.as_deref(), view.remedy), (Some(&*message), Some(Remedy::Restart)));
    assert_eq!((view.last_error.as_deref(), view.last_exit.as_deref()), (Some(cause), Some(cause)));
    let failures = fleet.event_data(&id, "mcp.server.permanently_failed").await;
    assert_eq!((&failures[0]["message"], &failures[0]["remedy"]), (&json!(message), &json!("restart")));
    assert_eq!(fleet.event_data(&id, "mcp.server.crashed").await[0]["reason"], cause);
    let CallError::Refused { message: refused, .. } = fleet.call(&id, "echo", json!({})).await.unwrap_err() else {
        panic!("the call was not refused")
    };
    assert_eq!(refused, format!("`files-acme-alice-a` is permanently_failed: {message}"));
    let logs = fleet.event_data(&id, "mcp.server.logs").await;
    let lines: Vec<&serde_json::Value> = logs.iter().flat_map(|logs| logs["logs"].as_array().unwrap()).collect();
    let not_started = lines.iter().filter(|line| line["metadata"]["source"] == "satellite");
    let reported: Vec<_> = not_started.map(|line| line["message"].as_str().unwrap()).collect();
    assert_eq!(reported, ["the server did not start: exited with code 1"; 3]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn text_on_stdout_is_logged_and_shown_in_the_status_until_online() {
    let fleet = Fleet::start().await;
    let script = SimScript { stdout_garbage_at_start: 1, handshake_delay: seconds(5.0), ..SimScript::default() };
    let id = fleet.add(Server::new("a").script(script)).await;
    let says = "starting; the server's stdout is not JSON-RPC: npm warn deprecated";
    let view = fleet.until_view(&id, |view| view.message.as_deref() == Some(says)).await;
    assert_eq!(view.status, Status::Connecting);
    let view = fleet.until(&id, Status::Online).await;
    assert_eq!(view.message, None);
    fleet.runtime.stop(&id).await.unwrap();
    let logs = fleet.event_data(&id, "mcp.server.logs").await;
    let line = &logs[0]["logs"][0];
    assert_eq!((&line["message"], &line["metadata"]["source"]), (&json!("npm warn deprecated"), &json!("stdout")));

    let script = SimScript { stdout_garbage_at_start: 1, handshake_never: true, ..SimScript::default() };
    let id = add_until_failed(&fleet, Server::new("b").script(script)).await;
    let message = fleet.view(&id).message.clone().unwrap();
    assert!(message.contains("no answer to initialize within 30 s: npm warn deprecated"), "{message}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_hangs_is_aborted_after_the_handshake_timeout() {
    let fleet = Fleet::start().await;
    let stuck = SimPlan { open_delay: seconds(3600.0), ..SimPlan::new(SimScript::default()) };
    let id = fleet.add(Server::new("a").plans([stuck])).await;
    fleet.world.until_openings(&id, 2).await;
    assert_eq!(fleet.world.gaps(&id), [31.0]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_discovery_keeps_the_process_and_is_retried_until_it_succeeds() {
    let fleet = Fleet::start().await;
    let script = SimScript { list_error_times: 4, ..SimScript::default() };
    let server = Server::new("a").script(script).policy(|policy| policy.reconnect.jitter_percent = 0);
    let id = fleet.add(server).await;
    let view = fleet.until(&id, Status::Error).await;
    let pid = view.pid;
    let why = "cannot read the server's tools: server error -32603: cannot list the tools; next attempt in 1 s";
    assert_eq!(view.message.as_deref(), Some(why));
    let began = Instant::now();
    let answer = fleet.call(&id, "echo", json!({"text": "alive"})).await.unwrap();
    assert_eq!(answer["structuredContent"]["text"], "alive", "a call is sent on the live connection");
    assert_eq!(tenths(began.elapsed()), 0.0);
    fleet.until(&id, Status::Online).await;
    assert_eq!(tenths(began.elapsed()), 14.0, "at once because a call succeeded, then after 2, 4 and 8 seconds");
    assert_eq!((fleet.pid(&id), fleet.world.openings(&id).len()), (pid, 1), "the process was kept");
    let statuses: Vec<_> = fleet.statuses(&id).await.into_iter().map(|(status, _)| status).collect();
    let (errors, rest): (Vec<_>, Vec<_>) =
        statuses[4..].iter().map(String::as_str).partition(|status| *status == "error");
    assert_eq!(
        (errors.len(), rest),
        (4, vec!["connecting", "discovering_tools", "discovering_tools", "syncing_tools", "online"])
    );
    assert!(fleet.event_data(&id, "mcp.server.crashed").await.is_empty());
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_during_failing_discovery_is_an_ordinary_crash() {
    let fleet = Fleet::start().await;
    let broken = SimScript { list_error: true, exit_after: Some(seconds(10.0)), exit_code: 1, ..SimScript::default() };
    let id = fleet.online(Server::new("a").plans([broken.into(), SimScript::default().into()])).await;
    assert_eq!(fleet.world.gaps(&id), [11.0]);
    assert_eq!(fleet.event_data(&id, "mcp.server.crashed").await.len(), 1);
    assert_eq!(fleet.event_data(&id, "mcp.server.started").await.len(), 1, "it was never online before");
    fleet.finish().await;
}

/// Returns the paused time as the `std` type that the rules use.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}

const NO_DESCRIPTORS: &str = "cannot start `files`: Too many open files";

/// A connector whose next starts fail, as on a machine without free descriptors.
struct ShortOfDescriptors {
    left: Arc<AtomicUsize>,
    inner: Connectors,
}

impl ProcessConnector for ShortOfDescriptors {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let fails = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        if fails {
            return futures::future::ready(Err(OpenError::Machine(NO_DESCRIPTORS.to_owned()))).boxed();
        }
        self.inner.open(spec, run)
    }
}

/// Starts a fleet and returns the counter of its starts that will fail.
async fn fleet_short_of_descriptors() -> (Fleet, Arc<AtomicUsize>) {
    let left = Arc::new(AtomicUsize::new(0));
    let counter = left.clone();
    let fleet = Fleet::with(move |options| {
        let inner = options.connectors.clone();
        options.connectors = inner.clone().with_process(ShortOfDescriptors { left: counter, inner });
    });
    (fleet.await, left)
}

#[tokio::test(start_paused = true)]
async fn a_start_without_free_descriptors_is_repeated_without_a_crash_count() {
    let (fleet, left) = fleet_short_of_descriptors().await;
    left.store(9, Ordering::Relaxed);
    let began = Instant::now();
    let id = fleet.add(Server::new("a")).await;
    let waiting = fleet.until_view(&id, |view| view.attempt.is_none() && view.next_retry_at.is_some()).await;
    assert_eq!(waiting.status, Status::Connecting);
    let online = fleet.until(&id, Status::Online).await;
    assert_eq!(tenths(began.elapsed()), f64::from(1 + 2 + 4 + 8 + 16 + 32 + 60 + 60 + 60));
    assert_eq!((online.restarts, online.exits_in_window(now())), (0, 0));
    let messages: Vec<_> = fleet.statuses(&id).await.into_iter().filter_map(|(_, message)| message).collect();
    for wait in ["1 s", "32 s", "60 s"] {
        let wanted = format!("the machine cannot start the server; next attempt in {wait}: {NO_DESCRIPTORS}");
        assert!(messages.contains(&wanted), "{wanted}: {messages:?}");
    }
    for kind in ["mcp.server.crashed", "mcp.server.exited", "mcp.server.permanently_failed", "mcp.team.throttled"] {
        assert!(fleet.event_data(&id, kind).await.is_empty(), "{kind}");
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_restart_and_a_wake_without_free_descriptors_are_repeated() {
    let (fleet, left) = fleet_short_of_descriptors().await;
    let id = fleet.add(Server::new("a").plans([exits(100.0, 1).into(), SimScript::default().into()])).await;
    let first = fleet.until(&id, Status::Online).await;
    left.store(3, Ordering::Relaxed);
    let again = fleet.until_replaced(&id, first.pid).await;
    assert_eq!((again.restarts, again.exits_in_window(now())), (1, 1), "one crash, one restart");

    fleet.until_view(&id, |view| view.dormant).await;
    left.store(3, Ordering::Relaxed);
    fleet.runtime.call(&id, "echo", None, Some(seconds(60.0))).await.unwrap();
    let awake = fleet.view(&id);
    assert_eq!((awake.status, awake.dormant, awake.message.as_deref()), (Status::Online, false, None));
    let statuses = fleet.statuses(&id).await;
    let woken: Vec<_> = statuses.iter().rev().take(4).map(|(status, _)| status.as_str()).collect();
    assert_eq!(woken, ["online"; 4], "the tools stay listed during the wake: {statuses:?}");
    assert_eq!(fleet.event_data(&id, "mcp.server.respawned").await.len(), 1);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_rolling_update_without_free_descriptors_is_repeated() {
    let (fleet, left) = fleet_short_of_descriptors().await;
    fleet.world.expect_rolling_updates(1);
    let server = Server::new("a").rolling();
    let id = fleet.add(server.clone()).await;
    let first = fleet.until(&id, Status::Online).await;
    left.store(3, Ordering::Relaxed);
    assert_eq!(fleet.runtime.install(server.env("NEW", "yes").spec).await, Ok(InstallOutcome::Updated));
    let postponed = fleet.until_view(&id, |view| view.message.as_ref().is_some_and(|it| it.contains("machine"))).await;
    assert_eq!((postponed.status, postponed.pid), (Status::Online, first.pid), "the old run continues");
    let second = fleet.until_replaced(&id, first.pid).await;
    assert!(second.spec.env.contains_key("NEW") && second.message.is_none(), "{:?}", second.message);
    fleet.finish().await;
}
