//! Schedule of health checks of a connected server, and the effect of their results.

use std::time::{Duration, Instant};

use super::jitter::JitterRng;
use crate::model::policy::{DegradedAction, HealthCheck, HealthPolicy};

const SPREAD_PERCENT: u8 = 10;

/// Health checks of one session.
#[derive(Debug, Clone)]
pub struct HealthChecks {
    rng: JitterRng,
    failures: u32,
    degraded: bool,
    last_error: Option<String>,
    last_request: HealthCheck,
    // The server does not support `ping`.
    ping_unsupported: bool,
    // The next check is due at once and must use the session, not a GET.
    in_doubt: bool,
    next_at: Option<Instant>,
}

/// Effect of a failed check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HealthVerdict {
    /// Too few consecutive failures for a decision.
    Wait,
    /// The server is degraded after this number of failures: an event is emitted.
    Degraded(u32),
    /// The connection must be closed after this number of failures.
    GiveUp(u32),
}

impl HealthChecks {
    /// Creates the checks of a session connected at `now`. The first one is due after one interval.
    pub fn new(policy: &HealthPolicy, rng: JitterRng, now: Instant) -> Self {
        let mut checks = Self {
            rng,
            failures: 0,
            degraded: false,
            last_error: None,
            last_request: policy.check,
            ping_unsupported: false,
            in_doubt: false,
            next_at: None,
        };
        checks.schedule(policy, now);
        checks
    }

    fn schedule(&mut self, policy: &HealthPolicy, now: Instant) {
        let pause = if self.in_doubt { Duration::ZERO } else { self.rng.jitter(policy.interval, SPREAD_PERCENT) };
        self.next_at = now.checked_add(pause);
    }

    /// Returns the time of the next check; `None` while one is in progress.
    pub fn due_at(&self) -> Option<Instant> {
        self.next_at
    }

    /// Applies a changed policy: the next check is due one interval after `now`, unless one is in progress or due at
    /// once.
    pub fn reschedule(&mut self, policy: &HealthPolicy, now: Instant) {
        if self.next_at.is_some() {
            self.schedule(policy, now);
        }
    }

    /// Makes the next check due at once, unless one is in progress.
    pub fn schedule_now(&mut self, now: Instant) {
        if let Some(at) = &mut self.next_at {
            *at = now;
        }
    }

    /// Requests a check within the session, at once or after the check in progress, because the server may have lost
    /// the session.
    pub fn request_session_check(&mut self, now: Instant) {
        self.in_doubt = true;
        self.schedule_now(now);
    }

    /// Begins a check and returns the request to send.
    pub fn begin(&mut self, policy: &HealthPolicy) -> HealthCheck {
        self.next_at = None;
        let in_doubt = std::mem::take(&mut self.in_doubt);
        self.last_request = match policy.check {
            HealthCheck::Get if !in_doubt => HealthCheck::Get,
            HealthCheck::Get | HealthCheck::Ping if !self.ping_unsupported => HealthCheck::Ping,
            HealthCheck::Get | HealthCheck::Ping | HealthCheck::ToolsList => HealthCheck::ToolsList,
        };
        self.last_request
    }

    /// Processes an error answer to a check. If the request was `ping`, which is not supported by all servers, later
    /// checks use `tools/list`, and the next one is due at once. Returns true in this case.
    #[must_use]
    pub fn fall_back_from_ping(&mut self, now: Instant) -> bool {
        let was_ping = self.last_request == HealthCheck::Ping;
        if was_ping {
            // The check that replaces `ping` must use the session too.
            (self.ping_unsupported, self.in_doubt, self.next_at) = (true, true, Some(now));
        }
        was_ping
    }

    /// Returns the request of the last check.
    pub fn last_request(&self) -> HealthCheck {
        self.last_request
    }

    /// Processes a check that failed or was not answered.
    pub fn record_failure(&mut self, policy: &HealthPolicy, why: String, now: Instant) -> HealthVerdict {
        self.schedule(policy, now);
        self.failures += 1;
        self.last_error = Some(why);
        if self.failures < policy.threshold || self.degraded {
            return HealthVerdict::Wait;
        }
        self.degraded = true;
        match policy.on_degraded {
            DegradedAction::Warn => HealthVerdict::Degraded(self.failures),
            DegradedAction::Reconnect => HealthVerdict::GiveUp(self.failures),
        }
    }

    /// Processes a successful check. Returns the number of failures and the last error if the server was degraded.
    pub fn record_success(&mut self, policy: &HealthPolicy, now: Instant) -> Option<(u32, Option<String>)> {
        self.schedule(policy, now);
        self.record_answer()
    }

    /// Processes any answer of the server: a successful call counts like a check. Returns the number of failures and
    /// the last error if the server was degraded.
    pub fn record_answer(&mut self) -> Option<(u32, Option<String>)> {
        let failures = std::mem::take(&mut self.failures);
        let last_error = self.last_error.take();
        std::mem::take(&mut self.degraded).then_some((failures, last_error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn checks(policy: &HealthPolicy, now: Instant) -> HealthChecks {
        HealthChecks::new(policy, JitterRng::new(1, "a"), now)
    }

    fn near(interval: Duration, from: Instant, at: Option<Instant>) -> bool {
        let after = at.map(|at| at - from).unwrap_or_default();
        after >= interval * 9 / 10 && after <= interval * 11 / 10
    }

    #[test]
    fn checks_come_one_interval_apart_and_never_overlap() {
        let (policy, now) = (HealthPolicy::default(), Instant::now());
        let mut checks = checks(&policy, now);
        assert!(near(policy.interval, now, checks.due_at()));
        assert_eq!(checks.begin(&policy), HealthCheck::Ping);
        assert_eq!(checks.due_at(), None);
        checks.schedule_now(now);
        assert_eq!(checks.due_at(), None);
        assert_eq!(checks.record_success(&policy, now), None);
        assert!(near(policy.interval, now, checks.due_at()));
        checks.schedule_now(now);
        assert_eq!(checks.due_at(), Some(now));
    }

    #[test]
    fn a_requested_session_check_runs_at_once_or_after_the_current_check() {
        let (policy, now) = (HealthPolicy { check: HealthCheck::Get, ..HealthPolicy::default() }, Instant::now());
        let mut checks = checks(&policy, now);
        checks.request_session_check(now);
        assert_eq!((checks.due_at(), checks.begin(&policy)), (Some(now), HealthCheck::Ping));
        checks.request_session_check(now);
        assert_eq!(checks.due_at(), None, "one check at a time");
        assert_eq!(checks.record_success(&policy, now), None);
        assert_eq!((checks.due_at(), checks.begin(&policy)), (Some(now), HealthCheck::Ping));
        assert!(checks.fall_back_from_ping(now));
        assert_eq!(checks.begin(&policy), HealthCheck::ToolsList);
        assert_eq!(checks.record_success(&policy, now), None);
        assert!(near(policy.interval, now, checks.due_at()));
        assert_eq!(checks.begin(&policy), HealthCheck::Get);
    }

    #[test]
    fn three_failures_report_degradation_once_and_a_success_restores() {
        let (policy, now) = (HealthPolicy::default(), Instant::now());
        let mut checks = checks(&policy, now);
        let fail = |checks: &mut HealthChecks| checks.record_failure(&policy, "no answer".to_owned(), now);
        assert_eq!([fail(&mut checks), fail(&mut checks)], [HealthVerdict::Wait, HealthVerdict::Wait]);
        assert_eq!(checks.record_answer(), None, "no degradation was reported");
        assert_eq!([fail(&mut checks), fail(&mut checks)], [HealthVerdict::Wait, HealthVerdict::Wait]);
        assert_eq!(fail(&mut checks), HealthVerdict::Degraded(3));
        assert_eq!(fail(&mut checks), HealthVerdict::Wait, "the degradation is reported once");
        assert_eq!(checks.record_answer(), Some((4, Some("no answer".to_owned()))));
        assert_eq!(checks.record_answer(), None);
    }

    #[test]
    fn the_reconnect_policy_gives_up_a_degraded_connection() {
        let (policy, now) = (HealthPolicy { threshold: 1, ..HealthPolicy::bounded() }, Instant::now());
        let mut checks = checks(&policy, now);
        assert_eq!(checks.record_failure(&policy, "no answer".to_owned(), now), HealthVerdict::GiveUp(1));
    }

    #[test]
    fn a_server_without_ping_is_checked_by_tools_list_from_then_on() {
        let (policy, now) = (HealthPolicy::default(), Instant::now());
        let mut checks = checks(&policy, now);
        assert_eq!(checks.begin(&policy), HealthCheck::Ping);
        assert!(checks.fall_back_from_ping(now));
        assert_eq!(checks.due_at(), Some(now));
        assert_eq!(checks.begin(&policy), HealthCheck::ToolsList);
        assert!(!checks.fall_back_from_ping(now), "a server without either method is not checked again at once");
        assert_eq!(checks.record_success(&policy, now), None);
        assert_eq!(checks.begin(&policy), HealthCheck::ToolsList);
    }
}
