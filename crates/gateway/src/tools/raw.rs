//! JSON text that is changed in a few places and otherwise stays as it was sent.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use mcp_satellite_protocol::rpc::member;
use serde::Serialize;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Members of an object, as sent. Of members with equal names the last one counts, as for most readers.
pub(super) type Members<'a> = BTreeMap<Cow<'a, str>, &'a RawValue>;

pub(super) fn members(json: &str) -> Option<Members<'_>> {
    serde_json::from_str(json).ok()
}

/// Members of an object in their order and notation, so that single members can be changed.
#[derive(Debug, Default)]
pub(crate) struct JsonMembers<'a>(Vec<JsonMember<'a>>);

#[derive(Debug)]
struct JsonMember<'a> {
    // Name with its quotes.
    quoted_name: Cow<'a, str>,
    // Decoded name; `None` if it is not valid text, so that no lookup matches it.
    name: Option<Cow<'a, str>>,
    value: Cow<'a, str>,
}

/// Error: a member is present twice. Two readers could disagree on its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DuplicateMember;

impl<'a> JsonMembers<'a> {
    pub(crate) fn read(json: &'a str) -> Option<Self> {
        // Serde also accepts an array as an object.
        if !json.trim_ascii_start().starts_with('{') {
            return None;
        }
        serde_json::from_str(json).ok()
    }

    /// Returns the value of a member as written. Of members with equal names the last one counts, as for most readers.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|pair| pair.is_named(name)).map(|pair| &*pair.value)
    }

    pub(crate) fn get_unique(&self, name: &str) -> Result<Option<&str>, DuplicateMember> {
        let mut found = self.0.iter().filter(|pair| pair.is_named(name));
        let first = found.next();
        if found.next().is_some() { Err(DuplicateMember) } else { Ok(first.map(|pair| &*pair.value)) }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(|pair| Some((pair.name.as_deref()?, &*pair.value)))
    }

    pub(crate) fn remove(&mut self, names: &[&str]) {
        self.0.retain(|pair| !names.iter().any(|name| pair.is_named(name)));
    }

    pub(crate) fn set(&mut self, name: &str, value: String) {
        match self.0.iter_mut().rev().find(|pair| pair.is_named(name)) {
            Some(pair) => pair.value = Cow::Owned(value),
            None => self.0.push(JsonMember {
                quoted_name: Cow::Owned(json_string(name)),
                name: Some(Cow::Owned(name.to_owned())),
                value: Cow::Owned(value),
            }),
        }
    }

    pub(crate) fn to_json(&self) -> String {
        let length: usize = self.0.iter().map(|pair| pair.quoted_name.len() + pair.value.len() + 2).sum();
        let mut text = String::with_capacity(length + 2);
        let mut separator = '{';
        for pair in &self.0 {
            text.push(separator);
            text.push_str(&pair.quoted_name);
            text.push(':');
            text.push_str(&pair.value);
            separator = ',';
        }
        if self.0.is_empty() {
            text.push('{');
        }
        text.push('}');
        text
    }
}

impl JsonMember<'_> {
    fn is_named(&self, name: &str) -> bool {
        self.name.as_deref() == Some(name)
    }
}

impl<'de> Deserialize<'de> for JsonMembers<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct MembersVisitor;

        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = JsonMembers<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<JsonMembers<'de>, A::Error> {
                let mut pairs = Vec::new();
                while let Some((name, value)) = from.next_entry::<&RawValue, &RawValue>()? {
                    pairs.push(JsonMember {
                        quoted_name: name.get().into(),
                        name: decode_name(name.get()),
                        value: value.get().into(),
                    });
                }
                Ok(JsonMembers(pairs))
            }
        }

        from.deserialize_map(MembersVisitor)
    }
}

/// Decodes the name of a member, which is valid JSON text. Returns `None` if it is not a valid string.
fn decode_name(quoted: &str) -> Option<Cow<'_, str>> {
    match quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        Some(name) if !name.contains('\\') => Some(Cow::Borrowed(name)),
        _ => serde_json::from_str::<String>(quoted).ok().map(Cow::Owned),
    }
}

pub(crate) fn replace_part(text: &str, part: &str, replacement: &str) -> String {
    let start = part.as_ptr() as usize - text.as_ptr() as usize;
    [&text[..start], replacement, &text[start + part.len()..]].concat()
}

/// Finds the string at the end of a path of member names. Returns its range, with the quotes, and its decoded value.
pub(crate) fn find_string(json: &str, path: &[&str]) -> Option<(Range<usize>, String)> {
    let value = path.iter().try_fold(json, |json, name| member(json, name))?;
    let start = value.as_ptr() as usize - json.as_ptr() as usize;
    Some((start..start + value.len(), serde_json::from_str(value).ok()?))
}

pub(crate) fn replace_string(json: &str, range: &Range<usize>, text: &str) -> String {
    [&json[..range.start], &json_string(text), &json[range.end..]].concat()
}

pub(crate) fn map_string(json: &str, path: &[&str], map: impl FnOnce(&str) -> String) -> String {
    match find_string(json, path) {
        Some((range, text)) => replace_string(json, &range, &map(&text)),
        None => json.to_owned(),
    }
}

pub(crate) fn json_string(text: &str) -> String {
    to_json(&text)
}

/// Wraps JSON text. Invalid text, which would be a bug, becomes null.
pub(super) fn raw_value(json: String) -> Box<RawValue> {
    RawValue::from_string(json).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

/// Serializes a value. The types used here have string keys and finite numbers, so this does not fail.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn map_string_changes_one_string_and_nothing_else() {
        let prefix = |text: &str| format!("git|{text}");
        let sent =
            "{ \"uri\" : \"a\\u0062\" , \"n\":1e400,\n\"_meta\":{\"ui\":{\"resourceUri\":\"ui:\\\\x\"},\"y\":[ ]}}";
        let once = map_string(sent, &["uri"], prefix);
        assert_eq!(once, sent.replace("a\\u0062", "git|ab"));
        let twice = map_string(&once, &["_meta", "ui", "resourceUri"], prefix);
        assert_eq!(twice, once.replace("ui:", "git|ui:"));
    }

    #[test]
    fn an_invalid_member_name_does_not_hide_other_members() {
        let odd = r#"{"\ud800":1,"na\u006de":"a","name":"b","params":{"name":[]}}"#;
        assert_eq!(map_string(odd, &["name"], |name| format!("{name}{name}")), odd.replace(r#""b""#, r#""bb""#));
        assert_eq!(find_string(odd, &["params", "name"]), None);
    }

    #[test]
    fn setting_and_removing_members_keeps_the_rest_unchanged() {
        let sent = "{ \"a\\u0062\" : 1e400 ,\n\"\\ud800\":[ ], \"x\":1,\"y\":{ } ,\"x\":2 }";
        let mut pairs = JsonMembers::read(sent).unwrap();
        assert_eq!(
            (pairs.get("ab"), pairs.get("x"), pairs.get_unique("y")),
            (Some("1e400"), Some("2"), Ok(Some("{ }")))
        );
        assert_eq!((pairs.get_unique("x"), pairs.get_unique("z")), (Err(DuplicateMember), Ok(None)));
        pairs.set("y", "null".to_owned());
        pairs.set("n\"", "1".to_owned());
        assert_eq!(pairs.to_json(), r#"{"a\u0062":1e400,"\ud800":[ ],"x":1,"y":null,"x":2,"n\"":1}"#);
        pairs.remove(&["x", "ab"]);
        assert_eq!(pairs.to_json(), r#"{"\ud800":[ ],"y":null,"n\"":1}"#);
        assert!(JsonMembers::read("[[\"a\",1]]").is_none() && JsonMembers::read("{").is_none());
        let text = "{\"a\":{\"b\":1}}";
        assert_eq!(replace_part(text, member(text, "a").unwrap(), "[]"), "{\"a\":[]}");
    }

    #[test]
    fn a_missing_string_changes_nothing() {
        for sent in ["{}", "[]", "{\"uri\":1}", "{\"uri\":{\"a\":1}}", "{\"_meta\":\"uri\"}"] {
            assert_eq!(map_string(sent, &["uri"], |_| String::new()), sent);
            assert_eq!(map_string(sent, &["_meta", "ui", "resourceUri"], |_| String::new()), sent);
        }
    }
}
