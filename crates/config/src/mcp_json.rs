//! Reads the `mcp.json` of Claude, Cursor and VS Code, `{"mcpServers": {name: …}}` or `{"servers": {name: …}}`, as one
//! team `local` with one user `me`. The file belongs to another program. Keys that only that program understands cause
//! a warning at most; an error is reported only if another server would be started than intended.

use std::fmt;

use serde::de::{Deserializer as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use toml_span::value::{Key, Table, Value, ValueInner};
use toml_span::{Span, Spanned};

use super::errors::ConfigFindings;
use super::file::{ConfigFile, InstallationTable, ServerTable, ServerTierTable, TeamTable, UserTable};
use super::policy;
use super::reader::{ParsedValue, SpannedText, TableReader};
use mcp_satellite_model::spec::is_reserved_header;

const DEPTH_MAX: usize = 32;

/// Parses JSON with comments and trailing commas, as VS Code permits them. Returns `None` after an error.
pub(crate) fn parse(text: &str, findings: &mut ConfigFindings) -> Option<Value<'static>> {
    let plain = blank_comments(text);
    match serde_json::from_str::<&RawValue>(&plain) {
        Ok(raw) => parse_tree(&plain, raw, DEPTH_MAX, findings),
        Err(error) => {
            let start = plain.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
            let at = start + error.column().saturating_sub(1);
            let message = error.to_string();
            let message = message.rsplit_once(" at line ").map_or(&*message, |(message, _)| message);
            findings.error(Span::new(at, at + 1), message, "correct this first; the rest of the file was not read");
            None
        }
    }
}

fn parse_tree(text: &str, raw: &RawValue, depth: usize, findings: &mut ConfigFindings) -> Option<Value<'static>> {
    let at = span(text, raw.get().trim_matches('"'));
    if depth == 0 {
        findings.error(at, "this is nested too deeply", "a server is { \"command\": … } or { \"url\": … }");
        return None;
    }
    let mut deserializer = serde_json::Deserializer::from_str(raw.get());
    let inner = match raw.get().as_bytes().first() {
        Some(b'{') => {
            let entries = deserializer.deserialize_map(JsonEntriesVisitor).unwrap_or_default();
            let mut table = Table::new();
            for (name, value) in entries {
                let key_at = span(text, name.get().trim_matches('"'));
                let name: String = serde_json::from_str(name.get()).unwrap_or_default();
                if table.contains_key(name.as_str()) {
                    findings.error(key_at, format!("`{name}` is given twice"), "remove one");
                }
                if value.get() != "null"
                    && let Some(value) = parse_tree(text, value, depth - 1, findings)
                {
                    table.insert(Key { name: name.into(), span: key_at }, value);
                }
            }
            ValueInner::Table(table)
        }
        Some(b'[') => {
            let items = deserializer.deserialize_seq(JsonItemsVisitor).unwrap_or_default();
            ValueInner::Array(
                items.into_iter().filter_map(|item| parse_tree(text, item, depth - 1, findings)).collect(),
            )
        }
        Some(b'"') => {
            let Ok(string) = serde_json::from_str::<String>(raw.get()) else {
                findings.error(
                    at,
                    "this string contains an escape that is not a character",
                    "write the character itself",
                );
                return None;
            };
            ValueInner::String(string.into())
        }
        Some(b't') => ValueInner::Boolean(true),
        Some(b'f') => ValueInner::Boolean(false),
        _ => match (raw.get().parse(), raw.get().parse()) {
            (Ok(integer), _) => ValueInner::Integer(integer),
            (_, Ok(float)) => ValueInner::Float(float),
            _ => return None,
        },
    };
    Some(Value::with_span(inner, at))
}

/// Returns the place of `part`, which must be a slice of `text`.
fn span(text: &str, part: &str) -> Span {
    let start = part.as_ptr() as usize - text.as_ptr() as usize;
    Span::new(start, start + part.len())
}

struct JsonEntriesVisitor;

impl<'de> Visitor<'de> for JsonEntriesVisitor {
    type Value = Vec<(&'de RawValue, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(entries)
    }
}

struct JsonItemsVisitor;

impl<'de> Visitor<'de> for JsonItemsVisitor {
    type Value = Vec<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(items)
    }
}

/// Replaces the byte order mark, comments and trailing commas with blanks, so that every other byte keeps its place.
fn blank_comments(text: &str) -> String {
    #[derive(PartialEq)]
    enum JsonScanState {
        Text,
        String,
        Line,
        Block,
    }
    let mut bytes = text.as_bytes().to_vec();
    let (mut state, mut at, mut comma) = (JsonScanState::Text, 0, None);
    if text.starts_with('\u{feff}') {
        bytes[..3].fill(b' ');
        at = 3;
    }
    while at < bytes.len() {
        let next = bytes.get(at + 1).copied();
        match (&state, bytes[at]) {
            (JsonScanState::Text, b'/') if matches!(next, Some(b'/' | b'*')) => {
                state = if next == Some(b'/') { JsonScanState::Line } else { JsonScanState::Block };
                bytes[at..at + 2].fill(b' ');
                at += 1;
            }
            (JsonScanState::Text, b'}' | b']') => {
                if let Some(comma) = comma.take() {
                    bytes[comma] = b' ';
                }
            }
            (JsonScanState::Text, b',') => comma = Some(at),
            (JsonScanState::Text, byte) if !byte.is_ascii_whitespace() => {
                comma = None;
                if byte == b'"' {
                    state = JsonScanState::String;
                }
            }
            (JsonScanState::String, b'\\') => at += 1,
            (JsonScanState::String, b'"') | (JsonScanState::Line, b'\n') => state = JsonScanState::Text,
            (JsonScanState::Block, b'*') if next == Some(b'/') => {
                state = JsonScanState::Text;
                bytes[at..at + 2].fill(b' ');
                at += 1;
            }
            (JsonScanState::Line | JsonScanState::Block, byte) if byte != b'\n' => bytes[at] = b' ',
            (JsonScanState::Text | JsonScanState::String | JsonScanState::Line | JsonScanState::Block, _) => {}
        }
        at += 1;
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

pub(crate) fn read(tree: Value<'_>, findings: &mut ConfigFindings) -> ConfigFile {
    let at = Span::new(0, 1);
    let given = |text: &str| ParsedValue::Present(Spanned::with_span(text.to_owned(), at));
    let mut installations = Vec::new();
    if let Some(mut fields) = TableReader::open(tree, at, "the file".to_owned(), findings) {
        let key = if fields.contains_key("mcpServers") { "mcpServers" } else { "servers" };
        if fields.contains_key(key) {
            // `Fields::named` would reject keys that only the other program understands.
            installations = fields
                .values(key)
                .into_iter()
                .filter_map(|(name, value)| read_server(&name, value, fields.findings))
                .collect();
        } else {
            let hint = "write { \"mcpServers\": { \"NAME\": { \"command\": … } } }";
            fields.findings.error(at, "the file has neither `mcpServers` nor `servers`", hint);
        }
    }
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

fn read_server(name: &SpannedText, value: Value<'_>, findings: &mut ConfigFindings) -> Option<InstallationTable> {
    let subject = format!("`{}`", name.value);
    let mut fields = TableReader::open(value, name.span, subject.clone(), findings)?;
    if fields.flag("disabled").get().is_some_and(|disabled| disabled.value) {
        fields.findings.warning(name.span, format!("{subject} is disabled and left out"));
        return None;
    }
    let kind = match fields.text("type") {
        ParsedValue::Absent => fields.text("transport"),
        kind => kind,
    };
    let url = fields.text("url");
    let mut server = ServerTable {
        at: name.span,
        transport: normalize_transport(kind, url.get()),
        protocol: fields.text("protocol"),
        command: fields.text("command"),
        cwd: fields.text("cwd"),
        url,
        tier: ServerTierTable {
            args: fields.texts("args").unwrap_or_default(),
            env: fields.text_map("env"),
            headers: fields.text_map("headers"),
            ..ServerTierTable::default()
        },
        user_required: Vec::new(),
        oauth: None,
    };
    // Other programs require these headers in the file; the satellite sets them itself.
    server.tier.headers.retain(|(name, _)| {
        let own = is_reserved_header(&name.value);
        if own {
            let message = format!("the header `{}` of {subject} is not used: the satellite sets it", name.value);
            fields.findings.warning(name.span, message);
        }
        !own
    });
    replace_variables(&mut server, fields.findings);
    let (keep, policy) = (fields.text("keep"), policy::PolicyTier::from_mcp_json(&mut fields));
    let (unused, findings) = fields.rest();
    for key in unused {
        findings.warning(key.span, format!("`{}` of {subject} is not used", key.name));
    }
    let id = || ParsedValue::Present(Spanned::with_span(name.value.clone(), name.span));
    Some(InstallationTable { id: id(), server: id(), own: server, keep, policy, ..InstallationTable::default() })
}

/// Normalizes the name of the transport. If it is missing, the URL decides: a path that ends with `/sse` means the
/// older transport.
fn normalize_transport(kind: ParsedValue<String>, url: Option<&SpannedText>) -> ParsedValue<String> {
    let named = |name: &str, at: Span| ParsedValue::Present(Spanned::with_span(name.to_owned(), at));
    match kind {
        ParsedValue::Present(kind) => match kind.value.as_str() {
            "streamable-http" | "streamableHttp" | "streamable_http" | "streamable" => named("http", kind.span),
            _ => ParsedValue::Present(kind),
        },
        ParsedValue::Absent => url.map_or(ParsedValue::Absent, |url| {
            let path = url.value.split(['?', '#']).next().unwrap_or_default();
            named(if path.trim_end_matches('/').ends_with("/sse") { "sse" } else { "http" }, url.span)
        }),
        ParsedValue::Invalid => ParsedValue::Invalid,
    }
}

/// Replaces `${env:NAME}` and `${NAME}`, as a whole value or after `Bearer `, with `env:NAME`. Every other `${…}` is an
/// error, because the literal text would be a wrong password or path.
fn replace_variables(server: &mut ServerTable, findings: &mut ConfigFindings) {
    let good =
        |name: &str| !name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    for (_, text) in server.tier.env.iter_mut().chain(&mut server.tier.headers) {
        let (scheme, rest) = match text.value.split_once(' ') {
            Some((scheme, rest)) if !scheme.contains('$') => (format!("{scheme} "), rest),
            _ => (String::new(), text.value.as_str()),
        };
        let inner = rest.strip_prefix("${").and_then(|rest| rest.strip_suffix('}'));
        let variable = inner.map(|inner| inner.strip_prefix("env:").unwrap_or(inner));
        if let Some(variable) = variable.filter(|variable| good(variable)) {
            text.value = format!("{scheme}env:{variable}");
        }
    }
    let hint = "only ${env:NAME} as a whole env value or header is substituted; write the value itself";
    let tier = &server.tier;
    let pairs = tier.env.iter().chain(&tier.headers).map(|(_, value)| value);
    let scalars = [&server.command, &server.cwd, &server.url].into_iter().filter_map(ParsedValue::get);
    for text in pairs.chain(&tier.args).chain(scalars).filter(|text| text.value.contains("${")) {
        findings.error(text.span, "this variable cannot be substituted", hint);
    }
}
