//! Random input for the parser and the endpoint: each gets a response or a closed connection, and nothing panics.
//! `PROPTEST_CASES` sets the number of cases; long runs use a hundred times as many.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use mcp_satellite::actors::rpc::{MessageKind, MessageView, RpcMessage};
use mcp_satellite::config::{GatewayLimits, GatewayPlan};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::client::Client;
use super::fake::FakeEndpoint;

/// Random JSON.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name(), inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// Member names: mostly names of the protocol.
fn name() -> impl Strategy<Value = String> {
    let known = [
        "jsonrpc",
        "id",
        "method",
        "params",
        "result",
        "error",
        "_meta",
        "progressToken",
        "requestId",
        "name",
        "protocolVersion",
        "capabilities",
        "clientInfo",
        "sampling",
        "version",
        "code",
        "message",
        "notifications",
        "requestState",
        "inputResponses",
        "io.modelcontextprotocol/protocolVersion",
        "io.modelcontextprotocol/clientCapabilities",
        "io.modelcontextprotocol/logLevel",
    ];
    prop_oneof![3 => select(known.to_vec()).prop_map(str::to_owned), 1 => ".{0,6}"]
}

/// A plausible message. It is text, because members may be duplicated.
fn message() -> impl Strategy<Value = String> {
    let methods = [
        "initialize",
        "ping",
        "echo",
        "chat",
        "tools/call",
        "notifications/initialized",
        "notifications/cancelled",
        "notifications/progress",
        "server/discover",
        "subscriptions/listen",
        "shout",
        "\u{1f980}",
    ];
    let method = select(methods.to_vec()).prop_map(Value::from);
    let member = prop_oneof![
        4 => Just(("jsonrpc".to_owned(), json!("2.0"))),
        4 => method.prop_map(|method| ("method".to_owned(), method)),
        2 => any::<i8>().prop_map(|id| ("id".to_owned(), json!(id))),
        3 => (name(), value()),
        2 => value().prop_map(|params| ("params".to_owned(), params)),
    ];
    let spaces = select(&["", " ", "\r\n", "\t"][..]);
    (prop::collection::vec(member, 0..7), spaces).prop_map(|(members, space)| {
        let members = members.iter().map(|(name, value)| format!("{}{space}:{value}", Value::from(name.as_str())));
        format!("{{{space}{}}}", members.collect::<Vec<_>>().join(&format!(",{space}")))
    })
}

/// The bytes of a message, often damaged.
fn text() -> impl Strategy<Value = Vec<u8>> {
    let broken = (message(), any::<Index>(), any::<u8>()).prop_map(|(message, at, byte)| {
        let mut bytes = message.into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        bytes
    });
    prop_oneof![
        4 => message().prop_map(String::into_bytes),
        2 => broken,
        1 => (message(), any::<Index>()).prop_map(|(message, end)| message.as_bytes()[..end.index(message.len())].to_vec()),
        1 => prop::collection::vec(message(), 0..4).prop_map(|all| format!("[{}]", all.join(",")).into_bytes()),
        1 => value().prop_map(|value| value.to_string().into_bytes()),
        1 => prop::collection::vec(any::<u8>(), 0..64),
        1 => (1_usize..4000).prop_map(|depth| format!("{{\"params\":{}", "[".repeat(depth)).into_bytes()),
    ]
}

proptest! {
    #[test]
    fn the_message_parser_agrees_with_serde_json_on_any_bytes(bytes in text()) {
        let read = RpcMessage::parse(Bytes::copy_from_slice(&bytes));
        let viewed = std::str::from_utf8(&bytes).ok().map(MessageView::parse);
        prop_assert_eq!(read.is_ok(), viewed.is_some_and(|viewed| viewed.is_ok()));
        let Ok(message) = read else { return Ok(()) };
        prop_assert_eq!(message.text().as_bytes(), &bytes);
        // `Value` cannot represent everything that the parser accepts.
        let Ok(value) = serde_json::from_slice::<Value>(&bytes) else { return Ok(()) };
        let part = |text: Option<&str>| text.map(|text| serde_json::from_str::<Value>(text).unwrap());
        let there = |name: &str| value.get(name).filter(|value| !value.is_null()).cloned();
        prop_assert_eq!(part(message.id()), there("id"));
        prop_assert_eq!(message.method().map(Value::from), there("method"));
        prop_assert_eq!(part(message.params()), value.get("params").cloned());
        prop_assert_eq!(message.kind() == MessageKind::Request, message.method().is_some() && message.id().is_some());
    }
}

/// The framing of a body.
#[derive(Debug, Clone)]
enum Length {
    Right,
    /// Wrong by so many bytes.
    Off(i8),
    Chunked(Vec<Index>),
    Garbage(&'static str),
    Both,
}

#[derive(Debug, Clone)]
struct Request {
    line: (&'static str, &'static str, &'static str),
    headers: Vec<(&'static str, &'static str)>,
    body: Vec<u8>,
    length: Length,
}

impl Request {
    fn bytes(&self, session: &str) -> Vec<u8> {
        let (method, path, version) = self.line;
        let mut bytes = format!("{method} {path} {version}\r\n").into_bytes();
        for (name, value) in &self.headers {
            bytes.extend(format!("{name}: {}\r\n", value.replace("SESSION", session)).into_bytes());
        }
        let size = self.body.len();
        match &self.length {
            Length::Right => bytes.extend(format!("content-length: {size}\r\n\r\n").into_bytes()),
            Length::Off(by) => {
                let size = size.saturating_add_signed(isize::from(*by));
                bytes.extend(format!("content-length: {size}\r\n\r\n").into_bytes());
            }
            Length::Garbage(value) => bytes.extend(format!("content-length: {value}\r\n\r\n").into_bytes()),
            Length::Both => {
                bytes.extend(format!("content-length: {size}\r\ntransfer-encoding: chunked\r\n\r\n").into_bytes());
            }
            Length::Chunked(cuts) => {
                bytes.extend(b"transfer-encoding: chunked\r\n\r\n");
                for piece in pieces(&self.body, cuts) {
                    bytes.extend(format!("{:x}\r\n", piece.len()).into_bytes());
                    bytes.extend(piece);
                    bytes.extend(b"\r\n");
                }
                bytes.extend(b"0\r\n\r\n");
                return bytes;
            }
        }
        bytes.extend(&self.body);
        bytes
    }
}

/// Cuts `bytes` at these places. No piece is empty.
fn pieces<'a>(bytes: &'a [u8], cuts: &[Index]) -> Vec<&'a [u8]> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    at.extend([0, bytes.len()]);
    at.sort_unstable();
    at.dedup();
    at.windows(2).map(|ends| &bytes[ends[0]..ends[1]]).collect()
}

/// The headers of a valid request.
const USUAL: [(&str, &str); 5] = [
    ("host", "localhost"),
    ("authorization", "Bearer alice-token"),
    ("content-type", "application/json"),
    ("accept", "application/json, text/event-stream"),
    ("mcp-session-id", "SESSION"),
];

/// Random requests. None starts a stream that never ends, because the test waits for the end of the connection.
fn http() -> impl Strategy<Value = Request> {
    let method = select(&["POST", "POST", "POST", "POST", "DELETE", "PUT", "OPTIONS", "HEAD", "G\u{e4}T", ""][..]);
    let paths = [
        "/mcp",
        "/mcp",
        "/mcp",
        "/mcp?mode=flat",
        "/mcp?mode=x",
        "/mcp?access_token=x",
        "/i/alices/mcp",
        "/i//mcp",
        "/i/a/b/mcp",
        "/.well-known/oauth-protected-resource/mcp",
        "/",
        "*",
        "http://localhost/mcp",
        "/%00",
        "mcp",
    ];
    let version = select(&["HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "x"][..]);
    let others = [
        ("host", "evil.example.com"),
        ("host", ""),
        ("authorization", "Bearer bob-token"),
        ("authorization", "Bearer "),
        ("content-type", "text/plain"),
        ("accept", "text/event-stream"),
        ("accept", ";;,q=0"),
        ("mcp-session-id", "0"),
        ("mcp-session-id", "\u{e4}"),
        ("mcp-protocol-version", "2025-06-18"),
        ("mcp-protocol-version", "x"),
        ("last-event-id", "0-0"),
        ("origin", "null"),
        ("expect", "100-continue"),
        ("connection", "close"),
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("bad header", "x"),
        ("x", "\u{0}"),
    ];
    let headers = (
        prop::collection::vec(prop::bool::weighted(0.95), USUAL.len()),
        prop::collection::vec(select(others.to_vec()), 0..2),
    );
    let headers = headers.prop_map(|(kept, more)| {
        let kept = USUAL.iter().zip(kept).filter(|(_, kept)| *kept).map(|(header, _)| *header);
        kept.chain(more).collect::<Vec<_>>()
    });
    let length = prop_oneof![
        6 => Just(Length::Right),
        2 => prop::collection::vec(any::<Index>(), 0..4).prop_map(Length::Chunked),
        1 => any::<i8>().prop_map(Length::Off),
        1 => select(&["x", "-1", "+1", "18446744073709551616", "1, 2", ""][..]).prop_map(Length::Garbage),
        1 => Just(Length::Both),
    ];
    ((method, select(paths.to_vec()), version), headers, text(), length)
        .prop_map(|(line, headers, body, length)| Request { line, headers, body, length })
}

/// The endpoint of all cases. Its panic hook counts panics in `PANICS`.
static ENDPOINT: LazyLock<(Runtime, FakeEndpoint)> = LazyLock::new(|| {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() == Some(SERVES) {
            PANICS.fetch_add(1, Ordering::Relaxed);
        }
        before(panic);
    }));
    let mut runtime = Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).thread_name(SERVES).enable_all().build().unwrap();
    let plan = super::fake::plan();
    let limits = GatewayLimits { requests_per_second: 0, ..plan.limits.clone() };
    let endpoint = runtime.block_on(async { FakeEndpoint::with(GatewayPlan { limits, ..plan }, |_| {}) });
    (runtime, endpoint)
});
static PANICS: AtomicUsize = AtomicUsize::new(0);
const SERVES: &str = "fuzzed";

/// The statuses of the responses in the received bytes. Bodies contain nothing that looks like a status line.
fn statuses(received: &[u8]) -> Vec<u16> {
    let text = String::from_utf8_lossy(received);
    text.split("HTTP/1.").skip(1).filter_map(|answer| answer.get(2..5)?.parse().ok()).collect()
}

/// Empty lines, which complete a body that is shorter than announced and are ignored otherwise, and a request that
/// closes the connection.
fn closing_request() -> Vec<u8> {
    let request = "GET /elsewhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    format!("{}{request}", "\r\n".repeat(64)).into_bytes()
}

proptest! {
    #[test]
    fn any_requests_get_a_response_or_a_closed_connection(
        requests in prop::collection::vec(http(), 1..5),
        cuts in prop::collection::vec(any::<Index>(), 0..6),
    ) {
        let (runtime, endpoint) = &*ENDPOINT;
        let (received, fine) = runtime.block_on(async {
            let good = Client::initialized(endpoint.address, "2025-11-25").await;
            let session = good.session.clone().unwrap();
            let mut bytes: Vec<u8> = requests.iter().flat_map(|request| request.bytes(&session)).collect();
            bytes.extend(closing_request());
            let mut stranger = Client::connect(endpoint.address).await;
            for piece in pieces(&bytes, &cuts) {
                if !stranger.try_send(piece).await {
                    break;
                }
            }
            let received = stranger.read_until_closed().await;
            let mut other = Client::initialized(endpoint.address, "2025-11-25").await;
            let fine = other.echo().await;
            other.ask("DELETE", &[], "").await;
            (received, fine)
        });
        prop_assert_eq!(fine, 200, "other clients are still served");
        prop_assert_eq!(PANICS.load(Ordering::Relaxed), 0);
        let mut counted: HashMap<u16, usize> = HashMap::new();
        for status in statuses(&received) {
            *counted.entry(status).or_default() += 1;
        }
        let known = [100, 200, 202, 204, 400, 401, 403, 404, 405, 406, 408, 411, 413, 414, 415, 429, 431, 503, 505];
        prop_assert!(counted.keys().all(|status| known.contains(status)), "{:?}", counted);
        let answered = counted.iter().filter(|(status, _)| **status != 100).map(|(_, count)| count).sum::<usize>();
        // The rest of a body that is longer than announced may be read as another request.
        prop_assert!(answered <= 2 * requests.len() + 2, "{:?}", counted);
        // With several requests, one may close the connection and thereby lose responses.
        let [only] = &requests[..] else { return Ok(()) };
        let is_whole = matches!(only.length, Length::Right | Length::Chunked(_));
        let usual = only.headers.iter().all(|header| USUAL.contains(header)) && only.headers.contains(&USUAL[0]);
        if is_whole && usual && only.line.0 == "POST" && only.line.1.starts_with('/') && only.line.2 == "HTTP/1.1" {
            prop_assert_eq!(answered, 2, "the request and the closing request each get a response");
        }
    }
}
