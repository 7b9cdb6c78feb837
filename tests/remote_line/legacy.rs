//! HTTP+SSE: one stream on which the server speaks, and posts to where it says.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::seam::{LineEvent, LineOutput};

use super::peer::{Asked, Peer, Saying};
use super::support::{Dialed, VERSION, policy, sse};

const ANSWER: &str = "event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n";

fn closed() -> FailureKind {
    FailureKind::Broken("the server has closed its stream".to_owned())
}

/// A line whose first request waits at the peer, and the stream on which it is to be answered.
async fn opened(line: &mut Dialed, peer: &mut Peer, endpoint: &str) -> (Saying, Asked) {
    line.request(1, "initialize");
    let mut stream = line.asks(peer).await.stream(&[]).await;
    stream.chunk(&format!("event: endpoint\ndata: {endpoint}\n\n")).await;
    let asked = line.asks(peer).await;
    assert_eq!(asked.says("method"), "initialize");
    (stream, asked)
}

#[tokio::test]
async fn messages_are_posted_to_where_the_server_says_and_answered_on_its_stream() {
    let mut peer = Peer::new().await;
    let mut spec = sse(&peer);
    spec.headers = [("Authorization".to_owned(), "Bearer one".into())].into();
    spec.query = [("key".to_owned(), "k".into())].into();
    let mut line = Dialed::new(spec.clone());
    line.is_silent().await;
    assert_eq!(peer.connections_ever(), 0, "nothing is connected before something is sent");

    line.request(1, "initialize");
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.line(), "GET /sse?key=k");
    assert_eq!(asked.header("accept"), Some("text/event-stream"));
    assert_eq!(asked.header("authorization"), Some("Bearer one"));
    let mut stream = asked.stream(&[]).await;
    stream.chunk(": hello\n\nevent: message\ndata: {}\n\n").await;
    line.is_silent().await;
    assert!(!peer.was_asked(), "it is not known where to");
    stream.chunk("event: endpoint\ndata: /messages?session=x%2Fy&key=theirs\n\n").await;
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.line(), "POST /messages?session=x%2Fy&key=k");
    assert_eq!(asked.header("authorization"), Some("Bearer one"));
    assert_eq!(asked.header("content-type"), Some("application/json"));
    asked.answer(202, &[], "Accepted").await;
    stream.chunk(ANSWER).await;
    assert_eq!(line.message().await["id"], 1);

    line.initialized();
    line.request(2, "tools/list");
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.says("method"), "notifications/initialized");
    line.is_silent().await;
    assert!(!peer.was_asked(), "something was sent before the server had taken it");
    asked.accepted().await;
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.says("method"), "tools/list");
    assert_eq!(asked.header("mcp-protocol-version"), Some(VERSION));
    asked.accepted().await;
    spec.headers = [("Authorization".to_owned(), "Bearer two".into())].into();
    line.send(LineOutput::Credentials(Arc::new(spec)));
    line.request(3, "tools/list");
    assert_eq!(line.asks(&mut peer).await.header("authorization"), Some("Bearer two"));
}

#[tokio::test]
async fn an_endpoint_may_be_named_in_several_ways_but_only_at_home() {
    let mut peer = Peer::new().await;
    let home = peer.url("");
    for (endpoint, target) in [
        ("/messages/?session_id=1".to_owned(), "/messages/?session_id=1"),
        ("messages".to_owned(), "/messages"),
        ("?s=1".to_owned(), "/sse?s=1"),
        (format!("{home}/m?s=1"), "/m?s=1"),
        (format!("//{}/m", peer.address), "/m"),
    ] {
        let mut line = Dialed::new(sse(&peer));
        let (_stream, asked) = opened(&mut line, &mut peer, &endpoint).await;
        assert_eq!(asked.target, target);
    }
    let other = Peer::new().await;
    for (endpoint, origin) in [
        (other.url("/messages?token=1"), other.url("")),
        (format!("https://{}/m", peer.address), format!("https://{}", peer.address)),
        ("http://elsewhere.example/m".to_owned(), "http://elsewhere.example".to_owned()),
        ("//elsewhere.example/m".to_owned(), "http://elsewhere.example".to_owned()),
        ("file:///etc/passwd".to_owned(), "file:".to_owned()),
    ] {
        let mut line = Dialed::new(sse(&peer));
        line.request(1, "initialize");
        let mut stream = line.asks(&mut peer).await.stream(&[]).await;
        stream.chunk(&format!("event: endpoint\ndata: {endpoint}\n\n")).await;
        assert_eq!(line.failed(1).await, ExchangeFailure::unsent(FailureKind::ForeignEndpoint { origin }));
        line.during(stream.closed()).await;
    }
    assert_eq!(other.connections_ever(), 0);
}

#[tokio::test]
async fn a_refusal_in_a_batch_is_the_answer_that_has_the_number_of_the_request() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(sse(&peer));
    let (_stream, asked) = opened(&mut line, &mut peer, "/messages").await;
    let batch = r#"[{"jsonrpc":"2.0","method":"notifications/message"},
                    {"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"no"}}]"#;
    asked.answer(422, &[("content-type", "application/json")], batch).await;
    assert_eq!(line.message().await["error"]["message"], "no");
}

#[tokio::test]
async fn a_stream_that_cannot_be_opened_fails_what_waits_for_it_and_is_tried_again_for_the_next() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(sse(&peer));
    for (status, headers, kind) in [
        (401, &[][..], FailureKind::Unauthorized { challenge: None }),
        (404, &[], FailureKind::from_status(404)),
        (200, &[("content-type", "text/html")], FailureKind::NotMcp { content_type: Some("text/html".to_owned()) }),
        (502, &[], FailureKind::ServerError { status: 502, retry_after: None }),
    ] {
        line.request(1, "initialize");
        line.request(2, "ping");
        line.asks(&mut peer).await.answer(status, headers, "").await;
        assert_eq!(line.failed(1).await, ExchangeFailure::unsent(kind.clone()), "{status}");
        assert_eq!(line.failed(2).await, ExchangeFailure::unsent(kind), "{status}");
    }
    line.request(1, "initialize");
    line.asks(&mut peer).await.stream(&[]).await.end().await;
    assert_eq!(line.failed(1).await, ExchangeFailure::unsent(closed()));
    peer.die().await;
    line.request(1, "initialize");
    assert_eq!(line.failed(1).await, ExchangeFailure::unsent(FailureKind::Refused));
}

#[tokio::test]
async fn a_server_that_does_not_say_where_to_post_is_not_waited_for_without_end() {
    let mut peer = Peer::new().await;
    let limit = Duration::from_millis(50);
    let mut line = Dialed::new(policy(sse(&peer), |policy| policy.remote.header_timeout = limit));
    line.request(1, "initialize");
    let stream = line.asks(&mut peer).await.stream(&[]).await;
    assert_eq!(line.failed(1).await, ExchangeFailure::unsent(FailureKind::HeaderTimeout(limit)));
    line.during(stream.closed()).await;
}

#[tokio::test]
async fn the_end_of_the_stream_is_the_end_of_the_session() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(sse(&peer));
    let (stream, asked) = opened(&mut line, &mut peer, "/m").await;
    asked.accepted().await;
    stream.end().await;
    assert_eq!(line.lost().await, closed());

    let mut line = Dialed::new(policy(sse(&peer), |policy| policy.session.line_max = 100));
    let (mut stream, asked) = opened(&mut line, &mut peer, "/m").await;
    asked.accepted().await;
    line.during(stream.endlessly("and on and on")).await;
    assert_eq!(line.lost().await, FailureKind::TooLong(100));
}

#[tokio::test]
async fn a_post_whose_request_was_answered_on_the_stream_is_not_waited_for_without_end() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(sse(&peer));
    let (mut stream, asked) = opened(&mut line, &mut peer, "/m").await;
    line.request(2, "tools/call");
    let other = line.asks(&mut peer).await;
    stream.chunk(ANSWER).await;
    assert_eq!(line.message().await["id"], 1);
    line.during(asked.closed()).await;
    // A server may also take a POST only when it has done what it asks for.
    other.accepted().await;
    stream.chunk(&ANSWER.replace('1', "2")).await;
    assert_eq!(line.message().await["id"], 2);
    line.is_silent().await;
    let connections = peer.connections_ever();
    line.request(3, "tools/call");
    let asked = line.asks(&mut peer).await;
    assert_eq!(peer.connections_ever(), connections, "its connection is used again");
    stream.chunk(&ANSWER.replace('1', "3")).await;
    assert_eq!(line.message().await["id"], 3);
    asked.accepted().await;
    line.is_silent().await;
    line.request(4, "tools/call");
    line.asks(&mut peer).await.accepted().await;
    assert_eq!(peer.connections_ever(), connections, "also where the answer comes first");
}

#[tokio::test]
async fn a_post_that_is_refused_fails_its_request() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(sse(&peer));
    let (mut stream, asked) = opened(&mut line, &mut peer, "/m?s=1").await;
    asked.answer(404, &[], "no such session").await;
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::session_expired(404)));
    line.request(2, "tools/call");
    line.asks(&mut peer).await.answer(503, &[], "").await;
    assert!(matches!(line.failed(2).await.kind, FailureKind::ServerError { status: 503, .. }));
    line.request(3, "tools/call");
    drop(line.asks(&mut peer).await);
    let failure = line.failed(3).await;
    assert!(matches!(failure.kind, FailureKind::Broken(_)) && failure.sent, "{failure:?}");
    line.request(1, "tools/call");
    line.asks(&mut peer).await.accepted().await;
    stream.chunk(ANSWER).await;
    assert_eq!(line.message().await["id"], 1);
}

#[tokio::test]
async fn an_abandoned_request_is_not_sent_and_the_end_is_told_at_once() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(sse(&peer));
    line.request(1, "initialize");
    line.request(2, "ping");
    line.send(LineOutput::Abandon { id: 1 });
    let mut stream = line.asks(&mut peer).await.stream(&[]).await;
    stream.chunk("event: endpoint\ndata: /m\n\n").await;
    let asked = line.asks(&mut peer).await;
    assert_eq!(asked.says("method"), "ping");
    line.send(LineOutput::Close);
    assert!(matches!(line.next().await, LineEvent::Closed));
    stream.closed().await;
    asked.closed().await;
}
