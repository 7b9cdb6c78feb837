//! `schemas/` says what the types say.

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

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas")
}

#[test]
fn the_published_schemas_are_those_of_the_types() {
    let update = std::env::var_os("UPDATE_SCHEMAS").is_some();
    let mut stale = Vec::new();
    for form in MessageSchema::ALL {
        let (path, now) = (folder().join(form.file()), form.generated());
        if fs::read_to_string(&path).unwrap_or_default() != now {
            stale.push(form.file());
            if update {
                fs::write(path, now).unwrap();
            }
        }
    }
    assert!(stale.is_empty() || update, "stale: {stale:?}; UPDATE_SCHEMAS=1 writes them anew");
}

#[test]
fn every_file_of_the_folder_is_a_schema_that_is_used() {
    let used: BTreeSet<String> = MessageSchema::ALL.iter().map(|form| form.file().to_owned()).collect();
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.collect::<BTreeSet<_>>(), used);
}

/// One of each form that a satellite or an administrator sends.
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

/// What the types write again when they have read `value`, or nothing if they do not read it.
fn through_the_types(form: MessageSchema, value: Value) -> Option<Value> {
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
        _ => unreachable!("it is only sent by the backend, and held against its schema wherever a test reads it"),
    }
}

#[test]
fn what_the_types_write_has_the_form_that_was_published() {
    for (form, sample) in samples() {
        SCHEMAS.check(form, &sample).unwrap_or_else(|invalid| panic!("{form:?} {invalid}"));
        let written = through_the_types(form, sample).unwrap_or_else(|| panic!("{form:?} is not read"));
        SCHEMAS.check(form, &written).unwrap_or_else(|invalid| panic!("{form:?} {invalid}"));
    }
}

#[test]
fn a_hash_that_cannot_stand_in_a_header_and_half_a_document_are_no_configuration() {
    let long = "h".repeat(129);
    for hash in ["", "a b", "a\nb", "\u{e9}", "a\"b", "\u{7f}", &long] {
        let wrong = json!({"hash": hash, "servers": {}, "teams": []});
        assert!(SCHEMAS.check(MessageSchema::Config, &wrong).is_err(), "the schema takes {hash:?}");
        assert!(through_the_types(MessageSchema::Config, wrong).is_none(), "the type takes {hash:?}");
    }
    for wrong in [json!({"hash": "h"}), json!({"hash": "h", "servers": {}}), json!({"hash": "h", "teams": []})] {
        assert!(SCHEMAS.check(MessageSchema::Config, &wrong).is_err(), "the schema takes {wrong}");
        assert!(through_the_types(MessageSchema::Config, wrong).is_none());
    }
    for hash in ["!", &"~".repeat(128), "#,/+=:abc"] {
        let fine = json!({"hash": hash, "servers": {}, "teams": []});
        SCHEMAS.check(MessageSchema::Config, &fine).unwrap();
        assert!(through_the_types(MessageSchema::Config, fine).is_some(), "the type does not take {hash:?}");
    }
}

/// All values that differ from `value` in one place by what this place may hardly hold.
fn mutilated(value: &Value) -> Vec<Value> {
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
                all.extend(mutilated(member).into_iter().map(with));
                let mut without = members.clone();
                without.remove(name);
                all.push(Value::Object(without));
            }
        }
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate().take(2) {
                all.extend(mutilated(item).into_iter().map(|other| {
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
fn what_the_types_do_not_read_does_not_have_the_form_that_was_published() {
    let mut refused = 0;
    for (form, sample) in samples() {
        for wrong in mutilated(&sample) {
            let by_schema = SCHEMAS.check(form, &wrong).is_ok();
            let by_type = through_the_types(form, wrong.clone()).is_some();
            // A schema may say more than a type: lengths, ranges, that an object is no list.
            assert!(by_type || !by_schema, "{form:?}: the schema takes what the type does not: {wrong}");
            refused += usize::from(!by_schema);
        }
    }
    assert!(refused > 300, "only {refused}");
}

#[test]
fn the_data_of_every_event_is_held_against_its_type() {
    let mut refused = 0;
    for event in one_of_each() {
        let kind = event["type"].as_str().unwrap();
        SCHEMAS.check_event(kind, &event["data"]).unwrap();
        SCHEMAS.check(MessageSchema::Event, &event).unwrap();
        for wrong in mutilated(&event["data"]) {
            let by_type = serde_json::from_value::<Event>(json!({"type": kind, "data": wrong})).is_ok();
            let by_schema = SCHEMAS.check_event(kind, &wrong).is_ok();
            assert!(by_type || !by_schema, "{kind}: the schema takes what the type does not: {wrong}");
            refused += usize::from(!by_schema);
        }
    }
    assert!(refused > 1000, "only {refused}");
}
