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
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, pidfd_open, pidfd_send_signal,
    waitid,
};

use super::proc_info::ProcessStat;
use crate::keeper::run_client::HeldRun;

pub(super) struct ProcessGroup {
    pid: Pid,
    pidfd: OwnedFd,
    wait: LeaderWait,
    // Locked during every signal, so that none is sent after the leader was reaped.
    leader: Mutex<LeaderState>,
}

/// The process that waits for the leader, its parent.
enum LeaderWait {
    Own,
    Keeper(HeldRun),
}

#[derive(Clone, Copy)]
enum LeaderState {
    Running,
    Ended(ProcessEnd),
    Reaped(ProcessEnd),
}

impl ProcessGroup {
    /// Takes over a process just started: a child of the keeper if it holds the run, otherwise of this process. If the
    /// pidfd cannot be opened (no descriptor is left), the process and its group are killed.
    pub(super) fn new(pid: Pid, held: Option<HeldRun>) -> io::Result<Self> {
        let number = pid.as_raw_nonzero().get().unsigned_abs();
        let opened = pidfd_open(pid, PidfdFlags::empty()).and_then(|pidfd| {
            let stat = ProcessStat::read(number).ok_or(Errno::MFILE)?;
            Ok((pidfd, stat.start_time))
        });
        match opened {
            Ok((pidfd, start_time)) => {
                let wait = held.map_or(LeaderWait::Own, |held| {
                    held.start(number, start_time);
                    LeaderWait::Keeper(held)
                });
                Ok(Self::from_parts(pid, pidfd, wait))
            }
            Err(error) => {
                let _ = kill_process_group(pid, Signal::KILL);
                // Without effect on a child of the keeper, which reaps it after this.
                let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED);
                drop(held);
                Err(error.into())
            }
        }
    }

    /// Takes over the leader of a run that an earlier satellite has left. The keeper has not reaped it. If it cannot be opened,
    /// its group is killed.
    pub(super) fn adopt(pid: u32, start_time: u64, held: HeldRun) -> io::Result<Self> {
        let pid = Pid::from_raw(pid.cast_signed()).ok_or(Errno::SRCH)?;
        let is_it = |stat: &ProcessStat| stat.start_time == start_time;
        let number = pid.as_raw_nonzero().get().unsigned_abs();
        let stat = ProcessStat::read(number).filter(is_it).ok_or(Errno::SRCH)?;
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self::from_parts(pid, pidfd, LeaderWait::Keeper(held))),
            Err(error) => {
                if stat.alive {
                    let _ = kill_process_group(pid, Signal::KILL);
                }
                Err(error.into())
            }
        }
    }

    fn from_parts(pid: Pid, pidfd: OwnedFd, wait: LeaderWait) -> Self {
        Self { pid, pidfd, wait, leader: Mutex::new(LeaderState::Running) }
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Returns the run if the keeper waits for the leader.
    pub(super) fn held_run(&self) -> Option<&HeldRun> {
        match &self.wait {
            LeaderWait::Own => None,
            LeaderWait::Keeper(held) => Some(held),
        }
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
            // Without a leader, another process has reaped it after the end of the keeper.
            if pidfd_send_signal(&self.pidfd, Signal::KILL) != Err(Errno::SRCH) {
                let _ = kill_process_group(self.pid, Signal::KILL);
            }
        }
    }

    /// Reaps an ended leader and thereby releases the group's number. Does nothing to a running leader.
    pub(super) fn reap(&self) {
        let mut leader = self.observe();
        if let LeaderState::Ended(end) = *leader {
            // The group was found empty. A member that was forked unseen by the scan must not stay in a group that is
            // no longer watched.
            let _ = kill_process_group(self.pid, Signal::KILL);
            match &self.wait {
                LeaderWait::Own => {
                    let _ = self.wait_id(WaitIdOptions::empty());
                }
                LeaderWait::Keeper(held) => held.reap(),
            }
            *leader = LeaderState::Reaped(end);
        }
    }

    fn observe(&self) -> MutexGuard<'_, LeaderState> {
        let mut leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if let LeaderState::Running = *leader {
            match &self.wait {
                LeaderWait::Own => match self.wait_id(WaitIdOptions::NOWAIT) {
                    Ok(None) => {}
                    Ok(Some(status)) => {
                        let end = ProcessEnd { code: status.exit_status(), signal: status.terminating_signal() };
                        *leader = LeaderState::Ended(end);
                    }
                    // Other code in this process has reaped the leader; its exit status is lost.
                    Err(_) => *leader = LeaderState::Reaped(ProcessEnd::default()),
                },
                LeaderWait::Keeper(held) => {
                    if let Some(end) = held.end() {
                        *leader = LeaderState::Ended(end);
                    } else if held.is_keeper_gone() && self.has_ended() {
                        // The process above the keeper reaps it.
                        *leader = LeaderState::Reaped(ProcessEnd::default());
                    }
                }
            }
        }
        leader
    }

    /// Returns true if the leader has ended, whoever its parent is.
    fn has_ended(&self) -> bool {
        let mut awaited = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        poll(&mut awaited, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    fn wait_id(&self, options: WaitIdOptions) -> Result<Option<WaitIdStatus>, Errno> {
        let options = options | WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        loop {
            match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
                Err(Errno::INTR) => {}
                answer => return answer,
            }
        }
    }
}
