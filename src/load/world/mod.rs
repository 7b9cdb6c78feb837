//! Where the servers are.

mod real;
mod sim;

use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::{Connector, Line, Link, OpenError};

use super::recorder::Recorder;
use super::types::{FaultKind, Injection, Nth, Target};

pub(crate) use sim::SimWorld;

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
    /// Servers and lines to servers that are there.
    fn left(&self) -> usize;
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
