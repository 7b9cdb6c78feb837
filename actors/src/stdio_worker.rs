//! The actor of one run of a stdio server, from the fork or the adoption until nothing of it is left. It never restarts
//! the server: it ends with a typed reason, and the team's supervisor decides what to do.
//!
//! Session events go to the team directly. This actor owns what must end with it: the tasks, and the guard that kills
//! the process even if the actor is killed.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use mcp_satellite_session::{FIRST_REQUEST_ID, ResumedSession};
use ractor::{Actor, ActorProcessingErr, ActorRef, cast};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::calls::{CallPort, CallPortReceiver};
use crate::logs;
use crate::model::exit::{ExitCause, WorkerExit};
use crate::model::spec::InstanceSpec;
use crate::seam::{AdoptedProcess, OpenError, ProcessConnector};
use crate::session::{SessionArgs, SessionControl, stdio};
use crate::tasks::{catch_panic, panic_text};
use crate::team_messages::SpawnedRun;
use crate::worker::{Args, Msg, OpenedProcess, State};

pub(crate) struct StdioWorker;

pub(crate) struct ProcessRun {
    args: Args,
    // Current specification of the run.
    spec: watch::Sender<Arc<InstanceSpec>>,
    since: Instant,
    pending_session: Option<(CallPortReceiver, mpsc::UnboundedReceiver<SessionControl>)>,
    port: CallPort,
    guard: Option<Box<dyn Send>>,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for StdioWorker {
    type Msg = Msg;
    type State = State<ProcessRun>;
    type Arguments = Args;

    async fn pre_start(&self, myself: ActorRef<Msg>, args: Args) -> Result<Self::State, ActorProcessingErr> {
        // An adoption is complete before the instance appears in the snapshot.
        let adopted = args.adopts.then(|| adopt(&args));
        let first_id = adopted.as_ref().and_then(|adopted| Some(adopted.as_ref().ok()?.1)).unwrap_or(FIRST_REQUEST_ID);
        let (port, end) = args.create_port(first_id);
        let (control, controlled) = mpsc::unbounded_channel();
        let (connectors, spec, run) = (args.connectors.clone(), args.spec.clone(), args.run);
        let opening = async move { connectors.open(spec, run).await };
        // The handshake timeout starts here: a start that hangs consumes it.
        let limit = args.spec.policy.session.handshake_timeout;
        let process = ProcessRun {
            spec: watch::Sender::new(args.spec.clone()),
            args,
            since: Instant::now(),
            pending_session: Some((end, controlled)),
            port,
            guard: None,
        };
        let mut state = State::new(process, control);
        if let Some(adopted) = adopted {
            let _ = cast!(myself, Msg::Opened(adopted.map(|(process, _)| process)));
            return Ok(state);
        }
        state.tasks.spawn(async move {
            let opening = AssertUnwindSafe(opening).catch_unwind();
            let opened = match tokio::time::timeout(limit, opening).await {
                Ok(Ok(opened)) => opened,
                Ok(Err(panic)) => {
                    Err(OpenError::Server(format!("the connector panicked: {}", panic_text(panic.as_ref()))))
                }
                Err(_elapsed) => {
                    Err(OpenError::Server(format!("the start took longer than {} s", limit.as_secs_f64())))
                }
            };
            let opened = opened.map(|link| OpenedProcess { link, resumed: None }).map_err(|error| match error {
                OpenError::Server(why) => ExitCause::Spawn(why),
                OpenError::Machine(why) => ExitCause::Machine(why),
            });
            // If the worker is gone, the error returns the link, and dropping it drops its guard.
            let _ = cast!(myself, Msg::Opened(opened));
        });
        Ok(state)
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut Self::State) -> Result<(), ActorProcessingErr> {
        match msg {
            Msg::Opened(Ok(process)) => start_session(state, process, myself),
            Msg::Opened(Err(cause)) => finish(state, WorkerExit::from_cause(cause), &myself),
            // No session exists yet: dropping the pending start also drops its result.
            Msg::Control(SessionControl::Stop) if state.transport.pending_session.is_some() => {
                finish(state, WorkerExit::from_cause(ExitCause::Requested), &myself);
            }
            Msg::SessionEnded(exit) => finish(state, exit, &myself),
            msg => {
                if let Msg::Control(SessionControl::ApplySpec(spec)) = &msg {
                    state.transport.spec.send_replace(spec.clone());
                }
                state.handle(msg, &myself);
            }
        }
        Ok(())
    }
}

/// Takes over the server of an earlier satellite. Returns it with the id of the first request.
fn adopt(args: &Args) -> Result<(OpenedProcess, u64), ExitCause> {
    let adopted = catch_panic("ProcessConnector::adopt", || args.connectors.adopt(&args.spec, args.run)).flatten();
    let Some(AdoptedProcess { link, session, first_id }) = adopted else {
        return Err(ExitCause::NotAdopted("the server no longer runs".to_owned()));
    };
    // A clock that was set back results in an age of zero.
    let age = args.events.wall().duration_since(session.initialized_at).try_into().unwrap_or_default();
    let now = Instant::now().into_std();
    let resumed = ResumedSession::new(&session, now.checked_sub(age).unwrap_or(now)).map_err(ExitCause::NotAdopted)?;
    Ok((OpenedProcess { link, resumed: Some(resumed) }, first_id))
}

fn start_session(state: &mut State<ProcessRun>, opened: OpenedProcess, myself: ActorRef<Msg>) {
    let OpenedProcess { link, resumed } = opened;
    let process = &mut state.transport;
    let Some((port, control)) = process.pending_session.take() else { return };
    let args = &process.args;
    process.guard = Some(link.guard);
    args.report_spawned(SpawnedRun {
        pid: catch_panic("Process::pid", || link.process.pid()).flatten(),
        containment: catch_panic("ServerProcess::containment", || link.process.containment()).flatten(),
        port: process.port.clone(),
    });
    let limit_probe = catch_panic("ServerProcess::limit_probe", || link.process.limit_probe()).flatten();
    // The task that drains the output drops the sender at its end.
    let (last_line, mut drained) = watch::channel(None);
    let (printed, lines) = mpsc::channel(logs::PRINTED_MAX);
    let output = logs::ServerOutput { stderr: link.stderr, stdout_lines: lines, last_line };
    state.tasks.spawn(logs::drain(output, process.spec.subscribe(), args.subject.clone(), args.events.clone()));
    let session = stdio::run(stdio::Args {
        common: SessionArgs { stdout_lines: Some(printed), resumed, ..args.common(process.since, port, control) },
        reader: link.reader,
        writer: link.writer,
        process: link.process,
    });
    let exit_drain = args.spec.policy.session.exit_drain;
    let complete = move |mut exit: WorkerExit| async move {
        // The last lines of stderr often explain the exit. A grandchild may keep the pipe open, so the wait is
        // limited.
        let ended = async { while drained.changed().await.is_ok() {} };
        let _ = tokio::time::timeout(exit_drain, ended).await;
        if exit.cause != ExitCause::Requested {
            exit.last_line.clone_from(&drained.borrow_and_update());
        }
        if exit.cause == ExitCause::Exited {
            exit.limit =
                limit_probe.and_then(|limit_probe| catch_panic("ServerProcess::limit_probe", limit_probe).flatten());
        }
        exit
    };
    let span = args.span();
    state.spawn_session(span, session, complete, myself);
}

fn finish(state: &mut State<ProcessRun>, exit: WorkerExit, myself: &ActorRef<Msg>) {
    let args = &state.transport.args;
    let has_panicked = matches!(exit.cause, ExitCause::Panicked(_));
    if exit.cause != ExitCause::Requested && exit.uptime.is_none() && !has_panicked {
        let failure = if args.adopts { "the running server is restarted" } else { "the server did not start" };
        let line = format!("{failure}: {}", exit.cause_text());
        logs::emit_error_line(line, &args.subject, &args.events);
    }
    state.finish(exit, myself);
    state.transport.guard = None;
}
