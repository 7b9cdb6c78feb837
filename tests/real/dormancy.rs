//! Sleep and roll-outs of real processes: what sleeps is gone, who calls is answered, and nothing is started twice.

use std::time::Duration;

use futures::future::join_all;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget, UpdateMethod};
use mcp_satellite_actors::model::status::Status;
use serde_json::json;

use crate::support::{Instance, Server, real, until};

/// Sleeps as soon as it may.
fn sleepy(server: Server) -> Server {
    sleeps_after(Duration::from_millis(200), server)
}

fn sleeps_after(idle: Duration, server: Server) -> Server {
    server.policy(|policy| {
        policy.idle.idle = idle;
        policy.idle.grace = Duration::from_millis(1);
        policy.idle.sweep = Duration::from_millis(20);
        policy.session.terminate_grace = Duration::from_millis(500);
    })
}

async fn asleep(server: &Instance) {
    server.until("asleep", |view| view.dormant && view.pid.is_none()).await;
}

fn count(server: &Instance, wanted: impl Fn(&Event) -> bool) -> usize {
    server.events().iter().filter(|envelope| wanted(&envelope.event)).count()
}

#[test]
fn an_idle_server_is_gone_with_all_that_it_started_and_the_next_call_wakes_it() {
    real(async |satellite| {
        for server in [Server::sim(&[]), Server::wrapped(&[])] {
            let server = satellite.online(sleepy(server)).await;
            let first = server.pid();
            asleep(&server).await;
            let view = server.view();
            assert_eq!((view.status, view.offered_catalogue().unwrap().tools.len()), (Status::Online, 3));
            until("its processes are gone", async || satellite.place.processes(), Vec::is_empty).await;
            let told = server
                .told("dormant", |event| match event {
                    Event::Dormant { pid, .. } => Some(*pid),
                    _ => None,
                })
                .await;
            assert_eq!(told, Some(first));

            server.assert_callable().await;
            let respawned = |event: &Event| matches!(event, Event::Respawned { .. }).then_some(());
            server.told("respawned", respawned).await;
            server.handle.stop(&server.id).await.unwrap();
        }
    });
}

#[test]
fn two_hundred_calls_at_once_wake_one_process_once() {
    real(async |satellite| {
        // Longer than a busy machine may pause between two of the calls.
        let server = satellite.online(sleeps_after(Duration::from_secs(3), Server::sim(&[]))).await;
        asleep(&server).await;
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
        asleep(&server).await;
        let events = |wanted: fn(&Event) -> bool| count(&server, wanted);
        until("it is told", async || events(|event| matches!(event, Event::Dormant { .. })), |count| *count == 2).await;
        assert_eq!(events(|event| matches!(event, Event::Respawned { .. })), 1);
        assert_eq!(events(|event| matches!(event, Event::Started { .. } | Event::Restarted { .. })), 1);
    });
}

#[test]
fn calls_that_come_while_it_falls_asleep_are_answered() {
    real(async |satellite| {
        // Its end takes longer than the pause between the calls.
        let server = satellite.online(sleepy(Server::sim(&["--sigterm-delay=50ms"]))).await;
        for nth in 0..10_u64 {
            asleep(&server).await;
            server.assert_callable().await;
            // Its door closes when it begins to fall asleep; or it is asleep before we have looked.
            let closed = |view: &InstanceView| view.port.as_ref().is_none_or(|port| !port.is_open());
            server.until("falling asleep", closed).await;
            tokio::time::sleep(Duration::from_millis(6 * nth)).await;
            server.assert_callable().await;
        }
        assert_eq!(count(&server, |event| matches!(event, Event::Crashed { .. } | Event::Exited { .. })), 0);
    });
}

/// The configuration that runs, changed and rolled out.
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
        until("the long call is under way", async || server.view().counters.calls(), |calls| *calls >= 5).await;
        roll_out(&server, |spec| drop(spec.env.insert("VERSION".to_owned(), "2".into()))).await;
        for call in join_all(calls).await {
            call.unwrap();
        }
        assert!(long.await.unwrap().is_ok(), "what the old one had begun it finished");
        let view = server.until("on its new process", |view| view.pid != Some(old)).await;
        assert_eq!(view.status, Status::Online);
        until("the old one is gone", async || satellite.place.processes(), |all| all.len() == 1).await;
        assert_eq!(satellite.place.processes()[0].pid, view.pid.unwrap());
    });
}

#[test]
fn a_roll_out_of_a_command_that_does_not_exist_leaves_the_old_one_in_place() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let old = server.pid();
        roll_out(&server, |spec| {
            spec.target = ServerTarget::Stdio { command: "no-such-mcp-server".to_owned(), cwd: None };
        })
        .await;
        let view = server.until("known not to come up", |view| view.last_error.is_some()).await;
        let message = view.message.as_deref().unwrap();
        let why = "the new configuration did not come up: executable \"no-such-mcp-server\" not found in PATH; \
                   the old one stays";
        assert!(message.starts_with(why), "{message}");
        assert_eq!((view.status, view.pid), (Status::Online, Some(old)));
        server.assert_callable().await;
        assert_eq!(satellite.place.processes().len(), 1);
        // A restart is a decision for what is configured.
        server.handle.restart(&server.id).await.unwrap();
        server.until("told why it cannot start", |view| view.pid.is_none() && view.restarts > 0).await;
        server.handle.stop(&server.id).await.unwrap();
    });
}
