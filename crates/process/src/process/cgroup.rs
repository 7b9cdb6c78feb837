//! Cgroups (version 2), one for each run: the kernel kills all members in one operation and reports when the cgroup is
//! empty, without a scan of other processes. A server without a sandbox that may write to cgroups can leave its own; it
//! is then found by its mark.
//!
//! The directories are `mcp-satellite-PID-START-ID/RUN` under the cgroup that the satellite was started in, with process id
//! and start time of its keeper or, without one, of the satellite. Controllers
//! are enabled where that cgroup is delegated to the satellite or is the root; without controllers a cgroup still
//! contains and kills.
//!
//! A process is started in its cgroup by `clone3(CLONE_INTO_CGROUP)`, which needs a writable hierarchy and Linux 5.14
//! for `cgroup.kill`. Killing was tested as root and with a delegated subtree; controllers were not, because version 1
//! holds them on all machines of the project.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::libc;

use super::proc_info::ProcessStat;
use super::spawn::try_cgroup;
use super::spawn_helper::spawn_helper_pid;
use crate::keeper::run_client::RunClient;

// Prefix of a satellite's cgroup; process id and start time of its keeper and the id of its marks follow.
const PREFIX: &str = "mcp-satellite-";
// Name of the child cgroup that contains the satellite itself, if it had to move for the controllers.
const LEAF: &str = "satellite";

pub(super) struct Cgroups {
    base: PathBuf,
    pub(super) controllers: CgroupControllers,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CgroupControllers {
    pub memory: bool,
    pub processes: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CgroupLimits {
    pub memory_bytes: Option<u64>,
    pub processes: Option<u64>,
}

impl Cgroups {
    /// Creates the satellite's cgroup and tests it with a child process. The error is the reason why cgroups cannot be
    /// used. A satellite that its keeper has started again takes over the cgroup of the last one.
    pub(super) fn detect(id: &str) -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let directory =
            own_directory(&mounts, &own).ok_or("no mounted cgroup2 file system contains the cgroup of this process")?;
        let keeper = RunClient::current().map(|runs| runs.keeper());
        let pid = keeper.map_or_else(std::process::id, |keeper| keeper.pid);
        let start_time = ProcessStat::read(pid).map_or(0, |stat| stat.start_time);
        let base = base_directory(&directory, &format!("{PREFIX}{pid}-{start_time}-{id}"));
        let parent = base.parent().map(Path::to_owned).unwrap_or_default();
        sweep(&parent);
        let failed = |what: &str, error: io::Error| format!("{what} `{}`: {error}", base.display());
        match fs::create_dir(&base) {
            Err(error) if keeper.is_some() && error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(|error| failed("cannot create", error))?,
        }
        let mut cgroups = Self { base, controllers: CgroupControllers::default() };
        if !cgroups.base.join("cgroup.kill").exists() {
            return Err("the kernel has no cgroup.kill (requires Linux 5.14)".to_owned());
        }
        cgroups.try_child().map_err(|error| format!("cannot start a process in a cgroup: {error}"))?;
        cgroups.controllers = cgroups.enable_controllers(&parent);
        Ok(cgroups)
    }

    pub(super) fn path(&self) -> &Path {
        &self.base
    }

    pub(super) fn create(self: &Arc<Self>, run: u64, limits: CgroupLimits) -> io::Result<Cgroup> {
        let path = self.base.join(run.to_string());
        fs::create_dir_all(&path)?;
        let cgroup = Cgroup { path, _all: Arc::clone(self) };
        if let Some(bytes) = limits.memory_bytes {
            cgroup.write("memory.max", &bytes.to_string())?;
            // Memory above the limit is not swapped out: the kernel kills instead.
            let _ = cgroup.write("memory.swap.max", "0");
        }
        if let Some(processes) = limits.processes {
            cgroup.write("pids.max", &processes.to_string())?;
        }
        Ok(cgroup)
    }

    /// Returns the cgroup of a run that an earlier satellite below the same keeper has started, if it has one.
    pub(super) fn find(self: &Arc<Self>, run: u64) -> Option<Cgroup> {
        let path = self.base.join(run.to_string());
        path.is_dir().then(|| Cgroup { path, _all: Arc::clone(self) })
    }

    /// Sends SIGKILL to all runs. The satellite's own leaf cgroup is spared.
    pub(super) fn kill(&self) {
        for run in self.runs() {
            let _ = fs::write(run.join("cgroup.kill"), "1");
        }
    }

    pub(super) fn is_populated(&self) -> bool {
        self.runs().any(|run| is_populated(&run))
    }

    fn runs(&self) -> impl Iterator<Item = PathBuf> {
        directories(&self.base).into_iter().filter(|directory| !directory.ends_with(LEAF))
    }

    pub(super) fn remove(&self) {
        remove(&self.base);
    }

    /// Starts a child in a cgroup, which ends at once. Only this shows whether it is permitted.
    fn try_child(&self) -> io::Result<()> {
        let trial = self.base.join("trial");
        fs::create_dir(&trial)?;
        let tried = File::open(&trial).and_then(|directory| try_cgroup(directory.as_fd()));
        let removed = fs::remove_dir(&trial);
        tried.and(removed)
    }

    /// Enables the parent's controllers for the runs. A cgroup that enables controllers for its children must not
    /// contain processes itself (except the root), so satellite, keeper and spawn helper move into a leaf first. If other processes
    /// remain, that fails and is undone. Without a keeper the satellite may be embedded in a host and is not moved.
    fn enable_controllers(&self, parent: &Path) -> CgroupControllers {
        let available = CgroupControllers::from_file(&parent.join("cgroup.controllers"));
        let delegated = |directory: &Path| CgroupControllers::from_file(&directory.join("cgroup.subtree_control"));
        let delegate = |directory: &Path| {
            let _ = fs::write(directory.join("cgroup.subtree_control"), available.to_string());
            delegated(directory) == available
        };
        if available == CgroupControllers::default() {
            return available;
        }
        if delegated(parent) != available && !delegate(parent) {
            let Some(runs) = RunClient::current() else { return CgroupControllers::default() };
            let leaf = self.base.join(LEAF);
            let moved = |into: &Path| {
                [runs.keeper().pid, std::process::id()]
                    .into_iter()
                    .chain(spawn_helper_pid())
                    .all(|pid| fs::write(into.join("cgroup.procs"), pid.to_string()).is_ok())
            };
            if fs::create_dir(&leaf).is_err() || !moved(&leaf) || !delegate(parent) {
                moved(parent);
                let _ = fs::remove_dir(&leaf);
                return CgroupControllers::default();
            }
        }
        if delegate(&self.base) { available } else { CgroupControllers::default() }
    }
}

impl CgroupControllers {
    fn from_file(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap_or_default();
        let has = |name: &str| text.split_whitespace().any(|word| word == name);
        Self { memory: has("memory"), processes: has("pids") }
    }
}

impl fmt::Display for CgroupControllers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let controllers = [(self.memory, "+memory"), (self.processes, "+pids")];
        let controllers: Vec<&str> = controllers.into_iter().filter_map(|(has, word)| has.then_some(word)).collect();
        f.write_str(&controllers.join(" "))
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The cgroup of one run. Removed on drop, if it is empty then.
pub(super) struct Cgroup {
    path: PathBuf,
    _all: Arc<Cgroups>,
}

impl Cgroup {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn directory(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Sends SIGKILL to all members in one operation that no fork can outrun.
    pub(super) fn kill(&self) {
        let _ = self.write("cgroup.kill", "1");
    }

    pub(super) fn is_populated(&self) -> bool {
        is_populated(&self.path)
    }

    pub(super) fn members(&self) -> Vec<u32> {
        let mut members = Vec::new();
        collect(&self.path, &mut members);
        members
    }

    /// Returns the processor time of all processes that ever ran in it, in microseconds.
    pub(super) fn cpu_micros(&self) -> Option<u64> {
        number_after(&fs::read_to_string(self.path.join("cpu.stat")).ok()?, "usage_usec")
    }

    pub(super) fn oom_kills(&self) -> u64 {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        number_after(&events, "oom_kill").unwrap_or_default()
    }

    pub(super) fn remove(&self) {
        remove(&self.path);
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        OpenOptions::new().write(true).open(self.path.join(file))?.write_all(text.as_bytes())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        self.remove();
    }
}

fn is_populated(directory: &Path) -> bool {
    match fs::read_to_string(directory.join("cgroup.events")) {
        Ok(events) => number_after(&events, "populated") != Some(0),
        // The cgroup was removed, which the kernel permits only if it is empty.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => false,
        Err(_) => true,
    }
}

/// Removes a cgroup, children first: servers that run as root can create cgroups below their own.
fn remove(directory: &Path) {
    // Most cgroups have no children, so that there is no need to look for them.
    if remove_one(directory).is_ok() {
        return;
    }
    for below in directories(directory) {
        remove(&below);
    }
    if let Err(error) = remove_one(directory) {
        tracing::debug!(cgroup = %directory.display(), %error, "cannot remove a cgroup");
    }
}

fn remove_one(directory: &Path) -> io::Result<()> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

pub struct LeftoverCgroups {
    parents: Vec<PathBuf>,
    prefix: String,
}

impl LeftoverCgroups {
    /// Finds the cgroups of the satellites below this process, their keeper.
    pub fn of_keeper() -> Self {
        let read = |file| fs::read_to_string(file).unwrap_or_default();
        let own = own_directory(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
        // The keeper may have been moved to the satellite's leaf cgroup.
        let above = own.iter().filter(|own| own.ends_with(LEAF)).filter_map(|own| own.ancestors().nth(2));
        let parents = above.map(Path::to_owned).chain(own.clone()).collect();
        Self { parents, prefix: format!("{PREFIX}{}-", std::process::id()) }
    }

    /// Kills all members of all runs except `kept`, and removes the cgroups that are empty. Returns true if only those of
    /// `kept` are left.
    pub fn kill_and_remove(&self, kept: &HashSet<u64>) -> bool {
        let mut is_removed = true;
        for base in self.bases() {
            for run in directories(&base).into_iter().filter(|directory| !directory.ends_with(LEAF)) {
                if number_of(&run).is_some_and(|run| kept.contains(&run)) {
                    continue;
                }
                let _ = fs::write(run.join("cgroup.kill"), "1");
                is_removed &= !is_populated(&run);
                remove(&run);
            }
            if kept.is_empty() {
                remove(&base);
            }
        }
        is_removed
    }

    /// Returns the process ids in the cgroups of these runs.
    pub(super) fn members_of(&self, runs: &HashSet<u64>) -> HashSet<u32> {
        let mut members = Vec::new();
        for base in self.bases() {
            let runs =
                directories(&base).into_iter().filter(|run| number_of(run).is_some_and(|run| runs.contains(&run)));
            runs.for_each(|run| collect(&run, &mut members));
        }
        members.into_iter().collect()
    }

    fn bases(&self) -> Vec<PathBuf> {
        let is_base = |base: &PathBuf| {
            let name = base.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(&self.prefix)
        };
        self.parents.iter().flat_map(|parent| directories(parent)).filter(is_base).collect()
    }
}

/// Returns the number of the run whose cgroup this is.
fn number_of(directory: &Path) -> Option<u64> {
    directory.file_name()?.to_str()?.parse().ok()
}

/// Returns the directory called `name` for a satellite in the cgroup `own`, which may be the leaf that the last satellite has
/// moved itself and its keeper to.
fn base_directory(own: &Path, name: &str) -> PathBuf {
    let above = own.parent().filter(|above| own.ends_with(LEAF) && above.ends_with(name));
    above.map_or_else(|| own.join(name), Path::to_owned)
}

fn sweep(parent: &Path) {
    for directory in directories(parent) {
        if dead_satellite_id(&directory).is_some() && !is_populated(&directory) {
            remove(&directory);
        }
    }
}

fn dead_satellite_id(directory: &Path) -> Option<&str> {
    let name = directory.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    let mut parts = name.splitn(3, '-');
    let (pid, start_time) = (parts.next()?.parse().ok()?, parts.next()?.parse::<u64>().ok()?);
    let is_it = |stat: &ProcessStat| stat.alive && stat.start_time == start_time;
    if ProcessStat::read(pid).as_ref().is_some_and(is_it) { None } else { parts.next() }
}

pub(super) fn is_of_dead_satellite(directory: &Path, id: &str) -> bool {
    dead_satellite_id(directory) == Some(id)
}

/// Kills all members of a cgroup that a satellite left, and removes it once it is empty. Returns true if it is gone.
pub(super) fn reclaim(directory: &Path) -> bool {
    if !directory.exists() {
        return true;
    }
    let _ = fs::write(directory.join("cgroup.kill"), "1");
    if is_populated(directory) {
        return false;
    }
    remove(directory);
    !directory.exists()
}

pub(super) fn population(directory: &Path) -> usize {
    let mut members = Vec::new();
    collect(directory, &mut members);
    members.len()
}

fn collect(directory: &Path, members: &mut Vec<u32>) {
    let procs = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    members.extend(procs.lines().filter_map(|pid| pid.parse::<u32>().ok()));
    for below in directories(directory) {
        collect(&below, members);
    }
}

fn directories(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let entries = entries.filter_map(Result::ok);
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

fn number_after(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

pub fn own_cgroup() -> Option<PathBuf> {
    let read = |file| fs::read_to_string(file).ok();
    own_directory(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?)
}

fn own_directory(mounts: &str, own: &str) -> Option<PathBuf> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        // … ROOT MOUNT_POINT OPTIONS … - TYPE SOURCE OPTIONS
        let (before, after) = line.split_once(" - ")?;
        let fields: Vec<&str> = before.split(' ').collect();
        let (root, point) = (*fields.get(3)?, *fields.get(4)?);
        if after.split(' ').next() != Some("cgroup2") {
            return None;
        }
        // A container may see only a part of the hierarchy.
        let below = Path::new(own).strip_prefix(root).ok()?;
        Some(Path::new(point).join(below))
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const HYBRID: &str = "30 24 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro\n\
                          31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw\n\
                          32 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";

    #[test]
    fn the_own_cgroup_is_found_below_the_mount_of_version_2() {
        let own = "9:memory:/a\n0::/user.slice/x.service\n";
        let expected = Path::new("/sys/fs/cgroup/unified/user.slice/x.service");
        assert_eq!(own_directory(HYBRID, own).as_deref(), Some(expected));
        assert_eq!(own_directory(HYBRID, "0::/\n").as_deref(), Some(Path::new("/sys/fs/cgroup/unified/")));
        assert_eq!(own_directory("", own), None);
        assert_eq!(own_directory(HYBRID, "9:memory:/a\n"), None, "version 1 only");
    }

    #[test]
    fn in_a_container_the_own_cgroup_is_below_the_mounted_part_of_the_tree() {
        let mounts = "31 30 0:27 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw";
        assert_eq!(own_directory(mounts, "0::/docker/abc/app\n").as_deref(), Some(Path::new("/sys/fs/cgroup/app")));
        assert_eq!(own_directory(mounts, "0::/elsewhere\n"), None);
    }

    #[test]
    fn only_the_cgroup_of_an_ended_satellite_is_recognized_by_its_name() {
        let own = std::process::id();
        let start_time = ProcessStat::read(own).unwrap().start_time;
        let is_dead = |name: String, id| is_of_dead_satellite(&Path::new("/sys/fs/cgroup").join(name), id);
        assert!(!is_dead(format!("mcp-satellite-{own}-{start_time}-feed"), "feed"), "the satellite still runs");
        assert!(is_dead(format!("mcp-satellite-{own}-{}-feed", start_time + 1), "feed"));
        assert!(!is_dead(format!("mcp-satellite-{own}-{}-feed", start_time + 1), "beef"));
        for name in ["", "system.slice", "mcp-satellite-feed", "mcp-satellite-1-feed", "mcp-satellite--1-1-feed"] {
            assert!(!is_dead(name.to_owned(), "feed"), "{name}");
        }
    }

    #[test]
    fn a_satellite_that_is_started_again_in_the_leaf_uses_the_same_cgroup() {
        let base = Path::new("/sys/fs/cgroup/x.service/mcp-satellite-1-2-feed");
        let found = |own: &str| base_directory(Path::new(own), "mcp-satellite-1-2-feed");
        assert_eq!(found("/sys/fs/cgroup/x.service"), base);
        assert_eq!(found("/sys/fs/cgroup/x.service/mcp-satellite-1-2-feed/satellite"), base);
        let other = "/sys/fs/cgroup/mcp-satellite-1-2-beef/satellite";
        assert_eq!(found(other), Path::new(other).join("mcp-satellite-1-2-feed"));
    }

    // Skipped on machines where no cgroup can be created.
    #[test]
    fn killing_all_runs_does_not_kill_the_leaf_of_the_satellite() {
        let Ok(cgroups) = Cgroups::detect("of-a-test").map(Arc::new) else { return };
        let sleeper = |directory: &Path| {
            let mut sleeper = Command::new("sleep").arg("3600").spawn().unwrap();
            let joined = fs::write(directory.join("cgroup.procs"), sleeper.id().to_string());
            assert!(joined.is_ok() || sleeper.kill().is_err(), "{joined:?}");
            sleeper
        };
        let leaf = cgroups.base.join(LEAF);
        fs::create_dir_all(&leaf).unwrap();
        let run = cgroups.create(1, CgroupLimits::default()).unwrap();
        let (mut own, mut of_run) = (sleeper(&leaf), sleeper(&run.path));
        assert!(cgroups.is_populated());
        cgroups.kill();
        of_run.wait().unwrap();
        assert!(!cgroups.is_populated());
        let lives = own.try_wait().unwrap().is_none();
        own.kill().unwrap();
        own.wait().unwrap();
        assert!(lives);
    }

    #[test]
    fn a_number_is_parsed_by_its_key() {
        assert_eq!(number_after("populated 1\nfrozen 0\n", "populated"), Some(1));
        assert_eq!(number_after("oom 3\noom_kill 2\n", "oom_kill"), Some(2));
        assert_eq!(number_after("", "populated"), None);
    }
}
