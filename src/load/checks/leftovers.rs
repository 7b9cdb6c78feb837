//! Check of [`Invariant::NothingLeft`]: no resources are left after the end of the runtime.

use super::FoundViolations;
use crate::load::types::{Invariant, LeftoverResources, RunEndState};

pub(super) fn finish(end: &RunEndState, broken: &mut FoundViolations) {
    let LeftoverResources { servers, tasks, descriptors, processes } = end.left;
    let counted =
        [(servers, "server or line"), (tasks, "task"), (descriptors, "file descriptor"), (processes, "process")];
    for (count, what) in counted {
        if count > 0 {
            let what = match count {
                1 => format!("1 {what} is left"),
                _ => format!("{count} of them are left: {what}"),
            };
            broken.push(Invariant::NothingLeft, end.at, None, what);
        }
    }
}
