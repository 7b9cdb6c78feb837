//! The event queue: numbering, limits, batches, and what each answer of the sink means. The batcher carries it out.
//!
//! ```text
//!  push → queue (limit: the oldest go, the gaps are remembered) → batch in flight → accepted: gone
//!                                                                  │  keep: the same batch again, same id
//!                                                                  └─ split: back to the front, smaller batch
//! ```
//!
//! For a sink that stores numbers, an event waits without one until the sink has reserved it (`Outbox::number`): a number
//! that is not reserved could be used again by the next satellite.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::model::event::{Envelope, Event};
use crate::model::policy::BatchPolicy;
use crate::rules::request_log::RequestLog;
use crate::seam::{Answer, Batch};

/// Reconnecting events of one instance are thinned: the first this many, then each doubling.
const RECONNECTING_KEPT: u64 = 5;

/// A sink that asks for a longer pause is asked again after this.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// Numbers for `status` and the load report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Events waiting, the batch in flight not counted.
    pub queue_size: usize,
    /// Events received so far, those without a number included.
    pub emitted: u64,
    /// Events that the sink took.
    pub sent: u64,
    /// Events that the sink refused for good.
    pub failed: u64,
    /// Events over the queue's limit.
    pub dropped: u64,
    /// When the sink last took a batch.
    pub last_sent: Option<Timestamp>,
    /// The sink's last complaint; gone after a success.
    pub last_error: Option<String>,
    /// What the batcher is doing.
    pub state: State,
}

impl Statistics {
    /// Events that were received and are neither with the sink, nor refused by it, nor dropped.
    pub fn unsent(&self) -> usize {
        let settled = self.sent + self.failed + self.dropped;
        usize::try_from(self.emitted.saturating_sub(settled)).unwrap_or(usize::MAX)
    }
}

/// See [`Statistics::state`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Waiting for the next cycle.
    #[default]
    Idle,
    /// A batch is in flight.
    Sending,
    /// The sink did not take the last batch.
    Retrying,
    /// The sink asked for a pause.
    BackingOff,
}

/// Room for as many events is kept when they are gone.
const ROOM_KEPT: usize = 1_024;

/// The queue. Survives a panic of the batcher: it is handed back with the death notice.
#[derive(Debug)]
pub struct Outbox {
    policy: BatchPolicy,
    next_seq: u64,
    next_batch: u64,
    queue: VecDeque<Envelope>,
    /// Whether an event gets its number only once that number is reserved; see [`Outbox::number`].
    reserves: bool,
    /// Events without a number: newer than all that is queued.
    unnumbered: VecDeque<(Timestamp, Event)>,
    /// Events that were dropped before they had a number. They are older than `unnumbered` and take the next numbers, so
    /// that the gap can be announced.
    unnumbered_dropped: u64,
    in_flight: Option<Arc<Batch>>,
    /// Whether the batch in flight is with the sink now, or kept for the next cycle.
    sending: bool,
    /// The sink said of this many events at the front that one of them is invalid.
    suspect: usize,
    /// At most this many in the next batch: halved by 413, back after a success.
    batch_max: usize,
    /// The pause after the next 429, counted from the start of the refused send; doubled by each one.
    backoff: Duration,
    sent_at: Option<Instant>,
    not_before: Option<Instant>,
    /// Events numbered before this are sent in this cycle.
    cycle_end: u64,
    /// Dropped and not yet announced: first → last, apart from each other. There is more than one where an announcement
    /// was dropped itself, after events that it did not mean had been sent.
    gaps: BTreeMap<u64, u64>,
    /// Announced, and not yet shown to those who listen.
    announced: Vec<Envelope>,
    reconnecting: HashMap<Arc<str>, u64>,
    /// Calls that become events together.
    requests: RequestLog,
    statistics: Statistics,
}

impl Outbox {
    /// An empty queue whose first event is numbered `next_seq`. Batches count up from `first_batch`, which must differ
    /// from every id that an earlier process used: a sink that drops repeats would drop ours.
    pub fn new(mut policy: BatchPolicy, next_seq: u64, first_batch: u64) -> Self {
        policy.batch_max = policy.batch_max.max(1);
        policy.queue_max = policy.queue_max.max(1);
        Self {
            next_seq,
            next_batch: first_batch,
            queue: VecDeque::new(),
            reserves: false,
            unnumbered: VecDeque::new(),
            unnumbered_dropped: 0,
            in_flight: None,
            sending: false,
            suspect: 0,
            batch_max: policy.batch_max,
            backoff: policy.interval.min(policy.backoff_max),
            sent_at: None,
            not_before: None,
            cycle_end: 0,
            gaps: BTreeMap::new(),
            announced: Vec::new(),
            reconnecting: HashMap::new(),
            requests: RequestLog::new(&policy),
            statistics: Statistics::default(),
            policy,
        }
    }

    /// Makes new events wait without a number until [`Outbox::number`].
    pub fn reserve_numbers(&mut self) {
        self.reserves = true;
    }

    /// Queues an event, numbered unless numbers have to be reserved first. Returns the envelope if it has a number and was
    /// not thinned out. Over the limit the oldest event is dropped.
    pub fn push(&mut self, timestamp: Timestamp, event: Event) -> Option<&Envelope> {
        if self.is_thinned(&event) {
            return None;
        }
        self.statistics.emitted += 1;
        if self.reserves {
            self.unnumbered.push_back((timestamp, event));
        } else {
            self.number_one(timestamp, event);
        }
        while self.waiting() > self.policy.queue_max {
            if let Some(oldest) = self.queue.pop_front() {
                self.drop_oldest(&oldest);
            } else if let Some((_, oldest)) = self.unnumbered.pop_front() {
                self.drop_unnumbered(&oldest);
            }
        }
        if self.reserves { None } else { self.queue.back() }
    }

    /// The last number that the waiting events need, to be reserved before [`Outbox::number`]. `None` if no event waits for
    /// a number.
    pub fn wanted(&self) -> Option<u64> {
        let count = self.unnumbered_dropped + self.unnumbered.len() as u64;
        (count > 0).then(|| self.next_seq + count - 1)
    }

    /// Numbers the waiting events as far as numbers are reserved, up to and including `through`. Returns them in order.
    pub fn number(&mut self, through: u64) -> impl Iterator<Item = &Envelope> {
        let dropped = self.unnumbered_dropped.min((through + 1).saturating_sub(self.next_seq));
        if dropped > 0 {
            self.unnumbered_dropped -= dropped;
            self.next_seq += dropped;
            self.widen_gap(self.next_seq - dropped, self.next_seq - 1);
        }
        let first = self.queue.len();
        while self.next_seq <= through
            && let Some((timestamp, event)) = self.unnumbered.pop_front()
        {
            self.number_one(timestamp, event);
        }
        self.queue.range(first..)
    }

    /// Numbers could not be reserved: events keep waiting.
    pub fn unreserved(&mut self, reason: String) {
        self.statistics.last_error = Some(reason);
    }

    fn number_one(&mut self, timestamp: Timestamp, event: Event) {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.queue.push_back(Envelope { seq, timestamp, event });
    }

    /// Events that wait, numbered or not, without the batch in flight.
    fn waiting(&self) -> usize {
        self.queue.len() + self.unnumbered.len()
    }

    /// Queues events that are numbered already, as they are read from where they are stored: in order, and behind all
    /// that waits. What is not is passed over. No limit is theirs: whoever reads takes no more than it has room for.
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

    /// The batch that was with the sink when an earlier process ended: it is the first one, under its id. Events that were
    /// queued or sent before are none of it.
    pub fn resume_batch(&mut self, id: u64, events: Vec<Envelope>) {
        let Some(last) = events.last().map(|last| last.seq) else { return };
        debug_assert!(self.in_flight.is_none() && self.queue.is_empty(), "the first one comes first");
        self.next_seq = self.next_seq.max(last.saturating_add(1));
        self.statistics.emitted += events.len() as u64;
        self.in_flight = Some(Arc::new(Batch { id, events }));
    }

    /// The first event that is not settled, if there is one: all that was queued before it was taken, refused for good or
    /// dropped.
    pub fn settled_before(&self) -> Option<u64> {
        let in_flight = self.in_flight.as_ref().and_then(|batch| batch.events.first());
        in_flight.or(self.queue.front()).map(|first| first.seq)
    }

    /// Whether no batch is with the sink and none is kept.
    pub fn is_at_rest(&self) -> bool {
        self.in_flight.is_none()
    }

    /// Whether a batch was not taken and waits for the next cycle.
    pub fn is_kept(&self) -> bool {
        !self.sending && self.in_flight.is_some()
    }

    /// `count` events were lost before they could be queued: they take numbers, so the gap can be seen. They are newer than
    /// all that waits, which therefore is over the limit too.
    pub fn lost_at_the_door(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        for oldest in std::mem::take(&mut self.queue) {
            self.drop_oldest(&oldest);
        }
        for (_, oldest) in std::mem::take(&mut self.unnumbered) {
            self.drop_unnumbered(&oldest);
        }
        self.statistics.emitted += count;
        self.statistics.dropped += count;
        if self.reserves {
            self.unnumbered_dropped += count;
            return;
        }
        let first = self.next_seq;
        self.next_seq += count;
        self.widen_gap(first, self.next_seq - 1);
    }

    /// The calls that are not yet events.
    pub fn requests(&mut self) -> &mut RequestLog {
        &mut self.requests
    }

    /// A cycle begins: what is queued now is sent, in as many batches as it takes.
    pub fn begin_cycle(&mut self, now: Instant) {
        if self.not_before.is_none_or(|at| now >= at) {
            self.not_before = None;
            self.cycle_end = self.next_seq;
        }
    }

    /// The batch to send now, if there is one: the one that is kept, or a new one.
    pub fn next_batch(&mut self, now: Instant, wall: Timestamp) -> Option<Arc<Batch>> {
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
            let wanted = if self.suspect > 1 { self.suspect / 2 } else { self.suspect };
            let size = if wanted > 0 { wanted } else { self.batch_max }.min(self.batch_max).min(self.queue.len());
            let events: Vec<Envelope> = self.queue.drain(..size).collect();
            self.give_back_room();
            let id = self.next_batch;
            self.next_batch += 1;
            self.in_flight = Some(Arc::new(Batch { id, events }));
            self.announce_gaps(wall);
        }
        self.sending = true;
        self.sent_at = Some(now);
        self.in_flight.clone()
    }

    /// An outage makes the queue large, and its end small again: by halves, so that one that breathes is not copied each time.
    fn give_back_room(&mut self) {
        let room = self.queue.capacity();
        if room > ROOM_KEPT && self.queue.len() < room / 4 {
            self.queue.shrink_to(room / 2);
        }
    }

    /// What the answer to the batch in flight means. The invalid events that were dropped for good come back with the
    /// reason, to be logged.
    pub fn answered(&mut self, now: Instant, wall: Timestamp, answer: Answer) -> Vec<(Envelope, String)> {
        self.sending = false;
        let Some(batch) = self.in_flight.take() else { return Vec::new() };
        let count = batch.events.len();
        match answer {
            Answer::Accepted => {
                self.succeeded(wall, count, 0);
                Vec::new()
            }
            Answer::Partial(failures) => {
                let refused = pick(&batch, failures);
                self.succeeded(wall, count - refused.len(), refused.len());
                refused
            }
            Answer::Invalid(Some(index), reason) if index < count => {
                let refused = pick(&batch, vec![(index, reason)]);
                self.suspect = 0;
                self.refused(&refused);
                let rest = batch.events.iter().enumerate().filter(|(at, _)| *at != index);
                self.put_back(rest.map(|(_, event)| event.clone()).collect());
                refused
            }
            Answer::Invalid(_, reason) if count == 1 => {
                self.suspect = 0;
                let refused = pick(&batch, vec![(0, reason)]);
                self.refused(&refused);
                refused
            }
            Answer::Invalid(_, reason) => {
                self.suspect = count;
                self.statistics.last_error = Some(reason);
                self.put_back(batch.events.clone());
                Vec::new()
            }
            Answer::TooLarge if count == 1 => {
                self.batch_max = self.policy.batch_max;
                let refused = pick(&batch, vec![(0, "the event alone is too large for the sink".to_owned())]);
                self.refused(&refused);
                refused
            }
            Answer::TooLarge => {
                self.batch_max = count / 2;
                self.statistics.last_error = Some("the batch is too large for the sink".to_owned());
                self.put_back(batch.events.clone());
                Vec::new()
            }
            Answer::Unauthorized => self.keep(batch, "the sink refused our credentials".to_owned()),
            Answer::Throttled(retry_after) => {
                let paused = self.sent_at.unwrap_or(now) + self.backoff;
                self.backoff = (self.backoff * 2).min(self.policy.backoff_max);
                self.not_before = Some(paused.max(now + retry_after.unwrap_or_default().min(RETRY_AFTER_MAX)));
                self.keep(batch, "the sink asked for a pause".to_owned())
            }
            Answer::Unavailable(reason) => self.keep(batch, reason),
        }
    }

    /// Returns the end of the pause that the sink requested. A cycle is due then, between two regular ones.
    pub fn paused_until(&self) -> Option<Instant> {
        self.not_before
    }

    /// The announcements of gaps since the last time: they are made here, so nobody has pushed them.
    pub fn take_announced(&mut self) -> Vec<Envelope> {
        std::mem::take(&mut self.announced)
    }

    /// Whether everything that was pushed is settled.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_none() && self.gaps.is_empty() && self.wanted().is_none()
    }

    /// Whether a batch is with the sink now.
    pub fn is_sending(&self) -> bool {
        self.sending
    }

    /// Events that are neither with the sink nor refused by it.
    pub fn unsent(&self) -> usize {
        self.waiting() + self.in_flight.as_ref().map_or(0, |batch| batch.events.len())
    }

    /// The batch in flight was with a batcher that died: it is sent again, under its id.
    pub fn resume(&mut self) {
        self.sending = false;
    }

    /// The wait of a 429 is not honoured on the way out.
    pub fn hurry(&mut self) {
        self.not_before = None;
        self.cycle_end = u64::MAX;
    }

    /// The numbers as they are now.
    pub fn statistics(&self) -> Statistics {
        let state = match (&self.in_flight, self.not_before) {
            (Some(_), _) if self.sending => State::Sending,
            (_, Some(_)) => State::BackingOff,
            (Some(_), None) => State::Retrying,
            (None, None) => State::Idle,
        };
        Statistics { queue_size: self.waiting(), state, ..self.statistics.clone() }
    }

    fn succeeded(&mut self, wall: Timestamp, sent: usize, failed: usize) {
        let settled = sent + failed;
        self.statistics.sent += sent as u64;
        self.statistics.failed += failed as u64;
        self.statistics.last_sent = Some(wall);
        self.statistics.last_error = None;
        self.suspect = self.suspect.saturating_sub(settled);
        self.batch_max = self.policy.batch_max;
        self.backoff = self.policy.interval.min(self.policy.backoff_max);
        self.not_before = None;
    }

    fn refused(&mut self, refused: &[(Envelope, String)]) {
        self.statistics.failed += refused.len() as u64;
        self.statistics.last_error = refused.last().map(|(_, reason)| reason.clone());
    }

    /// Kept for the next cycle, under its id.
    fn keep(&mut self, batch: Arc<Batch>, reason: String) -> Vec<(Envelope, String)> {
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
        self.suspect = self.suspect.saturating_sub(1);
        if let Event::EventsDropped { from_seq, to_seq } = oldest.event {
            // What it announced is still gone, and nobody has been told.
            self.widen_gap(from_seq, to_seq);
        }
        self.widen_gap(oldest.seq, oldest.seq);
    }

    fn drop_unnumbered(&mut self, oldest: &Event) {
        self.statistics.dropped += 1;
        self.unnumbered_dropped += 1;
        if let Event::EventsDropped { from_seq, to_seq } = oldest {
            // The gap that it announced has still to be announced.
            self.widen_gap(*from_seq, *to_seq);
        }
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

    /// Queues the announcement of each gap for this cycle, as far as a batch has made room for them.
    fn announce_gaps(&mut self, wall: Timestamp) {
        while self.waiting() < self.policy.queue_max
            && let Some((from_seq, to_seq)) = self.gaps.pop_first()
        {
            let announcement = self.push(wall, Event::EventsDropped { from_seq, to_seq }).cloned();
            self.announced.extend(announcement);
            self.cycle_end = self.cycle_end.max(self.next_seq);
        }
    }

    fn is_thinned(&mut self, event: &Event) -> bool {
        match event {
            Event::Reconnecting { of, .. } => {
                let count = self.reconnecting.entry(of.process_id.clone()).or_default();
                *count += 1;
                let doubled =
                    (*count).is_multiple_of(RECONNECTING_KEPT) && (*count / RECONNECTING_KEPT).is_power_of_two();
                *count > RECONNECTING_KEPT && !doubled
            }
            Event::Reconnected { of, .. } | Event::Disconnected { of, .. } => {
                self.reconnecting.remove(&of.process_id);
                false
            }
            _ => false,
        }
    }
}

fn pick(batch: &Batch, failures: Vec<(usize, String)>) -> Vec<(Envelope, String)> {
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
    fn room_that_an_outage_took_is_given_back_when_it_is_over() {
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
            outbox.answered(now, Timestamp::UNIX_EPOCH, Answer::Accepted);
        }
        assert_eq!(outbox.queue.len(), 0);
        assert!(outbox.queue.capacity() <= ROOM_KEPT, "{}", outbox.queue.capacity());
    }
}
