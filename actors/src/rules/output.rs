//! Excerpts of a server's output for messages.

use crate::model::secret::SecretMask;

const EXCERPT_MAX: usize = 200;

/// Returns a line without terminal sequences, control characters and bidirectional marks, with secrets masked, cut at 200
/// characters. `None` if nothing is left.
pub fn excerpt(line: &str, mask: &SecretMask) -> Option<String> {
    let plain = strip_controls(line);
    // Control characters are removed before masking, because they may split a secret. The text is cut after masking, so
    // that no part of a secret remains.
    let text: String = mask.apply(plain.trim()).chars().take(EXCERPT_MAX).collect();
    (!text.is_empty()).then_some(text)
}

fn strip_controls(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        if letter == '\u{1b}' {
            skip_sequence(&mut letters);
        } else if letter == '\t' {
            text.push(' ');
        } else if !letter.is_control() && !is_bidirectional(letter) {
            text.push(letter);
        }
    }
    text
}

// Skips a sequence after its escape character: `[`, parameters and the final letter; or a string such as the title of
// the window, which ends with BEL or with an escape character and a backslash. A string without an end is not skipped:
// the line may have been cut.
fn skip_sequence(letters: &mut std::str::Chars<'_>) {
    let rest = letters.as_str();
    let length = match rest.chars().next() {
        Some('[') => rest[1..].find(|letter| ('@'..='~').contains(&letter)).map_or(rest.len(), |at| at + 2),
        Some(']' | 'P' | 'X' | '^' | '_') => match rest.find(['\u{7}', '\u{1b}']) {
            Some(at) if rest[at..].starts_with("\u{1b}\\") => at + 2,
            // Another escape character begins a sequence of its own.
            Some(at) if rest[at..].starts_with('\u{1b}') => at,
            Some(at) => at + 1,
            None => 0,
        },
        _ => 0,
    };
    *letters = rest[length..].chars();
}

fn is_bidirectional(letter: char) -> bool {
    matches!(
        letter,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn excerpt_of(line: &str) -> Option<String> {
        excerpt(line, &SecretMask::new(["sesame-secret"]))
    }

    #[test]
    fn an_excerpt_contains_no_control_or_bidirectional_characters() {
        let coloured = "\u{1b}[1;31mError:\u{1b}[0m no\tsuch\u{7} \u{202e}table\u{2069}\r";
        assert_eq!(excerpt_of(coloured).as_deref(), Some("Error: no such table"));
        let title = "\u{1b}]0;a title\u{7}one\u{1b}]0;another\u{1b}\\ two";
        assert_eq!(excerpt_of(title).as_deref(), Some("one two"));
        assert_eq!(excerpt_of("\u{1b}]0;title\u{1b}[31mred").as_deref(), Some("red"));
        assert_eq!(excerpt_of("\u{1b}]0;cut: no such table").as_deref(), Some("]0;cut: no such table"));
        for nothing in ["", "  ", "\u{1b}[2J", "\u{200f}\u{0}"] {
            assert_eq!(excerpt_of(nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn an_excerpt_has_200_characters_and_no_part_of_a_secret() {
        assert_eq!(excerpt_of(&"ä".repeat(300)).unwrap_or_default().chars().count(), 200);
        let at_the_cut = format!("{}sesame-secret", "x".repeat(195));
        assert!(!excerpt_of(&at_the_cut).unwrap_or_default().contains("sesam"));
        let broken_up = "key sesame\u{0}-\u{202e}secret";
        assert!(!excerpt_of(broken_up).unwrap_or_default().contains("sesame"));
    }
}
