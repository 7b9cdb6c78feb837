//! Where the servers are.

mod hand;
mod real;
mod sim;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::{Connector, Line, Link, OpenError};

use super::fleet::Fleet;
use super::plan::script_of;
use super::recorder::Recorder;
use super::scenario::Scenario;
use super::types::{FaultKind, Injection, Nth, Target};

use crate::connect::sim::Script;

pub(crate) use hand::Hand;
pub(crate) use real::RealWorld;
pub(crate) use sim::SimWorld;

/// What a server that is flooding writes to stderr in a second.
const FLOOD: u64 = 200 * 1024;
/// What a growing server keeps of a call, and at most.
const GROWTH: usize = 256 * 1024;
const GROWTH_MAX: usize = 3 * GROWTH;
/// Garbage and stray answers before each answer.
const LINES: usize = 3;
/// A server in a crash loop lives so long after each handshake.
const LIFETIME: Duration = Duration::from_millis(100);

/// What a server takes for a call of the harness's own, so that a fault can come while it is under way.
const POKE: Duration = Duration::from_millis(20);

/// Whether a fault was brought about; the error says what was in the way.
type Done<'a> = BoxFuture<'a, Result<(), String>>;

/// Servers, and what can be done to one. What a fault is made of is [`Hand`]'s.
pub(crate) trait World: Send + Sync {
    /// What the runtime starts them with.
    fn connector(&self) -> Arc<dyn Connector>;
    /// What an instance's configuration says.
    fn target(&self, nth: Nth, kind: usize) -> Target;
    /// What it does from its next start on; nothing is what it does of itself.
    fn act(&self, nth: Nth, script: Option<Script>) -> Result<(), String>;
    /// Its process dies at once.
    fn kill(&self, nth: Nth, runtime: &RuntimeHandle) -> Result<(), String>;
    /// Its process does nothing any more.
    fn freeze(&self, nth: Nth, runtime: &RuntimeHandle) -> Result<(), String>;
    /// It ends by itself, with code 0.
    fn exit<'a>(&'a self, nth: Nth, hand: &'a Hand) -> Done<'a>;
    /// Carries out a fault of a remote server.
    fn hurt_remote<'a>(&'a self, nth: Nth, what: &'a Injection, hand: &'a Hand) -> Done<'a>;
    /// Takes it back.
    fn heal_remote<'a>(&'a self, nth: Nth, what: &'a Injection, hand: &'a Hand) -> Done<'a>;
    /// Lets go of everything of its own that is no server of the runtime's, once that has ended.
    fn close(&self) {}
    /// Servers and lines to servers that are there.
    fn left(&self) -> usize;
    /// Processes that are there, where servers are processes: their own children too.
    fn processes(&self) -> usize {
        0
    }
}

/// What servers do of themselves.
pub(crate) struct Scripts {
    pub(crate) fleet: Arc<Fleet>,
    /// By kind and place: see [`script_of`].
    pub(crate) scripts: Vec<Vec<Arc<Script>>>,
}

impl Scripts {
    fn own(&self, nth: Nth) -> &Arc<Script> {
        &self.scripts[self.fleet.kind(nth)][script_of(nth)]
    }
}

/// What of the policy faults are measured by.
#[derive(Debug, Clone, Copy)]
struct Times {
    handshake_timeout: Duration,
    grace: Duration,
    /// A call has come to something by then.
    call: Duration,
}

impl Times {
    fn of(scenario: &Scenario) -> Self {
        let session = &scenario.policy.session;
        Self {
            handshake_timeout: session.handshake_timeout,
            grace: session.terminate_grace,
            call: session.handshake_timeout + session.request_timeout,
        }
    }
}

/// What such a fault makes of a server from its next start on, if that is what it does.
fn changed(kind: FaultKind, own: &Script, times: Times) -> Option<Script> {
    let mut script = own.clone();
    match kind {
        FaultKind::CrashLoop => (script.exit_after, script.exit_code) = (Some(LIFETIME), 1),
        FaultKind::SlowHandshake => script.handshake_delay = times.handshake_timeout / 2,
        FaultKind::NoHandshake => script.handshake_never = true,
        FaultKind::SlowSigterm => script.sigterm_delay = Some(times.grace / 2),
        FaultKind::IgnoreSigterm => (script.ignore_sigterm, script.ignore_eof) = (true, true),
        FaultKind::StderrFlood => script.stderr_bytes_per_second = FLOOD,
        FaultKind::Garbage => script.garbage_lines += LINES,
        FaultKind::StrayAnswers => script.stray_answers = LINES,
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

/// Whether such a fault is brought upon an instance by restarting it: how a server treats SIGTERM or what it writes is
/// settled when it starts.
pub(crate) fn hurts_by_restart(kind: FaultKind) -> bool {
    use FaultKind::{Garbage, IgnoreSigterm, MemoryGrowth, SlowSigterm, StderrFlood, StrayAnswers};
    matches!(kind, SlowSigterm | IgnoreSigterm | StderrFlood | Garbage | StrayAnswers | MemoryGrowth)
}

/// Whether it is taken back by restarting or updating the instance.
pub(crate) fn heals_by_restart(kind: FaultKind) -> bool {
    use FaultKind::{CrashLoop, Garbage, StderrFlood, StrayAnswers, Unauthorized};
    matches!(kind, CrashLoop | StderrFlood | Garbage | StrayAnswers | Unauthorized)
}

/// Counts every start on its way to the world.
pub(crate) struct Counting {
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) recorder: Arc<Recorder>,
}

impl Connector for Counting {
    fn open(&self, spec: Arc<InstanceSpec>, run: Run) -> BoxFuture<'static, Result<Link, OpenError>> {
        if let Some(nth) = Nth::of(spec.id.installation.as_str()) {
            self.recorder.started(nth, run);
        }
        self.connector.open(spec, run)
    }

    fn dial(&self, spec: &Arc<InstanceSpec>, run: Run) -> Box<dyn Line> {
        self.connector.dial(spec, run)
    }
}
