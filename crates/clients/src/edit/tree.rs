//! The value of a configuration file without its formatting. An edit is correct if the tree of its result equals the
//! tree before it, with exactly one server changed.

use super::error::EditError;

/// A value of a configuration file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ConfigTree {
    Null,
    Bool(bool),
    /// A number or date as it is written in the file.
    Literal(String),
    Text(String),
    List(Vec<ConfigTree>),
    /// Keys and values in the order of the file. JSON permits a key twice.
    Map(Vec<(String, ConfigTree)>),
}

impl ConfigTree {
    /// Returns the name of the type for an error message.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Literal(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Map(_) => "an object",
        }
    }

    /// Returns the text of a string.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the elements of a list; other values have none.
    pub(crate) fn items(&self) -> &[Self] {
        match self {
            Self::List(items) => items,
            _ => &[],
        }
    }

    /// Returns the value of `key`; values that are not maps have none.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Map(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// Returns the value of `key`, or an error if the map contains the key twice.
    pub(crate) fn unique(&self, key: &str) -> Result<Option<&Self>, EditError> {
        let Self::Map(entries) = self else { return Ok(None) };
        let mut values = entries.iter().filter(|(name, _)| name == key);
        let value = values.next().map(|(_, value)| value);
        if values.next().is_some() { Err(EditError::DuplicateKey { key: key.to_owned() }) } else { Ok(value) }
    }

    /// Sorts the keys of all maps, so that equality ignores their order.
    pub(crate) fn sorted(mut self) -> Self {
        self.sort();
        self
    }

    fn sort(&mut self) {
        match self {
            Self::Map(entries) => {
                entries.sort_by(|(one, _), (other, _)| one.cmp(other));
                for (_, value) in entries {
                    value.sort();
                }
            }
            Self::List(items) => items.iter_mut().for_each(Self::sort),
            _ => {}
        }
    }
}

/// Returns the text of a string, for [`map`].
pub(crate) fn text(value: impl Into<String>) -> ConfigTree {
    ConfigTree::Text(value.into())
}

/// Returns a map with the given keys and values.
pub(crate) fn map<const N: usize>(entries: [(&str, ConfigTree); N]) -> ConfigTree {
    ConfigTree::Map(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}
