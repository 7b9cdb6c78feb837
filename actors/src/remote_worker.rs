//! The actor of one connection to a remote server, from the first request until the connection is lost or stopped. It
//! never reconnects: it ends with a typed reason, and the team's supervisor decides what to do.

use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use ractor::{Actor, ActorProcessingErr, ActorRef, cast};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::Instrument;

use crate::model::exit::{ExitCause, WorkerExit};
use crate::session::{SessionControl, remote};
use crate::tasks::{ActorTasks, panic_text};
use crate::team;
use crate::worker::{Args, Msg};

pub(crate) struct RemoteWorker;

pub(crate) struct State {
    control: mpsc::UnboundedSender<SessionControl>,
    tasks: ActorTasks,
    pub(crate) exit: Option<WorkerExit>,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for RemoteWorker {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, myself: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        let (port, end) = args.create_port();
        let (control, controlled) = mpsc::unbounded_channel();
        args.report_spawned(team::SpawnedRun { pid: None, containment: None, port });
        let common = args.common(Instant::now(), end, controlled);
        let (spec, run, connector) = (args.spec.clone(), args.run, args.connector.clone());
        let span = args.span();
        // The connector may panic too, so it runs inside `catch_unwind`.
        let session = async move {
            let line = connector.dial(&spec, run);
            remote::run(remote::Args { common, line }).await
        };
        let ending = AssertUnwindSafe(session).catch_unwind().then(move |exit| async move {
            let exit =
                exit.unwrap_or_else(|panic| WorkerExit::from_cause(ExitCause::Panicked(panic_text(panic.as_ref()))));
            // The cast fails if the worker is gone.
            let _ = cast!(myself, Msg::SessionEnded(exit));
        });
        let mut tasks = ActorTasks::default();
        tasks.spawn(ending.instrument(span));
        Ok(State { control, tasks, exit: None })
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match msg {
            // The send fails if the session has already ended.
            Msg::Control(control) => drop(state.control.send(control)),
            Msg::SessionEnded(exit) => {
                state.exit = Some(exit);
                state.tasks = ActorTasks::default();
                myself.stop(None);
            }
            Msg::Panic => std::panic::panic_any("asked to panic"),
            // A remote worker opens no process.
            Msg::Opened(_) => {}
        }
        Ok(())
    }
}
