//! Starts of real processes, and every way in which a start fails.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use mcp_satellite_actors::model::event::Event;
use nix::libc::SIGKILL;

use crate::support::{Instance, Server, TestScope, real};

/// Returns `(code, will_restart)` of each crash or exit so far.
fn exits(instance: &Instance) -> Vec<(Option<i32>, bool)> {
    let end = |event: Event| match event {
        Event::Crashed { exit_code, will_restart, .. } | Event::Exited { exit_code, will_restart, .. } => {
            Some((exit_code, will_restart))
        }
        _ => None,
    };
    instance.events().into_iter().filter_map(|event| end(event.event)).collect()
}

/// Waits for the event `permanently_failed`, which is the last one.
async fn wait_permanently_failed_event(instance: &Instance) {
    instance
        .wait_event("permanently_failed", |event| matches!(event, Event::PermanentlyFailed { .. }).then_some(()))
        .await;
}

#[test]
fn a_server_that_never_completes_the_handshake_is_killed() {
    real(async |satellite| {
        let silent = Server::sim(&["--handshake-never"]).once();
        let silent = silent.policy(|policy| policy.session.handshake_timeout = Duration::from_millis(500));
        let silent = satellite.install(silent).await;
        let (reason, code, signal) = silent.crashed().await;
        assert_eq!(reason, "handshake failed: no answer to initialize within 0.5 s");
        assert_eq!((code, signal), (None, Some(SIGKILL)));
        assert_eq!(silent.permanently_failed().await.pid, None);
        assert_eq!(satellite.scope.processes(), []);
    });
}

#[test]
fn a_server_that_starts_slowly_comes_online() {
    real(async |satellite| {
        let slow = Server::sim(&["--start-delay=300ms", "--handshake-delay=300ms"]);
        satellite.online(slow).await.assert_callable().await;
    });
}

#[test]
fn the_reason_of_a_rejected_handshake_contains_the_servers_message() {
    real(async |satellite| {
        let rude = satellite.install(Server::sim(&["--handshake-error=no licence found"]).once()).await;
        let (reason, ..) = rude.crashed().await;
        assert!(reason.starts_with("handshake failed: ") && reason.contains("no licence found"), "{reason}");
    });
}

#[test]
fn a_server_that_exits_before_the_handshake_is_restarted_until_the_limit() {
    real(async |satellite| {
        let broken = satellite.install(Server::sim(&["--exit-before-handshake", "--exit-code=3"])).await;
        let view = broken.permanently_failed().await;
        let message = "Process crashed 3 times in 5 minutes; last: exited with code 3. Manual restart required.";
        assert_eq!(view.message.as_deref(), Some(message));
        assert_eq!(view.last_error.as_deref(), Some("exited with code 3"));
        wait_permanently_failed_event(&broken).await;
        assert_eq!(exits(&broken), [(Some(3), true), (Some(3), true), (Some(3), false)]);
    });
}

#[test]
fn an_exit_with_code_0_before_the_handshake_counts_towards_the_limit() {
    real(async |satellite| {
        let broken = satellite.install(Server::sim(&["--exit-before-handshake"])).await;
        let message = "Process exited 3 times in 5 minutes; last: exited with code 0. Manual restart required.";
        assert_eq!(broken.permanently_failed().await.message.as_deref(), Some(message));
        wait_permanently_failed_event(&broken).await;
        assert_eq!(exits(&broken), [(Some(0), true), (Some(0), true), (Some(0), false)]);
    });
}

/// Asserts that a server cannot start and that its status contains the expected error.
fn assert_start_fails(server: impl FnOnce(&TestScope) -> Server, expected: &str) {
    real(async |satellite| {
        let server = server(satellite.scope).policy(|policy| policy.restart.max_crashes = 2);
        let instance = satellite.install(server).await;
        let view = instance.permanently_failed().await;
        assert_eq!(view.last_error.as_deref(), Some(expected));
        assert_eq!(view.pid, None);
        wait_permanently_failed_event(&instance).await;
        assert_eq!(exits(&instance), [(None, true), (None, false)], "the failed start does not count as a crash");
    });
}

#[test]
fn the_error_names_a_missing_command() {
    let expected = "executable \"no-such-mcp-server\" not found in PATH";
    assert_start_fails(|_| Server::command("no-such-mcp-server", &["--token", "hidden"]), expected);
}

#[test]
fn the_error_names_a_command_that_is_not_executable() {
    let server = |scope: &TestScope| {
        let file = scope.directory().join("server");
        fs::write(&file, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        // A relative command in the working directory: the absolute path differs between runs.
        Server::command("./server", &[]).cwd(scope.directory())
    };
    assert_start_fails(server, "cannot start `./server`: Permission denied");
}

#[test]
fn the_error_names_a_missing_working_directory() {
    let expected = format!(
        "cannot start `{}`: working directory `/no/such/directory`: No such file or directory",
        env!("CARGO_BIN_EXE_satellite")
    );
    assert_start_fails(|_| Server::sim(&[]).cwd("/no/such/directory"), &expected);
}

#[test]
fn a_server_of_each_known_protocol_version_comes_online() {
    real(async |satellite| {
        for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
            let server = satellite.online(Server::sim(&["--protocol-version", version])).await;
            server.assert_callable().await;
        }
    });
}

#[test]
fn a_server_of_an_unknown_protocol_version_is_rejected() {
    real(async |satellite| {
        let stranger = satellite.install(Server::sim(&["--protocol-version=1999-12-31"]).once()).await;
        let (reason, ..) = stranger.crashed().await;
        assert!(reason.starts_with("handshake failed: ") && reason.contains("1999-12-31"), "{reason}");
    });
}
