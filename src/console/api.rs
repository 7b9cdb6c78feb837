//! What is said over the control socket. Names, fields and exit codes are stable: scripts build on them.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::exit::{CallError, Fate};
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::remote::{Connection, Health};
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::memory::MemoryStatus;
use mcp_satellite_actors::rules::outbox;
use mcp_satellite_actors::rules::slot::Want;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::connect::process::Usage;
use crate::delivery::DeliveryStatus;
use crate::journal::JournalStatus;
use crate::oauth::is_safe_in_a_command;
use crate::remedy::next_step;

/// Which instance is meant: a server's slug where that is unique, else the full name.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selector {
    /// Slug or full name.
    pub server: String,
    /// Only instances of this team (id or slug).
    #[serde(default)]
    pub team: Option<String>,
    /// Only instances of this user (id or slug).
    #[serde(default)]
    pub user: Option<String>,
}

/// A tool call.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallRequest {
    /// Of which instance.
    pub selector: Selector,
    /// The tool, by the name that its server gives it.
    pub tool: String,
    /// A JSON object.
    #[serde(default)]
    pub arguments: Option<Box<RawValue>>,
    /// Over all, in milliseconds.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}

/// Why something was not done. What does not apply is left out.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Failure {
    /// A stable word: `not_found`, `ambiguous`, `refused`, `superseded`, `closing`, `terminated`, `timed_out`,
    /// `reconnecting`, `remote`, `busy`, `server_error`, `bad_input`, `storage`, `authorization`.
    pub kind: String,
    /// What failed, and the cause.
    pub message: String,
    /// The next step, by name; none if there is nothing to do but try again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<Remedy>,
    /// The next step as a command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// What became of a call that was not answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fate: Option<Fate>,
    /// The instance's status, where that is the reason; `reconnecting` if an attempt to reach its server has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// The server's JSON-RPC error code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i64>,
    /// The server's JSON-RPC error data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<serde_json::Value>,
    /// When the attempt that was made for this call was over: RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_attempt: Option<String>,
    /// When there will be another one by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_retry_ms: Option<u64>,
    /// Why the attempt failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// What a remote server answered in place of a result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_status: Option<u16>,
    /// When it wants to be asked again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The OAuth scopes that the request needs and the authorization lacks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scopes: Vec<String>,
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        let mut failure =
            Self { kind: error.kind().to_owned(), message: error.to_string(), fate: error.fate(), ..Self::default() };
        match error {
            CallError::Refused { status, remedy, .. } => {
                failure.status = Some(status.to_string());
                failure.remedy = remedy;
            }
            CallError::Reconnecting { last_attempt, next_retry_ms, last_error } => {
                failure.status = Some(Connection::Reconnecting.to_string());
                failure.last_attempt = Some(rfc3339(last_attempt));
                failure.next_retry_ms = next_retry_ms;
                failure.last_error = Some(last_error);
            }
            CallError::Remote { failure: why, .. } => {
                failure.http_status = http_status(&why.kind);
                failure.retry_after_ms = retry_after(&why.kind).map(milliseconds);
                if let FailureKind::InsufficientScope { scopes } = &why.kind {
                    failure.remedy = Some(Remedy::Authorize);
                    failure.scopes =
                        scopes.split(' ').filter(|scope| is_safe_in_a_command(scope)).map(str::to_owned).collect();
                }
            }
            CallError::Server { code, data, .. } => {
                failure.code = Some(code);
                failure.data = data.and_then(|data| serde_json::from_str(&data).ok());
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

impl Failure {
    /// A failure without a call's particulars.
    pub fn new(kind: &str, message: impl Into<String>) -> Self {
        Self { kind: kind.to_owned(), message: message.into(), ..Self::default() }
    }

    /// The same, with the next step for this instance as a command.
    #[must_use]
    pub fn of(mut self, spec: &InstanceSpec) -> Self {
        self.next_step = self.remedy.map(|remedy| match &self.scopes[..] {
            [] => next_step(remedy, spec),
            scopes => format!("`satellite auth {} --scope {}`", spec.name, scopes.join(" --scope ")),
        });
        self
    }
}

/// The status of the HTTP answer, where there was one.
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
        | FailureKind::Unserved
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

/// What came of a connection that was made anew on request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Reconnected {
    /// Full name of the instance.
    pub instance: String,
    /// Whether it takes calls now.
    pub success: bool,
    /// What it has come to.
    pub status: Status,
    /// And why.
    pub status_message: Option<String>,
    /// The next step as a command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
    /// The reason why the command is not stored; see [`Controlled::not_durable`].
    #[serde(default)]
    pub not_durable: Option<String>,
}

/// A request to read the configuration again.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReloadQuery {
    /// Whether a configuration is meant that removes more than half of the servers.
    #[serde(default)]
    pub accept: bool,
}

/// The configuration that was taken on.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Reloaded {
    /// Servers, each counted once for each of its users.
    pub servers: usize,
    /// Teams.
    pub teams: usize,
}

/// The result of `prune`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Pruned {
    /// The instances whose data was erased, as TEAM/USER/INSTALLATION by their ids.
    pub instances: Vec<String>,
}

/// What the user of an instance gives, or takes back. It holds secrets, and so it has no `Debug`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigureRequest {
    /// Of which instance.
    pub selector: Selector,
    /// By key.
    #[serde(default)]
    pub set: BTreeMap<String, String>,
    /// Keys whose values are taken back.
    #[serde(default)]
    pub unset: Vec<String>,
}

/// What is asked of the user of an instance. Values are never told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Configured {
    /// What it has come to.
    pub instance: InstanceStatus,
    /// By key.
    pub required: Vec<Required>,
    /// The reason why the change is not stored; see [`Controlled::not_durable`].
    #[serde(default)]
    pub not_durable: Option<String>,
}

/// One value that a user must give.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Required {
    /// Its name.
    pub key: String,
    /// Where it comes from; `null` if it is missing.
    pub given_by: Option<GivenBy>,
}

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GivenBy {
    /// `satellite configure`.
    Configure,
    /// The user's tier of the configuration.
    File,
}

/// How an instance is to be authorized.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuthRequest {
    /// Which instance.
    pub selector: Selector,
    /// Where the browser is sent back to.
    pub redirect_uri: String,
    /// By a code that is typed on another device.
    #[serde(default)]
    pub device: bool,
    /// What to ask for; else what is configured, or what its server says.
    #[serde(default)]
    pub scopes: Vec<String>,
}

/// Where a person is to go.
#[derive(Debug, Serialize, Deserialize)]
pub struct AuthBegun {
    /// Full name of what is authorized.
    pub instance: String,
    /// The number under which it is finished; nothing if it was granted to the satellite itself.
    pub flow: Option<u64>,
    /// The page to open.
    pub page: Option<String>,
    /// The same with the code in it.
    pub page_with_code: Option<String>,
    /// The code to type there.
    pub user_code: Option<String>,
    /// How long there is time for it.
    pub expires_in_seconds: Option<u64>,
}

/// What a person comes back with: an address, the code in it, or nothing where a device does the rest. It holds a secret,
/// and so it has no `Debug`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuthFinish {
    /// What was begun.
    pub flow: u64,
    /// The whole address that the browser was sent back to.
    #[serde(default)]
    pub redirect: Option<String>,
    /// The code in it.
    #[serde(default)]
    pub code: Option<String>,
}

/// What became of an authorization that was given up.
#[derive(Debug, Serialize, Deserialize)]
pub struct AuthRevoked {
    /// Full name of whose it was.
    pub instance: String,
    /// Whether there was one.
    pub was_there: bool,
    /// Why its authorization server could not be told.
    pub not_told: Option<String>,
}

/// One instance in `status --json`. Durations are in the unit that the field's name ends with; `null` is "not known"
/// or "does not apply".
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct InstanceStatus {
    /// Full name.
    pub instance: String,
    /// What is installed.
    pub installation_id: String,
    /// Team slug.
    pub team: String,
    /// User slug.
    pub user: String,
    /// Server slug.
    pub server: String,
    /// `stdio`, `http` or `sse`.
    pub transport: String,
    /// One of the twelve.
    pub status: Status,
    /// And why.
    pub status_message: Option<String>,
    /// The next step, by name; none if there is nothing to do but wait.
    #[serde(default)]
    pub remedy: Option<Remedy>,
    /// The next step as a command.
    #[serde(default)]
    pub next_step: Option<String>,
    /// The time at which it entered this status: RFC 3339.
    #[serde(default)]
    pub since: String,
    /// `running` or `stopped`.
    pub want: Want,
    /// Asleep, or being woken.
    pub dormant: bool,
    /// Of a remote instance: `connecting`, `connected`, `reconnecting`, `disconnected` or `error`.
    pub connection: Option<Connection>,
    /// `unknown`, `healthy` or `degraded`.
    pub health: Health,
    /// When it was last asked whether it is there: RFC 3339.
    pub last_check_at: Option<String>,
    /// The server's process.
    pub pid: Option<u32>,
    /// The sandbox's process.
    pub wrapper_pid: Option<u32>,
    /// The sandbox that it runs in, or `none`.
    pub isolation: Option<String>,
    /// What holds it and all that it starts: `cgroup`, `pid_namespace` or `group`.
    pub held_by: Option<String>,
    /// `USER:GROUP` as whom it runs.
    pub identity: Option<String>,
    /// Started again, over all.
    pub restarts: u64,
    /// Unwanted exits that count now.
    pub exits_in_window: usize,
    /// While a delay runs: which attempt comes after it.
    pub attempt: Option<usize>,
    /// While a delay runs: how much of it is left.
    pub next_retry_ms: Option<u64>,
    /// Since the handshake of the current run.
    pub uptime_seconds: Option<u64>,
    /// Tools that are offered.
    pub tools: usize,
    /// Messages received.
    pub messages: u64,
    /// Calls made.
    pub calls: u64,
    /// Calls not answered yet.
    pub calls_in_flight: usize,
    /// Calls that failed.
    pub errors: u64,
    /// When the server last said something: RFC 3339.
    pub last_activity_at: Option<String>,
    /// The last failure; `null` once the instance is healthy again.
    pub last_error: Option<String>,
    /// How the last run ended.
    pub last_exit: Option<String>,
    /// Resident memory, of it and all that it started.
    pub rss_bytes: Option<u64>,
    /// Processor time, of it and all that it started.
    pub cpu_seconds: Option<f64>,
    /// The disk has not taken the process's row in the ledger yet: should the satellite and its reaper be killed, the next
    /// satellite would not find the process.
    #[serde(default)]
    pub unrecorded: bool,
}

/// The answer to `start`, `stop` and `restart`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Controlled {
    /// The instance after the command.
    #[serde(flatten)]
    pub instance: InstanceStatus,
    /// The reason why the command is not stored: it is carried out, and is forgotten if the satellite is killed before the
    /// disk takes it. `null` if it is stored.
    #[serde(default)]
    pub not_durable: Option<String>,
}

impl InstanceStatus {
    /// As it is at `now`.
    pub fn of(view: &InstanceView, usage: Option<Usage>, now: Instant) -> Self {
        let spec = &view.spec;
        let custody = view.custody.as_deref();
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
            want: view.want,
            dormant: view.dormant,
            connection: view.connection,
            health: view.health,
            last_check_at: view.counters.last_check().map(rfc3339),
            pid: view.pid,
            wrapper_pid: custody.and_then(|custody| custody.wrapper_pid),
            isolation: custody.map(|custody| custody.isolation.to_owned()),
            held_by: custody.map(|custody| custody.held_by.to_owned()),
            identity: custody.map(|custody| custody.identity.clone()),
            restarts: view.restarts,
            exits_in_window: view.exits_in_window(now),
            attempt: view.attempt,
            next_retry_ms: view.next_retry_at.map(|at| milliseconds(at.saturating_duration_since(now))),
            uptime_seconds: view.initialized_at.map(|at| now.saturating_duration_since(at).as_secs()),
            tools: view.offered().map_or(0, |catalogue| catalogue.tools.len()),
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

/// The satellite itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SatelliteStatus {
    /// Its configured name.
    pub name: String,
    /// The crate's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Since it started.
    pub uptime_seconds: u64,
    /// Where its data is.
    pub data_dir: String,
    /// What holds the trees of its servers together.
    pub held_by: String,
    /// The memory of the machine; nothing as long as it was not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryReport>,
    /// Events waiting, sent and lost.
    pub events: EventStatus,
    /// How events are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal: Option<JournalStatus>,
    /// Where they go from there; nothing if they stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<DeliveryStatus>,
    /// Where MCP clients come in; nothing if they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<EndpointStatus>,
    /// The backend; nothing if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<BackendStatus>,
    /// What the configuration files contain now and was rejected; nothing if they are in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejected_configuration: Option<RejectedConfiguration>,
}

/// Configuration files that were rejected. The configuration before them stays in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectedConfiguration {
    /// When they were read first: RFC 3339.
    pub since: String,
    /// Every error, with its place and a hint.
    pub errors: String,
}

/// One line, for people.
impl fmt::Display for RejectedConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, errors } = self;
        write!(f, "configuration rejected since {since}, the previous one stays in use: {errors}")
    }
}

/// The answer to a request to end the satellite.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ending {
    /// The satellite's process.
    pub pid: u32,
}

/// The memory of the machine, or of the control group that limits the satellite, and whether starts are delayed by it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Whether it is short: then processes are started one by one, and the longest-idle servers are put to sleep.
    pub short: bool,
    /// Processes that wait for their start.
    pub starts_waiting: usize,
    /// The share of the last ten seconds, in percent, in which some task waited for memory; null if the kernel does not
    /// tell.
    pub pressure_percent: Option<f64>,
    /// Bytes that can be used.
    pub available_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

impl MemoryReport {
    /// The last reading; none if there is none.
    pub fn of(status: MemoryStatus) -> Option<Self> {
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

/// One line, for people.
impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (available, total) = (self.available_bytes as f64 / 1e6, self.total_bytes as f64 / 1e6);
        write!(f, "memory: {available:.0} of {total:.0} MB available")?;
        if let Some(percent) = self.pressure_percent {
            write!(f, ", pressure {percent:.0} %")?;
        }
        if self.short {
            let starts = if self.starts_waiting == 1 { "start waits" } else { "starts wait" };
            write!(f, "; it is short: {} {starts}, the longest-idle servers are put to sleep", self.starts_waiting)?;
        }
        Ok(())
    }
}

/// The link to a backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendStatus {
    /// Whether it answered as it should when it was last asked.
    pub connected: bool,
    /// Where it is.
    pub url: String,
    /// What it calls this satellite; nothing as long as it is not registered.
    pub satellite_id: Option<String>,
    /// When it last answered anything: RFC 3339.
    pub last_contact: Option<String>,
    /// What is wrong now.
    pub last_error: Option<String>,
    /// How often it is asked for commands: `immediate`, `high`, `normal` or `idle`; or `registering`, or `backing_off`.
    pub mode: String,
    /// How long until it is asked again.
    pub next_poll_ms: Option<u64>,
    /// Commands that wait or are being carried out.
    pub commands: usize,
    /// Events that wait to be sent.
    pub backlog: u64,
    /// Of its configuration that is applied.
    pub config_hash: Option<String>,
}

/// One line, for people.
impl fmt::Display for BackendStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connected = if self.connected { "connected" } else { "not connected" };
        write!(f, "backend: {} {connected}", self.url)?;
        if let Some(id) = &self.satellite_id {
            write!(f, " as {id}")?;
        }
        write!(f, ", {}", self.mode)?;
        if let Some(next) = self.next_poll_ms {
            write!(f, ", asked again in {:.0} s", (next as f64 / 1000.0).ceil())?;
        }
        if let Some(last) = &self.last_contact {
            write!(f, ", last contact {last}")?;
        }
        write!(f, ", {} events to send", self.backlog)?;
        match &self.last_error {
            Some(error) => write!(f, "\n  {error}"),
            None => Ok(()),
        }
    }
}

/// The MCP endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointStatus {
    /// What clients are given; `/i/{instance}/mcp` is beside it.
    pub url: String,
    /// `bearer`, or `none`: then every process of this machine may come in.
    pub auth: String,
    /// The file that holds a token which the satellite has made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<String>,
    /// How many sessions there are, also of clients that left without ending theirs.
    pub sessions: usize,
    /// How many clients are connected: sessions, and clients without one, of which a request or a stream is open or was
    /// less than 60 s ago.
    #[serde(default)]
    pub clients: usize,
}

/// One line, for people.
impl fmt::Display for EndpointStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MCP: {}", self.url)?;
        match (&self.token_file, self.auth.as_str()) {
            (Some(file), _) => write!(f, "  token in {file}"),
            (None, "none") => f.write_str("  without authentication: every process of this machine may come in"),
            (None, _) => Ok(()),
        }
    }
}

/// The event batcher's numbers.
#[derive(Debug, Clone, Serialize, Deserialize)]
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

impl From<outbox::Statistics> for EventStatus {
    fn from(now: outbox::Statistics) -> Self {
        let state = match now.state {
            outbox::State::Idle => "idle",
            outbox::State::Sending => "sending",
            outbox::State::Retrying => "retrying",
            outbox::State::BackingOff => "backing_off",
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

/// The answer to a status request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StatusReply {
    /// The satellite itself.
    pub satellite: SatelliteStatus,
    /// Its instances, by team, server and user.
    pub instances: Vec<InstanceStatus>,
}

/// One tool that is offered.
#[derive(Debug, Serialize, Deserialize)]
pub struct ToolEntry {
    /// Full name of the instance.
    pub instance: String,
    /// Server slug.
    pub server: String,
    /// Team slug.
    pub team: String,
    /// User slug.
    pub user: String,
    /// `server:tool`.
    pub tool_path: String,
    /// Estimated tokens in a model's context.
    pub tokens: usize,
    /// The whole definition as its server sent it.
    pub tool: Box<RawValue>,
}

/// Which instances, for lists.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Filter {
    /// Only this team (id or slug).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
    /// Only this user (id or slug).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

impl Filter {
    /// Whether an instance is meant.
    pub fn admits(&self, spec: &InstanceSpec) -> bool {
        let id = &spec.id;
        let is = |wanted: &Option<String>, id: &str, slug: &str| {
            wanted.as_ref().is_none_or(|wanted| wanted == id || wanted == slug)
        };
        is(&self.team, id.team.as_str(), spec.team_slug.as_str())
            && is(&self.user, id.user.as_str(), spec.user_slug.as_str())
    }
}

/// A header of the events that are stored: there are more, and the disk does not take them now.
pub const NOT_ALL_STORED: &str = "x-not-all-stored";

/// Which events: those after `since` for which everything that is given holds, and, with `follow`, those to come.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct EventQuery {
    /// Exclusive.
    #[serde(default)]
    pub since: Option<u64>,
    /// Goes on until the reader leaves or the satellite ends.
    #[serde(default)]
    pub follow: bool,
    /// Only these types, by their names on the wire, separated by commas.
    #[serde(default)]
    pub types: Option<String>,
    /// Only this team (id or slug).
    #[serde(default)]
    pub team: Option<String>,
    /// Only the instance of this full name.
    #[serde(default)]
    pub instance: Option<String>,
}

pub(crate) fn rfc3339(at: Timestamp) -> String {
    format!("{at:.3}")
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
