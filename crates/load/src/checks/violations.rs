//! Violations that the checks of a run have found.

use std::time::Duration;

use super::super::types::{InstanceNo, Invariant, InvariantViolation};

// Maximum number of violations kept; the rest is only counted.
const KEPT_MAX: usize = 100_000;

#[derive(Debug, Default)]
pub(super) struct FoundViolations {
    pub(super) violations: Vec<InvariantViolation>,
    pub(super) count: u64,
}

impl FoundViolations {
    pub(super) fn push(&mut self, invariant: Invariant, at: Duration, instance: Option<InstanceNo>, what: String) {
        self.count += 1;
        if self.violations.len() < KEPT_MAX {
            let at_ms = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
            let instance = instance.map(|nth| format!("i{}", nth.0));
            self.violations.push(InvariantViolation { invariant, since_ms: at_ms, at_ms, instance, what });
        }
    }
}
