//! The common body of both kinds of workers: messages, arguments, the session task, and the path of session events to
//! the team. The actors differ in how they open the transport.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use mcp_satellite_session::{ResumedSession, SessionEvent};
use ractor::{ActorRef, cast};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::Instrument;

use crate::audience::{Audience, AudienceHandle, SessionSource};
use crate::batcher::EventSender;
use crate::byte_budget::ServerMemory;
use crate::calls::{CallPort, CallPortReceiver, InstanceCounters};
use crate::model::era::Era;
use crate::model::event::EventSubject;
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::ids::RunNumber;
use crate::model::spec::InstanceSpec;
use crate::probe::{ActorAnswer, ActorProbe};
use crate::rules::jitter::JitterRng;
use crate::rules::slot::{HealthChange, SlotInput};
use crate::seam::{Connectors, ProcessLink, RuntimeObserver};
use crate::session::{SessionArgs, SessionControl};
use crate::stdio_worker::ProcessRun;
use crate::tasks::{ActorTasks, panic_text};
use crate::team_messages::{self, SpawnedRun};

/// Messages to a worker. `Opened` contains the result of starting or adopting a process. `SessionEnded` means that the
/// session has ended and nothing of the run is left. `Probe` contains the run, for the answer. `Panic` panics on purpose,
/// for the load harness and the tests.
pub(crate) enum Msg {
    Opened(Result<OpenedProcess, ExitCause>),
    Control(SessionControl),
    SessionEnded(WorkerExit),
    Probe(ActorProbe, RunNumber),
    Panic,
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

/// Process of a run, and the session that it continues if it was adopted.
pub(crate) struct OpenedProcess {
    pub(crate) link: ProcessLink,
    pub(crate) resumed: Option<ResumedSession>,
}

pub(crate) struct Args {
    pub(crate) run: RunNumber,
    pub(crate) spec: Arc<InstanceSpec>,
    pub(crate) subject: Arc<EventSubject>,
    pub(crate) discover: bool,
    /// True if the run takes over the server of an earlier satellite.
    pub(crate) adopts: bool,
    pub(crate) era: Option<Era>,
    pub(crate) connectors: Connectors,
    pub(crate) audience: Arc<dyn Audience>,
    pub(crate) server_memory: ServerMemory,
    pub(crate) observer: Arc<dyn RuntimeObserver>,
    pub(crate) counters: Arc<InstanceCounters>,
    pub(crate) events: EventSender,
    pub(crate) team: ActorRef<team_messages::Msg>,
    pub(crate) rng: JitterRng,
}

impl Args {
    pub(crate) fn create_port(&self, first_id: u64) -> (CallPort, CallPortReceiver) {
        CallPort::new(self.run, first_id, self.spec.clone(), self.counters.clone(), self.observer.clone())
    }

    pub(crate) fn common(
        &self,
        since: Instant,
        port: CallPortReceiver,
        control: mpsc::UnboundedReceiver<SessionControl>,
    ) -> SessionArgs {
        let wall = self.events.clone();
        SessionArgs {
            spec: self.spec.clone(),
            port,
            control,
            counters: self.counters.clone(),
            wall: Arc::new(move || wall.wall()),
            since,
            discover: self.discover,
            era: self.era,
            resumed: None,
            rng: self.rng.clone(),
            report_event: self.event_reporter(),
            stdout_lines: None,
            memory: self.server_memory.clone(),
            observer: self.observer.clone(),
            audience: AudienceHandle::new(
                self.audience.clone(),
                SessionSource { id: self.spec.id.clone(), run: self.run },
            ),
        }
    }

    fn event_reporter(&self) -> Box<dyn Fn(SessionEvent) + Send> {
        let (run, id, team) = (self.run, self.spec.id.clone(), self.team.clone());
        Box::new(move |event| {
            let input = match event {
                SessionEvent::FirstByte => SlotInput::FirstByte(run),
                SessionEvent::StdoutLine(line) => SlotInput::StdoutLine(run, line),
                SessionEvent::Initialized(server) => SlotInput::Initialized(run, server),
                SessionEvent::Resumed(server, initialized_at) => SlotInput::Adopted(run, server, initialized_at),
                SessionEvent::Discovered(catalogue) => SlotInput::Discovered(run, catalogue),
                SessionEvent::DiscoveryFailed(why, pause) => SlotInput::DiscoveryFailed(run, why, pause),
                SessionEvent::Recovered => SlotInput::Recovered(run),
                SessionEvent::EraChanged(era) => SlotInput::EraChanged(run, era),
                SessionEvent::Degraded(failures, last_error) => {
                    SlotInput::Health(run, HealthChange::Degraded { failures, last_error })
                }
                SessionEvent::Restored(failures, last_error) => {
                    SlotInput::Health(run, HealthChange::Restored { failures, last_error })
                }
            };
            // The cast fails if the team's supervisor has died, and this worker with it.
            let _ = cast!(team, team_messages::Msg::Input(id.clone(), input));
        })
    }

    pub(crate) fn report_spawned(&self, spawned: SpawnedRun) {
        let _ = cast!(self.team, team_messages::Msg::Spawned(self.spec.id.clone(), self.run, spawned));
    }

    pub(crate) fn span(&self) -> tracing::Span {
        let spec = &self.spec;
        tracing::info_span!("session", instance = %spec.name)
    }
}

/// State of a worker. `transport` is what the actor keeps of the transport that it opened.
pub(crate) struct State<T> {
    pub(crate) transport: T,
    pub(crate) tasks: ActorTasks,
    control: mpsc::UnboundedSender<SessionControl>,
    exit: Option<WorkerExit>,
}

impl<T> State<T> {
    pub(crate) fn new(transport: T, control: mpsc::UnboundedSender<SessionControl>) -> Self {
        Self { transport, tasks: ActorTasks::default(), control, exit: None }
    }

    /// Runs the session in a task, which reports the exit after `complete` has added to it.
    pub(crate) fn spawn_session<C>(
        &mut self,
        span: tracing::Span,
        session: impl Future<Output = WorkerExit> + Send + 'static,
        complete: impl FnOnce(WorkerExit) -> C + Send + 'static,
        myself: ActorRef<Msg>,
    ) where
        C: Future<Output = WorkerExit> + Send + 'static,
    {
        // Chained, not awaited in an async block, which would reserve memory for the session twice.
        let ending = AssertUnwindSafe(session).catch_unwind().then(move |exit| {
            complete(
                exit.unwrap_or_else(|panic| WorkerExit::from_cause(ExitCause::Panicked(panic_text(panic.as_ref())))),
            )
        });
        // The cast fails if the worker is gone.
        let ending = ending.map(move |exit| drop(cast!(myself, Msg::SessionEnded(exit))));
        self.tasks.spawn(ending.instrument(span));
    }

    pub(crate) fn handle(&mut self, msg: Msg, myself: &ActorRef<Msg>) {
        match msg {
            // The send fails if the session has already ended.
            Msg::Control(control) => drop(self.control.send(control)),
            Msg::SessionEnded(exit) => self.finish(exit, myself),
            Msg::Probe(probe, run) => probe.answer(|took| ActorAnswer::Worker { took, run }),
            Msg::Panic => std::panic::panic_any("asked to panic"),
            // A remote worker opens no process.
            Msg::Opened(_) => {}
        }
    }

    pub(crate) fn finish(&mut self, exit: WorkerExit, myself: &ActorRef<Msg>) {
        self.exit = Some(exit);
        self.tasks = ActorTasks::default();
        myself.stop(None);
    }
}

pub(crate) fn exit_from_state(state: Box<dyn Any + Send>) -> Option<WorkerExit> {
    match state.downcast::<State<ProcessRun>>() {
        Ok(state) => state.exit,
        Err(state) => state.downcast::<State<()>>().ok()?.exit,
    }
}
