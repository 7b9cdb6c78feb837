//! Tool parameters that are repeated in HTTP headers, so that a proxy need not read the message. A tool's schema marks
//! them with `x-mcp-header`.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::rpc::member;

const MARK: &str = "x-mcp-header";

/// A marked parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderParam {
    /// Name of the header without the prefix `Mcp-Param-`.
    pub header: Box<str>,
    // Names of the properties that lead to the parameter, from the root of the arguments.
    path: Vec<String>,
}

/// Returns false if the definition of a tool surely marks no parameter, without parsing it.
pub fn may_have_header_params(definition: &str) -> bool {
    // A property name may contain escapes, so definitions with escapes are parsed too.
    let has = |part: &str| memchr::memmem::find(definition.as_bytes(), part.as_bytes()).is_some();
    has(MARK) || has("\\u")
}

/// Returns the marked parameters of a tool from its definition.
///
/// # Errors
/// Returns the reason if the definition is invalid and the tool must not be used.
pub fn header_params(definition: &str) -> Result<Vec<HeaderParam>, String> {
    if !may_have_header_params(definition) {
        return Ok(Vec::new());
    }
    let schema = member(definition, "inputSchema").and_then(|schema| serde_json::from_str(schema).ok());
    let Some(Value::Object(schema)) = schema else { return Ok(Vec::new()) };
    let mut mirrors = Vec::new();
    collect(&Value::Object(schema), true, &mut Vec::new(), &mut mirrors)?;
    let mut seen = BTreeSet::new();
    match mirrors.iter().find(|mirror| !seen.insert(mirror.header.to_ascii_lowercase())) {
        Some(twice) => Err(format!("two parameters are marked with the header `{}`", twice.header)),
        None => Ok(mirrors),
    }
}

// Searches a schema for marks. `reached` is true if the value has exactly one possible place in the arguments.
fn collect(schema: &Value, reached: bool, path: &mut Vec<String>, out: &mut Vec<HeaderParam>) -> Result<(), String> {
    match schema {
        Value::Object(members) => {
            if let Some(mark) = members.get(MARK) {
                out.push(parse_mark(mark, members.get("type"), reached, path)?);
            }
            for (keyword, inner) in members {
                match (&**keyword, inner) {
                    ("properties", Value::Object(properties)) => {
                        for (name, property) in properties {
                            path.push(name.clone());
                            collect(property, reached, path, out)?;
                            path.pop();
                        }
                    }
                    ("$defs" | "definitions" | "dependentSchemas" | "patternProperties", Value::Object(schemas)) => {
                        for schema in schemas.values() {
                            collect(schema, false, path, out)?;
                        }
                    }
                    // These contain data, not schemas.
                    (MARK | "default" | "const" | "enum" | "examples", _) => {}
                    _ => collect(inner, false, path, out)?,
                }
            }
            Ok(())
        }
        Value::Array(items) => items.iter().try_for_each(|item| collect(item, false, path, out)),
        _ => Ok(()),
    }
}

fn parse_mark(mark: &Value, kind: Option<&Value>, reached: bool, path: &[String]) -> Result<HeaderParam, String> {
    let place = if path.is_empty() { "the root of the schema".to_owned() } else { format!("`{}`", path.join(".")) };
    let bad = |why: &str| Err(format!("the mark `{MARK}` of {place} {why}"));
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let Some(header) = mark.as_str() else { return bad("is not a string") };
    if header.is_empty() || !header.bytes().all(is_token) {
        return bad("is not a valid header name");
    }
    if !reached || path.is_empty() {
        return bad("belongs to a value without a fixed place in the arguments");
    }
    if !matches!(kind.and_then(Value::as_str), Some("string" | "integer" | "boolean")) {
        return bad("belongs to a value that is neither a string, an integer nor a boolean");
    }
    Ok(HeaderParam { header: header.into(), path: path.to_vec() })
}

impl HeaderParam {
    /// Returns true if the parameter is a number, which has several spellings.
    pub fn is_number(&self, arguments: &str) -> bool {
        self.raw_value(arguments).is_some_and(|value| value.starts_with(|c: char| c == '-' || c.is_ascii_digit()))
    }

    fn raw_value<'a>(&self, arguments: &'a str) -> Option<&'a str> {
        self.path.iter().try_fold(arguments, |value, name| member(value, name))
    }

    /// Returns the value of the header for these arguments, a JSON object; `None` if they do not contain the parameter.
    pub fn value(&self, arguments: &str) -> Option<String> {
        let value = self.raw_value(arguments)?;
        match value.as_bytes().first()? {
            b'"' => serde_json::from_str(value).ok(),
            b't' | b'f' | b'-' | b'0'..=b'9' => Some(value.to_owned()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(schema: &str) -> Result<Vec<HeaderParam>, String> {
        header_params(&format!(r#"{{"name":"t","inputSchema":{schema}}}"#))
    }

    #[test]
    fn marked_parameters_at_any_depth_become_header_values() {
        let schema = r#"{"type":"object","properties":{
            "region":{"type":"string","x-mcp-header":"Region"},"query":{"type":"string"},
            "deep":{"type":"object","properties":{"n":{"type":"integer","x-mcp-header":"N"},"b":{"type":"boolean","x-mcp-header":"B"}}}}}"#;
        let mirrors = tool(schema).unwrap();
        let values = |arguments: &str| {
            let mut values: Vec<_> = mirrors.iter().map(|mirror| (&*mirror.header, mirror.value(arguments))).collect();
            values.sort_unstable();
            values
        };
        let text = |text: &str| Some(text.to_owned());
        let arguments = r#"{"region":"us\u002dwest1","deep":{"n":-42,"b":true}}"#;
        assert_eq!(values(arguments), [("B", text("true")), ("N", text("-42")), ("Region", text("us-west1"))]);
        assert_eq!(values(r#"{"region":null,"deep":3}"#), [("B", None), ("N", None), ("Region", None)]);
        assert_eq!(values("{}"), [("B", None), ("N", None), ("Region", None)]);
    }

    #[test]
    fn a_tool_with_an_invalid_mark_is_rejected() {
        for schema in [
            r#"{"x-mcp-header":"A"}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":""}}}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":"a b"}}}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":7}}}"#,
            r#"{"properties":{"a":{"type":"number","x-mcp-header":"A"}}}"#,
            r#"{"properties":{"a":{"x-mcp-header":"A"}}}"#,
            r#"{"properties":{"a":{"type":"array","items":{"type":"string","x-mcp-header":"A"}}}}"#,
            r#"{"properties":{"a":{"oneOf":[{"type":"string","x-mcp-header":"A"}]}}}"#,
            r#"{"$defs":{"a":{"type":"string","x-mcp-header":"A"}}}"#,
            r#"{"properties":{"a":{"type":"string","x-mcp-header":"A"},"b":{"type":"string","x-mcp-header":"a"}}}"#,
        ] {
            assert!(tool(schema).is_err(), "{schema}");
        }
        for schema in [
            r#"{"properties":{"x-mcp-header":{"type":"string"}}}"#,
            r#"{"properties":{"a":{"type":"string","default":{"x-mcp-header":"A"}}}}"#,
            "true",
        ] {
            assert_eq!(tool(schema), Ok(Vec::new()), "{schema}");
        }
        assert_eq!(header_params(r#"{"name":"x-mcp-header"}"#), Ok(Vec::new()));
    }
}
