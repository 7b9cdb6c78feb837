//! The event queue: batches, retries and the answers of the sink. After every sequence of answers, each number that is
//! missing at the sink is announced by an `events.dropped`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject};
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::rules::outbox::{BatcherState, Outbox};
use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};
use proptest::prelude::*;

/// An outbox with its own clock and records of sent and refused events.
struct TestOutbox {
    outbox: Outbox,
    now: Instant,
    sent: Vec<(u64, Event)>,
    refused: Vec<(u64, Event)>,
}

impl TestOutbox {
    fn with(policy: BatchPolicy) -> Self {
        Self { outbox: Outbox::new(policy, 1, 7), now: Instant::now(), sent: Vec::new(), refused: Vec::new() }
    }

    fn new() -> Self {
        Self::with(BatchPolicy::default())
    }

    fn push(&mut self, count: usize) {
        for _ in 0..count {
            let reason = "told".to_owned();
            let event = Event::ConfigError {
                error_type: reason.clone(),
                error_message: reason,
                status_code: None,
                retry_in: None,
            };
            self.outbox.push(Timestamp::UNIX_EPOCH, event);
        }
    }

    fn wait(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
    }

    /// Begins a cycle and returns its first batch.
    fn cycle(&mut self) -> Option<Arc<SinkBatch>> {
        self.outbox.begin_cycle(self.now);
        self.next()
    }

    fn next(&mut self) -> Option<Arc<SinkBatch>> {
        self.outbox.next_batch(self.now, Timestamp::UNIX_EPOCH)
    }

    fn answer(&mut self, batch: &SinkBatch, answer: SinkAnswer) {
        let taken: Vec<usize> = match &answer {
            SinkAnswer::Accepted => (0..batch.events.len()).collect(),
            SinkAnswer::Partial(failed) => {
                (0..batch.events.len()).filter(|at| failed.iter().all(|(index, _)| index != at)).collect()
            }
            _ => Vec::new(),
        };
        self.sent.extend(taken.iter().map(|at| (batch.events[*at].seq, batch.events[*at].event.clone())));
        let refused = self.outbox.apply_answer(self.now, Timestamp::UNIX_EPOCH, answer);
        self.refused.extend(refused.into_iter().map(|(envelope, _)| (envelope.seq, envelope.event)));
    }

    /// Runs a whole cycle against a sink. Returns the number of batches.
    fn run_cycle(&mut self, mut sink: impl FnMut(&SinkBatch) -> SinkAnswer) -> usize {
        self.outbox.begin_cycle(self.now);
        let mut batches = 0;
        while let Some(batch) = self.next() {
            batches += 1;
            let answer = sink(&batch);
            self.answer(&batch, answer);
        }
        batches
    }

    fn sent(&self) -> Vec<u64> {
        self.sent.iter().map(|(seq, _)| *seq).collect()
    }

    fn refused(&self) -> Vec<u64> {
        self.refused.iter().map(|(seq, _)| *seq).collect()
    }
}

fn seqs(batch: &SinkBatch) -> Vec<u64> {
    batch.events.iter().map(|event| event.seq).collect()
}

fn seqs_to(last: u64) -> Vec<u64> {
    (1..=last).collect()
}

/// Returns the ranges that these events announce as dropped.
fn gaps(events: &[(u64, Event)]) -> Vec<(u64, u64)> {
    let gap = |event: &Event| match event {
        Event::EventsDropped { from_seq, to_seq } => Some((*from_seq, *to_seq)),
        _ => None,
    };
    events.iter().filter_map(|(_, event)| gap(event)).collect()
}

#[test]
fn an_empty_queue_sends_nothing() {
    assert_eq!(TestOutbox::new().cycle(), None);
}

#[test]
fn nothing_is_sent_before_the_cycle() {
    let mut test = TestOutbox::new();
    test.push(250);
    assert_eq!(test.next(), None);
    assert_eq!(test.run_cycle(|_| SinkAnswer::Accepted), 3);
    test.push(1);
    assert_eq!(test.next(), None, "an event after the cycle waits for the next one");
}

#[test]
fn more_than_a_hundred_events_are_sent_in_consecutive_batches_in_order() {
    let mut test = TestOutbox::new();
    test.push(250);
    let mut sizes = Vec::new();
    test.run_cycle(|batch| {
        sizes.push(batch.events.len());
        SinkAnswer::Accepted
    });
    assert_eq!(sizes, [100, 100, 50]);
    assert_eq!(test.sent(), seqs_to(250));
    assert!(test.outbox.is_empty());
}

#[test]
fn one_batch_is_in_flight_at_a_time_with_its_own_id() {
    let mut test = TestOutbox::new();
    test.push(150);
    let first = test.cycle().unwrap();
    assert!(test.outbox.is_sending());
    assert_eq!(test.outbox.statistics().state, BatcherState::Sending);
    assert_eq!(test.next(), None);
    test.answer(&first, SinkAnswer::Accepted);
    let second = test.next().unwrap();
    assert_eq!((first.id, second.id), (7, 8));
}

#[test]
fn beyond_ten_thousand_the_oldest_events_are_dropped_and_announced() {
    let mut test = TestOutbox::new();
    test.push(10_003);
    assert_eq!(test.outbox.statistics().queue_size, 10_000);
    assert_eq!(test.outbox.statistics().dropped, 3);
    test.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!(test.sent(), (4..=10_004).collect::<Vec<u64>>());
    assert_eq!(gaps(&test.sent), [(1, 3)]);
    assert!(test.outbox.is_empty());
}

#[test]
fn a_gap_without_events_is_announced_in_the_next_cycle() {
    let mut test = TestOutbox::new();
    test.push(2);
    test.outbox.record_lost(5);
    assert_eq!(test.outbox.statistics().dropped, 7);
    assert!(!test.outbox.is_empty(), "a gap that was not announced is not settled");
    assert_eq!(test.next(), None, "no cycle has begun");
    test.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!((test.sent(), gaps(&test.sent)), (vec![8], vec![(1, 7)]));
    assert!(test.outbox.is_empty());
}

#[test]
fn the_batch_in_flight_is_never_dropped_and_is_resent_under_its_id() {
    let mut test = TestOutbox::new();
    test.push(100);
    let batch = test.cycle().unwrap();
    test.push(10_050);
    test.answer(&batch, SinkAnswer::Unavailable("503".to_owned()));
    test.wait(3);
    let again = test.cycle().unwrap();
    assert_eq!(again, batch);
    test.answer(&again, SinkAnswer::Accepted);
    test.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!(gaps(&test.sent), [(101, 150)]);
    assert_eq!(test.sent()[..101], [seqs_to(100), vec![151]].concat());
}

#[test]
fn the_batch_of_a_dead_batcher_is_resent_under_its_id() {
    let mut test = TestOutbox::new();
    test.push(1);
    let batch = test.cycle().unwrap();
    test.outbox.prepare_resend();
    assert_eq!(test.cycle().unwrap(), batch);
}

/// The announcement of a gap is an event, which can be dropped itself.
#[test]
fn a_dropped_gap_announcement_is_replaced_by_one_with_the_exact_range() {
    let mut test = TestOutbox::with(BatchPolicy { batch_max: 4, queue_max: 10, ..BatchPolicy::default() });
    test.push(14);
    let batch = test.cycle().unwrap();
    assert_eq!(seqs(&batch), [5, 6, 7, 8]);
    test.answer(&batch, SinkAnswer::Accepted);
    // The announcement of 1 to 4 waits as 15; these events push it out of the queue.
    test.push(15);
    test.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!(gaps(&test.sent), [(1, 4), (9, 20)]);
    assert_eq!(test.sent(), [seqs_to(8)[4..].to_vec(), (21..=32).collect()].concat());
}

#[test]
fn events_refused_by_a_partial_answer_are_dropped_and_the_rest_accepted() {
    let mut test = TestOutbox::new();
    test.push(5);
    let failures = [(4, "x"), (1, "y"), (1, "again"), (9, "not there")];
    let failures: Vec<(usize, String)> = failures.map(|(at, why)| (at, why.to_owned())).to_vec();
    test.run_cycle(|_| SinkAnswer::Partial(failures.clone()));
    assert_eq!((test.sent(), test.refused()), (vec![1, 3, 4], vec![5, 2]));
    let statistics = test.outbox.statistics();
    assert_eq!((statistics.sent, statistics.failed, statistics.unsent()), (3, 2, 0));
    assert_eq!(statistics.state, BatcherState::Idle);
}

/// Returns a sink that rejects each batch with an invalid event, with or without its index.
fn strict_sink(invalid: &[u64], names_it: bool) -> impl FnMut(&SinkBatch) -> SinkAnswer {
    move |batch| match batch.events.iter().position(|event| invalid.contains(&event.seq)) {
        Some(at) => SinkAnswer::Invalid(names_it.then_some(at), "what is this?".to_owned()),
        None => SinkAnswer::Accepted,
    }
}

#[test]
fn only_the_invalid_events_of_a_batch_are_found_and_dropped() {
    let sets: [&[u64]; 8] =
        [&[1], &[50], &[100], &[101], &[1, 100], &[1, 2, 3], &[49, 50, 51, 150], &[1, 33, 64, 99, 100, 101, 250]];
    for invalid in sets {
        for names_it in [true, false] {
            let mut test = TestOutbox::new();
            test.push(250);
            let batches = test.run_cycle(strict_sink(invalid, names_it));
            let rest: Vec<u64> = seqs_to(250).into_iter().filter(|seq| !invalid.contains(seq)).collect();
            assert_eq!(test.refused(), invalid, "named: {names_it}");
            assert_eq!(test.sent(), rest);
            let most = if names_it { 3 + invalid.len() } else { 3 + invalid.len() * 16 };
            assert!(batches <= most, "{batches} batches for {invalid:?}, named: {names_it}");
        }
    }
}

#[test]
fn a_batch_of_only_invalid_events_is_dropped_event_by_event() {
    let mut test = TestOutbox::new();
    test.push(20);
    test.run_cycle(|_| SinkAnswer::Invalid(None, "no".to_owned()));
    assert_eq!((test.sent(), test.refused()), (Vec::new(), seqs_to(20)));
    assert!(test.outbox.is_empty());
}

#[test]
fn an_invalid_answer_with_a_wrong_index_is_treated_as_without_index() {
    let mut test = TestOutbox::new();
    test.push(8);
    test.run_cycle(|batch| {
        let bad = batch.events.iter().any(|event| event.seq == 3);
        if bad { SinkAnswer::Invalid(Some(1_000), "no".to_owned()) } else { SinkAnswer::Accepted }
    });
    assert_eq!(test.refused(), [3]);
}

#[test]
fn a_too_large_batch_is_halved_and_an_unsendable_event_dropped() {
    let mut test = TestOutbox::new();
    test.push(250);
    let mut sizes = Vec::new();
    test.run_cycle(|batch| {
        sizes.push(batch.events.len());
        let fits = batch.events.len() <= 30 && batch.events.iter().all(|event| event.seq != 77);
        if fits { SinkAnswer::Accepted } else { SinkAnswer::TooLarge }
    });
    assert_eq!(sizes[..4], [100, 50, 25, 100]);
    assert_eq!(test.refused(), [77]);
    assert_eq!(test.sent(), seqs_to(250).into_iter().filter(|seq| *seq != 77).collect::<Vec<u64>>());
}

#[test]
fn a_batch_that_the_sink_refuses_is_kept_until_the_next_cycle() {
    for answer in [SinkAnswer::Unauthorized, SinkAnswer::Unavailable("refused".to_owned())] {
        let mut test = TestOutbox::new();
        test.push(150);
        assert_eq!(test.run_cycle(|_| answer.clone()), 1, "one attempt per cycle");
        assert_eq!(test.outbox.statistics().state, BatcherState::Retrying);
        assert!(test.outbox.statistics().last_error.is_some());
        assert_eq!(test.outbox.unsent(), 150);
        test.wait(3);
        assert_eq!(test.run_cycle(|_| SinkAnswer::Accepted), 2);
        assert_eq!(test.sent(), seqs_to(150));
        assert_eq!(test.outbox.statistics().last_error, None);
    }
}

/// Returns the seconds from each 429 to the next attempt.
fn backoff_seconds(test: &mut TestOutbox, count: usize, retry_after: Option<u64>) -> Vec<u64> {
    let pause = |test: &mut TestOutbox| {
        let since = test.now;
        loop {
            test.wait(1);
            let batches = test.run_cycle(|_| SinkAnswer::Throttled(retry_after.map(Duration::from_secs)));
            if batches > 0 {
                return test.now.duration_since(since).as_secs();
            }
        }
    };
    (0..count).map(|_| pause(test)).collect()
}

#[test]
fn a_throttling_sink_is_retried_after_3_to_48_seconds_until_a_success() {
    let mut test = TestOutbox::new();
    test.push(1);
    test.run_cycle(|_| SinkAnswer::Throttled(None));
    assert_eq!(test.outbox.statistics().state, BatcherState::BackingOff);
    assert_eq!(backoff_seconds(&mut test, 6, None), [3, 6, 12, 24, 48, 48]);
    test.wait(48);
    test.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!(test.sent(), [1]);
    test.push(1);
    test.run_cycle(|_| SinkAnswer::Throttled(None));
    assert_eq!(backoff_seconds(&mut test, 1, None), [3], "the delay starts again");
}

#[test]
fn a_longer_retry_after_replaces_the_backoff() {
    let mut test = TestOutbox::new();
    test.push(1);
    test.run_cycle(|_| SinkAnswer::Throttled(Some(Duration::from_secs(20))));
    assert_eq!(backoff_seconds(&mut test, 4, Some(20)), [20, 20, 20, 24]);
}

#[test]
fn the_longest_retry_after_does_not_overflow() {
    let mut test = TestOutbox::new();
    test.push(1);
    test.run_cycle(|_| SinkAnswer::Throttled(Some(Duration::MAX)));
    test.wait(3600);
    assert_eq!(test.cycle(), None);
    assert_eq!(test.outbox.statistics().state, BatcherState::BackingOff);
}

#[test]
fn the_final_cycle_ignores_the_backoff() {
    let mut test = TestOutbox::new();
    test.push(150);
    test.run_cycle(|_| SinkAnswer::Throttled(None));
    test.push(1);
    test.outbox.begin_final_cycle();
    while let Some(batch) = test.next() {
        test.answer(&batch, SinkAnswer::Accepted);
    }
    assert_eq!(test.sent(), seqs_to(151));
}

/// Returns events with numbers, as the journal stores them.
fn numbered_events(seqs: impl IntoIterator<Item = u64>) -> Vec<Envelope> {
    let event = |seq| Envelope {
        seq,
        timestamp: Timestamp::UNIX_EPOCH,
        event: Event::ConfigError {
            error_type: "told".to_owned(),
            error_message: seq.to_string(),
            status_code: None,
            retry_in: None,
        },
    };
    seqs.into_iter().map(event).collect()
}

#[test]
fn refilled_events_keep_their_numbers_and_are_sent_once() {
    let mut test = TestOutbox::new();
    test.outbox.refill(numbered_events([5, 6, 9]));
    assert_eq!(test.outbox.first_unsettled(), Some(5));
    test.outbox.refill(numbered_events([6, 9, 10, 2, 11]));
    let mut batches = Vec::new();
    test.run_cycle(|batch| {
        batches.push(seqs(batch));
        SinkAnswer::Accepted
    });
    assert_eq!(batches, [[5, 6, 9, 10, 11]]);
    assert_eq!(test.outbox.first_unsettled(), None);
    assert_eq!((test.outbox.statistics().sent, test.outbox.unsent()), (5, 0));
}

#[test]
fn refilled_events_are_not_subject_to_the_queue_limit() {
    let mut test = TestOutbox::with(BatchPolicy { queue_max: 10, ..BatchPolicy::default() });
    test.outbox.refill(numbered_events(1..=250));
    assert_eq!(test.run_cycle(|_| SinkAnswer::Accepted), 3);
    assert_eq!(test.sent(), seqs_to(250));
    assert_eq!(test.outbox.statistics().dropped, 0);
}

#[test]
fn a_resumed_batch_is_sent_first_under_its_id() {
    let mut test = TestOutbox::new();
    test.outbox.resume_batch(3, numbered_events(41..=60));
    test.outbox.refill(numbered_events(50..=65));
    assert_eq!(test.next(), None, "no batch before the cycle");
    let batch = test.cycle().unwrap();
    assert_eq!((batch.id, seqs(&batch)), (3, (41..=60).collect()));
    let unavailable = SinkAnswer::Unavailable("down".to_owned());
    test.answer(&batch, unavailable);
    assert!(test.outbox.has_kept_batch());
    assert_eq!(test.cycle(), Some(batch.clone()), "the batch is sent again");
    assert!(!test.outbox.has_kept_batch());
    test.answer(&batch, SinkAnswer::Accepted);
    let next = test.next().unwrap();
    assert_eq!((next.id, seqs(&next)), (7, (61..=65).collect()), "a new batch has an id of this process");
}

#[test]
fn an_empty_resumed_batch_leaves_the_queue_idle() {
    let mut test = TestOutbox::new();
    test.outbox.resume_batch(3, Vec::new());
    assert!(test.outbox.is_empty() && test.outbox.is_idle());
}

#[test]
fn the_first_unsettled_number_is_correct_after_every_answer() {
    let mut test = TestOutbox::new();
    test.outbox.refill(numbered_events(1..=10));
    let first = |test: &TestOutbox| test.outbox.first_unsettled();
    let batch = test.cycle().unwrap();
    assert_eq!(first(&test), Some(1), "a batch in flight is not settled");
    test.answer(&batch, SinkAnswer::Throttled(None));
    assert_eq!(first(&test), Some(1));
    test.wait(6);
    let batch = test.cycle().unwrap();
    test.answer(&batch, SinkAnswer::Invalid(Some(0), "the first".to_owned()));
    assert_eq!(first(&test), Some(2), "a refused event is settled");
    let batch = test.next().unwrap();
    test.answer(&batch, SinkAnswer::TooLarge);
    assert_eq!(first(&test), Some(2));
    let batch = test.next().unwrap();
    assert_eq!(seqs(&batch), [2, 3, 4, 5]);
    test.answer(&batch, SinkAnswer::Partial(vec![(3, "the last".to_owned())]));
    assert_eq!(first(&test), Some(6));
    let batch = test.next().unwrap();
    test.answer(&batch, SinkAnswer::Invalid(Some(2), "in the middle".to_owned()));
    assert_eq!(first(&test), Some(6), "the events before the invalid one are not accepted");
    let batch = test.next().unwrap();
    assert_eq!(seqs(&batch), [6, 7, 9, 10]);
    test.answer(&batch, SinkAnswer::Accepted);
    assert_eq!(first(&test), None);
    assert_eq!(test.refused(), [1, 5, 8]);
}

#[test]
fn reconnecting_events_are_thinned_to_the_first_five_and_each_doubling() {
    let subject = |name: &str| {
        let ids = ("abc123".into(), "team_acme".into(), "user_alice".into());
        Arc::new(EventSubject {
            installation_id: ids.0,
            team_id: ids.1,
            user_id: ids.2,
            process_id: name.into(),
            server_slug: "files".into(),
        })
    };
    let mut outbox = Outbox::new(BatchPolicy::default(), 1, 1);
    let kept = |outbox: &mut Outbox, name: &str, attempt| {
        let event = Event::Reconnecting { of: subject(name), attempt, next_retry_ms: 1 };
        outbox.push(Timestamp::UNIX_EPOCH, event).is_some()
    };
    let attempts: Vec<u32> = (1..=100).filter(|attempt| kept(&mut outbox, "one", *attempt)).collect();
    assert_eq!(attempts, [1, 2, 3, 4, 5, 10, 20, 40, 80]);
    assert!(kept(&mut outbox, "another", 6), "each instance has its own count");
    assert_eq!(outbox.statistics().emitted, 10, "dropped reconnecting events have no number");
    let back = Event::Reconnected {
        of: subject("one"),
        capabilities: serde_json::Value::Null,
        attempts_taken: 100,
        changed: Vec::new(),
    };
    outbox.push(Timestamp::UNIX_EPOCH, back);
    let attempts: Vec<u32> = (1..=10).filter(|attempt| kept(&mut outbox, "one", *attempt)).collect();
    assert_eq!(attempts, [1, 2, 3, 4, 5, 10], "a new loss starts a new count");
}

#[test]
fn numbering_starts_at_the_given_number() {
    let mut outbox = Outbox::new(BatchPolicy::default(), 4711, 1);
    let event = Event::EventsDropped { from_seq: 1, to_seq: 2 };
    assert_eq!(outbox.push(Timestamp::UNIX_EPOCH, event).unwrap().seq, 4711);
}

#[derive(Debug, Clone)]
enum Step {
    Push(usize),
    RecordLost(u64),
    Cycle,
    Answer(Reply),
    Wait(u64),
    BatcherDies,
}

#[derive(Debug, Clone)]
enum Reply {
    Accepted,
    Partial(Vec<usize>),
    Invalid(Option<usize>),
    TooLarge,
    Unauthorized,
    Throttled(Option<u64>),
    Unavailable,
}

impl From<Reply> for SinkAnswer {
    fn from(reply: Reply) -> Self {
        let why = || "because".to_owned();
        match reply {
            Reply::Accepted => Self::Accepted,
            Reply::Partial(failed) => Self::Partial(failed.into_iter().map(|index| (index, why())).collect()),
            Reply::Invalid(index) => Self::Invalid(index, why()),
            Reply::TooLarge => Self::TooLarge,
            Reply::Unauthorized => Self::Unauthorized,
            Reply::Throttled(seconds) => Self::Throttled(seconds.map(Duration::from_secs)),
            Reply::Unavailable => Self::Unavailable(why()),
        }
    }
}

fn reply() -> impl Strategy<Value = Reply> {
    prop_oneof![
        4 => Just(Reply::Accepted),
        1 => prop::collection::vec(0..5_usize, 0..4).prop_map(Reply::Partial),
        2 => prop::option::of(0..5_usize).prop_map(Reply::Invalid),
        2 => Just(Reply::TooLarge),
        1 => Just(Reply::Unauthorized),
        1 => prop::option::of(0..60_u64).prop_map(Reply::Throttled),
        2 => Just(Reply::Unavailable),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..12_usize).prop_map(Step::Push),
        1 => (1..4_u64).prop_map(Step::RecordLost),
        4 => Just(Step::Cycle),
        8 => reply().prop_map(Step::Answer),
        2 => (0..60_u64).prop_map(Step::Wait),
        1 => Just(Step::BatcherDies),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_number_is_sent_refused_or_announced_as_dropped_exactly_once(
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let policy = BatchPolicy { batch_max: 4, queue_max: 10, ..BatchPolicy::default() };
        let mut test = TestOutbox::with(policy.clone());
        let mut in_flight: Option<Arc<SinkBatch>> = None;
        let mut known: Option<Arc<SinkBatch>> = None;
        for step in steps {
            let mut next_batch = None;
            match step {
                Step::Push(count) => {
                    test.push(count);
                    prop_assert!(test.outbox.statistics().queue_size <= policy.queue_max);
                }
                Step::RecordLost(count) => test.outbox.record_lost(count),
                Step::Cycle => next_batch = test.cycle(),
                Step::Answer(reply) => {
                    if let Some(batch) = in_flight.take() {
                        test.answer(&batch, reply.into());
                        next_batch = test.next();
                    }
                }
                Step::Wait(seconds) => test.wait(seconds),
                Step::BatcherDies => {
                    test.outbox.prepare_resend();
                    in_flight = None;
                }
            }
            if let Some(batch) = next_batch {
                prop_assert!(in_flight.is_none(), "two batches are in flight");
                prop_assert!((1..=policy.batch_max).contains(&batch.events.len()));
                if let Some(known) = known.filter(|known| known.id >= batch.id) {
                    prop_assert_eq!(&known, &batch, "an id was used for other events");
                }
                known = Some(batch.clone());
                in_flight = Some(batch);
            }
            let statistics = test.outbox.statistics();
            prop_assert_eq!(statistics.unsent(), test.outbox.unsent());
            prop_assert_eq!((statistics.sent, statistics.failed), (test.sent.len() as u64, test.refused.len() as u64));
        }
        if let Some(batch) = in_flight {
            test.answer(&batch, SinkAnswer::Accepted);
        }
        test.wait(3600);
        while !test.outbox.is_empty() {
            prop_assert!(test.run_cycle(|_| SinkAnswer::Accepted) > 0, "the queue is stuck: {:?}", test.outbox);
        }

        let sent = test.sent();
        prop_assert!(sent.is_sorted_by(|one, next| one < next), "out of order: {sent:?}");
        let settled = [test.sent.clone(), test.refused.clone()].concat();
        for (seq, event) in &settled {
            if let Event::EventsDropped { from_seq, to_seq } = event {
                prop_assert!(from_seq <= to_seq && to_seq < seq);
            }
        }
        let dropped = gaps(&settled).into_iter().flat_map(|(from, to)| from..=to);
        let mut seen = BTreeSet::new();
        for seq in settled.iter().map(|(seq, _)| *seq).chain(dropped) {
            prop_assert!(seen.insert(seq), "{seq} is accounted for twice");
        }
        prop_assert_eq!(seen.into_iter().collect::<Vec<u64>>(), seqs_to(test.outbox.statistics().emitted));
    }
}

#[test]
fn events_are_shown_once_and_only_up_to_a_safe_number() {
    let mut test = TestOutbox::with(BatchPolicy { batch_max: 4, queue_max: 10, ..BatchPolicy::default() });
    let shown = |test: &mut TestOutbox, through| {
        let mut shown = Vec::new();
        test.outbox.show(through, |envelope| shown.push(envelope.seq));
        shown
    };
    test.push(6);
    assert_eq!((test.outbox.last_unshown(), test.outbox.last_in_flight()), (Some(6), None));
    let batch = test.cycle().unwrap();
    assert_eq!(test.outbox.last_in_flight(), Some(4));
    assert_eq!((shown(&mut test, 4), shown(&mut test, 4)), (vec![1, 2, 3, 4], vec![]));
    test.answer(&batch, SinkAnswer::Unavailable("the disk is full".to_owned()));
    // The numbers of the kept batch and of the waiting events were reserved.
    test.push(2);
    assert_eq!((test.outbox.last_unshown(), shown(&mut test, 8)), (Some(8), vec![5, 6, 7, 8]));
    assert_eq!(test.outbox.last_unshown(), None);
    // An event that was dropped is not shown.
    test.push(9);
    assert_eq!((test.outbox.last_unshown(), shown(&mut test, 17)), (Some(17), range_of(9, 17)));
    test.push(12);
    assert_eq!(shown(&mut test, 29), range_of(20, 29));
}

fn range_of(from: u64, to: u64) -> Vec<u64> {
    (from..=to).collect()
}
