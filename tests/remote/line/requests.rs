//! Streamable HTTP: requests, responses and notifications.

use std::sync::Arc;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::spec::ServerTarget;
use mcp_satellite_actors::seam::{LineEvent, LineOutput};

use super::peer::Peer;
use super::support::{TestLine, VERSION, http, policy};

#[tokio::test]
async fn no_connection_is_made_before_the_first_message() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.is_silent().await;
    assert_eq!(peer.connections_made(), 0);
    line.request(1, "initialize");
    line.next_request(&mut peer).await.result().await;
    assert_eq!(line.message().await["id"], 1);
}

#[tokio::test]
async fn every_message_after_the_handshake_names_the_session_and_the_version() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    line.is_silent().await;
    line.request(1, "tools/list");
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.line(), "POST /mcp");
    assert_eq!(request.member("method"), "tools/list");
    assert_eq!(request.header("accept"), Some("application/json, text/event-stream"));
    assert_eq!(request.header("content-type"), Some("application/json"));
    assert_eq!(request.header("mcp-session-id"), Some("s-1"));
    assert_eq!(request.header("mcp-protocol-version"), Some(VERSION));
    assert_eq!(request.header("user-agent"), Some(concat!("mcp-satellite/", env!("CARGO_PKG_VERSION"))));
    let answer = "{\"jsonrpc\":\"2.0\", \"id\":1,\n\"result\":{\"unknown\":18446744073709551616}}";
    request.json(answer).await;
    assert_eq!(line.text().await, answer, "the response was changed");
    assert_eq!(peer.connections_made(), 1, "a connection was not reused");
}

#[tokio::test]
async fn messages_wait_until_the_server_has_accepted_initialized() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.request(0, "initialize");
    line.next_request(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    line.request(1, "tools/list");
    line.request(2, "prompts/list");
    line.notify("notifications/roots/list_changed");
    line.send(LineOutput::Abandon { id: 2 });
    let initialized = line.next_request(&mut peer).await;
    assert_eq!(initialized.member("method"), "notifications/initialized");
    line.is_silent().await;
    assert!(!peer.has_request(), "a message was sent before the server accepted `initialized`");
    initialized.accepted().await;
    let mut methods = Vec::new();
    for _ in 0..3 {
        let request = line.next_request(&mut peer).await;
        match request.method.as_str() {
            "GET" => methods.push("GET".to_owned()),
            _ => methods.push(request.member("method").as_str().unwrap().to_owned()),
        }
    }
    methods.sort();
    assert_eq!(methods, ["GET", "notifications/roots/list_changed", "tools/list"]);
}

#[tokio::test]
async fn a_server_that_rejects_initialized_is_lost() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.request(0, "initialize");
    line.next_request(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    line.next_request(&mut peer).await.answer(400, &[], "").await;
    assert_eq!(line.lost().await, FailureKind::from_status(400));
}

#[tokio::test]
async fn a_rejected_handshake_suggests_the_older_transport() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    for (status, why) in [
        (400, "the server refused the request (HTTP 400)"),
        (404, "there is no MCP server at this address (HTTP 404)"),
        (405, "the server refused the request (HTTP 405)"),
    ] {
        line.request(0, "initialize");
        line.next_request(&mut peer).await.answer(status, &[], "").await;
        let hint = "if the server supports only HTTP+SSE, set transport = \"sse\"";
        let expected = FailureKind::Handshake(format!("{why}; {hint}"));
        assert_eq!(line.failed(0).await, ExchangeFailure::sent(expected));
    }
    line.request(0, "initialize");
    line.next_request(&mut peer).await.answer(418, &[], "").await;
    assert_eq!(line.failed(0).await.kind, FailureKind::Status { status: 418, message: None });
}

#[tokio::test]
async fn a_response_may_be_part_of_a_batch() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    line.request(1, "tools/call");
    let batch = r#"[{"jsonrpc":"2.0","method":"notifications/progress"}, {"jsonrpc":"2.0","id":1,"result":{}}]"#;
    line.next_request(&mut peer).await.json(batch).await;
    assert_eq!(line.message().await["method"], "notifications/progress");
    assert_eq!(line.message().await["id"], 1);
    line.is_silent().await;
}

#[tokio::test]
async fn a_response_stream_delivers_messages_and_its_connection_is_reused() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    line.request(1, "tools/call");
    let mut stream = line.next_request(&mut peer).await.stream(&[]).await;
    stream.chunk(": ping\n\nevent: message\ndata: {\"jsonrpc\":\"2.0\",\n").await;
    stream.chunk("data: \"method\":\"notifications/progress\"}\n\ndata: what is this?\n\n").await;
    assert_eq!(line.message().await["method"], "notifications/progress");
    assert_eq!(line.text().await, "what is this?", "a malformed message did not reach the session");
    stream.chunk("event: other\ndata: nothing of ours\n\n").await;
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"sampling/createMessage\"}\n\n").await;
    assert_eq!(line.message().await["method"], "sampling/createMessage");
    // The response to a request of the server is a separate POST.
    line.respond(7);
    line.next_request(&mut peer).await.accepted().await;
    stream
        .chunk("data: [{\"jsonrpc\":\"2.0\",\"method\":\"m\"},{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}]\n\n")
        .await;
    assert_eq!(line.message().await["method"], "m");
    assert_eq!(line.message().await["id"], 1);
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"method\":\"late\"}\n\n").await;
    assert_eq!(line.message().await["method"], "late");
    let before = peer.connections_made();
    stream.end().await;
    line.is_silent().await;
    for id in 2..4 {
        line.request(id, "tools/call");
    }
    for _ in 2..4 {
        line.next_request(&mut peer).await.result().await;
    }
    assert_eq!(peer.connections_made(), before);
}

#[tokio::test]
async fn a_broken_response_stream_is_resumed_after_its_last_event() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    line.request(1, "tools/call");
    let mut stream = line.next_request(&mut peer).await.stream(&[]).await;
    // Only complete events count.
    stream.chunk("id: e-1\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"one\"}\n\nid: e-2\ndata: {").await;
    assert_eq!(line.message().await["method"], "one");
    drop(stream);
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.line(), "GET /mcp");
    assert_eq!(request.header("last-event-id"), Some("e-1"));
    assert_eq!(request.header("accept"), Some("text/event-stream"));
    assert_eq!(request.header("mcp-session-id"), Some("s-1"));
    let mut stream = request.stream(&[]).await;
    stream.chunk("id: e-2\nretry: 10\ndata:\n\n").await;
    stream.end().await;
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.header("last-event-id"), Some("e-2"));
    let mut stream = request.stream(&[]).await;
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n").await;
    assert_eq!(line.message().await["id"], 1);
}

#[tokio::test]
async fn a_broken_response_stream_without_event_ids_fails_the_request() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    line.request(1, "tools/call");
    let mut stream = line.next_request(&mut peer).await.stream(&[]).await;
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"method\":\"one\"}\n\n").await;
    drop(stream);
    assert_eq!(line.message().await["method"], "one");
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::Cut));
    line.request(2, "tools/call");
    line.next_request(&mut peer).await.stream(&[]).await.end().await;
    assert_eq!(line.failed(2).await, ExchangeFailure::sent(FailureKind::Cut));
}

#[tokio::test]
async fn a_rejected_resumption_determines_the_failure_of_the_request() {
    for (status, headers, kind) in [
        (405, &[][..], FailureKind::Cut),
        (500, &[], FailureKind::Cut),
        (200, &[("content-type", "text/html")], FailureKind::Cut),
        (404, &[], FailureKind::session_expired(404)),
        (401, &[], FailureKind::Unauthorized { challenge: None }),
    ] {
        let mut peer = Peer::new().await;
        let mut line = TestLine::connected(&mut peer).await;
        line.request(1, "tools/call");
        let mut stream = line.next_request(&mut peer).await.stream(&[]).await;
        stream.chunk("id: 1\n\n").await;
        stream.end().await;
        line.next_request(&mut peer).await.answer(status, headers, "").await;
        // A rejected resumption does not mean that the request was not executed.
        let expected =
            if kind == FailureKind::Cut { ExchangeFailure::sent(kind) } else { ExchangeFailure::answering(kind) };
        assert_eq!(line.failed(1).await, expected, "{status}");
    }
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    line.request(1, "tools/call");
    let mut stream = line.next_request(&mut peer).await.stream(&[]).await;
    stream.chunk("id: 1\n\n").await;
    peer.die().await;
    drop(stream);
    assert_eq!(
        line.failed(1).await,
        ExchangeFailure::answering(FailureKind::Refused),
        "the request does not count as sent"
    );
}

#[tokio::test]
async fn a_message_over_the_limit_fails_its_request() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(policy(http(&peer), |policy| policy.session.line_max = 100));
    line.handshake(&mut peer, None).await.answer(405, &[], "").await;
    let too_long = ExchangeFailure::sent(FailureKind::TooLong(100));
    let long = format!(r#"{{"jsonrpc":"2.0","id":1,"result":"{}"}}"#, "x".repeat(100));

    line.request(1, "tools/call");
    line.next_request(&mut peer).await.json(&long).await;
    assert_eq!(line.failed(1).await, too_long);
    line.request(2, "tools/call");
    let request = line.next_request(&mut peer).await;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut endless = request.write_raw(head).await;
    line.drive_until(endless.endlessly("          ")).await;
    assert_eq!(line.failed(2).await, too_long);
    line.request(3, "tools/call");
    let mut endless = line.next_request(&mut peer).await.stream(&[]).await;
    line.drive_until(endless.endlessly("data: and on and on")).await;
    assert_eq!(line.failed(3).await, too_long);
    line.request(4, "tools/call");
    let mut endless = line.next_request(&mut peer).await.stream(&[]).await;
    line.drive_until(endless.endlessly("data: and\n")).await;
    assert_eq!(line.failed(4).await, too_long);
}

#[tokio::test]
async fn an_abandoned_request_closes_its_connection() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    line.request(1, "tools/call");
    let unanswered = line.next_request(&mut peer).await;
    line.request(2, "tools/call");
    let streaming = line.next_request(&mut peer).await.stream(&[]).await;
    line.send(LineOutput::Abandon { id: 1 });
    line.send(LineOutput::Abandon { id: 2 });
    line.drive_until(unanswered.closed()).await;
    line.drive_until(streaming.closed()).await;
    line.is_silent().await;
}

#[tokio::test]
async fn a_failed_request_is_not_repeated_by_the_line() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    line.request(1, "tools/call");
    drop(line.next_request(&mut peer).await);
    assert!(matches!(line.failed(1).await.kind, FailureKind::Broken(_)));
    line.is_silent().await;
    assert!(!peer.has_request(), "the line repeated the request");
    line.request(2, "tools/call");
    let again = line.next_request(&mut peer).await;
    line.send(LineOutput::Abandon { id: 2 });
    line.drive_until(again.closed()).await;
}

#[tokio::test]
async fn every_request_has_the_current_headers_and_parameters_of_the_instance() {
    let mut peer = Peer::new().await;
    let mut spec = http(&peer);
    spec.headers = [
        ("Authorization".to_owned(), "Bearer one".into()),
        ("Accept".to_owned(), "text/plain".into()),
        ("Host".to_owned(), "elsewhere".into()),
        ("mcp-session-id".to_owned(), "stolen".into()),
        ("Content-Type".to_owned(), "text/plain".into()),
        ("MCP-Protocol-Version".to_owned(), "1".into()),
        ("Content-Length".to_owned(), "1".into()),
    ]
    .into();
    spec.query = [("key".to_owned(), "a b&c".into())].into();
    let mut line = TestLine::new(spec.clone());
    line.request(0, "initialize");
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.line(), "POST /mcp?key=a+b%26c");
    assert_eq!(request.header("authorization"), Some("Bearer one"));
    assert_eq!(request.header("accept"), Some("application/json, text/event-stream"));
    assert_eq!(request.header("content-type"), Some("application/json"));
    assert_eq!(request.header("host"), Some(peer.address.to_string().as_str()));
    assert_eq!((request.header("mcp-session-id"), request.header("mcp-protocol-version")), (None, None));
    request.result().await;
    line.message().await;
    line.initialized();
    line.next_request(&mut peer).await.accepted().await;
    let listening = line.next_request(&mut peer).await;
    assert_eq!(listening.line(), "GET /mcp?key=a+b%26c");
    assert_eq!(listening.header("authorization"), Some("Bearer one"));
    let stream = listening.stream(&[]).await;

    spec.headers = [("Authorization".to_owned(), "Bearer two".into()), ("X-More".to_owned(), "1".into())].into();
    spec.query = [("key".to_owned(), "new".into())].into();
    line.send(LineOutput::Credentials(Arc::new(spec)));
    line.request(1, "tools/call");
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.line(), "POST /mcp?key=new");
    assert_eq!((request.header("authorization"), request.header("x-more")), (Some("Bearer two"), Some("1")));
    request.result().await;
    line.message().await;
    line.is_silent().await;
    assert!(!peer.has_request(), "an open stream was requested again");
    stream.end().await;
    let listening = line.next_request(&mut peer).await;
    assert_eq!(listening.line(), "GET /mcp?key=new");
    assert_eq!(listening.header("authorization"), Some("Bearer two"));
}

#[tokio::test]
async fn a_probe_requests_the_health_url_with_credentials_and_without_a_session() {
    let mut peer = Peer::new().await;
    let mut spec = http(&peer);
    if let ServerTarget::Remote { health_url, .. } = &mut spec.target {
        *health_url = Some(peer.url("/health"));
    }
    spec.headers = [("X-Key".to_owned(), "k".into())].into();
    spec.query = [("q".to_owned(), "1".into())].into();
    let mut line = TestLine::new(spec);
    line.send(LineOutput::Probe { id: 5 });
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.line(), "GET /health?q=1");
    assert_eq!((request.header("x-key"), request.header("cache-control")), (Some("k"), Some("no-cache")));
    assert_eq!(request.header("mcp-session-id"), None);
    request.answer(204, &[], "").await;
    assert!(matches!(line.next().await, LineEvent::Probed { id: 5 }));
    line.send(LineOutput::Probe { id: 6 });
    line.next_request(&mut peer).await.answer(503, &[("retry-after", "1")], "").await;
    assert!(matches!(line.failed(6).await.kind, FailureKind::ServerError { status: 503, .. }));
    line.send(LineOutput::Probe { id: 7 });
    let request = line.next_request(&mut peer).await;
    line.send(LineOutput::Abandon { id: 7 });
    line.drive_until(request.closed()).await;

    let mut line = TestLine::new(http(&peer));
    line.send(LineOutput::Probe { id: 8 });
    assert!(matches!(line.failed(8).await.kind, FailureKind::BadAddress(_)), "the probe without a health_url");
}

#[tokio::test]
async fn closing_a_line_deletes_a_session_with_an_id() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    let stream = line.handshake(&mut peer, Some("s-1")).await.stream(&[]).await;
    line.request(1, "tools/call");
    let unanswered = line.next_request(&mut peer).await;
    line.send(LineOutput::Close);
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.line(), "DELETE /mcp");
    assert_eq!(request.header("mcp-session-id"), Some("s-1"));
    assert_eq!(request.header("mcp-protocol-version"), Some(VERSION));
    stream.closed().await;
    unanswered.closed().await;
    line.request(2, "tools/call");
    request.answer(405, &[], "").await;
    assert!(matches!(line.next().await, LineEvent::Closed));
    assert!(!peer.has_request(), "a request was sent after the close");

    let mut line = TestLine::new(http(&peer));
    line.handshake(&mut peer, None).await.answer(405, &[], "").await;
    line.send(LineOutput::Close);
    assert!(matches!(line.next().await, LineEvent::Closed), "a DELETE without a session");
    assert!(!peer.has_request());
}

#[tokio::test]
async fn closing_a_line_waits_for_the_delete_only_until_the_close_timeout() {
    let mut peer = Peer::new().await;
    let close_timeout = std::time::Duration::from_millis(100);
    let mut line = TestLine::new(policy(http(&peer), |policy| policy.remote.close_timeout = close_timeout));
    line.handshake(&mut peer, Some("s-1")).await.answer(405, &[], "").await;
    line.send(LineOutput::Close);
    let request = line.next_request(&mut peer).await;
    assert!(matches!(line.next().await, LineEvent::Closed));
    request.closed().await;
}

#[tokio::test]
async fn dropping_a_line_closes_all_its_connections_at_once() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    let listening = line.handshake(&mut peer, Some("s-1")).await.stream(&[]).await;
    line.request(1, "tools/call");
    let unanswered = line.next_request(&mut peer).await;
    line.request(2, "tools/call");
    let streaming = line.next_request(&mut peer).await.stream(&[]).await;
    drop(line);
    listening.closed().await;
    unanswered.closed().await;
    streaming.closed().await;
    // Idle connections stay in the pool for other lines.
    peer.die().await;
    peer.wait_disconnected().await;
}

#[tokio::test]
async fn an_undeliverable_notification_loses_the_connection_a_rejected_one_does_not() {
    for (status, kind) in [
        (404, FailureKind::session_expired(404)),
        (401, FailureKind::Unauthorized { challenge: None }),
        (403, FailureKind::Forbidden { challenge: None }),
    ] {
        let mut peer = Peer::new().await;
        let mut line = TestLine::connected(&mut peer).await;
        line.notify("notifications/cancelled");
        line.next_request(&mut peer).await.answer(status, &[], "").await;
        assert_eq!(line.lost().await, kind);
    }
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    for status in [200, 204, 400, 429, 500] {
        line.notify("notifications/cancelled");
        line.next_request(&mut peer).await.answer(status, &[], "").await;
    }
    line.notify("notifications/cancelled");
    drop(line.next_request(&mut peer).await);
    line.is_silent().await;
    peer.die().await;
    line.notify("notifications/cancelled");
    assert_eq!(line.lost().await, FailureKind::Refused);
}

#[tokio::test]
async fn requests_that_wait_for_initialized_fail_unsent_when_it_is_rejected() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.request(0, "initialize");
    line.next_request(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    line.request(1, "tools/list");
    line.notify("notifications/cancelled");
    line.request(2, "tools/call");
    line.next_request(&mut peer).await.answer(401, &[], "").await;
    let refused = FailureKind::Unauthorized { challenge: None };
    for id in [1, 2] {
        assert_eq!(line.failed(id).await, ExchangeFailure::unsent(refused.clone()));
    }
    assert_eq!(line.lost().await, refused);
}

#[tokio::test]
async fn requests_that_wait_for_initialized_fail_unsent_when_the_line_closes() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.request(0, "initialize");
    line.next_request(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    let _unaccepted = line.next_request(&mut peer).await;
    // The line itself does not limit the number of waiting requests.
    for id in 1..=5000 {
        line.request(id, "tools/call");
    }
    line.is_silent().await;
    line.send(LineOutput::Close);
    for id in 1..=5000 {
        assert!(!line.failed(id).await.sent);
    }
    assert!(matches!(line.next().await, LineEvent::Closed));
}

#[tokio::test]
async fn responses_to_server_requests_are_sent_a_few_at_a_time() {
    const MANY: usize = 100;
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    for id in 0..MANY {
        line.respond(id);
    }
    let mut pending = Vec::new();
    for _ in 0..4 {
        pending.push(line.next_request(&mut peer).await);
    }
    line.is_silent().await;
    assert!(!peer.has_request(), "more than four messages at once");
    for _ in 4..MANY {
        pending.remove(0).accepted().await;
        pending.push(line.next_request(&mut peer).await);
    }
    // A request does not wait for responses.
    for id in 0..MANY {
        line.respond(id);
    }
    line.request(1, "tools/list");
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.member("method"), "tools/list");
    request.result().await;
    assert_eq!(line.message().await["id"], 1);
}

#[tokio::test]
async fn a_server_that_sends_endless_requests_and_accepts_no_responses_is_lost() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    for id in 0..4096 {
        line.respond(id);
    }
    line.is_silent().await;
    for id in 0..5 {
        line.respond(id);
    }
    assert_eq!(line.lost().await, FailureKind::Flooded);

    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.request(0, "initialize");
    line.next_request(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    let _unaccepted = line.next_request(&mut peer).await;
    for id in 0..=4096 {
        line.respond(id);
    }
    assert_eq!(line.lost().await, FailureKind::Flooded, "before the end of the handshake");
}

#[tokio::test]
async fn a_server_that_accepts_no_notifications_loses_only_the_oldest_ones() {
    const MANY: usize = 5000;
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    for nth in 0..MANY {
        line.notify(&format!("notifications/{nth}"));
    }
    let mut pending = Vec::new();
    for _ in 0..4 {
        pending.push(line.next_request(&mut peer).await);
    }
    line.respond(7);
    let answer = line.next_request(&mut peer).await;
    assert_eq!(answer.member("id"), 7, "the response waited for the notifications");
    answer.accepted().await;
    line.is_silent().await;
    assert!(!peer.has_request(), "more than four messages at once");
    let newest = format!("notifications/{}", MANY - 1);
    let mut received = 4;
    while pending.iter().all(|request| request.member("method") != newest.as_str()) {
        pending.remove(0).accepted().await;
        pending.push(line.next_request(&mut peer).await);
        received += 1;
    }
    assert_eq!(received, 4 + 256);

    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.request(0, "initialize");
    line.next_request(&mut peer).await.result().await;
    line.message().await;
    line.initialized();
    let initialized = line.next_request(&mut peer).await;
    line.request(1, "tools/list");
    for nth in 0..MANY {
        line.notify(&format!("notifications/{nth}"));
    }
    line.is_silent().await;
    initialized.accepted().await;
    line.request(2, "tools/list");
    let mut ids = Vec::new();
    while ids.len() < 2 {
        let request = line.next_request(&mut peer).await;
        match request.method.as_str() {
            "GET" => request.answer(405, &[], "").await,
            _ if request.member("id").is_null() => request.accepted().await,
            _ => ids.push(request.member("id")),
        }
    }
    ids.sort_by_key(serde_json::Value::as_u64);
    assert_eq!(ids, [1, 2], "before the end of the handshake");
}
