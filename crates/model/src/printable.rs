//! Makes text of servers, clients and files safe to print: it neither controls a terminal nor changes the order in
//! which its lines are read.

use std::fmt::Write;

/// Returns true if a terminal acts on the character instead of showing it: a control character, or a mark that reorders
/// bidirectional text or ends a line.
fn is_control(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns one line of text with all such characters except tabs replaced.
pub fn line(text: &str) -> String {
    text.chars().map(|letter| if is_control(letter) && letter != '\t' { '\u{fffd}' } else { letter }).collect()
}

/// Returns text of several lines with all such characters except tabs and line ends replaced.
pub fn lines(text: &str) -> String {
    let shown = |letter: char| if is_control(letter) && !"\t\n".contains(letter) { '\u{fffd}' } else { letter };
    text.chars().map(shown).collect()
}

/// Returns the same JSON value with these characters escaped. Outside strings only spaces, tabs and line ends can occur
/// among them.
pub fn json(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '\n' | '\t' => escaped.push(letter),
            '\r' => escaped.push(' '),
            letter if is_control(letter) => {
                // Writing to a String does not fail.
                let _ = write!(escaped, "\\u{:04x}", u32::from(letter));
            }
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// Replaces each of these characters by as many question marks as it has bytes, so that positions do not change.
pub fn in_place(text: &str) -> String {
    let shown = |letter: char| {
        let hides = is_control(letter) && !"\t\n\r".contains(letter);
        if hides { "?".repeat(letter.len_utf8()) } else { letter.to_string() }
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "\u{1b}]0;title\u{7}\u{1b}[2J\u{9b}1m\u{7f}\u{202e}txt\u{2066}\u{200f}\r\u{2028}end";

    #[test]
    fn no_control_character_or_bidirectional_mark_is_printed() {
        for text in [line(HOSTILE), lines(HOSTILE), json(HOSTILE), in_place(HOSTILE)] {
            assert!(!text.chars().any(|letter| is_control(letter) && letter != '\r'), "{text:?}");
        }
        assert_eq!(line("a\tb\nc"), "a\tb\u{fffd}c");
        assert_eq!(lines("a\tb\nc"), "a\tb\nc");
        assert_eq!(in_place(HOSTILE).len(), HOSTILE.len());
        assert_eq!(line("für 日本語 🙂"), "für 日本語 🙂");
    }

    #[test]
    fn escaped_json_is_the_same_value() {
        let value = serde_json::json!({"text": HOSTILE, "\u{202e}": ["\u{85}"]});
        let text = serde_json::to_string_pretty(&value).unwrap();
        let escaped = json(&text);
        assert!(escaped.contains("\\u202e") && escaped.contains("\\u007f"), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
        assert_eq!(json("{\r\n\t\"a\": 1}"), "{ \n\t\"a\": 1}");
    }
}
