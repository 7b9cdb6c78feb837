//! Queries for recorded calls.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::query_text::parsed_some;

/// Conditions for the instance of a call. All given ones must hold.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CallSubject {
    /// Only this team (id or slug; at a backend its id).
    pub team: Option<String>,
    /// Only this user (id or slug; at a backend its id).
    pub user: Option<String>,
    /// Only this server (slug).
    pub server: Option<String>,
    /// Only the instance with this full name.
    pub instance: Option<String>,
}

/// Query for the calls of one instance, newest first. All given conditions must hold.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CallConditions {
    /// Only this tool.
    pub tool: Option<String>,
    /// Only calls that succeeded, or only those that failed.
    #[serde(deserialize_with = "parsed_some")]
    pub success: Option<bool>,
    /// Only calls that failed for this reason, such as `timed_out`.
    pub fate: Option<String>,
    /// Only calls of clients with this name.
    pub client: Option<String>,
    /// Only calls from this time on, in RFC 3339.
    pub since: Option<String>,
    /// Only calls before this time, in RFC 3339.
    pub until: Option<String>,
    /// Maximum number of calls, 1 to 1000; 100 if absent.
    #[serde(deserialize_with = "parsed_some")]
    pub limit: Option<usize>,
    /// Position of older calls, from `next` of the previous page.
    pub cursor: Option<String>,
}

/// Query for calls, newest first.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CallQuery {
    #[serde(flatten)]
    pub subject: CallSubject,
    #[serde(flatten)]
    pub conditions: CallConditions,
}

/// Query for the calls that satellites have delivered to a backend, newest first.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FleetCallQuery {
    /// Only those of the satellite with this id or name.
    pub satellite: Option<String>,
    #[serde(flatten)]
    pub subject: CallSubject,
    #[serde(flatten)]
    pub conditions: CallConditions,
}
