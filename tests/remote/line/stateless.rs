//! Requests without a session: their headers, responses and failures.

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::seam::{LineOutput, RequestHeaders};

use super::peer::{Peer, PendingRequest};
use super::support::{TestLine, http};

impl TestLine {
    /// Sends a request without a session.
    fn stateless_request(&mut self, id: u64, method: &str) {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}"}}"#).into();
        let (name, params) = (Some("größe".to_owned()), vec![("Region".into(), "eu".to_owned())]);
        let routing = RequestHeaders { version: "2026-07-28", method: method.to_owned(), name, params };
        self.send(LineOutput::Request { id, body, header_timeout: None, routing: Some(Box::new(routing)) });
    }

    async fn next_stateless_request(&mut self, peer: &mut Peer, method: &str) -> PendingRequest {
        let request = self.next_request(peer).await;
        assert_eq!((request.line(), request.header("mcp-method")), ("POST /mcp".to_owned(), Some(method)));
        assert_eq!(request.header("mcp-protocol-version"), Some("2026-07-28"));
        assert_eq!(request.header("mcp-session-id"), None);
        request
    }
}

#[tokio::test]
async fn a_stateless_request_has_routing_headers_and_no_session() {
    let mut peer = Peer::new().await;
    // The same line also has a session.
    let mut line = TestLine::connected(&mut peer).await;
    line.stateless_request(1, "tools/call");
    let request = line.next_stateless_request(&mut peer, "tools/call").await;
    assert_eq!(request.header("mcp-name"), Some("=?base64?Z3LDtsOfZQ==?="));
    assert_eq!(request.header("mcp-param-region"), Some("eu"));
    assert_eq!(request.header("accept"), Some("application/json, text/event-stream"));
    let headers = [("content-type", "application/json"), ("Mcp-Session-Id", "another")];
    request.answer(200, &headers, r#"{"jsonrpc":"2.0","id":1,"result":{}}"#).await;
    assert_eq!(line.message().await["id"], 1);
    line.request(2, "tools/call");
    let request = line.next_request(&mut peer).await;
    assert_eq!((request.header("mcp-session-id"), request.header("mcp-method")), (Some("s-1"), None));
    request.result().await;
}

#[tokio::test]
async fn a_stateless_handshake_starts_no_session() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.stateless_request(0, "server/discover");
    let headers = [("content-type", "application/json"), ("Mcp-Session-Id", "s-1")];
    let request = line.next_stateless_request(&mut peer, "server/discover").await;
    request.answer(200, &headers, r#"{"jsonrpc":"2.0","id":0,"result":{}}"#).await;
    line.message().await;
    line.stateless_request(1, "tools/list");
    line.next_stateless_request(&mut peer, "tools/list").await.result().await;
    line.message().await;
    // There is no session to delete and no GET stream.
    line.send(LineOutput::Close);
    assert!(matches!(line.next().await, mcp_satellite_actors::seam::LineEvent::Closed));
    assert!(!peer.has_request());
}

#[tokio::test]
async fn a_json_rpc_error_is_a_response_and_a_bare_status_ends_no_session() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    let json = [("content-type", "application/json")];
    for (id, status, code) in [(1, 404, -32601), (2, 400, -32020), (3, 400, -32022)] {
        line.stateless_request(id, "x/y");
        let error = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":"no"}}}}"#);
        line.next_stateless_request(&mut peer, "x/y").await.answer(status, &json, &error).await;
        assert_eq!(line.message().await["error"]["code"], code);
    }
    let about_nothing = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"no session"}}"#;
    for (id, status, body, message) in
        [(4, 404, "", None), (5, 400, about_nothing, Some("no session")), (6, 404, about_nothing, Some("no session"))]
    {
        line.stateless_request(id, "x/y");
        line.next_stateless_request(&mut peer, "x/y").await.answer(status, &json, body).await;
        let kind = FailureKind::Status { status, message: message.map(str::to_owned) };
        assert_eq!(line.failed(id).await, ExchangeFailure::sent(kind));
    }
}

#[tokio::test]
async fn a_json_rpc_error_to_the_handshake_suggests_no_older_transport() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.request(0, "initialize");
    let error = r#"{"jsonrpc":"2.0","error":{"code":-32022,"message":"no sessions"}}"#;
    line.next_request(&mut peer).await.answer(400, &[("content-type", "application/json")], error).await;
    let kind = FailureKind::Status { status: 400, message: Some("no sessions".to_owned()) };
    assert_eq!(line.failed(0).await, ExchangeFailure::sent(kind));
}

#[tokio::test]
async fn a_broken_stream_without_a_session_is_not_resumed() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.stateless_request(1, "subscriptions/listen");
    let mut stream = line.next_stateless_request(&mut peer, "subscriptions/listen").await.stream(&[]).await;
    stream.chunk("id: 7\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"a/b\"}\n\n").await;
    assert_eq!(line.message().await["method"], "a/b");
    stream.end().await;
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::Cut));
    line.is_silent().await;
    assert!(!peer.has_request());
}

#[tokio::test]
async fn abandoning_a_stateless_request_closes_its_stream() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.stateless_request(1, "subscriptions/listen");
    let mut stream = line.next_stateless_request(&mut peer, "subscriptions/listen").await.stream(&[]).await;
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"method\":\"a/b\"}\n\n").await;
    line.message().await;
    line.send(LineOutput::Abandon { id: 1 });
    line.drive_until(stream.closed()).await;
    assert!(!peer.has_request(), "another message was sent");
}
