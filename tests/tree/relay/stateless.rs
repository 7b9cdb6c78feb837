//! Stateless servers with clients of both eras: translation, relaying and subscription streams.

use mcp_satellite_actors::audience::MessageCause;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::rpc::RpcMessage;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use super::eras::{VERSION, online_stateless, started_stateless};
use super::support::{AudienceEvent, ScriptedServer};

const LISTEN: &str = "subscriptions/listen";
const SUBSCRIPTION: &str = "io.modelcontextprotocol/subscriptionId";

/// Receives the next request for a stream and acknowledges it.
async fn accept_listen(server: &mut ScriptedServer) -> Value {
    let listen = server.receive().await;
    assert_eq!((&listen["method"], &listen["params"]["_meta"][VERSION]), (&json!(LISTEN), &json!("2026-07-28")));
    let (id, wanted) = (&listen["id"], &listen["params"]["notifications"]);
    let params = json!({"notifications": wanted, "_meta": {SUBSCRIPTION: id}});
    let confirmed = json!({"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged", "params": params});
    server.send(&confirmed.to_string()).await;
    listen
}

/// Brings a server with change notifications online and returns the request for its first stream.
async fn online_with_stream() -> (ScriptedServer, Value) {
    let capabilities = json!({"tools": {"listChanged": true}, "resources": {"subscribe": true}, "logging": {}});
    let mut server = started_stateless(&capabilities).await;
    let mut rest = Vec::new();
    let mut stream = None;
    // The requests for the lists and for the stream come in any order.
    while rest.len() < 4 {
        let asked = server.receive().await;
        match asked["method"].as_str().unwrap() {
            LISTEN => {
                let (id, wanted) = (&asked["id"], &asked["params"]["notifications"]);
                let params = json!({"notifications": wanted, "_meta": {SUBSCRIPTION: id}});
                let method = "notifications/subscriptions/acknowledged";
                server.send(&json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string()).await;
                stream = Some(asked.clone());
            }
            "tools/list" => server.respond_with_tools(&asked).await,
            "resources/list" => server.respond(&asked, r#"{"resources":[]}"#).await,
            "resources/templates/list" => server.respond(&asked, r#"{"resourceTemplates":[]}"#).await,
            other => panic!("unexpected request: {other}"),
        }
        rest.push(asked);
    }
    server.until_online().await;
    (server, stream.unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_request_of_a_session_client_gains_the_stateless_envelope_and_loses_nothing() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let call = r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work","_meta":{"progressToken":"p","a/b":[1e400]},"big":98765432109876543210},"unknown":true}"#;
    let relayed = server.relay(1, 7, call);
    let line = server.receive_line().await;
    let sent = RpcMessage::parse(line.clone().into()).unwrap();
    let server_id = sent.id().unwrap().to_owned();
    assert_eq!(sent.token(), Some(&*server_id), "{line}");
    for kept in
        [r#""a/b":[1e400]"#, r#""big":98765432109876543210"#, r#""unknown":true"#, r#""name":"work""#, "\"2026-07-28\""]
    {
        assert_eq!(line.matches(kept).count(), 1, "{kept} in {line}");
    }
    server
        .send(&format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{server_id},"progress":1}}}}"#
        ))
        .await;
    let AudienceEvent::Progress(_, text) = server.audience_event().await else {
        panic!("the audience got no progress")
    };
    assert!(text.contains(r#""progressToken":"p""#), "{text}");
    let answer =
        format!(r#"{{"jsonrpc":"2.0","id":{server_id},"result":{{"resultType":"complete","content":[],"ttlMs":7}}}}"#);
    server.send(&answer).await;
    assert_eq!(relayed.response().await, Ok(Some(answer)));

    // A request without params gets them.
    let relayed = server.relay(1, 8, r#"{"jsonrpc":"2.0","id":1,"method":"x/bare"}"#);
    let bare = server.receive().await;
    assert_eq!(bare["params"]["_meta"][VERSION], "2026-07-28");
    server.respond(&bare, "{}").await;
    relayed.response().await.unwrap();
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn requests_and_responses_of_stateless_clients_pass_unchanged() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let call = r#"{"jsonrpc":"2.0","id":"its-own","method":"tools/call","params":{"name":"work","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{"x":1e400}}}}"#;
    for result in [
        r#"{"resultType":"input_required","requestState":"s","inputRequests":{"a":{"method":"roots/list"}}}"#,
        r#"{"resultType":"x/unheard-of","y":1e400}"#,
        r#"{"content":[]}"#,
    ] {
        let relayed = server.relay_as(Era::Stateless, 1, 7, call, None);
        let line = server.receive_line().await;
        let server_id = RpcMessage::parse(line.clone().into()).unwrap().id().unwrap().to_owned();
        assert_eq!(line.replace(&format!("\"id\":{server_id}"), "\"id\":\"its-own\""), call);
        let answer = format!(r#"{{"jsonrpc":"2.0","id":{server_id},"result":{result}}}"#);
        server.send(&answer).await;
        assert_eq!(relayed.response().await, Ok(Some(answer)));
    }
    // Over a pipe, the stateless era cancels with the same notification as sessions.
    let relayed = server.relay_as(Era::Stateless, 1, 8, call, None);
    let asked = server.receive_lossy().await;
    relayed.abandon();
    let cancelled = server.receive().await;
    assert_eq!(
        (&cancelled["method"], &cancelled["params"]["requestId"]),
        (&json!("notifications/cancelled"), &asked["id"])
    );
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_result_of_an_unknown_type_is_an_error_for_a_session_client() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    for kind in ["\"x/task\"", "7", "null"] {
        let relayed = server.relay(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
        let asked = server.receive().await;
        server.respond(&asked, &format!(r#"{{"resultType":{kind}}}"#)).await;
        let error = relayed.response().await.unwrap_err();
        assert_eq!(error.to_string(), "server error -32603: the server returned a result of an unknown type");
    }
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn session_requests_are_answered_on_behalf_of_a_stateless_server() {
    let (mut server, first) = online_with_stream().await;
    let response_to = async |server: &ScriptedServer, method: &str, params: Value| {
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
        let answer = server.relay(1, 1, &request).response().await.unwrap().unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        if answer["error"].is_null() { answer["result"].clone() } else { answer["error"]["code"].clone() }
    };
    assert_eq!(response_to(&server, "ping", json!({})).await, json!({}));
    assert_eq!(response_to(&server, "logging/setLevel", json!({"level": "warning"})).await, json!({}));
    assert_eq!(response_to(&server, "logging/setLevel", json!({"level": "loud"})).await, json!(-32602));
    let relayed = server.relay(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    let asked = server.receive().await;
    assert_eq!(asked["params"]["_meta"]["io.modelcontextprotocol/logLevel"], "warning");
    server.respond(&asked, "{}").await;
    relayed.response().await.unwrap();

    // Another stream replaces the first, which is cancelled when the other is acknowledged.
    assert_eq!(first["params"]["notifications"], json!({"toolsListChanged": true}));
    assert_eq!(response_to(&server, "resources/subscribe", json!({"uri": "file:///a"})).await, json!({}));
    let second = accept_listen(&mut server).await;
    let wanted = json!({"toolsListChanged": true, "resourceSubscriptions": ["file:///a"]});
    assert_eq!(second["params"]["notifications"], wanted);
    let ended = server.receive().await;
    assert_eq!((&ended["method"], &ended["params"]["requestId"]), (&json!("notifications/cancelled"), &first["id"]));
    let updated = json!({"jsonrpc": "2.0", "method": "notifications/resources/updated",
        "params": {"uri": "file:///a", "_meta": {SUBSCRIPTION: second["id"]}}});
    server.send(&updated.to_string()).await;
    let AudienceEvent::Notification(cause, text) = server.audience_event().await else {
        panic!("the audience got no notification")
    };
    let forwarded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(cause, MessageCause::NoCall);
    assert_eq!(forwarded["params"], json!({"uri": "file:///a"}), "the subscription id is removed");
    assert_eq!(response_to(&server, "resources/unsubscribe", json!({"uri": "file:///a"})).await, json!({}));
    let third = accept_listen(&mut server).await;
    assert_eq!(third["params"]["notifications"], json!({"toolsListChanged": true}));
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_subscription_to_a_server_without_subscriptions_is_rejected() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    let subscribe = r#"{"jsonrpc":"2.0","id":1,"method":"resources/subscribe","params":{"uri":"a:b"}}"#;
    let answer = server.relay(1, 1, subscribe).response().await.unwrap().unwrap();
    assert!(answer.contains("-32601"), "{answer}");
    // Notifications of session clients are not forwarded.
    let notification =
        RpcMessage::parse(r#"{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}"#.into()).unwrap();
    server.runtime.notify(&server.id, notification).unwrap();
    let relayed = server.relay(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    let asked = server.receive().await;
    assert_eq!(asked["method"], "x/y");
    server.respond(&asked, "{}").await;
    relayed.response().await.unwrap();
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_list_change_on_the_stream_is_forwarded_and_read() {
    let (mut server, stream) = online_with_stream().await;
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed",
        "params": {"_meta": {SUBSCRIPTION: stream["id"], "x": 1}}});
    server.send(&changed.to_string()).await;
    let AudienceEvent::Notification(MessageCause::NoCall, text) = server.audience_event().await else {
        panic!("the audience got no notification")
    };
    let forwarded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(forwarded["params"], json!({"_meta": {"x": 1}}));
    let list = server.receive().await;
    assert_eq!(list["method"], "tools/list");
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn an_ended_stream_is_reopened_and_the_lists_are_read_again() {
    for ending in ["result", "cancelled", "error"] {
        let (mut server, stream) = online_with_stream().await;
        let began = Instant::now();
        match ending {
            "result" => server.respond(&stream, "{}").await,
            "error" => server.reject(&stream, -32603).await,
            _ => {
                let params = json!({"requestId": stream["id"]});
                let notification = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params});
                server.send(&notification.to_string()).await;
            }
        }
        let again = accept_listen(&mut server).await;
        assert!(began.elapsed() >= Duration::from_millis(900), "the stream was reopened without a delay");
        assert_ne!(again["id"], stream["id"]);
        assert_eq!(server.receive().await["method"], "tools/list", "{ending}");
        server.shut_down().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_know_streams_is_asked_only_once() {
    let (mut server, stream) = online_with_stream().await;
    server.reject(&stream, -32601).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let relayed = server.relay(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    assert_eq!(server.receive().await["method"], "x/y");
    relayed.abandon();
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_of_a_stateless_server_gets_no_response() {
    let mut server = online_stateless(&json!({"tools": {}})).await;
    server.send(r#"{"jsonrpc":"2.0","id":9,"method":"roots/list"}"#).await;
    let relayed = server.relay(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/y"}"#);
    assert_eq!(server.receive().await["method"], "x/y", "no response to the request of the server");
    assert_eq!(server.runtime.status(&server.id).unwrap().counters.malformed(), 1);
    relayed.abandon();
    server.shut_down().await;
}
