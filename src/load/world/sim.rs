//! Servers in this process. What a server does from its next start on is a script that lies over its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::future::{BoxFuture, join};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::Connector;
use serde_json::value::RawValue;
use tokio::time::sleep;

use super::{GROWTH, GROWTH_MAX, POKE, Times, World, changed, is_online, reached};
use crate::connect::sim::{Script, SimConnector, SimHandle, SimPlan};
use crate::load::fleet::{CREDENTIAL, Fleet};
use crate::load::plan::script_of;
use crate::load::scenario::Scenario;
use crate::load::types::{FaultKind, Injection, Nth, Target, Transport, Victim};

/// Servers in this process.
pub(crate) struct SimWorld {
    sim: SimConnector,
    fleet: Arc<Fleet>,
    servers: Arc<Servers>,
    transports: Vec<Transport>,
    times: Times,
}

struct Servers {
    fleet: Arc<Fleet>,
    /// By kind and place: see [`script_of`].
    scripts: Vec<Vec<Arc<Script>>>,
    /// What lies over them.
    over: Mutex<HashMap<Nth, Arc<Script>>>,
}

impl Servers {
    fn own(&self, nth: Nth) -> Arc<Script> {
        Arc::clone(&self.scripts[self.fleet.kind(nth)][script_of(nth)])
    }

    fn now(&self, nth: Nth) -> Arc<Script> {
        self.over().get(&nth).cloned().unwrap_or_else(|| self.own(nth))
    }

    fn over(&self) -> MutexGuard<'_, HashMap<Nth, Arc<Script>>> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimWorld {
    pub(crate) fn new(scenario: &Scenario, fleet: &Arc<Fleet>, scripts: Vec<Vec<Arc<Script>>>) -> Self {
        let servers = Arc::new(Servers { fleet: Arc::clone(fleet), scripts, over: Mutex::default() });
        let planned = Arc::clone(&servers);
        let sim = SimConnector::with(move |spec, _| {
            let nth = Nth::of(spec.id.installation.as_str()).unwrap_or(Nth(0));
            SimPlan::new(planned.now(nth))
        });
        Self {
            sim: sim.forgetful(),
            fleet: Arc::clone(fleet),
            servers,
            transports: scenario.kinds.iter().map(|kind| kind.transport).collect(),
            times: Times::of(scenario),
        }
    }

    fn handle(&self, nth: Nth) -> Result<SimHandle, String> {
        self.sim.handle(self.fleet.id(nth)).ok_or_else(|| "it has no server now".to_owned())
    }

    /// One who has yet to come up is not frozen: it would end as one that never came up.
    fn well(&self, nth: Nth, runtime: &RuntimeHandle) -> Result<SimHandle, String> {
        is_online(self.fleet.id(nth), runtime)?;
        self.handle(nth)
    }

    /// From its next start on it does what such a fault makes it do.
    fn overlay(&self, nth: Nth, kind: FaultKind) {
        if let Some(script) = changed(kind, &self.servers.own(nth), self.times) {
            self.servers.over().insert(nth, Arc::new(script));
        }
    }

    async fn restart(&self, nth: Nth, runtime: &RuntimeHandle) -> Result<(), String> {
        runtime.restart(self.fleet.id(nth)).await.map_err(|error| error.to_string())
    }

    /// Calls it as anybody would, and comes back when the call has come to something. A tool that is a fault has no
    /// answer; it is an error if the server has not got the call.
    async fn poke(&self, nth: Nth, tool: &str, runtime: &RuntimeHandle) -> Result<(), String> {
        let arguments = RawValue::from_string(format!(r#"{{"text":"poke","after_ms":{}}}"#, POKE.as_millis())).ok();
        reached(runtime.call(self.fleet.id(nth), tool, arguments, Some(self.times.call)).await)
    }

    /// Has the runtime find out how its server is: what comes of the call is not the point.
    async fn notice(&self, nth: Nth, runtime: &RuntimeHandle) {
        let _ = self.poke(nth, "echo", runtime).await;
    }

    /// Brings up a server that does what such a fault makes it do, and none after it.
    async fn bring_up(&self, nth: Nth, kind: FaultKind, runtime: &RuntimeHandle) -> Result<(), String> {
        self.overlay(nth, kind);
        let up = self.restart(nth, runtime).await;
        let up = up.and(self.poke(nth, "echo", runtime).await);
        self.servers.over().remove(&nth);
        up
    }

    async fn befall(&self, nth: Nth, what: &Injection, runtime: &RuntimeHandle) -> Result<(), String> {
        let remote = || self.sim.remote(self.fleet.id(nth));
        match what.kind {
            FaultKind::Crash => self.handle(nth)?.signal(9),
            FaultKind::Exit0 => self.handle(nth)?.exit(0),
            FaultKind::CrashLoop | FaultKind::SlowHandshake | FaultKind::NoHandshake => {
                let handle = self.handle(nth)?;
                self.overlay(nth, what.kind);
                handle.signal(9);
            }
            FaultKind::Hang => self.well(nth, runtime)?.freeze(),
            FaultKind::SlowSigterm | FaultKind::IgnoreSigterm => {
                self.bring_up(nth, what.kind, runtime).await?;
                self.restart(nth, runtime).await?;
            }
            FaultKind::StderrFlood | FaultKind::Garbage | FaultKind::StrayAnswers => {
                self.overlay(nth, what.kind);
                self.restart(nth, runtime).await?;
            }
            FaultKind::MemoryGrowth => {
                self.bring_up(nth, what.kind, runtime).await?;
                for _ in 0..GROWTH_MAX / GROWTH {
                    self.poke(nth, "echo", runtime).await?;
                }
            }
            FaultKind::Huge => self.poke(nth, "huge", runtime).await?,
            FaultKind::Unauthorized => {
                let wanted = (CREDENTIAL.to_owned(), credential(what).into());
                remote().change(|manner| manner.wants = Some(wanted));
                self.notice(nth, runtime).await;
            }
            FaultKind::SessionLost => {
                is_online(self.fleet.id(nth), runtime)?;
                remote().expire(404);
                self.notice(nth, runtime).await;
            }
            FaultKind::Refused => {
                remote().down(FailureKind::Refused);
                self.notice(nth, runtime).await;
            }
            // Where nothing is under way there is nothing to cut.
            FaultKind::StreamCut => {
                is_online(self.fleet.id(nth), runtime)?;
                let cut = async {
                    sleep(POKE / 2).await;
                    remote().cut();
                };
                join(self.poke(nth, "echo", runtime), cut).await.0?;
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

    async fn recover(&self, nth: Nth, what: &Injection, runtime: &RuntimeHandle) -> Result<(), String> {
        self.servers.over().remove(&nth);
        match what.kind {
            FaultKind::CrashLoop | FaultKind::StderrFlood | FaultKind::Garbage | FaultKind::StrayAnswers => {
                self.restart(nth, runtime).await
            }
            FaultKind::Unauthorized => {
                let spec = self.fleet.spec(nth, self.target(nth, self.fleet.kind(nth)), &credential(what));
                runtime.update(spec).await.map(drop).map_err(|error| error.to_string())
            }
            FaultKind::Refused => {
                self.sim.remote(self.fleet.id(nth)).up();
                Ok(())
            }
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
            | FaultKind::StreamCut
            | FaultKind::WorkerPanic
            | FaultKind::TeamPanic
            | FaultKind::RegistryPanic
            | FaultKind::BatcherPanic
            | FaultKind::SinkFails
            | FaultKind::SinkPanics => Ok(()),
        }
    }
}

/// What an endpoint wants to see after this fault: nobody has shown it before.
fn credential(what: &Injection) -> String {
    format!("Bearer {}", what.serial)
}

impl World for SimWorld {
    fn connector(&self) -> Arc<dyn Connector> {
        Arc::new(self.sim.clone())
    }

    fn target(&self, _nth: Nth, kind: usize) -> Target {
        match self.transports[kind] {
            Transport::Stdio => Target::Process("simulated".to_owned(), Vec::new()),
            Transport::Remote => Target::Remote("http://simulated.example/mcp".to_owned()),
        }
    }

    fn hurt<'a>(&'a self, what: &'a Injection, runtime: &'a RuntimeHandle) -> BoxFuture<'a, Result<(), String>> {
        match what.victim {
            Victim::Instance(nth) => self.befall(nth, what, runtime).boxed(),
            Victim::Team(_) | Victim::Us => futures::future::ready(Err("it is no server".to_owned())).boxed(),
        }
    }

    fn heal<'a>(&'a self, what: &'a Injection, runtime: &'a RuntimeHandle) -> BoxFuture<'a, Result<(), String>> {
        match what.victim {
            Victim::Instance(nth) => self.recover(nth, what, runtime).boxed(),
            Victim::Team(_) | Victim::Us => futures::future::ready(Ok(())).boxed(),
        }
    }

    fn left(&self) -> usize {
        self.sim.alive() + self.sim.lines()
    }
}
