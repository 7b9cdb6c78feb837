//! A scripted HTTP/1.1 server: each request is handed to the test, which answers it as it likes, byte by byte.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// A server whose requests are answered by the test. Dropping it closes its port.
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    asked: mpsc::UnboundedReceiver<Asked>,
    connections: watch::Receiver<(usize, usize)>,
    home: Arc<Home>,
    accepting: JoinHandle<()>,
}

struct Home {
    asked: mpsc::UnboundedSender<Asked>,
    /// Connections that are there, and that ever were.
    connections: watch::Sender<(usize, usize)>,
    dead: watch::Sender<bool>,
}

/// A connection, as long as somebody holds it.
struct Connection {
    stream: TcpStream,
    home: Arc<Home>,
    buffer: Vec<u8>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.home.connections.send_modify(|(there, _)| *there -= 1);
    }
}

impl Peer {
    pub(crate) async fn new() -> Self {
        Self::on(0).await
    }

    pub(crate) async fn on(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, asked) = mpsc::unbounded_channel();
        let (count, connections) = watch::channel((0, 0));
        let home = Arc::new(Home { asked: sender, connections: count, dead: watch::Sender::new(false) });
        let accepts = Arc::clone(&home);
        let accepting = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                accepts.connections.send_modify(|(there, ever)| (*there, *ever) = (*there + 1, *ever + 1));
                serve(Connection { stream, home: Arc::clone(&accepts), buffer: Vec::new() });
            }
        });
        Self { address, asked, connections, home, accepting }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The next request, whatever its connection.
    pub(crate) async fn next(&mut self) -> Asked {
        self.asked.recv().await.unwrap()
    }

    /// Whether a request has come.
    pub(crate) fn was_asked(&self) -> bool {
        !self.asked.is_empty()
    }

    /// How many connections were ever made.
    pub(crate) fn connections_ever(&self) -> usize {
        self.connections.borrow().1
    }

    /// Nobody is connected any more.
    pub(crate) async fn deserted(&mut self) {
        self.connections.wait_for(|(there, _)| *there == 0).await.unwrap();
    }

    /// Nobody listens there any more, and idle connections are closed. What the test holds is for the test to drop.
    pub(crate) async fn die(&mut self) {
        self.home.dead.send_replace(true);
        self.accepting.abort();
        assert!((&mut self.accepting).await.unwrap_err().is_cancelled());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Reads one request and hands it over, unless the peer dies.
fn serve(connection: Connection) {
    let mut dead = connection.home.dead.subscribe();
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
    let home = Arc::clone(&connection.home);
    // An error says that the test is over.
    let _ = home.asked.send(Asked { method, target, headers, body, connection });
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
        // An error says that nobody listens: the test will say whether it should.
        let _ = self.stream.write_all(bytes).await;
    }
}

/// A request that waits for an answer. Dropping it closes its connection.
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
    connection: Connection,
}

impl Asked {
    /// A header, if it is there; it must not be there twice.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(its, _)| its == name).map(|(_, value)| value.as_str());
        let value = values.next();
        assert_eq!(values.next(), None, "{name} is there twice");
        value
    }

    /// `method target`.
    pub(crate) fn line(&self) -> String {
        format!("{} {}", self.method, self.target)
    }

    /// The member of the message.
    pub(crate) fn says(&self, member: &str) -> serde_json::Value {
        serde_json::from_str::<serde_json::Value>(&self.body).unwrap()[member].clone()
    }

    /// Answers, and waits for the next request on the same connection.
    pub(crate) async fn answer(mut self, status: u16, headers: &[(&str, &str)], body: &str) {
        let headers = head(headers);
        let answer = format!("HTTP/1.1 {status} Said\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
        self.connection.write(answer.as_bytes()).await;
        serve(self.connection);
    }

    pub(crate) async fn json(self, body: &str) {
        self.answer(200, &[("content-type", "application/json")], body).await;
    }

    /// The empty result of this request.
    pub(crate) async fn result(self) {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{},"result":{{}}}}"#, self.says("id"));
        self.json(&body).await;
    }

    pub(crate) async fn accepted(self) {
        assert_eq!(self.method, "POST");
        self.answer(202, &[], "").await;
    }

    /// Says this, whatever it is, and nothing else.
    pub(crate) async fn say(mut self, bytes: &str) -> Saying {
        self.connection.write(bytes.as_bytes()).await;
        Saying(self.connection)
    }

    /// Begins a stream of events.
    pub(crate) async fn stream(self, headers: &[(&str, &str)]) -> Saying {
        let headers = head(headers);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n";
        self.say(&format!("{head}{headers}transfer-encoding: chunked\r\n\r\n")).await
    }

    /// The client has closed the connection.
    pub(crate) async fn closed(mut self) {
        while self.connection.fill().await {}
    }
}

/// An answer that goes on. Dropping it breaks it off.
pub(crate) struct Saying(Connection);

impl Saying {
    pub(crate) async fn chunk(&mut self, text: &str) {
        self.0.write(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await;
    }

    /// Says this for as long as somebody listens.
    pub(crate) async fn endlessly(&mut self, text: &str) {
        let text = format!("{:x}\r\n{text}\r\n", text.len());
        while self.0.stream.write_all(text.as_bytes()).await.is_ok() {}
    }

    /// Ends it as it should be ended, and waits for the next request on the same connection.
    pub(crate) async fn end(mut self) {
        self.0.write(b"0\r\n\r\n").await;
        serve(self.0);
    }

    /// The client has closed the connection.
    pub(crate) async fn closed(mut self) {
        while self.0.fill().await {}
    }
}

fn head(headers: &[(&str, &str)]) -> String {
    headers.iter().flat_map(|(name, value)| [name, ": ", value, "\r\n"]).collect()
}
