//! Lock of a data directory.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::console::SOCKET;
use crate::data_dir::{DataDir, OpenMode};
use mcp_satellite_files::disk::run_with_timeout;
use mcp_satellite_files::known_dirs::DataDirLocation;
use mcp_satellite_process::keeper::{self, DescriptorName, KeeperClient};

/// Upper limit for the time in which a satellite without a keeper ends its servers.
pub(super) const ORPHAN_PATIENCE: Duration = Duration::from_secs(10);

const LOCK: &str = "lock";
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(5);
const DIRECTORY_LOCK_WAIT: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub(crate) enum DataDirLockError {
    #[error(
        "a satellite is already running on `{data_dir}`{holder}; end it with `satellite down --data-dir {data_dir}`, or \
         give this one another --data-dir"
    )]
    InUse { data_dir: String, holder: String },
    #[error("cannot use the data directory `{data_dir}`: {why}")]
    Unusable { data_dir: String, why: io::Error },
}

/// A data directory that belongs to this process, and after its crash to the next satellite below the same keeper. The
/// keeper holds duplicates of the locked descriptors. Unlocking one of them unlocks all, so only the keeper does it.
pub(crate) struct DataDirLock {
    data_dir: DataDir,
    file: File,
}

impl DataDirLock {
    /// Opens or creates a data directory and locks it. Below a keeper, takes over the lock of the last satellite.
    pub(crate) async fn acquire(
        location: &DataDirLocation,
        keeper: Option<&KeeperClient>,
    ) -> Result<Self, DataDirLockError> {
        let opening = location.clone();
        let data_dir =
            tokio::task::spawn_blocking(move || opening.create_or_open()).await.map_err(io::Error::other).flatten();
        let data_dir = data_dir
            .map_err(|why| DataDirLockError::Unusable { data_dir: location.path.display().to_string(), why })?;
        let lock = match keeper.and_then(|keeper| Self::take_over(&data_dir, keeper)) {
            Some(lock) => lock,
            None => Self { file: lock_file(&data_dir).await?, data_dir },
        };
        lock.write_process_id();
        if let Some(keeper) = keeper {
            keeper.keep(DescriptorName::Lock, &lock.file);
            keeper.keep(DescriptorName::Directory, &lock.data_dir);
        }
        Ok(lock)
    }

    /// Takes over the locks that the last satellite has left. Locks of another directory, which was at this path, are
    /// released.
    fn take_over(data_dir: &DataDir, keeper: &KeeperClient) -> Option<Self> {
        let (file, directory) = (keeper.take(DescriptorName::Lock)?, keeper.take(DescriptorName::Directory)?);
        let data_dir_left = data_dir.clone().with_descriptor(directory).ok();
        let left = data_dir_left.map(|data_dir| Self { data_dir, file: file.into() });
        // Locked already, unless the keeper could not hold one of them.
        let is_usable = |lock: &Self| {
            let is_same = lock.data_dir.stat(LOCK).map(|found| found.identity) == lock.identity();
            is_same && lock.data_dir.try_lock() && flock(&lock.file, FlockOperation::NonBlockingLockExclusive).is_ok()
        };
        let usable = left.filter(is_usable);
        if usable.is_none() {
            // The control socket is one of that directory, too.
            drop(keeper.take(DescriptorName::Control));
            for name in [DescriptorName::Lock, DescriptorName::Directory, DescriptorName::Control] {
                keeper.forget(name);
            }
        }
        usable
    }

    fn write_process_id(&self) {
        let mut file = &self.file;
        let written =
            file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", std::process::id()));
        if let Err(error) = written {
            // The lock is held without the id; only the error message of another satellite lacks it.
            tracing::warn!(%error, "cannot write the process id into the file `lock` of the data directory");
        }
    }

    pub(crate) fn data_dir(&self) -> &DataDir {
        &self.data_dir
    }

    /// Resolves when the path of the data directory leads to another lock than the held one or to none: another
    /// satellite may then use that path.
    pub(super) async fn wait_lost(&self) {
        let Some(held) = self.identity() else {
            return std::future::pending().await;
        };
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let path = self.data_dir.path().join(LOCK);
            let found = tokio::task::spawn_blocking(move || std::fs::symlink_metadata(path)).await;
            match found {
                Ok(Ok(found)) if (found.dev(), found.ino()) == held => {}
                Ok(Err(error)) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
                // The task panicked; the next check tries again.
                Err(_) => {}
                Ok(_) => return,
            }
        }
    }

    /// Removes the control socket unless the data directory has another lock: then the socket belongs to another
    /// satellite. If the socket cannot be removed, the next start removes it.
    pub(super) async fn remove_socket(&self) {
        let (data_dir, held) = (self.data_dir.clone(), self.identity());
        let _ = run_with_timeout(move || {
            if data_dir.stat(LOCK).map(|found| found.identity) == held {
                let _ = data_dir.remove(SOCKET);
            }
        })
        .await;
    }

    /// Returns device and inode of the locked file.
    fn identity(&self) -> Option<(u64, u64)> {
        self.file.metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()))
    }
}

pub(super) fn unusable(data_dir: &DataDir) -> impl Fn(io::Error) -> DataDirLockError {
    move |why| DataDirLockError::Unusable { data_dir: data_dir.path().display().to_string(), why }
}

async fn lock_file(data_dir: &DataDir) -> Result<File, DataDirLockError> {
    let mut file = data_dir.open_file(LOCK, OpenMode::Write).map_err(unusable(data_dir))?;
    let mut holder = String::new();
    // Only a hint for the error message: the lock itself decides.
    let _ = file.read_to_string(&mut holder);
    let holder = holder.trim();
    let is_orphan = || holder.parse().is_ok_and(keeper::is_orphan);
    let in_use = |holder: String| DataDirLockError::InUse { data_dir: data_dir.path().display().to_string(), holder };
    let until = Instant::now() + ORPHAN_PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            // The keeper of that satellite was killed. The satellite is ending its servers, which takes a moment only.
            Err(Errno::WOULDBLOCK) if is_orphan() && Instant::now() < until => {}
            Err(Errno::WOULDBLOCK) => {
                let holder = if holder.is_empty() { String::new() } else { format!(" (pid {holder})") };
                return Err(in_use(holder));
            }
            Err(errno) => return Err(unusable(data_dir)(errno.into())),
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
    // A running satellite holds a lock on the directory even if its file `lock` was deleted. One that has just ended
    // may hold it a moment longer than the file.
    let until = Instant::now() + DIRECTORY_LOCK_WAIT;
    while !data_dir.try_lock() {
        if Instant::now() >= until {
            return Err(in_use(String::new()));
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
    Ok(file)
}
