//! Event numbers are never reused, and only lost events are reported as dropped.

use std::fs;

use mcp_satellite::journal::{self, Journal};

use super::crash::killed_after;
use super::support::*;

/// Changes the boot id in the file `seq`, as after a reboot.
fn reboot(home: &Home) {
    let path = journal::directory(home.path()).join("seq");
    let note = fs::read_to_string(&path).unwrap();
    let (rest, boot) = note.trim_end().rsplit_once(' ').unwrap();
    assert_eq!(boot.len(), 36, "{note}");
    fs::write(path, format!("{rest} 00000000-0000-0000-0000-000000000000\n")).unwrap();
}

fn remove_log(home: &Home) {
    let log = home.database().with_extension("db-wal");
    assert!(fs::metadata(&log).unwrap().len() > 0);
    fs::remove_file(log).unwrap();
    fs::remove_file(home.database().with_extension("db-shm")).unwrap();
}

/// Asserts that the journal reports the numbers from `from` to the next one as dropped and does not use them, and that
/// the start after that skips no more numbers.
async fn assert_numbers_skipped(home: &Home, journal: Journal, from: u64, at_least: u64) {
    let next = journal.next_seq();
    assert!(next > at_least, "{next} may have been seen: readers have seen numbers up to {at_least}");
    assert_eq!(DroppedRanges::subscribe(&journal).ranges(&journal).await, [(from, next - 1)]);
    append_all(&journal, next..=next + 5).await;
    journal.close().await;
    let after = home.open();
    assert_eq!(after.next_seq(), next + 6, "numbers were skipped twice");
}

async fn assert_nothing_lost(home: &Home) {
    let last = *home.stored().last().unwrap();
    let journal = home.open();
    assert_eq!(journal.next_seq(), last + 1);
    assert_eq!(DroppedRanges::subscribe(&journal).ranges(&journal).await, []);
    journal.close().await;
}

#[tokio::test]
async fn after_a_power_loss_numbers_that_may_have_been_seen_are_skipped() {
    let killed = killed_after(20);
    let home = &killed.home;
    reboot(home);
    let last = *home.stored().last().unwrap();
    assert_numbers_skipped(home, home.open(), last + 1, last).await;
    assert_same_numbers(home.stored().into_iter().filter(|seq| *seq <= last), range(1..=last));
}

#[tokio::test]
async fn a_wal_lost_after_a_kill_is_reported_as_dropped_events() {
    let killed = killed_after(20);
    let home = &killed.home;
    let last = *home.stored().last().unwrap();
    remove_log(home);
    let kept = home.stored().last().copied().unwrap_or(0);
    assert!(kept < last);
    assert_numbers_skipped(home, home.open(), kept + 1, last).await;
}

#[tokio::test]
async fn an_older_copy_of_the_database_does_not_reuse_numbers() {
    let home = Home::new().filled(1..=100).await;
    let backup = fs::read(home.database()).unwrap();
    let home = home.filled(101..=200).await;
    fs::write(home.database(), backup).unwrap();
    assert_numbers_skipped(&home, home.open(), 101, 200).await;
}

#[tokio::test]
async fn a_checkpoint_by_a_tool_after_a_kill_loses_nothing() {
    let killed = killed_after(20);
    let tool = killed.home.sqlite();
    assert!(tool.query_row("SELECT count(*) FROM events", [], |row| row.get::<_, u64>(0)).unwrap() > 0);
    drop(tool);
    assert!(!killed.home.database().with_extension("db-wal").exists());
    assert_nothing_lost(&killed.home).await;
}

#[tokio::test]
async fn a_reboot_after_a_clean_close_loses_nothing() {
    let home = Home::new().filled(1..=100).await;
    reboot(&home);
    assert_nothing_lost(&home).await;
}

#[tokio::test]
async fn the_previous_format_of_the_seq_file_is_read() {
    let home = Home::new().filled(1..=100).await;
    fs::write(journal::directory(home.path()).join("seq"), "00000000000000010100 stored\n").unwrap();
    assert_nothing_lost(&home).await;
    fs::write(journal::directory(home.path()).join("seq"), "00000000000000020100 stored\n").unwrap();
    assert_numbers_skipped(&home, home.open(), 101, 20_100).await;
}
