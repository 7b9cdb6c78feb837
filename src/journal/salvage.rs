//! A damaged database is put aside, for a person to look at, and what can be read of it goes into a new one.

use std::io;
use std::path::PathBuf;

use jiff::Timestamp;
use rusqlite::types::ToSqlOutput;
use rusqlite::{Connection, OpenFlags, params};
use serde::Deserialize;

use super::DATABASE;
use super::read::{Facets, beyond, chunk, is_damage, number};
use crate::data_dir::DataDir;

/// Prefix of the name of a database that was put aside.
const ASIDE: &str = "journal.db.damaged-";
/// Rows that one transaction takes over.
const STEP: usize = 5_000;

/// Renames the database and what belongs to it. Returns the new name of the database.
pub(super) fn put_aside(directory: &DataDir, now: Timestamp) -> io::Result<String> {
    let mut aside = format!("{ASIDE}{}", now.as_second());
    let mut again = 0;
    while directory.stat(&aside).is_some() {
        again += 1;
        aside = format!("{ASIDE}{}-{again}", now.as_second());
    }
    directory.rename(DATABASE, &aside)?;
    for suffix in ["-wal", "-shm"] {
        // A log that stayed would be taken for that of the new database.
        match directory.rename(&format!("{DATABASE}{suffix}"), &format!("{aside}{suffix}")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    for older in put_asides(directory).filter(|older| *older != aside) {
        // One is enough to look at, and many fill the disk.
        for suffix in ["", "-wal", "-shm"] {
            let _ = directory.remove(&format!("{older}{suffix}"));
        }
    }
    Ok(aside)
}

/// The database that was put aside last, if it is still there.
pub(super) fn last_put_aside(directory: &DataDir) -> Option<PathBuf> {
    // The times in their names are of one length.
    put_asides(directory).max().map(|name| directory.path().join(name))
}

/// The names that [`put_aside`] gave: a copy that a person made beside them is not one.
fn put_asides(directory: &DataDir) -> impl Iterator<Item = String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    directory
        .names()
        .unwrap_or_default()
        .into_iter()
        .filter(move |name| name.strip_prefix(ASIDE).is_some_and(|times| times.splitn(2, '-').all(is_number)))
}

/// What was taken over.
#[derive(Debug, Default)]
pub(super) struct Salvaged {
    pub(super) events: u64,
    /// What could not be read, from where to where, as far as it was not delivered before all that could.
    pub(super) lost: Vec<(u64, u64)>,
}

/// Copies all readable rows of the database `aside` in `directory` into the empty database `into`. A write error ends
/// the copy; rows copied before stay.
pub(super) fn salvage(directory: &DataDir, aside: &str, into: &mut Connection) -> Salvaged {
    let mut salvaged = Salvaged::default();
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let Ok(path) = directory.database(aside) else { return salvaged };
    let Ok(from) = Connection::open_with_flags(path, flags) else { return salvaged };
    // Else a file that is shorter than it says is not looked into at all.
    if from.pragma_update(None, "writable_schema", true).is_err() {
        return salvaged;
    }
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
    let noted =
        |key| super::store::get(into, key).ok().flatten().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let (cursor, last) = (noted("cursor"), noted("last"));
    let mut after = 0;
    loop {
        let copied = match copy_events(&from, into, after) {
            Ok(copied) => copied,
            Err(error) => {
                tracing::error!(%error, "what is left of the damaged journal cannot be written");
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
        // Before the first that can be read there may be some that are gone for their age; what was delivered may be.
        let from_seq = if after > 0 { after } else { cursor } + 1;
        if let Some(next) = damaged.then(|| beyond(&from, after)).flatten() {
            salvaged.lost.push((from_seq, next - 1));
            after = next - 1;
            continue;
        }
        if damaged || after > 0 {
            // There were some up to the last that was noted; without damage none may be left for their age.
            salvaged.lost.push((from_seq, last));
        }
        return salvaged;
    }
}

/// What one transaction took over.
#[derive(Default)]
struct Copied {
    count: u64,
    /// The last event that was read; `None` if there was none.
    through: Option<u64>,
    /// Those that were read and are no events.
    garbled: Vec<u64>,
    /// Why there were no more.
    error: Option<rusqlite::Error>,
}

/// As much of an event as tells that it is one.
#[derive(Deserialize)]
struct Head {
    seq: u64,
}

/// One transaction of events. An error is one of writing.
fn copy_events(from: &Connection, into: &mut Connection, after: u64) -> rusqlite::Result<Copied> {
    let transaction = into.transaction()?;
    let (mut copied, mut failed) = (Copied::default(), None);
    let read = {
        let mut insert = transaction.prepare_cached(
            "INSERT OR IGNORE INTO events (seq, at, type, team, user, instance, server, body)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?;
        chunk(from, after, STEP, |row| {
            let (body, at, facets) = (row.body()?, row.at()?, row.facets());
            copied.through = Some(row.seq);
            if serde_json::from_str::<Head>(body).is_ok_and(|head| head.seq == row.seq) {
                let Facets { kind, team, user, instance, server } = facets;
                let inserted = insert.execute(params![number(row.seq), at, kind, team, user, instance, server, body]);
                copied.count += 1;
                inserted.map(drop).map_err(|error| {
                    failed = Some(error);
                    rusqlite::Error::InvalidQuery
                })
            } else {
                copied.garbled.push(row.seq);
                Ok(())
            }
        })
    };
    if let Some(error) = failed {
        return Err(error);
    }
    transaction.commit()?;
    copied.error = read.err();
    Ok(copied)
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
