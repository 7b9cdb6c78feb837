//! `DIR/state.db`: data that cannot be rebuilt or is secret, in an embedded database that only its owner can read.
//!
//! ```text
//!  values, grants, … ── set ──► pending ── save ──► one thread ──► state.db   WAL, synchronous=FULL
//!  at the start     ── load ──► table, with pending changes
//!  first start      ── files of the previous version (`import`) ──► pending
//! ```
//!
//! Only that thread writes. Its callers wait for it at most [`WAIT_MAX`](mcp_satellite_files::disk::WAIT_MAX); changes
//! that are not written yet stay pending and are written when the disk works. Deleted content is overwritten with
//! zeros, and the write-ahead log, which would keep it, is emptied after each change and at the start. A damaged or
//! newer database is never replaced: loading fails, and nothing is written, until a person repairs or removes the file.

mod import;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mcp_satellite_actors::model::ids::InstanceId;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, Transaction, TransactionBehavior, ffi};
use rusqlite::{params_from_iter, types::Value};

use self::import::ImportedRows;
use crate::journal::read::is_damage;
use crate::journal::schema::{self, SchemaError};
use mcp_satellite_files::data_dir::{DataDir, OpenMode};
use mcp_satellite_files::disk::{DiskSaver, NotSaved};

pub const DATABASE: &str = "state.db";
/// Timeout for locks of other processes. Only the satellite writes, so this is a person with a tool.
const BUSY_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes that are written to check whether the disk accepts a change.
const PROBE_BYTES: usize = 4096;

const MIGRATIONS: &[&str] = &[VERSION_1];

/// First schema. `imported` names the tables that contain the files of the previous version.
const VERSION_1: &str = "
CREATE TABLE user_values (
  team TEXT NOT NULL, user TEXT NOT NULL, installation TEXT NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (team, user, installation)
) STRICT;
CREATE TABLE erasures (
  team TEXT NOT NULL, user TEXT NOT NULL, installation TEXT NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (team, user, installation)
) STRICT;
CREATE TABLE grants (
  team TEXT NOT NULL, user TEXT NOT NULL, installation TEXT NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (team, user, installation)
) STRICT;
CREATE TABLE catalogues (name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE keys (name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE backend_document (name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE imported (name TEXT PRIMARY KEY) STRICT;
";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateTable {
    /// Values that users have set: for each instance a JSON object.
    UserValues,
    /// Removed instances whose data is erased later: for each the time of its removal.
    Erasures,
    /// OAuth grants, as JSON.
    Grants,
    /// Cached catalogues by the name of their configuration, as JSON.
    Catalogues,
    /// Keys of the satellite; see [`StateKey::CATALOGUES`] and [`StateKey::BACKEND`].
    Keys,
    /// Last configuration of the backend, as JSON.
    BackendDocument,
}

impl StateTable {
    const ALL: [Self; 6] =
        [Self::UserValues, Self::Erasures, Self::Grants, Self::Catalogues, Self::Keys, Self::BackendDocument];

    fn name(self) -> &'static str {
        match self {
            Self::UserValues => "user_values",
            Self::Erasures => "erasures",
            Self::Grants => "grants",
            Self::Catalogues => "catalogues",
            Self::Keys => "keys",
            Self::BackendDocument => "backend_document",
        }
    }

    /// Columns of the primary key, and as many placeholders.
    fn key_columns(self) -> (&'static str, &'static str) {
        match self {
            Self::UserValues | Self::Erasures | Self::Grants => ("team, user, installation", "?, ?, ?"),
            Self::Catalogues | Self::Keys | Self::BackendDocument => ("name", "?"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StateKey {
    Instance(InstanceId),
    Name(String),
}

impl StateKey {
    /// Key that names configurations in the catalogues and memos.
    pub const CATALOGUES: &'static str = "catalogues";
    /// Key and configuration of the satellite at its backend.
    pub const BACKEND: &'static str = "backend";

    fn columns(&self) -> Vec<Value> {
        match self {
            Self::Instance(id) => {
                [id.team.as_str(), id.user.as_str(), id.installation.as_str()].map(|text| text.to_owned().into()).into()
            }
            Self::Name(name) => vec![name.clone().into()],
        }
    }

    /// Reads the columns of a row. The body follows them.
    fn from_row(table: StateTable, row: &Row<'_>) -> rusqlite::Result<(Self, usize)> {
        let text = |at| row.get::<_, String>(at);
        Ok(match table {
            StateTable::UserValues | StateTable::Erasures | StateTable::Grants => {
                (InstanceId::new(text(0)?.into(), text(1)?.into(), text(2)?.into()).into(), 3)
            }
            StateTable::Catalogues | StateTable::Keys | StateTable::BackendDocument => (Self::Name(text(0)?), 1),
        })
    }
}

impl From<InstanceId> for StateKey {
    fn from(id: InstanceId) -> Self {
        Self::Instance(id)
    }
}

impl From<&str> for StateKey {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

/// Rows of a table. They contain secrets, so they are never formatted with `Debug`.
pub type StateRows = BTreeMap<StateKey, Vec<u8>>;

/// Handle to the database of a data directory. Clones are cheap; the thread ends when the last one is dropped.
#[derive(Clone)]
pub struct StateDb {
    shared: Arc<StateShared>,
    saver: Arc<DiskSaver>,
}

struct StateShared {
    directory: DataDir,
    /// Locked while waiting for the disk.
    database: Mutex<Option<OpenDatabase>>,
    /// Never locked while waiting for the disk. May be locked after `database`, not before.
    pending: Mutex<PendingState>,
}

struct OpenDatabase {
    connection: Connection,
    /// Device and inode, to detect that the file was removed or replaced.
    identity: Option<(u64, u64)>,
}

#[derive(Default)]
struct PendingState {
    imports: BTreeMap<StateTable, ImportedRows>,
    changes: BTreeMap<(StateTable, StateKey), Option<Vec<u8>>>,
}

impl StateDb {
    /// Opens the database of a data directory, and imports the files of the previous version at the first start. Blocks
    /// on the disk. A database that cannot be used is reported by [`StateDb::load`].
    ///
    /// # Errors
    ///
    /// Fails only if no thread can be started.
    pub fn open(directory: &DataDir) -> io::Result<Self> {
        let shared = Arc::new(StateShared {
            directory: directory.clone(),
            database: Mutex::default(),
            pending: Mutex::default(),
        });
        let writer = Arc::clone(&shared);
        let saver = Arc::new(DiskSaver::start(DATABASE, move || writer.write())?);
        for table in StateTable::ALL {
            // The module that loads this table reports the error.
            let _ = shared.import(table);
        }
        if !shared.pending().imports.is_empty() {
            // An error is logged and the import tried again; until then the rows are pending.
            let _ = saver.save();
        }
        Ok(Self { shared, saver })
    }

    /// Returns all rows of a table, pending changes included. Blocks on the disk.
    ///
    /// # Errors
    ///
    /// Returns the file that cannot be used, with the reason. Contains nothing of the content.
    pub fn load(&self, table: StateTable) -> Result<StateRows, String> {
        self.shared.import(table)?;
        // Held to the end, because the writer moves pending rows into the database.
        let mut database = self.shared.database();
        let mut rows = self.shared.read(&mut database, |connection| read_rows(connection, table))?;
        let pending = self.shared.pending();
        for (key, body) in pending.imports.get(&table).iter().flat_map(|imported| &imported.rows) {
            rows.entry(key.clone()).or_insert_with(|| body.clone());
        }
        for ((_, key), body) in pending.changes.iter().filter(|((of, _), _)| *of == table) {
            match body {
                Some(body) => rows.insert(key.clone(), body.clone()),
                None => rows.remove(key),
            };
        }
        Ok(rows)
    }

    /// Returns one row as [`StateDb::load`] does.
    pub fn load_row(&self, table: StateTable, key: &StateKey) -> Result<Option<Vec<u8>>, String> {
        self.shared.import(table)?;
        let mut database = self.shared.database();
        let stored = self.shared.read(&mut database, |connection| read_row(connection, table, key))?;
        let pending = self.shared.pending();
        let imported = || pending.imports.get(&table).and_then(|imported| imported.rows.get(key).cloned());
        let changed = pending.changes.get(&(table, key.clone())).cloned();
        Ok(changed.unwrap_or_else(|| stored.or_else(imported)))
    }

    /// Returns the keys of all rows that are stored. Blocks on the disk.
    pub fn keys(&self, table: StateTable) -> Result<Vec<StateKey>, String> {
        self.shared.read(&mut self.shared.database(), |connection| read_keys(connection, table))
    }

    /// Sets or, with `None`, deletes a row. It is written with the next [`StateDb::save`]. Does not block.
    pub fn set(&self, table: StateTable, key: impl Into<StateKey>, body: Option<Vec<u8>>) {
        self.shared.pending().changes.insert((table, key.into()), body);
    }

    /// Writes all pending changes and waits for that, but not for a hanging disk. After an error the changes stay
    /// pending and are tried again.
    pub fn save(&self) -> Result<(), NotSaved> {
        self.saver.save()
    }

    /// Checks that the disk accepts changes now. Blocks as [`StateDb::save`] does.
    pub fn check_writable(&self) -> Result<(), NotSaved> {
        const PROBE: &str = "probe";
        self.set(StateTable::Keys, PROBE, Some(vec![b' '; PROBE_BYTES]));
        let written = self.save();
        self.set(StateTable::Keys, PROBE, None);
        written.and_then(|()| self.save())
    }
}

impl StateShared {
    fn pending(&self) -> MutexGuard<'_, PendingState> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn database(&self) -> MutexGuard<'_, Option<OpenDatabase>> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `read` on the database. Returns the default if nothing was written yet.
    fn read<T: Default>(
        &self,
        database: &mut Option<OpenDatabase>,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, String> {
        if self.directory.stat(DATABASE).is_none_or(|found| found.len == 0) {
            return Ok(T::default());
        }
        let opened = self.ensure_open(database).and_then(|connection| {
            if schema::version(connection, MIGRATIONS)? == 0 { Ok(T::default()) } else { Ok(read(connection)?) }
        });
        opened.map_err(|error| import::unusable_file(&self.directory, DATABASE, &error))
    }

    /// Reads the files of the previous version that contained this table, unless that was done before.
    fn import(&self, table: StateTable) -> Result<(), String> {
        // Held to the end: otherwise the writer could remove an entry from a file that is being read, and the entry
        // would come back.
        let mut database = self.database();
        let imported = self.read(&mut database, |connection| {
            let sql = "SELECT 1 FROM imported WHERE name = ?1";
            Ok(connection.query_row(sql, [table.name()], |_| Ok(())).optional()?.is_some())
        })?;
        if !imported && !self.pending().imports.contains_key(&table) {
            let rows = import::read(&self.directory, table)?;
            self.pending().imports.insert(table, rows);
        }
        Ok(())
    }

    fn write(&self) -> io::Result<()> {
        let mut database = self.database();
        let unusable = |error: SchemaError| io::Error::other(import::unusable_file(&self.directory, DATABASE, &error));
        let connection = self.ensure_open(&mut database).map_err(unusable)?;
        schema::migrate(connection, MIGRATIONS).map_err(unusable)?;
        let PendingState { imports, changes } = std::mem::take(&mut *self.pending());
        let imported = write_imports(connection, &imports);
        if imported.is_err() {
            self.pending().imports.extend(imports);
        }
        // Before the change, because the imported row is stored and the old file must not keep an erased secret.
        let forget = || {
            changes.keys().try_for_each(|(table, key)| match import::forget(&self.directory, *table, key) {
                // It contains no value of a user and must not prevent that other rows are stored.
                Err(error) if *table == StateTable::Catalogues => {
                    tracing::warn!(%error, "a cached catalogue of the previous version stays");
                    Ok(())
                }
                outcome => outcome,
            })
        };
        let written = imported
            .map_err(io::Error::other)
            .and_then(|()| forget())
            .and_then(|()| write_changes(connection, &changes).map_err(io::Error::other));
        // The changes are stored in any case, so an error is not one of the change; the next one or the next start
        // tries again.
        match empty_log(connection) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                "another program reads the state database, so erased content stays in it until the next change; close \
                 that program"
            ),
            Err(error) => tracing::warn!(%error, "cannot empty the write-ahead log of the state database now"),
        }
        if written.is_err() {
            let mut pending = self.pending();
            for (row, body) in changes {
                // A change that was made meanwhile is newer.
                pending.changes.entry(row).or_insert(body);
            }
        }
        written
    }

    fn ensure_open<'a>(&self, slot: &'a mut Option<OpenDatabase>) -> Result<&'a mut Connection, SchemaError> {
        let found = self.directory.stat(DATABASE).map(|found| found.identity);
        if slot.take_if(|open| open.identity != found).is_some() {
            tracing::error!(file = DATABASE, "the state database was removed or replaced; only new changes are stored");
        }
        let open = match slot.take() {
            Some(open) => open,
            None => self.open_database("normal").or_else(|error| match error {
                // On a full disk there is no room for the memory that connections share.
                SchemaError::Sqlite(error) if !is_damage(&error) => self.open_database("exclusive"),
                error => Err(error),
            })?,
        };
        Ok(&mut slot.insert(open).connection)
    }

    fn open_database(&self, locking_mode: &str) -> Result<OpenDatabase, SchemaError> {
        if self.directory.stat(DATABASE).is_none() {
            // Created here so that only its owner has access. SQLite copies the permissions to its log. An existing
            // file is not opened, because closing it would release SQLite's locks on it.
            drop(self.directory.open_file(DATABASE, OpenMode::Write)?);
        }
        let flags =
            OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
        let connection = Connection::open_with_flags(self.directory.database_path(DATABASE)?, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.pragma_update_and_check(None, "locking_mode", locking_mode, |_| Ok(()))?;
        schema::version(&connection, MIGRATIONS)?;
        connection.pragma_update(None, "trusted_schema", false)?;
        connection.pragma_update(None, "cell_size_check", true)?;
        let damage = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get::<_, String>(0))?;
        if damage != "ok" {
            return Err(rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_CORRUPT), Some(damage)).into());
        }
        connection.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()))?;
        connection.pragma_update(None, "synchronous", "full")?;
        connection.pragma_update_and_check(None, "secure_delete", true, |_| Ok(()))?;
        // A satellite that was killed after a change has not overwritten the erased content. On a full disk the next
        // change does it.
        let _ = empty_log(&connection);
        Ok(OpenDatabase { connection, identity: self.directory.stat(DATABASE).map(|found| found.identity) })
    }
}

/// Moves the write-ahead log into the database. Returns false if another program prevents that.
fn empty_log(connection: &Connection) -> rusqlite::Result<bool> {
    let is_blocked = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, i64>(0))?;
    Ok(is_blocked == 0)
}

fn read_rows(connection: &Connection, table: StateTable) -> rusqlite::Result<StateRows> {
    let (columns, _) = table.key_columns();
    let mut select = connection.prepare(&format!("SELECT {columns}, body FROM {}", table.name()))?;
    let rows = select.query_map([], |row| {
        let (key, body) = StateKey::from_row(table, row)?;
        Ok((key, row.get(body)?))
    })?;
    rows.collect()
}

fn read_keys(connection: &Connection, table: StateTable) -> rusqlite::Result<Vec<StateKey>> {
    let (columns, _) = table.key_columns();
    let mut select = connection.prepare(&format!("SELECT {columns} FROM {}", table.name()))?;
    let keys = select.query_map([], |row| Ok(StateKey::from_row(table, row)?.0))?;
    keys.collect()
}

fn read_row(connection: &Connection, table: StateTable, key: &StateKey) -> rusqlite::Result<Option<Vec<u8>>> {
    let (columns, places) = table.key_columns();
    let sql = format!("SELECT body FROM {} WHERE ({columns}) = ({places})", table.name());
    connection.query_row(&sql, params_from_iter(key.columns()), |row| row.get(0)).optional()
}

fn write_imports(connection: &mut Connection, imports: &BTreeMap<StateTable, ImportedRows>) -> rusqlite::Result<()> {
    if imports.is_empty() {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for (table, ImportedRows { rows, is_complete }) in imports {
        for (key, body) in rows {
            // A row that was stored meanwhile is newer.
            insert(&transaction, "IGNORE", *table, key, body)?;
        }
        if *is_complete {
            transaction.execute("INSERT OR IGNORE INTO imported (name) VALUES (?1)", [table.name()])?;
        }
    }
    transaction.commit()
}

fn write_changes(
    connection: &mut Connection,
    changes: &BTreeMap<(StateTable, StateKey), Option<Vec<u8>>>,
) -> rusqlite::Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for ((table, key), body) in changes {
        if let Some(body) = body {
            insert(&transaction, "REPLACE", *table, key, body)?;
        } else {
            let (columns, places) = table.key_columns();
            let sql = format!("DELETE FROM {} WHERE ({columns}) = ({places})", table.name());
            transaction.prepare_cached(&sql)?.execute(params_from_iter(key.columns()))?;
        }
    }
    transaction.commit()
}

fn insert(
    transaction: &Transaction<'_>,
    conflict: &str,
    table: StateTable,
    key: &StateKey,
    body: &[u8],
) -> rusqlite::Result<()> {
    let (columns, places) = table.key_columns();
    let sql = format!("INSERT OR {conflict} INTO {} ({columns}, body) VALUES ({places}, ?)", table.name());
    let body = Value::from(body.to_vec());
    transaction.prepare_cached(&sql)?.execute(params_from_iter(key.columns().into_iter().chain([body])))?;
    Ok(())
}

#[cfg(test)]
mod tests;
