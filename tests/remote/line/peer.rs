//! A scripted HTTP/1.1 server: the test receives each request and writes the response, byte by byte if it wants.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// A server whose requests are answered by the test. Dropping it closes its port.
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    requests: mpsc::UnboundedReceiver<PendingRequest>,
    connections: watch::Receiver<(usize, usize)>,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

struct Shared {
    requests: mpsc::UnboundedSender<PendingRequest>,
    /// The numbers of open connections and of all connections so far.
    connections: watch::Sender<(usize, usize)>,
    dead: watch::Sender<bool>,
}

/// An open connection.
struct Connection {
    stream: TcpStream,
    shared: Arc<Shared>,
    buffer: Vec<u8>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.connections.send_modify(|(open, _)| *open -= 1);
    }
}

impl Peer {
    pub(crate) async fn new() -> Self {
        Self::on(0).await
    }

    pub(crate) async fn on(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, requests) = mpsc::unbounded_channel();
        let (count, connections) = watch::channel((0, 0));
        let shared = Arc::new(Shared { requests: sender, connections: count, dead: watch::Sender::new(false) });
        let accepts = Arc::clone(&shared);
        let accepting = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                accepts.connections.send_modify(|(open, total)| (*open, *total) = (*open + 1, *total + 1));
                serve(Connection { stream, shared: Arc::clone(&accepts), buffer: Vec::new() });
            }
        });
        Self { address, requests, connections, shared, accepting }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Waits for the next request on any connection.
    pub(crate) async fn next(&mut self) -> PendingRequest {
        self.requests.recv().await.unwrap()
    }

    /// Returns whether a request waits.
    pub(crate) fn has_request(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections_made(&self) -> usize {
        self.connections.borrow().1
    }

    /// Waits until all connections are closed.
    pub(crate) async fn wait_disconnected(&mut self) {
        self.connections.wait_for(|(open, _)| *open == 0).await.unwrap();
    }

    /// Stops listening and closes idle connections. Connections of pending requests stay open until the test drops
    /// them.
    pub(crate) async fn die(&mut self) {
        self.shared.dead.send_replace(true);
        self.accepting.abort();
        assert!((&mut self.accepting).await.unwrap_err().is_cancelled());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Reads one request and passes it to the test, unless the peer dies.
fn serve(connection: Connection) {
    let mut dead = connection.shared.dead.subscribe();
    tokio::spawn(async move {
        tokio::select! {
            _ = dead.wait_for(|dead| *dead) => {}
            () = read(connection) => {}
        }
    });
}

async fn read(mut connection: Connection) {
    let head_end = loop {
        if let Some(at) = connection.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        if !connection.fill().await {
            return;
        }
    };
    let head = String::from_utf8(connection.buffer.drain(..head_end + 4).collect()).unwrap();
    let mut lines = head.trim_end().split("\r\n");
    let mut request = lines.next().unwrap().split(' ').map(str::to_owned);
    let (method, target) = (request.next().unwrap(), request.next().unwrap());
    let headers = lines.map(|line| {
        let (name, value) = line.split_once(": ").unwrap();
        (name.to_ascii_lowercase(), value.to_owned())
    });
    let headers: Vec<_> = headers.collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length = length.map_or(0, |(_, length)| length.parse().unwrap());
    while connection.buffer.len() < length {
        if !connection.fill().await {
            return;
        }
    }
    let body = String::from_utf8(connection.buffer.drain(..length).collect()).unwrap();
    let shared = Arc::clone(&connection.shared);
    // An error means that the test has ended.
    let _ = shared.requests.send(PendingRequest { method, target, headers, body, connection });
}

impl Connection {
    async fn fill(&mut self) -> bool {
        let mut chunk = [0; 4096];
        match self.stream.read(&mut chunk).await {
            Ok(0) | Err(_) => false,
            Ok(length) => {
                self.buffer.extend_from_slice(&chunk[..length]);
                true
            }
        }
    }

    async fn write(&mut self, bytes: &[u8]) {
        // An error means that the client has disconnected. The test checks whether it may.
        let _ = self.stream.write_all(bytes).await;
    }
}

/// A request that waits for a response. Dropping it closes its connection.
pub(crate) struct PendingRequest {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
    connection: Connection,
}

impl PendingRequest {
    /// Returns the value of a header. Panics if the header occurs twice.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str());
        let value = values.next();
        assert_eq!(values.next(), None, "{name} occurs twice");
        value
    }

    /// Returns `method target`.
    pub(crate) fn line(&self) -> String {
        format!("{} {}", self.method, self.target)
    }

    /// Returns a member of the message.
    pub(crate) fn member(&self, member: &str) -> serde_json::Value {
        serde_json::from_str::<serde_json::Value>(&self.body).unwrap()[member].clone()
    }

    /// Responds and waits for the next request on the same connection.
    pub(crate) async fn answer(mut self, status: u16, headers: &[(&str, &str)], body: &str) {
        let headers = head(headers);
        let answer = format!("HTTP/1.1 {status} Said\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
        self.connection.write(answer.as_bytes()).await;
        serve(self.connection);
    }

    pub(crate) async fn json(self, body: &str) {
        self.answer(200, &[("content-type", "application/json")], body).await;
    }

    /// Responds with an empty result.
    pub(crate) async fn result(self) {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{},"result":{{}}}}"#, self.member("id"));
        self.json(&body).await;
    }

    pub(crate) async fn accepted(self) {
        assert_eq!(self.method, "POST");
        self.answer(202, &[], "").await;
    }

    /// Writes bytes unchanged.
    pub(crate) async fn write_raw(mut self, bytes: &str) -> OpenResponse {
        self.connection.write(bytes.as_bytes()).await;
        OpenResponse(self.connection)
    }

    /// Begins a stream of events.
    pub(crate) async fn stream(self, headers: &[(&str, &str)]) -> OpenResponse {
        let headers = head(headers);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n";
        self.write_raw(&format!("{head}{headers}transfer-encoding: chunked\r\n\r\n")).await
    }

    /// Waits until the client closes the connection.
    pub(crate) async fn closed(mut self) {
        while self.connection.fill().await {}
    }
}

/// An incomplete response. Dropping it closes its connection.
pub(crate) struct OpenResponse(Connection);

impl OpenResponse {
    pub(crate) async fn chunk(&mut self, text: &str) {
        self.0.write(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await;
    }

    /// Writes a chunk again and again until the client closes the connection.
    pub(crate) async fn endlessly(&mut self, text: &str) {
        let text = format!("{:x}\r\n{text}\r\n", text.len());
        while self.0.stream.write_all(text.as_bytes()).await.is_ok() {}
    }

    /// Ends the response regularly and waits for the next request on the same connection.
    pub(crate) async fn end(mut self) {
        self.0.write(b"0\r\n\r\n").await;
        serve(self.0);
    }

    /// Waits until the client closes the connection.
    pub(crate) async fn closed(mut self) {
        while self.0.fill().await {}
    }
}

fn head(headers: &[(&str, &str)]) -> String {
    headers.iter().flat_map(|(name, value)| [name, ": ", value, "\r\n"]).collect()
}
