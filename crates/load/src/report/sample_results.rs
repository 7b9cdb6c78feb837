//! Artificial results for tests of the reports.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::measure::Latency;
use crate::types::{
    CallFindings, EventFindings, FaultKind, Invariant, InvariantViolation, LeftoverResources, RunFindings, RunSample,
};

// Results without violations.
pub fn findings_without_violations() -> RunFindings {
    let mut rng = StdRng::seed_from_u64(42);
    let mut spread = |n: usize, median_ms: f64, factor: f64| {
        let mut latency = Latency::default();
        for _ in 0..n {
            let sigmas = (0..6).map(|_| rng.random_range(-1.0..1.0)).sum::<f64>() / 1.4;
            latency.record(Duration::from_secs_f64(median_ms * factor.powf(sigmas) / 1e3));
        }
        latency
    };
    let calls = CallFindings {
        planned: 23_950,
        answered: 23_601,
        failed: 349,
        shed: 0,
        quiet_failed: 0,
        storm_failed: 349,
        neighbours_failed: 0,
        per_second: 393.4,
        quiet: spread(4800, 8.0, 2.0),
        storm: spread(19_000, 9.0, 2.4),
        neighbours: Latency::default(),
        by_fate: [("maybe_executed", 181), ("not_sent", 160), ("timed_out", 8)]
            .map(|(fate, n)| (fate.to_owned(), n))
            .into(),
    };
    let recoveries = [
        (FaultKind::Crash, spread(110, 1010.0, 1.2)),
        (FaultKind::Exit0, spread(60, 1005.0, 1.1)),
        (FaultKind::Hang, spread(7, 7000.0, 1.2)),
        (FaultKind::SessionLost, spread(16, 40.0, 2.0)),
        (FaultKind::Refused, spread(11, 3000.0, 1.6)),
        (FaultKind::WorkerPanic, spread(11, 30.0, 2.0)),
        (FaultKind::TeamPanic, spread(2, 900.0, 1.5)),
    ];
    let injected: BTreeMap<FaultKind, u64> = recoveries.iter().map(|(kind, latency)| (*kind, latency.len())).collect();
    RunFindings {
        repeat: "satellite load --scenario mixed --instances 1000 --teams 50 --seconds 60 --seed 42".to_owned(),
        scenario: "mixed".to_owned(),
        about: "Everything that can go wrong, a little of each, in servers & in our own parts.".to_owned(),
        seed: 42,
        mode: "simulated".to_owned(),
        gateway: false,
        stopped: false,
        trace_ends_early: None,
        machine: crate::measure::machine(),
        instances: 1000,
        teams: 50,
        seconds: 60.0,
        took_seconds: 63.2,
        cpu_seconds: 14.8,
        all_online_ms: 402.0,
        children_cpu_ms: None,
        online: spread(1000, 40.0, 2.0),
        bytes_each: 21_504,
        bytes_each_after: 22_016,
        calls,
        recoveries: recoveries.into(),
        outcomes: BTreeMap::default(),
        injected,
        impossible: [(FaultKind::Huge, 1)].into(),
        never_injected: Vec::new(),
        checked: Vec::new(),
        supervisors: spread(600, 0.2, 2.0),
        registry: spread(600, 0.1, 2.0),
        events: EventFindings { emitted: 31_204, sent: 31_204, failed: 100, dropped: 0, lost: 0 },
        permanently_failed: 3,
        manual_restarts: 4,
        left: LeftoverResources::default(),
        samples: samples(600, &mut rng),
        marks: vec![
            (18_000, "team_panic".to_owned()),
            (24_000, "registry_panic".to_owned()),
            (33_000, "team_panic".to_owned()),
        ],
        order: "7f00d1c3a5b2e496".to_owned(),
        violations: Vec::new(),
        violations_in_all: 0,
    }
}

// Results with violations.
pub fn findings_with_violations() -> RunFindings {
    let violation = |invariant, at_ms, instance: Option<&str>, what: &str| InvariantViolation {
        invariant,
        since_ms: at_ms,
        at_ms,
        instance: instance.map(str::to_owned),
        what: what.to_owned(),
    };
    RunFindings {
        left: LeftoverResources { descriptors: 3, ..LeftoverResources::default() },
        events: EventFindings { lost: 1, ..findings_without_violations().events },
        violations: vec![
            violation(Invariant::OwnAnswer, 12_304, Some("i77"), "the call 2a-3-50 got the answer <b>`2a-3-49`</b>"),
            violation(Invariant::NoGap, 14_001, None, "event 501 is missing, and no event reports it as dropped"),
        ],
        violations_in_all: 12,
        ..findings_without_violations()
    }
}

// Samples distributed over one minute.
pub fn samples(count: u64, rng: &mut StdRng) -> Vec<RunSample> {
    let mut calls = (0, 0);
    let sample = |nth: u64| {
        let at_ms = nth * 60_000 / count;
        let failing = if (12_000..45_000).contains(&at_ms) { rng.random_range(0..14) } else { 0 };
        let starting = if at_ms < 400 { 1000 - u32::try_from(at_ms).unwrap_or(0) * 2 } else { failing / 2 };
        let mut by_status = [0; 12];
        by_status[3] = starting;
        by_status[8] = failing - failing / 2;
        by_status[11] = if at_ms > 30_000 { 3 } else { 0 };
        by_status[6] = 1000 - by_status.iter().sum::<u32>();
        calls = (calls.0 + 24_000 / count, calls.1 + u64::from(failing) / 4);
        RunSample {
            at_ms,
            by_status,
            dormant: 0,
            rss: (60 << 20) + rng.random_range(0..4 << 20),
            descriptors: 34,
            backlog: rng.random_range(0..40),
            dropped: 0,
            calls: calls.0,
            failed: calls.1,
            in_flight: rng.random_range(0..12),
            lag_us: rng.random_range(20..400),
            foreign_cpu_percent: 0,
        }
    };
    (0..count).map(sample).collect()
}
