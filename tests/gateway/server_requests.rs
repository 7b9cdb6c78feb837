//! Requests and notifications of a server with one client and with several, and the subscriptions, levels and roots of
//! clients that share one session of a server.

use std::process::Stdio;

use mcp_satellite::actors::model::spec::ProcessLifetime;
use mcp_satellite::actors::model::status::Status;
use serde_json::{Value, json};
use testkit::wait::GIVE_UP;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Duration, timeout};

use super::client::{Client, StatelessClient, notification, request};
use super::whole_satellite::{DONE, Server, SessionClient, TestSatellite, example, initialize_request, say};

fn server_request(method: &str) -> String {
    request("q", method, json!({"x": 1})).to_string()
}

fn result(id: &Value, result: Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string()
}

/// The message that the mirror received, from its notification to all clients.
fn mirrored(received: &Value) -> &Value {
    assert_eq!(received["method"], "notifications/mirrored", "{received}");
    &received["params"]["reflected"]
}

async fn satellite_with_client(server: Server, capabilities: Value) -> (TestSatellite, SessionClient) {
    let satellite = TestSatellite::start().await;
    satellite.online(server).await;
    let client = satellite.client("mirror", capabilities).await;
    (satellite, client)
}

/// The level and subscription requests that the server received since the last look: method and level or URI.
async fn recorded_requests(client: &mut SessionClient) -> Vec<(String, String)> {
    // Notifications may precede the response.
    let messages = client.stream(&request(77, "mirror/told", json!({})).to_string()).await;
    let answer: Value = serde_json::from_str(messages.last().unwrap()).unwrap();
    let all = answer["result"]["told"].as_array().unwrap_or_else(|| panic!("{answer}"));
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let what = |params: &Value| word(if params["uri"].is_null() { &params["level"] } else { &params["uri"] });
    all.iter().map(|received| (word(&received["method"]), what(&received["params"]))).collect()
}

/// Waits until the server has received these requests.
async fn wait_for_requests(client: &mut SessionClient, expected: &[(&str, &str)]) {
    let expected: Vec<_> = expected.iter().map(|(method, what)| ((*method).to_owned(), (*what).to_owned())).collect();
    let mut all = Vec::new();
    let waiting = async {
        while all.len() < expected.len() {
            all.extend(recorded_requests(client).await);
        }
    };
    let outcome = timeout(GIVE_UP, waiting).await;
    assert_eq!((outcome.is_ok(), &all), (true, &expected));
}

async fn subscribe(client: &mut SessionClient, uri: &str) -> Value {
    client.call(50, "resources/subscribe", json!({"uri": uri})).await
}

async fn unsubscribe(client: &mut SessionClient, uri: &str) -> Value {
    client.call(51, "resources/unsubscribe", json!({"uri": uri})).await
}

fn updated(uri: &str) -> String {
    notification("notifications/resources/updated", json!({"uri": uri})).to_string()
}

fn logged(level: &str) -> String {
    notification("notifications/message", json!({"level": level, "data": level})).to_string()
}

fn was_forwarded(answer: &Value) -> bool {
    assert!(answer["error"].is_null(), "{answer}");
    !answer["result"]["reflected"].is_null()
}

#[tokio::test]
async fn a_server_request_reaches_the_caller_and_the_response_reaches_the_server() {
    let everything = json!({"sampling": {}, "elicitation": {}, "roots": {}});
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), everything).await;
    let mut other = satellite.client("mirror", json!({"sampling": {}, "elicitation": {}, "roots": {}})).await;
    for method in ["sampling/createMessage", "elicitation/create", "roots/list", "x/unknown"] {
        let messages = client.say(1, &[&server_request(method), DONE]).await;
        let question: Value = serde_json::from_str(&messages[0]).unwrap();
        assert_eq!((&question["method"], &question["params"]), (&json!(method), &json!({"x": 1})));
        client.send(&result(&question["id"], json!({"by": method}))).await;
        for client in [&mut client, &mut other] {
            let received = client.next_json().await;
            assert_eq!(*mirrored(&received), json!({"jsonrpc": "2.0", "id": "q", "result": {"by": method}}));
        }
    }
    satellite.end().await;
}

#[tokio::test]
async fn a_server_request_without_client_capability_is_answered_with_an_error() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({"elicitation": {}})).await;
    let mut other = satellite.client("mirror", json!({"sampling": {}, "roots": {}})).await;
    for method in ["sampling/createMessage", "roots/list"] {
        let messages = client.say(1, &[&server_request(method), DONE]).await;
        // The mirror reports the error to all clients, possibly before the response.
        let is_asked = |message: &String| serde_json::from_str::<Value>(message).unwrap()["method"] == method;
        assert!(!messages.iter().any(is_asked), "{messages:?}");
        let received = other.next_json().await;
        let why = format!("the client does not support `{method}`");
        assert_eq!(mirrored(&received)["error"], json!({"code": -32603, "message": why}));
    }
    satellite.end().await;
}

#[tokio::test]
async fn an_unsolicited_server_request_reaches_the_only_capable_client() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({"sampling": {}})).await;
    let mut other = satellite.client("mirror", json!({"elicitation": {}})).await;
    let mut bystander = satellite.client("mirror", json!({})).await;
    bystander.say_without_call(&[&server_request("sampling/createMessage")]).await;
    let question = client.next_json().await;
    assert_eq!(question["method"], "sampling/createMessage");
    client.send(&result(&question["id"], json!({"model": "m"}))).await;
    assert_eq!(mirrored(&other.next_json().await)["result"], json!({"model": "m"}));
    client.next_message().await;

    // With two capable clients the request is ambiguous; without one it fails.
    let mut third = satellite.client("mirror", json!({"sampling": {}})).await;
    for (method, why) in [
        (
            "sampling/createMessage",
            "2 clients are attached that could answer, and the request does not identify one of them",
        ),
        ("x/unknown", "4 clients are attached that could answer, and the request does not identify one of them"),
    ] {
        bystander.say_without_call(&[&server_request(method)]).await;
        for client in [&mut client, &mut other, &mut third] {
            assert_eq!(mirrored(&client.next_json().await)["error"]["message"], why);
        }
    }
    client.end_session().await;
    third.end_session().await;
    bystander.say_without_call(&[&server_request("sampling/createMessage")]).await;
    let refused = other.next_json().await;
    assert_eq!(mirrored(&refused)["error"]["message"], "no client is attached that could answer");
    satellite.end().await;
}

#[tokio::test]
async fn roots_list_is_answered_with_no_roots_only_if_no_client_has_roots() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({})).await;
    let mut bystander = satellite.client("mirror", json!({})).await;
    bystander.say_without_call(&[&server_request("roots/list")]).await;
    assert_eq!(mirrored(&client.next_json().await)["result"], json!({"roots": []}));
    client.say(1, &[&server_request("roots/list"), DONE]).await;
    assert_eq!(mirrored(&client.next_json().await)["result"], json!({"roots": []}));

    // The first client with roots is announced. With two, `roots/list` is ambiguous.
    let first = satellite.client("mirror", json!({"roots": {}})).await;
    assert_eq!(mirrored(&client.next_json().await)["method"], "notifications/roots/list_changed");
    let second = satellite.client("mirror", json!({"roots": {}})).await;
    bystander.say_without_call(&[&server_request("roots/list")]).await;
    let why = "2 clients are attached that could answer, and the request does not identify one of them";
    assert_eq!(mirrored(&client.next_json().await)["error"], json!({"code": -32603, "message": why}));

    // It is ambiguous during calls of two clients, too.
    let mut waiting = bystander.posts.second_connection().await;
    waiting.open("POST", &[], &say(8, &[&notification("notifications/here", json!({})).to_string()])).await;
    while waiting.event().await.unwrap().data.is_empty() {}
    client.say(1, &[&server_request("roots/list"), DONE]).await;
    let why = "calls of 2 clients are in progress, and the request does not identify one of them";
    let received = timeout(GIVE_UP, waiting.event()).await.unwrap().unwrap().json();
    assert_eq!(mirrored(&received)["error"], json!({"code": -32603, "message": why}));

    first.end_session().await;
    second.end_session().await;
    client.say(1, &[&server_request("roots/list"), DONE]).await;
    let received = timeout(GIVE_UP, waiting.event()).await.unwrap().unwrap().json();
    assert_eq!(mirrored(&received)["result"], json!({"roots": []}));
    satellite.end().await;
}

#[tokio::test]
async fn a_stdio_server_request_during_calls_of_two_clients_reaches_neither() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({"sampling": {}})).await;
    let mut other = satellite.client("mirror", json!({"sampling": {}})).await;
    let waits = say(1, &[&notification("notifications/here", json!({})).to_string()]);
    client.posts.open("POST", &[], &waits).await;
    while client.posts.event().await.unwrap().data.is_empty() {}
    let messages = other.say(1, &[&server_request("sampling/createMessage"), DONE]).await;
    let refusal = "calls of 2 clients are in progress, and the request does not identify one of them";
    assert!(messages.iter().all(|message| !message.contains("sampling/createMessage")), "{messages:?}");
    // The mirror reports the error during the only remaining call.
    let received = timeout(GIVE_UP, client.posts.event()).await.unwrap().unwrap().json();
    assert_eq!(mirrored(&received)["error"]["message"], refusal);
    satellite.end().await;
}

/// The HTTP server of the example `conformance`.
struct ConformanceServer {
    url: String,
    _process: Child,
}

impl ConformanceServer {
    async fn start() -> Self {
        let mut command = Command::new(example("conformance"));
        let command = command.arg("127.0.0.1:0").stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let url = timeout(GIVE_UP, lines.next_line()).await.expect("no URL in time").unwrap().unwrap();
        Self { url, _process: process }
    }
}

#[tokio::test]
async fn an_http_server_request_reaches_the_client_of_its_call() {
    let fixture = ConformanceServer::start().await;
    let satellite = TestSatellite::start().await;
    satellite.online(Server::remote("fixture", &fixture.url)).await;
    let mut clients = Vec::new();
    for prompt in ["one", "two"] {
        let mut client = satellite.client("fixture", json!({"sampling": {}})).await;
        let call = request(5, "tools/call", json!({"name": "test_sampling", "arguments": {"prompt": prompt}}));
        client.posts.open("POST", &[], &call.to_string()).await;
        assert_eq!(client.posts.event().await.unwrap().data, "");
        let question = timeout(GIVE_UP, client.posts.event()).await.expect("no server request in time").unwrap().json();
        assert_eq!(question["method"], "sampling/createMessage");
        assert_eq!(question["params"]["messages"][0]["content"]["text"], prompt);
        clients.push((prompt, client, question["id"].clone()));
    }
    // The clients answer in reverse order.
    for (prompt, client, id) in clients.iter_mut().rev() {
        let content = json!({"type": "text", "text": format!("answer to {prompt}")});
        let mut answers = client.posts.second_connection().await;
        let answer = result(id, json!({"role": "assistant", "model": "m", "content": content}));
        assert_eq!(answers.ask("POST", &[], &answer).await.head.status, 202);
        let answer = timeout(GIVE_UP, client.posts.event()).await.expect("no response in time").unwrap().json();
        assert_eq!(answer["result"]["content"][0]["text"], format!("LLM response: answer to {prompt}"));
    }
    satellite.end().await;
}

#[tokio::test]
async fn only_progress_on_an_open_server_request_reaches_the_server() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({"sampling": {}})).await;
    let asks = request("q", "sampling/createMessage", json!({"_meta": {"progressToken": "theirs"}})).to_string();
    let messages = client.say(1, &[&asks, DONE]).await;
    let question: Value = serde_json::from_str(&messages[0]).unwrap();
    let progress = |token: &Value| {
        notification("notifications/progress", json!({"progressToken": token, "progress": 1})).to_string()
    };
    for token in [json!("theirs"), json!(99), json!("q")] {
        client.send(&progress(&token)).await;
    }
    // No request with this id is open, so the cancellation is not forwarded either.
    client.send(&notification("notifications/cancelled", json!({"requestId": 1})).to_string()).await;
    client.send(&progress(&question["params"]["_meta"]["progressToken"])).await;
    let received = client.next_json().await;
    assert_eq!(mirrored(&received)["params"], json!({"progressToken": "theirs", "progress": 1}));
    // After the response, progress is not forwarded any more.
    client.send(&result(&question["id"], json!({}))).await;
    assert_eq!(mirrored(&client.next_json().await)["id"], "q");
    client.send(&progress(&question["params"]["_meta"]["progressToken"])).await;
    client.send(&notification("notifications/last", json!({})).to_string()).await;
    assert_eq!(mirrored(&client.next_json().await)["method"], "notifications/last");
    satellite.end().await;
}

#[tokio::test]
async fn a_cancelled_server_request_is_cancelled_at_the_client() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({"elicitation": {}})).await;
    let back = notification("notifications/cancelled", json!({"requestId": "q", "reason": "r"})).to_string();
    let messages = client.say(1, &[&server_request("elicitation/create"), &back, DONE]).await;
    let [question, back] = [&messages[0], &messages[1]].map(|message| serde_json::from_str::<Value>(message).unwrap());
    assert_eq!(back["params"], json!({"requestId": question["id"], "reason": "r"}));
    // A late response is dropped.
    client.send(&result(&question["id"], json!({}))).await;
    client.send(&notification("notifications/last", json!({})).to_string()).await;
    assert_eq!(mirrored(&client.next_json().await)["method"], "notifications/last");
    satellite.end().await;
}

#[tokio::test]
async fn a_server_request_ends_with_its_client_and_with_its_server() {
    let (satellite, client) = satellite_with_client(Server::mirror("mirror"), json!({"elicitation": {}})).await;
    let id = satellite.runtime.snapshot().iter().next().unwrap().spec.id.clone();
    let mut other = satellite.client("mirror", json!({})).await;
    let mut asks = client;
    asks.say(1, &[&server_request("elicitation/create"), DONE]).await;
    asks.end_session().await;
    let refused = other.next_json().await;
    assert_eq!(mirrored(&refused)["error"]["message"], "no client is attached that could answer");

    let mut client = satellite.client("mirror", json!({"elicitation": {}})).await;
    let messages = client.say(1, &[&server_request("elicitation/create"), DONE]).await;
    let question: Value = serde_json::from_str(&messages[0]).unwrap();
    satellite.kill(&id).await;
    let received = client.next_json().await;
    assert_eq!(received["method"], "notifications/cancelled");
    assert_eq!(received["params"]["requestId"], question["id"]);
    satellite.end().await;
}

/// A server that sends `roots/list` right after the handshake and reports every line that it reads.
const ASKS_EARLY: &str = r#"
        read -r line; id=${line#*\"id\":}; id=${id%%,*}
        printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"sh","version":"1"}}}\n' "$id"
        read -r initialized
        printf '{"jsonrpc":"2.0","id":"early","method":"roots/list"}\n'
        while read -r line; do
            case $line in
            *tools/list*) id=${line#*\"id\":}; id=${id%%,*}; printf '{"jsonrpc":"2.0","id":%s,"result":{"tools":[]}}\n' "$id" ;;
            *) printf '{"jsonrpc":"2.0","method":"notifications/read","params":%s}\n' "$line"
               case $line in *roots/list_changed*) printf '{"jsonrpc":"2.0","id":"again","method":"roots/list"}\n' ;; esac ;;
            esac
        done"#;

#[tokio::test]
async fn a_client_of_a_combined_view_with_roots_triggers_roots_list_changed() {
    for path in ["/mcp?mode=flat", "/mcp"] {
        let satellite = TestSatellite::start().await;
        satellite.online(Server::command("asks", "/bin/sh", &["-c", ASKS_EARLY])).await;
        let mut bystander = satellite.client("asks", json!({})).await;
        // The server reads this after it has sent its request.
        bystander.send(&notification("notifications/first", json!({})).to_string()).await;
        while bystander.next_json().await["params"]["method"] != "notifications/first" {}
        let mut posts = Client::connect(satellite.address).await;
        path.clone_into(&mut posts.path);
        let mut client = SessionClient::connect(posts, json!({"roots": {}})).await;
        let question = client.next_json().await;
        assert_eq!(question["method"], "roots/list", "{path}");
        client.send(&result(&question["id"], json!({"roots": [{"uri": "file:///a"}]}))).await;
        assert_eq!(bystander.next_json().await["params"]["method"], "notifications/roots/list_changed");
        assert_eq!(bystander.next_json().await["params"]["result"], json!({"roots": [{"uri": "file:///a"}]}));
        satellite.end().await;
    }
}

#[tokio::test]
async fn only_the_first_client_with_roots_triggers_roots_list_changed() {
    let satellite = TestSatellite::start().await;
    satellite.online(Server::command("asks", "/bin/sh", &["-c", ASKS_EARLY])).await;
    let mut bystander = satellite.client("asks", json!({})).await;
    bystander.send(&notification("notifications/first", json!({})).to_string()).await;
    let mut read = bystander.next_json().await;
    if read["params"]["id"] == "early" {
        // The response without roots may arrive only now.
        read = bystander.next_json().await;
    }
    // A client without roots triggers nothing.
    assert_eq!(read["params"]["method"], "notifications/first");
    let mut first = satellite.client("asks", json!({"roots": {}})).await;
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"});
    for client in [&mut bystander, &mut first] {
        assert_eq!(client.next_json().await["params"], changed);
    }
    let question = first.next_json().await;
    assert_eq!(question["method"], "roots/list");
    first.send(&result(&question["id"], json!({"roots": [{"uri": "file:///a"}]}))).await;
    let answer = bystander.next_json().await;
    assert_eq!(answer["params"]["result"], json!({"roots": [{"uri": "file:///a"}]}));
    // A second client with roots triggers nothing.
    let mut second = satellite.client("asks", json!({"roots": {}})).await;
    second.send(&notification("notifications/last", json!({})).to_string()).await;
    assert_eq!(bystander.next_json().await["params"]["method"], "notifications/last");
    satellite.end().await;
}

#[tokio::test]
async fn notifications_of_a_call_reach_its_client_and_shared_ones_reach_all() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({})).await;
    let mut other = satellite.client("mirror", json!({})).await;
    let own = notification("notifications/own", json!({})).to_string();
    let list = notification("notifications/tools/list_changed", json!({})).to_string();
    let messages = client.say(1, &[&own, &logged("info"), &updated("a"), &list, DONE]).await;
    assert_eq!(messages.len(), 5, "{messages:?}");
    assert_eq!(other.next_message().await, list);
    // Each message arrives once and in order.
    other.send(&notification("notifications/last", json!({})).to_string()).await;
    assert_eq!(mirrored(&other.next_json().await)["method"], "notifications/last");
    assert_eq!(mirrored(&client.next_json().await)["method"], "notifications/last");

    // Notifications without a call reach all clients.
    let mut bystander = satellite.client("mirror", json!({})).await;
    bystander.say_without_call(&[&own, &logged("info"), &updated("a"), &list]).await;
    for client in [&mut client, &mut other] {
        for expected in [&own, &logged("info"), &updated("a"), &list] {
            assert_eq!(client.next_message().await, *expected);
        }
    }
    satellite.end().await;
}

#[tokio::test]
async fn a_meta_tool_call_does_not_withhold_notifications_from_instance_clients() {
    let (own, status, complete) = (
        r#"{"jsonrpc":"2.0","method":"notifications/own"}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/tasks/status"}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/elicitation/complete"}"#,
    );
    let script = r#"
        while read -r line; do
            id=${line#*\"id\":}; id=${id%%,*}
            case $line in
            *initialize\"*) printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}}\n' "$id" ;;
            *tools/list*) printf '{"jsonrpc":"2.0","id":%s,"result":{"tools":[{"name":"say","inputSchema":{"type":"object"}}]}}\n' "$id" ;;
            *tools/call*) printf '%s\n' "$@"; printf '{"jsonrpc":"2.0","id":%s,"result":{"content":[]}}\n' "$id" ;;
            esac
        done"#;
    let satellite = TestSatellite::start().await;
    satellite.online(Server::command("says", "/bin/sh", &["-c", script, "sh", own, status, complete])).await;
    let (mut client, mut other) =
        (satellite.client("says", json!({})).await, satellite.client("says", json!({})).await);
    let mut everywhere = satellite.connect("says").await;
    "/mcp".clone_into(&mut everywhere.path);
    let mut everywhere = SessionClient::connect(everywhere, json!({})).await;
    let call = request(1, "tools/call", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "says:say"}}));
    assert_eq!(everywhere.stream(&call.to_string()).await[..3], [own, status, complete]);
    for client in [&mut client, &mut other] {
        for expected in [own, status, complete] {
            assert_eq!(client.next_message().await, expected);
        }
    }
    // Of the notifications during a call, other clients get only the shared ones.
    let messages = client.stream(&request(1, "tools/call", json!({"name": "say"})).to_string()).await;
    assert_eq!(messages[..3], [own, status, complete]);
    for expected in [status, complete] {
        assert_eq!(other.next_message().await, expected);
    }
    satellite.end().await;
}

#[tokio::test]
async fn subscriptions_are_limited_in_number_and_uri_length() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({})).await;
    let mut other = satellite.client("mirror", json!({})).await;
    let longest = "x".repeat(8 * 1024);
    assert!(was_forwarded(&subscribe(&mut client, &longest).await));
    let refused = subscribe(&mut client, &format!("{longest}x")).await;
    assert_eq!(refused["error"]["code"], -32602, "{refused}");
    assert_eq!(refused["error"]["data"], json!({"kind": "subscription_uri", "limit": 8192}));
    for number in 1..1024 {
        assert!(was_forwarded(&subscribe(&mut client, &format!("test://{number}")).await));
    }
    assert_eq!(recorded_requests(&mut client).await.len(), 1024);
    // The limit holds for unusual spellings, too.
    for params in [r#"{"uri":"test://more"}"#, r#"{"\ud800":1,"uri":"a","uri":"test://more"}"#] {
        let more = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"resources/subscribe","params":{params}}}"#);
        let refused = client.ask(&more).await.json();
        assert_eq!(refused["error"]["code"], -32000, "{refused}");
        assert_eq!(refused["error"]["data"], json!({"kind": "subscriptions", "limit": 1024}));
    }
    assert_eq!(recorded_requests(&mut client).await, []);
    // An existing subscription may be repeated, and each client has its own limit.
    assert!(was_forwarded(&subscribe(&mut client, "test://1").await));
    assert!(was_forwarded(&subscribe(&mut other, "test://more").await));
    assert!(was_forwarded(&unsubscribe(&mut client, "test://1").await));
    assert!(!was_forwarded(&subscribe(&mut client, "test://more").await));
    satellite.end().await;
}

#[tokio::test]
async fn an_unsubscribe_waits_until_the_server_is_not_busy() {
    let busy = Server::mirror("mirror").policy(|policy| policy.session.calls_in_flight_max = 2);
    let (satellite, mut client) = satellite_with_client(busy, json!({})).await;
    let mut leaves = satellite.client("mirror", json!({})).await;
    assert!(was_forwarded(&subscribe(&mut leaves, "test://a").await));
    recorded_requests(&mut client).await;
    // Two open calls, identified by their progress, keep the server busy.
    let here = notification("notifications/progress", json!({"progressToken": "$token", "progress": 1})).to_string();
    let mut waiting = Vec::new();
    for id in [8, 9] {
        let mut posts = client.posts.second_connection().await;
        posts.open("POST", &[], &say(id, &[&here])).await;
        while posts.event().await.unwrap().data.is_empty() {}
        waiting.push((id, posts));
    }
    leaves.end_session().await;
    let refused = client.call(1, "x/busy", json!({})).await;
    assert_eq!(refused["error"]["data"]["kind"], "busy", "{refused}");
    for (id, mut posts) in waiting {
        client.send(&notification("notifications/cancelled", json!({"requestId": id})).to_string()).await;
        while posts.event().await.is_some() {}
    }
    wait_for_requests(&mut client, &[("resources/unsubscribe", "test://a")]).await;
    satellite.end().await;
}

#[tokio::test]
async fn the_first_subscriber_subscribes_and_the_last_one_unsubscribes() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({})).await;
    let (mut second, mut third) =
        (satellite.client("mirror", json!({})).await, satellite.client("mirror", json!({})).await);
    assert!(was_forwarded(&subscribe(&mut client, "test://a").await));
    assert!(!was_forwarded(&subscribe(&mut second, "test://a").await));
    assert!(was_forwarded(&subscribe(&mut third, "test://b").await));
    // Updates of resources are shared, whichever call they come with.
    let messages = third.say(1, &[&updated("test://a/sub"), DONE]).await;
    assert_eq!(messages.len(), 2, "{messages:?}");
    let mut bystander = satellite.client("mirror", json!({})).await;
    bystander.say_without_call(&[&updated("test://b"), &updated("test://a")]).await;
    assert_eq!(third.next_message().await, updated("test://b"));
    for client in [&mut client, &mut second] {
        assert_eq!(client.next_message().await, updated("test://a/sub"));
        assert_eq!(client.next_message().await, updated("test://a"));
    }
    assert!(!was_forwarded(&unsubscribe(&mut client, "test://a").await));
    let so_far = [("resources/subscribe", "test://a"), ("resources/subscribe", "test://b")];
    wait_for_requests(&mut client, &so_far).await;
    second.end_session().await;
    wait_for_requests(&mut client, &[("resources/unsubscribe", "test://a")]).await;
    assert!(was_forwarded(&unsubscribe(&mut third, "test://b").await));
    wait_for_requests(&mut client, &[("resources/unsubscribe", "test://b")]).await;
    satellite.end().await;
}

#[tokio::test]
async fn each_client_has_its_own_log_level_and_the_server_has_the_lowest() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({})).await;
    let (mut quiet, mut unset) =
        (satellite.client("mirror", json!({})).await, satellite.client("mirror", json!({})).await);
    let set = |level: &str| request(5, "logging/setLevel", json!({"level": level})).to_string();
    assert!(was_forwarded(&client.ask(&set("debug")).await.json()));
    assert!(!was_forwarded(&quiet.ask(&set("error")).await.json()));
    let mut bystander = satellite.client("mirror", json!({})).await;
    bystander.say_without_call(&[&logged("debug"), &logged("error")]).await;
    for client in [&mut client, &mut unset] {
        assert_eq!(client.next_message().await, logged("debug"));
        assert_eq!(client.next_message().await, logged("error"));
    }
    assert_eq!(quiet.next_message().await, logged("error"));
    // The level holds for its own calls, too.
    assert_eq!(quiet.say(1, &[&logged("info"), &logged("alert"), DONE]).await.len(), 2);
    // An unknown level is forwarded: the server rejects it.
    assert!(was_forwarded(&quiet.ask(&set("loud")).await.json()));
    wait_for_requests(&mut unset, &[("logging/setLevel", "debug"), ("logging/setLevel", "loud")]).await;
    client.end_session().await;
    wait_for_requests(&mut unset, &[("logging/setLevel", "error")]).await;
    satellite.end().await;
}

#[tokio::test]
async fn a_new_run_gets_the_log_level_and_the_subscriptions_again() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({})).await;
    let id = satellite.runtime.snapshot().iter().next().unwrap().spec.id.clone();
    let mut other = satellite.client("mirror", json!({})).await;
    subscribe(&mut client, "test://a").await;
    subscribe(&mut other, "test://a").await;
    subscribe(&mut other, "test://b").await;
    client.call(5, "logging/setLevel", json!({"level": "notice"})).await;
    recorded_requests(&mut client).await;
    satellite.kill(&id).await;
    let all =
        [("logging/setLevel", "notice"), ("resources/subscribe", "test://a"), ("resources/subscribe", "test://b")];
    wait_for_requests(&mut client, &all).await;
    // Subscriptions and level are the same as before.
    assert!(!was_forwarded(&subscribe(&mut other, "test://a").await));
    other.say_without_call(&[&logged("info"), &logged("notice")]).await;
    assert_eq!(client.next_message().await, logged("notice"));
    satellite.end().await;
}

#[tokio::test]
async fn a_server_with_a_subscriber_stays_awake_and_one_without_sleeps() {
    let satellite = TestSatellite::start().await;
    let short = |server: Server| {
        server.policy(|policy| {
            policy.idle.idle = Duration::from_millis(50);
            policy.idle.grace = Duration::from_millis(50);
            policy.idle.sweep = Duration::from_millis(10);
        })
    };
    let id = satellite.online(short(Server::mirror("mirror"))).await;
    let mut client = satellite.client("mirror", json!({})).await;
    assert!(was_forwarded(&subscribe(&mut client, "test://a").await));
    // Another server, idle for a shorter time, becomes dormant first.
    let other = satellite.online(short(Server::mirror("other"))).await;
    satellite.wait_until(&other, |view| view.dormant).await;
    assert!(!satellite.runtime.status(&id).unwrap().dormant);
    assert!(was_forwarded(&unsubscribe(&mut client, "test://a").await));
    satellite.wait_until(&id, |view| view.dormant).await;
    // Ending the session has the same effect as unsubscribing.
    assert!(was_forwarded(&subscribe(&mut client, "test://a").await));
    client.end_session().await;
    satellite.wait_until(&id, |view| view.dormant).await;
    satellite.end().await;
}

#[tokio::test]
async fn only_a_call_wakes_a_dormant_server() {
    let satellite = TestSatellite::start().await;
    let id = satellite.install(Server::mirror("mirror").lifetime(ProcessLifetime::Lazy)).await;
    satellite.wait_until(&id, |view| view.dormant && view.status == Status::Online && view.pid.is_none()).await;
    let restarts = satellite.runtime.status(&id).unwrap().initialized_at;
    let mut client = satellite.client("mirror", json!({"roots": {}})).await;
    assert_eq!(client.call(1, "ping", json!({})).await, json!({"jsonrpc": "2.0", "id": 1, "result": {}}));
    client.send(&notification("notifications/roots/list_changed", json!({})).to_string()).await;
    // `server/discover` and `subscriptions/listen` of a stateless client do not wake it either.
    let mut stateless = StatelessClient::connect(satellite.address, "/i/mirror/mcp").await;
    stateless.send("server/discover", json!({})).await;
    let head = stateless.client.head().await;
    assert!(stateless.client.body(&head).await.contains(r#""name":"mirror""#));
    stateless.open("subscriptions/listen", json!({"notifications": {"toolsListChanged": true}})).await;
    stateless.next_message().await.unwrap();
    let view = satellite.runtime.status(&id).unwrap();
    assert!(view.dormant && view.pid.is_none() && view.initialized_at == restarts);
    assert!(was_forwarded(&client.call(2, "tools/list", json!({})).await));
    assert!(satellite.runtime.status(&id).unwrap().pid.is_some());
    // An awake server answers the ping itself.
    assert_eq!(client.call(1, "ping", json!({})).await["result"], json!({}));
    satellite.end().await;
}

#[tokio::test]
async fn a_new_run_with_another_catalogue_sends_list_changed() {
    let satellite = TestSatellite::start().await;
    let id = satellite.online(Server::sim("sim", &["--tools", "3"])).await;
    let mut client = satellite.client("sim", json!({})).await;
    // A new run with the same catalogue sends nothing.
    satellite.kill(&id).await;
    satellite.update(Server::sim("sim", &["--tools", "4", "--prompts", "1"])).await;
    let mut methods = Vec::new();
    for _ in 0..2 {
        methods.push(client.next_json().await["method"].as_str().unwrap().to_owned());
    }
    assert_eq!(methods, ["notifications/tools/list_changed", "notifications/prompts/list_changed"]);
    let tools = client.call(1, "tools/list", json!({})).await;
    assert_eq!(tools["result"]["tools"].as_array().unwrap().len(), 4);
    satellite.end().await;
}

#[tokio::test]
async fn list_changed_from_a_new_run_is_sent_once() {
    // Each run lists another tool and sends `list_changed` before the satellite lists the tools.
    let script = r#"
        while read -r line; do
            id=${line#*\"id\":}; id=${id%%,*}
            case $line in
            *initialize\"*) printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}}\n' "$id" ;;
            *initialized*) printf '{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n' ;;
            *tools/list*) printf '{"jsonrpc":"2.0","id":%s,"result":{"tools":[{"name":"tool_%s","inputSchema":{"type":"object"}}]}}\n' "$id" "$$" ;;
            *) printf '{"jsonrpc":"2.0","method":"notifications/last"}\n' ;;
            esac
        done"#;
    let satellite = TestSatellite::start().await;
    let id = satellite
        .online(Server::command("changes", "/bin/sh", &["-c", script]).policy(|policy| policy.restart.max_crashes = 9))
        .await;
    let mut client = satellite.client("changes", json!({})).await;
    for _ in 0..3 {
        satellite.kill(&id).await;
        assert_eq!(client.next_json().await["method"], "notifications/tools/list_changed");
    }
    client.send(&notification("notifications/x", json!({})).to_string()).await;
    assert_eq!(client.next_json().await["method"], "notifications/last");
    satellite.end().await;
}

#[tokio::test]
async fn removing_an_instance_ends_its_sessions() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({})).await;
    let id = satellite.runtime.snapshot().iter().next().unwrap().spec.id.clone();
    satellite.uninstall(&id).await;
    assert_eq!(client.listens.event().await, None);
    assert_eq!(client.posts.post(&request(1, "ping", json!({}))).await.head.status, 404);
    assert_eq!(satellite.gateway.session_count(), 0);
    // A new instance of the same name has no sessions.
    satellite.online(Server::mirror("mirror")).await;
    assert_eq!(client.posts.post(&request(1, "ping", json!({}))).await.head.status, 404);
    client.posts.session = None;
    assert_eq!(client.posts.post(&initialize_request(json!({}))).await.head.status, 200);
    satellite.end().await;
}

/// The next response that the mirror received to its request `q`.
async fn mirrored_response(other: &mut SessionClient) -> Value {
    loop {
        let message = other.next_json().await;
        let reflected = &message["params"]["reflected"];
        if reflected["id"] == "q" {
            return reflected.clone();
        }
    }
}

#[tokio::test]
async fn a_server_request_after_900_notifications_arrives_without_loss() {
    let (satellite, mut client) = satellite_with_client(Server::mirror("mirror"), json!({"elicitation": {}})).await;
    let aside = notification("notifications/last", json!({})).to_string();
    let server_request = server_request("elicitation/create");
    let mut messages = vec![aside.as_str(); 900];
    messages.extend([server_request.as_str(), DONE]);
    let received = client.say(1, &messages).await;
    assert_eq!(received.len(), 902);
    let question: Value = serde_json::from_str(&received[900]).unwrap();
    client.send(&result(&question["id"], json!({"said": "yes"}))).await;
    assert_eq!(mirrored_response(&mut client).await["result"], json!({"said": "yes"}));
    satellite.end().await;
}

#[tokio::test]
async fn a_server_request_dropped_from_a_full_buffer_gets_an_error() {
    let (satellite, mut other) = satellite_with_client(Server::mirror("mirror"), json!({})).await;
    let mut away = satellite.connect("mirror").await;
    away.session = away
        .post(&initialize_request(json!({"elicitation": {}})))
        .await
        .head
        .header("mcp-session-id")
        .map(str::to_owned);
    assert_eq!(away.post(&notification("notifications/initialized", json!({}))).await.head.status, 202);
    let aside = notification("notifications/last", json!({})).to_string();
    let server_request = server_request("elicitation/create");
    let mut messages = vec![server_request.as_str()];
    messages.resize(400, aside.as_str());
    // The messages are sent on behalf of another client, without a call: a call's client alone would get them.
    let mut speaker = satellite.client("mirror", json!({})).await;
    speaker.say_without_call(&messages).await;
    let received = mirrored_response(&mut other).await;
    assert_eq!(received["error"]["message"], "no client is attached that could answer");
    satellite.end().await;
}

#[tokio::test]
async fn a_server_request_on_a_broken_stream_moves_to_the_get_stream_or_fails() {
    let satellite =
        TestSatellite::start_with(|settings| settings.limits.resume_grace = Duration::from_millis(10)).await;
    satellite.online(Server::mirror("mirror")).await;
    let mut other = satellite.client("mirror", json!({})).await;
    for listens in [true, false] {
        let SessionClient { mut posts, listens: get } = satellite.client("mirror", json!({"elicitation": {}})).await;
        let mut get = if listens {
            Some(get)
        } else {
            drop(get);
            None
        };
        let mut answers = posts.second_connection().await;
        posts.open("POST", &[], &say(1, &[&server_request("elicitation/create")])).await;
        posts.event().await.unwrap();
        let question = posts.event().await.unwrap().json();
        drop(posts);
        let received = if let Some(get) = &mut get {
            let again = async {
                loop {
                    let message = get.event().await.unwrap();
                    if message.data.contains("elicitation/create") {
                        return message.json();
                    }
                }
            };
            assert_eq!(timeout(GIVE_UP, again).await.expect("the request was not sent again"), question);
            assert_eq!(
                answers.post(&json!({"jsonrpc": "2.0", "id": question["id"], "result": 1})).await.head.status,
                202
            );
            mirrored_response(&mut other).await
        } else {
            mirrored_response(&mut other).await
        };
        let why = "no client is attached that could answer";
        assert!(if listens { received["result"] == 1 } else { received["error"]["message"] == why }, "{received}");
        answers.ask("DELETE", &[], "").await;
    }
    satellite.end().await;
}
