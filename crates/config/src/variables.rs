//! Replacement of variables in texts of a server.

use mcp_satellite_model::spec::{ValuePart, ValueTemplate};

use super::check::ConfigCheck;
use super::reader::SpannedText;
use super::template::{TextPart, parse_parts};

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
