//! The process tree of a run: a leader, its descendants, and the means that holds them.
//!
//! | held by | members | why a kill is complete |
//! | --- | --- | --- |
//! | cgroup | the processes that the kernel lists | the kernel kills all in one operation |
//! | PID namespace | the processes below its first process | the kernel kills all with that process |
//! | group | its group and session, descendants, processes with the mark | the search repeats until it finds none |
//!
//! No signal goes to a bare number: each member is held by a pidfd, and then checked once more.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use mcp_satellite_actors::model::exit::{ExceededLimit, LimitedResource};
use mcp_satellite_actors::seam::ProcessEnd;
use rustix::process::Signal;

use super::cgroup::Cgroup;
use super::group::ProcessGroup;
use super::launch::Confinement;
use super::ledger::Ledger;
use super::limits::ResourceLimits;
use super::proc_info::{PidfdProcess, ProcessCensus, ProcessStat, children_of};
use super::run_mark::RunMark;
use crate::keeper::run_client::RunClient;

// Exit codes of a sandbox above this value encode the signal that ended its server.
const SIGNAL_BASE: i32 = 128;

pub(super) struct ProcessTree {
    pub(super) group: ProcessGroup,
    pub(super) run: u64,
    cgroup: Option<Cgroup>,
    mark: RunMark,
    confinement: Option<Confinement>,
    sandbox_processes: OnceLock<SandboxProcesses>,
    // True once the tree is to be killed, including members found later.
    kill_requested: AtomicBool,
    final_stats: OnceLock<FinalStats>,
    ledger: Arc<Ledger>,
}

struct FinalStats {
    cpu_ticks: u64,
    oom_killed: bool,
    start_time: u64,
}

/// Numbers of orphans that have ended since this process began. A process can count in both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OrphanCounts {
    /// Adopted processes whose end the keeper has collected.
    pub reaped: u64,
    /// Processes that had left the cgroup of their run and were killed after its end.
    pub killed: u64,
}

static KILLED: AtomicU64 = AtomicU64::new(0);

impl OrphanCounts {
    /// Returns the numbers so far. Those of the orphans that remain after this process are not known.
    pub fn read() -> Self {
        let reaped = RunClient::current().map_or(0, |keeper| keeper.reaped_orphans());
        Self { reaped, killed: KILLED.load(Ordering::Relaxed) }
    }
}

/// A search for processes that have left the cgroup of their run.
pub(super) struct StraySearch {
    pub(super) mark: RunMark,
    /// Start time of the leader, in clock ticks since boot: no process of the run is older.
    pub(super) since: u64,
    /// Killed processes, by process id and start time. A process can be found again until it has ended.
    killed: HashSet<(u32, u64)>,
}

struct SandboxProcesses {
    // The first process of the PID namespace; the kernel kills all others with it.
    init: PidfdProcess,
    // The server, if it is not the first process.
    server: Option<PidfdProcess>,
}

impl ProcessTree {
    pub(super) fn new(
        group: ProcessGroup,
        run: u64,
        cgroup: Option<Cgroup>,
        mark: RunMark,
        confinement: Option<Confinement>,
        ledger: Arc<Ledger>,
    ) -> Self {
        let (sandbox_processes, final_stats, kill_requested) =
            (OnceLock::new(), OnceLock::new(), AtomicBool::new(false));
        Self { group, run, cgroup, mark, confinement, sandbox_processes, kill_requested, final_stats, ledger }
    }

    pub(super) fn pid(&self) -> u32 {
        let inside = self.sandbox_processes.get();
        inside.map_or(self.group.pid(), |inside| inside.server.as_ref().unwrap_or(&inside.init).pid)
    }

    pub(super) fn wrapper_pid(&self) -> Option<u32> {
        self.confinement.map(|_| self.group.pid())
    }

    pub(super) fn confinement(&self) -> Option<Confinement> {
        self.confinement
    }

    pub(super) fn containment_mechanism(&self) -> &'static str {
        match (&self.cgroup, &self.confinement) {
            (Some(_), _) => "cgroup",
            (None, Some(_)) => "pid_namespace",
            (None, None) => "group",
        }
    }

    pub(super) fn cgroup_path(&self) -> Option<&Path> {
        self.cgroup.as_ref().map(Cgroup::path)
    }

    pub(super) fn end(&self) -> Option<ProcessEnd> {
        let end = self.group.end()?;
        // A sandbox returns the signal that ended its server as an exit code.
        match end.code {
            Some(code) if self.confinement.is_some() && (SIGNAL_BASE + 1..=SIGNAL_BASE + 64).contains(&code) => {
                Some(ProcessEnd { code: None, signal: Some(code - SIGNAL_BASE) })
            }
            _ => Some(end),
        }
    }

    pub(super) fn find_sandboxed_server(&self) -> std::io::Result<bool> {
        let Some(confinement) = self.confinement else { return Ok(true) };
        if self.sandbox_processes.get().is_some() {
            return Ok(true);
        }
        let mut path = vec![self.group.pid()];
        for _ in 0..confinement.depth {
            let parent = path[path.len() - 1];
            let children = match children_of(parent) {
                Ok(children) => children,
                // The sandbox has just ended; the caller reads its error message.
                Err(_) if ProcessStat::read(parent).is_none_or(|stat| !stat.alive) => return Ok(false),
                Err(error) => return Err(error),
            };
            let Some(child) = children.first().copied() else { return Ok(false) };
            path.push(child);
        }
        let hold = |at: usize| PidfdProcess::open_if(path[at], |stat| stat.parent == path[at - 1]);
        let Some(init) = hold(1) else { return Ok(false) };
        let server = if confinement.depth > 1 {
            let Some(server) = hold(confinement.depth) else { return Ok(false) };
            Some(server)
        } else {
            None
        };
        self.ledger.record_sandbox_process(self.run, init.pid, init.start_time);
        let _ = self.sandbox_processes.set(SandboxProcesses { init, server });
        Ok(true)
    }

    /// Sends SIGTERM to every member, once: some servers skip their shutdown on a second one. The sandbox's own
    /// processes are left out: they would end the server before its handler has run.
    pub(super) fn terminate(&self, census: &ProcessCensus) {
        let in_group = self.confinement.is_none();
        if in_group {
            self.group.terminate();
        }
        let own = self.group.pid();
        let sandbox = self.sandbox_pids();
        for member in self.members(census) {
            let reached = in_group && (member.pid == own || member.group == own);
            if !reached && !sandbox.contains(&member.pid) {
                signal(member, Signal::TERM);
            }
        }
    }

    /// Sends SIGKILL to every member that can be reached at once. The scanner finds the others and kills until none is
    /// left.
    pub(super) fn kill(&self) {
        self.kill_requested.store(true, Ordering::Release);
        if let Some(cgroup) = &self.cgroup {
            cgroup.kill();
        }
        if let Some(inside) = self.sandbox_processes.get() {
            inside.init.signal(Signal::KILL);
        }
        self.group.kill();
    }

    pub(super) fn is_kill_requested(&self) -> bool {
        self.kill_requested.load(Ordering::Acquire)
    }

    pub(super) fn kill_members(&self, census: &ProcessCensus) {
        self.kill();
        for member in self.members(census) {
            signal(member, Signal::KILL);
        }
    }

    pub(super) fn can_ignore_sigterm(&self) -> bool {
        self.confinement.is_some_and(|confinement| confinement.depth == 1)
    }

    /// Ends a server that cannot die of SIGTERM. The first process of a PID namespace ignores a SIGTERM that it does
    /// not handle; once it is alone it gets SIGKILL, as SIGTERM would end it anywhere else.
    pub(super) fn kill_server_ignoring_sigterm(&self, census: &ProcessCensus) {
        let Some(inside) = self.sandbox_processes.get().filter(|inside| inside.server.is_none()) else { return };
        let sandbox = self.group.pid();
        let alone = self.members(census).iter().all(|member| [inside.init.pid, sandbox].contains(&member.pid));
        if alone && has_default_sigterm(inside.init.pid) {
            inside.init.signal(Signal::KILL);
        }
    }

    /// Returns true if all members are gone or zombies. Needs a census unless the tree has a cgroup.
    pub(super) fn is_empty(&self, census: Option<&ProcessCensus>) -> bool {
        if self.group.end().is_none() {
            return false;
        }
        match (&self.cgroup, census) {
            (Some(cgroup), _) => !cgroup.is_populated(),
            (None, Some(census)) => {
                let inside = self.sandbox_processes.get();
                inside.is_none_or(|inside| !inside.init.is_alive()) && self.members(census).is_empty()
            }
            (None, None) => false,
        }
    }

    pub(super) fn needs_census(&self) -> bool {
        self.cgroup.is_none()
    }

    pub(super) fn reap(&self) {
        if self.is_reaped() {
            return;
        }
        let leader = ProcessStat::read(self.group.pid());
        let (cpu_ticks, start_time) = leader.map_or((0, 0), |stat| (stat.cpu_ticks, stat.start_time));
        let killed_for_memory = self.cgroup.as_ref().is_some_and(|cgroup| cgroup.oom_kills() > 0);
        let _ = self.final_stats.set(FinalStats { cpu_ticks, oom_killed: killed_for_memory, start_time });
        self.group.reap();
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove();
        }
        self.ledger.record_end(self.run);
    }

    /// Returns false if other code in this process has reaped the leader.
    pub(super) fn is_reaped(&self) -> bool {
        self.final_stats.get().is_some()
    }

    /// Returns the search to make after the leader is reaped if processes may have left the cgroup, which a server
    /// without a sandbox can do.
    pub(super) fn stray_search(&self) -> Option<StraySearch> {
        let since = self.final_stats.get().map_or(0, |last| last.start_time);
        (self.cgroup.is_some() && self.confinement.is_none()).then(|| StraySearch::new(self.mark.clone(), since))
    }

    /// Returns the members of the trees by run, as [`Self::members`] does, in one pass over all processes.
    pub(super) fn members_of_all(
        trees: &[Arc<Self>],
        satellite: &str,
        census: &ProcessCensus,
    ) -> HashMap<u64, Vec<ProcessStat>> {
        let (held, searched): (Vec<_>, Vec<_>) = trees.iter().partition(|tree| tree.cgroup.is_some());
        let mut members: HashMap<u64, Vec<ProcessStat>> =
            held.iter().map(|tree| (tree.run, tree.members(census))).collect();
        if searched.is_empty() {
            return members;
        }
        let leaders: HashMap<u32, u64> =
            searched.iter().filter_map(|tree| Some((tree.unreaped_leader()?, tree.run))).collect();
        let since =
            |tree: &Self| tree.unreaped_leader().and_then(|leader| census.get(leader)).map_or(0, |of| of.start_time);
        let since: HashMap<u64, u64> = searched.iter().map(|tree| (tree.run, since(tree))).collect();
        let oldest = since.values().min().copied().unwrap_or_default();
        let near = census.members_under(&leaders.keys().copied().collect());
        for stat in census.all().filter(|stat| stat.alive) {
            let run = match near.get(&stat.pid) {
                Some(leader) => leaders.get(leader).copied(),
                // No process of a run is older than its leader, which saves reading the marks of most processes.
                None if stat.start_time < oldest => None,
                None => census.marked_run(stat.pid, satellite).flatten(),
            };
            if let Some(run) = run
                && since.get(&run).is_some_and(|since| stat.start_time >= *since)
            {
                members.entry(run).or_default().push(*stat);
            }
        }
        members
    }

    /// Returns the number of the leader. That of a reaped one may belong to another process.
    fn unreaped_leader(&self) -> Option<u32> {
        (!self.group.is_reaped()).then(|| self.group.pid())
    }

    pub(super) fn members(&self, census: &ProcessCensus) -> Vec<ProcessStat> {
        if let Some(cgroup) = &self.cgroup {
            return cgroup.members().into_iter().filter_map(|pid| census.get(pid).copied()).collect();
        }
        let leader = self.unreaped_leader();
        let near = census.members_under(&leader.into_iter().collect::<HashSet<u32>>());
        // No process of the run is older than its leader, which saves reading the marks of most processes.
        let since = leader.and_then(|leader| census.get(leader)).map_or(0, |leader| leader.start_time);
        let is_marked = |stat: &ProcessStat| stat.start_time >= since && census.is_marked(stat.pid, &self.mark);
        let is_member = |stat: &&ProcessStat| stat.alive && (near.contains_key(&stat.pid) || is_marked(stat));
        census.all().filter(is_member).copied().collect()
    }

    /// Returns resident memory in pages and processor time in clock ticks. `members` are those of this tree.
    pub(super) fn usage(&self, members: &[ProcessStat]) -> (u64, u64) {
        let pages = members.iter().map(|member| member.rss_pages).sum();
        let ticks = self.cgroup.as_ref().and_then(Cgroup::cpu_micros).map_or_else(
            || members.iter().map(|member| member.cpu_ticks).sum(),
            |micros| micros * rustix::param::clock_ticks_per_second() / 1_000_000,
        );
        (pages, ticks)
    }

    /// Returns the limit that ended the server, if one did; known once it is reaped. `complained` means that its stderr
    /// contained an out-of-memory message.
    pub(super) fn exceeded_limit(&self, complained: bool) -> Option<ExceededLimit> {
        let last = self.final_stats.get()?;
        if last.oom_killed && self.end()?.signal == Some(Signal::KILL.as_raw()) {
            return Some(ExceededLimit { resource: LimitedResource::Memory, suspected: false });
        }
        let limits = self.confinement.map_or(ResourceLimits::default(), |confinement| confinement.limits);
        limits.exceeded_limit(self.end()?, last.cpu_ticks / rustix::param::clock_ticks_per_second(), complained)
    }

    pub(super) fn isolation(&self) -> &'static str {
        self.confinement.map_or("none", |confinement| confinement.sandbox)
    }

    fn sandbox_pids(&self) -> Vec<u32> {
        let Some(_) = self.confinement else { return Vec::new() };
        let init = self.sandbox_processes.get().filter(|inside| inside.server.is_some()).map(|inside| inside.init.pid);
        std::iter::once(self.group.pid()).chain(init).collect()
    }
}

impl StraySearch {
    pub(super) fn new(mark: RunMark, since: u64) -> Self {
        Self { mark, since, killed: HashSet::new() }
    }

    /// Kills all processes that it finds. Returns false if there are none.
    pub(super) fn kill(&mut self, census: &ProcessCensus) -> bool {
        let is_stray =
            |stat: &&ProcessStat| stat.alive && stat.start_time >= self.since && census.is_marked(stat.pid, &self.mark);
        let strays: Vec<ProcessStat> = census.all().filter(is_stray).copied().collect();
        for stray in &strays {
            signal(*stray, Signal::KILL);
            if self.killed.insert((stray.pid, stray.start_time)) {
                KILLED.fetch_add(1, Ordering::Relaxed);
            }
        }
        !strays.is_empty()
    }
}

fn signal(member: ProcessStat, signal: Signal) {
    if let Some(known) = PidfdProcess::open(member.pid, member.start_time) {
        known.signal(signal);
    }
}

/// Returns true if a process neither handles nor ignores SIGTERM.
fn has_default_sigterm(pid: u32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return false };
    let mask = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    let term = 1 << (Signal::TERM.as_raw() - 1);
    match (mask("SigCgt:"), mask("SigIgn:")) {
        (Some(caught), Some(ignored)) => (caught | ignored) & term == 0,
        _ => false,
    }
}
