//! Disk writes with a time limit. A disk can hang for minutes; supervision, control commands and the shutdown then go
//! on after [`WAIT_MAX`] without it.
//!
//! ```text
//!  caller ── request ──► Saver ──► its thread ── save() ──► disk
//!     ▲                                │  error: again after RETRY, until it is saved
//!     └── saved, the error, or "does not answer" after WAIT_MAX
//! ```

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Upper limit for the time that a restart, a control command or the shutdown waits for a disk.
pub const WAIT_MAX: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotSaved {
    #[error("{0}")]
    Failed(String),
    #[error("the disk does not answer")]
    DiskHangs,
}

/// A thread that saves one file on request and repeats a failed save until it succeeds. After a drop, it ends with the
/// attempt in progress.
pub struct DiskSaver(Arc<SaverShared>);

#[derive(Default)]
struct SaverShared {
    progress: Mutex<SaverProgress>,
    changed: Condvar,
}

/// Progress of the numbered requests. An attempt saves all requests made before it.
#[derive(Default)]
struct SaverProgress {
    requested: u64,
    saved: u64,
    /// Number of the last request whose attempt is over, successful or not.
    attempted: u64,
    error: Option<String>,
    attempt_started: Option<Instant>,
    is_hanging: bool,
    ended: bool,
}

impl DiskSaver {
    /// Starts the thread. `what` names the saved data in the log.
    pub fn start(what: &'static str, mut save: impl FnMut() -> io::Result<()> + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(SaverShared::default());
        let saver = Self(Arc::clone(&shared));
        thread::Builder::new().name("satellite-saver".into()).spawn(move || {
            while let Some(request) = shared.next_request() {
                let outcome = save();
                shared.finish_attempt(what, request, outcome);
            }
        })?;
        Ok(saver)
    }

    /// Requests a save of the current data without waiting, and returns the number of the request.
    pub fn request(&self) -> u64 {
        let mut progress = self.0.lock();
        progress.requested += 1;
        self.0.changed.notify_all();
        progress.requested
    }

    /// Waits until the request is saved or has failed. The limit counts from the start of the attempt, so further
    /// callers do not wait while the disk hangs.
    pub fn wait(&self, request: u64) -> Result<(), NotSaved> {
        let until = Instant::now() + WAIT_MAX;
        let mut progress = self.0.lock();
        loop {
            if progress.saved >= request {
                return Ok(());
            }
            if progress.attempted >= request {
                return Err(NotSaved::Failed(progress.error.clone().unwrap_or_default()));
            }
            let until = progress.attempt_started.map_or(until, |since| until.min(since + WAIT_MAX));
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                if !std::mem::replace(&mut progress.is_hanging, true) {
                    tracing::error!("the disk of the data directory does not answer; supervision continues without it");
                }
                return Err(NotSaved::DiskHangs);
            }
            progress = self.0.changed.wait_timeout(progress, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn save(&self) -> Result<(), NotSaved> {
        self.wait(self.request())
    }
}

impl Drop for DiskSaver {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_all();
    }
}

impl SaverShared {
    fn lock(&self) -> MutexGuard<'_, SaverProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next request or for the time of the next retry. Returns `None` after the saver is dropped.
    fn next_request(&self) -> Option<u64> {
        let mut progress = self.lock();
        loop {
            let failed = progress.saved < progress.attempted;
            if progress.requested > progress.attempted {
                break;
            }
            if progress.ended {
                return None;
            }
            if failed {
                let waited = self.changed.wait_timeout(progress, RETRY).unwrap_or_else(PoisonError::into_inner);
                progress = waited.0;
                if waited.1.timed_out() {
                    break;
                }
            } else {
                progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
            }
        }
        progress.attempt_started = Some(Instant::now());
        Some(progress.requested)
    }

    fn finish_attempt(&self, what: &'static str, request: u64, outcome: io::Result<()>) {
        let mut progress = self.lock();
        progress.attempt_started = None;
        progress.attempted = request;
        let answers_again = std::mem::take(&mut progress.is_hanging);
        match outcome {
            Ok(()) => {
                progress.saved = request;
                if progress.error.take().is_some() || answers_again {
                    tracing::info!(what, "writing to the data directory works again");
                }
            }
            Err(error) => {
                let error = error.to_string();
                // Logged once: a full disk stays full for a while.
                if progress.error.as_ref() != Some(&error) {
                    tracing::error!(what, error, "cannot write to the data directory; trying again");
                    progress.error = Some(error);
                }
            }
        }
        self.changed.notify_all();
    }
}

/// Limits the jobs that wait for a disk at the same time, so that blocking threads remain for restarts and `status`.
static DISK_JOB_PERMITS: tokio::sync::Semaphore = tokio::sync::Semaphore::const_new(64);

/// Runs `job`, which waits for a disk, on a blocking thread. Returns `None` if that takes longer than [`WAIT_MAX`] or
/// panics; a job that takes longer continues in the background.
pub async fn run_with_timeout<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let done = async {
        let place = DISK_JOB_PERMITS.acquire().await.ok()?;
        let job = move || {
            let _place = place;
            job()
        };
        tokio::task::spawn_blocking(job).await.ok()
    };
    tokio::time::timeout(WAIT_MAX, done).await.ok().flatten()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_save_returns_its_error_and_the_next_one_retries() {
        let attempts = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&attempts);
        let saver = DiskSaver::start("test", move || match counted.fetch_add(1, Ordering::AcqRel) {
            1 => Err(io::Error::other("no room")),
            _ => Ok(()),
        });
        let saver = saver.unwrap();
        assert_eq!(saver.save(), Ok(()));
        assert_eq!(saver.save(), Err(NotSaved::Failed("no room".to_owned())));
        assert_eq!(saver.save(), Ok(()), "the next request tries at once");
    }

    #[test]
    fn a_hanging_disk_blocks_no_caller_and_the_save_completes_later() {
        let (answers, waits) = mpsc::channel::<()>();
        let saver = DiskSaver::start("test", move || waits.recv().map_err(io::Error::other)).unwrap();
        let first = saver.request();
        assert_eq!(saver.wait(first), Err(NotSaved::DiskHangs));
        let later = saver.request();
        assert_eq!(saver.wait(later), Err(NotSaved::DiskHangs));
        answers.send(()).unwrap();
        answers.send(()).unwrap();
        while saver.wait(later).is_err() {}
        assert_eq!(saver.wait(first), Ok(()));
    }
}
