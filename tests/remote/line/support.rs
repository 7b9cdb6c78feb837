//! A line that the test drives as a session does.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mcp_satellite::connect::remote::RemoteConnector;
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport};
use mcp_satellite_actors::seam::{LineConnector, LineEvent, LineOutput, ServerLine};
use serde_json::Value;
use testkit::spec::remote;

use super::peer::{Peer, PendingRequest};

pub(crate) const VERSION: &str = "2025-11-25";

pub(crate) fn spec(url: &str, transport: RemoteTransport) -> InstanceSpec {
    testkit::spec::spec(remote(transport, url))
}

pub(crate) fn http(peer: &Peer) -> InstanceSpec {
    spec(&peer.url("/mcp"), RemoteTransport::Http)
}

pub(crate) fn sse(peer: &Peer) -> InstanceSpec {
    spec(&peer.url("/sse"), RemoteTransport::Sse)
}

pub(crate) fn policy(mut spec: InstanceSpec, change: impl FnOnce(&mut Policy)) -> InstanceSpec {
    change(Arc::make_mut(&mut spec.policy));
    spec
}

/// A line that is polled whenever the test waits for something.
pub(crate) struct TestLine {
    line: Box<dyn ServerLine>,
    queued: VecDeque<LineEvent>,
}

impl TestLine {
    pub(crate) fn new(spec: InstanceSpec) -> Self {
        Self::with(&RemoteConnector::new().unwrap(), spec)
    }

    pub(crate) fn with(connector: &RemoteConnector, spec: InstanceSpec) -> Self {
        Self { line: connector.dial(&Arc::new(spec), RunNumber(1)), queued: VecDeque::new() }
    }

    pub(crate) fn send(&mut self, message: LineOutput) {
        self.line.send(message);
    }

    pub(crate) fn request(&mut self, id: u64, method: &str) {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}"}}"#).into();
        self.send(LineOutput::Request { id, body, header_timeout: None, routing: None });
    }

    pub(crate) fn notify(&mut self, method: &str) {
        self.send(LineOutput::Notification { body: notification(method) });
    }

    /// Responds to a request of the server.
    pub(crate) fn respond(&mut self, id: usize) {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#).into();
        self.send(LineOutput::Response { body });
    }

    pub(crate) fn initialized(&mut self) {
        let body = notification("notifications/initialized");
        self.send(LineOutput::Initialized { version: VERSION.to_owned(), body });
    }

    pub(crate) async fn next(&mut self) -> LineEvent {
        match self.queued.pop_front() {
            Some(event) => event,
            None => poll_fn(|cx| self.line.poll_next(cx)).await,
        }
    }

    /// Polls the line until another future completes. Queues the events of the line.
    pub(crate) async fn drive_until<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = std::pin::pin!(other);
        loop {
            tokio::select! {
                biased;
                done = &mut other => return done,
                event = poll_fn(|cx| self.line.poll_next(cx)) => self.queued.push_back(event),
            }
        }
    }

    /// Waits for the next request that the peer receives.
    pub(crate) async fn next_request(&mut self, peer: &mut Peer) -> PendingRequest {
        self.drive_until(peer.next()).await
    }

    /// Asserts that the line has no event.
    pub(crate) async fn is_silent(&mut self) {
        // Long enough for pending data to arrive over loopback.
        self.drive_until(tokio::time::sleep(Duration::from_millis(50))).await;
        assert!(self.queued.is_empty(), "{:?}", self.queued);
    }

    pub(crate) async fn message(&mut self) -> Value {
        serde_json::from_slice(&self.text().await).unwrap()
    }

    /// Waits for a message and returns it unchanged.
    pub(crate) async fn text(&mut self) -> Bytes {
        match self.next().await {
            LineEvent::Message { message, .. } => message,
            other => panic!("expected a message, not {other:?}"),
        }
    }

    pub(crate) async fn failed(&mut self, expected: u64) -> ExchangeFailure {
        match self.next().await {
            LineEvent::Failed { id, failure } if id == expected => failure,
            other => panic!("expected a failure of {expected}, not {other:?}"),
        }
    }

    pub(crate) async fn lost(&mut self) -> FailureKind {
        match self.next().await {
            LineEvent::Lost(failure) => failure.kind,
            other => panic!("expected the loss, not {other:?}"),
        }
    }

    /// Performs the handshake. Returns the GET of the line, which waits for a response.
    pub(crate) async fn handshake(&mut self, peer: &mut Peer, session: Option<&str>) -> PendingRequest {
        self.request(0, "initialize");
        let request = self.next_request(peer).await;
        assert_eq!(request.member("method"), "initialize");
        assert_eq!((request.header("mcp-session-id"), request.header("mcp-protocol-version")), (None, None));
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(session.map(|session| ("Mcp-Session-Id", session)));
        request.answer(200, &headers, r#"{"jsonrpc":"2.0","id":0,"result":{}}"#).await;
        assert_eq!(self.message().await["id"], 0);
        self.initialized();
        let request = self.next_request(peer).await;
        assert_eq!(request.member("method"), "notifications/initialized");
        assert_eq!(request.header("mcp-session-id"), session);
        request.accepted().await;
        let listening = self.next_request(peer).await;
        assert_eq!(listening.line(), "GET /mcp");
        listening
    }

    /// Returns a line with a session after the handshake with a server without a GET stream.
    pub(crate) async fn connected(peer: &mut Peer) -> Self {
        let mut line = Self::new(http(peer));
        line.handshake(peer, Some("s-1")).await.answer(405, &[], "").await;
        line
    }
}

fn notification(method: &str) -> Bytes {
    format!(r#"{{"jsonrpc":"2.0","method":"{method}"}}"#).into()
}
