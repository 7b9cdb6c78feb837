//! Check of [`Invariant::MemoryBack`]: an instance needs hardly more memory after the faults than before.

use super::violations::FoundViolations;
use crate::measure;
use crate::scenario::ScenarioLimits;
use crate::types::{Invariant, RunEndState};

// Growth of the whole process, in bytes, that is no leak: the harness keeps its own data in the process, queues keep
// their capacity, and the allocator returns memory late and in large pieces. The check cannot judge fleets that are
// small compared to this.
const FLOOR: f64 = (48 << 20) as f64;

pub(super) fn finish(end: &RunEndState, limits: &ScenarioLimits, violations: &mut FoundViolations) {
    if is_exceeded(end, limits) {
        let each = |bytes: u64| bytes as f64 / 1024.0 / end.instances.max(1) as f64;
        let what = format!(
            "an instance uses {:.1} KiB after the faults and used {:.1} KiB before; {} × is allowed",
            each(end.memory_after),
            each(end.memory_before),
            limits.growth
        );
        violations.push(Invariant::MemoryBack, end.at, None, what);
    }
}

fn is_exceeded(end: &RunEndState, limits: &ScenarioLimits) -> bool {
    let (before, after) = (end.memory_before as f64, end.memory_after as f64);
    after > (limits.growth * before).max(before + FLOOR)
}

// Returns the reason why the check proves nothing, if there is one.
pub(super) fn not_checked_reason(end: &RunEndState, limits: &ScenarioLimits) -> Option<String> {
    if end.memory_before == 0 {
        return Some("the memory usage of this process cannot be read".to_owned());
    }
    let allowed = (limits.growth - 1.0) * end.memory_before as f64;
    (allowed < FLOOR && !is_exceeded(end, limits)).then(|| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "FLOOR is positive and small")]
        let floor = measure::format_bytes(FLOOR as u64);
        let before = measure::format_bytes(end.memory_before);
        format!(
            "the fleet uses {before}: a growth to {} × of that is within the {floor} that are always allowed",
            limits.growth
        )
    })
}
