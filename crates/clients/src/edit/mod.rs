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
mod yaml;

#[cfg(test)]
mod tests;

use crate::Client;
use crate::locations::FileFormat;
use crate::node::ConfigNode;
pub(crate) use entry::recognize;
use entry::{ServersPlace, entry_tree, preamble, section};
use splice::line_ending;

pub use entry::{
    ENTRY_NAME, EntryForm, SatelliteEntry, TOKEN_VARIABLE, TokenReference, connect_path, connect_paths, supported_forms,
};
pub use error::EditError;
pub use undo::{ConnectRecord, ContentHash, RestoreBackup, Undo, UndoRemainder, disconnect};

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
const TRANSPORT_KEYS: [&str; 16] = [
    "type",
    "transport",
    "command",
    "cmd",
    "args",
    "env",
    "cwd",
    "url",
    "serverUrl",
    "httpUrl",
    "uri",
    "headers",
    "requestOptions",
    "bearer_token_env_var",
    "env_keys",
    "oauth",
];

/// Adds the entry `satellite`, or replaces it if it is ours. A missing file is `None`. Options that the client or its user
/// added to our entry remain, for example the tools that need no approval.
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
            Some(_) => keep_options(&mut server, existing),
            None if names.contains(&ENTRY_NAME) => {}
            None => return Err(EditError::ForeignEntry { key: config.section.key }),
        }
    }
    for name in names.iter().filter(|name| **name != ENTRY_NAME) {
        config.remove(name)?;
    }
    if config.server(ENTRY_NAME)?.is_none_or(|existing| existing.clone().sorted() != server.clone().sorted()) {
        config.set(ENTRY_NAME, &server)?;
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
    Ok(match config.servers() {
        Some(ConfigNode::Map(entries)) => entries.iter().map(|(name, _)| name.name.clone()).collect(),
        Some(ConfigNode::List(items)) => {
            items.iter().filter_map(|item| item.get("name")?.as_text().map(str::to_owned)).collect()
        }
        _ => Vec::new(),
    })
}

/// Copies the options of an existing entry that connect does not set.
fn keep_options(server: &mut ConfigNode, existing: &ConfigNode) {
    let (ConfigNode::Map(entries), ConfigNode::Map(existing)) = (server, existing) else { return };
    for (key, value) in existing {
        if !TRANSPORT_KEYS.contains(&key.as_str()) && entries.iter().all(|(name, _)| name != key) {
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
        let ServersPlace { key, is_list, .. } = self.section;
        if !matches!(self.tree, ConfigNode::Map(_)) {
            return Err(EditError::WrongRoot { found: self.tree.kind() });
        }
        match self.tree.unique(key)? {
            None | Some(ConfigNode::Null) => Ok(()),
            Some(ConfigNode::List(_)) if is_list => Ok(()),
            Some(ConfigNode::Map(_)) if !is_list => Ok(()),
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

    fn server(&self, name: &str) -> Result<Option<&ConfigNode>, EditError> {
        let Some(servers) = self.servers() else { return Ok(None) };
        if !self.section.is_list {
            return servers.unique(name);
        }
        let mut found = servers.as_list().unwrap_or_default().iter().filter(|server| has_name(server, name));
        let server = found.next();
        if found.next().is_some() { Err(EditError::DuplicateKey { key: name.to_owned() }) } else { Ok(server) }
    }

    /// Returns the position of a server and the number of servers.
    fn position(&self, name: &str) -> (Option<usize>, usize) {
        match self.servers() {
            Some(ConfigNode::Map(entries)) => (entries.iter().position(|(key, _)| key == name), entries.len()),
            Some(ConfigNode::List(items)) => (items.iter().position(|server| has_name(server, name)), items.len()),
            _ => (None, 0),
        }
    }

    /// Adds or replaces a server.
    fn set(&mut self, name: &str, server: &ConfigNode) -> Result<(), EditError> {
        let ServersPlace { format, key, is_list } = self.section;
        let (index, count) = self.position(name);
        let label = (!is_list).then_some(name);
        let (candidates, snippet) = match format {
            FileFormat::Json => {
                let servers = ConfigNode::Map(vec![(name.into(), server.clone())]);
                let snippet = json::snippet(&ConfigNode::Map(vec![(key.into(), servers)]));
                (vec![json::set(&self.text, key, name, server)?], snippet)
            }
            FileFormat::Toml => (vec![toml::set(&self.text, key, name, server)?], toml::snippet(key, name, server)),
            FileFormat::Yaml => {
                let candidates = yaml::set(&self.text, key, label, server, index, count);
                (candidates, yaml::snippet(key, label, server))
            }
        };
        let mut expected = self.tree.clone();
        change_server(&mut expected, self.section, name, Some(server));
        self.adopt(candidates, expected, || format!("add this to the servers that it has:\n{snippet}"))
    }

    /// Removes a server.
    fn remove(&mut self, name: &str) -> Result<(), EditError> {
        let ServersPlace { format, key, is_list } = self.section;
        if self.server(name)?.is_none() {
            return Err(EditError::MissingServer { name: name.to_owned() });
        }
        let (index, count) = self.position(name);
        let candidates = match format {
            FileFormat::Json => vec![json::remove(&self.text, key, name)?],
            FileFormat::Toml => vec![toml::remove(&self.text, key, name)?],
            FileFormat::Yaml => {
                let empty = if is_list { "[]" } else { "{}" };
                yaml::remove(&self.text, key, index.unwrap_or(count), count, empty)
            }
        };
        let mut expected = self.tree.clone();
        change_server(&mut expected, self.section, name, None);
        self.adopt(candidates, expected, || format!("remove the server `{name}` from `{key}`"))
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

/// Sets or removes a server in a value.
fn change_server(tree: &mut ConfigNode, section: ServersPlace, name: &str, server: Option<&ConfigNode>) {
    let ConfigNode::Map(root) = tree else { return };
    let empty = || if section.is_list { ConfigNode::List(Vec::new()) } else { ConfigNode::Map(Vec::new()) };
    let at = root.iter().position(|(key, _)| key == section.key).unwrap_or_else(|| {
        root.push((section.key.into(), empty()));
        root.len() - 1
    });
    let servers = &mut root[at].1;
    if *servers == ConfigNode::Null {
        *servers = empty();
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
        root.retain(|(key, value)| {
            let is_empty = match value {
                ConfigNode::Null => true,
                ConfigNode::Map(entries) => entries.is_empty(),
                ConfigNode::List(items) => items.is_empty(),
                _ => false,
            };
            key != section.key || !is_empty
        });
    }
    tree.sorted()
}
