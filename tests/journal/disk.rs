//! Disks that are full or read-only.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mcp_satellite::journal::{self, BatchInFlight, Journal, JournalLimits, JournalState, StoredEventQuery};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::seam::{NumberStore, SinkAnswer};

use super::crash;
use super::support::*;

const MIB: usize = 1 << 20;

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn a_full_disk_is_told_and_nothing_is_lost_or_stored_twice() {
    let disk = Disk::new(4 * MIB);
    let journal = open(disk.path());
    append_all(&journal, 1..=1_000).await;
    disk.fill(0);
    for _ in 0..3 {
        let reason = unavailable(journal.append(batch(1_001..=10_000)).await);
        assert!(reason.contains("journal.db cannot be used: database or disk is full"), "{reason}");
        assert_eq!(in_memory(&journal), reason);
    }
    same(stored(disk.path()), range(1..=1_000));
    assert_eq!(journal.outbox(0, 10_000).await.unwrap().len(), 1_000, "and delivered");
    journal.wait_stored(5_000).await;
    assert_eq!(journal.status().journalled_through, 1_000);

    disk.relieve();
    assert_eq!(journal.append(batch(1_001..=2_000)).await, SinkAnswer::Accepted);
    is_ok(&journal);
    same(stored(disk.path()), range(1..=2_000));
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn on_a_full_disk_delivery_goes_on_and_is_not_forgotten() {
    let disk = Disk::new(4 * MIB);
    let journal = open(disk.path());
    journal.expect_delivery();
    append_all(&journal, 1..=1_000).await;
    disk.fill(0);
    unavailable(journal.append(batch(1_001..=20_000)).await);
    for after in (0..1_000).step_by(100) {
        assert_eq!(journal.outbox(after, 100).await.unwrap().len(), 100);
        let sending = Some(BatchInFlight { id: 7 + after, first: after + 1, last: after + 100, refused: Vec::new() });
        journal.store_delivery(after, sending).await.unwrap();
        journal.store_delivery(after + 100, None).await.unwrap();
    }
    assert_eq!(journal.status().backlog, 0);
    in_memory(&journal);
    disk.relieve();
    append_all(&journal, 1_001..=1_001).await;
    journal.close().await;
    let state = open(disk.path()).delivery().await.unwrap();
    assert_eq!((state.cursor, state.sending), (1_000, None));
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn a_full_disk_at_the_start_holds_up_nothing() {
    let disk = Disk::new(MIB);
    disk.fill(0);
    let journal = open(disk.path());
    in_memory(&journal);
    assert_eq!(journal.next_seq(), 1);
    unavailable(journal.append(batch(1..=5)).await);
    disk.relieve();
    assert_eq!(journal.append(batch(1..=5)).await, SinkAnswer::Accepted);
    is_ok(&journal);
    same(stored(disk.path()), range(1..=5));
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn numbers_that_were_seen_while_the_disk_was_full_are_not_used_again() {
    let disk = Disk::new(2 * MIB);
    let journal = open(disk.path());
    append_all(&journal, 1..=100).await;
    disk.fill(0);
    // No more than are reserved at once.
    unavailable(journal.append(batch(101..=5_000)).await);
    journal.close().await;
    disk.relieve();
    let journal = open(disk.path());
    let next = journal.next_seq();
    assert!(next > 5_000, "{next}");
    assert_eq!(Told::by(&journal).ranges(&journal).await, [(101, next - 1)]);
    append_all(&journal, next..=next).await;
    journal.close().await;
    assert_eq!(open(disk.path()).next_seq(), next + 1, "once it is well no number is skipped");
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn a_read_only_disk_is_told_and_what_it_holds_is_known() {
    let disk = Disk::new(4 * MIB);
    let id = InstanceId::new("acme".into(), "alice".into(), "abc123".into());
    let journal = open(disk.path());
    journal.remember(&id, "{}".into());
    append_all(&journal, 1..=100).await;
    journal.close().await;
    disk.remount(true);
    same(stored(disk.path()), range(1..=100));
    let journal = open(disk.path());
    assert!(in_memory(&journal).contains("cannot be used"), "{journal:?}");
    assert_eq!((journal.next_seq(), journal.memos().len()), (101, 1));
    assert_eq!(journal.status().journalled_through, 100);
    unavailable(journal.append(batch(101..=110)).await);
    journal.forget(&id);

    disk.remount(false);
    assert_eq!(journal.append(batch(101..=110)).await, SinkAnswer::Accepted);
    is_ok(&journal);
    same(stored(disk.path()), range(1..=110));
    journal.close().await;
    assert!(open(disk.path()).memos().is_empty(), "what was to be remembered meanwhile is not lost");
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn what_a_killed_satellite_has_left_can_be_read_on_a_read_only_disk() {
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
    killed.holds(&found);
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn a_disk_that_is_well_again_is_told_though_nobody_writes() {
    let disk = Disk::new(4 * MIB);
    let journal = open(disk.path());
    disk.fill(0);
    journal.record_command_result("1", "x".repeat(2 * MIB)).await.unwrap_err();
    in_memory(&journal);
    disk.relieve();
    wait_for("the disk to be well", || (journal.status().state == JournalState::Ok).then_some(()));
}

/// A journal whose disk hangs on demand: its time is asked for, and that is where the thread then waits.
fn hanging() -> (Home, Journal, Arc<AtomicBool>) {
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
    is_ok(&journal);
    (home, journal, hangs)
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_satellite_does_not_wait_for_a_disk_that_hangs() {
    let (home, journal, hangs) = hanging();
    append_all(&journal, 1..=10).await;
    hangs.store(true, Ordering::Release);
    drop(journal.record_command_start("1").await.unwrap_err());
    journal.close().await;
    same(home.stored(), range(1..=10));
    hangs.store(false, Ordering::Release);
    wait_for("it to be closed", || (!home.database().with_extension("db-wal").exists()).then_some(()));
    assert_eq!(home.open().next_seq(), 11);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_is_told_and_nobody_waits_for_it() {
    let (_home, journal, hangs) = hanging();
    hangs.store(true, Ordering::Release);
    let asked = journal.record_command_start("1").await.unwrap_err().to_string();
    assert!(asked.ends_with("the disk does not answer"), "{asked}");
    assert_eq!(unavailable(journal.append(batch(1..=3)).await), asked);
    assert_eq!(in_memory(&journal), asked);
    hangs.store(false, Ordering::Release);
    wait_for("the disk to be well", || (journal.status().state == JournalState::Ok).then_some(()));
    is_ok(&journal);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_reserves_no_numbers_and_no_number_is_used_twice() {
    let (home, journal, hangs) = hanging();
    journal.reserve(10).await.unwrap();
    append_all(&journal, 1..=10).await;
    // These have numbers, and the satellite ends before they are stored.
    journal.reserve(15).await.unwrap();
    hangs.store(true, Ordering::Release);
    drop(journal.record_command_start("1").await.unwrap_err());
    assert!(journal.reserve(300).await.unwrap_err().ends_with("the disk does not answer"));
    // As the next satellite finds it after a kill: what hangs has written nothing.
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
    assert_eq!(Told::by(&journal).ranges(&journal).await, [(11, 15)], "exactly those that had numbers are gone");
}

#[tokio::test]
async fn a_disk_that_takes_no_numbers_is_told_and_asked_again() {
    let home = Home::new();
    let journal = home.open();
    let seq = journal::directory(home.path()).join("seq");
    fs::create_dir(&seq).unwrap();
    let reason = journal.reserve(5).await.unwrap_err();
    assert!(reason.contains("cannot reserve event numbers"), "{reason}");
    assert_eq!(in_memory(&journal), reason);
    fs::remove_dir(&seq).unwrap();
    journal.reserve(5).await.unwrap();
    is_ok(&journal);
    append_all(&journal, 1..=5).await;
    journal.close().await;
    assert_eq!(home.open().next_seq(), 6);
}
