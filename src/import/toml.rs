//! The user's configuration as an editable document: comments, order and format of everything else remain.

use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value};

use crate::config::{ServerDraft, UserValueDraft};

/// A new configuration: an endpoint, and one team with one user, whose servers do not sleep.
pub(crate) const NEW_CONFIGURATION: &str = "\
# The servers of this user. `satellite import` adds the servers of MCP clients.

# The MCP endpoint, to which `satellite connect` connects clients.
[gateway]

[policy.idle]
idle = \"off\"

[[teams]]
id = \"local\"
slug = \"local\"

[[teams.users]]
id = \"me\"
slug = \"me\"
";

/// The id of the team that an import uses if there are several.
const TEAM: &str = "local";

/// The configuration to which servers are added.
pub(crate) struct EditedConfiguration {
    document: DocumentMut,
    team: usize,
}

impl EditedConfiguration {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| {
            let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            // The text of the error shows lines of the file, which can contain secrets.
            format!("line {line} is not valid TOML: {}; correct the file first", error.message())
        })?;
        if document.contains_key("backend") {
            return Err("it has a [backend], which configures the servers; name another file with --config".to_owned());
        }
        let teams = match document.get("teams") {
            None => return Err("it has no team; add [[teams]] with a user".to_owned()),
            Some(teams) => teams.as_array_of_tables().ok_or("`teams` is a list in one line; write [[teams]]")?,
        };
        let is_local = |team: &Table| team.get("id").and_then(Item::as_str) == Some(TEAM);
        let team = match (teams.len(), teams.iter().position(is_local)) {
            (_, Some(team)) => team,
            (1, None) => 0,
            _ => {
                return Err(format!(
                    "it has several teams, and none has the id `{TEAM}`; add one for imported servers"
                ));
            }
        };
        let installations = teams.get(team).and_then(|team| team.get("installations"));
        if installations.is_some_and(|installations| !installations.is_array_of_tables()) {
            return Err("`installations` is a list in one line; write [[teams.installations]]".to_owned());
        }
        Ok(Self { document, team })
    }

    /// Returns an empty configuration with the `[satellite]` table of this one, which restricts commands.
    pub(crate) fn sample(&self) -> Self {
        let mut document: DocumentMut = NEW_CONFIGURATION.parse().unwrap_or_default();
        if let Some(satellite) = self.document.get("satellite") {
            document.insert("satellite", satellite.clone());
        }
        Self { document, team: 0 }
    }

    pub(crate) fn text(&self) -> String {
        self.document.to_string()
    }

    /// Returns the installations of the team.
    pub(crate) fn installations(&self) -> impl Iterator<Item = &Table> {
        let teams = self.document.get("teams").and_then(Item::as_array_of_tables);
        let team = teams.and_then(|teams| teams.get(self.team));
        let installations = team.and_then(|team| team.get("installations")).and_then(Item::as_array_of_tables);
        installations.into_iter().flat_map(ArrayOfTables::iter)
    }

    /// Appends a server after the last installation of the team.
    pub(crate) fn add(&mut self, draft: &ServerDraft, origin: &str) {
        let teams = self.document.get_mut("teams").and_then(Item::as_array_of_tables_mut);
        let Some(team) = teams.and_then(|teams| teams.get_mut(self.team)) else { return };
        let installations = team.entry("installations").or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
        let Some(installations) = installations.as_array_of_tables_mut() else { return };
        let mut table = installation(draft);
        table.decor_mut().set_prefix(format!("\n# Imported from {origin}\n"));
        installations.push(table);
    }
}

fn installation(draft: &ServerDraft) -> Table {
    let mut table = Table::new();
    let mut set = |key: &str, value: Value| drop(table.insert(key, Item::Value(value)));
    set("id", draft.id.as_str().into());
    set("server", draft.id.as_str().into());
    if draft.transport != "stdio" {
        set("transport", draft.transport.into());
    }
    for (key, text) in [("command", &draft.command), ("url", &draft.url)] {
        if let Some(text) = text {
            set(key, text.as_str().into());
        }
    }
    if !draft.args.is_empty() {
        set("args", draft.args.iter().map(String::as_str).collect::<Array>().into());
    }
    if draft.secret_args {
        set("secret_args", true.into());
    }
    for (key, text) in [("cwd", &draft.cwd), ("env_file", &draft.env_file)] {
        if let Some(text) = text {
            set(key, text.as_str().into());
        }
    }
    for (key, pairs) in [("env", &draft.env), ("headers", &draft.headers)] {
        if !pairs.is_empty() {
            let pairs = pairs.iter().map(|(name, value)| (name.as_str(), Value::from(value.as_str())));
            set(key, pairs.collect::<InlineTable>().into());
        }
    }
    if draft.oauth_client_id.is_some() || !draft.oauth_scopes.is_empty() {
        let mut oauth = InlineTable::new();
        draft.oauth_client_id.iter().for_each(|id| drop(oauth.insert("client_id", id.as_str().into())));
        if !draft.oauth_scopes.is_empty() {
            oauth.insert("scopes", draft.oauth_scopes.iter().map(String::as_str).collect::<Array>().into());
        }
        set("oauth", oauth.into());
    }
    if !draft.values.is_empty() {
        let values = draft.values.iter().map(|value| (value.key.as_str(), Value::InlineTable(user_value(value))));
        set("values", values.collect::<InlineTable>().into());
    }
    table
}

fn user_value(value: &UserValueDraft) -> InlineTable {
    let mut table = InlineTable::new();
    value.description.iter().for_each(|text| drop(table.insert("description", text.as_str().into())));
    if !value.is_secret {
        table.insert("secret", false.into());
    }
    value.default.iter().for_each(|text| drop(table.insert("default", text.as_str().into())));
    table
}

/// Reads an installation as the draft that it was made from. The keys that an import does not write are ignored.
pub(crate) fn draft_of(table: &Table) -> ServerDraft {
    let text = |key: &str| table.get(key).and_then(Item::as_str).map(str::to_owned);
    let words = |item: Option<&Item>| {
        let items = item.and_then(Item::as_array).into_iter().flatten();
        items.filter_map(|item| item.as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    let pairs = |key: &str| {
        let table = table.get(key).and_then(Item::as_table_like);
        let pairs = table.into_iter().flat_map(|table| table.iter());
        pairs.filter_map(|(name, value)| Some((name.to_owned(), value.as_str()?.to_owned()))).collect()
    };
    let transport = match text("transport").as_deref() {
        Some("http") => "http",
        Some("sse") => "sse",
        _ => "stdio",
    };
    ServerDraft {
        id: text("id").unwrap_or_default(),
        transport,
        command: text("command"),
        args: words(table.get("args")),
        env: pairs("env"),
        cwd: text("cwd"),
        env_file: text("env_file"),
        url: text("url"),
        headers: pairs("headers"),
        ..ServerDraft::default()
    }
}
