//! What is online can be called: a call to it is answered, by the server if need be with an error, or its status or its
//! process changes. No fault excuses it, since the status says that there is none.

use super::Broken;
use crate::load::types::{Answered, Invariant, Probe};

pub(super) fn probed(probe: &Probe, broken: &mut Broken) {
    match &probe.answer {
        Answered::Text(said) if **said != *probe.token => {
            // What came instead may be of any length.
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
