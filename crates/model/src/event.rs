//! Events that the satellite emits: one enum, named in the past tense. A snapshot test pins the JSON of each event and
//! reads it back.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::VariantNames;

use super::catalogue::CatalogueAspect;
use super::ids::{InstallationId, Slug, TeamId, UserId};
use super::json_text::JsonText;
use super::remedy::Remedy;
use super::spec::InstanceSpec;
use super::status::Status;

/// An event as it is stored and sent: `{seq, timestamp, type, data}`. `seq` counts up by one, also across restarts of
/// the satellite, so that a reader can see a gap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Envelope {
    /// Given by the batcher on receipt.
    pub seq: u64,
    /// Time of the event: RFC 3339, milliseconds, UTC.
    #[serde(with = "rfc3339")]
    #[cfg_attr(feature = "schemas", schemars(with = "String", extend("format" = "date-time")))]
    pub timestamp: Timestamp,
    /// Members `type` and `data`.
    #[serde(flatten)]
    pub event: Event,
}

/// Timestamps in RFC 3339 with exactly three digits of a second, the format of all timestamps of the satellite.
pub mod rfc3339 {
    use jiff::Timestamp;
    use serde::de::{Error as _, Unexpected};
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes a timestamp such as `2026-11-21T06:33:00.000Z`.
    pub fn serialize<S: Serializer>(timestamp: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
        match format_recent(timestamp) {
            Some(text) => serializer.serialize_str(std::str::from_utf8(&text).unwrap_or_default()),
            None => serializer.collect_str(&format_args!("{timestamp:.3}")),
        }
    }

    /// Formats a timestamp from 1970 on; `None` for earlier ones. Each call writes several timestamps, and the formatter
    /// of jiff takes most of that time.
    pub(super) fn format_recent(timestamp: &Timestamp) -> Option<[u8; 24]> {
        const DAY: u64 = 86_400_000;
        let milliseconds = u64::try_from(timestamp.as_millisecond()).ok()?;
        let (days, time) = (milliseconds / DAY, milliseconds % DAY);
        // The algorithm `civil_from_days` of Howard Hinnant: years begin in March, eras have 400 years.
        let shifted = days + 719_468;
        let (era, day) = (shifted / 146_097, shifted % 146_097);
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = year + era * 400 + u64::from(month <= 2);
        let mut text = *b"0000-00-00T00:00:00.000Z";
        let second = time / 1_000;
        for (end, digits, value) in [
            (4, 4, year),
            (7, 2, month),
            (10, 2, day),
            (13, 2, second / 3_600),
            (16, 2, second / 60 % 60),
            (19, 2, second % 60),
            (23, 3, time % 1_000),
        ] {
            let mut rest = value;
            for digit in text[end - digits..end].iter_mut().rev() {
                *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
                rest /= 10;
            }
        }
        Some(text)
    }

    /// Reads any RFC 3339 timestamp.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        parse(&text).ok_or_else(|| D::Error::invalid_value(Unexpected::Str(&text), &EXPECTED))
    }

    /// Description of the form for errors.
    pub const EXPECTED: &str = "an RFC 3339 timestamp such as 2026-11-21T06:33:00Z";

    /// Returns `None` if the text is no RFC 3339 timestamp.
    pub fn parse(text: &str) -> Option<Timestamp> {
        // jiff also reads other forms of ISO 8601, and names of time zones.
        let (date_time, rest) = text.split_at_checked(19)?;
        let offset = match rest.strip_prefix('.') {
            Some(rest) if rest.starts_with(|digit: char| digit.is_ascii_digit()) => {
                rest.trim_start_matches(|digit: char| digit.is_ascii_digit())
            }
            Some(_) => return None,
            None => rest,
        };
        let is_offset = has_shape(offset, "Z") || (has_shape(offset, "+00:00") && &offset[1..3] < "24");
        (has_shape(date_time, "0000-00-00T00:00:00") && is_offset).then(|| text.parse().ok())?
    }

    // In `shape`, `0` stands for a digit, `+` for a sign, and letters for both cases.
    fn has_shape(text: &str, shape: &str) -> bool {
        let fits = |(byte, shape): (u8, u8)| match shape {
            b'0' => byte.is_ascii_digit(),
            b'+' => matches!(byte, b'+' | b'-'),
            _ => byte.eq_ignore_ascii_case(&shape),
        };
        text.len() == shape.len() && text.bytes().zip(shape.bytes()).all(fits)
    }
}

/// Instance that an event is about. Part of every instance event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct EventSubject {
    /// Installed server.
    pub installation_id: InstallationId,
    /// The team.
    pub team_id: TeamId,
    /// The user.
    pub user_id: UserId,
    /// Name of the instance.
    pub process_id: Arc<str>,
    /// The server's name for people.
    pub server_slug: Slug,
}

impl From<&InstanceSpec> for EventSubject {
    fn from(spec: &InstanceSpec) -> Self {
        Self {
            installation_id: spec.id.installation.clone(),
            team_id: spec.id.team.clone(),
            user_id: spec.id.user.clone(),
            process_id: spec.name.clone(),
            server_slug: spec.server.clone(),
        }
    }
}

/// Reasons why a process was stopped on request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StopKind {
    /// A person requested a stop or a restart.
    Manual,
    /// The installation is gone.
    Uninstall,
    /// The configuration changed.
    Config,
    /// The satellite is ending.
    Shutdown,
}

/// Reasons why a process was started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RestartReason {
    /// The process crashed.
    Crash,
    /// The process exited with code 0 without a request.
    Exit,
    /// The process was alive and did not answer.
    Unresponsive,
    /// A person requested it.
    Manual,
    /// The configuration changed.
    Config,
    /// The session of a server that an earlier satellite started could not be continued.
    Adoption,
}

/// Line of a server's log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct LogLine {
    /// `debug`, `info`, `warn` or `error`.
    pub level: LogLevel,
    /// The line, with the instance's secrets masked.
    pub message: String,
    /// `source`: `stderr`, `stdout` (lines that are not JSON) or `satellite` (the reason why the server did not start).
    pub metadata: Value,
    /// Time at which the line was read.
    #[serde(with = "rfc3339")]
    #[cfg_attr(feature = "schemas", schemars(with = "String", extend("format" = "date-time")))]
    pub timestamp: Timestamp,
}

/// Severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    /// Level `debug`.
    Debug,
    /// The default for stderr.
    Info,
    /// A line with "warn".
    Warn,
    /// A line with "error".
    Error,
}

impl LogLevel {
    /// Returns the level inferred from a stderr line: "error" → error, "warn" → warn, else info.
    pub fn infer(line: &str) -> Self {
        let has =
            |word: &str| line.as_bytes().windows(word.len()).any(|part| part.eq_ignore_ascii_case(word.as_bytes()));
        if has("error") {
            Self::Error
        } else if has("warn") {
            Self::Warn
        } else {
            Self::Info
        }
    }
}

/// A logged request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct RequestLine {
    /// Name of the tool.
    pub tool_name: String,
    /// Arguments of the call.
    #[cfg_attr(feature = "schemas", schemars(with = "Value"))]
    pub tool_params: JsonText,
    /// Result of the call.
    #[cfg_attr(feature = "schemas", schemars(with = "Value"))]
    pub tool_response: JsonText,
    /// Milliseconds from the request to the answer.
    pub response_time_ms: u64,
    /// True if the call was answered without an error.
    pub success: bool,
    /// Error of the call.
    pub error_message: Option<String>,
    /// Reason for a failure: `tool_error`, `server_error`, `cancelled`, `not_sent`, `maybe_executed` or `timed_out`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fate: Option<String>,
    /// Name that the client gave itself; none for a call of the control socket or the HTTP API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Time of the request.
    #[serde(with = "rfc3339")]
    #[cfg_attr(feature = "schemas", schemars(with = "String", extend("format" = "date-time")))]
    pub timestamp: Timestamp,
}

/// Results of a change that somebody requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ActionOutcome {
    /// The change was carried out.
    Succeeded,
    /// The change was not permitted, or the request was invalid.
    Refused,
    /// The change was permitted and could not be carried out.
    Failed,
}

/// Whoever requested a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct ActionActor {
    /// `owner` (control socket or owner's token), `token`, `user`, `anonymous` (no authentication), or `unknown`.
    pub kind: String,
    /// Name of the token, or `TEAM/USER`.
    pub name: Option<String>,
    /// `viewer`, `operator` or `admin`; none without a role.
    pub role: Option<String>,
    /// `socket`, `http`, `console` or `mcp`.
    pub via: String,
    /// IP address of the client; none for the control socket.
    pub address: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Events that the satellite emits. The host emits the events of clients and configuration reloads. Durations are in
/// the unit that ends the name of the field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, strum::IntoStaticStr, VariantNames)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(tag = "type", content = "data")]
#[expect(missing_docs, reason = "fields and types are those of the specification's table of events, by name")]
pub enum Event {
    #[serde(rename = "mcp.server.status_changed")]
    #[strum(serialize = "mcp.server.status_changed")]
    StatusChanged {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        status: Status,
        status_message: Option<String>,
        /// Next step, if waiting does not help.
        #[serde(default)]
        remedy: Option<Remedy>,
    },
    #[serde(rename = "mcp.server.started")]
    #[strum(serialize = "mcp.server.started")]
    Started {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        pid: Option<u32>,
        transport: String,
        tool_count: usize,
        spawn_duration_ms: u64,
    },
    #[serde(rename = "mcp.server.stopped")]
    #[strum(serialize = "mcp.server.stopped")]
    Stopped {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        kind: StopKind,
        exit_code: Option<i32>,
        signal: Option<i32>,
        forced: bool,
        /// With `uninstall`: true if the instance had a process or a connection, or one was starting.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        active: Option<bool>,
        /// With `uninstall`: true if the instance was asleep.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dormant: Option<bool>,
    },
    #[serde(rename = "mcp.server.exited")]
    #[strum(serialize = "mcp.server.exited")]
    Exited {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        exit_code: Option<i32>,
        signal: Option<i32>,
        forced: bool,
        uptime_seconds: u64,
        will_restart: bool,
    },
    #[serde(rename = "mcp.server.crashed")]
    #[strum(serialize = "mcp.server.crashed")]
    Crashed {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        reason: String,
        exit_code: Option<i32>,
        signal: Option<i32>,
        uptime_seconds: u64,
        crash_count: usize,
        will_restart: bool,
    },
    #[serde(rename = "mcp.server.restarted")]
    #[strum(serialize = "mcp.server.restarted")]
    Restarted {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        old_pid: Option<u32>,
        new_pid: Option<u32>,
        restart_reason: RestartReason,
        attempt_number: usize,
    },
    #[serde(rename = "mcp.server.permanently_failed")]
    #[strum(serialize = "mcp.server.permanently_failed")]
    PermanentlyFailed {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        total_crashes: usize,
        last_error: String,
        message: String,
        /// Next step, if waiting does not help.
        #[serde(default)]
        remedy: Option<Remedy>,
        #[serde(with = "rfc3339")]
        #[cfg_attr(feature = "schemas", schemars(with = "String", extend("format" = "date-time")))]
        failed_at: Timestamp,
    },
    #[serde(rename = "mcp.server.dormant")]
    #[strum(serialize = "mcp.server.dormant")]
    Dormant {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        pid: Option<u32>,
        idle_duration_seconds: u64,
        #[serde(with = "rfc3339")]
        #[cfg_attr(feature = "schemas", schemars(with = "String", extend("format" = "date-time")))]
        last_activity_at: Timestamp,
    },
    #[serde(rename = "mcp.server.respawned")]
    #[strum(serialize = "mcp.server.respawned")]
    Respawned {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        pid: Option<u32>,
        dormant_duration_seconds: u64,
        respawn_duration_ms: u64,
    },
    /// The server of an earlier satellite runs on, and its session continues.
    #[serde(rename = "mcp.server.adopted")]
    #[strum(serialize = "mcp.server.adopted")]
    Adopted {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        pid: Option<u32>,
        tool_count: usize,
        uptime_seconds: u64,
        adoption_duration_ms: u64,
    },
    #[serde(rename = "mcp.server.disconnected")]
    #[strum(serialize = "mcp.server.disconnected")]
    Disconnected {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        was_intentional: bool,
    },
    #[serde(rename = "mcp.server.reconnecting")]
    #[strum(serialize = "mcp.server.reconnecting")]
    Reconnecting {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        attempt: u32,
        next_retry_ms: u64,
    },
    #[serde(rename = "mcp.server.reconnected")]
    #[strum(serialize = "mcp.server.reconnected")]
    Reconnected {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        capabilities: Value,
        attempts_taken: u32,
        /// Parts of the catalogue that have changed.
        #[serde(default)]
        changed: Vec<CatalogueAspect>,
    },
    #[serde(rename = "mcp.server.health_degraded")]
    #[strum(serialize = "mcp.server.health_degraded")]
    HealthDegraded {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        consecutive_failures: u32,
        last_error: String,
    },
    #[serde(rename = "mcp.server.health_restored")]
    #[strum(serialize = "mcp.server.health_restored")]
    HealthRestored {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        consecutive_failures: u32,
        last_error: Option<String>,
    },
    #[serde(rename = "mcp.server.logs")]
    #[strum(serialize = "mcp.server.logs")]
    ServerLogs {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        logs: Vec<LogLine>,
    },
    #[serde(rename = "mcp.request.logs")]
    #[strum(serialize = "mcp.request.logs")]
    RequestLogs {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        requests: Vec<RequestLine>,
    },
    #[serde(rename = "mcp.tool.executed")]
    #[strum(serialize = "mcp.tool.executed")]
    ToolExecuted {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        tool_name: String,
        duration_ms: u64,
        success: bool,
        error_message: Option<String>,
    },
    #[serde(rename = "mcp.tools.discovered")]
    #[strum(serialize = "mcp.tools.discovered")]
    ToolsDiscovered {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        tool_count: usize,
        total_tokens: usize,
        tools: Vec<String>,
    },
    #[serde(rename = "mcp.tools.updated")]
    #[strum(serialize = "mcp.tools.updated")]
    ToolsUpdated {
        #[serde(flatten)]
        of: Arc<EventSubject>,
        added_tools: Vec<String>,
        removed_tools: Vec<String>,
        total_tools: usize,
    },
    #[serde(rename = "mcp.client.connected")]
    #[strum(serialize = "mcp.client.connected")]
    ClientConnected {
        team_id: TeamId,
        user_id: UserId,
        session_id: String,
        client_type: String,
        user_agent: Option<String>,
        transport: String,
    },
    #[serde(rename = "mcp.client.disconnected")]
    #[strum(serialize = "mcp.client.disconnected")]
    ClientDisconnected {
        team_id: TeamId,
        user_id: UserId,
        session_id: String,
        duration: u64,
        tool_execution_count: u64,
        reason: String,
    },
    /// The team exceeded its budget of unwanted exits: its processes start one at a time until the window holds fewer
    /// exits.
    #[serde(rename = "mcp.team.throttled")]
    #[strum(serialize = "mcp.team.throttled")]
    TeamThrottled { team_id: TeamId, exits_in_window: usize, window_seconds: u64 },
    /// The processes of the team start without the limit again.
    #[serde(rename = "mcp.team.unthrottled")]
    #[strum(serialize = "mcp.team.unthrottled")]
    TeamUnthrottled { team_id: TeamId, exits_in_window: usize, window_seconds: u64 },
    #[serde(rename = "config.refreshed")]
    #[strum(serialize = "config.refreshed")]
    ConfigRefreshed {
        config_hash: String,
        server_count: usize,
        teams_count: usize,
        change_detected: bool,
        fetch_duration_ms: u64,
    },
    #[serde(rename = "config.error")]
    #[strum(serialize = "config.error")]
    ConfigError { error_type: String, error_message: String, status_code: Option<u16>, retry_in: Option<u64> },
    /// Somebody requested a change, or data of another user, through the control socket, the HTTP API, the console or
    /// MCP.
    #[serde(rename = "control.action")]
    #[strum(serialize = "control.action")]
    ControlAction {
        /// Name of the action, such as `restart`.
        action: String,
        outcome: ActionOutcome,
        actor: ActionActor,
        /// The instance; none if the action is about the whole satellite, or the instance was not found.
        target: Option<Arc<EventSubject>>,
        /// Reason for a refusal or failure.
        reason: Option<String>,
        /// Names of the values that were to be changed, never the values.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        keys: Vec<String>,
        /// Number of equal refusals before this one that have no event of their own: there is at most one per second.
        #[serde(default, skip_serializing_if = "is_zero")]
        repeated: u64,
    },
    /// The satellite is ready again after a crash, below the same keeper.
    #[serde(rename = "satellite.recovered")]
    #[strum(serialize = "satellite.recovered")]
    SatelliteRecovered {
        /// Number of the satellite below its keeper; the first one is 1.
        generation: u32,
        /// Reason of the end of the one before it.
        reason: String,
        /// Milliseconds without a satellite.
        down_ms: u64,
        /// Number of running servers that it adopted.
        #[serde(default)]
        adopted: usize,
        /// Number of running servers that it ended instead.
        #[serde(default)]
        ended: usize,
    },
    /// The queue exceeded its limit: the events from `from_seq` to `to_seq`, both included, were dropped.
    #[serde(rename = "events.dropped")]
    #[strum(serialize = "events.dropped")]
    EventsDropped { from_seq: u64, to_seq: u64 },
}

impl Event {
    /// Names of all events on the wire.
    pub const KINDS: &[&'static str] = Self::VARIANTS;

    /// Returns the instance that the event is about.
    pub fn subject(&self) -> Option<&EventSubject> {
        match self {
            Self::StatusChanged { of, .. }
            | Self::Started { of, .. }
            | Self::Stopped { of, .. }
            | Self::Exited { of, .. }
            | Self::Crashed { of, .. }
            | Self::Restarted { of, .. }
            | Self::PermanentlyFailed { of, .. }
            | Self::Dormant { of, .. }
            | Self::Respawned { of, .. }
            | Self::Adopted { of, .. }
            | Self::Disconnected { of, .. }
            | Self::Reconnecting { of, .. }
            | Self::Reconnected { of, .. }
            | Self::HealthDegraded { of, .. }
            | Self::HealthRestored { of, .. }
            | Self::ServerLogs { of, .. }
            | Self::RequestLogs { of, .. }
            | Self::ToolExecuted { of, .. }
            | Self::ToolsDiscovered { of, .. }
            | Self::ToolsUpdated { of, .. } => Some(of),
            Self::ControlAction { target, .. } => target.as_deref(),
            Self::ClientConnected { .. }
            | Self::ClientDisconnected { .. }
            | Self::TeamThrottled { .. }
            | Self::TeamUnthrottled { .. }
            | Self::ConfigRefreshed { .. }
            | Self::ConfigError { .. }
            | Self::SatelliteRecovered { .. }
            | Self::EventsDropped { .. } => None,
        }
    }

    /// Returns the name used on the wire.
    pub fn kind(&self) -> &'static str {
        self.into()
    }
}

/// Formats a time in RFC 3339 with milliseconds.
pub fn rfc3339(at: Timestamp) -> String {
    format!("{at:.3}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::rfc3339::format_recent;
    use super::*;

    fn assert_same(milliseconds: i64) {
        let at = Timestamp::from_millisecond(milliseconds).unwrap();
        assert_eq!(std::str::from_utf8(&format_recent(&at).unwrap()).unwrap(), rfc3339(at));
    }

    proptest! {
        #[test]
        fn timestamps_are_formatted_as_by_jiff(milliseconds in 0..Timestamp::MAX.as_millisecond()) {
            assert_same(milliseconds);
        }
    }

    #[test]
    fn every_day_of_four_centuries_is_formatted() {
        assert_eq!(format_recent(&Timestamp::from_millisecond(-1).unwrap()), None);
        assert_eq!(format_recent(&Timestamp::MAX).unwrap(), *b"9999-12-30T22:00:00.999Z");
        (0..146_097).for_each(|day| assert_same(day * 86_400_000 + day));
    }
}
