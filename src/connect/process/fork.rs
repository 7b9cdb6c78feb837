//! The one thread that forks. The kernel sends the parent-death signal when the *thread* that forked ends, and threads
//! of a runtime's blocking pool end whenever they are idle: so there is one thread, and it lasts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{ChildStderr, ChildStdin, ChildStdout};
use std::sync::{Arc, mpsc};
use std::{io, thread};

use nix::sys::signal::SigSet;
use tokio::sync::oneshot;

use super::Guard;
use super::group::Group;
use super::launch::{Launch, LaunchError};
use super::scan::Scanner;

/// A handle to the thread, which ends with its last handle. Every guard of a process holds one.
#[derive(Clone)]
pub(super) struct ForkThread(mpsc::Sender<Order>);

struct Order {
    launch: Launch,
    scanner: Scanner,
    fork: ForkThread,
    answer: oneshot::Sender<Result<Started, LaunchError>>,
}

/// A process that runs, and is killed if this is dropped.
pub(super) struct Started {
    pub(super) group: Arc<Group>,
    pub(super) guard: Guard,
    pub(super) stdin: ChildStdin,
    pub(super) stdout: ChildStdout,
    pub(super) stderr: ChildStderr,
}

impl ForkThread {
    pub(super) fn start() -> io::Result<Self> {
        let (sender, orders) = mpsc::channel();
        thread::Builder::new().name("satellite-fork".into()).spawn(move || run(&orders))?;
        Ok(Self(sender))
    }

    /// Starts one process. Cancel-safe: one that nobody takes is killed.
    pub(super) async fn launch(&self, launch: Launch, scanner: Scanner) -> Result<Started, LaunchError> {
        let (answer, answered) = oneshot::channel();
        let order = Order { launch, scanner, fork: self.clone(), answer };
        self.0.send(order).map_err(|_| LaunchError::Thread)?;
        answered.await.map_err(|_| LaunchError::Thread)?
    }
}

fn run(orders: &mpsc::Receiver<Order>) {
    // Other threads take the signals. A child starts with them blocked too, until our handlers are out of its way.
    let _ = SigSet::all().thread_block();
    for order in orders {
        // A panic that ended this thread would kill every server with it.
        let _ = catch_unwind(AssertUnwindSafe(|| order.carry_out()));
    }
}

impl Order {
    fn carry_out(self) {
        let Self { launch, scanner, fork, answer } = self;
        if answer.is_closed() {
            return;
        }
        // Where the caller has just gone, the answer comes back and is dropped, and its guard with it.
        let _ = answer.send(start(&launch, scanner, fork));
    }
}

fn start(launch: &Launch, scanner: Scanner, fork: ForkThread) -> Result<Started, LaunchError> {
    let mut child = launch.spawn()?;
    let group = Arc::new(Group::of(&mut child)?);
    let guard = Guard { group: Arc::clone(&group), scanner, _fork: fork };
    match (child.stdin.take(), child.stdout.take(), child.stderr.take()) {
        (Some(stdin), Some(stdout), Some(stderr)) => Ok(Started { group, guard, stdin, stdout, stderr }),
        _ => Err(io::Error::other("a pipe is missing").into()),
    }
}
