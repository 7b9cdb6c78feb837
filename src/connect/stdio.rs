//! The connector for servers that are child processes: MCP over stdin and stdout, stderr beside it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::{InstanceId, Run};
use mcp_satellite_actors::model::spec::{InstanceSpec, Target};
use mcp_satellite_actors::seam::{Connector, Line, Link, OpenError, Unserved};

use super::isolation::{Finding, Isolation, Launchers, Prepared, Strictness, UidRange};
use super::process::{CgroupMode, Processes, Reclaimed, Usage};
use crate::data_dir::DataDir;

/// Starts servers as child processes, each with all that it starts held together, in a sandbox if so configured.
///
/// Clones share a few threads, of which one forks and one reaps. They end when the connector and everything that it
/// started are gone, and do not keep the process from exiting.
#[derive(Clone)]
pub struct StdioConnector {
    processes: Processes,
    launchers: Arc<Launchers>,
    withheld: Arc<RwLock<BTreeSet<String>>>,
}

/// How a connector starts and holds what it starts.
#[derive(Debug, Clone, Default)]
pub struct StdioOptions {
    /// Variables that the host itself reads as secrets: no server inherits them.
    pub withheld: Vec<String>,
    /// Where the ledger and the homes of sandboxed servers are. The caller makes sure that nobody else uses it. Without
    /// one nothing is written down, and nothing can be started in a sandbox.
    pub data_dir: Option<DataDir>,
    /// What servers are started in.
    pub isolation: Isolation,
    /// Whether that may be nothing.
    pub strictness: Strictness,
    /// Whether each run gets a cgroup.
    pub cgroups: CgroupMode,
    /// The user ids of which each team gets one for its servers without a sandbox. Needs root and a data directory. The
    /// homes of these users are beside the data directory, in `DATA_DIR.homes`.
    pub uid_range: Option<UidRange>,
}

impl StdioConnector {
    /// A connector whose servers inherit the environment but for the denied names and those `withheld`, without a
    /// sandbox. Fails where a thread cannot be created or `/proc` cannot be read.
    pub fn new(withheld: Vec<String>) -> io::Result<Self> {
        Self::with(StdioOptions { withheld, ..StdioOptions::default() })
    }

    /// A connector as `options` say. Fails also where the data directory cannot be written, or cgroups are required and
    /// there are none.
    pub fn with(options: StdioOptions) -> io::Result<Self> {
        let StdioOptions { withheld, data_dir, isolation, strictness, cgroups, uid_range } = options;
        let launchers = Launchers::new(isolation, strictness, data_dir.clone(), uid_range)?;
        Ok(Self {
            processes: Processes::start(cgroups, data_dir.as_ref())?,
            launchers: Arc::new(launchers),
            withheld: Arc::new(RwLock::new(withheld.into_iter().collect())),
        })
    }

    /// Ends what a connector on the same data directory left when it was killed, and waits until that is gone. To be
    /// called before a new one is made, by whoever holds the directory. `None` if nothing was left.
    pub fn reclaim(data_dir: &DataDir) -> io::Result<Option<Reclaimed>> {
        Processes::reclaim(data_dir)
    }

    /// Withholds these variables, and no others, from every server that is started from now on. The names that were
    /// withheld before, those of [`StdioOptions::withheld`] among them, are replaced.
    pub fn withhold(&self, names: impl IntoIterator<Item = String>) {
        *self.withheld.write().unwrap_or_else(PoisonError::into_inner) = names.into_iter().collect();
    }

    /// What each server and all that it started use, by the server's process id. Reads `/proc` once, so it blocks for
    /// some milliseconds.
    pub fn usage(&self) -> HashMap<u32, Usage> {
        self.processes.usage()
    }

    /// The process ids of the servers that are not in the ledger yet, because the disk has not taken their rows: should the
    /// satellite and its reaper be killed, the next satellite would not find them.
    pub fn unrecorded(&self) -> HashSet<u32> {
        self.processes.unrecorded()
    }

    /// The instances that have a home in the data directory. Reads a directory, so it blocks.
    pub fn homes(&self) -> Vec<InstanceId> {
        self.launchers.homes()
    }

    /// Sets the home of an instance aside, so that a new instance of the same identity gets an empty one. The content
    /// remains until [`Self::erase_set_aside`].
    pub fn set_aside(&self, id: &InstanceId) -> io::Result<()> {
        self.launchers.set_aside(id)
    }

    /// Erases what was in the homes that were taken away. Blocks for as long as the file system takes.
    pub fn erase_set_aside(&self) {
        self.launchers.erase_set_aside();
    }

    /// Which sandboxes work on this machine, and why others do not: found out by a trial run of each, the first time.
    pub async fn sandboxes(&self) -> Vec<Finding> {
        self.launchers.findings(&self.processes).await
    }

    /// What holds the trees of servers together here, in a few words.
    pub fn held_by(&self) -> String {
        self.processes.held_by()
    }

    /// Kills everything at once and without grace, and waits until it is gone, `patience` at most. Nothing is started
    /// afterwards. For a host that must end now.
    pub fn end_all(&self, patience: Duration) {
        self.processes.end_all(patience);
    }
}

impl Connector for StdioConnector {
    fn open(&self, spec: Arc<InstanceSpec>, _run: Run) -> BoxFuture<'static, Result<Link, OpenError>> {
        let Self { processes, launchers, withheld } = self.clone();
        Box::pin(async move {
            // A secret in a command's or a directory's name is a mistake, and no reason to show it.
            let failed = |reason: String, is_machine_fault: bool| {
                let command = match &spec.target {
                    Target::Stdio { command, .. } => command,
                    Target::Remote { .. } => return OpenError::Server(reason),
                };
                let reason = spec.mask.apply(&format!("cannot start `{command}`: {reason}"));
                if is_machine_fault { OpenError::Machine(reason) } else { OpenError::Server(reason) }
            };
            let withheld: Vec<String> =
                withheld.read().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
            let preparing = launchers.prepare(Arc::clone(&spec), withheld, &processes);
            let Prepared { launch, identity } =
                preparing.await.map_err(|error| failed(error.reason, error.is_machine_fault))?;
            processes.launch(launch, identity).await.map_err(|error| match &spec.target {
                Target::Stdio { command, .. } if error.is_missing() && !command.contains('/') => {
                    OpenError::Server(spec.mask.apply(&format!("executable \"{command}\" not found in PATH")))
                }
                Target::Stdio { .. } | Target::Remote { .. } => failed(error.to_string(), error.is_machine_fault()),
            })
        })
    }

    fn dial(&self, _spec: &Arc<InstanceSpec>, _run: Run) -> Box<dyn Line> {
        Box::new(Unserved::default())
    }
}
