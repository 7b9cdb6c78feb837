//! The description in `OpenAPI`, and responses that match it.

use jsonschema::Validator;
use serde_json::{Value, json};

use super::fixture::{ADMIN, ALICES, CAROLS, Fixture};

/// Returns the schema of a response, in which an undescribed member is an error.
fn validator(document: &Value, path: &str, method: &str) -> Validator {
    let content = &document["paths"][path][method]["responses"]["200"]["content"]["application/json"];
    let mut schema = content["schema"].clone();
    assert!(schema.is_object() || schema.is_boolean(), "{method} {path}");
    if let Some(object) = schema.as_object_mut() {
        object.insert("components".to_owned(), close_objects(document["components"].clone()));
    }
    jsonschema::draft202012::new(&schema).unwrap()
}

/// Forbids members without a description. The parts of a combination describe one object together.
fn close_objects(value: Value) -> Value {
    close(value, false)
}

fn close(mut value: Value, is_part: bool) -> Value {
    match &mut value {
        Value::Object(object) => {
            for (key, member) in object.iter_mut() {
                let has_parts = ["oneOf", "anyOf", "allOf"].contains(&key.as_str());
                *member = match member.take() {
                    Value::Array(items) => items.into_iter().map(|item| close(item, has_parts)).collect(),
                    member => close(member, false),
                };
            }
            if !is_part && object.get("type") == Some(&json!("object")) && object.contains_key("properties") {
                object.entry("unevaluatedProperties").or_insert(json!(false));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = close(item.take(), false)),
        _ => {}
    }
    value
}

#[test]
fn every_response_matches_the_description() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let admin = fixture.with(ADMIN);
    let document = admin.get("/openapi.json").ok();
    assert_eq!(document["openapi"], "3.1.0");
    let matches = |path: &str, method: &str, response: Value| {
        let validator = validator(&document, path, method);
        let errors: Vec<String> = validator.iter_errors(&response).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{method} {path}: {errors:#?}\n{response:#}");
    };
    let mut described = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            described.push((path.as_str(), method.as_str()));
            let is_json = operation["responses"]["200"]["content"]["application/json"].is_object();
            if method == "get" && is_json {
                let response = admin.get(&path.replace("{instance}", ALICES)).ok();
                matches(path, method, response);
            }
        }
    }
    let of = |action: &str| format!("/v1/instances/{CAROLS}/{action}");
    let post = |action: &str, body: Value| {
        matches(&format!("/v1/instances/{{instance}}/{action}"), "post", admin.post(&of(action), &body).ok());
    };
    post("stop", json!({}));
    post("start", json!({}));
    post("restart", json!({}));
    fixture.home.wait_online("files");
    post("reconnect", json!({}));
    post("call", json!({"tool": "echo", "arguments": {"text": "hi"}}));
    let path = "/v1/instances/{instance}/configure";
    let configured = admin.post(&format!("/v1/instances/{ALICES}/configure"), &json!({"set": {"API_KEY": "x"}}));
    matches(path, "post", configured.ok());
    let checked = admin.post("/v1/configuration/check", &json!({"text": "[console]\nlistn = 1\n"}));
    matches("/v1/configuration/check", "post", checked.ok());
    matches("/v1/instances/{instance}", "delete", admin.send("DELETE", &format!("/v1/instances/{CAROLS}"), None).ok());
    matches("/v1/reload", "post", admin.post("/v1/reload", &json!({})).ok());
    let problem = admin.get("/v1/instances/nobody").problem(404, "not_found");
    let schema =
        json!({"$ref": "#/components/schemas/Problem", "components": close_objects(document["components"].clone())});
    assert!(jsonschema::draft202012::new(&schema).unwrap().is_valid(&problem), "{problem:#}");
    // Each change above is one of the described ones, and none is missing. A session of MCP has other content.
    let changes = described.iter().filter(|(path, method)| *method != "get" && !path.ends_with("/mcp")).count();
    assert_eq!(changes, 9, "a new change needs a line here: {described:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn parameters_and_bodies_are_described() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let document = fixture.with(ADMIN).get("/openapi.json").ok();
    let operation = &document["paths"]["/v1/instances"]["get"];
    let names: Vec<&str> =
        operation["parameters"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    for name in ["team", "user", "server", "status", "q", "sort", "descending", "limit", "cursor"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    let call = &document["paths"]["/v1/instances/{instance}/call"]["post"];
    assert_eq!(
        call["parameters"][0],
        json!({"name": "instance", "in": "path", "required": true, "schema": {"type": "string"}})
    );
    let body = &call["requestBody"]["content"]["application/json"]["schema"];
    assert_eq!(body["required"], json!(["tool"]), "{body:#}");
    for path in ["/healthz", "/readyz"] {
        let responses = &document["paths"][path]["get"]["responses"];
        assert!(responses["200"]["content"]["text/plain"]["schema"].is_object(), "{path}: {responses:#}");
        assert!(responses["503"].is_object(), "{path}: {responses:#}");
    }
    let has_header = |operation: &Value, name: &str| {
        operation["parameters"].as_array().unwrap().iter().any(|one| one["in"] == "header" && one["name"] == name)
    };
    for path in ["/v1/events/stream", "/v1/instances/stream", "/v1/instances/{instance}/logs/stream"] {
        let operation = &document["paths"][path]["get"];
        assert!(has_header(operation, "last-event-id"), "{path}: {operation:#}");
        assert!(operation["responses"]["200"]["content"]["text/event-stream"]["schema"].is_object(), "{operation:#}");
    }
    let session = &document["paths"]["/v1/instances/{instance}/mcp"];
    assert!(has_header(&session["post"], "mcp-session-id") && session["post"]["requestBody"].is_object());
    for method in ["get", "post", "delete"] {
        let failure = &session[method]["responses"]["default"]["content"];
        assert!(failure["application/json"].is_object() && failure["application/problem+json"].is_object());
    }
    assert_eq!(session["delete"]["responses"]["200"], Value::Null);
    satellite.terminate().exits(0);
}
