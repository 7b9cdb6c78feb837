//! The actor that collects events and sends them to the sink in batches. `rules::outbox` makes the decisions; this file
//! executes them.
//!
//! A local sink (`EventSink::is_prompt`) receives events as soon as it has accepted the previous batch, so a storm of
//! events results in batches, and a single event does not wait. Events that it did not accept wait for the interval, so
//! that a full disk is not retried in a loop.
//!
//! Emitting never blocks and never fails: events go into a bounded ring, followed by a wake-up. Tool calls have a ring
//! of their own, so that a storm of them displaces no event; `rules::request_log` turns several of them into one event.
//! If a handler panics, the death notice returns the queue, and Root passes it to the next batcher, which sends the
//! batch in flight again with the same id.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use futures::FutureExt;
use jiff::Timestamp;
use ractor::{Actor, ActorProcessingErr, ActorRef, cast};
use tokio::sync::{Notify, broadcast, oneshot, watch};
use tokio::time::{Duration, Instant};

use crate::model::event::{Envelope, Event};
use crate::model::policy::BatchPolicy;
use crate::rules::outbox::{Outbox, OutboxStatistics};
use crate::rules::request_log::LoggedCall;
use crate::seam::{EventSink, NumberStore, SinkAnswer};
use crate::tasks::{ActorTasks, catch_panic};

/// Number of events after which a slow subscriber misses some; it detects the gap in `seq`.
const SUBSCRIBER_BACKLOG: usize = 16 * 1024;

/// Messages to the batcher.
///
/// `Wake` means that events are in the ring, and `Cycle` starts a cycle. `Reserved` contains the last reserved number,
/// or the reason for the refusal. `FlushNow` starts a cycle and replies at its end. `FlushAndEnd` flushes the queue,
/// replies with the number of unsent events, and ends; a sink that stores numbers is then called only once, so that a
/// hanging disk does not delay the end. `Panic` panics on purpose, for the load harness and the tests.
pub(crate) enum Msg {
    Wake,
    Cycle,
    Answered(SinkAnswer),
    Reserved(Result<u64, String>),
    FlushNow(oneshot::Sender<()>),
    FlushAndEnd(oneshot::Sender<usize>),
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
    wake: Notify,
    // True while a wake-up is pending: further emitters need not send one.
    wake_pending: AtomicBool,
    wall: WallClock,
    // Last time of the wall clock, in microseconds since 1970.
    wall_last: AtomicI64,
    subscribers: broadcast::Sender<Arc<Envelope>>,
    statistics: watch::Sender<OutboxStatistics>,
}

impl EventRing {
    fn wake(&self) {
        if !self.wake_pending.swap(true, Ordering::AcqRel) {
            self.wake.notify_one();
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
            wake_pending: AtomicBool::new(false),
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
        shared.wake();
    }

    pub(crate) fn log_call(&self, request: LoggedCall) {
        let shared = &self.0;
        if shared.closed.load(Ordering::Acquire) {
            return;
        }
        if shared.requests.force_push(Box::new(request)).is_some() {
            shared.requests_lost.fetch_add(1, Ordering::AcqRel);
        }
        shared.wake();
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
        let (shared, me) = (args.events.0.clone(), myself.clone());
        tasks.spawn(async move {
            loop {
                shared.wake.notified().await;
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
        if numbers.is_some() {
            outbox.reserve_numbers();
        }
        Ok(State {
            events: args.events,
            sink: args.sink,
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
        self.drain_ring(myself);
        if matches!(msg, Msg::FlushNow(_) | Msg::FlushAndEnd(_)) || self.flushing.is_some() {
            self.emit_request_logs(None);
        } else {
            self.emit_request_logs(Some(now));
            self.set_alarm(myself);
        }
        if self.numbering == NumberReservation::Refused
            && matches!(msg, Msg::Cycle | Msg::FlushNow(_) | Msg::FlushAndEnd(_))
        {
            self.numbering = NumberReservation::Ready;
        }
        let Some(outbox) = &mut self.outbox else { return };
        match msg {
            Msg::Wake => self.send_if_prompt(myself),
            Msg::Cycle => {
                outbox.begin_cycle(now);
                self.send_next(myself);
            }
            Msg::Answered(answer) => {
                let is_kept =
                    matches!(answer, SinkAnswer::Unauthorized | SinkAnswer::Throttled(_) | SinkAnswer::Unavailable(_));
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
                    self.send_if_prompt(myself);
                }
            }
            Msg::Reserved(Ok(through)) => {
                self.numbering = NumberReservation::Ready;
                for envelope in outbox.assign_numbers(through) {
                    self.events.0.send_to_subscribers(envelope);
                }
                if !self.waiting.is_empty() || self.flushing.is_some() {
                    outbox.begin_cycle(now);
                    self.send_next(myself);
                }
                self.send_if_prompt(myself);
            }
            Msg::Reserved(Err(reason)) => {
                self.numbering = NumberReservation::Refused;
                tracing::warn!(reason, "cannot reserve event numbers; the events wait in memory");
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
            Msg::Panic => std::panic::panic_any("asked to panic"),
        }
        self.reserve_numbers(myself);
        self.complete_flush(myself);
    }

    fn drain_ring(&mut self, myself: &ActorRef<Msg>) {
        // At most one ringful: emitters may be as fast as this loop, and a cycle must not wait for them.
        let shared = self.events.0.clone();
        let Some(outbox) = &mut self.outbox else { return };
        shared.wake_pending.store(false, Ordering::Release);
        for drained in 0..=shared.ring.capacity() {
            outbox.record_lost(shared.lost.swap(0, Ordering::AcqRel));
            if drained == shared.ring.capacity() {
                shared.wake_pending.store(true, Ordering::Release);
                let _ = cast!(myself, Msg::Wake);
                break;
            }
            let Some((timestamp, event)) = shared.ring.pop() else { break };
            if let Some(envelope) = outbox.push(timestamp, event) {
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
            if let Some(envelope) = outbox.push(wall, event) {
                shared.send_to_subscribers(envelope);
            }
        }
        self.events.publish_statistics(outbox);
    }

    fn set_alarm(&mut self, myself: &ActorRef<Msg>) {
        let Some(due) = self.outbox.as_mut().and_then(|outbox| outbox.request_log().due_at()) else { return };
        let due = Instant::from_std(due);
        let now = Instant::now();
        if self.alarm.is_some_and(|alarm| now < alarm && alarm <= due) {
            return;
        }
        self.alarm = Some(due);
        let me = myself.clone();
        self.tasks.spawn(async move {
            tokio::time::sleep_until(due).await;
            // The cast fails if the batcher is gone; the next one sets its own alarm.
            let _ = cast!(me, Msg::Wake);
        });
    }

    fn send_if_prompt(&mut self, myself: &ActorRef<Msg>) {
        let Some(outbox) = &mut self.outbox else { return };
        if outbox.is_idle() && catch_panic("EventSink::is_prompt", || self.sink.is_prompt()) == Some(true) {
            outbox.begin_cycle(Instant::now().into_std());
            self.send_next(myself);
        }
    }

    fn reserve_numbers(&mut self, myself: &ActorRef<Msg>) {
        // A batch in flight is awaited first: only events that can be sent next need numbers.
        let (Some(outbox), Some(numbers)) = (&self.outbox, &self.numbers) else { return };
        let Some(through) = outbox.last_needed_number() else { return };
        if self.numbering != NumberReservation::Ready || outbox.is_sending() {
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
        for announcement in outbox.take_gap_announcements() {
            self.events.0.send_to_subscribers(&announcement);
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
        let gives_up =
            self.numbers.is_some() && (outbox.has_kept_batch() || self.numbering == NumberReservation::Refused);
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
