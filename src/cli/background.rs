//! Start of a satellite in the background. Its output goes to `satellite.log` in its data directory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::{CommandFailure, DataDirArg, FAILED};
use mcp_satellite_files::data_dir::{DataDir, OpenMode};

const LOG: &str = "satellite.log";
const OLD_LOG: &str = "satellite.log.1";
/// Size from which the log is replaced at the next start.
const LOG_MAX: u64 = 10 << 20;
/// End of the log that a failure reports.
const EXCERPT_MAX: u64 = 2000;

/// A satellite that was started in the background and may not be reachable yet.
pub(super) struct BackgroundStart {
    child: Child,
    log: File,
    directory: PathBuf,
    /// Size of the log before the start.
    log_start: u64,
}

impl BackgroundStart {
    /// Starts `satellite run` on the data directory, as the leader of its own session.
    pub(super) fn begin(data_dir: &DataDirArg) -> Result<Self, CommandFailure> {
        let failed = |error: io::Error| {
            CommandFailure::new(FAILED, format!("cannot start a satellite in the background: {error}"))
        };
        let directory = data_dir.location().create_or_open().map_err(failed)?;
        let log = open_log(&directory).map_err(failed)?;
        let log_start = log.metadata().map_err(failed)?.len();
        let output = |log: &File| log.try_clone().map(Stdio::from).map_err(failed);
        let child = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["run", "--detached", "--data-dir"])
            .arg(directory.path())
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(output(&log)?)
            .stderr(output(&log)?)
            .spawn()
            .map_err(failed)?;
        Ok(Self { child, log, directory: directory.path().to_owned(), log_start })
    }

    pub(super) fn log_path(&self) -> PathBuf {
        self.directory.join(LOG)
    }

    /// Returns an error if the satellite has ended, with the end of its output. If another process has started one at the
    /// same moment, that one is used.
    pub(super) fn check(&mut self) -> Result<(), CommandFailure> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        // The lock of this check ends with the descriptor.
        if !DataDir::open(&self.directory)?.try_lock() {
            return Ok(());
        }
        let end = self.log.metadata()?.len();
        let from = self.log_start.max(end.saturating_sub(EXCERPT_MAX));
        let mut output = vec![0; usize::try_from(end.saturating_sub(from)).unwrap_or_default()];
        let length = self.log.read_at(&mut output, from)?;
        let excerpt = String::from_utf8_lossy(&output[..length]);
        let log = self.log_path();
        let message = format!("the satellite did not start ({status}); see {}:\n{}", log.display(), excerpt.trim());
        Err(CommandFailure::new(FAILED, message))
    }
}

/// Opens the log for reading and appending; a large one is renamed first.
fn open_log(directory: &DataDir) -> io::Result<File> {
    if directory.stat(LOG).is_some_and(|stat| stat.len > LOG_MAX) {
        directory.rename(LOG, OLD_LOG)?;
    }
    directory.open_file(LOG, OpenMode::Append)
}
