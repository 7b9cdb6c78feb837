//! Nothing that a server started may outlive it: a wrapper runs the server as a child, and a helper beside it ignores
//! SIGTERM and keeps the pipes open.

use std::time::Duration;

use mcp_satellite_actors::model::event::{Event, StopKind};
use mcp_satellite_actors::{RuntimeHandle, RuntimeOptions};
use nix::sys::signal::Signal;
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::oneshot;

use crate::support::{Instance, Place, Process, Satellite, Server, alone, install, options, real, soon, until};

/// Wrapper, server, helper.
const MEMBERS: usize = 3;

fn wrapped() -> Server {
    Server::wrapped(&[]).policy(|policy| policy.session.terminate_grace = Duration::from_millis(300))
}

/// The whole family, once it is there: the helper starts beside the server.
async fn family(place: &Place) -> Vec<Process> {
    let names = |family: &Vec<Process>| {
        let mut names: Vec<_> = family.iter().map(|process| process.name.clone()).collect();
        names.sort_unstable();
        names
    };
    until("the family is complete", async || place.processes(), |family| names(family) == ["satellite", "sh", "sleep"])
        .await
}

async fn nobody(place: &Place) {
    until("nobody is left", async || place.processes(), Vec::is_empty).await;
}

async fn wrapped_in(satellite: &Satellite<'_>) -> (Instance, Vec<Process>) {
    let server = satellite.online(wrapped()).await;
    let family = family(satellite.place).await;
    assert_eq!(family.len(), MEMBERS);
    (server, family)
}

/// How its first stop was told: the kind, and whether it was forced.
async fn stopped(instance: &Instance) -> (StopKind, bool) {
    let stop = |event: &Event| match event {
        Event::Stopped { kind, forced, .. } => Some((*kind, *forced)),
        _ => None,
    };
    instance.told("stopped", stop).await
}

#[test]
fn a_helper_that_ignores_sigterm_is_gone_after_a_stop() {
    real(async |satellite| {
        let (server, _) = wrapped_in(satellite).await;
        server.handle.stop(&server.id).await.unwrap();
        assert_eq!(satellite.place.processes(), []);
        assert_eq!(stopped(&server).await, (StopKind::Manual, true));
    });
}

#[test]
fn a_crash_of_the_wrapper_takes_its_family_along_and_a_new_one_comes() {
    real(async |satellite| {
        let (server, old) = wrapped_in(satellite).await;
        let leader = server.pid();
        assert!(old.iter().any(|process| process.pid == leader && process.name == "sh"), "{old:?}");
        server.signal(Signal::SIGKILL);
        server.online_again(leader).await;
        let new = family(satellite.place).await;
        assert!(new.iter().all(|process| !old.contains(process)), "{old:?} and then {new:?}");
        server.assert_callable().await;
    });
}

#[test]
fn a_crash_of_the_server_inside_its_wrapper_is_a_crash() {
    real(async |satellite| {
        let (server, old) = wrapped_in(satellite).await;
        let leader = server.pid();
        server.call("crash", serde_json::json!({"code": 9})).await.unwrap_err();
        server.online_again(leader).await;
        assert_eq!(server.crashed().await, ("exited with code 9".to_owned(), Some(9), None));
        let new = family(satellite.place).await;
        assert!(new.iter().all(|process| !old.contains(process)), "{old:?} and then {new:?}");
    });
}

#[test]
fn a_shutdown_takes_all_families_along() {
    real(async |satellite| {
        let (server, _) = wrapped_in(satellite).await;
        let plain = satellite.online(Server::sim(&[])).await;
        let farewell = satellite.handle.shutdown().await;
        assert_eq!(satellite.place.processes(), []);
        assert!(farewell.in_time && farewell.events_lost == 0, "{farewell:?}");
        assert_eq!(stopped(&server).await, (StopKind::Shutdown, true));
        assert_eq!(stopped(&plain).await, (StopKind::Shutdown, false));
    });
}

#[test]
fn a_killed_runtime_leaves_no_process() {
    real(async |satellite| {
        wrapped_in(satellite).await;
        satellite.handle.kill();
        nobody(satellite.place).await;
        satellite.ended().await;
    });
}

#[test]
fn a_program_that_just_returns_leaves_no_process() {
    alone(async |place| {
        let satellite = place.satellite().await;
        wrapped_in(&satellite).await;
        // Its async runtime goes next, without a word to the satellite; what is left then is counted by `alone`.
    });
}

/// An actor of a host that runs a satellite.
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
fn a_host_that_simply_stops_leaves_no_process() {
    alone(async |place| {
        let (options, events) = options();
        let (started, handle) = oneshot::channel();
        let (host, ended) = Host::spawn(None, Host, (options, started)).await.unwrap();
        let handle = handle.await.unwrap();
        let server = install(place, &handle, &events, wrapped()).await;
        server.online().await;
        family(place).await;
        host.stop(None);
        soon("the host's end", ended).await.unwrap();
        nobody(place).await;
    });
}
