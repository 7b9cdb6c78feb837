//! Calls in a closed loop through each path, with different numbers of clients.

use std::time::Duration;

use crate::common::{BenchReport, format_duration, format_number, quantile, selected};
use crate::endpoint::load::{self, Load, LoadFindings};
use crate::endpoint::median;
use crate::paths::{self, CallPath, PathKind};

const CLIENTS: [usize; 5] = [1, 8, 32, 128, 1_000];
const ROUNDS: usize = 5;
const WARM_UP: Duration = Duration::from_millis(250);

/// Goals in front of `mcp-proxy`.
struct ProxyGoal {
    clients: usize,
    requests_min: f64,
    cpu_max: f64,
    p99_max: f64,
}

const PROXY_GOALS: [ProxyGoal; 5] = [
    ProxyGoal { clients: 1, requests_min: 1.3, cpu_max: 0.7, p99_max: 1.0 },
    ProxyGoal { clients: 8, requests_min: 1.5, cpu_max: 0.5, p99_max: 0.8 },
    ProxyGoal { clients: 32, requests_min: 1.8, cpu_max: 0.5, p99_max: 0.6 },
    ProxyGoal { clients: 128, requests_min: 2.0, cpu_max: 0.4, p99_max: 0.6 },
    ProxyGoal { clients: 1_000, requests_min: 2.0, cpu_max: 0.4, p99_max: 0.6 },
];

/// Number of clients of the goals that do not depend on it.
const GOAL_CLIENTS: usize = 32;

/// Pairs of paths whose ratios are reported.
const COMPARISONS: [(PathKind, PathKind); 10] = [
    (PathKind::Instance, PathKind::McpProxy),
    (PathKind::Instance, PathKind::Rmcp),
    (PathKind::Instance, PathKind::Floor),
    (PathKind::McpProxy, PathKind::Floor),
    (PathKind::InstanceWithoutJournal, PathKind::Instance),
    (PathKind::Traced, PathKind::Unobserved),
    (PathKind::Execute, PathKind::Instance),
    (PathKind::Flat, PathKind::Instance),
    (PathKind::StatelessInstance, PathKind::Instance),
    (PathKind::StatelessExecute, PathKind::Instance),
];

/// Rounds of one path with one number of clients.
#[derive(Default)]
struct PathRounds {
    found: Vec<LoadFindings>,
    /// The gateway returned no response in the last round and was not measured further.
    hangs: bool,
}

/// Ratios of two paths: medians of the ratios of rounds with the same number.
struct PathRatios {
    requests: f64,
    cpu: f64,
    p50: f64,
    p99: f64,
}

pub(crate) fn measure() {
    let paths = paths::open();
    let mut table = BenchReport::new(
        "gateway",
        [
            "path",
            "clients",
            "requests/s",
            "p50",
            "p99",
            "CPU per call",
            "client's CPU",
            "reads per call",
            "RSS",
            "failed calls",
        ],
    );
    let mut ratios =
        BenchReport::new("gateway_ratios", ["paths", "clients", "requests/s", "CPU per call", "p50", "p99"]);
    let mut failed = 0;
    for clients in selected("BENCH_CLIENTS").unwrap_or_else(|| CLIENTS.to_vec()) {
        let rounds = rounds(&paths, clients);
        for (path, rounds) in paths.iter().zip(&rounds) {
            if let Some(row) = rounds.row(path.kind, clients) {
                table.row(row);
            }
            if !matches!(path.kind, PathKind::Floor | PathKind::Rmcp | PathKind::McpProxy) {
                failed += rounds.failed();
            }
        }
        let of = |kind| paths.iter().zip(&rounds).find(|(path, _)| path.kind == kind).map(|(_, rounds)| rounds);
        let of = |kind| of(kind).filter(|rounds: &&PathRounds| !rounds.found.is_empty());
        for (ours, baseline) in COMPARISONS {
            let (Some(found), Some(found_baseline)) = (of(ours), of(baseline)) else { continue };
            let found = found.ratios(found_baseline);
            let [requests, cpu, p50, p99] = [found.requests, found.cpu, found.p50, found.p99].map(format_number);
            ratios.row([
                format!("{} / {}", ours.title(), baseline.title()),
                clients.to_string(),
                requests,
                cpu,
                p50,
                p99,
            ]);
            goals(&mut ratios, (ours, baseline), &found, clients);
        }
        if let Some(rounds) = of(PathKind::Instance).filter(|_| clients == GOAL_CLIENTS) {
            let reads = rounds.median(|found| found.reads_per_call);
            table.goal(&format!("reads per call, {}, clients: {clients}", PathKind::Instance.title()), 0.3, "", reads);
        }
    }
    table.goal("failed calls of the satellite, all rounds", 0.0, "", f64::from(failed));
    table.publish();
    ratios.publish();
}

/// Measures the paths in turns. Every second round takes them in the reverse order.
fn rounds(paths: &[CallPath], clients: usize) -> Vec<PathRounds> {
    let seconds: f64 = selected("BENCH_SECONDS").map_or(1.0, |seconds| seconds[0]);
    let rounds = selected("BENCH_ROUNDS").map_or(ROUNDS, |rounds| rounds[0]);
    let mut found: Vec<_> = paths.iter().map(|_| PathRounds::default()).collect();
    for round in 0..rounds {
        for turn in 0..paths.len() {
            let nth = if round % 2 == 0 { turn } else { paths.len() - 1 - turn };
            let CallPath { gateway, target, .. } = &paths[nth];
            if found[nth].hangs {
                continue;
            }
            let duration = Duration::from_secs_f64(seconds);
            let load = Load { clients, warm_up: WARM_UP, duration, rate: None, pid: gateway.pid, journal_index: None };
            let of_round = load::run(target, &load);
            found[nth].hangs = of_round.is_none();
            found[nth].found.extend(of_round);
        }
    }
    found
}

/// Adds the goals of a comparison.
fn goals(report: &mut BenchReport, (ours, baseline): (PathKind, PathKind), found: &PathRatios, clients: usize) {
    let name = |value: &str| format!("{value}, {} / {}, clients: {clients}", ours.title(), baseline.title());
    match (ours, baseline) {
        (PathKind::Instance, PathKind::McpProxy) => {
            let Some(goal) = PROXY_GOALS.iter().find(|goal| goal.clients == clients) else { return };
            report.goal_at_least(&name("requests/s"), goal.requests_min, "×", found.requests);
            report.goal(&name("CPU per call"), goal.cpu_max, "×", found.cpu);
            report.goal(&name("p99"), goal.p99_max, "×", found.p99);
        }
        (PathKind::Traced, PathKind::Unobserved) if clients == GOAL_CLIENTS => {
            report.goal_at_least(&name("requests/s"), 0.97, "×", found.requests);
            report.goal(&name("CPU per call"), 1.03, "×", found.cpu);
        }
        (PathKind::Instance, PathKind::Floor) if clients == GOAL_CLIENTS => {
            report.goal(&name("CPU per call"), 3.5, "×", found.cpu);
        }
        (
            PathKind::Execute | PathKind::Flat | PathKind::StatelessInstance | PathKind::StatelessExecute,
            PathKind::Instance,
        ) if clients == GOAL_CLIENTS => {
            report.goal(&name("CPU per call"), 1.15, "×", found.cpu);
            report.goal(&name("p50"), 1.15, "×", found.p50);
        }
        _ => {}
    }
}

impl PathRounds {
    /// Returns `None` if no round was measured.
    fn row(&self, kind: PathKind, clients: usize) -> Option<[String; 10]> {
        if self.found.is_empty() {
            return None;
        }
        let duration =
            |value: fn(&LoadFindings) -> Duration| format_duration(quantile(self.found.iter().map(value), 0.5));
        let failed = if self.hangs { "hangs".to_owned() } else { self.failed().to_string() };
        Some([
            kind.title().to_owned(),
            clients.to_string(),
            format_number(self.median(LoadFindings::per_second)),
            duration(|found| found.p50),
            duration(|found| found.p99),
            duration(LoadFindings::cpu_per_call),
            duration(|found| found.client_cpu / found.calls),
            format_number(self.median(|found| found.reads_per_call)),
            format!("{} MiB", format_number(self.median(|found| found.resident as f64 / 1024.0 / 1024.0))),
            failed,
        ])
    }

    fn failed(&self) -> u32 {
        self.found.iter().map(|found| found.closed + found.unanswered).sum()
    }

    fn median(&self, value: impl Fn(&LoadFindings) -> f64) -> f64 {
        median(self.found.iter().map(value))
    }

    fn ratios(&self, baseline: &Self) -> PathRatios {
        let of = |value: fn(&LoadFindings) -> f64| {
            median(self.found.iter().zip(&baseline.found).map(|(ours, baseline)| value(ours) / value(baseline)))
        };
        PathRatios {
            requests: of(LoadFindings::per_second),
            cpu: of(|found| found.cpu_per_call().as_secs_f64()),
            p50: of(|found| found.p50.as_secs_f64()),
            p99: of(|found| found.p99.as_secs_f64()),
        }
    }
}
