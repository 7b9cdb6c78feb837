//! What time it is, which tests may say.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;

/// The backend's clock. Expiry is measured by it, and nothing else.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    /// One that says what `now` says.
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    pub(super) fn now(&self) -> Timestamp {
        (self.0)()
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new(Timestamp::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clock({})", self.now())
    }
}

/// As it is stored: milliseconds since 1970.
pub(super) fn stored(at: Timestamp) -> i64 {
    at.as_millisecond()
}

/// What was stored. Only what was a timestamp is stored, so the other case does not happen.
pub(super) fn restored(milliseconds: i64) -> Timestamp {
    Timestamp::from_millisecond(milliseconds).unwrap_or_default()
}
