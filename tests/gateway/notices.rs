//! Instructions of the servers, and notices of lost and returned servers, for clients of a combined view.

use serde_json::{Value, json};
use testkit::wait::GIVE_UP;
use tokio::time::timeout;

use super::client::{Client, StatelessClient};
use super::whole_satellite::{Server, SessionClient, TestSatellite, initialize_request};

async fn connect(satellite: &TestSatellite, path: &str) -> Client {
    let mut client = Client::connect(satellite.address).await;
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
async fn meta_tool_clients_get_server_notices_from_their_own_log_level() {
    let satellite = TestSatellite::start().await;
    let id = satellite.online(Server::sim("files", &[])).await;
    let mut client = SessionClient::connect(connect(&satellite, "/mcp").await, json!({})).await;
    let mut quiet_client = SessionClient::connect(connect(&satellite, "/mcp").await, json!({})).await;
    assert_eq!(quiet_client.call(1, "logging/setLevel", json!({"level": "error"})).await["result"], json!({}));
    let listed = client.call(1, "tools/list", json!({})).await;

    satellite.runtime.stop(&id).await.unwrap();
    assert_eq!(notice(&client.next_json().await), ("warning", "offline", "stopped on request"));
    satellite.runtime.start(&id).await.unwrap();
    assert_eq!(notice(&client.next_json().await), ("notice", "online", "online"));
    assert_eq!(client.call(2, "tools/list", json!({})).await["result"], listed["result"], "the tools have not changed");

    // The first notice is the first one at or above its level.
    assert_eq!(quiet_client.call(2, "logging/setLevel", json!({"level": "notice"})).await["result"], json!({}));
    satellite.runtime.stop(&id).await.unwrap();
    assert_eq!(notice(&quiet_client.next_json().await).1, "offline");
    satellite.end().await;
}

#[tokio::test]
async fn a_stateless_listener_gets_server_notices_from_its_requested_level() {
    let satellite = TestSatellite::start().await;
    let id = satellite.online(Server::sim("files", &[])).await;
    let mut stateless = StatelessClient::connect(satellite.address, "/mcp").await;
    stateless.extra_meta = json!({"io.modelcontextprotocol/logLevel": "warning"});
    let request = stateless.open("subscriptions/listen", json!({"notifications": {}})).await;
    let agreed = stateless.next_message().await.unwrap();
    assert_eq!(agreed["method"], "notifications/subscriptions/acknowledged");
    let mut session_client = SessionClient::connect(connect(&satellite, "/mcp").await, json!({})).await;
    for again in [false, true] {
        if again {
            // The notice of the return is below its level.
            satellite.runtime.start(&id).await.unwrap();
            assert_eq!(notice(&session_client.next_json().await).1, "online");
        }
        satellite.runtime.stop(&id).await.unwrap();
        let received = timeout(GIVE_UP, stateless.next_message()).await.unwrap().unwrap();
        assert_eq!(notice(&received), ("warning", "offline", "stopped on request"));
        assert_eq!(received["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], json!(request), "{received}");
        assert_eq!(notice(&session_client.next_json().await).1, "offline");
    }
    satellite.end().await;
}

#[tokio::test]
async fn endpoint_instructions_contain_server_instructions_under_their_names() {
    let script = r#"
        while read -r line; do
            id=${line#*\"id\":}; id=${id%%,*}
            case $line in
            *initialize\"*) printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"sh","version":"1"},"instructions":"Ask before you write."}}\n' "$id" ;;
            *tools/list*) printf '{"jsonrpc":"2.0","id":%s,"result":{"tools":[]}}\n' "$id" ;;
            esac
        done"#;
    let satellite = TestSatellite::start().await;
    satellite.online(Server::command("guide", "/bin/sh", &["-c", script])).await;
    satellite.online(Server::sim("silent", &[])).await;
    for path in ["/mcp", "/mcp?mode=flat"] {
        let initialized = connect(&satellite, path).await.post(&initialize_request(json!({}))).await.json();
        let discovered =
            StatelessClient::connect(satellite.address, path).await.result("server/discover", json!({})).await;
        for instructions in [&initialized["result"]["instructions"], &discovered["instructions"]] {
            let instructions = instructions.as_str().unwrap();
            assert!(instructions.starts_with("This endpoint combines several MCP servers"), "{instructions}");
            let server_part = "\n\nInstructions of the server `guide`:\nAsk before you write.";
            assert!(instructions.contains(server_part) && !instructions.contains("silent"), "{instructions}");
        }
    }
    satellite.end().await;
}
