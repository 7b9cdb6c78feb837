//! When a server that is alive is as dead as one that exited: not a byte for a while, a call timed out in that time, no
//! call still inside its own deadline, and a ping unanswered. A busy single-threaded server is not that: the call that
//! keeps it busy is still inside its deadline, or its next byte clears it. Calls that are made after all else has come
//! together do not speak for it: else a frozen server that is called all the time would never be found.

use std::time::Instant;

use crate::model::policy::WatchdogPolicy;

/// What is known of one session's liveness.
#[derive(Debug, Clone)]
pub struct Watchdog {
    last_byte: Instant,
    call_timed_out: bool,
    /// Requests with this number and above were made when it was silent for too long already.
    silent_from: Option<u64>,
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
        Self { last_byte: now, call_timed_out: false, silent_from: None, pinged: None }
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

    /// The decision at `now`, when the next request will have the number `next`; `calls_below` tells how many calls with
    /// smaller numbers than its argument are still inside their own deadlines.
    #[must_use]
    pub fn check(
        &mut self,
        policy: &WatchdogPolicy,
        now: Instant,
        next: u64,
        calls_below: impl FnOnce(u64) -> usize,
    ) -> Verdict {
        if !self.call_timed_out {
            return Verdict::Wait(None);
        }
        let silent_at = self.last_byte + policy.silence;
        if now < silent_at {
            return Verdict::Wait(Some(silent_at));
        }
        if calls_below(*self.silent_from.get_or_insert(next)) > 0 {
            return Verdict::Wait(None);
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
        let check = |dog: &mut Watchdog, seconds| dog.check(&policy, at(start, seconds), 2, |_| 0);
        assert_eq!(check(&mut dog, 600), Verdict::Wait(None), "idle is not dead");
        dog.call_timed_out();
        assert_eq!(check(&mut dog, 30), Verdict::Wait(Some(at(start, 60))));
        assert_eq!(check(&mut dog, 61), Verdict::Ping);
        assert_eq!(check(&mut dog, 62), Verdict::Wait(Some(at(start, 71))), "one ping at a time");
        assert_eq!(check(&mut dog, 71), Verdict::Unresponsive);
    }

    #[test]
    fn a_call_inside_its_deadline_speaks_for_a_server_unless_it_was_made_after_all_else_had_come_together() {
        let (policy, start) = (WatchdogPolicy::default(), Instant::now());
        let mut dog = Watchdog::new(start);
        dog.call_timed_out();
        let open = |number: u64| move |end: u64| usize::from(number < end);
        assert_eq!(dog.check(&policy, at(start, 60), 7, open(6)), Verdict::Wait(None));
        assert_eq!(dog.check(&policy, at(start, 80), 8, open(6)), Verdict::Wait(None));
        assert_eq!(dog.check(&policy, at(start, 90), 9, open(7)), Verdict::Ping);
    }

    #[test]
    fn one_byte_clears_a_suspect() {
        let (policy, start) = (WatchdogPolicy::default(), Instant::now());
        let mut dog = Watchdog::new(start);
        dog.call_timed_out();
        assert_eq!(dog.check(&policy, at(start, 60), 2, |_| 0), Verdict::Ping);
        dog.heard(at(start, 65));
        assert_eq!(dog.check(&policy, at(start, 600), 3, |_| 0), Verdict::Wait(None));
    }
}
