//! The actor of one run of a stdio server, from the fork until nothing of it is left. It never restarts the server: it
//! ends with a typed reason, and the team's supervisor decides what to do.
//!
//! Session events go to the team directly. This actor owns what must end with it: the tasks, and the guard that kills
//! the process even if the actor is killed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use ractor::{Actor, ActorProcessingErr, ActorRef, cast};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::Instrument;

use crate::calls::{CallPort, CallPortReceiver};
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::spec::InstanceSpec;
use crate::seam::{OpenError, ProcessLink};
use crate::session::{SessionArgs, SessionControl, stdio};
use crate::tasks::{ActorTasks, catch_panic, panic_text};
use crate::worker::{Args, Msg};
use crate::{logs, team};

pub(crate) struct StdioWorker;

pub(crate) struct State {
    args: Args,
    // Current specification of the run.
    spec: watch::Sender<Arc<InstanceSpec>>,
    since: Instant,
    pending_session: Option<(CallPortReceiver, mpsc::UnboundedReceiver<SessionControl>)>,
    port: CallPort,
    control: mpsc::UnboundedSender<SessionControl>,
    tasks: ActorTasks,
    guard: Option<Box<dyn Send>>,
    pub(crate) exit: Option<WorkerExit>,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for StdioWorker {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, myself: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        let (port, end) = args.create_port();
        let (control, controlled) = mpsc::unbounded_channel();
        let mut tasks = ActorTasks::default();
        let (connector, spec, run) = (args.connector.clone(), args.spec.clone(), args.run);
        let opening = async move { connector.open(spec, run).await };
        // The handshake timeout starts here: a start that hangs consumes it.
        let patience = args.spec.policy.session.handshake_timeout;
        tasks.spawn(async move {
            let opening = AssertUnwindSafe(opening).catch_unwind();
            let opened = match tokio::time::timeout(patience, opening).await {
                Ok(Ok(opened)) => opened,
                Ok(Err(panic)) => {
                    Err(OpenError::Server(format!("the connector panicked: {}", panic_text(panic.as_ref()))))
                }
                Err(_elapsed) => {
                    Err(OpenError::Server(format!("the start took longer than {} s", patience.as_secs_f64())))
                }
            };
            // If the worker is gone, the error returns the link, and dropping it drops its guard.
            let _ = cast!(myself, Msg::Opened(opened));
        });
        let waiting = Some((end, controlled));
        let spec = watch::Sender::new(args.spec.clone());
        Ok(State {
            args,
            spec,
            since: Instant::now(),
            pending_session: waiting,
            port,
            control,
            tasks,
            guard: None,
            exit: None,
        })
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match msg {
            Msg::Opened(Ok(link)) => state.start_session(link, &myself),
            Msg::Opened(Err(error)) => {
                let cause = match error {
                    OpenError::Server(why) => ExitCause::Spawn(why),
                    OpenError::Machine(why) => ExitCause::Machine(why),
                };
                state.finish(WorkerExit::from_cause(cause), &myself);
            }
            // No session exists yet: dropping the pending start also drops its result.
            Msg::Control(SessionControl::Stop) if state.pending_session.is_some() => {
                state.finish(WorkerExit::from_cause(ExitCause::Requested), &myself);
            }
            Msg::Control(control) => {
                if let SessionControl::Adopt(spec) = &control {
                    state.spec.send_replace(spec.clone());
                }
                // The send fails if the session has already ended.
                drop(state.control.send(control));
            }
            Msg::SessionEnded(exit) => state.finish(exit, &myself),
            Msg::Panic => std::panic::panic_any("asked to panic"),
        }
        Ok(())
    }
}

impl State {
    fn start_session(&mut self, link: ProcessLink, myself: &ActorRef<Msg>) {
        let Some((port, control)) = self.pending_session.take() else { return };
        let Args { spec, subject, events, .. } = &self.args;
        self.guard = Some(link.guard);
        self.args.report_spawned(team::SpawnedRun {
            pid: catch_panic("Process::pid", || link.process.pid()).flatten(),
            containment: catch_panic("Process::custody", || link.process.containment()).flatten(),
            port: self.port.clone(),
        });
        let autopsy = catch_panic("Process::autopsy", || link.process.limit_probe()).flatten();
        // The task that drains the output drops the sender at its end.
        let (last_line, mut drained) = watch::channel(None);
        let (printed, lines) = mpsc::channel(logs::PRINTED_MAX);
        let output = logs::ServerOutput { stderr: link.stderr, stdout_lines: lines, last_line };
        self.tasks.spawn(logs::drain(output, self.spec.subscribe(), subject.clone(), events.clone()));
        let session = stdio::run(stdio::Args {
            common: SessionArgs { stdout_lines: Some(printed), ..self.args.common(self.since, port, control) },
            reader: link.reader,
            writer: link.writer,
            process: link.process,
        });
        let span = self.args.span();
        let (me, exit_drain) = (myself.clone(), spec.policy.session.exit_drain);
        // Chained, not awaited in an async block, which would reserve memory for the session twice.
        let ending = AssertUnwindSafe(session).catch_unwind().then(move |exit| async move {
            let mut exit =
                exit.unwrap_or_else(|panic| WorkerExit::from_cause(ExitCause::Panicked(panic_text(panic.as_ref()))));
            // The last lines of stderr often explain the exit. A grandchild may keep the pipe open, so the wait is
            // limited.
            let ended = async { while drained.changed().await.is_ok() {} };
            let _ = tokio::time::timeout(exit_drain, ended).await;
            if exit.cause != ExitCause::Requested {
                exit.last_line.clone_from(&drained.borrow_and_update());
            }
            if exit.cause == ExitCause::Exited {
                exit.limit = autopsy.and_then(|autopsy| catch_panic("Process::autopsy", autopsy).flatten());
            }
            let _ = cast!(me, Msg::SessionEnded(exit));
        });
        self.tasks.spawn(ending.instrument(span));
    }

    fn finish(&mut self, exit: WorkerExit, myself: &ActorRef<Msg>) {
        let has_panicked = matches!(exit.cause, ExitCause::Panicked(_));
        if exit.cause != ExitCause::Requested && exit.uptime.is_none() && !has_panicked {
            logs::emit_error_line(
                format!("the server did not start: {}", exit.cause_text()),
                &self.args.subject,
                &self.args.events,
            );
        }
        self.exit = Some(exit);
        self.tasks = ActorTasks::default();
        self.guard = None;
        myself.stop(None);
    }
}
