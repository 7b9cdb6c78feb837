//! Receives events, stores each one once, and updates the instances from them.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName};
use jiff::Timestamp;
use mcp_satellite_actors::model::event::Event;
use ring::digest::{SHA256, digest};
use rusqlite::types::Value;
use rusqlite::{OptionalExtension as _, Row, Transaction, params, params_from_iter};
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
    if result.processed > 0 {
        app.event_signal.send_replace(());
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
            events.push(stored_event(row)?);
        }
        Ok(events)
    });
    Ok(Json(StoredEventList { events: events.await? }))
}

fn stored_event(row: &Row<'_>) -> Result<StoredEvent, ApiError> {
    let timestamp: String = row.get(4)?;
    Ok(StoredEvent {
        id: row.get::<_, i64>(0)?.to_string(),
        satellite_id: row.get(1)?,
        seq: row.get(2)?,
        kind: row.get(3)?,
        timestamp: timestamp.parse().unwrap_or_default(),
        data: serde_json::from_str(&row.get::<_, String>(5)?)?,
        received_at: timestamp_from_millis(row.get(6)?),
    })
}

/// Selection of stored events. All given conditions must hold.
#[derive(Debug, Clone, Default)]
pub struct StoredEventFilter {
    /// Only events of the satellite with this id or name.
    pub satellite: Option<String>,
    /// Only these types; all if empty.
    pub types: Vec<String>,
    /// Only events about the instance with this name.
    pub instance: Option<String>,
}

/// Part of the stored events, by the ids of the backend.
#[derive(Debug, Clone, Copy)]
pub enum EventRange {
    /// Events below an id, newest first.
    Before(i64),
    /// Events above an id, oldest first.
    After(i64),
}

/// Stored events that a filter selects.
#[derive(Debug, Clone)]
pub struct StoredEventPage {
    /// Each event with the name of its satellite.
    pub events: Vec<(StoredEvent, String)>,
    /// True if the range contains more events.
    pub has_more: bool,
    /// Id up to which all events of the range were read, or the highest stored id of a range below an id.
    pub through: i64,
}

/// Text and parameters of a query, which uses the index of its most selective condition.
fn select_page(filter: &StoredEventFilter, range: EventRange) -> (String, Vec<Value>) {
    let (mut terms, mut values) = (Vec::new(), Vec::new());
    let mut add = |term: String, value: &str| {
        terms.push(term);
        values.push(Value::from(value.to_owned()));
    };
    if let Some(satellite) = &filter.satellite {
        add("e.satellite = ?".to_owned(), satellite);
    }
    if let Some(instance) = &filter.instance {
        // The expression must equal that of the index.
        add("e.data ->> 'process_id' = ?".to_owned(), instance);
    }
    if let [first, others @ ..] = &filter.types[..] {
        terms.push(format!("e.type IN (?{})", ", ?".repeat(others.len())));
        values.push(Value::from(first.clone()));
        values.extend(others.iter().cloned().map(Value::from));
    }
    let (term, id, order) = match range {
        EventRange::Before(id) => ("e.id < ?", id, "DESC"),
        EventRange::After(id) => ("e.id > ?", id, "ASC"),
    };
    terms.push(term.to_owned());
    values.push(Value::from(id));
    let select = format!(
        "SELECT e.id, e.satellite, e.seq, e.type, e.timestamp, e.data, e.received_at, s.name FROM events e
         JOIN satellites s ON s.id = e.satellite WHERE {} ORDER BY e.id {order} LIMIT ?",
        terms.join(" AND ")
    );
    (select, values)
}

fn last_id(db: &Transaction<'_>) -> Result<i64, ApiError> {
    Ok(db.prepare_cached("SELECT coalesce(max(id), 0) FROM events")?.query_row([], |row| row.get(0))?)
}

pub(super) async fn read_last_id(app: &BackendState) -> Result<u64, ApiError> {
    let last = app.database.run(last_id).await?;
    Ok(u64::try_from(last).unwrap_or(0))
}

pub(super) async fn read_page(
    app: &BackendState,
    mut filter: StoredEventFilter,
    range: EventRange,
    limit: usize,
) -> Result<StoredEventPage, ApiError> {
    let limit = limit.clamp(1, LIST_MAX);
    app.database
        .run(move |db| {
            filter.satellite = filter.satellite.map(|name| find_id(db, &name)).transpose()?;
            let (select, mut values) = select_page(&filter, range);
            values.push(Value::from(i64::try_from(limit + 1).unwrap_or(i64::MAX)));
            let mut select = db.prepare_cached(&select)?;
            let mut rows = select.query(params_from_iter(values))?;
            let mut events = Vec::new();
            while let Some(row) = rows.next()? {
                events.push((stored_event(row)?, row.get::<_, String>(7)?));
            }
            let has_more = events.len() > limit;
            events.truncate(limit);
            let last = last_id(db)?;
            let through = match range {
                EventRange::Before(_) => last,
                EventRange::After(id) if !has_more => last.max(id),
                EventRange::After(id) => events.last().and_then(|(event, _)| event.id.parse().ok()).unwrap_or(id),
            };
            Ok(StoredEventPage { events, has_more, through })
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::super::database::Database;
    use super::*;

    #[tokio::test]
    async fn every_page_of_events_uses_an_index_and_is_not_sorted() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(&dir.path().join("backend.db")).unwrap();
        for (satellite, instance, types, index) in [
            (None, None, vec![], "PRIMARY KEY"),
            (Some("s"), None, vec![], "events_satellite"),
            (None, None, vec!["a.b"], "events_type"),
            (Some("s"), Some("i"), vec![], "events_instance"),
        ] {
            for range in [EventRange::Before(i64::MAX), EventRange::After(0)] {
                let filter = StoredEventFilter {
                    satellite: satellite.map(str::to_owned),
                    instance: instance.map(str::to_owned),
                    types: types.iter().map(|kind: &&str| (*kind).to_owned()).collect(),
                };
                let plan = database.run(move |db| {
                    let (select, mut values) = select_page(&filter, range);
                    values.push(Value::from(10));
                    let mut explain = db.prepare(&format!("EXPLAIN QUERY PLAN {select}"))?;
                    let steps = explain.query_map(params_from_iter(values), |row| row.get::<_, String>("detail"))?;
                    Ok(steps.collect::<Result<Vec<_>, _>>()?)
                });
                let plan = plan.await.unwrap();
                assert!(plan.iter().any(|step| step.starts_with("SEARCH e ") && step.contains(index)), "{plan:?}");
                assert!(!plan.iter().any(|step| step.contains("TEMP B-TREE")), "{plan:?}");
            }
        }
    }
}
