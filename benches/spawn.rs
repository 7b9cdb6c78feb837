//! Overhead of the start of a server, with and without a sandbox: time until the first line of a small shell script,
//! compared with a bare fork and exec of the same script.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite::connect::isolation::Isolation;
use mcp_satellite::connect::process::CgroupMode;
use mcp_satellite::connect::stdio::{StdioConnector, StdioOptions};
use mcp_satellite::data_dir::DataDir;
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::ProcessConnector;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Command;

use common::{BenchReport, TIMEOUT, format_duration, format_number, median, spec};

const ROUNDS: usize = 101;
const SCRIPT: &str = "echo up; read -r _";

struct MeasuredSandbox {
    sandbox: &'static str,
    containment: &'static str,
    connector: StdioConnector,
}

fn main() {
    common::tokio_runtime().block_on(measure());
}

async fn measure() {
    let data_dir = tempfile::tempdir().unwrap();
    let mut subjects = Vec::new();
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
    let program = ["/bin/sh", "-c", SCRIPT].map(str::to_owned);
    let spec = Arc::new(spec(0, 1, 1, &program, &Arc::<Policy>::default()));
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
    let mut command = Command::new(Path::new("/bin/sh"));
    command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    first_line(child.stdout.as_mut().unwrap()).await;
    let up = began.elapsed();
    drop(child.stdin.take());
    tokio::time::timeout(TIMEOUT, child.wait()).await.unwrap().unwrap();
    up
}

async fn first_line(reader: &mut (impl AsyncRead + Unpin)) {
    let mut line = String::new();
    tokio::time::timeout(TIMEOUT, BufReader::new(reader).read_line(&mut line)).await.unwrap().unwrap();
    assert_eq!(line, "up\n");
}
