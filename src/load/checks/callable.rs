//! Check of [`Invariant::OnlineIsCallable`]: a call to an instance shown as online returns a result or an error of the
//! server, or the status or process of the instance changes. Faults are no excuse, because the status shows none.

use super::Broken;
use crate::load::types::{Answered, Invariant, Probe};

pub(super) fn probed(probe: &Probe, broken: &mut Broken) {
    match &probe.answer {
        Answered::Text(said) if **said != *probe.token => {
            // A wrong response may have any length.
            let said: String = said.chars().take(60).collect();
            let what = format!("the probe {} got the answer `{said}`", probe.token);
            broken.push(Invariant::OwnAnswer, probe.at, Some(probe.nth), what);
        }
        Answered::Text(_) | Answered::ServerError(_) => {}
        Answered::Failed { .. } if probe.moved => {}
        Answered::Failed { why, .. } => {
            let what = format!("it is shown as online, and a call to it failed: {why}");
            broken.push(Invariant::OnlineIsCallable, probe.at, Some(probe.nth), what);
        }
    }
}
