//! The thread that forks all child processes. The kernel sends the parent-death signal when the *thread* that forked
//! ends, and threads of a runtime's blocking pool end when they are idle. Therefore one dedicated thread forks, and it
//! lives as long as its processes.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::{io, thread};

use nix::sys::signal::SigSet;
use tokio::sync::oneshot;

use super::Guard;
use super::cgroup::Cgroup;
use super::group::Group;
use super::holds::Holds;
use super::launch::{Launch, LaunchError};
use super::mark::Mark;
use super::scan::Scanner;
use super::spawn::Child;
use super::tree::Tree;
use super::userns::Mapper;

/// Handle to the thread, which ends with its last handle. The guard of every process holds one.
#[derive(Clone)]
pub(super) struct ForkThread(mpsc::Sender<Order>);

struct Order {
    launch: Launch,
    scanner: Scanner,
    fork: ForkThread,
    answer: oneshot::Sender<Result<Started, LaunchError>>,
}

/// A running process, killed when this is dropped.
pub(super) struct Started {
    pub(super) tree: Arc<Tree>,
    pub(super) guard: Guard,
    pub(super) stdin: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

impl ForkThread {
    pub(super) fn start(holds: Arc<Holds>) -> io::Result<Self> {
        let (sender, orders) = mpsc::channel();
        let mapper = Mapper::start()?;
        thread::Builder::new().name("satellite-fork".into()).spawn(move || run(&orders, &holds, mapper.as_ref()))?;
        Ok(Self(sender))
    }

    /// Starts one process. Cancel-safe: a process whose result is not received is killed.
    pub(super) async fn launch(&self, launch: Launch, scanner: Scanner) -> Result<Started, LaunchError> {
        let (answer, answered) = oneshot::channel();
        let order = Order { launch, scanner, fork: self.clone(), answer };
        self.0.send(order).map_err(|_| LaunchError::Thread)?;
        answered.await.map_err(|_| LaunchError::Thread)?
    }
}

fn run(orders: &mpsc::Receiver<Order>, holds: &Arc<Holds>, mapper: Option<&Mapper>) {
    // Other threads handle the signals. A child also starts with them blocked, until it has reset the handlers.
    let _ = SigSet::all().thread_block();
    for order in orders {
        // A panic that ended this thread would kill all servers.
        let _ = catch_unwind(AssertUnwindSafe(|| order.carry_out(holds, mapper)));
    }
}

impl Order {
    fn carry_out(self, holds: &Arc<Holds>, mapper: Option<&Mapper>) {
        let Self { launch, scanner, fork, answer } = self;
        if answer.is_closed() {
            return;
        }
        // If the caller has gone, `send` returns the result, and dropping its guard kills the process.
        let _ = answer.send(start(launch, holds, mapper, scanner, fork));
    }
}

fn start(
    mut launch: Launch,
    holds: &Arc<Holds>,
    mapper: Option<&Mapper>,
    scanner: Scanner,
    fork: ForkThread,
) -> Result<Started, LaunchError> {
    if holds.is_closed() {
        return Err(LaunchError::Ending);
    }
    let run = holds.next_run();
    let cgroup = holds.cgroup(run, launch.cgroup_limits).map_err(LaunchError::Cgroup)?;
    let directory = cgroup.as_ref().map(Cgroup::directory).transpose()?;
    let mark = Mark::new(holds.satellite(), run);
    // The environment of a server in a sandbox contains configured variables only.
    if launch.confinement.is_none() {
        let (name, value) = mark.variable();
        launch.environment.insert(name.into(), value.into());
    }
    let Child { pid, stdin, stdout, stderr } =
        launch.spawn(directory.as_ref().map(AsFd::as_fd), mapper.map(Mapper::mapping), mark.limit())?;
    let group = Group::of(pid)?;
    holds.ledger.started(run, &launch.instance, group.pid());
    let tree = Arc::new(Tree::new(group, run, cgroup, mark, launch.confinement, Arc::clone(&holds.ledger)));
    holds.take(&tree);
    let guard = Guard { tree: Arc::clone(&tree), holds: Arc::clone(holds), scanner, _fork: fork };
    if holds.is_closed() {
        // `Holds::end_all` may have run before this tree was registered.
        return Err(LaunchError::Ending);
    }
    Ok(Started { tree, guard, stdin, stdout, stderr })
}
