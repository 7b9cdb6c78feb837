//! Record of this user's data directories in `$XDG_STATE_HOME/mcp-satellite/data-dirs`: those that a satellite created
//! on this machine, and those that a person named. A default data directory that contains files is used only if it was
//! created here, because it may have come with a cloned repository. Commands find running satellites by the same
//! record.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::data_dir::{DataDir, DataDirError};
use crate::user_dirs;

const FILE: &str = "data-dirs";
const ENTRIES_MAX: usize = 1000;
const FILE_MAX: u64 = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct DirectoryEntry {
    device: u64,
    inode: u64,
    /// Time of creation in nanoseconds since 1970; `None` if the file system does not record it. It tells a directory
    /// from a later one that reuses its inode.
    birth: Option<u64>,
    path: PathBuf,
    /// True if a satellite created the directory, false if a person named it.
    created: bool,
}

impl DirectoryEntry {
    fn from_dir(directory: &DataDir, created: bool) -> io::Result<Self> {
        let (device, inode) = directory.identity()?;
        let birth = fs::metadata(directory.descriptor_path(".")).and_then(|found| found.created()).ok();
        let birth = birth.and_then(|birth| birth.duration_since(SystemTime::UNIX_EPOCH).ok());
        let birth = birth.and_then(|birth| u64::try_from(birth.as_nanos()).ok());
        Ok(Self { device, inode, birth, path: directory.path().to_owned(), created })
    }

    /// Returns true if both entries describe the same directory. Some file systems have another device number after
    /// each boot.
    fn is_same(&self, other: &Self) -> bool {
        let born_alike = self.birth.is_some() && self.path == other.path;
        self.inode == other.inode && self.birth == other.birth && (self.device == other.device || born_alike)
    }
}

#[derive(Debug, Clone)]
pub struct DataDirLocation {
    pub path: PathBuf,
    /// True if a person named the directory, or it is in the user's home. A default directory in another place must have
    /// been created here and must not be a link.
    pub is_trusted: bool,
}

impl DataDirLocation {
    pub fn create_or_open(&self) -> io::Result<DataDir> {
        self.refuse_link()?;
        let (directory, created) = DataDir::create_or_open(&self.path)?;
        let is_new = created || directory.names()?.is_empty();
        let record = DirectoryRecord::open();
        if !is_new && !self.is_trusted {
            let is_known = record.as_ref().is_ok_and(|record| record.contains(&directory));
            if !is_known {
                let named = if self.path.is_relative() { Path::new(".").join(&self.path) } else { self.path.clone() };
                return Err(DataDirError::Unknown { path: directory.path().to_owned(), named }.into());
            }
        }
        directory.inspect()?;
        if let Err(error) = record.and_then(|record| record.add(&directory, is_new)) {
            let directory = directory.path().display();
            if self.is_trusted {
                tracing::debug!(%directory, %error, "cannot record the data directory");
            } else {
                tracing::warn!(%directory, %error, "cannot record the data directory; name it at the next start with --data-dir");
            }
        }
        if let Err(error) = directory.write_gitignore() {
            tracing::debug!(%error, "cannot write .gitignore into the data directory");
        }
        Ok(directory)
    }

    /// Returns true if a satellite of this user created the directory on this machine.
    pub fn was_created_here(&self) -> bool {
        let Ok(directory) = self.open_existing() else { return false };
        DirectoryRecord::open().is_ok_and(|record| record.contains(&directory))
    }

    pub fn open_existing(&self) -> io::Result<DataDir> {
        self.refuse_link()?;
        DataDir::open(&self.path)
    }

    fn refuse_link(&self) -> io::Result<()> {
        if !self.is_trusted && self.path.is_symlink() {
            return Err(DataDirError::Link(self.path.clone()).into());
        }
        Ok(())
    }
}

/// Returns the recorded data directories.
pub fn recorded_dirs() -> Vec<PathBuf> {
    let entries = DirectoryRecord::open().map(|record| record.entries()).unwrap_or_default();
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path).collect();
    paths.sort();
    paths.dedup();
    paths
}

struct DirectoryRecord(DataDir);

impl DirectoryRecord {
    fn open() -> io::Result<Self> {
        let home = user_dirs::state_dir().ok_or_else(|| io::Error::other("this user has no home directory"))?;
        DataDir::create(&home).map(Self)
    }

    fn contains(&self, directory: &DataDir) -> bool {
        let Ok(wanted) = DirectoryEntry::from_dir(directory, true) else { return false };
        self.entries().iter().any(|entry| entry.created && entry.is_same(&wanted))
    }

    fn entries(&self) -> Vec<DirectoryEntry> {
        let bytes = self.0.read(FILE, FILE_MAX).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the record of data directories");
            None
        });
        let bytes = bytes.unwrap_or_default();
        bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }

    /// Records a directory. A directory that was recorded as created remains so.
    fn add(&self, directory: &DataDir, created: bool) -> io::Result<()> {
        let lock = File::open(self.0.path())?;
        // If locking fails, two satellites that start at the same moment may lose an entry.
        let _ = flock(&lock, FlockOperation::LockExclusive);
        let mut entries = self.entries();
        let mut added = DirectoryEntry::from_dir(directory, created)?;
        added.created |= entries.iter().any(|entry| entry.created && entry.is_same(&added));
        // Entries are ordered by last use, so that the directories that were used last are kept.
        if entries.last() == Some(&added) {
            return Ok(());
        }
        entries.retain(|entry| !entry.is_same(&added) && entry.path != added.path);
        entries.push(added);
        let mut text = Vec::new();
        for entry in entries.iter().skip(entries.len().saturating_sub(ENTRIES_MAX)) {
            serde_json::to_writer(&mut text, entry)?;
            text.push(b'\n');
        }
        self.0.replace(FILE, &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_dir::private_tempdir;

    fn entry(device: u64, inode: u64, birth: Option<u64>, path: &str) -> DirectoryEntry {
        DirectoryEntry { device, inode, birth, path: path.into(), created: true }
    }

    #[test]
    fn a_directory_is_recognized_by_inode_and_birth_time() {
        let known = entry(1, 7, Some(100), "/project/.satellite");
        for (other, is_known) in [
            (entry(1, 7, Some(100), "/moved/.satellite"), true),
            (entry(2, 7, Some(100), "/project/.satellite"), true),
            (entry(2, 7, Some(100), "/moved/.satellite"), false),
            (entry(1, 7, Some(101), "/project/.satellite"), false),
            (entry(1, 8, Some(100), "/project/.satellite"), false),
        ] {
            assert_eq!(known.is_same(&other), is_known, "{other:?}");
        }
        let unborn = entry(1, 7, None, "/project/.satellite");
        assert!(unborn.is_same(&unborn) && !unborn.is_same(&entry(2, 7, None, "/project/.satellite")));
    }

    #[test]
    fn a_named_directory_does_not_count_as_created() {
        let home = private_tempdir();
        let record = DirectoryRecord(DataDir::create(&home.path().join("state")).unwrap());
        let directories = ["one", "two"].map(|name| DataDir::create(&home.path().join(name)).unwrap());
        record.add(&directories[0], true).unwrap();
        record.add(&directories[1], false).unwrap();
        record.add(&directories[0], false).unwrap();
        assert_eq!(directories.each_ref().map(|directory| record.contains(directory)), [true, false]);
        assert_eq!(record.entries().len(), 2);
    }
}
