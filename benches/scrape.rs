//! A scrape of 10,000 simulated instances with full tables of calls: time with the collection of the facts, length of the
//! text, and the time until all actors have answered a probe.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mcp_satellite::connect::sim::{SimConnector, SimScript};
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::event::EventSubject;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::seam::{CallEnd, ObservedCall, ObservedSide, RuntimeObserver, ToolCallFate, TraceOrigin};
use mcp_satellite_telemetry::{InstanceFacts, ScrapeFacts, Telemetry, TelemetryOptions, TreeFacts};

use common::{BenchReport, NullSink, TIMEOUT, format_duration, format_number, is_online, quantile, spec, start};

const INSTANCES: usize = 10_000;
const TEAMS: usize = 100;
const SCRAPES: usize = 30;
/// A text is used for one second.
const PAUSE: Duration = Duration::from_millis(1_010);

fn main() {
    common::tokio_runtime().block_on(measure());
}

async fn measure() {
    let options = TelemetryOptions {
        endpoint: None,
        sample: 0.0,
        payloads: false,
        name: "bench".to_owned(),
        instance: "bench".to_owned(),
    };
    let (telemetry, _export) = Telemetry::start(&options, &|_| None).unwrap();
    let observer = Arc::new(telemetry.clone());
    let connector = SimConnector::new(SimScript::default());
    let runtime = start(connector, NullSink, |options| options.observer = observer).await;
    let policy = Arc::new(Policy::default());
    let (mut ids, mut usage) = (Vec::new(), HashMap::new());
    for nth in 0..INSTANCES {
        let spec = spec(nth, TEAMS, 10, &["simulated".to_owned()], &policy);
        let sample = TreeFacts { memory_bytes: 100_000_000 + nth as u64 * 4096, cpu_seconds: nth as f64 * 1.37 };
        usage.insert(spec.id.clone(), sample);
        ids.push(spec.id.clone());
        fill_tables(&telemetry, &EventSubject::from(&spec), nth);
        runtime.install(spec).await.unwrap();
    }
    for id in &ids {
        tokio::time::timeout(TIMEOUT, runtime.wait_for(id, is_online)).await.unwrap().unwrap();
    }
    telemetry.set_facts(facts(runtime.clone(), usage));
    let (mut times, mut longest) = (Vec::new(), 0);
    for _ in 0..SCRAPES {
        let began = Instant::now();
        let text = telemetry.scrape().await.unwrap();
        times.push(began.elapsed());
        longest = longest.max(text.len());
        tokio::time::sleep(PAUSE).await;
    }
    let began = Instant::now();
    runtime.describe(TIMEOUT).await;
    let probe = began.elapsed();
    let mut report = BenchReport::new("scrape", ["instances", "scrape p50", "max", "text, MB", "probe of all actors"]);
    let (p50, max) = (quantile(times.iter().copied(), 0.5), quantile(times.iter().copied(), 1.0));
    report.row([
        format_number(INSTANCES as f64),
        format_duration(p50),
        format_duration(max),
        format_number(longest as f64 / 1e6),
        format_duration(probe),
    ]);
    report.goal("scrape, p50", 50.0, "ms", p50.as_secs_f64() * 1e3);
    report.goal("length of the text", 5.0, "MB", longest as f64 / 1e6);
    report.publish();
    runtime.shutdown().await;
}

/// Calls a tool of each instance; there are more tools than the tables have series.
fn fill_tables(telemetry: &Telemetry, subject: &EventSubject, nth: usize) {
    let tool = format!("a-tool-with-a-long-name-{nth}");
    telemetry.tool_called(subject, &tool, ToolCallFate::Ok);
    for side in [
        ObservedSide::Server { team: &subject.team_id, user: &subject.user_id, session: None, peer: None },
        ObservedSide::Client { attempt: 1 },
    ] {
        let call = ObservedCall {
            side,
            trace: TraceOrigin::Entry(None),
            method: "tools/call",
            target: Some(&tool),
            params: None,
            request_id: &nth,
            version: Some("2025-11-25"),
            spec: None,
        };
        telemetry.begin_call(&call).unwrap().end(CallEnd::Result("{}"));
        let end = CallEnd::Error { code: i64::try_from(nth).unwrap(), message: "no".into() };
        telemetry.begin_call(&call).unwrap().end(end);
    }
}

/// Returns the source of the facts as the satellite reads them: the snapshot, and the sample of each process tree under a
/// lock. The processes are simulated, so the samples are made up.
fn facts(runtime: RuntimeHandle, usage: HashMap<InstanceId, TreeFacts>) -> Box<dyn Fn() -> ScrapeFacts + Send + Sync> {
    let usage = Mutex::new(usage);
    Box::new(move || {
        let (now, snapshot) = (Instant::now(), runtime.snapshot());
        let of = |id: &InstanceId| usage.lock().unwrap().get(id).copied();
        ScrapeFacts {
            name: "bench".to_owned(),
            instances: snapshot.iter().map(|view| InstanceFacts::from_view(view, now, of)).collect(),
            events: runtime.event_statistics(),
            memory: runtime.memory(),
            ..ScrapeFacts::default()
        }
    })
}
