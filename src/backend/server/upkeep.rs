//! What is old goes.

use std::sync::Arc;

use jiff::SignedDuration;
use rusqlite::Transaction;
use tokio::time::{Duration, MissedTickBehavior, interval};

use super::App;
use super::clock::stored;
use super::refusal::Refusal;

const INTERVAL: Duration = Duration::from_secs(3600);
/// Events, finished commands, tokens that open nothing any more.
const AGE_MAX: SignedDuration = SignedDuration::from_hours(30 * 24);
/// No satellite sends a batch again after so long. Its events would be known by their numbers anyway.
const BATCH_AGE_MAX: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Changes that a stream can come back to.
const CHANGES_MAX: i64 = 100_000;

/// Goes on until the backend ends.
pub(super) async fn keep_up(app: Arc<App>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = app.ending.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let now = app.now();
        let old = stored(now.saturating_sub(AGE_MAX).unwrap_or_default());
        let old_batch = stored(now.saturating_sub(BATCH_AGE_MAX).unwrap_or_default());
        // What fails is in the log, and tried again.
        let _ = app.database.run(move |db| forget(db, old, old_batch)).await;
    }
}

fn forget(db: &Transaction<'_>, old: i64, old_batch: i64) -> Result<(), Refusal> {
    db.execute("DELETE FROM events WHERE received_at < ?1", [old])?;
    db.execute("DELETE FROM batches WHERE received_at < ?1", [old_batch])?;
    db.execute("DELETE FROM commands WHERE finished_at < ?1 OR expires_at < ?1", [old])?;
    db.execute("DELETE FROM registration_tokens WHERE used_at < ?1 OR expires_at < ?1", [old])?;
    db.execute("DELETE FROM changes WHERE id <= (SELECT coalesce(max(id), 0) FROM changes) - ?1", [CHANGES_MAX])?;
    Ok(())
}
