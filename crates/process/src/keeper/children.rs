//! Children of the keeper: the satellite, the spawn helper, the leaders of runs, and orphans that the keeper has adopted.
//! Each is waited for by its process id, so that no leader is reaped before its process tree is empty.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use mcp_satellite_actors::seam::ProcessEnd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid};
use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus, waitid};
use rustix::time::{ClockId, clock_gettime};

use super::inherited::{InheritedRuns, KeeperIdentity, RunDescriptors};
use super::messages::{KeeperSocket, RunEvent, RunRequest};
use super::orphans::end_all_but;
use super::rules::ProcessExit;
use super::runs::{KeptRun, RunTable};
use crate::process::{
    ForkedHelper, KeptProcesses, LeftoverCgroups, ProcessCensus, ProcessStat, SPAWN_HELPER_NAME, children_of,
    fork_spawn_helper, new_satellite_id,
};

/// Maximum number of bytes of a process name. The kernel cuts a longer one.
const NAME_MAX: usize = 15;

/// Time to wait for the end of a killed spawn helper, which does not use a disk.
const KILLED_PATIENCE: Duration = Duration::from_secs(1);

/// Interval between two searches for adopted processes that have ended.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct KeeperChildren {
    own: ProcessStat,
    id: String,
    satellite: Option<Pid>,
    // The last one is in use; the others were killed.
    helpers: Vec<Pid>,
    runs: RunTable,
    descriptors: HashMap<u64, RunDescriptors>,
    // One byte for each run: 1 while a line to its server may be incomplete. Written by the satellites.
    open_lines: File,
    // Messages to the satellite, with a descriptor if one belongs to the message.
    to_send: VecDeque<(RunEvent, Option<OwnedFd>)>,
    reaped_orphans: u64,
    searched_at: Option<Instant>,
    // Time of the next search for adopted processes, if one is needed.
    search_at: Option<Instant>,
}

impl KeeperChildren {
    /// Describes this process as a keeper without children.
    pub(super) fn new() -> io::Result<Self> {
        let own = ProcessStat::read(std::process::id());
        Ok(Self {
            own: own.ok_or_else(|| io::Error::other("cannot read /proc/self/stat"))?,
            id: new_satellite_id()?,
            satellite: None,
            helpers: Vec::new(),
            runs: RunTable::default(),
            descriptors: HashMap::new(),
            open_lines: File::from(memfd_create(c"satellite-open-lines", MFdFlags::MFD_CLOEXEC)?),
            to_send: VecDeque::new(),
            reaped_orphans: 0,
            searched_at: None,
            search_at: None,
        })
    }

    /// Returns the identity of this keeper for the next satellite.
    pub(super) fn identity(&self) -> KeeperIdentity {
        KeeperIdentity {
            pid: self.own.pid,
            start_time: self.own.start_time,
            id: self.id.clone(),
            first_run: self.runs.next_run(),
        }
    }

    /// Notes the satellite that this process has forked. It has inherited all runs.
    pub(super) fn set_satellite(&mut self, satellite: Pid) {
        self.satellite = Some(satellite);
        self.runs.attach();
    }

    /// Returns what a satellite that was just forked inherits.
    pub(super) fn into_inherited(mut self) -> InheritedRuns {
        self.runs.attach();
        let mut with_descriptors = |kept: KeptRun| Some((kept, self.descriptors.remove(&kept.run)?));
        let runs = self.runs.kept().into_iter().filter_map(&mut with_descriptors).collect();
        InheritedRuns { runs, open_lines: self.open_lines }
    }

    /// Forgets all children, which have ended with their satellite.
    pub(super) fn clear(&mut self) {
        (self.satellite, self.search_at) = (None, None);
        self.helpers.clear();
        self.runs.clear();
        self.descriptors.clear();
        self.to_send.clear();
    }

    /// Ends everything that a crashed satellite has left except the runs that the next one gets: the spawn helper, the starts
    /// in progress, and processes of runs that the keeper does not hold.
    pub(super) fn end_generation(&mut self, cgroups: &LeftoverCgroups, stuck: &[Pid]) {
        self.satellite = None;
        self.to_send.clear();
        // Afterwards no fork is in progress.
        for helper in self.helpers.drain(..) {
            let _ = kill(helper, Signal::SIGKILL);
            let _ = wait_for_end(helper.as_raw().unsigned_abs());
        }
        for run in self.runs.remove_starts() {
            self.descriptors.remove(&run);
        }
        let kept = self.runs.kept();
        let kept = KeptProcesses {
            id: self.id.clone(),
            runs: kept.iter().map(|kept| kept.run).collect(),
            leaders: kept.iter().map(|kept| kept.pid).collect(),
            spared: stuck.iter().map(|pid| pid.as_raw().unsigned_abs()).collect::<HashSet<u32>>(),
        };
        end_all_but(&kept, cgroups);
        self.request_search();
    }

    /// Kills the last spawn helper and starts another one.
    pub(super) fn fork_helper(&mut self) -> io::Result<ForkedHelper> {
        for helper in &self.helpers {
            let _ = kill(*helper, Signal::SIGKILL);
        }
        // The lost helper may have forked children that are not prepared: they have its name and no mark yet.
        for child in own_children() {
            let is_known = self.helpers.contains(&child) || self.runs.is_leader(child.as_raw().unsigned_abs());
            if !is_known && is_named(child, SPAWN_HELPER_NAME) == Some(true) {
                let _ = kill(child, Signal::SIGKILL);
            }
        }
        let helper = fork_spawn_helper()?;
        self.helpers.push(Pid::from_raw(helper.pid.cast_signed()));
        Ok(helper)
    }

    /// Carries out a request of the satellite.
    pub(super) fn receive(&mut self, request: &RunRequest, mut descriptors: Vec<OwnedFd>) {
        match *request {
            RunRequest::Hold { run } => {
                let event = match self.hold(run, descriptors) {
                    Ok(()) => RunEvent::Held { run },
                    Err(error) => RunEvent::NotHeld { run, errno: error.raw_os_error() },
                };
                self.to_send.push_back((event, None));
            }
            RunRequest::Started { run, pid, start_time } => self.note_leader(run, pid, start_time),
            RunRequest::Describe { run } => {
                if let Some(held) = self.descriptors.get_mut(&run) {
                    held.description = descriptors.pop();
                }
            }
            RunRequest::CloseStdin { run } => {
                if let Some(held) = self.descriptors.get_mut(&run) {
                    held.stdin = None;
                }
            }
            RunRequest::Reap { run } | RunRequest::Discard { run } => match self.remove(run) {
                Some(leader) => {
                    let _ = wait_for(leader, WaitIdOptions::empty());
                }
                None => self.request_search(),
            },
            RunRequest::NewHelper => match self.fork_helper() {
                Ok(ForkedHelper { pid, stream }) => {
                    self.to_send.push_back((RunEvent::Helper { pid }, Some(stream.into())));
                }
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                    self.to_send.push_back((RunEvent::NoHelper { errno }, None));
                }
            },
        }
    }

    fn hold(&mut self, run: u64, descriptors: Vec<OwnedFd>) -> Result<(), Errno> {
        let descriptors = RunDescriptors::new(descriptors).ok_or(Errno::MFILE)?;
        if !self.runs.hold(run, ticks_since_boot()) {
            return Err(Errno::EXIST);
        }
        self.descriptors.insert(run, descriptors);
        Ok(())
    }

    fn remove(&mut self, run: u64) -> Option<u32> {
        self.descriptors.remove(&run);
        self.runs.remove(run)
    }

    fn note_leader(&mut self, run: u64, pid: u32, start_time: u64) {
        let is_it = |stat: ProcessStat| stat.parent == self.own.pid && stat.start_time == start_time;
        if !ProcessStat::read(pid).is_some_and(is_it) {
            self.remove(run);
            self.to_send.push_back((RunEvent::Ended { run, code: None, signal: None }, None));
        } else if self.runs.start(run, pid, start_time) {
            self.observe(run, pid);
        }
    }

    /// Reports the end of a leader that has ended. It remains a zombie.
    fn observe(&mut self, run: u64, pid: u32) {
        let (code, signal) = match wait_for(pid, WaitIdOptions::NOWAIT) {
            Ok(None) => return,
            Ok(Some(status)) => {
                let (code, signal) = (status.exit_status(), status.terminating_signal());
                self.runs.end(run, ProcessEnd { code, signal });
                (code, signal)
            }
            Err(_) => {
                self.remove(run);
                (None, None)
            }
        };
        self.to_send.push_back((RunEvent::Ended { run, code, signal }, None));
    }

    /// Notes which children have ended. Returns the satellite's end if it is among them.
    pub(super) fn collect(&mut self) -> Option<ProcessExit> {
        for (run, pid) in self.runs.running() {
            self.observe(run, pid);
        }
        let has_ended = |pid: &Pid| wait_for(pid.as_raw().unsigned_abs(), WaitIdOptions::empty());
        self.helpers.retain(|helper| matches!(has_ended(helper), Ok(None)));
        self.request_search();
        let status = has_ended(&self.satellite?).ok()??;
        self.satellite = None;
        let code = status.exit_status().map(|code| ProcessExit::Code(u8::try_from(code).unwrap_or(u8::MAX)));
        code.or_else(|| status.terminating_signal().map(ProcessExit::Signal))
    }

    fn request_search(&mut self) {
        let earliest = self.searched_at.map_or_else(Instant::now, |at| at + SEARCH_PAUSE);
        self.search_at.get_or_insert(earliest);
    }

    /// Returns the time at which `expire` has an effect.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.search_at
    }

    /// Reaps the adopted processes that have ended, if it is time.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.search_at.is_none_or(|at| now < at) {
            return;
        }
        (self.searched_at, self.search_at) = (Some(now), None);
        let reaped_before = self.reaped_orphans;
        for child in own_children() {
            let pid = child.as_raw().unsigned_abs();
            if Some(child) == self.satellite || self.helpers.contains(&child) || self.runs.is_leader(pid) {
                continue;
            }
            let Some(stat) = ProcessStat::read(pid).filter(|stat| !stat.alive) else { continue };
            if self.runs.may_lead(stat.start_time) {
                // It is known after the start.
                self.request_search();
                continue;
            }
            // A child that has not executed its program is a failed start and no orphan.
            let is_orphan = is_named(child, SPAWN_HELPER_NAME) == Some(false);
            if let Ok(Some(_)) = wait_for(pid, WaitIdOptions::empty()) {
                self.reaped_orphans += u64::from(is_orphan);
            }
        }
        if self.reaped_orphans > reaped_before {
            self.to_send.push_back((RunEvent::Orphans { reaped: self.reaped_orphans }, None));
        }
    }

    /// Returns true if messages to the satellite wait until it has read others.
    pub(super) fn has_messages(&self) -> bool {
        !self.to_send.is_empty()
    }

    /// Sends the messages that fit into the buffer of the socket.
    pub(super) fn send(&mut self, socket: &KeeperSocket) {
        while let Some((event, descriptor)) = self.to_send.front() {
            let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(AsFd::as_fd).collect();
            match socket.send_with(event, &descriptors) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Another error means that the satellite has ended.
                Ok(()) | Err(_) => drop(self.to_send.pop_front()),
            }
        }
    }
}

/// Waits for a child without blocking.
fn wait_for(pid: u32, options: WaitIdOptions) -> rustix::io::Result<Option<WaitIdStatus>> {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).ok_or(Errno::CHILD)?;
    loop {
        match waitid(WaitId::Pid(pid), options | WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Err(Errno::INTR) => {}
            answer => return answer,
        }
    }
}

/// Waits for a child that was killed, at most for a second.
fn wait_for_end(pid: u32) -> rustix::io::Result<()> {
    let until = Instant::now() + KILLED_PATIENCE;
    while wait_for(pid, WaitIdOptions::empty())?.is_none() && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns `None` if the process does not exist.
pub(super) fn is_named(pid: Pid, name: &CStr) -> Option<bool> {
    let found = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = name.to_bytes();
    Some(found.trim_ascii_end() == &name[..name.len().min(NAME_MAX)])
}

/// Returns the current time in the unit of start times.
fn ticks_since_boot() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    let ticks = rustix::param::clock_ticks_per_second();
    seconds * ticks + nanoseconds * ticks / 1_000_000_000
}

/// Returns the children of this process.
pub(super) fn own_children() -> Vec<Pid> {
    let own = getpid().as_raw().unsigned_abs();
    let pids = children_of(own).unwrap_or_else(|_| {
        // Kernels without `/proc/PID/task/TID/children`.
        let Ok(census) = ProcessCensus::take() else { return Vec::new() };
        census.all().filter(|stat| stat.parent == own).map(|stat| stat.pid).collect()
    });
    pids.into_iter().map(|pid| Pid::from_raw(pid.cast_signed())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_process_is_not_older_than_the_time_before_its_start() {
        let before = ticks_since_boot();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let after = ticks_since_boot();
        let start_time = ProcessStat::read(child.id()).unwrap().start_time;
        child.kill().unwrap();
        child.wait().unwrap();
        assert!((before..=after).contains(&start_time), "{before} {start_time} {after}");
    }

    fn pipes() -> Vec<OwnedFd> {
        let (read, write) = io::pipe().unwrap();
        vec![write.into(), read.try_clone().unwrap().into(), read.into()]
    }

    #[test]
    fn a_run_whose_pipes_did_not_arrive_is_not_held() {
        let mut children = KeeperChildren::new().unwrap();
        children.receive(&RunRequest::Hold { run: 1 }, Vec::new());
        let (event, _) = children.to_send.pop_front().unwrap();
        assert_eq!(event, RunEvent::NotHeld { run: 1, errno: Errno::MFILE.raw_os_error() });
        assert!(children.into_inherited().runs.is_empty());
    }

    #[test]
    fn the_next_satellite_inherits_the_descriptors_of_a_run_that_was_started() {
        let mut children = KeeperChildren::new().unwrap();
        let mut server = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (pid, start_time) = (server.id(), ProcessStat::read(server.id()).unwrap().start_time);
        for run in [1, 2] {
            children.receive(&RunRequest::Hold { run }, pipes());
        }
        children.receive(&RunRequest::Started { run: 1, pid, start_time }, Vec::new());
        children.receive(&RunRequest::Describe { run: 1 }, pipes());
        children.receive(&RunRequest::CloseStdin { run: 1 }, Vec::new());
        assert_eq!(children.identity().first_run, 3);
        let inherited = children.into_inherited();
        server.kill().unwrap();
        server.wait().unwrap();
        let [(kept, descriptors)] = inherited.runs.try_into().map_err(drop).unwrap();
        assert_eq!(kept, KeptRun { run: 1, pid, start_time, attachment: 1, end: None });
        assert!(descriptors.stdin.is_none() && descriptors.description.is_some());
    }
}
