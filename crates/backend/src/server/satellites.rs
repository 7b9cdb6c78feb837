//! Administration of registered satellites.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use jiff::{SignedDuration, Timestamp};
use rusqlite::{OptionalExtension as _, Row, Transaction};

use super::BackendState;
use super::access::{AdminAccess, PathParams, find_id};
use super::api::{SatelliteList, SatelliteView};
use super::clock::{timestamp_from_millis, timestamp_to_millis};
use super::heartbeat::STOPPING;
use super::refusal::ApiError;
use super::{commands, config, instances};
use crate::wire::{EmptyResponse, Heartbeat, Registration};

pub(super) const COUNTS: &str =
    "SELECT body ->> 'status', count(*) FROM instances WHERE satellite = ?1 GROUP BY body ->> 'status'";

// Three heartbeats.
const SILENCE_MAX: SignedDuration = SignedDuration::from_secs(90);

pub(super) async fn list(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
) -> Result<Json<SatelliteList>, ApiError> {
    let (now, last_contacts) = (app.now(), app.last_contacts());
    let satellites = app.database.run(move |db| {
        let mut select = db.prepare_cached("SELECT * FROM satellites ORDER BY name")?;
        let rows = select.query_map([], SatelliteRow::from_row)?.collect::<Result<Vec<_>, _>>()?;
        rows.into_iter().map(|row| row.into_view(db, now, &last_contacts, false)).collect::<Result<_, _>>()
    });
    Ok(Json(SatelliteList { satellites: satellites.await? }))
}

pub(super) async fn show(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<SatelliteView>, ApiError> {
    let (now, last_contacts) = (app.now(), app.last_contacts());
    let satellite = app.database.run(move |db| {
        let id = find_id(db, &names.get("satellite"))?;
        let row = db.query_row("SELECT * FROM satellites WHERE id = ?1", [id], SatelliteRow::from_row)?;
        row.into_view(db, now, &last_contacts, true)
    });
    satellite.await.map(Json)
}

pub(super) async fn delete(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<EmptyResponse>, ApiError> {
    let now = app.now();
    let id = app.database.run(move |db| {
        let id = find_id(db, &names.get("satellite"))?;
        instances::remove_all(db, &id, now)?;
        db.execute("DELETE FROM configs WHERE scope = ?1", [&id])?;
        db.execute("DELETE FROM satellites WHERE id = ?1", [&id])?;
        Ok(id)
    });
    let id = id.await?;
    tracing::info!(satellite = id, "a satellite was deleted; its key is no longer valid");
    app.notify_instances_changed();
    Ok(Json(EmptyResponse { success: true }))
}

pub(super) fn is_connected(
    db: &Transaction<'_>,
    name: &str,
    now: Timestamp,
    last_contacts: &BTreeMap<String, Timestamp>,
) -> Result<bool, ApiError> {
    let select = "SELECT * FROM satellites WHERE name = ?1";
    let row = db.prepare_cached(select)?.query_row([name], SatelliteRow::from_row).optional()?;
    row.map_or(Ok(false), |row| Ok(row.into_view(db, now, last_contacts, false)?.connected))
}

fn has_recent_contact(
    heartbeat: Option<&Heartbeat>,
    last_heartbeat: Option<Timestamp>,
    last_contact: Option<Timestamp>,
    now: Timestamp,
) -> bool {
    // Compared in the stored precision, because the contact time in memory is more precise.
    let last_was_heartbeat = last_contact.map(timestamp_to_millis) == last_heartbeat.map(timestamp_to_millis);
    let stopping = heartbeat.is_some_and(|heartbeat| heartbeat.status == STOPPING) && last_was_heartbeat;
    !stopping && last_contact.is_some_and(|last| now.duration_since(last) < SILENCE_MAX)
}

struct SatelliteRow {
    id: String,
    registration: String,
    registered_at: i64,
    heartbeat: Option<String>,
    heartbeat_at: Option<i64>,
    events: usize,
}

impl SatelliteRow {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id: row.get("id")?,
            registration: row.get("registration")?,
            registered_at: row.get("registered_at")?,
            heartbeat: row.get("heartbeat")?,
            heartbeat_at: row.get("heartbeat_at")?,
            events: row.get("events")?,
        })
    }

    fn into_view(
        self,
        db: &Transaction<'_>,
        now: Timestamp,
        last_contacts: &BTreeMap<String, Timestamp>,
        whole: bool,
    ) -> Result<SatelliteView, ApiError> {
        let Registration { name, version, capabilities, system } = serde_json::from_str(&self.registration)?;
        let heartbeat = self.heartbeat.as_deref().map(serde_json::from_str::<Heartbeat>).transpose()?;
        let last_heartbeat = self.heartbeat_at.map(timestamp_from_millis);
        let last_contact = last_contacts.get(&self.id).copied().max(last_heartbeat);
        let last_seq = "SELECT max(seq) FROM events WHERE satellite = ?1";
        let last_seq = db.prepare_cached(last_seq)?.query_row([&self.id], |row| row.get(0))?;
        Ok(SatelliteView {
            config_hash: config::effective_config(db, &self.id)?.map(|config| config.hash),
            instances: count_by_status(db, &self.id)?,
            connected: has_recent_contact(heartbeat.as_ref(), last_heartbeat, last_contact, now),
            commands_waiting: commands::count_waiting(db, &self.id, now)?,
            satellite_id: self.id,
            name,
            version: heartbeat.as_ref().map_or(version, |heartbeat| heartbeat.version.clone()),
            capabilities,
            system,
            registered_at: timestamp_from_millis(self.registered_at),
            last_contact,
            last_heartbeat,
            applied_config_hash: heartbeat.as_ref().and_then(|heartbeat| heartbeat.config_hash.clone()),
            events: self.events,
            last_seq,
            heartbeat: heartbeat.filter(|_| whole),
        })
    }
}

fn count_by_status(db: &Transaction<'_>, satellite: &str) -> Result<BTreeMap<String, usize>, ApiError> {
    // The expression must equal that of the index.
    let mut select = db.prepare_cached(COUNTS)?;
    let counts = select.query_map([satellite], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(counts.collect::<Result<_, _>>()?)
}
