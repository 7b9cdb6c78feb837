//! Time until simulated servers are online, memory per instance including its server, and the growth of both with the
//! size of the fleet, as a table and as a plot.
//!
//! `BENCH_SIZES=100,1000` measures the growth with these sizes only. The tables are then printed and not stored.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;
#[path = "fleet/plot.rs"]
mod plot;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::BoxFuture;
use mcp_satellite::connect::sim::{ServerKind, SimConnector, SimPlan, SimScript};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::Snapshot;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{Connectors, OpenError, ProcessConnector, ProcessLink};
use serde::{Deserialize, Serialize};

use common::{
    BenchReport, CpuClock, NullSink, TIMEOUT, format_duration, format_number, resident, selected, spec, start,
};
use plot::FleetCost;

const INSTANCES: usize = 10_000;
/// Fleet sizes with the number of runs of each; the median is reported.
const SIZES: [(usize, usize); 4] = [(100, 5), (1_000, 5), (10_000, 5), (100_000, 3)];
const LARGEST: usize = 100_000;
const TEAMS: usize = 100;
const USERS: usize = 10;

const ROUNDS: usize = 5;

const INSTALLS: usize = 64;

const CHILD: &str = "SATELLITE_BENCH_FLEET";

#[derive(Serialize, Deserialize)]
struct FleetFindings {
    online: Duration,
    online_cpu: Duration,
    /// Resident memory in bytes, beyond that of the process before the fleet.
    bytes: usize,
    /// Highest value of `bytes` so far.
    bytes_max: usize,
    /// Peak resident memory of the whole process, in bytes.
    peak: usize,
    shutdown: Duration,
}

fn main() {
    let Ok(arguments) = std::env::var(CHILD) else { return parent() };
    let (kind, instances) = arguments.split_once(' ').unwrap();
    let instances = instances.parse().unwrap();
    let found = common::tokio_runtime().block_on(async {
        match kind {
            "actor" => starting(instances).await,
            "rmcp" => online(instances, ServerKind::Rmcp).await,
            _ => online(instances, ServerKind::Responder).await,
        }
    });
    print(&found);
}

#[expect(clippy::print_stdout, reason = "the parent process reads the output")]
fn print(found: &FleetFindings) {
    println!("{}", serde_json::to_string(found).unwrap());
}

/// Runs each fleet in a separate process, so that it does not reuse memory of another fleet.
fn parent() {
    if selected::<usize>("BENCH_SIZES").is_none() {
        servers();
        memory_shares();
    }
    growth();
}

fn servers() {
    let mut report = BenchReport::new(
        "fleet",
        ["10,000 servers", "time to online", "CPU", "RSS each, KiB", "peak RSS each, KiB", "shutdown"],
    );
    for (kind, name) in [("responder", "hand-written responder"), ("rmcp", "rmcp server")] {
        let found = median_run(kind, INSTANCES, ROUNDS);
        let kib = kib(found.bytes, INSTANCES);
        report.row([
            name.to_owned(),
            format_duration(found.online),
            format_duration(found.online_cpu),
            format_number(kib),
            format_number(self::kib(found.bytes_max, INSTANCES)),
            format_duration(found.shutdown),
        ]);
        // Most of the cost of an rmcp server is its own.
        if kind == "responder" {
            report.goal(&format!("time to online, {name}"), 1.0, "s", found.online.as_secs_f64());
            report.goal(&format!("RSS each, {name}"), 20.0, "KiB", kib);
        }
    }
    report.publish();
}

fn growth() {
    let columns =
        ["servers", "time to online", "CPU", "CPU each", "RSS each, KiB", "peak RSS", "shutdown", "shutdown each"];
    let mut report = BenchReport::new("fleet_sizes", columns);
    let mut costs = Vec::new();
    let sizes: Option<Vec<usize>> = selected("BENCH_SIZES");
    let is_selected = |size: usize| sizes.as_ref().is_none_or(|sizes| sizes.contains(&size));
    for (instances, rounds) in SIZES.into_iter().filter(|(size, _)| is_selected(*size)) {
        let found = median_run("responder", instances, rounds);
        let count = u32::try_from(instances).unwrap();
        let (cpu, kib) = (found.online_cpu / count, kib(found.bytes, instances));
        report.row([
            format_number(instances as f64),
            format_duration(found.online),
            format_duration(found.online_cpu),
            format_duration(cpu),
            format_number(kib),
            format!("{} MiB", format_number(found.peak as f64 / 1024.0 / 1024.0)),
            format_duration(found.shutdown),
            format_duration(found.shutdown / count),
        ]);
        costs.push(FleetCost { servers: instances, online: found.online / count, cpu, kib });
        if instances == LARGEST {
            report.goal("time to online, 100,000 servers", 8.0, "s", found.online.as_secs_f64());
            report.goal("peak RSS, 100,000 servers", 2.0, "GiB", found.peak as f64 / 1024.0 / 1024.0 / 1024.0);
        }
    }
    let of = |servers: usize| costs.iter().find(|cost| cost.servers == servers);
    if let (Some(few), Some(many)) = (of(1_000), of(LARGEST)) {
        report.goal("CPU each, 100,000 / 1,000 servers", 1.3, "×", many.cpu.div_duration_f64(few.cpu));
        report.goal("RSS each, 100,000 / 1,000 servers", 1.3, "×", many.kib / few.kib);
    }
    report.publish();
    common::store("fleet-cost.svg", plot::svg(&costs).as_bytes());
}

/// Measures instances without servers, compared with instances with servers.
fn memory_shares() {
    let mut report = BenchReport::new("fleet_memory", ["10,000 instances", "RSS each, KiB"]);
    for (kind, name) in [("actor", "starting, no server"), ("responder", "online, with server")] {
        report.row([name.to_owned(), format_number(kib(median_run(kind, INSTANCES, ROUNDS).bytes, INSTANCES))]);
    }
    report.publish();
}

fn kib(bytes: usize, instances: usize) -> f64 {
    bytes as f64 / instances as f64 / 1024.0
}

fn median_run(kind: &str, instances: usize, rounds: usize) -> FleetFindings {
    let mut found: Vec<FleetFindings> = (0..rounds).map(|_| run(kind, instances)).collect();
    found.sort_by_key(|found| found.online);
    found.swap_remove(rounds / 2)
}

fn run(kind: &str, instances: usize) -> FleetFindings {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .env(CHILD, format!("{kind} {instances}"))
        .stderr(std::process::Stdio::inherit())
        .output()
        .unwrap();
    assert!(child.status.success(), "the child process failed");
    serde_json::from_slice(&child.stdout).unwrap()
}

async fn online(instances: usize, kind: ServerKind) -> FleetFindings {
    let script = Arc::new(SimScript::default());
    let connector = SimConnector::with_plan(move |_, _| SimPlan { kind, ..SimPlan::new(Arc::clone(&script)) });
    let found = measure(instances, Status::Online, connector.clone(), |_| {}).await;
    assert_eq!(connector.opened_count(), instances as u64);
    assert_eq!(connector.alive_count(), 0);
    found
}

async fn starting(instances: usize) -> FleetFindings {
    measure(instances, Status::Connecting, Connectors::default().with_process(NeverConnector), |options| {
        options.start_permits = usize::MAX;
    })
    .await
}

struct NeverConnector;

impl ProcessConnector for NeverConnector {
    fn open(&self, _: Arc<InstanceSpec>, _: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        Box::pin(std::future::pending())
    }
}

async fn measure(
    instances: usize,
    until: Status,
    connectors: impl Into<Connectors>,
    tune: impl FnOnce(&mut mcp_satellite_actors::RuntimeOptions),
) -> FleetFindings {
    let (before, _) = resident();
    let policy = Arc::new(Policy::default());
    let program = ["simulated".to_owned()];
    let specs: Vec<InstanceSpec> = (0..instances).map(|nth| spec(nth, TEAMS, USERS, &program, &policy)).collect();

    let (began, cpu) = (Instant::now(), CpuClock::start());
    let runtime = start(connectors, NullSink, tune).await;
    let mut installed = futures::stream::iter(specs).map(|spec| runtime.install(spec)).buffer_unordered(INSTALLS);
    while let Some(done) = installed.next().await {
        done.unwrap();
    }
    drop(installed);
    // Polling also costs CPU. `all` stops at the first instance that is not ready.
    let poll_interval = Duration::from_millis(match instances {
        0..=1_000 => 1,
        1_001..=INSTANCES => 5,
        _ => 50,
    });
    // The snapshot of a small fleet may still be empty.
    let is_ready =
        |snapshot: &Snapshot| snapshot.len() == instances && snapshot.iter().all(|view| view.status == until);
    while !is_ready(&runtime.snapshot()) {
        assert!(began.elapsed() < TIMEOUT, "not all instances are ready in time");
        tokio::time::sleep(poll_interval).await;
    }
    let (online, online_cpu) = (began.elapsed(), cpu.elapsed());

    // Wait until temporary memory is freed: queued events and pages held by the allocator.
    runtime.flush().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (bytes, peak) = resident();

    let began = Instant::now();
    let report = runtime.shutdown().await;
    let shutdown = began.elapsed();
    assert!(report.in_time);
    let (bytes, bytes_max) = (bytes.saturating_sub(before), peak.saturating_sub(before));
    FleetFindings { online, online_cpu, bytes, bytes_max, peak, shutdown }
}
