//! Detection of a server that is alive but does not answer. A server is unresponsive if it sent no byte for a while, a
//! call timed out in that time, no call is within its own deadline, and a ping was not answered.
//!
//! A busy single-threaded server does not count: the call that keeps it busy is within its deadline, or its next byte
//! clears it. Calls made after all other conditions are met do not count in its favour: otherwise a frozen server that
//! is called constantly would never be detected.

use std::time::Instant;

use crate::model::policy::WatchdogPolicy;

/// Liveness of one session.
#[derive(Debug, Clone)]
pub struct Watchdog {
    last_byte: Instant,
    call_timed_out: bool,
    // Requests with this number or a higher one were made after the silence had become too long.
    first_silent_request: Option<u64>,
    pinged_at: Option<Instant>,
}

/// Decision of the watchdog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchdogVerdict {
    /// Check again at this time, or after the next event if `None`.
    Wait(Option<Instant>),
    /// Send a ping. Any byte received after it clears the server.
    Ping,
    /// The server is unresponsive.
    Unresponsive,
}

impl Watchdog {
    /// Creates the watchdog of a session that begins at `now`.
    pub fn new(now: Instant) -> Self {
        Self { last_byte: now, call_timed_out: false, first_silent_request: None, pinged_at: None }
    }

    /// Records the time of the last received bytes. If they are newer than the last known ones, the suspicion ends.
    pub fn record_activity(&mut self, at: Instant) {
        if at > self.last_byte {
            *self = Self::new(at);
        }
    }

    /// Records that the deadline of a call passed.
    pub fn record_call_timeout(&mut self) {
        self.call_timed_out = true;
    }

    /// Decides at `now`. `next` is the number of the next request; `calls_below` returns how many calls with numbers
    /// below its argument are still within their deadlines.
    #[must_use]
    pub fn check(
        &mut self,
        policy: &WatchdogPolicy,
        now: Instant,
        next: u64,
        calls_below: impl FnOnce(u64) -> usize,
    ) -> WatchdogVerdict {
        if !self.call_timed_out {
            return WatchdogVerdict::Wait(None);
        }
        let silent_at = self.last_byte + policy.silence;
        if now < silent_at {
            return WatchdogVerdict::Wait(Some(silent_at));
        }
        if calls_below(*self.first_silent_request.get_or_insert(next)) > 0 {
            return WatchdogVerdict::Wait(None);
        }
        let Some(pinged) = self.pinged_at else {
            self.pinged_at = Some(now);
            return WatchdogVerdict::Ping;
        };
        let deadline = pinged + policy.ping_timeout;
        if now < deadline { WatchdogVerdict::Wait(Some(deadline)) } else { WatchdogVerdict::Unresponsive }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn silence_a_timed_out_call_and_an_unanswered_ping_mean_unresponsive() {
        let (policy, start) = (WatchdogPolicy::default(), Instant::now());
        let mut watchdog = Watchdog::new(start);
        let check = |watchdog: &mut Watchdog, seconds| watchdog.check(&policy, at(start, seconds), 2, |_| 0);
        assert_eq!(check(&mut watchdog, 600), WatchdogVerdict::Wait(None), "an idle server is not unresponsive");
        watchdog.record_call_timeout();
        assert_eq!(check(&mut watchdog, 30), WatchdogVerdict::Wait(Some(at(start, 60))));
        assert_eq!(check(&mut watchdog, 61), WatchdogVerdict::Ping);
        assert_eq!(check(&mut watchdog, 62), WatchdogVerdict::Wait(Some(at(start, 71))), "one ping at a time");
        assert_eq!(check(&mut watchdog, 71), WatchdogVerdict::Unresponsive);
    }

    #[test]
    fn calls_from_before_the_suspicion_postpone_the_ping_but_later_ones_do_not() {
        let (policy, start) = (WatchdogPolicy::default(), Instant::now());
        let mut watchdog = Watchdog::new(start);
        watchdog.record_call_timeout();
        let open = |number: u64| move |end: u64| usize::from(number < end);
        assert_eq!(watchdog.check(&policy, at(start, 60), 7, open(6)), WatchdogVerdict::Wait(None));
        assert_eq!(watchdog.check(&policy, at(start, 80), 8, open(6)), WatchdogVerdict::Wait(None));
        assert_eq!(watchdog.check(&policy, at(start, 90), 9, open(7)), WatchdogVerdict::Ping);
    }

    #[test]
    fn received_data_clears_the_suspicion() {
        let (policy, start) = (WatchdogPolicy::default(), Instant::now());
        let mut watchdog = Watchdog::new(start);
        watchdog.record_call_timeout();
        assert_eq!(watchdog.check(&policy, at(start, 60), 2, |_| 0), WatchdogVerdict::Ping);
        watchdog.record_activity(at(start, 65));
        assert_eq!(watchdog.check(&policy, at(start, 600), 3, |_| 0), WatchdogVerdict::Wait(None));
    }
}
