//! No process of a server outlives it: a wrapper runs the server as a child, and a helper beside the server ignores
//! SIGTERM and keeps the pipes open.

use std::time::Duration;

use mcp_satellite_actors::model::event::{Event, StopKind};
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions};
use nix::sys::signal::Signal;
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use testkit::wait::{until, with_limit};
use tokio::sync::oneshot;

use super::support::{Instance, Process, Satellite, Server, TestScope, install, options, real, run_alone};

/// The number of processes: wrapper, server, helper.
const MEMBERS: usize = 3;

fn wrapped() -> Server {
    Server::wrapped(&[]).policy(|policy| policy.session.terminate_grace = Duration::from_millis(300))
}

/// Waits until wrapper, server and helper run, and returns them.
async fn wait_processes(scope: &TestScope) -> Vec<Process> {
    let names = |processes: &Vec<Process>| {
        let mut names: Vec<_> = processes.iter().map(|process| process.name.clone()).collect();
        names.sort_unstable();
        names
    };
    until(
        "wrapper, server and helper run",
        async || scope.processes(),
        |processes| names(processes) == ["satellite", "sh", "sleep"],
    )
    .await
}

async fn no_process_left(scope: &TestScope) {
    until("no process is left", async || scope.processes(), Vec::is_empty).await;
}

async fn online_wrapped(satellite: &Satellite<'_>) -> (Instance, Vec<Process>) {
    let server = satellite.online(wrapped()).await;
    let processes = wait_processes(satellite.scope).await;
    assert_eq!(processes.len(), MEMBERS);
    (server, processes)
}

/// Returns the kind of the first stop, and whether it was forced.
async fn stopped(instance: &Instance) -> (StopKind, bool) {
    let stop = |event: &Event| match event {
        Event::Stopped { kind, forced, .. } => Some((*kind, *forced)),
        _ => None,
    };
    instance.wait_event("stopped", stop).await
}

#[test]
fn a_stop_ends_a_helper_that_ignores_sigterm() {
    real(async |satellite| {
        let (server, _) = online_wrapped(satellite).await;
        server.handle.stop(&server.id).await.unwrap();
        assert_eq!(satellite.scope.processes(), []);
        assert_eq!(stopped(&server).await, (StopKind::Manual, true));
    });
}

#[test]
fn a_crash_of_the_wrapper_ends_its_processes_and_starts_new_ones() {
    real(async |satellite| {
        let (server, old) = online_wrapped(satellite).await;
        let leader = server.pid();
        assert!(old.iter().any(|process| process.pid == leader && process.name == "sh"), "{old:?}");
        server.signal(Signal::SIGKILL);
        server.online_again(leader).await;
        let new = wait_processes(satellite.scope).await;
        assert!(new.iter().all(|process| !old.contains(process)), "before: {old:?}, after: {new:?}");
        server.assert_callable().await;
    });
}

#[test]
fn a_crash_of_the_server_inside_its_wrapper_counts_as_a_crash() {
    real(async |satellite| {
        let (server, old) = online_wrapped(satellite).await;
        let leader = server.pid();
        server.call("crash", serde_json::json!({"code": 9})).await.unwrap_err();
        server.online_again(leader).await;
        assert_eq!(server.crashed().await, ("exited with code 9".to_owned(), Some(9), None));
        let new = wait_processes(satellite.scope).await;
        assert!(new.iter().all(|process| !old.contains(process)), "before: {old:?}, after: {new:?}");
    });
}

#[test]
fn a_shutdown_ends_all_processes_of_all_servers() {
    real(async |satellite| {
        let (server, _) = online_wrapped(satellite).await;
        let plain = satellite.online(Server::sim(&[])).await;
        let report = satellite.handle.shutdown().await;
        assert_eq!(satellite.scope.processes(), []);
        assert!(report.in_time && report.events_lost == 0, "{report:?}");
        assert_eq!(stopped(&server).await, (StopKind::Shutdown, true));
        assert_eq!(stopped(&plain).await, (StopKind::Shutdown, false));
    });
}

#[test]
fn a_killed_runtime_leaves_no_process() {
    real(async |satellite| {
        online_wrapped(satellite).await;
        satellite.handle.kill();
        no_process_left(satellite.scope).await;
        satellite.ended().await;
    });
}

#[test]
fn a_program_that_returns_without_a_shutdown_leaves_no_process() {
    run_alone(async |scope| {
        let satellite = scope.satellite().await;
        online_wrapped(&satellite).await;
        // The async runtime is dropped next, without a shutdown of the satellite. `run_alone` counts what is left.
    });
}

/// An actor of a host program that runs a satellite.
struct Host;

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for Host {
    type Msg = ();
    type State = ();
    type Arguments = (RuntimeOptions, oneshot::Sender<RuntimeHandle>);

    async fn pre_start(
        &self,
        myself: ActorRef<()>,
        (options, started): Self::Arguments,
    ) -> Result<(), ActorProcessingErr> {
        let (handle, _) = mcp_satellite_actors::start_linked(options, myself.get_cell()).await?;
        let _ = started.send(handle);
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _myself: ActorRef<()>,
        _event: SupervisionEvent,
        _state: &mut (),
    ) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

#[test]
fn a_host_actor_that_stops_leaves_no_process() {
    run_alone(async |scope| {
        let (options, events) = options();
        let (started, handle) = oneshot::channel();
        let (host, ended) = Host::spawn(None, Host, (options, started)).await.unwrap();
        let handle = handle.await.unwrap();
        let server = install(scope, &handle, &events, wrapped()).await;
        server.online().await;
        wait_processes(scope).await;
        host.stop(None);
        with_limit("the host's end", ended).await.unwrap();
        no_process_left(scope).await;
    });
}
