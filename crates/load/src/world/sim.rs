//! Simulated servers in this process. A fault overrides the script of a server from its next start on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::future::{join, ready};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::Connectors;
use tokio::time::sleep;

use super::{DETECTION_CALL_TIME, FleetScripts, InjectionFuture, ServerFaults, ServerWorld};
use crate::fleet::CREDENTIAL;
use crate::scenario::Scenario;
use crate::types::{FaultKind, InstanceNo, LoadTarget, LoadTransport, PlannedFault};
use mcp_satellite_sim::{SimConnector, SimHandle, SimPlan, SimScript};

pub(crate) struct SimWorld {
    sim: SimConnector,
    scripts: Arc<FleetScripts>,
    overrides: Arc<ScriptOverrides>,
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
        let overrides = Arc::<ScriptOverrides>::default();
        let (now, own) = (Arc::clone(&overrides), Arc::clone(scripts));
        let sim = SimConnector::with_plan(move |spec, _| {
            let nth = InstanceNo::from_installation_id(spec.id.installation.as_str()).unwrap_or(InstanceNo(0));
            let script = now.scripts().get(&nth).cloned();
            SimPlan::new(script.unwrap_or_else(|| Arc::clone(own.own_script(nth))))
        });
        Self {
            sim: sim.without_history(),
            scripts: Arc::clone(scripts),
            overrides,
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
    fn connectors(&self) -> Connectors {
        self.sim.clone().into()
    }

    fn target(&self, _nth: InstanceNo, kind: usize) -> LoadTarget {
        match self.transports[kind] {
            LoadTransport::Stdio => LoadTarget::Process("simulated".to_owned(), Vec::new()),
            LoadTransport::Remote => LoadTarget::Remote("http://simulated.example/mcp".to_owned()),
        }
    }

    fn set_script(&self, nth: InstanceNo, script: Option<SimScript>) -> Result<(), String> {
        let mut scripts = self.overrides.scripts();
        match script {
            Some(script) => drop(scripts.insert(nth, Arc::new(script))),
            None => drop(scripts.remove(&nth)),
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

    fn inject_remote<'a>(
        &'a self,
        nth: InstanceNo,
        what: &'a PlannedFault,
        faults: &'a ServerFaults,
    ) -> InjectionFuture<'a> {
        let remote = self.sim.remote(self.scripts.fleet.id(nth));
        async move {
            match what.kind {
                FaultKind::Unauthorized => {
                    let wanted = (CREDENTIAL.to_owned(), credential(what).into());
                    remote.change(|config| config.required_header = Some(wanted));
                    faults.trigger_detection(nth).await;
                }
                FaultKind::SessionLost => {
                    faults.require_online(nth)?;
                    remote.expire(404);
                    faults.trigger_detection(nth).await;
                }
                FaultKind::Refused => {
                    remote.take_down(FailureKind::Refused);
                    faults.trigger_detection(nth).await;
                }
                // Only a response in progress can be cut, so the fault needs a call of its own.
                _ => {
                    faults.require_online(nth)?;
                    let cut = async {
                        sleep(DETECTION_CALL_TIME / 2).await;
                        remote.cut();
                    };
                    join(faults.call_echo(nth), cut).await.0?;
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
        faults: &'a ServerFaults,
    ) -> InjectionFuture<'a> {
        async move {
            let fleet = &self.scripts.fleet;
            if what.kind == FaultKind::Unauthorized {
                let spec = fleet.spec(nth, self.target(nth, fleet.kind(nth)), &credential(what));
                return faults.runtime.update(spec).await.map(drop).map_err(|error| error.to_string());
            }
            self.sim.remote(fleet.id(nth)).bring_up();
            Ok(())
        }
        .boxed()
    }

    fn server_count(&self) -> usize {
        self.sim.alive_count() + self.sim.line_count()
    }
}
