//! The published schemas in `crates/backend/schemas/` match the types, and requests are accepted and rejected as they
//! demand.

use std::collections::BTreeSet;
use std::fs;

use mcp_satellite::backend::server::api;
use mcp_satellite::backend::server::decode::{InvalidValue, decode, decode_event};
use mcp_satellite::backend::server::schema::MessageSchema;
use mcp_satellite::backend::wire;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::events::one_of_each;
use super::support::{SCHEMAS, heartbeat, registration};
use super::validators::schema_dir;

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
        (MessageSchema::RegistrationResponse, json!({"satellite_id": "sat-1", "api_key": "0123456789abcdef"})),
        (MessageSchema::Commands, json!({"commands": [command], "polling_mode": "high", "next_poll_interval": 1.5})),
        (MessageSchema::Target, json!({"installation_id": "a", "team_id": "t", "user_id": "u"})),
        (MessageSchema::Configure, json!({"event": "mcp_recovery", "installation_id": "a"})),
        (MessageSchema::HealthCheck, json!({"installation_id": "a", "check_type": "credential_validation"})),
        (MessageSchema::CommandResult, json!({"status": "failed", "result": {}, "error": "why", "duration_ms": 1})),
        (MessageSchema::EmptyResponse, json!({"success": true})),
        (MessageSchema::Config, json!({"hash": "h", "servers": {"s": {}}, "teams": [{}]})),
        (MessageSchema::Events, json!({"events": one_of_each()})),
        (
            MessageSchema::EventBatchResult,
            json!({"success": false, "processed": 1, "failed": 1, "event_ids": ["1"], "failures": [{"index": 1, "type": "a.b", "error": "e"}]}),
        ),
        (MessageSchema::Heartbeat, heartbeat("2026-11-21T06:33:00Z".parse().unwrap())),
        (MessageSchema::Error, json!({"error": "why", "index": 3})),
        (MessageSchema::TokenRequest, json!({"expires_in_seconds": 60, "note": "n", "name": "first-satellite"})),
        (MessageSchema::ConfigUpdate, json!({"servers": {"s": {}}, "teams": [{}]})),
        (
            MessageSchema::CommandRequest,
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
        MessageSchema::RegistrationResponse => through::<wire::RegistrationResponse>(value),
        MessageSchema::Commands => through::<wire::PollCommands>(value),
        MessageSchema::Target => through::<wire::CommandTarget>(value),
        MessageSchema::Configure => through::<wire::ConfigurePayload>(value),
        MessageSchema::HealthCheck => through::<wire::HealthCheckPayload>(value),
        MessageSchema::CommandResult => through::<wire::CommandResult>(value),
        MessageSchema::EmptyResponse => through::<wire::EmptyResponse>(value),
        MessageSchema::Config => through::<wire::SatelliteConfig>(value),
        MessageSchema::Events => through::<wire::EventBatch>(value),
        MessageSchema::EventBatchResult => through::<wire::EventBatchResult>(value),
        MessageSchema::Heartbeat => through::<wire::Heartbeat>(value),
        MessageSchema::Error => through::<wire::ErrorBody>(value),
        MessageSchema::TokenRequest => through::<api::TokenRequest>(value),
        MessageSchema::ConfigUpdate => through::<api::ConfigUpdate>(value),
        MessageSchema::CommandRequest => through::<api::CommandRequest>(value),
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

/// All values that differ from `value` in one place: a value of another type, a missing member, or a value at or beyond a
/// limit.
fn mutations(value: &Value) -> Vec<Value> {
    let mut all: Vec<Value> =
        [json!(null), json!(7), json!(-3), json!(0.5), json!("x"), json!([]), json!({}), json!(true)]
            .into_iter()
            .filter(|other| std::mem::discriminant(other) != std::mem::discriminant(value) || value.is_number())
            .collect();
    match value {
        Value::Object(members) => {
            // An object that holds the name of a variant, and a list of the members in their order.
            all.extend([json!({"completed": null}), members.values().cloned().collect()]);
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
            all.push(json!([]));
            if let Some(item) = items.first() {
                all.extend([100, 101].map(|count| vec![item.clone(); count].into()));
            }
            for (at, item) in items.iter().enumerate().take(2) {
                all.extend(mutations(item).into_iter().map(|other| {
                    let mut items = items.clone();
                    items[at] = other;
                    Value::Array(items)
                }));
            }
        }
        Value::String(text) => {
            all.extend([0, 1, 9, 10, 32, 33, 64, 65, 128, 129, 200, 201].map(|length| json!("a".repeat(length))));
            all.extend(
                ["a.b", "a..b", ".a", "a.", "a_b", "A-b.c_9", "9", "with a blank", "\u{e9}t\u{e9}-\u{e9}t\u{e9}-x"]
                    .map(Into::into),
            );
            all.extend(TIMES.map(Into::into));
            all.push(json!({text: null}));
        }
        Value::Number(_) => {
            all.extend([0, 1, 100, 101, 65_535, 65_536, 2_592_000, 2_592_001].map(Value::from));
            let (int, uint) = (i64::from(i32::MAX), i64::from(u32::MAX));
            all.extend([int, int + 1, -int - 1, -int - 2, uint, uint + 1, i64::MAX, -1].map(Value::from));
            all.extend([json!(i64::MAX as u64 + 1), json!(u64::MAX), json!(1e300), json!(100.5), json!("1")]);
        }
        Value::Null | Value::Bool(_) => {}
    }
    all
}

/// Timestamps, also in forms that RFC 3339 does not have.
const TIMES: [&str; 18] = [
    "2026-11-21T06:33:00Z",
    "2026-11-21t06:33:00.123456789z",
    "2026-11-21T06:33:00+14:00",
    "2026-11-21T06:33:00-23:59",
    "2026-11-21T06:33:00+24:00",
    "2026-11-21T06:33:00+0100",
    "2026-11-21T06:33:00+01",
    "2026-11-21T06:33:00",
    "2026-11-21T06:33Z",
    "2026-11-21 06:33:00Z",
    "20261121T063300Z",
    "2026-11-21T06:33:00.Z",
    "2026-11-21T06:33:00,5Z",
    "2026-11-21T06:33:00Z[UTC]",
    "2026-11-21",
    "2026-02-30T06:33:00Z",
    "2026-11-21T24:00:00Z",
    "+002026-11-21T06:33:00Z",
];

/// Decodes a request as the backend does; `None` for other messages.
fn decode_request(form: MessageSchema, value: &Value) -> Option<Result<(), InvalidValue>> {
    Some(match form {
        MessageSchema::Registration => decode::<wire::Registration>(value).map(drop),
        MessageSchema::Target => decode::<wire::CommandTarget>(value).map(drop),
        MessageSchema::Configure => decode::<wire::ConfigurePayload>(value).map(drop),
        MessageSchema::HealthCheck => decode::<wire::HealthCheckPayload>(value).map(drop),
        MessageSchema::CommandResult => decode::<wire::CommandResult>(value).map(drop),
        MessageSchema::Events => decode::<wire::EventBatch>(value).map(drop),
        MessageSchema::Heartbeat => decode::<wire::Heartbeat>(value).map(drop),
        MessageSchema::TokenRequest => decode::<api::TokenRequest>(value).map(drop),
        MessageSchema::ConfigUpdate => decode::<api::ConfigUpdate>(value).map(drop),
        MessageSchema::CommandRequest => decode::<api::CommandRequest>(value).map(drop),
        _ => return None,
    })
}

/// Samples with the members that those of [`samples`] lack.
fn complete_samples() -> Vec<(MessageSchema, Value)> {
    let mut complete = heartbeat("2026-11-21T06:33:00Z".parse().unwrap());
    let process = json!({"instance": "i", "installation_id": "a", "user_id": "u", "status": "online", "pid": 7});
    for (place, value) in [
        ("counts", json!({"online": 1})),
        ("processes_by_team", json!({"t": [process]})),
        ("tools", json!({"i": ["echo"]})),
        ("config_hash", json!("h")),
    ] {
        complete[place] = value;
    }
    for name in ["disk_used_bytes", "disk_total_bytes", "satellite_rss_bytes"] {
        complete["system"][name] = json!(7);
    }
    let target = json!({"event": "mcp_recovery", "installation_id": "a", "team_id": "t", "user_id": "u"});
    vec![
        (MessageSchema::Heartbeat, complete),
        (MessageSchema::Configure, target.clone()),
        (MessageSchema::HealthCheck, target),
        (MessageSchema::CommandRequest, json!({"command_type": "kill", "expires_at": "2026-11-21T06:33:00Z"})),
        (MessageSchema::Events, json!({"events": one_of_each()[..2]})),
    ]
}

fn constraints(schema: &Value, pointer: &str, into: &mut BTreeSet<String>) {
    for (key, value) in schema.as_object().into_iter().flatten() {
        let place = format!("{pointer}/{key}");
        match key.as_str() {
            "properties" | "$defs" => {
                for (name, schema) in value.as_object().unwrap() {
                    constraints(schema, &format!("{place}/{name}"), into);
                }
            }
            "items" | "additionalProperties" => constraints(value, &place, into),
            // Others only describe the type of a number.
            "format" if value != "date-time" => {}
            "format" | "maxItems" | "maxLength" | "maximum" | "minItems" | "minLength" | "minimum" | "oneOf"
            | "pattern" | "required" | "type" => {
                into.insert(place);
            }
            _ => {}
        }
    }
}

#[test]
fn requests_are_accepted_and_rejected_as_the_schemas_demand() {
    let (mut violated, mut all) = (BTreeSet::new(), BTreeSet::new());
    for (form, sample) in samples().into_iter().chain(complete_samples()) {
        if decode_request(form, &sample).is_none() {
            continue;
        }
        let mut of_form = BTreeSet::new();
        let schema = fs::read_to_string(schema_dir().join(form.file())).unwrap();
        constraints(&serde_json::from_str(&schema).unwrap(), "", &mut of_form);
        all.extend(of_form.into_iter().map(|place| (form.file(), place)));
        for changed in mutations(&sample) {
            match (SCHEMAS.check(form, &changed), decode_request(form, &changed).unwrap()) {
                (Ok(()), Ok(())) => {}
                (Err(violation), Err(_)) => {
                    violated.insert((form.file(), violation.constraint));
                }
                (Ok(()), Err(invalid)) => panic!("{form:?}: only the type rejects {changed}: {invalid}"),
                (Err(violation), Ok(())) => panic!("{form:?}: only the schema rejects {changed}: {violation}"),
            }
        }
    }
    let missed: Vec<_> = all.difference(&violated).collect();
    assert!(missed.is_empty() && all.len() > 140, "no request violates {missed:?} of {} constraints", all.len());
}

#[test]
fn an_error_contains_the_place_and_no_value() {
    let secret = "hunter2, expected nothing";
    for (form, pointer, why) in [
        (MessageSchema::Registration, "/name", "expected 10 to 32 characters of a-z, 0-9, - and _"),
        (MessageSchema::CommandResult, "/status", "expected one of `completed`, `failed`, `expired`"),
        (MessageSchema::Events, "/events/1/timestamp", "expected an RFC 3339 timestamp such as 2026-11-21T06:33:00Z"),
        (MessageSchema::Heartbeat, "/system/cpu_percent", "expected f32"),
        (MessageSchema::ConfigUpdate, "/teams/0", "expected a map"),
    ] {
        let (_, mut sample) = samples().into_iter().find(|(sample, _)| *sample == form).unwrap();
        *sample.pointer_mut(pointer).unwrap() = json!(secret);
        let invalid = decode_request(form, &sample).unwrap().unwrap_err();
        assert_eq!((&*invalid.pointer, &*invalid.why), (pointer, why));
    }
    let InvalidValue { pointer, why } = decode_request(MessageSchema::Target, &json!({})).unwrap().unwrap_err();
    assert_eq!((&*pointer, &*why), ("", "missing field `installation_id`"));
    let listed = json!({"completed": null});
    let invalid = decode_request(MessageSchema::CommandResult, &json!({"status": listed, "duration_ms": 1}));
    assert_eq!(invalid.unwrap().unwrap_err().to_string(), "/status: expected a string");
}

#[test]
fn the_data_of_every_event_is_validated_against_its_type() {
    let mut rejected = 0;
    for event in one_of_each() {
        let kind = event["type"].as_str().unwrap();
        SCHEMAS.check_event(kind, &event["data"]).unwrap();
        SCHEMAS.check(MessageSchema::Event, &event).unwrap();
        for changed in mutations(&event["data"]) {
            // A list in place of the whole data is rejected with the envelope.
            let Value::Object(data) = &changed else { continue };
            match (SCHEMAS.check_event(kind, &changed), decode_event(kind, data)) {
                (Ok(()), Ok(_)) => {}
                (Err(violation), Err(invalid)) => {
                    rejected += 1;
                    assert!(invalid.pointer.starts_with("/data"), "{kind}: {violation}: {invalid}");
                }
                (Ok(()), Err(invalid)) => panic!("{kind}: only the type rejects {changed}: {invalid}"),
                (Err(violation), Ok(_)) => panic!("{kind}: only the schema rejects {changed}: {violation}"),
            }
        }
    }
    assert!(rejected > 1000, "only {rejected} rejected");
    assert_eq!(decode_event("mcp.server.danced", &Map::new()).unwrap_err().to_string(), "unknown type of event");
    // Not every event has a subject.
    let incomplete = decode_event("config.error", &Map::new()).unwrap_err();
    assert_eq!(incomplete.to_string(), "/data: missing field `error_type`");
}
