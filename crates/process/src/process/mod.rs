//! Child processes. Each leads a session of its own and is gone only when its whole process tree is gone.
//!
//! - `launch` describes a process; `spawn` forks and executes; `preparation` prepares the child between fork and exec, and
//!   `userns`, `limits` and `filter` confine it;
//! - `fork` is the thread that starts processes, one after the other: it lets `spawn_helper` fork them, or forks them
//!   itself if there is no helper;
//! - `tree` is a leader with its descendants: how it is held, signalled and found, by means of `group`, `cgroup` and
//!   `proc_info`;
//! - `scan` is the thread that detects that a tree is empty; only then is its leader reaped, by the keeper if there is one;
//! - `run_mark` is the mark that all processes of a run inherit;
//! - `process_trees` contains all trees; `ledger` records them for the next satellite;
//! - `adoption` takes over the servers that a crashed satellite below the same keeper has left; `kept` ends everything else
//!   of it, in the keeper; `stdin_writer` notes an incomplete line for the next satellite.
//!
//! Four invariants: a leader is reaped after its tree is empty and never before, so that no signal can reach another
//! process under a recycled number; a member is signalled through a pidfd whose identity was checked; no code waits for
//! "any child", so no exit status is stolen; dropping a [`ProcessLink`] kills its tree before the drop returns.
//!
//! Linux only: it needs pidfds (5.4) and `/proc`.

mod adoption;
mod cgroup;
mod descriptors;
mod filter;
mod fork;
mod group;
mod kept;
mod launch;
mod ledger;
mod limits;
mod preparation;
mod proc_info;
mod process_trees;
mod run_mark;
mod scan;
pub mod signals;
mod spawn;
mod spawn_helper;
mod stdin_writer;
mod tree;
mod userns;

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::session_description::SessionDescription;
use mcp_satellite_actors::model::snapshot::ProcessContainment;
use mcp_satellite_actors::seam::{LimitProbe, ProcessEnd, ProcessLink, ServerProcess};
use nix::sys::signal::Signal;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::unix::pipe;

pub(super) use self::adoption::{DescribedRun, LeftServer, LeftTree};
// Used by the keeper.
use self::adoption::ProcessRecord;
pub use self::cgroup::LeftoverCgroups;
pub use self::cgroup::own_cgroup;
pub(super) use self::cgroup::{CgroupControllers, CgroupLimits};
pub use self::descriptors::DescriptorReserve;
pub(super) use self::descriptors::OPTIONS_FILE_FD;
pub use self::descriptors::raise_descriptor_limit;
use self::fork::{ForkThread, StartedProcess};
pub(super) use self::kept::KeptProcesses;
pub(super) use self::launch::{Confinement, LaunchError, LaunchSpec, is_machine_fault};
pub use self::ledger::ReclaimedProcesses;
pub(super) use self::limits::ResourceLimits;
use self::limits::StderrMonitor;
pub use self::proc_info::{ProcessCensus, ProcessStat, children_of};
use self::process_trees::ProcessTrees;
pub use self::process_trees::{CgroupMode, ProcessTreeView, TreeProcess, TreeUsage};
pub(super) use self::run_mark::new_satellite_id;
use self::scan::TreeScanner;
pub(super) use self::spawn_helper::{ForkedHelper, SPAWN_HELPER_NAME, fork_spawn_helper, use_spawn_helper};
pub use self::spawn_helper::{spawn_helper_pid, start_spawn_helper};
use self::stdin_writer::StdinWriter;
pub use self::tree::OrphanCounts;
use self::tree::ProcessTree;
use mcp_satellite_files::data_dir::DataDir;

// Pause between two checks whether the server in a sandbox has started.
const LOOK_PAUSE: Duration = Duration::from_millis(1);
// Maximum number of bytes of stderr that are read from a sandbox that ends at once.
const OUTPUT_MAX: u64 = 1024;

#[derive(Clone)]
pub(super) struct ProcessLauncher {
    fork: ForkThread,
    scanner: TreeScanner,
    trees: Arc<ProcessTrees>,
}

/// Facts about a server that its process does not show.
#[derive(Debug, Clone)]
pub(super) struct ServerLabel {
    /// Name of the instance.
    pub(super) name: String,
    /// User and group of the process.
    pub(super) identity: String,
    /// Fingerprint of the configuration; `None` if no later satellite may adopt the server.
    pub(super) config: Option<String>,
}

impl ProcessLauncher {
    /// `left` are the runs that will be taken over: the ledger contains them from the begin.
    pub(super) fn start(cgroups: CgroupMode, data_dir: Option<&DataDir>, left: &[DescribedRun]) -> io::Result<Self> {
        if signals::is_ignored(Signal::SIGCHLD) {
            return Err(io::Error::other(
                "SIGCHLD is ignored in this process, so ends of servers cannot be detected: restore its default action",
            ));
        }
        let left = left.iter().map(DescribedRun::ledger_row).collect();
        let trees = Arc::new(ProcessTrees::new(cgroups, data_dir, left)?);
        Ok(Self { fork: ForkThread::start(Arc::clone(&trees))?, scanner: TreeScanner::start()?, trees })
    }

    pub(super) fn reclaim(data_dir: &DataDir) -> io::Result<Option<ReclaimedProcesses>> {
        ledger::reclaim(data_dir)
    }

    pub(super) fn controllers(&self) -> CgroupControllers {
        self.trees.controllers()
    }

    pub(super) fn describe_containment(&self) -> String {
        self.trees.description.clone()
    }

    pub(super) fn usage(&self) -> HashMap<u32, TreeUsage> {
        self.trees.usage()
    }

    pub(super) fn tree(&self, server_pid: u32) -> Option<ProcessTreeView> {
        self.trees.view(server_pid)
    }

    pub(super) fn unrecorded_pids(&self) -> HashSet<u32> {
        self.trees.unrecorded_pids()
    }

    pub(super) fn kill_all(&self, timeout: Duration) {
        self.trees.kill_all(timeout);
    }

    /// Starts a process; with a sandbox, waits until the server in it runs. Cancel-safe: a process whose link is not
    /// received is killed.
    pub(super) async fn launch(&self, launch: LaunchSpec, label: ServerLabel) -> Result<ProcessLink, LaunchError> {
        let confinement = launch.confinement;
        let mut started = self.fork.launch(launch, self.scanner.clone()).await?;
        let mut output = Vec::new();
        if let Some(Confinement { sandbox, is_own_failure, .. }) = confinement {
            while !started.tree.find_sandboxed_server()? {
                if let Some(end) = started.tree.end() {
                    let mut stderr = pipe::Receiver::from_owned_fd(started.stderr)?;
                    output = read_final_stderr(&mut stderr).await;
                    started.stderr = stderr.into_nonblocking_fd()?;
                    let text = String::from_utf8_lossy(&output);
                    if is_own_failure(end.code, &text) {
                        return Err(LaunchError::Sandbox { sandbox, output: join_lines(&text) });
                    }
                    // The server itself ended before it was seen.
                    break;
                }
                tokio::time::sleep(LOOK_PAUSE).await;
            }
        }
        Ok(self.link(started, label, output)?)
    }

    /// Returns the link to a process. `output` was read from its stderr.
    fn link(&self, started: StartedProcess, label: ServerLabel, output: Vec<u8>) -> io::Result<ProcessLink> {
        let StartedProcess { tree, guard, stdin, stdout, stderr } = started;
        let stderr = io::Cursor::new(output).chain(pipe::Receiver::from_owned_fd(stderr)?);
        let is_own = tree.group.held_run().is_none();
        let leader_pidfd = is_own.then(|| LeaderPidfd(Arc::clone(&tree)).into_async_fd()).transpose()?;
        let complained = Arc::new(AtomicBool::new(false));
        let limits_memory = tree.confinement().is_some_and(|confinement| confinement.limits.address_space.is_some());
        let stderr: Box<dyn tokio::io::AsyncRead + Send + Unpin> = if limits_memory {
            Box::new(StderrMonitor::new(stderr, Arc::clone(&complained)))
        } else {
            Box::new(stderr)
        };
        let writer = StdinWriter::new(pipe::Sender::from_owned_fd(stdin)?, Arc::clone(&tree));
        let process =
            ChildProcess { tree, leader_pidfd, scanner: self.scanner.clone(), label, oom_reported: complained };
        Ok(ProcessLink {
            reader: Box::new(pipe::Receiver::from_owned_fd(stdout)?),
            writer: Box::new(writer),
            stderr: Some(stderr),
            process: Box::new(process),
            guard: Box::new(guard),
        })
    }
}

async fn read_final_stderr(stderr: &mut pipe::Receiver) -> Vec<u8> {
    let mut output = Vec::new();
    // Another process may keep the pipe open, so the wait is bounded.
    let _ = tokio::time::timeout(Duration::from_millis(250), stderr.take(OUTPUT_MAX).read_to_end(&mut output)).await;
    output
}

fn join_lines(output: &str) -> String {
    let lines: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if lines.is_empty() { "it ended without output".to_owned() } else { lines.join("; ") }
}

struct LeaderPidfd(Arc<ProcessTree>);

impl AsRawFd for LeaderPidfd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.group.pidfd().as_raw_fd()
    }
}

impl LeaderPidfd {
    #[expect(
        deprecated,
        reason = "the successor is unsafe because the descriptor could be closed early; here the group owns it and is \
                  kept"
    )]
    fn into_async_fd(self) -> io::Result<AsyncFd<Self>> {
        AsyncFd::with_interest(self, Interest::READABLE)
    }
}

struct ChildProcess {
    tree: Arc<ProcessTree>,
    // Absent if the keeper reports the end of the leader.
    leader_pidfd: Option<AsyncFd<LeaderPidfd>>,
    scanner: TreeScanner,
    label: ServerLabel,
    // True once stderr contained an out-of-memory message.
    oom_reported: Arc<AtomicBool>,
}

impl ServerProcess for ChildProcess {
    fn pid(&self) -> Option<u32> {
        Some(self.tree.pid())
    }

    fn containment(&self) -> Option<Arc<ProcessContainment>> {
        Some(Arc::new(ProcessContainment {
            wrapper_pid: self.tree.wrapper_pid(),
            isolation: self.tree.isolation(),
            mechanism: self.tree.containment_mechanism(),
            identity: self.label.identity.clone(),
        }))
    }

    fn limit_probe(&self) -> Option<LimitProbe> {
        let (tree, complained) = (Arc::clone(&self.tree), Arc::clone(&self.oom_reported));
        Some(Box::new(move || tree.exceeded_limit(complained.load(Ordering::Relaxed))))
    }

    fn describe_session(&mut self, mut session: SessionDescription) {
        let Some((held, config)) = self.tree.group.held_run().zip(self.label.config.clone()) else { return };
        session.config = Some(config);
        session.process = serde_json::to_value(ProcessRecord::new(&self.tree, &self.label)).unwrap_or_default();
        let described = match session.to_bytes() {
            Some(description) => held.describe(&description),
            None => Err(io::Error::other("the description of the session is too long")),
        };
        if let Err(error) = described {
            let pid = self.tree.pid();
            tracing::warn!(instance = self.label.name, pid, %error, "after a crash of the satellite the server is restarted");
        }
    }

    fn wait(&mut self) -> BoxFuture<'_, ProcessEnd> {
        Box::pin(async {
            if let Some(held) = self.tree.group.held_run() {
                held.wait().await;
                return self.tree.end().unwrap_or_default();
            }
            // `waitid` is called only after a readiness event: this future is polled for every message of the server.
            while let Some(pidfd) = &self.leader_pidfd {
                let Ok(mut readable) = pidfd.readable().await else { break };
                match self.tree.end() {
                    Some(end) => return end,
                    // A spurious event: from the leader's end on the pidfd stays readable.
                    None => readable.clear_ready(),
                }
            }
            // The runtime that the pidfd is registered with is shutting down: wait through the scanner, which needs no
            // runtime.
            self.scanner.wait_all(&self.tree).await;
            self.tree.end().unwrap_or_default()
        })
    }

    fn wait_all(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.wait().await;
            self.scanner.wait_all(&self.tree).await;
        })
    }

    fn terminate(&mut self) {
        self.scanner.terminate(&self.tree);
    }

    fn kill(&mut self) {
        self.tree.kill();
    }
}

struct TreeGuard {
    tree: Arc<ProcessTree>,
    trees: Arc<ProcessTrees>,
    scanner: TreeScanner,
    // The kernel kills a leader that the fork thread has forked itself when that thread ends, so the guard keeps it alive.
    _fork: ForkThread,
}

impl Drop for TreeGuard {
    fn drop(&mut self) {
        self.trees.remove(self.tree.run);
        if !self.tree.is_reaped() {
            self.tree.kill();
            self.scanner.reap_in_background(Arc::clone(&self.tree));
        }
    }
}
