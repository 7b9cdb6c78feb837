//! What a scenario asks for beyond what must always hold. The numbers are measured by others.

use std::time::Duration;

use super::super::measure::Latency;
use crate::load::scenario::Limits;
use crate::load::types::{Invariant, Nth, Sample, Violation};

/// One value of each sample.
type Curve = fn(&Sample) -> u64;

/// With fewer calls than this a 99th percentile says nothing.
const CALLS_MIN: u64 = 500;
/// A run that is shorter shows how the harness and its allocator warm up, and not what grows with time. By the machine's
/// clock, also where time is virtual: an allocator gives memory back by that.
const FLAT_MIN: Duration = Duration::from_secs(600);

/// Windows in which the least memory is looked for.
const WINDOWS: u64 = 9;

/// Share of the pairs of windows of which the later one must be higher for a growth to be steady. With nine windows that
/// happens by chance in fewer than 1 of 100 runs.
const RISING_PAIRS_MIN: f64 = 5.0 / 6.0;

/// Share of the CPU time used by other programs, in percent, from which the machine counts as starved.
const STARVED_PERCENT: u64 = 60;

/// Samples so long before and after a broken promise count, too: a late answer may be due to the load just before it.
const STARVED_BEFORE_MS: u64 = 5_000;
const STARVED_AFTER_MS: u64 = 2_000;

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
        since_ms: millis(at),
        at_ms: millis(at + took),
        instance: Some(format!("i{}", nth.0)),
        what: format!("it was back {} ms after the fault, where {} ms are allowed", millis(took), millis(allowed)),
    })
}

/// Whether calls to teams that no fault befell were slower than the same teams' calls before the faults. A call that failed
/// or was not made was slower than any. With too few of either nothing can be said, and the error says so.
pub(super) fn neighbours(
    limits: &Limits,
    at: Duration,
    quiet: &Latency,
    storm: &Latency,
    failed: u64,
) -> Result<Option<Violation>, String> {
    let Some(times) = limits.neighbours else { return Ok(None) };
    let calls = storm.len() + failed;
    if quiet.len() < CALLS_MIN || calls < CALLS_MIN {
        return Err(format!("{} calls before and {calls} after, of {CALLS_MIN} that it takes", quiet.len()));
    }
    let before = quiet.quantile(0.99);
    let told = |took: &str| Violation {
        invariant: Invariant::Neighbours,
        since_ms: 0,
        at_ms: millis(at),
        instance: None,
        what: format!(
            "{took}, and 99 % of them took up to {:.1} ms before; {times} × is allowed",
            before.as_secs_f64() * 1e3
        ),
    };
    // Of all, those that failed behind those that were answered.
    let share = 0.99 * calls as f64 / storm.len().max(1) as f64;
    if share > 1.0 {
        return Ok(Some(told(&format!("{failed} of {calls} calls to teams that no fault befell failed"))));
    }
    let during = storm.quantile(share);
    let took = format!("99 % of calls to teams that no fault befell took up to {:.1} ms", during.as_secs_f64() * 1e3);
    Ok((during > before.mul_f64(times)).then(|| told(&took)))
}

/// A call that failed where nothing was wrong: its server was online, and was not to be called. `why` is what its caller was
/// told.
pub fn unexcused(at: Duration, nth: Nth, token: &str, why: &str) -> Violation {
    // It may be of any length.
    let why: String = why.chars().take(200).collect();
    Violation {
        invariant: Invariant::OnlineIsCallable,
        since_ms: millis(at),
        at_ms: millis(at),
        instance: Some(format!("i{}", nth.0)),
        what: format!("the call {token} failed, and no fault had befallen its team: {why}"),
    }
}

/// Checks whether memory or descriptors grow over time. The last three fifths of the run are divided into windows of
/// equal length, and the minimum of each window counts: a burst of calls raises the memory that an allocator holds for
/// a while, but only a leak raises its floor. The growth is the median slope between all pairs of windows, so a single
/// burst, even at the end, does not count. Growth counts only if it is steady, which means that the later window is
/// higher in [`RISING_PAIRS_MIN`] of all pairs (Kendall's trend test): the calls in flight, and the descriptors of their
/// connections, rise and fall over minutes. The first two fifths are left out: memory grows there when each instance
/// restarts for the first time. The error is the reason why there is no result, such as a run that was too short.
pub(super) fn flat(limits: &Limits, samples: &[Sample], took: Duration) -> Result<Vec<Violation>, String> {
    let Some(share) = limits.flat else { return Ok(Vec::new()) };
    let end = samples.last().map_or(0, |sample| sample.at_ms);
    if took < FLAT_MIN {
        let (took, least) = (Duration::from_secs(took.as_secs()), humantime::format_duration(FLAT_MIN));
        let took = humantime::format_duration(took);
        return Err(format!("it took {took}, and in less than {least} everything is still warming up"));
    }
    let from = end / 5 * 2;
    let floor = |window: u64, value: Curve| {
        let edge = |window: u64| from + (end - from) * window / WINDOWS;
        let within = samples.iter().filter(|sample| (edge(window)..=edge(window + 1)).contains(&sample.at_ms));
        within.map(value).min()
    };
    let mut violations = Vec::new();
    let curves: [(&str, Curve); 2] =
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
            violations.push(Violation { invariant: Invariant::Flat, since_ms: from, at_ms: end, instance: None, what });
        }
    }
    Ok(violations)
}

/// Returns the share of the machine's CPU time, in percent, that other programs used while a promise was broken, if that
/// was so much that the machine, and not the satellite, may have been late. Only promises about time can be broken by that.
pub(super) fn starved(violation: &Violation, samples: &[Sample]) -> Option<u64> {
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
