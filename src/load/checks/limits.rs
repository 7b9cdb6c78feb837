//! What a scenario asks for beyond what must always hold. The numbers are measured by others.

use std::time::Duration;

use super::super::measure::Latency;
use crate::load::scenario::Limits;
use crate::load::types::{Invariant, Nth, Sample, Violation};

/// One value of each sample.
type Curve = fn(&Sample) -> u64;

/// With fewer calls than this a 99th percentile says nothing.
const CALLS_MIN: u64 = 500;

/// Whether somebody came back too late: `took` from the fault at `at` on, where its policy made it wait for `delay` and its
/// handshake takes `handshake`.
pub fn recovery(
    limits: &Limits,
    nth: Nth,
    at: Duration,
    took: Duration,
    delay: Duration,
    handshake: Duration,
) -> Option<Violation> {
    let allowed = delay + handshake + limits.recovery_slack;
    (took > allowed).then(|| Violation {
        invariant: Invariant::Recovery,
        at_ms: millis(at + took),
        instance: Some(format!("i{}", nth.0)),
        what: format!("it was back {} ms after the fault, where {} ms are allowed", millis(took), millis(allowed)),
    })
}

/// Whether calls to teams that no fault befell were slower than the same teams' calls before the faults. With too few of
/// either nothing is said.
pub fn neighbours(limits: &Limits, at: Duration, quiet: &Latency, storm: &Latency) -> Option<Violation> {
    let times = limits.neighbours?;
    if quiet.len() < CALLS_MIN || storm.len() < CALLS_MIN {
        return None;
    }
    let (before, during) = (quiet.quantile(0.99), storm.quantile(0.99));
    (during > before.mul_f64(times)).then(|| Violation {
        invariant: Invariant::Neighbours,
        at_ms: millis(at),
        instance: None,
        what: format!(
            "99 % of calls to teams that no fault befell took up to {:.1} ms, and {:.1} ms before; {times} × is allowed",
            during.as_secs_f64() * 1e3,
            before.as_secs_f64() * 1e3
        ),
    })
}

/// Whether memory and descriptors at the end are more than they were: the medians of the samples in the second quarter of
/// the run against those in the last sixth.
pub fn flat(limits: &Limits, samples: &[Sample]) -> Vec<Violation> {
    let (Some(share), Some(end)) = (limits.flat, samples.last().map(|sample| sample.at_ms)) else { return Vec::new() };
    let median = |from: u64, until: u64, value: fn(&Sample) -> u64| {
        let mut values: Vec<u64> =
            samples.iter().filter(|sample| (from..=until).contains(&sample.at_ms)).map(value).collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied()
    };
    let mut violations = Vec::new();
    let curves: [(&str, Curve); 2] =
        [("bytes of memory", |sample| sample.rss), ("descriptors", |sample| sample.descriptors.into())];
    for (what, value) in curves {
        let before = median(end / 4, end / 2, value);
        let after = median(end - end / 6, end, value);
        let (Some(before), Some(after)) = (before, after) else { continue };
        if after as f64 > before as f64 * (1.0 + share) {
            let what = format!("{after} {what} at the end, and {before} before; {} % more are allowed", share * 100.0);
            violations.push(Violation { invariant: Invariant::Flat, at_ms: end, instance: None, what });
        }
    }
    violations
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
