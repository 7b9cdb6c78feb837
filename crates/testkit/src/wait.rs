//! Waiting for states. A time limit only bounds a failure: it is far longer than a loaded machine needs.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Time limit of every wait.
pub const GIVE_UP: Duration = Duration::from_secs(120);

/// Delays between two looks. The delay grows with the time waited: a look often starts a process.
const POLL_MIN: Duration = Duration::from_millis(5);
const POLL_MAX: Duration = Duration::from_millis(100);

/// Polls `look` until it returns a value. On timeout, panics with the output of `seen`.
#[track_caller]
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>, seen: impl FnOnce() -> String) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < GIVE_UP, "timed out waiting for {what}; current state:\n{}", seen());
        std::thread::sleep((started.elapsed() / 10).clamp(POLL_MIN, POLL_MAX));
    }
}

/// Polls until a condition holds.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, || holds().then_some(()), String::new);
}

/// Polls until the value meets a condition.
pub async fn until<T: Debug>(what: &str, mut ask: impl AsyncFnMut() -> T, wanted: impl Fn(&T) -> bool) -> T {
    let started = Instant::now();
    loop {
        let answer = ask().await;
        if wanted(&answer) {
            return answer;
        }
        assert!(started.elapsed() < GIVE_UP, "timed out waiting until {what}: {answer:?}");
        tokio::time::sleep(POLL_MIN).await;
    }
}

/// Waits for a future, at most twice as long as for a state: the deadline of a call is shorter, and its error contains
/// more information.
pub async fn with_limit<T>(what: &str, future: impl Future<Output = T>) -> T {
    let Ok(value) = tokio::time::timeout(2 * GIVE_UP, future).await else { panic!("timed out waiting for {what}") };
    value
}
