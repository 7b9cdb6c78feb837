//! Clients of the era without sessions, before servers of both eras: what becomes of what they say to each other.

use mcp_satellite::config::GatewayLimits;
use mcp_satellite::gateway::face::EndpointId;
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, timeout};

use super::client::{Answer, Guest};
use super::house::{GIVE_UP, Lists, id};
use super::played::Played;
use super::whole::{DONE, Server, Whole};

const FILES: Lists = Lists {
    tools: r#"[{"name":"read"},{"name":"ask"},{"name":"slow"},{"name":"hang"},{"name":"change"}]"#,
    resources: r#"[{"name":"R","uri":"file:///a"}]"#,
    templates: "",
    prompts: r#"[{"name":"p"}]"#,
};

/// One server of each era.
async fn stage() -> Played {
    Played::with(&[("files", "a", FILES), ("newer", "n", FILES)]).await
}

async fn guest(played: &Played, path: &str) -> Guest {
    let mut guest = Guest::connect(played.address, path).await;
    guest.capabilities = json!({"sampling": {}});
    guest
}

fn call(tool: &str) -> Value {
    json!({"name": tool, "arguments": {}})
}

/// The calls of the tool `ask` of the server of sessions, by the paths at which it is called so.
fn asking() -> [(&'static str, Value); 3] {
    [
        ("/i/files/mcp", call("ask")),
        ("/mcp", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "files:ask"}})),
        ("/mcp?mode=flat", call("files__ask")),
    ]
}

/// The state in an answer that asks for more. It may hold what no value of ours can.
fn state(answer: &Answer) -> String {
    assert_eq!(answer.head.status, 200);
    assert!(answer.body.contains(r#""resultType":"input_required""#), "{answer:?}");
    let (_, rest) = answer.body.split_once(r#""requestState":""#).unwrap();
    rest.split('"').next().unwrap().to_owned()
}

/// The same request, made again.
fn again(call: &Value, state: &str, responses: Value) -> Value {
    let mut call = call.clone();
    call["requestState"] = state.into();
    call["inputResponses"] = responses;
    call
}

/// That nobody waits for this, in the words in which everybody is told.
async fn is_unknown(guest: &mut Guest, call: &Value, state: &str) {
    let answer = guest.ask("tools/call", again(call, state, json!({"input-1": {"model": "m"}}))).await;
    let error = answer.json()["error"].clone();
    assert_eq!((answer.head.status, &error["code"]), (200, &json!(-32602)), "{answer:?}");
    assert!(error["message"].as_str().unwrap().starts_with("`requestState` is not valid"), "{error}");
}

#[tokio::test]
async fn a_server_of_sessions_is_asked_without_what_it_does_not_know_and_its_answer_is_completed() {
    let played = stage().await;
    let mut guest = guest(&played, "/i/files/mcp").await;
    let mut asked = call("read");
    asked["_meta"] = json!({"a/b": 1});
    asked["inputResponses"] = json!({});
    let result = guest.result("tools/call", asked).await;
    assert_eq!(result["x-reflected"], json!({"name": "read", "arguments": {}, "_meta": {"a/b": 1}}));
    assert_eq!(result["resultType"], "complete");
    assert_eq!(result["_meta"]["io.modelcontextprotocol/serverInfo"], json!({"name": "played", "version": "1"}));
    assert_eq!(result.get("ttlMs"), None);
    for list in ["tools/list", "prompts/list", "resources/list", "resources/templates/list"] {
        let result = guest.result(list, json!({})).await;
        let hints = [&result["resultType"], &result["ttlMs"], &result["cacheScope"]];
        assert_eq!(hints, [&json!("complete"), &json!(0), &json!("private")], "{result}");
    }
    let told = guest.result("server/discover", json!({})).await;
    assert_eq!(told["capabilities"], json!({"tools": {}, "resources": {}, "prompts": {}}));
    assert_eq!(told["supportedVersions"][0], "2026-07-28");
    assert_eq!(told["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "played");
    assert!(told.get("protocolVersion").is_none() && told.get("serverInfo").is_none(), "{told}");
    // What is not there has another code now, and tasks of the one are none of the other.
    let missing = guest.ask("resources/read", json!({"uri": "file:///nothing"})).await;
    assert_eq!((missing.head.status, &missing.json()["error"]["code"]), (200, &json!(-32602)));
    let refused = guest.ask("tasks/get", json!({"name": "t"})).await;
    assert_eq!((refused.head.status, &refused.json()["error"]["code"]), (404, &json!(-32601)));
    played.end().await;
}

#[tokio::test]
async fn a_request_and_its_answer_go_as_they_are_where_both_speak_the_same() {
    let played = stage().await;
    let mut guest = guest(&played, "/i/newer/mcp").await;
    let result = guest.result("tools/call", call("read")).await;
    assert_eq!(result["x-reflected"]["_meta"], super::client::meta(&json!({"sampling": {}})));
    assert_eq!(result.get("_meta"), None);
    let listed = guest.result("tools/list", json!({})).await;
    assert_eq!((&listed["ttlMs"], &listed["cacheScope"]), (&json!(7), &json!("public")));
    guest.send("server/discover", json!({})).await;
    let head = guest.client.head().await;
    let told = guest.client.body(&head).await;
    assert!(told.contains(r#""x-own":1.50"#) && told.contains(r#""name":"new""#), "{told}");
    assert!(told.contains(r#""supportedVersions":["2026-07-28","2025-11-25""#), "{told}");
    // What it asks is its own affair, and its client's.
    let asked = guest.ask("tools/call", call("ask")).await;
    assert_eq!(state(&asked), "its own");
    assert!(asked.body.contains(r#""params":{"x":1e400}"#), "{asked:?}");
    let done = guest.result("tools/call", again(&call("ask"), "its own", json!({"q": {"model": "m"}}))).await;
    assert_eq!((&done["x-told"]["q"]["model"], &done["x-state"]), (&json!("m"), &json!("its own")));
    let unknown = guest.ask("x/unknown", json!({})).await;
    assert_eq!((unknown.head.status, &unknown.json()["error"]["code"]), (404, &json!(-32601)));
    // The same behind the other paths.
    for (path, call) in [
        ("/mcp", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "newer:ask"}})),
        ("/mcp?mode=flat", call("newer__ask")),
    ] {
        path.clone_into(&mut guest.client.path);
        let asked = guest.ask("tools/call", call.clone()).await;
        let done = guest.result("tools/call", again(&call, &state(&asked), json!({"q": {"model": "m"}}))).await;
        assert_eq!(done["x-told"]["q"]["model"], "m", "{path}");
    }
    played.end().await;
}

#[tokio::test]
async fn a_client_of_a_session_is_asked_what_a_server_without_sessions_wants_to_know() {
    let played = stage().await;
    let mut caller = played.client("/i/newer/mcp").await;
    assert_eq!(caller.welcome["protocolVersion"], "2025-11-25");
    assert_eq!(caller.calls("read", json!({})).await["x-reflected"]["name"], "read");
    let asked = caller.next("tools/call", call("ask")).to_string();
    caller.client.open("POST", &[], &asked).await;
    let question = loop {
        let event = caller.client.event().await.unwrap();
        if event.data.contains("sampling/createMessage") {
            break event.data;
        }
    };
    let number = question.split("\"id\":").nth(1).unwrap().split([',', '}']).next().unwrap().to_owned();
    let mut other = caller.client.again().await;
    let answer = format!(r#"{{"jsonrpc":"2.0","id":{number},"result":{{"model":"m"}}}}"#);
    assert_eq!(other.ask("POST", &[], &answer).await.head.status, 202);
    let done = caller.client.event().await.unwrap().json();
    assert_eq!(done["result"]["x-told"]["q"]["model"], "m", "{done}");
    played.end().await;
}

#[tokio::test]
async fn what_a_server_asks_is_the_answer_and_the_call_goes_on_with_what_its_client_says() {
    let played = stage().await;
    for (path, call) in asking() {
        let mut guest = guest(&played, path).await;
        let asked = guest.ask("tools/call", call.clone()).await;
        let first = state(&asked);
        let question = r#""inputRequests":{"input-1":{"method":"sampling/createMessage","params":{"x":1e400"#;
        assert!(asked.body.contains(question), "{asked:?}");
        // Who does not answer is asked again, and what is no answer is none.
        let second = state(&guest.ask("tools/call", again(&call, &first, json!({}))).await);
        let third = state(&guest.ask("tools/call", again(&call, &second, json!({"input-1": 1, "x": {}}))).await);
        assert!(first != second && second != third);
        let mut other = guest.again().await;
        let done = other.result("tools/call", again(&call, &third, json!({"input-1": {"model": "m"}, "x": {}}))).await;
        assert_eq!(done["x-told"], json!({"model": "m"}), "{path}");
        for used in [first, second, third] {
            is_unknown(&mut guest, &call, &used).await;
        }
    }
    played.end().await;
}

#[tokio::test]
async fn a_question_that_is_taken_back_leaves_its_memory_to_the_next_one() {
    let limit = |limits: &mut GatewayLimits| limits.streams_max = 5000;
    let played = Played::limited(&[("files", "a", FILES)], limit).await;
    let mut guest = guest(&played, "/i/files/mcp").await;
    let asked = guest.ask("tools/call", call("doubt")).await;
    assert!(asked.body.contains("input-2") && !asked.body.contains("input-1"), "{asked:?}");
    let answered = again(&call("doubt"), &state(&asked), json!({"input-2": {"model": "m"}}));
    assert_eq!(guest.result("tools/call", answered).await["x-told"], json!({"model": "m"}));
    played.end().await;
}

#[tokio::test]
async fn a_state_is_its_users_own_and_of_its_request() {
    let played = stage().await;
    for (path, call) in asking() {
        let mut alice = guest(&played, path).await;
        let alices = state(&alice.ask("tools/call", call.clone()).await);
        let mut bob = guest(&played, path).await;
        bob.client.token = Some("bob-token".to_owned());
        let answer = bob.ask("tools/call", again(&call, &alices, json!({"input-1": {"model": "m"}}))).await;
        assert!(!answer.body.contains("x-told") && !answer.body.contains("input_required"), "{answer:?}");
        // As if there had never been any.
        let never = bob.ask("tools/call", call.clone()).await;
        let told = |answer: &Answer| {
            let answer = answer.json();
            (answer["error"].clone(), answer["result"].clone())
        };
        assert_eq!(told(&answer), told(&never));
        let mut other = call.clone();
        other["arguments"]["more"] = json!(1);
        if path != "/mcp" {
            is_unknown(&mut alice, &other, &alices).await;
        }
        let forged = alices.replace(|letter: char| letter.is_ascii_digit(), "0");
        is_unknown(&mut alice, &call, &forged).await;
        is_unknown(&mut alice, &call, "").await;
        // What others have tried has not used it up.
        let done = alice.result("tools/call", again(&call, &alices, json!({"input-1": {"model": "m"}}))).await;
        assert_eq!(done["x-told"]["model"], "m", "{path}");
    }
    played.end().await;
}

#[tokio::test]
async fn who_has_not_said_that_it_answers_is_not_asked_and_the_server_is_told_why() {
    let played = stage().await;
    for (path, call) in asking() {
        let mut guest = guest(&played, path).await;
        guest.capabilities = json!({"elicitation": {}});
        let done = guest.result("tools/call", call).await;
        let why = "the client does not support sampling";
        assert_eq!(done["x-told"], json!({"code": -32603, "message": why}), "{path}");
    }
    played.end().await;
}

#[tokio::test]
async fn a_call_that_waits_for_its_client_ends_with_its_server() {
    let mut played = stage().await;
    let mut guest = guest(&played, "/i/files/mcp").await;
    let kept = state(&guest.ask("tools/call", call("ask")).await);
    played.gateway.end_endpoint_sessions(&EndpointId::Instance(id("a")));
    let cancelled = timeout(GIVE_UP, played.house.hears("notifications/cancelled")).await.unwrap();
    assert!(cancelled.contains("requestId"), "{cancelled}");
    is_unknown(&mut guest, &call("ask"), &kept).await;
    played.end().await;
}

#[tokio::test]
async fn a_call_that_waits_for_its_client_ends_with_the_run_of_its_server() {
    let played = stage().await;
    let mut guest = guest(&played, "/i/files/mcp").await;
    let kept = state(&guest.ask("tools/call", call("ask")).await);
    restarted(&played, "a").await;
    let ended = guest.result("tools/call", again(&call("ask"), &kept, json!({"input-1": {"model": "m"}}))).await;
    let why = &ended["_meta"]["mcp-satellite/error"];
    assert_eq!((&why["kind"], &why["fate"]), (&json!("terminated"), &json!("maybe_executed")), "{ended}");
    is_unknown(&mut guest, &call("ask"), &kept).await;
    played.end().await;
}

#[tokio::test]
async fn hanging_up_cancels_a_call_that_goes_on_with_what_its_client_has_said() {
    let mut played = stage().await;
    for (path, call) in asking() {
        let mut guest = guest(&played, path).await;
        let kept = state(&guest.ask("tools/call", call.clone()).await);
        guest.send("tools/call", again(&call, &kept, json!({"input-1": {"model": "hang"}}))).await;
        timeout(GIVE_UP, played.house.hears("\"hang\"")).await.unwrap();
        drop(guest);
        timeout(GIVE_UP, played.house.hears("notifications/cancelled")).await.unwrap();
    }
    played.end().await;
}

#[tokio::test]
async fn a_call_that_is_too_long_to_be_kept_is_not_put_aside() {
    let limit = |limits: &mut GatewayLimits| (limits.body_max, limits.bodies_max) = (8 << 10, 64 << 10);
    let played = Played::limited(&[("files", "a", FILES)], limit).await;
    let mut guest = guest(&played, "/i/files/mcp").await;
    let mut long = call("ask");
    long["arguments"] = json!({"x": "x".repeat(2 << 10)});
    let done = guest.result("tools/call", long).await;
    let why = "too many or too large calls wait for a response of their client";
    assert_eq!(done["x-told"]["message"], why);
    state(&guest.ask("tools/call", call("ask")).await);
    played.end().await;
}

#[tokio::test]
async fn a_server_on_a_pipe_that_asks_while_another_call_waits_is_told_that_nobody_knows_whose_question_it_is() {
    let played = stage().await;
    let mut guest = guest(&played, "/i/files/mcp").await;
    let first = state(&guest.ask("tools/call", call("ask")).await);
    let done = guest.result("tools/call", call("ask")).await;
    let why = "calls of 2 clients are in progress, and the request does not identify one of them";
    assert_eq!(done["x-told"]["message"], why);
    let done = guest.result("tools/call", again(&call("ask"), &first, json!({"input-1": {"model": "m"}}))).await;
    assert_eq!(done["x-told"]["model"], "m");
    played.end().await;
}

#[tokio::test]
async fn progress_comes_under_the_token_of_the_request_and_not_without_one() {
    let played = stage().await;
    for (path, name) in [("/i/files/mcp", "slow"), ("/mcp?mode=flat", "files__slow")] {
        let mut guest = guest(&played, path).await;
        guest.beside = json!({"progressToken": "t"});
        guest.open("tools/call", call(name)).await;
        let told = guest.hears().await.unwrap();
        assert_eq!(
            (&told["method"], &told["params"]["progressToken"]),
            (&json!("notifications/progress"), &json!("t"))
        );
        assert!(guest.hears().await.unwrap()["result"].is_object());
        assert_eq!(guest.hears().await, None);
    }
    // Of a request that is made again it is told as that says.
    let mut guest = guest(&played, "/i/files/mcp").await;
    guest.beside = json!({"progressToken": "t"});
    let state = state(&guest.ask("tools/call", call("ask")).await);
    guest.beside = json!({"progressToken": "u"});
    guest.open("tools/call", again(&call("ask"), &state, json!({"input-1": {"model": "m"}}))).await;
    assert_eq!(guest.hears().await.unwrap()["params"]["progressToken"], "u");
    assert_eq!(guest.hears().await.unwrap()["result"]["x-told"]["model"], "m");
    played.end().await;
}

#[tokio::test]
async fn who_has_to_go_somewhere_first_is_asked_to() {
    let played = stage().await;
    let mut guest = guest(&played, "/i/files/mcp").await;
    let answer = guest.ask("tools/call", call("go")).await;
    assert_eq!((answer.head.status, &answer.json()["error"]["code"]), (400, &json!(-32021)));
    let needed = json!({"elicitation": {"url": {}}});
    assert_eq!(answer.json()["error"]["data"]["requiredCapabilities"], needed);
    guest.capabilities = needed;
    let asked = guest.result("tools/call", call("go")).await;
    assert_eq!(asked["resultType"], "input_required");
    let params = json!({"mode": "url", "message": "m", "url": "https://a.example"});
    assert_eq!(asked["inputRequests"], json!({"url-1": {"method": "elicitation/create", "params": params}}));
    // Who does not go is told what the server says.
    let mut declined = call("go");
    declined["inputResponses"] = json!({"url-1": {"action": "decline"}});
    let answer = guest.ask("tools/call", declined.clone()).await;
    let error = &answer.json()["error"];
    assert_eq!((&error["code"], &error["message"]), (&json!(-32603), &json!("go there first")));
    declined["inputResponses"]["url-1"]["action"] = "accept".into();
    assert_eq!(guest.result("tools/call", declined).await["resultType"], "input_required");
    played.end().await;
}

#[tokio::test]
async fn of_clients_that_vanish_nothing_stays() {
    let mut played = stage().await;
    for round in 0..40 {
        let mut listens = guest(&played, "/i/files/mcp").await;
        listens.open("subscriptions/listen", json!({"notifications": {"toolsListChanged": true}})).await;
        let mut hangs = guest(&played, "/i/files/mcp").await;
        hangs.send("tools/call", call("hang")).await;
        timeout(GIVE_UP, played.house.hears("\"hang\"")).await.unwrap();
        drop((listens, hangs));
        timeout(GIVE_UP, played.house.hears("notifications/cancelled")).await.unwrap();
        assert!(played.gateway.session_count() <= 40, "{round}");
    }
    let all_gone = async {
        while played.gateway.session_count() > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(GIVE_UP, all_gone).await.unwrap();
    // And whoever asks now is asked alone: no call is in flight any more.
    let mut guest = guest(&played, "/i/files/mcp").await;
    state(&guest.ask("tools/call", call("ask")).await);
    played.end().await;
}

async fn restarted(played: &Played, installation: &str) {
    let before = played.house.runtime.status(&id(installation)).unwrap().restarts;
    played.house.runtime.restart(&id(installation)).await.unwrap();
    played.house.sees(installation, |view| view.status == Status::Online && view.restarts > before).await;
}

#[tokio::test]
async fn who_listens_hears_what_changes_under_its_own_id() {
    let played = stage().await;
    let all = json!({"toolsListChanged": true, "promptsListChanged": true, "resourceSubscriptions": ["file:///a"]});
    let both = json!({"toolsListChanged": true, "promptsListChanged": true});
    for (path, agreed) in [("/i/files/mcp", &both), ("/mcp?mode=flat", &both), ("/mcp", &json!({}))] {
        let mut listens = guest(&played, path).await;
        let own = listens.open("subscriptions/listen", json!({"notifications": all})).await;
        let first = listens.hears().await.unwrap();
        assert_eq!(first["method"], "notifications/subscriptions/acknowledged");
        assert_eq!(&first["params"]["notifications"], agreed, "{path}");
        if path == "/mcp" {
            continue;
        }
        let more = if path == "/i/files/mcp" { r#"[{"name":"read"}]"# } else { r#"[{"name":"write"}]"# };
        let mut only_prompts = guest(&played, path).await;
        only_prompts.open("subscriptions/listen", json!({"notifications": {"promptsListChanged": true}})).await;
        only_prompts.hears().await.unwrap();
        played.house.relist("a", Lists { tools: more, ..FILES });
        restarted(&played, "a").await;
        let told = timeout(GIVE_UP, listens.hears()).await.unwrap().unwrap();
        assert_eq!(told["method"], "notifications/tools/list_changed", "{path}");
        assert_eq!(told["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], own);
        // Who has not asked for it is not told; what it has asked for it is.
        played.house.relist("a", Lists { tools: more, prompts: r#"[{"name":"q"}]"#, ..FILES });
        restarted(&played, "a").await;
        for guest in [&mut only_prompts, &mut listens] {
            let told = timeout(GIVE_UP, guest.hears()).await.unwrap().unwrap();
            assert_eq!(told["method"], "notifications/prompts/list_changed", "{path}");
        }
        played.house.relist("a", FILES);
        restarted(&played, "a").await;
    }
    // And of a server without sessions, to whose own words it listens itself.
    let mut listens = guest(&played, "/i/newer/mcp").await;
    let own = listens.open("subscriptions/listen", json!({"notifications": all})).await;
    let agreed = listens.hears().await.unwrap()["params"]["notifications"].clone();
    let uris = json!({"toolsListChanged": true, "resourceSubscriptions": ["file:///a"]});
    assert_eq!(agreed, uris);
    guest(&played, "/i/newer/mcp").await.result("tools/call", call("change")).await;
    let told = timeout(GIVE_UP, listens.hears()).await.unwrap().unwrap();
    assert_eq!(told["method"], "notifications/tools/list_changed");
    assert_eq!(told["params"]["_meta"], json!({"io.modelcontextprotocol/subscriptionId": own}));
    played.end().await;
}

#[tokio::test]
async fn each_subscription_of_who_listens_counts_as_a_request_and_one_that_is_refused_is_none() {
    let limit = |limits: &mut GatewayLimits| (limits.requests_per_second, limits.burst) = (20, 5);
    let played = Played::limited(&[("subscribed", "a", FILES)], limit).await;
    let mut listens = guest(&played, "/i/subscribed/mcp").await;
    let mut uris: Vec<String> = (10..25).map(|number| format!("file:///{number}")).collect();
    let began = Instant::now();
    let wanted = [&["file:///0/refuse".to_owned()], &uris[..], &["file:///refuse".to_owned()]].concat();
    listens.open("subscriptions/listen", json!({"notifications": {"resourceSubscriptions": wanted}})).await;
    let first = listens.hears().await.unwrap();
    let mut agreed: Vec<String> =
        serde_json::from_value(first["params"]["notifications"]["resourceSubscriptions"].clone()).unwrap();
    agreed.sort();
    uris.sort();
    assert_eq!(agreed, uris);
    // Eighteen requests, of which five wait for nothing: it had to wait for the others.
    assert!(began.elapsed() >= Duration::from_millis(600), "they are not counted");
    played.end().await;
}

#[tokio::test]
async fn what_is_logged_is_heard_from_the_level_on_that_a_request_asks_for() {
    let whole = Whole::begin().await;
    whole.online(Server::mirror("mirror")).await;
    let mut guest = Guest::connect(whole.address, "/i/mirror/mcp").await;
    let logged = |level: &str| json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": level}});
    let done: Value = serde_json::from_str(DONE).unwrap();
    let say = json!({"messages": [logged("debug"), logged("error"), done]});
    // Not asked for, it is not said.
    assert_eq!(guest.result("mirror/say", say.clone()).await["resultType"], "complete");
    guest.beside = json!({"io.modelcontextprotocol/logLevel": "warning"});
    guest.open("mirror/say", say).await;
    assert_eq!(guest.hears().await.unwrap()["params"]["level"], "error");
    assert_eq!(guest.hears().await.unwrap()["result"]["resultType"], "complete");
    assert_eq!(guest.hears().await, None);
    guest.beside = json!({});
    let told = guest.result("mirror/told", json!({})).await["told"].clone();
    assert_eq!((&told[0]["method"], &told[0]["params"]), (&json!("logging/setLevel"), &json!({"level": "warning"})));
    whole.end().await;
}
