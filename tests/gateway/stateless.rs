//! Clients of the era without sessions before a fake: what each request must say of itself, what it is told if it does not,
//! and how it ends.

use mcp_satellite::actors::model::event::Event;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use tokio::time::Duration;

use super::client::{Client, Guest, meta, notification, request};
use super::fake::{Seen, Stage, plan};

const NEW: (&str, &str) = ("mcp-protocol-version", "2026-07-28");

async fn stage() -> (Stage, Guest) {
    let stage = Stage::new(|_| {});
    let guest = Guest::connect(stage.address, "/mcp").await;
    (stage, guest)
}

/// The status of an answer, its error's code, and whose it is.
async fn refused(client: &mut Client, headers: &[(&str, &str)], message: &Value) -> (u16, i64) {
    let answer = client.ask("POST", headers, &message.to_string()).await;
    assert_eq!(answer.json()["id"], message["id"], "{answer:?}");
    (answer.head.status, answer.json()["error"]["code"].as_i64().unwrap_or_default())
}

#[tokio::test]
async fn a_request_that_says_all_of_itself_needs_no_session() {
    let (mut stage, mut guest) = stage().await;
    for _ in 0..2 {
        let result = guest.result("echo", json!({"x": 1})).await;
        assert_eq!((&result["x"], &result["resultType"]), (&json!(1), &json!("complete")));
        stage.saw(Seen::Ended("closed")).await;
    }
    // What says that it is in a session is in none.
    guest.client.session = Some("0".repeat(48));
    assert_eq!(guest.result("echo", json!({"x": 2})).await["x"], 2);
    assert_eq!(stage.gateway.session_count(), 0);
    assert!(stage.events.try_recv().is_err(), "nobody is told of one request");
}

#[tokio::test]
async fn what_a_request_does_not_say_of_itself_it_is_told() {
    let (_stage, guest) = stage().await;
    let mut client = guest.client;
    let list = ("mcp-method", "tools/list");
    let about = |meta: Value| request(5, "tools/list", json!({"_meta": meta}));
    let whole = || meta(&json!({}));
    let version = |version: &str| {
        let mut meta = whole();
        meta["io.modelcontextprotocol/protocolVersion"] = version.into();
        about(meta)
    };
    let without = |name: &str| {
        let mut meta = whole();
        meta.as_object_mut().unwrap().remove(&format!("io.modelcontextprotocol/{name}"));
        about(meta)
    };
    for (headers, message, expected) in [
        (&[NEW, list][..], about(whole()), (200, 0)),
        (&[NEW, list], without("clientInfo"), (200, 0)),
        (&[NEW, list], request(5, "tools/list", json!({})), (400, -32602)),
        (&[NEW, list], json!({"jsonrpc": "2.0", "id": "x", "method": "tools/list"}), (400, -32602)),
        (&[NEW, list], without("protocolVersion"), (400, -32602)),
        (&[NEW, list], without("clientCapabilities"), (400, -32602)),
        (&[NEW, list], version("v999"), (400, -32020)),
        (&[("mcp-protocol-version", "v999"), list], version("v999"), (400, -32022)),
        (&[("mcp-protocol-version", "2025-11-25"), list], about(whole()), (400, -32020)),
        (&[list], about(whole()), (400, -32020)),
        (&[NEW], about(whole()), (400, -32020)),
        (&[NEW, ("mcp-method", "TOOLS/LIST")], about(whole()), (400, -32020)),
        (&[NEW, list, list], about(whole()), (400, -32020)),
        (&[], request(5, "server/discover", json!({})), (400, -32602)),
    ] {
        assert_eq!(refused(&mut client, headers, &message).await, expected, "{headers:?} {message}");
    }
    let mut unsupported = whole();
    unsupported["io.modelcontextprotocol/protocolVersion"] = "v999".into();
    let message = about(unsupported).to_string();
    let answer = client.ask("POST", &[("mcp-protocol-version", "v999"), list], &message).await.json();
    assert_eq!(answer["error"]["data"]["requested"], "v999");
    let supported = answer["error"]["data"]["supported"].as_array().unwrap().clone();
    assert!(supported.contains(&json!("2026-07-28")) && supported.contains(&json!("2025-11-25")), "{supported:?}");
    let mut guest = Guest::connect(client.address, "/mcp").await;
    let told = guest.result("server/discover", json!({})).await;
    assert_eq!(told["resultType"], "complete");
}

#[tokio::test]
async fn what_stands_in_the_headers_is_what_stands_in_the_body() {
    let (_stage, guest) = stage().await;
    let mut client = guest.client;
    let call = |arguments: Value| {
        let params = json!({"name": "marked", "arguments": arguments, "_meta": meta(&json!({}))});
        request(5, "tools/call", params)
    };
    let (method, name) = (("mcp-method", "tools/call"), ("mcp-name", "marked"));
    let region = |value| ("mcp-param-region", value);
    for (headers, arguments, expected) in [
        (&[NEW, method, name, region("eu")][..], json!({"region": "eu"}), (200, 0)),
        (&[NEW, method, ("mcp-name", "  marked  "), region("eu")], json!({"region": "eu"}), (200, 0)),
        (&[NEW, method, name, region("=?base64?ZXU=?=")], json!({"region": "eu"}), (200, 0)),
        (&[NEW, method, name], json!({}), (200, 0)),
        (&[NEW, method], json!({}), (400, -32020)),
        (&[NEW, method, ("mcp-name", "other")], json!({}), (400, -32020)),
        (&[NEW, method, name], json!({"region": "eu"}), (400, -32020)),
        (&[NEW, method, name, region("us")], json!({"region": "eu"}), (400, -32020)),
        (&[NEW, method, name, region("=?base64?ZXU?=")], json!({"region": "eu"}), (400, -32020)),
        (&[NEW, method, name, region("eu")], json!({"region": null}), (400, -32020)),
    ] {
        assert_eq!(refused(&mut client, headers, &call(arguments.clone())).await, expected, "{headers:?} {arguments}");
    }
}

#[tokio::test]
async fn what_the_other_era_had_there_is_not_in_this_one() {
    let (_stage, mut guest) = stage().await;
    for method in ["initialize", "ping", "logging/setLevel", "resources/subscribe", "resources/unsubscribe"] {
        let answer = guest.ask(method, json!({"uri": "a:b"})).await;
        assert_eq!((answer.head.status, &answer.json()["error"]["code"]), (404, &json!(-32601)), "{method}");
    }
    let mut client = guest.client;
    for method in ["GET", "DELETE"] {
        let answer = client.ask(method, &[NEW, ("last-event-id", "1-1")], "").await;
        assert_eq!((answer.head.status, answer.head.header("allow")), (405, Some("POST")));
    }
    let told = notification("notifications/cancelled", json!({"requestId": 1})).to_string();
    assert_eq!(client.ask("POST", &[NEW], &told).await.head.status, 202);
    let answer = json!({"jsonrpc": "2.0", "id": 1, "result": {}}).to_string();
    assert_eq!(client.ask("POST", &[NEW], &answer).await.head.status, 400);
    // A client that would rather have a session gets one, whatever its header says.
    let hello = super::client::initialize("2026-07-28").to_string();
    assert_eq!(client.ask("POST", &[NEW], &hello).await.head.status, 200);
}

#[tokio::test]
async fn what_is_another_users_is_nowhere() {
    let (_stage, mut guest) = stage().await;
    let mut bodies = Vec::new();
    for (path, status) in [("/i/alices/mcp", 200), ("/i/bobs/mcp", 404), ("/i/nobodys/mcp", 404)] {
        path.clone_into(&mut guest.client.path);
        for method in ["echo", "server/discover", "subscriptions/listen", "tools/call"] {
            let id = guest.send(method, json!({"name": "marked", "notifications": {}})).await;
            let head = guest.client.head().await;
            assert_eq!(head.status, status, "{path} {method}");
            if status == 404 {
                let body = guest.client.body(&head).await;
                assert!(body.contains("-32603"), "{body}");
                bodies.push(body.replace(&format!("\"id\":{id}"), ""));
            } else if head.is_stream() {
                guest = guest.again().await;
            } else {
                guest.client.body(&head).await;
            }
        }
    }
    bodies.dedup();
    assert_eq!(bodies.len(), 1, "{bodies:?}");
    // And without a token nobody learns more.
    guest.client.token = None;
    guest.send("echo", json!({})).await;
    assert_eq!(guest.client.head().await.status, 401);
}

#[tokio::test]
async fn a_stream_has_no_ids_and_ends_with_its_answer() {
    let (mut stage, mut guest) = stage().await;
    let id = guest.open("talk", json!({"x": 1})).await;
    assert_eq!(guest.hears().await.unwrap()["params"], "first");
    stage.release.add_permits(1);
    let last = guest.hears().await.unwrap();
    assert_eq!((&last["id"], &last["result"]["resultType"]), (&json!(id), &json!("complete")));
    assert_eq!(guest.hears().await, None);
    stage.saw(Seen::Ended("closed")).await;
}

#[tokio::test]
async fn hanging_up_cancels_at_once_before_and_after_a_stream_began() {
    for method in ["hold", "talk"] {
        let (mut stage, mut guest) = stage().await;
        guest.send(method, json!({})).await;
        stage.saw(Seen::Asked(method.into())).await;
        if method == "talk" {
            guest.client.head().await;
            guest.hears().await.unwrap();
        }
        drop(guest);
        stage.saw(Seen::Cancelled(method.into())).await;
        stage.saw(Seen::Ended("closed")).await;
    }
}

#[tokio::test]
async fn who_takes_only_json_gets_the_answer_alone_and_who_takes_only_streams_gets_one() {
    let stage = Stage::new(|settings| settings.answers = mcp_satellite::config::ResponseStyle::Sse);
    let mut guest = Guest::connect(stage.address, "/mcp").await;
    let id = guest.open("echo", json!({"x": 1})).await;
    assert_eq!(guest.hears().await.unwrap()["id"], id);
    assert_eq!(guest.hears().await, None);
    // What has a status of its own is told by it.
    let answer = guest.ask("ping", json!({})).await;
    assert_eq!(answer.head.status, 404);
    guest.client.extra = vec![("accept".to_owned(), "application/json".to_owned())];
    let headers = [NEW, ("mcp-method", "chat"), ("accept", "application/json")];
    let message = request(1, "chat", json!({"_meta": meta(&json!({}))})).to_string();
    guest.client.extra.clear();
    let answer = guest.client.ask("POST", &headers, &message).await;
    assert_eq!((answer.head.status, answer.json()["id"].as_u64()), (200, Some(1)));
    let message =
        request(1, "subscriptions/listen", json!({"_meta": meta(&json!({})), "notifications": {}})).to_string();
    let headers = [NEW, ("mcp-method", "subscriptions/listen"), ("accept", "application/json")];
    assert_eq!(guest.client.ask("POST", &headers, &message).await.head.status, 406);
}

#[tokio::test]
async fn a_guest_has_the_limits_of_its_user() {
    let mut limited = plan();
    (limited.limits.calls_per_user_max, limited.limits.requests_per_second, limited.limits.burst) = (1, 1, 4);
    let mut stage = Stage::with(limited, |_| {});
    let mut guest = Guest::connect(stage.address, "/mcp").await;
    guest.send("hold", json!({})).await;
    stage.saw(Seen::Asked("hold".into())).await;
    let mut other = guest.again().await;
    let busy = other.ask("echo", json!({})).await;
    assert_eq!((busy.head.status, &busy.json()["error"]["data"]["kind"]), (429, &json!("busy")));
    stage.release.add_permits(1);
    assert_eq!(guest.client.head().await.status, 200);
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(other.ask("echo", json!({})).await.head.status);
    }
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
}

#[tokio::test]
async fn a_token_that_is_taken_away_ends_what_was_asked_with_it() {
    let (mut stage, mut guest) = stage().await;
    let mut listens = guest.again().await;
    listens.open("subscriptions/listen", json!({"notifications": {"toolsListChanged": true}})).await;
    assert_eq!(listens.hears().await.unwrap()["method"], "notifications/subscriptions/acknowledged");
    guest.send("hold", json!({})).await;
    stage.saw(Seen::Asked("hold".into())).await;
    // Who takes only JSON is not left alone with it, either.
    let mut terse = guest.again().await;
    let message = request(1, "hold", json!({"_meta": meta(&json!({}))})).to_string();
    terse.client.send("POST", &[NEW, ("mcp-method", "hold"), ("accept", "application/json")], &message).await;
    stage.saw(Seen::Asked("hold".into())).await;
    let mut without = plan();
    without.users.remove(0);
    stage.access.apply(&without);
    stage.gateway.end_revoked_sessions();
    for guest in [&mut guest, &mut terse] {
        stage.saw(Seen::Cancelled("hold".into())).await;
        assert_eq!(guest.client.head().await.status, 503);
    }
    let last = listens.hears().await.unwrap();
    assert_eq!(last["result"]["resultType"], "complete");
    assert_eq!(listens.hears().await, None);
}

#[tokio::test]
async fn a_token_that_is_taken_away_while_a_body_comes_in_is_good_for_nothing() {
    let (mut stage, guest) = stage().await;
    let with_session = Client::initialized(stage.address, "2025-11-25").await;
    stage.saw(Seen::Began).await;
    let mut about = request(1, "echo", json!({"_meta": meta(&json!({}))})).to_string();
    let mut coming = Vec::new();
    for (mut client, headers) in [(guest.client, &[NEW, ("mcp-method", "echo")][..]), (with_session, &[])] {
        let length = about.len().to_string();
        let headers = [headers, &[("content-type", "application/json"), ("content-length", &length)]].concat();
        client.send("POST", &[&headers[..], &[("expect", "100-continue")]].concat(), "").await;
        // Only who was let in is asked for the body.
        assert_eq!(client.head().await.status, 100);
        coming.push((client, about.clone()));
        about = request(1, "echo", json!({})).to_string();
    }
    let mut without = plan();
    without.users.remove(0);
    stage.access.apply(&without);
    stage.gateway.end_revoked_sessions();
    stage.saw(Seen::Ended("revoked")).await;
    for (mut client, body) in coming {
        client.send_raw(body.as_bytes()).await;
        assert_eq!(client.head().await.status, 401);
    }
    assert!(stage.seen.try_recv().is_err(), "it was asked");
}

#[tokio::test]
async fn the_endpoint_waits_for_requests_and_not_for_listeners_when_it_stops() {
    let mut stage = Stage::new(|settings| settings.limits.drain_timeout = Duration::from_secs(60));
    let mut guest = Guest::connect(stage.address, "/mcp").await;
    let mut listens = guest.again().await;
    let id = listens.open("subscriptions/listen", json!({"notifications": {}})).await;
    assert_eq!(listens.hears().await.unwrap()["params"]["notifications"], json!({}));
    guest.send("hold", json!({"x": 1})).await;
    stage.saw(Seen::Asked("hold".into())).await;
    let mut other = guest.again().await;
    let seen_by_clients = async {
        while other.ask("echo", json!({})).await.head.status != 503 {
            tokio::task::yield_now().await;
        }
        stage.release.add_permits(1);
        let head = guest.client.head().await;
        assert_eq!(head.status, 200);
        assert!(guest.client.body(&head).await.contains("\"x\":1"));
        let last = listens.hears().await.unwrap();
        assert_eq!(last["id"], id);
        assert_eq!(last["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"], id);
    };
    tokio::join!(stage.gateway.drain(), seen_by_clients);
}

#[tokio::test]
async fn who_listens_is_told_first_what_of_it_is_agreed_on_and_counts_as_a_session() {
    let mut stage = Stage::new(|settings| settings.limits.sessions_per_user_max = 1);
    let mut guest = Guest::connect(stage.address, "/i/alices/mcp").await;
    let wanted = json!({"toolsListChanged": true, "promptsListChanged": true, "resourceSubscriptions": ["a:b"]});
    stage.release.add_permits(1);
    let id = guest.open("subscriptions/listen", json!({"notifications": wanted})).await;
    let first = guest.hears().await.unwrap();
    let agreed = json!({"toolsListChanged": true, "resourceSubscriptions": ["a:b"]});
    assert_eq!(first["method"], "notifications/subscriptions/acknowledged");
    assert_eq!(first["params"]["notifications"], agreed);
    assert_eq!(first["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], id);
    assert_eq!(stage.gateway.session_count(), 1);
    let Some(Event::ClientConnected { client_type, .. }) = stage.events.recv().await else { panic!("it is not told") };
    assert_eq!(client_type, "raw/1");
    // It is not idle, so nobody has its place.
    let mut other = guest.again().await;
    let full = other.ask("subscriptions/listen", json!({"notifications": {}})).await;
    assert_eq!(full.head.status, 503);
    drop(guest);
    let (_, _, reason) = stage.disconnected().await;
    assert_eq!((reason.as_str(), stage.gateway.session_count()), ("closed", 0));
    for wrong in [json!({}), json!({"notifications": 1}), json!({"notifications": {"resourceSubscriptions": "a"}})] {
        let answer = other.ask("subscriptions/listen", wrong).await;
        assert_eq!((answer.head.status, &answer.json()["error"]["code"]), (400, &json!(-32602)));
    }
}

/// What a stranger writes into `_meta`.
fn strange() -> impl Strategy<Value = Value> {
    let names = select(
        &[
            "io.modelcontextprotocol/protocolVersion",
            "io.modelcontextprotocol/clientCapabilities",
            "io.modelcontextprotocol/clientInfo",
            "io.modelcontextprotocol/logLevel",
            "progressToken",
            "x",
        ][..],
    );
    let value = prop_oneof![
        Just(json!("2026-07-28")),
        Just(json!("debug")),
        Just(json!({})),
        Just(json!({"sampling": null, "elicitation": {"url": {}}})),
        Just(json!(null)),
        Just(json!([1, "a"])),
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    prop_oneof![
        6 => prop::collection::vec((names, value.clone()), 0..6)
            .prop_map(|members| members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
        1 => value,
    ]
}

#[test]
fn whatever_a_request_says_of_itself_it_has_an_answer_under_its_id() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let plan = plan();
    let limits = mcp_satellite::config::GatewayLimits { requests_per_second: 0, ..plan.limits.clone() };
    let plan = mcp_satellite::config::GatewayPlan { limits, ..plan };
    let (stage, client) = runtime.block_on(async {
        let stage = Stage::with(plan, |_| {});
        let client = Client::connect(stage.address).await;
        (stage, tokio::sync::Mutex::new(client))
    });
    let methods = select(&["echo", "server/discover", "tools/call", "ping", "initialize"][..]);
    let case = (strange(), methods, any::<bool>(), ".{0,8}");
    let outcome = TestRunner::new(Config { failure_persistence: None, ..Config::default() }).run(
        &case,
        |(meta, method, is_told, state)| {
            let message =
                request("i", method, json!({"_meta": meta, "requestState": state, "inputResponses": meta})).to_string();
            let headers = [("mcp-method", method), NEW];
            let headers = if is_told { &headers[..] } else { &headers[..1] };
            let answer = runtime.block_on(async { client.lock().await.ask("POST", headers, &message).await });
            prop_assert!([200, 400, 404].contains(&answer.head.status), "{:?}", answer);
            prop_assert!(answer.body.contains(r#""id":"i""#) || answer.json()["id"].is_null(), "{:?}", answer);
            Ok(())
        },
    );
    outcome.unwrap();
    drop(stage);
}
