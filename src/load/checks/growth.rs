//! Memory is back after the faults: an instance takes hardly more than before them.

use super::Broken;
use crate::load::scenario::Limits;
use crate::load::types::{End, Invariant};

/// What the process as a whole may keep: allocators round, and a small fleet is measured against its own noise.
const SLACK: f64 = (2 << 20) as f64;

pub(super) fn finish(end: &End, limits: &Limits, broken: &mut Broken) {
    let (before, after) = (end.memory_before as f64, end.memory_after as f64);
    if after > limits.growth * before + SLACK {
        let each = |bytes: f64| bytes / 1024.0 / end.instances.max(1) as f64;
        let what = format!(
            "an instance takes {:.1} KiB after the faults, and took {:.1} KiB before; {} × is allowed",
            each(after),
            each(before),
            limits.growth
        );
        broken.push(Invariant::MemoryBack, end.at, None, what);
    }
}
