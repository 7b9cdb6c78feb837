//! Sleep of idle servers. Checks take place on a grid of intervals that begins when the server is ready. The next check
//! is the first at which the server can be idle long enough, so that a busy fleet needs one timer per server and idle
//! time, not one per interval.

use std::time::{Duration, Instant};

use crate::model::policy::IdlePolicy;

/// Current use of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunActivity {
    /// Number of unanswered calls, and of clients that wait for messages of the server.
    pub user_count: usize,
    /// Time of the last message of the server, or of the last begin or end of a call.
    pub last: Instant,
}

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdleVerdict {
    /// The server has been idle for this duration.
    Idle(Duration),
    /// The server is in use or too young. Contains the time of the next check; `None` for no further check, because the
    /// times of the policy exceed the range of the clock.
    CheckAgain(Option<Instant>),
}

/// Returns the time of the first check of a run that became ready at `ready`.
pub fn first_check(policy: &IdlePolicy, ready: Instant) -> Option<Instant> {
    align_to_sweep(policy, ready, ready.checked_add(policy.idle)?.max(end_of_grace(policy, ready)?))
}

/// Checks a run that became ready at `ready`.
pub fn check(policy: &IdlePolicy, ready: Instant, activity: RunActivity, now: Instant) -> IdleVerdict {
    let quiet = now.saturating_duration_since(activity.last);
    let age = now.saturating_duration_since(ready);
    if activity.user_count == 0 && quiet >= policy.idle && age > policy.grace {
        return IdleVerdict::Idle(quiet);
    }
    // An open call may end right after this check: its idle time begins then.
    let last = if activity.user_count == 0 { activity.last } else { now };
    let possible = last.checked_add(policy.idle).zip(end_of_grace(policy, ready)).zip(just_after(now));
    IdleVerdict::CheckAgain(
        possible.and_then(|((idle, grown), later)| align_to_sweep(policy, ready, idle.max(grown).max(later))),
    )
}

/// Returns the time of the check after one at which the server was idle but could not be put to sleep, because a call
/// arrived.
pub fn next_check(policy: &IdlePolicy, ready: Instant, now: Instant) -> Option<Instant> {
    align_to_sweep(policy, ready, just_after(now)?)
}

// First time at which the run is older than its grace period.
fn end_of_grace(policy: &IdlePolicy, ready: Instant) -> Option<Instant> {
    just_after(ready.checked_add(policy.grace)?)
}

fn just_after(time: Instant) -> Option<Instant> {
    time.checked_add(Duration::from_nanos(1))
}

// First check that is not before `earliest`, and always after `ready`.
fn align_to_sweep(policy: &IdlePolicy, ready: Instant, earliest: Instant) -> Option<Instant> {
    // An interval of zero would cause a busy loop.
    let sweep = policy.sweep.max(Duration::from_millis(1)).as_nanos();
    let sweeps = earliest.saturating_duration_since(ready).as_nanos().div_ceil(sweep).max(1);
    let nanos = sweeps.checked_mul(sweep)?;
    ready.checked_add(Duration::from_nanos(u64::try_from(nanos).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    fn at(needed_by: usize, last: Instant) -> RunActivity {
        RunActivity { user_count: needed_by, last }
    }

    #[test]
    fn an_uncalled_server_is_idle_at_its_first_check_after_180_seconds() {
        let (policy, ready) = (IdlePolicy::default(), Instant::now());
        let first = first_check(&policy, ready);
        assert_eq!(first, Some(ready + seconds(180)));
        assert_eq!(check(&policy, ready, at(0, ready), ready + seconds(180)), IdleVerdict::Idle(seconds(180)));
    }

    #[test]
    fn activity_postpones_the_check_to_the_first_sweep_after_the_idle_time() {
        let (policy, ready) = (IdlePolicy::default(), Instant::now());
        let now = ready + seconds(180);
        for (last, next) in [(1, 210), (29, 210), (30, 210), (31, 240), (180, 360)] {
            let verdict = check(&policy, ready, at(0, ready + seconds(last)), now);
            assert_eq!(verdict, IdleVerdict::CheckAgain(Some(ready + seconds(next))), "last active after {last} s");
        }
    }

    #[test]
    fn an_open_call_of_any_age_keeps_the_server_awake() {
        let (policy, ready) = (IdlePolicy::default(), Instant::now());
        let now = ready + seconds(600);
        assert_eq!(check(&policy, ready, at(1, ready), now), IdleVerdict::CheckAgain(Some(ready + seconds(780))));
    }

    #[test]
    fn a_server_does_not_sleep_within_its_first_minute() {
        let policy = IdlePolicy { idle: seconds(1), ..IdlePolicy::default() };
        let ready = Instant::now();
        assert_eq!(first_check(&policy, ready), Some(ready + seconds(90)));
        let young = check(&policy, ready, at(0, ready), ready + seconds(60));
        assert_eq!(young, IdleVerdict::CheckAgain(Some(ready + seconds(90))));
        assert_eq!(check(&policy, ready, at(0, ready), ready + seconds(61)), IdleVerdict::Idle(seconds(61)));
    }

    #[test]
    fn the_next_check_during_an_open_call_is_in_the_future() {
        let policy = IdlePolicy { idle: Duration::ZERO, ..IdlePolicy::default() };
        let ready = Instant::now();
        let busy = check(&policy, ready, at(1, ready), ready + seconds(90));
        assert_eq!(busy, IdleVerdict::CheckAgain(Some(ready + seconds(120))));
    }

    #[test]
    fn a_call_at_the_last_moment_postpones_sleep_by_one_sweep() {
        let (policy, ready) = (IdlePolicy::default(), Instant::now());
        assert_eq!(next_check(&policy, ready, ready + seconds(180)), Some(ready + seconds(210)));
        assert_eq!(next_check(&policy, ready, ready + seconds(181)), Some(ready + seconds(210)));
    }

    #[test]
    fn an_infinite_idle_time_means_never_and_a_zero_sweep_does_not_spin() {
        let ready = Instant::now();
        let never = IdlePolicy { idle: Duration::MAX, ..IdlePolicy::default() };
        assert_eq!(first_check(&never, ready), None);
        assert_eq!(check(&never, ready, at(0, ready), ready + seconds(1)), IdleVerdict::CheckAgain(None));
        let zero = IdlePolicy { idle: Duration::ZERO, grace: Duration::ZERO, sweep: Duration::ZERO };
        assert_eq!(first_check(&zero, ready), Some(ready + Duration::from_millis(1)));
    }
}
