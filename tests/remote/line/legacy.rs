//! HTTP+SSE: the server sends messages on one stream, and the client posts to the endpoint that the stream names.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::seam::{LineEvent, LineOutput};

use super::peer::{OpenResponse, Peer, PendingRequest};
use super::support::{TestLine, VERSION, policy, sse};

const ANSWER: &str = "event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n";

fn closed() -> FailureKind {
    FailureKind::Broken("the server has closed its stream".to_owned())
}

/// Opens the stream and sends the first request. Returns the stream and the pending request.
async fn opened(line: &mut TestLine, peer: &mut Peer, endpoint: &str) -> (OpenResponse, PendingRequest) {
    line.request(1, "initialize");
    let mut stream = line.next_request(peer).await.stream(&[]).await;
    stream.chunk(&format!("event: endpoint\ndata: {endpoint}\n\n")).await;
    let request = line.next_request(peer).await;
    assert_eq!(request.member("method"), "initialize");
    (stream, request)
}

#[tokio::test]
async fn messages_are_posted_to_the_endpoint_and_answered_on_the_stream() {
    let mut peer = Peer::new().await;
    let mut spec = sse(&peer);
    spec.headers = [("Authorization".to_owned(), "Bearer one".into())].into();
    spec.query = [("key".to_owned(), "k".into())].into();
    let mut line = TestLine::new(spec.clone());
    line.is_silent().await;
    assert_eq!(peer.connections_made(), 0, "a connection was made before the first message");

    line.request(1, "initialize");
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.line(), "GET /sse?key=k");
    assert_eq!(request.header("accept"), Some("text/event-stream"));
    assert_eq!(request.header("authorization"), Some("Bearer one"));
    let mut stream = request.stream(&[]).await;
    stream.chunk(": hello\n\nevent: message\ndata: {}\n\n").await;
    line.is_silent().await;
    assert!(!peer.has_request(), "a POST was sent before the endpoint is known");
    stream.chunk("event: endpoint\ndata: /messages?session=x%2Fy&key=theirs\n\n").await;
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.line(), "POST /messages?session=x%2Fy&key=k");
    assert_eq!(request.header("authorization"), Some("Bearer one"));
    assert_eq!(request.header("content-type"), Some("application/json"));
    request.answer(202, &[], "Accepted").await;
    stream.chunk(ANSWER).await;
    assert_eq!(line.message().await["id"], 1);

    line.initialized();
    line.request(2, "tools/list");
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.member("method"), "notifications/initialized");
    line.is_silent().await;
    assert!(!peer.has_request(), "a request was sent before the server accepted `initialized`");
    request.accepted().await;
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.member("method"), "tools/list");
    assert_eq!(request.header("mcp-protocol-version"), Some(VERSION));
    request.accepted().await;
    spec.headers = [("Authorization".to_owned(), "Bearer two".into())].into();
    line.send(LineOutput::Credentials(Arc::new(spec)));
    line.request(3, "tools/list");
    assert_eq!(line.next_request(&mut peer).await.header("authorization"), Some("Bearer two"));
}

#[tokio::test]
async fn an_endpoint_may_be_relative_or_absolute_but_of_the_same_origin() {
    let mut peer = Peer::new().await;
    let home = peer.url("");
    for (endpoint, target) in [
        ("/messages/?session_id=1".to_owned(), "/messages/?session_id=1"),
        ("messages".to_owned(), "/messages"),
        ("?s=1".to_owned(), "/sse?s=1"),
        (format!("{home}/m?s=1"), "/m?s=1"),
        (format!("//{}/m", peer.address), "/m"),
    ] {
        let mut line = TestLine::new(sse(&peer));
        let (_stream, request) = opened(&mut line, &mut peer, &endpoint).await;
        assert_eq!(request.target, target);
    }
    let other = Peer::new().await;
    for (endpoint, origin) in [
        (other.url("/messages?token=1"), other.url("")),
        (format!("https://{}/m", peer.address), format!("https://{}", peer.address)),
        ("http://elsewhere.example/m".to_owned(), "http://elsewhere.example".to_owned()),
        ("//elsewhere.example/m".to_owned(), "http://elsewhere.example".to_owned()),
        ("file:///etc/passwd".to_owned(), "file:".to_owned()),
    ] {
        let mut line = TestLine::new(sse(&peer));
        line.request(1, "initialize");
        let mut stream = line.next_request(&mut peer).await.stream(&[]).await;
        stream.chunk(&format!("event: endpoint\ndata: {endpoint}\n\n")).await;
        assert_eq!(line.failed(1).await, ExchangeFailure::unsent(FailureKind::ForeignEndpoint { origin }));
        line.drive_until(stream.closed()).await;
    }
    assert_eq!(other.connections_made(), 0);
}

#[tokio::test]
async fn an_error_in_a_batch_is_the_response_to_the_request_with_its_id() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(sse(&peer));
    let (_stream, request) = opened(&mut line, &mut peer, "/messages").await;
    let batch = r#"[{"jsonrpc":"2.0","method":"notifications/message"},
                    {"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"no"}}]"#;
    request.answer(422, &[("content-type", "application/json")], batch).await;
    assert_eq!(line.message().await["error"]["message"], "no");
}

#[tokio::test]
async fn a_failed_stream_fails_waiting_requests_and_is_retried_for_the_next() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(sse(&peer));
    for (status, headers, kind) in [
        (401, &[][..], FailureKind::Unauthorized { challenge: None }),
        (404, &[], FailureKind::from_status(404)),
        (200, &[("content-type", "text/html")], FailureKind::NotMcp { content_type: Some("text/html".to_owned()) }),
        (502, &[], FailureKind::ServerError { status: 502, retry_after: None }),
    ] {
        line.request(1, "initialize");
        line.request(2, "ping");
        line.next_request(&mut peer).await.answer(status, headers, "").await;
        assert_eq!(line.failed(1).await, ExchangeFailure::unsent(kind.clone()), "{status}");
        assert_eq!(line.failed(2).await, ExchangeFailure::unsent(kind), "{status}");
    }
    line.request(1, "initialize");
    line.next_request(&mut peer).await.stream(&[]).await.end().await;
    assert_eq!(line.failed(1).await, ExchangeFailure::unsent(closed()));
    peer.die().await;
    line.request(1, "initialize");
    assert_eq!(line.failed(1).await, ExchangeFailure::unsent(FailureKind::Refused));
}

#[tokio::test]
async fn a_server_that_names_no_endpoint_fails_the_request_after_a_timeout() {
    let mut peer = Peer::new().await;
    let limit = Duration::from_millis(50);
    let mut line = TestLine::new(policy(sse(&peer), |policy| policy.remote.header_timeout = limit));
    line.request(1, "initialize");
    let stream = line.next_request(&mut peer).await.stream(&[]).await;
    assert_eq!(line.failed(1).await, ExchangeFailure::unsent(FailureKind::HeaderTimeout(limit)));
    line.drive_until(stream.closed()).await;
}

#[tokio::test]
async fn the_end_of_the_stream_ends_the_session() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(sse(&peer));
    let (stream, request) = opened(&mut line, &mut peer, "/m").await;
    request.accepted().await;
    stream.end().await;
    assert_eq!(line.lost().await, closed());

    let mut line = TestLine::new(policy(sse(&peer), |policy| policy.session.line_max = 100));
    let (mut stream, request) = opened(&mut line, &mut peer, "/m").await;
    request.accepted().await;
    line.drive_until(stream.endlessly("and on and on")).await;
    assert_eq!(line.lost().await, FailureKind::TooLong(100));
}

#[tokio::test]
async fn a_post_is_closed_after_its_request_was_answered_on_the_stream() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(sse(&peer));
    let (mut stream, request) = opened(&mut line, &mut peer, "/m").await;
    line.request(2, "tools/call");
    let other = line.next_request(&mut peer).await;
    stream.chunk(ANSWER).await;
    assert_eq!(line.message().await["id"], 1);
    line.drive_until(request.closed()).await;
    // A server may also accept a POST only after it has answered on the stream.
    other.accepted().await;
    stream.chunk(&ANSWER.replace('1', "2")).await;
    assert_eq!(line.message().await["id"], 2);
    line.is_silent().await;
    let connections = peer.connections_made();
    line.request(3, "tools/call");
    let request = line.next_request(&mut peer).await;
    assert_eq!(peer.connections_made(), connections, "the connection was not reused");
    stream.chunk(&ANSWER.replace('1', "3")).await;
    assert_eq!(line.message().await["id"], 3);
    request.accepted().await;
    line.is_silent().await;
    line.request(4, "tools/call");
    line.next_request(&mut peer).await.accepted().await;
    assert_eq!(peer.connections_made(), connections, "the connection was not reused after the response came first");
}

#[tokio::test]
async fn a_rejected_post_fails_its_request() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(sse(&peer));
    let (mut stream, request) = opened(&mut line, &mut peer, "/m?s=1").await;
    request.answer(404, &[], "no such session").await;
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::session_expired(404)));
    line.request(2, "tools/call");
    line.next_request(&mut peer).await.answer(503, &[], "").await;
    assert!(matches!(line.failed(2).await.kind, FailureKind::ServerError { status: 503, .. }));
    line.request(3, "tools/call");
    drop(line.next_request(&mut peer).await);
    let failure = line.failed(3).await;
    assert!(matches!(failure.kind, FailureKind::Broken(_)) && failure.sent, "{failure:?}");
    line.request(1, "tools/call");
    line.next_request(&mut peer).await.accepted().await;
    stream.chunk(ANSWER).await;
    assert_eq!(line.message().await["id"], 1);
}

#[tokio::test]
async fn an_abandoned_request_is_not_sent_and_close_takes_effect_at_once() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(sse(&peer));
    line.request(1, "initialize");
    line.request(2, "ping");
    line.send(LineOutput::Abandon { id: 1 });
    let mut stream = line.next_request(&mut peer).await.stream(&[]).await;
    stream.chunk("event: endpoint\ndata: /m\n\n").await;
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.member("method"), "ping");
    line.send(LineOutput::Close);
    assert!(matches!(line.next().await, LineEvent::Closed));
    stream.closed().await;
    request.closed().await;
}
