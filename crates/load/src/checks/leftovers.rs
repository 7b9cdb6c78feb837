//! Check of [`Invariant::NothingLeft`]: no resources are left after the end of the runtime.

use super::violations::FoundViolations;
use crate::types::{Invariant, LeftoverResources, RunEndState};

pub(super) fn finish(end: &RunEndState, violations: &mut FoundViolations) {
    let LeftoverResources { servers, tasks, descriptors, processes } = end.left;
    let counted = [
        (servers, "server or line", "servers or lines"),
        (tasks, "task", "tasks"),
        (descriptors, "file descriptor", "file descriptors"),
        (processes, "process", "processes"),
    ];
    for (count, one, many) in counted {
        if count > 0 {
            let what = match count {
                1 => format!("1 {one} is left"),
                _ => format!("{count} {many} are left"),
            };
            violations.push(Invariant::NothingLeft, end.at, None, what);
        }
    }
}
