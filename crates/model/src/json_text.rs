//! JSON values that are stored and sent without being interpreted.

use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// JSON value as text: in one line, without insignificant whitespace, its members in their order. Every text that it
/// contains can be read as a [`Value`].
#[derive(Clone)]
pub struct JsonText(Box<RawValue>);

impl JsonText {
    /// Reads a JSON text.
    ///
    /// # Errors
    /// Returns an error if the text cannot be read as a [`Value`].
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text)
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        self.0.get()
    }

    /// Returns the value.
    pub fn to_value(&self) -> Value {
        // Every text was read before.
        serde_json::from_str(self.as_str()).unwrap_or_default()
    }

    fn from_text(text: String) -> serde_json::Result<Self> {
        RawValue::from_string(text).map(Self)
    }
}

impl Default for JsonText {
    fn default() -> Self {
        Self(RawValue::NULL.to_owned())
    }
}

impl From<Value> for JsonText {
    fn from(value: Value) -> Self {
        Self::from_text(value.to_string()).unwrap_or_default()
    }
}

impl PartialEq for JsonText {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str() || self.to_value() == other.to_value()
    }
}

impl fmt::Debug for JsonText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for JsonText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for JsonText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for JsonText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Not with `RawValue`, which cannot be read inside a flattened structure.
        let mut text = Vec::new();
        TextWriter(&mut text).deserialize(deserializer)?;
        let text = String::from_utf8(text).map_err(D::Error::custom)?;
        Self::from_text(text).map_err(D::Error::custom)
    }
}

/// Writes a value as text while it is read.
struct TextWriter<'a>(&'a mut Vec<u8>);

impl TextWriter<'_> {
    fn write<E: serde::de::Error>(self, value: &(impl Serialize + ?Sized)) -> Result<(), E> {
        serde_json::to_writer(self.0, value).map_err(E::custom)
    }
}

impl<'de> DeserializeSeed<'de> for TextWriter<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TextWriter<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        self.write(&value)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.write(&value)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.write(&value)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.write(&value)
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        self.write(value)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.write(&())
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<(), E> {
        self.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.0.push(b'[');
        let begin = self.0.len();
        while items.next_element_seed(ItemWriter { text: self.0, begin })?.is_some() {}
        self.0.push(b']');
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        self.0.push(b'{');
        let begin = self.0.len();
        while members.next_key_seed(ItemWriter { text: self.0, begin })?.is_some() {
            self.0.push(b':');
            members.next_value_seed(TextWriter(self.0))?;
        }
        self.0.push(b'}');
        Ok(())
    }
}

/// Writes an item of a list or the key of a member, after a comma if it is not the first.
struct ItemWriter<'a> {
    text: &'a mut Vec<u8>,
    begin: usize,
}

impl<'de> DeserializeSeed<'de> for ItemWriter<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.text.len() > self.begin {
            self.text.push(b',');
        }
        TextWriter(self.text).deserialize(deserializer)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Outer {
        #[serde(flatten)]
        inner: Inner,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "type", content = "data")]
    enum Inner {
        Logged { payload: JsonText },
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            // `serde_json` does not read every number exactly.
            any::<i32>().prop_map(|number| Value::from(f64::from(number) / 8.0)),
            ".{0,10}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::hash_map(".{0,5}", inner, 0..5)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_value_is_written_in_one_line_and_read_back_unchanged(value in value(), pretty in any::<bool>()) {
            let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
            let read = JsonText::parse(&text).unwrap();
            prop_assert_eq!(read.to_value(), value.clone());
            prop_assert!(!read.as_str().contains(['\n', '\r']));
            let outer = Outer { inner: Inner::Logged { payload: read.clone() } };
            let written = serde_json::to_string(&outer).unwrap();
            let again: Outer = serde_json::from_str(&written).unwrap();
            prop_assert_eq!(serde_json::to_string(&again).unwrap(), written);
            prop_assert_eq!(again, outer);
            prop_assert_eq!(JsonText::from(value), read);
        }
    }

    #[test]
    fn members_keep_their_order() {
        let read = JsonText::parse("{ \"b\": 1,\r\n \"a\" : [ true , null, \"\\u0041\" ] }").unwrap();
        assert_eq!(read.as_str(), r#"{"b":1,"a":[true,null,"A"]}"#);
        assert_eq!(read, JsonText::from(json!({"a": [true, null, "A"], "b": 1})));
    }

    #[test]
    fn a_text_that_is_not_a_value_is_an_error() {
        for text in ["", "{", "1e999", r#""\ud800""#, "[1] 2", &"[".repeat(200)] {
            assert!(JsonText::parse(text).is_err(), "{text}");
        }
    }
}
