//! Files that a configuration refers to for secrets.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mcp_satellite_model::secret::Secret;

use super::small_file;

/// A file that this many consecutive looks found changed is considered to be written continuously.
const UNSETTLED_MAX: u32 = 3;

#[derive(Debug, Clone, Default)]
pub(crate) struct SecretFiles {
    pub(crate) entries: BTreeMap<PathBuf, SecretFile>,
}

#[derive(Debug, Clone)]
pub(crate) struct SecretFile {
    pub(crate) text: Secret,
    /// Stamp of the file, taken before reading so that no change is missed.
    read_stamp: Option<FileStamp>,
    seen_stamp: Option<FileStamp>,
    unstable_polls: u32,
    reported: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct SecretFileChange {
    pub(crate) path: PathBuf,
    pub(crate) text: Secret,
    read_stamp: Option<FileStamp>,
    pub(crate) errors: Vec<String>,
    pub(crate) reported: bool,
}

impl SecretFileChange {
    fn new(path: &Path, text: Secret, read_stamp: Option<FileStamp>) -> Self {
        Self { path: path.to_owned(), text, read_stamp, errors: Vec::new(), reported: false }
    }
}

/// Identifies one state of a file. Symbolic links are followed, because Kubernetes exchanges links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    fn from_path(path: &Path) -> Option<Self> {
        let file = std::fs::metadata(path).ok()?;
        Some(Self {
            device: file.dev(),
            inode: file.ino(),
            size: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    }
}

impl SecretFiles {
    pub(crate) fn read(&mut self, path: PathBuf) -> io::Result<Secret> {
        if let Some(known) = self.entries.get(&path) {
            return Ok(known.text.clone());
        }
        let stamp = FileStamp::from_path(&path);
        let text = read_secret_text(&path)?;
        self.entries.insert(
            path,
            SecretFile { text: text.clone(), read_stamp: stamp, seen_stamp: stamp, unstable_polls: 0, reported: false },
        );
        Ok(text)
    }

    pub(crate) fn is_current(&self, change: &SecretFileChange) -> bool {
        self.entries
            .get(&change.path)
            .is_some_and(|known| known.read_stamp == change.read_stamp && known.seen_stamp == change.read_stamp)
    }

    /// Returns the files with new content. A change counts if two consecutive looks find the same stamp, so that a file
    /// is not read while it is written. A file that is written continuously counts if two reads return the same text.
    pub(crate) fn poll_changes(&mut self, unreadable: &mut Vec<(PathBuf, String)>) -> Vec<SecretFileChange> {
        let mut changed = Vec::new();
        for (path, known) in &mut self.entries {
            let now = FileStamp::from_path(path);
            let settled = std::mem::replace(&mut known.seen_stamp, now) == now;
            known.unstable_polls = if settled { 0 } else { known.unstable_polls + 1 };
            if now.is_some() && now == known.read_stamp {
                known.reported = false;
                continue;
            }
            if known.unstable_polls > UNSETTLED_MAX {
                if let [Ok(text), Ok(again)] = [read_secret_text(path), read_secret_text(path)]
                    && text == again
                    && !text.expose().is_empty()
                {
                    (known.read_stamp, known.unstable_polls, known.reported) = (now, 0, false);
                    if text != known.text {
                        changed.push(SecretFileChange::new(path, text, now));
                    }
                }
                continue;
            }
            if !settled {
                continue;
            }
            let why = match read_secret_text(path) {
                Ok(text) if text.expose().is_empty() && !known.text.expose().is_empty() => {
                    "the file is empty".to_owned()
                }
                Ok(text) => {
                    (known.read_stamp, known.reported) = (now, false);
                    if text != known.text {
                        changed.push(SecretFileChange::new(path, text, now));
                    }
                    continue;
                }
                Err(error) => error.to_string(),
            };
            if !std::mem::replace(&mut known.reported, true) {
                unreadable.push((path.clone(), why));
            }
        }
        changed
    }
}

/// Reads a file without the end of its last line, which is not part of a secret.
fn read_secret_text(path: &Path) -> io::Result<Secret> {
    let mut text = small_file::read(path)?;
    if text.ends_with('\n') {
        text.truncate(text.len() - 1);
        text.truncate(text.len() - usize::from(text.ends_with('\r')));
    }
    Ok(text.into())
}
