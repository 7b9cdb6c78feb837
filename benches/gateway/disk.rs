//! Disk writes of the satellite for each call, at constant rates of calls.

use std::time::Duration;

use crate::common::{BenchReport, format_duration, format_number, selected};
use crate::endpoint::load::{self, Load};
use crate::endpoint::processes::{DiskWrites, SatelliteOptions, ServerFleet, satellite};
use crate::paths::PathKind;

const RATES: [u32; 5] = [1, 10, 100, 1_000, 10_000];
const CLIENTS: usize = 64;

/// Rate from which the goals apply.
const GOAL_RATE: u32 = 1_000;

/// Goal for the interval of transactions at lower rates.
const TRANSACTION_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) fn measure() {
    let mut report = BenchReport::new(
        "disk",
        ["request logging", "calls/s", "written per call", "written per second", "transactions/s", "p50", "p99"],
    );
    let seconds: f64 = selected("BENCH_SECONDS").map_or(10.0, |seconds| seconds[0]);
    for (has_request_logging, title, goal) in [(true, "on", 0.6), (false, "off", 0.4)] {
        let gateway =
            satellite(ServerFleet::ONE, SatelliteOptions { has_request_logging, ..SatelliteOptions::default() });
        let target = PathKind::Instance.target(gateway.address);
        for rate in selected("BENCH_RATES").unwrap_or_else(|| RATES.to_vec()) {
            let load = Load {
                clients: CLIENTS,
                warm_up: Duration::ZERO,
                duration: Duration::from_secs_f64(seconds),
                rate: Some(f64::from(rate)),
                pid: gateway.pid,
                journal_index: Some(gateway.data_file("journal/journal.db-shm")),
            };
            let found = load::run(&target, &load).unwrap();
            let DiskWrites { bytes, transactions } = found.disk.unwrap();
            let bytes = bytes as f64;
            let kb_per_call = bytes / f64::from(found.calls) / 1000.0;
            // At a low rate, the last response arrives an interval before the end.
            let wall = found.wall.max(load.duration);
            let per_second = |value: f64| format_number(value / wall.as_secs_f64());
            report.row([
                title.to_owned(),
                per_second(f64::from(found.calls)),
                format!("{} KB", format_number(kb_per_call)),
                format!("{} KB", per_second(bytes / 1000.0)),
                transactions.map_or_else(|| "-".to_owned(), |count| per_second(f64::from(count))),
                format_duration(found.p50),
                format_duration(found.p99),
            ]);
            if rate >= GOAL_RATE {
                report.goal(
                    &format!("written per call, request logging {title}, {rate} calls/s"),
                    goal,
                    "KB",
                    kb_per_call,
                );
            } else if let Some(transactions) = transactions {
                // The last transaction may follow the last call by one interval.
                let rate_found = f64::from(transactions) / (wall + TRANSACTION_INTERVAL).as_secs_f64();
                report.goal(
                    &format!("transactions/s, request logging {title}, {rate} calls/s"),
                    1.0 / TRANSACTION_INTERVAL.as_secs_f64(),
                    "",
                    rate_found,
                );
            }
        }
    }
    report.publish();
}
