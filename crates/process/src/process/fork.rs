//! The thread that forks all child processes. The kernel sends the parent-death signal when the *thread* that forked
//! ends, and threads of a runtime's blocking pool end when they are idle. Therefore one dedicated thread forks, and it
//! lives as long as its processes.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::{io, thread};

use nix::sys::signal::SigSet;
use tokio::sync::oneshot;

use super::TreeGuard;
use super::cgroup::Cgroup;
use super::group::ProcessGroup;
use super::launch::{LaunchError, LaunchSpec};
use super::process_trees::ProcessTrees;
use super::run_mark::RunMark;
use super::scan::TreeScanner;
use super::spawn::SpawnedChild;
use super::tree::ProcessTree;
use super::userns::IdMapper;

/// Handle to the thread, which ends with its last handle. The guard of every process holds one.
#[derive(Clone)]
pub(super) struct ForkThread(mpsc::Sender<ForkOrder>);

struct ForkOrder {
    launch: LaunchSpec,
    scanner: TreeScanner,
    fork: ForkThread,
    answer: oneshot::Sender<Result<StartedProcess, LaunchError>>,
}

/// A running process, killed when this is dropped.
pub(super) struct StartedProcess {
    pub(super) tree: Arc<ProcessTree>,
    pub(super) guard: TreeGuard,
    pub(super) stdin: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

impl ForkThread {
    pub(super) fn start(holds: Arc<ProcessTrees>) -> io::Result<Self> {
        let (sender, orders) = mpsc::channel();
        let mapper = IdMapper::start()?;
        thread::Builder::new().name("satellite-fork".into()).spawn(move || run(&orders, &holds, mapper.as_ref()))?;
        Ok(Self(sender))
    }

    /// Starts one process. Cancel-safe: a process whose result is not received is killed.
    pub(super) async fn launch(&self, launch: LaunchSpec, scanner: TreeScanner) -> Result<StartedProcess, LaunchError> {
        let (answer, answered) = oneshot::channel();
        let order = ForkOrder { launch, scanner, fork: self.clone(), answer };
        self.0.send(order).map_err(|_| LaunchError::Thread)?;
        answered.await.map_err(|_| LaunchError::Thread)?
    }
}

fn run(orders: &mpsc::Receiver<ForkOrder>, holds: &Arc<ProcessTrees>, mapper: Option<&IdMapper>) {
    // Other threads handle the signals. A child also starts with them blocked, until it has reset the handlers.
    let _ = SigSet::all().thread_block();
    for order in orders {
        // A panic that ended this thread would kill all servers.
        let _ = catch_unwind(AssertUnwindSafe(|| order.carry_out(holds, mapper)));
    }
}

impl ForkOrder {
    fn carry_out(self, holds: &Arc<ProcessTrees>, mapper: Option<&IdMapper>) {
        let Self { launch, scanner, fork, answer } = self;
        if answer.is_closed() {
            return;
        }
        // If the caller has gone, `send` returns the result, and dropping its guard kills the process.
        let _ = answer.send(start(launch, holds, mapper, scanner, fork));
    }
}

fn start(
    mut launch: LaunchSpec,
    holds: &Arc<ProcessTrees>,
    mapper: Option<&IdMapper>,
    scanner: TreeScanner,
    fork: ForkThread,
) -> Result<StartedProcess, LaunchError> {
    if holds.is_closed() {
        return Err(LaunchError::ShuttingDown);
    }
    let run = holds.next_run();
    let cgroup = holds.create_cgroup(run, launch.cgroup_limits).map_err(LaunchError::Cgroup)?;
    let directory = cgroup.as_ref().map(Cgroup::directory).transpose()?;
    let mark = RunMark::new(holds.satellite_id(), run);
    // The environment of a server in a sandbox contains configured variables only.
    if launch.confinement.is_none() {
        let (name, value) = mark.variable();
        launch.environment.insert(name.into(), value.into());
    }
    let SpawnedChild { pid, stdin, stdout, stderr } =
        launch.spawn(directory.as_ref().map(AsFd::as_fd), mapper.map(IdMapper::pipes), mark.limit())?;
    let group = ProcessGroup::new(pid)?;
    holds.ledger.record_start(run, &launch.instance, group.pid());
    let tree = Arc::new(ProcessTree::new(group, run, cgroup, mark, launch.confinement, Arc::clone(&holds.ledger)));
    holds.insert(&tree);
    let guard = TreeGuard { tree: Arc::clone(&tree), trees: Arc::clone(holds), scanner, _fork: fork };
    if holds.is_closed() {
        // `Holds::end_all` may have run before this tree was registered.
        return Err(LaunchError::ShuttingDown);
    }
    Ok(StartedProcess { tree, guard, stdin, stdout, stderr })
}
