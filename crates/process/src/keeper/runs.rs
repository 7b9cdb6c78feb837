//! The runs whose leaders the keeper waits for. Pure: times and process ids are arguments.
//!
//! ```text
//!  Hold ──► Starting ──Started──► Running ──end of the leader──► Ended ──Reap──► forgotten
//!               └───────────────────┴────── Discard ───────────────┘
//! ```
//!
//! Runs in `Running` and `Ended` outlive a satellite that crashes: the next one gets them. A start in progress does not.
//!
//! A leader that has ended stays a zombie until the satellite has found its tree empty, so that no signal to its process
//! group reaches other processes under the same number. The keeper is also the parent of orphans that it has adopted, and
//! reaps those at once. It must therefore distinguish the two, also while a start is in progress and the leader is not
//! known yet.

use std::collections::{BTreeMap, HashSet};

use mcp_satellite_actors::seam::ProcessEnd;

/// Leader of a run. Start times are in clock ticks since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaderPhase {
    /// The leader may have been forked. It is not older than `since`, in clock ticks since boot.
    Starting {
        since: u64,
    },
    Running {
        pid: u32,
        start_time: u64,
    },
    /// The leader has ended and is not reaped.
    Ended {
        pid: u32,
        start_time: u64,
        end: ProcessEnd,
    },
}

/// A run that outlives its satellite, for the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KeptRun {
    pub(super) run: u64,
    pub(super) pid: u32,
    pub(super) start_time: u64,
    /// Number of satellites that got the run after the one that started it.
    pub(super) attachment: u64,
    /// End of the leader, if it has ended.
    pub(super) end: Option<ProcessEnd>,
}

#[derive(Debug, Default)]
pub(super) struct RunTable {
    runs: BTreeMap<u64, LeaderPhase>,
    // Attachments of the runs that have any.
    attachments: BTreeMap<u64, u64>,
    leaders: HashSet<u32>,
    last_run: u64,
}

impl RunTable {
    /// Begins a run whose leader is forked at `now`, in clock ticks since boot, or later. Returns false if the number is in
    /// use.
    pub(super) fn hold(&mut self, run: u64, now: u64) -> bool {
        if self.runs.contains_key(&run) {
            return false;
        }
        self.runs.insert(run, LeaderPhase::Starting { since: now });
        self.last_run = self.last_run.max(run);
        true
    }

    /// Notes the leader of a run that was started. Returns false if no such start is in progress.
    pub(super) fn start(&mut self, run: u64, pid: u32, start_time: u64) -> bool {
        let Some(phase @ LeaderPhase::Starting { .. }) = self.runs.get_mut(&run) else { return false };
        *phase = LeaderPhase::Running { pid, start_time };
        self.leaders.insert(pid);
        true
    }

    /// Notes that the leader of a run has ended.
    pub(super) fn end(&mut self, run: u64, end: ProcessEnd) {
        if let Some(phase) = self.runs.get_mut(&run)
            && let LeaderPhase::Running { pid, start_time } = *phase
        {
            *phase = LeaderPhase::Ended { pid, start_time, end };
        }
    }

    /// Removes a run. Returns its leader if it has ended; a leader that runs is an ordinary child from now on.
    pub(super) fn remove(&mut self, run: u64) -> Option<u32> {
        self.attachments.remove(&run);
        match self.runs.remove(&run)? {
            LeaderPhase::Starting { .. } => None,
            LeaderPhase::Running { pid, .. } => {
                self.leaders.remove(&pid);
                None
            }
            LeaderPhase::Ended { pid, .. } => self.leaders.take(&pid),
        }
    }

    /// Removes the starts in progress and returns their runs.
    pub(super) fn remove_starts(&mut self) -> Vec<u64> {
        let is_starting =
            |(run, phase): (&u64, &LeaderPhase)| matches!(phase, LeaderPhase::Starting { .. }).then_some(*run);
        let starting: Vec<u64> = self.runs.iter().filter_map(is_starting).collect();
        self.runs.retain(|_, phase| !matches!(phase, LeaderPhase::Starting { .. }));
        starting
    }

    /// Attaches all runs to the next satellite.
    pub(super) fn attach(&mut self) {
        for run in self.runs.keys() {
            *self.attachments.entry(*run).or_default() += 1;
        }
    }

    /// Returns the runs whose leader has executed its program.
    pub(super) fn kept(&self) -> Vec<KeptRun> {
        let kept = |(run, phase): (&u64, &LeaderPhase)| {
            let attachment = self.attachments.get(run).copied().unwrap_or_default();
            match *phase {
                LeaderPhase::Starting { .. } => None,
                LeaderPhase::Running { pid, start_time } => {
                    Some(KeptRun { run: *run, pid, start_time, attachment, end: None })
                }
                LeaderPhase::Ended { pid, start_time, end } => {
                    Some(KeptRun { run: *run, pid, start_time, attachment, end: Some(end) })
                }
            }
        };
        self.runs.iter().filter_map(kept).collect()
    }

    /// Removes all runs, whose leaders have been reaped.
    pub(super) fn clear(&mut self) {
        self.runs.clear();
        self.attachments.clear();
        self.leaders.clear();
    }

    /// Returns run and process id of the leaders that have not ended.
    pub(super) fn running(&self) -> Vec<(u64, u32)> {
        let running = |(run, phase): (&u64, &LeaderPhase)| match *phase {
            LeaderPhase::Running { pid, .. } => Some((*run, pid)),
            LeaderPhase::Starting { .. } | LeaderPhase::Ended { .. } => None,
        };
        self.runs.iter().filter_map(running).collect()
    }

    pub(super) fn is_leader(&self, pid: u32) -> bool {
        self.leaders.contains(&pid)
    }

    /// Returns true if a process that began at `start_time`, in clock ticks since boot, may be the leader of a run whose
    /// start is in progress.
    pub(super) fn may_lead(&self, start_time: u64) -> bool {
        let is_possible = |phase: &LeaderPhase| match phase {
            LeaderPhase::Starting { since } => *since <= start_time,
            LeaderPhase::Running { .. } | LeaderPhase::Ended { .. } => false,
        };
        self.runs.values().any(is_possible)
    }

    /// Returns the first number that was never used.
    pub(super) fn next_run(&self) -> u64 {
        self.last_run + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_is_reaped_only_after_its_end_and_on_request() {
        let mut table = RunTable::default();
        assert!(table.hold(1, 100) && table.start(1, 70, 100));
        assert_eq!(table.running(), [(1, 70)]);
        table.end(1, ProcessEnd::default());
        assert!(table.is_leader(70) && table.running().is_empty(), "an ended leader is not an orphan");
        assert_eq!(table.remove(1), Some(70));
        assert_eq!(table.remove(1), None, "a repeated request has no effect");
        assert!(!table.is_leader(70));
    }

    #[test]
    fn a_child_may_lead_a_run_from_the_hold_until_the_leader_is_known() {
        let mut table = RunTable::default();
        assert!(!table.may_lead(100));
        table.hold(1, 100);
        assert!(table.may_lead(100) && table.may_lead(170));
        assert!(!table.may_lead(99), "a process older than the start is an orphan");
        table.hold(2, 150);
        table.start(1, 70, 100);
        assert!(table.may_lead(150) && !table.may_lead(149));
        table.remove(2);
        assert!(!table.may_lead(170), "the start has failed");
    }

    #[test]
    fn a_discarded_run_leaves_its_leader_to_the_search_for_orphans() {
        let mut table = RunTable::default();
        table.hold(1, 100);
        table.start(1, 70, 100);
        assert_eq!(table.remove(1), None, "it still runs");
        assert!(!table.is_leader(70) && table.running().is_empty());
    }

    #[test]
    fn messages_in_the_wrong_order_change_nothing() {
        let mut table = RunTable::default();
        assert!(!table.start(1, 70, 100), "it was not held");
        assert!(table.hold(1, 100) && !table.hold(1, 200), "the number is in use");
        table.end(1, ProcessEnd::default());
        assert!(table.start(1, 70, 100) && !table.start(1, 71, 100), "it has a leader");
        table.end(1, ProcessEnd::default());
        table.end(1, ProcessEnd::default());
        assert_eq!(table.remove(1), Some(70));
        table.end(1, ProcessEnd::default());
        assert!(!table.is_leader(70));
    }

    #[test]
    fn no_number_is_used_twice() {
        let mut table = RunTable::default();
        assert_eq!(table.next_run(), 1);
        table.hold(7, 100);
        table.hold(3, 100);
        table.remove(7);
        assert_eq!(table.next_run(), 8);
    }

    #[test]
    fn the_next_satellite_gets_the_runs_that_were_started() {
        let mut table = RunTable::default();
        for run in [1, 2, 3] {
            table.hold(run, 100);
        }
        table.start(1, 70, 110);
        table.start(2, 71, 120);
        let end = ProcessEnd { code: Some(3), signal: None };
        table.end(2, end);
        assert_eq!(table.remove_starts(), [3]);
        assert!(!table.may_lead(200), "no start is in progress");
        for attachment in [1, 2] {
            table.attach();
            let one = KeptRun { run: 1, pid: 70, start_time: 110, attachment, end: None };
            let two = KeptRun { run: 2, pid: 71, start_time: 120, attachment, end: Some(end) };
            assert_eq!(table.kept(), [one, two]);
        }
        assert_eq!(table.remove(2), Some(71), "the next satellite has it reaped");
        assert_eq!((table.kept().len(), table.next_run()), (1, 4));
    }
}
