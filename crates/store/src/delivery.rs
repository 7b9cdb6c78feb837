//! Delivery of events from the journal to a sink: in order, at least once, and for as long as an outage lasts.
//! `rules::outbox` decides what each answer of the sink means, as it does for the batcher; this module reads the
//! journal, sends batches and stores the progress.
//!
//! ```text
//!  journal ── rows behind the cursor ──► Outbox ── batch, after its id is stored ──► sink
//!     ▲                                    │ ▲
//!     └──── cursor: all before is settled ─┘ └── directly from memory, while the disk fails
//! ```
//!
//! Before a batch is sent, its id and its range are stored. After a `kill -9` the same events are sent again under the
//! same id, so that the sink can recognize them. Ids count up from a random number in each process: a counter on a disk
//! that loses power or fails would repeat ids, and a sink would drop new events as duplicates.
//!
//! A failing disk does not delay events: those that cannot be stored are sent from memory after all stored events.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::rules::outbox::{BatcherState, Outbox};
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout_at};

use crate::durations::DurationTotals;
use crate::journal::{BatchInFlight, Journal};

const ORDERS_MAX: usize = 16;
// Number of events of a resumed batch, or the configured `batch_max` if that is larger.
const RESUMED_MAX: usize = 10_000;

/// Delivery status for `status`. Counts cover the time since the satellite was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct DeliveryStatus {
    /// Destination of the events: `stdout`, `file`, `backend`, or an address without credentials.
    pub to: String,
    /// Current state: `idle`, `sending`, `retrying` or `backing_off`.
    pub state: BatcherState,
    /// Number of stored events that are not settled yet.
    pub backlog: u64,
    /// Sequence number of the last settled event: all events up to it were accepted, rejected for good, or dropped for
    /// lack of space.
    pub settled: u64,
    pub sent: u64,
    /// Number of events that the sink rejected for good.
    pub failed: u64,
    /// Time at which the sink last accepted a batch (RFC 3339).
    pub last_sent: Option<String>,
    /// Reason why the sink did not accept the last batch; `None` after a success.
    pub last_error: Option<String>,
}

/// Delivery of a journal's events. Dropping it stops delivery; the next one resumes at the same event.
pub struct Delivery {
    orders: mpsc::Sender<DeliveryOrder>,
    status: watch::Receiver<DeliveryStatus>,
    appended: watch::Receiver<u64>,
    task: Mutex<Option<JoinHandle<()>>>,
    attempts: Arc<DurationTotals>,
}

enum DeliveryOrder {
    Direct(Arc<SinkBatch>, oneshot::Sender<SinkAnswer>),
    /// Shutdown notice: direct events do not wait for the interval any more.
    Hurry,
    /// Final delivery: sends all events until this time, ignores pauses, and replies when done.
    Flush(Instant, oneshot::Sender<()>),
}

impl Delivery {
    /// Starts to deliver the events of `journal` through `way`, which is called `to` in the status. Interval, batch
    /// size and longest pause come from `policy`. An outage may last until the journal is full.
    ///
    /// # Panics
    ///
    /// Panics outside a Tokio runtime.
    pub fn start(journal: Journal, to: &str, way: Arc<dyn EventSink>, policy: &BatchPolicy) -> Self {
        journal.expect_delivery();
        let (orders, inbox) = mpsc::channel(ORDERS_MAX);
        let (published, status) = watch::channel(DeliveryStatus { to: to.to_owned(), ..DeliveryStatus::default() });
        let appended = journal.watch_appended();
        // Two bits less, so that ids stay far below the largest `i64` that readers of JSON or SQL can hold.
        let first_batch = RandomState::new().build_hasher().finish() >> 2;
        let attempts = Arc::<DurationTotals>::default();
        let courier = DeliveryTask {
            attempts: attempts.clone(),
            outbox: Outbox::new(policy.clone(), 1, first_batch),
            appended: appended.clone(),
            policy: policy.clone(),
            journal,
            sink: way,
            published,
            last_read: None,
            direct_from: u64::MAX,
            direct_through: 0,
            stored_progress: (0, None),
            refused: Vec::new(),
            direct: None,
            is_hurried: false,
            flushing: false,
            read_error: None,
            logged_failure: None,
        };
        let task = Mutex::new(Some(tokio::spawn(courier.run(inbox))));
        Self { orders, status, appended, task, attempts }
    }

    pub fn status(&self) -> DeliveryStatus {
        let status = self.status.borrow().clone();
        let stored = *self.appended.borrow();
        DeliveryStatus { backlog: stored.saturating_sub(status.settled), ..status }
    }

    /// Returns the number of attempts to send a batch, and the time until the sink answered, summed up.
    pub fn attempt_times(&self) -> (u64, Duration) {
        self.attempts.read()
    }

    /// Returns a receiver for status changes. Its `backlog` is always 0, because the backlog changes with every event.
    pub fn watch(&self) -> watch::Receiver<DeliveryStatus> {
        self.status.clone()
    }

    /// Returns the sink for events that the disk does not store. They are sent after all stored events.
    pub fn direct_sink(&self) -> Arc<dyn EventSink> {
        Arc::new(DirectSink(self.orders.clone()))
    }

    /// Makes direct events not wait for the interval any more, because the satellite is ending.
    pub async fn hurry(&self) {
        // An error means that the task has ended.
        let _ = self.orders.send(DeliveryOrder::Hurry).await;
    }

    /// Delivers stored events for no longer than `limit` and ends. Returns the number of events that remain, which the
    /// next start sends.
    pub async fn finish(&self, limit: Duration) -> u64 {
        let until = Instant::now() + limit;
        let (reply, flushed) = oneshot::channel();
        let flush = async {
            // An error means that the task has ended.
            let _ = self.orders.send(DeliveryOrder::Flush(until, reply)).await;
            let _ = flushed.await;
        };
        // After a timeout the next start sends the batch in flight again under the same id.
        let _ = timeout_at(until, flush).await;
        self.abort();
        self.status().backlog
    }

    fn abort(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.abort();
    }
}

impl std::fmt::Debug for Delivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Delivery").field("status", &self.status()).finish_non_exhaustive()
    }
}

struct DirectSink(mpsc::Sender<DeliveryOrder>);

impl EventSink for DirectSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let orders = self.0.clone();
        async move {
            let (reply, answer) = oneshot::channel();
            // If the task has ended, `reply` is dropped with the order and the answer below reports it.
            let _ = orders.send(DeliveryOrder::Direct(batch, reply)).await;
            answer.await.unwrap_or_else(|_| SinkAnswer::Unavailable("event delivery has ended".to_owned()))
        }
        .boxed()
    }
}

struct DeliveryTask {
    journal: Journal,
    appended: watch::Receiver<u64>,
    sink: Arc<dyn EventSink>,
    policy: BatchPolicy,
    outbox: Outbox,
    published: watch::Sender<DeliveryStatus>,
    /// Sequence number of the last event that was read from the journal or received directly; `None` until the journal
    /// has returned the progress of the last satellite.
    last_read: Option<u64>,
    /// Sequence number of the first event that was received directly; `direct_through` is that of the last. The journal
    /// stores these events later, too.
    direct_from: u64,
    direct_through: u64,
    /// Progress that the journal has stored: the last settled event and the batch in flight.
    stored_progress: (u64, Option<BatchInFlight>),
    /// Sequence numbers after the cursor that were rejected for good. A resumed batch leaves them out.
    refused: Vec<u64>,
    direct: Option<(Arc<SinkBatch>, oneshot::Sender<SinkAnswer>)>,
    is_hurried: bool,
    flushing: bool,
    read_error: Option<String>,
    /// Failure that was logged last: an outage is logged once, not at each attempt.
    logged_failure: Option<String>,
    attempts: Arc<DurationTotals>,
}

impl DeliveryTask {
    async fn run(mut self, mut orders: mpsc::Receiver<DeliveryOrder>) {
        let mut cycles = interval(self.policy.interval);
        cycles.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let paused_until = self.outbox.paused_until();
            let pause = async move {
                match paused_until {
                    Some(until) => sleep_until(until.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = cycles.tick() => self.run_cycle().await,
                () = pause => self.run_cycle().await,
                order = orders.recv() => match order {
                    None => return,
                    Some(DeliveryOrder::Direct(batch, reply)) => {
                        // The sender of an earlier batch has given up.
                        self.direct = Some((batch, reply));
                        if self.is_hurried {
                            self.run_cycle().await;
                        }
                    }
                    Some(DeliveryOrder::Hurry) => {
                        self.is_hurried = true;
                        if self.direct.is_some() {
                            self.run_cycle().await;
                        }
                    }
                    Some(DeliveryOrder::Flush(until, done)) => {
                        self.flush(until).await;
                        // The receiver may have stopped waiting.
                        let _ = done.send(());
                    }
                },
            }
        }
    }

    /// Sends all events that were stored when the cycle began, and those that were received directly, until the sink
    /// rejects a batch.
    async fn run_cycle(&mut self) {
        self.outbox.begin_cycle(Instant::now().into_std());
        self.send_all().await;
        self.answer_direct();
    }

    async fn flush(&mut self, until: Instant) {
        self.flushing = true;
        loop {
            self.outbox.begin_final_cycle();
            self.send_all().await;
            self.answer_direct();
            let has_unsent = self.outbox.unsent() > 0
                || self.last_read.is_none_or(|read_through| read_through < *self.appended.borrow());
            // As always, a batch that was not accepted is sent again after an interval.
            if !has_unsent || Instant::now() + self.policy.interval >= until {
                return;
            }
            sleep(self.policy.interval).await;
        }
    }

    async fn send_all(&mut self) {
        let stored = *self.appended.borrow();
        if self.last_read.is_none() {
            self.resume().await;
        }
        loop {
            self.refill(stored).await;
            let Some(batch) = self.outbox.next_batch(Instant::now().into_std(), Timestamp::now()) else { break };
            self.store_batch_progress(Some(&batch)).await;
            self.publish();
            let began = Instant::now();
            let sending = AssertUnwindSafe(self.sink.send(batch.clone())).catch_unwind();
            let answer =
                sending.await.unwrap_or_else(|_| SinkAnswer::Unavailable("the event sink panicked".to_owned()));
            self.attempts.record(began.elapsed());
            let now = (Instant::now().into_std(), Timestamp::now());
            for (event, reason) in self.outbox.apply_answer(now.0, now.1, answer) {
                tracing::warn!(
                    seq = event.seq,
                    kind = event.event.kind(),
                    reason,
                    "the sink rejected an event permanently"
                );
                self.refused.push(event.seq);
            }
            self.publish();
            self.log_failure();
            if self.outbox.has_kept_batch() {
                break;
            }
        }
        let kept = self.stored_progress.1.clone().filter(|_| self.outbox.has_kept_batch());
        self.store_progress(self.last_settled(), kept).await;
        self.publish();
    }

    async fn resume(&mut self) {
        if !self.outbox.is_empty() {
            return; // Direct events are queued already; older events cannot be put before them.
        }
        let state = match self.journal.delivery().await {
            Ok(state) => state,
            Err(error) => {
                tracing::debug!(%error, "cannot read the delivery position from the journal; trying again");
                return;
            }
        };
        let mut passed = state.cursor;
        let (limit, mut is_partial) = (RESUMED_MAX.max(self.policy.batch_max), false);
        let rest = match &state.sending {
            Some(BatchInFlight { first, last, .. }) if *last > state.cursor => {
                let (first, last) = ((*first).max(state.cursor + 1), *last);
                let count = usize::try_from(last - first + 1).unwrap_or(usize::MAX);
                is_partial = count > limit;
                self.journal.outbox(first - 1, count.min(limit)).await
            }
            Some(_) | None => Ok(Vec::new()),
        };
        let Ok(mut rest) = rest else { return };
        // Events beyond the limit are read again, as a batch of their own.
        let read_through = rest.last().filter(|_| is_partial).map(|event| event.seq);
        if let Some(sending) = state.sending {
            rest.retain(|event| event.seq <= sending.last && !sending.refused.contains(&event.seq));
            // If its first event was dropped for lack of space, it is another batch and needs another id.
            if rest.first().is_some_and(|first| first.seq == sending.first) {
                passed = passed.max(read_through.unwrap_or(sending.last).min(sending.last));
                self.refused.clone_from(&sending.refused);
                self.outbox.resume_batch(sending.id, rest);
                self.outbox.begin_cycle(Instant::now().into_std());
            }
        }
        self.stored_progress = (state.cursor, None);
        self.last_read = Some(passed);
    }

    /// Reads events up to `stored`, the last one when the cycle began, and then adds those that were received directly.
    async fn refill(&mut self, stored: u64) {
        let page = self.policy.batch_max * 2;
        while let Some(read_through) = self.last_read
            && read_through < stored
            && self.outbox.statistics().queue_size < self.policy.batch_max
        {
            let rows = match self.journal.outbox(read_through, page).await {
                Ok(rows) => rows,
                Err(error) => {
                    self.read_error = Some(error.to_string());
                    break;
                }
            };
            self.read_error = None;
            // A page without a readable event is not the end of the journal: skip as many numbers and read on.
            let read = rows.last().map_or(read_through.saturating_add(page as u64).min(stored), |last| last.seq);
            let went = self.direct_from..=self.direct_through;
            self.outbox.refill(rows.into_iter().filter(|row| row.seq <= stored && !went.contains(&row.seq)));
            self.last_read = Some(read.min(stored));
        }
        if self.last_read.is_none_or(|read_through| read_through >= stored)
            && let Some((batch, _)) = &self.direct
        {
            let known = self.direct_through.max(self.last_read.unwrap_or_default());
            let new_events: Vec<Envelope> = batch.events.iter().filter(|event| event.seq > known).cloned().collect();
            if let Some(last) = new_events.last() {
                self.direct_from = self.direct_from.min(new_events.first().map_or(u64::MAX, |first| first.seq));
                self.direct_through = last.seq;
                self.last_read = self.last_read.map(|_| last.seq);
            }
            self.outbox.refill(new_events);
        }
        // The events just read belong to this cycle.
        if self.flushing {
            self.outbox.begin_final_cycle();
        } else if !self.outbox.has_kept_batch() {
            self.outbox.begin_cycle(Instant::now().into_std());
        }
    }

    /// Replies to the sender of the direct batch: accepted once all events are settled, otherwise unavailable. The
    /// sender then repeats the batch, or the disk stores it.
    fn answer_direct(&mut self) {
        let Some((batch, reply)) = self.direct.take() else { return };
        let through = self.direct_through.max(self.last_read.unwrap_or_default());
        let all_taken = batch.events.last().is_none_or(|last| last.seq <= through) && self.outbox.is_empty();
        let answer = if all_taken {
            SinkAnswer::Accepted
        } else {
            let reason = self.outbox.statistics().last_error;
            SinkAnswer::Unavailable(reason.unwrap_or_else(|| "the stored events have not been delivered".to_owned()))
        };
        // A sender that does not wait any more sends the batch again.
        let _ = reply.send(answer);
    }

    fn last_settled(&self) -> u64 {
        match self.outbox.first_unsettled() {
            Some(first) => first - 1,
            None => self.last_read.unwrap_or(self.stored_progress.0),
        }
    }

    async fn store_batch_progress(&mut self, batch: Option<&SinkBatch>) {
        let range = batch.and_then(|batch| Some((batch, batch.events.first()?.seq, batch.events.last()?.seq)));
        let sending = range.map(|(batch, first, last)| {
            let refused = self.refused.iter().copied().filter(|seq| (first..=last).contains(seq)).collect();
            BatchInFlight { id: batch.id, first, last, refused }
        });
        self.store_progress(self.last_settled(), sending).await;
    }

    /// Stores the progress. A failing disk does not stop delivery: after a kill the events are then sent again under
    /// another id.
    async fn store_progress(&mut self, settled: u64, sending: Option<BatchInFlight>) {
        if self.last_read.is_none() || self.stored_progress == (settled, sending.clone()) {
            return;
        }
        self.refused.retain(|seq| *seq > settled);
        if self.journal.store_delivery(settled, sending.clone()).await.is_ok() {
            self.stored_progress = (settled, sending);
        }
    }

    fn publish(&self) {
        let now = self.outbox.statistics();
        let next = DeliveryStatus {
            to: self.published.borrow().to.clone(),
            state: now.state,
            backlog: 0,
            settled: self.last_settled(),
            sent: now.sent,
            failed: now.failed,
            last_sent: now.last_sent.map(|at| format!("{at:.3}")),
            last_error: now.last_error.or_else(|| self.read_error.clone()),
        };
        self.published.send_if_modified(|status| {
            let changed = *status != next;
            *status = next;
            changed
        });
    }

    fn log_failure(&mut self) {
        let complaint = self.outbox.statistics().last_error.filter(|_| self.outbox.has_kept_batch());
        let to = &self.published.borrow().to;
        match (&complaint, &self.logged_failure) {
            (Some(reason), before) if before.as_ref() != Some(reason) => {
                tracing::warn!(to, reason, "the sink does not accept events; they are kept");
            }
            (None, Some(_)) => tracing::info!(to, "the sink accepts events again"),
            (Some(_) | None, _) => {}
        }
        self.logged_failure = complaint;
    }
}
