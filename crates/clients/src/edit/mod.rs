//! Edits of one entry in a client's configuration. All functions are pure: they take the bytes of a file and return the
//! bytes of the edited file. Byte order mark, line endings, indentation, comments and the order of keys remain.
//!
//! Each edit is verified: the result is parsed again and must equal the value before the edit with exactly the intended
//! change. Otherwise the edit fails with the text that a person can paste.

mod entry;
mod error;
mod json;
mod splice;
mod toml;
mod undo;
mod warnings;
mod yaml;

#[cfg(test)]
mod tests;

use crate::Client;
use crate::locations::FileFormat;
use crate::node::ConfigNode;
use entry::{ServersPlace, entry_tree, preamble, section, transport_of};
pub(crate) use entry::{is_opencode_table, recognize};
use splice::line_ending;

pub use entry::{
    ENTRY_NAME, EntryForm, SatelliteEntry, TOKEN_VARIABLE, TokenReference, connect_paths, supported_forms,
};
pub use error::EditError;
pub use undo::{ConnectRecord, ContentHash, RestoreBackup, Undo, UndoRemainder, disconnect};
pub use warnings::entry_warnings;

const BYTE_ORDER_MARK: &str = "\u{feff}";

/// The state of a client's entry for the satellite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryState {
    /// The file has no entry `satellite`.
    NotConnected,
    /// The file has an entry that connect wrote.
    Connected {
        /// The kind of the entry.
        form: EntryForm,
    },
    /// The file has an entry `satellite` that connect did not write.
    ForeignEntry,
}

/// The keys of an entry that describe the transport, in the spellings of all clients.
const TRANSPORT_KEYS: [&str; 13] = [
    "type",
    "transport",
    "command",
    "cmd",
    "args",
    "url",
    "serverUrl",
    "httpUrl",
    "uri",
    "headers",
    "requestOptions",
    "bearer_token_env_var",
    "oauth",
];

/// The keys of a process's environment and working directory, in the spellings of all clients.
const PROCESS_KEYS: [&str; 7] = ["env", "environment", "envs", "env_keys", "env_vars", "envFile", "cwd"];

/// Adds the entry `satellite`, or replaces it if it is ours. A missing file is `None`. Options that the client or its user
/// added to our entry remain, for example the tools that need no approval, and the environment of the bridge.
pub fn add_entry(client: Client, file: Option<&[u8]>, entry: &SatelliteEntry) -> Result<Vec<u8>, EditError> {
    replace_servers(client, file, entry, &[])
}

/// Removes the servers `names` and adds the entry `satellite`. A server with that name is replaced if `names` contains it.
pub fn replace_servers(
    client: Client,
    file: Option<&[u8]>,
    entry: &SatelliteEntry,
    names: &[&str],
) -> Result<Vec<u8>, EditError> {
    let mut server = entry_tree(client, entry)?;
    let mut config = ClientConfig::read(client, file)?;
    if let Some(existing) = config.server(ENTRY_NAME)? {
        match recognize(existing, entry.url()) {
            Some(form) => {
                let is_bridge = form == EntryForm::Stdio && entry.form() == EntryForm::Stdio;
                keep_options(&mut server, existing, |key| !PROCESS_KEYS.contains(&key));
                if is_bridge {
                    keep_options(&mut server, transport_of(existing), |key| PROCESS_KEYS.contains(&key));
                }
            }
            None if names.contains(&ENTRY_NAME) => {}
            None => return Err(EditError::ForeignEntry { key: config.section.key }),
        }
    }
    for name in names.iter().filter(|name| **name != ENTRY_NAME) {
        config.remove(name)?;
    }
    if config.server(ENTRY_NAME)?.is_none_or(|existing| existing.clone().sorted() != server.clone().sorted()) {
        config.set(&config.table_of(ENTRY_NAME), ENTRY_NAME, &server)?;
    }
    Ok(config.into_bytes())
}

/// Removes the entry `satellite` if it is ours. A file without the entry is returned unchanged. `url` is the satellite's
/// endpoint, if it is known: it identifies HTTP entries.
pub fn remove_entry(client: Client, file: &[u8], url: Option<&str>) -> Result<Vec<u8>, EditError> {
    let mut config = ClientConfig::read(client, Some(file))?;
    match config.state(url)? {
        EntryState::NotConnected => return Ok(file.to_vec()),
        EntryState::Connected { .. } => config.remove(ENTRY_NAME)?,
        EntryState::ForeignEntry => return Err(EditError::ForeignEntry { key: config.section.key }),
    }
    Ok(config.into_bytes())
}

/// Returns the names of the servers in the place that connect edits. A missing file is `None`.
pub fn server_names(client: Client, file: Option<&[u8]>) -> Result<Vec<String>, EditError> {
    let config = ClientConfig::read(client, file)?;
    let mut names: Vec<String> = Vec::new();
    for table in config.tables().iter().filter_map(|path| lookup(&config.tree, path)) {
        match table {
            ConfigNode::Map(entries) => {
                let servers = entries.iter().filter(|(key, value)| !config.section.is_reserved(key, value));
                names.extend(servers.map(|(name, _)| name.name.clone()));
            }
            ConfigNode::List(items) => {
                names.extend(items.iter().filter_map(|item| item.get("name")?.as_text().map(str::to_owned)));
            }
            _ => {}
        }
    }
    Ok(names)
}

/// Copies the options of an existing entry that connect does not set and that `is_kept` selects.
fn keep_options(server: &mut ConfigNode, existing: &ConfigNode, is_kept: impl Fn(&str) -> bool) {
    let (ConfigNode::Map(entries), ConfigNode::Map(existing)) = (server, existing) else { return };
    for (key, value) in existing {
        let is_option = !TRANSPORT_KEYS.contains(&key.as_str()) && is_kept(key);
        if is_option && entries.iter().all(|(name, _)| name != key) {
            entries.push((key.clone(), value.clone()));
        }
    }
}

/// Returns the state of the entry `satellite`. A missing file is `None`. `url` is the satellite's endpoint, if it is known:
/// it identifies HTTP entries.
pub fn entry_state(client: Client, file: Option<&[u8]>, url: Option<&str>) -> Result<EntryState, EditError> {
    ClientConfig::read(client, file)?.state(url)
}

/// The configuration of a client: its text and its value.
struct ClientConfig {
    section: ServersPlace,
    has_byte_order_mark: bool,
    text: String,
    tree: ConfigNode,
}

impl ClientConfig {
    fn read(client: Client, file: Option<&[u8]>) -> Result<Self, EditError> {
        let section = section(client);
        let text = std::str::from_utf8(file.unwrap_or_default()).map_err(|_| EditError::NotUtf8)?;
        let (has_byte_order_mark, text) = match text.strip_prefix(BYTE_ORDER_MARK) {
            Some(text) => (true, text),
            None => (false, text),
        };
        let text = if text.trim().is_empty() {
            format!("{text}{}", preamble(client).replace('\n', line_ending(text)))
        } else {
            text.to_owned()
        };
        let tree = parse(section.format, &text)?;
        let config = Self { section, has_byte_order_mark, text, tree };
        config.check()?;
        Ok(config)
    }

    /// Checks the types on the way to the servers.
    fn check(&self) -> Result<(), EditError> {
        let ServersPlace { key, nested, is_list, .. } = self.section;
        if !matches!(self.tree, ConfigNode::Map(_)) {
            return Err(EditError::WrongRoot { found: self.tree.kind() });
        }
        match self.tree.unique(key)? {
            None | Some(ConfigNode::Null) => Ok(()),
            Some(ConfigNode::List(_)) if is_list => Ok(()),
            Some(servers @ ConfigNode::Map(_)) if !is_list => match nested {
                Some(nested) => servers.unique(nested).map(|_| ()),
                None => Ok(()),
            },
            Some(other) => {
                let expected = if is_list { "a list" } else { "an object" };
                Err(EditError::WrongServers { key, expected, found: other.kind() })
            }
        }
    }

    fn state(&self, url: Option<&str>) -> Result<EntryState, EditError> {
        Ok(match self.server(ENTRY_NAME)? {
            None => EntryState::NotConnected,
            Some(server) => match recognize(server, url) {
                Some(form) => EntryState::Connected { form },
                None => EntryState::ForeignEntry,
            },
        })
    }

    fn servers(&self) -> Option<&ConfigNode> {
        self.tree.get(self.section.key)
    }

    /// Returns the paths of the tables of servers that the client reads.
    fn tables(&self) -> Vec<TablePath> {
        let ServersPlace { key, nested, .. } = self.section;
        let nested = nested.map(|nested| vec![key, nested]);
        let nested = nested.filter(|path| lookup(&self.tree, path).is_some_and(is_opencode_table));
        std::iter::once(vec![key]).chain(nested).collect()
    }

    /// Returns the path of the table that contains a server, or that of the first table.
    fn table_of(&self, name: &str) -> TablePath {
        let contains = |path: &&TablePath| lookup(&self.tree, path).is_some_and(|table| table.get(name).is_some());
        self.tables().iter().rfind(contains).cloned().unwrap_or_else(|| vec![self.section.key])
    }

    fn server(&self, name: &str) -> Result<Option<&ConfigNode>, EditError> {
        let mut found = Vec::new();
        for table in self.tables().iter().filter_map(|path| lookup(&self.tree, path)) {
            match table {
                ConfigNode::List(servers) => found.extend(servers.iter().filter(|server| has_name(server, name))),
                table => found.extend(table.unique(name)?.filter(|server| !self.section.is_reserved(name, server))),
            }
        }
        if found.len() > 1 { Err(EditError::DuplicateKey { key: name.to_owned() }) } else { Ok(found.pop()) }
    }

    /// Returns the position of a server and the number of servers.
    fn position(&self, name: &str) -> (Option<usize>, usize) {
        match self.servers() {
            Some(ConfigNode::Map(entries)) => (entries.iter().position(|(key, _)| key == name), entries.len()),
            Some(ConfigNode::List(items)) => (items.iter().position(|server| has_name(server, name)), items.len()),
            _ => (None, 0),
        }
    }

    /// Adds or replaces a server in a table.
    fn set(&mut self, table: &[&'static str], name: &str, server: &ConfigNode) -> Result<(), EditError> {
        let ServersPlace { format, key, is_list, .. } = self.section;
        let (index, count) = self.position(name);
        let label = (!is_list).then_some(name);
        let (candidates, snippet) = match format {
            FileFormat::Json => (
                vec![json::set(&self.text, table, name, server)?],
                json::snippet(&json::one_server(table, name, server)),
            ),
            FileFormat::Toml => (vec![toml::set(&self.text, key, name, server)?], toml::snippet(key, name, server)),
            FileFormat::Yaml => {
                let candidates = yaml::set(&self.text, key, label, server, index, count);
                (candidates, yaml::snippet(key, label, server))
            }
        };
        let mut expected = self.tree.clone();
        change_server(&mut expected, self.section, table, name, Some(server));
        self.adopt(candidates, expected, || format!("add this to the servers that it has:\n{snippet}"))
    }

    /// Removes a server.
    fn remove(&mut self, name: &str) -> Result<(), EditError> {
        let ServersPlace { format, key, is_list, .. } = self.section;
        if self.server(name)?.is_none() {
            return Err(EditError::MissingServer { name: name.to_owned() });
        }
        let (index, count) = self.position(name);
        let table = self.table_of(name);
        let candidates = match format {
            FileFormat::Json => vec![json::remove(&self.text, &table, name)?],
            FileFormat::Toml => vec![toml::remove(&self.text, key, name)?],
            FileFormat::Yaml => {
                let empty = if is_list { "[]" } else { "{}" };
                yaml::remove(&self.text, key, index.unwrap_or(count), count, empty)
            }
        };
        let mut expected = self.tree.clone();
        change_server(&mut expected, self.section, &table, name, None);
        self.adopt(candidates, expected, || format!("remove the server `{name}` from `{}`", table.join(".")))
    }

    /// Adopts the first candidate whose value is the expected one.
    fn adopt(
        &mut self,
        candidates: Vec<String>,
        expected: ConfigNode,
        instruction: impl FnOnce() -> String,
    ) -> Result<(), EditError> {
        let expected = comparable(expected, self.section);
        for text in candidates {
            if let Ok(tree) = parse(self.section.format, &text)
                && comparable(tree.clone(), self.section) == expected
            {
                self.text = text;
                self.tree = tree;
                return Ok(());
            }
        }
        Err(EditError::EditByHand { instruction: instruction() })
    }

    fn into_bytes(self) -> Vec<u8> {
        let mark = if self.has_byte_order_mark { BYTE_ORDER_MARK } else { "" };
        [mark.as_bytes(), self.text.as_bytes()].concat()
    }
}

fn parse(format: FileFormat, text: &str) -> Result<ConfigNode, EditError> {
    match format {
        FileFormat::Json => json::parse(text),
        FileFormat::Toml => toml::parse(text),
        FileFormat::Yaml => yaml::parse(text),
    }
}

fn has_name(server: &ConfigNode, name: &str) -> bool {
    server.get("name").and_then(ConfigNode::as_text) == Some(name)
}

/// The keys on the way to a table of servers.
type TablePath = Vec<&'static str>;

fn lookup<'a>(tree: &'a ConfigNode, path: &[&str]) -> Option<&'a ConfigNode> {
    path.iter().try_fold(tree, |node, key| node.get(key))
}

/// Sets or removes a server in a value.
fn change_server(
    tree: &mut ConfigNode,
    section: ServersPlace,
    table: &[&str],
    name: &str,
    server: Option<&ConfigNode>,
) {
    let mut servers = tree;
    for key in table {
        let ConfigNode::Map(entries) = servers else { return };
        let at = entries.iter().position(|(other, _)| other == *key).unwrap_or_else(|| {
            entries.push(((*key).into(), ConfigNode::Null));
            entries.len() - 1
        });
        servers = &mut entries[at].1;
        if *servers == ConfigNode::Null {
            *servers = if section.is_list { ConfigNode::List(Vec::new()) } else { ConfigNode::Map(Vec::new()) };
        }
    }
    match (servers, server) {
        (ConfigNode::Map(entries), Some(server)) => match entries.iter_mut().find(|(key, _)| key == name) {
            Some(entry) => entry.1 = server.clone(),
            None => entries.push((name.into(), server.clone())),
        },
        (ConfigNode::Map(entries), None) => entries.retain(|(key, _)| key != name),
        (ConfigNode::List(items), Some(server)) => match items.iter_mut().find(|item| has_name(item, name)) {
            Some(item) => *item = server.clone(),
            None => items.push(server.clone()),
        },
        (ConfigNode::List(items), None) => items.retain(|item| !has_name(item, name)),
        _ => {}
    }
}

/// Returns a value for comparison: no servers equal a missing key, and the order of keys does not count.
fn comparable(mut tree: ConfigNode, section: ServersPlace) -> ConfigNode {
    if let ConfigNode::Map(root) = &mut tree {
        let servers = root.iter_mut().find(|(key, _)| key == section.key);
        if let (Some((_, ConfigNode::Map(servers))), Some(nested)) = (servers, section.nested) {
            servers.retain(|(key, value)| key != nested || !is_empty(value));
        }
        root.retain(|(key, value)| key != section.key || !is_empty(value));
    }
    tree.sorted()
}

fn is_empty(value: &ConfigNode) -> bool {
    match value {
        ConfigNode::Null => true,
        ConfigNode::Map(entries) => entries.is_empty(),
        ConfigNode::List(items) => items.is_empty(),
        _ => false,
    }
}
