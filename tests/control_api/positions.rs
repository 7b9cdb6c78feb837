//! Positions and parameters of streams.

use serde_json::{Value, json};
use testkit::wait::wait_until;

use super::client::EventStream;
use super::fixture::{ALICES, BLUE, CAROLS, Fixture, OPERATOR, READER, VIEWER};

/// Returns the next event of the journal in a stream of instances and events, with its id.
fn next_event(stream: &mut EventStream) -> (String, u64) {
    std::iter::from_fn(|| stream.next()).find_map(|(id, data)| Some((id, data["seq"].as_u64()?))).unwrap()
}

#[test]
fn one_id_continues_instances_and_events() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let reader = fixture.with(READER);
    let path = "/v1/instances/stream?events=true&since=0";
    let mut stream = reader.events(path);
    let (begin, rows) = stream.next().unwrap();
    assert!(rows["rows"].is_array() && begin.ends_with("-0"), "the stream begins with all rows: {begin} {rows}");
    let (id, seq) = (0..5).map(|_| next_event(&mut stream)).last().unwrap();
    assert!(id.ends_with(&format!("-{seq}")), "{id} {seq}");
    // The position of the header precedes that of the address, which a browser repeats.
    let mut resumed = reader.with_header("Last-Event-ID", &id).events(path);
    let (_, first) = resumed.next().unwrap();
    assert!(first.get("rows").is_none(), "the rows are known: {first}");
    assert_eq!(next_event(&mut resumed).1, seq + 1);
    let position = reader.events(&format!("/v1/instances/stream?events=true&position={id}"));
    assert_eq!(next_event(&mut { position }).1, seq + 1);
    satellite.terminate().exits(0);
}

#[test]
fn a_number_that_no_event_has_is_refused() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let viewer = fixture.with(VIEWER);
    let refused = viewer.get("/v1/events/stream?since=99999999").problem(409, "refused");
    assert!(refused["detail"].as_str().unwrap().contains("journal"), "{refused}");
    viewer.with_header("Last-Event-ID", "99999999").get("/v1/events/stream").problem(409, "refused");
    // The stream of a page begins with rows, which tell the page that the satellite is another one.
    let mut page = viewer.events("/v1/instances/stream?events=true&position=1-5-99999999");
    assert!(page.next().unwrap().1["rows"].is_array());
    fixture.with(OPERATOR).post(&format!("/v1/instances/{ALICES}/restart"), &json!({})).ok();
    assert!(next_event(&mut page).1 < 99_999_999);
    satellite.terminate().exits(0);
}

#[test]
fn a_log_is_followed_from_a_page_on_without_a_gap() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let reader = fixture.with(READER);
    let path = format!("/v1/instances/{CAROLS}/logs");
    let stored = || reader.get(&path).ok();
    wait_until("lines of the log", || !stored()["lines"].as_array().unwrap().is_empty());
    let page = stored();
    assert_eq!(page["complete"], true);
    let through = page["through"].as_u64().unwrap();
    let mut followed = reader.events(&format!("{path}/stream?since={through}&q=line%20of&level=info"));
    let next = followed.next().unwrap().1;
    assert!(next["seq"].as_u64().unwrap() > through, "{next}");
    assert!(next["data"]["logs"].as_array().unwrap().iter().all(|line| line["level"] == "info"), "{next}");
    // Without a number, lines that are stored already are not part of the stream.
    let last = stored()["through"].as_u64().unwrap();
    let new = reader.events(&format!("{path}/stream")).next().unwrap().1;
    assert!(new["seq"].as_u64().unwrap() > last, "{new} {last}");
    // A text that no line contains selects none: the stream ends with the satellite, without an event.
    let mut none = reader.events(&format!("{path}/stream?since=0&q=no-such-line"));
    satellite.terminate().exits(0);
    assert_eq!(none.next(), None);
}

#[test]
fn mistyped_parameters_are_errors() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let reader = fixture.with(READER);
    for path in [
        "/v1/events?types=nonsense".to_owned(),
        "/v1/events/stream?types=mcp.server.crashed,nonsense".to_owned(),
        "/v1/instances/stream?events=true&types=nonsense".to_owned(),
        "/v1/instances/stream?nonsense=1".to_owned(),
        "/v1/instances/stream?position=nonsense".to_owned(),
        format!("/v1/instances/{ALICES}/logs?level=bogus"),
        format!("/v1/instances/{ALICES}/logs/stream?level=bogus"),
        format!("/v1/instances/{ALICES}/logs/stream?nonsense=1"),
        // These parameters are those of all calls.
        format!("/v1/instances/{ALICES}/calls?team=blue"),
        format!("/v1/instances/{ALICES}/calls?server=files"),
    ] {
        let problem = reader.get(&path).problem(400, "bad_input");
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            ["nonsense", "bogus", "team", "server", "position"].iter().any(|text| detail.contains(text)),
            "{detail}"
        );
    }
    reader.get("/v1/instances/stream?team=nosuch").problem(404, "not_found");
    fixture.with(BLUE).get("/v1/instances/stream?team=acme").problem(404, "not_found");
    // A browser without a position sends an empty one.
    let mut events = reader.with_header("Last-Event-ID", "").events("/v1/events/stream?since=0");
    assert_eq!(events.next().unwrap().1["seq"], Value::from(1));
    satellite.terminate().exits(0);
}
