//! Puts a damaged database aside for inspection, and copies its readable rows into a new one.

use std::io;
use std::path::PathBuf;

use jiff::Timestamp;
use mcp_satellite_actors::model::event::Envelope;
use rusqlite::types::ToSqlOutput;
use rusqlite::{Connection, OpenFlags, params};
use serde::Deserialize;

use super::read::{EventFacets, is_damage, next_readable, read_chunk, to_i64};
use super::shared::DATABASE;
use mcp_satellite_files::data_dir::DataDir;

const ASIDE: &str = "journal.db.damaged-";
const STEP: usize = 5_000;

/// Renames the database and the files beside it. Returns the new name of the database.
pub(super) fn put_aside(directory: &DataDir, now: Timestamp) -> io::Result<String> {
    let mut aside = format!("{ASIDE}{}", now.as_second());
    let mut again = 0;
    while directory.stat(&aside).is_some() {
        again += 1;
        aside = format!("{ASIDE}{}-{again}", now.as_second());
    }
    directory.rename(DATABASE, &aside)?;
    for suffix in ["-wal", "-shm"] {
        // A remaining WAL would be applied to the new database.
        match directory.rename(&format!("{DATABASE}{suffix}"), &format!("{aside}{suffix}")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    for older in list_put_aside(directory).filter(|older| *older != aside) {
        // One is enough for inspection, and many would fill the disk.
        for suffix in ["", "-wal", "-shm"] {
            let _ = directory.remove(&format!("{older}{suffix}"));
        }
    }
    Ok(aside)
}

pub(super) fn last_put_aside(directory: &DataDir) -> Option<PathBuf> {
    // The timestamps in the names have the same length.
    list_put_aside(directory).max().map(|name| directory.path().join(name))
}

fn list_put_aside(directory: &DataDir) -> impl Iterator<Item = String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    directory
        .names()
        .unwrap_or_default()
        .into_iter()
        .filter(move |name| name.strip_prefix(ASIDE).is_some_and(|times| times.splitn(2, '-').all(is_number)))
}

#[derive(Debug, Default)]
pub(super) struct SalvageReport {
    pub(super) events: u64,
    /// Ranges of unreadable events, without those that were delivered before the first readable event.
    pub(super) lost: Vec<(u64, u64)>,
}

/// Copies all readable rows of the database `aside` in `directory` into the empty database `into`. A write error ends
/// the copy; rows that were copied before stay.
pub(super) fn salvage(directory: &DataDir, aside: &str, into: &mut Connection) -> SalvageReport {
    let mut salvaged = SalvageReport::default();
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let Ok(path) = directory.database_path(aside) else { return salvaged };
    let Ok(from) = Connection::open_with_flags(path, flags) else { return salvaged };
    // Without this, SQLite refuses a file that is shorter than its header states.
    if from.pragma_update(None, "writable_schema", true).is_err() {
        return salvaged;
    }
    if !super::schema::version(&from, super::schema::MIGRATIONS).is_ok_and(|version| version > 0) {
        return salvaged;
    }
    // Small tables first: a restart needs them.
    for (table, columns) in [
        ("meta", "key, value"),
        ("memos", "team, user, installation, body"),
        ("commands", "id, at, result"),
        ("server_logs", "n, seq, at, team, user, installation, instance, server, body"),
        ("request_logs", "n, seq, at, team, user, installation, instance, server, body"),
    ] {
        if let Err(error) = copy_table(&from, into, table, columns) {
            tracing::warn!(table, %error, "not all of the damaged journal could be read");
        }
    }
    if let Err(error) = super::lines::recover_copied_through(into) {
        tracing::warn!(%error, "cannot determine which log lines of the damaged journal are in their tables");
    }
    let noted = |key| super::meta::get(into, key).ok().flatten().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let (cursor, last) = (noted("cursor"), noted("last"));
    let mut after = 0;
    loop {
        let copied = match copy_events(&from, into, after) {
            Ok(copied) => copied,
            Err(error) => {
                tracing::error!(%error, "cannot write the readable content of the damaged journal");
                return salvaged;
            }
        };
        salvaged.events += copied.count;
        salvaged.lost.extend(copied.garbled.iter().map(|seq| (*seq, *seq)));
        if let Some(through) = copied.through {
            after = through;
            continue;
        }
        let damaged = copied.error.as_ref().is_some_and(is_damage);
        // Events before the first readable one may have been pruned for their age; delivered ones are not lost.
        let from_seq = if after > 0 { after } else { cursor } + 1;
        if let Some(next) = damaged.then(|| next_readable(&from, after)).flatten() {
            salvaged.lost.push((from_seq, next - 1));
            after = next - 1;
            continue;
        }
        if damaged || after > 0 {
            // Events existed up to the last recorded number. If there is no damage and no event, all may have been
            // pruned for their age.
            salvaged.lost.push((from_seq, last));
        }
        return salvaged;
    }
}

#[derive(Default)]
struct CopiedEvents {
    count: u64,
    through: Option<u64>,
    garbled: Vec<u64>,
    error: Option<rusqlite::Error>,
}

#[derive(Deserialize)]
struct EventHead {
    seq: u64,
}

/// Copies up to `STEP` events in one transaction. An error is a write error.
fn copy_events(from: &Connection, into: &mut Connection, after: u64) -> rusqlite::Result<CopiedEvents> {
    let transaction = into.transaction()?;
    let (mut copied, mut failed) = (CopiedEvents::default(), None);
    let read = {
        let mut insert = transaction.prepare_cached(
            "INSERT OR IGNORE INTO events (seq, at, type, team, user, instance, server, body)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?;
        read_chunk(from, after, STEP, |stored| {
            copied.through = Some(stored.seq);
            if !serde_json::from_str::<EventHead>(stored.body).is_ok_and(|head| head.seq == stored.seq) {
                copied.garbled.push(stored.seq);
                return Ok(());
            }
            // An event of a newer version, in a block, has no columns for queries.
            let envelope =
                if stored.facets.is_none() { serde_json::from_str::<Envelope>(stored.body).ok() } else { None };
            let of_block = || envelope.as_ref().map(|envelope| EventFacets::from_event(&envelope.event));
            let EventFacets { kind, team, user, instance, server } =
                stored.facets.or_else(of_block).unwrap_or_default();
            let (seq, at, body) = (to_i64(stored.seq), stored.at, stored.body);
            copied.count += 1;
            insert.execute(params![seq, at, kind, team, user, instance, server, body]).map(drop).map_err(|error| {
                failed = Some(error);
                rusqlite::Error::InvalidQuery
            })
        })
    };
    if let Some(error) = failed {
        return Err(error);
    }
    transaction.commit()?;
    copied.error = read.err();
    Ok(copied)
}

fn copy_table(from: &Connection, into: &mut Connection, table: &str, columns: &str) -> rusqlite::Result<()> {
    let mut select = from.prepare(&format!("SELECT {columns} FROM {table}"))?;
    let places: Vec<String> = (1..=select.column_count()).map(|at| format!("?{at}")).collect();
    let transaction = into.transaction()?;
    let mut read = || -> rusqlite::Result<()> {
        let mut insert = transaction
            .prepare(&format!("INSERT OR REPLACE INTO {table} ({columns}) VALUES ({})", places.join(", ")))?;
        let mut rows = select.query([])?;
        while let Some(row) = rows.next()? {
            for at in 0..places.len() {
                insert.raw_bind_parameter(at + 1, ToSqlOutput::Borrowed(row.get_ref(at)?))?;
            }
            insert.raw_execute()?;
        }
        Ok(())
    };
    let outcome = read();
    transaction.commit()?;
    outcome
}
