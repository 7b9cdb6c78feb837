//! Results that require input: the client of the call is asked, and the call is repeated with its responses.

use mcp_satellite_actors::audience::{CallOrigin, ClientQuestion, MessageCause};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::rpc::RpcMessage;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use super::eras::{VERSION, online_stateless};
use super::support::{AudienceEvent, ScriptedServer};

const CALL: &str =
    r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work","arguments":{"x":1e400}}}"#;
const ELICIT: &str = r#"{"method":"elicitation/create","params":{"message":"who?","n":1e400}}"#;

fn input_required(state: &str, requests: &str) -> String {
    format!(r#"{{"resultType":"input_required","requestState":{state},"inputRequests":{requests}}}"#)
}

async fn next_question(server: &mut ScriptedServer) -> ClientQuestion {
    let AudienceEvent::Request(cause, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    assert_eq!(cause, MessageCause::Call(CallOrigin { client: 1, call: 7 }));
    question
}

fn result(text: &str) -> RpcMessage {
    RpcMessage::parse(format!(r#"{{"jsonrpc":"2.0","id":0,"result":{text}}}"#).into()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_call_is_repeated_with_the_input_of_its_client() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let relayed = server.relay(1, 7, CALL);
    let first = server.receive_lossy().await;
    let requests = format!(r#"{{"who":{ELICIT},"where \"it\" is":{{"method":"roots/list"}}}}"#);
    server.respond(&first, &input_required(r#""seal\u0065d""#, &requests)).await;
    let who = next_question(&mut server).await;
    assert!(who.message().text().contains(r#""params":{"message":"who?","n":1e400}"#));
    let place = next_question(&mut server).await;
    assert_eq!((who.message().method(), place.message().method()), (Some("elicitation/create"), Some("roots/list")));
    // A roots request without a client gets an empty list.
    place.answer_without_client();
    who.answer(result(r#"{"action":"accept","n":1e400}"#));
    let line = server.receive_line().await;
    for kept in [
        r#""requestState":"seal\u0065d""#,
        r#""who":{"action":"accept","n":1e400}"#,
        r#""where \"it\" is":{"roots":[]}"#,
        r#""arguments":{"x":1e400}"#,
    ] {
        assert_eq!(line.matches(kept).count(), 1, "{kept} in {line}");
    }
    let second: Value = serde_json::from_str(&line.replace("1e400", "1")).unwrap();
    assert_ne!(second["id"], first["id"]);
    assert_eq!(second["params"]["_meta"][VERSION], "2026-07-28");

    // The next round has its own state and responses, none of the previous round.
    server.respond(&second, &format!(r#"{{"resultType":"input_required","inputRequests":{{"b":{ELICIT}}}}}"#)).await;
    next_question(&mut server).await.answer(result(r#"{"action":"decline"}"#));
    let third = server.receive_lossy().await;
    assert_eq!(third["params"]["inputResponses"], json!({"b": {"action": "decline"}}));
    assert_eq!(third["params"]["requestState"], Value::Null);
    let answer =
        format!(r#"{{"jsonrpc":"2.0","id":{},"result":{{"resultType":"complete","content":[]}}}}"#, third["id"]);
    server.send(&answer).await;
    assert_eq!(relayed.response().await, Ok(Some(answer)));
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_state_without_input_requests_is_returned_at_most_ten_times() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let relayed = server.relay(1, 7, CALL);
    let mut asked = server.receive_lossy().await;
    for round in 1..=10 {
        server.respond(&asked, &format!(r#"{{"resultType":"input_required","requestState":"{round}"}}"#)).await;
        asked = server.receive_lossy().await;
        assert_eq!(asked["params"]["requestState"], round.to_string());
        assert_eq!(asked["params"]["inputResponses"], Value::Null);
    }
    server.respond(&asked, r#"{"resultType":"input_required","requestState":"11"}"#).await;
    let error = relayed.response().await.unwrap_err().to_string();
    assert_eq!(error, "server error -32603: the server has asked for input more than 10 times");
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_input_request_fails_the_call_and_withdraws_the_others() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let error = r#"{"jsonrpc":"2.0","id":0,"error":{"code":-1,"message":"the user is away","data":[1]}}"#;
    for refuses in [true, false] {
        let relayed = server.relay(1, 7, CALL);
        let first = server.receive_lossy().await;
        server.respond(&first, &input_required("\"s\"", &format!(r#"{{"a":{ELICIT},"b":{ELICIT}}}"#))).await;
        let (one, other) = (next_question(&mut server).await, next_question(&mut server).await);
        let (code, why) = if refuses {
            one.answer(RpcMessage::parse(error.into()).unwrap());
            (-1, "the server's request for input failed: the user is away")
        } else {
            drop(one);
            (-32603, "the server's request for input failed: no client is attached that could answer")
        };
        let AudienceEvent::RequestWithdrawn(number, _) = server.audience_event().await else {
            panic!("the other request was not withdrawn")
        };
        assert_eq!(number, other.number());
        let Err(CallError::Server { code: received, message, .. }) = relayed.response().await else {
            panic!("the call returned a result")
        };
        assert_eq!((received, &*message), (code, why));
        // This response comes too late and is ignored.
        other.answer(result("{}"));
    }
    let relayed = server.relay(1, 7, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    assert_eq!(server.receive().await["method"], "x/y");
    relayed.abandon();
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_disconnects_withdraws_its_input_requests() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let relayed = server.relay(1, 7, CALL);
    let first = server.receive_lossy().await;
    server.respond(&first, &input_required("\"s\"", &format!(r#"{{"a":{ELICIT}}}"#))).await;
    let question = next_question(&mut server).await;
    relayed.abandon();
    let AudienceEvent::RequestWithdrawn(number, _) = server.audience_event().await else {
        panic!("the request was not withdrawn")
    };
    assert_eq!(number, question.number());
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_user_input_ends_at_the_maximum_timeout() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let began = Instant::now();
    let relayed = server.relay(1, 7, CALL);
    let first = server.receive_lossy().await;
    server.respond(&first, &input_required("\"s\"", &format!(r#"{{"a":{ELICIT}}}"#))).await;
    let _question = next_question(&mut server).await;
    let error = relayed.response().await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { .. }), "{error}");
    assert_eq!(began.elapsed(), Duration::from_secs(5 * 60));
    assert!(matches!(server.audience_event().await, AudienceEvent::RequestWithdrawn(..)));
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_malformed_input_request_fails_the_call() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    for malformed in [
        r#"{"resultType":"input_required"}"#,
        r#"{"resultType":"input_required","inputRequests":[]}"#,
        r#"{"resultType":"input_required","inputRequests":{"a":7}}"#,
        r#"{"resultType":"input_required","inputRequests":{"a":{"method":"tools/call"}}}"#,
        r#"{"resultType":"input_required","inputRequests":{"a":{}}}"#,
    ] {
        let relayed = server.relay(1, 7, CALL);
        let first = server.receive_lossy().await;
        server.respond(&first, malformed).await;
        let error = relayed.response().await.unwrap_err();
        assert!(matches!(error, CallError::Server { code: -32603, .. }), "{malformed}: {error}");
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_client_declares_no_capabilities_and_gives_no_input() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let (runtime, id) = (server.runtime.clone(), server.id.clone());
    let call = tokio::spawn(async move { runtime.call(&id, "work", None, None).await });
    let asked = server.receive().await;
    assert_eq!(asked["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"], json!({}));
    server.respond(&asked, &input_required("\"s\"", &format!(r#"{{"a":{ELICIT}}}"#))).await;
    let AudienceEvent::Request(MessageCause::NoClient, question) = server.audience_event().await else {
        panic!("the audience got no request")
    };
    drop(question);
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, CallError::Server { code: -32603, .. }), "{error}");
    server.shut_down().await;
}
