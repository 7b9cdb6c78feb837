//! Checks of the limits that a scenario sets. The measurements are made elsewhere.

use std::time::Duration;

use super::super::measure::Latency;
use crate::scenario::ScenarioLimits;
use crate::types::{InstanceNo, Invariant, InvariantViolation, RunSample};

type SampleValue = fn(&RunSample) -> u64;

// Minimum number of calls for a meaningful 99th percentile.
const CALLS_MIN: u64 = 500;
// Minimum duration in real time. In a shorter run growth is only the warm-up of the harness and its allocator, which
// returns memory by real time even if the time of the run is virtual.
const FLAT_MIN: Duration = Duration::from_secs(600);

// Number of windows; the minimum of each window counts.
const WINDOWS: u64 = 9;

// Share of the pairs of windows in which the later one must be higher for growth to be steady. With nine windows that
// happens by chance in less than 1 % of runs.
const RISING_PAIRS_MIN: f64 = 5.0 / 6.0;

// CPU time used by other programs, in percent of all cores, from which the machine counts as overloaded.
const STARVED_PERCENT: u64 = 60;

// Period around a violation in which CPU time counts: load just before it can also delay a response.
const STARVED_BEFORE_MS: u64 = 5_000;
const STARVED_AFTER_MS: u64 = 2_000;

/// Returns a violation if the recovery from the fault at `at` was too slow. `took` may be at most the restart delay of
/// the policy, plus the handshake, plus the slack of the limits.
pub fn check_recovery(
    limits: &ScenarioLimits,
    nth: InstanceNo,
    at: Duration,
    took: Duration,
    delay: Duration,
    handshake: Duration,
) -> Option<InvariantViolation> {
    let allowed = delay + handshake + limits.recovery_slack;
    (took > allowed).then(|| InvariantViolation {
        invariant: Invariant::Recovery,
        since_ms: millis(at),
        at_ms: millis(at + took),
        instance: Some(format!("i{}", nth.0)),
        what: format!("the instance recovered {} ms after the fault; {} ms are allowed", millis(took), millis(allowed)),
    })
}

/// Checks that calls to teams without a fault were not slower after a large fault than before the first fault. A call
/// that failed or was not made counts as slower than all others. Returns an error if there are too few calls.
pub(super) fn check_neighbours(
    limits: &ScenarioLimits,
    at: Duration,
    quiet: &Latency,
    storm: &Latency,
    failed: u64,
) -> Result<Option<InvariantViolation>, String> {
    let Some(times) = limits.neighbours else { return Ok(None) };
    let calls = storm.len() + failed;
    if quiet.len() < CALLS_MIN || calls < CALLS_MIN {
        return Err(format!(
            "{} calls before and {calls} after the faults; {CALLS_MIN} of each are required",
            quiet.len()
        ));
    }
    let before = quiet.quantile(0.99);
    let violation = |took: &str| InvariantViolation {
        invariant: Invariant::Neighbours,
        since_ms: 0,
        at_ms: millis(at),
        instance: None,
        what: format!(
            "{took}; before the faults 99 % of them took up to {:.1} ms, and {times} × of that is allowed",
            before.as_secs_f64() * 1e3
        ),
    };
    // Percentile over all calls, with the failed ones after the successful ones.
    let share = 0.99 * calls as f64 / storm.len().max(1) as f64;
    if share > 1.0 {
        return Ok(Some(violation(&format!("{failed} of {calls} calls to teams without a fault failed"))));
    }
    let during = storm.quantile(share);
    let took = format!("99 % of calls to teams without a fault took up to {:.1} ms", during.as_secs_f64() * 1e3);
    Ok((during > before.mul_f64(times)).then(|| violation(&took)))
}

/// Creates the violation for a failed call that no fault of its team explains. `why` is the error of the caller.
pub fn unexcused_failure(at: Duration, nth: InstanceNo, token: &str, why: &str) -> InvariantViolation {
    // The error may have any length.
    let why: String = why.chars().take(200).collect();
    InvariantViolation {
        invariant: Invariant::OnlineIsCallable,
        since_ms: millis(at),
        at_ms: millis(at),
        instance: Some(format!("i{}", nth.0)),
        what: format!("the call {token} failed, and no fault had hit its team: {why}"),
    }
}

/// Checks whether memory or descriptors grow over time. The last three fifths of the run are divided into windows of
/// equal length, and the minimum of each window counts: a burst of calls raises the memory that an allocator holds for
/// a while, but only a leak raises its floor. The growth is the median slope between all pairs of windows, so a single
/// burst, even at the end, does not count. Growth counts only if it is steady, which means that the later window is
/// higher in [`RISING_PAIRS_MIN`] of all pairs (Kendall's trend test): the calls in flight, and the descriptors of
/// their connections, rise and fall over minutes. The first two fifths are left out: memory grows there when each
/// instance restarts for the first time. The error is the reason why there is no result, such as a run that was too
/// short.
pub(super) fn check_flat(
    limits: &ScenarioLimits,
    samples: &[RunSample],
    took: Duration,
) -> Result<Vec<InvariantViolation>, String> {
    let Some(share) = limits.flat else { return Ok(Vec::new()) };
    let end = samples.last().map_or(0, |sample| sample.at_ms);
    if took < FLAT_MIN {
        let (took, least) = (Duration::from_secs(took.as_secs()), humantime::format_duration(FLAT_MIN));
        let took = humantime::format_duration(took);
        return Err(format!("the run took {took}; runs of less than {least} consist of warm-up only"));
    }
    let from = end / 5 * 2;
    let floor = |window: u64, value: SampleValue| {
        let edge = |window: u64| from + (end - from) * window / WINDOWS;
        let within = samples.iter().filter(|sample| (edge(window)..=edge(window + 1)).contains(&sample.at_ms));
        within.map(value).min()
    };
    let mut violations = Vec::new();
    let curves: [(&str, SampleValue); 2] =
        [("bytes of memory", |sample| sample.rss), ("descriptors", |sample| sample.descriptors.into())];
    for (what, value) in curves {
        let floors: Option<Vec<u64>> = (0..WINDOWS).map(|window| floor(window, value)).collect();
        let Some(floors) = floors else { return Err(format!("there are too few samples of {what}")) };
        let mut slopes = Vec::new();
        for (at, first) in floors.iter().enumerate() {
            slopes.extend(
                (1..).zip(&floors[at + 1..]).map(|(apart, last)| (*last as f64 - *first as f64) / f64::from(apart)),
            );
        }
        slopes.sort_by(f64::total_cmp);
        let rising = slopes.iter().filter(|slope| **slope > 0.0).count() as f64;
        let is_steady = rising >= slopes.len() as f64 * RISING_PAIRS_MIN;
        let growth = slopes[slopes.len() / 2] * (WINDOWS - 1) as f64;
        let before = floors.iter().take(3).min().copied().unwrap_or_default() as f64;
        if is_steady && growth > before * share {
            let what = format!(
                "{what} grew by {growth:.0} in the last three fifths of the run, from {before:.0}; {} % are allowed",
                share * 100.0
            );
            violations.push(InvariantViolation {
                invariant: Invariant::Flat,
                since_ms: from,
                at_ms: end,
                instance: None,
                what,
            });
        }
    }
    Ok(violations)
}

/// Returns the CPU time that other programs used around a violation, in percent of all cores, if it was high enough to
/// have delayed the satellite. Only invariants about time can be violated by such a delay.
pub(super) fn starvation_percent(violation: &InvariantViolation, samples: &[RunSample]) -> Option<u64> {
    if !matches!(violation.invariant, Invariant::Recovery | Invariant::Neighbours | Invariant::OnlineIsCallable) {
        return None;
    }
    let around =
        violation.since_ms.saturating_sub(STARVED_BEFORE_MS)..=violation.at_ms.saturating_add(STARVED_AFTER_MS);
    let meanwhile = samples.iter().filter(|sample| around.contains(&sample.at_ms));
    let shares: Vec<u64> = meanwhile.map(|sample| sample.foreign_cpu_percent.into()).collect();
    let mean = shares.iter().sum::<u64>() / (shares.len() as u64).max(1);
    (mean >= STARVED_PERCENT).then_some(mean)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
