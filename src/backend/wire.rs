//! What a satellite and its backend say to each other: HTTPS with JSON, always asked by the satellite, every request as
//! the bearer of its API key. The schemas in `schemas/` are generated from these types.
//!
//! ```text
//! POST /api/satellites/register                      Registration → Registered      bearer: a single-use token
//! GET  /api/satellites/{id}/commands?last_poll&limit&wait              → Commands
//! POST /api/satellites/{id}/commands/{command}/result CommandResult → Received
//! GET  /api/satellites/{id}/config                                → Config           ETag, If-None-Match → 304; 404 before one was put
//! POST /api/satellites/{id}/events                   Events       → EventsTaken      Idempotency-Key: the batch's id
//! POST /api/satellites/{id}/heartbeat                Heartbeat    → Received
//! ```
//!
//! Whoever reads passes over members that it does not know, so that each side may be newer than the other. Timestamps are
//! RFC 3339 in UTC.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// A satellite introduces itself, once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Registration {
    /// 10 to 32 characters of `a-z 0-9 - _`.
    #[schemars(length(min = 10, max = 32), regex(pattern = r"^[a-z0-9_-]+$"))]
    pub name: String,
    /// Of the satellite's program.
    pub version: String,
    /// The transports that it can reach servers by: `stdio`, `http`, `sse`.
    pub capabilities: Vec<String>,
    /// What it runs on.
    pub system: SystemInfo,
}

/// What a satellite runs on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SystemInfo {
    /// `linux`
    pub os: String,
    /// `x86_64`
    pub arch: String,
    /// Logical processors.
    pub cpus: usize,
    /// Physical memory.
    pub memory_bytes: u64,
}

/// It may come in from now on.
#[derive(Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Registered {
    /// Its name in URLs.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub satellite_id: String,
    /// Its bearer token for everything else. Shown once.
    #[schemars(length(min = 16))]
    pub api_key: String,
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registered").field("satellite_id", &self.satellite_id).finish_non_exhaustive()
    }
}

/// How soon the next poll is wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PollingMode {
    /// Every 2 s.
    Immediate,
    /// Every 10 s.
    High,
    /// Every 30 s.
    #[default]
    Normal,
    /// Every 60 s.
    Idle,
}

/// What there is to do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Commands {
    /// In the order in which they are to be carried out, the most urgent first. Each comes again until its result has arrived.
    pub commands: Vec<Command>,
    /// How soon the satellite asks again.
    #[serde(default)]
    pub polling_mode: PollingMode,
    /// In seconds, in place of the mode's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_poll_interval: Option<f64>,
    /// The backend's clock, which expiry is measured by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub server_time: Option<jiff::Timestamp>,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Command {
    /// Carried out once, however often it comes.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub id: String,
    /// What to do. A word that the satellite does not know is answered with a failure.
    pub command_type: String,
    /// How urgent it is.
    #[serde(default)]
    pub priority: Priority,
    /// With what: see [`Target`], [`Configure`] and [`HealthCheck`].
    #[serde(default)]
    pub payload: Map<String, Value>,
    /// It means nothing any more after this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub expires_at: Option<jiff::Timestamp>,
}

/// The words of [`Command::command_type`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandType {
    /// The configuration has changed: [`Configure`].
    Configure,
    /// Start it again with a clean slate: [`Target`].
    Restart,
    /// Have it be there when called: [`Target`].
    Spawn,
    /// Have it stay down: [`Target`].
    Kill,
    /// Find out whether its credentials are taken: [`HealthCheck`].
    HealthCheck,
}

/// How urgent a command is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Before all others, and the next polls come every 2 s.
    Immediate,
    /// Soon: every 10 s.
    High,
    /// The default: every 30 s.
    #[default]
    Normal,
    /// When there is nothing else.
    Low,
}

/// Which instances are meant: those for which everything that is given holds. At least the installation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Target {
    /// What is installed.
    pub installation_id: String,
    /// Of this team.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team_id: Option<String>,
    /// Of this user; without it, of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
}

/// The payload of `configure`: the satellite reads the whole configuration and takes on what is different.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Configure {
    /// What has happened.
    pub event: ConfigureEvent,
    /// To which instances; not of `team_member_removed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub installation_id: Option<String>,
    /// Of this team.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team_id: Option<String>,
    /// Of this user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_id: Option<String>,
}

/// See [`Configure::event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConfigureEvent {
    /// A server was installed.
    McpInstallationCreated,
    /// Its configuration has changed.
    McpInstallationUpdated,
    /// It was removed.
    McpInstallationDeleted,
    /// A remote server is said to be back: its tools are read again.
    McpRecovery,
    /// Started again with what the configuration says now.
    McpRedeploy,
    /// A user has left a team.
    TeamMemberRemoved,
}

/// The payload of `health_check`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HealthCheck {
    /// Of which instances.
    #[serde(flatten)]
    pub target: Target,
    /// `credential_validation`, the only kind that there is, by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check_type: Option<String>,
}

/// What came of a command, as the instances' statuses show it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CommandResult {
    /// Whether it had the effect that it asks for.
    pub status: Outcome,
    /// What there is to see: `{"instances": [{"instance": …, "status": …, "status_message": …}]}`, and more for some.
    #[serde(default)]
    pub result: Map<String, Value>,
    /// Why it had not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// From the begin of its execution to its effect.
    pub duration_ms: u64,
}

/// See [`CommandResult::status`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The statuses show the effect.
    Completed,
    /// They do not.
    Failed,
    /// It came too late and nothing was done.
    Expired,
}

/// The answer where there is nothing to say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Received {
    /// Always true: what was not received is answered with an [`ErrorBody`].
    pub success: bool,
}

/// What the satellite is to run: whole, every time. Its members have the names, forms and meanings of the tables of the
/// same name in a configuration file.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Config {
    /// Tells it from others. The same words in `ETag` and `If-None-Match`, so 1 to 128 visible ASCII characters without `"`.
    #[serde(deserialize_with = "hash")]
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[!#-~]+$"))]
    pub hash: String,
    /// Templates: `[servers.SLUG]`. Also said where there are none, so that half a document is not an empty one.
    pub servers: BTreeMap<String, Map<String, Value>>,
    /// `[[teams]]`, with `users` and `installations`. Also said where there are none.
    pub teams: Vec<Map<String, Value>>,
}

/// What cannot stand in a header is no hash.
fn hash<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let hash = String::deserialize(deserializer)?;
    let fits = (1..=128).contains(&hash.len()) && hash.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"');
    let wrong = || D::Error::custom("a hash has 1 to 128 visible ASCII characters and no `\"`");
    if fits { Ok(hash) } else { Err(wrong()) }
}

/// It may hold credentials.
impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (servers, teams) = (self.servers.len(), self.teams.len());
        f.debug_struct("Config").field("hash", &self.hash).field("servers", &servers).field("teams", &teams).finish()
    }
}

/// Events on their way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Events {
    /// In order of `seq`.
    #[schemars(length(min = 1, max = 100))]
    pub events: Vec<EventEnvelope>,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventEnvelope {
    /// Counts up by one, also over restarts of the satellite.
    #[schemars(range(min = 1, max = 9_223_372_036_854_775_807_u64))]
    pub seq: u64,
    /// `mcp.server.crashed`, for example.
    #[serde(rename = "type")]
    #[schemars(regex(pattern = r"^[a-z_]+(\.[a-z_]+)+$"))]
    pub kind: String,
    /// When it happened.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub timestamp: jiff::Timestamp,
    /// What.
    pub data: Map<String, Value>,
}

/// What became of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EventsTaken {
    /// Whether all were taken.
    pub success: bool,
    /// How many were taken.
    pub processed: usize,
    /// How many were not, and never will be.
    pub failed: usize,
    /// What the backend calls those that were taken, in order.
    #[serde(default)]
    pub event_ids: Vec<String>,
    /// Why the others were not.
    #[serde(default)]
    pub failures: Vec<EventFailure>,
}

/// An event that was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EventFailure {
    /// Its place in the batch, from 0.
    pub index: usize,
    /// Its type.
    #[serde(rename = "type", default)]
    pub kind: String,
    /// Why.
    pub error: String,
}

/// The satellite lives, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Heartbeat {
    /// `active`, or `stopping` for the last one.
    pub status: String,
    /// When it was made.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub timestamp: jiff::Timestamp,
    /// Of the satellite's program.
    pub version: String,
    /// Since it started.
    pub uptime_seconds: u64,
    /// Of the machine and of the satellite's own process.
    pub system: SystemMetrics,
    /// Instances of each status, by its name. Statuses that none has are left out.
    pub counts: BTreeMap<String, usize>,
    /// What runs, by the team's id.
    pub processes_by_team: BTreeMap<String, Vec<Process>>,
    /// Which tools are offered, by instance: names, no schemas.
    pub tools: BTreeMap<String, Vec<String>>,
    /// How far the events are.
    pub events: EventProgress,
    /// The [`Config::hash`] that is applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<String>,
}

/// Measured, not guessed; what cannot be measured is left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SystemMetrics {
    /// Of all processors together, 0 to 100, since the last heartbeat.
    #[schemars(range(min = 0, max = 100))]
    pub cpu_percent: f32,
    /// In use on the machine.
    pub memory_used_bytes: u64,
    /// Of the machine.
    pub memory_total_bytes: u64,
    /// In use on the disk that holds the data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_used_bytes: Option<u64>,
    /// Of that disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_total_bytes: Option<u64>,
    /// Resident memory of the satellite's own process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub satellite_rss_bytes: Option<u64>,
}

/// One instance in a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Process {
    /// Its full name.
    pub instance: String,
    /// What is installed.
    pub installation_id: String,
    /// For whom.
    pub user_id: String,
    /// One of the twelve.
    pub status: String,
    /// Of a child process that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// See [`Heartbeat::events`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EventProgress {
    /// All up to this `seq` are on the satellite's disk.
    pub journalled_through: u64,
    /// How many wait to be sent.
    pub backlog: u64,
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    /// In words that say what to do.
    pub error: String,
    /// Of events: the place in the batch of the one that is invalid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
}
