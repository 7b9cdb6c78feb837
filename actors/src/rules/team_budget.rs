//! The budget of a whole team: over it the team's spawns go one at a time, and no other team feels it.

use std::collections::VecDeque;
use std::time::Instant;

use crate::model::policy::TeamBudgetPolicy;

/// The unwanted exits of a team in its window.
#[derive(Debug, Clone, Default)]
pub struct TeamBudget {
    exits: VecDeque<Instant>,
    throttled: bool,
}

/// That the team went over its budget, or is within it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Over it: one spawn at a time from now on.
    Throttled {
        /// Unwanted exits in the window.
        exits: usize,
    },
    /// Within it again.
    Unthrottled {
        /// Unwanted exits in the window.
        exits: usize,
    },
}

impl TeamBudget {
    /// Charges one unwanted exit.
    pub fn charge(&mut self, policy: &TeamBudgetPolicy, now: Instant) -> Option<Change> {
        self.exits.push_back(now);
        self.review(policy, now)
    }

    /// Looks at the window again; what changed, if anything did.
    pub fn review(&mut self, policy: &TeamBudgetPolicy, now: Instant) -> Option<Change> {
        while self.exits.front().is_some_and(|at| now.duration_since(*at) >= policy.window) {
            self.exits.pop_front();
        }
        let exits = self.exits.len();
        let over = exits > policy.max_exits;
        if over == self.throttled {
            return None;
        }
        self.throttled = over;
        Some(if over { Change::Throttled { exits } } else { Change::Unthrottled { exits } })
    }

    /// Whether spawns go one at a time.
    pub fn is_throttled(&self) -> bool {
        self.throttled
    }

    /// When the window will hold less again, while throttled.
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
    fn the_exit_over_the_budget_throttles_until_the_window_holds_less_again() {
        let policy = TeamBudgetPolicy { window: Duration::from_secs(60), max_exits: 2 };
        let (mut budget, start) = (TeamBudget::default(), Instant::now());
        assert_eq!(budget.charge(&policy, start), None);
        assert_eq!(budget.charge(&policy, start + Duration::from_secs(10)), None);
        assert_eq!(budget.charge(&policy, start + Duration::from_secs(20)), Some(Change::Throttled { exits: 3 }));
        let again = start + Duration::from_secs(60);
        assert_eq!(budget.deadline(&policy), Some(again));
        assert_eq!(budget.review(&policy, again), Some(Change::Unthrottled { exits: 2 }));
        assert_eq!(budget.deadline(&policy), None);
    }
}
