//! The process trees of a connector: their cgroups and ledger, their resource usage, and how all of them are ended at
//! once.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use std::{io, thread};

use rustix::process::Signal;

use super::cgroup::{Cgroup, CgroupControllers, CgroupLimits, Cgroups};
use super::ledger::{Ledger, LedgerHeader, StartedRow, boot_id, pid_namespace};
use super::proc_info::{PidfdProcess, ProcessCensus, ProcessStat, process_name};
use super::run_mark::new_satellite_id;
use super::spawn_helper::spawn_helper_pid;
use super::tree::ProcessTree;
use crate::keeper::run_client::RunClient;
pub use mcp_satellite_actors::model::settings::CgroupMode;
use mcp_satellite_files::data_dir::DataDir;

/// Resource usage of a whole process tree, as measured by the kernel. Processor time is user and system time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TreeUsage {
    pub rss_bytes: u64,
    pub cpu_seconds: f64,
}

/// A process of a server's process tree.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeProcess {
    pub pid: u32,
    pub parent_pid: u32,
    /// Name that the process has given itself, at most 15 bytes. It may contain any characters.
    pub name: String,
    pub rss_bytes: u64,
    /// User and system time of the process and of the children that it has waited for.
    pub cpu_seconds: f64,
    /// `running`, `sleeping`, `waiting for a disk`, `stopped`, `traced`, `idle`, `zombie`, or `unknown`.
    pub state: &'static str,
}

/// The process tree of a server at one time.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessTreeView {
    /// Live processes, ordered by process id.
    pub processes: Vec<TreeProcess>,
    /// Sandbox, or `none`.
    pub isolation: &'static str,
    /// Means that holds the processes: `cgroup`, `pid_namespace` or `group`.
    pub mechanism: &'static str,
    /// Path of the cgroup, if there is one.
    pub cgroup: Option<String>,
}

const PAUSE: Duration = Duration::from_millis(2);

pub(super) struct ProcessTrees {
    // Random id, contained in the marks of all servers. It stays the same when the keeper starts the satellite again.
    id: String,
    cgroups: Option<Arc<Cgroups>>,
    cgroups_required: bool,
    pub(super) description: String,
    pub(super) ledger: Arc<Ledger>,
    trees: Mutex<HashMap<u64, Arc<ProcessTree>>>,
    closed: AtomicBool,
    /// Locked during a start, whose process is not marked and in no tree at first.
    pub(super) starting: Mutex<()>,
}

/// The highest number of a run in this process. Runs of different connectors have the same keeper.
static LAST_RUN: AtomicU64 = AtomicU64::new(0);

impl ProcessTrees {
    /// `left` are the processes that an earlier satellite has left to this one.
    pub(super) fn new(mode: CgroupMode, data_dir: Option<&DataDir>, left: Vec<StartedRow>) -> io::Result<Self> {
        let keeper = RunClient::current().map(|runs| runs.keeper());
        let id = keeper.map_or_else(new_satellite_id, |keeper| Ok(keeper.id.clone()))?;
        LAST_RUN.fetch_max(keeper.map_or(0, |keeper| keeper.first_run - 1), Ordering::Relaxed);
        let cgroups = match mode {
            CgroupMode::Off => Err("switched off".to_owned()),
            CgroupMode::Auto | CgroupMode::Required => Cgroups::detect(&id).map(Arc::new),
        };
        let (cgroups, description) = match cgroups {
            Ok(cgroups) => {
                let counts = match (cgroups.controllers.memory, cgroups.controllers.processes) {
                    (true, true) => "counts memory and processes",
                    (true, false) => "counts memory",
                    (false, true) => "counts processes",
                    (false, false) => "has no controllers",
                };
                let description =
                    format!("a cgroup for each run, under `{}` (which {counts})", cgroups.path().display());
                (Some(cgroups), description)
            }
            Err(why) if mode == CgroupMode::Required => {
                return Err(io::Error::other(format!("cgroups are required and cannot be used: {why}")));
            }
            Err(why) => (
                None,
                format!("process group, session and mark, in a sandbox by its PID namespace (no cgroups: {why})"),
            ),
        };
        tracing::info!(held_by = description, "process containment chosen");
        let ledger = match data_dir {
            Some(directory) => {
                let cgroup = cgroups.as_ref().map(|cgroups| cgroups.path().to_owned());
                let (boot_id, pid_namespace) = (boot_id(), pid_namespace());
                let pid = keeper.map_or_else(std::process::id, |keeper| keeper.pid);
                Ledger::begin(directory, LedgerHeader { id: id.clone(), pid, boot_id, pid_namespace, cgroup }, left)?
            }
            None => Ledger::default(),
        };
        Ok(Self {
            id,
            cgroups,
            cgroups_required: mode == CgroupMode::Required,
            description,
            ledger: Arc::new(ledger),
            trees: Mutex::default(),
            closed: AtomicBool::new(false),
            starting: Mutex::default(),
        })
    }

    pub(super) fn satellite_id(&self) -> &str {
        &self.id
    }

    pub(super) fn next_run() -> u64 {
        LAST_RUN.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn controllers(&self) -> CgroupControllers {
        self.cgroups.as_ref().map(|cgroups| cgroups.controllers).unwrap_or_default()
    }

    /// Creates a cgroup for a run. Returns `None` if cgroups are not in use or this one cannot be created. Fails
    /// instead if cgroups are required or the run has cgroup limits.
    pub(super) fn create_cgroup(&self, run: u64, limits: CgroupLimits) -> io::Result<Option<Cgroup>> {
        let Some(cgroups) = &self.cgroups else { return Ok(None) };
        match cgroups.create(run, limits) {
            Ok(cgroup) => Ok(Some(cgroup)),
            Err(error) if self.cgroups_required || limits != CgroupLimits::default() => Err(error),
            Err(error) => {
                tracing::warn!(
                    run,
                    %error,
                    "cannot create the cgroup of a run; its process group, session and mark hold it"
                );
                Ok(None)
            }
        }
    }

    /// Returns the cgroup of a run that an earlier satellite has started.
    pub(super) fn find_cgroup(&self, run: u64) -> Option<Cgroup> {
        self.cgroups.as_ref()?.find(run)
    }

    pub(super) fn insert(&self, tree: &Arc<ProcessTree>) {
        self.trees().insert(tree.run, Arc::clone(tree));
    }

    pub(super) fn remove(&self, run: u64) {
        self.trees().remove(&run);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) fn usage(&self) -> HashMap<u32, TreeUsage> {
        let Ok(census) = ProcessCensus::take() else { return HashMap::new() };
        let (page, tick) = (rustix::param::page_size() as u64, rustix::param::clock_ticks_per_second() as f64);
        let trees: Vec<Arc<ProcessTree>> = self.trees().values().cloned().collect();
        let members = ProcessTree::members_of_all(&trees, &self.id, &census);
        let usage = |tree: Arc<ProcessTree>| {
            let (pages, ticks) = tree.usage(members.get(&tree.run).map_or(&[], Vec::as_slice));
            (tree.pid(), TreeUsage { rss_bytes: pages * page, cpu_seconds: ticks as f64 / tick })
        };
        trees.into_iter().map(usage).collect()
    }

    /// Returns the tree of the server with this process id; `None` if there is none or `/proc` cannot be read.
    pub(super) fn view(&self, server_pid: u32) -> Option<ProcessTreeView> {
        let tree = self.trees().values().find(|tree| tree.pid() == server_pid).cloned()?;
        let census = ProcessCensus::take().ok()?;
        let (page, tick) = (rustix::param::page_size() as u64, rustix::param::clock_ticks_per_second() as f64);
        let members = tree.members(&census).into_iter().filter(|stat| stat.alive);
        let process = |stat: ProcessStat| {
            Some(TreeProcess {
                pid: stat.pid,
                parent_pid: stat.parent,
                // The process may have ended meanwhile.
                name: process_name(stat.pid)?,
                rss_bytes: stat.rss_pages * page,
                cpu_seconds: stat.cpu_ticks as f64 / tick,
                state: state_name(stat.state),
            })
        };
        let mut processes: Vec<TreeProcess> = members.filter_map(process).collect();
        processes.sort_unstable_by_key(|process| process.pid);
        Some(ProcessTreeView {
            processes,
            isolation: tree.isolation(),
            mechanism: tree.containment_mechanism(),
            cgroup: tree.cgroup_path().map(|path| path.display().to_string()),
        })
    }

    pub(super) fn unrecorded_pids(&self) -> HashSet<u32> {
        let trees = self.trees();
        trees.values().filter(|tree| !self.ledger.is_recorded(tree.run)).map(|tree| tree.pid()).collect()
    }

    /// Kills every tree, every process with this satellite's mark, and everything below the keeper except the satellite and
    /// the spawn helper, without grace, before this process ends. No process is started afterwards. Repeats until no process
    /// is left; after `timeout` the rest is left to the kernel.
    pub(super) fn kill_all(&self, timeout: Duration) {
        self.closed.store(true, Ordering::Release);
        let until = Instant::now() + timeout;
        loop {
            // Before anything is looked for: the process of a start is found after the start.
            let mut left = matches!(self.starting.try_lock(), Err(TryLockError::WouldBlock));
            if let Some(cgroups) = &self.cgroups {
                cgroups.kill();
            }
            let trees: Vec<Arc<ProcessTree>> = self.trees().values().cloned().collect();
            left |= self.cgroups.as_ref().is_some_and(|cgroups| cgroups.is_populated());
            for tree in &trees {
                tree.kill();
            }
            // A census fails if descriptors are short; the next one may succeed.
            let census = ProcessCensus::take();
            left |= census.is_err();
            if let Ok(census) = census {
                for tree in trees {
                    left |= !tree.is_empty(Some(&census));
                    tree.kill_members(&census);
                }
                let own = std::process::id();
                let spared = [Some(own), spawn_helper_pid()];
                let below = descendants_of_keeper(&census);
                for stat in census.all().filter(|stat| stat.alive && !spared.contains(&Some(stat.pid))) {
                    let is_marked = || census.marked_run(stat.pid, &self.id).is_some();
                    if (below.contains(&stat.pid) || is_marked())
                        && let Some(known) = PidfdProcess::open(stat.pid, stat.start_time)
                    {
                        known.signal(Signal::KILL);
                        left = true;
                    }
                }
            }
            if !left || Instant::now() >= until {
                if let Some(cgroups) = &self.cgroups {
                    cgroups.remove();
                }
                return;
            }
            thread::sleep(PAUSE);
        }
    }

    fn trees(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<ProcessTree>>> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the live processes below the keeper: it adopts the orphans of servers. There are none if this process is embedded
/// in a host, which may have other children.
fn descendants_of_keeper(census: &ProcessCensus) -> HashSet<u32> {
    let Some(keeper) = RunClient::current().map(|runs| runs.keeper()) else { return HashSet::new() };
    // After its end another process may have its number.
    let lives = census.get(keeper.pid).is_some_and(|stat| stat.start_time == keeper.start_time);
    census.descendants_of(if lives { keeper.pid } else { std::process::id() })
}

/// Returns the name of a state in `/proc/PID/stat`, see proc(5).
fn state_name(letter: u8) -> &'static str {
    match letter {
        b'R' => "running",
        b'S' => "sleeping",
        b'D' => "waiting for a disk",
        b'T' => "stopped",
        b't' => "traced",
        b'I' => "idle",
        b'Z' | b'X' => "zombie",
        _ => "unknown",
    }
}
