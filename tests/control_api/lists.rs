//! Lists: filters, orders, pages.

use serde_json::{Value, json};

use super::fixture::{ALICES, BOBS, CAROLS, Fixture, OPERATOR, VIEWER};

fn names(page: &Value) -> Vec<&str> {
    page["items"].as_array().unwrap().iter().map(|item| item["instance"].as_str().unwrap()).collect()
}

#[test]
fn instances_are_filtered_and_ordered() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    fixture.with(OPERATOR).post(&format!("/v1/instances/{BOBS}/stop"), &json!({})).ok();
    let viewer = fixture.with(VIEWER);
    for (query, expected) in [
        ("", vec![CAROLS, ALICES, BOBS]),
        ("?descending=true", vec![BOBS, ALICES, CAROLS]),
        ("?team=acme", vec![ALICES, BOBS]),
        ("?team=team_acme&user=bob", vec![BOBS]),
        ("?server=files", vec![CAROLS]),
        ("?status=offline,error", vec![BOBS]),
        ("?status=error", vec![]),
        ("?q=alice", vec![ALICES]),
        ("?sort=status", vec![BOBS, CAROLS, ALICES]),
        ("?sort=since&descending=true&limit=1", vec![BOBS]),
    ] {
        let page = viewer.get(&format!("/v1/instances{query}")).ok();
        assert_eq!(names(&page), expected, "{query}");
    }
    for (query, part) in [
        ("?limit=0", "limit"),
        ("?limit=1001", "limit"),
        ("?cursor=x", "cursor"),
        ("?sort=size", "size"),
        ("?what=1", "what"),
    ] {
        let problem = viewer.get(&format!("/v1/instances{query}")).problem(400, "bad_input");
        assert!(problem["detail"].as_str().unwrap().contains(part), "{problem}");
    }
    let problem = viewer.get("/v1/instances?team=acne").problem(404, "not_found");
    assert!(problem["detail"].as_str().unwrap().contains("did you mean `acme`"), "{problem}");
    satellite.terminate().exits(0);
}

#[test]
fn pages_contain_each_instance_once_while_instances_change() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let (viewer, operator) = (fixture.with(VIEWER), fixture.with(OPERATOR));
    let mut seen: Vec<String> = Vec::new();
    let mut path = "/v1/instances?limit=1".to_owned();
    loop {
        let page = viewer.get(&path).ok();
        assert_eq!(page["total"], 3);
        seen.extend(names(&page).into_iter().map(str::to_owned));
        operator.post(&format!("/v1/instances/{ALICES}/restart"), &json!({})).ok();
        let Some(next) = page["next"].as_str() else { break };
        path = format!("/v1/instances?limit=1&cursor={next}");
    }
    assert_eq!(seen, [CAROLS, ALICES, BOBS]);
    satellite.terminate().exits(0);
}

#[test]
fn the_configuration_shows_sources_and_no_secret() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let values = fixture.with(super::fixture::ADMIN).get("/v1/configuration").ok();
    let value = |path: &str| {
        let found = values.as_array().unwrap().iter().find(|value| value["path"] == path);
        found.unwrap_or_else(|| panic!("{path}: {values:#}")).clone()
    };
    assert_eq!(value("gateway.listen")["value"], fixture.address.as_str());
    let source = value("gateway.listen")["source"].as_str().unwrap().to_owned();
    assert!(source.contains("satellite.toml:"), "{source}");
    assert_eq!(value("satellite.profile")["source"], "default");
    for token in super::fixture::ALL_TOKENS {
        assert!(!values.to_string().contains(token));
    }
    satellite.terminate().exits(0);
}

#[test]
fn an_instance_has_details_tools_and_clients() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let viewer = fixture.with(VIEWER);
    let instance = viewer.get("/v1/instances/files").ok();
    assert_eq!((&instance["instance"], &instance["status"]), (&json!(CAROLS), &json!("online")));
    let ambiguous = viewer.get("/v1/instances/notes").problem(400, "ambiguous");
    assert!(ambiguous["detail"].as_str().unwrap().contains(BOBS), "{ambiguous}");
    let tools = viewer.get("/v1/instances/files/tools").ok();
    assert_eq!(tools[0]["tool"]["name"], "echo", "{tools:#}");
    assert_eq!(viewer.get("/v1/clients").ok(), json!([]));
    assert_eq!(viewer.get("/v1/backend").ok(), Value::Null);
    viewer.get("/v1/instances/..%2f..%2fetc").problem(404, "not_found");
    viewer.get("/v1/nothing").problem(404, "not_found");
    viewer.send("PUT", "/v1/instances", None).problem(405, "method_not_allowed");
    satellite.terminate().exits(0);
}
