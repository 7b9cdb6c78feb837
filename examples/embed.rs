//! Embeds a satellite in a program that already uses actors: the satellite runs under an actor of the host.
//!
//! ```text
//! cargo run --example embed -- npx -y @modelcontextprotocol/server-everything
//! ```

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::sync::Arc;

use jiff::Timestamp;
use mcp_satellite::actors::model::spec::{
    ConfigTier, InstanceConfig, InstanceSpec, ProcessLifetime, ServerTarget, UpdateMethod,
};
use mcp_satellite::actors::model::status::Status;
use mcp_satellite::actors::{RuntimeHandle, RuntimeOptions, start_linked};
use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite::sink::stdout::StdoutSink;
use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent, call};

/// Actor of the host. It owns the satellite: when the actor ends for any reason, every server of the satellite ends,
/// too.
struct Host;

enum Msg {
    Satellite(ractor::RpcReplyPort<RuntimeHandle>),
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for Host {
    type Msg = Msg;
    type State = RuntimeHandle;
    type Arguments = RuntimeOptions;

    async fn pre_start(
        &self,
        myself: ActorRef<Msg>,
        options: RuntimeOptions,
    ) -> Result<RuntimeHandle, ActorProcessingErr> {
        Ok(start_linked(options, myself.get_cell()).await?.0)
    }

    async fn handle(
        &self,
        _: ActorRef<Msg>,
        msg: Msg,
        satellite: &mut RuntimeHandle,
    ) -> Result<(), ActorProcessingErr> {
        let Msg::Satellite(reply) = msg;
        // An error means that the caller does not wait any more.
        let _ = reply.send(satellite.clone());
        Ok(())
    }

    /// Handles events of the satellite. The host must implement this: ractor's default would end the host together with
    /// the satellite.
    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<Msg>,
        event: SupervisionEvent,
        _: &mut RuntimeHandle,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorTerminated(..) => println!("the satellite has ended"),
            SupervisionEvent::ActorFailed(_, error) => println!("the satellite failed: {error}"),
            // These events do not report an end.
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => {}
            #[cfg(feature = "cluster")]
            SupervisionEvent::PidLifecycleEvent(_) => {}
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut command = std::env::args().skip(1);
    let program = command.next().ok_or("give the command of an MCP server, such as: npx -y SERVER")?;
    let spec = server(program, command.collect());
    let id = spec.id.clone();

    let connector = StdioConnector::new(Vec::new())?;
    let options = RuntimeOptions::new(connector, Arc::new(StdoutSink::new()?), Arc::new(Timestamp::now));
    let (host, ended) = Host::spawn(None, Host, options).await?;
    let satellite = call!(host, Msg::Satellite)?;

    satellite.install(spec).await?;
    let settled = satellite.wait_for(&id, |view| !view.status.is_transitional()).await.ok_or("it ended")?;
    println!("{}: {} {}", settled.spec.name, settled.status, settled.message.as_deref().unwrap_or_default());
    for tool in settled.offered_catalogue().into_iter().flat_map(|catalogue| &catalogue.tools) {
        println!("  {}", tool.name);
    }
    if settled.status == Status::Online {
        println!("{:?}", satellite.call(&id, "echo", None, None).await);
    }

    // The host must end the satellite before itself, so that servers end gracefully and events are delivered.
    let farewell = satellite.shutdown().await;
    println!("events lost: {}, all servers ended in time: {}", farewell.events_lost, farewell.in_time);
    host.stop(None);
    ended.await?;
    Ok(())
}

/// Returns the specification of one server for one user. A real host has its own teams, users and policies.
fn server(command: String, args: Vec<String>) -> InstanceSpec {
    InstanceConfig {
        team: "team".into(),
        team_slug: "team".into(),
        user: "user".into(),
        user_slug: "user".into(),
        installation: "first".into(),
        server: "example".into(),
        target: ServerTarget::Stdio { command, cwd: None },
        server_tier: ConfigTier { args: args.into_iter().map(Into::into).collect(), ..ConfigTier::default() },
        team_tier: ConfigTier::default(),
        user_tier: ConfigTier::default(),
        user_required: Vec::new(),
        lifetime: ProcessLifetime::default(),
        update_method: UpdateMethod::default(),
        request_logging: true,
        policy: Arc::default(),
    }
    .merge()
}
