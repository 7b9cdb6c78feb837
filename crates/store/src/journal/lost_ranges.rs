//! Ranges of lost events: events that were removed undelivered, until an `events.dropped` event that reports them is
//! stored.

const RANGES_MAX: usize = 100;

/// Ranges of event numbers, both ends included.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LostRanges {
    unreported: Vec<(u64, u64)>,
    /// Reported ranges whose `events.dropped` event is not stored yet.
    reported: Vec<(u64, u64)>,
}

impl LostRanges {
    /// Restores stored ranges. All of them are reported again, because earlier reports may be lost.
    pub(super) fn from_stored(ranges: Vec<(u64, u64)>) -> Self {
        let mut gone = Self::default();
        for (from, to) in ranges {
            gone.add(from, to);
        }
        gone
    }

    pub(super) fn to_stored(&self) -> Vec<(u64, u64)> {
        self.reported.iter().chain(&self.unreported).copied().collect()
    }

    pub(super) fn add(&mut self, from: u64, to: u64) {
        if from > to {
            return;
        }
        self.unreported.push((from, to));
        self.unreported.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for &(from, to) in &self.unreported {
            match merged.last_mut() {
                Some(last) if from <= last.1.saturating_add(1) => last.1 = last.1.max(to),
                _ => merged.push((from, to)),
            }
        }
        if let (true, Some(first), Some(last)) = (merged.len() > RANGES_MAX, merged.first(), merged.last()) {
            merged = vec![(first.0, last.1)];
        }
        self.unreported = merged;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        for (from, to) in other.to_stored() {
            if !self.reported.contains(&(from, to)) {
                self.add(from, to);
            }
        }
    }

    pub(super) fn take_unreported(&mut self) -> Vec<(u64, u64)> {
        let now = std::mem::take(&mut self.unreported);
        self.reported.extend(&now);
        now
    }

    pub(super) fn remove_covered(&mut self, from: u64, to: u64) -> bool {
        let before = self.reported.len() + self.unreported.len();
        for ranges in [&mut self.reported, &mut self.unreported] {
            ranges.retain(|(first, last)| !(from <= *first && *last <= to));
        }
        self.reported.len() + self.unreported.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_reported_once_and_removed_when_the_report_is_stored() {
        let mut ranges = LostRanges::default();
        ranges.add(5, 7);
        ranges.add(8, 9);
        ranges.add(20, 20);
        assert_eq!(ranges.take_unreported(), [(5, 9), (20, 20)]);
        assert_eq!(ranges.take_unreported(), []);
        ranges.add(10, 12);
        assert_eq!(
            LostRanges::from_stored(ranges.to_stored()).take_unreported(),
            [(5, 12), (20, 20)],
            "nothing is stored yet"
        );
        assert_eq!(ranges.take_unreported(), [(10, 12)]);
        assert!(ranges.remove_covered(5, 9));
        assert!(!ranges.remove_covered(5, 9));
        assert_eq!(ranges.to_stored(), [(20, 20), (10, 12)]);
    }

    #[test]
    fn too_many_ranges_are_merged_into_one() {
        let mut ranges = LostRanges::default();
        for at in 0..=RANGES_MAX as u64 {
            ranges.add(at * 10, at * 10);
        }
        assert_eq!(ranges.take_unreported(), [(0, RANGES_MAX as u64 * 10)]);
    }
}
