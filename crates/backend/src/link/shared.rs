//! State that the tasks of the link share, and their host.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::rules::jitter::JitterRng;
use tokio::sync::watch;
use tokio::time::Instant;

use super::calls::{BackendCallError, BackendClient};
use super::command_log::FallbackCommandLog;
use super::contact::{BackendReachability, RequestPurpose};
use super::document::AppliedConfig;
use super::fleet::FleetCache;
use super::key::SatelliteKey;
use super::metrics::SystemMonitor;
use super::rules::InstanceScope;
use crate::wire::EventProgress;
use mcp_satellite_config::{BackendDocument, BackendPlan, ConfigErrors};
use mcp_satellite_store::state::StateDb;

pub type SpecsById = HashMap<InstanceId, InstanceSpec>;

/// Operations of the satellite that the link uses.
pub trait LinkHost: Send + Sync {
    fn runtime(&self) -> &RuntimeHandle;
    /// Applies the differences between the current and the new configuration and returns the resulting specs, which the
    /// snapshot then shows. A document with errors changes nothing. `since` is the time at which the document was
    /// requested; `expected` is the scope whose removal a command announced.
    fn apply_config<'a>(
        &'a self,
        document: BackendDocument,
        since: std::time::Instant,
        expected: Option<&'a InstanceScope>,
    ) -> BoxFuture<'a, Result<Arc<SpecsById>, ConfigErrors>>;
    /// Erases the data of all instances in `removed` that are no longer configured, without waiting for their
    /// retention.
    fn erase<'a>(&'a self, removed: &'a InstanceScope) -> BoxFuture<'a, ()>;
    fn event_progress(&self) -> EventProgress;
}

pub(super) struct LinkShared {
    pub(super) name: String,
    pub(super) plan: BackendPlan,
    pub(super) data_dir: PathBuf,
    pub(super) database: StateDb,
    pub(super) seed: u64,
    pub(super) suspended: Arc<dyn Fn() -> Duration + Send + Sync>,
    pub(super) started: std::time::Instant,
    pub(super) backend: BackendClient,
    pub(super) token: watch::Sender<Option<Secret>>,
    // `None` until the satellite is registered.
    pub(super) key: watch::Sender<Option<Arc<SatelliteKey>>>,
    // True if the backend has accepted the key.
    pub(super) key_accepted: AtomicBool,
    // The last rejected key, and the time of the rejection.
    pub(super) rejected_key: Mutex<Option<(Instant, Arc<SatelliteKey>)>>,
    pub(super) reachability: BackendReachability,
    // Locked while a configuration is fetched and applied.
    pub(super) applied_config: tokio::sync::Mutex<AppliedConfig>,
    pub(super) command_log: FallbackCommandLog,
    // Commands that wait or run.
    pub(super) active_commands: AtomicUsize,
    // Also counts commands whose results are being sent.
    pub(super) unfinished_commands: AtomicUsize,
    pub(super) metrics: Arc<SystemMonitor>,
    // Counts the suspends of the machine.
    pub(super) suspend_count: watch::Sender<u64>,
    // Counts changes after which a rejected document may become valid.
    pub(super) refetch_triggers: watch::Sender<u64>,
    pub(super) fleet_cache: FleetCache,
}

impl LinkShared {
    pub(super) async fn wait_for_key(&self) -> Arc<SatelliteKey> {
        let mut keys = self.key.subscribe();
        loop {
            if let Some(key) = &*keys.borrow_and_update() {
                return key.clone();
            }
            // The sender is part of `self`, so this does not fail.
            let _ = keys.changed().await;
        }
    }

    pub(super) async fn wait_for_new_key(&self, key: &Arc<SatelliteKey>) {
        let mut keys = self.key.subscribe();
        let is_another = |now: &Option<Arc<SatelliteKey>>| now.as_ref().is_some_and(|now| !Arc::ptr_eq(now, key));
        // The sender is part of `self`, so this ends only with such a key.
        let _ = keys.wait_for(is_another).await;
    }

    pub(super) fn record_response<T>(
        &self,
        matter: RequestPurpose,
        key: &Arc<SatelliteKey>,
        answer: &Result<T, BackendCallError>,
    ) {
        match answer {
            Ok(_) => {
                self.mark_key_accepted();
                self.reachability.record_success(matter);
            }
            Err(error) => self.record_error(matter, key, error),
        }
    }

    pub(super) fn record_error(&self, matter: RequestPurpose, key: &Arc<SatelliteKey>, error: &BackendCallError) {
        let answered = matches!(error, BackendCallError::Refused { .. } | BackendCallError::Malformed { .. });
        self.reachability.record_failure(matter, answered, &error.to_string());
        if error.is_unauthorized() {
            self.reject_key(key);
        }
    }

    // Ends early if the machine resumes from a suspend.
    pub(super) async fn pause_until(&self, until: Instant) {
        let mut wakes = self.suspend_count.subscribe();
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            _ = wakes.changed() => {}
        }
    }

    pub(super) fn active_commands(&self) -> usize {
        self.active_commands.load(Ordering::Relaxed)
    }

    pub(super) fn unfinished_commands(&self) -> usize {
        self.unfinished_commands.load(Ordering::Relaxed)
    }

    pub(super) fn jitter_rng(&self, matter: &str) -> JitterRng {
        JitterRng::new(self.seed, &format!("{}/{matter}", self.name))
    }
}

pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
