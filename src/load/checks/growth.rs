//! Memory is back after the faults: an instance takes hardly more than before them.

use super::Broken;
use crate::load::measure;
use crate::load::scenario::Limits;
use crate::load::types::{End, Invariant};

/// So much the process as a whole may have grown without an instance keeping anything: the books of the harness are in the
/// same process, a queue keeps its room, and an allocator gives back what it holds late and in large pieces. A fleet that
/// is small beside it is not judged by a multiple.
const FLOOR: f64 = (48 << 20) as f64;

pub(super) fn finish(end: &End, limits: &Limits, broken: &mut Broken) {
    if is_broken(end, limits) {
        let each = |bytes: u64| bytes as f64 / 1024.0 / end.instances.max(1) as f64;
        let what = format!(
            "an instance takes {:.1} KiB after the faults, and took {:.1} KiB before; {} × is allowed",
            each(end.memory_after),
            each(end.memory_before),
            limits.growth
        );
        broken.push(Invariant::MemoryBack, end.at, None, what);
    }
}

fn is_broken(end: &End, limits: &Limits) -> bool {
    let (before, after) = (end.memory_before as f64, end.memory_after as f64);
    after > (limits.growth * before).max(before + FLOOR)
}

/// Why memory that has not grown beyond all bounds proves nothing, if that is so.
pub(super) fn not_checked(end: &End, limits: &Limits) -> Option<String> {
    if end.memory_before == 0 {
        return Some("memory cannot be read here".to_owned());
    }
    let allowed = (limits.growth - 1.0) * end.memory_before as f64;
    (allowed < FLOOR && !is_broken(end, limits)).then(|| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is written out above")]
        let floor = measure::bytes(FLOOR as u64);
        let before = measure::bytes(end.memory_before);
        format!(
            "the fleet takes {before}, of which {} × cannot be told from the {floor} that anything may take",
            limits.growth
        )
    })
}
