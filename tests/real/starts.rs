//! From the fork to `online`, and every way of not getting there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use mcp_satellite_actors::model::event::Event;
use nix::libc::SIGKILL;

use crate::support::{Instance, Place, Server, real};

/// `(code, will_restart)` of each unwanted exit so far, crash or not.
fn ends(instance: &Instance) -> Vec<(Option<i32>, bool)> {
    let end = |event: Event| match event {
        Event::Crashed { exit_code, will_restart, .. } | Event::Exited { exit_code, will_restart, .. } => {
            Some((exit_code, will_restart))
        }
        _ => None,
    };
    instance.events().into_iter().filter_map(|event| end(event.event)).collect()
}

/// Its last event: the ones before it were told, too.
async fn told_to_have_failed(instance: &Instance) {
    instance.told("permanently_failed", |event| matches!(event, Event::PermanentlyFailed { .. }).then_some(())).await;
}

#[test]
fn a_server_that_never_shakes_hands_is_killed() {
    real(async |satellite| {
        let silent = Server::sim(&["--handshake-never"]).once();
        let silent = silent.policy(|policy| policy.session.handshake_timeout = Duration::from_millis(500));
        let silent = satellite.install(silent).await;
        let (reason, code, signal) = silent.crashed().await;
        assert_eq!(reason, "handshake failed: no answer to initialize within 0.5 s");
        assert_eq!((code, signal), (None, Some(SIGKILL)));
        assert_eq!(silent.permanently_failed().await.pid, None);
        assert_eq!(satellite.place.processes(), []);
    });
}

#[test]
fn a_server_that_starts_slowly_is_waited_for() {
    real(async |satellite| {
        let slow = Server::sim(&["--start-delay=300ms", "--handshake-delay=300ms"]);
        satellite.online(slow).await.assert_callable().await;
    });
}

#[test]
fn a_refused_handshake_is_told_in_the_servers_words() {
    real(async |satellite| {
        let rude = satellite.install(Server::sim(&["--handshake-error=no licence found"]).once()).await;
        let (reason, ..) = rude.crashed().await;
        assert!(reason.starts_with("handshake failed: ") && reason.contains("no licence found"), "{reason}");
    });
}

#[test]
fn a_server_that_dies_before_the_handshake_is_tried_until_its_budget_is_spent() {
    real(async |satellite| {
        let broken = satellite.install(Server::sim(&["--exit-before-handshake", "--exit-code=3"])).await;
        let view = broken.permanently_failed().await;
        let message = "Process crashed 3 times in 5 minutes; last: exited with code 3. Manual restart required.";
        assert_eq!(view.message.as_deref(), Some(message));
        assert_eq!(view.last_error.as_deref(), Some("exited with code 3"));
        told_to_have_failed(&broken).await;
        assert_eq!(ends(&broken), [(Some(3), true), (Some(3), true), (Some(3), false)]);
    });
}

#[test]
fn code_0_before_the_handshake_is_an_exit_that_is_charged_all_the_same() {
    real(async |satellite| {
        let broken = satellite.install(Server::sim(&["--exit-before-handshake"])).await;
        let message = "Process exited 3 times in 5 minutes; last: exited with code 0. Manual restart required.";
        assert_eq!(broken.permanently_failed().await.message.as_deref(), Some(message));
        told_to_have_failed(&broken).await;
        assert_eq!(ends(&broken), [(Some(0), true), (Some(0), true), (Some(0), false)]);
    });
}

/// Why a server cannot be started, as the status tells it.
fn refusal(server: impl FnOnce(&Place) -> Server, expected: &str) {
    real(async |satellite| {
        let server = server(satellite.place).policy(|policy| policy.restart.max_crashes = 2);
        let instance = satellite.install(server).await;
        let view = instance.permanently_failed().await;
        assert_eq!(view.last_error.as_deref(), Some(expected));
        assert_eq!(view.pid, None);
        told_to_have_failed(&instance).await;
        assert_eq!(ends(&instance), [(None, true), (None, false)], "it counts as a crash");
    });
}

#[test]
fn a_missing_command_is_told_by_its_name() {
    let expected = "executable \"no-such-mcp-server\" not found in PATH";
    refusal(|_| Server::command("no-such-mcp-server", &["--token", "hidden"]), expected);
}

#[test]
fn a_command_that_may_not_be_executed_is_told() {
    let server = |place: &Place| {
        let file = place.directory().join("server");
        fs::write(&file, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        // Found by its name in the directory where it is to run: the directory's own name differs from run to run.
        Server::command("./server", &[]).cwd(place.directory())
    };
    refusal(server, "cannot start `./server`: Permission denied");
}

#[test]
fn a_working_directory_that_is_not_there_is_told() {
    let expected = format!(
        "cannot start `{}`: working directory `/no/such/directory`: No such file or directory",
        env!("CARGO_BIN_EXE_satellite")
    );
    refusal(|_| Server::sim(&[]).cwd("/no/such/directory"), &expected);
}

#[test]
fn a_server_of_each_known_version_comes_online() {
    real(async |satellite| {
        for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
            let server = satellite.online(Server::sim(&["--protocol-version", version])).await;
            server.assert_callable().await;
        }
    });
}

#[test]
fn a_server_of_an_unknown_version_is_refused_by_its_version() {
    real(async |satellite| {
        let stranger = satellite.install(Server::sim(&["--protocol-version=1999-12-31"]).once()).await;
        let (reason, ..) = stranger.crashed().await;
        assert!(reason.starts_with("handshake failed: ") && reason.contains("1999-12-31"), "{reason}");
    });
}
