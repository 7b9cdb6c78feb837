//! The tree of a run: a leader, all that it started, and what holds them together.
//!
//! | held by | members are | a kill is complete because |
//! | --- | --- | --- |
//! | cgroup | what the kernel lists | the kernel kills all of it in one act |
//! | PID namespace | what is below its first process | the kernel kills all of it with that process |
//! | group | the leader's group and session, their descendants, and who carries the run's mark | it is looked for until nobody is found |
//!
//! No signal goes to a number: each member is held by a pidfd, and then asked once more whether it is one.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use mcp_satellite_actors::model::exit::{Limit, Resource};
use mcp_satellite_actors::seam::ProcessEnd;
use rustix::process::Signal;

use super::census::{Census, Known, Stat, children_of};
use super::cgroup::Cgroup;
use super::group::Group;
use super::launch::Confinement;
use super::ledger::Ledger;
use super::limits::Limits;
use super::mark::Mark;

/// Above this an exit code of a sandbox is the signal that ended its server.
const SIGNAL_BASE: i32 = 128;

pub(super) struct Tree {
    pub(super) group: Group,
    pub(super) run: u64,
    cgroup: Option<Cgroup>,
    /// The mark that its processes carry.
    mark: Mark,
    confinement: Option<Confinement>,
    inside: OnceLock<Inside>,
    /// To be killed, whoever of it turns up.
    condemned: AtomicBool,
    /// What can be known only until it is reaped.
    last: OnceLock<Last>,
    ledger: Arc<Ledger>,
}

struct Last {
    cpu_ticks: u64,
    killed_for_memory: bool,
}

/// What runs in a sandbox.
struct Inside {
    /// The first process of its PID namespace: with it all others die.
    init: Known,
    /// The server, where that is another one.
    server: Option<Known>,
}

impl Tree {
    pub(super) fn new(
        group: Group,
        run: u64,
        cgroup: Option<Cgroup>,
        mark: Mark,
        confinement: Option<Confinement>,
        ledger: Arc<Ledger>,
    ) -> Self {
        let (inside, last, condemned) = (OnceLock::new(), OnceLock::new(), AtomicBool::new(false));
        Self { group, run, cgroup, mark, confinement, inside, condemned, last, ledger }
    }

    /// The server's process id.
    pub(super) fn pid(&self) -> u32 {
        let inside = self.inside.get();
        inside.map_or(self.group.pid(), |inside| inside.server.as_ref().unwrap_or(&inside.init).pid)
    }

    pub(super) fn wrapper_pid(&self) -> Option<u32> {
        self.confinement.map(|_| self.group.pid())
    }

    pub(super) fn held_by(&self) -> &'static str {
        match (&self.cgroup, &self.confinement) {
            (Some(_), _) => "cgroup",
            (None, Some(_)) => "pid_namespace",
            (None, None) => "group",
        }
    }

    /// How it ended, if its leader has.
    pub(super) fn end(&self) -> Option<ProcessEnd> {
        let end = self.group.end()?;
        // A sandbox hands its server's end on as a code.
        match end.code {
            Some(code) if self.confinement.is_some() && (SIGNAL_BASE + 1..=SIGNAL_BASE + 64).contains(&code) => {
                Some(ProcessEnd { code: None, signal: Some(code - SIGNAL_BASE) })
            }
            _ => Some(end),
        }
    }

    /// Looks for the server in its sandbox. Whether it is there yet.
    pub(super) fn look_inside(&self) -> std::io::Result<bool> {
        let Some(confinement) = self.confinement else { return Ok(true) };
        if self.inside.get().is_some() {
            return Ok(true);
        }
        let mut path = vec![self.group.pid()];
        for _ in 0..confinement.depth {
            let parent = path[path.len() - 1];
            let children = match children_of(parent) {
                Ok(children) => children,
                // The sandbox has just ended: what it said is told by whoever looks.
                Err(_) if Stat::read(parent).is_none_or(|stat| !stat.alive) => return Ok(false),
                Err(error) => return Err(error),
            };
            let Some(child) = children.first().copied() else { return Ok(false) };
            path.push(child);
        }
        let hold = |at: usize| Known::hold_if(path[at], |stat| stat.parent == path[at - 1]);
        let Some(init) = hold(1) else { return Ok(false) };
        let server = if confinement.depth > 1 {
            let Some(server) = hold(confinement.depth) else { return Ok(false) };
            Some(server)
        } else {
            None
        };
        self.ledger.inside(self.run, init.pid, init.start_time);
        let _ = self.inside.set(Inside { init, server });
        Ok(true)
    }

    /// SIGTERM to every member, once: there are servers that take a second one for impatience. A sandbox's own
    /// processes are left out: they would take the server with them before its handler has run.
    pub(super) fn terminate(&self, census: &Census) {
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

    /// SIGKILL to every member that can be reached at once. Who has strayed is found by the scanner, which kills until
    /// nobody is left.
    pub(super) fn kill(&self) {
        self.condemned.store(true, Ordering::Release);
        if let Some(cgroup) = &self.cgroup {
            cgroup.kill();
        }
        if let Some(inside) = self.inside.get() {
            inside.init.signal(Signal::KILL);
        }
        self.group.kill();
    }

    pub(super) fn is_condemned(&self) -> bool {
        self.condemned.load(Ordering::Acquire)
    }

    /// Kills those of it that are still there.
    pub(super) fn kill_strays(&self, census: &Census) {
        self.kill();
        for member in self.members(census) {
            signal(member, Signal::KILL);
        }
    }

    /// See [`Tree::end_deaf_server`].
    pub(super) fn may_be_deaf(&self) -> bool {
        self.confinement.is_some_and(|confinement| confinement.depth == 1)
    }

    /// A server that is the first process of its PID namespace does not die of a SIGTERM that it does not handle, as it
    /// would anywhere else: once it is alone it is ended as the kernel would have.
    pub(super) fn end_deaf_server(&self, census: &Census) {
        let Some(inside) = self.inside.get().filter(|inside| inside.server.is_none()) else { return };
        let sandbox = self.group.pid();
        let alone = self.members(census).iter().all(|member| [inside.init.pid, sandbox].contains(&member.pid));
        if alone && is_deaf_to_term(inside.init.pid) {
            inside.init.signal(Signal::KILL);
        }
    }

    /// Whether a member is left that is more than a zombie. Needs a census unless a cgroup holds it.
    pub(super) fn is_empty(&self, census: Option<&Census>) -> bool {
        if self.group.end().is_none() {
            return false;
        }
        match (&self.cgroup, census) {
            (Some(cgroup), _) => !cgroup.is_populated(),
            (None, Some(census)) => {
                let inside = self.inside.get();
                inside.is_none_or(|inside| !inside.init.is_alive()) && self.members(census).is_empty()
            }
            (None, None) => false,
        }
    }

    pub(super) fn needs_census(&self) -> bool {
        self.cgroup.is_none()
    }

    /// Lets go of an ended leader, and with it of all that was kept for the run.
    pub(super) fn reap(&self) {
        if self.is_let_go() {
            return;
        }
        let cpu_ticks = Stat::read(self.group.pid()).map_or(0, |stat| stat.cpu_ticks);
        let killed_for_memory = self.cgroup.as_ref().is_some_and(|cgroup| cgroup.killed_for_memory() > 0);
        let _ = self.last.set(Last { cpu_ticks, killed_for_memory });
        self.group.reap();
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove();
        }
        self.ledger.ended(self.run);
    }

    /// Whether nothing of it is kept any more. A leader that somebody else has reaped is another matter.
    pub(super) fn is_let_go(&self) -> bool {
        self.last.get().is_some()
    }

    /// The mark of a stray that has left the cgroup: a server without a sandbox may.
    pub(super) fn mark_outside(&self) -> Option<&Mark> {
        (self.cgroup.is_some() && self.confinement.is_none()).then_some(&self.mark)
    }

    /// The live members.
    pub(super) fn members(&self, census: &Census) -> Vec<Stat> {
        if let Some(cgroup) = &self.cgroup {
            return cgroup.members().into_iter().filter_map(|pid| census.get(pid).copied()).collect();
        }
        // A number that is not held is nobody's.
        let leader = (!self.group.is_reaped()).then(|| self.group.pid());
        let near = census.under(&leader.into_iter().collect::<HashSet<u32>>());
        let is_marked = |pid| census.is_marked(pid, &self.mark);
        let is_member = |stat: &&Stat| stat.alive && (near.contains_key(&stat.pid) || is_marked(stat.pid));
        census.all().filter(is_member).copied().collect()
    }

    /// Resident memory in pages and processor time in clock ticks.
    pub(super) fn usage(&self, census: &Census) -> (u64, u64) {
        let members = self.members(census);
        let pages = members.iter().map(|member| member.rss_pages).sum();
        let ticks = self.cgroup.as_ref().and_then(Cgroup::cpu_micros).map_or_else(
            || members.iter().map(|member| member.cpu_ticks).sum(),
            |micros| micros * rustix::param::clock_ticks_per_second() / 1_000_000,
        );
        (pages, ticks)
    }

    /// Which limit ended it, if one did; known once it is reaped. `complained` says that it spoke of a want of memory.
    pub(super) fn blamed(&self, complained: bool) -> Option<Limit> {
        let last = self.last.get()?;
        if last.killed_for_memory && self.end()?.signal == Some(Signal::KILL.as_raw()) {
            return Some(Limit { of: Resource::Memory, suspected: false });
        }
        let limits = self.confinement.map_or(Limits::default(), |confinement| confinement.limits);
        limits.blamed(self.end()?, last.cpu_ticks / rustix::param::clock_ticks_per_second(), complained)
    }

    /// For people: the sandbox, or `none`.
    pub(super) fn isolation(&self) -> &'static str {
        self.confinement.map_or("none", |confinement| confinement.sandbox)
    }

    fn sandbox_pids(&self) -> Vec<u32> {
        let Some(_) = self.confinement else { return Vec::new() };
        let init = self.inside.get().filter(|inside| inside.server.is_some()).map(|inside| inside.init.pid);
        std::iter::once(self.group.pid()).chain(init).collect()
    }
}

/// SIGKILL to whoever carries this mark. Whether there was anybody.
pub(super) fn kill_marked(census: &Census, mark: &Mark) -> bool {
    let marked: Vec<Stat> =
        census.all().filter(|stat| stat.alive && census.is_marked(stat.pid, mark)).copied().collect();
    for member in &marked {
        signal(*member, Signal::KILL);
    }
    !marked.is_empty()
}

/// To a process as it was counted, if it is that still.
fn signal(member: Stat, signal: Signal) {
    if let Some(known) = Known::hold(member.pid, member.start_time) {
        known.signal(signal);
    }
}

/// Whether a process neither handles nor ignores SIGTERM.
fn is_deaf_to_term(pid: u32) -> bool {
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
