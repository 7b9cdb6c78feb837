//! A minimal HTTP client: it exposes what is on the wire.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpSocket;

/// The byte stream of a connection.
pub(crate) trait Io: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

/// One HTTP connection.
pub(crate) struct Client {
    io: BufReader<Box<dyn Io>>,
    /// Address of the endpoint.
    pub address: SocketAddr,
    pub local_address: SocketAddr,
    pub token: Option<String>,
    pub session: Option<String>,
    pub path: String,
    /// Additional headers of every request.
    pub extra: Vec<(String, String)>,
}

/// Status and headers of a response.
#[derive(Debug, Clone)]
pub(crate) struct ResponseHead {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

impl ResponseHead {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn is_stream(&self) -> bool {
        self.header("content-type") == Some("text/event-stream")
    }
}

/// A complete response.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub head: ResponseHead,
    pub body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// One server-sent event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Event {
    pub id: String,
    pub retry: Option<u64>,
    pub data: String,
}

impl Event {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|error| panic!("{error}: {}", self.data))
    }
}

pub(crate) fn request(id: impl Into<Value>, method: &str, params: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id.into(), "method": method, "params": params})
}

pub(crate) fn notification(method: &str, params: Value) -> Value {
    json!({"jsonrpc": "2.0", "method": method, "params": params})
}

pub(crate) fn initialize(version: &str) -> Value {
    let params = json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}});
    request(0, "initialize", params)
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::try_connect(address).await.unwrap()
    }

    /// # Errors
    ///
    /// Nothing listens at the address.
    pub(crate) async fn try_connect(address: SocketAddr) -> io::Result<Self> {
        Self::try_connect_from(Ipv4Addr::LOCALHOST, address).await
    }

    /// Connects from the given local address. Many connections need several addresses: a closed connection blocks its
    /// port for a minute.
    pub(crate) async fn try_connect_from(local_address: Ipv4Addr, address: SocketAddr) -> io::Result<Self> {
        let socket = TcpSocket::new_v4()?;
        if local_address != Ipv4Addr::LOCALHOST {
            socket.bind(SocketAddr::from((local_address, 0)))?;
        }
        let io = socket.connect(address).await?;
        io.set_nodelay(true)?;
        let local_address = io.local_addr()?;
        Ok(Self::over(Box::new(io), address, local_address))
    }

    /// Wraps an open connection.
    pub(crate) fn over(io: Box<dyn Io>, address: SocketAddr, local_address: SocketAddr) -> Self {
        let (token, path) = (Some("alice-token".to_owned()), "/mcp".to_owned());
        Self { io: BufReader::new(io), address, local_address, token, session: None, path, extra: Vec::new() }
    }

    /// Another connection in the same session.
    pub(crate) async fn second_connection(&self) -> Self {
        let other = Self::connect(self.address).await;
        let (token, session, path) = (self.token.clone(), self.session.clone(), self.path.clone());
        Self { token, session, path, extra: self.extra.clone(), ..other }
    }

    /// Connects and opens a session.
    pub(crate) async fn initialized(address: SocketAddr, version: &str) -> Self {
        let mut client = Self::connect(address).await;
        client.open_session(version).await;
        client
    }

    pub(crate) async fn open_session(&mut self, version: &str) {
        let answer = self.post(&initialize(version)).await;
        assert_eq!(answer.head.status, 200, "{answer:?}");
        self.session = answer.head.header("mcp-session-id").map(str::to_owned);
        assert!(self.session.is_some());
    }

    /// The status of an `echo` request.
    pub(crate) async fn echo(&mut self) -> u16 {
        self.post(&request("echo", "echo", json!(1))).await.head.status
    }

    pub(crate) async fn send_raw(&mut self, bytes: &[u8]) {
        assert!(self.try_send(bytes).await, "the connection is closed");
    }

    /// Returns whether the bytes could be written.
    pub(crate) async fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.io.get_mut().write_all(bytes).await.is_ok()
    }

    /// Sends a request. A given header replaces the default one; an empty value removes it.
    pub(crate) async fn send(&mut self, method: &str, headers: &[(&str, &str)], body: &str) {
        let mut usual = vec![("host", "localhost".to_owned())];
        usual.push(("accept", "application/json, text/event-stream".to_owned()));
        if !body.is_empty() {
            usual.push(("content-type", "application/json".to_owned()));
            usual.push(("content-length", body.len().to_string()));
        }
        if let Some(token) = &self.token {
            usual.push(("authorization", format!("Bearer {token}")));
        }
        if let Some(session) = &self.session {
            usual.push(("mcp-session-id", session.clone()));
        }
        let mut text = format!("{method} {} HTTP/1.1\r\n", self.path);
        for (name, value) in usual {
            if !headers.iter().any(|(given, _)| *given == name) {
                text.extend([name, ": ", &value, "\r\n"]);
            }
        }
        let extra = self.extra.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in headers.iter().copied().chain(extra).filter(|(_, value)| !value.is_empty()) {
            text.extend([name, ": ", value, "\r\n"]);
        }
        text += "\r\n";
        text += body;
        self.send_raw(text.as_bytes()).await;
    }

    pub(crate) async fn read_until_closed(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // A reset counts as the end.
        let _ = self.io.read_to_end(&mut rest).await;
        rest
    }

    async fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.io.read_line(&mut line).await.ok()?;
        (read > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned())
    }

    /// The head of the next response; `None` if the connection is closed.
    pub(crate) async fn try_head(&mut self) -> Option<ResponseHead> {
        let line = self.line().await?;
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {line}"));
        let mut headers = Vec::new();
        loop {
            let line = self.line().await?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        Some(ResponseHead { status, headers })
    }

    pub(crate) async fn head(&mut self) -> ResponseHead {
        self.try_head().await.expect("the connection was closed")
    }

    /// The next chunk of a chunked body; `None` at its end or if the connection is closed.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(&self.line().await?, 16).unwrap();
        let mut chunk = vec![0; size];
        self.io.read_exact(&mut chunk).await.ok()?;
        self.line().await?;
        (size > 0).then_some(chunk)
    }

    pub(crate) async fn body(&mut self, head: &ResponseHead) -> String {
        let mut body = Vec::new();
        if head.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk().await {
                body.extend(chunk);
            }
        } else {
            let length = head.header("content-length").map_or(0, |length| length.parse().unwrap());
            body.resize(length, 0);
            self.io.read_exact(&mut body).await.unwrap();
        }
        String::from_utf8(body).unwrap()
    }

    /// Sends a request and reads the complete response.
    pub(crate) async fn ask(&mut self, method: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send(method, headers, body).await;
        let head = self.head().await;
        let body = self.body(&head).await;
        Answer { head, body }
    }

    pub(crate) async fn post(&mut self, message: &Value) -> Answer {
        self.ask("POST", &[], &message.to_string()).await
    }

    /// Sends a request whose response must be a stream, and reads its head.
    pub(crate) async fn open(&mut self, method: &str, headers: &[(&str, &str)], body: &str) -> ResponseHead {
        self.send(method, headers, body).await;
        let head = self.head().await;
        assert!(head.status == 200 && head.is_stream(), "{head:?}");
        head
    }

    /// The next event of a stream; `None` at its end. The endpoint writes each event as one chunk.
    pub(crate) async fn event(&mut self) -> Option<Event> {
        loop {
            let chunk = String::from_utf8(self.chunk().await?).unwrap();
            if chunk.starts_with(':') {
                continue;
            }
            let mut event = Event::default();
            for line in chunk.trim_end_matches('\n').split('\n') {
                match line.split_once(": ").unwrap_or((line.trim_end_matches(':'), "")) {
                    ("id", id) => id.clone_into(&mut event.id),
                    ("retry", retry) => event.retry = retry.parse().ok(),
                    ("data", data) => event.data += data,
                    other => panic!("{other:?} in {chunk:?}"),
                }
            }
            return Some(event);
        }
    }
}

/// The default `_meta` of a stateless client.
pub(crate) fn meta(capabilities: &Value) -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    })
}

/// A client of the era without sessions.
pub(crate) struct StatelessClient {
    pub client: Client,
    pub capabilities: Value,
    /// Additional members of `_meta`.
    pub extra_meta: Value,
    last_id: u64,
}

impl StatelessClient {
    pub(crate) async fn connect(address: SocketAddr, path: &str) -> Self {
        let mut client = Client::connect(address).await;
        path.clone_into(&mut client.path);
        Self { client, capabilities: json!({}), extra_meta: json!({}), last_id: 0 }
    }

    /// The same client on another connection, with other ids.
    pub(crate) async fn second_connection(&self) -> Self {
        let (client, last_id) = (self.client.second_connection().await, self.last_id + 1000);
        Self { client, capabilities: self.capabilities.clone(), extra_meta: self.extra_meta.clone(), last_id }
    }

    /// Sends a request with its `_meta` and headers, and returns its id.
    pub(crate) async fn send(&mut self, method: &str, params: Value) -> u64 {
        self.last_id += 1;
        let mut params = params;
        let mut local_address = meta(&self.capabilities);
        let extra_meta = [self.extra_meta.clone(), params["_meta"].take()];
        for (name, value) in extra_meta.iter().filter_map(Value::as_object).flatten() {
            local_address[name] = value.clone();
        }
        params["_meta"] = local_address;
        let name = [&params["name"], &params["uri"]].into_iter().find_map(Value::as_str).unwrap_or_default().to_owned();
        let headers = [("mcp-protocol-version", "2026-07-28"), ("mcp-method", method), ("mcp-name", &name)];
        self.client.send("POST", &headers, &request(self.last_id, method, params).to_string()).await;
        self.last_id
    }

    /// Sends a request and reads its response, which must be a single message.
    pub(crate) async fn ask(&mut self, method: &str, params: Value) -> Answer {
        let id = self.send(method, params).await;
        let head = self.client.head().await;
        let body = self.client.body(&head).await;
        let answer = Answer { head, body };
        assert_eq!(answer.head.header("mcp-session-id"), None);
        if !answer.body.contains("1e400") {
            assert_eq!(answer.json()["id"], id, "{answer:?}");
        }
        answer
    }

    /// Sends a request and returns its result.
    pub(crate) async fn result(&mut self, method: &str, params: Value) -> Value {
        let answer = self.ask(method, params).await;
        assert_eq!(answer.head.status, 200, "{answer:?}");
        let answer = answer.json();
        assert!(answer["result"].is_object(), "{answer}");
        answer["result"].clone()
    }

    /// Sends a request whose response must be a stream, and returns its id.
    pub(crate) async fn open(&mut self, method: &str, params: Value) -> u64 {
        let id = self.send(method, params).await;
        let head = self.client.head().await;
        assert!(head.status == 200 && head.is_stream(), "{head:?}");
        id
    }

    /// The next message of a stream. Stateless streams cannot be resumed, so events have neither id nor retry.
    pub(crate) async fn next_message(&mut self) -> Option<Value> {
        let event = self.client.event().await?;
        assert!(event.id.is_empty() && event.retry.is_none(), "{event:?}");
        Some(event.json())
    }
}
