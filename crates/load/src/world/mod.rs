//! Environments for servers: simulated in this process, or child processes.

mod real;
mod server_faults;
mod sim;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::{Connectors, OpenError, ProcessConnector, ProcessLink};

use super::fleet::LoadFleet;
use super::plan::script_of;
use super::recorder::RunRecorder;
use super::scenario::Scenario;
use super::types::{FaultKind, InstanceNo, LoadTarget, PlannedFault};

use mcp_satellite_sim::SimScript;

pub(crate) use real::ProcessWorld;
pub(crate) use server_faults::ServerFaults;
pub(crate) use sim::SimWorld;

// Bytes per second that a flooding server writes to stderr.
const FLOOD_BYTES_PER_SECOND: u64 = 200 * 1024;
// Bytes that a growing server keeps of each call, and its limit.
const GROWTH: usize = 256 * 1024;
const GROWTH_MAX: usize = 3 * GROWTH;
// Number of garbage lines or stray responses before each response.
const JUNK_LINES: usize = 3;
// Lifetime after the handshake in a crash loop.
const LIFETIME: Duration = Duration::from_millis(100);

// Duration of the harness's own calls, long enough for a fault during the call.
const DETECTION_CALL_TIME: Duration = Duration::from_millis(20);

// The error contains the reason why a fault could not be injected.
type InjectionFuture<'a> = BoxFuture<'a, Result<(), String>>;

/// Servers and the basic actions that faults consist of. [`ServerFaults`] combines these actions.
pub(crate) trait ServerWorld: Send + Sync {
    fn connectors(&self) -> Connectors;
    fn target(&self, nth: InstanceNo, kind: usize) -> LoadTarget;
    /// Sets the script from the next start on; `None` restores the server's own script.
    fn set_script(&self, nth: InstanceNo, script: Option<SimScript>) -> Result<(), String>;
    fn kill(&self, nth: InstanceNo, runtime: &RuntimeHandle) -> Result<(), String>;
    fn freeze(&self, nth: InstanceNo, runtime: &RuntimeHandle) -> Result<(), String>;
    // Exits with code 0.
    fn exit<'a>(&'a self, nth: InstanceNo, faults: &'a ServerFaults) -> InjectionFuture<'a>;
    fn inject_remote<'a>(
        &'a self,
        nth: InstanceNo,
        what: &'a PlannedFault,
        faults: &'a ServerFaults,
    ) -> InjectionFuture<'a>;
    fn heal_remote<'a>(
        &'a self,
        nth: InstanceNo,
        what: &'a PlannedFault,
        faults: &'a ServerFaults,
    ) -> InjectionFuture<'a>;
    // Releases the environment's own resources after the end of the runtime.
    fn close(&self) {}
    // Number of existing servers and connections to servers.
    fn server_count(&self) -> usize;
    // Number of existing processes, including descendants of servers; 0 for simulated servers.
    fn process_count(&self) -> usize {
        0
    }
}

/// Scripts of the servers without faults.
pub(crate) struct FleetScripts {
    pub fleet: Arc<LoadFleet>,
    // By kind of server and result of `script_of`.
    pub scripts: Vec<Vec<Arc<SimScript>>>,
}

impl FleetScripts {
    fn own_script(&self, nth: InstanceNo) -> &Arc<SimScript> {
        &self.scripts[self.fleet.kind(nth)][script_of(nth)]
    }
}

// Times of the policy that determine the parameters of faults.
#[derive(Debug, Clone, Copy)]
struct FaultTimings {
    handshake_timeout: Duration,
    grace: Duration,
    // Upper limit for the duration of a call.
    call: Duration,
}

impl FaultTimings {
    fn from_scenario(scenario: &Scenario) -> Self {
        let session = &scenario.policy.session;
        Self {
            handshake_timeout: session.handshake_timeout,
            grace: session.terminate_grace,
            call: session.handshake_timeout + session.request_timeout,
        }
    }
}

/// Returns the script of a server with this fault, or `None` if the fault does not change the script.
fn fault_script(kind: FaultKind, own: &SimScript, times: FaultTimings) -> Option<SimScript> {
    let mut script = own.clone();
    match kind {
        FaultKind::CrashLoop => (script.exit_after, script.exit_code) = (Some(LIFETIME), 1),
        FaultKind::SlowHandshake => script.handshake_delay = times.handshake_timeout / 2,
        FaultKind::NoHandshake => script.handshake_never = true,
        FaultKind::SlowSigterm => script.sigterm_delay = Some(times.grace / 2),
        FaultKind::IgnoreSigterm => (script.ignore_sigterm, script.ignore_eof) = (true, true),
        FaultKind::StderrFlood => script.stderr_bytes_per_second = FLOOD_BYTES_PER_SECOND,
        FaultKind::Garbage => script.garbage_lines += JUNK_LINES,
        FaultKind::StrayAnswers => script.stray_answers = JUNK_LINES,
        FaultKind::MemoryGrowth => (script.grow_per_call, script.memory_max) = (GROWTH, GROWTH_MAX),
        FaultKind::Crash
        | FaultKind::Exit0
        | FaultKind::Hang
        | FaultKind::Huge
        | FaultKind::Unauthorized
        | FaultKind::SessionLost
        | FaultKind::Refused
        | FaultKind::StreamCut
        | FaultKind::WorkerPanic
        | FaultKind::TeamPanic
        | FaultKind::RegistryPanic
        | FaultKind::BatcherPanic
        | FaultKind::SinkFails
        | FaultKind::SinkPanics => return None,
    }
    Some(script)
}

// Reactions to SIGTERM and the output of a server are set when it starts, so the instance must be restarted.
pub(crate) fn is_injected_by_restart(kind: FaultKind) -> bool {
    use FaultKind::{Garbage, IgnoreSigterm, MemoryGrowth, SlowSigterm, StderrFlood, StrayAnswers};
    matches!(kind, SlowSigterm | IgnoreSigterm | StderrFlood | Garbage | StrayAnswers | MemoryGrowth)
}

// The healing restarts or updates the instance.
pub(crate) fn is_healed_by_restart(kind: FaultKind) -> bool {
    use FaultKind::{CrashLoop, Garbage, StderrFlood, StrayAnswers, Unauthorized};
    matches!(kind, CrashLoop | StderrFlood | Garbage | StrayAnswers | Unauthorized)
}

pub(crate) struct CountingConnector {
    pub connectors: Connectors,
    pub recorder: Arc<RunRecorder>,
}

impl ProcessConnector for CountingConnector {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        if let Some(nth) = InstanceNo::from_installation_id(spec.id.installation.as_str()) {
            self.recorder.record_start(nth);
        }
        self.connectors.open(spec, run)
    }
}
