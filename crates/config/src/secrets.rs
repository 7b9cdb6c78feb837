//! Protection of secrets in a configuration: resolves references to secrets, and masks secrets in the text of a file.
//! `mcp_satellite_clients` recognizes literal values that are secrets.

use std::collections::BTreeMap;
use std::path::Path;

use mcp_satellite_clients::looks_secret;
use mcp_satellite_model::secret::Secret;
use mcp_satellite_model::spec::ValuePart;
use toml_span::Span;
use toml_span::value::{Value, ValueInner};

use super::errors::ConfigFindings;
use super::reader::SpannedText;
use super::secret_files::SecretFiles;
use super::template::is_public_variable;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SecretReference<'a> {
    Env(&'a str),
    /// Path from `file:PATH`. A `file://` URL is an ordinary value.
    File(&'a str),
}

pub(crate) fn parse_reference(text: &str) -> Option<SecretReference<'_>> {
    if let Some(name) = text.strip_prefix("env:") {
        return Some(SecretReference::Env(name));
    }
    text.strip_prefix("file:").filter(|path| !path.starts_with("//")).map(SecretReference::File)
}

/// Splits an argument that is or ends with a reference, such as `env:TOKEN` or `--token=env:TOKEN`.
pub(crate) fn split_argument(argument: &str) -> Option<(&str, SecretReference<'_>)> {
    if let Some(reference) = parse_reference(argument) {
        return Some(("", reference));
    }
    let value = argument.find('=').filter(|_| argument.starts_with('-')).map(|at| at + 1)?;
    Some((&argument[..value], parse_reference(&argument[value..])?))
}

pub(crate) struct SecretSources<'a> {
    pub(crate) environment: &'a dyn Fn(&str) -> Option<String>,
    pub(crate) folder: &'a Path,
    /// True if references are rejected: a backend must not read secrets of this machine.
    pub(crate) rejects_references: bool,
    /// Variables that were read, with their values. Servers must not inherit them.
    pub(crate) variables_read: BTreeMap<String, Secret>,
    pub(crate) files: SecretFiles,
}

impl SecretSources<'_> {
    pub(crate) fn resolve(
        &mut self,
        reference: &SecretReference<'_>,
        at: Span,
        findings: &mut ConfigFindings,
    ) -> Option<Secret> {
        if self.reject_reference(at, findings) {
            return None;
        }
        match reference {
            SecretReference::Env(name) => {
                let value = self.variable(name);
                if value.is_none() {
                    let message = format!("the environment variable `{name}` is not set");
                    findings.error(at, message, format!("set {name} where the satellite is started"));
                }
                value
            }
            SecretReference::File(path) => match self.files.read(self.folder.join(path)) {
                Ok(text) => Some(text),
                Err(error) => {
                    let hint = "a path is relative to the folder of the configuration file";
                    findings.error(at, format!("cannot read the file `{path}`: {error}"), hint);
                    None
                }
            },
        }
    }

    /// Returns the value of a variable, and records that it was read.
    fn variable(&mut self, name: &str) -> Option<Secret> {
        let value = (self.environment)(name).map(Secret::from)?;
        self.variables_read.insert(name.to_owned(), value.clone());
        Some(value)
    }

    /// Reports an error if references are not allowed.
    pub(crate) fn reject_reference(&self, at: Span, findings: &mut ConfigFindings) -> bool {
        if self.rejects_references {
            let hint = "write the value itself, or let the user set it (user_required)";
            findings.error(
                at,
                "the backend's configuration cannot refer to variables and files of the satellite's machine",
                hint,
            );
        }
        self.rejects_references
    }

    /// Resolves `${env:NAME}` or `${env:NAME:-default}`. Without variable and default, the user gives the value.
    pub(crate) fn env_part(
        &mut self,
        name: &str,
        default: Option<&str>,
        at: Span,
        findings: &mut ConfigFindings,
    ) -> ValuePart {
        if self.reject_reference(at, findings) {
            return ValuePart::Literal("".into());
        }
        match (self.variable(name), default) {
            (Some(value), default) if !value.expose().is_empty() || default.is_none() => {
                if is_public_variable(name) {
                    ValuePart::Literal(value)
                } else {
                    ValuePart::Hidden(value)
                }
            }
            (_, Some(default)) if looks_secret(name, default) => ValuePart::Hidden(default.into()),
            (_, Some(default)) => ValuePart::Literal(default.into()),
            (_, None) => ValuePart::UserValue(name.to_owned()),
        }
    }

    /// Resolves `${file:PATH}`. An unreadable file keeps only the instances from starting that use it.
    pub(crate) fn file_part(&mut self, path: &str, at: Span, findings: &mut ConfigFindings) -> ValuePart {
        if self.reject_reference(at, findings) {
            return ValuePart::Literal("".into());
        }
        match self.files.read(self.folder.join(path)) {
            Ok(text) => ValuePart::Hidden(text),
            Err(error) => ValuePart::Unavailable(unreadable_file("the file", path, &error)),
        }
    }

    /// Resolves the secret that `text` refers to. A literal is an error, because a configuration file is copied,
    /// displayed and committed.
    pub(crate) fn resolve_secret(
        &mut self,
        what: &str,
        text: &SpannedText,
        findings: &mut ConfigFindings,
    ) -> Option<Secret> {
        let Some(reference) = parse_reference(&text.value) else {
            if self.rejects_references && !text.value.is_empty() {
                return Some(text.value.as_str().into());
            }
            let hint = "write \"env:NAME\" or \"file:PATH\", so that the secret is not in this file";
            findings.error(text.span, format!("{what} is written in plain text"), hint);
            return None;
        };
        let secret = self.resolve(&reference, text.span, findings)?;
        if secret.expose().is_empty() {
            findings.error(text.span, format!("{what} is empty"), "set it: an empty secret protects nothing");
            return None;
        }
        Some(secret)
    }
}

/// Returns the reason why an instance waits for a file.
pub(crate) fn unreadable_file(what: &str, path: &str, error: &std::io::Error) -> String {
    format!("cannot read {what} `{path}`: {error}; provide it, then run `satellite reload`")
}

/// Returns `text` with all possible secrets of `tree` masked, with the same length in bytes.
pub(crate) fn mask_secrets(text: &str, tree: &Value<'_>) -> String {
    let mut bytes = text.as_bytes().to_vec();
    mask_leaves(&mut bytes, text, tree, "", MaskRule::Named);
    String::from_utf8(bytes).unwrap_or_default()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MaskRule {
    Named,
    /// Numbers and durations: short strings are visible, except tokens.
    Policy,
    /// Strings of `args`, `env`, `headers` and `query`: only references are visible.
    Hidden,
}

/// Keys whose strings are not secrets. An unknown key may be a misspelled `token`, so it is masked.
const PLAIN_KEYS: [&str; 46] = [
    "name",
    "profile",
    "listen",
    "sink",
    "rotate_at",
    "id",
    "slug",
    "team",
    "role",
    "grants",
    "isolation",
    "cgroups",
    "uid_range",
    "server",
    "transport",
    "protocol",
    "type",
    "command",
    "cwd",
    "env_file",
    "description",
    "url",
    "health_url",
    "keep",
    "users",
    "grant",
    "client_id",
    "scopes",
    "user_required",
    "allowed_commands",
    "request_logging_enabled",
    "hosts",
    "origins",
    "as",
    "cert",
    "answers",
    "mcp_mode",
    "body_max",
    "bodies_max",
    "streams_max",
    "session_idle",
    "session_age_max",
    "resume_grace",
    "drain_timeout",
    "request_timeout",
    "requests_per_second",
];

fn mask_leaves(bytes: &mut [u8], text: &str, value: &Value<'_>, key: &str, place: MaskRule) {
    match value.as_ref() {
        ValueInner::Table(table) => {
            for (name, inner) in table {
                let inner_place = match (place, &*name.name) {
                    (MaskRule::Hidden, _) | (_, "args" | "env" | "headers" | "query") => MaskRule::Hidden,
                    (_, "policy" | "events" | "backend") => MaskRule::Policy,
                    (place, _) => place,
                };
                mask_leaves(bytes, text, inner, &name.name, inner_place);
            }
        }
        ValueInner::Array(items) => items.iter().for_each(|item| mask_leaves(bytes, text, item, key, place)),
        ValueInner::String(leaf) if parse_reference(leaf).is_some() => {}
        ValueInner::String(leaf) => match place {
            MaskRule::Named | MaskRule::Policy
                if matches!(
                    key,
                    "url" | "health_url" | "public_url" | "client_metadata_url" | "authorization_servers"
                ) =>
            {
                mask(bytes, url_secrets(text, value.span));
            }
            MaskRule::Named if PLAIN_KEYS.contains(&key) => {}
            // A misspelled `token` is a secret, too.
            MaskRule::Policy if strsim::damerau_levenshtein(key, "token") > 2 && leaf.len() < 16 => {}
            _ => mask(bytes, [value.span]),
        },
        ValueInner::Integer(_) | ValueInner::Float(_) | ValueInner::Boolean(_) => {
            if place == MaskRule::Hidden || matches!(key, "token" | "tokens" | "bearer_token") {
                mask(bytes, [value.span]);
            }
        }
    }
}

fn url_secrets(text: &str, at: Span) -> [Span; 2] {
    let url = text.get(at.start..at.end).unwrap_or_default();
    let host = url.find("://").map_or(0, |colon| colon + 3);
    let path = url[host..].find(['/', '?', '#']).map_or(url.len(), |slash| host + slash);
    let user = url[host..path].rfind('@').unwrap_or(0);
    let query = url.find('?').unwrap_or(url.len());
    [Span::new(at.start + host, at.start + host + user), Span::new(at.start + query, at.end)]
}

fn mask(bytes: &mut [u8], spans: impl IntoIterator<Item = Span>) {
    for span in spans {
        for byte in bytes.get_mut(span.start..span.end).unwrap_or_default() {
            if !matches!(byte, b'\n' | b'\r' | b'"' | b'\'' | b' ') {
                *byte = b'*';
            }
        }
    }
}

/// Masks the text of a file that could not be parsed, so that secrets cannot be located: only punctuation, keys and
/// headings stay visible.
pub(crate) fn mask_unparsed(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let key = line.find(['=', ':']).filter(|end| is_key(&line[..*end]));
        let heading = line.trim_start().starts_with('[') && !line.contains(['"', '\'', ',']);
        let from = if heading { line.len() } else { key.unwrap_or(0) };
        for byte in &mut bytes[at + from..at + line.len()] {
            if byte.is_ascii_alphanumeric() || !byte.is_ascii() {
                *byte = b'*';
            }
        }
        at += line.len();
    }
    String::from_utf8(bytes).unwrap_or_default()
}

/// Returns true if the text is a name, quoted or not. A text that ends within a quoted value is not a key.
fn is_key(text: &str) -> bool {
    let text = text.trim();
    let unquoted = ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote));
    let name = unquoted.unwrap_or(text);
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masking_an_unparsable_text_keeps_keys_and_hides_values() {
        let text = "API_KEY = \"a\n  \"c2VjcmV0LXZhbHVl=\",\n\"user:pass\"\n\"quoted\": x\n[teams.env]\n";
        let shown = "API_KEY = \"*\n  \"****************=\",\n\"****:****\"\n\"quoted\": *\n[teams.env]\n";
        assert_eq!(mask_unparsed(text), shown);
    }

    #[test]
    fn references_are_distinguished_from_values() {
        assert_eq!(parse_reference("env:TOKEN"), Some(SecretReference::Env("TOKEN")));
        assert_eq!(parse_reference("file:secrets/token"), Some(SecretReference::File("secrets/token")));
        assert_eq!(parse_reference("file:///srv/db.sqlite"), None);
        assert_eq!(split_argument("--token=env:TOKEN"), Some(("--token=", SecretReference::Env("TOKEN"))));
        assert_eq!(split_argument("file:x"), Some(("", SecretReference::File("x"))));
        assert!(split_argument("--url=file:///srv").is_none() && split_argument("a=env:b").is_none());
    }

    #[test]
    fn masking_an_invalid_file_hides_unquoted_and_quoted_values() {
        let shown = mask_unparsed("[teams]\nid = hunter2\ntoken = \"ghp_secret\"\nnaked\n");
        assert_eq!(shown, "[teams]\nid = *******\ntoken = \"***_******\"\n*****\n");
    }
    #[test]
    fn a_misspelled_token_is_masked_and_a_misspelled_duration_is_not() {
        let text = "[events]\ntokn = \"hunter2\"\nintervall = \"5s\"\n";
        let shown = mask_secrets(text, &toml_span::parse(text).unwrap_or_else(|error| panic!("{error}")));
        assert_eq!(shown, "[events]\ntokn = \"*******\"\nintervall = \"5s\"\n");
    }
}
