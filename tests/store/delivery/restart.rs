//! Delivery after a restart: a batch in flight is repeated with its id.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite::delivery::Delivery;
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use serde_json::json;

use super::peer::{Peer, Reply};
use super::support::{Rig, http, quick, until, until_settled};
use crate::journal::support::range;

#[tokio::test]
async fn a_batch_in_flight_is_repeated_with_its_id_after_a_restart() {
    let (peer, url) = Peer::start();
    // The server stores the second batch, but its response never arrives.
    peer.reply_with(|seqs| if seqs.contains(&11) { Reply::Stall } else { Reply::Accept });
    let rig = Rig::new();
    rig.append(1..=25).await;
    let delivery = rig.deliver(http(&url));
    peer.wait_for_batches(2).await;
    // Like `kill -9`: nothing is settled.
    drop(delivery);
    let before = peer.batches();
    peer.reply_with(|_| Reply::Accept);

    let rig = rig.restarted().await;
    assert_eq!(rig.cursor().await, 10);
    rig.append(26..=30).await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, 30).await;
    let after = &peer.batches()[before.len()..];
    assert_eq!((&after[0].key, &after[0].seqs), (&before[1].key, &before[1].seqs));
    assert!(after[1..].iter().all(|batch| before.iter().all(|before| before.key != batch.key)), "an id was reused");
    assert_eq!(peer.stored_seqs(), range(1..=30), "events are not delivered once apart from identified repetitions");
}

#[tokio::test]
async fn a_rejected_event_is_not_repeated_after_a_restart() {
    let (peer, url) = Peer::start();
    peer.reply_with(|seqs| match seqs.iter().position(|seq| *seq == 5) {
        Some(index) => Reply::Status(400, Vec::new(), json!({"index": index, "error": "not this one"}).to_string()),
        None => Reply::Stall,
    });
    let rig = Rig::new();
    rig.append(1..=10).await;
    let delivery = rig.deliver(http(&url));
    peer.wait_for_batches(2).await;
    drop(delivery);
    let before = peer.batches();
    assert_eq!(before[1].seqs, [1, 2, 3, 4, 6, 7, 8, 9, 10]);

    peer.reply_with(|_| Reply::Accept);
    let rig = rig.restarted().await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, 10).await;
    let after = &peer.batches()[before.len()..];
    assert_eq!(after.len(), 1);
    assert_eq!((&after[0].key, &after[0].seqs), (&before[1].key, &before[1].seqs));
}

#[tokio::test]
async fn repeated_restarts_lose_nothing_and_keep_the_order() {
    let (peer, url) = Peer::start();
    let mut rig = Rig::new();
    let mut last = 0;
    for round in 0..12_u64 {
        rig.append(last + 1..=last + 35).await;
        last += 35;
        let batches = peer.batches().len();
        let mut nth = 0;
        peer.reply_with(move |_| {
            nth += 1;
            match nth {
                _ if nth <= round % 4 => Reply::Accept,
                _ if round % 3 == 0 => Reply::Hang,
                _ if round % 3 == 1 => Reply::Stall,
                _ => Reply::Status(503, Vec::new(), String::new()),
            }
        });
        let delivery = rig.deliver(http(&url));
        peer.wait_for_batches(batches + 1 + usize::try_from(round % 4).unwrap()).await;
        drop(delivery);
        rig = rig.restarted().await;
    }
    peer.reply_with(|_| Reply::Accept);
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, last).await;
    assert_eq!(peer.stored_seqs(), range(1..=last));
    let mut ids = std::collections::HashMap::new();
    for batch in peer.batches() {
        let known = ids.entry(batch.key).or_insert_with(|| batch.seqs.clone());
        assert_eq!(*known, batch.seqs, "an id was reused for another batch");
    }
}

#[tokio::test]
async fn finish_sends_all_events_and_the_rest_is_delivered_after_a_restart() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    rig.append(1..=25).await;
    let slow = BatchPolicy { interval: Duration::from_secs(3600), ..quick() };
    let delivery = Delivery::start(rig.journal.clone(), "there", Arc::new(http(&url)), &slow);
    until_settled(&delivery, 25).await;
    rig.append(26..=60).await;
    assert_eq!(delivery.finish(Duration::from_secs(30)).await, 0, "finish must not wait for the interval");
    assert_eq!(peer.stored_seqs(), range(1..=60));

    let rig = rig.restarted().await;
    peer.reply_with(|_| Reply::Hang);
    rig.append(61..=70).await;
    let delivery = rig.deliver(http(&url));
    peer.wait_for_batches(peer.batches().len() + 1).await;
    assert_eq!(delivery.finish(Duration::from_millis(100)).await, 10, "finish must respect its timeout");
    let before = peer.batches();
    peer.reply_with(|_| Reply::Accept);
    let rig = rig.restarted().await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, 70).await;
    assert_eq!(peer.stored_seqs(), range(1..=70));
    assert_eq!(peer.batches().last().unwrap().key, before.last().unwrap().key);
}

#[tokio::test]
async fn finish_ignores_retry_after() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    rig.append(1..=5).await;
    peer.reply_with(|_| Reply::Status(429, vec![("retry-after", "1000".to_owned())], String::new()));
    let delivery = rig.deliver(http(&url));
    peer.wait_for_batches(1).await;
    until(&delivery, "a pause", |status| status.last_error.is_some()).await;
    peer.reply_with(|_| Reply::Accept);
    assert_eq!(delivery.finish(Duration::from_secs(30)).await, 0);
    assert_eq!(peer.stored_seqs(), range(1..=5));
}

#[tokio::test]
async fn a_sink_that_panics_is_tried_again() {
    struct PanickingSink(std::sync::atomic::AtomicBool, super::support::Sender);
    impl EventSink for PanickingSink {
        fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
            let first = self.0.swap(false, std::sync::atomic::Ordering::AcqRel);
            let sender = self.1.clone();
            Box::pin(async move {
                assert!(!first, "asked to panic");
                sender.send(batch.events.len()).unwrap();
                SinkAnswer::Accepted
            })
        }
    }
    let (sender, mut sent) = tokio::sync::mpsc::unbounded_channel();
    let rig = Rig::new();
    rig.append(1..=5).await;
    let delivery = rig.deliver(PanickingSink(true.into(), sender));
    assert_eq!(sent.recv().await, Some(5));
    until_settled(&delivery, 5).await;
}

#[tokio::test]
async fn a_new_sink_receives_only_later_events() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    rig.journal.expect_no_delivery();
    rig.append(1..=10).await;
    let rig = rig.restarted().await;
    let delivery = rig.deliver(http(&url));
    rig.append(11..=20).await;
    until_settled(&delivery, 20).await;
    assert_eq!(peer.stored_seqs(), range(11..=20));
    drop(delivery);

    // After the first start the sink receives all events, also those that it has missed.
    rig.append(21..=25).await;
    let rig = rig.restarted().await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, 25).await;
    assert_eq!(peer.stored_seqs(), range(11..=25));
}

#[tokio::test]
async fn a_batch_that_is_larger_than_a_restart_reads_at_once_is_delivered_completely() {
    const EVENTS: u64 = 12_000;
    let (peer, url) = Peer::start();
    peer.reply_with(|_| Reply::Stall);
    let rig = Rig::new();
    rig.append(1..=EVENTS).await;
    let policy = BatchPolicy { batch_max: 20_000, queue_max: 100_000, ..quick() };
    let sink = || Arc::new(http(&url).with_timeout(Duration::from_secs(30)));
    let delivery = Delivery::start(rig.journal.clone(), "there", sink(), &policy);
    peer.wait_for_batches(1).await;
    drop(delivery);
    assert_eq!(peer.batches()[0].seqs.len(), usize::try_from(EVENTS).unwrap());

    peer.reply_with(|_| Reply::Accept);
    let rig = rig.restarted().await;
    let delivery = Delivery::start(rig.journal.clone(), "there", sink(), &policy);
    until_settled(&delivery, EVENTS).await;
    assert!(peer.stored_seqs() == range(1..=EVENTS), "{} events", peer.stored_seqs().len());
}
