//! Hourly deletion of old and surplus rows.

use std::sync::Arc;

use jiff::SignedDuration;
use rusqlite::params;
use tokio::time::{Duration, MissedTickBehavior, interval};

use super::BackendState;
use super::clock::timestamp_to_millis;
use super::database::Database;
use super::refusal::ApiError;

const INTERVAL: Duration = Duration::from_secs(3600);
// Of events, finished or expired commands, and used or expired tokens.
const AGE_MAX: SignedDuration = SignedDuration::from_hours(30 * 24);
// Satellites do not repeat a batch after this time, and its events would be recognized by `seq`.
const BATCH_AGE_MAX: SignedDuration = SignedDuration::from_hours(7 * 24);
// A stream can resume at any of the last changes.
const CHANGES_MAX: i64 = 100_000;
// Rows per transaction: all other requests wait for it.
const CHUNK: usize = 5_000;

// Each statement deletes up to `?2` rows beyond the bound `?1`.
const OLD_EVENTS: &str = "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE received_at < ?1 LIMIT ?2)";
const MANY_EVENTS: &str = "DELETE FROM events WHERE id IN (SELECT id FROM events ORDER BY id
    LIMIT max(0, min(?2, (SELECT coalesce(sum(events), 0) FROM satellites) - ?1)))";
const OLD_BATCHES: &str =
    "DELETE FROM batches WHERE rowid IN (SELECT rowid FROM batches WHERE received_at < ?1 LIMIT ?2)";
const OLD_COMMANDS: &str = "DELETE FROM commands WHERE number IN
    (SELECT number FROM commands WHERE finished_at < ?1 OR expires_at < ?1 LIMIT ?2)";
const OLD_TOKENS: &str = "DELETE FROM registration_tokens WHERE hash IN
    (SELECT hash FROM registration_tokens WHERE used_at < ?1 OR expires_at < ?1 LIMIT ?2)";
const MANY_CHANGES: &str = "DELETE FROM changes WHERE id IN
    (SELECT id FROM changes WHERE id <= (SELECT max(id) FROM changes) - ?1 LIMIT ?2)";

pub(super) async fn run_maintenance(app: Arc<BackendState>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = app.ending.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let now = app.now();
        let old = timestamp_to_millis(now.saturating_sub(AGE_MAX).unwrap_or_default());
        let old_batch = timestamp_to_millis(now.saturating_sub(BATCH_AGE_MAX).unwrap_or_default());
        let events_max = i64::try_from(app.settings.events_max).unwrap_or(i64::MAX);
        for (delete, bound) in [
            (OLD_EVENTS, old),
            (MANY_EVENTS, events_max),
            (OLD_BATCHES, old_batch),
            (OLD_COMMANDS, old),
            (OLD_TOKENS, old),
            (MANY_CHANGES, CHANGES_MAX),
        ] {
            // The error was logged; the next interval tries again.
            let _ = delete_in_chunks(&app.database, delete, bound).await;
        }
    }
}

// Other requests use the database between the steps.
async fn delete_in_chunks(database: &Database, delete: &'static str, bound: i64) -> Result<(), ApiError> {
    while database.run(move |db| Ok(db.execute(delete, params![bound, CHUNK])?)).await? >= CHUNK {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use rusqlite::Transaction;

    use super::super::{commands, satellites};
    use super::*;

    fn database(dir: &tempfile::TempDir) -> Database {
        Database::open(&dir.path().join("backend.db")).unwrap()
    }

    #[tokio::test]
    async fn old_events_are_deleted_completely_in_chunks() {
        let dir = tempfile::tempdir().unwrap();
        let database = database(&dir);
        let events = "INSERT INTO satellites (id, name, key_hash, registration, registered_at) VALUES ('s', 's', x'00', '', 0);
            WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 12000)
            INSERT INTO events (satellite, seq, type, timestamp, data, received_at) SELECT 's', i, '', '', '{}', i FROM n;";
        database.run(move |db| Ok(db.execute_batch(events)?)).await.unwrap();
        let counts = |db: &Transaction<'_>| {
            let (counted, kept) = ("SELECT count(*) FROM events", "SELECT events FROM satellites");
            let count = |select| db.query_row(select, [], |row| row.get::<_, i64>(0));
            Ok((count(counted)?, count(kept)?))
        };
        assert_eq!(database.run(counts).await.unwrap(), (12000, 12000));
        let first = database.run(|db| Ok(db.execute(OLD_EVENTS, params![11000, CHUNK])?)).await.unwrap();
        assert_eq!(first, CHUNK);
        delete_in_chunks(&database, OLD_EVENTS, 11000).await.unwrap();
        assert_eq!(database.run(counts).await.unwrap(), (1001, 1001));
        delete_in_chunks(&database, MANY_EVENTS, 7).await.unwrap();
        assert_eq!(database.run(counts).await.unwrap(), (7, 7));
        delete_in_chunks(&database, MANY_EVENTS, 7).await.unwrap();
        assert_eq!(database.run(counts).await.unwrap(), (7, 7));
    }

    #[tokio::test]
    async fn frequent_queries_use_an_index() {
        let dir = tempfile::tempdir().unwrap();
        let database = database(&dir);
        for query in [commands::LAST, satellites::COUNTS, OLD_EVENTS, OLD_BATCHES, OLD_COMMANDS, MANY_CHANGES] {
            let plan = database.run(move |db| {
                let mut explain = db.prepare(&format!("EXPLAIN QUERY PLAN {query}"))?;
                // The values of the parameters do not change the plan.
                for parameter in 1..=explain.parameter_count() {
                    explain.raw_bind_parameter(parameter, 1)?;
                }
                let (mut rows, mut plan) = (explain.raw_query(), Vec::new());
                while let Some(row) = rows.next()? {
                    plan.push(row.get::<_, String>("detail")?);
                }
                Ok(plan)
            });
            let plan = plan.await.unwrap();
            let uses_index = plan.iter().any(|step| step.starts_with("SEARCH"));
            let scans = plan.iter().any(|step| step.starts_with("SCAN") || step.contains("TEMP B-TREE"));
            assert!(uses_index && !scans, "{query}: {plan:?}");
        }
    }
}
