//! Budget of unwanted exits of a team. A team beyond its budget starts one process at a time, without an effect on
//! other teams.

use std::collections::VecDeque;
use std::time::Instant;

use crate::model::policy::TeamBudgetPolicy;

/// Unwanted exits of a team in its window.
#[derive(Debug, Clone, Default)]
pub struct TeamBudget {
    exits: VecDeque<Instant>,
    throttled: bool,
}

/// Change of the throttle of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThrottleChange {
    /// The budget is exceeded: one start at a time from now on.
    Throttled {
        /// Number of unwanted exits in the window.
        exits: usize,
    },
    /// The team is within its budget again.
    Unthrottled {
        /// Number of unwanted exits in the window.
        exits: usize,
    },
}

impl TeamBudget {
    /// Charges one unwanted exit. Returns the change of the throttle, if any.
    pub fn charge(&mut self, policy: &TeamBudgetPolicy, now: Instant) -> Option<ThrottleChange> {
        self.exits.push_back(now);
        self.review(policy, now)
    }

    /// Removes old exits from the window. Returns the change of the throttle, if any.
    pub fn review(&mut self, policy: &TeamBudgetPolicy, now: Instant) -> Option<ThrottleChange> {
        while self.exits.front().is_some_and(|at| now.duration_since(*at) >= policy.window) {
            self.exits.pop_front();
        }
        let exits = self.exits.len();
        let is_throttled = exits > policy.max_exits;
        if is_throttled == self.throttled {
            return None;
        }
        self.throttled = is_throttled;
        Some(if is_throttled { ThrottleChange::Throttled { exits } } else { ThrottleChange::Unthrottled { exits } })
    }

    /// Returns true if starts take place one at a time.
    pub fn is_throttled(&self) -> bool {
        self.throttled
    }

    /// Returns the time at which the team will be within its budget again; `None` if it is not throttled.
    pub fn deadline(&self, policy: &TeamBudgetPolicy) -> Option<Instant> {
        let excess = self.exits.len().checked_sub(policy.max_exits)?.checked_sub(1)?;
        self.throttled.then(|| self.exits[excess] + policy.window)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_exit_over_the_budget_throttles_until_the_window_has_room() {
        let policy = TeamBudgetPolicy { window: Duration::from_secs(60), max_exits: 2 };
        let (mut budget, start) = (TeamBudget::default(), Instant::now());
        assert_eq!(budget.charge(&policy, start), None);
        assert_eq!(budget.charge(&policy, start + Duration::from_secs(10)), None);
        assert_eq!(
            budget.charge(&policy, start + Duration::from_secs(20)),
            Some(ThrottleChange::Throttled { exits: 3 })
        );
        let again = start + Duration::from_secs(60);
        assert_eq!(budget.deadline(&policy), Some(again));
        assert_eq!(budget.review(&policy, again), Some(ThrottleChange::Unthrottled { exits: 2 }));
        assert_eq!(budget.deadline(&policy), None);
    }
}
