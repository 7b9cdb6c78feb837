//! One process ends, and the next one goes on: what was in flight comes again under its id.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite::delivery::Delivery;
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use serde_json::json;

use crate::peer::{Peer, Reply};
use crate::support::{Rig, http, quick, range, until, until_settled};

#[tokio::test]
async fn what_was_in_flight_comes_again_under_its_id_and_can_be_told_to_be_a_repeat() {
    let (peer, url) = Peer::start();
    // It takes the second batch, and its answer never arrives.
    peer.does(|seqs| if seqs.contains(&11) { Reply::Stuck } else { Reply::Take });
    let rig = Rig::new();
    rig.append(1..=25).await;
    let delivery = rig.deliver(http(&url));
    peer.until_came(2).await;
    // As if by `kill -9`: nothing is settled, nobody says goodbye.
    drop(delivery);
    let before = peer.came();
    peer.does(|_| Reply::Take);

    let rig = rig.restarted().await;
    assert_eq!(rig.cursor().await, 10);
    rig.append(26..=30).await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, 30).await;
    let after = &peer.came()[before.len()..];
    assert_eq!((&after[0].key, &after[0].seqs), (&before[1].key, &before[1].seqs));
    assert!(after[1..].iter().all(|came| before.iter().all(|before| before.key != came.key)), "no id is used again");
    assert_eq!(peer.has(), range(1..=30), "each once, if repeats are told by their id");
}

#[tokio::test]
async fn an_event_that_was_refused_is_no_part_of_what_comes_again() {
    let (peer, url) = Peer::start();
    peer.does(|seqs| match seqs.iter().position(|seq| *seq == 5) {
        Some(index) => Reply::Status(400, Vec::new(), json!({"index": index, "error": "not this one"}).to_string()),
        None => Reply::Stuck,
    });
    let rig = Rig::new();
    rig.append(1..=10).await;
    let delivery = rig.deliver(http(&url));
    peer.until_came(2).await;
    drop(delivery);
    let before = peer.came();
    assert_eq!(before[1].seqs, [1, 2, 3, 4, 6, 7, 8, 9, 10]);

    peer.does(|_| Reply::Take);
    let rig = rig.restarted().await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, 10).await;
    let after = &peer.came()[before.len()..];
    assert_eq!(after.len(), 1);
    assert_eq!((&after[0].key, &after[0].seqs), (&before[1].key, &before[1].seqs));
}

#[tokio::test]
async fn restarts_in_the_middle_again_and_again_lose_nothing_and_keep_the_order() {
    let (peer, url) = Peer::start();
    let mut rig = Rig::new();
    let mut last = 0;
    for round in 0..12_u64 {
        rig.append(last + 1..=last + 35).await;
        last += 35;
        let came = peer.came().len();
        let mut nth = 0;
        peer.does(move |_| {
            nth += 1;
            match nth {
                _ if nth <= round % 4 => Reply::Take,
                _ if round % 3 == 0 => Reply::Hang,
                _ if round % 3 == 1 => Reply::Stuck,
                _ => Reply::Status(503, Vec::new(), String::new()),
            }
        });
        let delivery = rig.deliver(http(&url));
        peer.until_came(came + 1 + usize::try_from(round % 4).unwrap()).await;
        drop(delivery);
        rig = rig.restarted().await;
    }
    peer.does(|_| Reply::Take);
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, last).await;
    assert_eq!(peer.has(), range(1..=last));
    let mut ids = std::collections::HashMap::new();
    for came in peer.came() {
        let known = ids.entry(came.key).or_insert_with(|| came.seqs.clone());
        assert_eq!(*known, came.seqs, "one id, one batch");
    }
}

#[tokio::test]
async fn at_the_end_everything_is_sent_at_once_and_what_is_left_stays_for_the_next() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    rig.append(1..=25).await;
    let slow = BatchPolicy { interval: Duration::from_secs(3600), ..quick() };
    let delivery = Delivery::start(rig.journal.clone(), "there", Arc::new(http(&url)), &slow);
    until_settled(&delivery, 25).await;
    rig.append(26..=60).await;
    assert_eq!(delivery.finish(Duration::from_secs(30)).await, 0, "without waiting for the interval");
    assert_eq!(peer.has(), range(1..=60));

    let rig = rig.restarted().await;
    peer.does(|_| Reply::Hang);
    rig.append(61..=70).await;
    let delivery = rig.deliver(http(&url));
    peer.until_came(peer.came().len() + 1).await;
    assert_eq!(delivery.finish(Duration::from_millis(100)).await, 10, "no longer than it may take");
    let before = peer.came();
    peer.does(|_| Reply::Take);
    let rig = rig.restarted().await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, 70).await;
    assert_eq!(peer.has(), range(1..=70));
    assert_eq!(peer.came().last().unwrap().key, before.last().unwrap().key);
}

#[tokio::test]
async fn on_the_way_out_a_pause_is_not_honoured() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    rig.append(1..=5).await;
    peer.does(|_| Reply::Status(429, vec![("retry-after", "1000".to_owned())], String::new()));
    let delivery = rig.deliver(http(&url));
    peer.until_came(1).await;
    until(&delivery, "a pause", |status| status.last_error.is_some()).await;
    peer.does(|_| Reply::Take);
    assert_eq!(delivery.finish(Duration::from_secs(30)).await, 0);
    assert_eq!(peer.has(), range(1..=5));
}

#[tokio::test]
async fn a_way_that_panics_is_one_that_takes_nothing_now() {
    struct Panics(std::sync::atomic::AtomicBool, crate::support::Sender);
    impl EventSink for Panics {
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
    let delivery = rig.deliver(Panics(true.into(), sender));
    assert_eq!(sent.recv().await, Some(5));
    until_settled(&delivery, 5).await;
}

#[tokio::test]
async fn who_is_new_is_told_what_comes_from_now_on() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    rig.journal.expect_no_delivery();
    rig.append(1..=10).await;
    let rig = rig.restarted().await;
    let delivery = rig.deliver(http(&url));
    rig.append(11..=20).await;
    until_settled(&delivery, 20).await;
    assert_eq!(peer.has(), range(11..=20));
    drop(delivery);

    // It is not new any more, whatever it has missed.
    rig.append(21..=25).await;
    let rig = rig.restarted().await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, 25).await;
    assert_eq!(peer.has(), range(11..=25));
}

#[tokio::test]
async fn a_batch_that_is_larger_than_a_restart_reads_at_once_is_delivered_completely() {
    const EVENTS: u64 = 12_000;
    let (peer, url) = Peer::start();
    peer.does(|_| Reply::Stuck);
    let rig = Rig::new();
    rig.append(1..=EVENTS).await;
    let policy = BatchPolicy { batch_max: 20_000, queue_max: 100_000, ..quick() };
    let sink = || Arc::new(http(&url).with_timeout(Duration::from_secs(30)));
    let delivery = Delivery::start(rig.journal.clone(), "there", sink(), &policy);
    peer.until_came(1).await;
    drop(delivery);
    assert_eq!(peer.came()[0].seqs.len(), usize::try_from(EVENTS).unwrap());

    peer.does(|_| Reply::Take);
    let rig = rig.restarted().await;
    let delivery = Delivery::start(rig.journal.clone(), "there", sink(), &policy);
    until_settled(&delivery, EVENTS).await;
    assert!(peer.has() == range(1..=EVENTS), "{} events", peer.has().len());
}
