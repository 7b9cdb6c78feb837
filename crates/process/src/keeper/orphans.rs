//! Processes below the keeper: the satellite, and what it has left after its end.

use std::ffi::CStr;
use std::io::Write;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid};
use rustix::io::Errno;
use rustix::process::{WaitOptions, wait};

use super::rules::ProcessExit;
use crate::process::{LeftoverCgroups, ProcessCensus, SPAWN_HELPER_NAME, children_of};

/// Time to wait for killed processes. Those still alive after it are reported and left to the kernel.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);

/// Maximum number of bytes of a process name. The kernel cuts a longer one.
const NAME_MAX: usize = 15;

/// Returns `None` if the process does not exist.
pub(super) fn is_named(pid: Pid, name: &CStr) -> Option<bool> {
    let found = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = name.to_bytes();
    Some(found.trim_ascii_end() == &name[..name.len().min(NAME_MAX)])
}

/// Reaps all processes that have ended. Returns the end of the satellite if it is among them.
pub(super) fn reap(satellite: Option<Pid>) -> Option<ProcessExit> {
    let mut exit = None;
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if satellite.is_some_and(|satellite| pid.as_raw_nonzero().get() == satellite.as_raw()) {
            let code = status.exit_status().map(|code| ProcessExit::Code(u8::try_from(code).unwrap_or(u8::MAX)));
            exit = code.or_else(|| status.terminating_signal().map(ProcessExit::Signal)).or(exit);
        }
    }
    exit
}

/// Kills the adopted processes until none is left and returns their number. Each one is an unreaped child of the
/// keeper, so its process id is not reused. Satellites that are `stuck` in the kernel are not waited for.
pub(super) fn end_orphans(cgroups: &LeftoverCgroups, stuck: &[Pid]) -> usize {
    let until = Instant::now() + PATIENCE;
    let (mut ended, mut helper) = (0, None);
    loop {
        // Killing the whole cgroup at once catches a process that forks faster than it can be found.
        let cgroups_are_empty = cgroups.kill_and_remove();
        for child in children() {
            // The spawn helper ends with the satellite and is not counted.
            if is_named(child, SPAWN_HELPER_NAME) == Some(true) {
                helper = Some(child.as_raw());
            }
            let _ = kill(child, Signal::SIGKILL);
        }
        // The children of a reaped process are now children of the keeper.
        let childless = loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, _))) => ended += usize::from(Some(pid.as_raw_nonzero().get()) != helper),
                Ok(None) => break false,
                Err(error) => break error == Errno::CHILD,
            }
        };
        let childless = childless || children().iter().all(|child| stuck.contains(child));
        if childless && cgroups_are_empty {
            return ended;
        }
        if Instant::now() >= until {
            let remaining: Vec<String> = children().iter().map(Pid::to_string).collect();
            let _ = writeln!(io::stderr(), "satellite: cannot end these processes: {}", remaining.join(", "));
            return ended;
        }
        thread::sleep(PAUSE);
    }
}

fn children() -> Vec<Pid> {
    let own = getpid().as_raw().unsigned_abs();
    let pids = children_of(own).unwrap_or_else(|_| {
        // Kernels without `/proc/PID/task/TID/children`.
        let Ok(census) = ProcessCensus::take() else { return Vec::new() };
        census.all().filter(|stat| stat.parent == own).map(|stat| stat.pid).collect()
    });
    pids.into_iter().map(|pid| Pid::from_raw(pid.cast_signed())).collect()
}
