//! The restart budget and backoff of one instance.
//!
//! Every unwanted exit is charged, whatever its code. A server that initialized and then exited 0 was seen forked
//! 66,487 times in seven minutes by a system that reset its count on a good handshake: here only time, or a person,
//! resets it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::model::policy::{ReconnectPolicy, RestartPolicy};

/// What is remembered of one unwanted exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Charge {
    at: Instant,
    crash: bool,
}

/// The unwanted exits of one instance. Outlives its runs and a panic of its team's supervisor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    charges: VecDeque<Charge>,
    /// Consecutive runs that were quick to end.
    quick: usize,
}

/// What comes after an unwanted exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Start again after `delay`; this was the `attempt`-th exit in the window.
    Restart {
        /// How long to wait.
        delay: Duration,
        /// Unwanted exits in the window, this one included.
        attempt: usize,
    },
    /// Once too often.
    GiveUp {
        /// Unwanted exits in the window, this one included.
        exits: usize,
        /// Whether at least one of them was a crash.
        crashed: bool,
    },
}

impl History {
    /// Charges one unwanted exit of a run that had been initialized for `ran`.
    #[must_use]
    pub fn charge(&mut self, policy: &RestartPolicy, now: Instant, crash: bool, ran: Duration) -> Verdict {
        self.forget_old(policy, now);
        self.charges.push_back(Charge { at: now, crash });
        let exits = self.charges.len();
        if ran > policy.quick {
            self.quick = 0;
        } else {
            self.quick += 1;
        }
        if exits >= policy.max_crashes {
            return Verdict::GiveUp { exits, crashed: self.charges.iter().any(|charge| charge.crash) };
        }
        let delay = match self.quick {
            0 => Duration::ZERO,
            nth => policy.delays.get(nth - 1).or(policy.delays.last()).copied().unwrap_or_default(),
        };
        Verdict::Restart { delay, attempt: exits }
    }

    /// Unwanted exits that still count at `now`.
    pub fn in_window(&self, policy: &RestartPolicy, now: Instant) -> usize {
        self.charges.iter().filter(|charge| counts(policy, now, charge)).count()
    }

    /// As it was written down before: what ended when, oldest first, and how many consecutive runs were quick.
    pub fn restored(exits: impl IntoIterator<Item = (Instant, bool)>, quick: usize) -> Self {
        Self { charges: exits.into_iter().map(|(at, crash)| Charge { at, crash }).collect(), quick }
    }

    /// To be written down: what ended when, and whether it was a crash, oldest first.
    pub fn exits(&self) -> impl Iterator<Item = (Instant, bool)> {
        self.charges.iter().map(|charge| (charge.at, charge.crash))
    }

    /// Consecutive runs that were quick to end.
    pub fn quick(&self) -> usize {
        self.quick
    }

    /// A manual restart or a config update starts with a clean slate.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    fn forget_old(&mut self, policy: &RestartPolicy, now: Instant) {
        self.charges.retain(|charge| counts(policy, now, charge));
    }
}

fn counts(policy: &RestartPolicy, now: Instant, charge: &Charge) -> bool {
    now.duration_since(charge.at) < policy.window
}

/// The delay before the start is repeated that the machine could not carry out, after so many such failures in a row:
/// 1 s, 2 s, 4 s and so on, at most a minute. It never gives up.
pub fn machine_fault_delay(failures: u32) -> Duration {
    const LONGEST: u64 = 60;
    Duration::from_secs((1 << failures.saturating_sub(1).min(6)).min(LONGEST))
}

/// `Process crashed 3 times in 5 minutes; last: exited with code 1: no such table. Manual restart required.`
pub fn give_up_message(policy: &RestartPolicy, exits: usize, crashed: bool, last: &str) -> String {
    let verb = if crashed { "crashed" } else { "exited" };
    let (window, last) = (in_words(policy.window), last.trim_end_matches('.'));
    format!("Process {verb} {exits} times in {window}; last: {last}. Manual restart required.")
}

/// `5 s`, `1.5 s`, `250 ms`.
pub fn in_seconds(duration: Duration) -> String {
    if duration < Duration::from_secs(1) {
        format!("{} ms", duration.as_millis())
    } else {
        format!("{} s", duration.as_millis() as f64 / 1000.0)
    }
}

/// `5 minutes`, `1 minute`, `90 seconds`.
fn in_words(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (count, unit) =
        if seconds >= 60 && seconds.is_multiple_of(60) { (seconds / 60, "minute") } else { (seconds, "second") };
    format!("{count} {unit}{}", if count == 1 { "" } else { "s" })
}

/// The delay before retry number `attempt` (1 is the first): doubling from the minimum to the maximum.
pub fn reconnect_delay(policy: &ReconnectPolicy, attempt: u32) -> Duration {
    let doublings = attempt.saturating_sub(1).min(31);
    policy.backoff_min.saturating_mul(1 << doublings).min(policy.backoff_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_secs(1);

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn quick_exits_wait_1_5_15_and_the_fourth_is_one_too_many() {
        let policy = RestartPolicy { max_crashes: 4, ..RestartPolicy::default() };
        let (mut history, now) = (History::default(), Instant::now());
        for (nth, delay) in [(1, 1), (2, 5), (3, 15)] {
            let verdict = history.charge(&policy, now, true, QUICK);
            assert_eq!(verdict, Verdict::Restart { delay: seconds(delay), attempt: nth });
        }
        assert_eq!(history.charge(&policy, now, true, QUICK), Verdict::GiveUp { exits: 4, crashed: true });
    }

    #[test]
    fn the_third_exit_in_five_minutes_is_one_too_many_by_default() {
        let policy = RestartPolicy::default();
        let (mut history, start) = (History::default(), Instant::now());
        let _ = history.charge(&policy, start, false, QUICK);
        let _ = history.charge(&policy, start + seconds(299), false, QUICK);
        let verdict = history.charge(&policy, start + seconds(299), false, QUICK);
        assert_eq!(verdict, Verdict::GiveUp { exits: 3, crashed: false });
        for (crashed, last, message) in [
            (
                false,
                "exited with code 0",
                "Process exited 3 times in 5 minutes; last: exited with code 0. Manual restart required.",
            ),
            (
                true,
                "executable \"npxx\" not found in PATH.",
                "Process crashed 3 times in 5 minutes; last: executable \"npxx\" not found in PATH. Manual restart required.",
            ),
        ] {
            assert_eq!(give_up_message(&policy, 3, crashed, last), message);
        }
    }

    #[test]
    fn an_exit_older_than_the_window_no_longer_counts() {
        let policy = RestartPolicy::default();
        let (mut history, start) = (History::default(), Instant::now());
        let _ = history.charge(&policy, start, true, QUICK);
        let _ = history.charge(&policy, start + seconds(1), true, QUICK);
        let verdict = history.charge(&policy, start + seconds(300), true, QUICK);
        assert_eq!(verdict, Verdict::Restart { delay: seconds(15), attempt: 2 });
        assert_eq!(history.in_window(&policy, start + seconds(302)), 1);
    }

    #[test]
    fn a_run_of_more_than_a_minute_restarts_at_once_and_ends_the_streak_but_not_the_count() {
        let policy = RestartPolicy { max_crashes: 5, ..RestartPolicy::default() };
        let (mut history, now) = (History::default(), Instant::now());
        let _ = history.charge(&policy, now, true, QUICK);
        let long = history.charge(&policy, now, true, seconds(61));
        assert_eq!(long, Verdict::Restart { delay: Duration::ZERO, attempt: 2 });
        let exactly = history.charge(&policy, now, true, seconds(60));
        assert_eq!(exactly, Verdict::Restart { delay: seconds(1), attempt: 3 });
    }

    #[test]
    fn retries_double_up_to_the_maximum() {
        let policy = ReconnectPolicy::default();
        let delays: Vec<u64> = (1..=10).map(|attempt| reconnect_delay(&policy, attempt).as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 128, 180, 180]);
        assert_eq!(reconnect_delay(&policy, u32::MAX), seconds(180));
    }
}
