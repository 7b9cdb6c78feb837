//! The user's configuration as an editable document. Every byte that it has remains: byte order mark, line endings,
//! comments, order and format.

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

const BYTE_ORDER_MARK: char = '\u{feff}';

/// The configuration to which servers are added.
pub(crate) struct EditedConfiguration {
    /// The text before the edit.
    original: String,
    document: DocumentMut,
    team: usize,
}

impl EditedConfiguration {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let original = text.to_owned();
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
        Ok(Self { original, document, team })
    }

    /// Returns a configuration without servers.
    pub(crate) fn empty() -> Self {
        let document = NEW_CONFIGURATION.parse().unwrap_or_default();
        Self { original: NEW_CONFIGURATION.to_owned(), document, team: 0 }
    }

    /// Returns an empty configuration with the `[satellite]` table of this one, which restricts commands.
    pub(crate) fn sample(&self) -> Self {
        let mut sample = Self::empty();
        if let Some(satellite) = self.document.get("satellite") {
            sample.document.insert("satellite", satellite.clone());
        }
        sample
    }

    /// Returns the document in the format of TOML's editor, which normalizes line endings.
    pub(crate) fn document_text(&self) -> String {
        self.document.to_string()
    }

    /// Returns the text before the edit with the added servers in place.
    pub(crate) fn text(&self) -> Result<String, String> {
        insert_added(&self.original, &self.document.to_string())
            .ok_or_else(|| "the servers cannot be added without other changes; add them at the end by hand".to_owned())
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

/// Copies the lines that `edited` has and `original` has not into `original`, whose other bytes remain. `edited` has no byte
/// order mark and ends each line with `\n`. Returns `None` if `edited` has other changes.
fn insert_added(original: &str, edited: &str) -> Option<String> {
    let body = original.strip_prefix(BYTE_ORDER_MARK).unwrap_or(original);
    let mark = &original[..original.len() - body.len()];
    let line_ending = if body.contains("\r\n") { "\r\n" } else { "\n" };
    let ends_line = body.is_empty() || body.ends_with('\n');
    // The last line is completed only if something follows it.
    let complete = if ends_line { body.to_owned() } else { format!("{body}{line_ending}") };
    let lines: Vec<&str> = complete.split_inclusive('\n').collect();
    let edited: Vec<&str> = edited.split_inclusive('\n').collect();
    let is_same =
        |(old, new): &(&&str, &&str)| old.trim_end_matches(['\r', '\n']) == new.trim_end_matches(['\r', '\n']);
    let before = lines.iter().zip(&edited).take_while(is_same).count();
    let (rest, edited) = (&lines[before..], &edited[before..]);
    let added = edited.len().checked_sub(rest.len())?;
    let (added, edited) = edited.split_at(added);
    if !rest.iter().zip(edited).all(|pair| is_same(&pair)) {
        return None;
    }
    if added.is_empty() {
        return Some(original.to_owned());
    }
    let added = added.concat().replace('\n', line_ending);
    let text = [mark, &lines[..before].concat(), &added, &rest.concat()].concat();
    let ends_as_before = !ends_line && !rest.is_empty();
    Some(if ends_as_before { text.trim_end_matches(['\r', '\n']).to_owned() } else { text })
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
    let names = |tools: &[String]| tools.iter().map(String::as_str).collect::<Array>();
    if let Some(tools) = &draft.allow_tools {
        set("allow_tools", names(tools).into());
    }
    if !draft.deny_tools.is_empty() {
        set("deny_tools", names(&draft.deny_tools).into());
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn every_byte_around_added_servers_remains() {
        let (id, command) = ("new".to_owned(), Some("x".to_owned()));
        let draft = ServerDraft { id, transport: "stdio", command, ..ServerDraft::default() };
        let team =
            "# ä\n[[teams]]\nid = 'a'  # one\n\n[[teams.installations]]\nid = \"old\"\ntext = \"\"\"\na\n\nb\"\"\"\n";
        for rest in ["", "\n# End.\n", "\n[gateway]\nlisten = \"off\"", "\n[gateway]\n\n", "\n# Imported from x", "# é"]
        {
            for (mark, line_ending) in [("", "\n"), ("\u{feff}", "\r\n"), ("\u{feff}", "\n"), ("", "\r\n")] {
                let original = format!("{mark}{team}{rest}").replace('\n', line_ending);
                let mut edited = EditedConfiguration::parse(&original).unwrap();
                assert_eq!(edited.text().unwrap(), original, "nothing is added");
                edited.add(&draft, "x (y)");
                let text = edited.text().unwrap();
                let added = "\n# Imported from x (y)\n[[teams.installations]]\nid = \"new\"\nserver = \"new\"\ncommand = \"x\"\n";
                let added = added.replace('\n', line_ending);
                let removed = text.replacen(&added, "", 1);
                assert!(text.contains(&added), "{text:?}");
                assert_eq!(removed.trim_end_matches(['\r', '\n']), original.trim_end_matches(['\r', '\n']), "{text:?}");
                assert_eq!(
                    text.matches("\r\n").count(),
                    if line_ending == "\n" { 0 } else { text.matches('\n').count() }
                );
                let ids: Vec<_> =
                    EditedConfiguration::parse(&text).unwrap().installations().map(|one| draft_of(one).id).collect();
                assert_eq!(ids, ["old", "new"]);
            }
        }
        let mixed = "[[teams]]\r\nid = \"a\"\n\n[gateway]\r\n";
        let mut edited = EditedConfiguration::parse(mixed).unwrap();
        edited.add(&draft, "x");
        let text = edited.text().unwrap();
        let at = text.find("# Imported").unwrap();
        let next = text.find("[gateway]").unwrap();
        assert_eq!(format!("{}{}", &text[..at], &text[next..]), mixed, "{text:?}");
    }
}
