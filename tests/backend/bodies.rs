//! Invalid and hostile bodies.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;

use futures::stream;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::{Body, Method};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use super::support::{TestBackend, numbered};

/// Bodies that every endpoint rejects.
fn invalid_bodies() -> Vec<(&'static str, Vec<u8>)> {
    let deep = |open: &str| open.repeat(40_000).into_bytes();
    vec![
        ("nothing", Vec::new()),
        ("no JSON", b"hello".to_vec()),
        ("half of it", br#"{"events": [{"seq": 1"#.to_vec()),
        ("two values", b"{} {}".to_vec()),
        ("deep lists", deep("[")),
        ("deep objects", deep(r#"{"a":"#)),
        ("no UTF-8", b"{\"events\": [\"\xff\xfe\"]}".to_vec()),
        ("half a character", br#"{"events": ["\ud800"]}"#.to_vec()),
        ("a number that is none", br#"{"events": 1e999}"#.to_vec()),
        ("null", b"null".to_vec()),
        ("a list", b"[]".to_vec()),
        ("a text", b"\"events\"".to_vec()),
        ("NUL", b"\0".to_vec()),
        ("compressed", vec![0x1f, 0x8b, 0x08, 0, 0, 0, 0, 0]),
    ]
}

#[tokio::test]
async fn every_endpoint_rejects_invalid_bodies_and_serves_the_next_request() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let token = backend.token().await;
    for (name, body) in invalid_bodies() {
        let refused = backend.as_satellite(&satellite, Method::POST, "events").body(body.clone()).await;
        assert_eq!(refused.status, 400, "{name}: {refused:?}");
        for path in ["heartbeat", "commands/c/result"] {
            let refused = backend.as_satellite(&satellite, Method::POST, path).body(body.clone()).await;
            assert_eq!(refused.status, 400, "{name}: {refused:?}");
        }
        for (method, path) in [
            (Method::PUT, "config"),
            (Method::PUT, "satellites/first-satellite/config"),
            (Method::POST, "registration-tokens"),
            (Method::POST, "satellites/first-satellite/commands"),
        ] {
            let refused = backend.admin(method, path).body(body.clone()).await;
            assert_eq!(refused.status, 400, "{name}: {refused:?}");
        }
        let refused = backend.request(Method::POST, "/api/satellites/register", &token).body(body).await;
        assert_eq!(refused.status, 400, "{name}: {refused:?}");
    }
    backend.send(&satellite, "1", &numbered([1])).await.is(200, MessageSchema::EventBatchResult);
    backend.register("second-satellite", &token).await.is(201, MessageSchema::RegistrationResponse);
}

#[tokio::test]
async fn a_batch_over_the_limit_gets_413_whatever_its_size() {
    let backend = TestBackend::with_events_of(10_000).await;
    let satellite = backend.satellite("first-satellite").await;
    let padded = |bytes: usize| {
        let events = json!({"events": numbered([1])}).to_string();
        format!("{events}{}", " ".repeat(bytes - events.len()))
    };
    let send = async |body: Body| backend.as_satellite(&satellite, Method::POST, "events").body(body).await;
    send(padded(10_000).into()).await.is(200, MessageSchema::EventBatchResult);
    send(padded(10_001).into()).await.refused(413, "10000 bytes");
    send(padded(20_000_000).into()).await.refused(413, "10000 bytes");
    let pieces = stream::iter((0..2000).map(|_| Ok::<_, io::Error>(vec![b' '; 10_000])));
    send(Body::wrap_stream(pieces)).await.refused(413, "10000 bytes");
    backend.send(&satellite, "2", &numbered([2])).await.is(200, MessageSchema::EventBatchResult);
}

/// Sends the complete body before it reads the response.
fn send_all_then_read(address: &str, head: &str, bytes: usize) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(format!("{head}Content-Length: {bytes}\r\nConnection: close\r\n\r\n").as_bytes())?;
    for _ in 0..bytes / 10_000 {
        stream.write_all(&[b' '; 10_000])?;
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[tokio::test]
async fn a_client_that_sends_everything_before_reading_gets_413() {
    let backend = TestBackend::with_events_of(10_000).await;
    let satellite = backend.satellite("first-satellite").await;
    let address = backend.url().strip_prefix("http://").unwrap().to_owned();
    let (id, key) = (&satellite.id, &satellite.key);
    let head =
        format!("POST /api/satellites/{id}/events HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n");
    let answer = spawn_blocking(move || send_all_then_read(&address, &head, 20_000_000)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[tokio::test]
async fn unusual_text_is_stored_unchanged() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let text = "NUL \0, quote \" ' `, \u{202e}, \u{1f600}, '); DROP TABLE events; --";
    let mut event = numbered([1]).remove(0);
    event["data"]["status_message"] = json!(text);
    event["data"]["process_id"] = json!(text);
    backend.send(&satellite, "1", &[event]).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(backend.events("").await[0]["data"]["status_message"], text);
    let instances = backend.admin(Method::GET, "instances").send().await.is(200, MessageSchema::Instances);
    assert_eq!(instances["instances"][0]["instance"], text);
}

#[tokio::test]
async fn numbers_at_their_limits_are_stored_or_rejected_without_a_server_error() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let with = |seq: Value| {
        let mut event = numbered([1]).remove(0);
        event["seq"] = seq;
        [event]
    };
    backend.send(&satellite, "1", &with(json!(i64::MAX))).await.is(200, MessageSchema::EventBatchResult);
    assert_eq!(backend.seqs(&satellite).await, [u64::try_from(i64::MAX).unwrap()]);
    for wrong in [json!(0), json!(-1), json!(u64::MAX), json!(1.5), json!(1e300), json!("1"), Value::Null] {
        let index = backend.send(&satellite, "2", &with(wrong)).await.refused(400, "/events/0/seq");
        assert_eq!(index, Some(0));
    }
    for timestamp in ["9999-12-31T23:59:59Z", "0000-01-01T00:00:00Z", "2026-11-21T06:33:00.123456789+14:00"] {
        let mut event = with(json!(7));
        event[0]["timestamp"] = json!(timestamp);
        let answer = backend.send(&satellite, timestamp, &event).await;
        assert!(answer.status == 200 || answer.status == 400, "{answer:?}");
    }
}
