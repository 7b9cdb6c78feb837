//! The preview of a changed file: a unified diff without secrets.

mod mask;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use mcp_satellite_clients::FileFormat;
use similar::{ChangeTag, DiffableStr, TextDiff};

use self::mask::{mask, texts};

/// Unchanged lines around a change.
const CONTEXT: usize = 3;
/// Length of a shown line in characters. Some clients write their whole configuration into one line.
const LINE_MAX: usize = 240;
/// Time for the comparison. After it, the diff is longer than necessary.
const DIFF_TIME: Duration = Duration::from_secs(1);

/// Returns the difference between two versions of a file; `None` means that there is no file. Keys are shown, and the
/// values and comments that the text `written` contains, because the satellite wrote them. Everything else is hidden.
pub(super) fn render_diff(
    path: &Path,
    format: FileFormat,
    before: Option<&[u8]>,
    after: Option<&[u8]>,
    written: &str,
) -> String {
    let known: BTreeSet<String> = texts(written, format);
    let text = |contents: Option<&[u8]>| String::from_utf8_lossy(contents.unwrap_or_default()).into_owned();
    let name = |contents: Option<&[u8]>| match contents {
        Some(_) => path.display().to_string(),
        None => "/dev/null".to_owned(),
    };
    let mut shown = format!("--- {}\n+++ {}", name(before), name(after));
    let (before, after) = (text(before), text(after));
    let masked = [mask(&before, format, &known), mask(&after, format, &known)];
    let [old, new] = masked.each_ref().map(|text| text.tokenize_lines());
    let diff = TextDiff::configure().timeout(DIFF_TIME).diff_lines(&before, &after);
    for hunk in diff.grouped_ops(CONTEXT) {
        let (Some(first), Some(last)) = (hunk.first(), hunk.last()) else { continue };
        let range = |start: usize, end: usize| format!("{},{}", start + usize::from(end > start), end - start);
        let olds = range(first.old_range().start, last.old_range().end);
        let news = range(first.new_range().start, last.new_range().end);
        let _ = write!(shown, "\n@@ -{olds} +{news} @@");
        for change in hunk.iter().flat_map(|operation| diff.iter_changes(operation)) {
            let (sign, line) = match change.tag() {
                ChangeTag::Equal => (' ', change.old_index().and_then(|at| old.get(at))),
                ChangeTag::Delete => ('-', change.old_index().and_then(|at| old.get(at))),
                ChangeTag::Insert => ('+', change.new_index().and_then(|at| new.get(at))),
            };
            let _ = write!(shown, "\n{sign}{}", shorten(line.copied().unwrap_or("…")));
        }
    }
    shown
}

fn shorten(line: &str) -> String {
    let line = line.trim_end_matches(['\r', '\n']);
    match line.char_indices().nth(LINE_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    }
}
