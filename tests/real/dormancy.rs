//! Dormant servers and roll-outs with real processes: dormant servers have no process, every call is answered, and no
//! process is started twice.

use std::time::Duration;

use futures::future::join_all;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget, UpdateMethod};
use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use testkit::wait::until;

use super::support::{Instance, Server, real};

/// Makes a server dormant after a short idle time.
fn idle_soon(server: Server) -> Server {
    with_idle(Duration::from_millis(200), server)
}

fn with_idle(idle: Duration, server: Server) -> Server {
    server.policy(|policy| {
        policy.idle.idle = idle;
        policy.idle.grace = Duration::from_millis(1);
        policy.idle.sweep = Duration::from_millis(20);
        policy.session.terminate_grace = Duration::from_millis(500);
    })
}

async fn wait_dormant(server: &Instance) {
    server.until("dormant", |view| view.dormant && view.pid.is_none()).await;
}

fn count(server: &Instance, wanted: impl Fn(&Event) -> bool) -> usize {
    server.events().iter().filter(|envelope| wanted(&envelope.event)).count()
}

#[test]
fn an_idle_server_ends_with_all_its_processes_and_the_next_call_wakes_it() {
    real(async |satellite| {
        for server in [Server::sim(&[]), Server::wrapped(&[])] {
            let server = satellite.online(idle_soon(server)).await;
            let first = server.pid();
            wait_dormant(&server).await;
            let view = server.view();
            assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 3));
            until("its processes have ended", async || satellite.scope.processes(), Vec::is_empty).await;
            let dormant = server
                .wait_event("dormant", |event| match event {
                    Event::Dormant { pid, .. } => Some(*pid),
                    _ => None,
                })
                .await;
            assert_eq!(dormant, Some(first));

            server.assert_callable().await;
            let respawned = |event: &Event| matches!(event, Event::Respawned { .. }).then_some(());
            server.wait_event("respawned", respawned).await;
            server.handle.stop(&server.id).await.unwrap();
        }
    });
}

#[test]
fn two_hundred_concurrent_calls_wake_a_dormant_server_once() {
    real(async |satellite| {
        // Longer than a busy machine may pause between two of the calls.
        let server = satellite.online(with_idle(Duration::from_secs(3), Server::sim(&[]))).await;
        wait_dormant(&server).await;
        let calls = (0..200).map(|caller| {
            let server = server.clone();
            tokio::spawn(async move {
                let answer = server.call("echo", json!({"text": caller})).await.unwrap();
                assert_eq!(answer["structuredContent"]["text"], caller);
            })
        });
        for call in join_all(calls.collect::<Vec<_>>()).await {
            call.unwrap();
        }
        wait_dormant(&server).await;
        let events = |wanted: fn(&Event) -> bool| count(&server, wanted);
        until(
            "the second dormant event",
            async || events(|event| matches!(event, Event::Dormant { .. })),
            |count| *count == 2,
        )
        .await;
        assert_eq!(events(|event| matches!(event, Event::Respawned { .. })), 1);
        assert_eq!(events(|event| matches!(event, Event::Started { .. } | Event::Restarted { .. })), 1);
    });
}

#[test]
fn calls_while_a_server_becomes_dormant_are_answered() {
    real(async |satellite| {
        // The server takes longer to end than the pause between the calls.
        let server = satellite.online(idle_soon(Server::sim(&["--sigterm-delay=50ms"]))).await;
        for nth in 0..10_u64 {
            wait_dormant(&server).await;
            server.assert_callable().await;
            // The port closes when the server starts to become dormant; the server may already be dormant.
            let closed = |view: &InstanceView| view.port.as_ref().is_none_or(|port| !port.is_open());
            server.until("becoming dormant", closed).await;
            tokio::time::sleep(Duration::from_millis(6 * nth)).await;
            server.assert_callable().await;
        }
        assert_eq!(count(&server, |event| matches!(event, Event::Crashed { .. } | Event::Exited { .. })), 0);
    });
}

/// Changes the running configuration and rolls it out.
async fn roll_out(server: &Instance, change: impl FnOnce(&mut InstanceSpec)) {
    let mut spec = InstanceSpec::clone(&server.view().spec);
    spec.update_method = UpdateMethod::Rolling;
    change(&mut spec);
    server.handle.install(spec).await.unwrap();
}

#[test]
fn a_roll_out_loses_no_call_and_leaves_one_process() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let old = server.pid();
        let long = {
            let server = server.clone();
            tokio::spawn(async move { server.call("sleep", json!({"ms": 1500})).await })
        };
        let calls = (0..4).map(|_| {
            let server = server.clone();
            tokio::spawn(async move {
                while server.text("env", json!({"name": "VERSION"})).await != "2" {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            })
        });
        let calls: Vec<_> = calls.collect();
        until("the long call is in flight", async || server.view().counters.calls(), |calls| *calls >= 5).await;
        roll_out(&server, |spec| drop(spec.env.insert("VERSION".to_owned(), "2".into()))).await;
        for call in join_all(calls).await {
            call.unwrap();
        }
        assert!(long.await.unwrap().is_ok(), "the old process did not finish its call");
        let view = server.until("on its new process", |view| view.pid != Some(old)).await;
        assert_eq!(view.status, Status::Online);
        until("the old process has ended", async || satellite.scope.processes(), |all| all.len() == 1).await;
        assert_eq!(satellite.scope.processes()[0].pid, view.pid.unwrap());
    });
}

#[test]
fn a_roll_out_of_a_missing_command_keeps_the_old_process() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let old = server.pid();
        roll_out(&server, |spec| {
            spec.target = ServerTarget::Stdio { command: "no-such-mcp-server".to_owned(), cwd: None };
        })
        .await;
        let view = server.until("reported as not started", |view| view.last_error.is_some()).await;
        let message = view.message.as_deref().unwrap();
        let why = "the new configuration did not come up: executable \"no-such-mcp-server\" not found in PATH; \
                   the old one stays";
        assert!(message.starts_with(why), "{message}");
        assert_eq!((view.status, view.pid), (Status::Online, Some(old)));
        server.assert_callable().await;
        assert_eq!(satellite.scope.processes().len(), 1);
        // A restart uses the new configuration.
        server.handle.restart(&server.id).await.unwrap();
        server.until("restarted without a process", |view| view.pid.is_none() && view.restarts > 0).await;
        server.handle.stop(&server.id).await.unwrap();
    });
}
