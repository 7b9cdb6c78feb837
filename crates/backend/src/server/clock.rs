//! Clock of the backend, which tests can replace.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;

/// Clock by which the backend decides about expiry.
#[derive(Clone)]
pub struct BackendClock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl BackendClock {
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    pub(super) fn now(&self) -> Timestamp {
        (self.0)()
    }
}

impl Default for BackendClock {
    fn default() -> Self {
        Self::new(Timestamp::now)
    }
}

impl fmt::Debug for BackendClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clock({})", self.now())
    }
}

// Milliseconds since 1970.
pub(super) fn timestamp_to_millis(at: Timestamp) -> i64 {
    at.as_millisecond()
}

// Only valid timestamps are stored, so the default is never used.
pub(super) fn timestamp_from_millis(milliseconds: i64) -> Timestamp {
    Timestamp::from_millisecond(milliseconds).unwrap_or_default()
}
