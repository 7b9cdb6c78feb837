//! Events about changes whose client disconnects, that come over MCP or the control socket, or that are not valid.

use std::io::Write as _;

use serde_json::{Value, json};
use testkit::wait::wait_until;

use super::client::{ApiClient, ApiResponse};
use super::fixture::{ADMIN, ALICE, ALICES, CAROLS, Fixture, OPERATOR, VIEWER, config};

const SESSIONS: &str = "/v1/instances/notes-acme-alice-notes/mcp";

/// Returns the actions with their outcome and reason.
fn actions(fixture: &Fixture, action: &str) -> Vec<(String, Value)> {
    let events = fixture.home.events().into_iter().filter(|event| event["type"] == "control.action");
    let of_action = events.filter(|event| event["data"]["action"] == action);
    of_action
        .map(|event| (event["data"]["outcome"].as_str().unwrap().to_owned(), event["data"]["reason"].clone()))
        .collect()
}

fn json_client(client: &ApiClient) -> ApiClient {
    client.with_header("Content-Type", "application/json")
}

#[test]
fn a_client_that_disconnects_hides_no_change() {
    let fixture = Fixture::new("");
    let slow_end = "SIM \"--ignore-sigterm\", \"--ignore-eof\", \"--stderr-text\"";
    let text = config(&fixture.address, "").replace("SIM \"--stderr-text\"", slow_end);
    fixture.home.write("satellite.toml", &text);
    let satellite = fixture.start();
    let admin = json_client(&fixture.with(ADMIN));
    let (path, body) = (format!("/v1/instances/{CAROLS}/call"), r#"{"tool": "sleep", "arguments": {"ms": 100000}}"#);
    let calling = admin.open("POST", &path, Some(body));
    fixture.home.wait_row("files", "the call in flight", |row| row["calls_in_flight"] == 1);
    drop(calling);
    let call = fixture.home.wait_event(0, "control.action", |event| event["data"]["action"] == "call");
    assert_eq!(call["data"]["outcome"], "failed", "{call:#}");
    assert!(call["data"]["reason"].as_str().unwrap().contains("disconnected"), "{call:#}");
    fixture.home.wait_row("files", "the end of the call", |row| row["calls_in_flight"] == 0);
    let stopping = admin.open("POST", &format!("/v1/instances/{CAROLS}/stop"), Some("{}"));
    fixture.home.wait_row("files", "the begin of the stop", |row| row["want"] == "stopped");
    drop(stopping);
    let stop = fixture.home.wait_event(0, "control.action", |event| event["data"]["action"] == "stop");
    assert_eq!((&stop["data"]["outcome"], &stop["data"]["actor"]["name"]), (&json!("succeeded"), &json!("admin")));
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_that_moves_the_listener_answers() {
    let fixture = Fixture::new("");
    let addresses = [testkit::port::free_port(), testkit::port::free_port()].map(|port| format!("127.0.0.1:{port}"));
    let listen = |address: &str| config(&fixture.address, &format!("listen = \"{address}\""));
    fixture.home.write("satellite.toml", &listen(&addresses[0]));
    let args = fixture.home.path().join("satellite.toml");
    let satellite = fixture.home.run(&["--config", args.to_str().unwrap()]);
    let client = ApiClient::new(&addresses[0]);
    wait_until("readiness", || {
        std::net::TcpStream::connect(&addresses[0]).is_ok() && client.get("/readyz").status == 200
    });
    fixture.home.write("satellite.toml", &listen(&addresses[1]));
    client.with_token(ADMIN).post("/v1/reload", &json!({})).ok();
    assert!(std::net::TcpStream::connect(&addresses[0]).is_err());
    assert_eq!(ApiClient::new(&addresses[1]).get("/readyz").status, 200);
    assert_eq!(actions(&fixture, "reload"), [("succeeded".to_owned(), Value::Null)]);
    satellite.terminate().exits(0);
}

#[test]
fn each_call_in_a_session_is_recorded_with_its_actor() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let mcp = |token: &str| fixture.with(token).with_header("Accept", "application/json, text/event-stream");
    let message = |method: &str, params: Value| json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let opening = message(
        "initialize",
        json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}),
    );
    let opened = mcp(ALICE).post(SESSIONS, &opening);
    let session = opened.header("mcp-session-id").unwrap().to_owned();
    let call = message("tools/call", json!({"name": "echo", "arguments": {"text": "hi"}}));
    // A session that another client has opened.
    let admin = mcp(ADMIN).with_header("Mcp-Session-Id", &session);
    let status = |answer: ApiResponse| answer.status;
    assert_eq!(status(admin.post(SESSIONS, &message("tools/list", json!({})))), 200);
    assert_eq!(status(admin.post(SESSIONS, &call)), 200);
    assert_eq!(status(json_client(&mcp(ALICE)).send("POST", SESSIONS, Some("garbage"))), 400);
    assert_eq!(status(admin.send("DELETE", SESSIONS, None)), 204);
    // A request without a session, with the header of one.
    let version = "2026-07-28";
    let meta = json!({"io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientInfo": {"name": "c", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {}});
    let stateless = message("tools/call", json!({"name": "echo", "arguments": {"text": "hi"}, "_meta": meta}));
    let client = mcp(ADMIN).with_header("Mcp-Session-Id", "nonsense").with_header("MCP-Protocol-Version", version);
    let answered =
        client.with_header("Mcp-Method", "tools/call").with_header("Mcp-Name", "echo").post(SESSIONS, &stateless);
    assert_eq!(answered.status, 200, "{answered:?}");
    let events = fixture.home.events();
    let recorded: Vec<[&Value; 3]> = events
        .iter()
        .filter(|event| event["type"] == "control.action")
        .map(|event| [&event["data"]["action"], &event["data"]["outcome"], &event["data"]["actor"]["name"]])
        .collect();
    let expected = [
        ["open_session", "succeeded", "acme/alice"],
        ["call", "succeeded", "admin"],
        ["open_session", "refused", "acme/alice"],
        ["close_session", "succeeded", "admin"],
        ["call", "succeeded", "admin"],
    ];
    assert_eq!(json!(recorded), json!(expected));
    satellite.terminate().exits(0);
}

#[test]
fn changes_of_the_control_socket_and_refused_ones_are_recorded() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    fixture.home.satellite(&["restart", "no-such-server"]);
    fixture.home.satellite(&["call", ALICES, "echo", "{}"]).exits(0);
    fixture.home.satellite(&["auth", ALICES, "--revoke"]);
    fixture.home.satellite(&["console", "--no-browser"]).exits(0);
    let outcomes = |action: &str| actions(&fixture, action).into_iter().map(|(outcome, _)| outcome).collect::<Vec<_>>();
    for (action, outcome) in [
        ("restart", "refused"),
        ("call", "succeeded"),
        ("auth_revoke", "succeeded"),
        ("create_login_link", "succeeded"),
    ] {
        assert_eq!(outcomes(action), [outcome], "{action}");
    }
    fixture.with(OPERATOR).post("/v1/instances/%ff/stop", &json!({})).problem(400, "bad_input");
    assert_eq!(outcomes("stop"), ["refused"]);
    assert_eq!(
        fixture.client().with_header("Origin", "http://127.0.0.1:1").send("POST", "/console/logout", None).status,
        401
    );
    assert_eq!(outcomes("logout"), ["refused"]);
    // Each target has events of its own.
    for instance in [ALICES, CAROLS] {
        fixture.with(VIEWER).post(&format!("/v1/instances/{instance}/reconnect"), &json!({})).problem(403, "forbidden");
    }
    assert_eq!(outcomes("reconnect"), ["refused", "refused"]);
    satellite.terminate().exits(0);
}

#[test]
fn the_reason_in_an_event_is_short_and_contains_no_value_of_the_request() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let (admin, path) = (fixture.with(ADMIN), format!("/v1/instances/{ALICES}/configure"));
    for body in [
        json!({"set": "planted-secret"}),
        json!({"set": {"planted-secret": 7711}}),
        json!({"planted-secret": 1}),
        json!({"set": {"API_KEY": ["planted-secret"]}}),
    ] {
        admin.post(&path, &body).problem(400, "bad_input");
    }
    let call = format!("/v1/instances/{ALICES}/call");
    let large = admin.post(&call, &json!({"k".repeat(1 << 20): 1})).problem(400, "bad_input");
    assert!(large["detail"].as_str().unwrap().len() < 5000);
    let name = "t".repeat(1 << 20);
    assert_eq!(admin.post(&call, &json!({"tool": name})).status, 502);
    let executed = fixture.home.wait_event(0, "mcp.tool.executed", |_| true);
    assert!(executed["data"]["tool_name"].as_str().unwrap().len() < 300);
    let stored = fixture.home.wait_event(0, "mcp.request.logs", |_| true);
    assert!(stored["data"]["requests"][0]["tool_name"].as_str().unwrap().len() < 300);
    let (configured, called) = (actions(&fixture, "configure"), actions(&fixture, "call"));
    assert!(!configured.is_empty() && !called.is_empty());
    for (outcome, reason) in configured.iter().chain(&called) {
        let reason = reason.as_str().unwrap();
        assert!(outcome != "succeeded" && reason.len() < 600 && !reason.contains("planted"), "{reason}");
    }
    satellite.terminate().exits(0);
}

#[test]
fn bodies_have_limits_of_size_and_memory() {
    let fixture = Fixture::new("");
    let limits = "[gateway]\nbody_max = \"1MiB\"\nbodies_max = \"4MiB\"\n";
    fixture.home.write("satellite.toml", &config(&fixture.address, "").replace("[gateway]\n", limits));
    let satellite = fixture.start();
    let admin = json_client(&fixture.with(ADMIN));
    let (stop, call) = (format!("/v1/instances/{ALICES}/stop"), format!("/v1/instances/{ALICES}/call"));
    let spaces = " ".repeat(70_000);
    let large = admin.send("POST", &stop, Some(&format!("{{{spaces}}}"))).problem(413, "body_too_large");
    assert!(large["detail"].as_str().unwrap().contains("65536"), "{large}");
    fixture
        .with(ADMIN)
        .with_header("Content-Type", "text/plain")
        .send("POST", &stop, Some("{}"))
        .problem(415, "unsupported_media_type");
    // An unfinished body of one client leaves no memory for another large one, but a small one needs none.
    let mut unfinished = std::net::TcpStream::connect(&fixture.address).unwrap();
    write!(
        unfinished,
        "POST {call} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {ADMIN}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{}",
        fixture.address,
        1 << 21,
        " ".repeat(1 << 20)
    )
    .unwrap();
    // Another large body must not take memory before that one has it.
    let used = |metrics: &str| {
        let line = metrics.lines().find(|line| line.starts_with("satellite_message_memory_bytes{kind=\"used\"}"))?;
        line.split_once(' ')?.1.parse::<f64>().ok()
    };
    let whole = f64::from(1 << 20);
    wait_until("the unfinished body", || {
        used(&fixture.with(ADMIN).get("/metrics").body).is_some_and(|used| used >= whole)
    });
    let text = format!("{{\"tool\": \"echo\"{}}}", " ".repeat(100_000));
    let refused = admin.send("POST", &call, Some(&text));
    assert!(refused.header("retry-after").is_some(), "{refused:?}");
    refused.problem(429, "busy");
    admin.post(&stop, &json!({})).ok();
    satellite.terminate().exits(0);
}
