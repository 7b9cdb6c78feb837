//! The GET that listens for what a server says unasked, and by which its death is noticed.

use mcp_satellite_actors::model::failure::FailureKind;

use super::peer::Peer;
use super::support::{Dialed, VERSION, http, policy};

const NEWS: &str = "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/tools/list_changed\"}";

#[tokio::test]
async fn what_a_server_says_unasked_is_heard() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    let asked = line.greet(&mut peer, Some("s-1")).await;
    assert_eq!(asked.header("accept"), Some("text/event-stream"));
    assert_eq!(asked.header("mcp-session-id"), Some("s-1"));
    assert_eq!(asked.header("mcp-protocol-version"), Some(VERSION));
    assert_eq!(asked.header("last-event-id"), None);
    let mut stream = asked.stream(&[]).await;
    stream.chunk(&format!("data: {NEWS}\n\nevent: ping\ndata: 1\n\ndata: garbage\n\n")).await;
    assert_eq!(line.text().await, NEWS);
    assert_eq!(line.text().await, "garbage");
    line.is_silent().await;
}

#[tokio::test]
async fn a_request_may_be_answered_here_and_its_own_exchange_is_not_waited_for_without_end() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    let mut listening = line.greet(&mut peer, Some("s-1")).await.stream(&[]).await;
    line.request(1, "tools/call");
    let unanswered = line.asks(&mut peer).await;
    line.request(2, "tools/call");
    let streaming = line.asks(&mut peer).await.stream(&[]).await;
    line.request(3, "tools/call");
    let other = line.asks(&mut peer).await;
    let answer = |id| format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{}}}}");
    listening.chunk(&format!("data: [{},{}]\n\n", answer(1), answer(2))).await;
    assert_eq!(line.message().await["id"], 1);
    assert_eq!(line.message().await["id"], 2);
    line.during(unanswered.closed()).await;
    line.during(streaming.closed()).await;
    other.result().await;
    assert_eq!(line.message().await["id"], 3);
}

#[tokio::test]
async fn a_server_that_has_no_such_stream_is_not_asked_again() {
    for (status, content_type) in
        [(405, "text/plain"), (404, "text/plain"), (400, "text/plain"), (401, "text/plain"), (200, "text/html")]
    {
        let mut peer = Peer::new().await;
        let mut line = Dialed::new(http(&peer));
        let asked = line.greet(&mut peer, Some("s-1")).await;
        asked.answer(status, &[("content-type", content_type)], "").await;
        line.is_silent().await;
        assert!(!peer.was_asked(), "{status}");
    }
}

#[tokio::test]
async fn a_stream_that_ends_is_opened_again_where_it_was() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    let mut stream = line.greet(&mut peer, Some("s-1")).await.stream(&[]).await;
    stream.chunk(&format!("id: 7\ndata: {NEWS}\n\n")).await;
    line.message().await;
    stream.end().await;
    let asked = line.asks(&mut peer).await;
    assert_eq!((asked.line().as_str(), asked.header("last-event-id")), ("GET /mcp", Some("7")));
    let mut stream = asked.stream(&[]).await;
    stream.chunk(&format!("data: {NEWS}\n\n")).await;
    line.message().await;
    // Broken off: and it is not told again what it knows. This time it takes a second.
    drop(stream);
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.header("last-event-id"), Some("7"));
}

#[tokio::test]
async fn a_dead_server_is_noticed_at_once() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    let stream = line.greet(&mut peer, Some("s-1")).await.stream(&[]).await;
    line.is_silent().await;
    peer.die().await;
    drop(stream);
    assert_eq!(line.lost().await, FailureKind::Refused);
}

#[tokio::test]
async fn a_server_that_was_started_anew_is_noticed_at_once() {
    let null = r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"no such session"},"id":null}"#;
    let expired = |status| FailureKind::SessionExpired { status, message: Some("no such session".to_owned()) };
    for (status, kind) in [
        (404, expired(404)),
        (400, expired(400)),
        (401, FailureKind::Unauthorized { challenge: None }),
        (403, FailureKind::Forbidden { challenge: None }),
    ] {
        let mut peer = Peer::new().await;
        let mut line = Dialed::new(http(&peer));
        line.greet(&mut peer, Some("s-1")).await.stream(&[]).await.end().await;
        line.asks(&mut peer).await.answer(status, &[("content-type", "application/json")], null).await;
        assert_eq!(line.lost().await, kind);
    }
}

#[tokio::test]
async fn a_server_that_breaks_off_is_tried_on_another_connection_before_it_is_lost() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.greet(&mut peer, Some("s-1")).await.stream(&[]).await.end().await;
    drop(line.asks(&mut peer).await);
    drop(line.asks(&mut peer).await);
    assert!(matches!(line.lost().await, FailureKind::Broken(_)));
}

#[tokio::test]
async fn a_server_that_is_only_busy_is_tried_again_later() {
    for (status, headers) in [(503, &[][..]), (429, &[("retry-after", "0")]), (409, &[])] {
        let mut peer = Peer::new().await;
        let mut line = Dialed::new(http(&peer));
        line.greet(&mut peer, Some("s-1")).await.answer(status, headers, "").await;
        let asked = line.asks(&mut peer).await;
        assert_eq!(asked.line(), "GET /mcp", "{status}");
        line.is_silent().await;
    }
}

#[tokio::test]
async fn a_stream_whose_headers_do_not_come_is_no_loss() {
    let mut peer = Peer::new().await;
    let limit = std::time::Duration::from_millis(20);
    let mut line = Dialed::new(policy(http(&peer), |policy| policy.remote.header_timeout = limit));
    let asked = line.greet(&mut peer, None).await;
    line.is_silent().await;
    assert!(!peer.was_asked());
    let mut stream = asked.stream(&[]).await;
    stream.chunk(&format!("data: {NEWS}\n\n")).await;
    assert_eq!(line.text().await, NEWS);
}

#[tokio::test]
async fn a_line_without_end_is_the_loss() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(policy(http(&peer), |policy| policy.session.line_max = 100));
    let mut stream = line.greet(&mut peer, None).await.stream(&[]).await;
    line.during(stream.endlessly("data: and on and on")).await;
    assert_eq!(line.lost().await, FailureKind::TooLong(100));
}
