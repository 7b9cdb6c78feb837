//! Clients of the era without sessions in front of a fake handler: required metadata and headers, errors, and the end
//! of requests.

use mcp_satellite::actors::model::event::Event;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use tokio::time::Duration;

use super::client::{Client, StatelessClient, meta, notification, request};
use super::fake::{FakeEndpoint, HandlerEvent, plan};

const NEW: (&str, &str) = ("mcp-protocol-version", "2026-07-28");

async fn endpoint() -> (FakeEndpoint, StatelessClient) {
    let endpoint = FakeEndpoint::new(|_| {});
    let stateless = StatelessClient::connect(endpoint.address, "/mcp").await;
    (endpoint, stateless)
}

/// Sends a message and returns the status and the error code of the response, whose id must match.
async fn status_and_code(client: &mut Client, headers: &[(&str, &str)], message: &Value) -> (u16, i64) {
    let answer = client.ask("POST", headers, &message.to_string()).await;
    assert_eq!(answer.json()["id"], message["id"], "{answer:?}");
    (answer.head.status, answer.json()["error"]["code"].as_i64().unwrap_or_default())
}

#[tokio::test]
async fn a_complete_stateless_request_needs_no_session() {
    let (mut endpoint, mut stateless) = endpoint().await;
    for _ in 0..2 {
        let result = stateless.result("echo", json!({"x": 1})).await;
        assert_eq!((&result["x"], &result["resultType"]), (&json!(1), &json!("complete")));
        endpoint.wait_for(HandlerEvent::SessionEnded("closed")).await;
    }
    // A session id is ignored.
    stateless.client.session = Some("0".repeat(48));
    assert_eq!(stateless.result("echo", json!({"x": 2})).await["x"], 2);
    assert_eq!(endpoint.gateway.session_count(), 0);
    assert!(endpoint.events.try_recv().is_err(), "a single request emits no event");
}

#[tokio::test]
async fn missing_metadata_or_headers_are_rejected_with_their_code() {
    let (_endpoint, stateless) = endpoint().await;
    let mut client = stateless.client;
    let list = ("mcp-method", "tools/list");
    let about = |meta: Value| request(5, "tools/list", json!({"_meta": meta}));
    let full_meta = || meta(&json!({}));
    let version = |version: &str| {
        let mut meta = full_meta();
        meta["io.modelcontextprotocol/protocolVersion"] = version.into();
        about(meta)
    };
    let without = |name: &str| {
        let mut meta = full_meta();
        meta.as_object_mut().unwrap().remove(&format!("io.modelcontextprotocol/{name}"));
        about(meta)
    };
    for (headers, message, expected) in [
        (&[NEW, list][..], about(full_meta()), (200, 0)),
        (&[NEW, list], without("clientInfo"), (200, 0)),
        (&[NEW, list], request(5, "tools/list", json!({})), (400, -32602)),
        (&[NEW, list], json!({"jsonrpc": "2.0", "id": "x", "method": "tools/list"}), (400, -32602)),
        (&[NEW, list], without("protocolVersion"), (400, -32602)),
        (&[NEW, list], without("clientCapabilities"), (400, -32602)),
        (&[NEW, list], version("v999"), (400, -32020)),
        (&[("mcp-protocol-version", "v999"), list], version("v999"), (400, -32022)),
        (&[("mcp-protocol-version", "2025-11-25"), list], about(full_meta()), (400, -32020)),
        (&[list], about(full_meta()), (400, -32020)),
        (&[NEW], about(full_meta()), (400, -32020)),
        (&[NEW, ("mcp-method", "TOOLS/LIST")], about(full_meta()), (400, -32020)),
        (&[NEW, list, list], about(full_meta()), (400, -32020)),
        (&[], request(5, "server/discover", json!({})), (400, -32602)),
    ] {
        assert_eq!(status_and_code(&mut client, headers, &message).await, expected, "{headers:?} {message}");
    }
    let mut unsupported = full_meta();
    unsupported["io.modelcontextprotocol/protocolVersion"] = "v999".into();
    let message = about(unsupported).to_string();
    let answer = client.ask("POST", &[("mcp-protocol-version", "v999"), list], &message).await.json();
    assert_eq!(answer["error"]["data"]["requested"], "v999");
    let supported = answer["error"]["data"]["supported"].as_array().unwrap().clone();
    assert!(supported.contains(&json!("2026-07-28")) && supported.contains(&json!("2025-11-25")), "{supported:?}");
    let mut stateless = StatelessClient::connect(client.address, "/mcp").await;
    let received = stateless.result("server/discover", json!({})).await;
    assert_eq!(received["resultType"], "complete");
}

#[tokio::test]
async fn headers_that_differ_from_the_body_are_rejected() {
    let (_endpoint, stateless) = endpoint().await;
    let mut client = stateless.client;
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
        assert_eq!(
            status_and_code(&mut client, headers, &call(arguments.clone())).await,
            expected,
            "{headers:?} {arguments}"
        );
    }
}

#[tokio::test]
async fn methods_of_the_session_era_are_not_available_to_stateless_clients() {
    let (_endpoint, mut stateless) = endpoint().await;
    for method in ["initialize", "ping", "logging/setLevel", "resources/subscribe", "resources/unsubscribe"] {
        let answer = stateless.ask(method, json!({"uri": "a:b"})).await;
        assert_eq!((answer.head.status, &answer.json()["error"]["code"]), (404, &json!(-32601)), "{method}");
    }
    let mut client = stateless.client;
    for method in ["GET", "DELETE"] {
        let answer = client.ask(method, &[NEW, ("last-event-id", "1-1")], "").await;
        assert_eq!((answer.head.status, answer.head.header("allow")), (405, Some("POST")));
    }
    let message = notification("notifications/cancelled", json!({"requestId": 1})).to_string();
    assert_eq!(client.ask("POST", &[NEW], &message).await.head.status, 202);
    let answer = json!({"jsonrpc": "2.0", "id": 1, "result": {}}).to_string();
    assert_eq!(client.ask("POST", &[NEW], &answer).await.head.status, 400);
    // `initialize` opens a session despite the version header.
    let initialize_request = super::client::initialize("2026-07-28").to_string();
    assert_eq!(client.ask("POST", &[NEW], &initialize_request).await.head.status, 200);
}

#[tokio::test]
async fn the_instance_of_another_user_looks_nonexistent_to_stateless_clients() {
    let (_endpoint, mut stateless) = endpoint().await;
    let mut bodies = Vec::new();
    for (path, status) in [("/i/alices/mcp", 200), ("/i/bobs/mcp", 404), ("/i/nobodys/mcp", 404)] {
        path.clone_into(&mut stateless.client.path);
        for method in ["echo", "server/discover", "subscriptions/listen", "tools/call"] {
            let id = stateless.send(method, json!({"name": "marked", "notifications": {}})).await;
            let head = stateless.client.head().await;
            assert_eq!(head.status, status, "{path} {method}");
            if status == 404 {
                let body = stateless.client.body(&head).await;
                assert!(body.contains("-32603"), "{body}");
                bodies.push(body.replace(&format!("\"id\":{id}"), ""));
            } else if head.is_stream() {
                stateless = stateless.second_connection().await;
            } else {
                stateless.client.body(&head).await;
            }
        }
    }
    bodies.dedup();
    assert_eq!(bodies.len(), 1, "{bodies:?}");
    // Without a token all of them get 401.
    stateless.client.token = None;
    stateless.send("echo", json!({})).await;
    assert_eq!(stateless.client.head().await.status, 401);
}

#[tokio::test]
async fn a_stateless_stream_has_no_event_ids_and_ends_with_the_response() {
    let (mut endpoint, mut stateless) = endpoint().await;
    let id = stateless.open("talk", json!({"x": 1})).await;
    assert_eq!(stateless.next_message().await.unwrap()["params"], "first");
    endpoint.release.add_permits(1);
    let last = stateless.next_message().await.unwrap();
    assert_eq!((&last["id"], &last["result"]["resultType"]), (&json!(id), &json!("complete")));
    assert_eq!(stateless.next_message().await, None);
    endpoint.wait_for(HandlerEvent::SessionEnded("closed")).await;
}

#[tokio::test]
async fn a_disconnect_cancels_before_and_after_the_stream_starts() {
    for method in ["hold", "talk"] {
        let (mut endpoint, mut stateless) = endpoint().await;
        stateless.send(method, json!({})).await;
        endpoint.wait_for(HandlerEvent::Request(method.into())).await;
        if method == "talk" {
            stateless.client.head().await;
            stateless.next_message().await.unwrap();
        }
        drop(stateless);
        endpoint.wait_for(HandlerEvent::RequestDropped(method.into())).await;
        endpoint.wait_for(HandlerEvent::SessionEnded("closed")).await;
    }
}

#[tokio::test]
async fn the_response_style_follows_the_setting_and_the_accept_header() {
    let endpoint = FakeEndpoint::new(|settings| settings.answers = mcp_satellite::config::ResponseStyle::Sse);
    let mut stateless = StatelessClient::connect(endpoint.address, "/mcp").await;
    let id = stateless.open("echo", json!({"x": 1})).await;
    assert_eq!(stateless.next_message().await.unwrap()["id"], id);
    assert_eq!(stateless.next_message().await, None);
    // An error with its own HTTP status is not sent as a stream.
    let answer = stateless.ask("ping", json!({})).await;
    assert_eq!(answer.head.status, 404);
    stateless.client.extra = vec![("accept".to_owned(), "application/json".to_owned())];
    let headers = [NEW, ("mcp-method", "chat"), ("accept", "application/json")];
    let message = request(1, "chat", json!({"_meta": meta(&json!({}))})).to_string();
    stateless.client.extra.clear();
    let answer = stateless.client.ask("POST", &headers, &message).await;
    assert_eq!((answer.head.status, answer.json()["id"].as_u64()), (200, Some(1)));
    let message =
        request(1, "subscriptions/listen", json!({"_meta": meta(&json!({})), "notifications": {}})).to_string();
    let headers = [NEW, ("mcp-method", "subscriptions/listen"), ("accept", "application/json")];
    assert_eq!(stateless.client.ask("POST", &headers, &message).await.head.status, 406);
}

#[tokio::test]
async fn a_stateless_client_has_the_limits_of_its_user() {
    let mut limited = plan();
    (limited.limits.calls_per_user_max, limited.limits.requests_per_second, limited.limits.burst) = (1, 1, 4);
    let mut endpoint = FakeEndpoint::with(limited, |_| {});
    let mut stateless = StatelessClient::connect(endpoint.address, "/mcp").await;
    stateless.send("hold", json!({})).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let mut other = stateless.second_connection().await;
    let busy = other.ask("echo", json!({})).await;
    assert_eq!((busy.head.status, &busy.json()["error"]["data"]["kind"]), (429, &json!("busy")));
    endpoint.release.add_permits(1);
    assert_eq!(stateless.client.head().await.status, 200);
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(other.ask("echo", json!({})).await.head.status);
    }
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
}

#[tokio::test]
async fn revoking_a_token_cancels_its_stateless_requests() {
    let (mut endpoint, mut stateless) = endpoint().await;
    let mut listener = stateless.second_connection().await;
    listener.open("subscriptions/listen", json!({"notifications": {"toolsListChanged": true}})).await;
    assert_eq!(listener.next_message().await.unwrap()["method"], "notifications/subscriptions/acknowledged");
    stateless.send("hold", json!({})).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    // A JSON-only request is cancelled, too.
    let mut json_only = stateless.second_connection().await;
    let message = request(1, "hold", json!({"_meta": meta(&json!({}))})).to_string();
    json_only.client.send("POST", &[NEW, ("mcp-method", "hold"), ("accept", "application/json")], &message).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let mut without = plan();
    without.users.remove(0);
    endpoint.access.apply(&without);
    endpoint.gateway.end_revoked_sessions();
    for stateless in [&mut stateless, &mut json_only] {
        endpoint.wait_for(HandlerEvent::RequestDropped("hold".into())).await;
        assert_eq!(stateless.client.head().await.status, 503);
    }
    let last = listener.next_message().await.unwrap();
    assert_eq!(last["result"]["resultType"], "complete");
    assert_eq!(listener.next_message().await, None);
}

#[tokio::test]
async fn a_token_revoked_while_the_body_arrives_gets_401() {
    let (mut endpoint, stateless) = endpoint().await;
    let with_session = Client::initialized(endpoint.address, "2025-11-25").await;
    endpoint.wait_for(HandlerEvent::SessionStarted).await;
    let mut about = request(1, "echo", json!({"_meta": meta(&json!({}))})).to_string();
    let mut coming = Vec::new();
    for (mut client, headers) in [(stateless.client, &[NEW, ("mcp-method", "echo")][..]), (with_session, &[])] {
        let length = about.len().to_string();
        let headers = [headers, &[("content-type", "application/json"), ("content-length", &length)]].concat();
        client.send("POST", &[&headers[..], &[("expect", "100-continue")]].concat(), "").await;
        // 100 means that the token was accepted.
        assert_eq!(client.head().await.status, 100);
        coming.push((client, about.clone()));
        about = request(1, "echo", json!({})).to_string();
    }
    let mut without = plan();
    without.users.remove(0);
    endpoint.access.apply(&without);
    endpoint.gateway.end_revoked_sessions();
    endpoint.wait_for(HandlerEvent::SessionEnded("revoked")).await;
    for (mut client, body) in coming {
        client.send_raw(body.as_bytes()).await;
        assert_eq!(client.head().await.status, 401);
    }
    assert!(endpoint.seen.try_recv().is_err(), "the handler got a request");
}

#[tokio::test]
async fn a_draining_endpoint_waits_for_requests_but_not_for_listeners() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.drain_timeout = Duration::from_secs(60));
    let mut stateless = StatelessClient::connect(endpoint.address, "/mcp").await;
    let mut listener = stateless.second_connection().await;
    let id = listener.open("subscriptions/listen", json!({"notifications": {}})).await;
    assert_eq!(listener.next_message().await.unwrap()["params"]["notifications"], json!({}));
    stateless.send("hold", json!({"x": 1})).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let mut other = stateless.second_connection().await;
    let seen_by_clients = async {
        while other.ask("echo", json!({})).await.head.status != 503 {
            tokio::task::yield_now().await;
        }
        endpoint.release.add_permits(1);
        let head = stateless.client.head().await;
        assert_eq!(head.status, 200);
        assert!(stateless.client.body(&head).await.contains("\"x\":1"));
        let last = listener.next_message().await.unwrap();
        assert_eq!(last["id"], id);
        assert_eq!(last["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"], id);
    };
    tokio::join!(endpoint.gateway.drain(), seen_by_clients);
}

#[tokio::test]
async fn a_listener_is_acknowledged_first_and_counts_as_a_session() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.sessions_per_user_max = 1);
    let mut stateless = StatelessClient::connect(endpoint.address, "/i/alices/mcp").await;
    let wanted = json!({"toolsListChanged": true, "promptsListChanged": true, "resourceSubscriptions": ["a:b"]});
    endpoint.release.add_permits(1);
    let id = stateless.open("subscriptions/listen", json!({"notifications": wanted})).await;
    let first = stateless.next_message().await.unwrap();
    let agreed = json!({"toolsListChanged": true, "resourceSubscriptions": ["a:b"]});
    assert_eq!(first["method"], "notifications/subscriptions/acknowledged");
    assert_eq!(first["params"]["notifications"], agreed);
    assert_eq!(first["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], id);
    assert_eq!(endpoint.gateway.session_count(), 1);
    let Some(Event::ClientConnected { client_type, .. }) = endpoint.events.recv().await else {
        panic!("no ClientConnected event")
    };
    assert_eq!(client_type, "raw/1");
    // A listener is not idle, so it is not evicted.
    let mut other = stateless.second_connection().await;
    let full = other.ask("subscriptions/listen", json!({"notifications": {}})).await;
    assert_eq!(full.head.status, 503);
    drop(stateless);
    let (_, _, reason) = endpoint.next_disconnect().await;
    assert_eq!((reason.as_str(), endpoint.gateway.session_count()), ("closed", 0));
    for wrong in [json!({}), json!({"notifications": 1}), json!({"notifications": {"resourceSubscriptions": "a"}})] {
        let answer = other.ask("subscriptions/listen", wrong).await;
        assert_eq!((answer.head.status, &answer.json()["error"]["code"]), (400, &json!(-32602)));
    }
}

/// Random content of `_meta`.
fn arbitrary_meta() -> impl Strategy<Value = Value> {
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
fn any_meta_gets_a_response_with_the_request_id() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let plan = plan();
    let limits = mcp_satellite::config::GatewayLimits { requests_per_second: 0, ..plan.limits.clone() };
    let plan = mcp_satellite::config::GatewayPlan { limits, ..plan };
    let (endpoint, client) = runtime.block_on(async {
        let endpoint = FakeEndpoint::with(plan, |_| {});
        let client = Client::connect(endpoint.address).await;
        (endpoint, tokio::sync::Mutex::new(client))
    });
    let methods = select(&["echo", "server/discover", "tools/call", "ping", "initialize"][..]);
    let case = (arbitrary_meta(), methods, any::<bool>(), ".{0,8}");
    let outcome = TestRunner::new(Config { failure_persistence: None, ..Config::default() }).run(
        &case,
        |(meta, method, has_version_header, state)| {
            let message =
                request("i", method, json!({"_meta": meta, "requestState": state, "inputResponses": meta})).to_string();
            let headers = [("mcp-method", method), NEW];
            let headers = if has_version_header { &headers[..] } else { &headers[..1] };
            let answer = runtime.block_on(async { client.lock().await.ask("POST", headers, &message).await });
            prop_assert!([200, 400, 404].contains(&answer.head.status), "{:?}", answer);
            prop_assert!(answer.body.contains(r#""id":"i""#) || answer.json()["id"].is_null(), "{:?}", answer);
            Ok(())
        },
    );
    outcome.unwrap();
    drop(endpoint);
}
