//! A runtime that is supervised by an actor of its host.

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{ControlError, RuntimeHandle, RuntimeOptions, ShutdownReport, start_linked};
use ractor::{Actor, ActorProcessingErr, ActorRef, ActorStatus, SupervisionEvent};
use serde_json::json;
use testkit::fleet::{Fleet, MemorySink, Server, World, alive_tasks, assert_nothing_left, call, options, seconds};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// An actor that supervises a runtime and matches every supervision event by name.
struct Host;

struct HostArgs {
    options: RuntimeOptions,
    started: mpsc::UnboundedSender<RuntimeHandle>,
    ended: mpsc::UnboundedSender<&'static str>,
}

impl Actor for Host {
    type Msg = ();
    type State = mpsc::UnboundedSender<&'static str>;
    type Arguments = HostArgs;

    async fn pre_start(&self, myself: ActorRef<()>, args: HostArgs) -> Result<Self::State, ActorProcessingErr> {
        let (runtime, _join) = start_linked(args.options, myself.get_cell()).await?;
        args.started.send(runtime)?;
        Ok(args.ended)
    }

    async fn handle_supervisor_evt(
        &self,
        _myself: ActorRef<()>,
        event: SupervisionEvent,
        ended: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorTerminated(..) => ended.send("ended")?,
            SupervisionEvent::ActorFailed(..) => ended.send("failed")?,
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => {}
        }
        Ok(())
    }
}

struct EmbeddedRuntime {
    tasks_before: usize,
    host: ActorRef<()>,
    host_join: JoinHandle<()>,
    runtime: RuntimeHandle,
    world: World,
    sink: MemorySink,
    ended: mpsc::UnboundedReceiver<&'static str>,
}

/// Starts a host with three servers online, one of which ignores SIGTERM, and a fourth one starting.
async fn embedded() -> (EmbeddedRuntime, InstanceId) {
    let tasks_before = alive_tasks();
    let (options, world, sink) = options();
    let (started, mut starts) = mpsc::unbounded_channel();
    let (ended, ends) = mpsc::unbounded_channel();
    let (host, host_join) = Actor::spawn(None, Host, HostArgs { options, started, ended }).await.unwrap();
    let runtime = starts.recv().await.unwrap();
    let stubborn = SimScript { ignore_sigterm: true, ignore_eof: true, ..SimScript::default() };
    let mute = SimScript { handshake_never: true, ..stubborn.clone() };
    for (name, script) in
        [("mute", mute), ("stubborn", stubborn), ("b", SimScript::default()), ("a", SimScript::default())]
    {
        let server = Server::new(name).script(script);
        world.plan(&server);
        runtime.install(server.spec.clone()).await.unwrap();
        if name != "mute" {
            runtime.wait_for(&server.spec.id, |view| view.status == Status::Online).await.unwrap();
        }
    }
    assert_eq!(world.sim.alive_count(), 4);
    let id = Server::new("a").spec.id;
    (EmbeddedRuntime { tasks_before, host, host_join, runtime, world, sink, ended: ends }, id)
}

#[tokio::test(start_paused = true)]
async fn a_host_that_handles_supervision_events_outlives_its_runtime() {
    let (mut embedded, id) = embedded().await;
    assert!(call(&embedded.runtime, &id, "echo", json!({"text": 1}), None).await.is_ok());
    assert_eq!(embedded.runtime.shutdown().await, ShutdownReport { events_lost: 0, in_time: true });
    assert_eq!(embedded.ended.recv().await, Some("ended"));
    assert_eq!(embedded.host.get_status(), ActorStatus::Running);
    assert_eq!(embedded.world.sim.alive_count(), 0);
    let stopped = embedded.sink.accepted().iter().filter(|event| event.event.kind() == "mcp.server.stopped").count();
    assert_eq!(stopped, 4, "every server was stopped with an event");
    embedded.host.stop(None);
    embedded.host_join.await.unwrap();
    drop(embedded.runtime);
    assert_nothing_left(&embedded.world, embedded.tasks_before).await;
}

#[tokio::test(start_paused = true)]
async fn a_host_that_stops_leaves_no_server_and_no_task() {
    let (embedded, id) = embedded().await;
    let (runtime, call_id) = (embedded.runtime.clone(), id.clone());
    let in_flight = tokio::spawn(async move { call(&runtime, &call_id, "sleep", json!({"ms": 20_000}), None).await });
    sleep(seconds(1.0)).await;
    embedded.host.stop(None);
    embedded.host_join.await.unwrap();
    let answer = in_flight.await.unwrap();
    assert!(matches!(answer, Err(CallError::Terminated { fate: CallFate::MaybeExecuted, .. })), "{answer:?}");
    assert_nothing_left(&embedded.world, embedded.tasks_before).await;

    let refused = call(&embedded.runtime, &id, "echo", json!({}), None).await.unwrap_err();
    assert_eq!(refused.fate(), Some(CallFate::NotSent), "{refused:?}");
    assert_eq!(embedded.runtime.restart(&id).await, Err(ControlError::Closing));
    assert!(!embedded.runtime.shutdown().await.in_time, "the runtime did not shut down in order");
}

#[tokio::test(start_paused = true)]
async fn a_host_that_is_killed_leaves_no_server_and_no_task() {
    let (embedded, _) = embedded().await;
    embedded.host.kill();
    let _ = embedded.host_join.await;
    drop(embedded.runtime);
    assert_nothing_left(&embedded.world, embedded.tasks_before).await;
}

#[tokio::test(start_paused = true)]
async fn a_killed_runtime_ends_at_once_and_notifies_its_host() {
    let (mut embedded, _) = embedded().await;
    embedded.runtime.kill();
    assert_eq!(embedded.ended.recv().await, Some("ended"));
    embedded.host.stop(None);
    embedded.host_join.await.unwrap();
    assert_nothing_left(&embedded.world, embedded.tasks_before).await;
}

#[tokio::test(start_paused = true)]
async fn two_runtimes_in_one_process_do_not_affect_each_other() {
    let (one, other) = (Fleet::start().await, Fleet::start().await);
    let (first, second) = (one.online(Server::new("a")).await, other.online(Server::new("a")).await);
    let pid = other.pid(&second);
    one.server(&first).exit(1);
    one.until_view(&first, |view| view.restarts == 1 && view.status == Status::Online).await;
    one.runtime.shutdown().await;
    assert_eq!((other.pid(&second), other.view(&second).restarts), (pid, 0));
    assert!(other.call(&second, "echo", json!({"text": 1})).await.is_ok());
    other.finish().await;
    one.finish_after_shutdown().await;
}
