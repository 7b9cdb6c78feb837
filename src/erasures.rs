//! Erasure of data of instances that the configuration does not name any more: values of their users, authorizations
//! and sandbox homes.
//!
//! A removal may be a mistake that is corrected a moment later. So the instance is first listed in the state database,
//! and its data is erased when the retention has passed. An instance that is configured again before that finds its
//! data unchanged. The list survives restarts of the satellite, so a restart neither shortens nor extends the time.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use tokio::sync::Notify;

use crate::active_configuration::ActiveConfiguration;
use crate::connect::stdio::StdioConnector;
use mcp_satellite_files::disk::{NotSaved, run_with_timeout};
use mcp_satellite_remote::oauth::Grants;
use mcp_satellite_store::state::{StateDb, StateKey, StateTable};
use mcp_satellite_store::values::UserValues;

/// Longest pause between two checks of the list, because the wall clock may have been set meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_secs(60 * 60);
/// Pause before another attempt if an instance was still ending or its data could not be erased.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

struct ErasureList {
    database: StateDb,
    /// Never locked while waiting for the disk: threads of the async runtime lock it.
    removed: Mutex<BTreeMap<InstanceId, Timestamp>>,
}

impl ErasureList {
    /// Reads the list. An unreadable list counts as empty: the data is then listed anew and kept longer.
    fn open(database: &StateDb) -> Self {
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

    /// Adds the instances in `present` that are not in `configured`, as removed at `now` unless they are listed
    /// already, and drops all others. Waits for the disk.
    fn update(&self, present: &BTreeSet<InstanceId>, configured: &HashSet<InstanceId>, now: Timestamp) {
        self.change(|removed| {
            removed.retain(|id, _| present.contains(id) && !configured.contains(id));
            for id in present.iter().filter(|id| !configured.contains(*id)) {
                removed.entry(id.clone()).or_insert(now);
            }
        });
    }

    /// Removes erased instances from the list. Waits for the disk.
    fn remove_erased(&self, ids: &[InstanceId]) {
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

    fn due(&self, retention: Duration, now: Timestamp) -> Vec<InstanceId> {
        let is_due = |removed_at: &Timestamp| time_left(*removed_at, retention, now).is_zero();
        self.removed().iter().filter(|(_, at)| is_due(at)).map(|(id, _)| id.clone()).collect()
    }

    fn next_due(&self, retention: Duration, now: Timestamp) -> Option<Duration> {
        self.removed().values().map(|at| time_left(*at, retention, now)).min()
    }

    fn instances(&self) -> Vec<InstanceId> {
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

pub(crate) struct DataEraser {
    list: ErasureList,
    values: Arc<UserValues>,
    grants: Grants,
    connector: StdioConnector,
    runtime: RuntimeHandle,
    /// Locked during an erasure, so that no configuration brings an instance back meanwhile.
    applied: Arc<tokio::sync::Mutex<ActiveConfiguration>>,
    /// `None` until a complete configuration was applied; nothing is erased before.
    retention: Mutex<Option<Duration>>,
    changed: Notify,
}

impl DataEraser {
    /// Reads the list, so it waits for the disk.
    pub(crate) fn open(
        database: &StateDb,
        values: Arc<UserValues>,
        grants: Grants,
        connector: StdioConnector,
        runtime: RuntimeHandle,
        applied: Arc<tokio::sync::Mutex<ActiveConfiguration>>,
    ) -> Self {
        let list = ErasureList::open(database);
        let (retention, changed) = (Mutex::default(), Notify::new());
        Self { list, values, grants, connector, runtime, applied, retention, changed }
    }

    /// Sets the configured instances and the retention for the data of all others. Waits for the disk.
    pub(crate) fn set_configured(&self, configured: &HashSet<InstanceId>, retention: Duration) {
        *self.retention.lock().unwrap_or_else(PoisonError::into_inner) = Some(retention);
        // Changed in memory first: the data of a configured instance is not erased even if the disk does not answer.
        self.list.change(|removed| removed.retain(|id, _| !configured.contains(id)));
        let mut present: BTreeSet<InstanceId> = self.values.instances();
        present.extend(self.grants.instances());
        present.extend(self.connector.homes());
        self.list.update(&present, configured, Timestamp::now());
        self.changed.notify_one();
    }

    pub(crate) async fn watch(self: Arc<Self>) {
        let this = self.clone();
        // An error means that it panicked: the next start clears what is left.
        let _ = tokio::task::spawn_blocking(move || this.connector.erase_set_aside_homes()).await;
        loop {
            let next = self.retention().and_then(|retention| self.list.next_due(retention, Timestamp::now()));
            let wait = next.unwrap_or(LOOK_INTERVAL);
            // A wait of zero means that an earlier attempt could not erase the data.
            let wait = if wait.is_zero() { RETRY_INTERVAL } else { wait.min(LOOK_INTERVAL) };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.changed.notified() => {}
            }
            self.erase_due().await;
        }
    }

    pub(crate) async fn erase_due(self: &Arc<Self>) {
        let Some(retention) = self.retention() else { return };
        if !self.list.due(retention, Timestamp::now()).is_empty() {
            let this = self.clone();
            self.erase(move || this.list.due(retention, Timestamp::now())).await;
        }
    }

    /// Erases the data of all listed instances for which `admits` returns true, regardless of their retention. Returns
    /// the erased instances.
    pub(crate) async fn erase_now(self: &Arc<Self>, admits: impl Fn(&InstanceId) -> bool) -> Vec<InstanceId> {
        if self.retention().is_none() {
            return Vec::new(); // No complete configuration was applied yet.
        }
        let chosen: Vec<InstanceId> = self.list.instances().into_iter().filter(|id| admits(id)).collect();
        let this = self.clone();
        // An instance that was configured again meanwhile is no longer listed.
        self.erase(move || {
            let listed = this.list.instances();
            chosen.into_iter().filter(|id| listed.contains(id)).collect()
        })
        .await
    }

    async fn erase(self: &Arc<Self>, choose: impl FnOnce() -> Vec<InstanceId> + Send + 'static) -> Vec<InstanceId> {
        // Check the disk first: otherwise `applied` would stay locked until the disk answers.
        let this = self.clone();
        let checked = run_with_timeout(move || this.list.database.check_writable()).await;
        if matches!(checked, None | Some(Err(NotSaved::DiskHangs))) {
            tracing::warn!("the disk does not answer; data of removed instances is not erased now");
            return Vec::new();
        }
        let applied = self.applied.lock().await;
        let this = self.clone();
        let erasing = tokio::task::spawn_blocking(move || {
            // An instance that is still ending uses its home.
            let is_gone = |id: &InstanceId| this.runtime.status(id).is_none();
            let mut ids: Vec<InstanceId> = choose().into_iter().filter(is_gone).collect();
            if !this.values.erase(&ids) {
                ids.clear();
            }
            ids.retain(|id| {
                let aside = this.connector.set_aside_home(id);
                if let Err(error) = &aside {
                    tracing::warn!(instance = %id, %error, "cannot remove the home of a removed instance");
                }
                aside.is_ok()
            });
            this.grants.erase(&ids);
            this.list.remove_erased(&ids);
            ids
        });
        // An error means that it panicked: it is tried again.
        let ids = erasing.await.unwrap_or_default();
        drop(applied);
        if !ids.is_empty() {
            let names: Vec<String> = ids.iter().map(ToString::to_string).collect();
            tracing::info!(instances = names.join(", "), "erased the data of removed instances");
            let this = self.clone();
            let _ = tokio::task::spawn_blocking(move || this.connector.erase_set_aside_homes()).await;
        }
        ids
    }

    fn retention(&self) -> Option<Duration> {
        *self.retention.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::data_dir::DataDir;

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
        let home = crate::data_dir::private_tempdir();
        let present = BTreeSet::from([id("a"), id("b")]);
        let list = open(home.path());
        list.update(&present, &[id("a")].into(), at(0));
        list.update(&present, &[id("a")].into(), at(20));
        assert_eq!(list.next_due(DAY, at(20)), Some(Duration::from_secs(4 * 3600)));
        let again = open(home.path());
        assert_eq!((again.due(DAY, at(23)), again.due(DAY, at(24))), (vec![], vec![id("b")]));
        assert_eq!(again.due(Duration::ZERO, at(0)), [id("b")]);
        again.remove_erased(&[id("b")]);
        assert!(open(home.path()).instances().is_empty());
    }

    #[test]
    fn configuring_an_instance_again_resets_its_retention() {
        let home = crate::data_dir::private_tempdir();
        let present = BTreeSet::from([id("a")]);
        let list = open(home.path());
        list.update(&present, &HashSet::new(), at(0));
        list.update(&present, &[id("a")].into(), at(1));
        assert_eq!(list.next_due(DAY, at(1)), None);
        list.update(&present, &HashSet::new(), at(2));
        assert_eq!(list.next_due(DAY, at(2)), Some(DAY));
    }

    #[test]
    fn an_unreadable_list_restarts_the_retention() {
        let home = crate::data_dir::private_tempdir();
        DataDir::open(home.path()).unwrap().replace("to-erase.json", b"{\"version\": 9}").unwrap();
        let list = open(home.path());
        list.update(&[id("a")].into(), &HashSet::new(), at(5));
        assert_eq!(list.next_due(DAY, at(5)), Some(DAY));
        drop(list);
        assert_eq!(open(home.path()).next_due(DAY, at(6)), DAY.checked_sub(Duration::from_secs(3600)));
    }
}
