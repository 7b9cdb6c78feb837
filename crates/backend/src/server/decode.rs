//! Requests from JSON. The types check what their published schemas demand; an error contains the place and what is
//! expected there, but no value, because a value may be a secret.

use std::mem::discriminant;

use mcp_satellite_actors::model::event::{Event, EventSubject};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde::de::value::MapDeserializer;
use serde_json::{Map, Value};
use serde_path_to_error::{Path, Segment};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidValue {
    /// JSON pointer to the invalid value; empty for the whole document.
    pub pointer: String,
    /// Description of the error without the value.
    pub why: String,
}

impl InvalidValue {
    fn from_error(error: &serde_path_to_error::Error<serde_json::Error>) -> Self {
        Self { pointer: pointer(error.path()), why: describe(error.inner()) }
    }

    pub(super) fn below(mut self, place: &str) -> Self {
        self.pointer.insert_str(0, place);
        self
    }

    /// Returns the index of the value in the array `list`.
    pub(super) fn index(&self, list: &str) -> Option<usize> {
        let mut parts = self.pointer.split('/').skip(1);
        (parts.next()? == list).then(|| parts.next()?.parse().ok())?
    }
}

impl std::fmt::Display for InvalidValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &*self.pointer {
            "" => f.write_str(&self.why),
            place => write!(f, "{place}: {}", self.why),
        }
    }
}

/// Decodes a request.
///
/// # Errors
///
/// Returns the first place that the type does not accept.
pub fn decode<T: DeserializeOwned + Serialize>(value: &Value) -> Result<T, InvalidValue> {
    let decoded: T = serde_path_to_error::deserialize(value).map_err(|error| InvalidValue::from_error(&error))?;
    check_kinds(value, &decoded)?;
    Ok(decoded)
}

/// Decodes an event from its type and its data.
///
/// # Errors
///
/// Returns the first place that the type of event does not accept, or an error if the type is unknown.
pub fn decode_event(kind: &str, data: &Map<String, Value>) -> Result<Event, InvalidValue> {
    let (kind, data) = (Value::from(kind), Value::Object(data.clone()));
    // The type comes first, so that the data is read as its type demands, and errors have a place.
    let members = [("type", &kind), ("data", &data)];
    let read = serde_path_to_error::deserialize(MapDeserializer::new(members.into_iter()));
    let event = read.map_err(|error: serde_path_to_error::Error<serde_json::Error>| {
        let invalid = InvalidValue::from_error(&error);
        match &*invalid.pointer {
            "/type" => InvalidValue { pointer: String::new(), why: "unknown type of event".to_owned() },
            // A missing member is named by the error. Any other error in the flattened members has no place of its own.
            "/data" if !invalid.why.starts_with("missing field `") => {
                decode::<EventSubject>(&data).err().map_or(invalid, |invalid| invalid.below("/data"))
            }
            _ => invalid,
        }
    })?;
    check_kinds(&Value::Object(Map::from_iter([("data".to_owned(), data)])), &event)?;
    Ok(event)
}

/// Rejects values of another kind than the type writes: serde reads a list in place of an object, and an object in place
/// of the name of a variant.
fn check_kinds(read: &Value, decoded: &impl Serialize) -> Result<(), InvalidValue> {
    let written = serde_json::to_value(decoded)
        .map_err(|error| InvalidValue { pointer: String::new(), why: describe(&error) })?;
    compare_kinds(read, &written, String::new())
}

fn compare_kinds(read: &Value, written: &Value, pointer: String) -> Result<(), InvalidValue> {
    match (read, written) {
        (Value::Object(read), Value::Object(written)) => {
            for (name, written) in written {
                if let Some(read) = read.get(name) {
                    compare_kinds(read, written, format!("{pointer}/{}", escape(name)))?;
                }
            }
        }
        (Value::Array(read), Value::Array(written)) => {
            for (at, (read, written)) in read.iter().zip(written).enumerate() {
                compare_kinds(read, written, format!("{pointer}/{at}"))?;
            }
        }
        _ if discriminant(read) == discriminant(written) => {}
        _ => {
            let kind = match written {
                Value::Null => "null",
                Value::Bool(_) => "a boolean",
                Value::Number(_) => "a number",
                Value::String(_) => "a string",
                Value::Array(_) => "a list",
                Value::Object(_) => "an object",
            };
            return Err(InvalidValue { pointer, why: format!("expected {kind}") });
        }
    }
    Ok(())
}

fn describe(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once("expected ") {
        _ if text.starts_with("missing field `") => text,
        Some((_, expected)) => format!("expected {expected}"),
        None => "the value is invalid".to_owned(),
    }
}

fn pointer(path: &Path) -> String {
    let parts = path.iter().filter_map(|segment| match segment {
        Segment::Seq { index } => Some(format!("/{index}")),
        Segment::Map { key } => Some(format!("/{}", escape(key))),
        Segment::Enum { .. } | Segment::Unknown => None,
    });
    parts.collect()
}

fn escape(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}
