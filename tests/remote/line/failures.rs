//! Every type of exchange failure. The text of a failure shows no secret.

use std::net::Ipv4Addr;
use std::time::Duration;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport, ServerTarget};
use mcp_satellite_actors::seam::LineOutput;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::peer::Peer;
use super::support::{TestLine, http, policy, spec};

const SECRET: &str = "sk-do-not-show-this";

/// Adds secrets to headers, query and URL.
fn with_secrets(mut spec: InstanceSpec) -> InstanceSpec {
    spec.headers = [("Authorization".to_owned(), format!("Bearer {SECRET}").into())].into();
    spec.query = [("key".to_owned(), SECRET.into())].into();
    spec.mask = SecretMask::new([SECRET]);
    if let ServerTarget::Remote { url, .. } = &mut spec.target {
        *url = url.replace("://", &format!("://user:{SECRET}@"));
    }
    spec
}

/// Returns the failure of a request to a server that cannot be reached or does not respond.
async fn failure(spec: InstanceSpec) -> ExchangeFailure {
    let mut line = TestLine::new(with_secrets(spec));
    line.request(1, "initialize");
    let failure = line.failed(1).await;
    assert!(!format!("{failure:?} {failure}").contains(SECRET), "{failure:?}");
    failure
}

fn spec_at(url: &str) -> InstanceSpec {
    spec(url, RemoteTransport::Http)
}

#[tokio::test]
async fn an_unknown_name_and_a_refused_connection_are_different_failures() {
    // The resolver rejects a label of 64 characters without a query.
    let unknown = format!("http://{}.invalid/mcp", "x".repeat(64));
    assert_eq!(failure(spec_at(&unknown)).await, ExchangeFailure::unsent(FailureKind::Dns));
    let peer = Peer::new().await;
    let url = peer.url("/mcp");
    drop(peer);
    let mut line = TestLine::new(spec_at(&url));
    // The port may close a moment later.
    let refused = loop {
        line.request(1, "initialize");
        let failure = line.failed(1).await;
        if failure.kind == FailureKind::Refused {
            break failure;
        }
    };
    assert_eq!(refused, ExchangeFailure::unsent(FailureKind::Refused));
    assert_eq!(failure(spec_at(&url.replace("127.0.0.1", "localhost"))).await, refused);
}

#[tokio::test]
async fn a_connect_timeout_means_that_the_request_was_not_sent() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let full = socket.listen(1).unwrap();
    let address = full.local_addr().unwrap();
    // These connections fill the backlog; the kernel drops further ones.
    let mut waiting = Vec::new();
    while let Ok(connected) = tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        waiting.push(connected.unwrap());
    }
    for limit in [50, 250].map(Duration::from_millis) {
        let spec = policy(spec_at(&format!("http://{address}/mcp")), |policy| policy.remote.connect_timeout = limit);
        assert_eq!(failure(spec).await, ExchangeFailure::unsent(FailureKind::ConnectTimeout(limit)));
    }
}

#[tokio::test]
async fn a_server_without_tls_and_a_broken_connection_are_different_failures() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let answering = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            stream.writable().await.unwrap();
            stream.try_write(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
            tokio::spawn(async move {
                let mut all = Vec::new();
                let mut stream = stream;
                tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut all).await
            });
        }
    });
    let failure = failure(spec_at(&format!("https://{address}/mcp"))).await;
    assert!(matches!(&failure.kind, FailureKind::Tls(_)) && !failure.sent, "{failure:?}");
    answering.abort();

    let mut peer = Peer::new().await;
    let mut line = TestLine::new(spec_at(&peer.url("/mcp")));
    line.request(1, "initialize");
    drop(line.next_request(&mut peer).await);
    let failure = line.failed(1).await;
    assert!(matches!(&failure.kind, FailureKind::Broken(_)) && failure.sent, "{failure:?}");
    line.request(2, "initialize");
    line.next_request(&mut peer).await.write_raw("SSH-2.0-OpenSSH_9.2\r\n\r\n").await;
    let failure = line.failed(2).await;
    assert!(matches!(&failure.kind, FailureKind::Broken(_)) && failure.sent, "{failure:?}");
}

#[tokio::test]
async fn a_header_timeout_means_that_the_request_was_sent() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    let limit = Duration::from_millis(50);
    let body = "{}".into();
    line.send(LineOutput::Request { id: 1, body, header_timeout: Some(limit), routing: None });
    let request = line.next_request(&mut peer).await;
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::HeaderTimeout(limit)));
    line.drive_until(request.closed()).await;
}

#[tokio::test]
async fn a_truncated_response_fails_the_request() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.request(1, "initialize");
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"jsonrpc\":";
    drop(line.next_request(&mut peer).await.write_raw(head).await);
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::Cut));
}

/// A response and the failure that it causes.
struct Refusal {
    status: u16,
    headers: &'static [(&'static str, &'static str)],
    body: &'static str,
    /// The failure without a session and within a session.
    kinds: [FailureKind; 2],
}

impl Refusal {
    fn new(
        status: u16,
        headers: &'static [(&'static str, &'static str)],
        body: &'static str,
        kind: FailureKind,
    ) -> Self {
        Self { status, headers, body, kinds: [kind.clone(), kind] }
    }
}

/// A content type that contains a secret in another case.
const LONG_TYPE: &str = "x/Hush-Hush-Token-yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; charset=x";

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn refusals() -> Vec<Refusal> {
    let long = format!("x/[secret]-{}", "y".repeat(53));
    let long = FailureKind::NotMcp { content_type: Some(long) };
    let html = FailureKind::NotMcp { content_type: Some("text/html".to_owned()) };
    let none = FailureKind::NotMcp { content_type: None };
    let json = FailureKind::NotMcp { content_type: Some("application/json".to_owned()) };
    let expired = |status| [FailureKind::from_status(status), FailureKind::session_expired(status)];
    let with_message = |status, message: &str| {
        let message = Some(message.to_owned());
        [FailureKind::Status { status, message: message.clone() }, FailureKind::SessionExpired { status, message }]
    };
    let null = r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: No valid session"},"id":null}"#;
    let other =
        r#"{"jsonrpc":"2.0","error":{"code":-32600,"message":"sk-do-not-show-this is\nno key"},"id":"server-error"}"#;
    let minute = Some(Duration::from_secs(60));
    vec![
        Refusal::new(401, &[], "", FailureKind::Unauthorized { challenge: None }),
        Refusal::new(
            401,
            &[("www-authenticate", "Bearer realm=\"sk-do-not-show-this\""), ("www-authenticate", "Basic")],
            "",
            FailureKind::Unauthorized { challenge: Some("Bearer realm=\"[secret]\", Basic".to_owned()) },
        ),
        Refusal::new(403, &[], "", FailureKind::Forbidden { challenge: None }),
        Refusal { status: 404, headers: &[], body: "Not Found", kinds: expired(404) },
        Refusal { status: 404, headers: JSON, body: null, kinds: with_message(404, "Bad Request: No valid session") },
        Refusal { status: 400, headers: JSON, body: null, kinds: with_message(400, "Bad Request: No valid session") },
        Refusal { status: 400, headers: JSON, body: other, kinds: with_message(400, "[secret] is no key") },
        Refusal::new(400, &[], "No valid session ID provided", FailureKind::from_status(400)),
        Refusal::new(400, &[], "", FailureKind::from_status(400)),
        Refusal::new(400, JSON, r#"{"error":"bad"}"#, FailureKind::from_status(400)),
        Refusal::new(
            400,
            JSON,
            r#"{"error":{"message":"what is that?"}}"#,
            with_message(400, "what is that?")[0].clone(),
        ),
        Refusal::new(422, JSON, other, with_message(422, "[secret] is no key")[0].clone()),
        Refusal::new(405, &[], "", FailureKind::from_status(405)),
        Refusal::new(429, &[("retry-after", "60")], "", FailureKind::Throttled { retry_after: minute }),
        Refusal::new(429, &[], "", FailureKind::Throttled { retry_after: None }),
        Refusal::new(500, JSON, null, FailureKind::ServerError { status: 500, retry_after: None }),
        Refusal::new(
            503,
            &[("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")],
            "",
            FailureKind::ServerError { status: 503, retry_after: Some(Duration::ZERO) },
        ),
        Refusal::new(
            302,
            &[("location", "https://u:p@elsewhere.example:8443/sk-do-not-show-this/mcp?key=1#x")],
            "",
            FailureKind::Redirected { status: 302, to: Some("https://elsewhere.example:8443/[secret]/mcp".to_owned()) },
        ),
        Refusal::new(
            308,
            &[("location", "https://elsewhere.example/api/v1/s/NmFkZjU0/0b9c2d6e-streamable-http/authorize/mcp/")],
            "",
            FailureKind::Redirected {
                status: 308,
                to: Some("https://elsewhere.example/api/v1/s/[secret]/[secret]/authorize/mcp/".to_owned()),
            },
        ),
        Refusal::new(307, &[], "", FailureKind::Redirected { status: 307, to: None }),
        Refusal::new(200, &[("content-type", "text/html; charset=utf-8")], "<html>", html),
        Refusal::new(200, &[("content-type", LONG_TYPE)], "", long),
        Refusal::new(200, &[], "", none.clone()),
        Refusal::new(202, &[], "", none),
        Refusal::new(200, JSON, "<html>", json.clone()),
        Refusal::new(200, JSON, null, json.clone()),
        Refusal::new(200, JSON, "[]", json),
    ]
}

#[tokio::test]
async fn status_and_body_of_a_response_determine_the_failure() {
    for session in [None, Some("s-1")] {
        let mut peer = Peer::new().await;
        let mut spec = http(&peer);
        spec.mask = SecretMask::new([SECRET, "Hush-Hush-Token"]);
        let mut line = TestLine::new(spec);
        line.handshake(&mut peer, session).await.answer(405, &[], "").await;
        for (id, Refusal { status, headers, body, kinds: [without, within] }) in (1..).zip(refusals()) {
            line.request(id, "tools/call");
            line.next_request(&mut peer).await.answer(status, headers, body).await;
            let failure = loop {
                // The session counts messages that are not the response.
                match line.next().await {
                    mcp_satellite_actors::seam::LineEvent::Message { .. } => {}
                    mcp_satellite_actors::seam::LineEvent::Failed { failure, .. } => break failure,
                    other => panic!("{other:?}"),
                }
            };
            let kind = if session.is_some() { within } else { without };
            assert_eq!(failure, ExchangeFailure::sent(kind), "{status} {headers:?} {body}");
        }
    }
}

#[tokio::test]
async fn the_message_of_a_failure_is_short_and_hides_the_session_id() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.handshake(&mut peer, Some("3b1f-5a2c")).await.answer(405, &[], "").await;
    line.request(1, "tools/call");
    let why = " unknown".repeat(100);
    let error = format!(r#"{{"jsonrpc":"2.0","id":null,"error":{{"message":"Session 3b1f-5a2c is{why}"}}}}"#);
    line.next_request(&mut peer).await.answer(400, JSON, &error).await;
    let failure = line.failed(1).await.to_string();
    let start = "the session has expired (HTTP 400): Session [session] is unknown unknown";
    assert!(failure.starts_with(start) && failure.len() < 250, "{failure}");
}

#[tokio::test]
async fn a_session_id_that_is_part_of_a_secret_does_not_reveal_it() {
    for (session, expected) in [
        ("1", "[secret] in session 1"),
        ("show-this", "[secret] in session [session]"),
        ("[s", "[secret] in session [s"),
    ] {
        let mut peer = Peer::new().await;
        let mut spec = http(&peer);
        spec.mask = SecretMask::new([SECRET, "sk-1abc"]);
        let mut line = TestLine::new(spec);
        line.handshake(&mut peer, Some(session)).await.answer(405, &[], "").await;
        for (id, secret) in (1..).zip([SECRET, "sk-1abc"]) {
            line.request(id, "tools/call");
            let error = format!(r#"{{"error":{{"message":"{secret} in session {session}"}}}}"#);
            line.next_request(&mut peer).await.answer(422, JSON, &error).await;
            let message = Some(expected.to_owned());
            assert_eq!(line.failed(id).await, ExchangeFailure::sent(FailureKind::Status { status: 422, message }));
        }
    }
}

#[tokio::test]
async fn the_failure_of_a_redirect_hides_credentials_in_the_path() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(spec_at(&peer.url("/s/onlylowercaseletters/mcp")));
    for (id, location, shown) in [
        (1, "https://elsewhere.example/s/onlylowercaseletters/mcp?key=1", "https://elsewhere.example"),
        (2, "https://elsewhere.example/s/onlylowercaseletters/mcp/", "https://elsewhere.example/s/[secret]/mcp/"),
        (3, "https://elsewhere.example/authorize/mcp", "https://elsewhere.example/authorize/mcp"),
    ] {
        line.request(id, "initialize");
        line.next_request(&mut peer).await.answer(308, &[("location", location)], "").await;
        let to = Some(shown.to_owned());
        assert_eq!(line.failed(id).await, ExchangeFailure::sent(FailureKind::Redirected { status: 308, to }));
    }
}

#[tokio::test]
async fn an_error_with_the_id_of_the_request_is_a_response_with_any_status() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::connected(&mut peer).await;
    for (id, status) in (1..).zip([400, 404, 422]) {
        line.request(id, "unknown");
        let error = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32601,"message":"unknown"}}}}"#);
        line.next_request(&mut peer).await.answer(status, JSON, &error).await;
        assert_eq!(line.text().await, error);
    }
    line.is_silent().await;
}

#[tokio::test]
async fn session_not_found_means_an_expired_session_with_any_status_and_id() {
    const TEXT: &[(&str, &str)] = &[("content-type", "text/plain; charset=utf-8")];
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.handshake(&mut peer, Some("s-1")).await.answer(405, &[], "").await;
    for (id, status, headers) in [(1, 404, JSON), (2, 400, JSON), (3, 400, TEXT)] {
        line.request(id, "tools/call");
        let error = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32001,"message":"Session not found"}}}}"#);
        let body = if headers == JSON { &*error } else { "Session not found" };
        line.next_request(&mut peer).await.answer(status, headers, body).await;
        let failure = line.failed(id).await;
        assert!(
            matches!(failure.kind, FailureKind::SessionExpired { status: reported, .. } if reported == status),
            "{failure:?}"
        );
        assert!(!failure.answering, "the request counts as executed");
    }
    // A result is a response with any status.
    line.request(4, "tools/call");
    let result = r#"{"jsonrpc":"2.0","id":4,"result":{"text":"session not found"}}"#;
    line.next_request(&mut peer).await.answer(404, JSON, result).await;
    assert_eq!(line.text().await, result);
}

#[tokio::test]
async fn method_not_found_is_not_an_expired_session() {
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(http(&peer));
    line.handshake(&mut peer, Some("s-1")).await.answer(405, &[], "").await;
    line.request(1, "tools/call");
    let error = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"Method not found"}}"#;
    line.next_request(&mut peer).await.answer(404, JSON, error).await;
    let answer = line.message().await;
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&1.into(), &(-32601).into()));
}

#[tokio::test]
async fn the_failure_of_an_invalid_address_or_header_hides_its_value() {
    for url in ["", "ftp://example.com/", "http://", "127.0.0.1:1/mcp", "http://exa mple/", "mailto:a@b"] {
        let mut line = TestLine::new(spec_at(url));
        line.request(1, "initialize");
        let failure = line.failed(1).await;
        assert!(matches!(&failure.kind, FailureKind::BadAddress(_)) && !failure.sent, "{url}: {failure:?}");
    }
    for (name, value) in [("X Y", "1"), ("X-Y", "sk-do-not-show-this\n")] {
        let mut spec = spec_at("http://127.0.0.1:9/mcp");
        spec.headers = [(name.to_owned(), value.into())].into();
        let mut line = TestLine::new(spec);
        line.request(1, "initialize");
        let failure = line.failed(1).await;
        assert!(matches!(&failure.kind, FailureKind::BadAddress(why) if why.contains(name)), "{failure:?}");
        assert!(!failure.to_string().contains(SECRET), "{failure}");
        line.notify("notifications/cancelled");
        assert!(matches!(line.lost().await, FailureKind::BadAddress(_)));
    }
}
