//! A minimal HTTP/1.1 server side that can break the protocol at every point.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The maximum size of a request's head and body.
const REQUEST_MAX: usize = 4 << 20;

/// Headers in their order; received names are in lower case.
pub(super) type Headers = Vec<(String, String)>;

/// The transport of a connection, with or without TLS.
pub(super) trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<W: AsyncRead + AsyncWrite + Send + Unpin> Wire for W {}

/// The server side of a connection.
pub(super) struct Exchange {
    wire: Box<dyn Wire>,
    read: Vec<u8>,
    /// Whether the connection closes after the response, which announces it.
    pub(super) closes: bool,
}

/// A received request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) query: Option<String>,
    pub(super) headers: Headers,
    pub(super) body: Vec<u8>,
}

/// The reason why there is no request.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The client has closed the connection.
    Closed,
    /// The bytes are not HTTP.
    Malformed,
}

impl From<io::Error> for ReadError {
    fn from(_: io::Error) -> Self {
        Self::Closed
    }
}

impl Exchange {
    pub(super) fn new(wire: Box<dyn Wire>) -> Self {
        Self { wire, read: Vec::new(), closes: false }
    }

    /// Reads the next request completely.
    pub(super) async fn request(&mut self) -> Result<Request, ReadError> {
        let head_end = loop {
            if let Some(at) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                break at;
            }
            // The client uses TLS or an unknown protocol.
            if self.read.first().is_some_and(|byte| !byte.is_ascii_uppercase()) || self.read.len() > REQUEST_MAX {
                return Err(ReadError::Malformed);
            }
            self.more().await?;
        };
        let head = std::str::from_utf8(&self.read[..head_end]).map_err(|_| ReadError::Malformed)?;
        let (method, target, headers) = parsed(head).ok_or(ReadError::Malformed)?;
        let length = headers.iter().find(|(name, _)| name == "content-length");
        let length: usize = length.map_or(Ok(0), |(_, value)| value.parse()).map_err(|_| ReadError::Malformed)?;
        if length > REQUEST_MAX || headers.iter().any(|(name, _)| name == "transfer-encoding") {
            return Err(ReadError::Malformed);
        }
        let body_at = head_end + 4;
        while self.read.len() < body_at + length {
            self.more().await?;
        }
        let rest = self.read.split_off(body_at + length);
        let body = std::mem::replace(&mut self.read, rest).split_off(body_at);
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path.to_owned(), Some(query.to_owned())),
            None => (target, None),
        };
        Ok(Request { method, path, query, headers, body })
    }

    async fn more(&mut self) -> io::Result<()> {
        if self.wire.read_buf(&mut self.read).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// Resolves when the client closes the connection. Bytes received before stay in the buffer.
    pub(super) async fn closed(&mut self) {
        while self.more().await.is_ok() {}
    }

    /// Writes and flushes bytes unchanged.
    pub(super) async fn write(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.wire.write_all(bytes.as_ref()).await?;
        self.wire.flush().await
    }

    /// Writes only the head. The body ends by `transfer-encoding` or with the connection.
    pub(super) async fn head(&mut self, status: u16, headers: &[(String, String)]) -> io::Result<()> {
        self.write(head(status, &self.with_connection(headers))).await
    }

    /// Writes one chunk of a chunked body.
    pub(super) async fn chunk(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
        chunk.extend_from_slice(bytes);
        chunk.extend_from_slice(b"\r\n");
        self.write(chunk).await
    }

    /// Writes the end of a chunked body.
    pub(super) async fn last_chunk(&mut self) -> io::Result<()> {
        self.write("0\r\n\r\n").await
    }

    /// Writes a complete response.
    pub(super) async fn answer(&mut self, status: u16, headers: &[(String, String)], body: &[u8]) -> io::Result<()> {
        self.write(whole(status, &self.with_connection(headers), body)).await
    }

    fn with_connection(&self, headers: &[(String, String)]) -> Headers {
        let close = self.closes.then(|| ("connection".to_owned(), "close".to_owned()));
        headers.iter().cloned().chain(close).collect()
    }
}

fn parsed(head: &str) -> Option<(String, String, Headers)> {
    let mut lines = head.split("\r\n");
    let mut words = lines.next()?.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    words.next().filter(|version| version.starts_with("HTTP/1."))?;
    let header = |line: &str| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    };
    Some((method, target, lines.map(header).collect::<Option<_>>()?))
}

fn head(status: u16, headers: &[(String, String)]) -> String {
    let lines: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("HTTP/1.1 {status} As-Told\r\n{}\r\n", lines.concat())
}

/// Returns a complete response as bytes.
pub(super) fn whole(status: u16, headers: &[(String, String)], body: &[u8]) -> Vec<u8> {
    let length = ("content-length".to_owned(), body.len().to_string());
    let mut bytes = head(status, &[headers, &[length]].concat()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// Returns headers from literals.
pub(super) fn headers(pairs: &[(&str, &str)]) -> Headers {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Returns one event of a stream.
pub(super) fn event(name: &str, data: &str) -> Vec<u8> {
    format!("event: {name}\ndata: {data}\n\n").into_bytes()
}
