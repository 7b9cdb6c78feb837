//! Masks a configuration for the terminal: keys and the texts that the satellite writes stay readable, every other value and
//! every other comment becomes `…`. The number of lines stays the same.
//!
//! A configuration contains secrets in places that no rule of names finds, such as arguments, comments and texts of
//! several lines. So the values to show are listed, and not the values to hide.

use std::collections::BTreeSet;

use mcp_satellite_clients::{FileFormat, looks_secret};

const HIDDEN: &str = "…";
/// Length of a YAML key in bytes. A longer text before a colon is rather a value.
const YAML_KEY_MAX: usize = 80;

/// Returns `text` without values and comments other than `known`.
pub(super) fn mask(text: &str, format: FileFormat, known: &BTreeSet<String>) -> String {
    let mut is_known = |value: &str| known.contains(value);
    Masker { out: String::with_capacity(text.len()), is_known: &mut is_known }.run(text, format)
}

/// Returns the values and comments of `text` in the spelling of the file, for [`mask`].
pub(super) fn texts(text: &str, format: FileFormat) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut collect = |value: &str| {
        found.insert(value.to_owned());
        true
    };
    Masker { out: String::new(), is_known: &mut collect }.run(text, format);
    found
}

struct Masker<'a> {
    out: String,
    is_known: &'a mut dyn FnMut(&str) -> bool,
}

impl Masker<'_> {
    fn run(mut self, text: &str, format: FileFormat) -> String {
        match format {
            FileFormat::Json => self.mask_tokens(text, TokenSyntax::Json),
            FileFormat::Toml => self.mask_tokens(text, TokenSyntax::Toml),
            FileFormat::Yaml => self.mask_yaml(text),
        }
        self.out
    }

    fn mask_tokens(&mut self, text: &str, syntax: TokenSyntax) {
        let mut rest = text;
        let (mut depth, mut is_line_start, mut in_header) = (0_usize, true, false);
        while let Some(first) = rest.chars().next() {
            let length = match first {
                '\n' => {
                    (is_line_start, in_header) = (true, false);
                    self.copy(rest, 1)
                }
                _ if first.is_whitespace() || first == '\u{feff}' => self.copy(rest, first.len_utf8()),
                '"' | '\'' => {
                    is_line_start = false;
                    self.mask_string(rest, syntax, in_header)
                }
                '#' if syntax == TokenSyntax::Toml => self.mask_comment("#", rest, line_end(rest)),
                '/' if syntax == TokenSyntax::Json && rest.starts_with("//") => {
                    self.mask_comment("//", rest, line_end(rest))
                }
                '/' if syntax == TokenSyntax::Json && rest.starts_with("/*") => {
                    let end = rest.find("*/").map_or(rest.len(), |at| at + 2);
                    self.mask_comment("/*", rest, end)
                }
                '[' | '{' | ']' | '}' | ',' | ':' | '=' => {
                    match first {
                        // `[mcp_servers.docs]`
                        '[' if syntax == TokenSyntax::Toml && is_line_start && depth == 0 => in_header = true,
                        '[' | '{' if !in_header => depth += 1,
                        ']' | '}' if !in_header => depth = depth.saturating_sub(1),
                        _ => {}
                    }
                    is_line_start &= in_header;
                    self.copy(rest, 1)
                }
                _ => {
                    is_line_start = false;
                    self.mask_bare(rest, syntax, in_header)
                }
            };
            rest = &rest[length..];
        }
    }

    fn copy(&mut self, text: &str, length: usize) -> usize {
        self.out.push_str(&text[..length]);
        length
    }

    fn mask_comment(&mut self, mark: &str, text: &str, end: usize) -> usize {
        if (self.is_known)(&text[..end]) {
            return self.copy(text, end);
        }
        self.out.push_str(mark);
        self.hide(&text[..end]);
        end
    }

    /// Writes `…`, with the line breaks of the hidden text.
    fn hide(&mut self, hidden: &str) {
        for (at, line) in hidden.split('\n').enumerate() {
            if at > 0 {
                self.out.push('\n');
            }
            self.out.push_str(HIDDEN);
            if line.ends_with('\r') {
                self.out.push('\r');
            }
        }
    }

    fn mask_string(&mut self, text: &str, syntax: TokenSyntax, in_header: bool) -> usize {
        let quote = &text[..1];
        let triple = quote.repeat(3);
        if syntax == TokenSyntax::Toml && text.starts_with(&triple) {
            let end = text[3..].find(&triple).map_or(text.len(), |at| at + 6);
            self.hide(&text[..end]);
            return end;
        }
        // An apostrophe in JSON begins nothing.
        let is_literal = quote == "'";
        let end = string_end(text, quote, is_literal);
        let content = text[1..end].strip_suffix(quote).unwrap_or(&text[1..end]);
        let after = text[end..].trim_start_matches([' ', '\t']);
        let is_key = match syntax {
            TokenSyntax::Json => text[end..].trim_start().starts_with(':'),
            TokenSyntax::Toml => after.starts_with(['=', '.']) || in_header,
            TokenSyntax::YamlFlow => after.starts_with(':'),
        };
        let is_readable = if is_key { !looks_secret("", content) } else { (self.is_known)(content) };
        if is_readable {
            self.out.push_str(&text[..end]);
        } else {
            self.out.push_str(quote);
            self.hide(content);
            self.out.push_str(quote);
        }
        end
    }

    fn mask_bare(&mut self, text: &str, syntax: TokenSyntax, in_header: bool) -> usize {
        let is_end = |c: char| match syntax {
            TokenSyntax::Json => c.is_whitespace() || "[]{},:\"".contains(c),
            TokenSyntax::Toml => c.is_whitespace() || "[]{},=\"'#".contains(c),
            TokenSyntax::YamlFlow => c.is_whitespace() || "[]{},".contains(c),
        };
        let end = text.find(is_end).unwrap_or(text.len()).max(text.chars().next().map_or(1, char::len_utf8));
        let word = &text[..end];
        let is_key = match syntax {
            TokenSyntax::Json => false,
            TokenSyntax::Toml => in_header || text[end..].trim_start_matches([' ', '\t']).starts_with('='),
            TokenSyntax::YamlFlow => word.ends_with(':'),
        };
        if is_key && !looks_secret("", word) || !is_key && self.is_readable_word(word) {
            self.out.push_str(word);
        } else {
            self.hide(word);
        }
        end
    }

    fn is_readable_word(&mut self, word: &str) -> bool {
        matches!(word, "true" | "false" | "null" | "~") || (self.is_known)(word)
    }

    fn mask_yaml(&mut self, text: &str) {
        // The text of a block scalar is indented deeper than its key.
        let mut block: Option<usize> = None;
        let mut open_quote: Option<&str> = None;
        for line in text.split_inclusive('\n') {
            let body = line.trim_end_matches(['\n', '\r']);
            let content = body.trim_start_matches([' ', '\u{feff}']);
            let indent = body.len() - content.len();
            if content.trim().is_empty() {
                self.out.push_str(line);
                continue;
            }
            if block.is_some_and(|key| indent <= key) {
                block = None;
            }
            if let Some(quote) = open_quote {
                if ends_string(body, quote) {
                    open_quote = None;
                }
                self.out.push_str(HIDDEN);
            } else if block.is_some() {
                self.out.push_str(&body[..indent]);
                self.out.push_str(HIDDEN);
            } else {
                self.out.push_str(&body[..indent]);
                (block, open_quote) = self.mask_yaml_line(content, indent);
            }
            self.out.push_str(&line[body.len()..]);
        }
    }

    /// Masks a line of YAML after its indentation. Returns the column of a key whose block scalar begins, and the quote of a
    /// string that continues on the next line.
    fn mask_yaml_line(&mut self, content: &str, indent: usize) -> (Option<usize>, Option<&'static str>) {
        let (mut rest, mut column) = (content, indent);
        if rest.trim_end() == "---" {
            self.out.push_str(rest);
            return (None, None);
        }
        while let Some(item) = rest.strip_prefix("- ") {
            let spaces = item.len() - item.trim_start().len();
            self.out.push_str(&rest[..2 + spaces]);
            // Without a key, the text of a block scalar is indented deeper than the dash.
            column += 2 + spaces;
            rest = &item[spaces..];
        }
        let column_of_dash = column.saturating_sub(2).max(indent);
        let Some((key, value)) = split_yaml_key(rest) else {
            return self.mask_yaml_value(rest, column_of_dash);
        };
        if looks_secret("", key) {
            self.hide(key);
        } else {
            self.out.push_str(key);
        }
        self.out.push(':');
        let text = value.trim_start();
        self.out.push_str(&value[..value.len() - text.len()]);
        self.mask_yaml_value(text, column)
    }

    fn mask_yaml_value(&mut self, value: &str, column: usize) -> (Option<usize>, Option<&'static str>) {
        let first = value.chars().next();
        match first {
            None => {}
            Some('#') => {
                self.mask_comment("#", value, value.len());
            }
            Some('|' | '>') => {
                let end = value.find(char::is_whitespace).unwrap_or(value.len());
                self.out.push_str(&value[..end]);
                if end < value.len() {
                    self.out.push(' ');
                    self.out.push_str(HIDDEN);
                }
                return (Some(column), None);
            }
            Some('[' | '{' | ']' | '}') => self.mask_tokens(value, TokenSyntax::YamlFlow),
            Some(quote @ ('"' | '\'')) => {
                let quote = if quote == '"' { "\"" } else { "'" };
                if !ends_string(&value[1..], quote) {
                    self.hide(value);
                    return (None, Some(quote));
                }
                let end = self.mask_string(value, TokenSyntax::YamlFlow, false);
                if !value[end..].trim().is_empty() {
                    self.out.push(' ');
                    self.out.push_str(HIDDEN);
                }
            }
            Some(_) => {
                let end = value.find(" #").unwrap_or(value.len());
                let plain = value[..end].trim_end();
                if self.is_readable_word(plain) {
                    self.out.push_str(&value[..end]);
                } else {
                    self.hide(plain);
                }
                if end < value.len() {
                    self.out.push_str(" #");
                    self.out.push_str(HIDDEN);
                }
            }
        }
        (None, None)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenSyntax {
    Json,
    Toml,
    /// A list or map of YAML in brackets.
    YamlFlow,
}

fn line_end(text: &str) -> usize {
    let end = text.find('\n').unwrap_or(text.len());
    if text[..end].ends_with('\r') { end - 1 } else { end }
}

/// Returns the end of the string at the beginning of `text`, at the latest the end of the line.
fn string_end(text: &str, quote: &str, is_literal: bool) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            '\n' | '\r' => return at,
            _ if escaped => escaped = false,
            '\\' if !is_literal => escaped = true,
            _ if text[at..].starts_with(quote) => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns true if a string whose text continues with `text` ends there.
fn ends_string(text: &str, quote: &str) -> bool {
    let mut escaped = false;
    text.chars().any(|letter| {
        let ends = !escaped && quote.contains(letter);
        escaped = letter == '\\' && !escaped && quote == "\"";
        ends
    })
}

/// Splits `key: value` and `key:`.
fn split_yaml_key(text: &str) -> Option<(&str, &str)> {
    let at = match text.chars().next()? {
        quote @ ('"' | '\'') => {
            let end = string_end(text, if quote == '"' { "\"" } else { "'" }, quote == '\'');
            text[end..].starts_with(':').then_some(end)?
        }
        _ => text.find(':').filter(|at| !text[..*at].contains(char::is_whitespace))?,
    };
    let value = &text[at + 1..];
    let is_key = at <= YAML_KEY_MAX
        && (value.is_empty() || value.starts_with(' '))
        && !text.starts_with(['[', '{', '#', '&', '*', '!', '|', '>', '%', '@', '`']);
    is_key.then_some((&text[..at], value))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[track_caller]
    fn check(format: FileFormat, text: &str, masked: &str) {
        let known = BTreeSet::from(["/usr/bin/satellite".to_owned(), "stdio".to_owned()]);
        let shown = mask(text, format, &known);
        assert_eq!(shown, masked);
        assert_eq!(shown.lines().count(), text.lines().count());
    }

    #[test]
    fn values_and_comments_of_json_are_hidden() {
        let text = "{\r\n  // key sk-1\r\n  \"env\": {\"A\": \"sekrit\", \"B\": 1234, \"C\": true}, /* a\n sekrit */\n  \
                    \"args\": [\"--key\", \"a\\\"b\"],\n  \"ghp_0123456789abcdefABCDEF\": 1,\n  \
                    \"command\": \"/usr/bin/satellite\", \"args\": [\"stdio\"], open: \"no end\n}";
        let masked = "{\r\n  //…\r\n  \"env\": {\"A\": \"…\", \"B\": …, \"C\": true}, /*…\n…\n  \
                      \"args\": [\"…\", \"…\"],\n  \"…\": …,\n  \
                      \"command\": \"/usr/bin/satellite\", \"args\": [\"stdio\"], …: \"…\"\n}";
        check(FileFormat::Json, text, masked);
    }

    #[test]
    fn values_and_comments_of_toml_are_hidden() {
        let text = "model = \"gpt\" # sekrit\n[mcp_servers.\"my docs\".env]\nKEY = 'sekrit'\nn = 12\na.b = [\n  \"x\", [\"y\"],\n]\n\
                    pem = \"\"\"\n-----BEGIN\nMIIEsekrit==\nKEY = sekrit\n\"\"\"\nt = { command = \"/usr/bin/satellite\", on = false }\n";
        let masked = "model = \"…\" #…\n[mcp_servers.\"my docs\".env]\nKEY = '…'\nn = …\na.b = [\n  \"…\", [\"…\"],\n]\n\
                      pem = …\n…\n…\n…\n…\nt = { command = \"/usr/bin/satellite\", on = false }\n";
        check(FileFormat::Toml, text, masked);
    }

    #[test]
    fn values_and_comments_of_yaml_are_hidden() {
        let text = "# sekrit\nextensions:\n  fetch:\n    args:\n    - mcp sekrit: 1\n    - \"--key\" # x\n    cmd: /usr/bin/satellite\n    \
                    pem: |\n      KEY: sekrit\n\n      more\n    on: true # sekrit\n    envs: {A: sekrit, \"B\": 'x'}\n    \
                    text: \"begins\n      KEY: sekrit\"\n    plain: begins\n      and ends\nlist:\n  - name: a\n    args: [stdio, other]\n  - |\n    sekrit: x\n";
        let masked = "#…\nextensions:\n  fetch:\n    args:\n    - …\n    - \"…\" …\n    cmd: /usr/bin/satellite\n    \
                      pem: |\n      …\n\n      …\n    on: true #…\n    envs: {A: …, \"B\": '…'}\n    \
                      text: …\n…\n    plain: …\n      …\nlist:\n  - name: …\n    args: [stdio, …]\n  - |\n    …\n";
        check(FileFormat::Yaml, text, masked);
    }

    #[test]
    fn no_planted_value_of_the_fixtures_is_shown() {
        fn walk(directory: &std::path::Path, files: &mut usize) {
            for path in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    walk(&path, files);
                } else if let Some(format) = FileFormat::from_path(&path) {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let shown = mask(&text, format, &BTreeSet::new());
                    assert!(!shown.contains("PLANTED"), "{}:\n{shown}", path.display());
                    assert_eq!(shown.lines().count(), text.lines().count(), "{}", path.display());
                    *files += usize::from(text.contains("PLANTED"));
                }
            }
        }
        let mut files = 0;
        walk(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/clients/tests/fixtures"), &mut files);
        assert!(files > 10, "only {files} files contain a planted value");
    }

    #[test]
    fn the_values_of_an_entry_are_collected() {
        let found =
            texts("{\"a\": {\"command\": \"/x/satellite\", \"args\": [\"stdio\"], \"n\": 3}}", FileFormat::Json);
        assert_eq!(found, ["/x/satellite", "3", "stdio"].map(str::to_owned).into());
    }

    #[test]
    fn a_written_comment_stays_readable_and_a_longer_one_is_hidden() {
        let known = texts("# Imported from cursor\n[[teams]]\nid = \"a\" # new\n", FileFormat::Toml);
        let text = "# Imported from cursor\r\n# Imported from cursor sekrit\n[[teams]] # new\nid = \"b\"\n";
        let masked = "# Imported from cursor\r\n#…\n[[teams]] # new\nid = \"…\"\n";
        assert_eq!(mask(text, FileFormat::Toml, &known), masked);
    }
}
