//! The JSON form of every event, as a snapshot and as a round trip.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

use jiff::Timestamp;
use mcp_satellite_actors::model::catalogue::CatalogueAspect;
use mcp_satellite_actors::model::event::{
    ActionActor, ActionOutcome, Envelope, Event, EventSubject, LogLevel, LogLine, RequestLine, RestartReason, StopKind,
};
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};

fn at() -> Timestamp {
    "2026-11-21T06:33:00.123Z".parse().unwrap()
}

fn subject() -> Arc<EventSubject> {
    Arc::new(EventSubject {
        installation_id: "abc123".into(),
        team_id: "team_acme".into(),
        user_id: "user_alice".into(),
        process_id: "files-acme-alice-abc123".into(),
        server_slug: "files".into(),
    })
}

/// Returns the sample after an event. The match is exhaustive, so that each new variant needs a sample.
fn next_sample(event: Option<&Event>) -> Option<Event> {
    let of = subject();
    let text = str::to_owned;
    Some(match event {
        None => Event::StatusChanged {
            of,
            status: Status::AwaitingUserConfig,
            status_message: Some(text("waiting for the user to configure API_KEY")),
            remedy: Some(Remedy::Configure),
        },
        Some(Event::StatusChanged { .. }) => {
            Event::Started { of, pid: Some(4711), transport: text("stdio"), tool_count: 2, spawn_duration_ms: 230 }
        }
        Some(Event::Started { .. }) => Event::Stopped {
            of,
            kind: StopKind::Uninstall,
            exit_code: None,
            signal: Some(15),
            forced: false,
            active: Some(true),
            dormant: Some(false),
        },
        Some(Event::Stopped { .. }) => Event::Exited {
            of,
            exit_code: Some(0),
            signal: None,
            forced: false,
            uptime_seconds: 61,
            will_restart: false,
        },
        Some(Event::Exited { .. }) => Event::Crashed {
            of,
            reason: text("exited with code 1"),
            exit_code: Some(1),
            signal: None,
            uptime_seconds: 3,
            crash_count: 2,
            will_restart: true,
        },
        Some(Event::Crashed { .. }) => Event::Restarted {
            of,
            old_pid: Some(4711),
            new_pid: Some(4712),
            restart_reason: RestartReason::Crash,
            attempt_number: 2,
        },
        Some(Event::Restarted { .. }) => Event::PermanentlyFailed {
            of,
            total_crashes: 3,
            last_error: text("exited with code 1"),
            message: text("Process crashed 3 times in 5 minutes; last: exited with code 1. Manual restart required."),
            remedy: Some(Remedy::Restart),
            failed_at: at(),
        },
        Some(Event::PermanentlyFailed { .. }) => {
            Event::Dormant { of, pid: Some(4711), idle_duration_seconds: 180, last_activity_at: at() }
        }
        Some(Event::Dormant { .. }) => {
            Event::Respawned { of, pid: Some(4712), dormant_duration_seconds: 600, respawn_duration_ms: 231 }
        }
        Some(Event::Respawned { .. }) => {
            Event::Adopted { of, pid: Some(4711), tool_count: 2, uptime_seconds: 3600, adoption_duration_ms: 12 }
        }
        Some(Event::Adopted { .. }) => Event::Disconnected { of, was_intentional: true },
        Some(Event::Disconnected { .. }) => Event::Reconnecting { of, attempt: 3, next_retry_ms: 4000 },
        Some(Event::Reconnecting { .. }) => {
            let changed = vec![
                CatalogueAspect::Capabilities,
                CatalogueAspect::Tools,
                CatalogueAspect::Resources,
                CatalogueAspect::Prompts,
            ];
            let capabilities = json!({"tools": {"listChanged": true}});
            Event::Reconnected { of, capabilities, attempts_taken: 3, changed }
        }
        Some(Event::Reconnected { .. }) => {
            Event::HealthDegraded { of, consecutive_failures: 3, last_error: text("no answer within 60 s") }
        }
        Some(Event::HealthDegraded { .. }) => {
            Event::HealthRestored { of, consecutive_failures: 3, last_error: Some(text("no answer within 60 s")) }
        }
        Some(Event::HealthRestored { .. }) => {
            let line = |level, message: &str| LogLine {
                level,
                message: text(message),
                metadata: json!({"source": "stderr"}),
                timestamp: at(),
            };
            let levels = [LogLevel::Debug, LogLevel::Info, LogLevel::Warn, LogLevel::Error];
            Event::ServerLogs { of, logs: levels.map(|level| line(level, "a line")).to_vec() }
        }
        Some(Event::ServerLogs { .. }) => Event::RequestLogs {
            of,
            requests: vec![RequestLine {
                tool_name: text("read"),
                tool_params: json!({"path": "/srv"}).into(),
                tool_response: json!({"content": []}).into(),
                response_time_ms: 12,
                success: true,
                error_message: None,
                fate: Some(text("tool_error")),
                client: Some(text("claude-code")),
                timestamp: at(),
            }],
        },
        Some(Event::RequestLogs { .. }) => {
            Event::ToolExecuted { of, tool_name: text("read"), duration_ms: 12, success: true, error_message: None }
        }
        Some(Event::ToolExecuted { .. }) => {
            Event::ToolsDiscovered { of, tool_count: 2, total_tokens: 250, tools: vec![text("read"), text("write")] }
        }
        Some(Event::ToolsDiscovered { .. }) => Event::ToolsUpdated {
            of,
            added_tools: vec![text("write")],
            removed_tools: vec![text("append")],
            total_tools: 2,
        },
        Some(Event::ToolsUpdated { .. }) => Event::ClientConnected {
            team_id: "team_acme".into(),
            user_id: "user_alice".into(),
            session_id: text("s-1"),
            client_type: text("claude"),
            user_agent: Some(text("claude/1.0")),
            transport: text("http"),
        },
        Some(Event::ClientConnected { .. }) => Event::ClientDisconnected {
            team_id: "team_acme".into(),
            user_id: "user_alice".into(),
            session_id: text("s-1"),
            duration: 90,
            tool_execution_count: 4,
            reason: text("closed"),
        },
        Some(Event::ClientDisconnected { .. }) => {
            Event::TeamThrottled { team_id: "team_acme".into(), exits_in_window: 61, window_seconds: 60 }
        }
        Some(Event::TeamThrottled { .. }) => {
            Event::TeamUnthrottled { team_id: "team_acme".into(), exits_in_window: 60, window_seconds: 60 }
        }
        Some(Event::TeamUnthrottled { .. }) => Event::ConfigRefreshed {
            config_hash: text("c0ffee"),
            server_count: 2,
            teams_count: 1,
            change_detected: true,
            fetch_duration_ms: 8,
        },
        Some(Event::ConfigRefreshed { .. }) => Event::ConfigError {
            error_type: text("http"),
            error_message: text("the backend does not answer"),
            status_code: Some(503),
            retry_in: Some(60),
        },
        Some(Event::ConfigError { .. }) => Event::ControlAction {
            action: text("configure"),
            outcome: ActionOutcome::Refused,
            actor: ActionActor {
                kind: text("token"),
                name: Some(text("grafana")),
                role: Some(text("viewer")),
                via: text("http"),
                address: Some(text("127.0.0.1")),
            },
            target: Some(of),
            reason: Some(text("the role does not permit this")),
            keys: vec![text("API_KEY")],
            repeated: 2,
        },
        Some(Event::ControlAction { .. }) => {
            let reason = text("killed by SIGKILL");
            Event::SatelliteRecovered { generation: 2, reason, down_ms: 1_250, adopted: 3, ended: 1 }
        }
        Some(Event::SatelliteRecovered { .. }) => Event::EventsDropped { from_seq: 3, to_seq: 17 },
        Some(Event::EventsDropped { .. }) => return None,
    })
}

fn envelopes() -> Vec<Envelope> {
    let events = std::iter::successors(next_sample(None), |event| next_sample(Some(event)));
    (1..).zip(events).map(|(seq, event)| Envelope { seq, timestamp: at(), event }).collect()
}

/// Fields whose values come from servers and clients, so that their names follow no rule.
const OPAQUE: [&str; 4] = ["capabilities", "metadata", "tool_params", "tool_response"];

fn names(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                into.insert(name.clone());
                if !OPAQUE.contains(&name.as_str()) {
                    names(value, into);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| names(value, into)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn every_event_serializes_as_in_the_snapshot() {
    let mut text = String::new();
    for envelope in envelopes() {
        let _ = writeln!(text, "{}", serde_json::to_string_pretty(&envelope).unwrap());
    }
    insta::assert_snapshot!(text);
}

#[test]
fn every_event_survives_a_json_round_trip() {
    for envelope in envelopes() {
        let line = serde_json::to_string(&envelope).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Envelope>(&line).unwrap(), envelope);
        let value = serde_json::to_value(&envelope).unwrap();
        assert_eq!(serde_json::from_value::<Envelope>(value).unwrap(), envelope);
    }
}

#[test]
fn every_field_name_of_an_event_is_snake_case() {
    let mut found = BTreeSet::new();
    for envelope in envelopes() {
        names(&serde_json::to_value(envelope).unwrap(), &mut found);
    }
    for name in found {
        assert!(name.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_'), "{name}");
    }
}

#[test]
fn an_envelope_has_four_fields_and_its_type_is_the_kind() {
    let mut kinds = BTreeSet::new();
    for envelope in envelopes() {
        let value = serde_json::to_value(&envelope).unwrap();
        let fields: BTreeSet<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields, BTreeSet::from(["seq", "type", "timestamp", "data"]));
        assert_eq!(value["type"], envelope.event.kind());
        assert_eq!(value["timestamp"], "2026-11-21T06:33:00.123Z");
        assert!(kinds.insert(envelope.event.kind()), "{} occurs twice", envelope.event.kind());
    }
    assert_eq!(kinds, Event::KINDS.iter().copied().collect::<BTreeSet<_>>());
}

#[test]
fn every_instance_event_names_its_instance_team_and_user() {
    for envelope in envelopes() {
        let value = serde_json::to_value(&envelope).unwrap();
        let of_an_instance = ["mcp.server.", "mcp.tool", "mcp.request."].iter();
        let of_an_instance = of_an_instance.copied().any(|start| envelope.event.kind().starts_with(start));
        // An action can be about an instance, which it names in a member of its own.
        let has_subject = of_an_instance || envelope.event.kind() == "control.action";
        assert_eq!(has_subject, envelope.event.subject().is_some(), "{}", envelope.event.kind());
        if of_an_instance {
            for (name, expected) in [
                ("installation_id", "abc123"),
                ("team_id", "team_acme"),
                ("user_id", "user_alice"),
                ("process_id", "files-acme-alice-abc123"),
                ("server_slug", "files"),
            ] {
                assert_eq!(value["data"][name], expected, "{}", envelope.event.kind());
            }
        }
    }
}

#[test]
fn a_timestamp_has_exactly_three_decimal_places() {
    for (time, written) in [
        ("2026-11-21T06:33:00Z", "2026-11-21T06:33:00.000Z"),
        ("2026-11-21T07:33:00.1239999+01:00", "2026-11-21T06:33:00.123Z"),
    ] {
        let event = Event::EventsDropped { from_seq: 1, to_seq: 1 };
        let envelope = Envelope { seq: 2, timestamp: time.parse().unwrap(), event };
        assert_eq!(serde_json::to_value(envelope).unwrap()["timestamp"], written);
    }
}

#[test]
fn the_log_level_is_inferred_from_the_words_of_a_line() {
    for (line, level) in [
        ("ERROR: no such file", LogLevel::Error),
        ("Warning: 1 error", LogLevel::Error),
        ("DeprecationWarning", LogLevel::Warn),
        ("listening on stdio", LogLevel::Info),
        ("", LogLevel::Info),
    ] {
        assert_eq!(LogLevel::infer(line), level, "{line}");
    }
}
