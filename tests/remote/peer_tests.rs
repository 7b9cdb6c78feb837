//! Tests of the scripted peer, with a plain HTTP client.

use std::io;
use std::sync::Once;
use std::time::Duration;

use futures::StreamExt;
use reqwest::{Client, ClientBuilder, Response, StatusCode, redirect};
use serde_json::{Value, json};
use testkit::wait::GIVE_UP;
use tokio::time::timeout;

use super::peer::{Action, Expiry, Peer, ResponseFormat, When};

fn builder() -> ClientBuilder {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| rustls::crypto::ring::default_provider().install_default().unwrap());
    Client::builder().no_proxy().redirect(redirect::Policy::none())
}

fn client() -> Client {
    builder().build().unwrap()
}

/// A client after the handshake.
struct TestClient<'a> {
    peer: &'a Peer,
    client: Client,
    session: Option<String>,
}

impl<'a> TestClient<'a> {
    async fn new(peer: &'a Peer) -> Self {
        let mut test_client = Self { peer, client: client(), session: None };
        let answer =
            test_client.post(&request(1, "initialize", &json!({"protocolVersion": "2025-11-25"}))).await.unwrap();
        test_client.session = answer.headers().get("mcp-session-id").map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(message(answer).await["result"]["serverInfo"]["name"], "peer");
        let done = test_client.post(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await.unwrap();
        assert_eq!(done.status(), StatusCode::ACCEPTED);
        test_client
    }

    async fn post(&self, body: &Value) -> reqwest::Result<Response> {
        let session = self.session.iter().map(|session| ("mcp-session-id", session));
        let request = self.client.post(self.peer.url()).body(body.to_string());
        session.fold(request, |request, (name, value)| request.header(name, value)).send().await
    }

    async fn call(&self, tool: &str) -> reqwest::Result<Response> {
        self.post(&request(2, "tools/call", &json!({"name": tool, "arguments": {"text": "hello"}}))).await
    }

    async fn http(&self, method: reqwest::Method) -> reqwest::Result<Response> {
        let session = self.session.clone().unwrap();
        self.client.request(method, self.peer.url()).header("mcp-session-id", session).send().await
    }
}

fn request(id: u64, method: &str, params: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

/// Returns the message of a response in either format.
async fn message(answer: Response) -> Value {
    let text = answer.text().await.unwrap();
    let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap_or(&text);
    serde_json::from_str(data).unwrap()
}

/// Returns the `data` of the next event of a stream. Each event must fit into one packet.
async fn next_data(stream: &mut (impl StreamExt<Item = reqwest::Result<bytes::Bytes>> + Unpin)) -> Option<String> {
    let chunk = timeout(GIVE_UP, stream.next()).await.unwrap()?.unwrap();
    let text = String::from_utf8(chunk.to_vec()).unwrap();
    Some(text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap().to_owned())
}

/// Returns the kind of the system error that caused an error.
fn os_error(error: &(dyn std::error::Error + 'static)) -> Option<io::ErrorKind> {
    let mut error = Some(error);
    while let Some(here) = error {
        if let Some(found) = here.downcast_ref::<io::Error>().filter(|found| found.raw_os_error().is_some()) {
            return Some(found.kind());
        }
        error = here.source();
    }
    None
}

#[tokio::test]
async fn the_peer_is_a_complete_server_in_both_response_formats() {
    for format in [ResponseFormat::Json, ResponseFormat::Sse] {
        let peer = Peer::start().await;
        peer.configure(|behavior| behavior.format = format);
        let test_client = TestClient::new(&peer).await;
        let result = async |method: &str, params: Value| {
            message(test_client.post(&request(3, method, &params)).await.unwrap()).await["result"].clone()
        };
        let tools = result("tools/list", json!({})).await;
        let named: Vec<(&str, bool)> = tools["tools"].as_array().unwrap().iter().map(named_and_read_only).collect();
        assert_eq!(named, [("echo", false), ("read", true), ("sleep", false)]);
        assert_eq!(message(test_client.call("echo").await.unwrap()).await["result"]["content"][0]["text"], "hello");
        assert_eq!(result("ping", json!({})).await, json!({}));
        assert_eq!(result("resources/list", json!({})).await["resources"][0]["uri"], "peer://one");
        assert_eq!(result("resources/read", json!({"uri": "peer://one"})).await["contents"][0]["text"], "one");
        assert_eq!(result("prompts/list", json!({})).await["prompts"][0]["name"], "greet");
        assert!(result("resources/templates/list", json!({})).await["resourceTemplates"][0].is_object());
        assert!(result("prompts/get", json!({"name": "greet"})).await["messages"][0].is_object());
        let unknown = message(test_client.post(&request(4, "tools/dance", &json!({}))).await.unwrap()).await;
        assert_eq!(unknown["error"]["code"], -32601);
        assert_eq!(peer.executed("echo"), 1);
        assert_eq!(client().get(peer.health_url()).send().await.unwrap().status(), StatusCode::OK);
    }
}

fn named_and_read_only(tool: &Value) -> (&str, bool) {
    (tool["name"].as_str().unwrap(), tool["annotations"]["readOnlyHint"] == true)
}

#[tokio::test]
async fn the_peer_keeps_sessions_until_they_are_deleted_or_forgotten() {
    let peer = Peer::start().await;
    let mut test_client = TestClient::new(&peer).await;
    assert_eq!(test_client.session.as_deref(), Some("session-1"));
    assert_eq!(peer.sessions(), 1);
    assert_eq!(test_client.http(reqwest::Method::DELETE).await.unwrap().status(), StatusCode::OK);
    assert_eq!(peer.sessions(), 0);
    assert_eq!(test_client.call("echo").await.unwrap().status(), StatusCode::NOT_FOUND);
    peer.configure(|behavior| behavior.expiry = Expiry::BadRequest);
    let answer = test_client.call("echo").await.unwrap();
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    assert_eq!(message(answer).await["id"], Value::Null);
    test_client.session = None;
    assert_eq!(test_client.call("echo").await.unwrap().status(), StatusCode::BAD_REQUEST);
    assert_eq!(peer.executed("echo"), 0);
    peer.configure(|behavior| behavior.deletes = false);
    let test_client = TestClient::new(&peer).await;
    assert_eq!(test_client.http(reqwest::Method::DELETE).await.unwrap().status(), StatusCode::METHOD_NOT_ALLOWED);
    peer.forget_sessions();
    assert_eq!(test_client.call("echo").await.unwrap().status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn the_peer_notifies_open_streams_and_counts_closed_ones() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    let mut stream = test_client.http(reqwest::Method::GET).await.unwrap().bytes_stream();
    peer.until("a stream is open", |log| log.streams == 1).await;
    peer.list_changed("tools");
    assert!(next_data(&mut stream).await.unwrap().contains("notifications/tools/list_changed"));
    peer.end_streams();
    assert_eq!(next_data(&mut stream).await, None);
    peer.until("the stream is closed", |log| log.streams == 0).await;

    let stream = test_client.http(reqwest::Method::GET).await.unwrap();
    peer.until("a stream is open", |log| log.streams == 1).await;
    drop((stream, test_client));
    peer.until("all connections are closed", |log| log.streams == 0 && log.connections == 0).await;
}

#[tokio::test]
async fn the_peer_serves_the_older_transport() {
    let peer = Peer::start().await;
    let client = client();
    let mut stream = client.get(peer.sse_url()).send().await.unwrap().bytes_stream();
    let endpoint = next_data(&mut stream).await.unwrap();
    let post = async |body: Value| {
        client.post(format!("{}{endpoint}", peer.origin())).body(body.to_string()).send().await.unwrap().status()
    };
    assert_eq!(post(request(1, "initialize", &json!({"protocolVersion": "2024-11-05"}))).await, StatusCode::ACCEPTED);
    assert!(next_data(&mut stream).await.unwrap().contains("serverInfo"));
    let call = request(2, "tools/call", &json!({"name": "echo", "arguments": {"text": "hello"}}));
    assert_eq!(post(call).await, StatusCode::ACCEPTED);
    assert!(next_data(&mut stream).await.unwrap().contains("hello"));
    peer.list_changed("prompts");
    assert!(next_data(&mut stream).await.unwrap().contains("notifications/prompts/list_changed"));
    drop(stream);
    peer.until("the stream is closed", |log| log.streams == 0).await;
    assert_eq!(post(request(3, "ping", &json!({}))).await, StatusCode::NOT_FOUND);
    assert_eq!(peer.sessions(), 0);
}

#[tokio::test]
async fn the_peer_records_all_requests() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    test_client.call("echo").await.unwrap();
    let sent = client().get(format!("{}?key=k", peer.url())).header("X-Key", "v").send().await.unwrap();
    assert_eq!(sent.status(), StatusCode::BAD_REQUEST);
    peer.log(|log| {
        let what: Vec<String> = log.requests.iter().map(super::peer::Record::label).collect();
        assert_eq!(what, ["initialize", "notifications/initialized", "tools/call echo", "GET /mcp"]);
        assert_eq!((log.rpc("initialize"), log.calls("echo"), log.http("GET")), (1, 1, 1));
        assert_eq!((log.initializing, log.initializing_max), (0, 1));
        let sessions: Vec<_> = log.requests.iter().map(|record| record.session.as_deref()).collect();
        assert_eq!(sessions, [None, Some("session-1"), Some("session-1"), None]);
        let connections: Vec<usize> = log.requests.iter().map(|record| record.connection).collect();
        assert_eq!(connections, [1, 1, 1, 2]);
        let last = log.requests.last().unwrap();
        assert_eq!((last.query.as_deref(), last.header("x-key")), (Some("key=k"), Some("v")));
    });
}

#[tokio::test]
async fn the_peer_follows_its_script_by_request_and_by_count() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    peer.on_next(2, When::tool("echo"), Action::status_with(429, "retry-after", "7"));
    peer.on(When::tool("read"), Action::html());
    peer.on(When::rpc("ping"), Action::RpcError { code: -32601, message: "Method not found" });
    peer.on(When::path("/health"), Action::status(503));
    peer.on(When::http("DELETE"), Action::expired_400());
    for _ in 0..2 {
        let answer = test_client.call("echo").await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.headers()["retry-after"].to_str().unwrap()), (429, "7"));
    }
    assert_eq!(test_client.call("echo").await.unwrap().status(), StatusCode::OK);
    let page = test_client.call("read").await.unwrap();
    assert_eq!(page.headers()["content-type"], "text/html; charset=utf-8");
    let pinged = message(test_client.post(&request(9, "ping", &json!({}))).await.unwrap()).await;
    assert_eq!((&pinged["id"], &pinged["error"]["code"]), (&json!(9), &json!(-32601)));
    assert_eq!(client().get(peer.health_url()).send().await.unwrap().status().as_u16(), 503);
    let expired = test_client.http(reqwest::Method::DELETE).await.unwrap();
    assert_eq!(expired.status(), StatusCode::BAD_REQUEST);
    assert_eq!(message(expired).await["id"], Value::Null);
    assert_eq!((peer.executed("echo"), peer.executed("read")), (1, 0));
    peer.heal().await;
    assert_eq!(test_client.call("read").await.unwrap().status(), StatusCode::OK);

    peer.on(When::any(), Action::status(500));
    assert_eq!(test_client.call("read").await.unwrap().status().as_u16(), 500);
}

#[tokio::test]
async fn the_peer_requires_the_configured_credentials() {
    let peer = Peer::start().await;
    peer.configure(|behavior| behavior.required_authorization = Some("Bearer right"));
    let ask = async |token: &str| {
        let body = request(1, "initialize", &json!({})).to_string();
        client().post(peer.url()).bearer_auth(token).body(body).send().await.unwrap()
    };
    let refused = ask("wrong").await;
    assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(refused.headers()["www-authenticate"], "Bearer realm=\"peer\"");
    assert_eq!(ask("right").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_closed_peer_refuses_connections_and_keeps_its_port() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    peer.close().await;
    peer.until("all connections are closed", |log| log.connections == 0).await;
    let refused = test_client.call("echo").await.unwrap_err();
    assert!(refused.is_connect());
    assert_eq!(os_error(&refused), Some(io::ErrorKind::ConnectionRefused));
    peer.open().await;
    assert_eq!(test_client.call("echo").await.unwrap().status(), StatusCode::OK);
    peer.restart().await;
    assert_eq!(test_client.call("echo").await.unwrap().status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_connection_to_a_full_peer_times_out() {
    let peer = Peer::start().await;
    peer.fill().await;
    let client = builder().connect_timeout(Duration::from_millis(100)).build().unwrap();
    for _ in 0..3 {
        let never = client.get(peer.health_url()).send().await.unwrap_err();
        assert!(never.is_connect() && never.is_timeout(), "{never:?}");
    }
    peer.heal().await;
    assert_eq!(client.get(peer.health_url()).send().await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_client_rejects_the_self_signed_certificate_of_the_peer() {
    let peer = Peer::start_tls().await;
    let distrust = client().get(peer.health_url()).send().await.unwrap_err();
    assert!(distrust.is_connect(), "{distrust:?}");
    peer.until("the connection is counted as malformed", |log| log.malformed == 1).await;
    let trusting = builder().danger_accept_invalid_certs(true).build().unwrap();
    assert_eq!(trusting.get(peer.health_url()).send().await.unwrap().status(), StatusCode::OK);

    let plain = Peer::start().await;
    let confused = client().get(plain.health_url().replace("http:", "https:")).send().await.unwrap_err();
    assert!(confused.is_connect(), "{confused:?}");
    plain.until("the connection is counted as malformed", |log| log.malformed == 1).await;
}

#[tokio::test]
async fn a_silent_peer_never_responds_and_notices_a_client_that_gives_up() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    peer.on(When::tool("echo"), Action::Silence);
    let waiting = timeout(Duration::from_millis(50), test_client.call("echo")).await;
    assert!(waiting.is_err());
    peer.until("the connection is closed", |log| log.calls("echo") == 1 && log.connections == 0).await;
    peer.on(When::tool("read"), Action::HangUp);
    assert!(!test_client.call("read").await.unwrap_err().is_connect());
}

#[tokio::test]
async fn the_tool_sleep_responds_after_its_release() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    assert!(timeout(Duration::from_millis(50), test_client.call("sleep")).await.is_err());
    peer.until("the connection is closed", |log| log.calls("sleep") == 1 && log.connections == 0).await;
    assert_eq!(peer.executed("sleep"), 0);
    let release = async {
        peer.until("the second call is received", |log| log.calls("sleep") == 2).await;
        peer.release();
    };
    let (answer, ()) = tokio::join!(test_client.call("sleep"), release);
    assert_eq!(answer.unwrap().status(), StatusCode::OK);
    assert_eq!(peer.executed("sleep"), 1);
}

#[tokio::test]
async fn a_frozen_peer_neither_responds_nor_closes_until_it_thaws() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    peer.freeze();
    assert!(timeout(Duration::from_millis(50), test_client.call("echo")).await.is_err());
    peer.log(|log| {
        assert_eq!((log.calls("echo"), log.connections), (0, 1), "a request was read or a connection was closed");
    });
    peer.thaw();
    assert_eq!(test_client.call("echo").await.unwrap().status(), StatusCode::OK);

    peer.on(When::tool("read"), Action::Freeze);
    assert!(timeout(Duration::from_millis(50), test_client.call("read")).await.is_err());
    assert!(timeout(Duration::from_millis(50), test_client.call("echo")).await.is_err());
    peer.heal().await;
    assert_eq!(test_client.call("read").await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_peer_that_dies_during_a_request_can_be_restarted() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    peer.on(When::tool("echo"), Action::Die);
    assert!(!test_client.call("echo").await.unwrap_err().is_connect());
    peer.until("all connections are closed", |log| log.connections == 0).await;
    peer.heal().await;
    assert_eq!(test_client.call("echo").await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn the_peer_sends_cut_garbled_slow_and_endless_responses() {
    let peer = Peer::start().await;
    let test_client = TestClient::new(&peer).await;
    let hello = "hello";

    for form in [ResponseFormat::Json, ResponseFormat::Sse] {
        peer.on_next(1, When::tool("echo"), Action::Cut(form));
        let cut = test_client.call("echo").await.unwrap();
        assert_eq!(cut.status(), StatusCode::OK);
        assert!(cut.text().await.is_err(), "{form:?}");
    }
    assert_eq!(peer.executed("echo"), 2, "a request with a cut response was not executed");

    peer.on_next(1, When::tool("echo"), Action::GarbageSse);
    let garbage = test_client.call("echo").await.unwrap();
    assert_eq!(garbage.headers()["content-type"], "text/event-stream");
    assert!(String::from_utf8_lossy(&garbage.bytes().await.unwrap()).contains("{not json"));

    peer.on_next(1, When::tool("echo"), Action::Drip { pause: Duration::from_micros(100) });
    assert!(test_client.call("echo").await.unwrap().text().await.unwrap().contains(hello));

    peer.on_next(1, When::tool("echo"), Action::DripForever { pause: Duration::from_millis(1) });
    let mut drops = test_client.call("echo").await.unwrap().bytes_stream();
    for _ in 0..5 {
        assert_eq!(drops.next().await.unwrap().unwrap(), ": alive\n".as_bytes());
    }
    drop(drops);

    for form in [ResponseFormat::Json, ResponseFormat::Sse] {
        peer.on_next(1, When::tool("echo"), Action::EndlessLine(form));
        let mut endless = test_client.call("echo").await.unwrap().bytes_stream();
        let mut length = 0;
        while length < 1 << 20 {
            let part = endless.next().await.unwrap().unwrap();
            assert!(!part.contains(&b'\n'));
            length += part.len();
        }
    }
    peer.until("the client has closed the connection", |log| log.endless >= 2 << 20 && log.connections <= 1).await;
}

#[tokio::test]
async fn the_peer_names_any_address_in_the_endpoint_event() {
    let peer = Peer::start().await;
    peer.on(When::path("/sse"), Action::Endpoint("https://elsewhere.invalid/message".to_owned()));
    let mut stream = client().get(peer.sse_url()).send().await.unwrap().bytes_stream();
    assert_eq!(next_data(&mut stream).await.unwrap(), "https://elsewhere.invalid/message");
}
