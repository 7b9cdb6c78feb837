//! Full, read-only and hanging disks.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mcp_satellite::journal::{self, BatchInFlight, Journal, JournalLimits, JournalState, StoredEventQuery};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::{NumberStore, SinkAnswer};
use testkit::wait::wait_until;

use super::crash;
use super::support::*;

const MIB: usize = 1 << 20;

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn a_full_disk_is_reported_and_events_are_stored_once_later() {
    let disk = Disk::new(4 * MIB);
    let journal = open(disk.path());
    append_all(&journal, 1..=1_000).await;
    disk.fill(0);
    for _ in 0..3 {
        let reason = assert_unavailable(journal.append(batch(1_001..=10_000)).await);
        assert!(reason.contains("journal.db cannot be used: database or disk is full"), "{reason}");
        assert_eq!(assert_in_memory(&journal), reason);
    }
    assert_same_numbers(stored(disk.path()), range(1..=1_000));
    assert_eq!(journal.outbox(0, 10_000).await.unwrap().len(), 1_000, "the outbox is readable");
    journal.wait_stored(5_000).await;
    assert_eq!(journal.status().journalled_through, 1_000);

    disk.free_space();
    assert_eq!(journal.append(batch(1_001..=2_000)).await, SinkAnswer::Accepted);
    assert_ok(&journal);
    assert_same_numbers(stored(disk.path()), range(1..=2_000));
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn delivery_continues_on_a_full_disk_and_its_state_is_stored_later() {
    let disk = Disk::new(4 * MIB);
    let journal = open(disk.path());
    journal.expect_delivery();
    append_all(&journal, 1..=1_000).await;
    disk.fill(0);
    assert_unavailable(journal.append(batch(1_001..=20_000)).await);
    for after in (0..1_000).step_by(100) {
        assert_eq!(journal.outbox(after, 100).await.unwrap().len(), 100);
        let sending = Some(BatchInFlight { id: 7 + after, first: after + 1, last: after + 100, refused: Vec::new() });
        journal.store_delivery(after, sending).await.unwrap();
        journal.store_delivery(after + 100, None).await.unwrap();
    }
    assert_eq!(journal.status().backlog, 0);
    assert_in_memory(&journal);
    disk.free_space();
    append_all(&journal, 1_001..=1_001).await;
    journal.close().await;
    let state = open(disk.path()).delivery().await.unwrap();
    assert_eq!((state.cursor, state.sending), (1_000, None));
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn the_journal_opens_on_a_full_disk() {
    let disk = Disk::new(MIB);
    disk.fill(0);
    let journal = open(disk.path());
    assert_in_memory(&journal);
    assert_eq!(journal.next_seq(), 1);
    assert_unavailable(journal.append(batch(1..=5)).await);
    disk.free_space();
    assert_eq!(journal.append(batch(1..=5)).await, SinkAnswer::Accepted);
    assert_ok(&journal);
    assert_same_numbers(stored(disk.path()), range(1..=5));
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn numbers_used_while_the_disk_was_full_are_not_reused() {
    let disk = Disk::new(2 * MIB);
    let journal = open(disk.path());
    append_all(&journal, 1..=100).await;
    disk.fill(0);
    // Fewer events than one reservation.
    assert_unavailable(journal.append(batch(101..=5_000)).await);
    journal.close().await;
    disk.free_space();
    let journal = open(disk.path());
    let next = journal.next_seq();
    assert!(next > 5_000, "{next}");
    assert_eq!(DroppedRanges::subscribe(&journal).ranges(&journal).await, [(101, next - 1)]);
    append_all(&journal, next..=next).await;
    journal.close().await;
    assert_eq!(open(disk.path()).next_seq(), next + 1, "numbers were skipped after the disk recovered");
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn a_read_only_disk_is_reported_and_its_contents_are_read() {
    let disk = Disk::new(4 * MIB);
    let id = InstanceId::new("acme".into(), "alice".into(), "abc123".into());
    let journal = open(disk.path());
    journal.remember(&id, "{}".into());
    append_all(&journal, 1..=100).await;
    journal.close().await;
    disk.remount(true);
    assert_same_numbers(stored(disk.path()), range(1..=100));
    let journal = open(disk.path());
    assert!(assert_in_memory(&journal).contains("cannot be used"), "{journal:?}");
    assert_eq!((journal.next_seq(), journal.memos().len()), (101, 1));
    assert_eq!(journal.status().journalled_through, 100);
    assert_unavailable(journal.append(batch(101..=110)).await);
    journal.forget(&id);

    disk.remount(false);
    assert_eq!(journal.append(batch(101..=110)).await, SinkAnswer::Accepted);
    assert_ok(&journal);
    assert_same_numbers(stored(disk.path()), range(1..=110));
    journal.close().await;
    assert!(open(disk.path()).memos().is_empty(), "changes of memos on a read-only disk were lost");
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn a_journal_left_by_a_kill_is_readable_read_only() {
    let disk = Disk::new(4 * MIB);
    let killed = crash::killed_after(50);
    make_directory(disk.path());
    for file in fs::read_dir(journal::directory(killed.home.path())).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), journal::directory(disk.path()).join(file.file_name())).unwrap();
    }
    disk.remount(true);
    let found: Vec<u64> =
        journal::read(disk.path(), StoredEventQuery::default()).unwrap().map(|event| event.seq).collect();
    killed.assert_holds(&found);
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn recovery_of_a_disk_is_detected_without_writes() {
    let disk = Disk::new(4 * MIB);
    let journal = open(disk.path());
    disk.fill(0);
    journal.record_command_result("1", "x".repeat(2 * MIB)).await.unwrap_err();
    assert_in_memory(&journal);
    disk.free_space();
    wait_until("the state `ok`", || journal.status().state == JournalState::Ok);
}

/// A journal whose disk hangs on demand: its thread blocks when it reads the clock.
fn hanging_journal() -> (Home, Journal, Arc<AtomicBool>) {
    let home = Home::new();
    let hangs = Arc::new(AtomicBool::new(false));
    let clock: journal::JournalClock = Arc::new({
        let hangs = Arc::clone(&hangs);
        move || {
            while hangs.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            now()
        }
    });
    let journal = Journal::open_with_clock(home.path(), JournalLimits::default(), clock).unwrap();
    assert_ok(&journal);
    (home, journal, hangs)
}

#[tokio::test(start_paused = true)]
async fn close_does_not_wait_for_a_hanging_disk() {
    let (home, journal, hangs) = hanging_journal();
    append_all(&journal, 1..=10).await;
    hangs.store(true, Ordering::Release);
    drop(journal.record_command_start("1").await.unwrap_err());
    journal.close().await;
    assert_same_numbers(home.stored(), range(1..=10));
    hangs.store(false, Ordering::Release);
    wait_until("the journal to be closed", || !home.database().with_extension("db-wal").exists());
    assert_eq!(home.open().next_seq(), 11);
}

#[tokio::test(start_paused = true)]
async fn a_hanging_disk_is_reported_and_blocks_no_caller() {
    let (_home, journal, hangs) = hanging_journal();
    hangs.store(true, Ordering::Release);
    let asked = journal.record_command_start("1").await.unwrap_err().to_string();
    assert!(asked.ends_with("the disk does not answer"), "{asked}");
    assert_eq!(assert_unavailable(journal.append(batch(1..=3)).await), asked);
    assert_eq!(assert_in_memory(&journal), asked);
    hangs.store(false, Ordering::Release);
    wait_until("the state `ok`", || journal.status().state == JournalState::Ok);
    assert_ok(&journal);
}

#[tokio::test(start_paused = true)]
async fn a_hanging_disk_reserves_no_numbers_and_none_is_reused() {
    let (home, journal, hangs) = hanging_journal();
    journal.reserve(10).await.unwrap();
    append_all(&journal, 1..=10).await;
    // These numbers are reserved, but the satellite ends before their events are stored.
    journal.reserve(15).await.unwrap();
    hangs.store(true, Ordering::Release);
    drop(journal.record_command_start("1").await.unwrap_err());
    assert!(journal.reserve(300).await.unwrap_err().ends_with("the disk does not answer"));
    // A copy of the directory as the next satellite finds it after a kill: the hanging thread has written nothing.
    let next = Home::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut fs::DirBuilder::new(), 0o700)
        .create(journal::directory(next.path()))
        .unwrap();
    for file in fs::read_dir(journal::directory(home.path())).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), journal::directory(next.path()).join(file.file_name())).unwrap();
    }
    hangs.store(false, Ordering::Release);
    let journal = next.open();
    assert_eq!(journal.next_seq(), 16);
    assert_eq!(
        DroppedRanges::subscribe(&journal).ranges(&journal).await,
        [(11, 15)],
        "other numbers than the reserved ones were dropped"
    );
}

#[tokio::test]
async fn a_failed_reservation_is_reported_and_can_be_repeated() {
    let home = Home::new();
    let journal = home.open();
    let seq = journal::directory(home.path()).join("seq");
    fs::create_dir(&seq).unwrap();
    let reason = journal.reserve(5).await.unwrap_err();
    assert!(reason.contains("cannot reserve event numbers"), "{reason}");
    assert_eq!(assert_in_memory(&journal), reason);
    fs::remove_dir(&seq).unwrap();
    journal.reserve(5).await.unwrap();
    assert_ok(&journal);
    append_all(&journal, 1..=5).await;
    journal.close().await;
    assert_eq!(home.open().next_seq(), 6);
}
