//! What a server asks and says by itself, and whom it reaches, with one client and with several; and what several clients
//! want of the one session that they share.

use std::process::Stdio;

use mcp_satellite::actors::model::spec::ProcessLifetime;
use mcp_satellite::actors::model::status::Status;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Duration, timeout};

use super::client::{Client, Guest, notification, request};
use super::whole::{Attached, DONE, GIVE_UP, Server, Whole, example, hello, say};

fn question(method: &str) -> String {
    request("q", method, json!({"x": 1})).to_string()
}

fn result(id: &Value, result: Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string()
}

/// What the mirror got, which it says to all.
fn mirrored(told: &Value) -> &Value {
    assert_eq!(told["method"], "notifications/mirrored", "{told}");
    &told["params"]["reflected"]
}

async fn one(server: Server, capabilities: Value) -> (Whole, Attached) {
    let whole = Whole::begin().await;
    whole.online(server).await;
    let client = whole.client("mirror", capabilities).await;
    (whole, client)
}

/// What the server was told of levels and subscriptions since the last look, as method and level or uri.
async fn told(client: &mut Attached) -> Vec<(String, String)> {
    // Something may be said meanwhile.
    let said = client.stream(&request(77, "mirror/told", json!({})).to_string()).await;
    let answer: Value = serde_json::from_str(said.last().unwrap()).unwrap();
    let all = answer["result"]["told"].as_array().unwrap_or_else(|| panic!("{answer}"));
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let what = |params: &Value| word(if params["uri"].is_null() { &params["level"] } else { &params["uri"] });
    all.iter().map(|told| (word(&told["method"]), what(&told["params"]))).collect()
}

/// Waits until the server was told as much: whatever comes by itself takes its time.
async fn told_by_and_by(client: &mut Attached, expected: &[(&str, &str)]) {
    let expected: Vec<_> = expected.iter().map(|(method, what)| ((*method).to_owned(), (*what).to_owned())).collect();
    let mut all = Vec::new();
    let waiting = async {
        while all.len() < expected.len() {
            all.extend(told(client).await);
        }
    };
    let outcome = timeout(GIVE_UP, waiting).await;
    assert_eq!((outcome.is_ok(), &all), (true, &expected));
}

async fn subscribe(client: &mut Attached, uri: &str) -> Value {
    client.call(50, "resources/subscribe", json!({"uri": uri})).await
}

async fn unsubscribe(client: &mut Attached, uri: &str) -> Value {
    client.call(51, "resources/unsubscribe", json!({"uri": uri})).await
}

fn updated(uri: &str) -> String {
    notification("notifications/resources/updated", json!({"uri": uri})).to_string()
}

fn logged(level: &str) -> String {
    notification("notifications/message", json!({"level": level, "data": level})).to_string()
}

fn was_relayed(answer: &Value) -> bool {
    assert!(answer["error"].is_null(), "{answer}");
    !answer["result"]["reflected"].is_null()
}

#[tokio::test]
async fn whoever_calls_is_asked_and_its_answer_goes_to_the_server() {
    let everything = json!({"sampling": {}, "elicitation": {}, "roots": {}});
    let (whole, mut client) = one(Server::mirror("mirror"), everything).await;
    let mut other = whole.client("mirror", json!({"sampling": {}, "elicitation": {}, "roots": {}})).await;
    for method in ["sampling/createMessage", "elicitation/create", "roots/list", "x/unknown"] {
        let said = client.say(1, &[&question(method), DONE]).await;
        let asked: Value = serde_json::from_str(&said[0]).unwrap();
        assert_eq!((&asked["method"], &asked["params"]), (&json!(method), &json!({"x": 1})));
        client.tell(&result(&asked["id"], json!({"by": method}))).await;
        for client in [&mut client, &mut other] {
            let told = client.hears_json().await;
            assert_eq!(*mirrored(&told), json!({"jsonrpc": "2.0", "id": "q", "result": {"by": method}}));
        }
    }
    whole.end().await;
}

#[tokio::test]
async fn a_client_is_not_asked_what_it_cannot_answer_and_the_server_is_told_why() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({"elicitation": {}})).await;
    let mut other = whole.client("mirror", json!({"sampling": {}, "roots": {}})).await;
    for method in ["sampling/createMessage", "roots/list"] {
        let said = client.say(1, &[&question(method), DONE]).await;
        // What the server was told is said to everybody, and may come before the answer.
        let is_asked = |said: &String| serde_json::from_str::<Value>(said).unwrap()["method"] == method;
        assert!(!said.iter().any(is_asked), "{said:?}");
        let told = other.hears_json().await;
        let why = format!("the client does not support `{method}`");
        assert_eq!(mirrored(&told)["error"], json!({"code": -32603, "message": why}));
    }
    whole.end().await;
}

#[tokio::test]
async fn a_server_that_asks_by_itself_reaches_the_only_client_that_can_answer() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({"sampling": {}})).await;
    let mut other = whole.client("mirror", json!({"elicitation": {}})).await;
    let mut bystander = whole.client("mirror", json!({})).await;
    bystander.say_unasked(&[&question("sampling/createMessage")]).await;
    let asked = client.hears_json().await;
    assert_eq!(asked["method"], "sampling/createMessage");
    client.tell(&result(&asked["id"], json!({"model": "m"}))).await;
    assert_eq!(mirrored(&other.hears_json().await)["result"], json!({"model": "m"}));
    client.hears().await;

    // Two that can are one too many; none that can is none.
    let mut third = whole.client("mirror", json!({"sampling": {}})).await;
    for (method, why) in [
        (
            "sampling/createMessage",
            "2 clients are attached that could answer, and the request does not identify one of them",
        ),
        ("x/unknown", "4 clients are attached that could answer, and the request does not identify one of them"),
    ] {
        bystander.say_unasked(&[&question(method)]).await;
        for client in [&mut client, &mut other, &mut third] {
            assert_eq!(mirrored(&client.hears_json().await)["error"]["message"], why);
        }
    }
    client.leave().await;
    third.leave().await;
    bystander.say_unasked(&[&question("sampling/createMessage")]).await;
    let refused = other.hears_json().await;
    assert_eq!(mirrored(&refused)["error"]["message"], "no client is attached that could answer");
    whole.end().await;
}

#[tokio::test]
async fn a_server_is_told_that_there_are_no_roots_only_where_no_client_has_any() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({})).await;
    let mut bystander = whole.client("mirror", json!({})).await;
    bystander.say_unasked(&[&question("roots/list")]).await;
    assert_eq!(mirrored(&client.hears_json().await)["result"], json!({"roots": []}));
    client.say(1, &[&question("roots/list"), DONE]).await;
    assert_eq!(mirrored(&client.hears_json().await)["result"], json!({"roots": []}));

    // The first that has some is told of, and asked; of two it is not known which.
    let first = whole.client("mirror", json!({"roots": {}})).await;
    assert_eq!(mirrored(&client.hears_json().await)["method"], "notifications/roots/list_changed");
    let second = whole.client("mirror", json!({"roots": {}})).await;
    bystander.say_unasked(&[&question("roots/list")]).await;
    let why = "2 clients are attached that could answer, and the request does not identify one of them";
    assert_eq!(mirrored(&client.hears_json().await)["error"], json!({"code": -32603, "message": why}));

    // Nor while calls of two clients are in flight.
    let mut waiting = bystander.posts.again().await;
    waiting.open("POST", &[], &say(8, &[&notification("notifications/here", json!({})).to_string()])).await;
    while waiting.event().await.unwrap().data.is_empty() {}
    client.say(1, &[&question("roots/list"), DONE]).await;
    let why = "calls of 2 clients are in progress, and the request does not identify one of them";
    let told = timeout(GIVE_UP, waiting.event()).await.unwrap().unwrap().json();
    assert_eq!(mirrored(&told)["error"], json!({"code": -32603, "message": why}));

    first.leave().await;
    second.leave().await;
    client.say(1, &[&question("roots/list"), DONE]).await;
    let told = timeout(GIVE_UP, waiting.event()).await.unwrap().unwrap().json();
    assert_eq!(mirrored(&told)["result"], json!({"roots": []}));
    whole.end().await;
}

#[tokio::test]
async fn a_pipe_that_does_not_say_whom_it_asks_asks_nobody_while_two_clients_call() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({"sampling": {}})).await;
    let mut other = whole.client("mirror", json!({"sampling": {}})).await;
    let waits = say(1, &[&notification("notifications/here", json!({})).to_string()]);
    client.posts.open("POST", &[], &waits).await;
    while client.posts.event().await.unwrap().data.is_empty() {}
    let said = other.say(1, &[&question("sampling/createMessage"), DONE]).await;
    let refusal = "calls of 2 clients are in progress, and the request does not identify one of them";
    assert!(said.iter().all(|said| !said.contains("sampling/createMessage")), "{said:?}");
    // The mirror shows it when the call of the other is the only one that is left.
    let told = timeout(GIVE_UP, client.posts.event()).await.unwrap().unwrap().json();
    assert_eq!(mirrored(&told)["error"]["message"], refusal);
    whole.end().await;
}

/// A server that is asked over HTTP, and what asks it.
struct Fixture {
    url: String,
    _process: Child,
}

impl Fixture {
    async fn begin() -> Self {
        let mut command = Command::new(example("conformance"));
        let command = command.arg("127.0.0.1:0").stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let url = timeout(GIVE_UP, lines.next_line()).await.expect("it does not listen").unwrap().unwrap();
        Self { url, _process: process }
    }
}

#[tokio::test]
async fn a_server_that_says_for_which_call_it_asks_asks_each_of_two_clients() {
    let fixture = Fixture::begin().await;
    let whole = Whole::begin().await;
    whole.online(Server::remote("fixture", &fixture.url)).await;
    let mut clients = Vec::new();
    for prompt in ["one", "two"] {
        let mut client = whole.client("fixture", json!({"sampling": {}})).await;
        let call = request(5, "tools/call", json!({"name": "test_sampling", "arguments": {"prompt": prompt}}));
        client.posts.open("POST", &[], &call.to_string()).await;
        assert_eq!(client.posts.event().await.unwrap().data, "");
        let asked = timeout(GIVE_UP, client.posts.event()).await.expect("it is not asked").unwrap().json();
        assert_eq!(asked["method"], "sampling/createMessage");
        assert_eq!(asked["params"]["messages"][0]["content"]["text"], prompt);
        clients.push((prompt, client, asked["id"].clone()));
    }
    // The answers come the other way round.
    for (prompt, client, id) in clients.iter_mut().rev() {
        let content = json!({"type": "text", "text": format!("answer to {prompt}")});
        let mut answers = client.posts.again().await;
        let answer = result(id, json!({"role": "assistant", "model": "m", "content": content}));
        assert_eq!(answers.ask("POST", &[], &answer).await.head.status, 202);
        let answer = timeout(GIVE_UP, client.posts.event()).await.expect("no answer").unwrap().json();
        assert_eq!(answer["result"]["content"][0]["text"], format!("LLM response: answer to {prompt}"));
    }
    whole.end().await;
}

#[tokio::test]
async fn progress_on_a_question_goes_to_who_asked_and_any_other_nowhere() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({"sampling": {}})).await;
    let asks = request("q", "sampling/createMessage", json!({"_meta": {"progressToken": "theirs"}})).to_string();
    let said = client.say(1, &[&asks, DONE]).await;
    let asked: Value = serde_json::from_str(&said[0]).unwrap();
    let progress = |token: &Value| {
        notification("notifications/progress", json!({"progressToken": token, "progress": 1})).to_string()
    };
    for token in [json!("theirs"), json!(99), json!("q")] {
        client.tell(&progress(&token)).await;
    }
    // What is cancelled was never asked, or is answered.
    client.tell(&notification("notifications/cancelled", json!({"requestId": 1})).to_string()).await;
    client.tell(&progress(&asked["params"]["_meta"]["progressToken"])).await;
    let told = client.hears_json().await;
    assert_eq!(mirrored(&told)["params"], json!({"progressToken": "theirs", "progress": 1}));
    // An answer ends it.
    client.tell(&result(&asked["id"], json!({}))).await;
    assert_eq!(mirrored(&client.hears_json().await)["id"], "q");
    client.tell(&progress(&asked["params"]["_meta"]["progressToken"])).await;
    client.tell(&notification("notifications/last", json!({})).to_string()).await;
    assert_eq!(mirrored(&client.hears_json().await)["method"], "notifications/last");
    whole.end().await;
}

#[tokio::test]
async fn a_question_that_is_taken_back_is_taken_back_from_its_client() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({"elicitation": {}})).await;
    let back = notification("notifications/cancelled", json!({"requestId": "q", "reason": "r"})).to_string();
    let said = client.say(1, &[&question("elicitation/create"), &back, DONE]).await;
    let [asked, back] = [&said[0], &said[1]].map(|said| serde_json::from_str::<Value>(said).unwrap());
    assert_eq!(back["params"], json!({"requestId": asked["id"], "reason": "r"}));
    // Its answer is too late, and goes nowhere.
    client.tell(&result(&asked["id"], json!({}))).await;
    client.tell(&notification("notifications/last", json!({})).to_string()).await;
    assert_eq!(mirrored(&client.hears_json().await)["method"], "notifications/last");
    whole.end().await;
}

#[tokio::test]
async fn a_question_ends_with_its_client_and_with_its_server() {
    let (whole, client) = one(Server::mirror("mirror"), json!({"elicitation": {}})).await;
    let id = whole.runtime.snapshot().iter().next().unwrap().spec.id.clone();
    let mut other = whole.client("mirror", json!({})).await;
    let mut asks = client;
    asks.say(1, &[&question("elicitation/create"), DONE]).await;
    asks.leave().await;
    let refused = other.hears_json().await;
    assert_eq!(mirrored(&refused)["error"]["message"], "no client is attached that could answer");

    let mut client = whole.client("mirror", json!({"elicitation": {}})).await;
    let said = client.say(1, &[&question("elicitation/create"), DONE]).await;
    let asked: Value = serde_json::from_str(&said[0]).unwrap();
    whole.kill(&id).await;
    let told = client.hears_json().await;
    assert_eq!(told["method"], "notifications/cancelled");
    assert_eq!(told["params"]["requestId"], asked["id"]);
    whole.end().await;
}

/// The shell is a server that asks as soon as it may, and says all that it then reads.
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
async fn a_server_that_asked_for_roots_too_early_hears_of_a_client_in_front_of_several_servers_too() {
    for path in ["/mcp?mode=flat", "/mcp"] {
        let whole = Whole::begin().await;
        whole.online(Server::command("asks", "/bin/sh", &["-c", ASKS_EARLY])).await;
        let mut bystander = whole.client("asks", json!({})).await;
        // It has asked by now: it reads this after it did.
        bystander.tell(&notification("notifications/first", json!({})).to_string()).await;
        while bystander.hears_json().await["params"]["method"] != "notifications/first" {}
        let mut posts = Client::connect(whole.address).await;
        path.clone_into(&mut posts.path);
        let mut client = Attached::begin(posts, json!({"roots": {}})).await;
        let asked = client.hears_json().await;
        assert_eq!(asked["method"], "roots/list", "{path}");
        client.tell(&result(&asked["id"], json!({"roots": [{"uri": "file:///a"}]}))).await;
        assert_eq!(bystander.hears_json().await["params"]["method"], "notifications/roots/list_changed");
        assert_eq!(bystander.hears_json().await["params"]["result"], json!({"roots": [{"uri": "file:///a"}]}));
        whole.end().await;
    }
}

#[tokio::test]
async fn a_server_that_asked_for_roots_too_early_hears_of_the_first_client_that_has_some() {
    let whole = Whole::begin().await;
    whole.online(Server::command("asks", "/bin/sh", &["-c", ASKS_EARLY])).await;
    let mut bystander = whole.client("asks", json!({})).await;
    bystander.tell(&notification("notifications/first", json!({})).to_string()).await;
    let mut read = bystander.hears_json().await;
    if read["params"]["id"] == "early" {
        // It may read only now that there were none.
        read = bystander.hears_json().await;
    }
    // A client that has none changes nothing.
    assert_eq!(read["params"]["method"], "notifications/first");
    let mut first = whole.client("asks", json!({"roots": {}})).await;
    let changed = json!({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"});
    for client in [&mut bystander, &mut first] {
        assert_eq!(client.hears_json().await["params"], changed);
    }
    let asked = first.hears_json().await;
    assert_eq!(asked["method"], "roots/list");
    first.tell(&result(&asked["id"], json!({"roots": [{"uri": "file:///a"}]}))).await;
    let answer = bystander.hears_json().await;
    assert_eq!(answer["params"]["result"], json!({"roots": [{"uri": "file:///a"}]}));
    // It knows now: a second one changes nothing.
    let mut second = whole.client("asks", json!({"roots": {}})).await;
    second.tell(&notification("notifications/last", json!({})).to_string()).await;
    assert_eq!(bystander.hears_json().await["params"]["method"], "notifications/last");
    whole.end().await;
}

#[tokio::test]
async fn what_a_server_says_for_one_client_is_said_to_it_alone_and_what_all_share_to_all() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({})).await;
    let mut other = whole.client("mirror", json!({})).await;
    let own = notification("notifications/own", json!({})).to_string();
    let list = notification("notifications/tools/list_changed", json!({})).to_string();
    let said = client.say(1, &[&own, &logged("info"), &updated("a"), &list, DONE]).await;
    assert_eq!(said.len(), 5, "{said:?}");
    assert_eq!(other.hears().await, list);
    // Each once, and in order.
    other.tell(&notification("notifications/last", json!({})).to_string()).await;
    assert_eq!(mirrored(&other.hears_json().await)["method"], "notifications/last");
    assert_eq!(mirrored(&client.hears_json().await)["method"], "notifications/last");

    // What is said for nobody is said to all.
    let mut bystander = whole.client("mirror", json!({})).await;
    bystander.say_unasked(&[&own, &logged("info"), &updated("a"), &list]).await;
    for client in [&mut client, &mut other] {
        for expected in [&own, &logged("info"), &updated("a"), &list] {
            assert_eq!(client.hears().await, *expected);
        }
    }
    whole.end().await;
}

#[tokio::test]
async fn a_call_through_all_servers_makes_nobody_deaf_who_is_connected_to_this_one() {
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
    let whole = Whole::begin().await;
    whole.online(Server::command("says", "/bin/sh", &["-c", script, "sh", own, status, complete])).await;
    let (mut client, mut other) = (whole.client("says", json!({})).await, whole.client("says", json!({})).await);
    let mut everywhere = whole.connect("says").await;
    "/mcp".clone_into(&mut everywhere.path);
    let mut everywhere = Attached::begin(everywhere, json!({})).await;
    let call = request(1, "tools/call", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "says:say"}}));
    assert_eq!(everywhere.stream(&call.to_string()).await[..3], [own, status, complete]);
    for client in [&mut client, &mut other] {
        for expected in [own, status, complete] {
            assert_eq!(client.hears().await, expected);
        }
    }
    // What is said for one of them the others do not hear, but for what is everybody's.
    let said = client.stream(&request(1, "tools/call", json!({"name": "say"})).to_string()).await;
    assert_eq!(said[..3], [own, status, complete]);
    for expected in [status, complete] {
        assert_eq!(other.hears().await, expected);
    }
    whole.end().await;
}

#[tokio::test]
async fn a_client_has_so_many_subscriptions_of_such_a_length_and_no_more() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({})).await;
    let mut other = whole.client("mirror", json!({})).await;
    let longest = "x".repeat(8 * 1024);
    assert!(was_relayed(&subscribe(&mut client, &longest).await));
    let refused = subscribe(&mut client, &format!("{longest}x")).await;
    assert_eq!(refused["error"]["code"], -32602, "{refused}");
    assert_eq!(refused["error"]["data"], json!({"kind": "subscription_uri", "limit": 8192}));
    for number in 1..1024 {
        assert!(was_relayed(&subscribe(&mut client, &format!("test://{number}")).await));
    }
    assert_eq!(told(&mut client).await.len(), 1024);
    // However it is written.
    for params in [r#"{"uri":"test://more"}"#, r#"{"\ud800":1,"uri":"a","uri":"test://more"}"#] {
        let more = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"resources/subscribe","params":{params}}}"#);
        let refused = client.ask(&more).await.json();
        assert_eq!(refused["error"]["code"], -32000, "{refused}");
        assert_eq!(refused["error"]["data"], json!({"kind": "subscriptions", "limit": 1024}));
    }
    assert_eq!(told(&mut client).await, []);
    // What it has it may ask for again, and others have their own.
    assert!(was_relayed(&subscribe(&mut client, "test://1").await));
    assert!(was_relayed(&subscribe(&mut other, "test://more").await));
    assert!(was_relayed(&unsubscribe(&mut client, "test://1").await));
    assert!(!was_relayed(&subscribe(&mut client, "test://more").await));
    whole.end().await;
}

#[tokio::test]
async fn a_server_that_has_no_time_to_be_told_is_told_when_it_has() {
    let busy = Server::mirror("mirror").policy(|policy| policy.session.calls_in_flight_max = 2);
    let (whole, mut client) = one(busy, json!({})).await;
    let mut leaves = whole.client("mirror", json!({})).await;
    assert!(was_relayed(&subscribe(&mut leaves, "test://a").await));
    told(&mut client).await;
    // What is said of progress goes to its own call, however many there are.
    let here = notification("notifications/progress", json!({"progressToken": "$token", "progress": 1})).to_string();
    let mut waiting = Vec::new();
    for id in [8, 9] {
        let mut posts = client.posts.again().await;
        posts.open("POST", &[], &say(id, &[&here])).await;
        while posts.event().await.unwrap().data.is_empty() {}
        waiting.push((id, posts));
    }
    leaves.leave().await;
    let refused = client.call(1, "x/busy", json!({})).await;
    assert_eq!(refused["error"]["data"]["kind"], "busy", "{refused}");
    for (id, mut posts) in waiting {
        client.tell(&notification("notifications/cancelled", json!({"requestId": id})).to_string()).await;
        while posts.event().await.is_some() {}
    }
    told_by_and_by(&mut client, &[("resources/unsubscribe", "test://a")]).await;
    whole.end().await;
}

#[tokio::test]
async fn a_subscription_is_made_by_the_first_heard_by_those_who_have_it_and_ended_by_the_last() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({})).await;
    let (mut second, mut third) = (whole.client("mirror", json!({})).await, whole.client("mirror", json!({})).await);
    assert!(was_relayed(&subscribe(&mut client, "test://a").await));
    assert!(!was_relayed(&subscribe(&mut second, "test://a").await));
    assert!(was_relayed(&subscribe(&mut third, "test://b").await));
    // Whatever call it is said in, it is about what all can read.
    let said = third.say(1, &[&updated("test://a/sub"), DONE]).await;
    assert_eq!(said.len(), 2, "{said:?}");
    let mut bystander = whole.client("mirror", json!({})).await;
    bystander.say_unasked(&[&updated("test://b"), &updated("test://a")]).await;
    assert_eq!(third.hears().await, updated("test://b"));
    for client in [&mut client, &mut second] {
        assert_eq!(client.hears().await, updated("test://a/sub"));
        assert_eq!(client.hears().await, updated("test://a"));
    }
    assert!(!was_relayed(&unsubscribe(&mut client, "test://a").await));
    let so_far = [("resources/subscribe", "test://a"), ("resources/subscribe", "test://b")];
    told_by_and_by(&mut client, &so_far).await;
    second.leave().await;
    told_by_and_by(&mut client, &[("resources/unsubscribe", "test://a")]).await;
    assert!(was_relayed(&unsubscribe(&mut third, "test://b").await));
    told_by_and_by(&mut client, &[("resources/unsubscribe", "test://b")]).await;
    whole.end().await;
}

#[tokio::test]
async fn each_client_hears_its_own_level_and_the_server_has_the_lowest() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({})).await;
    let (mut quiet, mut unset) = (whole.client("mirror", json!({})).await, whole.client("mirror", json!({})).await);
    let set = |level: &str| request(5, "logging/setLevel", json!({"level": level})).to_string();
    assert!(was_relayed(&client.ask(&set("debug")).await.json()));
    assert!(!was_relayed(&quiet.ask(&set("error")).await.json()));
    let mut bystander = whole.client("mirror", json!({})).await;
    bystander.say_unasked(&[&logged("debug"), &logged("error")]).await;
    for client in [&mut client, &mut unset] {
        assert_eq!(client.hears().await, logged("debug"));
        assert_eq!(client.hears().await, logged("error"));
    }
    assert_eq!(quiet.hears().await, logged("error"));
    // Also of its own calls.
    assert_eq!(quiet.say(1, &[&logged("info"), &logged("alert"), DONE]).await.len(), 2);
    // A level that is none is the server's to refuse.
    assert!(was_relayed(&quiet.ask(&set("loud")).await.json()));
    told_by_and_by(&mut unset, &[("logging/setLevel", "debug"), ("logging/setLevel", "loud")]).await;
    client.leave().await;
    told_by_and_by(&mut unset, &[("logging/setLevel", "error")]).await;
    whole.end().await;
}

#[tokio::test]
async fn another_run_of_the_server_is_told_again_what_its_clients_want() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({})).await;
    let id = whole.runtime.snapshot().iter().next().unwrap().spec.id.clone();
    let mut other = whole.client("mirror", json!({})).await;
    subscribe(&mut client, "test://a").await;
    subscribe(&mut other, "test://a").await;
    subscribe(&mut other, "test://b").await;
    client.call(5, "logging/setLevel", json!({"level": "notice"})).await;
    told(&mut client).await;
    whole.kill(&id).await;
    let all =
        [("logging/setLevel", "notice"), ("resources/subscribe", "test://a"), ("resources/subscribe", "test://b")];
    told_by_and_by(&mut client, &all).await;
    // And then it is as before.
    assert!(!was_relayed(&subscribe(&mut other, "test://a").await));
    other.say_unasked(&[&logged("info"), &logged("notice")]).await;
    assert_eq!(client.hears().await, logged("notice"));
    whole.end().await;
}

#[tokio::test]
async fn a_server_with_a_subscriber_stays_awake_and_one_without_sleeps() {
    let whole = Whole::begin().await;
    let short = |server: Server| {
        server.policy(|policy| {
            policy.idle.idle = Duration::from_millis(50);
            policy.idle.grace = Duration::from_millis(50);
            policy.idle.sweep = Duration::from_millis(10);
        })
    };
    let id = whole.online(short(Server::mirror("mirror"))).await;
    let mut client = whole.client("mirror", json!({})).await;
    assert!(was_relayed(&subscribe(&mut client, "test://a").await));
    // One that began to be idle after it falls asleep before it.
    let other = whole.online(short(Server::mirror("other"))).await;
    whole.until(&other, |view| view.dormant).await;
    assert!(!whole.runtime.status(&id).unwrap().dormant);
    assert!(was_relayed(&unsubscribe(&mut client, "test://a").await));
    whole.until(&id, |view| view.dormant).await;
    // And it is the same for who goes without a word.
    assert!(was_relayed(&subscribe(&mut client, "test://a").await));
    client.leave().await;
    whole.until(&id, |view| view.dormant).await;
    whole.end().await;
}

#[tokio::test]
async fn a_server_that_sleeps_is_woken_by_a_call_and_by_nothing_less() {
    let whole = Whole::begin().await;
    let id = whole.install(Server::mirror("mirror").keep(ProcessLifetime::Lazy)).await;
    whole.until(&id, |view| view.dormant && view.status == Status::Online && view.pid.is_none()).await;
    let restarts = whole.runtime.status(&id).unwrap().initialized_at;
    let mut client = whole.client("mirror", json!({"roots": {}})).await;
    assert_eq!(client.call(1, "ping", json!({})).await, json!({"jsonrpc": "2.0", "id": 1, "result": {}}));
    client.tell(&notification("notifications/roots/list_changed", json!({})).to_string()).await;
    // Who has no session does not wake it by asking what it is either, nor by listening.
    let mut guest = Guest::connect(whole.address, "/i/mirror/mcp").await;
    guest.send("server/discover", json!({})).await;
    let head = guest.client.head().await;
    assert!(guest.client.body(&head).await.contains(r#""name":"mirror""#));
    guest.open("subscriptions/listen", json!({"notifications": {"toolsListChanged": true}})).await;
    guest.hears().await.unwrap();
    let view = whole.runtime.status(&id).unwrap();
    assert!(view.dormant && view.pid.is_none() && view.initialized_at == restarts);
    assert!(was_relayed(&client.call(2, "tools/list", json!({})).await));
    assert!(whole.runtime.status(&id).unwrap().pid.is_some());
    // Awake it answers for itself.
    assert_eq!(client.call(1, "ping", json!({})).await["result"], json!({}));
    whole.end().await;
}

#[tokio::test]
async fn clients_hear_of_another_catalogue_that_comes_with_another_run() {
    let whole = Whole::begin().await;
    let id = whole.online(Server::sim("sim", &["--tools", "3"])).await;
    let mut client = whole.client("sim", json!({})).await;
    // The same again is nothing new.
    whole.kill(&id).await;
    whole.update(Server::sim("sim", &["--tools", "4", "--prompts", "1"])).await;
    let mut methods = Vec::new();
    for _ in 0..2 {
        methods.push(client.hears_json().await["method"].as_str().unwrap().to_owned());
    }
    assert_eq!(methods, ["notifications/tools/list_changed", "notifications/prompts/list_changed"]);
    let tools = client.call(1, "tools/list", json!({})).await;
    assert_eq!(tools["result"]["tools"].as_array().unwrap().len(), 4);
    whole.end().await;
}

#[tokio::test]
async fn what_a_new_run_says_of_its_lists_itself_is_not_said_twice() {
    // Each run has a tool of its own, and says so before it is asked.
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
    let whole = Whole::begin().await;
    let id = whole
        .online(Server::command("changes", "/bin/sh", &["-c", script]).policy(|policy| policy.restart.max_crashes = 9))
        .await;
    let mut client = whole.client("changes", json!({})).await;
    for _ in 0..3 {
        whole.kill(&id).await;
        assert_eq!(client.hears_json().await["method"], "notifications/tools/list_changed");
    }
    client.tell(&notification("notifications/x", json!({})).to_string()).await;
    assert_eq!(client.hears_json().await["method"], "notifications/last");
    whole.end().await;
}

#[tokio::test]
async fn an_instance_that_is_removed_takes_its_sessions_with_it() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({})).await;
    let id = whole.runtime.snapshot().iter().next().unwrap().spec.id.clone();
    whole.uninstall(&id).await;
    assert_eq!(client.listens.event().await, None);
    assert_eq!(client.posts.post(&request(1, "ping", json!({}))).await.head.status, 404);
    assert_eq!(whole.gateway.session_count(), 0);
    // Under the same name there is another one, and nobody is in it.
    whole.online(Server::mirror("mirror")).await;
    assert_eq!(client.posts.post(&request(1, "ping", json!({}))).await.head.status, 404);
    client.posts.session = None;
    assert_eq!(client.posts.post(&hello(json!({}))).await.head.status, 200);
    whole.end().await;
}

/// What the server is told of a question: the next answer that the mirror got.
async fn told_of_a_question(other: &mut Attached) -> Value {
    loop {
        let heard = other.hears_json().await;
        let reflected = &heard["params"]["reflected"];
        if reflected["id"] == "q" {
            return reflected.clone();
        }
    }
}

#[tokio::test]
async fn a_question_after_very_much_before_the_answer_is_put_and_nothing_of_it_is_lost() {
    let (whole, mut client) = one(Server::mirror("mirror"), json!({"elicitation": {}})).await;
    let aside = notification("notifications/last", json!({})).to_string();
    let question = question("elicitation/create");
    let mut messages = vec![aside.as_str(); 900];
    messages.extend([question.as_str(), DONE]);
    let said = client.say(1, &messages).await;
    assert_eq!(said.len(), 902);
    let asked: Value = serde_json::from_str(&said[900]).unwrap();
    client.tell(&result(&asked["id"], json!({"said": "yes"}))).await;
    assert_eq!(told_of_a_question(&mut client).await["result"], json!({"said": "yes"}));
    whole.end().await;
}

#[tokio::test]
async fn a_question_that_its_client_will_never_see_is_declined() {
    let (whole, mut other) = one(Server::mirror("mirror"), json!({})).await;
    let mut away = whole.connect("mirror").await;
    away.session = away.post(&hello(json!({"elicitation": {}}))).await.head.header("mcp-session-id").map(str::to_owned);
    assert_eq!(away.post(&notification("notifications/initialized", json!({}))).await.head.status, 202);
    let aside = notification("notifications/last", json!({})).to_string();
    let question = question("elicitation/create");
    let mut messages = vec![question.as_str()];
    messages.resize(400, aside.as_str());
    // Another has it said: what is told while its call is open, it alone would hear.
    let mut speaker = whole.client("mirror", json!({})).await;
    speaker.say_unasked(&messages).await;
    let told = told_of_a_question(&mut other).await;
    assert_eq!(told["error"]["message"], "no client is attached that could answer");
    whole.end().await;
}

#[tokio::test]
async fn a_question_on_a_stream_that_broke_is_put_again_where_it_is_heard_or_declined() {
    let whole = Whole::begin_with(|settings| settings.limits.resume_grace = Duration::from_millis(10)).await;
    whole.online(Server::mirror("mirror")).await;
    let mut other = whole.client("mirror", json!({})).await;
    for listens in [true, false] {
        let Attached { mut posts, listens: get } = whole.client("mirror", json!({"elicitation": {}})).await;
        let mut get = if listens {
            Some(get)
        } else {
            drop(get);
            None
        };
        let mut answers = posts.again().await;
        posts.open("POST", &[], &say(1, &[&question("elicitation/create")])).await;
        posts.event().await.unwrap();
        let asked = posts.event().await.unwrap().json();
        drop(posts);
        let told = if let Some(get) = &mut get {
            let again = async {
                loop {
                    let heard = get.event().await.unwrap();
                    if heard.data.contains("elicitation/create") {
                        return heard.json();
                    }
                }
            };
            assert_eq!(timeout(GIVE_UP, again).await.expect("it is not asked again"), asked);
            assert_eq!(answers.post(&json!({"jsonrpc": "2.0", "id": asked["id"], "result": 1})).await.head.status, 202);
            told_of_a_question(&mut other).await
        } else {
            told_of_a_question(&mut other).await
        };
        let why = "no client is attached that could answer";
        assert!(if listens { told["result"] == 1 } else { told["error"]["message"] == why }, "{told}");
        answers.ask("DELETE", &[], "").await;
    }
    whole.end().await;
}
