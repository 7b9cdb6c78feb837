//! Cost of sleeping servers: resident memory, and the latency of the call that starts one, compared with a bare spawn,
//! handshake and call of the same program.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite::connect::sim::{SimConnector, SimScript};
use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::{IdlePolicy, Policy};
use mcp_satellite_actors::model::spec::ProcessLifetime;
use mcp_satellite_actors::{EarlierState, RuntimeHandle};
use serde_json::value::RawValue;

use common::{
    BareServer, BenchReport, NullSink, TIMEOUT, format_duration, format_number, median, resident, spec, start,
};

const INSTANCES: usize = 10_000;
const TEAMS: usize = 100;
const USERS: usize = 10;

const FLEETS: usize = 5;
const WAKE_UPS: usize = 101;

const CHILD: &str = "SATELLITE_BENCH_DORMANT";

fn main() {
    match std::env::var(CHILD).as_deref() {
        Ok("known") => child(true),
        Ok(_) => child(false),
        Err(_) => parent(),
    }
}

fn parent() {
    let mut report = BenchReport::new("dormant", ["sleeping server", "satellite", "bare start", "ratio"]);
    let goal = 4.0;
    for (kind, name) in [("known", "never started"), ("slept", "after a run")] {
        let mut found: Vec<f64> = (0..FLEETS).map(|_| run(kind)).collect();
        found.sort_by(f64::total_cmp);
        let kib = found[FLEETS / 2] / 1024.0;
        report.row([
            format!("RSS per server, {name}"),
            format!("{} KiB", format_number(kib)),
            "-".to_owned(),
            "-".to_owned(),
        ]);
        report.goal(&format!("RSS per server, {name}"), goal, "KiB", kib);
    }
    let (ours, bare) = common::tokio_runtime().block_on(wake_ups());
    let ratios = ours.iter().zip(&bare).map(|(ours, bare)| ours.div_duration_f64(*bare));
    let mut ratios: Vec<f64> = ratios.collect();
    ratios.sort_by(f64::total_cmp);
    let ratio = ratios[ratios.len() / 2];
    report.row([
        "call until result".to_owned(),
        format_duration(median(ours)),
        format_duration(median(bare)),
        format_number(ratio),
    ]);
    report.goal("call until result / bare start", 1.1, "×", ratio);
    report.publish();
}

/// Runs each fleet in a separate process, so that it does not reuse memory of another fleet.
fn run(kind: &str) -> f64 {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .env(CHILD, kind)
        .stderr(std::process::Stdio::inherit())
        .output()
        .unwrap();
    assert!(child.status.success(), "the child process failed");
    String::from_utf8(child.stdout).unwrap().trim().parse().unwrap()
}

#[expect(clippy::print_stdout, reason = "the parent process reads the output")]
fn child(known: bool) {
    println!("{}", common::tokio_runtime().block_on(memory(known)));
}

/// Returns the resident bytes per sleeping server. The servers have no tools, so no catalogue is included.
async fn memory(known: bool) -> f64 {
    let script = SimScript { no_tools_capability: true, ..SimScript::default() };
    let connector = SimConnector::new(script);
    let runtime = start(connector.clone(), NullSink, |_| {}).await;
    let policy = Arc::new(Policy { idle: sleep_at_once(), ..Policy::default() });
    let program = ["simulated".to_owned()];
    let (before, _) = resident();
    let specs = (0..INSTANCES).map(|nth| {
        let mut spec = spec(nth, TEAMS, USERS, &program, &policy);
        spec.lifetime = if known { ProcessLifetime::Lazy } else { ProcessLifetime::Listed };
        spec
    });
    for spec in specs {
        if known {
            runtime
                .install_with_state(spec, EarlierState { catalogue: Some(Arc::default()), memo: None })
                .await
                .unwrap();
        } else {
            runtime.install(spec).await.unwrap();
        }
    }
    let began = Instant::now();
    while runtime.snapshot().len() < INSTANCES || !runtime.snapshot().iter().all(|view| view.dormant) {
        assert!(began.elapsed() < TIMEOUT, "not all servers sleep in time");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(connector.alive_count(), 0);
    // Wait until temporary memory is freed: queued events and pages held by the allocator.
    runtime.flush().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (after, _) = resident();
    runtime.shutdown().await;
    after.saturating_sub(before) as f64 / INSTANCES as f64
}

fn sleep_at_once() -> IdlePolicy {
    IdlePolicy { idle: Duration::ZERO, grace: Duration::ZERO, sweep: Duration::from_millis(1) }
}

async fn wake_ups() -> (Vec<Duration>, Vec<Duration>) {
    let program = [env!("CARGO_BIN_EXE_satellite").to_owned(), "sim-server".to_owned()];
    let mut spec = spec(0, 1, 1, &program, &Arc::new(Policy { idle: sleep_at_once(), ..Policy::default() }));
    spec.lifetime = ProcessLifetime::Listed;
    let id = spec.id.clone();
    let runtime = start(StdioConnector::new(Vec::new()).unwrap(), NullSink, |_| {}).await;
    runtime.install(spec).await.unwrap();
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..WAKE_UPS {
        let asleep = runtime.wait_for(&id, |view| view.dormant);
        tokio::time::timeout(TIMEOUT, asleep).await.unwrap().unwrap();
        bare.push(bare_call(&program).await);
        ours.push(wake_up(&runtime, &id).await);
    }
    runtime.shutdown().await;
    (ours, bare)
}

async fn wake_up(runtime: &RuntimeHandle, id: &InstanceId) -> Duration {
    let arguments = RawValue::from_string(r#"{"text":"hello"}"#.to_owned()).unwrap();
    let began = Instant::now();
    let result = runtime.call(id, "echo", Some(arguments), None).await.unwrap();
    let elapsed = began.elapsed();
    assert!(result.get().contains("hello"));
    elapsed
}

async fn bare_call(program: &[String]) -> Duration {
    let began = Instant::now();
    let mut server = BareServer::start(program);
    server.handshake().await;
    server
        .request(
            r#"{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"echo","arguments":{"text":"hello"}}}"#,
        )
        .await;
    let elapsed = began.elapsed();
    server.child.kill().await.unwrap();
    elapsed
}
