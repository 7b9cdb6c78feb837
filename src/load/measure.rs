//! What is measured: latencies, memory, descriptors, CPU time.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Serialize, Serializer};

/// Durations, from a microsecond to an hour with three digits.
#[derive(Debug, Clone)]
pub struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        // Within an hour no bounds are wrong; without bounds it grows by itself.
        let bounded = Histogram::new_with_bounds(1, 3_600_000_000, 3);
        Self(bounded.or_else(|_| Histogram::new(3)).unwrap_or_else(|_| unreachable!("three digits are allowed")))
    }
}

impl Latency {
    /// Takes one in; what is longer than an hour counts as an hour.
    pub fn record(&mut self, took: Duration) {
        self.0.saturating_record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1));
    }

    /// Takes in all of another one.
    pub fn merge(&mut self, other: &Self) {
        // Both have the same bounds.
        let _ = self.0.add(&other.0);
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The duration that this share of all, from 0 to 1, does not exceed.
    pub fn quantile(&self, share: f64) -> Duration {
        Duration::from_micros(self.0.value_at_quantile(share))
    }
}

/// In milliseconds.
impl Serialize for Latency {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shown {
            n: u64,
            min: f64,
            p50: f64,
            p90: f64,
            p99: f64,
            p999: f64,
            max: f64,
        }
        let at = |share| if self.is_empty() { 0.0 } else { self.quantile(share).as_secs_f64() * 1e3 };
        let shown = Shown {
            n: self.len(),
            min: at(0.0),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: at(1.0),
        };
        shown.serialize(serializer)
    }
}
