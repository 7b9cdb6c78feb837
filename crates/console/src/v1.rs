//! Requests and responses that only the HTTP API has. Times are RFC 3339, durations end in `_ms` or `_seconds`, sizes in
//! `_bytes`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::api::{InstanceStatus, SatelliteStatus};

/// Status of the satellite.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct SatelliteReport {
    #[serde(flatten)]
    pub satellite: SatelliteStatus,
    /// Number of instances in each status.
    pub instances: BTreeMap<String, usize>,
}

/// A team and its instances.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct TeamStatus {
    pub team_id: String,
    pub slug: String,
    /// Slugs of the users that have an instance.
    pub users: Vec<String>,
    /// Number of instances in each status.
    pub instances: BTreeMap<String, usize>,
}

/// Query for a list of instances. All given conditions must hold.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct InstanceQuery {
    /// Only this team (id or slug).
    pub team: Option<String>,
    /// Only this user (id or slug).
    pub user: Option<String>,
    /// Only this server (slug).
    pub server: Option<String>,
    /// Only these statuses, separated by commas.
    pub status: Option<String>,
    /// Only instances whose name contains this text.
    pub q: Option<String>,
    pub sort: InstanceOrder,
    /// True for the reverse order.
    pub descending: bool,
    /// Maximum number of instances, 1 to 1000; 100 if absent.
    pub limit: Option<usize>,
    /// Position after the last instance of the previous page, from its `next`.
    pub cursor: Option<String>,
}

/// Orders of a list of instances. Equal ones are ordered by name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InstanceOrder {
    #[default]
    Name,
    Status,
    Since,
    Restarts,
    Calls,
}

/// Query for a stream of instances and events.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct InstanceStreamQuery {
    /// Position from which the stream continues: the id of its last `reset`, `delta` or `tick`. The header
    /// `Last-Event-ID` has the same meaning.
    pub position: Option<String>,
    /// False for a stream without instances: it contains `tick` and events only.
    #[serde(default = "yes")]
    pub rows: bool,
    /// Only the instance with this full name.
    pub instance: Option<String>,
    /// True to add the events that are stored meanwhile.
    pub events: bool,
    /// With `events`: only those after this number, also earlier ones.
    pub since: Option<u64>,
    /// With `events`: only these types, separated by commas.
    pub types: Option<String>,
    /// With `events`: only those of this team.
    pub team: Option<String>,
}

fn yes() -> bool {
    true
}

/// A page of instances.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct InstancePage {
    /// Number of instances that match the query, on all pages.
    pub total: usize,
    pub items: Vec<InstanceStatus>,
    /// Value of `cursor` for the next page; `null` on the last one.
    pub next: Option<String>,
}

/// Values to set or remove for an instance. There is no `Debug` because it contains secrets.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigureInput {
    /// Values to set, by key.
    #[serde(default)]
    pub set: BTreeMap<String, String>,
    /// Keys whose values are removed.
    #[serde(default)]
    pub unset: Vec<String>,
}

/// A tool call.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CallInput {
    /// Name of the tool, as the server defines it.
    pub tool: String,
    /// Arguments of the tool: a JSON object.
    #[serde(default)]
    #[schemars(with = "Option<BTreeMap<String, serde_json::Value>>")]
    pub arguments: Option<Box<RawValue>>,
    /// Timeout of the whole call, in milliseconds.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}

/// Result of a tool call.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct CallOutput {
    /// The tool's result, as the server sent it.
    #[schemars(with = "serde_json::Value")]
    pub result: Box<RawValue>,
    /// Milliseconds from the request to the answer.
    pub duration_ms: u64,
}

/// A configuration to check.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigurationInput {
    /// Content of the configuration file (TOML).
    pub text: String,
}

/// Errors and warnings of a configuration.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ConfigurationCheck {
    /// True if there is no error.
    pub valid: bool,
    pub errors: Vec<ConfigurationError>,
    pub warnings: Vec<String>,
}

/// An error of a configuration, with its place.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ConfigurationError {
    /// Line, from 1; 0 if the error has no place.
    pub line: usize,
    /// Column, from 1; 0 if the error has no place.
    pub column: usize,
    pub message: String,
    /// What to do.
    pub hint: String,
}
