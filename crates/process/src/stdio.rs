//! Connector for servers that are child processes: MCP over stdin and stdout, with stderr for logs.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use std::{fmt, io};

use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget};
use mcp_satellite_actors::seam::{AdoptedProcess, Connectors, OpenError, ProcessConnector, ProcessLink};

use super::isolation::{Isolation, LaunchFactory, OperatingMode, PreparedLaunch, SANDBOXES, SandboxFinding, UidRange};
pub use super::left_servers::AdoptionCounts;
use super::left_servers::LeftServers;
use super::process::{
    CgroupMode, DescribedRun, ProcessLauncher, ProcessTreeView, ReclaimedProcesses, ServerLabel, TreeUsage,
};
use mcp_satellite_files::data_dir::DataDir;

/// Connector that starts servers as child processes, each with its process tree, in a sandbox if so configured.
///
/// Clones share a few threads, one of which forks and one reaps. The threads end when the connector and all processes
/// that it started are gone, and do not keep the process from exiting.
#[derive(Clone)]
pub struct StdioConnector {
    processes: ProcessLauncher,
    launchers: Arc<LaunchFactory>,
    withheld: Arc<RwLock<BTreeSet<String>>>,
    fingerprint: Option<ConfigFingerprint>,
    left: Arc<LeftServers>,
}

/// Function that returns a hash of everything in a specification that determines the server's process. The values of the
/// configuration cannot be guessed from the hash. `None`: the server is not adopted.
#[derive(Clone)]
pub struct ConfigFingerprint(Arc<HashFn>);

type HashFn = dyn Fn(&InstanceSpec) -> Option<String> + Send + Sync;

impl ConfigFingerprint {
    pub fn new(hash: impl Fn(&InstanceSpec) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hash))
    }
}

impl fmt::Debug for ConfigFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigFingerprint").finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Default)]
pub struct StdioOptions {
    /// Environment variables that contain secrets of the host: no server inherits them.
    pub withheld: Vec<String>,
    /// Directory of the ledger and of the homes of sandboxed servers. The caller ensures exclusive use. Without a data
    /// directory there is no ledger, and no server can be started in a sandbox.
    pub data_dir: Option<DataDir>,
    pub isolation: Isolation,
    pub strictness: OperatingMode,
    pub cgroups: CgroupMode,
    /// User ids from which each team gets one for its servers without a sandbox. Needs root and a data directory. The
    /// homes of these users are in `DATA_DIR.homes` beside the data directory.
    pub uid_range: Option<UidRange>,
    /// If present, the connector takes over the servers that an earlier satellite below the same keeper has left, and a
    /// later one can take over its servers. Only one connector of a process may have it.
    pub fingerprint: Option<ConfigFingerprint>,
}

impl StdioConnector {
    /// Creates a connector without sandbox. Servers inherit the environment except the denied names and `withheld`.
    ///
    /// # Errors
    ///
    /// Fails if a thread cannot be created or `/proc` cannot be read.
    pub fn new(withheld: Vec<String>) -> io::Result<Self> {
        Self::with_options(StdioOptions { withheld, ..StdioOptions::default() })
    }

    /// # Errors
    ///
    /// Fails as [`StdioConnector::new`] does, and if the data directory cannot be written, or cgroups are required and
    /// not available.
    pub fn with_options(options: StdioOptions) -> io::Result<Self> {
        let StdioOptions { withheld, data_dir, isolation, strictness, cgroups, uid_range, fingerprint } = options;
        let launchers = LaunchFactory::new(isolation, strictness, data_dir.clone(), uid_range)?;
        let left = fingerprint.as_ref().map(|_| DescribedRun::take_all()).unwrap_or_default();
        let processes = ProcessLauncher::start(cgroups, data_dir.as_ref(), &left)?;
        let all = left.len();
        let left = left.into_iter().filter_map(|run| processes.take_over(run, &SANDBOXES));
        let left = Arc::new(LeftServers::new(all, left));
        Ok(Self {
            processes,
            launchers: Arc::new(launchers),
            withheld: Arc::new(RwLock::new(withheld.into_iter().collect())),
            fingerprint,
            left,
        })
    }

    /// Kills the servers of an earlier satellite that no instance has adopted. Returns how many were adopted. Call it after
    /// all instances are installed.
    pub fn drop_unclaimed(&self) -> AdoptionCounts {
        self.left.drop_unclaimed()
    }

    fn fingerprint(&self, spec: &InstanceSpec) -> Option<String> {
        let ConfigFingerprint(hash) = self.fingerprint.as_ref()?;
        Some(format!("{}; {}", hash(spec)?, self.launchers.describe_settings()))
    }

    /// Ends the processes that a killed connector left on the same data directory, and waits until they are gone.
    /// Returns `None` if there were none. Call it before a new connector is created, with the lock of the directory
    /// held.
    ///
    /// # Errors
    ///
    /// Fails if the ledger or `/proc` cannot be read.
    pub fn reclaim(data_dir: &DataDir) -> io::Result<Option<ReclaimedProcesses>> {
        ProcessLauncher::reclaim(data_dir)
    }

    /// Replaces the names of withheld variables, including those of [`StdioOptions::withheld`]. Applies to servers
    /// started from now on.
    pub fn withhold(&self, names: impl IntoIterator<Item = String>) {
        *self.withheld.write().unwrap_or_else(PoisonError::into_inner) = names.into_iter().collect();
    }

    /// Returns the resource usage of each server's process tree, by process id of the server. Reads `/proc` once, so it
    /// blocks for some milliseconds.
    pub fn usage(&self) -> HashMap<u32, TreeUsage> {
        self.processes.usage()
    }

    /// Returns the process tree of the server with this process id; `None` if it has ended. Reads `/proc` once, so it
    /// blocks for some milliseconds.
    pub fn process_tree(&self, server_pid: u32) -> Option<ProcessTreeView> {
        self.processes.tree(server_pid)
    }

    /// Returns the process ids of the servers whose ledger rows could not be written yet: if the satellite and its
    /// keeper are killed, the next satellite cannot find these servers.
    pub fn unrecorded_pids(&self) -> HashSet<u32> {
        self.processes.unrecorded_pids()
    }

    /// Returns the instances that have a home in the data directory. Reads a directory, so it blocks.
    pub fn homes(&self) -> Vec<InstanceId> {
        self.launchers.homes()
    }

    /// Sets the home of an instance aside, so that a new instance with the same id gets an empty one. The content
    /// remains until [`Self::erase_set_aside_homes`].
    pub fn set_aside_home(&self, id: &InstanceId) -> io::Result<()> {
        self.launchers.set_aside_home(id)
    }

    /// Blocks for as long as the file system takes.
    pub fn erase_set_aside_homes(&self) {
        self.launchers.erase_set_aside_homes();
    }

    /// Returns the results of the trial runs, which the first call makes.
    pub async fn sandboxes(&self) -> Vec<SandboxFinding> {
        self.launchers.findings(&self.processes).await
    }

    pub fn describe_containment(&self) -> String {
        self.processes.describe_containment()
    }

    /// Kills all servers without grace, and waits until they are gone, at most for `timeout`. No server can be started
    /// afterwards. For a host that must end at once.
    pub fn kill_all(&self, timeout: Duration) {
        self.processes.kill_all(timeout);
    }
}

impl ProcessConnector for StdioConnector {
    fn open(&self, spec: Arc<InstanceSpec>, _run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let config = self.fingerprint(&spec);
        let ending = self.left.release(&spec.id);
        let Self { processes, launchers, withheld, .. } = self.clone();
        Box::pin(async move {
            for tree in ending {
                processes.wait_gone(&tree).await;
            }
            // A secret in the name of a command or directory is a mistake, but must still be masked.
            let failed = |reason: String, is_machine_fault: bool| {
                let command = match &spec.target {
                    ServerTarget::Stdio { command, .. } => command,
                    ServerTarget::Remote { .. } => return OpenError::Server(reason),
                };
                let reason = spec.mask.apply(&format!("cannot start `{command}`: {reason}"));
                if is_machine_fault { OpenError::Machine(reason) } else { OpenError::Server(reason) }
            };
            let withheld: Vec<String> =
                withheld.read().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
            let preparing = launchers.prepare(Arc::clone(&spec), withheld, &processes);
            let PreparedLaunch { launch, identity } =
                preparing.await.map_err(|error| failed(error.reason, error.is_machine_fault))?;
            let label = ServerLabel { name: launch.instance.clone(), identity, config };
            processes.launch(launch, label).await.map_err(|error| match &spec.target {
                ServerTarget::Stdio { command, .. } if error.is_command_missing() && !command.contains('/') => {
                    OpenError::Server(spec.mask.apply(&format!("executable \"{command}\" not found in PATH")))
                }
                ServerTarget::Stdio { .. } | ServerTarget::Remote { .. } => {
                    failed(error.to_string(), error.is_machine_fault())
                }
            })
        })
    }

    fn can_adopt(&self, spec: &InstanceSpec) -> bool {
        let config = || self.fingerprint(spec);
        spec.is_complete() && self.left.contains(&spec.id, config)
    }

    fn adopt(&self, spec: &Arc<InstanceSpec>, _run: RunNumber) -> Option<AdoptedProcess> {
        let server = self.left.claim(&spec.id, || self.fingerprint(spec))?;
        let tree = server.tree();
        let adopted = self.processes.adopt(server).inspect_err(|error| {
            tracing::warn!(instance = %spec.name, %error, "cannot adopt the running server");
            self.left.note_ending(&spec.id, tree);
        });
        adopted.ok()
    }
}

impl From<StdioConnector> for Connectors {
    fn from(connector: StdioConnector) -> Self {
        Self::default().with_process(connector)
    }
}
