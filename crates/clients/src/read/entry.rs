//! One server of a client's file. The keys of all clients are read in one place, because users copy entries from one
//! client to another. A key that is read nowhere becomes a note.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::Client;
use crate::edit::recognize;
use crate::hidden::HiddenText;
use crate::locations::{ClientFile, ClientScope, FileFormat};
use crate::node::{ConfigNode, NodeKey};
use crate::server::{
    ClientServer, HttpProtocol, ImportNote, OAuthHints, ServerTimeouts, ServerTransport, ToolSelection,
};
use crate::template::{TemplatePart, TemplateSyntax, TextTemplate};

/// Programs whose names contain no space: the rest of a command that begins with one are arguments, even if there are
/// separate ones.
const LAUNCHERS: [&str; 10] = ["npx", "node", "uvx", "uv", "python", "python3", "deno", "bun", "bunx", "docker"];

/// Keys that describe a server or control the client, with their meaning. They have no counterpart in the satellite.
const WITHOUT_COUNTERPART: &[(&str, &str)] = &[
    ("alwaysAllow", "tools that run without confirmation"),
    ("authProviderType", "credentials of Google Cloud"),
    ("autoApprove", "tools that run without confirmation"),
    ("autoStart", "start with the client"),
    ("bundled", "part of the client's distribution"),
    ("callbackPort", "port of the OAuth redirect"),
    ("callback_port", "port of the OAuth redirect"),
    ("codemode", "use of the tools from code of the model"),
    ("default_tools_approval_mode", "confirmation of tool calls"),
    ("description", "description of the server"),
    ("dev", "restart on changes of the source"),
    ("display_name", "name in the user interface"),
    ("experimental_environment", "where the client starts the server"),
    ("extension", "extension that added the server"),
    ("faviconUrl", "icon of the server"),
    ("gallery", "origin in the gallery of the client"),
    ("headersHelper", "command that prints headers; set `headers` or OAuth instead"),
    ("icon", "icon of the server"),
    ("metadata", "data of the client about the server"),
    ("name", "name in the user interface"),
    ("remote", "start on the remote machine"),
    ("remoteConfigured", "origin in the organization's configuration"),
    ("required", "the client fails without the server"),
    ("sandbox", "sandbox of the client"),
    ("sandboxEnabled", "sandbox of the client"),
    ("serverName", "name in the registry"),
    ("settings", "settings of an extension"),
    ("sourceFile", "origin of the entry"),
    ("sourceSlug", "origin in the hub of the client"),
    ("supports_parallel_tool_calls", "parallel calls of the client"),
    ("targetAudience", "credentials of Google Cloud"),
    ("targetServiceAccount", "credentials of Google Cloud"),
    ("trust", "calls without confirmation"),
    ("version", "version in the gallery"),
    ("watchPaths", "restart on changes of files"),
];

/// Reads one server. The error is the reason why the server cannot be imported.
pub(crate) fn read_entry(
    file: &ClientFile,
    name: &str,
    scope: ClientScope,
    node: &ConfigNode,
) -> Result<ClientServer, String> {
    let entries = node.as_map().ok_or_else(|| format!("the entry is {}, not an object", node.kind()))?;
    let mut fields = EntryFields::new(file.client, file.format, entries);
    let transport = fields.transport()?;
    let enabled = fields.enabled()?;
    let tools = fields.tools()?;
    let timeouts = fields.timeouts();
    let is_satellite = recognize(node, None).is_some();
    let unknown_texts = fields.unknown_texts();
    let (name, notes, at) = (name.to_owned(), fields.finish(), None);
    Ok(ClientServer { name, scope, transport, enabled, is_satellite, tools, timeouts, notes, unknown_texts, at })
}

/// The fields of an entry that were not read yet.
struct EntryFields<'a> {
    client: Client,
    format: FileFormat,
    syntax: TemplateSyntax,
    fields: Vec<(&'a str, &'a ConfigNode)>,
    notes: Vec<ImportNote>,
}

/// A `type` or `transport`, whatever its spelling.
#[derive(Clone, Copy, PartialEq)]
enum TransportType {
    Stdio,
    Http(HttpProtocol),
}

impl<'a> EntryFields<'a> {
    fn new(client: Client, format: FileFormat, entries: &'a [(NodeKey, ConfigNode)]) -> Self {
        let syntax = syntax_of(client, format);
        let mut reader = Self { client, format, syntax, fields: Vec::new(), notes: Vec::new() };
        let mut positions: HashMap<&str, usize> = HashMap::new();
        for (key, value) in entries {
            if let Some(&earlier) = positions.get(key.as_str()) {
                reader.fields[earlier] = (key, value);
                reader.notes.push(adjusted(key, "the key occurs twice; the last value applies"));
            } else {
                positions.insert(key, reader.fields.len());
                reader.fields.push((key, value));
            }
        }
        reader
    }

    /// Removes the first of `keys` that is present and not null, and returns it. Further ones stay for the notes.
    fn take(&mut self, keys: &[&'static str]) -> Option<(&'static str, &'a ConfigNode)> {
        for &key in keys {
            if let Some(at) = self.fields.iter().position(|(name, _)| *name == key) {
                let (_, value) = self.fields.remove(at);
                if *value != ConfigNode::Null {
                    return Some((key, value));
                }
            }
        }
        None
    }

    fn has(&self, key: &str) -> bool {
        self.fields.iter().any(|(name, value)| *name == key && **value != ConfigNode::Null)
    }

    fn text(&mut self, keys: &[&'static str]) -> Result<Option<(&'static str, &'a str)>, String> {
        match self.take(keys) {
            None => Ok(None),
            Some((key, ConfigNode::Text(text))) => Ok(Some((key, text))),
            Some((key, other)) => Err(wrong_type(key, "a string", other)),
        }
    }

    fn template(&mut self, keys: &[&'static str]) -> Result<Option<TextTemplate>, String> {
        Ok(self.text(keys)?.filter(|(_, text)| !text.is_empty()).map(|(_, text)| self.syntax.parse(text)))
    }

    /// Parses a text. Adds a note if the client passes a variable on as it is written.
    fn parse(&mut self, key: &str, text: &str) -> TextTemplate {
        let is_goose_header = self.client == Client::Goose && key.starts_with("headers.");
        let is_template = |at: usize| self.syntax.double_braces && text[at..].starts_with("${{");
        let has_variable = text.match_indices("${").any(|(at, _)| !is_template(at));
        if !self.syntax.braces && has_variable && !is_goose_header {
            self.notes.push(adjusted(key, "imported as plain text, because the client does not expand `${…}`"));
        }
        self.syntax.parse(text)
    }

    fn texts(&mut self, keys: &[&'static str]) -> Result<Option<Vec<String>>, String> {
        let Some((key, value)) = self.take(keys) else { return Ok(None) };
        match value {
            ConfigNode::List(items) => items.iter().map(|item| scalar(key, item)).collect::<Result<_, _>>().map(Some),
            ConfigNode::Text(text) => Ok(Some(vec![text.clone()])),
            other => Err(wrong_type(key, "a list of strings", other)),
        }
    }

    /// Reads a table of texts. Numbers and booleans count as texts, and a null value is left out with a note.
    fn pairs(&mut self, keys: &[&'static str]) -> Result<Vec<(String, TextTemplate)>, String> {
        let mut pairs: Vec<(String, TextTemplate)> = Vec::new();
        let mut positions: HashMap<&str, usize> = HashMap::new();
        for &first in keys {
            let Some((key, value)) = self.take(&[first]) else { continue };
            let Some(entries) = value.as_map() else { return Err(wrong_type(key, "an object", value)) };
            for (name, value) in entries {
                let place = format!("{key}.{}", name.name);
                if *value == ConfigNode::Null {
                    self.notes.push(adjusted(&place, "null is not imported"));
                    continue;
                }
                let text = self.parse(&place, &scalar(&place, value)?);
                if let Some(&earlier) = positions.get(name.as_str()) {
                    pairs[earlier].1 = text;
                    self.notes.push(adjusted(&place, "the key occurs twice; the last value applies"));
                } else {
                    positions.insert(name, pairs.len());
                    pairs.push((name.name.clone(), text));
                }
            }
        }
        Ok(pairs)
    }

    fn flag(&mut self, keys: &[&'static str]) -> Result<Option<bool>, String> {
        match self.take(keys) {
            None => Ok(None),
            Some((_, ConfigNode::Bool(flag))) => Ok(Some(*flag)),
            Some((_, ConfigNode::Text(text))) if text == "true" || text == "false" => Ok(Some(text == "true")),
            Some((key, other)) => Err(wrong_type(key, "a boolean", other)),
        }
    }

    fn transport(&mut self) -> Result<ServerTransport, String> {
        // config.json of Continue: { "transport": { "type": "stdio", "command": … } }.
        if let Some((_, ConfigNode::Map(inner))) = self.fields.iter().find(|(name, _)| *name == "transport") {
            self.fields.retain(|(name, _)| *name != "transport");
            self.fields.extend(inner.iter().map(|(key, value)| (key.as_str(), value)));
        }
        // Goose: crates/goose/src/agents/extension.rs, `ExtensionConfig::StreamableHttp`.
        if self.client == Client::Goose && self.has("socket") {
            return Err("HTTP over a Unix socket is not supported; let the server listen on a port".to_owned());
        }
        if self.has("uses") {
            return Err("a block of the Continue hub; add the server with its `command` or `url`".to_owned());
        }
        let source = self.text(&["source"])?.map(|(_, source)| source);
        if source == Some("extension") {
            return Err(ZED_EXTENSION.to_owned());
        }
        let declared = self.declared_type()?;
        let url = self.text(&["httpUrl", "url", "serverUrl", "server_url", "uri"])?.filter(|(_, url)| !url.is_empty());
        let has_command = ["command", "cmd"].iter().any(|key| self.has(key) && !self.is_empty_text(key));
        match (declared, url) {
            (Some(TransportType::Stdio) | None, _) if has_command => {
                if let Some((key, _)) = url {
                    self.notes.push(adjusted(key, "not imported, because the server has a command"));
                }
                self.stdio()
            }
            (Some(TransportType::Stdio), _) => Err("`command` is missing; a stdio server needs it".to_owned()),
            (declared, Some((key, url))) => {
                let kind = match declared {
                    // aws/amazon-q-developer-cli crates/chat-cli/src/mcp_client/client.rs tries streamable HTTP, then SSE.
                    Some(TransportType::Http(HttpProtocol::Streamable)) if self.client == Client::AmazonQ => {
                        HttpProtocol::Unspecified
                    }
                    Some(TransportType::Http(kind)) => kind,
                    _ => self.default_protocol(key),
                };
                self.http(url, kind)
            }
            (Some(_), None) => Err("`url` is missing; a remote server needs it".to_owned()),
            (None, None) if self.has("settings") => Err(ZED_EXTENSION.to_owned()),
            (None, None) if self.has("enabled") && self.fields.len() == 1 => {
                Err("the entry only enables or disables a server that is defined elsewhere".to_owned())
            }
            (None, None) => Err("neither `command` nor `url` is set; add one of them".to_owned()),
        }
    }

    fn is_empty_text(&self, key: &str) -> bool {
        self.fields.iter().any(|(name, value)| *name == key && value.as_text() == Some(""))
    }

    fn declared_type(&mut self) -> Result<Option<TransportType>, String> {
        let mut declared = None;
        for key in ["type", "transport", "transportType"] {
            let Some((_, text)) = self.text(&[key])? else { continue };
            let spelling: String = text.chars().filter(char::is_ascii_alphanumeric).collect();
            let found = match spelling.to_ascii_lowercase().as_str() {
                "" => continue,
                "stdio" | "local" => TransportType::Stdio,
                "http" | "https" | "streamable" | "streamablehttp" | "httpstream" => {
                    TransportType::Http(HttpProtocol::Streamable)
                }
                "sse" | "httpsse" => TransportType::Http(HttpProtocol::Sse),
                "remote" => TransportType::Http(HttpProtocol::Unspecified),
                "ws" | "wss" | "websocket" => {
                    return Err("WebSocket is not a transport of MCP that the satellite supports".to_owned());
                }
                // Goose: crates/goose/src/agents/extension.rs, `ExtensionConfig`.
                "builtin" | "platform" | "frontend" => {
                    return Err(format!("an extension of type `{text}` is a part of the client, not a server"));
                }
                "inlinepython" => {
                    return Err(
                        "an extension of type `inline_python` is code in the file; save it as a server".to_owned()
                    );
                }
                // aws/language-servers: `McpRegistryService` looks the server up by its name.
                "registry" => {
                    return Err("the server comes from the organization's registry; add it by its `url`".to_owned());
                }
                "sdk" => return Err("a server of type `sdk` runs inside the client".to_owned()),
                _ => return Err(format!("{key} {} is not supported; use stdio, http or sse", quoted(text))),
            };
            match declared {
                None => declared = Some(found),
                Some(first) if first != found => self.notes.push(adjusted(key, "not used; it contradicts `type`")),
                Some(_) => {}
            }
        }
        Ok(declared)
    }

    /// Returns the protocol for a URL without a type.
    fn default_protocol(&self, key: &str) -> HttpProtocol {
        match self.client {
            // packages/core/src/tools/mcp-client.ts of Gemini CLI: `httpUrl` is streamable HTTP; `url` without a type is
            // tried as streamable HTTP first and then as SSE.
            _ if key == "httpUrl" => HttpProtocol::Streamable,
            // codex-rs/config/src/mcp_types.rs of Codex: `McpServerTransportConfig::StreamableHttp`.
            Client::Codex => HttpProtocol::Streamable,
            // zed-industries/zed crates/context_server/src/transport/http.rs.
            Client::Zed => HttpProtocol::Streamable,
            // src/services/mcp/schemas.ts of Cline: the SSE schema precedes the one of streamable HTTP.
            Client::Cline => HttpProtocol::Sse,
            _ => HttpProtocol::Unspecified,
        }
    }

    fn stdio(&mut self) -> Result<ServerTransport, String> {
        let mut env_first = Vec::new();
        let (command, mut args) = match self.take(&["command", "cmd"]) {
            Some((key, ConfigNode::Text(text))) => self.command_text(key, text)?,
            // opencode: the command and its arguments are one list (opencode.ai/docs/mcp-servers).
            Some((key, ConfigNode::List(items))) => {
                let words = items.iter().map(|item| scalar(key, item)).collect::<Result<Vec<_>, _>>()?;
                let mut words = words.iter().map(|word| self.syntax.parse(word));
                (words.next().ok_or_else(|| format!("`{key}` is an empty list"))?, words.collect())
            }
            // Zed before 2025-11: { "command": { "path": …, "args": […], "env": {…} } }.
            Some((_, ConfigNode::Map(inner))) => {
                let mut fields = EntryFields::new(self.client, self.format, inner);
                let command = fields.template(&["path", "command"])?.ok_or("`command.path` is missing")?;
                let args = fields.args()?;
                env_first = fields.pairs(&["env"])?;
                self.notes.extend(fields.finish().into_iter().map(|note| within("command", note)));
                (command, args)
            }
            Some((key, other)) => return Err(wrong_type(key, "a string", other)),
            None => return Err("`command` is missing; a stdio server needs it".to_owned()),
        };
        args.extend(self.args()?);
        let mut env = env_first;
        env.extend(self.pairs(&["env", "environment", "envs"])?);
        // Codex: variables of its own environment. Goose: names of secrets in its keyring.
        let mut names: HashSet<String> = env.iter().map(|(name, _)| name.clone()).collect();
        for name in self.names("env_vars")? {
            if names.insert(name.clone()) {
                env.push((name.clone(), TextTemplate::part(TemplatePart::Variable { name, default: None })));
            }
        }
        for name in self.names("env_keys")? {
            if names.insert(name.clone()) {
                env.push((name.clone(), TextTemplate::part(TemplatePart::Secret { name })));
            }
        }
        let cwd = self.template(&["cwd", "workingDirectory", "working_directory"])?;
        let env_file = self.template(&["envFile", "env_file"])?;
        for key in
            ["headers", "http_headers", "env_http_headers", "bearer_token_env_var", "oauth", "scopes", "requestOptions"]
        {
            if let Some((key, value)) = self.take(&[key])
                && value.as_map().is_none_or(|map| !map.is_empty())
            {
                self.notes.push(adjusted(key, "not imported, because a stdio server has no HTTP settings"));
            }
        }
        Ok(ServerTransport::Stdio { command, args, env, cwd, env_file })
    }

    /// Reads a command, which can contain its arguments.
    fn command_text(&mut self, key: &'static str, text: &str) -> Result<(TextTemplate, Vec<TextTemplate>), String> {
        let text = text.trim();
        let args_are_given = self.fields.iter().any(|(name, value)| {
            *name == "args" && value.as_list().map_or(**value != ConfigNode::Null, |args| !args.is_empty())
        });
        let is_launcher = text.split_whitespace().next().is_some_and(|word| LAUNCHERS.contains(&word));
        if !text.contains(char::is_whitespace) || args_are_given && !is_launcher {
            return Ok((self.syntax.parse(text), Vec::new()));
        }
        if is_path_with_spaces(text) {
            self.notes.push(adjusted(key, "read as one path with spaces"));
            return Ok((self.syntax.parse(text), Vec::new()));
        }
        let words = shlex::split(text).ok_or_else(|| format!("`{key}` contains a quote that is not closed"))?;
        let mut words = words.iter().map(|word| self.syntax.parse(word));
        let command = words.next().ok_or_else(|| format!("`{key}` is empty"))?;
        self.notes.push(adjusted(key, "split into the command and its arguments"));
        Ok((command, words.collect()))
    }

    fn args(&mut self) -> Result<Vec<TextTemplate>, String> {
        match self.take(&["args", "arguments"]) {
            None => Ok(Vec::new()),
            Some((key, ConfigNode::List(items))) => {
                items.iter().map(|item| Ok(self.parse(key, &scalar(key, item)?))).collect()
            }
            Some((key, ConfigNode::Text(text))) => {
                let words = shlex::split(text).ok_or_else(|| format!("`{key}` contains a quote that is not closed"))?;
                self.notes.push(adjusted(key, "split into words"));
                Ok(words.iter().map(|word| self.syntax.parse(word)).collect())
            }
            Some((key, other)) => Err(wrong_type(key, "a list of strings", other)),
        }
    }

    /// Reads a list of names. Codex also accepts `{ name = "…", source = "…" }`.
    fn names(&mut self, key: &'static str) -> Result<Vec<String>, String> {
        let Some((key, value)) = self.take(&[key]) else { return Ok(Vec::new()) };
        let items = value.as_list().ok_or_else(|| wrong_type(key, "a list of strings", value))?;
        let mut names = Vec::new();
        for item in items {
            let name = item.get("name").unwrap_or(item);
            names.push(name.as_text().ok_or_else(|| wrong_type(key, "a list of strings", name))?.to_owned());
            if item.get("source").and_then(ConfigNode::as_text).is_some_and(|source| source != "local") {
                self.notes.push(adjusted(key, "the source of a variable is not imported"));
            }
        }
        Ok(names)
    }

    fn http(&mut self, url: &str, kind: HttpProtocol) -> Result<ServerTransport, String> {
        let url = self.syntax.parse(url.trim());
        let prefix = url.literal_prefix().to_ascii_lowercase();
        let has_scheme = prefix.starts_with("http://") || prefix.starts_with("https://");
        let begins_with_variable = prefix.is_empty() && !url.parts.is_empty();
        if !has_scheme && !begins_with_variable {
            return Err("the URL must begin with http:// or https://".to_owned());
        }
        let mut headers = self.pairs(&["headers", "http_headers"])?;
        // Continue: packages/config-yaml/src/schemas/mcp/index.ts and schemas/models.ts.
        if let Some((key, ConfigNode::Map(options))) = self.take(&["requestOptions"]) {
            let mut fields = EntryFields::new(self.client, self.format, options);
            headers.extend(fields.pairs(&["headers"])?);
            self.notes.extend(fields.finish().into_iter().map(|note| within(key, note)));
        }
        for key in ["apiKey", "bearer_token"] {
            if let Some((key, token)) = self.text(&[key])? {
                headers.push(("Authorization".to_owned(), self.syntax.parse(&format!("Bearer {token}"))));
                self.notes.push(adjusted(key, "imported as the header `Authorization`"));
            }
        }
        // Goose: `envs` and `env_keys` of a remote extension are the variables of its headers only.
        let envs = self.pairs(&["env", "environment", "envs"])?;
        let keys = self.names("env_keys")?;
        if self.client == Client::Goose {
            for (_, header) in &mut headers {
                *header = expand_goose_header(header.literal_prefix(), &envs, &keys);
            }
        } else if !envs.is_empty() {
            self.notes.push(adjusted("env", "not imported, because a remote server has no environment"));
        }
        let bearer_token_env = self.text(&["bearer_token_env_var"])?.map(|(_, name)| name.to_owned());
        let mut env_headers = Vec::new();
        if let Some((key, value)) = self.take(&["env_http_headers"]) {
            for (name, variable) in value.as_map().ok_or_else(|| wrong_type(key, "an object", value))? {
                env_headers.push((name.name.clone(), scalar(key, variable)?));
            }
        }
        let oauth = self.oauth()?;
        for key in ["args", "cwd", "envFile"] {
            if let Some((key, value)) = self.take(&[key])
                && value.as_list().is_none_or(|list| !list.is_empty())
            {
                self.notes.push(adjusted(key, "not imported, because a remote server has no process"));
            }
        }
        Ok(ServerTransport::Http { url, kind, headers, bearer_token_env, env_headers, oauth })
    }

    /// Reads OAuth settings: `oauth` of Claude Code, VS Code, Codex, Gemini CLI, opencode and Amazon Q, `auth` of Cursor,
    /// `oauthClient` of Cline, `scopes` of Codex and `oauthScopes` of Amazon Q.
    fn oauth(&mut self) -> Result<Option<OAuthHints>, String> {
        let mut hints = OAuthHints::default();
        // Cline stores its tokens in `oauth` (cline/cline sdk/packages/core/src/mcp).
        if self.client == Client::Cline && self.take(&["oauth"]).is_some() {
            let meaning = "tokens of the client; log in again with `satellite auth`";
            self.notes.push(ImportNote::NoCounterpart { key: "oauth".to_owned(), meaning });
        }
        match self.take(&["oauth", "auth", "oauthClient"]) {
            None => {}
            Some((_, ConfigNode::Bool(flag))) => hints.disabled = !flag,
            Some((key, ConfigNode::Map(inner))) => {
                let mut fields = EntryFields::new(self.client, self.format, inner);
                hints.disabled = fields.flag(&["enabled"])? == Some(false);
                hints.client_id = fields.template(&["clientId", "client_id", "CLIENT_ID"])?;
                hints.client_secret = fields.template(&["clientSecret", "client_secret", "CLIENT_SECRET"])?;
                hints.scopes = scopes(fields.texts(&["scopes", "scope"])?);
                hints.resource = fields.owned(&["resource"])?;
                hints.authorization_url = fields.owned(&["authorizationUrl", "authorization_url"])?;
                hints.token_url = fields.owned(&["tokenUrl", "token_url"])?;
                hints.metadata_url = fields.owned(&["authServerMetadataUrl"])?;
                hints.redirect_uri = fields.owned(&["redirectUri", "redirect_uri"])?;
                self.notes.extend(fields.finish().into_iter().map(|note| within(key, note)));
            }
            Some((key, other)) => return Err(wrong_type(key, "an object", other)),
        }
        hints.scopes.extend(scopes(self.texts(&["scopes", "oauthScopes"])?));
        if let Some(resource) = self.owned(&["oauth_resource"])? {
            hints.resource = Some(resource);
        }
        Ok((hints != OAuthHints::default()).then_some(hints))
    }

    fn owned(&mut self, keys: &[&'static str]) -> Result<Option<String>, String> {
        Ok(self.text(keys)?.map(|(_, text)| text.to_owned()))
    }

    fn enabled(&mut self) -> Result<bool, String> {
        let enabled = self.flag(&["enabled", "isActive"])?;
        // crates/goose/src/config/extensions.rs, `ExtensionEntry`: an extension without the key is skipped.
        if self.client == Client::Goose && enabled.is_none() {
            self.notes.push(adjusted("enabled", "missing; Goose does not use an extension without it"));
            return Ok(false);
        }
        let disabled = self.flag(&["disabled"])?;
        Ok(enabled.unwrap_or(true) && !disabled.unwrap_or(false))
    }

    fn tools(&mut self) -> Result<ToolSelection, String> {
        // Codex: `tools` is a table with the confirmation of each tool.
        if self.fields.iter().any(|(name, value)| *name == "tools" && value.as_map().is_some()) {
            self.take(&["tools"]);
            let meaning = "confirmation of tool calls";
            self.notes.push(ImportNote::NoCounterpart { key: "tools".to_owned(), meaning });
        }
        let keys = ["includeTools", "enabled_tools", "available_tools", "enabledTools", "allowedTools", "tools"];
        let allowed = self.texts(&keys)?;
        let goose_shows_all = self.client == Client::Goose && allowed.as_ref().is_some_and(Vec::is_empty);
        let allowed = allowed.filter(|tools| !goose_shows_all && !tools.iter().any(|tool| tool == "*"));
        let denied = self.texts(&["excludeTools", "disabled_tools", "disabledTools"])?.unwrap_or_default();
        Ok(ToolSelection { allowed, denied })
    }

    fn timeouts(&mut self) -> ServerTimeouts {
        // Cline (`timeout` in schemas.ts), Roo Code (McpHub.ts), Goose and Zed (crates/settings_content/src/project.rs;
        // its documentation said milliseconds until January 2026) count in seconds, the others in milliseconds.
        let seconds = matches!(self.client, Client::Cline | Client::RooCode | Client::Goose | Client::Zed);
        let unit = if seconds { 1.0 } else { 0.001 };
        let mut timeouts = ServerTimeouts { startup: self.duration("startup_timeout_sec", 1.0), call: None };
        // `initializationTimeout`: IDE plugins of Amazon Q (aws/language-servers mcpUtils.ts).
        for key in ["startup_timeout_ms", "connectionTimeout", "initializationTimeout"] {
            timeouts.startup = timeouts.startup.or(self.duration(key, 0.001));
        }
        timeouts.call = self.duration("tool_timeout_sec", 1.0);
        // opencode 2: { "startup", "catalog", "execution" } in milliseconds (packages/schema/src/config/mcp.ts).
        if let Some((_, ConfigNode::Map(inner))) = self.fields.iter().find(|(name, _)| *name == "timeout") {
            self.fields.retain(|(name, _)| *name != "timeout");
            let mut fields = EntryFields::new(self.client, self.format, inner);
            timeouts.startup = timeouts.startup.or(fields.duration("startup", 0.001));
            timeouts.call = timeouts.call.or(fields.duration("execution", 0.001));
            if fields.take(&["catalog"]).is_some() {
                let meaning = "timeout of lists";
                fields.notes.push(ImportNote::NoCounterpart { key: "catalog".to_owned(), meaning });
            }
            self.notes.extend(fields.finish().into_iter().map(|note| within("timeout", note)));
        }
        timeouts.call = timeouts.call.or(self.duration("timeout", unit));
        timeouts
    }

    /// Reads a number of `unit` seconds. A value that is no duration becomes a note.
    fn duration(&mut self, key: &'static str, unit: f64) -> Option<Duration> {
        let (key, value) = self.take(&[key])?;
        let duration = match value {
            ConfigNode::Literal(number) => {
                number.parse().ok().and_then(|number: f64| Duration::try_from_secs_f64(number * unit).ok())
            }
            _ => None,
        };
        if duration.is_none() {
            self.notes.push(adjusted(key, "not a timeout; not imported"));
        }
        duration
    }

    /// Returns the remaining fields that are not understood and have a text, a number or a boolean.
    fn unknown_texts(&self) -> Vec<(String, HiddenText)> {
        let unknown = self.fields.iter().filter(|(key, _)| WITHOUT_COUNTERPART.iter().all(|(known, _)| known != key));
        unknown
            .filter_map(|(key, value)| Some(((*key).to_owned(), HiddenText::new(scalar(key, value).ok()?))))
            .collect()
    }

    /// Turns the remaining fields into notes.
    fn finish(mut self) -> Vec<ImportNote> {
        for (key, _) in self.fields {
            self.notes.push(match WITHOUT_COUNTERPART.iter().find(|(known, _)| *known == key) {
                Some((_, meaning)) => ImportNote::NoCounterpart { key: key.to_owned(), meaning },
                None => ImportNote::UnknownKey(key.to_owned()),
            });
        }
        self.notes
    }
}

const ZED_EXTENSION: &str = "an extension of Zed provides the server; add it with its `command` instead";

/// Returns the variables that a client expands in its file.
fn syntax_of(client: Client, format: FileFormat) -> TemplateSyntax {
    let (none, braces) = (TemplateSyntax::NONE, TemplateSyntax::BRACES);
    match client {
        // codex-rs passes texts on as they are.
        Client::Codex => none,
        // modelcontextprotocol.io/docs/develop/connect-local-servers, zed-industries/zed docs/src/ai/mcp.md,
        // lmstudio.ai/docs/app/mcp and jetbrains.com/help/junie/model-context-protocol-mcp.html describe no variables.
        Client::ClaudeDesktop | Client::Zed | Client::LmStudio | Client::Junie => none,
        // packages/cli/src/utils/envVarResolver.ts: `$VAR`, `${VAR}` and `${VAR:-default}`.
        Client::GeminiCli => TemplateSyntax { bare: true, ..braces },
        // crates/goose/src/agents/extension_manager.rs: variables in headers only, see `http`.
        Client::Goose => none,
        // opencode.ai/docs/config, "Variables": `{env:VAR}` and `{file:PATH}`.
        Client::OpenCode => TemplateSyntax { opencode: true, ..none },
        // docs.continue.dev/reference, "secrets" and "inputs". JSON files are those of other clients, which Continue
        // converts (continuedev/continue packages/config-yaml/src/schemas/mcp/convertJson.ts).
        Client::Continue if format == FileFormat::Yaml => TemplateSyntax { double_braces: true, ..none },
        Client::Continue => TemplateSyntax { double_braces: true, ..braces },
        // docs.windsurf.com/windsurf/cascade/mcp, "Config interpolation".
        Client::Windsurf => TemplateSyntax { files: true, ..braces },
        Client::ClaudeCode | Client::Cursor | Client::VsCode | Client::Cline | Client::RooCode | Client::AmazonQ => {
            braces
        }
    }
}

/// Replaces `$NAME` and `${NAME}` in a header of Goose by the values of `envs` and the secrets in `keys`. Other texts stay
/// as they are (`substitute_env_vars` of `ExtensionManager` in block/goose).
fn expand_goose_header(text: &str, envs: &[(String, TextTemplate)], keys: &[String]) -> TextTemplate {
    let mut template = TextTemplate::default();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        let (before, after) = (&rest[..at], &rest[at + 1..]);
        let name_end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
        let (name, length) = match after.strip_prefix('{').and_then(|inner| inner.find('}').map(|end| &inner[..end])) {
            Some(inner) => (inner.trim(), inner.len() + 2),
            None => (&after[..name_end], name_end),
        };
        let value = envs.iter().find(|(env, _)| env == name).map(|(_, value)| value.parts.clone());
        let secret = || vec![TemplatePart::Secret { name: name.to_owned() }];
        let Some(parts) = value.or_else(|| keys.iter().any(|key| key == name).then(secret)) else {
            push_part(&mut template, TemplatePart::Literal(HiddenText::new(&rest[..=at])));
            rest = after;
            continue;
        };
        push_part(&mut template, TemplatePart::Literal(HiddenText::new(before)));
        for part in parts {
            push_part(&mut template, part);
        }
        rest = &after[length..];
    }
    push_part(&mut template, TemplatePart::Literal(HiddenText::new(rest)));
    template
}

/// Adds a part. A literal is joined with the literal before it, and an empty one is left out.
fn push_part(template: &mut TextTemplate, part: TemplatePart) {
    if matches!(&part, TemplatePart::Literal(text) if text.is_empty()) {
        return;
    }
    if let (Some(TemplatePart::Literal(last)), TemplatePart::Literal(text)) = (template.parts.last_mut(), &part) {
        *last = HiddenText::new(format!("{}{}", last.expose(), text.expose()));
    } else {
        template.parts.push(part);
    }
}

/// Splits scopes at white space: Claude Code and opencode have one string.
fn scopes(texts: Option<Vec<String>>) -> Vec<String> {
    texts.unwrap_or_default().iter().flat_map(|text| text.split_whitespace()).map(str::to_owned).collect()
}

/// Returns true for a path such as `/opt/My Tools/server`. The words after the first decide: arguments begin with `-`,
/// `/`, `.`, `@`, `$` or contain `=`.
fn is_path_with_spaces(text: &str) -> bool {
    let is_path = ["/", "./", "../", "~/"].iter().any(|start| text.starts_with(start));
    let is_argument = |word: &str| word.starts_with(['-', '/', '.', '@', '$', '"', '\'']) || word.contains('=');
    is_path && !text.split_whitespace().skip(1).any(is_argument)
}

fn scalar(key: &str, node: &ConfigNode) -> Result<String, String> {
    match node {
        ConfigNode::Text(text) | ConfigNode::Literal(text) => Ok(text.clone()),
        ConfigNode::Bool(flag) => Ok(flag.to_string()),
        ConfigNode::Null | ConfigNode::List(_) | ConfigNode::Map(_) => Err(wrong_type(key, "a string", node)),
    }
}

fn wrong_type(key: &str, expected: &str, node: &ConfigNode) -> String {
    format!("`{key}` is {}; it must be {expected}", node.kind())
}

/// Quotes a text that is a name. Another text could be a value, so it is not shown.
fn quoted(text: &str) -> String {
    let is_name = text.len() <= 24 && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    if is_name { format!("`{text}`") } else { "with this value".to_owned() }
}

fn adjusted(key: &str, change: &str) -> ImportNote {
    ImportNote::Adjusted { key: key.to_owned(), change: change.to_owned() }
}

/// Adds the table of a nested key to its note.
fn within(table: &str, note: ImportNote) -> ImportNote {
    let nested = |key: String| format!("{table}.{key}");
    match note {
        ImportNote::UnknownKey(key) => ImportNote::UnknownKey(nested(key)),
        ImportNote::NoCounterpart { key, meaning } => ImportNote::NoCounterpart { key: nested(key), meaning },
        ImportNote::Adjusted { key, change } => ImportNote::Adjusted { key: nested(key), change },
    }
}
