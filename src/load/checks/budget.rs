//! No restart beyond a budget. Between two starts of an instance lies an end; an end that nobody asked for is charged, and
//! the charge that fills the window is followed by no start. So in less than a window there are at most as many starts as
//! crashes are allowed, and one more for each end that was asked for or charged to somebody else.
//!
//! And no giving up before it: whoever is given up has had as many charged ends in a window as are allowed, each of which
//! was told and had a start before it.

use std::collections::VecDeque;
use std::time::Duration;

use mcp_satellite_actors::model::policy::RestartPolicy;

use super::Broken;
use crate::load::types::{Invariant, Nth};

/// What excuses a start may be told so much later than the start itself: events are sent in batches.
const LATE: Duration = Duration::from_secs(10);
/// Events and starts are timed by two clocks that began within this.
const SKEW: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Budget {
    policy: RestartPolicy,
    instances: Vec<Record>,
    /// Starts that are not judged yet, by time.
    due: VecDeque<(Duration, Nth)>,
    /// After a hole in the events.
    deaf_until: Option<Duration>,
}

#[derive(Debug, Default)]
struct Record {
    starts: VecDeque<Duration>,
    /// Charged ends.
    ends: VecDeque<Duration>,
    excuses: VecDeque<Duration>,
    pardons: VecDeque<Duration>,
}

impl Budget {
    pub(super) fn new(instances: usize, policy: &RestartPolicy) -> Self {
        let instances = (0..instances).map(|_| Record::default()).collect();
        Self { policy: policy.clone(), instances, due: VecDeque::new(), deaf_until: None }
    }

    fn record(&mut self, nth: Nth) -> Option<&mut Record> {
        self.instances.get_mut(nth.0 as usize)
    }

    pub(super) fn started(&mut self, at: Duration, nth: Nth) {
        if let Some(record) = self.record(nth) {
            record.starts.push_back(at);
            self.due.push_back((at, nth));
        }
    }

    pub(super) fn excuse(&mut self, at: Duration, nth: Nth) {
        if let Some(record) = self.record(nth) {
            record.excuses.push_back(at);
        }
    }

    /// It has ended unasked, which is charged to it.
    pub(super) fn ended(&mut self, at: Duration, nth: Nth) {
        let window = self.policy.window;
        if let Some(record) = self.record(nth) {
            while record.ends.front().is_some_and(|end| *end + window + SKEW <= at) {
                record.ends.pop_front();
            }
            record.ends.push_back(at);
        }
    }

    /// It is given up; its last end was told before.
    pub(super) fn gave_up(&mut self, at: Duration, nth: Nth, broken: &mut Broken) {
        if self.deaf_until.is_some_and(|until| at < until) {
            return;
        }
        let RestartPolicy { window, max_crashes, .. } = self.policy;
        let Some(Record { starts, ends, pardons, .. }) = self.record(nth) else { return };
        // Of a pardon it is told twice: what was charged between may be forgiven or not.
        let pardon = pardons.iter().rev().filter(|pardon| **pardon <= at).nth(1).copied().unwrap_or_default();
        let counts = |time: &&Duration| **time <= at + SKEW && **time + window + SKEW > at && **time + SKEW >= pardon;
        let told = ends.iter().filter(counts).count();
        // The start before the first of these ends may be older.
        let charged = told.min(starts.iter().filter(counts).count() + 1);
        if charged < max_crashes {
            let window = humantime::format_duration(window);
            let what = format!("it was given up after {charged} ends within {window}, where {max_crashes} are needed");
            broken.push(Invariant::RestartBudget, at, Some(nth), what);
        }
    }

    /// Ends may have been told that nobody has heard of: how many there were is not known for a window.
    pub(super) fn deafened(&mut self, at: Duration) {
        self.deaf_until = Some(at + self.policy.window);
    }

    pub(super) fn pardoned(&mut self, at: Duration, nth: Nth) {
        if let Some(record) = self.record(nth) {
            record.pardons.push_back(at);
        }
    }

    /// Judges the starts that nothing will excuse any more: it is now at least `now`.
    pub(super) fn settle(&mut self, now: Duration, broken: &mut Broken) {
        while let Some((at, nth)) = self.due.front().copied().filter(|(at, _)| *at + LATE <= now) {
            self.due.pop_front();
            self.judge(at, nth, broken);
        }
    }

    pub(super) fn finish(mut self, broken: &mut Broken) {
        while let Some((at, nth)) = self.due.pop_front() {
            self.judge(at, nth, broken);
        }
    }

    /// Whether the start at `at` was one too many. Starts of an instance are judged in order.
    fn judge(&mut self, at: Duration, nth: Nth, broken: &mut Broken) {
        let RestartPolicy { window, max_crashes, .. } = self.policy;
        let Some(Record { starts, excuses, pardons, .. }) = self.record(nth) else { return };
        // What is a window old is older than every start that is still to be judged together with one before it.
        let old = |time: &Duration| *time + window + SKEW <= at;
        for times in [&mut *starts, &mut *excuses] {
            while times.front().is_some_and(old) {
                times.pop_front();
            }
        }
        let pardon = pardons.iter().rev().find(|pardon| **pardon <= at).copied();
        // Each is told twice: see `gave_up`.
        while pardons.get(1).is_some_and(|second| pardon.is_some_and(|last| *second < last)) {
            pardons.pop_front();
        }
        let counts =
            |start: &&Duration| **start <= at && **start + window > at && pardon.is_none_or(|pardon| **start >= pardon);
        let mut counted = starts.iter().filter(counts);
        let first = counted.clone().next().copied().unwrap_or(at);
        let started = counted.by_ref().count();
        let excused = excuses.iter().filter(|time| **time + SKEW >= first && **time <= at + SKEW).count();
        let allowed = max_crashes.max(1) + excused;
        if started > allowed {
            let window = humantime::format_duration(window);
            let what = format!("start number {started} within {window}, where {allowed} are allowed");
            broken.push(Invariant::RestartBudget, at, Some(nth), what);
        }
    }
}
