//! Parses the text of a client's file, within limits of size and depth.

use jsonc_parser::CollectOptions;
use toml_edit::Document;

use crate::error::ClientFileError;
use crate::json_options::JSON_OPTIONS;
use crate::locations::{ClientFile, FileFormat};
use crate::node::{ConfigNode, from_json, from_table};

/// The largest accepted file, in bytes.
pub const FILE_SIZE_MAX: usize = 16 * 1024 * 1024;

/// The largest accepted depth of nested lists and tables. The recursion of parsers and readers stays within it.
pub(crate) const DEPTH_MAX: usize = 100;

/// Parses the file. An empty file is `Null`.
pub(crate) fn parse(file: &ClientFile, bytes: &[u8]) -> Result<ConfigNode, ClientFileError> {
    if bytes.len() > FILE_SIZE_MAX {
        return Err(ClientFileError::TooLarge { path: file.path.clone(), bytes: bytes.len() });
    }
    let whole = bytes.len();
    let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
    let mark = whole - bytes.len();
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let (line, column) = line_and_column(bytes, error.valid_up_to());
        ClientFileError::NotText { path: file.path.clone(), line, column }
    })?;
    if text.trim().is_empty() {
        return Ok(ConfigNode::Null);
    }
    if let Some(at) = nested_too_deep(file.format, text) {
        return Err(too_deep(file, text, at));
    }
    match file.format {
        FileFormat::Json => parse_json(file, text, mark),
        FileFormat::Yaml => parse_yaml(file, text),
        FileFormat::Toml => parse_toml(file, text),
    }
}

/// `mark` is the length of the byte order mark before `text`.
fn parse_json(file: &ClientFile, text: &str, mark: usize) -> Result<ConfigNode, ClientFileError> {
    let parsed = jsonc_parser::parse_to_ast(text, &CollectOptions::default(), &JSON_OPTIONS)
        .map_err(|error| syntax_error(file, text, error.range().start, &error.kind().to_string()))?;
    Ok(parsed.value.map_or(ConfigNode::Null, |value| from_json(value, mark)))
}

fn parse_yaml(file: &ClientFile, text: &str) -> Result<ConfigNode, ClientFileError> {
    yaml_serde::from_str::<ConfigNode>(text).map_err(|error| {
        // An error without a position is a limit, such as the one of repeated aliases.
        let at = error.location().map_or(0, |location| location.index());
        // The message repeats the position, which `ClientFileError` contains already.
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default();
        syntax_error(file, text, at, message)
    })
}

fn parse_toml(file: &ClientFile, text: &str) -> Result<ConfigNode, ClientFileError> {
    let document = Document::parse(text).map_err(|error| {
        // `Display` of the error would print the line of the file.
        syntax_error(file, text, error.span().map_or(text.len(), |span| span.start), error.message())
    })?;
    Ok(from_table(document.as_table()))
}

/// Returns the position at which the depth exceeds `DEPTH_MAX`. Brackets in strings and comments of JSON do not count.
/// In YAML and TOML every bracket counts, with a limit that no text of a configuration reaches.
fn nested_too_deep(format: FileFormat, text: &str) -> Option<usize> {
    let limit = if format == FileFormat::Json { DEPTH_MAX } else { 10 * DEPTH_MAX };
    let bytes = text.as_bytes();
    let (mut depth, mut row, mut at) = (0_usize, 0_usize, 0_usize);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' if format == FileFormat::Json => {
                at += 1;
                while let Some(&inner) = bytes.get(at) {
                    match inner {
                        b'\\' => at += 1,
                        b'"' => break,
                        _ => {}
                    }
                    at += 1;
                }
            }
            b'/' if format == FileFormat::Json && bytes.get(at + 1) == Some(&b'/') => {
                at += bytes[at..].iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len());
            }
            b'/' if format == FileFormat::Json && bytes.get(at + 1) == Some(&b'*') => {
                at += text[at..].find("*/").map_or(bytes.len(), |length| length + 1);
            }
            b'[' | b'{' => {
                depth += 1;
                if depth > limit {
                    return Some(at);
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        // Each dot of a TOML key opens a table, and each `- ` of YAML a list. The parsers do not limit a row of them.
        let previous = at.checked_sub(1).and_then(|before| bytes.get(before));
        let opens = match format {
            FileFormat::Json => false,
            FileFormat::Toml => byte == b'.' && previous != Some(&b'.'),
            FileFormat::Yaml => matches!(byte, b'-' | b'?') && matches!(bytes.get(at + 1), Some(b' ' | b'\t')),
        };
        let continues = match format {
            FileFormat::Json => false,
            FileFormat::Toml => byte.is_ascii_alphanumeric() || b"_- \t\"'".contains(&byte),
            FileFormat::Yaml => matches!(byte, b' ' | b'\t'),
        };
        if opens {
            row += 1;
        } else if !continues {
            row = 0;
        }
        if row > 10 * DEPTH_MAX {
            return Some(at);
        }
        at += 1;
    }
    None
}

fn too_deep(file: &ClientFile, text: &str, at: usize) -> ClientFileError {
    let (line, column) = line_and_column(text.as_bytes(), at);
    ClientFileError::TooDeep { path: file.path.clone(), line, column }
}

fn syntax_error(file: &ClientFile, text: &str, at: usize, message: &str) -> ClientFileError {
    let end = text.trim_end().len();
    let at = at.min(end);
    if message.contains("recursion limit") || message.contains("nesting") || message.contains("Nesting") {
        return too_deep(file, text, at);
    }
    let message_lower = message.to_ascii_lowercase();
    // An unterminated string in the middle of the file is a missing quote.
    let in_string = message_lower.contains("string") && text.as_bytes()[at..end].contains(&b'\n');
    let ends_early = at == end
        || ["unterminated", "unexpected end", "end of stream"].iter().any(|words| message_lower.contains(words));
    let path = file.path.clone();
    if ends_early && !in_string {
        let (line, column) = line_and_column(text.as_bytes(), end);
        ClientFileError::Truncated { path, format: file.format, line, column }
    } else {
        let (line, column) = line_and_column(text.as_bytes(), at);
        ClientFileError::Syntax { path, format: file.format, line, column, message: message.to_owned() }
    }
}

/// Returns line and column, both from 1. The column counts characters.
fn line_and_column(bytes: &[u8], at: usize) -> (usize, usize) {
    let before = &bytes[..at.min(bytes.len())];
    let line = before.split(|&byte| byte == b'\n').count();
    let start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
    (line, String::from_utf8_lossy(&before[start..]).chars().count() + 1)
}
