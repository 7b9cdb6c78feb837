//! The servers of a whole file: where each client has its table of servers, and what else the file says about them.

mod entry;
mod parse;

use std::path::PathBuf;

use self::entry::read_entry;
pub use self::parse::FILE_SIZE_MAX;
use crate::Client;
use crate::edit::is_opencode_table;
use crate::error::ClientFileError;
use crate::hidden::HiddenText;
use crate::locations::{ClientFile, ClientScope, FileFormat};
use crate::node::{ConfigNode, NodeKey};
use crate::server::{ClientInput, ClientServer, ClientServers, ImportNote, InputKind, UnreadableServer};

/// Returns the servers in the text of `file`. A fault in one server is reported for that server. An error means that the
/// whole text cannot be parsed, or that it is larger than [`FILE_SIZE_MAX`](crate::FILE_SIZE_MAX).
pub fn read(file: &ClientFile, text: &[u8]) -> Result<ClientServers, ClientFileError> {
    let root = parse::parse(file, text)?;
    let mut found = ClientServers::default();
    match &root {
        ConfigNode::Null => found.notes.push(file_note("the file is empty")),
        ConfigNode::Map(_) => FileReader { file, root: &root, found: &mut found }.read(),
        ConfigNode::List(_) if file.client == Client::Continue => {
            FileReader { file, root: &root, found: &mut found }.add_list(&root);
        }
        other => found.notes.push(file_note(&format!("the file contains {} instead of an object", other.kind()))),
    }
    Ok(found)
}

/// The tables in which any client has its servers, most common first.
const TABLES: [&[&str]; 8] = [
    &["mcpServers"],
    &["servers"],
    &["context_servers"],
    &["mcp_servers"],
    &["extensions"],
    &["mcp", "servers"],
    &["mcp"],
    &["experimental", "modelContextProtocolServers"],
];

struct FileReader<'a> {
    file: &'a ClientFile,
    root: &'a ConfigNode,
    found: &'a mut ClientServers,
}

impl<'a> FileReader<'a> {
    fn read(mut self) {
        let tables = self.tables();
        let own = tables.iter().filter(|path| self.lookup(path).is_some()).copied().collect::<Vec<_>>();
        // A file of another client, imported by name.
        let own = if own.is_empty() && !self.has_projects() && !self.is_continue_json() {
            TABLES.into_iter().filter(|path| self.is_server_table(path)).take(1).collect()
        } else {
            own
        };
        for path in &own {
            match self.lookup(path) {
                Some(ConfigNode::Map(entries)) if self.file.client == Client::OpenCode && **path == ["mcp"] => {
                    self.add_opencode_table(entries);
                }
                Some(table) => self.add_table(&path.join("."), table, &self.file.scope),
                None => {}
            }
        }
        self.add_projects();
        if own.is_empty() && !self.has_projects() {
            self.add_bare_servers();
        }
        for inputs in [self.root.get("inputs"), self.root.get("mcp").and_then(|mcp| mcp.get("inputs"))] {
            self.add_inputs(inputs);
        }
        self.note_settings(&own);
        self.report_duplicates();
    }

    /// Returns the tables of servers of the file's own client.
    fn tables(&self) -> &'static [&'static [&'static str]] {
        match self.file.client {
            // `mcp` is the table in settings.json, before mcp.json existed.
            Client::VsCode => &[&["servers"], &["mcp", "servers"]],
            Client::Zed => &[&["context_servers"]],
            Client::Codex => &[&["mcp_servers"]],
            Client::Goose => &[&["extensions"]],
            // Version 2 merges both tables, and the servers of `mcp.servers` win
            // (anomalyco/opencode packages/core/src/config/normalize.ts).
            Client::OpenCode if self.has_opencode_servers() => &[&["mcp"], &["mcp", "servers"]],
            Client::OpenCode => &[&["mcp"]],
            // core/config/types.ts of Continue: the deprecated config.json.
            Client::Continue if self.is_continue_json() => &[&["experimental", "modelContextProtocolServers"]],
            Client::Continue => &[&["mcpServers"], &["experimental", "modelContextProtocolServers"]],
            Client::ClaudeCode
            | Client::ClaudeDesktop
            | Client::Cursor
            | Client::Windsurf
            | Client::Cline
            | Client::RooCode
            | Client::GeminiCli
            | Client::LmStudio
            | Client::AmazonQ
            | Client::Junie => &[&["mcpServers"]],
        }
    }

    /// Returns true if `mcp.servers` is the table of opencode 2 and not a server.
    fn has_opencode_servers(&self) -> bool {
        self.lookup(&["mcp", "servers"]).is_some_and(is_opencode_table)
    }

    /// Returns true for the deprecated config.json of Continue, in which Continue does not read `mcpServers`.
    fn is_continue_json(&self) -> bool {
        let FileFormat::Json = self.file.format else { return false };
        self.file.client == Client::Continue && is_settings_file(self.file)
    }

    fn lookup(&self, path: &[&str]) -> Option<&'a ConfigNode> {
        path.iter().try_fold(self.root, |node, key| node.get(key)).filter(|node| **node != ConfigNode::Null)
    }

    /// Returns true if the table contains at least one server, so that another table of the same name does not count.
    fn is_server_table(&self, path: &[&str]) -> bool {
        match self.lookup(path) {
            Some(ConfigNode::Map(entries)) => entries.iter().any(|(_, entry)| is_server(entry)),
            Some(ConfigNode::List(entries)) => entries.iter().any(is_server),
            _ => false,
        }
    }

    fn add_table(&mut self, name: &str, table: &ConfigNode, scope: &ClientScope) {
        match table {
            ConfigNode::Map(entries) => {
                for (server, entry) in entries {
                    self.add(server, server.at, scope.clone(), entry);
                }
            }
            ConfigNode::List(_) if self.file.client == Client::Continue => self.add_list(table),
            other => self.found.notes.push(ImportNote::Adjusted {
                key: name.to_owned(),
                change: format!("contains no servers, because it is {}", other.kind()),
            }),
        }
    }

    /// Reads the table `mcp` of opencode without the keys of version 2 that are no servers.
    fn add_opencode_table(&mut self, entries: &[(NodeKey, ConfigNode)]) {
        for (name, entry) in entries {
            match name.as_str() {
                "servers" if is_opencode_table(entry) => {}
                "timeout" if is_opencode_table(entry) => {
                    let meaning = "timeouts of all servers";
                    self.found.notes.push(ImportNote::NoCounterpart { key: "mcp.timeout".to_owned(), meaning });
                }
                _ => self.add(name, name.at, self.file.scope.clone(), entry),
            }
        }
    }

    /// Reads servers that have their name in a field (Continue).
    fn add_list(&mut self, list: &ConfigNode) {
        for (at, entry) in list.as_list().unwrap_or_default().iter().enumerate() {
            let name = entry.get("name").or_else(|| entry.get("uses")).and_then(ConfigNode::as_text);
            let name = name.map_or_else(|| self.stem(at), str::to_owned);
            // The name is no setting without a counterpart here.
            let entry = match entry.as_map() {
                Some(fields) => ConfigNode::Map(fields.iter().filter(|(key, _)| **key != *"name").cloned().collect()),
                None => entry.clone(),
            };
            self.add(&name, None, self.file.scope.clone(), &entry);
        }
    }

    fn stem(&self, at: usize) -> String {
        let stem = self.file.path.file_stem().map_or_else(|| "server".into(), |stem| stem.to_string_lossy());
        if at == 0 { stem.into_owned() } else { format!("{stem}-{}", at + 1) }
    }

    fn add(&mut self, name: &str, at: Option<usize>, scope: ClientScope, entry: &ConfigNode) {
        let unreadable = |scope, reason| UnreadableServer { name: name.to_owned(), scope, reason, at };
        if name.trim().is_empty() {
            self.found.unreadable.push(unreadable(scope, "the name is empty; give the server a name".to_owned()));
            return;
        }
        match read_entry(self.file, name, scope.clone(), entry) {
            Ok(server) => self.found.servers.push(ClientServer { at, ..server }),
            Err(reason) => self.found.unreadable.push(unreadable(scope, reason)),
        }
    }

    /// Local scope of Claude Code: `projects."/path".mcpServers` in ~/.claude.json (code.claude.com/docs/en/mcp).
    fn add_projects(&mut self) {
        if !self.has_projects() {
            return;
        }
        let projects = self.root.get("projects").and_then(ConfigNode::as_map).unwrap_or_default();
        for (path, project) in projects {
            let scope = ClientScope::Local(PathBuf::from(&**path));
            if let Some(table) = project.get("mcpServers").filter(|table| **table != ConfigNode::Null) {
                self.add_table(&format!("projects.{}.mcpServers", path.name), table, &scope);
            }
            let disabled = project.get("disabledMcpServers").and_then(ConfigNode::as_list).unwrap_or_default();
            for server in self.found.servers.iter_mut().filter(|server| server.scope == scope) {
                if disabled.iter().any(|name| name.as_text() == Some(&server.name)) {
                    server.enabled = false;
                }
            }
            for key in ["disabledMcpServers", "enabledMcpjsonServers", "disabledMcpjsonServers"] {
                if project.get(key).and_then(ConfigNode::as_list).is_some_and(|names| !names.is_empty()) {
                    let key = format!("projects.{}.{key}", path.name);
                    let meaning = "servers that are switched on or off in one project";
                    self.found.notes.push(ImportNote::NoCounterpart { key, meaning });
                }
            }
        }
    }

    fn has_projects(&self) -> bool {
        self.file.client == Client::ClaudeCode && self.root.get("projects").is_some_and(|node| node.as_map().is_some())
    }

    /// Reads a file that is a table of servers itself, or one server (`.continue/mcpServers/NAME.json`).
    fn add_bare_servers(&mut self) {
        if is_server(self.root) {
            let name = self.root.get("name").and_then(ConfigNode::as_text);
            let name = name.map_or_else(|| self.stem(0), str::to_owned);
            self.add(&name, None, self.file.scope.clone(), self.root);
        } else if !is_settings_file(self.file) {
            for (name, entry) in self.root.as_map().unwrap_or_default() {
                if is_server(entry) {
                    self.add(name, name.at, self.file.scope.clone(), entry);
                }
            }
        }
    }

    /// Reads `inputs` of VS Code (code.visualstudio.com/docs/copilot/reference/mcp-configuration, "Input variables").
    fn add_inputs(&mut self, inputs: Option<&ConfigNode>) {
        for input in inputs.and_then(ConfigNode::as_list).unwrap_or_default() {
            let text = |key: &str| input.get(key).and_then(ConfigNode::as_text);
            let Some(id) = text("id") else {
                self.found.notes.push(ImportNote::Adjusted {
                    key: "inputs".to_owned(),
                    change: "an input without an id is not imported".to_owned(),
                });
                continue;
            };
            let kind = match text("type").unwrap_or("promptString") {
                "promptString" => InputKind::Prompt,
                "pickString" => {
                    let options = input.get("options").and_then(ConfigNode::as_list).unwrap_or_default();
                    let value =
                        |option: &ConfigNode| option.get("value").unwrap_or(option).as_text().map(HiddenText::new);
                    InputKind::Choice(options.iter().filter_map(value).collect())
                }
                "command" => InputKind::Command(text("command").unwrap_or_default().to_owned()),
                other => InputKind::Other(other.to_owned()),
            };
            self.found.inputs.push(ClientInput {
                id: id.to_owned(),
                kind,
                description: text("description").map(str::to_owned),
                password: input.get("password") == Some(&ConfigNode::Bool(true)),
                default: text("default").map(HiddenText::new),
            });
        }
    }

    /// Settings outside the table of servers that concern the servers, and unknown keys of a file that has nothing else.
    fn note_settings(&mut self, tables: &[&[&str]]) {
        if self.file.client == Client::GeminiCli {
            self.apply_gemini_lists();
        }
        if self.file.client == Client::OpenCode && self.root.get("tools").is_some() {
            let meaning = "tools that are switched on or off for all servers";
            self.found.notes.push(ImportNote::NoCounterpart { key: "tools".to_owned(), meaning });
        }
        if self.is_continue_json() && self.root.get("mcpServers").is_some() {
            let change =
                "not imported, because Continue does not read it in config.json; move it to `mcpServers/NAME.json`";
            self.found.notes.push(ImportNote::Adjusted { key: "mcpServers".to_owned(), change: change.to_owned() });
        }
        if is_settings_file(self.file) {
            return;
        }
        for (key, value) in self.root.as_map().unwrap_or_default() {
            let is_known = matches!(key.as_str(), "$schema" | "inputs" | "projects" | "name" | "version" | "schema")
                || tables.iter().any(|path| path.first() == Some(&key.as_str()))
                || (tables.is_empty() && is_server(value))
                || is_server(self.root);
            if !is_known {
                self.found.notes.push(ImportNote::UnknownKey(key.name.clone()));
            }
        }
    }

    /// Applies `mcp.allowed` and `mcp.excluded` (google-gemini/gemini-cli, docs/tools/mcp-server.md).
    fn apply_gemini_lists(&mut self) {
        let Some(mcp) = self.root.get("mcp") else { return };
        let names = |key: &str| {
            let list = mcp.get(key)?.as_list()?;
            Some(list.iter().filter_map(ConfigNode::as_text).collect::<Vec<_>>())
        };
        let allowed = names("allowed");
        let excluded = names("excluded").unwrap_or_default();
        for server in &mut self.found.servers {
            let name = server.name.as_str();
            if excluded.contains(&name) || allowed.as_ref().is_some_and(|allowed| !allowed.contains(&name)) {
                server.enabled = false;
            }
        }
        if mcp.get("serverCommand").is_some() {
            let meaning = "a command that starts further servers";
            self.found.notes.push(ImportNote::NoCounterpart { key: "mcp.serverCommand".to_owned(), meaning });
        }
    }

    /// Moves all but the last server of a name to the unreadable ones, as the clients use the last.
    fn report_duplicates(&mut self) {
        let mut last = std::collections::HashMap::new();
        for (at, server) in self.found.servers.iter().enumerate() {
            last.insert((server.scope.clone(), server.name.clone()), at);
        }
        if last.len() == self.found.servers.len() {
            return;
        }
        let mut kept = Vec::new();
        for (at, server) in std::mem::take(&mut self.found.servers).into_iter().enumerate() {
            if last.get(&(server.scope.clone(), server.name.clone())) == Some(&at) {
                kept.push(server);
            } else {
                let reason = "the name occurs again later in the file; the last server of a name applies".to_owned();
                self.found.unreadable.push(UnreadableServer {
                    name: server.name,
                    scope: server.scope,
                    reason,
                    at: server.at,
                });
            }
        }
        self.found.servers = kept;
    }
}

/// Returns true for an object with a key that only servers have.
fn is_server(node: &ConfigNode) -> bool {
    ["command", "cmd", "url", "serverUrl", "httpUrl", "uri"]
        .iter()
        .any(|key| matches!(node.get(key), Some(ConfigNode::Text(_) | ConfigNode::List(_) | ConfigNode::Map(_))))
}

/// Returns true for a file with other settings of the client, whose keys do not concern an import.
fn is_settings_file(file: &ClientFile) -> bool {
    match file.client {
        Client::Zed | Client::Codex | Client::GeminiCli | Client::Goose | Client::OpenCode | Client::ClaudeDesktop => {
            true
        }
        Client::ClaudeCode => {
            file.path.file_name().is_some_and(|name| name == ".claude.json" || name == "settings.json")
        }
        Client::Continue => file.path.file_stem().is_some_and(|stem| stem == "config"),
        Client::VsCode => file.path.file_name().is_some_and(|name| name == "settings.json"),
        // An agent has a prompt, tools and hooks.
        Client::AmazonQ => file.path.file_name().is_none_or(|name| name != "mcp.json"),
        Client::Cursor | Client::Windsurf | Client::Cline | Client::RooCode | Client::LmStudio | Client::Junie => false,
    }
}

fn file_note(change: &str) -> ImportNote {
    ImportNote::Adjusted { key: "file".to_owned(), change: change.to_owned() }
}
