//! Streams of clients that lose their permissions.

use serde_json::json;

use super::client::{ApiClient, EventStream};
use super::fixture::{ADMIN, ALICE, ALICES, Fixture, OPERATOR, READER, VIEWER, config};

/// Opens every kind of stream that a client can read.
fn open_streams(client: &ApiClient) -> Vec<EventStream> {
    let paths = [
        "/v1/events/stream?since=0".to_owned(),
        "/v1/instances/stream?events=true".to_owned(),
        format!("/v1/instances/{ALICES}/logs/stream?since=0"),
    ];
    paths
        .iter()
        .map(|path| {
            let mut stream = client.events(path);
            // The stream is at work: without it, the next read would wait for an event that never comes.
            if !path.contains("logs") {
                stream.next().unwrap();
            }
            stream
        })
        .collect()
}

/// Reads until the streams end. A test that waits here for ever has found a stream that goes on.
fn wait_ends(streams: Vec<EventStream>) {
    streams.into_iter().for_each(EventStream::wait_end);
}

/// Opens the stream of a session that the playground has with an instance.
fn playground_stream(client: &ApiClient) -> EventStream {
    let path = format!("/v1/instances/{ALICES}/mcp");
    let info = json!({"name": "playground", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info});
    let opening = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params});
    let opened = client.with_header("Accept", "application/json, text/event-stream").post(&path, &opening);
    client.with_header("Mcp-Session-Id", opened.header("mcp-session-id").unwrap()).events(&path)
}

#[test]
fn the_stream_of_the_playground_ends_with_its_permissions() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let (admin, alice) = (playground_stream(&fixture.with(ADMIN)), playground_stream(&fixture.with(ALICE)));
    // Calls in the name of others need the grant `act_as`.
    let text = config(&fixture.address, "").replace("grants = [\"calls:read\", \"act_as\"]", "");
    fixture.home.write("satellite.toml", &text);
    fixture.home.satellite(&["reload"]).exits(0);
    admin.wait_end();
    fixture.home.write("satellite.toml", &text.replace("role = \"operator\"\n[[teams.users]]", "[[teams.users]]"));
    fixture.home.satellite(&["reload"]).exits(0);
    alice.wait_end();
    satellite.terminate().exits(0);
}

#[test]
fn streams_end_when_their_token_is_removed_or_has_fewer_grants() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let (removed, reduced) = (open_streams(&fixture.with(ADMIN)), open_streams(&fixture.with(READER)));
    let mut other = fixture.with(VIEWER).events("/v1/events/stream");
    let text = config(&fixture.address, "").replace("grants = [\"calls:read\"]", "");
    let digest = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
    fixture.home.write("satellite.toml", &text.replace("env:ADMIN", digest));
    fixture.home.satellite(&["reload"]).exits(0);
    wait_ends(removed);
    wait_ends(reduced);
    // The stream of an unchanged token goes on.
    fixture.with(OPERATOR).post(&format!("/v1/instances/{ALICES}/restart"), &json!({})).ok();
    assert!(std::iter::from_fn(|| other.next()).any(|(_, event)| event["type"] == "mcp.server.restarted"));
    satellite.terminate().exits(0);
}

#[test]
fn streams_end_with_the_logout() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let browser = fixture.logged_in(READER);
    let streams = open_streams(&browser);
    let page = browser.get("/console/").body;
    let token = page.split("name=\"csrf\" content=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let left = browser.with_header("Origin", &format!("http://{}", fixture.address));
    let left = left.with_header("X-CSRF-Token", &token).with_header("Content-Type", "application/json");
    assert!(left.send("POST", "/console/logout", None).status < 400);
    wait_ends(streams);
    satellite.terminate().exits(0);
}
