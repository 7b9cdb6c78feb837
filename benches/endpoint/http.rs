//! HTTP/1.1 client on one connection, with as little work as possible: requests are ready bytes, and of a response only
//! the status, the length of the body and the session id are parsed.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use memchr::memmem;
use serde::{Deserialize, Serialize};

use crate::common::TIMEOUT;

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"0"}}}"#;
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

pub(crate) struct HttpConnection {
    stream: TcpStream,
    input: Vec<u8>,
    filled: usize,
    head: Option<ResponseHead>,
}

struct ResponseHead {
    status: u16,
    session: Option<String>,
    /// Offset of the body. In a chunked body: offset of the next chunk.
    body: usize,
    /// Length of the body; `None` if it is chunked.
    length: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResponseState {
    Incomplete,
    Complete,
    /// The gateway has closed the connection before the end of the response.
    Closed,
}

impl HttpConnection {
    pub(crate) fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self { stream, input: vec![0; 4096], filled: 0, head: None }
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends a request and waits for its response. Returns the status.
    pub(crate) fn exchange(&mut self, request: &[u8]) -> u16 {
        self.stream.set_nonblocking(false).unwrap();
        self.send(request);
        loop {
            match self.receive() {
                ResponseState::Incomplete => {}
                ResponseState::Complete => return self.status(),
                ResponseState::Closed => panic!("the gateway closed the connection: {}", self.text()),
            }
        }
    }

    /// Sends a request and forgets the response before. A request fits into the empty buffer of a socket.
    pub(crate) fn send(&mut self, request: &[u8]) {
        self.filled = 0;
        self.head = None;
        assert_eq!(self.stream.write(request).unwrap(), request.len(), "the socket did not accept a request");
    }

    /// Reads once.
    pub(crate) fn receive(&mut self) -> ResponseState {
        if self.filled == self.input.len() {
            self.input.resize(2 * self.filled, 0);
        }
        match self.stream.read(&mut self.input[self.filled..]) {
            Ok(0) => return ResponseState::Closed,
            Ok(read) => self.filled += read,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return ResponseState::Closed,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return ResponseState::Incomplete,
            Err(error) => panic!("cannot read a response: {error}"),
        }
        let input = &self.input[..self.filled];
        if self.head.is_none() {
            self.head = memmem::find(input, b"\r\n\r\n").map(|end| ResponseHead::parse(&input[..end]));
        }
        let Some(head) = &mut self.head else { return ResponseState::Incomplete };
        let is_complete = match head.length {
            Some(length) => input.len() >= head.body + length,
            None => head.skip_chunks(input),
        };
        if is_complete { ResponseState::Complete } else { ResponseState::Incomplete }
    }

    pub(crate) fn status(&self) -> u16 {
        self.head.as_ref().map_or(0, |head| head.status)
    }

    /// Returns the response with its head. A chunked body includes the lengths of its chunks.
    pub(crate) fn response(&self) -> &[u8] {
        &self.input[..self.filled]
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(self.response()).into_owned()
    }
}

impl ResponseHead {
    fn parse(head: &[u8]) -> Self {
        let text = std::str::from_utf8(head).unwrap();
        let mut lines = text.split("\r\n");
        let status = lines.next().and_then(|line| line.get(9..12)?.parse().ok()).unwrap();
        let (mut length, mut is_chunked, mut session) = (0, false, None);
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().unwrap();
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                is_chunked = true;
            } else if name.eq_ignore_ascii_case("mcp-session-id") {
                session = Some(value.trim().to_owned());
            }
        }
        Self { status, session, body: head.len() + 4, length: (!is_chunked).then_some(length) }
    }

    /// Advances over the chunks that are complete. Returns true after the last one.
    fn skip_chunks(&mut self, input: &[u8]) -> bool {
        while let Some(end) = input.get(self.body..).and_then(|rest| memmem::find(rest, b"\r\n")) {
            let line = std::str::from_utf8(&input[self.body..self.body + end]).unwrap();
            let length = usize::from_str_radix(line, 16).unwrap();
            let next = self.body + end + 2 + length + 2;
            if input.len() < next {
                return false;
            }
            self.body = next;
            if length == 0 {
                return true;
            }
        }
        false
    }
}

/// MCP client on its own connection.
pub(crate) struct McpClient {
    pub(crate) http: HttpConnection,
    host: SocketAddr,
    path: String,
    /// Header lines of the session in each request.
    session: Option<String>,
}

/// Request of an MCP client: additional header lines, and the body.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct McpRequest {
    pub(crate) headers: String,
    pub(crate) body: String,
}

impl From<&str> for McpRequest {
    fn from(body: &str) -> Self {
        Self { headers: String::new(), body: body.to_owned() }
    }
}

impl McpClient {
    /// Connects without a session.
    pub(crate) fn connect(address: SocketAddr, path: &str) -> Self {
        Self { http: HttpConnection::open(address), host: address, path: path.to_owned(), session: None }
    }

    /// Connects and initializes a session.
    pub(crate) fn open_session(address: SocketAddr, path: &str) -> Self {
        let mut client = Self::connect(address, path);
        client.request(&INITIALIZE.into());
        let session = client.http.head.as_mut().and_then(|head| head.session.take()).unwrap();
        client.session = Some(format!("mcp-protocol-version: 2025-11-25\r\nmcp-session-id: {session}\r\n"));
        let status = client.http.exchange(&client.post(&INITIALIZED.into()));
        assert_eq!(status, 202, "{}", client.http.text());
        client
    }

    /// Returns the bytes of a request.
    pub(crate) fn post(&self, McpRequest { headers, body }: &McpRequest) -> Vec<u8> {
        let Self { host, path, session, .. } = self;
        let session = session.as_deref().unwrap_or_default();
        format!(
            "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n\
             accept: application/json, text/event-stream\r\n{session}{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    }

    /// Sends a request and returns the response with its head.
    pub(crate) fn request(&mut self, request: &McpRequest) -> String {
        let status = self.http.exchange(&self.post(request));
        assert_eq!(status, 200, "{}", self.http.text());
        self.http.text()
    }

    /// Opens another connection for the same session.
    pub(crate) fn reconnect(&mut self) {
        self.http = HttpConnection::open(self.host);
    }

    /// Ends the session. A gateway may not support this.
    pub(crate) fn close(mut self) {
        if let Self { host, path, session: Some(session), .. } = &self {
            let request = format!("DELETE {path} HTTP/1.1\r\nhost: {host}\r\n{session}\r\n");
            self.http.exchange(request.as_bytes());
        }
    }
}
