//! Servers in this process. What a server does from its next start on is a script that lies over its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::runtime::RuntimeHandle;
use mcp_satellite_actors::seam::Connector;
use serde_json::value::RawValue;

use super::World;
use crate::connect::sim::{Script, SimConnector, SimHandle, SimPlan};
use crate::load::fleet::{CREDENTIAL, Fleet};
use crate::load::plan::script_of;
use crate::load::scenario::Scenario;
use crate::load::types::{FaultKind, Injection, Nth, Target, Transport, Victim};

/// What a server that is flooding writes to stderr in a second.
const FLOOD: u64 = 200 * 1024;
/// What a growing server keeps of a call, and at most.
const GROWTH: usize = 256 * 1024;
const GROWTH_MAX: usize = 3 * GROWTH;
/// Garbage and stray answers before each answer.
const LINES: usize = 3;
/// A server in a crash loop lives so long after each handshake.
const LIFETIME: Duration = Duration::from_millis(100);

/// Servers in this process.
pub(crate) struct SimWorld {
    sim: SimConnector,
    fleet: Arc<Fleet>,
    servers: Arc<Servers>,
    transports: Vec<Transport>,
    handshake_timeout: Duration,
    grace: Duration,
    call_timeout: Duration,
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
        let session = &scenario.policy.session;
        Self {
            sim: sim.forgetful(),
            fleet: Arc::clone(fleet),
            servers,
            transports: scenario.kinds.iter().map(|kind| kind.transport).collect(),
            handshake_timeout: session.handshake_timeout,
            grace: session.terminate_grace,
            call_timeout: session.handshake_timeout + session.request_timeout,
        }
    }

    fn handle(&self, nth: Nth) -> Result<SimHandle, String> {
        self.sim.handle(self.fleet.id(nth)).ok_or_else(|| "it has no server now".to_owned())
    }

    /// From its next start on it does this.
    fn overlay(&self, nth: Nth, change: impl FnOnce(&mut Script)) {
        let mut script = (*self.servers.own(nth)).clone();
        change(&mut script);
        self.servers.over().insert(nth, Arc::new(script));
    }

    /// Its server is killed, and the next one does this.
    fn kill_and(&self, nth: Nth, change: impl FnOnce(&mut Script)) -> Result<(), String> {
        let handle = self.handle(nth)?;
        self.overlay(nth, change);
        handle.signal(9);
        Ok(())
    }

    async fn restart(&self, nth: Nth, runtime: &RuntimeHandle) -> Result<(), String> {
        runtime.restart(self.fleet.id(nth)).await.map_err(|error| error.to_string())
    }

    /// Calls it as anybody would, and comes back when the call has come to something.
    async fn poke(&self, nth: Nth, tool: &str, runtime: &RuntimeHandle) {
        // A tool that is a fault has no answer.
        let arguments = RawValue::from_string(r#"{"text":"poke"}"#.to_owned()).ok();
        let _ = runtime.call(self.fleet.id(nth), tool, arguments, Some(self.call_timeout)).await;
    }

    /// Brings up a server that treats SIGTERM in a way of its own, and has it meet one.
    async fn meet_sigterm(
        &self,
        nth: Nth,
        runtime: &RuntimeHandle,
        change: impl FnOnce(&mut Script),
    ) -> Result<(), String> {
        self.overlay(nth, change);
        let up = self.restart(nth, runtime).await;
        self.poke(nth, "echo", runtime).await;
        self.servers.over().remove(&nth);
        up?;
        self.restart(nth, runtime).await
    }

    async fn befall(&self, nth: Nth, what: &Injection, runtime: &RuntimeHandle) -> Result<(), String> {
        let remote = || self.sim.remote(self.fleet.id(nth));
        match what.kind {
            FaultKind::Crash => self.handle(nth)?.signal(9),
            FaultKind::Exit0 => self.handle(nth)?.exit(0),
            FaultKind::CrashLoop => self.kill_and(nth, |script| {
                script.exit_after = Some(LIFETIME);
                script.exit_code = 1;
            })?,
            FaultKind::SlowHandshake => {
                self.kill_and(nth, |script| script.handshake_delay = self.handshake_timeout / 2)?;
            }
            FaultKind::NoHandshake => self.kill_and(nth, |script| script.handshake_never = true)?,
            FaultKind::Hang => self.handle(nth)?.freeze(),
            FaultKind::SlowSigterm => {
                self.meet_sigterm(nth, runtime, |script| script.sigterm_delay = Some(self.grace / 2)).await?;
            }
            FaultKind::IgnoreSigterm => {
                let deaf = |script: &mut Script| (script.ignore_sigterm, script.ignore_eof) = (true, true);
                self.meet_sigterm(nth, runtime, deaf).await?;
            }
            FaultKind::StderrFlood => {
                self.overlay(nth, |script| script.stderr_bytes_per_second = FLOOD);
                self.restart(nth, runtime).await?;
            }
            FaultKind::Garbage => {
                self.overlay(nth, |script| script.garbage_lines += LINES);
                self.restart(nth, runtime).await?;
            }
            FaultKind::StrayAnswers => {
                self.overlay(nth, |script| script.stray_answers = LINES);
                self.restart(nth, runtime).await?;
            }
            FaultKind::MemoryGrowth => {
                self.overlay(nth, |script| (script.grow_per_call, script.memory_max) = (GROWTH, GROWTH_MAX));
                let up = self.restart(nth, runtime).await;
                self.poke(nth, "echo", runtime).await;
                self.servers.over().remove(&nth);
                up?;
                for _ in 0..GROWTH_MAX / GROWTH {
                    self.poke(nth, "echo", runtime).await;
                }
            }
            FaultKind::Huge => self.poke(nth, "huge", runtime).await,
            FaultKind::Unauthorized => {
                let wanted = (CREDENTIAL.to_owned(), credential(what).into());
                remote().change(|manner| manner.wants = Some(wanted));
                self.poke(nth, "echo", runtime).await;
            }
            FaultKind::SessionLost => {
                remote().expire(404);
                self.poke(nth, "echo", runtime).await;
            }
            FaultKind::Refused => {
                remote().down(FailureKind::Refused);
                self.poke(nth, "echo", runtime).await;
            }
            FaultKind::StreamCut => remote().cut(),
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
