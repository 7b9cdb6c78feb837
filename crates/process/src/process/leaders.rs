//! The leaders that are not reaped yet. The satellite adopts orphans of its servers and reaps them as soon as they have
//! ended. A leader is a child of the satellite, too, and carries the same mark, but is reaped only after its tree is
//! empty; so the two must be distinguished.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub(super) struct Leaders(Mutex<LeaderTable>);

#[derive(Default)]
struct LeaderTable {
    // Runs whose leader may have been forked and is not known yet.
    starting: HashSet<u64>,
    // Process id and run of each leader.
    known: HashMap<u32, u64>,
}

impl Leaders {
    pub(super) fn begin_start(&self, run: u64) {
        self.table().starting.insert(run);
    }

    /// Ends a start. `leader` is `None` if it failed and its child, if there was one, is reaped.
    pub(super) fn finish_start(&self, run: u64, leader: Option<u32>) {
        let mut table = self.table();
        table.starting.remove(&run);
        table.known.extend(leader.map(|pid| (pid, run)));
    }

    /// Removes a leader that is reaped. Another run may have got its process id since.
    pub(super) fn remove(&self, run: u64, pid: u32) {
        let mut table = self.table();
        if table.known.get(&pid) == Some(&run) {
            table.known.remove(&pid);
        }
    }

    pub(super) fn is_known(&self, pid: u32) -> bool {
        self.table().known.contains_key(&pid)
    }

    /// Returns true if a process with the mark of `run` is its leader, or may be because the start is in progress.
    pub(super) fn may_lead(&self, pid: u32, run: u64) -> bool {
        let table = self.table();
        table.known.contains_key(&pid) || table.starting.contains(&run)
    }

    fn table(&self) -> MutexGuard<'_, LeaderTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_a_run_may_lead_it_until_the_leader_is_known() {
        let leaders = Leaders::default();
        leaders.begin_start(1);
        assert!(leaders.may_lead(70, 1) && !leaders.may_lead(70, 2) && !leaders.is_known(70));
        leaders.finish_start(1, Some(70));
        assert!(leaders.may_lead(70, 1) && leaders.is_known(70) && !leaders.may_lead(71, 1));
        leaders.begin_start(2);
        leaders.finish_start(2, None);
        assert!(!leaders.may_lead(71, 2));
    }

    #[test]
    fn a_reused_process_id_belongs_to_the_later_run() {
        let leaders = Leaders::default();
        leaders.finish_start(1, Some(70));
        leaders.finish_start(2, Some(70));
        leaders.remove(1, 70);
        assert!(leaders.is_known(70));
        leaders.remove(2, 70);
        assert!(!leaders.is_known(70));
    }
}
