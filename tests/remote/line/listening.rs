//! The GET stream: messages of the server, and the loss of the server.

use mcp_satellite_actors::model::failure::FailureKind;

use super::peer::Peer;
use super::support::{TestLine, VERSION, http, policy};

const NEWS: &str = "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/tools/list_changed\"}";

#[tokio::test]
async fn messages_on_the_get_stream_are_received() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    let request = line.handshake(&mut peer, Some("s-1")).await;
    assert_eq!(request.header("accept"), Some("text/event-stream"));
    assert_eq!(request.header("mcp-session-id"), Some("s-1"));
    assert_eq!(request.header("mcp-protocol-version"), Some(VERSION));
    assert_eq!(request.header("last-event-id"), None);
    let mut stream = request.stream(&[]).await;
    stream.chunk(&format!("data: {NEWS}\n\nevent: ping\ndata: 1\n\ndata: garbage\n\n")).await;
    assert_eq!(line.text().await, NEWS);
    assert_eq!(line.text().await, "garbage");
    line.is_silent().await;
}

#[tokio::test]
async fn a_response_on_the_get_stream_ends_the_exchange_of_its_request() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    let mut listening = line.handshake(&mut peer, Some("s-1")).await.stream(&[]).await;
    line.request(1, "tools/call");
    let unanswered = line.next_request(&mut peer).await;
    line.request(2, "tools/call");
    let streaming = line.next_request(&mut peer).await.stream(&[]).await;
    line.request(3, "tools/call");
    let other = line.next_request(&mut peer).await;
    let answer = |id| format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{}}}}");
    listening.chunk(&format!("data: [{},{}]\n\n", answer(1), answer(2))).await;
    assert_eq!(line.message().await["id"], 1);
    assert_eq!(line.message().await["id"], 2);
    line.drive_until(unanswered.closed()).await;
    line.drive_until(streaming.closed()).await;
    other.result().await;
    assert_eq!(line.message().await["id"], 3);
}

#[tokio::test]
async fn a_get_stream_that_is_refused_is_not_requested_again() {
    for (status, content_type) in
        [(405, "text/plain"), (404, "text/plain"), (400, "text/plain"), (401, "text/plain"), (200, "text/html")]
    {
        let mut peer = Peer::new().await;
        let mut line = TestLine::new(http(&peer));
        let request = line.handshake(&mut peer, Some("s-1")).await;
        request.answer(status, &[("content-type", content_type)], "").await;
        line.is_silent().await;
        assert!(!peer.has_request(), "{status}");
    }
}

#[tokio::test]
async fn a_stream_that_ends_is_resumed_after_its_last_event() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    let mut stream = line.handshake(&mut peer, Some("s-1")).await.stream(&[]).await;
    stream.chunk(&format!("id: 7\ndata: {NEWS}\n\n")).await;
    line.message().await;
    stream.end().await;
    let request = line.next_request(&mut peer).await;
    assert_eq!((request.line().as_str(), request.header("last-event-id")), ("GET /mcp", Some("7")));
    let mut stream = request.stream(&[]).await;
    stream.chunk(&format!("data: {NEWS}\n\n")).await;
    line.message().await;
    // The broken stream is resumed after the same event, because no later event had an id. This retry takes a second.
    drop(stream);
    let request = line.next_request(&mut peer).await;
    assert_eq!(request.header("last-event-id"), Some("7"));
}

#[tokio::test]
async fn a_dead_server_is_noticed_at_once() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    let stream = line.handshake(&mut peer, Some("s-1")).await.stream(&[]).await;
    line.is_silent().await;
    peer.die().await;
    drop(stream);
    assert_eq!(line.lost().await, FailureKind::Refused);
}

#[tokio::test]
async fn a_restarted_server_is_noticed_at_once() {
    let null = r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"no such session"},"id":null}"#;
    let expired = |status| FailureKind::SessionExpired { status, message: Some("no such session".to_owned()) };
    for (status, kind) in [
        (404, expired(404)),
        (400, expired(400)),
        (401, FailureKind::Unauthorized { challenge: None }),
        (403, FailureKind::Forbidden { challenge: None }),
    ] {
        let mut peer = Peer::new().await;
        let mut line = TestLine::new(http(&peer));
        line.handshake(&mut peer, Some("s-1")).await.stream(&[]).await.end().await;
        line.next_request(&mut peer).await.answer(status, &[("content-type", "application/json")], null).await;
        assert_eq!(line.lost().await, kind);
    }
}

#[tokio::test]
async fn a_broken_stream_is_retried_on_another_connection_before_the_loss() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.handshake(&mut peer, Some("s-1")).await.stream(&[]).await.end().await;
    drop(line.next_request(&mut peer).await);
    drop(line.next_request(&mut peer).await);
    assert!(matches!(line.lost().await, FailureKind::Broken(_)));
}

#[tokio::test]
async fn a_stream_that_a_busy_server_refuses_is_retried_later() {
    for (status, headers) in [(503, &[][..]), (429, &[("retry-after", "0")]), (409, &[])] {
        let mut peer = Peer::new().await;
        let mut line = TestLine::new(http(&peer));
        line.handshake(&mut peer, Some("s-1")).await.answer(status, headers, "").await;
        let request = line.next_request(&mut peer).await;
        assert_eq!(request.line(), "GET /mcp", "{status}");
        line.is_silent().await;
    }
}

#[tokio::test]
async fn a_stream_without_response_headers_is_not_a_loss() {
    let mut peer = Peer::new().await;
    let limit = std::time::Duration::from_millis(20);
    let mut line = TestLine::new(policy(http(&peer), |policy| policy.remote.header_timeout = limit));
    let request = line.handshake(&mut peer, None).await;
    line.is_silent().await;
    assert!(!peer.has_request());
    let mut stream = request.stream(&[]).await;
    stream.chunk(&format!("data: {NEWS}\n\n")).await;
    assert_eq!(line.text().await, NEWS);
}

#[tokio::test]
async fn an_endless_line_on_the_stream_loses_the_connection() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(policy(http(&peer), |policy| policy.session.line_max = 100));
    let mut stream = line.handshake(&mut peer, None).await.stream(&[]).await;
    line.drive_until(stream.endlessly("data: and on and on")).await;
    assert_eq!(line.lost().await, FailureKind::TooLong(100));
}
