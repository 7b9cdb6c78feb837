//! The runtime in its host, and its builder.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use jiff::Timestamp;
use mcp_satellite_actors::audience::Audience;
use mcp_satellite_actors::byte_budget::ServerMemory;
use mcp_satellite_actors::model::exit::RuntimeEnd;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::{BatchPolicy, MemoryPolicy, PolicyError, TeamBudgetPolicy};
use mcp_satellite_actors::model::spec::UpdateMethod;
use mcp_satellite_actors::seam::{Connectors, EventSink, SinkAnswer, SinkBatch, StateStore};
use mcp_satellite_actors::{
    InstallOutcome, RuntimeHandle, RuntimeOptions, ShutdownReport, WallClock, start, start_linked,
};
use ractor::{ActorCell, SpawnErr};
use tokio::time::timeout;

use crate::functions::{FunctionConnector, FunctionServers};
use crate::handle::{InstanceError, InstanceHandle};
use crate::instance::Instance;

// A change during a rolling update is adopted only after that update, which may take long or fail.
const ADOPT_MAX: Duration = Duration::from_secs(1);

/// A running satellite in the process of its host. Clones refer to the same runtime; dropping them does not end it.
#[derive(Debug, Clone)]
pub struct Runtime {
    handle: RuntimeHandle,
    functions: FunctionServers,
}

impl Runtime {
    /// Creates a builder. The connectors determine which servers the runtime can start: one connector, several in
    /// [`Connectors`], or none for a host that has only functions.
    pub fn builder(connectors: impl Into<Connectors>) -> RuntimeBuilder {
        RuntimeBuilder {
            options: RuntimeOptions::new(connectors, Arc::new(LoggingSink), Arc::new(Timestamp::now)),
            functions: FunctionServers::default(),
        }
    }

    /// Installs an instance, or changes the configuration of the installed one with the same team, user and name. The
    /// instance then starts; [`InstanceHandle::ready`] waits for it.
    ///
    /// # Errors
    ///
    /// Returns `Invalid` with the name of the field if the instance is misconfigured, and `Gone` if the runtime has
    /// ended or is shutting down.
    ///
    /// ```
    /// # use mcp_satellite_embed::actors::seam::Connectors;
    /// # use mcp_satellite_embed::{Instance, InstanceError, Runtime};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let runtime = Runtime::builder(Connectors::default()).start().await?;
    /// let refused = runtime.install(Instance::stdio("")).await;
    /// assert!(matches!(refused, Err(InstanceError::Invalid { field: "command", .. })));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn install(&self, instance: Instance) -> Result<InstanceHandle, InstanceError> {
        let (spec, functions) = instance.into_spec()?;
        let (id, update_method) = (spec.id.clone(), spec.update_method);
        self.functions.replace(&id, functions);
        let installed = self.instance(id.clone());
        let before = self.handle.status(&id);
        let outcome = self.handle.install(spec).await.map_err(|error| installed.control_error(error))?;
        let replaces = match outcome {
            // `New` with a state before: the previous instance is still being removed.
            InstallOutcome::New => true,
            InstallOutcome::Updated => update_method == UpdateMethod::Restart,
            InstallOutcome::Unchanged => false,
        };
        if replaces && let Some(before) = before {
            // Until the team has the new configuration, the snapshot shows the state of the old one.
            let adopted = self.handle.wait_for(&id, |view| !Arc::ptr_eq(&view.spec, &before.spec));
            let _ = timeout(ADOPT_MAX, adopted).await;
        }
        Ok(installed)
    }

    /// Returns a handle to an instance, installed or not.
    pub fn instance(&self, id: InstanceId) -> InstanceHandle {
        InstanceHandle::new(self.handle.clone(), self.functions.clone(), id)
    }

    /// Returns the handle of the runtime, with everything that this type does not offer: events, snapshots, forwarding.
    pub fn handle(&self) -> &RuntimeHandle {
        &self.handle
    }

    /// Ends every server gracefully, delivers the events and ends the runtime. Returns the same report again if the
    /// runtime has already ended.
    pub async fn shutdown(&self) -> ShutdownReport {
        let report = self.handle.shutdown().await;
        // From here on, every handle reports that its instance is gone.
        self.handle.wait_for_end().await;
        report
    }

    /// Ends everything at once, without grace: kills every process and drops unsent events.
    pub fn kill(&self) {
        self.handle.kill();
    }

    /// Waits until the runtime has ended, and returns the reason: a shutdown, a kill (also of the actor above), or a
    /// failure.
    ///
    /// ```
    /// # use mcp_satellite_embed::actors::seam::Connectors;
    /// # use mcp_satellite_embed::{Runtime, RuntimeEnd};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let runtime = Runtime::builder(Connectors::default()).start().await?;
    /// runtime.kill();
    /// match runtime.closed().await {
    ///     RuntimeEnd::ShutDown { events_lost, .. } => println!("{events_lost} events lost"),
    ///     RuntimeEnd::Killed => println!("killed"),
    ///     RuntimeEnd::Failed(why) => println!("failed: {why}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn closed(&self) -> RuntimeEnd {
        self.handle.wait_for_end().await
    }
}

/// Builder of a [`Runtime`]. Every setting has a default.
///
/// ```
/// use mcp_satellite_embed::Runtime;
/// use mcp_satellite_sim::{SimConnector, SimScript};
/// use mcp_satellite_store::sink::stdout::StdoutSink;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let simulated = SimConnector::new(SimScript::default());
/// let runtime = Runtime::builder(simulated).events(StdoutSink::new()?).start_permits(8).start().await?;
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder starts nothing by itself"]
pub struct RuntimeBuilder {
    options: RuntimeOptions,
    functions: FunctionServers,
}

impl RuntimeBuilder {
    /// Sets the destination of events. By default they are logged with `tracing` at level `DEBUG`.
    pub fn events(mut self, sink: impl EventSink) -> Self {
        self.options.sink = Arc::new(sink);
        self
    }

    /// Sets the number of the first event, one more than the last one that the sink has stored; 1 by default.
    pub fn first_event(mut self, seq: u64) -> Self {
        self.options.next_seq = seq;
        self
    }

    /// Sets the wall clock, which is used for timestamps only; the system clock by default.
    pub fn clock(mut self, clock: WallClock) -> Self {
        self.options.wall = clock;
        self
    }

    /// Sets the receiver of notifications and requests of servers. By default there are no clients.
    pub fn audience(mut self, audience: impl Audience) -> Self {
        self.options.audience = Arc::new(audience);
        self
    }

    /// Sets the store of instance state over restarts. By default nothing is stored.
    pub fn state_store(mut self, store: impl StateStore) -> Self {
        self.options.state_store = Arc::new(store);
        self
    }

    /// Sets the memory budgets for data of servers; unlimited by default.
    pub fn server_memory(mut self, budgets: ServerMemory) -> Self {
        self.options.server_memory = budgets;
        self
    }

    /// Sets the maximum number of concurrent starts of processes. The default is twice the number of cores, at least 4.
    pub fn start_permits(mut self, permits: usize) -> Self {
        self.options.start_permits = permits;
        self
    }

    /// Sets the maximum number of concurrent connection attempts to remote servers; 64 by default.
    pub fn connect_permits(mut self, permits: usize) -> Self {
        self.options.connect_permits = permits;
        self
    }

    /// Sets the batching of events.
    pub fn batch(mut self, policy: BatchPolicy) -> Self {
        self.options.batch = policy;
        self
    }

    /// Sets the limit of unwanted exits after which the starts of a team run one at a time.
    pub fn team_budget(mut self, policy: TeamBudgetPolicy) -> Self {
        self.options.team_budget = policy;
        self
    }

    /// Sets the limits below which memory counts as short.
    pub fn memory_policy(mut self, policy: MemoryPolicy) -> Self {
        self.options.memory_policy = policy;
        self
    }

    /// Sets the seed of the random part of delays; 0 by default. The same seed results in the same delays.
    pub fn seed(mut self, seed: u64) -> Self {
        self.options.seed = seed;
        self
    }

    /// Starts the runtime on its own.
    ///
    /// # Errors
    ///
    /// Fails if a policy is invalid, or if an actor cannot be started.
    pub async fn start(self) -> Result<Runtime, RuntimeStartError> {
        let (options, functions) = self.check()?;
        Ok(Runtime { handle: start(options).await?.0, functions })
    }

    /// Starts the runtime under an actor of the host: it ends when the actor ends, for whatever reason.
    ///
    /// The host must handle each `SupervisionEvent` of this child by name (ractor's default stops the host with it),
    /// and must wait for [`Runtime::shutdown`] before it stops; otherwise every process is killed without grace, and
    /// queued events are lost.
    ///
    /// # Errors
    ///
    /// Fails if a policy is invalid, or if an actor cannot be started.
    pub async fn start_under(self, supervisor: ActorCell) -> Result<Runtime, RuntimeStartError> {
        let (options, functions) = self.check()?;
        Ok(Runtime { handle: start_linked(options, supervisor).await?.0, functions })
    }

    fn check(self) -> Result<(RuntimeOptions, FunctionServers), RuntimeStartError> {
        let Self { mut options, functions } = self;
        options.check()?;
        let others = options.connectors.clone();
        options.connectors = others.clone().with_process(FunctionConnector::new(functions.clone(), others));
        Ok((options, functions))
    }
}

/// Reasons why a runtime was not started.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeStartError {
    /// A policy of the builder is invalid.
    #[error("cannot start the runtime: {0}")]
    Policy(#[from] PolicyError),
    /// An actor of the runtime did not start.
    #[error("cannot start the runtime: {0}")]
    Actor(#[from] SpawnErr),
}

/// Sink that logs events.
struct LoggingSink;

impl EventSink for LoggingSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        for envelope in &batch.events {
            tracing::debug!(seq = envelope.seq, kind = envelope.event.kind(), event = ?envelope.event, "event");
        }
        ready(SinkAnswer::Accepted).boxed()
    }

    fn is_prompt(&self) -> bool {
        true
    }
}
