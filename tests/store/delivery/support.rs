//! Fixtures: a journal with events and a delivery with short intervals.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite::data_dir::private_tempdir;
use mcp_satellite::delivery::{Delivery, DeliveryStatus};
use mcp_satellite::journal::{Journal, JournalLimits};
use mcp_satellite::sink::http::HttpSink;
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use tempfile::TempDir;
use testkit::wait::GIVE_UP;

/// Short intervals, and batches of ten events.
pub(crate) fn quick() -> BatchPolicy {
    BatchPolicy {
        interval: Duration::from_millis(20),
        batch_max: 10,
        backoff_max: Duration::from_millis(80),
        ..BatchPolicy::default()
    }
}

pub(crate) fn event(seq: u64) -> Envelope {
    let event = Event::ConfigError {
        error_type: "told".to_owned(),
        error_message: format!("the event {seq}"),
        status_code: None,
        retry_in: Some(seq),
    };
    Envelope { seq, timestamp: Timestamp::from_millisecond(1_780_000_000_123).unwrap(), event }
}

pub(crate) fn batch(seqs: std::ops::RangeInclusive<u64>) -> Arc<SinkBatch> {
    Arc::new(SinkBatch { id: *seqs.start(), events: seqs.map(event).collect() })
}

/// A data directory with its journal.
pub(crate) struct Rig {
    pub(crate) dir: TempDir,
    pub(crate) journal: Journal,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let dir = private_tempdir();
        let journal = open(dir.path());
        Self { dir, journal }
    }

    pub(crate) async fn append(&self, seqs: std::ops::RangeInclusive<u64>) {
        assert_eq!(self.journal.append(batch(seqs)).await, SinkAnswer::Accepted);
    }

    pub(crate) fn deliver(&self, sink: impl EventSink) -> Delivery {
        Delivery::start(self.journal.clone(), "there", Arc::new(sink), &quick())
    }

    /// The stored cursor.
    pub(crate) async fn cursor(&self) -> u64 {
        self.journal.delivery().await.unwrap().cursor
    }

    /// Closes the journal and opens it again, as a restarted process does.
    pub(crate) async fn restarted(self) -> Self {
        let Self { dir, journal } = self;
        journal.close().await;
        let journal = open(dir.path());
        Self { dir, journal }
    }
}

fn open(dir: &Path) -> Journal {
    Journal::open(dir, JournalLimits::default()).unwrap()
}

pub(crate) fn http(url: &str) -> HttpSink {
    HttpSink::new(url, None).unwrap().with_timeout(Duration::from_millis(250))
}

/// Waits until `wanted` accepts the status of the delivery.
pub(crate) async fn until(delivery: &Delivery, what: &str, wanted: impl Fn(&DeliveryStatus) -> bool) {
    let mut watch = delivery.watch();
    let found = tokio::time::timeout(GIVE_UP, watch.wait_for(|status| wanted(status))).await;
    assert!(found.is_ok(), "timed out waiting for {what}: {:?}", delivery.status());
}

pub(crate) async fn until_settled(delivery: &Delivery, seq: u64) {
    until(delivery, &format!("{seq} to be settled"), |status| status.settled >= seq).await;
}

/// Reports the sizes of the batches that a sink has received.
pub(crate) type Sender = tokio::sync::mpsc::UnboundedSender<usize>;
