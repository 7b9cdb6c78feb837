//! Errors of a configuration, reported together: place, problem and hint for each.
//!
//! A configuration contains secrets, and an error shows its line. The lines are therefore cut out and masked when the
//! errors are built; the text of the file is not kept.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use serde::Serialize;
use toml_span::Span;

use mcp_satellite_model::printable;

// Columns of a rendered error. A longer line is cut around the marker.
const RENDER_WIDTH: usize = 110;

#[derive(Debug, Default)]
pub struct ConfigFindings {
    errors: Vec<ConfigFinding>,
    warnings: Vec<(Span, String)>,
}

#[derive(Debug)]
struct ConfigFinding {
    at: Span,
    message: String,
    hint: String,
}

impl ConfigFindings {
    /// Adds an error. Neither text may contain a value that could be a secret.
    pub fn error(&mut self, at: Span, message: impl Into<String>, hint: impl Into<String>) {
        self.errors.push(ConfigFinding { at, message: message.into(), hint: hint.into() });
    }

    pub fn warning(&mut self, at: Span, message: impl Into<String>) {
        self.warnings.push((at, message.into()));
    }

    pub fn error_count(&self) -> usize {
        self.errors.len()
    }

    /// Turns the errors after the first `count` into warnings that begin with `subject`. Returns true if there are any.
    pub fn demote_errors(&mut self, count: usize, subject: &str) -> bool {
        let errors = self.errors.split_off(count);
        let has_errors = !errors.is_empty();
        for ConfigFinding { at, message, hint } in errors {
            self.warning(at, format!("{subject}: {message}; {hint}"));
        }
        has_errors
    }

    /// Returns the warnings with their places in front, or all errors, both in the order of the file.
    pub fn into_result(mut self, source: &ConfigText<'_>) -> Result<Vec<String>, ConfigErrors> {
        if !self.errors.is_empty() {
            self.errors.sort_by_key(|finding| finding.at.start);
            return Err(ConfigErrors(self.errors.iter().map(|finding| source.placed_error(finding)).collect()));
        }
        self.warnings.sort_by_key(|(at, _)| at.start);
        let placed = |(at, message): (Span, String)| {
            let (line, column, _) = source.place(at.start);
            printable::line(&format!("{}:{line}:{column}: {message}", source.name))
        };
        Ok(self.warnings.into_iter().map(placed).collect())
    }
}

pub struct ConfigText<'a> {
    pub name: &'a str,
    pub text: &'a str,
    /// Text with secrets masked, with the same length in bytes.
    pub masked: String,
}

impl ConfigText<'_> {
    /// Returns line and column, counted from 1 in characters, and the byte offset of the line.
    pub fn place(&self, at: usize) -> (usize, usize, usize) {
        let before = &self.text[..boundary(self.text, at)];
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        (before.matches('\n').count() + 1, before[start..].chars().count() + 1, start)
    }

    fn placed_error(&self, finding: &ConfigFinding) -> PlacedError {
        let (line, column, start) = self.place(finding.at.start);
        let rest = &self.masked[start..];
        let mut shown = printable::in_place(rest.split('\n').next().unwrap_or(rest).trim_end());
        let from = boundary(&shown, finding.at.start.saturating_sub(start));
        let to = boundary(&shown, finding.at.end.saturating_sub(start)).max(from);
        if from == shown.len() {
            shown.push(' '); // An error at the end of a line needs a character to underline.
        }
        // An empty span needs one character to underline, and all of it.
        let width = shown[from..].chars().next().map_or(1, char::len_utf8);
        let place = SourcePlace { line, column, line_text: shown, label: from..to.max(from + width) };
        let [message, hint] = [&finding.message, &finding.hint].map(|text| printable::line(text));
        PlacedError { file: self.name.to_owned(), place: Some(place), message, hint }
    }
}

/// Returns the nearest character boundary at or before `at`. (`str::floor_char_boundary` requires a newer compiler than
/// the supported minimum.)
fn boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// Errors of a configuration, at least one.
#[derive(Debug, Clone)]
pub struct ConfigErrors(Vec<PlacedError>);

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConfigErrorItem {
    /// Name of the file as given; empty for an error between two files.
    pub file: String,
    /// Line, counted from 1; 0 if the error has no place in a file.
    pub line: usize,
    /// Column in characters, counted from 1; 0 if the error has no place in a file.
    pub column: usize,
    pub message: String,
    pub hint: String,
}

impl ConfigErrors {
    /// Creates errors without a place in a file, each with its hint. There must be at least one. `file` is empty if
    /// they belong to no file.
    pub fn without_place(file: &str, errors: Vec<(String, String)>) -> Self {
        let problem = |(message, hint)| PlacedError { file: file.to_owned(), place: None, message, hint };
        Self(errors.into_iter().map(problem).collect())
    }

    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    pub fn internal_error(why: &dyn fmt::Display) -> Self {
        let message = format!("cannot read the configuration because of an internal error: {why}");
        Self::without_place("", vec![(message, "report this message".to_owned())])
    }

    pub fn to_single_line(&self) -> String {
        let item = |item: ConfigErrorItem| {
            format!("{}:{}:{}: {} ({})", item.file, item.line, item.column, item.message, item.hint)
        };
        self.items().into_iter().map(item).collect::<Vec<_>>().join("; ")
    }

    /// Returns all errors for people, each with its place, its line with a marker, and a hint. Without `is_styled`, the
    /// text is plain ASCII apart from the quoted parts; otherwise it has ANSI colours.
    pub fn render(&self, is_styled: bool) -> String {
        let renderer = if is_styled { Renderer::styled() } else { Renderer::plain() }.term_width(RENDER_WIDTH);
        let errors = self.0.iter().map(|error| renderer.render(&[error.as_group()]));
        std::iter::once(self.to_string()).chain(errors).collect::<Vec<_>>().join("\n\n")
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn items(&self) -> Vec<ConfigErrorItem> {
        let item = |problem: &PlacedError| {
            let (line, column) = problem.place.as_ref().map_or((0, 0), |place| (place.line, place.column));
            ConfigErrorItem {
                file: problem.file.clone(),
                line,
                column,
                message: problem.message.clone(),
                hint: problem.hint.clone(),
            }
        };
        self.0.iter().map(item).collect()
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.0.first().map_or("", |problem| problem.file.as_str());
        let one_file = !file.is_empty() && self.0.iter().all(|problem| problem.file == file);
        let place = if one_file { file } else { "the configuration" };
        match self.count() {
            1 => write!(f, "1 error in {place}"),
            count => write!(f, "{count} errors in {place}"),
        }
    }
}

impl std::error::Error for ConfigErrors {}

#[derive(Debug, Clone)]
struct PlacedError {
    file: String,
    place: Option<SourcePlace>,
    message: String,
    hint: String,
}

#[derive(Debug, Clone)]
struct SourcePlace {
    line: usize,
    column: usize,
    line_text: String,
    label: Range<usize>,
}

impl PlacedError {
    fn as_group(&self) -> Group<'_> {
        let snippet = self.place.as_ref().map(|place| {
            let marker = AnnotationKind::Primary.span(place.label.clone());
            Snippet::source(&place.line_text).path(&self.file).line_start(place.line).annotation(marker)
        });
        Level::ERROR.primary_title(&self.message).elements(snippet).element(Level::HELP.message(&self.hint))
    }
}
