//! Permissions of roles, grants and teams.

use serde_json::{Value, json};

use super::fixture::{
    ADMIN, ALICE, ALICES, ALL_TOKENS, BLUE, BOB, BOBS, CAROLS, Fixture, OPERATOR, READER, VIEWER, config,
};

/// The role of each token, with 0 for none.
fn rank(token: &str) -> usize {
    match token {
        VIEWER | READER => 1,
        OPERATOR | BLUE | ALICE => 2,
        ADMIN => 3,
        _ => 0,
    }
}

/// Every operation of the description is refused below its role and permitted from its role on.
#[test]
fn every_operation_needs_exactly_its_role() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let document = fixture.with(VIEWER).get("/openapi.json").ok();
    let mut operations = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            if operation["security"] == json!([]) {
                assert_eq!(fixture.client().get(path).status, 200, "{path} needs no token");
                continue;
            }
            operations += 1;
            let needed = match operation["x-role"].as_str().unwrap() {
                "viewer" => 1,
                "operator" => 2,
                "admin" => 3,
                other => panic!("{path}: {other}"),
            };
            let method = method.to_uppercase();
            // An instance that nobody has: the operation has no effect, and the role is checked first.
            let path = path.replace("{instance}", "nobody-has-this");
            for token in ALL_TOKENS {
                let client = fixture.with(token);
                if rank(token) < needed {
                    let (status, kind) = if rank(token) == 0 { (401, "unauthorized") } else { (403, "forbidden") };
                    client.send(&method, &path, None).problem(status, kind);
                } else if method != "GET" {
                    let answered = client.send(&method, &path, None);
                    assert!(![401, 403].contains(&answered.status), "{method} {path} {token}: {answered:?}");
                }
            }
            fixture.client().send(&method, &path, None).problem(401, "unauthorized");
        }
    }
    assert!(operations > 15, "{operations}");
    satellite.terminate().exits(0);
}

/// A web page could reach the API under its own host name (DNS rebinding), or send requests from its own origin.
#[test]
fn other_hosts_and_origins_get_a_problem_and_no_content() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let admin = fixture.with(ADMIN);
    for path in ["/v1/satellite", "/openapi.json", "/healthz"] {
        let problem = admin.with_header("Origin", "http://evil.example").get(path).problem(403, "host_not_allowed");
        assert_eq!(problem["instance"], path);
    }
    let page = admin.with_header("Origin", "http://evil.example").get("/console/");
    assert_eq!((page.status, page.header("content-type")), (403, Some("text/html; charset=utf-8")), "{page:?}");
    assert!(page.body.contains("this Origin is not allowed"), "{page:?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_token_of_one_team_sees_nothing_of_others() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let blue = fixture.with(BLUE);
    let page = blue.get("/v1/instances").ok();
    assert_eq!((&page["total"], &page["items"][0]["instance"]), (&json!(1), &json!(CAROLS)));
    assert_eq!(blue.get("/v1/teams").ok().as_array().unwrap().len(), 1);
    assert_eq!(blue.get("/v1/satellite").ok()["instances"], json!({"online": 1}));
    assert_eq!(blue.get("/v1/instances?team=acme").problem(404, "not_found")["instance"], "/v1/instances");
    blue.get(&format!("/v1/instances/{ALICES}")).problem(404, "not_found");
    blue.post(&format!("/v1/instances/{ALICES}/restart"), &json!({})).problem(404, "not_found");
    blue.get("/v1/fleet").problem(403, "forbidden");
    assert_eq!(fixture.with(VIEWER).get("/v1/fleet").ok()["backend"], Value::Null);
    blue.get("/v1/events/stream?team=acme").problem(404, "not_found");
    let events = blue.get("/v1/events/stream").body;
    assert!(events.contains("team_blue") && !events.contains("team_acme"), "{events}");
    // The role of a user covers its own team.
    fixture.with(ALICE).get(&format!("/v1/instances/{CAROLS}")).problem(404, "not_found");
    fixture.with(ALICE).get(&format!("/v1/instances/{BOBS}")).ok();
    satellite.terminate().exits(0);
}

#[test]
fn a_call_in_the_name_of_another_user_needs_the_grant() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let call = |token: &str, instance: &str| {
        let body = json!({"tool": "echo", "arguments": {"text": "hi"}});
        fixture.with(token).post(&format!("/v1/instances/{instance}/call"), &body)
    };
    for (token, instance) in [(ALICE, ALICES), (ADMIN, ALICES), (ADMIN, BOBS), (BLUE, CAROLS)] {
        assert_eq!(call(token, instance).ok()["result"]["structuredContent"], json!({"text": "hi"}));
    }
    for (token, instance) in [(ALICE, BOBS), (OPERATOR, ALICES), (OPERATOR, CAROLS)] {
        let problem = call(token, instance).problem(403, "forbidden");
        assert!(problem["detail"].as_str().unwrap().contains("act_as"), "{problem}");
    }
    let events = fixture.home.events();
    let actions: Vec<(&str, &Value)> = events
        .iter()
        .filter(|event| event["type"] == "control.action" && event["data"]["action"] == "call")
        .map(|event| (event["data"]["outcome"].as_str().unwrap(), &event["data"]["target"]["process_id"]))
        .collect();
    assert_eq!(
        actions,
        [
            ("succeeded", &json!(ALICES)),
            ("succeeded", &json!(ALICES)),
            ("succeeded", &json!(BOBS)),
            ("succeeded", &json!(CAROLS)),
            ("refused", &json!(BOBS)),
            ("refused", &json!(ALICES)),
            ("refused", &json!(CAROLS)),
        ]
    );
    satellite.terminate().exits(0);
}

#[test]
fn logs_and_requests_of_others_need_the_grant() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let body = json!({"tool": "echo", "arguments": {"text": "argument-of-alice"}});
    fixture.with(ALICE).post(&format!("/v1/instances/{ALICES}/call"), &body).ok();
    fixture.home.wait_event(0, "mcp.request.logs", |event| event["data"]["process_id"] == ALICES);
    fixture.home.wait_event(0, "mcp.server.logs", |event| event["data"]["process_id"] == CAROLS);
    let seen = |token: &str| fixture.with(token).get("/v1/events/stream").body;
    for token in [READER, ADMIN] {
        let events = seen(token);
        assert!(events.contains("argument-of-alice") && events.contains("line of carol"), "{events}");
    }
    for token in [VIEWER, OPERATOR] {
        let events = seen(token);
        assert!(!events.contains("argument-of-alice") && !events.contains("line of carol"), "{events}");
        assert!(events.contains("mcp.tool.executed"));
    }
    assert!(seen(ALICE).contains("argument-of-alice"));
    satellite.terminate().exits(0);
}

#[test]
fn calls_are_recorded_with_user_client_and_fate() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let mcp = fixture.with(ALICE).with_header("Accept", "application/json, text/event-stream");
    let opened = mcp.post(
        "/i/notes/mcp",
        &json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-11-25",
            "capabilities": {}, "clientInfo": {"name": "little-client", "version": "1"}}}),
    );
    let session = mcp.with_header("Mcp-Session-Id", opened.header("mcp-session-id").unwrap());
    for tool in ["echo", "no-such-tool"] {
        let params = json!({"name": tool, "arguments": {"text": "hello"}});
        let call = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params});
        assert_eq!(session.post("/i/notes/mcp", &call).status, 200);
    }
    fixture.with(BLUE).post(&format!("/v1/instances/{CAROLS}/call"), &json!({"tool": "echo", "arguments": {}})).ok();
    let reader = fixture.with(READER);
    let calls = |query: &str| -> Vec<Value> {
        reader.get(&format!("/v1/calls{query}")).ok()["calls"].as_array().unwrap().clone()
    };
    testkit::wait::wait_until("all calls to be stored", || calls("").len() == 3);
    let of_client = calls("?client=little-client");
    assert_eq!(of_client.len(), 2, "{of_client:#?}");
    assert!(of_client.iter().all(|call| call["instance"] == ALICES && call["user_id"] == "u1"));
    let failed = calls("?fate=server_error");
    assert_eq!((failed.len(), &failed[0]["tool_name"]), (1, &json!("no-such-tool")));
    assert_eq!(calls("?server=files")[0]["client"], Value::Null);
    assert_eq!(calls("?user=u1&success=true").len(), 1);
    let first = reader.get("/v1/calls?limit=1").ok();
    let rest = reader.get(&format!("/v1/calls?limit=2&cursor={}", first["next"].as_str().unwrap())).ok();
    assert_eq!(rest["calls"].as_array().unwrap().len(), 2);
    // A user reads the own calls without the grant.
    let own = fixture.with(ALICE).get("/v1/calls").ok();
    assert_eq!(own["calls"].as_array().unwrap().len(), 2);
    fixture.with(VIEWER).get("/v1/calls").problem(403, "forbidden");
    let read: Vec<Value> =
        fixture.home.events().into_iter().filter(|event| event["data"]["action"] == "read_calls").collect();
    assert_eq!(read.len(), 1, "one event for a minute of reads: {read:#?}");
    assert_eq!(read[0]["data"]["actor"]["name"], "reader");
    satellite.terminate().exits(0);
}

#[test]
fn without_authentication_a_client_of_this_machine_may_look_only() {
    let fixture = Fixture::new("");
    let text = config(&fixture.address, "").replace("listen = ", "auth = \"none\"\nas = \"acme/alice\"\nlisten = ");
    fixture.home.write("satellite.toml", &text.replace("role = \"operator\"\n[[teams", "[[teams"));
    let satellite = fixture.start();
    let anyone = fixture.client();
    assert_eq!(anyone.get("/v1/instances").ok()["total"], 3);
    let refused = anyone.post(&format!("/v1/instances/{ALICES}/restart"), &json!({})).problem(403, "forbidden");
    assert!(refused["detail"].as_str().unwrap().contains("operator"), "{refused}");
    // A proxy passes on requests of other machines.
    anyone.with_header("X-Forwarded-For", "10.0.0.1").get("/v1/instances").problem(401, "unauthorized");
    anyone.with_header("Host", "attacker.example").get("/v1/instances");
    assert_eq!(anyone.with_header("Host", "attacker.example").get("/v1/instances").status, 403);
    fixture.with(OPERATOR).post(&format!("/v1/instances/{ALICES}/restart"), &json!({})).ok();
    satellite.terminate().exits(0);
}

#[test]
fn a_role_without_authentication_is_an_error() {
    let fixture = Fixture::new("");
    let text = config(&fixture.address, "").replace("listen = ", "auth = \"none\"\nas = \"acme/alice\"\nlisten = ");
    let file = fixture.home.write("satellite.toml", &text);
    let checked = fixture.home.bare(&["check", "--config", file.to_str().unwrap()]).exits(2);
    assert!(checked.stderr.contains("a role needs a token"), "{checked:#?}");
}

#[test]
fn the_owner_has_a_token_in_a_private_file() {
    use std::os::unix::fs::PermissionsExt as _;
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let file = fixture.home.data_dir().join("console-token");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fixture.owner().get("/v1/instances").ok()["total"], 3);
    // It is no token of the MCP endpoint.
    assert_eq!(fixture.owner().post("/mcp", &json!({})).status, 401);
    assert_eq!(fixture.with(ADMIN).post("/mcp", &json!({})).status, 401);
    let bob = fixture.with(BOB).post("/mcp", &json!({}));
    assert_ne!(bob.status, 401, "{bob:?}");
    satellite.terminate().exits(0);
}

const TEAM_ADMIN: &str = "team-admin-token-0123456789";

/// An admin of one team manages that team, and neither reads nor changes what concerns all teams.
#[test]
fn an_admin_of_one_team_is_no_admin_of_the_satellite() {
    let mut fixture = Fixture::new("");
    fixture.home.env.push(("TEAM_ADMIN".to_owned(), TEAM_ADMIN.to_owned()));
    let team_admin =
        "[[console.tokens]]\nname = \"team-admin\"\ntoken = \"env:TEAM_ADMIN\"\nrole = \"admin\"\nteam = \"blue\"\n";
    fixture.home.write("satellite.toml", &config(&fixture.address, team_admin));
    let satellite = fixture.start();
    let admin = fixture.with(TEAM_ADMIN);
    for path in ["/v1/configuration", "/v1/sandboxes", "/metrics"] {
        admin.get(path).problem(403, "forbidden");
    }
    admin.post("/v1/configuration/check", &json!({"text": ""})).problem(403, "forbidden");
    admin.post("/v1/reload", &json!({})).problem(403, "forbidden");
    admin.send("DELETE", &format!("/v1/instances/{ALICES}"), None).problem(404, "not_found");
    admin.send("DELETE", &format!("/v1/instances/{CAROLS}"), None).ok();
    satellite.terminate().exits(0);
}

/// An error about a mistyped name lists other names: those of the own team only.
#[test]
fn errors_name_nothing_of_other_teams() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let blue = fixture.with(BLUE);
    for query in ["team=nobody", "user=nobody", "team=acme", "user=alice", "user=bob"] {
        let problem = blue.get(&format!("/v1/instances?{query}")).problem(404, "not_found");
        let detail = problem["detail"].as_str().unwrap().replace(query.split_once('=').unwrap().1, "");
        assert!(!["acme", "alice", "bob"].iter().any(|other| detail.contains(other)), "{query}: {detail}");
    }
    satellite.terminate().exits(0);
}
