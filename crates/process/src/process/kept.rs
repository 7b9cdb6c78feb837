//! Processes that outlive a satellite: those of the runs that the next satellite gets.

use std::collections::HashSet;
use std::io;

use rustix::process::Signal;

use super::cgroup::LeftoverCgroups;
use super::proc_info::{PidfdProcess, ProcessCensus, ProcessStat};

/// Runs that are kept, for their keeper, which is this process.
pub(crate) struct KeptProcesses {
    /// Random id in the marks of all servers.
    pub(crate) id: String,
    pub(crate) runs: HashSet<u64>,
    /// Process ids of the runs' leaders, which are not reaped.
    pub(crate) leaders: HashSet<u32>,
    /// Other processes that are not signalled.
    pub(crate) spared: HashSet<u32>,
}

impl KeptProcesses {
    /// Sends SIGKILL to every process below the keeper, and to every process with a mark of its servers, that belongs to no
    /// kept run. Returns the process ids; none if all have ended.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub(crate) fn kill_others(&self, cgroups: &LeftoverCgroups) -> io::Result<Vec<u32>> {
        let census = ProcessCensus::take()?;
        let keeper = std::process::id();
        let (below, near) = (census.descendants_of(keeper), census.members_under(&self.leaders));
        let in_cgroups = cgroups.members_of(&self.runs);
        let is_other = |stat: &&ProcessStat| {
            let is_spared = !stat.alive
                || stat.pid == keeper
                || self.spared.contains(&stat.pid)
                || near.contains_key(&stat.pid)
                || in_cgroups.contains(&stat.pid);
            let run = || census.marked_run(stat.pid, &self.id);
            let is_kept = |run: Option<u64>| run.is_some_and(|run| self.runs.contains(&run));
            !is_spared && run().map_or_else(|| below.contains(&stat.pid), |run| !is_kept(run))
        };
        let others: Vec<ProcessStat> = census.all().filter(is_other).copied().collect();
        for other in &others {
            if let Some(known) = PidfdProcess::open(other.pid, other.start_time) {
                known.signal(Signal::KILL);
            }
        }
        Ok(others.into_iter().map(|other| other.pid).collect())
    }
}
