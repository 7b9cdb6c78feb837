//! Broken disks: events are delivered from memory as long as this keeps the order.

use std::collections::HashSet;
use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mcp_satellite::data_dir::private_tempdir;
use mcp_satellite::journal::{Journal, JournalLimits, JournalSink, JournalState, database};
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::seam::{EventSink, NumberStore, SinkAnswer, SinkBatch};
use serde_json::Value;

use super::peer::{Peer, Reply};
use super::support::{Rig, batch, event, http, until, until_settled};
use crate::journal::support::{make_directory, random_text, range};

impl Rig {
    /// Replaces the directory of the journal with a file.
    fn break_disk(&self) {
        fs::rename(self.dir.path().join("journal"), self.dir.path().join("aside")).unwrap();
        fs::write(self.dir.path().join("journal"), "not a directory").unwrap();
    }

    fn repair_disk(&self) {
        fs::remove_file(self.dir.path().join("journal")).unwrap();
        fs::rename(self.dir.path().join("aside"), self.dir.path().join("journal")).unwrap();
    }
}

/// Repeats a batch until it is accepted, as the batcher does.
async fn send_until_accepted(sink: &JournalSink, batch: Arc<SinkBatch>) {
    while sink.send(batch.clone()).await != SinkAnswer::Accepted {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn events_are_delivered_from_memory_while_the_disk_is_broken() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    let delivery = rig.deliver(http(&url));
    let sink = JournalSink::new(rig.journal.clone(), Some(delivery.direct_sink()));
    assert_eq!(sink.send(batch(1..=5)).await, SinkAnswer::Accepted);
    until_settled(&delivery, 5).await;
    rig.journal.reserve(45).await.unwrap();
    rig.break_disk();
    assert_eq!(sink.send(batch(6..=30)).await, SinkAnswer::Accepted, "more events than one batch of the sink");
    assert_eq!(rig.journal.status().state, JournalState::Memory);
    assert_eq!(peer.stored_seqs(), range(1..=30));

    peer.reply_with(|_| Reply::Status(503, Vec::new(), String::new()));
    assert!(matches!(sink.send(batch(31..=40)).await, SinkAnswer::Unavailable(_)), "the sender must keep the batch");
    rig.repair_disk();
    send_until_accepted(&sink, batch(31..=40)).await;
    assert_eq!(rig.journal.status().state, JournalState::Ok);
    assert_eq!(sink.send(batch(41..=45)).await, SinkAnswer::Accepted);
    peer.reply_with(|_| Reply::Accept);
    until_settled(&delivery, 45).await;
    assert_eq!(peer.stored_seqs(), range(1..=45), "events are not delivered once and in order");
    assert_eq!(delivery.finish(Duration::from_secs(5)).await, 0);
    assert_eq!(rig.cursor().await, 45);
}

#[tokio::test]
async fn delivery_from_memory_handles_rejections_like_delivery_from_disk() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    let delivery = rig.deliver(http(&url));
    let sink = JournalSink::new(rig.journal.clone(), Some(delivery.direct_sink()));
    rig.journal.reserve(20).await.unwrap();
    rig.break_disk();
    let mut attempts = 0;
    peer.reply_with(move |seqs| {
        attempts += 1;
        match attempts {
            1 => Reply::Status(401, Vec::new(), String::new()),
            2 => Reply::Hang,
            _ if seqs.len() > 4 => Reply::Status(413, Vec::new(), String::new()),
            _ if seqs.contains(&7) => Reply::Status(422, Vec::new(), String::new()),
            _ => Reply::Accept,
        }
    });
    send_until_accepted(&sink, batch(1..=20)).await;
    let mut expected = range(1..=20);
    expected.retain(|seq| *seq != 7);
    assert_eq!(peer.stored_seqs(), expected);
}

#[tokio::test]
async fn stored_events_are_delivered_before_events_in_memory() {
    let (peer, url) = Peer::start();
    peer.reply_with(|_| Reply::Status(503, Vec::new(), String::new()));
    let rig = Rig::new();
    let delivery = rig.deliver(http(&url));
    let sink = JournalSink::new(rig.journal.clone(), Some(delivery.direct_sink()));
    assert_eq!(sink.send(batch(1..=35)).await, SinkAnswer::Accepted);
    until(&delivery, "an error in the status", |status| status.last_error.is_some()).await;
    rig.journal.reserve(40).await.unwrap();
    rig.break_disk();
    assert!(matches!(sink.send(batch(36..=40)).await, SinkAnswer::Unavailable(_)));
    peer.reply_with(|_| Reply::Accept);
    assert!(
        matches!(sink.send(batch(36..=40)).await, SinkAnswer::Unavailable(_)),
        "earlier events are only on the disk"
    );
    rig.repair_disk();
    send_until_accepted(&sink, batch(36..=40)).await;
    until_settled(&delivery, 40).await;
    assert_eq!(peer.stored_seqs(), range(1..=40));
}

#[tokio::test]
async fn events_are_delivered_if_the_database_never_worked() {
    let (peer, url) = Peer::start();
    let dir = private_tempdir();
    make_directory(dir.path());
    let database = database(dir.path());
    fs::create_dir(&database).unwrap();
    let journal = Journal::open(dir.path(), JournalLimits::default()).unwrap();
    let rig = Rig { dir, journal };
    let delivery = rig.deliver(http(&url));
    let sink = JournalSink::new(rig.journal.clone(), Some(delivery.direct_sink()));
    for first in [1, 11, 21] {
        assert_eq!(sink.send(batch(first..=first + 9)).await, SinkAnswer::Accepted);
    }
    fs::remove_dir(&database).unwrap();
    assert_eq!(sink.send(batch(31..=35)).await, SinkAnswer::Accepted);
    until_settled(&delivery, 35).await;
    assert_eq!(peer.stored_seqs(), range(1..=35), "a disk that works later must be used");
    assert_eq!(rig.journal.status().last_seq, Some(35));
}

#[tokio::test]
async fn events_whose_numbers_cannot_be_reserved_are_not_delivered() {
    let (peer, url) = Peer::start();
    let rig = Rig::new();
    let delivery = rig.deliver(http(&url));
    let sink = JournalSink::new(rig.journal.clone(), Some(delivery.direct_sink()));
    assert_eq!(sink.send(batch(1..=5)).await, SinkAnswer::Accepted);
    until_settled(&delivery, 5).await;
    rig.journal.reserve(10).await.unwrap();
    rig.break_disk();
    assert_eq!(sink.send(batch(6..=10)).await, SinkAnswer::Accepted);
    assert!(
        matches!(sink.send(batch(11..=15)).await, SinkAnswer::Unavailable(_)),
        "the next start may use the numbers"
    );
    assert_eq!(peer.stored_seqs(), range(1..=10));
    rig.repair_disk();
    assert_eq!(sink.send(batch(11..=15)).await, SinkAnswer::Accepted);
    until_settled(&delivery, 15).await;
    assert_eq!(peer.stored_seqs(), range(1..=15));
}

#[tokio::test]
async fn undelivered_events_deleted_for_room_are_reported_exactly() {
    let (peer, url) = Peer::start();
    peer.reply_with(|_| Reply::Status(503, Vec::new(), String::new()));
    let dir = private_tempdir();
    let limits = JournalLimits { size_max: 1 << 20, ..JournalLimits::default() };
    let journal = Journal::open(dir.path(), limits).unwrap();
    let rig = Rig { dir, journal };
    let dropped = Arc::new(Mutex::new(Vec::new()));
    let reported = dropped.clone();
    rig.journal.on_dropped(move |from, to| reported.lock().unwrap().push((from, to)));
    let delivery = rig.deliver(http(&url));
    let mut last = 0;
    // About 3 MB.
    for _ in 0..100 {
        let events: Vec<Envelope> = (last + 1..=last + 100).map(event).collect();
        let mut events: Vec<Envelope> = events
            .into_iter()
            .map(|envelope| match envelope.event {
                Event::ConfigError { error_type, status_code, retry_in, .. } => {
                    let error_message = random_text(envelope.seq, 300);
                    Envelope {
                        event: Event::ConfigError { error_type, error_message, status_code, retry_in },
                        ..envelope
                    }
                }
                _ => envelope,
            })
            .collect();
        last += 100;
        for (from_seq, to_seq) in dropped.lock().unwrap().drain(..) {
            last += 1;
            events.push(Envelope { seq: last, event: Event::EventsDropped { from_seq, to_seq }, ..event(last) });
        }
        assert_eq!(rig.journal.append(Arc::new(SinkBatch { id: last, events })).await, SinkAnswer::Accepted);
    }
    assert!(rig.journal.status().pruned_unsent > 0);
    peer.reply_with(|_| Reply::Accept);
    until_settled(&delivery, last).await;
    let stored_seqs = peer.stored_seqs();
    assert!(stored_seqs.is_sorted());
    let known: HashSet<u64> = stored_seqs.into_iter().collect();
    let missing: HashSet<u64> = (1..=last).filter(|seq| !known.contains(seq)).collect();
    assert!(!missing.is_empty());
    let of = |event: &Value, key: &str| event["data"][key].as_u64().unwrap();
    let events = peer.events();
    let announcements = events.iter().filter(|event| event["type"] == "events.dropped");
    let mut announced: HashSet<u64> =
        announcements.flat_map(|event| of(event, "from_seq")..=of(event, "to_seq")).collect();
    // The journal reports a loss with the next batch, when it has made enough room.
    while announced.len() < missing.len() {
        rig.append(last + 1..=last + 1).await;
        last += 1;
        announced.extend(dropped.lock().unwrap().drain(..).flat_map(|(from, to)| from..=to));
    }
    assert!(announced == missing, "the reported losses differ from the missing events");
}
