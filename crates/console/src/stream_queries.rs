//! Queries for streams.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::query_text::{parsed, parsed_some};

/// Parameters of every stream of instances and events.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PageStreamQuery {
    /// Position from which the stream continues: the id of its last frame, `BOOT-REVISION` or, with `events`,
    /// `BOOT-REVISION-SEQ`. The header `Last-Event-ID` has the same meaning and precedes the parameters.
    pub position: Option<String>,
    /// False for a stream without instances: it contains `tick` and events only.
    #[serde(default = "yes", deserialize_with = "parsed")]
    pub rows: bool,
    /// Only the instance with this full name; at a backend `SATELLITE:INSTANCE`.
    pub instance: Option<String>,
    /// True to add the events that are stored meanwhile.
    #[serde(deserialize_with = "parsed")]
    pub events: bool,
    /// With `events`: only those after this number, also earlier ones. Precedes the number in `position`.
    #[serde(deserialize_with = "parsed_some")]
    pub since: Option<u64>,
    /// With `events`: only these types, separated by commas.
    pub types: Option<String>,
    /// True for a response that ends when it has reached the present.
    #[serde(deserialize_with = "parsed")]
    pub once: bool,
}

/// Query for a stream of instances and events.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct InstanceStreamQuery {
    /// With `events`: only those of this team.
    pub team: Option<String>,
    #[serde(flatten)]
    pub stream: PageStreamQuery,
}

/// Query for a stream of instances and events of a backend.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FleetStreamQuery {
    /// With `events`: only those of the satellite with this id or name.
    pub satellite: Option<String>,
    #[serde(flatten)]
    pub stream: PageStreamQuery,
}

/// Query for the stream of an instance's log.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LogStreamQuery {
    /// Only lines of events after this number, also stored ones, such as `through` of a page. The header
    /// `Last-Event-ID` has the same meaning and precedes it. Without either, the stream contains new lines only.
    pub since: Option<u64>,
    /// Only these levels, separated by commas: `debug`, `info`, `warn`, `error`.
    pub level: Option<String>,
    /// Only lines that contain this text.
    pub q: Option<String>,
}

/// Query for the stored events of a backend.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FleetEventQuery {
    /// Only events after this id of the backend.
    pub since: Option<u64>,
    /// True to keep the stream open for new events.
    pub follow: bool,
    /// Only these types, separated by commas.
    pub types: Option<String>,
    /// Only those of the satellite with this id or name.
    pub satellite: Option<String>,
    /// Only this instance: `SATELLITE:INSTANCE`.
    pub instance: Option<String>,
}

fn yes() -> bool {
    true
}
