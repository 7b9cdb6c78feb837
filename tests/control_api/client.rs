//! A minimal HTTP client: one connection per request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;

#[derive(Debug, Clone)]
pub(crate) struct ApiClient {
    pub(crate) address: String,
    /// Header lines of every request, each with its line break.
    headers: String,
}

#[derive(Debug)]
pub(crate) struct ApiResponse {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl ApiResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let line = |line: &&str| line.split_once(':').is_some_and(|(key, _)| key.eq_ignore_ascii_case(name));
        self.head.lines().find(line)?.split_once(':').map(|(_, value)| value.trim())
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    pub(crate) fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    /// Asserts that the response is a problem document of this status and kind, and returns it.
    #[track_caller]
    pub(crate) fn problem(self, status: u16, kind: &str) -> Value {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!((self.status, problem["kind"].as_str()), (status, Some(kind)), "{self:?}");
        assert_eq!(problem["status"], status);
        assert_eq!(problem["type"], format!("urn:mcp-satellite:problem:{kind}"));
        problem
    }
}

impl ApiClient {
    pub(crate) fn new(address: &str) -> Self {
        Self { address: address.to_owned(), headers: String::new() }
    }

    pub(crate) fn with_token(&self, token: &str) -> Self {
        self.with_header("Authorization", &format!("Bearer {token}"))
    }

    pub(crate) fn with_header(&self, name: &str, value: &str) -> Self {
        Self { headers: format!("{}{name}: {value}\r\n", self.headers), ..self.clone() }
    }

    pub(crate) fn get(&self, path: &str) -> ApiResponse {
        self.send("GET", path, None)
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> ApiResponse {
        self.with_header("Content-Type", "application/json").send("POST", path, Some(&body.to_string()))
    }

    pub(crate) fn send(&self, method: &str, path: &str, body: Option<&str>) -> ApiResponse {
        let mut text = String::new();
        self.open(method, path, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            join_chunks(body)
        } else {
            body.into()
        };
        ApiResponse { status, head: head.to_owned(), body }
    }

    /// Sends a request and returns the connection.
    pub(crate) fn open(&self, method: &str, path: &str, body: Option<&str>) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let (address, headers, body) = (&self.address, &self.headers, body.unwrap_or_default());
        let host = if headers.contains("Host:") { String::new() } else { format!("Host: {address}\r\n") };
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    /// Returns the status of a response over TLS; `None` if the listener has another certificate, or no TLS.
    pub(crate) fn tls_status(&self, certificate: &CertificateDer<'static>, path: &str) -> Option<u16> {
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(roots).with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut stream = StreamOwned::new(connection, TcpStream::connect(&self.address).unwrap());
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut head = String::new();
        BufReader::new(stream).read_line(&mut head).ok()?;
        head.split(' ').nth(1)?.parse().ok()
    }

    /// Opens a stream of server-sent events.
    pub(crate) fn events(&self, path: &str) -> EventStream {
        let stream = self.with_header("Accept", "text/event-stream").open("GET", path, None);
        let mut lines = EventStream { lines: BufReader::new(stream) };
        let status = lines.line().unwrap();
        assert!(status.contains(" 200 "), "{status}");
        while !lines.line().unwrap().is_empty() {}
        lines
    }
}

fn join_chunks(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        whole.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
        if size == 0 {
            break;
        }
    }
    whole
}

pub(crate) struct EventStream {
    lines: BufReader<TcpStream>,
}

impl EventStream {
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.lines.read_line(&mut line).ok()?;
        (read > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned())
    }

    /// Reads until the stream ends.
    pub(crate) fn wait_end(mut self) {
        while self.line().is_some() {}
    }

    /// Returns id and data of the next event; `None` at the end of the stream.
    pub(crate) fn next(&mut self) -> Option<(String, Value)> {
        let mut id = String::new();
        loop {
            // Sizes of chunks and comments are skipped.
            let line = self.line()?;
            if let Some(text) = line.strip_prefix("id: ") {
                text.clone_into(&mut id);
            } else if let Some(data) = line.strip_prefix("data: ") {
                return Some((id, serde_json::from_str(data).unwrap()));
            }
        }
    }
}
