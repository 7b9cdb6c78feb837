//! The schema of the database and its migrations. Each migration is one transaction that also sets the version. A
//! released migration is never changed; changes are added as another one.

use rusqlite::{Connection, TransactionBehavior};

pub(super) const MIGRATIONS: &[&str] = &[VERSION_1, VERSION_2];

/// First version whose events may be in blocks.
pub(super) const WITH_BLOCKS: usize = 2;

/// First schema. `body` is the whole event as it is sent; the other columns are for queries. Times are milliseconds
/// since 1970, from the events and lines.
const VERSION_1: &str = "
CREATE TABLE events (
  seq      INTEGER PRIMARY KEY,
  at       INTEGER NOT NULL,
  type     TEXT NOT NULL,
  team     TEXT,
  user     TEXT,
  instance TEXT,
  server   TEXT,
  body     TEXT NOT NULL
) STRICT;
CREATE TABLE server_logs (
  n            INTEGER PRIMARY KEY,
  seq          INTEGER NOT NULL,
  at           INTEGER NOT NULL,
  team         TEXT NOT NULL,
  user         TEXT NOT NULL,
  installation TEXT NOT NULL,
  instance     TEXT NOT NULL,
  server       TEXT NOT NULL,
  body         TEXT NOT NULL
) STRICT;
CREATE INDEX server_logs_of ON server_logs (instance, n);
CREATE TABLE request_logs (
  n            INTEGER PRIMARY KEY,
  seq          INTEGER NOT NULL,
  at           INTEGER NOT NULL,
  team         TEXT NOT NULL,
  user         TEXT NOT NULL,
  installation TEXT NOT NULL,
  instance     TEXT NOT NULL,
  server       TEXT NOT NULL,
  body         TEXT NOT NULL
) STRICT;
CREATE INDEX request_logs_of ON request_logs (instance, n);
CREATE TABLE memos (
  team         TEXT NOT NULL,
  user         TEXT NOT NULL,
  installation TEXT NOT NULL,
  body         TEXT NOT NULL,
  PRIMARY KEY (team, user, installation)
) STRICT, WITHOUT ROWID;
CREATE TABLE commands (
  id     TEXT PRIMARY KEY,
  at     INTEGER NOT NULL,
  result TEXT
) STRICT, WITHOUT ROWID;
CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
";

/// Rows with several events. `block` contains the events `first` to `seq`, see the module `block`; the other columns of
/// such a row are empty, except for `at`, the time of its last event. The tables of lines contain the lines of events up
/// to `lines_through`; later lines are only in their events.
const VERSION_2: &str = "
ALTER TABLE events ADD COLUMN first INTEGER;
ALTER TABLE events ADD COLUMN block BLOB;
INSERT OR REPLACE INTO meta SELECT 'lines_through', CAST(coalesce(max(seq), 0) AS TEXT) FROM events;
";

#[derive(Debug, thiserror::Error)]
pub(crate) enum SchemaError {
    #[error("written by a newer satellite (table version {found}, this satellite supports {known})")]
    Newer { found: usize, known: usize },
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    File(#[from] std::io::Error),
}

/// Returns the version of a database with these migrations; 0 if it is empty.
pub(crate) fn version(connection: &Connection, migrations: &[&str]) -> Result<usize, SchemaError> {
    let known = migrations.len();
    let found = connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))?;
    // The satellite never writes a negative version, so the database is not its own.
    let found = usize::try_from(found).unwrap_or(usize::MAX);
    if found > known { Err(SchemaError::Newer { found, known }) } else { Ok(found) }
}

/// Applies the migrations that a database lacks.
pub(crate) fn migrate(connection: &mut Connection, migrations: &[&str]) -> Result<(), SchemaError> {
    let found = version(connection, migrations)?;
    for (at, migration) in migrations.iter().enumerate().skip(found) {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        transaction.execute_batch(migration)?;
        transaction.pragma_update(None, "user_version", i64::try_from(at + 1).unwrap_or(i64::MAX))?;
        transaction.commit()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "CREATE TABLE one (a INTEGER) STRICT; INSERT INTO one VALUES (7);";

    fn version_of(connection: &Connection) -> i64 {
        connection.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
    }

    #[test]
    fn each_migration_is_applied_once_and_keeps_data() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, &[ONE]).unwrap();
        assert_eq!(version_of(&connection), 1);
        let two = "ALTER TABLE one ADD COLUMN b INTEGER; UPDATE one SET b = a + 1;";
        migrate(&mut connection, &[ONE, two]).unwrap();
        migrate(&mut connection, &[ONE, two]).unwrap();
        assert_eq!(version_of(&connection), 2);
        let row = connection.query_row("SELECT a, b FROM one", [], |row| Ok((row.get(0)?, row.get(1)?)));
        assert_eq!(row, Ok((7, 8)));
    }

    #[test]
    fn a_failed_migration_is_rolled_back() {
        let mut connection = Connection::open_in_memory().unwrap();
        let broken = "ALTER TABLE one ADD COLUMN b INTEGER; UPDATE one SET c = 1;";
        assert!(matches!(migrate(&mut connection, &[ONE, broken]), Err(SchemaError::Sqlite(_))));
        assert_eq!(version_of(&connection), 1);
        assert!(connection.prepare("SELECT b FROM one").is_err(), "the first half of the step is rolled back");
        migrate(&mut connection, &[ONE, "ALTER TABLE one ADD COLUMN b INTEGER"]).unwrap();
        assert_eq!(version_of(&connection), 2);
    }

    #[test]
    fn an_unknown_version_is_rejected() {
        let mut connection = Connection::open_in_memory().unwrap();
        for (set, found) in [(i64::try_from(MIGRATIONS.len()).unwrap() + 1, MIGRATIONS.len() + 1), (-1, usize::MAX)] {
            connection.pragma_update(None, "user_version", set).unwrap();
            let error = migrate(&mut connection, MIGRATIONS).unwrap_err();
            assert!(matches!(error, SchemaError::Newer { found: told, .. } if told == found), "{error}");
        }
    }
}
