//! Administration of registered satellites.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use jiff::{SignedDuration, Timestamp};
use rusqlite::{OptionalExtension as _, Row, Transaction};

use super::BackendState;
use super::access::{AdminAccess, AuthenticatedSatellite, PathParams, find_id};
use super::api::{SatelliteList, SatelliteView};
use super::clock::{timestamp_from_millis, timestamp_to_millis};
use super::heartbeat::STOPPING;
use super::refusal::ApiError;
use super::{commands, config, instances};
use crate::wire::{EmptyResponse, FleetList, FleetSatellite, Heartbeat, Registration};

pub(super) const COUNTS: &str =
    "SELECT body ->> 'status', count(*) FROM instances WHERE satellite = ?1 GROUP BY body ->> 'status'";

// Three heartbeats.
const SILENCE_MAX: SignedDuration = SignedDuration::from_secs(90);

pub(super) async fn list(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
) -> Result<Json<SatelliteList>, ApiError> {
    read_all(&app).await.map(|satellites| Json(SatelliteList { satellites }))
}

pub(super) async fn read_all(app: &BackendState) -> Result<Vec<SatelliteView>, ApiError> {
    let (now, last_contacts) = (app.now(), app.last_contacts());
    let satellites = app.database.run(move |db| {
        let mut select = db.prepare_cached(&format!("{SELECT} ORDER BY name"))?;
        let rows = select.query_map([], SatelliteRow::from_row)?.collect::<Result<Vec<_>, _>>()?;
        rows.into_iter().map(|row| row.into_view(db, now, &last_contacts, false)).collect::<Result<_, _>>()
    });
    satellites.await
}

pub(super) async fn show(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<SatelliteView>, ApiError> {
    read(&app, names.get("satellite")).await.map(Json)
}

/// Returns the satellite with this id or name, with its last heartbeat.
pub(super) async fn read(app: &BackendState, name: String) -> Result<SatelliteView, ApiError> {
    let (now, last_contacts) = (app.now(), app.last_contacts());
    let satellite = app.database.run(move |db| {
        let id = find_id(db, &name)?;
        let row = db.query_row(&format!("{SELECT} WHERE id = ?1"), [id], SatelliteRow::from_row)?;
        row.into_view(db, now, &last_contacts, true)
    });
    satellite.await
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
    let row = db
        .prepare_cached(&format!("{SELECT} WHERE name = ?1"))?
        .query_row([name], SatelliteRow::from_row)
        .optional()?;
    row.map_or(Ok(false), |row| Ok(row.into_view(db, now, last_contacts, false)?.connected))
}

fn has_recent_contact(
    heartbeat_status: Option<&str>,
    last_heartbeat: Option<Timestamp>,
    last_contact: Option<Timestamp>,
    now: Timestamp,
) -> bool {
    // Compared in the stored precision, because the contact time in memory is more precise.
    let last_was_heartbeat = last_contact.map(timestamp_to_millis) == last_heartbeat.map(timestamp_to_millis);
    let stopping = heartbeat_status == Some(STOPPING) && last_was_heartbeat;
    !stopping && last_contact.is_some_and(|last| now.duration_since(last) < SILENCE_MAX)
}

// Lists need three members of the last heartbeat, which may have megabytes.
const SELECT: &str = "SELECT *, heartbeat ->> 'status' AS reported_status, heartbeat ->> 'version' AS reported_version,
    heartbeat ->> 'config_hash' AS reported_config FROM satellites";

struct SatelliteRow {
    id: String,
    registration: String,
    registered_at: i64,
    heartbeat: Option<String>,
    reported_status: Option<String>,
    reported_version: Option<String>,
    reported_config: Option<String>,
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
            reported_status: row.get("reported_status")?,
            reported_version: row.get("reported_version")?,
            reported_config: row.get("reported_config")?,
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
        let heartbeat = self.heartbeat.as_deref().filter(|_| whole);
        let heartbeat = heartbeat.map(serde_json::from_str::<Heartbeat>).transpose()?;
        let last_heartbeat = self.heartbeat_at.map(timestamp_from_millis);
        let last_contact = last_contacts.get(&self.id).copied().max(last_heartbeat);
        let last_seq = "SELECT max(seq) FROM events WHERE satellite = ?1";
        let last_seq = db.prepare_cached(last_seq)?.query_row([&self.id], |row| row.get(0))?;
        Ok(SatelliteView {
            config_hash: config::effective_config(db, &self.id)?.map(|config| config.hash),
            instances: count_by_status(db, &self.id)?,
            connected: has_recent_contact(self.reported_status.as_deref(), last_heartbeat, last_contact, now),
            commands_waiting: commands::count_waiting(db, &self.id, now)?,
            satellite_id: self.id,
            name,
            version: self.reported_version.unwrap_or(version),
            capabilities,
            system,
            registered_at: timestamp_from_millis(self.registered_at),
            last_contact,
            last_heartbeat,
            applied_config_hash: self.reported_config,
            events: self.events,
            last_seq,
            heartbeat,
        })
    }
}

/// Connection of a satellite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SatelliteConnection {
    pub satellite_id: String,
    pub name: String,
    pub connected: bool,
    pub last_contact: Option<Timestamp>,
}

/// Returns the connections of all satellites with their versions, in order of name. Large heartbeats are not decoded.
fn connections(
    db: &Transaction<'_>,
    now: Timestamp,
    last_contacts: &BTreeMap<String, Timestamp>,
) -> Result<Vec<(SatelliteConnection, String)>, ApiError> {
    let mut select = db.prepare_cached(
        "SELECT id, name, coalesce(heartbeat ->> 'version', registration ->> 'version'), heartbeat ->> 'status',
             heartbeat_at FROM satellites ORDER BY name",
    )?;
    let rows = select.query_map([], |row| {
        let (satellite_id, name): (String, String) = (row.get(0)?, row.get(1)?);
        let (status, at): (Option<String>, Option<i64>) = (row.get(3)?, row.get(4)?);
        let last_heartbeat = at.map(timestamp_from_millis);
        let last_contact = last_contacts.get(&satellite_id).copied().max(last_heartbeat);
        let connected = has_recent_contact(status.as_deref(), last_heartbeat, last_contact, now);
        Ok((SatelliteConnection { satellite_id, name, connected, last_contact }, row.get(2)?))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

pub(super) async fn read_connections(app: &BackendState) -> Result<Vec<SatelliteConnection>, ApiError> {
    let (now, last_contacts) = (app.now(), app.last_contacts());
    let found = app.database.run(move |db| connections(db, now, &last_contacts)).await?;
    Ok(found.into_iter().map(|(connection, _)| connection).collect())
}

/// Answers a satellite that asks for the others.
pub(super) async fn fleet(
    State(app): State<Arc<BackendState>>,
    _: AuthenticatedSatellite,
) -> Result<Json<FleetList>, ApiError> {
    let (server_time, last_contacts) = (app.now(), app.last_contacts());
    let satellites = app.database.run(move |db| {
        let found = connections(db, server_time, &last_contacts)?.into_iter();
        let entry = |(SatelliteConnection { satellite_id, name, connected, last_contact }, version)| {
            let instances = count_by_status(db, &satellite_id)?;
            Ok(FleetSatellite { name, connected, last_contact, version, instances })
        };
        found.map(entry).collect::<Result<_, ApiError>>()
    });
    Ok(Json(FleetList { server_time, satellites: satellites.await? }))
}

fn count_by_status(db: &Transaction<'_>, satellite: &str) -> Result<BTreeMap<String, usize>, ApiError> {
    // The expression must equal that of the index.
    let mut select = db.prepare_cached(COUNTS)?;
    let counts = select.query_map([satellite], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(counts.collect::<Result<_, _>>()?)
}
