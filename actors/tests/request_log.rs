//! Request logs: calls are gathered, masked and truncated.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject, RequestLine};
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::rules::request_log::{LoggedCall, LoggedPayload, RequestLog, logged_name};
use proptest::prelude::*;
use serde_json::{Value, json};

const SECRET: &str = "hush \"hush\"/ü";

fn subject(name: &str) -> Arc<EventSubject> {
    Arc::new(EventSubject {
        installation_id: "i".into(),
        team_id: "t".into(),
        user_id: "u".into(),
        process_id: name.into(),
        server_slug: "s".into(),
    })
}

fn request(name: &str, tool: &str) -> LoggedCall {
    LoggedCall {
        subject: subject(name),
        mask: SecretMask::new([SECRET, "87654321"]),
        tool: tool.to_owned(),
        params: None,
        response: None,
        duration: Duration::from_millis(7),
        error: None,
        fate: None,
        client: None,
        at: Timestamp::UNIX_EPOCH,
    }
}

fn log() -> RequestLog {
    RequestLog::new(&BatchPolicy::default())
}

fn lines(event: Event) -> (String, Vec<RequestLine>) {
    let Event::RequestLogs { of, requests } = event else { panic!("{event:?}") };
    (of.process_id.to_string(), requests)
}

fn tools(event: Event) -> (String, Vec<String>) {
    let (name, lines) = lines(event);
    (name, lines.into_iter().map(|line| line.tool_name).collect())
}

/// Returns the logged form of the payload `json`, truncated to `max` bytes.
fn logged_payload(json: &str, max: usize) -> Value {
    let mut request = request("a", "x");
    request.params = Some(LoggedPayload::from_json(json, max, &request.mask));
    let mut log = log();
    assert_eq!(log.add(Instant::now(), request), None);
    let (_, mut lines) = lines(log.take_all().pop().unwrap());
    lines.pop().unwrap().tool_params.to_value()
}

#[test]
fn a_tool_name_is_masked_and_cut() {
    let mask = SecretMask::new([SECRET]);
    assert_eq!(logged_name("read_file", &mask), "read_file");
    for before in 230..280 {
        let name = logged_name(&format!("{}{SECRET}{}", "x".repeat(before), "y".repeat(1000)), &mask);
        assert!(name.len() < 270 && !name.contains("hush"), "{name}");
    }
}

#[test]
fn a_deeply_nested_payload_is_logged_as_a_string_so_that_its_event_can_be_read() {
    let nested = |levels: usize| format!("{}\"[\"{}", "[".repeat(levels), "]".repeat(levels));
    for (levels, is_json) in [(1, true), (100, true), (101, false), (126, false), (200, false)] {
        let (mut log, json) = (log(), nested(levels));
        let mut request = request("a", "x");
        request.params = Some(LoggedPayload::from_json(&json, 4096, &request.mask));
        log.add(Instant::now(), request);
        let envelope = Envelope { seq: 1, timestamp: Timestamp::UNIX_EPOCH, event: log.take_all().pop().unwrap() };
        let text = serde_json::to_string(&envelope).unwrap();
        let read: Envelope = serde_json::from_str(&text).unwrap();
        let (_, mut lines) = lines(read.event);
        let logged = lines.pop().unwrap().tool_params.to_value();
        assert_eq!(logged.is_array(), is_json, "{levels} levels");
        assert_eq!(logged.as_str(), (!is_json).then_some(&*json));
    }
}

#[test]
fn calls_of_an_instance_are_logged_together_three_seconds_after_the_first() {
    let (mut log, start) = (log(), Instant::now());
    let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
    assert_eq!(log.add(at(0.0), request("a", "one")), None);
    assert_eq!(log.add(at(1.0), request("b", "two")), None);
    assert_eq!(log.add(at(2.9), request("a", "three")), None);
    assert_eq!(log.due_at(), Some(at(3.0)));
    assert_eq!(log.take_due(at(2.9)), []);
    let logged: Vec<_> = log.take_due(at(3.0)).into_iter().map(tools).collect();
    assert_eq!(logged, [("a".to_owned(), vec!["one".to_owned(), "three".to_owned()])]);
    assert_eq!(log.due_at(), Some(at(4.0)));
    assert_eq!(log.take_all().len(), 1);
    assert_eq!((log.due_at(), log.take_all().len()), (None, 0));
}

#[test]
fn the_twentieth_call_of_an_instance_is_logged_at_once() {
    let (mut log, now) = (log(), Instant::now());
    let logged: Vec<_> = (0..45).filter_map(|nth| log.add(now, request("a", &nth.to_string()))).map(tools).collect();
    let expected = |from: u32| ("a".to_owned(), (from..from + 20).map(|nth| nth.to_string()).collect::<Vec<_>>());
    assert_eq!(logged, [expected(0), expected(20)]);
    assert_eq!(tools(log.take_all().pop().unwrap()).1.len(), 5);
    assert_eq!(log.due_at(), None);
}

#[test]
fn a_payload_is_logged_as_a_json_value_without_secrets() {
    let secret = json!({"key": SECRET, SECRET: [87_654_320, 1]});
    assert_eq!(logged_payload(&secret.to_string(), 4096), json!({"key": "[secret]", "[secret]": [87_654_320, 1]}));
    // Escaped forms of the same string.
    assert_eq!(logged_payload(r#"["\u0068\u0075sh \u0022hush\"\/\u00fc"]"#, 4096), json!(["[secret]"]));
    // A number is masked in the text form, too.
    assert_eq!(logged_payload(r#"{"pin": 87654321}"#, 4096), json!(r#"{"pin":[secret]}"#));
    // Not valid JSON for `serde_json`.
    assert_eq!(logged_payload(r#"["\ud800", "\u0068ush \"hush\"\/ü"]"#, 4096), json!(r#"["�", "[secret]"]"#));
}

#[test]
fn a_long_payload_is_truncated_without_splitting_characters_or_revealing_secrets() {
    assert_eq!(logged_payload(r#""üüüü""#, 4), json!("\"ü…"));
    assert_eq!(logged_payload(r#"{"a":"0123456789"}"#, 10), json!(r#"{"a":"0123…"#));
    let text = json!({"text": format!("{}{SECRET}", "x".repeat(40)), "more": "y".repeat(99)}).to_string();
    for max in 0..70 {
        let Value::String(cut) = logged_payload(&text, max) else { panic!("the payload was not cut") };
        assert!(cut.len() <= max + '…'.len_utf8() && !cut.contains("hush"), "{cut}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// For any surrounding text, escapes and truncation.
    #[test]
    fn no_escaped_form_of_a_secret_is_logged(
        before in ".{0,30}", after in ".{0,60}", escaped in prop::collection::vec(any::<bool>(), 14), max in 0_usize..120,
    ) {
        let quoted = |text: &str| {
            let quoted = Value::from(text).to_string();
            quoted[1..quoted.len() - 1].to_owned()
        };
        let letter = |(letter, escaped): (char, bool)| {
            let mut units = [0; 2];
            let hex = |unit: &u16| format!("\\u{unit:04X}");
            if escaped { letter.encode_utf16(&mut units).iter().map(hex).collect() } else { quoted(&letter.to_string()) }
        };
        let secret: String = SECRET.chars().zip(escaped).map(letter).collect();
        let json = format!("[\"{}{secret}{}\"]", quoted(&before), quoted(&after));
        let shown = logged_payload(&json, max).to_string();
        prop_assert!(!shown.contains("hush"), "{shown}");
    }
}
