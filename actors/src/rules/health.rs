//! When a connected server is asked whether it is well, and what its silence means.

use std::time::{Duration, Instant};

use super::jitter::Dice;
use crate::model::policy::{HealthCheck, HealthPolicy, OnDegraded};

/// Jitter of the interval.
const SPREAD_PERCENT: u8 = 10;

/// The checks of one session.
#[derive(Debug, Clone)]
pub struct Checks {
    dice: Dice,
    failures: u32,
    degraded: bool,
    last_error: Option<String>,
    /// What was asked last.
    asked: HealthCheck,
    /// The server does not answer `ping` as it should.
    no_ping: bool,
    /// The next one is about the session, and due at once.
    in_doubt: bool,
    next_at: Option<Instant>,
}

/// What a failed check comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It may be chance.
    Wait,
    /// Once too often: it is degraded, which is told.
    Degraded(u32),
    /// Once too often: the connection is given up.
    GiveUp(u32),
}

impl Checks {
    /// Of a session that was connected now: the first check comes one interval later.
    pub fn new(policy: &HealthPolicy, dice: Dice, now: Instant) -> Self {
        let mut checks = Self {
            dice,
            failures: 0,
            degraded: false,
            last_error: None,
            asked: policy.check,
            no_ping: false,
            in_doubt: false,
            next_at: None,
        };
        checks.schedule(policy, now);
        checks
    }

    fn schedule(&mut self, policy: &HealthPolicy, now: Instant) {
        let pause = if self.in_doubt { Duration::ZERO } else { self.dice.spread(policy.interval, SPREAD_PERCENT) };
        self.next_at = now.checked_add(pause);
    }

    /// When the next one is due; none while one is under way.
    pub fn due_at(&self) -> Option<Instant> {
        self.next_at
    }

    /// The policy is another one: the next check comes one interval from now, unless one is under way or due at once.
    pub fn reschedule(&mut self, policy: &HealthPolicy, now: Instant) {
        if self.next_at.is_some() {
            self.schedule(policy, now);
        }
    }

    /// It is due at once, unless one is under way.
    pub fn hurry(&mut self, now: Instant) {
        if let Some(at) = &mut self.next_at {
            *at = now;
        }
    }

    /// It is not certain that the server knows the session: it is asked in it, at once, or after the check that is under
    /// way.
    pub fn doubt(&mut self, now: Instant) {
        self.in_doubt = true;
        self.hurry(now);
    }

    /// Begins a check: what is asked.
    pub fn begin(&mut self, policy: &HealthPolicy) -> HealthCheck {
        self.next_at = None;
        let in_doubt = std::mem::take(&mut self.in_doubt);
        self.asked = match policy.check {
            HealthCheck::Get if !in_doubt => HealthCheck::Get,
            HealthCheck::Get | HealthCheck::Ping if !self.no_ping => HealthCheck::Ping,
            HealthCheck::Get | HealthCheck::Ping | HealthCheck::ToolsList => HealthCheck::ToolsList,
        };
        self.asked
    }

    /// The check was answered with an error. If it was `ping`, which not all servers know, it is asked for its tools from now
    /// on, and at once: whether it is.
    #[must_use]
    pub fn no_ping(&mut self, now: Instant) -> bool {
        let was_ping = self.asked == HealthCheck::Ping;
        if was_ping {
            // That is asked in the session, too.
            (self.no_ping, self.in_doubt, self.next_at) = (true, true, Some(now));
        }
        was_ping
    }

    /// What was asked last.
    pub fn asked(&self) -> HealthCheck {
        self.asked
    }

    /// The check was not answered, or not well.
    pub fn failed(&mut self, policy: &HealthPolicy, why: String, now: Instant) -> Verdict {
        self.schedule(policy, now);
        self.failures += 1;
        self.last_error = Some(why);
        if self.failures < policy.threshold || self.degraded {
            return Verdict::Wait;
        }
        self.degraded = true;
        match policy.on_degraded {
            OnDegraded::Warn => Verdict::Degraded(self.failures),
            OnDegraded::Reconnect => Verdict::GiveUp(self.failures),
        }
    }

    /// The check succeeded. If it was degraded: after how many failures it is restored, and what the last was.
    pub fn succeeded(&mut self, policy: &HealthPolicy, now: Instant) -> Option<(u32, Option<String>)> {
        self.schedule(policy, now);
        self.is_well()
    }

    /// It has answered in whatever way: a call is as good as a check.
    pub fn is_well(&mut self) -> Option<(u32, Option<String>)> {
        let failures = std::mem::take(&mut self.failures);
        let last_error = self.last_error.take();
        std::mem::take(&mut self.degraded).then_some((failures, last_error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn checks(policy: &HealthPolicy, now: Instant) -> Checks {
        Checks::new(policy, Dice::new(1, "a"), now)
    }

    fn near(interval: Duration, from: Instant, at: Option<Instant>) -> bool {
        let after = at.map(|at| at - from).unwrap_or_default();
        after >= interval * 9 / 10 && after <= interval * 11 / 10
    }

    #[test]
    fn the_first_check_comes_an_interval_after_connecting_and_none_while_one_is_under_way() {
        let (policy, now) = (HealthPolicy::default(), Instant::now());
        let mut checks = checks(&policy, now);
        assert!(near(policy.interval, now, checks.due_at()));
        assert_eq!(checks.begin(&policy), HealthCheck::Ping);
        assert_eq!(checks.due_at(), None);
        checks.hurry(now);
        assert_eq!(checks.due_at(), None);
        assert_eq!(checks.succeeded(&policy, now), None);
        assert!(near(policy.interval, now, checks.due_at()));
        checks.hurry(now);
        assert_eq!(checks.due_at(), Some(now));
    }

    #[test]
    fn a_doubt_is_settled_in_the_session_and_at_once_even_behind_a_check_that_is_under_way() {
        let (policy, now) = (HealthPolicy { check: HealthCheck::Get, ..HealthPolicy::default() }, Instant::now());
        let mut checks = checks(&policy, now);
        checks.doubt(now);
        assert_eq!((checks.due_at(), checks.begin(&policy)), (Some(now), HealthCheck::Ping));
        checks.doubt(now);
        assert_eq!(checks.due_at(), None, "one at a time");
        assert_eq!(checks.succeeded(&policy, now), None);
        assert_eq!((checks.due_at(), checks.begin(&policy)), (Some(now), HealthCheck::Ping));
        assert!(checks.no_ping(now));
        assert_eq!(checks.begin(&policy), HealthCheck::ToolsList);
        assert_eq!(checks.succeeded(&policy, now), None);
        assert!(near(policy.interval, now, checks.due_at()));
        assert_eq!(checks.begin(&policy), HealthCheck::Get);
    }

    #[test]
    fn the_third_failure_in_a_row_is_degraded_once_and_a_success_restores() {
        let (policy, now) = (HealthPolicy::default(), Instant::now());
        let mut checks = checks(&policy, now);
        let fail = |checks: &mut Checks| checks.failed(&policy, "no answer".to_owned(), now);
        assert_eq!([fail(&mut checks), fail(&mut checks)], [Verdict::Wait, Verdict::Wait]);
        assert_eq!(checks.is_well(), None, "it was never degraded");
        assert_eq!([fail(&mut checks), fail(&mut checks)], [Verdict::Wait, Verdict::Wait]);
        assert_eq!(fail(&mut checks), Verdict::Degraded(3));
        assert_eq!(fail(&mut checks), Verdict::Wait, "it is told once");
        assert_eq!(checks.is_well(), Some((4, Some("no answer".to_owned()))));
        assert_eq!(checks.is_well(), None);
    }

    #[test]
    fn where_degraded_means_reconnect_the_connection_is_given_up() {
        let (policy, now) = (HealthPolicy { threshold: 1, ..HealthPolicy::bounded() }, Instant::now());
        let mut checks = checks(&policy, now);
        assert_eq!(checks.failed(&policy, "no answer".to_owned(), now), Verdict::GiveUp(1));
    }

    #[test]
    fn a_server_that_knows_no_ping_is_asked_for_its_tools_from_then_on() {
        let (policy, now) = (HealthPolicy::default(), Instant::now());
        let mut checks = checks(&policy, now);
        assert_eq!(checks.begin(&policy), HealthCheck::Ping);
        assert!(checks.no_ping(now));
        assert_eq!(checks.due_at(), Some(now));
        assert_eq!(checks.begin(&policy), HealthCheck::ToolsList);
        assert!(!checks.no_ping(now), "it knows neither, and is not asked without a pause");
        assert_eq!(checks.succeeded(&policy, now), None);
        assert_eq!(checks.begin(&policy), HealthCheck::ToolsList);
    }
}
