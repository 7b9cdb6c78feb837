//! Detects that the machine was suspended. Timers do not count suspended time, so a retry due at midnight would still
//! be waited for after a night in a closed laptop.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

const INTERVAL: Duration = Duration::from_secs(2);
// Shorter differences are not a suspend, because the two clocks are read one after the other.
const SHORTEST: Duration = Duration::from_secs(1);
// Maximum time between the readings of the two clocks; beyond it the pair is not usable.
const AT_ONCE: Duration = Duration::from_millis(100);

const LOOKS_MAX: usize = 10;
// Upper bound for the offset between the clocks in a container.
const OFFSET_MAX: Duration = Duration::from_secs(1 << 40);

/// Calls `woke` after each suspend of the machine with its duration. Never returns.
pub async fn watch(mut woke: impl FnMut(Duration)) {
    let mut suspends = SuspendDetector::default();
    loop {
        if let Some(reading) = ClockReading::now()
            && let Some(suspended) = suspends.observe(reading)
        {
            woke(suspended);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Returns how long the machine was suspended, counted from an arbitrary moment: only the difference of two results is
/// meaningful. Accurate to a tenth of a second, less on a machine so busy that the clocks cannot be read together.
pub fn total_suspended() -> Duration {
    let looks = (0..LOOKS_MAX).find_map(|_| ClockReading::now());
    let ClockReading { since_boot, awake } = looks.unwrap_or_else(ClockReading::now_imprecise);
    // In a container each clock may have its own offset.
    (since_boot + OFFSET_MAX).saturating_sub(awake)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReading {
    /// Time since boot, including suspended time.
    pub since_boot: Duration,
    /// Time since boot, without suspended time.
    pub awake: Duration,
}

impl ClockReading {
    fn now() -> Option<Self> {
        let before = duration(clock_gettime(ClockId::Monotonic));
        let since_boot = duration(clock_gettime(ClockId::Boottime));
        let awake = duration(clock_gettime(ClockId::Monotonic));
        (awake.saturating_sub(before) < AT_ONCE).then_some(Self { since_boot, awake })
    }

    fn now_imprecise() -> Self {
        let awake = duration(clock_gettime(ClockId::Monotonic));
        Self { since_boot: duration(clock_gettime(ClockId::Boottime)), awake }
    }
}

#[derive(Debug, Default)]
pub struct SuspendDetector {
    last: Option<ClockReading>,
}

impl SuspendDetector {
    /// Returns how long the machine was suspended since the last call, if it was.
    pub fn observe(&mut self, now: ClockReading) -> Option<Duration> {
        // Differences only: in a container each clock may have its own offset.
        let last = self.last.replace(now)?;
        let (elapsed, awake) = (now.since_boot.saturating_sub(last.since_boot), now.awake.saturating_sub(last.awake));
        Some(elapsed.saturating_sub(awake)).filter(|suspended| *suspended > SHORTEST)
    }
}

fn duration(time: Timespec) -> Duration {
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(since_boot_ms: u64, awake_ms: u64) -> ClockReading {
        ClockReading { since_boot: Duration::from_millis(since_boot_ms), awake: Duration::from_millis(awake_ms) }
    }

    #[test]
    fn a_suspend_is_reported_once_with_its_length() {
        let mut suspends = SuspendDetector::default();
        assert_eq!(suspends.observe(at(100_000, 60_000)), None, "a suspend before the first reading was reported");
        assert_eq!(suspends.observe(at(102_000, 62_000)), None);
        assert_eq!(suspends.observe(at(3_704_000, 64_000)), Some(Duration::from_secs(3600)));
        assert_eq!(suspends.observe(at(3_706_000, 66_000)), None);
        assert_eq!(suspends.observe(at(3_713_500, 68_000)), Some(Duration::from_millis(5_500)));
    }

    #[test]
    fn a_stopped_or_starved_process_was_not_suspended() {
        let mut suspends = SuspendDetector::default();
        suspends.observe(at(1_000, 1_000));
        assert_eq!(suspends.observe(at(500_000, 500_000)), None, "both clocks advanced");
        assert_eq!(suspends.observe(at(500_900, 500_000)), None, "read a moment apart");
        assert_eq!(suspends.observe(at(502_000, 502_000)), None, "read at the same time again");
    }

    #[test]
    fn clocks_with_different_starts_detect_a_suspend() {
        let mut suspends = SuspendDetector::default();
        suspends.observe(at(1_000, 900_000));
        assert_eq!(suspends.observe(at(2_000, 901_000)), None);
        assert_eq!(suspends.observe(at(9_000, 902_000)), Some(Duration::from_secs(6)));
    }

    #[test]
    fn the_total_suspended_time_of_an_awake_machine_does_not_grow() {
        let before = total_suspended();
        let after = total_suspended();
        assert!(after.abs_diff(before) <= AT_ONCE * 2, "{before:?} {after:?}");
    }

    #[test]
    fn the_clocks_of_this_machine_can_be_read() {
        let reading = (0..1000).find_map(|_| ClockReading::now()).expect("both clocks can be read together");
        assert!(reading.since_boot + AT_ONCE >= reading.awake && reading.awake > Duration::ZERO);
    }
}
