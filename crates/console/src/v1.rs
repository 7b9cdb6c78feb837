//! Requests and responses that only the HTTP API has. Times are RFC 3339, durations end in `_ms` or `_seconds`, sizes in
//! `_bytes`.

use std::collections::BTreeMap;

use mcp_satellite_actors::model::event::{Envelope, LogLine, RequestLine};
use mcp_satellite_backend::server::api::CommandStage;
use mcp_satellite_backend::wire::{FleetSatellite, SystemInfo, SystemMetrics};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::api::{InstanceStatus, MemoryReport, SatelliteStatus};
pub use crate::call_queries::{CallConditions, CallQuery, CallSubject, FleetCallQuery};
pub use crate::stream_queries::{
    FleetEventQuery, FleetStreamQuery, InstanceStreamQuery, LogStreamQuery, PageStreamQuery,
};

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
    /// The next step.
    pub hint: String,
}

/// An instance with its restart budget and its unanswered calls.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct InstanceDetails {
    #[serde(flatten)]
    pub instance: InstanceStatus,
    /// Number of the snapshot that contains this status; later ones have higher numbers.
    pub revision: u64,
    pub budget: BudgetReport,
    /// Unanswered calls; `null` if the client may not read the calls of this instance.
    pub unanswered_calls: Option<UnansweredCallList>,
}

/// Unanswered calls of an instance, without arguments.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct UnansweredCallList {
    /// Number of all unanswered calls.
    pub total: usize,
    /// The last 50 calls, newest first.
    pub newest: Vec<UnansweredCallEntry>,
}

/// An unanswered call.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct UnansweredCallEntry {
    /// JSON-RPC id of the request at the server.
    pub request_id: u64,
    /// Method, such as `tools/call`.
    pub method: String,
    /// Name of the called tool; `null` for another method.
    pub tool: Option<String>,
    /// Slug of the user in whose name the call is made.
    pub user: String,
    /// Name that the client gave itself; `null` for a call of the control socket or the HTTP API.
    pub client: Option<String>,
    /// Time of the request, in RFC 3339.
    pub since: String,
    /// Milliseconds since the request.
    pub duration_ms: u64,
}

/// Restart budget of an instance: it fails permanently when `exits_max` unwanted exits are in the window.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct BudgetReport {
    pub exits_max: usize,
    pub window_ms: u64,
    /// Milliseconds since each unwanted exit that counts, oldest first.
    pub exits_ms_ago: Vec<u64>,
    /// Number of further exits after which the instance fails permanently.
    pub remaining: usize,
}

/// Memory and processor time of an instance in the last hour.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct UsageReport {
    /// Duration of one point.
    pub point_seconds: u64,
    /// Oldest first; `null` where the instance had no process. The last one is the current span.
    pub points: Vec<Option<UsageSpan>>,
}

/// Memory and processor time of a process tree during one span.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
pub struct UsageSpan {
    /// Resident memory at the end of the span.
    pub rss_bytes: u64,
    /// Average share of one core; above 100 for several cores.
    pub cpu_percent: Option<f64>,
}

/// Processes of an instance at the time of the request.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ProcessReport {
    /// Mechanism that contains the processes.
    pub contained_by: String,
    /// Path of the cgroup, or namespace and group.
    pub container: Option<String>,
    pub processes: Vec<ProcessEntry>,
}

/// A process of an instance.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ProcessEntry {
    pub pid: u32,
    pub parent_pid: u32,
    pub name: String,
    /// State letter of the kernel, such as `S` for sleeping or `Z` for a zombie.
    pub state: String,
    pub rss_bytes: u64,
    /// User and system time since the start of the process.
    pub cpu_seconds: f64,
}

/// Query for stored events, newest first. All given conditions must hold.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EventPageQuery {
    /// Only events with a lower number, from `next` of the previous page.
    pub before: Option<u64>,
    /// Only events with a higher number.
    pub since: Option<u64>,
    /// Only these event types, separated by commas.
    pub types: Option<String>,
    /// Only this team (id or slug).
    pub team: Option<String>,
    /// Only this user (id).
    pub user: Option<String>,
    /// Only the instance with this full name.
    pub instance: Option<String>,
    /// Maximum number of events, 1 to 1000; 100 if absent.
    pub limit: Option<usize>,
}

/// Stored events, newest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct EventPage {
    pub events: Vec<Envelope>,
    /// Value of `before` for older events; `null` if there are none. A page can be short because the search is limited
    /// in time.
    pub next: Option<u64>,
    /// Number of unreadable events that were skipped.
    pub skipped: u64,
    /// False if the disk accepts no events at present: the newest ones may be missing.
    pub complete: bool,
}

/// Query for lines of an instance's log, newest first.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LogQuery {
    /// Only lines from this time on, in RFC 3339.
    pub since: Option<String>,
    /// Only lines before this time, in RFC 3339.
    pub until: Option<String>,
    /// Only these levels, separated by commas: `debug`, `info`, `warn`, `error`.
    pub level: Option<String>,
    /// Only lines that contain this text.
    pub q: Option<String>,
    /// Maximum number of lines to search, 1 to 1000; 100 if absent.
    pub limit: Option<usize>,
    /// Position of older lines, from `next` of the previous page.
    pub cursor: Option<String>,
}

/// Lines of an instance's log, newest first.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct LogPage {
    pub lines: Vec<LogEntry>,
    /// Value of `cursor` for older lines; `null` if there are none.
    pub next: Option<String>,
    /// Number of the last event that was stored when the lines were read: a stream that starts `since` it has no gap.
    pub through: u64,
    /// False if the disk accepts no events at present: the newest lines may be missing.
    pub complete: bool,
}

/// A line with the number of its event.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct LogEntry {
    pub seq: u64,
    #[serde(flatten)]
    pub line: LogLine,
}

/// Calls, newest first. Only calls of servers with request logging are recorded.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct CallPage {
    pub calls: Vec<CallEntry>,
    /// Value of `cursor` for older calls; `null` if there are none.
    pub next: Option<String>,
    /// False if the disk accepts no events at present: the newest calls may be missing. A backend has those only that its
    /// satellites have delivered.
    pub complete: bool,
}

/// A recorded call.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct CallEntry {
    pub seq: u64,
    /// Full name of the instance.
    pub instance: String,
    pub team_id: String,
    pub user_id: String,
    pub server: String,
    #[serde(flatten)]
    pub call: RequestLine,
}

/// A value of the configuration as applied.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ConfigurationValue {
    /// Keys from the top of the file, such as `policy.restart.window`.
    pub path: String,
    /// The value; a secret is `***`.
    pub value: String,
    /// `FILE:LINE`, `command line` or `default`.
    pub source: String,
}

/// Satellites that are registered at a backend.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct FleetReport {
    /// URL of the backend; `null` if the satellite has none.
    pub backend: Option<String>,
    /// Name of the satellite that answers; `null` if the backend answers.
    pub name: Option<String>,
    /// Time of the list by the backend's clock, in RFC 3339; `null` without a backend.
    pub at: Option<String>,
    /// Satellites in order of name.
    pub satellites: Vec<FleetMember>,
}

/// A satellite of a backend.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct FleetMember {
    #[serde(flatten)]
    pub satellite: FleetSatellite,
    /// Facts that only the backend shows; `null` if a satellite answers.
    pub details: Option<FleetMemberDetails>,
}

/// Facts about a satellite that only its backend shows.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct FleetMemberDetails {
    pub satellite_id: String,
    pub machine: SystemInfo,
    /// True if the satellite runs the configuration that it is to run; `null` before one was put.
    pub config_is_current: Option<bool>,
    /// Number of commands without a result.
    pub commands_waiting: usize,
    /// Number of stored events.
    pub events: usize,
}

/// A command that waits at the backend for its satellite.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct QueuedCommandReport {
    /// Id of the command.
    pub id: String,
    /// Progress of the command.
    pub status: CommandStage,
    /// Name of the satellite.
    pub satellite: String,
}

/// Load of the machine.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct MachineReport {
    /// Memory that the satellite may use, and its effect on starts; `null` before the first reading.
    pub memory: Option<MemoryReport>,
    /// Use of the whole machine.
    pub load: SystemMetrics,
}

/// A sandbox program and whether it can be used.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct SandboxReport {
    pub name: String,
    pub usable: bool,
    /// Path of the program, or the reason why it cannot be used.
    pub detail: String,
}
