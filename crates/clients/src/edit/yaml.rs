//! Edits of YAML. No crate edits YAML and keeps its format, so lines are inserted and removed, and the result is parsed
//! again. A file in a notation that this module does not handle causes an error with the text to paste by hand.

use std::ops::Range;

use crate::locations::FileFormat;
use crate::node::ConfigNode;

use super::{
    error::EditError,
    json::quote,
    splice::{Splice, apply, line_ending},
};

/// Returns the value of the text; a text without a value is an empty map.
pub(crate) fn parse(text: &str) -> Result<ConfigNode, EditError> {
    match yaml_serde::from_str(text) {
        Ok(ConfigNode::Null) => Ok(ConfigNode::Map(Vec::new())),
        Ok(value) => Ok(value),
        Err(error) => Err(EditError::Syntax {
            format: FileFormat::Yaml,
            line: error.location().map_or(1, |location| location.line()),
            message: error.to_string(),
        }),
    }
}

/// The lines of the collection of servers.
struct Section {
    /// The line of the key.
    key_line: Range<usize>,
    /// The position after the colon of the key.
    colon: usize,
    /// The indentation of the entries, and each entry's lines.
    indent: usize,
    entries: Vec<Range<usize>>,
    /// The end of the section, after the comments and blank lines at its end.
    end: usize,
}

/// The text that the key of the section has after its colon.
#[derive(PartialEq)]
enum Inline {
    Nothing,
    /// `{}`, `[]`, `null` or `~`.
    Empty,
    Other,
}

/// Sets the server at `index` of `count` servers (`None`: adds it) in the map or list `key`. Returns several candidates:
/// the first one whose value is correct counts.
pub(crate) fn set(
    text: &str,
    key: &str,
    name: Option<&str>,
    server: &ConfigNode,
    index: Option<usize>,
    count: usize,
) -> Vec<String> {
    let newline = line_ending(text);
    let lines = |indent: usize| entry_lines(name, server, indent).replace('\n', newline);
    let end_of_line = |at: usize| if at > 0 && !text[..at].ends_with('\n') { newline } else { "" };
    let Some(section) = section(text, key) else {
        let line = format!("{}{key}:{newline}{}", end_of_line(text.len()), lines(2));
        return vec![apply(text, vec![Splice::insert(text.len(), line)])];
    };
    let inline = section.inline(text);
    if inline == Inline::Other || section.entries.len() != count {
        return Vec::new();
    }
    if let Some(entry) = index.and_then(|index| section.entries.get(index)) {
        let with = lines(section.indent);
        return vec![apply(text, vec![Splice { range: entry.clone(), with }])];
    }
    let mut ends = vec![section.entries.last().map_or(section.key_line.end, |entry| entry.end), section.end];
    ends.dedup();
    let candidate = |end: usize| {
        let mut splices = vec![Splice::insert(end, format!("{}{}", end_of_line(end), lines(section.indent)))];
        if inline == Inline::Empty {
            let rest = &text[section.colon..section.key_line.end];
            let value = rest.trim_end_matches(['\r', '\n']);
            let comment = value.find(" #").unwrap_or(value.len());
            splices.push(Splice::delete(section.colon..section.colon + value[..comment].trim_end().len()));
        }
        apply(text, splices)
    };
    ends.into_iter().map(candidate).collect()
}

/// Removes the server at `index` of `count` servers.
pub(crate) fn remove(text: &str, key: &str, index: usize, count: usize, empty: &str) -> Vec<String> {
    let Some(section) = section(text, key).filter(|section| section.entries.len() == count) else { return Vec::new() };
    let Some(entry) = section.entries.get(index) else { return Vec::new() };
    let mut splices = vec![Splice::delete(entry.clone())];
    if count == 1 {
        splices.push(Splice::insert(section.colon, format!(" {empty}")));
    }
    vec![apply(text, splices)]
}

impl Section {
    fn inline(&self, text: &str) -> Inline {
        let value = text[self.colon..self.key_line.end].trim();
        let value = if value.starts_with('#') { "" } else { value.split(" #").next().unwrap_or_default().trim() };
        match value.replace(' ', "").as_str() {
            "" => Inline::Nothing,
            "{}" | "[]" | "null" | "~" => Inline::Empty,
            _ => Inline::Other,
        }
    }
}

/// Returns the lines of the top-level key `key` and of the entries below it.
fn section(text: &str, key: &str) -> Option<Section> {
    let mut lines = lines(text).skip_while(|line| colon_after_key(&text[line.clone()], key).is_none());
    let key_line = lines.next()?;
    let colon = key_line.start + colon_after_key(&text[key_line.clone()], key)?;
    let mut section = Section { end: key_line.end, key_line, colon, indent: 2, entries: Vec::new() };
    for line in lines {
        let content = text[line.clone()].trim_end();
        let indent = content.len() - content.trim_start_matches(' ').len();
        let content = &content[indent..];
        let is_dash = content == "-" || content.starts_with("- ");
        let is_comment = content.is_empty() || content.starts_with('#');
        if !is_comment && indent == 0 && !is_dash {
            break;
        }
        section.end = line.end;
        if section.entries.is_empty() {
            if !is_comment {
                section.indent = indent;
                section.entries.push(line);
            }
        } else if !is_comment && indent == section.indent {
            section.entries.push(line);
        } else if !content.is_empty()
            && indent > section.indent
            && let Some(entry) = section.entries.last_mut()
        {
            entry.end = line.end;
        }
    }
    Some(section)
}

/// Returns the ranges of all lines with their line endings.
fn lines(text: &str) -> impl Iterator<Item = Range<usize>> {
    text.split_inclusive('\n').scan(0, |start, line| {
        let range = *start..*start + line.len();
        *start = range.end;
        Some(range)
    })
}

/// Returns the position after the colon of a line that begins with `key`.
fn colon_after_key(line: &str, key: &str) -> Option<usize> {
    let rest = line
        .strip_prefix(key)
        .or_else(|| line.strip_prefix('"')?.strip_prefix(key)?.strip_prefix('"'))
        .or_else(|| line.strip_prefix('\'')?.strip_prefix(key)?.strip_prefix('\''))?;
    let rest = rest.trim_start_matches(' ').strip_prefix(':')?;
    (rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n'])).then(|| line.len() - rest.len())
}

/// Returns the lines of an entry of a map, or of a list if it has no name.
fn entry_lines(name: Option<&str>, value: &ConfigNode, indent: usize) -> String {
    let lines = value_lines(value, indent + 2);
    match name {
        Some(name) => format!("{:indent$}{}:{lines}", "", scalar(name)),
        None => format!("{:indent$}- {}", "", lines.trim_start()),
    }
}

/// Returns the text of a value after the colon of its key, with its line ending.
fn value_lines(value: &ConfigNode, indent: usize) -> String {
    match value {
        ConfigNode::Null => " null\n".to_owned(),
        ConfigNode::Bool(value) => format!(" {value}\n"),
        ConfigNode::Literal(literal) => format!(" {literal}\n"),
        ConfigNode::Text(value) => format!(" {}\n", scalar(value)),
        ConfigNode::List(items) if items.is_empty() => " []\n".to_owned(),
        ConfigNode::Map(entries) if entries.is_empty() => " {}\n".to_owned(),
        ConfigNode::List(items) => {
            let items: String = items.iter().map(|item| entry_lines(None, item, indent)).collect();
            format!("\n{items}")
        }
        ConfigNode::Map(entries) => {
            let entries: String = entries.iter().map(|(key, value)| entry_lines(Some(key), value, indent)).collect();
            format!("\n{entries}")
        }
    }
}

/// Returns a string without quotation marks if YAML reads it as the same string, otherwise with them.
fn scalar(text: &str) -> String {
    let is_plain = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte));
    let is_keyword = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"]
        .iter()
        .any(|keyword| keyword.eq_ignore_ascii_case(text));
    if is_plain && !is_keyword { text.to_owned() } else { quote(text) }
}

/// Returns the lines of a section with one server.
pub(crate) fn snippet(key: &str, name: Option<&str>, server: &ConfigNode) -> String {
    format!("{key}:\n{}", entry_lines(name, server, 2))
}
