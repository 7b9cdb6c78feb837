//! Parsing of poll responses, command by command: an invalid command is answered with a failure and does not block the
//! others.

use jiff::Timestamp;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::key::is_id;
use crate::wire::{BackendCommand, CommandPriority, PollCommands, PollingMode};

#[derive(Debug, Deserialize)]
pub(super) struct PollResponse {
    commands: Vec<Value>,
    // An unknown mode must not discard the commands.
    #[serde(default, deserialize_with = "known_or_default")]
    polling_mode: PollingMode,
    #[serde(default)]
    next_poll_interval: Option<f64>,
    #[serde(default)]
    server_time: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) struct ParsedPollResponse {
    // Valid commands and the other members of the response.
    pub(super) answer: PollCommands,
    pub(super) invalid: Vec<InvalidCommand>,
    // Number of commands without a usable id, which cannot be answered.
    pub(super) without_id: usize,
}

// Invalid command with a valid id.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InvalidCommand {
    pub(super) id: String,
    // Without the values, which may be secrets.
    pub(super) why: &'static str,
}

impl PollResponse {
    // A backend that ignores the limit may send more commands.
    pub(super) fn parse(self, limit: usize) -> ParsedPollResponse {
        let Self { commands, polling_mode, next_poll_interval, server_time } = self;
        let answer = PollCommands { commands: Vec::new(), polling_mode, next_poll_interval, server_time };
        let mut orders = ParsedPollResponse { answer, invalid: Vec::new(), without_id: 0 };
        for command in commands.into_iter().take(limit) {
            match command {
                Value::Object(members) => match members.get("id").and_then(Value::as_str).filter(|id| is_id(id)) {
                    Some(id) => orders.add(id.to_owned(), members),
                    None => orders.without_id += 1,
                },
                _ => orders.without_id += 1,
            }
        }
        orders
    }
}

impl ParsedPollResponse {
    fn add(&mut self, id: String, mut members: Map<String, Value>) {
        // Members that are null count as absent.
        members.retain(|_, value| !value.is_null());
        if members.get("priority").is_some_and(|word| CommandPriority::deserialize(word).is_err()) {
            members.remove("priority");
        }
        let is_late_at_a_time = members.get("expires_at").is_none_or(|time| Timestamp::deserialize(time).is_ok());
        match serde_json::from_value::<BackendCommand>(Value::Object(members)) {
            Ok(command) => self.answer.commands.push(command),
            Err(_) if !is_late_at_a_time => {
                self.invalid.push(InvalidCommand {
                    id,
                    why: "`expires_at` is not a valid time, so the command may have expired",
                });
            }
            Err(_) => {
                self.invalid
                    .push(InvalidCommand { id, why: "a member of the command is missing or of the wrong type" });
            }
        }
    }
}

fn known_or_default<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PollingMode, D::Error> {
    let word = Value::deserialize(deserializer)?;
    Ok(PollingMode::deserialize(word).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(answer: Value, limit: usize) -> ParsedPollResponse {
        serde_json::from_value::<PollResponse>(answer).unwrap().parse(limit)
    }

    #[test]
    fn an_invalid_command_does_not_hide_the_others() {
        let parsed = read(
            json!({"polling_mode": "frantic", "next_poll_interval": null, "commands": [
                {"id": "good", "command_type": "restart"},
                {"id": "no-type"},
                {"id": "wrong", "command_type": 7},
                {"id": "late", "command_type": "restart", "expires_at": "soon"},
                {"id": "../x", "command_type": "restart"},
                {"id": 7},
                "hunter2",
                {"id": "null", "command_type": "kill", "priority": null, "payload": null, "expires_at": null},
                {"id": "word", "command_type": "kill", "priority": "whenever"},
            ]}),
            100,
        );
        let ids: Vec<_> = parsed.answer.commands.iter().map(|command| (&*command.id, command.priority)).collect();
        assert_eq!(
            ids,
            [("good", CommandPriority::Normal), ("null", CommandPriority::Normal), ("word", CommandPriority::Normal)]
        );
        let invalid: Vec<_> = parsed.invalid.iter().map(|one| (&*one.id, one.why.contains("time"))).collect();
        assert_eq!(invalid, [("no-type", false), ("wrong", false), ("late", true)]);
        assert_eq!((parsed.without_id, parsed.answer.polling_mode), (3, PollingMode::Normal));
    }

    #[test]
    fn commands_over_the_limit_are_ignored() {
        let many: Vec<_> = (0..50).map(|id| json!({"id": id.to_string(), "command_type": "kill"})).collect();
        let parsed = read(json!({"commands": many}), 10);
        assert_eq!((parsed.answer.commands.len(), parsed.without_id), (10, 0));
    }
}
