//! Messages between a satellite and its backend: JSON over HTTPS. The satellite sends every request and authenticates
//! with its API key as bearer token. The schemas in `schemas/` are generated from these types.
//!
//! ```text
//! POST /api/satellites/register                       Registration  → RegistrationResponse   bearer: a single-use token
//! GET  /api/satellites/{id}/commands?last_poll&limit&wait            → PollCommands
//! POST /api/satellites/{id}/commands/{command}/result CommandResult → EmptyResponse
//! GET  /api/satellites/{id}/config                                   → SatelliteConfig        ETag, If-None-Match → 304; 404 before one was put
//! POST /api/satellites/{id}/events                    EventBatch    → EventBatchResult       Idempotency-Key: id of the batch
//! POST /api/satellites/{id}/heartbeat                 Heartbeat     → EmptyResponse
//! GET  /api/satellites/{id}/fleet                                    → FleetList              404 from an older backend
//! ```
//!
//! Readers ignore unknown members, so either side may be newer than the other. Timestamps are RFC 3339 in UTC.

use std::collections::BTreeMap;

use mcp_satellite_actors::model::event::rfc3339;
use schemars::JsonSchema;
use serde::de::{Error as _, Unexpected};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

pub(crate) const SATELLITE_NAME: &str = "10 to 32 characters of a-z, 0-9, - and _";

/// Deserializes a value that has to satisfy `is_valid`. `expected` describes the valid values.
pub(crate) fn checked<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
    expected: &str,
    is_valid: impl FnOnce(&T) -> bool,
) -> Result<T, D::Error> {
    let value = T::deserialize(deserializer)?;
    if is_valid(&value) { Ok(value) } else { Err(D::Error::invalid_value(Unexpected::Other("value"), &expected)) }
}

pub(crate) fn is_satellite_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
    (10..=32).contains(&name.len()) && name.bytes().all(is_allowed)
}

fn satellite_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    checked(deserializer, SATELLITE_NAME, |name: &String| is_satellite_name(name))
}

/// Request of a new satellite to register with the backend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Registration {
    /// Name of the satellite: 10 to 32 characters of `a-z 0-9 - _`.
    #[serde(deserialize_with = "satellite_name")]
    #[schemars(length(min = 10, max = 32), regex(pattern = r"^[a-z0-9_-]+$"))]
    pub name: String,
    /// Version of the satellite program.
    pub version: String,
    /// Transports by which the satellite can reach servers: `stdio`, `http`, `sse`.
    pub capabilities: Vec<String>,
    /// Machine on which the satellite runs.
    pub system: SystemInfo,
}

/// Machine on which a satellite runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SystemInfo {
    /// Operating system, for example `linux`.
    pub os: String,
    /// Processor architecture, for example `x86_64`.
    pub arch: String,
    /// Number of logical processors.
    pub cpus: usize,
    /// Physical memory in bytes.
    pub memory_bytes: u64,
}

/// Response to a successful registration.
#[derive(Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RegistrationResponse {
    /// Identifier of the satellite in URLs.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub satellite_id: String,
    /// Bearer token for all other requests. The backend returns it only once.
    #[schemars(length(min = 16))]
    pub api_key: String,
}

impl std::fmt::Debug for RegistrationResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegistrationResponse").field("satellite_id", &self.satellite_id).finish_non_exhaustive()
    }
}

/// Interval between polls for commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PollingMode {
    /// Poll every 2 s.
    Immediate,
    /// Poll every 10 s.
    High,
    /// Poll every 30 s.
    #[default]
    Normal,
    /// Poll every 60 s.
    Idle,
}

/// Commands for a satellite.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PollCommands {
    /// Commands in order of execution, most urgent first. A command is delivered again until its result has arrived.
    pub commands: Vec<BackendCommand>,
    /// Interval until the next poll.
    #[serde(default)]
    pub polling_mode: PollingMode,
    /// Seconds until the next poll; overrides `polling_mode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_poll_interval: Option<f64>,
    /// Current time of the backend, against which `expires_at` is compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub server_time: Option<jiff::Timestamp>,
}

/// Command for a satellite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BackendCommand {
    /// Identifier of the command. The satellite executes it once, however often it is delivered.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub id: String,
    /// Type of the command. The satellite answers an unknown type with a failure.
    pub command_type: String,
    /// Urgency of the command.
    #[serde(default)]
    pub priority: CommandPriority,
    /// Arguments of the command: see [`CommandTarget`], [`ConfigurePayload`] and [`HealthCheckPayload`].
    #[serde(default)]
    pub payload: Map<String, Value>,
    /// Time after which the satellite must not execute the command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub expires_at: Option<jiff::Timestamp>,
}

/// Values of [`BackendCommand::command_type`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandType {
    /// Read the configuration again; the payload is [`ConfigurePayload`].
    Configure,
    /// Restart the instances and clear their failures; the payload is [`CommandTarget`].
    Restart,
    /// Start the instances; the payload is [`CommandTarget`].
    Spawn,
    /// Stop the instances and keep them stopped; the payload is [`CommandTarget`].
    Kill,
    /// Check whether the servers accept the credentials; the payload is [`HealthCheckPayload`].
    HealthCheck,
}

/// Urgency of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandPriority {
    /// Before all other commands; the satellite then polls every 2 s.
    Immediate,
    /// Soon; the satellite then polls every 10 s.
    High,
    /// Default; the satellite polls every 30 s.
    #[default]
    Normal,
    /// After all other commands.
    Low,
}

/// Selection of instances that match all given members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CommandTarget {
    /// Identifier of the installation.
    pub installation_id: String,
    /// Identifier of the team; without it, all teams.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team_id: Option<String>,
    /// Identifier of the user; without it, all users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
}

/// Payload of `configure`: the satellite reads the whole configuration and applies the differences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigurePayload {
    /// Reason of the command.
    pub event: ConfigureEvent,
    /// Identifier of the affected installation; absent for `team_member_removed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub installation_id: Option<String>,
    /// Identifier of the affected team.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team_id: Option<String>,
    /// Identifier of the affected user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
}

/// Values of [`ConfigurePayload::event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConfigureEvent {
    /// An MCP server was installed.
    McpInstallationCreated,
    /// The configuration of an installation has changed.
    McpInstallationUpdated,
    /// An installation was removed.
    McpInstallationDeleted,
    /// A remote server is reachable again: the satellite reconnects and reads its tools.
    McpRecovery,
    /// Restart the instances with the current configuration.
    McpRedeploy,
    /// A user has left a team.
    TeamMemberRemoved,
}

/// Payload of `health_check`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HealthCheckPayload {
    /// Instances to check.
    #[serde(flatten)]
    pub target: CommandTarget,
    /// Kind of check; the default and only value is `credential_validation`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_type: Option<String>,
}

/// Result of a command, as observed in the statuses of the instances.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CommandResult {
    /// Outcome of the command.
    pub status: CommandOutcome,
    /// Observed statuses: `{"instances": [{"instance": …, "status": …, "status_message": …}]}`; some commands add
    /// members.
    #[serde(default)]
    pub result: Map<String, Value>,
    /// Reason of the failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Milliseconds from the start of the execution to its observed effect.
    pub duration_ms: u64,
}

/// Values of [`CommandResult::status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandOutcome {
    /// The statuses show the requested effect.
    Completed,
    /// The statuses do not show the requested effect.
    Failed,
    /// The command had expired and was not executed.
    Expired,
}

/// Satellites of the backend, as each of them may see the others. Contains neither keys nor configurations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FleetList {
    /// Time of the list, by the backend's clock.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub server_time: jiff::Timestamp,
    /// Satellites in order of name.
    pub satellites: Vec<FleetSatellite>,
}

/// Registered satellite in a [`FleetList`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FleetSatellite {
    /// Name of the satellite for people.
    pub name: String,
    /// True if the satellite sent a request within the last 90 s and has not announced that it stops.
    pub connected: bool,
    /// Time of the last request since the backend started, otherwise of the last heartbeat.
    #[serde(default)]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub last_contact: Option<jiff::Timestamp>,
    /// Version of the satellite program.
    pub version: String,
    /// Number of instances by status, as last reported.
    pub instances: BTreeMap<String, usize>,
}

/// Response without data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EmptyResponse {
    /// Always true: errors are answered with an [`ErrorBody`].
    pub success: bool,
}

/// Complete configuration of a satellite. The members have the same names, forms and meanings as the tables in a
/// configuration file.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SatelliteConfig {
    /// Identifier of this configuration, also in `ETag` and `If-None-Match`: 1 to 128 visible ASCII characters without
    /// `"`.
    #[serde(deserialize_with = "hash")]
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[!#-~]+$"))]
    pub hash: String,
    /// Server templates: `[servers.SLUG]`. Required even if empty, so that a truncated document is not read as an empty
    /// one.
    pub servers: BTreeMap<String, Map<String, Value>>,
    /// Teams: `[[teams]]` with `users` and `installations`. Required even if empty.
    pub teams: Vec<Map<String, Value>>,
}

// The hash is sent in the `ETag` and `If-None-Match` headers, which restrict its characters.
fn hash<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let is_allowed = |byte: u8| byte.is_ascii_graphic() && byte != b'"';
    checked(deserializer, "1 to 128 visible ASCII characters and no `\"`", |hash: &String| {
        (1..=128).contains(&hash.len()) && hash.bytes().all(is_allowed)
    })
}

// Prints only counts: servers and teams may contain credentials.
impl std::fmt::Debug for SatelliteConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (servers, teams) = (self.servers.len(), self.teams.len());
        f.debug_struct("SatelliteConfig")
            .field("hash", &self.hash)
            .field("servers", &servers)
            .field("teams", &teams)
            .finish()
    }
}

/// Batch of events from a satellite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventBatch {
    /// Events in order of `seq`.
    #[serde(deserialize_with = "event_list")]
    #[schemars(length(min = 1, max = 100))]
    pub events: Vec<EventEnvelope>,
}

fn event_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<EventEnvelope>, D::Error> {
    checked(deserializer, "1 to 100 events", |events: &Vec<_>| (1..=100).contains(&events.len()))
}

/// Event of a satellite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventEnvelope {
    /// Sequence number, which increases by one per event and continues after a restart of the satellite.
    #[serde(deserialize_with = "sequence_number")]
    #[schemars(range(min = 1, max = 9_223_372_036_854_775_807_u64))]
    pub seq: u64,
    /// Type of the event, for example `mcp.server.crashed`.
    #[serde(rename = "type", deserialize_with = "event_type")]
    #[schemars(regex(pattern = r"^[a-z_]+(\.[a-z_]+)+$"))]
    pub kind: String,
    /// Time at which the event happened.
    #[serde(deserialize_with = "rfc3339::deserialize")]
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub timestamp: jiff::Timestamp,
    /// Members that belong to the type of the event.
    pub data: Map<String, Value>,
}

fn sequence_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    checked(deserializer, "1 to 2^63 - 1", |seq| i64::try_from(*seq).is_ok_and(|seq| seq > 0))
}

fn event_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    checked(deserializer, "words of a-z and _, separated by dots", |kind: &String| {
        kind.contains('.') && kind.split('.').all(is_word)
    })
}

/// Response to a batch of events.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EventBatchResult {
    /// True if the backend accepted all events.
    pub success: bool,
    /// Number of accepted events.
    pub processed: usize,
    /// Number of events that the backend rejected for good.
    pub failed: usize,
    /// Identifiers that the backend assigned to the accepted events, in order.
    #[serde(default)]
    pub event_ids: Vec<String>,
    /// Rejected events.
    #[serde(default)]
    pub failures: Vec<RejectedEvent>,
}

/// Event that the backend rejected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RejectedEvent {
    /// Index of the event in the batch, from 0.
    pub index: usize,
    /// Type of the event.
    #[serde(rename = "type", default)]
    pub kind: String,
    /// Reason of the rejection.
    pub error: String,
}

/// Periodic report of a satellite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Heartbeat {
    /// State of the satellite: `active`, or `stopping` in the last heartbeat.
    pub status: String,
    /// Time at which the report was made.
    #[serde(deserialize_with = "rfc3339::deserialize")]
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub timestamp: jiff::Timestamp,
    /// Version of the satellite program.
    pub version: String,
    /// Seconds since the start of the satellite.
    pub uptime_seconds: u64,
    /// Resource usage of the machine and of the satellite process.
    pub system: SystemMetrics,
    /// Number of instances by status. Statuses without instances are omitted.
    pub counts: BTreeMap<String, usize>,
    /// Instances by team identifier.
    pub processes_by_team: BTreeMap<String, Vec<HeartbeatInstance>>,
    /// Names of the offered tools by instance, without their schemas.
    pub tools: BTreeMap<String, Vec<String>>,
    /// Progress of the event delivery.
    pub events: EventProgress,
    /// Hash of the applied configuration: [`SatelliteConfig::hash`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<String>,
}

/// Resource usage. Values that cannot be measured are omitted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SystemMetrics {
    /// Load of all processors together since the last heartbeat, in percent (0 to 100).
    #[serde(deserialize_with = "percentage")]
    #[schemars(range(min = 0, max = 100))]
    pub cpu_percent: f32,
    /// Used memory of the machine in bytes.
    pub memory_used_bytes: u64,
    /// Physical memory of the machine in bytes.
    pub memory_total_bytes: u64,
    /// Used bytes of the file system that contains the data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_used_bytes: Option<u64>,
    /// Size in bytes of the file system that contains the data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_total_bytes: Option<u64>,
    /// Resident memory of the satellite process in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub satellite_rss_bytes: Option<u64>,
}

fn percentage<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    checked(deserializer, "0 to 100", |percent| (0.0..=100.0).contains(percent))
}

/// Instance in a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HeartbeatInstance {
    /// Full name of the instance.
    pub instance: String,
    /// Identifier of the installation.
    pub installation_id: String,
    /// Identifier of the user.
    pub user_id: String,
    /// Status of the instance, for example `online`.
    pub status: String,
    /// Process id of a running child process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// Progress of the event delivery: see [`Heartbeat::events`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EventProgress {
    /// Highest `seq` up to which all events are stored on the satellite's disk.
    pub journalled_through: u64,
    /// Number of events that wait to be sent.
    pub backlog: u64,
}

/// Body of an error response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    /// Reason of the error and the next step.
    pub error: String,
    /// Index of the invalid event in its batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
}
