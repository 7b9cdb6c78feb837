//! Edits of TOML. `toml_edit` supplies positions; the text between them is copied. (Its own editable document writes `\n`
//! instead of `\r\n`.)

use std::ops::Range;

use toml_edit::{Document, InlineTable, Item, Table, Value};

use crate::locations::FileFormat;
use crate::node::{ConfigNode, from_table};

use super::{
    error::EditError,
    json::quote,
    splice::{Splice, apply, line_end, line_ending, line_start},
};

fn document(text: &str) -> Result<Document<&str>, EditError> {
    Document::parse(text).map_err(|error| EditError::Syntax {
        format: FileFormat::Toml,
        line: text[..error.span().map_or(0, |span| span.start.min(text.len()))].matches('\n').count() + 1,
        message: error.message().to_owned(),
    })
}

/// Returns the value of the text.
pub(crate) fn parse(text: &str) -> Result<ConfigNode, EditError> {
    Ok(from_table(document(text)?.as_table()))
}

/// Sets the server `name` in the table `key`: a table that exists is replaced by a new one at the end of the file.
pub(crate) fn set(text: &str, key: &str, name: &str, server: &ConfigNode) -> Result<String, EditError> {
    let text = remove(text, key, name)?;
    if let Some(Item::Value(Value::InlineTable(servers))) = document(&text)?.get(key) {
        let property = format!("{} = {}", quote_key(name), inline(server));
        return Ok(apply(&text, inline_insertion(&text, servers, &property).into_iter().collect()));
    }
    let newline = line_ending(&text);
    let mut result = text;
    if !result.is_empty() && !result.ends_with('\n') {
        result.push_str(newline);
    }
    if !result.is_empty() && !ends_with_blank_line(&result) {
        result.push_str(newline);
    }
    result.push_str(&snippet(key, name, server).replace('\n', newline));
    Ok(result)
}

/// Removes the server `name` from the table `key`, in each of the notations of TOML.
pub(crate) fn remove(text: &str, key: &str, name: &str) -> Result<String, EditError> {
    let document = document(text)?;
    if let Some(Item::Value(Value::InlineTable(servers))) = document.get(key) {
        return Ok(apply(text, inline_deletion(text, servers, name).into_iter().collect()));
    }
    let mut statements = Vec::new();
    collect(document.as_table(), &mut Vec::new(), &mut statements);
    statements.sort_by_key(|statement| statement.range.start);
    let is_removed =
        |statement: &Statement| statement.path.len() > 1 && statement.path[0] == key && statement.path[1] == name;
    let mut splices = Vec::new();
    for group in statements.chunk_by(|one, other| is_removed(one) == is_removed(other)) {
        if let (Some(first), Some(last)) = (group.first(), group.last())
            && is_removed(first)
        {
            let mut range = line_start(text, first.range.start)..line_end(text, last.range.end);
            let before = &text[..range.start];
            let after = &text[range.end..];
            if ends_with_blank_line(before)
                && (after.is_empty() || after.starts_with('\n') || after.starts_with("\r\n"))
            {
                range.start = line_start(text, range.start - 1);
            }
            splices.push(Splice::delete(range));
        }
    }
    Ok(apply(text, splices))
}

fn ends_with_blank_line(text: &str) -> bool {
    text.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text)).is_some_and(|text| text.ends_with('\n'))
}

/// A table header or a key with its value.
struct Statement {
    path: Vec<String>,
    range: Range<usize>,
}

/// Collects the headers and key-value pairs of a table and its subtables.
fn collect(table: &Table, path: &mut Vec<String>, statements: &mut Vec<Statement>) {
    for (name, item) in table {
        path.push(name.to_owned());
        let mut header = |table: &Table, path: &[String]| {
            // Tables without a header of their own have a span, too.
            if let (false, Some(range)) = (table.is_dotted() || table.is_implicit(), table.span()) {
                statements.push(Statement { path: path.to_vec(), range });
            }
        };
        match item {
            Item::None => {}
            Item::Value(value) => {
                let key = table.get_key_value(name).and_then(|(key, _)| key.span());
                if let (Some(key), Some(value)) = (key, value.span()) {
                    statements.push(Statement { path: path.clone(), range: key.start..value.end });
                }
            }
            Item::Table(table) => {
                header(table, path);
                collect(table, path, statements);
            }
            Item::ArrayOfTables(tables) => {
                for table in tables {
                    header(table, path);
                }
                for table in tables {
                    collect(table, path, statements);
                }
            }
        }
        path.pop();
    }
}

/// The replacement that adds a property at the end of `{ … }`.
fn inline_insertion(text: &str, table: &InlineTable, property: &str) -> Option<Splice> {
    let close = table.span()?.end.checked_sub(1)?;
    let before = text[..close].trim_end();
    Some(match before.chars().next_back() {
        Some('{') => Splice { range: before.len()..close, with: format!(" {property} ") },
        Some(',') => Splice::insert(before.len(), format!(" {property}")),
        _ => Splice::insert(before.len(), format!(", {property}")),
    })
}

/// The replacement that deletes a property of `{ … }` with one comma.
fn inline_deletion(text: &str, table: &InlineTable, name: &str) -> Option<Splice> {
    let (key, item) = table.get_key_value(name)?;
    let (start, end) = (key.span()?.start, item.span()?.end);
    let after = text[end..].trim_start();
    if let Some(rest) = after.strip_prefix(',') {
        return Some(Splice::delete(start..text.len() - rest.trim_start_matches([' ', '\t']).len()));
    }
    let before = text[..start].trim_end();
    Some(Splice::delete(if before.ends_with(',') {
        before.len() - 1..end
    } else {
        before.len()..text.len() - after.len()
    }))
}

/// Returns the text of a server as a table with a header.
pub(crate) fn snippet(key: &str, name: &str, server: &ConfigNode) -> String {
    let entries = match server {
        ConfigNode::Map(entries) => entries.as_slice(),
        _ => &[],
    };
    let lines: Vec<_> =
        entries.iter().map(|(key, value)| format!("{} = {}\n", quote_key(key), inline(value))).collect();
    format!("[{}.{}]\n{}", quote_key(key), quote_key(name), lines.concat())
}

fn inline(value: &ConfigNode) -> String {
    match value {
        ConfigNode::Null => "\"\"".to_owned(),
        ConfigNode::Bool(value) => value.to_string(),
        ConfigNode::Literal(literal) => literal.clone(),
        ConfigNode::Text(text) => quote(text),
        ConfigNode::List(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        ConfigNode::Map(entries) if entries.is_empty() => "{}".to_owned(),
        ConfigNode::Map(entries) => {
            let properties: Vec<_> =
                entries.iter().map(|(key, value)| format!("{} = {}", quote_key(key), inline(value))).collect();
            format!("{{ {} }}", properties.join(", "))
        }
    }
}

fn quote_key(key: &str) -> String {
    let is_bare = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !key.is_empty() && key.bytes().all(is_bare) { key.to_owned() } else { quote(key) }
}
