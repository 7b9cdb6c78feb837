//! List of the instances that the configuration does not name any more, with the time of their removal. Their data is
//! erased when the retention has passed.
//!
//! A removal may be a mistake that is corrected a moment later: an instance that is configured again before that finds
//! its data unchanged. The list survives restarts of the satellite, so a restart neither shortens nor extends the time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::ids::InstanceId;

use crate::state::{StateDb, StateKey, StateTable};

pub struct ErasureList {
    database: StateDb,
    /// Never locked while waiting for the disk: threads of the async runtime lock it.
    removed: Mutex<BTreeMap<InstanceId, Timestamp>>,
}

impl ErasureList {
    /// Reads the list. An unreadable list counts as empty: the data is then listed anew and kept longer.
    pub fn open(database: &StateDb) -> Self {
        let removed = Self::read(database).unwrap_or_else(|why| {
            tracing::error!(why, "cannot read the list of data to erase; the retention starts again");
            BTreeMap::new()
        });
        Self { database: database.clone(), removed: Mutex::new(removed) }
    }

    fn read(database: &StateDb) -> Result<BTreeMap<InstanceId, Timestamp>, String> {
        let mut removed = BTreeMap::new();
        for (key, body) in database.load(StateTable::Erasures)? {
            let StateKey::Instance(id) = key else { continue };
            let at = String::from_utf8_lossy(&body).parse::<Timestamp>().map_err(|error| error.to_string())?;
            removed.insert(id, at);
        }
        Ok(removed)
    }

    /// Adds the instances in `present` that are not configured, as removed at `now` unless they are listed already, and
    /// drops all others. Waits for the disk.
    pub fn update(&self, present: &BTreeSet<InstanceId>, is_configured: impl Fn(&InstanceId) -> bool, now: Timestamp) {
        self.change(|removed| {
            removed.retain(|id, _| present.contains(id) && !is_configured(id));
            for id in present.iter().filter(|id| !is_configured(id)) {
                removed.entry(id.clone()).or_insert(now);
            }
        });
    }

    /// Drops the instances that are configured again. Waits for the disk.
    pub fn remove_configured(&self, is_configured: impl Fn(&InstanceId) -> bool) {
        self.change(|removed| removed.retain(|id, _| !is_configured(id)));
    }

    /// Removes erased instances from the list. Waits for the disk.
    pub fn remove_erased(&self, ids: &[InstanceId]) {
        self.change(|removed| removed.retain(|id, _| !ids.contains(id)));
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<InstanceId, Timestamp>)) {
        {
            let mut removed = self.removed();
            let before = removed.clone();
            change(&mut removed);
            if *removed == before {
                return;
            }
            for id in before.keys().chain(removed.keys()).filter(|id| before.get(*id) != removed.get(*id)) {
                let body = removed.get(id).map(|at| at.to_string().into_bytes());
                self.database.set(StateTable::Erasures, id.clone(), body);
            }
        }
        if let Err(error) = self.database.save() {
            tracing::warn!(%error, "cannot store the list of data to erase; a restart starts the retention again");
        }
    }

    pub fn due(&self, retention: Duration, now: Timestamp) -> Vec<InstanceId> {
        let is_due = |removed_at: &Timestamp| time_left(*removed_at, retention, now).is_zero();
        self.removed().iter().filter(|(_, at)| is_due(at)).map(|(id, _)| id.clone()).collect()
    }

    pub fn next_due(&self, retention: Duration, now: Timestamp) -> Option<Duration> {
        self.removed().values().map(|at| time_left(*at, retention, now)).min()
    }

    pub fn instances(&self) -> Vec<InstanceId> {
        self.removed().keys().cloned().collect()
    }

    fn removed(&self) -> MutexGuard<'_, BTreeMap<InstanceId, Timestamp>> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the rest of the retention. A removal time in the future, after the clock was set back, counts as now.
fn time_left(removed_at: Timestamp, retention: Duration, now: Timestamp) -> Duration {
    let passed = Duration::try_from(now.duration_since(removed_at)).unwrap_or_default();
    retention.saturating_sub(passed)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::path::Path;

    use mcp_satellite_files::data_dir::{DataDir, private_tempdir};

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn open(data_dir: &Path) -> ErasureList {
        ErasureList::open(&StateDb::open(&DataDir::open(data_dir).unwrap()).unwrap())
    }

    fn id(installation: &str) -> InstanceId {
        InstanceId::new("acme".into(), "alice".into(), installation.into())
    }

    fn at(hours: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + hours * 3600).unwrap()
    }

    #[test]
    fn a_removed_instance_is_due_after_the_retention_even_after_a_restart() {
        let home = private_tempdir();
        let present = BTreeSet::from([id("a"), id("b")]);
        let list = open(home.path());
        list.update(&present, |configured| *configured == id("a"), at(0));
        list.update(&present, |configured| *configured == id("a"), at(20));
        assert_eq!(list.next_due(DAY, at(20)), Some(Duration::from_secs(4 * 3600)));
        let again = open(home.path());
        assert_eq!((again.due(DAY, at(23)), again.due(DAY, at(24))), (vec![], vec![id("b")]));
        assert_eq!(again.due(Duration::ZERO, at(0)), [id("b")]);
        again.remove_erased(&[id("b")]);
        assert!(open(home.path()).instances().is_empty());
    }

    #[test]
    fn configuring_an_instance_again_resets_its_retention() {
        let home = private_tempdir();
        let present = BTreeSet::from([id("a")]);
        let list = open(home.path());
        list.update(&present, |_| false, at(0));
        list.update(&present, |configured| *configured == id("a"), at(1));
        assert_eq!(list.next_due(DAY, at(1)), None);
        list.update(&present, |_| false, at(2));
        assert_eq!(list.next_due(DAY, at(2)), Some(DAY));
    }

    #[test]
    fn an_unreadable_list_restarts_the_retention() {
        let home = private_tempdir();
        DataDir::open(home.path()).unwrap().replace("to-erase.json", b"{\"version\": 9}").unwrap();
        let list = open(home.path());
        list.update(&[id("a")].into(), |_| false, at(5));
        assert_eq!(list.next_due(DAY, at(5)), Some(DAY));
        drop(list);
        assert_eq!(open(home.path()).next_due(DAY, at(6)), DAY.checked_sub(Duration::from_secs(3600)));
    }
}
