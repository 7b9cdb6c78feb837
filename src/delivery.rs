//! From the journal to whoever wants the events: in order, at least once, for as long as it takes. What each answer means
//! is decided by `rules::outbox`, as it is for the batcher; this file reads, sends, and writes down how far it has come.
//!
//! ```text
//!  journal ── rows behind the cursor ──► Outbox ── batch, once its id is written down ──► way
//!     ▲                                    │ ▲
//!     └──── cursor: all before is settled ─┘ └── straight from memory, while the disk takes nothing
//! ```
//!
//! Before a batch goes out its id and its range are stored, so that after a `kill -9` the same events go again under
//! the same id, and whoever has taken them can tell. Ids count up from a random number in each process: a counter on a
//! disk that loses power, or takes nothing, would give one out twice, and events would be dropped as repeats that are none.
//!
//! A disk that fails delays nobody: what it does not take goes its way from memory, as soon as all that is stored has
//! gone before.

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
use mcp_satellite_actors::rules::outbox::{Outbox, State};
use mcp_satellite_actors::seam::{Answer, Batch, EventSink};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout_at};

use crate::journal::{Journal, Sending};

/// Orders wait for the batch in flight.
const ORDERS_MAX: usize = 16;
/// A batch that comes again has no more events than this, whatever made room or was refused in between.
const RESUMED_MAX: usize = 10_000;

/// For `status`. Durations and counts are since the satellite was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveryStatus {
    /// Where events go: `stdout`, `file`, `backend`, or an address without credentials.
    pub to: String,
    /// `idle`, `sending`, `retrying` or `backing_off`.
    pub state: State,
    /// Stored events that are not settled yet, by their numbers.
    pub backlog: u64,
    /// All up to this event was taken, refused for good, or had to make room.
    pub settled: u64,
    /// Events that were taken.
    pub sent: u64,
    /// Events that were refused for good.
    pub failed: u64,
    /// When a batch was taken last: RFC 3339.
    pub last_sent: Option<String>,
    /// Why the last batch was not taken; gone after a success.
    pub last_error: Option<String>,
}

/// Delivers what a journal stores. Dropped, it stops where it is; the next one goes on there.
pub struct Delivery {
    orders: mpsc::Sender<Order>,
    status: watch::Receiver<DeliveryStatus>,
    appended: watch::Receiver<u64>,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// What the task is told.
enum Order {
    /// Events that the disk did not take.
    Direct(Arc<Batch>, oneshot::Sender<Answer>),
    /// The satellite is ending: nothing waits for the interval any more.
    Hurry,
    /// Send what is there until this time, whatever pause was asked for, and tell that it is over.
    Flush(Instant, oneshot::Sender<()>),
}

impl Delivery {
    /// Delivers the events of `journal` by `way`, which is called `to` in the status. Of `policy` it takes the interval,
    /// the size of a batch and the longest pause. An outage may last as long as the journal has room.
    pub fn start(journal: Journal, to: &str, way: Arc<dyn EventSink>, policy: &BatchPolicy) -> Self {
        journal.expect_delivery();
        let (orders, inbox) = mpsc::channel(ORDERS_MAX);
        let (published, status) = watch::channel(DeliveryStatus { to: to.to_owned(), ..DeliveryStatus::default() });
        let appended = journal.appended();
        // Far below the numbers that a reader of JSON or SQL cannot hold in an i64.
        let first_batch = RandomState::new().build_hasher().finish() >> 2;
        let courier = Courier {
            outbox: Outbox::new(policy.clone(), 1, first_batch),
            appended: appended.clone(),
            policy: policy.clone(),
            journal,
            way,
            published,
            passed: None,
            direct_from: u64::MAX,
            direct_through: 0,
            written: (0, None),
            refused: Vec::new(),
            direct: None,
            hurried: false,
            flushing: false,
            unreadable: None,
            complaint: None,
        };
        let task = Mutex::new(Some(tokio::spawn(courier.run(inbox))));
        Self { orders, status, appended, task }
    }

    /// How it is now.
    pub fn status(&self) -> DeliveryStatus {
        let status = self.status.borrow().clone();
        let stored = *self.appended.borrow();
        DeliveryStatus { backlog: stored.saturating_sub(status.settled), ..status }
    }

    /// To wait for changes. The backlog is not in it, since it changes with every event.
    pub fn watch(&self) -> watch::Receiver<DeliveryStatus> {
        self.status.clone()
    }

    /// The way for events that the disk does not take. They are taken once all that is stored has gone before.
    pub fn direct(&self) -> Arc<dyn EventSink> {
        Arc::new(Direct(self.orders.clone()))
    }

    /// The satellite is ending: what comes directly does not wait for the interval.
    pub async fn hurry(&self) {
        // An error says that it has ended.
        let _ = self.orders.send(Order::Hurry).await;
    }

    /// Delivers what is stored for no longer than `limit`, and ends. What is left then is sent by the next one; how many
    /// events that is, by their numbers.
    pub async fn finish(&self, limit: Duration) -> u64 {
        let until = Instant::now() + limit;
        let (reply, flushed) = oneshot::channel();
        let flush = async {
            // An error says that it has ended.
            let _ = self.orders.send(Order::Flush(until, reply)).await;
            let _ = flushed.await;
        };
        // Overdue: the batch in flight goes again under its id with the next start.
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

/// See [`Delivery::direct`].
struct Direct(mpsc::Sender<Order>);

impl EventSink for Direct {
    fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        let orders = self.0.clone();
        async move {
            let (reply, answer) = oneshot::channel();
            // If it has ended, `reply` is dropped with the order and the answer below says so.
            let _ = orders.send(Order::Direct(batch, reply)).await;
            answer.await.unwrap_or_else(|_| Answer::Unavailable("events are not delivered any more".to_owned()))
        }
        .boxed()
    }
}

/// The task: one batch at a time.
struct Courier {
    journal: Journal,
    appended: watch::Receiver<u64>,
    way: Arc<dyn EventSink>,
    policy: BatchPolicy,
    outbox: Outbox,
    published: watch::Sender<DeliveryStatus>,
    /// The last event that was read from the journal or came directly; `None` as long as the journal has not told how far
    /// the last satellite was.
    passed: Option<u64>,
    /// The first event that came directly, and the last one. The journal has them later, too.
    direct_from: u64,
    direct_through: u64,
    /// What the journal knows: all up to this event is settled, and what is under way.
    written: (u64, Option<Sending>),
    /// Events behind the cursor that were refused for good: they are no part of a batch that comes again.
    refused: Vec<u64>,
    /// What the disk did not take, and who wants to know what becomes of it.
    direct: Option<(Arc<Batch>, oneshot::Sender<Answer>)>,
    hurried: bool,
    /// No pause is honoured any more.
    flushing: bool,
    /// Why the journal cannot be read now.
    unreadable: Option<String>,
    /// As it was logged: an outage is told once, not at each attempt.
    complaint: Option<String>,
}

impl Courier {
    async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
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
                _ = cycles.tick() => self.cycle().await,
                () = pause => self.cycle().await,
                order = orders.recv() => match order {
                    None => return,
                    Some(Order::Direct(batch, reply)) => {
                        // Who asked before has given up.
                        self.direct = Some((batch, reply));
                        if self.hurried {
                            self.cycle().await;
                        }
                    }
                    Some(Order::Hurry) => {
                        self.hurried = true;
                        if self.direct.is_some() {
                            self.cycle().await;
                        }
                    }
                    Some(Order::Flush(until, done)) => {
                        self.flush(until).await;
                        // Who does not wait any more need not know.
                        let _ = done.send(());
                    }
                },
            }
        }
    }

    /// Sends all that was stored when it began, and what came directly, as far as it is taken.
    async fn cycle(&mut self) {
        self.outbox.begin_cycle(Instant::now().into_std());
        self.send_all().await;
        self.answer_direct();
    }

    async fn flush(&mut self, until: Instant) {
        self.flushing = true;
        loop {
            self.outbox.hurry();
            self.send_all().await;
            self.answer_direct();
            let left = self.outbox.unsent() > 0 || self.passed.is_none_or(|passed| passed < *self.appended.borrow());
            // As always, what was not taken is tried again after an interval.
            if !left || Instant::now() + self.policy.interval >= until {
                return;
            }
            sleep(self.policy.interval).await;
        }
    }

    async fn send_all(&mut self) {
        let stored = *self.appended.borrow();
        if self.passed.is_none() {
            self.resume().await;
        }
        loop {
            self.refill(stored).await;
            let Some(batch) = self.outbox.next_batch(Instant::now().into_std(), Timestamp::now()) else { break };
            self.write_down(Some(&batch)).await;
            self.publish();
            let sending = AssertUnwindSafe(self.way.send(batch.clone())).catch_unwind();
            let answer = sending.await.unwrap_or_else(|_| Answer::Unavailable("the way of events panicked".to_owned()));
            let now = (Instant::now().into_std(), Timestamp::now());
            for (event, reason) in self.outbox.answered(now.0, now.1, answer) {
                tracing::warn!(seq = event.seq, kind = event.event.kind(), reason, "an event was refused for good");
                self.refused.push(event.seq);
            }
            self.publish();
            self.complain();
            if self.outbox.is_kept() {
                break;
            }
        }
        let kept = self.written.1.clone().filter(|_| self.outbox.is_kept());
        self.write(self.settled(), kept).await;
        self.publish();
    }

    /// Goes on where the last satellite was.
    async fn resume(&mut self) {
        if !self.outbox.is_empty() {
            return; // What came directly is on its way, and would be in front of what is older.
        }
        let state = match self.journal.delivery().await {
            Ok(state) => state,
            Err(error) => {
                tracing::debug!(%error, "the journal does not tell how far delivery is; asking again");
                return;
            }
        };
        let mut passed = state.cursor;
        let rest = match &state.sending {
            Some(Sending { first, last, .. }) if *last > state.cursor => {
                let (first, last) = ((*first).max(state.cursor + 1), *last);
                let count = usize::try_from(last - first + 1).unwrap_or(usize::MAX);
                self.journal.outbox(first - 1, count.min(RESUMED_MAX)).await
            }
            Some(_) | None => Ok(Vec::new()),
        };
        let Ok(mut rest) = rest else { return };
        if let Some(sending) = state.sending {
            rest.retain(|event| event.seq <= sending.last && !sending.refused.contains(&event.seq));
            // Where its first event had to make room it is another batch.
            if rest.first().is_some_and(|first| first.seq == sending.first) {
                passed = passed.max(sending.last);
                self.refused.clone_from(&sending.refused);
                self.outbox.resume_batch(sending.id, rest);
                self.outbox.begin_cycle(Instant::now().into_std());
            }
        }
        self.written = (state.cursor, None);
        self.passed = Some(passed);
    }

    /// Reads on, up to what was stored when the cycle began, and takes what came directly behind that.
    async fn refill(&mut self, stored: u64) {
        let page = self.policy.batch_max * 2;
        while let Some(passed) = self.passed
            && passed < stored
            && self.outbox.statistics().queue_size < self.policy.batch_max
        {
            let rows = match self.journal.outbox(passed, page).await {
                Ok(rows) => rows,
                Err(error) => {
                    self.unreadable = Some(error.to_string());
                    break;
                }
            };
            self.unreadable = None;
            // A page without an event that can be read is no end: as many numbers further there may be more.
            let read = rows.last().map_or(passed.saturating_add(page as u64).min(stored), |last| last.seq);
            let went = self.direct_from..=self.direct_through;
            self.outbox.refill(rows.into_iter().filter(|row| row.seq <= stored && !went.contains(&row.seq)));
            self.passed = Some(read.min(stored));
        }
        if self.passed.is_none_or(|passed| passed >= stored)
            && let Some((batch, _)) = &self.direct
        {
            let known = self.direct_through.max(self.passed.unwrap_or_default());
            let news: Vec<Envelope> = batch.events.iter().filter(|event| event.seq > known).cloned().collect();
            if let Some(last) = news.last() {
                self.direct_from = self.direct_from.min(news.first().map_or(u64::MAX, |first| first.seq));
                self.direct_through = last.seq;
                self.passed = self.passed.map(|_| last.seq);
            }
            self.outbox.refill(news);
        }
        // What was just read belongs to this cycle.
        if self.flushing {
            self.outbox.hurry();
        } else if !self.outbox.is_kept() {
            self.outbox.begin_cycle(Instant::now().into_std());
        }
    }

    /// Whoever gave it is told once all of it is settled, or that it is not for now: it comes again, or the disk takes it.
    fn answer_direct(&mut self) {
        let Some((batch, reply)) = self.direct.take() else { return };
        let through = self.direct_through.max(self.passed.unwrap_or_default());
        let all_taken = batch.events.last().is_none_or(|last| last.seq <= through) && self.outbox.is_empty();
        let answer = if all_taken {
            Answer::Accepted
        } else {
            let reason = self.outbox.statistics().last_error;
            Answer::Unavailable(reason.unwrap_or_else(|| "what is stored has not been delivered".to_owned()))
        };
        // Who does not wait any more sends it again.
        let _ = reply.send(answer);
    }

    fn settled(&self) -> u64 {
        match self.outbox.settled_before() {
            Some(first) => first - 1,
            None => self.passed.unwrap_or(self.written.0),
        }
    }

    async fn write_down(&mut self, batch: Option<&Batch>) {
        let range = batch.and_then(|batch| Some((batch, batch.events.first()?.seq, batch.events.last()?.seq)));
        let sending = range.map(|(batch, first, last)| {
            let refused = self.refused.iter().copied().filter(|seq| (first..=last).contains(seq)).collect();
            Sending { id: batch.id, first, last, refused }
        });
        self.write(self.settled(), sending).await;
    }

    /// A disk that does not take it keeps nobody from sending: should the satellite be killed now, the events come again
    /// under another id.
    async fn write(&mut self, settled: u64, sending: Option<Sending>) {
        if self.passed.is_none() || self.written == (settled, sending.clone()) {
            return;
        }
        self.refused.retain(|seq| *seq > settled);
        if self.journal.sending(settled, sending.clone()).await.is_ok() {
            self.written = (settled, sending);
        }
    }

    fn publish(&self) {
        let now = self.outbox.statistics();
        let next = DeliveryStatus {
            to: self.published.borrow().to.clone(),
            state: now.state,
            backlog: 0,
            settled: self.settled(),
            sent: now.sent,
            failed: now.failed,
            last_sent: now.last_sent.map(|at| format!("{at:.3}")),
            last_error: now.last_error.or_else(|| self.unreadable.clone()),
        };
        self.published.send_if_modified(|status| {
            let changed = *status != next;
            *status = next;
            changed
        });
    }

    fn complain(&mut self) {
        let complaint = self.outbox.statistics().last_error.filter(|_| self.outbox.is_kept());
        let to = &self.published.borrow().to;
        match (&complaint, &self.complaint) {
            (Some(reason), before) if before.as_ref() != Some(reason) => {
                tracing::warn!(to, reason, "events are kept: they are not taken now");
            }
            (None, Some(_)) => tracing::info!(to, "events are taken again"),
            (Some(_) | None, _) => {}
        }
        self.complaint = complaint;
    }
}
