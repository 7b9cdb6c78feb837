//! Description of the live tree of actors, for people who look for the busy or blocked part of a satellite. It contains no
//! lengths of mailboxes, because ractor does not report them; the time of an answer shows a long one.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::TeamId;

/// An actor and its children.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct ActorReport {
    /// Kind of the actor.
    pub kind: ActorKind,
    /// Slug of the team, name of the instance (`process_id`), or the kind.
    pub name: String,
    /// Id of the team, for a team and its workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team_id: Option<TeamId>,
    /// Milliseconds until the actor handled a message. `None` if it did not within the limit, or it has ended.
    pub answered_ms: Option<f64>,
    /// Number of times that the actor was started again; for a worker, the restarts of its instance.
    pub restarts: u64,
    /// Permits: for starts in the whole satellite and of a team, for calls of a worker.
    pub permits: Vec<PermitLoad>,
    /// Number of waiting events (batcher), or of calls that wait for a server (team). `None` if the actor has no queue or
    /// did not answer.
    pub backlog: Option<usize>,
    /// Actors that this one supervises. Empty if it did not answer.
    pub children: Vec<ActorReport>,
}

/// Kind of an actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ActorKind {
    /// The root supervisor.
    Root,
    /// The status registry.
    Registry,
    /// The event batcher.
    Batcher,
    /// The supervisor of a team.
    Team,
    /// A run of a process or a connection to a remote server.
    Worker,
}

/// Permits that are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct PermitLoad {
    /// Kind of the permits.
    pub pool: PermitKind,
    /// Number of permits held.
    pub held: usize,
    /// Number of instances that wait for one. Calls do not wait: they are rejected at the limit.
    pub waiting: usize,
    /// Maximum number of permits; `None` if the limit is that of the whole satellite.
    pub max: Option<usize>,
}

/// Kind of permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PermitKind {
    /// Starts of processes.
    Processes,
    /// Attempts to connect to remote servers.
    Connections,
    /// Calls of a run.
    Calls,
}

impl fmt::Display for PermitLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pool = match self.pool {
            PermitKind::Processes => "starts",
            PermitKind::Connections => "connections",
            PermitKind::Calls => "calls",
        };
        write!(f, "{pool} {}", self.held)?;
        if let Some(max) = self.max {
            write!(f, " of {max}")?;
        }
        if self.waiting > 0 { write!(f, ", {} wait", self.waiting) } else { Ok(()) }
    }
}

impl ActorReport {
    /// Returns the report of an actor that has not answered.
    pub fn unanswered(kind: ActorKind, name: impl Into<String>) -> Self {
        let (permits, children) = (Vec::new(), Vec::new());
        Self {
            kind,
            name: name.into(),
            team_id: None,
            answered_ms: None,
            restarts: 0,
            permits,
            backlog: None,
            children,
        }
    }
}
