//! Every way in which an exchange can fail, by its type; and what is said of it shows no secret.

use std::net::Ipv4Addr;
use std::time::Duration;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::spec::{InstanceSpec, RemoteTransport, ServerTarget};
use mcp_satellite_actors::seam::LineOutput;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::peer::Peer;
use super::support::{Dialed, http, policy, spec};

const SECRET: &str = "sk-do-not-show-this";

/// Secrets wherever there can be one.
fn secretive(mut spec: InstanceSpec) -> InstanceSpec {
    spec.headers = [("Authorization".to_owned(), format!("Bearer {SECRET}").into())].into();
    spec.query = [("key".to_owned(), SECRET.into())].into();
    spec.mask = SecretMask::new([SECRET]);
    if let ServerTarget::Remote { url, .. } = &mut spec.target {
        *url = url.replace("://", &format!("://user:{SECRET}@"));
    }
    spec
}

/// How a request fails by which nobody is reached, or nobody who speaks.
async fn failure(spec: InstanceSpec) -> ExchangeFailure {
    let mut line = Dialed::new(secretive(spec));
    line.request(1, "initialize");
    let failure = line.failed(1).await;
    assert!(!format!("{failure:?} {failure}").contains(SECRET), "{failure:?}");
    failure
}

fn at(url: &str) -> InstanceSpec {
    spec(url, RemoteTransport::Http)
}

#[tokio::test]
async fn a_name_that_cannot_be_resolved_is_told_from_a_server_that_is_not_there() {
    // The resolver refuses a label of 64 characters without asking anybody.
    let unknown = format!("http://{}.invalid/mcp", "x".repeat(64));
    assert_eq!(failure(at(&unknown)).await, ExchangeFailure::unsent(FailureKind::Dns));
    let peer = Peer::new().await;
    let url = peer.url("/mcp");
    drop(peer);
    let mut line = Dialed::new(at(&url));
    // Its port may be closed a moment later.
    let refused = loop {
        line.request(1, "initialize");
        let failure = line.failed(1).await;
        if failure.kind == FailureKind::Refused {
            break failure;
        }
    };
    assert_eq!(refused, ExchangeFailure::unsent(FailureKind::Refused));
    assert_eq!(failure(at(&url.replace("127.0.0.1", "localhost"))).await, refused);
}

#[tokio::test]
async fn a_server_that_takes_no_connection_in_time_was_sent_nothing() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let full = socket.listen(1).unwrap();
    let address = full.local_addr().unwrap();
    // Those who wait to be accepted; the kernel drops what comes after them.
    let mut waiting = Vec::new();
    while let Ok(connected) = tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        waiting.push(connected.unwrap());
    }
    for limit in [50, 250].map(Duration::from_millis) {
        let spec = policy(at(&format!("http://{address}/mcp")), |policy| policy.remote.connect_timeout = limit);
        assert_eq!(failure(spec).await, ExchangeFailure::unsent(FailureKind::ConnectTimeout(limit)));
    }
}

#[tokio::test]
async fn a_server_that_does_not_speak_tls_is_told_from_one_that_breaks_off() {
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
    let failure = failure(at(&format!("https://{address}/mcp"))).await;
    assert!(matches!(&failure.kind, FailureKind::Tls(_)) && !failure.sent, "{failure:?}");
    answering.abort();

    let mut peer = Peer::new().await;
    let mut line = Dialed::new(at(&peer.url("/mcp")));
    line.request(1, "initialize");
    drop(line.asks(&mut peer).await);
    let failure = line.failed(1).await;
    assert!(matches!(&failure.kind, FailureKind::Broken(_)) && failure.sent, "{failure:?}");
    line.request(2, "initialize");
    line.asks(&mut peer).await.say("SSH-2.0-OpenSSH_9.2\r\n\r\n").await;
    let failure = line.failed(2).await;
    assert!(matches!(&failure.kind, FailureKind::Broken(_)) && failure.sent, "{failure:?}");
}

#[tokio::test]
async fn an_answer_that_does_not_begin_in_time_may_have_been_carried_out() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    let limit = Duration::from_millis(50);
    let body = "{}".into();
    line.send(LineOutput::Request { id: 1, body, header_timeout: Some(limit), routing: None });
    let asked = line.asks(&mut peer).await;
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::HeaderTimeout(limit)));
    line.during(asked.closed()).await;
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_told() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.request(1, "initialize");
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"jsonrpc\":";
    drop(line.asks(&mut peer).await.say(head).await);
    assert_eq!(line.failed(1).await, ExchangeFailure::sent(FailureKind::Cut));
}

/// How an answer to a request fails.
struct Refusal {
    status: u16,
    headers: &'static [(&'static str, &'static str)],
    body: &'static str,
    /// Without a session, and within one.
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

/// With a secret in it, as that is spelled.
const LONG_TYPE: &str = "x/Hush-Hush-Token-yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; charset=x";

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn refusals() -> Vec<Refusal> {
    let long = format!("x/[secret]-{}", "y".repeat(53));
    let long = FailureKind::NotMcp { content_type: Some(long) };
    let html = FailureKind::NotMcp { content_type: Some("text/html".to_owned()) };
    let none = FailureKind::NotMcp { content_type: None };
    let json = FailureKind::NotMcp { content_type: Some("application/json".to_owned()) };
    let expired = |status| [FailureKind::from_status(status), FailureKind::session_expired(status)];
    let in_words = |status, said: &str| {
        let said = Some(said.to_owned());
        [FailureKind::Status { status, message: said.clone() }, FailureKind::SessionExpired { status, message: said }]
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
        Refusal { status: 404, headers: JSON, body: null, kinds: in_words(404, "Bad Request: No valid session") },
        Refusal { status: 400, headers: JSON, body: null, kinds: in_words(400, "Bad Request: No valid session") },
        Refusal { status: 400, headers: JSON, body: other, kinds: in_words(400, "[secret] is no key") },
        Refusal::new(400, &[], "No valid session ID provided", FailureKind::from_status(400)),
        Refusal::new(400, &[], "", FailureKind::from_status(400)),
        Refusal::new(400, JSON, r#"{"error":"bad"}"#, FailureKind::from_status(400)),
        Refusal::new(400, JSON, r#"{"error":{"message":"what is that?"}}"#, in_words(400, "what is that?")[0].clone()),
        Refusal::new(422, JSON, other, in_words(422, "[secret] is no key")[0].clone()),
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
async fn what_an_answer_means_is_told_by_its_status_and_body() {
    for session in [None, Some("s-1")] {
        let mut peer = Peer::new().await;
        let mut spec = http(&peer);
        spec.mask = SecretMask::new([SECRET, "Hush-Hush-Token"]);
        let mut line = Dialed::new(spec);
        line.greet(&mut peer, session).await.answer(405, &[], "").await;
        for (id, Refusal { status, headers, body, kinds: [without, within] }) in (1..).zip(refusals()) {
            line.request(id, "tools/call");
            line.asks(&mut peer).await.answer(status, headers, body).await;
            let failure = loop {
                // What came instead of an answer is for the session to count.
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
async fn what_a_server_says_of_a_request_is_told_without_the_name_of_the_session_and_not_at_length() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.greet(&mut peer, Some("3b1f-5a2c")).await.answer(405, &[], "").await;
    line.request(1, "tools/call");
    let why = " unknown".repeat(100);
    let error = format!(r#"{{"jsonrpc":"2.0","id":null,"error":{{"message":"Session 3b1f-5a2c is{why}"}}}}"#);
    line.asks(&mut peer).await.answer(400, JSON, &error).await;
    let failure = line.failed(1).await.to_string();
    let told = "the session has expired (HTTP 400): Session [session] is unknown unknown";
    assert!(failure.starts_with(told) && failure.len() < 250, "{failure}");
}

#[tokio::test]
async fn the_name_of_a_session_that_is_part_of_a_secret_does_not_uncover_it() {
    for (session, told) in [
        ("1", "[secret] in session 1"),
        ("show-this", "[secret] in session [session]"),
        ("[s", "[secret] in session [s"),
    ] {
        let mut peer = Peer::new().await;
        let mut spec = http(&peer);
        spec.mask = SecretMask::new([SECRET, "sk-1abc"]);
        let mut line = Dialed::new(spec);
        line.greet(&mut peer, Some(session)).await.answer(405, &[], "").await;
        for (id, secret) in (1..).zip([SECRET, "sk-1abc"]) {
            line.request(id, "tools/call");
            let error = format!(r#"{{"error":{{"message":"{secret} in session {session}"}}}}"#);
            line.asks(&mut peer).await.answer(422, JSON, &error).await;
            let message = Some(told.to_owned());
            assert_eq!(line.failed(id).await, ExchangeFailure::sent(FailureKind::Status { status: 422, message }));
        }
    }
}

#[tokio::test]
async fn a_redirect_to_the_configured_path_does_not_show_what_may_be_a_credential_in_it() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(at(&peer.url("/s/onlylowercaseletters/mcp")));
    for (id, location, shown) in [
        (1, "https://elsewhere.example/s/onlylowercaseletters/mcp?key=1", "https://elsewhere.example"),
        (2, "https://elsewhere.example/s/onlylowercaseletters/mcp/", "https://elsewhere.example/s/[secret]/mcp/"),
        (3, "https://elsewhere.example/authorize/mcp", "https://elsewhere.example/authorize/mcp"),
    ] {
        line.request(id, "initialize");
        line.asks(&mut peer).await.answer(308, &[("location", location)], "").await;
        let to = Some(shown.to_owned());
        assert_eq!(line.failed(id).await, ExchangeFailure::sent(FailureKind::Redirected { status: 308, to }));
    }
}

#[tokio::test]
async fn an_error_with_our_id_is_an_answer_whatever_its_status_is() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::connected(&mut peer).await;
    for (id, status) in (1..).zip([400, 404, 422]) {
        line.request(id, "unknown");
        let error = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32601,"message":"unknown"}}}}"#);
        line.asks(&mut peer).await.answer(status, JSON, &error).await;
        assert_eq!(line.text().await, error);
    }
    line.is_silent().await;
}

#[tokio::test]
async fn a_session_that_is_not_found_has_expired_whatever_the_status_and_the_id_say() {
    const TEXT: &[(&str, &str)] = &[("content-type", "text/plain; charset=utf-8")];
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.greet(&mut peer, Some("s-1")).await.answer(405, &[], "").await;
    for (id, status, headers) in [(1, 404, JSON), (2, 400, JSON), (3, 400, TEXT)] {
        line.request(id, "tools/call");
        let error = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32001,"message":"Session not found"}}}}"#);
        let body = if headers == JSON { &*error } else { "Session not found" };
        line.asks(&mut peer).await.answer(status, headers, body).await;
        let failure = line.failed(id).await;
        assert!(
            matches!(failure.kind, FailureKind::SessionExpired { status: said, .. } if said == status),
            "{failure:?}"
        );
        assert!(!failure.answering, "it was not carried out");
    }
    // A result is a result, whatever its status is.
    line.request(4, "tools/call");
    let result = r#"{"jsonrpc":"2.0","id":4,"result":{"text":"session not found"}}"#;
    line.asks(&mut peer).await.answer(404, JSON, result).await;
    assert_eq!(line.text().await, result);
}

#[tokio::test]
async fn an_unknown_method_is_no_expired_session() {
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(http(&peer));
    line.greet(&mut peer, Some("s-1")).await.answer(405, &[], "").await;
    line.request(1, "tools/call");
    let error = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"Method not found"}}"#;
    line.asks(&mut peer).await.answer(404, JSON, error).await;
    let answer = line.message().await;
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&1.into(), &(-32601).into()));
}

#[tokio::test]
async fn an_address_that_cannot_be_used_is_told_without_showing_it() {
    for url in ["", "ftp://example.com/", "http://", "127.0.0.1:1/mcp", "http://exa mple/", "mailto:a@b"] {
        let mut line = Dialed::new(at(url));
        line.request(1, "initialize");
        let failure = line.failed(1).await;
        assert!(matches!(&failure.kind, FailureKind::BadAddress(_)) && !failure.sent, "{url}: {failure:?}");
    }
    for (name, value) in [("X Y", "1"), ("X-Y", "sk-do-not-show-this\n")] {
        let mut spec = at("http://127.0.0.1:9/mcp");
        spec.headers = [(name.to_owned(), value.into())].into();
        let mut line = Dialed::new(spec);
        line.request(1, "initialize");
        let failure = line.failed(1).await;
        assert!(matches!(&failure.kind, FailureKind::BadAddress(why) if why.contains(name)), "{failure:?}");
        assert!(!failure.to_string().contains(SECRET), "{failure}");
        line.notify("notifications/cancelled");
        assert!(matches!(line.lost().await, FailureKind::BadAddress(_)));
    }
}
