//! Arguments of an attempt.

use nix::unistd::Pid;
use serde_json::Value;

pub(crate) struct AttemptArguments<'a>(pub(crate) &'a Value);

impl<'a> AttemptArguments<'a> {
    pub(crate) fn text(&self, name: &str) -> Result<&'a str, String> {
        self.optional_text(name)?.ok_or_else(|| format!("`{name}` is missing"))
    }

    pub(crate) fn optional_text(&self, name: &str) -> Result<Option<&'a str>, String> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(format!("`{name}` is text, not {other}")),
        }
    }

    pub(crate) fn texts(&self, name: &str) -> Result<Vec<&'a str>, String> {
        let Some(values) = self.0.get(name) else { return Ok(Vec::new()) };
        let texts = values.as_array().and_then(|values| values.iter().map(Value::as_str).collect());
        texts.ok_or_else(|| format!("`{name}` is a list of texts, not {values}"))
    }

    pub(crate) fn number(&self, name: &str) -> Result<u64, String> {
        self.optional_number(name)?.ok_or_else(|| format!("`{name}` is missing"))
    }

    pub(crate) fn optional_number(&self, name: &str) -> Result<Option<u64>, String> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                value.as_u64().map(Some).ok_or_else(|| format!("`{name}` is a number from 0 on, not {value}"))
            }
        }
    }

    /// Returns a number of at most `max`, which protects the machine.
    pub(crate) fn at_most(&self, name: &str, max: usize) -> Result<usize, String> {
        let number = self.number(name)?;
        usize::try_from(number)
            .ok()
            .filter(|number| *number <= max)
            .ok_or_else(|| format!("`{name}` is at most {max}, so that the machine does not suffer: {number}"))
    }

    /// Returns the id of a single process: 0 and negative numbers, which mean groups or all processes, are rejected.
    pub(crate) fn pid(&self) -> Result<Option<Pid>, String> {
        let Some(pid) = self.optional_number("pid")? else { return Ok(None) };
        let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).ok_or("`pid` is from 1 on")?;
        Ok(Some(Pid::from_raw(pid)))
    }
}
