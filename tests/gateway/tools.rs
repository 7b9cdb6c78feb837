//! `/mcp` over HTTP: a client with six tools and everything behind them.

use serde_json::{Value, json};

use super::client::{initialize, notification};
use super::house::Lists;
use super::played::{Caller, PLAIN, Played};

const FILES: Lists = Lists {
    tools: r#"[{"name":"read","description":"Reads a file"},{"name":"ask"},{"name":"slow"},{"name":"hang"}]"#,
    resources: r#"[{"name":"R","uri":"file:///a"}]"#,
    templates: "",
    prompts: "",
};

async fn stage() -> (Played, Caller) {
    let played = Played::with(&[("files", "a", FILES)]).await;
    let caller = played.client("/mcp").await;
    (played, caller)
}

#[tokio::test]
async fn a_client_is_told_what_it_stands_before_and_how_to_use_it() {
    let (played, mut caller) = stage().await;
    assert_eq!(caller.welcome["capabilities"], json!({"tools": {}, "logging": {}}));
    assert_eq!(caller.welcome["protocolVersion"], "2025-11-25");
    assert!(caller.welcome["instructions"].as_str().unwrap().contains("discover_mcp_tools"));
    let listed = caller.asks("tools/list", json!({})).await;
    assert_eq!(listed["result"]["tools"].as_array().unwrap().len(), 6);
    assert_eq!(caller.asks("ping", json!({})).await["result"], json!({}));
    // An older client is spoken to as it speaks.
    let mut old = caller.client.again().await;
    let answer = old.ask("POST", &[("mcp-session-id", "")], &initialize("2024-11-05").to_string()).await;
    assert_eq!(answer.json()["result"]["protocolVersion"], "2024-11-05");
    // There is one page.
    assert!(caller.asks("tools/list", json!({"cursor": null})).await["result"].is_object());
    assert_eq!(caller.asks("tools/list", json!({"cursor": "2"})).await["error"]["code"], -32602);
    for method in ["prompts/list", "resources/list", "completion/complete", "tasks/list"] {
        let answer = caller.asks(method, json!({})).await;
        assert_eq!(answer["error"]["code"], -32601, "{answer}");
        assert_eq!(answer["error"]["message"], format!("this endpoint has no method `{method}`"));
    }
    assert_eq!(caller.asks("logging/setLevel", json!({"level": "loud"})).await["error"]["code"], -32602);
    assert_eq!(caller.asks("logging/setLevel", json!({"level": "error"})).await["result"], json!({}));
    for method in ["notifications/roots/list_changed", "notifications/unknown", "notifications/progress"] {
        let told = notification(method, json!({"progressToken": 7, "progress": 1}));
        assert_eq!(caller.client.post(&told).await.head.status, 202);
    }
    played.end().await;
}

#[tokio::test]
async fn what_the_six_tools_answer_is_as_they_promise() {
    let (played, mut caller) = stage().await;
    let listed = caller.asks("tools/list", json!({})).await;
    for (tool, arguments) in [
        ("discover_mcp_tools", json!({"query": "raed file"})),
        ("list_mcp_resources", json!({})),
        ("list_servers", json!({})),
        ("reconnect_server", json!({"name": "files"})),
    ] {
        let result = caller.calls(tool, arguments).await;
        let promised = listed["result"]["tools"].as_array().unwrap().iter().find(|one| one["name"] == tool).unwrap();
        let told = result["structuredContent"].as_object().unwrap();
        for required in promised["outputSchema"]["required"].as_array().unwrap() {
            assert!(told.contains_key(required.as_str().unwrap()), "{tool}: {result}");
        }
        let text: Value = serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
        assert_eq!(text, result["structuredContent"]);
    }
    played.end().await;
}

#[tokio::test]
async fn a_result_is_the_servers_own_byte_for_byte() {
    let (played, mut caller) = stage().await;
    let answer = caller
        .text(
            "tools/call",
            r#"{"name":"execute_mcp_tool","arguments":{"tool_path":"files:read","arguments":{"n":1e400, "u":"\ud83d"}},"_meta":{"x":[ 1]}}"#,
        )
        .await;
    assert_eq!(
        answer,
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"x-reflected":{"name":"read","arguments":{"n":1e400, "u":"\ud83d"},"_meta":{"x":[ 1]}}}}"#
    );
    played.end().await;
}

#[tokio::test]
async fn progress_of_a_tool_that_is_run_comes_under_the_clients_own_token() {
    let (played, mut caller) = stage().await;
    let params = json!({
        "name": "execute_mcp_tool", "arguments": {"tool_path": "files:slow"}, "_meta": {"progressToken": "mine"},
    });
    let call = caller.next("tools/call", params).to_string();
    caller.client.open("POST", &[], &call).await;
    assert_eq!(caller.client.event().await.unwrap().data, "");
    let told = caller.client.event().await.unwrap().json();
    assert_eq!((&told["method"], &told["params"]["progressToken"]), (&json!("notifications/progress"), &json!("mine")));
    assert_eq!(caller.client.event().await.unwrap().json()["result"], json!({"content": []}));
    played.end().await;
}

#[tokio::test]
async fn what_a_tool_asks_is_answered_by_the_client_that_runs_it() {
    let (mut played, mut caller) = stage().await;
    let mut bystander = played.client("/mcp").await.listening().await;
    let run = caller.next("tools/call", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "files:ask"}}));
    caller.client.open("POST", &[], &run.to_string()).await;
    assert_eq!(caller.client.event().await.unwrap().data, "");
    let asked = caller.client.event().await.unwrap();
    // What it carries is as the server wrote it; its id and its token are numbers of ours.
    assert!(asked.data.contains(r#""method":"sampling/createMessage","params":{"x":1e400,"#), "{}", asked.data);
    let number = asked.data.split(r#""id":"#).nth(1).unwrap().split(',').next().unwrap().to_owned();
    let mut beside = caller.client.again().await;
    let progress = notification("notifications/progress", json!({"progressToken": 1, "progress": 0.5}));
    assert_eq!(beside.post(&progress).await.head.status, 202);
    let heard = played.house.hears("notifications/progress").await;
    assert!(heard.contains(r#""progressToken":"its own""#), "{heard}");
    let answer = format!(r#"{{"jsonrpc":"2.0","id":{number},"result":{{"said":1e400}}}}"#);
    assert_eq!(beside.ask("POST", &[], &answer).await.head.status, 202);
    let end = caller.client.event().await.unwrap().data;
    assert_eq!(end, r#"{"jsonrpc":"2.0","id":1,"result":{"x-told":{"said":1e400}}}"#);
    assert_eq!(caller.client.event().await, None);
    // Nobody else was asked.
    let reconnect = caller.calls("reconnect_server", json!({"name": "files"})).await;
    assert_eq!(reconnect["structuredContent"]["success"], true);
    assert_eq!(bystander.client.event().await.unwrap().data, "");
    played.end().await;
    assert_eq!(bystander.client.event().await, None);
}

#[tokio::test]
async fn a_client_takes_back_what_it_runs() {
    let (mut played, mut caller) = stage().await;
    let run = caller.next("tools/call", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "files:hang"}}));
    caller.client.send("POST", &[], &run.to_string()).await;
    played.house.hears(r#""name":"hang""#).await;
    let mut beside = caller.client.again().await;
    let taken_back = notification("notifications/cancelled", json!({"requestId": 1, "reason": "bored"}));
    assert_eq!(beside.post(&taken_back).await.head.status, 202);
    let heard = played.house.hears("notifications/cancelled").await;
    assert!(heard.contains(r#""reason":"bored""#), "{heard}");
    let opening = caller.client.head().await;
    assert_eq!((opening.status, caller.client.body(&opening).await.as_str()), (200, ""));

    // One that goes away takes it back as well.
    let run = caller.next("tools/call", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "files:hang"}}));
    caller.client.send("POST", &[], &run.to_string()).await;
    played.house.hears(r#""name":"hang""#).await;
    drop(caller);
    played.house.hears("notifications/cancelled").await;
    played.end().await;
}

#[tokio::test]
async fn what_is_anothers_is_what_does_not_exist() {
    let played = Played::with(&[("files", "a", FILES), ("more", "b", PLAIN)]).await;
    let mut alice = played.client("/mcp").await;
    for (tool, arguments) in [
        ("execute_mcp_tool", json!({"tool_path": "NAME:hush"})),
        ("execute_mcp_tool", json!({"tool_path": "NAME-s:hush"})),
        ("execute_mcp_tool", json!({"tool_path": "NAME-acme-bob-s:hush"})),
        ("read_mcp_resource", json!({"uri": "NAME|x"})),
        ("reconnect_server", json!({"name": "NAME"})),
        ("discover_mcp_tools", json!({"query": "NAME hush"})),
    ] {
        let mut said = Vec::new();
        for name in ["secret", "nobody"] {
            let arguments: Value = serde_json::from_str(&arguments.to_string().replace("NAME", name)).unwrap();
            let mut result = alice.calls(tool, arguments).await;
            if let Some(time) = result.pointer_mut("/structuredContent/search_time_ms") {
                *time = json!(0);
                result["content"] = json!(null);
            }
            said.push(result.to_string().replace(name, "NAME"));
        }
        assert_eq!(said[0], said[1]);
    }
    let servers = alice.calls("list_servers", json!({})).await;
    let mut bob = Caller::connect(played.address, "/mcp", "bob-token").await;
    assert_eq!(servers["structuredContent"]["servers"].as_array().unwrap().len(), 2);
    let (text, error) = bob.fails("execute_mcp_tool", json!({"tool_path": "files:read"})).await;
    assert_eq!(text, "there is no server `files`. List the servers again and use a name of that list.");
    assert_eq!(error["kind"], "not_found");
    played.end().await;
}
