//! Admission of starts while the memory of the machine is short, and the servers that are put to sleep to make room.
//!
//! ```text
//!          pressure or available memory beyond its limit
//!  enough ─────────────────────────────────────────────▶ short: one start in each interval, idle servers fall asleep
//!     ▲                                                     │
//!     └──── pressure at half its limit and half as much ────┘
//!           again available as its limit
//! ```

use std::time::{Duration, Instant};

use crate::model::ids::InstanceId;
use crate::model::policy::MemoryPolicy;

// Servers used more recently than this are not put to sleep.
const QUIET_MIN: Duration = Duration::from_secs(10);
// Divisor: one tenth of the idle servers is put to sleep after each reading.
const SLEEP_DIVISOR: usize = 10;

/// Memory of the machine, or of the control group that limits the satellite if it is tighter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryReading {
    /// Share of the last ten seconds in which tasks waited for memory, in percent (PSI, `some avg10`); `None` if the
    /// kernel does not report it.
    pub pressure_percent: Option<f64>,
    /// Memory that is available without swapping, in bytes.
    pub available_bytes: u64,
    /// Total memory, in bytes.
    pub total_bytes: u64,
}

/// Last reading and its effect, for `status`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MemoryStatus {
    /// True if memory is short, so that starts are delayed.
    pub is_short: bool,
    /// Number of processes that waited for their start at that time.
    pub starts_waiting: usize,
    /// Last reading; `None` before the first one.
    pub reading: Option<MemoryReading>,
}

/// Change caused by a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryChange {
    /// Memory is sufficient, as before.
    Enough,
    /// Memory is no longer short.
    Relieved,
    /// Memory has become short.
    BecameShort,
    /// Memory is still short, and it is time for one start.
    OneStart,
    /// Memory is still short.
    StillShort,
}

/// State of the memory, and the time of the next start while it is short.
#[derive(Debug, Default)]
pub struct MemoryGate {
    next_start: Option<Instant>,
}

impl MemoryGate {
    /// Processes a reading.
    pub fn observe(&mut self, policy: &MemoryPolicy, reading: &MemoryReading, now: Instant) -> MemoryChange {
        match self.next_start {
            None if is_short(policy, reading) => {
                self.next_start = Some(now + policy.start_interval);
                MemoryChange::BecameShort
            }
            None => MemoryChange::Enough,
            Some(_) if is_relieved(policy, reading) => {
                self.next_start = None;
                MemoryChange::Relieved
            }
            Some(at) if now >= at => {
                self.next_start = Some(now + policy.start_interval);
                MemoryChange::OneStart
            }
            Some(_) => MemoryChange::StillShort,
        }
    }

    /// Returns true if memory was short at the last reading.
    pub fn is_short(&self) -> bool {
        self.next_start.is_some()
    }
}

fn is_short(policy: &MemoryPolicy, reading: &MemoryReading) -> bool {
    let pressed = reading.pressure_percent.is_some_and(|percent| percent > f64::from(policy.pressure_max_percent));
    pressed || available_percent(reading) < f64::from(policy.available_min_percent)
}

// Uses other limits than `is_short`, so that the state does not flap.
fn is_relieved(policy: &MemoryPolicy, reading: &MemoryReading) -> bool {
    let pressed =
        reading.pressure_percent.is_some_and(|percent| percent > f64::from(policy.pressure_max_percent) / 2.0);
    !pressed && available_percent(reading) >= f64::from(policy.available_min_percent) * 1.5
}

fn available_percent(reading: &MemoryReading) -> f64 {
    100.0 * reading.available_bytes as f64 / reading.total_bytes.max(1) as f64
}

/// Selects the servers to put to sleep from the idle ones that may sleep, each with its idle time. Returns the
/// longest-idle tenth, at least one; servers idle for less than 10 s are never selected.
pub fn longest_idle(mut idle: Vec<(InstanceId, Duration)>) -> Vec<(InstanceId, Duration)> {
    idle.retain(|(_, quiet)| *quiet >= QUIET_MIN);
    idle.sort_by(|(one, quiet), (other, longer)| longer.cmp(quiet).then_with(|| one.cmp(other)));
    idle.truncate(idle.len().div_ceil(SLEEP_DIVISOR));
    idle
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(pressure_percent: Option<f64>, available_percent: u64) -> MemoryReading {
        MemoryReading { pressure_percent, available_bytes: available_percent << 20, total_bytes: 100 << 20 }
    }

    #[test]
    fn pressure_or_low_available_memory_means_short_until_both_recover() {
        let (policy, now) = (MemoryPolicy::default(), Instant::now());
        let mut gate = MemoryGate::default();
        let mut observe = |pressure, available| gate.observe(&policy, &reading(pressure, available), now);
        assert_eq!(observe(Some(40.0), 5), MemoryChange::Enough, "at the limits");
        assert_eq!(observe(Some(40.1), 90), MemoryChange::BecameShort);
        assert_eq!(observe(Some(30.0), 90), MemoryChange::StillShort, "below the limit, above its half");
        assert_eq!(observe(Some(20.0), 90), MemoryChange::Relieved);
        assert_eq!(observe(None, 4), MemoryChange::BecameShort);
        assert_eq!(observe(None, 7), MemoryChange::StillShort);
        assert_eq!(observe(None, 8), MemoryChange::Relieved);
    }

    #[test]
    fn extreme_limits_switch_the_memory_gate_off() {
        let policy = MemoryPolicy { pressure_max_percent: 100, available_min_percent: 0, ..MemoryPolicy::default() };
        let mut gate = MemoryGate::default();
        assert_eq!(gate.observe(&policy, &reading(Some(100.0), 0), Instant::now()), MemoryChange::Enough);
    }

    #[test]
    fn while_memory_is_short_one_start_is_allowed_per_interval() {
        let (policy, began) = (MemoryPolicy::default(), Instant::now());
        let mut gate = MemoryGate::default();
        let seen: Vec<_> = (0..=20)
            .step_by(2)
            .map(|seconds| gate.observe(&policy, &reading(None, 0), began + Duration::from_secs(seconds)))
            .collect();
        assert_eq!(seen[0], MemoryChange::BecameShort);
        let starts: Vec<_> = (0..seen.len()).filter(|at| seen[*at] == MemoryChange::OneStart).collect();
        assert_eq!(starts, [5, 10], "after 10 s and after 20 s");
        assert!(gate.is_short());
    }

    #[test]
    fn the_longest_idle_tenth_is_chosen_without_recently_used_ones() {
        let one = |nth: u64, seconds: u64| {
            let id = InstanceId::new("a".into(), "u".into(), format!("{nth:02}").into());
            (id, Duration::from_secs(seconds))
        };
        let chosen = |idle| longest_idle(idle).into_iter().map(|(_, quiet)| quiet.as_secs()).collect::<Vec<_>>();
        assert_eq!(chosen(vec![one(0, 20), one(1, 90), one(2, 40)]), [90]);
        assert_eq!(chosen((0..25).map(|nth| one(nth, 100 + nth)).collect()), [124, 123, 122]);
        assert_eq!(chosen(vec![one(0, 9)]), [] as [u64; 0]);
        assert_eq!(chosen(Vec::new()), [] as [u64; 0]);
    }
}
