//! Requests without a session, byte for byte: what their headers say, and what their answers and failures are.

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::seam::{LineOutput, RequestHeaders};

use super::peer::{Asked, Peer};
use super::support::{Dialed, http};

impl Dialed {
    /// A request that belongs to no session.
    fn alone(&mut self, id: u64, method: &str) {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}"}}"#).into();
        let (name, params) = (Some("größe".to_owned()), vec![("Region".into(), "eu".to_owned())]);
        let routing = RequestHeaders { version: "2026-07-28", method: method.to_owned(), name, params };
        self.send(LineOutput::Request { id, body, header_timeout: None, routing: Some(Box::new(routing)) });
    }

    async fn asks_alone(&mut self, peer: &mut Peer, method: &str) -> Asked {
        let asked = self.asks(peer).await;
        assert_eq!((asked.line(), asked.header("mcp-method")), ("POST /mcp".to_owned(), Some(method)));
        assert_eq!(asked.header("mcp-protocol-version"), Some("2026-07-28"));
        assert_eq!(asked.header("mcp-session-id"), None);
        asked
    }
}

#[tokio::test]
async fn a_request_without_a_session_says_in_headers_what_it_is_about_and_names_no_session() {
    let mut peer = Peer::new().await;
    // Beside a session that has a name.
    let mut line = Dialed::connected(&mut peer).await;
    line.alone(1, "tools/call");
    let asked = line.asks_alone(&mut peer, "tools/call").await;
    assert_eq!(asked.header("mcp-name"), Some("=?base64?Z3LDtsOfZQ==?="));
    assert_eq!(asked.header("mcp-param-region"), Some("eu"));
    assert_eq!(asked.header("accept"), Some("application/json, text/event-stream"));
    let headers = [("content-type", "application/json"), ("Mcp-Session-Id", "another")];
    asked.answer(200, &headers, r#"{"jsonrpc":"2.0","id":1,"result":{}}"#).await;
    assert_eq!(line.message().await["id"], 1);
    line.request(2, "tools/call");
    let asked = line.asks(&mut peer).await;
    assert_eq!((asked.header("mcp-session-id"), asked.header("mcp-method")), (Some("s-1"), None));
    asked.result().await;
}

#[tokio::test]
async fn a_handshake_without_a_session_begins_none() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.alone(0, "server/discover");
    let headers = [("content-type", "application/json"), ("Mcp-Session-Id", "s-1")];
    let asked = line.asks_alone(&mut peer, "server/discover").await;
    asked.answer(200, &headers, r#"{"jsonrpc":"2.0","id":0,"result":{}}"#).await;
    line.message().await;
    line.alone(1, "tools/list");
    line.asks_alone(&mut peer, "tools/list").await.result().await;
    line.message().await;
    // It has nothing to end, and listens to nothing that it has not asked for.
    line.send(LineOutput::Close);
    assert!(matches!(line.next().await, mcp_satellite_actors::seam::LineEvent::Closed));
    assert!(!peer.was_asked());
}

#[tokio::test]
async fn an_error_with_a_status_is_an_answer_and_a_status_without_one_ends_no_session() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    let json = [("content-type", "application/json")];
    for (id, status, code) in [(1, 404, -32601), (2, 400, -32020), (3, 400, -32022)] {
        line.alone(id, "x/y");
        let error = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":{code},"message":"no"}}}}"#);
        line.asks_alone(&mut peer, "x/y").await.answer(status, &json, &error).await;
        assert_eq!(line.message().await["error"]["code"], code);
    }
    let about_nothing = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"no session"}}"#;
    for (id, status, body, said) in
        [(4, 404, "", None), (5, 400, about_nothing, Some("no session")), (6, 404, about_nothing, Some("no session"))]
    {
        line.alone(id, "x/y");
        line.asks_alone(&mut peer, "x/y").await.answer(status, &json, body).await;
        let kind = FailureKind::Status { status, message: said.map(str::to_owned) };
        assert_eq!(line.failed(id).await, ExchangeFailure::sent(kind));
    }
}

#[tokio::test]
async fn what_refuses_a_handshake_in_json_rpc_is_no_server_of_the_older_transport() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.request(0, "initialize");
    let said = r#"{"jsonrpc":"2.0","error":{"code":-32022,"message":"no sessions"}}"#;
    line.asks(&mut peer).await.answer(400, &[("content-type", "application/json")], said).await;
    let kind = FailureKind::Status { status: 400, message: Some("no sessions".to_owned()) };
    assert_eq!(line.failed(0).await, ExchangeFailure::sent(kind));
}

#[tokio::test]
async fn a_stream_without_a_session_is_not_continued_where_it_breaks_off() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.alone(1, "subscriptions/listen");
    let mut stream = line.asks_alone(&mut peer, "subscriptions/listen").await.stream(&[]).await;
    stream.chunk("id: 7\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"a/b\"}\n\n").await;
    assert_eq!(line.message().await["method"], "a/b");
    stream.end().await;
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::Cut));
    line.is_silent().await;
    assert!(!peer.was_asked());
}

#[tokio::test]
async fn a_request_that_is_given_up_ends_with_its_stream() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.alone(1, "subscriptions/listen");
    let mut stream = line.asks_alone(&mut peer, "subscriptions/listen").await.stream(&[]).await;
    stream.chunk("data: {\"jsonrpc\":\"2.0\",\"method\":\"a/b\"}\n\n").await;
    line.message().await;
    line.send(LineOutput::Abandon { id: 1 });
    line.during(stream.closed()).await;
    assert!(!peer.was_asked(), "that is all that it is told");
}
