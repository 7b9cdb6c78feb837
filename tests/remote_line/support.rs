//! A line in the hands of a test, which does what a session would.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mcp_satellite::connect::remote::RemoteConnector;
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget, UpdateMethod};
use mcp_satellite_actors::seam::{Connector, LineEvent, LineOutput, ServerLine};
use serde_json::Value;

use super::peer::{Asked, Peer};

pub(crate) const VERSION: &str = "2025-11-25";

pub(crate) fn spec(url: &str, transport: RemoteTransport) -> InstanceSpec {
    InstanceSpec {
        id: InstanceId::new("acme".into(), "alice".into(), "abc123".into()),
        name: "files-acme-alice-abc123".into(),
        server: "files".into(),
        team_slug: "acme".into(),
        user_slug: "alice".into(),
        target: ServerTarget::Remote { transport, url: url.to_owned(), health_url: None },
        args: Vec::new(),
        env: [].into(),
        headers: [].into(),
        query: [].into(),
        missing: Vec::new(),
        lifetime: ProcessLifetime::Listed,
        update_method: UpdateMethod::default(),
        request_logging: true,
        mask: SecretMask::default(),
        policy: Arc::new(Policy::default()),
    }
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
pub(crate) struct Dialed {
    line: Box<dyn ServerLine>,
    kept: VecDeque<LineEvent>,
}

impl Dialed {
    pub(crate) fn new(spec: InstanceSpec) -> Self {
        Self::with(&RemoteConnector::new().unwrap(), spec)
    }

    pub(crate) fn with(connector: &RemoteConnector, spec: InstanceSpec) -> Self {
        Self { line: connector.dial(&Arc::new(spec), RunNumber(1)), kept: VecDeque::new() }
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

    /// Answers a request of the server.
    pub(crate) fn respond(&mut self, id: usize) {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#).into();
        self.send(LineOutput::Response { body });
    }

    pub(crate) fn initialized(&mut self) {
        let body = notification("notifications/initialized");
        self.send(LineOutput::Initialized { version: VERSION.to_owned(), body });
    }

    /// What the line brings next.
    pub(crate) async fn next(&mut self) -> LineEvent {
        match self.kept.pop_front() {
            Some(incoming) => incoming,
            None => poll_fn(|cx| self.line.poll_next(cx)).await,
        }
    }

    /// Waits for something else, with the line at work. What it brings is kept.
    pub(crate) async fn during<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = std::pin::pin!(other);
        loop {
            tokio::select! {
                biased;
                done = &mut other => return done,
                incoming = poll_fn(|cx| self.line.poll_next(cx)) => self.kept.push_back(incoming),
            }
        }
    }

    /// The next request that the peer gets.
    pub(crate) async fn asks(&mut self, peer: &mut Peer) -> Asked {
        self.during(peer.next()).await
    }

    /// The line brings nothing by itself.
    pub(crate) async fn is_silent(&mut self) {
        // Long enough for what is there to arrive over loopback.
        self.during(tokio::time::sleep(Duration::from_millis(50))).await;
        assert!(self.kept.is_empty(), "{:?}", self.kept);
    }

    pub(crate) async fn message(&mut self) -> Value {
        serde_json::from_slice(&self.text().await).unwrap()
    }

    /// A message as it was sent.
    pub(crate) async fn text(&mut self) -> Bytes {
        match self.next().await {
            LineEvent::Message { message, .. } => message,
            other => panic!("a message was expected, not {other:?}"),
        }
    }

    pub(crate) async fn failed(&mut self, expected: u64) -> ExchangeFailure {
        match self.next().await {
            LineEvent::Failed { id, failure } if id == expected => failure,
            other => panic!("a failure of {expected} was expected, not {other:?}"),
        }
    }

    pub(crate) async fn lost(&mut self) -> FailureKind {
        match self.next().await {
            LineEvent::Lost(failure) => failure.kind,
            other => panic!("the loss was expected, not {other:?}"),
        }
    }

    /// The handshake with a server that may name the session: what is left is its GET, which waits for an answer.
    pub(crate) async fn greet(&mut self, peer: &mut Peer, session: Option<&str>) -> Asked {
        self.request(0, "initialize");
        let asked = self.asks(peer).await;
        assert_eq!(asked.says("method"), "initialize");
        assert_eq!((asked.header("mcp-session-id"), asked.header("mcp-protocol-version")), (None, None));
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(session.map(|session| ("Mcp-Session-Id", session)));
        asked.answer(200, &headers, r#"{"jsonrpc":"2.0","id":0,"result":{}}"#).await;
        assert_eq!(self.message().await["id"], 0);
        self.initialized();
        let asked = self.asks(peer).await;
        assert_eq!(asked.says("method"), "notifications/initialized");
        assert_eq!(asked.header("mcp-session-id"), session);
        asked.accepted().await;
        let listening = self.asks(peer).await;
        assert_eq!(listening.line(), "GET /mcp");
        listening
    }

    /// A session with a server that names it and has no stream.
    pub(crate) async fn connected(peer: &mut Peer) -> Self {
        let mut line = Self::new(http(peer));
        line.greet(peer, Some("s-1")).await.answer(405, &[], "").await;
        line
    }
}

fn notification(method: &str) -> Bytes {
    format!(r#"{{"jsonrpc":"2.0","method":"{method}"}}"#).into()
}
