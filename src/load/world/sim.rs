//! Simulated servers in this process. A fault overrides the script of a server from its next start on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::future::{join, ready};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::Connector;
use tokio::time::sleep;

use super::{FleetScripts, InjectionFuture, POKE, ServerFaults, ServerWorld};
use crate::connect::sim::{SimConnector, SimHandle, SimPlan, SimScript};
use crate::load::fleet::CREDENTIAL;
use crate::load::scenario::Scenario;
use crate::load::types::{FaultKind, InstanceNo, LoadTarget, LoadTransport, PlannedFault};

pub(crate) struct SimWorld {
    sim: SimConnector,
    scripts: Arc<FleetScripts>,
    over: Arc<ScriptOverrides>,
    transports: Vec<LoadTransport>,
}

/// Scripts of faults, which override the servers' own scripts.
#[derive(Default)]
struct ScriptOverrides(Mutex<HashMap<InstanceNo, Arc<SimScript>>>);

impl ScriptOverrides {
    fn scripts(&self) -> MutexGuard<'_, HashMap<InstanceNo, Arc<SimScript>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimWorld {
    pub(crate) fn new(scenario: &Scenario, scripts: &Arc<FleetScripts>) -> Self {
        let over = Arc::<ScriptOverrides>::default();
        let (now, own) = (Arc::clone(&over), Arc::clone(scripts));
        let sim = SimConnector::with(move |spec, _| {
            let nth = InstanceNo::of(spec.id.installation.as_str()).unwrap_or(InstanceNo(0));
            let over = now.scripts().get(&nth).cloned();
            SimPlan::new(over.unwrap_or_else(|| Arc::clone(own.own(nth))))
        });
        Self {
            sim: sim.forgetful(),
            scripts: Arc::clone(scripts),
            over,
            transports: scenario.kinds.iter().map(|kind| kind.transport).collect(),
        }
    }

    fn handle(&self, nth: InstanceNo) -> Result<SimHandle, String> {
        self.sim.handle(self.scripts.fleet.id(nth)).ok_or_else(|| "the instance has no running server".to_owned())
    }
}

// Credentials that the remote server requires after the fault. They differ from all earlier ones.
fn credential(what: &PlannedFault) -> String {
    format!("Bearer {}", what.serial)
}

impl ServerWorld for SimWorld {
    fn connector(&self) -> Arc<dyn Connector> {
        Arc::new(self.sim.clone())
    }

    fn target(&self, _nth: InstanceNo, kind: usize) -> LoadTarget {
        match self.transports[kind] {
            LoadTransport::Stdio => LoadTarget::Process("simulated".to_owned(), Vec::new()),
            LoadTransport::Remote => LoadTarget::Remote("http://simulated.example/mcp".to_owned()),
        }
    }

    fn act(&self, nth: InstanceNo, script: Option<SimScript>) -> Result<(), String> {
        let mut over = self.over.scripts();
        match script {
            Some(script) => drop(over.insert(nth, Arc::new(script))),
            None => drop(over.remove(&nth)),
        }
        Ok(())
    }

    fn kill(&self, nth: InstanceNo, _runtime: &RuntimeHandle) -> Result<(), String> {
        self.handle(nth).map(|handle| handle.signal(9))
    }

    fn freeze(&self, nth: InstanceNo, _runtime: &RuntimeHandle) -> Result<(), String> {
        self.handle(nth).map(|handle| handle.freeze())
    }

    fn exit<'a>(&'a self, nth: InstanceNo, _hand: &'a ServerFaults) -> InjectionFuture<'a> {
        ready(self.handle(nth).map(|handle| handle.exit(0))).boxed()
    }

    fn hurt_remote<'a>(
        &'a self,
        nth: InstanceNo,
        what: &'a PlannedFault,
        hand: &'a ServerFaults,
    ) -> InjectionFuture<'a> {
        let remote = self.sim.remote(self.scripts.fleet.id(nth));
        async move {
            match what.kind {
                FaultKind::Unauthorized => {
                    let wanted = (CREDENTIAL.to_owned(), credential(what).into());
                    remote.change(|manner| manner.wants = Some(wanted));
                    hand.notice(nth).await;
                }
                FaultKind::SessionLost => {
                    hand.is_online(nth)?;
                    remote.expire(404);
                    hand.notice(nth).await;
                }
                FaultKind::Refused => {
                    remote.down(FailureKind::Refused);
                    hand.notice(nth).await;
                }
                // Only a response in progress can be cut, so the fault needs a call of its own.
                _ => {
                    hand.is_online(nth)?;
                    let cut = async {
                        sleep(POKE / 2).await;
                        remote.cut();
                    };
                    join(hand.echo(nth), cut).await.0?;
                }
            }
            Ok(())
        }
        .boxed()
    }

    fn heal_remote<'a>(
        &'a self,
        nth: InstanceNo,
        what: &'a PlannedFault,
        hand: &'a ServerFaults,
    ) -> InjectionFuture<'a> {
        async move {
            let fleet = &self.scripts.fleet;
            if what.kind == FaultKind::Unauthorized {
                let spec = fleet.spec(nth, self.target(nth, fleet.kind(nth)), &credential(what));
                return hand.runtime.update(spec).await.map(drop).map_err(|error| error.to_string());
            }
            self.sim.remote(fleet.id(nth)).up();
            Ok(())
        }
        .boxed()
    }

    fn left(&self) -> usize {
        self.sim.alive() + self.sim.lines()
    }
}
