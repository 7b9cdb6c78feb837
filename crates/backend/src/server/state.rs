//! Settings and shared state of the server.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use jiff::Timestamp;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::clock::BackendClock;
use super::database::{Database, DatabaseError};
use super::pages::PageService;
use mcp_satellite_config::TokenHash;

/// Default limit of a batch of events in bytes. On 413 a satellite sends half of the batch.
pub const EVENTS_BODY_MAX: usize = 4 * 1024 * 1024;

/// Default number of stored events: a few gigabytes at half a kilobyte per event.
pub const EVENTS_MAX: usize = 10_000_000;

#[derive(Debug, Clone)]
pub struct BackendSettings {
    pub data_dir: PathBuf,
    /// Seconds between the polls of satellites; without it 2, 10, 30 or 60.
    pub poll_interval: Option<f64>,
    pub events_body_max: usize,
    /// Number of stored events of all satellites. Beyond it the oldest are deleted, even before they are 30 days old.
    pub events_max: usize,
    pub clock: BackendClock,
}

impl BackendSettings {
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        let (poll_interval, clock) = (None, BackendClock::default());
        Self {
            data_dir: data_dir.into(),
            poll_interval,
            events_body_max: EVENTS_BODY_MAX,
            events_max: EVENTS_MAX,
            clock,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum BackendOpenError {
    #[error("a backend is already running on `{0}`; stop it first, or give this one another --data-dir")]
    InUse(PathBuf),
    #[error("cannot {what} `{path}`: {why}")]
    DataDir {
        /// Failed operation, a verb.
        what: &'static str,
        path: PathBuf,
        why: io::Error,
    },
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error("cannot create a registration token; the log contains the reason")]
    Token,
}

pub(super) struct BackendState {
    pub(super) settings: BackendSettings,
    pub(super) database: Database,
    pub(super) admin: TokenHash,
    // Last request of each satellite since the start.
    pub(super) last_contacts: Mutex<BTreeMap<String, Timestamp>>,
    // Notifies the streams of changed instances.
    pub(super) change_signal: watch::Sender<()>,
    // Notifies the streams of stored events.
    pub(super) event_signal: watch::Sender<()>,
    // Serves the console; empty without one.
    pub(super) pages: OnceLock<PageService>,
    pub(super) request_permits: Semaphore,
    pub(super) ending: CancellationToken,
    // Notifies the held polls of a new command.
    pub(super) queue_signal: watch::Sender<()>,
    // Permits for held polls: half of the requests at most, so that the others are answered.
    pub(super) hold_permits: Semaphore,
}

impl BackendState {
    pub(super) fn now(&self) -> Timestamp {
        self.settings.clock.now()
    }

    pub(super) fn record_contact(&self, satellite: &str) {
        let now = self.now();
        self.last_contacts.lock().unwrap_or_else(PoisonError::into_inner).insert(satellite.to_owned(), now);
    }

    pub(super) fn last_contacts(&self) -> BTreeMap<String, Timestamp> {
        self.last_contacts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn notify_command_queued(&self) {
        self.queue_signal.send_replace(());
    }

    pub(super) fn notify_instances_changed(&self) {
        self.change_signal.send_replace(());
    }
}
