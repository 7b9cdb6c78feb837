//! Event queue: numbering, limits, batches, and the effect of each answer of the sink. The batcher executes its
//! decisions.
//!
//! ```text
//!  push → queue (limit: the oldest are dropped, gaps are recorded) → batch in flight → accepted: removed
//!                                                                      │  keep: the same batch again, same ID
//!                                                                      └─ split: back to the front, smaller batch
//! ```
//!
//! An event gets its number when it is queued. If the sink stores numbers, the event is shown to subscribers only after
//! it is stored or its number is reserved (`Outbox::show`): otherwise the next satellite could use a number again that
//! somebody has seen.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::model::backoff::Backoff;
use crate::model::event::{Envelope, Event};
use crate::model::policy::BatchPolicy;
use crate::rules::request_log::RequestLog;
use crate::seam::{SinkAnswer, SinkBatch};

// Reconnecting events of one instance are thinned out: the first five are kept, then one at each doubling of their
// count.
const RECONNECTING_UNTHINNED: u64 = 5;

// Maximum pause that a sink can request.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// Counters for `status` and the load report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutboxStatistics {
    /// Number of waiting events, without the batch in flight.
    pub queue_size: usize,
    /// Number of events received, including those without a number.
    pub emitted: u64,
    /// Number of events that the sink accepted.
    pub sent: u64,
    /// Number of events that the sink rejected for good.
    pub failed: u64,
    /// Number of events dropped because the queue exceeded its limit.
    pub dropped: u64,
    /// Time at which the sink last accepted a batch.
    pub last_sent: Option<Timestamp>,
    /// Last error of the sink; cleared by a success.
    pub last_error: Option<String>,
    /// Activity of the batcher.
    pub state: BatcherState,
}

impl OutboxStatistics {
    /// Returns the number of received events that were neither accepted, rejected nor dropped.
    pub fn unsent(&self) -> usize {
        let settled = self.sent + self.failed + self.dropped;
        usize::try_from(self.emitted.saturating_sub(settled)).unwrap_or(usize::MAX)
    }
}

/// Activity of the batcher.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BatcherState {
    /// Waiting for the next cycle.
    #[default]
    Idle,
    /// A batch is in flight.
    Sending,
    /// The sink did not accept the last batch.
    Retrying,
    /// The sink requested a pause.
    BackingOff,
}

// Capacity that the queue keeps when it is empty, in events.
const EMPTY_CAPACITY: usize = 1_024;

/// Event queue. Survives a panic of the batcher: the death notice returns it.
#[derive(Debug)]
pub struct Outbox {
    policy: BatchPolicy,
    next_seq: u64,
    next_batch: u64,
    queue: VecDeque<Envelope>,
    // Last number that was passed to `show`.
    shown_through: u64,
    in_flight: Option<Arc<SinkBatch>>,
    // True while the sink processes the batch in flight; false if the batch waits for the next cycle.
    sending: bool,
    // Number of events at the front among which the sink reported an invalid one.
    suspect_count: usize,
    // Maximum size of the next batch: halved by 413, restored by a success.
    batch_max: usize,
    // Number of consecutive answers 429.
    throttled: u32,
    sent_at: Option<Instant>,
    not_before: Option<Instant>,
    // Events with numbers below this are sent in this cycle.
    cycle_end: u64,
    // Disjoint ranges of dropped events, first → last, that are not announced yet. There are several if an announcement
    // was itself dropped after events outside its range had been sent.
    gaps: BTreeMap<u64, u64>,
    // Announcements not yet passed to the listeners.
    gap_announcements: Vec<Envelope>,
    reconnecting: HashMap<Arc<str>, u64>,
    requests: RequestLog,
    statistics: OutboxStatistics,
}

impl Outbox {
    /// Creates an empty queue whose first event gets the number `next_seq`. Batches count up from `first_batch`, which
    /// must differ from every batch ID of earlier processes: a sink that drops repeated batches would drop new ones.
    pub fn new(mut policy: BatchPolicy, next_seq: u64, first_batch: u64) -> Self {
        policy.batch_max = policy.batch_max.max(1);
        policy.queue_max = policy.queue_max.max(1);
        Self {
            next_seq,
            next_batch: first_batch,
            queue: VecDeque::new(),
            shown_through: 0,
            in_flight: None,
            sending: false,
            suspect_count: 0,
            batch_max: policy.batch_max,
            throttled: 0,
            sent_at: None,
            not_before: None,
            cycle_end: 0,
            gaps: BTreeMap::new(),
            gap_announcements: Vec::new(),
            reconnecting: HashMap::new(),
            requests: RequestLog::new(&policy),
            statistics: OutboxStatistics::default(),
            policy,
        }
    }

    /// Numbers and queues an event. Returns the envelope unless it was thinned out. If the queue exceeds its limit, the
    /// oldest event is dropped.
    pub fn push(&mut self, timestamp: Timestamp, event: Event) -> Option<&Envelope> {
        if self.should_thin_out(&event) {
            return None;
        }
        self.statistics.emitted += 1;
        let seq = self.next_seq;
        self.next_seq += 1;
        self.queue.push_back(Envelope { seq, timestamp, event });
        while self.queue.len() > self.policy.queue_max
            && let Some(oldest) = self.queue.pop_front()
        {
            self.drop_oldest(&oldest);
        }
        self.queue.back()
    }

    /// Passes the waiting events with numbers up to `through` to `show`, in order, each event once. After a restart no
    /// other event may get these numbers.
    pub fn show(&mut self, through: u64, show: impl FnMut(&Envelope)) {
        let in_flight = self.in_flight.iter().flat_map(|batch| &batch.events);
        let new = in_flight.chain(&self.queue).skip_while(|envelope| envelope.seq <= self.shown_through);
        new.take_while(|envelope| envelope.seq <= through).for_each(show);
        self.shown_through = self.shown_through.max(through);
    }

    /// Returns the last number of the batch in flight.
    pub fn last_in_flight(&self) -> Option<u64> {
        self.in_flight.as_ref().and_then(|batch| batch.events.last()).map(|last| last.seq)
    }

    /// Returns the last number of the waiting events; `None` if all of them were shown.
    pub fn last_unshown(&self) -> Option<u64> {
        let last = self.queue.back().map(|last| last.seq).or(self.last_in_flight());
        last.filter(|last| *last > self.shown_through)
    }

    /// Records that no numbers could be reserved. The events keep waiting and are not shown.
    pub fn record_reservation_failure(&mut self, reason: String) {
        self.statistics.last_error = Some(reason);
    }

    /// Queues events that already have numbers, as read from storage: in order, after all waiting events. Events out of
    /// order are ignored. The limit of the queue does not apply: the reader requests no more events than there is room
    /// for.
    pub fn refill(&mut self, events: impl IntoIterator<Item = Envelope>) {
        for envelope in events {
            let last = self.queue.back().or(self.in_flight.as_ref().and_then(|batch| batch.events.last()));
            if last.is_none_or(|last| envelope.seq > last.seq) {
                self.next_seq = self.next_seq.max(envelope.seq.saturating_add(1));
                self.statistics.emitted += 1;
                self.queue.push_back(envelope);
            }
        }
    }

    /// Restores the batch that was in flight when an earlier process ended. It is sent first, with its ID, so this must
    /// be called before any event is queued.
    pub fn resume_batch(&mut self, id: u64, events: Vec<Envelope>) {
        let Some(last) = events.last().map(|last| last.seq) else { return };
        debug_assert!(self.in_flight.is_none() && self.queue.is_empty(), "a restored batch must precede all events");
        self.next_seq = self.next_seq.max(last.saturating_add(1));
        self.statistics.emitted += events.len() as u64;
        self.in_flight = Some(Arc::new(SinkBatch { id, events }));
    }

    /// Returns the number of the first unsettled event; `None` if there is none. All earlier events were accepted,
    /// rejected for good or dropped.
    pub fn first_unsettled(&self) -> Option<u64> {
        let in_flight = self.in_flight.as_ref().and_then(|batch| batch.events.first());
        in_flight.or(self.queue.front()).map(|first| first.seq)
    }

    /// Returns true if no batch is in flight, neither sent nor kept.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_none()
    }

    /// Returns true if a batch was not accepted and waits for the next cycle.
    pub fn has_kept_batch(&self) -> bool {
        !self.sending && self.in_flight.is_some()
    }

    /// Records `count` events that were lost before they could be queued. They get numbers, so that the gap is visible.
    /// They are newer than all waiting events, so those are dropped as well.
    pub fn record_lost(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        for oldest in std::mem::take(&mut self.queue) {
            self.drop_oldest(&oldest);
        }
        self.statistics.emitted += count;
        self.statistics.dropped += count;
        let first = self.next_seq;
        self.next_seq += count;
        self.widen_gap(first, self.next_seq - 1);
    }

    /// Returns the calls that are not yet part of an event.
    pub fn request_log(&mut self) -> &mut RequestLog {
        &mut self.requests
    }

    /// Begins a cycle: the events queued now are sent, in as many batches as needed.
    pub fn begin_cycle(&mut self, now: Instant) {
        if self.not_before.is_none_or(|at| now >= at) {
            self.not_before = None;
            self.cycle_end = self.next_seq;
        }
    }

    /// Returns the batch to send now: the kept one or a new one. `None` if there is nothing to send or a pause is in
    /// effect.
    pub fn next_batch(&mut self, now: Instant, wall: Timestamp) -> Option<Arc<SinkBatch>> {
        if self.sending || self.not_before.is_some_and(|at| now < at) {
            return None;
        }
        if self.queue.is_empty() && self.gaps.keys().next().is_some_and(|first| *first < self.cycle_end) {
            self.announce_gaps(wall);
        }
        let first = self.in_flight.as_ref().map_or(self.queue.front(), |batch| batch.events.first());
        if first.is_none_or(|first| first.seq >= self.cycle_end) {
            return None;
        }
        if self.in_flight.is_none() {
            let wanted = if self.suspect_count > 1 { self.suspect_count / 2 } else { self.suspect_count };
            let size = if wanted > 0 { wanted } else { self.batch_max }.min(self.batch_max).min(self.queue.len());
            let events: Vec<Envelope> = self.queue.drain(..size).collect();
            self.shrink_queue();
            let id = self.next_batch;
            self.next_batch += 1;
            self.in_flight = Some(Arc::new(SinkBatch { id, events }));
            self.announce_gaps(wall);
        }
        self.sending = true;
        self.sent_at = Some(now);
        self.in_flight.clone()
    }

    // Releases capacity after an outage. It is halved, so that a queue of varying length is not copied each time.
    fn shrink_queue(&mut self) {
        let room = self.queue.capacity();
        if room > EMPTY_CAPACITY && self.queue.len() < room / 4 {
            self.queue.shrink_to(room / 2);
        }
    }

    /// Applies the answer of the sink to the batch in flight. Returns the events that were rejected for good, with the
    /// reasons, to be logged.
    pub fn apply_answer(&mut self, now: Instant, wall: Timestamp, answer: SinkAnswer) -> Vec<(Envelope, String)> {
        self.sending = false;
        let Some(batch) = self.in_flight.take() else { return Vec::new() };
        let count = batch.events.len();
        match answer {
            SinkAnswer::Accepted => {
                self.record_success(wall, count, 0);
                Vec::new()
            }
            SinkAnswer::Partial(failures) => {
                let refused = rejected_events(&batch, failures);
                self.record_success(wall, count - refused.len(), refused.len());
                refused
            }
            SinkAnswer::Invalid(Some(index), reason) if index < count => {
                let refused = rejected_events(&batch, vec![(index, reason)]);
                self.suspect_count = 0;
                self.record_rejections(&refused);
                let rest = batch.events.iter().enumerate().filter(|(at, _)| *at != index);
                self.put_back(rest.map(|(_, event)| event.clone()).collect());
                refused
            }
            SinkAnswer::Invalid(_, reason) if count == 1 => {
                self.suspect_count = 0;
                let refused = rejected_events(&batch, vec![(0, reason)]);
                self.record_rejections(&refused);
                refused
            }
            SinkAnswer::Invalid(_, reason) => {
                self.suspect_count = count;
                self.statistics.last_error = Some(reason);
                self.put_back(batch.events.clone());
                Vec::new()
            }
            SinkAnswer::TooLarge if count == 1 => {
                self.batch_max = self.policy.batch_max;
                let refused =
                    rejected_events(&batch, vec![(0, "the event alone is too large for the sink".to_owned())]);
                self.record_rejections(&refused);
                refused
            }
            SinkAnswer::TooLarge => {
                self.batch_max = count / 2;
                self.statistics.last_error = Some("the batch is too large for the sink".to_owned());
                self.put_back(batch.events.clone());
                Vec::new()
            }
            SinkAnswer::Unauthorized => self.keep_batch(batch, "the sink rejected the credentials".to_owned()),
            SinkAnswer::Throttled(retry_after) => {
                self.throttled = self.throttled.saturating_add(1);
                let backoff = Backoff::doubling(self.policy.interval, self.policy.backoff_max);
                let paused = self.sent_at.unwrap_or(now) + backoff.delay(self.throttled);
                self.not_before = Some(paused.max(now + retry_after.unwrap_or_default().min(RETRY_AFTER_MAX)));
                self.keep_batch(batch, "the sink asked for a pause".to_owned())
            }
            SinkAnswer::Unavailable(reason) => self.keep_batch(batch, reason),
        }
    }

    /// Returns the end of the pause that the sink requested. A cycle is due then, between two regular ones.
    pub fn paused_until(&self) -> Option<Instant> {
        self.not_before
    }

    /// Removes and returns the announcements of gaps, which the queue creates itself.
    pub fn take_gap_announcements(&mut self) -> Vec<Envelope> {
        std::mem::take(&mut self.gap_announcements)
    }

    /// Returns true if every event is settled.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_none() && self.gaps.is_empty()
    }

    /// Returns true if the sink is processing a batch.
    pub fn is_sending(&self) -> bool {
        self.sending
    }

    /// Returns the number of events that are waiting or in flight.
    pub fn unsent(&self) -> usize {
        self.queue.len() + self.in_flight.as_ref().map_or(0, |batch| batch.events.len())
    }

    /// Prepares the batch in flight to be sent again with its ID, after its batcher died.
    pub fn prepare_resend(&mut self) {
        self.sending = false;
    }

    /// Ends the pause requested by the sink and includes all events in the cycle, for a shutdown.
    pub fn begin_final_cycle(&mut self) {
        self.not_before = None;
        self.cycle_end = u64::MAX;
    }

    /// Returns the current counters.
    pub fn statistics(&self) -> OutboxStatistics {
        let state = match (&self.in_flight, self.not_before) {
            (Some(_), _) if self.sending => BatcherState::Sending,
            (_, Some(_)) => BatcherState::BackingOff,
            (Some(_), None) => BatcherState::Retrying,
            (None, None) => BatcherState::Idle,
        };
        OutboxStatistics { queue_size: self.queue.len(), state, ..self.statistics.clone() }
    }

    fn record_success(&mut self, wall: Timestamp, sent: usize, failed: usize) {
        let settled = sent + failed;
        self.statistics.sent += sent as u64;
        self.statistics.failed += failed as u64;
        self.statistics.last_sent = Some(wall);
        self.statistics.last_error = None;
        self.suspect_count = self.suspect_count.saturating_sub(settled);
        self.batch_max = self.policy.batch_max;
        self.throttled = 0;
        self.not_before = None;
    }

    fn record_rejections(&mut self, refused: &[(Envelope, String)]) {
        self.statistics.failed += refused.len() as u64;
        self.statistics.last_error = refused.last().map(|(_, reason)| reason.clone());
    }

    fn keep_batch(&mut self, batch: Arc<SinkBatch>, reason: String) -> Vec<(Envelope, String)> {
        self.statistics.last_error = Some(reason);
        self.in_flight = Some(batch);
        self.cycle_end = 0;
        Vec::new()
    }

    fn put_back(&mut self, events: Vec<Envelope>) {
        for event in events.into_iter().rev() {
            self.queue.push_front(event);
        }
    }

    fn drop_oldest(&mut self, oldest: &Envelope) {
        self.statistics.dropped += 1;
        self.suspect_count = self.suspect_count.saturating_sub(1);
        if let Event::EventsDropped { from_seq, to_seq } = oldest.event {
            // The range of the dropped announcement is still unknown to the readers.
            self.widen_gap(from_seq, to_seq);
        }
        self.widen_gap(oldest.seq, oldest.seq);
    }

    fn widen_gap(&mut self, first: u64, last: u64) {
        let (mut first, mut last) = (first, last);
        if let Some((from, to)) = self.gaps.range(..=first).next_back().map(|(from, to)| (*from, *to))
            && to + 1 >= first
        {
            (first, last) = (from, last.max(to));
        }
        while let Some((from, to)) = self.gaps.range(first..=last + 1).next().map(|(from, to)| (*from, *to)) {
            self.gaps.remove(&from);
            last = last.max(to);
        }
        self.gaps.insert(first, last);
    }

    // Queues the announcements of gaps for this cycle, as far as the limit permits.
    fn announce_gaps(&mut self, wall: Timestamp) {
        while self.queue.len() < self.policy.queue_max
            && let Some((from_seq, to_seq)) = self.gaps.pop_first()
        {
            let announcement = self.push(wall, Event::EventsDropped { from_seq, to_seq }).cloned();
            self.gap_announcements.extend(announcement);
            self.cycle_end = self.cycle_end.max(self.next_seq);
        }
    }

    fn should_thin_out(&mut self, event: &Event) -> bool {
        match event {
            Event::Reconnecting { of, .. } => {
                let count = self.reconnecting.entry(of.process_id.clone()).or_default();
                *count += 1;
                let doubled = (*count).is_multiple_of(RECONNECTING_UNTHINNED)
                    && (*count / RECONNECTING_UNTHINNED).is_power_of_two();
                *count > RECONNECTING_UNTHINNED && !doubled
            }
            Event::Reconnected { of, .. } | Event::Disconnected { of, .. } => {
                self.reconnecting.remove(&of.process_id);
                false
            }
            _ => false,
        }
    }
}

fn rejected_events(batch: &SinkBatch, failures: Vec<(usize, String)>) -> Vec<(Envelope, String)> {
    let mut seen = std::collections::BTreeSet::new();
    let first_mention = |(index, reason): (usize, String)| {
        let event = batch.events.get(index)?;
        seen.insert(index).then(|| (event.clone(), reason))
    };
    failures.into_iter().filter_map(first_mention).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn memory_of_an_outage_is_released_when_it_is_over() {
        let mut outbox = Outbox::new(BatchPolicy::default(), 1, 1);
        let now = Instant::now();
        for _ in 0..10_000 {
            let event = Event::ConfigError {
                error_type: String::new(),
                error_message: String::new(),
                status_code: None,
                retry_in: None,
            };
            outbox.push(Timestamp::UNIX_EPOCH, event);
        }
        assert!(outbox.queue.capacity() >= 10_000);
        outbox.begin_cycle(now);
        while outbox.next_batch(now, Timestamp::UNIX_EPOCH).is_some() {
            outbox.apply_answer(now, Timestamp::UNIX_EPOCH, SinkAnswer::Accepted);
        }
        assert_eq!(outbox.queue.len(), 0);
        assert!(outbox.queue.capacity() <= EMPTY_CAPACITY, "{}", outbox.queue.capacity());
    }
}
