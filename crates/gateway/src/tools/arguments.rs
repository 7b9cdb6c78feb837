//! Reads the arguments of the six tools member by member, so that an error can name the member.

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::raw::{Members, members};
use crate::refusal::CallRefusal;

#[derive(Debug)]
pub(super) struct MetaToolArguments<'a>(Members<'a>);

impl<'a> MetaToolArguments<'a> {
    pub(super) fn read(json: Option<&'a str>, known: &[&str]) -> Result<Self, CallRefusal> {
        let json = json.unwrap_or("{}");
        let members =
            members(json).ok_or_else(|| CallRefusal::bad_input("the arguments of a tool are a JSON object"))?;
        if let Some(unknown) = members.keys().find(|name| !known.contains(&&***name)) {
            let message = match known {
                [] => format!("unknown argument `{unknown}`: this tool takes no arguments"),
                known => format!("unknown argument `{unknown}`: this tool takes `{}`", known.join("`, `")),
            };
            return Err(CallRefusal::bad_input(message));
        }
        Ok(Self(members))
    }

    pub(super) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.0.get(name).copied().filter(|value| value.get() != "null")
    }

    /// Returns a member if it is present. `what` describes the expected value, for the error.
    pub(super) fn optional<T: DeserializeOwned>(&self, name: &str, what: &str) -> Result<Option<T>, CallRefusal> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        let value = serde_json::from_str(value.get());
        value.map(Some).map_err(|_| CallRefusal::bad_input(format!("`{name}` must be {what}")))
    }

    pub(super) fn text(&self, name: &str) -> Result<String, CallRefusal> {
        let text = self.optional(name, "a string")?;
        text.ok_or_else(|| CallRefusal::bad_input(format!("`{name}` is missing")))
    }
}
