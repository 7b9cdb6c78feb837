//! Check of [`Invariant::RestartBudget`]. Each restart of an instance follows an end. An unexpected end is charged to
//! the budget of the instance, and no start follows the end that exhausts the budget. So within a window there are at
//! most as many starts as crashes are allowed, plus one for each end that was requested or caused by another part.
//!
//! Conversely, an instance that failed permanently must have had as many charged ends in a window as are allowed, each
//! reported by an event and preceded by a start.

use std::collections::VecDeque;
use std::time::Duration;

use mcp_satellite_actors::model::policy::RestartPolicy;

use super::violations::FoundViolations;
use crate::types::{InstanceNo, Invariant};

// Delay between a start and the event that excuses it: events are sent in batches.
const EVENT_DELAY_MAX: Duration = Duration::from_secs(10);
// Maximum difference between the clocks of events and starts.
const SKEW: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct BudgetCheck {
    policy: RestartPolicy,
    instances: Vec<InstanceTimes>,
    // Starts to be checked, in the order of their time.
    due: VecDeque<(Duration, InstanceNo)>,
    // End of the period in which ends may be unknown because events were lost.
    unknown_until: Option<Duration>,
}

#[derive(Debug, Default)]
struct InstanceTimes {
    starts: VecDeque<Duration>,
    // Ends charged to the budget.
    ends: VecDeque<Duration>,
    excuses: VecDeque<Duration>,
    resets: VecDeque<Duration>,
}

impl BudgetCheck {
    pub(super) fn new(instances: usize, policy: &RestartPolicy) -> Self {
        let instances = (0..instances).map(|_| InstanceTimes::default()).collect();
        Self { policy: policy.clone(), instances, due: VecDeque::new(), unknown_until: None }
    }

    fn times_mut(&mut self, nth: InstanceNo) -> Option<&mut InstanceTimes> {
        self.instances.get_mut(nth.0 as usize)
    }

    pub(super) fn record_start(&mut self, at: Duration, nth: InstanceNo) {
        if let Some(record) = self.times_mut(nth) {
            record.starts.push_back(at);
            self.due.push_back((at, nth));
        }
    }

    pub(super) fn excuse(&mut self, at: Duration, nth: InstanceNo) {
        if let Some(record) = self.times_mut(nth) {
            record.excuses.push_back(at);
        }
    }

    pub(super) fn record_end(&mut self, at: Duration, nth: InstanceNo) {
        let window = self.policy.window;
        if let Some(record) = self.times_mut(nth) {
            while record.ends.front().is_some_and(|end| *end + window + SKEW <= at) {
                record.ends.pop_front();
            }
            record.ends.push_back(at);
        }
    }

    // The event of the last end precedes this one.
    pub(super) fn check_given_up(&mut self, at: Duration, nth: InstanceNo, violations: &mut FoundViolations) {
        if self.unknown_until.is_some_and(|until| at < until) {
            return;
        }
        let RestartPolicy { window, max_crashes, .. } = self.policy;
        let Some(InstanceTimes { starts, ends, resets, .. }) = self.times_mut(nth) else { return };
        // Each manual restart is recorded twice. Ends between the two records may be forgiven or not.
        let reset = resets.iter().rev().filter(|reset| **reset <= at).nth(1).copied().unwrap_or_default();
        let counts = |time: &&Duration| **time <= at + SKEW && **time + window + SKEW > at && **time + SKEW >= reset;
        let ended = ends.iter().filter(counts).count();
        // The start before the first of these ends may be older than the window.
        let charged = ended.min(starts.iter().filter(counts).count() + 1);
        if charged < max_crashes {
            let window = humantime::format_duration(window);
            let ends = format!("{charged} unexpected ends within {window}");
            let what = format!("the instance failed permanently after {ends}; the policy requires {max_crashes}");
            violations.push(Invariant::RestartBudget, at, Some(nth), what);
        }
    }

    // Events of ends may have been lost, so permanent failures are not checked for a window.
    pub(super) fn record_lost_events(&mut self, at: Duration) {
        self.unknown_until = Some(at + self.policy.window);
    }

    pub(super) fn record_reset(&mut self, at: Duration, nth: InstanceNo) {
        if let Some(record) = self.times_mut(nth) {
            record.resets.push_back(at);
        }
    }

    // Checks the starts that no later event can excuse. The current time is at least `now`.
    pub(super) fn check_due(&mut self, now: Duration, violations: &mut FoundViolations) {
        while let Some((at, nth)) = self.due.front().copied().filter(|(at, _)| *at + EVENT_DELAY_MAX <= now) {
            self.due.pop_front();
            self.check_start(at, nth, violations);
        }
    }

    pub(super) fn finish(mut self, violations: &mut FoundViolations) {
        while let Some((at, nth)) = self.due.pop_front() {
            self.check_start(at, nth, violations);
        }
    }

    // Starts of an instance are checked in order.
    fn check_start(&mut self, at: Duration, nth: InstanceNo, violations: &mut FoundViolations) {
        let RestartPolicy { window, max_crashes, .. } = self.policy;
        let Some(InstanceTimes { starts, excuses, resets, .. }) = self.times_mut(nth) else { return };
        // Times older than a window do not matter for this start or any later one.
        let old = |time: &Duration| *time + window + SKEW <= at;
        for times in [&mut *starts, &mut *excuses] {
            while times.front().is_some_and(old) {
                times.pop_front();
            }
        }
        let reset = resets.iter().rev().find(|reset| **reset <= at).copied();
        // Each manual restart is recorded twice; see `check_given_up`.
        while resets.get(1).is_some_and(|second| reset.is_some_and(|last| *second < last)) {
            resets.pop_front();
        }
        let counts =
            |start: &&Duration| **start <= at && **start + window > at && reset.is_none_or(|reset| **start >= reset);
        let mut counted = starts.iter().filter(counts);
        let first = counted.clone().next().copied().unwrap_or(at);
        let started = counted.by_ref().count();
        let excused = excuses.iter().filter(|time| **time + SKEW >= first && **time <= at + SKEW).count();
        let allowed = max_crashes.max(1) + excused;
        if started > allowed {
            let window = humantime::format_duration(window);
            let what = format!("start number {started} within {window}; {allowed} are allowed");
            violations.push(Invariant::RestartBudget, at, Some(nth), what);
        }
    }
}
