//! A scripted endpoint, and a client of the bridge. The test answers every HTTP request itself.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::channel::mpsc as frames;
use futures::future::BoxFuture;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mcp_satellite_bridge::{BridgeSettings, LocateError, SatelliteAddress, SatelliteLocator};
use mcp_satellite_protocol::header;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, DuplexStream, Lines, duplex};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

/// Limit of every wait; it only bounds a failure.
const GIVE_UP: Duration = Duration::from_secs(120);
const PIPE: usize = 1 << 20;

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// An HTTP request of the bridge that the test answers.
pub(crate) struct BridgeRequest {
    pub(crate) method: Method,
    pub(crate) headers: HeaderMap,
    /// Message in the body; null if there is none.
    pub(crate) message: Value,
    reply: oneshot::Sender<Response<Body>>,
}

impl BridgeRequest {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    #[track_caller]
    pub(crate) fn assert_calls(&self, method: &str) {
        assert_eq!(self.message["method"], method, "{:#}", self.message);
    }

    pub(crate) fn answer_status(self, status: u16, headers: &[(&'static str, &str)], body: &Value) {
        let text = if body.is_null() { String::new() } else { body.to_string() };
        let mut response = Response::new(Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        response.headers_mut().insert("content-type", "application/json".parse().unwrap());
        for (name, value) in headers {
            response.headers_mut().insert(*name, value.parse().unwrap());
        }
        // An error means that the bridge has given up the request.
        let _ = self.reply.send(response);
    }

    pub(crate) fn accept(self) {
        self.answer_status(202, &[], &Value::Null);
    }

    /// Answers a request of the client with a result.
    pub(crate) fn answer_result(self, result: &Value) {
        let body = json!({"jsonrpc": "2.0", "id": self.message["id"], "result": result});
        self.answer_status(200, &[], &body);
    }

    /// Answers `initialize`.
    pub(crate) fn answer_initialize(self, session: &str, capabilities: &Value) {
        let result = json!({"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": {"name": "scripted", "version": "1"}});
        let body = json!({"jsonrpc": "2.0", "id": self.message["id"], "result": result});
        self.answer_status(200, &[(header::SESSION_ID, session)], &body);
    }

    /// Answers with an event stream, which ends when the value is dropped.
    pub(crate) fn answer_stream(self) -> ScriptedStream {
        let (events, stream) = frames::unbounded::<Result<Frame<Bytes>, std::io::Error>>();
        let mut response = Response::new(StreamBody::new(stream).boxed_unsync());
        response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
        let _ = self.reply.send(response);
        ScriptedStream(events)
    }
}

pub(crate) struct ScriptedStream(frames::UnboundedSender<Result<Frame<Bytes>, std::io::Error>>);

impl ScriptedStream {
    pub(crate) fn send(&self, id: &str, message: &Value) {
        self.send_text(&format!("id: {id}\ndata: {message}\n\n"));
    }

    pub(crate) fn send_text(&self, text: &str) {
        self.0.unbounded_send(Ok(Frame::data(Bytes::from(text.to_owned())))).unwrap();
    }

    /// Ends the stream in the middle of the response, as a lost connection does.
    pub(crate) fn break_off(self) {
        self.0.unbounded_send(Err(std::io::ErrorKind::ConnectionReset.into())).unwrap();
    }
}

/// A scripted endpoint. Dropping it closes its port and all connections.
pub(crate) struct ScriptedEndpoint {
    pub(crate) address: SocketAddr,
    requests: mpsc::UnboundedReceiver<BridgeRequest>,
    server: JoinHandle<()>,
}

impl ScriptedEndpoint {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, requests) = mpsc::unbounded_channel();
        let server = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let sender = sender.clone();
                let service = service_fn(move |request| pass_to_test(sender.clone(), request));
                connections.spawn(async move {
                    // The bridge may close a connection at any time.
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, requests, server }
    }

    /// Returns the next request.
    pub(crate) async fn next(&mut self) -> BridgeRequest {
        let next = timeout(GIVE_UP, self.requests.recv()).await;
        next.unwrap_or_else(|_| panic!("the bridge sends no request")).unwrap()
    }

    /// Returns the next POST with this method of MCP.
    pub(crate) async fn next_call(&mut self, method: &str) -> BridgeRequest {
        let request = self.next().await;
        request.assert_calls(method);
        request
    }

    /// Returns the next request for the stream of a session.
    pub(crate) async fn next_get(&mut self) -> BridgeRequest {
        let request = self.next().await;
        assert_eq!(request.method, Method::GET, "{:#}", request.message);
        request
    }

    /// Returns a request that has arrived already.
    pub(crate) fn try_next(&mut self) -> Option<BridgeRequest> {
        self.requests.try_recv().ok()
    }

    /// Opens a session for the client, and returns the request for its stream, unanswered.
    pub(crate) async fn open_session(&mut self, client: &mut BridgeClient, capabilities: &Value) -> BridgeRequest {
        client.send(&initialize()).await;
        self.next_call("initialize").await.answer_initialize("first", capabilities);
        assert_eq!(client.next().await["id"], "init");
        let stream = self.next_get().await;
        client.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await;
        let initialized = self.next_call("notifications/initialized").await;
        assert_eq!(initialized.header(header::SESSION_ID), Some("first"));
        initialized.accept();
        stream
    }
}

impl Drop for ScriptedEndpoint {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn pass_to_test(
    sender: mpsc::UnboundedSender<BridgeRequest>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let message = serde_json::from_slice(&body).unwrap_or_default();
    let (reply, response) = oneshot::channel();
    let request = BridgeRequest { method: parts.method, headers: parts.headers, message, reply };
    // An error means that the test is over.
    let _ = sender.send(request);
    Ok(response.await.unwrap_or_default())
}

pub(crate) fn initialize() -> Value {
    let params =
        json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}});
    json!({"jsonrpc": "2.0", "id": "init", "method": "initialize", "params": params})
}

/// Address of the endpoint that the bridge finds; none is an error.
#[derive(Clone, Default)]
pub(crate) struct KnownAddress(Arc<Mutex<Option<SocketAddr>>>);

impl KnownAddress {
    pub(crate) fn set(&self, endpoint: &ScriptedEndpoint) {
        *self.0.lock().unwrap() = Some(endpoint.address);
    }
}

impl SatelliteLocator for KnownAddress {
    fn locate(&self) -> BoxFuture<'_, Result<SatelliteAddress, LocateError>> {
        let address = *self.0.lock().unwrap();
        let found = address.map(|address| SatelliteAddress {
            address,
            host: address.to_string(),
            token: Some("sat_token".to_owned().into()),
            certificate: None,
        });
        async { found.ok_or_else(|| LocateError("no satellite is running".to_owned())) }.boxed()
    }
}

/// A client, and the bridge that it has started.
pub(crate) struct BridgeClient {
    input: Option<DuplexStream>,
    output: Lines<BufReader<DuplexStream>>,
    reports: Arc<Mutex<Vec<String>>>,
    bridge: JoinHandle<()>,
}

impl BridgeClient {
    pub(crate) fn start(known: &KnownAddress) -> Self {
        let (input, bridge_input) = duplex(PIPE);
        let (bridge_output, output) = duplex(PIPE);
        let reports = Arc::<Mutex<Vec<String>>>::default();
        let sink = reports.clone();
        let report = move |message: &str| sink.lock().unwrap().push(message.to_owned());
        let settings = BridgeSettings { path: "/mcp".to_owned(), report: Box::new(report) };
        let locator = Box::new(known.clone());
        let bridge = tokio::spawn(async move {
            mcp_satellite_bridge::run(settings, locator, bridge_input, bridge_output, std::future::pending()).await;
        });
        Self { input: Some(input), output: BufReader::new(output).lines(), reports, bridge }
    }

    pub(crate) async fn send(&mut self, message: &Value) {
        self.send_text(&format!("{message}\n")).await;
    }

    pub(crate) async fn send_text(&mut self, text: &str) {
        self.send_bytes(text.as_bytes()).await;
    }

    pub(crate) async fn send_bytes(&mut self, bytes: &[u8]) {
        self.input.as_mut().unwrap().write_all(bytes).await.unwrap();
    }

    /// Returns the next message of the bridge.
    pub(crate) async fn next(&mut self) -> Value {
        let line = timeout(GIVE_UP, self.output.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("no message; reports: {:?}", self.reports.lock().unwrap()));
        serde_json::from_str(&line.unwrap().unwrap_or_else(|| panic!("the bridge has ended"))).unwrap()
    }

    /// Closes the input and returns the messages up to the end of the bridge.
    pub(crate) async fn close(mut self) -> Vec<Value> {
        drop(self.input.take());
        let mut rest = Vec::new();
        loop {
            let line = timeout(GIVE_UP, self.output.next_line()).await;
            match line.unwrap_or_else(|_| panic!("the bridge does not end")).unwrap() {
                Some(line) => rest.push(serde_json::from_str(&line).unwrap()),
                None => break,
            }
        }
        self.bridge.await.unwrap();
        rest
    }

    pub(crate) fn reports(&self) -> Vec<String> {
        self.reports.lock().unwrap().clone()
    }
}
