//! Replacements of parts of a text, and the parts of its style that inserted text follows.

use std::ops::Range;

/// A replacement of one range of a text. An insertion has an empty range.
#[derive(Debug)]
pub(crate) struct Splice {
    pub(crate) range: Range<usize>,
    pub(crate) with: String,
}

impl Splice {
    pub(crate) fn insert(at: usize, with: String) -> Self {
        Self { range: at..at, with }
    }

    pub(crate) fn delete(range: Range<usize>) -> Self {
        Self { range, with: String::new() }
    }
}

/// Applies replacements that do not overlap. Ranges outside the text are ignored; the comparison of the trees after the
/// edit detects the difference.
pub(crate) fn apply(text: &str, mut splices: Vec<Splice>) -> String {
    splices.sort_by_key(|splice| (splice.range.start, splice.range.end));
    let mut result = String::with_capacity(text.len() + splices.iter().map(|splice| splice.with.len()).sum::<usize>());
    let mut position = 0;
    for splice in splices {
        let Some(before) = text.get(position..splice.range.start) else { continue };
        result.push_str(before);
        result.push_str(&splice.with);
        position = splice.range.end;
    }
    result.push_str(text.get(position..).unwrap_or_default());
    result
}

/// Returns the line ending of the first line, or `\n` for a text without line endings.
pub(crate) fn line_ending(text: &str) -> &'static str {
    match text.find('\n') {
        Some(at) if text[..at].ends_with('\r') => "\r\n",
        _ => "\n",
    }
}

/// Returns the start of the line that contains `at`.
pub(crate) fn line_start(text: &str, at: usize) -> usize {
    text[..at].rfind('\n').map_or(0, |newline| newline + 1)
}

/// Returns the end of the line that contains `at`, after its line ending.
pub(crate) fn line_end(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |newline| at + newline + 1)
}

/// Returns the spaces and tabs at the start of the line that contains `at`.
pub(crate) fn indentation(text: &str, at: usize) -> &str {
    let line = &text[line_start(text, at)..];
    &line[..line.len() - line.trim_start_matches([' ', '\t']).len()]
}

/// Returns whether only spaces and tabs precede `at` on its line.
pub(crate) fn begins_line(text: &str, at: usize) -> bool {
    text[line_start(text, at)..at].trim_matches([' ', '\t']).is_empty()
}
