//! The journal: events, server logs, calls and the state that a satellite needs after a restart, in an embedded
//! database.
//!
//! ```text
//!  batcher ── append ──►┐
//!  delivery ─ outbox ──►│ a mailbox ──► one thread ──► DIR/journal/journal.db   SQLite, WAL
//!  slots ──── memos ───►┘                    │         DIR/journal/seq          reserved event numbers
//!                                            └──► status, journalled_through
//!  readers, also without a satellite: open the file themselves (`read`)
//! ```
//!
//! Only that thread waits for the disk, and its callers wait for it at most one second. An event is visible only after it
//! is stored, or after the file `seq` has reserved its number (`seq_file`); until then it waits in the batcher.
//!
//! Committed data survives a `kill -9` of the satellite, but not a loss of power, because the disk is synced at
//! checkpoints only. A disk that is full, read-only or broken does not end the satellite: the journal reports the state
//! and retries, and events stay in the batcher's memory, within its limit.

mod block;
mod disk_monitor;
mod lines;
mod lost_ranges;
mod meta;
pub(crate) mod read;
mod recent;
mod salvage;
pub(crate) mod schema;
mod seq_file;
mod shared;
mod sink;
mod store;
mod writer;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::{NumberStore, SinkAnswer, SinkBatch};
use tokio::sync::{oneshot, watch};

use mcp_satellite_files::data_dir::DataDir;
use shared::{JournalHome, JournalShared};
use writer::{JournalJob, JournalWriter};

pub use read::{
    EventFollower, JournalEvents, StoredEventQuery, StoredLine, StoredLines, read, request_logs, server_logs,
};
pub use recent::{
    LinePosition, RecentEvents, RecentLines, StoredCallQuery, StoredLineQuery, recent, recent_calls, recent_logs,
};
pub use shared::{
    BatchInFlight, CommandRecord, DeliveryState, JournalClock, JournalError, JournalState, JournalStatus, Memos,
    database, directory,
};
pub use sink::JournalSink;

pub use mcp_satellite_actors::model::settings::JournalLimits;

/// Handle to the journal of a data directory. Clones are cheap; the thread stops in an orderly way when the last one is
/// dropped.
#[derive(Clone)]
pub struct Journal {
    jobs: mpsc::Sender<JournalJob>,
    shared: Arc<JournalShared>,
}

impl Journal {
    /// Opens the journal in a data directory. The directory is created if it is missing; only its owner may have
    /// access. Blocks on the disk. Problems of the disk are logged, shown in [`Journal::status`] and retried.
    ///
    /// # Errors
    /// Returns an error only if no thread can be started.
    pub fn open(data_dir: &Path, limits: JournalLimits) -> io::Result<Self> {
        Self::open_with_clock(data_dir, limits, Arc::new(Timestamp::now))
    }

    pub fn open_with_clock(data_dir: &Path, limits: JournalLimits, clock: JournalClock) -> io::Result<Self> {
        Self::open_home(JournalHome::Named(data_dir.to_owned()), limits, clock)
    }

    /// Opens the journal as [`Journal::open`] does, in a data directory that is already open. Its path is not resolved
    /// again.
    pub fn open_in(data_dir: DataDir, limits: JournalLimits) -> io::Result<Self> {
        Self::open_home(JournalHome::Open(data_dir), limits, Arc::new(Timestamp::now))
    }

    fn open_home(home: JournalHome, limits: JournalLimits, clock: JournalClock) -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<JournalJob>();
        let shared = JournalWriter::start(home, limits, clock, inbox)?;
        Ok(Self { jobs, shared })
    }

    /// Returns the number of the next event, as of the start. No earlier event had this number.
    pub fn next_seq(&self) -> u64 {
        self.shared.next_seq
    }

    pub fn status(&self) -> JournalStatus {
        self.shared.status.borrow().clone()
    }

    /// Returns the number of writes of batches, successful or not, and the sum of their durations.
    pub fn write_times(&self) -> (u64, Duration) {
        self.shared.write_times.read()
    }

    pub fn watch_appended(&self) -> watch::Receiver<u64> {
        self.shared.appended.subscribe()
    }

    /// Waits until the event is stored, or the disk does not accept events.
    pub async fn wait_stored(&self, seq: u64) {
        let mut status = self.shared.status.subscribe();
        let settled = |status: &JournalStatus| status.journalled_through >= seq || status.state == JournalState::Memory;
        // An error means that the journal has ended and will not store the event.
        let _ = status.wait_for(settled).await;
    }

    /// Sets the hook for lost events: ranges of numbers that were removed undelivered for lack of space, or with a
    /// damaged file. The journal's thread calls it, also for events that were lost earlier. After a restart it reports
    /// a range again unless an `events.dropped` event with these numbers was appended. Events are not removed for their
    /// age before the hook is set.
    pub fn on_dropped(&self, hook: impl Fn(u64, u64) + Send + 'static) {
        *self.shared.on_dropped.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
        self.send_job(JournalWriter::enable_age_pruning);
    }

    /// Declares that events are delivered to a receiver; must be called before [`Journal::on_dropped`]. The journal
    /// then counts undelivered events, keeps them beyond their maximum age, and reports those it has to remove.
    pub fn expect_delivery(&self) {
        self.shared.has_delivery.store(true, Ordering::Release);
        self.send_job(JournalWriter::publish_status);
    }

    /// Declares that there is no receiver. A receiver of a later start gets the events from then on, or continues where
    /// the last receiver stopped if events are undelivered.
    pub fn expect_no_delivery(&self) {
        self.send_job(JournalWriter::expect_no_delivery);
    }

    /// Stores a batch in one transaction. Events that are already stored are skipped, so a batch can be repeated.
    /// Returns `Accepted`, `Invalid` or `Unavailable`.
    pub fn append(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let (reply, answer) = oneshot::channel::<SinkAnswer>();
        self.send_job(move |keeper| {
            // Sent even if the caller stopped waiting: the satellite may be ending, and a repeated batch is harmless.
            let _ = reply.send(keeper.append(&batch));
        });
        let journal = self.clone();
        async move { journal.wait_reply(answer).await.unwrap_or_else(|error| SinkAnswer::Unavailable(error.to_string())) }
            .boxed()
    }

    /// Queues events that were delivered without being stored. They are stored once the disk accepts them, within the
    /// limit of memory.
    pub fn queue_delivered(&self, batch: Arc<SinkBatch>) {
        self.send_job(move |keeper| keeper.queue_delivered(batch));
    }

    /// Returns the next events after `after`, at most `max`. Unreadable events are skipped and logged.
    ///
    /// # Errors
    /// Returns an error if the disk is unavailable or the journal is closed.
    pub async fn outbox(&self, after: u64, max: usize) -> Result<Vec<Envelope>, JournalError> {
        let bodies = self.run_job(move |keeper| keeper.outbox(after, max)).await?;
        let parse = |(seq, body): &(u64, String)| {
            serde_json::from_str(body)
                .inspect_err(|error| tracing::error!(seq, %error, "a stored event cannot be read; it is not delivered"))
                .ok()
        };
        Ok(bodies.iter().filter_map(parse).collect())
    }

    pub async fn delivery(&self) -> Result<DeliveryState, JournalError> {
        self.run_job(JournalWriter::delivery).await
    }

    /// Stores the progress of the delivery in one transaction: `settled` is the cursor, which never moves back,
    /// `sending` is the batch in flight.
    ///
    /// # Errors
    /// Returns an error if the journal is closed or the disk is unavailable. A full disk is not an error.
    pub async fn store_delivery(&self, settled: u64, sending: Option<BatchInFlight>) -> Result<(), JournalError> {
        self.run_job(move |keeper| keeper.store_delivery(settled, sending.as_ref())).await
    }

    /// Returns the memos of instances, as JSON, that were stored when the journal was opened.
    pub fn memos(&self) -> &HashMap<InstanceId, String> {
        &self.shared.memos
    }

    /// Returns true if the database exists but its memos cannot be read yet. The journal's thread then passes them to
    /// `hook`, once, as soon as they can be read. The result of the hook replaces the stored memos, except where a
    /// newer memo exists.
    pub fn on_late_memos(&self, hook: impl Fn(HashMap<InstanceId, String>) -> (Memos, u64) + Send + 'static) -> bool {
        if !self.shared.memos_unread.load(Ordering::Acquire) {
            return false;
        }
        *self.shared.on_memos.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
        // The memos may have been read in the meantime.
        self.send_job(JournalWriter::call_late_memos_hook);
        true
    }

    /// Stores `memo`, which is JSON, for an instance. It takes effect at once and is written to disk with the next
    /// transaction.
    pub fn remember(&self, instance: &InstanceId, memo: String) {
        self.set_memo(instance, Some(memo));
    }

    pub fn forget(&self, instance: &InstanceId) {
        self.set_memo(instance, None);
    }

    /// Waits until all earlier changes of memos are stored. An error contains the reason why they are not: they are
    /// stored once the disk accepts them, and lost if the satellite is killed before.
    pub async fn flush_memos(&self) -> Result<(), JournalError> {
        self.with_disk_timeout(self.run_job(JournalWriter::write_memos)).await.flatten()
    }

    fn set_memo(&self, instance: &InstanceId, memo: Option<String>) {
        let mut pending = self.shared.pending_memos.lock().unwrap_or_else(PoisonError::into_inner);
        pending.insert(instance.clone(), memo);
        drop(pending);
        if !self.shared.memo_job_queued.swap(true, Ordering::AcqRel) {
            // An error is visible in the status; the memos are written with the next successful transaction.
            self.send_job(|keeper| drop(keeper.write_memos()));
        }
    }

    /// Returns the stored state of a command; `None` if it was never started. States are kept for seven days.
    ///
    /// # Errors
    /// See [`Journal::outbox`].
    pub async fn command(&self, id: &str) -> Result<Option<CommandRecord>, JournalError> {
        let id = id.to_owned();
        self.run_job(move |keeper| keeper.command(&id)).await
    }

    pub async fn record_command_start(&self, id: &str) -> Result<(), JournalError> {
        let id = id.to_owned();
        self.run_job(move |keeper| keeper.record_command(&id, None)).await
    }

    pub async fn record_command_result(&self, id: &str, result: String) -> Result<(), JournalError> {
        let id = id.to_owned();
        self.run_job(move |keeper| keeper.record_command(&id, Some(&result))).await
    }

    /// Awaits an operation that depends on the disk. Returns an error and drops the operation once the disk is overdue.
    pub async fn with_disk_timeout<T>(&self, waiting: impl Future<Output = T>) -> Result<T, JournalError> {
        tokio::select! {
            biased;
            done = waiting => Ok(done),
            () = self.shared.disk_monitor.wait_overdue() => Err(JournalError::Unavailable(format!(
                "the disk of the journal {} does not answer",
                self.shared.status.borrow().path.display()
            ))),
        }
    }

    pub fn is_hanging(&self) -> bool {
        self.shared.disk_monitor.is_hanging()
    }

    /// Waits until the disk has not answered for so long that its readers should stop waiting.
    pub async fn wait_given_up(&self) {
        self.shared.disk_monitor.wait_hang().await;
        self.shared.disk_monitor.wait_overdue().await;
    }

    /// Stores pending data and closes the database; later operations return [`JournalError::Closed`]. Returns when this
    /// is done or the disk does not answer. Committed data is stored in either case.
    pub async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        self.send_job(move |keeper| {
            keeper.close();
            // The journal is closed even if the caller stopped waiting.
            let _ = reply.send(());
        });
        let closed = tokio::select! {
            biased;
            // An inner error means that the thread has ended, which closes the journal as well.
            closed = self.with_disk_timeout(closed) => closed.map(drop),
            // If the disk hung before, the journal does not wait for it again.
            () = self.shared.disk_monitor.wait_hang() => Err(self.record_hang()),
        };
        if let Err(error) = closed {
            tracing::error!(%error, "cannot close the journal; committed events are stored");
        }
    }

    fn send_job(&self, job: impl FnOnce(&mut JournalWriter) + Send + 'static) {
        // An error means that the thread has ended; callers that wait for a response notice it.
        let _ = self.jobs.send(Box::new(job));
    }

    async fn run_job<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut JournalWriter) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, JournalError> {
        let (reply, answer) = oneshot::channel();
        self.send_job(move |keeper| {
            // A caller that stopped waiting will ask again.
            let _ = reply.send(job(keeper));
        });
        self.wait_reply(answer).await?
    }

    /// Waits for a response of the thread. The thread may execute the job after a timeout; this is harmless, because
    /// callers ask again.
    async fn wait_reply<T>(&self, answer: oneshot::Receiver<T>) -> Result<T, JournalError> {
        tokio::select! {
            biased;
            answer = answer => answer.map_err(|_| JournalError::Closed),
            () = self.shared.disk_monitor.wait_hang() => Err(self.record_hang()),
        }
    }

    fn record_hang(&self) -> JournalError {
        let path = &self.shared.status.borrow().path.clone();
        let reason = format!("the journal {} cannot be used: the disk does not answer", path.display());
        let news = self.shared.status.send_if_modified(|status| {
            let news = status.state == JournalState::Ok;
            status.state = JournalState::Memory;
            status.reason = Some(reason.clone());
            news
        });
        if news {
            tracing::error!(reason, "the journal cannot be used: events are kept in memory; trying again");
            // The thread corrects the status as soon as it continues.
            self.send_job(JournalWriter::publish_status);
        }
        JournalError::Unavailable(reason)
    }
}

impl NumberStore for Journal {
    fn reserve(&self, through: u64) -> BoxFuture<'static, Result<(), String>> {
        let journal = self.clone();
        async move { journal.run_job(move |keeper| keeper.grant(through)).await.map_err(|error| error.to_string()) }
            .boxed()
    }
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("status", &*self.shared.status.borrow()).finish_non_exhaustive()
    }
}
