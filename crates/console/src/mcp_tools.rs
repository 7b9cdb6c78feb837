//! Tools of the control plane's MCP server: their input and their definitions.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Deserialize;
use serde_json::{Value, json};

/// An instance, by the slug of its server if that is unique, else by its full name.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InstanceInput {
    pub instance: String,
}

/// Lines of an instance's log, newest first.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LogsInput {
    /// Slug of the server if it is unique, else the full name of the instance.
    pub instance: String,
    /// Maximum number of lines to search, 1 to 1000; 100 if absent.
    pub limit: Option<usize>,
    /// Only lines that contain this text.
    pub q: Option<String>,
    /// Only these levels, separated by commas: `debug`, `info`, `warn`, `error`.
    pub level: Option<String>,
}

/// Values to set or remove for an instance.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ValuesInput {
    /// Slug of the server if it is unique, else the full name of the instance.
    pub instance: String,
    /// Values to set, by key.
    #[serde(default)]
    pub set: BTreeMap<String, String>,
    /// Keys whose values are removed.
    #[serde(default)]
    pub unset: Vec<String>,
}

/// Returns the definition of a tool whose arguments are read as `T`.
pub fn tool_definition<T: JsonSchema>(name: &str, description: &str, is_read_only: bool) -> Value {
    let settings = SchemaSettings::draft2020_12().for_deserialize().with(|settings| settings.inline_subschemas = true);
    json!({
        "name": name,
        "description": description,
        "inputSchema": settings.into_generator().into_root_schema_for::<T>(),
        "annotations": { "readOnlyHint": is_read_only, "destructiveHint": !is_read_only, "openWorldHint": false },
    })
}
