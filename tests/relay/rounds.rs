//! Results that ask for input: the client of the call is asked, and the call is asked again with its answers.

use mcp_satellite_actors::audience::{CallOrigin, ClientQuestion, MessageCause};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::rpc::RpcMessage;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use crate::eras::{VERSION, stateless};
use crate::support::{Play, Told};

const CALL: &str =
    r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work","arguments":{"x":1e400}}}"#;
const ELICIT: &str = r#"{"method":"elicitation/create","params":{"message":"who?","n":1e400}}"#;

fn wants(state: &str, requests: &str) -> String {
    format!(r#"{{"resultType":"input_required","requestState":{state},"inputRequests":{requests}}}"#)
}

async fn asked(play: &mut Play) -> ClientQuestion {
    let Told::Asked(cause, question) = play.told().await else { panic!("nobody is asked") };
    assert_eq!(cause, MessageCause::Call(CallOrigin { client: 1, call: 7 }));
    question
}

fn result(text: &str) -> RpcMessage {
    RpcMessage::parse(format!(r#"{{"jsonrpc":"2.0","id":0,"result":{text}}}"#).into()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_call_is_asked_again_with_the_answers_of_its_client() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let relayed = play.relays(1, 7, CALL);
    let first = play.hears_loosely().await;
    let requests = format!(r#"{{"who":{ELICIT},"where \"it\" is":{{"method":"roots/list"}}}}"#);
    play.answers(&first, &wants(r#""seal\u0065d""#, &requests)).await;
    let who = asked(&mut play).await;
    assert!(who.message().text().contains(r#""params":{"message":"who?","n":1e400}"#));
    let place = asked(&mut play).await;
    assert_eq!((who.message().method(), place.message().method()), (Some("elicitation/create"), Some("roots/list")));
    // One of them may be answered by nobody: there are no roots then.
    place.answer_without_client();
    who.answer(result(r#"{"action":"accept","n":1e400}"#));
    let line = play.reads().await;
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

    // Another round has its own state and answers, and not those of the one before.
    play.answers(&second, &format!(r#"{{"resultType":"input_required","inputRequests":{{"b":{ELICIT}}}}}"#)).await;
    asked(&mut play).await.answer(result(r#"{"action":"decline"}"#));
    let third = play.hears_loosely().await;
    assert_eq!(third["params"]["inputResponses"], json!({"b": {"action": "decline"}}));
    assert_eq!(third["params"]["requestState"], Value::Null);
    let answer =
        format!(r#"{{"jsonrpc":"2.0","id":{},"result":{{"resultType":"complete","content":[]}}}}"#, third["id"]);
    play.says(&answer).await;
    assert_eq!(relayed.answered().await, Ok(Some(answer)));
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_state_without_questions_is_brought_back_at_once_and_not_for_ever() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let relayed = play.relays(1, 7, CALL);
    let mut asked = play.hears_loosely().await;
    for round in 1..=10 {
        play.answers(&asked, &format!(r#"{{"resultType":"input_required","requestState":"{round}"}}"#)).await;
        asked = play.hears_loosely().await;
        assert_eq!(asked["params"]["requestState"], round.to_string());
        assert_eq!(asked["params"]["inputResponses"], Value::Null);
    }
    play.answers(&asked, r#"{"resultType":"input_required","requestState":"11"}"#).await;
    let error = relayed.answered().await.unwrap_err().to_string();
    assert_eq!(error, "server error -32603: the server has asked for input more than 10 times");
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_gives_no_input_gets_no_result_and_is_asked_nothing_else() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let error = r#"{"jsonrpc":"2.0","id":0,"error":{"code":-1,"message":"the user is away","data":[1]}}"#;
    for refuses in [true, false] {
        let relayed = play.relays(1, 7, CALL);
        let first = play.hears_loosely().await;
        play.answers(&first, &wants("\"s\"", &format!(r#"{{"a":{ELICIT},"b":{ELICIT}}}"#))).await;
        let (one, other) = (asked(&mut play).await, asked(&mut play).await);
        let (code, why) = if refuses {
            one.answer(RpcMessage::parse(error.into()).unwrap());
            (-1, "the server's request for input failed: the user is away")
        } else {
            drop(one);
            (-32603, "the server's request for input failed: no client is attached that could answer")
        };
        let Told::Withdrawn(number, _) = play.told().await else { panic!("the other question stays") };
        assert_eq!(number, other.number());
        let Err(CallError::Server { code: told, message, .. }) = relayed.answered().await else { panic!("a result") };
        assert_eq!((told, &*message), (code, why));
        // Too late: it is about nothing.
        other.answer(result("{}"));
    }
    let relayed = play.relays(1, 7, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    assert_eq!(play.hears().await["method"], "x/y");
    relayed.drop();
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_takes_its_questions_with_it() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let relayed = play.relays(1, 7, CALL);
    let first = play.hears_loosely().await;
    play.answers(&first, &wants("\"s\"", &format!(r#"{{"a":{ELICIT}}}"#))).await;
    let question = asked(&mut play).await;
    relayed.drop();
    let Told::Withdrawn(number, _) = play.told().await else { panic!("the question stays") };
    assert_eq!(number, question.number());
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn while_a_person_thinks_the_time_of_the_call_goes_on_up_to_its_cap() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let began = Instant::now();
    let relayed = play.relays(1, 7, CALL);
    let first = play.hears_loosely().await;
    play.answers(&first, &wants("\"s\"", &format!(r#"{{"a":{ELICIT}}}"#))).await;
    let _question = asked(&mut play).await;
    let error = relayed.answered().await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { .. }), "{error}");
    assert_eq!(began.elapsed(), Duration::from_secs(5 * 60));
    assert!(matches!(play.told().await, Told::Withdrawn(..)));
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_asks_for_input_and_says_not_for_what_is_no_result() {
    let mut play = stateless(&json!({"tools": {}})).await;
    for asks in [
        r#"{"resultType":"input_required"}"#,
        r#"{"resultType":"input_required","inputRequests":[]}"#,
        r#"{"resultType":"input_required","inputRequests":{"a":7}}"#,
        r#"{"resultType":"input_required","inputRequests":{"a":{"method":"tools/call"}}}"#,
        r#"{"resultType":"input_required","inputRequests":{"a":{}}}"#,
    ] {
        let relayed = play.relays(1, 7, CALL);
        let first = play.hears_loosely().await;
        play.answers(&first, asks).await;
        let error = relayed.answered().await.unwrap_err();
        assert!(matches!(error, CallError::Server { code: -32603, .. }), "{asks}: {error}");
    }
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_nobody_stands_behind_is_not_asked_for_input_by_a_server_that_looks() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let (runtime, id) = (play.runtime.clone(), play.id.clone());
    let call = tokio::spawn(async move { runtime.call(&id, "work", None, None).await });
    let asked = play.hears().await;
    assert_eq!(asked["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"], json!({}));
    play.answers(&asked, &wants("\"s\"", &format!(r#"{{"a":{ELICIT}}}"#))).await;
    let Told::Asked(MessageCause::NoClient, question) = play.told().await else { panic!("nobody is asked") };
    drop(question);
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, CallError::Server { code: -32603, .. }), "{error}");
    play.end().await;
}
