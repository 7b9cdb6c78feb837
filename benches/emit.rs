//! Latency and throughput of emitting events from one and four threads at full speed, with a sink that accepts
//! everything and one that never answers.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use mcp_satellite::connect::sim::{SimConnector, SimScript};
use mcp_satellite_actors::EventSender;
use mcp_satellite_actors::model::event::{Event, EventSubject};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};

use common::{BenchReport, NullSink, format_duration, format_number, median, quantile, spec, start};

const EVENTS: usize = 400_000;

struct StalledSink;

impl EventSink for StalledSink {
    fn send(&self, _: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        Box::pin(std::future::pending())
    }
}

fn main() {
    let mut report = BenchReport::new("emit", ["sink", "threads", "events/s", "p50", "p99", "p99.9", "dropped"]);
    common::tokio_runtime().block_on(async {
        measure("accepts everything", NullSink, &mut report).await;
        measure("never answers", StalledSink, &mut report).await;
    });
    report.publish();
}

async fn measure(name: &str, sink: impl EventSink, report: &mut BenchReport) {
    let runtime = start(SimConnector::new(SimScript::default()), sink, |options| {
        options.batch.flush_timeout = Duration::from_millis(1);
    })
    .await;
    let subject = Arc::new(EventSubject::from(&spec(0, 1, 1, &["simulated".to_owned()], &Arc::new(Policy::default()))));
    for threads in [1, 4] {
        // Measured twice, because reading the clock around each event costs as much as the event.
        let before = runtime.event_statistics();
        let (took, _) = emit_all(runtime.emitter(), &subject, threads, false);
        let after = runtime.event_statistics();
        let (_, mut timed) = emit_all(runtime.emitter(), &subject, threads, true);
        timed.sort_unstable();
        report.row([
            name.to_owned(),
            threads.to_string(),
            format_number(EVENTS as f64 / took.as_secs_f64()),
            format_duration(median(timed.iter().copied())),
            format_duration(quantile(timed.iter().copied(), 0.99)),
            format_duration(quantile(timed.iter().copied(), 0.999)),
            format!(
                "{:.0} %",
                (after.dropped - before.dropped) as f64 / (after.emitted - before.emitted) as f64 * 100.0
            ),
        ]);
    }
    runtime.shutdown().await;
}

fn emit_all(
    emitter: &EventSender,
    subject: &Arc<EventSubject>,
    threads: usize,
    timed: bool,
) -> (Duration, Vec<Duration>) {
    let began = Instant::now();
    let all = std::thread::scope(|scope| {
        let emit_share = || {
            let mut delays = Vec::with_capacity(if timed { EVENTS / threads } else { 0 });
            for _ in 0..EVENTS / threads {
                let event = Event::ToolExecuted {
                    of: Arc::clone(subject),
                    tool_name: "echo".to_owned(),
                    duration_ms: 1,
                    success: true,
                    error_message: None,
                };
                let began = timed.then(Instant::now);
                emitter.emit(event);
                delays.extend(began.map(|began| began.elapsed()));
            }
            delays
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(emit_share)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    (began.elapsed(), all)
}
