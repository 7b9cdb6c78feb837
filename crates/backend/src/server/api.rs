//! Messages of the administration API below `/api/admin`. Its requests carry the admin token as bearer token.
//!
//! ```text
//! POST   registration-tokens              TokenRequest   → IssuedToken
//! GET    config, satellites/{s}/config                   → wire::SatelliteConfig its own, the shared one, or 404
//! PUT    config, satellites/{s}/config    ConfigUpdate   → ConfigUpdateResult
//! DELETE satellites/{s}/config                           → ConfigUpdateResult    removes its own; 409 if it has none
//! GET    satellites                                      → SatelliteList
//! GET    satellites/{s}                                  → SatelliteView         with its last heartbeat
//! DELETE satellites/{s}                                  → wire::EmptyResponse   deletes the satellite with its data
//! POST   satellites/{s}/commands          CommandRequest → CommandRecordView
//! GET    satellites/{s}/commands?limit                   → CommandList
//! GET    satellites/{s}/commands/{c}                     → CommandRecordView
//! GET    events?after&satellite&since&type&limit         → StoredEventList
//! GET    instances?satellite&team&user&instance          → InstanceList
//! GET    satellites/{s}/instances/{i}                    → InstanceState
//! GET    instances/stream?satellite&team&user&instance   → server-sent events of InstanceState, Last-Event-ID
//! ```
//!
//! `{s}` is the id or the name of a satellite. The stream has three types of events: `status`, `removed` and `reset`.
//! `reset` contains no instance: the reader discards all known instances, and the events that follow are the complete
//! current state.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_actors::model::remedy::Remedy;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::wire::{
    self, BackendCommand, CommandPriority, CommandResult, Heartbeat, SATELLITE_NAME, SystemInfo, checked,
};

// 30 days.
const LIFETIME_MAX: u64 = 2_592_000;

/// Request for a registration token.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenRequest {
    /// Lifetime of an unused token in seconds: one day by default, 30 days at most.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "lifetime")]
    #[schemars(range(min = 1, max = 2_592_000))]
    pub expires_in_seconds: Option<u64>,
    /// Note for people about the purpose of the token.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "note")]
    #[schemars(length(max = 200))]
    pub note: Option<String>,
    /// Name of the only satellite that may use the token, even while a satellite of that name is connected.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "satellite_name")]
    #[schemars(length(min = 10, max = 32), regex(pattern = r"^[a-z0-9_-]+$"))]
    pub name: Option<String>,
}

fn lifetime<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    checked(deserializer, "1 to 2592000 seconds", |seconds: &Option<u64>| {
        seconds.is_none_or(|seconds| (1..=LIFETIME_MAX).contains(&seconds))
    })
}

fn note<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    checked(deserializer, "at most 200 characters", |note: &Option<String>| {
        note.as_ref().is_none_or(|note| note.chars().count() <= 200)
    })
}

fn satellite_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    checked(deserializer, SATELLITE_NAME, |name: &Option<String>| name.as_deref().is_none_or(wire::is_satellite_name))
}

/// Registration token. The backend returns it only once.
#[derive(Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IssuedToken {
    /// Token for a single registration.
    pub token: String,
    /// Time after which the token is invalid.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub expires_at: Timestamp,
}

impl fmt::Debug for IssuedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IssuedToken").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

/// Configuration without its hash, which the backend computes: see [`SatelliteConfig`](crate::wire::SatelliteConfig).
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigUpdate {
    /// Server templates: `[servers.SLUG]`.
    #[serde(default)]
    pub servers: BTreeMap<String, Map<String, Value>>,
    /// Teams: `[[teams]]` with `users` and `installations`.
    #[serde(default)]
    pub teams: Vec<Map<String, Value>>,
}

// Prints only counts: servers and teams may contain credentials.
impl fmt::Debug for ConfigUpdate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (servers, teams) = (self.servers.len(), self.teams.len());
        f.debug_struct("ConfigUpdate").field("servers", &servers).field("teams", &teams).finish()
    }
}

/// Result of a change to a configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigUpdateResult {
    /// Hash of the configuration that is now in effect.
    pub hash: String,
    /// True if the configuration has changed.
    pub changed: bool,
    /// Ids of the satellites that received a `configure` command.
    #[serde(rename = "told")]
    pub notified: Vec<String>,
}

/// List of all satellites.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SatelliteList {
    /// Satellites in order of name.
    pub satellites: Vec<SatelliteView>,
}

/// Registered satellite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SatelliteView {
    /// Identifier of the satellite in URLs.
    pub satellite_id: String,
    /// Name of the satellite for people.
    pub name: String,
    /// Version of the satellite program.
    pub version: String,
    /// Transports by which the satellite can reach servers.
    pub capabilities: Vec<String>,
    /// Machine on which the satellite runs.
    pub system: SystemInfo,
    /// Time of the last registration.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub registered_at: Timestamp,
    /// True if the satellite sent a request within the last 90 s and has not announced that it stops.
    pub connected: bool,
    /// Time of the last request since the backend started, otherwise of the last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub last_contact: Option<Timestamp>,
    /// Time of the last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub last_heartbeat: Option<Timestamp>,
    /// Hash of the configuration that the satellite is to run; absent before one was put.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<String>,
    /// Hash of the configuration that the satellite runs, according to its last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied_config_hash: Option<String>,
    /// Number of commands without a result, except those that expired before they were delivered.
    pub commands_waiting: usize,
    /// Number of stored events.
    pub events: usize,
    /// Highest `seq` of the stored events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seq: Option<u64>,
    /// Number of instances by status.
    pub instances: BTreeMap<String, usize>,
    /// Last heartbeat; omitted in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<Heartbeat>,
}

/// Request to queue a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CommandRequest {
    /// Identifier of the command; the backend chooses one by default. A known identifier is not queued twice.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "command_id")]
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub id: Option<String>,
    /// Type of the command: a [`CommandType`](crate::wire::CommandType); unknown words are passed on.
    #[serde(deserialize_with = "command_type")]
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[a-z_]+$"))]
    pub command_type: String,
    /// Urgency of the command.
    #[serde(default)]
    pub priority: CommandPriority,
    /// Arguments of the command.
    #[serde(default)]
    pub payload: Map<String, Value>,
    /// Seconds after which the command must not be executed.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "lifetime")]
    #[schemars(range(min = 1, max = 2_592_000))]
    pub expires_in_seconds: Option<u64>,
    /// Time after which the command must not be executed; excludes `expires_in_seconds`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "expiry")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub expires_at: Option<Timestamp>,
}

fn command_id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    checked(deserializer, "1 to 128 characters of A-Z, a-z, 0-9, dot, - and _", |id: &Option<String>| {
        id.as_ref().is_none_or(|id| (1..=128).contains(&id.len()) && id.bytes().all(is_allowed))
    })
}

fn command_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    checked(deserializer, "1 to 64 characters of a-z and _", |kind: &String| {
        (1..=64).contains(&kind.len()) && kind.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
    })
}

fn expiry<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Timestamp>, D::Error> {
    let text: Option<String> = checked(deserializer, rfc3339::EXPECTED, |text: &Option<String>| {
        text.as_deref().is_none_or(|text| rfc3339::parse(text).is_some())
    })?;
    Ok(text.and_then(|text| rfc3339::parse(&text)))
}

/// Commands of a satellite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CommandList {
    /// Commands, latest first.
    pub commands: Vec<CommandRecordView>,
}

/// Command with its progress and result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CommandRecordView {
    /// Command as delivered to the satellite.
    #[serde(flatten)]
    pub command: BackendCommand,
    /// Progress of the command.
    pub state: CommandStage,
    /// Time at which the command was queued.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub created_at: Timestamp,
    /// Number of deliveries to the satellite.
    pub times_sent: u64,
    /// Time of the first delivery.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub first_sent_at: Option<Timestamp>,
    /// Result from the satellite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<CommandResult>,
    /// Time at which the result arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub finished_at: Option<Timestamp>,
}

/// Values of [`CommandRecordView::state`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandStage {
    /// Not delivered yet.
    Queued,
    /// Delivered, without a result yet.
    Sent,
    /// The satellite reported the requested effect.
    Completed,
    /// The satellite reported a failure.
    Failed,
    /// The command expired before its delivery, or the satellite reported that it came too late.
    Expired,
}

/// Stored events.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StoredEventList {
    /// Events in order of their ids; with `since`, in order of `seq`.
    pub events: Vec<StoredEvent>,
}

/// Event as the backend stores it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StoredEvent {
    /// Number that the backend assigned in order of arrival.
    pub id: String,
    /// Id of the satellite that sent the event.
    pub satellite_id: String,
    /// Sequence number that the satellite assigned.
    pub seq: u64,
    /// Type of the event, for example `mcp.server.crashed`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Time at which the event happened.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub timestamp: Timestamp,
    /// Members that belong to the type of the event.
    pub data: Value,
    /// Time at which the event arrived.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub received_at: Timestamp,
}

/// Instances of all satellites.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceList {
    /// Instances in order of satellite and name.
    pub instances: Vec<InstanceState>,
}

/// State of an instance according to its last status event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceState {
    /// Id of the satellite that runs the instance.
    pub satellite_id: String,
    /// Full name of the instance.
    pub instance: String,
    /// Identifier of the installation.
    pub installation_id: String,
    /// Identifier of the team.
    pub team_id: String,
    /// Identifier of the user.
    pub user_id: String,
    /// Name of the server for people.
    pub server_slug: String,
    /// Status of the instance, for example `online`.
    pub status: String,
    /// Reason of the status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_message: Option<String>,
    /// Next step of a person, if waiting does not help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<Remedy>,
    /// Time of the last status change, by the satellite's clock.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub since: Timestamp,
    /// Sequence number of the event that reported the status.
    pub seq: u64,
}
