//! How each instance is, by what its satellite has told last, and who follows it.
//!
//! A stream begins with how everything is and goes on with every change. Each has a number, so that whoever comes back with
//! the last one that they saw misses nothing. Where that was so long ago that the changes are gone, or with another backend,
//! `reset` says that what they know is to be forgotten, and everything is told as it is now.

use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use futures::stream::{self, Stream};
use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Event, StopKind, Subject};
use mcp_satellite_actors::model::status::Status;
use rusqlite::{OptionalExtension as _, Row, Transaction, params, params_from_iter};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::Duration;

use super::App;
use super::access::{Admin, Asked, Names};
use super::api::{Instance, Instances};
use super::clock::stored;
use super::refusal::Refusal;
use super::satellites;

/// Changes that are read at once for a stream.
const PAGE: i64 = 500;
/// A proxy may close what is silent for longer.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// What an event says of an instance. Whether that is another status than before.
pub(super) fn told(
    db: &Transaction<'_>,
    satellite: &str,
    event: &Event,
    seq: u64,
    at: Timestamp,
    now: Timestamp,
) -> Result<bool, Refusal> {
    match event {
        Event::StatusChanged { of, status, status_message, .. } => {
            if is_old(db, satellite, &of.process_id, seq, at)? {
                return Ok(false);
            }
            let instance = instance(satellite, of, *status, status_message.clone(), seq, at);
            let body = serde_json::to_string(&instance)?;
            let change = change(db, satellite, &instance.instance, false, &body, now)?;
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

fn instance(
    satellite: &str,
    of: &Subject,
    status: Status,
    status_message: Option<String>,
    seq: u64,
    since: Timestamp,
) -> Instance {
    Instance {
        satellite_id: satellite.to_owned(),
        instance: of.process_id.to_string(),
        installation_id: of.installation_id.to_string(),
        team_id: of.team_id.to_string(),
        user_id: of.user_id.to_string(),
        server_slug: of.server_slug.to_string(),
        status: status.to_string(),
        status_message,
        since,
        seq,
    }
}

/// Whether something later is known. A satellite that has lost its journal counts from 1 again, and one whose clock was set
/// back is earlier than it was: either alone is no proof.
fn is_old(db: &Transaction<'_>, satellite: &str, instance: &str, seq: u64, at: Timestamp) -> Result<bool, Refusal> {
    let known: Option<(u64, String)> = db
        .prepare_cached("SELECT seq, since FROM instances WHERE satellite = ?1 AND instance = ?2")?
        .query_row(params![satellite, instance], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    Ok(known.is_some_and(|(known, since)| seq < known && since.parse::<Timestamp>().is_ok_and(|since| at <= since)))
}

fn remove(db: &Transaction<'_>, satellite: &str, instance: &str, now: Timestamp) -> Result<bool, Refusal> {
    let body: Option<String> = db
        .prepare_cached("DELETE FROM instances WHERE satellite = ?1 AND instance = ?2 RETURNING body")?
        .query_row(params![satellite, instance], |row| row.get(0))
        .optional()?;
    let Some(body) = body else { return Ok(false) };
    change(db, satellite, instance, true, &body, now)?;
    Ok(true)
}

/// Its number.
fn change(
    db: &Transaction<'_>,
    satellite: &str,
    instance: &str,
    removed: bool,
    body: &str,
    now: Timestamp,
) -> Result<i64, Refusal> {
    db.prepare_cached("INSERT INTO changes (satellite, instance, removed, body, at) VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![satellite, instance, removed, body, stored(now)])?;
    Ok(db.last_insert_rowid())
}

/// Those that have other names and have not been heard of since `seen` are not there any more.
pub(super) fn keep_only(
    db: &Transaction<'_>,
    satellite: &str,
    names: &BTreeSet<String>,
    seen: Timestamp,
    now: Timestamp,
) -> Result<bool, Refusal> {
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

/// A satellite that is deleted has no instances.
pub(super) fn remove_all(db: &Transaction<'_>, satellite: &str, now: Timestamp) -> Result<bool, Refusal> {
    keep_only(db, satellite, &BTreeSet::new(), Timestamp::MAX, now)
}

/// Which instances are meant.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct Wanted {
    satellite: Option<String>,
    team: Option<String>,
    user: Option<String>,
    instance: Option<String>,
}

impl Wanted {
    /// By the satellite's id from now on.
    fn resolved(mut self, db: &Transaction<'_>) -> Result<Self, Refusal> {
        self.satellite = self.satellite.map(|name| satellites::find(db, &name)).transpose()?;
        Ok(self)
    }

    /// A statement that finds them, and what it asks for.
    fn select(&self) -> (String, Vec<&str>) {
        // By the words of the indexes. The first is of the primary key, and leaves the least.
        let asked = [
            ("satellite", &self.satellite),
            ("instance", &self.instance),
            ("body ->> 'user_id'", &self.user),
            ("body ->> 'team_id'", &self.team),
        ];
        let asked = asked.into_iter().filter_map(|(column, wanted)| Some((column, wanted.as_deref()?)));
        let (columns, wanted): (Vec<_>, Vec<_>) = asked.unzip();
        let terms: Vec<_> = columns.iter().map(|column| format!("{column} = ?")).collect();
        let only = if terms.is_empty() { String::new() } else { format!("WHERE {} ", terms.join(" AND ")) };
        (format!("SELECT body FROM instances {only}ORDER BY satellite, instance"), wanted)
    }

    fn matches(&self, instance: &Instance) -> bool {
        let is = |wanted: &Option<String>, is: &str| wanted.as_deref().is_none_or(|wanted| wanted == is);
        is(&self.satellite, &instance.satellite_id)
            && is(&self.team, &instance.team_id)
            && is(&self.user, &instance.user_id)
            && is(&self.instance, &instance.instance)
    }
}

/// `GET /api/admin/instances`
pub(super) async fn list(
    _: Admin,
    State(app): State<Arc<App>>,
    Asked(wanted): Asked<Wanted>,
) -> Result<Json<Instances>, Refusal> {
    let instances = app.database.run(move |db| {
        let wanted = wanted.resolved(db)?;
        let (select, asked) = wanted.select();
        let mut select = db.prepare_cached(&select)?;
        let bodies = select.query_map(params_from_iter(asked), |row| row.get(0))?;
        Ok(bodies.collect::<Result<Vec<String>, _>>()?)
    });
    // Read where nobody waits for the database.
    let instances = instances.await?.iter().map(|body| serde_json::from_str(body)).collect::<Result<_, _>>()?;
    Ok(Json(Instances { instances }))
}

/// `GET /api/admin/satellites/{satellite}/instances/{instance}`
pub(super) async fn show(_: Admin, State(app): State<Arc<App>>, names: Names) -> Result<Json<Instance>, Refusal> {
    let instance = app.database.run(move |db| {
        let satellite = satellites::find(db, &names.of("satellite"))?;
        let mut select = db.prepare_cached("SELECT body FROM instances WHERE satellite = ?1 AND instance = ?2")?;
        let body = select.query_row([satellite, names.of("instance")], |row| row.get::<_, String>(0)).optional()?;
        Ok(serde_json::from_str(&body.ok_or_else(|| Refusal::unknown("instance"))?)?)
    });
    instance.await.map(Json)
}

/// `GET /api/admin/instances/stream`
pub(super) async fn follow(
    _: Admin,
    State(app): State<Arc<App>>,
    Asked(wanted): Asked<Wanted>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, Refusal> {
    let seen = match headers.get("last-event-id") {
        None => None,
        Some(id) => {
            let id = id.to_str().ok().and_then(|id| id.parse::<i64>().ok()).filter(|id| *id >= 0);
            Some(id.ok_or_else(|| Refusal::bad("Last-Event-ID must be the id of an event of this stream"))?)
        }
    };
    let wanted = app.database.run(move |db| wanted.resolved(db)).await?;
    let news = app.changes.subscribe();
    let follower = Follower { app, wanted, seen, waiting: VecDeque::new(), news };
    let events = stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await?;
        Some((Ok(event), follower))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// Somebody who follows. What is told is read from the database, so one who reads slowly costs no memory.
struct Follower {
    app: Arc<App>,
    wanted: Wanted,
    /// The last number that was read; `None` before everything was told as it is.
    seen: Option<i64>,
    waiting: VecDeque<Change>,
    news: watch::Receiver<()>,
}

/// One thing to tell.
struct Change {
    id: i64,
    removed: bool,
    body: String,
}

impl Change {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self { id: row.get(0)?, removed: row.get(1)?, body: row.get(2)? })
    }

    fn event(self) -> sse::Event {
        // The body is JSON in one line.
        sse::Event::default()
            .id(self.id.to_string())
            .event(if self.removed { "removed" } else { "status" })
            .data(self.body)
    }
}

impl Follower {
    /// `None` when the backend ends, or its database has failed: whoever follows comes back.
    async fn next(&mut self) -> Option<sse::Event> {
        let ending = self.app.ending.clone();
        loop {
            while let Some(change) = self.waiting.pop_front() {
                let instance: Instance = serde_json::from_str(&change.body).ok()?;
                if self.wanted.matches(&instance) {
                    return Some(change.event());
                }
            }
            // Marked before it is read: what comes in between is read, or news.
            self.news.borrow_and_update();
            let seen = self.seen;
            let Read { changes, through, reset } = self.app.database.run(move |db| read(db, seen)).await.ok()?;
            self.seen = Some(through);
            if reset {
                self.waiting = changes.into();
                // Without an id: whoever breaks off in the middle of what follows begins anew.
                return Some(sse::Event::default().event("reset").data("{}"));
            }
            if changes.is_empty() {
                tokio::select! {
                    () = ending.cancelled() => return None,
                    told = self.news.changed() => told.ok()?,
                }
            }
            self.waiting = changes.into();
        }
    }
}

/// What was read for a stream.
struct Read {
    changes: Vec<Change>,
    /// Up to here it is everything.
    through: i64,
    /// Whether it begins anew, for somebody who knows something already.
    reset: bool,
}

/// What comes after `seen`.
fn read(db: &Transaction<'_>, seen: Option<i64>) -> Result<Read, Refusal> {
    let (first, last): (Option<i64>, i64) = db
        .prepare_cached("SELECT min(id), coalesce(max(id), 0) FROM changes")?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    // A number beyond the last is not one of ours: perhaps of a database that was thrown away.
    let gap_free = seen.filter(|seen| *seen <= last && first.is_none_or(|first| first <= seen.saturating_add(1)));
    if let Some(seen) = gap_free {
        let mut select =
            db.prepare_cached("SELECT id, removed, body FROM changes WHERE id > ?1 ORDER BY id LIMIT ?2")?;
        let changes = select.query_map(params![seen, PAGE], Change::read)?.collect::<Result<Vec<_>, _>>()?;
        let through = changes.last().map_or(seen, |change| change.id);
        return Ok(Read { changes, through, reset: false });
    }
    let mut select = db.prepare_cached("SELECT change, 0, body FROM instances ORDER BY change")?;
    let changes = select.query_map([], Change::read)?.collect::<Result<Vec<_>, _>>()?;
    Ok(Read { changes, through: last, reset: seen.is_some() })
}

#[cfg(test)]
mod tests {
    use super::super::database::Database;
    use super::*;

    #[tokio::test]
    async fn whatever_is_asked_of_instances_is_found_by_an_index_and_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(&dir.path().join("backend.db")).unwrap();
        for asked in 0..16_u8 {
            let wanted = |bit: u8| (asked & bit != 0).then(|| "x".to_owned());
            let wanted = Wanted { satellite: wanted(1), team: wanted(2), user: wanted(4), instance: wanted(8) };
            let plan = database.run(move |db| {
                let (select, asked) = wanted.select();
                let mut explain = db.prepare(&format!("EXPLAIN QUERY PLAN {select}"))?;
                let steps = explain.query_map(params_from_iter(asked), |row| row.get::<_, String>("detail"))?;
                Ok(steps.collect::<Result<Vec<_>, _>>()?)
            });
            let plan = plan.await.unwrap();
            // Who asks for all is told all, as they lie there.
            let word = if asked == 0 { "SCAN" } else { "SEARCH" };
            assert!(plan.len() == 1 && plan[0].starts_with(word) && plan[0].contains("USING INDEX"), "{plan:?}");
        }
    }
}
