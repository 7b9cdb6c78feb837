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
        at_ms: millis(at),
        instance: Some(format!("i{}", nth.0)),
        what: format!("the call {token} failed, and no fault had befallen its team: {why}"),
    }
}

/// Whether memory and descriptors at the end are more than they were half way: the medians of the samples between two and
/// three fifths of the run against those in the last sixth. Before that it grows by what each instance has from its first
/// restart on. Of a run that took little time nothing can be said, and the error says so.
pub(super) fn flat(limits: &Limits, samples: &[Sample], took: Duration) -> Result<Vec<Violation>, String> {
    let Some(share) = limits.flat else { return Ok(Vec::new()) };
    let end = samples.last().map_or(0, |sample| sample.at_ms);
    if took < FLAT_MIN {
        let (took, least) = (Duration::from_secs(took.as_secs()), humantime::format_duration(FLAT_MIN));
        let took = humantime::format_duration(took);
        return Err(format!("it took {took}, and in less than {least} everything is still warming up"));
    }
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
        let before = median(end / 5 * 2, end / 5 * 3, value);
        let after = median(end - end / 6, end, value);
        let (Some(before), Some(after)) = (before, after) else {
            return Err(format!("there are too few samples of {what}"));
        };
        if after as f64 > before as f64 * (1.0 + share) {
            let what = format!("{after} {what} at the end, and {before} before; {} % more are allowed", share * 100.0);
            violations.push(Violation { invariant: Invariant::Flat, at_ms: end, instance: None, what });
        }
    }
    Ok(violations)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
