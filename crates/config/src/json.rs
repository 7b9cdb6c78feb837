//! Reads the JSON of a backend into the tree of `toml_span`, in which each key and value contains its place.

use jsonc_parser::ast;
use jsonc_parser::common::{Range, Ranged};
use jsonc_parser::{CollectOptions, ParseOptions};
use toml_span::Span;
use toml_span::value::{Key, Table, Value, ValueInner};

use super::errors::ConfigFindings;

const DEPTH_MAX: usize = 32;

/// Returns `None` after an error.
pub(crate) fn parse(text: &str, findings: &mut ConfigFindings) -> Option<Value<'static>> {
    match jsonc_parser::parse_to_ast(text, &CollectOptions::default(), &ParseOptions::default()) {
        Ok(parsed) => parse_tree(parsed.value?, DEPTH_MAX, findings),
        Err(error) => {
            let hint = "correct this first; the rest of the file was not read";
            findings.error(span(error.range(), 0), error.kind().to_string(), hint);
            None
        }
    }
}

fn parse_tree(value: ast::Value<'_>, depth: usize, findings: &mut ConfigFindings) -> Option<Value<'static>> {
    // The place of a string is within its quotes.
    let at = span(value.range(), usize::from(matches!(value, ast::Value::StringLit(_))));
    if depth == 0 {
        findings.error(at, "this is nested too deeply", "a server is { \"command\": … } or { \"url\": … }");
        return None;
    }
    let inner = match value {
        ast::Value::Object(object) => {
            let mut table = Table::new();
            for entry in object.properties {
                let at = span(entry.name.range(), 1);
                let name = entry.name.into_string();
                if table.contains_key(name.as_str()) {
                    findings.error(at, format!("`{name}` is given twice"), "remove one");
                }
                if let Some(value) = parse_tree(entry.value, depth - 1, findings) {
                    table.insert(Key { name: name.into(), span: at }, value);
                }
            }
            ValueInner::Table(table)
        }
        ast::Value::Array(array) => ValueInner::Array(
            array.elements.into_iter().filter_map(|item| parse_tree(item, depth - 1, findings)).collect(),
        ),
        ast::Value::StringLit(string) => ValueInner::String(string.value.into_owned().into()),
        ast::Value::BooleanLit(flag) => ValueInner::Boolean(flag.value),
        ast::Value::NumberLit(number) => match (number.value.parse(), number.value.parse()) {
            (Ok(integer), _) => ValueInner::Integer(integer),
            (_, Ok(float)) => ValueInner::Float(float),
            _ => return None,
        },
        ast::Value::NullKeyword(_) => return None,
    };
    Some(Value::with_span(inner, at))
}

fn span(range: Range, quote: usize) -> Span {
    Span::new(range.start + quote, range.end.saturating_sub(quote))
}
