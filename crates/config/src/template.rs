//! Variables in texts of the configuration: `${env:NAME}`, `${env:NAME:-default}`, `${file:PATH}` and `${value:KEY}`.
//! `$${` is a literal `${`.

/// A part of a text with variables.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TextPart<'a> {
    Literal(&'a str),
    /// Environment variable: `${env:NAME}` or `${env:NAME:-default}`.
    Env {
        name: &'a str,
        default: Option<&'a str>,
    },
    /// Content of a file: `${file:PATH}`.
    File(&'a str),
    /// Value of a user: `${value:KEY}`.
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
