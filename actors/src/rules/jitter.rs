//! Random variation of delays, so that thousands of servers that were disconnected together do not reconnect together.
//! The generator is deterministic: the same seed gives the same delays.

use std::time::Duration;

/// Pseudo-random number generator (`SplitMix64`, by Steele, Lea and Flood).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JitterRng(u64);

impl JitterRng {
    /// Creates a generator from a seed and the name of its holder, so that holders with the same seed draw different
    /// numbers.
    pub fn new(seed: u64, holder: &str) -> Self {
        // FNV-1a: the same value in every build and on every machine.
        let holder = holder
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Self(seed ^ holder)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns `delay`, made up to `percent` percent longer or shorter. At most 100 percent.
    pub fn jitter(&mut self, delay: Duration, percent: u8) -> Duration {
        let delay_nanos = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        let reach = delay_nanos / 100 * u64::from(percent.min(100));
        if reach == 0 {
            return delay;
        }
        let offset = self.next() % reach.saturating_mul(2).saturating_add(1);
        Duration::from_nanos((delay_nanos - reach).saturating_add(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_spreads_a_delay_over_its_whole_range() {
        let mut rng = JitterRng::new(7, "files-acme-alice-a");
        let delay = Duration::from_secs(180);
        let spread: Vec<f64> = (0..1000).map(|_| rng.jitter(delay, 10).as_secs_f64()).collect();
        assert!(spread.iter().all(|seconds| (162.0..=198.0).contains(seconds)));
        assert!(spread.iter().any(|seconds| *seconds < 165.0) && spread.iter().any(|seconds| *seconds > 195.0));
    }

    #[test]
    fn the_same_seed_and_holder_give_the_same_delays() {
        let draw = |seed, holder| {
            let mut rng = JitterRng::new(seed, holder);
            [(); 5].map(|()| rng.jitter(Duration::from_secs(1), 10))
        };
        assert_eq!(draw(1, "a"), draw(1, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
        assert_ne!(draw(1, "a"), draw(2, "a"));
    }

    #[test]
    fn a_delay_without_jitter_is_unchanged_and_the_longest_does_not_overflow() {
        let mut rng = JitterRng::new(1, "a");
        assert_eq!(rng.jitter(Duration::from_secs(2), 0), Duration::from_secs(2));
        assert_eq!(rng.jitter(Duration::ZERO, 10), Duration::ZERO);
        assert!(rng.jitter(Duration::MAX, 10) <= Duration::from_nanos(u64::MAX));
    }
}
