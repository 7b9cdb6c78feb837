//! When a server that is alive is as dead as one that exited: not a byte for a while, a call timed out in that time, no
//! call still inside its own deadline, and a ping unanswered. A busy single-threaded server is not that: the call that
//! keeps it busy is still inside its deadline, or its next byte clears it.

use std::time::Instant;

use crate::model::policy::WatchdogPolicy;

/// What is known of one session's liveness.
#[derive(Debug, Clone)]
pub struct Watchdog {
    last_byte: Instant,
    call_timed_out: bool,
    pinged: Option<Instant>,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing before this time, or before something happens.
    Wait(Option<Instant>),
    /// Send a ping; any byte that comes back clears the server.
    Ping,
    /// It is unresponsive.
    Unresponsive,
}

impl Watchdog {
    /// A session that begins now.
    pub fn new(now: Instant) -> Self {
        Self { last_byte: now, call_timed_out: false, pinged: None }
    }

    /// The last bytes came at this time: if they are newer than what is known, whatever was suspected is over.
    pub fn heard(&mut self, at: Instant) {
        if at > self.last_byte {
            *self = Self::new(at);
        }
    }

    /// A call's deadline passed.
    pub fn call_timed_out(&mut self) {
        self.call_timed_out = true;
    }

    /// Whether anything counts against the server: only then do its open calls matter.
    pub fn is_suspicious(&self) -> bool {
        self.call_timed_out
    }

    /// The decision at `now`, with `calls_open` calls still inside their own deadlines.
    #[must_use]
    pub fn check(&mut self, policy: &WatchdogPolicy, now: Instant, calls_open: usize) -> Verdict {
        if !self.call_timed_out || calls_open > 0 {
            return Verdict::Wait(None);
        }
        let silent_at = self.last_byte + policy.silence;
        if now < silent_at {
            return Verdict::Wait(Some(silent_at));
        }
        let Some(pinged) = self.pinged else {
            self.pinged = Some(now);
            return Verdict::Ping;
        };
        let answer_by = pinged + policy.ping_timeout;
        if now < answer_by { Verdict::Wait(Some(answer_by)) } else { Verdict::Unresponsive }
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
    fn silence_a_timed_out_call_and_an_unanswered_ping_together_are_death() {
        let (policy, start) = (WatchdogPolicy::default(), Instant::now());
        let mut dog = Watchdog::new(start);
        assert_eq!(dog.check(&policy, at(start, 600), 0), Verdict::Wait(None), "idle is not dead");
        dog.call_timed_out();
        assert_eq!(dog.check(&policy, at(start, 30), 0), Verdict::Wait(Some(at(start, 60))));
        assert_eq!(dog.check(&policy, at(start, 60), 1), Verdict::Wait(None), "a call is still inside its deadline");
        assert_eq!(dog.check(&policy, at(start, 61), 0), Verdict::Ping);
        assert_eq!(dog.check(&policy, at(start, 62), 0), Verdict::Wait(Some(at(start, 71))), "one ping at a time");
        assert_eq!(dog.check(&policy, at(start, 71), 0), Verdict::Unresponsive);
    }

    #[test]
    fn one_byte_clears_a_suspect() {
        let (policy, start) = (WatchdogPolicy::default(), Instant::now());
        let mut dog = Watchdog::new(start);
        dog.call_timed_out();
        assert_eq!(dog.check(&policy, at(start, 60), 0), Verdict::Ping);
        dog.heard(at(start, 65));
        assert_eq!(dog.check(&policy, at(start, 600), 0), Verdict::Wait(None));
    }
}
