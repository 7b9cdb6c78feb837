//! How long 10,000 simulated servers take to be online, and how much memory each takes, its server counted in.
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on says so by panicking")]

#[expect(dead_code, reason = "each bench uses its part of it")]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite::connect::sim::{Script, ServerKind, SimConnector, SimPlan};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use serde::{Deserialize, Serialize};

use common::{CpuClock, GIVE_UP, NullSink, Report, number, resident, spec, start, time};

const INSTANCES: usize = 10_000;
const TEAMS: usize = 100;
const USERS: usize = 10;

/// Runs of each kind; the one in the middle is reported.
const ROUNDS: usize = 5;

/// In the environment of a child: which fleet it is to bring up.
const CHILD: &str = "SATELLITE_BENCH_FLEET";

/// What one fleet has taken.
#[derive(Serialize, Deserialize)]
struct Found {
    online: Duration,
    online_cpu: Duration,
    bytes: usize,
    bytes_at_most: usize,
    teardown: Duration,
}

fn main() {
    match std::env::var(CHILD).as_deref() {
        Ok("rmcp") => child(ServerKind::Rmcp),
        Ok(_) => child(ServerKind::Responder),
        Err(_) => parent(),
    }
}

/// Each fleet in a process of its own, so that none finds memory that another has left.
fn parent() {
    let mut report =
        Report::new("fleet", ["10,000 servers", "online", "CPU", "KiB each", "KiB each, at most", "torn down"]);
    for (kind, name) in [("responder", "hand-written responder"), ("rmcp", "rmcp's server")] {
        let mut found: Vec<Found> = (0..ROUNDS).map(|_| run(kind)).collect();
        found.sort_by_key(|found| found.online);
        let found = found.swap_remove(ROUNDS / 2);
        let each = |bytes: usize| bytes as f64 / INSTANCES as f64 / 1024.0;
        report.row([
            name.to_owned(),
            time(found.online),
            time(found.online_cpu),
            number(each(found.bytes)),
            number(each(found.bytes_at_most)),
            time(found.teardown),
        ]);
        report.goal(&format!("time to all online, {name}"), 1.0, "s", found.online.as_secs_f64());
        report.goal(&format!("memory each, {name}"), 64.0, "KiB", each(found.bytes));
    }
    report.publish();
}

fn run(kind: &str) -> Found {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .env(CHILD, kind)
        .stderr(std::process::Stdio::inherit())
        .output()
        .unwrap();
    assert!(child.status.success(), "the fleet did not come up");
    serde_json::from_slice(&child.stdout).unwrap()
}

#[expect(clippy::print_stdout, reason = "what the parent reads")]
fn child(kind: ServerKind) {
    let found = common::tokio_runtime().block_on(measure(kind));
    println!("{}", serde_json::to_string(&found).unwrap());
}

async fn measure(kind: ServerKind) -> Found {
    let script = Arc::new(Script::default());
    let connector = SimConnector::with(move |_, _| SimPlan { kind, ..SimPlan::new(Arc::clone(&script)) });
    let (before, _) = resident();
    let policy = Arc::new(Policy::default());
    let program = ["simulated".to_owned()];
    let specs: Vec<InstanceSpec> = (0..INSTANCES).map(|nth| spec(nth, TEAMS, USERS, &program, &policy)).collect();

    let (began, cpu) = (Instant::now(), CpuClock::start());
    let runtime = start(connector.clone(), NullSink, |_| {}).await;
    for spec in specs {
        runtime.install(spec).await.unwrap();
    }
    // Looking costs as well: now and then is enough, and the first that is missing ends the look.
    while !runtime.snapshot().iter().all(|view| view.status == Status::Online) {
        assert!(began.elapsed() < GIVE_UP, "the fleet does not come up");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (online, online_cpu) = (began.elapsed(), cpu.elapsed());
    assert_eq!(runtime.snapshot().len(), INSTANCES);
    assert_eq!(connector.alive(), INSTANCES);

    // What is over is given back: events that wait, and what the allocator keeps for a moment.
    runtime.flush().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (bytes, bytes_at_most) = resident();

    let began = Instant::now();
    let farewell = runtime.shutdown().await;
    let teardown = began.elapsed();
    assert!(farewell.in_time);
    assert_eq!(connector.alive(), 0);
    Found { online, online_cpu, bytes: bytes - before, bytes_at_most: bytes_at_most - before, teardown }
}
