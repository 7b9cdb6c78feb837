//! Single values in the database, as JSON under a key.

use rusqlite::{Connection, OptionalExtension, ToSql};
use serde::Serialize;

pub(super) fn get(connection: &Connection, key: &str) -> rusqlite::Result<Option<String>> {
    connection.prepare_cached("SELECT value FROM meta WHERE key = ?1")?.query_row([key], |row| row.get(0)).optional()
}

pub(super) fn set(connection: &Connection, key: &str, value: &impl Serialize) -> rusqlite::Result<()> {
    let value = serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
    let mut upsert = connection.prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)")?;
    upsert.execute([&key as &dyn ToSql, &value])?;
    Ok(())
}
