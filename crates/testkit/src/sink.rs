//! Event sinks, and the options of runtimes that use them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, ready};
use jiff::Timestamp;
use mcp_satellite_actors::RuntimeOptions;
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::seam::{Connectors, EventSink, SinkAnswer, SinkBatch};
use tokio::sync::watch;

use crate::wait::GIVE_UP;

/// A sink that accepts and forgets all events.
pub struct DiscardingSink;

impl EventSink for DiscardingSink {
    fn send(&self, _batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        Box::pin(ready(SinkAnswer::Accepted))
    }
}

/// A sink that records events in memory. Clones share the record.
#[derive(Clone)]
pub struct RecordingSink(watch::Sender<Vec<Envelope>>);

impl RecordingSink {
    pub fn new() -> Self {
        Self(watch::Sender::default())
    }

    pub fn events(&self) -> Vec<Envelope> {
        self.0.borrow().clone()
    }

    /// Returns a receiver of the record, which is notified of each batch.
    pub fn watch(&self) -> watch::Receiver<Vec<Envelope>> {
        self.0.subscribe()
    }
}

impl EventSink for RecordingSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        self.0.send_modify(|events| events.extend(batch.events.iter().cloned()));
        Box::pin(ready(SinkAnswer::Accepted))
    }
}

/// Returns the options of a runtime in real time, which sends events to the sink after 10 ms.
pub fn real_time_options(connectors: impl Into<Connectors>, sink: &RecordingSink) -> RuntimeOptions {
    // Tests compare timestamps, so changes of the system clock must not affect them.
    let (wall, since) = (Timestamp::now(), Instant::now());
    let wall = Arc::new(move || wall + since.elapsed());
    let mut options = RuntimeOptions::new(connectors, Arc::new(sink.clone()), wall);
    options.batch =
        BatchPolicy { interval: Duration::from_millis(10), flush_timeout: GIVE_UP, ..BatchPolicy::default() };
    options
}
