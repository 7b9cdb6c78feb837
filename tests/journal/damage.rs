//! What somebody, or a disk, does to the files.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use mcp_satellite::journal::{self, EventFollower, StoredEventQuery};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::SinkAnswer;

use super::crash::killed_after;
use super::support::*;

const EVENTS: u64 = 5_000;

fn scribble(home: &Home, at: u64, len: usize) {
    let file = OpenOptions::new().write(true).open(home.database()).unwrap();
    file.write_all_at(&vec![0xa5; len], at).unwrap();
}

fn size(home: &Home) -> u64 {
    fs::metadata(home.database()).unwrap().len()
}

/// What a reader finds, and how many it says are missing.
fn readable(home: &Home) -> (Vec<u64>, u64) {
    let mut events = journal::read(home.path(), StoredEventQuery::default()).unwrap();
    let seqs = events.by_ref().map(|event| event.seq).collect();
    assert!(events.take_error().is_none());
    (seqs, events.skipped())
}

#[tokio::test]
async fn with_a_damaged_header_another_journal_is_begun_and_no_number_is_used_again() {
    let home = Home::new().filled(1..=EVENTS).await;
    scribble(&home, 0, 100);
    assert!(journal::read(home.path(), StoredEventQuery::default()).is_err());
    let journal = home.open();
    let status = is_ok(&journal);
    let aside = status.damaged.unwrap();
    assert!(aside.file_name().unwrap().to_str().unwrap().starts_with("journal.db.damaged-"), "{aside:?}");
    assert!(fs::metadata(&aside).unwrap().len() > 100_000, "it is kept for a person to look at");
    let next = journal.next_seq();
    assert!((EVENTS + 1..=EVENTS + 10_001).contains(&next), "{next}");
    assert_eq!(Told::by(&journal).ranges(&journal).await, [(1, next - 1)]);
    append_all(&journal, next..=next + 9).await;
    same(home.stored(), range(next..=next + 9));
    journal.close().await;
    let journal = home.open();
    assert_eq!((journal.next_seq(), journal.status().damaged), (next + 10, Some(aside.clone())));
    journal.close().await;
    scribble(&home, 0, 100);
    let newer = is_ok(&home.open()).damaged.unwrap();
    assert!(newer.exists() && newer != aside && !aside.exists(), "the last one is kept: {newer:?}");
}

#[tokio::test]
async fn a_damaged_page_costs_what_was_on_it_and_readers_pass_over_it() {
    let home = Home::new();
    let id = InstanceId::new("acme".into(), "alice".into(), "abc123".into());
    let journal = home.open();
    journal.remember(&id, "{}".into());
    append_all(&journal, 1..=EVENTS).await;
    journal.store_delivery(10, None).await.unwrap();
    journal.close().await;
    // In the middle of the events.
    scribble(&home, size(&home) / 2 / 4096 * 4096, 3 * 4096);
    let (found, skipped) = readable(&home);
    assert!(skipped > 0 && found.len() as u64 + skipped == EVENTS, "{} {skipped}", found.len());
    assert_eq!((found.first(), found.last()), (Some(&1), Some(&EVENTS)));

    // Nobody has noticed yet: what is new goes to other pages.
    let journal = home.open();
    let told = Told::by(&journal);
    append_all(&journal, EVENTS + 1..=EVENTS + 10).await;
    assert_eq!(is_ok(&journal).damaged, None);

    let mut after = 0;
    let mut delivered = BTreeSet::new();
    loop {
        let events = journal.outbox(after, 1_000).await.unwrap();
        let Some(last) = events.last() else { break };
        after = last.seq;
        delivered.extend(events.iter().map(|event| event.seq));
    }
    let expected: BTreeSet<u64> = found.iter().copied().chain(EVENTS + 1..=EVENTS + 10).collect();
    same(delivered.clone(), expected.clone());
    let status = is_ok(&journal);
    assert!(status.damaged.is_some());
    let missing: BTreeSet<u64> = (1..=EVENTS + 10).filter(|seq| !expected.contains(seq)).collect();
    same(told.numbers(&journal).await, missing);
    let (found, skipped) = readable(&home);
    assert_eq!(skipped, 0);
    same(found, expected);
    let state = journal.delivery().await.unwrap();
    assert_eq!(state.cursor, 10, "what else was known is taken over");
    append_all(&journal, EVENTS + 11..=EVENTS + 20).await;
    journal.close().await;
    assert_eq!(home.open().memos().len(), 1);
}

#[tokio::test]
async fn of_a_truncated_file_the_rest_is_kept() {
    for keep in [1, 2, 3] {
        let home = Home::new().filled(1..=EVENTS).await;
        let file = OpenOptions::new().write(true).open(home.database()).unwrap();
        file.set_len(size(&home) * keep / 4 + 17).unwrap();
        drop(file);
        let journal = home.open();
        let told = Told::by(&journal);
        let next = journal.next_seq();
        assert!(next > EVENTS);
        append_all(&journal, next..=next + 5).await;
        // Whatever is met is mended by now.
        journal.outbox(0, 100_000).await.unwrap();
        journal.outbox(0, 100_000).await.unwrap();
        is_ok(&journal);
        let gone = told.numbers(&journal).await;
        let expected: Vec<u64> = (1..=next + 5).filter(|seq| !gone.contains(seq)).collect();
        let (found, skipped) = readable(&home);
        assert_eq!(skipped, 0);
        same(found, expected.clone());
        assert!(expected.len() as u64 > EVENTS * keep / 8, "{keep}: only {} are left", expected.len());
    }
}

#[tokio::test]
async fn an_empty_file_and_a_directory_in_its_place_are_dealt_with() {
    let home = Home::new().filled(1..=10).await;
    fs::write(home.database(), "").unwrap();
    let journal = home.open();
    let next = journal.next_seq();
    assert!(next > 10, "{next}");
    append_all(&journal, next..=next).await;
    is_ok(&journal);

    let home = Home::new();
    home.make_directory();
    fs::create_dir(home.database()).unwrap();
    let journal = home.open();
    assert!(in_memory(&journal).contains("journal.db cannot be used"), "{journal:?}");
    unavailable(journal.append(batch(1..=5)).await);
    fs::remove_dir(home.database()).unwrap();
    assert_eq!(journal.append(batch(1..=5)).await, SinkAnswer::Accepted);
    is_ok(&journal);
    same(home.stored(), range(1..=5));
}

#[tokio::test]
async fn a_journal_that_is_deleted_while_it_is_used_is_begun_anew_and_that_is_told() {
    let home = Home::new();
    let journal = home.open();
    let told = Told::by(&journal);
    let mut follow = EventFollower::new(home.path(), StoredEventQuery::default());
    append_all(&journal, 1..=10).await;
    assert_eq!(follow.poll().unwrap().unwrap().seq, 1);

    fs::remove_dir_all(journal::directory(home.path())).unwrap();
    append_all(&journal, 11..=20).await;
    same(home.stored(), range(11..=20));
    assert_eq!(told.ranges(&journal).await, [(1, 10)]);
    is_ok(&journal);
    let rest: Vec<_> = std::iter::from_fn(|| follow.poll().unwrap()).map(|event| event.seq).collect();
    assert_eq!(rest, range(2..=20), "what it had read, and what came");

    // Put aside by hand, the log with it.
    for file in ["journal.db", "journal.db-wal", "journal.db-shm"] {
        let file = journal::directory(home.path()).join(file);
        fs::rename(&file, file.with_extension("old")).unwrap();
    }
    append_all(&journal, 21..=30).await;
    same(home.stored(), range(21..=30));
    journal.close().await;
    assert_eq!(home.open().next_seq(), 31);
}

#[tokio::test]
async fn a_journal_that_is_deleted_while_nobody_uses_it_costs_no_number() {
    let home = Home::new().filled(1..=10).await;
    fs::remove_file(home.database()).unwrap();
    let journal = home.open();
    let next = journal.next_seq();
    assert!(next > 10);
    assert_eq!(Told::by(&journal).ranges(&journal).await, [(1, next - 1)]);
}

#[tokio::test]
async fn a_log_that_is_deleted_while_it_is_used_costs_nothing() {
    let home = Home::new();
    let journal = home.open();
    let told = Told::by(&journal);
    append_all(&journal, 1..=10).await;
    // While somebody else has it open, closing it does not bring what is in its log into the database.
    let other = home.sqlite();
    assert_eq!(other.query_row("SELECT count(*) FROM events", [], |row| row.get(0)), Ok(10));
    fs::remove_file(home.database().with_extension("db-wal")).unwrap();
    append_all(&journal, 11..=20).await;
    same(home.stored(), range(1..=20));
    assert_eq!(told.ranges(&journal).await, []);
    is_ok(&journal);
}

#[tokio::test]
async fn what_a_damaged_file_has_lost_at_its_end_is_told() {
    let home = Home::new().filled(1..=EVENTS).await;
    let noted = format!("INSERT OR REPLACE INTO meta (key, value) VALUES ('last', '{EVENTS}'), ('cursor', '10')");
    home.sqlite().execute(&noted, []).unwrap();
    fs::remove_file(journal::directory(home.path()).join("seq")).unwrap();
    let file = OpenOptions::new().write(true).open(home.database()).unwrap();
    file.set_len(size(&home) / 2 / 4096 * 4096).unwrap();
    drop(file);
    let journal = home.open();
    let told = Told::by(&journal);
    // Whatever is met is mended by now.
    journal.outbox(0, 100_000).await.unwrap();
    journal.outbox(0, 100_000).await.unwrap();
    assert!(is_ok(&journal).damaged.is_some());
    let (gone, found) = (told.numbers(&journal).await, home.stored());
    assert_eq!(journal.next_seq(), EVENTS + 1);
    same((1..=EVENTS).filter(|seq| !gone.contains(seq)), found);
}

#[tokio::test]
async fn what_cannot_be_read_for_now_is_not_told_to_be_gone() {
    let home = Home::new().filled(1..=10).await;
    home.sqlite().pragma_update(None, "user_version", 99).unwrap();
    let journal = home.open();
    in_memory(&journal);
    let told = Told::by(&journal);
    assert_eq!(journal.next_seq(), 11, "it ended tidily");
    unavailable(journal.append(batch(11..=11)).await);
    home.sqlite().pragma_update(None, "user_version", 1).unwrap();
    append_all(&journal, 11..=11).await;
    assert_eq!(told.ranges(&journal).await, []);
    same(home.stored(), range(1..=11));
}

#[tokio::test]
async fn of_what_cannot_be_read_after_a_kill_only_what_may_have_been_seen_beyond_is_told_to_be_gone() {
    let killed = killed_after(5);
    let home = &killed.home;
    let last = *home.stored().last().unwrap();
    home.sqlite().pragma_update(None, "user_version", 99).unwrap();
    let journal = home.open();
    in_memory(&journal);
    let (told, next) = (Told::by(&journal), journal.next_seq());
    assert!(next > last + 1, "{next}");
    unavailable(journal.append(batch(next..=next)).await);
    assert_eq!(told.ranges(&journal).await, []);
    home.sqlite().pragma_update(None, "user_version", 1).unwrap();
    append_all(&journal, next..=next).await;
    assert_eq!(told.ranges(&journal).await, [(last + 1, next - 1)], "nobody knows whether they were seen");
    same(home.stored(), (1..=last).chain([next]));
}
