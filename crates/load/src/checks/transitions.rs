//! Check of [`Invariant::LegalTransitions`]: the status of an instance changes by legal transitions only, in order.

use std::time::Duration;

use mcp_satellite_actors::model::status::Status::{
    self, AwaitingUserConfig, CommandReceived, Connecting, DiscoveringTools, Error, Offline, Online, PermanentlyFailed,
    Provisioning, RequiresReauth, Restarting, SyncingTools,
};

use super::violations::FoundViolations;
use crate::types::{InstanceNo, Invariant};

// Lifetime of an unused excuse. A longer one would hide a later violation.
const EXCUSE_MAX: Duration = Duration::from_secs(30);

// Independent of the runtime's own table, so that an additional transition in the runtime is detected; a test compares
// the two. A status may also be repeated with another message.
pub(super) const LEGAL: [(Status, &[Status]); Status::ALL.len()] = [
    (AwaitingUserConfig, &[AwaitingUserConfig, Provisioning, Offline]),
    (Provisioning, &[AwaitingUserConfig, CommandReceived, Online, Offline, Error]),
    (CommandReceived, &[AwaitingUserConfig, Connecting, Restarting, Offline, Error]),
    (
        Connecting,
        &[
            AwaitingUserConfig,
            Connecting,
            DiscoveringTools,
            Restarting,
            Offline,
            Error,
            RequiresReauth,
            PermanentlyFailed,
        ],
    ),
    (
        DiscoveringTools,
        &[
            AwaitingUserConfig,
            Connecting,
            SyncingTools,
            Online,
            Restarting,
            Offline,
            Error,
            RequiresReauth,
            PermanentlyFailed,
        ],
    ),
    (
        SyncingTools,
        &[AwaitingUserConfig, Connecting, Online, Restarting, Offline, Error, RequiresReauth, PermanentlyFailed],
    ),
    (Online, &[AwaitingUserConfig, Connecting, Restarting, Offline, Error, RequiresReauth, PermanentlyFailed]),
    (Restarting, &[AwaitingUserConfig, Connecting, Restarting, Offline, Error, RequiresReauth, PermanentlyFailed]),
    (Offline, &[AwaitingUserConfig, Connecting, Restarting, Offline, Error, RequiresReauth]),
    (
        Error,
        &[
            AwaitingUserConfig,
            Connecting,
            DiscoveringTools,
            Restarting,
            Offline,
            Error,
            RequiresReauth,
            PermanentlyFailed,
        ],
    ),
    (RequiresReauth, &[AwaitingUserConfig, Connecting, Restarting, Offline]),
    (PermanentlyFailed, &[AwaitingUserConfig, Connecting, Restarting, Offline]),
];

#[derive(Debug)]
pub(super) struct TransitionCheck {
    legal: [[bool; Status::ALL.len()]; Status::ALL.len()],
    histories: Vec<StatusHistory>,
    // Incremented when events are lost: the earlier status of an instance is then unknown.
    epoch: u32,
}

#[derive(Debug, Clone, Default)]
struct StatusHistory {
    epoch: u32,
    last: Option<(Status, Duration)>,
    excused_until: Option<Duration>,
}

impl TransitionCheck {
    pub(super) fn new(instances: usize) -> Self {
        let mut legal = [[false; Status::ALL.len()]; Status::ALL.len()];
        for (status, next) in LEGAL {
            // The same status with another message.
            legal[status as usize][status as usize] = true;
            for to in next {
                legal[status as usize][*to as usize] = true;
            }
        }
        Self { legal, histories: vec![StatusHistory::default(); instances], epoch: 0 }
    }

    pub(super) fn reset(&mut self) {
        self.epoch += 1;
    }

    /// Excuses one illegal transition: the instance's supervisor panicked, and its successor publishes a new status.
    pub(super) fn excuse(&mut self, at: Duration, nth: InstanceNo) {
        if let Some(chain) = self.histories.get_mut(nth.0 as usize) {
            chain.excused_until = Some(at + EXCUSE_MAX);
        }
    }

    pub(super) fn record_status(
        &mut self,
        at: Duration,
        nth: InstanceNo,
        status: Status,
        violations: &mut FoundViolations,
    ) {
        let Some(chain) = self.histories.get_mut(nth.0 as usize) else { return };
        if chain.epoch != self.epoch {
            *chain = StatusHistory { epoch: self.epoch, last: None, excused_until: chain.excused_until };
        } else if let Some((before, when)) = chain.last {
            if !self.legal[before as usize][status as usize] {
                let excused = chain.excused_until.take().is_some_and(|until| at <= until);
                if !excused {
                    let what = format!("the status changed from {before} to {status}, which is not a legal transition");
                    violations.push(Invariant::LegalTransitions, at, Some(nth), what);
                }
            }
            if at < when {
                let early = when.saturating_sub(at).as_millis();
                let what = format!("{status} was reported after {before} and has a timestamp {early} ms before it");
                violations.push(Invariant::LegalTransitions, at, Some(nth), what);
            }
        } else if self.epoch == 0 && !matches!(status, Provisioning | AwaitingUserConfig) {
            let what = format!("the first reported status is {status}");
            violations.push(Invariant::LegalTransitions, at, Some(nth), what);
        }
        chain.last = Some((status, at));
    }
}
