//! Restart counters, failures and stops of instances, kept in the journal over restarts of the satellite. Each memo
//! contains the name of the configuration that it belongs to.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::memo::StoredMemo;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::StateStore;

use crate::catalogue_cache::CatalogueCache;
use crate::journal::{Journal, Memos};

pub struct MemoStore {
    journal: Journal,
    /// Source of configuration names. Without it configurations cannot be told apart: then only stops are recalled and
    /// stored, and no memo is deleted.
    catalogues: Option<Arc<CatalogueCache>>,
    earlier: Arc<Mutex<EarlierMemos>>,
}

#[derive(Default)]
struct EarlierMemos {
    unclaimed: HashMap<InstanceId, String>,
    /// While the memos cannot be read: instances that were installed without them.
    installed_without: Option<HashSet<InstanceId>>,
}

impl EarlierMemos {
    /// Accepts memos that become readable late. Instances that started without their memo go on without it: only a stop
    /// is kept, for the next start. Returns the memos to store for these instances and their number.
    fn accept_late(&mut self, late: HashMap<InstanceId, String>) -> (Memos, u64) {
        let asked = self.installed_without.take().unwrap_or_default();
        let (missed, unclaimed): (HashMap<_, _>, _) = late.into_iter().partition(|(id, _)| asked.contains(id));
        self.unclaimed = unclaimed;
        let names: Vec<String> = missed.keys().map(ToString::to_string).collect();
        if !names.is_empty() {
            tracing::warn!(
                instances = names.join(", "),
                "the stored states of these instances are readable now, but not used: they have started anew"
            );
        }
        let stop = |text: String| {
            let stop = serde_json::from_str::<StoredMemo>(&text).ok()?.for_another_configuration();
            (stop != StoredMemo::default()).then(|| serde_json::to_string(&stop).ok()).flatten()
        };
        (missed.into_iter().map(|(id, text)| (id, stop(text))).collect(), names.len() as u64)
    }
}

impl MemoStore {
    pub fn new(journal: Journal, catalogues: Option<Arc<CatalogueCache>>) -> Self {
        let past = Arc::new(Mutex::new(EarlierMemos {
            unclaimed: journal.memos().clone(),
            installed_without: Some(HashSet::new()),
        }));
        let late = Arc::clone(&past);
        let comes_late =
            journal.on_late_memos(move |memos| late.lock().unwrap_or_else(PoisonError::into_inner).accept_late(memos));
        let this = Self { journal, catalogues, earlier: past };
        if !comes_late {
            this.earlier().installed_without = None;
        }
        this
    }

    fn earlier(&self) -> MutexGuard<'_, EarlierMemos> {
        self.earlier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the memos of these instances, which must be all configured ones, and deletes those of others. Each memo
    /// is returned once. With a changed configuration only a person's stop is returned.
    pub fn take_memos(&self, specs: &[InstanceSpec]) -> HashMap<InstanceId, StoredMemo> {
        let mut past = self.earlier();
        if let Some(asked) = &mut past.installed_without {
            asked.extend(specs.iter().map(|spec| spec.id.clone()));
        }
        let unclaimed = &mut past.unclaimed;
        if unclaimed.is_empty() || specs.is_empty() {
            return HashMap::new(); // No instance is configured yet: the backend may still send the configuration.
        }
        let mut recalled = HashMap::new();
        for spec in specs {
            let Some(text) = unclaimed.remove(&spec.id) else { continue };
            let stored: StoredMemo = match serde_json::from_str(&text) {
                Ok(stored) => stored,
                Err(error) => {
                    tracing::warn!(instance = %spec.name, %error, "cannot read the stored history; it starts again");
                    self.journal.forget(&spec.id);
                    continue;
                }
            };
            let config = self.configuration_name(spec);
            if config.is_some() && stored.config == config {
                recalled.insert(spec.id.clone(), stored);
                continue;
            }
            let stop = stored.for_another_configuration();
            let is_stopped = stop != StoredMemo::default();
            match (&config, is_stopped) {
                // The configuration may be unchanged: the next start may be able to tell.
                (None, _) => {}
                (Some(_), true) => self.write_memo(spec, stop.clone()),
                (Some(_), false) => self.journal.forget(&spec.id),
            }
            if is_stopped {
                recalled.insert(spec.id.clone(), stop);
            }
        }
        if self.catalogues.is_some() {
            for (id, _) in unclaimed.drain() {
                self.journal.forget(&id);
            }
        }
        recalled
    }

    fn configuration_name(&self, spec: &InstanceSpec) -> Option<String> {
        self.catalogues.as_ref().map(|catalogues| catalogues.name(spec))
    }

    fn write_memo(&self, spec: &InstanceSpec, memo: StoredMemo) {
        let memo = if let Some(config) = self.configuration_name(spec) {
            StoredMemo { config: Some(config), ..memo }
        } else {
            // Without a configuration name only the stop changes; the rest of the stored memo is kept.
            let known = self.journal.memos().get(&spec.id).and_then(|text| serde_json::from_str(text).ok());
            StoredMemo { stopped: memo.stopped, ..known.unwrap_or_default() }
        };
        match serde_json::to_string(&memo) {
            Ok(text) => self.journal.remember(&spec.id, text),
            Err(error) => {
                tracing::error!(instance = %spec.name, %error, "cannot store the state of an instance");
            }
        }
    }
}

impl StateStore for MemoStore {
    fn save(&self, spec: &Arc<InstanceSpec>, memo: StoredMemo) {
        self.write_memo(spec, memo);
    }

    fn delete(&self, id: &InstanceId) {
        self.journal.forget(id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::path::Path;

    use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
    use mcp_satellite_files::data_dir::{DataDir, private_tempdir};

    use super::*;
    use crate::catalogue_cache::tests::spec;
    use crate::journal::{JournalLimits, database};
    use crate::state::StateDb;

    fn instance(name: &str) -> Arc<InstanceSpec> {
        Arc::new(spec(|config| config.installation = name.into()))
    }

    fn failed() -> StoredMemo {
        StoredMemo { failed: Some("Process crashed".to_owned()), restarts: 3, ..StoredMemo::default() }
    }

    fn stopped() -> StoredMemo {
        StoredMemo { stopped: true, ..failed() }
    }

    fn open(data_dir: &Path) -> MemoStore {
        MemoStore::new(
            Journal::open(data_dir, JournalLimits::default()).unwrap(),
            Some(Arc::new(CatalogueCache::open(&StateDb::open(&DataDir::open(data_dir).unwrap()).unwrap()).unwrap())),
        )
    }

    async fn write_memos(data_dir: &Path, memos: &[(&Arc<InstanceSpec>, StoredMemo)]) {
        let memories = open(data_dir);
        for (spec, memo) in memos {
            memories.save(spec, memo.clone());
        }
        memories.journal.close().await;
    }

    fn take_all(memories: &MemoStore, of: &[&Arc<InstanceSpec>]) -> Vec<Option<StoredMemo>> {
        let specs: Vec<InstanceSpec> = of.iter().map(|spec| InstanceSpec::clone(spec)).collect();
        let mut recalled = memories.take_memos(&specs);
        let without = |memo| StoredMemo { config: None, ..memo };
        specs.iter().map(|spec| recalled.remove(&spec.id).map(without)).collect()
    }

    #[tokio::test]
    async fn memos_survive_the_deletion_of_cached_tools() {
        let (dir, broken) = (private_tempdir(), instance("broken"));
        write_memos(dir.path(), &[(&broken, failed())]).await;
        open(dir.path()).catalogues.unwrap().track_all(&[]);
        assert_eq!(take_all(&open(dir.path()), &[&broken]), [Some(failed())]);
    }

    #[tokio::test]
    async fn a_changed_policy_keeps_the_memo_of_a_failed_server() {
        let (dir, broken) = (private_tempdir(), instance("broken"));
        write_memos(dir.path(), &[(&broken, failed())]).await;
        let patient = Arc::new(spec(|config| {
            config.installation = "broken".into();
            Arc::make_mut(&mut config.policy).logs.line_max = 99;
        }));
        assert_eq!(take_all(&open(dir.path()), &[&patient]), [Some(failed())]);
        let changed = Arc::new(spec(|config| {
            config.installation = "broken".into();
            config.server_tier.args = vec!["another".into()];
        }));
        assert_eq!(
            take_all(&open(dir.path()), &[&changed]),
            [None],
            "a changed configuration starts without a history"
        );
    }

    #[tokio::test]
    async fn without_a_cache_only_stops_are_restored_and_all_memos_are_kept() {
        let dir = private_tempdir();
        let [broken, down, awake, gone] = ["broken", "down", "awake", "gone"].map(instance);
        write_memos(dir.path(), &[(&broken, failed()), (&down, stopped()), (&awake, failed()), (&gone, failed())])
            .await;
        let nameless = MemoStore::new(Journal::open(dir.path(), JournalLimits::default()).unwrap(), None);
        let stop = StoredMemo { stopped: true, ..StoredMemo::default() };
        assert_eq!(take_all(&nameless, &[&broken, &down, &awake]), [None, Some(stop), None]);
        nameless.save(&awake, StoredMemo { stopped: true, restarts: 9, ..StoredMemo::default() });
        nameless.journal.close().await;
        let all = take_all(&open(dir.path()), &[&broken, &down, &awake, &gone]);
        assert_eq!(all, [Some(failed()), Some(stopped()), Some(stopped()), Some(failed())]);
    }

    #[tokio::test]
    async fn memos_readable_later_are_restored_only_for_instances_not_started() {
        let dir = private_tempdir();
        let [broken, down, busy, later] = ["broken", "down", "busy", "later"].map(instance);
        write_memos(dir.path(), &[&broken, &busy, &later].map(|spec| (spec, failed()))).await;
        write_memos(dir.path(), &[(&down, stopped())]).await;
        let version = |version| {
            let database = rusqlite::Connection::open(database(dir.path())).unwrap();
            database.pragma_update(None, "user_version", version).unwrap();
        };
        version(99);
        let memories = open(dir.path());
        assert_eq!(take_all(&memories, &[&broken, &down, &busy]), [None, None, None]);
        let meanwhile = StoredMemo { restarts: 1, ..StoredMemo::default() };
        memories.save(&busy, meanwhile.clone());
        version(2);
        // Any query detects that the journal can be read again.
        memories.journal.delivery().await.unwrap();
        assert_eq!(
            memories.journal.append(Arc::new(SinkBatch { id: 1, events: Vec::new() })).await,
            SinkAnswer::Accepted
        );
        assert_eq!(memories.journal.status().memos_missed, 3);
        assert_eq!(take_all(&memories, &[&broken, &down, &busy, &later]), [None, None, None, Some(failed())]);
        memories.journal.close().await;
        let stop = StoredMemo { stopped: true, ..StoredMemo::default() };
        let next = take_all(&open(dir.path()), &[&broken, &down, &busy, &later]);
        assert_eq!(next, [None, Some(stop), Some(meanwhile), Some(failed())]);
    }
}
