//! The control plane as an MCP server: who may use it, and what it answers to wrong arguments.

use serde_json::{Value, json};

use super::client::ApiClient;
use super::fixture::{ALICE, ALICES, BOB, BOBS, Fixture};

const PATH: &str = "/i/satellite/mcp";

fn message(method: &str, params: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
}

fn client(fixture: &Fixture, token: &str) -> ApiClient {
    fixture.with(token).with_header("Accept", "application/json, text/event-stream")
}

fn opening() -> Value {
    let info = json!({"name": "c", "version": "1"});
    message("initialize", &json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}))
}

/// Returns the client of a new session.
fn open(fixture: &Fixture, token: &str) -> ApiClient {
    let client = client(fixture, token);
    let opened = client.post(PATH, &opening());
    client.with_header("Mcp-Session-Id", opened.header("mcp-session-id").unwrap_or_else(|| panic!("{opened:?}")))
}

fn call(session: &ApiClient, tool: &str, arguments: &Value) -> Value {
    session.post(PATH, &message("tools/call", &json!({"name": tool, "arguments": arguments}))).ok()
}

#[test]
fn users_with_a_role_control_their_team() {
    let fixture = Fixture::new("mcp = true");
    let satellite = fixture.start();
    assert_eq!(client(&fixture, BOB).post(PATH, &opening()).status, 404, "the user has no role");
    let session = open(&fixture, ALICE);
    let listed = session.post(PATH, &message("tools/list", &json!({}))).ok();
    assert_eq!(listed["result"]["tools"].as_array().unwrap().len(), 6, "{listed:#}");
    let instances = call(&session, "list_instances", &Value::Null);
    assert_eq!(instances["result"]["structuredContent"]["total"], 2, "the own team only: {instances:#}");
    let status = call(&session, "get_status", &json!({"instance": BOBS}));
    let content = &status["result"]["structuredContent"];
    assert_eq!((&content["status"], &content["unanswered_calls"]), (&json!("online"), &Value::Null), "{status:#}");
    let restarted = call(&session, "restart_instance", &json!({"instance": ALICES}));
    assert_eq!(restarted["result"]["structuredContent"]["instance"], ALICES, "{restarted:#}");
    satellite.terminate().exits(0);
}

#[test]
fn wrong_arguments_are_named_and_a_wrong_change_is_recorded_without_its_values() {
    let fixture = Fixture::new("mcp = true");
    let satellite = fixture.start();
    let session = open(&fixture, ALICE);
    for (tool, arguments, part) in [
        ("list_instances", json!({"what": 1}), "unknown field `what`"),
        ("list_instances", json!({"limit": 0}), "`limit` must be between"),
        ("get_status", json!({}), "missing field `instance`"),
        ("get_status", json!({"instance": "nobody-has-this"}), "nobody-has-this"),
        ("read_logs", json!({"instance": ALICES, "limit": "many"}), "invalid type"),
        ("read_events", json!({"since": "x"}), "invalid type"),
        ("restart_instance", json!({"instance": {"planted": "planted-value"}}), "invalid type"),
        ("configure_instance", json!({"instance": ALICES, "set": {"API_KEY": ["planted-value"]}}), "role admin"),
    ] {
        let answer = call(&session, tool, &arguments);
        let text = answer["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{tool}: {answer:#}"));
        assert!(answer["result"]["isError"] == true && text.contains(part), "{tool} {arguments}: {answer:#}");
    }
    for params in [json!({"name": "no_such_tool"}), json!({"name": 7}), json!({})] {
        let answer = session.post(PATH, &message("tools/call", &params)).ok();
        assert_eq!(answer["error"]["code"], -32602, "{params}: {answer:#}");
    }
    let events = fixture.home.events();
    let actions: Vec<&Value> =
        events.iter().filter(|event| event["type"] == "control.action").map(|event| &event["data"]).collect();
    let recorded: Vec<[&str; 2]> = actions
        .iter()
        .map(|data| [&data["action"], &data["outcome"]].map(|text| text.as_str().unwrap_or_default()))
        .collect();
    assert_eq!(recorded, [["restart", "refused"], ["configure", "refused"]], "{actions:#?}");
    assert!(actions.iter().all(|data| data["actor"]["via"] == "mcp" && data["actor"]["name"] == "acme/alice"));
    assert!(!json!(actions).to_string().contains("planted"), "{actions:#?}");
    satellite.terminate().exits(0);
}
