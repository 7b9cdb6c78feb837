//! The configuration: `file` is the parsed form of what the operator typed, `plan` is the validated form. All checks
//! run between the two. All errors are reported at once, each with its place and a hint.
//!
//! ```text
//! TOML ──→ tree with spans ──→ ConfigFile ──→ check, teams ──→ Plan
//! mcp.json ──↗  (reader, policy)  ↖── mcp_json      ↘── ConfigFindings ──→ ConfigErrors
//! ```
//!
//! A plan stores the texts that it was built from (`origin`), so that a changed credential file can be applied.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the embedding API documents its own items; this crate is internal")]

mod backend;
mod check;
pub mod errors;
mod file;
mod gateway;
mod mcp_json;
mod oauth;
mod origin;
mod plan;
mod policy;
pub mod reader;
mod secrets;
mod teams;

use std::collections::BTreeMap;
use std::path::Path;

use mcp_satellite_model::secret::Secret;
use toml_span::ErrorKind;

pub use backend::{BackendDocument, BackendPlan, PollIntervals};
pub use errors::{ConfigErrorItem, ConfigErrors};
pub use gateway::listen_address;
pub use gateway::{
    EndpointAuth, GatewayLimits, GatewayPlan, GatewayUser, LISTEN, ListenSetting, ResponseStyle, TlsFiles, TokenHash,
};
pub use oauth::OAuthPlan;
pub use plan::{KEEP, Plan, PlanRestrictions, Profile, RETENTION, ROTATE_BYTES, SinkPlan};

pub use origin::ConfigOrigin;

use errors::{ConfigFindings, ConfigText};
use origin::{ConfigDocumentKind, SecretFiles};
use secrets::SecretSources;

pub fn load(file: &Path) -> Result<Plan, ConfigErrors> {
    load_from_content(file, &read_content(file))
}

pub fn load_from_content(file: &Path, held: &ConfigFileContent) -> Result<Plan, ConfigErrors> {
    parse(&file.display().to_string(), content_text(file, held)?, &|name| std::env::var(name).ok())
}

/// Loads an `mcp.json` of Claude, Cursor or VS Code as one team `local` with one user `me`. The name of a server
/// becomes the id of its installation. `base` contains the restrictions of the satellite's own file; without one, use
/// the default.
///
/// # Errors
/// Returns all errors of the file, or the reason why it cannot be read.
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

/// Parses TOML from `text`. `name` is the file's name for errors; `file:` references are relative to its folder.
pub fn parse(name: &str, text: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Plan, ConfigErrors> {
    parse_toml(name, text, environment, SecretFiles::default())
}

pub fn parse_mcp_json(
    name: &str,
    text: &str,
    base: &PlanRestrictions,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Plan, ConfigErrors> {
    parse_json(name, text, base, environment, SecretFiles::default())
}

fn parse_document(name: &str, text: &str, base: &PlanRestrictions) -> Result<Plan, ConfigErrors> {
    let mut findings = ConfigFindings::default();
    let Some(tree) = mcp_json::parse(text, &mut findings) else {
        return findings
            .into_result(&ConfigText { name, text, masked: secrets::mask_unparsed(text) })
            .map(|_| Plan::default());
    };
    let source = ConfigText { name, text, masked: secrets::mask_secrets(text, &tree) };
    let file = file::ConfigFile::read(tree, &mut findings);
    finish(
        file,
        ConfigDocumentKind::Document(Box::new(base.clone())),
        &source,
        &|_| None,
        SecretFiles::default(),
        findings,
    )
}

fn parse_toml(
    name: &str,
    text: &str,
    environment: &dyn Fn(&str) -> Option<String>,
    files: SecretFiles,
) -> Result<Plan, ConfigErrors> {
    let mut findings = ConfigFindings::default();
    match toml_span::parse(text) {
        Ok(tree) => {
            let source = ConfigText { name, text, masked: secrets::mask_secrets(text, &tree) };
            let file = file::ConfigFile::read(tree, &mut findings);
            finish(file, ConfigDocumentKind::Toml, &source, environment, files, findings)
        }
        Err(error) => {
            let hint = match &error.kind {
                ErrorKind::UnquotedString => "put it in quotes",
                ErrorKind::DuplicateKey { .. } | ErrorKind::DuplicateTable { .. } => "remove one of the two",
                _ => "correct this first; the rest of the file was not read",
            };
            findings.error(error.span, error.to_string(), hint);
            findings
                .into_result(&ConfigText { name, text, masked: secrets::mask_unparsed(text) })
                .map(|_| Plan::default())
        }
    }
}

fn parse_json(
    name: &str,
    text: &str,
    base: &PlanRestrictions,
    environment: &dyn Fn(&str) -> Option<String>,
    files: SecretFiles,
) -> Result<Plan, ConfigErrors> {
    let mut findings = ConfigFindings::default();
    let Some(tree) = mcp_json::parse(text, &mut findings) else {
        return findings
            .into_result(&ConfigText { name, text, masked: secrets::mask_unparsed(text) })
            .map(|_| Plan::default());
    };
    let source = ConfigText { name, text, masked: secrets::mask_secrets(text, &tree) };
    let mut file = mcp_json::read(tree, &mut findings);
    if !base.effective_policy.sets_idle {
        file.policy = policy::PolicyTier::without_sleep();
    }
    finish(file, ConfigDocumentKind::McpJson(Box::new(base.clone())), &source, environment, files, findings)
}

fn finish(
    file: file::ConfigFile,
    kind: ConfigDocumentKind,
    source: &ConfigText<'_>,
    environment: &dyn Fn(&str) -> Option<String>,
    files: SecretFiles,
    mut findings: ConfigFindings,
) -> Result<Plan, ConfigErrors> {
    let folder = Path::new(source.name).parent().unwrap_or(Path::new(""));
    let closed = matches!(kind, ConfigDocumentKind::Document(_));
    let mut surroundings =
        SecretSources { environment, folder, rejects_references: closed, variables_read: BTreeMap::new(), files };
    let base = match &kind {
        ConfigDocumentKind::Toml => &PlanRestrictions::default(),
        ConfigDocumentKind::McpJson(base) | ConfigDocumentKind::Document(base) => base,
    };
    let plan = teams::build(file, base, source, &mut surroundings, &mut findings);
    let SecretSources { variables_read: read, files, .. } = surroundings;
    let warnings = findings.into_result(source)?;
    let secret_variables = read.keys().cloned().collect();
    let origin = ConfigOrigin::new(source.name, source.text, kind, read, files);
    Ok(Plan { secret_variables, warnings, origin, ..plan })
}
