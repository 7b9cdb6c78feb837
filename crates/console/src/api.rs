//! Requests and responses of the control socket and of the HTTP API. Names, fields and exit codes are stable, because
//! scripts depend on them.

pub use mcp_satellite_actors::model::event::rfc3339;
pub use mcp_satellite_backend::link::BackendStatus;
pub use mcp_satellite_store::values::{RequiredValue, RequiredValueSource};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::ControlError;
use mcp_satellite_actors::model::catalogue::Tool;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::remote::{ConnectionState, ServerHealth};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::memory::MemoryStatus;
use mcp_satellite_actors::rules::outbox;
use mcp_satellite_actors::rules::slot::RequestedState;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use mcp_satellite_gateway::remedy::next_step;
use mcp_satellite_process::process::TreeUsage;
use mcp_satellite_remote::oauth::is_safe_in_a_command;
use mcp_satellite_store::delivery::DeliveryStatus;
use mcp_satellite_store::journal::JournalStatus;
use schemars::JsonSchema;

/// Selects one instance: by the slug of its server where that is unique, else by its full name.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InstanceSelector {
    /// Slug of the server, or full name of the instance.
    pub server: String,
    /// Only instances of this team (id or slug).
    #[serde(default)]
    pub team: Option<String>,
    /// Only instances of this user (id or slug).
    #[serde(default)]
    pub user: Option<String>,
}

impl InstanceSelector {
    /// Selects an instance by name among those of a team.
    pub fn of_team(server: &str, team: Option<String>) -> Self {
        Self { server: server.to_owned(), team, user: None }
    }
}

/// A link that opens the console, valid once within a minute. There is no `Debug` because it contains a secret.
#[derive(Serialize, Deserialize)]
pub struct LoginLink {
    /// URL of the login page; the code is in its fragment, which is not sent to any server.
    pub url: String,
}

/// A tool call.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CallRequest {
    /// The instance to call.
    pub selector: InstanceSelector,
    /// Name of the tool, as the server defines it.
    pub tool: String,
    /// Arguments of the tool: a JSON object.
    #[serde(default)]
    pub arguments: Option<Box<RawValue>>,
    /// Timeout of the whole call, in milliseconds.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}

/// Reason why a request failed.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct RequestFailure {
    /// Stable error code: `not_found`, `ambiguous`, `refused`, `superseded`, `closing`, `terminated`, `timed_out`,
    /// `reconnecting`, `remote`, `busy`, `server_error`, `bad_input`, `storage`, `authorization`.
    pub kind: String,
    /// Description of the failure and its cause.
    pub message: String,
    /// Status of the instance, if it is the reason; `reconnecting` if an attempt to reach the server failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    #[serde(flatten)]
    pub details: FailureDetails,
}

/// Facts about a failure. Fields that do not apply are left out.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct FailureDetails {
    /// Name of the next step; `None` if only a retry can help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<Remedy>,
    /// The next step as a command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// Fate of a call that got no response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fate: Option<CallFate>,
    /// The server's JSON-RPC error code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i64>,
    /// The server's JSON-RPC error data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<serde_json::Value>,
    /// End of the attempt that was made for this call, in RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_attempt: Option<String>,
    /// Milliseconds until the next automatic attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_retry_ms: Option<u64>,
    /// Reason why the last attempt failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// HTTP status of the remote server's error response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_status: Option<u16>,
    /// Milliseconds after which a retry is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The OAuth scopes that the request needs and the authorization lacks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scopes: Vec<String>,
}

impl From<CallError> for RequestFailure {
    fn from(error: CallError) -> Self {
        let mut failure = Self::new(error.kind(), error.to_string());
        let details = &mut failure.details;
        details.fate = error.fate();
        match error {
            CallError::Refused { status, remedy, .. } => {
                failure.status = Some(status.to_string());
                details.remedy = remedy;
            }
            CallError::Reconnecting { last_attempt, next_retry_ms, last_error } => {
                failure.status = Some(ConnectionState::Reconnecting.to_string());
                details.last_attempt = Some(rfc3339(last_attempt));
                details.next_retry_ms = next_retry_ms;
                details.last_error = Some(last_error);
            }
            CallError::Remote { failure: why, .. } => {
                details.http_status = http_status(&why.kind);
                details.retry_after_ms = retry_after(&why.kind).map(milliseconds);
                if let FailureKind::InsufficientScope { scopes } = &why.kind {
                    details.remedy = Some(Remedy::Authorize);
                    details.scopes =
                        scopes.split(' ').filter(|scope| is_safe_in_a_command(scope)).map(str::to_owned).collect();
                }
            }
            CallError::Server { code, data, .. } => {
                details.code = Some(code);
                details.data = data.and_then(|data| serde_json::from_str(&data).ok());
            }
            CallError::NotFound { .. }
            | CallError::Terminated { .. }
            | CallError::TimedOut { .. }
            | CallError::Busy { .. }
            | CallError::BadInput(_) => {}
        }
        failure
    }
}

impl From<ControlError> for RequestFailure {
    fn from(error: ControlError) -> Self {
        let kind = match error {
            ControlError::NotFound => "not_found",
            ControlError::Refused { .. } => "refused",
            ControlError::Superseded => "superseded",
            ControlError::Closing => "closing",
        };
        let message = error.to_string();
        let remedy = match error {
            ControlError::Refused { remedy, .. } => remedy,
            ControlError::NotFound | ControlError::Superseded | ControlError::Closing => None,
        };
        let mut failure = Self::new(kind, message);
        failure.details.remedy = remedy;
        failure
    }
}

impl RequestFailure {
    /// Creates a failure with a kind and a message only.
    pub fn new(kind: &str, message: impl Into<String>) -> Self {
        Self { kind: kind.to_owned(), message: message.into(), ..Self::default() }
    }

    /// Adds the command of the next step for this instance.
    #[must_use]
    pub fn with_next_step(mut self, spec: &InstanceSpec) -> Self {
        let FailureDetails { remedy, scopes, .. } = &self.details;
        self.details.next_step = remedy.map(|remedy| match &scopes[..] {
            [] => next_step(remedy, spec),
            scopes => format!("`satellite auth {} --scope {}`", spec.name, scopes.join(" --scope ")),
        });
        self
    }
}

fn http_status(kind: &FailureKind) -> Option<u16> {
    match kind {
        FailureKind::Unauthorized { .. } => Some(401),
        FailureKind::Forbidden { .. } | FailureKind::InsufficientScope { .. } => Some(403),
        FailureKind::Throttled { .. } => Some(429),
        FailureKind::SessionExpired { status, .. }
        | FailureKind::ServerError { status, .. }
        | FailureKind::Redirected { status, .. }
        | FailureKind::Status { status, .. } => Some(*status),
        FailureKind::Dns
        | FailureKind::Refused
        | FailureKind::ConnectTimeout(_)
        | FailureKind::Tls(_)
        | FailureKind::Broken(_)
        | FailureKind::HeaderTimeout(_)
        | FailureKind::Cut
        | FailureKind::OtherEra(_)
        | FailureKind::Ungranted { .. }
        | FailureKind::NotRenewed(_)
        | FailureKind::NotMcp { .. }
        | FailureKind::TooLong(_)
        | FailureKind::NoMemory
        | FailureKind::ForeignEndpoint { .. }
        | FailureKind::BadAddress(_)
        | FailureKind::Flooded
        | FailureKind::UnsupportedTransport
        | FailureKind::Handshake(_)
        | FailureKind::Unhealthy(_)
        | FailureKind::Panicked(_) => None,
    }
}

fn retry_after(kind: &FailureKind) -> Option<Duration> {
    match kind {
        FailureKind::Throttled { retry_after } | FailureKind::ServerError { retry_after, .. } => *retry_after,
        _ => None,
    }
}

/// Result of a requested reconnect.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ReconnectResult {
    /// Full name of the instance.
    pub instance: String,
    /// True if the instance accepts calls now.
    pub success: bool,
    /// Status after the attempt.
    pub status: Status,
    /// Reason for the status.
    pub status_message: Option<String>,
    /// The next step as a command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// The reason why the command is not stored; see [`ControlResult::not_durable`].
    #[serde(default)]
    pub not_durable: Option<String>,
}

/// A request to read the configuration again.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReloadQuery {
    /// True to accept a configuration that removes more than half of the servers.
    #[serde(default)]
    pub accept: bool,
}

/// Size of the configuration that was applied.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ReloadResult {
    /// Number of servers, each counted once per user.
    pub servers: usize,
    /// Number of teams.
    pub teams: usize,
    /// Part of the configuration of the MCP endpoint that is not in effect, with the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint_problem: Option<String>,
    /// Part of the configuration of the console that is not in effect, with the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_problem: Option<String>,
}

/// The result of `prune`.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct PruneResult {
    /// Instances whose data was erased, as TEAM/USER/INSTALLATION by their ids.
    pub instances: Vec<String>,
}

/// Values that a user sets or removes for an instance. There is no `Debug` because it contains secrets.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigureRequest {
    /// The instance to configure.
    pub selector: InstanceSelector,
    /// Values to set, by key.
    #[serde(default)]
    pub set: BTreeMap<String, String>,
    /// Keys whose values are removed.
    #[serde(default)]
    pub unset: Vec<String>,
}

/// Values that the user of an instance must provide, after a change. The values themselves are never included.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ConfigureResult {
    /// The instance after the change.
    pub instance: InstanceStatus,
    /// Required values.
    pub required: Vec<RequiredValue>,
    /// The reason why the change is not stored; see [`ControlResult::not_durable`].
    #[serde(default)]
    pub not_durable: Option<String>,
}

/// A request to start an OAuth authorization of an instance.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AuthRequest {
    /// The instance to authorize.
    pub selector: InstanceSelector,
    /// URL to which the authorization server redirects the browser.
    pub redirect_uri: String,
    /// True to use the device flow: the user types a code on another device.
    #[serde(default)]
    pub device: bool,
    /// Scopes to request. If empty, the configured scopes or those that the server names are used.
    #[serde(default)]
    pub scopes: Vec<String>,
}

/// A started authorization: the page that the user must open.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct AuthFlow {
    /// Full name of the instance.
    pub instance: String,
    /// Number of the flow, for [`AuthFinishRequest`]; `None` if the satellite itself was granted access and no step is left.
    pub flow: Option<u64>,
    /// URL of the page to open.
    pub page: Option<String>,
    /// URL of the page with the user code in it.
    pub page_with_code: Option<String>,
    /// Code to type on the page.
    pub user_code: Option<String>,
    /// Seconds until the flow expires.
    pub expires_in_seconds: Option<u64>,
}

/// The outcome of the browser step: the redirect URL, the code in it, or neither for the device flow. There is no
/// `Debug` because it contains a secret.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AuthFinishRequest {
    /// Number of the flow, from [`AuthFlow`].
    pub flow: u64,
    /// The whole URL to which the browser was redirected.
    #[serde(default)]
    pub redirect: Option<String>,
    /// The authorization code in that URL.
    #[serde(default)]
    pub code: Option<String>,
}

/// Result of a revoked authorization.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct AuthRevokeResult {
    /// Full name of the instance.
    pub instance: String,
    /// True if the instance had an authorization.
    #[serde(rename = "was_there")]
    pub had_grant: bool,
    /// Reason why the authorization server could not be notified.
    #[serde(rename = "not_told")]
    pub notification_error: Option<String>,
}

/// An instance in `status --json`. The name of a field ends with the unit of a duration; `null` means unknown or not
/// applicable.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct InstanceStatus {
    /// Full name of the instance.
    pub instance: String,
    /// Id of the installation.
    pub installation_id: String,
    /// Team slug.
    pub team: String,
    /// User slug.
    pub user: String,
    /// Server slug.
    pub server: String,
    /// `stdio`, `http` or `sse`.
    pub transport: String,
    /// Current status.
    pub status: Status,
    /// Reason for the status.
    pub status_message: Option<String>,
    /// Name of the next step; `null` if the only step is to wait.
    #[serde(default)]
    pub remedy: Option<Remedy>,
    /// The next step as a command.
    #[serde(default)]
    pub next_step: Option<String>,
    /// Time at which the instance entered this status, in RFC 3339.
    #[serde(default)]
    pub since: String,
    /// Wanted state: `running` or `stopped`.
    pub want: RequestedState,
    /// True if the instance is asleep or being woken.
    pub dormant: bool,
    /// Connection state of a remote instance: `connecting`, `connected`, `reconnecting`, `disconnected` or `error`.
    pub connection: Option<ConnectionState>,
    /// Result of the health checks: `unknown`, `healthy` or `degraded`.
    pub health: ServerHealth,
    /// Time of the last health check, in RFC 3339.
    pub last_check_at: Option<String>,
    /// Process id of the server.
    pub pid: Option<u32>,
    /// Process id of the sandbox.
    pub wrapper_pid: Option<u32>,
    /// Sandbox of the server, or `none`.
    pub isolation: Option<String>,
    /// Mechanism that contains the server and all its child processes: `cgroup`, `pid_namespace` or `group`.
    pub held_by: Option<String>,
    /// User and group of the process, as `USER:GROUP`.
    pub identity: Option<String>,
    /// Number of restarts in total.
    pub restarts: u64,
    /// Number of unwanted exits in the current restart window.
    pub exits_in_window: usize,
    /// Number of the attempt that follows the current delay; `null` if no delay is active.
    pub attempt: Option<usize>,
    /// Rest of the current delay, in milliseconds.
    pub next_retry_ms: Option<u64>,
    /// Seconds since the handshake of the current run.
    pub uptime_seconds: Option<u64>,
    /// Time of that handshake, in RFC 3339.
    pub started_at: Option<String>,
    /// Number of tools offered.
    pub tools: usize,
    /// Number of messages received.
    pub messages: u64,
    /// Number of calls made.
    pub calls: u64,
    /// Number of calls without a response yet.
    pub calls_in_flight: usize,
    /// Number of failed calls.
    pub errors: u64,
    /// Time of the last message from the server, in RFC 3339.
    pub last_activity_at: Option<String>,
    /// The last failure; `null` once the instance is healthy again.
    pub last_error: Option<String>,
    /// Reason why the last run ended.
    pub last_exit: Option<String>,
    /// Resident memory of the server and its child processes, in bytes.
    pub rss_bytes: Option<u64>,
    /// CPU time of the server and its child processes, in seconds.
    pub cpu_seconds: Option<f64>,
    /// True if the process is not yet recorded in the ledger because the disk did not accept the row. If the satellite
    /// and its keeper were killed now, the next satellite would not find the process.
    #[serde(default)]
    pub unrecorded: bool,
}

/// The response to `start`, `stop` and `restart`.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct ControlResult {
    /// The instance after the command.
    #[serde(flatten)]
    pub instance: InstanceStatus,
    /// Reason why the command is not stored; `null` if it is stored. The command is executed in any case, but it is
    /// lost if the satellite is killed before the disk accepts it.
    #[serde(default)]
    pub not_durable: Option<String>,
}

impl InstanceStatus {
    /// Returns the status of an instance at `now`.
    pub fn from_view(view: &InstanceView, usage: Option<TreeUsage>, now: Instant) -> Self {
        let spec = &view.spec;
        let containment = view.containment.as_deref();
        Self {
            instance: spec.name.to_string(),
            installation_id: spec.id.installation.to_string(),
            team: spec.team_slug.to_string(),
            user: spec.user_slug.to_string(),
            server: spec.server.to_string(),
            transport: spec.transport().to_owned(),
            status: view.status,
            status_message: view.message.clone(),
            remedy: view.remedy,
            next_step: view.remedy.map(|remedy| next_step(remedy, spec)),
            since: rfc3339(view.since),
            want: view.requested_state,
            dormant: view.dormant,
            connection: view.connection,
            health: view.health,
            last_check_at: view.counters.last_check().map(rfc3339),
            pid: view.pid,
            wrapper_pid: containment.and_then(|containment| containment.wrapper_pid),
            isolation: containment.map(|containment| containment.isolation.to_owned()),
            held_by: containment.map(|containment| containment.mechanism.to_owned()),
            identity: containment.map(|containment| containment.identity.clone()),
            restarts: view.restarts,
            exits_in_window: view.exits_in_window(now),
            attempt: view.attempt,
            next_retry_ms: view.next_retry_at.map(|at| milliseconds(at.saturating_duration_since(now))),
            uptime_seconds: view.initialized_at.map(|at| now.saturating_duration_since(at).as_secs()),
            started_at: view.initialized_at.map(|at| rfc3339(timestamp_of(at))),
            tools: view.offered_catalogue().map_or(0, |catalogue| catalogue.tools.len()),
            messages: view.counters.messages(),
            calls: view.counters.calls(),
            calls_in_flight: view.calls_in_flight(),
            errors: view.counters.errors(),
            last_activity_at: view.counters.last_activity().map(rfc3339),
            last_error: view.last_error.clone(),
            last_exit: view.last_exit.clone(),
            rss_bytes: usage.map(|usage| usage.rss_bytes),
            cpu_seconds: usage.map(|usage| usage.cpu_seconds),
            unrecorded: false,
        }
    }
}

/// Returns the time of day of an instant. It is the same in every call, also after a change of the clock.
pub fn timestamp_of(at: Instant) -> Timestamp {
    static ANCHOR: LazyLock<(Instant, Timestamp)> = LazyLock::new(|| (Instant::now(), Timestamp::now()));
    let (anchor, time) = *ANCHOR;
    let shifted = match at.checked_duration_since(anchor) {
        Some(later) => time.checked_add(later),
        None => time.checked_sub(anchor.duration_since(at)),
    };
    // Only a time beyond the year 9999 cannot be computed.
    shifted.unwrap_or(time)
}

/// Status of the satellite.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct SatelliteStatus {
    /// Configured name.
    pub name: String,
    /// Version of the crate.
    pub version: String,
    /// Process id of the satellite.
    pub pid: u32,
    /// Seconds since the start.
    pub uptime_seconds: u64,
    /// Time of the start, in RFC 3339.
    pub started_at: String,
    /// Number of this satellite process below its keeper: 1, and one more after each crash.
    #[serde(default)]
    pub generation: u32,
    /// Reason of the crash of the satellite process before this one; `None` for the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_crash: Option<String>,
    /// Path of the data directory.
    pub data_dir: String,
    /// Mechanism that contains the process trees of the servers.
    pub held_by: String,
    /// Memory of the machine; `None` before the first reading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryReport>,
    /// Counters of the event batcher.
    pub events: EventStatus,
    /// State of the journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal: Option<JournalStatus>,
    /// State of event delivery; `None` if events are not delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<DeliveryStatus>,
    /// True while the satellite starts and its MCP endpoint is not open yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub endpoint_opening: bool,
    /// Part of the configuration of the MCP endpoint that is not in effect, with the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint_problem: Option<String>,
    /// State of the MCP endpoint; `None` if it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<EndpointStatus>,
    /// URL of the console and the HTTP API, without a path; `None` if it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_url: Option<String>,
    /// Part of the configuration of the console that is not in effect, with the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_problem: Option<String>,
    /// State of the backend link; `None` without a backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<BackendStatus>,
    /// Export of traces and metrics over OTLP; `None` if nothing is exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub telemetry: Option<TelemetryStatus>,
    /// Rejected content of the configuration files; `None` if their current content is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejected_configuration: Option<RejectedConfiguration>,
}

/// Export of traces and metrics over OTLP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TelemetryStatus {
    /// Export of spans; `None` if none are exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traces: Option<ExportStatus>,
    /// Export of histograms; `None` if none are exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<ExportStatus>,
    /// Spans that the receiver accepted.
    pub spans_exported: u64,
    /// Spans that were dropped, for any reason.
    pub spans_dropped: u64,
}

/// Export of one kind of telemetry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExportStatus {
    /// URL of the receiver, without credentials.
    pub endpoint: String,
    /// Time of the first of the failed exports in a row, in RFC 3339; `None` if the last export succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_since: Option<String>,
    /// Reason why the last export failed; `None` if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// Configuration files that were rejected. The previous configuration stays in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RejectedConfiguration {
    /// Time at which the rejected files were first read, in RFC 3339.
    pub since: String,
    /// List of errors, with places and hints.
    pub errors: String,
}

impl fmt::Display for RejectedConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, errors } = self;
        write!(f, "configuration rejected since {since}, the previous one stays in use: {errors}")
    }
}

/// The response to a request to end the satellite.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct ShutdownReply {
    /// Process id of the satellite.
    pub pid: u32,
}

/// Memory of the machine, or of the cgroup that limits the satellite, and its effect on starts.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct MemoryReport {
    /// True if memory is short: processes are then started one by one, and the longest-idle servers are put to sleep.
    pub short: bool,
    /// Number of processes that wait for their start.
    pub starts_waiting: usize,
    /// Percentage of the last ten seconds in which some task waited for memory; `null` if the kernel does not report
    /// it.
    pub pressure_percent: Option<f64>,
    /// Available memory in bytes.
    pub available_bytes: u64,
    /// Total memory in bytes.
    pub total_bytes: u64,
}

impl MemoryReport {
    /// Converts the last reading; returns `None` if there is none.
    pub fn from_status(status: MemoryStatus) -> Option<Self> {
        let reading = status.reading?;
        Some(Self {
            short: status.is_short,
            starts_waiting: status.starts_waiting,
            pressure_percent: reading.pressure_percent,
            available_bytes: reading.available_bytes,
            total_bytes: reading.total_bytes,
        })
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (available, total) = (self.available_bytes as f64 / 1e6, self.total_bytes as f64 / 1e6);
        write!(f, "memory: {available:.0} of {total:.0} MB available")?;
        if let Some(percent) = self.pressure_percent {
            write!(f, ", pressure {percent:.0} %")?;
        }
        if self.short {
            let starts = if self.starts_waiting == 1 { "start waits" } else { "starts wait" };
            write!(
                f,
                "; memory is short: {} {starts}, the longest-idle servers are put to sleep",
                self.starts_waiting
            )?;
        }
        Ok(())
    }
}

/// Selects the user in a request for access to the MCP endpoint.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct EndpointAccessQuery {
    /// `TEAM/USER` or `USER`, ids or slugs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Access to the MCP endpoint for a client on this machine. `Debug` is not implemented, because it contains a token.
#[derive(Serialize, Deserialize, JsonSchema)]
pub struct EndpointAccess {
    /// Address to connect to.
    pub address: SocketAddr,
    /// Value of the `Host` header.
    pub host: String,
    /// Bearer token, valid until the satellite ends; `None` without authentication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// PEM file with the certificate; `None` for plain HTTP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
}

/// Status of the MCP endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EndpointStatus {
    /// URL for clients. In addition, each instance has its own path `/i/{instance}/mcp`.
    pub url: String,
    /// Authentication: `bearer` or `none`. With `none`, every process of this machine has access.
    pub auth: String,
    /// Path of the file with the token that the satellite created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<String>,
    /// Number of sessions, including those that clients left without ending them.
    pub sessions: usize,
    /// Number of connected clients: sessions and stateless clients with an open request or stream, now or in the last
    /// 60 s.
    #[serde(default)]
    pub clients: usize,
}

impl fmt::Display for EndpointStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MCP: {}", self.url)?;
        match (&self.token_file, self.auth.as_str()) {
            (Some(file), _) => write!(f, "  token in {file}"),
            (None, "none") => f.write_str("  without authentication: open to every process on this machine"),
            (None, _) => Ok(()),
        }
    }
}

/// Counters of the event batcher.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[expect(missing_docs, reason = "the batcher's statistics, by name")]
pub struct EventStatus {
    pub queue_size: usize,
    pub emitted: u64,
    pub sent: u64,
    pub failed: u64,
    pub dropped: u64,
    pub last_sent: Option<String>,
    pub last_error: Option<String>,
    pub state: String,
}

impl From<outbox::OutboxStatistics> for EventStatus {
    fn from(now: outbox::OutboxStatistics) -> Self {
        let state = match now.state {
            outbox::BatcherState::Idle => "idle",
            outbox::BatcherState::Sending => "sending",
            outbox::BatcherState::Retrying => "retrying",
            outbox::BatcherState::BackingOff => "backing_off",
        };
        Self {
            queue_size: now.queue_size,
            emitted: now.emitted,
            sent: now.sent,
            failed: now.failed,
            dropped: now.dropped,
            last_sent: now.last_sent.map(rfc3339),
            last_error: now.last_error,
            state: state.to_owned(),
        }
    }
}

/// The response to a status request.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct StatusReply {
    /// Status of the satellite.
    pub satellite: SatelliteStatus,
    /// Status of each instance, ordered by team, server and user.
    pub instances: Vec<InstanceStatus>,
}

/// A tool in a list.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct ToolEntry {
    /// Full name of the instance.
    pub instance: String,
    /// Server slug.
    pub server: String,
    /// Team slug.
    pub team: String,
    /// User slug.
    pub user: String,
    /// Path of the tool, as `server:tool`.
    pub tool_path: String,
    /// Estimated number of tokens in a model's context.
    pub tokens: usize,
    /// Complete tool definition, as the server sent it.
    #[schemars(with = "serde_json::Value")]
    pub tool: Box<RawValue>,
}

impl ToolEntry {
    /// Returns the tools that an instance offers.
    pub fn all_of(view: &InstanceView) -> Vec<Self> {
        let spec = &view.spec;
        let tools = view.offered_catalogue().into_iter().flat_map(|catalogue| &catalogue.tools);
        let entry = |tool: &Tool| Self {
            instance: spec.name.to_string(),
            server: spec.server.to_string(),
            team: spec.team_slug.to_string(),
            user: spec.user_slug.to_string(),
            tool_path: format!("{}:{}", spec.server, tool.name),
            tokens: tool.tokens,
            tool: tool.raw.clone(),
        };
        tools.map(entry).collect()
    }
}

/// Filter for lists of instances.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct ConsoleFilter {
    /// Only this team (id or slug).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
    /// Only this user (id or slug).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

impl ConsoleFilter {
    /// Returns true if the instance passes the filter.
    pub fn matches(&self, spec: &InstanceSpec) -> bool {
        let id = &spec.id;
        let is = |wanted: &Option<String>, id: &str, slug: &str| {
            wanted.as_ref().is_none_or(|wanted| wanted == id || wanted == slug)
        };
        is(&self.team, id.team.as_str(), spec.team_slug.as_str())
            && is(&self.user, id.user.as_str(), spec.user_slug.as_str())
    }
}

/// Response header of an event query: some events are not in the response because the disk does not accept them now.
pub const NOT_ALL_STORED: &str = "x-not-all-stored";

/// Query for events. All given conditions must hold.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct EventQuery {
    /// Only events after this number (exclusive).
    #[serde(default)]
    pub since: Option<u64>,
    /// True to keep the stream open for new events, until the reader disconnects or the satellite ends.
    #[serde(default)]
    pub follow: bool,
    /// Only these event types, by their wire names, separated by commas.
    #[serde(default)]
    pub types: Option<String>,
    /// Only this team (id or slug).
    #[serde(default)]
    pub team: Option<String>,
    /// Only the instance with this full name.
    #[serde(default)]
    pub instance: Option<String>,
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
