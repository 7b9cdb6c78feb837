//! Client of a backend inside the satellite: it registers, polls for commands, fetches the configuration and sends
//! heartbeats, results and events. Supervision does not depend on it: running servers continue whatever the backend
//! does.
//!
//! ```text
//! registration ──► key ──► poll ──► desk ──► effect ──► result        every call ──► contact ──► `satellite status`
//!                   │                 └──► document ──► Fleet::take_on
//!                   ├────► document      periodically
//!                   ├────► heartbeat     metrics
//!                   └────► way           events, driven by the delivery
//! ```
//!
//! Decisions are in [`rules`]; the other modules carry them out. A 401 to any request except events discards the key
//! and starts a new registration. After a 401 to events, the next poll or heartbeat decides.

mod calls;
mod command_executor;
mod command_log;
mod contact;
mod document;
mod effect;
mod event_sink;
mod heartbeat;
mod key;
mod metrics;
mod poll;
mod poll_response;
mod registration;
pub mod rules;
mod status;

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::rules::jitter::JitterRng;
use mcp_satellite_actors::seam::EventSink;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

pub use command_log::{CommandLog, CommandProgress, InMemoryCommandLog};

use calls::{BackendCallError, BackendClient};
use command_log::FallbackCommandLog;
use contact::{BackendReachability, RequestPurpose};
use document::AppliedConfig;
use key::SatelliteKey;
use metrics::SystemMonitor;
use rules::InstanceScope;

pub use self::status::BackendStatus;
use super::wire::{EventProgress, PollingMode};
use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_config::{BackendDocument, BackendPlan, ConfigErrors};
use mcp_satellite_store::state::StateDb;

// After a panic in the link.
const BEGIN_AGAIN_AFTER: Duration = Duration::from_secs(5);

// Poll responses that wait for the command desk.
const INBOX: usize = 4;

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

pub struct LinkOptions {
    pub name: String,
    pub plan: BackendPlan,
    /// Absolute path, for messages and for measuring its file system.
    pub data_dir: PathBuf,
    pub database: StateDb,
    pub command_log: Arc<dyn CommandLog>,
    pub seed: u64,
    /// Returns the time that the machine has spent suspended, from an arbitrary origin:
    /// `suspended` of the process crate.
    pub suspended: Arc<dyn Fn() -> Duration + Send + Sync>,
}

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot use the URL of the backend: {0}")]
    Url(String),
    /// The HTTP client could not be created, for example because the machine has no CA certificates.
    #[error("cannot prepare the HTTP client for the backend")]
    Client(#[source] reqwest::Error),
}

/// Connection of a satellite to its backend. Cheap to clone.
#[derive(Clone)]
pub struct BackendLink(Arc<LinkShared>);

struct LinkShared {
    name: String,
    plan: BackendPlan,
    data_dir: PathBuf,
    database: StateDb,
    seed: u64,
    suspended: Arc<dyn Fn() -> Duration + Send + Sync>,
    started: std::time::Instant,
    backend: BackendClient,
    token: watch::Sender<Option<Secret>>,
    // `None` until the satellite is registered.
    key: watch::Sender<Option<Arc<SatelliteKey>>>,
    // True if the backend has accepted the key.
    key_accepted: AtomicBool,
    // The last rejected key, and the time of the rejection.
    rejected_key: Mutex<Option<(Instant, Arc<SatelliteKey>)>>,
    reachability: BackendReachability,
    // Locked while a configuration is fetched and applied.
    applied_config: tokio::sync::Mutex<AppliedConfig>,
    command_log: FallbackCommandLog,
    // Commands that wait or run.
    active_commands: AtomicUsize,
    // Also counts commands whose results are being sent.
    unfinished_commands: AtomicUsize,
    metrics: Arc<SystemMonitor>,
    // Counts the suspends of the machine.
    suspend_count: watch::Sender<u64>,
    // Counts changes after which a rejected document may become valid.
    refetch_triggers: watch::Sender<u64>,
}

impl BackendLink {
    /// Creates a link. Requests start with [`BackendLink::run`].
    pub fn new(options: LinkOptions) -> Result<Self, LinkError> {
        let LinkOptions { name, plan, data_dir, database, command_log: done, seed, suspended } = options;
        let backend = BackendClient::new(&plan.url, plan.request_timeout)?;
        let metrics = SystemMonitor::new(&data_dir);
        Ok(Self(Arc::new(LinkShared {
            name,
            token: watch::Sender::new(plan.token.clone()),
            plan,
            data_dir,
            database,
            seed,
            suspended,
            started: std::time::Instant::now(),
            backend,
            key: watch::Sender::new(None),
            key_accepted: AtomicBool::new(false),
            rejected_key: Mutex::new(None),
            reachability: BackendReachability::default(),
            applied_config: tokio::sync::Mutex::default(),
            command_log: FallbackCommandLog::new(done),
            active_commands: AtomicUsize::new(0),
            unfinished_commands: AtomicUsize::new(0),
            metrics,
            suspend_count: watch::Sender::new(0),
            refetch_triggers: watch::Sender::new(0),
        })))
    }

    /// Loads the last valid configuration of the backend at `url`, for a start without the backend. Blocks on the file
    /// system.
    pub fn load_stored_config(database: &StateDb, url: &str) -> Option<BackendDocument> {
        document::load(database, url)
    }

    pub async fn set_applied_config(&self, hash: String) {
        self.0.reachability.set_config_hash(Some(hash.clone()));
        *self.0.applied_config.lock().await = AppliedConfig::from_hash(hash);
    }

    pub async fn run(&self, fleet: &dyn LinkHost) {
        let link = &*self.0;
        loop {
            let (inbox, received) = mpsc::channel(INBOX);
            let all = async {
                tokio::join!(
                    registration::run(link),
                    poll::run(link, inbox),
                    command_executor::run(link, fleet, received),
                    document::run(link, fleet),
                    heartbeat::run(link, fleet),
                )
            };
            // A panic leaves no partial state: the futures are created anew, and shared data is consistent at all
            // times.
            if AssertUnwindSafe(all).catch_unwind().await.is_err() {
                tracing::error!("the link to the backend failed because of an internal error; restarting it");
            }
            tokio::time::sleep(BEGIN_AGAIN_AFTER).await;
        }
    }

    pub async fn send_last_heartbeat(&self, fleet: &dyn LinkHost) {
        heartbeat::send_last(&self.0, fleet).await;
    }

    /// Replaces the registration token for the next registration. Other settings of a plan cannot change.
    pub fn set_registration_token(&self, plan: &BackendPlan) {
        self.0.token.send_if_modified(|token| {
            let changed = *token != plan.token;
            token.clone_from(&plan.token);
            changed
        });
    }

    /// Continues all pauses at once: the machine was suspended, and timers do not count that time.
    pub fn resumed_after_suspend(&self) {
        self.0.suspend_count.send_modify(|wakes| *wakes += 1);
    }

    /// Fetches the configuration again, because the satellite's own configuration has changed and a rejected document
    /// may now be valid.
    pub fn refetch_config(&self) {
        self.0.refetch_triggers.send_modify(|reasons| *reasons += 1);
    }

    /// Returns a sink that sends events to the backend. It is unavailable until the satellite is registered.
    pub fn event_sink(&self) -> Arc<dyn EventSink> {
        event_sink::BackendEventSink::new(self.0.clone())
    }

    pub fn status(&self, backlog: u64) -> BackendStatus {
        let link = &self.0;
        let now = link.reachability.snapshot();
        let key = link.key.borrow().clone();
        let mode = match (now.mode, &key) {
            (_, None) => "registering",
            (Some(_), Some(_)) if now.backing_off => "backing_off",
            (None | Some(PollingMode::Normal), Some(_)) => "normal",
            (Some(PollingMode::Immediate), Some(_)) => "immediate",
            (Some(PollingMode::High), Some(_)) => "high",
            (Some(PollingMode::Idle), Some(_)) => "idle",
        };
        BackendStatus {
            connected: now.connected,
            url: link.plan.url.clone(),
            satellite_id: key.map(|key| key.satellite_id.clone()),
            last_contact: now.last_contact.map(rfc3339),
            last_error: now.last_error(),
            mode: mode.to_owned(),
            next_poll_ms: now.next_poll.map(|next| milliseconds(next.saturating_duration_since(Instant::now()))),
            commands: link.active_commands(),
            backlog,
            config_hash: now.config_hash,
        }
    }
}

impl fmt::Debug for BackendLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("url", &self.0.plan.url).finish_non_exhaustive()
    }
}

impl LinkShared {
    async fn wait_for_key(&self) -> Arc<SatelliteKey> {
        let mut keys = self.key.subscribe();
        loop {
            if let Some(key) = &*keys.borrow_and_update() {
                return key.clone();
            }
            // The sender is part of `self`, so this does not fail.
            let _ = keys.changed().await;
        }
    }

    async fn wait_for_new_key(&self, key: &Arc<SatelliteKey>) {
        let mut keys = self.key.subscribe();
        let is_another = |now: &Option<Arc<SatelliteKey>>| now.as_ref().is_some_and(|now| !Arc::ptr_eq(now, key));
        // The sender is part of `self`, so this ends only with such a key.
        let _ = keys.wait_for(is_another).await;
    }

    fn record_response<T>(
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

    fn record_error(&self, matter: RequestPurpose, key: &Arc<SatelliteKey>, error: &BackendCallError) {
        let answered = matches!(error, BackendCallError::Refused { .. } | BackendCallError::Malformed { .. });
        self.reachability.record_failure(matter, answered, &error.to_string());
        if error.is_unauthorized() {
            self.reject_key(key);
        }
    }

    // Ends early if the machine resumes from a suspend.
    async fn pause_until(&self, until: Instant) {
        let mut wakes = self.suspend_count.subscribe();
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            _ = wakes.changed() => {}
        }
    }

    fn active_commands(&self) -> usize {
        self.active_commands.load(Ordering::Relaxed)
    }

    fn unfinished_commands(&self) -> usize {
        self.unfinished_commands.load(Ordering::Relaxed)
    }

    fn jitter_rng(&self, matter: &str) -> JitterRng {
        JitterRng::new(self.seed, &format!("{}/{matter}", self.name))
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
