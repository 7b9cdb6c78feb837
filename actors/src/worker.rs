//! Shared parts of both kinds of workers: messages, arguments, and the path of session events to the team.

use std::any::Any;
use std::sync::Arc;

use ractor::{ActorRef, cast};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::audience::{Audience, Source, Stage};
use crate::batcher::Emitter;
use crate::byte_budget::ServerMemory;
use crate::calls::{CallPort, Counters, PortEnd};
use crate::model::era::Era;
use crate::model::event::Subject;
use crate::model::exit::WorkerExit;
use crate::model::ids::Run;
use crate::model::spec::InstanceSpec;
use crate::rules::jitter::Dice;
use crate::rules::slot::{HealthNews, Input};
use crate::seam::{Connector, Link, OpenError};
use crate::session::{Basis, Control, News};
use crate::{remote_worker, stdio_worker, team};

/// Messages to a worker. `Opened` contains the result of starting a process. `Over` means that the session has ended
/// and nothing of the run is left. `Panic` panics on purpose, for the load harness and the tests.
pub(crate) enum Msg {
    Opened(Result<Link, OpenError>),
    Control(Control),
    Over(WorkerExit),
    Panic,
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

pub(crate) struct Args {
    pub(crate) run: Run,
    pub(crate) spec: Arc<InstanceSpec>,
    pub(crate) subject: Arc<Subject>,
    pub(crate) discover: bool,
    pub(crate) era: Option<Era>,
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) audience: Arc<dyn Audience>,
    pub(crate) server_memory: ServerMemory,
    pub(crate) counters: Arc<Counters>,
    pub(crate) events: Emitter,
    pub(crate) team: ActorRef<team::Msg>,
    pub(crate) dice: Dice,
}

impl Args {
    pub(crate) fn door(&self) -> (CallPort, PortEnd) {
        CallPort::new(self.run, self.spec.clone(), self.counters.clone())
    }

    pub(crate) fn basis(&self, since: Instant, port: PortEnd, control: mpsc::UnboundedReceiver<Control>) -> Basis {
        let wall = self.events.clone();
        Basis {
            spec: self.spec.clone(),
            port,
            control,
            counters: self.counters.clone(),
            wall: Arc::new(move || wall.wall()),
            since,
            discover: self.discover,
            era: self.era,
            dice: self.dice.clone(),
            news: self.news(),
            printed: None,
            memory: self.server_memory.clone(),
            stage: Stage::new(self.audience.clone(), Source { id: self.spec.id.clone(), run: self.run }),
        }
    }

    fn news(&self) -> Box<dyn Fn(News) + Send> {
        let (run, id, team) = (self.run, self.spec.id.clone(), self.team.clone());
        Box::new(move |news| {
            let input = match news {
                News::FirstByte => Input::FirstByte(run),
                News::Printed(line) => Input::Printed(run, line),
                News::Initialized(server) => Input::Initialized(run, server),
                News::Discovered(catalogue) => Input::Discovered(run, catalogue),
                News::DiscoveryFailed(why, pause) => Input::DiscoveryFailed(run, why, pause),
                News::Recovered => Input::Recovered(run),
                News::Leans(era) => Input::Leans(run, era),
                News::Degraded(failures, last_error) => {
                    Input::Health(run, HealthNews::Degraded { failures, last_error })
                }
                News::Restored(failures, last_error) => {
                    Input::Health(run, HealthNews::Restored { failures, last_error })
                }
            };
            // The cast fails if the team's supervisor has died, and this worker with it.
            let _ = cast!(team, team::Msg::News(id.clone(), input));
        })
    }

    pub(crate) fn tell_spawned(&self, spawned: team::Spawned) {
        let _ = cast!(self.team, team::Msg::Spawned(self.spec.id.clone(), self.run, spawned));
    }

    pub(crate) fn span(&self) -> tracing::Span {
        let spec = &self.spec;
        tracing::info_span!("session", instance = %spec.name)
    }
}

pub(crate) fn exit_of(state: Box<dyn Any + Send>) -> Option<WorkerExit> {
    match state.downcast::<stdio_worker::State>() {
        Ok(state) => state.exit,
        Err(state) => state.downcast::<remote_worker::State>().ok()?.exit,
    }
}
