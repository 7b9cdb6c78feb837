//! Detects a disk that does not answer. A thread checks it on the system clock, because tests can advance the clock of
//! the async runtime faster than any disk. Callers wait for the journal no longer than
//! [`WAIT_MAX`](mcp_satellite_files::disk::WAIT_MAX), the sum of the two durations below.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use mcp_satellite_files::disk::WAIT_MAX;

const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum duration of a job. A longer job means that the disk does not answer.
const ANSWER_TIMEOUT: Duration = WAIT_MAX.saturating_sub(LOOK_INTERVAL);

pub(super) struct DiskMonitor {
    busy_since: Mutex<Option<Instant>>,
    is_hanging: watch::Sender<bool>,
    last_check: watch::Sender<Instant>,
}

impl DiskMonitor {
    /// Starts the thread. It ends when the returned value is dropped.
    pub(super) fn start() -> io::Result<Arc<Self>> {
        let pulse = Arc::new(Self {
            busy_since: Mutex::default(),
            is_hanging: watch::Sender::new(false),
            last_check: watch::Sender::new(Instant::now()),
        });
        let looked_at = Arc::downgrade(&pulse);
        thread::Builder::new().name("journal-pulse".into()).spawn(move || {
            while let Some(pulse) = looked_at.upgrade() {
                pulse.check();
                pulse.last_check.send_replace(Instant::now());
                drop(pulse);
                thread::sleep(LOOK_INTERVAL);
            }
        })?;
        Ok(pulse)
    }

    pub(super) fn run_monitored<T>(&self, job: impl FnOnce() -> T) -> T {
        self.set_busy_since(Some(Instant::now()));
        let done = job();
        self.set_busy_since(None);
        self.check();
        done
    }

    pub(super) fn is_hanging(&self) -> bool {
        *self.is_hanging.borrow()
    }

    /// Waits until a job has exceeded the timeout of the disk.
    pub(super) async fn wait_hang(&self) {
        // The sender is in `self`, so the channel stays open.
        let _ = self.is_hanging.subscribe().wait_for(|hangs| *hangs).await;
    }

    /// Waits until the caller has waited longer than the timeout of the disk.
    pub(super) async fn wait_overdue(&self) {
        let since = Instant::now();
        // The channel stays open, as above.
        let _ = self.last_check.subscribe().wait_for(|now| now.duration_since(since) > ANSWER_TIMEOUT).await;
    }

    fn set_busy_since(&self, since: Option<Instant>) {
        *self.busy_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    fn check(&self) {
        let since = *self.busy_since.lock().unwrap_or_else(PoisonError::into_inner);
        let now = since.is_some_and(|since| since.elapsed() > ANSWER_TIMEOUT);
        self.is_hanging.send_if_modified(|hangs| std::mem::replace(hangs, now) != now);
    }
}
