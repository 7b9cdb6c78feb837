//! Implements an event sink. A sink receives one batch at a time, in order, and returns the outcome. A batch that it
//! does not accept is sent again, unchanged and under the same id.
//!
//! ```text
//! cargo run --example custom_sink
//! ```

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use mcp_satellite::actors::model::spec::{
    ConfigTier, InstanceConfig, InstanceSpec, ProcessLifetime, ServerTarget, UpdateMethod,
};
use mcp_satellite::actors::seam::{EventSink, SinkAnswer, SinkBatch};
use mcp_satellite::actors::{RuntimeOptions, start};
use mcp_satellite::connect::sim::{SimConnector, SimScript};

/// Sink that counts events by kind.
#[derive(Default)]
struct CountingSink(Mutex<EventCounts>);

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
    fn take(&self, batch: &SinkBatch) -> SinkAnswer {
        // A sink must not panic. After a panic elsewhere, the counts are still usable.
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
    let tally = Arc::new(CountingSink::default());
    let connector = SimConnector::new(SimScript::default());
    let options = RuntimeOptions::new(connector.clone(), Arc::clone(&tally) as _, Arc::new(Timestamp::now));
    let (satellite, ended) = start(options).await?;
    let mut ids = Vec::new();
    for nth in 0..10 {
        let spec = server(nth);
        ids.push(spec.id.clone());
        satellite.install(spec).await?;
    }
    for id in &ids {
        satellite.wait_for(id, |view| view.port.is_some()).await.ok_or("it ended")?;
    }
    // Crash one server to produce more events.
    connector.handle(&ids[0]).ok_or("it has no server")?.signal(9);
    satellite.wait_for(&ids[0], |view| view.restarts > 0 && view.port.is_some()).await.ok_or("it ended")?;

    let farewell = satellite.shutdown().await;
    ended.await?;
    let counts = tally.0.lock().unwrap_or_else(PoisonError::into_inner);
    for (kind, count) in &counts.by_kind {
        println!("{count:>5} {kind}");
    }
    println!("the last has number {}; events lost: {}", counts.last_seq, farewell.events_lost);
    let counted: u64 = counts.by_kind.values().sum();
    if counted == counts.last_seq { Ok(()) } else { Err("an event is missing".into()) }
}

fn server(nth: u32) -> InstanceSpec {
    InstanceConfig {
        team: "team".into(),
        team_slug: "team".into(),
        user: "user".into(),
        user_slug: "user".into(),
        installation: format!("installation_{nth}").into(),
        server: format!("server-{nth}").into(),
        target: ServerTarget::Stdio { command: "simulated".to_owned(), cwd: None },
        server_tier: ConfigTier::default(),
        team_tier: ConfigTier::default(),
        user_tier: ConfigTier::default(),
        user_required: Vec::new(),
        lifetime: ProcessLifetime::AlwaysOn,
        update_method: UpdateMethod::default(),
        request_logging: true,
        policy: Arc::default(),
    }
    .merge()
}
