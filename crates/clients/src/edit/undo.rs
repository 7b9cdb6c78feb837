//! The record of a connection, and its reversal.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::entry::{ENTRY_NAME, SatelliteEntry};
use super::error::EditError;
use super::{ClientConfig, EntryState};
use crate::Client;

/// The SHA-256 of a file, in hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentHash(String);

impl ContentHash {
    /// Returns the hash of the contents of a file.
    pub fn of(contents: &[u8]) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, contents);
        Self(digest.as_ref().iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}")))
    }

    /// Returns the 64 hexadecimal digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The backup of a file. The caller writes it before the edit, with mode 0600: it can contain secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreBackup {
    /// Name of the backup in the satellite's directory of backups.
    pub name: String,
    /// Hash of its contents.
    pub hash: ContentHash,
}

/// A connection of a client: what disconnect needs to restore the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectRecord {
    /// The client.
    #[serde(with = "client_name")]
    pub client: Client,
    /// The file that was edited.
    pub path: PathBuf,
    /// The endpoint of an HTTP entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The file before the edit; `None` if connect created it.
    pub before: Option<RestoreBackup>,
    /// Hash of the file after the edit.
    pub after: ContentHash,
    /// Names of the servers that `connect --replace` removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<String>,
}

impl ConnectRecord {
    /// Returns the record of an edit. `before` is the name of the backup and the contents of the file before the edit.
    pub fn new(
        client: Client,
        path: PathBuf,
        entry: &SatelliteEntry,
        before: Option<(String, &[u8])>,
        after: &[u8],
        replaced: Vec<String>,
    ) -> Self {
        let before = before.map(|(name, contents)| RestoreBackup { name, hash: ContentHash::of(contents) });
        Self { client, path, url: entry.url().map(str::to_owned), before, after: ContentHash::of(after), replaced }
    }
}

/// The effect of disconnect on the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undo {
    /// Nobody else changed the file: write these bytes, which are the file before connect.
    Restore(Vec<u8>),
    /// Nobody else changed the file, and connect created it: delete it.
    Delete,
    /// Only our entry is removed, and the replaced servers return: write these bytes and report the remainder.
    RemoveOnly {
        /// The file without our entry, and with the replaced servers again.
        contents: Vec<u8>,
        /// Why the file was not restored as a whole.
        reason: UndoRemainder,
        /// Names of the servers that `connect --replace` had removed and that the file contains again.
        returned: Vec<String>,
        /// Names of the servers that `connect --replace` had removed and that the user adds again from the backup.
        missing: Vec<String>,
    },
    /// The file does not contain our entry, and no replaced server is missing.
    NothingToDo,
}

/// The reason why a file is not restored byte for byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum UndoRemainder {
    /// Somebody changed the file after connect.
    #[strum(serialize = "the file was changed after `satellite connect`")]
    FileChanged,
    /// The backup is missing or damaged.
    #[strum(serialize = "the backup is missing or damaged")]
    BackupUnusable,
}

/// Reverses a connection. `current` is the file now (`None`: it does not exist), `backup` the backup named in the record.
///
/// Servers that `connect --replace` removed return even if somebody else has removed our entry or the file since.
pub fn disconnect(record: &ConnectRecord, current: Option<&[u8]>, backup: Option<&[u8]>) -> Result<Undo, EditError> {
    let intact_backup = |before: &RestoreBackup| backup.filter(|backup| ContentHash::of(backup) == before.hash);
    let backup = record.before.as_ref().and_then(intact_backup);
    let is_unchanged = current.is_some_and(|current| ContentHash::of(current) == record.after);
    match (&record.before, backup) {
        (None, _) if is_unchanged => return Ok(Undo::Delete),
        (Some(_), Some(backup)) if is_unchanged => return Ok(Undo::Restore(backup.to_vec())),
        _ => {}
    }
    let mut config = ClientConfig::read(record.client, current)?;
    match config.state(record.url.as_deref())? {
        EntryState::NotConnected if record.replaced.is_empty() => return Ok(Undo::NothingToDo),
        EntryState::NotConnected => {}
        EntryState::Connected { .. } => config.remove(ENTRY_NAME)?,
        // The user's own server of this name, which connect did not replace in the end or which the user added again.
        EntryState::ForeignEntry if record.replaced.iter().any(|name| name == ENTRY_NAME) => {}
        EntryState::ForeignEntry => return Err(EditError::ForeignEntry { key: config.section.key }),
    }
    let original = backup.and_then(|backup| ClientConfig::read(record.client, Some(backup)).ok());
    let (mut returned, mut missing) = (Vec::new(), Vec::new());
    for name in &record.replaced {
        let server =
            original.as_ref().and_then(|original| Some((original.table_of(name), original.server(name).ok()??)));
        // A server of this name that the user added since stays as it is.
        let is_present = matches!(config.server(name), Ok(Some(_)));
        if is_present || server.is_some_and(|(table, server)| config.set(&table, name, server).is_ok()) {
            returned.push(name.clone());
        } else {
            missing.push(name.clone());
        }
    }
    let reason = if is_unchanged { UndoRemainder::BackupUnusable } else { UndoRemainder::FileChanged };
    let contents = config.into_bytes();
    if missing.is_empty() && current == Some(&contents[..]) {
        return Ok(Undo::NothingToDo);
    }
    Ok(Undo::RemoveOnly { contents, reason, returned, missing })
}

/// The name of a client on the command line as its form in a record.
mod client_name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::Client;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde prescribes the signature")]
    pub(super) fn serialize<S: Serializer>(client: &Client, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(client)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Client, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(|_| D::Error::custom(format!("unknown client `{name}`")))
    }
}
