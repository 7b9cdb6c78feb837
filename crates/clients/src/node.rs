//! The value of a client's file: one tree for JSON, YAML and TOML that keeps the order and duplicate keys. An edit is
//! correct if the tree of its result equals the tree before it, with exactly one server changed.

use std::fmt;
use std::ops::Deref;

use jsonc_parser::ast;
use jsonc_parser::common::Ranged;
use serde::de::{Deserialize, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor};
use toml_edit::{Item, TableLike, Value};

use crate::edit::EditError;

/// A value of the file. There is no `Debug` outside of tests, because values can be secrets.
#[derive(Clone, PartialEq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) enum ConfigNode {
    Null,
    Bool(bool),
    /// A number or a date as text.
    Literal(String),
    Text(String),
    List(Vec<ConfigNode>),
    /// Keys in the order of the file. A key can occur twice.
    Map(Vec<(NodeKey, ConfigNode)>),
}

/// A key with its place, which equality ignores.
#[derive(Clone)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct NodeKey {
    pub(crate) name: String,
    /// First byte of the name in the file; `None` in YAML, TOML and new entries.
    pub(crate) at: Option<usize>,
}

impl PartialEq for NodeKey {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl PartialEq<str> for NodeKey {
    fn eq(&self, other: &str) -> bool {
        self.name == *other
    }
}

impl Deref for NodeKey {
    type Target = String;

    fn deref(&self) -> &String {
        &self.name
    }
}

impl<T: Into<String>> From<T> for NodeKey {
    fn from(name: T) -> Self {
        Self { name: name.into(), at: None }
    }
}

impl ConfigNode {
    /// Names the type for messages.
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

    /// Returns the value of `key`. Of duplicate keys, the last one applies, as in `JSON.parse`.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        self.as_map()?.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    pub(crate) fn as_map(&self) -> Option<&[(NodeKey, Self)]> {
        if let Self::Map(entries) = self { Some(entries) } else { None }
    }

    pub(crate) fn as_list(&self) -> Option<&[Self]> {
        if let Self::List(items) = self { Some(items) } else { None }
    }

    pub(crate) fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
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
                entries.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
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
pub(crate) fn text(value: impl Into<String>) -> ConfigNode {
    ConfigNode::Text(value.into())
}

/// Returns a map with the given keys and values.
pub(crate) fn map<const N: usize>(entries: [(&str, ConfigNode); N]) -> ConfigNode {
    ConfigNode::Map(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

/// Returns the value of a JSON syntax tree. `mark` is the length of the byte order mark before the text.
pub(crate) fn from_json(value: ast::Value<'_>, mark: usize) -> ConfigNode {
    match value {
        ast::Value::NullKeyword(_) => ConfigNode::Null,
        ast::Value::BooleanLit(literal) => ConfigNode::Bool(literal.value),
        ast::Value::NumberLit(literal) => ConfigNode::Literal(literal.value.to_owned()),
        ast::Value::StringLit(literal) => ConfigNode::Text(literal.value.into_owned()),
        ast::Value::Array(array) => {
            ConfigNode::List(array.elements.into_iter().map(|item| from_json(item, mark)).collect())
        }
        ast::Value::Object(object) => {
            let entry = |entry: ast::ObjectProp<'_>| {
                // After the quote.
                let at = Some(mark + entry.name.range().start + 1);
                (NodeKey { name: entry.name.into_string(), at }, from_json(entry.value, mark))
            };
            ConfigNode::Map(object.properties.into_iter().map(entry).collect())
        }
    }
}

/// Returns the value of a TOML table.
pub(crate) fn from_table(table: &dyn TableLike) -> ConfigNode {
    ConfigNode::Map(table.iter().map(|(key, item)| (key.into(), from_item(item))).collect())
}

fn from_item(item: &Item) -> ConfigNode {
    match item {
        Item::None => ConfigNode::Null,
        Item::Value(value) => from_toml_value(value),
        Item::Table(table) => from_table(table),
        Item::ArrayOfTables(tables) => ConfigNode::List(tables.iter().map(|table| from_table(table)).collect()),
    }
}

fn from_toml_value(value: &Value) -> ConfigNode {
    match value {
        Value::String(text) => ConfigNode::Text(text.value().clone()),
        Value::Integer(number) => ConfigNode::Literal(number.value().to_string()),
        // Unlike `Display`, `Debug` writes `1.0` and not `1`.
        Value::Float(number) => ConfigNode::Literal(format!("{:?}", number.value())),
        Value::Boolean(flag) => ConfigNode::Bool(*flag.value()),
        Value::Datetime(time) => ConfigNode::Literal(time.value().to_string()),
        Value::Array(array) => ConfigNode::List(array.iter().map(from_toml_value).collect()),
        Value::InlineTable(table) => from_table(table),
    }
}

/// Reads any YAML value. The types of `yaml_serde` itself reject a whole file for one duplicate key.
impl<'de> Deserialize<'de> for ConfigNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = ConfigNode;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, flag: bool) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Bool(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Literal(number.to_string()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Literal(number.to_string()))
    }

    fn visit_i128<E>(self, number: i128) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Literal(number.to_string()))
    }

    fn visit_u128<E>(self, number: u128) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Literal(number.to_string()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Literal(format!("{number:?}")))
    }

    fn visit_str<E>(self, text: &str) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Text(text))
    }

    fn visit_unit<E>(self) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Null)
    }

    fn visit_none<E>(self) -> Result<ConfigNode, E> {
        Ok(ConfigNode::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<ConfigNode, D::Error> {
        Deserialize::deserialize(inner)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ConfigNode, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(ConfigNode::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<ConfigNode, A::Error> {
        let mut map = Vec::new();
        while let Some((key, value)) = entries.next_entry::<ConfigNode, ConfigNode>()? {
            let key = match key {
                ConfigNode::Text(text) | ConfigNode::Literal(text) => text,
                ConfigNode::Bool(flag) => flag.to_string(),
                ConfigNode::Null => "null".to_owned(),
                ConfigNode::List(_) | ConfigNode::Map(_) => "?".to_owned(),
            };
            map.push((key.into(), value));
        }
        Ok(ConfigNode::Map(map))
    }

    /// A value with a tag (`!name value`). The tag is not used.
    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<ConfigNode, A::Error> {
        let (_tag, value) = tagged.variant::<ConfigNode>()?;
        value.newtype_variant()
    }
}
