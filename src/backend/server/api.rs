//! What an administrator and the backend say to each other, below `/api/admin`, as the bearer of the admin token.
//!
//! ```text
//! POST   registration-tokens              TokenWanted → TokenMade
//! GET    config, satellites/{s}/config                → wire::Config      its own, else the one for all, else 404
//! PUT    config, satellites/{s}/config    ConfigWanted → ConfigKept
//! DELETE satellites/{s}/config                        → ConfigKept        the one for all again; 409 if there is none
//! GET    satellites                                   → Satellites
//! GET    satellites/{s}                               → Satellite         with its last heartbeat
//! DELETE satellites/{s}                               → wire::Received    its key ends, and all of it goes
//! POST   satellites/{s}/commands          CommandWanted → CommandState
//! GET    satellites/{s}/commands?limit                → CommandStates
//! GET    satellites/{s}/commands/{c}                  → CommandState
//! GET    events?after&satellite&since&type&limit      → StoredEvents
//! GET    instances?satellite&team&user                → Instances
//! GET    satellites/{s}/instances/{i}                 → Instance
//! GET    instances/stream?satellite&team&user&instance → server-sent events of Instance, Last-Event-ID
//! ```
//!
//! `{s}` is a satellite's id or name. The stream's events are `status`, `removed`, and `reset`, which has no instance: what
//! follows is everything there is, and what was known before is to be forgotten.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::backend::wire::{Command, CommandResult, Heartbeat, Priority, SystemInfo};

/// A registration token is asked for.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenWanted {
    /// How long it may wait to be used: a day by default, 30 days at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_592_000))]
    pub expires_in_seconds: Option<u64>,
    /// For people: what it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 200))]
    pub note: Option<String>,
    /// It lets in the satellite of this name and no other, also while one of that name is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 10, max = 32), regex(pattern = r"^[a-z0-9_-]+$"))]
    pub name: Option<String>,
}

/// A registration token, shown once.
#[derive(Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenMade {
    /// For one registration.
    pub token: String,
    /// It is worth nothing any more after this.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub expires_at: Timestamp,
}

impl fmt::Debug for TokenMade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenMade").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

/// A configuration without its hash, which is the backend's to say. Its members are those of [`Config`](crate::backend::wire::Config).
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigWanted {
    /// Templates: `[servers.SLUG]`.
    #[serde(default)]
    pub servers: BTreeMap<String, Map<String, Value>>,
    /// `[[teams]]`, with `users` and `installations`.
    #[serde(default)]
    pub teams: Vec<Map<String, Value>>,
}

/// It may hold credentials.
impl fmt::Debug for ConfigWanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (servers, teams) = (self.servers.len(), self.teams.len());
        f.debug_struct("ConfigWanted").field("servers", &servers).field("teams", &teams).finish()
    }
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigKept {
    /// Of what is to be run now.
    pub hash: String,
    /// Whether it is another than before.
    pub changed: bool,
    /// Who was told by a command, by id.
    pub told: Vec<String>,
}

/// All satellites.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Satellites {
    /// By name.
    pub satellites: Vec<Satellite>,
}

/// One satellite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Satellite {
    /// Its name in URLs.
    pub satellite_id: String,
    /// Its name for people.
    pub name: String,
    /// Of its program.
    pub version: String,
    /// The transports that it can reach servers by.
    pub capabilities: Vec<String>,
    /// What it runs on.
    pub system: SystemInfo,
    /// When it registered last.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub registered_at: Timestamp,
    /// Whether it was heard of within the last 90 s, and did not say goodbye.
    pub connected: bool,
    /// Its last request of any kind since the backend started; else its last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub last_contact: Option<Timestamp>,
    /// When its last heartbeat came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub last_heartbeat: Option<Timestamp>,
    /// Of the configuration that it is to run, once one was put.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<String>,
    /// Of the one that it runs, by its last heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied_config_hash: Option<String>,
    /// Commands that are given out or will be: without a result, and not expired before they were given out.
    pub commands_waiting: usize,
    /// Events that are stored.
    pub events: usize,
    /// The highest `seq` of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seq: Option<u64>,
    /// Instances of each status.
    pub instances: BTreeMap<String, usize>,
    /// The last one. Not in a list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<Heartbeat>,
}

/// A command is wanted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CommandWanted {
    /// Its id; one of the backend's by default. The same id again is the same command, and is not queued twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[A-Za-z0-9._-]+$"))]
    pub id: Option<String>,
    /// What to do: one of [`CommandType`](crate::backend::wire::CommandType). Others are passed on, for satellites that know more.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[a-z_]+$"))]
    pub command_type: String,
    /// How urgent it is.
    #[serde(default)]
    pub priority: Priority,
    /// With what.
    #[serde(default)]
    pub payload: Map<String, Value>,
    /// It means nothing any more after so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_592_000))]
    pub expires_in_seconds: Option<u64>,
    /// Or after this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub expires_at: Option<Timestamp>,
}

/// Commands of a satellite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CommandStates {
    /// The latest first.
    pub commands: Vec<CommandState>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CommandState {
    /// As the satellite gets it.
    #[serde(flatten)]
    pub command: Command,
    /// What has become of it.
    pub state: Stage,
    /// When it was queued.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub created_at: Timestamp,
    /// How often it was given out.
    pub times_sent: u64,
    /// When that was for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub first_sent_at: Option<Timestamp>,
    /// What came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<CommandResult>,
    /// When its result came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub finished_at: Option<Timestamp>,
}

/// See [`CommandState::state`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Nobody has asked for it yet.
    Queued,
    /// Given out; its result has not come.
    Sent,
    /// The satellite says that it had its effect.
    Completed,
    /// The satellite says that it had not.
    Failed,
    /// Its time was over before anybody asked for it, or the satellite says that it came too late.
    Expired,
}

/// Events, as they are stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StoredEvents {
    /// In the order of their ids; with `since` in the order of `seq`.
    pub events: Vec<StoredEvent>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StoredEvent {
    /// What the backend calls it: a number that counts up in order of arrival.
    pub id: String,
    /// Whose.
    pub satellite_id: String,
    /// Its number there.
    pub seq: u64,
    /// `mcp.server.crashed`, for example.
    #[serde(rename = "type")]
    pub kind: String,
    /// When it happened.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub timestamp: Timestamp,
    /// What.
    pub data: Value,
    /// When it came.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub received_at: Timestamp,
}

/// Instances of all satellites.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Instances {
    /// By satellite and name.
    pub instances: Vec<Instance>,
}

/// How one instance is, by the last event that told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Instance {
    /// Whose.
    pub satellite_id: String,
    /// Its full name.
    pub instance: String,
    /// What is installed.
    pub installation_id: String,
    /// For which team.
    pub team_id: String,
    /// For whom.
    pub user_id: String,
    /// The server's name for people.
    pub server_slug: String,
    /// One of the twelve.
    pub status: String,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_message: Option<String>,
    /// Since when, by the satellite's clock.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub since: Timestamp,
    /// The event's number.
    pub seq: u64,
}
