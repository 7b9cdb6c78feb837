//! No number is used for two events, whatever is lost; and what is not lost is not told to be.

use std::fs;

use mcp_satellite::journal::{self, Journal};

use super::crash::killed_after;
use super::support::*;

/// A satellite's note of another boot of the machine.
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

/// That numbers from `from` to the next one are told to be gone, and none of them is used; also by the start after that.
async fn skips(home: &Home, journal: Journal, from: u64, at_least: u64) {
    let next = journal.next_seq();
    assert!(next > at_least, "{next} may have been seen: up to {at_least} they were");
    assert_eq!(Told::by(&journal).ranges(&journal).await, [(from, next - 1)]);
    append_all(&journal, next..=next + 5).await;
    journal.close().await;
    let after = home.open();
    assert_eq!(after.next_seq(), next + 6, "that was once");
}

async fn loses_nothing(home: &Home) {
    let last = *home.stored().last().unwrap();
    let journal = home.open();
    assert_eq!(journal.next_seq(), last + 1);
    assert_eq!(Told::by(&journal).ranges(&journal).await, []);
    journal.close().await;
}

#[tokio::test]
async fn after_a_loss_of_power_numbers_go_on_behind_all_that_may_have_been_seen() {
    let killed = killed_after(20);
    let home = &killed.home;
    reboot(home);
    let last = *home.stored().last().unwrap();
    skips(home, home.open(), last + 1, last).await;
    same(home.stored().into_iter().filter(|seq| *seq <= last), range(1..=last));
}

#[tokio::test]
async fn a_log_that_was_lost_after_a_kill_costs_its_events_and_that_is_told() {
    let killed = killed_after(20);
    let home = &killed.home;
    let last = *home.stored().last().unwrap();
    remove_log(home);
    let kept = home.stored().last().copied().unwrap_or(0);
    assert!(kept < last);
    skips(home, home.open(), kept + 1, last).await;
}

#[tokio::test]
async fn an_older_copy_of_the_database_does_not_bring_its_numbers_back() {
    let home = Home::new().filled(1..=100).await;
    let backup = fs::read(home.database()).unwrap();
    let home = home.filled(101..=200).await;
    fs::write(home.database(), backup).unwrap();
    skips(&home, home.open(), 101, 200).await;
}

#[tokio::test]
async fn after_a_kill_it_is_no_loss_that_a_tool_took_the_log_into_the_database() {
    let killed = killed_after(20);
    let tool = killed.home.sqlite();
    assert!(tool.query_row("SELECT count(*) FROM events", [], |row| row.get::<_, u64>(0)).unwrap() > 0);
    drop(tool);
    assert!(!killed.home.database().with_extension("db-wal").exists());
    loses_nothing(&killed.home).await;
}

#[tokio::test]
async fn after_a_tidy_end_another_boot_is_no_loss() {
    let home = Home::new().filled(1..=100).await;
    reboot(&home);
    loses_nothing(&home).await;
}

#[tokio::test]
async fn a_note_in_the_form_before_is_taken_over() {
    let home = Home::new().filled(1..=100).await;
    fs::write(journal::directory(home.path()).join("seq"), "00000000000000010100 stored\n").unwrap();
    loses_nothing(&home).await;
    fs::write(journal::directory(home.path()).join("seq"), "00000000000000020100 stored\n").unwrap();
    skips(&home, home.open(), 101, 20_100).await;
}
