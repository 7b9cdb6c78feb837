//! The connector for servers that are child processes: MCP over stdin and stdout, stderr beside it.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::{InstanceSpec, Target};
use mcp_satellite_actors::seam::{Connector, Link, OpenError};

use super::environment::environment;
use super::process::{Launch, Launcher};

/// Starts servers as child processes without a sandbox, each in a process group of its own.
///
/// Clones share two threads, one that forks and one that reaps. They end when the connector and everything that it
/// started are gone, and do not keep the process from exiting.
#[derive(Clone)]
pub struct StdioConnector {
    launcher: Launcher,
    withheld: Arc<RwLock<BTreeSet<String>>>,
}

impl StdioConnector {
    /// A connector whose servers inherit the environment but for the denied names and those `withheld`: the variables
    /// that the host itself reads as secrets. Fails where a thread cannot be created or `/proc` cannot be read.
    pub fn new(withheld: Vec<String>) -> io::Result<Self> {
        let withheld = Arc::new(RwLock::new(withheld.into_iter().collect()));
        Ok(Self { launcher: Launcher::start()?, withheld })
    }

    /// Withholds these variables too from every server that is started from now on.
    pub fn withhold(&self, names: impl IntoIterator<Item = String>) {
        self.withheld.write().unwrap_or_else(PoisonError::into_inner).extend(names);
    }
}

impl Connector for StdioConnector {
    fn open(&self, spec: Arc<InstanceSpec>, _run: Run) -> BoxFuture<'static, Result<Link, OpenError>> {
        let Self { launcher, withheld } = self.clone();
        Box::pin(async move {
            let Target::Stdio { command, cwd } = &spec.target else {
                return Err(OpenError("remote servers are not served by the stdio connector".into()));
            };
            // A secret in a command's or a directory's name is a mistake, and no reason to show it.
            let failed = |reason: &dyn std::fmt::Display| {
                OpenError(spec.mask.apply(&format!("cannot start `{command}`: {reason}")))
            };
            let withheld: Vec<String> =
                withheld.read().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
            let environment =
                environment(std::env::vars_os(), &withheld, &spec.env).map_err(|invalid| failed(&invalid))?;
            let launch = Launch {
                command: command.into(),
                args: spec.args.iter().map(|arg| arg.expose().into()).collect(),
                environment,
                directory: cwd.as_ref().map(Into::into),
            };
            launcher.launch(launch).await.map_err(|error| failed(&error))
        })
    }
}
