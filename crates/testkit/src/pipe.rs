//! Servers behind a pipe, which a test writes itself.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, pending, ready};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{OpenError, ProcessConnector, ProcessEnd, ProcessLink, ServerProcess};
use tokio::io::{AsyncRead, AsyncWrite};

/// The stdout and the stdin of a server.
pub type ServerPipes = (Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncWrite + Send + Unpin>);

/// A connector whose servers are functions: each start gets the pipes that the function returns.
#[derive(Clone)]
pub struct PipeConnector<F>(pub F);

impl<F> ProcessConnector for PipeConnector<F>
where
    F: Fn(&InstanceSpec) -> Result<ServerPipes, OpenError> + Send + Sync + 'static,
{
    fn open(&self, spec: Arc<InstanceSpec>, _run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let process = Box::new(PipeProcess { is_ended: false });
        let link = (self.0)(&spec).map(|(reader, writer)| ProcessLink {
            reader,
            writer,
            stderr: None,
            process,
            guard: Box::new(()),
        });
        ready(link).boxed()
    }
}

/// The process of such a server, which ends at `terminate` or `kill`.
struct PipeProcess {
    is_ended: bool,
}

impl ServerProcess for PipeProcess {
    fn pid(&self) -> Option<u32> {
        None
    }

    fn wait(&mut self) -> BoxFuture<'_, ProcessEnd> {
        if self.is_ended { ready(ProcessEnd { code: Some(0), signal: None }).boxed() } else { pending().boxed() }
    }

    fn wait_all(&mut self) -> BoxFuture<'_, ()> {
        self.wait().map(|_| ()).boxed()
    }

    fn terminate(&mut self) {
        self.is_ended = true;
    }

    fn kill(&mut self) {
        self.is_ended = true;
    }
}
