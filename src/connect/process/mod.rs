//! Child processes: forked from one lasting thread, each the leader of a process group of its own, and gone only when
//! the whole group is.
//!
//! - `launch` says what is started, and prepares the child between fork and exec;
//! - `fork` is the thread that does it;
//! - `group` is a leader and its group: how it ended, and how it is signalled;
//! - `scan` is the thread that finds out when a group is empty, and only then reaps its leader.
//!
//! Three invariants: a leader is reaped after its group is empty and never before, so that no signal can reach a
//! stranger under a recycled number; nobody waits for "any child", so nobody's status is stolen; a [`Link`] that is
//! dropped has its group killed before the drop returns.
//!
//! Linux only: it needs pidfds (5.4) and `/proc`.

mod descriptors;
mod fork;
mod group;
mod launch;
mod scan;
mod usage;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use futures::future::BoxFuture;
use mcp_satellite_actors::seam::{Link, Process, ProcessEnd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

pub use self::descriptors::raise_descriptor_limit;
use self::fork::{ForkThread, Started};
use self::group::Group;
pub(super) use self::launch::{Launch, LaunchError};
use self::scan::Scanner;
pub use self::usage::{Usage, usage};

/// Starts processes. Clones share the threads behind it.
#[derive(Clone)]
pub(super) struct Launcher {
    fork: ForkThread,
    scanner: Scanner,
}

impl Launcher {
    pub(super) fn start() -> io::Result<Self> {
        Ok(Self { fork: ForkThread::start()?, scanner: Scanner::start()? })
    }

    /// Starts one process. Cancel-safe: one that nobody takes is killed.
    pub(super) async fn launch(&self, launch: Launch) -> Result<Link, LaunchError> {
        let Started { group, guard, stdin, stdout, stderr } = self.fork.launch(launch, self.scanner.clone()).await?;
        let ended = Leader(Arc::clone(&group)).watched()?;
        let process = ChildProcess { group, ended, scanner: self.scanner.clone() };
        Ok(Link {
            reader: Box::new(pipe::Receiver::from_owned_fd(OwnedFd::from(stdout))?),
            writer: Box::new(pipe::Sender::from_owned_fd(OwnedFd::from(stdin))?),
            stderr: Some(Box::new(pipe::Receiver::from_owned_fd(OwnedFd::from(stderr))?)),
            process: Box::new(process),
            guard: Box::new(guard),
        })
    }
}

/// A leader's pidfd, which becomes readable when the leader ends.
struct Leader(Arc<Group>);

impl AsRawFd for Leader {
    fn as_raw_fd(&self) -> RawFd {
        self.0.pidfd().as_raw_fd()
    }
}

impl Leader {
    #[expect(
        deprecated,
        reason = "its successor is unsafe because a descriptor could be closed under it: this one belongs to the group \
                  that is held here"
    )]
    fn watched(self) -> io::Result<AsyncFd<Self>> {
        AsyncFd::with_interest(self, Interest::READABLE)
    }
}

struct ChildProcess {
    group: Arc<Group>,
    ended: AsyncFd<Leader>,
    scanner: Scanner,
}

impl Process for ChildProcess {
    fn pid(&self) -> Option<u32> {
        Some(self.group.pid())
    }

    fn ended(&mut self) -> BoxFuture<'_, ProcessEnd> {
        Box::pin(async {
            loop {
                // The kernel is asked only once it has news: this is polled for every message of the server.
                let Ok(mut readable) = self.ended.readable().await else {
                    // The runtime that the pidfd is registered with is going: wait where no runtime is needed.
                    self.scanner.gone(&self.group).await;
                    return self.group.end().unwrap_or_default();
                };
                match self.group.end() {
                    Some(end) => return end,
                    // Cleared only where the pidfd is not readable, and readable it stays from the end on.
                    None => readable.clear_ready(),
                }
            }
        })
    }

    fn gone(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.ended().await;
            self.scanner.gone(&self.group).await;
        })
    }

    fn terminate(&mut self) {
        self.group.terminate();
    }

    fn kill(&mut self) {
        self.group.kill();
    }
}

/// Owns a group: dropping it kills the group at once, and leaves the reaping to the scanner.
struct Guard {
    group: Arc<Group>,
    scanner: Scanner,
    /// The kernel kills the leader when the thread that forked it ends, so that thread lasts as long as this.
    _fork: ForkThread,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.group.is_reaped() {
            self.group.kill();
            self.scanner.bury(Arc::clone(&self.group));
        }
    }
}
