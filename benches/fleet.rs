//! Time until simulated servers are online, memory of each instance including its server, and how both grow with the
//! size of the fleet.
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on says so by panicking")]

#[expect(dead_code, reason = "each bench uses its part of it")]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::BoxFuture;
use mcp_satellite::connect::sim::{ServerKind, SimConnector, SimPlan, SimScript};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{Connectors, OpenError, ProcessConnector, ProcessLink};
use serde::{Deserialize, Serialize};

use common::{BenchReport, CpuClock, GIVE_UP, NullSink, format_duration, format_number, resident, spec, start};

const INSTANCES: usize = 10_000;
/// Fleet sizes with the number of runs of each; the median is reported.
const SIZES: [(usize, usize); 3] = [(1_000, 5), (10_000, 5), (100_000, 1)];
const TEAMS: usize = 100;
const USERS: usize = 10;

const ROUNDS: usize = 5;

const INSTALLS: usize = 64;

const CHILD: &str = "SATELLITE_BENCH_FLEET";

#[derive(Serialize, Deserialize)]
struct FleetFindings {
    online: Duration,
    online_cpu: Duration,
    bytes: usize,
    bytes_at_most: usize,
    peak: usize,
    teardown: Duration,
}

fn main() {
    let Ok(wanted) = std::env::var(CHILD) else { return parent() };
    let (kind, instances) = wanted.split_once(' ').unwrap();
    let instances = instances.parse().unwrap();
    let found = common::tokio_runtime().block_on(async {
        match kind {
            "actor" => starting(instances).await,
            "rmcp" => online(instances, ServerKind::Rmcp).await,
            _ => online(instances, ServerKind::Responder).await,
        }
    });
    answer(&found);
}

#[expect(clippy::print_stdout, reason = "what the parent reads")]
fn answer(found: &FleetFindings) {
    println!("{}", serde_json::to_string(found).unwrap());
}

/// Runs each fleet in a separate process, so that it does not reuse memory of another fleet.
fn parent() {
    let mut report =
        BenchReport::new("fleet", ["10,000 servers", "online", "CPU", "KiB each", "KiB each, at most", "torn down"]);
    for (kind, name) in [("responder", "hand-written responder"), ("rmcp", "rmcp's server")] {
        let found = middle(kind, INSTANCES, ROUNDS);
        let kib = kib(found.bytes, INSTANCES);
        report.row([
            name.to_owned(),
            format_duration(found.online),
            format_duration(found.online_cpu),
            format_number(kib),
            format_number(self::kib(found.bytes_at_most, INSTANCES)),
            format_duration(found.teardown),
        ]);
        report.goal(&format!("time to all online, {name}"), 1.0, "s", found.online.as_secs_f64());
        report.goal(&format!("memory each, {name}"), 64.0, "KiB", kib);
    }
    report.publish();
    sizes();
    shares();
}

fn sizes() {
    let columns = ["servers", "online", "CPU", "CPU each", "KiB each", "peak", "torn down", "torn down, each"];
    let mut report = BenchReport::new("fleet_sizes", columns);
    let mut all = Vec::new();
    for (instances, rounds) in SIZES {
        let found = middle("responder", instances, rounds);
        let share = u32::try_from(instances).unwrap();
        let (cpu, kib) = (found.online_cpu / share, kib(found.bytes, instances));
        report.row([
            format_number(instances as f64),
            format_duration(found.online),
            format_duration(found.online_cpu),
            format_duration(cpu),
            format_number(kib),
            format!("{} MiB", format_number(found.peak as f64 / 1024.0 / 1024.0)),
            format_duration(found.teardown),
            format_duration(found.teardown / share),
        ]);
        all.push((found, cpu, kib));
    }
    let [(_, few_cpu, few_kib), _, (many, many_cpu, many_kib)] = &all[..] else { panic!("three sizes") };
    report.goal("time until 100,000 are online", 15.0, "s", many.online.as_secs_f64());
    report.goal("memory of 100,000, at most", 8.0, "GiB", many.peak as f64 / 1024.0 / 1024.0 / 1024.0);
    report.goal("CPU each at 100,000 against 1,000", 1.3, "×", many_cpu.div_duration_f64(*few_cpu));
    report.goal("memory each at 100,000 against 1,000", 1.3, "×", many_kib / few_kib);
    report.publish();
}

/// Measures an instance without a server, compared with one that has a server.
fn shares() {
    let mut report = BenchReport::new("fleet_memory", ["10,000 instances", "KiB each"]);
    for (kind, name) in [
        ("actor", "no server: spec, slot, view and the actor that waits"),
        ("responder", "online, its server counted in"),
    ] {
        report.row([name.to_owned(), format_number(kib(middle(kind, INSTANCES, ROUNDS).bytes, INSTANCES))]);
    }
    report.publish();
}

fn kib(bytes: usize, instances: usize) -> f64 {
    bytes as f64 / instances as f64 / 1024.0
}

fn middle(kind: &str, instances: usize, rounds: usize) -> FleetFindings {
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
    assert!(child.status.success(), "the fleet did not come up");
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
    // Polling costs CPU as well, so it is rare; `all` stops at the first instance that is not ready.
    let look_again_after = Duration::from_millis(if instances > INSTANCES { 50 } else { 5 });
    while !runtime.snapshot().iter().all(|view| view.status == until) {
        assert!(began.elapsed() < GIVE_UP, "the fleet does not come up");
        tokio::time::sleep(look_again_after).await;
    }
    let (online, online_cpu) = (began.elapsed(), cpu.elapsed());
    assert_eq!(runtime.snapshot().len(), instances);

    // Wait until temporary memory is freed: queued events and pages held by the allocator.
    runtime.flush().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (bytes, peak) = resident();

    let began = Instant::now();
    let farewell = runtime.shutdown().await;
    let teardown = began.elapsed();
    assert!(farewell.in_time);
    let (bytes, bytes_at_most) = (bytes.saturating_sub(before), peak.saturating_sub(before));
    FleetFindings { online, online_cpu, bytes, bytes_at_most, peak, teardown }
}
