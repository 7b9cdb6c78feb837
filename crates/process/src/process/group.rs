//! A leader and its process group.
//!
//! ```text
//! running ──→ ended ──→ reaped
//!              │          └ the number may be reused: no signal any more
//!              └ a zombie, which keeps the group's number from being reused
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

pub(super) struct ProcessGroup {
    pid: Pid,
    pidfd: OwnedFd,
    // Locked during every signal, so that none is sent after the leader was reaped.
    leader: Mutex<LeaderState>,
}

#[derive(Clone, Copy)]
enum LeaderState {
    Running,
    Ended(ProcessEnd),
    Reaped(ProcessEnd),
}

impl ProcessGroup {
    /// Takes over a child just started. If the pidfd cannot be opened (no descriptor is left), the child and its group
    /// are killed.
    pub(super) fn new(pid: Pid) -> io::Result<Self> {
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { pid, pidfd, leader: Mutex::new(LeaderState::Running) }),
            Err(error) => {
                let _ = kill_process_group(pid, Signal::KILL);
                let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED);
                Err(error.into())
            }
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub(super) fn end(&self) -> Option<ProcessEnd> {
        match *self.observe() {
            LeaderState::Running => None,
            LeaderState::Ended(end) | LeaderState::Reaped(end) => Some(end),
        }
    }

    pub(super) fn is_reaped(&self) -> bool {
        matches!(*self.observe(), LeaderState::Reaped(_))
    }

    pub(super) fn terminate(&self) {
        let leader = self.observe();
        // If the leader has moved to another group, it alone gets the signal. Never twice: some servers skip their
        // shutdown on a second SIGTERM.
        if !matches!(*leader, LeaderState::Reaped(_)) && kill_process_group(self.pid, Signal::TERM).is_err() {
            let _ = pidfd_send_signal(&self.pidfd, Signal::TERM);
        }
    }

    pub(super) fn kill(&self) {
        let leader = self.observe();
        if !matches!(*leader, LeaderState::Reaped(_)) {
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
    }

    /// Reaps an ended leader and thereby releases the group's number. Does nothing to a running leader.
    pub(super) fn reap(&self) {
        let mut leader = self.observe();
        if let LeaderState::Ended(end) = *leader {
            // The group was found empty. A member that was forked unseen by the scan must not stay in a group that is
            // no longer watched.
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = self.wait(WaitIdOptions::empty());
            *leader = LeaderState::Reaped(end);
        }
    }

    fn observe(&self) -> MutexGuard<'_, LeaderState> {
        let mut leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if let LeaderState::Running = *leader {
            match self.wait(WaitIdOptions::NOWAIT) {
                Ok(None) => {}
                Ok(Some(status)) => {
                    let end = ProcessEnd { code: status.exit_status(), signal: status.terminating_signal() };
                    *leader = LeaderState::Ended(end);
                }
                // Other code in this process has reaped the leader; its exit status is lost.
                Err(_) => *leader = LeaderState::Reaped(ProcessEnd::default()),
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
