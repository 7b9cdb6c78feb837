//! Check of [`Invariant::OnlineIsCallable`]: a call to an instance shown as online returns a result or an error of the
//! server, or the status or process of the instance changes. Faults are no excuse, because the status shows none.

use super::violations::FoundViolations;
use crate::types::{CallOutcome, Invariant, ProbeResult};

pub(super) fn check_probe(probe: &ProbeResult, violations: &mut FoundViolations) {
    match &probe.answer {
        CallOutcome::Text(text) if **text != *probe.token => {
            // A wrong response may have any length.
            let text: String = text.chars().take(60).collect();
            let what = format!("the probe {} got the answer `{text}`", probe.token);
            violations.push(Invariant::OwnAnswer, probe.at, Some(probe.nth), what);
        }
        CallOutcome::Text(_) | CallOutcome::ServerError(_) => {}
        CallOutcome::Failed { .. } if probe.changed => {}
        CallOutcome::Failed { why, .. } => {
            let what = format!("the instance is shown as online, but a call to it failed: {why}");
            violations.push(Invariant::OnlineIsCallable, probe.at, Some(probe.nth), what);
        }
    }
}
