//! State of each instance according to its last event, and the stream of changes.
//!
//! A stream starts with the current state and continues with numbered changes, so a reader that reconnects with its
//! last number misses nothing. If those changes were deleted, or the number belongs to another database, a `reset`
//! event makes the reader discard its state, and the current state follows.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use futures::stream::{self, Stream};
use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Event, EventSubject, StopKind};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_protocol::header::LAST_EVENT_ID;
use rusqlite::{OptionalExtension as _, Row, Transaction, params, params_from_iter};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::Duration;

use super::BackendState;
use super::access::{AdminAccess, PathParams, QueryParams, find_id};
use super::api::{InstanceList, InstanceState};
use super::clock::timestamp_to_millis;
use super::refusal::ApiError;

// Changes per query of a stream.
const PAGE: i64 = 500;
// Proxies may close a connection that is silent for longer.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Updates an instance from an event. Returns true if its status changed.
pub(super) fn apply_event(
    db: &Transaction<'_>,
    satellite: &str,
    event: &Event,
    seq: u64,
    at: Timestamp,
    now: Timestamp,
) -> Result<bool, ApiError> {
    match event {
        Event::StatusChanged { of, status, status_message, remedy } => {
            if is_old(db, satellite, &of.process_id, seq, at)? {
                return Ok(false);
            }
            let instance = InstanceState {
                remedy: *remedy,
                ..instance_state(satellite, of, *status, status_message.clone(), seq, at)
            };
            let body = serde_json::to_string(&instance)?;
            let change = record_change(db, satellite, &instance.instance, false, &body, now)?;
            db.prepare_cached(
                "INSERT INTO instances (satellite, instance, seq, since, change, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                 ON CONFLICT (satellite, instance) DO UPDATE SET
                     seq = excluded.seq, since = excluded.since, change = excluded.change, body = excluded.body",
            )?
            .execute(params![satellite, instance.instance, seq, at.to_string(), change, body])?;
            Ok(true)
        }
        Event::Stopped { of, kind: StopKind::Uninstall, .. } => {
            if is_old(db, satellite, &of.process_id, seq, at)? {
                return Ok(false);
            }
            remove(db, satellite, &of.process_id, now)
        }
        _ => Ok(false),
    }
}

fn instance_state(
    satellite: &str,
    of: &EventSubject,
    status: Status,
    status_message: Option<String>,
    seq: u64,
    since: Timestamp,
) -> InstanceState {
    InstanceState {
        satellite_id: satellite.to_owned(),
        instance: of.process_id.to_string(),
        installation_id: of.installation_id.to_string(),
        team_id: of.team_id.to_string(),
        user_id: of.user_id.to_string(),
        server_slug: of.server_slug.to_string(),
        status: status.to_string(),
        status_message,
        remedy: None,
        since,
        seq,
    }
}

/// Returns true if a later event is known. `seq` restarts at 1 if a satellite loses its journal, and its clock may be
/// set back, so an event is old only if both are lower.
fn is_old(db: &Transaction<'_>, satellite: &str, instance: &str, seq: u64, at: Timestamp) -> Result<bool, ApiError> {
    let known: Option<(u64, String)> = db
        .prepare_cached("SELECT seq, since FROM instances WHERE satellite = ?1 AND instance = ?2")?
        .query_row(params![satellite, instance], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    Ok(known.is_some_and(|(known, since)| seq < known && since.parse::<Timestamp>().is_ok_and(|since| at <= since)))
}

fn remove(db: &Transaction<'_>, satellite: &str, instance: &str, now: Timestamp) -> Result<bool, ApiError> {
    let body: Option<String> = db
        .prepare_cached("DELETE FROM instances WHERE satellite = ?1 AND instance = ?2 RETURNING body")?
        .query_row(params![satellite, instance], |row| row.get(0))
        .optional()?;
    let Some(body) = body else { return Ok(false) };
    record_change(db, satellite, instance, true, &body, now)?;
    Ok(true)
}

// Returns the number of the change.
fn record_change(
    db: &Transaction<'_>,
    satellite: &str,
    instance: &str,
    removed: bool,
    body: &str,
    now: Timestamp,
) -> Result<i64, ApiError> {
    db.prepare_cached("INSERT INTO changes (satellite, instance, removed, body, at) VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![satellite, instance, removed, body, timestamp_to_millis(now)])?;
    Ok(db.last_insert_rowid())
}

/// Removes the instances whose name is not in `names` and whose last event is older than `seen`. Returns true if any
/// was removed.
pub(super) fn retain_listed(
    db: &Transaction<'_>,
    satellite: &str,
    names: &BTreeSet<String>,
    seen: Timestamp,
    now: Timestamp,
) -> Result<bool, ApiError> {
    let mut select = db.prepare_cached("SELECT instance, since FROM instances WHERE satellite = ?1")?;
    let known = select.query_map([satellite], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?;
    let mut changed = false;
    for (name, since) in known.collect::<Result<Vec<_>, _>>()? {
        if !names.contains(&name) && since.parse::<Timestamp>().is_ok_and(|since| since < seen) {
            changed |= remove(db, satellite, &name, now)?;
        }
    }
    Ok(changed)
}

pub(super) fn remove_all(db: &Transaction<'_>, satellite: &str, now: Timestamp) -> Result<bool, ApiError> {
    retain_listed(db, satellite, &BTreeSet::new(), Timestamp::MAX, now)
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct InstanceFilter {
    satellite: Option<String>,
    team: Option<String>,
    user: Option<String>,
    instance: Option<String>,
}

impl InstanceFilter {
    fn resolve_satellite(mut self, db: &Transaction<'_>) -> Result<Self, ApiError> {
        self.satellite = self.satellite.map(|name| find_id(db, &name)).transpose()?;
        Ok(self)
    }

    fn select(&self) -> (String, Vec<&str>) {
        // The expressions must equal those of the indexes. The primary key is first, as the most selective one.
        let filters = [
            ("satellite", &self.satellite),
            ("instance", &self.instance),
            ("body ->> 'user_id'", &self.user),
            ("body ->> 'team_id'", &self.team),
        ];
        let filters = filters.into_iter().filter_map(|(column, filter)| Some((column, filter.as_deref()?)));
        let (columns, filter): (Vec<_>, Vec<_>) = filters.unzip();
        let terms: Vec<_> = columns.iter().map(|column| format!("{column} = ?")).collect();
        let only = if terms.is_empty() { String::new() } else { format!("WHERE {} ", terms.join(" AND ")) };
        (format!("SELECT body FROM instances {only}ORDER BY satellite, instance"), filter)
    }

    fn matches(&self, instance: &InstanceState) -> bool {
        let is = |filter: &Option<String>, is: &str| filter.as_deref().is_none_or(|filter| filter == is);
        is(&self.satellite, &instance.satellite_id)
            && is(&self.team, &instance.team_id)
            && is(&self.user, &instance.user_id)
            && is(&self.instance, &instance.instance)
    }
}

pub(super) async fn list(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    QueryParams(filter): QueryParams<InstanceFilter>,
) -> Result<Json<InstanceList>, ApiError> {
    let instances = app.database.run(move |db| {
        let filter = filter.resolve_satellite(db)?;
        let (select, filters) = filter.select();
        let mut select = db.prepare_cached(&select)?;
        let bodies = select.query_map(params_from_iter(filters), |row| row.get(0))?;
        Ok(bodies.collect::<Result<Vec<String>, _>>()?)
    });
    // Decoded here, not on the thread of the database.
    let instances = instances.await?.iter().map(|body| serde_json::from_str(body)).collect::<Result<_, _>>()?;
    Ok(Json(InstanceList { instances }))
}

pub(super) async fn show(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<InstanceState>, ApiError> {
    let instance = app.database.run(move |db| {
        let satellite = find_id(db, &names.get("satellite"))?;
        let mut select = db.prepare_cached("SELECT body FROM instances WHERE satellite = ?1 AND instance = ?2")?;
        let body = select.query_row([satellite, names.get("instance")], |row| row.get::<_, String>(0)).optional()?;
        Ok(serde_json::from_str(&body.ok_or_else(|| ApiError::not_found("instance"))?)?)
    });
    instance.await.map(Json)
}

pub(super) async fn follow(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    QueryParams(wanted): QueryParams<InstanceFilter>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, ApiError> {
    let seen = match headers.get(LAST_EVENT_ID) {
        None => None,
        Some(id) => {
            let id = id.to_str().ok().and_then(|id| id.parse::<i64>().ok()).filter(|id| *id >= 0);
            Some(id.ok_or_else(|| ApiError::bad_request("Last-Event-ID must be the id of an event of this stream"))?)
        }
    };
    let wanted = app.database.run(move |db| wanted.resolve_satellite(db)).await?;
    let changes = app.change_signal.subscribe();
    let follower = ChangeStream { app, filter: wanted, seen, waiting: VecDeque::new(), change_signal: changes };
    let events = stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await?;
        Some((Ok(event), follower))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

// Changes are read from the database on demand, so a slow reader does not accumulate memory.
struct ChangeStream {
    app: Arc<BackendState>,
    filter: InstanceFilter,
    // Number of the last change that was read; `None` before the current state was sent.
    seen: Option<i64>,
    waiting: VecDeque<StoredChange>,
    change_signal: watch::Receiver<()>,
}

struct StoredChange {
    id: i64,
    removed: bool,
    body: String,
}

impl StoredChange {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self { id: row.get(0)?, removed: row.get(1)?, body: row.get(2)? })
    }

    fn into_event(self) -> sse::Event {
        // The body is a single line of JSON.
        sse::Event::default()
            .id(self.id.to_string())
            .event(if self.removed { "removed" } else { "status" })
            .data(self.body)
    }
}

impl ChangeStream {
    /// Returns the next event, or `None` if the backend ends or the database fails; the reader then reconnects.
    async fn next(&mut self) -> Option<sse::Event> {
        let ending = self.app.ending.clone();
        loop {
            while let Some(change) = self.waiting.pop_front() {
                let instance: InstanceState = serde_json::from_str(&change.body).ok()?;
                if self.filter.matches(&instance) {
                    return Some(change.into_event());
                }
            }
            // Marked as seen before the query, so that a change after it wakes the stream again.
            self.change_signal.borrow_and_update();
            let seen = self.seen;
            let ChangePage { changes, through, reset } =
                self.app.database.run(move |db| read_changes(db, seen)).await.ok()?;
            self.seen = Some(through);
            if reset {
                self.waiting = changes.into();
                // Without an id, so that a reader that disconnects during the following events starts again.
                return Some(sse::Event::default().event("reset").data("{}"));
            }
            if changes.is_empty() {
                tokio::select! {
                    () = ending.cancelled() => return None,
                    changed = self.change_signal.changed() => changed.ok()?,
                }
            }
            self.waiting = changes.into();
        }
    }
}

struct ChangePage {
    changes: Vec<StoredChange>,
    // Number of the last change that these cover.
    through: i64,
    // True if the reader must discard its state.
    reset: bool,
}

/// Returns the changes after `seen`, or the current state if they are not available.
fn read_changes(db: &Transaction<'_>, seen: Option<i64>) -> Result<ChangePage, ApiError> {
    let (first, last): (Option<i64>, i64) = db
        .prepare_cached("SELECT min(id), coalesce(max(id), 0) FROM changes")?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    // A number above the last one belongs to another database.
    let gap_free = seen.filter(|seen| *seen <= last && first.is_none_or(|first| first <= seen.saturating_add(1)));
    if let Some(seen) = gap_free {
        let mut select =
            db.prepare_cached("SELECT id, removed, body FROM changes WHERE id > ?1 ORDER BY id LIMIT ?2")?;
        let changes = select.query_map(params![seen, PAGE], StoredChange::from_row)?.collect::<Result<Vec<_>, _>>()?;
        let through = changes.last().map_or(seen, |change| change.id);
        return Ok(ChangePage { changes, through, reset: false });
    }
    let mut select = db.prepare_cached("SELECT change, 0, body FROM instances ORDER BY change")?;
    let changes = select.query_map([], StoredChange::from_row)?.collect::<Result<Vec<_>, _>>()?;
    Ok(ChangePage { changes, through: last, reset: seen.is_some() })
}

/// Change of an instance.
#[derive(Debug, Clone)]
pub enum InstanceChange {
    /// New state, and the name of the satellite.
    Set(Box<InstanceState>, String),
    /// The instance was removed from the satellite with this id.
    Removed { satellite_id: String, instance: String },
}

/// Changes of instances, in order.
#[derive(Debug, Clone)]
pub struct InstanceChanges {
    /// True if the changes are the complete state and the reader must discard its own.
    pub is_complete: bool,
    pub changes: Vec<InstanceChange>,
    /// Number of the last change that these cover.
    pub through: i64,
}

/// Returns a page of the changes after `seen`; empty if there are none.
pub(super) async fn changes_after(app: &BackendState, seen: Option<i64>) -> Result<InstanceChanges, ApiError> {
    let (page, names) = app
        .database
        .run(move |db| {
            let mut select = db.prepare_cached("SELECT id, name FROM satellites")?;
            let names = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            let names = names.collect::<Result<HashMap<String, String>, _>>()?;
            Ok((read_changes(db, seen)?, names))
        })
        .await?;
    // Decoded here, not on the thread of the database.
    let decode = |StoredChange { removed, body, .. }| -> Result<InstanceChange, ApiError> {
        let state: InstanceState = serde_json::from_str(&body)?;
        Ok(match names.get(&state.satellite_id).filter(|_| !removed) {
            Some(name) => InstanceChange::Set(Box::new(state), name.clone()),
            // A change of a satellite that was deleted meanwhile precedes the removal of its instances.
            None => InstanceChange::Removed { satellite_id: state.satellite_id, instance: state.instance },
        })
    };
    let changes = page.changes.into_iter().map(decode).collect::<Result<_, _>>()?;
    Ok(InstanceChanges { is_complete: page.reset || seen.is_none(), changes, through: page.through })
}

#[cfg(test)]
mod tests {
    use super::super::database::Database;
    use super::*;

    #[tokio::test]
    async fn every_instance_filter_uses_an_ordered_index() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(&dir.path().join("backend.db")).unwrap();
        for filters in 0..16_u8 {
            let filter = |bit: u8| (filters & bit != 0).then(|| "x".to_owned());
            let filter = InstanceFilter { satellite: filter(1), team: filter(2), user: filter(4), instance: filter(8) };
            let plan = database.run(move |db| {
                let (select, filters) = filter.select();
                let mut explain = db.prepare(&format!("EXPLAIN QUERY PLAN {select}"))?;
                let steps = explain.query_map(params_from_iter(filters), |row| row.get::<_, String>("detail"))?;
                Ok(steps.collect::<Result<Vec<_>, _>>()?)
            });
            let plan = plan.await.unwrap();
            // Without a filter the index is scanned in order.
            let word = if filters == 0 { "SCAN" } else { "SEARCH" };
            assert!(plan.len() == 1 && plan[0].starts_with(word) && plan[0].contains("USING INDEX"), "{plan:?}");
        }
    }
}
