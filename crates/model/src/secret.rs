//! Secret values, and the mask that hides them where a server echoes them.

use std::fmt;
use std::sync::Arc;

/// A secret value of an environment variable, header or query parameter. `Debug` hides it, and `Display` and
/// `Serialize` are not implemented: the only way to the text is [`Secret::expose`], called where a process or request
/// is built.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Returns the text.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

/// Replacement for a secret in texts.
pub const MASKED: &str = "[secret]";

// In bytes. Masking shorter values would hide ordinary words and digits, and protect nothing.
const SHORTEST: usize = 5;

// Number of replaced secrets that stay masked; older ones are forgotten.
const REPLACED_MAX: usize = 64;

/// Secrets of one instance, to be replaced in the output of its server.
#[derive(Clone, Default)]
pub struct SecretMask {
    // Longest first, so that a secret that contains another one is replaced completely.
    needles: Arc<[Box<str>]>,
    // Needles that were replaced during a session, newest last. They are not part of the configuration: comparisons
    // ignore them.
    replaced: Arc<[Box<str>]>,
}

impl PartialEq for SecretMask {
    fn eq(&self, other: &Self) -> bool {
        self.configured_needles().eq(other.configured_needles())
    }
}

impl Eq for SecretMask {}

impl SecretMask {
    /// Creates a mask for these secrets. It covers each secret, each of its lines (stderr is read line by line), and
    /// its form inside a JSON string.
    pub fn new<'a>(secrets: impl IntoIterator<Item = &'a str>) -> Self {
        let mut needles: Vec<Box<str>> = Vec::new();
        let mut add = |text: &str| {
            if text.len() >= SHORTEST && !needles.iter().any(|known| **known == *text) {
                needles.push(text.into());
            }
        };
        for secret in secrets {
            add(secret);
            for line in secret.lines() {
                add(line.trim());
            }
            let escaped = serde_json::Value::from(secret).to_string();
            add(&escaped[1..escaped.len() - 1]);
        }
        Self::from_needles(needles, Vec::new())
    }

    fn from_needles(mut needles: Vec<Box<str>>, replaced: Vec<Box<str>>) -> Self {
        needles.sort_by_key(|needle| std::cmp::Reverse(needle.len()));
        Self { needles: needles.into(), replaced: replaced.into() }
    }

    fn configured_needles(&self) -> impl Iterator<Item = &Box<str>> {
        self.needles.iter().filter(|needle| !self.replaced.contains(needle))
    }

    /// Returns this mask extended by the secrets of `before`, because a server may still echo secrets that it received
    /// earlier.
    #[must_use]
    pub fn with_secrets_of(&self, before: &Self) -> Self {
        let old = before.replaced.iter().chain(before.configured_needles());
        let mut replaced: Vec<Box<str>> =
            old.filter(|old| !self.configured_needles().any(|new| new == *old)).cloned().collect();
        replaced.drain(..replaced.len().saturating_sub(REPLACED_MAX));
        Self::from_needles(self.configured_needles().chain(&replaced).cloned().collect(), replaced)
    }

    /// Returns this mask with `after` in the place of `before`.
    #[must_use]
    pub fn with_exchanged(&self, before: Option<&str>, after: &str) -> Self {
        let (before, after) = (Self::new(before), Self::new([after]));
        let kept = self.configured_needles().filter(|needle| !before.needles.contains(needle));
        let mut needles: Vec<_> = kept.chain(self.replaced.iter()).cloned().collect();
        needles.extend(after.needles.iter().filter(|new| !self.configured_needles().any(|old| old == *new)).cloned());
        Self::from_needles(needles, self.replaced.to_vec())
    }

    /// Returns the length of the longest secret, in bytes.
    pub fn max_len(&self) -> usize {
        self.needles.first().map_or(0, |needle| needle.len())
    }

    /// Returns true if `text` contains a secret.
    pub fn has_match_in(&self, text: &str) -> bool {
        self.needles.iter().any(|needle| memchr::memmem::find(text.as_bytes(), needle.as_bytes()).is_some())
    }

    /// Returns `text` with every secret replaced by [`MASKED`].
    pub fn apply(&self, text: &str) -> String {
        let mut masked = text.to_owned();
        for needle in self.needles.iter() {
            if memchr::memmem::find(masked.as_bytes(), needle.as_bytes()).is_some() {
                masked = masked.replace(&**needle, MASKED);
            }
        }
        masked
    }
}

impl SecretMask {
    /// Returns a JSON value with every secret replaced in its strings and keys. The decoded strings are masked, because
    /// JSON can encode the same string in several ways.
    pub fn apply_json(&self, value: serde_json::Value) -> serde_json::Value {
        use serde_json::Value;
        match value {
            Value::String(text) => Value::String(self.apply(&text)),
            Value::Array(items) => items.into_iter().map(|item| self.apply_json(item)).collect(),
            Value::Object(fields) => {
                fields.into_iter().map(|(key, value)| (self.apply(&key), self.apply_json(value))).collect()
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => value,
        }
    }
}

impl fmt::Debug for SecretMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mask({} secrets)", self.needles.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_masked_whole_by_line_and_inside_json() {
        let mask = SecretMask::new(["pass\"word-1", "first-line\nsecond-line", "pass"]);
        assert_eq!(mask.apply(r#"{"env":"pass\"word-1"} pass"word-1"#), r#"{"env":"[secret]"} [secret]"#);
        assert_eq!(mask.apply("got second-line"), "got [secret]");
        assert_eq!(mask.apply("a pass is short"), "a pass is short");
        assert_eq!(format!("{mask:?} {:?}", Secret::from("hidden")), "Mask(6 secrets) [secret]");
    }
    #[test]
    fn replaced_secrets_are_masked_without_affecting_equality() {
        let (old, new) = (SecretMask::new(["token-one"]), SecretMask::new(["token-two", "token-one-and-more"]));
        let both = new.with_secrets_of(&old);
        assert_eq!(both.apply("token-one token-two token-one-and-more"), "[secret] [secret] [secret]");
        assert_eq!(both, new);
        assert_ne!(both, old);
        let back = old.with_secrets_of(&both);
        assert_eq!(back.apply("token-one token-two"), "[secret] [secret]");
        assert_eq!(back, old);
        let exchanged = old.with_exchanged(Some("token-one"), "token-three");
        assert_eq!(exchanged.apply("token-one token-three"), "token-one [secret]");
        assert_eq!(exchanged.with_exchanged(None, "token-one").apply("token-one token-three"), "[secret] [secret]");
        assert_ne!(exchanged, old);
        let tokens: Vec<String> = (0..1000).map(|number| format!("token-{number:04}")).collect();
        let last = tokens
            .iter()
            .fold(SecretMask::default(), |mask, token| SecretMask::new([token.as_str()]).with_secrets_of(&mask));
        assert_eq!(last.apply("token-0999 token-0950 token-0001"), "[secret] [secret] token-0001");
    }
}
