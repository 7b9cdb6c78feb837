//! Events from the emitter through the batcher to the sink.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use mcp_satellite_actors::ShutdownReport;
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::seam::{EventSink, NumberStore, SinkAnswer, SinkBatch};
use serde_json::Value;
use testkit::fleet::{Fleet, Server, SinkMode, assert_no_gap, seconds, tenths};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

fn event(mark: u64) -> Event {
    let (error_type, error_message) = ("test".to_owned(), String::new());
    Event::ConfigError { error_type, error_message, status_code: None, retry_in: Some(mark) }
}

fn mark(envelope: &Envelope) -> Option<u64> {
    match &envelope.event {
        Event::ConfigError { retry_in, .. } => *retry_in,
        _ => None,
    }
}

#[tokio::test(start_paused = true)]
async fn events_are_sent_every_three_seconds_in_batches_of_a_hundred() {
    let fleet = Fleet::start().await;
    let began = Instant::now();
    (0..250).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
    fleet.sink.until_attempts(3).await;
    sleep(seconds(60.0)).await;
    fleet.runtime.emitter().emit(event(250));
    fleet.sink.until_attempts(4).await;
    let attempts = fleet.sink.attempts();
    let sizes: Vec<_> = attempts.iter().map(|attempt| attempt.batch.events.len()).collect();
    assert_eq!(sizes, [100, 100, 50, 1], "no empty batch is sent");
    let times: Vec<_> = attempts.iter().map(|attempt| tenths(attempt.at - began)).collect();
    assert_eq!(times[..3], [3.0; 3], "the batches of a cycle follow each other at once");
    assert_eq!(times[3], 66.0, "with the next cycle");
    let marks: Vec<_> = fleet.sink.accepted().iter().filter_map(mark).collect();
    assert_eq!(marks, (0..=250).collect::<Vec<_>>(), "in order");
    fleet.finish().await;
}

/// Emits 25,000 events while the sink holds a batch of five. The batcher runs after each `chunk` of them.
async fn storm_of_events(chunk: usize) {
    let fleet = Fleet::start().await;
    fleet.sink.set_mode(SinkMode::Block);
    (0..5).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
    fleet.sink.until_attempts(1).await;
    let marks: Vec<u64> = (5..25_005).collect();
    for chunk in marks.chunks(chunk) {
        for mark in chunk {
            fleet.runtime.emitter().emit(event(*mark));
        }
        yield_now().await;
    }
    let statistics = fleet.runtime.event_statistics();
    assert_eq!((statistics.dropped, statistics.queue_size), (15_000, 10_000));
    fleet.sink.set_mode(SinkMode::Accept);
    fleet.runtime.flush().await;
    let accepted = fleet.sink.accepted();
    let kept: Vec<_> = accepted.iter().filter_map(mark).collect();
    let expected: Vec<_> = (0..5).chain(15_005..25_005).collect();
    assert!(kept == expected, "not the batch in flight and the newest 10,000 in order: {:?}…", &kept[..10]);
    let gaps: Vec<_> = accepted.iter().filter(|event| event.event.kind() == "events.dropped").collect();
    assert_eq!(gaps.len(), 1);
    let gap: Value = serde_json::to_value(gaps[0]).unwrap();
    assert_eq!(gap["data"], serde_json::json!({"from_seq": 6, "to_seq": 15_005}));
    let mut seqs: Vec<u64> = accepted.iter().map(|event| event.seq).collect();
    assert!(seqs.is_sorted());
    seqs.extend(6..=15_005);
    seqs.sort_unstable();
    assert!(seqs.into_iter().eq(1..=25_006), "the reported gap contains exactly the missing numbers");
    let report = fleet.runtime.shutdown().await;
    assert_eq!(report, ShutdownReport { events_lost: 0, in_time: true });
    fleet.finish_after_shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn in_a_storm_the_emitter_drops_exactly_the_oldest_and_reports_the_gap() {
    storm_of_events(25_000).await;
}

#[tokio::test(start_paused = true)]
async fn in_a_storm_the_queue_drops_exactly_the_oldest_and_reports_the_gap() {
    storm_of_events(1000).await;
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_sees_every_event_in_order_while_the_sink_blocks() {
    let fleet = Fleet::start().await;
    fleet.sink.set_mode(SinkMode::Block);
    let mut subscription = fleet.runtime.subscribe();
    let mut seen = 0;
    for nth in 0..25_000 {
        fleet.runtime.emitter().emit(event(nth));
        if nth % 500 == 499 {
            sleep(seconds(0.001)).await;
            while let Ok(envelope) = subscription.try_recv() {
                assert_eq!((envelope.seq, mark(&envelope)), (seen + 1, Some(seen)));
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 25_000);
    fleet.sink.set_mode(SinkMode::Accept);
    fleet.runtime.shutdown().await;
    fleet.finish_after_shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_sends_all_queued_events() {
    let fleet = Fleet::start().await;
    let began = Instant::now();
    (0..950).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
    let sink = fleet.sink.clone();
    fleet.finish().await;
    assert!(began.elapsed() < seconds(3.0), "a shutdown does not wait for the next cycle");
    assert_eq!(sink.accepted().len(), 950);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_with_a_dead_sink_takes_five_seconds_and_reports_losses() {
    for mode in [SinkMode::Block, SinkMode::Panic, SinkMode::Answer(SinkAnswer::Unavailable("down".to_owned()))] {
        let fleet = Fleet::start().await;
        fleet.online(Server::new("a")).await;
        fleet.runtime.flush().await;
        let sent = fleet.sink.accepted().len();
        fleet.sink.set_mode(mode.clone());
        (0..250).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
        let began = Instant::now();
        let report = fleet.runtime.shutdown().await;
        assert!(began.elapsed() <= seconds(5.1), "{mode:?}: {:?}", began.elapsed());
        assert_eq!(sent, 8);
        assert_eq!(
            report,
            ShutdownReport { events_lost: 252, in_time: true },
            "{mode:?}: 250 and two about the stop of the server"
        );
        fleet.finish_after_shutdown().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_sink_that_recovers_during_the_last_flush_receives_every_event() {
    let fleet = Fleet::start().await;
    fleet.sink.set_mode(SinkMode::Answer(SinkAnswer::Unavailable("down".to_owned())));
    (0..250).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
    let (report, ()) = futures::join!(fleet.runtime.shutdown(), async {
        sleep(seconds(1.0)).await;
        fleet.sink.set_mode(SinkMode::Accept);
    });
    assert_eq!(report, ShutdownReport { events_lost: 0, in_time: true });
    assert_no_gap(&fleet.sink.accepted());
    fleet.finish_after_shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_the_sink_refuses_is_retried_under_its_id() {
    let fleet = Fleet::start().await;
    let began = Instant::now();
    fleet.sink.set_mode(SinkMode::Answer(SinkAnswer::Unauthorized));
    (0..3).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
    fleet.sink.until_attempts(2).await;
    fleet.sink.set_mode(SinkMode::Answer(SinkAnswer::Throttled(None)));
    fleet.runtime.emitter().emit(event(3));
    fleet.sink.until_attempts(5).await;
    fleet.sink.set_mode(SinkMode::Accept);
    fleet.sink.until_attempts(7).await;
    let attempts = fleet.sink.attempts();
    let times: Vec<_> = attempts.iter().map(|attempt| tenths(attempt.at - began)).collect();
    assert_eq!(times, [3.0, 6.0, 9.0, 12.0, 18.0, 30.0, 30.0], "one per cycle, then after 3, 6 and 12 s of backoff");
    assert!(attempts[..6].iter().all(|attempt| attempt.batch == attempts[0].batch));
    let marks: Vec<_> = fleet.sink.accepted().iter().filter_map(mark).collect();
    assert_eq!(marks, [0, 1, 2, 3]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_backoff_that_ends_between_two_cycles_is_not_extended() {
    let fleet = Fleet::start().await;
    let began = Instant::now();
    fleet.sink.set_mode(SinkMode::Answer(SinkAnswer::Throttled(None)));
    fleet.runtime.emitter().emit(event(0));
    sleep(seconds(1.0)).await;
    fleet.runtime.flush().await;
    fleet.sink.until_attempts(3).await;
    fleet.sink.set_mode(SinkMode::Accept);
    fleet.sink.until_attempts(4).await;
    let times: Vec<_> = fleet.sink.attempts().iter().map(|attempt| tenths(attempt.at - began)).collect();
    assert_eq!(times, [1.0, 4.0, 10.0, 22.0], "3, 6 and 12 s after a first attempt between two cycles");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn numbering_starts_at_the_configured_next_number() {
    let fleet = Fleet::with(|options| options.next_seq = 501).await;
    fleet.runtime.emitter().emit(event(0));
    fleet.runtime.flush().await;
    assert_eq!(fleet.sink.accepted()[0].seq, 501);
    let json = serde_json::to_value(&fleet.sink.accepted()[0]).unwrap();
    assert_eq!(json["timestamp"], "2026-11-21T06:33:00.000Z");
    fleet.runtime.shutdown().await;
    fleet.finish_after_shutdown().await;
}

/// A sink that accepts events at once, as a local disk does.
struct PromptSink(Arc<dyn EventSink>);

impl EventSink for PromptSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        self.0.send(batch)
    }

    fn is_prompt(&self) -> bool {
        true
    }
}

async fn fleet_with_prompt_sink(batch_max: usize) -> Fleet {
    Fleet::with(|options| {
        options.sink = Arc::new(PromptSink(options.sink.clone()));
        options.batch.batch_max = batch_max;
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn a_prompt_sink_receives_a_single_event_after_the_delay() {
    let fleet = fleet_with_prompt_sink(2000).await;
    let began = Instant::now();
    for nth in 0..3 {
        sleep(seconds(10.0)).await;
        fleet.runtime.emitter().emit(event(nth));
    }
    fleet.sink.until_attempts(3).await;
    let attempts = fleet.sink.attempts();
    let times: Vec<_> = attempts.iter().map(|attempt| tenths(attempt.at - began)).collect();
    assert_eq!(times, [10.1, 20.1, 30.1]);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_prompt_sink_receives_the_events_of_a_tenth_of_a_second_in_one_batch() {
    let fleet = fleet_with_prompt_sink(2000).await;
    let began = Instant::now();
    // Ten seconds with two hundred events each, through several cycles of the interval.
    for nth in 0..2000 {
        fleet.runtime.emitter().emit(event(nth));
        sleep(seconds(0.005)).await;
    }
    sleep(seconds(0.2)).await;
    let attempts = fleet.sink.attempts();
    let marks: Vec<_> = fleet.sink.accepted().iter().filter_map(mark).collect();
    assert_eq!(marks, (0..2000).collect::<Vec<_>>());
    assert!((90..=100).contains(&attempts.len()), "{} batches in {:?}", attempts.len(), began.elapsed());
    let gaps = attempts.windows(2).map(|pair| pair[1].at - pair[0].at);
    assert!(gaps.min() >= Some(Duration::from_millis(100)), "two batches within the delay");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_half_full_queue_or_many_events_are_sent_before_the_delay() {
    for (queue_max, sent_at) in [(200, 100), (2000, 128)] {
        let fleet = Fleet::with(|options| {
            options.sink = Arc::new(PromptSink(options.sink.clone()));
            (options.batch.batch_max, options.batch.queue_max) = (1000, queue_max);
        })
        .await;
        let began = Instant::now();
        (1..sent_at).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
        yield_now().await;
        assert!(fleet.sink.attempts().is_empty());
        fleet.runtime.emitter().emit(event(sent_at));
        fleet.sink.until_attempts(1).await;
        let attempts = fleet.sink.attempts();
        assert_eq!((attempts[0].batch.events.len() as u64, tenths(began.elapsed())), (sent_at, 0.0));
        assert_eq!(fleet.runtime.event_statistics().dropped, 0);
        fleet.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_flush_does_not_wait_for_the_delay() {
    let fleet = fleet_with_prompt_sink(2000).await;
    let began = Instant::now();
    fleet.runtime.emitter().emit(event(0));
    fleet.runtime.flush().await;
    assert_eq!((fleet.sink.accepted().len(), tenths(began.elapsed())), (1, 0.0));
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn events_during_a_send_form_the_next_batches_of_a_prompt_sink() {
    let fleet = fleet_with_prompt_sink(2000).await;
    fleet.sink.set_mode(SinkMode::Block);
    fleet.runtime.emitter().emit(event(0));
    fleet.sink.until_attempts(1).await;
    for nth in 1..=4100 {
        fleet.runtime.emitter().emit(event(nth));
        if nth % 500 == 0 {
            yield_now().await;
        }
    }
    let unblocked_at = Instant::now();
    fleet.sink.set_mode(SinkMode::Accept);
    fleet.sink.until_attempts(4).await;
    let attempts = fleet.sink.attempts();
    let sizes: Vec<_> = attempts.iter().map(|attempt| attempt.batch.events.len()).collect();
    assert_eq!(sizes, [1, 2000, 2000, 100]);
    assert_eq!(tenths(attempts[3].at - unblocked_at), 0.1, "the batches wait for the delay and not for the interval");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_failing_prompt_sink_is_retried_once_per_interval() {
    let fleet = fleet_with_prompt_sink(2000).await;
    fleet.sink.set_mode(SinkMode::Answer(SinkAnswer::Unavailable("the disk is full".to_owned())));
    let began = Instant::now();
    for nth in 0..600 {
        fleet.runtime.emitter().emit(event(nth));
        sleep(seconds(0.1)).await;
    }
    let attempts = fleet.sink.attempts();
    assert_eq!(attempts.len(), 1 + 19, "one at once, then one every three seconds of a minute");
    assert!(attempts.iter().all(|attempt| attempt.batch == attempts[0].batch), "the same batch under the same id");
    fleet.sink.set_mode(SinkMode::Accept);
    fleet.sink.until_attempts(attempts.len() + 2).await;
    assert_eq!(tenths(began.elapsed()), 60.0);
    let marks: Vec<_> = fleet.sink.accepted().iter().filter_map(mark).collect();
    assert_eq!(marks, (0..600).collect::<Vec<_>>(), "then every event arrives at once");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_prompt_sink_receives_every_event_after_a_panic() {
    let fleet = fleet_with_prompt_sink(2000).await;
    fleet.sink.set_mode(SinkMode::Panic);
    fleet.runtime.emitter().emit(event(0));
    fleet.sink.until_attempts(1).await;
    fleet.sink.set_mode(SinkMode::Accept);
    fleet.runtime.panic(mcp_satellite_actors::RuntimePart::Batcher);
    fleet.runtime.emitter().emit(event(1));
    fleet.sink.until_attempts(3).await;
    let marks: Vec<_> = fleet.sink.accepted().iter().filter_map(mark).collect();
    assert_eq!(marks, [0, 1]);
    fleet.finish().await;
}

/// A prompt sink that reserves event numbers, or fails to.
#[derive(Clone)]
struct ReservingSink {
    sink: Arc<dyn EventSink>,
    can_reserve: Arc<AtomicBool>,
}

impl EventSink for ReservingSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        self.sink.send(batch)
    }

    fn is_prompt(&self) -> bool {
        true
    }

    fn number_store(&self) -> Option<Arc<dyn NumberStore>> {
        Some(Arc::new(self.clone()))
    }
}

impl NumberStore for ReservingSink {
    fn reserve(&self, _through: u64) -> BoxFuture<'static, Result<(), String>> {
        let can_reserve = self.can_reserve.load(Ordering::Acquire);
        ready(can_reserve.then_some(()).ok_or_else(|| "the disk does not answer".to_owned())).boxed()
    }
}

async fn fleet_with_reserving_sink(can_reserve: bool) -> (Fleet, Arc<AtomicBool>) {
    let can_reserve = Arc::new(AtomicBool::new(can_reserve));
    let switch = can_reserve.clone();
    let fleet = Fleet::with(|options| {
        options.sink = Arc::new(ReservingSink { sink: options.sink.clone(), can_reserve: switch });
    })
    .await;
    (fleet, can_reserve)
}

#[tokio::test(start_paused = true)]
async fn events_are_published_after_they_are_stored() {
    let (fleet, can_reserve) = fleet_with_reserving_sink(false).await;
    let mut subscription = fleet.runtime.subscribe();
    fleet.sink.set_mode(SinkMode::Block);
    fleet.runtime.emitter().emit(event(0));
    fleet.sink.until_attempts(1).await;
    sleep(seconds(10.0)).await;
    assert!(subscription.try_recv().is_err(), "an event was published before it was stored");
    fleet.sink.set_mode(SinkMode::Accept);
    assert_eq!(subscription.recv().await.unwrap().seq, fleet.sink.accepted()[0].seq);
    assert!(!can_reserve.load(Ordering::Acquire), "a stored event needs no reservation");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn events_that_cannot_be_stored_are_published_only_after_their_numbers_are_reserved() {
    let (fleet, can_reserve) = fleet_with_reserving_sink(false).await;
    let mut subscription = fleet.runtime.subscribe();
    fleet.sink.set_mode(SinkMode::Answer(SinkAnswer::Unavailable("the disk is full".to_owned())));
    (0..3).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
    fleet.runtime.flush().await;
    sleep(seconds(10.0)).await;
    assert!(subscription.try_recv().is_err(), "an event was published under a number that may be used again");
    let statistics = fleet.runtime.event_statistics();
    assert_eq!((statistics.queue_size, statistics.last_error.as_deref()), (0, Some("the disk does not answer")));
    can_reserve.store(true, Ordering::Release);
    fleet.runtime.emitter().emit(event(3));
    let mut published = Vec::new();
    for _ in 0..4 {
        published.push(subscription.recv().await.unwrap().seq);
    }
    assert!(fleet.sink.accepted().is_empty(), "the events are published from memory");
    fleet.sink.set_mode(SinkMode::Accept);
    fleet.runtime.flush().await;
    let accepted = fleet.sink.accepted();
    assert_eq!(accepted.iter().filter_map(mark).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(accepted.iter().map(|envelope| envelope.seq).collect::<Vec<_>>(), published);
    assert!(subscription.try_recv().is_err(), "an event was published twice");
    assert_no_gap(&accepted);
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_counts_unstored_events_as_lost_without_waiting() {
    let (fleet, _can_reserve) = fleet_with_reserving_sink(false).await;
    fleet.sink.set_mode(SinkMode::Answer(SinkAnswer::Unavailable("the disk does not answer".to_owned())));
    (0..319).for_each(|nth| fleet.runtime.emitter().emit(event(nth)));
    let began = Instant::now();
    assert_eq!(fleet.runtime.shutdown().await, ShutdownReport { events_lost: 319, in_time: true });
    assert!(began.elapsed() < seconds(1.0));
    fleet.finish_after_shutdown().await;
}
