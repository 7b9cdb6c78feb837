//! Types and paths of the journal that its files share.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_files::data_dir::{DataDir, FileStat};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::disk_monitor::DiskMonitor;
use crate::durations::DurationTotals;

pub(super) const DIRECTORY: &str = "journal";
pub(super) const DATABASE: &str = "journal.db";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum JournalState {
    #[default]
    Ok,
    /// The disk accepts nothing; events stay in memory and the journal retries.
    Memory,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct JournalStatus {
    pub path: PathBuf,
    pub state: JournalState,
    pub reason: Option<String>,
    /// Last event up to which all events are stored, or were stored before they were pruned; 0 if there is none.
    pub journalled_through: u64,
    pub first_seq: Option<u64>,
    pub last_seq: Option<u64>,
    /// Number of events still to be delivered, estimated by their numbers; 0 if there is no delivery.
    pub backlog: u64,
    pub bytes: u64,
    /// Path of the last damaged database that was put aside.
    pub damaged: Option<PathBuf>,
    pub pruned_unsent: u64,
    /// Number of instances whose history could not be read when they were installed and was not taken into account.
    #[serde(default)]
    pub memos_missed: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// The disk does not accept the operation at present. The next call tries again.
    #[error("{0}")]
    Unavailable(String),
    #[error("the journal is closed")]
    Closed,
}

/// A batch that is being delivered, or was when the satellite was killed. The same events are sent again under the same
/// id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchInFlight {
    pub id: u64,
    pub first: u64,
    pub last: u64,
    /// Numbers in this range that are not part of the batch, because the backend refused the events permanently.
    #[serde(default)]
    pub refused: Vec<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeliveryState {
    /// Last event up to which all events are accepted, permanently refused or lost.
    pub cursor: u64,
    pub sending: Option<BatchInFlight>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandRecord {
    Started,
    /// Execution is complete; contains the result as JSON.
    Done(String),
}

pub fn directory(data_dir: &Path) -> PathBuf {
    data_dir.join(DIRECTORY)
}

pub fn database(data_dir: &Path) -> PathBuf {
    directory(data_dir).join(DATABASE)
}

#[derive(Debug, Clone)]
pub(super) enum JournalHome {
    Open(DataDir),
    /// Path that a host gave. It is opened for each access, because the directory may be created or replaced later.
    Named(PathBuf),
}

impl JournalHome {
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Open(directory) => directory.path(),
            Self::Named(path) => path,
        }
    }

    pub(super) fn directory(&self) -> io::Result<DataDir> {
        match self {
            Self::Open(directory) => directory.create_or_open_subdirectory(DIRECTORY),
            Self::Named(path) => DataDir::create(path)?.create_or_open_subdirectory(DIRECTORY),
        }
    }

    /// Returns device, inode and length of the database, or of the file beside it with this suffix.
    pub(super) fn stat(&self, suffix: &str) -> Option<FileStat> {
        let name = Path::new(DIRECTORY).join(format!("{DATABASE}{suffix}"));
        match self {
            Self::Open(directory) => directory.stat(name),
            Self::Named(path) => {
                let found = std::fs::symlink_metadata(path.join(name)).ok()?;
                Some(FileStat { identity: (found.dev(), found.ino()), len: found.len() })
            }
        }
    }
}

/// Latest memo of each instance; `None` deletes it.
pub type Memos = HashMap<InstanceId, Option<String>>;

pub type JournalClock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// Hook for memos that could not be read at the start. Returns the memos to store in their place, and the number of
/// instances whose history was not taken into account.
pub(super) type OnMemos = Box<dyn Fn(HashMap<InstanceId, String>) -> (Memos, u64) + Send>;

pub(super) type OnDropped = Box<dyn Fn(u64, u64) + Send>;

pub(super) struct JournalShared {
    pub(super) status: watch::Sender<JournalStatus>,
    pub(super) appended: watch::Sender<u64>,
    pub(super) next_seq: u64,
    pub(super) memos: HashMap<InstanceId, String>,
    pub(super) pending_memos: Mutex<HashMap<InstanceId, Option<String>>>,
    pub(super) memo_job_queued: AtomicBool,
    pub(super) has_delivery: AtomicBool,
    pub(super) on_dropped: Mutex<Option<OnDropped>>,
    pub(super) on_memos: Mutex<Option<OnMemos>>,
    pub(super) memos_unread: AtomicBool,
    pub(super) disk_monitor: Arc<DiskMonitor>,
    pub(super) write_times: DurationTotals,
}
