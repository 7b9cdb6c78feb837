//! The actor that collects events and sends them to the sink in batches. `rules::outbox` makes the decisions; this file
//! executes them.
//!
//! A local sink (`EventSink::is_prompt`) receives events at most `BatchPolicy::store_delay` after they were emitted, so
//! that many calls share one transaction, or earlier when a ring contains `HURRY_AT` events or is half full. Events that
//! it did not accept wait for the interval, so that a full disk is not retried in a loop.
//!
//! If the sink stores numbers, subscribers receive an event after it is stored. While the sink accepts nothing, they
//! receive it after its number is reserved.
//!
//! Emitting never blocks and never fails: events go into a bounded ring; the first one of a batch wakes the batcher. Tool
//! calls have a ring of their own, so that a storm of them displaces no event; `rules::request_log` turns several of them into one event.
//! If a handler panics, the death notice returns the queue, and Root passes it to the next batcher, which sends the
//! batch in flight again with the same id.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use futures::FutureExt;
use jiff::Timestamp;
use ractor::{Actor, ActorProcessingErr, ActorRef, cast};
use tokio::sync::{Notify, broadcast, oneshot, watch};
use tokio::time::{Duration, Instant};

use crate::model::event::{Envelope, Event};
use crate::model::policy::BatchPolicy;
use crate::probe::{ActorAnswer, ActorProbe};
use crate::rules::outbox::{Outbox, OutboxStatistics};
use crate::rules::request_log::LoggedCall;
use crate::seam::{EventSink, NumberStore, SinkAnswer};
use crate::tasks::{ActorTasks, catch_panic};

/// Number of events after which a slow subscriber misses some; it detects the gap in `seq`.
const SUBSCRIBER_BACKLOG: usize = 16 * 1024;

/// Messages to the batcher.
///
/// `Wake` means that a batch is due, and `Cycle` starts a cycle. `Reserved` contains the last reserved number, or the
/// reason for the refusal. `FlushNow` starts a cycle and replies at its end. `FlushAndEnd` flushes the queue,
/// replies with the number of unsent events, and ends; a sink that stores numbers is then called only once, so that a
/// hanging disk does not delay the end. `Panic` panics on purpose, for the load harness and the tests.
pub(crate) enum Msg {
    Wake,
    Cycle,
    Answered(SinkAnswer),
    Reserved(Result<u64, String>),
    FlushNow(oneshot::Sender<()>),
    FlushAndEnd(oneshot::Sender<usize>),
    Probe(ActorProbe),
    Panic,
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

/// Wall clock of the host; this crate contains none.
pub type WallClock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// Sender of events, cloned into every part that emits them.
#[derive(Clone)]
pub struct EventSender(Arc<EventRing>);

struct EventRing {
    ring: ArrayQueue<(Timestamp, Event)>,
    lost: AtomicU64,
    requests: ArrayQueue<Box<LoggedCall>>,
    requests_lost: AtomicU64,
    closed: AtomicBool,
    // Wakes the batcher after the delay.
    wake: Notify,
    // Ends the delay.
    hurry: Notify,
    // Pending wake-up: further emitters need not send the same one.
    pending: AtomicU8,
    wall: WallClock,
    // Last time of the wall clock, in microseconds since 1970.
    wall_last: AtomicI64,
    subscribers: broadcast::Sender<Arc<Envelope>>,
    statistics: watch::Sender<OutboxStatistics>,
}

/// Values of [`EventRing::pending`].
const NO_WAKE: u8 = 0;
const WAKE: u8 = 1;
const HURRY: u8 = 2;

/// Number of waiting events, or of logged calls, that ends the delay. A batch is handled without a pause, and more of them
/// would delay the calls that the same thread serves.
const HURRY_AT: usize = 128;

impl EventRing {
    fn wake<T>(&self, ring: &ArrayQueue<T>) {
        let needed = if ring.len() >= HURRY_AT.min(ring.capacity() / 2) { HURRY } else { WAKE };
        // `SeqCst`, also in `drain_ring`: an event that finds a pending wake-up is in the ring before it is drained.
        if self.pending.load(Ordering::SeqCst) >= needed {
            return;
        }
        let before = self.pending.fetch_max(needed, Ordering::SeqCst);
        if before == NO_WAKE {
            self.wake.notify_one();
        }
        if before < needed && needed == HURRY {
            self.hurry.notify_one();
        }
    }

    fn send_to_subscribers(&self, envelope: &Envelope) {
        if self.subscribers.receiver_count() > 0 {
            // The send fails if there is no subscriber any more.
            let _ = self.subscribers.send(Arc::new(envelope.clone()));
        }
    }
}

impl EventSender {
    pub(crate) fn new(policy: &BatchPolicy, wall: WallClock) -> Self {
        Self(Arc::new(EventRing {
            ring: ArrayQueue::new(policy.queue_max.max(1)),
            lost: AtomicU64::new(0),
            requests: ArrayQueue::new((policy.queue_max / 2).max(1)),
            requests_lost: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            wake: Notify::new(),
            hurry: Notify::new(),
            pending: AtomicU8::new(NO_WAKE),
            wall,
            wall_last: AtomicI64::new(0),
            subscribers: broadcast::Sender::new(SUBSCRIBER_BACKLOG),
            statistics: watch::Sender::default(),
        }))
    }

    /// Queues an event. Never blocks or fails: above the limit of the queue, the oldest event is dropped and counted.
    pub fn emit(&self, event: Event) {
        let shared = &self.0;
        if shared.closed.load(Ordering::Acquire) {
            return;
        }
        if shared.ring.force_push((self.wall(), event)).is_some() {
            shared.lost.fetch_add(1, Ordering::AcqRel);
        }
        shared.wake(&shared.ring);
    }

    pub(crate) fn log_call(&self, request: LoggedCall) {
        let shared = &self.0;
        if shared.closed.load(Ordering::Acquire) {
            return;
        }
        if shared.requests.force_push(Box::new(request)).is_some() {
            shared.requests_lost.fetch_add(1, Ordering::AcqRel);
        }
        shared.wake(&shared.requests);
    }

    /// Returns the time of the wall clock; if the clock panics, the last time that it returned.
    pub fn wall(&self) -> Timestamp {
        let last = &self.0.wall_last;
        if let Some(now) = catch_panic("the wall clock", || (self.0.wall)()) {
            last.store(now.as_microsecond(), Ordering::Relaxed);
            return now;
        }
        Timestamp::from_microsecond(last.load(Ordering::Relaxed)).unwrap_or_default()
    }

    /// Returns a receiver of all later events, in order of `seq`. A slow receiver detects missed events by a gap in
    /// `seq`.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<Envelope>> {
        self.0.subscribers.subscribe()
    }

    /// Returns the statistics of the batcher, including events that it has not received yet.
    pub fn statistics(&self) -> OutboxStatistics {
        let mut now = self.0.statistics.borrow().clone();
        now.queue_size += self.0.ring.len();
        now.dropped += self.0.lost.load(Ordering::Acquire);
        now
    }

    fn publish_statistics(&self, outbox: &Outbox) {
        self.0.statistics.send_replace(outbox.statistics());
    }

    pub(crate) fn close(&self) {
        // Later events are dropped: the satellite is shutting down.
        self.0.closed.store(true, Ordering::Release);
    }
}

pub(crate) struct Args {
    pub(crate) events: EventSender,
    pub(crate) sink: Arc<dyn EventSink>,
    pub(crate) interval: Duration,
    pub(crate) store_delay: Duration,
    pub(crate) outbox: Outbox,
}

/// Death notice of a batcher that panicked, with its queue.
pub(crate) struct BatcherDeath {
    pub(crate) outbox: Option<Box<Outbox>>,
    panic: String,
}

impl std::fmt::Debug for BatcherDeath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Died({})", self.panic)
    }
}

impl std::fmt::Display for BatcherDeath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the event batcher panicked: {}", self.panic)
    }
}

impl std::error::Error for BatcherDeath {}

pub(crate) struct EventBatcher;

pub(crate) struct State {
    events: EventSender,
    sink: Arc<dyn EventSink>,
    is_prompt: bool,
    // True if a prompt sink is to receive the waiting events as soon as it has accepted the batch in flight.
    due: bool,
    numbers: Option<Arc<dyn NumberStore>>,
    numbering: NumberReservation,
    // `None` after the batcher has died.
    outbox: Option<Box<Outbox>>,
    // Replies due at the end of this cycle.
    waiting: Vec<oneshot::Sender<()>>,
    flushing: Option<oneshot::Sender<usize>>,
    // Next wake-up for logged calls that become due.
    alarm: Option<Instant>,
    tasks: ActorTasks,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NumberReservation {
    Ready,
    Pending,
    // The next cycle asks again.
    Refused,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for EventBatcher {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, myself: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        let mut tasks = ActorTasks::default();
        let is_prompt = catch_panic("EventSink::is_prompt", || args.sink.is_prompt()).unwrap_or(false);
        let delay = if is_prompt { args.store_delay } else { Duration::ZERO };
        let (shared, me) = (args.events.0.clone(), myself.clone());
        tasks.spawn(async move {
            loop {
                shared.wake.notified().await;
                if !delay.is_zero() {
                    tokio::select! {
                        () = tokio::time::sleep(delay) => {}
                        () = shared.hurry.notified() => {}
                    }
                }
                if cast!(me, Msg::Wake).is_err() {
                    return;
                }
            }
        });
        let interval = args.interval;
        tasks.spawn(async move {
            loop {
                tokio::time::sleep(interval).await;
                if cast!(myself, Msg::Cycle).is_err() {
                    return;
                }
            }
        });
        // Wake-ups between two batchers were sent to the dead one.
        args.events.0.wake.notify_one();
        let mut outbox = args.outbox;
        outbox.prepare_resend();
        let numbers = catch_panic("EventSink::numbers", || args.sink.number_store()).flatten();
        Ok(State {
            events: args.events,
            sink: args.sink,
            is_prompt,
            due: false,
            numbers,
            numbering: NumberReservation::Ready,
            outbox: Some(Box::new(outbox)),
            waiting: Vec::new(),
            flushing: None,
            alarm: None,
            tasks,
        })
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(|| state.handle(&myself, msg))) else {
            return Ok(());
        };
        Err(Box::new(BatcherDeath { outbox: state.outbox.take(), panic: crate::tasks::panic_text(panic.as_ref()) }))
    }
}

impl State {
    fn handle(&mut self, myself: &ActorRef<Msg>, msg: Msg) {
        let now = Instant::now().into_std();
        let wall = self.events.wall();
        match &msg {
            Msg::FlushNow(_) | Msg::FlushAndEnd(_) => self.collect(myself, None),
            Msg::Wake | Msg::Cycle if self.flushing.is_some() => self.collect(myself, None),
            Msg::Wake => self.collect(myself, Some(now)),
            // Events for a prompt sink wait for their wake-up, unless the cycle repeats a batch anyway.
            Msg::Cycle if !self.is_prompt || self.outbox.as_ref().is_some_and(|outbox| outbox.has_kept_batch()) => {
                self.collect(myself, Some(now));
            }
            Msg::Cycle | Msg::Answered(_) | Msg::Reserved(_) | Msg::Probe(_) | Msg::Panic => {}
        }
        if self.numbering == NumberReservation::Refused
            && matches!(msg, Msg::Cycle | Msg::FlushNow(_) | Msg::FlushAndEnd(_))
        {
            self.numbering = NumberReservation::Ready;
        }
        let Some(outbox) = &mut self.outbox else { return };
        match msg {
            Msg::Wake => {
                self.due = true;
                self.send_if_due(myself);
            }
            Msg::Cycle => {
                outbox.begin_cycle(now);
                self.send_next(myself);
            }
            Msg::Answered(answer) => {
                let is_kept =
                    matches!(answer, SinkAnswer::Unauthorized | SinkAnswer::Throttled(_) | SinkAnswer::Unavailable(_));
                if self.numbers.is_some()
                    && matches!(answer, SinkAnswer::Accepted | SinkAnswer::Partial(_))
                    && let Some(stored) = outbox.last_in_flight()
                {
                    outbox.show(stored, |envelope| self.events.0.send_to_subscribers(envelope));
                }
                for (event, reason) in outbox.apply_answer(now, wall, answer) {
                    tracing::warn!(seq = event.seq, kind = event.event.kind(), reason, "the sink refused an event");
                }
                if is_kept {
                    let reason = outbox.statistics().last_error.unwrap_or_default();
                    tracing::warn!(reason, "the sink did not accept a batch; the events are kept");
                    if let Some(until) = outbox.paused_until() {
                        let me = myself.clone();
                        self.tasks.spawn(async move {
                            tokio::time::sleep_until(until.into()).await;
                            // The cast fails if the batcher has ended.
                            let _ = cast!(me, Msg::Cycle);
                        });
                    }
                }
                // During a shutdown, too, a failing sink is tried again only after an interval.
                if !is_kept {
                    self.send_next(myself);
                    self.send_if_due(myself);
                }
            }
            Msg::Reserved(Ok(through)) => {
                self.numbering = NumberReservation::Ready;
                outbox.show(through, |envelope| self.events.0.send_to_subscribers(envelope));
            }
            Msg::Reserved(Err(reason)) => {
                self.numbering = NumberReservation::Refused;
                tracing::warn!(reason, "cannot reserve event numbers; the events wait in memory unseen");
                outbox.record_reservation_failure(reason);
            }
            Msg::FlushNow(reply) => {
                outbox.begin_cycle(now);
                self.waiting.push(reply);
                self.send_next(myself);
            }
            Msg::FlushAndEnd(reply) => {
                outbox.begin_final_cycle();
                self.flushing = Some(reply);
                self.send_next(myself);
            }
            Msg::Probe(probe) => {
                let backlog = outbox.statistics().queue_size + self.events.0.ring.len();
                probe.answer(|took| ActorAnswer::Batcher { took, backlog });
            }
            Msg::Panic => std::panic::panic_any("asked to panic"),
        }
        self.reserve_numbers(myself);
        self.complete_flush(myself);
    }

    /// Queues the emitted events and those of the request log: the ones due at `now`, or all.
    fn collect(&mut self, myself: &ActorRef<Msg>, now: Option<std::time::Instant>) {
        self.drain_ring(myself);
        self.emit_request_logs(now);
        if now.is_some() {
            self.set_alarm();
        }
    }

    fn drain_ring(&mut self, myself: &ActorRef<Msg>) {
        // At most one ringful: emitters may be as fast as this loop, and a cycle must not wait for them.
        let shared = self.events.0.clone();
        let Some(outbox) = &mut self.outbox else { return };
        shared.pending.store(NO_WAKE, Ordering::SeqCst);
        for drained in 0..=shared.ring.capacity() {
            outbox.record_lost(shared.lost.swap(0, Ordering::AcqRel));
            if drained == shared.ring.capacity() {
                shared.pending.store(WAKE, Ordering::SeqCst);
                let _ = cast!(myself, Msg::Wake);
                break;
            }
            let Some((timestamp, event)) = shared.ring.pop() else { break };
            if let Some(envelope) = outbox.push(timestamp, event)
                && self.numbers.is_none()
            {
                shared.send_to_subscribers(envelope);
            }
        }
        self.events.publish_statistics(outbox);
    }

    fn emit_request_logs(&mut self, now: Option<std::time::Instant>) {
        // Without a time all calls are due.
        let shared = self.events.0.clone();
        let Some(outbox) = &mut self.outbox else { return };
        let at = now.unwrap_or_else(|| Instant::now().into_std());
        let mut log_events = Vec::new();
        // At most one ringful, as with events; later calls wake the batcher again.
        for _ in 0..shared.requests.capacity() {
            let Some(request) = shared.requests.pop() else { break };
            log_events.extend(outbox.request_log().add(at, *request));
        }
        let lost = shared.requests_lost.swap(0, Ordering::AcqRel);
        if lost > 0 {
            tracing::warn!(lost, "calls came faster than they could be logged; the oldest are not in the request log");
        }
        log_events.extend(match now {
            Some(now) => outbox.request_log().take_due(now),
            None => outbox.request_log().take_all(),
        });
        let wall = self.events.wall();
        for event in log_events {
            if let Some(envelope) = outbox.push(wall, event)
                && self.numbers.is_none()
            {
                shared.send_to_subscribers(envelope);
            }
        }
        self.events.publish_statistics(outbox);
    }

    fn set_alarm(&mut self) {
        let Some(due) = self.outbox.as_mut().and_then(|outbox| outbox.request_log().due_at()) else { return };
        let due = Instant::from_std(due);
        let now = Instant::now();
        if self.alarm.is_some_and(|alarm| now < alarm && alarm <= due) {
            return;
        }
        self.alarm = Some(due);
        let shared = self.events.0.clone();
        self.tasks.spawn(async move {
            tokio::time::sleep_until(due).await;
            // Like an emitted event, so that the events of many instances share a batch.
            shared.wake(&shared.requests);
        });
    }

    fn send_if_due(&mut self, myself: &ActorRef<Msg>) {
        let Some(outbox) = &mut self.outbox else { return };
        if self.is_prompt && self.due && outbox.is_idle() {
            self.due = false;
            outbox.begin_cycle(Instant::now().into_std());
            self.send_next(myself);
        }
    }

    /// Reserves the numbers of events that the sink did not accept, so that they can be shown.
    fn reserve_numbers(&mut self, myself: &ActorRef<Msg>) {
        let (Some(outbox), Some(numbers)) = (&self.outbox, &self.numbers) else { return };
        let Some(through) = outbox.last_unshown() else { return };
        if self.numbering != NumberReservation::Ready || !outbox.has_kept_batch() {
            return;
        }
        self.numbering = NumberReservation::Pending;
        let (numbers, me) = (numbers.clone(), myself.clone());
        self.tasks.spawn(async move {
            // `reserve` itself may panic before it returns a future.
            let reserving = async move { numbers.reserve(through).await };
            let reserved = AssertUnwindSafe(reserving).catch_unwind().await;
            let reserved = reserved.unwrap_or_else(|panic| {
                Err(format!("the number store panicked: {}", crate::tasks::panic_text(panic.as_ref())))
            });
            // The cast fails if the batcher is gone; the next one asks again.
            let _ = cast!(me, Msg::Reserved(reserved.map(|()| through)));
        });
    }

    fn send_next(&mut self, myself: &ActorRef<Msg>) {
        let Some(outbox) = &mut self.outbox else { return };
        let batch = outbox.next_batch(Instant::now().into_std(), self.events.wall());
        let announcements = outbox.take_gap_announcements();
        if self.numbers.is_none() {
            for announcement in &announcements {
                self.events.0.send_to_subscribers(announcement);
            }
        }
        let Some(batch) = batch else { return };
        let (sink, me) = (self.sink.clone(), myself.clone());
        self.tasks.spawn(async move {
            // `send` itself may panic before it returns a future.
            let answer = AssertUnwindSafe(async move { sink.send(batch).await }).catch_unwind().await;
            let answer = answer.unwrap_or_else(|panic| {
                SinkAnswer::Unavailable(format!("the sink panicked: {}", crate::tasks::panic_text(panic.as_ref())))
            });
            // The cast fails if the batcher is gone; the next one sends the batch again.
            let _ = cast!(me, Msg::Answered(answer));
        });
    }

    fn complete_flush(&mut self, myself: &ActorRef<Msg>) {
        let Some(outbox) = &self.outbox else { return };
        self.events.publish_statistics(outbox);
        let is_under_way = outbox.is_sending() || self.numbering == NumberReservation::Pending;
        if !is_under_way {
            for reply in self.waiting.drain(..) {
                let _ = reply.send(());
            }
        }
        let gives_up = self.numbers.is_some() && outbox.has_kept_batch();
        if (outbox.is_empty() || !is_under_way && gives_up)
            && let Some(reply) = self.flushing.take()
        {
            let _ = reply.send(outbox.unsent());
            myself.stop(None);
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // A flush that was cut short reports the unsent events.
        if let (Some(reply), Some(outbox)) = (self.flushing.take(), &self.outbox) {
            let _ = reply.send(outbox.unsent());
        }
    }
}
