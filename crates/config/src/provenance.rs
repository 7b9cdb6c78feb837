//! The configuration as applied: each value with its source, for people who want to know why a setting has its value.
//! Values that can be secrets are masked by the rules for lines in errors, and more strictly in URLs and commands.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use mcp_satellite_clients::looks_secret;
use mcp_satellite_model::printable;
use mcp_satellite_model::settings::{CgroupMode, Isolation, JournalLimits};
use serde::{Serialize, Serializer};
use serde_json::Value as Json;
use toml_span::value::{Value, ValueInner};

use super::errors::ConfigFindings;
use super::gateway::{EndpointAuth, LISTEN};
use super::origin::{ConfigDocument, ConfigDocumentKind, ConfigOrigin};
use super::plan::{Plan, Profile, SinkPlan};
use super::policy::{
    BatchingTable, GatewayLimitsTable, HealthTable, IdleTable, LogsTable, MemoryTable, RemoteTable, RestartTable,
    RetryTable, SessionPolicyTable, TeamBudgetTable, WatchdogTable,
};
use super::{json, secrets};

const MASK: &str = "***";
/// Length in bytes from which a part of a path in a URL is masked: some services put a key there.
const PATH_PART_MAX: usize = 24;
/// Keys of the tables of servers in the files of clients. The other keys of such a file belong to other programs.
const SERVER_KEYS: [&str; 2] = ["mcpServers", "servers"];
const URL_KEYS: [&str; 4] = ["url", "health_url", "public_url", "client_metadata_url"];

/// A value of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConfiguredValue {
    /// Keys from the top of the file: `policy.restart.window`, `teams[0].users[1].slug`.
    pub path: String,
    /// The value, with secrets as `***`.
    pub value: String,
    /// Source of the value; in JSON as text.
    pub source: ValueSource,
}

/// Source of a value of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueSource {
    /// A line of a file or of the backend's configuration, counted from 1.
    Line { name: String, line: usize },
    /// An option of the command line.
    CommandLine,
    /// The default.
    Default,
}

impl fmt::Display for ValueSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line { name, line } => write!(f, "{name}:{line}"),
            Self::CommandLine => f.write_str("command line"),
            Self::Default => f.write_str("default"),
        }
    }
}

impl Serialize for ValueSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Plan {
    /// Returns the values of this plan: those of `origin`, the texts that are applied, in the order of the texts, then the
    /// settings of the satellite that no text contains.
    pub fn configured_values(&self, origin: &ConfigOrigin) -> Vec<ConfiguredValue> {
        let overridden = |path: &str| origin.overrides.iter().any(|(known, _)| *known == path);
        let mut values: Vec<ConfiguredValue> = origin.documents.iter().flat_map(ConfigDocument::values).collect();
        values.retain(|value| !overridden(&value.path));
        let typed = |(path, value): &(&'static str, String)| ConfiguredValue {
            path: (*path).to_owned(),
            value: value.clone(),
            source: ValueSource::CommandLine,
        };
        values.extend(origin.overrides.iter().map(typed));
        let known: BTreeSet<String> = values.iter().map(|value| value.path.clone()).collect();
        // A list is several values: `gateway.hosts[0]`.
        let is_known = |path: &str| known.range(path.to_owned()..).next().is_some_and(|next| is_of(next, path));
        let defaults = self.settings().into_iter().filter(|(path, _)| !is_known(path));
        values.extend(defaults.map(|(path, value)| ConfiguredValue { path, value, source: ValueSource::Default }));
        values
    }

    /// Returns the settings of the satellite with the values in effect.
    fn settings(&self) -> Vec<(String, String)> {
        let mut settings = Settings::default();
        let isolation = match self.isolation {
            Isolation::Auto => "auto",
            Isolation::None => "none",
            Isolation::Nsjail => "nsjail",
            Isolation::Bubblewrap => "bubblewrap",
        };
        let cgroups = match self.cgroups {
            CgroupMode::Auto => "auto",
            CgroupMode::Off => "off",
            CgroupMode::Required => "required",
        };
        let profile = match self.profile {
            Profile::Development => "development",
            Profile::Production => "production",
        };
        settings.add("satellite.name", &self.name);
        settings.add("satellite.profile", profile);
        settings.add("satellite.isolation", isolation);
        settings.add("satellite.cgroups", cgroups);
        settings.add("satellite.watch", self.watch);
        settings.add("satellite.retention", duration(self.retention));
        settings.add("satellite.hang_timeout", duration(self.hang_timeout));
        settings.add("satellite.keep_servers", self.keep_servers);
        let listen = self.gateway.address().map_or_else(|| "off".to_owned(), |address| address.to_string());
        settings.add("gateway.listen", if listen == LISTEN.to_string() { listen + ", or a free port" } else { listen });
        let auth = if matches!(self.gateway.auth, EndpointAuth::Bearer) { "bearer" } else { "none" };
        settings.add("gateway.auth", auth);
        settings.add_table("gateway", GatewayLimitsTable::KEYS, &self.gateway.limits);
        let JournalLimits { events_age_max, size_max, server_logs_max, request_logs_max, logs_age_max } = self.journal;
        settings.add("journal.events_age_max", duration(events_age_max));
        settings.add("journal.size_max", size_max);
        settings.add("journal.server_logs_max", server_logs_max);
        settings.add("journal.request_logs_max", request_logs_max);
        settings.add("journal.logs_age_max", duration(logs_age_max));
        if self.backend.is_none() {
            let sink = match &self.sink {
                SinkPlan::Journal => "journal",
                SinkPlan::File { .. } => "file",
                SinkPlan::Stdout => "stdout",
                SinkPlan::Http { .. } => "http",
            };
            settings.add("events.sink", sink);
        }
        settings.add_table("events", BatchingTable::KEYS, &self.batch);
        let policy = &self.base.effective_policy.policy;
        settings.add_table("policy.restart", RestartTable::KEYS, &policy.restart);
        settings.add_table("policy.session", SessionPolicyTable::KEYS, &policy.session);
        settings.add_table("policy.idle", IdleTable::KEYS, &policy.idle);
        settings.add_table("policy.watchdog", WatchdogTable::KEYS, &policy.watchdog);
        let reconnect = ["backoff_min", "backoff_max", "jitter_percent", "attempts_max"];
        settings.add_table("policy.reconnect", &reconnect, &policy.reconnect);
        settings.add_table("policy.health", HealthTable::KEYS, &policy.health);
        settings.add_table("policy.retry", RetryTable::KEYS, &policy.retry);
        settings.add_table("policy.remote", RemoteTable::KEYS, &policy.remote);
        settings.add_table("policy.logs", LogsTable::KEYS, &policy.logs);
        let isolation = ["network", "memory_max", "cpu_time_max", "processes_max", "open_files_max", "file_size_max"];
        settings.add_table("policy.isolation", &isolation, &policy.isolation);
        settings.add_table("policy.team", TeamBudgetTable::KEYS, &self.team_budget);
        settings.add_table("policy.memory", MemoryTable::KEYS, &self.memory);
        let or =
            |set: Option<usize>, default: &str| set.map_or_else(|| default.to_owned(), |number| number.to_string());
        settings.add("policy.start.permits", or(self.start_permits, "twice the number of cores, at least 4"));
        settings.add("policy.start.connect_permits", or(self.connect_permits, "64"));
        settings.0
    }
}

#[derive(Default)]
struct Settings(Vec<(String, String)>);

impl Settings {
    fn add(&mut self, path: impl Into<String>, value: impl fmt::Display) {
        self.0.push((path.into(), value.to_string()));
    }

    fn add_table(&mut self, path: &str, keys: &[&str], table: &impl Serialize) {
        // The tables consist of numbers, durations and words, so they can be serialized.
        let Ok(values) = serde_json::to_value(table) else { return };
        for key in keys {
            if let Some(value) = values.get(key) {
                self.add(format!("{path}.{key}"), setting(value));
            }
        }
    }
}

/// Returns true if `path` is `of`, or a part of it.
fn is_of(path: &str, of: &str) -> bool {
    path.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Returns a serialized setting as text. A duration is an object of seconds and nanoseconds.
fn setting(value: &Json) -> String {
    if let (Some(seconds), Some(nanoseconds)) = (value.get("secs"), value.get("nanos")) {
        let nanoseconds = nanoseconds.as_u64().and_then(|number| u32::try_from(number).ok()).unwrap_or_default();
        return duration(Duration::new(seconds.as_u64().unwrap_or_default(), nanoseconds));
    }
    match value {
        Json::Null => "none".to_owned(),
        Json::String(text) => text.clone(),
        Json::Array(items) => items.iter().map(setting).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

fn duration(duration: Duration) -> String {
    // An idle time of this length means "never".
    if duration == Duration::MAX { "off".to_owned() } else { humantime::format_duration(duration).to_string() }
}

impl ConfigDocument {
    /// Returns the values of the text. It was parsed before, so a text that cannot be parsed has none.
    fn values(&self) -> Vec<ConfiguredValue> {
        let text = self.text.expose();
        let is_of_client = matches!(self.kind, ConfigDocumentKind::McpJson(_));
        let parse_json = || json::parse(text, &mut ConfigFindings::default());
        let tree = match self.kind {
            ConfigDocumentKind::Toml => toml_span::parse(text).ok(),
            ConfigDocumentKind::Document(_) => parse_json(),
            // Some clients use TOML.
            ConfigDocumentKind::McpJson(_) => parse_json().or_else(|| toml_span::parse(text).ok()),
        };
        let Some(tree) = tree else { return Vec::new() };
        let masked = secrets::mask_secrets(text, &tree);
        let line_starts = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        let mut values = DocumentValues { name: &self.name, text, masked: &masked, line_starts, values: Vec::new() };
        match tree.as_ref() {
            ValueInner::Table(table) if is_of_client => {
                for (key, value) in table.iter().filter(|(key, _)| SERVER_KEYS.contains(&&*key.name)) {
                    values.add(&key.name, &key.name, value);
                }
            }
            _ => values.add("", "", &tree),
        }
        values.values.sort_by_key(|(at, _)| *at);
        values.values.into_iter().map(|(_, value)| value).collect()
    }
}

struct DocumentValues<'a> {
    name: &'a str,
    text: &'a str,
    /// The text with masked secrets, of the same length.
    masked: &'a str,
    line_starts: Vec<usize>,
    /// Each with its place in the text.
    values: Vec<(usize, ConfiguredValue)>,
}

impl DocumentValues<'_> {
    fn add(&mut self, path: &str, key: &str, value: &Value<'_>) {
        let shown = match value.as_ref() {
            ValueInner::Table(table) => {
                for (name, inner) in table {
                    self.add(&joined(path, &name.name), &name.name, inner);
                }
                return;
            }
            ValueInner::Array(items) => {
                for (at, item) in items.iter().enumerate() {
                    self.add(&format!("{path}[{at}]"), key, item);
                }
                return;
            }
            ValueInner::String(text) => self.shown(key, text, value),
            ValueInner::Integer(number) => self.shown(key, &number.to_string(), value),
            ValueInner::Float(number) => self.shown(key, &number.to_string(), value),
            ValueInner::Boolean(flag) => self.shown(key, &flag.to_string(), value),
        };
        let at = value.span.start;
        let line = self.line_starts.partition_point(|start| *start <= at) + 1;
        let source = ValueSource::Line { name: printable::line(self.name), line };
        let (path, value) = (printable::line(path), printable::line(&shown));
        self.values.push((at, ConfiguredValue { path, value, source }));
    }

    fn shown(&self, key: &str, typed: &str, value: &Value<'_>) -> String {
        let part = |text: &str| text.get(value.span.start..value.span.end).map(str::to_owned);
        let is_url = URL_KEYS.contains(&key) || key == "authorization_servers";
        match (part(self.text), part(self.masked)) {
            (Some(text), Some(masked)) if text == masked => match key {
                _ if is_url => without_secret_path(typed),
                // Some clients accept arguments there.
                "command" => typed
                    .split_once(char::is_whitespace)
                    .map_or(typed.to_owned(), |(program, _)| format!("{program} {MASK}")),
                _ => typed.to_owned(),
            },
            (Some(_), Some(masked)) if is_url => without_secret_path(&shortened(&masked)),
            _ => MASK.to_owned(),
        }
    }
}

/// Returns the path of a key. A key with other characters than those of a bare key is quoted.
fn joined(path: &str, key: &str) -> String {
    let is_bare = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    let key = if is_bare { key.to_owned() } else { Json::from(key).to_string() };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// Replaces each masked part, which has the length of the secret.
fn shortened(masked: &str) -> String {
    let mut shown = String::new();
    for letter in masked.chars() {
        if letter != '*' {
            shown.push(letter);
        } else if !shown.ends_with('*') {
            shown.push_str(MASK);
        }
    }
    shown
}

fn without_secret_path(url: &str) -> String {
    let start = url.find("://").map_or(0, |colon| colon + 3);
    let path = url[start..].find('/').map_or(url.len(), |slash| start + slash);
    let end = url.find(['?', '#']).unwrap_or(url.len()).max(path);
    let parts = url[path..end].split('/').map(|part| {
        let is_secret = part.len() >= PATH_PART_MAX || looks_secret("", part);
        if is_secret && !part.starts_with("env:") && !part.starts_with("file:") { MASK } else { part }
    });
    [&url[..path], &parts.collect::<Vec<_>>().join("/"), &url[end..]].concat()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{BackendDocument, parse, parse_mcp_json};

    const TOML: &str = r#"[satellite]
name = "dev-satellite-001"
[gateway]
listen = "127.0.0.1:7301"
hosts = ["a.example.com", "b.example.com"]
burst = 7
[events]
sink = "http"
url = "https://events.example.com/ingest?source=satellite"
token = "env:SINK"
[policy.restart]
window = "2m"
[servers."files.v2"]
command = "/opt/files"
args = ["--key", "SECRETargument", "--token=SECRETtoken"]
env = { API_KEY = "SECRETliteral", FROM = "env:KEY", PORT = "4711SECRET", LINE = "${env:KEY}SECRET" }
[[teams]]
id = "t"
slug = "acme"
[[teams.users]]
id = "u"
slug = "alice"
token = "env:TOKEN"
[teams.users.servers.abc]
env = { MORE = "SECRETofalice" }
[[teams.installations]]
id = "abc"
server = "files.v2"
[[teams.installations]]
id = "def"
server = "search"
transport = "http"
url = "https://search.example.com/api/v1SECRETpathSECRETpathSECRETpath/mcp?api_key=SECRETkey"
headers = { X-Api-Key = "SECRETheader" }
bearer_token = "file:/dev/null/no"
"#;

    fn environment(name: &str) -> Option<String> {
        ["SINK", "KEY", "TOKEN"].contains(&name).then(|| format!("SECRETof{name}0123456789abcdef"))
    }

    fn shown(values: &[ConfiguredValue]) -> BTreeMap<&str, String> {
        let line = |value: &ConfiguredValue| format!("{} ({})", value.value, value.source);
        values.iter().map(|value| (value.path.as_str(), line(value))).collect()
    }

    fn assert_no_secret(values: &[ConfiguredValue]) {
        let json = serde_json::to_string(values).unwrap();
        assert!(!json.contains("SECRET"), "{json}");
        assert!(values.iter().any(|value| value.value.contains(MASK)), "{json}");
    }

    #[test]
    fn each_value_has_its_line_or_is_a_default_and_no_secret_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let (name, secret) = (folder.path().join("satellite.toml"), folder.path().join("key"));
        std::fs::write(&secret, "SECRETbearer").unwrap();
        let text = TOML.replace("/dev/null/no", secret.to_str().unwrap());
        let plan = parse(name.to_str().unwrap(), &text, &environment).unwrap();
        let values = plan.configured_values(&plan.origin);
        assert_no_secret(&values);
        let shown = shown(&values);
        assert_eq!(shown.len(), values.len(), "each path once");
        let file = name.to_str().unwrap();
        for (path, value, line) in [
            ("satellite.name", "dev-satellite-001", 2),
            ("gateway.hosts[1]", "b.example.com", 5),
            ("gateway.burst", "7", 6),
            ("events.url", "https://events.example.com/ingest***", 9),
            ("events.token", "env:SINK", 10),
            ("policy.restart.window", "2m", 12),
            ("servers.\"files.v2\".command", "/opt/files", 14),
            ("servers.\"files.v2\".args[0]", MASK, 15),
            ("servers.\"files.v2\".args[2]", MASK, 15),
            ("servers.\"files.v2\".env.API_KEY", MASK, 16),
            ("servers.\"files.v2\".env.FROM", "env:KEY", 16),
            ("servers.\"files.v2\".env.LINE", MASK, 16),
            ("teams[0].users[0].servers.abc.env.MORE", MASK, 25),
            ("teams[0].installations[1].url", "https://search.example.com/api/***/mcp***", 33),
            ("teams[0].installations[1].headers.X-Api-Key", MASK, 34),
        ] {
            assert_eq!(shown[path], format!("{value} ({file}:{line})"), "{path}");
        }
        for (path, value) in [
            ("satellite.retention", "1day"),
            ("gateway.auth", "bearer"),
            ("gateway.body_max", &plan.gateway.limits.body_max.to_string()),
            ("policy.restart.max_crashes", "3"),
            ("policy.restart.delays", "1s, 5s, 15s"),
            ("policy.reconnect.attempts_max", "none"),
            ("policy.memory.pressure_max_percent", &plan.memory.pressure_max_percent.to_string()),
            ("journal.request_logs_max", "100"),
        ] {
            assert_eq!(shown[path], format!("{value} (default)"), "{path}");
        }
        assert!(!shown.contains_key("gateway.hosts") && !shown.contains_key("policy.restart.window (default)"));
        let plan = plan.with_listen_address("127.0.0.1:9000".parse().unwrap()).unwrap();
        let values = plan.configured_values(&plan.origin);
        let listen: Vec<_> = values.iter().filter(|value| value.path == "gateway.listen").collect();
        assert!(
            matches!(&listen[..], [one] if one.value == "127.0.0.1:9000" && one.source == ValueSource::CommandLine)
        );
    }

    #[test]
    fn of_the_file_of_a_client_only_servers_are_shown() {
        let text = r#"{
  "oauthAccount": { "email": "SECRETmail", "count": 4711 },
  "mcpServers": {
    "files": { "command": "npx -y files --key SECRETkey", "args": ["SECRETa"], "env": { "KEY": "SECRETb" } },
    "web": { "url": "https://e.com/s/SECRETpathSECRETpathSECRETpath/mcp", "headers": { "X": "SECRETc" } }
  }
}"#;
        let plan = parse_mcp_json("/home/u/.mcp.json", text, &Plan::default().base, &|_| None).unwrap();
        let values = plan.configured_values(&plan.origin);
        assert_no_secret(&values);
        let shown = shown(&values);
        assert!(shown.keys().all(|path| !path.contains("oauthAccount")));
        assert_eq!(shown["mcpServers.files.command"], "npx *** (/home/u/.mcp.json:4)");
        assert_eq!(shown["mcpServers.web.url"], "https://e.com/s/***/mcp (/home/u/.mcp.json:5)");
        assert_eq!(shown["mcpServers.web.headers.X"], "*** (/home/u/.mcp.json:5)");
    }

    #[test]
    fn the_secrets_of_a_document_of_the_backend_are_masked() {
        let json = |text: &str| serde_json::from_str::<Json>(text).unwrap();
        let servers = json(r#"{ "files": { "command": "/opt/files", "env": { "KEY": "SECRETliteral" } } }"#);
        let teams = json(
            r#"[{ "id": "t", "slug": "acme", "users": [{ "id": "u", "slug": "alice" }],
                 "installations": [{ "id": "a", "server": "files" }, { "id": "b", "server": "web", "transport": "http",
                 "url": "https://e.com/mcp", "bearer_token": "SECRETtoken", "headers": { "X": "SECRETheader" } }] }]"#,
        );
        let document = BackendDocument::new("hash".to_owned(), &servers, &teams).unwrap();
        let plan = document.plan(&Plan::default().base).unwrap();
        let values = plan.configured_values(&plan.origin);
        assert_no_secret(&values);
        let shown = shown(&values);
        assert_eq!(shown["servers.files.command"], "/opt/files (the backend's configuration:4)");
        assert!(shown["teams[0].installations[1].bearer_token"].starts_with("*** (the backend's configuration:"));
    }

    #[test]
    fn every_value_of_the_fixtures_that_can_be_a_secret_is_masked_or_a_reference() {
        let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/config");
        let variable = |name: &str| Some(format!("SECRETof{name}0123456789"));
        for file in ["full.toml", "claude_desktop_config.json", "cursor.json", "vscode.json"] {
            let (path, text) = (fixtures.join(file), std::fs::read_to_string(fixtures.join(file)).unwrap());
            let name = path.to_str().unwrap();
            let plan = if file == "full.toml" {
                parse(name, &text, &variable)
            } else {
                parse_mcp_json(name, &text, &Plan::default().base, &variable)
            };
            let plan = plan.unwrap();
            let values = plan.configured_values(&plan.origin);
            assert_no_secret(&values);
            let is_hidden = |path: &str| {
                [".env.", ".headers.", ".args[", ".tokens[", "token"].iter().any(|part| path.contains(part))
            };
            let hidden: Vec<_> = values.iter().filter(|value| is_hidden(&value.path)).collect();
            assert!(!hidden.is_empty(), "{file}");
            for ConfiguredValue { path, value, .. } in hidden {
                let is_reference = value.starts_with("env:") || value.starts_with("file:");
                assert!(value == MASK || is_reference, "{file}: {path} = {value}");
            }
        }
    }
}
