//! What goes: by age, by number, by size; and clocks that jump.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use mcp_satellite::journal::{self, BatchInFlight, Journal, JournalLimits};
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::seam::SinkAnswer;

use super::support::*;

const MIB: u64 = 1 << 20;
const DAY: i64 = 24 * 3600;

fn small(home: &Home) -> Journal {
    Journal::open(home.path(), JournalLimits { size_max: 2 * MIB, ..JournalLimits::default() }).unwrap()
}

fn days_ago(days: i64) -> Timestamp {
    now() - SignedDuration::from_secs(days * DAY)
}

/// Appends from `from` on until the oldest have begun to go; the last one.
async fn overfill(journal: &Journal, from: u64) -> u64 {
    let first = journal.status().first_seq.unwrap_or(from);
    let mut last = from - 1;
    while journal.status().first_seq.unwrap_or(from) == first {
        append_all(journal, last + 1..=last + 500).await;
        last += 500;
        assert!(last < 100_000, "nothing goes: {:?}", journal.status());
    }
    last
}

#[tokio::test]
async fn over_the_size_the_oldest_go_and_the_file_grows_no_more() {
    let home = Home::new();
    let journal = small(&home);
    let told = Told::by(&journal);
    let full = overfill(&journal, 1).await;
    append_all(&journal, full + 1..=4 * full).await;
    let status = is_ok(&journal);
    assert_eq!((status.last_seq, status.journalled_through), (Some(4 * full), 4 * full));
    assert!(std::fs::metadata(home.database()).unwrap().len() <= 2 * MIB + MIB / 2, "{status:?}");
    let stored = home.stored();
    same(stored.clone(), status.first_seq.unwrap()..=4 * full);
    assert!(stored.len() as u64 > full / 2, "no more than need be: {} of {full}", stored.len());
    assert_eq!(told.ranges(&journal).await, [], "nobody waited for them");
    assert_eq!(status.pruned_unsent, 0);
    journal.close().await;
    assert_eq!(small(&home).next_seq(), 4 * full + 1);
}

#[tokio::test]
async fn what_is_delivered_goes_before_what_is_not_and_only_the_latter_is_told() {
    let home = Home::new();
    let journal = small(&home);
    journal.expect_delivery();
    let told = Told::by(&journal);
    append_all(&journal, 1..=1_000).await;
    journal.outbox(0, 1_000).await.unwrap();
    journal.store_delivery(1_000, None).await.unwrap();
    // What delivery has in its hands.
    let last = overfill(&journal, 1_001).await;
    assert_eq!(told.ranges(&journal).await, [], "all that went was delivered");
    let handed = journal.outbox(1_000, 100).await.unwrap();
    let sending = BatchInFlight { id: 7, first: 1_001, last: 1_100, refused: Vec::new() };
    journal.store_delivery(1_000, Some(sending)).await.unwrap();

    append_all(&journal, last + 1..=3 * last).await;
    // It is told when there is room again.
    wait_for("room", || (!told.now().is_empty()).then_some(()));
    let status = is_ok(&journal);
    let gone = told.numbers(&journal).await;
    // What is gone was told, and nothing else.
    same(home.stored(), range(1_001..=3 * last).into_iter().filter(|seq| !gone.contains(seq)));
    assert_eq!(gone.first(), Some(&1_101), "what is on its way stays");
    assert_eq!(status.pruned_unsent, gone.len() as u64);
    assert_eq!(handed.len(), 100);
    assert_eq!(status.backlog, 3 * last - 1_000);
}

#[tokio::test]
async fn what_is_gone_is_told_again_until_an_event_says_so() {
    let home = Home::new();
    let journal = small(&home);
    journal.expect_delivery();
    let mut last = overfill(&journal, 1).await;
    // Nobody listens yet.
    journal.close().await;
    let journal = small(&home);
    let told = Told::by(&journal);
    let first = told.ranges(&journal).await;
    assert_eq!((first.len(), first[0].0), (1, 1));
    journal.close().await;

    let journal = small(&home);
    journal.expect_delivery();
    let told = Told::by(&journal);
    assert_eq!(told.ranges(&journal).await, first, "nothing was stored that says so");
    let (from_seq, to_seq) = first[0];
    last += 1;
    let dropped = Envelope { event: Event::EventsDropped { from_seq, to_seq }, ..event_at(last, now()) };
    assert_eq!(journal.append(batch_of(vec![dropped])).await, SinkAnswer::Accepted);
    journal.close().await;
    let journal = small(&home);
    let told = Told::by(&journal);
    assert_eq!(told.ranges(&journal).await, []);
}

#[tokio::test]
async fn what_is_old_goes_but_not_before_it_is_delivered() {
    let home = Home::new();
    let journal = home.open();
    journal.expect_delivery();
    let old = |seqs: std::ops::RangeInclusive<u64>| seqs.map(|seq| event_at(seq, days_ago(31)));
    journal
        .append(batch_of(old(1..=6_000).chain((6_001..=6_010).map(|seq| event_at(seq, days_ago(29)))).collect()))
        .await;
    journal.store_delivery(5_500, None).await.unwrap();
    journal.close().await;

    let journal = home.open();
    journal.expect_delivery();
    let told = Told::by(&journal);
    wait_for("the delivered ones to go", || (journal.status().first_seq == Some(5_501)).then_some(()));
    journal.close().await;
    let journal = home.open();
    Told::by(&journal);
    wait_for("the rest to go", || (journal.status().first_seq == Some(6_001)).then_some(()));
    assert_eq!(told.now(), [], "age is nothing to be told of");
    same(home.stored(), range(6_001..=6_010));
    journal.close().await;

    // Also where all are gone numbers go on.
    let limits = JournalLimits { events_age_max: Duration::from_secs(1), ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits).unwrap();
    Told::by(&journal);
    wait_for("all to go", || journal.status().first_seq.is_none().then_some(()));
    assert_eq!(journal.status().journalled_through, 6_010);
    journal.close().await;
    let journal = home.open();
    assert_eq!((journal.next_seq(), home.stored()), (6_011, vec![]));
    assert_eq!(journal.status().journalled_through, 6_010);
}

#[tokio::test]
async fn old_lines_and_commands_go_by_their_age() {
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
    Told::by(&journal);
    let lines = || journal::server_logs(home.path(), |_| true).unwrap().lines;
    wait_for("the old lines to go", || (lines().len() == 1).then_some(()));
    assert_eq!(lines()[0].line.message, "line 3");
    assert_eq!(journal.command("old").await, Ok(None));
    assert!(journal.command("new").await.unwrap().is_some());
}

#[tokio::test]
async fn a_clock_that_went_back_or_forth_loses_nothing() {
    let home = Home::new();
    // What is old is gone when this is.
    let long_ago = Journal::open_with_clock(home.path(), JournalLimits::default(), Arc::new(|| days_ago(8))).unwrap();
    long_ago.record_command_start("old").await.unwrap();
    // Written while the clock was wrong, both ways; order is that of the numbers.
    let events = [now(), days_ago(-3_650), days_ago(3_650), Timestamp::UNIX_EPOCH, now()];
    long_ago.append(batch_of((1..).zip(events).map(|(seq, at)| event_at(seq, at)).collect())).await;
    long_ago.close().await;
    let journal = home.open();
    Told::by(&journal);
    while journal.command("old").await != Ok(None) {
        tokio::task::yield_now().await;
    }
    journal.append(batch_of(vec![event_at(6, days_ago(1))])).await;
    journal.close().await;
    assert_eq!(home.stored(), range(1..=6));
    // Started while the clock stood at its beginning.
    let journal =
        Journal::open_with_clock(home.path(), JournalLimits::default(), Arc::new(|| Timestamp::UNIX_EPOCH)).unwrap();
    assert_eq!(journal.next_seq(), 7);
    append_all(&journal, 7..=7).await;
    journal.close().await;
    assert_eq!(home.stored(), range(1..=7));
}

#[tokio::test]
async fn free_pages_are_given_back_to_the_file_system() {
    let home = Home::new().filled(1..=30_000).await;
    let before = std::fs::metadata(home.database()).unwrap().len();
    let limits = JournalLimits { events_age_max: Duration::from_millis(1), ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits).unwrap();
    Told::by(&journal);
    wait_for("all to go", || journal.status().first_seq.is_none().then_some(()));
    let size = || std::fs::metadata(home.database()).unwrap().len();
    journal.close().await;
    let journal = home.open();
    Told::by(&journal);
    wait_for("the file to become small", || (journal.status().bytes < before / 2).then_some(()));
    journal.close().await;
    assert!(size() < before / 2, "{} of {before}", size());
}

#[tokio::test]
async fn lines_that_take_all_the_room_go_and_not_the_events_that_are_to_be_delivered() {
    let home = Home::new();
    let limits = JournalLimits { size_max: 2 * MIB, server_logs_max: 100_000, ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits).unwrap();
    journal.expect_delivery();
    let told = Told::by(&journal);
    for seq in 1..=200 {
        assert_eq!(journal.append(batch_of(vec![server_logs(seq, "alice", 1..=100)])).await, SinkAnswer::Accepted);
        journal.store_delivery(seq, None).await.unwrap();
    }
    append_all(&journal, 201..=1_200).await;
    let status = is_ok(&journal);
    assert_eq!((status.pruned_unsent, told.ranges(&journal).await), (0, vec![]));
    same(home.stored().into_iter().filter(|seq| *seq > 200), range(201..=1_200));
    let lines = journal::server_logs(home.path(), |_| true).unwrap().lines;
    assert!((1_000..20_000).contains(&lines.len()), "{} lines are left", lines.len());
    assert_eq!(lines.last().unwrap().seq, 200, "the oldest go");
}

#[tokio::test]
async fn a_log_that_was_long_once_does_not_make_every_batch_slow() {
    let home = Home::new();
    let journal = home.open();
    append_all(&journal, 1..=60_000).await;
    let wal = home.database().with_extension("db-wal").metadata().unwrap().len();
    assert!(wal > 16 * MIB, "{wal}");
    // The first of these may be the one that begins the log anew.
    append_all(&journal, 60_001..=60_001).await;
    let written = || home.database().metadata().unwrap().modified().unwrap();
    let before = written();
    for seq in 60_002..=60_020 {
        append_all(&journal, seq..=seq).await;
    }
    assert_eq!(written(), before, "only the log is written");
}
