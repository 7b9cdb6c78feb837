//! Where the servers are.

mod real;
mod sim;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::exit::{CallError, Fate};
use mcp_satellite_actors::model::ids::{InstanceId, Run};
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::{Connector, Line, Link, OpenError};

use super::recorder::Recorder;
use super::scenario::Scenario;
use super::types::{FaultKind, Injection, Nth, Target};

use crate::connect::sim::Script;

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

/// Whether the server has got a call, whatever has come of it.
fn reached<T>(called: Result<T, CallError>) -> Result<(), String> {
    match called {
        Err(error) if error.fate() == Some(Fate::NotSent) => Err(error.to_string()),
        _ => Ok(()),
    }
}

fn is_online(id: &InstanceId, runtime: &RuntimeHandle) -> Result<(), String> {
    let status = runtime.status(id).map(|view| view.status);
    status.filter(|status| *status == Status::Online).map(drop).ok_or_else(|| "it is not online".to_owned())
}

/// Servers, and how they are hurt.
pub(crate) trait World: Send + Sync {
    /// What the runtime starts them with.
    fn connector(&self) -> Arc<dyn Connector>;
    /// What an instance's configuration says.
    fn target(&self, nth: Nth, kind: usize) -> Target;
    /// Carries out a fault of a server. The error says what was in the way.
    fn hurt<'a>(&'a self, what: &'a Injection, runtime: &'a RuntimeHandle) -> BoxFuture<'a, Result<(), String>>;
    /// Takes it back.
    fn heal<'a>(&'a self, what: &'a Injection, runtime: &'a RuntimeHandle) -> BoxFuture<'a, Result<(), String>>;
    /// Lets go of everything of its own that is no server of the runtime's, once that has ended.
    fn close(&self) {}
    /// Servers and lines to servers that are there.
    fn left(&self) -> usize;
    /// Processes that are there, where servers are processes: their own children too.
    fn processes(&self) -> usize {
        0
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
    match kind {
        FaultKind::SlowSigterm
        | FaultKind::IgnoreSigterm
        | FaultKind::StderrFlood
        | FaultKind::Garbage
        | FaultKind::StrayAnswers
        | FaultKind::MemoryGrowth => true,
        FaultKind::Crash
        | FaultKind::Exit0
        | FaultKind::CrashLoop
        | FaultKind::SlowHandshake
        | FaultKind::NoHandshake
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
        | FaultKind::SinkPanics => false,
    }
}

/// Whether it is taken back by restarting or updating the instance.
pub(crate) fn heals_by_restart(kind: FaultKind) -> bool {
    match kind {
        FaultKind::CrashLoop
        | FaultKind::StderrFlood
        | FaultKind::Garbage
        | FaultKind::StrayAnswers
        | FaultKind::Unauthorized => true,
        FaultKind::Crash
        | FaultKind::Exit0
        | FaultKind::SlowHandshake
        | FaultKind::NoHandshake
        | FaultKind::Hang
        | FaultKind::SlowSigterm
        | FaultKind::IgnoreSigterm
        | FaultKind::Huge
        | FaultKind::MemoryGrowth
        | FaultKind::SessionLost
        | FaultKind::Refused
        | FaultKind::StreamCut
        | FaultKind::WorkerPanic
        | FaultKind::TeamPanic
        | FaultKind::RegistryPanic
        | FaultKind::BatcherPanic
        | FaultKind::SinkFails
        | FaultKind::SinkPanics => false,
    }
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
