//! Damaged, truncated and deleted files.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use mcp_satellite::journal::{self, EventFollower, Journal, JournalLimits, StoredEventQuery};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::SinkAnswer;
use testkit::wait::wait_until;

use super::crash::killed_after;
use super::support::*;

const EVENTS: u64 = 5_000;

fn overwrite(home: &Home, at: u64, len: usize) {
    let file = OpenOptions::new().write(true).open(home.database()).unwrap();
    file.write_all_at(&vec![0xa5; len], at).unwrap();
}

fn size(home: &Home) -> u64 {
    fs::metadata(home.database()).unwrap().len()
}

/// The readable seqs and the number of skipped events.
fn readable(home: &Home) -> (Vec<u64>, u64) {
    let mut events = journal::read(home.path(), StoredEventQuery::default()).unwrap();
    let seqs = events.by_ref().map(|event| event.seq).collect();
    assert!(events.take_error().is_none());
    (seqs, events.skipped())
}

#[tokio::test]
async fn a_damaged_header_starts_a_new_journal_without_reusing_numbers() {
    let home = Home::new().filled_with_large(1..=EVENTS).await;
    overwrite(&home, 0, 100);
    assert!(journal::read(home.path(), StoredEventQuery::default()).is_err());
    let journal = home.open();
    let status = assert_ok(&journal);
    let aside = status.damaged.unwrap();
    assert!(aside.file_name().unwrap().to_str().unwrap().starts_with("journal.db.damaged-"), "{aside:?}");
    assert!(fs::metadata(&aside).unwrap().len() > 100_000, "the damaged file was not kept");
    let next = journal.next_seq();
    assert!((EVENTS + 1..=EVENTS + 10_001).contains(&next), "{next}");
    assert_eq!(DroppedRanges::subscribe(&journal).ranges(&journal).await, [(1, next - 1)]);
    append_all(&journal, next..=next + 9).await;
    assert_same_numbers(home.stored(), range(next..=next + 9));
    journal.close().await;
    let journal = home.open();
    assert_eq!((journal.next_seq(), journal.status().damaged), (next + 10, Some(aside.clone())));
    journal.close().await;
    overwrite(&home, 0, 100);
    let newer = assert_ok(&home.open()).damaged.unwrap();
    assert!(newer.exists() && newer != aside && !aside.exists(), "only the latest damaged file is kept: {newer:?}");
}

#[tokio::test]
async fn a_damaged_page_loses_only_its_events_and_readers_skip_it() {
    let home = Home::new();
    let id = InstanceId::new("acme".into(), "alice".into(), "abc123".into());
    let journal = home.open();
    journal.remember(&id, "{}".into());
    append_large(&journal, 1..=EVENTS).await;
    journal.store_delivery(10, None).await.unwrap();
    journal.close().await;
    // Damages pages in the middle of the events.
    overwrite(&home, size(&home) / 2 / 4096 * 4096, 3 * 4096);
    let (found, skipped) = readable(&home);
    assert!(skipped > 0 && found.len() as u64 + skipped == EVENTS, "{} {skipped}", found.len());
    assert_eq!((found.first(), found.last()), (Some(&1), Some(&EVENTS)));

    // New events use other pages. The damage is detected by the maintenance, which runs when no job waits, or by the
    // outbox.
    let journal = home.open();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    append_all(&journal, EVENTS + 1..=EVENTS + 10).await;
    assert_ok(&journal);

    let mut after = 0;
    let mut delivered = BTreeSet::new();
    loop {
        let events = journal.outbox(after, 1_000).await.unwrap();
        let Some(last) = events.last() else { break };
        after = last.seq;
        delivered.extend(events.iter().map(|event| event.seq));
    }
    let expected: BTreeSet<u64> = found.iter().copied().chain(EVENTS + 1..=EVENTS + 10).collect();
    assert_same_numbers(delivered.clone(), expected.clone());
    let status = assert_ok(&journal);
    assert!(status.damaged.is_some());
    let missing: BTreeSet<u64> = (1..=EVENTS + 10).filter(|seq| !expected.contains(seq)).collect();
    assert_same_numbers(dropped_ranges.numbers(&journal).await, missing);
    let (found, skipped) = readable(&home);
    assert_eq!(skipped, 0);
    assert_same_numbers(found, expected);
    let state = journal.delivery().await.unwrap();
    assert_eq!(state.cursor, 10, "the cursor was not salvaged");
    append_all(&journal, EVENTS + 11..=EVENTS + 20).await;
    journal.close().await;
    assert_eq!(home.open().memos().len(), 1);
}

#[tokio::test]
async fn readers_of_lines_skip_damage_and_pruning_replaces_the_damaged_journal() {
    let home = Home::new();
    let journal = home.open();
    append_large(&journal, 1..=EVENTS).await;
    assert_eq!(journal.append(batch_of(vec![server_logs(EVENTS + 1, "alice", 1..=3)])).await, SinkAnswer::Accepted);
    journal.close().await;
    overwrite(&home, size(&home) / 2 / 4096 * 4096, 3 * 4096);
    let logs = journal::server_logs(home.path(), |_| true).unwrap();
    assert_eq!(logs.lines.len(), 3);
    assert!(logs.skipped > 0);

    // Every event is older than permitted. The copy of the lines finds the damage.
    let limits = JournalLimits { events_age_max: Duration::from_millis(1), ..JournalLimits::default() };
    let journal = Journal::open(home.path(), limits).unwrap();
    DroppedRanges::subscribe(&journal);
    wait_until("the events to be removed", || journal.status().first_seq.is_none());
    assert!(assert_ok(&journal).damaged.is_some());
    assert_eq!(journal::server_logs(home.path(), |_| true).unwrap().lines.len(), 3);
}

#[tokio::test]
async fn a_truncated_file_keeps_its_readable_events() {
    for keep in [1, 2, 3] {
        let home = Home::new().filled_with_large(1..=EVENTS).await;
        let file = OpenOptions::new().write(true).open(home.database()).unwrap();
        file.set_len(size(&home) * keep / 4 + 17).unwrap();
        drop(file);
        let journal = home.open();
        let dropped_ranges = DroppedRanges::subscribe(&journal);
        let next = journal.next_seq();
        assert!(next > EVENTS);
        append_all(&journal, next..=next + 5).await;
        // Two reads of the outbox detect and repair all damage.
        journal.outbox(0, 100_000).await.unwrap();
        journal.outbox(0, 100_000).await.unwrap();
        assert_ok(&journal);
        let dropped = dropped_ranges.numbers(&journal).await;
        let expected: Vec<u64> = (1..=next + 5).filter(|seq| !dropped.contains(seq)).collect();
        let (found, skipped) = readable(&home);
        assert_eq!(skipped, 0);
        assert_same_numbers(found, expected.clone());
        assert!(expected.len() as u64 > EVENTS * keep / 8, "{keep}: only {} events are left", expected.len());
    }
}

#[tokio::test]
async fn an_empty_file_or_a_directory_as_database_is_handled() {
    let home = Home::new().filled(1..=10).await;
    fs::write(home.database(), "").unwrap();
    let journal = home.open();
    let next = journal.next_seq();
    assert!(next > 10, "{next}");
    append_all(&journal, next..=next).await;
    assert_ok(&journal);

    let home = Home::new();
    home.make_directory();
    fs::create_dir(home.database()).unwrap();
    let journal = home.open();
    assert!(assert_in_memory(&journal).contains("journal.db cannot be used"), "{journal:?}");
    assert_unavailable(journal.append(batch(1..=5)).await);
    fs::remove_dir(home.database()).unwrap();
    assert_eq!(journal.append(batch(1..=5)).await, SinkAnswer::Accepted);
    assert_ok(&journal);
    assert_same_numbers(home.stored(), range(1..=5));
}

#[tokio::test]
async fn a_journal_deleted_while_open_starts_anew_and_reports_the_loss() {
    let home = Home::new();
    let journal = home.open();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    let mut follow = EventFollower::new(home.path(), StoredEventQuery::default());
    append_all(&journal, 1..=10).await;
    assert_eq!(follow.poll().unwrap().unwrap().seq, 1);

    fs::remove_dir_all(journal::directory(home.path())).unwrap();
    append_all(&journal, 11..=20).await;
    assert_same_numbers(home.stored(), range(11..=20));
    assert_eq!(dropped_ranges.ranges(&journal).await, [(1, 10)]);
    assert_ok(&journal);
    let rest: Vec<_> = std::iter::from_fn(|| follow.poll().unwrap()).map(|event| event.seq).collect();
    assert_eq!(rest, range(2..=20), "the follower must return its read-ahead and the new events");

    // Database and WAL are renamed by hand.
    for file in ["journal.db", "journal.db-wal", "journal.db-shm"] {
        let file = journal::directory(home.path()).join(file);
        fs::rename(&file, file.with_extension("old")).unwrap();
    }
    append_all(&journal, 21..=30).await;
    assert_same_numbers(home.stored(), range(21..=30));
    journal.close().await;
    assert_eq!(home.open().next_seq(), 31);
}

#[tokio::test]
async fn a_journal_deleted_while_closed_reuses_no_number() {
    let home = Home::new().filled(1..=10).await;
    fs::remove_file(home.database()).unwrap();
    let journal = home.open();
    let next = journal.next_seq();
    assert!(next > 10);
    assert_eq!(DroppedRanges::subscribe(&journal).ranges(&journal).await, [(1, next - 1)]);
}

#[tokio::test]
async fn a_wal_deleted_while_open_loses_nothing() {
    let home = Home::new();
    let journal = home.open();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    append_all(&journal, 1..=10).await;
    // With a second open connection, closing does not checkpoint the WAL.
    let other = home.sqlite();
    assert_eq!(count_events(&other), 10);
    fs::remove_file(home.database().with_extension("db-wal")).unwrap();
    append_all(&journal, 11..=20).await;
    assert_same_numbers(home.stored(), range(1..=20));
    assert_eq!(dropped_ranges.ranges(&journal).await, []);
    assert_ok(&journal);
}

#[tokio::test]
async fn events_lost_at_the_end_of_a_damaged_file_are_reported() {
    let home = Home::new().filled_with_large(1..=EVENTS).await;
    let noted = format!("INSERT OR REPLACE INTO meta (key, value) VALUES ('last', '{EVENTS}'), ('cursor', '10')");
    home.sqlite().execute(&noted, []).unwrap();
    fs::remove_file(journal::directory(home.path()).join("seq")).unwrap();
    let file = OpenOptions::new().write(true).open(home.database()).unwrap();
    file.set_len(size(&home) / 2 / 4096 * 4096).unwrap();
    drop(file);
    let journal = home.open();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    // Two reads of the outbox detect and repair all damage.
    journal.outbox(0, 100_000).await.unwrap();
    journal.outbox(0, 100_000).await.unwrap();
    assert!(assert_ok(&journal).damaged.is_some());
    let (dropped, found) = (dropped_ranges.numbers(&journal).await, home.stored());
    assert_eq!(journal.next_seq(), EVENTS + 1);
    assert_same_numbers((1..=EVENTS).filter(|seq| !dropped.contains(seq)), found);
}

#[tokio::test]
async fn events_that_are_temporarily_unreadable_are_not_reported_as_dropped() {
    let home = Home::new().filled(1..=10).await;
    home.sqlite().pragma_update(None, "user_version", 99).unwrap();
    let journal = home.open();
    assert_in_memory(&journal);
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    assert_eq!(journal.next_seq(), 11, "after a clean close no number is skipped");
    assert_unavailable(journal.append(batch(11..=11)).await);
    home.sqlite().pragma_update(None, "user_version", VERSION).unwrap();
    append_all(&journal, 11..=11).await;
    assert_eq!(dropped_ranges.ranges(&journal).await, []);
    assert_same_numbers(home.stored(), range(1..=11));
}

#[tokio::test]
async fn after_a_kill_only_reserved_numbers_of_an_unreadable_journal_are_dropped() {
    let killed = killed_after(5);
    let home = &killed.home;
    let last = *home.stored().last().unwrap();
    home.sqlite().pragma_update(None, "user_version", 99).unwrap();
    let journal = home.open();
    assert_in_memory(&journal);
    let (dropped_ranges, next) = (DroppedRanges::subscribe(&journal), journal.next_seq());
    assert!(next > last + 1, "{next}");
    assert_unavailable(journal.append(batch(next..=next)).await);
    assert_eq!(dropped_ranges.ranges(&journal).await, []);
    home.sqlite().pragma_update(None, "user_version", VERSION).unwrap();
    append_all(&journal, next..=next).await;
    assert_eq!(dropped_ranges.ranges(&journal).await, [(last + 1, next - 1)], "reserved numbers may have been seen");
    assert_same_numbers(home.stored(), (1..=last).chain([next]));
}
