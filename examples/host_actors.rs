//! Runs a satellite under an actor of a host that has other actors, too. The host restarts its own actors, learns of
//! the end of the satellite, and ends the satellite before itself. The server is a function of the host.
//!
//! ```text
//! cargo run --example host_actors
//! ```

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use mcp_satellite::actors::seam::Connectors;
use mcp_satellite::{Functions, Instance, InstanceHandle, Runtime};
use ractor::{Actor, ActorProcessingErr, ActorRef, SpawnErr, SupervisionEvent, cast};
use serde_json::{Value, json};

/// Supervisor of the host. It owns the satellite: when this actor ends for any reason, every server ends, too.
struct Host;

struct HostState {
    runtime: Runtime,
    server: InstanceHandle,
    greeter: ActorRef<()>,
}

/// Texts from the greeter.
struct Greeting(String);

#[cfg(feature = "cluster")]
impl ractor::Message for Greeting {}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for Host {
    type Msg = Greeting;
    type State = HostState;
    type Arguments = ();

    async fn pre_start(&self, myself: ActorRef<Greeting>, (): ()) -> Result<HostState, ActorProcessingErr> {
        let runtime = Runtime::builder(Connectors::default()).start_under(myself.get_cell()).await?;
        let functions = Functions::new().tool("greet", json!({ "type": "object" }), |arguments: Value| async move {
            let name = arguments["name"].as_str().ok_or("`name` is missing")?;
            Ok(format!("Hello, {name}!").into())
        });
        let server = runtime.install(Instance::functions("greetings", functions)).await?;
        let greeter = start_greeter(&server, &myself, "").await?;
        Ok(HostState { runtime, server, greeter })
    }

    async fn handle(
        &self,
        myself: ActorRef<Greeting>,
        Greeting(text): Greeting,
        state: &mut HostState,
    ) -> Result<(), ActorProcessingErr> {
        println!("{text}");
        // First the satellite, so that servers end gracefully and events are delivered, then the host.
        let report = state.runtime.shutdown().await;
        println!("events lost: {}, all servers ended in time: {}", report.events_lost, report.in_time);
        myself.stop(None);
        Ok(())
    }

    /// Handles the ends of both children. The host must implement this: ractor's default would end it with either.
    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Greeting>,
        event: SupervisionEvent,
        state: &mut HostState,
    ) -> Result<(), ActorProcessingErr> {
        let greeter = state.greeter.get_id();
        match event {
            SupervisionEvent::ActorFailed(actor, error) if actor.get_id() == greeter => {
                println!("the greeter failed: {error}; starting another");
                state.greeter = start_greeter(&state.server, &myself, "Ada").await?;
            }
            SupervisionEvent::ActorTerminated(actor, ..) if actor.get_id() == greeter => {}
            SupervisionEvent::ActorTerminated(..) | SupervisionEvent::ActorFailed(..) => {
                let end = state.runtime.closed().await;
                println!("the satellite has ended: {end}");
                myself.stop(None);
            }
            // These events do not report an end.
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => {}
            #[cfg(feature = "cluster")]
            SupervisionEvent::PidLifecycleEvent(_) => {}
        }
        Ok(())
    }
}

/// Actor of the host that calls the server for a name. It fails without one.
struct Greeter {
    name: &'static str,
    server: InstanceHandle,
    host: ActorRef<Greeting>,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for Greeter {
    type Msg = ();
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }

    async fn handle(&self, _: ActorRef<()>, (): (), (): &mut ()) -> Result<(), ActorProcessingErr> {
        if self.name.is_empty() {
            return Err("there is nobody to greet".into());
        }
        let greeting = self.server.call("greet", json!({ "name": self.name })).await?;
        // A failed send means that the host has ended.
        let _ = cast!(self.host, Greeting(greeting.text()));
        Ok(())
    }
}

async fn start_greeter(
    server: &InstanceHandle,
    host: &ActorRef<Greeting>,
    name: &'static str,
) -> Result<ActorRef<()>, SpawnErr> {
    let greeter = Greeter { name, server: server.clone(), host: host.clone() };
    let (greeter, _) = Actor::spawn_linked(None, greeter, (), host.get_cell()).await?;
    // A failed send means that the greeter has ended already; the host then gets the event.
    let _ = cast!(greeter, ());
    Ok(greeter)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (_, ended) = Host::spawn(None, Host, ()).await?;
    ended.await?;
    Ok(())
}
