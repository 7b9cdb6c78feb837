//! From the text of a configuration to its plan.

use std::collections::BTreeMap;
use std::path::Path;

use mcp_satellite_model::secret::Secret;
use toml_span::ErrorKind;

use super::errors::{ConfigErrors, ConfigFindings, ConfigText};
use super::origin::{ConfigDocument, ConfigDocumentKind, ConfigOrigin};
use super::plan::{Plan, PlanRestrictions};
use super::secret_files::SecretFiles;
use super::secrets::SecretSources;
use super::template::is_public_variable;
use super::{file, json, mcp_json, policy, secrets, teams};

impl ConfigOrigin {
    /// Parses the texts again with the present contents of the files.
    pub(crate) fn resolve(&self) -> Result<Plan, ConfigErrors> {
        let environment = |name: &str| self.environment.get(name).map(|value| value.expose().to_owned());
        let mut whole: Option<Plan> = None;
        for ConfigDocument { name, text, kind } in &self.documents {
            let (text, files) = (text.expose(), self.files.clone());
            let plan = match kind {
                ConfigDocumentKind::Toml => parse_toml(name, text, &environment, files)?,
                ConfigDocumentKind::McpJson(base) => parse_json(name, text, base, &environment, files)?,
                ConfigDocumentKind::Document(base) => parse_document(name, text, base)?,
            };
            whole = Some(match whole {
                None => plan,
                Some(whole) => whole.join(plan),
            });
        }
        let mut plan = whole.unwrap_or_default();
        plan.store_token_for_only_user();
        Ok(plan)
    }
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

pub(crate) fn parse_document(name: &str, text: &str, base: &PlanRestrictions) -> Result<Plan, ConfigErrors> {
    let mut findings = ConfigFindings::default();
    let Some(tree) = json::parse(text, &mut findings) else {
        return findings
            .into_result(&ConfigText { name, text, masked: secrets::mask_unparsed(text) })
            .map(|_| Plan::default());
    };
    let source = ConfigText { name, text, masked: secrets::mask_secrets(text, &tree) };
    let file = file::ConfigFile::read(tree, &mut findings);
    let inputs = SourceInputs { environment: &|_| None, read: BTreeMap::new(), files: SecretFiles::default() };
    finish(file, ConfigDocumentKind::Document(Box::new(base.clone())), &source, inputs, findings)
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
            let inputs = SourceInputs { environment, read: BTreeMap::new(), files };
            finish(file, ConfigDocumentKind::Toml, &source, inputs, findings)
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
    let source = ConfigText { name, text, masked: secrets::mask_unparsed(text) };
    let home = environment("HOME");
    let Some(mut file) = mcp_json::read(name, text, home.as_deref().map(Path::new), &mut findings) else {
        return findings.into_result(&source).map(|_| Plan::default());
    };
    if !base.effective_policy.sets_idle {
        file.policy = policy::PolicyTier::without_sleep();
    }
    let read = home.map(|home| ("HOME".to_owned(), home.into())).into_iter().collect();
    let kind = ConfigDocumentKind::McpJson(Box::new(base.clone()));
    finish(file, kind, &source, SourceInputs { environment, read, files }, findings)
}

/// The contents of the machine that a configuration can refer to.
struct SourceInputs<'a> {
    environment: &'a dyn Fn(&str) -> Option<String>,
    /// Variables that were read already.
    read: BTreeMap<String, Secret>,
    files: SecretFiles,
}

fn finish(
    file: file::ConfigFile,
    kind: ConfigDocumentKind,
    source: &ConfigText<'_>,
    inputs: SourceInputs<'_>,
    mut findings: ConfigFindings,
) -> Result<Plan, ConfigErrors> {
    let folder = Path::new(source.name).parent().unwrap_or(Path::new(""));
    let closed = matches!(kind, ConfigDocumentKind::Document(_));
    let is_lenient = matches!(kind, ConfigDocumentKind::McpJson(_));
    let SourceInputs { environment, read, files } = inputs;
    let mut sources = SecretSources { environment, folder, rejects_references: closed, variables_read: read, files };
    let base = match &kind {
        ConfigDocumentKind::Toml => &PlanRestrictions::default(),
        ConfigDocumentKind::McpJson(base) | ConfigDocumentKind::Document(base) => base,
    };
    let plan = teams::build(file, is_lenient, base, source, &mut sources, &mut findings);
    let SecretSources { variables_read: read, files, .. } = sources;
    let warnings = findings.into_result(source)?;
    // Servers inherit variables such as `HOME` also if the configuration refers to them.
    let secret_variables = read.keys().filter(|name| !is_public_variable(name)).cloned().collect();
    let origin = ConfigOrigin::new(source.name, source.text, kind, read, files);
    Ok(Plan { secret_variables, warnings, origin, ..plan })
}
