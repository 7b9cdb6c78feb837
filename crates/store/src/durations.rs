//! Number and total duration of operations, for the metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct DurationTotals {
    count: AtomicU64,
    nanoseconds: AtomicU64,
}

impl DurationTotals {
    pub(crate) fn record(&self, took: Duration) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the number of operations and the sum of their durations.
    pub(crate) fn read(&self) -> (u64, Duration) {
        (self.count.load(Ordering::Relaxed), Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed)))
    }
}
