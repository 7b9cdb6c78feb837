//! Reads JSON into the tree of `toml_span`, in which each key and value contains its place.

use std::fmt;

use serde::de::{Deserializer as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use toml_span::Span;
use toml_span::value::{Key, Table, Value, ValueInner};

use super::errors::ConfigFindings;

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
