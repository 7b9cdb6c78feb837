//! Injection and healing of server faults, independent of where the servers run.

use std::sync::Arc;

use mcp_satellite_actors::model::exit::CallFate;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::runtime::RuntimeHandle;
use serde_json::value::RawValue;

use super::{FaultTimings, FleetScripts, GROWTH, GROWTH_MAX, POKE, ServerWorld, changed};
use crate::load::scenario::Scenario;
use crate::load::types::{FaultKind, FaultVictim, InstanceNo, PlannedFault};

// Calls to a server that starts with a fault, each with its own timeout: a busy machine starts it late.
const BRING_UP_CALLS: usize = 5;

/// Injector of server faults.
pub(crate) struct ServerFaults {
    world: Arc<dyn ServerWorld>,
    pub(super) scripts: Arc<FleetScripts>,
    pub(super) runtime: RuntimeHandle,
    times: FaultTimings,
}

impl ServerFaults {
    pub(crate) fn new(
        world: Arc<dyn ServerWorld>,
        scripts: Arc<FleetScripts>,
        runtime: RuntimeHandle,
        scenario: &Scenario,
    ) -> Self {
        Self { world, scripts, runtime, times: FaultTimings::of(scenario) }
    }

    pub(crate) async fn hurt(&self, what: &PlannedFault) -> Result<(), String> {
        let FaultVictim::Instance(nth) = what.victim else { return Err("the victim is not a server".to_owned()) };
        match what.kind {
            FaultKind::Crash => self.world.kill(nth, &self.runtime)?,
            FaultKind::Exit0 => self.world.exit(nth, self).await?,
            FaultKind::CrashLoop | FaultKind::SlowHandshake | FaultKind::NoHandshake => {
                self.overlay(nth, what.kind)?;
                if let Err(why) = self.world.kill(nth, &self.runtime) {
                    self.world.act(nth, None)?;
                    return Err(why);
                }
            }
            FaultKind::Hang => {
                // A server that is still starting would fail as one without a handshake.
                self.is_online(nth)?;
                self.world.freeze(nth, &self.runtime)?;
            }
            FaultKind::SlowSigterm | FaultKind::IgnoreSigterm => {
                self.bring_up(nth, what.kind).await?;
                self.restart(nth).await?;
            }
            FaultKind::StderrFlood | FaultKind::Garbage | FaultKind::StrayAnswers => {
                self.overlay(nth, what.kind)?;
                self.restart(nth).await?;
            }
            FaultKind::MemoryGrowth => {
                self.bring_up(nth, what.kind).await?;
                // Ignore errors: calls of other callers may have exhausted the memory already.
                for _ in 0..GROWTH_MAX / GROWTH {
                    self.notice(nth).await;
                }
            }
            FaultKind::Huge => self.poke(nth, "huge", "{}").await?,
            FaultKind::Unauthorized | FaultKind::SessionLost | FaultKind::Refused | FaultKind::StreamCut => {
                self.world.hurt_remote(nth, what, self).await?;
            }
            FaultKind::WorkerPanic
            | FaultKind::TeamPanic
            | FaultKind::RegistryPanic
            | FaultKind::BatcherPanic
            | FaultKind::SinkFails
            | FaultKind::SinkPanics => return Err("this fault does not apply to servers".to_owned()),
        }
        Ok(())
    }

    pub(crate) async fn heal(&self, what: &PlannedFault) -> Result<(), String> {
        let FaultVictim::Instance(nth) = what.victim else { return Ok(()) };
        match what.kind {
            FaultKind::SlowHandshake | FaultKind::NoHandshake => self.world.act(nth, None),
            FaultKind::CrashLoop | FaultKind::StderrFlood | FaultKind::Garbage | FaultKind::StrayAnswers => {
                self.world.act(nth, None)?;
                self.restart(nth).await
            }
            FaultKind::Unauthorized | FaultKind::Refused => self.world.heal_remote(nth, what, self).await,
            FaultKind::Crash
            | FaultKind::Exit0
            | FaultKind::Hang
            | FaultKind::SlowSigterm
            | FaultKind::IgnoreSigterm
            | FaultKind::Huge
            | FaultKind::MemoryGrowth
            | FaultKind::SessionLost
            | FaultKind::StreamCut
            | FaultKind::WorkerPanic
            | FaultKind::TeamPanic
            | FaultKind::RegistryPanic
            | FaultKind::BatcherPanic
            | FaultKind::SinkFails
            | FaultKind::SinkPanics => Ok(()),
        }
    }

    pub(super) fn is_online(&self, nth: InstanceNo) -> Result<(), String> {
        let status = self.runtime.status(self.scripts.fleet.id(nth)).map(|view| view.status);
        status.filter(|status| *status == Status::Online).map(drop).ok_or_else(|| "the server is not online".to_owned())
    }

    // Applies from the server's next start on.
    fn overlay(&self, nth: InstanceNo, kind: FaultKind) -> Result<(), String> {
        match changed(kind, self.scripts.own(nth), self.times) {
            Some(script) => self.world.act(nth, Some(script)),
            None => Ok(()),
        }
    }

    async fn restart(&self, nth: InstanceNo) -> Result<(), String> {
        self.runtime.restart(self.scripts.fleet.id(nth)).await.map_err(|error| error.to_string())
    }

    /// Calls a tool and waits for the result. A tool that causes a fault returns none, so the function fails only if
    /// the server did not receive the call.
    pub(super) async fn poke(&self, nth: InstanceNo, tool: &str, arguments: &str) -> Result<(), String> {
        let arguments = RawValue::from_string(arguments.to_owned()).ok();
        match self.runtime.call(self.scripts.fleet.id(nth), tool, arguments, Some(self.times.call)).await {
            Err(error) if error.fate() == Some(CallFate::NotSent) => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    pub(super) async fn echo(&self, nth: InstanceNo) -> Result<(), String> {
        self.poke(nth, "echo", &format!(r#"{{"text":"poke","after_ms":{}}}"#, POKE.as_millis())).await
    }

    /// Makes the runtime notice the server's state. The result of the call is ignored.
    pub(super) async fn notice(&self, nth: InstanceNo) {
        let _ = self.echo(nth).await;
    }

    /// Restarts the server with the script of the fault, waits until it answers, and restores its own script for later
    /// starts.
    async fn bring_up(&self, nth: InstanceNo, kind: FaultKind) -> Result<(), String> {
        self.overlay(nth, kind)?;
        let mut up = self.restart(nth).await;
        if up.is_ok() {
            for _ in 0..BRING_UP_CALLS {
                up = self.echo(nth).await;
                if up.is_ok() {
                    break;
                }
            }
        }
        self.world.act(nth, None)?;
        up
    }
}
