//! Processes as `/proc` shows them, with the start time that distinguishes a process from a later one with the same
//! pid.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;
use testkit::process::send;

/// One process. The kernel reuses a pid, but not together with the start time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessInfo {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    pub(crate) start_time: u64,
    /// The command line, with spaces between the arguments.
    pub(crate) line: String,
}

impl ProcessInfo {
    /// Returns `None` if the process has ended or is a zombie.
    pub(crate) fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
        // proc(5) numbers these fields from 3.
        let (state, parent, start_time) = (fields[0], fields[1].parse().ok()?, fields[19].parse().ok()?);
        let line = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).ok()?).replace('\0', " ");
        (!matches!(state, "Z" | "X")).then_some(Self { pid, parent, start_time, line })
    }

    pub(crate) fn is_alive(&self) -> bool {
        Self::read(self.pid).is_some_and(|process| process.start_time == self.start_time)
    }
}

/// Returns the zombie children of a process.
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

/// Returns the processes that still run.
pub(crate) fn alive(processes: &[ProcessInfo]) -> Vec<&ProcessInfo> {
    processes.iter().filter(|process| process.is_alive()).collect()
}

/// A process that belongs to no satellite and leads its own process group.
pub(crate) struct Bystander {
    child: Child,
    pub(crate) info: ProcessInfo,
}

impl Bystander {
    pub(crate) fn start(environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new("sleep");
        let command = command.arg("3600").envs(environment.iter().copied()).process_group(0).stdin(Stdio::null());
        let child = command.spawn().unwrap();
        let info = ProcessInfo::read(i32::try_from(child.id()).unwrap()).unwrap();
        Self { child, info }
    }

    #[track_caller]
    pub(crate) fn survived(&self) {
        assert!(self.info.is_alive(), "a stranger was ended: {:?}", self.info);
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The member of a process group whose leader has ended, so that no process has the group's number as its pid.
pub(crate) struct GroupMember {
    pub(crate) group: i32,
    pub(crate) info: ProcessInfo,
}

impl GroupMember {
    pub(crate) fn start() -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 3600 >/dev/null & echo $!"]).process_group(0).stdin(Stdio::null());
        let leader = command.stdout(Stdio::piped()).spawn().unwrap();
        let group = i32::try_from(leader.id()).unwrap();
        let output = leader.wait_with_output().unwrap().stdout;
        let info = ProcessInfo::read(String::from_utf8(output).unwrap().trim().parse().unwrap()).unwrap();
        Self { group, info }
    }

    #[track_caller]
    pub(crate) fn survived(&self) {
        assert!(self.info.is_alive(), "a stranger was ended: {:?}", self.info);
    }
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        if self.info.is_alive() {
            send(self.info.pid, Signal::SIGKILL);
        }
    }
}
