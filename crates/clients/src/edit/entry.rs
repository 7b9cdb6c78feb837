//! The entry `satellite` of each client: its shape, how it refers to the token, and the file that contains it.
//!
//! The token never appears in an entry. The bridge `satellite stdio` reads it from its file. An HTTP entry refers to an
//! environment variable or a file, if the client replaces such references in headers.

use std::path::{Path, PathBuf};

use super::error::EditError;
use crate::Client;
use crate::locations::{FileFormat, Machine};
use crate::node::{ConfigNode, map, text};

/// The name of the entry in each client's configuration.
pub const ENTRY_NAME: &str = "satellite";

/// The environment variable that HTTP entries refer to. An entry that refers to it counts as ours.
pub const TOKEN_VARIABLE: &str = "SATELLITE_TOKEN";

/// Goose's timeout of a call, in seconds: the default of its own configuration dialogue.
const GOOSE_TIMEOUT: &str = "300";

/// An entry that connects a client to the satellite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SatelliteEntry {
    /// The client starts the bridge.
    Stdio {
        /// Absolute path of the executable `satellite`.
        command: String,
        /// Arguments; the first is `stdio`.
        args: Vec<String>,
    },
    /// The client connects to the endpoint.
    Http {
        /// The endpoint, without user name, password and query.
        url: String,
        /// Where the client finds the token.
        token: TokenReference,
    },
}

/// A reference to the token in a client's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenReference {
    /// The name of an environment variable of the client, usually [`TOKEN_VARIABLE`].
    Environment(String),
    /// Absolute path of a file that contains only the token.
    File(String),
}

/// The kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::Display)]
pub enum EntryForm {
    /// The bridge `satellite stdio`.
    #[strum(serialize = "stdio bridge")]
    Stdio,
    /// HTTP with the token in an environment variable.
    #[strum(serialize = "HTTP with an environment variable")]
    HttpEnvironment,
    /// HTTP with the token in a file.
    #[strum(serialize = "HTTP with a token file")]
    HttpFile,
}

impl SatelliteEntry {
    /// Returns the endpoint of an HTTP entry.
    pub fn url(&self) -> Option<&str> {
        match self {
            Self::Http { url, .. } => Some(url),
            Self::Stdio { .. } => None,
        }
    }

    /// Returns an entry that starts the bridge without options.
    pub fn bridge(command: impl Into<String>) -> Self {
        Self::Stdio { command: command.into(), args: vec!["stdio".to_owned()] }
    }

    /// Returns the kind of the entry.
    pub fn form(&self) -> EntryForm {
        match self {
            Self::Stdio { .. } => EntryForm::Stdio,
            Self::Http { token: TokenReference::Environment(_), .. } => EntryForm::HttpEnvironment,
            Self::Http { token: TokenReference::File(_), .. } => EntryForm::HttpFile,
        }
    }

    /// Rejects relative commands and text that could contain the token.
    fn validate(&self) -> Result<(), EditError> {
        let reject = |reason| Err(EditError::InvalidEntry { reason });
        match self {
            Self::Stdio { command, args } => {
                let is_windows_path = command.get(1..3).is_some_and(|drive| drive == ":\\" || drive == ":/");
                if !command.starts_with('/') && !is_windows_path {
                    return reject("the path of the command is not absolute");
                }
                if !is_bridge(command, args.first().map(String::as_str)) {
                    return reject("the command is not `satellite stdio`");
                }
            }
            Self::Http { url, token } => {
                let address = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")).unwrap_or_default();
                if address.is_empty() || address.contains(['@', '?', '#']) {
                    return reject("the URL is not an HTTP URL without user name, password and query");
                }
                match token {
                    TokenReference::Environment(name) => {
                        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
                        if name.is_empty() || name.as_bytes()[0].is_ascii_digit() || !name.bytes().all(is_name) {
                            return reject("the name of the environment variable is invalid");
                        }
                    }
                    TokenReference::File(path) => {
                        if !Path::new(path).is_absolute() || path.contains(['{', '}', '\n']) {
                            return reject("the path of the token file is not absolute or contains braces");
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the kinds of entries that a client supports, the default first.
///
/// The default is the bridge for all clients: desktop applications do not inherit the environment of a shell, and the
/// bridge starts a satellite if none runs. (opencode rejects its whole configuration if a `{file:…}` does not exist.)
pub fn supported_forms(client: Client) -> &'static [EntryForm] {
    use EntryForm::{HttpEnvironment, HttpFile, Stdio};
    match client {
        // code.claude.com/docs/en/mcp, "Environment variable expansion": `${VAR}` in command, args, env, url, headers.
        // Also in the user scope: microsoft.github.io/apm/reference/mcp-variable-compatibility.
        Client::ClaudeCode => &[Stdio, HttpEnvironment],
        // modelcontextprotocol.io/docs/develop/connect-local-servers: the file contains commands only.
        Client::ClaudeDesktop => &[Stdio],
        // cursor.com/docs/mcp, "Config interpolation": `${env:NAME}` in command, args, env, url and headers.
        Client::Cursor => &[Stdio, HttpEnvironment],
        // microsoft/vscode-docs docs/copilot/reference/mcp-configuration.md: predefined variables, for example `${env:NAME}`.
        Client::VsCode => &[Stdio, HttpEnvironment],
        // docs.windsurf.com/windsurf/cascade/mcp, "Config interpolation": `${env:NAME}` and `${file:/path}` in headers.
        Client::Windsurf => &[Stdio, HttpEnvironment, HttpFile],
        // cline/cline apps/vscode/src/utils/envExpansion.ts and services/mcp/McpHub.ts: `${env:NAME}` in all strings, in
        // the extension only, see `entry_warnings`.
        Client::Cline => &[Stdio, HttpEnvironment],
        // RooCodeInc/Roo-Code src/services/mcp/McpHub.ts (`injectVariables`) and src/utils/config.ts: `${env:NAME}`.
        Client::RooCode => &[Stdio, HttpEnvironment],
        // continuedev/continue packages/config-yaml/src/load/unroll.ts: `${{ secrets.NAME }}`, from the environment and
        // `~/.continue/.env`; core/context/mcp/MCPConnection.ts: requestOptions.headers.
        Client::Continue => &[Stdio, HttpEnvironment],
        // zed-industries/zed docs/src/ai/mcp.md: headers are literal.
        Client::Zed => &[Stdio],
        // openai/codex codex-rs/config/src/mcp_types.rs: bearer_token_env_var.
        Client::Codex => &[Stdio, HttpEnvironment],
        // google-gemini/gemini-cli packages/cli/src/config/settings.ts (`resolveEnvVarsInObject`): `${VAR}` in all strings.
        Client::GeminiCli => &[Stdio, HttpEnvironment],
        // block/goose crates/goose/src/agents/extension_manager.rs (`substitute_env_vars`): `${VAR}` in headers, for the
        // variables in env_keys.
        Client::Goose => &[Stdio, HttpEnvironment],
        // anomalyco/opencode packages/opencode/src/config/variable.ts: `{file:PATH}` and `{env:NAME}` in the whole text.
        Client::OpenCode => &[Stdio, HttpFile, HttpEnvironment],
        // lmstudio.ai/docs/app/mcp: headers are literal.
        Client::LmStudio => &[Stdio],
        // aws/amazon-q-developer-cli crates/chat-cli/src/mcp_client/client.rs (`substitute_env_vars`): headers, in the
        // command line only, see `entry_warnings`.
        Client::AmazonQ => &[Stdio, HttpEnvironment],
        // jetbrains.com/help/junie/model-context-protocol-mcp.html: headers of remote servers are literal.
        Client::Junie => &[Stdio],
    }
}

/// Returns the files of the user scope that can contain the entry: connect edits the first that exists, or creates the
/// first.
///
/// opencode reads its own configuration besides `OPENCODE_CONFIG` and `OPENCODE_CONFIG_DIR`. Profiles of VS Code are not
/// included.
pub fn connect_paths(client: Client, machine: &Machine) -> Vec<PathBuf> {
    let Machine { home, config_home, .. } = machine;
    let extension =
        |id: &str, file: &str| config_home.join("Code/User/globalStorage").join(id).join("settings").join(file);
    let path = match client {
        Client::ClaudeCode => machine.claude_json(),
        Client::ClaudeDesktop => config_home.join("Claude/claude_desktop_config.json"),
        Client::Cursor => home.join(".cursor/mcp.json"),
        Client::VsCode => config_home.join("Code/User/mcp.json"),
        Client::Windsurf => return machine.windsurf_files().to_vec(),
        // cline/cline sdk/packages/shared/src/storage/paths.ts; older versions kept the file in VS Code's storage.
        Client::Cline => {
            let name = "cline_mcp_settings.json";
            let current = machine.cline_settings();
            if current == home.join(".cline/data/settings").join(name) {
                return vec![current, extension("saoudrizwan.claude-dev", name)];
            }
            current
        }
        Client::RooCode => extension("rooveterinaryinc.roo-cline", "mcp_settings.json"),
        // continuedev/continue core/config/loadLocalAssistants.ts: each file of this directory is loaded. The file is
        // ours, so `config.yaml` stays as it is; `connect --replace` edits `config.yaml` instead.
        Client::Continue => machine.continue_dir().join("mcpServers/satellite.yaml"),
        Client::Zed => return machine.zed_settings().to_vec(),
        Client::Codex => machine.codex_dir().join("config.toml"),
        Client::GeminiCli => machine.gemini_settings(),
        Client::Goose => machine.goose_configuration(),
        Client::OpenCode => {
            return ["opencode.json", "opencode.jsonc"]
                .iter()
                .map(|name| config_home.join("opencode").join(name))
                .collect();
        }
        Client::LmStudio => home.join(".lmstudio/mcp.json"),
        // aws/amazon-q-developer-cli crates/chat-cli/src/util/paths.rs
        Client::AmazonQ => home.join(".aws/amazonq/mcp.json"),
        Client::Junie => home.join(".junie/mcp/mcp.json"),
    };
    vec![path]
}

/// The place of the servers in a client's file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServersPlace {
    pub(crate) format: FileFormat,
    /// The key of the root object.
    pub(crate) key: &'static str,
    /// The key of a second table of servers in the first one, whose servers win.
    pub(crate) nested: Option<&'static str>,
    /// Whether the servers are a list whose elements have a `name`.
    pub(crate) is_list: bool,
}

impl ServersPlace {
    /// Returns true for a key of the first table that is not a server.
    pub(crate) fn is_reserved(self, key: &str, value: &ConfigNode) -> bool {
        self.nested.is_some() && matches!(key, "servers" | "timeout") && is_opencode_table(value)
    }
}

pub(crate) fn section(client: Client) -> ServersPlace {
    let (format, key) = match client {
        Client::VsCode => (FileFormat::Json, "servers"),
        Client::Zed => (FileFormat::Json, "context_servers"),
        Client::OpenCode => (FileFormat::Json, "mcp"),
        Client::Codex => (FileFormat::Toml, "mcp_servers"),
        Client::Goose => (FileFormat::Yaml, "extensions"),
        Client::Continue => (FileFormat::Yaml, "mcpServers"),
        _ => (FileFormat::Json, "mcpServers"),
    };
    // anomalyco/opencode packages/core/src/config/normalize.ts: version 2 has both tables.
    let nested = (client == Client::OpenCode).then_some("servers");
    ServersPlace { format, key, nested, is_list: client == Client::Continue }
}

/// Returns true for a value of `mcp.servers` or `mcp.timeout` in opencode that is not a server with that name
/// (`isDirectLegacyMcp` in anomalyco/opencode packages/core/src/config/normalize.ts).
pub(crate) fn is_opencode_table(value: &ConfigNode) -> bool {
    let kind = value.get("type").and_then(ConfigNode::as_text);
    value.as_map().is_some() && !matches!(kind, Some("local" | "remote"))
}

/// Returns the text that a new file needs besides the servers.
pub(crate) fn preamble(client: Client) -> &'static str {
    match client {
        // continuedev/continue packages/config-yaml/src/schemas/index.ts
        Client::Continue => "name: satellite\nversion: 0.0.1\nschema: v1\n",
        // anomalyco/opencode packages/opencode/src/config/config.ts: version 1 rewrites a file without the key.
        Client::OpenCode => "{\n  \"$schema\": \"https://opencode.ai/config.json\"\n}\n",
        _ => "",
    }
}

/// Returns the entry in the shape of the client.
pub(crate) fn entry_tree(client: Client, entry: &SatelliteEntry) -> Result<ConfigNode, EditError> {
    let form = entry.form();
    if !supported_forms(client).contains(&form) {
        return Err(EditError::UnsupportedForm { client, form });
    }
    entry.validate()?;
    Ok(match entry {
        SatelliteEntry::Stdio { command, args } => stdio_tree(client, command, args),
        SatelliteEntry::Http { url, token } => http_tree(client, url, token),
    })
}

fn stdio_tree(client: Client, command: &str, args: &[String]) -> ConfigNode {
    let args = || args.iter().map(text);
    let (kind, enabled, disabled) = (text("stdio"), ConfigNode::Bool(true), ConfigNode::Bool(false));
    let command = text(command);
    let list = |items: Vec<ConfigNode>| ConfigNode::List(items);
    match client {
        Client::ClaudeCode | Client::VsCode => {
            map([("type", kind), ("command", command), ("args", list(args().collect()))])
        }
        Client::Cline => {
            map([("type", kind), ("command", command), ("args", list(args().collect())), ("disabled", disabled)])
        }
        Client::RooCode => map([("command", command), ("args", list(args().collect())), ("disabled", disabled)]),
        Client::Continue => {
            map([("name", text(ENTRY_NAME)), ("type", kind), ("command", command), ("args", list(args().collect()))])
        }
        Client::Goose => map([
            ("enabled", enabled),
            ("type", kind),
            ("name", text(ENTRY_NAME)),
            ("description", text("")),
            ("cmd", command),
            ("args", list(args().collect())),
            ("timeout", ConfigNode::Literal(GOOSE_TIMEOUT.to_owned())),
        ]),
        Client::OpenCode => {
            let command = std::iter::once(command).chain(args()).collect();
            map([("type", text("local")), ("command", list(command)), ("enabled", enabled)])
        }
        _ => map([("command", command), ("args", list(args().collect()))]),
    }
}

fn http_tree(client: Client, url: &str, token: &TokenReference) -> ConfigNode {
    let reference = match (client, token) {
        (Client::OpenCode, TokenReference::Environment(name)) => format!("{{env:{name}}}"),
        (Client::OpenCode, TokenReference::File(path)) => format!("{{file:{path}}}"),
        (_, TokenReference::File(path)) => format!("${{file:{path}}}"),
        (Client::Continue, TokenReference::Environment(name)) => format!("${{{{ secrets.{name} }}}}"),
        (Client::ClaudeCode | Client::GeminiCli | Client::Goose, TokenReference::Environment(name)) => {
            format!("${{{name}}}")
        }
        (_, TokenReference::Environment(name)) => format!("${{env:{name}}}"),
    };
    let name = match token {
        TokenReference::Environment(name) | TokenReference::File(name) => text(name),
    };
    let headers = map([("Authorization", text(format!("Bearer {reference}")))]);
    let (url, enabled, disabled) = (text(url), ConfigNode::Bool(true), ConfigNode::Bool(false));
    match client {
        Client::ClaudeCode | Client::VsCode | Client::AmazonQ => {
            map([("type", text("http")), ("url", url), ("headers", headers)])
        }
        Client::Windsurf => map([("serverUrl", url), ("headers", headers)]),
        Client::Cline => {
            map([("type", text("streamableHttp")), ("url", url), ("headers", headers), ("disabled", disabled)])
        }
        Client::RooCode => {
            map([("type", text("streamable-http")), ("url", url), ("headers", headers), ("disabled", disabled)])
        }
        Client::Continue => map([
            ("name", text(ENTRY_NAME)),
            ("type", text("streamable-http")),
            ("url", url),
            ("requestOptions", map([("headers", headers)])),
        ]),
        Client::Codex => map([("url", url), ("bearer_token_env_var", name)]),
        // google-gemini/gemini-cli packages/core/src/config/config.ts: `httpUrl` is deprecated.
        Client::GeminiCli => map([("url", url), ("type", text("http")), ("headers", headers)]),
        Client::Goose => map([
            ("enabled", enabled),
            ("type", text("streamable_http")),
            ("name", text(ENTRY_NAME)),
            ("description", text("")),
            ("uri", url),
            ("headers", headers),
            ("env_keys", ConfigNode::List(vec![name])),
            ("timeout", ConfigNode::Literal(GOOSE_TIMEOUT.to_owned())),
        ]),
        // `oauth: false` prevents the search for an authorization server.
        Client::OpenCode => map([
            ("type", text("remote")),
            ("url", url),
            ("headers", headers),
            ("oauth", ConfigNode::Bool(false)),
            ("enabled", enabled),
        ]),
        _ => map([("url", url), ("headers", headers)]),
    }
}

/// Returns the kind of an entry that connect wrote, or `None` for an entry that somebody else wrote. An HTTP entry is ours
/// if its endpoint is `url` or if it refers to our token.
pub(crate) fn recognize(server: &ConfigNode, url: Option<&str>) -> Option<EntryForm> {
    let server = transport_of(server);
    let field = |names: &[&str]| names.iter().find_map(|name| server.get(name));
    if let Some(command) = field(&["command", "cmd"]) {
        let parts = command.as_list().unwrap_or_default();
        let (command, argument) = match command.as_text() {
            Some(command) => (command, server.get("args").and_then(|args| args.as_list()?.first())),
            None => (parts.first().and_then(ConfigNode::as_text)?, parts.get(1)),
        };
        return is_bridge(command, argument.and_then(ConfigNode::as_text)).then_some(EntryForm::Stdio);
    }
    let entry_url = field(&["url", "serverUrl", "httpUrl", "uri"])?.as_text()?;
    let options = server.get("requestOptions").unwrap_or(server);
    let header = options.get("headers").and_then(|headers| headers.get("Authorization"));
    let token = header.or_else(|| server.get("bearer_token_env_var")).and_then(ConfigNode::as_text).unwrap_or_default();
    let form = if token.contains("{file:") { EntryForm::HttpFile } else { EntryForm::HttpEnvironment };
    let refers_to_token = token.contains(TOKEN_VARIABLE) || form == EntryForm::HttpFile && token.contains(ENTRY_NAME);
    (refers_to_token || Some(entry_url) == url).then_some(form)
}

/// Returns the table with the keys of the transport. Cline's command line has it in `transport`
/// (cline/cline sdk/packages/core/src/extensions/mcp).
pub(crate) fn transport_of(server: &ConfigNode) -> &ConfigNode {
    server.get("transport").filter(|transport| transport.as_map().is_some()).unwrap_or(server)
}

fn is_bridge(command: &str, argument: Option<&str>) -> bool {
    let name = command.rsplit(['/', '\\']).next().unwrap_or_default();
    name.strip_suffix(".exe").unwrap_or(name).ends_with("satellite") && argument == Some("stdio")
}
