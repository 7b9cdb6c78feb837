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
    hangs: watch::Sender<bool>,
    looked: watch::Sender<Instant>,
}

impl DiskMonitor {
    /// Starts the thread. It ends when the returned value is dropped.
    pub(super) fn start() -> io::Result<Arc<Self>> {
        let pulse = Arc::new(Self {
            busy_since: Mutex::default(),
            hangs: watch::Sender::new(false),
            looked: watch::Sender::new(Instant::now()),
        });
        let looked_at = Arc::downgrade(&pulse);
        thread::Builder::new().name("journal-pulse".into()).spawn(move || {
            while let Some(pulse) = looked_at.upgrade() {
                pulse.look();
                pulse.looked.send_replace(Instant::now());
                drop(pulse);
                thread::sleep(LOOK_INTERVAL);
            }
        })?;
        Ok(pulse)
    }

    pub(super) fn during<T>(&self, job: impl FnOnce() -> T) -> T {
        self.is_busy(Some(Instant::now()));
        let done = job();
        self.is_busy(None);
        self.look();
        done
    }

    pub(super) fn is_hanging(&self) -> bool {
        *self.hangs.borrow()
    }

    /// Waits until a job has exceeded the timeout of the disk.
    pub(super) async fn hangs(&self) {
        // The sender is in `self`, so the channel stays open.
        let _ = self.hangs.subscribe().wait_for(|hangs| *hangs).await;
    }

    /// Waits until the caller has waited longer than the timeout of the disk.
    pub(super) async fn overdue(&self) {
        let since = Instant::now();
        // The channel stays open, as above.
        let _ = self.looked.subscribe().wait_for(|now| now.duration_since(since) > ANSWER_TIMEOUT).await;
    }

    fn is_busy(&self, since: Option<Instant>) {
        *self.busy_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    fn look(&self) {
        let since = *self.busy_since.lock().unwrap_or_else(PoisonError::into_inner);
        let now = since.is_some_and(|since| since.elapsed() > ANSWER_TIMEOUT);
        self.hangs.send_if_modified(|hangs| std::mem::replace(hangs, now) != now);
    }
}
