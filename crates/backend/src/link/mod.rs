//! Client of a backend inside the satellite: it registers, polls for commands, fetches the configuration and sends
//! heartbeats, results and events. Supervision does not depend on it: running servers continue whatever the backend
//! does.
//!
//! ```text
//! registration ──► key ──► poll ──► command_executor ──► effect ──► result     every call ──► contact ──► `satellite status`
//!                   │                 └──► document ──► LinkHost::apply_config
//!                   ├────► document      periodically
//!                   ├────► heartbeat     metrics
//!                   ├────► fleet         on demand
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
mod fleet;
mod heartbeat;
mod key;
mod metrics;
mod poll;
mod poll_response;
mod registration;
pub mod rules;
mod shared;
mod status;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use futures::FutureExt;
use mcp_satellite_actors::seam::EventSink;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

pub use calls::LinkError;
pub use command_log::{CommandLog, CommandProgress, InMemoryCommandLog};
pub use fleet::FleetError;

use calls::BackendClient;
use command_log::FallbackCommandLog;
use contact::BackendReachability;
use document::AppliedConfig;
pub use metrics::SystemMonitor;
use shared::{LinkShared, milliseconds};

pub use self::shared::{LinkHost, SpecsById};
pub use self::status::BackendStatus;
use super::wire::{FleetList, PollingMode};
use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_config::{BackendDocument, BackendPlan};
use mcp_satellite_store::state::StateDb;

// After a panic in the link.
const PANIC_RESTART_DELAY: Duration = Duration::from_secs(5);

// Poll responses that wait for the command executor.
const INBOX: usize = 4;

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

/// Connection of a satellite to its backend. Cheap to clone.
#[derive(Clone)]
pub struct BackendLink(Arc<LinkShared>);

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
            fleet_cache: fleet::FleetCache::default(),
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
            tokio::time::sleep(PANIC_RESTART_DELAY).await;
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

    /// Returns the satellites of the backend, at most two seconds old.
    ///
    /// # Errors
    /// The backend does not answer within the request timeout, rejects the request, or does not know it.
    pub async fn fleet(&self) -> Result<Arc<FleetList>, FleetError> {
        let key = self.0.key.borrow().clone();
        self.0.fleet_cache.fetch(&self.0.backend, key).await
    }

    pub fn url(&self) -> &str {
        &self.0.plan.url
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
        f.debug_struct("BackendLink").field("url", &self.0.plan.url).finish_non_exhaustive()
    }
}
