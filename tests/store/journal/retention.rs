//! Deletion by age, number and size, and clock changes.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use mcp_satellite::journal::{self, BatchInFlight, Journal, JournalLimits};
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::seam::SinkAnswer;
use testkit::wait::wait_until;

use super::support::*;

const MIB: u64 = 1 << 20;
const DAY: i64 = 24 * 3600;

fn small(home: &Home) -> Journal {
    Journal::open(home.path(), JournalLimits { size_max: 2 * MIB, ..JournalLimits::default() }).unwrap()
}

fn days_ago(days: i64) -> Timestamp {
    now() - SignedDuration::from_secs(days * DAY)
}

/// Appends events from `from` until the oldest are deleted. Returns the last seq.
async fn overfill(journal: &Journal, from: u64) -> u64 {
    let first = journal.status().first_seq.unwrap_or(from);
    let mut last = from - 1;
    while journal.status().first_seq.unwrap_or(from) == first {
        append_large(journal, last + 1..=last + 500).await;
        last += 500;
        assert!(last < 100_000, "no event was deleted: {:?}", journal.status());
    }
    last
}

#[tokio::test]
async fn above_size_max_the_oldest_events_are_deleted() {
    let home = Home::new();
    let journal = small(&home);
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    let full = overfill(&journal, 1).await;
    append_large(&journal, full + 1..=4 * full).await;
    let status = assert_ok(&journal);
    assert_eq!((status.last_seq, status.journalled_through), (Some(4 * full), 4 * full));
    assert!(std::fs::metadata(home.database()).unwrap().len() <= 2 * MIB + MIB / 2, "{status:?}");
    let stored = home.stored();
    assert_same_numbers(stored.clone(), status.first_seq.unwrap()..=4 * full);
    assert!(stored.len() as u64 > full / 2, "too many events were deleted: {} of {full} are left", stored.len());
    assert_eq!(dropped_ranges.ranges(&journal).await, [], "a loss was reported although no delivery is expected");
    assert_eq!(status.pruned_unsent, 0);
    journal.close().await;
    assert_eq!(small(&home).next_seq(), 4 * full + 1);
}

#[tokio::test]
async fn delivered_events_are_deleted_first_and_only_undelivered_ones_reported() {
    let home = Home::new();
    let journal = small(&home);
    journal.expect_delivery();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    append_large(&journal, 1..=1_000).await;
    journal.outbox(0, 1_000).await.unwrap();
    journal.store_delivery(1_000, None).await.unwrap();
    // A batch in flight.
    let last = overfill(&journal, 1_001).await;
    assert_eq!(dropped_ranges.ranges(&journal).await, [], "an undelivered event was deleted");
    let handed = journal.outbox(1_000, 100).await.unwrap();
    let sending = BatchInFlight { id: 7, first: 1_001, last: 1_100, refused: Vec::new() };
    journal.store_delivery(1_000, Some(sending)).await.unwrap();

    append_large(&journal, last + 1..=3 * last).await;
    // The loss is reported when there is room again.
    wait_until("a report of the loss", || !dropped_ranges.now().is_empty());
    let status = assert_ok(&journal);
    let gone = dropped_ranges.numbers(&journal).await;
    // Exactly the deleted events were reported.
    assert_same_numbers(home.stored(), range(1_001..=3 * last).into_iter().filter(|seq| !gone.contains(seq)));
    // The events of a block are deleted together, and the first one contains the events in flight.
    let first = *gone.first().unwrap();
    assert!((1_101..1_500).contains(&first), "an event in flight was deleted, or too many were kept: {first}");
    assert_eq!(status.pruned_unsent, gone.len() as u64);
    assert_eq!(handed.len(), 100);
    assert_eq!(status.backlog, 3 * last - 1_000);
}

#[tokio::test]
async fn a_loss_is_reported_again_until_an_events_dropped_is_stored() {
    let home = Home::new();
    let journal = small(&home);
    journal.expect_delivery();
    let mut last = overfill(&journal, 1).await;
    // No callback is registered yet.
    journal.close().await;
    let journal = small(&home);
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    let first = dropped_ranges.ranges(&journal).await;
    assert_eq!((first.len(), first[0].0), (1, 1));
    journal.close().await;

    let journal = small(&home);
    journal.expect_delivery();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    assert_eq!(dropped_ranges.ranges(&journal).await, first, "the loss must be reported again");
    let (from_seq, to_seq) = first[0];
    last += 1;
    let dropped = Envelope { event: Event::EventsDropped { from_seq, to_seq }, ..event_at(last, now()) };
    assert_eq!(journal.append(batch_of(vec![dropped])).await, SinkAnswer::Accepted);
    journal.close().await;
    let journal = small(&home);
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    assert_eq!(dropped_ranges.ranges(&journal).await, []);
}

#[tokio::test]
async fn old_events_are_deleted_only_after_delivery() {
    let home = Home::new();
    let journal = home.open();
    journal.expect_delivery();
    let old = |seqs: std::ops::RangeInclusive<u64>| seqs.map(|seq| event_at(seq, days_ago(31)));
    // Events of a batch that are stored in a block are deleted together.
    let young = (6_001..=6_010).map(|seq| event_at(seq, days_ago(29)));
    for events in [old(1..=5_500).collect(), old(5_501..=6_000).collect(), young.collect()] {
        assert_eq!(journal.append(batch_of(events)).await, SinkAnswer::Accepted);
    }
    journal.store_delivery(5_500, None).await.unwrap();
    journal.close().await;

    let journal = home.open();
    journal.expect_delivery();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    wait_until("the delivered events to be deleted", || journal.status().first_seq == Some(5_501));
    journal.close().await;
    let journal = home.open();
    DroppedRanges::subscribe(&journal);
    wait_until("the other old events to be deleted", || journal.status().first_seq == Some(6_001));
    assert_eq!(dropped_ranges.now(), [], "deletion by age was reported");
    assert_same_numbers(home.stored(), range(6_001..=6_010));
    journal.close().await;

    // Numbers continue even if all events are deleted.
    let limits = JournalLimits { events_age_max: Duration::from_secs(1), ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits).unwrap();
    DroppedRanges::subscribe(&journal);
    wait_until("all events to be deleted", || journal.status().first_seq.is_none());
    assert_eq!(journal.status().journalled_through, 6_010);
    journal.close().await;
    let journal = home.open();
    assert_eq!((journal.next_seq(), home.stored()), (6_011, vec![]));
    assert_eq!(journal.status().journalled_through, 6_010);
}

#[tokio::test]
async fn old_log_lines_and_commands_are_deleted() {
    let home = Home::new();
    let journal = home.open();
    let at = |envelope: Envelope, days: i64| match envelope.event {
        Event::ServerLogs { of, mut logs } => {
            for line in &mut logs {
                line.timestamp = days_ago(days);
            }
            Envelope { event: Event::ServerLogs { of, logs }, ..envelope }
        }
        _ => envelope,
    };
    journal.append(batch_of(vec![at(server_logs(1, "alice", 1..=2), 31), server_logs(2, "alice", 3..=3)])).await;
    journal.record_command_start("new").await.unwrap();
    journal.close().await;
    let long_ago: journal::JournalClock = Arc::new(|| days_ago(8));
    let journal = Journal::open_with_clock(home.path(), JournalLimits::default(), long_ago).unwrap();
    journal.record_command_start("old").await.unwrap();
    journal.close().await;

    let journal = home.open();
    DroppedRanges::subscribe(&journal);
    let lines = || journal::server_logs(home.path(), |_| true).unwrap().lines;
    wait_until("the old lines to be deleted", || lines().len() == 1);
    assert_eq!(lines()[0].line.message, "line 3");
    assert_eq!(journal.command("old").await, Ok(None));
    assert!(journal.command("new").await.unwrap().is_some());
}

#[tokio::test]
async fn clock_changes_delete_no_events() {
    let home = Home::new();
    // This command is deleted in the same pass as old events.
    let long_ago = Journal::open_with_clock(home.path(), JournalLimits::default(), Arc::new(|| days_ago(8))).unwrap();
    long_ago.record_command_start("old").await.unwrap();
    // Timestamps of a wrong clock, in the past and in the future; the seq determines the order.
    let events = [now(), days_ago(-3_650), days_ago(3_650), Timestamp::UNIX_EPOCH, now()];
    long_ago.append(batch_of((1..).zip(events).map(|(seq, at)| event_at(seq, at)).collect())).await;
    long_ago.close().await;
    let journal = home.open();
    DroppedRanges::subscribe(&journal);
    while journal.command("old").await != Ok(None) {
        tokio::task::yield_now().await;
    }
    journal.append(batch_of(vec![event_at(6, days_ago(1))])).await;
    journal.close().await;
    assert_eq!(home.stored(), range(1..=6));
    // A start with the clock at the Unix epoch.
    let journal =
        Journal::open_with_clock(home.path(), JournalLimits::default(), Arc::new(|| Timestamp::UNIX_EPOCH)).unwrap();
    assert_eq!(journal.next_seq(), 7);
    append_all(&journal, 7..=7).await;
    journal.close().await;
    assert_eq!(home.stored(), range(1..=7));
}

#[tokio::test]
async fn free_pages_are_returned_to_the_file_system() {
    let home = Home::new().filled_with_large(1..=30_000).await;
    let before = std::fs::metadata(home.database()).unwrap().len();
    let limits = JournalLimits { events_age_max: Duration::from_millis(1), ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits).unwrap();
    DroppedRanges::subscribe(&journal);
    wait_until("all events to be deleted", || journal.status().first_seq.is_none());
    let size = || std::fs::metadata(home.database()).unwrap().len();
    journal.close().await;
    let journal = home.open();
    DroppedRanges::subscribe(&journal);
    wait_until("the file to shrink", || journal.status().bytes < before / 2);
    journal.close().await;
    assert!(size() < before / 2, "{} of {before}", size());
}

#[tokio::test]
async fn log_lines_are_deleted_before_undelivered_events() {
    let home = Home::new();
    let limits = JournalLimits { size_max: 2 * MIB, server_logs_max: 100_000, ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits).unwrap();
    journal.expect_delivery();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    for seq in 1..=200 {
        assert_eq!(journal.append(batch_of(vec![server_logs(seq, "alice", 1..=100)])).await, SinkAnswer::Accepted);
        journal.store_delivery(seq, None).await.unwrap();
    }
    append_all(&journal, 201..=1_200).await;
    let status = assert_ok(&journal);
    assert_eq!((status.pruned_unsent, dropped_ranges.ranges(&journal).await), (0, vec![]));
    assert_same_numbers(home.stored().into_iter().filter(|seq| *seq > 200), range(201..=1_200));
    let lines = journal::server_logs(home.path(), |_| true).unwrap().lines;
    assert!((1_000..20_000).contains(&lines.len()), "{} lines are left", lines.len());
    assert_eq!(lines.last().unwrap().seq, 200, "the newest lines were deleted");
}

#[tokio::test]
async fn a_long_wal_does_not_slow_down_later_batches() {
    let home = Home::new();
    let journal = home.open();
    append_large(&journal, 1..=60_000).await;
    let wal = home.database().with_extension("db-wal").metadata().unwrap().len();
    assert!(wal > 16 * MIB, "{wal}");
    // The first of these batches may restart the WAL.
    append_all(&journal, 60_001..=60_001).await;
    let written = || home.database().metadata().unwrap().modified().unwrap();
    let before = written();
    for seq in 60_002..=60_020 {
        append_all(&journal, seq..=seq).await;
    }
    assert_eq!(written(), before, "the database file was written");
}
