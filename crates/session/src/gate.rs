//! Admission of calls to a run: their number, their ids, and the time of the last activity.
//!
//! Ids on the wire are assigned here and are never reused in a run. A gate is closed for sleep only while no call is in
//! it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use mcp_satellite_model::remote::ServerInfo;
use tokio::sync::Notify;

/// Id of the first request of a new session.
pub const FIRST_REQUEST_ID: u64 = 1;

/// Support of the stateless era by a server: its description in that era, or `None` if it does not support it.
pub(crate) type StatelessSupport = Option<Arc<ServerInfo>>;

/// State shared by the port of a run and its session: permits, admission and the time of the last activity.
pub struct CallGate {
    /// Number of calls in flight, plus `CLOSED` if the port admits no more. One number, so that either a run falls
    /// asleep or a call enters, and never both.
    in_flight: AtomicUsize,
    keep_awake_count: AtomicUsize,
    calls_max: AtomicUsize,
    /// Notified when the last call leaves a closed port: its session may be waiting for that.
    pub emptied: Notify,
    next_id: AtomicU64,
    began_at: Instant,
    /// Nanoseconds since `began_at`.
    active_at: AtomicU64,
    /// `None` while the session has to be asked.
    stateless_support: RwLock<Option<StatelessSupport>>,
    version: OnceLock<Box<str>>,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

impl CallGate {
    /// Creates an open gate for a run that begins `now`. `first_id` is the id of the first request; a session that
    /// continues an earlier one begins with a higher id than [`FIRST_REQUEST_ID`].
    pub fn new(calls_max: usize, first_id: u64, now: Instant) -> Self {
        let (in_flight, keep_awake_count) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (next_id, active_at) = (AtomicU64::new(first_id), AtomicU64::new(0));
        Self {
            in_flight,
            keep_awake_count,
            calls_max: AtomicUsize::new(calls_max),
            emptied: Notify::new(),
            next_id,
            began_at: now,
            active_at,
            stateless_support: RwLock::default(),
            version: OnceLock::new(),
        }
    }

    /// Returns the protocol version that the handshake of the run has negotiated; `None` before it.
    pub fn version(&self) -> Option<&str> {
        self.version.get().map(|version| &**version)
    }

    pub(crate) fn set_version(&self, version: &str) {
        // A run has one handshake.
        let _ = self.version.set(version.into());
    }

    /// Returns the support of the stateless era if it is certain, so that no request has to wait for the session.
    pub fn stateless_support(&self) -> Option<StatelessSupport> {
        self.stateless_support.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_stateless_support(&self, support: Option<StatelessSupport>) {
        *self.stateless_support.write().unwrap_or_else(PoisonError::into_inner) = support;
    }

    /// Admits a call.
    ///
    /// # Errors
    ///
    /// Returns an error if the gate is closed or too many calls are in flight.
    pub fn try_acquire(self: &Arc<Self>) -> Result<CallPermit, AdmissionError> {
        let limit = self.calls_max.load(Ordering::Relaxed).min(CLOSED - 1);
        let one_more = |inside: usize| (inside < limit).then_some(inside + 1);
        match self.in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more) {
            Ok(_) => Ok(CallPermit(self.clone())),
            Err(inside) if inside >= CLOSED => Err(AdmissionError::Closed),
            Err(_) => Err(AdmissionError::Full),
        }
    }

    /// Returns the number of unanswered calls.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire) & !CLOSED
    }

    /// Returns true if the gate admits no more calls.
    pub fn is_closed(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) >= CLOSED
    }

    /// Admits no more calls.
    pub fn close(&self) {
        self.in_flight.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Admits no more calls if none is in flight. Returns true if so.
    pub fn close_if_empty(&self) -> bool {
        self.in_flight.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Returns the maximum number of calls in flight.
    pub fn calls_max(&self) -> usize {
        self.calls_max.load(Ordering::Relaxed)
    }

    pub(crate) fn set_calls_max(&self, calls_max: usize) {
        self.calls_max.store(calls_max, Ordering::Relaxed);
    }

    /// Returns an id for a request. Ids are never reused in a run.
    pub fn draw_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the id that will be drawn next.
    pub fn next_id(&self) -> u64 {
        self.next_id.load(Ordering::Relaxed)
    }

    /// Counts one more reason to keep the run awake.
    pub fn keep_awake(&self) {
        self.keep_awake_count.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one reason less to keep the run awake.
    pub fn release_awake(&self, now: Instant) {
        self.record_activity(now);
        self.keep_awake_count.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns the number of reasons to keep the run awake, apart from calls.
    pub fn keep_awake_count(&self) -> usize {
        self.keep_awake_count.load(Ordering::Acquire)
    }

    /// Returns the time of the last activity.
    pub fn active_at(&self) -> Instant {
        self.began_at + Duration::from_nanos(self.active_at.load(Ordering::Relaxed))
    }

    /// Records that a client or the server was active.
    pub fn record_activity(&self, at: Instant) {
        let nanos = at.saturating_duration_since(self.began_at).as_nanos();
        self.active_at.fetch_max(u64::try_from(nanos).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// Permit of one call, returned to its gate when it is dropped.
pub struct CallPermit(Arc<CallGate>);

impl Drop for CallPermit {
    fn drop(&mut self) {
        // A caller may leave without notifying the session, which would then wait forever.
        if self.0.in_flight.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            self.0.emptied.notify_one();
        }
    }
}

/// Reason why a call is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdmissionError {
    /// Too many calls are in flight.
    Full,
    /// The run accepts no more calls.
    Closed,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_gate_closes_only_without_calls_in_flight_and_then_admits_none() {
        let gate = Arc::new(CallGate::new(2, FIRST_REQUEST_ID, Instant::now()));
        let (first, second) = (gate.try_acquire().ok().unwrap(), gate.try_acquire().ok().unwrap());
        assert_eq!(gate.try_acquire().err(), Some(AdmissionError::Full));
        drop(first);
        assert!(!gate.close_if_empty());
        assert_eq!((gate.in_flight(), gate.is_closed()), (1, false));
        drop(second);
        assert!(gate.close_if_empty());
        assert_eq!(gate.try_acquire().err(), Some(AdmissionError::Closed));
        assert_eq!((gate.in_flight(), gate.is_closed()), (0, true));
    }

    #[test]
    fn a_call_is_admitted_or_the_gate_closes_but_never_both() {
        for _ in 0..2000 {
            let (gate, start) = (Arc::new(CallGate::new(1, FIRST_REQUEST_ID, Instant::now())), Barrier::new(2));
            let (place, closed) = std::thread::scope(|scope| {
                let entering = scope.spawn(|| {
                    start.wait();
                    gate.try_acquire().ok()
                });
                start.wait();
                let closed = gate.close_if_empty();
                (entering.join().unwrap(), closed)
            });
            assert_ne!(place.is_some(), closed);
        }
    }
}
