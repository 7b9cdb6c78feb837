//! The end of the processes below the keeper after the end of the satellite: of all of them, or of those that no further
//! satellite continues.

use std::collections::HashSet;
use std::io::Write;
use std::time::{Duration, Instant};
use std::{io, thread};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::io::Errno;
use rustix::process::{WaitOptions, wait};

use super::children::{is_named, own_children};
use crate::process::{KeptProcesses, LeftoverCgroups, SPAWN_HELPER_NAME};

/// Time to wait for killed processes. Those still alive after it are reported and left to the kernel.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);

/// Kills all children and adopted processes until none is left and returns their number. Each one is an unreaped child of the
/// keeper, so its process id is not reused. Satellites that are `stuck` in the kernel are not waited for.
pub(super) fn end_orphans(cgroups: &LeftoverCgroups, stuck: &[Pid]) -> usize {
    let until = Instant::now() + PATIENCE;
    let (mut ended, mut helper) = (0, None);
    loop {
        // Killing the whole cgroup at once catches a process that forks faster than it can be found.
        let cgroups_are_empty = cgroups.kill_and_remove(&HashSet::new());
        for child in own_children() {
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
        let childless = childless || own_children().iter().all(|child| stuck.contains(child));
        if childless && cgroups_are_empty {
            return ended;
        }
        if Instant::now() >= until {
            let remaining: Vec<String> = own_children().iter().map(Pid::to_string).collect();
            let _ = writeln!(io::stderr(), "satellite: cannot end these processes: {}", remaining.join(", "));
            return ended;
        }
        thread::sleep(PAUSE);
    }
}

/// Kills all processes below the keeper that belong to no run of `kept`, until none is left.
pub(super) fn end_all_but(kept: &KeptProcesses, cgroups: &LeftoverCgroups) {
    let until = Instant::now() + PATIENCE;
    loop {
        let cgroups_are_empty = cgroups.kill_and_remove(&kept.runs);
        // A search fails if descriptors are short; the next one may succeed.
        let others = kept.kill_others(cgroups);
        if cgroups_are_empty && others.as_ref().is_ok_and(Vec::is_empty) {
            return;
        }
        if Instant::now() >= until {
            let others: Vec<String> = others.unwrap_or_default().iter().map(u32::to_string).collect();
            let _ = writeln!(io::stderr(), "satellite: cannot end these processes: {}", others.join(", "));
            return;
        }
        thread::sleep(PAUSE);
    }
}
