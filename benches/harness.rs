//! Results of `satellite load`: latency of calls during a crash storm in other teams, recovery time for each kind of
//! fault, and overhead at the start of 300 real processes.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::time::Duration;

use mcp_satellite::load::measure::cores;
use serde_json::Value;

use common::{BenchReport, format_duration, format_number, median, run_harness};

const SEED: &str = "1";

const ROUNDS: usize = 5;

fn main() {
    storm();
    recoveries();
    children();
}

fn milliseconds(value: &Value) -> Duration {
    Duration::from_secs_f64(value.as_f64().unwrap_or_else(|| panic!("{value} is not a number of milliseconds")) / 1e3)
}

/// Formats a quantile of a latency; a dash if there are no samples.
fn cell(latency: &Value, quantile: &str) -> String {
    if latency["n"] == 0 { "-".to_owned() } else { format_duration(milliseconds(&latency[quantile])) }
}

/// Crashes a third of 10,000 servers at once.
fn storm() {
    let found = run_harness(&["--scenario", "storm", "--seed", SEED]);
    let mut report = BenchReport::new("storm", ["10,000 servers", "n", "p50", "p99", "max"]);
    let rows = [
        ("calls before the crashes", &found["calls"]["quiet"]),
        ("calls to other teams, first 3 s after the crashes", &found["calls"]["neighbours"]),
        ("crash until online", &found["recoveries"]["crash"]),
    ];
    for (name, latency) in rows {
        let n = latency["n"].as_f64().unwrap();
        report.row([
            name.to_owned(),
            format_number(n),
            cell(latency, "p50"),
            cell(latency, "p99"),
            cell(latency, "max"),
        ]);
    }
    let [before, during] = ["quiet", "neighbours"].map(|kind| milliseconds(&found["calls"][kind]["p99"]));
    report.goal("p99 of calls to other teams, after / before the crashes", 2.0, "×", during.div_duration_f64(before));
    // The first restart is due after one second.
    let max = milliseconds(&found["recoveries"]["crash"]["max"]);
    report.goal("crash until online, max", 2.0, "s", max.as_secs_f64());
    report.goal("violations reported by the harness", 0.0, "", found["violations_in_all"].as_f64().unwrap());
    report.publish();
}

fn recoveries() {
    let found = run_harness(&["--scenario", "mixed", "--seed", SEED]);
    let mut report = BenchReport::new("recoveries", ["fault", "n", "p50", "p99", "max"]);
    for (kind, latency) in found["recoveries"].as_object().unwrap() {
        let n = latency["n"].as_f64().unwrap();
        report.row([kind.clone(), format_number(n), cell(latency, "p50"), cell(latency, "p99"), cell(latency, "max")]);
    }
    report.goal("violations reported by the harness", 0.0, "", found["violations_in_all"].as_f64().unwrap());
    report.publish();
}

/// Starts 300 processes that do almost no work.
fn children() {
    let scenario = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/children.toml");
    let found = (0..ROUNDS).map(|_| run_harness(&["--scenario", scenario, "--seed", SEED, "--real"]));
    let found: Vec<(Duration, Duration)> =
        found.map(|found| (milliseconds(&found["all_online_ms"]), milliseconds(&found["children_cpu_ms"]))).collect();
    let mut report = BenchReport::new("children", ["300 processes", "median"]);
    let (online, cpu) = (median(found.iter().map(|found| found.0)), median(found.iter().map(|found| found.1)));
    let cores = u32::try_from(cores()).unwrap();
    report.row(["time until all are online".to_owned(), format_duration(online)]);
    report.row(["CPU time of the processes / cores".to_owned(), format_duration(cpu / cores)]);
    let mut ratios: Vec<f64> = found.iter().map(|(online, cpu)| online.div_duration_f64(*cpu / cores)).collect();
    ratios.sort_by(f64::total_cmp);
    report.goal("time until all are online / CPU time of the processes per core", 1.2, "×", ratios[ROUNDS / 2]);
    report.publish();
}
