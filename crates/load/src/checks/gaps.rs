//! Check of [`Invariant::NoGap`]: events are numbered from 1 without gaps, except for those that a drop event names.
//! The drop event follows the gap and must not name events that were delivered.

use std::time::Duration;

use mcp_satellite_actors::model::event::{Envelope, Event};

use super::violations::FoundViolations;
use crate::types::{Invariant, RunEndState};

#[derive(Debug, Default)]
pub(super) struct EventGapCheck {
    last: u64,
    // Missing events: first number, last number, and time of detection.
    gaps: Vec<(u64, u64, Duration)>,
}

impl EventGapCheck {
    /// Records an event. Returns true if events before it are missing.
    pub(super) fn record_event(&mut self, at: Duration, envelope: &Envelope, violations: &mut FoundViolations) -> bool {
        let (seq, last) = (envelope.seq, self.last);
        if seq <= last {
            let what = format!("event {seq} came after event {last}");
            violations.push(Invariant::NoGap, at, None, what);
            return false;
        }
        self.last = seq;
        let is_gap = seq > last + 1;
        if is_gap {
            self.add_gap(last + 1, seq - 1, at);
        }
        if let Event::EventsDropped { from_seq, to_seq } = envelope.event {
            self.check_dropped(at, seq, from_seq, to_seq, violations);
        }
        is_gap
    }

    fn add_gap(&mut self, from: u64, to: u64, at: Duration) {
        self.gaps.push((from, to, at));
    }

    // A drop event may only name events that are missing and were not named before.
    fn check_dropped(&mut self, at: Duration, seq: u64, from: u64, to: u64, violations: &mut FoundViolations) {
        if from > to || to >= seq {
            let range = format!("events {from} to {to}");
            let what = format!("event {seq} reports {range} as dropped, which is not a range of earlier events");
            violations.push(Invariant::NoGap, at, None, what);
        }
        let to = to.min(seq - 1);
        let missing = |(first, last, _): &(u64, u64, Duration)| (*last.min(&to) + 1).saturating_sub(*first.max(&from));
        let missing: u64 = self.gaps.iter().map(missing).sum();
        if from <= to && missing < to - from + 1 {
            let there = to - from + 1 - missing;
            let what = format!(
                "events {from} to {to} are reported as dropped, but {there} of them were delivered or reported before"
            );
            violations.push(Invariant::NoGap, at, None, what);
        }
        if from <= to {
            self.remove_gap(from, to);
        }
    }

    fn remove_gap(&mut self, from: u64, to: u64) {
        let rest = |(first, last, at): (u64, u64, Duration)| {
            subtract_range((first, last), from, to).into_iter().map(move |(first, last)| (first, last, at))
        };
        self.gaps = std::mem::take(&mut self.gaps).into_iter().flat_map(rest).collect();
    }

    pub(super) fn finish(mut self, end: &RunEndState, violations: &mut FoundViolations) {
        // Events that the runtime itself reports as lost are handled below.
        if end.events_emitted > self.last + end.events_lost as u64 {
            self.add_gap(self.last + 1, end.events_emitted, end.at);
        }
        for (from, to, at) in self.gaps {
            let what = match to - from {
                0 => format!("event {from} is missing, and no event reports it as dropped"),
                more => {
                    let count = more + 1;
                    format!("events {from} to {to} ({count}) are missing, and no event reports them as dropped")
                }
            };
            violations.push(Invariant::NoGap, at, None, what);
        }
        if end.events_lost > 0 {
            let what = format!("{} events were lost at the end", end.events_lost);
            violations.push(Invariant::NoGap, end.at, None, what);
        }
    }
}

// Removes the numbers `from..=to` from a gap and returns the remaining gaps.
fn subtract_range((first, last): (u64, u64), from: u64, to: u64) -> Vec<(u64, u64)> {
    if to < first || from > last {
        return vec![(first, last)];
    }
    let before = (first < from).then(|| (first, from - 1));
    let after = (to < last).then(|| (to + 1, last));
    before.into_iter().chain(after).collect()
}
