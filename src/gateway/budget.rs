//! Memory that clients can make us use, counted over all of them: limits of each do not keep their sum small.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many bytes there may be at once, and how many there are.
#[derive(Debug)]
pub struct Budget {
    used: AtomicUsize,
    max: AtomicUsize,
}

impl Budget {
    /// Of so many bytes.
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), max: AtomicUsize::new(max) })
    }

    /// Of so many from now on.
    pub fn set(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// How many are used.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// How many there may be.
    pub fn max(&self) -> usize {
        self.max.load(Ordering::Relaxed)
    }

    /// A part of it, of nothing yet.
    pub fn share(self: &Arc<Self>) -> Share {
        Share { of: self.clone(), bytes: 0 }
    }
}

/// What somebody uses of a budget. Dropped, it is free again.
#[derive(Debug)]
pub struct Share {
    of: Arc<Budget>,
    bytes: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.give(self.bytes);
    }
}

impl Share {
    /// Uses so much more, if there is as much. Says whether.
    #[must_use]
    pub fn try_take(&mut self, bytes: usize) -> bool {
        let max = self.of.max();
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= max);
        let taken = self.of.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        if taken {
            self.bytes += bytes;
        }
        taken
    }

    /// Uses so much more, whether there is as much or not.
    pub fn take(&mut self, bytes: usize) {
        self.of.used.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
    }

    /// Uses so much less.
    pub fn give(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.of.used.fetch_sub(bytes, Ordering::Relaxed);
        self.bytes -= bytes;
    }

    /// How much it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What it is a part of.
    pub fn of(&self) -> &Budget {
        &self.of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_is_counted_over_all_and_free_when_it_is_dropped() {
        let budget = Budget::new(100);
        let (mut one, mut other) = (budget.share(), budget.share());
        assert!(one.try_take(60) && !other.try_take(41) && other.try_take(40));
        assert_eq!((budget.used(), one.bytes(), other.bytes()), (100, 60, 40));
        other.take(10);
        one.give(20);
        one.give(1000);
        assert_eq!((budget.used(), one.bytes()), (50, 0));
        drop(other);
        assert_eq!(budget.used(), 0);
        assert!(!one.try_take(usize::MAX));
        budget.set(1);
        assert!(!one.try_take(2) && one.try_take(1));
    }
}
