//! Messages between a server and the clients of its host, byte for byte, in paused time.

#![allow(clippy::expect_used, reason = "a test that cannot go on has failed")]

mod eras;
mod faults;
mod rounds;
mod stateless;
mod support;

use std::time::Duration;

use mcp_satellite_actors::audience::{CallOrigin, MessageCause};
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::spec::ProcessLifetime;
use mcp_satellite_actors::rpc::RpcMessage;
use serde_json::json;

use self::support::{AudienceEvent, ScriptedServer};

const CALL: &str = r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work","_meta":{"progressToken":"p","x":1e400},"\ud800":[ ]},"unknown":{"n":123456789012345678901234567890}}"#;

/// A call that `serde_json` can parse.
const PLAIN: &str = r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work"}}"#;

fn minutes(count: u64) -> Duration {
    Duration::from_secs(60 * count)
}

fn origin(client: u64, call: u64) -> CallOrigin {
    CallOrigin { client, call }
}

/// Returns the line with the id and the token of the client instead of those that the session chose.
fn with_client_ids(line: &str, server_id: u64) -> String {
    line.replace(&format!("\"id\":{server_id}"), "\"id\":\"its-own\"")
        .replace(&format!("\"progressToken\":{server_id}"), "\"progressToken\":\"p\"")
}

#[tokio::test(start_paused = true)]
async fn requests_and_responses_pass_unchanged_except_for_id_and_progress_token() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let relayed = server.relay(1, 7, CALL);
    let line = server.receive_line().await;
    let server_id = RpcMessage::parse(line.clone().into()).unwrap().id().unwrap().parse().unwrap();
    assert_eq!(with_client_ids(&line, server_id), CALL);

    // Progress is matched by its token, which is translated to that of the client. Malformed progress is dropped.
    server.send(&format!(r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{server_id},"progress":0.50,"x":[1,]}}}}"#)).await;
    server.send(&format!(r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{server_id},"progress":0.50,"x":1e400}}}}"#)).await;
    let AudienceEvent::Progress(progress_origin, text) = server.audience_event().await else {
        panic!("the audience got no progress")
    };
    assert_eq!(progress_origin, origin(1, 7));
    let expected = r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"p","progress":0.50,"x":1e400}}"#;
    assert_eq!(text, expected);

    // Progress with an unknown token is dropped.
    server
        .send(r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"p","progress":1}}"#)
        .await;
    let answer = format!(
        r#"{{"x":{{"y":1E+2}},"result":{{"content":[],"big":98765432109876543210}},"jsonrpc":"2.0","id":{server_id}}}"#
    );
    server.send(&answer).await;
    assert_eq!(relayed.response().await, Ok(Some(answer)));
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_server_reaches_the_client_without_secrets() {
    let mut server = ScriptedServer::online(|_| {}).await;
    for (error, masked) in [
        (r#"{"code":-1,"message":"no","data":{"n":1e400}}"#, r#"{"code":-1,"message":"no","data":{"n":1e400}}"#),
        (r#"{"code":-1,"message":"the key hush-hush"}"#, r#"{"code":-1,"message":"the key [secret]"}"#),
        (r#"{"code":-1,"message":"the key hush\u002dhush"}"#, r#"{"code":-1,"message":"the key [secret]"}"#),
        (
            r#"{"code":-1,"message":"hush-hush","data":{"n":1e400}}"#,
            r#"{"code":-32603,"message":"{\"code\":-1,\"message\":\"[secret]\",\"data\":{\"n\":1e400}}"}"#,
        ),
    ] {
        let relayed = server.relay(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/unknown"}"#);
        let request = server.receive().await;
        assert_eq!(request["method"], "x/unknown");
        let id = request["id"].to_string();
        server.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#)).await;
        let expected = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{masked}}}"#);
        assert_eq!(relayed.response().await, Ok(Some(expected)));
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_notification_of_the_server_reaches_the_audience_with_its_possible_cause() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let notification = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1e400}}"#;
    let mut calls = Vec::new();
    for (call, cause) in [
        (None, MessageCause::NoCall),
        (Some((1, 1)), MessageCause::Call(origin(1, 1))),
        (Some((1, 2)), MessageCause::Client(1)),
        (Some((2, 3)), MessageCause::SeveralClients(2)),
    ] {
        if let Some((client, call)) = call {
            calls.push(server.relay(client, call, CALL));
            server.receive_line().await;
        }
        server.send(notification).await;
        let AudienceEvent::Notification(heard, text) = server.audience_event().await else {
            panic!("the audience got no notification")
        };
        assert_eq!((heard, &*text), (cause, notification));
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn each_request_of_the_server_gets_one_response_with_its_own_id() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let relayed = server.relay(1, 7, PLAIN);
    let call = server.receive().await;
    let asked = r#"{"jsonrpc":"2.0","id":"q-1","method":"sampling/createMessage","params":{"x":1e400}}"#;
    server.send(asked).await;
    let AudienceEvent::Request(cause, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    assert_eq!((cause, &**question.message().text()), (MessageCause::Call(origin(1, 7)), asked));
    question.answer(
        RpcMessage::parse(r#"{"jsonrpc":"2.0","id":3,"result":{"model":"m","n":1e400}}"#.to_owned().into()).unwrap(),
    );
    assert_eq!(server.receive_line().await, r#"{"jsonrpc":"2.0","id":"q-1","result":{"model":"m","n":1e400}}"#);

    // A refusal passes unchanged. A request that is dropped gets a default response.
    server.send(r#"{"jsonrpc":"2.0","id":2,"method":"elicitation/create"}"#).await;
    let AudienceEvent::Request(_, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    question.decline(-1, "not \"now\"");
    assert_eq!(
        server.receive().await,
        json!({"jsonrpc": "2.0", "id": 2, "error": {"code": -1, "message": "not \"now\""}})
    );

    for (method, answer) in [
        (
            "elicitation/create",
            json!({"error": {"code": -32603, "message": "no client is attached that could answer"}}),
        ),
        ("roots/list", json!({"result": {"roots": []}})),
        ("x/unknown", json!({"error": {"code": -32601, "message": "method not found"}})),
    ] {
        server.send(&format!(r#"{{"jsonrpc":"2.0","id":4,"method":"{method}"}}"#)).await;
        let AudienceEvent::Request(_, question) = server.audience_event().await else {
            panic!("the audience got no request")
        };
        drop(question);
        let mut response = server.receive().await;
        response.as_object_mut().unwrap().retain(|name, _| name == "result" || name == "error");
        assert_eq!(response, answer, "{method}");
    }
    server.send(r#"{"jsonrpc":"2.0","id":5,"method":"ping"}"#).await;
    assert_eq!(server.receive().await, json!({"jsonrpc": "2.0", "id": 5, "result": {}}));
    server.respond(&call, "{}").await;
    relayed.response().await.unwrap();
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_request_of_the_server_is_withdrawn_and_gets_no_response() {
    let mut server = ScriptedServer::online(|_| {}).await;
    server.send(r#"{"jsonrpc":"2.0","id":"q","method":"elicitation/create"}"#).await;
    let AudienceEvent::Request(MessageCause::NoCall, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    let cancelled = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"q","reason":"r"}}"#;
    server.send(cancelled).await;
    let AudienceEvent::RequestWithdrawn(number, text) = server.audience_event().await else {
        panic!("the request was not withdrawn")
    };
    assert_eq!((number, &*text), (question.number(), cancelled));
    question.decline(-1, "late");
    server.send(r#"{"jsonrpc":"2.0","id":5,"method":"ping"}"#).await;
    assert_eq!(server.receive().await["id"], 5);
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn open_requests_of_a_server_beyond_the_limit_are_rejected() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let mut questions = Vec::new();
    for id in 0..65 {
        server.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"elicitation/create"}}"#)).await;
        if id < 64 {
            let AudienceEvent::Request(_, question) = server.audience_event().await else {
                panic!("the audience got no request")
            };
            questions.push(question);
        }
    }
    let refused = server.receive().await;
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(64), &json!(-32603)));
    drop(questions);
    for _ in 0..64 {
        assert_eq!(server.receive().await["error"]["code"], -32603);
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancellation_passes_unchanged_and_a_disconnect_sends_one() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let relayed = server.relay(1, 1, PLAIN);
    let id = server.receive().await["id"].to_string();
    relayed.withdraw(
        r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"x":1e400,"requestId":"its-own","reason":"changed my mind"}}"#,
    );
    let words = format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"x":1e400,"requestId":{id},"reason":"changed my mind"}}}}"#
    );
    assert_eq!(server.receive_line().await, words);
    assert_eq!(relayed.response().await, Ok(None));

    let relayed = server.relay(1, 2, PLAIN);
    let id = server.receive().await["id"].clone();
    relayed.abandon();
    let sent = server.receive().await;
    assert_eq!((&sent["method"], &sent["params"]["requestId"]), (&json!("notifications/cancelled"), &id));
    assert_eq!(sent["params"]["reason"], "the caller went away");
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_cancelled_during_the_start_of_its_server_is_never_sent() {
    let mut server = ScriptedServer::online(|_| {}).await;
    server.restart().await;
    let initialize = server.receive().await;
    assert_eq!(initialize["method"], "initialize");
    let cancelled = server.relay(1, 1, PLAIN);
    let kept = server.relay(2, 2, r#"{"jsonrpc":"2.0","id":1,"method":"x/unknown"}"#);
    cancelled.withdraw(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"its-own"}}"#);
    // The client gets its answer although the server has not started yet.
    assert_eq!(cancelled.response().await, Ok(None));
    server
        .respond(
            &initialize,
            r#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"p","version":"1"}}"#,
        )
        .await;
    assert_eq!(server.receive().await["method"], "notifications/initialized");
    loop {
        let request = server.receive().await;
        assert_ne!(request["method"], "tools/call", "{request}");
        if request["method"] == "x/unknown" {
            server.respond(&request, "{}").await;
            break;
        }
        server.respond(&request, r#"{"tools":[]}"#).await;
    }
    assert!(kept.response().await.unwrap().is_some());
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn each_call_emits_one_event_with_a_truncated_error_message() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let mut events = server.runtime.subscribe();
    let long = "x".repeat(10_000);
    for (answer, message) in [
        (None, "the caller went away".to_owned()),
        (
            Some(format!(r#"{{"isError":true,"content":[{{"text":7}},{{"text":"{long}"}}]}}"#)),
            format!("{}…", &long[..4096]),
        ),
    ] {
        let relayed = server.relay(1, 1, PLAIN);
        let request = server.receive().await;
        if let Some(result) = answer {
            server.respond(&request, &result).await;
            relayed.response().await.unwrap();
        } else {
            relayed.abandon();
            assert_eq!(server.receive().await["method"], "notifications/cancelled");
        }
        server.runtime.flush().await;
        let executed = loop {
            let event =
                serde_json::to_value(&*tokio::time::timeout(minutes(60), events.recv()).await.unwrap().unwrap())
                    .unwrap();
            if event["type"] == "mcp.tool.executed" {
                break event["data"].clone();
            }
        };
        assert_eq!((&executed["success"], &executed["error_message"]), (&json!(false), &json!(message)));
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_notification_of_a_client_passes_unchanged() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let notification = r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed","params":{"n":1e400}}"#;
    server.runtime.notify(&server.id, RpcMessage::parse(notification.to_owned().into()).unwrap()).unwrap();
    assert_eq!(server.receive_line().await, notification);
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_for_user_input_up_to_the_maximum_timeout() {
    let mut server = ScriptedServer::online(|policy| policy.session.request_timeout_max = minutes(5)).await;
    let relayed = server.relay_within(1, 1, PLAIN, Some(minutes(1)));
    let call = server.receive().await;
    server.send(r#"{"jsonrpc":"2.0","id":1,"method":"elicitation/create"}"#).await;
    let AudienceEvent::Request(_, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    tokio::time::sleep(minutes(3)).await;
    question.decline(-1, "no");
    assert_eq!(server.receive().await["id"], 1);
    server.respond(&call, "{}").await;
    assert!(relayed.response().await.unwrap().is_some());

    let relayed = server.relay_within(1, 2, PLAIN, Some(minutes(1)));
    server.receive().await;
    server.send(r#"{"jsonrpc":"2.0","id":2,"method":"elicitation/create"}"#).await;
    let AudienceEvent::Request(_, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    let refused = relayed.response().await;
    assert_eq!(refused, Err(CallError::TimedOut { after: minutes(5), fate: CallFate::TimedOut }));
    drop(question);
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn only_calls_of_the_asked_client_wait_for_user_input() {
    let mut server = ScriptedServer::online(|policy| policy.session.request_timeout_max = minutes(5)).await;
    for own in 1..=2 {
        let mut calls = Vec::new();
        for call in 0..own {
            let relayed = server.relay_within(1, 10 * own + call, PLAIN, Some(minutes(1)));
            calls.push((server.receive().await, relayed));
        }
        server.send(&format!(r#"{{"jsonrpc":"2.0","id":{own},"method":"elicitation/create"}}"#)).await;
        let AudienceEvent::Request(cause, question) = server.audience_event().await else {
            panic!("the audience got no request")
        };
        assert_eq!(cause, if own == 1 { MessageCause::Call(origin(1, 10)) } else { MessageCause::Client(1) });
        let other = server.relay_within(2, own, PLAIN, Some(minutes(1)));
        server.receive().await;
        let after = minutes(1);
        assert_eq!(other.response().await, Err(CallError::TimedOut { after, fate: CallFate::TimedOut }));
        assert_eq!(server.receive().await["method"], "notifications/cancelled");
        tokio::time::sleep(minutes(1)).await;
        question.decline(-1, "no");
        assert_eq!(server.receive().await["id"], own);
        for (call, relayed) in calls {
            server.respond(&call, "{}").await;
            assert!(relayed.response().await.unwrap().is_some());
        }
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn progress_extends_the_deadline_of_a_call_up_to_the_maximum() {
    let mut server = ScriptedServer::online(|policy| policy.session.request_timeout_max = minutes(5)).await;
    let relayed = server.relay_within(1, 1, CALL, Some(minutes(1)));
    let id = RpcMessage::parse(server.receive_line().await.into()).unwrap().id().unwrap().to_owned();
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(59)).await;
        let params = format!(r#"{{"progressToken":{id},"progress":1}}"#);
        server.send(&format!(r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{params}}}"#)).await;
        assert!(matches!(server.audience_event().await, AudienceEvent::Progress(..)));
    }
    assert_eq!(relayed.response().await, Err(CallError::TimedOut { after: minutes(5), fate: CallFate::TimedOut }));
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_session_reaches_the_audience_despite_open_requests() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let greeting = server.runtime.server_info(&server.id, minutes(1)).await.unwrap();
    assert!(greeting.handshake_result.get().contains(r#""x-unknown":{"y":1e400}"#), "{}", greeting.handshake_result);
    server.send(r#"{"jsonrpc":"2.0","id":1,"method":"elicitation/create"}"#).await;
    let AudienceEvent::Request(_, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    let (runtime, id) = (server.runtime.clone(), server.id.clone());
    let stopping = tokio::spawn(async move { runtime.stop(&id).await });
    assert!(matches!(server.audience_event().await, AudienceEvent::SessionEnded));
    drop(question);
    stopping.await.unwrap().unwrap();
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_relayed_call_is_logged_with_masked_arguments_and_result() {
    let mut server = ScriptedServer::online(|_| {}).await;
    let mut events = server.runtime.subscribe();
    let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"\ud800":1,"arguments":{"key":"hush-hush"},"name":"work"}}"#;
    for (answer, response, error) in [
        (r#""result":{"content":[]}"#, json!({"content": []}), json!(null)),
        (
            r#""error":{"code":-1,"message":"no hush-hush"}"#,
            json!({"code": -1, "message": "no [secret]"}),
            json!(r#"server error: {"code":-1,"message":"no [secret]"}"#),
        ),
    ] {
        let relayed = server.relay(1, 1, call);
        let request = RpcMessage::parse(server.receive_line().await.into()).unwrap();
        let id = request.id().unwrap();
        server.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},{answer}}}"#)).await;
        relayed.response().await.unwrap();
        server.runtime.flush().await;
        let logged = loop {
            let event = serde_json::to_value(&*events.recv().await.unwrap()).unwrap();
            if event["type"] == "mcp.request.logs" {
                break event["data"]["requests"][0].clone();
            }
        };
        assert_eq!(logged["tool_name"], "work");
        assert_eq!(logged["tool_params"], json!({"key": "[secret]"}));
        assert_eq!((&logged["tool_response"], &logged["error_message"]), (&response, &error));
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_with_a_listening_client_does_not_become_dormant() {
    let mut server = ScriptedServer::online_as(ProcessLifetime::Listed, |_| {}).await;
    let held = server.runtime.status(&server.id).unwrap().port.as_ref().unwrap().keep_awake();
    tokio::time::sleep(minutes(60)).await;
    assert!(!server.runtime.status(&server.id).unwrap().dormant);
    drop(held);
    let released_at = tokio::time::Instant::now();
    assert!(matches!(server.audience_event().await, AudienceEvent::SessionEnded));
    assert!(released_at.elapsed() >= minutes(3), "idle time starts when the client stops listening");
    let id = server.id.clone();
    server.runtime.wait_for(&id, |view| view.dormant).await.unwrap();
    server.shut_down().await;
}
