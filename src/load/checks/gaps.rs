//! Events are numbered without a gap, or a drop event says which are gone. The drop event may come before or after the gap
//! that it explains.

use std::time::Duration;

use mcp_satellite_actors::model::event::{Envelope, Event};

use super::Broken;
use crate::load::types::{End, Invariant};

#[derive(Debug, Default)]
pub(super) struct Gaps {
    last: Option<u64>,
    /// First, last, and when it was noticed: numbers that nobody has explained so far.
    holes: Vec<(u64, u64, Duration)>,
    /// Numbers that are gone for a known reason.
    explained: Vec<(u64, u64)>,
}

impl Gaps {
    /// Whether numbers are missing before this one.
    pub(super) fn told(&mut self, at: Duration, envelope: &Envelope, broken: &mut Broken) -> bool {
        if let Event::EventsDropped { from_seq, to_seq } = envelope.event {
            self.explained(from_seq, to_seq);
        }
        let seq = envelope.seq;
        match self.last {
            Some(last) if seq <= last => {
                let what = format!("event {seq} came after event {last}");
                broken.push(Invariant::NoGap, at, None, what);
                false
            }
            Some(last) if seq > last + 1 => {
                self.last = Some(seq);
                let mut holes = vec![(last + 1, seq - 1)];
                for (from, to) in &self.explained {
                    holes = holes.into_iter().flat_map(|hole| without(hole, *from, *to)).collect();
                }
                self.holes.extend(holes.into_iter().map(|(from, to)| (from, to, at)));
                true
            }
            _ => {
                self.last = Some(seq);
                false
            }
        }
    }

    pub(super) fn explained(&mut self, from: u64, to: u64) {
        let rest = |(first, last, at): (u64, u64, Duration)| {
            without((first, last), from, to).into_iter().map(move |(first, last)| (first, last, at))
        };
        self.holes = std::mem::take(&mut self.holes).into_iter().flat_map(rest).collect();
        // What lies before the last event has been matched with every hole that there can be.
        let last = self.last.unwrap_or(0);
        self.explained.retain(|(_, to)| *to > last);
        if to > last {
            self.explained.push((from, to));
        }
    }

    pub(super) fn finish(self, end: &End, broken: &mut Broken) {
        for (from, to, at) in self.holes {
            let what = match to - from {
                0 => format!("event {from} is missing, and no event says why"),
                more => format!("events {from} to {to} ({}) are missing, and no event says why", more + 1),
            };
            broken.push(Invariant::NoGap, at, None, what);
        }
        if end.events_lost > 0 {
            let what = format!("{} events were lost at the end", end.events_lost);
            broken.push(Invariant::NoGap, end.at, None, what);
        }
    }
}

/// What is left of a hole without the numbers of a range.
fn without((first, last): (u64, u64), from: u64, to: u64) -> Vec<(u64, u64)> {
    if to < first || from > last {
        return vec![(first, last)];
    }
    let before = (first < from).then(|| (first, from - 1));
    let after = (to < last).then(|| (to + 1, last));
    before.into_iter().chain(after).collect()
}
