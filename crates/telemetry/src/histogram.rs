//! Histogram of durations with the bounds of the MCP semantic conventions. Recording takes two atomic additions. The
//! histogram of `prometheus-client` cannot be read, which OTLP requires.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use mcp_satellite_protocol::trace::TraceParent;

use crate::names::DURATION_BOUNDS;

/// Number of buckets; the last one has no bound.
const BUCKETS: usize = DURATION_BOUNDS.len() + 1;

/// Histogram of durations.
#[derive(Debug, Default)]
pub(crate) struct DurationHistogram {
    buckets: [AtomicU64; BUCKETS],
    nanoseconds: AtomicU64,
    exemplar: Mutex<Option<DurationExemplar>>,
}

/// Recorded call, as an example of a bucket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DurationExemplar {
    pub(crate) trace: TraceParent,
    pub(crate) seconds: f64,
    pub(crate) at: SystemTime,
}

/// Contents of a histogram at one moment.
#[derive(Debug, Clone)]
pub(crate) struct HistogramReading {
    /// Number of durations in each bucket; not cumulative.
    pub(crate) buckets: [u64; BUCKETS],
    /// Sum of all durations, in seconds.
    pub(crate) sum: f64,
    pub(crate) exemplar: Option<DurationExemplar>,
}

impl DurationHistogram {
    /// Records a duration, and the span of a recorded call.
    pub(crate) fn record(&self, took: Duration, span: Option<(TraceParent, SystemTime)>) {
        let seconds = took.as_secs_f64();
        self.buckets[bucket_of(seconds)].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        if let Some((trace, at)) = span {
            *self.exemplar.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(DurationExemplar { trace, seconds, at });
        }
    }

    pub(crate) fn read(&self) -> HistogramReading {
        let exemplar = *self.exemplar.lock().unwrap_or_else(PoisonError::into_inner);
        let buckets = self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed));
        HistogramReading { buckets, sum: self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9, exemplar }
    }
}

impl HistogramReading {
    /// Returns the number of durations.
    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

/// Returns the index of the bucket: a bound belongs to the bucket below it.
pub(crate) fn bucket_of(seconds: f64) -> usize {
    DURATION_BOUNDS.partition_point(|bound| seconds > *bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_counted_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        let histogram = DurationHistogram::default();
        for milliseconds in [1, 10, 11, 300_000, 300_001] {
            histogram.record(Duration::from_millis(milliseconds), None);
        }
        let reading = histogram.read();
        assert_eq!((reading.buckets[0], reading.buckets[1], reading.buckets[13], reading.buckets[14]), (2, 1, 1, 1));
        assert_eq!(reading.count(), 5);
        assert!((reading.sum - 600.023).abs() < 1e-6, "{}", reading.sum);
    }
}
