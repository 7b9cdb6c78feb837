//! Erasure of data of instances that the configuration does not name any more: values of their users, authorizations
//! and sandbox homes. A removed instance is first listed, and its data is erased when the retention has passed.

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use tokio::sync::Notify;

use crate::active_configuration::ActiveConfiguration;
use crate::connect::stdio::StdioConnector;
use mcp_satellite_files::disk::{NotSaved, run_with_timeout};
use mcp_satellite_remote::oauth::Grants;
use mcp_satellite_store::erasures::ErasureList;
use mcp_satellite_store::state::StateDb;
use mcp_satellite_store::values::UserValues;

/// Longest pause between two checks of the list, because the wall clock may have been set meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_secs(60 * 60);
/// Pause before another attempt if an instance was still ending or its data could not be erased.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

pub(crate) struct DataEraser {
    database: StateDb,
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
        let (database, list) = (database.clone(), ErasureList::open(database));
        let (retention, changed) = (Mutex::default(), Notify::new());
        Self { database, list, values, grants, connector, runtime, applied, retention, changed }
    }

    /// Sets the configured instances and the retention for the data of all others. Waits for the disk.
    pub(crate) fn set_configured(&self, configured: &HashSet<InstanceId>, retention: Duration) {
        *self.retention.lock().unwrap_or_else(PoisonError::into_inner) = Some(retention);
        // Changed in memory first: the data of a configured instance is not erased even if the disk does not answer.
        self.list.remove_configured(|id| configured.contains(id));
        let mut present: BTreeSet<InstanceId> = self.values.instances();
        present.extend(self.grants.instances());
        present.extend(self.connector.homes());
        self.list.update(&present, |id| configured.contains(id), Timestamp::now());
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
        let checked = run_with_timeout(move || this.database.check_writable()).await;
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
