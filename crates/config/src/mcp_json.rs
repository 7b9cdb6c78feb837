//! The servers of a client's file, such as the `mcp.json` of Claude, Cursor and VS Code, as one team `local` with one user
//! `me`. The file belongs to another program. Only a text that cannot be parsed is an error: a server that cannot be used
//! is left out with a warning, and so is a key without a meaning for the satellite.
//!
//! `mcp_satellite_clients` reads the file. The keys `keep`, `idle` and `protocol`, which no client understands, are read
//! here.

use std::path::Path;

use mcp_satellite_clients::{
    Client, ClientFile, ClientFileError, ClientScope, ClientServer, HiddenText, ImportNote, read as read_servers,
};
use toml_span::value::{Key, Table, Value, ValueInner};
use toml_span::{Span, Spanned};

use super::client_server::{DraftContext, ServerDraft, draft_server, workspace_of};
use super::errors::ConfigFindings;
use super::file::{ConfigFile, InstallationTable, ServerTable, ServerTierTable, TeamTable, UserTable, UserValueTable};
use super::oauth::OAuthTable;
use super::policy::PolicyTier;
use super::reader::{ParsedValue, SpannedText, TableReader};

/// Keys that only the satellite understands.
const OWN_KEYS: [&str; 3] = ["keep", "idle", "protocol"];

/// Reads the servers in `text`. `home` is the home directory of the satellite's user. Returns `None` after an error.
pub(crate) fn read(name: &str, text: &str, home: Option<&Path>, findings: &mut ConfigFindings) -> Option<ConfigFile> {
    let file = ClientFile::guess(name).unwrap_or_else(|| ClientFile::named(Client::ClaudeCode, name));
    let found = match read_servers(&file, text.as_bytes()) {
        Ok(found) => found,
        Err(error) => {
            let (line, column, message) = match &error {
                ClientFileError::Syntax { line, column, message, .. } => (*line, *column, message.clone()),
                ClientFileError::Truncated { line, column, .. } => {
                    (*line, *column, "the file ends too early".to_owned())
                }
                ClientFileError::TooDeep { line, column, .. } => {
                    (*line, *column, "this is nested too deeply".to_owned())
                }
                ClientFileError::NotText { line, column, .. } => (*line, *column, "this is not UTF-8".to_owned()),
                ClientFileError::TooLarge { .. } => (1, 1, "the file is larger than 16 MiB".to_owned()),
            };
            findings.error(
                span_at(text, line, column),
                message,
                "correct this first; the rest of the file was not read",
            );
            return None;
        }
    };
    let start = Span::new(0, 1);
    for note in &found.notes {
        findings.warning(start, format!("{note}"));
    }
    let mut installations: Vec<InstallationTable> = Vec::new();
    for server in &found.servers {
        let at = place(server.at);
        let mut warn = |message: String| findings.warning(at, message);
        if server.is_satellite {
            warn(format!("`{}` is left out: it connects a client to the satellite", server.name));
            continue;
        }
        if !server.enabled {
            warn(format!("`{}` is disabled and left out", server.name));
            continue;
        }
        let workspace = match &server.scope {
            ClientScope::Local(project) => project.clone(),
            ClientScope::User | ClientScope::Project | ClientScope::Profile(_) => workspace_of(Path::new(name)),
        };
        let inputs = &found.inputs;
        let context = DraftContext {
            client: file.client,
            home,
            workspace,
            folder: None,
            moved_files: "",
            inputs,
            accepts_references: true,
        };
        let draft = match draft_server(&without_own_keys(server), &context) {
            Ok(draft) => draft,
            Err(reason) => {
                warn(format!("`{}` is left out: {reason}", server.name));
                continue;
            }
        };
        if installations.iter().any(|other| other.id.get().is_some_and(|id| id.value == draft.id)) {
            let id = &draft.id;
            warn(format!("`{}` is left out: another server of the file has the id `{id}`; rename it", server.name));
            continue;
        }
        if draft.id != server.name {
            warn(format!("`{}` has the id `{}`", server.name, draft.id));
        }
        for note in &draft.notes {
            warn(format!("`{}`: {note}", server.name));
        }
        installations.push(installation(&draft, at, &server.unknown_texts, findings));
    }
    for server in &found.unreadable {
        findings.warning(place(server.at), format!("`{}` is left out: {}", server.name, server.reason));
    }
    if found.servers.is_empty() && found.unreadable.is_empty() {
        let message = "the file contains no servers; write { \"mcpServers\": { \"NAME\": { \"command\": … } } }";
        findings.warning(start, message);
    }
    Some(local_team(installations))
}

/// Returns a configuration of one team `local` with one user `me`.
fn local_team(installations: Vec<InstallationTable>) -> ConfigFile {
    let at = Span::new(0, 1);
    let given = |text: &str| spanned(text, at);
    let user = UserTable { at, id: given("me"), slug: given("me"), has_stored_token: true, ..UserTable::default() };
    let team = TeamTable {
        at,
        id: given("local"),
        slug: given("local"),
        users: vec![user],
        installations,
        ..TeamTable::default()
    };
    ConfigFile { teams: vec![team], ..ConfigFile::default() }
}

/// Removes the notes about keys that are read here. A value that is no string keeps its note.
fn without_own_keys(server: &ClientServer) -> ClientServer {
    let is_own = |key: &String| {
        OWN_KEYS.contains(&key.as_str()) && server.unknown_texts.iter().any(|(unknown, _)| unknown == key)
    };
    let mut kept = server.clone();
    kept.notes.retain(|note| !matches!(note, ImportNote::UnknownKey(key) if is_own(key)));
    kept
}

fn installation(
    draft: &ServerDraft,
    at: Span,
    unknown_texts: &[(String, HiddenText)],
    findings: &mut ConfigFindings,
) -> InstallationTable {
    let text = |text: &Option<String>| text.as_deref().map_or(ParsedValue::Absent, |text| spanned(text, at));
    let words = |words: &[String]| words.iter().map(|word| spanned_text(word, at)).collect();
    let pairs = |pairs: &[(String, String)]| {
        pairs.iter().map(|(name, value)| (spanned_text(name, at), spanned_text(value, at))).collect()
    };
    let values = draft.values.iter().map(|value| {
        let table = UserValueTable {
            description: text(&value.description),
            secret: ParsedValue::Present(Spanned::with_span(value.is_secret, at)),
            default: text(&value.default),
        };
        (spanned_text(&value.key, at), table)
    });
    let has_oauth = draft.oauth_client_id.is_some() || !draft.oauth_scopes.is_empty();
    let server = ServerTable {
        at,
        transport: spanned(draft.transport, at),
        command: text(&draft.command),
        url: text(&draft.url),
        cwd: text(&draft.cwd),
        tier: ServerTierTable {
            args: words(&draft.args),
            env: pairs(&draft.env),
            headers: pairs(&draft.headers),
            ..ServerTierTable::default()
        },
        values: values.collect(),
        env_file: text(&draft.env_file),
        secret_args: ParsedValue::Present(Spanned::with_span(draft.secret_args, at)),
        allow_tools: draft.allow_tools.as_deref().map(&words),
        deny_tools: Some(words(&draft.deny_tools)),
        oauth: has_oauth.then(|| OAuthTable::public(at, text(&draft.oauth_client_id), words(&draft.oauth_scopes))),
        ..ServerTable::default()
    };
    let mut table = InstallationTable {
        id: spanned(&draft.id, at),
        server: spanned(&draft.id, at),
        own: server,
        ..InstallationTable::default()
    };
    let errors = findings.error_count();
    let subject = format!("`{}`", draft.id);
    let own = unknown_texts.iter().filter(|(key, _)| OWN_KEYS.contains(&key.as_str()));
    let own: Table<'_> = own
        .map(|(key, text)| {
            let value = Value::with_span(ValueInner::String(text.expose().into()), at);
            (Key { name: key.as_str().into(), span: at }, value)
        })
        .collect();
    let own = Value::with_span(ValueInner::Table(own), at);
    if let Some(mut fields) = TableReader::open(own, at, subject.clone(), findings) {
        table.keep = fields.text("keep");
        table.own.protocol = fields.text("protocol");
        table.policy = PolicyTier::from_mcp_json(&mut fields);
    }
    findings.demote_errors(errors, &subject);
    table
}

fn spanned(text: &str, at: Span) -> ParsedValue<String> {
    ParsedValue::Present(spanned_text(text, at))
}

fn spanned_text(text: &str, at: Span) -> SpannedText {
    Spanned::with_span(text.to_owned(), at)
}

/// Returns the place of a server's name. Formats other than JSON have no places.
fn place(at: Option<usize>) -> Span {
    at.map_or(Span::new(0, 1), |at| Span::new(at, at + 1))
}

/// Returns the place of a line and a column, counted from 1 in characters.
fn span_at(text: &str, line: usize, column: usize) -> Span {
    let start = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum::<usize>();
    let before = text[start..].chars().take(column.saturating_sub(1)).map(char::len_utf8).sum::<usize>();
    Span::new(start + before, start + before + 1)
}
