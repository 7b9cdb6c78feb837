//! Edits of JSON with comments and trailing commas. The syntax tree of `jsonc-parser` supplies positions; the text between
//! them is copied, so that line endings, indentation, comments and commas remain. (Its own editable tree writes `\n`.)

use std::ops::Range;

use jsonc_parser::{
    CollectOptions,
    ast::{Object, ObjectProp, Value},
    parse_to_ast,
};

use crate::json_options::JSON_OPTIONS;
use crate::locations::FileFormat;
use crate::node::{ConfigNode, NodeKey, from_json};

use super::{
    error::EditError,
    splice::{Splice, apply, begins_line, indentation, line_end, line_ending, line_start},
};

/// Lists with at most this many scalars are written on one line.
const SHORT_LIST: usize = 4;

/// Returns the syntax tree, or `None` for a text that contains only whitespace and comments.
fn syntax(text: &str) -> Result<Option<Value<'_>>, EditError> {
    match parse_to_ast(text, &CollectOptions::default(), &JSON_OPTIONS) {
        Ok(result) => Ok(result.value),
        Err(error) => Err(EditError::Syntax {
            format: FileFormat::Json,
            line: error.line_display(),
            message: error.kind().to_string(),
        }),
    }
}

/// Returns the value of the text; a text without a value is an empty object.
pub(crate) fn parse(text: &str) -> Result<ConfigNode, EditError> {
    Ok(syntax(text)?.map_or_else(|| ConfigNode::Map(Vec::new()), |value| from_json(value, 0)))
}

/// Sets the server `name` in the object at the path `table`.
pub(crate) fn set(text: &str, table: &[&str], name: &str, server: &ConfigNode) -> Result<String, EditError> {
    let style = JsonStyle::of(text);
    let Some(root) = syntax(text)? else {
        let separator = if text.trim().is_empty() || text.ends_with('\n') { "" } else { style.newline };
        let kept = if text.trim().is_empty() { "" } else { text };
        let root = one_server(table, name, server);
        return Ok(format!("{kept}{separator}{}{}", style.render(&root, Some("")), style.newline));
    };
    let Some(mut object) = root.as_object() else { return Ok(text.to_owned()) };
    for (depth, key) in table.iter().enumerate() {
        let value = || one_server(&table[depth + 1..], name, server);
        match object.get(key) {
            None => return Ok(apply(text, style.insert(text, object, key, &value()))),
            Some(ObjectProp { value: Value::Object(inner), .. }) => object = inner,
            Some(property) => return Ok(apply(text, vec![style.replace(text, property, &value())])),
        }
    }
    let splices = match object.get(name) {
        None => style.insert(text, object, name, server),
        Some(property) => vec![style.replace(text, property, server)],
    };
    Ok(apply(text, splices))
}

/// Returns objects along the path `table` with one server.
pub(crate) fn one_server(table: &[&str], name: &str, server: &ConfigNode) -> ConfigNode {
    let servers = ConfigNode::Map(vec![(name.into(), server.clone())]);
    table.iter().rev().fold(servers, |inner, key| ConfigNode::Map(vec![((*key).into(), inner)]))
}

/// Removes the server `name` from the object at the path `table`.
pub(crate) fn remove(text: &str, table: &[&str], name: &str) -> Result<String, EditError> {
    let Some(root) = syntax(text)? else { return Ok(text.to_owned()) };
    let servers = table.iter().try_fold(root.as_object(), |object, key| Some(object?.get_object(key))).flatten();
    Ok(apply(text, servers.map(|servers| deletion(text, servers, name)).unwrap_or_default()))
}

/// The replacements that delete one property with its comma and the comment after it on its line.
fn deletion(text: &str, object: &Object<'_>, name: &str) -> Vec<Splice> {
    let Some(index) = object.properties.iter().position(|property| property.name.as_str() == name) else {
        return Vec::new();
    };
    let property = bounds(&object.properties[index]);
    if object.properties.len() == 1 {
        let inner = object.range.start + 1..object.range.end - 1;
        let comma = comma_after(text, property.end, inner.end);
        let rest = [&text[inner.start..property.start], &text[comma.unwrap_or(property.end)..inner.end]];
        if rest.iter().all(|rest| rest.trim().is_empty()) {
            return vec![Splice::delete(inner)];
        }
    }
    let mut splices = Vec::new();
    let (mut start, mut end) = (property.start, property.end);
    if let Some(after_comma) = comma_after(text, property.end, object.range.end) {
        if text[property.end..after_comma - 1].trim().is_empty() {
            end = after_comma;
        } else {
            splices.push(Splice::delete(after_comma - 1..after_comma));
        }
    } else if let Some(previous) = index.checked_sub(1).and_then(|index| object.properties.get(index))
        && let Some(after_comma) = comma_after(text, previous.range.end, property.start)
    {
        splices.push(Splice::delete(after_comma - 1..after_comma));
        start = text[..start].trim_end_matches([' ', '\t']).len();
    }
    let line = line_end(text, end);
    let rest_of_line = end_of_line_comment(text, end);
    if begins_line(text, property.start) && text[rest_of_line..line].trim().is_empty() {
        splices.retain(|splice| splice.range.start >= line || splice.range.end <= property.start);
        splices.push(Splice::delete(line_start(text, property.start)..line));
    } else {
        let blanks = text[end..].len() - text[end..].trim_start_matches([' ', '\t']).len();
        let spaces = if text[end + blanks..].starts_with('}') { 0 } else { blanks };
        splices.push(Splice::delete(start..end + spaces));
    }
    splices
}

fn bounds(property: &ObjectProp<'_>) -> Range<usize> {
    property.range.start..property.range.end
}

/// Returns the position after the comma that follows `from`, if only whitespace and comments precede the comma.
fn comma_after(text: &str, from: usize, end: usize) -> Option<usize> {
    let at = skip_trivia(text, from);
    (at < end && text[at..].starts_with(',')).then_some(at + 1)
}

/// Returns the position of the next character that is neither whitespace nor in a comment.
fn skip_trivia(text: &str, mut at: usize) -> usize {
    loop {
        let rest = text[at..].trim_start();
        at = text.len() - rest.len();
        if rest.starts_with("//") {
            at = line_end(text, at);
        } else if rest.starts_with("/*") {
            at += rest.find("*/").map_or(rest.len(), |end| end + 2);
        } else {
            return at;
        }
    }
}

/// Returns the end of the comments that follow `from` on the same line.
fn end_of_line_comment(text: &str, from: usize) -> usize {
    let mut end = from;
    loop {
        let at = text.len() - text[end..].trim_start_matches([' ', '\t']).len();
        let rest = &text[at..];
        if rest.starts_with("//") {
            let line = &text[at..line_end(text, at)];
            return at + line.trim_end_matches(['\r', '\n']).len();
        }
        match rest.strip_prefix("/*").and_then(|comment| comment.find("*/")) {
            Some(length) if !rest[..length + 2].contains('\n') => end = at + length + 4,
            _ => return end,
        }
    }
}

/// The parts of a file's style that inserted text follows.
struct JsonStyle {
    newline: &'static str,
    /// The indentation of one level; `None` if the whole file is one line.
    unit: Option<String>,
    colon: &'static str,
}

impl JsonStyle {
    fn of(text: &str) -> Self {
        let newline = line_ending(text);
        let lines = text.trim().lines().map(|line| (&line[..line.len() - line.trim_start().len()], line.trim()));
        // The first indented line that begins with a property is one level below the root object.
        let unit =
            lines.clone().find(|(indent, line)| !indent.is_empty() && line.starts_with('"')).map(|(indent, _)| indent);
        let one_line = text.trim().lines().count() == 1 && !matches!(text.trim(), "{}" | "{ }");
        let unit = match unit {
            Some(indent) if indent.starts_with('\t') => Some("\t".to_owned()),
            Some(indent) => Some(indent.to_owned()),
            None if one_line => None,
            None => Some("  ".to_owned()),
        };
        let colon = if unit.is_none() && text.contains("\":") && !text.contains("\": ") { ":" } else { ": " };
        Self { newline, unit, colon }
    }

    /// The replacements that add a property at the end of an object.
    fn insert(&self, text: &str, object: &Object<'_>, key: &str, value: &ConfigNode) -> Vec<Splice> {
        let (open, close) = (object.range.start + 1, object.range.end - 1);
        let outer = indentation(text, object.range.start);
        let property = |indent: Option<&str>| format!("{}{}{}", quote(key), self.colon, self.render(value, indent));
        let Some(last) = object.properties.last() else {
            let Some(unit) = &self.unit else { return vec![Splice::insert(close, property(None))] };
            let indent = format!("{outer}{unit}");
            let inner = &text[open..close];
            let at = open + inner.trim_end().len();
            let lines = format!("{}{indent}{}", self.newline, property(Some(&indent)));
            return vec![Splice { range: at..close, with: format!("{lines}{}{outer}", self.newline) }];
        };
        let last = bounds(last);
        let comma = comma_after(text, last.end, close);
        let first = object.properties.first().map_or(last.start, |first| first.range.start);
        if begins_line(text, first) && text[open..first].contains('\n') {
            let indent = indentation(text, first);
            let after = end_of_line_comment(text, comma.unwrap_or(last.end));
            let line = format!("{}{indent}{}", self.newline, property(Some(indent)));
            match comma {
                Some(_) => vec![Splice::insert(after, format!("{line},"))],
                None if after == last.end => vec![Splice::insert(after, format!(",{line}"))],
                None => vec![Splice::insert(last.end, ",".to_owned()), Splice::insert(after, line)],
            }
        } else {
            let space = if self.colon == ":" { "" } else { " " };
            match comma {
                Some(at) => vec![Splice::insert(at, format!("{space}{},", property(None)))],
                None => vec![Splice::insert(last.end, format!(",{space}{}", property(None)))],
            }
        }
    }

    /// The replacement of a property's value.
    fn replace(&self, text: &str, property: &ObjectProp<'_>, value: &ConfigNode) -> Splice {
        let indent = begins_line(text, property.range.start).then(|| indentation(text, property.range.start));
        let start = match &property.value {
            Value::StringLit(value) => value.range,
            Value::NumberLit(value) => value.range,
            Value::BooleanLit(value) => value.range,
            Value::NullKeyword(value) => value.range,
            Value::Object(value) => value.range,
            Value::Array(value) => value.range,
        };
        Splice { range: start.start..start.end, with: self.render(value, indent) }
    }

    /// Returns the text of a value on lines indented like `indent`, or on one line for `None`.
    fn render(&self, value: &ConfigNode, indent: Option<&str>) -> String {
        let lines = match (indent, &self.unit) {
            (Some(outer), Some(unit)) => Some((outer, format!("{outer}{unit}"))),
            _ => None,
        };
        let enclose = |open: char, close: char, elements: Vec<String>, one_line: bool| match &lines {
            _ if elements.is_empty() => format!("{open}{close}"),
            Some((outer, inner)) if !one_line => {
                let separator = format!(",{}{inner}", self.newline);
                format!("{open}{0}{inner}{1}{0}{outer}{close}", self.newline, elements.join(&separator))
            }
            _ => format!("{open}{}{close}", elements.join(if self.colon == ":" { "," } else { ", " })),
        };
        let inner = lines.as_ref().map(|(_, inner)| inner.as_str());
        match value {
            ConfigNode::Null => "null".to_owned(),
            ConfigNode::Bool(value) => value.to_string(),
            ConfigNode::Literal(literal) => literal.clone(),
            ConfigNode::Text(text) => quote(text),
            ConfigNode::List(items) => {
                let scalars = items.iter().all(|item| !matches!(item, ConfigNode::List(_) | ConfigNode::Map(_)));
                let elements = items.iter().map(|item| self.render(item, inner)).collect();
                enclose('[', ']', elements, scalars && items.len() <= SHORT_LIST)
            }
            ConfigNode::Map(entries) => {
                let render = |(key, value): &(NodeKey, ConfigNode)| {
                    format!("{}{}{}", quote(key), self.colon, self.render(value, inner))
                };
                enclose('{', '}', entries.iter().map(render).collect(), false)
            }
        }
    }
}

/// Returns a JSON string. TOML and YAML read it as the same string.
pub(crate) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Returns the text of a value on indented lines.
pub(crate) fn snippet(value: &ConfigNode) -> String {
    JsonStyle { newline: "\n", unit: Some("  ".to_owned()), colon: ": " }.render(value, Some(""))
}
