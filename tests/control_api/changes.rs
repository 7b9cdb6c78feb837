//! Changes of instances and of the configuration, and the events about them.

use std::io::Read as _;

use serde_json::{Value, json};
use testkit::certificate::write_pair;

use super::fixture::{ADMIN, ALICES, BOBS, CAROLS, Fixture, OPERATOR, VIEWER, config};

fn last_action(fixture: &Fixture) -> Value {
    let events = fixture.home.events();
    events.into_iter().rfind(|event| event["type"] == "control.action").unwrap()["data"].clone()
}

#[test]
fn an_instance_is_stopped_started_and_restarted() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let operator = fixture.with(OPERATOR);
    let path = |action: &str| format!("/v1/instances/{ALICES}/{action}");
    let stopped = operator.post(&path("stop"), &json!({})).ok();
    assert_eq!((&stopped["status"], &stopped["want"]), (&json!("offline"), &json!("stopped")));
    let refused = operator.post(&path("call"), &json!({"tool": "echo"}));
    refused.problem(403, "forbidden");
    let refused = fixture.with(ADMIN).post(&path("call"), &json!({"tool": "echo"})).problem(409, "refused");
    assert_eq!(refused["instance_status"], "offline");
    assert!(refused["next_step"].as_str().unwrap().contains("satellite start"), "{refused}");
    operator.post(&path("start"), &json!({})).ok();
    let before =
        fixture.home.wait_row("notes", "alice online", |row| row["user"] == "alice" && row["status"] == "online");
    operator.post(&path("restart"), &json!({})).ok();
    fixture.home.wait_row("notes", "another process", |row| {
        row["user"] == "alice" && row["status"] == "online" && row["pid"] != before["pid"]
    });
    let action = last_action(&fixture);
    assert_eq!((&action["action"], &action["outcome"]), (&json!("restart"), &json!("succeeded")));
    let actor = json!({"kind": "token", "name": "operator", "role": "operator", "via": "http", "address": "127.0.0.1"});
    assert_eq!(action["actor"], actor);
    assert_eq!(action["target"]["process_id"], ALICES);
    satellite.terminate().exits(0);
}

#[test]
fn a_refused_change_is_an_event_with_its_actor() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    fixture.with(VIEWER).post(&format!("/v1/instances/{ALICES}/stop"), &json!({})).problem(403, "forbidden");
    let action = last_action(&fixture);
    assert_eq!((&action["action"], &action["outcome"]), (&json!("stop"), &json!("refused")), "{action:#}");
    assert_eq!((&action["actor"]["name"], &action["actor"]["role"]), (&json!("viewer"), &json!("viewer")));
    assert!(action["reason"].as_str().unwrap().contains("operator"));
    fixture.home.satellite(&["stop", BOBS]).exits(0);
    let action = last_action(&fixture);
    assert_eq!((&action["action"], &action["outcome"]), (&json!("stop"), &json!("succeeded")));
    assert_eq!((&action["actor"]["kind"], &action["actor"]["via"]), (&json!("owner"), &json!("socket")));
    satellite.terminate().exits(0);
}

#[test]
fn repeated_refusals_are_counted() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let path = format!("/v1/instances/{ALICES}/stop");
    let send = |client: &super::client::ApiClient| client.post(&path, &json!({})).status;
    for _ in 0..20 {
        assert_eq!(send(&fixture.client()), 401);
        assert_eq!(send(&fixture.with(VIEWER)), 403);
    }
    let refused = |kind: &str| -> Vec<u64> {
        let events = fixture.home.events();
        let of_kind = events.iter().filter(|event| event["data"]["actor"]["kind"] == kind);
        of_kind.map(|event| event["data"]["repeated"].as_u64().unwrap_or(0)).collect()
    };
    // The number of events depends on the time that the requests take; each refusal is an event or counted.
    for (kind, client) in [("unknown", fixture.client()), ("token", fixture.with(VIEWER))] {
        testkit::wait::wait_until("an event that counts the others", || {
            send(&client);
            refused(kind).iter().any(|repeated| *repeated > 0)
        });
        let events = refused(kind);
        assert!(events.iter().map(|repeated| repeated + 1).sum::<u64>() >= 20, "{kind}: {events:?}");
    }
    satellite.terminate().exits(0);
}

#[test]
fn values_are_configured_and_appear_nowhere() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let admin = fixture.with(ADMIN);
    let path = format!("/v1/instances/{ALICES}/configure");
    let configured = admin.post(&path, &json!({"set": {"API_KEY": "planted-secret-value"}})).ok();
    assert_eq!(configured["required"][0]["given_by"], "configure", "{configured:#}");
    let action = last_action(&fixture);
    assert_eq!((&action["action"], &action["keys"]), (&json!("configure"), &json!(["API_KEY"])));
    // A value in the position of a key is not repeated.
    let refused = admin.post(&path, &json!({"set": {"planted-secret-value": "x"}})).problem(400, "bad_input");
    assert!(!refused.to_string().contains("planted"), "{refused}");
    let unknown = admin.post(&path, &json!({"sett": {}})).problem(400, "bad_input");
    assert!(unknown["detail"].as_str().unwrap().contains("sett"), "{unknown}");
    let events = serde_json::to_string(&fixture.home.events()).unwrap();
    assert!(!events.contains("planted-secret-value"), "{events}");
    let outcome = satellite.terminate().exits(0);
    assert!(!outcome.stderr.contains("planted-secret-value"));
}

#[test]
fn an_uninstalled_instance_is_back_after_a_reload() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let admin = fixture.with(ADMIN);
    admin.send("DELETE", &format!("/v1/instances/{CAROLS}"), None).ok();
    admin.get(&format!("/v1/instances/{CAROLS}")).problem(404, "not_found");
    assert_eq!(admin.post("/v1/reload", &json!({})).ok(), json!({"servers": 3, "teams": 2}));
    fixture.home.wait_online("files");
    satellite.terminate().exits(0);
}

#[test]
fn a_proposed_configuration_is_checked_and_not_applied() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let admin = fixture.with(ADMIN);
    let check = |text: &str| admin.post("/v1/configuration/check", &json!({"text": text})).ok();
    let valid = check(&config(&fixture.address, "").replace("SIM", "command = \"true\"\nargs = ["));
    assert_eq!(valid["valid"], false, "{valid:#}");
    assert_eq!(check("[satellite]\nname = \"a-satellite\"\n"), json!({"valid": true, "errors": [], "warnings": []}));
    let wrong = check("[gateway]\nlisten = \"nowhere\"\n[console]\nlistn = \"x\"\n");
    assert_eq!(wrong["valid"], false);
    let places: Vec<_> =
        wrong["errors"].as_array().unwrap().iter().map(|error| error["line"].as_u64().unwrap()).collect();
    assert_eq!(places, [2, 4], "{wrong:#}");
    assert!(wrong["errors"][1]["hint"].as_str().unwrap().contains("listen"), "{wrong:#}");
    assert_eq!(admin.get("/v1/instances").ok()["total"], 3);
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_changes_tokens_and_the_listener() {
    let fixture = Fixture::new("");
    let mut satellite = fixture.start();
    let own = format!("127.0.0.1:{}", testkit::port::free_port());
    let text = config(&fixture.address, &format!("listen = \"{own}\""))
        .replace("role = \"viewer\"\n\n", "role = \"operator\"\n\n");
    fixture.home.write("satellite.toml", &text);
    fixture.home.satellite(&["reload"]).exits(0);
    // The endpoint does not serve the API any more.
    fixture.with(ADMIN).get("/v1/instances").problem(404, "not_found");
    let moved = super::client::ApiClient::new(&own);
    assert_eq!(moved.get("/readyz").status, 200);
    moved.with_token(VIEWER).post(&format!("/v1/instances/{ALICES}/restart"), &json!({})).ok();
    fixture.home.write("satellite.toml", &config(&fixture.address, "enabled = false"));
    fixture.home.satellite(&["reload"]).exits(0);
    assert!(std::net::TcpStream::connect(&own).is_err());
    fixture.with(ADMIN).get("/v1/instances").problem(404, "not_found");
    fixture.client().get("/healthz").problem(404, "not_found");
    assert!(satellite.process.is_running());
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_applies_the_certificate_to_the_own_listener() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let own = format!("127.0.0.1:{}", testkit::port::free_port());
    let reload = |tls: &str| {
        let text = config(&fixture.address, &format!("listen = \"{own}\""));
        fixture.home.write("satellite.toml", &text.replace("[gateway]\n", &format!("[gateway]\n{tls}\n")));
        fixture.home.satellite(&["reload"]).exits(0);
    };
    let plain = super::client::ApiClient::new(&own);
    reload("");
    assert_eq!(plain.get("/readyz").status, 200);
    let mut idle = std::net::TcpStream::connect(&own).unwrap();
    let tls = "tls = { cert = \"cert.pem\", key = \"key.pem\" }";
    let first = write_pair(fixture.home.path());
    reload(tls);
    assert_eq!(plain.tls_status(&first, "/readyz"), Some(200));
    // A connection without TLS is over.
    assert!(matches!(idle.read(&mut [0]), Ok(0) | Err(_)));
    let printed = fixture.home.satellite(&["console", "--no-browser"]).exits(0).stdout;
    assert!(printed.starts_with(&format!("https://{own}/console/")), "{printed}");
    let second = write_pair(fixture.home.path());
    reload(tls);
    assert_eq!(plain.tls_status(&second, "/readyz"), Some(200));
    assert_eq!(plain.tls_status(&first, "/readyz"), None, "the certificate was renewed");
    reload("");
    assert_eq!(plain.get("/readyz").status, 200);
    assert_eq!(plain.tls_status(&second, "/readyz"), None);
    satellite.terminate().exits(0);
}

/// The satellite was started in another directory than that of its configuration.
#[test]
fn paths_of_a_proposed_configuration_are_relative_to_the_file_in_use() {
    let fixture = Fixture::new("");
    fixture.home.write("a-token", "file-token-0123456789abcdef");
    let satellite = fixture.start();
    let admin = fixture.with(ADMIN);
    let user =
        "[[teams]]\nid = \"t\"\nslug = \"t\"\nusers = [{ id = \"u\", slug = \"u\", tokens = [\"file:FILE\"] }]\n";
    let check = |file: &str| {
        let text = user.replace("FILE", file);
        admin.post("/v1/configuration/check", &json!({"text": text})).ok()
    };
    assert_eq!(check("a-token")["valid"], true, "{:#}", check("a-token"));
    let device = check("/dev/zero");
    assert!(device.to_string().contains("it is not a regular file"), "{device:#}");
    satellite.terminate().exits(0);
}

#[test]
fn an_address_that_is_in_use_is_reported() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let admin = fixture.with(ADMIN);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    fixture.home.write("satellite.toml", &config(&address, ""));
    let applied = admin.post("/v1/reload", &json!({})).ok();
    let problem = applied["endpoint_problem"].as_str().unwrap();
    assert!(problem.starts_with(&format!("cannot listen at {address}: ")), "{problem}");
    assert_eq!(admin.get("/v1/satellite").ok()["endpoint_problem"], problem);
    assert!(fixture.home.satellite(&["status"]).exits(0).stdout.contains(problem));
    fixture.home.write("satellite.toml", &config(&fixture.address, ""));
    assert!(admin.post("/v1/reload", &json!({})).ok()["endpoint_problem"].is_null());
    satellite.terminate().exits(0);
}
