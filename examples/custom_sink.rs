//! Implements an event sink. A sink receives one batch at a time, in order, and returns the outcome. A batch that it
//! does not accept is sent again, unchanged and under the same id.
//!
//! ```text
//! cargo run --example custom_sink
//! ```

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite::actors::seam::{EventSink, SinkAnswer, SinkBatch};
use mcp_satellite::connect::sim::{SimConnector, SimScript};
use mcp_satellite::{Instance, Runtime};

/// Sink that counts events by kind. Clones share their counts.
#[derive(Clone, Default)]
struct CountingSink(Arc<Mutex<EventCounts>>);

#[derive(Default)]
struct EventCounts {
    by_kind: BTreeMap<&'static str, u64>,
    last_seq: u64,
    /// Id of the last counted batch, so that a repeated batch is not counted twice.
    last_batch: Option<u64>,
    refused: Option<u64>,
}

impl EventSink for CountingSink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        Box::pin(std::future::ready(self.take(&batch)))
    }

    /// Tells the batcher not to gather events: counting is cheap.
    fn is_prompt(&self) -> bool {
        true
    }
}

impl CountingSink {
    fn counts(&self) -> MutexGuard<'_, EventCounts> {
        // A sink must not panic. After a panic elsewhere, the counts are still usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, batch: &SinkBatch) -> SinkAnswer {
        let mut counts = self.counts();
        // The first batch is throttled once, as a busy service would do.
        if counts.refused.is_none() {
            counts.refused = Some(batch.id);
            println!("batch {} of {} events is put off", batch.id, batch.events.len());
            return SinkAnswer::Throttled(Some(Duration::from_millis(100)));
        }
        if counts.last_batch == Some(batch.id) {
            return SinkAnswer::Accepted;
        }
        if counts.refused == Some(batch.id) {
            println!("batch {} has come again, with the same events", batch.id);
        }
        counts.last_batch = Some(batch.id);
        for envelope in &batch.events {
            *counts.by_kind.entry(envelope.event.kind()).or_default() += 1;
            counts.last_seq = envelope.seq;
        }
        SinkAnswer::Accepted
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (sink, connector) = (CountingSink::default(), SimConnector::new(SimScript::default()));
    let runtime = Runtime::builder(connector.clone()).events(sink.clone()).start().await?;
    let mut servers = Vec::new();
    for nth in 0..10 {
        let server = Instance::stdio("simulated").named(format!("server-{nth}")).always_on();
        servers.push(runtime.install(server).await?);
    }
    for server in &servers {
        server.ready().await?;
    }
    // Crash one server to produce more events.
    let first = servers[0].id();
    connector.handle(first).ok_or("it has no server")?.signal(9);
    runtime.handle().wait_for(first, |view| view.restarts > 0 && view.port.is_some()).await.ok_or("it ended")?;

    let report = runtime.shutdown().await;
    let counts = sink.counts();
    for (kind, count) in &counts.by_kind {
        println!("{count:>5} {kind}");
    }
    println!("the last has number {}; events lost: {}", counts.last_seq, report.events_lost);
    let counted: u64 = counts.by_kind.values().sum();
    if counted == counts.last_seq { Ok(()) } else { Err("an event is missing".into()) }
}
