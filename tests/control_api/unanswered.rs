//! The calls in flight of an instance: who may read them, and what they contain.

use std::collections::BTreeSet;
use std::io::Read as _;

use serde_json::{Value, json};
use testkit::wait::wait_for;

use super::fixture::{ADMIN, ALICE, ALICES, BLUE, BOBS, CAROLS, Fixture, READER, VIEWER};

fn calls(fixture: &Fixture, token: &str, instance: &str) -> Value {
    fixture.with(token).get(&format!("/v1/instances/{instance}")).ok()["unanswered_calls"].clone()
}

/// Waits until the instance has this number of calls in flight, and returns them.
fn wait_total(fixture: &Fixture, instance: &str, total: usize) -> Value {
    let found = || Some(calls(fixture, ADMIN, instance)).filter(|calls| calls["total"] == total);
    wait_for("the calls in flight", found, || format!("{:#}", calls(fixture, ADMIN, instance)))
}

#[test]
fn calls_in_flight_are_listed_without_arguments_for_those_who_may_read_them() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let path = format!("/v1/instances/{ALICES}/call");
    let body = json!({"tool": "sleep", "arguments": {"ms": 600_000, "note": "private-argument"}}).to_string();
    let json_type = fixture.with(ADMIN).with_header("Content-Type", "application/json");
    let first = json_type.open("POST", &path, Some(&body));
    let older = wait_total(&fixture, ALICES, 1)["newest"][0].clone();
    let second = json_type.open("POST", &path, Some(&body));
    let both = wait_total(&fixture, ALICES, 2);
    assert_eq!(both["newest"][1]["request_id"], older["request_id"], "the newest is first: {both:#}");
    let newest = &both["newest"][0];
    assert_eq!((&newest["method"], &newest["tool"]), (&json!("tools/call"), &json!("sleep")), "{both:#}");
    assert_eq!((&newest["user"], &newest["client"]), (&json!("alice"), &Value::Null), "{both:#}");
    assert!(newest["request_id"].as_u64().unwrap() > older["request_id"].as_u64().unwrap(), "{both:#}");
    assert!(newest["since"].as_str().unwrap() >= older["since"].as_str().unwrap(), "{both:#}");
    assert!(!both.to_string().contains("private-argument"), "{both:#}");

    let page = |token: &str| fixture.with(token).get(&format!("/console/instances/{ALICES}")).body;
    for token in [ADMIN, READER, ALICE] {
        assert_eq!(calls(&fixture, token, ALICES)["total"], 2);
        let page = page(token);
        assert!(page.contains("Table of calls in flight") && !page.contains("private-argument"), "{page}");
    }
    // Others see the number only.
    assert_eq!(calls(&fixture, VIEWER, ALICES), Value::Null);
    assert_eq!(fixture.with(VIEWER).get(&format!("/v1/instances/{ALICES}")).ok()["calls_in_flight"], 2);
    assert!(!page(VIEWER).contains("Table of calls in flight"));
    assert_eq!(calls(&fixture, ALICE, BOBS), Value::Null);
    assert_eq!(calls(&fixture, BLUE, CAROLS), Value::Null);
    fixture.with(BLUE).get(&format!("/v1/instances/{ALICES}")).problem(404, "not_found");
    assert_eq!(calls(&fixture, ADMIN, CAROLS), json!({"total": 0, "newest": []}));

    // Whoever has read the calls of another user is recorded, the user itself is not.
    let events = fixture.home.events();
    let readers: BTreeSet<&str> = events
        .iter()
        .filter(|event| event["type"] == "control.action" && event["data"]["action"] == "read_calls")
        .map(|event| event["data"]["actor"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(readers.into_iter().collect::<Vec<_>>(), ["admin", "reader"]);

    drop((first, second));
    wait_total(&fixture, ALICES, 0);
    satellite.terminate().exits(0);
}

#[test]
fn a_call_of_a_client_shows_its_name_and_the_list_is_bounded() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let path = "/i/notes/mcp";
    let client = fixture.with(ALICE).with_header("Content-Type", "application/json");
    let client = client.with_header("Accept", "application/json, text/event-stream");
    let info = json!({"name": "my-editor", "version": "1"});
    let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info});
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params});
    let opened = client.send("POST", path, Some(&initialize.to_string()));
    let session = client.with_header("Mcp-Session-Id", opened.header("mcp-session-id").unwrap());
    let open = |id: usize| {
        let params = json!({"name": "sleep", "arguments": {"ms": 600_000}});
        let call = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params});
        session.open("POST", path, Some(&call.to_string()))
    };
    let mut open: Vec<_> = (1..=51).map(open).collect();
    let all = wait_total(&fixture, ALICES, 51);
    let newest = all["newest"].as_array().unwrap();
    assert_eq!(newest.len(), 50, "{all:#}");
    assert!(newest.iter().all(|call| call["client"] == "my-editor" && call["tool"] == "sleep"), "{all:#}");
    let page = fixture.with(ALICE).get(&format!("/console/instances/{ALICES}")).body;
    assert!(page.contains("Only the last 50 of 51 calls are shown."), "{page}");
    session.send("DELETE", path, None);
    wait_total(&fixture, ALICES, 0);
    for stream in &mut open {
        // The endpoint has ended the calls of the closed session.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    satellite.terminate().exits(0);
}
