//! Access to the data of a backend from the same process, for its console.

use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::api::{CommandRecordView, CommandRequest, SatelliteView};
use super::events::{self, EventRange, StoredEventFilter, StoredEventPage};
use super::instances::{self, InstanceChanges};
use super::satellites::{self, SatelliteConnection};
use super::{ApiError, BackendState, commands};

/// Handle of a backend. Cheap to clone.
#[derive(Clone)]
pub struct BackendHandle(pub(super) Arc<BackendState>);

impl BackendHandle {
    /// Returns the time of the backend's clock.
    pub fn now(&self) -> Timestamp {
        self.0.now()
    }

    /// Returns a token that is cancelled when the backend begins to end.
    pub fn ending(&self) -> CancellationToken {
        self.0.ending.clone()
    }

    /// Returns all satellites in order of name, without their heartbeats.
    ///
    /// # Errors
    /// The database cannot be read.
    pub async fn satellites(&self) -> Result<Vec<SatelliteView>, ApiError> {
        satellites::read_all(&self.0).await
    }

    /// Returns the satellite with this id or name, with its last heartbeat.
    ///
    /// # Errors
    /// There is none, or the database cannot be read.
    pub async fn satellite(&self, name: &str) -> Result<SatelliteView, ApiError> {
        satellites::read(&self.0, name.to_owned()).await
    }

    /// Returns the connections of all satellites, in order of name.
    ///
    /// # Errors
    /// The database cannot be read.
    pub async fn connections(&self) -> Result<Vec<SatelliteConnection>, ApiError> {
        satellites::read_connections(&self.0).await
    }

    /// Returns the last commands of a satellite, latest first.
    ///
    /// # Errors
    /// There is no such satellite, or the database cannot be read.
    pub async fn commands(&self, satellite: &str, limit: usize) -> Result<Vec<CommandRecordView>, ApiError> {
        commands::read_last(&self.0, satellite.to_owned(), limit).await
    }

    /// Queues a command for a satellite.
    ///
    /// # Errors
    /// There is no such satellite, too many commands wait for it, or the database cannot be written.
    pub async fn queue(&self, satellite: &str, command: CommandRequest) -> Result<CommandRecordView, ApiError> {
        commands::queue_command(&self.0, satellite.to_owned(), command).await.map(|(command, _)| command)
    }

    /// Returns stored events.
    ///
    /// # Errors
    /// There is no such satellite, or the database cannot be read.
    pub async fn events(
        &self,
        filter: StoredEventFilter,
        range: EventRange,
        limit: usize,
    ) -> Result<StoredEventPage, ApiError> {
        events::read_page(&self.0, filter, range, limit).await
    }

    /// Returns the id of the last stored event, or 0.
    ///
    /// # Errors
    /// The database cannot be read.
    pub async fn last_event(&self) -> Result<u64, ApiError> {
        events::read_last_id(&self.0).await
    }

    /// Returns a receiver that is notified of stored events.
    pub fn watch_events(&self) -> watch::Receiver<()> {
        self.0.event_signal.subscribe()
    }

    /// Returns the changes of instances after the one with the number `seen`, or the complete state.
    ///
    /// # Errors
    /// The database cannot be read.
    pub async fn instance_changes(&self, seen: Option<i64>) -> Result<InstanceChanges, ApiError> {
        instances::changes_after(&self.0, seen).await
    }

    /// Returns a receiver that is notified of changed instances.
    pub fn watch_instances(&self) -> watch::Receiver<()> {
        self.0.change_signal.subscribe()
    }
}
