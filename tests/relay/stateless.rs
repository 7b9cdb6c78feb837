//! A server without sessions, and the clients of sessions: what is translated, what goes through, and what it says by itself.

use mcp_satellite_actors::audience::MessageCause;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::rpc::RpcMessage;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use crate::eras::{VERSION, begun, stateless};
use crate::support::{Play, Told};

const LISTENS: &str = "subscriptions/listen";
const SUBSCRIPTION: &str = "io.modelcontextprotocol/subscriptionId";

/// The next request for a stream, which is confirmed.
async fn listens(play: &mut Play) -> Value {
    let listen = play.hears().await;
    assert_eq!((&listen["method"], &listen["params"]["_meta"][VERSION]), (&json!(LISTENS), &json!("2026-07-28")));
    let (id, wanted) = (&listen["id"], &listen["params"]["notifications"]);
    let params = json!({"notifications": wanted, "_meta": {SUBSCRIPTION: id}});
    let confirmed = json!({"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged", "params": params});
    play.says(&confirmed.to_string()).await;
    listen
}

/// A server that tells when its tools change, and its first stream.
async fn telling() -> (Play, Value) {
    let capabilities = json!({"tools": {"listChanged": true}, "resources": {"subscribe": true}, "logging": {}});
    let mut play = begun(&capabilities).await;
    let mut rest = Vec::new();
    let mut stream = None;
    // It is asked for the lists and for the stream, whichever comes first.
    while rest.len() < 4 {
        let asked = play.hears().await;
        match asked["method"].as_str().unwrap() {
            LISTENS => {
                let (id, wanted) = (&asked["id"], &asked["params"]["notifications"]);
                let params = json!({"notifications": wanted, "_meta": {SUBSCRIPTION: id}});
                let method = "notifications/subscriptions/acknowledged";
                play.says(&json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string()).await;
                stream = Some(asked.clone());
            }
            "tools/list" => play.lists(&asked).await,
            "resources/list" => play.answers(&asked, r#"{"resources":[]}"#).await,
            "resources/templates/list" => play.answers(&asked, r#"{"resourceTemplates":[]}"#).await,
            other => panic!("it is asked for {other}"),
        }
        rest.push(asked);
    }
    play.is_online().await;
    (play, stream.unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_request_of_a_sessions_client_gets_what_this_era_must_have_and_loses_nothing() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let call = r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work","_meta":{"progressToken":"p","a/b":[1e400]},"big":98765432109876543210},"unknown":true}"#;
    let relayed = play.relays(1, 7, call);
    let line = play.reads().await;
    let sent = RpcMessage::parse(line.clone().into()).unwrap();
    let ours = sent.id().unwrap().to_owned();
    assert_eq!(sent.token(), Some(&*ours), "{line}");
    for kept in
        [r#""a/b":[1e400]"#, r#""big":98765432109876543210"#, r#""unknown":true"#, r#""name":"work""#, "\"2026-07-28\""]
    {
        assert_eq!(line.matches(kept).count(), 1, "{kept} in {line}");
    }
    play.says(&format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{ours},"progress":1}}}}"#
    ))
    .await;
    let Told::Progress(_, text) = play.told().await else { panic!("it is not told as progress") };
    assert!(text.contains(r#""progressToken":"p""#), "{text}");
    let answer =
        format!(r#"{{"jsonrpc":"2.0","id":{ours},"result":{{"resultType":"complete","content":[],"ttlMs":7}}}}"#);
    play.says(&answer).await;
    assert_eq!(relayed.answered().await, Ok(Some(answer)));

    // One without params has some then.
    let relayed = play.relays(1, 8, r#"{"jsonrpc":"2.0","id":1,"method":"x/bare"}"#);
    let bare = play.hears().await;
    assert_eq!(bare["params"]["_meta"][VERSION], "2026-07-28");
    play.answers(&bare, "{}").await;
    relayed.answered().await.unwrap();
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_of_this_era_goes_as_it_came_and_so_does_its_answer() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let call = r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{"x":1e400}}}}"#;
    for result in [
        r#"{"resultType":"input_required","requestState":"s","inputRequests":{"a":{"method":"roots/list"}}}"#,
        r#"{"resultType":"x/unheard-of","y":1e400}"#,
        r#"{"content":[]}"#,
    ] {
        let relayed = play.relays_as(Era::Stateless, 1, 7, call, None);
        let line = play.reads().await;
        let ours = RpcMessage::parse(line.clone().into()).unwrap().id().unwrap().to_owned();
        assert_eq!(line.replace(&format!("\"id\":{ours}"), "\"id\":\"its-own\""), call);
        let answer = format!(r#"{{"jsonrpc":"2.0","id":{ours},"result":{result}}}"#);
        play.says(&answer).await;
        assert_eq!(relayed.answered().await, Ok(Some(answer)));
    }
    // What takes too long or is not wanted any more is cancelled in this era's way, which over a pipe is the old one.
    let relayed = play.relays_as(Era::Stateless, 1, 8, call, None);
    let asked = play.hears_loosely().await;
    relayed.drop();
    let cancelled = play.hears().await;
    assert_eq!(
        (&cancelled["method"], &cancelled["params"]["requestId"]),
        (&json!("notifications/cancelled"), &asked["id"])
    );
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_result_of_an_unknown_kind_is_no_result_for_a_client_that_knows_no_kinds() {
    let mut play = stateless(&json!({"tools": {}})).await;
    for kind in ["\"x/task\"", "7", "null"] {
        let relayed = play.relays(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
        let asked = play.hears().await;
        play.answers(&asked, &format!(r#"{{"resultType":{kind}}}"#)).await;
        let error = relayed.answered().await.unwrap_err();
        assert_eq!(error.to_string(), "server error -32603: the server returned a result of an unknown type");
    }
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_of_a_session_is_answered_for_a_server_that_has_none() {
    let (mut play, first) = telling().await;
    let answered = async |play: &Play, method: &str, params: Value| {
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
        let answer = play.relays(1, 1, &request).answered().await.unwrap().unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        if answer["error"].is_null() { answer["result"].clone() } else { answer["error"]["code"].clone() }
    };
    assert_eq!(answered(&play, "ping", json!({})).await, json!({}));
    assert_eq!(answered(&play, "logging/setLevel", json!({"level": "warning"})).await, json!({}));
    assert_eq!(answered(&play, "logging/setLevel", json!({"level": "loud"})).await, json!(-32602));
    let relayed = play.relays(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    let asked = play.hears().await;
    assert_eq!(asked["params"]["_meta"]["io.modelcontextprotocol/logLevel"], "warning");
    play.answers(&asked, "{}").await;
    relayed.answered().await.unwrap();

    // Another stream has the place of the first, which is ended when that is there.
    assert_eq!(first["params"]["notifications"], json!({"toolsListChanged": true}));
    assert_eq!(answered(&play, "resources/subscribe", json!({"uri": "file:///a"})).await, json!({}));
    let second = listens(&mut play).await;
    let wanted = json!({"toolsListChanged": true, "resourceSubscriptions": ["file:///a"]});
    assert_eq!(second["params"]["notifications"], wanted);
    let ended = play.hears().await;
    assert_eq!((&ended["method"], &ended["params"]["requestId"]), (&json!("notifications/cancelled"), &first["id"]));
    let updated = json!({"jsonrpc": "2.0", "method": "notifications/resources/updated",
        "params": {"uri": "file:///a", "_meta": {SUBSCRIPTION: second["id"]}}});
    play.says(&updated.to_string()).await;
    let Told::Heard(cause, text) = play.told().await else { panic!("it is not heard") };
    let heard: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(cause, MessageCause::NoCall);
    assert_eq!(heard["params"], json!({"uri": "file:///a"}), "the number is ours");
    assert_eq!(answered(&play, "resources/unsubscribe", json!({"uri": "file:///a"})).await, json!({}));
    let third = listens(&mut play).await;
    assert_eq!(third["params"]["notifications"], json!({"toolsListChanged": true}));
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_without_subscriptions_has_none_for_a_sessions_client_either() {
    let mut play = stateless(&json!({"tools": {}})).await;
    let subscribe = r#"{"jsonrpc":"2.0","id":1,"method":"resources/subscribe","params":{"uri":"a:b"}}"#;
    let answer = play.relays(1, 1, subscribe).answered().await.unwrap().unwrap();
    assert!(answer.contains("-32601"), "{answer}");
    // And nothing that a client tells its session comes to it.
    let words = RpcMessage::parse(r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#.into()).unwrap();
    play.runtime.notify(&play.id, words).unwrap();
    let relayed = play.relays(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    let asked = play.hears().await;
    assert_eq!(asked["method"], "x/y");
    play.answers(&asked, "{}").await;
    relayed.answered().await.unwrap();
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_changes_is_heard_on_the_stream_and_read() {
    let (mut play, stream) = telling().await;
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed",
        "params": {"_meta": {SUBSCRIPTION: stream["id"], "x": 1}}});
    play.says(&changed.to_string()).await;
    let Told::Heard(MessageCause::NoCall, text) = play.told().await else { panic!("it is not heard") };
    let heard: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(heard["params"], json!({"_meta": {"x": 1}}));
    let list = play.hears().await;
    assert_eq!(list["method"], "tools/list");
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_is_asked_for_again_and_what_was_missed_is_read() {
    for ending in ["result", "cancelled", "error"] {
        let (mut play, stream) = telling().await;
        let began = Instant::now();
        match ending {
            "result" => play.answers(&stream, "{}").await,
            "error" => play.refuses(&stream, -32603).await,
            _ => {
                let params = json!({"requestId": stream["id"]});
                let words = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params});
                play.says(&words.to_string()).await;
            }
        }
        let again = listens(&mut play).await;
        assert!(began.elapsed() >= Duration::from_millis(900), "not at once");
        assert_ne!(again["id"], stream["id"]);
        assert_eq!(play.hears().await["method"], "tools/list", "{ending}");
        play.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_knows_no_streams_is_not_asked_for_one_again() {
    let (mut play, stream) = telling().await;
    play.refuses(&stream, -32601).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let relayed = play.relays(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    assert_eq!(play.hears().await["method"], "x/y");
    relayed.drop();
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_of_a_server_without_sessions_is_answered_by_nobody() {
    let mut play = stateless(&json!({"tools": {}})).await;
    play.says(r#"{"jsonrpc":"2.0","id":9,"method":"roots/list"}"#).await;
    let relayed = play.relays(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    assert_eq!(play.hears().await["method"], "x/y", "there is no way to answer it");
    assert_eq!(play.runtime.status(&play.id).unwrap().counters.malformed(), 1);
    relayed.drop();
    play.end().await;
}
