//! A leader and its process group.
//!
//! ```text
//! running ──→ ended ──→ reaped
//!              │          └ its number may be anybody's: no signal any more
//!              └ a zombie, which keeps the group's number from being used again
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mcp_satellite_actors::seam::ProcessEnd;
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, pidfd_open, pidfd_send_signal,
    waitid,
};

/// A process that leads a group of its own, known by its pidfd.
pub(super) struct Group {
    pid: Pid,
    pidfd: OwnedFd,
    /// Held across every signal, so that none can be sent once the leader is reaped.
    leader: Mutex<Leader>,
}

#[derive(Clone, Copy)]
enum Leader {
    Running,
    Ended(ProcessEnd),
    Reaped(ProcessEnd),
}

impl Group {
    /// Takes charge of a child just started. Where that fails (no descriptor is left for the pidfd), the child and
    /// what it has started are killed.
    pub(super) fn of(pid: Pid) -> io::Result<Self> {
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { pid, pidfd, leader: Mutex::new(Leader::Running) }),
            Err(error) => {
                let _ = kill_process_group(pid, Signal::KILL);
                let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED);
                Err(error.into())
            }
        }
    }

    /// The leader's process id, which is the group's number.
    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Becomes readable when the leader ends.
    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// How the leader ended, if it has.
    pub(super) fn end(&self) -> Option<ProcessEnd> {
        match *self.observed() {
            Leader::Running => None,
            Leader::Ended(end) | Leader::Reaped(end) => Some(end),
        }
    }

    pub(super) fn is_reaped(&self) -> bool {
        matches!(*self.observed(), Leader::Reaped(_))
    }

    /// SIGTERM to every member.
    pub(super) fn terminate(&self) {
        let leader = self.observed();
        // The leader may have gone over to another group, and is then told alone. Never twice: there are servers that
        // take a second SIGTERM for impatience.
        if !matches!(*leader, Leader::Reaped(_)) && kill_process_group(self.pid, Signal::TERM).is_err() {
            let _ = pidfd_send_signal(&self.pidfd, Signal::TERM);
        }
    }

    /// SIGKILL to every member, and to the leader wherever it is.
    pub(super) fn kill(&self) {
        let leader = self.observed();
        if !matches!(*leader, Leader::Reaped(_)) {
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
    }

    /// Lets go of an ended leader, and with it of the group's number. Does nothing to a running one.
    pub(super) fn reap(&self) {
        let mut leader = self.observed();
        if let Leader::Ended(end) = *leader {
            // The group was found empty. A member that was forked behind the scan's back must not stay under a number
            // that nobody watches any more.
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = self.wait(WaitIdOptions::empty());
            *leader = Leader::Reaped(end);
        }
    }

    /// The leader's state as of now.
    fn observed(&self) -> MutexGuard<'_, Leader> {
        let mut leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if let Leader::Running = *leader {
            match self.wait(WaitIdOptions::NOWAIT) {
                Ok(None) => {}
                Ok(Some(status)) => {
                    let end = ProcessEnd { code: status.exit_status(), signal: status.terminating_signal() };
                    *leader = Leader::Ended(end);
                }
                // Somebody else in this process has reaped it, and how it ended is lost.
                Err(_) => *leader = Leader::Reaped(ProcessEnd::default()),
            }
        }
        leader
    }

    fn wait(&self, options: WaitIdOptions) -> Result<Option<WaitIdStatus>, Errno> {
        let options = options | WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        loop {
            match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
                Err(Errno::INTR) => {}
                answer => return answer,
            }
        }
    }
}
