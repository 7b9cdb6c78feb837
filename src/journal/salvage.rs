//! A damaged database is put aside, for a person to look at, and what can be read of it goes into a new one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rusqlite::types::ToSqlOutput;
use rusqlite::{Connection, OpenFlags, params};

use super::read::{beyond, chunk, is_damage, number};
use super::store::suffixed;

/// Rows that one transaction takes over.
const STEP: usize = 5_000;

/// Renames the database and what belongs to it. The new name of the database.
pub(super) fn put_aside(path: &Path, now: Timestamp) -> io::Result<PathBuf> {
    let mut aside = suffixed(path, &format!(".damaged-{}", now.as_second()));
    let mut again = 0;
    while aside.exists() {
        again += 1;
        aside = suffixed(path, &format!(".damaged-{}-{again}", now.as_second()));
    }
    fs::rename(path, &aside)?;
    for suffix in ["-wal", "-shm"] {
        // A log that stayed would be taken for that of the new database.
        match fs::rename(suffixed(path, suffix), suffixed(&aside, suffix)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(aside)
}

/// What was taken over.
#[derive(Debug, Default)]
pub(super) struct Salvaged {
    pub(super) events: u64,
    /// Numbers that were skipped, from the first event that was read to the last.
    pub(super) lost: Option<(u64, u64)>,
}

/// Takes over all that can be read of the database `aside` into the empty one of `into`. What cannot be written ends
/// it: what was taken over by then stays.
pub(super) fn salvage(aside: &Path, into: &mut Connection) -> Salvaged {
    let mut salvaged = Salvaged::default();
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let Ok(from) = Connection::open_with_flags(aside, flags) else { return salvaged };
    if !super::schema::version(&from).is_ok_and(|version| version > 0) {
        return salvaged;
    }
    // Small things first: they are what a restart needs.
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
    let mut after = 0;
    loop {
        match copy_events(&from, into, after) {
            Ok((0, None)) => return salvaged,
            Ok((count, error)) => {
                if count > 0 {
                    salvaged.events += count;
                    after = last(into).unwrap_or(after);
                    continue;
                }
                let Some(_) = error.filter(is_damage) else { return salvaged };
                let Some(next) = beyond(&from, after) else { return salvaged };
                if after > 0 {
                    let from = salvaged.lost.map_or(after + 1, |(from, _)| from);
                    salvaged.lost = Some((from, next - 1));
                }
                after = next - 1;
            }
            Err(error) => {
                tracing::error!(%error, "what is left of the damaged journal cannot be written");
                return salvaged;
            }
        }
    }
}

/// One transaction of events. How many there were, and why there were no more; an error is one of writing.
fn copy_events(
    from: &Connection,
    into: &mut Connection,
    after: u64,
) -> rusqlite::Result<(u64, Option<rusqlite::Error>)> {
    let transaction = into.transaction()?;
    let (mut count, mut failed) = (0, None);
    let read = {
        let mut insert = transaction.prepare_cached(
            "INSERT OR IGNORE INTO events (seq, at, type, team, user, instance, server, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?;
        chunk(from, after, STEP, |row| {
            let body = row.body()?;
            let facets = row.facets();
            let values = params![
                number(row.seq),
                row.at()?,
                facets.kind,
                facets.team,
                facets.user,
                facets.instance,
                facets.server,
                body
            ];
            match insert.execute(values) {
                Ok(_) => count += 1,
                Err(error) => {
                    failed = Some(error);
                    return Err(rusqlite::Error::InvalidQuery);
                }
            }
            Ok(())
        })
    };
    if let Some(error) = failed {
        return Err(error);
    }
    transaction.commit()?;
    Ok((count, read.err()))
}

/// All of a table, up to its first damage.
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

fn last(connection: &Connection) -> Option<u64> {
    let last = connection.query_row("SELECT max(seq) FROM events", [], |row| row.get::<_, Option<i64>>(0));
    last.ok().flatten().map(i64::unsigned_abs)
}
