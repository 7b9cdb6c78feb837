//! Restart budget and backoff of one instance.
//!
//! Every unwanted exit is charged, whatever its code, and only time or a person resets the count. A system that reset
//! its count after a successful handshake forked a server 66,487 times in seven minutes, because the server initialized
//! and then exited with code 0.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::model::backoff::{Backoff, listed_delay};
use crate::model::policy::RestartPolicy;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ChargedExit {
    at: Instant,
    crash: bool,
}

/// Unwanted exits of one instance. Outlives its runs and a panic of the supervisor of the team.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExitHistory {
    charges: VecDeque<ChargedExit>,
    // Number of consecutive quick exits.
    quick_exits: usize,
}

/// Decision after an unwanted exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartVerdict {
    /// Start again after `delay`.
    Restart {
        /// Time until the restart.
        delay: Duration,
        /// Number of unwanted exits in the window, this one included.
        attempt: usize,
    },
    /// The restart budget is exhausted.
    GiveUp {
        /// Number of unwanted exits in the window, this one included.
        exits: usize,
        /// True if at least one of them was a crash.
        crashed: bool,
    },
}

impl ExitHistory {
    /// Charges an unwanted exit of a run that was initialized for the duration `ran`.
    #[must_use]
    pub fn charge(&mut self, policy: &RestartPolicy, now: Instant, crash: bool, ran: Duration) -> RestartVerdict {
        self.forget_old(policy, now);
        self.charges.push_back(ChargedExit { at: now, crash });
        let exits = self.charges.len();
        if ran > policy.quick {
            self.quick_exits = 0;
        } else {
            self.quick_exits += 1;
        }
        if exits >= policy.max_crashes {
            return RestartVerdict::GiveUp { exits, crashed: self.charges.iter().any(|charge| charge.crash) };
        }
        let delay = match self.quick_exits {
            0 => Duration::ZERO,
            attempt => listed_delay(&policy.delays, attempt),
        };
        RestartVerdict::Restart { delay, attempt: exits }
    }

    /// Returns the number of unwanted exits in the window at `now`.
    pub fn exits_in_window(&self, policy: &RestartPolicy, now: Instant) -> usize {
        self.ages_in_window(policy, now).count()
    }

    /// Returns the times since the unwanted exits in the window at `now`, oldest first.
    pub fn ages_in_window(&self, policy: &RestartPolicy, now: Instant) -> impl Iterator<Item = Duration> {
        let counted = self.charges.iter().filter(move |charge| is_in_window(policy, now, charge));
        counted.map(move |charge| now.duration_since(charge.at))
    }

    /// Restores a stored history from its exits, oldest first, each with its time and true for a crash, and the number
    /// of consecutive quick exits.
    pub fn from_exits(exits: impl IntoIterator<Item = (Instant, bool)>, quick_exits: usize) -> Self {
        Self { charges: exits.into_iter().map(|(at, crash)| ChargedExit { at, crash }).collect(), quick_exits }
    }

    /// Returns the exits, oldest first, each with its time and true for a crash.
    pub fn exits(&self) -> impl Iterator<Item = (Instant, bool)> {
        self.charges.iter().map(|charge| (charge.at, charge.crash))
    }

    /// Returns the number of consecutive quick exits.
    pub fn quick_exits(&self) -> usize {
        self.quick_exits
    }

    /// Clears the history, after a manual restart or a change of the configuration.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    fn forget_old(&mut self, policy: &RestartPolicy, now: Instant) {
        self.charges.retain(|charge| is_in_window(policy, now, charge));
    }
}

fn is_in_window(policy: &RestartPolicy, now: Instant, charge: &ChargedExit) -> bool {
    now.duration_since(charge.at) < policy.window
}

/// Delay after consecutive starts that the machine could not execute. The attempts never end.
pub const MACHINE_FAULT_BACKOFF: Backoff = Backoff::doubling(Duration::from_secs(1), Duration::from_secs(60));

/// Returns the status message of an exhausted budget: `Process crashed 3 times in 5 minutes; last: exited with code 1:
/// no such table. Manual restart required.`
pub fn give_up_message(policy: &RestartPolicy, exits: usize, crashed: bool, last: &str) -> String {
    let verb = if crashed { "crashed" } else { "exited" };
    let (window, last) = (format_window(policy.window), last.trim_end_matches('.'));
    format!("Process {verb} {exits} times in {window}; last: {last}. Manual restart required.")
}

/// Formats a duration for messages: `5 s`, `1.5 s`, `250 ms`.
pub fn format_seconds(duration: Duration) -> String {
    if duration < Duration::from_secs(1) {
        format!("{} ms", duration.as_millis())
    } else {
        format!("{} s", duration.as_millis() as f64 / 1000.0)
    }
}

fn format_window(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (count, unit) =
        if seconds >= 60 && seconds.is_multiple_of(60) { (seconds / 60, "minute") } else { (seconds, "second") };
    format!("{count} {unit}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_secs(1);

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn quick_exits_wait_1_5_and_15_seconds_and_the_fourth_gives_up() {
        let policy = RestartPolicy { max_crashes: 4, ..RestartPolicy::default() };
        let (mut history, now) = (ExitHistory::default(), Instant::now());
        for (nth, delay) in [(1, 1), (2, 5), (3, 15)] {
            let verdict = history.charge(&policy, now, true, QUICK);
            assert_eq!(verdict, RestartVerdict::Restart { delay: seconds(delay), attempt: nth });
        }
        assert_eq!(history.charge(&policy, now, true, QUICK), RestartVerdict::GiveUp { exits: 4, crashed: true });
    }

    #[test]
    fn the_third_exit_in_five_minutes_gives_up_by_default() {
        let policy = RestartPolicy::default();
        let (mut history, start) = (ExitHistory::default(), Instant::now());
        let _ = history.charge(&policy, start, false, QUICK);
        let _ = history.charge(&policy, start + seconds(299), false, QUICK);
        let verdict = history.charge(&policy, start + seconds(299), false, QUICK);
        assert_eq!(verdict, RestartVerdict::GiveUp { exits: 3, crashed: false });
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
        let (mut history, start) = (ExitHistory::default(), Instant::now());
        let _ = history.charge(&policy, start, true, QUICK);
        let _ = history.charge(&policy, start + seconds(1), true, QUICK);
        let verdict = history.charge(&policy, start + seconds(300), true, QUICK);
        assert_eq!(verdict, RestartVerdict::Restart { delay: seconds(15), attempt: 2 });
        assert_eq!(history.exits_in_window(&policy, start + seconds(302)), 1);
    }

    #[test]
    fn a_run_longer_than_a_minute_resets_the_delays_but_not_the_count() {
        let policy = RestartPolicy { max_crashes: 5, ..RestartPolicy::default() };
        let (mut history, now) = (ExitHistory::default(), Instant::now());
        let _ = history.charge(&policy, now, true, QUICK);
        let long = history.charge(&policy, now, true, seconds(61));
        assert_eq!(long, RestartVerdict::Restart { delay: Duration::ZERO, attempt: 2 });
        let exactly = history.charge(&policy, now, true, seconds(60));
        assert_eq!(exactly, RestartVerdict::Restart { delay: seconds(1), attempt: 3 });
    }

    #[test]
    fn starts_that_the_machine_cannot_execute_are_repeated_after_1_to_60_seconds() {
        let delays: Vec<u64> = (0..=9).map(|failures| MACHINE_FAULT_BACKOFF.delay(failures).as_secs()).collect();
        assert_eq!(delays, [1, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(MACHINE_FAULT_BACKOFF.delay(u32::MAX), seconds(60));
    }
}
