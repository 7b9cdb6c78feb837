//! Receives events, stores each one once, and updates the instances from them.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName};
use jiff::Timestamp;
use mcp_satellite_actors::model::event::Event;
use ring::digest::{SHA256, digest};
use rusqlite::{OptionalExtension as _, Transaction, params};
use serde::Deserialize;

use super::BackendState;
use super::access::{AdminAccess, AuthenticatedSatellite, QueryParams, find_id};
use super::api::{StoredEvent, StoredEventList};
use super::clock::{timestamp_from_millis, timestamp_to_millis};
use super::decode::decode_event;
use super::refusal::ApiError;
use super::schema::MessageSchema;
use super::{body, instances};
use crate::wire::{EventBatch, EventBatchResult, EventEnvelope, RejectedEvent};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const KEY_MAX: usize = 128;
// Default number of events in an administrator's list.
const LIST: usize = 100;
const LIST_MAX: usize = 1000;

pub(super) async fn receive(
    State(app): State<Arc<BackendState>>,
    AuthenticatedSatellite { id }: AuthenticatedSatellite,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<EventBatchResult>, ApiError> {
    let key = idempotency_key(&headers)?;
    let bytes = body::read(body, app.settings.events_body_max).await?;
    let (batch, fingerprint) = body::run_blocking(move || {
        let fingerprint = digest(&SHA256, &bytes).as_ref().to_vec();
        let EventBatch { events } = body::parse_validated(&bytes, MessageSchema::Events)?;
        let judged = events.into_iter().map(validate_event);
        Ok((judged.collect::<Vec<_>>(), fingerprint))
    })
    .await?;
    let now = app.now();
    let (result, changed) = app
        .database
        .run(move |db| {
            if let Some(key) = &key
                && let Some(answer) = find_stored_result(db, &id, key, &fingerprint)?
            {
                tracing::debug!(satellite = id, batch = key, "a batch was received again");
                return Ok((answer, false));
            }
            let (result, changed) = store(db, &id, batch, now)?;
            if let Some(key) = key {
                // The same key with other events is a new batch after a split; its events are deduplicated by `seq`.
                db.prepare_cached(
                    "INSERT INTO batches (satellite, key, digest, answer, received_at) VALUES (?1, ?2, ?3, ?4, ?5)
                     ON CONFLICT (satellite, key) DO UPDATE SET
                         digest = excluded.digest, answer = excluded.answer, received_at = excluded.received_at",
                )?
                .execute(params![
                    id,
                    key,
                    fingerprint,
                    serde_json::to_string(&result)?,
                    timestamp_to_millis(now)
                ])?;
            }
            if result.failed > 0 {
                let first = result.failures.first().map(|failure| &*failure.error);
                tracing::warn!(satellite = id, failed = result.failed, first, "events were rejected");
            }
            Ok((result, changed))
        })
        .await?;
    if changed {
        app.notify_instances_changed();
    }
    Ok(Json(result))
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(key) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    let key = key.to_str().ok().filter(|key| (1..=KEY_MAX).contains(&key.len()));
    let invalid = || ApiError::bad_request(format!("Idempotency-Key must have 1 to {KEY_MAX} printable characters"));
    key.map(|key| Some(key.to_owned())).ok_or_else(invalid)
}

// Event with its decoded form, or the reason why it is invalid.
struct ValidatedEvent {
    envelope: EventEnvelope,
    decoded: Result<Event, String>,
}

fn validate_event(envelope: EventEnvelope) -> ValidatedEvent {
    let decoded = decode_event(&envelope.kind, &envelope.data).map_err(|invalid| invalid.to_string());
    ValidatedEvent { envelope, decoded }
}

fn find_stored_result(
    db: &Transaction<'_>,
    satellite: &str,
    key: &str,
    digest: &[u8],
) -> Result<Option<EventBatchResult>, ApiError> {
    let mut select =
        db.prepare_cached("SELECT answer FROM batches WHERE satellite = ?1 AND key = ?2 AND digest = ?3")?;
    let answer: Option<String> = select.query_row(params![satellite, key, digest], |row| row.get(0)).optional()?;
    Ok(answer.map(|answer| serde_json::from_str(&answer)).transpose()?)
}

// The boolean is true if the status of an instance changed.
fn store(
    db: &Transaction<'_>,
    satellite: &str,
    batch: Vec<ValidatedEvent>,
    now: Timestamp,
) -> Result<(EventBatchResult, bool), ApiError> {
    let (mut result, mut changed) = (EventBatchResult::default(), false);
    for (index, ValidatedEvent { envelope, decoded: meaning }) in batch.into_iter().enumerate() {
        match meaning {
            Err(error) => result.failures.push(RejectedEvent { index, kind: envelope.kind, error }),
            Ok(event) => {
                let (id, new) = insert(db, satellite, &envelope, now)?;
                result.event_ids.push(id.to_string());
                if new {
                    changed |= instances::apply_event(db, satellite, &event, envelope.seq, envelope.timestamp, now)?;
                }
            }
        }
    }
    result.processed = result.event_ids.len();
    result.failed = result.failures.len();
    result.success = result.failed == 0;
    Ok((result, changed))
}

// The boolean is true if the event is new.
fn insert(
    db: &Transaction<'_>,
    satellite: &str,
    event: &EventEnvelope,
    now: Timestamp,
) -> Result<(i64, bool), ApiError> {
    let timestamp = event.timestamp.to_string();
    let new = db
        .prepare_cached(
            "INSERT INTO events (satellite, seq, type, timestamp, data, received_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (satellite, seq, timestamp) DO NOTHING",
        )?
        .execute(params![
            satellite,
            event.seq,
            event.kind,
            timestamp,
            serde_json::to_string(&event.data)?,
            timestamp_to_millis(now)
        ])?;
    if new > 0 {
        return Ok((db.last_insert_rowid(), true));
    }
    let known = db
        .prepare_cached("SELECT id FROM events WHERE satellite = ?1 AND seq = ?2 AND timestamp = ?3")?
        .query_row(params![satellite, event.seq, timestamp], |row| row.get(0))?;
    Ok((known, false))
}

#[derive(Debug, Deserialize)]
pub(super) struct EventListQuery {
    // Events with a higher id of the backend.
    after: Option<i64>,
    satellite: Option<String>,
    // Events of the satellite with a higher `seq`.
    since: Option<i64>,
    #[serde(rename = "type")]
    kind: Option<String>,
    limit: Option<usize>,
}

pub(super) async fn list(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    QueryParams(listed): QueryParams<EventListQuery>,
) -> Result<Json<StoredEventList>, ApiError> {
    if listed.since.is_some() && (listed.satellite.is_none() || listed.after.is_some()) {
        return Err(ApiError::bad_request("since is a seq of one satellite: give satellite as well, and omit after"));
    }
    let order = if listed.since.is_some() { "seq, id" } else { "id" };
    let limit = i64::try_from(listed.limit.unwrap_or(LIST).clamp(1, LIST_MAX)).unwrap_or(i64::MAX);
    let events = app.database.run(move |db| {
        let satellite = listed.satellite.map(|name| find_id(db, &name)).transpose()?;
        let mut select = db.prepare_cached(&format!(
            "SELECT id, satellite, seq, type, timestamp, data, received_at FROM events
             WHERE (?1 IS NULL OR id > ?1) AND (?2 IS NULL OR satellite = ?2) AND (?3 IS NULL OR seq > ?3)
                 AND (?4 IS NULL OR type = ?4)
             ORDER BY {order} LIMIT ?5"
        ))?;
        let mut rows = select.query(params![listed.after, satellite, listed.since, listed.kind, limit])?;
        let mut events = Vec::new();
        while let Some(row) = rows.next()? {
            let timestamp: String = row.get(4)?;
            events.push(StoredEvent {
                id: row.get::<_, i64>(0)?.to_string(),
                satellite_id: row.get(1)?,
                seq: row.get(2)?,
                kind: row.get(3)?,
                timestamp: timestamp.parse().unwrap_or_default(),
                data: serde_json::from_str(&row.get::<_, String>(5)?)?,
                received_at: timestamp_from_millis(row.get(6)?),
            });
        }
        Ok(events)
    });
    Ok(Json(StoredEventList { events: events.await? }))
}
