//! Results of `satellite load` for large fleets: whether a crash storm in some teams affects others, the recovery time
//! from each kind of fault, and the overhead at the start of 300 real processes.
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on says so by panicking")]

#[expect(dead_code, reason = "each bench uses its part of it")]
mod common;

use std::time::Duration;

use mcp_satellite::load::measure::cores;
use serde_json::Value;

use common::{BenchReport, format_duration, format_number, harness, median};

const SEED: &str = "1";

const ROUNDS: usize = 5;

fn main() {
    storm();
    recoveries();
    children();
}

fn milliseconds(value: &Value) -> Duration {
    Duration::from_secs_f64(value.as_f64().unwrap_or_else(|| panic!("{value} is no time")) / 1e3)
}

/// Formats a quantile of a latency; a dash if there are no samples.
fn at(latency: &Value, quantile: &str) -> String {
    if latency["n"] == 0 { "-".to_owned() } else { format_duration(milliseconds(&latency[quantile])) }
}

/// Crashes a third of 10,000 servers at once.
fn storm() {
    let found = harness(&["--scenario", "storm", "--seed", SEED]);
    let mut report = BenchReport::new("storm", ["10,000 servers", "n", "median", "99 %", "longest"]);
    let rows = [
        ("calls, before", &found["calls"]["quiet"]),
        ("calls to other teams, for 3 s from the crashes", &found["calls"]["neighbours"]),
        ("from the crash until online", &found["recoveries"]["crash"]),
    ];
    for (name, latency) in rows {
        let n = latency["n"].as_f64().unwrap();
        report.row([name.to_owned(), format_number(n), at(latency, "p50"), at(latency, "p99"), at(latency, "max")]);
    }
    let [quiet, storm] = ["quiet", "neighbours"].map(|kind| milliseconds(&found["calls"][kind]["p99"]));
    report.goal("99 % of calls to other teams, against before", 2.0, "×", storm.div_duration_f64(quiet));
    // The first restart comes after one second; jitter may add another.
    let longest = milliseconds(&found["recoveries"]["crash"]["max"]);
    report.goal("the last is online after", 2.0, "s", longest.as_secs_f64());
    report.goal("promises broken", 0.0, "", found["violations_in_all"].as_f64().unwrap());
    report.publish();
}

fn recoveries() {
    let found = harness(&["--scenario", "mixed", "--seed", SEED]);
    let mut report =
        BenchReport::new("recoveries", ["until its victim is online, from", "n", "median", "99 %", "longest"]);
    for (kind, latency) in found["recoveries"].as_object().unwrap() {
        let n = latency["n"].as_f64().unwrap();
        report.row([kind.clone(), format_number(n), at(latency, "p50"), at(latency, "p99"), at(latency, "max")]);
    }
    report.goal("promises broken", 0.0, "", found["violations_in_all"].as_f64().unwrap());
    report.publish();
}

/// Starts 300 processes that do almost no work.
fn children() {
    let scenario = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/children.toml");
    let found = (0..ROUNDS).map(|_| harness(&["--scenario", scenario, "--seed", SEED, "--real"]));
    let found: Vec<(Duration, Duration)> =
        found.map(|found| (milliseconds(&found["all_online_ms"]), milliseconds(&found["children_cpu_ms"]))).collect();
    let mut report = BenchReport::new("children", ["300 processes", "median"]);
    let (online, cpu) = (median(found.iter().map(|found| found.0)), median(found.iter().map(|found| found.1)));
    let cores = u32::try_from(cores()).unwrap();
    report.row(["until all are online".to_owned(), format_duration(online)]);
    report.row(["their own CPU time until then, by the cores".to_owned(), format_duration(cpu / cores)]);
    let mut ratios: Vec<f64> = found.iter().map(|(online, cpu)| online.div_duration_f64(*cpu / cores)).collect();
    ratios.sort_by(f64::total_cmp);
    report.goal("until 300 processes are online, against their own CPU", 1.2, "×", ratios[ROUNDS / 2]);
    report.publish();
}
