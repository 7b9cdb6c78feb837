//! The bridge between a scripted endpoint and a client of the test.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use std::time::Duration;

use http::Method;
use mcp_satellite_protocol::error_code::{
    HEADER_MISMATCH, INTERNAL_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR, SERVER_ERROR,
};
use mcp_satellite_protocol::header;
use serde_json::{Value, json};
use tokio::time::Instant;

use support::{BridgeClient, KnownAddress, ScriptedEndpoint};

/// Header of the marked argument of the tool `query`.
const MARKED: &str = "mcp-param-region";

fn call(id: &Value, tool: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": {}}})
}

fn log(text: &str) -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": text}})
}

async fn connected() -> (ScriptedEndpoint, KnownAddress, BridgeClient) {
    let (endpoint, known) = (ScriptedEndpoint::start().await, KnownAddress::default());
    known.set(&endpoint);
    let client = BridgeClient::start(&known);
    (endpoint, known, client)
}

#[tokio::test]
async fn the_stream_of_a_session_is_resumed_after_its_last_event() {
    let (mut endpoint, _known, mut client) = connected().await;
    let first = endpoint.open_session(&mut client, &json!({})).await;
    assert_eq!((first.header(header::SESSION_ID), first.header(header::LAST_EVENT_ID)), (Some("first"), None));
    assert_eq!(first.header("authorization"), Some("Bearer sat_token"));
    let stream = first.answer_stream();
    stream.send("e1", &log("one"));
    stream.send("e2", &log("two"));
    for text in ["one", "two"] {
        assert_eq!(client.next().await["params"]["data"], text);
    }
    // Half of an event is not passed on: the endpoint sends it again.
    stream.send_text("id: e3\ndata: {\"jsonrpc\":");
    stream.break_off();

    let second = endpoint.next_get().await;
    assert_eq!((second.header(header::SESSION_ID), second.header(header::LAST_EVENT_ID)), (Some("first"), Some("e2")));
    // A satellite that is busy is asked again for the same event.
    second.answer_status(503, &[("retry-after", "1")], &Value::Null);
    let third = endpoint.next_get().await;
    assert_eq!(third.header(header::LAST_EVENT_ID), Some("e2"));
    let stream = third.answer_stream();
    stream.send("e3", &log("three"));
    assert_eq!(client.next().await["params"]["data"], "three");
    drop(stream);

    // An endpoint that does not have the events any more opens a new stream.
    let fourth = endpoint.next_get().await;
    assert_eq!(fourth.header(header::LAST_EVENT_ID), Some("e3"));
    fourth.answer_status(400, &[], &Value::Null);
    let fifth = endpoint.next_get().await;
    assert_eq!(fifth.header(header::LAST_EVENT_ID), None);
    fifth.answer_stream().send("e9", &log("nine"));
    assert_eq!(client.next().await["params"]["data"], "nine");
}

#[tokio::test]
async fn the_stream_of_a_call_is_resumed_up_to_the_answer() {
    let (mut endpoint, _known, mut client) = connected().await;
    let _stream = endpoint.open_session(&mut client, &json!({})).await.answer_stream();
    client.send(&call(&json!(1), "slow")).await;
    let stream = endpoint.next_call("tools/call").await.answer_stream();
    stream.send("c1", &log("begun"));
    assert_eq!(client.next().await["params"]["data"], "begun");
    stream.break_off();
    let resumed = endpoint.next_get().await;
    assert_eq!(resumed.header(header::LAST_EVENT_ID), Some("c1"));
    let stream = resumed.answer_stream();
    stream.send("c2", &json!({"jsonrpc": "2.0", "id": 1, "result": {"content": []}}));
    assert_eq!(client.next().await, json!({"jsonrpc": "2.0", "id": 1, "result": {"content": []}}));
}

/// A call of 2026-07-28 of the tool `query`, whose argument `region` is marked.
fn query(id: u32) -> Value {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "c", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let params = json!({"name": "query", "arguments": {"region": "eu"}, "_meta": meta});
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
}

fn mismatch(id: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": HEADER_MISMATCH, "message": "Mcp-Param-Region is missing"}})
}

#[tokio::test]
async fn a_call_whose_headers_were_rejected_is_repeated_with_the_marks_of_the_tool() {
    let (mut endpoint, _known, mut client) = connected().await;
    client.send(&query(1)).await;
    let rejected = endpoint.next_call("tools/call").await;
    assert_eq!((rejected.header(header::NAME), rejected.header(MARKED)), (Some("query"), None));
    let answer = mismatch(&rejected.message["id"]);
    rejected.answer_status(400, &[], &answer);

    // The bridge lists all pages of the tools as the client would.
    let list = endpoint.next_call("tools/list").await;
    assert_eq!(list.message["params"]["_meta"], query(1)["params"]["_meta"]);
    assert_eq!(list.header(header::METHOD), Some("tools/list"));
    list.answer_result(&json!({"tools": [], "nextCursor": "page 2"}));
    let list = endpoint.next_call("tools/list").await;
    assert_eq!(list.message["params"]["cursor"], "page 2");
    let marked = json!({"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}});
    list.answer_result(&json!({"tools": [{"name": "query", "inputSchema": marked}]}));

    let repeated = endpoint.next_call("tools/call").await;
    assert_eq!(repeated.header(MARKED), Some("eu"));
    repeated.answer_result(&json!({"content": []}));
    assert_eq!(client.next().await, json!({"jsonrpc": "2.0", "id": 1, "result": {"content": []}}));
    // The next call has the header at once.
    client.send(&query(2)).await;
    let next = endpoint.next_call("tools/call").await;
    assert_eq!(next.header(MARKED), Some("eu"));

    // A rejection with headers that the list of the tools confirms is the client's answer.
    let answer = mismatch(&next.message["id"]);
    next.answer_status(400, &[], &answer);
    endpoint.next_call("tools/list").await.answer_result(&json!({"tools": [{"name": "query", "inputSchema": marked}]}));
    assert_eq!(client.next().await, answer);
    assert!(endpoint.try_next().is_none());
}

#[tokio::test]
async fn a_new_session_gets_the_log_level_and_the_subscriptions_of_the_lost_one() {
    let (mut endpoint, known, mut client) = connected().await;
    let announced =
        json!({"tools": {"listChanged": true}, "prompts": {}, "logging": {}, "resources": {"subscribe": true}});
    let stream = endpoint.open_session(&mut client, &announced).await.answer_stream();
    let requests = [
        ("logging/setLevel", json!({"level": "debug"})),
        ("resources/subscribe", json!({"uri": "note://a"})),
        ("resources/subscribe", json!({"uri": "note://b"})),
        ("resources/subscribe", json!({"uri": "note://c"})),
        ("resources/unsubscribe", json!({"uri": "note://b"})),
        ("logging/setLevel", json!({"level": "error"})),
    ];
    for (id, (method, params)) in requests.into_iter().enumerate() {
        client.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})).await;
        let request = endpoint.next_call(method).await;
        assert_eq!(request.header(header::SESSION_ID), Some("first"));
        request.answer_result(&json!({}));
        assert_eq!(client.next().await["id"], id);
    }

    let mut next = ScriptedEndpoint::start().await;
    known.set(&next);
    drop((stream, endpoint));
    let opened = next.next_call("initialize").await;
    assert_eq!(opened.message["params"], support::initialize()["params"]);
    assert_eq!((opened.header(header::SESSION_ID), &opened.message["id"] == "init"), (None, false));
    opened.answer_initialize("second", &announced);
    for (method, params) in [
        ("notifications/initialized", Value::Null),
        ("logging/setLevel", json!({"level": "error"})),
        ("resources/subscribe", json!({"uri": "note://a"})),
        ("resources/subscribe", json!({"uri": "note://c"})),
    ] {
        let request = next.next_call(method).await;
        assert_eq!((request.header(header::SESSION_ID), &request.message["params"]), (Some("second"), &params));
        if method == "notifications/initialized" {
            request.accept();
        } else {
            // A server that does not support one of them any more does not prevent the others.
            let error = json!({"jsonrpc": "2.0", "id": request.message["id"], "error": {"code": METHOD_NOT_FOUND, "message": "no"}});
            request.answer_status(200, &[], &error);
        }
    }
    let _stream = next.next_get().await.answer_stream();
    // The client sees none of the answers, and learns which list may have changed.
    assert_eq!(client.next().await, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
    client.send(&call(&json!(9), "echo")).await;
    let request = next.next_call("tools/call").await;
    assert_eq!(request.header(header::SESSION_ID), Some("second"));
    request.answer_result(&json!({}));
    assert_eq!(client.next().await["id"], 9);
    assert!(client.reports().contains(&"connected again".to_owned()), "{:?}", client.reports());
}

#[tokio::test]
async fn a_late_answer_to_a_request_of_a_lost_session_does_not_answer_the_next_session() {
    let (mut endpoint, known, mut client) = connected().await;
    let stream = endpoint.open_session(&mut client, &json!({})).await.answer_stream();
    let request = |method: &str| json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": {}});
    stream.send("e1", &request("sampling/createMessage"));
    assert_eq!(client.next().await, request("sampling/createMessage"));

    let mut next = ScriptedEndpoint::start().await;
    known.set(&next);
    drop((stream, endpoint));
    next.next_call("initialize").await.answer_initialize("second", &json!({}));
    next.next_call("notifications/initialized").await.accept();
    let stream = next.next_get().await.answer_stream();
    let cancelled = client.next().await;
    assert_eq!(
        (&cancelled["method"], &cancelled["params"]["requestId"]),
        (&json!("notifications/cancelled"), &json!(1)),
        "{cancelled:#}"
    );
    stream.send("e1", &request("roots/list"));
    let asked = client.next().await;
    assert_eq!(asked["method"], "roots/list");
    assert_ne!(asked["id"], 1);
    client.send(&json!({"jsonrpc": "2.0", "id": 1, "result": {"role": "assistant"}})).await;
    client.send(&json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"roots": []}})).await;
    let answer = next.next().await;
    assert_eq!(answer.message, json!({"jsonrpc": "2.0", "id": 1, "result": {"roots": []}}));
    answer.accept();
    // A cancellation names the request as the client knows it.
    stream.send("e2", &request("elicitation/create"));
    let asked = client.next().await;
    stream.send("e3", &json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}));
    assert_eq!(client.next().await["params"]["requestId"], asked["id"]);
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_satellite_fails_after_thirty_seconds_and_was_not_sent() {
    let mut client = BridgeClient::start(&KnownAddress::default());
    let started = Instant::now();
    client.send(&call(&json!("a"), "echo")).await;
    client.send(&query(2)).await;
    for (id, code) in [(json!("a"), SERVER_ERROR), (json!(2), INTERNAL_ERROR)] {
        let answer = client.next().await;
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&id, &json!(code)), "{answer:#}");
        assert_eq!(answer["error"]["data"]["fate"], "not_sent");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("no satellite within 30 s: no satellite is running"), "{message}");
    }
    let waited = started.elapsed();
    assert!((Duration::from_secs(30)..Duration::from_secs(31)).contains(&waited), "{waited:?}");
    // A reason is reported once, not with each attempt.
    assert_eq!(client.reports(), ["no satellite is running"]);
    assert_eq!(client.close().await, Vec::<Value>::new());
}

#[tokio::test]
async fn a_cancelled_call_that_the_satellite_was_too_busy_for_is_not_sent_again() {
    let (mut endpoint, _known, mut client) = connected().await;
    let _stream = endpoint.open_session(&mut client, &json!({})).await.answer_stream();
    client.send(&call(&json!(1), "write")).await;
    let busy = endpoint.next_call("tools/call").await;
    client.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})).await;
    endpoint.next_call("notifications/cancelled").await.accept();
    busy.answer_status(503, &[("retry-after", "1")], &Value::Null);

    // The end of the input waits for open requests, so a repetition would arrive before the end of the session.
    let closing = tokio::spawn(client.close());
    let next = endpoint.next().await;
    assert_eq!(next.method, Method::DELETE, "{:#}", next.message);
    next.answer_status(200, &[], &Value::Null);
    assert_eq!(closing.await.unwrap(), Vec::<Value>::new());
}

#[tokio::test]
async fn the_end_of_the_input_waits_for_short_calls_and_ends_the_session() {
    let (mut endpoint, _known, mut client) = connected().await;
    let _stream = endpoint.open_session(&mut client, &json!({})).await.answer_stream();
    client.send(&call(&json!("short"), "a")).await;
    let short = endpoint.next_call("tools/call").await;
    client.send(&call(&json!("long"), "b")).await;
    let long = endpoint.next_call("tools/call").await;
    let closing = tokio::spawn(client.close());
    short.answer_result(&json!({}));
    let ended = endpoint.next().await;
    assert_eq!((ended.method.clone(), ended.header(header::SESSION_ID)), (Method::DELETE, Some("first")));
    ended.answer_status(200, &[], &Value::Null);
    let rest = closing.await.unwrap();
    assert_eq!(rest, [json!({"jsonrpc": "2.0", "id": "short", "result": {}})]);
    drop(long);
}

#[tokio::test]
async fn lines_with_crlf_are_messages_and_invalid_lines_are_answered() {
    let (mut endpoint, _known, mut client) = connected().await;
    let _stream = endpoint.open_session(&mut client, &json!({})).await.answer_stream();
    client.send_text(&format!("{}\r\n\r\n  \n", call(&json!(1), "a"))).await;
    endpoint.next_call("tools/call").await.answer_result(&json!({}));
    assert_eq!(client.next().await["id"], 1);
    for (line, code) in [
        ("{\"jsonrpc\":\"2.0\",\"id\":2,", PARSE_ERROR),
        ("not JSON", PARSE_ERROR),
        ("\u{1}", PARSE_ERROR),
        ("[1, 2", PARSE_ERROR),
        ("[]", INVALID_REQUEST),
        ("{}", INVALID_REQUEST),
        ("7", INVALID_REQUEST),
        ("null", INVALID_REQUEST),
        ("{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"x\"}", INVALID_REQUEST),
    ] {
        client.send_text(&format!("{line}\r\n")).await;
        let answer = client.next().await;
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&Value::Null, &json!(code)), "{line}: {answer}");
    }
    client.send_bytes(b"{\"jsonrpc\":\"2.0\",\"id\":3,\"method\":\"\xff\"}\n").await;
    assert_eq!(client.next().await["error"]["code"], PARSE_ERROR);
    // A batch with one invalid member.
    client.send_text(&format!("[{}, 5]\n", call(&json!(4), "a"))).await;
    endpoint.next_call("tools/call").await.answer_result(&json!({}));
    let mut answers = [client.next().await, client.next().await];
    answers.sort_by_key(|answer| answer["id"].is_null());
    assert_eq!((&answers[0]["id"], &answers[1]["error"]["code"]), (&json!(4), &json!(INVALID_REQUEST)), "{answers:?}");
}
