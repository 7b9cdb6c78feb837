//! JSON that stays as it was sent, but for a place or two.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use mcp_satellite_actors::rpc::member;
use serde::Serialize;
use serde_json::value::RawValue;

/// The members of an object, as sent. Of two of one name the last is meant, as most readers have it.
pub(super) type Members<'a> = BTreeMap<Cow<'a, str>, &'a RawValue>;

/// None if it is no object, or one that cannot be read.
pub(super) fn members(json: &str) -> Option<Members<'_>> {
    serde_json::from_str(json).ok()
}

/// The string at the end of a path of names: where it stands, quotes and all, and what it says.
pub(in crate::gateway) fn place(json: &str, path: &[&str]) -> Option<(Range<usize>, String)> {
    let value = path.iter().try_fold(json, |json, name| member(json, name))?;
    let start = value.as_ptr() as usize - json.as_ptr() as usize;
    Some((start..start + value.len(), serde_json::from_str(value).ok()?))
}

/// The same text, with another string in a place.
pub(in crate::gateway) fn with(json: &str, place: &Range<usize>, text: &str) -> String {
    [&json[..place.start], &quoted(text), &json[place.end..]].concat()
}

/// The same text, with the string at the end of a path spelled anew; unchanged if there is none.
pub(in crate::gateway) fn respelled(json: &str, path: &[&str], spell: impl FnOnce(&str) -> String) -> String {
    match place(json, path) {
        Some((place, text)) => with(json, &place, &spell(&text)),
        None => json.to_owned(),
    }
}

/// A text as a JSON string.
pub(in crate::gateway) fn quoted(text: &str) -> String {
    written(&text)
}

/// A text that is JSON. (One that is not, by a fault of ours, becomes null.)
pub(super) fn raw(json: String) -> Box<RawValue> {
    RawValue::from_string(json).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

/// JSON text. What is written here has string keys and no infinite numbers, and so can be written.
pub(in crate::gateway) fn written(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_string_is_spelled_anew_and_all_else_stays_as_it_is() {
        let spell = |text: &str| format!("git|{text}");
        let sent =
            "{ \"uri\" : \"a\\u0062\" , \"n\":1e400,\n\"_meta\":{\"ui\":{\"resourceUri\":\"ui:\\\\x\"},\"y\":[ ]}}";
        let once = respelled(sent, &["uri"], spell);
        assert_eq!(once, sent.replace("a\\u0062", "git|ab"));
        let twice = respelled(&once, &["_meta", "ui", "resourceUri"], spell);
        assert_eq!(twice, once.replace("ui:", "git|ui:"));
    }

    #[test]
    fn a_name_that_is_no_text_hides_nothing_beside_it() {
        let odd = r#"{"\ud800":1,"na\u006de":"a","name":"b","params":{"name":[]}}"#;
        assert_eq!(respelled(odd, &["name"], |name| format!("{name}{name}")), odd.replace(r#""b""#, r#""bb""#));
        assert_eq!(place(odd, &["params", "name"]), None);
    }

    #[test]
    fn what_is_not_there_is_not_spelled() {
        for sent in ["{}", "[]", "{\"uri\":1}", "{\"uri\":{\"a\":1}}", "{\"_meta\":\"uri\"}"] {
            assert_eq!(respelled(sent, &["uri"], |_| String::new()), sent);
            assert_eq!(respelled(sent, &["_meta", "ui", "resourceUri"], |_| String::new()), sent);
        }
    }
}
