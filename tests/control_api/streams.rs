//! Streams of events, and the probes.

use std::io::Read as _;

use nix::sys::signal::Signal;
use serde_json::json;
use testkit::home::pid;
use testkit::process::send;

use super::fixture::{ALICES, BLUE, CAROLS, Fixture, OPERATOR, VIEWER};

#[test]
fn a_stream_continues_after_the_last_event_without_a_gap() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let viewer = fixture.with(VIEWER);
    let stored = fixture.home.events();
    let mut all = viewer.events("/v1/events/stream?since=0");
    let of_viewer = |event: &serde_json::Value| event["type"] != "mcp.server.logs";
    let expected: Vec<_> = stored.iter().filter(|event| of_viewer(event)).map(|event| event["seq"].clone()).collect();
    for seq in &expected {
        let (id, event) = all.next().unwrap();
        assert_eq!((&id, &event["seq"]), (&seq.to_string(), seq));
    }
    // A reader that was cut off at any event continues with the next one.
    for cut in [0, expected.len() / 2, expected.len() - 1] {
        let resumed = viewer.with_header("Last-Event-ID", &expected[cut].to_string());
        let mut events = resumed.events("/v1/events/stream");
        for seq in &expected[cut + 1..] {
            assert_eq!(events.next().unwrap().1["seq"], *seq);
        }
        fixture.with(OPERATOR).post(&format!("/v1/instances/{ALICES}/restart"), &json!({})).ok();
        let followed = std::iter::from_fn(|| events.next()).find(|(_, event)| event["type"] == "mcp.server.restarted");
        assert_eq!(followed.unwrap().1["data"]["process_id"], ALICES);
    }
    viewer.with_header("Last-Event-ID", "x").get("/v1/events/stream").problem(400, "bad_input");
    satellite.terminate().exits(0);
}

#[test]
fn a_killed_server_appears_on_the_stream() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let mut events = fixture.with(BLUE).events("/v1/events/stream?types=mcp.server.crashed");
    send(pid(&fixture.home.row("files").unwrap()), Signal::SIGKILL);
    let (_, event) = events.next().unwrap();
    assert_eq!((&event["data"]["process_id"], &event["data"]["signal"]), (&json!(CAROLS), &json!(9)));
    satellite.terminate().exits(0);
}

#[test]
fn open_streams_do_not_delay_the_end() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let mut events = fixture.with(VIEWER).events("/v1/events/stream");
    assert!(events.next().is_some());
    satellite.terminate().exits(0);
    while events.next().is_some() {}
}

#[test]
fn probes_need_no_token_and_reveal_nothing() {
    let fixture = Fixture::new("");
    let mut satellite = fixture.start();
    for path in ["/healthz", "/readyz"] {
        let answered = fixture.client().get(path);
        assert_eq!((answered.status, answered.body.as_str()), (200, "ok\n"), "{answered:?}");
    }
    // A stopped satellite answers no probe.
    satellite.signal(Signal::SIGSTOP);
    let mut stream = std::net::TcpStream::connect(&fixture.address).unwrap();
    std::io::Write::write_all(&mut stream, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .unwrap();
    satellite.signal(Signal::SIGCONT);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    satellite.terminate().exits(0);
}
