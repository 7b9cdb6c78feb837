//! The configuration in effect, and requests to change it.

use std::time::Instant;

use mcp_satellite_actors::model::event::Event;
use tokio::sync::oneshot;

use crate::config::{BackendDocument, ConfigOrigin, Plan};
use mcp_satellite_store::identity::ConfigHash;
use mcp_satellite_store::values::RequiringInstances;

#[derive(Default)]
pub(crate) struct ActiveConfiguration {
    pub(crate) generation: u64,
    pub(crate) origin: ConfigOrigin,
    pub(crate) summary: ConfigSummary,
    pub(crate) requiring: RequiringInstances,
    /// Plans from the configuration files and the document from the backend.
    pub(crate) files: Plan,
    pub(crate) document: Option<BackendDocument>,
    /// Plan from the current files if it waits because only `document` conflicts with it.
    pub(crate) waiting: Option<Plan>,
    /// Hash of the backend's document that was rejected because it removes most instances.
    pub(crate) rejected: Option<String>,
    /// Hash of a rejected document that a person has accepted.
    pub(crate) accepted: Option<String>,
}

/// Facts about a configuration that events and logs contain.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ConfigSummary {
    pub(crate) config_hash: ConfigHash,
    pub(crate) server_count: usize,
    pub(crate) teams_count: usize,
}

impl ConfigSummary {
    /// Returns the event for a change that began at `since`. `hash` replaces the hash of the instances.
    pub(crate) fn refreshed_event(self, since: Instant, hash: Option<String>, change_detected: bool) -> Event {
        Event::ConfigRefreshed {
            config_hash: hash.unwrap_or_else(|| self.config_hash.to_string()),
            server_count: self.server_count,
            teams_count: self.teams_count,
            change_detected,
            fetch_duration_ms: u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

pub(crate) struct ReloadRequest {
    /// True if the person confirms that most instances are to be removed.
    pub(crate) accept: bool,
    pub(crate) reply: oneshot::Sender<Result<AcceptedReload, RejectedReload>>,
}

#[derive(Debug, Clone)]
pub(crate) struct AcceptedReload {
    pub(crate) servers: usize,
    pub(crate) teams: usize,
    pub(crate) endpoint_problem: Option<String>,
    pub(crate) console_problem: Option<String>,
}

#[derive(Debug, Clone)]
pub(crate) struct RejectedReload {
    pub(crate) error_type: &'static str,
    pub(crate) message: String,
}

impl From<String> for RejectedReload {
    fn from(message: String) -> Self {
        Self { error_type: "invalid", message }
    }
}
