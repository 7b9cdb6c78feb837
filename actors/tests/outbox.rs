//! The event queue: what is sent when, and what each answer of the sink means. Whatever the answers, a reader of the
//! sink can tell every number that is missing from the `events.dropped` that announce it.
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

/// An outbox with a time of its own, and what has become of its events.
struct Desk {
    outbox: Outbox,
    now: Instant,
    sent: Vec<(u64, Event)>,
    refused: Vec<(u64, Event)>,
}

impl Desk {
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

    /// Numbers what waits, as if all of it were reserved; the numbers.
    fn reserve(&mut self) -> Vec<u64> {
        let Some(wanted) = self.outbox.last_needed_number() else { return Vec::new() };
        self.outbox.assign_numbers(wanted).map(|envelope| envelope.seq).collect()
    }

    fn wait(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
    }

    /// A cycle begins, and this is its first batch.
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

    /// A whole cycle against a sink; how many batches it took.
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

fn to(last: u64) -> Vec<u64> {
    (1..=last).collect()
}

/// The ranges that these events announce as dropped.
fn gaps(events: &[(u64, Event)]) -> Vec<(u64, u64)> {
    let gap = |event: &Event| match event {
        Event::EventsDropped { from_seq, to_seq } => Some((*from_seq, *to_seq)),
        _ => None,
    };
    events.iter().filter_map(|(_, event)| gap(event)).collect()
}

#[test]
fn an_empty_queue_sends_nothing() {
    assert_eq!(Desk::new().cycle(), None);
}

#[test]
fn nothing_is_sent_before_the_cycle() {
    let mut desk = Desk::new();
    desk.push(250);
    assert_eq!(desk.next(), None);
    assert_eq!(desk.run_cycle(|_| SinkAnswer::Accepted), 3);
    desk.push(1);
    assert_eq!(desk.next(), None, "it came after the cycle");
}

#[test]
fn more_than_a_hundred_go_in_following_batches_in_order() {
    let mut desk = Desk::new();
    desk.push(250);
    let mut sizes = Vec::new();
    desk.run_cycle(|batch| {
        sizes.push(batch.events.len());
        SinkAnswer::Accepted
    });
    assert_eq!(sizes, [100, 100, 50]);
    assert_eq!(desk.sent(), to(250));
    assert!(desk.outbox.is_empty());
}

#[test]
fn one_batch_is_in_flight_at_a_time_and_each_has_an_id_of_its_own() {
    let mut desk = Desk::new();
    desk.push(150);
    let first = desk.cycle().unwrap();
    assert!(desk.outbox.is_sending());
    assert_eq!(desk.outbox.statistics().state, BatcherState::Sending);
    assert_eq!(desk.next(), None);
    desk.answer(&first, SinkAnswer::Accepted);
    let second = desk.next().unwrap();
    assert_eq!((first.id, second.id), (7, 8));
}

#[test]
fn over_ten_thousand_the_oldest_go_and_are_announced() {
    let mut desk = Desk::new();
    desk.push(10_003);
    assert_eq!(desk.outbox.statistics().queue_size, 10_000);
    assert_eq!(desk.outbox.statistics().dropped, 3);
    desk.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!(desk.sent(), (4..=10_004).collect::<Vec<u64>>());
    assert_eq!(gaps(&desk.sent), [(1, 3)]);
    assert!(desk.outbox.is_empty());
}

#[test]
fn a_gap_alone_is_announced_in_its_cycle_and_not_before() {
    let mut desk = Desk::new();
    desk.push(2);
    desk.outbox.record_lost(5);
    assert_eq!(desk.outbox.statistics().dropped, 7);
    assert!(!desk.outbox.is_empty(), "a gap that nobody was told of is not settled");
    assert_eq!(desk.next(), None, "no cycle has begun");
    desk.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!((desk.sent(), gaps(&desk.sent)), (vec![8], vec![(1, 7)]));
    assert!(desk.outbox.is_empty());
}

#[test]
fn the_batch_in_flight_is_never_dropped_and_comes_again_under_its_id() {
    let mut desk = Desk::new();
    desk.push(100);
    let batch = desk.cycle().unwrap();
    desk.push(10_050);
    desk.answer(&batch, SinkAnswer::Unavailable("503".to_owned()));
    desk.wait(3);
    let again = desk.cycle().unwrap();
    assert_eq!(again, batch);
    desk.answer(&again, SinkAnswer::Accepted);
    desk.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!(gaps(&desk.sent), [(101, 150)]);
    assert_eq!(desk.sent()[..101], [to(100), vec![151]].concat());
}

#[test]
fn a_batch_that_was_with_a_batcher_that_died_is_sent_again_under_its_id() {
    let mut desk = Desk::new();
    desk.push(1);
    let batch = desk.cycle().unwrap();
    desk.outbox.prepare_resend();
    assert_eq!(desk.cycle().unwrap(), batch);
}

/// The announcement of a gap is an event, and may be too old itself.
#[test]
fn a_gap_whose_announcement_was_dropped_is_announced_again_and_says_no_more_than_what_is_gone() {
    let mut desk = Desk::with(BatchPolicy { batch_max: 4, queue_max: 10, ..BatchPolicy::default() });
    desk.push(14);
    let batch = desk.cycle().unwrap();
    assert_eq!(seqs(&batch), [5, 6, 7, 8]);
    desk.answer(&batch, SinkAnswer::Accepted);
    // The announcement of 1 to 4 waits as 15; these are one too many for it.
    desk.push(15);
    desk.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!(gaps(&desk.sent), [(1, 4), (9, 20)]);
    assert_eq!(desk.sent(), [to(8)[4..].to_vec(), (21..=32).collect()].concat());
}

#[test]
fn what_a_partial_answer_refuses_is_dropped_and_the_rest_is_taken() {
    let mut desk = Desk::new();
    desk.push(5);
    let failures = [(4, "x"), (1, "y"), (1, "again"), (9, "not there")];
    let failures: Vec<(usize, String)> = failures.map(|(at, why)| (at, why.to_owned())).to_vec();
    desk.run_cycle(|_| SinkAnswer::Partial(failures.clone()));
    assert_eq!((desk.sent(), desk.refused()), (vec![1, 3, 4], vec![5, 2]));
    let statistics = desk.outbox.statistics();
    assert_eq!((statistics.sent, statistics.failed, statistics.unsent()), (3, 2, 0));
    assert_eq!(statistics.state, BatcherState::Idle);
}

/// A sink that takes none of a batch with an invalid event in it, and says which one or does not.
fn strict(invalid: &[u64], names_it: bool) -> impl FnMut(&SinkBatch) -> SinkAnswer {
    move |batch| match batch.events.iter().position(|event| invalid.contains(&event.seq)) {
        Some(at) => SinkAnswer::Invalid(names_it.then_some(at), "what is this?".to_owned()),
        None => SinkAnswer::Accepted,
    }
}

#[test]
fn invalid_events_are_found_wherever_they_are_and_only_they_are_dropped() {
    let sets: [&[u64]; 8] =
        [&[1], &[50], &[100], &[101], &[1, 100], &[1, 2, 3], &[49, 50, 51, 150], &[1, 33, 64, 99, 100, 101, 250]];
    for invalid in sets {
        for names_it in [true, false] {
            let mut desk = Desk::new();
            desk.push(250);
            let batches = desk.run_cycle(strict(invalid, names_it));
            let rest: Vec<u64> = to(250).into_iter().filter(|seq| !invalid.contains(seq)).collect();
            assert_eq!(desk.refused(), invalid, "named: {names_it}");
            assert_eq!(desk.sent(), rest);
            let most = if names_it { 3 + invalid.len() } else { 3 + invalid.len() * 16 };
            assert!(batches <= most, "{batches} batches for {invalid:?}, named: {names_it}");
        }
    }
}

#[test]
fn a_batch_of_nothing_but_invalid_events_is_dropped_event_by_event() {
    let mut desk = Desk::new();
    desk.push(20);
    desk.run_cycle(|_| SinkAnswer::Invalid(None, "no".to_owned()));
    assert_eq!((desk.sent(), desk.refused()), (Vec::new(), to(20)));
    assert!(desk.outbox.is_empty());
}

#[test]
fn an_index_that_is_not_in_the_batch_is_as_good_as_none() {
    let mut desk = Desk::new();
    desk.push(8);
    desk.run_cycle(|batch| {
        let bad = batch.events.iter().any(|event| event.seq == 3);
        if bad { SinkAnswer::Invalid(Some(1_000), "no".to_owned()) } else { SinkAnswer::Accepted }
    });
    assert_eq!(desk.refused(), [3]);
}

#[test]
fn a_batch_that_is_too_large_is_halved_until_it_fits_and_an_event_that_never_fits_is_dropped() {
    let mut desk = Desk::new();
    desk.push(250);
    let mut sizes = Vec::new();
    desk.run_cycle(|batch| {
        sizes.push(batch.events.len());
        let fits = batch.events.len() <= 30 && batch.events.iter().all(|event| event.seq != 77);
        if fits { SinkAnswer::Accepted } else { SinkAnswer::TooLarge }
    });
    assert_eq!(sizes[..4], [100, 50, 25, 100]);
    assert_eq!(desk.refused(), [77]);
    assert_eq!(desk.sent(), to(250).into_iter().filter(|seq| *seq != 77).collect::<Vec<u64>>());
}

#[test]
fn what_the_sink_cannot_take_now_is_kept_until_the_next_cycle() {
    for answer in [SinkAnswer::Unauthorized, SinkAnswer::Unavailable("refused".to_owned())] {
        let mut desk = Desk::new();
        desk.push(150);
        assert_eq!(desk.run_cycle(|_| answer.clone()), 1, "one attempt a cycle");
        assert_eq!(desk.outbox.statistics().state, BatcherState::Retrying);
        assert!(desk.outbox.statistics().last_error.is_some());
        assert_eq!(desk.outbox.unsent(), 150);
        desk.wait(3);
        assert_eq!(desk.run_cycle(|_| SinkAnswer::Accepted), 2);
        assert_eq!(desk.sent(), to(150));
        assert_eq!(desk.outbox.statistics().last_error, None);
    }
}

/// The seconds from each 429 until the first batch that is sent after it.
fn pauses(desk: &mut Desk, count: usize, retry_after: Option<u64>) -> Vec<u64> {
    let pause = |desk: &mut Desk| {
        let since = desk.now;
        loop {
            desk.wait(1);
            let batches = desk.run_cycle(|_| SinkAnswer::Throttled(retry_after.map(Duration::from_secs)));
            if batches > 0 {
                return desk.now.duration_since(since).as_secs();
            }
        }
    };
    (0..count).map(|_| pause(desk)).collect()
}

#[test]
fn a_throttling_sink_is_tried_again_after_3_6_12_24_and_48_seconds_and_the_delay_resets_after_a_success() {
    let mut desk = Desk::new();
    desk.push(1);
    desk.run_cycle(|_| SinkAnswer::Throttled(None));
    assert_eq!(desk.outbox.statistics().state, BatcherState::BackingOff);
    assert_eq!(pauses(&mut desk, 6, None), [3, 6, 12, 24, 48, 48]);
    desk.wait(48);
    desk.run_cycle(|_| SinkAnswer::Accepted);
    assert_eq!(desk.sent(), [1]);
    desk.push(1);
    desk.run_cycle(|_| SinkAnswer::Throttled(None));
    assert_eq!(pauses(&mut desk, 1, None), [3], "the delay starts again");
}

#[test]
fn retry_after_is_honoured_where_it_is_longer() {
    let mut desk = Desk::new();
    desk.push(1);
    desk.run_cycle(|_| SinkAnswer::Throttled(Some(Duration::from_secs(20))));
    assert_eq!(pauses(&mut desk, 4, Some(20)), [20, 20, 20, 24]);
}

#[test]
fn no_retry_after_is_too_long_to_be_counted() {
    let mut desk = Desk::new();
    desk.push(1);
    desk.run_cycle(|_| SinkAnswer::Throttled(Some(Duration::MAX)));
    desk.wait(3600);
    assert_eq!(desk.cycle(), None);
    assert_eq!(desk.outbox.statistics().state, BatcherState::BackingOff);
}

#[test]
fn on_the_way_out_a_pause_is_not_honoured() {
    let mut desk = Desk::new();
    desk.push(150);
    desk.run_cycle(|_| SinkAnswer::Throttled(None));
    desk.push(1);
    desk.outbox.begin_final_cycle();
    while let Some(batch) = desk.next() {
        desk.answer(&batch, SinkAnswer::Accepted);
    }
    assert_eq!(desk.sent(), to(151));
}

/// Events that are numbered already, as they are stored.
fn stored(seqs: impl IntoIterator<Item = u64>) -> Vec<Envelope> {
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
fn what_is_read_from_where_it_is_stored_keeps_its_numbers_and_nothing_goes_twice() {
    let mut desk = Desk::new();
    desk.outbox.refill(stored([5, 6, 9]));
    assert_eq!(desk.outbox.first_unsettled(), Some(5));
    desk.outbox.refill(stored([6, 9, 10, 2, 11]));
    let mut batches = Vec::new();
    desk.run_cycle(|batch| {
        batches.push(seqs(batch));
        SinkAnswer::Accepted
    });
    assert_eq!(batches, [[5, 6, 9, 10, 11]]);
    assert_eq!(desk.outbox.first_unsettled(), None);
    assert_eq!((desk.outbox.statistics().sent, desk.outbox.unsent()), (5, 0));
}

#[test]
fn what_is_read_is_over_no_limit() {
    let mut desk = Desk::with(BatchPolicy { queue_max: 10, ..BatchPolicy::default() });
    desk.outbox.refill(stored(1..=250));
    assert_eq!(desk.run_cycle(|_| SinkAnswer::Accepted), 3);
    assert_eq!(desk.sent(), to(250));
    assert_eq!(desk.outbox.statistics().dropped, 0);
}

#[test]
fn what_was_in_flight_when_a_process_ended_goes_first_and_under_its_id() {
    let mut desk = Desk::new();
    desk.outbox.resume_batch(3, stored(41..=60));
    desk.outbox.refill(stored(50..=65));
    assert_eq!(desk.next(), None, "with the cycle, as always");
    let batch = desk.cycle().unwrap();
    assert_eq!((batch.id, seqs(&batch)), (3, (41..=60).collect()));
    let unavailable = SinkAnswer::Unavailable("down".to_owned());
    desk.answer(&batch, unavailable);
    assert!(desk.outbox.has_kept_batch());
    assert_eq!(desk.cycle(), Some(batch.clone()), "and again");
    assert!(!desk.outbox.has_kept_batch());
    desk.answer(&batch, SinkAnswer::Accepted);
    let next = desk.next().unwrap();
    assert_eq!((next.id, seqs(&next)), (7, (61..=65).collect()), "a new one has an id of this process");
}

#[test]
fn nothing_was_in_flight_if_all_of_it_is_gone() {
    let mut desk = Desk::new();
    desk.outbox.resume_batch(3, Vec::new());
    assert!(desk.outbox.is_empty() && desk.outbox.is_idle());
}

#[test]
fn the_first_that_is_not_settled_is_known_whatever_the_answers() {
    let mut desk = Desk::new();
    desk.outbox.refill(stored(1..=10));
    let first = |desk: &Desk| desk.outbox.first_unsettled();
    let batch = desk.cycle().unwrap();
    assert_eq!(first(&desk), Some(1), "in flight is not settled");
    desk.answer(&batch, SinkAnswer::Throttled(None));
    assert_eq!(first(&desk), Some(1));
    desk.wait(6);
    let batch = desk.cycle().unwrap();
    desk.answer(&batch, SinkAnswer::Invalid(Some(0), "the first".to_owned()));
    assert_eq!(first(&desk), Some(2), "one that is refused for good is settled");
    let batch = desk.next().unwrap();
    desk.answer(&batch, SinkAnswer::TooLarge);
    assert_eq!(first(&desk), Some(2));
    let batch = desk.next().unwrap();
    assert_eq!(seqs(&batch), [2, 3, 4, 5]);
    desk.answer(&batch, SinkAnswer::Partial(vec![(3, "the last".to_owned())]));
    assert_eq!(first(&desk), Some(6));
    let batch = desk.next().unwrap();
    desk.answer(&batch, SinkAnswer::Invalid(Some(2), "in the middle".to_owned()));
    assert_eq!(first(&desk), Some(6), "what is before it is not taken");
    let batch = desk.next().unwrap();
    assert_eq!(seqs(&batch), [6, 7, 9, 10]);
    desk.answer(&batch, SinkAnswer::Accepted);
    assert_eq!(first(&desk), None);
    assert_eq!(desk.refused(), [1, 5, 8]);
}

#[test]
fn reconnecting_events_of_one_instance_are_thinned_to_five_and_each_doubling() {
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
    assert!(kept(&mut outbox, "another", 6), "each instance has a count of its own");
    assert_eq!(outbox.statistics().emitted, 10, "what is thinned out has no number");
    let back = Event::Reconnected {
        of: subject("one"),
        capabilities: serde_json::Value::Null,
        attempts_taken: 100,
        changed: Vec::new(),
    };
    outbox.push(Timestamp::UNIX_EPOCH, back);
    let attempts: Vec<u32> = (1..=10).filter(|attempt| kept(&mut outbox, "one", *attempt)).collect();
    assert_eq!(attempts, [1, 2, 3, 4, 5, 10], "a new loss is counted anew");
}

#[test]
fn numbers_go_on_from_where_they_were() {
    let mut outbox = Outbox::new(BatchPolicy::default(), 4711, 1);
    let told = Event::EventsDropped { from_seq: 1, to_seq: 2 };
    assert_eq!(outbox.push(Timestamp::UNIX_EPOCH, told).unwrap().seq, 4711);
}

#[derive(Debug, Clone)]
enum Step {
    Push(usize),
    LostAtTheDoor(u64),
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
        1 => (1..4_u64).prop_map(Step::LostAtTheDoor),
        4 => Just(Step::Cycle),
        8 => reply().prop_map(Step::Answer),
        2 => (0..60_u64).prop_map(Step::Wait),
        1 => Just(Step::BatcherDies),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_number_is_sent_refused_or_announced_as_dropped_once_and_in_order(
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let policy = BatchPolicy { batch_max: 4, queue_max: 10, ..BatchPolicy::default() };
        let mut desk = Desk::with(policy.clone());
        let mut in_flight: Option<Arc<SinkBatch>> = None;
        let mut known: Option<Arc<SinkBatch>> = None;
        for step in steps {
            let mut came = None;
            match step {
                Step::Push(count) => {
                    desk.push(count);
                    prop_assert!(desk.outbox.statistics().queue_size <= policy.queue_max);
                }
                Step::LostAtTheDoor(count) => desk.outbox.record_lost(count),
                Step::Cycle => came = desk.cycle(),
                Step::Answer(reply) => {
                    if let Some(batch) = in_flight.take() {
                        desk.answer(&batch, reply.into());
                        came = desk.next();
                    }
                }
                Step::Wait(seconds) => desk.wait(seconds),
                Step::BatcherDies => {
                    desk.outbox.prepare_resend();
                    in_flight = None;
                }
            }
            if let Some(batch) = came {
                prop_assert!(in_flight.is_none(), "two batches are in flight");
                prop_assert!((1..=policy.batch_max).contains(&batch.events.len()));
                if let Some(known) = known.filter(|known| known.id >= batch.id) {
                    prop_assert_eq!(&known, &batch, "an id is used for other events");
                }
                known = Some(batch.clone());
                in_flight = Some(batch);
            }
            let statistics = desk.outbox.statistics();
            prop_assert_eq!(statistics.unsent(), desk.outbox.unsent());
            prop_assert_eq!((statistics.sent, statistics.failed), (desk.sent.len() as u64, desk.refused.len() as u64));
        }
        if let Some(batch) = in_flight {
            desk.answer(&batch, SinkAnswer::Accepted);
        }
        desk.wait(3600);
        while !desk.outbox.is_empty() {
            prop_assert!(desk.run_cycle(|_| SinkAnswer::Accepted) > 0, "it is stuck: {:?}", desk.outbox);
        }

        let sent = desk.sent();
        prop_assert!(sent.is_sorted_by(|one, next| one < next), "out of order: {sent:?}");
        let settled = [desk.sent.clone(), desk.refused.clone()].concat();
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
        prop_assert_eq!(seen.into_iter().collect::<Vec<u64>>(), to(desk.outbox.statistics().emitted));
    }
}

#[test]
fn events_are_not_sent_before_their_numbers_are_reserved() {
    let mut desk = Desk::new();
    desk.outbox.reserve_numbers();
    desk.push(3);
    assert_eq!((desk.cycle(), desk.outbox.unsent(), desk.outbox.last_needed_number()), (None, 3, Some(3)));
    // One more comes while three numbers are reserved.
    desk.push(1);
    let numbered: Vec<u64> = desk.outbox.assign_numbers(3).map(|envelope| envelope.seq).collect();
    assert_eq!((numbered, desk.outbox.last_needed_number()), (vec![1, 2, 3], Some(4)));
    assert_eq!(desk.run_cycle(|_| SinkAnswer::Accepted), 1);
    assert!(!desk.outbox.is_empty());
    assert_eq!(desk.reserve(), [4]);
    assert_eq!(desk.run_cycle(|_| SinkAnswer::Accepted), 1);
    assert!(desk.outbox.is_empty());
    let seqs: Vec<u64> = desk.sent.iter().map(|(seq, _)| *seq).collect();
    assert_eq!(seqs, [1, 2, 3, 4]);
}

#[test]
fn events_that_are_dropped_without_a_number_are_announced_once_there_are_numbers() {
    let mut desk = Desk::with(BatchPolicy { queue_max: 10, ..BatchPolicy::default() });
    desk.outbox.reserve_numbers();
    desk.push(2);
    desk.reserve();
    desk.push(13);
    let statistics = desk.outbox.statistics();
    assert_eq!((statistics.queue_size, statistics.dropped, statistics.unsent()), (10, 5, 10));
    desk.outbox.record_lost(4);
    assert_eq!((desk.outbox.unsent(), desk.outbox.last_needed_number()), (0, Some(19)));
    desk.push(1);
    for _ in 0..3 {
        desk.reserve();
        desk.run_cycle(|_| SinkAnswer::Accepted);
    }
    assert!(desk.outbox.is_empty());
    let announced = |event: &Event| match event {
        Event::EventsDropped { from_seq, to_seq } => Some((*from_seq, *to_seq)),
        _ => None,
    };
    let sent: Vec<_> = desk.sent.iter().map(|(seq, event)| (*seq, announced(event))).collect();
    assert_eq!(sent, [(20, None), (21, Some((1, 19)))]);
}
