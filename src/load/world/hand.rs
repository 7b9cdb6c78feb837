//! How a server is hurt and healed, wherever it is.

use std::sync::Arc;

use mcp_satellite_actors::model::exit::Fate;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::runtime::RuntimeHandle;
use serde_json::value::RawValue;

use super::{GROWTH, GROWTH_MAX, POKE, Scripts, Times, World, changed};
use crate::load::scenario::Scenario;
use crate::load::types::{FaultKind, Injection, Nth, Victim};

/// Calls to a server that is brought up with a fault, each with its own timeout: a starved machine starts it late.
const BRING_UP_CALLS: usize = 5;

/// See the module.
pub(crate) struct Hand {
    world: Arc<dyn World>,
    pub(super) scripts: Arc<Scripts>,
    pub(super) runtime: RuntimeHandle,
    times: Times,
}

impl Hand {
    pub(crate) fn new(
        world: Arc<dyn World>,
        scripts: Arc<Scripts>,
        runtime: RuntimeHandle,
        scenario: &Scenario,
    ) -> Self {
        Self { world, scripts, runtime, times: Times::of(scenario) }
    }

    /// Carries out a fault of a server. The error says what was in the way.
    pub(crate) async fn hurt(&self, what: &Injection) -> Result<(), String> {
        let Victim::Instance(nth) = what.victim else { return Err("it is no server".to_owned()) };
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
                // One who has yet to come up would end as one that never came up.
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
                // A call that fails found the server at the end of its growth: other callers have called it, too.
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
            | FaultKind::SinkPanics => return Err("no server does that".to_owned()),
        }
        Ok(())
    }

    /// Takes it back.
    pub(crate) async fn heal(&self, what: &Injection) -> Result<(), String> {
        let Victim::Instance(nth) = what.victim else { return Ok(()) };
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

    pub(super) fn is_online(&self, nth: Nth) -> Result<(), String> {
        let status = self.runtime.status(self.scripts.fleet.id(nth)).map(|view| view.status);
        status.filter(|status| *status == Status::Online).map(drop).ok_or_else(|| "it is not online".to_owned())
    }

    /// From its next start on it does what such a fault makes it do.
    fn overlay(&self, nth: Nth, kind: FaultKind) -> Result<(), String> {
        match changed(kind, self.scripts.own(nth), self.times) {
            Some(script) => self.world.act(nth, Some(script)),
            None => Ok(()),
        }
    }

    async fn restart(&self, nth: Nth) -> Result<(), String> {
        self.runtime.restart(self.scripts.fleet.id(nth)).await.map_err(|error| error.to_string())
    }

    /// Calls it as anybody would, and comes back when the call has come to something. A tool that is a fault has no
    /// answer; it is an error if the server has not got the call.
    pub(super) async fn poke(&self, nth: Nth, tool: &str, arguments: &str) -> Result<(), String> {
        let arguments = RawValue::from_string(arguments.to_owned()).ok();
        match self.runtime.call(self.scripts.fleet.id(nth), tool, arguments, Some(self.times.call)).await {
            Err(error) if error.fate() == Some(Fate::NotSent) => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    pub(super) async fn echo(&self, nth: Nth) -> Result<(), String> {
        self.poke(nth, "echo", &format!(r#"{{"text":"poke","after_ms":{}}}"#, POKE.as_millis())).await
    }

    /// Has the runtime find out how its server is: what comes of the call is not the point.
    pub(super) async fn notice(&self, nth: Nth) {
        let _ = self.echo(nth).await;
    }

    /// Brings up a server that does what such a fault makes it do, and none after it.
    async fn bring_up(&self, nth: Nth, kind: FaultKind) -> Result<(), String> {
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
