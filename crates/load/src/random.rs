//! Random decisions from one seed. Each purpose draws from its own stream, so one purpose does not affect another.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Exp1, StandardNormal};

/// Seed of all random streams of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunSeed(pub u64);

impl RunSeed {
    /// Returns the random generator of stream `nth` with this name.
    pub fn stream(self, name: &str, nth: u64) -> StdRng {
        let mut seed = [0; 32];
        for (part, number) in seed.chunks_exact_mut(8).zip([self.0, fnv(name), nth]) {
            part.copy_from_slice(&number.to_le_bytes());
        }
        StdRng::from_seed(seed)
    }

    /// Returns a seed for a component with its own random generator.
    pub fn derive(self, name: &str, nth: u64) -> u64 {
        self.stream(name, nth).random()
    }
}

// FNV-1a. Unlike the hash of the standard library it is the same in every build.
fn fnv(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DurationDistribution {
    /// Constant: `"5ms"`.
    Fixed(Duration),
    /// Uniform between two durations: `"uniform 1ms 10ms"`.
    Uniform(Duration, Duration),
    /// Exponential with this mean: `"exp 10ms"`.
    Exp(Duration),
    /// Log-normal: `"lognormal 10ms 2"`.
    LogNormal {
        median: Duration,
        /// Factor of one standard deviation, at least 1: two thirds of all durations are between `median / factor` and
        /// `median * factor`.
        factor: f64,
    },
}

impl Default for DurationDistribution {
    fn default() -> Self {
        Self::Fixed(Duration::ZERO)
    }
}

// Draws are limited to this multiple of the mean or median: a rare draw must not be as long as the run.
const TAIL: u32 = 100;

impl DurationDistribution {
    pub fn draw(&self, rng: &mut StdRng) -> Duration {
        match *self {
            Self::Fixed(duration) => duration,
            Self::Uniform(from, to) => from + to.saturating_sub(from).mul_f64(rng.random::<f64>()),
            Self::Exp(mean) => {
                let times: f64 = Exp1.sample(rng);
                mean.mul_f64(times.min(f64::from(TAIL)))
            }
            Self::LogNormal { median, factor } => {
                let sigmas: f64 = StandardNormal.sample(rng);
                median.mul_f64((sigmas * factor.ln()).exp().min(f64::from(TAIL)))
            }
        }
    }

    /// Returns true if every draw is zero.
    pub fn is_zero(&self) -> bool {
        match self {
            Self::Fixed(duration) | Self::Exp(duration) | Self::LogNormal { median: duration, .. } => {
                duration.is_zero()
            }
            Self::Uniform(_, to) => to.is_zero(),
        }
    }

    /// Returns an upper estimate of the draws.
    pub fn longest(&self) -> Duration {
        match *self {
            Self::Fixed(duration) | Self::Uniform(_, duration) => duration,
            // One draw in a thousand is longer than seven means, or than three standard deviations.
            Self::Exp(mean) => mean * 7,
            Self::LogNormal { median, factor } => median.mul_f64(factor.powi(3).min(f64::from(TAIL))),
        }
    }
}

// Same syntax as in the configuration, up to one year.
fn parse_duration(text: &str) -> Option<Duration> {
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    humantime::parse_duration(text).ok().filter(|duration| *duration <= LONGEST)
}

// Hint of the error for an invalid distribution.
pub(super) const SPREADS: &str = "use \"5ms\", \"uniform 1ms 10ms\" (from, to), \"exp 10ms\" (mean) or \"lognormal 10ms 2\" (median, factor of one standard deviation)";

impl FromStr for DurationDistribution {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const UNREADABLE: &str = "is not a distribution of durations";
        if let Some(fixed) = parse_duration(text) {
            return Ok(Self::Fixed(fixed));
        }
        let words: Vec<&str> = text.split_whitespace().collect();
        match *words {
            ["uniform", from, to] => match (parse_duration(from), parse_duration(to)) {
                (Some(from), Some(to)) if from <= to => Ok(Self::Uniform(from, to)),
                (Some(_), Some(_)) => Err("has an upper bound below its lower bound"),
                _ => Err(UNREADABLE),
            },
            ["exp", mean] => parse_duration(mean).map(Self::Exp).ok_or(UNREADABLE),
            ["lognormal", median, factor] => {
                let factor = factor.parse().ok().filter(|factor: &f64| factor.is_finite());
                match (parse_duration(median), factor) {
                    (Some(median), Some(factor)) if factor >= 1.0 => Ok(Self::LogNormal { median, factor }),
                    (Some(_), Some(_)) => Err("has a factor of less than 1"),
                    _ => Err(UNREADABLE),
                }
            }
            _ => Err(UNREADABLE),
        }
    }
}

impl fmt::Display for DurationDistribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The parts of a distribution are separated by spaces, so a duration must not contain any.
        let shown = |duration: &Duration| humantime::format_duration(*duration).to_string().replace(' ', "");
        match self {
            Self::Fixed(duration) => write!(f, "{}", shown(duration)),
            Self::Uniform(from, to) => write!(f, "uniform {} {}", shown(from), shown(to)),
            Self::Exp(mean) => write!(f, "exp {}", shown(mean)),
            Self::LogNormal { median, factor } => write!(f, "lognormal {} {factor}", shown(median)),
        }
    }
}

/// Distribution over the indexes below `n` by Zipf's law: the first index is the most frequent. With exponent 0 all are
/// equally frequent.
#[derive(Debug, Clone)]
pub struct ZipfIndexes(Vec<f64>);

impl ZipfIndexes {
    /// Creates a distribution over `n` indexes; 0 counts as 1.
    pub fn new(n: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weight = |rank: usize| (rank as f64).powf(-exponent);
        let sums = (1..=n.max(1)).map(|rank| {
            sum += weight(rank);
            sum
        });
        Self(sums.collect())
    }

    /// Draws an index below `n`.
    pub fn draw(&self, rng: &mut StdRng) -> usize {
        let all = self.0.last().copied().unwrap_or_default();
        let drawn = rng.random::<f64>() * all;
        self.0.partition_point(|sum| *sum <= drawn).min(self.0.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn distributions_are_parsed() {
        let read = |text: &str| text.parse::<DurationDistribution>();
        assert_eq!(read("1s 500ms"), Ok(DurationDistribution::Fixed(millis(1500))));
        assert_eq!(read("uniform 1ms 10ms"), Ok(DurationDistribution::Uniform(millis(1), millis(10))));
        assert_eq!(read("exp 10ms"), Ok(DurationDistribution::Exp(millis(10))));
        assert_eq!(read("lognormal 10ms 2.5"), Ok(DurationDistribution::LogNormal { median: millis(10), factor: 2.5 }));
        for wrong in ["", "soon", "exp", "exp 10", "uniform 1ms", "lognormal 1ms x", "lognormal 1ms NaN", "5ms 6"] {
            assert_eq!(read(wrong), Err("is not a distribution of durations"), "{wrong}");
        }
        assert_eq!(read("uniform 2ms 1ms"), Err("has an upper bound below its lower bound"));
        assert_eq!(read("lognormal 1ms 0.5"), Err("has a factor of less than 1"));
    }

    #[test]
    fn drawn_durations_have_the_configured_median_or_mean() {
        let mut rng = RunSeed(1).stream("test", 0);
        let mut middle = |text: &str| {
            let spread: DurationDistribution = text.parse().unwrap();
            let mut drawn: Vec<_> = (0..10_001).map(|_| spread.draw(&mut rng)).collect();
            drawn.sort();
            let mean = drawn.iter().sum::<Duration>() / 10_001;
            (drawn[5000].as_secs_f64() * 1e3, mean.as_secs_f64() * 1e3, drawn[10_000])
        };
        let (median, _, most) = middle("lognormal 10ms 2");
        assert!((9.5..10.5).contains(&median) && most <= millis(1000), "{median}");
        let (_, mean, most) = middle("exp 10ms");
        assert!((9.5..10.5).contains(&mean) && most <= millis(1000), "{mean}");
        let (median, _, most) = middle("uniform 10ms 20ms");
        assert!((14.5..15.5).contains(&median) && most <= millis(20), "{median}");
    }

    #[test]
    fn a_skewed_distribution_favours_the_first_indexes() {
        let mut rng = RunSeed(1).stream("test", 0);
        let mut counts = |exponent| {
            let skewed = ZipfIndexes::new(10, exponent);
            let mut counts = [0_u32; 10];
            (0..10_000).for_each(|_| counts[skewed.draw(&mut rng)] += 1);
            counts
        };
        assert!(counts(0.0).iter().all(|count| (850..1150).contains(count)));
        let skewed = counts(1.0);
        assert!((3200..3700).contains(&skewed[0]) && skewed[9] < 500, "{skewed:?}");
    }

    #[test]
    fn streams_are_independent_and_reproducible() {
        let mut rng = RunSeed(42).stream("calls", 3);
        let first: u64 = rng.random();
        assert_eq!(first, RunSeed(42).derive("calls", 3));
        assert_ne!(first, RunSeed(42).derive("calls", 4));
        assert_ne!(first, RunSeed(42).derive("call", 3));
        assert_ne!(first, RunSeed(43).derive("calls", 3));
    }

    proptest! {
        #[test]
        fn a_displayed_distribution_is_parsed_back(
            from in 0..100_000_u64, more in 0..100_000_u64, factor in 1.0..9.0_f64, which in 0..4,
        ) {
            let (from, to) = (millis(from), millis(from + more));
            let spread = match which {
                0 => DurationDistribution::Fixed(from),
                1 => DurationDistribution::Uniform(from, to),
                2 => DurationDistribution::Exp(from),
                _ => DurationDistribution::LogNormal { median: from, factor },
            };
            prop_assert_eq!(spread.to_string().parse(), Ok(spread));
        }
    }
}
