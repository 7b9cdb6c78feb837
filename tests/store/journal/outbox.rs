//! The outbox and the state of delivery.

use std::sync::Arc;

use mcp_satellite::journal::{BatchInFlight, DeliveryState, Journal, JournalSink};
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer};
use testkit::sink::RecordingSink;
use testkit::wait::wait_until;

use super::support::*;

fn seqs(events: &[Envelope]) -> Vec<u64> {
    events.iter().map(|event| event.seq).collect()
}

#[tokio::test]
async fn the_outbox_continues_at_the_cursor_after_a_restart() {
    let home = Home::new();
    let journal = home.open();
    journal.expect_delivery();
    let begun = journal.delivery().await.unwrap();
    assert_eq!((begun.cursor, begun.sending), (0, None));
    append_all(&journal, 1..=250).await;
    assert_eq!(assert_ok(&journal).backlog, 250);
    let first = journal.outbox(0, 100).await.unwrap();
    assert_same_numbers(seqs(&first), range(1..=100));
    assert_eq!(first[0], event_at(1, first[0].timestamp));
    let sending = Some(BatchInFlight { id: 77, first: 1, last: 100, refused: vec![50] });
    journal.store_delivery(0, sending.clone()).await.unwrap();
    journal.close().await;

    let journal = home.open();
    journal.expect_delivery();
    let state = journal.delivery().await.unwrap();
    assert_eq!(state, DeliveryState { cursor: 0, sending });
    journal.store_delivery(100, None).await.unwrap();
    assert_eq!(assert_ok(&journal).backlog, 150);
    assert_eq!(seqs(&journal.outbox(100, 1_000).await.unwrap()), range(101..=250));
    journal.store_delivery(90, None).await.unwrap();
    assert_eq!(journal.delivery().await.unwrap().cursor, 100, "the cursor moved back");
}

#[tokio::test]
async fn the_first_delivery_starts_with_later_events() {
    let home = Home::new();
    let journal = home.open();
    journal.expect_no_delivery();
    append_all(&journal, 1..=10).await;
    journal.close().await;
    let journal = home.open();
    journal.expect_delivery();
    assert_eq!(journal.delivery().await, Ok(DeliveryState { cursor: 10, sending: None }));
    append_all(&journal, 11..=15).await;
    journal.close().await;
    assert_eq!(home.open().delivery().await.unwrap().cursor, 10, "the cursor of the first delivery was not stored");
}

#[tokio::test]
async fn the_outbox_skips_an_unreadable_event() {
    let home = Home::new().filled(1..=5).await;
    home.sqlite().execute("UPDATE events SET body = '{}' WHERE seq = 3", []).unwrap();
    assert_eq!(seqs(&home.open().outbox(0, 10).await.unwrap()), [1, 2, 4, 5]);
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn on_a_full_disk_events_are_delivered_from_memory() {
    let disk = Disk::new(4 << 20);
    let journal: Journal = open(disk.path());
    journal.expect_delivery();
    let recording = RecordingSink::new();
    let sink = JournalSink::new(journal.clone(), Some(Arc::new(recording.clone())));
    assert!(sink.is_prompt());
    assert_eq!(sink.send(batch(1..=3)).await, SinkAnswer::Accepted);
    let sent = || seqs(&recording.events());
    assert_eq!(sent(), [0; 0], "stored events were sent from memory");

    disk.fill(0);
    assert_eq!(sink.send(batch(4..=20_000)).await, SinkAnswer::Accepted);
    assert_same_numbers(sent(), range(4..=20_000));
    assert_in_memory(&journal);

    disk.free_space();
    assert_eq!(sink.send(batch(20_001..=20_001)).await, SinkAnswer::Accepted);
    assert_same_numbers(sent(), range(4..=20_000));
    assert_eq!(stored(disk.path()), [1, 2, 3, 20_001]);
    assert_ok(&journal);
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn events_delivered_from_memory_are_stored_once_the_disk_has_room() {
    let disk = Disk::new(24 << 20);
    let journal: Journal = open(disk.path());
    journal.expect_delivery();
    let dropped_ranges = DroppedRanges::subscribe(&journal);
    let recording = RecordingSink::new();
    let sink = JournalSink::new(journal.clone(), Some(Arc::new(recording.clone())));
    assert_eq!(sink.send(batch(1..=3)).await, SinkAnswer::Accepted);
    disk.fill(0);
    for from in [4, 2_004] {
        assert_eq!(sink.send(batch(from..=from + 1_999)).await, SinkAnswer::Accepted);
    }
    assert_in_memory(&journal);
    assert_same_numbers(seqs(&recording.events()), range(4..=4_003));
    disk.free_space();
    wait_until("the events to be stored", || journal.status().journalled_through == 4_003);
    assert_ok(&journal);
    assert_same_numbers(stored(disk.path()), range(1..=4_003));

    disk.fill(0);
    for from in [4_004, 10_004] {
        assert_eq!(sink.send(batch(from..=from + 5_999)).await, SinkAnswer::Accepted);
    }
    disk.free_space();
    assert_eq!(sink.send(batch(16_004..=16_004)).await, SinkAnswer::Accepted);
    assert_same_numbers(stored(disk.path()), (1..=4_003).chain(10_004..=16_004));
    assert_eq!(dropped_ranges.ranges(&journal).await, [(4_004, 10_003)], "memory must be limited");
}

#[tokio::test]
async fn a_start_without_a_sink_keeps_undelivered_events() {
    let home = Home::new();
    let journal = home.open();
    journal.expect_no_delivery();
    append_all(&journal, 1..=10).await;
    journal.close().await;
    let journal = home.open();
    journal.expect_delivery();
    assert_eq!(journal.delivery().await.unwrap().cursor, 10, "events before the first delivery are not owed");
    append_all(&journal, 11..=20).await;
    journal.store_delivery(15, None).await.unwrap();
    journal.close().await;
    for seq in [21, 22] {
        let journal = home.open();
        journal.expect_no_delivery();
        append_all(&journal, seq..=seq).await;
        journal.close().await;
    }
    let journal = home.open();
    journal.expect_delivery();
    let cursor = journal.delivery().await.unwrap().cursor;
    assert_same_numbers(seqs(&journal.outbox(cursor, 100).await.unwrap()), range(16..=22));
}
