//! Processes as `/proc` shows them, each with what tells it from a later one of the same number.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;

use super::support::send;

/// One process, for ever: a number is used again, together with its start time it is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    pub(crate) start_time: u64,
    /// With spaces between the arguments.
    pub(crate) line: String,
}

impl Seen {
    /// `None` where it is gone, or a zombie.
    pub(crate) fn now(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
        // Numbered from 3 in proc(5).
        // Numbered from 3 in proc(5).
        let (state, parent, start_time) = (fields[0], fields[1].parse().ok()?, fields[19].parse().ok()?);
        let line = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).ok()?).replace('\0', " ");
        (!matches!(state, "Z" | "X")).then_some(Self { pid, parent, start_time, line })
    }

    pub(crate) fn is_alive(&self) -> bool {
        Self::now(self.pid).is_some_and(|now| now.start_time == self.start_time)
    }
}

/// The children of a process that have ended and that it has not waited for.
pub(crate) fn zombies_of(parent: i32) -> Vec<i32> {
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_its_zombie = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields =
            stat.rsplit_once(')').map(|(_, fields)| fields.split_ascii_whitespace().take(2).collect::<Vec<_>>());
        fields.is_some_and(|fields| fields == ["Z", &parent.to_string()])
    };
    pids.filter(is_its_zombie).collect()
}

/// Those that are still there.
pub(crate) fn alive(seen: &[Seen]) -> Vec<&Seen> {
    seen.iter().filter(|process| process.is_alive()).collect()
}

/// A process that is none of a satellite's, and leads a group of its own.
pub(crate) struct Bystander {
    child: Child,
    pub(crate) seen: Seen,
}

impl Bystander {
    pub(crate) fn start(environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new("sleep");
        let command = command.arg("3600").envs(environment.iter().copied()).process_group(0).stdin(Stdio::null());
        let child = command.spawn().unwrap();
        let seen = Seen::now(i32::try_from(child.id()).unwrap()).unwrap();
        Self { child, seen }
    }

    #[track_caller]
    pub(crate) fn survived(&self) {
        assert!(self.seen.is_alive(), "a stranger was hit: {:?}", self.seen);
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The member of a group whose leader is gone, so that the group's number names no process.
pub(crate) struct Member {
    pub(crate) group: i32,
    pub(crate) seen: Seen,
}

impl Member {
    pub(crate) fn start() -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 3600 >/dev/null & echo $!"]).process_group(0).stdin(Stdio::null());
        let leader = command.stdout(Stdio::piped()).spawn().unwrap();
        let group = i32::try_from(leader.id()).unwrap();
        let said = leader.wait_with_output().unwrap().stdout;
        let seen = Seen::now(String::from_utf8(said).unwrap().trim().parse().unwrap()).unwrap();
        Self { group, seen }
    }

    #[track_caller]
    pub(crate) fn survived(&self) {
        assert!(self.seen.is_alive(), "a stranger was hit: {:?}", self.seen);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.seen.is_alive() {
            send(self.seen.pid, Signal::SIGKILL);
        }
    }
}
