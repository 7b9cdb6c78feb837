//! Records of connections with the backups of the edited files, in the directory `clients` of a data directory.

use std::io;
use std::path::Path;

use mcp_satellite_clients::{Client, ConnectRecord, ContentHash, FILE_SIZE_MAX};

use crate::data_dir::DataDir;

const DIRECTORY: &str = "clients";
/// Maximum size of a record in bytes.
const RECORD_MAX: u64 = 1 << 20;

/// A connection as it is stored.
pub(super) struct StoredConnection {
    pub(super) record: ConnectRecord,
    /// The file before the edit; `None` if it did not exist or the backup is missing.
    pub(super) backup: Option<Vec<u8>>,
}

/// The records of one data directory.
#[derive(Clone)]
pub(super) struct ConnectRecords(DataDir);

impl ConnectRecords {
    /// Opens the records in `data_dir`, and creates their directory.
    pub(super) fn create(data_dir: &DataDir) -> io::Result<Self> {
        data_dir.create_or_open_subdirectory(DIRECTORY).map(Self)
    }

    /// Opens the records in the data directory at `path`; `None` if there are none.
    pub(super) fn open(path: &Path) -> Option<Self> {
        DataDir::open(path).ok()?.open_subdirectory(DIRECTORY).ok().map(Self)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns the connections of a client. `damaged` receives the name and the error of each record that cannot be read,
    /// and decides whether the others count.
    pub(super) fn connections<E: From<io::Error>>(
        &self,
        client: Client,
        damaged: impl Fn(&str, io::Error) -> Result<(), E>,
    ) -> Result<Vec<StoredConnection>, E> {
        let mut found = Vec::new();
        let is_record =
            |name: &&String| name.strip_suffix(".json").is_some_and(|key| key.starts_with(<&str>::from(client)));
        for name in self.0.names()?.iter().filter(is_record) {
            match self.connection(name) {
                Ok(Some(connection)) if connection.record.client == client => found.push(connection),
                Ok(_) => {}
                Err(error) => damaged(name, error)?,
            }
        }
        Ok(found)
    }

    fn connection(&self, name: &str) -> io::Result<Option<StoredConnection>> {
        let Some(text) = self.0.read(name, RECORD_MAX)? else { return Ok(None) };
        let record: ConnectRecord = serde_json::from_slice(&text)?;
        let backup = match &record.before {
            Some(before) => self.0.read(&before.name, FILE_SIZE_MAX as u64)?,
            None => None,
        };
        Ok(Some(StoredConnection { record, backup }))
    }

    /// Stores a connection, in place of an earlier one of the same client and file.
    pub(super) fn store(&self, StoredConnection { record, backup }: &StoredConnection) -> io::Result<()> {
        if let (Some(before), Some(backup)) = (&record.before, backup) {
            self.0.replace(&before.name, backup)?;
        }
        self.0.replace(&record_name(record.client, &record.path), &serde_json::to_vec_pretty(record)?)?;
        if record.before.is_none() {
            self.0.remove(&backup_name(record.client, &record.path))?;
        }
        Ok(())
    }

    /// Removes a connection with its backup.
    pub(super) fn remove(&self, client: Client, path: &Path) -> io::Result<()> {
        self.0.remove(&record_name(client, path))?;
        self.0.remove(&backup_name(client, path))?;
        Ok(())
    }
}

/// Returns the name of the record of a connection.
pub(super) fn record_name(client: Client, path: &Path) -> String {
    format!("{}.json", key(client, path))
}

/// Returns the name of the backup of a file.
pub(super) fn backup_name(client: Client, path: &Path) -> String {
    format!("{}.backup", key(client, path))
}

/// Returns the name of a connection. A client can be connected in several files, for example of projects.
fn key(client: Client, path: &Path) -> String {
    let hash = ContentHash::of(path.as_os_str().as_encoded_bytes());
    format!("{client}-{}", &hash.as_str()[..16])
}
