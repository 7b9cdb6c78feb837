//! Overhead of the start of a server, compared with a bare fork and exec of the same small shell script: the time until
//! its first line, with and without a sandbox; and the CPU time, with and without the spawn helper, of a satellite with
//! little and with much memory.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite::connect::isolation::Isolation;
use mcp_satellite::connect::process::{CgroupMode, spawn_helper_pid, start_spawn_helper};
use mcp_satellite::connect::stdio::{StdioConnector, StdioOptions};
use mcp_satellite::data_dir::DataDir;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::ProcessConnector;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};

use common::{BenchReport, CpuClock, TIMEOUT, format_duration, format_number, median, resident, spec};

const ROUNDS: usize = 101;
const SCRIPT: &str = "echo up; read -r _";
/// Number of starts in a measurement of CPU time.
const STARTS: u32 = 200;
/// Additional memory of a satellite with much memory, in bytes.
const MUCH_MEMORY: usize = 500 << 20;
const CPU_GOAL_MILLIS: f64 = 0.4;

struct MeasuredSandbox {
    sandbox: &'static str,
    containment: &'static str,
    connector: StdioConnector,
}

fn main() {
    // Before any thread exists, as in the binary.
    start_spawn_helper().unwrap();
    common::tokio_runtime().block_on(measure());
}

async fn measure() {
    let data_dir = tempfile::tempdir().unwrap();
    let program = ["/bin/sh", "-c", SCRIPT].map(str::to_owned);
    let spec = Arc::new(spec(0, 1, 1, &program, &Arc::<Policy>::default()));
    let connector = |name: &str| {
        let data_dir = Some(DataDir::create(&data_dir.path().join(name)).unwrap());
        StdioConnector::with_options(StdioOptions { data_dir, ..StdioOptions::default() }).unwrap()
    };
    // The first connector of a process takes its helper.
    let helped = connector("helped");
    measure_cpu(&helped, &connector("alone"), &spec).await;
    let mut subjects =
        vec![MeasuredSandbox { sandbox: "none", containment: "cgroup, spawn helper", connector: helped }];
    for (sandbox, isolation) in
        [("none", Isolation::None), ("bubblewrap", Isolation::Bubblewrap), ("nsjail", Isolation::Nsjail)]
    {
        for (containment, cgroups) in [("cgroup", CgroupMode::Required), ("group or namespace", CgroupMode::Off)] {
            let data_dir = data_dir.path().join(format!("{sandbox}-{}", cgroups == CgroupMode::Off));
            let data_dir = Some(DataDir::create(&data_dir).unwrap());
            let options = StdioOptions { data_dir, isolation, cgroups, ..StdioOptions::default() };
            // Skip sandboxes that this machine lacks.
            let Ok(connector) = StdioConnector::with_options(options) else { continue };
            let found = connector.sandboxes().await;
            let works = found.iter().any(|finding| finding.sandbox == sandbox && finding.usable.is_ok());
            if isolation == Isolation::None || works {
                subjects.push(MeasuredSandbox { sandbox, containment, connector });
            }
        }
    }
    let mut ours: Vec<Vec<Duration>> = vec![Vec::new(); subjects.len()];
    let mut ends: Vec<Vec<Duration>> = vec![Vec::new(); subjects.len()];
    let mut bare = Vec::new();
    for _ in 0..ROUNDS {
        bare.push(bare_start().await);
        for ((subject, ours), ended) in subjects.iter().zip(&mut ours).zip(&mut ends) {
            let (up, end) = measured_start(&subject.connector, &spec).await;
            ours.push(up);
            ended.push(end);
        }
    }
    let mut report = BenchReport::new(
        "spawn",
        ["sandbox", "containment", "first line", "ratio", "difference", "process tree ended"],
    );
    let baseline = median(bare);
    report.row([
        "baseline: bare fork and exec".into(),
        "-".into(),
        format_duration(baseline),
        format_number(1.0),
        "-".into(),
        "-".into(),
    ]);
    for ((subject, ours), ended) in subjects.iter().zip(ours).zip(ends) {
        let median_up = median(ours);
        report.row([
            subject.sandbox.to_owned(),
            subject.containment.to_owned(),
            format_duration(median_up),
            format_number(median_up.div_duration_f64(baseline)),
            format_duration(median_up.saturating_sub(baseline)),
            format_duration(median(ended)),
        ]);
    }
    report.publish();
}

/// CPU time per start: of this process with the helper, and of the children until their end.
struct StartCost {
    satellite: Duration,
    children: Duration,
}

async fn measure_cpu(helped: &StdioConnector, alone: &StdioConnector, spec: &Arc<InstanceSpec>) {
    let mut report = BenchReport::new("spawn_cpu", ["starts", "memory", "CPU of the satellite", "CPU of the server"]);
    let mut ballast = Vec::new();
    for more in [0, MUCH_MEMORY] {
        // Written, so that it is resident.
        ballast.resize(more, 1_u8);
        let memory = format!("{} MB", resident().0 >> 20);
        for (name, connector) in [("with the spawn helper", helped), ("forked by the satellite", alone)] {
            let cost = start_cost(connector, spec).await;
            report.row([name.into(), memory.clone(), format_duration(cost.satellite), format_duration(cost.children)]);
            if name == "with the spawn helper" {
                let name = format!("CPU of the satellite per start, {memory}");
                report.goal(&name, CPU_GOAL_MILLIS, "ms", cost.satellite.as_secs_f64() * 1e3);
            }
        }
    }
    drop(ballast);
    let bare = bare_cost().await;
    report.row([
        "bare fork and exec".into(),
        "-".into(),
        format_duration(bare.satellite),
        format_duration(bare.children),
    ]);
    report.publish();
}

async fn start_cost(connector: &StdioConnector, spec: &Arc<InstanceSpec>) -> StartCost {
    let (children, helper, own) = (children_cpu(), helper_cpu(), CpuClock::start());
    let mut links = Vec::new();
    for _ in 0..STARTS {
        let mut link = connector.open(Arc::clone(spec), RunNumber(1)).await.unwrap();
        first_line(&mut link.reader).await;
        links.push(link);
    }
    let satellite = own.elapsed() + helper_cpu().saturating_sub(helper);
    for mut link in links {
        drop(link.writer);
        tokio::time::timeout(TIMEOUT, link.process.wait_all()).await.unwrap();
    }
    StartCost { satellite: satellite / STARTS, children: children_cpu().saturating_sub(children) / STARTS }
}

async fn bare_cost() -> StartCost {
    let (children, own) = (children_cpu(), CpuClock::start());
    let mut started = Vec::new();
    for _ in 0..STARTS {
        let mut child = spawn_bare();
        first_line(child.stdout.as_mut().unwrap()).await;
        started.push(child);
    }
    let satellite = own.elapsed();
    for mut child in started {
        drop(child.stdin.take());
        tokio::time::timeout(TIMEOUT, child.wait()).await.unwrap().unwrap();
    }
    StartCost { satellite: satellite / STARTS, children: children_cpu().saturating_sub(children) / STARTS }
}

/// Returns the CPU time of all children that were waited for.
fn children_cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap();
    Duration::from_micros((usage.user_time() + usage.system_time()).num_microseconds().unsigned_abs())
}

fn helper_cpu() -> Duration {
    // Nanoseconds on a processor, then two other numbers.
    let text = std::fs::read_to_string(format!("/proc/{}/schedstat", spawn_helper_pid().unwrap())).unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

/// Returns the time from the start to the first line, and from the end of input until the process tree has ended.
async fn measured_start(connector: &StdioConnector, spec: &Arc<InstanceSpec>) -> (Duration, Duration) {
    let began = Instant::now();
    let mut link = connector.open(Arc::clone(spec), RunNumber(1)).await.unwrap();
    first_line(&mut link.reader).await;
    let up = began.elapsed();
    let ending = Instant::now();
    drop(link.writer);
    tokio::time::timeout(TIMEOUT, link.process.wait_all()).await.unwrap();
    (up, ending.elapsed())
}

async fn bare_start() -> Duration {
    let began = Instant::now();
    let mut child = spawn_bare();
    first_line(child.stdout.as_mut().unwrap()).await;
    let up = began.elapsed();
    drop(child.stdin.take());
    tokio::time::timeout(TIMEOUT, child.wait()).await.unwrap().unwrap();
    up
}

fn spawn_bare() -> Child {
    let mut command = Command::new(Path::new("/bin/sh"));
    command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

async fn first_line(reader: &mut (impl AsyncRead + Unpin)) {
    let mut line = String::new();
    tokio::time::timeout(TIMEOUT, BufReader::new(reader).read_line(&mut line)).await.unwrap().unwrap();
    assert_eq!(line, "up\n");
}
