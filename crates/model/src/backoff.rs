//! Growing delays between attempts.

use std::time::Duration;

/// Exponential backoff: the delay before each attempt is a multiple of the delay before the previous one, up to a
/// maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Delay before the first attempt.
    pub initial: Duration,
    /// Ratio of two successive delays.
    pub factor: u32,
    /// Longest delay.
    pub maximum: Duration,
}

impl Backoff {
    /// Creates a backoff whose delay doubles.
    pub const fn doubling(initial: Duration, maximum: Duration) -> Self {
        Self { initial, factor: 2, maximum }
    }

    /// Returns the delay before attempt number `attempt`. Counts from 1; 0 is treated as 1.
    pub fn delay(&self, attempt: u32) -> Duration {
        let factor = self.factor.saturating_pow(attempt.saturating_sub(1));
        self.initial.saturating_mul(factor).min(self.maximum)
    }
}

/// Returns the configured delay before attempt number `attempt`, from 1. The last delay repeats; without any, the delay
/// is zero.
pub fn listed_delay(delays: &[Duration], attempt: usize) -> Duration {
    delays.get(attempt.saturating_sub(1)).or(delays.last()).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn delays_grow_by_the_factor_up_to_the_maximum() {
        let seconds = |backoff: Backoff| (0..=9).map(|attempt| backoff.delay(attempt).as_secs()).collect::<Vec<_>>();
        let (first, maximum) = (Duration::from_secs(1), Duration::from_secs(180));
        assert_eq!(seconds(Backoff::doubling(first, maximum)), [1, 1, 2, 4, 8, 16, 32, 64, 128, 180]);
        let threefold = Backoff { initial: first, factor: 3, maximum };
        assert_eq!(seconds(threefold), [1, 1, 3, 9, 27, 81, 180, 180, 180, 180]);
    }

    #[test]
    fn the_last_listed_delay_repeats() {
        let delays = [1, 5].map(Duration::from_secs);
        let listed: Vec<u64> = (0..4).map(|attempt| listed_delay(&delays, attempt).as_secs()).collect();
        assert_eq!(listed, [1, 1, 5, 5]);
        assert_eq!(listed_delay(&[], 1), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn a_delay_is_neither_shorter_than_the_previous_one_nor_longer_than_the_maximum(
            initial in 0..u64::MAX, factor in 1..u32::MAX, maximum in 0..u64::MAX, attempt in 0..u32::MAX,
        ) {
            let (initial, maximum) = (Duration::from_nanos(initial), Duration::from_nanos(maximum));
            let backoff = Backoff { initial, factor, maximum };
            let (delay, next) = (backoff.delay(attempt), backoff.delay(attempt + 1));
            prop_assert!(delay <= next && next <= maximum, "{delay:?} then {next:?}");
            prop_assert_eq!(backoff.delay(1), initial.min(maximum));
        }

        #[test]
        fn a_delay_below_the_maximum_is_the_previous_one_times_the_factor(
            initial in 0..10_000_u64, factor in 1..10_u32, maximum in 0..10_000_000_u64, attempt in 1..9_u32,
        ) {
            let backoff =
                Backoff { initial: Duration::from_nanos(initial), factor, maximum: Duration::from_nanos(maximum) };
            let next = backoff.delay(attempt + 1);
            prop_assert!(next == backoff.maximum || next == backoff.delay(attempt) * factor, "{next:?}");
        }
    }
}
