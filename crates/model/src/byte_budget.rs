//! Budgets, in bytes, for memory that servers and clients can make the satellite use. Limits per server and per client
//! do not bound their sum; budgets do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

/// Maximum number of bytes in use at once, and the current number. A budget may be part of another one, which counts
/// its bytes too.
#[derive(Debug)]
pub struct ByteBudget {
    used: AtomicUsize,
    max: AtomicUsize,
    whole: Option<Arc<Self>>,
}

impl ByteBudget {
    /// Creates a budget of `max` bytes.
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), max: AtomicUsize::new(max), whole: None })
    }

    /// Creates a budget that is never used up.
    pub fn unlimited() -> Arc<Self> {
        Self::new(usize::MAX)
    }

    /// Creates a budget of `max` bytes that is part of this one.
    #[must_use]
    pub fn part(self: &Arc<Self>, max: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), max: AtomicUsize::new(max), whole: Some(Arc::clone(self)) })
    }

    /// Changes the limit. Bytes in use stay in use.
    pub fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Returns the bytes in use.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the limit.
    pub fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    /// Returns true if this budget, or the one that it is part of, is exceeded.
    pub fn is_overdrawn(&self) -> bool {
        self.used() > self.max() || self.whole.as_ref().is_some_and(|whole| whole.is_overdrawn())
    }

    /// Creates an empty share.
    pub fn share(self: &Arc<Self>) -> ByteShare {
        ByteShare { budget: Arc::clone(self), bytes: 0 }
    }

    fn try_take(&self, bytes: usize) -> bool {
        let max = self.max();
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= max);
        if self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            return false;
        }
        let taken = self.whole.as_ref().is_none_or(|whole| whole.try_take(bytes));
        if !taken {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        taken
    }

    fn take(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.take(bytes);
        }
    }

    fn release(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.release(bytes);
        }
    }
}

/// Budgets for data of servers, each three eighths of the satellite's budget.
#[derive(Debug, Clone)]
pub struct ServerMemory {
    /// Budget for the lists of all servers.
    pub lists: Arc<ByteBudget>,
    /// Budget for long messages of all servers, from their first byte until they are consumed.
    pub messages: Arc<ByteBudget>,
}

impl ServerMemory {
    /// Creates the parts of the satellite's budget.
    pub fn from_budget(whole: &Arc<ByteBudget>) -> Self {
        // A quarter always remains for clients.
        let part = whole.max() / 8 * 3;
        Self { lists: whole.part(part), messages: whole.part(part) }
    }
}

impl Default for ServerMemory {
    fn default() -> Self {
        Self::from_budget(&ByteBudget::unlimited())
    }
}

/// Bytes that one user of a budget has taken. Dropping it returns them.
#[derive(Debug)]
pub struct ByteShare {
    budget: Arc<ByteBudget>,
    bytes: usize,
}

impl Drop for ByteShare {
    fn drop(&mut self) {
        self.release(self.bytes);
    }
}

impl ByteShare {
    /// Takes more bytes if the budget allows it. Returns true if it did.
    #[must_use]
    pub fn try_take(&mut self, bytes: usize) -> bool {
        let taken = self.budget.try_take(bytes);
        if taken {
            self.bytes += bytes;
        }
        taken
    }

    /// Takes more bytes even if that exceeds the budget.
    pub fn take(&mut self, bytes: usize) {
        self.budget.take(bytes);
        self.bytes += bytes;
    }

    /// Returns bytes to the budget: at most as many as were taken.
    pub fn release(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.budget.release(bytes);
        self.bytes -= bytes;
    }

    /// Returns the number of bytes taken.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the budget.
    pub fn budget(&self) -> &ByteBudget {
        &self.budget
    }

    /// Returns the same bytes with this share attached; the share is dropped with the last reference to them.
    pub fn attach_to(self, bytes: Bytes) -> Bytes {
        struct Counted {
            bytes: Bytes,
            _share: ByteShare,
        }

        impl AsRef<[u8]> for Counted {
            fn as_ref(&self) -> &[u8] {
                &self.bytes
            }
        }

        Bytes::from_owner(Counted { bytes, _share: self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_all_shares_count_until_a_share_is_dropped() {
        let budget = ByteBudget::new(100);
        let (mut one, mut other) = (budget.share(), budget.share());
        assert!(one.try_take(60) && !other.try_take(41) && other.try_take(40));
        assert_eq!((budget.used(), one.bytes(), other.bytes()), (100, 60, 40));
        other.take(10);
        one.release(20);
        one.release(1000);
        assert_eq!((budget.used(), one.bytes()), (50, 0));
        drop(other);
        assert_eq!(budget.used(), 0);
        assert!(!one.try_take(usize::MAX));
        budget.set_max(1);
        assert!(!one.try_take(2) && one.try_take(1));
    }

    #[test]
    fn a_part_has_its_own_limit_and_that_of_the_whole_budget() {
        let whole = ByteBudget::new(100);
        let (one, other) = (whole.part(80), whole.part(80));
        let (mut of_one, mut of_other) = (one.share(), other.share());
        assert!(!of_one.try_take(81) && of_one.try_take(80) && !of_other.try_take(21) && of_other.try_take(20));
        assert_eq!((whole.used(), one.used(), other.used()), (100, 80, 20));
        of_other.take(1);
        assert!(one.is_overdrawn() && other.is_overdrawn());
        drop(of_one);
        assert_eq!((whole.used(), one.used()), (21, 0));
        assert!(!one.is_overdrawn());
    }

    #[test]
    fn held_bytes_count_until_the_last_reference_is_dropped() {
        let budget = ByteBudget::new(100);
        let mut share = budget.share();
        assert!(share.try_take(5));
        let bytes = share.attach_to(Bytes::from_static(b"bytes"));
        let part = bytes.slice(1..3);
        drop(bytes);
        assert_eq!((&part[..], budget.used()), (&b"yt"[..], 5));
        drop(part);
        assert_eq!(budget.used(), 0);
    }
}
