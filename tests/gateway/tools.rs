//! `/mcp` over HTTP: the six meta-tools, which give access to all servers.

use serde_json::{Value, json};
use testkit::scripted_servers::Lists;

use super::client::{initialize, notification};
use super::scripted::{Caller, PLAIN, ScriptedEndpoint};

const FILES: Lists = Lists {
    tools: r#"[{"name":"read","description":"Reads a file"},{"name":"ask"},{"name":"slow"},{"name":"hang"}]"#,
    resources: r#"[{"name":"R","uri":"file:///a"}]"#,
    templates: "",
    prompts: "",
};

async fn endpoint() -> (ScriptedEndpoint, Caller) {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES)]).await;
    let caller = endpoint.client("/mcp").await;
    (endpoint, caller)
}

#[tokio::test]
async fn the_endpoint_offers_six_tools_with_instructions_and_rejects_other_methods() {
    let (endpoint, mut caller) = endpoint().await;
    assert_eq!(caller.welcome["capabilities"], json!({"tools": {}, "logging": {}}));
    assert_eq!(caller.welcome["protocolVersion"], "2025-11-25");
    assert!(caller.welcome["instructions"].as_str().unwrap().contains("discover_mcp_tools"));
    let listed = caller.request("tools/list", json!({})).await;
    assert_eq!(listed["result"]["tools"].as_array().unwrap().len(), 6);
    assert_eq!(caller.request("ping", json!({})).await["result"], json!({}));
    // An older version is accepted.
    let mut old = caller.client.second_connection().await;
    let answer = old.ask("POST", &[("mcp-session-id", "")], &initialize("2024-11-05").to_string()).await;
    assert_eq!(answer.json()["result"]["protocolVersion"], "2024-11-05");
    // The list has one page, so every cursor is invalid.
    assert!(caller.request("tools/list", json!({"cursor": null})).await["result"].is_object());
    assert_eq!(caller.request("tools/list", json!({"cursor": "2"})).await["error"]["code"], -32602);
    for method in ["prompts/list", "resources/list", "completion/complete", "tasks/list"] {
        let answer = caller.request(method, json!({})).await;
        assert_eq!(answer["error"]["code"], -32601, "{answer}");
        assert_eq!(answer["error"]["message"], format!("this endpoint has no method `{method}`"));
    }
    assert_eq!(caller.request("logging/setLevel", json!({"level": "loud"})).await["error"]["code"], -32602);
    assert_eq!(caller.request("logging/setLevel", json!({"level": "error"})).await["result"], json!({}));
    for method in ["notifications/roots/list_changed", "notifications/unknown", "notifications/progress"] {
        let message = notification(method, json!({"progressToken": 7, "progress": 1}));
        assert_eq!(caller.client.post(&message).await.head.status, 202);
    }
    endpoint.end().await;
}

#[tokio::test]
async fn results_of_the_meta_tools_match_their_output_schemas() {
    let (endpoint, mut caller) = endpoint().await;
    let listed = caller.request("tools/list", json!({})).await;
    for (tool, arguments) in [
        ("discover_mcp_tools", json!({"query": "raed file"})),
        ("list_mcp_resources", json!({})),
        ("list_servers", json!({})),
        ("reconnect_server", json!({"name": "files"})),
    ] {
        let result = caller.call_tool(tool, arguments).await;
        let listed_tool = listed["result"]["tools"].as_array().unwrap().iter().find(|one| one["name"] == tool).unwrap();
        let structured = result["structuredContent"].as_object().unwrap();
        for required in listed_tool["outputSchema"]["required"].as_array().unwrap() {
            assert!(structured.contains_key(required.as_str().unwrap()), "{tool}: {result}");
        }
        let text: Value = serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
        assert_eq!(text, result["structuredContent"]);
    }
    endpoint.end().await;
}

#[tokio::test]
async fn a_tool_result_arrives_byte_for_byte() {
    let (endpoint, mut caller) = endpoint().await;
    let answer = caller
        .request_text(
            "tools/call",
            r#"{"name":"execute_mcp_tool","arguments":{"tool_path":"files:read","arguments":{"n":1e400, "u":"\ud83d"}},"_meta":{"x":[ 1]}}"#,
        )
        .await;
    assert_eq!(
        answer,
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"x-reflected":{"name":"read","arguments":{"n":1e400, "u":"\ud83d"},"_meta":{"x":[ 1]}}}}"#
    );
    endpoint.end().await;
}

#[tokio::test]
async fn progress_of_an_executed_tool_uses_the_token_of_the_client() {
    let (endpoint, mut caller) = endpoint().await;
    let params = json!({
        "name": "execute_mcp_tool", "arguments": {"tool_path": "files:slow"}, "_meta": {"progressToken": "mine"},
    });
    let call = caller.next("tools/call", params).to_string();
    caller.client.open("POST", &[], &call).await;
    assert_eq!(caller.client.event().await.unwrap().data, "");
    let received = caller.client.event().await.unwrap().json();
    assert_eq!(
        (&received["method"], &received["params"]["progressToken"]),
        (&json!("notifications/progress"), &json!("mine"))
    );
    assert_eq!(caller.client.event().await.unwrap().json()["result"], json!({"content": []}));
    endpoint.end().await;
}

#[tokio::test]
async fn a_server_request_of_an_executed_tool_reaches_the_calling_client() {
    let (mut endpoint, mut caller) = endpoint().await;
    let mut bystander = endpoint.client("/mcp").await.listening().await;
    let run = caller.next("tools/call", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "files:ask"}}));
    caller.client.open("POST", &[], &run.to_string()).await;
    assert_eq!(caller.client.event().await.unwrap().data, "");
    let question = caller.client.event().await.unwrap();
    // The params are unchanged except for the id and the token, which the endpoint replaces.
    assert!(question.data.contains(r#""method":"sampling/createMessage","params":{"x":1e400,"#), "{}", question.data);
    let number = question.data.split(r#""id":"#).nth(1).unwrap().split(',').next().unwrap().to_owned();
    let mut second = caller.client.second_connection().await;
    let progress = notification("notifications/progress", json!({"progressToken": 1, "progress": 0.5}));
    assert_eq!(second.post(&progress).await.head.status, 202);
    let message = endpoint.servers.wait_for_message("notifications/progress").await;
    assert!(message.contains(r#""progressToken":"its own""#), "{message}");
    let answer = format!(r#"{{"jsonrpc":"2.0","id":{number},"result":{{"said":1e400}}}}"#);
    assert_eq!(second.ask("POST", &[], &answer).await.head.status, 202);
    let end = caller.client.event().await.unwrap().data;
    assert_eq!(end, r#"{"jsonrpc":"2.0","id":1,"result":{"x-told":{"said":1e400}}}"#);
    assert_eq!(caller.client.event().await, None);
    // The other client got no request.
    let reconnect = caller.call_tool("reconnect_server", json!({"name": "files"})).await;
    assert_eq!(reconnect["structuredContent"]["success"], true);
    assert_eq!(bystander.client.event().await.unwrap().data, "");
    endpoint.end().await;
    assert_eq!(bystander.client.event().await, None);
}

#[tokio::test]
async fn a_cancellation_or_disconnect_cancels_the_executed_tool() {
    let (mut endpoint, mut caller) = endpoint().await;
    let run = caller.next("tools/call", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "files:hang"}}));
    caller.client.send("POST", &[], &run.to_string()).await;
    endpoint.servers.wait_for_message(r#""name":"hang""#).await;
    let mut second = caller.client.second_connection().await;
    let cancellation = notification("notifications/cancelled", json!({"requestId": 1, "reason": "bored"}));
    assert_eq!(second.post(&cancellation).await.head.status, 202);
    let message = endpoint.servers.wait_for_message("notifications/cancelled").await;
    assert!(message.contains(r#""reason":"bored""#), "{message}");
    let opening = caller.client.head().await;
    assert_eq!((opening.status, caller.client.body(&opening).await.as_str()), (200, ""));

    // A disconnect cancels the call, too.
    let run = caller.next("tools/call", json!({"name": "execute_mcp_tool", "arguments": {"tool_path": "files:hang"}}));
    caller.client.send("POST", &[], &run.to_string()).await;
    endpoint.servers.wait_for_message(r#""name":"hang""#).await;
    drop(caller);
    endpoint.servers.wait_for_message("notifications/cancelled").await;
    endpoint.end().await;
}

#[tokio::test]
async fn the_server_of_another_user_looks_nonexistent() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES), ("more", "b", PLAIN)]).await;
    let mut alice = endpoint.client("/mcp").await;
    for (tool, arguments) in [
        ("execute_mcp_tool", json!({"tool_path": "NAME:hush"})),
        ("execute_mcp_tool", json!({"tool_path": "NAME-s:hush"})),
        ("execute_mcp_tool", json!({"tool_path": "NAME-acme-bob-s:hush"})),
        ("read_mcp_resource", json!({"uri": "NAME|x"})),
        ("reconnect_server", json!({"name": "NAME"})),
        ("discover_mcp_tools", json!({"query": "NAME hush"})),
    ] {
        let mut responses = Vec::new();
        for name in ["secret", "nobody"] {
            let arguments: Value = serde_json::from_str(&arguments.to_string().replace("NAME", name)).unwrap();
            let mut result = alice.call_tool(tool, arguments).await;
            if let Some(time) = result.pointer_mut("/structuredContent/search_time_ms") {
                *time = json!(0);
                result["content"] = json!(null);
            }
            responses.push(result.to_string().replace(name, "NAME"));
        }
        assert_eq!(responses[0], responses[1]);
    }
    let servers = alice.call_tool("list_servers", json!({})).await;
    let mut bob = Caller::connect(endpoint.address, "/mcp", "bob-token").await;
    assert_eq!(servers["structuredContent"]["servers"].as_array().unwrap().len(), 2);
    let (text, error) = bob.call_failing_tool("execute_mcp_tool", json!({"tool_path": "files:read"})).await;
    assert_eq!(text, "there is no server `files`. List the servers again and use a name of that list.");
    assert_eq!(error["kind"], "not_found");
    endpoint.end().await;
}
