//! Variables in texts of the configuration: `${env:NAME}`, `${env:NAME:-default}`, `${file:PATH}` and `${value:KEY}`.
//! `$${` is a literal `${`.

use mcp_satellite_model::spec::{ValuePart, ValueTemplate};

use super::check::ConfigCheck;
use super::reader::SpannedText;

/// A part of a text with variables.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TextPart<'a> {
    Literal(&'a str),
    /// `${env:NAME}` or `${env:NAME:-default}`.
    Env {
        name: &'a str,
        default: Option<&'a str>,
    },
    /// `${file:PATH}`.
    File(&'a str),
    /// `${value:KEY}`.
    Value(&'a str),
}

/// Splits `text` into its parts. Returns `None` if it has neither a variable nor an escaped `${`. The error is the
/// beginning of the invalid variable, without its content, which could be a secret.
pub(crate) fn parse_parts(text: &str) -> Result<Option<Vec<TextPart<'_>>>, &'static str> {
    let mut parts = Vec::new();
    let (mut start, mut at) = (0, 0);
    while let Some(dollar) = text[at..].find('$').map(|offset| at + offset) {
        let rest = &text[dollar..];
        if rest.starts_with("$${") {
            parts.push(TextPart::Literal(&text[start..dollar]));
            // The second `$` and the brace are the literal.
            (start, at) = (dollar + 1, dollar + 3);
            continue;
        }
        let kind = ["${env:", "${file:", "${value:"].into_iter().find(|kind| rest.starts_with(kind));
        let Some(kind) = kind else {
            at = dollar + 1;
            continue;
        };
        let end = rest.find('}').ok_or(kind)?;
        let part = parse_variable(kind, &rest[kind.len()..end]).ok_or(kind)?;
        parts.extend([TextPart::Literal(&text[start..dollar]), part]);
        start = dollar + end + 1;
        at = start;
    }
    if parts.is_empty() {
        return Ok(None);
    }
    parts.push(TextPart::Literal(&text[start..]));
    parts.retain(|part| *part != TextPart::Literal(""));
    Ok(Some(parts))
}

fn parse_variable<'a>(kind: &str, inner: &'a str) -> Option<TextPart<'a>> {
    match kind {
        "${env:" => {
            let (name, default) = match inner.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (inner, None),
            };
            let is_name = !name.is_empty() && !name.contains(|c: char| c == '=' || c.is_whitespace() || c.is_control());
            is_name.then_some(TextPart::Env { name, default })
        }
        "${file:" => (!inner.is_empty() && !inner.contains('\0')).then_some(TextPart::File(inner)),
        _ => is_value_key(inner).then_some(TextPart::Value(inner)),
    }
}

/// Returns true for a valid key of a user's value.
pub(crate) fn is_value_key(key: &str) -> bool {
    (1..=64).contains(&key.len()) && key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
}

/// Escapes a literal text, so that it contains no variable.
pub fn escape(text: &str) -> String {
    text.replace("${", "$${")
}

/// Variables that are no secrets. They are not masked, and servers inherit them although the configuration refers to
/// them.
const PUBLIC_VARIABLES: [&str; 14] = [
    "DISPLAY", "EDITOR", "HOME", "HOSTNAME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR",
    "TZ", "USER",
];

pub(crate) fn is_public_variable(name: &str) -> bool {
    PUBLIC_VARIABLES.contains(&name) || name.starts_with("XDG_") || name.starts_with("LC_")
}

impl ConfigCheck<'_, '_> {
    /// Resolves the variables of `text`. Returns `None` if it has none; the text is then used as it is.
    pub(crate) fn template(&mut self, text: &SpannedText) -> Option<ValueTemplate> {
        let parts = match parse_parts(&text.value) {
            Ok(Some(parts)) => parts,
            Ok(None) => {
                self.warn_unknown_variable(text);
                return None;
            }
            Err(kind) => {
                let hint =
                    "write ${env:NAME}, ${env:NAME:-default}, ${file:PATH} or ${value:KEY}, or $${ for a literal ${";
                self.findings.error(text.span, format!("the variable `{kind}…` is not valid"), hint);
                return Some(ValueTemplate::default());
            }
        };
        let mut template = ValueTemplate::default();
        for part in parts {
            template.parts.push(match part {
                TextPart::Literal(literal) => ValuePart::Literal(literal.into()),
                TextPart::Value(key) => ValuePart::UserValue(key.to_owned()),
                TextPart::Env { name, default } => {
                    self.secret_sources.env_part(name, default, text.span, self.findings)
                }
                TextPart::File(path) => self.secret_sources.file_part(path, text.span, self.findings),
            });
        }
        Some(template)
    }

    /// Warns about `${NAME}`, which other programs replace.
    fn warn_unknown_variable(&mut self, text: &SpannedText) {
        let names = text.value.match_indices("${").filter_map(|(at, _)| text.value[at + 2..].split_once('}'));
        let is_variable = |name: &str| {
            name.starts_with(|c: char| c.is_ascii_uppercase())
                && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
        };
        if let Some((name, _)) = names.into_iter().find(|(name, _)| is_variable(name)) {
            let message =
                format!("`${{{name}}}` is not replaced; write `${{env:{name}}}`, or `$${{{name}}}` for this text");
            self.findings.warning(text.span, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_split_into_literals_and_variables() {
        use TextPart::{Env, File, Literal, Value};
        let env = |name, default| Env { name, default };
        for (text, parts) in [
            ("${env:A}", vec![env("A", None)]),
            ("x${env:A:-b:-c}y", vec![Literal("x"), env("A", Some("b:-c")), Literal("y")]),
            ("${env:A:-}", vec![env("A", Some(""))]),
            ("${file:a b/c}${value:api-key.1}", vec![File("a b/c"), Value("api-key.1")]),
            ("a$${env:A}b", vec![Literal("a"), Literal("${env:A}b")]),
            ("$$${env:A}", vec![Literal("$"), Literal("${env:A}")]),
            ("$${x}${env:A}", vec![Literal("${x}"), env("A", None)]),
        ] {
            assert_eq!(parse_parts(text), Ok(Some(parts)), "{text}");
        }
        for text in ["", "$", "${}", "${HOME}", "$HOME", "{env:A}", "${ env:A}"] {
            assert_eq!(parse_parts(text), Ok(None), "{text}");
        }
        for text in ["${env:}", "${env:A", "${env:A B}", "${value:a/b}", "${value:}", "${file:}"] {
            assert!(parse_parts(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_escaped_text_has_no_variables() {
        for text in ["${env:A}", "$${env:A}", "$$${", "a${b}$"] {
            let escaped = escape(text);
            let parts = parse_parts(&escaped).unwrap_or_else(|kind| panic!("{kind}"));
            let literals = parts.into_iter().flatten().map(|part| match part {
                TextPart::Literal(literal) => literal,
                other => panic!("{other:?}"),
            });
            assert_eq!(literals.collect::<String>(), text);
        }
    }
}
