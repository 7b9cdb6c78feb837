//! A minimal client of the MCP endpoint: one connection per request.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

pub(crate) struct Client {
    /// Host and port.
    address: String,
    path: String,
    token: Option<String>,
    session: Option<String>,
}

#[derive(Debug)]
pub(crate) struct HttpResponse {
    pub(crate) status: u16,
    head: String,
    body: String,
}

impl HttpResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let line = |line: &&str| line.split_once(':').is_some_and(|(key, _)| key.eq_ignore_ascii_case(name));
        self.head.lines().find(line)?.split_once(':').map(|(_, value)| value.trim())
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Client {
    /// A client for the URL that the satellite prints.
    #[track_caller]
    pub(crate) fn new(url: &str, token: Option<&str>) -> Self {
        let (address, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
        let (address, path) = (address.to_owned(), format!("/{path}"));
        Self { address, path, token: token.map(|token| token.trim().to_owned()), session: None }
    }

    /// Changes the path.
    pub(crate) fn at(mut self, path: &str) -> Self {
        path.clone_into(&mut self.path);
        self
    }

    /// Changes the address.
    pub(crate) fn to(mut self, address: &str) -> Self {
        address.clone_into(&mut self.address);
        self
    }

    pub(crate) fn in_session(mut self, session: &str) -> Self {
        self.session = Some(session.to_owned());
        self
    }

    /// Sends one request. Fails if the connection is refused or closed without a response.
    pub(crate) fn post(&self, message: &Value) -> std::io::Result<HttpResponse> {
        let mut stream = TcpStream::connect(&self.address)?;
        let body = message.to_string();
        let token = self.token.iter().map(|token| format!("Authorization: Bearer {token}\r\n"));
        let session = self.session.iter().map(|session| format!("Mcp-Session-Id: {session}\r\n"));
        let headers: String = token.chain(session).collect();
        let (path, address) = (&self.path, &self.address);
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Accept: application/json\r\n{headers}Content-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let (head, body) = text.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.ok_or(std::io::ErrorKind::InvalidData)?;
        Ok(HttpResponse { status, head: head.to_owned(), body: body.to_owned() })
    }

    /// Sends `initialize` and stores the session.
    #[track_caller]
    pub(crate) fn initialize(&mut self) -> HttpResponse {
        let response = self.post(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
            "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "small", "version": "1"}
        }}));
        let response = response.unwrap();
        self.session = response.header("mcp-session-id").map(str::to_owned);
        response
    }

    /// Calls a tool and returns the response with any status.
    #[track_caller]
    pub(crate) fn call_anyway(&self, tool: &str, arguments: &Value) -> HttpResponse {
        let params = json!({"name": tool, "arguments": arguments});
        self.post(&json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params})).unwrap()
    }

    /// Calls a tool and returns the JSON-RPC response. Panics unless the status is 200.
    #[track_caller]
    pub(crate) fn call(&self, tool: &str, arguments: &Value) -> Value {
        let response = self.call_anyway(tool, arguments);
        assert_eq!(response.status, 200, "{response:?}");
        response.json()
    }
}
