//! The thread that starts all servers, one after the other, by means of the spawn helper if there is one: they are then
//! children of the helper's parent, usually the keeper. Without a helper the thread forks them. The kernel sends the
//! parent-death signal when the *thread* that forked ends, and threads of a runtime's blocking pool end when they are idle.
//! Therefore one dedicated thread forks, and it lives as long as its processes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};
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
use super::spawn_helper::Forker;
use super::tree::{ProcessTree, StraySearch};
use super::userns::IdMapper;

/// Time to wait for the end of a killed process.
const KILLED_PATIENCE: Duration = Duration::from_millis(100);

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
    pub(super) fn start(trees: Arc<ProcessTrees>) -> io::Result<Self> {
        let (sender, orders) = mpsc::channel();
        let starter = Starter { trees, mapper: IdMapper::start()?, forker: Forker::new() };
        thread::Builder::new().name("satellite-fork".into()).spawn(move || run(&orders, starter))?;
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

fn run(orders: &mpsc::Receiver<ForkOrder>, mut starter: Starter) {
    // Other threads handle the signals. A child also starts with them blocked, until it has reset the handlers.
    let _ = SigSet::all().thread_block();
    for order in orders {
        // A panic that ended this thread would kill all servers.
        let _ = catch_unwind(AssertUnwindSafe(|| starter.carry_out(order)));
    }
}

struct Starter {
    trees: Arc<ProcessTrees>,
    mapper: Option<IdMapper>,
    forker: Forker,
}

impl Starter {
    fn carry_out(&mut self, order: ForkOrder) {
        let ForkOrder { mut launch, scanner, fork, answer } = order;
        if answer.is_closed() {
            return;
        }
        let started = match self.start(&mut launch, &scanner, &fork) {
            Err(LaunchError::HelperLost) => self.start(&mut launch, &scanner, &fork),
            started => started,
        };
        // If the caller has gone, `send` returns the result, and dropping its guard kills the process.
        let _ = answer.send(started);
    }

    fn start(
        &mut self,
        launch: &mut LaunchSpec,
        scanner: &TreeScanner,
        fork: &ForkThread,
    ) -> Result<StartedProcess, LaunchError> {
        let trees = &self.trees;
        let _starting = trees.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if trees.is_closed() {
            return Err(LaunchError::ShuttingDown);
        }
        let run = ProcessTrees::next_run();
        let cgroup = trees.create_cgroup(run, launch.cgroup_limits).map_err(LaunchError::Cgroup)?;
        let directory = cgroup.as_ref().map(Cgroup::directory).transpose()?;
        let mark = RunMark::new(trees.satellite_id(), run);
        // The environment of a server in a sandbox contains configured variables only.
        if launch.confinement.is_none() {
            let (name, value) = mark.variable();
            launch.environment.insert(name.into(), value.into());
        }
        let (directory, id_map) = (directory.as_ref().map(AsFd::as_fd), self.mapper.as_ref().map(IdMapper::pipes));
        let (mut held, mut recorded) = (None, None);
        let prepare_keeper = |forker: &mut Forker, pipes: [BorrowedFd<'_>; 3]| {
            held = forker.hold(run, pipes)?;
            Ok(())
        };
        let spawned = launch.spawn(&mut self.forker, directory, id_map, mark.limit(), prepare_keeper, |pid| {
            recorded = trees.ledger.record_start(run, &launch.instance, pid);
        });
        let held = held.filter(|_| self.forker.forks_below_keeper());
        let spawned = spawned.and_then(|child| Ok((ProcessGroup::new(child.pid, held)?, child)));
        if let Err(LaunchError::HelperLost) = &spawned {
            // The helper may have forked the child.
            if let Some(cgroup) = &cgroup {
                cgroup.kill();
                // A cgroup is removed only if it is empty.
                let until = Instant::now() + KILLED_PATIENCE;
                while cgroup.is_populated() && Instant::now() < until {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            scanner.sweep(StraySearch::new(mark.clone(), 0));
        }
        if recorded.is_some() && spawned.is_err() {
            trees.ledger.record_end(run);
        }
        let (group, SpawnedChild { stdin, stdout, stderr, .. }) = spawned?;
        if let Some(request) = recorded {
            trees.ledger.wait_recorded(request, &launch.instance, group.pid());
        }
        let tree = ProcessTree::new(group, run, cgroup, mark, launch.confinement, Arc::clone(&trees.ledger));
        let tree = Arc::new(tree);
        trees.insert(&tree);
        let (trees, scanner) = (Arc::clone(trees), scanner.clone());
        let guard = TreeGuard { tree: Arc::clone(&tree), trees, scanner, _fork: fork.clone() };
        if self.trees.is_closed() {
            // `kill_all` may have run before this tree was registered.
            return Err(LaunchError::ShuttingDown);
        }
        Ok(StartedProcess { tree, guard, stdin, stdout, stderr })
    }
}
