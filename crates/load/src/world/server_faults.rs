//! Injection and healing of server faults, independent of where the servers run.

use std::sync::Arc;

use mcp_satellite_actors::model::exit::CallFate;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::runtime::RuntimeHandle;
use serde_json::value::RawValue;

use super::{DETECTION_CALL_TIME, FaultTimings, FleetScripts, GROWTH, GROWTH_MAX, ServerWorld, fault_script};
use crate::scenario::Scenario;
use crate::types::{FaultKind, FaultVictim, InstanceNo, PlannedFault};

// Calls to a server that starts with a fault, each with its own timeout: a busy machine starts it late.
const BRING_UP_CALLS: usize = 5;

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
        Self { world, scripts, runtime, times: FaultTimings::from_scenario(scenario) }
    }

    pub(crate) async fn inject(&self, what: &PlannedFault) -> Result<(), String> {
        let FaultVictim::Instance(nth) = what.victim else { return Err("the victim is not a server".to_owned()) };
        match what.kind {
            FaultKind::Crash => self.world.kill(nth, &self.runtime)?,
            FaultKind::Exit0 => self.world.exit(nth, self).await?,
            FaultKind::CrashLoop | FaultKind::SlowHandshake | FaultKind::NoHandshake => {
                self.override_script(nth, what.kind)?;
                if let Err(why) = self.world.kill(nth, &self.runtime) {
                    self.world.set_script(nth, None)?;
                    return Err(why);
                }
            }
            FaultKind::Hang => {
                // A server that is still starting would fail as one without a handshake.
                self.require_online(nth)?;
                self.world.freeze(nth, &self.runtime)?;
            }
            FaultKind::SlowSigterm | FaultKind::IgnoreSigterm => {
                self.restart_with_fault(nth, what.kind).await?;
                self.restart(nth).await?;
            }
            FaultKind::StderrFlood | FaultKind::Garbage | FaultKind::StrayAnswers => {
                self.override_script(nth, what.kind)?;
                self.restart(nth).await?;
            }
            FaultKind::MemoryGrowth => {
                self.restart_with_fault(nth, what.kind).await?;
                // Ignore errors: calls of other callers may have exhausted the memory already.
                for _ in 0..GROWTH_MAX / GROWTH {
                    self.trigger_detection(nth).await;
                }
            }
            FaultKind::Huge => self.call_tool(nth, "huge", "{}").await?,
            FaultKind::Unauthorized | FaultKind::SessionLost | FaultKind::Refused | FaultKind::StreamCut => {
                self.world.inject_remote(nth, what, self).await?;
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
            FaultKind::SlowHandshake | FaultKind::NoHandshake => self.world.set_script(nth, None),
            FaultKind::CrashLoop | FaultKind::StderrFlood | FaultKind::Garbage | FaultKind::StrayAnswers => {
                self.world.set_script(nth, None)?;
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

    pub(super) fn require_online(&self, nth: InstanceNo) -> Result<(), String> {
        let status = self.runtime.status(self.scripts.fleet.id(nth)).map(|view| view.status);
        status.filter(|status| *status == Status::Online).map(drop).ok_or_else(|| "the server is not online".to_owned())
    }

    // Applies from the server's next start on.
    fn override_script(&self, nth: InstanceNo, kind: FaultKind) -> Result<(), String> {
        match fault_script(kind, self.scripts.own_script(nth), self.times) {
            Some(script) => self.world.set_script(nth, Some(script)),
            None => Ok(()),
        }
    }

    async fn restart(&self, nth: InstanceNo) -> Result<(), String> {
        self.runtime.restart(self.scripts.fleet.id(nth)).await.map_err(|error| error.to_string())
    }

    /// Calls a tool and waits for the result. A tool that causes a fault returns none, so the function fails only if
    /// the server did not receive the call.
    pub(super) async fn call_tool(&self, nth: InstanceNo, tool: &str, arguments: &str) -> Result<(), String> {
        let arguments = RawValue::from_string(arguments.to_owned()).ok();
        match self.runtime.call(self.scripts.fleet.id(nth), tool, arguments, Some(self.times.call)).await {
            Err(error) if error.fate() == Some(CallFate::NotSent) => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    pub(super) async fn call_echo(&self, nth: InstanceNo) -> Result<(), String> {
        self.call_tool(nth, "echo", &format!(r#"{{"text":"poke","after_ms":{}}}"#, DETECTION_CALL_TIME.as_millis()))
            .await
    }

    /// Makes the runtime notice the server's state. The result of the call is ignored.
    pub(super) async fn trigger_detection(&self, nth: InstanceNo) {
        let _ = self.call_echo(nth).await;
    }

    /// Restarts the server with the script of the fault, waits until it answers, and restores its own script for later
    /// starts.
    async fn restart_with_fault(&self, nth: InstanceNo, kind: FaultKind) -> Result<(), String> {
        self.override_script(nth, kind)?;
        let mut up = self.restart(nth).await;
        if up.is_ok() {
            for _ in 0..BRING_UP_CALLS {
                up = self.call_echo(nth).await;
                if up.is_ok() {
                    break;
                }
            }
        }
        self.world.set_script(nth, None)?;
        up
    }
}
