//! Values that must not be seen, and the mask that hides them where a server echoes them.

use std::fmt;
use std::sync::Arc;

/// A value of an environment variable, header or query parameter. Its `Debug` never shows it and it has no `Display`
/// and no `Serialize`: the one way to the text is [`Secret::expose`], called where a process or request is built.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl Secret {
    /// The text itself.
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

/// What stands where a secret stood.
pub const MASKED: &str = "[secret]";

/// Shorter values are not masked: they would hide ordinary words and digits, and guard nothing.
const SHORTEST: usize = 5;

/// The secrets of one instance, as searched for in what its server prints.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Mask {
    needles: Arc<[Box<str>]>,
}

impl Mask {
    /// A mask for these secrets: each as it is, each of its lines (stderr is read line by line), and its form inside a
    /// JSON string. Longest first, so that a secret that contains another leaves no tail.
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
        needles.sort_by_key(|needle| std::cmp::Reverse(needle.len()));
        Self { needles: needles.into() }
    }

    /// The length of the longest secret, in bytes.
    pub fn longest(&self) -> usize {
        self.needles.first().map_or(0, |needle| needle.len())
    }

    /// `text` with every secret replaced by [`MASKED`].
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

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mask({} secrets)", self.needles.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_masked_whole_by_line_and_inside_json() {
        let mask = Mask::new(["pass\"word-1", "first-line\nsecond-line", "pass"]);
        assert_eq!(mask.apply(r#"{"env":"pass\"word-1"} pass"word-1"#), r#"{"env":"[secret]"} [secret]"#);
        assert_eq!(mask.apply("got second-line"), "got [secret]");
        assert_eq!(mask.apply("a pass is short"), "a pass is short");
        assert_eq!(format!("{mask:?} {:?}", Secret::from("hidden")), "Mask(6 secrets) [secret]");
    }
}
