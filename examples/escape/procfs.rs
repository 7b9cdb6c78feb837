//! Reads processes and mounts from `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use nix::unistd::Pid;

pub(crate) struct ProcessInfo {
    pub(crate) pid: i32,
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) parent: i32,
    pub(crate) terminal: i32,
    /// Start time in ticks since boot, the same number in every namespace.
    pub(crate) start_time: u64,
}

pub(crate) fn process(pid: i32) -> Option<ProcessInfo> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program chooses its name, which may contain parentheses and spaces.
    let (head, tail) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let fields: Vec<&str> = tail.split_whitespace().collect();
    Some(ProcessInfo {
        pid,
        name: name.to_owned(),
        state: (*fields.first()?).to_owned(),
        parent: fields.get(1)?.parse().ok()?,
        terminal: fields.get(4)?.parse().ok()?,
        start_time: fields.get(19)?.parse().ok()?,
    })
}

pub(crate) fn pids() -> BTreeSet<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return BTreeSet::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Returns the processes that are neither ancestors nor descendants of this one.
pub(crate) fn strangers() -> Vec<ProcessInfo> {
    let all: BTreeMap<i32, ProcessInfo> = pids().into_iter().filter_map(|pid| Some((pid, process(pid)?))).collect();
    let line_of = |pid: i32| std::iter::successors(Some(pid), |pid| all.get(pid).map(|process| process.parent));
    let own = Pid::this().as_raw();
    let above: BTreeSet<i32> = line_of(own).collect();
    let related: BTreeSet<i32> =
        all.keys().copied().filter(|pid| above.contains(pid) || line_of(*pid).any(|above| above == own)).collect();
    all.into_values().filter(|process| !related.contains(&process.pid)).collect()
}

pub(crate) fn descriptors() -> BTreeMap<i32, String> {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return BTreeMap::new() };
    // Read all numbers first: the directory's own descriptor is closed by the time of the look-up.
    let numbers: Vec<i32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let target = |number: i32| fs::read_link(format!("/proc/self/fd/{number}")).ok();
    let open = numbers.into_iter().filter_map(|number| Some((number, target(number)?.to_string_lossy().into_owned())));
    open.collect()
}

pub(crate) fn status(pid: &str, key: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.split_whitespace().collect::<Vec<_>>().join(" "))
}

pub(crate) struct MountInfo {
    pub(crate) point: PathBuf,
    /// Root of the mount within its file system.
    pub(crate) root: String,
    pub(crate) options: String,
    pub(crate) kind: String,
    pub(crate) source: String,
}

pub(crate) fn mounts() -> Vec<MountInfo> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mount = |line: &str| {
        let (here, there) = line.split_once(" - ")?;
        let here: Vec<&str> = here.split(' ').collect();
        let there: Vec<&str> = there.split(' ').collect();
        Some(MountInfo {
            root: (*here.get(3)?).to_owned(),
            point: here.get(4)?.replace("\\040", " ").into(),
            options: (*here.get(5)?).to_owned(),
            kind: (*there.first()?).to_owned(),
            source: (*there.get(1)?).to_owned(),
        })
    };
    table.lines().filter_map(mount).collect()
}
