//! The published schemas in `crates/backend/schemas/` match the types.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use mcp_satellite::actors::model::event::Event;
use mcp_satellite::backend::server::api;
use mcp_satellite::backend::server::schema::MessageSchema;
use mcp_satellite::backend::wire;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::events::one_of_each;
use super::support::{SCHEMAS, heartbeat, registration};

fn schema_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/backend/schemas")
}

#[test]
fn the_published_schemas_match_the_types() {
    let update = std::env::var_os("UPDATE_SCHEMAS").is_some();
    let mut stale = Vec::new();
    for form in MessageSchema::ALL {
        let (path, now) = (schema_dir().join(form.file()), form.generated());
        if fs::read_to_string(&path).unwrap_or_default() != now {
            stale.push(form.file());
            if update {
                fs::write(path, now).unwrap();
            }
        }
    }
    assert!(stale.is_empty() || update, "stale: {stale:?}; run with UPDATE_SCHEMAS=1");
}

#[test]
fn the_directory_contains_exactly_the_used_schemas() {
    let used: BTreeSet<String> = MessageSchema::ALL.iter().map(|form| form.file().to_owned()).collect();
    let files = fs::read_dir(schema_dir()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.collect::<BTreeSet<_>>(), used);
}

/// A sample of each message that a satellite or an administrator sends.
fn samples() -> Vec<(MessageSchema, Value)> {
    let command = json!({"id": "c", "command_type": "kill", "payload": {"installation_id": "a"}});
    vec![
        (MessageSchema::Registration, registration("first-satellite")),
        (MessageSchema::Registered, json!({"satellite_id": "sat-1", "api_key": "0123456789abcdef"})),
        (MessageSchema::Commands, json!({"commands": [command], "polling_mode": "high", "next_poll_interval": 1.5})),
        (MessageSchema::Target, json!({"installation_id": "a", "team_id": "t", "user_id": "u"})),
        (MessageSchema::Configure, json!({"event": "mcp_recovery", "installation_id": "a"})),
        (MessageSchema::HealthCheck, json!({"installation_id": "a", "check_type": "credential_validation"})),
        (MessageSchema::CommandResult, json!({"status": "failed", "result": {}, "error": "why", "duration_ms": 1})),
        (MessageSchema::Received, json!({"success": true})),
        (MessageSchema::Config, json!({"hash": "h", "servers": {"s": {}}, "teams": [{}]})),
        (MessageSchema::Events, json!({"events": one_of_each()})),
        (
            MessageSchema::EventsTaken,
            json!({"success": false, "processed": 1, "failed": 1, "event_ids": ["1"], "failures": [{"index": 1, "type": "a.b", "error": "e"}]}),
        ),
        (MessageSchema::Heartbeat, heartbeat("2026-11-21T06:33:00Z".parse().unwrap())),
        (MessageSchema::Error, json!({"error": "why", "index": 3})),
        (MessageSchema::TokenWanted, json!({"expires_in_seconds": 60, "note": "n", "name": "first-satellite"})),
        (MessageSchema::ConfigWanted, json!({"servers": {"s": {}}, "teams": [{}]})),
        (
            MessageSchema::CommandWanted,
            json!({"id": "c", "command_type": "kill", "priority": "low", "payload": {}, "expires_in_seconds": 3}),
        ),
    ]
}

/// Deserializes and serializes a value; `None` if it cannot be deserialized.
fn round_trip(form: MessageSchema, value: Value) -> Option<Value> {
    fn through<T: Serialize + DeserializeOwned>(value: Value) -> Option<Value> {
        Some(serde_json::to_value(serde_json::from_value::<T>(value).ok()?).unwrap())
    }
    match form {
        MessageSchema::Registration => through::<wire::Registration>(value),
        MessageSchema::Registered => through::<wire::RegistrationResponse>(value),
        MessageSchema::Commands => through::<wire::PollCommands>(value),
        MessageSchema::Target => through::<wire::CommandTarget>(value),
        MessageSchema::Configure => through::<wire::ConfigurePayload>(value),
        MessageSchema::HealthCheck => through::<wire::HealthCheckPayload>(value),
        MessageSchema::CommandResult => through::<wire::CommandResult>(value),
        MessageSchema::Received => through::<wire::EmptyResponse>(value),
        MessageSchema::Config => through::<wire::SatelliteConfig>(value),
        MessageSchema::Events => through::<wire::EventBatch>(value),
        MessageSchema::EventsTaken => through::<wire::EventBatchResult>(value),
        MessageSchema::Heartbeat => through::<wire::Heartbeat>(value),
        MessageSchema::Error => through::<wire::ErrorBody>(value),
        MessageSchema::TokenWanted => through::<api::TokenRequest>(value),
        MessageSchema::ConfigWanted => through::<api::ConfigUpdate>(value),
        MessageSchema::CommandWanted => through::<api::CommandRequest>(value),
        _ => unreachable!("only sent by the backend, and validated wherever a test reads it"),
    }
}

#[test]
fn serialized_types_match_their_published_schema() {
    for (form, sample) in samples() {
        SCHEMAS.check(form, &sample).unwrap_or_else(|invalid| panic!("{form:?} {invalid}"));
        let written = round_trip(form, sample).unwrap_or_else(|| panic!("{form:?} cannot be deserialized"));
        SCHEMAS.check(form, &written).unwrap_or_else(|invalid| panic!("{form:?} {invalid}"));
    }
}

#[test]
fn a_configuration_with_an_invalid_hash_or_missing_members_is_rejected() {
    let long = "h".repeat(129);
    for hash in ["", "a b", "a\nb", "\u{e9}", "a\"b", "\u{7f}", &long] {
        let wrong = json!({"hash": hash, "servers": {}, "teams": []});
        assert!(SCHEMAS.check(MessageSchema::Config, &wrong).is_err(), "the schema accepts {hash:?}");
        assert!(round_trip(MessageSchema::Config, wrong).is_none(), "the type accepts {hash:?}");
    }
    for wrong in [json!({"hash": "h"}), json!({"hash": "h", "servers": {}}), json!({"hash": "h", "teams": []})] {
        assert!(SCHEMAS.check(MessageSchema::Config, &wrong).is_err(), "the schema accepts {wrong}");
        assert!(round_trip(MessageSchema::Config, wrong).is_none());
    }
    for hash in ["!", &"~".repeat(128), "#,/+=:abc"] {
        let fine = json!({"hash": hash, "servers": {}, "teams": []});
        SCHEMAS.check(MessageSchema::Config, &fine).unwrap();
        assert!(round_trip(MessageSchema::Config, fine).is_some(), "the type rejects {hash:?}");
    }
}

/// All values that differ from `value` in one place, by a value of another type or a missing member.
fn mutations(value: &Value) -> Vec<Value> {
    let mut all: Vec<Value> =
        [json!(null), json!(7), json!(-3), json!(0.5), json!("x"), json!([]), json!({}), json!(true)]
            .into_iter()
            .filter(|other| std::mem::discriminant(other) != std::mem::discriminant(value) || value.is_number())
            .collect();
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let with = |other: Value| {
                    let mut members = members.clone();
                    members.insert(name.clone(), other);
                    Value::Object(members)
                };
                all.extend(mutations(member).into_iter().map(with));
                let mut without = members.clone();
                without.remove(name);
                all.push(Value::Object(without));
            }
        }
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate().take(2) {
                all.extend(mutations(item).into_iter().map(|other| {
                    let mut items = items.clone();
                    items[at] = other;
                    Value::Array(items)
                }));
            }
        }
        _ => {}
    }
    all
}

#[test]
fn values_that_the_types_reject_do_not_match_the_published_schema() {
    let mut refused = 0;
    for (form, sample) in samples() {
        for wrong in mutations(&sample) {
            let by_schema = SCHEMAS.check(form, &wrong).is_ok();
            let by_type = round_trip(form, wrong.clone()).is_some();
            // A schema may be stricter than a type: lengths, ranges, lists in place of objects.
            assert!(by_type || !by_schema, "{form:?}: the schema accepts a value that the type rejects: {wrong}");
            refused += usize::from(!by_schema);
        }
    }
    assert!(refused > 300, "only {refused} rejected");
}

#[test]
fn the_data_of_every_event_is_validated_against_its_type() {
    let mut refused = 0;
    for event in one_of_each() {
        let kind = event["type"].as_str().unwrap();
        SCHEMAS.check_event(kind, &event["data"]).unwrap();
        SCHEMAS.check(MessageSchema::Event, &event).unwrap();
        for wrong in mutations(&event["data"]) {
            let by_type = serde_json::from_value::<Event>(json!({"type": kind, "data": wrong})).is_ok();
            let by_schema = SCHEMAS.check_event(kind, &wrong).is_ok();
            assert!(by_type || !by_schema, "{kind}: the schema accepts a value that the type rejects: {wrong}");
            refused += usize::from(!by_schema);
        }
    }
    assert!(refused > 1000, "only {refused} rejected");
}
