//! Simulated servers within this process, as connectors of both kinds: thousands at once, if required in paused time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::session_description::SessionDescription;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{
    AdoptedProcess, Connectors, LineConnector, OpenError, ProcessConnector, ProcessEnd, ProcessLink, ServerLine,
    ServerProcess,
};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, duplex};
use tokio::time::Instant;

use super::control::{SimProcessState, TaskGuard};
use super::endpoint::{self, SimRemote};
use super::engine::{self, SimPipes};
use super::keeper::{AttachedPipe, HeldPipe, HeldServer, SatelliteLife, SimKeeper};
use super::registry::SimRegistry;
use super::remote::SimLine;
#[cfg(feature = "rmcp")]
use super::rmcp_server;
use super::script::SimScript;
use super::server::{EnvSource, SimResponder};

// Capacity of a pipe in bytes, allocated only as it is used.
const PIPE_SIZE: usize = 4096;

// Simulated process ids start at a number that real processes rarely have.
static NEXT_PID: AtomicU32 = AtomicU32::new(1_000_000);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ServerKind {
    /// The hand-written server, which supports the whole script, in one task.
    #[default]
    Responder,
    /// The server of rmcp, for comparison. It supports the default tools, lifetimes and signals of a script, but no
    /// other faults.
    #[cfg(feature = "rmcp")]
    Rmcp,
}

/// Plan for one start of an instance. For a remote instance only the script applies; the rest is set at its endpoint.
#[derive(Debug, Clone)]
pub struct SimPlan {
    pub script: Arc<SimScript>,
    pub kind: ServerKind,
    pub open_error: Option<String>,
    /// Duration of the start, successful or not.
    pub open_delay: Duration,
}

impl SimPlan {
    pub fn new(script: impl Into<Arc<SimScript>>) -> Self {
        Self { script: script.into(), kind: ServerKind::Responder, open_error: None, open_delay: Duration::ZERO }
    }

    #[cfg(feature = "rmcp")]
    pub fn rmcp(script: impl Into<Arc<SimScript>>) -> Self {
        Self { kind: ServerKind::Rmcp, ..Self::new(script) }
    }

    pub fn with_open_error(why: impl Into<String>) -> Self {
        Self { open_error: Some(why.into()), ..Self::new(SimScript::default()) }
    }
}

impl From<SimScript> for SimPlan {
    fn from(script: SimScript) -> Self {
        Self::new(script)
    }
}

type Planner = dyn Fn(&InstanceSpec, RunNumber) -> SimPlan + Send + Sync;

/// Connector that starts simulated servers. Clones share their servers: keep one to count and disturb the servers that
/// the other started.
#[derive(Clone)]
pub struct SimConnector {
    plan: Arc<Planner>,
    registry: Arc<SimRegistry>,
    remote: Arc<endpoint::SimEndpoints>,
    keeper: Option<Arc<SimKeeper>>,
}

impl SimConnector {
    pub fn new(script: impl Into<Arc<SimScript>>) -> Self {
        let plan = SimPlan::new(script);
        Self::with_plan(move |_, _| plan.clone())
    }

    pub fn with_plan(plan: impl Fn(&InstanceSpec, RunNumber) -> SimPlan + Send + Sync + 'static) -> Self {
        Self { plan: Arc::new(plan), registry: Arc::default(), remote: Arc::default(), keeper: None }
    }

    /// Adds a keeper, so that the servers outlive a satellite that is [killed](Self::kill_satellite).
    #[must_use]
    pub fn with_keeper(self) -> Self {
        Self { keeper: Some(Arc::default()), ..self }
    }

    /// Kills the satellite that uses the connector: whatever its runtime still does reaches no server. The next runtime
    /// with this connector can adopt the servers.
    pub fn kill_satellite(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.end_satellite();
        }
    }

    /// Kills all servers of earlier satellites that were not adopted.
    pub fn drop_unclaimed(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.kill_unclaimed(None);
        }
    }

    /// Makes the remote endpoints keep no history, so that the connector can run for long.
    #[must_use]
    pub fn without_history(self) -> Self {
        Self { remote: Arc::new(endpoint::SimEndpoints::without_history()), ..self }
    }

    /// Returns the number of servers that exist now, including those of which only a grandchild is left.
    pub fn alive_count(&self) -> usize {
        self.registry.state().alive
    }

    pub fn opened_count(&self) -> u64 {
        self.registry.state().opened
    }

    /// Returns how often a server was started for an instance that still had one, or a line created beside another.
    pub fn overlaps(&self) -> u64 {
        self.registry.state().overlaps + self.remote.overlaps()
    }

    /// Returns the server of an instance, the latest if there are several.
    pub fn handle(&self, id: &InstanceId) -> Option<SimHandle> {
        self.registry.state().servers.get(id)?.last().cloned().map(SimHandle)
    }

    /// Returns the endpoint of a remote instance, which exists from the beginning and outlives its sessions.
    pub fn remote(&self, id: &InstanceId) -> SimRemote {
        SimRemote(self.remote.endpoint(id))
    }

    /// Returns the number of lines to remote servers that exist now, connected or not.
    pub fn line_count(&self) -> usize {
        self.remote.line_count()
    }

    /// Returns the highest number of concurrent handshakes with remote servers.
    pub fn handshakes_max(&self) -> usize {
        self.remote.attempts_max()
    }

    fn start(&self, spec: Arc<InstanceSpec>, run: RunNumber, plan: SimPlan) -> ProcessLink {
        let SimPlan { script, kind, .. } = plan;
        let control =
            Arc::new(SimProcessState::for_simulation(&script, Arc::downgrade(&self.registry), spec.id.clone()));
        self.registry.insert(spec.id.clone(), Arc::clone(&control));

        // Two pipes instead of the two directions of one: closing stdin must leave stdout open.
        let (writer, stdin) = duplex(PIPE_SIZE);
        let (stdout, reader) = duplex(PIPE_SIZE);
        let (stderr, stderr_reader) =
            script.has_stderr_output().then(|| duplex(PIPE_SIZE)).map_or((None, None), |(a, b)| (Some(a), Some(b)));
        let guard = TaskGuard(Arc::clone(&control));
        let env = EnvSource::Spec(Arc::clone(&spec));
        match kind {
            ServerKind::Responder => {
                let server = SimResponder::new(script, env, run, Instant::now());
                let pipes = SimPipes { stdin: Some(stdin), stdout, stderr };
                tokio::spawn(respond(pipes, server, guard));
            }
            #[cfg(feature = "rmcp")]
            ServerKind::Rmcp => {
                tokio::spawn(async move {
                    let end = rmcp_server::run(stdin, stdout, script, run, &guard.0).await;
                    guard.0.finish(end);
                });
            }
        }
        let pid = NEXT_PID.fetch_add(1, Ordering::Relaxed);
        if let Some(keeper) = &self.keeper {
            let pipes = [writer, reader].map(HeldPipe::new);
            let server = HeldServer::new(spec, pid, control, pipes, stderr_reader.map(HeldPipe::new));
            let link = attach(&server, &keeper.attach());
            keeper.hold(server);
            return link;
        }
        let stderr = stderr_reader.map(|stderr| -> Box<dyn AsyncRead + Send + Unpin> { Box::new(stderr) });
        link(Box::new(reader), Box::new(writer), stderr, SimProcess { id: spec.id.clone(), pid, control, life: None })
    }
}

fn link(
    reader: Box<dyn AsyncRead + Send + Unpin>,
    writer: Box<dyn AsyncWrite + Send + Unpin>,
    stderr: Option<Box<dyn AsyncRead + Send + Unpin>>,
    process: SimProcess,
) -> ProcessLink {
    let guard = Box::new(KillOnDrop(process.clone()));
    ProcessLink { reader, writer, stderr, process: Box::new(process), guard }
}

/// Returns a link to a server that the keeper holds.
fn attach(server: &HeldServer, life: &SatelliteLife) -> ProcessLink {
    let pipe = |pipe: &HeldPipe, closes| Box::new(AttachedPipe { pipe: pipe.clone(), life: life.clone(), closes });
    let stderr = server.stderr.as_ref().map(|stderr| -> Box<dyn AsyncRead + Send + Unpin> { pipe(stderr, false) });
    let (id, control) = (server.spec.id.clone(), Arc::clone(&server.control));
    let process = SimProcess { id, pid: server.pid, control, life: Some(life.clone()) };
    link(pipe(&server.stdout, false), pipe(&server.stdin, true), stderr, process)
}

async fn respond(
    mut pipes: SimPipes<DuplexStream, DuplexStream, DuplexStream>,
    server: SimResponder,
    guard: TaskGuard,
) {
    let end = engine::run(&mut pipes, server, &guard.0).await;
    drop(pipes);
    guard.0.finish(end);
}

impl ProcessConnector for SimConnector {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let connector = self.clone();
        Box::pin(async move {
            let plan = (connector.plan)(&spec, run);
            if let Some(keeper) = &connector.keeper {
                for earlier in keeper.kill_unclaimed(Some(&spec.id)) {
                    earlier.wait_all().await;
                }
            }
            if !plan.open_delay.is_zero() {
                tokio::time::sleep(plan.open_delay).await;
            }
            match plan.open_error {
                Some(why) => Err(OpenError::Server(why)),
                None => Ok(connector.start(spec, run, plan)),
            }
        })
    }

    fn can_adopt(&self, spec: &InstanceSpec) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| keeper.can_adopt(spec))
    }

    fn adopt(&self, spec: &Arc<InstanceSpec>, _run: RunNumber) -> Option<AdoptedProcess> {
        let keeper = self.keeper.as_ref()?;
        let life = keeper.attach();
        keeper.adopt(spec, |server, session, first_id| AdoptedProcess {
            link: attach(server, &life),
            session,
            first_id,
        })
    }
}

impl LineConnector for SimConnector {
    fn dial(&self, spec: &Arc<InstanceSpec>, run: RunNumber) -> Box<dyn ServerLine> {
        let script = (self.plan)(spec, run).script;
        Box::new(SimLine::new(self.remote.endpoint(&spec.id), Arc::clone(spec), run, script))
    }
}

impl From<SimConnector> for Connectors {
    fn from(connector: SimConnector) -> Self {
        Self::default().with_process(connector.clone()).with_line(connector)
    }
}

/// Control of a server from outside: simulates a crash, the kernel, or a bug.
#[derive(Clone)]
pub struct SimHandle(Arc<SimProcessState>);

impl SimHandle {
    pub fn exit(&self, code: i32) {
        self.0.finish(ProcessEnd { code: Some(code), signal: None });
    }

    pub fn signal(&self, signal: i32) {
        self.0.finish(ProcessEnd { code: None, signal: Some(signal) });
    }

    /// Freezes the server: it exists, but does nothing except end by a signal that it does not handle. Not for
    /// the server of rmcp.
    pub fn freeze(&self) {
        self.0.freeze();
    }
}

/// Handle of a server. `life` is that of its satellite, if the servers have a keeper.
#[derive(Clone)]
struct SimProcess {
    id: InstanceId,
    pid: u32,
    control: Arc<SimProcessState>,
    life: Option<SatelliteLife>,
}

impl SimProcess {
    fn is_of_dead_satellite(&self) -> bool {
        self.life.as_ref().is_some_and(SatelliteLife::is_over)
    }
}

impl ServerProcess for SimProcess {
    fn pid(&self) -> Option<u32> {
        Some(self.pid)
    }

    fn describe_session(&mut self, session: SessionDescription) {
        if let Some(life) = &self.life {
            life.describe(&self.id, self.pid, &session);
        }
    }

    fn wait(&mut self) -> BoxFuture<'_, ProcessEnd> {
        Box::pin(self.control.wait())
    }

    fn wait_all(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(self.control.wait_all())
    }

    fn terminate(&mut self) {
        if !self.is_of_dead_satellite() {
            self.control.terminate();
        }
    }

    fn kill(&mut self) {
        if !self.is_of_dead_satellite() {
            self.control.kill();
        }
    }
}

struct KillOnDrop(SimProcess);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.kill();
    }
}
