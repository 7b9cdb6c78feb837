//! Clients of the era without sessions in front of servers of both eras: the translation of their messages.

use mcp_satellite::config::GatewayLimits;
use mcp_satellite::gateway::endpoint_id::EndpointId;
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use testkit::scripted_servers::{GIVE_UP, Lists, id};
use tokio::time::{Duration, Instant, timeout};

use super::client::{Answer, StatelessClient};
use super::scripted::ScriptedEndpoint;
use super::whole_satellite::{DONE, Server, TestSatellite};

const FILES: Lists = Lists {
    tools: r#"[{"name":"read"},{"name":"ask"},{"name":"slow"},{"name":"hang"},{"name":"change"}]"#,
    resources: r#"[{"name":"R","uri":"file:///a"}]"#,
    templates: "",
    prompts: r#"[{"name":"p"}]"#,
};

/// One server of each era.
async fn endpoint() -> ScriptedEndpoint {
    ScriptedEndpoint::with(&[("files", "a", FILES), ("newer", "n", FILES)]).await
}

async fn stateless_client(endpoint: &ScriptedEndpoint, path: &str) -> StatelessClient {
    let mut stateless = StatelessClient::connect(endpoint.address, path).await;
    stateless.capabilities = json!({"sampling": {}});
    stateless
}

fn call(tool: &str) -> Value {
    json!({"name": tool, "arguments": {}})
}

/// Calls of the tool `ask` of the server with sessions, for each path of the endpoint.
fn ask_calls() -> [(&'static str, Value); 3] {
    [
        ("/i/files/mcp", call("ask")),
        ("/mcp", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "files:ask"}})),
        ("/mcp?mode=flat", call("files__ask")),
    ]
}

/// The `requestState` of an `input_required` response. `Value` cannot represent everything in that response.
fn state(answer: &Answer) -> String {
    assert_eq!(answer.head.status, 200);
    assert!(answer.body.contains(r#""resultType":"input_required""#), "{answer:?}");
    let (_, rest) = answer.body.split_once(r#""requestState":""#).unwrap();
    rest.split('"').next().unwrap().to_owned()
}

fn retry(call: &Value, state: &str, responses: Value) -> Value {
    let mut call = call.clone();
    call["requestState"] = state.into();
    call["inputResponses"] = responses;
    call
}

async fn assert_unknown_state(stateless: &mut StatelessClient, call: &Value, state: &str) {
    let answer = stateless.ask("tools/call", retry(call, state, json!({"input-1": {"model": "m"}}))).await;
    let error = answer.json()["error"].clone();
    assert_eq!((answer.head.status, &error["code"]), (200, &json!(-32602)), "{answer:?}");
    assert!(error["message"].as_str().unwrap().starts_with("`requestState` is not valid"), "{error}");
}

#[tokio::test]
async fn a_session_server_gets_a_translated_request_and_its_result_is_completed() {
    let endpoint = endpoint().await;
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    let mut params = call("read");
    params["_meta"] = json!({"a/b": 1});
    params["inputResponses"] = json!({});
    let result = stateless.result("tools/call", params).await;
    assert_eq!(result["x-reflected"], json!({"name": "read", "arguments": {}, "_meta": {"a/b": 1}}));
    assert_eq!(result["resultType"], "complete");
    assert_eq!(result["_meta"]["io.modelcontextprotocol/serverInfo"], json!({"name": "played", "version": "1"}));
    assert_eq!(result.get("ttlMs"), None);
    for list in ["tools/list", "prompts/list", "resources/list", "resources/templates/list"] {
        let result = stateless.result(list, json!({})).await;
        let hints = [&result["resultType"], &result["ttlMs"], &result["cacheScope"]];
        assert_eq!(hints, [&json!("complete"), &json!(0), &json!("private")], "{result}");
    }
    let received = stateless.result("server/discover", json!({})).await;
    assert_eq!(received["capabilities"], json!({"tools": {}, "resources": {}, "prompts": {}}));
    assert_eq!(received["supportedVersions"][0], "2026-07-28");
    assert_eq!(received["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "played");
    assert!(received.get("protocolVersion").is_none() && received.get("serverInfo").is_none(), "{received}");
    // The error code of a missing resource differs between the eras, and tasks are not translated.
    let missing = stateless.ask("resources/read", json!({"uri": "file:///nothing"})).await;
    assert_eq!((missing.head.status, &missing.json()["error"]["code"]), (200, &json!(-32602)));
    let refused = stateless.ask("tasks/get", json!({"name": "t"})).await;
    assert_eq!((refused.head.status, &refused.json()["error"]["code"]), (404, &json!(-32601)));
    endpoint.end().await;
}

#[tokio::test]
async fn messages_between_the_same_era_pass_unchanged() {
    let endpoint = endpoint().await;
    let mut stateless = stateless_client(&endpoint, "/i/newer/mcp").await;
    let result = stateless.result("tools/call", call("read")).await;
    assert_eq!(result["x-reflected"]["_meta"], super::client::meta(&json!({"sampling": {}})));
    assert_eq!(result.get("_meta"), None);
    let listed = stateless.result("tools/list", json!({})).await;
    assert_eq!((&listed["ttlMs"], &listed["cacheScope"]), (&json!(7), &json!("public")));
    stateless.send("server/discover", json!({})).await;
    let head = stateless.client.head().await;
    let received = stateless.client.body(&head).await;
    assert!(received.contains(r#""x-own":1.50"#) && received.contains(r#""name":"new""#), "{received}");
    assert!(received.contains(r#""supportedVersions":["2026-07-28","2025-11-25""#), "{received}");
    // Input requests and their state pass unchanged.
    let answer = stateless.ask("tools/call", call("ask")).await;
    assert_eq!(state(&answer), "its own");
    assert!(answer.body.contains(r#""params":{"x":1e400}"#), "{answer:?}");
    let done = stateless.result("tools/call", retry(&call("ask"), "its own", json!({"q": {"model": "m"}}))).await;
    assert_eq!((&done["x-told"]["q"]["model"], &done["x-state"]), (&json!("m"), &json!("its own")));
    let unknown = stateless.ask("x/unknown", json!({})).await;
    assert_eq!((unknown.head.status, &unknown.json()["error"]["code"]), (404, &json!(-32601)));
    // The same through the combined views.
    for (path, call) in [
        ("/mcp", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "newer:ask"}})),
        ("/mcp?mode=flat", call("newer__ask")),
    ] {
        path.clone_into(&mut stateless.client.path);
        let answer = stateless.ask("tools/call", call.clone()).await;
        let done = stateless.result("tools/call", retry(&call, &state(&answer), json!({"q": {"model": "m"}}))).await;
        assert_eq!(done["x-told"]["q"]["model"], "m", "{path}");
    }
    endpoint.end().await;
}

#[tokio::test]
async fn an_input_request_of_a_stateless_server_reaches_a_session_client() {
    let endpoint = endpoint().await;
    let mut caller = endpoint.client("/i/newer/mcp").await;
    assert_eq!(caller.welcome["protocolVersion"], "2025-11-25");
    assert_eq!(caller.call_tool("read", json!({})).await["x-reflected"]["name"], "read");
    let request = caller.next("tools/call", call("ask")).to_string();
    caller.client.open("POST", &[], &request).await;
    let question = loop {
        let event = caller.client.event().await.unwrap();
        if event.data.contains("sampling/createMessage") {
            break event.data;
        }
    };
    let number = question.split("\"id\":").nth(1).unwrap().split([',', '}']).next().unwrap().to_owned();
    let mut other = caller.client.second_connection().await;
    let answer = format!(r#"{{"jsonrpc":"2.0","id":{number},"result":{{"model":"m"}}}}"#);
    assert_eq!(other.ask("POST", &[], &answer).await.head.status, 202);
    let done = caller.client.event().await.unwrap().json();
    assert_eq!(done["result"]["x-told"]["q"]["model"], "m", "{done}");
    endpoint.end().await;
}

#[tokio::test]
async fn a_server_request_becomes_input_required_and_the_retry_continues_the_call() {
    let endpoint = endpoint().await;
    for (path, call) in ask_calls() {
        let mut stateless = stateless_client(&endpoint, path).await;
        let answer = stateless.ask("tools/call", call.clone()).await;
        let first = state(&answer);
        let question = r#""inputRequests":{"input-1":{"method":"sampling/createMessage","params":{"x":1e400"#;
        assert!(answer.body.contains(question), "{answer:?}");
        // Without a valid response the request is repeated under a new state.
        let second = state(&stateless.ask("tools/call", retry(&call, &first, json!({}))).await);
        let third = state(&stateless.ask("tools/call", retry(&call, &second, json!({"input-1": 1, "x": {}}))).await);
        assert!(first != second && second != third);
        let mut other = stateless.second_connection().await;
        let done = other.result("tools/call", retry(&call, &third, json!({"input-1": {"model": "m"}, "x": {}}))).await;
        assert_eq!(done["x-told"], json!({"model": "m"}), "{path}");
        for used in [first, second, third] {
            assert_unknown_state(&mut stateless, &call, &used).await;
        }
    }
    endpoint.end().await;
}

#[tokio::test]
async fn a_cancelled_server_request_frees_its_memory() {
    let limit = |limits: &mut GatewayLimits| limits.streams_max = 5000;
    let endpoint = ScriptedEndpoint::limited(&[("files", "a", FILES)], limit).await;
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    let answer = stateless.ask("tools/call", call("doubt")).await;
    assert!(answer.body.contains("input-2") && !answer.body.contains("input-1"), "{answer:?}");
    let answered = retry(&call("doubt"), &state(&answer), json!({"input-2": {"model": "m"}}));
    assert_eq!(stateless.result("tools/call", answered).await["x-told"], json!({"model": "m"}));
    endpoint.end().await;
}

#[tokio::test]
async fn a_request_state_is_valid_only_for_its_user_and_request() {
    let endpoint = endpoint().await;
    for (path, call) in ask_calls() {
        let mut alice = stateless_client(&endpoint, path).await;
        let alices = state(&alice.ask("tools/call", call.clone()).await);
        let mut bob = stateless_client(&endpoint, path).await;
        bob.client.token = Some("bob-token".to_owned());
        let answer = bob.ask("tools/call", retry(&call, &alices, json!({"input-1": {"model": "m"}}))).await;
        assert!(!answer.body.contains("x-told") && !answer.body.contains("input_required"), "{answer:?}");
        // The response is the same as without a state.
        let never = bob.ask("tools/call", call.clone()).await;
        let outcome = |answer: &Answer| {
            let answer = answer.json();
            (answer["error"].clone(), answer["result"].clone())
        };
        assert_eq!(outcome(&answer), outcome(&never));
        let mut other = call.clone();
        other["arguments"]["more"] = json!(1);
        if path != "/mcp" {
            assert_unknown_state(&mut alice, &other, &alices).await;
        }
        let forged = alices.replace(|letter: char| letter.is_ascii_digit(), "0");
        assert_unknown_state(&mut alice, &call, &forged).await;
        assert_unknown_state(&mut alice, &call, "").await;
        // The failed attempts have not consumed the state.
        let done = alice.result("tools/call", retry(&call, &alices, json!({"input-1": {"model": "m"}}))).await;
        assert_eq!(done["x-told"]["model"], "m", "{path}");
    }
    endpoint.end().await;
}

#[tokio::test]
async fn a_server_request_without_client_capability_is_answered_with_an_error() {
    let endpoint = endpoint().await;
    for (path, call) in ask_calls() {
        let mut stateless = stateless_client(&endpoint, path).await;
        stateless.capabilities = json!({"elicitation": {}});
        let done = stateless.result("tools/call", call).await;
        let why = "the client does not support sampling";
        assert_eq!(done["x-told"], json!({"code": -32603, "message": why}), "{path}");
    }
    endpoint.end().await;
}

#[tokio::test]
async fn removing_an_instance_cancels_a_call_that_waits_for_input() {
    let mut endpoint = endpoint().await;
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    let request_state = state(&stateless.ask("tools/call", call("ask")).await);
    endpoint.gateway.end_endpoint_sessions(&EndpointId::Instance(id("a")));
    let cancelled = timeout(GIVE_UP, endpoint.servers.wait_for_message("notifications/cancelled")).await.unwrap();
    assert!(cancelled.contains("requestId"), "{cancelled}");
    assert_unknown_state(&mut stateless, &call("ask"), &request_state).await;
    endpoint.end().await;
}

#[tokio::test]
async fn a_restart_terminates_a_call_that_waits_for_input() {
    let endpoint = endpoint().await;
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    let request_state = state(&stateless.ask("tools/call", call("ask")).await);
    restart(&endpoint, "a").await;
    let ended =
        stateless.result("tools/call", retry(&call("ask"), &request_state, json!({"input-1": {"model": "m"}}))).await;
    let why = &ended["_meta"]["mcp-satellite/error"];
    assert_eq!((&why["kind"], &why["fate"]), (&json!("terminated"), &json!("maybe_executed")), "{ended}");
    assert_unknown_state(&mut stateless, &call("ask"), &request_state).await;
    endpoint.end().await;
}

#[tokio::test]
async fn a_disconnect_cancels_a_continued_call() {
    let mut endpoint = endpoint().await;
    for (path, call) in ask_calls() {
        let mut stateless = stateless_client(&endpoint, path).await;
        let request_state = state(&stateless.ask("tools/call", call.clone()).await);
        stateless.send("tools/call", retry(&call, &request_state, json!({"input-1": {"model": "hang"}}))).await;
        timeout(GIVE_UP, endpoint.servers.wait_for_message("\"hang\"")).await.unwrap();
        drop(stateless);
        timeout(GIVE_UP, endpoint.servers.wait_for_message("notifications/cancelled")).await.unwrap();
    }
    endpoint.end().await;
}

#[tokio::test]
async fn a_call_too_large_to_be_parked_gets_no_input_request() {
    let limit = |limits: &mut GatewayLimits| (limits.body_max, limits.bodies_max) = (8 << 10, 64 << 10);
    let endpoint = ScriptedEndpoint::limited(&[("files", "a", FILES)], limit).await;
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    let mut long = call("ask");
    long["arguments"] = json!({"x": "x".repeat(2 << 10)});
    let done = stateless.result("tools/call", long).await;
    let why = "too many or too large calls wait for a response of their client";
    assert_eq!(done["x-told"]["message"], why);
    state(&stateless.ask("tools/call", call("ask")).await);
    endpoint.end().await;
}

#[tokio::test]
async fn a_stdio_server_request_during_calls_of_two_clients_is_rejected() {
    let endpoint = endpoint().await;
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    let first = state(&stateless.ask("tools/call", call("ask")).await);
    let done = stateless.result("tools/call", call("ask")).await;
    let why = "calls of 2 clients are in progress, and the request does not identify one of them";
    assert_eq!(done["x-told"]["message"], why);
    let done = stateless.result("tools/call", retry(&call("ask"), &first, json!({"input-1": {"model": "m"}}))).await;
    assert_eq!(done["x-told"]["model"], "m");
    endpoint.end().await;
}

#[tokio::test]
async fn progress_uses_the_token_of_the_current_request() {
    let endpoint = endpoint().await;
    for (path, name) in [("/i/files/mcp", "slow"), ("/mcp?mode=flat", "files__slow")] {
        let mut stateless = stateless_client(&endpoint, path).await;
        stateless.extra_meta = json!({"progressToken": "t"});
        stateless.open("tools/call", call(name)).await;
        let received = stateless.next_message().await.unwrap();
        assert_eq!(
            (&received["method"], &received["params"]["progressToken"]),
            (&json!("notifications/progress"), &json!("t"))
        );
        assert!(stateless.next_message().await.unwrap()["result"].is_object());
        assert_eq!(stateless.next_message().await, None);
    }
    // The progress of a retried call uses the token of the retry.
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    stateless.extra_meta = json!({"progressToken": "t"});
    let state = state(&stateless.ask("tools/call", call("ask")).await);
    stateless.extra_meta = json!({"progressToken": "u"});
    stateless.open("tools/call", retry(&call("ask"), &state, json!({"input-1": {"model": "m"}}))).await;
    assert_eq!(stateless.next_message().await.unwrap()["params"]["progressToken"], "u");
    assert_eq!(stateless.next_message().await.unwrap()["result"]["x-told"]["model"], "m");
    endpoint.end().await;
}

#[tokio::test]
async fn a_url_elicitation_error_becomes_an_input_request() {
    let endpoint = endpoint().await;
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    let answer = stateless.ask("tools/call", call("go")).await;
    assert_eq!((answer.head.status, &answer.json()["error"]["code"]), (400, &json!(-32021)));
    let needed = json!({"elicitation": {"url": {}}});
    assert_eq!(answer.json()["error"]["data"]["requiredCapabilities"], needed);
    stateless.capabilities = needed;
    let result = stateless.result("tools/call", call("go")).await;
    assert_eq!(result["resultType"], "input_required");
    let params = json!({"mode": "url", "message": "m", "url": "https://a.example"});
    assert_eq!(result["inputRequests"], json!({"url-1": {"method": "elicitation/create", "params": params}}));
    // A client that declines gets the error of the server.
    let mut declined = call("go");
    declined["inputResponses"] = json!({"url-1": {"action": "decline"}});
    let answer = stateless.ask("tools/call", declined.clone()).await;
    let error = &answer.json()["error"];
    assert_eq!((&error["code"], &error["message"]), (&json!(-32603), &json!("go there first")));
    declined["inputResponses"]["url-1"]["action"] = "accept".into();
    assert_eq!(stateless.result("tools/call", declined).await["resultType"], "input_required");
    endpoint.end().await;
}

#[tokio::test]
async fn clients_that_vanish_leak_nothing() {
    let mut endpoint = endpoint().await;
    for round in 0..40 {
        let mut listener = stateless_client(&endpoint, "/i/files/mcp").await;
        listener.open("subscriptions/listen", json!({"notifications": {"toolsListChanged": true}})).await;
        let mut hangs = stateless_client(&endpoint, "/i/files/mcp").await;
        hangs.send("tools/call", call("hang")).await;
        timeout(GIVE_UP, endpoint.servers.wait_for_message("\"hang\"")).await.unwrap();
        drop((listener, hangs));
        timeout(GIVE_UP, endpoint.servers.wait_for_message("notifications/cancelled")).await.unwrap();
        assert!(endpoint.gateway.session_count() <= 40, "{round}");
    }
    let all_gone = async {
        while endpoint.gateway.session_count() > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(GIVE_UP, all_gone).await.unwrap();
    // No call is in progress any more: a server request is not ambiguous.
    let mut stateless = stateless_client(&endpoint, "/i/files/mcp").await;
    state(&stateless.ask("tools/call", call("ask")).await);
    endpoint.end().await;
}

async fn restart(endpoint: &ScriptedEndpoint, installation: &str) {
    let before = endpoint.servers.runtime.status(&id(installation)).unwrap().restarts;
    endpoint.servers.runtime.restart(&id(installation)).await.unwrap();
    endpoint.servers.wait_until(installation, |view| view.status == Status::Online && view.restarts > before).await;
}

#[tokio::test]
async fn list_changes_carry_the_subscription_id_of_the_listener() {
    let endpoint = endpoint().await;
    let all = json!({"toolsListChanged": true, "promptsListChanged": true, "resourceSubscriptions": ["file:///a"]});
    let both = json!({"toolsListChanged": true, "promptsListChanged": true});
    for (path, agreed) in [("/i/files/mcp", &both), ("/mcp?mode=flat", &both), ("/mcp", &json!({}))] {
        let mut listener = stateless_client(&endpoint, path).await;
        let own = listener.open("subscriptions/listen", json!({"notifications": all})).await;
        let first = listener.next_message().await.unwrap();
        assert_eq!(first["method"], "notifications/subscriptions/acknowledged");
        assert_eq!(&first["params"]["notifications"], agreed, "{path}");
        if path == "/mcp" {
            continue;
        }
        let more = if path == "/i/files/mcp" { r#"[{"name":"read"}]"# } else { r#"[{"name":"write"}]"# };
        let mut only_prompts = stateless_client(&endpoint, path).await;
        only_prompts.open("subscriptions/listen", json!({"notifications": {"promptsListChanged": true}})).await;
        only_prompts.next_message().await.unwrap();
        endpoint.servers.relist("a", Lists { tools: more, ..FILES });
        restart(&endpoint, "a").await;
        let received = timeout(GIVE_UP, listener.next_message()).await.unwrap().unwrap();
        assert_eq!(received["method"], "notifications/tools/list_changed", "{path}");
        assert_eq!(received["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], own);
        // A listener gets only the notifications that it subscribed to.
        endpoint.servers.relist("a", Lists { tools: more, prompts: r#"[{"name":"q"}]"#, ..FILES });
        restart(&endpoint, "a").await;
        for stateless in [&mut only_prompts, &mut listener] {
            let received = timeout(GIVE_UP, stateless.next_message()).await.unwrap().unwrap();
            assert_eq!(received["method"], "notifications/prompts/list_changed", "{path}");
        }
        endpoint.servers.relist("a", FILES);
        restart(&endpoint, "a").await;
    }
    // For a server without sessions the endpoint forwards the notifications of the server.
    let mut listener = stateless_client(&endpoint, "/i/newer/mcp").await;
    let own = listener.open("subscriptions/listen", json!({"notifications": all})).await;
    let agreed = listener.next_message().await.unwrap()["params"]["notifications"].clone();
    let uris = json!({"toolsListChanged": true, "resourceSubscriptions": ["file:///a"]});
    assert_eq!(agreed, uris);
    stateless_client(&endpoint, "/i/newer/mcp").await.result("tools/call", call("change")).await;
    let received = timeout(GIVE_UP, listener.next_message()).await.unwrap().unwrap();
    assert_eq!(received["method"], "notifications/tools/list_changed");
    assert_eq!(received["params"]["_meta"], json!({"io.modelcontextprotocol/subscriptionId": own}));
    endpoint.end().await;
}

#[tokio::test]
async fn resource_subscriptions_count_as_requests_and_rejected_ones_are_not_acknowledged() {
    let limit = |limits: &mut GatewayLimits| (limits.requests_per_second, limits.burst) = (20, 5);
    let endpoint = ScriptedEndpoint::limited(&[("subscribed", "a", FILES)], limit).await;
    let mut listener = stateless_client(&endpoint, "/i/subscribed/mcp").await;
    let mut uris: Vec<String> = (10..25).map(|number| format!("file:///{number}")).collect();
    let began = Instant::now();
    let wanted = [&["file:///0/refuse".to_owned()], &uris[..], &["file:///refuse".to_owned()]].concat();
    listener.open("subscriptions/listen", json!({"notifications": {"resourceSubscriptions": wanted}})).await;
    let first = listener.next_message().await.unwrap();
    let mut agreed: Vec<String> =
        serde_json::from_value(first["params"]["notifications"]["resourceSubscriptions"].clone()).unwrap();
    agreed.sort();
    uris.sort();
    assert_eq!(agreed, uris);
    // Of eighteen requests five fit the burst; the others wait for the rate limit.
    assert!(began.elapsed() >= Duration::from_millis(600), "the subscriptions were not counted");
    endpoint.end().await;
}

#[tokio::test]
async fn log_messages_are_sent_from_the_requested_level() {
    let satellite = TestSatellite::start().await;
    satellite.online(Server::mirror("mirror")).await;
    let mut stateless = StatelessClient::connect(satellite.address, "/i/mirror/mcp").await;
    let logged = |level: &str| json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": level}});
    let done: Value = serde_json::from_str(DONE).unwrap();
    let say = json!({"messages": [logged("debug"), logged("error"), done]});
    // Without a requested level no log message is sent.
    assert_eq!(stateless.result("mirror/say", say.clone()).await["resultType"], "complete");
    stateless.extra_meta = json!({"io.modelcontextprotocol/logLevel": "warning"});
    stateless.open("mirror/say", say).await;
    assert_eq!(stateless.next_message().await.unwrap()["params"]["level"], "error");
    assert_eq!(stateless.next_message().await.unwrap()["result"]["resultType"], "complete");
    assert_eq!(stateless.next_message().await, None);
    stateless.extra_meta = json!({});
    let received = stateless.result("mirror/told", json!({})).await["told"].clone();
    assert_eq!(
        (&received[0]["method"], &received[0]["params"]),
        (&json!("logging/setLevel"), &json!({"level": "warning"}))
    );
    satellite.end().await;
}
