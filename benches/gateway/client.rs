//! Minimal HTTP client with its own connection. It does as little as possible, because it shares the CPU with the
//! gateway.

use bytes::Bytes;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::common::TIMEOUT;

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"0"}}}"#;
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

pub(crate) struct BenchClient {
    stream: BufReader<TcpStream>,
    host: String,
    head: String,
    call: Bytes,
    body: Vec<u8>,
}

struct HttpResponse {
    status: u16,
    session: Option<String>,
}

impl BenchClient {
    /// Connects and initializes a session. `call` is the body of every call.
    pub(crate) async fn open(url: &str, call: String) -> Self {
        let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
        let head = format!(
            "POST /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n\
             accept: application/json, text/event-stream\r\nmcp-protocol-version: 2025-11-25\r\n"
        );
        let stream = connect(host).await;
        let mut client = Self { stream, host: host.to_owned(), head, call: Bytes::new(), body: Vec::new() };
        let response = client.post(&client.request(INITIALIZE)).await;
        assert_eq!(response.status, 200, "{}", client.body_text());
        let session = response.session.unwrap();
        client.head.extend(["mcp-session-id: ", &session, "\r\n"]);
        let response = client.post(&client.request(INITIALIZED)).await;
        assert_eq!(response.status, 202, "{}", client.body_text());
        client.call = client.request(&call).into();
        client
    }

    /// Opens a new connection for the same session: the gateway may have closed the idle connection.
    pub(crate) async fn reconnect(&mut self) {
        self.stream = connect(&self.host).await;
    }

    pub(crate) async fn call(&mut self) {
        let call = self.call.clone();
        let response = tokio::time::timeout(TIMEOUT, self.post(&call)).await.unwrap();
        assert_eq!(response.status, 200, "{}", self.body_text());
        assert!(memchr::memmem::find(&self.body, b"hello").is_some(), "{}", self.body_text());
    }

    /// Sends another request than the prepared call and returns the whole response.
    pub(crate) async fn send(&mut self, body: &str) -> &[u8] {
        let request = self.request(body);
        let response = tokio::time::timeout(TIMEOUT, self.post(&request)).await.unwrap();
        assert_eq!(response.status, 200, "{}", self.body_text());
        &self.body
    }

    fn body_text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn request(&self, body: &str) -> Vec<u8> {
        format!("{}content-length: {}\r\n\r\n{body}", self.head, body.len()).into_bytes()
    }

    async fn post(&mut self, request: &[u8]) -> HttpResponse {
        self.stream.get_mut().write_all(request).await.unwrap();
        let mut line = String::new();
        self.line(&mut line).await;
        let status = line.split(' ').nth(1).unwrap().parse().unwrap();
        let (mut length, mut chunked, mut session) = (0, false, None);
        loop {
            self.line(&mut line).await;
            let Some((name, value)) = line.split_once(": ") else { break };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.parse().unwrap();
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                chunked = true;
            } else if name.eq_ignore_ascii_case("mcp-session-id") {
                session = Some(value.to_owned());
            }
        }
        self.body.clear();
        if !chunked {
            self.read_body(length).await;
        }
        while chunked {
            self.line(&mut line).await;
            let length = usize::from_str_radix(&line, 16).unwrap();
            self.read_body(length).await;
            self.line(&mut line).await;
            chunked = length > 0;
        }
        HttpResponse { status, session }
    }

    async fn line(&mut self, line: &mut String) {
        line.clear();
        assert!(self.stream.read_line(line).await.unwrap() > 0, "the gateway closed the connection");
        line.truncate(line.trim_end().len());
    }

    async fn read_body(&mut self, length: usize) {
        let begin = self.body.len();
        self.body.resize(begin + length, 0);
        self.stream.read_exact(&mut self.body[begin..]).await.unwrap();
    }
}

async fn connect(host: &str) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(host).await.unwrap();
    stream.set_nodelay(true).unwrap();
    BufReader::new(stream)
}
