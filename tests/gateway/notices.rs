//! What clients in front of several servers are told of them: their instructions, and which are lost and return.

use serde_json::{Value, json};
use tokio::time::timeout;

use super::client::{Client, Guest};
use super::whole::{Attached, GIVE_UP, Server, Whole, hello};

async fn at(whole: &Whole, path: &str) -> Client {
    let mut client = Client::connect(whole.address).await;
    path.clone_into(&mut client.path);
    client
}

/// A notice: its level, and the status and message of the server.
fn notice(message: &Value) -> (&str, &str, &str) {
    assert_eq!(message["method"], "notifications/message", "{message}");
    let params = &message["params"];
    assert_eq!((&params["logger"], &params["data"]["server"]), (&json!("mcp-satellite"), &json!("files")), "{message}");
    let data = &params["data"];
    (params["level"].as_str().unwrap(), data["status"].as_str().unwrap(), data["message"].as_str().unwrap())
}

#[tokio::test]
async fn clients_behind_the_six_tools_hear_that_a_server_is_lost_and_returns_from_their_own_level_on() {
    let whole = Whole::begin().await;
    let id = whole.online(Server::sim("files", &[])).await;
    let mut client = Attached::begin(at(&whole, "/mcp").await, json!({})).await;
    let mut quiet = Attached::begin(at(&whole, "/mcp").await, json!({})).await;
    assert_eq!(quiet.call(1, "logging/setLevel", json!({"level": "error"})).await["result"], json!({}));
    let listed = client.call(1, "tools/list", json!({})).await;

    whole.runtime.stop(&id).await.unwrap();
    assert_eq!(notice(&client.hears_json().await), ("warning", "offline", "stopped on request"));
    whole.runtime.start(&id).await.unwrap();
    assert_eq!(notice(&client.hears_json().await), ("notice", "online", "online"));
    assert_eq!(client.call(2, "tools/list", json!({})).await["result"], listed["result"], "the six stay the six");

    // The first that it hears is the first that it wants to hear.
    assert_eq!(quiet.call(2, "logging/setLevel", json!({"level": "notice"})).await["result"], json!({}));
    whole.runtime.stop(&id).await.unwrap();
    assert_eq!(notice(&quiet.hears_json().await).1, "offline");
    whole.end().await;
}

#[tokio::test]
async fn without_a_session_a_client_that_listens_hears_it_from_the_level_that_its_request_names() {
    let whole = Whole::begin().await;
    let id = whole.online(Server::sim("files", &[])).await;
    let mut guest = Guest::connect(whole.address, "/mcp").await;
    guest.beside = json!({"io.modelcontextprotocol/logLevel": "warning"});
    let request = guest.open("subscriptions/listen", json!({"notifications": {}})).await;
    let agreed = guest.hears().await.unwrap();
    assert_eq!(agreed["method"], "notifications/subscriptions/acknowledged");
    let mut all = Attached::begin(at(&whole, "/mcp").await, json!({})).await;
    for again in [false, true] {
        if again {
            // That it returns is below its level.
            whole.runtime.start(&id).await.unwrap();
            assert_eq!(notice(&all.hears_json().await).1, "online");
        }
        whole.runtime.stop(&id).await.unwrap();
        let told = timeout(GIVE_UP, guest.hears()).await.unwrap().unwrap();
        assert_eq!(notice(&told), ("warning", "offline", "stopped on request"));
        assert_eq!(told["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], json!(request), "{told}");
        assert_eq!(notice(&all.hears_json().await).1, "offline");
    }
    whole.end().await;
}

#[tokio::test]
async fn the_instructions_of_the_servers_stand_in_those_of_the_endpoint_under_their_names() {
    let script = r#"
        while read -r line; do
            id=${line#*\"id\":}; id=${id%%,*}
            case $line in
            *initialize\"*) printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"sh","version":"1"},"instructions":"Ask before you write."}}\n' "$id" ;;
            *tools/list*) printf '{"jsonrpc":"2.0","id":%s,"result":{"tools":[]}}\n' "$id" ;;
            esac
        done"#;
    let whole = Whole::begin().await;
    whole.online(Server::command("guide", "/bin/sh", &["-c", script])).await;
    whole.online(Server::sim("silent", &[])).await;
    for path in ["/mcp", "/mcp?mode=flat"] {
        let welcome = at(&whole, path).await.post(&hello(json!({}))).await.json();
        let discovered = Guest::connect(whole.address, path).await.result("server/discover", json!({})).await;
        for said in [&welcome["result"]["instructions"], &discovered["instructions"]] {
            let said = said.as_str().unwrap();
            assert!(said.starts_with("This endpoint combines several MCP servers"), "{said}");
            let theirs = "\n\nInstructions of the server `guide`:\nAsk before you write.";
            assert!(said.contains(theirs) && !said.contains("silent"), "{said}");
        }
    }
    whole.end().await;
}
