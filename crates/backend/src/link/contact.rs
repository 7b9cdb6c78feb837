//! State of the connection to the backend: reachability, errors and the next poll. Changes are logged, and `satellite
//! status` shows the state.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::time::Instant;

use crate::wire::PollingMode;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(super) enum RequestPurpose {
    Registration,
    Commands,
    Configuration,
    Heartbeat,
    #[strum(serialize = "results of commands")]
    Results,
    Events,
}

impl RequestPurpose {
    fn as_str(self) -> &'static str {
        self.into()
    }

    // Periodic requests, whose last response shows whether the backend is reachable.
    fn is_periodic(self) -> bool {
        matches!(self, Self::Registration | Self::Commands | Self::Heartbeat)
    }
}

#[derive(Debug, Default)]
pub(super) struct BackendReachability(Mutex<ContactState>);

#[derive(Debug, Default, Clone)]
pub(super) struct ContactState {
    pub(super) connected: bool,
    pub(super) last_contact: Option<Timestamp>,
    // Current error of each kind of request, and its time.
    errors: BTreeMap<RequestPurpose, (Timestamp, String)>,
    // `None` before the first response.
    pub(super) mode: Option<PollingMode>,
    // True if polls fail.
    pub(super) backing_off: bool,
    pub(super) next_poll: Option<Instant>,
    pub(super) config_hash: Option<String>,
}

impl ContactState {
    pub(super) fn last_error(&self) -> Option<String> {
        let (matter, (_, why)) = self.errors.iter().max_by_key(|(_, (at, _))| *at)?;
        Some(format!("{}: {why}", matter.as_str()))
    }
}

impl BackendReachability {
    pub(super) fn record_success(&self, matter: RequestPurpose) {
        let mut state = self.state();
        state.last_contact = Some(Timestamp::now());
        state.connected |= matter.is_periodic();
        if state.errors.remove(&matter).is_some() {
            tracing::info!(matter = matter.as_str(), "the backend answers again");
        }
    }

    // `answered` is true if the backend sent a response.
    pub(super) fn record_failure(&self, matter: RequestPurpose, answered: bool, why: &str) {
        let mut state = self.state();
        let now = Timestamp::now();
        if answered {
            state.last_contact = Some(now);
        }
        state.connected &= !matter.is_periodic();
        let previous = state.errors.insert(matter, (now, why.to_owned()));
        // Log each reason once, not on each attempt.
        if previous.is_none_or(|(_, before)| before != why) {
            tracing::warn!(matter = matter.as_str(), why, "a request to the backend failed; running servers continue");
        }
    }

    pub(super) fn record_poll(&self, mode: PollingMode, backing_off: bool, next: Instant) {
        let mut state = self.state();
        (state.mode, state.backing_off, state.next_poll) = (Some(mode), backing_off, Some(next));
    }

    pub(super) fn set_config_hash(&self, hash: Option<String>) {
        self.state().config_hash = hash;
    }

    pub(super) fn snapshot(&self) -> ContactState {
        self.state().clone()
    }

    fn state(&self) -> MutexGuard<'_, ContactState> {
        // No call between changes can panic and leave the data inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
