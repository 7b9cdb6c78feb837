//! Whether the disk answers. It is looked at by a thread on the machine's own clock: that of the async runtime may be one
//! that tests turn, which runs ahead of every disk. Nobody waits longer than [`WAIT_MAX`](crate::disk::WAIT_MAX) for the
//! journal: the two numbers below add up to it.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::disk::WAIT_MAX;

/// How often it is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// A job that takes longer waits for a disk that does not answer.
const ANSWER_TIMEOUT: Duration = WAIT_MAX.saturating_sub(LOOK_INTERVAL);

/// See the module.
pub(super) struct Pulse {
    busy_since: Mutex<Option<Instant>>,
    hangs: watch::Sender<bool>,
    /// When it was looked at last.
    looked: watch::Sender<Instant>,
}

impl Pulse {
    /// Looks from now on, as long as somebody has it.
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

    /// Does a job that may wait for the disk.
    pub(super) fn during<T>(&self, job: impl FnOnce() -> T) -> T {
        self.is_busy(Some(Instant::now()));
        let done = job();
        self.is_busy(None);
        self.look();
        done
    }

    #[cfg(feature = "cli")]
    pub(super) fn is_hanging(&self) -> bool {
        *self.hangs.borrow()
    }

    /// Resolves when a job waits for longer than a disk may take.
    pub(super) async fn hangs(&self) {
        // The sender is in `self`, so it does not end.
        let _ = self.hangs.subscribe().wait_for(|hangs| *hangs).await;
    }

    /// Resolves when whoever waits from now on has waited for longer than a disk may take.
    pub(super) async fn overdue(&self) {
        let since = Instant::now();
        // As above.
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
