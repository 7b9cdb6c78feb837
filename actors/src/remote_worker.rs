//! The actor of one connection to a remote server, from the first request until the connection is lost or stopped. It
//! never reconnects: it ends with a typed reason, and the team's supervisor decides what to do.

use std::future::ready;

use mcp_satellite_session::FIRST_REQUEST_ID;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::seam::LineConnector;
use crate::session::remote;
use crate::team_messages::SpawnedRun;
use crate::worker::{Args, Msg, State};

pub(crate) struct RemoteWorker;

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for RemoteWorker {
    type Msg = Msg;
    type State = State<()>;
    type Arguments = Args;

    async fn pre_start(&self, myself: ActorRef<Msg>, args: Args) -> Result<State<()>, ActorProcessingErr> {
        let (port, end) = args.create_port(FIRST_REQUEST_ID);
        let (control, controlled) = mpsc::unbounded_channel();
        args.report_spawned(SpawnedRun { pid: None, containment: None, port });
        let (common, span) = (args.common(Instant::now(), end, controlled), args.span());
        let Args { connectors, spec, run, .. } = args;
        // The connector may panic too, so it runs in the session's task.
        let session = async move {
            let line = connectors.dial(&spec, run);
            remote::run(remote::Args { common, line }).await
        };
        let mut state = State::new((), control);
        state.spawn_session(span, session, ready, myself);
        Ok(state)
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State<()>) -> Result<(), ActorProcessingErr> {
        state.handle(msg, &myself);
        Ok(())
    }
}
