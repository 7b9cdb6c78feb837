//! What goes through a session between a server and the clients of its host, byte for byte, in paused time.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

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

use self::support::{Play, Told};

const CALL: &str = r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work","_meta":{"progressToken":"p","x":1e400},"\ud800":[ ]},"unknown":{"n":123456789012345678901234567890}}"#;

/// One that a test can read.
const PLAIN: &str = r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work"}}"#;

fn minutes(count: u64) -> Duration {
    Duration::from_secs(60 * count)
}

fn origin(client: u64, call: u64) -> CallOrigin {
    CallOrigin { client, call }
}

/// The same text with a client's id and token in place of ours.
fn as_sent(line: &str, ours: u64) -> String {
    line.replace(&format!("\"id\":{ours}"), "\"id\":\"its-own\"")
        .replace(&format!("\"progressToken\":{ours}"), "\"progressToken\":\"p\"")
}

#[tokio::test(start_paused = true)]
async fn a_request_and_its_answer_are_the_same_at_both_ends_but_for_the_id_and_the_token() {
    let mut play = Play::begin(|_| {}).await;
    let relayed = play.relays(1, 7, CALL);
    let line = play.reads().await;
    let ours = RpcMessage::parse(line.clone().into()).unwrap().id().unwrap().parse().unwrap();
    assert_eq!(as_sent(&line, ours), CALL);

    // Progress goes by its token, which is the client's own on the other side.
    play.says(&format!(r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{ours},"progress":0.50,"x":[1,]}}}}"#)).await;
    play.says(&format!(r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{ours},"progress":0.50,"x":1e400}}}}"#)).await;
    let Told::Progress(whose, text) = play.told().await else { panic!("it is not told as progress") };
    assert_eq!(whose, origin(1, 7));
    let expected = r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"p","progress":0.50,"x":1e400}}"#;
    assert_eq!(text, expected);

    // What belongs to no call of ours is told to nobody.
    play.says(r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"p","progress":1}}"#)
        .await;
    let answer = format!(
        r#"{{"x":{{"y":1E+2}},"result":{{"content":[],"big":98765432109876543210}},"jsonrpc":"2.0","id":{ours}}}"#
    );
    play.says(&answer).await;
    assert_eq!(relayed.answered().await, Ok(Some(answer)));
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_server_is_an_answer_and_tells_no_secret() {
    let mut play = Play::begin(|_| {}).await;
    for (error, told) in [
        (r#"{"code":-1,"message":"no","data":{"n":1e400}}"#, r#"{"code":-1,"message":"no","data":{"n":1e400}}"#),
        (r#"{"code":-1,"message":"the key hush-hush"}"#, r#"{"code":-1,"message":"the key [secret]"}"#),
        (r#"{"code":-1,"message":"the key hush\u002dhush"}"#, r#"{"code":-1,"message":"the key [secret]"}"#),
        (
            r#"{"code":-1,"message":"hush-hush","data":{"n":1e400}}"#,
            r#"{"code":-32603,"message":"{\"code\":-1,\"message\":\"[secret]\",\"data\":{\"n\":1e400}}"}"#,
        ),
    ] {
        let relayed = play.relays(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/unknown"}"#);
        let request = play.hears().await;
        assert_eq!(request["method"], "x/unknown");
        let id = request["id"].to_string();
        play.says(&format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#)).await;
        let expected = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{told}}}"#);
        assert_eq!(relayed.answered().await, Ok(Some(expected)));
    }
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_server_says_by_itself_is_heard_with_whom_it_can_only_mean() {
    let mut play = Play::begin(|_| {}).await;
    let said = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1e400}}"#;
    let mut calls = Vec::new();
    for (call, cause) in [
        (None, MessageCause::NoCall),
        (Some((1, 1)), MessageCause::Call(origin(1, 1))),
        (Some((1, 2)), MessageCause::Client(1)),
        (Some((2, 3)), MessageCause::SeveralClients(2)),
    ] {
        if let Some((client, call)) = call {
            calls.push(play.relays(client, call, CALL));
            play.reads().await;
        }
        play.says(said).await;
        let Told::Heard(heard, text) = play.told().await else { panic!("it is not heard") };
        assert_eq!((heard, &*text), (cause, said));
    }
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_server_asks_is_answered_under_its_own_id_and_exactly_once() {
    let mut play = Play::begin(|_| {}).await;
    let relayed = play.relays(1, 7, PLAIN);
    let call = play.hears().await;
    let asked = r#"{"jsonrpc":"2.0","id":"q-1","method":"sampling/createMessage","params":{"x":1e400}}"#;
    play.says(asked).await;
    let Told::Asked(cause, question) = play.told().await else { panic!("nobody is asked") };
    assert_eq!((cause, &**question.message().text()), (MessageCause::Call(origin(1, 7)), asked));
    question.answer(
        RpcMessage::parse(r#"{"jsonrpc":"2.0","id":3,"result":{"model":"m","n":1e400}}"#.to_owned().into()).unwrap(),
    );
    assert_eq!(play.reads().await, r#"{"jsonrpc":"2.0","id":"q-1","result":{"model":"m","n":1e400}}"#);

    // A client that refuses says so in its own words; one that does not know how has ours.
    play.says(r#"{"jsonrpc":"2.0","id":2,"method":"elicitation/create"}"#).await;
    let Told::Asked(_, question) = play.told().await else { panic!("nobody is asked") };
    question.decline(-1, "not \"now\"");
    assert_eq!(play.hears().await, json!({"jsonrpc": "2.0", "id": 2, "error": {"code": -1, "message": "not \"now\""}}));

    for (method, answer) in [
        (
            "elicitation/create",
            json!({"error": {"code": -32603, "message": "no client is attached that could answer"}}),
        ),
        ("roots/list", json!({"result": {"roots": []}})),
        ("x/unknown", json!({"error": {"code": -32601, "message": "method not found"}})),
    ] {
        play.says(&format!(r#"{{"jsonrpc":"2.0","id":4,"method":"{method}"}}"#)).await;
        let Told::Asked(_, question) = play.told().await else { panic!("nobody is asked") };
        drop(question);
        let mut told = play.hears().await;
        told.as_object_mut().unwrap().retain(|name, _| name == "result" || name == "error");
        assert_eq!(told, answer, "{method}");
    }
    play.says(r#"{"jsonrpc":"2.0","id":5,"method":"ping"}"#).await;
    assert_eq!(play.hears().await, json!({"jsonrpc": "2.0", "id": 5, "result": {}}));
    play.answers(&call, "{}").await;
    relayed.answered().await.unwrap();
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_question_that_the_server_takes_back_is_withdrawn_and_its_answer_goes_nowhere() {
    let mut play = Play::begin(|_| {}).await;
    play.says(r#"{"jsonrpc":"2.0","id":"q","method":"elicitation/create"}"#).await;
    let Told::Asked(MessageCause::NoCall, question) = play.told().await else { panic!("nobody is asked") };
    let taken_back = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"q","reason":"r"}}"#;
    play.says(taken_back).await;
    let Told::Withdrawn(number, text) = play.told().await else { panic!("it is not withdrawn") };
    assert_eq!((number, &*text), (question.number(), taken_back));
    question.decline(-1, "late");
    play.says(r#"{"jsonrpc":"2.0","id":5,"method":"ping"}"#).await;
    assert_eq!(play.hears().await["id"], 5);
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_asks_without_end_is_answered_by_nobody_from_some_point_on() {
    let mut play = Play::begin(|_| {}).await;
    let mut questions = Vec::new();
    for id in 0..65 {
        play.says(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"elicitation/create"}}"#)).await;
        if id < 64 {
            let Told::Asked(_, question) = play.told().await else { panic!("nobody is asked") };
            questions.push(question);
        }
    }
    let refused = play.hears().await;
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(64), &json!(-32603)));
    drop(questions);
    for _ in 0..64 {
        assert_eq!(play.hears().await["error"]["code"], -32603);
    }
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_cancels_in_its_own_words_and_one_that_goes_away_in_ours() {
    let mut play = Play::begin(|_| {}).await;
    let relayed = play.relays(1, 1, PLAIN);
    let id = play.hears().await["id"].to_string();
    relayed.withdraw(
        r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"x":1e400,"requestId":"its-own","reason":"changed my mind"}}"#,
    );
    let words = format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"x":1e400,"requestId":{id},"reason":"changed my mind"}}}}"#
    );
    assert_eq!(play.reads().await, words);
    assert_eq!(relayed.answered().await, Ok(None));

    let relayed = play.relays(1, 2, PLAIN);
    let id = play.hears().await["id"].clone();
    relayed.drop();
    let told = play.hears().await;
    assert_eq!((&told["method"], &told["params"]["requestId"]), (&json!("notifications/cancelled"), &id));
    assert_eq!(told["params"]["reason"], "the caller went away");
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_taken_back_while_its_server_starts_is_never_made() {
    let mut play = Play::begin(|_| {}).await;
    play.restarts().await;
    let initialize = play.hears().await;
    assert_eq!(initialize["method"], "initialize");
    let taken_back = play.relays(1, 1, PLAIN);
    let kept = play.relays(2, 2, r#"{"jsonrpc":"2.0","id":1,"method":"x/unknown"}"#);
    taken_back.withdraw(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"its-own"}}"#);
    // Its client waits for nothing, and neither does its place.
    assert_eq!(taken_back.answered().await, Ok(None));
    play.answers(
        &initialize,
        r#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"p","version":"1"}}"#,
    )
    .await;
    assert_eq!(play.hears().await["method"], "notifications/initialized");
    loop {
        let request = play.hears().await;
        assert_ne!(request["method"], "tools/call", "{request}");
        if request["method"] == "x/unknown" {
            play.answers(&request, "{}").await;
            break;
        }
        play.answers(&request, r#"{"tools":[]}"#).await;
    }
    assert!(kept.answered().await.unwrap().is_some());
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_is_told_once_whatever_becomes_of_it_and_not_at_length() {
    let mut play = Play::begin(|_| {}).await;
    let mut events = play.runtime.subscribe();
    let long = "x".repeat(10_000);
    for (answer, told) in [
        (None, "the caller went away".to_owned()),
        (
            Some(format!(r#"{{"isError":true,"content":[{{"text":7}},{{"text":"{long}"}}]}}"#)),
            format!("{}…", &long[..4096]),
        ),
    ] {
        let relayed = play.relays(1, 1, PLAIN);
        let request = play.hears().await;
        if let Some(result) = answer {
            play.answers(&request, &result).await;
            relayed.answered().await.unwrap();
        } else {
            relayed.drop();
            assert_eq!(play.hears().await["method"], "notifications/cancelled");
        }
        play.runtime.flush().await;
        let executed = loop {
            let event =
                serde_json::to_value(&*tokio::time::timeout(minutes(60), events.recv()).await.unwrap().unwrap())
                    .unwrap();
            if event["type"] == "mcp.tool.executed" {
                break event["data"].clone();
            }
        };
        assert_eq!((&executed["success"], &executed["error_message"]), (&json!(false), &json!(told)));
    }
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_notification_of_a_client_goes_on_as_it_is_and_starts_nothing() {
    let mut play = Play::begin(|_| {}).await;
    let said = r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed","params":{"n":1e400}}"#;
    play.runtime.notify(&play.id, RpcMessage::parse(said.to_owned().into()).unwrap()).unwrap();
    assert_eq!(play.reads().await, said);
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_waits_for_the_person_who_is_asked_on_its_behalf_up_to_the_cap() {
    let mut play = Play::begin(|policy| policy.session.request_timeout_max = minutes(5)).await;
    let relayed = play.relays_within(1, 1, PLAIN, Some(minutes(1)));
    let call = play.hears().await;
    play.says(r#"{"jsonrpc":"2.0","id":1,"method":"elicitation/create"}"#).await;
    let Told::Asked(_, question) = play.told().await else { panic!("nobody is asked") };
    tokio::time::sleep(minutes(3)).await;
    question.decline(-1, "no");
    assert_eq!(play.hears().await["id"], 1);
    play.answers(&call, "{}").await;
    assert!(relayed.answered().await.unwrap().is_some());

    let relayed = play.relays_within(1, 2, PLAIN, Some(minutes(1)));
    play.hears().await;
    play.says(r#"{"jsonrpc":"2.0","id":2,"method":"elicitation/create"}"#).await;
    let Told::Asked(_, question) = play.told().await else { panic!("nobody is asked") };
    let refused = relayed.answered().await;
    assert_eq!(refused, Err(CallError::TimedOut { after: minutes(5), fate: CallFate::TimedOut }));
    drop(question);
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn each_call_of_the_client_that_is_asked_waits_and_no_call_of_another() {
    let mut play = Play::begin(|policy| policy.session.request_timeout_max = minutes(5)).await;
    for own in 1..=2 {
        let mut calls = Vec::new();
        for call in 0..own {
            let relayed = play.relays_within(1, 10 * own + call, PLAIN, Some(minutes(1)));
            calls.push((play.hears().await, relayed));
        }
        play.says(&format!(r#"{{"jsonrpc":"2.0","id":{own},"method":"elicitation/create"}}"#)).await;
        let Told::Asked(cause, question) = play.told().await else { panic!("nobody is asked") };
        assert_eq!(cause, if own == 1 { MessageCause::Call(origin(1, 10)) } else { MessageCause::Client(1) });
        let other = play.relays_within(2, own, PLAIN, Some(minutes(1)));
        play.hears().await;
        let after = minutes(1);
        assert_eq!(other.answered().await, Err(CallError::TimedOut { after, fate: CallFate::TimedOut }));
        assert_eq!(play.hears().await["method"], "notifications/cancelled");
        tokio::time::sleep(minutes(1)).await;
        question.decline(-1, "no");
        assert_eq!(play.hears().await["id"], own);
        for (call, relayed) in calls {
            play.answers(&call, "{}").await;
            assert!(relayed.answered().await.unwrap().is_some());
        }
    }
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn progress_gives_a_call_more_time_up_to_the_cap() {
    let mut play = Play::begin(|policy| policy.session.request_timeout_max = minutes(5)).await;
    let relayed = play.relays_within(1, 1, CALL, Some(minutes(1)));
    let id = RpcMessage::parse(play.reads().await.into()).unwrap().id().unwrap().to_owned();
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_secs(59)).await;
        let params = format!(r#"{{"progressToken":{id},"progress":1}}"#);
        play.says(&format!(r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{params}}}"#)).await;
        assert!(matches!(play.told().await, Told::Progress(..)));
    }
    assert_eq!(relayed.answered().await, Err(CallError::TimedOut { after: minutes(5), fate: CallFate::TimedOut }));
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_session_is_told_and_what_it_had_asked_is_over() {
    let mut play = Play::begin(|_| {}).await;
    let greeting = play.runtime.server_info(&play.id, minutes(1)).await.unwrap();
    assert!(greeting.handshake_result.get().contains(r#""x-unknown":{"y":1e400}"#), "{}", greeting.handshake_result);
    play.says(r#"{"jsonrpc":"2.0","id":1,"method":"elicitation/create"}"#).await;
    let Told::Asked(_, question) = play.told().await else { panic!("nobody is asked") };
    let (runtime, id) = (play.runtime.clone(), play.id.clone());
    let stopping = tokio::spawn(async move { runtime.stop(&id).await });
    assert!(matches!(play.told().await, Told::Ended));
    drop(question);
    stopping.await.unwrap().unwrap();
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_of_a_client_is_logged_with_what_it_gave_and_what_it_got() {
    let mut play = Play::begin(|_| {}).await;
    let mut events = play.runtime.subscribe();
    let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"\ud800":1,"arguments":{"key":"hush-hush"},"name":"work"}}"#;
    for (answer, response, error) in [
        (r#""result":{"content":[]}"#, json!({"content": []}), json!(null)),
        (
            r#""error":{"code":-1,"message":"no hush-hush"}"#,
            json!({"code": -1, "message": "no [secret]"}),
            json!(r#"server error: {"code":-1,"message":"no [secret]"}"#),
        ),
    ] {
        let relayed = play.relays(1, 1, call);
        let request = RpcMessage::parse(play.reads().await.into()).unwrap();
        let id = request.id().unwrap();
        play.says(&format!(r#"{{"jsonrpc":"2.0","id":{id},{answer}}}"#)).await;
        relayed.answered().await.unwrap();
        play.runtime.flush().await;
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
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_a_client_listens_to_is_not_put_to_sleep() {
    let mut play = Play::begin_as(ProcessLifetime::Listed, |_| {}).await;
    let held = play.runtime.status(&play.id).unwrap().port.as_ref().unwrap().keep_awake();
    tokio::time::sleep(minutes(60)).await;
    assert!(!play.runtime.status(&play.id).unwrap().dormant);
    drop(held);
    let let_go = tokio::time::Instant::now();
    assert!(matches!(play.told().await, Told::Ended));
    assert!(let_go.elapsed() >= minutes(3), "it is idle since then");
    let id = play.id.clone();
    play.runtime.wait_for(&id, |view| view.dormant).await.unwrap();
    play.end().await;
}
