//! Ends of a server's process: by itself, by a person's signal, on request, and after the grace.

use std::time::Duration;

use mcp_satellite_actors::model::event::{Event, RestartReason, StopKind};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use nix::libc::{SIGKILL, SIGSEGV, SIGTERM};
use nix::sys::signal::Signal;
use serde_json::json;
use testkit::wait::until;

use super::support::{Instance, Server, real};

const GRACE: Duration = Duration::from_millis(300);

/// Returns `(old pid, new pid, reason)` of the first restart.
async fn restarted(instance: &Instance) -> (Option<u32>, Option<u32>, RestartReason) {
    let restart = |event: &Event| match event {
        Event::Restarted { old_pid, new_pid, restart_reason, .. } => Some((*old_pid, *new_pid, *restart_reason)),
        _ => None,
    };
    instance.wait_event("restarted", restart).await
}

/// Returns `(kind, code, signal, forced)` of the first stop.
async fn stopped(instance: &Instance) -> (StopKind, Option<i32>, Option<i32>, bool) {
    let stop = |event: &Event| match event {
        Event::Stopped { kind, exit_code, signal, forced, .. } => Some((*kind, *exit_code, *signal, *forced)),
        _ => None,
    };
    instance.wait_event("stopped", stop).await
}

#[test]
fn a_server_that_a_person_kills_is_restarted() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let old = server.pid();
        server.signal(Signal::SIGKILL);
        let new = server.online_again(old).await.pid;
        assert_eq!(server.crashed().await, ("killed by SIGKILL".to_owned(), None, Some(SIGKILL)));
        assert_eq!(restarted(&server).await, (Some(old), new, RestartReason::Crash));
        server.assert_callable().await;
    });
}

#[test]
fn the_crash_event_contains_the_signal_of_the_server() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let old = server.pid();
        let answer = server.call("crash", json!({"signal": SIGSEGV})).await;
        assert!(
            matches!(&answer, Err(CallError::Terminated { reason, .. }) if reason == "killed by SIGSEGV"),
            "{answer:?}"
        );
        server.online_again(old).await;
        assert_eq!(server.crashed().await, ("killed by SIGSEGV".to_owned(), None, Some(SIGSEGV)));
        server.assert_callable().await;
    });
}

#[test]
fn the_crash_event_contains_the_exit_code_of_the_server() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let old = server.pid();
        let answer = server.call("crash", json!({"code": 7})).await;
        assert!(
            matches!(&answer, Err(CallError::Terminated { reason, .. }) if reason == "exited with code 7"),
            "{answer:?}"
        );
        server.online_again(old).await;
        assert_eq!(server.crashed().await, ("exited with code 7".to_owned(), Some(7), None));
        server.assert_callable().await;
    });
}

#[test]
fn a_server_that_exits_with_code_0_is_dormant_until_the_next_call() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let old = server.pid();
        server.call("crash", json!({"code": 0})).await.unwrap_err();
        let asleep = server.until("dormant", |view| view.dormant).await;
        assert_eq!((asleep.status, asleep.pid), (Status::Online, None));
        assert_eq!(asleep.offered_catalogue().unwrap().tools.len(), 3, "the tools are not listed any more");
        let exited = |event: &Event| match event {
            Event::Exited { exit_code, will_restart, .. } => Some((*exit_code, *will_restart)),
            _ => None,
        };
        assert_eq!(server.wait_event("exited", exited).await, (Some(0), false));

        server.assert_callable().await;
        let respawned = |event: &Event| match event {
            Event::Respawned { pid, .. } => Some(*pid),
            _ => None,
        };
        let new = server.wait_event("respawned", respawned).await;
        assert!(new.is_some() && new != Some(old), "{new:?}, once {old}");
        let is_status =
            |event: &Event| matches!(event, Event::StatusChanged { status, .. } if *status != Status::Online);
        let after_exit = server.events().into_iter().skip_while(|event| !matches!(event.event, Event::Exited { .. }));
        assert_eq!(after_exit.filter(|event| is_status(&event.event)).count(), 0, "the status changed");
    });
}

#[test]
fn an_always_on_server_is_restarted_after_code_0() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[]).always_on()).await;
        let old = server.pid();
        server.call("crash", json!({"code": 0})).await.unwrap_err();
        let new = server.online_again(old).await.pid;
        assert_eq!(restarted(&server).await, (Some(old), new, RestartReason::Exit));
    });
}

#[test]
fn a_stop_closes_the_stdin_of_the_server() {
    real(async |satellite| {
        // The server ignores SIGTERM, so only the end of its stdin can end it.
        let server = satellite.online(Server::sim(&["--ignore-sigterm"])).await;
        server.handle.stop(&server.id).await.unwrap();
        assert_eq!(satellite.scope.processes(), []);
        assert_eq!(stopped(&server).await, (StopKind::Manual, Some(0), None, false));
    });
}

#[test]
fn a_stopped_server_may_use_the_whole_grace_to_end() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&["--sigterm-delay=200ms", "--exit-code=5", "--ignore-eof"])).await;
        server.handle.stop(&server.id).await.unwrap();
        assert_eq!(satellite.scope.processes(), []);
        assert_eq!(stopped(&server).await, (StopKind::Manual, Some(5), None, false));
    });
}

#[test]
fn a_server_without_a_sigterm_handler_ends_by_sigterm() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&["--ignore-eof"])).await;
        server.handle.stop(&server.id).await.unwrap();
        assert_eq!(stopped(&server).await, (StopKind::Manual, None, Some(SIGTERM), false));
    });
}

#[test]
fn a_server_that_ignores_all_requests_to_end_is_killed_after_the_grace() {
    real(async |satellite| {
        let stubborn = Server::sim(&["--ignore-sigterm", "--ignore-eof"]);
        let server = satellite.online(stubborn.policy(|policy| policy.session.terminate_grace = GRACE)).await;
        server.handle.stop(&server.id).await.unwrap();
        assert_eq!(satellite.scope.processes(), []);
        assert_eq!(stopped(&server).await, (StopKind::Manual, None, Some(SIGKILL), true));
        let view = server.view();
        assert_eq!((view.status, view.pid), (Status::Offline, None));
        assert_eq!(view.message.as_deref(), Some("stopped on request"));
    });
}

#[test]
fn a_stop_during_the_handshake_ends_the_process() {
    real(async |satellite| {
        let server = satellite.install(Server::sim(&["--handshake-never"])).await;
        server.until("spawned", |view| view.pid.is_some()).await;
        server.handle.stop(&server.id).await.unwrap();
        assert_eq!(satellite.scope.processes(), []);
        server.handle.start(&server.id).await.unwrap();
        server.until("spawned again", |view| view.pid.is_some()).await;
        assert!(server.handle.uninstall(&server.id).await.unwrap().active);
        assert_eq!(satellite.scope.processes(), []);
    });
}

#[test]
fn a_frozen_server_is_unresponsive_and_is_replaced() {
    real(async |satellite| {
        let short = Duration::from_millis(200);
        let server = Server::sim(&[]).policy(|policy| {
            policy.watchdog.silence = short;
            policy.watchdog.ping_timeout = short;
        });
        let server = satellite.online(server).await;
        let old = server.pid();
        server.signal(Signal::SIGSTOP);
        let answer = server.call_within(Some(short), "echo", json!({"text": "anybody?"})).await;
        assert!(matches!(answer, Err(CallError::TimedOut { .. })), "{answer:?}");
        let new = server.online_again(old).await.pid;
        assert_eq!(server.crashed().await, ("unresponsive".to_owned(), None, Some(SIGKILL)));
        assert_eq!(restarted(&server).await, (Some(old), new, RestartReason::Unresponsive));
        server.assert_callable().await;
    });
}

#[test]
fn a_busy_server_that_answers_pings_is_not_unresponsive() {
    real(async |satellite| {
        let short = Duration::from_millis(50);
        let server = Server::sim(&["--hang-calls"]).policy(|policy| {
            policy.watchdog.silence = short;
            // The test does not depend on fast responses: the machine may be loaded.
            policy.watchdog.ping_timeout = testkit::wait::GIVE_UP;
        });
        let server = satellite.online(server).await;
        let old = server.pid();
        server.call_within(Some(short), "echo", json!({})).await.unwrap_err();
        // The response to `received` counts as a sign of life, so the test polls the number of pings rarely.
        let pinged = until(
            "a ping is received",
            async || {
                server.call_within(Some(short), "echo", json!({})).await.unwrap_err();
                tokio::time::sleep(2 * short).await;
                server.received().await
            },
            |received| received["pings"].as_u64() >= Some(1),
        );
        pinged.await;
        let same = |view: &InstanceView| view.pid == Some(old) && view.restarts == 0;
        assert!(same(&server.view()), "{:?}", server.view());
    });
}
