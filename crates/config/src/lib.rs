//! The configuration: `file` is the parsed form of what the operator typed, `plan` is the validated form. All checks
//! run between the two. All errors are reported at once, each with its place and a hint.
//!
//! ```text
//! TOML ──→ tree with spans ──→ ConfigFile ──→ check, teams ──→ Plan
//! mcp.json ──↗  (reader, policy)  ↖── mcp_json      ↘── ConfigFindings ──→ ConfigErrors
//!                                   (client_server)
//! ```
//!
//! A plan stores the texts that it was built from (`origin`), so that a changed credential file can be applied.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

mod backend;
mod check;
mod client_server;
mod console;
mod document;
mod env_file;
pub mod errors;
mod file;
mod gateway;
mod json;
mod mcp_json;
mod oauth;
mod origin;
mod parse;
mod plan;
mod policy;
mod provenance;
pub mod reader;
mod role;
mod secret_files;
mod secrets;
mod server;
mod sink;
mod small_file;
mod teams;
mod telemetry;
mod template;
mod variables;

use std::path::Path;

use mcp_satellite_model::secret::Secret;

pub use backend::{BackendPlan, PollIntervals};
pub use client_server::{DraftContext, ServerDraft, UserValueDraft, draft_server, normalize_id, workspace_of};
pub use console::{CONTROL_SERVER, ConsolePlan, ConsoleToken};
pub use document::BackendDocument;
pub use errors::{ConfigErrorItem, ConfigErrors};
pub use gateway::listen_address;
pub use gateway::{
    EndpointAuth, GatewayLimits, GatewayPlan, GatewayUser, LISTEN, ListenSetting, ResponseStyle, TlsFiles, TokenHash,
};
pub use oauth::OAuthPlan;
pub use plan::{KEEP, Plan, PlanRestrictions, Profile, RETENTION, ROTATE_BYTES, SinkPlan};
pub use role::{Role, RoleAccess};

pub use origin::ConfigOrigin;
pub use telemetry::{SAMPLE, TelemetryPlan};

pub use parse::{parse, parse_mcp_json};
pub use provenance::{ConfiguredValue, ValueSource};
pub use template::escape as escape_variables;

pub fn load(file: &Path) -> Result<Plan, ConfigErrors> {
    load_from_content(file, &read_content(file))
}

pub fn load_from_content(file: &Path, held: &ConfigFileContent) -> Result<Plan, ConfigErrors> {
    parse(&file.display().to_string(), content_text(file, held)?, &|name| std::env::var(name).ok())
}

/// Loads the servers of a client's file, such as the `mcp.json` of Cursor or VS Code, as one team `local` with one user
/// `me`. The name of a server becomes the id of its installation. A server that cannot be used is left out with a warning. `base` contains the restrictions of the satellite's own file; without one, use
/// the default.
///
/// # Errors
/// Returns the reason why the file cannot be read, or its syntax error.
pub fn load_mcp_json(file: &Path, base: &PlanRestrictions) -> Result<Plan, ConfigErrors> {
    load_mcp_json_from_content(file, &read_content(file), base)
}

pub fn load_mcp_json_from_content(
    file: &Path,
    held: &ConfigFileContent,
    base: &PlanRestrictions,
) -> Result<Plan, ConfigErrors> {
    parse_mcp_json(&file.display().to_string(), content_text(file, held)?, base, &|name| std::env::var(name).ok())
}

pub type ConfigFileContent = Result<Secret, ConfigFileError>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFileError {
    pub message: String,
    pub hint: &'static str,
}

pub fn read_content(file: &Path) -> ConfigFileContent {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(text.into()),
        Err(error) => Err(ConfigFileError {
            message: format!("cannot read the configuration: {error}"),
            hint: "check the path and its permissions",
        }),
    }
}

fn content_text<'a>(file: &Path, held: &'a ConfigFileContent) -> Result<&'a str, ConfigErrors> {
    held.as_ref().map(Secret::expose).map_err(|ConfigFileError { message, hint }| {
        ConfigErrors::without_place(&file.display().to_string(), vec![(message.clone(), (*hint).to_owned())])
    })
}
