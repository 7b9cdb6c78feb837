//! What is still to be delivered, and how far that is.

use std::sync::{Arc, Mutex};

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite::journal::{BatchInFlight, DeliveryState, Journal, JournalSink};
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};

use super::support::*;

fn seqs(events: &[Envelope]) -> Vec<u64> {
    events.iter().map(|event| event.seq).collect()
}

#[tokio::test]
async fn the_outbox_is_read_in_order_behind_the_cursor_and_goes_on_after_a_restart() {
    let home = Home::new();
    let journal = home.open();
    journal.expect_delivery();
    let begun = journal.delivery().await.unwrap();
    assert_eq!((begun.cursor, begun.sending), (0, None));
    append_all(&journal, 1..=250).await;
    assert_eq!(is_ok(&journal).backlog, 250);
    let first = journal.outbox(0, 100).await.unwrap();
    same(seqs(&first), range(1..=100));
    assert_eq!(first[0], event_at(1, first[0].timestamp));
    let sending = Some(BatchInFlight { id: 77, first: 1, last: 100, refused: vec![50] });
    journal.store_delivery(0, sending.clone()).await.unwrap();
    journal.close().await;

    let journal = home.open();
    journal.expect_delivery();
    let state = journal.delivery().await.unwrap();
    assert_eq!(state, DeliveryState { cursor: 0, sending });
    journal.store_delivery(100, None).await.unwrap();
    assert_eq!(is_ok(&journal).backlog, 150);
    assert_eq!(seqs(&journal.outbox(100, 1_000).await.unwrap()), range(101..=250));
    journal.store_delivery(90, None).await.unwrap();
    assert_eq!(journal.delivery().await.unwrap().cursor, 100, "it never goes back");
}

#[tokio::test]
async fn where_nobody_was_delivered_to_whoever_is_new_begins_with_what_comes() {
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
    assert_eq!(home.open().delivery().await.unwrap().cursor, 10, "and it is not new any more");
}

#[tokio::test]
async fn an_event_that_cannot_be_read_does_not_hold_up_the_others() {
    let home = Home::new().filled(1..=5).await;
    home.sqlite().execute("UPDATE events SET body = '{}' WHERE seq = 3", []).unwrap();
    assert_eq!(seqs(&home.open().outbox(0, 10).await.unwrap()), [1, 2, 4, 5]);
}

#[derive(Clone, Default)]
struct Way(Arc<Mutex<Vec<u64>>>);

impl EventSink for Way {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        self.0.lock().unwrap().extend(seqs(&batch.events));
        std::future::ready(SinkAnswer::Accepted).boxed()
    }
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn events_go_their_way_from_memory_while_the_disk_takes_none_and_nothing_waits_there() {
    let disk = Disk::new(4 << 20);
    let journal: Journal = open(disk.path());
    journal.expect_delivery();
    let way = Way::default();
    let sink = JournalSink::new(journal.clone(), Some(Arc::new(way.clone())));
    assert!(sink.is_prompt());
    assert_eq!(sink.send(batch(1..=3)).await, SinkAnswer::Accepted);
    let went = || way.0.lock().unwrap().clone();
    assert_eq!(went(), [0; 0], "what is stored is delivered from there");

    disk.fill(0);
    assert_eq!(sink.send(batch(4..=20_000)).await, SinkAnswer::Accepted);
    same(went(), range(4..=20_000));
    in_memory(&journal);

    disk.relieve();
    assert_eq!(sink.send(batch(20_001..=20_001)).await, SinkAnswer::Accepted);
    same(went(), range(4..=20_000));
    assert_eq!(stored(disk.path()), [1, 2, 3, 20_001]);
    is_ok(&journal);
}

#[tokio::test]
#[cfg_attr(no_root, ignore = "needs root to mount small disks; run the tests as root")]
async fn what_went_directly_is_stored_when_the_disk_takes_it() {
    let disk = Disk::new(24 << 20);
    let journal: Journal = open(disk.path());
    journal.expect_delivery();
    let told = Told::by(&journal);
    let way = Way::default();
    let sink = JournalSink::new(journal.clone(), Some(Arc::new(way.clone())));
    assert_eq!(sink.send(batch(1..=3)).await, SinkAnswer::Accepted);
    disk.fill(0);
    for from in [4, 2_004] {
        assert_eq!(sink.send(batch(from..=from + 1_999)).await, SinkAnswer::Accepted);
    }
    in_memory(&journal);
    same(way.0.lock().unwrap().clone(), range(4..=4_003));
    disk.relieve();
    wait_for("them to be stored", || (journal.status().journalled_through == 4_003).then_some(()));
    is_ok(&journal);
    same(stored(disk.path()), range(1..=4_003));

    disk.fill(0);
    for from in [4_004, 10_004] {
        assert_eq!(sink.send(batch(from..=from + 5_999)).await, SinkAnswer::Accepted);
    }
    disk.relieve();
    assert_eq!(sink.send(batch(16_004..=16_004)).await, SinkAnswer::Accepted);
    same(stored(disk.path()), (1..=4_003).chain(10_004..=16_004));
    assert_eq!(told.ranges(&journal).await, [(4_004, 10_003)], "there is an end to what memory holds");
}

#[tokio::test]
async fn a_start_with_nobody_to_deliver_to_does_not_lose_what_is_owed() {
    let home = Home::new();
    let journal = home.open();
    journal.expect_no_delivery();
    append_all(&journal, 1..=10).await;
    journal.close().await;
    let journal = home.open();
    journal.expect_delivery();
    assert_eq!(journal.delivery().await.unwrap().cursor, 10, "nobody has ever waited for these");
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
    same(seqs(&journal.outbox(cursor, 100).await.unwrap()), range(16..=22));
}
